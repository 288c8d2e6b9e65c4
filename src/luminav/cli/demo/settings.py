"""What decides the weights that a demo run ends with, each setting declared once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from luminav.cli.demo.model import ModelShape
from luminav.hyperparameters import OPTIONS

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

LUMINAV_OPTIONS = (
    "betas",
    "eps",
    "tau",
    "alpha_ss",
    "cautious",
    "cautious_clamp_min",
    "buffer",
    "stochastic_rounding",
    "bound",
    "bound_type",
    "bound_ratio",
    "master_weights",
    "fused_single_pass",
    "ema_decay",
    "execution",
    "state_bits",
    "block_variance",
)
"""Options of the optimizer that the command line offers under their own names, beside lr, weight_decay and seed."""


def default_options() -> dict[str, Any]:
    """Return the optimizer's own defaults, which the demo runs with: only the learning rate is chosen for it."""
    return {name: OPTIONS[name].default for name in LUMINAV_OPTIONS}


def _setting(default: Any, help: str, panel: str) -> Any:
    return field(default=default, metadata={"help": help, "panel": panel})


_RUN = "Run"
_MODEL = "Model"
_RATES = "Both contenders"


@dataclass(frozen=True)
class DemoSettings:
    """A demo run's settings. The command line offers every one of them; the same settings give the same weights.

    The learning rates are each contender's best of the same grid: benchmarks/results.csv, rows demo_lr.
    """

    data: str | None = _setting(
        None, "Text file, or folder of text files, in place of Python's standard library.", _RUN
    )
    steps: int = _setting(650, "Training steps of each contender.", _RUN)
    device: str = _setting("auto", "auto (CUDA if there is one), cpu, cuda, cuda:1, ...", _RUN)
    dtype: str = _setting("bfloat16", "Dtype of LuminaV's weights: bfloat16, float16 or float32.", _RUN)
    seed: int = _setting(1337, "Key of initial values, data order, rounding noise and the sample.", _RUN)
    width: int = _setting(128, "Width of the model.", _MODEL)
    layers: int = _setting(4, "Blocks of the model.", _MODEL)
    heads: int = _setting(4, "Attention heads of each block.", _MODEL)
    context: int = _setting(256, "Bytes that the model sees at once.", _MODEL)
    batch_size: int = _setting(8, "Windows of text in a step.", _MODEL)
    validation_bytes: int = _setting(256 * 1024, "Held-out bytes that the final figure is taken over.", _MODEL)
    lr: float = _setting(6e-3, "LuminaV's peak learning rate.", _RATES)
    adamw_lr: float = _setting(4e-3, "AdamW's peak learning rate.", _RATES)
    adamw_betas: tuple[float, float] = _setting((0.9, 0.98), "AdamW's betas.", _RATES)
    weight_decay: float = _setting(0.08, "Decoupled weight decay of matrices, the same for both.", _RATES)
    warmup: float = _setting(0.2, "Part of the steps over which the learning rate rises.", _RATES)
    luminav: Mapping[str, Any] = field(default_factory=default_options)
    """LuminaV's options by name, :data:`LUMINAV_OPTIONS`."""

    def __post_init__(self) -> None:
        _ = self.shape  # checks the model's size
        for name in ("steps", "batch_size", "validation_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        for name in ("lr", "adamw_lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}.")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be in [0, 1], got {self.warmup}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")

    @property
    def shape(self) -> ModelShape:
        """The model's size."""
        return ModelShape(self.width, self.layers, self.heads, self.context)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, as a checkpoint holds them."""
        return {**asdict(self), "luminav": dict(self.luminav)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DemoSettings:
        """Rebuild the settings from :meth:`as_dict`."""
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    def learning_rate(self, peak: float, step: int) -> float:
        """Return the learning rate of step 0, 1, ...: a linear rise to `peak`, then half a cosine down to 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return peak * (step + 1) / rise
        return peak * 0.5 * (1 + math.cos(math.pi * (step - rise + 1) / (self.steps - rise + 1)))
