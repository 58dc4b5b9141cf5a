"""FloatFormat against torch.finfo, the fraction dial, and text."""

import pytest
import torch

from kernels.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, FloatFormat, parse_format


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
