"""Time to failure against fraction bits: what the dials did, and what they foretell for bf16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from IPython.display import Markdown
from matplotlib.figure import Figure

from .captions import DASHES, INK, PALETTE, Captioned, archived, caption, styled
from .chapter1 import dial_points
from .chapter6 import of, span
from .evidence import RESULTS, Archive, archives
from .figures import dose_response
from .regimes import RECIPES
from .survival import Fit, fit
from .tables import markdown_table

BF16_BITS = 7


def dose_sets(rows: Sequence[Mapping], folder: Path = RESULTS) -> dict[str, dict]:
    """Where both dials were turned: name -> {"points", "source", "measured"}.

    points: as `book.figures.dose_response` takes them, below bf16's 7 bits. measured: the same of
    bf16 itself in that regime (`tiny` has the shape of the cpu preset), maybe none.
    """
    out = {}
    kept = [(archive, archive.rows) for archive in archives("dials", folder)]
    for name, arm in (("failure", "matched2"), ("failure-output", "output2")):
        for archive in archives(name, folder):  # the failing arm is the dial at 2 bits
            label = f"{arm[:-1]} dial, 2 bits"
            low = [row | {"arm": arm, "label": label} for row in archive.arm("low")]
            kept.append((archive, low))
    if kept:
        out["the cpu preset"] = _dose(kept, of(rows, "tiny", "low"))
    for recipe in RECIPES:
        kept = [(archive, archive.rows) for archive in archives(f"dials-{recipe}", folder)]
        if kept:
            out[f"recipe {recipe}"] = _dose(kept, of(rows, recipe, "low"))
    return out


def _dose(kept: Sequence[tuple[Archive, Sequence[Mapping]]], low: Sequence[Mapping]) -> dict:
    """Pool archives. Machines whose arithmetic agrees repeat a run to the step: it counts once."""
    rows: dict[object, Mapping] = {}
    for _, found in kept:
        for row in found:
            rows.setdefault((row["arm"], row["seed"], row["kind"], row["steps"]), row)
    whole = [row for row in rows.values() if row["arm"][-1] == str(BF16_BITS)]
    measured = {row["run"]: row | {"arm": f"low{BF16_BITS}"} for row in (*low, *whole)}
    told = [archive.provenance for archive, _ in kept]
    return {
        "points": [p for p in dial_points(rows.values()) if p["bits"] < BF16_BITS],
        "measured": dial_points(measured.values()),
        "source": _pooled(told, rows.values()),
    }


def _pooled(told: Sequence[Mapping], rows: Iterable[Mapping]) -> dict:
    """One provenance of several: all machines and dates, the newest code."""
    newest = max(told, key=lambda source: source["date"])
    return newest | {
        "machine": ", ".join(dict.fromkeys(source["machine"] for source in told)),
        "date": ", ".join(sorted({source["date"] for source in told})),
        "seeds": sorted({row["seed"] for row in rows}),
        "code": ", ".join(dict.fromkeys(source["code"] for source in told)),
    }


def fits(points: Sequence[Mapping]) -> dict[str, Fit | None]:
    """Dial -> its fitted line, None where the runs do not fix one."""
    dials = dict.fromkeys(p["arm"] for p in points)
    return {d: fit([p for p in points if p["arm"] == d], at=BF16_BITS) for d in dials}


@styled
def dose_figure(points: Sequence[Mapping], measured: Sequence[Mapping]) -> Figure:
    """Time to failure against bits, the fitted lines drawn on to 7 bits, and bf16 as measured."""
    figure = dose_response(points)
    axis = figure.axes[0]
    for place, found in enumerate(fits(points).values()):
        if found is None:
            continue
        bits = np.linspace(min(p["bits"] for p in points), BF16_BITS, 50)
        line = [2.0 ** found.log2_steps(b) for b in bits]
        colour = PALETTE[place % len(PALETTE)]
        axis.plot(bits, line, color=colour, linestyle=DASHES[3], linewidth=1)
        low, high = found.predicted_interval
        top = found.predicted + 12 if high is None else min(high, found.predicted + 12)
        at = BF16_BITS + 0.12 * (place - 0.5)
        axis.plot([at, at], [2.0**low, 2.0**top], "-", color=colour, linewidth=2)
    for point in measured:
        marker = "*" if point["failed"] else "^"
        axis.plot(BF16_BITS, point["step"], marker, color=INK, markersize=9)
    axis.set_xticks(sorted({p["bits"] for p in points} | {BF16_BITS}))
    return figure


def dose_captioned(name: str, told: Mapping) -> Captioned:
    figure = dose_figure(told["points"], told["measured"])
    words = (
        f"Steps to failure in {name}. Thin lines: fits, drawn on to 7 bits; bars there: 95 % "
        "intervals of the line. Stars: bf16 as measured (triangles: had not failed by then)."
    )
    alt = f"Steps to failure on a log scale against fraction bits. {_fit_words(told)}"
    return caption(figure, words, archived(told["source"]), alt=alt)


def _fit_words(told: Mapping) -> str:
    parts = []
    for dial, found in fits(told["points"]).items():
        slope = "no line can be fitted" if found is None else f"{found.slope:.2f} log2 steps a bit"
        parts.append(f"{dial}: {slope}")
    return "; ".join(parts) + "."


def dose_table(sets: Mapping[str, Mapping]) -> Markdown:
    """The fits: slope, what they predict for 7 bits, and what bf16 did."""
    if not sets:
        return Markdown("*No dial was archived.*")
    lines = []
    for name, told in sets.items():
        for dial, found in fits(told["points"]).items():
            mine = [p for p in told["points"] if p["arm"] == dial]
            failed = sum(p["failed"] for p in mine)
            lines.append([name, dial, f"{failed} of {len(mine)}", *_fit_cells(found)])
            lines[-1].append(_measured_words(told["measured"]))
    header = ["where", "dial", "failed", "log2 steps per bit", "noise", "predicted for 7 bits"]
    return markdown_table([*header, "bf16 itself"], lines)


def _fit_cells(found: Fit | None) -> list[str]:
    if found is None:
        return ["too few failures for a line", "", ""]
    low, high = found.slope_interval
    slope = f"{found.slope:.2f} ({low:.2f} to {'open' if high is None else f'{high:.2f}'})"
    low, high = found.predicted_interval
    ends = f"{_steps(low)} to {'open' if high is None else _steps(high)}"
    return [slope, f"{found.noise:.2f}", f"{_steps(found.predicted)} steps ({ends})"]


def _steps(log2_steps: float) -> str:
    """A number of steps with two significant digits, words beyond a thousand million."""
    if log2_steps > math.log2(1e9):
        return f"10^{log2_steps * math.log10(2):.0f}"
    value = 2.0**log2_steps
    digits = max(0, math.floor(math.log10(max(value, 1))) - 1)
    return f"{round(value, -digits):,.0f}"


def _measured_words(measured: Sequence[Mapping]) -> str:
    if not measured:
        return "not run"
    failed = sorted(p["step"] for p in measured if p["failed"])
    alive = [p["step"] for p in measured if not p["failed"]]
    parts = [f"{len(failed)} failed at {span(failed)}"] if failed else []
    parts += [f"{len(alive)} had not by {max(alive):,}"] if alive else []
    return "; ".join(parts)


def dose_words(sets: Mapping[str, Mapping]) -> Markdown:
    """Whether each dial foretold bf16, one sentence a fit."""
    told = []
    for name, group in sets.items():
        for dial, found in fits(group["points"]).items():
            if found is not None:
                told.append(f"- {name}, {dial}: {_foretold(found, group['measured'])}")
    return Markdown("\n".join(told) or "*No line could be fitted.*")


def _foretold(found: Fit, measured: Sequence[Mapping]) -> str:
    low, high = found.slope_interval
    doubling = low <= 1.0 and (high is None or high >= 1.0)
    words = "a doubling with each bit is " + ("among" if doubling else "outside") + " the interval"
    low, high = found.predicted_interval
    failed = [math.log2(p["step"]) for p in measured if p["failed"]]
    if not failed:
        alive = max((p["step"] for p in measured), default=0)
        seen = f"not failed within {alive:,} steps" if alive else "not been run"
        if high is not None and alive > 2.0**high:
            return (
                f"{words}; bf16 has {seen}, longer than the predicted {_steps(low)} to "
                f"{_steps(high)}: the line does not hold up to 7 bits."
            )
        return f"{words}; bf16 has {seen}, so the prediction for 7 bits stands untested."
    middle = float(np.median(failed))
    inside = low <= middle and (high is None or middle <= high)
    return (
        f"{words}; bf16 failed at {_steps(middle)} steps (median of {len(failed)}), "
        f"{'within' if inside else 'outside'} the predicted interval."
    )
