"""The demo's model, its schedule, and what it measures."""

from __future__ import annotations

import itertools

import pytest
import torch

from luminav.cli.demo.contenders import contenders
from luminav.cli.demo.data import Corpus, split
from luminav.cli.demo.model import ByteTransformer, ModelShape
from luminav.cli.demo.settings import DemoSettings
from luminav.cli.demo.training import BITS_PER_NAT, Run, stored_bytes

SHAPE = ModelShape(width=32, layers=2, heads=2, context=16)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return split(b"the quick brown fox jumps over the lazy dog. " * 400, 16, name="text", num_files=1)


def small(**changes: object) -> DemoSettings:
    values = {"steps": 30, "width": 32, "layers": 1, "heads": 2, "context": 16, "validation_bytes": 512, **changes}
    return DemoSettings(**values)  # type: ignore[arg-type]


def test_the_model_sees_no_later_byte() -> None:
    model = ByteTransformer(SHAPE, seed=0)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] += 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10], after[0, 10])


def test_luminav_starts_from_the_rounding_of_adamws_values(corpus: Corpus) -> None:
    ours, theirs = (Run(contender, small(), corpus, CPU) for contender in contenders(small()))
    pairs = list(zip(ours.model.parameters(), theirs.model.parameters()))
    assert {p.dtype for p, _ in pairs} == {torch.bfloat16}
    assert {p.dtype for _, p in pairs} == {torch.float32}
    assert all(torch.equal(low, full.bfloat16()) for low, full in pairs)


def test_fp32_activations_leave_the_weights_in_bf16(corpus: Corpus) -> None:
    """What a CPU without BF16 products runs: the same weights, gradients in their dtype, nearly the same loss."""
    ours = contenders(small())[0]
    native, widened = (Run(ours, small(), corpus, CPU, dtype) for dtype in (torch.bfloat16, torch.float32))
    windows = corpus.batch(0, 0, 8)
    losses = [run.model.loss(windows) for run in (native, widened)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=2e-2)
    losses[1].backward()
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in widened.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_contenders_learn(dtype: str, corpus: Corpus) -> None:
    settings = small(dtype=dtype)
    for contender in contenders(settings):
        run = Run(contender, settings, corpus, CPU)
        while run.step < settings.steps:
            run.take_step()
        assert run.history.loss[-1] < 0.6 * run.history.loss[0]


def test_measured_bytes(corpus: Corpus) -> None:
    settings = small(width=64, layers=3)
    measured = []
    for contender in contenders(settings):
        run = Run(contender, settings, corpus, CPU)
        run.take_step()
        measured.append(run.finish(lambda: None).bytes_per_param)
    assert measured == pytest.approx([6, 12], abs=0.01)


def test_shared_memory_counts_once() -> None:
    whole = torch.zeros(10)
    assert stored_bytes({"a": whole, "b": [whole[2:], {"c": whole.view(2, 5)}], "d": 3, "e": "text"}) == 40
    assert stored_bytes([torch.zeros(4, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int64)]) == 16


def test_validation_is_the_mean_over_the_held_out_bytes(corpus: Corpus) -> None:
    run = Run(contenders(small())[1], small(), corpus, CPU)
    windows = corpus.validation(10**9)
    expected = run.model.loss(windows).item() * BITS_PER_NAT
    assert run.validate(10**9, lambda: None) == pytest.approx(expected, rel=1e-6)


def test_schedule_rises_then_falls() -> None:
    settings = DemoSettings(steps=100, warmup=0.1)
    rates = [settings.learning_rate(1.0, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert 0 < rates[-1] < 1e-3
