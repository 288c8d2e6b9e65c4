"""Rows of the convergence benchmark's runs, and what they say together."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = (
    "contender", "lr", "seed", "size", "recipe", "steps", "text", "status", "val_loss", "train_loss", "start_loss",
    "moved", "bytes_per_param", "params", "tokens_per_s", "seconds", "compile_s",
    "device", "versions", "commit", "date",
)  # fmt: skip
FIGURES = COLUMNS[7:17]
Key = tuple[str, ...]
"""contender, lr, seed, size, recipe, steps and text: what makes a run the same run."""

# Quantiles 0.975 of Student's t by degrees of freedom, so that a machine without scipy can report too.
T_975 = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814, 2.20099, 2.17881, 2.16037,
    2.14479, 2.13145,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A finished run."""

    key: Key
    status: str
    val_loss: float
    bytes_per_param: float
    tokens_per_s: float
    start_loss: float
    moved: float
    train_loss: float

    @property
    def contender(self) -> str:
        return self.key[0]

    @property
    def lr(self) -> float:
        return float(self.key[1])

    @property
    def seed(self) -> int:
        return int(self.key[2])

    @property
    def score(self) -> float:
        """The validation loss; infinite for a run that diverged."""
        return self.val_loss if self.status == "finite" else math.inf


def key_of(contender: str, lr: float, seed: int, size: str, recipe: str, steps: int, text: str) -> Key:
    return (contender, f"{lr:g}", str(seed), size, recipe, str(steps), text)


class Ledger:
    """The rows of a folder, one for each run, and the trajectories beside them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "runs.csv"
        self.trajectories = folder / "trajectories.jsonl"
        self.rows: dict[Key, Row] = {}
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as stream:
                for values in csv.DictReader(stream):
                    self._remember(values)

    def _remember(self, values: Mapping[str, Any]) -> None:
        key = tuple(str(values[name]) for name in COLUMNS[:7])
        figures = {name: float(values[name]) for name in Row.__dataclass_fields__ if name not in ("key", "status")}
        self.rows[key] = Row(key, str(values["status"]), **figures)

    def add(self, key: Key, result: Mapping[str, Any], stamp: Mapping[str, str]) -> Row:
        """Append a run: the trajectory first, so that a row says that all of the run is there."""
        values = dict(zip(COLUMNS, key))
        with self.trajectories.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(values | {name: result[name] for name in ("train", "validation")}) + "\n")
        values |= {name: _plain(result[name]) for name in FIGURES} | dict(stamp)
        new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(values)
        self._remember(values)
        return self.rows[key]

    def of(self, size: str, recipe: str, contender: str | None = None) -> list[Row]:
        """The rows of a size and recipe, of one contender or all."""
        return [
            row for row in self.rows.values() if row.key[3:5] == (size, recipe) and contender in (None, row.contender)
        ]

    def best_lr(self, contender: str, size: str, recipe: str) -> float | None:
        """The learning rate with the lowest mean validation loss over the seeds that every rate has; None without."""
        by_lr: dict[float, dict[int, float]] = {}
        for row in self.of(size, recipe, contender):
            by_lr.setdefault(row.lr, {})[row.seed] = row.score
        if not by_lr:
            return None
        shared = set.intersection(*(set(seeds) for seeds in by_lr.values()))
        if not shared:
            return min(by_lr, key=lambda lr: statistics.mean(by_lr[lr].values()))
        return min(by_lr, key=lambda lr: statistics.mean(by_lr[lr][seed] for seed in shared))


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t; infinite for one value."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, math.inf
    if len(differences) - 1 > len(T_975):
        raise ValueError(f"t is tabulated up to {len(T_975) + 1} pairs, got {len(differences)}.")
    return mean, T_975[len(differences) - 2] * statistics.stdev(differences) / len(differences) ** 0.5


@dataclass(frozen=True)
class Line:
    """What a contender reached at its best learning rate."""

    contender: str
    lr: float
    seeds: int
    mean: float
    difference: float
    """Mean over the seeds that the bar has too."""
    half_width: float
    pairs: int
    bytes_per_param: float
    tokens_per_s: float
    diverged: int
    moved: float
    loss_change: float


def summarise(ledger: Ledger, size: str, recipe: str, bar: str) -> list[Line]:
    """A line for each contender, the lowest loss first."""
    names = {row.contender for row in ledger.of(size, recipe)}
    at_best = {name: _at_best(ledger, name, size, recipe) for name in names}
    reference = {row.seed: row.score for row in at_best.get(bar, [])}
    lines = []
    for name, rows in at_best.items():
        scores = {row.seed: row.score for row in rows}
        differences = [scores[seed] - reference[seed] for seed in scores if seed in reference]
        mean, half = interval(differences) if differences and all(map(math.isfinite, differences)) else (math.nan,) * 2
        lines.append(
            Line(
                contender=name,
                lr=rows[0].lr,
                seeds=len(rows),
                mean=statistics.mean(scores.values()),
                difference=mean,
                half_width=half,
                pairs=len(differences),
                bytes_per_param=statistics.median(row.bytes_per_param for row in rows),
                tokens_per_s=statistics.median(row.tokens_per_s for row in rows),
                diverged=sum(row.status != "finite" for row in ledger.of(size, recipe, name)),
                moved=statistics.mean(row.moved for row in rows),
                loss_change=statistics.mean(row.val_loss - row.start_loss for row in rows),
            )
        )
    return sorted(lines, key=lambda line: line.mean)


def _at_best(ledger: Ledger, name: str, size: str, recipe: str) -> list[Row]:
    """A contender's runs at the rate that was taken most seeds of, or at its best one where several were."""
    by_lr: dict[float, list[Row]] = {}
    for row in ledger.of(size, recipe, name):
        by_lr.setdefault(row.lr, []).append(row)
    return min(by_lr.values(), key=lambda rows: (-len(rows), statistics.mean(row.score for row in rows)))


def print_table(lines: Sequence[Line], bar: str) -> None:
    """The lines as text."""
    fine_tuned = any(math.isfinite(line.moved) for line in lines)
    head = f"{'contender':44}{'lr':>9}{'seeds':>6}{'val loss':>10}{'minus ' + bar:>24}"
    print(head + f"{'B/param':>9}{'tokens/s':>11}{'div':>4}" + (f"{'moved':>8}{'change':>10}" if fine_tuned else ""))
    for line in lines:
        text = f"{line.contender:44}{line.lr:>9g}{line.seeds:>6}{line.mean:>10.4f}"
        text += f"{line.difference:>+13.4f} ± {line.half_width:<8.4f}"
        text += f"{line.bytes_per_param:>9.2f}{line.tokens_per_s:>11.0f}{line.diverged:>4}"
        print(text + (f"{line.moved:>8.1%}{line.loss_change:>+10.4f}" if fine_tuned else ""))


def run_rows(ledger: Ledger, size: str, recipe: str) -> list[tuple[str, float | str, str]]:
    """Every run's validation loss as a row of results.csv."""
    return [
        (
            f"converge/{size}/{recipe}/{row.contender}/lr={row.lr:g}/seed={row.seed}",
            row.val_loss if math.isfinite(row.val_loss) else row.status,
            "nats",
        )
        for row in ledger.of(size, recipe)
    ]


def result_rows(lines: Sequence[Line], size: str, recipe: str, bar: str) -> list[tuple[str, float | str, str]]:
    """The lines as rows of results.csv."""
    rows: list[tuple[str, float | str, str]] = []
    for line in lines:
        case = f"converge/{size}/{recipe}/{line.contender}"
        figures: list[tuple[str, float, str]] = [
            ("lr", line.lr, "best of the grid"),
            ("val_loss", line.mean, f"nats, mean of {line.seeds} seeds"),
            ("difference", line.difference, f"nats minus {bar}, {line.pairs} pairs"),
            ("interval", line.half_width, "nats, half of the 95 % interval of the difference"),
            ("memory", line.bytes_per_param, "bytes/parameter, weights and state"),
            ("speed", line.tokens_per_s, "tokens/s"),
            ("moved", line.moved, "share of weights"),
            ("loss_change", line.loss_change, "nats"),
        ]
        rows += [(f"{case}/{name}", value, unit) for name, value, unit in figures if math.isfinite(value)]
        if not math.isfinite(line.mean):
            rows.append((f"{case}/val_loss", "diverged", "nats"))
    return rows
