"""Every option of the optimizer, declared once: default, range, meaning.

The constructor's signature, validation of groups, checkpoints and the documentation all read the dataclass
:class:`Options`. A value is *normalised* (aliases resolved, types made plain) when it enters the optimizer, so the rest
of the package sees one spelling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ParamSpec

import torch
from torch import Tensor

from luminav.spelling import meant_name, way_out

MASTER_WEIGHTS_ALIASES: Mapping[Any, str] = MappingProxyType(
    {
        False: "none",
        "none": "none",
        "semi": "semi",
        "half": "semi",
        "hybrid": "semi",
        True: "full",
        "full": "full",
        "fp32": "full",
    }
)
"""Accepted spellings of ``master_weights`` and what each one means."""

SEED_LIMIT = 2**63

# Ranges: how a message names one, and the test for it.
_NOT_NEGATIVE = (">= 0 and finite", lambda x: x >= 0.0)
_POSITIVE = ("> 0 and finite", lambda x: x > 0.0)
_BELOW_ONE = ("in [0, 1)", lambda x: 0.0 <= x < 1.0)
_SHARE = ("in (0, 1]", lambda x: 0.0 < x <= 1.0)


def _number(name: str, value: Any, expected: str, inside: Callable[[float], bool]) -> float:
    """Return `value` as a float that is `inside` and finite, or raise with what was expected."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (bool, str, Tensor)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number {expected}, got {value!r}.")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    if not (math.isfinite(number) and inside(number)):
        raise ValueError(f"{name} must be {expected}, got {value!r}.")
    return number


def _learning_rate(name: str, value: Any) -> float | Tensor:
    """A float, or a one-element tensor kept as it is (a scheduler may write into it)."""
    if not isinstance(value, Tensor):
        return _number(name, value, *_NOT_NEGATIVE)
    if value.numel() != 1:
        raise ValueError(f"{name} as a tensor must have one element, got shape {tuple(value.shape)}.")
    if value.is_complex():
        raise TypeError(f"{name} must be real, got {value.dtype}.")
    if value.device.type == "cpu":
        _number(name, value, *_NOT_NEGATIVE)
    return value


def _betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (beta1, beta2), got {value!r}.")
    beta1, beta2 = (_number(f"{name}[{i}]", beta, *_BELOW_ONE) for i, beta in enumerate(value))
    return beta1, beta2


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def _one_of(*choices: Any) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if isinstance(value, bool) or value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        return value

    return check


def _real(expected: str, inside: Callable[[float], bool]) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        return _number(name, value, expected, inside)

    return check


def _master_weights(name: str, value: Any) -> str:
    if not isinstance(value, (bool, str)) or value not in MASTER_WEIGHTS_ALIASES:
        spelled = ", ".join(map(repr, MASTER_WEIGHTS_ALIASES))
        raise ValueError(f"{name} must be one of {spelled}, got {value!r}.")
    return MASTER_WEIGHTS_ALIASES[value]


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int in [0, 2**63), got {value!r}.")
    if not 0 <= value < SEED_LIMIT:
        raise ValueError(f"{name} must be in [0, 2**63), got {value!r}.")
    return value


def _process_group(name: str, value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        raise TypeError(f"{name} must be a torch.distributed.ProcessGroup or None, got {value!r}.")
    return value


def _option(default: Any, check: Callable[[str, Any], Any], meaning: str, *, process: bool = False) -> Any:
    return field(default=default, metadata={"check": check, "meaning": meaning, "process": process})


@dataclass(frozen=True)
class Options:
    """One parameter group's options, normalised and checked. The field order is the constructor's."""

    lr: float | Tensor = _option(8e-4, _learning_rate, "Learning rate η, a float or a one-element tensor.")
    betas: tuple[float, float] = _option((0.9, 0.999), _betas, "Decay of the momentum (β₁) and of the variance (β₂).")
    eps: float = _option(
        1e-8,
        _real(*_NOT_NEGATIVE),
        "Floor of the step's denominator; raised to at least 1e-4 for FP16 parameters.",
    )
    weight_decay: float = _option(8e-2, _real(*_NOT_NEGATIVE), "Decoupled weight decay λ.")
    tau: float = _option(
        0.8,
        _real(*_POSITIVE),
        "Temperature τ of the tanh envelope: larger is closer to linear, smaller closer to sign.",
    )
    alpha_ss: float = _option(0.5, _real(*_NOT_NEGATIVE), "Soft-sign compression α of the single buffer's direction.")
    cautious: bool = _option(True, _flag, "Drop coordinates whose look-ahead momentum disagrees with the gradient.")
    cautious_clamp_min: float = _option(
        0.5,
        _real(*_SHARE),
        "Lower limit γ of the gate's density, so that the kept coordinates grow by at most 1/γ.",
    )
    buffer: int = _option(
        2, _one_of(1, 2), "2 keeps momentum and variance; 1 keeps momentum only, with one RMS per tensor."
    )
    stochastic_rounding: bool = _option(
        True, _flag, "Round weights and moments stochastically when stored in 16 bits; False rounds to nearest."
    )
    bound: bool = _option(True, _flag, "Limit the step relative to the weights.")
    bound_type: str = _option(
        "radial",
        _one_of("radial", "coordinate"),
        '"radial" limits the length of a tensor\'s step, "coordinate" each element\'s.',
    )
    bound_ratio: float = _option(0.03, _real(*_POSITIVE), "The bound's size ρ relative to the weights.")
    master_weights: str = _option(
        "none",
        _master_weights,
        '"none" stores everything in the parameter\'s dtype; "semi" adds an FP32 master weight; "full" keeps the '
        'moments in FP32 too. False is "none", True and "fp32" are "full", "half" and "hybrid" are "semi".',
    )
    fused_single_pass: bool = _option(
        False, _flag, "One pass over memory with the scales of earlier steps; needs a variance."
    )
    ema_decay: float = _option(
        0.8,
        _real(*_BELOW_ONE),
        "Memory κ of the kept scales in one-pass mode.",
    )
    fsdp_sync: bool = _option(
        False, _flag, "The parameters are plain shards: take sums over the process group.", process=True
    )
    execution: str = _option(
        "auto",
        _one_of("auto", "triton", "foreach", "single", "compile"),
        'Engine: "auto", "triton", "foreach", "single" or "compile".',
        process=True,
    )
    seed: int = _option(1337, _seed, "Key of the rounding noise, an int in [0, 2**63).")
    maximize: bool = _option(False, _flag, "Maximise the objective instead of minimising it.")
    capturable: bool = _option(
        False, _flag, "Keep the step count and every per-step number on the device (CUDA graphs).", process=True
    )
    process_group: Any = _option(
        None, _process_group, "Process group of the plain shards; None is the default group.", process=True
    )
    split_master_weights: bool = _option(
        True,
        _flag,
        "Keep the FP32 master of a BF16 weight as the weight and a 16-bit remainder: the same bits in half the memory.",
        process=True,
    )
    state_bits: int = _option(
        16,
        _one_of(8, 16),
        "8 keeps the moments of matrices in 8-bit codes with a power of two for every 64 elements; 16 in the "
        'parameter\'s dtype, or FP32 with master_weights="full".',
    )
    block_variance: bool = _option(
        False,
        _flag,
        "With buffer=1: keep a centred variance of rank 1 in every 64 x 64 tile of a matrix, in place of one RMS per "
        "tensor.",
    )

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> Options:
        """Check and normalise a parameter group.

        Args:
            group: Option name to value; missing options take their default, other keys are left alone.

        Returns:
            The group's options.

        Raises:
            ValueError: A value is out of range, two options exclude each other, or a key looks like a misspelt option.
            TypeError: A value has the wrong type.
        """
        refuse_misspelt_options(group)
        options = cls(**{name: f.metadata["check"](name, group.get(name, f.default)) for name, f in _FIELDS.items()})
        options._refuse_contradictions()
        return options

    @property
    def has_variance(self) -> bool:
        """Whether there is a variance, for every element or for every tile of a matrix."""
        return self.buffer == 2 or self.block_variance

    def _refuse_contradictions(self) -> None:
        """Raise ValueError for options that exclude each other."""
        if self.fused_single_pass and not self.has_variance:
            raise ValueError(
                "buffer=1 cannot be combined with fused_single_pass=True: the single buffer needs the tensor's RMS "
                "before any weight moves. Use buffer=2, block_variance=True, or fused_single_pass=False."
            )
        if self.block_variance and self.buffer == 2:
            raise ValueError(
                "block_variance=True needs buffer=1: with buffer=2 every element has a variance of its own. Leave one "
                "of the two out."
            )
        if self.state_bits == 8 and self.master_weights == "full":
            raise ValueError(
                'state_bits=8 cannot be combined with master_weights="full", which keeps the moments in FP32. Use '
                'master_weights="semi" for an FP32 master weight beside 8-bit moments.'
            )
        if self.fsdp_sync and (self.state_bits == 8 or self.block_variance):
            name = "state_bits=8" if self.state_bits == 8 else "block_variance=True"
            raise ValueError(
                f"{name} cannot be combined with fsdp_sync=True: a plain shard does not tell where its rows begin. Use "
                "fully_shard (FSDP2), whose parameters are DTensors."
            )


@dataclass(frozen=True)
class Option:
    """What is known of one option: the documentation, checkpoints and tests read this."""

    name: str
    default: Any
    meaning: str
    process: bool
    """True if the option belongs to the running process, so that a loaded file does not change it."""
    check: Callable[[str, Any], Any]
    """``check(name, value)`` returns the normalised value or raises."""


_FIELDS: Mapping[str, Field[Any]] = MappingProxyType({f.name: f for f in fields(Options)})

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {name: Option(name=name, default=f.default, **f.metadata) for name, f in _FIELDS.items()}
)
"""Option name to :class:`Option`, in the order of the constructor."""

_NAMES = tuple(OPTIONS)
_KNOWN_KEYS = frozenset([*OPTIONS, "params", "param_names"])


def refuse_misspelt_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a key of `group` is almost, but not quite, the name of an option, or its name elsewhere.

    Frameworks keep keys of their own in a group ("initial_lr", "lr_scale"), so unknown keys in general are allowed.
    """
    for key in group:
        if key not in _KNOWN_KEYS and (meant := meant_option(key)):
            raise ValueError(f"unknown option {key!r} in a parameter group. Did you mean {meant}?")


def meant_option(key: Any) -> str | None:
    """The option that an unknown key of a group must mean, as a message spells it; None if it may be somebody's own."""
    return meant_name(key, _NAMES) if isinstance(key, str) else None


_Given = ParamSpec("_Given")


def naming_unknown_options(constructor: Callable[_Given, None]) -> Callable[_Given, None]:
    """The constructor, with a way out in the message for an option that it does not have; its signature stays."""

    @functools.wraps(constructor)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> None:
        for key in kwargs:
            if key not in OPTIONS and key != "params":
                raise TypeError(f"LuminaV has no option {key!r}. {way_out(key, _NAMES)}")
        constructor(*args, **kwargs)

    return checked


SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Parameter dtypes the optimizer takes."""


@dataclass(frozen=True)
class Preset:
    """Options that go together for a purpose; every other option keeps its default."""

    purpose: str
    options: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "pretrain": Preset(
            "A decoder from random weights: a variance that forgets within twenty steps, and no gate. Clip the norm of "
            "the gradients at 1.0, as with AdamW: without it the first hundred steps are unstable.",
            MappingProxyType({"lr": 2.4e-3, "betas": (0.9, 0.95), "cautious": False}),
        ),
        "finetune": Preset(
            "Going on from trained weights, in steps below half a unit in a weight's last place.",
            MappingProxyType({"lr": 1e-5}),
        ),
        "smallest": Preset(
            "The least memory between steps that has a variance; goes with the others, "
            'preset("pretrain") | preset("smallest").',
            MappingProxyType({"buffer": 1, "block_variance": True, "state_bits": 8}),
        ),
    }
)
"""Name to :class:`Preset`. ``config.json`` carries the same; their rows are ``converge/`` in benchmarks/results.csv."""


def preset(name: str) -> dict[str, Any]:
    """Return the options of a preset, for ``LuminaV(params, **luminav.preset("pretrain"))``.

    Args:
        name: "pretrain" (a decoder from random weights), "finetune" (going on from trained weights) or "smallest" (the
            least memory that has a variance).

    Returns:
        Option name to value, a new dict: ``preset("pretrain") | {"lr": 1e-3}`` has another rate.

    Raises:
        ValueError: There is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(map(repr, PRESETS))}, got {name!r}.")
    return dict(PRESETS[name].options)
