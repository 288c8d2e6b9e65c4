"""The checks of check_gpu.py: what issue 3 promises beside equality with the reference engine and speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import _measure
import torch
from _claims import Claims, num_differing, snapshot
from _graph_checks import check_graphs
from _large_check import check_large
from shapes import make_params, num_params, shapes_of
from torch import Tensor

from luminav import LuminaV

LR = 8e-4
FIRST_STEP_SECONDS = 15.0
HOST_SHARE = 0.75
"""Of the time that the host needs for a step of torch's fused AdamW. Seen: 0.17 to 0.52, on hosts that are shared."""
OVERHEAD_SHARE = 0.01

SMALL_SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (0,),
    (3,),
    (17,),
    (5, 7),
    (127,),
    (64,),
    (128, 32),
    (4097,),
    (8209,),
    (131, 64),
    (70, 3, 64),
)
"""One element, primes, 2^k ± 1, nothing at all; aligned or not; one program and several; state in blocks."""

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "onepass": {"fused_single_pass": True},
    "semi-onepass": {"master_weights": "semi", "fused_single_pass": True},
    "full-onepass": {"master_weights": "full", "fused_single_pass": True},
    "buffer1": {"buffer": 1},
    "coordinate": {"cautious": False, "bound_type": "coordinate", "stochastic_rounding": False},
    "8bit-onepass": {"state_bits": 8, "fused_single_pass": True},
    "block-onepass": {"buffer": 1, "block_variance": True, "fused_single_pass": True},
    "smallest": {"buffer": 1, "block_variance": True, "state_bits": 8},
}
"""One-pass modes begin with an exact step, so these reach every kernel."""


def small_run(
    mode: str, dtype: torch.dtype = torch.bfloat16, execution: str = "triton", **options: Any
) -> tuple[list[torch.nn.Parameter], LuminaV]:
    """Weights and an optimizer over the small shapes."""
    generator = torch.Generator().manual_seed(1)
    params = []
    for shape in SMALL_SHAPES:
        weight = torch.randn(shape, generator=generator) * 0.02
        params.append(torch.nn.Parameter(weight.to(_measure.DEVICE, dtype)))
    return params, LuminaV(params, **{"lr": LR, **MODES[mode], **options}, execution=execution)


def new_grads(params: list[torch.nn.Parameter], step: int) -> None:
    """Gradients of a step, written into those that are there."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(param.device, param.dtype)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)


@contextmanager
def no_sync() -> Iterator[None]:
    """Any wait for the device raises RuntimeError."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def claim_no_sync(claims: Claims, name: str, call: Callable[[], object]) -> None:
    """Claim that a call does not wait for the device."""
    try:
        with no_sync():
            call()
    except RuntimeError as error:
        claims.claim(name, False, str(error).splitlines()[0][:200])
    else:
        claims.claim(name, True, "no wait for the device")


# ---- the 426-tensor model ------------------------------------------------------------------------------------------


def check_exact(claims: Claims) -> None:
    """Launches, host time, memory, compilation and waits of the exact step."""
    check_model(claims, most_kernels=6)


def check_onepass(claims: Claims) -> None:
    """The same of the one-pass step."""
    check_model(claims, most_kernels=3, fused_single_pass=True)


def check_model(claims: Claims, most_kernels: int, **options: Any) -> None:
    """All claims about a step of the large model."""
    shapes = shapes_of("qwen4b")
    params = make_params(shapes, torch.bfloat16, _measure.DEVICE)
    torch.cuda.synchronize()
    before = requested_bytes()
    optimizer = LuminaV(params, lr=LR, execution="triton", **options)

    def step() -> None:
        optimizer.step()

    def prepare() -> None:
        _measure.scale_lr(optimizer)

    claims.at_most("first_step", seconds(step), FIRST_STEP_SECONDS, "s")
    prepare()
    claims.at_most("second_step", seconds(step), FIRST_STEP_SECONDS, "s")
    claim_launches(claims, step, prepare, most_kernels)
    compiled = num_compiled()
    for _ in range(5):
        prepare()
        step()
    new = num_compiled() - compiled
    claims.claim(
        "recompiles", new == 0 and compiled > 0, f"{new} new beside {compiled} kernels in 5 steps", new, "kernels"
    )
    claim_memory(claims, step, 2 * num_params(shapes), before)
    claim_nothing_kept(claims, "allocations", step, lambda: None)
    claim_nothing_kept(claims, "allocations_with_schedule", step, prepare)
    prepare()
    claim_no_sync(claims, "sync", step)
    claim_host_time(claims, step, prepare, params)


def seconds(step: Callable[[], None]) -> float:
    """Time of one step, to its end on the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def claim_launches(claims: Claims, step: Callable[[], None], prepare: Callable[[], None], most_kernels: int) -> None:
    """Profile the third step."""
    _measure.warm_up_profiler()
    prepare()
    activity = _measure.trace(step)
    names = ", ".join(f"{name} {time / 1e3:.3f} ms" for name, time in activity.kernels)
    number = len(activity.kernels)
    claims.claim(
        "kernels", 0 < number <= most_kernels, f"{number}, at most {most_kernels}: {names}", number, "kernels/step"
    )
    claims.at_most("copies", activity.copies_to_device, 1, "copies/step")


def num_compiled() -> int:
    """Kernels that this process has compiled: device code in the Triton cache, which was empty at its start."""
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def claim_memory(claims: Claims, step: Callable[[], None], weight_bytes: int, before: int) -> None:
    """Claim that tables and scratch are small: what is allocated beyond weights, gradients and the two moments."""
    torch.cuda.synchronize()
    tables = requested_bytes() - before - 2 * weight_bytes
    scratch = _measure.scratch_bytes(step)
    claims.at_most("tables", tables / 2**20, OVERHEAD_SHARE * weight_bytes / 2**20, "MiB")
    claims.at_most("tables_and_scratch", (tables + scratch) / 2**20, OVERHEAD_SHARE * weight_bytes / 2**20, "MiB")


def requested_bytes() -> int:
    """Memory asked of the allocator; what it hands out is up to 1 MiB more for each large tensor, ours or anyone's."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def claim_nothing_kept(claims: Claims, name: str, step: Callable[[], None], prepare: Callable[[], None]) -> None:
    """Claim that a step takes memory for its sums only, gives it back, and that the driver is not asked for any."""
    step()
    torch.cuda.synchronize()
    keys = ("allocation.all.allocated", "allocation.all.current", "segment.all.allocated", "num_alloc_retries")
    before = torch.cuda.memory_stats()
    for _ in range(3):
        prepare()
        step()
    after = torch.cuda.memory_stats()
    taken, *kept = (after[key] - before[key] for key in keys)
    expected = 3  # tensors of one kind, three steps
    detail = f"{taken} in 3 steps, {dict(zip(keys[1:], kept, strict=True))}"
    claims.claim(name, taken == expected and max(kept) <= 0, detail, taken / 3, "allocations/step")


def claim_host_time(
    claims: Claims, step: Callable[[], None], prepare: Callable[[], None], params: Sequence[torch.nn.Parameter]
) -> None:
    """Claim that a step costs the host little, beside torch's fused AdamW on the same host."""
    fused = torch.optim.AdamW(params, lr=LR, fused=True)
    fused.step()
    own = _measure.host_ms(step, prepare, 20)
    queued = _measure.host_queued_ms(step, prepare, 20)
    most = HOST_SHARE * _measure.host_ms(fused.step, lambda: _measure.scale_lr(fused), 20)
    claims.at_most("host", own, most, "ms")
    claims.at_most("host_queued", queued, most, "ms")


# ---- small models --------------------------------------------------------------------------------------------------


def check_modes(claims: Claims) -> None:
    """Every mode, with and without `capturable`: no wait for the device, no memory kept, and the same bits twice."""
    for mode in MODES:
        for capturable in (False, True):
            name = f"{mode}{'-capturable' if capturable else ''}"
            results = [steady_run(claims if again == 0 else None, name, mode, capturable) for again in range(2)]
            differing = num_differing(*results)
            claims.claim(f"{name}/twice", differing == 0, f"{differing} elements differ between two runs")


def steady_run(claims: Claims | None, name: str, mode: str, capturable: bool) -> list[Tensor]:
    """Eight steps; the sixth must not wait, the last two keep no memory."""
    lr = torch.tensor(LR, device=_measure.DEVICE) if capturable else LR
    params, optimizer = small_run(mode, lr=lr, capturable=capturable)
    for step in range(5):
        new_grads(params, step)
        optimizer.step()
        _measure.scale_lr(optimizer)
    new_grads(params, 5)
    if claims is None:
        optimizer.step()
    else:
        claim_no_sync(claims, f"{name}/sync", optimizer.step)
    keys = ("allocation.all.current", "segment.all.allocated")
    before = torch.cuda.memory_stats()
    optimizer.step()
    optimizer.step()
    after = torch.cuda.memory_stats()
    if claims is not None:
        grown = {key: after[key] - before[key] for key in keys}
        claims.claim(f"{name}/allocations", max(grown.values()) <= 0, f"in two steps {grown}")
    return snapshot(params, optimizer)


def check_twice(claims: Claims) -> None:
    """GPT-2 small, whose tensors take many programs each: five steps twice give the same bits."""
    for mode in ("exact", "onepass", "buffer1"):
        results = []
        for _ in range(2):
            params = make_params(shapes_of("gpt2"), torch.bfloat16, _measure.DEVICE)
            optimizer = LuminaV(params, lr=LR, execution="triton", **MODES[mode])
            for _ in range(5):
                optimizer.step()
                _measure.scale_lr(optimizer)
            results.append(snapshot(params, optimizer))
        differing = num_differing(*results)
        claims.claim(mode, differing == 0, f"{differing} of {sum(t.numel() for t in results[0])} elements differ")


# ---- GradScaler ----------------------------------------------------------------------------------------------------

SCALE = 1024.0  # a power of two, which the gradients carry exactly
OVERFLOW_AT = 3


def check_scaler(claims: Claims) -> None:
    """A scaled step equals an unscaled one, an overflowed step changes nothing, and neither waits for the device."""
    for mode in ("exact", "onepass", "buffer1"):
        scaled, plain = scaled_run(claims, mode), plain_run(mode)
        differing = num_differing(scaled, plain)
        claims.claim(f"{mode}/equals_unscaled", differing == 0, f"{differing} elements differ after 6 steps")


def plain_run(mode: str) -> list[Tensor]:
    """Six steps without a scaler."""
    params, optimizer = small_run(mode, torch.float32)
    for step in range(6):
        new_grads(params, step)
        optimizer.step()
    return snapshot(params, optimizer)


def scaled_run(claims: Claims, mode: str) -> list[Tensor]:
    """The same six steps under a scaler, with an overflowed one between."""
    params, optimizer = small_run(mode, torch.float32)
    scaler = torch.amp.GradScaler(_measure.DEVICE.type, init_scale=SCALE, growth_interval=1000)
    scaler.scale(torch.zeros((), device=_measure.DEVICE))  # makes the scale
    scale = SCALE
    for step in range(6):
        if step == OVERFLOW_AT:
            overflow(claims, mode, params, optimizer, scaler)
            scale *= scaler.get_backoff_factor()
        new_grads(params, step)
        for param in params:
            assert param.grad is not None
            param.grad.mul_(scale)
        if step == OVERFLOW_AT + 1:
            claim_no_sync(claims, f"{mode}/sync", lambda: scaler.step(optimizer))
        else:
            scaler.step(optimizer)
        scaler.update()
    return snapshot(params, optimizer)


def overflow(
    claims: Claims, mode: str, params: list[torch.nn.Parameter], optimizer: LuminaV, scaler: torch.amp.GradScaler
) -> None:
    """A step with an infinite gradient element."""
    new_grads(params, 50)
    last = params[-1].grad
    assert last is not None
    last[7] = float("inf")
    before = snapshot(params, optimizer)
    claim_no_sync(claims, f"{mode}/overflow_sync", lambda: scaler.step(optimizer))
    scaler.update()
    differing = num_differing(before, snapshot(params, optimizer))
    claims.claim(f"{mode}/overflow", differing == 0, f"{differing} elements changed in an overflowed step")


# ---- a small run, for memory checkers ------------------------------------------------------------------------------


def check_small(claims: Claims, modes: Sequence[str] = tuple(MODES)) -> None:
    """Three steps of every mode on tiny tensors, compared with the reference engine."""
    cases = [(mode, torch.bfloat16) for mode in modes]
    cases += [(mode, dtype) for mode in modes if mode == "onepass" for dtype in (torch.float16, torch.float32)]
    for mode, dtype in cases:
        name = f"{mode}-{str(dtype).removeprefix('torch.')}"
        weights = []
        for execution in ("triton", "single"):
            params, optimizer = small_run(mode, dtype, execution)
            for step in range(3):
                new_grads(params, step)
                optimizer.step()
            torch.cuda.synchronize()
            weights.append(torch.cat([param.detach().flatten().double() for param in params]))
        ours, reference = weights
        tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype] * reference.abs().max()
        far = int(((ours - reference).abs() > tolerance).sum())
        equal = (ours == reference).double().mean().item()
        good = far == 0 and bool(torch.isfinite(ours).all())
        claims.claim(name, good, f"{equal:.2%} of {ours.numel()} weights bit-equal to single, {far} far off")


CHECKS: dict[str, Callable[[Claims], None]] = {
    "exact": check_exact,
    "onepass": check_onepass,
    "graphs": check_graphs,
    "modes": check_modes,
    "scaler": check_scaler,
    "twice": check_twice,
    "large": check_large,
    "small": check_small,
}
TIMED = ("exact", "onepass")
"""These measure time, so they run alone, and from an empty Triton cache."""
