"""Where the sign of delta's error comes from: dO answers the rounding. Chapter 3, section 4.

Records keep, per head and step, the mean of e = delta_lp - delta_hp over the rows of a batch, and
its two parts: with the dO of a pass in which the layer's O is not rounded (*clean*), and with what
the rounding added to dO (*answer*); see `gpt2.gradient_probes.delta_answer`. Each is read in units
of the rms of e at its step, as a mean over the steps up to the run's first sign of trouble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from IPython.display import Markdown

from gpt2.runs import Run

from .drift import quiet_until
from .evidence import Archive
from .experiments import ANSWER
from .isolation_figures import by_arm, head_values
from .records import head_curves
from .tables import half_width, markdown_table, over_runs
from .verdicts import counted, failures, standing

PARTS = ("error", "clean", "answer")
# Arm of `book.experiments.unbiased` -> whether it was foretold to fail.
FORETOLD = {
    "redrawn": False,
    "stochastic": True,
    "stochastic_redrawn": False,
    "stochastic_delta_fp32": False,
}
HEADER = ["head", "mean of e in its rms", "with a clean dO", "dO's answer"]


class Parts(NamedTuple):
    """Of one run, per head [n_layer, n_head], in the rms of e: its mean and its two parts."""

    error: np.ndarray
    clean: np.ndarray
    answer: np.ndarray


def keeps_answer(row: Mapping) -> bool:
    return all(row["heads"].get(name, {}).get("step") for name in ANSWER)


def parts(row: Mapping) -> Parts:
    """Means over the steps up to the first sign of trouble, or over the first step alone."""
    steps, rms = head_values(row, "delta_error_rms")
    quiet = max(1, int((steps <= quiet_until(row)).sum()))
    with np.errstate(invalid="ignore", divide="ignore"):
        return Parts(
            *(
                np.nanmean((head_values(row, f"delta_{part}_mean")[1] / rms)[:quiet], axis=0)
                for part in PARTS
            )
        )


def answer_table(rows: Sequence[Mapping]) -> Markdown:
    """Per arm and head over all runs: the mean of e in its rms and its two parts."""
    lines = []
    for mine in by_arm([row for row in rows if keeps_answer(row)]).values():
        found = [parts(row) for row in mine]
        for place in np.ndindex(found[0].error.shape):
            means = [over_runs([float(getattr(f, p)[place]) for f in found]) for p in PARTS]
            told = [f"{m.mean:+.2%} ± {half_width(m):.2%}" for m in means]
            up = sum(f.answer[place] > 0 for f in found)
            name = "layer {}, head {}".format(*place)
            lines.append([mine[0]["label"], name, *told, f"{up} of {len(found)} runs"])
    header = [
        "run",
        "head",
        "mean of e in its rms",
        "with a clean dO",
        "dO's answer",
        "positive in",
    ]
    return markdown_table(header, lines)


def live_table(run: Run, until: int | None) -> Markdown:
    """The same for one run: means over its steps up to `until` (None: all), each step one draw."""
    row = {"heads": head_curves(run.metrics(), ANSWER)}
    if not keeps_answer(row):
        return Markdown("*This run does not keep the two parts of e.*")
    steps, rms = head_values(row, "delta_error_rms")
    quiet = steps <= (steps[-1] if until is None else until)
    shares = [(head_values(row, f"delta_{part}_mean")[1] / rms)[quiet] for part in PARTS]
    lines = []
    for place in np.ndindex(rms.shape[1:]):
        means = [over_runs([float(x[place]) for x in share]) for share in shares]
        told = [f"{m.mean:+.2%} ± {half_width(m):.2%}" for m in means]
        lines.append(["layer {}, head {}".format(*place), *told])
    return markdown_table(
        ["head", "mean of e in its rms", "with a clean dO", "dO's answer"], lines
    )


def answer_words(rows: Sequence[Mapping]) -> str:
    """'of 20 heads the answer is positive in 20, ...': what the table says in one line."""
    found = [parts(row) for row in rows if keeps_answer(row)]
    error, clean, answer = (np.stack([getattr(f, p) for f in found]) for p in PARTS)
    return (
        f"the mean of e is {error.mean():+.2%} of its rms over {answer.size} heads of "
        f"{len(found)} runs; {clean.mean():+.2%} with a clean dO and {answer.mean():+.2%} by "
        f"dO's answer, which is positive in {int((answer > 0).sum())} of them"
    )


def summary(kept: Archive) -> str:
    """`answer_words` of every arm of an archive, as a list."""
    arms = by_arm([row for row in kept.rows if keeps_answer(row)])
    return "\n".join(f"- {mine[0]['label']}: {answer_words(mine)}." for mine in arms.values())


def verdict_words(rows: Sequence[Mapping]) -> str:
    """How the arms of `unbiased` ended, beside what was foretold of each."""
    arms = by_arm(rows)
    low = arms.get("low", arms.get("same", []))
    if not failures(low):
        return "The failing run did not fail here, so the others decide nothing."
    told = [f"Failing run: {counted(low)} ({standing(len(low))})."]
    for name, fails in FORETOLD.items():
        mine = arms.get(name, [])
        if not mine:
            continue
        count = failures(mine)
        agreed = (2 * count > len(mine)) == fails
        clear = count in (0, len(mine))
        said = "as foretold" if agreed and clear else "mostly so" if agreed else "not as foretold"
        told.append(f"{mine[0]['label']}: {counted(mine)}, {said} ({standing(len(mine))}).")
    return "\n".join(f"- {line}" for line in told)
