"""Lightning: `configure_optimizers`, precision "bf16-true", and a checkpoint of the Trainer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from luminav import LuminaV, param_groups

VOCABULARY = 61
STEPS_PER_EPOCH = 4


class NextToken(lightning.LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, VOCABULARY)
        )

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        assert self.layers[2].weight.dtype == torch.bfloat16  # weights, not only arithmetic
        logits = self.layers(rows[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = LuminaV(param_groups(self), lr=4e-3, **self.options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=tiny.STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(folder: Path, options: dict[str, Any], *, steps: int, checkpoint: Path | None = None) -> dict[str, Tensor]:
    """Train in epochs of four steps: a checkpoint within one would need a data loader that can be resumed."""
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-true", max_epochs=steps // STEPS_PER_EPOCH, accumulate_grad_batches=2,
        gradient_clip_val=1.0, callbacks=[ModelCheckpoint(folder, filename="saved", save_on_train_epoch_end=True)],
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = NextToken(options)
    batches = DataLoader(tiny.tokens(4 * 2 * STEPS_PER_EPOCH, 12, VOCABULARY), batch_size=4)
    trainer.fit(module, batches, ckpt_path=checkpoint, weights_only=True)
    assert trainer.global_step == steps
    return module.state_dict()


@tiny.each_mode
def test_resumes_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", options, steps=tiny.STEPS)
    fit(tmp_path / "stopped", options, steps=tiny.STOP)
    saved = tmp_path / "stopped" / "saved.ckpt"
    tiny.assert_same_weights(fit(tmp_path / "on", options, steps=tiny.STEPS, checkpoint=saved), whole)
