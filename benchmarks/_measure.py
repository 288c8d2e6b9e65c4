"""How a step is measured on an accelerator of the CUDA kind: times, launches, memory."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

DEVICE = torch.device("cuda")

Call = Callable[[], object]

WARM_UP = 3
COPY_BYTES = 1 << 32
PAUSE_S = 0.1
SPIN_CYCLES = 20_000_000
"""About 10 ms, longer than a host needs for a step."""


class Activity(NamedTuple):
    """What the device did during a call."""

    kernels: list[tuple[str, float]]
    """Name and microseconds of each."""
    copies_to_device: int


def trace(call: Call) -> Activity:
    """Profile one call. Kernels are told from the profiler's own marks by the trace's categories."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
    kernels = [(event["name"], float(event["dur"])) for event in events if event.get("cat") == "kernel"]
    copies = [event["name"] for event in events if event.get("cat") == "gpu_memcpy"]
    return Activity(kernels, sum("HtoD" in name for name in copies))


def warm_up_profiler() -> None:
    """Start the profiler once: its first session may miss what happens while it starts."""
    number = torch.ones((), device=DEVICE)
    trace(lambda: number.add_(1.0))


def device_ms(step: Call, prepare: Call, repeats: int, seconds: float) -> float:
    """Median time between events around steps that follow each other without a wait, so that host time hides.

    Args:
        step: The call to be timed.
        prepare: What goes before each, and must not cost the device anything.
        repeats: How many steps to time.
        seconds: About how long that may take; slow steps are repeated less, at least five times.
    """
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(WARM_UP):
        prepare()
        step()
    torch.cuda.synchronize()
    once = (time.perf_counter() - start) / WARM_UP
    repeats = max(5, min(repeats, int(seconds / once)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        prepare()
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def spaced_ms(step: Call, prepare: Call, repeats: int) -> float:
    """Median time between events around a step that a pause comes before, as a backward pass does in training.

    Steps that compute much while they move memory reach the card's power limit if they follow each other, and its clock
    falls (on an H200 NVML named the power cap as the reason). Alone they do not.
    """
    times = []
    for _ in range(repeats):
        prepare()
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)  # the host is done with the step before the device begins it
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def host_ms(step: Call, prepare: Call, repeats: int) -> float:
    """Median time until the call returns, the device's queue being empty before."""
    times = []
    for _ in range(repeats):
        prepare()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e3


def host_queued_ms(step: Call, prepare: Call, repeats: int) -> float:
    """Median time until the call returns, called again and again, the device being behind.

    Without the waits of :func:`host_ms` the thousands of small objects of a model are still in the processor's cache.
    """
    times = []
    for _ in range(2 * repeats):
        prepare()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times[repeats:]) * 1e3


def scratch_bytes(step: Call) -> int:
    """Most memory allocated at once during a step, beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_ceiling() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device=DEVICE).random_()
    target = torch.empty_like(source)
    milliseconds = device_ms(lambda: target.copy_(source), lambda: None, 30, 1.0)
    return 2 * COPY_BYTES / (milliseconds * 1e-3)


def scale_lr(optimizer: torch.optim.Optimizer) -> None:
    """What a schedule does between steps."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9999


def total_us(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Microseconds by kernel name."""
    totals: dict[str, float] = {}
    for name, duration in kernels:
        totals[name] = totals.get(name, 0.0) + duration
    return totals
