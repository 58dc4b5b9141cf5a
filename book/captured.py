"""Heads captured from the failing run of chapter 1: trained once, kept in the run store.

The run is the `low` arm of the failure experiment with one more probe, which writes q, k, v, dO, X
and W_Q of some heads to disk as it goes. A probe changes no bit of a run, so this is chapter 1's
run up to where it is stopped. Chapters take their heads from here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from gpt2.config import RunConfig
from gpt2.runs import Run, RunStore
from gpt2.train import train
from kernels.forensics import Head, load_head
from kernels.numerics import Numerics

from . import DATA, RUNS
from .experiments import failure


@dataclass(frozen=True)
class Plan:
    """Which heads (as `gpt2.capture` writes places), every how many steps, until which step."""

    place: str
    every: int
    until: int


PLANS = {"cpu": Plan("L0+1x16", 100, 4_500), "mini": Plan("L1x1", 250, 6_000)}
ELSEWHERE = Plan("worstx4", 5_000, 600_000)


def captured_config(preset: str, seed: int = 0, plan: Plan | None = None) -> RunConfig:
    """The failing arm of chapter 1 with its probes, a capture and dO's answer to the rounding.

    Its own captures, if it has any, are all.
    """
    plan = plan or PLANS.get(preset, ELSEWHERE)
    experiment = failure(preset)
    config = experiment.arm("low").config(experiment, seed)
    if any(name.startswith("capture") for name in config.probes):
        return config
    every = max(1, plan.every // 2)
    told = (f"capture@{plan.every}:{plan.place}", f"delta_answer@{every}")
    return config.at(probes=(*config.probes, *told))


def captured_run(
    preset: str,
    seed: int = 0,
    plan: Plan | None = None,
    *,
    progress: bool = True,
    store: str | Path = RUNS,
    cache_dir: str | Path = DATA,
) -> Run:
    """Train it (or load it) up to the plan's last step, or to its failure if that comes first."""
    plan = plan or PLANS.get(preset, ELSEWHERE)
    config = captured_config(preset, seed, plan)
    until = min(plan.until, config.max_steps)
    return train(
        config, store=RunStore(store), cache_dir=cache_dir, max_steps=until, progress=progress
    )


@dataclass(frozen=True)
class Captured:
    """One head at one step; `head` is read when asked for."""

    path: Path
    step: int
    layer: int
    place: int  # the head's number in its layer
    numerics: Numerics

    @cached_property
    def head(self) -> Head:
        return load_head(self.path)

    @cached_property
    def spectral_norm(self) -> float:
        """Of W_Q, as chapter 1 draws it."""
        return float(torch.linalg.matrix_norm(self.head.W_Q.double(), 2))

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.place}, step {self.step:,}"


def captured_heads(paths: Iterable[Path]) -> list[Captured]:
    """Captures by step, layer and head. Raises ValueError where there are none."""
    found = []
    for path in paths:
        if path.suffix == ".npz":
            with np.load(path) as file:
                numerics = Numerics.from_dict(json.loads(str(file["numerics"])))
                where = (int(file[n]) for n in ("step", "layer", "head"))
                found.append(Captured(path, *where, numerics))
    if not found:
        raise ValueError("the run has no captures; give it a probe such as capture@100:L0")
    return sorted(found, key=lambda c: (c.step, c.layer, c.place))


def worst_head(heads: list[Captured]) -> list[Captured]:
    """The captures of the head whose spectral norm grew most, by step."""
    series: dict[tuple[int, int], list[Captured]] = {}
    for captured in heads:
        series.setdefault((captured.layer, captured.place), []).append(captured)
    longest = max(map(len, series.values()))
    whole = [s for s in series.values() if len(s) == longest]
    return max(whole, key=lambda s: s[-1].spectral_norm / s[0].spectral_norm)


def steepest(series: list[Captured]) -> Captured:
    """The capture before the largest growth of the spectral norm, up to the next capture."""
    growth = [b.spectral_norm - a.spectral_norm for a, b in zip(series, series[1:])]
    return series[int(np.argmax(growth))] if growth else series[-1]


def pooled(series: list[Captured]) -> Head:
    """Several captures of a head as one, its sequences one after the other (without X, W_Q)."""
    heads = [c.head for c in series]
    return Head(*(torch.cat([getattr(h, n) for h in heads]) for n in ("q", "k", "v", "dO")))
