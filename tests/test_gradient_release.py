"""Gradient release: the bits of an ordinary step, no gradient left behind, and refusals."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import luminav
from luminav import LuminaV, gradient_release

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "one_pass": {"fused_single_pass": True},
    "single": {"buffer": 1},
    "semi": {"master_weights": "semi"},
    "full_one_pass": {"master_weights": "full", "fused_single_pass": True},
    "coordinate": {"bound_type": "coordinate", "cautious": False},
}
STEPS = 6


class Model(nn.Module):
    """Tied weights, a frozen layer, a layer that only some steps use, and one under activation checkpointing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"embed": (16, 12), "frozen": (12, 12), "late": (12, 12), "again": (12, 12), "bias": (12,)}
        for name, shape in shapes.items():
            value = (torch.randn(shape, generator=generator) * 0.3).to(dtype)
            setattr(self, name, nn.Parameter(value, requires_grad=name != "frozen"))

    def forward(self, tokens: Tensor, *, late: bool) -> Tensor:
        x = self.embed[tokens]
        x = checkpoint(lambda x: torch.tanh(x @ self.again + self.bias), x, use_reentrant=False)
        x = x @ self.frozen
        if late:
            x = x + torch.tanh(x @ self.late)
        return (x @ self.embed.T).float().logsumexp(-1).mean()


def batch(step: int, micro: int) -> Tensor:
    return torch.randint(0, 16, (5,), generator=torch.Generator().manual_seed(10 * step + micro))


def train(dtype: torch.dtype, released: bool, micro_batches: int = 1, **options: Any) -> list[Tensor]:
    """All weights and state after some steps under a schedule."""
    model = Model(dtype)
    optimizer = LuminaV(model.parameters(), lr=3e-3, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    handle = luminav.enable_gradient_release(model, optimizer) if released else None
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = model(batch(step, micro), late=step in (2, 4))
            if handle is not None and micro < micro_batches - 1:
                with handle.accumulate():
                    loss.backward()
            else:
                loss.backward()
        if handle is not None:
            assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    values = [param.detach() for param in model.parameters()]
    return values + [value for param in model.parameters() for value in optimizer.state.get(param, {}).values()]


@pytest.mark.parametrize("bucket", [1, 200, 1 << 22], ids=lambda n: f"bucket{n}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_release_gives_the_bits_of_an_ordinary_step(
    mode: str, dtype: torch.dtype, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_release, "BUCKET", bucket)
    monkeypatch.setattr(gradient_release, "BUCKETS", 1 << 30)
    for micro_batches in (1, 3):
        ordinary = train(dtype, False, micro_batches, **MODES[mode])
        released = train(dtype, True, micro_batches, **MODES[mode])
        assert len(ordinary) == len(released)
        assert all(torch.equal(a, b) for a, b in zip(ordinary, released))


def test_no_more_than_a_bucket_of_gradients_is_alive() -> None:
    """Counted inside backward: when a layer's gradient comes, those of the layers behind it are gone."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    optimizer = LuminaV(model.parameters())
    gradient_release.BUCKET, before = 64 * 64, gradient_release.BUCKET
    try:
        luminav.enable_gradient_release(model, optimizer)
    finally:
        gradient_release.BUCKET = before
    most = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(p.grad is not None for p in model.parameters()))
        )
    model(torch.randn(3, 64)).sum().backward()
    assert len(most) == 8 and max(most) <= 1


def test_a_gradient_is_freed_at_once() -> None:
    model = nn.Linear(8, 8)
    optimizer = LuminaV(model.parameters())
    luminav.enable_gradient_release(model, optimizer)
    seen: list[weakref.ref[Tensor]] = []
    model.weight.register_hook(lambda grad: seen.append(weakref.ref(grad)))
    model(torch.randn(3, 8)).sum().backward()
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None


def test_remove_ends_it_and_a_second_handle_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = LuminaV(model.parameters())
    handle = luminav.enable_gradient_release(model, optimizer)
    with pytest.raises(RuntimeError, match="on already"):
        luminav.enable_gradient_release(model, optimizer)
    handle.remove()
    handle.remove()
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None and torch.equal(model.weight, before)
    luminav.enable_gradient_release(model, optimizer)


def test_parameters_without_a_hook_wait_for_the_step() -> None:
    """Those of a group that is added later."""
    model, more = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = LuminaV(model.parameters())
    luminav.enable_gradient_release(model, optimizer)
    optimizer.add_param_group({"params": list(more.parameters())})
    before = more.weight.detach().clone()
    more(model(torch.ones(1, 4))).sum().backward()
    assert more.weight.grad is not None and torch.equal(more.weight, before)
    optimizer.step()
    assert not torch.equal(more.weight, before)
    assert [int(optimizer.state[p]["step"]) for p in (model.weight, more.weight)] == [1, 1]


def test_a_second_backward_pass_is_refused_before_it_changes_anything() -> None:
    """Two losses, or micro-batches without accumulate(): the first parameter that gets a gradient raises."""
    model = nn.Linear(4, 4)
    optimizer = LuminaV(model.parameters())
    luminav.enable_gradient_release(model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="accumulate"):
        model(torch.ones(1, 4)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    optimizer.zero_grad()
    optimizer.step()
    model(torch.ones(1, 4)).sum().backward()
    assert not torch.equal(before[0], model.weight)


def test_what_cannot_be_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="AdamW"):
        luminav.enable_gradient_release(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list\. Pass the model"):
        luminav.enable_gradient_release(list(model.parameters()), LuminaV(model.parameters()))  # type: ignore[arg-type]
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = LuminaV(model.parameters())
    handle = luminav.enable_gradient_release(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = model(torch.ones(1, 4)).sum()
    model.weight.grad = torch.ones_like(model.weight)  # a gradient that a scaler can look at
    scaler.scale(loss)
    with pytest.raises(RuntimeError, match="loss scaler"):
        scaler.step(optimizer)
    assert optimizer.state[model.weight] == {}
    handle.remove()
    optimizer.step()  # the scaler has left nothing that would scale it
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
    ordinary = nn.Linear(4, 4)
    ordinary.load_state_dict(initial)
    ordinary.weight.grad = torch.ones_like(ordinary.weight)
    LuminaV(ordinary.parameters()).step()
    assert torch.equal(model.weight, ordinary.weight)


def test_state_and_checkpoints_are_as_ever() -> None:
    """A run under release goes on without it, from a file, to the same bits."""

    def run(release_until: int) -> list[Tensor]:
        model = Model(torch.bfloat16)
        optimizer = LuminaV(model.parameters(), lr=3e-3)
        handle = luminav.enable_gradient_release(model, optimizer)
        for step in range(STEPS):
            if step == release_until:
                handle.remove()
                saved = optimizer.state_dict()
                optimizer = LuminaV(model.parameters(), lr=3e-3)
                optimizer.load_state_dict(saved)
            model(batch(step, 0), late=False).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(3), run(STEPS)))


def test_a_failed_backward_pass_leaves_nothing_behind() -> None:
    """After zero_grad() and step() the next pass releases everything again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = LuminaV(model.parameters())
    luminav.enable_gradient_release(model, optimizer)
    hook = model[0].weight.register_hook(lambda grad: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4)).sum().backward()
    hook.remove()
    optimizer.zero_grad()
    optimizer.step()
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()


def test_an_old_handle_does_not_end_a_new_one() -> None:
    model = nn.Linear(4, 4)
    optimizer = LuminaV(model.parameters())
    old = luminav.enable_gradient_release(model, optimizer)
    old.remove()
    luminav.enable_gradient_release(model, optimizer)
    old.remove()
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is None
        optimizer.step()


def test_everything_is_freed_without_remove_and_another_optimizer_may_follow() -> None:
    model = nn.Linear(4, 4)
    optimizer = LuminaV(model.parameters())
    luminav.enable_gradient_release(model, optimizer)
    with pytest.raises(RuntimeError, match="another optimizer"):
        luminav.enable_gradient_release(model, LuminaV(model.parameters()))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    follower = LuminaV(model.parameters())
    luminav.enable_gradient_release(model, follower)
    model(torch.ones(1, 4)).sum().backward()
    assert int(follower.state[model.weight]["step"]) == 1


def test_a_model_without_any_of_the_parameters_is_refused() -> None:
    net, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = LuminaV(net.parameters(), lr=1e-2)
    for use in (lambda: luminav.enable_gradient_release(other, optimizer), lambda: optimizer.master_state_dict(other)):
        with pytest.raises(ValueError, match="none of the optimizer's parameters is in the model"):
            use()
    with pytest.warns(UserWarning, match="1 parameters of the optimizer are not in the model"):
        handle = luminav.enable_gradient_release(nn.ParameterList([net.weight]), optimizer)
    handle.remove()


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_comes_after_the_step() -> None:
    """Of a gradient that is NaN throughout; the step is not taken twice."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = LuminaV(model.parameters())
    luminav.enable_gradient_release(model, optimizer)
    with pytest.raises(RuntimeWarning, match="NaN"):
        (model(torch.ones(1, 4)).sum() * float("nan")).backward()
    assert model.weight.grad is None
    optimizer.step()
    assert int(optimizer.state[model.weight]["step"]) == 1


def test_plain_shards_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="fully_shard"):
        luminav.enable_gradient_release(model, LuminaV(model.parameters(), fsdp_sync=True))
