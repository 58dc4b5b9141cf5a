"""What several processes change: `python -m gpt2.scaling --json scaling.json`, on all GPUs.

Four parts, each by itself; one that fails or has no time left is reported so:

  losses     the same batches on one process and on all: the first step whose bits differ
  kill       kill -9 of one rank: how long until all have ended, and what a restart continues
  reduction  sums of gradients in fp32 and bf16: delta's error, and the error of dW_Q
  speed      tokens/s on one process and on all, and where the rest of the time goes

Every measurement is a program that a user could start: `gpt2.train`, `gpt2.bench` and
`gpt2.reduction`, alone or under torchrun. With `--device cpu` the same runs at toy size over gloo.
The corpus is read as bytes, so that nothing has to be prepared; models keep their own vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import hardware, scaling_parts
from .children import ChildError, Machine
from .config import changes_from_preset
from .files import write_json
from .scaling_runs import Runs, Study, study

# The share of the whole time that is kept for each part while those before it run.
NEEDS = {"losses": 0.42, "kill": 0.13, "reduction": 0.07, "speed": 0.38}
PARTS = tuple(NEEDS)


def measure(machine: Machine, runs: Runs, parts: tuple[str, ...], save: Callable) -> None:
    """Run the parts in order; `save(rows, parts)` is called after each."""
    rows, done = [], []
    end, whole = machine.deadline, machine.remaining()
    for i, name in enumerate(parts):
        began, error = time.monotonic(), None
        print(f"{name}: {end - began:.0f} s left", flush=True)
        try:
            if machine.processes < 2:
                raise ChildError("there is one device here; this needs two")
            machine.deadline = end - whole * sum(NEEDS[later] for later in parts[i + 1 :])
            found = getattr(scaling_parts, name)(machine, runs)
        except Exception as failure:  # one part's failure is its result, not the end of the others
            found, error = [], f"{type(failure).__name__}: {failure}"
            print(f"  {error}", flush=True)
        found = [strict(row) for row in found]
        rows += [{"part": name, **row} for row in found]
        seconds = round(time.monotonic() - began, 1)
        load = round(os.getloadavg()[0], 1)  # what else this machine's processors do
        done.append({"part": name, "seconds": seconds, "load": load, "error": error})
        for row in found:
            told = {k: v for k, v in row.items() if not k.startswith("loss_")}
            print("  " + json.dumps(told), flush=True)
        save(rows, done)


def strict(row: dict) -> dict:
    """Numbers that are not finite become None, as strict JSON wants."""
    lost = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    return row | dict.fromkeys(lost)


def provenance(machine: Machine, study: Study, began: float) -> dict:
    """Where the numbers come from, as archives of the book say it."""
    device = torch.device(machine.device)
    environment = hardware.environment(device, machine.processes)
    small, large = study.small, study.large
    keys = "device platform python torch triton cuda commit code cpus".split()
    name, on_cpu = environment["machine"], f"{os.cpu_count()}-core {environment['machine']}"
    return {k: environment[k] for k in keys} | {
        "machine": f"{machine.processes} x {name}" if device.type == "cuda" else on_cpu,
        "processes": machine.processes,
        "preset": ", ".join(dict.fromkeys((small.preset, large.preset))),
        "corpus": f"{small.corpus} ({small.corpus_max_bytes:,} bytes, as bytes)",
        "changes": {c: changes_from_preset(getattr(study, c)) for c in ("small", "large")},
        "seeds": [small.init_seed],
        "date": environment["date"][:10],
        "duration_s": round(time.monotonic() - began, 1),
        "command": "python -m gpt2.scaling",
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m gpt2.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--json", metavar="PATH", required=True, help="write results there")
    p.add_argument("--limit-s", type=float, default=540.0, help="end after this (540)")
    p.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    p.add_argument(
        "--numerics", help="whose speed: flash,paper (default; exact,paper with --device cpu)"
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the models whose speed is measured, such as compile=blocks",
    )
    p.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cuda, or toys on cpu"
    )
    p.add_argument("--processes", type=int, help="default: one per GPU; 2 on a CPU")
    p.add_argument("--corpus", default="installed-text", help="default: %(default)s")
    p.add_argument("--work", metavar="DIR", help="keep runs and logs there; must not exist")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 if all that was asked was measured, 1 if not, 2 for bad input."""
    args = parser().parse_args(argv)
    began = time.monotonic()
    processes = args.processes or (torch.cuda.device_count() if args.device == "cuda" else 2)
    parts = tuple(args.parts.split(","))
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        print(f"error: unknown part {unknown[0]!r}; use {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: there is no GPU here; use --device cpu for toys", file=sys.stderr)
        return 2
    try:
        numerics = args.numerics.split(",") if args.numerics else ()
        plan = study(args.device, args.corpus, numerics, args.set)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        work = Path(args.work or folder)
        work.mkdir(parents=True, exist_ok=not args.work)
        machine = Machine(args.device, processes, work, began + args.limit_s)
        told = {"experiment": "scaling", "complete": False}

        def save(rows: list[dict], done: list[dict]) -> None:
            told["failed"] = [x["error"] for x in (*rows, *done) if x.get("error")]
            told["complete"] = len(done) == len(PARTS) and not told["failed"]
            told.update(provenance=provenance(machine, plan, began), parts=done, rows=rows)
            write_json(Path(args.json), told)

        try:
            measure(machine, Runs(machine, plan), parts, save)
        finally:
            machine.end()
    return 1 if told["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
