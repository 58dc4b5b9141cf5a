"""Does the error of delta drift? Chapter 3, section 4, from records that keep its running sums.

A run's running sum of the mean of e = delta_lp - delta_hp, per head, stands beside the standard
deviation that it would have if every step's sign were a coin's. Runs are read up to their first
sign of trouble: after it a few steps with huge errors decide the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from IPython.display import Markdown

from gpt2.probes import parse_spec

from .experiments import LOW_RANK
from .isolation_figures import by_arm, head_values
from .tables import half_width, head_name, markdown_table, over_runs
from .verdicts import first_sign

_PROBES = map(parse_spec, dict(LOW_RANK.base)["probes"])
EVERY = next(spec.every for spec in _PROBES if spec.name == "delta_error")  # steps


class Drift(NamedTuple):
    """Of one run, per head [layers, heads], up to `end`. sigmas: the running sum of e in units of
    its coin's. relative: mean of e in units of its rms."""

    end: int
    sigmas: np.ndarray
    relative: np.ndarray


def quiet_until(row: Mapping) -> int:
    """The first sign of trouble in a run that shows any, else its last step."""
    return row["steps"] if row["kind"] in ("healthy", "stable") else first_sign(row)


def drift(row: Mapping) -> Drift:
    """Between two kept points e's mean is the increment of its sum over the steps measured."""
    steps, sums = head_values(row, "delta_error_mean:sum")
    _, band = head_values(row, "delta_error_mean:band")
    _, rms = head_values(row, "delta_error_rms")
    last = max(1, int((steps <= quiet_until(row)).sum()) - 1)
    means = np.diff(sums, axis=0) / (np.diff(steps) / EVERY)[:, None, None]
    relative = means / np.sqrt(rms[1:] * rms[:-1])
    return Drift(int(steps[last]), sums[last] / band[last], relative[:last].mean(0))


def drift_table(rows: Sequence[Mapping]) -> Markdown:
    """Per arm and head over all runs: mean of e in its rms, its sign, and the running sum."""
    lines = []
    for mine in by_arm(rows).values():
        found = [drift(row) for row in mine]
        for place in np.ndindex(found[0].sigmas.shape):
            relative = over_runs([float(d.relative[place]) for d in found])
            sigmas = [float(d.sigmas[place]) for d in found]
            lines.append(
                [
                    mine[0]["label"],
                    head_name(place),
                    f"{relative.mean:+.2%} ± {half_width(relative):.2%}",
                    f"{sum(d.relative[place] > 0 for d in found)} of {len(found)} runs",
                    f"{min(sigmas):+.1f} to {max(sigmas):+.1f}",
                ]
            )
    header = ["run", "head", "mean of e in its rms", "positive in", "running sum in σ"]
    return markdown_table(header, lines)


def drift_words(rows: Sequence[Mapping]) -> str:
    """In how many heads of all runs e is positive, and how many sums leave the coin's band."""
    found = [drift(row) for row in rows]
    relative = np.stack([d.relative for d in found])
    outside = int((np.abs([d.sigmas for d in found]) > 1.96).sum())
    total = relative.size
    return (
        f"the mean of e is positive in {int((relative > 0).sum())} of {total} heads, "
        f"{relative.min():+.1%} to {relative.max():+.1%} of its rms, and {outside} sums leave the "
        f"95 % band of coin-flip signs ({0.05 * total:.0f} would by chance)"
    )
