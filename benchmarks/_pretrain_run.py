"""One contender's steps of the pretraining benchmark, in a process of its own.

    python benchmarks/_pretrain_run.py JOB     a job as JSON; the figures go to the file that it names

The process imports one package called luminav: this checkout's, or the public one that stands first on its path.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from _pretrain_linear import FLA, TORCH, prepare, ran_fla, versions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CONFIG = Path(__file__).with_name("qwen4b_config.json")
TOKENS, CHUNK = 512, 128
LR = 8e-4
WARM_UP = 5  # steps that are left out of the times
LR_WARM_UP = 25
TRACE_EVERY = 50
SMOOTHED = 5
"""Steps in the mean of a loss of the trajectory."""
GIB = 2**30
COMPARED = ("layers.0", "layers.18", "head")
"""Parts of the model whose weights are compared between exact and one-pass mode."""
PIECE = 1 << 26
"""Weights compared at a time: 0.5 GiB of float64 for each tensor."""


@dataclass(frozen=True)
class Contender:
    """An optimizer and its options, as data."""

    package: str = "luminav"
    """"luminav", "public", "torch" or "flashoptim"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    """"fp32" weights run under BF16 autocast."""
    release: bool = False
    twin: str | None = None
    """The exact mode that this one-pass mode is compared with."""
    by_name_only: bool = False
    """Whether it runs only where it is asked for by name."""

    def make(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer at the benchmark's learning rate."""
        options = dict(self.options)
        if self.package == "torch":
            return torch.optim.AdamW(params, lr=LR, fused=True, weight_decay=0.08, **options)
        if self.package == "flashoptim":
            options |= {"betas": (0.9, 0.999), "weight_decay": 0.08}
            return import_module("flashoptim").FlashAdamW(params, lr=LR, **options)
        if self.package == "luminav" and torch.cuda.is_available():
            options["execution"] = "triton"  # an error where "auto" would step aside
        return import_module("luminav").LuminaV(params, lr=LR, **options)


def _modes(prefix: str, package: str) -> dict[str, Contender]:
    """M1 to M6: three kinds of master weights, exact and in one pass."""
    modes = {}
    for number, master in enumerate(("none", "semi", "full")):
        for one_pass in (False, True):
            name = f"{prefix}M{2 * number + 1 + one_pass}"
            options = {"master_weights": master, "fused_single_pass": one_pass}
            twin = f"{prefix}M{2 * number + 1}" if one_pass else None
            modes[name] = Contender(package, options, twin=twin)
    return modes


CONTENDERS: dict[str, Contender] = {
    **_modes("", "luminav"),
    "buffer1": Contender(options={"buffer": 1}),
    "buffer1-block": Contender(options={"buffer": 1, "block_variance": True}),
    "8bit": Contender(options={"state_bits": 8}),
    "8bit-onepass": Contender(options={"state_bits": 8, "fused_single_pass": True}, by_name_only=True),
    "smallest": Contender(options={"buffer": 1, "block_variance": True, "state_bits": 8}),
    "M1-release": Contender(release=True),
    "M3-release": Contender(options={"master_weights": "semi"}, release=True, by_name_only=True),
    "buffer1-release": Contender(options={"buffer": 1}, release=True, by_name_only=True),
    "8bit-release": Contender(options={"state_bits": 8}, release=True, by_name_only=True),
    "smallest-release": Contender(
        options={"buffer": 1, "block_variance": True, "state_bits": 8}, release=True, by_name_only=True
    ),
    "adamw-fused": Contender("torch"),
    "adamw-fused-fp32": Contender("torch", dtype="fp32"),
    "flashadamw": Contender("flashoptim"),
    **_modes("public-", "public"),
    "public-buffer1": Contender("public", {"buffer": 1}),
}


@dataclass(frozen=True)
class Job:
    """What a process is told."""

    contender: str
    steps: int
    report: str
    """File of the figures."""
    keep: str | None = None
    """File for the weights of the parts in COMPARED."""
    twin: str | None = None
    """File of the exact twin's."""
    checkpointing: bool = False
    limit_gib: float | None = None
    tiny: bool = False
    linear_attention: str = TORCH


TINY = {
    "num_hidden_layers": 20, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "eos_token_id": 0,
}  # fmt: skip


def model_config(tiny: bool) -> dict[str, Any]:
    """The architecture's numbers."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    if tiny:
        config |= {**TINY, "layer_types": config["layer_types"][: TINY["num_hidden_layers"]]}
    return config


def text_tokens(vocab_size: int, count: int) -> Tensor:
    """Token numbers of real text: words and signs of the standard library's source, each numbered by its CRC-32."""
    numbers: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        words = re.findall(r"\w+|[^\w\s]|\n", path.read_text(encoding="utf-8", errors="replace"))
        numbers += [zlib.crc32(word.encode()) % vocab_size for word in words]
        if len(numbers) >= count:
            return torch.tensor(numbers[:count])
    raise SystemExit(f"the standard library has {len(numbers)} words only, {count} are needed.")


def build_model(config: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The architecture with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values), dtype=dtype
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


def lr_share(step: int, steps: int) -> float:
    """Share of the peak learning rate: 25 steps of warm-up, then a cosine down to zero."""
    warm_up = min(LR_WARM_UP, steps // 4)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def compared_weights(model: Any) -> dict[str, Tensor]:
    """The parts in COMPARED, each as one flat tensor on the CPU."""
    parts = {}
    for name in COMPARED[:-1]:
        layer = model.model.layers[int(name.partition(".")[2])]
        parts[name] = torch.cat([param.detach().flatten().cpu() for param in layer.parameters()])
    return parts | {COMPARED[-1]: model.get_output_embeddings().weight.detach().cpu().flatten().clone()}


def likeness(found: Tensor, expected: Tensor, start: Tensor, device: torch.device) -> dict[str, float]:
    """Cosine and relative L2 of two ends of training, of the weights and of their way from the common start."""
    dots = torch.zeros(7, dtype=torch.float64, device=device)
    for parts in zip(*(weights.split(PIECE) for weights in (found, expected, start)), strict=True):
        f, e, s = (part.to(device, torch.float64) for part in parts)
        u, v, d = f - s, e - s, f - e
        dots += torch.stack([torch.dot(a, b) for a, b in ((f, e), (f, f), (e, e), (u, v), (u, u), (v, v), (d, d))])
    fe, ff, ee, uv, uu, vv, dd = dots.tolist()
    return {
        "cosine": fe / math.sqrt(ff * ee),
        "relative_l2": math.sqrt(dd / ee),
        "update_cosine": uv / math.sqrt(uu * vv),
        "update_relative_l2": math.sqrt(dd / vv),
    }


def train(job: Job) -> dict[str, float]:
    """One contender's steps and what they took."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if job.limit_gib is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(job.limit_gib * GIB / total)
    contender = CONTENDERS[job.contender]
    config = model_config(job.tiny)
    prepare(job.linear_attention)
    model = build_model(config, device, torch.float32 if contender.dtype == "fp32" else torch.bfloat16)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    start = compared_weights(model) if job.twin is not None else {}
    optimizer = contender.make(model.parameters())
    if contender.release:
        import_module("luminav").enable_gradient_release(model, optimizer)
    figures = _steps(job, contender, model, optimizer, config["vocab_size"], device)
    figures["params"] = float(sum(param.numel() for param in model.parameters()))
    if job.keep is not None:
        torch.save(compared_weights(model), job.keep)
    if job.twin is not None:
        ended, twin = compared_weights(model), torch.load(job.twin)
        for part in COMPARED:
            values = likeness(ended[part], twin[part], start[part], device)
            figures |= {f"{part}/{name}": value for name, value in values.items()}
    return figures


def _steps(
    job: Job, contender: Contender, model: nn.Module, optimizer: torch.optim.Optimizer, vocab: int, device: torch.device
) -> dict[str, float]:
    """Train; memory, times and losses."""
    cuda = device.type == "cuda"
    tokens = text_tokens(vocab, job.steps * (TOKENS + 1)).view(job.steps, -1).to(device)
    losses, times, updates = [], [], []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * lr_share(step, job.steps)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16) if contender.dtype == "fp32" else nullcontext():
            loss = loss_of(model, tokens[step])
        if step == 0 and ran_fla(loss) != (job.linear_attention == FLA):
            raise RuntimeError(f"--linear-attention {job.linear_attention} was asked for and is not what ran.")
        loss.backward()
        if cuda:
            marks[0].record()
        optimizer.step()
        if cuda:
            marks[1].record()
        optimizer.zero_grad()
        losses.append(loss.item())
        if cuda:
            torch.cuda.synchronize()
            updates.append(marks[0].elapsed_time(marks[1]))
        times.append(time.perf_counter() - began)
    figures = {
        "step_ms": statistics.median(times[WARM_UP:]) * 1e3,
        "first_loss": losses[0],
        "last_loss": statistics.mean(losses[-SMOOTHED:]),
    }
    for done in range(TRACE_EVERY, job.steps + 1, TRACE_EVERY):
        figures[f"loss_{done}"] = statistics.mean(losses[done - SMOOTHED : done])
    if cuda:
        static, peak = torch.cuda.memory_allocated() / GIB, torch.cuda.max_memory_allocated() / GIB
        figures |= {"static_gib": static, "peak_gib": peak, "dynamic_gib": peak - static}
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        if not contender.release:  # its updates are part of backward
            figures["optimizer_ms"] = statistics.median(updates[WARM_UP:])
    return figures


def package_file(package: str) -> str:
    """Where the luminav of this process comes from; "" for another package's contender."""
    if package not in ("luminav", "public"):
        return ""
    return str(import_module("luminav").__file__)


if __name__ == "__main__":
    told = Job(**json.loads(sys.argv[1]))
    answer = {
        "figures": train(told),
        "luminav": package_file(CONTENDERS[told.contender].package),
        "versions": versions(told.linear_attention),
    }
    Path(told.report).write_text(json.dumps(answer), encoding="utf-8")
