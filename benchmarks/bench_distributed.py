"""What sharding costs a step: collectives, bytes and time as the number of tensors and ranks grows.

    python benchmarks/bench_distributed.py                       gloo on this machine's CPU: about a minute
    python benchmarks/bench_distributed.py --device cuda         NCCL, one GPU per rank, as many ranks as there are GPUs

On paper. A parameter's row of the message is 6 FP64 numbers (five sums and whether there is a gradient), and one row
more carries the flags: a rank sends 48·(P + 1) bytes for P parameters in one all-gather and receives W − 1 times as
many. With buffer=1 another one of 24·(P + 1) bytes goes before it. One all-reduce per tensor, as the obvious code has
it, would be P calls. Columns:

    calls       collectives in a step, counted
    sent        bytes that a rank sends in a step, counted
    collective  ms of the all-gather and of adding up, on the slowest rank
    each        ms of P all-reduces of four numbers each, for comparison

Times are the best of several, since a CPU that other work shares is late most times.

Rows go to benchmarks/results.csv, or to the file that --out names.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import torch
import torch.distributed as dist
from _rows import RESULTS, append_rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from luminav import LuminaV

LOCAL_ELEMENTS = 64
NUM_PARAMS = (10, 100, 500)
MODES: dict[str, dict[str, Any]] = {"exact": {}, "single": {"buffer": 1}}
UNITS = {"calls": "collectives/step", "sent": "bytes/step", "collective": "ms", "each": "ms"}


class Counter(TorchDispatchMode):
    """Counts collectives and the bytes that a rank puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls += 1
            self.sent += args[1].nbytes  # of _allgather_base_(output, input, …)
        return func(*args, **(kwargs or {}))


def best_ms(call: Any, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    slowest = torch.tensor(min(times), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def measure(num_params: int, options: dict[str, Any], device: torch.device) -> dict[str, float]:
    """The figures of one optimizer."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    whole = torch.ones(LOCAL_ELEMENTS * world, device=device)
    params = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for _ in range(num_params)]
    optimizer = LuminaV(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with Counter() as counter:
        optimizer.step()
    (domain,) = optimizer._stepper.sharding.domains
    message = torch.ones(num_params + 1, 6, dtype=torch.float64, device=device)
    numbers = [torch.ones(4, dtype=torch.float64, device=device) for _ in range(num_params)]
    return {
        "calls": counter.calls,
        "sent": counter.sent,
        "collective": best_ms(lambda: domain._gather(message), device, repeats=30),
        "each": best_ms(lambda: [dist.all_reduce(number) for number in numbers], device, repeats=4),
    }


def rank(number: int, world: int, file: str, device_type: str, answers: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, number) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=number, world_size=world)
    for num_params, (mode, options) in itertools.product(NUM_PARAMS, MODES.items()):
        figures = measure(num_params, options, device)
        if number == 0:
            answers.put((mode, num_params, figures))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="default: 2 and 4, or all GPUs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    worlds = arguments.ranks or ([2, 4] if arguments.device == "cpu" else [torch.cuda.device_count()])
    rows = []
    for world in worlds:
        answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank, (world, f"{folder}/meet", arguments.device, answers), nprocs=world)
            while not answers.empty():
                mode, num_params, figures = answers.get()
                print(f"{mode:8} {world} ranks {num_params:5} tensors", {k: round(v, 3) for k, v in figures.items()})
                case = f"distributed/{mode}/ranks={world}/tensors={num_params}"
                rows += [(f"{case}/{name}", value, UNITS[name]) for name, value in figures.items()]
    append_rows(rows, arguments.device, arguments.out)


if __name__ == "__main__":
    main()
