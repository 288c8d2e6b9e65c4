"""Diagnostics: figures against the rule in float64, and no cost for a step that nobody asks about."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from runs import holding
from support import (
    ENGINES,
    MODES,
    assert_same_bits,
    bits,
    dtype_name,
    exact_step,
    gradients,
    master_of,
    normal,
    optimizer_for,
    parameter,
    run,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from luminav import param_groups
from luminav.diagnostics import NAMES, Report, chart
from luminav.gradient_release import enable_gradient_release

SHAPES = ((31, 17), (40,), ())
MASTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "semi": {"master_weights": "semi"},
    "full-whole": {"master_weights": "full", "split_master_weights": False},
}


def scales(state: dict[str, Tensor]) -> tuple[float, float] | None:
    kept = [state[key].item() for key in ("cautious_scale", "bound_scale") if key in state]
    return (kept[0], kept[1]) if kept else None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mode", MODES)
def test_figures_are_those_of_the_rule_in_float64(mode: str, dtype: torch.dtype, engine: str) -> None:
    """From the stored values before each step; update and rounding from what is stored after it."""
    name, master = list(MASTERS.items())[list(MODES).index(mode) % 3]
    options = {"lr": 2e-2, **MODES[mode], **(master if dtype != torch.float32 else {})}
    params = [parameter(normal(shape, number), dtype) for number, shape in enumerate(SHAPES)]
    optimizer = optimizer_for(params, execution=engine, **options)
    grads = [gradients(shape, 3, 5 + number, dtype=dtype) for number, shape in enumerate(SHAPES)]
    for step in range(3):
        expected, before = [], []
        for number, param in enumerate(params):
            state = optimizer.state.get(param) or {}
            param.grad = grads[number][step]
            full = master_of(param, state)
            moments = [state.get(key, torch.zeros_like(full)) for key in ("exp_avg", "exp_avg_sq")]
            rule = {key: value for key, value in options.items() if key != "split_master_weights"}
            expected.append(exact_step(full, *moments, param.grad, step + 1, dtype, kept=scales(state), **rule))
            before.append((param.detach().clone(), full.double()))
        with optimizer.diagnostics() as report:
            optimizer.step()
        assert list(report) == ["0", "1", "2"]
        for number, (param, exact, (stored, full)) in enumerate(zip(params, expected, before)):
            got, now = report[str(number)], master_of(param, optimizer.state[param]).double()
            assert got.density == exact.keep.mean().item(), name
            assert (got.cautious_scale, got.bound_scale) == pytest.approx(exact.used_scales, rel=2e-6)
            assert got.update_ratio == pytest.approx(((now - full).norm() / full.norm()).item(), rel=1e-12)
            if now.numel() > 1 and (dtype == torch.float32 or name != "none"):
                closed = ((exact.weight - full).norm() / full.norm()).item()
                assert got.update_ratio == pytest.approx(closed, rel=1e-4)
            assert got.moved == (bits(param) != bits(stored)).double().mean().item()
            assert got.nonfinite_grads == 0


def test_small_updates_move_the_share_that_stochastic_rounding_promises() -> None:
    """No decay, every weight 1, every step a sixteenth of the gap below 1: one in sixteen moves, by one gap."""
    param = parameter(torch.ones(20_000), torch.bfloat16)
    gap = 2.0**-8
    optimizer = optimizer_for([param], lr=gap / 16, weight_decay=0.0, bound=False, cautious=False, tau=1e-3)
    param.grad = torch.ones_like(param)
    with optimizer.diagnostics() as report:
        optimizer.step()
    figures = report["0"]
    assert figures.moved == pytest.approx(1 / 16, abs=5 * math.sqrt(15 / 256 / 20_000))
    assert figures.update_ratio == pytest.approx(gap * math.sqrt(figures.moved), rel=1e-9)
    assert (figures.density, figures.cautious_scale, figures.bound_scale) == (1.0, 1.0, 1.0)


def test_names_counts_missing_gradients_and_the_flat_dict() -> None:
    params = {name: parameter(normal((12,), n), torch.bfloat16) for n, name in enumerate(("a.weight", "b", "late"))}
    optimizer = optimizer_for(params.items())
    for name in ("a.weight", "b"):
        params[name].grad = normal((12,), 3).bfloat16()
    params["b"].grad[2:5] = torch.tensor([math.nan, math.inf, -math.inf])
    with optimizer.diagnostics() as report:
        assert len(report) == 0
        optimizer.step()
    assert list(report) == ["a.weight", "b"]
    assert (report["a.weight"].nonfinite_grads, report["b"].nonfinite_grads) == (0, 3)
    flat = report.flat()
    assert len(flat) == 2 * len(NAMES) and flat["luminav/b/nonfinite_grads"] == 3
    assert flat["luminav/a.weight/density"] == report["a.weight"].density
    assert set(report.flat("opt")) == {f"opt/{name}/{key}" for name in report for key in NAMES}


def test_a_name_that_is_not_in_the_report_is_answered_with_some_that_are() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = optimizer_for(param_groups(model, names=True))
    with optimizer.diagnostics() as report:
        with pytest.raises(KeyError, match="the report is empty until a step"):
            report["0.weight"]
        for param in list(model.parameters())[:3]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert list(report) == ["0.weight", "1.weight", "0.bias"]
    with pytest.raises(KeyError, match=r"no '1.bias' among the 3 parameters .*, as '.\.\w+', .* without a gradient"):
        report["1.bias"]
    with pytest.raises(KeyError, match=r"no '1.wieght' .*, as '1.weight', '0.weight', "):
        report["1.wieght"]
    assert "1.bias" not in report and report.get("1.bias") is None and "1.weight" in report


def test_a_name_among_positions_is_answered_with_how_to_have_names() -> None:
    model = nn.Linear(3, 4)
    optimizer = optimizer_for(param_groups(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with optimizer.diagnostics() as report:
        optimizer.step()
    with pytest.raises(KeyError, match=r"no 'weight' among .*, as '0', '1'\. They are positions: .*names=True"):
        report["weight"]


@pytest.mark.parametrize("options", [{}, {"fused_single_pass": True}, {"master_weights": "semi"}], ids=str)
def test_asking_changes_no_bit(options: dict[str, Any]) -> None:
    results = []
    for asked in (True, False):
        param = parameter(normal((70,), 1), torch.bfloat16)
        optimizer = optimizer_for([param], lr=1e-2, **options)
        for grad in gradients((70,), 4, 2, dtype=torch.bfloat16):
            if asked:
                param.grad = grad
                with optimizer.diagnostics():
                    optimizer.step()
            else:
                run(optimizer, [param], [[grad]])
        results.append([param.detach(), *optimizer.state[param].values()])
    for asked_for, plain in zip(*results):
        assert_same_bits(asked_for, plain)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("change", ["edited", "converted"])
def test_a_changed_weight_is_watched_as_the_step_takes_it(change: str, split: bool) -> None:
    """An edit reaches the master in the step, and so does the FP32 weight of a model that becomes BF16."""
    results = []
    for asked in (True, False):
        start = torch.float32 if change == "converted" else torch.bfloat16
        param = parameter(normal((30, 20), 1), start)
        options = {"lr": 1e-2, "master_weights": "semi"}
        optimizer = optimizer_for([param], split_master_weights=split, **options)
        run(optimizer, [param], [[normal((30, 20), 2, dtype=start)]])
        if change == "edited":
            param.data = (param.data.float() * 100.0).bfloat16()
            before = master_of(param, optimizer.state[param]) if split else param.detach().float()
        else:
            before = param.detach().clone()
            param.data = param.data.bfloat16()
        state = {key: value.clone() for key, value in optimizer.state[param].items()}
        grad = param.grad = normal((30, 20), 3, dtype=torch.bfloat16)
        if asked:
            with optimizer.diagnostics() as report:
                optimizer.step()
            moments = (state[key].bfloat16() for key in ("exp_avg", "exp_avg_sq"))
            exact = exact_step(before, *moments, grad, 2, torch.bfloat16, **options)
            figures, now = report["0"], master_of(param, optimizer.state[param]).double()
            assert (figures.cautious_scale, figures.bound_scale) == pytest.approx(exact.used_scales, rel=1e-5)
            wanted = (now - before.double()).norm() / before.double().norm()
            assert figures.update_ratio == pytest.approx(wanted.item(), rel=1e-6)
        else:
            optimizer.step()
        results.append([param.detach(), *optimizer.state[param].values()])
    for asked_for, plain in zip(*results):
        assert_same_bits(asked_for, plain)


class Operations(TorchDispatchMode):
    """Counts operations, each of which is a launch or an allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_outside_do_exactly_what_they_did(engine: str) -> None:
    """The same operations in the same order before, between and after steps that were watched."""
    param = parameter(normal((70,), 1), torch.bfloat16)
    optimizer = optimizer_for([param], execution=engine)
    traces = []
    for step, watched in enumerate((False, False, True, False)):
        param.grad = normal((70,), 10 + step).bfloat16()
        with Operations() as operations:
            if watched:
                with optimizer.diagnostics():
                    optimizer.step()
            else:
                optimizer.step()
        traces.append(operations.seen)
    assert traces[3] == traces[1]
    assert len(traces[2]) > len(traces[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
def test_an_edited_weight_is_where_the_watched_step_starts(dtype: torch.dtype) -> None:
    """A whole master follows an edit in the next step; the figures are of that step, not of the edit."""
    param = parameter(normal((70,), 1), dtype)
    optimizer = optimizer_for([param], lr=1e-2, master_weights="semi", split_master_weights=False)
    run(optimizer, [param], [[normal((70,), 2).to(dtype)]])
    with torch.no_grad():
        param.mul_(-4.0)
    before = param.detach().double()
    param.grad = normal((70,), 3).to(dtype)
    with optimizer.diagnostics() as report:
        optimizer.step()
    now = optimizer.state[param]["master_param"].double()
    assert report["0"].update_ratio == pytest.approx(((now - before).norm() / before.norm()).item(), rel=1e-12)
    assert report["0"].update_ratio < 0.04


def test_what_cannot_be_watched_is_refused_before_the_step() -> None:
    param = parameter(normal((6,), 1), torch.float32)
    optimizer = optimizer_for([param])
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    with optimizer.diagnostics(), pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 1.0)
    handle = enable_gradient_release(holding(param), optimizer)
    with optimizer.diagnostics(), pytest.raises(RuntimeError, match="gradient release"):
        optimizer.step()
    handle.remove()
    assert_same_bits(param.detach(), before)
    assert not optimizer.state


def test_the_chart_has_a_panel_for_each_figure(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    param = parameter(normal((70,), 1), torch.bfloat16)
    optimizer = optimizer_for([("w", param)])
    reports: list[Report] = []
    for grad in gradients((70,), 4, 2, dtype=torch.bfloat16):
        param.grad = grad
        with optimizer.diagnostics() as report:
            optimizer.step()
        reports.append(report)
    figure = chart(reports)
    panels = [axes for axes in figure.axes if axes.get_images()]
    assert [axes.get_title() for axes in panels] == [name.replace("_", " ") for name in NAMES]
    assert panels[0].get_images()[0].get_array().tolist() == [[report["w"].density for report in reports]]
    figure.savefig(tmp_path / "run.png")
    with pytest.raises(ValueError, match="at least one report"):
        chart([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts launches and copies with CUDA's profiler")
def test_on_a_gpu_asking_costs_one_transfer_and_not_asking_nothing() -> None:
    params = [parameter(normal((33, 70), number).cuda(), torch.bfloat16) for number in range(3)]
    optimizer = optimizer_for(params, execution="triton")

    def activities(watched: bool) -> tuple[int, int]:
        """Kernels, and copies to the host, of a step."""
        for number, param in enumerate(params):
            param.grad = normal((33, 70), 10 + number).cuda().bfloat16()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            if watched:
                with optimizer.diagnostics():
                    optimizer.step()
            else:
                optimizer.step()
            torch.cuda.synchronize()
        events = profiler.events() or ()  # what the host called as well, which is not the same in every step
        names = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        return sum("mem" not in name.lower() for name in names), sum("DtoH" in name for name in names)

    for _ in range(3):
        activities(False)  # kernels compile, launches are kept, and the profiler's first session misses its start
    plain, asked, again = activities(False), activities(True), activities(False)
    assert plain == again and plain[1] == 0
    assert asked[1] == 1 and asked[0] > plain[0]
