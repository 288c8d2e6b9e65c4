"""The contenders of the convergence benchmark, as data, and how a name with settings is read.

A run is `name:lr:seed`. Behind the name, `+option=value` changes one option: `luminav-none+beta2=0.95+tau=1.2`. Three
settings are not the optimizer's: `+clip=1.0` clips the gradient's norm, `+loss_scale=1024` multiplies the loss,
`+dtype=fp16` sets the weights' dtype. A kind of parameter (embedding, head, norm, matrix) before the option limits it
to that kind: `luminav-none+embedding.cautious=False`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from _converge_model import kind_of
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = ("embedding", "head", "norm", "matrix")

ADAMW_GRID = (7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3)
LUMINAV_GRID = (4e-4, 8e-4, 1.6e-3, 3.2e-3)
PRETRAIN_GRID = (1.2e-3, 1.6e-3, 2.4e-3, 3.2e-3)
BAR = "adamw-fp32"
"""What every other contender is compared with."""


@dataclass(frozen=True)
class Contender:
    """One optimizer with its options, the dtype of the weights, and what surrounds it."""

    name: str
    package: str
    """"torch", "luminav", "public" or "flashoptim": whose optimizer."""
    options: Mapping[str, Any]
    grid: tuple[float, ...]
    dtype: str = "bf16"
    clip: float | None = None
    loss_scale: float = 1.0
    """A constant factor on the loss, not undone: it lifts FP16 gradients, and the rule does not see their scale."""
    by_kind: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def autocast(self) -> bool:
        """FP32 weights run under BF16 autocast."""
        return self.dtype == "fp32"

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """A group for each kind of parameter; norms are not decayed."""
        groups: dict[str, dict[str, Any]] = {}
        for name, param in model.named_parameters():
            groups.setdefault(kind_of(name, param), {"params": []})["params"].append(param)
        groups["norm"]["weight_decay"] = 0.0
        for kind, options in self.by_kind.items():
            groups[kind].update(options)
        return list(groups.values())

    def make(self, model: nn.Module, lr: float, seed: int) -> torch.optim.Optimizer:
        """The optimizer. The rounding noise follows the run's seed."""
        options = dict(self.options)
        if self.package == "torch":
            optimizer: type[Any] = torch.optim.AdamW
        elif self.package == "flashoptim":
            optimizer = import_module("flashoptim").FlashAdamW
        else:
            optimizer = import_module("luminav").LuminaV
            options.setdefault("seed", 1337 + seed)
        return optimizer(self.groups(model), lr=lr, **options)


def _adamw(name: str, package: str = "torch", **settings: Any) -> Contender:
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    return Contender(name, package, options | settings.pop("options", {}), ADAMW_GRID, clip=1.0, **settings)


def _luminav(name: str, dtype: str = "bf16", loss_scale: float = 1.0, **options: Any) -> Contender:
    return Contender(f"luminav-{name}", "luminav", options, LUMINAV_GRID, dtype, loss_scale=loss_scale)


def _pretrain(name: str, dtype: str = "bf16", loss_scale: float = 1.0, **options: Any) -> Contender:
    """Candidates for the "pretrain" preset: β₂ of large-batch practice, the gate off, clipped as AdamW is."""
    options = {"betas": (0.9, 0.95), "cautious": False} | options
    return Contender(f"pretrain{name}", "luminav", options, PRETRAIN_GRID, dtype, clip=1.0, loss_scale=loss_scale)


def _public(name: str, **options: Any) -> Contender:
    return Contender(f"public-{name}", "public", options, LUMINAV_GRID)


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        _adamw("adamw-fp32", dtype="fp32", options={"fused": True}),
        _adamw("adamw-bf16", options={"fused": True}),
        _adamw("flashadamw", "flashoptim"),
        _luminav("none"),
        _luminav("semi", master_weights="semi"),
        _luminav("full", master_weights="full"),
        _luminav("onepass", fused_single_pass=True),
        _luminav("buffer1", buffer=1),
        _luminav("buffer1-block", buffer=1, block_variance=True),
        _luminav("8bit", state_bits=8),
        _luminav("fp16", "fp16"),
        _luminav("fp16-scaled", "fp16", loss_scale=1024.0),
        _luminav("fp32", "fp32"),
        _luminav("nearest", stochastic_rounding=False),
        _luminav("fp32-nearest", "fp32", stochastic_rounding=False),
        _pretrain(""),
        _pretrain("-b99", betas=(0.9, 0.99)),
        _pretrain("-tau06", tau=0.6),
        _pretrain("-tau12", tau=1.2),
        _pretrain("-gate", cautious=True),
        _pretrain("-semi", master_weights="semi"),
        _pretrain("-full", master_weights="full"),
        _pretrain("-onepass", fused_single_pass=True),
        _pretrain("-buffer1", buffer=1),
        _pretrain("-buffer1-block", buffer=1, block_variance=True),
        _pretrain("-8bit", state_bits=8),
        _pretrain("-smallest", buffer=1, block_variance=True, state_bits=8),
        _pretrain("-fp16", "fp16"),
        _pretrain("-fp16-scaled", "fp16", loss_scale=1024.0),
        _pretrain("-fp32", "fp32"),
        _public("none"),
        _public("onepass", fused_single_pass=True),
        _public("buffer1", buffer=1),
        _public("pretrain", betas=(0.9, 0.95), cautious=False),
    )
}


def find_contender(name: str) -> Contender:
    """The contender called `name`, with the settings behind its name.

    Raises:
        ValueError: No such contender, or a setting that cannot be read.
    """
    base, *settings = name.split("+")
    if base not in CONTENDERS:
        raise ValueError(f"no contender {base!r}; there are {', '.join(CONTENDERS)}.")
    contender = replace(CONTENDERS[base], name=name)
    for setting in settings:
        contender = _with_setting(contender, setting)
    return contender


def _with_setting(contender: Contender, setting: str) -> Contender:
    key, equals, text = setting.partition("=")
    if not equals:
        raise ValueError(f"a setting is option=value, got {setting!r}.")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a bare word
        value = text
    if key in ("clip", "dtype", "loss_scale"):
        return replace(contender, **{key: value})
    kind, dot, option = key.partition(".")
    if not dot:
        return replace(contender, options=_changed(contender.options, contender.options, key, value))
    if kind not in KINDS:
        raise ValueError(f"a kind of parameter is one of {', '.join(KINDS)}, got {kind!r}.")
    own = _changed(contender.by_kind.get(kind, {}), contender.options, option, value)
    return replace(contender, by_kind={**contender.by_kind, kind: own})


def _changed(own: Mapping[str, Any], around: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`own` with one option changed; beta1 and beta2 change one of the pair."""
    if key not in ("beta1", "beta2"):
        return {**own, key: value}
    beta1, beta2 = own.get("betas", around.get("betas", (0.9, 0.999)))
    return {**own, "betas": (value, beta2) if key == "beta1" else (beta1, value)}
