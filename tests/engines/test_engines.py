"""Every engine against the reference engine: bit for bit, in every mode, dtype, layout and shape.

Pieces are made small, so that the tensors below are worked on in several pieces, and small ones side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support import (
    DTYPES,
    ENGINES,
    LAYOUTS,
    MASTER_MODES,
    MODES,
    OPTION_SETS,
    REFERENCE_ENGINE,
    SIXTEEN_BIT,
    Reference,
    assert_same_bits,
    dtype_name,
    generator,
    gradients,
    largest_error,
    master_key,
    normal,
    optimizer_for,
    parameter,
    run,
    split_by_hand,
    train,
)
from torch import Tensor

from luminav import rule
from luminav.engines import Batch, Scales, TensorStep, bundle, choose_engine
from luminav.engines.single import SingleEngine
from luminav.hyperparameters import Options
from luminav.rounding import element_noise, noise_key, stochastic_round

PIECE = 64
"""Elements of a piece here; CPU_PIECE is 2¹⁸."""

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (0,),
    (2, 0, 3),
    (2,),
    (3,),
    (7,),
    (31,),
    (PIECE - 1,),
    (PIECE,),
    (PIECE + 1,),
    (2 * PIECE + 1,),
    (5, 7),
    (17, 19),
    (3, PIECE + 6),  # rows longer than a piece
    (2, 3, 5, 2),
    (3, 4, 9, 1),
    (1031,),
)
"""Primes, powers of two and their neighbours, nothing at all; from one element to seventeen pieces."""

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_sixteen_bit = pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
by_engine = pytest.mark.parametrize("engine", ENGINES)
by_other_engine = pytest.mark.parametrize("engine", [name for name in ENGINES if name != REFERENCE_ENGINE])
by_mode = pytest.mark.parametrize("mode", MODES)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "CPU_PIECE", PIECE)


def layout_of(number: int) -> str:
    return list(LAYOUTS)[number % len(LAYOUTS)]


def zoo_params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """One parameter of each shape, the layouts by turns."""
    return [parameter(normal(shape, number), dtype, layout_of(number)) for number, shape in enumerate(SHAPES)]


def zoo_grads(dtype: torch.dtype, steps: int = 4) -> list[list[Tensor | None]]:
    """Gradients in other layouts than their parameters', some late, some missing, some expanded, some bad."""
    rows: list[list[Tensor | None]] = []
    for step in range(steps):
        row: list[Tensor | None] = []
        for number, shape in enumerate(SHAPES):
            grad = gradients(shape, steps, 500 + number, 0.5)[step].to(dtype)
            if (number % 5 == 3 and step < 1) or (number + step) % 7 == 0:
                row.append(None)
                continue
            if (number + step) % 6 == 1 and grad.ndim:
                grad = grad.flatten()[:1].sum().expand(shape)
            elif step == 2 and grad.numel() > 20:
                grad.view(-1)[5:8] = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
            row.append(grad if grad.stride() == (0,) * grad.ndim else LAYOUTS[layout_of(number + step + 1)](grad))
        rows.append(row)
    return rows


Result = dict[str, Tensor]


def results_of(
    params: list[torch.nn.Parameter], grads: list[list[Tensor | None]], options: dict[str, Any], **kwargs: Any
) -> Result:
    """Weights and all state after the steps."""
    optimizer = optimizer_for(params, **options, **kwargs)
    run(optimizer, params, grads)
    result = {}
    for number, param in enumerate(params):
        result[f"{number}.weight"] = param.detach()
        for key, value in optimizer.state[param].items():
            result[f"{number}.{key}"] = value
    return result


def assert_same_results(actual: Result, expected: Result) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert_same_bits(actual[key], value, key)


# ---- engines agree ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@by_other_engine
@by_dtype
@pytest.mark.parametrize("name", OPTION_SETS)
def test_engines_agree_bit_for_bit(name: str, dtype: torch.dtype, engine: str) -> None:
    grads = zoo_grads(dtype)
    masters = MASTER_MODES if dtype in SIXTEEN_BIT and name in MODES else ("none",)
    for master in masters:
        options = {"lr": 1e-2, "master_weights": master, **OPTION_SETS[name]}
        expected = results_of(zoo_params(dtype), grads, options, execution=REFERENCE_ENGINE)
        got = results_of(zoo_params(dtype), grads, options, execution=engine)
        assert_same_results(got, expected)
    moved = [not torch.equal(expected[f"{number}.weight"], param) for number, param in enumerate(zoo_params(dtype))]
    assert any(moved) == (options["lr"] != 0)


@by_other_engine
@by_dtype
@pytest.mark.parametrize("mode", ["dual-gated-radial", "one_pass-gated-radial", "single-gated-radial"])
def test_engines_agree_with_pieces_of_their_own_size(mode: str, dtype: torch.dtype, engine: str) -> None:
    """Tensors larger than CPU_PIECE, in one and two dimensions, among small ones."""
    shapes = [(bundle.CPU_PIECE + 77,), (3,), (601, 500), (129, 7)]
    results = []
    for execution in (REFERENCE_ENGINE, engine):
        params = [parameter(normal(shape, number), dtype) for number, shape in enumerate(shapes)]
        grads = [
            [normal(shape, 10 * step + number).to(dtype) for number, shape in enumerate(shapes)] for step in (1, 2)
        ]
        results.append(results_of(params, grads, MODES[mode], execution=execution))
    assert_same_results(results[1], results[0])


@pytest.mark.usefixtures("small_pieces")
@by_other_engine
@by_dtype
@pytest.mark.parametrize("master", MASTER_MODES)
def test_many_small_tensors_with_step_counts_of_their_own(engine: str, dtype: torch.dtype, master: str) -> None:
    """Two hundred tensors of one to nine elements; about half have a gradient at each step."""
    count, draw = 200, generator(1)
    present = torch.rand(5, count, generator=draw) < 0.5
    grads: list[list[Tensor | None]] = [
        [normal((1 + i % 9,), 1000 * step + i).to(dtype) if present[step, i] else None for i in range(count)]
        for step in range(5)
    ]
    for options in ({}, {"buffer": 1}, {"fused_single_pass": True}):
        results = [
            results_of(
                [parameter(normal((1 + i % 9,), i), dtype) for i in range(count)],
                grads,
                {**options, "master_weights": master},
                execution=execution,
            )
            for execution in (REFERENCE_ENGINE, engine)
        ]
        assert_same_results(results[1], results[0])
    steps = {int(results[0].get(f"{i}.step", torch.zeros(()))) for i in range(count)}
    assert steps == {0, 1, 2, 3, 4, 5}


@by_engine
def test_the_engine_asked_for_is_the_one_that_runs(engine: str) -> None:
    """Otherwise the comparisons above would compare an engine with itself."""
    assert choose_engine(engine, torch.device("cpu")).name == engine


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@by_engine
@by_dtype
@by_layout
def test_layouts_change_no_bit_and_are_kept(engine: str, dtype: torch.dtype, layout: str) -> None:
    """Weights and gradients in one layout, the other, or both: the same bits as contiguous; strides and storage stay;
    gradients and the memory between the elements are not written."""
    for shape, mode in itertools.product(
        ((3, 5, 4, 6), (17, 19), (130,), ()), ({"lr": 0.1}, {"buffer": 1}, {"fused_single_pass": True})
    ):
        grads = gradients(shape, 3, 2, dtype=dtype)
        plain, plain_state = train(normal(shape, 1), grads, dtype=dtype, execution=engine, **mode)
        for param_layout, grad_layout in sorted({(layout, layout), ("contiguous", layout), (layout, "contiguous")}):
            param = parameter(normal(shape, 1), dtype, param_layout)
            stride, address = param.stride(), param.data_ptr()
            whole = torch.empty(0, dtype=dtype).set_(param.detach().untyped_storage())
            others = _elements_outside(param, whole)
            untouched = whole[others].clone()
            optimizer = optimizer_for([param], execution=engine, **mode)
            for grad in grads:
                laid_out = LAYOUTS[grad_layout](grad)
                param.grad = laid_out
                optimizer.step()
                assert_same_bits(laid_out, grad)
            assert (param.stride(), param.data_ptr()) == (stride, address)
            assert_same_bits(whole[others], untouched)
            assert_same_bits(param.detach(), plain)
            for key, value in plain_state.items():
                assert_same_bits(optimizer.state[param][key], value, key)
        assert not torch.equal(plain, normal(shape, 1).to(dtype)) or shape == ()


def _elements_outside(view: Tensor, whole: Tensor) -> Tensor:
    """Which elements of a storage do not belong to a view of it."""
    outside = torch.ones(whole.shape, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return outside


@by_engine
@by_dtype
def test_expanded_gradients_are_read_like_any_other(engine: str, dtype: torch.dtype) -> None:
    """Of one element, of one row, of one column. They are not written."""
    for source in (torch.tensor([[0.25]]), normal((1, 6), 1), normal((5, 1), 2)):
        source = source.to(dtype)
        before = source.clone()
        param, twin = parameter(normal((5, 6), 3), dtype), parameter(normal((5, 6), 3), dtype)
        for trained, grad in ((param, source.expand(5, 6)), (twin, source.expand(5, 6).contiguous())):
            optimizer = optimizer_for([trained], execution=engine)
            for _ in range(2):
                trained.grad = grad
                optimizer.step()
        assert_same_bits(param.detach(), twin.detach())
        assert_same_bits(source, before)


# ---- parameters do not touch each other ------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@by_engine
@pytest.mark.parametrize("name", OPTION_SETS)
def test_a_parameter_moves_as_if_it_were_alone(engine: str, name: str) -> None:
    """Empty, scalar, late and now-and-then neighbours change nothing; FP32, so without noise that depends on order."""
    options = {"lr": 1e-2, "execution": engine, **OPTION_SETS[name]}
    grads = zoo_grads(torch.float32)
    params = zoo_params(torch.float32)
    together = results_of(params, grads, options)
    for number, param in enumerate(zoo_params(torch.float32)):
        if options["lr"] == 0 and not param.numel():
            continue  # zero gradients at lr 0 and nothing else: taken for torch's request to allocate state
        own = [row[number] for row in grads if row[number] is not None]
        alone = results_of([param], [[grad] for grad in own], options)
        for key, value in alone.items():
            assert_same_bits(together[f"{number}.{key.removeprefix('0.')}"], value, f"{number} {key}")
        assert int(together[f"{number}.step"]) == len(own)


OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: OPTION_SETS[name] for name in OPTION_SETS if name != "dual-gated-radial"},
    "lr": {"lr": 3e-2},
    "lr_tensor": {"lr": torch.tensor(0.03125)},
    "capturable": {"capturable": True},
    "single_engine": {"execution": "single"},
    "full_masters": {"master_weights": "full"},
    "full_masters_alias": {"master_weights": True},
    "semi_masters_alias": {"master_weights": "hybrid"},
}


@by_engine
@by_dtype
@pytest.mark.parametrize("name", OVERRIDES)
def test_group_overrides_hold_also_in_groups_added_later(engine: str, dtype: torch.dtype, name: str) -> None:
    """Each group moves as in an optimizer of its own; its noise too, whose key is the position in the optimizer."""
    shapes = [(6,), (3, 40), (70,)]
    base = {"lr": 1e-2, "execution": engine}
    rows = [[normal(shape, 10 * step + i).to(dtype) for i, shape in enumerate(shapes)] for step in range(4)]
    params = [parameter(normal(shape, i), dtype) for i, shape in enumerate(shapes)]
    optimizer = optimizer_for([{"params": params[:1]}, {"params": params[1:2], **OVERRIDES[name]}], **base)
    run(optimizer, params[:2], [row[:2] for row in rows[:2]])
    optimizer.add_param_group({"params": params[2:], **OVERRIDES[name]})
    run(optimizer, params, rows[2:])
    for i, over in enumerate(({}, OVERRIDES[name], OVERRIDES[name])):
        # Parameters without gradients hold the places before it.
        alone = [parameter(normal(shape, k), dtype) for k, shape in enumerate(shapes[: i + 1])]
        own = optimizer_for(alone, **{**base, **over})
        for row in rows[0 if i < 2 else 2 :]:
            run(own, alone, [[None] * i + [row[i]]])
        assert_same_bits(params[i].detach(), alone[i].detach(), f"group {i}")
        for key, value in own.state[alone[i]].items():
            assert_same_bits(optimizer.state[params[i]][key], value, f"group {i} {key}")


@pytest.mark.usefixtures("small_pieces")
@by_engine
@by_sixteen_bit
@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
@pytest.mark.parametrize(("moment", "factor"), [("exp_avg", 0.7), ("exp_avg_sq", 0.9)])
def test_noise_is_that_of_seed_step_parameter_element_and_stream(
    engine: str, dtype: torch.dtype, capturable: bool, moment: str, factor: float
) -> None:
    """Without gradients the stores are plain products: of the weight with 1 − η·λ, of a moment with its β. Each draws
    by its own step count, its position in the optimizer, and the row-major index."""
    shapes = [(3, 50), (70,), (9, 8), (2, 40)]
    layouts = ["contiguous", "contiguous", "transposed", "strided_slice"]
    params = [parameter(torch.ones(shape), dtype, layout) for shape, layout in zip(shapes, layouts)]
    options = {"lr": 0.25, "weight_decay": 0.3, "betas": (0.7, 0.9), "seed": 99, "capturable": capturable}
    optimizer = optimizer_for([{"params": params[:1]}, {"params": params[1:]}], execution=engine, **options)
    steps = dict.fromkeys(range(4), 0)
    for present in ((0, 2), (0, 3), (0, 2, 3), (2, 3)):
        expected = {}
        for number in present:
            steps[number] += 1
            values = normal(shapes[number], 10 * number + steps[number]).abs().to(dtype)
            params[number].grad = torch.zeros_like(params[number])
            params[number].detach().copy_(values)
            if state := optimizer.state.get(params[number]):
                state["exp_avg"].zero_()
                state[moment].copy_(values)
            noise = element_noise(noise_key(99, steps[number], number), torch.arange(values.numel()).int())
            for name, scale in {"weight": 1 - 0.25 * 0.3, moment: factor}.items():
                if name == "weight" or state:
                    stream = getattr(noise, name).view(values.shape)
                    expected[number, name] = stochastic_round(values.float() * scale, dtype, stream)
        optimizer.step()
        optimizer.zero_grad()
        for (number, name), value in expected.items():
            stored = params[number].detach() if name == "weight" else optimizer.state[params[number]][name]
            assert_same_bits(stored, value, f"{name} of parameter {number}, step {steps[number]}")
    assert steps == {0: 3, 1: 0, 2: 3, 3: 3}


# ---- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@by_engine
@by_mode
def test_tensors_of_many_pieces_follow_the_closed_form(engine: str, mode: str) -> None:
    """Scales are over whole tensors, not over pieces: two tensors at once, whose halves differ a thousandfold."""
    shapes = [(9 * PIECE + 5,), (3, 2, PIECE + 9)]
    options = {"lr": 3e-3, "execution": engine, **MODES[mode]}
    weights, grads = [], []
    for number, shape in enumerate(shapes):
        uneven = torch.logspace(-1.5, 1.5, math.prod(shape)).reshape(shape)
        weights.append(normal(shape, number) * uneven)
        grads.append([grad * uneven.flip(0) for grad in gradients(shape, 5, 7 + number)])
    params = [parameter(weight) for weight in weights]
    run(optimizer_for(params, **options), params, list(zip(*grads)))
    for param, weight, own in zip(params, weights, grads):
        reference = Reference(weight, **{key: value for key, value in options.items() if key != "execution"})
        for grad in own:
            reference.step(grad)
        assert largest_error(param, reference.weight) < 1e-6


@by_engine
@by_sixteen_bit
def test_pieces_change_neither_noise_nor_moments(
    engine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without scales (neither gate nor radial bound) the piece size cannot matter, to the bit."""
    options = {"cautious": False, "bound": False, "execution": engine}
    results = []
    for piece in (1 << 18, 100, 7):
        monkeypatch.setattr(bundle, "CPU_PIECE", piece)
        params = [parameter(normal(shape, i), dtype) for i, shape in enumerate([(13, 17), (301,), (2,)])]
        grads = [[normal(param.shape, 50 + step).to(dtype) for param in params] for step in range(3)]
        results.append(results_of(params, grads, options))
    for result in results[1:]:
        assert_same_results(result, results[0])


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads_as_before")
@by_engine
@pytest.mark.parametrize("options", [{}, {"buffer": 1}], ids=str)
def test_the_number_of_threads_changes_no_bit(engine: str, options: dict[str, Any]) -> None:
    """One long sum would be shared out among the threads, and rounded otherwise with each number of them."""
    runner = choose_engine(engine, torch.device("cpu"))
    batch = _batch(torch.float32, None, options, shapes=((bundle.CPU_PIECE + 4567,), (400, 401)))
    tables = []
    for threads in (1, 3, 8):
        torch.set_num_threads(threads)
        sums = runner.measure([batch])
        sums += runner.measure_lookahead([batch]) if options else []
        runner.update([copies := _copied(batch)], [Scales(torch.ones(2), torch.ones(2))], gather=False)
        tables.append([*sums, *_tensors(copies)])
    for other in tables[1:]:
        for got, expected in zip(other, tables[0]):
            assert_same_bits(got, expected)


# ---- why single and foreach can agree --------------------------------------------------------------------------------

Operation = Callable[[Tensor, Tensor], Tensor]
ELEMENTWISE: dict[str, Operation] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "add_number": lambda x, y: x + 2.0,
    "mul_number": lambda x, y: x * 0.1,
    "div_number": lambda x, y: x / 0.7,
    "square": lambda x, y: x.square(),
    "sqrt": lambda x, y: x.abs().sqrt(),
    "abs": lambda x, y: x.abs(),
    "clamp": lambda x, y: x.clamp(-0.5, 0.7),
    "expm1": lambda x, y: torch.expm1(x),
    "gt": lambda x, y: torch.gt(x, 0.0, out=torch.empty_like(x)),
    "floor": lambda x, y: torch.floor(100 * x),
    "copysign": torch.copysign,
    "nan_to_num": lambda x, y: torch.nan_to_num(x, 0.0, 0.0, 0.0),
    "to_bfloat16": lambda x, y: x.to(torch.bfloat16).to(x.dtype),
    "to_float16": lambda x, y: x.to(torch.float16).to(x.dtype),
    "tanh_": lambda x, y: rule.tanh_(x.clone()),
    "soft_limit_": lambda x, y: rule.soft_limit_(x.clone(), y.abs()),
    "cliff_governor_": lambda x, y: rule.cliff_governor_(x.clone(), y.clone()),
    "coordinate_radius": lambda x, y: rule.coordinate_radius(x, 0.03),
    "cautious_mask_": lambda x, y: rule.cautious_mask_(x.clone(), y.clone()),
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.9),
    "sign": lambda x, y: torch.sign(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_give_the_same_bits_at_every_position(name: str, dtype: torch.dtype) -> None:
    """In the middle of vector registers or in the remainder, aligned or not. If a build of torch breaks this, `single`
    and `foreach` cannot agree there, and this test says which operation it is."""
    operation = ELEMENTWISE[name]
    x, y = normal((400,), 1, 1.0, dtype), normal((400,), 2, 0.3, dtype)
    x[::37] *= 1e-6
    whole = operation(x.clone(), y.clone())
    for start, length in itertools.product((0, 1, 3, 8, 13, 130), (1, 2, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255)):
        stop = start + length
        assert_same_bits(operation(x[start:stop], y[start:stop]), whole[start:stop], f"view {start}:{stop}")
        copies = x[start:stop].clone(), y[start:stop].clone()
        assert_same_bits(operation(*copies), whole[start:stop], f"copy {start}:{stop}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_a_number_and_a_tensor_of_it_give_the_same_bits(dtype: torch.dtype) -> None:
    """`single` multiplies by a number, `foreach` by one value per element, which is rounded from FP64 once."""
    x = normal((300,), 1, 1.0, dtype)
    for number in (0.1, 1 / 3, 8e-4 * 1.2345, 1e-12, 7e5):
        spread = torch.tensor(number, dtype=torch.float64).to(dtype).expand(300).clone()
        on_device = torch.tensor(number, dtype=torch.float64)
        for operation in (torch.mul, torch.div, torch.add):
            assert_same_bits(operation(x, number), operation(x, spread))
            assert_same_bits(operation(x, number), operation(x, on_device))


# ---- numbers on the device -------------------------------------------------------------------------------------------


@by_engine
@by_dtype
@pytest.mark.parametrize("name", OPTION_SETS)
def test_capturable_steps_are_the_same(engine: str, dtype: torch.dtype, name: str) -> None:
    """Step count, bias corrections and noise key as tensors. torch and Python may round a power in FP64 differently by
    its last bit, which the rounding of the number to FP32 hides: FP64 parameters may differ in theirs."""
    options = {"lr": 1e-2, "execution": engine, **OPTION_SETS[name]}
    grads = gradients((300,), 6, 3, dtype=dtype)
    plain, plain_state = train(normal((300,), 1), grads, dtype=dtype, **options)
    other, other_state = train(normal((300,), 1), grads, dtype=dtype, capturable=True, **options)
    assert int(other_state["step"]) == 6
    for key, expected in {"weight": plain, **plain_state}.items():
        got = {"weight": other, **other_state}[key]
        if dtype == torch.float64:
            torch.testing.assert_close(got, expected, rtol=6 * 2.0**-52, atol=1e-17)
        else:
            assert_same_bits(got, expected, key)


# ---- the three verbs -------------------------------------------------------------------------------------------------


def _state_snapshot(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> Result:
    snapshot = {f"{i}.weight": param.detach().clone() for i, param in enumerate(params)}
    for i, param in enumerate(params):
        snapshot |= {f"{i}.{key}": value.clone() for key, value in optimizer.state[param].items()}
    return snapshot


class LaunchFailed(Exception):
    pass


EXACT_MODES = [name for name in MODES if "one_pass" not in name and ("-gated" in name or "radial" in name)]
"""The modes in which the update waits for sums."""
VERBS_THAT_FAIL = [(m, v) for m in EXACT_MODES for v in ("measure", "update")]
VERBS_THAT_FAIL += [(m, "measure_lookahead") for m in EXACT_MODES if "single" in m]


@pytest.mark.usefixtures("small_pieces")
@by_engine
@pytest.mark.parametrize(("mode", "verb"), VERBS_THAT_FAIL)
def test_a_failure_before_the_update_changes_nothing(
    engine: str, mode: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode all sums are in before anything is written. Then the step can simply be taken again."""
    dtype = torch.bfloat16
    some = slice(0, len(SHAPES), 3)
    grads = [row[some] for row in zoo_grads(dtype)]
    params, twins = zoo_params(dtype)[some], zoo_params(dtype)[some]
    optimizer = optimizer_for(params, execution=engine, master_weights="semi", **MODES[mode])
    twin = optimizer_for(twins, execution=engine, master_weights="semi", **MODES[mode])
    run(optimizer, params, grads[:2])
    before = _state_snapshot(optimizer, params)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise LaunchFailed

    with monkeypatch.context() as broken:
        broken.setattr(type(choose_engine(engine, torch.device("cpu"))), verb, fail)
        with pytest.raises(LaunchFailed):
            run(optimizer, params, grads[2:3])
    for key, value in _state_snapshot(optimizer, params).items():
        if key in before:
            assert_same_bits(value, before[key], key)
        else:  # state of a parameter whose first step this would have been; its remainder is 0 as well
            assert not value.any(), key
    run(optimizer, params, grads[2:])
    run(twin, twins, grads)
    assert_same_results(_state_snapshot(optimizer, params), _state_snapshot(twin, twins))


def _batch(
    dtype: torch.dtype,
    skip: Tensor | None,
    options: dict[str, Any],
    shapes: Sequence[tuple[int, ...]] = ((7,), (3, 50), (1,)),
) -> Batch:
    """Tensors in the middle of training, as the optimizer would hand them over."""
    checked = Options.from_group({"lr": 1e-2, **options})
    kept = master_key(dtype, options)
    steps = []
    for number, shape in enumerate(shapes):
        weight = normal(shape, number)
        upper, remainder = split_by_hand(weight)
        steps.append(
            TensorStep(
                param=upper if kept == "master_remainder" else weight.to(dtype),
                grad=normal(shape, 10 + number).to(dtype),
                exp_avg=normal(shape, 20 + number).to(dtype),
                exp_avg_sq=normal(shape, 30 + number).square().to(dtype) if checked.buffer == 2 else None,
                master_param=weight.clone() if kept == "master_param" else None,
                master_remainder=remainder if kept == "master_remainder" else None,
                noise_key=noise_key(1, 5, number),
            )
        )
    batch = Batch(checked, rule.step_numbers(5, 1e-2, checked, dtype, 1.0), steps, skip)
    if checked.buffer == 1:
        batch.rms_denominator = torch.full((len(shapes),), 0.5, dtype=torch.float64)
    return batch


def _tensors(batch: Batch) -> list[Tensor]:
    each = [(s.param, s.exp_avg, s.exp_avg_sq, s.master_param, s.master_remainder, s.grad) for s in batch.steps]
    return [tensor.clone() for tensors in each for tensor in tensors if tensor is not None]


@by_engine
@by_dtype
@pytest.mark.parametrize(
    "options",
    [{}, {"buffer": 1}, {"master_weights": "semi"}, {"master_weights": "semi", "split_master_weights": False}],
    ids=str,
)
def test_measuring_changes_nothing_and_a_skipped_update_neither(
    engine: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    runner: SingleEngine = choose_engine(engine, torch.device("cpu"))  # type: ignore[assignment]
    scales = Scales(torch.full((3,), 1.25), torch.full((3,), 0.5))
    skipped, taken, plain = (_batch(dtype, skip, options) for skip in (torch.tensor(True), torch.tensor(False), None))
    before = _tensors(plain)
    runner.measure([plain])
    if "buffer" in options:
        runner.measure_lookahead([plain])
    for now, then in zip(_tensors(plain), before):
        assert_same_bits(now, then)
    for batch in (skipped, taken, plain):
        runner.update([batch], [scales], gather=False)
    for now, then in zip(_tensors(skipped), before):
        assert_same_bits(now, then)
    for now, then in zip(_tensors(taken), _tensors(plain)):
        assert_same_bits(now, then)
    assert not torch.equal(_tensors(plain)[0], before[0])


@pytest.mark.usefixtures("small_pieces")
@by_engine
@by_dtype
def test_sums_are_those_of_the_tensors(engine: str, dtype: torch.dtype) -> None:
    """Counts exactly; sums of squares to FP32's accuracy; non-finite weights and gradients as the rule says."""
    batch = _batch(dtype, None, {})
    step = batch.steps[1]
    step.param.view(-1)[3:6] = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
    step.grad.view(-1)[9:13] = torch.tensor([math.nan, math.inf, -math.inf, 1.0]).to(dtype)
    (table,) = choose_engine(engine, torch.device("cpu")).measure([batch])
    assert table.dtype == torch.float64 and table.shape == (3, rule.NUM_SUMS)
    on_the_way = choose_engine(engine, torch.device("cpu")).update(
        [_copied(batch)], [Scales(torch.ones(3), torch.ones(3))], gather=True
    )[0]
    assert_same_bits(on_the_way, table)
    for row, step in zip(table, batch.steps):
        grad = torch.nan_to_num(step.grad.double(), 0.0, 0.0, 0.0)
        assert step.exp_avg_sq is not None
        m = 0.9 * step.exp_avg.double() + 0.1 * grad
        ahead = 0.9 * m + 0.1 * grad
        v = 0.999 * step.exp_avg_sq.double() + 0.001 * (grad - m) ** 2
        b1, eps = 1 - 0.9**6, 1e-4 if dtype == torch.float16 else 1e-8
        u = torch.tanh(ahead / (0.8 * b1 / math.sqrt(1 - 0.999**5) * v.sqrt() + eps * 0.8 * b1))
        keep = ahead * grad > 0
        p = torch.nan_to_num(step.param.double(), 0.0, 0.0, 0.0)
        expected = [keep.sum().item(), (u[keep] ** 2).sum().item(), (p**2).sum().item(), p.numel()]
        assert (row[0].item(), row[3].item()) == (expected[0], expected[3])
        assert row[1:3].tolist() == pytest.approx(expected[1:3], rel=1e-6)
        assert row[4].item() == int((~torch.isfinite(step.grad)).sum())


def _copied(batch: Batch) -> Batch:
    """A batch of copies, so that an update leaves the original as it is."""
    copies = [
        TensorStep(
            param=step.param.clone(),
            grad=step.grad,
            exp_avg=step.exp_avg.clone(),
            exp_avg_sq=None if step.exp_avg_sq is None else step.exp_avg_sq.clone(),
            master_param=None if step.master_param is None else step.master_param.clone(),
            master_remainder=None if step.master_remainder is None else step.master_remainder.clone(),
            noise_key=step.noise_key,
        )
        for step in batch.steps
    ]
    copy = Batch(batch.options, batch.numbers, copies)
    copy.rms_denominator = batch.rms_denominator
    return copy
