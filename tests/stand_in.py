"""What stands in for the kernels in tests of the host's side: some update of all that an update reads and writes.

It goes by the addresses that the kernels would be given, so that what a kept step does not notice shows in the results.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from luminav.engines.triton import kernels, launch, scalars
from luminav.engines.triton.columns import GROUP_LR, LR, STEP_SIZE


def _at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def instead_of_kernels(self: launch.Launch, key: Any, kernel: Any, *args: Any, **options: Any) -> None:
    """In place of ``Launch._launch``."""
    if kernel is scalars.numbers_kernel:
        self.tables.numbers.fill_(1.0)
        self.tables.numbers[:, LR.value] = self.tables.groups[
            self.tables.tensor_group.to(torch.int64), GROUP_LR.value
        ].to(torch.float32)
        if options["KEPT"]:
            self.tables.numbers[:, STEP_SIZE.value] = self.tables.kept_scales.sum(1)
    if kernel is scalars.scales_kernel and options["BLEND"]:
        self.tables.kept_scales *= 0.875
    if kernel in (kernels.lookahead_kernel, kernels.measure_kernel) or options.get("GATHER"):
        assert self.partials is not None
        self.partials.fill_(math.nan)
    if kernel not in (kernels.lookahead_kernel, kernels.measure_kernel, kernels.update_kernel):
        return
    rows = zip(self.tables.pointers.tolist(), self.tables.grads.tolist(), self.tables.numels.tolist())
    for row, (addresses, grad_at, numel) in enumerate(rows):
        if grad_at == 0:
            continue
        weight, grad = _at(addresses[0], numel, self.kind.param), _at(grad_at, numel, self.kind.grad)
        clean = grad.double().nan_to_num(0.0, 0.0, 0.0)
        if kernel is kernels.lookahead_kernel:
            self.tables.lookahead_sums[row] = torch.tensor([float(clean.square().sum()), numel])
            continue
        bad, weight_sq = int((~grad.isfinite()).sum()), weight.double().square().sum()
        self.tables.sums[row] = torch.tensor([numel / 2, float(clean.square().sum()), float(weight_sq), numel, bad])
        if kernel is kernels.update_kernel:
            _update(self, row, addresses, weight, clean)


def _update(self: launch.Launch, row: int, addresses: list[int], weight: Tensor, grad: Tensor) -> None:
    self.tables.steps[row] += 1
    moments = addresses[1:3] if self.kind.dual else addresses[1:2]
    for power, address in enumerate(moments, 1):
        moment = _at(address, weight.numel(), self.kind.moment)
        moment.mul_(0.5).add_(grad**power)
    change = moment.double() / (1 + self.tables.steps[row]) * self.tables.numbers[row, STEP_SIZE.value]
    weight.mul_(0.9).sub_((change * self.tables.numbers[row, LR.value]).to(weight.dtype))
