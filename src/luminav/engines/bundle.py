"""Cache-sized pieces of tensors, and bundles of pieces that are worked on as one flat buffer.

Temporaries live in the arithmetic dtype, so a whole large tensor would need several times its own size in scratch
memory. A :class:`Bundle` holds at most :func:`piece_limit` elements: a piece of one large tensor, or many small
tensors side by side. Pieces follow the shape, never the strides: each covers consecutive row-major indices, so every
layout draws the same noise and adds its sums in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

from luminav.blocks import BLOCK, PANEL_ROWS
from luminav.engines.batch import TensorStep
from luminav.rounding import Noise, NoiseKey, Word, element_noise, element_words, stream_of
from luminav.rule import Panels, Scalar

Index: TypeAlias = tuple[int | slice, ...]
Select: TypeAlias = Callable[[TensorStep], Tensor | None]
"""Which tensor of a step is meant."""

CPU_PIECE = 1 << 18  # 1 MiB per FP32 temporary: a dozen of them stay in the last-level cache
DEVICE_PIECE = 1 << 22  # large enough to fill an accelerator, 16 MiB per FP32 temporary
SUM_ROW = 512
HEAP_BLOCK = (32 << 20) - (64 << 10)  # just below the largest mapping that glibc learns from (mallopt(3))
LOW_WORD = 1 << 32  # the noise index is split into 32-bit words at multiples of this


def piece_limit(device: torch.device) -> int:
    """The most elements worked on at once."""
    return CPU_PIECE if device.type == "cpu" else DEVICE_PIECE


class Workspace:
    """Memory that the bundles of a batch take turns in. New tensors for each would be cold, if not new pages."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel, self._device = numel, device
        self._buffers: dict[object, Tensor] = {}
        keep_heap()

    def take(self, key: object, numel: int, dtype: torch.dtype) -> Tensor:
        """The first `numel` elements of the buffer of this name, uninitialised at first."""
        buffer = self._buffers.get(key)
        if buffer is None:
            self._buffers[key] = buffer = torch.empty(self._numel, dtype=dtype, device=self._device)
        return buffer[:numel]

    @functools.cached_property
    def ramp(self) -> Tensor:
        """0, 1, 2, … int32; never written to."""
        return torch.arange(self._numel, dtype=torch.int32, device=self._device)


@functools.cache
def keep_heap() -> None:
    """Have glibc keep the memory of freed temporaries; elsewhere it does nothing.

    glibc returns the free top of its heap to the system as soon as it is twice the largest mapping freed so far, at
    first 256 KiB, so that pieces would get their temporaries as new pages. After one large block has come and gone,
    never touched, it keeps up to 64 MiB.
    """
    torch.empty(HEAP_BLOCK, dtype=torch.uint8)


class Per(Enum):
    """What a tensor has one number for."""

    ELEMENT = "element"
    BLOCK = "block"
    COLUMN = "column of a panel"


@dataclass(frozen=True)
class Piece:
    """Part of tensor number `tensor` of a batch: `numel` row-major consecutive elements from `start` on."""

    tensor: int
    index: Index
    start: int
    numel: int

    def span(self, per: Per, row: int) -> slice:
        """Where a contiguous tensor with one number for each of something has those of this piece.

        Args:
            per: What it has one for.
            row: Length of the parameter's rows.
        """
        stop = self.start + self.numel
        if per is Per.COLUMN:
            return slice(self.start // (PANEL_ROWS * row) * row, -(-stop // (PANEL_ROWS * row)) * row)
        return slice(self.start // BLOCK, stop // BLOCK) if per is Per.BLOCK else slice(self.start, stop)


def cut(tensor: int, shape: Sequence[int], limit: int, unit: int = 1) -> Iterator[Piece]:
    """Cut a tensor of this shape into pieces of at most `limit` elements, in row-major order. None if it is empty.

    Args:
        tensor: Its number.
        shape: Its shape.
        limit: The most elements in a piece; more only where a shape has no cut at a multiple of `unit` below it.
        unit: What pieces begin and end at multiples of: what rows consist of, or a number of whole rows.
    """
    numel = 1
    for size in shape:
        numel *= size
    if numel:
        yield from _cut(tensor, (), 0, tuple(shape), numel, limit, unit)


def _cut(
    tensor: int, prefix: Index, start: int, shape: tuple[int, ...], numel: int, limit: int, unit: int
) -> Iterator[Piece]:
    if numel <= limit:
        yield Piece(tensor, prefix or (...,), start, numel)  # type: ignore[arg-type]
        return
    row = numel // shape[0]
    if row <= limit or row % unit:
        together = unit // math.gcd(unit, row)
        rows = max(limit // row // together, 1) * together
        for first in range(0, shape[0], rows):
            last = min(first + rows, shape[0])
            yield Piece(tensor, (*prefix, slice(first, last)), start + first * row, (last - first) * row)
        return
    for i in range(shape[0]):
        yield from _cut(tensor, (*prefix, i), start + i * row, shape[1:], row, limit, unit)


class Bundle:
    """Pieces of some tensors of one batch, seen as one flat buffer."""

    def __init__(self, steps: Sequence[TensorStep], pieces: Sequence[Piece], workspace: Workspace) -> None:
        """A bundle of `pieces` of the batch's `steps`; the workspace must hold as many elements as the pieces have."""
        self.pieces = pieces
        self.sizes = [piece.numel for piece in pieces]
        self.device = steps[0].param.device
        self._workspace = workspace
        self._steps = [steps[piece.tensor] for piece in pieces]

    @functools.cached_property
    def panels(self) -> list[Panels]:
        """The panels of the pieces: runs of whole ones, and last ones that have fewer rows."""
        found = []
        for step, size in zip(self._steps, self.sizes, strict=True):
            whole, rest = divmod(size // step.row_length, PANEL_ROWS)
            runs = ((whole, PANEL_ROWS), (1, rest))
            found += [Panels(n, rows, step.row_length // BLOCK, BLOCK) for n, rows in runs if n and rows]
        return found

    def views(self, of: Select, per: Per = Per.ELEMENT) -> list[Tensor]:
        """The pieces of one kind of tensor, as views of it."""
        pairs = [(present(of(step)), piece) for step, piece in zip(self._steps, self.pieces, strict=True)]
        if per is Per.ELEMENT:
            return [tensor[piece.index] for tensor, piece in pairs]
        spans = [piece.span(per, step.row_length) for step, piece in zip(self._steps, self.pieces, strict=True)]
        return [tensor.view(-1)[span] for (tensor, _), span in zip(pairs, spans, strict=True)]

    def load(self, of: Select, dtype: torch.dtype, per: Per = Per.ELEMENT) -> Tensor:
        """The pieces as one flat tensor of `dtype`; it may alias the original, so it is never written to."""
        flat = [view.reshape(-1) for view in self.views(of, per)]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).to(dtype)

    def copy(self, of: Select, dtype: torch.dtype, per: Per = Per.ELEMENT) -> Tensor:
        """The pieces as one flat tensor of `dtype`, to be overwritten: a buffer that the next bundle gets as well."""
        views = self.views(of, per)
        if per is not Per.ELEMENT:
            return torch.cat([view.reshape(-1) for view in views]).to(dtype)
        flat = self._workspace.take(of, sum(self.sizes), dtype)
        if len(views) == 1:
            flat.view(views[0].shape).copy_(views[0])
            return flat
        torch._foreach_copy_(self._shaped_as(views, flat), views)
        return flat

    def store(self, of: Select, flat: Tensor, unless: Tensor | None = None, per: Per = Per.ELEMENT) -> None:
        """Write a flat tensor back into the pieces, converting to their dtype; nothing where `unless` is True."""
        views = self.views(of, per)
        values = self._shaped_as(views, flat)
        if unless is not None:
            values = [
                torch.where(unless, view, value.to(view.dtype)) for view, value in zip(views, values, strict=True)
            ]
        torch._foreach_copy_(views, values)

    def known_finite(self, flat: Tensor) -> bool:
        """Whether all elements are known to be finite, without waiting for a device: on the CPU a sum tells it.

        The sum costs a tenth of a count, and saves the passes that treat non-finite elements.
        """
        return flat.device.type == "cpu" and math.isfinite(flat.sum().item())

    @staticmethod
    def _shaped_as(views: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
        """A flat buffer's part of each view, in its shape."""
        parts = flat.split([view.numel() for view in views])
        return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """The flat buffer's part of each piece."""
        return (flat,) if len(self.sizes) == 1 else flat.split(self.sizes)

    def spread(self, per_tensor: Tensor, dtype: torch.dtype) -> Scalar:
        """One number per tensor as a factor for the flat buffer: a scalar, or one value per element.

        Args:
            per_tensor: FP64, shape [tensors of the batch].
            dtype: The arithmetic dtype, to which the numbers are rounded once.
        """
        if len(self.pieces) == 1:
            number = per_tensor[self.pieces[0].tensor]
            return number.item() if number.device.type == "cpu" else number.to(dtype)
        of_pieces = per_tensor[[piece.tensor for piece in self.pieces]].to(dtype)
        return self._per_element(of_pieces)

    def _per_element(self, of_pieces: Tensor) -> Tensor:
        counts = torch.tensor(self.sizes, device=of_pieces.device)
        return of_pieces.repeat_interleave(counts, output_size=sum(self.sizes))

    def sum(self, flat: Tensor) -> list[Tensor]:
        """FP64 sum of each piece, from sums over rows of 512 elements in the dtype of `flat`.

        With FP32 rows counts are exact, in a third of the time. No row and no sum of rows is shared out among threads,
        as one sum of many elements is, so results do not depend on the number of threads.
        """
        return [_sum(part) for part in self.split(flat)]

    def noise(self, *, exp_avg_sq: bool, moment_bits: int = 16) -> Noise:
        """Rounding noise for the flat buffer."""
        low, high, start = self._element_index
        return element_noise(self._key, low, high, start=start, exp_avg_sq=exp_avg_sq, moment_bits=moment_bits)

    def noise_per(self, per: Per, stream: int) -> Tensor:
        """Rounding noise of 16 bits for what there is one of per block or column, drawn at its first element.

        Args:
            per: What there is one for.
            stream: Number of the stream.
        """
        low, high, start = self._element_index

        def first(word: Word) -> Word:
            return self._first(word, per) if isinstance(word, Tensor) and word.dim() else word

        key = NoiseKey(first(self._key.first), first(self._key.second))
        return stream_of(element_words(key, self._first(low, per), first(high), start), stream, 16)

    def _first(self, flat: Tensor, per: Per) -> Tensor:
        """Of a flat tensor of elements, the first of each block or panel's column."""
        if per is Per.BLOCK:
            return flat.view(-1, BLOCK)[:, 0]
        parts = flat.split([math.prod(panels) for panels in self.panels])
        return torch.cat([
            part.view(p.number, p.rows, -1)[:, 0].reshape(-1) for part, p in zip(parts, self.panels, strict=True)
        ])  # fmt: skip

    @functools.cached_property
    def _key(self) -> NoiseKey:
        """The noise key; with several pieces, of each element."""
        keys = [present_key(step) for step in self._steps]
        if len(keys) == 1:
            return keys[0]
        words = zip(*((key.first, key.second) for key in keys), strict=True)
        return NoiseKey(
            *(self._per_element(torch.tensor(word, dtype=torch.int32, device=self.device)) for word in words)
        )

    @functools.cached_property
    def _element_index(self) -> tuple[Tensor, Word, int]:
        """Low and high 32 bits of each element's row-major index in its unsharded parameter; the third adds to low."""
        if len(self.pieces) == 1 and not self._steps[0].jumps:
            start, numel = self._steps[0].first_index + self.pieces[0].start, self.sizes[0]
            if start % LOW_WORD + numel <= LOW_WORD:
                return self._workspace.ramp[:numel], start // LOW_WORD, start % LOW_WORD
        index = torch.cat([indices(*pair, self.device) for pair in zip(self._steps, self.pieces, strict=True)])
        return index.to(torch.int32), index.bitwise_right_shift(32).to(torch.int32), 0


def indices(step: TensorStep, piece: Piece, device: torch.device) -> Tensor:
    """Row-major index of each element of a piece in its unsharded parameter, int64."""
    start, stop = piece.start, piece.start + piece.numel
    if not step.jumps:
        return torch.arange(step.first_index + start, step.first_index + stop, device=device)
    local = torch.arange(start, stop, device=device)
    index = local + step.first_index
    for block, jump in step.jumps:
        index.add_(local.div(block, rounding_mode="floor"), alpha=jump)
    return index


def _sum(flat: Tensor) -> Tensor:
    body = flat.numel() // SUM_ROW * SUM_ROW
    whole = body == flat.numel()
    rows = (flat if whole else flat[:body]).view(-1, SUM_ROW)
    total = rows.sum(1, dtype=flat.dtype if flat.is_floating_point() else torch.float32).sum(dtype=torch.float64)
    return total if whole else total + flat[body:].sum(dtype=torch.float64)


def present_key(step: TensorStep) -> NoiseKey:
    """The noise key, which an engine that does not work it out itself is given."""
    assert step.noise_key is not None
    return step.noise_key


def present(tensor: Tensor | None) -> Tensor:
    """The tensor, which the options say is there."""
    assert tensor is not None
    return tensor


def bundles(steps: Sequence[TensorStep], limit: int, *, pack: bool) -> Iterator[Bundle]:
    """Cut tensors into bundles of at most `limit` elements.

    Args:
        steps: The tensors of a batch.
        limit: The most elements in a bundle.
        pack: Whether pieces of different tensors may share a bundle; if not, each piece is a bundle of its own.
    """
    if not steps:
        return
    pieces = [
        piece for number, step in enumerate(steps) for piece in cut(number, step.param.shape, limit, _uncut(step))
    ]
    limit = max([limit, *(piece.numel for piece in pieces)])
    workspace = Workspace(min(limit, sum(step.param.numel() for step in steps)), steps[0].param.device)
    waiting: list[Piece] = []
    held = 0
    for piece in pieces:
        if waiting and (not pack or held + piece.numel > limit):
            yield Bundle(steps, waiting, workspace)
            waiting, held = [], 0
        waiting.append(piece)
        held += piece.numel
    if waiting:
        yield Bundle(steps, waiting, workspace)


def _uncut(step: TensorStep) -> int:
    """Pieces of a tensor begin and end at multiples of this: a panel, a block or an element."""
    if step.in_tiles:
        return PANEL_ROWS * max(step.row_length, 1)
    return BLOCK if step.in_blocks else 1
