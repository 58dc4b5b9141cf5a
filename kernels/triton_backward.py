"""Attention backward in Triton, with the rounding sites of `kernels.numerics`. No atomics.

    delta_kernel           delta = rowsum(dO * O), O as the caller gives it (stored, or fp32)
    delta_product_kernel   delta = rowsum(dP * P), one pass over the keys
    grad_keys_kernel       dK, dV: one program per key block walks over the queries that see it
    grad_queries_kernel    dQ: one program per query block walks over the keys that it sees

Each number is summed by one program in one order, so that repeated calls agree bit for bit.
P = exp(S - lse) is recomputed from the same rounded S as the forward. Inside dS it is not rounded;
only dV's operand is (site `backward_probabilities`).

Shapes: q, dO [B, H, Tq, D or Dv], k, v [B, Hkv, Tk, D or Dv] of any strides; lse, delta
[B, H, Tq] fp32; dq, dk, dv of any strides with contiguous rows. With grouped queries (Hkv < H) dK
and dV are summed over the group in fp32 before their one rounding. Where alpha is a power of two
(`RAW`), S and lse are kept in units of it, which no rounding notices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import (
    BACKWARD_PROBABILITIES,
    GRAD_K,
    GRAD_PROBABILITIES,
    GRAD_Q,
    GRAD_SCORES,
    GRAD_V,
    LOG2E,
    load_rows,
    multiply,
    multiply_add,
    round_operand,
    round_site,
    rounded_scores,
    store_rows,
    visible_keys,
)


@triton.jit
def load_vector(base, rows, limit, outside, MASKED: tl.constexpr):
    """Entries `rows` of a vector of `limit` numbers, `outside` beyond its end."""
    if MASKED:
        return tl.load(base + rows, mask=rows < limit, other=outside)
    else:
        return tl.load(base + rows)


@triton.jit(do_not_specialize=["H", "Tq"])
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, o_b, o_h, o_t, o_d, do_b, do_h, do_t, do_d, H, Tq,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta [B, H, Tq] = rowsum(dO * O) in fp32; O and dO of any strides and dtype."""
    blocks = tl.cdiv(Tq, BLOCK_M)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    b = bh // H
    h = bh % H
    o = load_rows(o_ptr + b * o_b + h * o_h, rows, Tq, o_t, o_d, DV, BLOCK_DV, True)
    do = load_rows(do_ptr + b * do_b + h * do_h, rows, Tq, do_t, do_d, DV, BLOCK_DV, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + bh * Tq + rows, delta, mask=rows < Tq)


@triton.jit
def probability_block(
    q, k, lse, rows, cols, row_base, scale, unit, seed, Tk,
    S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr, RAW: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """P = exp(S - lse) [BLOCK_M, BLOCK_N], 0 at hidden keys."""
    index = row_base[:, None] * Tk + cols[None, :]
    s = rounded_scores(q, k, index, scale, seed, S_BITS, S_STOCHASTIC, RAW)
    p = tl.exp2((s - lse[:, None]) * (unit * LOG2E))
    if MASKED:
        p = tl.where(visible_keys(rows, cols, Tk, CAUSAL), p, 0.0)
    return p


@triton.jit
def delta_product_pass(
    delta, q, do, lse, k_base, k_row, k_col, v_base, v_row, v_col, lo, hi, rows, row_base,
    scale, unit, seed, Tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, RAW: tl.constexpr, S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr,
    DP_BITS: tl.constexpr, DP_STOCHASTIC: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(lo, hi, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, cols, Tk, k_row, k_col, D, BLOCK_D, MASKED)
        p = probability_block(q, k, lse, rows, cols, row_base, scale, unit, seed, Tk,
                              S_BITS, S_STOCHASTIC, RAW, CAUSAL, MASKED)  # fmt: skip
        v = load_rows(v_base, cols, Tk, v_row, v_col, DV, BLOCK_DV, MASKED)
        index = row_base[:, None] * Tk + cols[None, :]
        dp = multiply(do, tl.trans(v))
        dp = round_site(dp, seed, index, DP_BITS, DP_STOCHASTIC, GRAD_PROBABILITIES)
        delta += tl.sum(dp * p, 1)
    return delta


@triton.jit(do_not_specialize=["H", "GROUP", "Tq", "Tk"])
def delta_product_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, seed_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d,
    scale, inverse_unit, H, GROUP, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, RAW: tl.constexpr,
    S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr, DP_BITS: tl.constexpr,
    DP_STOCHASTIC: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """delta [B, H, Tq] = rowsum(dP * P)."""
    blocks = tl.cdiv(Tq, BLOCK_M)
    program = tl.program_id(0)
    bh = (program // blocks).to(tl.int64)
    start_m = (blocks - 1 - program % blocks) * BLOCK_M
    b = bh // H
    h = bh % H
    rows = start_m + tl.arange(0, BLOCK_M)
    row_base = bh * Tq + rows
    seed = 0
    if DRAWS:
        seed = tl.load(seed_ptr)
    q = load_rows(q_ptr + b * q_b + h * q_h, rows, Tq, q_t, q_d, D, BLOCK_D, True)
    do = load_rows(do_ptr + b * do_b + h * do_h, rows, Tq, do_t, do_d, DV, BLOCK_DV, True)
    lse = load_vector(lse_ptr + bh * Tq, rows, Tq, float("inf"), True) * inverse_unit
    k_base = k_ptr + b * k_b + h // GROUP * k_h
    v_base = v_ptr + b * v_b + h // GROUP * v_h
    unit = scale if RAW else 1.0
    if CAUSAL:
        end = tl.minimum(Tk, start_m + BLOCK_M)
        full = tl.minimum(Tk, start_m + 1) // BLOCK_N * BLOCK_N
    else:
        end = Tk
        full = Tk // BLOCK_N * BLOCK_N
    delta = tl.zeros([BLOCK_M], tl.float32)
    delta = delta_product_pass(
        delta, q, do, lse, k_base, k_t, k_d, v_base, v_t, v_d, 0, full, rows, row_base, scale,
        unit, seed, Tk, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, RAW, S_BITS, S_STOCHASTIC, DP_BITS,
        DP_STOCHASTIC, CAUSAL, False)  # fmt: skip
    delta = delta_product_pass(
        delta, q, do, lse, k_base, k_t, k_d, v_base, v_t, v_d, full, end, rows, row_base, scale,
        unit, seed, Tk, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, RAW, S_BITS, S_STOCHASTIC, DP_BITS,
        DP_STOCHASTIC, CAUSAL, True)  # fmt: skip
    tl.store(delta_ptr + row_base, delta, mask=rows < Tq)


@triton.jit
def grad_keys_pass(
    dk, dv, k, v, q_base, q_row, q_col, do_base, do_row, do_col, lse_base, delta_base, lo, hi,
    cols, head_base, scale, unit, inverse_unit, seed, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, RAW: tl.constexpr, S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr,
    P_BITS: tl.constexpr, P_STOCHASTIC: tl.constexpr, P_DTYPE: tl.constexpr,
    DP_BITS: tl.constexpr, DP_STOCHASTIC: tl.constexpr, DS_BITS: tl.constexpr,
    DS_STOCHASTIC: tl.constexpr, DS_DTYPE: tl.constexpr,
    EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds queries lo..hi to dK, dV. Blocks are transposed: [BLOCK_N keys, BLOCK_M queries]."""
    for start in tl.range(lo, hi, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        if EVEN:
            rows = tl.max_contiguous(tl.multiple_of(rows, BLOCK_M), BLOCK_M)
        index = (head_base + rows)[None, :] * Tk + cols[:, None]
        q = load_rows(q_base, rows, Tq, q_row, q_col, D, BLOCK_D, not EVEN)
        # beyond the last query lse = inf, so P = 0
        lse = load_vector(lse_base, rows, Tq, float("inf"), not EVEN) * inverse_unit
        s = rounded_scores(k, q, index, scale, seed, S_BITS, S_STOCHASTIC, RAW)
        p = tl.exp2((s - lse[None, :]) * (unit * LOG2E))
        if MASKED:
            p = tl.where(rows[None, :] >= cols[:, None], p, 0.0)
        do = load_rows(do_base, rows, Tq, do_row, do_col, DV, BLOCK_DV, not EVEN)
        operand = round_operand(p, seed, index, P_BITS, P_STOCHASTIC, BACKWARD_PROBABILITIES,
                                P_DTYPE)  # fmt: skip
        dv = multiply_add(operand, do, dv)
        dp = multiply(v, tl.trans(do))
        dp = round_site(dp, seed, index, DP_BITS, DP_STOCHASTIC, GRAD_PROBABILITIES)
        delta = load_vector(delta_base, rows, Tq, 0.0, not EVEN)
        ds = p * (dp - delta[None, :])
        ds = round_operand(ds, seed, index, DS_BITS, DS_STOCHASTIC, GRAD_SCORES, DS_DTYPE)
        dk = multiply_add(ds, q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["H", "GROUP", "Tq", "Tk"])
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, seed_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    scale, inverse_unit, H, GROUP, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, RAW: tl.constexpr,
    S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr, P_BITS: tl.constexpr,
    P_STOCHASTIC: tl.constexpr, P_DTYPE: tl.constexpr, DP_BITS: tl.constexpr,
    DP_STOCHASTIC: tl.constexpr, DS_BITS: tl.constexpr, DS_STOCHASTIC: tl.constexpr,
    DS_DTYPE: tl.constexpr, G_BITS: tl.constexpr, G_STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """dK, dV [B, Hkv, Tk, D or Dv] of one block of BLOCK_N keys."""
    blocks = tl.cdiv(Tk, BLOCK_N)
    program = tl.program_id(0)
    bkv = (program // blocks).to(tl.int64)
    start_n = program % blocks * BLOCK_N
    kv_heads = H // GROUP
    b = bkv // kv_heads
    kv = bkv % kv_heads
    cols = start_n + tl.arange(0, BLOCK_N)
    seed = 0
    if DRAWS:
        seed = tl.load(seed_ptr)
    k = load_rows(k_ptr + b * k_b + kv * k_h, cols, Tk, k_t, k_d, D, BLOCK_D, True)
    v = load_rows(v_ptr + b * v_b + kv * v_h, cols, Tk, v_t, v_d, DV, BLOCK_DV, True)
    unit = scale if RAW else 1.0
    # Causal: queries before `lo` see none of these keys, those from `free` on see all of them.
    if CAUSAL:
        lo = start_n // BLOCK_M * BLOCK_M
        free = tl.minimum(tl.cdiv(start_n + BLOCK_N - 1, BLOCK_M) * BLOCK_M, Tq)
    else:
        lo = 0
        free = 0
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # Not GROUPED (H = Hkv), this loop vanishes, and with it some 30 registers.
    for member in tl.range(0, GROUP if GROUPED else 1):
        h = kv * GROUP + member
        head_base = (b * H + h) * Tq
        if EVEN:  # lse and delta then load in pairs
            head_base = tl.multiple_of(head_base, BLOCK_M)
        q_base = q_ptr + b * q_b + h * q_h
        do_base = do_ptr + b * do_b + h * do_h
        if CAUSAL:
            dk, dv = grad_keys_pass(
                dk, dv, k, v, q_base, q_t, q_d, do_base, do_t, do_d, lse_ptr + head_base,
                delta_ptr + head_base, lo, free, cols, head_base, scale, unit, inverse_unit, seed,
                Tq, Tk, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, RAW, S_BITS, S_STOCHASTIC, P_BITS,
                P_STOCHASTIC, P_DTYPE, DP_BITS, DP_STOCHASTIC, DS_BITS, DS_STOCHASTIC, DS_DTYPE,
                EVEN, True)  # fmt: skip
        dk, dv = grad_keys_pass(
            dk, dv, k, v, q_base, q_t, q_d, do_base, do_t, do_d, lse_ptr + head_base,
            delta_ptr + head_base, free, Tq, cols, head_base, scale, unit, inverse_unit, seed,
            Tq, Tk, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, RAW, S_BITS, S_STOCHASTIC, P_BITS,
            P_STOCHASTIC, P_DTYPE, DP_BITS, DP_STOCHASTIC, DS_BITS, DS_STOCHASTIC, DS_DTYPE,
            EVEN, False)  # fmt: skip
    base = bkv * Tk
    index = (base + cols)[:, None] * D + tl.arange(0, BLOCK_D)[None, :]
    dk = round_site(dk * scale, seed, index, G_BITS, G_STOCHASTIC, GRAD_K)
    store_rows(dk_ptr + b * dk_b + kv * dk_h, dk, cols, Tk, dk_t, D, BLOCK_D)
    index = (base + cols)[:, None] * DV + tl.arange(0, BLOCK_DV)[None, :]
    dv = round_site(dv, seed, index, G_BITS, G_STOCHASTIC, GRAD_V)
    store_rows(dv_ptr + b * dv_b + kv * dv_h, dv, cols, Tk, dv_t, DV, BLOCK_DV)


@triton.jit
def grad_queries_pass(
    dq, q, do, lse, delta, k_base, k_row, k_col, v_base, v_row, v_col, lo, hi, rows, row_base,
    scale, unit, seed, Tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, RAW: tl.constexpr, S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr,
    DP_BITS: tl.constexpr, DP_STOCHASTIC: tl.constexpr, DS_BITS: tl.constexpr,
    DS_STOCHASTIC: tl.constexpr, DS_DTYPE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys lo..hi to dQ."""
    for start in tl.range(lo, hi, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, cols, Tk, k_row, k_col, D, BLOCK_D, MASKED)
        p = probability_block(q, k, lse, rows, cols, row_base, scale, unit, seed, Tk,
                              S_BITS, S_STOCHASTIC, RAW, CAUSAL, MASKED)  # fmt: skip
        v = load_rows(v_base, cols, Tk, v_row, v_col, DV, BLOCK_DV, MASKED)
        index = row_base[:, None] * Tk + cols[None, :]
        dp = multiply(do, tl.trans(v))
        dp = round_site(dp, seed, index, DP_BITS, DP_STOCHASTIC, GRAD_PROBABILITIES)
        ds = p * (dp - delta[:, None])
        ds = round_operand(ds, seed, index, DS_BITS, DS_STOCHASTIC, GRAD_SCORES, DS_DTYPE)
        dq = multiply_add(ds, k, dq)
    return dq


@triton.jit(do_not_specialize=["H", "GROUP", "Tq", "Tk"])
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, seed_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, do_b, do_h, do_t, do_d,
    dq_b, dq_h, dq_t,
    scale, inverse_unit, H, GROUP, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, RAW: tl.constexpr,
    S_BITS: tl.constexpr, S_STOCHASTIC: tl.constexpr, DP_BITS: tl.constexpr,
    DP_STOCHASTIC: tl.constexpr, DS_BITS: tl.constexpr, DS_STOCHASTIC: tl.constexpr,
    DS_DTYPE: tl.constexpr, G_BITS: tl.constexpr, G_STOCHASTIC: tl.constexpr,
    DRAWS: tl.constexpr,
):  # fmt: skip
    """dQ [B, H, Tq, D] of one block of BLOCK_M queries."""
    blocks = tl.cdiv(Tq, BLOCK_M)
    program = tl.program_id(0)
    bh = (program // blocks).to(tl.int64)
    start_m = (blocks - 1 - program % blocks) * BLOCK_M
    b = bh // H
    h = bh % H
    rows = start_m + tl.arange(0, BLOCK_M)
    row_base = bh * Tq + rows
    seed = 0
    if DRAWS:
        seed = tl.load(seed_ptr)
    q = load_rows(q_ptr + b * q_b + h * q_h, rows, Tq, q_t, q_d, D, BLOCK_D, True)
    do = load_rows(do_ptr + b * do_b + h * do_h, rows, Tq, do_t, do_d, DV, BLOCK_DV, True)
    lse = load_vector(lse_ptr + bh * Tq, rows, Tq, float("inf"), True) * inverse_unit
    delta = load_vector(delta_ptr + bh * Tq, rows, Tq, 0.0, True)
    k_base = k_ptr + b * k_b + h // GROUP * k_h
    v_base = v_ptr + b * v_b + h // GROUP * v_h
    unit = scale if RAW else 1.0
    if CAUSAL:
        end = tl.minimum(Tk, start_m + BLOCK_M)
        full = tl.minimum(Tk, start_m + 1) // BLOCK_N * BLOCK_N
    else:
        end = Tk
        full = Tk // BLOCK_N * BLOCK_N
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = grad_queries_pass(
        dq, q, do, lse, delta, k_base, k_t, k_d, v_base, v_t, v_d, 0, full, rows, row_base, scale,
        unit, seed, Tk, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, RAW, S_BITS, S_STOCHASTIC, DP_BITS,
        DP_STOCHASTIC, DS_BITS, DS_STOCHASTIC, DS_DTYPE, CAUSAL, False)  # fmt: skip
    dq = grad_queries_pass(
        dq, q, do, lse, delta, k_base, k_t, k_d, v_base, v_t, v_d, full, end, rows, row_base,
        scale, unit, seed, Tk, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, RAW, S_BITS, S_STOCHASTIC,
        DP_BITS, DP_STOCHASTIC, DS_BITS, DS_STOCHASTIC, DS_DTYPE, CAUSAL, True)  # fmt: skip
    index = row_base[:, None] * D + tl.arange(0, BLOCK_D)[None, :]
    dq = round_site(dq * scale, seed, index, G_BITS, G_STOCHASTIC, GRAD_Q)
    store_rows(dq_ptr + b * dq_b + h * dq_h, dq, rows, Tq, dq_t, D, BLOCK_D)
