"""Learning rates of `luminav demo`: both contenders over the same grid, with the demo's own training code.

    python benchmarks/demo_lr.py                 the default grid; about ten minutes on two cores
    python benchmarks/demo_lr.py --lr 3e-3 5e-3  another grid
    python benchmarks/demo_lr.py --dry-run       nothing is written to results.csv

The demo runs the winners: `lr` and `adamw_lr` in src/luminav/cli/demo/settings.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from _rows import append_rows

from luminav.cli.demo.contenders import adamw_contender, luminav_contender
from luminav.cli.demo.data import load_corpus
from luminav.cli.demo.settings import DemoSettings
from luminav.cli.demo.training import Result, Run, train
from luminav.cli.environment import find_device
from luminav.cli.errors import CommandError

GRID = (2e-3, 4e-3, 6e-3, 8e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=GRID)
    parser.add_argument("--steps", type=int, default=DemoSettings().steps)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    device = find_device(arguments.device)
    settings = DemoSettings(steps=arguments.steps)
    corpus = load_corpus(None, settings.context)

    best: dict[str, tuple[float, float]] = {}
    for lr in arguments.lr:
        for contender in (
            luminav_contender(replace(settings, lr=lr)),
            adamw_contender(replace(settings, adamw_lr=lr)),
        ):
            run = Run(contender, settings, corpus, device)
            case = f"demo_lr/{contender.key}/lr={lr:g}/steps={settings.steps}"
            try:
                result = train(run, check=lambda: None, each_step=lambda run: None)
            except CommandError as error:  # diverged: a finding too
                print(error, flush=True)
                rows: list[tuple[str, float | str, str]] = [(f"{case}/validation", "diverged", "bits/byte")]
            else:
                print(f"{contender.title} at {lr:g}: {result.bits_per_byte:.4f} bits per byte", flush=True)
                rows = _rows(case, result)
                best[contender.key] = min(best.get(contender.key, (float("inf"), 0.0)), (result.bits_per_byte, lr))
            if not arguments.dry_run:
                append_rows(rows, device)

    for key, (bits, lr) in best.items():
        print(f"best {key}: {bits:.4f} at {lr:g}")
    print(f"luminav / adamw - 1 = {best['luminav'][0] / best['adamw'][0] - 1:+.2%}")


def _rows(case: str, result: Result) -> list[tuple[str, float | str, str]]:
    return [
        (f"{case}/validation", result.bits_per_byte, "bits/byte"),
        (f"{case}/memory", result.bytes_per_param, "bytes/parameter"),
    ]


if __name__ == "__main__":
    main()
