"""What the archives of chapter 5 say together: outcomes, maps of the sweep, sites, the paper.

Every sentence is made from archived records; with fewer than `gpt2.outcomes.VERDICT_RUNS` runs an
arm it calls itself observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from IPython.display import Markdown

from gpt2.outcomes import VERDICT_RUNS

from .chapter5 import BETAS, capital, is_test
from .evidence import Archive
from .experiments import SWEEP_EPS
from .records import FAILED
from .tables import markdown_table, step_text

SOUND = ("healthy", "stable")


def verdicts(kept: Mapping[str, Archive | None]) -> list[str]:
    """One sentence per archived setting: what each arm did."""
    told = []
    for name, archive in kept.items():
        if archive is None:
            continue
        parts = []
        for arm in dict.fromkeys(row["arm"] for row in archive.rows):
            mine = archive.arm(arm)
            counts = {k: sum(r["kind"] == k for r in mine) for k in (*FAILED, "onset")}
            bad = [f"{n} {kind}" for kind, n in counts.items() if n]
            parts.append(
                f"{mine[0]['label']}: {' and '.join(bad) or 'none failed'} of {len(mine)}"
            )
        told.append(f"Archived, {name}: " + "; ".join(parts) + ".")
    return told


# Variant -> arm of the sweep -> value on the axis of its map; for beta the axis is beta - 1.
BETA_MAP = {"published": {arm: beta - 1 for arm, beta in BETAS.items()}}
EPS_MAP = {
    "published, beta 2": {"sfa2": 0.0} | {f"eps_{e:g}": e for e in SWEEP_EPS},
    "guarded, beta 7": {"guarded": 0.0} | {f"guarded_eps_{e:g}": e for e in SWEEP_EPS},
}


def map_points(sweep: Archive, axis: Mapping[str, Mapping[str, float]]) -> dict[str, list]:
    """Variant -> (value, record) of each of its runs, for `sfa_figures.map_figure`."""
    return {
        name: [(value, row) for arm, value in arms.items() for row in sweep.arm(arm)]
        for name, arms in axis.items()
    }


# A softmax -> the same with one change more, each of which takes something away from the error.
ONE_CHANGE = {
    "low": (
        "low_unnormalized_fp32",
        "low_output_fp32",
        "stochastic_unnormalized",
        "stochastic_output",
        "stochastic_both",
        "delta_fp32",
    ),
    "guarded": (
        "guarded_rounded",
        "guarded_unnormalized_fp32",
        "guarded_output_fp32",
        "guarded_delta_fp32",
    ),
    "sfa2": ("sfa2_delta_fp32",),
}


def site_table(sweep: Archive) -> Markdown:
    """One line per softmax and single change: how many runs failed, and how, seed by seed."""
    lines = []
    for base, changes in ONE_CHANGE.items():
        for name in (base, *changes):
            mine = sweep.arm(name)
            if mine:
                ends = "; ".join(step_text(row) for row in mine)
                label = mine[0]["label"] if name == base else f"... {mine[0]['label']}"
                lines.append([label, f"{_failed(mine)} of {len(mine)}", ends])
    return markdown_table(["softmax and change", "failed", "seed by seed"], lines)


def site_findings(sweep: Archive) -> list[str]:
    """In words: which single changes saved the runs of a softmax that fails, and which did not.

    Only seeds count in which the softmax itself failed. Saved: neither failure nor onset.
    """
    told = []
    for base, changes in ONE_CHANGE.items():
        plain = sweep.arm(base)
        seeds = {row["seed"] for row in plain if row["kind"] in FAILED}
        found = [[row for row in sweep.arm(name) if row["seed"] in seeds] for name in changes]
        found = [rows for rows in found if rows]
        if not found:
            continue
        saved = [rows for rows in found if all(r["kind"] in SOUND for r in rows)]
        lost = [rows for rows in found if _failed(rows) == len(rows)]
        groups = (
            ("saved by", saved),
            ("not saved by", lost),
            ("some failed, or showed an onset without failing, under", [
                rows for rows in found if rows not in saved and rows not in lost
            ]),
        )  # fmt: skip
        words = "; ".join(f"{text} {_labels(arms)}" for text, arms in groups if arms)
        standing = _standing(found)
        told.append(
            f"{capital(plain[0]['label'])} failed in {len(seeds)} of {len(plain)} runs. The same "
            f"seeds were {words} ({standing})."
        )
    return told + _weights_and_sum(sweep)


def _weights_and_sum(sweep: Archive) -> list[str]:
    """What is left of guarded SFA's failure if no rounding of O takes part in it."""
    about_o = [
        rows
        for rows in map(sweep.arm, ONE_CHANGE["guarded"])
        if rows and rows[0]["arm"] != "guarded_rounded"
    ]
    summed = sweep.arm("guarded_rounded")
    if not about_o or not summed or _failed(summed):
        return []
    if any(_failed(rows) < len(rows) for rows in about_o):
        return []
    onsets = sum(row["kind"] == "onset" for row in summed)
    standing = _standing([*about_o, summed])
    return [
        "So under guarded SFA no rounding of O is needed for the failure: it goes on with either "
        "of them in fp32, and with δ from an O that has neither. Only where the row sum is of the "
        f"rounded weights did no run fail ({onsets} of {len(summed)} showed an onset). This "
        f"points to P̄ against its row sum, an error that an fp32 O has as well ({standing})."
    ]


def _standing(arms: Sequence[Sequence[Mapping]]) -> str:
    least = min(map(len, arms))
    return "a verdict" if least >= VERDICT_RUNS else f"observed, {least} run(s) an arm"


def _failed(rows: Sequence[Mapping]) -> int:
    return sum(row["kind"] in FAILED for row in rows)


def _labels(arms: Sequence[Sequence[Mapping]]) -> str:
    return ", ".join(f"\u201c{rows[0]['label']}\u201d" for rows in arms)


# Arm of the sweep, the switch, what it costs ("" is SFA's price), and what it is meant against.
SWITCHES = (
    (
        "low_unnormalized_fp32",
        "$\\bar O$ in fp32 (`unnormalized=fp32`)",
        "none: flash attention does it already",
        "one-sided rounding of $\\bar O$",
    ),
    (
        "guarded_rounded",
        "guarded SFA, row sum of rounded weights (`row_sum_source=rounded`)",
        "",
        "ties, without the error of scale of moved maxima",
    ),
    (
        "delta_fp32",
        "$\\delta$ from an fp32 $O$ (`delta_output=fp32`)",
        "one more output, 4 bytes per element of $O$",
        "both roundings of $O$, by whatever cause; forward unchanged",
    ),
    (
        "guarded",
        "guarded SFA (`softmax=guarded`)",
        "",
        "ties, where the format has bits enough",
    ),
    (
        "sfa2",
        "SFA as published (`softmax=stabilized,beta=2`)",
        ", and a bound on scores",
        "the same, until scores pass the bound",
    ),
)


def switch_table(sweep: Archive | None, price: str) -> Markdown:
    """The switches with their cost and how they fared in the archived runs of the sweep.

    price: what SFA costs, as `chapter5.sfa_cost` says it.
    """
    lines = []
    for arm, switch, cost, purpose in SWITCHES:
        mine = sweep.arm(arm) if sweep else []
        cost = f"{price}{cost}" if arm in ("guarded", "guarded_rounded", "sfa2") else cost
        ends = "; ".join(step_text(row) for row in mine) or "not run"
        lines.append([switch, cost, purpose, ends])
    header = ["switch", "cost", "meant against", "at 2 bits here, seed by seed"]
    return markdown_table(header, lines)


# -- the paper's statements -----------------------------------------------------------------------

# What the paper's account implies, and the arms of the sweep that would not fail if it were all.
CLAIMS = {
    "What SFA leaves of the error is that of O: with δ from an fp32 O nothing fails.": (
        "guarded_delta_fp32",
        "guarded_unnormalized_fp32",
        "guarded_output_fp32",
    ),
    "The bias is the cause: unbiased rounding would not fail.": (
        "stochastic_unnormalized",
        "stochastic_output",
        "stochastic_both",
    ),
}


def against_paper(kept: Mapping[str, Archive | None], sweep: Archive | None) -> list[str]:
    """The paper's statements that archived runs speak against, each with the runs that do."""
    rows = sweep.rows if sweep else []
    return [
        *_prevention(kept),
        *_any_beta(rows),
        *_causes(rows),
        *_ties_under_guarded(kept.get("sfa")),
    ]


def _prevention(kept: Mapping[str, Archive | None]) -> list[str]:
    tests, failed = [], 0
    for name, archive in kept.items():
        plain = archive.arm("low") if archive else []
        seeds = [row["seed"] for row in plain if is_test(row)]
        parts = []
        for arm in ("sfa2", "sfa7", "guarded", "delta_fp32"):
            mine = [row for row in archive.arm(arm) if row["seed"] in seeds] if seeds else []
            failed += _failed(mine) if arm != "delta_fp32" else 0
            if mine:
                parts.append(f"{mine[0]['label']} {_failed(mine)} of {len(mine)}")
        if seeds:
            told = f"{name}, where {len(seeds)} of {len(plain)} seeds are a test"
            tests.append(f"{told}: {', '.join(parts)}")
    if not failed:
        return []
    return ["*SFA prevents the failure.* Runs that failed in " + "; in ".join(tests) + "."]


def _any_beta(rows: Sequence[Mapping]) -> list[str]:
    published = [row for row in rows if row["arm"] in BETAS]
    broken = [row["nonfinite_step"] for row in published if row["kind"] == "nonfinite"]
    if not broken:
        return []
    values = sorted(BETAS[row["arm"]] for row in published)
    return [
        "*To choose beta from a range is enough.* Of the published rule's runs with beta from "
        f"{values[0]:g} to {values[-1]:g}, {len(broken)} of {len(published)} ended nonfinite, at "
        f"steps {min(broken):,} to {max(broken):,}."
    ]


def _causes(rows: Sequence[Mapping]) -> list[str]:
    told = []
    for claim, arms in CLAIMS.items():
        mine = [row for row in rows if row["arm"] in arms]
        if _failed(mine):
            each = [
                f"{of[0]['label']} {_failed(of)} of {len(of)}"
                for of in ([r for r in mine if r["arm"] == arm] for arm in arms)
                if of
            ]
            told.append(f"*{claim}* Failed: {'; '.join(each)}.")
    return told


def _ties_under_guarded(archive: Archive | None) -> list[str]:
    rows = archive.rows if archive else []
    plain, moved = (mean_ties(rows, arm) for arm in ("low", "guarded"))
    if plain is None or moved is None or moved <= plain:
        return []
    return [
        "*The remedy acts on tied rows and leaves the rest alone.* It changes how often rows tie: "
        f"in the first 1,000 steps {moved:.0%} of the worst head's rows under guarded SFA, "
        f"{plain:.0%} under plain softmax (means over seeds)."
    ]


def mean_ties(rows: Sequence[Mapping], arm: str, until: int = 1000) -> float | None:
    """Tie rate of the worst head, over the probes up to a step and the seeds that reach it."""
    means = []
    for row in rows:
        curve = row["curves"].get("tie_rate")
        if row["arm"] == arm and curve and curve["step"][-1] >= until:
            pairs = zip(curve["step"], curve["value"])
            seen = [v for s, v in pairs if 0 < s <= until and v is not None]
            means.append(sum(seen) / len(seen))
    return sum(means) / len(means) if means else None
