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

from kernels.numerics import SITE_NAMES, Site, parse_numerics

from . import experiments
from .experiments import SITES, Arm, Experiment, dial_arms, distinct, errors, in_regime, isolation
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
    return replace(found, chapter=6, arms=arms, heads=("spectral_norm_q", "tie_rate"))


def _others(low: str) -> Iterable[Arm]:
    yield Arm("sdpa", "sdpa", "PyTorch's own attention")
    yield Arm("delta_dP_P", f"{low},delta=dP_P", "delta from dP and P")
    yield Arm("flash", "flash", "FlashAttention's roundings")
    yield Arm("sfa2", f"{low},softmax=stabilized,beta=2", "SFA, beta 2")
    yield Arm("sfa7", f"{low},softmax=stabilized,beta=7", "SFA, beta 7")
    yield Arm("guarded", f"{low},softmax=guarded,beta=7", "SFA, guarded")
    text = f"{low},unnormalized=bf16:stochastic,output=bf16:stochastic"
    yield Arm("stochastic", text, "O_bar and O rounded stochastically")
    yield Arm("authors", "authors", "the authors' emulation")


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
    arms = [arm for arm in whole.arms if arm.group in kept]
    return replace(
        whole,
        name="sites" if name == "cpu" else f"sites-{name}",
        question="Which single rounding is enough for the failure, and which one must it have?",
        arms=tuple(distinct([*arms, *only], how.config)),
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


# What is asked for by name, in the order of the chapters: a regime's name to the experiment in it.
BUILDERS: dict[str, Callable[[str], Experiment]] = {
    "failure": failure,
    "dials": dials,
    "isolation": isolation,
    "sites": sites,
    "errors": errors,
    "errors-forked": partial(errors, forked=True),
}
