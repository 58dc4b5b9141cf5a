"""Experiments in any regime of `book.regimes`, recipes for bf16 on a GPU among them.

    BUILDERS["failure"]("tiny")     the arms of the paper's terms, and more, in the recipe `tiny`
    BUILDERS["dials"]("tiny")       both dials from 2 bits to bf16's own 7

`python -m book.evidence failure --recipe tiny` runs one and archives it as `failure-tiny`. A
preset's name gives that preset's experiment of the earlier chapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from gpt2.outcomes import SIGNALS
from gpt2.schema import RunConfig
from kernels.numerics import SITE_NAMES, Site, parse_numerics

from . import experiments
from .experiments import (
    SITES,
    Arm,
    Experiment,
    dial_arms,
    distinct,
    errors,
    in_regime,
    isolation,
    unbiased,
)
from .regimes import RECIPES, Regime, regime

DIAL_BITS = (2, 3, 4, 5, 6, 7)


def failure(name: str, how: Regime | None = None) -> Experiment:
    """Low precision, its twins, what else is said to help, and PyTorch's own as a witness.

    how: the regime, if it is none that `book.regimes` knows by that name.
    """
    if how is None and name not in RECIPES:
        return experiments.failure(name)
    how = how or RECIPES[name]
    question = "Does bf16 fail where its twin with delta from an fp32 O does not?"
    found = in_regime(f"failure-{name}", how.low, question, how)
    arms = (*found.arms, *_others(how.low))
    return replace(found, chapter=6, arms=arms, heads=tuple(SIGNALS))


def _others(low: str) -> Iterable[Arm]:
    yield Arm("sdpa", "sdpa", "PyTorch's own attention")
    yield Arm("delta_dP_P", f"{low},delta=dP_P", "delta from dP and P")
    yield Arm("flash", "flash", "FlashAttention's roundings")
    yield Arm("sfa2", f"{low},softmax=stabilized,beta=2", "SFA, beta 2")
    yield Arm("sfa7", f"{low},softmax=stabilized,beta=7", "SFA, beta 7")
    yield Arm("guarded", f"{low},softmax=guarded,beta=7", "SFA, guarded")
    text = f"{low},unnormalized=bf16:stochastic,output=bf16:stochastic"
    label = "O_bar and O rounded stochastically"
    yield Arm("stochastic", text, label)
    label += ", delta from an fp32 O"
    yield Arm("stochastic_delta_fp32", f"{text},delta_output=fp32", label)
    yield Arm("authors", "authors", "the authors' emulation")


def failure_forked(name: str) -> Experiment:
    """The arms of `failure` as forks of the failing run, beside one in which nothing changes."""
    whole, how = failure(name), regime(name)
    low, *others = whole.arms
    same = Arm("same", how.low, "no change")
    forks = [replace(arm, at=how.at) for arm in (same, *others)]
    return replace(
        whole,
        name="failure-forked" if name == "cpu" else f"failure-forked-{name}",
        question="Which of these prevents the failure when it begins just before it?",
        arms=(low, *forks),
        parent="low",
        until=how.until,
    )


def dials(name: str) -> Experiment:
    """Both dials from 2 bits to bf16's 7, few bits first, since those runs end soonest."""
    if name not in RECIPES:
        return experiments.dials(name)
    how = RECIPES[name]
    texts = {dial: f"{how.low},{dial}_bits={{}}" for dial in ("output", "matched")}
    arms = [dial_arms(dial, text, (bits,)) for bits in DIAL_BITS for dial, text in texts.items()]
    return Experiment(
        name=f"dials-{name}",
        question=experiments.DIALS.question,
        chapter=6,
        arms=sum(arms, ()),
        preset=how.preset,
        base=how.base,
    )


def sites(name: str) -> Experiment:
    """Low precision at one site alone, and at all but one, as forks of the failing run."""
    whole, how = isolation(name), regime(name)
    kept = ("failing run", "site", "delta", "control")
    only = [
        Arm(name, text, label, at=how.at, group="one site")
        for name, text, label in _single_sites(how.low)
    ]
    parent, *others = (arm for arm in whole.arms if arm.group in kept)
    return replace(
        whole,
        name="sites" if name == "cpu" else f"sites-{name}",
        question="Which single rounding is enough for the failure, and which one must it have?",
        arms=(parent, *distinct([*others, *only], how.config)),
    )


def _single_sites(low: str) -> Iterable[tuple[str, str, str]]:
    """(name, numerics, label): one site rounded as the failing numerics round it, all else fp32.

    `output` alone is the stored O, which delta reads too; `delta_output` is the O of delta alone.
    """
    failing = parse_numerics(low)
    for site in SITE_NAMES:
        how = getattr(failing, site)
        if how is not None and how != Site():
            words = SITES.get(site, site.replace("_", " "))
            yield f"only_{site}", f"exact,{site}={how}", f"{words} rounded, all else fp32"
    text = f"exact,delta_output={failing.output}"
    yield "only_delta_output", text, "the O of delta rounded, all else fp32"
    yield "only_row_sum", f"exact,row_sum={failing.output}", "l rounded, all else fp32"


# -- other optimisers and sizes, captures, repetition ---------------------------------------------


def _changed(name: str, kind: str, question: str, changes: dict) -> Experiment:
    """Low precision and its twin with other settings; their names tell them from the recipe's."""
    how = regime(name)
    how = replace(how, changes=(*how.changes, *changes.items()))
    whole = in_regime(f"{kind}-{name}", how.low, question, how)
    arms = [replace(arm, name=f"{arm.name}_{kind}") for arm in whole.arms[:2]]
    failing, twin = (arm.name for arm in arms)
    return replace(
        whole,
        chapter=6,
        arms=tuple(arms),
        failing=failing,
        twin=twin,
        heads=tuple(SIGNALS),
    )


def optimizer(name: str) -> Experiment:
    """Muon, at its default rate, for the hidden matrices."""
    question = "Does bf16 fail when Muon trains the hidden matrices?"
    return _changed(name, "optimizer", question, {"optimizer": "muon"})


def _wide(c: RunConfig) -> dict:
    return {"n_embd": 2 * c.n_embd, "n_head": 2 * c.n_head}


def _deep(c: RunConfig) -> dict:
    return {"n_layer": 2 * c.n_layer}


def _gpt2s(c: RunConfig) -> dict:
    """GPT-2 small in the recipe's context and batch, at the paper's learning rate."""
    return {"n_layer": 12, "n_head": 12, "n_embd": 768, "learning_rate": 1e-3}


SIZES: dict[str, tuple[str, Callable[[RunConfig], dict]]] = {
    "wide": ("twice as wide, with twice the heads", _wide),
    "deep": ("twice as deep", _deep),
    "gpt2s": ("of the size of GPT-2 small, at a learning rate of 1e-3", _gpt2s),
}


def size(name: str, which: str) -> Experiment:
    words, changes = SIZES[which]
    question = f"Does bf16 fail in a model {words}?"
    return _changed(name, f"size-{which}", question, changes(regime(name).config))


def captures(name: str) -> Experiment:
    """q, k, v, dO and X of the worst head, and of the quietest of its layer, as forks.

    At the first step, at the onset (or where the loss of a parent that diverged begins to leave)
    and at the last step, one sequence each; of the twin the worst head alone, not at the first.
    """
    how = regime(name)
    later = tuple(f"capture@{{{step}}}-{{{step}}}:{{top}}x1" for step in ("sign", "last"))
    first = "capture@{first}-{first}:{top}x1"
    quiet = tuple(c.replace("top", "quiet") for c in (first, *later))
    told = (("probes", (first, *later, *quiet)),)
    twin = f"{how.low},delta_output=fp32"
    return Experiment(
        name=f"captures-{name}",
        question="What does attention see around the onset, and late?",
        chapter=6,
        preset=how.preset,
        base=how.base,
        seeds=(0,),
        failing="low",
        twin="delta_fp32",
        parent="low",
        until=how.until,
        captures=True,
        arms=(
            Arm("low", how.low, "low precision", changes=how.forkable),
            Arm("captured", how.low, "low precision, captured", changes=told, at=how.at),
            Arm("delta_fp32", twin, "delta from an fp32 O", (("probes", later),), at=how.at),
        ),
    )


def repeat(name: str) -> Experiment:
    """The failing run's first eighth twice. The second is told from the first by a held-out loss
    over one batch more, which training does not see."""
    how = regime(name)
    more = (("eval_batches", how.config.eval_batches + 1),)
    return Experiment(
        name=f"repeat-{name}",
        question="Does the same run come out the same, bit for bit?",
        chapter=6,
        preset=how.preset,
        base=how.base,
        seeds=(0,),
        stop_at=max(1, how.most // 8),
        repeated=("first", "again"),
        arms=(
            Arm("first", how.low, "low precision", changes=how.forkable),
            Arm("again", how.low, "the same again", changes=(*how.forkable, *more)),
        ),
    )


# What is asked for by name, in the order of the chapters: a regime's name to the experiment in it.
BUILDERS: dict[str, Callable[[str], Experiment]] = {
    "failure": failure,
    "failure-forked": failure_forked,
    "dials": dials,
    "isolation": isolation,
    "sites": sites,
    "errors": errors,
    "errors-forked": partial(errors, forked=True),
    "unbiased": unbiased,
    "optimizer": optimizer,
    "size-wide": partial(size, which="wide"),
    "size-deep": partial(size, which="deep"),
    "size-gpt2s": partial(size, which="gpt2s"),
    "captures": captures,
    "repeat": repeat,
}
