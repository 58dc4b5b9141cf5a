"""What a run shows before it fails, or without failing: ties, norms, scores and losses of records.

For chapter 6, from archives alone. A run's *signs* are read from its kept curves, worst head at
each step; onset, the declared sign, needs the twin (`gpt2.outcomes`) and stands beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from IPython.display import Markdown

from .onsets import failed_twins
from .records import one_a_seed
from .tables import markdown_table, number

EARLY = 0.25  # of a run: what grows after that is compared with what was there by then
GREW = 10.0  # times the early score: such a run is shown though it did not diverge
MANY = 0.4  # share of a head's rows that tie: more than any twin's has reached
LONG = 5_000  # steps below which a run without a failure shows no sign worth a line


@dataclass(frozen=True)
class Signs:
    """Worst head of one run: largest values with their steps, and what they grew from.

    ties: (share of rows, step). norm: (spectral norm of W_Q, step). score: (largest score, step).
    score_growth: over its largest value within the first EARLY of the run. loss_above_best: last
    held-out loss above the lowest, nats. None where a curve is missing.
    """

    ties: tuple[float, int] | None
    norm: tuple[float, int] | None
    score: tuple[float, int] | None
    score_growth: float | None
    loss_above_best: float | None

    @property
    def grew(self) -> bool:
        return self.score_growth is not None and self.score_growth >= GREW


def signs(row: Mapping) -> Signs:
    """Of one record (`book.records.record`)."""
    last, best = row["held_out_loss"], row["best_held_out_loss"]
    return Signs(
        ties=_highest(row, "tie_rate"),
        norm=_highest(row, "spectral_norm_q"),
        score=_highest(row, "max_logit"),
        score_growth=_growth(row, "max_logit"),
        loss_above_best=None if None in (last, best) else last - best,
    )


def curve(row: Mapping, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a kept curve, NaN where none was kept; empty if the record lacks it."""
    kept = row["curves"].get(name, {"step": [], "value": []})
    return np.array(kept["step"]), np.array(kept["value"], dtype=float)


def _highest(row: Mapping, name: str) -> tuple[float, int] | None:
    steps, values = curve(row, name)
    if not np.isfinite(values).any():
        return None
    at = int(np.nanargmax(values))
    return float(values[at]), int(steps[at])


def _growth(row: Mapping, name: str) -> float | None:
    steps, values = curve(row, name)
    early = values[steps <= EARLY * steps[-1]] if len(steps) else values
    if not np.isfinite(early).any() or np.nanmax(early) <= 0:
        return None
    return float(np.nanmax(values) / np.nanmax(early))


def signs_table(rows: Sequence[Mapping]) -> Markdown:
    """One line for each run from scratch of at least LONG steps, one a seed."""
    lines = []
    for row in one_a_seed(rows):
        if row["steps"] < LONG:
            continue
        found = signs(row)
        onset = "none" if row["onset_step"] is None else f"{row['onset_step']:,}"
        lines.append(
            [
                row["recipe"],
                row["label"],
                row["seed"],
                f"{row['steps']:,}",
                onset,
                _at(found.ties, 2),
                _at(found.norm, 0),
                _at(found.score, 0),
                number(found.score_growth, 1 if (found.score_growth or 0) < GREW else 0),
                number(found.loss_above_best, 3),
            ]
        )
    if not lines:
        return Markdown(f"*No run of {LONG:,} steps or more is archived.*")
    header = ["recipe", "arm", "seed", "steps", "onset", "tied rows, most", "norm of W_Q, most"]
    header += ["largest score", "times its early value", "held-out loss above best"]
    return markdown_table(header, lines)


def _at(found: tuple[float, int] | None, digits: int) -> str:
    return "none kept" if found is None else f"{found[0]:,.{digits}f} at {found[1]:,}"


def signs_words(rows: Sequence[Mapping]) -> list[str]:
    """A sentence for each low-precision run whose scores grew, to a divergence or short of one.

    Not for one of which the twin failed as well: that failure is none of delta's.
    """
    told = []
    for row, found in _grown(rows):
        if None in (found.ties, found.norm):
            continue
        diverged = row["kind"] == "diverged"
        end = (
            f"diverged at {row['diverged_step']:,}"
            if diverged
            else f"at step {row['steps']:,}, short of the rule's one nat"
        )
        onset = row["onset_step"]
        judged = (
            f"its onset against the twin is at step {onset:,}"
            if onset is not None
            else "no onset was judged, for want of a twin"
        )
        told.append(
            f"The cycle {'to its end' if diverged else 'without a divergence'}: in "
            f"{row['recipe']}, seed {row['seed']}, the largest score grew to "
            f"{found.score[0]:,.0f}, {found.score_growth:,.0f} times its early value, the worst "
            f"head's norm of $W_Q$ to {found.norm[0]:,.0f}, and {100 * found.ties[0]:.0f} % of "
            f"its rows tied at step {found.ties[1]:,}; held-out loss ended "
            f"{found.loss_above_best:.3f} nats above its best, {end}; {judged}."
        )
    return told


def _grown(rows: Sequence[Mapping]) -> Iterator[tuple[Mapping, Signs]]:
    """Low-precision runs, one a seed, whose scores grew, where no twin failed as well."""
    for row in one_a_seed(rows):
        found = signs(row)
        if row["arm"] == "low" and found.grew and not failed_twins(rows, row["recipe"]):
            yield row, found


def places_words(rows: Sequence[Mapping]) -> list[str]:
    """For each recipe, the head of each failed run whose ties first passed MANY of its rows.

    Of the runs that `signs_words` tells of. Layers and heads are counted from 0.
    """
    found: dict[str, list[str]] = {}
    for row, _ in _grown(rows):
        first = first_head(row)
        if row["kind"] != "diverged" or first is None:
            continue
        step, layer, head = first
        told = f"seed {row['seed']}: layer {layer}, head {head} at step {step:,}"
        found.setdefault(row["recipe"], []).append(told)
    return [
        f"Where it begins in {recipe}: the first head with {100 * MANY:.0f} % of its rows tied, "
        f"counted from 0, is {'; '.join(seeds)}."
        for recipe, seeds in found.items()
    ]


def first_head(row: Mapping) -> tuple[int, int, int] | None:
    """(step, layer, head) of the first kept point at which a head has MANY of its rows tied."""
    heads = row["curves"].get("tie_rate", {}).get("head")
    steps, ties = curve(row, "tie_rate")
    if not heads or not (ties >= MANY).any():
        return None
    at = int((ties >= MANY).argmax())
    return int(steps[at]), *heads[at]
