"""Which blocks a program of a Hopper kernel computes, and how its groups of warps learn of them.

A block is PARTS * ROWS rows of a head; causal ones walk over 1, 2, ... tiles. Pairs of blocks, the
i-th longest of a head with its i-th shortest, are equally long. Programs draw tickets from a
counter in global memory, zero before the launch, until there are none: first pairs, head by head,
so that those at work read the same keys; then, for the last KEPT_ROUNDS or more, single blocks by
length. So all programs end within a short block of each other, whatever each was held up by. Which
program computes a block moves no bit of it. The first ticket of a program is its own number, and
each draws until there are none, so that a launch of n tickets draws n times: the counter wraps
round, and is zero again when the launch has ended.

One producer draws and computes the place of a block; consumers and the other producer read it in
shared memory. Arithmetic with divisions in each of them would be code that every block fetches
anew: that is dear (book/development-log.md).

`place` and `block_of` are plain arithmetic on whole numbers: `place.fn` works without a GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

PLAN = ("pairs", "rounds", "left", "begin", "heads", "begun")  # `schedule`, as kernels take it
KEPT_ROUNDS = 2  # of pairs, at least, that go block by block
NOTHING = gl.constexpr(-1)  # in place of a block's number: no more blocks


def schedule(heads: int, blocks: int, programs: int) -> tuple[int, ...]:
    """PLAN of a launch: `pairs` of a head, `rounds` of `programs` pairs that go as pairs, pairs
    `left` after them, the head where those `begin`, how many `heads` they are of, and pairs of the
    first of these that are `begun`, that is done.

    heads: over all batches; blocks: of a head.
    """
    pairs = (blocks + 1) // 2
    rounds = max(pairs * heads // programs - KEPT_ROUNDS, 0)
    begin, begun = divmod(rounds * programs, pairs)
    return pairs, rounds, pairs * heads - rounds * programs, begin, heads - begin, begun


@gluon.jit
def tickets_of(programs, plan):
    """How many tickets there are: one for a pair, then one for each half of those left."""
    pairs, rounds, left, begin, heads, begun = plan
    return rounds * programs + 2 * left


@gluon.jit
def place(ticket, programs, plan, blocks):
    """(head, i, first half, how many blocks) of a ticket.

    i: pair i of a head has its i-th longest block (half 0) and its i-th shortest (half 1). There
    are 2 blocks for a pair, 1 for a single one, also where the middle one of an odd number is a
    pair, and 0 for the short half that such a pair lacks.
    """
    pairs, rounds, left, begin, heads, begun = plan
    k = ticket
    half = ticket * 0
    most = half + 2
    per = pairs
    if ticket >= rounds * programs:  # a single block: the long halves, then the short, from behind
        most = half + 1
        k = ticket - rounds * programs
        if k >= left:
            half += 1
            k = 2 * left - 1 - k
        per = heads
        if k < begun * (heads - 1):  # pairs that the first of these heads lacks
            per = heads - 1
        else:
            k -= begun * (heads - 1)
    i = k // per
    head = k - i * per
    if ticket >= rounds * programs:
        head += begin
        if per == heads:
            i += begun
        else:
            head += 1
    else:  # pairs go head by head
        found = i
        i = head
        head = found
    count = blocks - 2 * i - half
    if count > most:
        count = most
    return head, i, half, count


@gluon.jit
def block_of(i, half, blocks):
    """Number of the i-th longest block of a head (half 0), or of its i-th shortest (1)."""
    return i + (1 - half) * (blocks - 1 - 2 * i)


# -- drawing, telling, reading --------------------------------------------------------------------

DRAW = gl.constexpr(
    "{ .reg .pred first; .reg .b32 lane, drawn; mov.u32 lane, %laneid; mov.b32 drawn, 0;"
    " setp.eq.u32 first, lane, 0; @first atom.global.inc.u32 drawn, [$1], $2;"
    " shfl.sync.idx.b32 $0, drawn, 0, 31, 0xffffffff; }"
)


@gluon.jit
def draw(counter, tickets):
    """The next ticket, for a single warp. int32 at `counter`: how many were drawn, modulo
    `tickets`."""
    where = counter + gl.arange(0, 1, gl.BlockedLayout([1], [32], [1], [0]))
    most = gl.full([1], tickets - 1, gl.int32, where.type.layout)
    drawn = gl.inline_asm_elementwise(
        DRAW, "=r,l,r", [where, most], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
    return gl.num_programs(0) + gl.max(drawn, 0)


@gluon.jit
def first_ticket(work):
    """(a ticket of this program, how many there are). work: the counter and PLAN of the launch."""
    counter, plan = work
    return gl.program_id(0), tickets_of(gl.num_programs(0), plan)


@gluon.jit
def take(ticket, tickets, work, blocks):
    """(the next ticket, head, i, first half, the one after the last) of what a ticket is for."""
    counter, plan = work
    following = draw(counter, tickets)
    head, i, half, count = place(ticket, gl.num_programs(0), plan, blocks)
    return following, head, i, half, half + count


@gluon.jit
def places_for(COUNT: gl.constexpr):
    """Room in shared memory for the places of blocks in COUNT buffers: batch, head, first row."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    b = gl.allocate_shared_memory(gl.int32, [COUNT, 1], LAYOUT)
    h = gl.allocate_shared_memory(gl.int32, [COUNT, 1], LAYOUT)
    return b, h, gl.allocate_shared_memory(gl.int32, [COUNT, 1], LAYOUT)


@gluon.jit
def publish(places, free, slot, turn, BUFFERS: gl.constexpr, b, h, start):
    """Note, for who waits for buffer `slot`, that the block there begins at row `start` of head h
    of batch b.

    Waits until the consumer has read the block that was there BUFFERS turns ago. By a single warp,
    before it arrives at the buffer's barrier.
    """
    if turn >= BUFFERS:
        mbarrier.wait(free.index(slot), (turn // BUFFERS - 1) & 1)
    note(places[0].index(slot), b)
    note(places[1].index(slot), h)
    note(places[2].index(slot), start)


@gluon.jit
def note(where, number):
    """Write an int32 [1], by a single warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    where.store(gl.full([1], number, gl.int32, LAYOUT))


@gluon.jit
def end_work(places, full, free, slot, turn, BUFFERS: gl.constexpr):
    """Publish that there are no more blocks."""
    publish(places, free, slot, turn, BUFFERS, 0, 0, NOTHING)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def await_work(places, full, slot, turn, BUFFERS: gl.constexpr, WARPS: gl.constexpr):
    """(batch, head, first row) of the block that comes to buffer `slot`, for a group of WARPS,
    once it is there; NOTHING for the row: no more blocks."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(full.index(slot), (turn // BUFFERS) & 1)
    b = gl.max(places[0].index(slot).load(LAYOUT), 0)
    h = gl.max(places[1].index(slot).load(LAYOUT), 0)
    return b, h, gl.max(places[2].index(slot).load(LAYOUT), 0)
