"""timm: an optimizer by its registered name, its groups and schedulers, its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support
import timm
import tiny
import torch
from timm.models import resume_checkpoint
from timm.optim import OptimInfo, create_optimizer_v2
from timm.optim._optim_factory import default_registry
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver
from torch import Tensor, nn

from luminav import LuminaV

CLASSES = 5


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_registry, "_optimizers", dict(default_registry._optimizers))
    default_registry.register(OptimInfo("luminav", LuminaV, description="BF16 without an FP32 copy", has_betas=True))


def batch(step: int) -> tuple[Tensor, Tensor]:
    labels = torch.arange(4) % CLASSES
    images = support.normal((4, 3, 32, 32), seed=step) + labels[:, None, None, None]
    return images.bfloat16(), labels


class Run:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = timm.create_model(
            "vit_tiny_patch16_224", num_classes=CLASSES, img_size=32, depth=2, embed_dim=32, num_heads=2
        ).bfloat16()
        self.optimizer = create_optimizer_v2(
            self.model, "luminav", lr=4e-3, weight_decay=0.05, layer_decay=0.7, **options
        )
        self.schedule = CosineLRScheduler(self.optimizer, t_initial=tiny.STEPS, warmup_t=3, warmup_lr_init=1e-4)

    def train(self, first: int, end: int) -> dict[str, Tensor]:
        for step in range(first, end):
            self.schedule.step(step)
            images, labels = batch(step)
            nn.functional.cross_entropy(self.model(images).float(), labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.model.state_dict()


@tiny.each_mode
def test_resumes_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    whole = Run(options).train(0, tiny.STEPS)
    stopped = Run(options)
    stopped.train(0, tiny.STOP)
    saver = CheckpointSaver(stopped.model, stopped.optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(tiny.STOP)
    resumed = Run(options)
    assert resume_checkpoint(resumed.model, str(tmp_path / "last.pth.tar"), resumed.optimizer) == tiny.STOP + 1
    tiny.assert_same_weights(resumed.train(tiny.STOP, tiny.STEPS), whole)


def test_groups_and_options_arrive() -> None:
    model = timm.create_model("resnet10t", num_classes=CLASSES)
    optimizer = create_optimizer_v2(model, "luminav", lr=1e-3, weight_decay=0.05, betas=(0.8, 0.99), tau=0.7)
    assert type(optimizer) is LuminaV
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.05]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["tau"]) == (1e-3, (0.8, 0.99), 0.7)
        assert all((param.ndim > 1) == (group["weight_decay"] > 0) for param in group["params"])
