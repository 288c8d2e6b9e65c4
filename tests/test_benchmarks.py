"""What the pretraining benchmark and the report make of rows; the measuring itself needs a GPU."""

from __future__ import annotations

import argparse
import csv
import math
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import _pretrain_linear
import _pretrain_run
import bench_pretrain
import report
from _converge_chart import draw_chart as draw_converge_chart
from _pretrain_chart import draw_chart, latest_figures
from _pretrain_run import COMPARED, CONTENDERS, likeness, lr_share
from _rows import append_rows

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
        "peak_gib": 33.5, "static_gib": 23.5, "dynamic_gib": 10.0, "optimizer_ms": 22.5, "step_ms": 200.0,
        "first_loss": 12.9, "last_loss": 8.8, "loss_50": 10.0, "loss_250": 8.9,
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
        per_gpu=1,
        linear_attention="torch",
    )


@pytest.mark.parametrize(("steps", "longest", "expected"), [(15, None, True), (250, None, False), (250, 30.0, True)])
def test_short_contenders_start_where_long_ones_would_not_end(
    arguments: argparse.Namespace, steps: int, longest: float | None, expected: bool
) -> None:
    """Two minutes are left. What one has taken is a better guess than the number of steps."""
    arguments.steps = steps
    session = bench_pretrain.Session(arguments, deque(), time.monotonic() + 120.0, longest=longest)
    assert session._has_time() == expected


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


def test_a_mode_whose_twin_was_not_asked_for_is_done_without_the_comparison(arguments: argparse.Namespace) -> None:
    write_rows(arguments.out, [row for row in figures_of("M2") if not row[0].endswith("cosine")])
    assert list(bench_pretrain.arrange(["M2"], arguments)) == []
    assert list(bench_pretrain.arrange(["M1", "M2"], arguments)) == [["M1", "M2"]]


def test_rows_of_a_shared_gpu_do_not_stand_in_for_times(arguments: argparse.Namespace) -> None:
    write_rows(arguments.out, [row for row in figures_of("M1") if not row[0].endswith("_ms")])
    assert list(bench_pretrain.arrange(["M1"], arguments)) == [["M1"]]
    arguments.per_gpu = 3
    assert list(bench_pretrain.arrange(["M1"], arguments)) == []


def test_rows_with_other_kernels_are_of_another_case(arguments: argparse.Namespace) -> None:
    write_rows(arguments.out, figures_of("M1"))
    arguments.linear_attention = "fla"
    assert bench_pretrain.case_of("M1", arguments) == "pretrain/qwen4b/fla/M1/steps-250"
    assert list(bench_pretrain.arrange(["M1"], arguments)) == [["M1"]]


@pytest.mark.parametrize("per_gpu", (1, 3))
def test_times_are_recorded_only_by_a_process_that_has_its_gpu_for_itself(
    per_gpu: int, arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments.per_gpu = per_gpu
    figures = {"step_ms": 200.0, "optimizer_ms": 20.0, "last_loss": 8.0}
    monkeypatch.setattr(bench_pretrain, "delegate", lambda *_: (figures, {"fla": "0.4.2"}))
    session = bench_pretrain.Session(arguments, deque([["M1"], ["M3"]]), math.inf)
    session.work(0)
    with arguments.out.open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    ends = {row["case"].rpartition("/")[2] for row in rows}
    assert ends == ({"last_loss"} if per_gpu > 1 else set(figures))
    assert all(row["versions"].endswith("fla 0.4.2") for row in rows)


def test_processes_share_a_gpu_as_far_as_its_memory_goes(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    most: list[float] = []
    together = threading.Event()

    def delegate(name: str, *_: object) -> str:
        running.append(name)
        most.append(sum(bench_pretrain.needed_gib(each, arguments) for each in running))
        if len(running) > 1:
            together.set()
        together.wait(5)
        running.remove(name)
        return "tried only"

    monkeypatch.setattr(bench_pretrain, "delegate", delegate)
    names = ["M1", "adamw-fused-fp32", "M5", "M3", "8bit", "public-M5"]
    session = bench_pretrain.Session(arguments, deque([[name] for name in names]), math.inf, memory_gib=140.0)
    threads = [threading.Thread(target=session.work, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert len(most) == len(names) and max(most) <= 140.0 and together.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_one_thread_keeps_no_other_waiting(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delegate(name: str, *_: object) -> str:
        if name == "M5":
            raise OSError("no space left")
        return "tried only"

    monkeypatch.setattr(bench_pretrain, "delegate", delegate)
    session = bench_pretrain.Session(arguments, deque([["M5"], ["M3"], ["M1"]]), math.inf, memory_gib=1.0)
    threads = [threading.Thread(target=session.work, args=(0,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads) and not session.queue


# ---- which gated delta rule it runs ----------------------------------------------------------------------------------


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def test_what_ran_is_read_from_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3, requires_grad=True)
    assert not _pretrain_linear.ran_fla(_Twice.apply(weight.exp()).sum())
    monkeypatch.setattr(_Twice, "__module__", "fla.ops.gated_delta_rule.chunk")
    assert _pretrain_linear.ran_fla((_Twice.apply(weight.exp()) + weight).sum())
    assert not _pretrain_linear.ran_fla(weight.exp().sum())


def test_kernels_that_are_missing_are_refused_and_plain_torch_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pretrain_linear, "find_spec", lambda name: None)
    assert _pretrain_linear.choose("auto") == _pretrain_linear.choose("torch") == "torch"
    with pytest.raises(SystemExit, match=r"fla is not installed\. Try --linear-attention torch"):
        _pretrain_linear.choose("fla")
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    _pretrain_linear.prepare("torch")
    with pytest.raises(ModuleNotFoundError, match="fla"):
        _pretrain_linear.prepare("fla")


@pytest.mark.parametrize(("count", "tried"), [(0, []), (4, [0, 1, 2, 3]), (5, [0, 2, 4]), (27, [0, 7, 14, 21])])
def test_kernels_try_few_settings_and_only_while_they_are_imported(count: int, tried: list[int]) -> None:
    def autotune(configs: list[int], key: list[str]) -> list[int]:
        assert key == ["T"]
        return configs

    triton = types.SimpleNamespace(autotune=autotune)
    with pytest.raises(ImportError), _pretrain_linear.few_settings(triton):
        assert triton.autotune(configs=list(range(count)), key=["T"]) == tried
        raise ImportError
    assert triton.autotune is autotune


def test_a_wrong_gradient_is_found() -> None:
    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool) -> tuple[torch.Tensor, None]:
        return v * (q * k).sum(-1, keepdim=True) * (g.exp() * beta)[..., None], None

    def wrong(q: Any, k: Any, v: Any, g: Any, **rest: Any) -> tuple[torch.Tensor, None]:
        return rule(q, 0.5 * k + 0.5 * k.detach(), v, g, **rest)

    def wrong_in_one_element(q: Any, k: Any, v: Any, g: Any, **rest: Any) -> tuple[torch.Tensor, None]:
        output, _ = rule(q, k, v, g, **rest)
        return output + v[:, 7:8, 1:2, 3:4] - v[:, 7:8, 1:2, 3:4].detach(), None

    def found(kernels: Any) -> set[str]:
        return set(_pretrain_linear.beyond(_pretrain_linear.differences(kernels, rule, 2, 16, torch.device("cpu"))))

    assert found(rule) == set()
    assert found(wrong) == {"dk", "worst dk"}
    assert "worst dv" in found(wrong_in_one_element)
    assert _pretrain_linear.beyond({"dq": math.nan}) == ["dq"]


# ---- settings and charts ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("piece", [1, 64])
def test_likeness_of_known_vectors(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pretrain_run, "PIECE", piece)
    start = torch.tensor([1.0, 0.0])
    found = likeness(start + torch.tensor([0.0, 2.0]), start + torch.tensor([1.0, 0.0]), start, torch.device("cpu"))
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


def test_a_chart_has_times_of_the_quiet_run_and_one_kind_of_kernels(tmp_path: Path) -> None:
    shared = [row for row in figures_of("M1") if not row[0].endswith("_ms")]
    path = write_rows(tmp_path / "rows.csv", [*figures_of("M3"), *shared])
    quiet = [("pretrain/qwen4b/M1/steps-15/optimizer_ms", 21.0, "ms"), ("pretrain/qwen4b/M1/steps-15/loss_50", 1.0, "")]
    capped = [("pretrain/qwen4b/M1/steps-15/checkpointing/optimizer_ms", 99.0, "ms")]
    figures = latest_figures(write_rows(path, [*quiet, *capped]), 250)
    assert set(figures) == {"M1", "M3"}
    assert (figures["M1"]["optimizer_ms"], figures["M1"]["loss_50"]) == (21.0, 10.0)
    write_rows(path, [(case.replace("/M1/", "/fla/M1/"), value, unit) for case, value, unit in shared])
    assert list(latest_figures(path, 250)) == ["M1"] and "optimizer_ms" not in latest_figures(path, 250)["M1"]
    write_rows(path, [("pretrain/qwen4b/fla/M1/steps-15/optimizer_ms", 20.5, "ms")])
    assert latest_figures(path, 250)["M1"]["optimizer_ms"] == 20.5


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


def test_rows_with_other_kernels_have_tables_of_their_own(tmp_path: Path) -> None:
    rows = [(case.replace("/M3/", "/fla/M3/"), value, unit) for case, value, unit in figures_of("M3", 2.0)]
    text = report.report(write_rows(tmp_path / "rows.csv", [*figures_of("M1"), *rows]))
    headings = [line for line in text.splitlines() if line.startswith("### steps 250")]
    assert headings == ["### steps 250, flash-linear-attention", "### steps 250"]
    first, second = text.split("### steps 250, flash-linear-attention")[1].split("### steps 250")
    assert "Rows `pretrain/qwen4b/fla/<…>/steps-250/peak_gib|" in first and "| M3 | 67.0000 |" in first
    assert "M3" not in second and "| M1 | 33.5000 |" in second


def test_versions_that_some_rows_depend_on_stand_with_them(tmp_path: Path) -> None:
    append_rows([("a", 1.0, "ms")], "cpu", tmp_path / "rows.csv", {"fla": "0.4.2"})
    append_rows([("b", 1.0, "ms")], "cpu", tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(encoding="utf-8") as stream:
        first, second = (row["versions"] for row in csv.DictReader(stream))
    assert first == f"{second} fla 0.4.2"


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
