"""What is kept per parameter, and in which dtype.

:data:`STATE` is the one table of state tensors: creation, loading, moving between devices and the documentation read
it. Everything in it reaches a checkpoint, and nothing else does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from luminav.blocks import (
    BLOCK,
    EXP_AVG_FORMAT,
    EXP_AVG_SQ_FORMAT,
    LARGEST_SCALE,
    PANEL_ROWS,
    block_shape,
    decode,
    encode,
    in_blocks,
    panel_shape,
    tile_means,
    tile_products,
)
from luminav.distributed import block_placements, held, is_dtensor, local
from luminav.hyperparameters import Options
from luminav.rounding import SIXTEEN_BIT, join_master, largest_finite, nearest, widened_bits

ParamState: TypeAlias = dict[str, Any]


def has_master(param: Tensor, options: Options) -> bool:
    """Whether an FP32 master weight is kept: for 16-bit parameters only, others are their own master."""
    return options.master_weights != "none" and param.dtype in SIXTEEN_BIT


def is_split(param: Tensor, options: Options) -> bool:
    """Whether the master weight is kept as the weight and a remainder.

    Not of plain shards: FSDP1 saves no state in which one tensor is floating-point and another is not.
    """
    split = options.split_master_weights and not options.fsdp_sync
    return split and has_master(param, options) and param.dtype == torch.bfloat16


def is_coded(param: Tensor, options: Options) -> bool:
    """Whether the moments are kept in 8-bit codes."""
    return options.state_bits == 8 and param.dtype != torch.float64 and in_blocks(param)


def has_block_variance(param: Tensor, options: Options) -> bool:
    """Whether tiles have a variance of rank 1, in place of one for each element."""
    return options.block_variance and in_blocks(param)


def keeps_blocks(param: Tensor, options: Options) -> bool:
    """Whether any state is kept per block."""
    return is_coded(param, options) or has_block_variance(param, options)


def moment_dtype(param: Tensor, options: Options) -> torch.dtype:
    """Storage dtype of a moment that is kept per element, without codes."""
    return torch.float32 if options.master_weights == "full" and param.dtype in SIXTEEN_BIT else param.dtype


def exp_avg_dtype(param: Tensor, options: Options) -> torch.dtype:
    """Storage dtype of exp_avg."""
    return torch.uint8 if is_coded(param, options) else moment_dtype(param, options)


def exp_avg_sq_dtype(param: Tensor, options: Options) -> torch.dtype:
    """Storage dtype of exp_avg_sq."""
    return tile_mean_dtype(param, options) if has_block_variance(param, options) else exp_avg_dtype(param, options)


def tile_mean_dtype(param: Tensor, options: Options) -> torch.dtype:
    """Storage dtype of the means of a tile: FP16 has not the range."""
    return torch.float64 if param.dtype == torch.float64 else torch.bfloat16


FINITE = (-sys.float_info.max, sys.float_info.max)
NOT_NEGATIVE = (0.0, sys.float_info.max)


@dataclass(frozen=True)
class StateTensor:
    """One kind of state."""

    key: str
    meaning: str
    wanted: Callable[[Tensor, Options], bool]
    """Whether a parameter under these options keeps it."""
    dtype: Callable[[Tensor, Options], torch.dtype]
    start: Callable[[Tensor, torch.dtype], Tensor] | None
    """Its first value; None if the first exact step makes it."""
    per_tensor: bool = False
    """0-dim; otherwise shaped like the parameter, or one element per block or column of a panel."""
    per_block: Callable[[Tensor, Options], bool] = lambda param, options: False
    """Whether there is one element per block."""
    per_column: bool = False
    """Whether there is one element per column of a panel."""
    limits: tuple[float, float] | None = None
    """Between which values steps keep it, whatever the gradients: moments saturate. None if it may hold anything."""

    def first(self, param: Tensor, options: Options) -> Tensor:
        """Its first value, or zeros where the first exact step makes that."""
        dtype = self.dtype(param, options)
        if self.start is None:
            return torch.zeros((), dtype=dtype, device="cpu")
        if self.per_column:
            return zeros_per_column(param, dtype)
        return zeros_per_block(param, dtype) if self.per_block(param, options) else self.start(param, dtype)


def zeros_like_param(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros shaped and placed like a parameter."""
    form = torch.contiguous_format if dtype == torch.uint8 else torch.preserve_format  # codes lie block by block
    return torch.zeros_like(param, dtype=dtype, memory_format=form)


def zeros_per_block(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros, one per block, sharded as the parameter is."""
    return _zeros(param, dtype, block_shape(param), 1, BLOCK)


def zeros_per_column(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros, one per column of a panel, sharded as the parameter is, whose shards begin with panels."""
    return _zeros(param, dtype, panel_shape(param), PANEL_ROWS, 1)


def _zeros(param: Tensor, dtype: torch.dtype, shape: torch.Size, rows: int, elements: int) -> Tensor:
    """Zeros of two dimensions, one for `elements` elements of each of `rows` rows."""
    held = local(param.detach())
    if not is_dtensor(param):
        return torch.zeros(shape, dtype=dtype, device=held.device)
    # Of an empty part the placements tell the shape: ranks that gather it must agree on all but the sharded dimension.
    columns = math.prod(held.shape[1:]) // elements if held.ndim > 1 else shape[1]
    owner: Any = param
    zeros = torch.zeros(-(-held.shape[0] // rows), columns, dtype=dtype, device=held.device)
    return type(owner).from_local(
        zeros, owner.device_mesh, block_placements(owner), run_check=False, shape=shape, stride=(shape[1], 1)
    )


def _copy_of_weight(param: Tensor, dtype: torch.dtype) -> Tensor:
    return zeros_like_param(param, dtype).copy_(param.detach())


STATE: tuple[StateTensor, ...] = (
    StateTensor(
        "step",
        "number of steps taken, int64",
        wanted=lambda param, options: True,
        dtype=lambda param, options: torch.int64,
        start=lambda param, dtype: torch.zeros((), dtype=dtype, device="cpu"),
        per_tensor=True,
    ),
    StateTensor(
        "exp_avg",
        "momentum m",
        wanted=lambda param, options: True,
        dtype=exp_avg_dtype,
        start=zeros_like_param,
        limits=FINITE,
    ),
    StateTensor(
        "exp_avg_scale",
        "exponents of the scales of exp_avg's 8-bit codes, uint8",
        wanted=is_coded,
        dtype=lambda param, options: torch.uint8,
        start=zeros_like_param,
        per_block=is_coded,
        limits=(EXP_AVG_FORMAT.smallest_scale, LARGEST_SCALE),
    ),
    StateTensor(
        "exp_avg_sq",
        "variance v of grad − exp_avg",
        wanted=lambda param, options: options.has_variance,
        dtype=exp_avg_sq_dtype,
        start=zeros_like_param,
        per_block=has_block_variance,
        limits=NOT_NEGATIVE,
    ),
    StateTensor(
        "exp_avg_sq_col",
        "column means of the variance's tiles, whose row means are in exp_avg_sq",
        wanted=has_block_variance,
        dtype=tile_mean_dtype,
        start=zeros_like_param,
        per_column=True,
        limits=NOT_NEGATIVE,
    ),
    StateTensor(
        "exp_avg_sq_scale",
        "exponents of the scales of exp_avg_sq's 8-bit codes, uint8",
        wanted=lambda param, options: options.buffer == 2 and is_coded(param, options),
        dtype=lambda param, options: torch.uint8,
        start=zeros_like_param,
        per_block=is_coded,
        limits=(EXP_AVG_SQ_FORMAT.smallest_scale, LARGEST_SCALE),
    ),
    StateTensor(
        "master_param",
        "FP32 master weight",
        wanted=lambda param, options: has_master(param, options) and not is_split(param, options),
        dtype=lambda param, options: torch.float32,
        start=_copy_of_weight,
    ),
    StateTensor(
        "master_remainder",
        "FP32 master weight less the BF16 weight, on the bit patterns, int16",
        wanted=is_split,
        dtype=lambda param, options: torch.int16,
        start=zeros_like_param,
    ),
    StateTensor(
        "cautious_scale",
        "kept c of one-pass mode",
        wanted=lambda param, options: options.fused_single_pass,
        dtype=lambda param, options: torch.float32,
        start=None,
        per_tensor=True,
        limits=NOT_NEGATIVE,
    ),
    StateTensor(
        "bound_scale",
        "kept s of one-pass mode",
        wanted=lambda param, options: options.fused_single_pass,
        dtype=lambda param, options: torch.float32,
        start=None,
        per_tensor=True,
        limits=NOT_NEGATIVE,  # 1.3.x rounds some a little above 1
    ),
)  # fmt: skip
KINDS = {kind.key: kind for kind in STATE}


def kept_tensors(state: ParamState) -> list[Tensor]:
    """A parameter's state but its single numbers: local tensors, per element or per block."""
    return [local(state[kind.key]) for kind in STATE if not kind.per_tensor and state.get(kind.key) is not None]


NO_COLUMN_MEANS = (
    "{} has one 'exp_avg_sq' for every 64 elements, but no 'exp_avg_sq_col' beside it: it comes from before "
    "block_variance=True kept means of the rows and columns of tiles, or is damaged. Continue it with the version that "
    "wrote it, or start the state of this parameter anew."
)
KEPT_SCALES = ("cautious_scale", "bound_scale")
MOMENTS = (("exp_avg", EXP_AVG_FORMAT), ("exp_avg_sq", EXP_AVG_SQ_FORMAT))
"""Keys of the moments, and the formats of their codes."""
SCALES = {f"{key}_scale": key for key, _ in MOMENTS}
"""Keys of the scales of 8-bit codes, and of the moments that they belong to."""


def conform(
    state: ParamState, param: Tensor, options: Options, *, step_on_device: bool, template: bool = False
) -> None:
    """Make a parameter's state what the mode prescribes, in place: create, convert, move or drop.

    Serves a parameter's first step, a group whose mode was switched, ``model.to(...)`` and state brought back from
    another device. Values that are already right are not touched.

    Args:
        state: The parameter's state, possibly empty.
        param: The parameter.
        options: Its group's options.
        step_on_device: Whether the step count lives beside the parameter instead of on the CPU.
        template: Whether to make, as zeros, also what the first step would make: a file is to be read into the state.
            :func:`drop_template` takes those zeros away again.
    """
    reform_master(state, param, options)
    reform_moments(state, param, options)
    for kind in STATE:
        if not kind.wanted(param, options):
            state.pop(kind.key, None)
            continue
        dtype = kind.dtype(param, options)
        value = state.get(kind.key)
        if value is None:
            if kind.start is None and not template:
                continue
            value = kind.first(param, options)
        if not isinstance(value, Tensor):  # a step count set by hand
            value = torch.tensor(value, device="cpu")
        on_cpu = kind.key == "step" and not step_on_device
        device = torch.device("cpu") if on_cpu else param.device
        if value.dtype != dtype or value.device != device:
            value = saturated(value, dtype).to(device=device, dtype=dtype)
        state[kind.key] = value


def catch_up(
    state: ParamState,
    param: Tensor,
    options: Options,
    written: Written | None,
    *,
    step_on_device: bool,
    template: bool = False,
) -> None:
    """:func:`conform`, and let a whole master follow what others did to the weight since our last write of it."""
    if "master_param" not in state and (former := former_weight(param, written)) is not None:
        state["master_param"] = former
    conform(state, param, options, step_on_device=step_on_device, template=template)
    if "master_param" in state:
        adopt_edits(param, state["master_param"], written)


def reform_master(state: ParamState, param: Tensor, options: Options) -> None:
    """Turn a whole master weight into a remainder, or back, if the other form is kept under these options.

    An element whose weight was changed since, so that the master does not round to it, gets the weight as its master.
    """
    if not has_master(param, options):
        return
    split = is_split(param, options)
    if split and "master_param" in state and "master_remainder" not in state:
        master = state.pop("master_param")
        state["master_remainder"] = remainder = zeros_like_param(param, torch.int16)
        weight = local(param.detach())
        wide = local(master).to(weight.device, torch.float32)
        apart = wide.view(torch.int32).to(torch.int64) - widened_bits(weight)
        near = (apart.abs() <= 1 << 15) & torch.isfinite(weight)  # torch's own rounding of a tie leaves 2¹⁵
        local(remainder).copy_(torch.where(near, apart, 0).clamp_(max=(1 << 15) - 1))
    elif not split and "master_remainder" in state and "master_param" not in state:
        remainder = state.pop("master_remainder")
        if param.dtype == torch.bfloat16:
            state["master_param"] = joined(param, remainder)


def reform_moments(state: ParamState, param: Tensor, options: Options) -> None:
    """Turn moments from 8-bit codes, or from the means of tiles, into the form that these options keep, or back.

    Codes and means are rounded to nearest here.
    """
    for key, form in MOMENTS:
        value, kind = state.get(key), KINDS[key]
        if not isinstance(value, Tensor) or not kind.wanted(param, options):
            continue
        coded = kind.dtype(param, options) == torch.uint8
        per_block = kind.per_block(param, options)
        if (value.dtype == torch.uint8, value.shape) == (coded, block_shape(param) if per_block else param.shape):
            continue
        held = local(value).to(param.device)
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        if value.dtype == torch.uint8:
            scales = local(state.pop(f"{key}_scale")).to(param.device)
            dense = decode(held.reshape(-1, BLOCK), scales.view(-1), form)
        elif value.shape == param.shape:
            dense = held.reshape(-1, BLOCK).to(wide)
        else:
            columns = local(state.pop("exp_avg_sq_col")).to(param.device, wide)
            dense = tile_products(held.to(wide), columns).view(-1, BLOCK)
        state[key] = fresh = kind.first(param, options)
        if coded:
            codes, scales = encode(saturated(dense, torch.float32).to(torch.float32), form, None)
            state[f"{key}_scale"] = KINDS[f"{key}_scale"].first(param, options)
            local(state[f"{key}_scale"]).view(-1).copy_(scales)
            dense = codes
        elif per_block:
            rows, blocks = local(fresh).shape
            dense, columns = tile_means(dense.view(rows, blocks * BLOCK))
            state["exp_avg_sq_col"] = zeros_per_column(param, fresh.dtype)
            local(state["exp_avg_sq_col"]).copy_(saturated(columns, fresh.dtype))
        local(fresh).copy_(saturated(dense, fresh.dtype).reshape(local(fresh).shape))


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 master weight of a BF16 parameter and its remainder, placed and laid out like the parameter."""
    master = zeros_like_param(param.detach(), torch.float32)
    weight = local(param.detach())
    local(master).copy_(join_master(weight, local(remainder).to(weight.device)))
    return master


def drop_template(state: ParamState) -> None:
    """Take away the scales of a parameter that has taken no step: none were measured, see :func:`conform`."""
    if state and int(state["step"]) == 0:
        for key in KEPT_SCALES:
            state.pop(key, None)


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` held inside the finite range of `dtype`, to which it is to be converted.

    The variance of an FP32 model can be beyond FP16: converted as it is it would be infinite, and would stay so.
    """
    if not dtype.is_floating_point or not value.is_floating_point():
        return value
    limit = largest_finite(dtype)
    return value if largest_finite(value.dtype) <= limit else value.clamp(-limit, limit)


class Written(NamedTuple):
    """What a weight with a master was when a step had written it, so that the next step sees an edit from outside."""

    versions: tuple[int, int]
    data_ptr: int
    dtype: torch.dtype
    weight: Tensor | None
    """The weight itself where it is its own master: ``model.bfloat16()`` replaces it, and it becomes the master."""

    @classmethod
    def of(cls, param: Tensor) -> Written:
        """The weight as it is now."""
        own_master = param.dtype not in SIXTEEN_BIT
        return cls(versions(param), _data_ptr(param), param.dtype, param.detach() if own_master else None)

    def is_still(self, param: Tensor) -> bool:
        """Whether nobody has written or replaced the weight since."""
        return (self.versions, self.data_ptr, self.dtype) == (versions(param), _data_ptr(param), param.dtype)


def versions(param: Tensor) -> tuple[int, int]:
    """Version counters of a parameter and of its local tensor: writing a DTensor raises the first, we the second."""
    return param._version, held(param)._version


def _data_ptr(param: Tensor) -> int:
    return held(param).data_ptr()


def former_weight(param: Tensor, written: Written | None) -> Tensor | None:
    """The FP32 weight that a parameter was before ``model.bfloat16()``, as a copy; None if it was none."""
    if written is None or written.weight is None or param.dtype not in SIXTEEN_BIT:
        return None
    return written.weight.to(torch.float32, copy=True) if written.weight.shape == param.shape else None


def adopt_edits(param: Tensor, master: Tensor, written: Written | None) -> None:
    """Re-make the master weights of those elements that were changed from outside.

    An element whose weight still is what its master rounds to keeps the master, so loading a model and an optimizer
    checkpoint in either order loses nothing, nor does ``model.bfloat16()``.

    Args:
        param: The 16-bit parameter.
        master: Its FP32 master weight. Changed in place where the parameter was edited.
        written: The parameter after our last write, if that is known.
    """
    if written is not None and written.is_still(param):
        return
    master = local(master)
    weight = local(param.detach()).to(device=master.device, dtype=torch.float32)
    edited = nearest(master, param.dtype) != weight
    edited &= master.to(param.dtype) != weight  # torch's own rounding: the master itself was loaded into the model
    if written is not None and written.dtype != param.dtype:
        edited &= nearest(master, written.dtype).to(param.dtype) != weight  # converted by the model since
    master.copy_(torch.where(edited, weight, master))
