"""The tables that the kernels read: which columns they have, and how they are filled.

A :class:`Launch` serves the tensors of some batches that share dtypes and structural options. Its tables, all on the
device:

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
