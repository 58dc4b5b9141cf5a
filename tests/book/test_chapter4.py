"""Simulations of chapter 4 against the laws and against exact arithmetic."""

import math

import pytest

from book.chapter4 import (
    attention_kinds,
    crafted_rows,
    plus_minus,
    read_back,
    site_table,
    stored_error,
    tied_rows,
)
from kernels.forensics import SignedMean, bias_law, signed_mean
from kernels.formats import BF16
from kernels.rounding import round_to, ulp


@pytest.mark.parametrize("tied", [1, 2, 3])
@pytest.mark.parametrize("weight", [1e-3, 1e-2])
def test_rounded_o_bar_has_the_bias_of_the_law(tied, weight):
    rows = tied_rows(tied, weight, sets=4000, rows=4)
    error = (round_to(rows.o_bar, BF16).abs() - rows.o_bar.abs()) / ulp(rows.o_bar, BF16)
    found = signed_mean(error.mean(1))
    assert abs(found.mean - bias_law(tied, rows.quantiles(200)).expected_ulp) < (
        5 * found.stderr + 0.01
    )


def test_two_ties_checked_values_without_and_with_a_third_weight():
    """CASES: mean -5.6e-5 at rms 1.1e-2; with a weight up to 0.02 mean -3.3e-4, rms 9.0e-3."""
    for weight, rms, low, high in ((0.0, 1.1e-2, -1e-4, 1e-4), (0.02, 9.0e-3, -5e-4, -2e-4)):
        rows = tied_rows(2, weight, sets=100_000, rows=2)
        error = round_to(rows.o_bar, BF16) - rows.o_bar
        assert float(error.square().mean().sqrt()) == pytest.approx(rms, rel=0.02)
        assert low < float(error.mean()) < high


def test_rounding_o_alone_has_no_bias_but_a_shared_error():
    rows = tied_rows(2, 3e-3)
    o_bar = stored_error(rows, unnormalized=True, output=False)
    o = stored_error(rows, unnormalized=False, output=True)
    both = stored_error(rows, unnormalized=True, output=True)
    neither = stored_error(tied_rows(2, 3e-3, sets=50), unnormalized=False, output=False)
    assert abs(o.bias.z) < 4 and o.shared > 0.95
    assert o_bar.bias.z > 10 and both.bias.mean > o_bar.bias.mean
    assert math.isnan(neither.shared) and neither.rms == 0


def test_weights_below_one_take_the_bias_away():
    plain = stored_error(tied_rows(2, 1e-3), unnormalized=True, output=False)
    scaled = stored_error(tied_rows(2, 1e-3, scale=math.exp(-5)), unnormalized=True, output=False)
    assert abs(scaled.bias.mean) < plain.bias.mean / 10


def test_rows_of_ds_sum_to_zero_unless_delta_reads_a_rounded_o():
    read = {
        name: read_back(crafted_rows(512), attend) for name, attend in attention_kinds().items()
    }
    for name in ("paper", "authors", "standard, all bf16"):
        assert abs(read[name].row_sum.z) > 20, name
    for name in ("flash", "paper, δ from an fp32 O", "paper, δ = rowsum(dP∘P)"):
        assert abs(read[name].row_sum.z) < 5, name
    assert read["paper"].output == read["paper, δ from an fp32 O"].output
    assert read["standard, softmax in fp32"].output.mean == pytest.approx(0.25, abs=0.02)
    assert abs(read["flash"].output.z) < 5


def test_site_table_tells_the_presets_apart():
    table = {line[0]: line[1:] for line in site_table()}
    assert table["Ō = P̄V"] == ["fp32", "fp32", "bf16, once at the end", "bf16, after each tile"]
    assert len(table) == 13
    assert "1e-10" in table["l = rowsum(P̄)"][3]


def test_numbers_as_text():
    assert plus_minus(SignedMean(0.24942, 0.00095, 10)) == "+0.24942\u00a0±\u00a00.00095"
    assert plus_minus(SignedMean(-1.5, math.nan, 1)) == "-1.5"
