"""What of the experiments in bf16 is not archived yet, and what it would cost on one GPU.

Counted from the experiments as declared (`book.gpu_experiments`) and the runs in archives. Costs
are those runs one after the other at the speed at which the recipe's own runs were measured; side
by side on a GPU they overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from IPython.display import Markdown

from gpt2.outcomes import HEALTHY_FACTOR

from .chapter6 import best_recipe, of, pace_of, shown_recipe
from .experiments import Experiment
from .forks import AFTER_ONSET, BEFORE_ONSET
from .gpu_experiments import BUILDERS
from .records import cut_by_clock
from .regimes import RECIPES
from .tables import markdown_table, number


def missing_runs(experiment: Experiment, recipe: str, rows: Sequence[Mapping]) -> list:
    """(arm, seed) of an experiment for which no archive has a run that came to its end.

    A run from scratch counts wherever it was archived: the arms of several experiments share it.
    """
    mine = [row for row in rows if row["recipe"] == recipe and not cut_by_clock(row)]
    done = {
        (row["arm"], row["seed"], row["forked_at"] is not None)
        for row in mine
        if row["forked_at"] is None or row["experiment"] == experiment.name
    }
    asked = [(arm, seed) for seed in experiment.seeds for arm in experiment.arms]
    return [(a, s) for a, s in asked if (a.name, s, a.at is not None) not in done]


def steps_to_failure(recipe: str, rows: Sequence[Mapping]) -> float:
    """Median over the recipe's failures in bf16; of its onsets, or the declared limit, if none."""
    low = of(rows, recipe, "low")
    failed = [r["diverged_step"] for r in low if r["kind"] == "diverged"]
    failed = failed or [r["onset_step"] for r in low if r["onset_step"] is not None]
    return float(np.median(failed)) if failed else float(RECIPES[recipe].most)


def speed(recipe: str, rows: Sequence[Mapping]) -> float | None:
    """Median steps a second of the recipe's archived runs, None without any.

    Speeds of training alone, where a search has measured them; else by the whole duration.
    """
    mine = [row for row in rows if row["recipe"] == recipe and row["seconds"]]
    told = [row["steps_per_s"] for row in mine if row.get("steps_per_s")]
    found = told or [s for row in mine if (s := pace_of(row))]
    return float(np.median(found)) if found else None


def remaining_table(rows: Sequence[Mapping], recipe: str | None = None) -> Markdown:
    """One line per experiment: runs declared, missing, and hours of one GPU for those.

    recipe: the best one by default, or the one that shows an onset; if there is none, the first
    that was declared, without costs.
    """
    chosen = recipe or shown_recipe(rows)
    name = chosen or next(iter(RECIPES))
    by_onset = all(row["kind"] != "diverged" for row in of(rows, name, "low"))
    steps, pace = steps_to_failure(name, rows), speed(name, rows)
    lines = []
    for kind, build in BUILDERS.items():
        experiment = build(name)
        left = missing_runs(experiment, name, rows)
        asked = len(experiment.arms) * len(experiment.seeds)
        hours = None if not (chosen and pace) else _hours(left, steps, pace, by_onset)
        command = f"`python -m book.evidence {kind} --recipe {name}`"
        told = "unknown" if hours is None else number(hours, 1)
        lines.append([experiment.question, asked, len(left), told, command])
    header = ["question", "runs declared", "missing", "GPU hours, one by one", "command"]
    return markdown_table(header, lines)


def _hours(left: Sequence, steps: float, pace: float, by_onset: bool) -> float:
    """Every missing run to HEALTHY_FACTOR times the steps to failure; forks from where they start.

    by_onset: forks go from BEFORE_ONSET to AFTER_ONSET times the steps to it. An upper bound for
    arms that fail, and for the dials at few bits.
    """
    total = 0.0
    for arm, _ in left:
        if arm.at is not None and by_onset:
            total += (AFTER_ONSET - BEFORE_ONSET) * steps
            continue
        start = 0.0 if arm.at is None else arm.at if isinstance(arm.at, int) else arm.at * steps
        total += HEALTHY_FACTOR * steps - start
    return total / pace / 3600


def remaining_words(rows: Sequence[Mapping]) -> Markdown:
    """On what the costs rest."""
    chosen = shown_recipe(rows)
    if chosen is None:
        told = (
            "No recipe has been found, so the costs are unknown: first one of them must fail. The "
            "commands name the recipe that is tried first, as an example."
        )
    else:
        steps, pace = steps_to_failure(chosen, rows), speed(chosen, rows)
        which = "" if best_recipe(rows) else " (judged by its onset, since none diverged)"
        told = (
            f"For recipe {chosen}{which}: {HEALTHY_FACTOR:g} times {steps:,.0f} steps a run at "
            f"{pace:,.0f} steps a second, as archived, one run after the other. Runs side by side "
            "share a GPU; runs that fail early cost less."
        )
    return Markdown(told)
