"""The pictures of docs/images/*.svg, drawn from the package's own functions.

    python tools/site/pictures.py               # writes docs/images
    python tools/site/pictures.py --output DIR  # elsewhere: a test compares

What is plotted is what the code computes: change the rule, and its picture changes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from svg import BLUE, GREEN, ORANGE, RED, WIDTH, Axes, Picture

import luminav
from luminav import rule
from luminav.hyperparameters import Options
from luminav.rounding import element_noise, nearest, noise_key, remainder_of, stochastic_round

IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images"
DEFAULTS = Options.from_group({})


def rounding() -> Picture:
    """The variance after a burst of gradients, kept in three ways."""
    steps, beta2, numel = 3000, 0.999, 256
    index = torch.arange(numel, dtype=torch.int32)
    exact, nearest = 1.0, torch.ones((), dtype=torch.bfloat16)
    stochastic = torch.ones(numel, dtype=torch.bfloat16)
    lines: dict[str, list[tuple[float, float]]] = {"exact": [], "nearest": [], "one": [], "mean": []}
    for step in range(steps + 1):
        if step % 25 == 0:
            lines["exact"].append((step, exact))
            lines["nearest"].append((step, nearest.item()))
            lines["one"].append((step, stochastic[0].item()))
            lines["mean"].append((step, stochastic.double().mean().item()))
        exact *= beta2
        nearest = (nearest.float() * beta2).to(torch.bfloat16)
        noise = element_noise(noise_key(1337, step + 1, 0), index)
        stochastic = stochastic_round(stochastic.float() * beta2, torch.bfloat16, noise.exp_avg_sq)
    picture = Picture("A variance that should decay, in BF16: to nearest it stands still", 270)
    axes = Axes(picture, (0, steps), (0, 1.1))
    ticks = {0.0: "0", 0.5: "0.5", 1.0: "1"}
    axes.frame({0: "0", 1000: "1000", 2000: "2000", 3000: "3000"}, ticks, "steps without gradient", "v")
    axes.curve(lines["nearest"], RED)
    axes.curve(lines["one"], BLUE, width=1)
    axes.curve(lines["mean"], BLUE, width=2.5)
    axes.curve(lines["exact"], "currentColor", dashed=True, width=1.2)
    picture.text(*axes.place(1450, 1.02), "BF16, to nearest", color=RED, bold=True)
    picture.text(*axes.place(880, 0.55), "BF16, stochastic: mean and one element", color=BLUE, bold=True)
    picture.text(*axes.place(2950, 0.3), "exact: 0.999 to the power of steps", anchor="end")
    return picture


def gate() -> Picture:
    """Coordinates before and after the gate."""
    generator = torch.Generator().manual_seed(5)
    numel = 20
    grad, exp_avg = (torch.randn(numel, generator=generator) for _ in range(2))
    exp_avg = 0.6 * grad + 0.8 * exp_avg
    numbers = rule.step_numbers(50, DEFAULTS.lr, DEFAULTS, torch.float32, 1.0)
    before = (grad, exp_avg, torch.full((numel,), 0.8))
    ungated = Options.from_group({"cautious": False})
    largest = torch.finfo(torch.float32).max
    u = rule.direction_(*(t.clone() for t in before), numbers, ungated, largest=largest).kept_direction
    found = rule.direction_(*(t.clone() for t in before), numbers, DEFAULTS, largest=largest)
    assert found.keep is not None
    kept, count = found.keep, torch.tensor([float(numel)], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    c = rule.cautious_scale(rule.Sums(kept.sum(dtype=torch.float64)[None], zero, zero, count, zero), DEFAULTS).item()
    d = c * found.kept_direction
    picture = Picture("The gate drops coordinates that disagree with the gradient and stretches the others", 290)
    reach = 1.15 * max(u.abs().max().item(), d.abs().max().item())
    for number, (values, title) in enumerate(
        ((u, "u, the direction: orange points against the gradient"), (d, f"d = c·keep·u with c = 1/density = {c:.2f}"))
    ):
        axes = Axes(picture, (0, numel), (-reach, reach), top=26 + 140 * number, bottom=136 + 140 * number, left=12)
        picture.text(12, axes.top - 8, title)
        for place, value in enumerate(values.tolist()):
            x, y = axes.place(place + 0.15, max(value, 0.0))
            right, low = axes.place(place + 0.85, min(value, 0.0))
            picture.rect(x, y, right - x, low - y, BLUE if kept[place] else ORANGE)
            if not kept[place] and number:
                picture.text((x + right) / 2, axes.place(0, 0)[1] + 4, "×", anchor="middle", color=ORANGE)
        picture.line(axes.left, axes.place(0, 0)[1], axes.right, axes.place(0, 0)[1], opacity=0.5)
    return picture


def bound() -> Picture:
    """Length of a tensor's step against the length that lr asks for, both as a share of the radius."""
    wanted = [0.03 * number for number in range(101)]
    sums = rule.Sums(*(torch.zeros(1, dtype=torch.float64) for _ in range(rule.NUM_SUMS)))
    radius = DEFAULTS.bound_ratio * 10.0
    points = []
    for r in wanted:
        lr = 1e-3
        own = sums._replace(
            param_sq=torch.tensor([100.0], dtype=torch.float64),
            direction_sq=torch.tensor([(r * radius / lr) ** 2], dtype=torch.float64),
        )
        points.append((r, r * rule.bound_scale(own, torch.ones(1), lr, DEFAULTS).item()))
    picture = Picture("The radial bound: short steps pass, long ones are held below the radius", 260)
    axes = Axes(picture, (0, 3), (0, 1.6))
    axes.frame(
        {0: "0", 1: "1", 2: "2", 3: "3"}, {0.0: "0", 0.5: "0.5", 1.0: "1", 1.5: "1.5"},
        "length that lr asks for ÷ R", "length of the step ÷ R",
    )  # fmt: skip
    axes.curve([(0, 0), (1.6, 1.6)], "currentColor", dashed=True, width=1.2)
    axes.curve([(0, 1), (3, 1)], ORANGE, dashed=True, width=1.2)
    axes.curve(points, BLUE, width=2.5)
    picture.text(*axes.place(0.72, 1.35), "bound=False", anchor="end")
    picture.text(*axes.place(2.95, 1.06), "R = 3 % of the tensor's norm", anchor="end", color=ORANGE, bold=True)
    picture.text(*axes.place(1.35, 0.66), 'bound_type="radial"', color=BLUE, bold=True)
    return picture


def one_pass() -> Picture:
    """The gate's scale in a training run: what each step would have, and what one-pass mode applies."""
    torch.manual_seed(0)
    steps, numel = 120, 4096
    target = torch.randn(numel)
    weight = torch.nn.Parameter(torch.zeros(numel))
    optimizer = luminav.LuminaV([weight], lr=2e-2, fused_single_pass=True, seed=1)
    kappa = DEFAULTS.ema_decay
    applied, now = [], []
    for step in range(1, steps + 1):
        weight.grad = weight.detach() - target + torch.randn(numel) * (1 + math.sin(step / 6))
        kept = optimizer.state[weight]["cautious_scale"].item() if step > 1 else None
        optimizer.step()
        after = optimizer.state[weight]["cautious_scale"].item()
        applied.append((step, after if kept is None else kept))
        now.append((step, after if kept is None else (after - kappa * kept) / (1 - kappa)))
    values = [value for _, value in applied + now]
    low, high = min(values), max(values)
    picture = Picture("One-pass mode applies a running average of the gate's scale", 250)
    axes = Axes(picture, (1, steps), (low - 0.1 * (high - low), high + 0.25 * (high - low)), left=44)
    ticks = {round(low + share * (high - low), 2): f"{low + share * (high - low):.2f}" for share in (0.0, 0.5, 1.0)}
    axes.frame({1: "1", 40: "40", 80: "80", 120: "120"}, ticks, "step", "c")
    axes.curve(now, ORANGE, width=1.3)
    axes.curve(applied, BLUE, width=2.5)
    picture.text(axes.right, axes.top + 2, "c of this step's own sums", anchor="end", color=ORANGE, bold=True)
    picture.text(axes.right, axes.top + 17, "c that is applied", anchor="end", color=BLUE, bold=True)
    return picture


def memory() -> Picture:
    """Bytes per parameter of weights, gradients and state, from the planner."""
    with torch.device("meta"):
        model = torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    plan = luminav.plan(model, device="meta")
    modes = {
        "none, block variance, 8-bit": "smallest", "none, buffer=1": "buffer=1", "none, 8-bit": "8-bit",
        "none": "none", "semi": "semi", "full": "full", "torch AdamW, FP32": "AdamW, FP32",
    }  # fmt: skip
    rows = {row.mode: row for row in plan.rows}
    picture = Picture("Bytes per parameter of weights, gradient and state", 32 + 38 * len(modes) + 26)
    colors = {"weights": BLUE, "gradient": "#8b949e", "state": ORANGE}
    left, scale = 104, (WIDTH - 104 - 36) / 16
    for number, (mode, name) in enumerate(modes.items()):
        row, y, x = rows[mode], 12 + 38 * number, float(left)
        picture.text(left - 8, y + 18, name, anchor="end")
        for part, size in zip(colors, (row.weights, row.gradients, row.state)):
            each = size / plan.num_params
            width = each * scale
            picture.rect(x, y, width - 1, 26, colors[part], opacity=0.85)
            picture.text(x + width / 2, y + 18, f"{each:.2g}", anchor="middle", color="#fff", bold=True)
            x += width
        total = (row.weights + row.gradients + row.state) / plan.num_params
        picture.text(x + 5, y + 18, f"{total:.3g}", bold=True)
    x = float(left)
    for part, color in colors.items():
        picture.rect(x, picture.height - 24, 12, 12, color, opacity=0.85)
        picture.text(x + 17, picture.height - 14, part)
        x += 95
    return picture


def distributed() -> Picture:
    """Three ranks, one message."""
    picture = Picture("Every rank sends its sums in one message, and all work out the same scales", 262)
    for number in range(3):
        x = 10 + 158 * number
        picture.box(x, 10, 144, [f"rank {number}", "its part of a tensor", "sums: 48 B a tensor"], BLUE)
        picture.arrow(x + 72, 72, x + 72, 98)
        picture.arrow(x + 72, 150, x + 72, 176)
        picture.box(x, 180, 144, ["the same c and s", "update of its part,", "noise by global index"], GREEN)
    picture.box(10, 102, WIDTH - 20, ["one all-gather, added up in shard order", "(two with buffer=1)"], ORANGE)
    return picture


def checkpoints() -> Picture:
    """The bits of a master weight, whole and split."""
    master = torch.tensor([0.1234567])
    weight = nearest(master, torch.bfloat16).to(torch.bfloat16)
    remainder = remainder_of(master, weight)
    patterns = {
        "FP32 master": (f"{master.view(torch.int32).item() & 0xFFFFFFFF:032b}", BLUE),
        "BF16 weight": (f"{weight.view(torch.int16).item() & 0xFFFF:016b}", GREEN),
        "remainder": (f"{remainder.item() & 0xFFFF:016b}", ORANGE),
    }
    picture = Picture("An FP32 master is the BF16 weight and 16 bits more", 190)
    cell = (WIDTH - 20) / 32
    places = {"FP32 master": (10, 34), "BF16 weight": (10, 112), "remainder": (10 + 16 * cell, 112)}
    values = {"FP32 master": master.item(), "BF16 weight": weight.item(), "remainder": remainder.item()}
    for name, (bits, color) in patterns.items():
        x, y = places[name]
        picture.text(x + 2, y - 8, f"{name} = {values[name]:.9g}", bold=True)
        for number, bit in enumerate(bits):
            picture.rect(x + number * cell, y, cell - 1.5, 24, color, opacity=0.25 if bit == "0" else 0.6)
            picture.text(x + (number + 0.5) * cell - 0.75, y + 16, bit, anchor="middle", size=11)
    picture.arrow(WIDTH / 4, 62, WIDTH / 4, 84)
    picture.arrow(3 * WIDTH / 4, 62, 3 * WIDTH / 4, 84)
    picture.text(10, 166, "weight = (master + 0x8000) >> 16,  remainder = master − (weight << 16)", size=11)
    picture.text(10, 182, "2 + 2 bytes instead of 2 + 4, and no bit is lost", size=11, faint=True)
    return picture


def engines() -> Picture:
    """The order of the three verbs in each mode."""
    modes = {
        "exact": (("measure", BLUE), ("scales", ORANGE), ("update", GREEN)),
        "one-pass": (("update", GREEN), ("blend scales", ORANGE)),
        "buffer=1": (("measure m̃²", BLUE), ("measure", BLUE), ("scales", ORANGE), ("update", GREEN)),
    }
    picture = Picture("Measure, scales, update: the order in each mode", 34 + 66 * len(modes))
    for number, (mode, verbs) in enumerate(modes.items()):
        y = 22 + 66 * number
        picture.text(10, y - 6, mode)
        for place, (verb, color) in enumerate(verbs):
            x = 10 + 119 * place
            picture.box(x, y, 102, [verb], color)
            if place:
                picture.arrow(x - 16, y + 15, x - 2, y + 15)
    picture.rect(10, picture.height - 25, 12, 12, BLUE, opacity=0.4)
    picture.text(27, picture.height - 15, "reads memory")
    picture.rect(140, picture.height - 25, 12, 12, GREEN, opacity=0.4)
    picture.text(157, picture.height - 15, "reads and writes memory")
    return picture


PICTURES: tuple[Callable[[], Picture], ...] = (
    rounding, gate, bound, one_pass, memory, distributed, checkpoints, engines,
)  # fmt: skip


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder for the pictures")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    for draw in PICTURES:
        (output / f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
