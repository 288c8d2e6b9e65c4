"""accelerate in one process: `prepare`, gradient accumulation, `save_state` and `load_state`.

FSDP2 on two processes is in `distributed/test_frameworks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader

from luminav import LuminaV, param_groups

VOCABULARY = 61
ACCUMULATED = 2


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    """accelerate keeps its settings in the classes, where the Trainer of transformers finds and leaves them too."""
    for kept in (AcceleratorState, GradientState, PartialState):
        kept._reset_state()
    yield
    for kept in (AcceleratorState, GradientState, PartialState):
        kept._reset_state()


class Run:
    """What a user writes: everything through `prepare`, the loop as accelerate's documents have it."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, VOCABULARY)
        ).bfloat16()  # fmt: skip
        optimizer = LuminaV(param_groups(model), lr=4e-3, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=tiny.STEPS)
        batches = DataLoader(tiny.tokens(4 * ACCUMULATED * tiny.STEPS, 12, VOCABULARY), batch_size=4)
        self.model, self.optimizer, self.schedule, self.batches = self.accelerator.prepare(
            model, optimizer, schedule, batches
        )

    def train(self, first: int, end: int) -> dict[str, Tensor]:
        for rows in self.accelerator.skip_first_batches(self.batches, first * ACCUMULATED):
            with self.accelerator.accumulate(self.model):
                logits = self.model(rows[:, :-1])
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            first += self.accelerator.sync_gradients
            if first == end:
                break
        return self.model.state_dict()


@tiny.each_mode
def test_resumes_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    whole = Run(options).train(0, tiny.STEPS)
    stopped = Run(options)
    stopped.train(0, tiny.STOP)
    stopped.accelerator.save_state(str(tmp_path))
    resumed = Run(options)
    resumed.accelerator.load_state(str(tmp_path))
    tiny.assert_same_weights(resumed.train(tiny.STOP, tiny.STEPS), whole)
    steps = {int(state["step"]) for state in resumed.optimizer.optimizer.state.values()}
    assert steps == {tiny.STEPS}  # accumulated gradients are one step
