"""Running experiments: which runs they ask for, where those pause, and which have ended.

Several experiments are run in one pool, so that no worker waits for the end of one of them: a run
that several ask for is trained once, and a fork starts as soon as its parent's state is there.
What has ended in the run store is not run again, so every call goes on where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2 import many
from gpt2.config import RunConfig
from gpt2.fork import parent_state
from gpt2.runs import Parent, Run, RunStore

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


def without_paused(experiment: Experiment, runs: Mapping) -> dict[tuple[str, int], Run]:
    """The runs but for parents that pause where their forks start: no runs of their own."""
    return {
        (arm, seed): run
        for (arm, seed), run in runs.items()
        if arm != experiment.parent or experiment.onset(seed) is None
    }


def is_complete(experiment: Experiment, runs: Mapping[tuple[str, int], Run]) -> bool:
    """Whether all runs of all seeds are there, each at its end."""
    names = [(arm, seed) for seed in experiment.seeds for arm in experiment.arm_names]
    return all(name in runs for name in names) and all(
        done(experiment, job, runs[job.key]) for job in jobs(experiment)
    )


def shared_arms(
    experiments: Sequence[Experiment], arms: Sequence[str] | None
) -> list[Sequence[str] | None]:
    """Which of the named arms each experiment has, in the order named; None for all of each.

    Raises ValueError for an arm that no experiment has and an experiment that has none of them.
    """
    if arms is None or len(experiments) == 1:
        return [arms] * len(experiments)
    found = [[a for a in arms if a in e.arm_names] for e in experiments]
    for name in arms:
        if not any(name in own for own in found):
            known = ", ".join(dict.fromkeys(a for e in experiments for a in e.arm_names))
            raise ValueError(f"none of the experiments has an arm {name!r}; they have {known}")
    for experiment, own in zip(experiments, found):
        if not own:
            asked = ", ".join(arms)
            raise ValueError(f"{experiment.name} has none of the arms {asked}; leave it out")
    return found


@dataclass(eq=False)
class Asked:
    """A job of an experiment and the run that it comes to.

    run: of a fork None until its parent has come to where the fork starts. lost: why it cannot be
    had.
    """

    experiment: Experiment
    job: Job
    parent: Asked | None = None
    run: many.Job | None = None
    done: bool = False
    lost: str = ""

    @property
    def numbers(self) -> tuple:
        """What forks of one parent differ by, before their runs are known."""
        return self.job.arm.attention, self.job.arm.changes, self.job.seed

    def __str__(self) -> str:
        words = f"{self.experiment.name} {self.job.arm.name} seed {self.job.seed}"
        return self.run.path.name if self.run else words


class PooledExperiments:
    """The runs of several experiments, in one pool.

    pool: one that was not entered says where runs lie, and trains none. chosen: as for `jobs`;
    several experiments share the named arms out (`shared_arms`). stop_at, stop_forks_at: where
    runs from scratch and forks pause, to be continued by a call without.
    Raises ValueError or FileNotFoundError for arms, configs, corpora or devices that cannot work,
    before anything runs.
    """

    def __init__(
        self,
        experiments: Sequence[Experiment],
        pool: many.Pool,
        *,
        arms: Sequence[str] | None = None,
        stop_at: int | None = None,
        stop_forks_at: int | None = None,
        progress: bool = True,
        **chosen,
    ):
        self.pool, self.progress, self.stop_forks_at = pool, progress, stop_forks_at
        self.asked: list[Asked] = []
        self._read: dict[Path, Run] = {}  # each keeps the metrics it has parsed
        for experiment, own in zip(experiments, shared_arms(experiments, arms)):
            found = jobs(experiment, arms=own, **chosen)
            self.asked += self._asked(experiment, found, stop_at)
        self._plan_forks()

    def _asked(self, experiment: Experiment, found: list[Job], stop_at: int | None) -> list[Asked]:
        """Runs from scratch, then forks."""
        out: dict[tuple[str, int], Asked] = {}
        for job in sorted(found, key=lambda job: job.arm.at is not None):
            out[job.key] = asked = Asked(experiment, job)
            if job.arm.at is not None:
                asked.parent = out[experiment.parent, job.seed]
            else:
                stop = pause(experiment, job, stop_at)
                asked.run = self.pool.job(job.config, max_steps=stop, progress=self.progress)
                asked.done = asked.run.done
        return list(out.values())

    def _plan_forks(self) -> None:
        """Find the runs of forks whose parents have come to where they start."""
        for asked in self.asked:
            if asked.run is not None or asked.lost:
                continue
            if asked.parent.lost:
                asked.lost = "without its parent"
            elif asked.parent.done:
                try:
                    self._plan_fork(asked)
                except ValueError as error:
                    asked.lost = f"cannot be had: {error}"

    def _plan_fork(self, asked: Asked) -> None:
        parent = self._run(asked.parent)
        made = plan_fork(asked.experiment, asked.job.arm, parent)
        origin = Parent(parent.id, made.at, "") if made.at else None
        stop = self.stop_forks_at
        if stop is not None and stop <= made.at:
            raise ValueError(f"it starts at step {made.at}, so stop_forks_at={stop} is too early")
        asked.run = self.pool.job(made.config, origin, max_steps=stop, progress=self.progress)
        asked.done = asked.run.done

    def _run(self, asked: Asked) -> Run | None:
        """The run as it lies in the store; None where it has not begun."""
        if asked.run is None or not (asked.run.path / "status.json").exists():
            return None
        path = asked.run.path
        if path not in self._read:
            self._read[path] = Run(path)
        return self._read[path]

    # -- training ---------------------------------------------------------------------------------

    def train(
        self, ended: Callable[[], None] = lambda: None, waited: Callable[[], None] = lambda: None
    ) -> None:
        """Train in the pool, which has been entered, what is not done yet.

        First the runs that forks wait for, then experiment by experiment the other runs from
        scratch and the forks. One that crashes takes none along but its own forks.
        ended: called when a run has ended. waited: called at every turn of the loop.
        Raises RuntimeError, after all others have ended, naming what crashed or cannot be had.
        """
        awaited = {id(asked.parent) for asked in self.asked if asked.parent is not None}
        order = sorted(self.asked, key=lambda asked: id(asked) not in awaited)
        told = many.Teller(self._left(), self.progress)

        def settle(job: many.Job) -> None:
            self._settle(job)
            ended()
            told.total = told.done + 1 + self._left()
            told.say(f"{job.path.name}: {job.error or job.state()}")

        def wait() -> None:
            told.line(self.pool.running, self._left() - len(self.pool.running))
            waited()

        self.pool.work(lambda: self._following(order), settle, wait)
        found = [asked for asked in self.asked if asked.lost]
        lost = [f"{a} {a.lost}" for a in found if a.parent is None or not a.parent.lost]
        if lost:
            raise RuntimeError("; ".join(dict.fromkeys(lost)))

    def _left(self) -> int:
        """How many different runs there are to train, as far as is known."""
        left = [asked for asked in self.asked if not asked.done and not asked.lost]
        return len({asked.run.path if asked.run else asked.numbers for asked in left})

    def _following(self, order: Sequence[Asked]) -> many.Job | None:
        busy = [job.path for job in self.pool.running]
        for asked in order:
            if asked.run is None or asked.done or asked.lost or asked.run.path in busy:
                continue
            try:
                self._find_state(asked)
            except (ValueError, OSError, RuntimeError) as error:
                asked.lost = f"cannot be had: {error}"
            else:
                return asked.run
        return None

    def _find_state(self, asked: Asked) -> None:
        """Where a fork starts: its parent's checkpoint, or its state computed again."""
        if asked.run.parent is not None:
            source, at = self._run(asked.parent), asked.run.parent.step
            where = dict(progress=self.progress, cache_dir=self.pool.cache_dir)
            asked.run.parent = parent_state(source, at, **where)

    def _settle(self, job: many.Job) -> None:
        """Note what a worker that has ended leaves, for all who asked for its run."""
        for asked in self.asked:
            if asked.run is None or asked.run.path != job.path or asked.done:
                continue
            asked.done = asked.run.done
            if not job.done:
                asked.lost = _end(job)
        self._plan_forks()

    # -- what there is ----------------------------------------------------------------------------

    def runs(self, experiment: Experiment) -> dict[tuple[str, int], Run]:
        """{(arm, seed): run} of those that have begun."""
        mine = [asked for asked in self.asked if asked.experiment is experiment]
        found = {asked.job.key: self._run(asked) for asked in mine}
        return {key: run for key, run in found.items() if run is not None}

    def ended(self, experiment: Experiment, partial: bool = False) -> dict[tuple[str, int], Run]:
        """{(arm, seed): run} of those that have ended. partial: and of all others, as far as they
        came, but for those that crashed."""
        found = self.runs(experiment)
        kept = {}
        for asked in self.asked:
            run = found.get(asked.job.key) if asked.experiment is experiment else None
            if run is None:
                continue
            cut = partial and run.status in ("interrupted", "running") and run.step
            if done(experiment, asked.job, run) or cut:
                kept[asked.job.key] = run
        return kept


def _end(job: many.Job) -> str:
    """How a run that is not done came to its end."""
    if job.error:
        return f"could not start: {job.error}"
    run = Run(job.path)
    return f"{run.status}: {run.message}"


def run_experiments(
    experiments: Sequence[Experiment],
    *,
    store: RunStore,
    workers: int = 2,
    devices: Sequence[str] = (),
    progress: bool = True,
    cache_dir: str | Path = "data",
    **asked,
) -> list[dict[tuple[str, int], Run]]:
    """Run, continue or load the jobs of experiments, in one pool; {(arm, seed): run} of each.

    devices: GPUs to spread the runs over (`gpt2.many.Pool`). asked: seeds and preset as for
    `jobs`, arms as for `shared_arms`; stop_at, a step at which runs from scratch pause, to be
    continued by a call without. Ctrl-C saves all runs and raises KeyboardInterrupt. Raises
    RuntimeError naming the runs that crashed.
    """
    with many.Pool(store, workers=workers, devices=devices, cache_dir=cache_dir) as pool:
        pooled = PooledExperiments(experiments, pool, progress=progress, **asked)
        pooled.train()
    return [pooled.runs(experiment) for experiment in experiments]


def run_experiment(experiment: Experiment, **how) -> dict[tuple[str, int], Run]:
    """`run_experiments` of one: {(arm, seed): run}."""
    return run_experiments([experiment], **how)[0]


def ended_runs(
    experiment: Experiment,
    *,
    store: RunStore,
    cache_dir: str | Path = "data",
    partial: bool = False,
    **chosen,
) -> dict[tuple[str, int], Run]:
    """Those of the jobs whose runs have ended, without training anything.

    partial: see `PooledExperiments.ended`.
    """
    pool = many.Pool(store, cache_dir=cache_dir)
    pooled = PooledExperiments([experiment], pool, progress=False, **chosen)
    return pooled.ended(experiment, partial)
