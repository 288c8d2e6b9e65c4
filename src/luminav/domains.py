"""Ranks that hold different parts of the same parameters, and the one collective that adds up their sums in a step.

The sums of all of a domain's parameters travel in one message, which every rank sends whatever it holds. It is gathered
and added up in one order on every rank, not reduced by the backend: replicas, which are other process groups with other
rings, must come to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(eq=False)
class Domain:
    """Ranks that hold different parts of the same parameters: their sums are added up in one collective."""

    group: dist.ProcessGroup
    device: torch.device
    """Where its messages are."""
    order: list[int]
    """Group ranks in the order of the shards; sums are added in this order."""
    numels: list[int] = field(default_factory=list)
    """Number of elements of each of its parameters, in the optimizer's order: its slots."""
    needs_rms: bool = False
    """Whether a parameter has one RMS in place of a variance: a step then takes two collectives."""
    _indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def add_slot(self, numel: int, needs_rms: bool) -> int:
        """Make room for a parameter in the message; the same on every rank."""
        self.numels.append(numel)
        self.needs_rms |= needs_rms
        return len(self.numels) - 1

    def total(self, rows: Tensor, slots: Sequence[int], extra: Tensor) -> tuple[Tensor, Tensor]:
        """Add up rows over the ranks, all on `device` in FP64.

        Args:
            rows: [parameters, columns]; a parameter that this rank says nothing of counts as 0.
            slots: The rows' slots.
            extra: [columns], a row that belongs to no parameter.

        Returns:
            The totals of these rows and of `extra`.
        """
        message = rows.new_zeros(len(self.numels) + 1, rows.shape[1])
        index = self._index(tuple(slots))
        message.index_copy_(0, index, rows)
        message[-1] = extra
        total = self._gather(message)
        return total.index_select(0, index), total[-1]

    def _index(self, slots: tuple[int, ...]) -> Tensor:
        """Slots as a tensor. Kept, since the same parameters have gradients in most steps."""
        if slots not in self._indices:
            self._indices = {slots: torch.tensor(slots, dtype=torch.int64, device=self.device)}
        return self._indices[slots]

    def _gather(self, message: Tensor) -> Tensor:
        # torch 2.13 deprecates the old name of this collective.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gathered = message.new_empty(len(self.order) * message.shape[0], message.shape[1])
        all_gather(gathered, message, group=self.group)
        parts = gathered.view(len(self.order), *message.shape)
        if self.order != list(range(len(self.order))):
            parts = parts[self.order]
        return _fold(parts)


def _fold(parts: Tensor) -> Tensor:
    """Sum over the first dimension in pairs, in an order that no device or library chooses."""
    while len(parts) > 1:
        half = len(parts) // 2
        folded = parts[:half] + parts[half : 2 * half]
        parts = folded if len(parts) == 2 * half else torch.cat((folded, parts[2 * half :]))
    return parts[0]


def message_device(group: dist.ProcessGroup, wanted: torch.device) -> torch.device:
    """Where the group can send from: the parameters' device, or the accelerator if it cannot serve that."""
    served = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    kind = wanted.type if wanted.type in served else next((kind for kind in served if kind != "cpu"), "cpu")
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")
