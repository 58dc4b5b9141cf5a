"""Archived evidence of chapter 4: `python -m book.rounding_evidence` measures heads of more seeds.

For every seed it trains (or loads) the failing run with captures and keeps what the chapter's
section 4 says of its worst head, in `book/results/rounding/`. Interrupted, it continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernels.forensics import DeltaMeasurement, SignedMean, delta_error

from . import DATA, RESULTS, RUNS
from .captured import Captured, captured_heads, captured_run, pooled, steepest, worst_head
from .evidence import provenance, save_archive
from .head_statistics import (
    OutputError,
    changed_heads,
    contributions,
    in_rms,
    offset_heads,
    stochastic,
)

EXPERIMENT = {
    "experiment": "rounding",
    "question": "Is the error of delta biased in the failing head, and where does it come from?",
}


def versions(chosen: Captured) -> dict[str, str]:
    """The two numerics that a captured head is put through: its own, and the paper's bf16."""
    return {"as trained": str(chosen.numerics), "in bf16": "paper"}


def window(series: Sequence[Captured], chosen: Captured, count: int = 10) -> list[Captured]:
    """The last captures up to the chosen one: the head on its way into trouble."""
    return [c for c in series if c.step <= chosen.step][-count:]


def head_record(
    version: str,
    seed: int,
    chosen: Captured,
    delta: DeltaMeasurement,
    changed: Mapping[str, OutputError],
) -> dict:
    """Plain JSON types; errors of delta are in units of its rms, those of O in ulps.

    parts: mean over the part's own rows, what it adds to the mean over all, its share of the sum
    with a 95 % interval from resampled sequences, and its share of the squares.
    """
    added = contributions(delta)

    def short(values) -> list[float]:
        return [float(f"{x:.6g}") for x in values]

    def mean(found: SignedMean) -> list[float] | None:
        return None if found.n < 2 else short(found[:2])

    parts = {
        name: {
            "rows": part.rows,
            "mean": mean(in_rms(part.mean, delta.rms)),
            "adds": mean(added[name]),
            "share": short((part.share, part.low, part.high)),
            "energy": float(f"{part.energy:.6g}"),
        }
        for name, part in (delta.causes | delta.twin_sites).items()
    }
    changes = {
        name: {
            "bias": mean(e.bias),
            "rms": float(f"{e.rms:.6g}"),
            "shared": float(f"{e.shared:.6g}"),
            "delta": mean(e.delta),
        }
        for name, e in changed.items()
    }
    return {
        "arm": version,
        "seed": seed,
        "step": chosen.step,
        "layer": chosen.layer,
        "head": chosen.place,
        "rows": int(delta.error.numel()),
        "mean": mean(in_rms(delta.mean, delta.rms)),
        "parts": parts,
        "changed": changes,
    }


def bias_rows(records: Sequence[Mapping]) -> dict[str, tuple[float, float]]:
    """Label -> (mean, standard error) for `figures.intervals`, from live or archived records."""
    return {
        f"seed {r['seed']}, {r['arm']}": tuple(r["mean"]) for r in records if r["mean"] is not None
    }


def measure(preset: str, seed: int, **how):
    """(run, records) for one seed: both versions, and both rounded stochastically; how: where
    the run lies, as `captured_run` takes it."""
    run = captured_run(preset, seed, **how)
    series = worst_head(captured_heads(run.captures()))
    chosen = steepest(series)
    head, records = pooled(window(series, chosen)), []
    for version, numerics in versions(chosen).items():
        delta = delta_error(head, numerics=numerics, sites=False)
        records.append(head_record(version, seed, chosen, delta, changed_heads(head, numerics)))
    for version, numerics in versions(chosen).items():
        unbiased = stochastic(numerics)
        delta = delta_error(head, numerics=unbiased, sites=False)
        told = f"{version}, stochastic"
        records.append(head_record(told, seed, chosen, delta, offset_heads(head, unbiased)))
    return run, records


def main(argv: Sequence[str] | None = None) -> int:
    """Measure seed by seed; the archive is written anew after each."""
    p = argparse.ArgumentParser(prog="python -m book.rounding_evidence", description=__doc__)
    p.add_argument("--preset", default="cpu")
    p.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas")
    p.add_argument("--store", default=str(RUNS), help="where runs lie (runs)")
    p.add_argument("--data", default=str(DATA), help="corpus cache (data)")
    p.add_argument("--results", default=str(RESULTS), help="where archives go")
    args = p.parse_args(argv)
    try:
        seeds = [int(s) for s in args.seeds.split(",")]
    except ValueError:
        print(f"error: --seeds {args.seeds!r}; write whole numbers as 0,1,2", file=sys.stderr)
        return 2
    runs, records = [], []
    for seed in seeds:
        run, found = measure(args.preset, seed, store=args.store, cache_dir=args.data)
        runs.append(run)
        records += found
        told = EXPERIMENT | {"complete": len(runs) == len(seeds)}
        command = f"python -m book.rounding_evidence --preset {args.preset} --seeds {args.seeds}"
        source = provenance(runs, args.preset, command)
        path = save_archive(told, records, source, Path(args.results))
        print(f"seed {seed}: {found[0]['mean']} and {found[1]['mean']} -> {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
