"""Figures of chapter 3: terms of dW_Q's error, their cosines, sums over steps, growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from kernels.forensics import direction_cosine

from .captions import DASHES, INK, PALETTE, WIDTH, styled, subplots
from .direction import (
    Moment,
    angles,
    energies,
    feature_signs,
    pairwise,
    random_energies,
    random_pairs,
)
from .drift import drift
from .isolation_figures import by_arm, head_values
from .tables import head_name

SIMILAR = 0.9  # cosine from which Fig. 4 marks a column as similar


def _style(place: int) -> dict:
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": DASHES[place % len(DASHES)]}


# -- the terms ------------------------------------------------------------------------------------


def term(moment: Moment, token: int) -> np.ndarray:
    """(PK)[T]^T X[T] of one row (counted through the sequences), [D, C]."""
    a, b, _ = moment.weight.terms
    return torch.outer(a[token], b[token]).numpy()


@styled
def four_terms(early: Moment, late: Moment, tokens: Sequence[int]) -> Figure:
    """The terms of two tokens at two steps (the paper's Fig. 4), with similar columns marked.

    A column is marked where its cosine with the same column of the first term is above SIMILAR;
    each picture's colours are scaled to its own largest entry.
    """
    figure = Figure(figsize=(WIDTH, 4.0))  # constrained layout fails with marks above the axes
    space = dict(left=0.11, bottom=0.12, right=0.98, top=0.91, wspace=0.08, hspace=0.32)
    axes = figure.subplots(2, 2, sharex=True, sharey=True, gridspec_kw=space)
    first = term(early, tokens[0])
    for line, moment in zip(axes, (early, late)):
        for axis, token in zip(line, tokens):
            D = term(moment, token)
            top = np.abs(D).max() or 1.0
            axis.imshow(D, cmap="RdBu", vmin=-top, vmax=top, aspect="auto", interpolation="none")
            similar = np.flatnonzero(column_cosines(first, D) > SIMILAR)
            axis.plot(similar, np.full(len(similar), -1.5), "v", color=INK, ms=3, clip_on=False)
            cosine = direction_cosine(torch.tensor(first), torch.tensor(D))
            told = f"step {moment.step:,}, row {token}: cosine {cosine:+.2f}"
            axis.set_title(told, fontsize=8.5, pad=9)
            axis.grid(False)
            axis.tick_params(labelsize=8)
    figure.supxlabel("input feature (column)", fontsize=9.5)
    figure.supylabel("feature of the head (row)", fontsize=9.5)
    return figure


def column_cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine of each pair of columns of two [D, C] matrices, [C]; 0 for an empty column."""
    sizes = np.linalg.norm(first, axis=0) * np.linalg.norm(second, axis=0)
    dots = (first * second).sum(0)
    return np.divide(dots, sizes, out=np.zeros_like(dots), where=sizes > 0)


# -- cosines --------------------------------------------------------------------------------------


@styled
def cosine_histograms(chosen: Mapping[str, Moment]) -> Figure:
    """Distribution of the cosine between two terms, at each stage and for random directions."""
    figure, axis = subplots(height=2.7)
    edges = np.linspace(-1, 1, 61)
    series = {name: pairwise(moment) for name, moment in chosen.items()}
    series["random directions"] = random_pairs(next(iter(chosen.values())))
    for place, (name, cosines) in enumerate(series.items()):
        share, _ = np.histogram(cosines.numpy(), edges)
        step = f", step {chosen[name].step:,}" if name in chosen else ""
        share = share / share.sum()
        axis.stairs(share, edges, label=f"{name}{step}", linewidth=1.5, **_style(place))
    axis.set_yscale("log")
    axis.set(xlabel="cosine between the terms of two rows", ylabel="share of pairs")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


@styled
def spectra(chosen: Mapping[str, Moment]) -> Figure:
    """Energy in each singular direction of R at each stage, and of as many random terms."""
    figure, axis = subplots(height=2.6)
    series = {f"{name}, step {m.step:,}": energies(m) for name, m in chosen.items()}
    series["random directions"] = random_energies(next(iter(chosen.values())))
    for place, (name, shares) in enumerate(series.items()):
        order = np.arange(1, len(shares) + 1)
        axis.plot(order, shares.numpy(), label=name, marker=".", **_style(place))
    axis.set_yscale("log")
    axis.set_ylim(1e-5, 1.5)
    axis.set(xlabel="singular direction of R", ylabel="share of the energy")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


@styled
def cosine_bands(moments: Mapping[tuple[int, int], Sequence[Moment]]) -> Figure:
    """Per head: median and 5 to 95 % of the cosines between terms, over steps."""
    figure, axes = subplots(
        -(-len(moments) // 2), 2, height=1.6, sharex=True, sharey=True, squeeze=False
    )
    for axis, (place, series) in zip(axes.ravel(), moments.items()):
        steps = [m.step for m in series]
        low, middle, high = np.array([m.coherence.quantiles() for m in series]).T
        axis.fill_between(steps, low, high, color=PALETTE[1], alpha=0.25, linewidth=0)
        axis.plot(steps, middle, **_style(1))
        axis.plot(steps, [m.coherence.mean_cosine for m in series], **_style(0))
        axis.axhline(0, color=INK, linewidth=0.8)
        axis.set_title(head_name(place), fontsize=9)
    figure.supxlabel("step", fontsize=9.5)
    figure.supylabel("cosine between terms", fontsize=9.5)
    return figure


@styled
def direction_map(series: Sequence[Moment]) -> Figure:
    """|cosine| between R at every two captured steps of one head."""
    figure, axis = subplots(height=3.4)
    edges = np.arange(len(series) + 1)
    drawn = axis.pcolormesh(edges, edges, angles(series).numpy(), cmap="cividis", vmin=0, vmax=1)
    every = range(0, len(series), max(1, len(series) // 5))
    labels = [f"{series[i].step:,}" for i in every]
    axis.set_xticks([i + 0.5 for i in every], labels)
    axis.set_yticks([i + 0.5 for i in every], labels)
    axis.set(xlabel="step", ylabel="step", title="|cosine| between R at two steps", aspect="equal")
    axis.grid(False)
    axis.tick_params(labelsize=8)
    figure.colorbar(drawn, ax=axis)
    return figure


@styled
def coherence_panels(series: Sequence[Moment]) -> Figure:
    """One head over steps: alike directions, what they add up to, and what one number catches."""
    steps = [m.step for m in series]
    figure, axes = subplots(3, 1, height=1.5, sharex=True)
    c = [m.coherence for m in series]
    axes[0].plot(steps, [m.first_energy for m in series], label="first of R", **_style(1))
    axes[0].plot(steps, [x.explained for x in c], label="along R, of all terms", **_style(2))
    axes[0].set_ylim(0, 1.05)
    axes[0].set_title("Share of the energy in one direction")
    axes[1].plot(steps, [x.gain for x in c], label="error of dW_Q", **_style(0))
    low, high = np.quantile([m.random_signs.numpy() for m in series], (0.025, 0.975), axis=1)
    told = "these directions, random signs"
    axes[1].fill_between(steps, low, high, color="#999999", alpha=0.4, linewidth=0, label=told)
    axes[1].plot(steps, [x.null.mean for x in c], label="random directions", **_style(5))
    axes[1].set_title("Coherent gain")
    axes[1].set_ylim(bottom=0)
    axes[2].plot(steps, [x.approximation_cosine for x in c], **_style(3))
    axes[2].axhline(0, color=INK, linewidth=0.8)
    axes[2].set_ylim(-1.05, 1.05)
    axes[2].set_title("Cosine of (sum of e) R with the error of dW_Q")
    for axis in axes[:2]:
        axis.legend(loc="best", fontsize=8.5)
    axes[-1].set_xlabel("step")
    return figure


# -- sums over steps ------------------------------------------------------------------------------


@styled
def cumulative(rows: Sequence[Mapping], place: tuple[int, int]) -> Figure:
    """Running sum of the mean error of delta of one head: a panel per arm, a line per record.

    In units of the standard deviation, at the last step shown, of the same sum with a coin's sign
    at every step; grey: 1.96 of these, of the first record. Runs end where trouble begins.
    """
    arms = by_arm(rows)
    figure, axes = subplots(1, len(arms), height=2.9, squeeze=False)
    for axis, mine in zip(axes[0], arms.values()):
        for number, row in enumerate(mine):
            steps, total = head_values(row, "delta_error_mean:sum")
            _, band = head_values(row, "delta_error_mean:band")
            shown = steps <= drift(row).end
            steps, total, band = (x[shown] for x in (steps, total[:, *place], band[:, *place]))
            end = band[-1] or 1.0
            axis.plot(steps, total / end, label=f"seed {row['seed']}", **_style(number))
            if number == 0:
                edge = 1.96 * band / end
                axis.fill_between(steps, -edge, edge, color="#999999", alpha=0.3, linewidth=0)
        axis.axhline(0, color=INK, linewidth=0.8)
        axis.set(xlabel="step", title=mine[0]["label"])
    axes[0, 0].set_ylabel("running sum (σ of its null)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=5)
    return figure


@styled
def error_sizes(moments: Mapping[tuple[int, int], Sequence[Moment]]) -> Figure:
    """Size of the error of dW_Q beside dW_Q itself, per head, and rms of the error of delta."""
    figure, axes = subplots(2, 1, height=1.7, sharex=True)
    for number, (place, series) in enumerate(moments.items()):
        steps = [m.step for m in series]
        label = head_name(place)
        axes[0].plot(steps, [m.weight.ratio for m in series], label=label, **_style(number))
        axes[1].plot(steps, [m.delta.rms for m in series], **_style(number))
    axes[0].axhline(1, color=INK, linewidth=0.8)
    axes[0].set_title("|error of dW_Q| / |dW_Q|")
    axes[1].set_title("rms of the error of delta")
    for axis in axes:
        axis.set_yscale("log")
    axes[1].set_xlabel("step")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


@styled
def features(moment: Moment) -> Figure:
    """Mean sign of dO and of O's error per feature of the head (the paper's Fig. 5b, c)."""
    signs = feature_signs(moment)
    figure, axis = subplots(height=2.4)
    places = np.arange(len(signs.dO))
    for shift, (name, values, colour) in zip(
        (-0.2, 0.2), (("dO", signs.dO, PALETTE[1]), ("error of O", signs.error, PALETTE[0]))
    ):
        axis.bar(places + shift, values.numpy(), 0.4, color=colour, label=name)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set(xlabel="feature of the head", ylabel="mean / rms over rows")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


# -- growth ---------------------------------------------------------------------------------------


@styled
def growth(moments: Mapping[tuple[int, int], Sequence[Moment]]) -> Figure:
    """Per head: spectral norm of W_Q and how far W_Q stretches along R's leading pair."""
    figure, axes = subplots(
        -(-len(moments) // 2), 2, height=1.7, sharex=True, sharey=True, squeeze=False
    )
    for axis, (place, series) in zip(axes.ravel(), moments.items()):
        steps = [m.step for m in series]
        axis.plot(steps, [m.spectral_norm for m in series], label="|W_Q|", **_style(0))
        axis.plot(steps, [m.projection for m in series], label="along R", **_style(1))
        axis.set_title(head_name(place), fontsize=9)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
        axis.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    figure.supxlabel("step", fontsize=9.5)
    return figure


# -- a real model ---------------------------------------------------------------------------------


@styled
def model_heads(found: Mapping[str, Mapping[str, list]], numerics: str = "bf16 scores") -> Figure:
    """Tied rows under low precision, and attention to the first key: every layer and head."""
    parts = {
        "rows with a tied maximum (%)": 100 * np.array(found[numerics]["tie_rate"]),
        "attention to the first key": np.array(found["fp32"]["first_key"]),
        "mean cosine of two terms": np.array(found["fp32"]["direction_cosine"]),
    }
    figure, axes = subplots(1, 3, height=4.0, sharey=True)
    for axis, (title, values) in zip(axes, parts.items()):
        drawn = axis.imshow(values, cmap="cividis", aspect="auto", vmin=0, interpolation="none")
        axis.set_title(title.replace(" (", "\n(").replace(" to ", "\nto "), fontsize=8.5)
        axis.set_xlabel("head")
        axis.grid(False)
        figure.colorbar(drawn, ax=axis, orientation="horizontal", pad=0.02)
    axes[0].set_ylabel("layer")
    return figure
