"""Run a script where torchvision and torch are not of one build: python tests/integrations/script.py SCRIPT [ARGUMENT…]

timm needs torchvision; transformers and Lightning import it if it is there. The wheel of the default index is built for
CUDA, and beside a CPU build of torch it fails on import, since its operators cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys

import torch

OPERATORS = ("nms", "qnms")  # in the order in which torchvision asks for them


def make_torchvision_importable() -> None:
    """Declare the operators that importing torchvision asks for, where its library does not load. None is called."""
    if importlib.util.find_spec("torchvision") is None:
        return
    for operator in OPERATORS:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            if f"torchvision::{operator} does not exist" in str(error):
                torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float iou) -> Tensor")


if __name__ == "__main__":
    make_torchvision_importable()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
