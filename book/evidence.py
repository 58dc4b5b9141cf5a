"""Archived evidence: `python -m book.evidence` runs the longer experiments, keeps their numbers.

A chapter shows two kinds of evidence. *Live* runs happen while the chapter executes: few arms, one
seed, minutes. *Archived* ones were run once by this program on a named machine, with more seeds
and arms, and lie in `book/results/<experiment>/<machine>-<date>.json`. Both are the same records,
made by `book.records`, so the same figure functions draw both.

The program resumes: runs are kept in the run store, and what is finished is not run again. An
archive of an unfinished experiment says so (`"complete": false`).

Several experiments named together are trained in one pool (`book.experiment_runs`), the first
named first, and each has its archive. Archives are written on the way, once a minute where runs
have ended; with --partial of all that train, as far as they came. So whoever kills the program, or
takes the machine away, destroys a minute's evidence at most.

    python -m book.evidence failure-forked errors-forked sites isolation --recipe mini-lr3 \\
        --seeds 0 --partial --workers 8 --devices cuda:0,cuda:1 --minutes 8
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import functools
import json
import math
import platform
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpt2.config import make_config, parse_assignments
from gpt2.many import Pool
from gpt2.outcomes import Onset, Outcome
from gpt2.runs import Run, RunStore
from kernels.machine import driver_version

from . import RESULTS
from .experiment_runs import PooledExperiments, is_complete, without_paused
from .experiments import EXPERIMENTS, Experiment
from .forks import fork_end, fork_step
from .gpu_experiments import BUILDERS
from .kept_captures import keep_captures
from .onsets import archived_onsets
from .programs import Saver, add_machine_arguments, seed_list, split_names, time_limit
from .records import collect
from .regimes import REGIMES, get_recipe
from .repeats import compare

ARCHIVED = "archived"  # what --onset may name besides a step

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
    def machine(self) -> str | None:
        return self.provenance.get("machine") or self.provenance.get("gpu")

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


def provenance(runs: Iterable[Run], preset: str, command: str, commit: str | None = None) -> dict:
    """Where numbers come from: hardware, versions, commit, corpus, seeds, date, cost.

    commit: of the code, where the runs could not know it (a copy without its repository).
    """
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
        "commit": first.get("commit") or commit,
        "code": first.get("code", "")[:12],
        "preset": preset,
        "corpus": ", ".join(sorted({run.config.corpus for run in runs})),
        "corpus_sha256": sorted(c for c in corpora if c),
        "seeds": sorted({run.config.init_seed for run in runs}),
        "date": datetime.date.today().isoformat(),
        "duration_s": round(sum(run.state.get("duration_s") or 0.0 for run in runs), 1),
        "command": command,
    }


_driver = functools.cache(driver_version)


def write_archive(
    experiment: Experiment,
    runs: dict[tuple[str, int], Run],
    preset: str,
    folder: Path = RESULTS,
    commit: str | None = None,
    command: str | None = None,
) -> Path:
    """Write the archive of an experiment; the name says machine and date.

    Of an archive that has that name already nothing is lost (`with_earlier`).
    """
    told = {
        "experiment": experiment.name,
        "question": experiment.question,
        "complete": is_complete(experiment, runs),
    }
    if experiment.repeated:
        told["repeats"] = repeats(experiment, runs)
    command = command or f"python -m book.evidence {experiment.name} --preset {preset}"
    rows = collect(experiment, without_paused(experiment, runs))
    source = provenance(runs.values(), preset, command, commit)
    rows = with_earlier(rows, archive_path(experiment.name, source, folder), source["code"])
    path = save_archive(told, rows, source, folder)
    if experiment.captures:
        keep_captures(runs, path.with_suffix(""))
    return path


def repeats(experiment: Experiment, runs: Mapping[tuple[str, int], Run]) -> dict[str, dict]:
    """Seed -> how the two arms that are one run compare, for seeds that have both at rest."""
    first, again = experiment.repeated
    rest = {name for name, run in runs.items() if run.status != "running"}
    both = sorted(seed for arm, seed in rest if arm == first and (again, seed) in rest)
    return {str(seed): compare(runs[first, seed], runs[again, seed]) for seed in both}


def with_earlier(rows: list[dict], path: Path, code: str) -> list[dict]:
    """The rows, and before them those of other runs that the archive at `path` holds.

    An archive has one provenance: one that other code has made is moved aside, its code in its
    name.
    """
    if not path.exists():
        return rows
    earlier = json.loads(path.read_text())
    made_by = earlier["provenance"]["code"]
    if made_by != code:
        path.rename(path.with_name(f"{path.stem}-{made_by}.json"))
        return rows
    return joined(earlier["rows"], rows)


def joined(earlier: list[dict], rows: list[dict]) -> list[dict]:
    """The earlier rows of other runs, then `rows`."""
    mine = {row["run"] for row in rows}
    return [*(row for row in earlier if row["run"] not in mine), *rows]


def archive_path(name: str, source: Mapping, folder: Path = RESULTS) -> Path:
    """Where the archive of an experiment lies, by its provenance: machine, preset and date."""
    file = f"{machine_name(source)}-{source['preset']}-{source['date']}.json"
    return folder / name / file


def save_archive(told: dict, rows: list[dict], source: Mapping, folder: Path) -> Path:
    """Write told["experiment"]'s archive: what is told of it, its provenance, its rows.

    source: `provenance` of runs. Seeds and cost are those of the rows, which may be of more.
    """
    source = dict(source)
    if rows and all("seed" in row for row in rows):
        source["seeds"] = sorted({row["seed"] for row in rows})
    if rows and all("seconds" in row for row in rows):
        source["duration_s"] = round(sum(row["seconds"] or 0.0 for row in rows), 1)
    told = told | {"provenance": source, "rows": rows}
    path = archive_path(told["experiment"], source, folder)
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


def searched(folder: Path = RESULTS) -> list[dict]:
    """Rows of all archived searches over recipes, those of the book first, then of `folder`."""
    kept = [a for where in dict.fromkeys((RESULTS, folder)) for a in archives("recipes", where)]
    return [row for archive in kept for row in archive.rows]


def latest(name: str, preset: str | None = None, folder: Path = RESULTS) -> Archive | None:
    """The archive of an experiment (of one preset) that counts, or None: see `counting`."""
    return counting(
        [a for a in archives(name, folder) if preset in (None, a.provenance.get("preset"))]
    )


def counting(found: Sequence[Archive]) -> Archive | None:
    """The newest archive, and of older ones of its preset the runs with seeds that it lacks.

    found: oldest first. All arms of a seed are compared with one another, on one machine, and with
    no other seed, so a later archive may add seeds. The provenance then names each machine with
    its seeds, and every code.
    """
    if not found:
        return None
    newest = found[-1]
    if not all("seed" in row for row in newest.rows):
        return newest
    parts, known = [], set()
    for archive in reversed(found):
        rows = [row for row in archive.rows if row.get("seed") not in known]
        seeds = {row.get("seed") for row in rows}
        if seeds and None not in seeds and _setting(archive) == _setting(newest):
            parts.insert(0, (archive, rows, sorted(seeds)))
            known |= seeds
    if len(parts) < 2:
        return newest
    sources = [archive.provenance for archive, _, _ in parts]
    by_machine = {}
    for archive, _, seeds in parts:
        by_machine.setdefault(archive.machine, []).extend(seeds)
    told = [f"{name} ({_seeds_in_words(sorted(seeds))})" for name, seeds in by_machine.items()]
    if len(told) == 1:
        told = list(by_machine)
    source = newest.provenance | {
        "machine": "; ".join(told),
        "seeds": sorted(known),
        "code": ", ".join(dict.fromkeys(str(p.get("code")) for p in sources)),
        "duration_s": round(sum(p.get("duration_s") or 0.0 for p in sources), 1),
    }
    rows = [row for _, part, _ in parts for row in part]
    complete = any(archive.complete for archive, *_ in parts)  # of the seeds it was to have
    return replace(newest, provenance=source, rows=rows, complete=complete)


def _setting(archive: Archive) -> tuple:
    return tuple(archive.provenance.get(k) for k in ("preset", "corpus"))


def _seeds_in_words(seeds: Sequence[int]) -> str:
    if not seeds:
        return "none"
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


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
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run"
    )
    p.add_argument("--recipe", help="in this recipe of book.regimes, such as tiny")
    p.add_argument(
        "--onset",
        metavar="STEP",
        help="place forks by an onset at this step; `archived`: by that of each seed's archived "
        "run, also where it went on to diverge",
    )
    p.add_argument("--seeds", help="only these, such as 0,1,2")
    p.add_argument("--arms", help="only these arms, separated by commas")
    p.add_argument("--stop_at", type=int, metavar="STEP", help="pause runs from scratch there")
    p.add_argument("--stop_forks_at", type=int, metavar="STEP", help="pause forks there")
    p.add_argument("--partial", action="store_true", help="archive runs that were cut short, too")
    add_machine_arguments(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 archived, 1 a run crashed or cannot be had, 2 bad input, 130 interrupted.

    What has ended is archived in any case but that of bad input.
    """
    args = parser().parse_args(argv)
    try:
        chosen = [with_settings(e, args.set) for e in _experiments(args.names, args.recipe)]
        seeds = None if args.seeds is None else seed_list(args.seeds)
        chosen = [_placed(e, seeds, args) for e in chosen]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for e in chosen:
            print(f"{e.name} (chapter {e.chapter}, {len(e.arms)} arms x {len(e.seeds)} seeds)")
            print(f"    {e.question}")
        return 0
    return _run_and_archive(chosen, seeds, args)


def _run_and_archive(chosen: Sequence[Experiment], seeds: Sequence[int] | None, args) -> int:
    start, code, archiver = time.monotonic(), 0, None
    arms = split_names(args.arms) if args.arms else None
    asked = dict(arms=arms, seeds=seeds, preset=args.preset)
    asked |= dict(stop_at=args.stop_at, stop_forks_at=args.stop_forks_at)
    where = dict(workers=args.workers, devices=args.devices, cache_dir=args.data)
    try:
        with time_limit(args.minutes):
            _tell(chosen, seeds)
            try:
                pool = Pool(RunStore(args.store), **where)
                pooled = PooledExperiments(chosen, pool, **asked)
            except (ValueError, FileNotFoundError) as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            archiver = Archiver(chosen, pooled, args)
            saver = Saver(archiver.write, always=args.partial)
            with pool:
                pooled.train(saver.note, saver.pass_by)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        code = 130
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    if archiver is not None:
        lost = archiver.write()
        code = code or int(lost)
        for path in archiver.paths.values():
            print("\n".join(outcome_lines(path)))
            print(f"{path} after {time.monotonic() - start:.0f} s", flush=True)
    return code


@dataclass
class Archiver:
    """Writes the archives of experiments that train in one pool, each where its runs changed."""

    experiments: Sequence[Experiment]
    pooled: PooledExperiments
    args: argparse.Namespace
    paths: dict[str, Path] = field(default_factory=dict)
    states: dict[str, list] = field(default_factory=dict)

    def write(self) -> bool:
        """Whether one could not be written; the others are, and training need not end for it."""
        lost = False
        for experiment in self.experiments:
            try:
                self._write(experiment)
            except (ValueError, OSError) as error:
                print(f"error: {experiment.name} is not archived: {error}", file=sys.stderr)
                lost = True
        return lost

    def _write(self, experiment: Experiment) -> None:
        runs = self.pooled.ended(experiment, self.args.partial)
        state = [(key, run.id, run.status, run.step) for key, run in runs.items()]
        nothing = not without_paused(experiment, runs)
        if nothing or self.states.get(experiment.name) == state:
            return
        preset = self.args.preset or experiment.preset
        where = dict(folder=Path(self.args.results), commit=self.args.commit)
        told = dict(command=_command(experiment, preset, self.args), **where)
        self.paths[experiment.name] = write_archive(experiment, runs, preset, **told)
        self.states[experiment.name] = state


def _command(experiment: Experiment, preset: str, args) -> str:
    """What makes an archive, by itself."""
    name, how = experiment.name, f"--preset {preset}"
    if args.recipe:
        name, how = name.removesuffix(f"-{args.recipe}"), f"--recipe {args.recipe}"
    how = " ".join([how, *(f"--set {text}" for text in args.set)])
    how += "" if args.onset is None else f" --onset {args.onset}"
    return f"python -m book.evidence {name} {how}"


def outcome_lines(path: Path) -> list[str]:
    """One line for each run of an archive."""
    rows = json.loads(path.read_text())["rows"]
    return [
        f"  {row['label']:40} seed {row['seed']}: {Outcome.from_dict(row['outcome'])}"
        for row in rows
    ]


def _tell(chosen: Sequence[Experiment], seeds: Sequence[int] | None) -> None:
    for experiment in chosen:
        print(f"{experiment.name}: {experiment.question}", flush=True)
        for seed, onset in experiment.onsets:
            if seeds is not None and seed not in seeds:
                continue
            at, until = fork_step(None, 0.5, onset), fork_end(None, None, onset)
            print(f"  seed {seed}: onset at {onset.step:,}, so forks run {at:,} to {until:,}")


def with_settings(experiment: Experiment, told: Sequence[str]) -> Experiment:
    """The experiment with "key=value" settings in every run. Raises ValueError for a bad one."""
    changes = parse_assignments(told)
    make_config(experiment.preset, changes)
    return replace(experiment, base=(*experiment.base, *changes.items()))


def _placed(experiment: Experiment, seeds: Sequence[int] | None, args) -> Experiment:
    """The experiment with its forks where the command line says."""
    folder = Path(args.results)
    if args.onset == ARCHIVED:
        return with_archived_onset(experiment, args.recipe, seeds, folder)
    if args.recipe:
        experiment = with_onsets(experiment, args.recipe, folder)
    return experiment if args.onset is None else with_given_onset(experiment, args.onset)


def with_onsets(experiment: Experiment, recipe: str, folder: Path = RESULTS) -> Experiment:
    """The experiment with its forks placed by the recipe's archived onsets, where it has forks."""
    if experiment.parent is None:
        return experiment
    found = archived_onsets(searched(folder), recipe)
    return replace(experiment, onsets=tuple(sorted(found.items())))


def with_archived_onset(
    experiment: Experiment,
    recipe: str | None,
    seeds: Sequence[int] | None = None,
    folder: Path = RESULTS,
) -> Experiment:
    """The same where runs of the recipe went on to diverge: theirs need not be trained so far.

    Raises ValueError without a recipe, without forks, and for seeds without an archived onset.
    """
    if recipe is None:
        raise ValueError(f"--onset {ARCHIVED} needs a recipe whose onsets it is: add --recipe")
    _must_fork(experiment, ARCHIVED)
    found = archived_onsets(searched(folder), recipe, failed=True)
    seeds = experiment.seeds if seeds is None else seeds
    if lacking := [seed for seed in seeds if seed not in found]:
        raise ValueError(
            f"--onset {ARCHIVED}: no onset of {recipe} is archived for {_seeds_in_words(lacking)}"
            f"; there are {_seeds_in_words(sorted(found))}, name some with --seeds"
        )
    return replace(experiment, onsets=tuple((seed, found[seed]) for seed in seeds))


def with_given_onset(experiment: Experiment, told: str) -> Experiment:
    """The experiment with the forks of every seed placed by an onset at that step, in no head
    known.

    Raises ValueError for an experiment without forks and for a step that leaves no room.
    """
    try:
        step = int(told)
    except ValueError:
        words = f"--onset {told!r} is no step; write a whole number, or {ARCHIVED}"
        raise ValueError(words) from None
    _must_fork(experiment, told)
    if step < 2:
        raise ValueError(f"--onset {step} leaves no step before it; give one of at least 2")
    given = Onset(step, "given", None, None, math.nan, math.nan)
    return replace(experiment, onsets=tuple((seed, given) for seed in experiment.seeds))


def _must_fork(experiment: Experiment, told: str) -> None:
    if experiment.parent is None:
        raise ValueError(f"--onset {told}: {experiment.name} has no forks to place; leave it out")


def _experiments(names: Sequence[str], recipe: str | None) -> list[Experiment]:
    """The named experiments, or all; of a recipe those that any regime can have."""
    known = EXPERIMENTS if recipe is None else BUILDERS
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            raise ValueError(f"unknown experiment {name!r}{hint} There are {', '.join(known)}")
    if recipe is not None:
        if recipe not in REGIMES:
            get_recipe(recipe)
        return [BUILDERS[name](recipe) for name in names or BUILDERS]
    return [EXPERIMENTS[name] for name in names or EXPERIMENTS]


if __name__ == "__main__":
    sys.exit(main())
