"""Archive the minimiser's searches: `python -m book.searches --workers 5`.

For each seed the failing run of chapter 2 is trained (or loaded) and forked as the search asks,
until no single (site, layer) can be left in low precision. Seeds run side by side, the questions
of one search one after the other. The same command continues: forks that have ended are loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from gpt2.runs import RunStore

from . import ROOT
from .chapter2 import search_sites
from .evidence import RESULTS, run_experiment, save_archive
from .experiments import isolation
from .forks import fork_end, fork_step

NAME = "searches"
UNTIL = 1.25  # alive so long, in steps to failure, with no onset


def search(preset: str, seed: int, budget: int, by: str, store: str, data: str) -> tuple:
    """(record of one seed's search, the failing run). Runs in a process of its own."""
    experiment = isolation(preset, until=UNTIL)
    common = dict(store=RunStore(store), progress=False, cache_dir=data)
    arms = [experiment.twin, "exact"]
    runs = run_experiment(experiment, seeds=[seed], arms=arms, workers=1, **common)
    trace = search_sites(experiment, runs, seed, by=by, budget=budget, **common)
    parent = runs[experiment.parent, seed]
    at = fork_step(parent, experiment.arm("exact").at)
    end = fork_end(parent, UNTIL)
    return {"seed": seed, "at": at, "until": end, "by": by, "trace": trace.to_dict()}, parent


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog=f"python -m book.{NAME}", description=__doc__)
    p.add_argument("--preset", default="cpu")
    p.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas")
    p.add_argument("--workers", type=int, default=2, help="searches side by side (2)")
    p.add_argument("--budget", type=int, default=30, help="most forks of a search (30)")
    p.add_argument("--by", default="layer", choices=("head", "layer", "site"), help="(layer)")
    p.add_argument("--store", default=str(ROOT / "runs"))
    p.add_argument("--data", default=str(ROOT / "data"))
    p.add_argument("--results", default=str(RESULTS))
    a = p.parse_args(argv)
    seeds = [int(s) for s in a.seeds.split(",")]
    rows, runs = [], []
    with ProcessPoolExecutor(a.workers, mp_context=get_context("spawn")) as pool:
        options = (a.budget, a.by, a.store, a.data)
        for found in [pool.submit(search, a.preset, seed, *options) for seed in seeds]:
            row, run = found.result()
            print(f"seed {row['seed']}: {row['trace']['state']}, {row['trace']['result']}")
            sys.stdout.flush()
            rows.append(row)
            runs.append(run)
    question = "Which smallest set of (site, layer) in fp32 keeps the failing run alive?"
    told = {"experiment": NAME, "question": question, "complete": True}
    command = f"python -m book.{NAME} --preset {a.preset} --seeds {a.seeds} --by {a.by}"
    print(save_archive(told, rows, runs, a.preset, command, Path(a.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
