"""Where the forks of an experiment start and end, and which heads they change.

An arm such as `Arm("heads_top", "paper; {top} -> exact", ..., at=0.25)` is settled only when its
parent has run: the fork starts at a quarter of the steps that the parent took to fail, and the
head is the one whose query weights had the largest spectral norm before that. A whole number is a
step.

Where the failing run has an onset and no divergence (`Experiment.onsets`), shares of a failure do
not exist. Then forks start at BEFORE_ONSET of the steps to the onset and end at AFTER_ONSET of
them, so that a fork without one can outlive it by `gpt2.outcomes.HEALTHY_FACTOR`; the parent is
trained no farther than to where they start. Rows tie well before that counts as an onset, and a
fork whose state has many ties cannot be judged by them (`gpt2.outcomes.ties_can_show`): at 0.9 of
the steps to an onset at 4,400 it was 30 % of the rows. The onset's own head leads the groups of
heads where it is known. A fork is judged by onset against the fork with delta from an fp32 O,
whose running maximum begins where the forks do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from gpt2.fork import Fork, plan
from gpt2.outcomes import Onset, series
from gpt2.runs import Run

from .experiments import Arm, Experiment

Heads = dict[int, tuple[int, ...]]  # layer -> heads

BEFORE_ONSET = 0.8
AFTER_ONSET = 1.6


def fork_step(parent: Run | None, at: int | float, onset: Onset | None = None) -> int:
    """A step as it is; a share below 1 at the nearest checkpoint of the parent, if any.

    onset: places the fork whatever the share; the parent is not asked.
    """
    if isinstance(at, int):
        return at
    if onset is not None:
        return max(1, int(BEFORE_ONSET * onset.step))
    steps = parent.outcome.failed_step or parent.step
    interval = parent.config.checkpoint_interval
    nearest = round(at * steps / interval) * interval
    return nearest if 0 < nearest < steps else max(1, int(at * steps))


def fork_end(parent: Run, until: float | None, onset: Onset | None = None) -> int:
    """A multiple of the steps to failure, rounded up to hundreds; else the parent's last step."""
    if onset is not None:
        return math.ceil(AFTER_ONSET * onset.step / 100) * 100
    failed = parent.outcome.failed_step
    if until is None or failed is None:
        return parent.config.max_steps
    return math.ceil((until * failed + 1) / 100) * 100


def plan_fork(experiment: Experiment, arm: Arm, parent: Run) -> Fork:
    """The fork that an arm asks for. Raises ForkError if the parent cannot be forked so."""
    onset = experiment.onset(parent.config.init_seed)
    at = fork_step(parent, arm.at, onset)
    until = fork_end(parent, experiment.until, onset)
    changes = {"attention": arm.attention} | dict(arm.changes)
    if "{" in arm.attention or any("{" in probe for probe in changes.get("probes", ())):
        groups = _groups(parent, onset)
        changes["attention"] = spell_out(arm.attention, groups)
        if "probes" in changes:
            words = _moments(parent, at, until, onset) | _first_heads(groups)
            changes["probes"] = tuple(probe.format(**words) for probe in changes["probes"])
    return plan(parent, at, changes, name=arm.label, until=until)


def _groups(parent: Run, onset: Onset | None) -> dict[str, Heads]:
    failed = parent.outcome.diverged_from or parent.step
    known = onset is not None and onset.layer is not None
    top = (onset.layer, onset.head) if known else None
    return head_groups(parent.metrics(), failed, seed=parent.config.init_seed, top=top)


def _moments(parent: Run, at: int, until: int, onset: Onset | None) -> dict[str, int]:
    """Steps that the probes of a fork may name: its first, the onset's, and its last.

    Where the parent diverged, its excursion's first step and the last one before the verdict.
    """
    outcome = parent.outcome
    sign = onset.step if onset is not None else outcome.diverged_from or (at + until) // 2
    last = until if onset is not None else outcome.failed_step or until
    return {"first": at, "sign": sign, "last": last - 1}


def _first_heads(groups: Mapping[str, Heads]) -> dict[str, str]:
    """The first head of each group, as places of captures are written."""
    return {
        name: heads_text({layer: heads[:1]})[0]
        for name, group in groups.items()
        for layer, heads in list(group.items())[:1]
    }


def head_groups(
    metrics: Mapping, before: int, *, seed: int, top: tuple[int, int] | None = None
) -> dict[str, Heads]:
    """Heads by the spectral norm of W_Q at the last probe up to step `before`, in hindsight.

    top       the head of the largest norm of all, or (layer, head) if given
    quiet     the head of the smallest norm in that head's layer
    outliers  the larger half of the heads of that head's layer
    rest      all other heads of the model
    sham      as many of `rest` as there are outliers, drawn with `seed`
    """
    steps, norms = series(metrics, "spectral_norm_q")
    if not len(steps):
        raise ValueError("the parent run has no spectral norms to choose heads by; probe it")
    last = norms[max(np.searchsorted(steps, before, side="right") - 1, 0)]
    last = np.nan_to_num(last, nan=-1.0)
    layers, heads = last.shape
    if top is None:
        top = divmod(int(last.argmax()), heads)
    worst = top[0]
    order = sorted(range(heads), key=lambda head: (head != top[1], -last[worst, head]))
    outliers = [(worst, int(h)) for h in order[: max(1, heads // 2)]]
    rest = [(i, j) for i in range(layers) for j in range(heads) if (i, j) not in outliers]
    drawn = np.random.default_rng(seed).choice(len(rest), min(len(outliers), len(rest)), False)
    groups = {"top": [top], "outliers": outliers, "rest": rest, "quiet": [(worst, order[-1])]}
    groups["sham"] = [rest[i] for i in drawn]
    return {name: _by_layer(group) for name, group in groups.items()}


def _by_layer(heads: list[tuple[int, int]]) -> Heads:
    layers = sorted({layer for layer, _ in heads})
    return {i: tuple(sorted(h for layer, h in heads if layer == i)) for i in layers}


def heads_text(heads: Heads) -> list[str]:
    """['L0H1', 'L1H0+3'], as scopes are written."""
    return [f"L{layer}H{'+'.join(map(str, chosen))}" for layer, chosen in heads.items()]


def spell_out(attention: str, groups: Mapping[str, Heads]) -> str:
    """'low; {rest} -> exact' with the group's heads, one scope a layer."""
    base, *scopes = attention.split(";")
    out = [base]
    for scope in scopes:
        match = re.fullmatch(r"\s*\{(\w+)\}\s*->(.*)", scope)
        if match is None:
            out.append(scope)
            continue
        if match[1] not in groups:
            raise ValueError(f"no group of heads is named {match[1]!r}; there are {list(groups)}")
        out += [f" {where} ->{match[2]}" for where in heads_text(groups[match[1]])]
    return ";".join(out)
