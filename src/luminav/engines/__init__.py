"""The engines, and the one place that picks among them."""

from __future__ import annotations

import logging

import torch

from luminav.engines.batch import Batch, Engine, Scales, TensorStep
from luminav.engines.foreach import ForeachEngine
from luminav.engines.single import SingleEngine

__all__ = ["Batch", "Engine", "Scales", "TensorStep", "choose_engine"]

logger = logging.getLogger("luminav")

_ENGINES: dict[str, Engine] = {"single": SingleEngine(), "foreach": ForeachEngine()}


def choose_engine(execution: str, device: torch.device) -> Engine:
    """The engine that serves parameters on `device`.

    Args:
        execution: The option ``execution``, already checked.
        device: Where the parameters live.

    Returns:
        The engine; "auto" is "foreach" everywhere for now.

    Raises:
        RuntimeError: The engine asked for cannot run here.
    """
    if execution == "triton":
        raise RuntimeError(
            "execution='triton' is not available in this release: the Triton engine is not there yet. "
            "Use execution='auto', which picks 'foreach'."
        )
    if device.type == "meta":
        raise RuntimeError("a step needs real tensors, but a parameter is on the meta device. Materialise it first.")
    return _ENGINES["foreach" if execution == "auto" else execution]
