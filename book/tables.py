"""Tables of the book: numerics side by side, outcomes of runs, summaries of arms.

Everything is Markdown made from values that code or runs hold; nothing is typed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from IPython.display import Markdown

from gpt2.outcomes import VERDICT_RUNS
from kernels.forensics import SignedMean, signed_mean
from kernels.numerics import Numerics, parse_numerics

from .records import FAILED, failed_step, failed_steps, ties_judged


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Markdown:
    """A Markdown table; bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return Markdown(
        "\n".join(
            "| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines
        )
    )


def numerics_differences(arms: Mapping[str, str | Numerics]) -> Markdown:
    """The fields in which some of the arms differ, one row a field, one column an arm."""
    parsed = {name: parse_numerics(text) for name, text in arms.items()}
    rows = []
    for field in fields(Numerics):
        values = [_told(getattr(n, field.name)) for n in parsed.values()]
        if field.name != "name" and len(set(values)) > 1:
            rows.append([f"`{field.name}`", *values])
    return markdown_table(["site or choice", *parsed], rows)


def _told(value) -> str:
    if value is None:
        return "as stored"
    if hasattr(value, "kind"):
        return str(value.kind)
    return str(value)


def head_name(place: Sequence[int]) -> str:
    """'layer 1, head 0', both counted from 0."""
    return "layer {}, head {}".format(*place)


def step_text(row: Mapping) -> str:
    """'diverged at 2,038' or 'healthy to 3,500', from a record of book.evidence."""
    step = failed_step(row)
    if step is not None:
        return f"{row['kind']} at {step:,}"
    if row["kind"] == "onset":
        return f"onset at {row['onset_step']:,}, no divergence to {row['steps']:,}"
    told = f"{row['kind']} to {row['steps']:,}"
    return told if ties_judged(row) else f"{told}, ties not judged"


def outcome_table(rows: Sequence[Mapping]) -> Markdown:
    """One line per run: what happened by the declared rules, and the last held-out loss."""
    lines = []
    for row in rows:
        onset = "none" if row["onset_step"] is None else f"{row['onset_step']:,}"
        lines.append(
            [
                row["label"],
                row["seed"],
                step_text(row),
                onset,
                number(row["held_out_loss"]),
                number(row["worst_norm"], 1),
                number(row["worst_tie_rate"]),
            ]
        )
    header = ["arm", "seed", "outcome", "onset", "held-out loss", "largest norm", "largest ties"]
    return markdown_table(header, lines)


def arm_table(rows: Sequence[Mapping]) -> Markdown:
    """One line per arm over its seeds: how many failed and when, and held-out losses of the rest.

    "verdict" from VERDICT_RUNS runs on, "observed" with fewer. Onsets of runs that did not fail
    have a column where there are any.
    """
    lines, signs = [], []
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name]
        failed = [row for row in mine if row["kind"] in FAILED]
        steps = failed_steps(failed)
        ends = dict.fromkeys((f"{steps[0]:,}", f"{steps[-1]:,}")) if steps else ("none",)
        spread = " to ".join(ends)
        losses = [row["held_out_loss"] for row in mine if row not in failed]
        losses = [x for x in losses if x is not None]
        mean = number(sum(losses) / len(losses)) if losses else "none"
        label = "verdict" if len(mine) >= VERDICT_RUNS else "observed"
        ran = f"{min(r['steps'] for r in mine):,}"
        lines.append([mine[0]["label"], f"{len(failed)} of {len(mine)}", spread, ran, mean, label])
        begun = [row.get("onset_step") for row in mine if row not in failed]
        signs.append(", ".join(f"{s:,}" for s in sorted(filter(None, begun))))
    header = ["arm", "failed", "at steps", "shortest run", "held-out loss of the rest", "standing"]
    if any(signs):
        header.insert(3, "onset of the rest")
        for line, told in zip(lines, signs):
            line.insert(3, told or "none")
    return markdown_table(header, lines)


def number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:,.{digits}f}"


# Two-sided 95 % points of Student's t, by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


def over_runs(values: Sequence[float]) -> SignedMean:
    """Mean over runs with its standard error, each run one draw; nan error for a single one."""
    return signed_mean(torch.tensor(values, dtype=torch.float64))


def half_width(found: SignedMean) -> float:
    """Half of the 95 % interval (Student's t) of a mean over `found.n` runs; nan for one."""
    return _STUDENT.get(found.n - 1, 1.96) * found.stderr


def ratio_interval(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float, float]:
    """mean(parts) / mean(wholes) over paired runs, with Fieller's 95 % interval.

    The interval holds all ratios r for which the mean of part - r * whole is not off zero. It is
    (-inf, inf) where the mean of the wholes itself is not off zero, or with fewer than two runs.
    """
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (parts, wholes))
    n, ratio = len(a), float(a.mean() / b.mean())
    if n < 2:
        return ratio, -math.inf, math.inf
    cov = torch.cov(torch.stack([a, b])) * (_STUDENT.get(n - 1, 1.96) ** 2 / n)
    square = float(b.mean() ** 2 - cov[1, 1])
    half = float(a.mean() * b.mean() - cov[0, 1])
    rest = float(a.mean() ** 2 - cov[0, 0])
    if square <= 0:
        return ratio, -math.inf, math.inf
    root = math.sqrt(max(half**2 - square * rest, 0.0))
    return ratio, (half - root) / square, (half + root) / square
