"""What a consumer of `kernels.hopper_backward` does: all tiles of its 64 rows, step by step.

In a step S and dP of a tile are asked for, then the product that adds dS of the tile before to
its gradient; P is computed beside those, and dS beside that product (dQ) or beside the one that
adds P to dV (dK, dV). The assembler is free to sort this otherwise: the first tile of a block has
a `hold` against it; in the others a hold was found to cost time.

For dK and dV blocks are transposed, [keys, queries], so that P^T and dS^T are left operands and
stay in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import hopper_attention
from .hopper_tiles import await_tile, hold, release, rounded_scores
from .triton_common import LOG2E

ROWS = gl.constexpr(hopper_attention.ROWS)
WALKED = gl.constexpr(hopper_attention.WALKED)

# How the threads of a consumer hold S and dP [ROWS, WALKED].
S_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout([3, 0], [4, 1], [16, hopper_attention.WALKED, 16])
)
KEPT_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, S_LAYOUT.value, 2))


@gluon.constexpr_function
def gradient_layout(D):
    """How they hold a gradient [ROWS, D]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])


@gluon.jit
def factor_of(scale, RAW: gl.constexpr):
    """What turns scores in `unit`s into exponents of 2."""
    unit = scale * 0.0 + 1.0
    if RAW:
        unit = scale
    return unit * LOG2E


@gluon.jit
def matrix(bufs, slot):
    """Buffer `slot` of blocks [1, 1, rows, D] as [rows, D]."""
    return bufs.index(slot).reshape([bufs.shape[3], bufs.shape[4]])


@gluon.constexpr_function
def in_registers(D):
    """Whether a consumer keeps its two blocks there, beside all else: 64 registers at D = 128."""
    return D <= 64


@gluon.jit
def kept_operands(bufs, slot):
    """The two blocks [ROWS, D] that a consumer keeps: in registers, or where they are."""
    a, b = matrix(bufs[0], slot), matrix(bufs[1], slot)
    if in_registers(a.shape[1]):
        return a.load(KEPT_LAYOUT), b.load(KEPT_LAYOUT)
    else:
        return a, b


@gluon.jit
def release_kept(free, D: gl.constexpr, LOADED: gl.constexpr):
    """Once both are read: LOADED, before the first tile if that was all; else after the last."""
    if in_registers(D) == LOADED:
        mbarrier.arrive(free, count=1)


@gluon.jit
def row_value(bufs, slot, AXIS: gl.constexpr):
    """lse or delta of queries, which lie along the rows (AXIS 1 is left out) or the columns."""
    LAYOUT: gl.constexpr = gl.SliceLayout(AXIS, S_LAYOUT)
    return gl.expand_dims(bufs.index(slot).reshape([WALKED]).load(LAYOUT), AXIS)


@gluon.jit
def ask_product(a, bufs, slot):
    """Start a x^T, in flight; a [ROWS, D] kept, x in buffer `slot`."""
    zero = gl.full([ROWS, WALKED], 0.0, gl.float32, S_LAYOUT)
    x = matrix(bufs, slot).permute((1, 0))
    return warpgroup_mma(a, x, zero, use_acc=False, is_async=True)


@gluon.jit
def ask_scores(a, b, walked, g, STAGES: gl.constexpr):
    """Start S = a x^T and dP = b y^T of tile g, in flight."""
    bufs, full, free = walked
    await_tile(full, g, STAGES)
    return ask_product(a, bufs[0], g % STAGES), ask_product(b, bufs[1], g % STAGES)


@gluon.jit
def ask_gradient(left, bufs, slot, acc):
    """Start acc += left x, in flight; left [ROWS, WALKED] in registers."""
    return warpgroup_mma(left, matrix(bufs, slot), acc, is_async=True)


@gluon.jit
def weights(s, lse, scale, factor, RAW: gl.constexpr, ROUND_S: gl.constexpr):
    """P = exp(S - lse)."""
    return gl.exp2((rounded_scores(s, scale, RAW, ROUND_S) - lse) * factor)


@gluon.jit
def operand(x, dtype, D: gl.constexpr):
    """P or dS, rounded, as the left operand of a gradient [ROWS, D]."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, gradient_layout(D), 2))


# -- dK, dV ---------------------------------------------------------------------------------------


@gluon.jit
def hide_queries(p, CAUSAL: gl.constexpr):
    """P [keys, queries] of the first tile, which begins with the query of the first key."""
    if CAUSAL:
        keys = gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        queries = gl.arange(0, WALKED, gl.SliceLayout(0, S_LAYOUT))
        p = gl.where(gl.expand_dims(queries, 0) >= gl.expand_dims(keys, 1), p, 0.0)
    return p


@gluon.jit
def keys_step(
    k, v, ds, dk, dv, walked, still, g, scale, factor, STAGES: gl.constexpr, RAW: gl.constexpr,
    ROUND_S: gl.constexpr,
):  # fmt: skip
    """Tile g: P beside dP and dS^T Q of tile g - 1, then dS beside P^T dO.

    P^T dO is asked for before the two are waited for: it needs P, which keeps P where it is.
    """
    bufs, full, free = walked
    D: gl.constexpr = dk.shape[1]
    slot = g % STAGES
    s, dp = ask_scores(k, v, walked, g, STAGES)
    dk = ask_gradient(ds, bufs[0], (g - 1) % STAGES, dk)
    lse = row_value(bufs[2], slot, 0)
    s = warpgroup_mma_wait(2, deps=(s,))
    wide = weights(s, lse, scale, factor, RAW, ROUND_S)
    p = operand(wide, ds.dtype, D)
    dv = ask_gradient(p, bufs[1], slot, dv)
    dp, dk, ds = warpgroup_mma_wait(1, deps=(dp, dk, ds))
    release(free, g - 1, STAGES)
    change = wide * (dp - row_value(bufs[3], slot, 0))
    dv, p = warpgroup_mma_wait(0, deps=(dv, p))
    return operand(change, p.dtype, D), dk, dv


@gluon.jit
def keys_of_block(
    k, v, kept_free, walked, still, g, tiles, scale, factor, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr,
):  # fmt: skip
    """dK / alpha and dV [ROWS, D] over `tiles` tiles of queries from number g on."""
    bufs, full, free = walked
    D: gl.constexpr = k.shape[1]
    LAYOUT: gl.constexpr = gradient_layout(D)
    slot = g % STAGES
    dk = gl.full([ROWS, D], 0.0, gl.float32, LAYOUT)
    dv = gl.full([ROWS, D], 0.0, gl.float32, LAYOUT)
    s, dp = ask_scores(k, v, walked, g, STAGES)
    lse = row_value(bufs[2], slot, 0)
    s = warpgroup_mma_wait(1, deps=(s,))
    wide = hide_queries(weights(s, lse, scale, factor, RAW, ROUND_S), CAUSAL)
    p = operand(wide, k.dtype, D)
    dv = ask_gradient(p, bufs[1], slot, dv)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    change = wide * (dp - row_value(bufs[3], slot, 0))
    hold(still)
    dv, p = warpgroup_mma_wait(0, deps=(dv, p))
    ds = operand(change, k.dtype, D)
    for j in range(1, tiles):
        ds, dk, dv = keys_step(
            k, v, ds, dk, dv, walked, still, g + j, scale, factor, STAGES, RAW, ROUND_S
        )
    release_kept(kept_free, D, False)
    last = g + tiles - 1
    dk = ask_gradient(ds, bufs[0], last % STAGES, dk)
    dk, ds = warpgroup_mma_wait(0, deps=(dk, ds))
    release(free, last, STAGES)
    return dk, dv


# -- dQ -------------------------------------------------------------------------------------------


@gluon.jit
def hidden_as_zero(p, first, start, Tk, CAUSAL: gl.constexpr):
    """P of queries `first` on and keys `start` on, 0 where the key is hidden."""
    cols = gl.expand_dims(start + gl.arange(0, WALKED, gl.SliceLayout(0, S_LAYOUT)), 0)
    if CAUSAL:
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        return gl.where(cols < gl.expand_dims(gl.minimum(rows + 1, Tk), 1), p, 0.0)
    else:
        return gl.where(cols < Tk, p, 0.0)


@gluon.jit
def queries_step(
    q, do, lse, delta, ds, dq, walked, still, g, first, start, Tk, scale, factor,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr,
):  # fmt: skip
    """dS of tile g, beside the product that adds tile g - 1 to dQ.

    start: first key of a tile that needs a mask, else -1.
    """
    bufs, full, free = walked
    s, dp = ask_scores(q, do, walked, g, STAGES)
    dq = ask_gradient(ds, bufs[0], (g - 1) % STAGES, dq)
    s = warpgroup_mma_wait(2, deps=(s,))
    p = weights(s, lse, scale, factor, RAW, ROUND_S)
    if start >= 0:
        p = hidden_as_zero(p, first, start, Tk, CAUSAL)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    change = p * (dp - delta)
    dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
    release(free, g - 1, STAGES)
    return operand(change, ds.dtype, dq.shape[1]), dq


@gluon.jit
def queries_of_block(
    q, do, lse, delta, kept_free, walked, still, g, tiles, first, whole, Tk, scale, factor,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr,
):  # fmt: skip
    """dQ / alpha [ROWS, D] over `tiles` tiles of keys from number g on; from `whole` on masked."""
    bufs, full, free = walked
    D: gl.constexpr = q.shape[1]
    dq = gl.full([ROWS, D], 0.0, gl.float32, gradient_layout(D))
    s, dp = ask_scores(q, do, walked, g, STAGES)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = weights(s, lse, scale, factor, RAW, ROUND_S)
    if whole == 0:
        p = hidden_as_zero(p, first, 0, Tk, CAUSAL)
    hold(still)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = operand(p * (dp - delta), q.dtype, D)
    for j in range(1, tiles):
        start = gl.where(j >= whole, j * WALKED, -1)
        ds, dq = queries_step(
            q, do, lse, delta, ds, dq, walked, still, g + j, first, start, Tk, scale, factor,
            STAGES, CAUSAL, RAW, ROUND_S)  # fmt: skip
    release_kept(kept_free, D, False)
    last = g + tiles - 1
    dq = ask_gradient(ds, bufs[0], last % STAGES, dq)
    dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
    release(free, last, STAGES)
    return dq
