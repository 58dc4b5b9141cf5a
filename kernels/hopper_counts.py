"""What a tile of scores costs beyond its softmax in `kernels.hopper_tiles`: policies and probes.

A thread holds 32 scores of each of two rows; four threads share a row. Instructions per score are
what counts, so:

    two largest   of scores rounded to bf16 in pairs, two per instruction, in a tree
    ties          sign bits of (score - maximum), added up
    ones          pairs of P_bar in bf16, where products read them: one fused multiply-add tells 1
                  from the rest, and what it tells is added up as integers

Counts stay with their thread, [ROWS, 4], until the block's last tile. Same results as
`kernels.triton_forward`, whose functions decide what follows from them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import hopper_attention, triton_forward

ROWS = gl.constexpr(hopper_attention.ROWS)
TILE = gl.constexpr(hopper_attention.TILE)
LANES = gl.constexpr(4)  # threads that share a row

shifted_reference = gluon.jit(triton_forward.shifted_reference.fn)
below_ties = gluon.jit(triton_forward.below_ties.fn)
two_largest = gluon.jit(triton_forward.two_largest.fn)

# fp32 x2 -> the same on the grid of bf16 ($0, $1), and both in one register ($2).
ROUND_PAIR = gl.constexpr("""cvt.rn.bf16x2.f32 $2, $5, $4;
            shl.b32 $0, $2, 16;
            and.b32 $1, $2, 0xffff0000;
            mov.b32 $3, 0;""")

# Of two bf16 numbers that are at most 1: 2^-126, whose bits are 0x0080, for 1, else 0. Computed as
# max(2^-118 p - 2^-118 (1 - 2^-8), 0), rounded once; 1 - 2^-8 comes before 1.
ONES_PAIR = gl.constexpr("""{ .reg .b32 factor, below;
            mov.b32 factor, 0x04800480;
            mov.b32 below, 0x847f847f;
            fma.rn.relu.bf16x2 $0, $2, factor, below;
            mov.b32 $1, 0; }""")

# Of two bf16 scores and the maximum of their row, twice: 2^-126 for a tie with it, else 0.
TIES_PAIR = gl.constexpr("""{ .reg .b32 offset, factor, least;
            mov.b32 factor, 0x7f007f00;
            mov.b32 least, 0x00800080;
            sub.rn.bf16x2 offset, $1, $2;
            fma.rn.relu.bf16x2 $0, offset, factor, least; }""")


# -- reductions within a thread -------------------------------------------------------------------


@gluon.jit
def pair_maximum(a, b):
    """Elementwise, of two bf16 numbers in an int32."""
    return gl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def pair_minimum(a, b):
    """Elementwise, of two bf16 numbers in an int32."""
    return gl.inline_asm_elementwise(
        "min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def halves(x):
    """[ROWS, N, LANES] -> two of [ROWS, N // 2, LANES], each thread its own."""
    x = gl.reshape(x, [ROWS, 2, x.shape[1] // 2, LANES])
    return gl.split(gl.permute(x, (0, 2, 3, 1)))


@gluon.jit
def unpacked(pairs):
    """The lower and the upper bf16 number of each int32, as fp32."""
    low = (pairs << 16).to(gl.float32, bitcast=True)
    return low, (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def sum_of_thread(x):
    """int32 [ROWS, TILE // 2] -> [ROWS, LANES]."""
    return gl.sum(gl.reshape(x, [ROWS, TILE // (2 * LANES), LANES]), 1)


@gluon.jit
def negatives_of_thread(x):
    """How many numbers of fp32 [ROWS, TILE] have their sign bit set, int32 [ROWS, LANES]."""
    signs = x.to(gl.uint32, bitcast=True) >> 31
    signs = gl.reshape(signs, [ROWS, TILE // (2 * LANES), LANES, 2])
    return gl.sum(gl.sum(signs, 1), 2).to(gl.int32)


# -- policies -------------------------------------------------------------------------------------


@gluon.jit
def round_pairs(s):
    """S on the grid of bf16, fp32 [ROWS, TILE], and the same in pairs, int32 [ROWS, TILE // 2]."""
    s, pairs = gl.inline_asm_elementwise(
        ROUND_PAIR, "=r,=r,=r,=r,r,r", [s], dtype=(gl.float32, gl.int32), is_pure=True,
        pack=2)  # fmt: skip
    pairs, unused = gl.split(gl.reshape(pairs, [ROWS, TILE // 2, 2]))
    return s, pairs


@gluon.jit
def larger_two(first, second, a, b):
    """The largest and second largest of first >= second and of a >= b, in pairs, elementwise."""
    second = pair_maximum(pair_maximum(second, b), pair_minimum(first, a))
    return pair_maximum(first, a), second


@gluon.jit
def ordered_halves(pairs):
    """Pairs [ROWS, TILE // 2] -> the larger and the smaller of its halves, [ROWS, 8, LANES]."""
    a, b = halves(gl.reshape(pairs, [ROWS, TILE // (2 * LANES), LANES]))
    return pair_maximum(a, b), pair_minimum(a, b)


@gluon.jit
def two_of_each_row(first, second, S_LAYOUT: gl.constexpr):
    """Largest and second largest per row, fp32, of pairs first >= second, [ROWS, 8, LANES]."""
    for _ in gl.static_range(3):  # 4 are left; 2, 1
        a, b = halves(first)
        c, d = halves(second)
        first, second = larger_two(a, c, b, d)
    a, b = unpacked(gl.reshape(first, [ROWS, LANES]))
    c, d = unpacked(gl.reshape(second, [ROWS, LANES]))
    first, second = two_largest(a, c, b, d)
    first, second = gl.reduce((first, second), 1, two_largest)
    first = gl.convert_layout(first, gl.SliceLayout(1, S_LAYOUT))
    return first, gl.convert_layout(second, gl.SliceLayout(1, S_LAYOUT))


@gluon.jit
def row_reference(top, second, policy, POLICY: gl.constexpr):
    """The reference of rows whose two largest scores are given."""
    beta, eps, min_offset, max_offset = policy
    return shifted_reference(top, top - second <= eps, beta, 0.0, min_offset, max_offset, POLICY)


@gluon.jit
def tile_reference(s, pairs, policy, S_LAYOUT: gl.constexpr, POLICY: gl.constexpr,
                   PAIRS: gl.constexpr):  # fmt: skip
    """(row maximum, reference) of a tile's scores, as `triton_forward.tile_reference`."""
    if PAIRS:
        first, second = ordered_halves(pairs)
        rm, second = two_of_each_row(first, second, S_LAYOUT)
    else:
        lowest = gl.full([ROWS, TILE], float("-inf"), gl.float32, S_LAYOUT)
        rm, second = gl.reduce((s, lowest), 1, two_largest)
    m = row_reference(rm, second, policy, POLICY)
    return rm, gl.where(rm == float("-inf"), rm, m)


# -- probes ---------------------------------------------------------------------------------------


@gluon.jit
def for_each_thread(x, beside):
    """A number per row, [ROWS], as [ROWS, 1] where the block `beside` is."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, beside.type.layout)), 1)


@gluon.jit
def ties_of_tile(s, offset, pairs, top, unit, S_LAYOUT: gl.constexpr, POLICY: gl.constexpr,
                 PAIRS: gl.constexpr, UNIT_EXACT: gl.constexpr):  # fmt: skip
    """Scores that tie with `top`, the row maximum so far: one number as S. int32 [ROWS, LANES].

    PAIRS: scores on the grid of bf16; two 16-bit counts in each.
    """
    if PAIRS:
        bits = top.to(gl.int32, bitcast=True)
        twice = for_each_thread(bits | (bits >> 16 & 0xFFFF), pairs)
        ties = gl.inline_asm_elementwise(
            TIES_PAIR, "=r,r,r", [pairs, twice], dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip
        return sum_of_thread(ties) >> 7
    elif POLICY == 0 and UNIT_EXACT:  # top is the reference
        return TILE // LANES - negatives_of_thread(offset)
    else:
        return negatives_of_thread(gl.expand_dims(below_ties(top, unit), 1) - s)


@gluon.jit
def ones_of_tile(p):
    """How many P_bar [ROWS, TILE], in bf16, are 1: as two 16-bit counts [ROWS, LANES]."""
    ones = gl.inline_asm_elementwise(
        ONES_PAIR, "=r,=r,r", [p], dtype=gl.int32, is_pure=True, pack=2)  # fmt: skip
    ones, unused = gl.split(gl.reshape(ones, [ROWS, TILE // 2, 2]))
    return sum_of_thread(ones) >> 7


@gluon.jit
def with_ones(tally, p):
    """tally with those of a tile, whose P_bar is in the registers that its product reads.

    There two weights share a register as they must anyway; in the softmax, whose P_bar waits in
    fp32 for the product before, each two would be packed once more, for this alone.
    """
    tops, ties, ones = tally
    return tops, ties, (ones[0] + ones_of_tile(p),)


@gluon.jit
def row_counts(counts, S_LAYOUT: gl.constexpr, PAIRS: gl.constexpr):
    """int32 per row of counts per thread; PAIRS: two 16-bit counts in each."""
    if PAIRS:
        counts = (counts & 0xFFFF) + (counts >> 16 & 0xFFFF)
    return gl.convert_layout(gl.sum(counts, 1), gl.SliceLayout(1, S_LAYOUT))
