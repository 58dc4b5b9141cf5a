"""What the outcomes of several seeds say: which seeds are a test, how many failed, and chance.

Seeds are pairs: for one seed all arms see the same batches from the same weights. The words follow
the rules of `gpt2.outcomes`: a verdict needs VERDICT_RUNS runs an arm, less is observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

import numpy as np

from gpt2.outcomes import VERDICT_RUNS

from .records import FAILED

CHANCE = 0.05  # a difference with a larger probability is called none
LOST_NATS = 0.5  # held-out loss above the twin's from which a run that lives is named


def failures(rows: Sequence[Mapping]) -> int:
    return sum(row["kind"] in FAILED for row in rows)


def onsets(rows: Sequence[Mapping]) -> int:
    """Runs that showed an onset and did not fail."""
    return sum(row["kind"] == "onset" for row in rows)


def counted(rows: Sequence[Mapping]) -> str:
    """'2 of 5 failed, 1 more with an onset'."""
    more = onsets(rows)
    told = f"{failures(rows)} of {len(rows)} failed"
    return told if not more else f"{told}, {more} more with an onset"


def standing(runs: int, of: str = "run(s) an arm") -> str:
    """'verdict', or 'observed, 3 run(s) an arm'."""
    return "verdict" if runs >= VERDICT_RUNS else f"observed, {runs} {of}"


def tested(rows: Sequence[Mapping], parent: str = "low") -> list[Mapping]:
    """Records of the seeds whose failing run failed: of others, a fork that lives says nothing."""
    seeds = {r["seed"] for r in rows if r["arm"] == parent and r["kind"] in FAILED}
    return [row for row in rows if row["seed"] in seeds]


def untested_words(rows: Sequence[Mapping], parent: str = "low") -> str:
    """Names the seeds that `tested` leaves out; empty where there are none."""
    kept = {row["seed"] for row in tested(rows, parent)}
    out = [r for r in rows if r["arm"] == parent and r["seed"] not in kept]
    told = []
    for row in sorted(out, key=lambda r: r["seed"]):
        rise = (row["held_out_loss"] or 0.0) - (row["best_held_out_loss"] or 0.0)
        told.append(f"{row['seed']} (its held-out loss ended {rise:.1f} nats above its best)")
    if not told:
        return ""
    return (
        f"By the rule, the failing run did not fail with seed {', '.join(told)}, so its forks are "
        "no test and are not counted."
    )


def lost(rows: Sequence[Mapping], twins: Sequence[Mapping]) -> list[tuple[Mapping, float]]:
    """Runs that did not fail by the rule but ended LOST_NATS above their seed's twin; by what."""
    ends = {row["seed"]: row["held_out_loss"] for row in twins}
    found = []
    for row in rows:
        loss, other = row["held_out_loss"], ends.get(row["seed"])
        if row["kind"] not in FAILED and None not in (loss, other) and loss - other >= LOST_NATS:
            found.append((row, loss - other))
    return found


def lost_words(rows: Sequence[Mapping], twin: str = "delta_fp32") -> str:
    """Names runs that did not fail by the rule and yet ended LOST_NATS above their twin's loss.

    The rule asks for a rise of a nat above a run's *own* minimum, so a run that never learnt is
    not called diverged. Losses are held out, the twin's of the same seed. Empty where none did.
    """
    found: dict[str, list[str]] = {}
    for row, above in lost(rows, [row for row in rows if row["arm"] == twin]):
        found.setdefault(row["label"], []).append(f"{above:.1f}")
    if not found:
        return ""
    told = "; ".join(f"{label} (+{', +'.join(above)})" for label, above in found.items())
    return (
        "Not failed by the rule, which asks for a rise of a nat above a run's own minimum, but "
        f"at least {LOST_NATS:g} nats above the twin with delta from an fp32 O at the end: {told}."
    )


def fewer_by_chance(mine: Sequence[Mapping], low: Sequence[Mapping]) -> float:
    """Chance of as few failures in `mine` as found, or fewer, if both failed equally often.

    Fisher's exact test, one-sided: the hypergeometric tail.
    """
    a, b, n, m = failures(mine), failures(low), len(mine), len(low)
    lowest = max(0, a + b - m)
    tail = sum(comb(n, k) * comb(m, a + b - k) for k in range(lowest, a + 1))
    return tail / comb(n + m, a + b)


def compared(mine: Sequence[Mapping], low: Sequence[Mapping]) -> str:
    """'fewer', 'as often', or 'unclear': whether an arm failed less often than the failing run."""
    if failures(mine) * len(low) >= failures(low) * len(mine):
        return "as often"
    return "fewer" if fewer_by_chance(mine, low) <= CHANCE else "unclear"


def first_sign(row: Mapping) -> int:
    """The step up to which nothing shows in a run: its onset or its lowest smoothed loss."""
    curve = row["curves"]["train_loss"]
    lowest = curve["step"][int(np.nanargmin(np.asarray(curve["value"], dtype=float)))]
    return lowest if row["onset_step"] is None else min(lowest, row["onset_step"])
