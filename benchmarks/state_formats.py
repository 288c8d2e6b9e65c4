"""How well 8-bit formats keep the moments: every candidate follows the same gradients beside moments in FP32.

    python benchmarks/state_formats.py --dry-run       about three minutes on two cores; nothing is written
    python benchmarks/state_formats.py --beta2 0.95    another decay of the variance

A byte transformer is trained with LuminaV; each step hands its gradients of the weight matrices to all candidates. What
counts is the direction tanh(m̃/σ): a candidate's error is ‖u − u(FP32)‖ / ‖u(FP32)‖ over the last half of the steps.

Formats: `int8` is linear; `eXmY` has X exponent and Y mantissa bits, with subnormals, after a sign bit for the
momentum. Each block of consecutive elements has a scale: `pow2` a power of two, `exact` an FP32
number. Codes are rounded stochastically, so that what is stored is right in the mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from _rows import append_rows
from torch import Tensor

from luminav import LuminaV
from luminav.cli.demo.data import load_corpus
from luminav.cli.demo.model import ByteTransformer, ModelShape

BETA1, TAU = 0.9, 0.8
Store = Callable[[Tensor], Tensor]
"""What is read back of a tensor [blocks, elements] after it was stored."""


def up(place: Tensor) -> Tensor:
    """1 with probability `place`."""
    return (torch.rand_like(place) < place).to(place.dtype)


def bf16(x: Tensor) -> Tensor:
    """BF16 with stochastic rounding: what the candidates are to come close to."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return x.view(torch.int32).add(noise).bitwise_and(-65536).view(torch.float32)


def floating(exponent_bits: int, mantissa_bits: int) -> Store:
    """2**exponent_bits − 1 binades below a power of two that fits the block's largest value, and an even grid to 0."""
    shift = 23 - mantissa_bits

    def store(x: Tensor) -> Tensor:
        magnitude = x.abs()
        top = (magnitude.amax(1, keepdim=True).view(torch.int32) + (1 << shift) - 1) >> 23
        lowest = (top - (1 << exponent_bits) + 2).clamp_min(mantissa_bits + 1)  # the exponent of the lowest binade
        exponent = torch.maximum(magnitude.view(torch.int32) >> 23, lowest)
        step = ((exponent - mantissa_bits) << 23).view(torch.float32)
        places = magnitude / step
        return ((places.floor() + up(places.frac())) * step).copysign(x)

    return store


def linear(levels: int, *, exact: bool, root: int = 1) -> Store:
    """`levels` equal steps up to the block's largest value, or of its root; `exact` or a power of two as its scale."""

    def store(x: Tensor) -> Tensor:
        magnitude = x.abs()
        largest = magnitude.amax(1, keepdim=True).clamp_min(1e-30) ** (1 / root)
        if not exact:
            largest = torch.exp2(torch.ceil(torch.log2(largest)))
        step = largest / levels
        below = ((magnitude ** (1 / root)) / step).floor().clamp_max(levels - 1)
        low, high = (below * step) ** root, ((below + 1) * step) ** root
        return (low + (high - low) * up(((magnitude - low) / (high - low)).clamp(0, 1))).copysign(x)

    return store


MOMENTUM: dict[str, Store] = {
    "int8-exact": linear(127, exact=True),
    "int8-pow2": linear(127, exact=False),
    "e2m5-pow2": floating(2, 5),
    "e3m4-pow2": floating(3, 4),
    "e4m3-pow2": floating(4, 3),
}
VARIANCE: dict[str, Store] = {
    "int8-exact": linear(255, exact=True),
    "root2-exact": linear(255, exact=True, root=2),
    "root4-exact": linear(255, exact=True, root=4),
    "root4-pow2": linear(255, exact=False, root=4),
    "e3m5-pow2": floating(3, 5),
    "e4m4-pow2": floating(4, 4),
    "e5m3-pow2": floating(5, 3),
}


class Tracker:
    """Moments of one tensor as a candidate keeps them."""

    def __init__(self, shape: torch.Size, keep_m: Store | None, keep_v: Store | None, block: int) -> None:
        self.m, self.v = torch.zeros(shape), torch.zeros(shape)
        self.keep_m, self.keep_v, self.block = keep_m, keep_v, block

    def direction(self, grad: Tensor, step: int, beta2: float) -> Tensor:
        """Take over a gradient; the direction before the gate."""
        self.m.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        ahead = self.m * BETA1 + grad * (1 - BETA1)
        self.v.mul_(beta2).addcmul_(grad - self.m, grad - self.m, value=1 - beta2)
        sigma = self.v.sqrt() * (TAU * (1 - BETA1 ** (step + 1)) / (1 - beta2**step) ** 0.5)
        self.m, self.v = self._kept(self.m, self.keep_m), self._kept(self.v, self.keep_v)
        return torch.tanh(ahead / sigma.clamp_min(1e-12))

    def _kept(self, x: Tensor, store: Store | None) -> Tensor:
        return x if store is None else store(x.reshape(-1, self.block)).view(x.shape)


class SharedVariance(Tracker):
    """The momentum in full, and one variance for each block of elements, or for each row (block 0)."""

    def direction(self, grad: Tensor, step: int, beta2: float) -> Tensor:
        self.m.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        ahead = self.m * BETA1 + grad * (1 - BETA1)
        innovation = ((grad - self.m) ** 2).reshape(-1, self.block or grad.shape[1])
        self.v = self.v.reshape(-1)[: len(innovation)] * beta2 + innovation.mean(1) * (1 - beta2)
        sigma = self.v.sqrt() * (TAU * (1 - BETA1 ** (step + 1)) / (1 - beta2**step) ** 0.5)
        return torch.tanh(ahead.reshape(innovation.shape) / sigma[:, None].clamp_min(1e-12)).reshape(grad.shape)


class TileVariance(Tracker):
    """The momentum in full, and a variance of rank 1 in every tile of so many rows and columns, kept as its means."""

    def __init__(self, shape: torch.Size, keep: Store | None, side: int) -> None:
        super().__init__(shape, None, keep, side)
        self.rows, self.columns = torch.zeros(shape[0], shape[1] // side), torch.zeros(shape[0] // side, shape[1])

    def direction(self, grad: Tensor, step: int, beta2: float) -> Tensor:
        self.m.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        ahead = self.m * BETA1 + grad * (1 - BETA1)
        side = self.block
        tiles = ((grad - self.m) ** 2).view(-1, side, grad.shape[1] // side, side)
        self.rows = self.rows * beta2 + tiles.mean(3).view(self.rows.shape) * (1 - beta2)
        self.columns = self.columns * beta2 + tiles.mean(1).view(self.columns.shape) * (1 - beta2)
        r, c = self.rows.view(tiles.shape[:3]), self.columns.view(len(tiles), 1, -1, side)
        v = r.unsqueeze(3) * c / r.mean(1, keepdim=True).unsqueeze(3).clamp_min(1e-36)
        sigma = v.view(grad.shape).sqrt() * (TAU * (1 - BETA1 ** (step + 1)) / (1 - beta2**step) ** 0.5)
        self.rows, self.columns = self._kept(self.rows, self.keep_v), self._kept(self.columns, self.keep_v)
        return torch.tanh(ahead / sigma.clamp_min(1e-12))

    def _kept(self, x: Tensor, store: Store | None) -> Tensor:
        return x if store is None else store(x)


def candidates(shape: torch.Size) -> Iterator[tuple[str, Tracker]]:
    """Name and tracker of every candidate for a tensor of this shape."""
    yield "both/bf16", Tracker(shape, bf16, bf16, 64)
    for block in (32, 64, 128):
        for name, store in MOMENTUM.items():
            yield f"exp_avg/{name}/block={block}", Tracker(shape, store, None, block)
        for name, store in VARIANCE.items():
            yield f"exp_avg_sq/{name}/block={block}", Tracker(shape, None, store, block)
        yield f"both/e2m5+e4m4/block={block}", Tracker(shape, floating(2, 5), floating(4, 4), block)
        yield f"both/e3m4+e4m4/block={block}", Tracker(shape, floating(3, 4), floating(4, 4), block)
        yield f"both/int8+e4m4/block={block}", Tracker(shape, linear(127, exact=False), floating(4, 4), block)
        yield f"shared/block={block}", SharedVariance(shape, None, None, block)
    yield "shared/row", SharedVariance(shape, None, None, 0)
    for side in (32, 64, 128):
        yield f"tile/side={side}", TileVariance(shape, None, side)
        yield f"tile/bf16/side={side}", TileVariance(shape, bf16, side)


def measure(steps: int, beta2: float) -> dict[str, float]:
    """Relative error of the direction for every candidate."""
    corpus = load_corpus(None, 128)
    model = ByteTransformer(ModelShape(width=128, layers=4, heads=4, context=128), seed=0)
    optimizer = LuminaV(model.parameters(), lr=4e-3, betas=(BETA1, beta2), cautious=False)
    torch.manual_seed(0)
    followed = [param for name, param in model.named_parameters() if param.ndim == 2][1:8:3]
    trackers = [(Tracker(p.shape, None, None, 1), dict(candidates(p.shape))) for p in followed]
    errors: dict[str, float] = dict.fromkeys(trackers[0][1], 0.0)
    squares = 0.0
    for step in range(1, steps + 1):
        model.loss(corpus.batch(0, step, 8)).backward()
        for param, (reference, others) in zip(followed, trackers, strict=True):
            assert param.grad is not None
            grad = param.grad.float()
            u = reference.direction(grad, step, beta2)
            squares += float(u.square().sum()) if step > steps // 2 else 0.0
            for name, tracker in others.items():
                error = tracker.direction(grad, step, beta2).sub_(u).square_().sum()
                errors[name] += float(error) if step > steps // 2 else 0.0
        optimizer.step()
        optimizer.zero_grad()
    return {name: (error / squares) ** 0.5 for name, error in errors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.steps, arguments.beta2)
    for name, error in sorted(found.items(), key=lambda item: (item[0].split("/")[0], item[1])):
        print(f"{name:36} {error:.4f}")
    if not arguments.dry_run:
        case = f"state_formats/beta2={arguments.beta2:g}"
        append_rows([(f"{case}/{name}", error, "relative error of u") for name, error in found.items()], "cpu")


if __name__ == "__main__":
    main()
