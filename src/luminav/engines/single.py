"""The reference engine: the rule, tensor by tensor, piece by piece, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from luminav import rule
from luminav.blocks import BLOCK, EXP_AVG_FORMAT, EXP_AVG_SQ_FORMAT, NOISE_BITS, CodeFormat, decode, encode
from luminav.engines.batch import Batch, Scales, TensorStep
from luminav.engines.bundle import Bundle, Per, Select, bundles, piece_limit, present
from luminav.rounding import (
    MASTER_CAP_BF16,
    SIXTEEN_BIT,
    join_master,
    largest_finite,
    nearest,
    remainder_of,
    round_finite_,
)

# ---- which tensor of a step a bundle loads or stores ---------------------------------------------------------------


def param_of(step: TensorStep) -> Tensor:
    """The parameter."""
    return step.param


def grad_of(step: TensorStep) -> Tensor:
    """The gradient."""
    return step.present_grad


def exp_avg_of(step: TensorStep) -> Tensor:
    """The momentum."""
    return step.exp_avg


def exp_avg_sq_of(step: TensorStep) -> Tensor | None:
    """The variance."""
    return step.exp_avg_sq


def exp_avg_sq_col_of(step: TensorStep) -> Tensor | None:
    """The column means of the variance's tiles."""
    return step.exp_avg_sq_col


def exp_avg_scale_of(step: TensorStep) -> Tensor | None:
    """The scales of the momentum's 8-bit codes."""
    return step.exp_avg_scale


def exp_avg_sq_scale_of(step: TensorStep) -> Tensor | None:
    """The scales of the variance's 8-bit codes."""
    return step.exp_avg_sq_scale


def master_param_of(step: TensorStep) -> Tensor | None:
    """The whole FP32 master weight."""
    return step.master_param


def master_remainder_of(step: TensorStep) -> Tensor | None:
    """The lower half of a split master weight."""
    return step.master_remainder


ROUNDED = (*SIXTEEN_BIT, torch.uint8)
"""The storage dtypes that are rounded to."""


class Moment(NamedTuple):
    """A moment, and how its 8-bit codes are read where it has them."""

    of: Select
    scale_of: Select
    form: CodeFormat

    def in_codes(self, batch: Batch) -> bool:
        """Whether a batch keeps it in 8-bit codes."""
        return self.scale_of(batch.steps[0]) is not None

    def largest(self, batch: Batch) -> float:
        """To what it saturates."""
        stored = torch.float32 if self.in_codes(batch) else present(self.of(batch.steps[0])).dtype
        return largest_finite(stored)


EXP_AVG = Moment(exp_avg_of, exp_avg_scale_of, EXP_AVG_FORMAT)
EXP_AVG_SQ = Moment(exp_avg_sq_of, exp_avg_sq_scale_of, EXP_AVG_SQ_FORMAT)


class Means(NamedTuple):
    """One kind of the means of tiles, and the stream of noise that it is rounded with."""

    of: Select
    per: Per
    stream: int


ROW_MEANS = Means(exp_avg_sq_of, Per.BLOCK, 2)
COLUMN_MEANS = Means(exp_avg_sq_col_of, Per.COLUMN, 3)


# ---- load ----------------------------------------------------------------------------------------------------------


def load_grad(batch: Batch, bundle: Bundle) -> tuple[Tensor, list[Tensor] | None]:
    """A bundle's gradient as the rule sees it, to be overwritten, and the non-finite elements of each piece, FP64.

    The counts are None if there are none.
    """
    grad = bundle.copy(grad_of, batch.compute_dtype)
    nonfinite = None if bundle.known_finite(grad) else bundle.sum(rule.is_finite(grad).logical_not_())
    scale = batch.step_numbers.grad_scale
    if nonfinite is None and not isinstance(scale, Tensor) and scale == 1.0:
        return grad, None
    return rule.clean_grad_(grad, batch.step_numbers), nonfinite


def load_moment(batch: Batch, bundle: Bundle, moment: Moment) -> Tensor:
    """A bundle's moment, to be overwritten."""
    if moment.in_codes(batch):
        codes, scales = bundle.load(moment.of, torch.uint8), bundle.load(moment.scale_of, torch.uint8, Per.BLOCK)
        return decode(codes.view(-1, BLOCK), scales, moment.form).view(-1)
    return bundle.copy(moment.of, batch.compute_dtype)


def load_variance(batch: Batch, bundle: Bundle) -> Tensor | rule.TileMeans:
    """A bundle's variance, to be overwritten."""
    if not batch.steps[0].in_tiles:
        return load_moment(batch, bundle, EXP_AVG_SQ)
    rows, columns = (bundle.copy(kind.of, batch.compute_dtype, kind.per) for kind in (ROW_MEANS, COLUMN_MEANS))
    return rule.TileMeans(rows, columns, bundle.panels)


def load_weight(batch: Batch, bundle: Bundle) -> tuple[Tensor, Tensor | None]:
    """A bundle's weights with 0 for non-finite ones, to be overwritten, and which those are; None if there are none."""
    first = batch.steps[0]
    if first.master_remainder is not None:
        weight = join_master(bundle.load(param_of, batch.param_dtype), bundle.load(master_remainder_of, torch.int16))
    else:
        weight = bundle.copy(param_of if first.master_param is None else master_param_of, batch.compute_dtype)
    if bundle.known_finite(weight):
        return weight, None
    nonfinite = rule.is_finite(weight).logical_not_()
    return weight.masked_fill_(nonfinite, 0.0), nonfinite


class SingleEngine:
    """Works on one piece of one tensor at a time; see :class:`luminav.engines.batch.Engine` for the three verbs."""

    name = "single"
    numbers_on_device = False
    pack = False
    """Whether pieces of several tensors are worked on side by side."""

    def prepare(self, batches: Sequence[Batch], *, gather: bool) -> None:
        """Nothing: the reference needs no compiler."""

    def measure_lookahead(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [self._measure_lookahead(batch) for batch in batches]

    def measure(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [self._measure(batch) for batch in batches]

    def update(self, batches: Sequence[Batch], scales: Sequence[Scales], *, gather: bool) -> list[Tensor]:
        sums = [self._update(batch, scale, gather) for batch, scale in zip(batches, scales, strict=True)]
        return [table for table in sums if table is not None]

    def _bundles(self, batch: Batch) -> Iterator[Bundle]:
        return bundles(batch.steps, piece_limit(batch.device), pack=self.pack)

    def _measure_lookahead(self, batch: Batch) -> Tensor:
        table = torch.zeros(len(batch.steps), 2, dtype=torch.float64, device=batch.device)
        for bundle in self._bundles(batch):
            for piece, total in zip(bundle.pieces, lookahead_squares(batch, bundle), strict=True):
                table[piece.tensor, 0] += total
                table[piece.tensor, 1] += piece.numel
        return table

    def _measure(self, batch: Batch) -> Tensor:
        table = torch.zeros(len(batch.steps), rule.NUM_SUMS, dtype=torch.float64, device=batch.device)
        for bundle in self._bundles(batch):
            add_sums_(table, bundle, measured(batch, bundle))
        return table

    def _update(self, batch: Batch, scales: Scales, gather: bool) -> Tensor | None:
        table = (
            torch.zeros(len(batch.steps), rule.NUM_SUMS, dtype=torch.float64, device=batch.device) if gather else None
        )
        step_sizes = scales.step_sizes(batch.step_numbers.lr)
        for bundle in self._bundles(batch):
            sums = updated(batch, bundle, step_sizes, gather=gather)
            if table is not None and sums is not None:
                add_sums_(table, bundle, sums)
        return table


# ---- the verbs on one bundle: load → rule → store ------------------------------------------------------------------


class BundleSums(NamedTuple):
    """A bundle's share of :class:`luminav.rule.Sums`, one tensor for each piece; None where it need not be counted."""

    kept: list[Tensor] | None
    direction_sq: list[Tensor]
    param_sq: list[Tensor]
    nonfinite: list[Tensor] | None


def lookahead_squares(batch: Batch, bundle: Bundle) -> list[Tensor]:
    """Σ m̃² of each piece."""
    grad, _ = load_grad(batch, bundle)
    grad_share = grad.mul_(batch.step_numbers.one_minus_beta1)
    exp_avg = rule.momentum_(load_moment(batch, bundle, EXP_AVG), grad_share, batch.step_numbers)
    return bundle.sum(rule.lookahead_(grad_share, exp_avg, batch.step_numbers).to(torch.float64).square_())


def measured(batch: Batch, bundle: Bundle) -> BundleSums:
    """The sums of a bundle. Writes nothing."""
    grad, nonfinite_grads = load_grad(batch, bundle)
    way = direction_of(batch, bundle, grad)
    weight, _ = load_weight(batch, bundle)
    return sums_of(bundle, way, weight, nonfinite_grads)


def updated(batch: Batch, bundle: Bundle, step_sizes: Tensor, *, gather: bool) -> BundleSums | None:
    """Store a bundle's new weights and moments, by η·c·s of each tensor; with `gather`, its sums as well."""
    grad, nonfinite_grads = load_grad(batch, bundle)
    way = direction_of(batch, bundle, grad)
    weight, nonfinite = load_weight(batch, bundle)
    sums = sums_of(bundle, way, weight, nonfinite_grads) if gather else None
    step_size = bundle.spread(step_sizes, batch.compute_dtype)
    govern = batch.param_dtype == torch.float16
    change = rule.delta(way.kept_direction, weight, step_size, batch.options, govern=govern)
    store(batch, bundle, way, rule.decay_and_move_(weight, change, batch.step_numbers), nonfinite)
    return sums


def direction_of(batch: Batch, bundle: Bundle, grad: Tensor) -> rule.Direction:
    """Load the moments and go as far as the gated direction."""
    dual = batch.options.has_variance
    return rule.direction_(
        grad,
        load_moment(batch, bundle, EXP_AVG),
        load_variance(batch, bundle) if dual else None,
        batch.step_numbers,
        batch.options,
        largest=EXP_AVG_SQ.largest(batch) if dual else math.inf,
        rms_denominator=None if dual else bundle.spread(present(batch.rms_denominator), batch.compute_dtype),
    )


def sums_of(bundle: Bundle, way: rule.Direction, weight: Tensor, nonfinite: list[Tensor] | None) -> BundleSums:
    """The sums of a bundle, from what was worked out of it."""
    return BundleSums(
        kept=None if way.keep is None else bundle.sum(way.keep),
        direction_sq=bundle.sum(way.kept_direction.square()),
        param_sq=bundle.sum(weight.square()),
        nonfinite=nonfinite,
    )


def add_sums_(table: Tensor, bundle: Bundle, sums: BundleSums) -> None:
    """Add a bundle's share of the sums to the rows of its tensors."""
    numel = [table.new_tensor(size) for size in bundle.sizes]
    columns = rule.Sums(
        kept=numel if sums.kept is None else sums.kept,  # type: ignore[arg-type]
        direction_sq=sums.direction_sq,  # type: ignore[arg-type]
        param_sq=sums.param_sq,  # type: ignore[arg-type]
        numel=numel,  # type: ignore[arg-type]
        nonfinite=[table.new_zeros(())] * len(numel) if sums.nonfinite is None else sums.nonfinite,  # type: ignore[arg-type]
    )
    for piece, *row in zip(bundle.pieces, *columns, strict=True):
        table[piece.tensor] += torch.stack(row)


# ---- storage (section 7 of the rule): every store saturates, then rounds -------------------------------------------


def store(batch: Batch, bundle: Bundle, way: rule.Direction, weight: Tensor, nonfinite: Tensor | None) -> None:
    """Write the new moments and weights of a bundle.

    Args:
        batch: The batch, whose options choose the rounding.
        bundle: Where to write.
        way: The new moments. Overwritten.
        weight: The new weights, with 0 for those that were not finite. Overwritten.
        nonfinite: Which weights are not finite, so that they stay as they are; None if all are finite.
    """
    third = isinstance(way.exp_avg_sq, Tensor) and present(batch.steps[0].exp_avg_sq).dtype in ROUNDED
    bits = NOISE_BITS if EXP_AVG.in_codes(batch) else 16
    noise = bundle.noise(exp_avg_sq=third, moment_bits=bits) if rounds_stochastically(batch) else None
    limit = EXP_AVG.largest(batch)
    store_moment(batch, bundle, EXP_AVG, rule.saturate_(way.exp_avg, limit), None if noise is None else noise.exp_avg)
    if isinstance(way.exp_avg_sq, rule.TileMeans):
        store_means(batch, bundle, ROW_MEANS, way.exp_avg_sq.rows)
        store_means(batch, bundle, COLUMN_MEANS, way.exp_avg_sq.columns)
    elif way.exp_avg_sq is not None:
        store_moment(batch, bundle, EXP_AVG_SQ, way.exp_avg_sq, None if noise is None else noise.exp_avg_sq)
    lr, unless = batch.step_numbers.lr, batch.skip
    if isinstance(lr, Tensor):
        unless = lr == 0 if unless is None else unless | (lr == 0)
    elif lr == 0:
        return  # bit-equal, −0 included
    if batch.steps[0].has_master:
        store_master(batch, bundle, weight, nonfinite, unless)
    else:
        store_weight(batch, bundle, weight, nonfinite, unless, None if noise is None else noise.weight)


def store_weight(
    batch: Batch,
    bundle: Bundle,
    weight: Tensor,
    nonfinite: Tensor | None,
    unless: Tensor | None,
    noise: Tensor | None,
) -> None:
    """Write weights without a master; non-finite ones stay as they were."""
    limit = largest_finite(batch.param_dtype)
    rounded = round_finite_(rule.saturate_(weight, limit), batch.param_dtype, noise)
    if nonfinite is not None:
        rounded = torch.where(nonfinite, bundle.load(param_of, batch.param_dtype), rounded.to(batch.param_dtype))
    bundle.store(param_of, rounded, unless)


def store_master(batch: Batch, bundle: Bundle, weight: Tensor, nonfinite: Tensor | None, unless: Tensor | None) -> None:
    """Write FP32 master weights, whole or as remainders, and the 16-bit weights that are nearest to them."""
    limit = MASTER_CAP_BF16 if batch.param_dtype == torch.bfloat16 else largest_finite(weight.dtype)
    master = rule.saturate_(weight, limit)
    whole = batch.steps[0].master_remainder is None
    if nonfinite is not None:
        master = torch.where(nonfinite, bundle.load(master_param_of if whole else param_of, master.dtype), master)
    param = nearest(master, batch.param_dtype, finite=nonfinite is None)
    if whole:
        bundle.store(master_param_of, master, unless)
    else:
        remainder = remainder_of(master, param)
        if nonfinite is not None:
            remainder.masked_fill_(nonfinite, 0)
        bundle.store(master_remainder_of, remainder, unless)
    bundle.store(param_of, param, unless)


def store_moment(batch: Batch, bundle: Bundle, moment: Moment, value: Tensor, noise: Tensor | None) -> None:
    """Write one moment, already saturated, in its storage format."""
    if moment.in_codes(batch):
        noise = None if noise is None else noise.view(-1, BLOCK)
        codes, scales = encode(value.view(-1, BLOCK), moment.form, noise)
        bundle.store(moment.of, codes.view(-1), batch.skip)
        bundle.store(moment.scale_of, scales, batch.skip, Per.BLOCK)
        return
    bundle.store(moment.of, round_finite_(value, present(moment.of(batch.steps[0])).dtype, noise), batch.skip)


def store_means(batch: Batch, bundle: Bundle, kind: Means, value: Tensor) -> None:
    """Write row or column means of tiles, already saturated."""
    dtype = present(kind.of(batch.steps[0])).dtype
    noisy = batch.options.stochastic_rounding and dtype in ROUNDED
    noise = bundle.noise_per(kind.per, kind.stream) if noisy else None
    bundle.store(kind.of, round_finite_(value, dtype, noise), batch.skip, kind.per)


def rounds_stochastically(batch: Batch) -> bool:
    """Whether anything that a batch stores of each element is rounded with noise."""
    first = batch.steps[0]
    stored = [first.exp_avg, first.exp_avg if first.has_master else first.param]
    stored += [] if first.exp_avg_sq is None or first.in_tiles else [first.exp_avg_sq]
    return batch.options.stochastic_rounding and any(tensor.dtype in ROUNDED for tensor in stored)
