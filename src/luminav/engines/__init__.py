"""The engines, and the one place that picks among them."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import subprocess
from collections.abc import Sequence

import torch
from torch import Tensor

from luminav.engines.batch import Batch, Engine, Scales, TensorStep
from luminav.engines.compiled import CompiledEngine
from luminav.engines.foreach import ForeachEngine
from luminav.engines.single import SingleEngine

__all__ = [
    "Batch",
    "Engine",
    "Scales",
    "TensorStep",
    "able_engine",
    "choose_engine",
    "counts_on_device",
    "give_up_triton",
    "triton_errors",
    "why_not_triton",
]

logger = logging.getLogger("luminav")

_single, _foreach, _compiled = SingleEngine(), ForeachEngine(), CompiledEngine()
_given_up: dict[str, str] = {}  # device type to why its Triton kernels could not be compiled
_logged: set[str] = set()


def choose_engine(execution: str, device: torch.device) -> Engine:
    """The engine that serves parameters on `device`.

    Args:
        execution: The option ``execution``, already checked.
        device: Where the parameters live.

    Returns:
        The engine. "auto" is "triton" on accelerators where Triton runs, else "foreach".

    Raises:
        RuntimeError: The engine asked for cannot run here.
    """
    if device.type == "meta":
        raise RuntimeError("a step needs real tensors, but a parameter is on the meta device. Materialise it first.")
    if execution == "single":
        return _single
    if execution == "compile":
        return _compiled
    if execution == "foreach" or (execution == "auto" and device.type == "cpu"):
        return _foreach
    reason = why_not_triton(device)
    if execution == "triton" and reason is not None:
        raise RuntimeError(
            f"execution='triton' cannot run here: {reason}. Use execution='auto', which picks 'foreach'."
        )
    if device.type not in _logged:
        _logged.add(device.type)
        logger.info(
            "%s: the %s engine%s", device.type, "foreach" if reason else "triton", f", since {reason}" if reason else ""
        )
    return _foreach if reason is not None else _triton()


def counts_on_device(execution: str, device: torch.device) -> bool:
    """Whether the engine that serves `device` keeps step counts there."""
    return device.type != "meta" and choose_engine(execution, device).numbers_on_device


def able_engine(
    engine: Engine, tensors: Sequence[Tensor], first_index: int, consecutive: bool, in_blocks: bool, in_tiles: bool
) -> Engine:
    """`engine`, or the foreach engine, to the same result, where that cannot take a tensor as it lies.

    Args:
        engine: The engine chosen for the device.
        tensors: The local parameter, its gradient, and its state but single numbers.
        first_index: Row-major index of its first element in the unsharded parameter.
        consecutive: Whether its elements are consecutive there.
        in_blocks: Whether state is kept in blocks, for which the compiled engine has no graphs.
        in_tiles: Whether a variance of tiles is.
    """
    if not engine.numbers_on_device:
        return _foreach if in_blocks and engine.name == "compile" else engine
    from luminav.engines.triton import addressable

    return engine if addressable(tensors, first_index, consecutive, in_tiles) else _foreach


@functools.cache
def _triton() -> Engine:
    from luminav.engines.triton import TritonEngine

    return TritonEngine()


def why_not_triton(device: torch.device) -> str | None:
    """Why the Triton engine cannot serve `device`; None if it can."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton's kernels need an accelerator, and a parameter is on the CPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install '.[triton]')"
    if device.type in _given_up:
        return _given_up[device.type]
    from luminav.engines.triton import unavailable

    return unavailable(device)


def give_up_triton(device: torch.device, reason: str) -> None:
    """Let "auto" pick another engine for this device type from now on."""
    _given_up[device.type] = reason


def triton_errors() -> tuple[type[Exception], ...]:
    """What Triton raises when it cannot compile: its own errors, and those of the compilers that it starts."""
    from triton import TritonError

    return (TritonError, RuntimeError, OSError, subprocess.SubprocessError)
