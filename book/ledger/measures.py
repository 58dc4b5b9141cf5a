"""Rules over what was measured: captured heads, sums of gradients, a trained model, speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..bf16_heads import FAILING, kept_heads
from ..evidence import Archive
from .findings import (
    NOT_SUPPORTED,
    PARTLY,
    SUPPORTED,
    Evidence,
    Finding,
    fraction_bits,
    regime,
    rule,
    source,
    standing,
    untested,
)


@rule
def biased_delta(
    evidence: Evidence, experiment: str, *, version: str, least: float, sign: int = 1
) -> Finding:
    """Claimed: in the head that breaks, the mean of delta_lp - delta_hp before it breaks is
    positive (`sign`), in units of its rms.

    Means of the seeds, weighted by their standard errors. supported: beyond two standard errors
    of the joint mean, the claimed way; not supported: beyond two the other way, or within two and
    surely smaller than `least`; else the rows are too few to tell, and it is observed.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else [r for r in archive.arm(version) if r["mean"] is not None]
    if not rows:
        return untested(f"no archived head of {experiment} decides this")
    means, errors = np.array([r["mean"] for r in rows]).T
    weight = 1 / errors**2
    joint, error = float((weight * means).sum() / weight.sum()), float(weight.sum() ** -0.5)
    low, high = sign * joint - 2 * error, sign * joint + 2 * error
    effect = f"mean error of δ {joint:+.2%} ({joint - 2 * error:+.2%} to "
    effect += f"{joint + 2 * error:+.2%}) of its rms over {sum(r['rows'] for r in rows):,} rows "
    effect += f"of {len(rows)} heads, one a seed"
    more = _captured(experiment, archive, rows)
    if low <= 0 < least <= high:
        more["unfit"] = "too few rows to tell"
    return standing(SUPPORTED if low > 0 else NOT_SUPPORTED, effect, len(rows), **more)


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
    more = _captured(experiment, archive, rows)
    return standing(verdict, effect, len(rows), strength=float(energy.min()), **more)


def _captured(name: str, archive: Archive, rows: Sequence[Mapping]) -> dict:
    """Seeds, source, and what the captured heads were put through."""
    return {
        "seeds": tuple(r["seed"] for r in rows),
        "sources": (source(name, archive),),
        "where": f"heads of failing runs, {rows[0]['arm']}, {archive.provenance['preset']} preset",
    }


@rule
def kept_alike(evidence: Evidence, experiment: str, *, alike: float, bits: int) -> Finding:
    """Claimed: the terms (PK)[T]^T X[T] of heads captured in a failing run are alike.

    Mean cosine of two terms; bits: where that run rounds O_bar to so many. supported: at least
    `alike` in every capture; partly: in some; else not.
    """
    kept = kept_heads(evidence.folder, experiment)
    if kept is None or fraction_bits(kept.archive.arm(FAILING)[0]) != bits:
        return untested(f"no head of a failing run with {bits} fraction bits is archived")
    low, twin = ([m.coherence.mean_cosine for m in of] for of in (kept.failing, kept.healthy))
    reached = sum(x >= alike for x in low)
    verdict = SUPPORTED if reached == len(low) else PARTLY if reached else NOT_SUPPORTED
    effect = f"mean cosine of two terms {min(low):+.2f} to {max(low):+.2f} in {len(low)} captures "
    effect += "of the failing run"
    if twin:
        effect += f", {min(twin):+.2f} to {max(twin):+.2f} in {len(twin)} of its healthy twin"
    rows = kept.archive.arm(FAILING)
    more = {
        "seeds": tuple(r["seed"] for r in rows),
        "sources": (source(experiment, kept.archive),),
        "where": regime(experiment, kept.archive, rows[0]),
    }
    return standing(verdict, effect, len(rows), strength=max(0.0, min(low)), **more)


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
