"""The decoder of the convergence benchmark: RMSNorm, RoPE, QK-norm, SwiGLU, an untied head; torch SDPA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 10_000.0
INITIAL_STD = 0.02
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Size:
    """A model and its batch. The vocabulary comes on top."""

    width: int
    layers: int
    heads: int
    hidden: int
    context: int
    batch: int
    vocabulary: int
    """Of the tokenizer; 0 for bytes."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.context * self.batch


SIZES = {
    "tiny": Size(width=64, layers=2, heads=2, hidden=176, context=64, batch=8, vocabulary=0),
    "40m": Size(width=512, layers=8, heads=8, hidden=1408, context=512, batch=64, vocabulary=16_384),
    "120m": Size(width=768, layers=12, heads=12, hidden=2304, context=512, batch=64, vocabulary=16_384),
}


class RMSNorm(nn.Module):
    """Root mean square normalisation of the last dimension, in FP32 whatever the dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (wide * self.weight.float()).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels by their position's angle; x is (batch, heads, context, channels)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.query_norm = RMSNorm(size.width // size.heads)
        self.key_norm = RMSNorm(size.width // size.heads)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = RMSNorm(size.width)
        self.gate_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.mlp_out = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query = _rotate(self.query_norm(query), cos, sin)
        key = _rotate(self.key_norm(key), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * up)


class Tail(nn.Module):
    """The last norm, the head and the mean cross-entropy."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Decoder(nn.Module):
    """The whole model. Call it with inputs and targets, both (batch, context), for the loss in nats."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size, vocabulary: int, *, compiled: bool = False) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.tail = Tail(size, vocabulary)
        channels = size.width // size.heads
        frequency = ROPE_BASE ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
        angle = torch.outer(torch.arange(size.context, dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self._block: Callable[..., Tensor] = _compiled(_run_block) if compiled else _run_block
        self._tail: Callable[..., Tensor] = _compiled(_run_tail) if compiled else _run_tail

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = self._block(block, x, self.cos, self.sin)
        return self._tail(self.tail, x, targets)

    def to_dtype(self, dtype: torch.dtype) -> Decoder:
        """Cast the weights; the angles' cosines stay FP32."""
        for param in self.parameters():
            param.data = param.data.to(dtype)
        return self


def _run_block(block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return block(x, cos, sin)


def _run_tail(tail: Tail, x: Tensor, targets: Tensor) -> Tensor:
    return tail(x, targets)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function of a block, not the model: all blocks, and every later model like it, run the same code."""
    import torch._dynamo.config as dynamo

    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, limit, 64)  # dtypes and sizes are variants of the same two functions
    compiled: Callable[..., Tensor] = torch.compile(function, dynamic=False)
    return compiled


def initial_weights(size: Size, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """FP32 weights that depend on `seed` alone: normal, the maps into the residual stream smaller by √(2·layers)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in Decoder(size, vocabulary).named_parameters()}
    weights = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            weights[name] = torch.ones(shape)
            continue
        std = INITIAL_STD / (2 * size.layers) ** 0.5 if name.endswith("_out.weight") else INITIAL_STD
        weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def kind_of(name: str, param: Tensor) -> str:
    """ "embedding", "head", "norm" or "matrix"."""
    if param.ndim < 2:
        return "norm"
    if name.startswith("embedding."):
        return "embedding"
    return "head" if ".head." in name else "matrix"
