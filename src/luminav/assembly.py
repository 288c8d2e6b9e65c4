"""From parameters to batches and scales: what a step needs besides the optimizer's own state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from luminav import rule
from luminav.engines import Batch, Engine, Scales, TensorStep, choose_engine
from luminav.hyperparameters import SUPPORTED_DTYPES, Options
from luminav.rounding import noise_key
from luminav.state import ParamState


@dataclass(frozen=True)
class Pending:
    """A parameter with a gradient, checked: nothing can refuse it any more."""

    param: Tensor
    grad: Tensor
    options: Options
    group: int
    index: int
    """Position in the optimizer, which selects the parameter's noise."""
    engine: Engine


@dataclass(frozen=True)
class Scaling:
    """What a loss scaler asks of this step."""

    grad_scale: float | Tensor | None
    found_inf: Tensor | None
    """On the accelerator; None when the host knows that nothing overflowed."""


def check_param(param: Tensor, options: Options) -> None:
    """Refuse a parameter that the optimizer cannot train."""
    if param.is_complex():
        return  # refused when it has a gradient, as torch's optimizers do where they cannot take one
    if param.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"parameters must be one of {supported}, got {param.dtype}.")
    if options.fsdp_sync or hasattr(param, "placements"):
        raise RuntimeError(
            "sharded parameters (a DTensor, or fsdp_sync=True) are not supported in this release: scales must be taken "
            "over the whole tensor. Train unsharded replicas (DDP) for now."
        )
    if param.device.type != "meta":
        choose_engine(options.execution, param.device)


def check_grad(grad: Tensor) -> None:
    """Refuse a gradient that the rule cannot take."""
    if grad.layout != torch.strided:
        raise TypeError(f"gradients must be dense, got layout {grad.layout}. Use sparse=False in the embedding.")
    if grad.is_complex():
        raise TypeError("complex parameters are not supported. Train torch.view_as_real(param) instead.")


def check_state(param: Tensor, state: ParamState, options: Options) -> None:
    """Refuse a running parameter whose group went from the single to the dual buffer: it has no variance."""
    if options.buffer == 2 and state and "exp_avg_sq" not in state and int(state["step"]) > 0:
        raise ValueError(
            "buffer=2 needs a variance, but this parameter has taken its steps so far with buffer=1. Keep buffer=1, or "
            "start its state anew with optimizer.state[param].clear()."
        )


def numbers_on_device(item: Pending, scaling: Scaling) -> bool:
    """Whether step, bias corrections and noise key are read on the device, because the host does not know them."""
    lr = item.options.lr
    lr_on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return item.options.capturable or scaling.found_inf is not None or lr_on_device


def empty_batch(item: Pending, step: int | Tensor, scaling: Scaling) -> Batch:
    """A batch with the numbers of `item`'s step, and no tensors yet."""
    device, options = item.param.device, item.options
    lr, grad_scale = options.lr, scaling.grad_scale
    if isinstance(step, Tensor):
        step = step.to(torch.float64)
        lr = torch.as_tensor(lr, dtype=torch.float64, device=device).reshape(())
    else:
        lr = float(lr)
    if isinstance(grad_scale, Tensor):
        on_host = grad_scale.device.type == "cpu"
        grad_scale = grad_scale.item() if on_host else grad_scale.to(device=device, dtype=torch.float64).reshape(())
    sign = -1.0 if options.maximize else 1.0
    factor = sign if grad_scale is None else sign / grad_scale
    numbers = rule.step_numbers(step, lr, options, item.param.dtype, factor)
    skip = None if scaling.found_inf is None else scaling.found_inf.to(device).reshape(()) != 0
    return Batch(options, numbers, [], skip)


def tensor_step(item: Pending, state: ParamState, step: int | Tensor) -> TensorStep:
    """A parameter's share of a step, from its state."""
    return TensorStep(
        param=item.param,
        grad=item.grad,
        exp_avg=state["exp_avg"],
        exp_avg_sq=state.get("exp_avg_sq"),
        master_param=state.get("master_param"),
        noise_key=noise_key(item.options.seed, step, item.index),
    )


def exact_scales(batch: Batch, table: Tensor) -> Scales:
    """The scales of an exact step."""
    sums = rule.Sums.of(table)
    cautious = rule.cautious_scale(sums, batch.options)
    return Scales(cautious, rule.bound_scale(sums, cautious, batch.numbers.lr, batch.options))


def blended_scales(batch: Batch, kept: Scales, table: Tensor) -> Scales:
    """The scales that one-pass mode keeps for the next step."""
    sums, options = rule.Sums.of(table), batch.options
    if not options.fused_single_pass:
        return kept
    cautious = rule.blend(kept.cautious, rule.cautious_scale(sums, options), options.ema_decay)
    bound = rule.bound_scale(sums, cautious, batch.numbers.lr, options)
    return Scales(cautious, rule.blend(kept.bound, bound, options.ema_decay))
