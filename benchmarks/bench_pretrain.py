"""Pretraining steps of a 4.2 B-parameter model: memory, step time and loss of every optimizer mode, side by side.

    python benchmarks/bench_pretrain.py --steps 250 --public-luminav FOLDER   M1 to M6, ours and the public package's
    python benchmarks/bench_pretrain.py --steps 250 --per-gpu 3 ...          the same, three at once, without times
    python benchmarks/bench_pretrain.py --steps 15 ...                       the times for it, one after the other
    python benchmarks/bench_pretrain.py --contenders M1 M1-release --checkpointing --limit-gib 27.5
    python benchmarks/bench_pretrain.py --chart                               draw the chart from the rows

The model is Qwen3.5-4B's architecture from its config (qwen4b_config.json), random weights, BF16, SDPA; one sequence of
512 tokens of real text a step: the source of Python's standard library, its words numbered by their hash. The loss is
worked out in chunks of 128 tokens. The learning rate warms up to 8e-4 over 25 steps and falls to zero along a cosine.

M1 and M2 are master_weights="none" exact and in one pass, M3 and M4 "semi", M5 and M6 "full"; public-M1 and so on are
the public package's, whose folder --public-luminav names. A one-pass mode's weights are compared with its exact twin's
after the last step. Each contender has a process of its own. Rows go to benchmarks/results.csv, or to the file that
--out names, as soon as a contender has ended; one that has its rows there is skipped, so a cut run goes on.
--stop-after SECONDS starts no contender that would not end in time. --devices N runs on N GPUs at once; --per-gpu N
puts up to N processes on each, as many as its memory holds, for losses and memory alone: times are not recorded then.
--limit-gib caps a process's memory.

Three quarters of the model's layers are gated delta rules. transformers runs them through flash-linear-attention where
it finds it, else in plain torch, whose kept activations (9.9 GiB) and host time outweigh the optimizer's. All
contenders of a call run the same: --linear-attention says which. Rows with flash-linear-attention begin with
pretrain/qwen4b/fla and name its version. Needs transformers, and a GPU (--tiny tries it out without).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from _checkout import wrong_package
from _pretrain_chart import draw_chart
from _pretrain_linear import FLA, TORCH, choose
from _pretrain_run import COMPARED, CONTENDERS, GIB, Job, model_config
from _rows import RESULTS, append_rows

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("_pretrain_run.py")
CHECK = Path(__file__).with_name("_pretrain_linear.py")
SCRATCH = Path(tempfile.gettempdir()) / "luminav-pretrain"
START_S, STEP_S = 45.0, 0.5
"""Guess of a contender's time before one has been seen: to import and build the model, and of a step."""
SLACK = 1.2

PARAMS = 4.206e9
ACTIVATIONS_GIB = {TORCH: 10.0, FLA: 4.0}
APART_GIB = 1.5
"""What a process holds besides its tensors: the CUDA context, and memory that the allocator keeps in pieces."""
STATE_BYTES = {"none": 4, "semi": 6, "full": 10}
"""Bytes of state per parameter by master_weights, at most: with two moments."""
UNSPLIT_BYTES = 2
"""What master weights take beyond that in the public package, which does not split them."""

UNITS = {
    "peak_gib": "GiB", "static_gib": "GiB", "dynamic_gib": "GiB", "reserved_gib": "GiB", "step_ms": "ms",
    "optimizer_ms": "ms", "first_loss": "nats", "last_loss": "nats, mean of five steps",
}  # fmt: skip
SHOWN = ("peak_gib", "static_gib", "step_ms", "optimizer_ms", "first_loss", "last_loss")


def unit_of(figure: str) -> str:
    """Unit of a figure: those of UNITS, losses along the way, and shares."""
    if figure.startswith("loss_"):
        return UNITS["last_loss"]
    return UNITS.get(figure, "parameters" if figure == "params" else "share")


@dataclass
class Session:
    """The contenders that are left, and where their figures go."""

    arguments: argparse.Namespace
    queue: deque[list[str]]
    """Twins together, the exact one first: the one-pass one needs its weights."""
    deadline: float
    longest: float | None = None
    """Seconds of the slowest contender so far."""
    memory_gib: float = math.inf
    """Of each GPU."""
    failures: int = 0
    taken: dict[int, list[float]] = field(default_factory=dict)
    """By device, the guessed GiB of each process on it."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def work(self, device: int) -> None:
        """Take contenders until none is left."""
        while (names := self._next(device)) is not None:
            ended = False
            try:
                for place, name in enumerate(names):
                    if place and not self._has_time():
                        print(f"left for another call, for want of time: {' '.join(names[place:])}", flush=True)
                        break
                    self._take(name, device)
                ended = True
            finally:  # or those that wait for this memory would wait for good
                with self.changed:
                    self.failures += not ended
                    self.taken[device].remove(self._needed(names))
                    self.changed.notify_all()

    def _next(self, device: int) -> list[str] | None:
        """The first contenders that the device's free memory holds, if need be once others have ended."""
        with self.changed:
            running = self.taken.setdefault(device, [])
            while True:
                self.changed.wait_for(lambda: not self.queue or self._fitting(running) is not None)
                names = self._fitting(running)
                if names is None:
                    return None
                self.queue.remove(names)
                self.changed.notify_all()
                if self._has_time():
                    running.append(self._needed(names))
                    return names
                print(f"left for another call, for want of time: {' '.join(names)}", flush=True)

    def _has_time(self) -> bool:
        """Whether a contender that starts now would end in time."""
        guess = START_S + STEP_S * self.arguments.steps if self.longest is None else self.longest
        return time.monotonic() + SLACK * guess <= self.deadline

    def _fitting(self, running: Sequence[float]) -> list[str] | None:
        free = self.memory_gib - sum(running)
        return next((names for names in self.queue if not running or self._needed(names) <= free), None)

    def _needed(self, names: Sequence[str]) -> float:
        return max(needed_gib(name, self.arguments) for name in names)

    def _take(self, name: str, device: int) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = delegate(name, device, self.arguments, Path(folder) / "report.json")
        case = case_of(name, self.arguments)
        versions: dict[str, str] = {}
        with self.changed:
            if isinstance(found, str):
                print(f"{name:20} {found}", flush=True)
                self.failures += 1
                rows: list[tuple[str, float | str, str]] = [(case, f"failed: {found}", "promise")]
            else:
                figures, versions = found
                self.longest = max(time.monotonic() - began, self.longest or 0.0)
                shown = "  ".join(f"{key} {figures[key]:.4g}" for key in SHOWN if key in figures)
                print(f"{name:20}{shown}  ({time.monotonic() - began:.0f} s)", flush=True)
                rows = [
                    (f"{case}/{key}", value, unit_of(key))
                    for key, value in figures.items()
                    if math.isfinite(value) and not (self.arguments.per_gpu > 1 and key.endswith("_ms"))
                ]
            append_rows(rows, "cuda" if torch.cuda.is_available() else "cpu", self.arguments.out, versions)


def case_of(name: str, arguments: argparse.Namespace) -> str:
    """Where a contender's rows begin; the settings that change a figure are part of it."""
    case = f"pretrain/{'tiny' if arguments.tiny else 'qwen4b'}/"
    case += f"{FLA}/{name}" if arguments.linear_attention == FLA else name
    case += f"/steps-{arguments.steps}" if arguments.steps != 20 else ""
    case += "/checkpointing" if arguments.checkpointing else ""
    return case + (f"/limit-{arguments.limit_gib:g}" if arguments.limit_gib is not None else "")


def needed_gib(name: str, arguments: argparse.Namespace) -> float:
    """Guess of a contender's memory at its peak, rather too high."""
    if arguments.limit_gib is not None:
        return float(arguments.limit_gib) + APART_GIB
    contender = CONTENDERS[name]
    weights = 4 if contender.dtype == "fp32" else 2
    master_weights = contender.options.get("master_weights", "none")
    state = STATE_BYTES[master_weights] * weights // 2
    state += UNSPLIT_BYTES if contender.package == "public" and master_weights != "none" else 0
    grads_gib = PARAMS * weights / GIB
    return PARAMS * (weights + state) / GIB + max(grads_gib, ACTIVATIONS_GIB[arguments.linear_attention]) + APART_GIB


def delegate(
    name: str, device: int, arguments: argparse.Namespace, report: Path
) -> tuple[dict[str, float], dict[str, str]] | str:
    """Run one contender in a process of its own: its figures and versions; a string says how it failed."""
    contender = CONTENDERS[name]
    twins = {contender.twin for contender in CONTENDERS.values()}
    has_twin = contender.twin is not None and _kept(contender.twin, arguments).exists()
    job = Job(
        contender=name,
        steps=arguments.steps,
        report=str(report),
        keep=str(_kept(name, arguments)) if name in twins else None,
        twin=str(_kept(contender.twin or "", arguments)) if has_twin else None,
        checkpointing=arguments.checkpointing,
        limit_gib=arguments.limit_gib,
        tiny=arguments.tiny,
        linear_attention=arguments.linear_attention,
    )
    folder = arguments.public_luminav if contender.package == "public" else ROOT / "src"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.devices > 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    command = [sys.executable, str(WORKER), json.dumps(asdict(job))]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        errors = [line for line in ended.stderr.splitlines() if "Error" in line]
        return (errors or ended.stderr.splitlines() or [f"status {ended.returncode}"])[-1][:200]
    answer = json.loads(report.read_text(encoding="utf-8"))
    if wrong := wrong_package(answer["luminav"], Path(folder)):
        return wrong
    return answer["figures"], answer["versions"]


def _kept(name: str, arguments: argparse.Namespace) -> Path:
    """File of a mode's compared weights, on this machine only."""
    model = "tiny" if arguments.tiny else "qwen4b"
    return Path(arguments.scratch) / f"{name}-{model}-{arguments.linear_attention}-{arguments.steps}.pt"


def finished(name: str, arguments: argparse.Namespace, *, compared: bool) -> bool:
    """True if the contender has its rows: times where they are taken, and if it is `compared` those with its twin."""
    if not arguments.out.exists():
        return False
    with arguments.out.open(newline="", encoding="utf-8") as stream:
        cases = {row["case"] for row in csv.DictReader(stream)}
    wanted = [f"{case_of(name, arguments)}/last_loss"]
    if arguments.per_gpu == 1:
        wanted.append(f"{case_of(name, arguments)}/step_ms")
    if compared:
        wanted += [f"{case_of(name, arguments)}/{part}/cosine" for part in COMPARED]
    return cases.issuperset(wanted)


def arrange(names: list[str], arguments: argparse.Namespace) -> deque[list[str]]:
    """The contenders that have no rows yet, each one-pass mode behind its exact twin."""
    queue: deque[list[str]] = deque()
    for name in names:
        twin = CONTENDERS[name].twin
        compared = twin is not None and (twin in names or _kept(twin, arguments).exists())
        if any(name in pair for pair in queue):
            continue
        if finished(name, arguments, compared=compared) and not arguments.again:
            continue
        if twin is None:
            queue.append([name])
            continue
        queued = next((pair for pair in queue if pair == [twin]), None)
        if queued is not None:
            queued.append(name)
        else:  # the twin's weights may lie here from an earlier call
            queue.append([name] if _kept(twin, arguments).exists() or twin not in names else [twin, name])
    return queue


def default_contenders(arguments: argparse.Namespace) -> list[str]:
    """Those whose package is here, but for those that run by name only."""
    here = {"luminav": True, "torch": True, "public": arguments.public_luminav is not None}
    here["flashoptim"] = find_spec("flashoptim") is not None
    return [name for name, c in CONTENDERS.items() if here[c.package] and not c.by_name_only]


def check_kernels(arguments: argparse.Namespace) -> None:
    """Compare the kernels with plain torch, in a process of its own, which also tunes them for those to come.

    Raises:
        SystemExit: They are wrong, or cannot run.
    """
    config = model_config(arguments.tiny)
    sizes = [str(config[key]) for key in ("linear_num_value_heads", "linear_value_head_dim")]
    ended = subprocess.run([sys.executable, str(CHECK), *sizes], stderr=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        last = (ended.stderr.splitlines() or [f"status {ended.returncode}"])[-1]
        raise SystemExit(f"--linear-attention fla: {last} Try --linear-attention torch, or another version of fla.")


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", choices=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--limit-gib", type=float, help="cap of the process's memory")
    parser.add_argument("--public-luminav", type=Path, metavar="FOLDER")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--per-gpu", type=int, default=1, help="processes on each GPU; more than one records no times")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--again", action="store_true", help="also those that have rows")
    parser.add_argument(
        "--linear-attention",
        choices=("auto", TORCH, FLA),
        default="auto",
        help="what runs the gated delta rule: flash-linear-attention (auto: where it can be used) or plain torch",
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, to try it out")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder of the weights that are compared")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--chart", action="store_true", help="only draw the chart from the rows")
    arguments = parser.parse_args()
    if arguments.chart:
        print(draw_chart(arguments.out))
        return
    names = arguments.contenders or default_contenders(arguments)
    if any(CONTENDERS[name].package == "public" for name in names) and arguments.public_luminav is None:
        raise SystemExit("contenders called public-... need --public-luminav FOLDER, the public package's folder.")
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    arguments.linear_attention = choose(arguments.linear_attention)
    session = Session(arguments, arrange(names, arguments), began + arguments.stop_after)
    if session.queue and arguments.linear_attention == FLA:
        check_kernels(arguments)
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        session.memory_gib = total - APART_GIB  # of this process
    slots = [device for device in range(arguments.devices) for _ in range(arguments.per_gpu)]
    threads = [threading.Thread(target=session.work, args=(device,)) for device in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(1 if session.failures else 0)


if __name__ == "__main__":
    main()
