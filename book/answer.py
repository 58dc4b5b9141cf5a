"""Where the sign of delta's error comes from: dO answers the rounding. Chapter 3, section 4.

Records keep, per head and step, the mean of e = delta_lp - delta_hp over the rows of a batch, and
its two parts: with the dO of a pass in which the layer's O is not rounded (*clean*), and with what
the rounding added to dO (*answer*); see `gpt2.gradient_probes.delta_answer`. Each is read in units
of the rms of e at its step, as a mean over the steps up to the run's first sign of trouble.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from IPython.display import Markdown
from matplotlib.figure import Figure

from gpt2.data import load_corpus
from gpt2.examine import examine
from gpt2.runs import Run

from . import DATA
from .captions import DASHES, INK, PALETTE, styled, subplots
from .drift import quiet_until
from .experiments import ANSWER
from .isolation_figures import by_arm, head_values
from .records import head_curves
from .regimes import regime
from .tables import half_width, head_name, markdown_table, over_runs
from .verdicts import counted, failures, standing

PARTS = ("error", "clean", "answer")
# Arm of `book.experiments.unbiased` -> whether it was foretold to fail.
FORETOLD = {
    "redrawn": False,
    "stochastic": True,
    "stochastic_redrawn": False,
    "stochastic_delta_fp32": False,
}
HEADER = ["head", "mean of e in its rms", "with a clean dO", "dO's answer"]


class Parts(NamedTuple):
    """Of one run, per head [n_layer, n_head], in the rms of e: its mean and its two parts."""

    error: np.ndarray
    clean: np.ndarray
    answer: np.ndarray


def keeps_answer(row: Mapping) -> bool:
    heads = row.get("heads") or {}
    return all(heads.get(name, {}).get("step") for name in ANSWER)


def by_step(row: Mapping, until: int | None = None) -> Parts:
    """The three numbers [n, n_layer, n_head] at each kept step up to `until`, at least at one.

    until: None for the run's first sign of trouble.
    """
    steps, rms = head_values(row, "delta_error_rms")
    quiet = max(1, int((steps <= (quiet_until(row) if until is None else until)).sum()))
    with np.errstate(invalid="ignore", divide="ignore"):
        return Parts(*((head_values(row, f"delta_{p}_mean")[1] / rms)[:quiet] for p in PARTS))


def parts(row: Mapping) -> Parts:
    """Their means over the steps."""
    return Parts(*(np.nanmean(values, axis=0) for values in by_step(row)))


def heads_above(found: Sequence[Parts]) -> str:
    """'19 of 20': heads of these runs in which the answer is positive."""
    signs = np.concatenate([parts.answer.ravel() > 0 for parts in found])
    return f"{int(signs.sum())} of {signs.size}"


def answer_table(rows: Sequence[Mapping]) -> Markdown:
    """Per arm, means over heads with their interval over runs: e in its rms, and its two parts."""
    lines = []
    for mine in by_arm([row for row in rows if keeps_answer(row)]).values():
        found = [parts(row) for row in mine]
        means = [over_runs([float(getattr(f, part).mean()) for f in found]) for part in PARTS]
        told = [f"{m.mean:+.2%} ± {half_width(m):.2%}" for m in means]
        lines.append([mine[0]["label"], *told, f"{heads_above(found)} heads"])
    return markdown_table(["run", *HEADER[1:], "answer positive in"], lines)


def live_table(run: Run, until: int | None) -> Markdown:
    """The same for one run: means over its steps up to `until` (None: all), each step one draw."""
    row = {"heads": head_curves(run.metrics(), ANSWER)}
    if not keeps_answer(row):
        return Markdown("*This run does not keep the two parts of e.*")
    steps, _ = head_values(row, "delta_error_rms")
    shares = by_step(row, int(steps[-1]) if until is None else until)
    lines = []
    for place in np.ndindex(shares.error.shape[1:]):
        means = [over_runs([float(x[place]) for x in share]) for share in shares]
        told = [f"{m.mean:+.2%} ± {half_width(m):.2%}" for m in means]
        lines.append([head_name(place), *told])
    return markdown_table(HEADER, lines)


# -- against the bits -----------------------------------------------------------------------------


def with_bits(attention: str, bits: int) -> str:
    """A failing run's numerics with another number of fraction bits at the sites that it cuts."""
    if "_bits=" not in attention:
        return f"{attention},matched_bits={bits}"
    return re.sub(r"_bits=\d+", f"_bits={bits}", attention)


def by_bits(
    run: Run,
    until: int | None,
    bits: Sequence[int] = (2, 3, 4, 5, 6, 7),
    *,
    cache_dir: str | Path = DATA,
    **options,
) -> dict[int, Parts]:
    """bits -> `Parts` [batch, n_layer, n_head] of the run's weights at its last checkpoint up to
    step `until` (None: its first), the same batches for each. options: those of `examine`."""
    steps = [step for step, _ in run.checkpoints()]
    step = max((s for s in steps if until is not None and s <= until), default=min(steps))
    corpus = load_corpus(run.config, cache_dir, progress=False)
    options |= dict(cache_dir=cache_dir, corpus=corpus)
    found = {}
    for n in bits:
        attention = with_bits(run.config.attention, n)
        rows = list(examine(run, step, ["delta_answer"], attention=attention, **options))
        rms = np.array([row["delta_error_rms"] for row in rows])
        means = (np.array([row[f"delta_{part}_mean"] for row in rows]) for part in PARTS)
        found[n] = Parts(*(mean / rms for mean in means))
    return found


def slopes(found: Mapping[int, Parts]) -> np.ndarray:
    """log2 of the answer's share per bit, a line through all bits, per head [n_layer, n_head]."""
    bits = np.array(list(found))
    shares = np.stack([np.log2(np.abs(parts.answer.mean(0))) for parts in found.values()])
    line = np.polyfit(bits, shares.reshape(len(bits), -1), 1)[0]
    return line.reshape(shares.shape[1:])


@styled
def bits_figure(found: Mapping[int, Parts]) -> Figure:
    """Answer and rest against the fraction bits, per head, with two standard errors of batches.

    Beyond six heads a colour stands for a layer.
    """
    figure, axes = subplots(1, 2, height=2.9)
    bits = np.array(list(found))
    heads = found[bits[0]].answer.shape[1:]
    by_layer = math.prod(heads) > len(DASHES)
    for axis, name, title in zip(axes, ("answer", "clean"), ("dO's answer", "with a clean dO")):
        draws = 100 * np.stack([getattr(parts, name) for parts in found.values()])
        means, errors = draws.mean(1), 2 * draws.std(1, ddof=1) / draws.shape[1] ** 0.5
        for number, place in enumerate(np.ndindex(heads)):
            look, label = place[0] if by_layer else number, "L{} H{}".format(*place)
            if by_layer:
                label = f"layer {look}" if place[1] == 0 else None
            style = dict(color=PALETTE[look % len(PALETTE)], linestyle=DASHES[look % len(DASHES)])
            bars = dict(yerr=errors[:, *place], capsize=2, label=label)
            axis.errorbar(bits, means[:, *place], **bars, **style)
        axis.set(xlabel="fraction bits", title=title, xticks=bits)
        if name == "answer":
            line = means[0].max() * 2.0 ** (bits[0] - bits)
            axis.plot(bits, line, color=INK, alpha=0.25, linewidth=4, label="half with every bit")
            axis.set(yscale="log", ylabel="% of the rms of e")
    axes[1].axhline(0, color=INK, linewidth=0.8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return figure


def bits_words(found: Mapping[int, Parts]) -> str:
    """How the answer's share goes with the bits, and what was foretold."""
    line = over_runs(slopes(found).ravel().tolist())
    up = sum(int((parts.answer.mean(0) > 0).sum()) for parts in found.values())
    total = sum(parts.answer[0].size for parts in found.values())
    return (
        f"The answer's share of the rms goes by {line.mean:+.2f} ± {half_width(line):.2f} log2 "
        f"per fraction bit, mean over heads (to first order: -1); it is positive in {up} of "
        f"{total} heads and numbers of bits."
    )


# -- words ----------------------------------------------------------------------------------------


def answer_words(rows: Sequence[Mapping]) -> str:
    """'the mean of e is +0.86% of its rms over 20 heads of 5 runs; ...': the table in one line."""
    found = [parts(row) for row in rows if keeps_answer(row)]
    error, clean, answer = (np.stack([getattr(f, p) for f in found]) for p in PARTS)
    return (
        f"the mean of e is {error.mean():+.2%} of its rms over {answer.size} heads of "
        f"{len(found)} runs; {clean.mean():+.2%} with a clean dO and {answer.mean():+.2%} by "
        f"dO's answer, which is positive in {int((answer > 0).sum())} of them"
    )


def verdict_words(rows: Sequence[Mapping]) -> str:
    """How the arms of `unbiased` ended, beside what was foretold of each."""
    arms = by_arm(rows)
    low = arms.get("low", arms.get("same", []))
    if not failures(low):
        return "The failing run did not fail here, so the others decide nothing."
    told = [f"Failing run: {counted(low)} ({standing(len(low))})."]
    for name, fails in FORETOLD.items():
        mine = arms.get(name, [])
        if not mine:
            continue
        count = failures(mine)
        agreed = (2 * count > len(mine)) == fails
        clear = count in (0, len(mine))
        said = "as foretold" if agreed and clear else "mostly so" if agreed else "not as foretold"
        label = mine[0]["label"]
        told.append(
            f"{label[0].upper()}{label[1:]}: {counted(mine)}, {said} ({standing(len(mine))})."
        )
    return "\n".join(f"- {line}" for line in told)


def steps_to_outgrow(share: float, rows: int) -> float:
    """Steps n after which a mean of `share` of the rms, over `rows` rows a step, has added up to
    more than the rest scatters if rows are independent: n rows share = sqrt(n rows)."""
    return 1 / (rows * share**2) if share else np.inf


def places_table(rows: Sequence[Mapping]) -> Markdown:
    """Forks that keep the two parts: means over heads, and the head of the largest answer."""
    lines = []
    for row in rows:
        if not keeps_answer(row):
            continue
        found = parts(row)
        place = np.unravel_index(found.answer.argmax(), found.answer.shape)
        top = float(found.answer[place])
        model = regime(row["recipe"]).config
        steps = steps_to_outgrow(top, model.batch_size * model.block_size)
        lines.append(
            [
                row["label"],
                *(f"{getattr(found, part).mean():+.3%}" for part in PARTS[1:]),
                heads_above([found]),
                f"L{place[0]} H{place[1]}: {top:+.2%}",
                f"{steps:,.0f}",
                onset_head(row),
            ]
        )
    if not lines:
        return Markdown("*No run on a GPU keeps the two parts of e.*")
    header = ["run", *HEADER[2:], "positive in", "largest in", "outgrows the rest in steps"]
    return markdown_table([*header, "onset in"], lines)


def onset_head(row: Mapping) -> str:
    """'L2 H0': the head whose ties, or whose norm, were the onset; 'none' without one."""
    onset = row["onset"]
    return "none" if onset is None else f"L{onset['layer']} H{onset['head']}"


def forks_words(rows: Sequence[Mapping]) -> list[str]:
    """One line over all forks that keep the two parts; none without."""
    kept = [row for row in rows if keeps_answer(row)]
    if not kept:
        return []
    tops = [np.unravel_index(a.argmax(), a.shape) for a in (parts(row).answer for row in kept)]
    begun = [(top, row["onset"]) for top, row in zip(tops, kept) if row["onset"]]
    same = sum((o["layer"], o["head"]) == top for top, o in begun)
    spread = sorted({f"L{layer} H{head}" for layer, head in tops})
    return [
        f"Where the sign comes from, in bf16: {answer_words(kept)}. It is largest in "
        f"{', '.join(spread)}; {same} of {len(begun)} onsets are in the head where it is."
    ]
