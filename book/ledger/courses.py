"""Rules over the course of runs: what comes first, what it costs, how bits delay it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpt2.outcomes import HEALTHY_FACTOR, is_healthy

from ..bf16_arms import CONTROLS
from ..chapter1 import dial_points
from ..evidence import Archive
from ..onsets import fork_state
from ..records import FAILED, failed_step, showed_sign
from ..survival import fit
from .findings import (
    MOST,
    NOT_SUPPORTED,
    PARTLY,
    SUPPORTED,
    Evidence,
    Finding,
    combine,
    fraction_bits,
    numerics_of,
    recipe_of,
    rule,
    rule_over_all,
    standing,
    untested,
)
from .runs import common, ended_short, failing_rows, names
from .shares import mean_interval, wilson


@rule
def precedes(
    evidence: Evidence,
    experiment: str,
    *,
    signal: str | None = None,
    failing: str = "low",
    bits: int | None = None,
) -> Finding:
    """Claimed: a run that fails shows an onset before its loss rises, first of `signal` if named.

    supported: in at least 4 of 5 failed runs; not supported: in none; partly: in between. Of ties
    only runs that round their scores can tell. bits: as of `prevents`.
    """
    archive = evidence.archive(experiment)
    rows = [r for r in failing_rows(archive, failing, bits) if r["kind"] == "diverged"]
    if signal == "tie_rate":
        rows = [r for r in rows if numerics_of(r).scores.format.fraction_bits < 23]
    if not rows:
        return untested()
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
    more = common(experiment, archive, rows)
    strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
    return standing(verdict, effect, runs, strength=strength, **more)


@rule
def needs_ties(
    evidence: Evidence, experiment: str, *, floor: float, failing: str = "low"
) -> Finding:
    """Claimed: no run fails without ties: in each, some head ties in more than `floor` of rows.

    supported: so in every failed run; not supported: in at most 1 of 5; partly: in between.
    """
    archive = evidence.archive(experiment)
    rows = [r for r in failing_rows(archive, failing) if r["kind"] in FAILED]
    if not rows:
        return untested()
    hits, runs = sum(row["worst_tie_rate"] > floor for row in rows), len(rows)
    verdict = SUPPORTED if hits == runs else NOT_SUPPORTED if hits <= (1 - MOST) * runs else PARTLY
    rates = [row["worst_tie_rate"] for row in rows]
    effect = f"{hits} of {runs} failed runs had more than {floor:.0%} of rows tied in some head "
    effect += f"({min(rates):.0%} to {max(rates):.0%})"
    share = wilson(hits, runs)
    strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
    return standing(verdict, effect, runs, strength=strength, **common(experiment, archive, rows))


@rule
def costs_nothing(
    evidence: Evidence, experiment: str, *, arm: str, against: str, most: float
) -> Finding:
    """Claimed: `arm` ends with the held-out loss of `against`, up to `most` nats, by seed.

    supported: the 95 % interval of the mean difference lies below `most`;
    not supported: above it; partly: `most` lies inside. Runs that were cut, and a single pair,
    which has no interval, say nothing.
    """
    archive = evidence.archive(experiment)
    found = [] if archive is None else [r for r in archive.rows if not ended_short(r)]
    rows, others = ([r for r in found if r["arm"] == name] for name in (arm, against))
    base = {r["seed"]: r["held_out_loss"] for r in others if r["kind"] not in FAILED}
    gaps = [
        r["held_out_loss"] - base[r["seed"]]
        for r in rows
        if r["kind"] not in FAILED and r["seed"] in base
    ]
    if len(gaps) < 2:
        return untested()
    mean = mean_interval(gaps)
    verdict = SUPPORTED if mean.high <= most else NOT_SUPPORTED if mean.low > most else PARTLY
    effect = f"{rows[0]['label']} ends {mean.value:+.3f} nats "
    effect += f"({mean.low:+.3f} to {mean.high:+.3f}) from {others[0]['label']}, held out"
    strength = max(0.0, min(1.0, mean.low)) if verdict == NOT_SUPPORTED else 0.0
    more = common(experiment, archive, rows)
    return standing(verdict, effect, len(gaps), strength=strength, **more)


@rule
def delayed_by_bits(evidence: Evidence, experiment: str, *, dial: str) -> Finding:
    """Claimed: each further fraction bit of a dial delays the failure.

    The line of log time to failure over bits, with runs that had not failed counted as longer
    (`book.survival`). supported: its 95 % interval lies above no delay; not supported: below or at
    it in the middle; partly: otherwise. Runs are those of the setting that has fewest.
    """
    archive = evidence.archive(experiment)
    rows = [] if archive is None else [r for r in archive.rows if r["arm"].startswith(dial)]
    line = fit(dial_points(rows)) if rows else None
    if line is None:
        return untested(f"the {dial} dial of {experiment} has too few failures for a line")
    low, high = line.slope_interval
    verdict = SUPPORTED if low > 0 else PARTLY if line.slope > 0 else NOT_SUPPORTED
    runs = min(len(archive.arm(name)) for name in {r["arm"] for r in rows})
    end = "no limit" if high is None else f"{2**high:.1f}"
    effect = f"time to failure times {2**line.slope:.1f} per bit ({2**low:.1f} to {end}), "
    effect += f"{line.failures} failures, {line.censored} runs that had not failed"
    more = common(experiment, archive, rows)
    more["where"] = f"{dial} dial, {archive.provenance['preset']} preset"
    return standing(verdict, effect, runs, **more)


@rule
def stays_finite(evidence: Evidence, experiment: str, *, arms: list[str]) -> Finding:
    """Claimed: none of `arms` ends in NaN or infinity.

    supported: no run does; not supported: more than half do; partly: in between. An arm with five
    runs decides over those with fewer.
    """
    archive = evidence.archive(experiment)
    parts = []
    for name in names(arms) if archive is not None else ():
        rows = failing_rows(archive, name)
        if not rows:
            continue
        ends = [row["nonfinite_step"] for row in rows if row["kind"] == "nonfinite"]
        hits, runs = len(ends), len(rows)
        verdict = SUPPORTED if not hits else NOT_SUPPORTED if hits > runs / 2 else PARTLY
        when = f" (from step {min(ends):,})" if ends else ""
        effect = f"{rows[0]['label']} nonfinite in {hits} of {runs}{when}"
        share = wilson(hits, runs)
        strength = share.low if hits else 1 - share.high
        more = common(experiment, archive, rows)
        parts.append(standing(verdict, effect, runs, strength=strength, **more))
    return combine(parts or [untested()])


@rule_over_all
def holds_off(
    evidence: Evidence, experiments: Sequence[str], *, arms: str | list[str], bits: int
) -> Finding:
    """Claimed: forks of each of `arms` show no onset where one of CONTROLS shows one.

    Forks of one state on the same batches; bits: where the control rounds O_bar to so many. A fork
    counts if it showed an onset or failed, or lived 1.5 times the steps to the control's onset.
    supported: none showed either; not supported: at least 4 of 5 did; partly: in between.
    """
    forks = list(_forks(evidence, experiments))
    controls = _controls(forks, bits)
    if not controls:
        return untested(f"no fork without a change shows an onset with {bits} fraction bits")
    parts, short = [], 0
    for arm in names(arms):
        counted = []
        for name, archive, row, control in _beside(forks, arm, controls):
            if showed_sign(row) or is_healthy(row["steps"], control["onset_step"]):
                counted.append((name, archive, row, control))
            else:
                short += 1
        if counted:
            parts.append(_held_off(counted))
    why = f"{short} fork{'s' * (short > 1)} without a sign ended before {HEALTHY_FACTOR:g} times "
    why += "the steps to the control's onset"
    return combine(parts or [untested(why) if short else untested()])


@rule_over_all
def hastens(
    evidence: Evidence, experiments: Sequence[str], *, arms: str | list[str], bits: int
) -> Finding:
    """Claimed: forks of each of `arms` fail before one of CONTROLS shows so much as its onset.

    Forks of one state on the same batches; bits: as for `holds_off`. A fork counts if it failed or
    came as far as that onset. supported: at least 4 of 5 did; partly: fewer; not supported: none.
    """
    forks = list(_forks(evidence, experiments))
    controls, parts = _controls(forks, bits), []
    for arm in names(arms):
        counted, sooner = [], []
        for name, archive, row, control in _beside(forks, arm, controls):
            if _failed(row) or row["steps"] >= control["onset_step"]:
                counted.append((name, archive, row, control))
            if _failed(row) and failed_step(row) < control["onset_step"]:
                sooner.append(row)
        if not counted:
            continue
        hits, runs = len(sooner), len(counted)
        verdict = SUPPORTED if hits >= MOST * runs else PARTLY if hits else NOT_SUPPORTED
        share = wilson(hits, runs)
        name, archive, row, control = counted[0]
        words = f"{row['label']} failed before the control's onset in {hits} of {runs} forks"
        words += f" ({100 * share.low:.0f} to {100 * share.high:.0f} %)"
        if sooner:
            after = sorted(failed_step(r) - r["forked_at"] for r in sooner)
            words += f", after {', '.join(f'{n:,}' for n in after)} steps"
        more = common(name, archive, [row for _, _, row, _ in counted], [control])
        parts.append(standing(verdict, words, runs, strength=share.low, **more))
    return combine(parts or [untested()])


def _beside(forks: Sequence[tuple], arm: str, controls: Mapping) -> Iterator[tuple]:
    """(experiment, archive, row, the control's row) of forks of an arm that have a control."""
    for name, archive, row in forks:
        control = controls.get(_place(archive, row))
        if row["arm"] == arm and control is not None:
            yield name, archive, row, control


def _controls(forks: Sequence[tuple], bits: int) -> dict[tuple, Mapping]:
    """The unchanged fork of a state, where it shows an onset, by state."""
    return {
        _place(archive, row): row
        for _, archive, row in forks
        if row["arm"] in CONTROLS and row["onset_step"] is not None and fraction_bits(row) == bits
    }


def _forks(evidence: Evidence, experiments: Sequence[str]) -> Iterator[tuple]:
    """(experiment, archive, row) of each fork, each run once."""
    seen = set()
    for name in experiments:
        archive = evidence.archive(name)
        for row in archive.rows if archive is not None else ():
            if row["forked_at"] is not None and row["run"] not in seen:
                seen.add(row["run"])
                yield name, archive, row


def _place(archive: Archive, row: Mapping) -> tuple:
    """What forks of one state have in common."""
    return recipe_of(archive, row), row["seed"], row["forked_at"], fork_state(archive, row)


def _failed(row: Mapping) -> bool:
    return row["kind"] in FAILED


def _held_off(counted: Sequence[tuple[str, Archive, Mapping, Mapping]]) -> Finding:
    rows = [row for _, _, row, _ in counted]
    hits, runs = sum(map(showed_sign, rows)), len(rows)
    verdict = NOT_SUPPORTED if hits >= MOST * runs else PARTLY if hits else SUPPORTED
    share = wilson(hits, runs)
    strength = share.low if verdict == NOT_SUPPORTED else 1 - share.high
    words = f"{rows[0]['label']}: an onset or a failure in {hits} of {runs} forks"
    words += f" ({100 * share.low:.0f} to {100 * share.high:.0f} %)"
    name, archive, _, control = counted[0]
    more = common(name, archive, rows, [control])
    return standing(verdict, words, runs, strength=strength, **more)
