"""Attention backward for Hopper GPUs, in Gluon: products run while exponentials are computed.

The same roundings in the same order as `kernels.triton_backward`, of which it serves what
`hopper_attention.backward_refusal` lets pass:

    row_values_kernel             lse in units of alpha and delta, padded to whole tiles
    hopper_grad_keys_kernel       dK, dV: blocks of 128 keys walk over the queries that see them
    hopper_grad_queries_kernel    dQ: blocks of 128 queries walk over the keys that they see

A program is two consumers, groups of four warps that own 64 rows of a block each, and a producer,
one warp that asks the copy engine (TMA) for everything. What a consumer owns (K and V, or Q and
dO) is the left operand of S and dP. At D = 64 it is kept in registers: so these two products read
half as much shared memory as they would, and the buffers are free for the program's next block at
once. What it walks over (Q, dO, lse and delta, or K and V) comes in tiles of 64 rows through a
ring of STAGES buffers that both consumers read. Tiles are numbered over all that a program reads,
as in `kernels.hopper_forward`; steps are in `kernels.hopper_gradients`.

Order of sums: every number of dK, dV and dQ is summed over the same tiles of 64 rows, in the same
order, as by the general kernel with blocks of 64 x 64 (dK, dV) and 128 x 64 (dQ).

Shapes: q, k, v, dO [B, H, T, D], last dimension contiguous; lse and delta padded, [B H, tiles, 64]
fp32; results bf16 with contiguous rows, dK and dV of the same strides.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import hopper_attention
from .hopper_forward import barriers, head_place, store_rows
from .hopper_gradients import (
    factor_of,
    kept_operands,
    keys_of_block,
    queries_of_block,
    release_kept,
    row_value,
)
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
from .hopper_tiles import await_tile, release

ROWS = gl.constexpr(hopper_attention.ROWS)
PARTS = gl.constexpr(hopper_attention.PARTS)
WALKED = gl.constexpr(hopper_attention.WALKED)


@triton.jit(do_not_specialize=["T", "tiles"])
def row_values_kernel(
    lse_ptr, delta_ptr, lse_out, delta_out, inverse_unit, T, tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """lse * inverse_unit and delta [B H, T] as [B H, tiles, TILE]: inf and 0 beyond the end."""
    length = tiles * TILE
    blocks = tl.cdiv(length, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    places = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = places < T
    lse = tl.load(lse_ptr + head * T + places, mask=inside, other=float("inf")) * inverse_unit
    delta = tl.load(delta_ptr + head * T + places, mask=inside, other=0.0)
    tl.store(lse_out + head * length + places, lse, mask=places < length)
    tl.store(delta_out + head * length + places, delta, mask=places < length)


# -- which tiles a block walks over ---------------------------------------------------------------


@gluon.jit
def query_tiles(start, Tq, CAUSAL: gl.constexpr):
    """(first row, how many tiles) of queries for the keys from `start` on.

    Causal, each consumer begins at the first query that sees a key of its own, the second one a
    tile after the first; so that both have a tile, some lie beyond the last query, and add zeros.
    """
    if CAUSAL:
        return start, gl.maximum((Tq - start + WALKED - 1) // WALKED, PARTS)
    else:
        return start * 0, (Tq + WALKED - 1) // WALKED


@gluon.jit
def key_tiles(start, Tk, CAUSAL: gl.constexpr):
    """How many tiles of keys the block of queries from `start` on sees."""
    if CAUSAL:
        Tk = gl.minimum(Tk, start + PARTS * ROWS)
    return (Tk + WALKED - 1) // WALKED


@gluon.jit
def full_tiles(start, Tk, CAUSAL: gl.constexpr):
    """How many of them every query of the block sees whole."""
    if CAUSAL:
        Tk = gl.minimum(Tk, start + 1)
    return Tk // WALKED


# -- producers ------------------------------------------------------------------------------------


@gluon.jit
def ask_two(descs, bufs, position, ready, slot):
    """Ask for two blocks from `position` [b, h, row, 0] on, into buffers `slot`."""
    mbarrier.expect(ready, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    tma.async_copy_global_to_shared(descs[0], position, ready, bufs[0].index(slot))
    tma.async_copy_global_to_shared(descs[1], position, ready, bufs[1].index(slot))


@gluon.jit
def ask_four(descs, bufs, position, tile, ready, slot):
    """The same for Q and dO, with lse and delta from `tile` [b h, tile, 0] on."""
    q_desc, do_desc, lse_desc, delta_desc = descs
    ROWS_OF_BOTH: gl.constexpr = q_desc.block_type.nbytes + do_desc.block_type.nbytes
    VALUES: gl.constexpr = lse_desc.block_type.nbytes + delta_desc.block_type.nbytes
    mbarrier.expect(ready, ROWS_OF_BOTH + VALUES)
    tma.async_copy_global_to_shared(q_desc, position, ready, bufs[0].index(slot))
    tma.async_copy_global_to_shared(do_desc, position, ready, bufs[1].index(slot))
    tma.async_copy_global_to_shared(lse_desc, tile, ready, bufs[2].index(slot))
    tma.async_copy_global_to_shared(delta_desc, tile, ready, bufs[3].index(slot))


@gluon.jit
def keys_producer(
    of_keys, of_queries, kept, walked, work, sizes, STAGES: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Ask for K and V of every block, and for the tiles of queries that it walks over."""
    kept_bufs, kept_full, kept_free, places = kept
    bufs, full, free = walked
    H, Tq, Tk, blocks = sizes
    g = 0
    turn = 0
    ticket, tickets = first_ticket(work)
    while ticket < tickets:
        following, head, i, first_half, end_half = take(ticket, tickets, work, blocks)
        for half in range(first_half, end_half):
            start = block_of(i, 1 - half, blocks) * (PARTS * ROWS)
            b = head // H
            h = head % H
            for part in gl.static_range(PARTS):
                publish(places, kept_free, part, turn, 1, b, h, start)
                position = [b, h, start + part * ROWS, 0]
                ask_two(of_keys, kept_bufs, position, kept_full.index(part), part)
            row, tiles = query_tiles(start, Tq, CAUSAL)
            for j in range(tiles):
                if g >= STAGES:
                    await_tile(free, g - STAGES, STAGES)
                position = [b, h, row + j * WALKED, 0]
                tile = [head, row // WALKED + j, 0]
                ask_four(of_queries, bufs, position, tile, full.index(g % STAGES), g % STAGES)
                g += 1
            turn += 1
        ticket = following
    for part in gl.static_range(PARTS):
        end_work(places, kept_full, kept_free, part, turn, 1)


@gluon.jit
def queries_producer(
    of_keys, of_queries, kept, walked, work, sizes, STAGES: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Ask for Q, dO, lse and delta of every block, and for the tiles of keys it walks over."""
    kept_bufs, kept_full, kept_free, places = kept
    bufs, full, free = walked
    H, Tq, Tk, blocks = sizes
    g = 0
    turn = 0
    ticket, tickets = first_ticket(work)
    while ticket < tickets:
        following, head, i, first_half, end_half = take(ticket, tickets, work, blocks)
        for half in range(first_half, end_half):
            start = block_of(i, half, blocks) * (PARTS * ROWS)
            b = head // H
            h = head % H
            for part in gl.static_range(PARTS):
                publish(places, kept_free, part, turn, 1, b, h, start)
                position = [b, h, start + part * ROWS, 0]
                tile = [head, start // WALKED + part, 0]
                ask_four(of_queries, kept_bufs, position, tile, kept_full.index(part), part)
            for j in range(key_tiles(start, Tk, CAUSAL)):
                if g >= STAGES:
                    await_tile(free, g - STAGES, STAGES)
                position = [b, h, j * WALKED, 0]
                ask_two(of_keys, bufs, position, full.index(g % STAGES), g % STAGES)
                g += 1
            turn += 1
        ticket = following
    for part in gl.static_range(PARTS):
        end_work(places, kept_full, kept_free, part, turn, 1)


# -- consumers ------------------------------------------------------------------------------------


@gluon.jit
def keys_consumer(
    kept, walked, still, outputs, sizes, PART: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr,
):  # fmt: skip
    """Keys 64 PART on of every block of this program."""
    kept_bufs, kept_full, kept_free, places = kept
    bufs, full, free = walked
    dk_ptr, dv_ptr, strides, scale = outputs
    dk_b, dk_h, dk_t = strides
    H, Tq, Tk, blocks = sizes
    D: gl.constexpr = kept_bufs[0].shape[4]
    factor = factor_of(scale, RAW)
    g = 0
    turn = 0
    b, h, start = await_work(places, kept_full, PART, 0, 1, 4)
    while start >= 0:
        first = start + PART * ROWS
        row, tiles = query_tiles(start, Tq, CAUSAL)
        skipped = 0
        if CAUSAL:
            for j in gl.static_range(PART):  # no query of these sees a key of this consumer
                await_tile(full, g + j, STAGES)
                release(free, g + j, STAGES)
            skipped = PART
        k, v = kept_operands(kept_bufs, PART)
        release_kept(kept_free.index(PART), D, True)
        dk, dv = keys_of_block(
            k, v, kept_free.index(PART), walked, still, g + skipped, tiles - skipped, scale,
            factor, STAGES, CAUSAL, RAW, ROUND_S)  # fmt: skip
        g += tiles
        turn += 1
        position = head_place(b, h, dk_b, dk_h)
        store_rows(dk_ptr + position, dk * scale, first, Tk, dk_t)
        store_rows(dv_ptr + position, dv, first, Tk, dk_t)
        b, h, start = await_work(places, kept_full, PART, turn, 1, 4)


@gluon.jit
def queries_consumer(
    kept, walked, still, outputs, sizes, PART: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAW: gl.constexpr, ROUND_S: gl.constexpr,
):  # fmt: skip
    """Queries 64 PART on of every block of this program."""
    kept_bufs, kept_full, kept_free, places = kept
    dq_ptr, strides, scale = outputs
    dq_b, dq_h, dq_t = strides
    H, Tq, Tk, blocks = sizes
    D: gl.constexpr = kept_bufs[0].shape[4]
    factor = factor_of(scale, RAW)
    g = 0
    turn = 0
    b, h, start = await_work(places, kept_full, PART, 0, 1, 4)
    while start >= 0:
        first = start + PART * ROWS
        tiles = key_tiles(start, Tk, CAUSAL)
        q, do = kept_operands(kept_bufs, PART)
        lse = row_value(kept_bufs[2], PART, 1)
        delta = row_value(kept_bufs[3], PART, 1)
        release_kept(kept_free.index(PART), D, True)
        dq = queries_of_block(
            q, do, lse, delta, kept_free.index(PART), walked, still, g, tiles, first,
            full_tiles(start, Tk, CAUSAL), Tk, scale, factor, STAGES, CAUSAL, RAW,
            ROUND_S)  # fmt: skip
        g += tiles
        turn += 1
        store_rows(dq_ptr + head_place(b, h, dq_b, dq_h), dq * scale, first, Tq, dq_t)
        b, h, start = await_work(places, kept_full, PART, turn, 1, 4)


# -- kernels --------------------------------------------------------------------------------------


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Room in shared memory for COUNT blocks of a descriptor."""
    SHAPE: gl.constexpr = [COUNT] + desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit(do_not_specialize=["H", "Tq", "Tk", *PLAN])
def hopper_grad_keys_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, counter_ptr, dk_ptr, dv_ptr, dk_b, dk_h,
    dk_t, scale, H, Tq, Tk, pairs, rounds, left, begin, heads, begun,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, RAW: gl.constexpr,
    ROUND_S: gl.constexpr,
):  # fmt: skip
    """dK, dV of the blocks that this program draws."""
    kept_bufs = (buffers(k_desc, PARTS), buffers(v_desc, PARTS))
    bufs = (buffers(q_desc, STAGES), buffers(do_desc, STAGES), buffers(lse_desc, STAGES),
            buffers(delta_desc, STAGES))  # fmt: skip
    kept = (kept_bufs, barriers(PARTS, 1), barriers(PARTS, 1), places_for(PARTS))
    walked = (bufs, barriers(STAGES, 1), barriers(STAGES, PARTS))
    still = barriers(1, 1).index(0)
    of_keys = (k_desc, v_desc)
    of_queries = (q_desc, do_desc, lse_desc, delta_desc)
    outputs = (dk_ptr, dv_ptr, (dk_b, dk_h, dk_t), scale)
    sizes = (H, Tq, Tk, gl.cdiv(Tk, PARTS * ROWS))
    work = (counter_ptr, (pairs, rounds, left, begin, heads, begun))
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (keys_consumer,
             (kept, walked, still, outputs, sizes, FIRST, STAGES, CAUSAL, RAW, ROUND_S)),
            (keys_consumer,
             (kept, walked, still, outputs, sizes, SECOND, STAGES, CAUSAL, RAW, ROUND_S)),
            (keys_producer, (of_keys, of_queries, kept, walked, work, sizes, STAGES, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["H", "Tq", "Tk", *PLAN])
def hopper_grad_queries_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, counter_ptr, dq_ptr, dq_b, dq_h, dq_t,
    scale, H, Tq, Tk, pairs, rounds, left, begin, heads, begun,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, RAW: gl.constexpr,
    ROUND_S: gl.constexpr,
):  # fmt: skip
    """dQ of the blocks that this program draws."""
    kept_bufs = (buffers(q_desc, PARTS), buffers(do_desc, PARTS), buffers(lse_desc, PARTS),
                 buffers(delta_desc, PARTS))  # fmt: skip
    bufs = (buffers(k_desc, STAGES), buffers(v_desc, STAGES))
    kept = (kept_bufs, barriers(PARTS, 1), barriers(PARTS, 1), places_for(PARTS))
    walked = (bufs, barriers(STAGES, 1), barriers(STAGES, PARTS))
    still = barriers(1, 1).index(0)
    of_keys = (k_desc, v_desc)
    of_queries = (q_desc, do_desc, lse_desc, delta_desc)
    outputs = (dq_ptr, (dq_b, dq_h, dq_t), scale)
    sizes = (H, Tq, Tk, gl.cdiv(Tq, PARTS * ROWS))
    work = (counter_ptr, (pairs, rounds, left, begin, heads, begun))
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (queries_consumer,
             (kept, walked, still, outputs, sizes, FIRST, STAGES, CAUSAL, RAW, ROUND_S)),
            (queries_consumer,
             (kept, walked, still, outputs, sizes, SECOND, STAGES, CAUSAL, RAW, ROUND_S)),
            (queries_producer, (of_keys, of_queries, kept, walked, work, sizes, STAGES, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
