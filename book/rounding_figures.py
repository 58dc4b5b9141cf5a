"""Figures of chapter 4: bias laws against simulation, what is left in O, and the rounding trace.

Each function returns a Matplotlib figure for `book.captions.caption`. Lines are laws, computed;
marks are simulations with bars of two standard errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kernels.forensics import RoundingTrace, bias_law, simulate_bias
from kernels.formats import FORMATS

from .captions import DASHES, INK, PALETTE, styled, subplots
from .head_statistics import Moment

MARKERS = "osD^vP"
ULP_LABEL = "signed error (ulp)"


def _compare(ax, case: Callable, dense, points, label: str, place: int, draws: int, seed: int):
    """Law as a line, simulation as marks; case(x) gives the arguments of both."""
    colour = PALETTE[place]
    law = [bias_law(**case(x)).expected_ulp for x in dense]
    ax.plot(dense, law, color=colour, linestyle=DASHES[place])
    found = [simulate_bias(**case(x), draws=draws, seed=seed) for x in points]
    means, bars = [f.mean for f in found], [2 * f.stderr for f in found]
    style = dict(fmt=MARKERS[place], ms=4.5, color=colour, capsize=2, linestyle="none")
    ax.errorbar(points, means, yerr=bars, label=label, **style)


def _finish(ax, title: str, xlabel: str, ylabel: str = ULP_LABEL) -> None:
    ax.axhline(0, color=INK, linewidth=0.8, zorder=1)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.legend()


@styled
def tail_laws(tied: Sequence[int] = (1, 2, 3, 4, 8), *, draws: int, seed: int) -> Figure:
    """Signed error against the size of the tail: one dominant key, and several tied maxima."""
    figure, ax = subplots(height=3.4)
    dense = [i / 200 for i in range(1, 300)]
    points = [0.02, 0.2, 0.4, 0.6, 0.8, 0.98, 1.2, 1.4]
    for place, n in enumerate(tied):
        label = "1 key with P̄ = 1 (absorption)" if n == 1 else f"{n} keys with P̄ = 1"
        _compare(
            ax, lambda t, n=n: {"tied": n, "tail": t}, dense, points, label, place, draws, seed
        )
    _finish(ax, "A small tail decides every tie, and is lost itself", "tail (ulp of the values)")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    ax.get_legend().remove()
    return figure


@styled
def law_panels(*, tail: float, draws: int, seed: int) -> Figure:
    """Signed error against ties, signs of V, rounding mode, format and both precision dials."""
    figure, axes = subplots(3, 2, height=2.6)
    axes = axes.ravel()
    counts, bits = [1, 2, 3, 4, 6, 8, 12, 16], [1, 2, 3, 4, 5, 6, 7]

    def panel(ax, cases: Mapping[str, Callable], dense, points, title, xlabel):
        for place, (label, case) in enumerate(cases.items()):
            _compare(ax, case, dense, points, label, place, draws, seed)
        _finish(ax, title, xlabel)

    tails = {f"tail {t} ulp": lambda n, t=t: {"tied": n, "tail": t} for t in (tail, 0.25, 0.75)}
    panel(axes[0], tails, counts, counts, "Tied maxima", "keys with P̄ = 1")
    signs = {
        f"{n} key{'s' * (n > 1)}": lambda s, n=n: {"tied": n, "tail": tail, "same_sign": s}
        for n in (1, 2, 4)
    }
    shares = [i / 20 for i in range(10, 21)]
    panel(axes[1], signs, shares, shares[::2], "Signs of V", "share of V with the tail's sign")
    modes = {
        mode.replace("_", " "): lambda n, m=mode: {"tied": n, "tail": tail, "mode": m}
        for mode in ("nearest_even", "nearest_away", "stochastic", "toward_zero")
    }
    panel(axes[2], modes, counts[:6], counts[:6], "Rounding mode", "keys with P̄ = 1")
    axes[2].legend(loc="center right", bbox_to_anchor=(1, 0.42))
    dials = {
        "matched: V on O's grid": lambda b: {"tied": 2, "tail": tail, "fmt": f"bf16.{b}"},
        "output: V in fp32": lambda b: {
            "tied": 2,
            "tail": tail * 2 ** (14 - b),
            "fmt": f"bf16.{b}",
            "value_format": "fp32.14",
        },
    }
    panel(axes[3], dials, bits, bits, "The two precision dials", "fraction bits of the result")
    formats = {
        f: lambda t, f=f: {"tied": 2, "tail": t, "fmt": f}
        for f in ("bf16", "fp16", "e4m3", "e5m2")
    }
    dense, points = [i / 50 for i in range(1, 50)], [0.02, 0.25, 0.5, 0.75, 0.98]
    panel(axes[4], formats, dense, points, "Format, in ulps", "tail (ulp of the values)")
    _relative_panel(axes[5], tail)
    return figure


def _relative_panel(ax, tail: float) -> None:
    """The same error in proportion to the result: what changes from format to format."""
    names = ["e5m2", "e4m3", "bf16", "fp16"]
    for place, mode in enumerate(("nearest_even", "toward_zero")):
        laws = [bias_law(2, tail, fmt=n, mode=mode) for n in names]
        # values average 1.5, the sum of two 3
        size = [
            abs(w.expected_value_ulp) * 2.0 ** -FORMATS[n].fraction_bits / 3
            for n, w in zip(names, laws)
        ]
        style = {"color": PALETTE[place], "linestyle": DASHES[place], "marker": MARKERS[place]}
        ax.plot(names, size, label=mode.replace("_", " "), **style)
    ax.set_yscale("log")
    ax.set(title="Format, relative", xlabel="format", ylabel="|signed error| / |result|")
    ax.legend()


@styled
def left_in_output(found: Mapping[str, Mapping[float, object]], law: Mapping[float, float]):
    """Bias (upper) and common share (lower) of the error of O against the largest tail weight.

    found: site label -> largest weight -> `chapter4.StoredError`. law: weight -> predicted bias.
    """
    figure, (top, bottom) = subplots(2, 1, height=2.5, sharex=True)
    for place, (label, series) in enumerate(found.items()):
        weights = list(series)
        means = [e.bias.mean for e in series.values()]
        bars = [2 * e.bias.stderr for e in series.values()]
        style = {"color": PALETTE[place], "linestyle": DASHES[place], "marker": MARKERS[place]}
        top.errorbar(weights, means, yerr=bars, label=label, capsize=2, ms=4.5, **style)
        bottom.plot(weights, [e.shared for e in series.values()], ms=4.5, **style)
    top.plot(*zip(*law.items()), color=INK, linewidth=0.9, label="law, Ō alone")
    top.set_xscale("log")
    _finish(top, "Bias of the stored O", "")
    bottom.set(
        title="How much of the error is the same in every row of a head",
        xlabel="largest weight of the third key",
        ylabel="share of the square",
    )
    return figure


# -- captured heads -------------------------------------------------------------------------------

READINGS = {"prefix_round_once": "rounded once at the end", "running": "rounded each time"}


@styled
def trace_figure(trace: RoundingTrace, title: str, *, around: int = 5) -> Figure:
    """The paper's Fig. 6 for one row and feature: weights and values, cumulative error, a zoom."""
    figure, (values, error, zoom) = subplots(3, 1, height=2.3)
    keys = range(len(trace))
    ones = trace.ones.nonzero().flatten().tolist()
    values.plot(keys, trace.v, ".", color=PALETTE[1], label="V")
    values.axhline(0, color=INK, linewidth=0.6)
    values.set(title=title, xlabel="key", ylabel="V")
    weights = values.twinx()
    weights.vlines(keys, 0, trace.p, color=PALETTE[0], linewidth=1.6)
    weights.plot([], [], "-", color=PALETTE[0], label="P̄")
    weights.set(ylim=(0, 1.08), ylabel="P̄")
    weights.grid(False)
    handles = values.get_legend_handles_labels()[0] + weights.get_legend_handles_labels()[0]
    values.legend(handles, ["V", "P̄"], loc="upper left")
    for place, (reading, label) in enumerate(READINGS.items()):
        style = {"color": PALETTE[place], "linestyle": DASHES[place], "label": label}
        error.step(keys, trace.error[reading], where="post", **style)
    for key in ones:
        error.axvline(key, color=INK, linewidth=0.8, linestyle=":")
    error.axhline(0, color=INK, linewidth=0.6)
    error.set(xlabel="key", ylabel="stored - exact")
    error.set_title("Cumulative error of Ō (dotted: keys with P̄ = 1)")
    error.legend(loc="best")
    _zoom(zoom, trace, around)
    return figure


def _zoom(ax, trace: RoundingTrace, around: int) -> None:
    """Exact and stored sums near the largest jump of the kernel's reading."""
    centre = trace.largest(1)[0]
    first, last = max(centre - around, 0), min(centre + around + 1, len(trace))
    keys = range(first, last)
    ax.plot(keys, trace.exact[first:last], "o-", ms=4, color=INK, label="exact sum")
    for place, (reading, label) in enumerate(READINGS.items()):
        style = {"color": PALETTE[place], "linestyle": DASHES[place], "marker": MARKERS[place]}
        ax.plot(keys, trace.after[reading][first:last], ms=5, label=label, **style)
    ax.set(xlabel="key", ylabel="Ō so far", title=f"Around the largest jump, key {centre}")
    ax.legend(loc="best")


@styled
def moments_figure(series: Mapping[str, Sequence[Moment]]) -> Figure:
    """Ties, absorption, ones, signs of V and the bias of delta's error over training steps."""
    figure, axes = subplots(3, 2, height=2.2, sharex=True)
    axes = axes.ravel()
    for place, (label, moments) in enumerate(series.items()):
        steps = [m.step for m in moments]
        style = {"color": PALETTE[place], "linestyle": DASHES[place], "label": label}
        axes[0].plot(steps, [m.spectral_norm for m in moments], **style)
        axes[1].plot(steps, [m.tied for m in moments], **style)
        axes[2].plot(steps, [m.absorbing for m in moments], **style)
        axes[3].plot(steps, [m.ones for m in moments], **style)
        means, bars = [m.bias.mean for m in moments], [2 * m.bias.stderr for m in moments]
        error_style = style | {"marker": MARKERS[place], "ms": 3, "linewidth": 0.8}
        axes[5].errorbar(steps, means, yerr=bars, capsize=1.5, elinewidth=0.8, **error_style)
    signs = [m.signs for m in moments]
    axes[4].fill_between(
        steps,
        [float(s.min()) for s in signs],
        [float(s.max()) for s in signs],
        color=PALETTE[5],
        alpha=0.25,
        linewidth=0,
        label="least to most",
    )
    axes[4].plot(steps, [float(s.median()) for s in signs], color=PALETTE[5], label="median")
    axes[4].axhline(0.5, color=INK, linewidth=0.6)
    axes[4].legend()
    titles = {
        "Spectral norm of W_Q": "norm",
        "Tied rows": "share of rows",
        "Absorbing rows": "share of rows",
        "Entries with P̄ = 1": "per row",
        "Positive V, by feature": "share of keys",
        "Mean error of δ": "in units of its rms",
    }
    for ax, (title, label) in zip(axes, titles.items()):
        ax.set(title=title, ylabel=label)
    axes[0].set_yscale("log")
    axes[4].set(xlabel="step", ylim=(0, 1))
    axes[5].axhline(0, color=INK, linewidth=0.6)
    axes[5].set_xlabel("step")
    figure.legend(*axes[5].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


@styled
def error_histogram(errors: Mapping[str, Tensor]) -> Figure:
    """Distribution of delta's error in units of its rms, and its two tails folded together."""
    figure, (whole, folded) = subplots(1, 2, height=2.6)
    edges = torch.linspace(-4, 4, 81, dtype=torch.float64)
    centres = (edges[1:] + edges[:-1]) / 2
    for place, (label, error) in enumerate(errors.items()):
        density = torch.histogram(error, edges, density=True).hist
        style = {"color": PALETTE[place], "linestyle": DASHES[place], "label": label}
        whole.step(centres, density, where="mid", **style)
        sizes = torch.linspace(0, 3, 31, dtype=torch.float64)
        excess = [float((error > s).double().mean() - (error < -s).double().mean()) for s in sizes]
        folded.plot(sizes, excess, **style)
    whole.set(xlabel="error of δ / rms", ylabel="density", title="Distribution over rows")
    whole.set_yscale("log")
    folded.axhline(0, color=INK, linewidth=0.6)
    folded.set(
        xlabel="size s, in rms", ylabel="share above s, less below -s", title="Excess of one sign"
    )
    figure.legend(*whole.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure
