"""Division without branches gives the bits of IEEE 754: its PTX step by step, and on a GPU."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from kernels.hopper_divide import QUOTIENTS, QUOTIENTS_BY_SMALL, divide  # noqa: E402


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


OPERATIONS = {
    "mul.rn.f32": lambda a, b: a * b,
    "neg.f32": lambda a: -a,
    "abs.f32": np.abs,
    "fma.rn.f32": fma,
    "setp.ltu.or.f32": lambda a, b, c: ~(a >= b) | c,
    "setp.gt.or.f32": lambda a, b, c: (a > b) | c,
    "or.pred": lambda a, b: a | b,
}


def run_ptx(steps, x, l, y, least):
    """What the inline assembly computes of 32 numbers in each row: quotients, and who divides."""
    given = [z[:, i] for z in (x, l, y, least) for i in range(32)]
    registers = {f"${32 + i}": z for i, z in enumerate(given)}

    def read(name):
        if name.startswith("0f"):
            return np.array(int(name[2:], 16), np.uint32).view(np.float32)
        return registers[name]

    body = steps.value.split("@!odd0 bra DONE;")[0].strip("{ ")
    for line in filter(None, (part.strip() for part in body.split(";"))):
        operation, *names = re.split(r"[ ,]+", line)
        if operation == ".reg":
            continue
        if operation == "setp.ne.b32":
            registers[names[0]] = np.zeros(len(x), bool)
            continue
        registers[names[0]] = OPERATIONS[operation](*(read(name) for name in names[1:]))
    return np.stack([registers[f"${i}"] for i in range(32)], 1), registers["odd0"]


@pytest.mark.parametrize(
    "steps, least_l, most_x", [(QUOTIENTS, -4, 120), (QUOTIENTS_BY_SMALL, -60, 60)]
)
def test_the_steps_of_the_assembly_round_as_ieee_division(steps, least_l, most_x):
    """l as it occurs (2^-4 or 2^-60 to 2^24) and all x whose remainders do not underflow."""
    rng = np.random.default_rng(2)
    patterns = rng.integers(0, 2**32, (2, 2**13, 32), dtype=np.uint64)
    exponents = 127 + least_l + patterns[0] % (24 - least_l)
    l = ((patterns[0] & 0x7FFFFF) | (exponents << 23)).astype(np.uint32)
    exponents = 31 + (patterns[1] >> 8) % (96 + most_x)
    x = ((patterns[1] & 0x807FFFFF) | (exponents << 23)).astype(np.uint32)
    x, l = x.view(np.float32), l.view(np.float32)
    y, least = np.float32(1) / l, np.full_like(l, 2.0**-96)
    found, odd = run_ptx(steps, x, l, y, least)
    assert not odd.any()
    assert np.array_equal(found, x / l)
    x[::2, 3] = np.float32(2.0**-97)  # and where one may: the instruction, for all
    x[1::4, 5] = np.nan
    x[3::4, 5] = np.float32(2.0**most_x * 1.5)
    assert run_ptx(steps, x, l, y, least)[1].all()


@gluon.jit
def divide_kernel(x_ptr, l_ptr, out_ptr, SMALL: gl.constexpr):
    """4,096 quotients, 32 a thread."""
    i = gl.program_id(0) * 4096 + gl.arange(0, 4096, gl.BlockedLayout([32], [32], [4], [0]))
    gl.store(out_ptr + i, divide(gl.load(x_ptr + i), gl.load(l_ptr + i), SMALL))


def quotients(x, l, small):
    x, l = torch.from_numpy(x).cuda(), torch.from_numpy(l).cuda()
    out = torch.empty_like(x)
    divide_kernel[(x.numel() // 4096,)](x, l, out, SMALL=small, num_warps=4)
    return out.cpu().numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("usual", "small", "any bits", "special"))
@pytest.mark.parametrize("small", (False, True))
def test_bits_of_ieee_division(kind, small):
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
        want = x / l
    got = quotients(x, l, small)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), (x[~same][:3], l[~same][:3], got[~same][:3], want[~same][:3])
