"""Attention forward in Triton, with the rounding sites of `kernels.numerics`.

One program holds BLOCK_M queries of one head and walks over blocks of BLOCK_N keys:

    running reference    one pass; m grows from block to block, O_bar and l are rescaled by
                         exp(m_old - m_new). BLOCK_N is `numerics.tile`.
    row reference        a first pass finds the final row maximum (QK^T and max only), a second one
                         computes P_bar, l and O_bar against it: nothing is ever rescaled.

Rounding to nearest keeps order, so the row maximum of the rounded scores is the rounded maximum of
the raw ones: the first pass rounds nothing but its result, and finds "is the maximum tied, within
eps" from the two largest raw scores of the row.

Units: scores are kept in units of alpha (`RAW`: s is Q K^T, `unit` = alpha) where alpha is a power
of two, which no rounding notices, or where S is neither rounded nor shifted; else s is S itself
and `unit` = 1. eps, shift and offsets come in the same units. P_bar = exp2((s - m) unit log2 e):
the subtraction comes first and is exact at the maximum, so that P_bar is 1 there, whatever S.

Shapes: q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] of any strides; each O with
contiguous rows, all of one set of strides; results per row contiguous. The grid is flat (x axis),
heavy causal blocks of a head first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import (
    DELTA_OUTPUT,
    LOG2E,
    OUTPUT,
    PROBABILITIES,
    UNNORMALIZED,
    load_rows,
    multiply_add,
    round_nearest_even,
    round_operand,
    round_site,
    rounded_scores,
    store_rows,
    visible_keys,
)

# Softmax policies, as numbers that a kernel can compare.
POLICIES = {"safe": 0, "shifted": 1, "stabilized": 2, "guarded": 3}


@triton.jit
def shifted_reference(rm, many, beta, shift, min_offset, max_offset, POLICY: tl.constexpr):
    """m from the maximum rm; many: whether more than one score lies within eps of it."""
    if POLICY == 1:
        return rm + shift
    elif POLICY == 2:
        return tl.where(many, tl.where(rm > 0, beta * rm, tl.where(rm < 0, 0.0, rm)), rm)
    elif POLICY == 3:
        offset = tl.where(rm > 0, beta * rm - rm, -rm)
        offset = tl.minimum(tl.maximum(offset, min_offset), max_offset)
        return tl.where(many, rm + offset, rm)
    else:
        return rm


@triton.jit
def number_below(x):
    """The largest fp32 number below x, of the same shape."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0, bits - 1, tl.where(x < 0, bits + 1, -2147483647))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def count_negative(x):
    """Numbers of each row that are below 0 (or -0), int32: their sign bits, added up.

    Comparisons would wait in one of few predicates, and take twice the instructions.
    """
    return tl.sum(x.to(tl.uint32, bitcast=True) >> 31, 1).to(tl.int32)


@triton.jit
def below_ties(top, unit):
    """The largest score that does not tie with `top`, the maximum of a row.

    They tie if they are one number as S: times `unit`, in fp32. Unless that is a power of two, two
    neighbours may round to one product (never three, but for subnormal ones).
    """
    lower = number_below(top)
    return tl.where(lower * unit == top * unit, number_below(lower), lower)


@triton.jit
def count_ones(p, rounded, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, POLICY: tl.constexpr):
    """How many P_bar of a row are 1 once rounded, int32."""
    if STOCHASTIC or BITS >= 23 or POLICY == 1:  # a shift lets P_bar exceed 1
        return tl.sum((rounded == 1.0).to(tl.int32), 1)
    else:  # from halfway to the number below 1 on, since ties go to even
        return count_negative(1.0 - 1.0 / (4 << BITS) - 1.0 / (1 << 24) - p)


@triton.jit
def two_largest(a, a_second, b, b_second):
    """The largest and the second largest of two such pairs."""
    known = tl.maximum(a_second, b_second, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), known, tl.PropagateNan.ALL)


@triton.jit
def tile_reference(s, beta, eps, shift, min_offset, max_offset, POLICY: tl.constexpr):
    """(row maximum, reference) of the scores s of one tile, -inf where no key is visible.

    More than one score lies within eps of the maximum if the second largest does.
    """
    if POLICY >= 2:
        rm, second = tl.reduce((s, tl.full(s.shape, float("-inf"), tl.float32)), 1, two_largest)
    else:
        rm = tl.max(s, 1)
        second = rm
    m = shifted_reference(rm, rm - second <= eps, beta, shift, min_offset, max_offset, POLICY)
    return rm, tl.where(rm == float("-inf"), rm, m)


@triton.jit
def score_block(
    q, k, rows, cols, row_base, scale, seed, Tk,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, RAW: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """S [BLOCK_M, BLOCK_N] in `unit`s, -inf where a key is hidden. k comes as [BLOCK_N, D]."""
    index = row_base[:, None] * Tk + cols[None, :]
    s = rounded_scores(q, k, index, scale, seed, BITS, STOCHASTIC, RAW)
    if MASKED:
        s = tl.where(visible_keys(rows, cols, Tk, CAUSAL), s, float("-inf"))
    return s


@triton.jit
def maximum_pass(
    first, second, q, k_base, k_row, k_col, lo, hi, rows, row_base, scale, seed, Tk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, RAW: tl.constexpr, TWO: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Largest and second largest score per (row, column of the block), over key blocks lo..hi.

    Elementwise maxima only: rows are reduced once, after the last block.
    """
    for start in tl.range(lo, hi, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, cols, Tk, k_row, k_col, D, BLOCK_D, MASKED)
        s = score_block(q, k, rows, cols, row_base, scale, seed, Tk, BITS, STOCHASTIC, RAW,
                        CAUSAL, MASKED)  # fmt: skip
        if TWO:
            second = tl.maximum(second, tl.minimum(first, s))
        first = tl.maximum(first, s)
    return first, second


@triton.jit
def tiled_reference_pass(
    m, top, q, k_base, k_row, k_col, lo, hi, rows, row_base, scale, seed, Tk,
    beta, eps, shift, min_offset, max_offset,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, POLICY: tl.constexpr,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, RAW: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The largest of the tiles' references (policy decided per tile), and the row maximum."""
    for start in tl.range(lo, hi, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, cols, Tk, k_row, k_col, D, BLOCK_D, MASKED)
        s = score_block(q, k, rows, cols, row_base, scale, seed, Tk, BITS, STOCHASTIC, RAW,
                        CAUSAL, MASKED)  # fmt: skip
        rm, own = tile_reference(s, beta, eps, shift, min_offset, max_offset, POLICY)
        m = tl.maximum(m, own)
        top = tl.maximum(top, rm)
    return m, top


@triton.jit
def attend_pass(
    acc, l, m, top, ties, ones,
    q, k_base, k_row, k_col, v_base, v_row, v_col, lo, hi, rows, row_base, scale, unit, seed, Tk,
    beta, eps, shift, min_offset, max_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, RUNNING: tl.constexpr, POLICY: tl.constexpr, RAW: tl.constexpr,
    S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr, P_BITS: tl.constexpr,
    P_STOCHASTIC: tl.constexpr, SUM_ROUNDED: tl.constexpr, P_DTYPE: tl.constexpr,
    PROBE: tl.constexpr, UNIT_EXACT: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """P_bar, l and O_bar over key blocks lo..hi; under the running reference m moves as well."""
    for start in tl.range(lo, hi, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, cols, Tk, k_row, k_col, D, BLOCK_D, MASKED)
        s = score_block(q, k, rows, cols, row_base, scale, seed, Tk, S_BITS, S_STOCHASTIC, RAW,
                        CAUSAL, MASKED)  # fmt: skip
        if RUNNING:
            rm, own = tile_reference(s, beta, eps, shift, min_offset, max_offset, POLICY)
            m_new = tl.maximum(m, own)
            rescale = tl.exp2((m - m_new) * (unit * LOG2E))
            l = l * rescale
            acc = acc * rescale[:, None]
            m = m_new
        offset = s - m[:, None]
        if PROBE:
            if RUNNING:
                highest = tl.maximum(top, rm)
                ties = tl.where(highest * unit > top * unit, 0, ties)
                top = highest
            if POLICY == 0 and UNIT_EXACT:  # top is m
                ties += BLOCK_N - count_negative(offset)
            else:
                ties += count_negative(below_ties(top, unit)[:, None] - s)
        p = tl.exp2(offset * (unit * LOG2E))
        index = row_base[:, None] * Tk + cols[None, :]
        rounded = round_operand(p, seed, index, P_BITS, P_STOCHASTIC, PROBABILITIES, P_DTYPE)
        if SUM_ROUNDED:
            l += tl.sum(rounded.to(tl.float32), 1)
        else:
            l += tl.sum(p, 1)
        if PROBE:
            ones += count_ones(p, rounded, P_BITS, P_STOCHASTIC, POLICY)
        v = load_rows(v_base, cols, Tk, v_row, v_col, DV, BLOCK_DV, MASKED)
        acc = multiply_add(rounded, v, acc)
    return acc, l, m, top, ties, ones


@triton.jit(do_not_specialize=["H", "GROUP", "Tq", "Tk"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, hp_ptr, ties_ptr, ones_ptr, m_ptr, l_ptr, o32_ptr,
    seed_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, o_b, o_h, o_t,
    scale, beta, eps, shift, min_offset, max_offset, H, GROUP, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, RUNNING: tl.constexpr, TILED: tl.constexpr, POLICY: tl.constexpr,
    RAW: tl.constexpr, MONOTONE: tl.constexpr, S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr,
    P_BITS: tl.constexpr, P_STOCHASTIC: tl.constexpr, SUM_ROUNDED: tl.constexpr,
    P_DTYPE: tl.constexpr, L_BITS: tl.constexpr, BAR_BITS: tl.constexpr,
    BAR_STOCHASTIC: tl.constexpr, O_BITS: tl.constexpr, O_STOCHASTIC: tl.constexpr,
    HP: tl.constexpr, HP_BITS: tl.constexpr, HP_STOCHASTIC: tl.constexpr,
    PROBE: tl.constexpr, WIDE: tl.constexpr, UNIT_EXACT: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head. See the module's docstring."""
    blocks = tl.cdiv(Tq, BLOCK_M)
    program = tl.program_id(0)
    bh = (program // blocks).to(tl.int64)
    start_m = (blocks - 1 - program % blocks) * BLOCK_M
    b = bh // H
    h = bh % H
    kv = h // GROUP
    rows = start_m + tl.arange(0, BLOCK_M)
    row_base = bh * Tq + rows
    seed = 0
    if DRAWS:
        seed = tl.load(seed_ptr)

    q = load_rows(q_ptr + b * q_b + h * q_h, rows, Tq, q_t, q_d, D, BLOCK_D, True)
    k_base = k_ptr + b * k_b + kv * k_h
    v_base = v_ptr + b * v_b + kv * v_h
    # Key blocks [0, full) are wholly visible to every row; [full, end) need a mask.
    if CAUSAL:
        end = tl.minimum(Tk, start_m + BLOCK_M)
        full = tl.minimum(Tk, start_m + 1) // BLOCK_N * BLOCK_N
    else:
        end = Tk
        full = Tk // BLOCK_N * BLOCK_N

    unit = scale if RAW else 1.0
    lowest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    m = lowest
    top = lowest
    if not RUNNING and TILED:
        m, top = tiled_reference_pass(
            m, top, q, k_base, k_t, k_d, 0, full, rows, row_base, scale, seed, Tk,
            beta, eps, shift, min_offset, max_offset,
            D, BLOCK_D, BLOCK_N, POLICY, S_BITS, S_STOCHASTIC, RAW, CAUSAL, False)  # fmt: skip
        m, top = tiled_reference_pass(
            m, top, q, k_base, k_t, k_d, full, end, rows, row_base, scale, seed, Tk,
            beta, eps, shift, min_offset, max_offset,
            D, BLOCK_D, BLOCK_N, POLICY, S_BITS, S_STOCHASTIC, RAW, CAUSAL, True)  # fmt: skip
    elif not RUNNING:
        first = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
        second = first
        TWO: tl.constexpr = POLICY >= 2
        PASS_BITS: tl.constexpr = 23 if MONOTONE else S_BITS
        PASS_RAW: tl.constexpr = MONOTONE or RAW
        first, second = maximum_pass(
            first, second, q, k_base, k_t, k_d, 0, full, rows, row_base, scale, seed, Tk,
            D, BLOCK_D, BLOCK_N, PASS_BITS, S_STOCHASTIC, PASS_RAW, TWO, CAUSAL,
            False)  # fmt: skip
        first, second = maximum_pass(
            first, second, q, k_base, k_t, k_d, full, end, rows, row_base, scale, seed, Tk,
            D, BLOCK_D, BLOCK_N, PASS_BITS, S_STOCHASTIC, PASS_RAW, TWO, CAUSAL,
            True)  # fmt: skip
        m = tl.max(first, 1)
        at_top = first == m[:, None]
        alone = tl.sum(at_top.to(tl.int32), 1) == 1
        rival = tl.max(tl.maximum(second, tl.where(at_top, float("-inf"), first)), 1)
        rival = tl.where(alone, rival, m)
        if MONOTONE:
            step = 1.0 if RAW else scale
            m = round_nearest_even(m * step, S_BITS)
            rival = round_nearest_even(rival * step, S_BITS)
        top = m
        if POLICY != 0:
            m = shifted_reference(m, m - rival <= eps, beta, shift, min_offset, max_offset, POLICY)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    ties = tl.zeros([BLOCK_M], tl.int32)
    ones = tl.zeros([BLOCK_M], tl.int32)
    acc, l, m, top, ties, ones = attend_pass(
        acc, l, m, top, ties, ones, q, k_base, k_t, k_d, v_base, v_t, v_d, 0, full, rows, row_base,
        scale, unit, seed, Tk, beta, eps, shift, min_offset, max_offset,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, RUNNING, POLICY, RAW, S_BITS, S_STOCHASTIC,
        P_BITS, P_STOCHASTIC, SUM_ROUNDED, P_DTYPE, PROBE, UNIT_EXACT, CAUSAL, False)  # fmt: skip
    acc, l, m, top, ties, ones = attend_pass(
        acc, l, m, top, ties, ones, q, k_base, k_t, k_d, v_base, v_t, v_d, full, end, rows,
        row_base, scale, unit, seed, Tk, beta, eps, shift, min_offset, max_offset,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, RUNNING, POLICY, RAW, S_BITS, S_STOCHASTIC,
        P_BITS, P_STOCHASTIC, SUM_ROUNDED, P_DTYPE, PROBE, UNIT_EXACT, CAUSAL, True)  # fmt: skip

    m = m * unit
    l = round_nearest_even(l, L_BITS)
    index = row_base[:, None] * DV + tl.arange(0, BLOCK_DV)[None, :]
    out_base = b * o_b + h * o_h
    bar = round_site(acc, seed, index, BAR_BITS, BAR_STOCHASTIC, UNNORMALIZED)
    out = round_site(tl.div_rn(bar, tl.broadcast_to(l[:, None], bar.shape)), seed, index, O_BITS,
                     O_STOCHASTIC, OUTPUT)  # fmt: skip
    store_rows(out_ptr + out_base, out, rows, Tq, o_t, DV, BLOCK_DV)
    inside = rows < Tq
    tl.store(lse_ptr + row_base, m + tl.log(l), mask=inside)
    if HP or WIDE:
        wide = tl.div_rn(acc, tl.broadcast_to(l[:, None], acc.shape))
        if WIDE:
            store_rows(o32_ptr + out_base, wide, rows, Tq, o_t, DV, BLOCK_DV)
        if HP:
            wide = round_site(wide, seed, index, HP_BITS, HP_STOCHASTIC, DELTA_OUTPUT)
            store_rows(hp_ptr + out_base, wide, rows, Tq, o_t, DV, BLOCK_DV)
    if PROBE:
        tl.store(ties_ptr + row_base, ties, mask=inside)
        tl.store(ones_ptr + row_base, ones, mask=inside)
        tl.store(m_ptr + row_base, m, mask=inside)
        tl.store(l_ptr + row_base, l, mask=inside)
