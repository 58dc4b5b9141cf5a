"""Plots of runs: aligned panels, outcome matrix, heads over time, time to failure, intervals.

They take runs, or plain metrics as `gpt2.runs.Run.metrics()` gives them, and outcomes as
`gpt2.outcomes` decides them; nothing here decides an outcome. Each returns a matplotlib figure, to
be shown with `caption`. Style and captions are those of `book.captions`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from gpt2.outcomes import series, smooth, worst_head

from .captions import DASHES, INK, PALETTE, archived, caption, live, styled, subplots

__all__ = [
    "archived",
    "caption",
    "curve",
    "dose_response",
    "head_heatmap",
    "intervals",
    "live",
    "outcome_matrix",
    "panels",
    "styled",
    "subplots",
]

# A legend of two columns: characters of a line, and inches that each line beyond three adds.
LEGEND_COLUMN, LEGEND_LINE = 30, 0.19

# Label of each metric that the trainer and its probes write, and whether its axis is logarithmic.
METRICS = {
    "train_loss": ("training loss, smoothed (nats)", False),
    "smoothed_train_loss": ("training loss, smoothed (nats)", False),
    "held_out_loss": ("held-out loss (nats)", False),
    "grad_norm": ("gradient norm", True),
    "spectral_norm_q": ("spectral norm of W_Q", True),
    "spectral_norm_k": ("spectral norm of W_K", True),
    "tie_rate": ("rows with a tied maximum", False),
    "max_logit": ("largest score", True),
    "attention_entropy": ("attention entropy (nats)", False),
    "tokens_per_s": ("tokens per second", False),
}

KIND_COLOURS = {
    "diverged": "#e8a27c",
    "nonfinite": "#d3a3bd",
    "onset": "#f2dca0",
    "healthy": "#a5cfe6",
    "stable": "#e2e2e2",
}


def metrics_of(run) -> Mapping:
    """Metrics of a run, or the mapping itself."""
    return run if isinstance(run, Mapping) else run.metrics()


def curve(run, name: str, head: tuple[int, int] | None = None):
    """Steps and values [n] of a metric: of one (layer, head), or of the worst head each time.

    The training loss is smoothed as the divergence rule smooths it.
    """
    steps, values = series(metrics_of(run), name)
    if name == "train_loss":
        values = smooth(steps, values)
    if values.ndim == 3:
        values = worst_head(values)[0] if head is None else values[:, head[0], head[1]]
    return steps, values


def thinned(steps: np.ndarray, values: np.ndarray, points: int = 600):
    """At most about `points` points that keep every peak: minimum and maximum of each stretch."""
    if len(steps) <= points:
        return steps, values
    keep = []
    for part in np.array_split(np.arange(len(steps)), points // 2):
        finite = np.where(np.isfinite(values[part]), values[part], 0.0)
        keep += sorted({part[finite.argmin()], part[finite.argmax()]})
    return steps[keep], values[keep]


@styled
def panels(
    runs: Mapping[str, object],
    metrics: Sequence[str] = ("train_loss", "spectral_norm_q", "tie_rate"),
    *,
    outcomes: Mapping[str, object] | None = None,
    head: tuple[int, int] | None = None,
    labels: Mapping[str, str] | None = None,
    height: float = 1.9,
    limits: Mapping[str, tuple[float, float]] | None = None,
    order: Sequence[str] | None = None,
) -> Figure:
    """One panel per metric over a shared step axis; one colour and dash per run.

    runs: name -> Run or metrics. outcomes: name -> gpt2.outcomes.Outcome; its onset is marked by a
    dotted line and a triangle, its divergence (or first nonfinite loss) by a line and a cross, by
    the declared rules. head: (layer, head), else the worst head of each step. limits: name of a
    metric -> its y range. order: all names that share colours with this figure, so that a run
    keeps its colour where others are left out.
    """
    places = {run: i for i, run in enumerate(order or runs)}
    figure, axes = subplots(len(metrics), 1, height=height, sharex=True, squeeze=False)
    axes = axes[:, 0]
    for axis, name in zip(axes, metrics):
        label, logarithmic = METRICS.get(name, (name.replace("_", " "), False))
        for run, data in runs.items():
            steps, values = thinned(*curve(data, name, head))
            rounds, place = divmod(places[run], len(PALETTE))
            dash = DASHES[(place + rounds) % len(DASHES)]  # a colour comes again, the pair not
            colour = PALETTE[place]
            axis.plot(steps, values, color=colour, linestyle=dash, label=run)
        axis.set_title((labels or {}).get(name, label))
        if logarithmic:
            _log_axis(axis)
        if limits and name in limits:
            axis.set_ylim(*limits[name])
        axis.margins(x=0.02)
    for run in runs:
        if outcomes and run in outcomes:
            _mark(axes, outcomes[run], PALETTE[places[run] % len(PALETTE)])
    axes[-1].set_xlabel("step")
    handles, names = axes[0].get_legend_handles_labels()
    names = [textwrap.fill(name, LEGEND_COLUMN) for name in names]
    lines = sum(1 + name.count("\n") for name in names) / 2
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(0.0, lines - 3))
    figure.legend(handles, names, loc="outside upper left", ncols=2)
    return figure


def _log_axis(axis) -> None:
    """Logarithmic y, ticks at 1, 2 and 5 of each decade; linear for less than a factor of 4.

    Over more than two decades, at powers of ten alone.
    """
    drawn = np.concatenate([line.get_ydata() for line in axis.lines])
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)]
    if not len(drawn) or drawn.max() < 4 * drawn.min():
        return
    axis.set_yscale("log")
    subs = (1,) if drawn.max() > 100 * drawn.min() else (1, 2, 5)
    axis.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axis.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())


def _mark(axes, outcome, colour: str) -> None:
    for step, marker, dash in (
        (outcome.onset_step, "v", ":"),
        (outcome.failed_step, "x", "-"),
    ):
        if step is not None:
            for axis in axes:
                axis.axvline(step, color=colour, linestyle=dash, linewidth=1, zorder=1)
            where = axes[0].get_xaxis_transform()
            axes[0].plot(
                [step], [1.0], marker, color=colour, transform=where, clip_on=False, markersize=7
            )


@styled
def outcome_matrix(
    cells: Mapping[tuple[str, str], object], *, row_label: str = "", column_label: str = ""
) -> Figure:
    """Arms against settings: what happened, in words and colour. cells[row, column] = Outcome.

    A missing cell says "not run". Rows and columns come in order of first appearance.
    """
    rows = list(dict.fromkeys(r for r, _ in cells))
    columns = list(dict.fromkeys(c for _, c in cells))
    figure, axis = subplots(height=0.75 + 0.55 * len(rows))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            outcome = cells.get((row, column))
            colour = KIND_COLOURS[outcome.kind] if outcome else "none"
            hatch = "///" if outcome and outcome.failed else None
            box = mpl.patches.Rectangle(
                (j, i), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.7, hatch=hatch
            )
            box.set_hatch_linewidth(0.25)
            axis.add_patch(box)
            text = axis.text(j + 0.5, i + 0.5, _words(outcome), ha="center", va="center")
            text.set_fontsize(9)
    axis.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axis.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axis.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.set(xlabel=column_label, ylabel=row_label)
    return figure


def _words(outcome) -> str:
    if outcome is None:
        return "not run"
    step = outcome.failed_step or outcome.onset_step
    if step is None:
        return f"{outcome.kind}\nto {outcome.last_step:,}"
    return f"{outcome.kind}\nat {step:,}"


@styled
def head_heatmap(run, name: str, *, title: str | None = None, logarithmic: bool | None = None):
    """Every head (layer and head counted from 0) against steps, coloured by a metric."""
    steps, values = series(metrics_of(run), name)
    if values.ndim != 3:
        raise ValueError(f"{name!r} is not a per-head metric of this run")
    label, by_default = METRICS.get(name, (name.replace("_", " "), False))
    _, layers, heads = values.shape
    flat = values.reshape(len(steps), -1).T
    figure, axis = subplots(height=1.2 + 0.24 * layers * heads)
    positive = flat[np.isfinite(flat) & (flat > 0)]
    use_log = (by_default if logarithmic is None else logarithmic) and len(positive)
    norm = mpl.colors.LogNorm(positive.min(), positive.max()) if use_log else None
    drawn = axis.pcolormesh(
        _edges(steps), np.arange(len(flat) + 1), flat, cmap="cividis_r", norm=norm, rasterized=True
    )
    names = [f"L{i} H{j}" for i in range(layers) for j in range(heads)]
    axis.set_yticks(np.arange(len(names)) + 0.5, names)
    for boundary in range(heads, layers * heads, heads):
        axis.axhline(boundary, color="#ffffff", linewidth=1.5)
    axis.set(xlabel="step", title=title or label)
    axis.invert_yaxis()
    axis.grid(False)
    ticks = mpl.ticker.LogLocator(subs=(1, 2, 5)) if use_log else None
    plain = mpl.ticker.FuncFormatter(lambda v, _: f"{v:g}")
    bar = figure.colorbar(drawn, ax=axis, label=label, ticks=ticks, format=plain)
    bar.ax.minorticks_off()
    return figure


def _edges(steps: np.ndarray) -> np.ndarray:
    """Cell boundaries half-way between the probed steps, [n + 1]."""
    steps = np.asarray(steps, dtype=float)
    if len(steps) < 2:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[steps[0]], middle, [steps[-1]]])


@styled
def dose_response(
    points: Sequence[Mapping], *, dose: str = "bits", dose_label: str = "fraction bits"
) -> Figure:
    """Time to failure against a dial, log scale, one series per `arm`.

    points: mappings with the dose, "arm", "step" and "failed". A filled mark is a failure at that
    step; an open triangle is a run that had not failed by then (its true time is later). The line
    joins geometric means of settings at which every run failed.
    """
    figure, axis = subplots(height=3.2)
    arms = list(dict.fromkeys(p["arm"] for p in points))
    for place, arm in enumerate(arms):
        colour, marker = PALETTE[place % len(PALETTE)], "osDPX*"[place % 6]
        mine = [p for p in points if p["arm"] == arm]
        shift = (place - (len(arms) - 1) / 2) * 0.12
        for failed, style in ((True, {}), (False, {"markerfacecolor": "none"})):
            chosen = [p for p in mine if bool(p["failed"]) is failed]
            x, y = [p[dose] + shift for p in chosen], [p["step"] for p in chosen]
            axis.plot(x, y, marker if failed else "^", color=colour, linestyle="none", **style)
        x, y = _failed_means(mine, dose)
        label = f"{arm} (open: not failed by then)" if not all(p["failed"] for p in mine) else arm
        axis.plot(x + shift, y, color=colour, linestyle=DASHES[place % 6], label=label)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axis.set_xticks(sorted({p[dose] for p in points}))
    axis.set(xlabel=dose_label, ylabel="step of failure", title="Time to failure")
    figure.legend(loc="outside upper left", ncols=1)
    return figure


def _failed_means(points: Sequence[Mapping], dose: str) -> tuple[np.ndarray, np.ndarray]:
    doses = sorted({p[dose] for p in points})
    steps = {d: [p for p in points if p[dose] == d] for d in doses}
    whole = [d for d in doses if all(p["failed"] for p in steps[d])]
    means = [np.exp(np.mean(np.log([p["step"] for p in steps[d]]))) for d in whole]
    return np.array(whole, dtype=float), np.array(means)


@styled
def intervals(
    rows: Mapping[str, tuple[float, float]], *, label: str, errors: float = 2.0, title: str = ""
) -> Figure:
    """Signed estimates with error bars around zero: name -> (mean, standard error).

    The bar spans `errors` standard errors to each side; say so in the caption.
    """
    figure, axis = subplots(height=0.9 + 0.34 * len(rows))
    for place, (mean, error) in enumerate(rows.values()):
        axis.errorbar(mean, place, xerr=errors * error, fmt="o", color=PALETTE[1], capsize=4)
    axis.axvline(0.0, color=INK, linewidth=1)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set(xlabel=label, title=title, ylim=(len(rows) - 0.5, -0.5))
    return figure
