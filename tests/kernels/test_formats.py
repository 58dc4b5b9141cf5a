"""FloatFormat against torch.finfo, the fraction dial, and text."""

import numpy as np
import pytest
import torch

from kernels.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, FloatFormat, parse_format
from kernels.rounding import round_to


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_limits_equal_torch_finfo(fmt):
    info = torch.finfo(fmt.torch_dtype)
    assert fmt.max_finite == info.max
    assert fmt.min_normal == info.tiny
    assert 2 * fmt.unit_roundoff == info.eps
    smallest = torch.tensor([1], dtype=_bits(fmt)).view(fmt.torch_dtype).double().item()
    assert fmt.min_subnormal == smallest


def _bits(fmt):
    width = 1 + fmt.exponent_bits + fmt.fraction_bits
    return {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]


def test_cut_keeps_the_range_and_drops_fraction_bits():
    cut = BF16.cut(4)
    assert (cut.exponent_bits, cut.fraction_bits, cut.name) == (8, 4, "bf16.4")
    assert cut.min_normal == BF16.min_normal and cut.max_finite == 1.9375 * 2.0**127
    assert BF16.cut(7) is BF16 and cut.cut(2).name == "bf16.2"
    assert cut.torch_dtype is None


def test_finite_only_formats_keep_their_nan_when_cut():
    # e4m3 cut to 2 bits: the top exponent holds 1.0, 1.25 and 1.5 (times 256); 1.75 would be NaN
    assert E4M3.cut(2).max_finite == 1.5 * 256


@pytest.mark.parametrize(
    "wide, narrow, held",
    [
        (FP64, FP32, True), (FP32, BF16, True), (FP32, FP16, True), (BF16, BF16.cut(4), True),
        (BF16, BF16, True), (BF16, FP16, False), (FP16, BF16, False), (BF16.cut(4), BF16, False),
        (FP16, E4M3, True), (FP16, E5M2, True), (E4M3, E5M2, False), (E5M2, E4M3, False),
        (E4M3, E4M3.cut(2), True),
    ],
)  # fmt: skip
def test_one_format_holds_another(wide, narrow, held):
    """Against every number of the narrower one, where these are few enough to be listed."""
    assert wide.holds(narrow) == held
    if narrow.exponent_bits + narrow.fraction_bits > 15:
        return
    e = np.arange(narrow.emin, narrow.emax + 1, dtype=np.float64)
    f = np.arange(2**narrow.fraction_bits, dtype=np.float64) / 2**narrow.fraction_bits
    numbers = np.concatenate([np.outer(2.0**e, 1 + f).ravel(), 2.0**narrow.emin * f])
    numbers = torch.from_numpy(numbers[numbers <= narrow.max_finite])
    assert (round_to(numbers, wide) == numbers).all() == held


@pytest.mark.parametrize("fmt", [FP64, FP32, BF16, FP16, E4M3, E5M2, BF16.cut(3), E5M2.cut(0)])
def test_text_round_trip(fmt):
    assert parse_format(str(fmt)) == fmt


@pytest.mark.parametrize(
    "text, told", [("bf17", "did you mean 'bf16'"), ("bf16.9", "0 to 7"), ("", "unknown format")]
)
def test_unknown_formats_are_refused_with_the_nearest(text, told):
    with pytest.raises(ValueError, match=told):
        parse_format(text)


def test_impossible_formats_are_refused():
    with pytest.raises(ValueError, match="2 to 11"):
        FloatFormat("odd", 12, 3)
