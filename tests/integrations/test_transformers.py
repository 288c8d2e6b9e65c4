"""Hugging Face's Trainer: both ways of handing it an optimizer, and `resume_from_checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import get_cosine_schedule_with_warmup

from luminav import LuminaV, param_groups

VOCABULARY = 61


class Stop(TrainerCallback):
    """As an interruption right after a checkpoint: the schedule still is that of the whole run."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        attention_dropout=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=tiny.STEPS, save_steps=tiny.STOP, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, warmup_steps=3, lr_scheduler_type="cosine", weight_decay=0.08,
        logging_steps=5, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip


def dataset() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tiny.tokens(96, 12, VOCABULARY)]


def by_class(folder: Path, options: dict[str, Any], **more: Any) -> Trainer:
    return Trainer(
        model=model(), args=arguments(folder), train_dataset=dataset(),
        optimizer_cls_and_kwargs=(LuminaV, {"lr": 4e-3, **options}), **more,
    )  # fmt: skip


def by_instance(folder: Path, options: dict[str, Any], **more: Any) -> Trainer:
    trained = model()
    optimizer = LuminaV(param_groups(trained), lr=4e-3, **options)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=tiny.STEPS)
    return Trainer(
        model=trained, args=arguments(folder), train_dataset=dataset(), optimizers=(optimizer, schedule), **more
    )


def resume(start: Callable[..., Trainer], options: dict[str, Any], folder: Path) -> None:
    whole = start(folder / "whole", options)
    whole.train()
    stopped = start(folder / "stopped", options, callbacks=[Stop()])
    stopped.train()
    assert stopped.state.global_step == tiny.STOP
    resumed = start(folder / "stopped", options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == tiny.STEPS
    tiny.assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


@tiny.each_mode
def test_resumes_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    resume(by_class, options, tmp_path)


def test_an_optimizer_made_by_hand_resumes_to_the_bit(tmp_path: Path) -> None:
    resume(by_instance, {"buffer": 1}, tmp_path)


def test_trainer_makes_the_groups(tmp_path: Path) -> None:
    """The decay of `TrainingArguments` for matrices, none for norms; the learning rate is the optimizer's own."""
    trainer = by_class(tmp_path, {"bound_ratio": 0.02})
    decaying, plain = trainer.create_optimizer().param_groups
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.08, 0.0)
    assert all(param.ndim == 2 for param in decaying["params"]) and all(param.ndim == 1 for param in plain["params"])
    assert decaying["lr"] == 4e-3 and plain["bound_ratio"] == 0.02
