"""The dose-response fit: it finds a known line, censored runs raise it, intervals cover."""

import math

import numpy as np
import pytest

from book.survival import fit, share_interval


def points(rng, slope=1.0, noise=0.3, seeds=5, bits=(2, 3, 4, 5), limit=math.inf):
    out = []
    for b in bits:
        for _ in range(seeds):
            step = 2 ** (9 + slope * b + noise * rng.normal())
            out.append({"bits": b, "step": min(step, limit), "failed": step <= limit})
    return out


def test_the_line_is_the_least_squares_line_where_every_run_failed():
    data = points(np.random.default_rng(0))
    found = fit(data)
    slope, value = np.polyfit([p["bits"] - 7 for p in data], np.log2([p["step"] for p in data]), 1)
    assert found.slope == pytest.approx(slope, abs=1e-4)
    assert found.predicted == pytest.approx(value, abs=1e-4)
    assert found.log2_steps(3) == pytest.approx(value - 4 * slope, abs=1e-3)
    assert (found.failures, found.censored) == (20, 0)


def test_runs_that_did_not_fail_raise_the_line_that_dropping_them_would_flatten():
    data = points(np.random.default_rng(1), limit=2**13)
    assert any(not p["failed"] for p in data)
    honest, dropped = fit(data), fit([p for p in data if p["failed"]])
    as_failed = fit([p | {"failed": True} for p in data])
    assert honest.slope > dropped.slope and honest.slope > as_failed.slope
    low, high = honest.slope_interval
    assert low < 1.0 < high  # the true slope


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(40):
        found = fit(points(rng, seeds=4, limit=2**13.5))
        low, high = found.predicted_interval
        hits += low <= 16.0 and (high is None or 16.0 <= high)
    assert 32 <= hits  # 38 expected, at most a few fewer with so few runs


def test_an_interval_is_open_where_the_runs_do_not_close_it():
    failed = [{"bits": b, "step": s, "failed": True} for b, s in ((1, 900), (1, 1_100), (2, 950))]
    failed += [{"bits": 2, "step": 1_050, "failed": True}]
    alive = [{"bits": b, "step": 10**9, "failed": False} for b in (3, 4) for _ in range(2)]
    found = fit(failed + alive)
    assert found.predicted > fit(failed).predicted + 5


@pytest.mark.parametrize(
    "data",
    [
        [],
        [{"bits": 2, "step": 100 + i, "failed": True} for i in range(6)],
        [{"bits": b, "step": 100, "failed": b < 4} for b in (1, 2, 3, 4, 5)],
    ],
)
def test_too_few_failures_or_doses_fix_no_line(data):
    assert fit(data) is None


def test_a_share_of_few_runs_has_a_wide_interval_within_0_and_1():
    low, high = share_interval(5, 5)
    assert high == 1.0 and low == pytest.approx(0.566, abs=0.001)
    low, high = share_interval(4, 5)
    assert (round(low, 3), round(high, 3)) == (0.376, 0.964)
    with pytest.raises(ValueError, match="share of no runs"):
        share_interval(0, 0)
