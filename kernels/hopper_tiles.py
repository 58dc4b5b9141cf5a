"""What a consumer of `kernels.hopper_forward` does: all tiles of 64 query rows, step by step.

In every step products are asked for, arithmetic of another tile is done beside them, and then they
are waited for. The assembler is free to sort this otherwise, hence `hold` and `placed`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import hopper_attention
from .hopper_counts import (
    for_each_thread,
    larger_two,
    ones_of_tile,
    ordered_halves,
    round_pairs,
    ties_of_tile,
    tile_reference,
    two_of_each_row,
    with_ones,
)

ROWS = gl.constexpr(hopper_attention.ROWS)
PARTS = gl.constexpr(hopper_attention.PARTS)
TILE = gl.constexpr(hopper_attention.TILE)

ROUND_ALONE = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;")


# -- rings of buffers -----------------------------------------------------------------------------


@gluon.jit
def await_tile(full, g, STAGES: gl.constexpr):
    """Wait until tile g is in its buffer; with the barriers of `free`, until it was read."""
    mbarrier.wait(full.index(g % STAGES), (g // STAGES) & 1)


@gluon.jit
def release(free, g, STAGES: gl.constexpr, read=True):
    """This consumer has read tile g, if `read`."""
    mbarrier.arrive(free.index(g % STAGES), count=1, pred=read)


@gluon.jit
def hold(bar):
    """A wait that is over at once: the assembler moves no arithmetic past its loop.

    Without it the row maximum is moved behind the wait for the product that it should run beside.
    The softmax is not held: the wait for the product before is moved ahead of it, which costs
    nothing, since the other consumer's softmax runs beside that product.
    bar: nobody arrives at it, so that the turn before its first is always over. Each place has its
    own, since between two waits for one barrier the compiler makes all threads of the group meet.
    """
    mbarrier.wait(bar, 1)


@gluon.jit
def placed(x):
    """x, computed before this place and not after it, whatever the compiler would rather do."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False,
        pack=32 // x.dtype.primitive_bitwidth)  # fmt: skip


# -- one tile -------------------------------------------------------------------------------------


@gluon.jit
def ask_scores(q, rings, g, S_LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """Start S = Q K_g^T, in flight. q [ROWS, D] in shared memory."""
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    await_tile(k_full, g, STAGES)
    k = k_bufs.index(g % STAGES).reshape([TILE, q.shape[1]]).permute((1, 0))
    zero = gl.full([ROWS, TILE], 0.0, gl.float32, S_LAYOUT)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def ask_output(p, rings, acc, g, more, STAGES: gl.constexpr):
    """Start O_bar = P_bar V_g, added to what there is if `more`, in flight. p [ROWS, TILE] in
    registers."""
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    await_tile(v_full, g, STAGES)
    v = v_bufs.index(g % STAGES).reshape([TILE, acc.shape[1]])
    return warpgroup_mma(p, v, acc, use_acc=more, is_async=True)


@gluon.jit
def round_to_bf16(x):
    """fp32 -> fp32 on the grid of bf16, ties to even.

    Beside a zero in the lower half, a rounded number is the fp32 number: one instruction each. Two
    per conversion would have to be taken apart again, three instructions for both.
    """
    return gl.inline_asm_elementwise(
        ROUND_ALONE, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def rounded_scores(s, scale, RAW: gl.constexpr, ROUND_S: gl.constexpr):
    """S in `unit`s, on its grid."""
    if not RAW:
        s = s * scale
    if ROUND_S:
        s = round_to_bf16(s)
    return s


@gluon.jit
def hide(s, rows, start, Tk, S_LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where a key of the tile at `start` is hidden from the row."""
    cols = gl.expand_dims(start + gl.arange(0, TILE, gl.SliceLayout(0, S_LAYOUT)), 0)
    end = rows * 0 + Tk
    if CAUSAL:
        end = gl.minimum(rows + 1, Tk)
    return gl.where(cols < gl.expand_dims(end, 1), s, float("-inf"))


@gluon.jit
def softmax_tile(
    s, m, l, tally, start, rows, Tk, scale, factor, unit, policy, S_LAYOUT: gl.constexpr,
    CAUSAL: gl.constexpr, RUNNING: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr,
    POLICY: gl.constexpr, PROBE: gl.constexpr, UNIT_EXACT: gl.constexpr,
):  # fmt: skip
    """P_bar fp32, m, l, what O_bar is rescaled by (running reference; else of no use), and tally.

    l is summed in the order of `kernels.triton_forward`: tile by tile, or by the 64 keys of its
    blocks where the specification names no tile. s: raw scores; start: first key of a tile that
    needs a mask, else -1.
    tally: () without probes, else row maximum (unless it is m), ties and ones, each in a tuple,
    the counts in empty ones before the first tile. Ones are counted later, by `with_ones`.
    """
    PAIRS: gl.constexpr = in_pairs(POLICY, ROUND_S)
    s = rounded_scores(s, scale, RAW, ROUND_S and not PAIRS)
    if start >= 0:
        s = hide(s, rows, start, Tk, S_LAYOUT, CAUSAL)
    rescale = m
    reference = m
    pairs = ()
    if PAIRS:
        s, pairs = round_pairs(s)
    if RUNNING:
        if POLICY == 0:
            rm = gl.max(s, 1)
            own = rm
        else:
            rm, own = tile_reference(s, pairs, policy, S_LAYOUT, POLICY, PAIRS)
        m_new = gl.maximum(m, own)
        rescale = gl.exp2((m - m_new) * factor)
        l = l * rescale
        m = m_new
    offset = s - gl.expand_dims(m, 1)
    if PROBE:
        tops, ties, ones = tally
        before, top = reference, m
        if POLICY != 0:  # the reference is not the row maximum
            before = tops[0]
            top = before
            if RUNNING:
                top = gl.maximum(before, rm)
            tops = (top,)
        found = ties_of_tile(s, offset, pairs, top, unit, S_LAYOUT, POLICY, PAIRS, UNIT_EXACT)
        known = ties[0]
        if RUNNING:
            risen = top * unit > before * unit
            known = gl.where(for_each_thread(risen, known), 0, known)
        found += known
        tally = (tops, (found,), ones)
    p = gl.exp2(offset * factor)
    if RUNNING:
        l += gl.sum(p, 1)
    else:
        first, second = gl.split(gl.sum(gl.reshape(p, [ROWS, 2, TILE // 2]), 2))
        l += gl.convert_layout(first, l.type.layout)
        l += gl.convert_layout(second, l.type.layout)
    return p, m, l, rescale, tally


@gluon.jit
def rescaled(acc, rescale, RUNNING: gl.constexpr):
    """O_bar after the reference has moved."""
    if RUNNING:
        rescale = gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))
        acc = acc * gl.expand_dims(rescale, 1)
    return acc


@gluon.constexpr_function
def in_pairs(policy, round_s):
    """Whether scores are rounded in pairs that the policy then reads."""
    return policy >= 2 and round_s


@gluon.jit
def none_counted(
    tally, p, m, unit, S_LAYOUT: gl.constexpr, POLICY: gl.constexpr, PAIRS: gl.constexpr,
    UNIT_EXACT: gl.constexpr,
):  # fmt: skip
    """tally before the first tile; of what is counted here, the types alone are of use."""
    tops, ties, ones = tally
    s = gl.full([ROWS, TILE], 0.0, gl.float32, S_LAYOUT)
    pairs = ()
    if PAIRS:
        s, pairs = round_pairs(s)
    found = ties_of_tile(s, s, pairs, m, unit, S_LAYOUT, POLICY, PAIRS, UNIT_EXACT)
    return tops, (gl.zeros_like(found),), (gl.zeros_like(ones_of_tile(p)),)


# -- all tiles of a block -------------------------------------------------------------------------


@gluon.jit
def higher(tops, s, scale, RAW: gl.constexpr, PAIRS: gl.constexpr):
    """Elementwise maximum with raw scores; PAIRS: the two largest of rounded ones, in pairs."""
    if PAIRS:
        s, pairs = round_pairs(rounded_scores(s, scale, RAW, False))
        a, b = ordered_halves(pairs)
        return larger_two(tops[0], tops[1], a, b)
    else:
        return (gl.maximum(tops[0], s),)


@gluon.jit
def next_maximum(
    tops, s, g, q, rings, scale, S_LAYOUT: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """`higher`, while S of tile g is computed."""
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    s_next = ask_scores(q, rings, g, S_LAYOUT, STAGES)
    hold(still[0])
    tops = higher(tops, s, scale, RAW, PAIRS)
    hold(still[1])
    s_next = warpgroup_mma_wait(0, deps=(s_next,))
    release(k_free, g, STAGES)
    return tops, s_next


@gluon.jit
def row_maximum(
    q, rings, rows, first, tiles, Tk, scale, S_LAYOUT: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAW: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The largest raw score of each row, over the tiles of K from number `first` on.

    PAIRS: the largest and the second largest score, rounded to bf16.
    """
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    tops = (gl.full([ROWS, TILE], float("-inf"), gl.float32, S_LAYOUT),)
    if PAIRS:
        lowest, pairs = round_pairs(tops[0])
        tops = ordered_halves(pairs)
    s = ask_scores(q, rings, first, S_LAYOUT, STAGES)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k_free, first, STAGES)
    last = tiles - 1
    for i in range(last // 2):
        tops, s = next_maximum(
            tops, s, first + 2 * i + 1, q, rings, scale, S_LAYOUT, STAGES, RAW, PAIRS
        )
        tops, s = next_maximum(
            tops, s, first + 2 * i + 2, q, rings, scale, S_LAYOUT, STAGES, RAW, PAIRS
        )
    if last % 2 == 1:
        tops, s = next_maximum(
            tops, s, first + last, q, rings, scale, S_LAYOUT, STAGES, RAW, PAIRS
        )
    s = hide(s, rows, last * TILE, Tk, S_LAYOUT, CAUSAL)
    tops = higher(tops, s, scale, RAW, PAIRS)
    if PAIRS:
        return two_of_each_row(tops[0], tops[1], S_LAYOUT)
    else:
        return (gl.max(tops[0], 1),)


@gluon.jit
def release_output(q_free):
    """The copy engine has read O of the block before from its buffer of Q."""
    tma.store_wait(0)
    mbarrier.arrive(q_free, count=1)


@gluon.jit
def step(
    p, acc, m, l, tally, j, turn, gk, gv, start, q, rings, rows, Tk, scale, factor, unit, policy,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    APART: gl.constexpr, CAUSAL: gl.constexpr, RUNNING: gl.constexpr, RAW: gl.constexpr,
    ROUND_S: gl.constexpr, POLICY: gl.constexpr, PROBE: gl.constexpr, UNIT_EXACT: gl.constexpr,
):  # fmt: skip
    """The tile gk, gv, whose softmax runs beside P_bar V of the one before; p is that P_bar.

    start: first key of the block's last tile, which alone needs a mask; -1 in the others. EARLY:
    P_bar of this tile is rounded before the product with that of the last is waited for. APART:
    the first tile does not come here.
    """
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    s = ask_scores(q, rings, gk, S_LAYOUT, STAGES)
    if PROBE:
        tally = with_ones(tally, p)
    if APART:
        before, read = gv - 1, True
    else:  # the first tile has none before it: a product of its own V is dropped
        before, read = gv - gl.minimum(j, 1), j > 0
    acc = ask_output(p, rings, acc, before, j > 1, STAGES)
    s = warpgroup_mma_wait(1, deps=(s,))
    release(k_free, gk, STAGES)
    if not APART:
        if (j == 0) & (turn > 0):
            release_output(q_free)
    wide, m, l, rescale, tally = softmax_tile(
        s, m, l, tally, start, rows, Tk, scale, factor, unit, policy, S_LAYOUT, CAUSAL, RUNNING,
        RAW, ROUND_S, POLICY, PROBE, UNIT_EXACT)  # fmt: skip
    following = gl.convert_layout(wide.to(p.dtype), P_LAYOUT)
    if EARLY:
        following = placed(following)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    release(v_free, before, STAGES, read)
    p = following
    return p, rescaled(acc, rescale, RUNNING), m, l, tally


@gluon.jit
def attend(
    q, p, acc, rings, rows, m, tally, turn, gk, gv, tiles, Tk, scale, factor, unit, policy,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, APART: gl.constexpr, CAUSAL: gl.constexpr,
    RUNNING: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr, POLICY: gl.constexpr,
    PROBE: gl.constexpr, UNIT_EXACT: gl.constexpr,
):  # fmt: skip
    """P_bar of the last tile, O_bar, m, l and tally of a consumer's rows over all their tiles.

    gk, gv: numbers of the first ones. p, acc: of any numbers, for a product that is dropped and
    the first one, which is not added.
    turn: how many blocks were before; q_free: of the buffer that the last of them is written from.
    APART: the first tile has code of its own, with no product beside its softmax.
    """
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    PAIRS: gl.constexpr = in_pairs(POLICY, ROUND_S)
    l = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if PROBE or not RUNNING:  # zeros have no ones, and take no registers during the first pass
        p = gl.full([ROWS, TILE], 0.0, k_bufs.dtype, P_LAYOUT)
        acc = gl.full([ROWS, v_bufs.shape[4]], 0.0, gl.float32, O_LAYOUT)
    if PROBE:
        tally = none_counted(tally, p, m, unit, S_LAYOUT, POLICY, PAIRS, UNIT_EXACT)
    gl.assume(tiles > 0)
    last = tiles - 1
    if APART:
        s = ask_scores(q, rings, gk, S_LAYOUT, STAGES)
        s = warpgroup_mma_wait(0, deps=(s,))
        release(k_free, gk, STAGES)
        if turn > 0:
            release_output(q_free)
        start = gl.where(last == 0, 0, -1)
        wide, m, l, rescale, tally = softmax_tile(
            s, m, l, tally, start, rows, Tk, scale, factor, unit, policy, S_LAYOUT, CAUSAL,
            RUNNING, RAW, ROUND_S, POLICY, PROBE, UNIT_EXACT)  # fmt: skip
        p = gl.convert_layout(wide.to(k_bufs.dtype), P_LAYOUT)
    BEGIN: gl.constexpr = 1 if APART else 0  # a range from True would begin at -1
    for j in range(BEGIN, tiles):
        start = gl.where(j == last, j * TILE, -1)
        p, acc, m, l, tally = step(
            p, acc, m, l, tally, j, turn, gk + j, gv + j, start, q, rings, rows, Tk, scale, factor,
            unit, policy, S_LAYOUT, P_LAYOUT, STAGES, EARLY, APART, CAUSAL, RUNNING, RAW, ROUND_S,
            POLICY, PROBE, UNIT_EXACT)  # fmt: skip
    if PROBE:
        tally = with_ones(tally, p)
    acc = ask_output(p, rings, acc, gv + last, last > 0, STAGES)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    release(v_free, gv + last, STAGES)
    return p, acc, m, l, tally
