"""Training quality: small decoders on real text, LuminaV's modes beside AdamW, seed by seed.

    python benchmarks/bench_converge.py --grid all                        every contender's learning rates, seed 0
    python benchmarks/bench_converge.py --paired pretrain ... --seeds 5   seeds 0 to 4 at each one's best rate
    python benchmarks/bench_converge.py --runs pretrain+tau=1.2:1.6e-3:0  one run: name, rate, seed
    python benchmarks/bench_converge.py --finetune                        go on from a trained model at 1e-5
    python benchmarks/bench_converge.py                                   print what the rows say

A model of about 40 M parameters (--size 40m, 120m, or tiny for a CPU) trains for 700 steps of 32k tokens: 100 steps of
warm-up, then a cosine down to a tenth. The figure is the validation loss in nats. The same seed has the same initial
weights and the same order of the data for every contender. Text is what is installed with Python (--data names a
folder instead); its hash stands in every row. Each run appends a row to runs.csv in --out and is skipped where that
row is; --stop-after SECONDS starts no run that would not end in time. --devices N shares the runs out over N GPUs.
--public-luminav FOLDER holds the public package for the contenders called public-...; they have processes of their own.
--results FILE appends the summary to a file of rows such as benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _checkout import wrong_package
from _converge_chart import draw_chart
from _converge_contenders import BAR, CONTENDERS, find_contender
from _converge_model import SIZES
from _converge_rows import Key, Ledger, key_of, print_table, result_rows, run_rows, summarise
from _converge_run import Recipe, Run
from _converge_text import Corpus, prepare
from _rows import RESULTS, append_rows, stamp

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("_converge_run.py")
CACHE = Path(tempfile.gettempdir()) / "luminav-converge"

RECIPES = {
    "pretrain": Recipe("pretrain", steps=700, warm_up=100),
    "wsd": Recipe("wsd", steps=700, warm_up=100, schedule="wsd"),
    "finetune": Recipe("finetune", steps=120, warm_up=10, schedule="constant", eval_batches=8, eval_every=20),
}
TINY: dict[str, Any] = {
    "steps": 60,
    "warm_up": 10,
    "eval_batches": 2,
    "eval_every": 20,
    "last_evals": 3,
    "last_every": 5,
}
FINETUNE_LR = 1e-5
START_LR = 1.5e-3
FINETUNE = ("adamw-fp32", "luminav-fp32", "luminav-full", "luminav-none", "luminav-nearest")
FIRST_RUN_S = {"cuda": 75.0, "cpu": 60.0}
"""Guess of a worker's first run, its compilation included."""
COMPILE_S = 25.0
"""Likewise what a dtype's first run adds."""
SLACK = 1.15


@dataclass
class Worker:
    """A process that trains on one device, with one of the packages called luminav."""

    device: int | None
    public: Path | None
    log: Path
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        environment = dict(os.environ)
        if self.device is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[self.device] if visible != [""] else str(self.device)
        folder = self.public if self.public is not None else ROOT / "src"
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, env=environment,
        )  # fmt: skip

    def train(self, run: Run) -> dict[str, Any] | str:
        """The run's figures, or the last line of how the process died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(run.to_json() + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._last_words()
        answer = self.process.stdout.readline()
        if not answer:
            return self._last_words()
        result: dict[str, Any] = json.loads(answer)
        folder = self.public if self.public is not None else ROOT / "src"
        version, file = result["luminav"]
        if wrong := wrong_package(file, folder):
            return f"the worker {wrong}"
        result["version"] = version
        return result

    def _last_words(self) -> str:
        self.process.wait()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return (lines or [f"status {self.process.returncode}"])[-1][:300]

    def close(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait()


@dataclass
class Session:
    """The runs to be taken, the time left, and where the figures go."""

    ledger: Ledger
    queue: deque[tuple[Key, Run]]
    deadline: float
    public: Path | None
    first_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    failures: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def next_run(self, expected: Callable[[Run], float]) -> tuple[Key, Run] | None:
        """The next run that would end in time; those that would not are left for another call."""
        with self.lock:
            while self.queue:
                key, run = self.queue.popleft()
                if time.monotonic() + expected(run) < self.deadline:
                    return key, run
                self.left.append(":".join(key[:3]))
        return None

    def work_on(self, devices: Sequence[int | None]) -> None:
        """Take the runs on several devices at once."""
        with tempfile.TemporaryDirectory() as logs:
            threads = [
                threading.Thread(target=self.work, args=(device, Path(logs) / f"{number}.log"))
                for number, device in enumerate(devices)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def work(self, device: int | None, log: Path) -> None:
        """Take runs on one device until none is left."""
        worker: Worker | None = None
        seen: dict[tuple[str, int], float] = {}  # seconds of the last run, by size and steps
        compiled: set[tuple[str, str]] = set()

        def expected(run: Run) -> float:
            known = seen.get((run.size, run.recipe.steps))
            if known is None:
                return self.first_s
            variant = (run.size, find_contender(run.contender).dtype)
            return SLACK * known + (0.0 if variant in compiled else COMPILE_S)

        while (taken := self.next_run(expected)) is not None:
            key, run = taken
            public = self.public if find_contender(run.contender).package == "public" else None
            if worker is None or worker.public != public:
                if worker is not None:
                    worker.close()
                worker = Worker(device, public, log)
            result = worker.train(run)
            if isinstance(result, str):
                with self.lock:
                    self.failures.append(f"{':'.join(key[:3])}: {result}")
                    print(f"failed  {self.failures[-1]}", flush=True)
                worker = None
                continue
            seen[run.size, run.recipe.steps] = result["seconds"] + 1.0
            compiled.add((run.size, find_contender(run.contender).dtype))
            self._record(key, result)
        if worker is not None:
            worker.close()

    def _record(self, key: Key, result: dict[str, Any]) -> None:
        marks = stamp("cuda" if torch.cuda.is_available() else "cpu")
        marks.pop("command")
        if result["version"]:  # of the package that the worker imported
            marks["versions"] = re.sub(r"^luminav \S+", f"luminav {result['version']}", marks["versions"])
        with self.lock:
            row = self.ledger.add(key, result, marks)
            print(
                f"{row.contender:44} lr {row.lr:<8g} seed {row.seed}  val {row.val_loss:.4f}  "
                f"train {row.train_loss:.4f}  {row.bytes_per_param:.2f} B/p  {row.tokens_per_s / 1e3:.0f}k tok/s  "
                f"{result['seconds']:.1f}+{result['compile_s']:.1f} s  {row.status}",
                flush=True,
            )


def _names(chosen: Sequence[str], public: Path | None) -> list[str]:
    """Contenders by name; "all" leaves out those of packages that are not here."""
    from importlib.util import find_spec

    if list(chosen) != ["all"]:
        return list(chosen)
    here = {"torch": True, "luminav": True, "public": public is not None, "flashoptim": bool(find_spec("flashoptim"))}
    return [name for name, contender in CONTENDERS.items() if here[contender.package]]


def _wanted(arguments: argparse.Namespace, ledger: Ledger, recipe: str) -> list[tuple[str, float, int]]:
    """(contender, lr, seed) of every run that the options ask for."""
    runs: list[tuple[str, float, int]] = []
    for word in ",".join(arguments.runs).split(",") if arguments.runs else []:
        name, rate, number = word.rsplit(":", 2)
        runs.append((name, float(rate), int(number)))
    for name in _names(arguments.grid, arguments.public_luminav):
        runs += [(name, lr, 0) for lr in arguments.lr or find_contender(name).grid]
    if arguments.finetune:
        seeds = range(arguments.seeds)
        return [(name, FINETUNE_LR, seed) for seed in seeds for name in arguments.contenders or FINETUNE]
    best = {}
    for name in _names(arguments.paired, arguments.public_luminav):
        found = ledger.best_lr(name, arguments.size, recipe) or ledger.best_lr(name, "40m", recipe)
        if found is None:
            raise SystemExit(f"--paired {name} needs its learning rates first: run --grid {name}.")
        best[name] = found
    return runs + [(name, lr, seed) for seed in range(arguments.seeds) for name, lr in best.items()]


def _recipe(arguments: argparse.Namespace) -> Recipe:
    recipe = RECIPES["finetune" if arguments.finetune else arguments.recipe]
    if arguments.size == "tiny":
        recipe = replace(recipe, **TINY)
    if arguments.steps is not None:
        recipe = replace(recipe, steps=arguments.steps, warm_up=min(recipe.warm_up, arguments.steps // 7 + 1))
    return recipe


def _corpus(arguments: argparse.Namespace, source: str) -> Corpus:
    size = SIZES[arguments.size]
    path = arguments.out / "tokenizer.json" if size.vocabulary else None
    arguments.cache.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    corpus = prepare(
        source, arguments.cache, vocabulary=size.vocabulary, megabytes=arguments.megabytes, tokenizer_path=path
    )
    print(
        f"text {corpus.manifest} ({source}): {corpus.documents} documents, {corpus.megabytes:.0f} MB, "
        f"{corpus.train_tokens / 1e6:.1f} M tokens and {corpus.validation_tokens / 1e6:.2f} M for validation, "
        f"vocabulary {corpus.vocabulary}, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return corpus


def _checkpoint(arguments: argparse.Namespace, corpus: Corpus) -> Path:
    steps = arguments.steps or RECIPES["pretrain"].steps
    return arguments.cache / f"{arguments.size}-{steps}-{corpus.manifest}-{BAR}.pt"


def _queue(arguments: argparse.Namespace, ledger: Ledger) -> deque[tuple[Key, Run]]:
    """The runs that are asked for and have no row yet: this checkout's first, then the public package's."""
    recipe = _recipe(arguments)
    wanted = _wanted(arguments, ledger, recipe.name)
    queue: list[tuple[Key, Run]] = []
    if not wanted:
        return deque()
    corpus = _corpus(arguments, arguments.data)
    start = None
    if arguments.finetune:
        checkpoint = _checkpoint(arguments, corpus)
        start = str(checkpoint)
        if not checkpoint.exists():
            base = _recipe(argparse.Namespace(**vars(arguments) | {"finetune": False}))
            lr = arguments.start_lr or ledger.best_lr(BAR, arguments.size, base.name) or START_LR
            first = Run(BAR, lr, 0, arguments.size, base, corpus, arguments.compile, save=start)
            queue.append((_key(first), first))
        corpus = _corpus(arguments, arguments.finetune_data)
    for name, lr, seed in wanted:
        find_contender(name)
        run = Run(name, lr, seed, arguments.size, recipe, corpus, arguments.compile, start=start)
        if _key(run) not in ledger.rows and _key(run) not in {key for key, _ in queue}:
            queue.append((_key(run), run))
    print(f"{len(wanted)} runs asked for, {len(queue)} to be taken", flush=True)
    order = {"public": 1}
    return deque(sorted(queue, key=lambda item: order.get(find_contender(item[1].contender).package, 0)))


def _key(run: Run) -> Key:
    return key_of(run.contender, run.lr, run.seed, run.size, run.recipe.name, run.recipe.steps, run.corpus.manifest)


def _take(arguments: argparse.Namespace, ledger: Ledger, deadline: float) -> int:
    """Take the runs; the number of those that failed."""
    queue = _queue(arguments, ledger)
    if any(find_contender(run.contender).package == "public" for _, run in queue) and not arguments.public_luminav:
        raise SystemExit("contenders called public-... need --public-luminav FOLDER, the public package's folder.")
    cuda = torch.cuda.is_available()
    first_s = arguments.first_run or FIRST_RUN_S["cuda" if cuda else "cpu"]
    devices: list[int | None] = list(range(arguments.devices)) if cuda else [None]
    failed = 0
    for saves in (True, False):  # a model that others start from is trained before them
        part = deque(item for item in queue if (item[1].save is not None) == saves)
        session = Session(ledger, part, deadline, arguments.public_luminav, first_s)
        session.work_on(devices[: len(part)])
        if session.left:
            print(f"left for another call, for want of time: {' '.join(session.left)}")
        failed += len(session.failures)
        if saves and part and (failed or session.left):
            break
    return failed


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=[], metavar="NAME:LR:SEED", help="also separated by commas")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME", help='or "all"')
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates of --grid in place of each one's own")
    parser.add_argument("--paired", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--finetune", action="store_true")
    parser.add_argument("--contenders", nargs="+", default=[], metavar="NAME", help="of --finetune")
    parser.add_argument("--start-lr", type=float, help="of the run whose model is fine-tuned; else its best")
    parser.add_argument("--size", choices=list(SIZES), default="40m")
    parser.add_argument("--recipe", choices=["pretrain", "wsd"], default="pretrain")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--data", default="packages", help="packages, stdlib or a folder")
    parser.add_argument("--finetune-data", default="stdlib")
    parser.add_argument("--megabytes", type=float, default=110.0, help="text to read at most")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--public-luminav", type=Path, metavar="FOLDER")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--first-run", type=float, metavar="SECONDS", help="guess of a first run, for --stop-after")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "converge")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--chart", action="store_true", help="only draw the chart from benchmarks/results.csv")
    arguments = parser.parse_args()
    if arguments.chart:
        print(draw_chart(arguments.results or RESULTS))
        return
    ledger = Ledger(arguments.out)
    failed = _take(arguments, ledger, began + arguments.stop_after)
    for size, recipe in sorted({row.key[3:5] for row in ledger.rows.values()}):
        print(f"\n{size}, {recipe}")
        lines = summarise(ledger, size, recipe, BAR)
        print_table(lines, BAR)
        if arguments.results is not None:
            rows = result_rows(lines, size, recipe, BAR) + run_rows(ledger, size, recipe)
            append_rows(rows, "cuda" if torch.cuda.is_available() else "cpu", arguments.results)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
