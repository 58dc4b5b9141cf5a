"""kernels.forensics.stats: signed means, clustered errors, sign tests."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.forensics import (
    block_mean,
    clustered_mean,
    sign_flip_null,
    sign_test,
    signed_mean,
)

numbers = st.lists(st.floats(-1e3, 1e3, allow_nan=False), min_size=2, max_size=40)


@given(numbers)
@settings(max_examples=50, deadline=None)
def test_signed_mean_is_the_textbook_mean_and_standard_error(values):
    got = signed_mean(values)
    x = torch.tensor(values, dtype=torch.float64)
    assert got.n == len(values)
    assert got.mean == pytest.approx(float(x.mean()), abs=1e-9)
    assert got.stderr == pytest.approx(float(x.std()) / math.sqrt(len(values)), abs=1e-9)


def test_signed_mean_of_nothing_and_of_one_value_claims_no_precision():
    assert math.isnan(signed_mean([]).mean)
    assert math.isnan(signed_mean([1.0]).stderr)


def test_nan_is_refused_with_its_count():
    with pytest.raises(ValueError, match="1 values that are NaN"):
        signed_mean([1.0, float("nan")])


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_sign_test_is_the_exact_binomial(positive, negative, zero):
    got = sign_test([1.0] * positive + [-2.0] * negative + [0.0] * zero)
    assert (got.positive, got.negative, got.zero) == (positive, negative, zero)
    n, least = positive + negative, min(positive, negative)
    want = min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n)
    assert got.p_value == pytest.approx(want, rel=1e-9)


def test_sign_test_of_a_million_values_does_not_overflow():
    x = torch.ones(10**6)
    x[: 500_000 + 1500] = -1
    assert sign_test(x).p_value == pytest.approx(math.erfc(3 / math.sqrt(2)), rel=0.01)


def test_clustered_error_sees_that_rows_of_a_sequence_repeat():
    """100 sequences of 50 identical rows carry the information of 100 values, not of 5,000."""
    generator = torch.Generator().manual_seed(0)
    per_sequence = torch.randn(100, 1, generator=generator)
    x = per_sequence.expand(100, 50)
    groups = torch.arange(100)[:, None].expand(100, 50)
    clustered, naive = clustered_mean(x, groups), signed_mean(x)
    assert clustered.mean == pytest.approx(naive.mean)
    assert clustered.stderr == pytest.approx(signed_mean(per_sequence).stderr, rel=1e-6)
    assert naive.stderr < clustered.stderr / 6
    assert block_mean(x, 50).stderr == pytest.approx(clustered.stderr)


def test_clustering_with_one_row_each_changes_nothing():
    x = torch.randn(30, generator=torch.Generator().manual_seed(1))
    assert clustered_mean(x, torch.arange(30)).stderr == pytest.approx(signed_mean(x).stderr)
    assert block_mean(x, 1).stderr == pytest.approx(signed_mean(x).stderr)


def test_blocks_do_not_run_across_sequences():
    x = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    want = clustered_mean(x, [[0, 0, 1], [2, 2, 3]])
    assert block_mean(x, 2).stderr == pytest.approx(want.stderr)


def test_sign_flip_null_finds_a_drift_and_not_a_walk():
    generator = torch.Generator().manual_seed(2)
    walk = torch.randn(400, generator=generator)
    drift = walk + 0.5
    assert sign_flip_null(walk - walk.mean()).p_value > 0.9
    assert sign_flip_null(drift).p_value < 0.002
    assert sign_flip_null(drift, seed=3).p_value == sign_flip_null(drift, seed=3).p_value


def test_sign_flip_band_is_the_standard_deviation_of_the_null():
    x = torch.tensor([3.0, -4.0, 12.0])
    assert sign_flip_null(x, draws=10).sigma.tolist() == [3.0, 5.0, 13.0]
    # flipping pairs together: |3 - 4| = 1, then 1 and 12
    grouped = sign_flip_null(x, draws=10, groups=[0, 0, 1]).sigma
    assert grouped.tolist() == pytest.approx([3.0, 1.0, math.sqrt(145)])


def test_sign_flip_p_value_is_that_of_all_sign_patterns():
    x = torch.tensor([1.0, 2.0, 3.0])  # |sum| = 6 for 2 of 8 patterns
    assert sign_flip_null(x, draws=20_000).p_value == pytest.approx(0.25, abs=0.02)
