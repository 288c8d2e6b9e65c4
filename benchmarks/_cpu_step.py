"""The CPU's part of bench_step.py: LuminaV's foreach and compiled engines and torch's AdamW, taking turns."""

from __future__ import annotations

import statistics
import time

import _checkout  # noqa: F401
import torch
from shapes import make_params, num_params, shapes_of

from luminav import LuminaV

LR = 8e-4
BASELINE = "torch-adamw-foreach"
MOST_SCRATCH_MIB = 64
MOST_RATIO = 6.0
FUSED = "torch-adamw-fused"
MOST_COMPILED = {"luminav-none-onepass-compile": 6.0, "luminav-none-exact-compile": 10.0}
"""Promised of the compiled engine, as a multiple of `FUSED`."""

Row = tuple[str, float | str, str]


def make_optimizers(shrink: int) -> dict[str, torch.optim.Optimizer]:
    """Every contender with BF16 weights of its own. The gradients are shared: nobody writes to them."""
    shapes = shapes_of("gpt2", shrink)
    base = make_params(shapes, torch.bfloat16, torch.device("cpu"))

    def copies() -> list[torch.nn.Parameter]:
        params = [torch.nn.Parameter(param.detach().clone()) for param in base]
        for param, original in zip(params, base):
            param.grad = original.grad
        return params

    return {
        "luminav-none-exact": LuminaV(copies(), lr=LR, execution="foreach"),
        "luminav-none-onepass": LuminaV(copies(), lr=LR, execution="foreach", fused_single_pass=True),
        "luminav-none-exact-compile": LuminaV(copies(), lr=LR, execution="compile"),
        "luminav-none-onepass-compile": LuminaV(copies(), lr=LR, execution="compile", fused_single_pass=True),
        "torch-adamw-foreach": torch.optim.AdamW(copies(), lr=LR, foreach=True),
        "torch-adamw-fused": torch.optim.AdamW(copies(), lr=LR, fused=True),
    }


def scratch_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Peak of the memory allocated in a step beyond what was allocated before it.

    Every allocation and release of torch's CPU allocator is an event of the profiler; the peak of their running sum is
    the scratch. The release of a tensor that is older than the step counts as 0, so the figure is never too small.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        optimizer.step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def step_times(optimizers: dict[str, torch.optim.Optimizer], repeats: int) -> dict[str, float]:
    """Median milliseconds of a step. The contenders take turns, so that a busy moment hits all alike."""
    for _ in range(2):
        for optimizer in optimizers.values():
            optimizer.step()
    times: dict[str, list[float]] = {key: [] for key in optimizers}
    for _ in range(repeats):
        for key, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) * 1e3 for key, values in times.items()}


def bench_cpu(repeats: int, shrink: int) -> list[Row]:
    """Measure, print a table, and return the rows."""
    size = num_params(shapes_of("gpt2", shrink))
    optimizers = make_optimizers(shrink)
    times = step_times(optimizers, repeats)
    print(f"GPT-2 small, {size / 1e6:.1f} M parameters in BF16, {torch.get_num_threads()} threads")
    print(f"{'contender':24}{'ms':>10}{'x foreach':>12}{'x fused':>12}{'scratch MiB':>14}")
    rows: list[Row] = []
    for key, optimizer in optimizers.items():
        ratio, scratch = times[key] / times[BASELINE], scratch_bytes(optimizer) / 2**20
        print(f"{key:24}{times[key]:10.1f}{ratio:12.2f}{times[key] / times[FUSED]:12.2f}{scratch:14.1f}")
        case = f"step/cpu-gpt2/{key}"
        rows += [(f"{case}/time", times[key], "ms"), (f"{case}/ratio", ratio, f"x {BASELINE}")]
        rows.append((f"{case}/fused_ratio", times[key] / times[FUSED], f"x {FUSED}"))
        rows.append((f"{case}/scratch", scratch, "MiB"))
    print(f"promised of foreach: at most {MOST_RATIO:g} x {BASELINE} and {MOST_SCRATCH_MIB} MiB")
    for key, most in MOST_COMPILED.items():
        print(f"promised of {key}: at most {most:g} x {FUSED}")
    return rows
