"""Division in the Hopper kernels: the bits of IEEE 754 without a branch for each number."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TOGETHER = gl.constexpr(32)  # quotients of a thread, and one branch for all of them
MOST = "0x6f806f80"  # 2^96 in bf16, twice
LEAST = {False: "0x11801180", True: "0x2d802d80"}  # by SMALL: 2^-92 and 2^-36


def _quotients(small: bool, rounded: bool) -> str:
    """PTX of `divide`: results $0 on, then n each of x, l and its reciprocals y.

    rounded: results are bf16, two in a register.
    """
    n = TOGETHER.value
    results = n // 2 if rounded else n
    x, l, y = ([f"${results + k * n + i}" for i in range(n)] for k in range(3))
    q = [f"q{i}" for i in range(n)] if rounded else [f"${i}" for i in range(n)]
    pairs = [f"${i}" if rounded else f"pair{i}" for i in range(n // 2)]
    packed = [f"cvt.rn.bf16x2.f32 {p}, {b}, {a};" for p, a, b in zip(pairs, q[::2], q[1::2])]
    lines = [".reg .pred odd, odd1, odd2, odd3;", ".reg .f32 e;"]
    lines.append(f".reg .f32 {', '.join(q)};" if rounded else f".reg .b32 {', '.join(pairs)};")
    for i in range(n):
        lines.append(f"mul.rn.f32 {q[i]}, {x[i]}, {y[i]};")
        for _ in range(2):
            lines.append(f"neg.f32 e, {q[i]};")
            lines.append(f"fma.rn.f32 e, e, {l[i]}, {x[i]};")
            lines.append(f"fma.rn.f32 {q[i]}, e, {y[i]}, {q[i]};")
    lines += packed
    for which in ("max", "min"):
        found = [f"{which}{i}" for i in range(n // 4)]
        lines.append(f".reg .b32 {', '.join(found)}, bound_{which};")
        step, these = n // 4, pairs
        while step:
            for i in range(step):
                lines.append(
                    f"{which}.NaN.xorsign.abs.bf16x2 {found[i]}, {these[i]}, {these[i + step]};"
                )
            step, these = step // 2, found
        lines.append(f"abs.bf16x2 {which}0, {which}0;")
        lines.append(f"mov.b32 bound_{which}, {MOST if which == 'max' else LEAST[small]};")
    lines.append("setp.gtu.bf16x2 odd|odd1, max0, bound_max;")
    lines.append("setp.ltu.bf16x2 odd2|odd3, min0, bound_min;")
    lines += [f"or.pred odd, odd, odd{i};" for i in (1, 2, 3)]
    lines.append("@!odd bra DONE;")
    lines += [f"div.rn.f32 {q[i]}, {x[i]}, {l[i]};" for i in range(n)]
    lines += packed if rounded else []
    return "{ " + " ".join(lines) + " DONE: }"


QUOTIENTS = gl.constexpr(_quotients(False, False))
QUOTIENTS_BY_SMALL = gl.constexpr(_quotients(True, False))
ROUNDED = gl.constexpr(_quotients(False, True))
ROUNDED_BY_SMALL = gl.constexpr(_quotients(True, True))
READ = 3 * TOGETHER.value * ["r"]
OPERANDS = gl.constexpr(",".join(TOGETHER.value * ["=&r"] + READ))
ROUNDED_OPERANDS = gl.constexpr(",".join(TOGETHER.value // 2 * ["=&r"] + READ))
RECIPROCAL = gl.constexpr(
    "{ .reg .f32 e; rcp.approx.ftz.f32 $0, $1; fma.rn.f32 e, $1, $0, 0fBF800000; neg.f32 e, e;"
    " fma.rn.f32 $0, $0, e, $0; }"
)


@gluon.jit
def divide(x, l, SMALL: gl.constexpr = False, ROUND: gl.constexpr = False):
    """x / l of two blocks, l > 0, as `div.rn` rounds it, without a branch for each number.

    SMALL: l may well be small, down to 2^-60, as under a reference far above the row maximum.
    ROUND: to bf16, once more.

    The quotient from the rounded reciprocal, corrected twice by its exact remainder, is the
    nearest number (Markstein 1990: a correctly rounded reciprocal, a faithful quotient) while the
    remainder does not underflow: while l and the quotient have their usual sizes. These are read
    off pairs in bf16, the largest and the least of 32. Else all 32 take the instruction, which
    branches for each and so computes one after the other. The reciprocal is computed as the
    assembler computes `rcp.rn` of the numbers l for which it is used.
    """
    LEAST_L: gl.constexpr = 2.0**-60 if SMALL else 2.0**-4
    y = gl.inline_asm_elementwise(
        RECIPROCAL, "=&r,r", [l], dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
    y = gl.where((l >= LEAST_L) & (l <= 2.0**24), y, float("nan"))  # so is the quotient, then
    if ROUND:
        STEPS: gl.constexpr = ROUNDED_BY_SMALL if SMALL else ROUNDED
        return gl.inline_asm_elementwise(
            STEPS, ROUNDED_OPERANDS, [x, l, y], dtype=gl.bfloat16, is_pure=True,
            pack=TOGETHER)  # fmt: skip
    else:
        STEPS: gl.constexpr = QUOTIENTS_BY_SMALL if SMALL else QUOTIENTS
        return gl.inline_asm_elementwise(
            STEPS, OPERANDS, [x, l, y], dtype=gl.float32, is_pure=True, pack=TOGETHER)  # fmt: skip
