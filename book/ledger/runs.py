"""Rules over training runs: who failed, who did not, in what order, at what loss.

Every rule takes (evidence, experiment) and the names of arms of `book.experiments`. A run *failed*
if it diverged or became nonfinite, by the rules of `gpt2.outcomes`. A run that ended without a
failure before its partner of the same seed failed says nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpt2.outcomes import VERDICT_RUNS
from kernels.forensics import sign_test

from ..evidence import Archive
from ..isolation_figures import FAILED
from .shares import Interval, difference, fisher_greater, mean_interval, wilson
from .verdicts import (
    MOST,
    NOT_SUPPORTED,
    PARTLY,
    SIGNIFICANT,
    SUPPORTED,
    Evidence,
    Finding,
    combine,
    fraction_bits,
    regime,
    rule,
    source,
    standing,
    untested,
)

Rows = Sequence[Mapping]


def failed_step(row: Mapping) -> int | None:
    return row["diverged_step"] or row["nonfinite_step"]


def failures(rows: Rows) -> int:
    return sum(row["kind"] in FAILED for row in rows)


def onsets(rows: Rows) -> int:
    return sum(row["kind"] == "onset" for row in rows)


def long_enough(rows: Rows, failing: Rows) -> list[Mapping]:
    """Those that failed, or ran at least as long as the failing run of their seed."""
    ends = {row["seed"]: failed_step(row) or 0 for row in failing}
    return [r for r in rows if r["kind"] in FAILED or r["steps"] >= ends.get(r["seed"], 0)]


def percent(x: Interval) -> str:
    return f"{100 * x.value:.0f} % ({100 * x.low:.0f} to {100 * x.high:.0f})"


def told(rows: Rows) -> str:
    """'low precision failed in 4 of 5 (38 to 96 %), 1 more with an onset'."""
    hits, runs = failures(rows), len(rows)
    share = wilson(hits, runs)
    signs = f", {onsets(rows)} more with an onset" if onsets(rows) else ""
    words = f"{rows[0]['label']} failed in {hits} of {runs}"
    return f"{words} ({100 * share.low:.0f} to {100 * share.high:.0f} %){signs}"


def _common(name: str, archive: Archive, rows: Rows, where: Rows | None = None) -> dict:
    """Seeds, source and regime: that of the archive's plainly failing runs, else of `where`."""
    row = (archive.arm("low") or where or rows)[0]
    return {
        "seeds": tuple(sorted({r["seed"] for r in rows})),
        "sources": (source(name, archive),),
        "where": regime(archive, row),
    }


def _arms(archive: Archive, arms: str | Sequence[str]) -> list[str]:
    """The arms that an archive has."""
    names = [arms] if isinstance(arms, str) else arms
    return [name for name in names if archive.arm(name)]


# -- one arm against another ----------------------------------------------------------------------


@rule
def prevents(
    evidence: Evidence,
    experiment: str,
    *,
    arms: str | list[str],
    failing: str = "low",
    sham: str | None = None,
    bits: int | None = None,
) -> Finding:
    """Claimed: what differs in each of `arms` prevents the failure of `failing`.

    supported: exact test at 5 %, no failure and no onset under the arm, and the sham, if any,
    fails. partly: the same with onsets or rare failures, with a sham that prevents too, or no
    failure at all where the test says that this could be chance. Else not supported. bits: only
    where the failing runs round O_bar to so many fraction bits (7 is bf16 itself).
    """
    archive = evidence.archive(experiment)
    low = [] if archive is None else archive.arm(failing)
    if bits is not None:
        low = [row for row in low if fraction_bits(row) == bits]
    found = _arms(archive, arms) if low else []
    if not found:
        return untested(f"no archived run of {experiment} decides this")
    if not failures(low):
        return untested(f"nothing to prevent in {experiment}: {told(low)}")
    parts = [_prevents(experiment, archive, low, name) for name in found]
    if sham is not None and archive.arm(sham):
        parts.append(_sham(experiment, archive, low, sham))
    return combine([p for p in parts if p is not None] or [untested("runs ended too early")])


def _prevents(experiment: str, archive: Archive, low: Rows, name: str) -> Finding | None:
    arm = long_enough(archive.arm(name), low)
    if not arm:
        return None
    first, second = (failures(low), len(low)), (failures(arm), len(arm))
    gap, p = difference(first, second), fisher_greater(first, second)
    runs, effect = min(len(low), len(arm)), told(arm)
    if runs >= VERDICT_RUNS:
        effect += f", difference {percent(gap)}, exact p = {p:.2g}; by seed {_pairs(low, arm)}"
    if p <= SIGNIFICANT or runs < VERDICT_RUNS and failures(arm) == 0:
        verdict = SUPPORTED if failures(arm) + onsets(arm) == 0 else PARTLY
    else:
        verdict = PARTLY if failures(arm) == 0 else NOT_SUPPORTED
    strength = wilson(*second).low if verdict == NOT_SUPPORTED else gap.low
    common = _common(experiment, archive, arm, where=low)
    return standing(verdict, effect, runs, beside=told(low), strength=strength, **common)


def _sham(experiment: str, archive: Archive, low: Rows, name: str) -> Finding:
    """The control: a change of the same size elsewhere must not prevent the failure as well."""
    sham = long_enough(archive.arm(name), low)
    fails = failures(sham) >= MOST * len(sham)
    verdict = SUPPORTED if fails else NOT_SUPPORTED if failures(sham) == 0 else PARTLY
    runs, common = min(len(low), len(sham)), _common(experiment, archive, sham, where=low)
    words = f"control, {told(sham)}"
    return standing(verdict, words, runs, beside=told(low), strength=1.0, **common)


def _pairs(low: Rows, arm: Rows) -> str:
    """'4 saved and 0 lost, sign test p = 0.13': runs of one seed share weights and batches."""
    before = {row["seed"]: row["kind"] in FAILED for row in low}
    changed = [before[r["seed"]] - (r["kind"] in FAILED) for r in arm if r["seed"] in before]
    saved, lost = sum(c > 0 for c in changed), sum(c < 0 for c in changed)
    p = f", sign test p = {sign_test([float(c) for c in changed]).p_value:.2g}"
    return f"{saved} saved and {lost} lost" + (p if saved + lost else "")


@rule
def still_fails(
    evidence: Evidence,
    experiment: str,
    *,
    arms: str | list[str],
    failing: str = "low",
    bits: int | None = None,
) -> Finding:
    """Claimed: the failure happens under each of `arms`: what they leave out is no cause of it.

    supported: at least 4 of 5 runs fail; not supported: none does; partly: in between.
    """
    archive = evidence.archive(experiment)
    low = [] if archive is None else archive.arm(failing)
    found = _arms(archive, arms) if low else []
    if bits is not None:
        found = [name for name in found if fraction_bits(archive.arm(name)[0]) == bits]
    parts = []
    for name in found:
        arm = long_enough(archive.arm(name), low)
        if not arm:
            continue
        hits, runs = failures(arm), len(arm)
        verdict = SUPPORTED if hits >= MOST * runs else PARTLY if hits else NOT_SUPPORTED
        share = wilson(hits, runs)
        strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
        common = _common(experiment, archive, arm, where=low) | {"beside": told(low)}
        parts.append(standing(verdict, told(arm), runs, strength=strength, **common))
    return combine(parts or [untested(f"no archived run of {experiment} decides this")])


@rule
def repeats(
    evidence: Evidence, experiment: str, *, arms: list[str], failing: str = "low"
) -> Finding:
    """Claimed: `arms` repeat the failing run, to the step and the loss at which it ends."""
    archive = evidence.archive(experiment)
    first = [] if archive is None else archive.arm(failing)
    second = [row for name in arms for row in archive.arm(name)] if first else []
    ends = {row["seed"]: (failed_step(row), row["train_loss"]) for row in first}
    pairs = [
        (ends[r["seed"]], (failed_step(r), r["train_loss"])) for r in second if r["seed"] in ends
    ]
    if not pairs:
        return untested(f"no archived pair of runs of {experiment} decides this")
    same = sum(a == b for a, b in pairs)
    verdict = SUPPORTED if same == len(pairs) else PARTLY if same else NOT_SUPPORTED
    effect = f"{same} of {len(pairs)} pairs end at the same step with the same loss to the last "
    effect += f"digit ({second[0]['label']} beside {first[0]['label']})"
    common = _common(experiment, archive, second)
    return standing(verdict, effect, len(pairs), strength=wilson(same, len(pairs)).low, **common)


@rule
def same_steps(
    evidence: Evidence, experiment: str, *, arm: str, other: str, other_arm: str
) -> Finding:
    """Claimed: the same seed fails at the same step on two machines, within 1 %."""
    archives = [evidence.archive(name) for name in (experiment, other)]
    if None in archives:
        return untested(f"{experiment} or {other} is not archived")
    here, there = (
        {r["seed"]: failed_step(r) for r in a.arm(name) if failed_step(r)}
        for a, name in zip(archives, (arm, other_arm))
    )
    pairs = [(here[s], there[s]) for s in sorted(set(here) & set(there))]
    if not pairs or archives[0].provenance["machine"] == archives[1].provenance["machine"]:
        return untested(f"no seed of {experiment} failed on two machines")
    close = sum(abs(a - b) <= 0.01 * a for a, b in pairs)
    verdict = SUPPORTED if close == len(pairs) else PARTLY if close else NOT_SUPPORTED
    steps = ", ".join(f"{a:,} and {b:,}" for a, b in pairs)
    used = [r for r in archives[0].arm(arm) if r["seed"] in here and r["seed"] in there]
    common = _common(experiment, archives[0], used)
    common["sources"] += (source(other, archives[1]),)
    return standing(verdict, f"failed at steps {steps} on two machines", len(pairs), **common)


# -- what comes first, and at what price ----------------------------------------------------------


@rule
def precedes(
    evidence: Evidence, experiment: str, *, signal: str | None = None, failing: str = "low"
) -> Finding:
    """Claimed: a run that fails shows an onset before its loss rises, first of `signal` if named.

    supported: in at least 4 of 5 failed runs; not supported: in none; partly: in between.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else [r for r in archive.arm(failing) if r["kind"] == "diverged"]
    if not rows:
        return untested(f"no archived failure of {experiment} decides this")
    warned = [
        r
        for r in rows
        if r["onset"] is not None
        and r["onset_step"] < r["diverged_from"]
        and signal in (None, r["onset"]["signal"])
    ]
    hits, runs = len(warned), len(rows)
    verdict = SUPPORTED if hits >= MOST * runs else PARTLY if hits else NOT_SUPPORTED
    leads = [r["diverged_from"] - r["onset_step"] for r in warned]
    lead = f", {min(leads):,} to {max(leads):,} steps before the loss" if leads else ""
    first = {"spectral_norm_q": ", first of the norm of W_Q", "tie_rate": ", first of the ties"}
    share = wilson(hits, runs)
    effect = f"an onset{first.get(signal, '')}, in {hits} of {runs} "
    effect += f"failed runs ({100 * share.low:.0f} to {100 * share.high:.0f} %){lead}"
    common = _common(experiment, archive, rows)
    strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
    return standing(verdict, effect, runs, strength=strength, **common)


@rule
def needs_ties(
    evidence: Evidence, experiment: str, *, floor: float, failing: str = "low"
) -> Finding:
    """Claimed: no run fails without ties: in each, some head ties in more than `floor` of rows.

    supported: so in every failed run; not supported: in at most 1 of 5; partly: in between.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else [r for r in archive.arm(failing) if r["kind"] in FAILED]
    if not rows:
        return untested(f"no archived failure of {experiment} decides this")
    hits, runs = sum(row["worst_tie_rate"] > floor for row in rows), len(rows)
    verdict = SUPPORTED if hits == runs else NOT_SUPPORTED if hits <= (1 - MOST) * runs else PARTLY
    rates = [row["worst_tie_rate"] for row in rows]
    effect = f"{hits} of {runs} failed runs had more than {floor:.0%} of rows tied in some head "
    effect += f"({min(rates):.0%} to {max(rates):.0%})"
    share = wilson(hits, runs)
    strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
    return standing(verdict, effect, runs, strength=strength, **_common(experiment, archive, rows))


@rule
def costs_nothing(
    evidence: Evidence, experiment: str, *, arm: str, against: str, most: float
) -> Finding:
    """Claimed: `arm` ends with the held-out loss of `against`, up to `most` nats, by seed.

    supported: the interval of the mean difference (two standard errors) lies below `most`;
    not supported: above it; partly: `most` lies inside.
    """
    archive = evidence.archive(experiment)
    rows, others = ([], []) if archive is None else (archive.arm(arm), archive.arm(against))
    base = {r["seed"]: r["held_out_loss"] for r in others if r["kind"] not in FAILED}
    gaps = [
        r["held_out_loss"] - base[r["seed"]]
        for r in rows
        if r["kind"] not in FAILED and r["seed"] in base
    ]
    if not gaps:
        return untested(f"no archived pair of runs of {experiment} decides this")
    mean = mean_interval(gaps)
    verdict = SUPPORTED if mean.high <= most else NOT_SUPPORTED if mean.low > most else PARTLY
    effect = f"{rows[0]['label']} ends {mean.value:+.3f} nats "
    effect += f"({mean.low:+.3f} to {mean.high:+.3f}) from {others[0]['label']}, held out"
    strength = max(0.0, min(1.0, mean.low)) if verdict == NOT_SUPPORTED else 0.0
    common = _common(experiment, archive, rows)
    return standing(verdict, effect, len(gaps), strength=strength, **common)


@rule
def delayed_by_bits(evidence: Evidence, experiment: str, *, dial: str) -> Finding:
    """Claimed: every further fraction bit of a dial delays the failure, for every seed.

    Pairs of runs at b and b + 1 bits of which the first failed; where the second did not fail it
    counts with the steps that it ran. supported: all pairs are delayed, with an exact sign test
    at 5 %; not supported: at most half; partly: in between.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else [r for r in archive.rows if r["arm"].startswith(dial)]
    by = {(int(r["arm"].removeprefix(dial)), r["seed"]): r for r in rows}
    pairs = {
        b: [
            (failed_step(by[b, s]), by[b + 1, s])
            for (bits, s) in by
            if bits == b and (b + 1, s) in by and failed_step(by[b, s])
        ]
        for b in sorted({bits for bits, _ in by})
    }
    pairs = {b: found for b, found in pairs.items() if found}
    if not pairs:
        return untested(f"no archived pair of runs of {experiment} decides this")
    every = [(step, r) for found in pairs.values() for step, r in found]
    delays = [np.log((failed_step(r) or r["steps"]) / step) for step, r in every]
    test, later = sign_test(delays), sum(d > 0 for d in delays)
    runs = min(len(found) for found in pairs.values())
    if later == len(delays):
        sure = test.p_value <= SIGNIFICANT or runs < VERDICT_RUNS
        verdict = SUPPORTED if sure else PARTLY
    else:
        verdict = NOT_SUPPORTED if later <= len(delays) / 2 else PARTLY
    steps = "; ".join(f"{b} to {b + 1} bits {_factor(found)}" for b, found in pairs.items())
    effect = f"{later} of {len(delays)} pairs delayed (sign test p = {test.p_value:.2g}); {steps}"
    common = _common(experiment, archive, [r for _, r in every])
    common["where"] = f"{dial} dial, {archive.provenance['preset']} preset"
    return standing(verdict, effect, runs, strength=1 - test.p_value, **common)


def _factor(pairs: Sequence[tuple[int, Mapping]]) -> str:
    """'x 1.2', or 'over x 2.3' where some run of more bits had not failed when it ended."""
    factor = np.exp(np.mean([np.log((failed_step(r) or r["steps"]) / step) for step, r in pairs]))
    over = "" if all(failed_step(r) for _, r in pairs) else "over "
    return f"{over}x {factor:.1f}"


@rule
def stays_finite(evidence: Evidence, experiment: str, *, arms: list[str]) -> Finding:
    """Claimed: none of `arms` ends in NaN or infinity.

    supported: no run does; not supported: more than half do; partly: in between. An arm with five
    runs decides over those with fewer.
    """
    archive = evidence.archive(experiment)
    parts = []
    for name in _arms(archive, arms) if archive is not None else []:
        rows = archive.arm(name)
        ends = [row["nonfinite_step"] for row in rows if row["kind"] == "nonfinite"]
        hits, runs = len(ends), len(rows)
        verdict = SUPPORTED if not hits else NOT_SUPPORTED if hits > runs / 2 else PARTLY
        when = f" (from step {min(ends):,})" if ends else ""
        effect = f"{rows[0]['label']} nonfinite in {hits} of {runs}{when}"
        share = wilson(hits, runs)
        strength = share.low if hits else 1 - share.high
        common = _common(experiment, archive, rows)
        parts.append(standing(verdict, effect, runs, strength=strength, **common))
    return combine(parts or [untested(f"no archived run of {experiment} decides this")])
