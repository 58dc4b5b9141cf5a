"""Chapter 6: arms beside low precision, its twin and the witness, and forks beside each other.

Records are those of `book.chapter6.gpu_rows`. Forks that an onset places are asked for no
divergence, only for the declared sign; the fork without a change, their control, says when it is
due (`fork_words`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from IPython.display import Markdown

from gpt2.many import shortened
from gpt2.outcomes import HEALTHY_FACTOR, is_healthy

from .captions import Captioned
from .record_figures import captioned_panels
from .records import FAILED, showed_sign, ties_judged
from .signs import curve
from .tables import arm_table, markdown_table, number, step_text

OTHER = {
    "failure": "What is said to help, and other numerics, from the start",
    "failure-forked": "The same as forks of the failing run",
    "sites": "One site, or all but one, in low precision, as forks of the failing run",
    "isolation": "Other single changes, as forks of the failing run",
    "errors": "The error of delta changed, from the start",
    "errors-forked": "The error of delta changed, as forks of the failing run",
    "unbiased": "Roundings without a bias, as forks of the failing run",
    "optimizer": "With Muon for the hidden matrices",
    "size-wide": "Twice as wide",
    "size-deep": "Twice as deep",
    "size-gpt2s": "In the size of GPT-2 small",
}
# Forks in which nothing changes, or which make the same error another way, the best one first.
CONTROLS = ("same", "captured", "sham")
CROWD = 8  # lines in a figure of forks, the control and the twin aside
LATE = 1_000  # steps before the end of the shortest fork, over which forks are compared


def of_experiment(rows: Sequence[Mapping], kind: str) -> list[Mapping]:
    """The records that `book.evidence KIND --recipe ...` archived, of any recipe."""
    return [row for row in rows if row["experiment"] == f"{kind}-{row['recipe']}"]


def arm_tables(rows: Sequence[Mapping]) -> Markdown:
    """One table of arms for each experiment that is archived in a recipe.

    Forks that are judged by the onset of their control have their own table (`fork_table`).
    """
    parts, aside = [], by_onset(rows)
    if aside:
        parts.append("Forks that are judged by the onset of an unchanged one stand further down.")
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        for kind, title in OTHER.items():
            mine = [row for row in of_experiment(rows, kind) if row["recipe"] == recipe]
            mine = [row for row in mine if row["run"] not in aside]
            if mine:
                parts += [f"**{title}** (recipe {recipe})", arm_table(mine).data]
    if not parts:
        return Markdown("*No run of another arm on a GPU is archived yet.*")
    return Markdown("\n\n".join(parts))


# -- forks side by side ---------------------------------------------------------------------------


def fork_groups(rows: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    """'tiny, seed 0, from step 900' -> all forks from that state, the control first.

    Each fork once, the longest of those that differ in nothing but probes. States from which most
    forks start come first; of one fork alone nothing can be compared.
    """
    groups = {}
    found = [_each_once(forks) for forks in _by_state(rows)]
    for forks in sorted((f for f in found if len(f) > 1), key=lambda forks: -len(forks)):
        one, first = forks[0], control_of(forks)
        name = f"{one['recipe']}, seed {one['seed']}, from step {one['forked_at']:,}"
        name += f", code {one['source']['code']}" if name in groups else ""
        groups[name] = sorted(forks, key=lambda r: r is not first)
    return groups


def _by_state(rows: Sequence[Mapping]) -> list[list[Mapping]]:
    """All forks of each state."""
    found: dict[tuple, list[Mapping]] = {}
    for row in rows:
        if row["forked_at"] is not None:
            place = row["recipe"], row["seed"], row["forked_at"], row["state"]
            found.setdefault(place, []).append(row)
    return list(found.values())


def _each_once(forks: Sequence[Mapping]) -> list[Mapping]:
    """The longest of the forks of a state that differ in nothing but probes."""
    found: dict[tuple, Mapping] = {}
    for row in forks:
        moved = {name: x for name, x in row["changes"].items() if name != "probes"}
        same = row["attention"], str(moved)
        if same not in found or found[same]["steps"] < row["steps"]:
            found[same] = row
    return list(found.values())


def fork_views(groups: Mapping[str, Sequence[Mapping]]) -> dict[str, list[Mapping]]:
    """What `fork_figure` draws at a time: a group, or of a large one each kind of fork.

    Beside the control and the twin, which stand in all of them.
    """
    views = {}
    for name, forks in groups.items():
        if len(forks) <= CROWD:
            views[name] = list(forks)
            continue
        always = [r for r in forks if r is control_of(forks) or r["arm"] == "delta_fp32"]
        for kind in OTHER:
            mine = [r for r in of_experiment(forks, kind) if r not in always]
            for part, begin in enumerate(range(0, len(mine), CROWD)):
                title = f"{name}: {kind}" + (f", {part + 1}" if len(mine) > CROWD else "")
                views[title] = [*always, *mine[begin : begin + CROWD]]
    return views


def control_of(forks: Sequence[Mapping]) -> Mapping | None:
    """The best of CONTROLS among them, where one shows an onset."""
    shown = {r["arm"]: r for r in forks if r["onset_step"] is not None}
    return next((shown[arm] for arm in CONTROLS if arm in shown), None)


def by_onset(rows: Sequence[Mapping]) -> set[str]:
    """Runs of the forks that are judged by the onset of their control."""
    groups = [f for f in _by_state(rows) if control_of(f) and len(_each_once(f)) > 1]
    return {row["run"] for forks in groups for row in forks}


def compared_to(forks: Sequence[Mapping]) -> int:
    """The step up to which forks are compared: the last one of the shortest.

    Of those that did not fail and came at least half as far as the farthest; else of all the last.
    """
    last = max(row["steps"] for row in forks)
    half = (last + forks[0]["forked_at"]) / 2
    lived = [row["steps"] for row in forks if row["kind"] not in FAILED]
    return min((steps for steps in lived if steps >= half), default=last)


def late_mean(row: Mapping, name: str, end: int) -> float | None:
    """Mean of a signal of the worst head over the LATE steps up to `end`.

    None if it is not recorded, and of a fork that ended before.
    """
    if row["steps"] < end:
        return None
    steps, values = curve(row, name)
    late = values[(steps >= end - LATE) & (steps <= end) & ~np.isnan(values)]
    return float(late.mean()) if len(late) else None


def fork_table(forks: Sequence[Mapping]) -> Markdown:
    """Outcome of each fork, and what its worst head showed before the shortest one ended."""
    end = compared_to(forks)
    lines = []
    for row in forks:
        ties, norm = (late_mean(row, name, end) for name in ("tie_rate", "spectral_norm_q"))
        told = [number(ties), number(norm, 1), number(row["held_out_loss"])]
        lines.append([row["label"], step_text(row), *told, f"`{shortened(row['attention'])}`"])
    header = ["fork", "outcome", "tied rows", "norm of W_Q", "held-out loss", "attention"]
    words = (
        f"Forks in recipe {forks[0]['recipe']}, seed {forks[0]['seed']}, from step "
        f"{forks[0]['forked_at']:,}, on the same batches. *Tied rows* (share) and *norm*: worst "
        f"head, mean over the {LATE:,} steps up to {end:,}, where the shortest fork ended of "
        "those that did not fail and came half as far as the farthest. Where no score is rounded, "
        "rows do not tie."
    )
    return Markdown(f"{words}\n\n{markdown_table(header, lines).data}")


def fork_figure(forks: Sequence[Mapping]) -> Captioned:
    """Ties, norm and held-out loss of forks from one state; of those that did not fail at once."""
    metrics = ["tie_rate", "spectral_norm_q", "held_out_loss"]
    words = f"Forks from step {forks[0]['forked_at']:,}, worst head at each step."
    lived = [row for row in forks if len(curve(row, "tie_rate")[0]) > 1]
    return captioned_panels(lived, metrics, words, "Three panels over the steps.")


def fork_words(forks: Sequence[Mapping], known: Mapping | None = None) -> str:
    """What the control did, and below it what the others had shown by the time they ended.

    An item of a list with items of its own, in Markdown. '' without a control that has an onset:
    then nothing can be compared. known: the run from scratch whose onset placed the forks.
    """
    control = control_of(forks)
    others = [row for row in forks if row is not control]
    if control is None or not others:
        return ""
    end, due = compared_to(forks), control["onset_step"]
    ties = late_mean(control, "tie_rate", end)
    what = "with the same error" if control["arm"] == "sham" else "without a change"
    words = (
        f"Forks of one state in bf16 ({control['recipe']}, seed {control['seed']}, step "
        f"{control['forked_at']:,}): {what} the onset came at step {due:,}, with "
        f"{number(ties, 2)} of the worst head's rows tied over the {LATE:,} steps up to {end:,}."
    )
    alive = [r for r in others if not showed_sign(r)]
    signed = [r for r in others if showed_sign(r)]
    judged = [r for r in alive if is_healthy(r["steps"], due)]
    short = [f"{r['label']} (by {r['steps']:,})" for r in alive if r not in judged]
    times = f"{HEALTHY_FACTOR:g} times the control's steps to its onset"
    told = [f"With a sign as well: {_told(signed, end)}."] if signed else []
    told += [f"Without one for {times}: {_told(judged, end)}."] if judged else []
    told += [f"Without one, but cut before {times}: {', '.join(short)}."] if short else []
    moved = known is not None and known["onset_step"] not in (None, due)
    if moved and known.get("code") != control["source"]["code"]:
        told.append(
            f"Trained from scratch with other code the same seed had its onset at "
            f"{known['onset_step']:,}: the last bits of other operations move it."
        )
    return "\n".join([words, *(f"  - {line}" for line in told)])


def _told(rows: Sequence[Mapping], end: int) -> str:
    """'mirrored: 0.15, onset at 6,100; ...': tied rows before `end`, where known, and the sign."""
    told = []
    for row in rows:
        share = late_mean(row, "tie_rate", end)
        ties = "" if share is None else f"{number(share, 2)}, "
        told.append(f"{row['label']}: {ties}{_sign(row)}")
    return "; ".join(told)


def _sign(row: Mapping) -> str:
    """'onset at 4,400', 'nonfinite at 3,600' or 'no sign by 5,599'."""
    if row["kind"] in FAILED:
        return step_text(row)
    onset = row["onset_step"]
    return f"no sign by {row['steps']:,}" if onset is None else f"onset at {onset:,}"


def site_words(rows: Sequence[Mapping]) -> list[str]:
    """One line for each state on forks with all but one rounding, beside its control's onset."""
    lines = []
    for forks in fork_groups(rows).values():
        control = control_of(forks)
        mine = [r for r in forks if r["arm"].startswith("site_") or r["arm"] == "backward_fp32"]
        if control is None or not mine:
            continue
        due = control["onset_step"]
        mine.sort(key=lambda r: (r["onset_step"] is None, r["onset_step"]))
        told = []
        for row in mine:
            cut = not (showed_sign(row) or is_healthy(row["steps"], due))
            told.append(f"{row['label']}: {_sign(row)}" + ", not judged" * cut)
        lines.append(
            f"Attribution: one rounding less, in forks whose control has its onset at {due:,} "
            f"({control['recipe']}, seed {control['seed']}). {'; '.join(told)}."
        )
    return lines


def attribution_words(rows: Sequence[Mapping]) -> list[str]:
    """One line each on single sites and on the error of delta, or that it was not run.

    Of forks that are judged by an onset, `fork_words` tells; and `site_words`.
    """
    lines, aside = site_words(rows), by_onset(rows)
    for kind, prefix, words in (
        ("sites", "only_", "Attribution: with one rounding alone"),
        ("errors-forked", "", "Bias against size: with the error of $\\delta$ changed"),
        ("errors", "", "The same from the start"),
    ):
        mine = [r for r in of_experiment(rows, kind) if r["arm"] != "low"]
        mine = [r for r in mine if r["arm"].startswith(prefix)]
        rest = [r for r in mine if r["run"] not in aside]
        judged = [r for r in rest if _could_fail(r)]
        if judged:
            lines.append(f"{words}, {_who_failed(judged)}.")
        elif rest:
            lines.append(f"{words}: not judged, since the forks began with too many ties.")
        elif not mine and kind != "errors":
            lines.append(f"{words}: not run in bf16.")
    return lines


def _could_fail(row: Mapping) -> bool:
    """Whether the rule of an onset could be met, or a run failed all the same."""
    return row["kind"] in (*FAILED, "onset") or ties_judged(row)


def _who_failed(rows: Sequence[Mapping]) -> str:
    """'failed: S rounded (1 of 1); did not: ...'; an onset counts and is named where there is one.

    A run whose parent shows an onset alone is asked for no more than that.
    """
    failed, alive = [], []
    signs = any(row["kind"] == "onset" for row in rows)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        count = sum(row["kind"] in (*FAILED, "onset") for row in mine)
        words = f"{mine[0]['label']} ({count} of {len(mine)})"
        (failed if count else alive).append(words)
    told = "failed or showed an onset" if signs else "failed"
    return f"{told}: {', '.join(failed) or 'none'}; did not: {', '.join(alive) or 'none'}"
