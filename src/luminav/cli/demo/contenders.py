"""The two contenders: LuminaV with 16-bit weights, and torch's AdamW with FP32 weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from luminav import LuminaV, param_groups
from luminav.cli.demo.model import ByteTransformer, ModelShape
from luminav.cli.demo.settings import DTYPES, DemoSettings
from luminav.cli.errors import CommandError


@dataclass(frozen=True)
class Contender:
    """One side of the comparison."""

    key: str
    """Name in files."""
    title: str
    dtype: torch.dtype
    """Dtype of the weights."""
    peak_lr: float
    make_optimizer: Callable[[ByteTransformer], Optimizer]


def contenders(settings: DemoSettings) -> tuple[Contender, Contender]:
    """Return LuminaV and AdamW as `settings` has them, in the order in which they train."""
    return luminav_contender(settings), adamw_contender(settings)


def luminav_contender(settings: DemoSettings) -> Contender:
    """Return LuminaV: weights in the dtype asked for, with an FP32 copy only if ``master_weights`` says so."""

    def make_optimizer(model: ByteTransformer) -> Optimizer:
        groups = param_groups(model, weight_decay=settings.weight_decay)
        return LuminaV(groups, lr=settings.lr, seed=settings.seed, **settings.luminav)

    return Contender(
        "luminav", f"LuminaV, {_short(DTYPES[settings.dtype])}", DTYPES[settings.dtype], settings.lr, make_optimizer
    )


def adamw_contender(settings: DemoSettings) -> Contender:
    """Return torch's AdamW over FP32 weights, in its foreach form."""

    def make_optimizer(model: ByteTransformer) -> Optimizer:
        groups = param_groups(model, weight_decay=settings.weight_decay)
        return torch.optim.AdamW(groups, lr=settings.adamw_lr, betas=settings.adamw_betas, foreach=True)

    return Contender("adamw", "AdamW, FP32", torch.float32, settings.adamw_lr, make_optimizer)


def rehearse(settings: DemoSettings, device: torch.device) -> None:
    """Take one step of each contender with a tiny model, so that a bad option shows before anything is written.

    Raises:
        CommandError: The optimizer or the device refuses.
    """
    for contender in contenders(settings):
        model = ByteTransformer(ModelShape(width=8, layers=1, heads=2, context=4), settings.seed)
        model.to(device=device, dtype=contender.dtype)
        try:
            optimizer = contender.make_optimizer(model)
            model.loss(torch.zeros(1, 5, dtype=torch.int64, device=device)).backward()
            optimizer.step()
        except (ValueError, TypeError, RuntimeError) as error:
            raise CommandError(f"{contender.title}: {error}") from error


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}[dtype]
