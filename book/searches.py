"""Archive the minimiser's searches: `python -m book.searches --workers 5`.

For each seed the failing run of chapter 2 is trained (or loaded) and forked as `gpt2.minimise`
asks, until no single (site, layer, head) can be left in low precision. Seeds run side by side, the
questions of one search one after the other. The same command continues a search.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from gpt2.minimise import minimise_run
from gpt2.runs import Run, RunStore
from gpt2.train import train_many

from . import ROOT
from .evidence import RESULTS, save_archive
from .experiments import isolation
from .forks import fork_end, fork_step

NAME = "searches"
UNTIL = 1.5  # alive so long, in steps to failure: some changes only delay it


def search(path: str, at: int, until: int, budget: int, by: str, data: str) -> dict:
    """The trace of one search as plain JSON. Runs in a process of its own."""
    options = dict(store=RunStore(Path(path).parent), progress=False, cache_dir=data)
    trace = minimise_run(Run(path), at, until, budget=budget, by=by, **options).to_dict()
    for question in trace["questions"]:
        outcome = question["detail"].get("outcome", {})
        kept = ("kind", "last_step", "diverged_step", "nonfinite_step")
        question["detail"] = {"outcome": {k: outcome.get(k) for k in kept}}
    return trace


def searches(
    preset: str,
    seeds: Sequence[int],
    store: RunStore,
    workers: int,
    budget: int,
    by: str,
    data: str,
) -> tuple[list[dict], list[Run]]:
    """Records, one per seed whose run failed, and the runs that were searched."""
    experiment = isolation(preset)
    parent = experiment.arm(experiment.parent)
    configs = [parent.config(experiment, seed) for seed in seeds]
    runs = train_many(configs, store=store, workers=workers, cache_dir=data)
    chosen = [(s, r) for s, r in zip(seeds, runs) if r.outcome.failed]
    at = next(arm.at for arm in experiment.arms if arm.at is not None)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        todo = []
        for seed, run in chosen:
            where = fork_step(run, at), fork_end(run, UNTIL)
            todo.append(
                (seed, where, pool.submit(search, str(run.path), *where, budget, by, data))
            )
        rows = []
        for seed, (start, end), found in todo:
            trace = found.result()
            rows.append({"seed": seed, "at": start, "until": end, "by": by, "trace": trace})
            print(f"seed {seed}: {trace['state']}, {trace['result']}", flush=True)
    return rows, [run for _, run in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 archived, 1 no run failed, so nothing was searched."""
    p = argparse.ArgumentParser(prog="python -m book.searches", description=__doc__)
    p.add_argument("--preset", default="cpu")
    p.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas")
    p.add_argument("--workers", type=int, default=2, help="searches side by side (2)")
    p.add_argument("--budget", type=int, default=30, help="most forks of a search (30)")
    p.add_argument("--by", default="head", choices=("head", "layer", "site"), help="unit (head)")
    p.add_argument("--store", default=str(ROOT / "runs"))
    p.add_argument("--data", default=str(ROOT / "data"))
    p.add_argument("--results", default=str(RESULTS))
    a = p.parse_args(argv)
    seeds = [int(s) for s in a.seeds.split(",")]
    rows, runs = searches(a.preset, seeds, RunStore(a.store), a.workers, a.budget, a.by, a.data)
    if not rows:
        print("no run failed, so there was nothing to search for", file=sys.stderr)
        return 1
    question = "Which smallest set of (site, layer, head) in fp32 keeps the failing run alive?"
    told = {"experiment": NAME, "question": question, "complete": len(rows) == len(seeds)}
    print(save_archive(told, rows, runs, a.preset, f"python -m book.{NAME}", Path(a.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
