"""Search for a recipe in which bf16 itself fails within minutes: `python -m book.recipes`.

Each recipe of `book.regimes` is tried with its low-precision arm and seed 0 first. As soon as one
diverges, by the rules of `gpt2.outcomes`, its twin with delta from an fp32 O is trained on the
same batches to 1.5 times the steps; then PyTorch's own attention as a witness; then more seeds of
both. A twin that diverges as well ends the confirmation: that failure is not delta's.

    python -m book.recipes --recipes mini-lr3 --seeds 1,2 --arms low
    python -m book.recipes --recipes mini-lr3 --seeds 0 --arms low,delta_fp32

With `--arms` just these arms and seeds are run, whatever comes of them: a twin as far as its
failing run, so that an onset can be judged where nothing diverged, or to outlive it where an
archive or the run store says that it diverged. The two may be of different archives: they are
judged together all the same (`book.onsets`).

What to run next is decided from the run store alone, so the same command continues. Every try is
archived in `book/results/recipes`, whatever came of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2.many import Job, Pool
from gpt2.outcomes import HEALTHY_FACTOR, Outcome, series
from gpt2.runs import Run, RunStore

from . import RESULTS
from .evidence import archive_path, joined, provenance, save_archive, searched
from .experiments import Experiment
from .gpu_experiments import failure
from .onsets import judged
from .programs import Saver, add_machine_arguments, seed_list, split_names, time_limit
from .records import collect, one_a_seed
from .regimes import RECIPES, Regime, get_recipe

SEEDS = (0, 1, 2, 3, 4)
QUESTION = "In which recipes does bf16 itself fail, and how soon?"
TELL_S = 30.0  # between lines of progress

Key = tuple[str, str, int]  # recipe, arm, seed


@dataclass(frozen=True)
class Try:
    """One run of the search: to be stopped after `steps`. stage: 0 is most urgent."""

    recipe: str
    arm: str
    seed: int
    steps: int
    stage: int

    @property
    def key(self) -> Key:
        return self.recipe, self.arm, self.seed


TWIN, WITNESS, SEED, SEED_TWIN, FIRST = range(5)


def wanted(
    recipes: Mapping[str, Regime],
    known: Mapping[Key, Outcome],
    seeds: Sequence[int] = SEEDS,
    arms: Sequence[str] = (),
) -> list[Try]:
    """Every try that the outcomes so far ask for, most urgent first; known ones among them.

    Among equals the recipe whose first failure came after the fewest steps goes first.
    arms: these alone, for every seed, whatever the outcomes.
    """
    if arms:
        return list(_named(recipes, known, seeds, arms))
    first = [Try(name, "low", seeds[0], how.most, FIRST) for name, how in recipes.items()]
    diverged = [t for t in first if t.key in known and known[t.key].kind == "diverged"]
    diverged.sort(key=lambda t: known[t.key].failed_step)
    more = [t for f in diverged for t in _confirmation(f, recipes[f.recipe], known, seeds)]
    return [*sorted(more, key=lambda t: t.stage), *first]


def _named(
    recipes: Mapping[str, Regime],
    known: Mapping[Key, Outcome],
    seeds: Sequence[int],
    arms: Sequence[str],
) -> Iterator[Try]:
    """Each arm for as many steps as low precision has, or to outlive it where it diverged."""
    for name, how in recipes.items():
        for seed in seeds:
            low = known.get((name, "low", seed))
            outliving = _outliving(low) if low is not None and low.kind == "diverged" else how.most
            for arm in arms:
                steps = how.most if arm == "low" else outliving
                yield Try(name, arm, seed, steps, FIRST if arm == "low" else TWIN)


def _confirmation(
    first: Try, how: Regime, known: Mapping[Key, Outcome], seeds: Sequence[int]
) -> Iterator[Try]:
    name = first.recipe
    steps = _outliving(known[first.key])
    twin = Try(name, "delta_fp32", first.seed, steps, TWIN)
    yield twin
    if twin.key in known and known[twin.key].failed:
        return
    yield Try(name, "sdpa", first.seed, steps, WITNESS)
    for seed in seeds[1:]:
        low = Try(name, "low", seed, how.most, SEED)
        yield low
        if low.key in known and known[low.key].kind == "diverged":
            yield Try(name, "delta_fp32", seed, _outliving(known[low.key]), SEED_TWIN)


def _outliving(failing: Outcome) -> int:
    """Updates after which a run without a sign is healthy by the declared rule."""
    return math.ceil(HEALTHY_FACTOR * failing.failed_step) + 1


# -- running --------------------------------------------------------------------------------------


@dataclass
class Search:
    """The state of one call: jobs by key, and the outcomes of those that are done."""

    recipes: Mapping[str, Regime]
    pool: Pool
    seeds: Sequence[int] = SEEDS
    reserve: int = 0  # workers that first tries leave to confirmations
    arms: Sequence[str] = ()  # these alone (see `wanted`)
    archived: Mapping[Key, Outcome] = field(default_factory=dict)  # of low precision
    jobs: dict[Key, Job] = field(default_factory=dict)
    known: dict[Key, Outcome] = field(default_factory=dict)
    lost: dict[Key, str] = field(default_factory=dict)  # why a try cannot be had
    read: dict[Path, Run] = field(default_factory=dict)  # each keeps the metrics it has parsed

    def experiment(self, recipe: str) -> Experiment:
        return failure(recipe, self.recipes[recipe])

    def run_of(self, key: Key) -> Run:
        path = self.jobs[key].path
        return self.read.setdefault(path, Run(path))

    def job(self, asked: Try) -> Job:
        experiment = self.experiment(asked.recipe)
        config = experiment.arm(asked.arm).config(experiment, asked.seed)
        return self.pool.job(config, max_steps=asked.steps, progress=False)

    def next(self) -> Try | None:
        """The most urgent try that neither runs nor is done; None where none may start now.

        A run that an earlier call has done is taken as known on the way.
        """
        running = [key for key, job in self.jobs.items() if job in self.pool.running]
        firsts = sum(arm == "low" and seed == self.seeds[0] for _, arm, seed in running)
        room = bool(self.arms) or firsts < self.pool.workers - self.reserve
        known = {**self.archived, **self.known} if self.arms else self.known
        for asked in wanted(self.recipes, known, self.seeds, self.arms):
            if self._done(asked) or asked.key in self.lost or asked.key in running:
                continue
            if asked.stage == FIRST and not room:
                continue
            try:
                job = self.jobs[asked.key] = self.job(asked)
            except (ValueError, OSError) as error:
                self.lost[asked.key] = str(error)
                print(f"{_words(asked.key)}: {error}", file=sys.stderr, flush=True)
                continue
            if job.done:
                self.known[asked.key] = self.run_of(asked.key).outcome
                return self.next()
            return asked
        return None

    def _done(self, asked: Try) -> bool:
        """Whether its outcome is known, for as many steps as are asked of it by now."""
        known = self.known.get(asked.key)
        if known is None:
            return False
        return known.failed or self.jobs[asked.key].max_steps >= asked.steps

    def settle(self, job: Job) -> Key:
        """Note how a run ended and return its key."""
        key = next(key for key, mine in self.jobs.items() if mine is job)
        if job.done:
            self.known[key] = self.run_of(key).outcome
        else:
            self.lost[key] = job.error or Run(job.path).message
        return key

    def run(self, save=lambda: None) -> None:
        """Until nothing is left to try. save: called once a minute when runs have ended."""
        saver, told = Saver(save), time.monotonic()

        def following() -> Job | None:
            asked = self.next()
            return None if asked is None else self.jobs[asked.key]

        def ended(job: Job) -> None:
            saver.note()
            print(self.sentence(self.settle(job)), flush=True)

        def waited() -> None:
            nonlocal told
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                print(self.progress(), flush=True)
            saver.pass_by()

        self.pool.work(following, ended, waited)

    def sentence(self, key: Key) -> str:
        if key in self.lost:
            return f"{_words(key)}: could not be had: {self.lost[key]}"
        run = self.run_of(key)
        cost = run.state["duration_s"] / 60
        speed = steps_per_s(run)
        told = "" if speed is None else f"{speed:.0f} steps/s, "
        return f"{_words(key)}: {self.known[key]} ({told}{cost:.1f} min)"

    def progress(self) -> str:
        """'running: tiny low 0 at 1,200/120,000; ...'"""
        parts = [
            f"{_words(key)} at {job.state()}"
            for key, job in self.jobs.items()
            if job in self.pool.running
        ]
        return f"running: {'; '.join(parts)}"

    def runs(self) -> dict[str, dict[tuple[str, int], Run]]:
        """recipe -> (arm, seed) -> run, of all tries that began, however they ended."""
        out: dict[str, dict] = {}
        for (recipe, arm, seed), job in self.jobs.items():
            if (job.path / "status.json").exists():
                out.setdefault(recipe, {})[arm, seed] = self.run_of((recipe, arm, seed))
        return out


def _words(key: Key) -> str:
    recipe, arm, seed = key
    return f"{recipe} {arm} seed {seed}"


def steps_per_s(run: Run) -> float | None:
    """Median over the run of its training speed, without evaluation, probes and compilation."""
    _, speeds = series(run.metrics(), "tokens_per_s")
    return float(np.median(speeds)) / run.config.tokens_per_step if len(speeds) else None


# -- archives -------------------------------------------------------------------------------------


def rows_of(search: Search, recipe: str, runs: Mapping[tuple[str, int], Run]) -> list[dict]:
    """Records of a recipe's tries (`book.records.record`), with what the search adds to them."""
    experiment = search.experiment(recipe)
    rows = collect(experiment, dict(runs))
    for row in rows:
        run, key = runs[row["arm"], row["seed"]], (recipe, row["arm"], row["seed"])
        speed = steps_per_s(run)
        twin = runs.get((experiment.twin, row["seed"]))
        row |= {
            "recipe": recipe,
            "steps_asked": search.jobs[key].max_steps,
            "steps_per_s": None if speed is None else round(speed, 1),
            "minutes": round((row["seconds"] or 0.0) / 60, 2),
            "judged_from": None if twin is None else "metrics",
            "judged_to": None if twin is None else min(run.step, twin.step),
            "code": run.info["environment"].get("code"),
        }
    return rows


def save(search: Search, folder: Path, commit: str | None = None) -> list[Path]:
    """One archive for each preset that recipes start from; rows of other runs in it are kept."""
    runs = search.runs()
    paths = []
    for preset in dict.fromkeys(search.recipes[name].preset for name in runs):
        names = [name for name in runs if search.recipes[name].preset == preset]
        mine = [run for name in names for run in runs[name].values()]
        rows = [row for name in names for row in rows_of(search, name, runs[name])]
        told = {
            "experiment": "recipes",
            "question": QUESTION,
            "complete": all(key in search.known for key in search.jobs if key[0] in names),
            "recipes": {name: _told(search.recipes[name]) for name in names},
        }
        command = "python -m book.recipes --recipes " + ",".join(names)
        command += f" --arms {','.join(search.arms)}" if search.arms else ""
        source = provenance(mine, preset, command, commit)
        rows, told = _with_earlier(rows, told, archive_path("recipes", source, folder))
        paths.append(save_archive(told, judged(rows), source, folder))
    return paths


def archived_failures(recipes: Sequence[str], folder: Path = RESULTS) -> dict[Key, Outcome]:
    """Outcomes of low precision that diverged, from the archives in `folder` and in the book."""
    rows = [row for row in searched(folder) if row["recipe"] in recipes]
    return {
        (row["recipe"], "low", row["seed"]): Outcome.from_dict(row["outcome"])
        for row in one_a_seed(rows)
        if row["arm"] == "low" and row["kind"] == "diverged"
    }


def _told(how: Regime) -> dict:
    return {
        "preset": how.preset,
        "low": how.low,
        "steps": how.steps,
        "changes": dict(how.changes),
    }


def _with_earlier(rows, told, path: Path) -> tuple[list[dict], dict]:
    """Add what today's archive of this machine, at `path`, holds of runs that this store does not.

    Whatever code has made them: each row says its own.
    """
    if not path.exists():
        return rows, told
    earlier = json.loads(path.read_text())
    recipes = earlier.get("recipes", {}) | told["recipes"]
    return joined(earlier["rows"], rows), told | {"recipes": recipes}


# -- command line ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m book.recipes",
        description="Try recipes in which bf16 itself may fail; confirm those that do; archive "
        "every try. The same command again continues.",
    )
    p.add_argument("--recipes", help="only these, separated by commas (default: all)")
    p.add_argument("--arms", help="just these, for every seed: low,delta_fp32")
    p.add_argument("--list", action="store_true", help="say what each recipe is")
    p.add_argument("--seeds", default="0,1,2,3,4", help="the first is tried first (0,1,2,3,4)")
    p.add_argument(
        "--reserve", type=int, help="workers kept for confirmations (a quarter of them)"
    )
    add_machine_arguments(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 nothing left to try, 2 bad input, 130 stopped. Archived in either case."""
    args = parser().parse_args(argv)
    try:
        names = split_names(args.recipes) if args.recipes else list(RECIPES)
        recipes = {name: get_recipe(name) for name in names}
        seeds, arms = seed_list(args.seeds), split_names(args.arms or "")
        for arm in arms:
            failure(names[0], recipes[names[0]]).arm(arm)
        where = dict(workers=args.workers, devices=args.devices, cache_dir=args.data)
        pool = Pool(RunStore(args.store), **where)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for name, how in recipes.items():
            told = ", ".join(f"{k}={v}" for k, v in how.changes)
            print(f"{name}: {how.preset}, {how.low}, at most {how.most:,} steps; {told}")
        return 0
    reserve = args.workers // 4 if args.reserve is None else args.reserve
    archived = archived_failures(names, Path(args.results))
    search = Search(recipes, pool, seeds, reserve, arms, archived)

    def archive() -> list[Path]:
        return save(search, Path(args.results), args.commit)

    code = 0
    try:
        with time_limit(args.minutes), pool:
            search.run(archive)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        code = 130
    for path in archive():
        print("\n".join([str(path), *outcome_lines(path, names)]))
    return code


def outcome_lines(path: Path, recipes: Sequence[str]) -> list[str]:
    """One line for each archived run of these recipes, as judged against its twin."""
    rows = json.loads(path.read_text())["rows"]
    return [
        f"  {_words((r['recipe'], r['arm'], r['seed']))}: {Outcome.from_dict(r['outcome'])}"
        for r in rows
        if r["recipe"] in recipes
    ]


if __name__ == "__main__":
    sys.exit(main())
