"""What `import luminav` adds to `import torch`: milliseconds, in new processes.

    python benchmarks/bench_import.py

Wall time is what a user waits; processor time does not count what other programs took of a shared machine. Bytecode is
there, as in an installed package: a first process writes it, into a folder of its own.

Rows go to benchmarks/results.csv, or to the file that --out names.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _checkout  # noqa: F401
from _rows import RESULTS, append_rows

SOURCE = Path(__file__).resolve().parent.parent / "src"
MEASURE = """
import time, torch
wall, processor = time.perf_counter(), time.process_time()
import luminav
print(1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor))
"""


def measure(bytecode: str) -> tuple[float, float]:
    """Milliseconds of wall time and of processor time, in a new process that keeps its bytecode in `bytecode`."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    wall, processor = map(float, done.stdout.split())
    return wall, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="processes; the median counts (default: 15)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the rows (default: benchmarks/results.csv)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as bytecode:
        measure(bytecode)
        times = zip(*(measure(bytecode) for _ in range(options.repeats)))
        wall, processor = (statistics.median(column) for column in times)
    print(f"import luminav after import torch: {wall:.1f} ms, of them {processor:.1f} ms of processor time")
    append_rows([("import/wall", wall, "ms"), ("import/processor", processor, "ms")], "cpu", options.out)


if __name__ == "__main__":
    main()
