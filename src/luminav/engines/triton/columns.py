"""The columns of the tables in ``tables.py``, by which the kernels read and write them."""

from __future__ import annotations

import triton.language as tl

from luminav import rule

# Columns of `pointers`.
(
    PARAM, EXP_AVG, EXP_AVG_SQ, MASTER, EXP_AVG_SCALE, EXP_AVG_SQ_SCALE, EXP_AVG_SQ_COL, ROW_LENGTH,
) = (tl.constexpr(i) for i in range(8))  # fmt: skip
NUM_POINTERS = tl.constexpr(8)

# How a weight is kept: in the parameter, in an FP32 master, or in a BF16 parameter and a 16-bit remainder.
NO_MASTER, WHOLE_MASTER, SPLIT_MASTER = (tl.constexpr(i) for i in range(3))

# Columns of `numbers`: one 64-byte row per tensor.
(
    BETA1, ONE_MINUS_BETA1, BETA2, ROOT_ONE_MINUS_BETA2, SIGMA_SCALE, SIGMA_FLOOR, DECAY, LR, GRAD_SCALE, STEP_SIZE,
    BOUND_RATIO, ALPHA_SS, RMS_DENOMINATOR,
) = (tl.constexpr(i) for i in range(13))  # fmt: skip
NUMBERS_WIDTH = tl.constexpr(16)

# Columns of `keys`: three words of the noise key, then the flag.
ACTIVE = tl.constexpr(3)
KEY_WIDTH = tl.constexpr(4)

# Columns of `groups`. The seed is an int64 bit pattern.
(
    GROUP_LR, GROUP_BETA1, GROUP_BETA2, GROUP_EPS, GROUP_WEIGHT_DECAY, GROUP_TAU, GROUP_ALPHA_SS, GROUP_CLAMP_MIN,
    GROUP_BOUND_RATIO, GROUP_EMA_DECAY, GROUP_SEED, GROUP_SIGN, GROUP_CAUTIOUS, GROUP_RADIAL,
) = (tl.constexpr(i) for i in range(14))  # fmt: skip
GROUP_WIDTH = tl.constexpr(16)

# Columns of `kept_scales`.
CAUTIOUS_SCALE, BOUND_SCALE = (tl.constexpr(i) for i in range(2))

NUM_PARTIALS = tl.constexpr(4)
PROGRAMS_PER_ENTRY = tl.constexpr(64)
"""How many programs an entry of `first_tensors` stands for."""
NUM_SUMS = tl.constexpr(rule.NUM_SUMS)
