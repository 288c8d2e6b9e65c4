"""The optimizers that are measured side by side, each at its defaults and one learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import _checkout  # noqa: F401
import torch

from luminav import LuminaV

LR = 8e-4

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Contender:
    """One optimizer in one mode."""

    key: str
    make: Make
    dtype: torch.dtype = torch.bfloat16
    module: str = "torch"
    """What must be importable."""

    @property
    def installed(self) -> bool:
        return find_spec(self.module) is not None


def _luminav(key: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Contender:
    def make(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return LuminaV(params, lr=LR, execution="triton", **options)  # an error where "auto" would step aside

    return Contender(f"luminav-{key}", make, dtype, "triton")


def _torch(key: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Contender:
    return Contender(f"torch-adamw-{key}", lambda params: torch.optim.AdamW(params, lr=LR, **options), dtype)


def _peer(key: str, module: str, name: str, **options: Any) -> Contender:
    root = module.partition(".")[0]
    return Contender(key, lambda params: getattr(import_module(module), name)(params, lr=LR, **options), module=root)


# The order of measurement: if time runs out, the last ones go without.
CONTENDERS: dict[str, Contender] = {
    contender.key: contender
    for contender in (
        _luminav("none-onepass", fused_single_pass=True),
        _luminav("none-exact"),
        _torch("fused", fused=True),
        _luminav("semi-onepass", master_weights="semi", fused_single_pass=True),
        _luminav("full-onepass", master_weights="full", fused_single_pass=True),
        _luminav("semi-onepass-unsplit", master_weights="semi", fused_single_pass=True, split_master_weights=False),
        _luminav("full-onepass-unsplit", master_weights="full", fused_single_pass=True, split_master_weights=False),
        _luminav("buffer1-exact", buffer=1),
        _luminav("8bit-onepass", state_bits=8, fused_single_pass=True),
        _luminav("8bit-exact", state_bits=8),
        _luminav("block-onepass", buffer=1, block_variance=True, fused_single_pass=True),
        _luminav("smallest-onepass", buffer=1, block_variance=True, state_bits=8, fused_single_pass=True),
        _luminav("semi-exact", master_weights="semi"),
        _luminav("full-exact", master_weights="full"),
        _torch("foreach", foreach=True),
        _luminav("fp32-onepass", torch.float32, fused_single_pass=True),
        _luminav("fp32-exact", torch.float32),
        _torch("fp32-fused", torch.float32, fused=True),
        _peer("flashadamw", "flashoptim", "FlashAdamW"),
        _peer("optimi-adamw", "optimi", "AdamW"),
        _peer("torchao-adamw8bit", "torchao.optim", "AdamW8bit", bf16_stochastic_round=True),
        _peer("bitsandbytes-adamw8bit", "bitsandbytes.optim", "AdamW8bit"),
    )
}
