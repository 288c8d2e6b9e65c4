"""Settings that the libraries read when they are imported."""

from __future__ import annotations

import os

import script

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made from a configuration: whatever asks for a network is a fault
script.make_torchvision_importable()
