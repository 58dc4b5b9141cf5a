"""Tables and words of chapter 3, made from captured heads and from records of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from IPython.display import Markdown

from gpt2.fork import identical_losses, parent_state
from gpt2.outcomes import VERDICT_RUNS
from gpt2.train import train_many

from .captions import archived
from .captured import captured_config
from .direction import Moment, bias, feature_signs, gain_over_steps, injected_gains
from .evidence import Archive, run_experiment
from .experiments import INJECTED, Experiment
from .forks import plan_fork
from .isolation_figures import FAILED, by_arm, head_values
from .tables import markdown_table, number, step_text

_MIDDLE = torch.tensor([0.025, 0.975], dtype=torch.float64)
Moments = Mapping[tuple[int, int], Sequence[Moment]]

# What each intervention keeps of the failing run's error e, in words.
KEEPS = {
    "low": "e as it is",
    "sham": "e as it is",
    "delta_fp32": "nothing",
    "mirror": "size and row; sign turned",
    "random_sign": "size and row; no sign",
    "centred": "all but the mean of each head",
    "all_positive": "size and row; sign always +",
    "all_negative": "size and row; sign always -",
    "shuffled": "mean and sizes; not the row",
    "injected": "mean and rms of one step; nothing else",
    "injected_10": "ten times those",
    "own_direction": "all in dQ; nothing in dK",
    "dK_alone": "all in dK; nothing in dQ",
    "random_direction": "size, sign and row in dQ; not the direction",
    "leading_direction": "size, sign and row in dQ; one shared direction",
    "fixed_direction": "size, sign and row in dQ; one direction for all",
}


def head_name(place: tuple[int, int]) -> str:
    return f"layer {place[0]}, head {place[1]}"


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


def stage_table(chosen: Mapping[str, Moment]) -> Markdown:
    """How alike the terms are, and what they add up to, at each stage."""
    lines = []
    for name, moment in chosen.items():
        c = moment.coherence
        low, middle, high = c.quantiles()
        lines.append(
            [
                f"{name}, step {moment.step:,}",
                f"{c.mean_cosine:+.2f}",
                f"{low:+.2f}, {middle:+.2f}, {high:+.2f}",
                f"{moment.first_energy:.2f}",
                f"{c.explained:.2f}",
                f"{c.gain:.2f}",
                f"{c.null.mean:.2f} ± {c.null.sd:.2f}",
                "{:.2f} to {:.2f}".format(*moment.random_signs.quantile(_MIDDLE).tolist()),
                f"{c.approximation_cosine:+.2f}",
            ]
        )
    header = [
        "stage",
        "mean cosine",
        "5, 50, 95 %",
        "first of R",
        "terms along R",
        "gain",
        "random directions",
        "random signs, 95 %",
        "cosine of (Σe) R",
    ]
    return markdown_table(header, lines)


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
        f"sign. Taken alone, these means would give $\\sum e = {signs.of_means:+.2g}$; the sum is "
        f"${signs.total:+.2g}$."
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


# -- section 5: interventions ---------------------------------------------------------------------


def intervention_table(experiment: Experiment, rows: Sequence[Mapping]) -> Markdown:
    """Who diverged, and when: an arm a line, with what it keeps of the error."""
    lines = []
    for name, mine in by_arm(rows).items():
        steps = failed_steps(mine)
        told = ", ".join(f"{s:,}" for s in steps) if steps else "none"
        lines.append(
            [
                experiment.arm(name).group,
                mine[0]["label"],
                KEEPS.get(name, ""),
                f"{len(steps)} of {len(mine)}",
                told,
                f"{min(r['steps'] for r in mine):,}",
            ]
        )
    header = ["kind", "intervention", "what is kept", "failed", "at steps", "shortest run"]
    return markdown_table(header, lines)


def source(kept: Archive):
    """Provenance of an archive for captions; says so where arms or seeds are missing."""
    return archived(kept.provenance, note=None if kept.complete else "not complete")


def failed_steps(rows: Sequence[Mapping]) -> list[int]:
    """Steps at which these records failed, ascending."""
    return sorted(r["diverged_step"] or r["nonfinite_step"] for r in rows if r["kind"] in FAILED)


def sham_words(runs: Mapping, experiment: Experiment, seed: int) -> Markdown:
    """Whether the sham repeats the failing run bit for bit."""
    parent, sham = runs["low", seed], runs["sham", seed]
    same = identical_losses(parent, sham)
    word = "the failing run's, bit for bit" if same else "**not** the failing run's"
    return Markdown(f"The losses of the sham are {word}. It ended: {sham.outcome}.")


def answers(rows: Sequence[Mapping]) -> list[str]:
    """What the outcomes say about sign, bias, row and direction; nothing that they do not."""
    arms = by_arm(rows)
    low = arms.get("low", [])
    if not low or not failed_steps(low):
        return ["The failing run did not fail here, so the interventions decide nothing."]
    told = [_count("The error as it is", low)]
    for name, words in (
        ("mirror", "Every sign turned"),
        ("random_sign", "Random signs"),
        ("centred", "Without its mean"),
        ("all_positive", "Every error positive"),
        ("all_negative", "Every error negative"),
        ("shuffled", "The errors of other rows"),
        ("injected", "Independent errors of the same mean and rms"),
        ("injected_10", "Ten times as large"),
        ("own_direction", "The error in $dQ$ alone"),
        ("dK_alone", "The error in $dK$ alone"),
        ("random_direction", "In random directions"),
        ("leading_direction", "All along the shared direction"),
        ("fixed_direction", "All along one random direction"),
    ):
        if name in arms:
            told.append(_count(words, arms[name]))
    return [*told, " ".join(_verdicts(arms))]


def _count(words: str, rows: Sequence[Mapping]) -> str:
    steps = failed_steps(rows)
    when = "" if not steps else f", at {', '.join(f'{s:,}' for s in steps)}"
    return f"{words}: {len(steps)} of {len(rows)} failed{when}."


def _verdicts(arms: Mapping[str, Sequence[Mapping]]) -> list[str]:
    def share(name: str) -> float | None:
        return len(failed_steps(arms[name])) / len(arms[name]) if name in arms else None

    runs = min(len(arms[name]) for name in ("low", "random_sign", "centred") if name in arms)
    standing = "Verdict" if runs >= VERDICT_RUNS else f"Observed, {runs} run(s) an arm"
    low, told = share("low"), [f"{standing}:"]
    size = share("random_sign")
    if size is not None and size < low:
        told.append(
            "Errors of the same size in the same rows failed less often without their signs, so "
            "size alone is not what it takes."
        )
    elif size is not None:
        told.append("Errors of the same size with random signs failed as often: size is enough.")
    centred = share("centred")
    if centred is not None:
        word = "did not prevent" if centred >= low else "prevented or made rarer"
        told.append(f"Taking off each head's mean, its bias within a batch, {word} the failure.")
    shuffled = share("shuffled")
    if shuffled is not None:
        told.append(
            "Given to other rows, the same errors fail too: they need not belong to their rows."
            if shuffled >= low
            else "Given to other rows, the same errors fail less often."
        )
    own, random = share("own_direction"), share("random_direction")
    if own is not None and random is not None and own > 0:
        word = "rarer" if random < own else "no rarer"
        told.append(f"With the error in $dQ$ alone, spreading its directions made failure {word}.")
    elif own is not None:
        told.append(
            "The error in $dQ$ alone did not fail, so the arms that turn its direction in $dQ$ "
            "cannot say what direction does."
        )
    keys = share("dK_alone")
    if own is not None and keys is not None:
        told.append(_gradient_words(own, keys))
    return told


def _gradient_words(own: float, keys: float) -> str:
    """What the arms that send the error into one gradient alone say together."""
    if own and keys:
        return "Either of $dQ$ and $dK$ is enough to carry the error to the failure."
    if own or keys:
        enough, not_enough = ("$dQ$", "$dK$") if own else ("$dK$", "$dQ$")
        return f"The error fails by way of {enough}: in {not_enough} alone it does not."
    return "The error fails in neither of $dQ$ and $dK$ alone: it takes both."


# -- the end --------------------------------------------------------------------------------------


def drift_words(rows: Sequence[Mapping]) -> str:
    """How many heads of how many runs left their sign-flip band at the end of the run."""
    out = total = 0
    for row in rows:
        _, sums = head_values(row, "delta_error_mean:sum")
        _, band = head_values(row, "delta_error_mean:band")
        out += int((np.abs(sums[-1]) > 1.96 * band[-1]).sum())
        total += sums[-1].size
    return f"{out} of {total} heads end outside the 95 % band of coin-flip signs"


def what_you_saw(
    moments: Moments,
    chosen: Mapping[str, Moment],
    rows: Sequence[Mapping],
    kept: Archive | None,
    drift: Archive | None,
) -> Markdown:
    """The chapter's findings as a list; every number from a capture or a record."""
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
    if kept is not None:
        told += [f"Archive: {sentence}" for sentence in answers(kept.rows)]
    if drift is not None:
        told.append(f"Archive: {drift_words(drift.arm('low'))} (failing runs).")
    return Markdown("\n".join(f"- {sentence}" for sentence in told))


def against_the_paper(moments: Moments, kept: Archive | None) -> Markdown:
    """The paper's claims of section 3.3.1 beside what was measured here."""
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
        ["Σ(δ_lp - δ_hp) drifts one way", f"biased beyond 3 σ: {biased} of {len(moments)} heads"],
    ]
    if kept is not None:
        arms = by_arm(kept.rows)
        low = len(failed_steps(arms.get("low", [])))
        parts = [
            f"{words} {len(failed_steps(arms[name]))} of {len(arms[name])}"
            for name, words in (
                ("mirror", "mirrored"),
                ("random_sign", "random signs"),
                ("centred", "without its mean"),
            )
            if name in arms
        ]
        lines.append(["bias is the cause", f"failed as it is {low}; " + "; ".join(parts)])
    return markdown_table(["the paper", "here"], lines)


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
