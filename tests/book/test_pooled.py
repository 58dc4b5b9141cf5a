"""Several experiments in one pool: what is trained when, archived when, and what is lost."""

import contextlib
import io
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest

from book import evidence
from book.experiment_runs import PooledExperiments, ended_runs, run_experiment, shared_arms
from book.experiments import Arm
from book.gpu_experiments import BUILDERS
from book.programs import Saver
from gpt2 import many
from gpt2.runs import RunStore

NAMES = ("failure-forked", "sites")
ARMS = "same,site_output"


def command(toy, names, where: str, *more) -> int:
    """Exit code of book.evidence with an onset given at step 20."""
    folders = ["--store", toy.folder / where / "runs", "--results", toy.folder / where]
    asked = [*names, "--recipe", "toy", "--seeds", "0", "--onset", "20", "--workers", "1"]
    return evidence.main([*asked, "--data", str(toy.folder / "data"), *map(str, folders), *more])


def archived(toy, where: str) -> dict[str, dict]:
    found = (toy.folder / where).glob("*-toy/*.json")
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def told(archive: dict) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in archive["rows"]]


@pytest.fixture(scope="module")
def pooled(toy):
    """Two experiments trained together: starts, as (attention, step forked at), and runs."""
    starts, start = [], many.Pool.start

    def noting(pool, job):
        starts.append((job.config.attention, job.parent and job.parent.step))
        start(pool, job)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(many.Pool, "start", noting)
        assert command(toy, NAMES, "pooled", "--arms", ARMS) == 0
    assert "[1/4] " in said.getvalue() and "[4/4] " in said.getvalue()
    return starts, len(RunStore(toy.folder / "pooled" / "runs").runs())


def test_equal_runs_are_trained_once_parents_first_then_as_named(toy, pooled):
    low = "exact,output_bits=2"
    starts, runs = pooled
    assert starts == [
        (low, None),
        (low, 16),
        (f"{low},delta_output=fp32", 16),  # the twin comes along
        (f"{low},output=fp32", 16),  # of `sites`, whose others are the first's
    ]
    assert runs == len(starts)


def test_each_archive_is_as_if_its_experiment_were_run_alone(toy, pooled, capsys):
    together = archived(toy, "pooled")
    assert set(together) == {"failure-forked-toy", "sites-toy"}
    assert command(toy, ["sites"], "alone", "--arms", ARMS) == 0
    alone = archived(toy, "alone")["sites-toy"]
    assert [row["arm"] for row in alone["rows"]] == ["same", "delta_fp32", "site_output"]
    assert told(together["sites-toy"]) == told(alone)
    assert together["sites-toy"]["provenance"]["command"] == alone["provenance"]["command"]
    assert alone["provenance"]["command"].endswith("sites --recipe toy --onset 20")
    assert "onset at 20, so forks run 16 to 100" in capsys.readouterr().out
    assert together["failure-forked-toy"]["rows"][0]["run"] == alone["rows"][0]["run"]


def test_nothing_is_trained_again_and_a_corpus_is_looked_up_once(toy, pooled, monkeypatch):
    asked, load = [], many.load_corpus
    monkeypatch.setattr(many, "load_corpus", lambda *a: asked.append(a) or load(*a))
    monkeypatch.setattr(many.Pool, "start", lambda pool, job: pytest.fail(f"{job.path} again"))
    assert command(toy, NAMES, "pooled", "--arms", ARMS) == 0
    assert len(asked) == 1


def test_a_killed_program_has_archived_what_trained_by_then(toy, pooled, monkeypatch):
    class Killed(BaseException):
        pass

    class Mortal(evidence.Archiver):
        def write(self):
            super().write()
            rows = [row for kept in archived(toy, "killed").values() for row in kept["rows"]]
            ended = [row["arm"] for row in rows if row["status"] == "finished"]
            caught = any(row["status"] == "interrupted" for row in rows)
            if "same" in ended and (caught or len(ended) > 1):  # so short a run may not be caught
                raise Killed

    monkeypatch.setattr(evidence, "Archiver", Mortal)
    monkeypatch.setattr(evidence, "Saver", partial(Saver, every=0.0))
    with pytest.raises(Killed):
        command(toy, NAMES, "killed", "--arms", ARMS, "--partial")
    kept = archived(toy, "killed")
    rows = {row["arm"]: row for row in kept["failure-forked-toy"]["rows"]}
    assert rows["same"]["status"] == "finished" and not kept["failure-forked-toy"]["complete"]
    whole = archived(toy, "pooled")["failure-forked-toy"]
    assert told(kept["failure-forked-toy"])[0] == told(whole)[0]
    cut = [r for k in kept.values() for r in k["rows"] if r["status"] == "interrupted"]
    assert all(r["message"] == "recorded while it trained" and 16 <= r["steps"] < 99 for r in cut)
    assert not list((toy.folder / "killed").glob("*-toy/*.part"))


@pytest.mark.parametrize("there", [["low"], ["low", "same"]])
def test_a_stop_archives_what_has_ended_but_no_parent_alone(
    toy, pooled, monkeypatch, capsys, there
):
    """With some of the runs of `pooled` in the store; the clock strikes at the next start."""
    where = "stopped-" + "-".join(there)
    for run in RunStore(toy.folder / "pooled" / "runs").runs():
        name = "same" if run.parent else "low"
        if run.config.attention == "exact,output_bits=2" and name in there:
            shutil.copytree(run.path, toy.folder / where / "runs" / run.path.name)

    def strike(pool, job):
        raise KeyboardInterrupt  # as `time_limit` does

    monkeypatch.setattr(many.Pool, "start", strike)
    assert command(toy, NAMES, where, "--arms", ARMS, "--partial") == 130
    assert "the same command continues" in capsys.readouterr().err
    arms = [[row["arm"] for row in kept["rows"]] for kept in archived(toy, where).values()]
    assert arms == ([["same"], ["same"]] if "same" in there else [])


def test_what_crashes_or_cannot_be_had_takes_nothing_else_along(toy, pooled):
    whole = evidence.with_given_onset(BUILDERS["failure-forked"]("toy"), "20")
    low, same, twin = (whole.arm(name) for name in ("low", "same", "delta_fp32"))
    crash = Arm("crash", low.attention, "", changes=(("qk_clip", 1.0), ("qk_norm", True)))
    arms = (low, crash, replace(same, name="bad", attention="exakt"), same, twin)
    experiment = replace(whole, arms=arms)
    common = dict(store=RunStore(toy.folder / "pooled" / "runs"), cache_dir=toy.folder / "data")
    with pytest.raises(RuntimeError) as error:
        run_experiment(experiment, seeds=[0], progress=False, **common)
    assert "failed: ValueError: " in str(error.value) and "use one of them" in str(error.value)
    assert "bad seed 0 cannot be had: " in str(error.value) and "exakt" in str(error.value)
    kept = ended_runs(experiment, seeds=[0], **common)
    assert [arm for arm, _ in kept] == ["low", "same", "delta_fp32"]


def test_a_fork_does_not_wait_for_other_runs_from_scratch(toy, pooled):
    """With the runs of `pooled` in the store, and `failure` asked for beside its forks."""
    forked = evidence.with_given_onset(BUILDERS["failure-forked"]("toy"), "20")
    pool = many.Pool(RunStore(toy.folder / "pooled" / "runs"), cache_dir=toy.folder / "data")
    asked = dict(arms=["low", "fp32"], seeds=[0], progress=False)
    found = PooledExperiments([BUILDERS["failure"]("toy"), forked], pool, **asked)
    assert [str(a.job.arm.at) for a in found.asked] == ["None", "None", "None", "0.25", "0.25"]
    whole, parent = found.asked[0], found.asked[2]
    assert parent.run.path == whole.run.path
    assert parent.done and not whole.done  # it paused where the forks start, and may go on
    assert found.ended(forked).keys() == {("low", 0), ("delta_fp32", 0)}


def test_several_experiments_share_the_arms_out(toy, capsys):
    pair = [BUILDERS[name]("toy") for name in NAMES]
    assert shared_arms(pair, ["exact", "same", "fp32"]) == [["same", "fp32"], ["exact", "same"]]
    assert shared_arms(pair, None) == [None, None]
    for arms, why in (
        ("same,twin", "has an arm 'twin'"),
        ("flash", "sites-toy has none of the arms"),
    ):
        assert command(toy, NAMES, "refused", "--arms", arms) == 2
        assert why in capsys.readouterr().err


def test_a_saver_saves_what_is_new_and_not_too_often():
    saved = []
    saver = Saver(lambda: saved.append(1), every=0.0)
    saver.pass_by()
    assert not saved
    saver.note()
    saver.pass_by()
    saver.pass_by()
    assert len(saved) == 1
    seldom = Saver(lambda: saved.append(1), always=True, every=60.0)
    seldom.pass_by()
    assert len(saved) == 1
    seldom.saved -= 60.0
    seldom.pass_by()
    seldom.pass_by()
    assert len(saved) == 2
