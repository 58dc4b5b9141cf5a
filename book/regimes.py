"""Regimes in which low precision fails: what is trained, what is low in it, and for how long.

`REGIMES` are those of the chapters. `RECIPES` are candidates for a failure of bf16 itself on a
GPU, declared here before any was run; `python -m book.recipes` tries them. Each departs from its
preset in shape, batch, learning rate, vocabulary or AdamW's beta2 alone: weights, data and
precision are what they say. Every experiment of the book can be asked for in any of them:
`python -m book.evidence dials --recipe tiny`.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from gpt2.config import RunConfig, make_config
from gpt2.outcomes import HEALTHY_FACTOR

# The book's failing regime without a GPU: the paper's low precision with every bf16 site cut to
# 2 fraction bits. Scores are rounded as well, so rows do tie.
LOW = "paper,matched_bits=2"
# The same on one GPU, in a model of six layers: O_bar and O keep 4 of bf16's 7 fraction bits.
LOW_MINI = "paper,output_bits=4"
CHECKPOINTS = 18  # that the failing run leaves behind for forks, evenly over its longest course


@dataclass(frozen=True)
class Regime:
    """How a preset is made to fail, and which part of that run the forks of chapter 2 see.

    low: numerics that fail. steps: most steps of a run. at: where forks start, a step or a share
    of the steps that it took to fail, before its onset. until: where they end, a share.
    changes: settings that depart from the preset. captures: probes of the failing run that keep
    heads for chapters 3 and 4, where it is too dear to be trained once more for them.
    """

    low: str
    steps: int
    at: int | float = 0.25
    until: float = 1.5
    preset: str = "cpu"
    changes: tuple[tuple[str, object], ...] = ()
    captures: tuple[str, ...] = ()

    @property
    def base(self) -> tuple[tuple[str, object], ...]:
        """Settings of every run in this regime, the learning rate's schedule included."""
        return (("max_steps", self.steps), *self.changes)

    @property
    def forkable(self) -> tuple[tuple[str, object], ...]:
        """A run that others fork from keeps its states; this is no part of its identity.

        Its captures are, though they change no bit of it.
        """
        interval = max(1, self.steps // CHECKPOINTS)
        kept = (("checkpoint_interval", interval), ("keep_checkpoints", CHECKPOINTS + 6))
        return (*kept, ("probes", self.captures)) if self.captures else kept

    @property
    def config(self) -> RunConfig:
        return make_config(self.preset, dict(self.base))

    @property
    def most(self) -> int:
        """Steps within which the low-precision run must fail, so that its twin can outlive it."""
        return math.floor(self.steps / HEALTHY_FACTOR)


REGIMES = {
    "cpu": Regime(LOW, 4_500, at=250),
    "mini": Regime(  # compiling takes a minute a process, more than it saves in 2,000 steps
        LOW_MINI,
        6_000,
        at=0.5,
        preset="mini",
        changes=(("compile", "off"),),
        captures=("capture@250:L1x1", "delta_answer@250"),
    ),
}


# -- candidates for bf16 itself -------------------------------------------------------------------


def _recipe(preset: str, steps: int, **changes) -> Regime:
    return Regime("paper", steps, preset=preset, changes=tuple(changes.items()))


def _tiny(steps: int = 180_000, **changes) -> Regime:
    """The cpu preset's shape with bf16 as it is. Two probes fall into the 200 steps of the onset
    rule and take about 2 % of the time."""
    common = dict(device="auto", dtype="bfloat16", probe_interval=200, eval_interval=5_000)
    return _recipe("cpu", steps, **(common | dict(checkpoint_interval=10_000) | changes))


def _small(steps: int = 60_000, **changes) -> Regime:
    """Four layers of four heads of 64, context 256, bytes of all the text there is."""
    shape = dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=32)
    common = dict(tokenizer="bytes", eval_interval=2_500, checkpoint_interval=5_000)
    return _recipe("mini", steps, **(shape | common | changes))


def _mini(steps: int = 27_000, **changes) -> Regime:
    return _recipe("mini", steps, **(dict(checkpoint_interval=2_000) | changes))


RECIPES = {  # in the order in which they are tried; those that are decided come last
    "mini-lr3": _mini(36_000),
    "mini-d3-lr3": _mini(48_000, n_layer=3),
    "mini-d2-lr3": _mini(60_000, n_layer=2),
    "mini-t1024-lr3": _mini(36_000, block_size=1024, batch_size=32),
    "mini-d2-t1024-lr3": _mini(60_000, n_layer=2, block_size=1024, batch_size=32),
    "mini-d2-h3-lr3": _mini(60_000, n_layer=2, n_head=3),
    "mini-d2-w192-lr3": _mini(90_000, n_layer=2, n_head=3, n_embd=192),
    "mini-d12-w192-lr3": _mini(60_000, n_layer=12, n_head=3, n_embd=192),
    "mini-lr2": _mini(48_000, learning_rate=2e-3),
    "mini-lr5": _mini(learning_rate=5e-3),
    "mini-b16-lr4": _mini(60_000, learning_rate=4e-3, batch_size=16),
    "mini-b32-lr4": _mini(48_000, learning_rate=4e-3, batch_size=32),
    "small-lr10": _small(learning_rate=1e-2),
    "mini-b16-lr3": _mini(60_000, batch_size=16),
    "small-lr6": _small(learning_rate=6e-3),
    "tiny": _tiny(),
    "mini-lr8": _mini(learning_rate=8e-3),
    "tiny-b64": _tiny(batch_size=64),
    "tiny-b64-lr20": _tiny(batch_size=64, learning_rate=2e-2),
    "small-bpe-lr6": _small(learning_rate=6e-3, tokenizer="bpe:8192"),
    "small-lr3": _small(learning_rate=3e-3),
    "mini-b32-lr5": _mini(36_000, learning_rate=5e-3, batch_size=32),
    "tiny-beta99": _tiny(beta2=0.99),
    "tiny-beta999": _tiny(beta2=0.999),
    "small-lr6-beta99": _small(learning_rate=6e-3, beta2=0.99),
    "small-lr6-beta999": _small(learning_rate=6e-3, beta2=0.999),
    "mini-lr5-beta99": _mini(learning_rate=5e-3, beta2=0.99),
    "mini-lr5-beta999": _mini(learning_rate=5e-3, beta2=0.999),
    "tiny-lr20": _tiny(learning_rate=2e-2),
    "mini-b16-lr5": _mini(60_000, learning_rate=5e-3, batch_size=16),
    "mini-b16-lr8": _mini(60_000, learning_rate=8e-3, batch_size=16),
}


def get_recipe(name: str) -> Regime:
    """A recipe by name. Raises ValueError naming the nearest one."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(RECIPES)}"
        raise ValueError(f"unknown recipe {name!r}{hint}")
    return RECIPES[name]


def regime(name: str) -> Regime:
    """The regime of that name, a recipe, or that of a preset: `paper` for all of its steps."""
    if name in REGIMES or name in RECIPES:
        return (REGIMES | RECIPES)[name]
    return Regime("paper", make_config(name).max_steps, preset=name)
