"""Division in the Hopper kernels: the bits of IEEE 754 without a branch for each number."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHAINS = 4  # of comparisons, each of which waits for the one before


def _quotients(n: int, most: str) -> str:
    """PTX of `divide`: results $0 on, then n each of x, l, its reciprocals y and the least x.

    most: the largest x, as PTX writes an fp32 number.
    """
    x, l, y, least = ([f"${k * n + i}" for i in range(n)] for k in (1, 2, 3, 4))
    odd = [f"odd{c}" for c in range(CHAINS)]
    lines = [f".reg .pred {', '.join(odd)};", ".reg .f32 e, size;"]
    lines += [f"setp.ne.b32 {c}, 0, 0;" for c in odd]
    for i in range(n):
        lines.append(f"mul.rn.f32 ${i}, {x[i]}, {y[i]};")
        for _ in range(2):
            lines.append(f"neg.f32 e, ${i};")
            lines.append(f"fma.rn.f32 e, e, {l[i]}, {x[i]};")
            lines.append(f"fma.rn.f32 ${i}, e, {y[i]}, ${i};")
    for i in range(n):
        c = odd[i % CHAINS]
        lines.append(f"abs.f32 size, {x[i]};")
        lines.append(f"setp.ltu.or.f32 {c}, size, {least[i]}, {c};")
        lines.append(f"setp.gt.or.f32 {c}, size, {most}, {c};")
    lines += [f"or.pred odd0, odd0, {c};" for c in odd[1:]]
    lines.append("@!odd0 bra DONE;")
    lines += [f"div.rn.f32 ${i}, {x[i]}, {l[i]};" for i in range(n)]
    return "{ " + " ".join(lines) + " DONE: }"


QUOTIENTS = gl.constexpr(_quotients(32, "0f7B800000"))  # 2^120
QUOTIENTS_BY_SMALL = gl.constexpr(_quotients(32, "0f5D800000"))  # 2^60
QUOTIENT_OPERANDS = gl.constexpr(",".join(32 * ["=&r"] + 128 * ["r"]))
RECIPROCAL = gl.constexpr(
    "{ .reg .f32 e; rcp.approx.ftz.f32 $0, $1; fma.rn.f32 e, $1, $0, 0fBF800000; neg.f32 e, e;"
    " fma.rn.f32 $0, $0, e, $0; }"
)


@gluon.jit
def divide(x, l, SMALL: gl.constexpr = False):
    """x / l of two blocks, l > 0, as `div.rn` rounds it, without a branch for each number.

    SMALL: l may well be small, down to 2^-60, as under a reference far above the row maximum.

    The quotient from the rounded reciprocal, corrected twice by its exact remainder, is the
    nearest number (Markstein 1990: a correctly rounded reciprocal, a faithful quotient) while the
    remainder does not underflow. Where it may, 32 numbers of a thread take the instruction, which
    branches for each and so computes one after the other. The reciprocal is computed as the
    assembler computes `rcp.rn` of the numbers l for which it is used.
    """
    LEAST: gl.constexpr = 2.0**-60 if SMALL else 2.0**-4
    STEPS: gl.constexpr = QUOTIENTS_BY_SMALL if SMALL else QUOTIENTS
    y = gl.inline_asm_elementwise(
        RECIPROCAL, "=&r,r", [l], dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
    least = gl.where((l >= LEAST) & (l <= 2.0**24), 2.0**-96, float("inf"))
    return gl.inline_asm_elementwise(
        STEPS, QUOTIENT_OPERANDS, [x, l, y, least], dtype=gl.float32, is_pure=True,
        pack=32)  # fmt: skip
