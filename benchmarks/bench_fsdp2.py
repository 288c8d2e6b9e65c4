"""FSDP2 on several GPUs: the bits of one GPU, and what the optimizer and its collective cost.

    torchrun --nproc-per-node 2 benchmarks/bench_fsdp2.py equal             the same gradients, sharded and whole
    torchrun --nproc-per-node 2 benchmarks/bench_fsdp2.py speed             the 4.2 B model against fused AdamW
    torchrun --nproc-per-node 2 benchmarks/bench_fsdp2.py save --folder F   then, on any number of processes,
    torchrun --nproc-per-node 1 benchmarks/bench_fsdp2.py resume --folder F the same bits as never stopping

Without GPUs everything runs on gloo, with a tiny model for `speed` (--tiny): a dry run. Rows go to
benchmarks/results.csv, or to the file that --out names; the first rank writes them. `speed` needs transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import _checkout  # noqa: F401
import torch
import torch.distributed as dist
from _claims import most_ulps
from _pretrain_run import CONFIG, build_model, loss_of, text_tokens
from _rows import RESULTS, append_rows
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_folder
from torch.distributed.checkpoint.state_dict_saver import save as save_folder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from luminav import LuminaV, plan
from luminav.cli.demo.model import ByteTransformer, ModelShape
from luminav.domains import Domain

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_fsdp2 import start_process_group

Row = tuple[str, float | str, str]

SHAPE = ModelShape(width=192, layers=4, heads=4, context=128)
STEPS = 50
STOP = 20
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16-onepass": (torch.bfloat16, {"fused_single_pass": True}),
    "bf16-buffer1": (torch.bfloat16, {"buffer": 1}),
    "bf16-full": (torch.bfloat16, {"master_weights": "full"}),
    "bf16-free": (torch.bfloat16, {"cautious": False, "bound": False}),
}
TINY = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "eos_token_id": 0,
}  # fmt: skip


def byte_model(device: torch.device, dtype: torch.dtype, *, sharded: bool) -> ByteTransformer:
    """The demo's model, whole or under FSDP2."""
    model = ByteTransformer(SHAPE, 1337).to(device, dtype)
    if sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def feed(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    """The same global gradients, whatever the sharding."""
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10_000 * step + number)
        grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(dtype).to(param.device)
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        else:
            param.grad = grad


def run(model: nn.Module, optimizer: LuminaV, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        feed(model, step, dtype)
        optimizer.step()


def whole(model: nn.Module) -> list[Tensor]:
    """Full weights on every rank."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu() for p in model.parameters()]


# ---- equal ---------------------------------------------------------------------------------------------------------


def compare(found: list[Tensor], expected: list[Tensor]) -> tuple[float, float, float]:
    """Share of bit-equal elements, most ulps apart, and largest error relative to the tensor's largest weight."""
    equal = sum(int((a == b).sum()) for a, b in zip(found, expected))
    total = sum(a.numel() for a in found)
    ulps = max(most_ulps(a, b) for a, b in zip(found, expected))
    error = max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in zip(found, expected))
    return equal / total, float(ulps), error


def equal(device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    """Fifty steps of every mode on all ranks against one."""
    rows: list[Row] = []
    world = dist.get_world_size()
    for name, (dtype, options) in MODES.items():
        results = []
        for sharded in (True, False):
            model = byte_model(device, dtype, sharded=sharded)
            optimizer = LuminaV(model.parameters(), lr=3e-3, execution=arguments.execution, **options)
            run(model, optimizer, range(STEPS), dtype)
            results.append(whole(model))
        share, ulps, error = compare(*results)
        good = error <= 1e-6 if dtype == torch.float32 else share >= 0.9999 and ulps <= 2
        if name.endswith("free"):
            good = share == 1.0
        case = f"fsdp2/{world}-ranks/equal/{name}"
        rows += [(f"{case}/bit_equal", share, "share"), (f"{case}/ulps", ulps, "ulp"), (f"{case}/error", error, "rel")]
        say(f"{'PASS' if good else 'FAIL'}  {name:14} bit-equal {share:.6%}, {ulps:g} ulp, error {error:.2g}")
    return rows


# ---- speed ---------------------------------------------------------------------------------------------------------


@contextmanager
def timed_collectives(device: torch.device, times: list[tuple[Any, Any]]) -> Iterator[None]:
    """Record events around the optimizer's own collectives."""
    original = Domain._gather

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        pair = events(device)
        pair[0].record()
        result = original(self, *args, **kwargs)
        pair[1].record()
        times.append(pair)
        return result

    with mock.patch.object(Domain, "_gather", timed):
        yield


class _HostEvent:
    """A stand-in for a CUDA event on the CPU."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: _HostEvent) -> float:
        return (other.at - self.at) * 1e3


def events(device: torch.device) -> tuple[Any, Any]:
    if device.type != "cuda":
        return _HostEvent(), _HostEvent()
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def speed(device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    """Training steps of the large model under fully_shard."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    if arguments.tiny:
        config |= {**TINY, "layer_types": config["layer_types"][:4]}
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "none": lambda params: LuminaV(params, execution=arguments.execution),
        "none-onepass": lambda params: LuminaV(params, execution=arguments.execution, fused_single_pass=True),
        "adamw-fused": lambda params: torch.optim.AdamW(params, lr=8e-4, fused=True),
    }
    rows: list[Row] = []
    for name, make in makers.items():
        figures = speed_of(make, config, device, arguments)
        say(f"{name:14}" + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
        units = {"tokens_per_s": "tokens/s", "peak_gib": "GiB/rank", "planned_gib": "GiB/rank"}
        case = f"fsdp2/{dist.get_world_size()}-ranks/speed/{name}"
        rows += [(f"{case}/{key}", value, units.get(key, "ms")) for key, value in figures.items()]
    return rows


class WithLoss(nn.Module):
    """The model with its loss as the output, so that all of it runs inside the root's forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.inner, tokens)


def speed_of(
    make: Any, config: dict[str, Any], device: torch.device, arguments: argparse.Namespace
) -> dict[str, float]:
    model: Any = WithLoss(build_model(config, device))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make(model.parameters())
    tokens = text_tokens(config["vocab_size"], 513 * (arguments.steps + dist.get_rank()))[-513 * arguments.steps :]
    batches = tokens.view(arguments.steps, -1).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps: list[Any] = []
    updates: list[Any] = []
    collectives: list[Any] = []
    with timed_collectives(device, collectives):
        for batch in batches:
            step, update = events(device), events(device)
            step[0].record()
            model(batch).backward()
            update[0].record()
            optimizer.step()
            update[1].record()
            optimizer.zero_grad()
            step[1].record()
            steps.append(step)
            updates.append(update)
    if device.type == "cuda":
        torch.cuda.synchronize()

    def median(pairs: list[tuple[Any, Any]]) -> float:
        kept = pairs[len(pairs) // 3 :]
        return statistics.median(a.elapsed_time(b) for a, b in kept) if kept else 0.0

    step_ms = median(steps)
    figures = {
        "step": step_ms,
        "optimizer": median(updates),
        "collective": median(collectives),
        "tokens_per_s": 512 * dist.get_world_size() / (step_ms * 1e-3),
    }
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if isinstance(optimizer, LuminaV):
        local_sizes = [param.to_local() for param in model.parameters()]
        row = next(row for row in plan(local_sizes).rows if row.mode == "none")
        figures["planned_gib"] = row.total / 2**30
    del model, optimizer
    gc.collect()  # FSDP's modules are in reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return figures


# ---- save and resume -----------------------------------------------------------------------------------------------


def save(device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    """Train, save on the way, and write down where a run that never stops ends."""
    for name, (dtype, options) in MODES.items():
        model = byte_model(device, dtype, sharded=True)
        optimizer = LuminaV(model.parameters(), lr=3e-3, execution=arguments.execution, **options)
        run(model, optimizer, range(STOP), dtype)
        weights, state = get_state_dict(model, optimizer)
        save_folder({"model": weights, "optimizer": state}, checkpoint_id=arguments.folder / name)
        run(model, optimizer, range(STOP, STEPS), dtype)
        ended = whole(model)
        if dist.get_rank() == 0:
            torch.save(ended, arguments.folder / f"{name}.pt")
    say(f"saved after step {STOP} of {STEPS} on {dist.get_world_size()} ranks")
    return []


def resume(device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    """Go on from a checkpoint of any number of ranks."""
    rows: list[Row] = []
    for name, (dtype, options) in MODES.items():
        model = byte_model(device, dtype, sharded=True)
        optimizer = LuminaV(model.parameters(), lr=3e-3, execution=arguments.execution, **options)
        weights, state = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": state}
        load_folder(saved, checkpoint_id=arguments.folder / name)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        run(model, optimizer, range(STOP, STEPS), dtype)
        share, ulps, error = compare(whole(model), torch.load(arguments.folder / f"{name}.pt"))
        good = error <= 1e-6 if dtype == torch.float32 else share >= 0.9999 and ulps <= 2
        say(f"{'PASS' if good else 'FAIL'}  {name:14} bit-equal {share:.6%}, {ulps:g} ulp, error {error:.2g}")
        case = f"fsdp2/{dist.get_world_size()}-ranks/resume/{name}"
        rows += [(f"{case}/bit_equal", share, "share"), (f"{case}/ulps", ulps, "ulp"), (f"{case}/error", error, "rel")]
    return rows


def say(line: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


PARTS = {"equal": equal, "speed": speed, "save": save, "resume": resume}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--folder", type=Path, help="where `save` writes and `resume` reads")
    parser.add_argument("--steps", type=int, default=15, help="steps of `speed`")
    parser.add_argument("--execution", default="auto", help="engine")
    parser.add_argument("--tiny", action="store_true", help="a tiny model for `speed`")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = start_process_group()
    rows = PARTS[arguments.part](device, arguments)
    if rows and dist.get_rank() == 0:
        append_rows(rows, device, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
