"""What the pretraining benchmark and the report make of rows; the measuring itself needs a GPU."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bench_pretrain
import report
from _converge_chart import draw_chart as draw_converge_chart
from _pretrain_chart import draw_chart
from _pretrain_run import COMPARED, CONTENDERS, likeness, lr_share

COLUMNS = ("case", "value", "unit", "device", "versions", "commit", "date", "command")


def write_rows(path: Path, rows: Iterable[tuple[str, object, str]], commit: str = "abc") -> Path:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows((*row, "GPU", "torch 2", commit, "2026-01-02", "python x.py") for row in rows)
    return path


def figures_of(name: str, scale: float = 1.0) -> list[tuple[str, object, str]]:
    """Rows of a finished contender."""
    figures = {
        "peak_gib": 33.5, "static_gib": 23.5, "dynamic_gib": 10.0, "optimizer_ms": 22.5, "first_loss": 12.9,
        "last_loss": 8.8, "loss_50": 10.0, "loss_250": 8.9,
    }  # fmt: skip
    rows = [(f"pretrain/qwen4b/{name}/steps-250/{key}", value * scale, "nats") for key, value in figures.items()]
    if CONTENDERS[name].twin is not None:
        rows += [(f"pretrain/qwen4b/{name}/steps-250/{part}/cosine", 0.94, "share") for part in COMPARED]
    return rows


# ---- the pretraining benchmark ---------------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=tmp_path / "rows.csv",
        scratch=tmp_path,
        steps=250,
        tiny=False,
        checkpointing=False,
        limit_gib=None,
        again=False,
    )


def test_a_one_pass_mode_runs_behind_its_exact_twin(arguments: argparse.Namespace) -> None:
    names = ["M1", "M2", "buffer1", "M4", "M3"]
    assert list(bench_pretrain.arrange(names, arguments)) == [["M1", "M2"], ["buffer1"], ["M3", "M4"]]


def test_what_has_its_rows_is_skipped(arguments: argparse.Namespace) -> None:
    write_rows(arguments.out, [*figures_of("M1"), *figures_of("M2"), *figures_of("M3")])
    assert list(bench_pretrain.arrange(["M1", "M2", "M3"], arguments)) == []
    arguments.steps = 20
    assert list(bench_pretrain.arrange(["M1", "M2"], arguments)) == [["M1", "M2"]]


def test_a_comparison_whose_other_side_is_gone_is_made_anew(arguments: argparse.Namespace) -> None:
    write_rows(arguments.out, figures_of("M3"))
    assert list(bench_pretrain.arrange(["M3", "M4"], arguments)) == [["M3", "M4"]]
    bench_pretrain._kept("M3", arguments).touch()  # the weights are still there
    assert list(bench_pretrain.arrange(["M3", "M4"], arguments)) == [["M4"]]


def test_a_failure_is_no_result(arguments: argparse.Namespace) -> None:
    write_rows(arguments.out, [("pretrain/qwen4b/M1/steps-250", "failed: out of memory", "promise")])
    assert list(bench_pretrain.arrange(["M1"], arguments)) == [["M1"]]


def test_modes_are_those_of_their_numbers() -> None:
    modes = [CONTENDERS[f"{prefix}M{number}"].options for prefix in ("", "public-") for number in range(1, 7)]
    expected = [
        {"master_weights": master, "fused_single_pass": one_pass}
        for master in ("none", "semi", "full")
        for one_pass in (False, True)
    ]
    assert modes == [*expected, *expected]


def test_schedule() -> None:
    shares = [lr_share(step, 250) for step in range(250)]
    assert shares[0] == 1 / 25 and shares[24] == 1.0 and max(shares) == 1.0
    assert shares[25 + 75] == pytest.approx(0.5 * (1 + math.cos(math.pi / 3)))
    assert 0 < shares[-1] < 1e-3


def test_likeness_of_known_vectors() -> None:
    start = torch.tensor([1.0, 0.0])
    found = likeness(start + torch.tensor([0.0, 2.0]), start + torch.tensor([1.0, 0.0]), start)
    assert found["update_cosine"] == 0.0
    assert found["update_relative_l2"] == pytest.approx(5**0.5)
    assert found["cosine"] == pytest.approx(2 / (2 * 5**0.5))
    assert found["relative_l2"] == pytest.approx(5**0.5 / 2)


def test_chart_of_rows(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.csv", [*figures_of("M1"), *figures_of("public-M1", 1.2), *figures_of("adamw-fused")]
    )
    image = draw_chart(rows, tmp_path / "images" / "pretrain.png")
    assert image.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="no rows"):
        draw_chart(rows, image, steps=100)


def test_chart_of_differences(tmp_path: Path) -> None:
    rows: list[tuple[str, object, str]] = []
    for name, difference in (("adamw-fp32", 0.0), ("pretrain", -0.05), ("luminav-buffer1", 0.9)):
        case = f"converge/40m/pretrain/{name}"
        rows += [
            (f"{case}/difference", difference, "nats"),
            (f"{case}/memory", 6.0, "B"),
            (f"{case}/interval", 0.01, "n"),
        ]
    rows.append(("converge/40m/pretrain/luminav-fp16/val_loss", "diverged", "nats"))
    path = write_rows(tmp_path / "rows.csv", rows)
    assert draw_converge_chart(path, tmp_path / "converge.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="no rows"):
        draw_converge_chart(path, tmp_path / "none.png", recipe="wsd")


# ---- the report ------------------------------------------------------------------------------------------------------


def test_a_figure_is_the_last_row_of_its_case_and_its_mark_leads_there(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", figures_of("M1"), commit="first")
    write_rows(path, [("pretrain/qwen4b/M1/steps-250/peak_gib", 30.25, "GiB")], commit="second")
    text = report.report(path)
    (line,) = [line for line in text.splitlines() if line.startswith("| M1 |") and "30.25" in line]
    assert "33.5" not in line and "| 34.32 | 68.4 |" in line  # ours, and the published figures beside it
    assert line.endswith("| [1](#sources) [2](#sources) |")
    assert "Rows `pretrain/qwen4b/<…>/steps-250/peak_gib|static_gib|" in text
    assert sorted(word for word in ("first", "second") if f"commit {word}, 2026-01-02: `python x.py`" in text) == [
        "first", "second"
    ]  # fmt: skip


def test_a_share_next_to_one_is_not_written_as_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", [("fsdp2/2-ranks/equal/bf16/bit_equal", "0.999999", "share")])
    assert "| bf16 | 0.999999 |" in report.report(path)


def test_convergence_is_ordered_by_loss_and_names_what_diverged(tmp_path: Path) -> None:
    prefix = "converge/40m/pretrain"
    rows: list[tuple[str, object, str]] = [
        (f"{prefix}/adamw-fp32/val_loss", 3.7, "nats, mean of 5 seeds"),
        (f"{prefix}/pretrain/val_loss", 3.65, "nats, mean of 5 seeds"),
        (f"{prefix}/luminav-fp16/val_loss", "diverged", "nats"),
    ]
    lines = report.report(write_rows(tmp_path / "rows.csv", rows)).splitlines()
    found = [
        line.split("|")[1:3] for line in lines if line.startswith(("| adamw-fp32", "| pretrain", "| luminav-fp16"))
    ]
    assert found == [[" pretrain ", " 3.6500 "], [" adamw-fp32 ", " 3.7000 "], [" luminav-fp16 ", " diverged "]]
