"""Fine-tune a language model of transformers with its weights in BF16 and no FP32 copy.

    pip install . transformers accelerate
    python examples/finetune_transformers.py                       # a tiny new model: seconds on a CPU, nothing to load
    python examples/finetune_transformers.py --model Qwen/Qwen3-0.6B --data notes/ --output runs/notes
    python examples/finetune_transformers.py --model Qwen/Qwen3-0.6B --data notes/ --output runs/notes --resume

The last line goes on from the latest checkpoint, to the bits of a run that was never interrupted. The text is that of
--data, or else the source of some modules of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from luminav import LuminaV, plan

SUFFIXES = {".md", ".py", ".rst", ".txt"}
HELD_OUT = 0.05  # share of the text, at its end, that the model is judged by


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a pretrained model; without it, a tiny new one over bytes")
    parser.add_argument("--data", type=Path, help="text file, or folder of text files")
    parser.add_argument("--output", type=Path, default=Path("runs/finetuned"), help="folder of checkpoints and result")
    parser.add_argument("--steps", type=int, default=60, help="steps in all, those before a resume included")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="tokens in a row")
    parser.add_argument("--lr", type=float, help="2e-5, or 4e-3 for the tiny new model")
    parser.add_argument("--master-weights", choices=["none", "semi", "full"], default="none")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint under --output")
    return parser.parse_args()


def latest_checkpoint(output: Path) -> str:
    """The latest complete checkpoint: transformers writes trainer_state.json last, so one cut short has none."""
    folders = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]
    if not folders:
        raise SystemExit(f"there is no complete checkpoint under {output} to go on from. Start without --resume.")
    return str(max(folders, key=lambda folder: int(folder.name.rpartition("-")[2])))


def steps_taken(checkpoint: str) -> int:
    return int(json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])


def read_text(data: Path | None) -> str:
    standard_library = Path(sysconfig.get_path("stdlib"))
    if data is None:
        files = sorted(standard_library.glob("a*.py"))
    elif data.is_dir():
        files = sorted(path for path in data.rglob("*") if path.suffix in SUFFIXES)
    else:
        files = [data]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def load_model(name: str | None) -> PreTrainedModel:
    """The pretrained model, or a tiny one; in BF16 either way."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def rows_of(tokens: list[int], context: int) -> list[dict[str, torch.Tensor]]:
    """Rows of `context` tokens for the Trainer, which shifts the labels itself."""
    rows = torch.tensor(tokens[: len(tokens) // context * context]).view(-1, context)
    if len(rows) < 2:
        raise SystemExit(f"the text has {len(tokens)} tokens, too few for two rows of {context}: name more in --data.")
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    options = parsed()
    checkpoint = latest_checkpoint(options.output) if options.resume else None
    if checkpoint is not None and steps_taken(checkpoint) >= options.steps:
        print(f"{checkpoint} has all {options.steps} steps: nothing is left to do. Ask for more with --steps.")
        return
    model = load_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else None
    text = read_text(options.data)
    rows = rows_of(tokenizer(text)["input_ids"] if tokenizer else list(text.encode()), options.context)
    held_out = max(1, int(HELD_OUT * len(rows)))
    lr = options.lr or (2e-5 if options.model else 4e-3)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output),
            max_steps=options.steps,
            save_steps=options.save_every,
            save_total_limit=2,
            logging_steps=10,
            per_device_train_batch_size=options.batch_size,
            warmup_steps=min(10, options.steps // 10),
            lr_scheduler_type="cosine",
            weight_decay=0.08,
            report_to="none",
        ),
        train_dataset=rows[:-held_out],
        eval_dataset=rows[-held_out:],
        # bf16=True is left alone: it would mean BF16 arithmetic on FP32 weights.
        optimizer_cls_and_kwargs=(LuminaV, {"lr": lr, "master_weights": options.master_weights}),
    )
    (kept,) = [row for row in plan(model).rows if row.mode == options.master_weights]
    size = (kept.weights + kept.gradients + kept.state) / 2**20
    print(f"{size:,.1f} MiB of weights, gradients and optimizer state", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if tokenizer:
        tokenizer.save_pretrained(options.output)
    print(f"step {trainer.state.global_step}: loss {loss:.3f} nats per token of held-out text", flush=True)


if __name__ == "__main__":
    main()
