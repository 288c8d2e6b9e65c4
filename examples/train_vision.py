"""Train a vision model with its weights in BF16 and no FP32 copy, on pictures that are drawn as it goes.

    python examples/train_vision.py                                   # a small residual network: a minute on a CPU
    python examples/train_vision.py --timm resnet10t                  # any model of timm that takes small pictures
    python examples/train_vision.py --resume                          # on from the latest checkpoint

Each picture shows one of six figures somewhere, under noise. A step's pictures depend on its number alone, so a resumed
run ends with the bits of one that was never interrupted.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from luminav import LuminaV, param_groups

FIGURES = ("disc", "ring", "square", "frame", "plus", "stripes")
SIZE = 32
SEED = 1337
VALIDATION = -1  # a "step" whose pictures are never trained on


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", metavar="NAME", help="train this model of timm instead of the small network")
    parser.add_argument("--steps", type=int, default=150, help="steps in all, those before a resume included")
    parser.add_argument("--stop", type=int, metavar="STEP", help="save after this step and stop, to be resumed later")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/vision.pt"), help="file to save to")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    return parser.parse_args()


def pictures(step: int, number: int) -> tuple[Tensor, Tensor]:
    """Pictures (number, 3, SIZE, SIZE) and their figures (number), a function of the step."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    labels = torch.randint(len(FIGURES), (number,), generator=generator)
    radius, left, top = torch.rand(3, number, 1, 1, generator=generator)
    radius = 5 + 5 * radius
    x = torch.arange(SIZE) - (10 + 12 * left)
    y = torch.arange(SIZE)[:, None] - (10 + 12 * top)
    round_, square = (x**2 + y**2).sqrt() / radius, torch.maximum(x.abs(), y.abs()) / radius
    cross = torch.minimum(x.abs(), y.abs()) / radius
    figures = torch.stack([
        round_ < 1, (round_ < 1) & (round_ > 0.6), square < 1, (square < 1) & (square > 0.6),
        (square < 1) & (cross < 0.25), (square < 1) & ((y + SIZE) % 4 < 2),
    ])  # fmt: skip
    drawn = figures[labels, torch.arange(number)].float()[:, None]
    colours = 0.5 + torch.rand(number, 3, 1, 1, generator=generator)
    return drawn * colours + 0.5 * torch.randn(number, 3, SIZE, SIZE, generator=generator), labels


class Block(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def build(name: str | None) -> nn.Module:
    if name:
        import timm

        return timm.create_model(name, num_classes=len(FIGURES))
    stages = [[Block(width), nn.Conv2d(width, 2 * width, 2, stride=2)] for width in (16, 32)]
    layers = [layer for stage in stages for layer in stage]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(FIGURES))
    )


@torch.no_grad()
def accuracy(model: nn.Module, device: torch.device) -> float:
    model.eval()
    images, labels = pictures(VALIDATION, 512)
    found = torch.cat([model(part.to(device, torch.bfloat16)).argmax(1).cpu() for part in images.split(64)])
    model.train()
    return (found == labels).float().mean().item()


def main() -> None:
    options = parsed()
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(options.timm).to(device, torch.bfloat16, memory_format=torch.channels_last)
    optimizer = LuminaV(param_groups(model, weight_decay=0.08), lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if options.resume:
        saved = torch.load(options.checkpoint, weights_only=True, map_location=device)
        first = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}, from step {first}", flush=True)
    end = options.stop or options.steps
    for step in range(first, end):
        images, labels = pictures(step, options.batch_size)
        logits = model(images.to(device, torch.bfloat16, memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(logits.float(), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    print(f"accuracy on new pictures: {accuracy(model, device):.1%}", flush=True)
    options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"step": max(first, end), **{name: part.state_dict() for name, part in parts.items()}}, options.checkpoint
    )


if __name__ == "__main__":
    main()
