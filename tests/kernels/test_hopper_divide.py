"""Division without branches gives the bits of IEEE 754: its PTX step by step, and on a GPU."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from kernels.hopper_divide import (  # noqa: E402
    QUOTIENTS,
    QUOTIENTS_BY_SMALL,
    ROUNDED,
    ROUNDED_BY_SMALL,
    divide,
)


def fma(a, b, c):
    """a b + c of fp32 numbers, rounded once: the sum in fp64, to odd, then to fp32."""
    exact = a.astype(np.float64) * b.astype(np.float64)  # 48 bits
    c = c.astype(np.float64)
    total = exact + c
    part = total - exact
    lost = (exact - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(lost > 0, np.inf, -np.inf)
    total = np.where((lost != 0) & even, np.nextafter(total, toward), total)
    return total.astype(np.float32)


def to_bf16(x):
    """fp32 -> the nearest number on the grid of bf16, ties to even."""
    return torch.from_numpy(x).bfloat16().float().numpy()


def larger(function):
    """Of two pairs, by absolute value, with the sign of their product; NaN if there is one."""
    return lambda a, b: np.copysign(function(np.abs(a), np.abs(b)), np.sign(a) * np.sign(b))


def below(a, bound):
    return np.moveaxis(~(a >= bound), -1, 0)


def above(a, bound):
    return np.moveaxis(~(a <= bound), -1, 0)


OPERATIONS = {
    "mul.rn.f32": lambda a, b: a * b,
    "neg.f32": lambda a: -a,
    "fma.rn.f32": fma,
    "cvt.rn.bf16x2.f32": lambda b, a: to_bf16(np.stack([a, b], -1)),
    "max.NaN.xorsign.abs.bf16x2": larger(np.maximum),
    "min.NaN.xorsign.abs.bf16x2": larger(np.minimum),
    "abs.bf16x2": np.abs,
    "mov.b32": lambda a: a,
    "setp.gtu.bf16x2": above,
    "setp.ltu.bf16x2": below,
    "or.pred": lambda a, b: a | b,
}


def bf16_twice(word):
    """Of a number in both halves of 32 bits, as PTX writes them."""
    bits = int(word, 16)
    assert bits >> 16 == bits & 0xFFFF
    return np.array(bits & 0xFFFF0000, np.uint32).view(np.float32)


def run_ptx(steps, x, l, y):
    """What the inline assembly computes of 32 numbers in each row: quotients, and who divides."""
    results = 16 if steps in (ROUNDED, ROUNDED_BY_SMALL) else 32
    given = [z[:, i] for z in (x, l, y) for i in range(32)]
    registers = {f"${results + i}": z for i, z in enumerate(given)}

    def read(name):
        return bf16_twice(name) if name.startswith("0x") else registers[name]

    body = steps.value.split("@!odd bra DONE;")[0].strip("{ ")
    for line in filter(None, (part.strip() for part in body.split(";"))):
        operation, *names = re.split(r"[ ,]+", line)
        if operation == ".reg":
            continue
        found = OPERATIONS[operation](*(read(name) for name in names[1:]))
        if "|" in names[0]:
            registers.update(zip(names[0].split("|"), found))
        else:
            registers[names[0]] = found
    out = np.stack([registers[f"${i}"] for i in range(results)], 1)
    return out.reshape(len(x), 32), registers["odd"]


@pytest.mark.parametrize(
    "steps, least_l, least_q",
    [(QUOTIENTS, -4, -92), (ROUNDED, -4, -92), (QUOTIENTS_BY_SMALL, -60, -36),
     (ROUNDED_BY_SMALL, -60, -36)],
)  # fmt: skip
def test_the_steps_of_the_assembly_round_as_ieee_division(steps, least_l, least_q):
    """l as it occurs (2^-4 or 2^-60 to 2^24), and all quotients from 2^-92 or 2^-36 to 2^96."""
    rng = np.random.default_rng(2)
    patterns = rng.integers(0, 2**32, (2, 2**13, 32), dtype=np.uint64)
    exponents = 127 + least_l + patterns[0] % (24 - least_l)
    l = ((patterns[0] & 0x7FFFFF) | (exponents << 23)).astype(np.uint32)
    exponents = 127 + least_q + (patterns[1] >> 8) % (96 - least_q)
    q = ((patterns[1] & 0x807FFFFF) | (exponents << 23)).astype(np.uint32).view(np.float32)
    l = l.view(np.float32)
    x = (q.astype(np.float64) * l).astype(np.float32)
    x = np.where(np.abs(x / l) < 2.0**least_q, 2 * x, x)
    y = np.float32(1) / l
    found, odd = run_ptx(steps, x, l, y)
    want = to_bf16(x / l) if steps in (ROUNDED, ROUNDED_BY_SMALL) else x / l
    assert not odd.any()
    assert np.array_equal(found, want)
    with np.errstate(all="ignore"):  # and beyond: the instruction, for all
        for i, other in enumerate((0.0, -0.0, 2.0**least_q / 1.02, 2.0**96 * 1.02, 1e-40, np.nan,
                                   -np.inf)):  # fmt: skip
            x[i::7, i] = np.float32(other) * (l[i::7, i] if other not in (1e-40, 0.0) else 1)
        assert run_ptx(steps, x, l, y)[1].all()


def test_a_remainder_that_underflows_is_never_taken_for_exact():
    """However small x and l are, a wrong quotient is one that the assembly does not let pass."""
    rng = np.random.default_rng(3)
    for steps, least_l in ((QUOTIENTS, -4), (QUOTIENTS_BY_SMALL, -60)):
        bits = rng.integers(0, 2**32, (2, 2**13), dtype=np.uint64)
        l = (bits[0] & 0x7FFFFF) | (127 + least_l + bits[0] % 8 << 23)
        x = (bits[1] & 0x807FFFFF) | ((bits[1] >> 8) % 60 << 23)  # down to subnormal ones
        l, x = (z.astype(np.uint32).view(np.float32)[:, None].repeat(32, 1) for z in (l, x))
        with np.errstate(all="ignore"):
            found, odd = run_ptx(steps, x, l, np.float32(1) / l)
            wrong = (found != x / l).any(1)
        assert wrong.any() and (odd | ~wrong).all()


@gluon.jit
def divide_kernel(x_ptr, l_ptr, out_ptr, SMALL: gl.constexpr, ROUND: gl.constexpr):
    """4,096 quotients, 32 a thread."""
    i = gl.program_id(0) * 4096 + gl.arange(0, 4096, gl.BlockedLayout([32], [32], [4], [0]))
    found = divide(gl.load(x_ptr + i), gl.load(l_ptr + i), SMALL, ROUND)
    gl.store(out_ptr + i, found.to(gl.float32))


def quotients(x, l, small, rounded):
    x, l = torch.from_numpy(x).cuda(), torch.from_numpy(l).cuda()
    out = torch.empty_like(x)
    divide_kernel[(x.numel() // 4096,)](x, l, out, SMALL=small, ROUND=rounded, num_warps=4)
    return out.cpu().numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("usual", "small", "any bits", "special"))
@pytest.mark.parametrize("small", (False, True))
@pytest.mark.parametrize("rounded", (False, True))
def test_bits_of_ieee_division(kind, small, rounded):
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**32, (2, 2**22), dtype=np.uint64).astype(np.uint32)
    x, l = (row.view(np.float32).copy() for row in patterns)
    if kind in ("usual", "small"):
        least = 127 if kind == "usual" else 60
        l = ((patterns[1] & 0x7FFFFF) | (least + patterns[1] % 20 << 23)).astype(np.uint32)
        x = (patterns[0] & 0x807FFFFF) | (60 + (patterns[0] >> 8) % 100 << 23)
        x, l = x.astype(np.uint32).view(np.float32), l.view(np.float32)
    if kind == "special":
        odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 2e-29, 3e38, 1.0, 0.06],
                       np.float32)  # fmt: skip
        x, l = rng.choice(odd, 2**16), np.abs(rng.choice(odd, 2**16))
    with np.errstate(all="ignore"):
        want = to_bf16(x / l) if rounded else x / l
    got = quotients(x, l, small, rounded)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), (x[~same][:3], l[~same][:3], got[~same][:3], want[~same][:3])
