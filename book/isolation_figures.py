"""Figures of chapter 2, drawn from records of `book.evidence`: live runs and archives alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from .captions import DASHES, INK, PALETTE, styled, subplots
from .figures import KIND_COLOURS, METRICS
from .records import FAILED

LABELS = {name: label for name, (label, _) in METRICS.items()} | {
    "first_key_mass": "attention to the first key",
    "delta_error_rms": "rms of the error of delta",
    "direction_cosine": "mean cosine of the terms of dW_Q's error",
    "coherent_gain": "coherent gain of dW_Q's error",
}
LOGARITHMIC = ("spectral_norm_q", "delta_error_rms", "max_logit", "coherent_gain")


def by_arm(rows: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    """Arm name -> its records, in the order of the rows, by seed."""
    out: dict[str, list[Mapping]] = {}
    for row in rows:
        out.setdefault(row["arm"], []).append(row)
    return {name: sorted(mine, key=lambda r: r["seed"]) for name, mine in out.items()}


# -- interventions against outcomes ---------------------------------------------------------------


@styled
def intervention_matrix(rows: Sequence[Mapping]) -> Figure:
    """A line per arm: a cell per seed, then held-out loss, largest norm and most tied rows.

    A failed cell is hatched and holds the step (with a star where the loss became nonfinite); the
    others hold what the rules call them. Held-out
    loss is the mean of the last one of runs that did not fail; norm and ties are the largest seen.
    """
    arms = by_arm(rows)
    seeds = sorted({row["seed"] for row in rows})
    figure, axis = subplots(height=0.7 + 0.29 * len(arms))
    width = 0.75 if len(seeds) > 1 else 1.6
    right = width * len(seeds)
    for i, mine in enumerate(arms.values()):
        for row in mine:
            _cell(axis, seeds.index(row["seed"]) * width, i, width, row)
        for j, text in enumerate(_numbers(mine)):
            where = (right + 0.35 + 0.62 * j, i + 0.5)
            axis.text(*where, text, ha="center", va="center", fontsize=8.5)
    heads = [(width * (i + 0.5), f"seed {s}") for i, s in enumerate(seeds)]
    names = ("loss", "norm", "ties")
    heads += [(right + 0.35 + 0.62 * j, name) for j, name in enumerate(names)]
    axis.set(xlim=(0, right + 1.95), ylim=(len(arms), 0))
    axis.set_xticks([x for x, _ in heads], [t for _, t in heads], fontsize=8.5)
    labels = [_wrapped(mine[0]["label"], 27) for mine in arms.values()]
    axis.set_yticks(np.arange(len(arms)) + 0.5, labels, linespacing=0.95)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    return figure


def _cell(axis, x: float, y: int, width: float, row: Mapping) -> None:
    failed = row["kind"] in FAILED
    box = mpl.patches.Rectangle(
        (x, y + 0.06),
        width - 0.03,
        0.88,
        facecolor=KIND_COLOURS[row["kind"]],
        edgecolor=INK,
        linewidth=0.5,
        hatch="///" if failed else None,
    )
    box.set_hatch_linewidth(0.25)
    axis.add_patch(box)
    words = f"{row['diverged_step'] or row['nonfinite_step']:,}" if failed else row["kind"]
    if row["kind"] == "nonfinite":
        words += "*"
    axis.text(x + width / 2, y + 0.5, words, ha="center", va="center", fontsize=7.5)


def _numbers(mine: Sequence[Mapping]) -> tuple[str, str, str]:
    losses = [r["held_out_loss"] for r in mine if r["kind"] not in FAILED]
    losses = [x for x in losses if x is not None]
    norm = max(r["worst_norm"] or 0.0 for r in mine)
    ties = max(r["worst_tie_rate"] or 0.0 for r in mine)
    return (f"{np.mean(losses):.3f}" if losses else "-", f"{norm:.1f}", f"{ties:.2f}")


@styled
def loss_multiples(rows: Sequence[Mapping], parent: str = "low") -> Figure:
    """Smoothed training loss, one small panel per arm, all on one scale; grey: the failing run.

    Every seed is a line. A cross is a failure by the declared rule, a triangle the fork.
    """
    arms = by_arm(rows)
    grey = arms.pop(parent, [])
    columns = 3
    lines = -(-len(arms) // columns)
    figure, axes = subplots(
        lines, columns, height=1.45, sharex=True, sharey=True, squeeze=False, gridspec_kw={}
    )
    flat = axes.ravel()
    for axis, mine in zip(flat, arms.values()):
        for row in grey:
            axis.plot(*_curve(row, "train_loss"), color="#999999", linestyle="-", linewidth=1)
        for row in mine:
            steps, values = _curve(row, "train_loss")
            failed = row["kind"] in FAILED
            colour = PALETTE[0] if failed else PALETTE[1]
            axis.plot(steps, values, color=colour, linestyle="-", linewidth=1.3)
            axis.plot(steps[:1], values[:1], "v", color=colour, markersize=4)
            if failed:
                axis.plot(steps[-1:], values[-1:], "x", color=colour, markersize=6)
        axis.set_title(_wrapped(mine[0]["label"]), fontsize=8.5)
        axis.tick_params(labelsize=8)
    for axis in flat[len(arms) :]:
        axis.set_visible(False)
    flat[0].set_ylim(*_loss_limits(rows))
    figure.supxlabel("step", fontsize=9.5)
    figure.supylabel("training loss (nats)", fontsize=9.5)
    return figure


def _loss_limits(rows: Sequence[Mapping]) -> tuple[float, float]:
    """From just below the best loss to 2 nats above it, so that small differences show."""
    best = min(np.nanmin(_curve(row, "train_loss")[1]) for row in rows)
    return best - 0.05, best + 2.0


def _wrapped(label: str, width: int = 22) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(label, width))


def _curve(row: Mapping, name: str) -> tuple[np.ndarray, np.ndarray]:
    kept = row["curves"][name]
    return np.asarray(kept["step"]), np.asarray(kept["value"], dtype=float)


# -- heads and layers -----------------------------------------------------------------------------


def head_values(row: Mapping, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n] and values [n, n_layer, n_head] of a metric that the record keeps per head."""
    kept = row["heads"].get(name)
    if kept is None:
        raise ValueError(f"this record keeps no {name!r} per head; it has {sorted(row['heads'])}")
    return np.asarray(kept["step"]), np.asarray(kept["value"], dtype=float)


def worst_layer(row: Mapping) -> int:
    """The layer of the head with the largest spectral norm that the run has shown."""
    _, values = head_values(row, "spectral_norm_q")
    return int(np.nanmax(values, axis=(0, 2)).argmax())


@styled
def norms_of_layer(row: Mapping, layer: int) -> Figure:
    """Spectral norm of W_Q of every head of one layer over steps (the paper's Fig. 3)."""
    steps, values = head_values(row, "spectral_norm_q")
    figure, axis = subplots(height=2.6)
    for head in range(values.shape[2]):
        dash, colour = DASHES[head % len(DASHES)], PALETTE[head % len(PALETTE)]
        axis.plot(steps, values[:, layer, head], color=colour, linestyle=dash, label=head)
    axis.set_yscale("log")
    _plain(axis.yaxis)
    axis.set(xlabel="step", title=f"Spectral norm of W_Q, heads of layer {layer}")
    figure.legend(loc="outside right", title="head")
    return figure


def _plain(axis) -> None:
    """Plain numbers on a logarithmic axis: 1, 2, 5, 10, or powers of ten over a wide range."""
    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high < 300 * low else (1,)
    axis.set_major_locator(mpl.ticker.LogLocator(subs=subs))
    axis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_formatter(mpl.ticker.NullFormatter())


@styled
def head_grid(row: Mapping, name: str, step: int) -> Figure:
    """Layer x head at the probe nearest to `step`; the colour scale is that of the whole run."""
    steps, values = head_values(row, name)
    here = values[np.abs(steps - step).argmin()]
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    log = name in LOGARITHMIC and low > 0
    norm = mpl.colors.LogNorm(low, high) if log else mpl.colors.Normalize(low, high)
    layers, heads = here.shape
    figure, axis = subplots(height=0.9 + 0.42 * layers)
    drawn = axis.pcolormesh(here, cmap="cividis_r", norm=norm, edgecolors="#ffffff", linewidth=1)
    for (i, j), value in np.ndenumerate(here):
        dark = norm(value) > 0.55 if np.isfinite(value) else False
        words = f"{value:.3g}" if np.isfinite(value) else "lost"
        axis.text(
            j + 0.5,
            i + 0.5,
            words,
            ha="center",
            va="center",
            color="#ffffff" if dark else INK,
            fontsize=9,
        )
    axis.set_xticks(np.arange(heads) + 0.5, range(heads))
    axis.set_yticks(np.arange(layers) + 0.5, range(layers))
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlabel="head", ylabel="layer", title=f"{LABELS.get(name, name)}, step {step:,}")
    bar = figure.colorbar(drawn, ax=axis)
    if log:
        _plain(bar.ax.yaxis)
    return figure


@styled
def layer_panels(
    rows: Mapping[str, Sequence[Mapping]], names: Sequence[str], *, before: int | None = None
) -> Figure:
    """A panel per metric, a colour per layer, a dash per arm: mean over heads and seeds.

    rows: arm's label -> its records. Steps after `before` are left out; a thin band spans the
    seeds where there are several.
    """
    figure, axes = subplots(-(-len(names) // 2), 2, height=1.9, sharex=True, squeeze=False)
    flat = axes.ravel()
    for axis, name in zip(flat, names):
        for place, (label, mine) in enumerate(rows.items()):
            steps, means = layer_means(mine, name, before)
            for layer in range(means.shape[2]):
                colour = PALETTE[layer % len(PALETTE)]
                middle = np.nanmean(means[:, :, layer], axis=0)
                told = f"layer {layer}, {label}"
                axis.plot(steps, middle, color=colour, linestyle=DASHES[place], label=told)
                if len(mine) > 1:
                    low, high = (f(means[:, :, layer], axis=0) for f in (np.nanmin, np.nanmax))
                    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_title("\n".join(_wrapped(LABELS.get(name, name), 34).split("\n")), fontsize=9.5)
        if name in LOGARITHMIC and all(np.nanmin(line.get_ydata()) > 0 for line in axis.lines):
            axis.set_yscale("log")
            _plain(axis.yaxis)
        axis.tick_params(labelsize=8.5)
    for axis in flat[len(names) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=9.5)
    figure.legend(*flat[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def layer_means(rows: Sequence[Mapping], name: str, before: int | None = None):
    """Steps [n] and means over heads [records, n, n_layer], between probes interpolated.

    The steps are those of the record that ends first, up to `before`. Raises ValueError where
    there are none.
    """
    found = [head_values(row, name) for row in rows]
    steps = min((steps for steps, _ in found), key=lambda s: s[-1])
    steps = steps if before is None else steps[steps <= before]
    if not len(steps):
        raise ValueError(f"no {name!r} was measured up to step {before}")
    means = [
        np.stack([np.interp(steps, own, layer) for layer in values.mean(axis=2).T], axis=1)
        for own, values in found
    ]
    return steps, np.stack(means)


# -- the search -----------------------------------------------------------------------------------


@styled
def search_tree(trace) -> Figure:
    """The questions of a delta-debugging search in order, each below the set that it was cut from.

    A filled circle: these units in fp32 keep the run alive; a cross: they do not.
    """
    nodes = trace.questions
    depth = {}
    for q in nodes:
        depth[q.index] = 0 if q.parent is None else depth[q.parent] + 1
    order = _outline(trace.tree())
    place = {index: y for y, index in enumerate(order)}
    figure, axis = subplots(height=0.5 + 0.26 * len(nodes))
    for q in nodes:
        x, y = 0.3 * depth[q.index], place[q.index]
        if q.parent is not None:
            px, py = 0.3 * depth[q.parent], place[q.parent]
            axis.plot([px, px, x - 0.08], [py + 0.3, y, y], color="#777777", lw=0.8, ls="-")
        colour, marker = (PALETTE[1], "o") if q.answer else (PALETTE[0], "x")
        axis.plot([x], [y], marker, color=colour, markersize=6, markeredgewidth=1.8)
        words = f"{q.index + 1}. {_units(q, trace)}: {_answer(q)}"
        bold = "bold" if trace.result is not None and q.units == tuple(trace.result) else "normal"
        axis.text(x + 0.12, y, words, va="center", fontsize=8.5, fontweight=bold)
    axis.set(xlim=(-0.15, 5.4), ylim=(len(nodes) - 0.4, -0.6))
    axis.axis("off")
    return figure


def _outline(node: Mapping) -> list[int]:
    """Indices in the order of an indented outline."""
    children = node.get("children", [])
    return [node["index"], *(i for child in children for i in _outline(child))] if node else []


def _units(question, trace, most: int = 3) -> str:
    units = question.units
    if len(units) in (0, len(trace.units)):
        return f"all {len(units)} units" if units else "nothing"
    more = f" and {len(units) - most} more" if len(units) > most else ""
    return ", ".join(units[:most]) + more


def _answer(question) -> str:
    outcome = question.detail.get("outcome", {})
    step = outcome.get("diverged_step") or outcome.get("nonfinite_step")
    if question.answer:
        return "lives"
    if outcome.get("kind") == "onset":
        return "onset"
    return "fails" if step is None else f"fails at {step:,}"
