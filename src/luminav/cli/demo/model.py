"""The demo's model: a small causal transformer over bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class ModelShape:
    """The model's size: width and heads of each of `layers` blocks, and the longest context in bytes."""

    width: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 x heads (rotary positions turn pairs of channels), "
                f"got width {self.width} with {self.heads} heads."
            )


class Linear(nn.Linear):
    """A linear map without bias whose weight follows the activations' dtype.

    Where the activations have the weight's own dtype, which is the rule, the cast does nothing. A CPU without fast BF16
    products runs the same BF16 weights under FP32 activations instead; the gradient is rounded to the weight's dtype.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map the last dimension of `input`."""
        return F.linear(input, self.weight.to(input.dtype))


class RMSNorm(nn.RMSNorm):
    """RMS normalisation of the last dimension, with a gain that follows the activations' dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.query_norm = RMSNorm(shape.width // shape.heads)
        self.key_norm = RMSNorm(shape.width // shape.heads)
        self.out = Linear(shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over `x`, (batch, time, width)."""
        batch, time, width = x.shape
        query, key, value = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query = rotate(self.query_norm(query), cos, sin)
        key = rotate(self.key_norm(key), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention, then a GELU network four times as wide, each on the normalised residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.hidden_norm = RMSNorm(shape.width)
        self.up = Linear(shape.width, 4 * shape.width)
        self.down = Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after the block."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.down(F.gelu(self.up(self.hidden_norm(x)), approximate="tanh"))


class ByteTransformer(nn.Module):
    """A causal transformer that predicts the next byte.

    Args:
        shape: The model's size.
        seed: Key of the initial values, drawn in FP32 on the CPU from a generator of their own.
    """

    def __init__(self, shape: ModelShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = torch.float32
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = Linear(shape.width, VOCABULARY)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Fan-in scaled normal values; the layers that write into the residual stream share one unit of variance."""
        for name, param in self.named_parameters():
            if param.ndim == 1:
                continue  # gains of the norms start at 1
            std = param.shape[-1] ** -0.5
            if name.endswith(("out.weight", "down.weight")):
                std /= math.sqrt(2 * self.shape.layers)
            with torch.no_grad():
                param.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte after each of `tokens`, (batch, time, 256) in FP32."""
        # The lookup in FP32: a space occurs hundreds of times in a batch, and its gradient must not be summed in BF16.
        x = F.embedding(tokens, self.embedding.weight.float()).to(self.compute_dtype)
        cos, sin = rotary_angles(tokens.shape[1], self.shape.width // self.shape.heads, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting each window's bytes, (batch, time + 1) int64."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def rotary_angles(time: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (time, head_width / 2), of the rotary position angles in the dtype of `like`."""
    frequency = ROPE_BASE ** -(torch.arange(0, head_width, 2, device=like.device) / head_width)
    angle = torch.arange(time, device=like.device)[:, None] * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + half) of `x`, (..., time, head_width), by the rotary angles."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def native_compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the activations: the weights' own where the device is fast at it, else FP32.

    Without the processor's help a BF16 product is several times slower than FP32.
    """
    if device.type != "cpu" or dtype is torch.float32:
        return dtype
    if dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return dtype
    return torch.float32


def sample(
    model: ByteTransformer,
    prompt: bytes,
    length: int,
    *,
    temperature: float,
    seed: int,
    check: Callable[[], None],
) -> bytes:
    """Return `length` bytes that the model writes after `prompt`, drawn from a generator of their own.

    `check` is called before each byte and may raise to leave.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.head.weight.device
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            check()
            context = torch.tensor([text[-model.shape.context :]], device=device)
            odds = (model(context)[0, -1].cpu() / temperature).softmax(-1)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(text[len(prompt) :])
