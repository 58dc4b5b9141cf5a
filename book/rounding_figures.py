"""Figures of chapter 4: bias laws against simulation, what is left in O, and the rounding trace.

Each function returns a Matplotlib figure for `book.captions.caption`. Lines are laws, computed;
marks are simulations with bars of two standard errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from kernels.forensics import bias_law, simulate_bias
from kernels.formats import FORMATS

from .captions import DASHES, INK, PALETTE, styled, subplots

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
