"""Times of one optimizer step: every mode of LuminaV beside the other optimizers that are installed, in one run.

    python benchmarks/bench_step.py --budget 360          both models on a GPU: about six minutes on an H200
    python benchmarks/bench_step.py --model gpt2 --modes luminav-none-onepass torch-adamw-fused
    python benchmarks/bench_step.py --model cpu           GPT-2 small on two CPU threads against torch's AdamW
    python benchmarks/bench_step.py --chart               draw docs/images/step.png from the rows, measure nothing

Every contender has a process of its own, so that one that crashes or runs out of memory costs its own rows only; it is
reported, and its row says so. The learning rate changes before each step, as under a schedule. Columns:

    ms        median of CUDA events around optimizer.step(), the steps queued one behind the other
    B/p       ms x copy ceiling / parameters: the bytes per parameter that a copy would have moved in that time
    spaced    both again for steps that a pause of 0.1 s comes before each, where no power limit lowers the clock
    host ms   median of perf_counter around the call, the queue being empty before; queued ms, the device being behind
    kernels   and H2D copies of the third step, from torch.profiler
    scratch   peak of allocated memory in a step beyond what was allocated before it, MiB
    state     memory allocated since before the optimizer was made, per parameter: state and tables
    first s   the first step, compilation with an empty Triton cache included (the first model of a process only)

Rows go to benchmarks/results.csv, or to the file that --out names.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import _measure
import torch
from _contenders import CONTENDERS, Contender
from _cpu_step import bench_cpu
from _rows import RESULTS, append_rows
from _step_chart import draw_chart
from shapes import make_params, num_params, shapes_of

CEILING = "copy"
"""A worker that measures the copy ceiling instead of a contender."""
WORKER_SECONDS = 150
UNITS = {
    "device_ms": "ms",
    "traffic": "bytes/parameter",
    "spaced_ms": "ms",
    "spaced_traffic": "bytes/parameter",
    "host_ms": "ms",
    "host_queued_ms": "ms",
    "kernels": "kernels/step",
    "copies": "copies/step",
    "scratch_mib": "MiB",
    "state": "bytes/parameter",
    "first_s": "s",
}

Figures = dict[str, Any]
Row = tuple[str, float | str, str]


# ---- a worker: one contender ---------------------------------------------------------------------------------------


def measure(contender: Contender, model: str, arguments: argparse.Namespace) -> Figures:
    """All figures of a contender on one model."""
    shapes = shapes_of(model, arguments.shrink)
    params = make_params(shapes, contender.dtype, _measure.DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = contender.make(params)

    def step() -> None:
        optimizer.step()

    def prepare() -> None:
        _measure.scale_lr(optimizer)

    first_s = timed_first_step(step)
    prepare()
    step()
    _measure.warm_up_profiler()
    prepare()
    activity = _measure.trace(step)
    gc.collect()
    state = torch.cuda.memory_allocated() - before
    return {
        "first_s": first_s,
        "kernels": len(activity.kernels),
        "copies": activity.copies_to_device,
        "kernel_us": _measure.total_us(activity.kernels),
        "state": state / num_params(shapes),
        "scratch_mib": _measure.scratch_bytes(step) / 2**20,
        "device_ms": _measure.device_ms(step, prepare, arguments.repeats, arguments.seconds),
        "spaced_ms": _measure.spaced_ms(step, prepare, 10),
        "host_ms": _measure.host_ms(step, prepare, 20),
        "host_queued_ms": _measure.host_queued_ms(step, prepare, 20),
    }


def timed_first_step(step: Callable[[], None]) -> float:
    """Seconds of the first step, to its end on the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def work(arguments: argparse.Namespace) -> None:
    """Measure one contender on all models, writing what is known after each."""
    report: Figures = {}
    if arguments.worker == CEILING:
        report["ceiling"] = _measure.copy_ceiling()
        arguments.report.write_text(json.dumps(report))
        return
    for model in models(arguments):
        report[model] = measure(CONTENDERS[arguments.worker], model, arguments)
        arguments.report.write_text(json.dumps(report))
        gc.collect()
        torch.cuda.empty_cache()


# ---- the parent ----------------------------------------------------------------------------------------------------


def models(arguments: argparse.Namespace) -> list[str]:
    return ["qwen4b", "gpt2"] if arguments.model == "both" else [arguments.model]


def delegate(worker: str, arguments: argparse.Namespace) -> Figures:
    """Run a worker with an empty Triton cache. Returns its report, with "failure" if it came to a bad end."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, __file__, "--worker", worker, "--report", str(report), "--model", arguments.model]
        command += ["--repeats", str(arguments.repeats), "--seconds", str(arguments.seconds)]
        command += ["--shrink", str(arguments.shrink)]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        try:
            ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=WORKER_SECONDS)
        except subprocess.TimeoutExpired:
            failure = f"no end after {WORKER_SECONDS} s"
        else:
            sys.stderr.write(ended.stderr)
            failure = "" if ended.returncode == 0 else reason(ended)
        figures = json.loads(report.read_text()) if report.exists() else {}
    return {**figures, **({"failure": failure} if failure else {})}


def reason(ended: subprocess.CompletedProcess[str]) -> str:
    """Why a worker failed, in a line: what it raised, or its status."""
    lines = [line.strip() for line in ended.stderr.splitlines() if line and not line[0].isspace()]
    raised = [line for line in lines if "Error" in line]
    return (raised or [f"status {ended.returncode}"])[-1][:200]


def measure_all(arguments: argparse.Namespace) -> tuple[float, dict[str, Figures]]:
    """Measure and record the copy ceiling and every contender asked for, one after the other."""
    end = time.monotonic() + arguments.budget
    report = delegate(CEILING, arguments)
    if "failure" in report:
        raise SystemExit(f"the copy ceiling could not be measured: {report['failure']}")
    append_rows([("step/copy_ceiling", report["ceiling"] / 1e12, "TB/s")], "cuda", arguments.out)
    reports: dict[str, Figures] = {}
    for key in arguments.modes:
        if not CONTENDERS[key].installed:
            print(f"{key}: {CONTENDERS[key].module} is not installed", flush=True)
        elif time.monotonic() > end:
            reports[key] = {"failure": f"not run: the budget of {arguments.budget:g} s is used up"}
        else:
            start = time.monotonic()
            reports[key] = delegate(key, arguments)
            print(f"{key}: {reports[key].get('failure', 'done')}, {time.monotonic() - start:.1f} s", flush=True)
        if key in reports:  # at once: whoever stops this program should lose one contender
            append_rows(rows_of(arguments, report["ceiling"], key, reports[key]), "cuda", arguments.out)
    return report["ceiling"], reports


def rows_of(arguments: argparse.Namespace, ceiling: float, key: str, report: Figures) -> list[Row]:
    """Every figure of a contender as a row; its failure is a row too."""
    rows: list[Row] = []
    for model in models(arguments):
        figures = report.get(model)
        if figures is None:
            rows.append((f"step/{model}/{key}/device_ms", f"failed: {report['failure']}", "ms"))
            continue
        per_ms = 1e-3 * ceiling / num_params(shapes_of(model, arguments.shrink))
        figures |= {"traffic": figures["device_ms"] * per_ms, "spaced_traffic": figures["spaced_ms"] * per_ms}
        rows += [(f"step/{model}/{key}/{name}", figures[name], unit) for name, unit in UNITS.items()]
    return rows


def print_table(arguments: argparse.Namespace, ceiling: float, reports: dict[str, Figures]) -> None:
    """One table per model."""
    for model in models(arguments):
        shapes = shapes_of(model, arguments.shrink)
        size = num_params(shapes) / 1e6
        print(f"\n{model}: {size:.1f} M parameters in {len(shapes)} tensors; copies {ceiling / 1e12:.2f} TB/s")
        heads = (
            "contender",
            "ms",
            "B/p",
            "spaced ms",
            "B/p",
            "host ms",
            "queued ms",
            "kernels",
            "H2D",
            "scratch MiB",
            "state B/p",
            "first s",
        )
        print(("{:24}" + "{:>12}" * 11).format(*heads))
        for key, report in reports.items():
            if model not in report:
                print(f"{key:24}{report['failure']}")
                continue
            figures = report[model]
            numbers = (f"{figures[name]:.4g}" for name in UNITS)
            print(f"{key:24}" + "".join(f"{number:>12}" for number in numbers))


def bench_gpu(arguments: argparse.Namespace) -> None:
    """Measure, print and record."""
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here. Use --model cpu.")
    ceiling, reports = measure_all(arguments)
    if arguments.details is not None:
        arguments.details.write_text(json.dumps({"ceiling": ceiling, "reports": reports}, indent=1))
    print_table(arguments, ceiling, reports)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen4b", "gpt2", "both", "cpu"), default="both")
    parser.add_argument("--modes", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS), metavar="CONTENDER")
    parser.add_argument("--repeats", type=int, help="steps to time; 50 on a GPU, 5 on a CPU")
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long slow contenders are timed")
    parser.add_argument("--budget", type=float, default=210.0, help="no contender starts after this many seconds")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU run")
    parser.add_argument("--shrink", type=int, default=1, help="divide every size, for a trial run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of rows")
    parser.add_argument("--details", type=Path, help="JSON with the time of every kernel")
    parser.add_argument("--chart", action="store_true", help="draw docs/images/step.png from the rows")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.repeats = arguments.repeats or (5 if arguments.model == "cpu" else 50)
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.worker is not None:
        work(arguments)
    elif arguments.chart:
        print(draw_chart(arguments.out))
    elif arguments.model == "cpu":
        torch.set_num_threads(arguments.threads)
        append_rows(bench_cpu(arguments.repeats, arguments.shrink), "cpu", arguments.out)
    else:
        bench_gpu(arguments)


if __name__ == "__main__":
    main()
