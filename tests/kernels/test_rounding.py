"""Rounding, bit for bit: against torch's casts, against itself, and its bias."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import rounding
from kernels.formats import BF16, E4M3, E5M2, FP16, FP32, FloatFormat
from kernels.rounding import bit_pattern, decode, round_to, ulp

CAST = [BF16, FP16, E4M3, E5M2]
DETERMINISTIC = ["nearest_even", "nearest_away", "toward_zero"]
ANY = [*CAST, BF16.cut(0), BF16.cut(2), FP16.cut(5), E5M2.cut(0), FloatFormat("odd", 6, 4)]


def _same_bits(a, b):
    """Equal bits, any NaN equal to any NaN."""
    both_nan = a.isnan() & b.isnan()
    return ((a.view(torch.int32) == b.view(torch.int32)) | both_nan).all()


def _all_numbers(fmt):
    """Every number of a 16- or 8-bit format as float32, infinities and NaN included."""
    if fmt.fraction_bits + fmt.exponent_bits == 7:
        return torch.arange(256).to(torch.uint8).view(fmt.torch_dtype).float()
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(fmt.torch_dtype).float()


def _hard_cases(fmt):
    """Every number of the format, every midpoint, and one fp32 ulp to either side; random bits."""
    numbers = _all_numbers(fmt)
    finite = numbers[numbers.isfinite()].double().sort().values
    middle = ((finite[1:] + finite[:-1]) / 2).float()
    top = torch.tensor([fmt.max_finite + 2.0**fmt.emax * fmt.unit_roundoff]).float()
    exact = torch.cat([numbers, middle, top, -top])
    around = [torch.nextafter(exact, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    bits = torch.randint(-(2**31), 2**31, (300_000,)).to(torch.int32).view(torch.float32)
    scale = torch.exp2(torch.randint(fmt.emin - 12, fmt.emax + 3, (100_000,)).double())
    typical = (torch.randn(100_000).double() * scale).float()
    return torch.cat([exact, *around, bits, typical])


@pytest.mark.parametrize("fmt", CAST, ids=str)
def test_nearest_even_equals_torchs_cast_bit_for_bit(fmt):
    x = _hard_cases(fmt)
    cast = x.to(fmt.torch_dtype).float()
    if fmt.finite_only and torch.tensor(1e9).to(fmt.torch_dtype).float().isnan():
        keep = x.abs() <= 464  # a torch whose CPU cast gives NaN on overflow
        x, cast = x[keep], cast[keep]
    assert _same_bits(round_to(x, fmt), cast)
    assert _same_bits(rounding._round_scaled(x, fmt, "nearest_even", None), cast)


def test_double_carrier_rounds_once():
    x = np.concatenate([np.random.default_rng(0).standard_normal(50_000), [1 + 2**-11 + 2**-40]])
    assert (round_to(torch.from_numpy(x), FP16).numpy() == x.astype(np.float16)).all()


@pytest.mark.parametrize("mode", DETERMINISTIC)
@pytest.mark.parametrize("bits", range(8))
def test_integer_and_scaled_rounding_agree_at_every_width(bits, mode):
    fmt = BF16.cut(bits)
    x = torch.randint(-(2**31), 2**31, (50_000,)).to(torch.int32)
    ties = (x & -(1 << (23 - bits))) | (1 << (22 - bits))
    x = torch.cat([x, ties]).view(torch.float32)
    mine = rounding._round_fp32_bits(x, fmt, mode, None)
    if mode == "toward_zero":
        x, mine = x[x.isfinite()], mine[x.isfinite()]
    assert _same_bits(mine, rounding._round_scaled(x, fmt, mode, None))


@pytest.mark.parametrize("fmt", ANY, ids=str)
@pytest.mark.parametrize("mode", DETERMINISTIC)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_idempotent_monotone_and_sign_symmetric(fmt, mode, data):
    width = st.floats(allow_nan=False, width=32)
    x = torch.tensor(data.draw(st.lists(width, min_size=2, max_size=40)))
    x = torch.cat([x, x * (1 + fmt.unit_roundoff)]).sort().values
    rounded = round_to(x, fmt, mode)
    assert _same_bits(round_to(rounded, fmt, mode), rounded)
    assert (rounded[1:] >= rounded[:-1]).all()
    assert _same_bits(round_to(-x, fmt, mode), -rounded)
    if mode == "toward_zero":
        assert (rounded.abs() <= x.abs()).all()


@pytest.mark.parametrize("fmt", [FP16, BF16, BF16.cut(2), E5M2], ids=str)
def test_signed_zero_subnormals_overflow_nan(fmt):
    tiny = fmt.min_subnormal
    x = torch.tensor([0.0, -0.0, tiny, tiny * 0.75, tiny / 2, -tiny / 2, torch.inf, torch.nan])
    rounded = round_to(x, fmt)
    expected = torch.tensor([0.0, -0.0, tiny, tiny, 0.0, -0.0, torch.inf, torch.nan])
    assert _same_bits(rounded, expected)
    big = torch.tensor(3.4e38)
    assert round_to(big, fmt) == torch.inf and round_to(big, fmt, "toward_zero") == fmt.max_finite


def test_e4m3_saturates():
    x = torch.tensor([448.0, 464.0, 464.1, 1e9, -1e9, torch.inf, -torch.inf])
    assert round_to(x, E4M3).tolist() == [448, 448, 448, 448, -448, 448, -448]
    assert round_to(torch.tensor(torch.nan), E4M3).isnan()


@pytest.mark.parametrize("fmt", [BF16, BF16.cut(3), FP16, E4M3], ids=str)
def test_stochastic_rounds_up_with_the_dropped_fraction(fmt):
    n = 40_000
    for fraction in (0.125, 0.5, 0.75):
        x = torch.full((n,), -(1 + fraction * 2 * fmt.unit_roundoff))
        rounded = round_to(x, fmt, "stochastic", generator=torch.Generator().manual_seed(1))
        assert set(rounded.tolist()) == {-1.0, -(1 + 2 * fmt.unit_roundoff)}
        rate = (rounded < -1).double().mean().item()
        assert abs(rate - fraction) < 5 * (fraction * (1 - fraction) / n) ** 0.5


def test_stochastic_is_reproducible_and_leaves_grid_numbers_alone():
    x = torch.randn(1000)
    draws = [
        round_to(x, BF16, "stochastic", generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(round_to(draws[0], BF16, "stochastic"), draws[0])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert _same_bits(round_to(special, BF16, "stochastic"), special)


def test_wide_formats_and_wrong_input():
    x = torch.randn(3)
    assert round_to(x, FP32) is x
    with pytest.raises(ValueError, match="nearest_even, nearest_away"):
        round_to(x, BF16, "up")
    with pytest.raises(TypeError, match="float"):
        round_to(x.bfloat16(), BF16)


def test_case_001_two_addends_and_a_crumb():
    total = torch.tensor(-2.40625) + torch.tensor(-2.296875)

    def check(mode):
        assert round_to(total, BF16, mode) == -4.6875
        assert round_to(total - 1e-6, BF16, mode) == -4.71875

    check("nearest_even")
    for wrong in ("nearest_away", "toward_zero"):  # the reported description, and a plain cast
        with pytest.raises(AssertionError):
            check(wrong)
    assert round_to(total, BF16, "nearest_away") == -4.71875
    assert decode(total.item(), BF16).tie
    # the paper's own accumulator has bits below the guard bit, so it is no tie
    told = decode(-2.4071154594421387 - 2.296875, BF16)
    assert told.guard == 1 and told.sticky == 1 and told.rounded == -4.71875


def test_case_008_the_same_two_values_in_fp16_are_exact():
    total = torch.tensor(-2.40625) + torch.tensor(-2.296875)
    assert round_to(total, FP16) == total == -4.703125
    assert round_to(total, BF16) != total


def test_case_020_truncation_shrinks_and_nearest_even_does_not():
    x = torch.randn(2**20).double()

    def mean(mode):
        error = (round_to(x.float(), BF16, mode).double().abs() - x.abs()) / x.abs()
        return error.mean().item()

    def check(mode):
        assert abs(mean(mode)) < 1e-5

    check("nearest_even")
    with pytest.raises(AssertionError):
        check("toward_zero")
    assert mean("toward_zero") == pytest.approx(-2.8e-3, abs=1e-4)


def test_decode_and_patterns():
    told = decode(-4.703125, BF16)
    assert (told.sign, told.exponent, told.guard, told.sticky) == (1, 2, 1, 0)
    assert told.pattern == bit_pattern(-4.6875, BF16) == "1" + "10000001" + "0010110"
    assert told.error_ulp == 0.5
    for value in torch.randn(200).tolist():
        told = decode(value, BF16)
        expected = torch.tensor(value).bfloat16()
        assert told.rounded == expected.item()
        pattern = expected.view(torch.int16).item() & 0xFFFF
        assert told.pattern == f"{pattern:016b}"
    with pytest.raises(ValueError, match="finite"):
        decode(torch.inf, BF16)
    with pytest.raises(ValueError, match="not a bf16 number"):
        bit_pattern(0.1, BF16)


def test_ulp_is_the_spacing_of_neighbours():
    x = torch.tensor([1.0, 1.99, 2.0, -5.0, 0.0, 2.0**-130]).double()
    expected = [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-5, BF16.min_subnormal, BF16.min_subnormal]
    assert ulp(x, BF16).tolist() == expected
