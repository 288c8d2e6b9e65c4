"""What the Triton engine promises on a GPU, checked there; ends with status 1 if anything fails.

    python benchmarks/check_gpu.py                        everything, about two minutes on an H200
    python benchmarks/check_gpu.py --checks graphs large  some of it
    python benchmarks/check_gpu.py --small                every mode on tiny tensors, in this process

The last is for a memory checker, whose tools share Triton's cache, so let a first run without it fill that:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/check_gpu.py --small

Each check has a process of its own, so that a crash costs that check only and counts as a failure. Lines begin with
PASS or FAIL. Figures go to benchmarks/results.csv, or to the file that --out names; --small records nothing. The checks
are in _gpu_checks.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _checkout  # noqa: F401
import torch
from _claims import Claims
from _gpu_checks import CHECKS, MODES, TIMED, check_small
from _rows import RESULTS, append_rows

WORKER_SECONDS = 240


def delegate(name: str, folder: Path) -> Claims:
    """Run one check in a process of its own, timed ones with an empty Triton cache."""
    report = folder / f"{name}.json"
    environment = dict(os.environ)
    if name in TIMED:
        environment["TRITON_CACHE_DIR"] = str(folder / f"triton-{name}")
    command = [sys.executable, __file__, "--worker", name, "--report", str(report)]
    claims = Claims(name)
    try:
        ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=WORKER_SECONDS)
    except subprocess.TimeoutExpired:
        claims.load(report)
        claims.claim("ends", False, f"no end after {WORKER_SECONDS} s")
        return claims
    claims.load(report)
    sys.stderr.write(ended.stderr)
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if "Error" in line] or [f"status {ended.returncode}"]
        claims.claim("ends", False, lines[-1].strip()[:300])
    return claims


def run_all(names: list[str]) -> list[Claims]:
    """Run timed checks one after the other, then the rest side by side."""
    with tempfile.TemporaryDirectory() as folder:
        done = [delegate(name, Path(folder)) for name in names if name in TIMED]
        others = [name for name in names if name not in TIMED]
        if others:
            with ThreadPoolExecutor(len(others)) as pool:
                done += pool.map(lambda name: delegate(name, Path(folder)), others)
    return done


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", nargs="+", choices=tuple(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--small", action="store_true", help="tiny tensors, in this process")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES), metavar="MODE",
                        help="of --small: racecheck takes minutes for all")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of rows")
    parser.add_argument("--worker", choices=tuple(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here.")
    if arguments.worker is not None:
        claims = Claims(arguments.worker, arguments.report)
        CHECKS[arguments.worker](claims)
        return 0
    if arguments.small:
        claims = Claims("small")
        check_small(claims, arguments.modes)
        return summary([claims])
    done = run_all(arguments.checks)
    append_rows([row for claims in done for row in claims.rows()], "cuda", arguments.out)
    return summary(done)


def summary(done: list[Claims]) -> int:
    """Print every claim again, in one block, and return the exit status."""
    lines = [line for claims in done for line in claims.lines()]
    print("\n" + "\n".join(lines))
    failed = sum(line.startswith("FAIL") for line in lines)
    print(f"\n{len(lines) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
