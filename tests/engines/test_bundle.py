"""Pieces and bundles: they cover every element once, in row-major order, whatever shape, strides and offset."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support import LAYOUTS, assert_same_bits, generator, normal
from torch import Tensor

from luminav.engines.batch import TensorStep
from luminav.engines.bundle import CPU_PIECE, Bundle, Workspace, bundles, cut, piece_limit
from luminav.rounding import element_noise, noise_key

SHAPES = [
    (),
    (1,),
    (0,),
    (4, 0),
    (0, 4),
    (5,),
    (10,),
    (11,),
    (23,),
    (3, 4),
    (2, 17),
    (17, 2),
    (1, 1, 40),
    (40, 1, 1),
    (3, 5, 7),
    (2, 1, 3, 11),
    (1, 101),
]
LIMITS = (1, 2, 3, 7, 10, 11, 64, 1000)
WORD = 1 << 32


def step_of(values: Tensor, number: int = 0, first_index: int = 0) -> TensorStep:
    return TensorStep(
        param=values,
        grad=values,
        exp_avg=values,
        exp_avg_sq=None,
        master_param=None,
        noise_key=noise_key(1, 2, number),
        first_index=first_index,
    )


def param_of(step: TensorStep) -> Tensor:
    return step.param


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_cover_a_tensor_once_in_row_major_order(shape: tuple[int, ...], limit: int) -> None:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    pieces = list(cut(3, shape, limit))
    covered = [numbers[piece.index].flatten() for piece in pieces]
    assert torch.equal(torch.cat([*covered, torch.empty(0, dtype=torch.int64)]), numbers.flatten())
    for piece, part in zip(pieces, covered):
        assert piece.tensor == 3
        assert 0 < piece.numel == part.numel() <= limit
        assert piece.start == part[0]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("pack", [False, True])
def test_bundles_hold_at_most_the_limit_and_everything_once(pack: bool, limit: int) -> None:
    tensors = [normal(shape, number) for number, shape in enumerate(SHAPES)]
    steps = [step_of(tensor, number) for number, tensor in enumerate(tensors)]
    seen = []
    held = []
    for bundle in bundles(steps, limit, pack=pack):
        assert sum(bundle.sizes) <= limit
        assert pack or len(bundle.pieces) == 1
        flat = bundle.load(param_of, torch.float32)
        assert flat.shape == (sum(bundle.sizes),)
        seen.append(flat)
        held.append(sum(bundle.sizes))
    assert torch.equal(torch.cat(seen), torch.cat([tensor.flatten() for tensor in tensors]))
    if pack:  # two bundles in succession do not fit into one
        assert all(one + other > limit for one, other in itertools.pairwise(held))


def test_no_tensors_and_empty_tensors_make_no_bundles() -> None:
    assert list(bundles([], 10, pack=True)) == []
    assert list(bundles([step_of(torch.zeros(0)), step_of(torch.zeros(3, 0))], 10, pack=True)) == []


def test_the_piece_on_the_cpu_fits_a_cache() -> None:
    """1 MiB per FP32 temporary: scratch does not grow with the model."""
    assert piece_limit(torch.device("cpu")) == CPU_PIECE == 1 << 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_and_store_go_by_row_major_order(layout: str, dtype: torch.dtype) -> None:
    """Also for pieces of non-contiguous tensors, and with a conversion on the way."""
    shapes = [(7, 9), (2, 3, 4, 5), (130,), ()]
    values = [normal(shape, number).to(dtype) for number, shape in enumerate(shapes)]
    for limit, pack in itertools.product((8, 50, 1000), (False, True)):
        tensors = [LAYOUTS[layout](value) for value in values]
        addresses = [tensor.data_ptr() for tensor in tensors]
        for bundle in bundles([step_of(tensor, n) for n, tensor in enumerate(tensors)], limit, pack=pack):
            flat = bundle.load(param_of, torch.float32)
            assert flat.dtype == torch.float32
            bundle.store(param_of, flat * 2.0)
        for tensor, value, address in zip(tensors, values, addresses):
            assert_same_bits(tensor, value * 2)
            assert tensor.data_ptr() == address


def test_store_leaves_everything_where_unless_is_true() -> None:
    for unless in (False, True):
        tensors = [torch.ones(5), torch.ones(2, 3).t()]
        steps = [step_of(tensor, n) for n, tensor in enumerate(tensors)]
        for bundle in bundles(steps, 8, pack=True):
            bundle.store(param_of, torch.full((sum(bundle.sizes),), 7.0), torch.tensor(unless))
        assert all((tensor == (1.0 if unless else 7.0)).all() for tensor in tensors)


def test_sums_are_per_piece_and_counts_exact() -> None:
    """FP32 partial sums of 512 ones are exact; a single FP32 sum of 2²⁵ ones would not be."""
    numel = (1 << 25) + 3
    ones = torch.ones(1).expand(numel)
    bundle = Bundle([step_of(ones)], list(cut(0, (numel,), numel)), Workspace(0, torch.device("cpu")))
    (total,) = bundle.sum(torch.ones(numel))
    assert total.dtype == torch.float64 and total.item() == numel
    sizes = (1, 511, 512, 513, 1500, 3)
    tensors = [torch.randint(0, 2, (n,), generator=generator(n)).float() for n in sizes]
    steps = [step_of(tensor, n) for n, tensor in enumerate(tensors)]
    (packed,) = bundles(steps, 10_000, pack=True)
    assert [total.item() for total in packed.sum(torch.cat(tensors))] == [int(t.sum()) for t in tensors]
    flags = packed.sum(torch.cat(tensors).bool())
    assert [total.item() for total in flags] == [int(t.sum()) for t in tensors]
    reals = normal((100_003,), 1, 3.0)
    (whole,) = bundles([step_of(reals)], 1 << 20, pack=False)
    assert whole.sum(reals.square())[0].item() == pytest.approx(reals.double().square().sum().item(), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_spread_gives_each_element_its_tensors_number_rounded_once(dtype: torch.dtype) -> None:
    numbers = torch.tensor([1 / 3, 0.1, 1e-9, 7.0], dtype=torch.float64)
    steps = [step_of(torch.zeros(n), i) for i, n in enumerate((3, 70, 0, 5))]
    for limit, pack in itertools.product((4, 20, 1000), (False, True)):
        for bundle in bundles(steps, limit, pack=pack):
            expected = torch.cat([numbers[p.tensor].to(dtype).expand(p.numel) for p in bundle.pieces])
            factor = bundle.spread(numbers, dtype)
            assert_same_bits(torch.ones(sum(bundle.sizes), dtype=dtype) * factor, expected)


@pytest.mark.parametrize("first", [0, 5, 2**31 - 50, 2**32 - 50, 2**32 - 300, 3 * 2**32 - 1, 2**40 + 2**32 - 60])
@pytest.mark.parametrize("limit", [7, 64, 1000])
def test_noise_is_that_of_the_global_element_index(first: int, limit: int) -> None:
    """Whatever pieces and bundles, on both sides of 2³¹ and 2³²."""
    shapes = [(300,), (3, 11), (1,)]
    firsts = [first, 0, 2**32 - 1]
    steps = [step_of(torch.zeros(shape), n, start) for n, (shape, start) in enumerate(zip(shapes, firsts))]
    for pack, third in itertools.product((False, True), (False, True)):
        got: list[list[Tensor]] = [[] for _ in range(3)]
        for bundle in bundles(steps, limit, pack=pack):
            noise = bundle.noise(exp_avg_sq=third)
            assert (noise.exp_avg_sq is not None) == third
            for stream, parts in zip((noise.weight, noise.exp_avg, noise.exp_avg_sq), got):
                if stream is not None:
                    parts.append(stream)
        expected: list[list[Tensor]] = [[] for _ in range(3)]
        for number, (shape, start) in enumerate(zip(shapes, firsts)):
            for index in range(start, start + math.prod(shape)):  # one element at a time
                low = torch.tensor([index % WORD]).to(torch.int32)
                noise = element_noise(noise_key(1, 2, number), low, index // WORD)
                for stream, parts in zip((noise.weight, noise.exp_avg, noise.exp_avg_sq), expected):
                    assert stream is not None
                    parts.append(stream)
        for parts, wanted in zip(got[: 3 if third else 2], expected):
            assert torch.equal(torch.cat(parts), torch.cat(wanted))
