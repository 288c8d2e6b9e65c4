"""The Triton engine: the whole model in a few launches.

Importing this package needs Triton; :func:`luminav.engines.choose_engine` is the only place that does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from luminav.blocks import PANEL_ROWS
from luminav.engines.batch import Batch, Scales, TensorStep, lie_as_they_read
from luminav.engines.triton import rule
from luminav.engines.triton.kinds import TRITON_TYPES, Kind
from luminav.engines.triton.launch import INTERPRETED, Launch, holding_partials
from luminav.rule import NUM_SUMS

__all__ = ["Launch", "TritonEngine", "unavailable"]

LARGEST_INDEX = 1 << 32
LONGEST_ROW = (1 << 31) // (PANEL_ROWS + 1)


def unavailable(device: torch.device) -> str | None:
    """Why this engine cannot run on `device`; None if it can."""
    if INTERPRETED:
        return None
    if device.type not in ("cuda", "xpu"):
        return f"Triton has no kernels for the device {device.type!r}"
    return None


def addressable(tensors: Sequence[Tensor], first_index: int, consecutive: bool, in_tiles: bool) -> bool:
    """Whether the kernels can take a tensor as it lies; if not, the foreach engine steps it, to the same result.

    Args:
        tensors: The local parameter, its gradient, and its state but single numbers.
        first_index: Row-major index of its first element in the unsharded parameter.
        consecutive: Whether its elements are consecutive there.
        in_tiles: Whether a variance of tiles is kept, whose offsets must fit 32 bits.
    """
    param, grad = tensors[:2]
    within = first_index + param.numel() <= LARGEST_INDEX and math.prod(param.shape[1:]) <= LONGEST_ROW
    return (
        param.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and grad.dtype.is_floating_point
        and grad.dtype in TRITON_TYPES
        and lie_as_they_read(tensors)
        and consecutive
        and (within if in_tiles else first_index == 0 or first_index + param.numel() <= LARGEST_INDEX)
    )


def arithmetic(kind: Kind, device: torch.device) -> tuple[int, bool]:
    """For tensors of a kind: how a device computes elementary functions, and whether it compares BF16 in pairs."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return rule.PORTABLE.value, False
    capability = torch.cuda.get_device_capability(device)
    coarse = kind.param == torch.bfloat16 and not kind.master and capability >= (7, 5)
    return rule.NVIDIA_COARSE.value if coarse else rule.NVIDIA.value, capability >= (9, 0)


class TritonEngine:
    """Serves all batches of a step with one grid per kind of tensor.

    An unsharded step goes through :meth:`launches`, whose tables are kept from step to step
    (:class:`luminav.replay.Replay`). The verbs of :class:`luminav.engines.batch.Engine` serve sharded steps, where the
    sums leave the engine to be added up over ranks.
    """

    name = "triton"
    numbers_on_device = True

    def launches(self, batches: Sequence[Batch]) -> list[Launch]:
        """Plans for all tensors of the batches, one for each kind."""
        members: dict[tuple[Kind, torch.device], list[tuple[Batch, TensorStep]]] = {}
        for batch in batches:
            for step in batch.steps:
                members.setdefault((Kind.of(step, batch.options), batch.device), []).append((batch, step))
        return [Launch(kind, own, *arithmetic(kind, device)) for (kind, device), own in members.items()]

    def prepare(self, batches: Sequence[Batch], *, gather: bool) -> None:
        """Nothing: unsharded steps compile their launches first (``Replay.compile``), sharded ones while measuring."""

    def holding_partials(self, launches: Sequence[Launch]) -> AbstractContextManager[None]:
        """Hold the memory that launches leave their sums in: for those who must not import Triton."""
        return holding_partials(launches)

    def measure_lookahead(self, batches: Sequence[Batch]) -> list[Tensor]:
        tables = []
        for batch in batches:
            table = torch.zeros(len(batch.steps), 2, dtype=torch.float64, device=batch.device)
            for launch, rows in self.launches_of(batch):
                with holding_partials([launch]):
                    launch.begin(None)
                    launch.measure_lookahead()
                table[rows] = launch.tables.lookahead_sums
            tables.append(table)
        return tables

    def measure(self, batches: Sequence[Batch]) -> list[Tensor]:
        tables = []
        for batch in batches:
            table = torch.zeros(len(batch.steps), NUM_SUMS, dtype=torch.float64, device=batch.device)
            for launch, rows in self.launches_of(batch):
                with holding_partials([launch]):
                    launch.begin(None)
                    launch.set_denominators(batch.rms_denominator, rows)
                    launch.measure()
                    launch.scale(reduce=True)
                table[rows] = launch.tables.sums
            tables.append(table)
        return tables

    def update(self, batches: Sequence[Batch], scales: Sequence[Scales], *, gather: bool) -> list[Tensor]:
        adding_up = [launch for batch in batches for launch, _ in self.launches_of(batch)] if gather else []
        with holding_partials(adding_up):  # all of them, before the first launch that writes
            tables = [self._update(batch, own, gather=gather) for batch, own in zip(batches, scales, strict=True)]
        return tables if gather else []

    def _update(self, batch: Batch, scales: Scales, *, gather: bool) -> Tensor:
        table = torch.zeros(len(batch.steps), NUM_SUMS, dtype=torch.float64, device=batch.device)
        for launch, rows in self.launches_of(batch):
            launch.begin(batch.skip)
            launch.set_denominators(batch.rms_denominator, rows)
            launch.set_scales(scales, rows)
            launch.update(gather=gather)
            if gather:
                launch.scale(reduce=True)
                table[rows] = launch.tables.sums
        torch.autograd.graph.increment_version([step.param for step in batch.steps])
        return table

    def steps_taken(self, batch: Batch) -> Tensor:
        """Step counts of a batch's tensors, int64."""
        counts = torch.empty(len(batch.steps), dtype=torch.int64, device=batch.device)
        for launch, rows in self.launches_of(batch):
            counts[rows] = launch.tables.steps
        return counts

    def launches_of(self, batch: Batch) -> list[tuple[Launch, Tensor]]:
        """A batch's launches, each with the rows of its tensors in the batch; made once for as long as it has these."""
        if batch.kept is None or batch.kept[0] != batch.steps:
            rows = {id(step): row for row, step in enumerate(batch.steps)}
            launches = [
                (launch, torch.tensor([rows[id(step)] for step in launch.steps_of], device=batch.device))
                for launch in self.launches([batch])
            ]
            batch.kept = (list(batch.steps), launches)
        found: list[tuple[Launch, Tensor]] = batch.kept[1]
        return found
