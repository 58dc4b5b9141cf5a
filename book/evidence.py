"""Archived evidence: `python -m book.evidence` runs the longer experiments, keeps their numbers.

A chapter shows two kinds of evidence. *Live* runs happen while the chapter executes: few arms, one
seed, minutes. *Archived* ones were run once by this program on a named machine, with more seeds
and arms, and lie in `book/results/<experiment>/<machine>-<date>.json`. Both are the same records,
made by `record`, so the same figure functions draw both.

The program resumes: runs are kept in the run store, and what is finished is not run again. An
archive of an unfinished experiment says so (`"complete": false`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import json
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2.config import RunConfig
from gpt2.data import load_corpus
from gpt2.fork import parent_state
from gpt2.outcomes import Outcome, OutcomeTracker, series, smooth, summarize, worst_head
from gpt2.runs import Parent, Run, RunStore
from gpt2.train import train_many

from . import ROOT
from .experiments import EXPERIMENTS, Arm, Experiment
from .forks import plan_fork

RESULTS = ROOT / "book" / "results"
CURVE_POINTS = 160
HEAD_POINTS = 60


# -- from runs to records -------------------------------------------------------------------------


def record(run: Run, arm: Arm, seed: int, outcome: Outcome, heads: Sequence[str] = ()) -> dict:
    """What the book keeps of a run: plain JSON types; curves of at most CURVE_POINTS points.

    heads: metrics that are kept for every head, [points][layer][head].
    """
    return {
        "arm": arm.name,
        "label": arm.label,
        "attention": run.config.attention,
        "changes": dict(arm.changes),
        "forked_at": run.parent.step if run.parent else None,
        "seed": seed,
        "run": run.id,
        "status": run.status,
        "steps": outcome.last_step,
        "kind": outcome.kind,
        "diverged_step": outcome.diverged_step,
        "diverged_from": outcome.diverged_from,
        "nonfinite_step": outcome.nonfinite_step,
        "onset_step": outcome.onset_step,
        "onset": outcome.to_dict()["onset"],
        "outcome": outcome.to_dict(),
        "train_loss": outcome.train_loss,
        "held_out_loss": outcome.held_out_loss,
        "best_held_out_loss": outcome.best_held_out_loss,
        "worst_norm": outcome.worst_norm,
        "worst_tie_rate": outcome.worst_tie_rate,
        "seconds": run.state.get("duration_s"),
        "curves": curves(run.metrics()),
        "heads": head_curves(run.metrics(), heads),
    }


def curves(metrics: dict) -> dict[str, dict[str, list]]:
    """Name -> {"step": [...], "value": [...]}; training loss smoothed, worst heads."""
    out = {}
    steps, losses = series(metrics, "train_loss")
    out["train_loss"] = _thin(steps, smooth(steps, losses))
    out["held_out_loss"] = _thin(*series(metrics, "held_out_loss"))
    for name in ("spectral_norm_q", "tie_rate", "ones_share", "max_logit", "delta_bias"):
        steps, values = series(metrics, name)
        if len(steps) and values.ndim == 3:
            out[name] = _thin(steps, worst_head(values)[0])
    out["grad_norm"] = _thin(*series(metrics, "grad_norm"))
    return {name: curve for name, curve in out.items() if curve["step"]}


def head_curves(metrics: dict, names: Sequence[str]) -> dict[str, dict[str, list]]:
    """Name -> {"step": [n], "value": [n][layer][head]}, at most HEAD_POINTS points each.

    "name:sum" is the running sum of a metric over the steps at which it was measured, and
    "name:band" the standard deviation that this sum would have if every sign were a coin's.
    """
    out = {}
    for name in names:
        metric, _, total = name.partition(":")
        steps, values = series(metrics, metric)
        if total == "sum":
            values = np.nan_to_num(values).cumsum(0)
        elif total == "band":
            values = np.sqrt((np.nan_to_num(values) ** 2).cumsum(0))
        keep = _kept(len(steps), HEAD_POINTS)
        rows = [
            [[float(f"{v:.4g}") if np.isfinite(v) else None for v in layer] for layer in row]
            for row in values[keep]
        ]
        if rows:
            out[name] = {"step": steps[keep].tolist(), "value": rows}
    return out


def _kept(count: int, most: int) -> np.ndarray:
    """Indices of at most `most` evenly spaced points, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round()).astype(int)


def _thin(steps: np.ndarray, values: np.ndarray) -> dict[str, list]:
    keep = _kept(len(steps), CURVE_POINTS)
    finite = [None if not np.isfinite(v) else float(f"{v:.6g}") for v in np.asarray(values)[keep]]
    return {"step": np.asarray(steps)[keep].tolist(), "value": finite}


def judge(experiment: Experiment, runs: dict[str, Run]) -> dict[str, Outcome]:
    """Apply the declared rules to the arms of one seed; onset is judged against the twin."""
    twin = runs.get(experiment.twin)
    failing = runs.get(experiment.failing)
    failing_step = None if failing is None else _outcome(failing).failed_step
    out = {}
    for name, run in runs.items():
        other = None if twin is None or run.id == twin.id else twin.metrics()
        out[name] = _outcome(run, other, failing_step)
    if experiment.twin in out and twin is not None:
        out[experiment.twin] = _outcome(twin, twin.metrics(), failing_step)
    return out


def _outcome(run: Run, twin: dict | None = None, failing_step: int | None = None) -> Outcome:
    state = run.state.get("tracker")  # a fork's minimum so far is partly its parent's
    tracker = OutcomeTracker.from_dict(state) if state else None
    return summarize(run.metrics(), twin, failing_step=failing_step, tracker=tracker)


def collect(experiment: Experiment, runs: dict[tuple[str, int], Run]) -> list[dict]:
    """Records of all runs (keys: arm name and seed), in the experiment's order."""
    rows = []
    for seed in sorted({seed for _, seed in runs}):
        of_seed = {arm: run for (arm, s), run in runs.items() if s == seed}
        outcomes = judge(experiment, of_seed)
        rows += [
            record(of_seed[a.name], a, seed, outcomes[a.name], () if a.at else experiment.heads)
            for a in experiment.arms
            if a.name in of_seed
        ]
    return rows


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run to be: an arm, a seed and the config (of a fork: that of its parent)."""

    arm: Arm
    seed: int
    config: RunConfig

    @property
    def key(self) -> tuple[str, int]:
        return self.arm.name, self.seed


def jobs(
    experiment: Experiment,
    *,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
    preset: str | None = None,
) -> list[Job]:
    """The chosen arms for every seed, seed by seed; a fork's parent arm is always among them.

    Raises ValueError for an arm that the experiment lacks or a config that cannot work.
    """
    chosen = [experiment.arm(a) for a in (experiment.arm_names if arms is None else arms)]
    if any(a.at is not None for a in chosen) and experiment.parent not in [a.name for a in chosen]:
        chosen.insert(0, experiment.arm(experiment.parent))
    seeds = experiment.seeds if seeds is None else seeds

    def config(arm: Arm, seed: int) -> RunConfig:
        of = arm if arm.at is None else experiment.arm(experiment.parent)
        return of.config(experiment, seed, preset)

    return [Job(a, s, config(a, s)) for s in seeds for a in chosen]


def run_experiment(
    experiment: Experiment,
    *,
    store: RunStore,
    workers: int = 2,
    progress: bool = True,
    cache_dir: str | Path = "data",
    stop_at: int | None = None,
    **chosen,
) -> dict[tuple[str, int], Run]:
    """Run, continue or load the jobs (see `jobs` for `chosen`); returns {(arm, seed): run}.

    stop_at: pause the runs from scratch there; a later call without it continues them.
    Arms from scratch come first, then forks from their states. Ctrl-C saves all runs and raises
    KeyboardInterrupt. Raises RuntimeError naming the runs that crashed.
    """
    todo = jobs(experiment, **chosen)
    common = dict(store=store, workers=workers, progress=progress, cache_dir=cache_dir)
    fresh = [job for job in todo if job.arm.at is None]
    done = train_many([job.config for job in fresh], max_steps=stop_at, **common)
    runs = dict(zip([job.key for job in fresh], done))
    _raise_crashed(runs)
    forks = [job for job in todo if job.arm.at is not None]
    if forks:
        pairs = []
        for job in forks:
            parent = runs[experiment.parent, job.seed]
            made = plan_fork(experiment, job.arm, parent)
            state = parent_state(parent, made.at, progress=progress, cache_dir=cache_dir)
            pairs.append((made.config, state))
        runs |= dict(zip([j.key for j in forks], train_many(pairs, **common)))
    _raise_crashed(runs)
    return runs


def _raise_crashed(runs: dict[tuple[str, int], Run]) -> None:
    crashed = [run for run in runs.values() if run.status == "failed"]
    if crashed:
        raise RuntimeError("; ".join(f"{run.path.name} failed: {run.message}" for run in crashed))


def ended_runs(
    experiment: Experiment, *, store: RunStore, cache_dir: str | Path = "data", **chosen
) -> dict[tuple[str, int], Run]:
    """Those of the jobs whose runs have ended, without training anything."""
    found: dict[tuple[str, int], Run] = {}
    for job in sorted(jobs(experiment, **chosen), key=lambda j: j.arm.at is not None):
        config, parent = job.config, None
        corpus = load_corpus(config, cache_dir, progress=False)
        if job.arm.at is not None:
            source = found.get((experiment.parent, job.seed))
            if source is None:
                continue
            made = plan_fork(experiment, job.arm, source)
            config, parent = made.config, Parent(source.id, made.at, "")
        path = store.path(config, corpus.sha256, parent)
        if (path / "status.json").exists() and Run(path).ended:
            found[job.key] = Run(path)
    return found


# -- archives -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Archive:
    """A file of `book/results`: where it came from and its records."""

    path: Path
    provenance: dict
    rows: list[dict] = field(repr=False)
    complete: bool = True

    def arm(self, name: str) -> list[dict]:
        return [row for row in self.rows if row["arm"] == name]

    @property
    def source(self) -> str:
        """One phrase for captions."""
        p = self.provenance
        return f"archived: {p['machine']}, preset {p['preset']}, {p['date']}, code {p['code']}"


def machine_name(provenance: dict) -> str:
    """A short name of the machine for file names: 'nvidia-h200' or 'cpu-16-core'."""
    if provenance["device"] == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", provenance["machine"].lower()).strip("-")
    return f"cpu-{provenance['machine'].partition(' ')[0]}"


def provenance(runs: Iterable[Run], preset: str, command: str) -> dict:
    """Where numbers come from: hardware, versions, commit, corpus, seeds, date, cost."""
    runs = list(runs)
    environments = [run.info["environment"] for run in runs]
    first = environments[0] if environments else {}
    corpora = {run.info["corpus"].get("sha256") for run in runs}
    cores = "" if first.get("device") == "cuda" else f"{first.get('cpus')}-core "
    return {
        "machine": f"{cores}{first.get('machine', platform.machine())}",
        "device": first.get("device"),
        "gpu": first.get("machine") if first.get("device") == "cuda" else None,
        "driver": _driver() if first.get("device") == "cuda" else None,
        "platform": first.get("platform"),
        "torch": first.get("torch"),
        "triton": first.get("triton"),
        "python": first.get("python"),
        "commit": first.get("commit"),
        "code": first.get("code", "")[:12],
        "preset": preset,
        "corpus": ", ".join(sorted({run.config.corpus for run in runs})),
        "corpus_sha256": sorted(c for c in corpora if c),
        "seeds": sorted({run.config.init_seed for run in runs}),
        "date": datetime.date.today().isoformat(),
        "duration_s": round(sum(run.state.get("duration_s") or 0.0 for run in runs), 1),
        "command": command,
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver, or None where nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.splitlines()[0].strip() if told.strip() else None


def write_archive(
    experiment: Experiment, runs: dict[tuple[str, int], Run], preset: str, folder: Path = RESULTS
) -> Path:
    """Write the archive of an experiment; the name says machine and date."""
    told = {
        "experiment": experiment.name,
        "question": experiment.question,
        "complete": len(runs) >= len(experiment.arms) * len(experiment.seeds),
    }
    command = f"python -m book.evidence {experiment.name} --preset {preset}"
    return save_archive(told, collect(experiment, runs), runs.values(), preset, command, folder)


def save_archive(
    told: dict, rows: list[dict], runs: Iterable[Run], preset: str, command: str, folder: Path
) -> Path:
    """Write told["experiment"]'s archive: what is told of it, its runs' provenance, its rows."""
    told = told | {"provenance": provenance(runs, preset, command), "rows": rows}
    source = told["provenance"]
    name = f"{machine_name(source)}-{preset}-{source['date']}.json"
    path = folder / told["experiment"] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(told, separators=(",", ":"), allow_nan=False) + "\n")
    temporary.replace(path)
    return path


def archives(name: str, folder: Path = RESULTS) -> list[Archive]:
    """Archives of an experiment, oldest first; an empty list where there is none.

    Raises ValueError naming the file if one cannot be read.
    """
    found = []
    for path in sorted((folder / name).glob("*.json")):
        try:
            told = json.loads(path.read_text())
            found.append(
                Archive(path, told["provenance"], told["rows"], told.get("complete", True))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not an archive ({error!r}); restore or delete it"
            ) from None
    return sorted(found, key=lambda a: a.provenance["date"])


def latest(name: str, preset: str | None = None, folder: Path = RESULTS) -> Archive | None:
    """The newest archive of an experiment (of one preset), or None."""
    found = [a for a in archives(name, folder) if preset in (None, a.provenance.get("preset"))]
    return found[-1] if found else None


# -- command line ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m book.evidence",
        description="Run the longer experiments and archive their numbers in book/results. "
        "The same command again continues where it stopped.",
    )
    p.add_argument("names", nargs="*", metavar="EXPERIMENT", help="which (default: all, in order)")
    p.add_argument("--list", action="store_true", help="say what there is and what it asks")
    p.add_argument("--preset", help="another preset than the experiment's own")
    p.add_argument("--seeds", help="only these, such as 0,1,2")
    p.add_argument("--arms", help="only these arms, separated by commas")
    p.add_argument("--workers", type=int, default=2, help="runs side by side (2)")
    p.add_argument("--minutes", type=float, help="stop after so long, and archive what has ended")
    p.add_argument("--store", default=str(ROOT / "runs"), help="where runs lie (runs)")
    p.add_argument("--data", default=str(ROOT / "data"), help="corpus cache (data)")
    p.add_argument("--results", default=str(RESULTS), help="where archives go (book/results)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 archived, 2 bad input, 130 interrupted (what has ended is archived first)."""
    args = parser().parse_args(argv)
    try:
        chosen = [_experiment(name) for name in args.names] or list(EXPERIMENTS.values())
        seeds = None if args.seeds is None else [int(s) for s in args.seeds.split(",")]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for e in chosen:
            print(f"{e.name} (chapter {e.chapter}, {len(e.arms)} arms x {len(e.seeds)} seeds)")
            print(f"    {e.question}")
        return 0
    with _time_limit(args.minutes):
        for experiment in chosen:
            code = _run_and_archive(experiment, args, seeds)
            if code:
                return code
    return 0


def _run_and_archive(experiment: Experiment, args, seeds) -> int:
    arms = args.arms.split(",") if args.arms else None
    common = dict(
        store=RunStore(args.store), cache_dir=args.data, seeds=seeds, arms=arms, preset=args.preset
    )
    start, code = time.monotonic(), 0
    try:
        print(f"{experiment.name}: {experiment.question}", flush=True)
        run_experiment(experiment, workers=args.workers, **common)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        code = 130
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = ended_runs(experiment, **common)
    if runs:
        preset = args.preset or experiment.preset
        path = write_archive(experiment, runs, preset, Path(args.results))
        for row in collect(experiment, runs):
            step = row["diverged_step"] or row["nonfinite_step"] or row["steps"]
            print(f"  {row['label']:40} seed {row['seed']}: {row['kind']} {step}", flush=True)
        print(f"{path} after {time.monotonic() - start:.0f} s", flush=True)
    return code


def _experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown experiment {name!r}{hint} There are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


@contextlib.contextmanager
def _time_limit(minutes: float | None):
    """Raise KeyboardInterrupt after so many minutes, as Ctrl-C would."""
    if minutes is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, minutes * 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
