"""The models whose steps are measured, as shapes: ``shapes.json`` lists every parameter in the model's own order.

``qwen4b`` is the text model of Qwen3.5 4B (4.206 B parameters in 426 tensors), ``gpt2`` is GPT-2 small (124 M in 148).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

Shape = tuple[int, ...]

WEIGHT_STD = 0.02
GRAD_STD = 1e-3


def shapes_of(model: str, shrink: int = 1) -> list[Shape]:
    """Return the model's shapes.

    Args:
        model: A key of ``shapes.json``.
        shrink: Every size is divided by this, for a trial run.
    """
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return [tuple(max(1, size // shrink) for size in shape) for shape in table[model]]


def num_params(shapes: Sequence[Shape]) -> int:
    """Return the number of elements in all tensors."""
    return sum(math.prod(shape) for shape in shapes)


def make_params(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    """Return weights N(0, 0.02²) with gradients N(0, 0.001²): zeros would be faster than real numbers are."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        weight = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, WEIGHT_STD, generator=generator)
        param = torch.nn.Parameter(weight)
        param.grad = torch.empty_like(weight).normal_(0.0, GRAD_STD, generator=generator)
        params.append(param)
    return params
