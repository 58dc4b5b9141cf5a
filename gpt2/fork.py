"""Forks: go back to a step of a run, change one thing, and train on with the same batches.

    python -m gpt2.fork RUN --at 800 --set attention="paper; L1 -> exact"
    python -m gpt2.fork RUN --at 800 --arm control --arm "twin:attention=paper,delta_output=fp32"

A fork is an ordinary run whose identity contains its parent's and the step. It starts from the
parent's state after `at` updates: a checkpoint if there is one, else the state is computed again
from the nearest earlier one (or from the start) and compared with the losses that the parent
recorded. Asking again loads forks that have ended and continues those that were interrupted. At
step 0 there is no state to share but the seeds, so such a fork is the changed run from its start.

What can change: numerics, learning rate, clipping, backend, device, the seed of stochastic
rounding and more. What cannot: whatever changes the parameters or the batches (`REFUSED`).
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .analysis import Arm, format_table, outcome_rows, plot_arms, save_rows
from .config import RunConfig, clean_overrides, difference, parse_assignments
from .data import load_corpus
from .runs import Parent, Run, RunError, RunStore

_SHAPE = "it changes the parameters, so the parent's weights would not fit"
_DATA = "it changes the batches, and a fork has its parent's"
_STATE = "the optimiser's state would not fit another update rule"
REFUSED = (
    dict.fromkeys(
        "n_layer n_head n_kv_head n_embd block_size vocab_size bias tie_embeddings qk_norm "
        "gated_attention".split(),
        _SHAPE,
    )
    | dict.fromkeys(
        "corpus tokenizer corpus_max_bytes held_out_fraction batch_size order_seed".split(), _DATA
    )
    | {"optimizer": _STATE, "max_steps": "say where to stop with until (--until)"}
)


class ForkError(ValueError):
    """A fork that cannot be made as asked; one sentence."""


@dataclass(frozen=True)
class Fork:
    """A planned fork: the child's config and the differences from its parent, all of them."""

    name: str
    config: RunConfig
    at: int
    changes: dict
    difference: dict[str, tuple] = field(default_factory=dict)

    def told(self) -> str:
        """One line: the arm and every setting in which it differs from the parent."""
        parts = [f"{k} {a!r} -> {b!r}" for k, (a, b) in self.difference.items()]
        return f"{self.name}: {'; '.join(parts) or 'no change'}"


def plan(
    run: Run, at: int, changes: Mapping | None = None, *, name: str = "", until: int | None = None
) -> Fork:
    """Check a fork and make its config. `until`: the step where it ends (default: the parent's).

    The learning-rate schedule stays the parent's whatever `until` is. Raises ForkError for a field
    that cannot change, a step outside the run, or an end that is not after the start; ValueError
    for a bad value.
    """
    name, parent = name or _name(changes or {}), run.config
    changes = clean_overrides(dict(changes or {}))
    for key in changes:
        if key in REFUSED:
            raise ForkError(f"a fork cannot change {key}: {REFUSED[key]}")
    began = run.parent.step if run.parent else 0
    if not began <= at <= run.step:
        raise ForkError(f"--at {at} is outside the run: its steps are {began} to {run.step}")
    until = parent.max_steps if until is None else until
    if until <= at:
        raise ForkError(f"the fork would end at step {until}, not after its start {at}; raise it")
    kept = {"decay_steps": parent.decay_steps or parent.max_steps, "max_steps": until}
    config = parent.at(**(kept | changes))
    found = difference(parent.at(decay_steps=kept["decay_steps"]), config)
    return Fork(name, config, at, changes, found)


def _name(changes: Mapping) -> str:
    return ", ".join(f"{k}={v}" for k, v in changes.items()) or "no change"


def parent_state(
    run: Run, at: int, *, progress: bool = True, cache_dir="data", corpus=None
) -> Parent | None:
    """The parent's state after `at` updates, from a checkpoint or computed again; None for 0.

    States computed again are kept in RUN/states and serve later forks. Raises ForkError where the
    losses on the way differ from those that the run recorded (on a CPU; on a GPU it warns, because
    some GPU kernels do not repeat bit for bit).
    """
    if at == 0:
        return None
    if run.parent is not None and at == run.parent.step:
        return Parent(run.id, at, run.parent.checkpoint)
    saved = dict(run.checkpoints())
    for made in (run.path / "states").glob("step_*/*/run.json"):
        saved = dict(Run(made.parent).checkpoints()) | saved
    if at in saved:
        return Parent(run.id, at, str(saved[at]))
    before = max((step for step in saved if step < at), default=None)
    start = run.parent if before is None else Parent(run.id, before, str(saved[before]))
    store = RunStore(run.path / "states" / f"step_{at:08d}")
    if progress:
        origin = f"step {start.step}" if start else "the start"
        print(f"no checkpoint at step {at}: computing it again from {origin}", flush=True)
    options = dict(store=store, progress=progress, cache_dir=cache_dir, corpus=corpus)
    again = _regenerate(run, at, start, options)
    return Parent(run.id, at, str(dict(again.checkpoints())[at]))


def _regenerate(run: Run, at: int, start: Parent | None, options: dict) -> Run:
    from .train import train

    again = train(run.config, parent=start, max_steps=at, **options)
    first = _first_difference(run, again)
    if first is not None:
        sentence = (
            f"computing step {at} again gave another loss from step {first} on; code, versions or "
            "machine differ from those of the run"
        )
        if run.config.device_type() == "cpu":
            raise ForkError(sentence + "; train the run anew, then fork it")
        warnings.warn(sentence, stacklevel=3)
    return again


def _first_difference(run: Run, again: Run) -> int | None:
    """First step at which two runs recorded different training losses, or None."""
    ours, theirs = ({} for _ in range(2))
    for found, one in ((ours, run), (theirs, again)):
        for row in one.rows():
            if "train_loss" in row:
                found[row["step"]] = row["train_loss"]
    return next((s for s in sorted(ours.keys() & theirs.keys()) if ours[s] != theirs[s]), None)


def fork(
    run: Run | str | Path,
    at: int,
    changes: Mapping | None = None,
    *,
    name: str = "",
    until: int | None = None,
    store: RunStore | None = None,
    progress: bool = True,
    cache_dir: str | Path = "data",
    corpus=None,
) -> Run:
    """Train one fork of `run` from step `at` and return it. See `plan` and `parent_state`.

    store: where the child lies; by default beside its parent.
    """
    made = fork_many(
        run,
        at,
        {name or _name(changes or {}): changes or {}},
        until=until,
        store=store,
        progress=progress,
        cache_dir=cache_dir,
        corpus=corpus,
    )
    return next(iter(made.values()))


def fork_many(
    run: Run | str | Path,
    at: int,
    arms: Mapping[str, Mapping],
    *,
    until: int | None = None,
    store: RunStore | None = None,
    workers: int = 1,
    progress: bool = True,
    cache_dir: str | Path = "data",
    corpus=None,
) -> dict[str, Run]:
    """Several forks from one state, {name: changes} -> {name: Run}; all are checked first.

    corpus: the parent's, if loaded already. Raises ForkError, too, if the corpus is not the one
    that the parent was trained on.
    """
    from .train import train, train_many

    run = run if isinstance(run, Run) else Run(run)
    forks = [plan(run, at, changes, name=name, until=until) for name, changes in arms.items()]
    corpus = corpus or load_corpus(run.config, cache_dir, progress)
    if corpus.sha256 != run.info["corpus"]["sha256"]:
        raise ForkError(
            f"the corpus {run.config.corpus!r} is not what it was when {run.path.name} was trained"
            ", so its batches cannot be repeated; restore the corpus or train the run anew"
        )
    store = store or RunStore(run.path.parent)
    parent = parent_state(run, at, progress=progress, cache_dir=cache_dir, corpus=corpus)
    if progress:
        print("\n".join(f.told() for f in forks), flush=True)
    common = dict(store=store, progress=progress, cache_dir=cache_dir)
    if workers > 1 and len(forks) > 1:
        runs = train_many([(f.config, parent) for f in forks], workers=workers, **common)
    else:
        runs = [train(f.config, parent=parent, corpus=corpus, **common) for f in forks]
    return {f.name: r for f, r in zip(forks, runs)}


def compare(run: Run, forks: Mapping[str, Run], *, twin: str | None = None) -> list[dict]:
    """Outcome rows of the parent and its forks (see `gpt2.analysis.outcome_rows`)."""
    return outcome_rows(arms_of(run, forks), twin)


def arms_of(run: Run, forks: Mapping[str, Run]) -> list[Arm]:
    return [Arm("(parent)", run)] + [Arm(name, child) for name, child in forks.items()]


def identical_losses(run: Run, child: Run) -> bool:
    """Whether a fork's training losses equal its parent's, bit for bit, wherever both have one."""
    mine, other = run.metrics(), child.metrics()
    both = np.intersect1d(mine["step"], other["step"])
    return len(both) > 0 and _first_difference(run, child) is None


# -- command line ---------------------------------------------------------------------------------


def parse_arm(text: str) -> tuple[str, dict]:
    """'NAME', 'NAME:key=value' or 'NAME:key=value&key=value' (values may hold commas)."""
    name, _, rest = text.partition(":")
    if not name.strip():
        raise ForkError(f"arm {text!r} has no name; write it as 'NAME:key=value'")
    return name.strip(), parse_assignments(p for p in rest.split("&") if p.strip())


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m gpt2.fork",
        description="Go back to a step of a run, change one thing, train on with the same "
        "batches. The same command again loads forks that have ended and continues the others.",
        allow_abbrev=False,
    )
    p.add_argument("run", help="folder or id of the run to fork")
    p.add_argument(
        "--at", type=int, required=True, metavar="STEP", help="fork after so many steps"
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a change; several make one arm together; none at all is the unchanged control",
    )
    p.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE",
        help="one arm by name; several can be given; NAME alone changes nothing; & joins changes",
    )
    p.add_argument("--name", default="", help="name of the arm that --set describes")
    p.add_argument("--until", type=int, metavar="STEP", help="end the forks there")
    p.add_argument("--twin", metavar="ARM", help="arm that onset is judged against")
    p.add_argument("--workers", type=int, default=1, help="forks trained side by side (1)")
    p.add_argument("--store", default="runs", metavar="DIR", help="where runs lie (runs)")
    p.add_argument("--data", default="data", metavar="DIR", help="corpus cache (data)")
    p.add_argument("--quiet", action="store_true", help="no progress, only the table")
    return p


def _arms(args) -> dict[str, dict]:
    arms = dict(parse_arm(text) for text in args.arm)
    if args.set or not arms:
        changes = parse_assignments(args.set)
        arms = {args.name or _name(changes): changes} | arms
    if len(arms) < len(args.arm):
        raise ForkError("two arms have the same name; give each its own")
    return arms


def save_comparison(run: Run, forks: Mapping[str, Run], at: int, twin: str | None) -> list[dict]:
    """Table and picture in RUN/forks; returns the rows."""
    folder = run.path / "forks"
    folder.mkdir(exist_ok=True)
    words = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(forks)).strip("-")[:60]
    rows = compare(run, forks, twin=twin)
    save_rows(rows, folder / f"at{at}-{words}.json")
    plot_arms(arms_of(run, forks), folder / f"at{at}-{words}.png", at=at, twin=twin)
    print(format_table(rows))
    print(f"{folder / f'at{at}-{words}.png'}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 whatever the forks' outcomes, 2 for bad input, 130 stopped."""
    args = parser().parse_args(argv)
    try:
        run = RunStore(args.store).find(args.run)
        forks = fork_many(
            run,
            args.at,
            _arms(args),
            until=args.until,
            workers=args.workers,
            progress=not args.quiet,
            cache_dir=args.data,
        )
        save_comparison(run, forks, args.at, args.twin)
    except KeyboardInterrupt as stop:
        print(f"{stop or 'stopped'}; the same command continues", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
