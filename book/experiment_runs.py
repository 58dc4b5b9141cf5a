"""Running an experiment: which runs it asks for, where they pause, and which have ended.

Runs from scratch come first, then the forks from their states. What has ended in the run store is
not run again, so every call of `run_experiment` goes on where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.config import RunConfig
from gpt2.data import load_corpus
from gpt2.fork import parent_state
from gpt2.runs import Parent, Run, RunStore
from gpt2.train import train_many

from .experiments import Arm, Experiment
from .forks import fork_step, plan_fork


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
    """The chosen arms for every seed, seed by seed; a fork's parent arm is always among them, and
    the twin where forks are judged by onset.

    Raises ValueError for an arm that the experiment lacks or a config that cannot work.
    """
    chosen = [experiment.arm(a) for a in (experiment.arm_names if arms is None else arms)]
    if any(a.at is not None for a in chosen) and experiment.parent not in [a.name for a in chosen]:
        chosen.insert(0, experiment.arm(experiment.parent))
    if experiment.onsets and any(a.at is not None for a in chosen):
        twin = experiment.arm(experiment.twin)
        chosen += [] if twin in chosen else [twin]
    seeds = experiment.seeds if seeds is None else seeds

    def config(arm: Arm, seed: int) -> RunConfig:
        of = arm if arm.at is None else experiment.arm(experiment.parent)
        return of.config(experiment, seed, preset)

    return [Job(a, s, config(a, s)) for s in seeds for a in chosen]


def pause(experiment: Experiment, job: Job, stop_at: int | None = None) -> int | None:
    """The step at which a run from scratch pauses, None for its end.

    The parent of forks that an onset places goes no farther than the last of them starts.
    """
    onset = experiment.onset(job.seed)
    if stop_at is None and onset is not None and job.arm.name == experiment.parent:
        starts = [fork_step(None, a.at, onset) for a in experiment.arms if a.at is not None]
        return max(starts, default=None)
    return stop_at or experiment.stop_at


def done(experiment: Experiment, job: Job, run: Run) -> bool:
    """Whether a run has ended, or paused where the experiment lets it."""
    stop = pause(experiment, job) if job.arm.at is None else None
    return run.ended or (stop is not None and run.step >= stop)


def run_experiment(
    experiment: Experiment,
    *,
    store: RunStore,
    workers: int = 2,
    devices: Sequence[str] = (),
    progress: bool = True,
    cache_dir: str | Path = "data",
    stop_at: int | None = None,
    **chosen,
) -> dict[tuple[str, int], Run]:
    """Run, continue or load the jobs (see `jobs` for `chosen`); returns {(arm, seed): run}.

    devices: GPUs to spread the runs over (`gpt2.many.Pool`). stop_at: pause the runs from scratch
    there; a later call without it continues them.
    Arms from scratch come first, then forks from their states. Ctrl-C saves all runs and raises
    KeyboardInterrupt. Raises RuntimeError naming the runs that crashed.
    """
    todo = jobs(experiment, **chosen)
    common = dict(store=store, workers=workers, devices=devices, progress=progress)
    common["cache_dir"] = cache_dir
    fresh = [job for job in todo if job.arm.at is None]
    stops = [pause(experiment, job, stop_at) for job in fresh]
    trained = train_many([job.config for job in fresh], max_steps=stops, **common)
    runs = dict(zip([job.key for job in fresh], trained))
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
    experiment: Experiment,
    *,
    store: RunStore,
    cache_dir: str | Path = "data",
    partial: bool = False,
    **chosen,
) -> dict[tuple[str, int], Run]:
    """Those of the jobs whose runs have ended, without training anything.

    partial: also those that were cut short, as far as they came, with status `interrupted`.
    """
    found: dict[tuple[str, int], Run] = {}
    for job in sorted(jobs(experiment, **chosen), key=lambda j: j.arm.at is not None):
        config, parent = job.config, None
        corpus = load_corpus(config, cache_dir, progress=False)
        if job.arm.at is not None:
            source = found.get((experiment.parent, job.seed))
            of = replace(job, arm=experiment.arm(experiment.parent))
            if source is None or not done(experiment, of, source):
                continue
            made = plan_fork(experiment, job.arm, source)
            config, parent = made.config, Parent(source.id, made.at, "")
        path = store.path(config, corpus.sha256, parent)
        if not (path / "status.json").exists():
            continue
        run = Run(path)
        cut = partial and run.status == "interrupted" and run.step
        if done(experiment, job, run) or cut:
            found[job.key] = run
    return found
