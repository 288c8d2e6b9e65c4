"""What the tests share: the rule in float64, the grids of the storage formats, option sets, layouts and gradients.

Nothing here imports luminav but :func:`optimizer_for`: the expected values come from this file, which follows the
rule's specification section by section, and the two may only agree because both are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

# ---- option sets ---------------------------------------------------------------------------------------------------

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 8e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 8e-2,
        "tau": 0.8,
        "alpha_ss": 0.5,
        "cautious": True,
        "cautious_clamp_min": 0.5,
        "buffer": 2,
        "stochastic_rounding": True,
        "bound": True,
        "bound_type": "radial",
        "bound_ratio": 0.03,
        "master_weights": "none",
        "fused_single_pass": False,
        "ema_decay": 0.8,
        "seed": 1337,
        "maximize": False,
        "state_bits": 16,
        "block_variance": False,
    }
)
"""The defaults of the rule's specification, written out: a default that changes by accident fails a test."""

PROCESS_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "fsdp_sync": False,
        "execution": "auto",
        "capturable": False,
        "process_group": None,
        "split_master_weights": True,
    }
)
"""Defaults of the options that belong to the running process (sections 1 and 10)."""


def _modes() -> dict[str, dict[str, Any]]:
    """Buffer × one-pass × cautious × bound, where allowed: the eighteen modes of the rule."""
    modes = {}
    for method, what in {
        "dual": {},
        "one_pass": {"fused_single_pass": True},
        "single": {"buffer": 1},
    }.items():
        for gate, cautious in {"gated": {}, "ungated": {"cautious": False}}.items():
            for limit, bound in {
                "radial": {},
                "coordinate": {"bound_type": "coordinate"},
                "unbound": {"bound": False},
            }.items():
                modes[f"{method}-{gate}-{limit}"] = {**what, **cautious, **bound}
    return modes


MODES: Mapping[str, dict[str, Any]] = MappingProxyType(_modes())
"""Every combination of the options that choose formulas, named."""

VARIATIONS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "maximize": {"maximize": True},
        "no_decay": {"weight_decay": 0.0},
        "strong_decay": {"weight_decay": 3.0},
        "short_memory": {"betas": (0.5, 0.9)},
        "no_memory": {"betas": (0.0, 0.0)},
        "large_eps": {"eps": 1e-2},
        "no_eps": {"eps": 0.0},
        "hot": {"tau": 4.0},
        "cold": {"tau": 0.05},
        "full_density": {"cautious_clamp_min": 1.0},
        "low_density": {"cautious_clamp_min": 0.05},
        "tight_radial": {"bound_ratio": 1e-3, "lr": 3e-2},
        "tight_coordinate": {"bound_ratio": 1e-3, "bound_type": "coordinate", "lr": 3e-2},
        "single_linear": {"buffer": 1, "alpha_ss": 0.0},
        "single_compressed": {"buffer": 1, "alpha_ss": 3.0, "tau": 0.3},
        "one_pass_no_memory": {"fused_single_pass": True, "ema_decay": 0.0},
        "one_pass_tight": {"fused_single_pass": True, "ema_decay": 0.95, "bound_ratio": 1e-3, "lr": 3e-2},
        "zero_lr": {"lr": 0.0},
        "nearest": {"stochastic_rounding": False},
        "other_seed": {"seed": 2**62 + 12345},
    }
)
"""One option away from the default (or two that belong together), for every option of the rule."""

OPTION_SETS: Mapping[str, dict[str, Any]] = MappingProxyType({**MODES, **VARIATIONS})
MASTER_MODES = ("none", "semi", "full")
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
REFERENCE_ENGINE = "single"
ENGINES = ("single", "foreach")
"""Every engine that can run here; the tests hold each against `REFERENCE_ENGINE`. A new engine joins by its name."""


def dtype_name(dtype: torch.dtype) -> str:
    """Short name for test ids."""
    return str(dtype).removeprefix("torch.")


def has_master(dtype: torch.dtype, options: Mapping[str, Any]) -> bool:
    """Whether an FP32 master weight is kept (section 7)."""
    return dtype in SIXTEEN_BIT and options.get("master_weights", "none") != "none"


def master_key(dtype: torch.dtype, options: Mapping[str, Any]) -> str | None:
    """The state key that holds the master, or what the weight lacks of it; None without a master (section 10)."""
    if not has_master(dtype, options):
        return None
    split = dtype == torch.bfloat16 and options.get("split_master_weights", PROCESS_DEFAULTS["split_master_weights"])
    return "master_remainder" if split else "master_param"


def master_of(param: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The weight in full, as a copy: the FP32 master of either form (section 7), or the weight itself without one.

    Joined on the bit patterns, as the specification defines the split form, with nothing of luminav. A weight that is
    not finite has no remainder, and a zero none below zero: its pattern less something would be a NaN.
    """
    if "master_remainder" not in state:
        return state.get("master_param", param).detach().clone()
    weight, remainder = param.detach(), state["master_remainder"]
    assert weight.dtype == torch.bfloat16 and remainder.dtype == torch.int16 and "master_param" not in state
    upper = torch.empty_like(weight).copy_(weight).view(torch.int16).to(torch.int32) << 16
    lower = torch.where(torch.isfinite(weight), remainder.to(torch.int32), 0)
    lower = torch.where(weight == 0, lower.clamp_min(0), lower)
    return (upper + lower).view(torch.float32)


def split_by_hand(master: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 weight and int16 remainder of finite FP32 masters within the cap: half away from zero (section 7)."""
    patterns = master.detach().contiguous().view(torch.int32).long()
    upper = (patterns + 0x8000) >> 16  # arithmetic shift; half away from zero, since the sign is apart
    return upper.to(torch.int16).view(torch.bfloat16), (patterns - (upper << 16)).to(torch.int16)


def moment_dtype(dtype: torch.dtype, options: Mapping[str, Any]) -> torch.dtype:
    """Storage dtype of exp_avg and exp_avg_sq (section 7)."""
    return torch.float32 if dtype in SIXTEEN_BIT and options.get("master_weights") == "full" else dtype


# ---- the rule in float64 -------------------------------------------------------------------------------------------

MASTER_CAP_BF16 = torch.tensor(0x7F7F7FFF, dtype=torch.int32).view(torch.float32).item()


def fp32(value: float) -> float:
    """The FP32 number next to `value`."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


class RankOne(NamedTuple):
    """What is kept of a variance that has rank 1 in every tile of 64 rows and columns, float64."""

    rows: Tensor
    """Row means, [rows, tiles]."""
    columns: Tensor
    """Column means, [panels, columns]."""

    @classmethod
    def zeros(cls, shape: Sequence[int]) -> RankOne:
        """Of a parameter that has taken no step."""
        rows, length = shape[0], math.prod(shape[1:])
        return cls(torch.zeros(rows, length // 64).double(), torch.zeros(math.ceil(rows / 64), length).double())

    def moved(self, innovation_sq: Tensor, beta2: float, limit: float) -> RankOne:
        """After a step with these squares, in the parameter's shape."""
        squares = innovation_sq.reshape(len(innovation_sq), -1)
        of_rows = torch.stack([block.mean(1) for block in squares.split(64, 1)], 1)
        of_columns = torch.stack([panel.mean(0) for panel in squares.split(64)])
        pairs = ((self.rows, of_rows), (self.columns, of_columns))
        return RankOne(*((beta2 * old + (1 - beta2) * new).clamp_max(limit) for old, new in pairs))

    def product(self) -> Tensor:
        """The variance of every element, [rows, columns]."""
        tiles = []
        for rows, columns in zip(self.rows.split(64), self.columns, strict=True):
            outer = [torch.outer(r, c) for r, c in zip(rows.T, columns.split(64), strict=True)]
            means = rows.mean(0)
            tiles.append(torch.cat([o / m if m > 0 else o * 0.0 for o, m in zip(outer, means, strict=True)], 1))
        return torch.cat(tiles)


@dataclass(frozen=True)
class ExactStep:
    """One step of one tensor in float64, before anything is rounded to storage. Tensors have the weight's shape."""

    weight: Tensor
    """Saturated as section 7 says; weights that were not finite are what they were."""
    exp_avg: Tensor
    exp_avg_sq: Tensor | RankOne | None
    lookahead: Tensor
    sigma: Tensor | float
    """What m̃ is divided by: one number per tensor with buffer=1."""
    u: Tensor
    keep: Tensor
    delta: Tensor
    used_scales: tuple[float, float]
    """c and s that this step applied."""
    kept_scales: tuple[float, float]
    """c and s that one-pass mode keeps for the next step; otherwise the used ones."""
    r: float
    """η‖d‖/R, 0 without a radial bound."""


def exact_step(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | RankOne | None,
    grad: Tensor,
    step: int,
    dtype: torch.dtype,
    *,
    kept: tuple[float, float] | None = None,
    **overrides: Any,
) -> ExactStep:
    """Section 2 to 8 of the specification, in float64 from the given values.

    Args:
        weight: The stored weight, or the master where there is one; any float dtype.
        exp_avg: Momentum before the step.
        exp_avg_sq: Variance before the step, with block_variance=True what is kept of it; else ignored with buffer=1.
        grad: The gradient.
        step: t, from 1.
        dtype: Dtype of the parameter: FP16 raises eps and is governed; it decides where values saturate.
        kept: The kept c and s of one-pass mode, None if there are none.
        **overrides: Options that differ from `DEFAULTS`.
    """
    o = {**DEFAULTS, **overrides}
    lr, (beta1, beta2) = float(o["lr"]), o["betas"]
    eps = max(o["eps"], 1e-4) if dtype == torch.float16 else o["eps"]
    limit = torch.finfo(moment_dtype(dtype, o)).max
    w, m = weight.detach().double(), exp_avg.detach().double()
    g = grad.detach().double() * (-1.0 if o["maximize"] else 1.0)
    g = torch.where(torch.isfinite(grad), g, 0.0)
    finite = torch.isfinite(w)
    p = torch.where(finite, w, 0.0)
    numel = w.numel()

    # 2. momentum and look-ahead
    m = beta1 * m + (1 - beta1) * g
    ahead = beta1 * m + (1 - beta1) * g
    b1, b2 = 1 - beta1 ** (step + 1), 1 - beta2**step

    # 3. direction
    tau = o["tau"]
    if o["buffer"] == 2 or o["block_variance"]:
        innovation_sq = (g - m) ** 2
        v: Tensor | RankOne | None
        if o["block_variance"]:
            assert isinstance(exp_avg_sq, RankOne)
            v = exp_avg_sq.moved(innovation_sq, beta2, torch.finfo(torch.bfloat16).max)
            spread = v.product().reshape(w.shape)
        else:
            assert isinstance(exp_avg_sq, Tensor)
            v = spread = (beta2 * exp_avg_sq.detach().double() + (1 - beta2) * innovation_sq).clamp_max(limit)
        sigma: Tensor | float = ((tau * b1 / math.sqrt(b2)) * spread.sqrt() + eps * tau * b1).clamp_min(1e-12)
        u = torch.tanh(ahead / sigma)
    else:
        v = None
        mean = (ahead**2).sum().item() / max(numel, 1)
        rms = fp32(min(math.sqrt(mean + eps), torch.finfo(torch.float32).max))
        sigma = max(tau * rms + eps * tau * b1, 1e-12)
        z = ahead / sigma
        u = torch.tanh(z / (1 + o["alpha_ss"] * z.abs()))

    # 4. gate
    keep = (
        (torch.sign(ahead) * torch.sign(g) > 0).double() if o["cautious"] else torch.ones_like(w, dtype=torch.float64)
    )
    gated = keep * u
    c_now = 1.0
    if o["cautious"] and numel:
        c_now = fp32(1 / min(max(keep.sum().item() / numel, o["cautious_clamp_min"]), 1.0))

    # 5. bound (with the scales of section 8 in one-pass mode)
    radial = o["bound"] and o["bound_type"] == "radial"
    gated_norm, p_norm = gated.norm().item(), p.norm().item()

    def bound_scale(c: float) -> tuple[float, float]:
        r = lr * gated_norm * c / (o["bound_ratio"] * max(p_norm, 1.0)) if radial else 0.0
        return (1.0 if r < 1e-4 else fp32(math.tanh(r) / r)), r

    if o["fused_single_pass"] and kept is not None:
        kappa = o["ema_decay"]
        used = kept
        c_next = fp32(kappa * kept[0] + (1 - kappa) * c_now)
        s_now, r = bound_scale(c_next)
        following = (c_next, fp32(kappa * kept[1] + (1 - kappa) * s_now))
    else:
        s_now, r = bound_scale(c_now)
        used = following = (c_now, s_now)
    delta = lr * used[0] * used[1] * gated
    if o["bound"] and o["bound_type"] == "coordinate":
        radius = o["bound_ratio"] * (p**2 + 1e-4).sqrt()
        delta = radius * torch.tanh(delta / radius)
    if dtype == torch.float16:
        radius = (0.01 * p.abs()).clamp_min(1.5e-4)
        delta = radius * torch.tanh(delta / radius)

    # 6. decay and update, 7. saturation
    largest = torch.finfo(dtype).max
    if has_master(dtype, o):
        largest = MASTER_CAP_BF16 if dtype == torch.bfloat16 else torch.finfo(torch.float32).max
    moved = (p * (1 - lr * o["weight_decay"]) - delta).clamp(-largest, largest) if lr != 0 else p
    return ExactStep(
        weight=torch.where(finite, moved, w),
        exp_avg=m.clamp(-limit, limit),
        exp_avg_sq=v,
        lookahead=ahead,
        sigma=sigma,
        u=u,
        keep=keep,
        delta=delta,
        used_scales=used,
        kept_scales=following,
        r=r,
    )


class Reference:
    """A parameter trained in float64: :func:`exact_step` after :func:`exact_step`, nothing ever rounded to storage."""

    def __init__(self, weight: Tensor, dtype: torch.dtype | None = None, **options: Any) -> None:
        self.dtype = dtype or weight.dtype
        self.options = options
        self.weight = weight.detach().double().clone()
        self.exp_avg = torch.zeros_like(self.weight)
        self.exp_avg_sq: Tensor | RankOne | None = torch.zeros_like(self.weight)
        if options.get("block_variance"):
            self.exp_avg_sq = RankOne.zeros(weight.shape)
        self.steps = 0
        self.kept: tuple[float, float] | None = None
        self.last: ExactStep | None = None

    def step(self, grad: Tensor | None) -> None:
        """One step; None is a step the parameter does not take."""
        if grad is None:
            return
        self.steps += 1
        done = exact_step(
            self.weight,
            self.exp_avg,
            self.exp_avg_sq,
            grad,
            self.steps,
            self.dtype,
            kept=self.kept,
            **self.options,
        )
        self.weight, self.exp_avg, self.exp_avg_sq = done.weight, done.exp_avg, done.exp_avg_sq
        self.kept = done.kept_scales if self.options.get("fused_single_pass") else None
        self.last = done


def largest_error(weight: Tensor, reference: Tensor) -> float:
    """max |weight − reference| relative to the reference's largest magnitude; 0 for empty tensors."""
    if not reference.numel():
        return 0.0
    error = (weight.detach().double() - reference).abs().max().item()
    return error / max(reference.abs().max().item(), torch.finfo(torch.float64).tiny)


# ---- grids of the storage formats ----------------------------------------------------------------------------------

_FORMATS = {  # mantissa bits, exponent of the smallest normal number
    torch.bfloat16: (7, -126),
    torch.float16: (10, -14),
    torch.float32: (23, -126),
    torch.float64: (52, -1022),
}


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of the grid points of `dtype` around `value`, float64; at a power of two, that above it in magnitude."""
    mantissa, smallest = _FORMATS[dtype]
    _, exponent = torch.frexp(value.double())  # value = f · 2^exponent with f in [½, 1)
    exponent = torch.where(value == 0, smallest, exponent - 1).clamp_min(smallest)
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - mantissa)


def grid_below(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest number of the grid at or below a finite `value`, float64, within the format's finite range."""
    if dtype == torch.float64:
        return value.double()
    ulp = spacing(value, dtype)
    largest = torch.finfo(dtype).max
    return (torch.floor(value.double() / ulp) * ulp).clamp(-largest, largest)


def grid_above(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Smallest number of the grid at or above a finite `value`, float64, within the format's finite range."""
    return -grid_below(-value.double(), dtype)


def grid_nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest number of the grid, ties to even, float64, within the format's finite range."""
    if dtype == torch.float64:
        return value.double()
    ulp = spacing(value, dtype)
    largest = torch.finfo(dtype).max
    return (torch.round(value.double() / ulp) * ulp).clamp(-largest, largest)  # torch.round takes ties to even


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor: tells −0 from 0 and compares NaN."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer) if tensor.is_floating_point() else tensor.detach()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Dtype, shape and every bit agree."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    differing = bits(actual) != bits(expected)
    assert not differing.any(), (
        f"{what}: {int(differing.sum())} of {differing.numel()} elements differ, first "
        f"{actual[differing].flatten()[0].item()!r} instead of {expected[differing].flatten()[0].item()!r}"
    )


# ---- gradients, weights, layouts -----------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that tests do not depend on each other's order."""
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(0, scale²), drawn in float64."""
    return (torch.randn(tuple(shape), generator=generator(seed), dtype=torch.float64) * scale).to(dtype)


def gradients(
    shape: Sequence[int], steps: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """A direction common to all steps plus noise of the same size, so that momentum builds up and the gate has work."""
    common = normal(shape, 1000 * seed + 999, 0.7 * scale, torch.float64)
    return [(common + normal(shape, 1000 * seed + step, 0.7 * scale, torch.float64)).to(dtype) for step in range(steps)]


def _contiguous(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format)


def _transposed(values: Tensor) -> Tensor:
    """Fortran order: the strides run the other way round."""
    order = tuple(reversed(range(values.ndim)))
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def _channels_last(values: Tensor) -> Tensor:
    if values.ndim != 4:
        return _transposed(values)
    return values.clone(memory_format=torch.channels_last)


def _strided_slice(values: Tensor) -> Tensor:
    """Every second element of the last dimension of a larger tensor, from an odd offset."""
    if values.ndim == 0:
        return values.new_zeros(5)[3:].copy_(values)[0]
    big = values.new_full((*values.shape[:-1], 2 * values.shape[-1] + 3), -7.0)
    return big[..., 3 : 3 + 2 * values.shape[-1] : 2].copy_(values)


def _offset_slice(values: Tensor) -> Tensor:
    """Rows out of the middle of a larger tensor: contiguous, but not aligned."""
    if values.ndim == 0:
        return values.new_zeros(5)[3:].copy_(values)[1]
    big = values.new_full((values.shape[0] + 3, *values.shape[1:]), -7.0)
    return big[1 : 1 + values.shape[0]].copy_(values)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "contiguous": _contiguous,
        "transposed": _transposed,
        "channels_last": _channels_last,
        "strided_slice": _strided_slice,
        "offset_slice": _offset_slice,
    }
)
"""Functions that give a tensor of the same values in another layout. Each has storage of its own."""


def out_of_memory(*_: Any, **__: Any) -> None:
    """In place of what allocates."""
    raise torch.OutOfMemoryError("none is left")


def parameter(values: Tensor, dtype: torch.dtype | None = None, layout: str = "contiguous") -> torch.nn.Parameter:
    """A parameter with a private copy of `values`."""
    return torch.nn.Parameter(LAYOUTS[layout](values.detach().to(dtype or values.dtype)))


# ---- running the optimizer -----------------------------------------------------------------------------------------


def optimizer_for(params: Iterable[Any], **options: Any) -> Any:
    """A LuminaV."""
    from luminav import LuminaV

    return LuminaV(params, **options)


def run(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter], rows: Iterable[Sequence[Tensor | None]]
) -> None:
    """One step for each row of gradients; None is a missing gradient. A gradient of another dtype is cast first."""
    for row in rows:
        for param, grad in zip(params, row, strict=True):
            param.grad = None if grad is None else grad.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def train(values: Tensor, grads: Iterable[Tensor], dtype: torch.dtype | None = None, **options: Any) -> Any:
    """One parameter of `values` through one optimizer.

    Returns:
        The parameter and its state.
    """
    param = parameter(values, dtype)
    optimizer = optimizer_for([param], **options)
    run(optimizer, [param], [[grad] for grad in grads])
    return param.detach(), dict(optimizer.state[param])
