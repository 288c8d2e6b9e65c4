"""Where a program's elements are, and how weights and moments are loaded and stored, in every form they are kept in."""

from __future__ import annotations

import triton
import triton.language as tl

from luminav.engines.triton import rounding, rule
from luminav.engines.triton.columns import (
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    NO_MASTER,
    NUM_POINTERS,
    PROGRAMS_PER_ENTRY,
    SPLIT_MASTER,
    WHOLE_MASTER,
)


@triton.jit
def tensor_of(pid, first_tensors, first_programs):
    """Which tensor a program works on: the last one that begins no later, by bisection between two known ones.

    They are the same within a long tensor. Every tensor has a program, so there are at most 64 to search.
    """
    entry = first_tensors + pid // PROGRAMS_PER_ENTRY
    t = tl.load(entry)
    last = tl.load(entry + 1)
    while t < last:
        middle = (t + last + 1) // 2
        is_behind = tl.load(first_programs + middle) > pid
        t = tl.where(is_behind, t, middle)
        last = tl.where(is_behind, middle - 1, last)
    return t


@triton.jit
def place(pid, t, first_programs, numels, SPAN: tl.constexpr, ALIGNED: tl.constexpr):
    """Which of its tensor's programs this is, its first element, and how many are left from there on."""
    chunk = (pid - tl.load(first_programs + t)).to(tl.int64)
    start = chunk * SPAN
    left = tl.minimum(tl.load(numels + t) - start, SPAN).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    return chunk, start, left


@triton.jit
def tensor_pointer(table, row, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr, MATH: tl.constexpr):
    """A pointer out of a table of addresses, `start` elements on.

    NVIDIA's compiler is not told how it came about: it would take the sum apart, and move each tensor's pointer on from
    tile to tile by itself, where all can add the tile's offset.
    """
    pointer = tl.load(table + row).to(tl.pointer_type(TYPE)) + start
    if ALIGNED and MATH != rule.PORTABLE:
        address = tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [pointer.to(tl.int64)], tl.int64, is_pure=True, pack=1
        )
        pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def master_pointer(table, row, start, FORM: tl.constexpr, ALIGNED: tl.constexpr, MATH: tl.constexpr):
    """The pointer to master weights, or to remainders."""
    TYPE: tl.constexpr = tl.int16 if FORM == SPLIT_MASTER else tl.float32
    return tensor_pointer(table, row, start, TYPE, ALIGNED, MATH)


@triton.jit
def tile(first, left, stride, BLOCK: tl.constexpr, IN_BLOCKS: tl.constexpr, TILES: tl.constexpr):
    """Offsets of a program's elements from `first` to `first` + BLOCK, and which of them are below `left`.

    For state in blocks they are [blocks, 64]: TILES blocks of a row, then as many of the next one, which begins
    `stride` elements later. Where elements are consecutive every block is such a row.
    """
    if IN_BLOCKS:
        begin = first // (rounding.BLOCK * TILES) * stride
        block = tl.arange(0, BLOCK // rounding.BLOCK)
        block = block // TILES * stride + block % TILES * rounding.BLOCK
        inside = block[:, None] + tl.arange(0, rounding.BLOCK)[None, :]
        return begin + inside, inside < left - begin
    else:
        offsets = first + tl.arange(0, BLOCK)
        return offsets, offsets < left


@triton.jit
def zeros(BLOCK: tl.constexpr, TYPE: tl.constexpr, IN_BLOCKS: tl.constexpr, TOGETHER: tl.constexpr):
    """Zeros shaped like :func:`tile`, one for so many neighbours."""
    if IN_BLOCKS:
        return tl.zeros([BLOCK // rounding.BLOCK, rounding.BLOCK // TOGETHER], TYPE)
    else:
        return tl.zeros([BLOCK // TOGETHER], TYPE)


@triton.jit
def total(x, IN_BLOCKS: tl.constexpr):
    """Sum over a tile."""
    if IN_BLOCKS:
        return tl.sum(tl.sum(x, 1), 0)
    else:
        return tl.sum(x, 0)


@triton.jit
def block_tile(first, left, stride, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """For a :func:`tile` in blocks: offsets of what is kept per block, and which blocks there are."""
    row = first // (rounding.BLOCK * TILES)
    block = tl.arange(0, BLOCK // rounding.BLOCK)
    rows = block // TILES
    return (row + rows) * (stride // rounding.BLOCK) + block % TILES, rows * stride < left - row * stride


@triton.jit
def state_pointers(
    pointers, t, start, MOMENT: tl.constexpr, SHARED: tl.constexpr, ALIGNED: tl.constexpr, MATH: tl.constexpr
):
    """A program's part of exp_avg and exp_avg_sq, and of the scales of their 8-bit codes."""
    row = t * NUM_POINTERS
    block = start // rounding.BLOCK  # of a tile, not a multiple of anything
    IN_VECTORS: tl.constexpr = ALIGNED and not SHARED
    if SHARED:
        exp_avg_sq = tensor_pointer(pointers, row + EXP_AVG_SQ, block, tl.bfloat16, IN_VECTORS, MATH)
    else:
        exp_avg_sq = tensor_pointer(pointers, row + EXP_AVG_SQ, start, MOMENT, ALIGNED, MATH)
    return (
        tensor_pointer(pointers, row + EXP_AVG, start, MOMENT, ALIGNED, MATH),
        exp_avg_sq,
        tensor_pointer(pointers, row + EXP_AVG_SCALE, block, tl.uint8, IN_VECTORS, MATH),
        tensor_pointer(pointers, row + EXP_AVG_SQ_SCALE, block, tl.uint8, IN_VECTORS, MATH),
    )


@triton.jit
def load_moment(
    pointer, scales, first, left, stride, offsets, mask, TYPE: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """A moment as it is stored, where SHARED the row means of tiles; and the scales of 8-bit codes, [blocks, 1]."""
    rows, inside = block_tile(first, left, stride, BLOCK, TILES)
    if SHARED:
        return load_stored(pointer, rows, inside, tl.bfloat16), 0
    elif tl.uint8 == TYPE:
        scale = tl.load((scales + rows)[:, None], mask=inside[:, None], other=0)
        return tl.load(pointer + offsets, mask=mask, other=0), scale
    else:
        return load_stored(pointer, offsets, mask, TYPE), 0


@triton.jit
def widen_moment(
    stored, scale, beta, TYPE: tl.constexpr, SIGNED: tl.constexpr, SHARED: tl.constexpr, MATH: tl.constexpr
):
    """A moment as FP32, and what it decays by.

    The factor of 8-bit codes goes with the decay rate, which is what multiplies a moment first.
    """
    if SHARED:
        return widen_row_means(stored), beta
    elif tl.uint8 == TYPE:
        value, factor = rounding.decode(stored, scale.to(tl.int32), SIGNED, MATH != rule.PORTABLE)
        return value, factor * beta
    else:
        return widen(stored, TYPE, MATH), beta


@triton.jit
def widen_row_means(stored):
    """Means of tiles, which are few, as FP32."""
    return rounding.from_bf16_bits(stored, False)


@triton.jit
def load_tile(
    grad, param, master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, first, left, stride,
    GRAD: tl.constexpr, PARAM_TYPE: tl.constexpr, MASTER_FORM: tl.constexpr, MOMENT: tl.constexpr,
    DUAL: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """All of a tile as it is stored: gradient, weight, remainder, and the moments with their scales.

    What is not there is 0, a whole master stands in place of the weight, and exp_avg in place of exp_avg_sq.
    """
    offsets, mask = tile(first, left, stride, BLOCK, SHARED or tl.uint8 == MOMENT, TILES)
    g = load_stored(grad, offsets, mask, GRAD)
    m, m_scale = load_moment(exp_avg, exp_avg_scale, first, left, stride, offsets, mask, MOMENT, False, BLOCK, TILES)
    v, v_scale = m, m_scale
    if DUAL:
        v, v_scale = load_moment(
            exp_avg_sq, exp_avg_sq_scale, first, left, stride, offsets, mask, MOMENT, SHARED, BLOCK, TILES
        )
    remainder = 0
    if MASTER_FORM == WHOLE_MASTER:
        p = tl.load(master + offsets, mask=mask, other=0.0)
    else:
        p = load_stored(param, offsets, mask, PARAM_TYPE)
        if MASTER_FORM == SPLIT_MASTER:
            remainder = tl.load(master + offsets, mask=mask, other=0)
    return g, p, remainder, m, v, m_scale, v_scale


@triton.jit
def store_moment(
    pointer, scales, first, left, stride, offsets, mask, x, noise, TYPE: tl.constexpr, SIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, MATH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store a moment of every element in the form in which :func:`load_moment` reads it; exp_avg_sq is saturated."""
    if tl.uint8 == TYPE:
        rows, inside = block_tile(first, left, stride, BLOCK, TILES)
        codes, scale = rounding.encode(x, noise, SIGNED, STOCHASTIC, MATH != rule.PORTABLE)
        tl.store(pointer + offsets, codes, mask=mask)
        tl.store((scales + rows)[:, None], scale.to(tl.uint8), mask=inside[:, None])
    else:
        stored = rounded(x, noise, TYPE, STOCHASTIC, SIGNED, PAIRS)
        tl.store(stored_pointer(pointer, TYPE) + offsets, stored, mask=mask)


@triton.jit
def load_stored(pointer, offsets, mask, TYPE: tl.constexpr):
    """Values as they are stored, 0 outside the mask; of BF16 the bit patterns."""
    return tl.load(stored_pointer(pointer, TYPE) + offsets, mask=mask, other=0)


@triton.jit
def stored_pointer(pointer, TYPE: tl.constexpr):
    """A pointer to values as they are stored; to bit patterns of BF16."""
    if tl.bfloat16 == TYPE:
        return pointer.to(tl.pointer_type(tl.uint16))
    else:
        return pointer


@triton.jit
def widen(stored, TYPE: tl.constexpr, MATH: tl.constexpr):
    """FP32 from what :func:`load_stored` gives.

    BF16 is widened by hand: interpreters miss its subnormals, and compilers take three instructions for two elements.
    """
    if tl.bfloat16 == TYPE:
        return rounding.from_bf16_bits(stored, MATH != rule.PORTABLE)
    else:
        return stored.to(tl.float32)


@triton.jit
def widen_weight(stored, remainder, TYPE: tl.constexpr, FORM: tl.constexpr, MATH: tl.constexpr):
    """Weights in full, as FP32."""
    if FORM == WHOLE_MASTER:
        return stored
    elif FORM == SPLIT_MASTER:
        upper = rounding.from_bf16_bits(stored, MATH != rule.PORTABLE).to(tl.uint32, bitcast=True)
        return rounding.join_master(upper, remainder.to(tl.int32))
    else:
        return widen(stored, TYPE, MATH)


@triton.jit
def finite_weight(stored, before, TYPE: tl.constexpr, FORM: tl.constexpr, MATH: tl.constexpr, PAIRS: tl.constexpr):
    """FP32 weights with 0 for those that are not finite, and which ones these are."""
    if PAIRS and FORM == NO_MASTER and tl.bfloat16 == TYPE:
        special = rounding.special_mask(stored)
        return rounding.from_finite_bits(stored, special), special
    else:
        special = rule.is_special(before)
        return tl.where(special, 0.0, before), special


@triton.jit
def clean_grad(stored, grad_scale, TYPE: tl.constexpr, SCALED: tl.constexpr, MATH: tl.constexpr, PAIRS: tl.constexpr):
    """The gradient as the rule sees it, FP32, and which of the stored elements are not finite."""
    if PAIRS and tl.bfloat16 == TYPE:
        special = rounding.special_mask(stored)
        g = rounding.from_finite_bits(stored, special)
        if SCALED:
            g = rule.clean_grad(g, grad_scale, SCALED)
    else:
        g = widen(stored, TYPE, MATH)
        special = rule.is_special(g)
        g = rule.clean_grad(g, grad_scale, SCALED)
    return g, special


@triton.jit
def rounded(x, noise, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr, SATURATE: tl.constexpr, PAIRS: tl.constexpr):
    """FP32 values as they are stored in TYPE; with SATURATE those beyond its finite range as its largest.

    BF16 in pairs is brought back into its range when it is rounded, two at a time.
    """
    if tl.bfloat16 == TYPE:
        if SATURATE and not PAIRS:
            x = saturate(x, TYPE)
        bits = rounding.to_bf16_bits(x, noise, STOCHASTIC, PAIRS)
        if SATURATE and PAIRS:
            bits = rounding.within_range(bits)
        return bits
    else:
        if SATURATE:
            x = saturate(x, TYPE)
        if tl.float16 == TYPE:
            x = rounding.to_fp16(x, noise, STOCHASTIC)
        return x


@triton.jit
def saturate(x, TYPE: tl.constexpr):
    """x within the finite range of TYPE."""
    return tl.minimum(tl.maximum(x, -largest(TYPE)), largest(TYPE))


@triton.jit
def largest(TYPE: tl.constexpr):
    """The largest finite value of a storage type."""
    if tl.bfloat16 == TYPE:
        return rounding.BF16_MAX
    elif tl.float16 == TYPE:
        return rounding.FP16_MAX
    else:
        return rule.FP32_MAX


@triton.jit
def noise_words(key, first_index, start, OFFSET: tl.constexpr):
    """The tensor's noise key with the high index word mixed in, and the low word of the program's first element.

    Programs start at multiples of their size, so the high word is the same in a program. With OFFSET (a shard) it is so
    because shards that reach beyond 2³² elements go to another engine.
    """
    index = start.to(tl.uint64)
    if OFFSET:
        index += tl.load(first_index).to(tl.uint64)
    high = (index >> 32).to(tl.uint32)
    first = tl.load(key).to(tl.uint32, bitcast=True) + high * rounding.HIGH_0
    second = tl.load(key + 1).to(tl.uint32, bitcast=True) + high * rounding.HIGH_1
    return first, second, index.to(tl.uint32)


@triton.jit
def store_weight(
    param, offsets, mask, moved, stored, special, noise, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Weights without a master. Non-finite ones are stored as they were: a mask per element would cost the vectors."""
    new = rounded(moved, noise, TYPE, STOCHASTIC, True, PAIRS)
    if special.dtype == tl.uint16:
        new = rounding.select_bits(special, stored, new)
    else:
        new = tl.where(special, stored, new)
    tl.store(stored_pointer(param, TYPE) + offsets, new, mask=mask)


@triton.jit
def store_master(master, param, offsets, mask, moved, before, special, TYPE: tl.constexpr, FORM: tl.constexpr):
    """FP32 master weights, whole or as remainders, and the 16-bit weights that are nearest to them."""
    limit = rounding.MASTER_CAP_BF16 if tl.bfloat16 == TYPE else rule.FP32_MAX
    capped = tl.where(special, before, tl.minimum(tl.maximum(moved, -limit), limit))
    if FORM == WHOLE_MASTER:
        tl.store(master + offsets, capped, mask=mask)
    if tl.bfloat16 == TYPE:
        bits = rounding.nearest_bf16_bits(capped)
        if FORM == SPLIT_MASTER:
            lower = capped.to(tl.int32, bitcast=True) - (bits.to(tl.uint32) << 16).to(tl.int32, bitcast=True)
            tl.store(master + offsets, tl.where(special, 0, lower).to(tl.int16), mask=mask)
        tl.store(param.to(tl.pointer_type(tl.uint16)) + offsets, bits, mask=mask)
    else:
        clamped = tl.minimum(tl.maximum(capped, -rounding.FP16_MAX), rounding.FP16_MAX)
        tl.store(param + offsets, tl.where(special, capped, clamped).to(tl.float16), mask=mask)
