"""Gradient release: each parameter is stepped, and its gradient freed, as soon as backward has finished it.

The optimizer's scales are per tensor, so a parameter's step needs no other parameter's gradient, and the result is that
of an ordinary step to the last bit. Backward and step in one is an old idea, spread by LOMO (Lv et al. 2023,
arXiv 2306.09782).

Small parameters are stepped together, in buckets that are fixed beforehand: the same on every rank, so that the
collectives of sharded parameters meet, and few enough that the host keeps up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from luminav.optimizer import LuminaV
from luminav.stepper import Share

BUCKET = 1 << 22
"""Least elements of a full bucket: a launch has work for the whole GPU."""
MOST_BUCKETS = 64
"""About so many at most, so that the host keeps up with backward: a 64th of the gradients waits."""


class ReleaseHandle:
    """What :func:`enable_gradient_release` returns."""

    def __init__(self, optimizer: LuminaV) -> None:
        self._optimizer = optimizer
        self._keeping = False
        self._buckets = [_Bucket(share) for share in _shares(optimizer)]
        self._of = {param: bucket for bucket in self._buckets for param in bucket.share.params}
        self._stepped: set[Tensor] = set()  # since the last optimizer.step()
        self._watching = False
        self._hooks = [param.register_post_accumulate_grad_hook(self._ready) for param in self._of]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of the backward passes inside: for all micro-batches but the last."""
        before, self._keeping = self._keeping, True
        try:
            yield
        finally:
            self._keeping = before

    def remove(self) -> None:
        """End gradient release; gradients that are there wait for ``optimizer.step()``. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._optimizer._stepper.release = None

    def end_pass(self) -> None:
        """``optimizer.step()`` was called: every parameter may take its next step."""
        self._stepped.clear()

    # ---- what the hooks do -------------------------------------------------------------------------------------------

    def _ready(self, param: Tensor) -> None:
        """Backward has finished the gradient of `param`."""
        if self._keeping:
            return
        if not self._watching:
            self._watching = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        if param in self._stepped:
            raise RuntimeError(
                "gradient release: a parameter got a second gradient since optimizer.step(), its step is taken. Call "
                "optimizer.step() after every backward pass, as without release; put all micro-batches but the last in "
                "`with handle.accumulate():`; checkpoint activations with use_reentrant=False."
            )
        bucket = self._of[param]
        bucket.waiting.discard(param)
        if not bucket.waiting:
            self._step(bucket)

    def _step(self, bucket: _Bucket) -> None:
        params = [param for param in bucket.share.params if param.grad is not None]
        bucket.waiting = set(bucket.share.params)
        self._optimizer._step(bucket.share)
        for param in params:
            param.grad = None
        self._stepped.update(params)

    def _end_of_backward(self) -> None:
        """Step the buckets of which some parameters got no gradient."""
        try:
            for bucket in self._buckets:
                if len(bucket.waiting) < len(bucket.share.params):
                    self._step(bucket)
        finally:
            self._watching = False
            for bucket in self._buckets:
                bucket.waiting = set(bucket.share.params)


class _Bucket:
    """Parameters that are stepped together."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.waiting = set(share.params)


def _shares(optimizer: LuminaV) -> list[Share]:
    """The parameters that are trained, in the order of the optimizer, a new share when one is full."""
    shares: list[Share] = []
    numel = sum(param.numel() for group in optimizer.param_groups for param in group["params"] if param.requires_grad)
    limit = max(BUCKET, numel // MOST_BUCKETS)
    held = limit
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not param.requires_grad:
                continue
            if held + param.numel() > limit:
                shares.append(Share([]))
                held = 0
            shares[-1].params.append(param)
            held += param.numel()
    return shares


def enable_gradient_release(model: nn.Module, optimizer: LuminaV) -> ReleaseHandle:
    """Step each parameter inside ``loss.backward()`` and free its gradient at once.

    The training loop stays as it is: ``optimizer.step()`` steps what has a gradient still (parameters added or unfrozen
    later) and ends the pass; ``zero_grad()`` finds nothing to do. Weights, state and checkpoints are, bit for bit,
    those of a step after backward.

    Args:
        model: The model whose backward pass is meant. Looked at only for what cannot work.
        optimizer: Its optimizer.

    Returns:
        The handle: ``with handle.accumulate():`` around all micro-batches but the last, ``handle.remove()`` to end it.

    Raises:
        ValueError: The model is under DistributedDataParallel, whose buckets hold the gradients till all are reduced.
            Use FSDP2's ``fully_shard``, also with a mesh of one shard per replica.
        TypeError: `optimizer` is not a LuminaV.
        RuntimeError: Gradient release is on already.

    What needs all gradients at once is out: ``clip_grad_norm_`` finds none (the radial bound limits each tensor's step
    instead), and a ``GradScaler`` is refused in its step (BF16 needs none).
    """
    if not isinstance(optimizer, LuminaV):
        raise TypeError(f"gradient release needs a LuminaV optimizer, got {type(optimizer).__name__}.")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "gradient release cannot work under DistributedDataParallel: its buckets hold all gradients till they are "
            "reduced. Use torch.distributed.fsdp.fully_shard."
        )
    if optimizer._stepper.release is not None:
        raise RuntimeError("gradient release is on already for this optimizer. Call remove() on its handle first.")
    missing = _foreign(model, optimizer)
    if missing:
        warnings.warn(
            f"{missing} parameters of the optimizer are not in the model: they are released in whatever backward pass "
            "reaches them.",
            stacklevel=2,
        )
    optimizer._stepper.release = handle = ReleaseHandle(optimizer)
    return handle


def _foreign(model: nn.Module, optimizer: LuminaV) -> int:
    own: set[Any] = set(model.parameters())
    return sum(param not in own for group in optimizer.param_groups for param in group["params"])
