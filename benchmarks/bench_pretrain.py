"""Pretraining steps of a 4.2 B-parameter model: memory, step time and loss of every optimizer mode, side by side.

    python benchmarks/bench_pretrain.py                                    every contender, 20 steps each
    python benchmarks/bench_pretrain.py --contenders none none-release --checkpointing --limit-gib 27.5

The model is Qwen3.5-4B's architecture from its config (qwen4b_config.json), random weights, BF16, SDPA; one sequence of
512 tokens of real text a step: the source of Python's standard library, its words numbered by their hash. The loss is
worked out in chunks of 128 tokens. --limit-gib caps the process's memory, so that a run that ends fits.
Each contender has a process of its own. Rows go to benchmarks/results.csv, or to the file that --out names.
Needs transformers and a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import torch
from _rows import RESULTS, append_rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import luminav
from luminav import LuminaV

CONFIG = Path(__file__).with_name("qwen4b_config.json")
TOKENS, CHUNK = 512, 128
LR = 8e-4
WARM_UP = 5  # steps that are left out of the times
GIB = 2**30


def _luminav(**options: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: LuminaV(params, lr=LR, execution="triton", **options)


CONTENDERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "none": _luminav(),
    "none-onepass": _luminav(fused_single_pass=True),
    "buffer1": _luminav(buffer=1),
    "semi": _luminav(master_weights="semi"),
    "full": _luminav(master_weights="full"),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
}
"""With "-release" behind its name, a LuminaV contender runs under gradient release."""


def text_tokens(vocab_size: int, count: int) -> Tensor:
    """Token numbers of real text: words and signs of the standard library's source, each numbered by its CRC-32."""
    numbers: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        words = re.findall(r"\w+|[^\w\s]|\n", path.read_text(encoding="utf-8", errors="replace"))
        numbers += [zlib.crc32(word.encode()) % vocab_size for word in words]
        if len(numbers) >= count:
            return torch.tensor(numbers[:count])
    raise SystemExit(f"the standard library has {len(numbers)} words only, {count} are needed.")


def build_model(config: dict[str, Any], device: torch.device) -> nn.Module:
    """The architecture with random weights, BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values), dtype=torch.bfloat16
        )
    return model


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, the logits made again in backward, chunk by chunk."""
    hidden = model.model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
    targets = tokens[1:]

    def chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.lm_head(hidden).float(), targets, reduction="sum")

    total = torch.zeros((), device=tokens.device)
    for part, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK)):
        total = total + checkpoint(chunk_loss, part, wanted, use_reentrant=False)
    return total / len(targets)


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """One contender's steps."""
    device = torch.device("cuda")
    if arguments.limit_gib is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(arguments.limit_gib * GIB / total)
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    model = build_model(config, device)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    name = arguments.worker.removesuffix("-release")
    optimizer = CONTENDERS[name](model.parameters())
    if arguments.worker.endswith("-release"):
        luminav.enable_gradient_release(model, optimizer)  # type: ignore[arg-type]
    tokens = text_tokens(config["vocab_size"], arguments.steps * (TOKENS + 1)).view(arguments.steps, -1).to(device)
    losses, times = [], []
    for step in range(arguments.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = loss_of(model, tokens[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    static = torch.cuda.memory_allocated()
    return {
        "params": float(sum(param.numel() for param in model.parameters())),
        "static_gib": static / GIB,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "step_ms": statistics.median(times[WARM_UP:]) * 1e3,
        "first_loss": losses[0],
        "last_loss": statistics.mean(losses[-5:]),
    }


UNITS = {
    "static_gib": "GiB", "peak_gib": "GiB", "reserved_gib": "GiB", "step_ms": "ms", "first_loss": "nats",
    "last_loss": "nats, mean of five steps",
}  # fmt: skip


def delegate(worker: str, arguments: argparse.Namespace, report: Path) -> dict[str, float] | str:
    """Run one contender in a process of its own; a string says how it failed."""
    command = [sys.executable, __file__, "--worker", worker, "--report", str(report), "--steps", str(arguments.steps)]
    command += ["--checkpointing"] if arguments.checkpointing else []
    command += [] if arguments.limit_gib is None else ["--limit-gib", str(arguments.limit_gib)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if ended.returncode == 0:
        figures: dict[str, float] = json.loads(report.read_text())
        return figures
    errors = [line for line in ended.stderr.splitlines() if "Error" in line]
    return (errors or [f"status {ended.returncode}"])[-1][:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["none", "none-release", "buffer1-release", "semi", "semi-release", "full", "adamw-fused"]
    parser.add_argument("--contenders", nargs="+", default=default, metavar="CONTENDER")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--limit-gib", type=float, help="cap of the process's memory")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        arguments.report.write_text(json.dumps(train(arguments)))
        return
    rows: list[tuple[str, float | str, str]] = []
    suffix = ("/checkpointing" if arguments.checkpointing else "") + (
        f"/limit-{arguments.limit_gib:g}" if arguments.limit_gib is not None else ""
    )
    with tempfile.TemporaryDirectory() as folder:
        for worker in arguments.contenders:
            figures = delegate(worker, arguments, Path(folder) / "report.json")
            case = f"pretrain/qwen4b/{worker}{suffix}"
            if isinstance(figures, str):
                print(f"{worker:20} {figures}", flush=True)
                rows.append((case, f"failed: {figures}", "promise"))
                continue
            print(f"{worker:20}" + "  ".join(f"{key} {figures[key]:.4g}" for key in UNITS), flush=True)
            rows += [(f"{case}/{key}", figures[key], unit) for key, unit in UNITS.items()]
    append_rows(rows, "cuda", arguments.out)


if __name__ == "__main__":
    main()
