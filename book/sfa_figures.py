"""Figures of chapter 5: weights and scales of crafted rows, parts of delta's error, fates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kernels.formats import FloatFormat, parse_format

from .captions import DASHES, INK, PALETTE, styled, subplots
from .records import failed_step
from .sfa_heads import PARTS, DeltaPart
from .sfa_rows import CARRIER_UNDERFLOW, largest_weight, scale_by_maximum

MARKS = {"diverged": "x", "nonfinite": "s", "onset": "v", "healthy": ">", "stable": ">"}


@styled
def weights_figure(policies: Mapping[str, str], fmt: FloatFormat | str) -> Figure:
    """Left: 1 - P_bar of two tied maxima at small row maxima; right: P_bar at large ones.

    Shaded: rounds to 1, or to 0, in this format.
    """
    fmt = parse_format(fmt)
    figure, (left, right) = subplots(1, 2, height=3.4)
    small, large = np.logspace(-5, 0, 120), np.linspace(0.5, 100, 400)
    for place, (label, text) in enumerate(policies.items()):
        how = dict(color=PALETTE[place % 6], linestyle=DASHES[place % 6])
        left.plot(small, 1 - largest_weight(small, text).numpy(), label=label, **how)
        weight = np.maximum(largest_weight(large, text).numpy(), 1e-45)
        right.plot(large, weight, **how)
    shade = dict(color=INK, alpha=0.12, linewidth=0)
    left.axhspan(1e-6, 2.0 ** -(fmt.fraction_bits + 2), **shade)
    right.axhspan(1e-45, fmt.min_subnormal / 2, **shade)
    left.set(xscale="log", yscale="log", ylim=(1e-6, 2), title="1 - P̄, small maxima")
    right.set(yscale="log", ylim=(1e-42, 30), title="P̄, large maxima")
    for axis in (left, right):
        axis.set_xlabel("row maximum")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure


@styled
def scale_figure(policies: Mapping[str, str], formats: Sequence[str]) -> Figure:
    """Change of O that rounding P_bar makes in a tied row, per cent, against its maximum."""
    maxima = np.linspace(0.1, 8, 1500)
    figure, axes = subplots(len(formats), 1, height=1.9, sharex=True, squeeze=False)
    for axis, fmt in zip(axes[:, 0], formats):
        for place, (label, text) in enumerate(policies.items()):
            scale = 100 * scale_by_maximum(maxima, text, fmt).numpy()
            how = dict(color=PALETTE[place % 6], linestyle="none", marker="o^s"[place % 3])
            axis.plot(maxima, scale, label=label, markersize=1.6, rasterized=True, **how)
        axis.set(title=f"P̄ in {fmt}", ylabel="change of O (%)")
    axes[-1, 0].set(xlabel="row maximum")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper left", ncols=3, markerscale=4)
    return figure


@styled
def parts_figure(parts: Mapping[str, Mapping[str, DeltaPart]]) -> Figure:
    """Rms of each part of delta's error, policy by policy, in units of plain softmax's whole."""
    figure, axis = subplots(height=0.8 + 0.62 * len(parts))
    width = 0.8 / len(PARTS)
    for place, name in enumerate(PARTS):
        sizes = [p[name].size for p in parts.values()]
        sizes = [x if np.isfinite(x) else 0.0 for x in sizes]
        at = np.arange(len(parts)) + (place - (len(PARTS) - 1) / 2) * width
        hatch = ("", "///", "...", "xx")[place]
        axis.barh(at, sizes, width, label=name, color=PALETTE[place], hatch=hatch, alpha=0.85)
    for line, found in enumerate(parts.values()):
        if not np.isfinite(found["all"].size):
            axis.text(0.02, line, "not finite", va="center")
    axis.set_yticks(range(len(parts)), list(parts))
    axis.set(xlabel="rms of the error of δ (plain softmax, all = 1)")
    axis.invert_yaxis()
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return figure


@styled
def fates_figure(rows: Sequence[Mapping], steps: int | None = None) -> Figure:
    """One line per arm, one mark per seed: the step at which the run ended, and how.

    steps: the axis' right end, the same for several figures.
    """
    labels = list(dict.fromkeys(row["label"] for row in rows))
    figure, axis = subplots(height=1.0 + 0.27 * len(labels))
    shown = set()
    for row in rows:
        kind = row["kind"] if row["kind"] in ("diverged", "nonfinite") else "no failure"
        step = _end(row)
        same = [r for r in rows if r["label"] == row["label"]]
        y = labels.index(row["label"]) + 0.12 * (same.index(row) - (len(same) - 1) / 2)
        colour = PALETTE[("diverged", "nonfinite", "no failure").index(kind)]
        fill = "none" if kind == "no failure" else colour
        axis.plot(
            [step], [y], MARKS[row["kind"]], color=colour, markerfacecolor=fill, markersize=6,
            linestyle="none", label=None if kind in shown else kind,
        )  # fmt: skip
        shown.add(kind)
    axis.set_yticks(range(len(labels)), labels)
    axis.set(xlabel="step at which the run ended", ylim=(len(labels) - 0.5, -0.5), xscale="log")
    axis.set_xlim(15, 1.3 * (steps or max(row["steps"] for row in rows)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axis.xaxis.set_minor_formatter(FuncFormatter(lambda v, _: ""))
    figure.legend(loc="outside upper left", ncols=3)
    return figure


@styled
def map_figure(
    series: Mapping[str, Sequence[tuple[float, Mapping]]],
    plain: Sequence[Mapping],
    *,
    label: str,
    logarithmic: bool = False,
) -> Figure:
    """Where runs ended against one parameter of SFA: a mark per run, its shape the way it ended.

    series: variant -> (value of the parameter, record). plain: records of plain softmax, whose
    ends are dotted lines. Runs that did not fail are open triangles at their last step.
    """
    figure, axis = subplots(height=3.4)
    for place, (name, points) in enumerate(series.items()):
        colour = PALETTE[place % len(PALETTE)]
        ends = sorted((x, _end(row)) for x, row in points)
        values = sorted({x for x, _ in ends})
        means = [np.exp(np.mean([np.log(y) for x, y in ends if x == v])) for v in values]
        axis.plot(
            values, means, color=colour, linestyle=DASHES[place % 6], linewidth=1, label=name
        )
        for x, row in points:
            fill = colour if row["kind"] in ("diverged", "nonfinite") else "none"
            how = dict(color=colour, markerfacecolor=fill, markersize=7, linestyle="none")
            axis.plot([x], [_end(row)], MARKS[row["kind"]], **how)
    for row in plain:
        axis.axhline(_end(row), color=INK, linewidth=0.8, linestyle=":")
    values = sorted({x for points in series.values() for x, _ in points})
    if logarithmic:
        axis.set_xscale("log")
    axis.set_xticks(values, [f"{v:g}" for v in values], rotation=60 if len(values) > 6 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel=label, ylabel="step at which the run ended", yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: ""))
    kinds = {"x": "diverged", "s": "nonfinite", ">": "no failure"}
    shown = [
        Line2D([], [], color=INK, marker=m, linestyle="none", label=k) for m, k in kinds.items()
    ]
    shown[-1].set_markerfacecolor("none")
    handles = [*axis.get_legend_handles_labels()[0], *shown]
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _end(row: Mapping) -> int:
    return failed_step(row) or row["steps"]


@styled
def scores_figure(rows: Sequence[Mapping], betas: Mapping[str, float]) -> Figure:
    """Largest score of the worst head over steps, and the bound above which a tied row underflows.

    betas: name of an arm -> its beta; records without scores are left out.
    """
    figure, axis = subplots(height=3.0)
    drawn = [r for r in rows if r["arm"] in betas and "max_logit" in r["curves"]]
    names = list(dict.fromkeys(r["arm"] for r in drawn))
    for row in drawn:
        place = names.index(row["arm"])
        curve = row["curves"]["max_logit"]
        known = row["label"] in [line.get_label() for line in axis.lines]
        how = dict(color=PALETTE[place % 6], linestyle=DASHES[place % 6])
        label = None if known else row["label"]
        axis.plot(curve["step"], [v or np.nan for v in curve["value"]], label=label, **how)
        axis.axhline(CARRIER_UNDERFLOW / (betas[row["arm"]] - 1), color=how["color"], linewidth=1)
        if row["nonfinite_step"] is not None:
            axis.axvline(row["nonfinite_step"], color=how["color"], linewidth=0.8, linestyle=":")
    axis.set(xlabel="step", ylabel="largest score", yscale="log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    figure.legend(loc="outside upper left", ncols=3)
    return figure
