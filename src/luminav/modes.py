"""The modes of torch that a step is taken in, whatever the caller's are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu")


def ordinary_mode() -> AbstractContextManager[Any]:
    """:func:`out_of_other_modes`, for every step: what is off already is left alone."""
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)):
        return out_of_other_modes()
    return torch.no_grad()


@contextmanager
def out_of_other_modes() -> Iterator[None]:
    """No autograd, no inference mode, in which state could not be made for steps outside it, and no autocast.

    The rule says in which dtype it is worked out, and autocast cannot concatenate FP64 tensors.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
