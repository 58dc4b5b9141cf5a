"""Where the forks of an experiment start and end, and which heads they change.

An arm such as `Arm("heads_top", "paper; {top} -> exact", ..., at=0.25)` is settled only when its
parent has run: the fork starts at a quarter of the steps that the parent took to fail, and the
head is the one whose query weights had the largest spectral norm before that. A whole number is a
step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from gpt2.fork import Fork, plan
from gpt2.outcomes import series
from gpt2.runs import Run

from .experiments import Arm, Experiment

Heads = dict[int, tuple[int, ...]]  # layer -> heads


def fork_step(parent: Run, at: int | float) -> int:
    """A step as it is; a share below 1 at the nearest checkpoint of the parent, if any."""
    if isinstance(at, int):
        return at
    steps = parent.outcome.failed_step or parent.step
    interval = parent.config.checkpoint_interval
    nearest = round(at * steps / interval) * interval
    return nearest if 0 < nearest < steps else max(1, int(at * steps))


def fork_end(parent: Run, until: float | None) -> int:
    """A multiple of the steps to failure, rounded up to hundreds; else the parent's last step."""
    failed = parent.outcome.failed_step
    if until is None or failed is None:
        return parent.config.max_steps
    return math.ceil((until * failed + 1) / 100) * 100


def plan_fork(experiment: Experiment, arm: Arm, parent: Run) -> Fork:
    """The fork that an arm asks for. Raises ForkError if the parent cannot be forked so."""
    attention = arm.attention
    if "{" in attention:
        config = parent.config
        failed = parent.outcome.diverged_from or parent.step
        attention = spell_out(
            attention, head_groups(parent.metrics(), failed, seed=config.init_seed)
        )
    changes = {"attention": attention} | dict(arm.changes)
    at, until = fork_step(parent, arm.at), fork_end(parent, experiment.until)
    return plan(parent, at, changes, name=arm.label, until=until)


def head_groups(metrics: Mapping, before: int, *, seed: int) -> dict[str, Heads]:
    """Heads by the spectral norm of W_Q at the last probe up to step `before`, in hindsight.

    top       the head of the largest norm of all
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
    worst, top = divmod(int(last.argmax()), heads)
    order = np.argsort(-last[worst], kind="stable")
    outliers = [(worst, int(h)) for h in order[: max(1, heads // 2)]]
    rest = [(i, j) for i in range(layers) for j in range(heads) if (i, j) not in outliers]
    drawn = np.random.default_rng(seed).choice(len(rest), min(len(outliers), len(rest)), False)
    groups = {"top": [(worst, top)], "outliers": outliers, "rest": rest}
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
