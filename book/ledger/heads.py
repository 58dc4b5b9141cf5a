"""Rules over single heads and places of failing runs, before they fail.

Runs of several experiments are pooled: each is a failure of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpt2.outcomes import KINDS

from ..answer import PARTS, Parts, by_step, heads_above, keeps_answer, parts
from ..drift import drift
from ..isolation_figures import head_values
from ..records import FAILED
from ..survival import Z95
from ..verdicts import CHANCE
from .findings import (
    MOST,
    NOT_SUPPORTED,
    PARTLY,
    SUPPORTED,
    Evidence,
    Finding,
    fraction_bits,
    regime,
    rule,
    rule_over_all,
    source,
    standing,
    untested,
)
from .shares import mean_interval, wilson


def keeping(
    evidence: Evidence,
    experiments: Sequence[str],
    arm: str,
    metric: str,
    kinds: Sequence[str] = KINDS,
) -> tuple[list[Mapping], dict]:
    """(runs of an arm that keep a metric per head, their seeds, sources and regime)."""
    rows, sources, where = [], [], {}
    for name in experiments:
        archive = evidence.archive(name)
        mine = [] if archive is None else archive.arm(arm)
        mine = [r for r in mine if r["kind"] in kinds and metric in r["heads"]]
        if mine:
            sources.append(source(name, archive))
            where[regime(name, archive, mine[0])] = None
        rows += mine
    more = {"seeds": tuple(sorted({r["seed"] for r in rows})), "sources": tuple(sources)}
    return rows, more | {"where": " and ".join(where)}


def before_failure(row: Mapping, metric: str) -> np.ndarray:
    """Values [n, n_layer, n_head] of a metric up to the step from which the loss rose."""
    steps, values = head_values(row, metric)
    return values[steps <= (row["diverged_from"] or row["nonfinite_step"])]


def worst_place(row: Mapping) -> tuple[int, int]:
    """(layer, head) of the largest spectral norm of W_Q before the failure."""
    norms = np.nan_to_num(before_failure(row, "spectral_norm_q"))
    return tuple(int(i) for i in np.unravel_index(norms[-1].argmax(), norms[-1].shape))


def worst_series(row: Mapping, metric: str) -> np.ndarray:
    """A metric of that head over the probes before the failure, without gaps."""
    values = before_failure(row, metric)[(slice(None), *worst_place(row))]
    return values[np.isfinite(values)]


@rule_over_all
def directions_alike(
    evidence: Evidence, experiments: Sequence[str], *, alike: float, arm: str = "low"
) -> Finding:
    """Claimed: the terms (PK)[T]^T X[T] of the head of largest norm become alike before the loss
    rises.

    Mean cosine of two terms, first probe against last. supported: the 95 % interval of the mean
    over runs lies above `alike`, and it grew in every run; partly: it grew, to less; else not.
    """
    rows, more = keeping(evidence, experiments, arm, "direction_cosine", FAILED)
    series = [s for s in (worst_series(r, "direction_cosine") for r in rows) if len(s) > 1]
    if not series:
        return untested("no archived failure keeps the cosines")
    first, last = (mean_interval([float(s[i]) for s in series]) for i in (0, -1))
    grew = sum(s[-1] > s[0] for s in series)
    if grew < len(series):
        verdict = PARTLY if grew > len(series) / 2 else NOT_SUPPORTED
    else:
        verdict = SUPPORTED if last.low >= alike else PARTLY
    effect = f"mean cosine of two terms {first.value:+.2f} at first, {last.value:+.2f} "
    effect += f"({last.low:+.2f} to {last.high:+.2f}) when the loss rises; grew in {grew} of "
    effect += f"{len(series)} runs"
    return standing(verdict, effect, len(series), strength=max(0.0, last.low), **more)


@rule_over_all
def adds_up(
    evidence: Evidence, experiments: Sequence[str], *, gain: float, metric: str, arm: str = "low"
) -> Finding:
    """Claimed: errors along these directions add up: their coherent gain is at least `gain`.

    Independent errors have a gain of 1. Median over the probes before the loss rises in the head
    of largest norm, then the mean over runs. supported: its 95 % interval lies above `gain`;
    partly: above 1; else not.
    """
    rows, more = keeping(evidence, experiments, arm, metric, FAILED)
    series = [s for s in (worst_series(r, metric) for r in rows) if len(s)]
    if not series:
        return untested("no archived failure keeps the gain")
    mean = mean_interval([float(np.median(s)) for s in series])
    most = max(float(s.max()) for s in series)
    verdict = SUPPORTED if mean.low >= gain else PARTLY if mean.low > 1 else NOT_SUPPORTED
    effect = f"coherent gain {mean.value:.2f} ({mean.low:.2f} to {mean.high:.2f}) before the loss "
    effect += f"rises, {most:.1f} at most in any probe; independent errors have 1"
    return standing(verdict, effect, len(series), **more)


@rule_over_all
def drifts(
    evidence: Evidence, experiments: Sequence[str], *, arm: str = "low", sign: int = 1
) -> Finding:
    """Claimed: the sum of delta_lp - delta_hp over steps drifts one way, the positive one.

    A head drifts if its sum, at the run's first sign of trouble (`book.drift`), lies outside the
    95 % band of coin-flip signs. supported: more heads do than the 5 % that chance allows, by
    Wilson's interval, and at least 4 of 5 of them the claimed way; partly: more do, but both ways;
    else not.
    """
    rows, more = keeping(evidence, experiments, arm, "delta_error_mean:sum")
    if not rows:
        return untested("no archived run keeps the sum")
    found = [drift(row) for row in rows]
    z = np.concatenate([d.sigmas.ravel() for d in found])
    mean = np.concatenate([d.relative.ravel() for d in found])
    out, up = int((np.abs(z) > Z95).sum()), int((z > Z95).sum())
    share, along = wilson(out, z.size), up if sign > 0 else out - up
    off = share.low > CHANCE
    verdict = (SUPPORTED if along >= MOST * out else PARTLY) if off else NOT_SUPPORTED
    effect = f"{out} of {z.size} heads of {len(rows)} runs outside the band of coin-flip signs "
    effect += f"({100 * share.low:.0f} to {100 * share.high:.0f} %; chance: 5 %), {up} of them "
    effect += f"positive; mean {mean.min():+.1%} to {mean.max():+.1%} of the rms"
    strength = share.low if off else 1 - share.high
    return standing(verdict, effect, len(rows), strength=strength, **more)


@rule_over_all
def answers(
    evidence: Evidence, experiments: Sequence[str], *, arm: str = "low", bits: int | None = None
) -> Finding:
    """Claimed: what is one-sided in delta's error is dO's answer to the rounding of O.

    Of each run, mean over its heads of the two parts of e in its rms, up to the first sign of
    trouble (`book.answer`). supported: over runs, the 95 % interval of the answer lies above 0 and
    that of the rest (with a dO that knows no rounding) holds 0; partly: the answer's lies above 0
    and the rest is off zero too; else not. Of a single run the intervals are those over its
    steps. bits: only runs that round O_bar to so many fraction bits.
    """
    rows, more = keeping(evidence, experiments, arm, "delta_answer_mean")
    rows = [row for row in rows if keeps_answer(row) and bits in (None, fraction_bits(row))]
    if not rows:
        return untested("no archived run keeps the two parts of delta's error")
    found = [parts(row) for row in rows]
    draws = found if len(rows) > 1 else [Parts(*values) for values in zip(*by_step(rows[0]))]
    rest, answer = (
        mean_interval([float(np.nanmean(getattr(d, p))) for d in draws]) for p in PARTS[1:]
    )
    off = not rest.low <= 0 <= rest.high
    verdict = NOT_SUPPORTED if not answer.low > 0 else PARTLY if off else SUPPORTED
    told = [f"{x.value:+.2%} of the rms ({x.low:+.2%} to {x.high:+.2%})" for x in (answer, rest)]
    effect = f"answer {told[0]}, the rest {told[1]}; the answer positive in {heads_above(found)} "
    effect += f"heads of {len(found)} run"
    return standing(verdict, effect + "s" * (len(found) > 1), len(found), **more)


@rule_over_all
def leads(
    evidence: Evidence, experiments: Sequence[str], *, layer: int, arm: str = "low"
) -> Finding:
    """Claimed: the head of the largest norm of W_Q when the loss rises is in this layer (from 0).

    supported: in at least 4 of 5 failed runs; not supported: in at most 1 of 5; partly: between.
    """
    rows, more = keeping(evidence, experiments, arm, "spectral_norm_q", FAILED)
    if not rows:
        return untested("no archived failure keeps the norms of all heads")
    hits = sum(worst_place(row)[0] == layer for row in rows)
    runs, layers = len(rows), before_failure(rows[0], "spectral_norm_q").shape[1]
    share = wilson(hits, runs)
    few = share.value <= 1 - MOST
    verdict = SUPPORTED if share.value >= MOST else NOT_SUPPORTED if few else PARTLY
    effect = f"largest norm in layer {layer} of 0 to {layers - 1} in {hits} of {runs} failed runs "
    effect += f"({100 * share.low:.0f} to {100 * share.high:.0f} %)"
    strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
    return standing(verdict, effect, runs, strength=strength, **more)


@rule
def smallest_set(evidence: Evidence, experiment: str, *, places: list[str]) -> Finding:
    """Claimed: the smallest set of places (site@layer) whose fp32 keeps training alive is this.

    Of the searches that ended with a smallest set. supported: of all; partly: of some; else not.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else archive.rows
    ended = [r for r in rows if r["trace"]["state"] == "minimal" and r["trace"]["result"]]
    if not ended:
        return untested("no archived search ended with a smallest set")
    hits = sum(set(r["trace"]["result"]) == set(places) for r in ended)
    verdict = SUPPORTED if hits == len(ended) else PARTLY if hits else NOT_SUPPORTED
    found = "; ".join(f"seed {r['seed']} {', '.join(r['trace']['result'])}" for r in ended)
    effect = f"{len(ended)} of {len(rows)} searches ended with a smallest set ({found})"
    more = {"seeds": tuple(r["seed"] for r in ended), "sources": (source(experiment, archive),)}
    where = f"{archive.provenance['preset']} preset"
    return standing(verdict, effect, len(ended), where=where, **more)
