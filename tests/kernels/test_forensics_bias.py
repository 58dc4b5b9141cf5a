"""kernels.forensics.bias: the laws against closed forms, enumeration and simulation."""

import itertools

import pytest
import torch

from kernels import BF16, E4M3, E5M2, FP16, FP32, round_to, ulp
from kernels.forensics import bias_law, rounding_bias, signed_mean, simulate_bias
from kernels.rounding import ROUNDINGS

FORMATS = [BF16, FP16, FP32, E4M3, E5M2, BF16.cut(4), BF16.cut(2)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("mode", ROUNDINGS)
def test_law_agrees_with_simulation(fmt, mode):
    for tied, tail in itertools.product([1, 2, 3, 4, 8], [0.0, 0.1, 0.5, 0.7]):
        law = bias_law(tied, tail, fmt=fmt, mode=mode)
        seen = simulate_bias(tied, tail, fmt=fmt, mode=mode, draws=20_000)
        assert abs(law.expected_ulp - seen.mean) < 5 * seen.stderr + 1e-9, (tied, tail)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("tail", [0.01, 0.3, 0.5, 0.8, 1.25])
def test_two_tied_values_err_by_half_a_value_ulp_minus_the_tail(fmt, tail):
    law = bias_law(2, tail, fmt=fmt)
    assert law.expected_value_ulp == pytest.approx(0.5 - tail % 1, abs=1e-9)
    assert law.closed_form_value_ulp == pytest.approx(0.5 - tail % 1)


def test_the_law_in_value_ulps_does_not_depend_on_the_number_of_ties():
    for tied in (2, 4, 8, 16):
        assert bias_law(tied, 0.1).expected_value_ulp == pytest.approx(0.4, abs=1e-9)
    for tied in (3, 5, 6):  # two binades: the last bits are not quite uniform
        assert bias_law(tied, 0.1).expected_value_ulp == pytest.approx(0.4, abs=0.02)


def test_a_vanishing_tail_costs_a_quarter_ulp_and_no_tail_nothing():
    assert bias_law(2, 1e-6).expected_ulp == pytest.approx(0.25, abs=1e-5)
    assert bias_law(2, 0.0).expected_ulp == pytest.approx(0.0, abs=1e-12)
    assert bias_law(2, 0.0, mode="nearest_away").expected_ulp == pytest.approx(0.25)


@pytest.mark.parametrize("tail", [0.05, 0.2, 0.49])
def test_absorption_loses_exactly_the_tail(tail):
    law = bias_law(1, tail)
    assert law.kind == "absorption"
    assert law.expected_ulp == pytest.approx(-tail)
    assert law.rms_ulp == pytest.approx(tail)  # every row the same error
    assert bias_law(1, 1 - tail).expected_ulp == pytest.approx(tail)


def test_an_evenly_spread_tail_has_no_bias():
    tails = (torch.arange(200) + 0.5) / 200 * 4
    assert abs(bias_law(2, tails).expected_ulp) < 1e-5


def test_stochastic_rounding_has_noise_but_no_bias():
    law = bias_law(2, 0.1, mode="stochastic")
    assert law.expected_ulp == 0.0 and 0.2 < law.rms_ulp < 0.5


def test_the_error_follows_the_tail_not_the_tied_values():
    assert bias_law(2, -0.1).expected_value_ulp == pytest.approx(-0.4, abs=1e-9)
    assert bias_law(2, 0.1, same_sign=0.0).expected_value_ulp == pytest.approx(0.4, abs=1e-9)
    # opposite values cancel into a finer binade: about half of the pairs have a tie left
    assert bias_law(2, 0.1, same_sign=0.5).expected_value_ulp == pytest.approx(0.2, abs=0.05)


def test_balanced_values_and_tails_have_no_bias():
    for share in (0.5, 1.0):
        assert abs(bias_law(2, [0.1, -0.1], same_sign=share).expected_value_ulp) < 1e-9
    mixed = bias_law(3, 0.1, fmt=E4M3, same_sign=0.7)
    seen = simulate_bias(3, 0.1, fmt=E4M3, same_sign=0.7, draws=50_000)
    assert abs(mixed.expected_ulp - seen.mean) < 5 * seen.stderr


def test_the_two_dials_differ_as_the_design_says():
    """V and O_bar on one grid of 2 bits: about a quarter ulp; V finer than O_bar: about none."""
    matched = bias_law(2, 0.08, fmt=BF16.cut(2))
    output = bias_law(2, 0.08, fmt=BF16.cut(2), value_format="fp32.14")
    assert matched.expected_ulp == pytest.approx(0.21, abs=1e-6)
    assert abs(output.expected_ulp) < 1e-3


def test_measured_means_of_200_000_draws():
    """Two tied bf16 values of -(2..4); then a third weight in 0..0.02; then P times e^-5."""
    generator = torch.Generator().manual_seed(0)
    n = 200_000

    def values():
        return round_to(-(2 + 2 * torch.rand(n, generator=generator)), BF16).double()

    def error(x):
        return round_to(x, BF16) - x

    pair = values() + values()
    plain = signed_mean(error(pair))
    assert abs(plain.mean) < 4 * plain.stderr and plain.stderr == pytest.approx(2.5e-5, rel=0.05)
    assert error(pair).square().mean().sqrt() == pytest.approx(1.1e-2, rel=0.02)

    weight = round_to(0.02 * torch.rand(n, generator=generator), BF16).double()
    tail = weight * values()
    with_tail = signed_mean(error(pair + tail))
    assert with_tail.mean == pytest.approx(-3.3e-4, abs=4 * with_tail.stderr)
    assert error(pair + tail).square().mean().sqrt() == pytest.approx(9.0e-3, rel=0.02)
    value_ulp = 2.0**-6  # of a value in 2..4
    law = -value_ulp * (0.5 - (tail.abs() / value_ulp) % 1).mean()
    assert with_tail.mean == pytest.approx(float(law), abs=4 * with_tail.stderr)

    scaled = round_to(torch.tensor(-5.0).exp(), BF16).double()
    shifted = signed_mean(error((pair + tail) * scaled) / scaled)
    assert abs(shifted.mean) < 4 * shifted.stderr < 1.2e-4


def test_the_sign_of_the_values_is_the_sign_of_the_error():
    """-2.40625 - 2.296875 is an exact tie and goes to even; any further crumb sends it away."""
    pair = torch.tensor(-2.40625 - 2.296875, dtype=torch.float64)
    assert float(round_to(pair, BF16)) == -4.6875
    assert float(round_to(pair - 1e-6, BF16)) == -4.71875
    assert float(round_to(pair, BF16, "nearest_away")) == -4.71875
    assert float(round_to(pair, FP16)) == -4.703125  # 8 times finer: no tie, no error
    assert float(ulp(pair, FP16)) == 2.0**-8


def test_meter_tells_truncation_from_nearest():
    nearest = rounding_bias(lambda x: x.to(torch.bfloat16))
    cut = rounding_bias(lambda x: round_to(x, BF16, "toward_zero"))
    assert not nearest.biased and abs(nearest.relative.mean) < 1e-5
    assert cut.biased and cut.relative.mean == pytest.approx(-2.8e-3, rel=0.02)
    assert "biased" in str(cut)
    assert not rounding_bias(lambda x: round_to(x, BF16, "stochastic"), draws=2**16).biased


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(tied=0), "tied=0"),
        (dict(mode="up"), "unknown rounding mode 'up'"),
        (dict(same_sign=2), "same_sign=2"),
        (dict(fmt="fp16", value_format="bf16"), "coarser"),
        (dict(value_format="fp32"), "fp32.14"),
        (dict(tied=300, fmt="e4m3"), "overflow"),
        (dict(fmt="fp64"), "yardstick is float64"),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        bias_law(**arguments)
