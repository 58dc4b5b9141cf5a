"""Findings: verdicts, the effects behind them, and the archives that rules read.

**The rules of verdict, stated before any of the runs that they judge.**

supported            at least `VERDICT_RUNS` runs in each arm, and the outcome is the claimed one:
                     each rule says what that means (an exact test at 5 %, an interval that
                     excludes the alternative, a share of at least 4 of 5).
partly               as many runs; the outcome goes the claimed way, but not far enough, not in
                     every setting, or with signs of the trouble that should be absent.
not supported here   as many runs; the outcome is another one. "Here" is meant: in our settings.
observed             fewer runs in some arm: the effect says which way they point. Or runs that
                     cannot decide however many they are: the effect says why.
not tested           no run that could decide is archived; the claim names the command.

What is computed rather than run (arithmetic, identities) has no runs and no seeds: it is supported
or it is not.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from gpt2.config import RunConfig, make_config
from gpt2.outcomes import VERDICT_RUNS
from kernels.numerics import Numerics
from kernels.scope import ScopedNumerics

from .. import RESULTS
from ..evidence import Archive, archives, counting
from ..experiments import EXPERIMENTS
from ..onsets import judged
from ..records import one_a_seed
from ..regimes import RECIPES, get_recipe

SUPPORTED, PARTLY, NOT_SUPPORTED = "supported", "partly", "not supported here"
OBSERVED, NOT_TESTED = "observed", "not tested"
VERDICTS = (SUPPORTED, PARTLY, NOT_SUPPORTED, OBSERVED, NOT_TESTED)
POINTS = {
    SUPPORTED: "as claimed",
    PARTLY: "partly as claimed",
    NOT_SUPPORTED: "against the claim",
}
MOST = 0.8  # four runs of five
SEARCH = "recipes"  # the one archive whose rows are of several experiments


class Effect(NamedTuple):
    """One effect in words. where: the regime. beside: what it is compared with. points: of an
    observation, which way it points."""

    words: str
    where: str = ""
    beside: str = ""
    points: str = ""


@dataclass(frozen=True)
class Finding:
    """What a rule found: a verdict and its effects, over how many runs (of the smallest arm).

    strength: the cautious end of the effect's interval as a share of 1, to rank findings by.
    sources: the archives, one phrase each.
    """

    verdict: str
    effects: tuple[Effect, ...]
    runs: int = 0
    seeds: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    strength: float = 0.0

    @property
    def lines(self) -> list[str]:
        """The effects in words, one line a regime; what effects share is said once."""
        groups = itertools.groupby(dict.fromkeys(self.effects), key=lambda e: e.where)
        told = ((where, _joined(list(group), _SAID_ONCE)) for where, group in groups)
        return [f"{where}: {words}" if where else words for where, words in told]

    @property
    def effect(self) -> str:
        return "; ".join(self.lines)


_SAID_ONCE = (("beside", "; "), ("points", ", "))


def _joined(effects: Sequence[Effect], said_once: Sequence[tuple[str, str]]) -> str:
    if not said_once:
        return "; ".join(e.words for e in effects)
    (name, mark), *rest = said_once
    groups = itertools.groupby(effects, key=lambda e: getattr(e, name))
    told = ((said, _joined(list(group), rest)) for said, group in groups)
    return "; ".join(f"{said}{mark}{words}" if said else words for said, words in told)


def standing(
    verdict: str,
    words: str,
    runs: int,
    *,
    where: str = "",
    beside: str = "",
    unfit: str = "",
    **more,
) -> Finding:
    """A finding from runs: with too few of them the verdict becomes its direction, observed.

    unfit: why these runs cannot have a verdict however many there are; said in its place.
    """
    few = runs < VERDICT_RUNS or unfit
    effect = Effect(words, where, beside, unfit or (POINTS[verdict] if few else ""))
    return Finding(OBSERVED if few else verdict, (effect,), runs, **more)


NOTHING = "no archived run decides this"


def untested(why: str = NOTHING) -> Finding:
    return Finding(NOT_TESTED, (Effect(why),))


def computed(holds: bool, words: str) -> Finding:
    """A finding of arithmetic, with neither runs nor seeds."""
    return Finding(SUPPORTED if holds else NOT_SUPPORTED, (Effect(words),))


def combine(parts: Sequence[Finding]) -> Finding:
    """One finding from several settings or arms of the same claim.

    Parts with a verdict of their own decide, and must agree; observed parts are told but decide
    only where nothing else does; what was not tested is left out unless nothing was.
    """
    tested = [p for p in parts if p.verdict != NOT_TESTED]
    if not tested:
        return next((p for p in parts if p.effect != NOTHING), parts[0])
    decided = [p for p in tested if p.verdict != OBSERVED]
    found = {p.verdict for p in decided or tested}
    return Finding(
        verdict=found.pop() if len(found) == 1 else PARTLY,
        effects=tuple(e for p in tested for e in p.effects),
        runs=min(p.runs for p in decided or tested),
        seeds=tuple(sorted({s for p in tested for s in p.seeds})),
        sources=tuple(dict.fromkeys(s for p in tested for s in p.sources)),
        strength=min(p.strength for p in decided or tested),
    )


# -- what rules read ------------------------------------------------------------------------------


@dataclass
class Evidence:
    """The archives below a folder of results, each read once.

    Rows of a search over recipes are told apart: `recipes/tiny` is an experiment of its own.
    """

    folder: Path = RESULTS
    _read: dict[str, list[Archive]] = field(default_factory=dict, repr=False)

    def archives(self, name: str) -> list[Archive]:
        """All archives of an experiment, oldest first."""
        if name not in self._read:
            whole, _, recipe = name.partition("/")
            found = archives(whole, self.folder)
            self._read[name] = _of_recipe(found, recipe) if recipe else found
        return [a for a in self._read[name] if a.rows]

    def names(self, pattern: str) -> list[str]:
        """Archived experiments of that name, which may end in *; recipes one by one."""
        folders = sorted(p.name for p in self.folder.glob(pattern) if p.is_dir())
        found = []
        for name in folders:
            rows = [r for a in self.archives(name) for r in a.rows] if name == SEARCH else []
            recipes = dict.fromkeys(row["recipe"] for row in rows)
            found += [f"{name}/{recipe}" for recipe in recipes] or [name]
        return found

    def archive(self, name: str) -> Archive | None:
        """The archive of an experiment that counts (`book.evidence.counting`), or None."""
        return counting(self.archives(name))

    def document(self, name: str) -> dict | None:
        """The newest archive that is one object without rows (`llama-ties`), or None."""
        found = [json.loads(p.read_text()) for p in (self.folder / name).glob("*.json")]
        return max(found, key=lambda told: told["date"], default=None)


def _of_recipe(found: Sequence[Archive], recipe: str) -> list[Archive]:
    """One archive of all runs of a recipe, whose twins may have been trained on another day.

    Its provenance is the newest of them.
    """
    of = [a for a in found if any(row["recipe"] == recipe for row in a.rows)]
    rows = [row for archive in of for row in archive.rows if row["recipe"] == recipe]
    return [replace(of[-1], rows=one_a_seed(judged(rows)))] if of else []


def source(name: str, archive: Archive) -> str:
    """'failure: 16-core x86_64 CPU, 2026-11-29, not complete'."""
    told = f"{name}: {archive.machine}, {archive.provenance['date']}"
    return told if archive.complete else f"{told}, not complete"


def numerics_of(row: Mapping) -> Numerics:
    """The attention of a run, outside any scope of layers and heads."""
    return ScopedNumerics.parse(row["attention"]).base


def fraction_bits(row: Mapping) -> int:
    """Fraction bits to which a run rounds O_bar: 7 in bf16."""
    return numerics_of(row).unnormalized.format.fraction_bits


def regime(name: str, archive: Archive, row: Mapping) -> str:
    """What a failing run of an experiment rounds, and where: 'bf16 cut to 2 fraction bits, cpu
    preset', with the optimiser and the size where the experiment is about another one."""
    n = numerics_of(row)
    low, rest = (s.format.fraction_bits for s in (n.unnormalized, n.probabilities))
    if low == 7 and rest == 7:
        words = "bf16"
    elif low == rest:
        words = f"bf16 cut to {low} fraction bits"
    else:
        words = f"Ō and O cut to {low} fraction bits"
    recipe = recipe_of(archive, row)
    where = f"recipe {recipe}" if recipe else f"{archive.provenance['preset']} preset"
    return ", ".join([words, where, *_setting(name)])


def _setting(name: str) -> list[str]:
    """How an experiment departs from its preset in optimiser and size."""
    base = dict(EXPERIMENTS[name].base) if name in EXPERIMENTS else {}
    size = [f"{base['n_layer']} layers of {base['n_embd']}"] if "n_layer" in base else []
    return [*size, *([base["optimizer"].capitalize()] if "optimizer" in base else [])]


def recipe_of(archive: Archive, row: Mapping) -> str | None:
    """The recipe of `book.regimes` that a run was trained in, if it was one."""
    told = archive.provenance.get("command", "").partition("--recipe ")[2].split()
    return row.get("recipe") or next((name for name in told[:1] if name in RECIPES), None)


def model_of(archive: Archive, row: Mapping) -> RunConfig:
    """The shape of the model that a run trained, up to what its arm changes."""
    recipe = recipe_of(archive, row)
    return get_recipe(recipe).config if recipe else make_config(archive.provenance["preset"])


# -- the register of rules ------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A function that judges. takes: what comes before its own parameters."""

    name: str
    judge: Callable[..., Finding]
    takes: Literal["experiment", "experiments", "nothing"]

    @property
    def reads(self) -> bool:
        """Whether it reads archives."""
        return self.takes != "nothing"

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        given = inspect.signature(self.judge).parameters
        return dict(list(given.items())[2 if self.reads else 0 :])


RULES: dict[str, Rule] = {}


def rule(judge: Callable[..., Finding]) -> Callable[..., Finding]:
    """Register a rule that reads archives: judge(evidence, experiment, **parameters).

    It is asked once per experiment of a claim, and `combine` joins the answers.
    """
    RULES[judge.__name__] = Rule(judge.__name__, judge, "experiment")
    return judge


def rule_over_all(judge: Callable[..., Finding]) -> Callable[..., Finding]:
    """Register a rule that is asked once for all: judge(evidence, experiments, **parameters)."""
    RULES[judge.__name__] = Rule(judge.__name__, judge, "experiments")
    return judge


def computation(judge: Callable[..., Finding]) -> Callable[..., Finding]:
    """Register a rule that computes: judge(**parameters)."""
    RULES[judge.__name__] = Rule(judge.__name__, judge, "nothing")
    return judge


def apply(name: str, parameters: Mapping, evidence: Evidence, experiments: Sequence[str]):
    """The finding of a rule over all experiments of a claim, whose names may end in *."""
    chosen = RULES[name]
    if not chosen.reads:
        return chosen.judge(**parameters)
    names = list(dict.fromkeys(n for e in experiments for n in evidence.names(e)))
    if not names:
        return untested()
    if chosen.takes == "experiments":
        return chosen.judge(evidence, names, **parameters)
    return combine([chosen.judge(evidence, name, **parameters) for name in names])
