"""The smallest set of upcasts that restores stability: delta debugging over paired forks.

    python -m gpt2.minimise RUN --at 800 --until 2500 --sites unnormalized,output --budget 30

Start from "all units in fp32 is stable, none is not" and shrink (`gpt2.ddmin`). A *unit* is (site,
layer, head), such as unnormalized@L1H0; `--by layer` and `--by site` take coarser ones. A question
is a whole training run and its answer that one run's, so repeat the end result with other seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kernels.numerics import SITE_NAMES, Numerics, ScopedNumerics, parse_numerics

from .coerce import nearest_hint
from .ddmin import Trace, load_trace, minimise, short
from .files import write_json

__all__ = ["ForkOracle", "Trace", "Unit", "minimise", "minimise_run", "units_of", "upcast"]

SITES = ("scores", "probabilities", "unnormalized", "output", "delta_output")


@dataclass(frozen=True, order=True)
class Unit:
    """One site of one head of one layer, counted from 0; None stands for all of them."""

    layer: int | None
    head: int | None
    site: str

    def __str__(self) -> str:
        where = ("" if self.layer is None else f"L{self.layer}") + (
            "" if self.head is None else f"H{self.head}"
        )
        return f"{self.site}@{where or 'all'}"

    @classmethod
    def parse(cls, text: str) -> Unit:
        site, _, where = text.partition("@")
        layer, _, head = where.removeprefix("L").partition("H") if where != "all" else ("", "", "")
        return cls(int(layer) if layer else None, int(head) if head else None, site)


def units_of(
    attention: str, n_layer: int, n_head: int, *, sites: Sequence[str] = (), by: str = "head"
) -> list[Unit]:
    """The units that a run's numerics round, ordered by layer, head, site.

    sites: which (default: those of `SITES` that some head rounds below fp32; delta_output where
    delta reads a rounded O). by: "head", "layer" or "site", how finely. Raises ValueError for a
    site that does not exist, is rounded nowhere, or a run on PyTorch's own attention.
    """
    if attention == "sdpa":
        raise ValueError("attention 'sdpa' has no rounding sites to minimise over")
    if by not in ("head", "layer", "site"):
        raise ValueError(f"by={by!r}; use head, layer or site")
    scoped = ScopedNumerics.parse(attention)
    heads = {
        (la, h): n for la in range(n_layer) for h, n in enumerate(scoped.for_layer(la, n_head))
    }
    for site in sites:
        if site not in SITE_NAMES:
            raise ValueError(f"unknown site {site!r}{nearest_hint(site, SITE_NAMES)}")
        if not any(_rounds(n, site) for n in heads.values()):
            raise ValueError(f"no head of {attention!r} rounds {site}, so it cannot be upcast")
    found = set()
    for (layer, head), numerics in heads.items():
        for site in sites or SITES:
            if _rounds(numerics, site):
                found.add(
                    Unit(None if by == "site" else layer, head if by == "head" else None, site)
                )
    order = (sites or SITES).index
    return sorted(found, key=lambda u: (u.layer or 0, u.head or 0, order(u.site)))


def _rounds(numerics: Numerics, site: str) -> bool:
    value = getattr(numerics, site)
    if site == "delta_output" and value is None:
        stored = (numerics.output, numerics.unnormalized)
        return numerics.delta == "dO_O" and any(s.format.fraction_bits < 23 for s in stored)
    return value is not None and value.format.fraction_bits < 23


def upcast(attention: str, units: Iterable[Unit], n_layer: int, n_head: int) -> str:
    """The attention text in which these units are fp32 and all else is as before."""
    scoped = ScopedNumerics.parse(attention)
    chosen: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    units = list(units)
    for layer in range(n_layer):
        for head in range(n_head):
            sites = [u.site for u in units if u.layer in (None, layer) and u.head in (None, head)]
            if sites:
                base = _text(scoped.for_layer(layer, n_head)[head])
                changed = ",".join([base, *(f"{site}=fp32" for site in dict.fromkeys(sites))])
                chosen.setdefault((layer, changed), []).append(head)
    parts = [attention]
    for (layer, text), heads in chosen.items():
        where = "" if len(heads) == n_head else "H" + "+".join(map(str, heads))
        parts.append(f"L{layer}{where} -> {text}")
    return "; ".join(parts)


def _text(numerics: Numerics) -> str:
    """The text that a Numerics was parsed from, which is its name."""
    if parse_numerics(numerics.name) != numerics:
        raise ValueError(f"numerics {numerics.name!r} have no text to add a change to")
    return numerics.name


class ForkOracle:
    """Answers whether a run, forked at a step with some units in fp32, stays healthy until a step.

    Stable: no divergence and nothing nonfinite by `until`; with `strict`, no onset either, judged
    against the fork in which all units are fp32.
    """

    def __init__(self, run, at: int, until: int, *, strict: bool = False, **options):
        self.run, self.at, self.until, self.strict, self.options = run, at, until, strict, options
        self.twin = None

    def __call__(self, names: tuple[str, ...]) -> tuple[bool, dict]:
        from .analysis import Arm
        from .fork import fork
        from .outcomes import summarize

        config = self.run.config
        text = upcast(config.attention, map(Unit.parse, names), config.n_layer, config.n_head)
        child = fork(self.run, self.at, {"attention": text}, until=self.until, **self.options)
        arm = Arm(short(names), child)
        self.twin = self.twin or arm  # the first question is about all units
        outcome = summarize(arm.metrics, self.twin.metrics, tracker=child.tracker)
        stable = not outcome.failed and not (self.strict and outcome.kind == "onset")
        return stable, {"outcome": outcome.to_dict(), "told": str(outcome), "run": str(child.path)}


def minimise_run(
    run,
    at: int,
    until: int,
    *,
    sites: Sequence[str] = (),
    by: str = "head",
    budget: int | None = 30,
    strict: bool = False,
    on_progress: Callable[[Trace], None] = lambda trace: None,
    **options,
) -> Trace:
    """`minimise` over forks of a run; the trace lies in RUN/minimise and is continued if there.

    options: store, progress, cache_dir, corpus of `gpt2.fork.fork`.
    """
    config = run.config
    units = units_of(config.attention, config.n_layer, config.n_head, sites=sites, by=by)
    what = "-".join(sites) or "all-sites"
    path = run.path / "minimise" / f"at{at}-until{until}-{what}-{by}{'-strict' * strict}.json"
    path.parent.mkdir(exist_ok=True)

    def save(trace: Trace) -> None:
        write_json(path, trace.to_dict())
        on_progress(trace)

    oracle = ForkOracle(run, at, until, strict=strict, **options)
    trace = load_trace(path) if path.exists() else None
    if trace is not None and trace.questions:
        oracle(trace.questions[0].units)  # loads that fork again: it is the twin
    return minimise(units, oracle, budget, trace=trace, on_progress=save)


# -- command line ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m gpt2.minimise",
        description="Search for the smallest set of (site, layer, head) whose upcast to fp32 "
        "keeps a failing run healthy. Every question is a fork; the same command continues.",
        allow_abbrev=False,
    )
    p.add_argument("run", help="folder or id of the failing run")
    p.add_argument(
        "--at", type=int, required=True, metavar="STEP", help="fork after so many steps"
    )
    p.add_argument("--until", type=int, required=True, metavar="STEP", help="stable up to there")
    p.add_argument("--sites", default="", help=f"comma-separated; default: of {', '.join(SITES)}")
    p.add_argument("--by", default="head", choices=("head", "layer", "site"), help="unit (head)")
    p.add_argument("--budget", type=int, default=30, help="most forks to train now (30)")
    p.add_argument("--strict", action="store_true", help="an onset counts as unstable")
    p.add_argument("--store", default="runs", metavar="DIR", help="where runs lie (runs)")
    p.add_argument("--data", default="data", metavar="DIR", help="corpus cache (data)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 for a search that ended or spent its budget, 2 for bad input, 130 stopped."""
    from .runs import RunStore

    args = parser().parse_args(argv)

    def tell(trace: Trace) -> None:
        if trace.state == "searching":
            q = trace.questions[-1]
            words = q.detail.get("told", "stable" if q.answer else "not stable")
            print(f"[{q.index + 1}] {len(q.units)} units, {short(q.units)}: {words}", flush=True)

    try:
        trace = minimise_run(
            RunStore(args.store).find(args.run),
            args.at,
            args.until,
            sites=tuple(s.strip() for s in args.sites.split(",") if s.strip()),
            by=args.by,
            budget=args.budget,
            strict=args.strict,
            on_progress=tell,
            progress=False,
            cache_dir=args.data,
        )
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(trace.text())
    print(describe(trace))
    return 0


def describe(trace: Trace) -> str:
    """The result in one sentence."""
    n = len(trace.questions)
    found = short(trace.result or (), 12)
    return {
        "minimal": f"1-minimal after {n} questions, one run each: {found}",
        "unstable": "not even all units in fp32 keep the run healthy: the cause lies elsewhere",
        "needless": "the run stays healthy without any change: fork it earlier or train longer",
        "budget": f"budget spent after {n} questions; the smallest stable set so far: {found}",
    }.get(trace.state, "still searching")


if __name__ == "__main__":
    sys.exit(main())
