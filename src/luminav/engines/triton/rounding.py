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
EXP_AVG_SQ_COL_STREAM = tl.constexpr(rounding.STREAM_MULTIPLIERS[3])
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
SIGN = tl.constexpr(blocks.SIGN)
NOISE_BITS = tl.constexpr(blocks.NOISE_BITS)
HALF = tl.constexpr(blocks.HALF)
UP = tl.constexpr(blocks.UP)
LARGEST_SCALE = tl.constexpr(blocks.LARGEST_SCALE)
# Of the formats of 8-bit codes; SIGNED is that of exp_avg, the other one that of exp_avg_sq.
EXP_AVG_TOP = tl.constexpr(blocks.EXP_AVG_FORMAT.top)
EXP_AVG_SHIFT = tl.constexpr(blocks.EXP_AVG_FORMAT.shift)
EXP_AVG_BINADES = tl.constexpr(blocks.EXP_AVG_FORMAT.binades)
EXP_AVG_SMALLEST_SCALE = tl.constexpr(blocks.EXP_AVG_FORMAT.smallest_scale)
EXP_AVG_SQ_TOP = tl.constexpr(blocks.EXP_AVG_SQ_FORMAT.top)
EXP_AVG_SQ_SHIFT = tl.constexpr(blocks.EXP_AVG_SQ_FORMAT.shift)
EXP_AVG_SQ_BINADES = tl.constexpr(blocks.EXP_AVG_SQ_FORMAT.binades)
EXP_AVG_SQ_SMALLEST_SCALE = tl.constexpr(blocks.EXP_AVG_SQ_FORMAT.smallest_scale)


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
def stream(x, MULTIPLIER: tl.constexpr, BITS: tl.constexpr):
    """Noise bits of one stream, uint32."""
    return (x * MULTIPLIER) >> (32 - BITS)


@triton.jit
def moment_stream(x, SIGNED: tl.constexpr, MOMENT: tl.constexpr):
    """Noise bits of the stream of exp_avg (SIGNED) or exp_avg_sq: as many as its storage type cuts off."""
    MULTIPLIER: tl.constexpr = EXP_AVG_STREAM if SIGNED else EXP_AVG_SQ_STREAM
    SHIFT: tl.constexpr = EXP_AVG_SHIFT if SIGNED else EXP_AVG_SQ_SHIFT
    return stream(x, MULTIPLIER, SHIFT if tl.uint8 == MOMENT else 16)


@triton.jit
def from_bf16_bits(bits, PTX: tl.constexpr):
    """FP32 from uint16 bit patterns of BF16; with PTX two at a time."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [bits], tl.float32, is_pure=True, pack=2
        )
    else:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16_bits(x, noise, STOCHASTIC: tl.constexpr, PTX: tl.constexpr):
    """FP32 to the bit pattern of BF16, infinity beyond its range; `noise` is uint32 in [0, 65535], unused for nearest.

    With PTX two at a time.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        bits += noise
    else:
        bits += 0x7FFF + ((bits >> 16) & 1)  # ties to even
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [bits], tl.uint16, is_pure=True, pack=2
        )
    else:
        return (bits >> 16).to(tl.uint16)


# Bit patterns of BF16 two at a time, as NVIDIA GPUs compare them from sm_90 on.


@triton.jit
def special_mask(bits):
    """0xFFFF where a pattern is that of NaN or ±inf, else 0, uint16."""
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 magnitude, largest;
            mov.b32 largest, 0x7f7f7f7f;
            abs.bf16x2 magnitude, $1;
            set.gtu.u32.bf16x2 $0, magnitude, largest;
        }""", "=r,r", [bits], tl.uint16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def within_range(bits):
    """The largest finite pattern of the same sign in place of ±inf."""
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 largest;
            mov.b32 largest, 0x7f7f7f7f;
            min.xorsign.abs.bf16x2 $0, $1, largest;
        }""", "=r,r", [bits], tl.uint16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def from_finite_bits(bits, special):
    """FP32 from bit patterns of BF16, 0 where the mask of special ones is."""
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 low;
            lop3.b32 low, $2, $3, 0, 0x30;
            shl.b32 $0, low, 16;
            lop3.b32 $1, $2, $3, 0xffff0000, 0x20;
        }""", "=f,=f,r,r", [bits, special], tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def select_bits(mask, there, elsewhere):
    """Bits of one uint16 where the mask has a bit, of another one elsewhere."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [mask, there, elsewhere], tl.uint16, is_pure=True, pack=2
    )


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
def power_of_two(exponents):
    """FP32 powers of two with these biased exponents."""
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode(codes, scales, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """uint8 codes [blocks, 64] as FP32, and the factors that make them values, from int32 scales [blocks, 1]."""
    TOP: tl.constexpr = EXP_AVG_TOP if SIGNED else EXP_AVG_SQ_TOP
    SHIFT: tl.constexpr = EXP_AVG_SHIFT if SIGNED else EXP_AVG_SQ_SHIFT
    BINADES: tl.constexpr = EXP_AVG_BINADES if SIGNED else EXP_AVG_SQ_BINADES
    if PTX:
        value = tl.inline_asm_elementwise(
            UNPACK_EXP_AVG if SIGNED else UNPACK_EXP_AVG_SQ, "=f,=f,=f,=f,r", [codes], tl.float32, is_pure=True, pack=4
        )
    else:
        code = codes.to(tl.int32)
        pattern = (code & TOP) << (SHIFT - 13)  # FP16's mantissa has 13 bits less than FP32's
        if SIGNED:
            pattern = pattern | ((code & SIGN) << 8)
        value = pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value, power_of_two(scales + (15 - BINADES))


@triton.jit
def encode(x, noise, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, PTX: tl.constexpr):
    """uint8 codes and int32 scales [blocks, 1] of FP32 [blocks, 64]; `noise` is uint32, unused for nearest.

    The device must have FP32's subnormals. With PTX four codes are packed at a time.
    """
    TOP: tl.constexpr = EXP_AVG_TOP if SIGNED else EXP_AVG_SQ_TOP
    SHIFT: tl.constexpr = EXP_AVG_SHIFT if SIGNED else EXP_AVG_SQ_SHIFT
    BINADES: tl.constexpr = EXP_AVG_BINADES if SIGNED else EXP_AVG_SQ_BINADES
    SMALLEST_SCALE: tl.constexpr = EXP_AVG_SMALLEST_SCALE if SIGNED else EXP_AVG_SQ_SMALLEST_SCALE
    largest = tl.max(tl.abs(x), 1, keep_dims=True).to(tl.int32, bitcast=True)
    ULP: tl.constexpr = 2**SHIFT
    scale = tl.maximum((largest + (ULP - 1)) >> 23, SMALLEST_SCALE)
    DOWN: tl.constexpr = 2.0 ** (127 - UP + BINADES)
    pattern = (x * power_of_two(-scale + UP) * DOWN).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        pattern += noise.to(tl.int32, bitcast=True)
    else:
        pattern += HALF >> (NOISE_BITS - SHIFT)
    if PTX:
        code = tl.inline_asm_elementwise(
            PACK_EXP_AVG if SIGNED else PACK_EXP_AVG_SQ, "=r,r,r,r,r", [pattern], tl.uint8, is_pure=True, pack=4
        )
    else:
        code = (pattern >> SHIFT) & TOP
        if SIGNED:
            code = code | ((pattern >> 24) & SIGN)
        code = code.to(tl.uint8)
    return code, tl.minimum(scale, LARGEST_SCALE)


# Bytes, lowest first, to FP16 patterns: a byte is put into the upper half of each 16 bits and moved down.
_UNPACK = """{{
    .reg .b32 low, high, moved;
    .reg .b16 a, b;
    prmt.b32 low, $4, 0, 0x1404;
    prmt.b32 high, $4, 0, 0x3424;
    {low}
    {high}
    mov.b32 {{a, b}}, low;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    mov.b32 {{a, b}}, high;
    cvt.f32.f16 $2, a;
    cvt.f32.f16 $3, b;
}}"""
_MOVE = "shr.u32 {0}, {0}, 2;"
_MOVE_SIGNED = """shr.u32 moved, {0}, 3;
    and.b32 moved, moved, 0x0fe00fe0;
    lop3.b32 {0}, {0}, 0x80008000, moved, 0xEA; // its sign, and the rest moved"""
UNPACK_EXP_AVG_SQ = tl.constexpr(_UNPACK.format(low=_MOVE.format("low"), high=_MOVE.format("high")))
UNPACK_EXP_AVG = tl.constexpr(_UNPACK.format(low=_MOVE_SIGNED.format("low"), high=_MOVE_SIGNED.format("high")))

# FP32 patterns with a code at bit 18 or 19 to bytes: the upper halves of two at a time, moved down by two or three.
_PACK = """{{
    .reg .b32 low, high, sign;
    prmt.b32 low, $1, $2, 0x7632;
    prmt.b32 high, $3, $4, 0x7632;
    {low}
    {high}
    prmt.b32 $0, low, high, 0x6420;
}}"""
_DROP = "shr.u32 {0}, {0}, 3;"
_DROP_SIGNED = """shr.u32 sign, {0}, 8;
    shr.u32 {0}, {0}, 2;
    lop3.b32 {0}, {0}, sign, 0x007f007f, 0xE4; // 7 bits of the first, the one above of the second"""
PACK_EXP_AVG_SQ = tl.constexpr(_PACK.format(low=_DROP.format("low"), high=_DROP.format("high")))
PACK_EXP_AVG = tl.constexpr(_PACK.format(low=_DROP_SIGNED.format("low"), high=_DROP_SIGNED.format("high")))
