"""kernels.forensics.trace: the paper's worked example, both readings, the bits of every step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import BF16, E5M2, decode, round_to
from kernels.forensics import trace_sum
from kernels.forensics.trace import READINGS
from kernels.rounding import ROUNDINGS, bit_pattern

PAPER = [-2.4071154594421387, -2.296875]


def test_the_papers_worked_example_to_the_bit():
    trace = trace_sum([1.0, 1.0], PAPER)
    last = trace.bits(-1)
    assert bit_pattern(PAPER[0], BF16.__class__("fp32", 8, 23)) == (
        "11000000000110100000111000101110"
    )
    assert last.value == -4.703990459442139
    assert (last.sign, last.exponent, last.guard, last.sticky) == (1, 2, 1, 1)
    assert last.round_up and not last.tie
    assert last.rounded == -4.71875 and last.pattern == "1100000010010111"
    assert float(trace.error["prefix_round_once"][-1]) == -0.014759540557861328
    # read literally, with a rounding after each addition, the example rounds the other way
    assert float(trace.after["running"][-1]) == -4.6875
    assert trace.bits(-1, "running").tie


def test_without_its_tail_the_example_is_a_tie():
    """With the rounded -2.40625 the sum is exactly half-way and goes to even."""
    pair = [-2.40625, -2.296875]
    tie = trace_sum([1, 1], pair).bits(-1)
    assert tie.tie and tie.rounded == -4.6875 and not tie.round_up
    crumb = trace_sum([1, 1, 2**-10], [*pair, -1.0])
    assert crumb.bits(-1).rounded == -4.71875 and crumb.bits(-1).sticky == 1
    away = trace_sum([1, 1], pair, mode="nearest_away").bits(-1)
    assert away.tie and away.round_up and away.rounded == -4.71875


def test_absorption_keeps_the_sink_value_under_both_readings():
    trace = trace_sum([1.0, 0.001, 0.001], [-3.0, -2.0, -2.0])
    for reading in READINGS:
        assert trace.after[reading].tolist() == [-3.0, -3.0, -3.0]
        assert float(trace.error[reading][-1]) == pytest.approx(0.004, rel=1e-3)


def test_ones_mark_the_keys_with_full_weight():
    trace = trace_sum([0.5, 1.0, 0.25, 1.0], [1.0, 2.0, 3.0, 4.0])
    assert trace.ones.tolist() == [False, True, False, True]
    lines = trace.table(keys=range(4)).splitlines()
    assert ["*" in line[:7] for line in lines[2:]] == [False, True, False, True]


@given(
    st.lists(
        st.tuples(st.floats(0, 1, width=16), st.floats(-4, 4, width=16)), min_size=1, max_size=30
    ),
    st.sampled_from(ROUNDINGS),
    st.sampled_from([BF16, E5M2]),
)
@settings(max_examples=40, deadline=None)
def test_steps_add_up_and_bits_are_those_of_the_rounded_number(terms, mode, fmt):
    p, v = zip(*terms)
    trace = trace_sum(p, v, fmt, mode, seed=1)
    for reading in READINGS:
        error = trace.error[reading]
        assert torch.allclose(trace.step_error(reading).cumsum(0), error, atol=1e-12)
        assert torch.equal(trace.after[reading].double() - trace.exact, error)
        assert torch.equal(trace.after[reading], round_to(trace.after[reading], fmt))
        for t, bits in enumerate(trace.all_bits(reading)):
            assert bits.rounded == float(trace.after[reading][t])
            if mode != "stochastic":
                want = decode(bits.value, fmt, mode)
                assert (bits.rounded, bits.round_up) == (want.rounded, want.round_up)
                assert bits.error_ulp == pytest.approx(want.error_ulp)


def test_largest_jumps_come_in_key_order():
    trace = trace_sum([1, 0.01, 1, 0.01], [2.40625, 0.001, 2.296875, 0.001])
    assert trace.largest(2) == sorted(trace.largest(2)) and 2 in trace.largest(2)
    assert len(trace.largest(10)) == 4


def test_bad_input_is_told():
    with pytest.raises(ValueError, match="2 weights and 1 values"):
        trace_sum([1, 1], [1])
    with pytest.raises(ValueError, match="unknown reading 'both'"):
        trace_sum([1], [1]).bits(0, "both")
