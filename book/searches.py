"""Archive the minimiser's searches: `python -m book.searches --workers 5`.

For each seed the failing run of chapter 2 is trained (or loaded) and forked as the search asks,
until no single (site, layer) can be left in low precision. Seeds run side by side, each in one of
the workers, the questions of one search one after the other; no fork begins after the minutes
given. The same command continues: forks that have ended are loaded.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from gpt2.hardware import visible
from gpt2.runs import Run, RunStore

from .chapter2 import search_sites
from .evidence import provenance, save_archive, with_settings
from .experiment_runs import run_experiment
from .experiments import isolation
from .forks import fork_end, fork_step
from .programs import add_machine_arguments, seed_list

NAME = "searches"
UNTIL = 1.25  # alive so long, in steps to failure, with no onset


@dataclass(frozen=True)
class Options:
    """What every search of one call shares; until_time: no fork begins later (`time.time`)."""

    preset: str
    settings: tuple[str, ...]
    by: str
    budget: int
    until_time: float
    store: str
    data: str


def search(seed: int, options: Options) -> tuple[dict, Run]:
    """(record of one seed's search, the failing run). Runs in a process of its own."""
    experiment = with_settings(isolation(options.preset, until=UNTIL), options.settings)
    common = dict(store=RunStore(options.store), progress=False, cache_dir=options.data)
    arms = [experiment.twin, "exact"]
    runs = run_experiment(experiment, seeds=[seed], arms=arms, workers=2, **common)
    limits = dict(budget=options.budget, until_time=options.until_time)
    trace = search_sites(experiment, runs, seed, by=options.by, **limits, **common)
    parent = runs[experiment.parent, seed]
    at = fork_step(parent, experiment.arm("exact").at)
    end = fork_end(parent, UNTIL)
    told = {"seed": seed, "at": at, "until": end, "by": options.by, "trace": trace.to_dict()}
    return told, parent


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=f"python -m book.{NAME}", description=__doc__)
    p.add_argument("--preset", default="cpu")
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run"
    )
    p.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas")
    p.add_argument("--budget", type=int, default=30, help="most forks of a search (30)")
    p.add_argument("--by", default="layer", choices=("head", "layer", "site"), help="(layer)")
    add_machine_arguments(p)
    return p


def pool_of(workers: int, devices: Sequence[str]) -> ProcessPoolExecutor:
    """Workers spread over the devices, each of which sees its own alone.

    Raises ValueError for fewer than one worker and for a device that this machine lacks.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers}; use at least 1")
    context = get_context("spawn")
    environments = context.SimpleQueue()
    each = [visible(device) for device in devices] or [{}]
    for i in range(workers):
        environments.put(each[i % len(each)])
    return ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(environments,)
    )


def _begin(environments) -> None:
    """In a worker, before it uses CUDA."""
    os.environ |= environments.get()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for bad input. The archive is written anew whenever a search has ended."""
    a = parser().parse_args(argv)
    try:
        seeds = seed_list(a.seeds)
        with_settings(isolation(a.preset, until=UNTIL), a.set)
        workers = pool_of(a.workers, a.devices)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    until_time = math.inf if a.minutes is None else time.time() + 60 * a.minutes
    options = Options(a.preset, tuple(a.set), a.by, a.budget, until_time, a.store, a.data)
    command = f"python -m book.{NAME} --preset {a.preset} --seeds {a.seeds} --by {a.by}"
    command = " ".join([command, *(f"--set {text}" for text in a.set)])
    found: list[tuple[dict, Run]] = []
    with workers as pool:
        for task in as_completed([pool.submit(search, seed, options) for seed in seeds]):
            found.append(task.result())
            row = found[-1][0]
            print(f"seed {row['seed']}: {row['trace']['state']}, {row['trace']['result']}")
            path = _archive(found, len(seeds), a.preset, command, Path(a.results), a.commit)
            print(path, flush=True)
    return 0


def _archive(
    found: list[tuple[dict, Run]],
    asked: int,
    preset: str,
    command: str,
    folder: Path,
    commit: str | None,
) -> Path:
    """Write the searches that have ended. Complete: all of them, and none by its limits."""
    rows = sorted((row for row, _ in found), key=lambda row: row["seed"])
    ended = sum(row["trace"]["state"] != "budget" for row in rows)
    question = "Which smallest set of (site, layer) in fp32 keeps the failing run alive?"
    told = {"experiment": NAME, "question": question, "complete": ended == asked}
    source = provenance([run for _, run in found], preset, command, commit)
    return save_archive(told, rows, source, folder)


if __name__ == "__main__":
    sys.exit(main())
