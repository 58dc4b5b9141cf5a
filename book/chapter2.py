"""Words, comparisons and the layer search of chapter 2, made from records of runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from IPython.display import Markdown

from gpt2.ddmin import Trace, minimise
from gpt2.fork import fork, identical_losses
from gpt2.minimise import Unit, units_of, upcast
from gpt2.outcomes import Outcome
from gpt2.runs import Run
from kernels.numerics import ScopedNumerics

from .evidence import Archive
from .experiments import Experiment
from .forks import fork_end, fork_step
from .isolation_figures import layer_means, worst_layer
from .records import head_curves, judge
from .regimes import REGIMES
from .tables import markdown_table
from .verdicts import first_sign

STATES = {  # of a search, in words
    "minimal": "none can go",
    "needless": "the run lived without any",
    "unstable": "not even all help",
    "budget": "stopped; may be smaller",
}


def no_archive(name: str) -> Markdown:
    """What stands in the place of a figure whose archive is not there.

    name: module and argument. An experiment in another preset's regime bears its name at the end,
    `evidence isolation-mini`, and is asked for with `--recipe mini`.
    """
    for regime in REGIMES:
        if name.endswith(f"-{regime}"):
            name = f"{name.removesuffix(f'-{regime}')} --recipe {regime}"
    return Markdown(f"*No archive for this preset yet; `python -m book.{name}` makes one.*")


# -- what is run ----------------------------------------------------------------------------------


def arms_table(experiment: Experiment) -> Markdown:
    """Every intervention: its kind, label, numerics, and what comes to the same numbers."""
    lines = []
    for arm in experiment.arms:
        also = "; ".join(arm.also) or "-"
        lines.append([arm.group, arm.label, f"`{arm.attention}`", also])
    return markdown_table(["kind", "intervention", "attention", "the same numbers"], lines)


def control_words(experiment: Experiment, runs: Mapping, seed: int) -> Markdown:
    """Whether the unchanged fork repeats its parent bit for bit and fp32 throughout lives."""
    parent, same, exact = (runs[name, seed] for name in (experiment.parent, "same", "exact"))
    repeats = identical_losses(parent, same)
    told = [
        f"The unchanged fork starts at step {same.parent.step:,}. Its training losses are "
        + ("those of its parent, bit for bit" if repeats else "**not** those of its parent")
        + f". Parent: {parent.outcome}. Fork: {same.outcome}.",
        f"Everything in fp32 from the same step: {exact.outcome}.",
    ]
    ends = same.outcome.failed_step
    if ends is not None and repeats and not exact.outcome.failed:
        told.append(
            "Both controls hold, so a fork that lives differs from one that dies by its change."
        )
    else:
        told.append("**The controls do not hold here, so the forks below decide nothing.**")
    return Markdown("\n".join(f"- {sentence}" for sentence in told))


# -- searches -------------------------------------------------------------------------------------


def search(
    experiment: Experiment,
    runs: Mapping,
    seed: int,
    units: Sequence[str],
    spell: Callable[[Sequence[str]], str],
    *,
    budget: int | None = None,
    until_time: float = math.inf,
    **options,
) -> Trace:
    """Delta debugging: the smallest set of units whose upcast keeps the failing run alive.

    spell: the attention text in which these units are fp32. A set helps if its fork neither failed
    nor showed an onset, by the rules that all arms are judged by. What some arm has run is looked
    up; for the rest at most `budget` forks are trained (options of `gpt2.fork.fork`), and none is
    begun after `until_time` (of `time.time`).
    """
    parent = runs[experiment.parent, seed]
    config = parent.config
    of_seed = {name: run for (name, s), run in runs.items() if s == seed}
    known = {_numbers(run.config.attention, config): name for name, run in of_seed.items()}
    known[_numbers(config.attention, config)] = experiment.parent
    at = fork_step(parent, next(a.at for a in experiment.arms if a.at is not None))
    left = float("inf") if budget is None else budget

    def is_stable(names: tuple[str, ...]) -> tuple[bool, dict]:
        nonlocal left
        text = spell(names)
        name = known.get(_numbers(text, config), text)
        if name not in of_seed:
            if left < 1 or time.time() > until_time:
                raise _NotOnHand
            left -= 1
            until = fork_end(parent, experiment.until)
            of_seed[name] = fork(parent, at, {"attention": text}, until=until, **options)
        outcome = judge(experiment, of_seed)[name]
        return outcome.kind in ("healthy", "stable"), {"outcome": _brief(outcome)}

    trace = Trace(tuple(units))
    try:
        return minimise(trace.units, is_stable, trace=trace)
    except _NotOnHand:
        trace.state = "budget"
        stable = [q.units for q in trace.questions if q.answer]
        trace.result = min(stable, key=len, default=None)
        return trace


def search_layers(experiment: Experiment, runs: Mapping, seed: int, **options) -> Trace:
    """`search` with a layer's whole attention as the unit; two layers need no further fork."""
    config = runs[experiment.parent, seed].config
    layers = [f"L{i}" for i in range(config.n_layer)]

    def spell(names: Sequence[str]) -> str:
        return "; ".join([config.attention, *(f"{layer} -> exact" for layer in names)])

    return search(experiment, runs, seed, layers, spell, **options)


def search_sites(experiment: Experiment, runs: Mapping, seed: int, *, by: str, **options) -> Trace:
    """`search` with one site of a head, of a layer or of the model as the unit (`by`)."""
    config = runs[experiment.parent, seed].config
    units = units_of(config.attention, config.n_layer, config.n_head, by=by)

    def spell(names: Sequence[str]) -> str:
        chosen = [Unit.parse(name) for name in names]
        return upcast(config.attention, chosen, config.n_layer, config.n_head)

    return search(experiment, runs, seed, [str(u) for u in units], spell, **options)


def _brief(outcome: Outcome) -> dict:
    kept = ("kind", "last_step", "diverged_step", "nonfinite_step", "held_out_loss")
    return {name: getattr(outcome, name) for name in kept}


class _NotOnHand(Exception):
    pass


def _numbers(attention: str, config) -> tuple:
    scoped = ScopedNumerics.parse(attention)
    return tuple(scoped.for_layer(i, config.n_head) for i in range(config.n_layer))


def search_words(trace: Trace) -> str:
    """The end of a search in a sentence."""
    asked = f"{len(trace.questions)} questions"
    units = ", ".join(trace.result or ()) or "nothing"
    return {
        "minimal": f"After {asked}: enough in fp32 is {units}, and no part of that set is enough.",
        "unstable": "Not even all units in fp32 keep this run alive: the cause lies elsewhere.",
        "needless": "The run lives without any change, so there is nothing to search for.",
        "budget": f"The budget ended after {asked}; the smallest set so far: {units}.",
    }.get(trace.state, f"The search is not at its end after {asked}.")


def search_table(kept: Archive) -> Markdown:
    """One line per archived search: seed, where it forked, questions, and what was enough."""
    lines = []
    for row in kept.rows:
        trace = Trace.from_dict(row["trace"])
        found = ", ".join(f"`{u}`" for u in trace.result or ()) or "nothing"
        lines.append([row["seed"], f"{row['at']:,}", f"{row['until']:,}", len(trace.questions)])
        lines[-1] += [STATES.get(trace.state, trace.state), found]
    header = ["seed", "forked at", "alive at", "questions", "end", "smallest set in fp32"]
    return markdown_table(header, lines)


# -- before the onset -----------------------------------------------------------------------------


def as_record(run: Run, names: Sequence[str]) -> dict:
    """The per-head metrics of a run, as records of archives keep them."""
    return {"heads": head_curves(run.metrics(), names)}


def before_signs(rows: Sequence[Mapping]) -> int:
    """The step up to which nothing shows in any run (`verdicts.first_sign`)."""
    return min(first_sign(row) for row in rows)


def layer_findings(rows: Sequence[Mapping], names: Sequence[str], before: int) -> Markdown:
    """Mean over heads of each metric per layer at the last common step up to `before`.

    The last columns say in how many of the runs the larger value is that of the layer named, and
    in how many it is that of the layer in which the run's norm grew most in the end.
    """
    lines, layers = [], 0
    grew = np.array([worst_layer(row) for row in rows])
    for name in names:
        steps, means = layer_means(rows, name, before)
        last = means[:, -1, :]
        layers = last.shape[1]
        largest = np.nanargmax(last, axis=1)
        top = np.bincount(largest, minlength=layers)
        told = f"layer {int(top.argmax())} in {int(top.max())} of {len(last)}"
        values = [f"{x:.3g}" for x in np.nanmean(last, axis=0)]
        lines.append([f"`{name}`", f"{steps[-1]:,}", *values, told])
        lines[-1].append(f"{int((largest == grew).sum())} of {len(last)}")
    header = ["metric", "step", *(f"layer {i}" for i in range(layers)), "largest in"]
    return markdown_table([*header, "... which is the layer that grew most later"], lines)


def grew_words(rows: Sequence[Mapping]) -> str:
    """In which layer the largest norm of each run was reached, as 'layer 1 in 4 of 5 runs'."""
    counts = np.bincount([worst_layer(row) for row in rows])
    return ", ".join(
        f"layer {layer} in {count} of {len(rows)} runs"
        for layer, count in enumerate(counts)
        if count
    )


def lead_words(rows: Sequence[Mapping], names: Sequence[str], before: int) -> str:
    """How well the best metric tells, before any sign, the layer that grew most; two layers only.

    Either way round: always the larger value, or always the smaller. Beside it what coins do.
    """
    grew = np.array([worst_layer(row) for row in rows])
    hits = {}
    for name in names:
        last = layer_means(rows, name, before)[1][:, -1, :]
        if last.shape[1] != 2:
            return ""
        agreed = int((np.nanargmax(last, axis=1) == grew).sum())
        hits[name] = max(agreed, len(rows) - agreed)
    best, n = max(hits.values()), len(rows)
    coin = min(1.0, 2 * sum(math.comb(n, k) for k in range(best, n + 1)) / 2**n)
    chance = 1 - (1 - coin) ** len(names)
    leaders = ", ".join(f"`{name}`" for name, count in hits.items() if count == best)
    return (
        f"Best at telling beforehand which layer would grow most: {leaders}, right in {best} of "
        f"{n} runs, one way round or the other. Of {len(names)} coins one would do as well with "
        f"a probability of {chance:.0%}."
    )
