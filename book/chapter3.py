"""Tables and words of chapter 3, made from captured heads and from records of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from IPython.display import Markdown

from gpt2.fork import parent_state
from gpt2.train import train_many

from .answer import answer_words
from .captured import captured_config
from .direction import Moment, bias, feature_signs, gain_over_steps, injected_gains
from .drift import drift_words
from .error_findings import SAID, verdicts
from .evidence import Archive
from .experiment_runs import run_experiment
from .experiments import INJECTED, Experiment
from .forks import plan_fork
from .isolation_figures import by_arm, head_values
from .tables import head_name, markdown_table, number, step_text
from .verdicts import counted, tested, untested_words

_MIDDLE = torch.tensor([0.025, 0.975], dtype=torch.float64)
Moments = Mapping[tuple[int, int], Sequence[Moment]]


# -- what is run ----------------------------------------------------------------------------------


def train_together(experiment: Experiment, arms: Sequence[str], preset: str, seed: int, **options):
    """(the captured run, {(arm, seed): run}): trained side by side, so that no worker waits.

    options: `store`, `cache_dir`, `workers`, `progress` of `gpt2.train.train_many`. What lies in
    the store is loaded, chapter 1's failing run and forks of chapter 2 among it.
    """
    where = {n: options[n] for n in ("progress", "cache_dir") if n in options}
    asked = dict(seeds=[seed], preset=preset, **options)
    parent = run_experiment(experiment, arms=[experiment.parent], **asked)[experiment.parent, seed]
    forks = [plan_fork(experiment, experiment.arm(name), parent) for name in arms]
    pairs = [(made.config, parent_state(parent, made.at, **where)) for made in forks]
    captured, *_ = train_many([captured_config(preset, seed), *pairs], **options)
    return captured, run_experiment(experiment, arms=list(arms), **asked)


# -- sections 1 to 4 and 6: captured heads --------------------------------------------------------


def identity_table(moments: Moments, step: int) -> Markdown:
    """The identity and what else errs, for every head at the captured step nearest to `step`.

    All sizes are relative to |dW_Q| but the residual, which is relative to the difference.
    """
    lines = []
    for place, series in moments.items():
        w = min(series, key=lambda m: abs(m.step - step)).weight
        sizes = [f"{x:.3f}" for x in (w.ratio, w.grad_scores_ratio, w.gradients_ratio)]
        lines.append([head_name(place), f"{w.residual:.1e}", *sizes])
    header = ["head", "residual of the identity", "error from δ", "from rounding dS", "from dQ"]
    return markdown_table(header, lines)


def coherence_cells(moment: Moment) -> dict[str, str]:
    """How alike the terms of a captured head are, and what they add up to: column -> cell."""
    c = moment.coherence
    return {
        "mean cosine": f"{c.mean_cosine:+.2f}",
        "5, 50, 95 %": "{:+.2f}, {:+.2f}, {:+.2f}".format(*c.quantiles()),
        "first of R": f"{moment.first_energy:.2f}",
        "terms along R": f"{c.explained:.2f}",
        "gain": f"{c.gain:.2f}",
        "random directions": f"{c.null.mean:.2f} ± {c.null.sd:.2f}",
        "random signs, 95 %": "{:.2f} to {:.2f}".format(
            *moment.random_signs.quantile(_MIDDLE).tolist()
        ),
        "cosine of (Σe) R": f"{c.approximation_cosine:+.2f}",
    }


def stage_table(chosen: Mapping[str, Moment]) -> Markdown:
    """How alike the terms are, and what they add up to, at each stage."""
    cells = {f"{name}, step {m.step:,}": coherence_cells(m) for name, m in chosen.items()}
    header = ["stage", *next(iter(cells.values()))]
    return markdown_table(header, [[name, *found.values()] for name, found in cells.items()])


def steps_table(moments: Moments) -> Markdown:
    """Whether the errors of different steps add up, and how straight W_Q moves, per head."""
    lines = []
    for place, series in moments.items():
        gains = gain_over_steps(series)
        lines.append([head_name(place), *(f"{x:.2f}" for x in gains.values())])
    header = ["head", "gain over steps: error of dW_Q", "what W_Q did", "a straight line has"]
    return markdown_table(header, lines)


def bias_table(moments: Moments) -> Markdown:
    """Signed mean of e per head over all captured steps, and its sum against coin-flip signs."""
    lines = []
    for place, series in moments.items():
        b = bias(series)
        lines.append(
            [
                head_name(place),
                f"{b.mean.mean:+.4f} ± {b.mean.stderr:.4f}",
                f"{b.positive:.1%}",
                f"{b.total / b.sigma:+.2f}" if b.sigma else "none",
                f"{b.p_value:.2f}",
            ]
        )
    header = ["head", "mean of e in its rms", "rows with e > 0", "sum over steps in σ", "p"]
    return markdown_table(header, lines)


def feature_words(moment: Moment) -> Markdown:
    """Whether signs that hold over all rows explain the sum of e, in a sentence."""
    signs = feature_signs(moment)
    agree = float((signs.dO.sign() == signs.error.sign()).double().mean())
    return Markdown(
        f"In {agree:.0%} of the features the mean of $dO$ and the mean error of $O$ have the same "
        f"sign. Taken alone, these means would give a $\\sum e$ of {signs.of_means:+.2g}; it is "
        f"{signs.total:+.2g}."
    )


def gains_table(chosen: Mapping[str, Moment]) -> Markdown:
    """Coherent gain of what each intervention adds to dW_Q, before any training with it."""
    found = {
        f"{name}, step {m.step:,}": injected_gains(m.captured.head, m.captured.numerics)
        for name, m in chosen.items()
    }
    kinds = list(next(iter(found.values())))
    lines = [[f"`{k}`", *(number(gains[k], 2) for gains in found.values())] for k in kinds]
    return markdown_table(["intervention", *found], lines)


def moments_table(moments: Moments, preset: str, step: int) -> Markdown:
    """Mean and rms of e per layer near a step, beside what the `injected` arm uses."""
    lines = []
    used = INJECTED.get(preset, ())
    for layer in sorted({layer for layer, _ in moments}):
        mine = [series for (i, _), series in moments.items() if i == layer]
        near = [min(series, key=lambda m: abs(m.step - step)) for series in mine]
        mean = np.mean([m.delta.mean.mean for m in near])
        rms = np.mean([m.delta.rms for m in near])
        told = [f"{x:.1e}" for x in used[layer]] if layer < len(used) else ["none", "none"]
        lines.append([layer, f"{near[0].step:,}", f"{mean:.1e}", f"{rms:.1e}", *told])
    header = ["layer", "step", "mean of e", "rms of e", "injected mean", "injected rms"]
    return markdown_table(header, lines)


# -- the end --------------------------------------------------------------------------------------


def what_you_saw(
    moments: Moments,
    chosen: Mapping[str, Moment],
    rows: Sequence[Mapping],
    kept: Mapping[str, Archive | None],
    sums: Archive | None,
) -> Markdown:
    """The chapter's findings as a list; every number from a capture or a record.

    kept: the archives of interventions, "from the start" and "forked".
    """
    last = chosen["at the end"]
    residuals = [m.weight.residual for series in moments.values() for m in series]
    gains = [m.coherence.gain for series in moments.values() for m in series]
    chances = [m.sign_p_value for series in moments.values() for m in series]
    worst = max(abs(bias(series).mean.z) for series in moments.values())
    told = [
        f"The identity holds to {max(residuals):.0e} of the error in every captured head, with "
        "$dS$ in fp32.",
        f"The terms do become alike: in {head_name((last.captured.layer, last.captured.place))} "
        f"the mean cosine goes from {list(chosen.values())[0].coherence.mean_cosine:+.2f} "
        f"untrained to {last.coherence.mean_cosine:+.2f} at step {last.step:,}, and the first "
        f"direction holds {last.first_energy:.0%} of the energy of $R$.",
        f"The errors along it add up by a gain of {np.median(gains):.2f} in the median and "
        f"{max(gains):.2f} at most; independent directions have 1. Random signs do as much in "
        f"{sum(p > 0.05 for p in chances)} of {len(chances)} captures.",
        f"The largest bias of $\\delta$ in any head is {worst:.1f} standard errors.",
    ]
    failing = chosen.get("failing")
    if failing is not None:
        told.append(
            f"Once it fails, at step {failing.step:,}, that head's gain is "
            f"{failing.coherence.gain:.2f}, and p = {failing.sign_p_value:.2f} for random signs."
        )
    told += [f"{row['label'][0].upper()}{row['label'][1:]}: {step_text(row)}." for row in rows]
    for name, archive in kept.items():
        found = archived_verdicts(name, archive)
        told += (
            ["\n  - ".join([f"Interventions {name}, from the archive:", *found])] if found else []
        )
    for mine in by_arm(sums.rows).values() if sums else ():
        told.append(f"Archive, {mine[0]['label']}: {drift_words(mine)}.")
    return Markdown("\n".join(f"- {sentence}" for sentence in told))


def archived_verdicts(name: str, archive: Archive | None) -> list[str]:
    """`verdicts` of an archive; of forks, those whose failing run failed."""
    if archive is None:
        return []
    if name != "forked":
        return verdicts(archive.rows)
    left_out = untested_words(archive.rows)
    return ([left_out] if left_out else []) + verdicts(tested(archive.rows))


def against_the_paper(
    moments: Moments,
    kept: Mapping[str, Archive | None],
    sums: Archive | None,
    free: Archive | None = None,
) -> Markdown:
    """The paper's claims of section 3.3.1 beside what was measured here.

    free: the archive of roundings without a bias.
    """
    series = [m for s in moments.values() for m in s]
    trained = [m for m in series if m.step > series[0].step]
    cosine = np.median([m.coherence.mean_cosine for m in trained])
    outside = sum(m.sign_p_value <= 0.05 for m in trained)
    biased = sum(abs(bias(s).mean.z) > 3 for s in moments.values())
    lines = [
        [
            "(PK)[T]ᵀX[T] have similar columns at different tokens and steps",
            f"median of the mean cosine {cosine:+.2f}: alike, far from identical",
        ],
        [
            "so their sum is (Σ e[T]) R",
            "median cosine of the two, sign aside: "
            f"{np.median([abs(m.coherence.approximation_cosine) for m in trained]):.2f}",
        ],
        [
            "the errors add up, by their common direction",
            f"gain beyond that of random signs (p ≤ 0.05): {outside} of {len(trained)} captures; "
            f"median gain {np.median([m.coherence.gain for m in trained]):.2f}",
        ],
        [
            "Σ(δ_lp - δ_hp) drifts one way",
            f"biased beyond 3 σ in the captures: {biased} of {len(moments)} heads"
            if sums is None
            else "; ".join(
                f"{r[0]['label']}: {drift_words(r)}" for r in by_arm(sums.rows).values()
            ),
        ],
    ]
    if free is not None:
        arms = by_arm(free.rows)
        told = [f"{arms[n][0]['label']} {counted(arms[n])}" for n in arms if n != "low"]
        lines.append(
            [
                "its sign is that of a biased rounding of O",
                f"it is dO's answer to the rounding, biased or not: {answer_words(arms['low'])}; "
                + "; ".join([f"as it is {counted(arms['low'])}", *told]),
            ]
        )
    for name, archive in kept.items():
        if archive is not None:
            lines += _claims(name, tested(archive.rows) if name == "forked" else archive.rows)
    return markdown_table(["the paper", "here"], lines)


def _claims(name: str, rows: Sequence[Mapping]) -> list[list[str]]:
    """The claims that the interventions of one archive test."""
    arms = by_arm(rows)
    low = counted(arms.get("low", []))
    return [
        [f"{claim} ({name})", f"as it is {low}; " + "; ".join(_ended(arms, tests))]
        for claim, tests in (
            ("bias is the cause", ("mirror", "random_sign", "centred")),
            ("the error acts on W_Q", ("own_direction", "dQ_alone", "dK_alone")),
            ("by their common direction", ("random_direction", "leading_direction")),
        )
        if any(test in arms for test in tests)
    ]


def _ended(arms: Mapping[str, Sequence[Mapping]], names: Sequence[str]) -> list[str]:
    return [f"{SAID[n][0].lower()}{SAID[n][1:]} {counted(arms[n])}" for n in names if n in arms]


def update_table(rows: Sequence[Mapping]) -> Markdown:
    """Per layer, medians over heads, steps and records: the error in dW_Q and in Adam's update.

    Cosines are with the leading singular pair of W_Q; positive is towards growth for the update.
    """
    names = ("dwq_error_ratio", "dwq_error_cosine", "update_error_ratio", "update_error_cosine")
    lines = []
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = [row for row in rows if row["label"] == label]
        values = [np.concatenate([head_values(r, n)[1] for r in mine]) for n in names]
        for layer in range(values[0].shape[1]):
            cells = [f"{np.nanmedian(v[:, layer]):+.3f}" for v in values]
            lines.append([label, layer, *cells])
    header = ["run", "layer", "error / dW_Q", "its cosine", "error / update", "its cosine"]
    return markdown_table(header, lines)
