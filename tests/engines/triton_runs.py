"""What the tests of the Triton engine share: where they run, and races of it against the reference engine.

On a GPU (`-m gpu`) the kernels are compiled. On the CPU they run in Triton's interpreter, which is chosen by an
environment variable before Triton is imported and holds for the whole process: `test_triton_interpreted.py` starts one
for these tests, so that no other test meets a Triton engine that takes the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import interpreted
import pytest
import torch
from support import LAYOUTS, SIXTEEN_BIT, bits, dtype_name, master_of, normal, optimizer_for
from torch import Tensor, nn

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    DEVICE = torch.device("cpu")
    interpreted.do_nothing_twice()
elif torch.cuda.is_available():
    DEVICE = torch.device("cuda", torch.cuda.current_device())
elif hasattr(torch, "xpu") and torch.xpu.is_available():
    DEVICE = torch.device("xpu", torch.xpu.current_device())
else:
    pytest.skip("needs a GPU; test_triton_interpreted.py runs these tests on the CPU", allow_module_level=True)

MARKS = [] if INTERPRETED else [pytest.mark.gpu]

BLOCK, ITERATIONS = 64, 2
SPAN = BLOCK * ITERATIONS
"""Elements of a program in the interpreter; a GPU runs the sizes of the package."""

MASTER_FORMS = ("master_param", "master_remainder")

by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_name)
by_sixteen_bit = pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)


def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, let small tensors be those of several programs."""
    if INTERPRETED:
        interpreted.small_programs(BLOCK, ITERATIONS, monkeypatch.setattr)


def span() -> int:
    from luminav.engines.triton import kinds

    return kinds.SPAN


def weights(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, layouts: Sequence[str] = ()
) -> list[Callable[..., Any]]:
    """Makers of parameters N(0, 0.02²): called with a device, each gives the same values in the same layout."""

    def maker(number: int, shape: tuple[int, ...]) -> Callable[..., nn.Parameter]:
        values = normal(shape, number, 0.02, dtype)
        layout = LAYOUTS[layouts[number % len(layouts)] if layouts else "contiguous"]
        return lambda device: nn.Parameter(layout(values.to(device)))

    return [maker(number, shape) for number, shape in enumerate(shapes)]


Grouping = Callable[[list[nn.Parameter]], Any]


class Race:
    """The Triton engine against the reference engine, which runs on the CPU, from the same weights, step by step.

    After each step the Triton engine's weights and state are set to the reference's, in place, so that every step is
    compared by itself.
    """

    def __init__(self, makers: Sequence[Callable[..., Any]], grouping: Grouping = list, **options: Any) -> None:
        self.params = [make(DEVICE) for make in makers]
        self.twins = [make("cpu") for make in makers]
        self.optimizer = optimizer_for(grouping(self.params), **{"execution": "triton", **options})
        self.reference = optimizer_for(grouping(self.twins), **{**options, "execution": "single", "capturable": False})

    @property
    def optimizers(self) -> tuple[Any, Any]:
        return self.optimizer, self.reference

    @property
    def replay(self) -> Any:
        """The launches that the next step will repeat, if nothing has changed; None if they are not kept."""
        return self.optimizer._stepper.replays.get(None)

    def pairs(self) -> Iterator[tuple[Any, nn.Parameter]]:
        """Each optimizer with each of its parameters."""
        yield from ((self.optimizer, param) for param in self.params)
        yield from ((self.reference, param) for param in self.twins)

    def set_grads(self, grads: Sequence[Tensor | None], layout: str = "contiguous") -> None:
        for params, device in ((self.params, DEVICE), (self.twins, torch.device("cpu"))):
            for param, grad in zip(params, grads, strict=True):
                param.grad = None if grad is None else LAYOUTS[layout](grad.to(device, param.dtype))

    def step(self, grads: Sequence[Tensor | None], layout: str = "contiguous", slack: float = 0.0) -> None:
        """One step of both with these gradients, compared."""
        self.set_grads(grads, layout)
        self.optimizer.step()
        self.reference.step()
        self.compare(slack)

    def states(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name and both tensors of every weight and state tensor."""
        for number, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            yield f"{number}.weight", param.data, twin.data  # writing to .data raises no version counter
            state, expected = self.optimizer.state.get(param, {}), self.reference.state.get(twin, {})
            assert state.keys() == expected.keys(), f"{number}: {sorted(state)} instead of {sorted(expected)}"
            for key, value in expected.items():
                yield f"{number}.{key}", state[key], value

    def compare(self, slack: float = 0.0) -> None:
        """Hold weights and state against the reference's, then set them to it. Errors below `slack` do not count.

        Nor does the last bit of FP32 of the tensor's largest element: where terms of that size cancel, a multiplication
        and addition in one instruction leaves another remainder than two instructions.
        On NVIDIA GPUs tanh is good to 2⁻¹¹ where weights are BF16 without a master: that part of a step may be off,
        which can be more than one ulp of a weight near zero, and flips more roundings the larger the step is.
        """
        lr = max(float(group["lr"]) / group["cautious_clamp_min"] for group in self.reference.param_groups)
        states = [self.reference.state.get(twin, {}) for twin in self.twins if twin.dtype == torch.bfloat16]
        coarse = DEVICE.type == "cuda" and any(state.keys().isdisjoint(MASTER_FORMS) for state in states)
        differing = total = 0
        self._compare_split_masters()
        for name, tensor, expected in self.states():
            got = tensor.cpu()
            assert got.dtype == expected.dtype and got.shape == expected.shape, name
            if expected.dtype in SIXTEEN_BIT:
                apart, off = ulps_apart(got, expected), (got.double() - expected.double()).abs()
                last_bit = 2.0**-23 * float(expected.abs().max()) if expected.numel() else 0.0
                apart[off <= max(slack, last_bit)] = 0
                differing, total = differing + int((apart != 0).sum()), total + apart.numel()
                apart[off <= (lr * 2.0**-10 if coarse else 0.0)] = 0
                assert not apart.numel() or apart.max() <= 1, f"{name}: {int(apart.max())} ulp"
            elif expected.dtype == torch.uint8:  # codes a step apart on their grid, and exponents that are bytes too
                apart = (signed_codes(got, name) - signed_codes(expected, name)).abs()
                differing, total = differing + int((apart != 0).sum()), total + apart.numel()
                assert not apart.numel() or apart.max() <= 1, f"{name}: {int(apart.max())} codes"
            elif name.endswith("_scale"):
                assert error(got, expected) <= (1e-3 if coarse else 1e-5), name
            elif expected.is_floating_point():
                assert error(got, expected) <= 1e-6, name
            elif not name.endswith("master_remainder"):
                assert torch.equal(got, expected), name
            tensor.copy_(expected)
        allowed = max(0.01 * total * max(1.0, lr / 1.6e-3), 5) if coarse else 0.01 * total
        assert differing <= allowed, f"{differing} of {total} elements differ"

    def _compare_split_masters(self) -> None:
        """A weight and its remainder by themselves may be far apart where the master is near: the sum counts."""
        for number, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            state, expected = self.optimizer.state.get(param, {}), self.reference.state.get(twin, {})
            if "master_remainder" in expected:
                master = master_of(param.detach().cpu(), {"master_remainder": state["master_remainder"].cpu()})
                assert error(master, master_of(twin, expected)) <= 1e-6, f"{number}.master"


def signed_codes(codes: Tensor, name: str) -> Tensor:
    """8-bit codes in the order of what they stand for; exp_avg's have a sign, and −0 is 0."""
    wide = codes.int()
    return torch.where(wide > 127, 128 - wide, wide) if name.endswith("exp_avg") else wide


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers apart; NaN patterns count as equal, −0 and 0 as neighbours."""
    ordered = [torch.where(bits(t) < 0, -(bits(t).int() & 0x7FFF) - 1, bits(t).int()) for t in (a, b)]
    return torch.where(a.isnan() & b.isnan(), 0, (ordered[0] - ordered[1]).abs())


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest error relative to the tensor's largest finite magnitude; inf if the non-finite elements are not alike."""
    finite = expected.isfinite()
    a, b = (torch.where(finite, t, 0.0).double() for t in (actual, expected))
    if not torch.equal(torch.nan_to_num(actual[~finite]), torch.nan_to_num(expected[~finite])):
        return float("inf")
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return ((a - b).abs().max() / b.abs().max()).item()


def grad_row(makers: Sequence[Callable[..., Any]], step: int, scale: float = 1.0) -> list[Tensor | None]:
    """A gradient for each parameter: a direction common to all steps, and noise."""
    params = [make("cpu") for make in makers]
    return [
        normal(p.shape, 77 + n, 0.7 * scale, p.dtype) + normal(p.shape, 1000 * step + n, 0.7 * scale, p.dtype)
        for n, p in enumerate(params)
    ]
