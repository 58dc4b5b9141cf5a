"""Intervals for the few runs that an experiment has.

Five runs an arm are no large sample, so nothing here leans on one: Wilson's interval for a share,
Newcombe's for a difference of shares (method 10: built from Wilson's). Exact tests are
`book.verdicts.fewer_by_chance` for two arms and `kernels.forensics.sign_test` for pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..survival import share_interval
from ..tables import half_width, over_runs


class Interval(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(hits: int, runs: int) -> Interval:
    """The share of `hits` with Wilson's 95 % interval. Raises ValueError without runs."""
    if not 0 <= hits <= runs or runs < 1:
        raise ValueError(f"{hits} of {runs} is not a share; give 0 <= hits <= runs, runs >= 1")
    return Interval(hits / runs, *share_interval(hits, runs))


def difference(first: tuple[int, int], second: tuple[int, int]) -> Interval:
    """Share of `first` minus share of `second`, each (hits, runs), with Newcombe's interval."""
    a, b = wilson(*first), wilson(*second)
    gap = a.value - b.value
    low = gap - math.hypot(a.value - a.low, b.high - b.value)
    high = gap + math.hypot(a.high - a.value, b.value - b.low)
    return Interval(gap, low, high)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean over runs with Student's 95 % interval; a single run has none (nan)."""
    found = over_runs(values)
    half = half_width(found)
    return Interval(found.mean, found.mean - half, found.mean + half)
