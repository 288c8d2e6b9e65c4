"""The noise and stochastic rounding as Triton device functions; see ``luminav/rounding.py`` for what they compute.

Every 16-bit store rounds in integer arithmetic of our own: interpreters and compilers differ in how they narrow FP32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luminav import blocks, rounding

M0 = tl.constexpr(rounding.ELEMENT_MULTIPLIERS[0])
M1 = tl.constexpr(rounding.ELEMENT_MULTIPLIERS[1])
WEIGHT_STREAM = tl.constexpr(rounding.STREAM_MULTIPLIERS[0])
EXP_AVG_STREAM = tl.constexpr(rounding.STREAM_MULTIPLIERS[1])
EXP_AVG_SQ_STREAM = tl.constexpr(rounding.STREAM_MULTIPLIERS[2])
HIGH_0 = tl.constexpr(rounding.HIGH_WORD_MULTIPLIERS[0])
HIGH_1 = tl.constexpr(rounding.HIGH_WORD_MULTIPLIERS[1])
GOLDEN = tl.constexpr(rounding.GOLDEN)
MIX_A = tl.constexpr(rounding.MIX_A)
MIX_B = tl.constexpr(rounding.MIX_B)

BF16_MAX = tl.constexpr(3.3895313892515355e38)
FP16_MAX = tl.constexpr(65504.0)
FP16_SMALLEST_NORMAL = tl.constexpr(rounding.FP16_SMALLEST_NORMAL)
FP16_ULP_OF_ONE = tl.constexpr(rounding.FP16_ULP_OF_ONE)
MASTER_CAP_BF16 = tl.constexpr(rounding.MASTER_CAP_BF16)

BLOCK = tl.constexpr(blocks.BLOCK)
SHIFT = tl.constexpr(blocks.SHIFT)
EXP_AVG_TOP = tl.constexpr(blocks.EXP_AVG_TOP)
EXP_AVG_SQ_TOP = tl.constexpr(blocks.EXP_AVG_SQ_TOP)
MANTISSAS = tl.constexpr(1 << blocks.MANTISSA_BITS)
ULP = tl.constexpr(1 << blocks.SHIFT)
NOISE_SHIFT = tl.constexpr(blocks.SHIFT - 16)
ONE = tl.constexpr(0x3F800000)
SIGN = tl.constexpr(blocks.SIGN)
HALF = tl.constexpr(blocks.HALF)
LARGEST_CODED = tl.constexpr(blocks.LARGEST_CODED)


@triton.jit
def mix64(word):
    """The finaliser of splitmix64 on uint64."""
    word = (word ^ (word >> 30)) * MIX_A
    word = (word ^ (word >> 27)) * MIX_B
    return word ^ (word >> 31)


@triton.jit
def noise_key(seed, step, param_index):
    """Two uint32 words from uint64 seed, step and parameter index."""
    word = mix64(seed + GOLDEN)
    word = mix64((word ^ param_index) + GOLDEN)
    word = mix64((word ^ step) + GOLDEN)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def element_hash(first, second, low):
    """The word from which an element's streams are drawn; the keys have the high index word in them."""
    x = (low + first) * M0
    x = (x ^ (x >> 16) ^ second) * M1
    return x ^ (x >> 15)


@triton.jit
def stream(x, MULTIPLIER: tl.constexpr):
    """16 noise bits of one stream, uint32."""
    return (x * MULTIPLIER) >> 16


@triton.jit
def to_bf16_bits(x, noise, STOCHASTIC: tl.constexpr):
    """FP32 within the range of BF16 to its bit pattern; `noise` is uint32 in [0, 65535], unused for nearest."""
    bits = x.to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        bits += noise
    else:
        bits += 0x7FFF + ((bits >> 16) & 1)  # ties to even
    return (bits >> 16).to(tl.uint16)


@triton.jit
def to_fp16(x, noise, STOCHASTIC: tl.constexpr):
    """FP32 within the range of FP16 to FP16. Below 2⁻¹⁴ the grid is 2⁻²⁴; product, floor, difference are exact."""
    if STOCHASTIC:
        power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, FP16_SMALLEST_NORMAL)
        ulp = power * FP16_ULP_OF_ONE
        # 1/power from its exponent: compilers may divide approximately.
        inverse = (0x7F000000 - power.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
        scaled = x * inverse * (1.0 / FP16_ULP_OF_ONE)
        below = tl.floor(scaled)
        up = (scaled - below) * 65536.0 > noise.to(tl.int32).to(tl.float32)
        y = (below + tl.where(up, 1.0, 0.0)) * ulp
        x = tl.where(y == 0.0, x * 0.0, y)  # a value that rounds to zero keeps its sign
    return x.to(tl.float16)


@triton.jit
def join_master(upper, remainder):
    """FP32 masters of BF16 patterns in the upper halves of uint32, and int32 remainders; see ``luminav.rounding``."""
    magnitude = upper & 0x7FFF0000
    alone = (magnitude >= 0x7F800000) | ((magnitude == 0) & (remainder < 0))
    return tl.where(alone, upper, upper + remainder.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def nearest_bf16_bits(master):
    """The BF16 weight of a capped FP32 master: half away from zero on the bit pattern; NaN becomes 0x7FC0."""
    bits = master.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x8000) >> 16).to(tl.uint16)
    return tl.where(master == master, rounded, 0x7FC0).to(tl.uint16)


# ---- 8-bit codes; see ``luminav/blocks.py`` --------------------------------------------------------------------------


@triton.jit
def code_base(scale, TOP: tl.constexpr):
    """The FP32 patterns that stand for code 0, as a column, from int32 scales."""
    return ((scale - TOP // MANTISSAS) << 23)[:, None]


@triton.jit
def decode(codes, scales, TOP: tl.constexpr):
    """FP32 [blocks, 64] from uint8 codes and uint8 scales [blocks]."""
    code = codes.to(tl.int32)
    magnitude = code & TOP
    bits = tl.where(magnitude > 0, (magnitude << SHIFT) + code_base(scales.to(tl.int32), TOP), 0)
    if TOP < SIGN:
        bits = bits | ((code & SIGN) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(x, noise, TOP: tl.constexpr, STOCHASTIC: tl.constexpr):
    """uint8 codes and scales of FP32 [blocks, 64]; `noise` is uint32 in [0, 65535], unused for nearest.

    To the bits of ``luminav.blocks.encode`` in fewer instructions, which are what an 8-bit step waits for: 1 +
    noise/2¹⁶ is a bit pattern, and of values raised to the smallest one a threshold decides which are 0.
    """
    magnitude = tl.abs(x)
    largest = tl.max(magnitude, 1).to(tl.int32, bitcast=True)
    scale = tl.maximum((largest + (ULP - 1)) >> 23, TOP // MANTISSAS + 1)
    base = code_base(scale, TOP)
    smallest = (base + ULP).to(tl.float32, bitcast=True)
    if STOCHASTIC:
        place = noise.to(tl.int32)
    else:
        place = tl.full(x.shape, HALF, tl.int32)
    one_and_place = ((place << 7) | ONE).to(tl.float32, bitcast=True)
    above_zero = magnitude > tl.fma(one_and_place, smallest, -smallest)
    raised = tl.maximum(magnitude, smallest).to(tl.int32, bitcast=True)
    code = tl.where(above_zero, (raised - base + (place << NOISE_SHIFT)) >> SHIFT, 0)
    if TOP < SIGN:
        code = code | ((x.to(tl.int32, bitcast=True) >> 24) & SIGN)
    return code.to(tl.uint8), scale.to(tl.uint8)
