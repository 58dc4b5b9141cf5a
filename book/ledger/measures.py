"""Rules over what runs measured: per-head series, captured heads, sums of gradients, speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..evidence import Archive
from ..isolation_figures import FAILED, head_values
from .findings import (
    NOT_SUPPORTED,
    PARTLY,
    SUPPORTED,
    Evidence,
    Finding,
    regime,
    rule,
    source,
    standing,
    untested,
)
from .shares import mean_interval, wilson

# -- heads of failing runs, before they fail ------------------------------------------------------


def failed_with(archive: Archive | None, arm: str, metric: str) -> list[Mapping]:
    """Failed runs of an arm that keep a metric per head."""
    rows = [] if archive is None else archive.arm(arm)
    return [r for r in rows if r["kind"] in FAILED and metric in r["heads"]]


def before_failure(row: Mapping, metric: str) -> np.ndarray:
    """Values [n, n_layer, n_head] of a metric up to the step from which the loss rose."""
    steps, values = head_values(row, metric)
    end = row["diverged_from"] or row["nonfinite_step"]
    return values[steps <= end] if end else values


def worst_place(row: Mapping) -> tuple[int, int]:
    """(layer, head) of the largest spectral norm of W_Q before the failure."""
    norms = np.nan_to_num(before_failure(row, "spectral_norm_q"))
    return tuple(int(i) for i in np.unravel_index(norms[-1].argmax(), norms[-1].shape))


def worst_series(row: Mapping, metric: str) -> np.ndarray:
    """A metric of that head over the probes before the failure, without gaps."""
    values = before_failure(row, metric)[(slice(None), *worst_place(row))]
    return values[np.isfinite(values)]


def _common(name: str, archive: Archive, rows: Sequence[Mapping]) -> dict:
    return {
        "seeds": tuple(sorted({row["seed"] for row in rows})),
        "sources": (source(name, archive),),
        "where": _where(archive, rows),
    }


def _where(archive: Archive, rows: Sequence[Mapping]) -> str:
    """The regime of runs; captured heads say what they were put through."""
    if "attention" in rows[0]:
        return regime(archive, rows[0])
    return f"heads of failing runs, {rows[0]['arm']}, {archive.provenance['preset']} preset"


@rule
def directions_alike(
    evidence: Evidence, experiment: str, *, alike: float, arm: str = "low"
) -> Finding:
    """Claimed: the terms (PK)[T]^T X[T] of the head that breaks become alike before it does.

    Mean cosine of two terms, first probe against last. supported: the mean over runs, less two
    standard errors, reaches `alike`, and it grew in every run; partly: it grew, to less; else not.
    """
    archive = evidence.archive(experiment)
    rows = failed_with(archive, arm, "direction_cosine")
    series = [s for s in (worst_series(r, "direction_cosine") for r in rows) if len(s) > 1]
    if not series:
        return untested(f"no archived failure of {experiment} keeps the cosines")
    first, last = (mean_interval([float(s[i]) for s in series]) for i in (0, -1))
    grew = sum(s[-1] > s[0] for s in series)
    if grew < len(series):
        verdict = PARTLY if grew > len(series) / 2 else NOT_SUPPORTED
    else:
        verdict = SUPPORTED if last.low >= alike else PARTLY
    effect = f"mean cosine of two terms {first.value:+.2f} at first, "
    effect += f"{last.value:+.2f} ({last.low:+.2f} to {last.high:+.2f}) when the loss rises; "
    effect += f"grew in {grew} of {len(series)} runs"
    return standing(
        verdict,
        effect,
        len(series),
        strength=max(0.0, last.low),
        **_common(experiment, archive, rows),
    )


@rule
def adds_up(
    evidence: Evidence, experiment: str, *, gain: float, metric: str, arm: str = "low"
) -> Finding:
    """Claimed: errors along these directions add up: their coherent gain is at least `gain`.

    Independent errors have a gain of 1. Median over the probes before the failure in the head
    that breaks, then the mean over runs with two standard errors. supported: the interval lies
    above `gain`; partly: above 1; else not.
    """
    archive = evidence.archive(experiment)
    rows = failed_with(archive, arm, metric)
    series = [s for s in (worst_series(r, metric) for r in rows) if len(s)]
    if not series:
        return untested(f"no archived failure of {experiment} keeps the gain")
    mean = mean_interval([float(np.median(s)) for s in series])
    most = max(float(s.max()) for s in series)
    verdict = SUPPORTED if mean.low >= gain else PARTLY if mean.low > 1 else NOT_SUPPORTED
    effect = f"coherent gain {mean.value:.2f} "
    effect += f"({mean.low:.2f} to {mean.high:.2f}) before the loss rises, {most:.1f} at most; "
    effect += "independent errors have 1"
    common = _common(experiment, archive, rows)
    return standing(verdict, effect, len(series), strength=0.0, **common)


@rule
def drifts(
    evidence: Evidence, experiment: str, *, direction: str = "positive", arm: str = "low"
) -> Finding:
    """Claimed: the sum of delta_lp - delta_hp over steps drifts one way, the positive one.

    A head drifts if its sum, when the loss rises, lies outside the 95 % band of coin-flip signs.
    supported: more heads do than the 5 % that chance allows, by Wilson's interval, and at least
    4 of 5 of them the claimed way; partly: more do, but both ways; else not.
    """
    archive = evidence.archive(experiment)
    rows = failed_with(archive, arm, "delta_error_mean:sum")
    if not rows:
        return untested(f"no archived failure of {experiment} keeps the sum")
    sums = [before_failure(r, "delta_error_mean:sum")[-1].ravel() for r in rows]
    bands = [before_failure(r, "delta_error_mean:band")[-1].ravel() for r in rows]
    z = np.concatenate(sums) / np.concatenate(bands)
    z = z[np.isfinite(z)]
    out, up = int((np.abs(z) > 1.96).sum()), int((z > 1.96).sum())
    share = wilson(out, z.size)
    along = up if direction == "positive" else out - up
    more = share.low > 0.05
    verdict = (SUPPORTED if along >= 0.8 * out else PARTLY) if more else NOT_SUPPORTED
    effect = f"{out} of {z.size} heads of {len(rows)} failing runs "
    effect += f"outside the band of coin-flip signs ({100 * share.low:.0f} to "
    effect += f"{100 * share.high:.0f} %; chance: 5 %), {up} of them positive"
    strength = share.low if more else 1 - share.high
    return standing(
        verdict, effect, len(rows), strength=strength, **_common(experiment, archive, rows)
    )


@rule
def leads(
    evidence: Evidence, experiment: str, *, layer: int, metric: str, arm: str = "low"
) -> Finding:
    """Claimed: the head of the largest `metric` when the loss rises is in this layer (from 0).

    supported: in at least 4 of 5 failed runs; not supported: in at most 1 of 5; partly: between.
    """
    archive = evidence.archive(experiment)
    rows = failed_with(archive, arm, metric)
    if not rows:
        return untested(f"no archived failure of {experiment} keeps {metric}")
    hits = sum(worst_place(row)[0] == layer for row in rows)
    runs, layers = len(rows), before_failure(rows[0], metric).shape[1]
    share = wilson(hits, runs)
    verdict = SUPPORTED if share.value >= 0.8 else NOT_SUPPORTED if share.value <= 0.2 else PARTLY
    effect = f"largest norm in layer {layer} of 0 to {layers - 1} in "
    effect += f"{hits} of {runs} failed runs ({100 * share.low:.0f} to {100 * share.high:.0f} %)"
    strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
    return standing(verdict, effect, runs, strength=strength, **_common(experiment, archive, rows))


# -- captured heads -------------------------------------------------------------------------------


@rule
def biased_delta(evidence: Evidence, experiment: str, *, version: str, sign: int = 1) -> Finding:
    """Claimed: in the head that breaks, the mean of delta_lp - delta_hp before it breaks is
    positive (`sign`), in units of its rms.

    Means of the seeds, weighted by their standard errors. supported: beyond two standard errors
    of the joint mean, the claimed way; not supported: within two, or the other way.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else [r for r in archive.arm(version) if r["mean"] is not None]
    if not rows:
        return untested(f"no archived head of {experiment} decides this")
    means, errors = np.array([r["mean"] for r in rows]).T
    weight = 1 / errors**2
    joint, error = float((weight * means).sum() / weight.sum()), float(weight.sum() ** -0.5)
    verdict = SUPPORTED if sign * joint > 2 * error else NOT_SUPPORTED
    effect = f"mean error of δ {joint:+.4f} "
    effect += f"({joint - 2 * error:+.4f} to {joint + 2 * error:+.4f}) of its rms over "
    effect += f"{sum(r['rows'] for r in rows):,} rows of {len(rows)} heads, one a seed"
    return standing(verdict, effect, len(rows), **_common(experiment, archive, rows))


@rule
def carries_error(evidence: Evidence, experiment: str, *, version: str, part: str) -> Finding:
    """Claimed: rows of one kind carry more of the squared error of delta than is their share.

    supported: so for every seed, and more than half of it on average; partly: more than their
    share on average; else not.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else archive.arm(version)
    if not rows:
        return untested(f"no archived head of {experiment} decides this")
    energy = np.array([r["parts"][part]["energy"] for r in rows])
    share = np.array([r["parts"][part]["rows"] / r["rows"] for r in rows])
    if (energy > share).all() and energy.mean() > 0.5:
        verdict = SUPPORTED
    else:
        verdict = PARTLY if energy.mean() > share.mean() else NOT_SUPPORTED
    effect = f"{part} rows are {share.mean():.0%} of the rows and "
    effect += f"carry {energy.mean():.0%} of the squared error of δ "
    effect += f"({energy.min():.0%} to {energy.max():.0%} by seed)"
    common = _common(experiment, archive, rows)
    return standing(verdict, effect, len(rows), strength=float(energy.min()), **common)


# -- several processes, a trained model, a benchmark ----------------------------------------------


@rule
def sum_accumulates(evidence: Evidence, experiment: str, *, cause: str) -> Finding:
    """Claimed: the error of a sum over processes points the same way in different batches.

    supported: cosine between batches beyond four standard errors; else not.
    """
    found = _of_all(evidence, experiment, lambda r: r.get("cause") == cause)
    if not found:
        return untested(f"no archived measurement of {cause!r} in {experiment}")
    archive, r = found[-1]
    mean, error = r["between_batches"], 2 * r["between_batches_stderr"]
    verdict = SUPPORTED if mean > 2 * error else NOT_SUPPORTED
    delta = [x for x in archive.rows if x.get("cause", "").startswith("delta")]
    effect = f"{r['processes']} processes: an error of {r['relative_size_median']:.2%} "
    effect += f"of dW_Q, cosine between batches {mean:+.3f} ({mean - error:+.3f} to "
    effect += f"{mean + error:+.3f})"
    if delta:
        effect += f"; δ from the stored O: {delta[-1]['relative_size_median']:.2%}"
    where = archive.provenance["machine"]
    return standing(
        verdict, effect, len(found), where=where, sources=(source(experiment, archive),)
    )


def _of_all(evidence: Evidence, experiment: str, wanted) -> list[tuple[Archive, Mapping]]:
    """(archive, row) of all archives of an experiment: of every machine."""
    return [(a, r) for a in evidence.archives(experiment) for r in a.rows if wanted(r)]


@rule
def only_the_order(evidence: Evidence, experiment: str, *, passes: str) -> Finding:
    """Claimed: every loss has the bits of one process that takes the same passes.

    supported: so in every comparison; else not.
    """
    found = _of_all(evidence, experiment, lambda r: passes in r.get("a", "") and "error" not in r)
    if not found:
        return untested(f"no archived comparison of passes in {experiment}")
    rows = [row for _, row in found]
    same = sum(r["first_different"] is None for r in rows)
    verdict = SUPPORTED if same == len(rows) else NOT_SUPPORTED
    told = [f"{r['preset']} preset, {r['steps'][1] + 1} steps" for r in rows]
    effect = f"losses equal bit for bit in {same} of {len(rows)} comparisons ({'; '.join(told)})"
    sources = tuple(dict.fromkeys(source(experiment, a) for a, _ in found))
    return standing(verdict, effect, len(rows), sources=sources)


@rule
def model_ties(
    evidence: Evidence, experiment: str, *, numerics: str, without: str, least: float
) -> Finding:
    """Claimed: heads of a trained model tie in more than `least` of rows under `numerics`.

    A text read by a model counts as one run. supported: in every text in some head, and in none
    `without`; partly: in some texts; else not.
    """
    told = evidence.document(experiment)
    if told is None:
        return untested(f"no model is archived in {experiment}")
    worst, rows = {}, {}
    for text, found in told["found"].items():
        ties = np.array(found[numerics]["tie_rate"])
        worst[text], rows[text] = float(ties.max()), float(ties.mean())
    clean = max(float(np.max(f[without]["tie_rate"])) for f in told["found"].values())
    hits = sum(x > least for x in worst.values())
    if hits == len(worst) and clean <= least:
        verdict = SUPPORTED
    else:
        verdict = PARTLY if hits else NOT_SUPPORTED
    each = ", ".join(f"{t} {worst[t]:.1%} in the worst head, {rows[t]:.1%} of all" for t in worst)
    effect = f"{told['model']}, {numerics}: {each}; {clean:.1%} at most with {without}"
    return standing(verdict, effect, len(worst), sources=(_document(experiment, told),))


@rule
def model_sinks(evidence: Evidence, experiment: str, *, numerics: str, least: float) -> Finding:
    """Claimed: heads of a trained model give the first key more than half of their attention.

    supported: at least the share `least` of the heads, in every text; partly: in some heads.
    """
    told = evidence.document(experiment)
    if told is None:
        return untested(f"no model is archived in {experiment}")
    shares = {
        text: float((np.array(found[numerics]["first_key"]) > 0.5).mean())
        for text, found in told["found"].items()
    }
    low = min(shares.values())
    verdict = SUPPORTED if low >= least else PARTLY if max(shares.values()) > 0 else NOT_SUPPORTED
    each = ", ".join(f"{text} {share:.0%}" for text, share in shares.items())
    effect = f"{told['model']}: heads that give the first key over half of their attention: {each}"
    return standing(verdict, effect, len(shares), sources=(_document(experiment, told),))


def _document(name: str, told: Mapping) -> str:
    return f"{name}: {told['machine']}, {told['date']}"


@rule
def costs_time(
    evidence: Evidence, experiment: str, *, implementation: str, against: str, most: float
) -> Finding:
    """Claimed: `implementation` takes at most `most` times the time of `against`.

    Ratios of median times over the shapes of one benchmark; a shape counts as a run. supported: in
    every shape; not supported: in none; partly: in some.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else archive.rows
    times: dict[str, dict] = {implementation: {}, against: {}}
    for r in rows:
        if r["implementation"] in times:
            shape = (r["direction"], r["head_dim"], r["seq_len"], r["causal"])
            times[r["implementation"]][shape] = r["ms_p50"]
    ratios = {
        shape: ms / times[against][shape]
        for shape, ms in times[implementation].items()
        if shape in times[against]
    }
    if not ratios:
        return untested(f"no archived speeds of {implementation} and {against}")
    hits = sum(x <= most for x in ratios.values())
    verdict = SUPPORTED if hits == len(ratios) else PARTLY if hits else NOT_SUPPORTED
    by = {
        way: [x for (direction, *_), x in ratios.items() if direction == way]
        for way in ("forward", "backward")
    }
    told = ", ".join(f"{way} {min(x):.2f} to {max(x):.2f}" for way, x in by.items() if x)
    effect = f"times the time of {against}: {told} over {len(ratios)} shapes; at most {most:g} in "
    effect += f"{hits}"
    where = f"bf16, {archive.provenance['machine']}"
    return standing(
        verdict, effect, len(ratios), where=where, sources=(source(experiment, archive),)
    )
