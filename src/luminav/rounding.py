"""The noise and stochastic rounding, in torch integer operations.

**Noise.** Stochastic rounding needs 16 random bits per stored value. They come from no generator but from a hash of
(seed, step, parameter index, element index, stream), so that a resumed run, another engine and a sharded run draw the
same bits. One parameter's step has a :class:`NoiseKey`, two 32-bit words from a splitmix64 chain (Steele, Lea &
Flood 2014, doi 10.1145/2660193.2660195). Each element then goes through two multiply–xorshift rounds of 32-bit
arithmetic and a last product for each stream, a finaliser of the kind of MurmurHash3, with the key entering *between*
the rounds too: two keys never give shifted copies of one sequence, which ``hash(index + seed)`` would.

**Rounding.** A BF16 value is the upper half of an FP32 bit pattern. Adding a uniform 16-bit integer to the pattern and
cutting the lower half carries into the upper half with probability (lower half) / 2¹⁶, which is exactly the value's
place between its two neighbours; for either sign, and in BF16's subnormals too, since both formats share exponents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Word: TypeAlias = int | Tensor
"""A Python int in two's-complement range, or an integer tensor: the hash is written once for both."""

# splitmix64: the increment (2⁶⁴ / golden ratio) and the two multipliers of its finaliser.
GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB

# Odd 32-bit multipliers of the element hash. The first two are those of lowbias32, found by search for the least
# avalanche bias (C. Wellons, "Prospecting for Hash Functions", 2018); the others are odd constants of high entropy.
# The streams are products of one word, so no small a, b may give a·M ≡ b·M′ modulo 2ᵏ, k = 17…32: |a·b| ≥ 0.0198·2ᵏ
# here. With 0x9E3779B1 and 0xC2B2AE3D, a pair with 0.0023·2²⁰, the low four bits of two streams differed from
# independence by 1 % (χ² 15 deviations off over 2²² draws).
ELEMENT_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
STREAM_MULTIPLIERS = (0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2D, 0xC4F2152B)
HIGH_WORD_MULTIPLIERS = (0x27D4EB2F, 0x165667B1)

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
"""The dtypes that are rounded to, and that can have a master weight."""

FP16_SMALLEST_NORMAL = 2.0**-14
FP16_ULP_OF_ONE = 2.0**-10
NOISE_RANGE = 65536.0

MASTER_CAP_BF16 = 3.396177326406364e38
"""0x7F7F7FFF: the largest FP32 master whose nearest BF16 value (half away from zero) is finite."""


def signed(word: int, bits: int) -> int:
    """`word` modulo 2**bits, as the signed integer with those bits (what an integer tensor would hold)."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


def _shift_right(word: Word, shift: int, bits: int) -> Word:
    """Logical right shift; torch's is arithmetic, so the copies of the sign are masked away."""
    shifted, mask = word >> shift, (1 << (bits - shift)) - 1
    return shifted.bitwise_and_(mask) if isinstance(shifted, Tensor) else shifted & mask


def _multiply64(word: Word, factor: int) -> Word:
    product = word * signed(factor, 64)
    return signed(product, 64) if isinstance(product, int) else product


def _add64(word: Word, term: Word) -> Word:
    total = word + (signed(term, 64) if isinstance(term, int) else term)
    return signed(total, 64) if isinstance(total, int) else total


def mix64(word: Word) -> Word:
    """The finaliser of splitmix64: a bijection of 64-bit words in which every input bit reaches every output bit."""
    word = _multiply64(word ^ _shift_right(word, 30, 64), MIX_A)
    word = _multiply64(word ^ _shift_right(word, 27, 64), MIX_B)
    return word ^ _shift_right(word, 31, 64)


@dataclass(frozen=True)
class NoiseKey:
    """Two 32-bit words that select one parameter's noise in one step.

    Each is a Python int in [−2³¹, 2³¹), or an int32 tensor: 0-dim when the step count lives on the device, or one
    value per element when several parameters lie side by side in one buffer.
    """

    first: Word
    second: Word


def noise_key(seed: int, step: Word, param_index: int) -> NoiseKey:
    """The key of parameter number `param_index` in its step `step`.

    Args:
        seed: The option ``seed``, in [0, 2⁶³).
        step: The parameter's own step count, an int or a 0-dim int64 tensor.
        param_index: The parameter's position in the optimizer.

    Returns:
        The key; 0-dim int32 tensors on the step's device if `step` is a tensor, else Python ints.
    """
    word = mix64(_add64(signed(seed, 64), GOLDEN))
    word = mix64(_add64(word ^ param_index, GOLDEN))
    word = mix64(_add64(word ^ step, GOLDEN))
    return NoiseKey(_low32(word), _low32(_shift_right(word, 32, 64)))


def _low32(word: Word) -> Word:
    if isinstance(word, int):
        return signed(word, 32)
    return word.to(torch.int32)  # integer conversion keeps the low bits


@dataclass(frozen=True)
class Noise:
    """Uniform integers, int32, one tensor per stream: in [0, 65535] for weights, in [0, 2^moment_bits) for moments."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor | None


def element_noise(
    key: NoiseKey, index: Tensor, high: Word = 0, *, start: int = 0, exp_avg_sq: bool = True, moment_bits: int = 16
) -> Noise:
    """Noise bits per element for each stream, 16 for the weights.

    Args:
        key: The parameter's key for this step.
        index: int32 tensor, the low 32 bits of each element's row-major index in the unsharded parameter.
        high: The upper 32 bits of the index, an int or an int32 tensor.
        start: Added to `index`, so that consecutive elements need no tensor of their own.
        exp_avg_sq: Whether the third stream is needed.
        moment_bits: How many the moments need: as many as rounding cuts off.

    Returns:
        The streams, shaped like `index`.
    """
    x = element_words(key, index, high, start)
    third = stream_of(x, 2, moment_bits) if exp_avg_sq else None
    return Noise(stream_of(x, 0, 16), stream_of(x, 1, moment_bits), third)


def element_words(key: NoiseKey, index: Tensor, high: Word = 0, start: int = 0) -> Tensor:
    """The words from which elements' streams are drawn, int32; arguments as for :func:`element_noise`."""
    x = index + _add32(_add32(key.first, start), _multiply32(high, HIGH_WORD_MULTIPLIERS[0]))
    x.mul_(signed(ELEMENT_MULTIPLIERS[0], 32))
    x.bitwise_xor_(_shift_right(x, 16, 32))
    # Exclusive or, not a sum: where two keys' first words are a shift apart, sums would differ by a constant here, and
    # 1 key pair in 250 correlated at that shift (|ρ| up to 0.026 over 2²⁰ draws; none of 3000 pairs with xor).
    x.bitwise_xor_(_add32(key.second, _multiply32(high, HIGH_WORD_MULTIPLIERS[1])))
    x.mul_(signed(ELEMENT_MULTIPLIERS[1], 32))
    return x.bitwise_xor_(_shift_right(x, 15, 32))


def stream_of(x: Tensor, number: int, bits: int) -> Tensor:
    """Noise bits of stream `number`: the upper ones of one more product, where every bit of x has had its effect."""
    return (x * signed(STREAM_MULTIPLIERS[number], 32)).bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)


def _add32(word: Word, term: Word) -> Word:
    total = word + term
    return signed(total, 32) if isinstance(total, int) else total


def _multiply32(word: Word, factor: int) -> Word:
    product = word * signed(factor, 32)
    return signed(product, 32) if isinstance(product, int) else product


def largest_finite(dtype: torch.dtype) -> float:
    """The largest finite value of a storage dtype, to which larger finite values saturate."""
    return torch.finfo(dtype).max


def finite_part(value: Tensor) -> Tensor:
    """A copy of `value` with zeros for ±inf and NaN."""
    return torch.nan_to_num(value, 0.0, 0.0, 0.0)


def special_factor(value: Tensor, finite: Tensor) -> Tensor:
    """1 where `value` is finite, +inf at ±inf, NaN at NaN.

    Multiplying a non-zero number of the right sign by it puts the specials back and keeps −0, without a select:
    on the CPU ``torch.where`` costs as much as twenty arithmetic passes.
    """
    return torch.sub(value, finite).abs_().add_(1.0)


def round_finite_(value: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    """Round finite FP32 values to the grid of a 16-bit dtype, in place; they stay FP32.

    Args:
        value: FP32, finite, at most ``largest_finite(dtype)`` in magnitude. Overwritten.
        dtype: ``torch.bfloat16`` or ``torch.float16``; any other dtype returns `value` as it is.
        noise: Uniform int32 in [0, 65535] for stochastic rounding. None leaves nearest rounding, ties to even, to the
            conversion that follows.

    Returns:
        `value`, exactly representable in `dtype` where noise was given.
    """
    if noise is None:
        return value
    if dtype == torch.bfloat16:
        return _stochastic_bf16_(value, noise)
    if dtype == torch.float16:
        return _stochastic_fp16_(value, noise)
    return value


def _stochastic_bf16_(value: Tensor, noise: Tensor) -> Tensor:
    bits = value.view(torch.int32)
    bits.add_(noise).bitwise_and_(-65536)
    return value


def _stochastic_fp16_(value: Tensor, noise: Tensor) -> Tensor:
    """Below 2⁻¹⁴ FP16 has a fixed grid of 2⁻²⁴, so the grid's step is found first and the place between measured on it.

    Every quotient, floor and difference here is exact: the steps are powers of two.
    """
    exponent = (
        value.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    )  # the power of two at or below |value|
    ulp = exponent.clamp_min_(FP16_SMALLEST_NORMAL).mul_(FP16_ULP_OF_ONE)
    scaled = value / ulp
    below = torch.floor(scaled)
    place = scaled.sub_(below).mul_(NOISE_RANGE)
    up = torch.gt(place, noise.to(torch.float32), out=place)
    torch.copysign(below.add_(up).mul_(ulp), value, out=value)  # a value that rounds to zero keeps its sign
    return value


def stochastic_round(value: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round any FP32 tensor stochastically to a 16-bit dtype.

    Args:
        value: FP32, any shape. Not changed.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        noise: Uniform int32 in [0, 65535], shaped like `value`.

    Returns:
        A tensor of `dtype`: each finite value becomes one of its two neighbours, the upper with probability equal to
        its place between them (to 2⁻¹⁶); representable values, ±0, ±inf and NaN are unchanged; finite values beyond
        the largest finite one become that one.

    Raises:
        TypeError: `value` is not FP32 or `dtype` is not a 16-bit float.
    """
    if value.dtype != torch.float32 or dtype not in SIXTEEN_BIT:
        raise TypeError(
            f"stochastic_round takes FP32 to torch.bfloat16 or torch.float16, got {value.dtype} to {dtype}."
        )
    special = special_factor(value, finite_part(value))
    limit = largest_finite(dtype)
    return round_finite_(value.clamp(-limit, limit), dtype, noise).mul_(special).to(dtype)


def remainder_of(master: Tensor, weight: Tensor) -> Tensor:
    """What a BF16 weight lacks of its FP32 master: master = weight + remainder, on the bit patterns.

    Args:
        master: FP32 master weights, any shape.
        weight: Their :func:`nearest` BF16 weights, of the same shape.

    Returns:
        int16, −2¹⁵ … 2¹⁵−1; without meaning where the master is not finite.
    """
    return master.view(torch.int32).sub(widened_bits(weight)).to(torch.int16)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 master of a BF16 weight and its remainder.

    Args:
        weight: BF16, any shape.
        remainder: int16, of the same shape.

    Returns:
        FP32. Weights written from outside keep their old remainder, but for those that could not have it: one that is
        not finite has none, and zero none below it, which would lie on the other side of the sign, among the NaNs.
    """
    bits = widened_bits(weight)
    alone = torch.isfinite(weight).logical_not_().logical_or_((weight == 0) & (remainder < 0))
    return torch.where(alone, bits, bits + remainder).view(torch.float32)


def widened_bits(weight: Tensor) -> Tensor:
    """The bit patterns of BF16 weights as FP32, int32."""
    return weight.to(torch.float32).view(torch.int32)


def nearest(master: Tensor, dtype: torch.dtype, *, finite: bool = False) -> Tensor:
    """The 16-bit weight that belongs to an FP32 master weight.

    Args:
        master: FP32 master weights, any shape. Not changed.
        dtype: The parameter's dtype. BF16 rounds half away from zero on the bit pattern, so that master = weight +
            16-bit remainder holds exactly; FP16 rounds ties to even.
        finite: Whether all elements are known to be finite, which saves the passes for the others.

    Returns:
        A tensor of `dtype`, saturated to its finite range. ±inf and NaN stay what they are; for BF16 every NaN is
        0x7FC0, which torch's own conversion leaves to the layout and the instruction set.
    """
    if dtype == torch.bfloat16:
        pattern = master.clamp(-MASTER_CAP_BF16, MASTER_CAP_BF16).view(torch.int32).add_(0x8000)
        upper = pattern.bitwise_right_shift_(16).to(torch.int16)
        if not finite:
            upper.masked_fill_(master == math.inf, signed(0x7F80, 16)).masked_fill_(
                master == -math.inf, signed(0xFF80, 16)
            )
            upper.masked_fill_(torch.isnan(master), 0x7FC0)
        return upper.view(torch.bfloat16)
    limit = min(largest_finite(dtype), largest_finite(master.dtype))  # FP64 weights of a model that is converted now
    rounded = master.clamp(-limit, limit).to(dtype)
    return rounded if finite else torch.where(torch.isinf(master), master.to(dtype), rounded)
