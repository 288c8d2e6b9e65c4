"""The tables that the kernels read, and how they are filled.

A launch serves the tensors of some batches that share dtypes and structural options. Its tables, all on the device,
with the columns that ``columns.py`` names:

    pointers        int64  [tensors, NUM_POINTERS]   addresses of param, exp_avg, exp_avg_sq, master or remainder,
                                                     of the scales of 8-bit codes and of the column means of tiles;
                                                     then the length of a row
    grads           int64  [tensors]                 addresses of the gradients; 0 for none. Refreshed when they change
    numels          int64  [tensors]
    first_programs  int32  [tensors]                 the first program of each tensor
    num_programs    int32  [tensors]
    first_tensors   int32  [⌈programs / 64⌉ + 1]     the tensor of every 64th program, and the last tensor
    groups          FP64   [groups, GROUP_WIDTH]     the groups' options. Refreshed when they change
    tensor_group    int32  [tensors]
    tensor_index    int64  [tensors]                 position in the optimizer, for the noise
    numbers         FP32   [tensors, NUMBERS_WIDTH]  numbers of the step, written by the numbers kernel
    keys            int32  [tensors, KEY_WIDTH]      noise key and active flag, likewise
    first_indices   int64  [tensors]                 index of the first element in the unsharded parameter
    fp16_flags      int32  [tensors]                 whether the parameter is FP16
    steps           int64  [tensors]                 step counts; state["step"] is a view of it
    kept_scales     FP32   [tensors, 2]              c and s; in one-pass mode the state's scales are views of it
    lookahead_sums  FP64   [tensors, 2]              Σ m̃² and the number of elements, with one buffer; else empty
    sums            FP64   [tensors, NUM_SUMS]

Between two launches programs leave their sums in `partials`, FP32 [programs, NUM_PARTIALS], or Σ m̃² of the single
buffer as FP64 [programs] in the same memory. For a large model it is far larger than all tables together, and held for
as long as a step takes (a sharded one: from a measurement or an update to its sums), so that activations can use it in
between.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from luminav.blocks import BLOCK
from luminav.engines.batch import Batch, TensorStep
from luminav.engines.triton import columns
from luminav.engines.triton.kinds import Kind
from luminav.hyperparameters import Options
from luminav.rule import NUM_SUMS

_read_by_graphs: list[Tensor] = []  # for good: a captured graph may outlive the optimizer, and its replays read them


class Tables:
    """The tables of the tensors of one kind.

    Args:
        kind: What they have in common.
        members: (batch, step) of each tensor.
    """

    def __init__(self, kind: Kind, members: Sequence[tuple[Batch, TensorStep]]) -> None:
        self.device = members[0][1].param.device
        self._batches = list({id(batch): batch for batch, _ in members}.values())
        self._make_static(kind, members)
        self._make_working(kind, [step for _, step in members])
        self._uploaded: tuple[list[int], list[bytes]] | None = None
        self._addresses: list[int] | None = None
        self._rows: dict[int, tuple[Options, bytes]] = {}

    def _make_static(self, kind: Kind, members: Sequence[tuple[Batch, TensorStep]]) -> None:
        """Make the tables that stay as they are, and count programs."""
        steps_of = [step for _, step in members]
        counts = list(map(kind.num_programs, steps_of))
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        self.num_programs_in_all = firsts.pop()
        rows = {id(batch): row for row, batch in enumerate(self._batches)}
        self.pointers = self._int64([_addresses(step) for step in steps_of])
        self.numels = self._int64([step.param.numel() for step in steps_of])
        self.first_programs = self._int32(firsts)
        self.num_programs = self._int32(counts)
        self.first_tensors = self._int32(first_tensors_of(firsts, self.num_programs_in_all))
        self.tensor_group = self._int32([rows[id(batch)] for batch, _ in members])
        self.tensor_index = self._int64([step.index for step in steps_of])
        self.first_indices = self._int64([step.first_index for step in steps_of])
        self.fp16_flags = self._int32([int(step.param.dtype == torch.float16) for step in steps_of])
        self.offset = any(step.first_index for step in steps_of)

    def _make_working(self, kind: Kind, steps_of: Sequence[TensorStep]) -> None:
        """Make the tables that change from step to step."""
        num, device = len(steps_of), self.device
        width = columns.GROUP_WIDTH.value
        rows = len(self._batches) * width  # first, since their length keeps both tables aligned for the kernels
        self._words = torch.zeros(rows + num, dtype=torch.int64, device=device)
        self.groups = self._words[:rows].view(torch.float64).view(-1, width)
        self.grads = self._words[rows:]
        self._captured = False
        self._spare_host = self._host_memory(rows + num)
        self.numbers = torch.zeros(num, columns.NUMBERS_WIDTH.value, dtype=torch.float32, device=device)
        self.keys = torch.zeros(num, columns.KEY_WIDTH.value, dtype=torch.int32, device=device)
        self.steps = torch.stack([step.step.to(device) for step in steps_of if step.step is not None])
        self.kept_scales = torch.ones(num, 2, dtype=torch.float32, device=device)
        for row, step in enumerate(steps_of):
            if step.kept_scales is not None:
                self.kept_scales[row] = torch.stack(step.kept_scales)
        self.lookahead_sums = torch.zeros(0 if kind.dual else num, 2, dtype=torch.float64, device=device)
        self.sums = torch.zeros(num, NUM_SUMS, dtype=torch.float64, device=device)
        self.whole_nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self.nonfinite_counts = torch.zeros(num, dtype=torch.float64, device=device)

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def _int64(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def refresh(self, addresses: list[int]) -> None:
        """Upload what changed since the last step, gradient addresses and options, in one copy."""
        rows = list(map(self._row, self._batches))
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or self._captured or self._uploaded != (addresses, rows):
            self._uploaded = (addresses, rows)
            self._upload(addresses, rows, capturing)
        for row, batch in enumerate(self._batches):
            if isinstance(batch.options.lr, Tensor) and batch.options.lr.device.type != "cpu":
                self.groups[row, columns.GROUP_LR.value].copy_(batch.options.lr.reshape(()))

    def _row(self, batch: Batch) -> bytes:
        """A batch's row of the table `groups`, packed anew when its options are others, or may be."""
        options, row = self._rows.get(id(batch), (None, b""))
        if options is not batch.options or isinstance(batch.options.lr, Tensor):
            row = _group_row(batch.options)
            self._rows[id(batch)] = batch.options, row
        return row

    def _upload(self, addresses: list[int], rows: list[bytes], capturing: bool) -> None:
        """Copy to the device; a graph that is being captured gets host memory of its own, which its replays read again.

        Replays write the table behind our back, so from the first capture on every eager step uploads.
        """
        if addresses is not self._addresses:
            self._addresses, self._address_words = addresses, array("q", addresses)
        words = array("q", b"".join(rows)) + self._address_words
        if capturing:
            host = self._spare_host
            _read_by_graphs.append(host)
            self._captured = True
            self._spare_host = self._host_memory(len(words))
        else:
            host = self._host_memory(len(words))
        ctypes.memmove(host.data_ptr(), words.buffer_info()[0], len(words) * words.itemsize)
        self._words.copy_(host, non_blocking=True)

    def _host_memory(self, num_words: int) -> Tensor:
        """Pinned, from the caching allocator, which keeps the memory until a copy that was ordered is done."""
        pinned = self.device.type != "cpu"
        return torch.empty(num_words, dtype=torch.int64, device="cpu", pin_memory=pinned)


def first_tensors_of(firsts: Sequence[int], num_programs: int) -> list[int]:
    """The table of that name: the tensor of every 64th program, and the last tensor, where the last search ends.

    Args:
        firsts: The first program of each tensor. Every tensor has one, or it would not be found.
        num_programs: Of all tensors.
    """
    entries = range(0, num_programs, columns.PROGRAMS_PER_ENTRY.value)
    return [*(bisect_right(firsts, program) - 1 for program in entries), len(firsts) - 1]


def _addresses(step: TensorStep) -> list[int]:
    """A row of the table `pointers`."""
    param = step.param.data_ptr()
    return [
        param,
        step.exp_avg.data_ptr(),
        0 if step.exp_avg_sq is None else step.exp_avg_sq.data_ptr(),
        next((t.data_ptr() for t in (step.master_param, step.master_remainder) if t is not None), param),
        0 if step.exp_avg_scale is None else step.exp_avg_scale.data_ptr(),
        0 if step.exp_avg_sq_scale is None else step.exp_avg_sq_scale.data_ptr(),
        0 if step.exp_avg_sq_col is None else step.exp_avg_sq_col.data_ptr(),
        max(step.row_length, BLOCK),
    ]


def _group_row(options: Options) -> bytes:
    """A row of the table `groups`; lr is filled in on the device if it lives there."""
    lr = options.lr
    if isinstance(lr, Tensor):
        lr = lr.item() if lr.device.type == "cpu" else 0.0
    numbers = [
        lr, *options.betas, options.eps, options.weight_decay, options.tau, options.alpha_ss,
        options.cautious_clamp_min, options.bound_ratio, options.ema_decay,
    ]  # fmt: skip
    flags = [
        -1.0 if options.maximize else 1.0,
        float(options.cautious),
        float(options.bound and options.bound_type == "radial"),
    ]
    return struct.pack(f"{len(numbers)}dq{len(flags)}d2d", *numbers, options.seed, *flags, 0.0, 0.0)
