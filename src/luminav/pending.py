"""Parameters with a gradient: what can refuse them, and how each becomes a tensor of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from luminav import rule
from luminav.blocks import block_shape, in_blocks, panel_shape
from luminav.distributed import Part, check_blocks, check_panels, check_placements, local, local_grad
from luminav.engines import Batch, Engine, TensorStep, choose_engine
from luminav.hyperparameters import SUPPORTED_DTYPES, Options
from luminav.rounding import noise_key
from luminav.state import (
    KEPT_SCALES,
    NO_COLUMN_MEANS,
    SCALES,
    STATE,
    ParamState,
    has_block_variance,
    keeps_blocks,
)


@dataclass
class Pending:
    """A parameter with a gradient, checked: nothing can refuse it any more."""

    param: Tensor
    """As its group has it, perhaps a DTensor."""
    grad: Tensor | None
    """The local gradient, zero where it is missing; None when kept launches have taken its address."""
    options: Options
    group: int
    index: int
    """Position in the optimizer, which selects the parameter's noise."""
    engine: Engine
    part: Part
    missing: bool
    """Whether this process has no gradient. The parameter takes its step if another rank has one."""
    state: ParamState = field(default_factory=dict)
    """The parameter's state. A first one becomes the optimizer's when the sums of all ranks are in."""


@dataclass(frozen=True)
class Scaling:
    """What a loss scaler asks of this step."""

    grad_scale: float | Tensor | None
    found_inf: Tensor | None
    """On the accelerator; None when the host knows that nothing overflowed, or is to look at `overflow`."""
    overflow: Tensor | None = None
    """Of sharded parameters: this process's flag, to be added up over the ranks before anything is written."""


UNSCALED = Scaling(None, None)
"""No loss scaler, or none that asks for anything."""


def check_param(param: Tensor, options: Options, name: str | None = None) -> None:
    """Refuse a parameter that the optimizer cannot train; `name` is for the message."""
    if param.is_complex():
        return  # refused when it has a gradient, as torch's optimizers do where they cannot take one
    if param.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"parameters must be one of {supported}, got {param.dtype}.")
    check_placements(param)
    if keeps_blocks(param, options):
        check_blocks(param)
    if has_block_variance(param, options):
        check_panels(param, name)
    if param.is_inference():
        raise RuntimeError("a parameter that was made in inference mode cannot be trained. Make the model outside it.")
    if param.device.type != "meta":
        choose_engine(options.execution, param.device)


def check_layout(param: Tensor) -> None:
    """Refuse a parameter whose elements lie in one another's memory: it could not be written."""
    if (
        param.layout == torch.strided
        and param.numel()
        and any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True))
    ):
        raise ValueError(
            f"a parameter's elements must not share memory, got shape {tuple(param.shape)} with strides "
            f"{param.stride()}. Clone the expanded tensor."
        )


def check_grad(param: Tensor, grad: Tensor) -> None:
    """Refuse a gradient that the rule cannot take."""
    if grad.layout != torch.strided:
        raise TypeError(f"gradients must be dense, got layout {grad.layout}. Use sparse=False in the embedding.")
    if grad.is_complex():
        raise TypeError("complex parameters are not supported. Train torch.view_as_real(param) instead.")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"the gradient, {tuple(grad.shape)} on {grad.device}, does not fit its parameter, {tuple(param.shape)} on "
            f"{param.device}. Set param.grad to None when param.data is replaced."
        )


def checked_grad(param: Tensor) -> Tensor:
    """The local gradient of a parameter that has one."""
    assert param.grad is not None
    check_grad(param, param.grad)
    return local_grad(param, param.grad)


def missing_grad(param: Tensor) -> Tensor:
    """Zeros in place of a gradient that another rank may have. They take no memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(local(param).shape)


def check_state(param: Tensor, state: ParamState, options: Options) -> None:
    """Refuse a running parameter without a variance (its group went from buffer=1 to 2), or that changed its shape."""
    per_block = block_shape(param) if in_blocks(param) else param.shape
    per_column = panel_shape(param) if in_blocks(param) else param.shape
    shapes = {
        "exp_avg_sq": (param.shape, per_block),
        "exp_avg_sq_col": (per_column,),
        **dict.fromkeys(SCALES, (per_block,)),
    }
    for kind in STATE:
        value = state.get(kind.key)
        if not kind.per_tensor and value is not None and value.shape not in shapes.get(kind.key, (param.shape,)):
            raise ValueError(
                f"the parameter has shape {tuple(param.shape)}, its state {tuple(value.shape)}. After replacing "
                "param.data, start its state anew with optimizer.state[param].clear()."
            )
    variance = state.get("exp_avg_sq")
    if in_blocks(param) and variance is not None and variance.shape == per_block and "exp_avg_sq_col" not in state:
        raise ValueError(NO_COLUMN_MEANS.format("a parameter's state"))
    if options.has_variance and state and "exp_avg_sq" not in state and int(state["step"]) > 0:
        raise ValueError(
            "buffer=2 and block_variance=True need a variance, but this parameter has taken its steps so far with one "
            "RMS per tensor. Keep buffer=1, or start its state anew with optimizer.state[param].clear()."
        )


def numbers_on_device(item: Pending, scaling: Scaling) -> bool:
    """Whether step, bias corrections and noise key are read on the device, because the host does not know them."""
    lr = item.options.lr
    lr_on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return item.engine.numbers_on_device or item.options.capturable or scaling.found_inf is not None or lr_on_device


def empty_batch(item: Pending, step: int | Tensor | None, scaling: Scaling) -> Batch:
    """A batch with the numbers of `item`'s step, and no tensors yet."""
    device, options = item.param.device, item.options
    if step is None:
        scale, found_inf = scaling.grad_scale, scaling.found_inf
        return Batch(
            options,
            None,
            [],
            skip=None if found_inf is None else found_inf.to(device).reshape(()) != 0,
            grad_scale=None if scale is None else torch.as_tensor(scale, device=device),
        )
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


def tensor_step(item: Pending, step: int | Tensor | None) -> TensorStep:
    """A parameter's share of a step, from its state: local tensors, and where they are in the whole."""
    state, layout = item.state, item.part.layout

    def kept(key: str) -> Tensor | None:
        return local(state[key]) if key in state else None

    return TensorStep(
        param=local(item.param),
        grad=item.grad,
        exp_avg=local(state["exp_avg"]),
        exp_avg_sq=kept("exp_avg_sq"),
        master_param=kept("master_param"),
        master_remainder=kept("master_remainder"),
        noise_key=None if step is None else noise_key(item.options.seed, step, item.index),
        first_index=layout.first_index,
        jumps=layout.jumps,
        index=item.index,
        step=state["step"],
        exp_avg_scale=kept("exp_avg_scale"),
        exp_avg_sq_scale=kept("exp_avg_sq_scale"),
        exp_avg_sq_col=kept("exp_avg_sq_col"),
        kept_scales=(state["cautious_scale"], state["bound_scale"])
        if all(key in state for key in KEPT_SCALES)
        else None,
    )
