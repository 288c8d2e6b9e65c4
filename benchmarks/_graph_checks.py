"""A training step in a CUDA graph against the same steps taken eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import _checkout  # noqa: F401
import _measure
import torch
from _claims import Claims, most_ulps, num_differing, snapshot
from torch import Tensor

from luminav import LuminaV

WARM_UP, REPLAYS = 3, 20
STEPS = WARM_UP + REPLAYS
ROWS, WIDTH = 67, 45
MODES: dict[str, dict[str, Any]] = {"exact": {}, "onepass": {"fused_single_pass": True}, "buffer1": {"buffer": 1}}

# FP32 numbers, so that a float and a device tensor hold the same learning rates.
LRS = [torch.tensor(3e-3 * (1.0 - step / (2 * STEPS)), dtype=torch.float32).item() for step in range(STEPS)]

Run = tuple[list[torch.nn.Parameter], list[Tensor]]


def new_params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Weights of the little model: aligned tensors and others, one without dimensions."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((ROWS, WIDTH), (WIDTH,), (), (64, 128))
    values = [torch.randn(shape, generator=generator) * 0.1 for shape in shapes]
    return [torch.nn.Parameter(value.to(_measure.DEVICE, dtype)) for value in values]


def new_batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step, FP32."""
    generator = torch.Generator().manual_seed(4)
    pairs = [torch.randn(2, ROWS, WIDTH, generator=generator).to(_measure.DEVICE) for _ in range(STEPS)]
    return [(pair[0], pair[1]) for pair in pairs]


def loss_of(params: list[torch.nn.Parameter], x: Tensor, y: Tensor) -> Tensor:
    """Elementwise operations and sums only: matrix products may take another algorithm in a graph."""
    weight, bias, scale, table = params
    return ((torch.tanh(x * weight + bias) * scale + table.square().mean() - y) ** 2).mean()


class Training:
    """Parameters, optimizer and a batch that stays in place.

    Args:
        dtype: Of the parameters.
        capturable: The option; the learning rate is then a device tensor that is changed in place.
        options: The mode.
    """

    def __init__(self, dtype: torch.dtype, capturable: bool, options: dict[str, Any]) -> None:
        self.params, self.batches = new_params(dtype), new_batches()
        lr: Any = torch.tensor(LRS[0], device=_measure.DEVICE) if capturable else LRS[0]
        self.optimizer = LuminaV(self.params, lr=lr, capturable=capturable, execution="triton", **options)
        self.x, self.y = (tensor.clone() for tensor in self.batches[0])

    def feed(self, step: int) -> None:
        """Bring in a step's batch and learning rate."""
        self.x.copy_(self.batches[step][0])
        self.y.copy_(self.batches[step][1])
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(LRS[step])
            else:
                group["lr"] = LRS[step]

    def backward(self) -> None:
        loss_of(self.params, self.x, self.y).backward()

    def eager(self, steps: range, *, set_to_none: bool) -> None:
        for step in steps:
            self.feed(step)
            self.optimizer.zero_grad(set_to_none=set_to_none)
            self.backward()
            self.optimizer.step()

    def warm_up(self, *, set_to_none: bool) -> None:
        """Take the first steps on a side stream, as torch's documentation asks of a program that captures."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.eager(range(WARM_UP), set_to_none=set_to_none)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def result(self) -> Run:
        torch.cuda.synchronize()
        return self.params, snapshot(self.params, self.optimizer)


def eager_run(dtype: torch.dtype, capturable: bool, options: dict[str, Any]) -> Run:
    """Take every step eagerly."""
    training = Training(dtype, capturable, options)
    training.warm_up(set_to_none=True)
    training.eager(range(WARM_UP, STEPS), set_to_none=True)
    return training.result()


def captured_run(dtype: torch.dtype, options: dict[str, Any]) -> Run:
    """Capture forward, backward and step together; the gradients live in the graph's memory."""
    training = Training(dtype, True, options)
    training.warm_up(set_to_none=True)
    training.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.backward()
        training.optimizer.step()
    pinned = disturb_pinned_memory()
    for step in range(WARM_UP, STEPS):
        training.feed(step)
        graph.replay()
    result = training.result()
    del pinned, graph
    return result


def captured_step_run(dtype: torch.dtype, options: dict[str, Any], *, mixed: bool = False) -> Run:
    """Capture the optimizer's step alone; the gradients stay in place.

    With `mixed` every third step is an eager one, and device memory is used for something else in between.
    """
    training = Training(dtype, True, options)
    training.warm_up(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.optimizer.step()
    for step in range(WARM_UP, STEPS):
        training.feed(step)
        training.optimizer.zero_grad(set_to_none=False)
        training.backward()
        if mixed and step % 3 == 0:
            training.optimizer.step()
        else:
            graph.replay()
        if mixed:
            disturb_device_memory()
    return training.result()


def disturb_device_memory() -> None:
    """Fill what device memory is free again, a step's working memory among it, with NaN."""
    for_a_moment = [torch.full((size,), torch.nan, device=_measure.DEVICE) for size in (32, 128, 512, 2048, 8192) * 4]
    del for_a_moment


def disturb_pinned_memory() -> list[Tensor]:
    """Fill what pinned memory is free again: a graph that copies from there must own it."""
    return [torch.full((size,), -1, dtype=torch.int64, pin_memory=True) for size in (8, 16, 32, 64, 128, 256, 512) * 4]


def check_graphs(claims: Claims) -> None:
    """20 replays under a schedule against eager steps, FP32 in every mode, and BF16 for the rounding noise."""
    cases = [(dtype, mode) for dtype in (torch.float32, torch.bfloat16) for mode in MODES]
    eager: dict[str, list[Tensor]] = {}
    for dtype, mode in cases:
        name = name_of(dtype, mode)
        weights, eager[name] = eager_run(dtype, True, MODES[mode])
        plain, _ = eager_run(dtype, False, MODES[mode])
        ulps = max(most_ulps(a, b) for a, b in zip(weights, plain))
        claims.claim(f"{name}/not_capturable", ulps <= 1, f"{ulps} ulp at most between capturable and not", ulps, "ulp")
    runs: dict[str, Callable[..., Run]] = {
        "step_captured": captured_step_run,
        "training_captured": captured_run,
        "eager_in_turns": functools.partial(captured_step_run, mixed=True),
    }
    for what, run in runs.items():
        for dtype, mode in cases:
            name = name_of(dtype, mode)
            differing = num_differing(run(dtype, MODES[mode])[1], eager[name])
            text = f"{differing} elements differ from eager after {REPLAYS} steps"
            claims.claim(f"{name}/{what}", differing == 0, text)


def name_of(dtype: torch.dtype, mode: str) -> str:
    return f"{mode}-{str(dtype).removeprefix('torch.')}"
