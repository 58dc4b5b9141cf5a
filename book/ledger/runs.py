"""Rules over who failed: one arm of an experiment against its failing arm.

Every rule takes (evidence, experiment) and the names of arms of `book.experiments`. A run *failed*
if it diverged or became nonfinite, by the rules of `gpt2.outcomes`. What is left out: runs that
were cut before their partner of the same seed failed, and forks from a run that did not fail
(`book.verdicts.tested`). They say nothing, and a healthy look would count for the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpt2.outcomes import VERDICT_RUNS, is_healthy
from kernels.forensics import sign_test

from ..evidence import Archive
from ..records import FAILED, failed_step
from ..verdicts import CHANCE, failures, fewer_by_chance, onsets, tested
from .findings import (
    MOST,
    NOT_SUPPORTED,
    PARTLY,
    SUPPORTED,
    Evidence,
    Finding,
    combine,
    fraction_bits,
    model_of,
    regime,
    rule,
    rule_over_all,
    source,
    standing,
    untested,
)
from .shares import difference, wilson

Rows = Sequence[Mapping]


def ended_short(row: Mapping) -> bool:
    """Whether a run was stopped before its planned end with no failure so far."""
    if row["kind"] in FAILED:
        return False
    if "steps_asked" in row:  # of a search, which stops runs itself
        return row["steps"] < 0.99 * row["steps_asked"]
    return row.get("status") == "interrupted"


def failing_rows(
    archive: Archive | None, arm: str, bits: int | None = None, begun: bool = False
) -> list[Mapping]:
    """Runs of the failing arm that count; bits: only with an O_bar of so many fraction bits.

    begun: an onset is enough, however soon after it a run was stopped.
    """
    rows = [] if archive is None else archive.arm(arm)
    rows = [r for r in rows if not ended_short(r) or (begun and r["onset_step"] is not None)]
    return [r for r in rows if bits is None or fraction_bits(r) == bits]


def long_enough(rows: Rows, low: Rows) -> list[Mapping]:
    """Runs that failed, or lived at least as long as the failing run of their seed."""
    ends = {row["seed"]: failed_step(row) or 0 for row in low}
    return [r for r in rows if r["kind"] in FAILED or r["steps"] >= ends.get(r["seed"], 0)]


def pair(archive: Archive, low: Rows, arm: str) -> tuple[list[Mapping], list[Mapping]]:
    """(failing runs, runs of an arm) that can be compared; both empty where none can."""
    rows = long_enough(archive.arm(arm), low)
    if any(r.get("forked_at") is not None for r in rows):
        seeds = {r["seed"] for r in tested(low, low[0]["arm"])}
        rows = [r for r in rows if r["seed"] in seeds]
        low = [r for r in low if r["seed"] in seeds]
    return (list(low), rows) if rows and low else ([], [])


def told(rows: Rows) -> str:
    """'low precision failed in 4 of 5 (38 to 96 %), 1 more with an onset'."""
    hits, runs = failures(rows), len(rows)
    share = wilson(hits, runs)
    signs = f", {onsets(rows)} more with an onset" if onsets(rows) else ""
    words = f"{rows[0]['label']} failed in {hits} of {runs}"
    return f"{words} ({100 * share.low:.0f} to {100 * share.high:.0f} %){signs}"


def common(name: str, archive: Archive, rows: Rows, low: Rows = ()) -> dict:
    """Seeds, source and regime: that of the archive's plainly failing runs, else of `low`."""
    row = (archive.arm("low") or low or rows)[0]
    return {
        "seeds": tuple(sorted({r["seed"] for r in rows})),
        "sources": (source(name, archive),),
        "where": regime(name, archive, row),
    }


def names(arms: str | Sequence[str]) -> list[str]:
    return [arms] if isinstance(arms, str) else list(arms)


@rule
def prevents(
    evidence: Evidence,
    experiment: str,
    *,
    arms: str | list[str],
    failing: str = "low",
    sham: str | None = None,
    bits: int | None = None,
    heads: int | None = None,
) -> Finding:
    """Claimed: what differs in each of `arms` prevents the failure of `failing`.

    supported: exact test at 5 %, no failure and no onset under the arm, and the sham, if any,
    fails. partly: at most half as many failures, but some, or some onsets, or so few runs that it
    could be chance, or a sham that prevents too. Else not supported. bits: only
    where the failing runs round O_bar to so many fraction bits (7 is bf16 itself). heads: with
    fewer layers or heads than this nothing is more than observed.
    """
    archive = evidence.archive(experiment)
    low = failing_rows(archive, failing, bits)
    if not low or not any(archive.arm(name) for name in names(arms)):
        return untested()
    if not failures(low):
        return untested(f"nothing to prevent in {experiment}: {told(low)}")
    more = _too_small(archive, low[0], heads) if heads else {}
    parts = [_prevents(experiment, archive, low, name, **more) for name in names(arms)]
    if sham is not None:
        parts.append(_sham(experiment, archive, low, sham, **more))
    return combine([p for p in parts if p is not None] or [untested()])


def _too_small(archive: Archive, row: Mapping, heads: int) -> dict:
    """Why a model has no verdict about heads, if it has none (as in chapter 2)."""
    config = model_of(archive, row)
    if min(config.n_layer, config.n_head) >= heads:
        return {}
    return {"unfit": f"with {config.n_head} heads a demonstration"}


def _prevents(experiment: str, archive: Archive, low: Rows, name: str, **more) -> Finding | None:
    low, arm = pair(archive, low, name)
    if not arm:
        return None
    first, second = (failures(low), len(low)), (failures(arm), len(arm))
    gap, p = difference(first, second), fewer_by_chance(arm, low)
    runs, effect = min(len(low), len(arm)), told(arm)
    if runs >= VERDICT_RUNS:
        share = f"{100 * gap.value:.0f} % ({100 * gap.low:.0f} to {100 * gap.high:.0f})"
        effect += f", difference {share}, exact p = {p:.2g}; by seed {_pairs(low, arm)}"
    sure = p <= CHANCE or runs < VERDICT_RUNS
    if sure and failures(arm) + onsets(arm) == 0:
        verdict = SUPPORTED
    else:
        rarer = 2 * failures(arm) * len(low) <= failures(low) * len(arm)
        verdict = PARTLY if rarer else NOT_SUPPORTED
    strength = wilson(*second).low if verdict == NOT_SUPPORTED else gap.low
    more |= common(experiment, archive, arm, low)
    return standing(verdict, effect, runs, beside=told(low), strength=strength, **more)


def _sham(experiment: str, archive: Archive, low: Rows, name: str, **more) -> Finding | None:
    """The control: a change of the same size elsewhere must not prevent the failure as well."""
    low, sham = pair(archive, low, name)
    if not sham:
        return None
    fails = failures(sham) >= MOST * len(sham)
    verdict = SUPPORTED if fails else NOT_SUPPORTED if failures(sham) == 0 else PARTLY
    runs, words = min(len(low), len(sham)), f"control, {told(sham)}"
    more |= common(experiment, archive, sham, low)
    return standing(verdict, words, runs, beside=told(low), strength=1.0, **more)


def _pairs(low: Rows, arm: Rows) -> str:
    """'4 saved and 0 lost, sign test p = 0.13': runs of one seed share weights and batches."""
    before = {row["seed"]: row["kind"] in FAILED for row in low}
    changed = [before[r["seed"]] - (r["kind"] in FAILED) for r in arm if r["seed"] in before]
    saved, lost = sum(c > 0 for c in changed), sum(c < 0 for c in changed)
    p = f", sign test p = {sign_test([float(c) for c in changed]).p_value:.2g}"
    return f"{saved} saved and {lost} lost" + (p if saved + lost else "")


@rule
def still_fails(
    evidence: Evidence, experiment: str, *, arms: str | list[str], failing: str = "low"
) -> Finding:
    """Claimed: the failure happens under each of `arms`: what they leave out is no cause of it.

    supported: at least 4 of 5 runs fail; not supported: none does; partly: in between. Forks from
    a run that did not fail count here: if they live as it did, that counts against the claim.
    """
    archive = evidence.archive(experiment)
    low, parts = failing_rows(archive, failing), []
    for name in names(arms) if low else ():
        arm = long_enough(archive.arm(name), low)
        if not arm:
            continue
        hits, runs = failures(arm), len(arm)
        verdict = SUPPORTED if hits >= MOST * runs else PARTLY if hits else NOT_SUPPORTED
        share = wilson(hits, runs)
        strength = 1 - share.high if verdict == NOT_SUPPORTED else share.low
        more = common(experiment, archive, arm, low) | {"beside": told(low)}
        parts.append(standing(verdict, told(arm), runs, strength=strength, **more))
    return combine(parts or [untested()])


@rule_over_all
def fails_somewhere(
    evidence: Evidence, experiments: Sequence[str], *, bits: int, twin: str, arm: str = "low"
) -> Finding:
    """Claimed: with so many fraction bits, in some recipe, `arm` fails and its `twin` does not.

    Seeds of which both were run. supported: so in at least 4 of 5 seeds of a recipe, of 5 or more;
    partly: in fewer of them; not supported: in none of any recipe, of 5 runs or more in all, and
    no failing run is without its twin: with one that is, the claim is open.
    """
    settings: dict[str, _Setting] = {}  # a search and an experiment may share a recipe's runs
    for name in experiments:
        archive = evidence.archive(name)
        low = failing_rows(archive, arm, bits)
        if low:
            found = _Setting(name, archive, low, pair(archive, low, twin)[1])
            where = regime(name, archive, low[0])
            settings[where] = max(settings.get(where, found), found, key=lambda s: len(s.low))
    if not settings:
        return untested(f"no archived run with {bits} fraction bits")
    tried = list(settings.values())
    failed = [s for s in tried if failures(s.low)]
    words = f"low precision failed in {len(failed)} of {len(tried)} recipes, and its twin in "
    words += f"{sum(failures(s.twins) > 0 for s in failed)} of these"
    best = max(tried, key=lambda s: _saved(s.low, s.twins))
    saved, runs = _saved(best.low, best.twins), len(best.twins)
    alone = [where for where, s in settings.items() if failures(s.low) and not s.twins]
    if not saved and alone:
        return untested(f"{words}; open in {'; '.join(alone)}: no twin was run as far")
    if not saved:
        every = [row for s in tried for row in s.low]
        words += f"; {len(every)} runs of at most {max(r['steps'] for r in every):,} steps"
        more = common(best.name, best.archive, every)
        more["sources"] = tuple(source(s.name, s.archive) for s in tried)
        more["where"] = more["where"].partition(",")[0]  # whatever the recipe
        return standing(NOT_SUPPORTED, words, len(every), **more)
    verdict = SUPPORTED if saved >= MOST * runs else PARTLY
    words = f"{told(best.low)}, {told(best.twins)}; {words}"
    more = common(best.name, best.archive, best.twins)
    return standing(verdict, words, runs, strength=wilson(saved, runs).low, **more)


@rule_over_all
def begins_somewhere(
    evidence: Evidence, experiments: Sequence[str], *, bits: int, twin: str, arm: str = "low"
) -> Finding:
    """Claimed: with so many fraction bits, in some recipe, `arm` leaves its twin's course.

    Whether it fails later or not: its *onset* by the rule of `gpt2.outcomes`, tie rate or norm of
    the worst head far above the twin's. Seeds of which both were run, the twin for 1.5 times the
    steps to the onset. supported: an onset in at least 4 of 5 seeds of a recipe, of 5 or more;
    partly: in fewer of them; not supported: in none of any recipe, of 5 pairs or more in all.
    """
    settings = []
    for name in experiments:
        archive = evidence.archive(name)
        others = {} if archive is None else {r["seed"]: r for r in archive.arm(twin)}
        low = [r for r in failing_rows(archive, arm, bits, begun=True) if r["seed"] in others]
        low = [r for r in low if _outlived(r, others[r["seed"]])]
        if low:
            settings.append((name, archive, low))
    if not settings:
        return untested(f"no pair of archived runs with {bits} fraction bits")
    name, archive, low = max(settings, key=lambda s: (_begun(s[2]), len(s[2])))
    every = [row for _, _, rows in settings for row in rows]
    words = f"onsets in {_begun(every)} of {len(every)} pairs of {len(settings)} recipes"
    steps = sorted(r["onset_step"] for r in low if r["onset_step"] is not None)
    if not steps:
        return standing(NOT_SUPPORTED, words, len(every), **common(name, archive, every))
    share = wilson(len(steps), len(low))
    words += f"; there {len(steps)} of {len(low)}, at step " + ", ".join(f"{s:,}" for s in steps)
    verdict = SUPPORTED if len(steps) >= MOST * len(low) else PARTLY
    return standing(verdict, words, len(low), strength=share.low, **common(name, archive, low))


def _begun(rows: Rows) -> int:
    return sum(row["onset_step"] is not None for row in rows)


def _outlived(row: Mapping, twin: Mapping) -> bool:
    """Whether the twin ran long enough past the row's onset, or as long, to be a comparison."""
    if twin["kind"] in FAILED:
        return False
    begun = row["onset_step"]
    return twin["steps"] >= row["steps"] if begun is None else is_healthy(twin["steps"], begun)


class _Setting(NamedTuple):
    """The failing runs of one recipe, and those twins that can be compared with them."""

    name: str
    archive: Archive
    low: list[Mapping]
    twins: list[Mapping]


def _saved(low: Rows, twins: Rows) -> int:
    """Seeds with which the failing arm failed and its twin did not."""
    failed = {row["seed"] for row in low if row["kind"] in FAILED}
    return sum(r["seed"] in failed and r["kind"] not in FAILED for r in twins)


@rule
def repeats(
    evidence: Evidence, experiment: str, *, arms: list[str], failing: str = "low"
) -> Finding:
    """Claimed: `arms` repeat the failing run, to the step and the loss at which it ends.

    supported: all of them do; partly: some; not supported: none.
    """
    archive = evidence.archive(experiment)
    first = [] if archive is None else archive.arm(failing)
    second = [row for name in arms for row in archive.arm(name)] if first else []
    ends = {row["seed"]: (failed_step(row), row["train_loss"]) for row in first}
    pairs = [
        (ends[r["seed"]], (failed_step(r), r["train_loss"])) for r in second if r["seed"] in ends
    ]
    if not pairs:
        return untested()
    same = sum(a == b for a, b in pairs)
    verdict = SUPPORTED if same == len(pairs) else PARTLY if same else NOT_SUPPORTED
    effect = f"{same} of {len(pairs)} pairs end at the same step with the same loss to the last "
    effect += f"digit ({second[0]['label']} beside {first[0]['label']})"
    more = common(experiment, archive, second)
    return standing(verdict, effect, len(pairs), strength=wilson(same, len(pairs)).low, **more)


@rule
def same_steps(
    evidence: Evidence, experiment: str, *, arm: str, other: str, other_arm: str
) -> Finding:
    """Claimed: the same seed fails at the same step on two machines, within 1 %.

    Of the seeds that failed on at least one. supported: every seed does; partly: some; not
    supported: none.
    """
    archives = [evidence.archive(name) for name in (experiment, other)]
    if None in archives:
        return untested(f"{experiment} or {other} is not archived")
    here, there = (
        {r["seed"]: failed_step(r) for r in failing_rows(a, name)}
        for a, name in zip(archives, (arm, other_arm))
    )
    pairs = {s: (here[s], there[s]) for s in here if s in there and (here[s] or there[s])}
    if not pairs or archives[0].provenance["machine"] == archives[1].provenance["machine"]:
        return untested(f"no seed of {experiment} failed on one of two machines")
    close = sum(None not in p and abs(p[0] - p[1]) <= 0.01 * p[0] for p in pairs.values())
    verdict = SUPPORTED if close == len(pairs) else PARTLY if close else NOT_SUPPORTED
    steps = ", ".join(" and ".join(f"{x:,}" if x else "none" for x in p) for p in pairs.values())
    more = common(experiment, archives[0], [r for r in archives[0].arm(arm) if r["seed"] in pairs])
    more["sources"] += (source(other, archives[1]),)
    return standing(verdict, f"failed at steps {steps} on two machines", len(pairs), **more)
