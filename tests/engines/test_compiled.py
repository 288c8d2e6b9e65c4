"""The compiled engine against the foreach engine: moments and counts to the bit, weights to the last bit of FP32.

Compiling costs seconds for each graph. So Inductor's arithmetic is tested on a few combinations that cover every verb,
dtype, rounding and kind of master weight; all modes are tested with the graphs traced, but run by torch's own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from support import (
    LAYOUTS,
    MODES,
    SIXTEEN_BIT,
    assert_same_bits,
    bits,
    dtype_name,
    gradients,
    master_key,
    normal,
    optimizer_for,
    parameter,
    run,
)
from torch import Tensor

from luminav import engines, rule
from luminav.engines import Batch, Scales, TensorStep, choose_engine, slabs
from luminav.engines.compiled import CompiledEngine
from luminav.engines.graphs import Graphs, Kind, body, settings_guard
from luminav.engines.slabs import ROW
from luminav.hyperparameters import Options
from luminav.rounding import noise_key

CPU = torch.device("cpu")
SHAPES = ((), (1,), (0,), (7,), (ROW,), (ROW + 1,), (17, 19), (3, 4, 9, 1), (20, ROW), (70, 301), (2, ROW * 17))
STEPS = 3

ONE_PASS = {"fused_single_pass": True}
FREE = {"cautious": False, "bound": False}
COMBINATIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16-one_pass": (torch.bfloat16, ONE_PASS),
    "bf16-semi-coordinate": (torch.bfloat16, {"master_weights": "semi", "bound_type": "coordinate"}),
    "fp16-full-nearest": (torch.float16, {**FREE, "master_weights": "full", "stochastic_rounding": False}),
    "fp32-single": (torch.float32, {"buffer": 1}),
}
"""With Inductor: both buffers, all verbs, forms of master weights, both roundings, every bound. The C++ compiler takes
half a minute for a graph, so what is left is traced only, below."""

by_combination = pytest.mark.parametrize("name", COMBINATIONS)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> CompiledEngine:
    """An engine whose graphs are traced, but run by torch's own kernels."""
    engine = CompiledEngine(Graphs("eager"))
    monkeypatch.setattr(engines, "_compiled", engine)
    return engine


@pytest.fixture
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "ROWS_IN_PLACE", 24)
    monkeypatch.setattr(slabs, "CPU_ROWS_COPIED", 24)


def grads_of(dtype: torch.dtype) -> list[list[Tensor | None]]:
    """Some late, some missing, some not finite, in layouts by turns."""
    layouts = list(LAYOUTS.values())
    rows: list[list[Tensor | None]] = [[] for _ in range(STEPS)]
    for number, shape in enumerate(SHAPES):
        for step, grad in enumerate(gradients(shape, STEPS, 300 + number, 0.5, dtype)):
            if step == 1 and grad.numel() > 20:
                grad.view(-1)[5:8] = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
            late = number % 5 == 3 and step == 0
            rows[step].append(None if late else layouts[(number + step) % len(layouts)](grad))
    return rows


def trained(execution: str, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    layouts = list(LAYOUTS)
    params = [parameter(normal(s, n), dtype, layouts[n % len(layouts)]) for n, s in enumerate(SHAPES)]
    optimizer = optimizer_for(params, lr=1e-2, execution=execution, **options)
    run(optimizer, params, grads_of(dtype))
    found = {f"{number} weight": param.detach() for number, param in enumerate(params)}
    for number, param in enumerate(params):
        found |= {f"{number} {key}": value for key, value in optimizer.state[param].items()}
    return found


def whole(found: dict[str, Tensor], number: str) -> Tensor:
    """The weight in full precision."""
    weight = found[f"{number} weight"]
    if f"{number} master_remainder" in found:
        upper = weight.contiguous().view(torch.int16).to(torch.int32) << 16
        return (upper + found[f"{number} master_remainder"].to(torch.int32)).view(torch.float32)
    return found.get(f"{number} master_param", weight)


def assert_as_foreach(got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, what: str) -> None:
    """Moments and step counts to the bit. Kept scales and full weights to one ulp of the arithmetic for each step, and
    four of the change; 16-bit weights without a master: the same but for rare neighbours."""
    assert got.keys() == expected.keys()
    ulp = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    differing = total = 0
    for key, value in expected.items():
        number, kind = key.split()
        if kind.endswith("scale"):
            torch.testing.assert_close(got[key], value, rtol=STEPS * ulp, atol=0)
        elif kind not in ("weight", "master_param", "master_remainder"):
            assert_same_bits(got[key], value, f"{what} {key}")
        elif kind == "weight":
            ours, theirs = whole(got, number), whole(expected, number)
            if ours.dtype in SIXTEEN_BIT:
                differing += int((bits(ours) != bits(theirs)).sum())
                total += ours.numel()
                torch.testing.assert_close(ours, theirs, rtol=STEPS * torch.finfo(dtype).eps, atol=1e-6)
            else:
                torch.testing.assert_close(ours, theirs, rtol=STEPS * ulp, atol=4 * STEPS * ulp * 2e-2)
    assert differing <= 1e-3 * total


@pytest.mark.slow(30)
@pytest.mark.usefixtures("_small_slabs")
@by_combination
def test_compiled_steps_are_those_of_foreach(name: str) -> None:
    dtype, options = COMBINATIONS[name]
    got = trained("compile", dtype, **options)
    engine = choose_engine("compile", CPU)
    assert isinstance(engine, CompiledEngine)
    if name == "bf16-one_pass":  # Inductor makes several loops of a coordinate bound
        kinds = engine.graphs.by_kind.items()
        update = [graph for kind, graphs in kinds if kind.writes and kind.dtypes[0] == dtype for graph in graphs]
        assert any(graph.in_place for graph in update)
    assert_as_foreach(got, trained("foreach", dtype, **options), dtype, name)
    start = [parameter(normal(shape, number), dtype) for number, shape in enumerate(SHAPES)]
    assert not torch.equal(got["9 weight"], start[9])


@pytest.mark.usefixtures("_small_slabs", "traced")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_that_of_foreach(mode: str) -> None:
    """By turns over the dtypes, kinds of master weights, and where the step's numbers live."""
    place = list(MODES).index(mode)
    dtype = (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float64)[place % 5]
    options = {
        "master_weights": ("none", "semi", "full")[place % 3],
        "split_master_weights": place % 2 == 0,
        "capturable": place % 4 == 1,
        "maximize": place % 4 == 2,
        **MODES[mode],
    }
    assert_as_foreach(trained("compile", dtype, **options), trained("foreach", dtype, **options), dtype, mode)


@pytest.mark.usefixtures("_small_slabs")
def test_graphs_that_must_not_write_what_they_read_write_apart(traced: CompiledEngine) -> None:
    expected = trained("compile", torch.bfloat16, **ONE_PASS)
    graphs = traced.graphs.by_kind
    assert graphs and all(len(each) == 1 and each[0].in_place for each in graphs.values())
    graphs.update({kind: [replace(graph, in_place=False)] for kind, [graph] in graphs.items()})
    for key, value in trained("compile", torch.bfloat16, **ONE_PASS).items():
        assert_same_bits(value, expected[key], key)


@pytest.fixture(params=["torchs_test", "our_own"])
def _settings_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own test of its global settings, and as if it had none."""
    if request.param == "our_own":
        monkeypatch.delattr(torch._C._dynamo.guards, "GlobalStateGuard", raising=False)


@pytest.mark.usefixtures("_settings_test", "_threads_as_before")
def test_only_other_settings_are_other_settings() -> None:
    same = settings_guard()
    assert same() and same()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert not same() and settings_guard()()
    torch.set_num_threads(threads)
    assert same()


@pytest.mark.usefixtures("traced", "_settings_test", "_threads_as_before")
def test_other_global_settings_of_torch_compile_apart_from_the_step() -> None:
    """Whatever Inductor makes of memory that is read and written, it never sees it: here the step compiles nothing."""
    batches, done = [batch_of(torch.bfloat16, {}) for _ in range(2)], [Scales(torch.ones(2), torch.ones(2))]
    engine = choose_engine("compile", CPU)
    for threads, batch in zip((1, 3), batches):
        torch.set_num_threads(threads)
        engine.prepare([batch], gather=True)
        before = compiled_so_far()
        engine.update([batch], done, gather=True)
        assert compiled_so_far() == before
    for ours, theirs in zip(*map(tensors_of, batches)):
        assert_same_bits(ours, theirs)


@pytest.mark.usefixtures("traced", "_threads_as_before")
def test_there_may_be_any_number_of_global_settings_and_ways_back() -> None:
    """Of one function torch compiles eight forms and then refuses."""
    batch, engine = batch_of(torch.bfloat16, {}), choose_engine("compile", CPU)
    for threads in range(1, 11):
        torch.set_num_threads(threads)
        engine.prepare([batch], gather=True)
    before = compiled_so_far()
    for threads in (1, 9, 1, 4):
        torch.set_num_threads(threads)
        engine.prepare([batch], gather=True)
    assert compiled_so_far() == before


def writes_early(kind: Kind) -> Any:
    """A graph that reads moments again after it has written them."""
    run = body(kind)

    def early(tensors: list[Tensor | None], into: list[Tensor | None], *others: Any) -> Any:
        run(tensors, into, *others)
        return run(tensors, into, *others)

    return early


def test_a_graph_that_reads_what_it_has_written_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CompiledEngine(Graphs("eager"))
    monkeypatch.setattr(engine.graphs, "_made", writes_early)
    engine.update([batch_of(torch.bfloat16, {})], [Scales(torch.ones(2), torch.ones(2))], gather=False)
    found = {kind.verb: graph.in_place for kind, [graph] in engine.graphs.by_kind.items()}
    assert found == {"measure": True, "update": False}


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@pytest.mark.usefixtures("traced")
def test_without_a_learning_rate_moments_alone_change(lr: float | Tensor) -> None:
    params = [parameter(normal(shape, 1), torch.bfloat16) for shape in ((40, ROW), (7,))]
    params[1].data[:2] = torch.tensor([0.0, -0.0])
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_for(params, lr=lr, execution="compile")
    run(optimizer, params, [[normal(param.shape, 2).bfloat16() for param in params]])
    for param, then in zip(params, before):
        assert_same_bits(param.detach(), then)
        assert optimizer.state[param]["exp_avg"].abs().max() > 0


def test_the_engine_asked_for_is_the_one_that_runs() -> None:
    assert (choose_engine("compile", CPU).name, choose_engine("auto", CPU).name) == ("compile", "foreach")


# ---- the verbs -------------------------------------------------------------------------------------------------------


def batch_of(dtype: torch.dtype, options: dict[str, Any], skip: Tensor | None = None, **place: Any) -> Batch:
    """Two tensors in the middle of training, as the optimizer would hand them over."""
    checked = Options.from_group({"lr": 1e-2, **options})
    steps = []
    for number, shape in enumerate(((33, ROW), (70,))):
        steps.append(
            TensorStep(
                param=normal(shape, number).to(dtype),
                grad=normal(shape, 10 + number).to(dtype),
                exp_avg=normal(shape, 20 + number).to(dtype),
                exp_avg_sq=normal(shape, 30 + number).square().to(dtype) if checked.buffer == 2 else None,
                master_param=None,
                noise_key=noise_key(1, 5, number),
                **place,
            )
        )
    assert master_key(dtype, options) is None
    return Batch(checked, rule.step_numbers(5, 1e-2, checked, dtype, 1.0), steps, skip)


def tensors_of(batch: Batch) -> list[Tensor]:
    each = [(step.param, step.exp_avg, step.exp_avg_sq) for step in batch.steps]
    return [tensor.clone() for tensors in each for tensor in tensors if tensor is not None]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("skipped", [True, False])
def test_a_skipped_update_changes_nothing(skipped: bool) -> None:
    engine = choose_engine("compile", CPU)
    batch = batch_of(torch.bfloat16, {}, torch.tensor(skipped))
    before = tensors_of(batch)
    engine.measure([batch])
    assert all(torch.equal(now, then) for now, then in zip(tensors_of(batch), before))
    engine.update([batch], [Scales(torch.ones(2), torch.ones(2))], gather=False)
    assert all(torch.equal(now, then) == skipped for now, then in zip(tensors_of(batch), before))


PLACES: dict[str, dict[str, Any]] = {
    "shard": {"first_index": 12345},
    "high word": {"first_index": 7 << 32},
    "across the low word": {"first_index": (1 << 32) - 5000},
    "columns": {"first_index": 3, "jumps": ((7, 93),)},
    "columns across the low word": {"first_index": (1 << 32) - 5000, "jumps": ((5, 2), (35, 1001))},
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("place", PLACES)
def test_noise_of_shards_is_that_of_foreach(place: str, dtype: torch.dtype) -> None:
    """Given scales, and moments that do not depend on them: equal to the bit."""
    results = []
    for execution in ("foreach", "compile"):
        batch = batch_of(dtype, {}, **PLACES[place])
        choose_engine(execution, CPU).update([batch], [Scales(torch.ones(2), torch.ones(2))], gather=True)
        results.append(batch)
    for ours, theirs in zip(results[1].steps, results[0].steps):
        assert_same_bits(ours.exp_avg, theirs.exp_avg)
        assert ours.exp_avg_sq is not None and theirs.exp_avg_sq is not None
        assert_same_bits(ours.exp_avg_sq, theirs.exp_avg_sq)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def compiled_so_far() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("lr", ["float", "tensor"])
@pytest.mark.parametrize("options", [{}, {"fused_single_pass": True}, {"buffer": 1}], ids=str)
def test_nothing_is_compiled_after_the_first_steps(options: dict[str, Any], lr: str) -> None:
    """New learning rates, betas, decay and step counts, loss scales, seeds and other tensors are data."""
    dtype = torch.bfloat16
    number = torch.tensor(1e-2) if lr == "tensor" else 1e-2
    before, counts = compiled_so_far(), []
    for size in (1, 700, 40 * ROW):
        params = [parameter(normal((size,), 1), dtype), parameter(normal((3, 5), 2), dtype)]
        optimizer = optimizer_for(params, **options, lr=number, seed=size, execution="compile")
        for step in range(4):
            group = optimizer.param_groups[0]
            group["betas"], group["weight_decay"] = (0.8 + 0.01 * step, 0.99), 0.1 * step
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(1e-2 * 0.9**step)
            else:
                group["lr"] = 1e-2 * 0.9**step
            run(optimizer, params, [[normal(param.shape, 5 + step) for param in params]])
            counts.append(compiled_so_far())
    assert before < counts[1] == counts[-1], counts


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow(30)
@pytest.mark.usefixtures("_threads_as_before")
def test_the_number_of_threads_changes_no_bit() -> None:
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        batch = batch_of(torch.bfloat16, {})
        sums = choose_engine("compile", CPU).update([batch], [Scales(torch.ones(2), torch.ones(2))], gather=True)
        results.append([*sums, *tensors_of(batch)])
    for got, expected in zip(*results):
        assert_same_bits(got, expected)


def test_what_does_not_compile_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here for want of a C++ compiler, in the middle of training, with another engine's group stepping first."""
    monkeypatch.setattr(engines, "_compiled", CompiledEngine())
    params = [parameter(normal((5,), number), torch.bfloat16) for number in range(2)]
    free = {"cautious": False, "bound": False}
    groups = [{"params": params[:1], **free}, {"params": params[1:], "fused_single_pass": True}]
    optimizer = optimizer_for(groups, execution="foreach")
    run(optimizer, params, [[normal((5,), 7).bfloat16()] * 2])
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[1]["execution"] = "compile"
    settings = {"force_disable_caches": True, "cpp.cxx": (None, "no-such-compiler")}
    with (
        torch._inductor.config.patch(settings),
        pytest.raises(RuntimeError, match=r"execution='compile'.*InvalidCxx.*'auto'"),
    ):
        run(optimizer, params, [[normal((5,), 8).bfloat16()] * 2])
    for param, then in zip(params, before):
        assert_same_bits(param.detach(), then)
        assert int(optimizer.state[param]["step"]) == 1
