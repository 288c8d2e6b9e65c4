"""Tensors of a batch as rows of 512 elements, for engines whose graphs take any number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from luminav.engines import bundle as pieces
from luminav.engines.batch import TensorStep
from luminav.engines.bundle import Piece, Select, cut, present, present_key
from luminav.rounding import HIGH_WORD_MULTIPLIERS, Word, signed

ROW = 512
LEAST_ROWS = 2
"""Graphs are for any number of rows but one, which the compiler would take for a constant."""
ROWS_IN_PLACE = 1 << 14  # as many as one thread sums without help from others
CPU_ROWS_COPIED = 1 << 11  # 2 MiB of each tensor in BF16, which are still in the cache when they are read
DEVICE_ROWS_COPIED = 1 << 14
ROWS_READ_IN_PLACE = 16  # less than this is not worth a call of its own


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `stop` of a piece, in `rows` rows of their own, the last one perhaps padded."""

    piece: Piece
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return -(-(self.stop - self.start) // ROW)


class Slab:
    """Fragments of tensors of one batch as rows, one fragment after the other.

    Args:
        steps: The batch's tensors.
        fragments: Parts of them.
        in_place: Whether there is one fragment, whose rows lie in memory as they are.
    """

    def __init__(self, steps: Sequence[TensorStep], fragments: Sequence[Fragment], *, in_place: bool = False) -> None:
        self.steps, self.fragments, self.in_place = steps, fragments, in_place
        self.device = steps[0].param.device
        self.rows = max(LEAST_ROWS, sum(fragment.rows for fragment in fragments))

    def load(self, of: Select) -> Tensor | None:
        """One kind of tensor as [rows, 512]: a view where the rows lie like that, else a copy."""
        parts = [self._part(of, fragment) for fragment in self.fragments]
        first = parts[0]
        if first is None:
            return None
        if len(parts) == 1 and first.numel() == self.rows * ROW:
            return first.reshape(-1).contiguous().view(self.rows, ROW)  # one dimension of a gradient may have gaps
        rows = first.new_zeros(self.rows, ROW)
        targets = self._targets(rows, [present(part) for part in parts])
        torch._foreach_copy_(targets, [present(part) for part in parts])
        return rows

    def store(self, of: Select, rows: Tensor) -> None:
        """Write rows back into the tensors."""
        parts = [present(self._part(of, fragment)) for fragment in self.fragments]
        torch._foreach_copy_(parts, self._targets(rows, parts))

    def _part(self, of: Select, fragment: Fragment) -> Tensor | None:
        tensor = of(self.steps[fragment.piece.tensor])
        if tensor is None:
            return None
        view = tensor.detach()[fragment.piece.index]
        if fragment.stop - fragment.start == fragment.piece.numel:
            return view
        return view.reshape(-1)[fragment.start : fragment.stop]  # of gradients alone it may be a copy

    def _targets(self, rows: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """The places of the fragments in the rows, each in the shape of its part."""
        flat, first, targets = rows.view(-1), 0, []
        for fragment, part in zip(self.fragments, parts, strict=True):
            targets.append(flat[first : first + part.numel()].view(part.shape))
            first += fragment.rows * ROW
        return targets

    def spread(self, per_tensor: Tensor) -> Tensor:
        """Numbers of tensors as numbers of rows; a row without a tensor has the last one's."""
        return self._of_rows(per_tensor[[fragment.piece.tensor for fragment in self.fragments]])

    def _of_rows(self, of_fragments: Tensor) -> Tensor:
        if len(self.fragments) == 1:
            return of_fragments.expand(self.rows).contiguous()
        counts = [fragment.rows for fragment in self.fragments]
        counts[-1] += self.rows - sum(counts)
        repeats = torch.tensor(counts, device=self.device)
        return of_fragments.repeat_interleave(repeats, output_size=self.rows)

    def sums(self, columns: Sequence[Tensor]) -> Tensor:
        """Sums of rows, added in FP64 for each fragment: [fragments, columns].

        One thread can add a column of a slab; adding all at once would wait for the others.
        """
        counts = [fragment.rows for fragment in self.fragments]
        parts = [column.to(torch.float64)[: sum(counts)].split(counts) for column in columns]
        return torch.stack([part.sum() for of_column in parts for part in of_column]).view(len(parts), -1).t()

    # ---- noise -----------------------------------------------------------------------------------------------------

    @cached_property
    def per_element(self) -> bool:
        """Whether the elements of some row are not consecutive in their parameter, as far as the noise is concerned."""
        return any(self._is_scattered(fragment) for fragment in self.fragments)

    def _is_scattered(self, fragment: Fragment) -> bool:
        step = self.steps[fragment.piece.tensor]
        start = step.first_index + fragment.piece.start + fragment.start
        return bool(step.jumps) or start % pieces.LOW_WORD + fragment.rows * ROW > pieces.LOW_WORD

    def words(self) -> tuple[Tensor, Tensor]:
        """What :func:`element_noise` adds to an element's column in each of its two rounds, int32, [rows, 1 or 512]."""
        if not self.per_element:
            return self._words_of_rows()
        first, second = zip(*(self._words_of(fragment) for fragment in self.fragments), strict=True)
        return self._padded(first), self._padded(second)

    def _words_of_rows(self) -> tuple[Tensor, Tensor]:
        words: tuple[list[Word], list[Word]] = ([], [])
        row = 0
        for fragment in self.fragments:
            step = self.steps[fragment.piece.tensor]
            high, low = divmod(step.first_index + fragment.piece.start + fragment.start, pieces.LOW_WORD)
            key = present_key(step)
            words[0].append(_add32(key.first, low - row * ROW + high * HIGH_WORD_MULTIPLIERS[0]))
            words[1].append(_add32(key.second, high * HIGH_WORD_MULTIPLIERS[1]))
            row += fragment.rows
        first, second = (self._of_rows(_vector(each, self.device)) for each in words)
        first += torch.arange(0, self.rows * ROW, ROW, dtype=torch.int32, device=self.device)
        return first.unsqueeze(1), second.unsqueeze(1)

    def _words_of(self, fragment: Fragment) -> tuple[Tensor, Tensor]:
        step = self.steps[fragment.piece.tensor]
        part = Piece(0, (), fragment.piece.start + fragment.start, fragment.stop - fragment.start)
        index = pieces.indices(step, part, self.device)
        index = torch.cat((index, index.new_zeros(fragment.rows * ROW - index.numel()))).view(-1, ROW)
        high, low = index.bitwise_right_shift(32), index - torch.arange(ROW, device=self.device)
        key = present_key(step)
        first = low + high * HIGH_WORD_MULTIPLIERS[0] + key.first
        return first.to(torch.int32), (high * HIGH_WORD_MULTIPLIERS[1] + key.second).to(torch.int32)

    def _padded(self, words: Sequence[Tensor]) -> Tensor:
        missing = self.rows - sum(len(word) for word in words)
        return torch.cat((*words, words[0].new_zeros(missing, words[0].shape[1])))


def _add32(key: Word, term: int) -> Word:
    """Their sum modulo 2³²."""
    return key + signed(term, 32) if isinstance(key, Tensor) else signed(key + term, 32)


def _vector(words: Sequence[Word], device: torch.device) -> Tensor:
    """Words as one int32 tensor."""
    if any(isinstance(word, Tensor) for word in words):
        return torch.stack([torch.as_tensor(word, dtype=torch.int32, device=device) for word in words])
    return torch.tensor(words, dtype=torch.int32, device=device)


def slabs(steps: Sequence[TensorStep], device: torch.device) -> Iterator[Slab]:
    """Cut the tensors of a batch into slabs."""
    most_copied = CPU_ROWS_COPIED if device.type == "cpu" else DEVICE_ROWS_COPIED
    waiting: list[Fragment] = []
    held = 0
    for number, step in enumerate(steps):
        in_place = _rows_lie_in_place(step)
        if waiting and step.present_grad.dtype != steps[waiting[0].piece.tensor].present_grad.dtype:
            yield Slab(steps, waiting)
            waiting, held = [], 0
        for piece in cut(number, step.param.shape, (ROWS_IN_PLACE if in_place else most_copied) * ROW):
            body = piece.numel // ROW * ROW
            if not in_place or body < ROWS_READ_IN_PLACE * ROW:
                body = 0
            else:
                yield Slab(steps, [Fragment(piece, 0, body)], in_place=True)
            if body < piece.numel:
                rest = Fragment(piece, body, piece.numel)
                if waiting and held + rest.rows > most_copied:
                    yield Slab(steps, waiting)
                    waiting, held = [], 0
                waiting.append(rest)
                held += rest.rows
    if waiting:
        yield Slab(steps, waiting)


def _rows_lie_in_place(step: TensorStep) -> bool:
    written = (step.param, step.exp_avg, step.exp_avg_sq, step.master_param, step.master_remainder)
    return all(tensor is None or tensor.is_contiguous() for tensor in written)
