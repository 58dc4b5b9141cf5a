"""Chapter 3, section 5: what outcomes of interventions on the error of delta say, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from IPython.display import Markdown

from gpt2.fork import identical_losses

from .captions import archived
from .evidence import Archive
from .experiments import Experiment
from .isolation_figures import by_arm
from .records import failed_steps
from .tables import markdown_table
from .verdicts import (
    LOST_NATS,
    compared,
    counted,
    failures,
    fewer_by_chance,
    lost,
    lost_words,
    onsets,
    standing,
)

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
    "own_direction": "all in dQ, past the rounding of dS; nothing in dK",
    "dQ_alone": "all in dQ, bit for bit; nothing in dK",
    "dK_alone": "all in dK, bit for bit; nothing in dQ",
    "random_direction": "size, sign and row in dQ; not the direction",
    "leading_direction": "size, sign and row in dQ; one shared direction",
    "fixed_direction": "size, sign and row in dQ; one direction for all",
}


# -- tables ---------------------------------------------------------------------------------------


def intervention_table(experiment: Experiment, rows: Sequence[Mapping]) -> Markdown:
    """Who diverged, and when: an arm a line, with what it keeps of the error."""
    lines = []
    for name, mine in by_arm(rows).items():
        steps = failed_steps(mine)
        told = " to ".join(f"{s:,}" for s in sorted({steps[0], steps[-1]})) if steps else "none"
        lines.append(
            [
                experiment.arm(name).group,
                mine[0]["label"],
                KEEPS.get(name, ""),
                f"{len(steps)} of {len(mine)}",
                onsets(mine) or "none",
                told,
                f"{min(r['steps'] for r in mine):,}",
            ]
        )
    header = ["kind", "intervention", "what is kept", "failed", "onset only"]
    header += ["failed at steps", "shortest run"]
    return markdown_table(header, lines)


def source(kept: Archive):
    """Provenance of an archive for captions; says so where arms or seeds are missing."""
    return archived(kept.provenance, note=None if kept.complete else "not complete")


# -- words ----------------------------------------------------------------------------------------

Arms = Mapping[str, Sequence[Mapping]]

# Arm -> how a sentence names it.
SAID = {
    "mirror": "Every sign turned",
    "random_sign": "Random signs",
    "centred": "Without its mean",
    "all_positive": "Every error positive",
    "all_negative": "Every error negative",
    "shuffled": "The errors of other rows",
    "injected": "Independent errors of the same mean and rms",
    "injected_10": "Ten times as large",
    "own_direction": "The error in $dQ$ alone",
    "dQ_alone": "The error in $dQ$ alone, rounded with $dS$",
    "dK_alone": "The error in $dK$ alone",
    "random_direction": "In random directions",
    "leading_direction": "All along the shared direction",
    "fixed_direction": "All along one random direction",
}

# Arm -> what it says about the error if it fails less often than the failing run, and if as often.
MEANING = {
    "mirror": (
        "the sign of the error matters, not its size alone",
        "the sign of the error does not matter",
    ),
    "random_sign": (
        "size alone, in the same rows, is not what it takes",
        "size in the same rows is enough, whatever the signs",
    ),
    "centred": (
        "the mean of each head within a batch, its bias, is needed",
        "the failure needs no bias within a batch",
    ),
    "shuffled": (
        "the errors must belong to their rows",
        "the errors need not belong to their rows",
    ),
    "own_direction": (
        "what it does to $dK$, the gradient of the keys, is needed",
        "what it does to $dQ$ is enough",
    ),
    "dQ_alone": (
        "what it does to $dK$, the gradient of the keys, is needed",
        "what it does to $dQ$ is enough",
    ),
    "dK_alone": ("what it does to $dQ$ is needed", "what it does to $dK$ is enough"),
    "injected": (
        "the mean and rms of one step are not enough",
        "errors drawn with the mean and rms of one step are enough",
    ),
}


def answers(rows: Sequence[Mapping]) -> list[str]:
    """How each arm ended and what that says about sign, bias, row, gradient and direction."""
    arms = by_arm(rows)
    told = [_count("The error as it is", arms.get("low", []))]
    told += [_count(words, arms[name]) for name, words in SAID.items() if name in arms]
    return [*told, *verdicts(rows)]


def verdicts(rows: Sequence[Mapping]) -> list[str]:
    """What the outcomes say, and nothing else; an arm with fewer runs than a verdict says so."""
    arms = by_arm(rows)
    if not failures(arms.get("low", [])):
        return ["The failing run did not fail here, so the interventions decide nothing."]
    runs = standing(len(arms["low"]))
    told = [f"Failing run: {counted(arms['low'])} ({runs}).", *_verdicts(arms)]
    lost = lost_words(rows)
    return [*told, lost] if lost else told


def _count(words: str, rows: Sequence[Mapping]) -> str:
    steps = failed_steps(rows)
    when = "" if not steps else f", at {', '.join(f'{s:,}' for s in steps)}"
    return f"{words}: {counted(rows)}{when}."


def _verdicts(arms: Arms) -> list[str]:
    low = arms["low"]
    told = [_meaning(name, arms[name], low) for name in MEANING if name in arms]
    own = into_queries(arms)
    if own is not None and "dK_alone" in arms:
        told.append(_gradients(own, arms["dK_alone"]))
    if "own_direction" in arms:
        told += _directions(arms)
    if "all_positive" in arms and "all_negative" in arms:
        told.append(_sides(arms["all_positive"], arms["all_negative"]))
    return told


def _meaning(name: str, mine: Sequence[Mapping], low: Sequence[Mapping]) -> str:
    fewer, same = MEANING[name]
    word, p = compared(mine, low), f"p = {fewer_by_chance(mine, low):.2g}"
    p += f"; {standing(len(mine))}" if len(mine) < len(low) else ""
    if word == "as often":
        few = f" ({standing(len(mine))})" if len(mine) < len(low) else ""
        return f"{SAID[name]}: no fewer failures, so {same}{few}."
    if word == "unclear":
        return f"{SAID[name]}: fewer failures, but chance can do that ({p})."
    signs = onsets(mine)
    delayed = f", though {signs} of {len(mine)} showed an onset" if signs else ""
    return f"{SAID[name]}: fewer failures ({p}{delayed}), so {fewer}."


def into_queries(arms: Arms) -> Sequence[Mapping] | None:
    """The arm with the error in dQ alone: bit for bit if there is one, else past dS's rounding."""
    return arms.get("dQ_alone", arms.get("own_direction"))


def _gradients(own: Sequence[Mapping], keys: Sequence[Mapping]) -> str:
    """What the arms that send the error into one gradient alone say together."""
    by_q, by_k = failures(own), failures(keys)
    told = f"$dQ$ alone: {counted(own)}; $dK$ alone: {counted(keys)}"
    if not by_q and not by_k:
        return f"{told}. It takes both."
    if by_q and by_k:
        return f"{told}. Either can carry the error to the failure."
    way, few, many = ("$dQ$", keys, own) if by_q else ("$dK$", own, keys)
    p = fewer_by_chance(few, many)
    told += f". Where it failed, it failed by way of {way}"
    return f"{told} (one against the other: p = {p:.2g})."


def _directions(arms: Arms) -> list[str]:
    """Arms on direction against their control, the error in dQ alone."""
    own = arms["own_direction"]
    told = []
    if "random_direction" in arms and failures(own):
        word = {
            "fewer": "prevented failures",
            "as often": "prevented no failure",
            "unclear": "made failure rarer, as chance can",
        }[compared(arms["random_direction"], own)]
        told.append(f"With the error in $dQ$ alone, spreading its directions {word}.")
    elif not failures(own):
        told.append(
            "The error in $dQ$ alone did not fail, so the arm that spreads its directions in $dQ$ "
            "cannot say what direction does."
        )
    if "leading_direction" in arms:
        told.append(_prediction(arms["leading_direction"], own))
    return told


def _prediction(leading: Sequence[Mapping], own: Sequence[Mapping]) -> str:
    """All along R: if coherence drives the failure, it comes sooner or more often."""
    mine, theirs = failures(leading), failures(own)
    told = f"Put all along the shared direction, the error in $dQ$: {counted(leading)}"
    told += f" (along its own: {counted(own)}). It was to fail sooner or more often: "
    if mine > theirs or (mine and mine == theirs and _middle(leading) < _middle(own)):
        return told + "it did."
    if mine == theirs and onsets(leading) > onsets(own):
        return told + "it did not fail more, but showed more onsets."
    return told + "it did not."


def _middle(rows: Sequence[Mapping]) -> float:
    return sorted(failed_steps(rows))[len(failed_steps(rows)) // 2]


def _sides(positive: Sequence[Mapping], negative: Sequence[Mapping]) -> str:
    a, b = failures(positive), failures(negative)
    if a == b:
        return f"One-sided errors fail on either side alike ({a} of {len(positive)})."
    side, more, less = ("positive", a, b) if a > b else ("negative", b, a)
    return f"Of one-sided errors the {side} ones failed more often ({more} against {less})."


def sham_words(runs: Mapping, experiment: Experiment, seed: int) -> Markdown:
    """Whether the sham repeats the failing run bit for bit."""
    parent, sham = runs["low", seed], runs["sham", seed]
    same = identical_losses(parent, sham)
    word = "the failing run's, bit for bit" if same else "**not** the failing run's"
    return Markdown(f"The losses of the sham are {word}. It ended: {sham.outcome}.")


# -- the account as a whole -----------------------------------------------------------------------

# Words of `compared` for the three arms that change the sign -> what they say together.
_SIGNS = {
    "fewer": "Turned, tossed, or rid of its mean, the error fails less often. It takes its sign "
    "and its mean; its size is not enough. So far the paper is right.",
    "as often": "Turned, tossed, or rid of its mean, the error fails as often: neither its sign "
    "nor its mean matters, against the paper.",
}
_ROWS = {
    "fewer": "Errors dealt to other rows fail less often: an error belongs to its row, and not to "
    "the sum alone.",
    "as often": "Errors dealt to other rows keep their mean and fail as before. That fits "
    "$\\alpha\\,(\\sum e)\\,R$, in which only the sum counts.",
}


def account(rows: Sequence[Mapping], paths: Sequence[Mapping] = ()) -> Markdown:
    """What the interventions leave of the paper's account, link by link, in words.

    paths: records of the pair that parts the two gradients bit for bit, if there are any. A link
    that the outcomes do not decide is said to be open.
    """
    arms = by_arm(rows)
    low = arms.get("low", [])
    signs = ("mirror", "random_sign", "centred")
    if not failures(low) or any(name not in arms for name in (*signs, "shuffled")):
        return Markdown("*The interventions that would decide are not all archived.*")
    words = {compared(arms[name], low) for name in signs}
    told = {
        "sign": _SIGNS.get(words.pop(), "Open.")
        if len(words) == 1
        else "Open: the arms disagree.",
        "rows": _ROWS.get(compared(arms["shuffled"], low), "Open."),
        "path": _path(arms, by_arm(paths)),
    }
    return Markdown("\n".join(f"- **The {name}.** {words}" for name, words in told.items()))


def _path(arms: Arms, paths: Arms) -> str:
    """By which gradient: dQ alone bit for bit if it was run, dK alone in all runs there are."""
    exact = paths if "dQ_alone" in paths else arms
    low, own = exact.get("low", []), into_queries(exact)
    if own is None or not failures(low):
        return "Open: no run parts the gradients."
    ended = f"as it is {counted(low)}, in $dQ$ alone {counted(own)}"
    word, p = compared(own, low), fewer_by_chance(own, low)
    if word == "as often":
        return f"By $W_Q$, as the paper has it: the error in $dQ$ alone is enough ({ended})."
    if word == "unclear":
        return f"Open: fewer failures in $dQ$ alone, but chance can do that ({ended})."
    keys = [row for found in (arms, paths) for row in found.get("dK_alone", [])]
    every = [row for found in (arms, paths) for row in found.get("low", [])]
    return (
        "Not by $W_Q$ alone, where the paper follows it. The formula for $dW_Q$ is exact, but "
        f"with $dK$ kept clean the error fails less often ({ended}; p = {p:.2g}). "
        f"{_keys(keys, every, [arms, paths])}"
    )


def _keys(keys: Sequence[Mapping], low: Sequence[Mapping], archives: Sequence[Arms]) -> str:
    if not keys:
        return "It takes the keys."
    told = f"With $dQ$ kept clean, in all archives: {counted(keys)}, as it is {counted(low)}"
    word = {
        "fewer": "it takes both gradients, or one of them longer",
        "as often": "the gradient of the keys is enough",
        "unclear": "so few runs cannot tell whether the keys are enough",
    }[compared(keys, low)]
    worse = sum(len(lost(a.get("dK_alone", []), a.get("delta_fp32", []))) for a in archives)
    more = f" {worse} more ended at least {LOST_NATS:g} nats above their twins." if worse else ""
    return f"{told} (p = {fewer_by_chance(keys, low):.2g}): {word}.{more}"
