"""Attention forward for Hopper GPUs, in Gluon: matrix products run while the softmax is computed.

The same roundings in the same order as `kernels.triton_forward`, of which it serves what
`hopper_attention.refusal` lets pass; what is different is who waits for whom. A program is two
consumers, groups of four warps that own 64 query rows each, and two producers, single warps that
ask the copy engine (TMA) for Q and K and for V. Tiles go to rings of STAGES buffers in shared
memory. One consumer's softmax runs beside the other's products, and can run beside its own: P_bar
V of tile j - 1 is computed during the softmax of tile j. With S of tile j + 1 computed then as
well, which takes 64 registers more per thread, it was slower (book/development-log.md).

Under the row reference (RUNNING false) a first pass over the keys finds the final row maximum, and
the second largest score where the policy asks for it. Policies and probes (`hopper_counts`) leave
no trace in what is compiled without them.
A program takes several blocks of 128 query rows in turn, those that it draws (`hopper_schedule`),
and the producers run ahead of the block that is being computed. Tiles of K and of V are
numbered over all that a program reads: tile g is in buffer g % STAGES, for the (g // STAGES)-th
time; likewise blocks of Q, for which each consumer has two buffers. The copy engine writes O, of
any strides, from the buffer that its block's Q was in. Only the last tile of a block needs a mask.
It shares the code of the others. The first may, its place in the pipeline filled by a product that
is dropped: code that does not stay in the instruction cache from block to block can cost more than
what it saves (APART: it has its own).

Shapes: q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, D], last dimension contiguous; each O
likewise, all of one set of strides; results per row contiguous. `unit` and RAW are those of
`kernels.triton_forward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper_counts import row_counts, row_reference
from .hopper_divide import divide
from .hopper_schedule import (
    PLAN,
    await_work,
    block_of,
    end_work,
    first_ticket,
    places_for,
    publish,
    take,
)
from .hopper_tiles import (
    PARTS,
    ROWS,
    TILE,
    attend,
    await_tile,
    in_pairs,
    round_to_bf16,
    rounded_scores,
    row_maximum,
)
from .triton_common import LOG2E

# -- which keys a block sees ----------------------------------------------------------------------


@gluon.jit
def visible_tiles(end, Tk, CAUSAL: gl.constexpr):
    """How many tiles of keys rows before `end` see."""
    if CAUSAL:
        Tk = gl.minimum(Tk, end)
    return (Tk + TILE - 1) // TILE


# -- who does it ----------------------------------------------------------------------------------


@gluon.jit
def consumer(
    rings, places, outputs, sizes, PART: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    APART: gl.constexpr, CAUSAL: gl.constexpr, RUNNING: gl.constexpr, RAW: gl.constexpr,
    ROUND_S: gl.constexpr, ROUND_BAR: gl.constexpr, HP: gl.constexpr, POLICY: gl.constexpr,
    PROBE: gl.constexpr, WIDE: gl.constexpr, UNIT_EXACT: gl.constexpr,
):  # fmt: skip
    """Rows 64 PART on of every block of this program."""
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    o_desc, lse_ptr, hp_ptr, strides, scale, policy, probes = outputs
    o_b, o_h, o_t = strides
    H, GROUP, Tq, Tk, blocks = sizes
    DV: gl.constexpr = v_bufs.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    unit = scale * 0.0 + 1.0
    if RAW:
        unit = scale
    factor = unit * LOG2E
    acc = gl.full([ROWS, DV], 0.0, gl.float32, O_LAYOUT)
    p = gl.full([ROWS, TILE], 0.0, k_bufs.dtype, P_LAYOUT)
    gk = 0
    gv = 0
    turn = 0
    b, h, start = await_work(places, q_full, PART, 0, 2, 4)
    while start >= 0:
        tiles = visible_tiles(start + PARTS * ROWS, Tk, CAUSAL)
        first = start + PART * ROWS
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        slot = turn % 2 * PARTS + PART
        q = q_bufs.index(slot).reshape([ROWS, q_bufs.shape[4]])
        other = (turn + 1) % 2 * PARTS + PART
        own = (q_bufs, k_bufs, v_bufs, q_full, q_free.index(other), k_full, k_free, v_full,
               v_free, still)  # fmt: skip
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        top = m
        if not RUNNING:  # rounding keeps order: the maximum is that of the rounded scores
            tops = row_maximum(
                q, own, rows, gk, tiles, Tk, scale, S_LAYOUT, STAGES, CAUSAL, RAW,
                in_pairs(POLICY, ROUND_S))  # fmt: skip
            top = tops[0]
            if POLICY == 0:
                top = rounded_scores(top, scale, RAW, ROUND_S)
                m = top
            else:
                m = row_reference(top, tops[1], policy, POLICY)
            gk += tiles
        tally = ()
        if PROBE:
            tops = ()
            if POLICY != 0:
                tops = (top,)
            tally = (tops, (), ())
        p, acc, m, l, tally = attend(
            q, p, acc, own, rows, m, tally, turn, gk, gv, tiles, Tk, scale, factor, unit, policy,
            S_LAYOUT, O_LAYOUT, P_LAYOUT, STAGES, EARLY, APART, CAUSAL, RUNNING, RAW, ROUND_S,
            POLICY, PROBE, UNIT_EXACT)  # fmt: skip
        gk += tiles
        gv += tiles
        turn += 1
        lse = m * unit + gl.log(l)
        l_of_row = l
        l = gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT)), 1)
        l = gl.full([ROWS, DV], 0.0, gl.float32, O_LAYOUT) + l
        bar = acc
        if ROUND_BAR:
            bar = round_to_bf16(acc)
        SHARED: gl.constexpr = WIDE and not ROUND_BAR
        if SHARED:  # O is what the fp32 one rounds to
            wide = divide(acc, l, POLICY != 0)
            q.store(wide.to(q.dtype))
        else:
            q.store(divide(bar, l, POLICY != 0, True))
        fence_async_shared()
        position = [b, h, first, 0]
        tma.async_copy_shared_to_global(o_desc, position, q_bufs.index(slot))
        # not before the fence, which would wait for them
        row_base = (b * H + h).to(gl.int64) * Tq
        gl.store(lse_ptr + row_base + rows, lse, mask=rows < Tq)
        if PROBE:
            ties_ptr, ones_ptr, m_ptr, l_ptr, o32_ptr = probes
            tops, ties, ones = tally
            ties = row_counts(ties[0], S_LAYOUT, in_pairs(POLICY, ROUND_S))
            ones = row_counts(ones[0], S_LAYOUT, True)
            gl.store(ties_ptr + row_base + rows, ties, mask=rows < Tq)
            gl.store(ones_ptr + row_base + rows, ones, mask=rows < Tq)
            gl.store(m_ptr + row_base + rows, m * unit, mask=rows < Tq)
            gl.store(l_ptr + row_base + rows, l_of_row, mask=rows < Tq)
        if WIDE or HP:
            position = head_place(b, h, o_b, o_h)
        if WIDE:
            if not SHARED:
                wide = divide(acc, l, POLICY != 0)
            store_rows(o32_ptr + position, wide, first, Tq, o_t)
        if HP:
            store_rows(hp_ptr + position, gl.div_rn(acc, l), first, Tq, o_t)
        b, h, start = await_work(places, q_full, turn % 2 * PARTS + PART, turn, 2, 4)
    tma.store_wait(0)


@gluon.constexpr_function
def store_layout(layout, dtype, columns):
    """How threads hold a block that is to be written: a product's own layout fills 32-byte sectors
    with fp32; 16-bit numbers are first gathered to 16 bytes a thread."""
    if dtype.primitive_bitwidth == 32:
        return layout
    across = columns // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def head_place(b, h, stride_b, stride_h):
    """Where head h of batch b begins: int64, in elements."""
    return b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h


@gluon.jit
def store_rows(base, value, first, limit, row_stride):
    """Write rows `first` on of a matrix [limit, DV] at `base` whose rows are contiguous."""
    DV: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = store_layout(value.type.layout, base.dtype.element_ty, DV)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    places = gl.expand_dims(rows.to(gl.int64) * row_stride, 1) + gl.expand_dims(cols, 0)
    inside = gl.expand_dims(rows < limit, 1) & gl.expand_dims(cols < DV, 0)
    narrow = gl.convert_layout(value.to(base.dtype.element_ty), LAYOUT)
    gl.store(base + places, narrow, mask=inside)


@gluon.jit
def fetch(desc, b, h, row, bufs, full, free, g, STAGES: gl.constexpr):
    """Ask for tile g of K or V, from `row` on, once both consumers have read its buffer."""
    if g >= STAGES:
        await_tile(free, g - STAGES, STAGES)
    ready = full.index(g % STAGES)
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, h, row, 0], ready, bufs.index(g % STAGES))


@gluon.jit
def fetch_queries(q_desc, rings, places, b, h, start, turn):
    """Ask for Q of a block, for each consumer once it has read what is in its buffer."""
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    for part in gl.static_range(PARTS):
        slot = turn % 2 * PARTS + part
        publish(places, q_free, slot, turn, 2, b, h, start)
        ready = q_full.index(slot)
        mbarrier.expect(ready, q_desc.block_type.nbytes)
        position = [b, h, start + part * ROWS, 0]
        tma.async_copy_global_to_shared(q_desc, position, ready, q_bufs.index(slot))


@gluon.jit
def keys_producer(
    q_desc, k_desc, rings, places, sizes, work, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    RUNNING: gl.constexpr,
):  # fmt: skip
    """Ask for Q of every block, and for its tiles of K, once or (row reference) twice."""
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    H, GROUP, Tq, Tk, blocks = sizes
    g = 0
    turn = 0
    ticket, tickets = first_ticket(work)
    while ticket < tickets:
        following, head, i, first_half, end_half = take(ticket, tickets, work, blocks)
        for half in range(first_half, end_half):
            start = block_of(i, half, blocks) * (PARTS * ROWS)
            b = head // H
            h = head % H
            tiles = visible_tiles(start + PARTS * ROWS, Tk, CAUSAL)
            reads = tiles if RUNNING else 2 * tiles
            fetch_queries(q_desc, rings, places, b, h, start, turn)
            for j in range(reads):
                fetch(k_desc, b, h // GROUP, (j % tiles) * TILE, k_bufs, k_full, k_free, g, STAGES)
                g += 1
            turn += 1
        ticket = following
    for part in gl.static_range(PARTS):
        end_work(places, q_full, q_free, turn % 2 * PARTS + part, turn, 2)


@gluon.jit
def values_producer(
    v_desc, rings, places, sizes, STAGES: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Ask for the tiles of V of every block."""
    q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still = rings
    H, GROUP, Tq, Tk, blocks = sizes
    g = 0
    turn = 0
    b, h, start = await_work(places, q_full, 0, 0, 2, 1)
    while start >= 0:
        for j in range(visible_tiles(start + PARTS * ROWS, Tk, CAUSAL)):
            fetch(v_desc, b, h // GROUP, j * TILE, v_bufs, v_full, v_free, g, STAGES)
            g += 1
        turn += 1
        b, h, start = await_work(places, q_full, turn % 2 * PARTS, turn, 2, 1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers in shared memory, each over after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["H", "GROUP", "Tq", "Tk", *PLAN])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, counter_ptr, lse_ptr, hp_ptr, o_b, o_h, o_t, scale, H, GROUP,
    Tq, Tk, pairs, rounds, left, begin, heads, begun, beta, eps, min_offset, max_offset, ties_ptr,
    ones_ptr, m_ptr, l_ptr, o32_ptr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, EARLY: gl.constexpr, APART: gl.constexpr,
    CAUSAL: gl.constexpr, RUNNING: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr,
    ROUND_BAR: gl.constexpr, HP: gl.constexpr, POLICY: gl.constexpr, PROBE: gl.constexpr,
    WIDE: gl.constexpr, UNIT_EXACT: gl.constexpr,
):  # fmt: skip
    """The blocks of a program. See the docstring."""
    dtype: gl.constexpr = q_desc.dtype
    Q_SHAPE: gl.constexpr = [2 * PARTS] + q_desc.block_type.shape
    K_SHAPE: gl.constexpr = [STAGES] + k_desc.block_type.shape
    V_SHAPE: gl.constexpr = [STAGES] + v_desc.block_type.shape
    q_bufs = gl.allocate_shared_memory(dtype, Q_SHAPE, q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, K_SHAPE, k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, V_SHAPE, v_desc.layout)
    q_full = barriers(2 * PARTS, 1)
    q_free = barriers(2 * PARTS, 1)
    k_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, PARTS)
    v_full = barriers(STAGES, 1)
    v_free = barriers(STAGES, PARTS)
    still = (barriers(1, 1).index(0), barriers(1, 1).index(0))
    places = places_for(2 * PARTS)
    rings = (q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free, v_full, v_free, still)
    policy = ()
    if POLICY != 0:
        policy = (beta, eps, min_offset, max_offset)
    probes = ()
    if PROBE:
        probes = (ties_ptr, ones_ptr, m_ptr, l_ptr, o32_ptr)
    outputs = (o_desc, lse_ptr, hp_ptr, (o_b, o_h, o_t), scale, policy, probes)
    sizes = (H, GROUP, Tq, Tk, gl.cdiv(Tq, PARTS * ROWS))
    work = (counter_ptr, (pairs, rounds, left, begin, heads, begun))
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consumer, (rings, places, outputs, sizes, FIRST, STAGES, EARLY, APART, CAUSAL,
                        RUNNING, RAW, ROUND_S, ROUND_BAR, HP, POLICY, PROBE, WIDE, UNIT_EXACT)),
            (consumer, (rings, places, outputs, sizes, SECOND, STAGES, EARLY, APART, CAUSAL,
                        RUNNING, RAW, ROUND_S, ROUND_BAR, HP, POLICY, PROBE, WIDE, UNIT_EXACT)),
            (keys_producer, (q_desc, k_desc, rings, places, sizes, work, STAGES, CAUSAL, RUNNING)),
            (values_producer, (v_desc, rings, places, sizes, STAGES, CAUSAL)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip
