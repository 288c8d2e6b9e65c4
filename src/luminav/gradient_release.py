"""Gradient release: each parameter is stepped, and its gradient freed, as soon as backward has finished it.

The optimizer's scales are per tensor, so a parameter's step needs no other parameter's gradient, and the result is that
of an ordinary step to the last bit. Backward and step in one is an old idea, spread by LOMO (Lv et al. 2023,
arXiv 2306.09782).

Small parameters are stepped together, in buckets that are fixed beforehand: the same on every rank, so that the
collectives of FSDP2's parameters meet, and few enough that the host keeps up.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from luminav.optimizer import LuminaV
from luminav.param_groups import check_model, num_foreign
from luminav.stepper import Share

BUCKET = 1 << 22
"""Elements that a bucket may have in any model: with so many a launch has work for the whole GPU."""
BUCKETS = 64
"""A bucket may have a share of 1/64 of the elements, if that is more, so that the host keeps up with backward."""


def buckets(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters that are stepped together, in their order; a tensor beyond the limit has a bucket of its own.

    Args:
        params: The optimizer's parameters. Frozen ones are left out.
    """
    trained = [param for param in params if param.requires_grad]
    limit = max(BUCKET, sum(param.numel() for param in trained) // BUCKETS)
    filled: list[list[Tensor]] = []
    held = 0
    for param in trained:
        if not filled or held + param.numel() > limit:
            filled.append([])
            held = 0
        filled[-1].append(param)
        held += param.numel()
    return filled


class ReleaseHandle:
    """What :func:`enable_gradient_release` returns.

    The hooks know the handle by a weak reference only: the optimizer keeps it, and goes when nobody uses it any more.
    """

    def __init__(self, optimizer: LuminaV) -> None:
        self._optimizer = optimizer
        self._keeping = False
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._shares = [Share(bucket) for bucket in buckets(params)]
        self._share_of = {param: share for share in self._shares for param in share.params}
        self._ready: dict[Share, int] = {}  # in this backward pass: gradients that have come and wait
        self._pass: int | None = None  # the backward pass that these are of
        self._stepped: set[Tensor] = set()  # since the last optimizer.step()
        self._hooks = [self._hook(param) for param in self._share_of]

    def _hook(self, param: Tensor) -> Any:
        reference = weakref.ref(self)

        def hook(param: Tensor) -> None:
            handle = reference()
            if handle is not None:
                handle._came(param)

        setattr(param, MARK, reference)
        return param.register_post_accumulate_grad_hook(hook)

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
        if self._hooks:
            for param in self._share_of:
                delattr(param, MARK)
        self._hooks.clear()
        stepper = self._optimizer._stepper
        if stepper.release is self:
            stepper.release = None
            stepper.end_shares()

    def has_stepped(self, param: Tensor) -> bool:
        """Whether a parameter has taken its step since the last ``optimizer.step()``."""
        return param in self._stepped

    def end_pass(self) -> None:
        """``optimizer.step()`` was called: every parameter may take its next step."""
        self._stepped.clear()
        self._ready.clear()
        self._pass = None

    # ---- what the hooks do -------------------------------------------------------------------------------------------

    def _came(self, param: Tensor) -> None:
        """Backward has finished the gradient of `param`."""
        if self._keeping:
            return
        current = torch._C._current_graph_task_id()  # another one: the pass before has ended, perhaps by an error
        if current != self._pass:
            self._pass = current
            self._ready.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        if param in self._stepped:
            raise RuntimeError(
                "gradient release: a parameter got a second gradient since optimizer.step(), its step is taken. Call "
                "optimizer.step() after every backward pass, as without release; put all micro-batches but the last in "
                "`with handle.accumulate():`; checkpoint activations with use_reentrant=False. After a backward pass "
                "that failed, call zero_grad() and step()."
            )
        share = self._share_of[param]
        self._ready[share] = self._ready.get(share, 0) + 1
        if self._ready[share] == len(share.params):
            self._step(share)

    def _step(self, share: Share) -> None:
        self._ready.pop(share, None)
        params = [param for param in share.params if param.grad is not None]
        try:
            self._optimizer._step(share)
        except Warning:  # one that is an error: the step is taken
            self._release(params)
            raise
        self._release(params)

    def _release(self, params: list[Tensor]) -> None:
        for param in params:
            param.grad = None
        self._stepped.update(params)

    def _end_of_backward(self) -> None:
        """Step the buckets of which some parameters got no gradient."""
        for share in [share for share in self._shares if share in self._ready]:
            self._step(share)
        self._pass = None


MARK = "_luminav_release"
"""Attribute of a parameter under gradient release: a weak reference to the handle."""


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
        ValueError: The model is under DistributedDataParallel, whose buckets hold the gradients till all are reduced,
            or its parameters are plain shards, whose gradients come on each rank by itself: use FSDP2's
            ``fully_shard``. Or none of its parameters is the optimizer's.
        TypeError: `optimizer` is not a LuminaV, or `model` not a module.
        RuntimeError: Gradient release is on already, for this optimizer or for another of these parameters.

    What needs all gradients at once is out: ``clip_grad_norm_`` finds none (the radial bound limits each tensor's step
    instead), and a ``GradScaler`` is refused in its step (BF16 needs none).
    """
    if not isinstance(optimizer, LuminaV):
        raise TypeError(f"gradient release needs a LuminaV optimizer, got {type(optimizer).__name__}.")
    check_model(model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "gradient release cannot work under DistributedDataParallel: its buckets hold all gradients till they are "
            "reduced. Use torch.distributed.fsdp.fully_shard."
        )
    if optimizer._stepper.release is not None:
        raise RuntimeError("gradient release is on already for this optimizer. Call remove() on its handle first.")
    if any(group["fsdp_sync"] for group in optimizer.param_groups):
        raise ValueError(
            "gradient release cannot work with fsdp_sync=True: gradients come on each rank by itself, and the ranks' "
            "sums would not meet. Use torch.distributed.fsdp.fully_shard."
        )
    params = (param for group in optimizer.param_groups for param in group["params"])
    if any(reference() is not None for param in params if (reference := getattr(param, MARK, None)) is not None):
        raise RuntimeError("gradient release is on for another optimizer of these parameters. Call remove() there.")
    foreign = num_foreign(model, optimizer.param_groups)
    if foreign:
        warnings.warn(
            f"{foreign} parameters of the optimizer are not in the model: they are released in whatever backward pass "
            "reaches them. Pass the module that holds all of them, or give them an optimizer of their own.",
            stacklevel=2,
        )
    optimizer._stepper.release = handle = ReleaseHandle(optimizer)
    return handle
