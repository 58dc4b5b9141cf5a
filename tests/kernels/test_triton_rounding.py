"""Rounding inside Triton kernels: the emulator's bits, in the interpreter and on a GPU."""

import math

import pytest
import torch

from kernels import FP32
from kernels.rounding import round_to

triton = pytest.importorskip("triton")
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.interpreted),
]


def patterns(bits):
    """fp32 numbers at, just below and just above every kind of boundary, and the special ones."""
    generator = torch.Generator().manual_seed(bits)
    drop = 23 - bits
    tie = 1 << (drop - 1)
    heads = torch.randint(0, 2**32, (4000,), generator=generator, dtype=torch.int64)
    heads = heads & ~((1 << drop) - 1) & 0xFFFFFFFF
    tails = torch.tensor([0, 1, tie - 1, tie, tie + 1, (1 << drop) - 1], dtype=torch.int64)
    both = (heads[:, None] | tails[None, :]).flatten()
    signed = torch.where(both >= 2**31, both - 2**32, both).to(torch.int32)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3.4e38, 1.0])
    return torch.cat([signed.view(torch.float32), special])


def rounded(x, bits, *, stochastic=False, seed=0, dtype=torch.float32):
    from kernels import triton_common

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    seed = torch.full((1,), seed, dtype=torch.int64, device=x.device)
    n = x.numel()
    triton_common.round_tensor_kernel[(-(-n // 4096),)](
        x, out, seed, n, 1, 1, n, n, 1, 1, DIM=n, BITS=bits, STOCHASTIC=stochastic,
        STREAM=0, BLOCK=4096,
    )  # fmt: skip
    return out


def assert_same_bits(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(got[known].view(torch.int32), want[known].view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", (0, 1, 2, 3, 4, 5, 6, 7, 10, 16, 22, 23))
def test_nearest_even_is_bitwise_the_emulators(bits, device):
    x = patterns(min(bits, 22))
    assert_same_bits(rounded(x.to(device), bits).cpu(), round_to(x, FP32.cut(bits)))


@pytest.mark.interpreted
def test_stores_to_bf16_round_to_nearest_even():
    x = patterns(7)
    assert_same_bits(rounded(x, 23, dtype=torch.bfloat16).float(), round_to(x, FP32.cut(7)))


@pytest.mark.interpreted
def test_without_the_repair_the_interpreter_truncates():
    """Case 43: the fault that the repair removes is there, and this project would call it bias."""
    from kernels import triton_common

    x = patterns(7)
    x = x[torch.isfinite(x) & (x.abs() > 1e-30) & (x.abs() < 1e30)]
    triton_common.undo_interpreter_repair()
    try:
        faulty = rounded(x, 7)
    finally:
        triton_common.repair_interpreter()
    want = round_to(x, FP32.cut(7))
    assert not torch.equal(faulty, want)
    assert (faulty.abs() <= x.abs()).all()  # toward zero: a signed error
    assert_same_bits(rounded(x, 7), want)


@pytest.mark.interpreted
def test_stochastic_rounding_follows_its_law():
    count = 2**15
    for bits, share in ((7, 0.25), (7, 0.9), (3, 0.5)):
        x = torch.full((count,), 1.0 + share * 2.0**-bits)
        up = (rounded(x, bits, stochastic=True, seed=5) > 1).double().mean().item()
        assert abs(up - share) < 5 * math.sqrt(share * (1 - share) / count) + 1e-4


@pytest.mark.interpreted
def test_stochastic_rounding_keeps_numbers_on_the_grid_and_repeats():
    x = round_to(patterns(4), FP32.cut(4))
    assert_same_bits(rounded(x, 4, stochastic=True, seed=1), x)
    y = torch.randn(5000)
    first, again, other = (rounded(y, 4, stochastic=True, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert_same_bits(first, round_to(first, FP32.cut(4)))
