"""Forks of a run that has an onset and does not diverge; captures; one run twice."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from book import evidence
from book.experiment_runs import jobs, pause
from book.forks import fork_end, fork_step, head_groups, plan_fork
from book.gpu_experiments import BUILDERS
from book.regimes import RECIPES
from book.repeats import compare
from gpt2.fork import ForkError
from gpt2.outcomes import Onset, Outcome
from gpt2.runs import Run
from kernels.forensics import load_head

SIGN = Onset(20, "tie_rate", 1, 0, 0.4, 0.1)


def test_an_onset_places_forks_whatever_share_is_asked():
    sign = Onset(12_200, "tie_rate", 1, 0, 0.3, 0.09)
    assert fork_step(None, 0.25, sign) == fork_step(None, 0.5, sign) == 9_760
    assert fork_step(None, 250, sign) == 250
    assert fork_end(None, 1.5, sign) == 19_600


def test_the_parent_is_trained_to_where_forks_start_and_the_twin_comes_along():
    experiment = BUILDERS["isolation"]("mini-lr3")
    (low, same) = jobs(experiment, seeds=[0], arms=["same"])
    assert low.arm.name == "low" and pause(experiment, low) is None
    placed = replace(experiment, onsets=((0, Onset(12_200, "tie_rate", 1, 0, 0.3, 0.1)),))
    chosen = jobs(placed, seeds=[0, 1], arms=["same"])
    assert [job.arm.name for job in chosen] == 2 * ["low", "same", "delta_fp32"]
    assert [pause(placed, job) for job in chosen if job.arm.at is None] == [9_760, None]
    assert pause(placed, low, stop_at=500) == 500


def test_an_onset_can_be_given_to_experiments_with_forks(capsys):
    placed = evidence.with_given_onset(BUILDERS["sites"]("mini-lr3"), "12000")
    assert fork_step(None, 0.25, placed.onset(3)) == 9_600 and placed.onset(3).head is None
    wrong = (("failure", "9", "no forks"), ("sites", "1", "no step before"), ("sites", "x", "'x'"))
    for name, step, why in (*wrong, ("sites", "archived", "seeds 0, 1")):  # tiny has no onset
        assert evidence.main([name, "--recipe", "tiny", "--onset", step]) == 2
        assert why in capsys.readouterr().err
    assert evidence.main(["errors-forked", "--onset", "archived"]) == 2
    assert "--recipe" in capsys.readouterr().err


def test_forks_lie_at_the_archived_onset_of_a_run_that_then_diverged():
    """The first head of the groups is the one in which the onset was, which no norm may tell."""
    recipe = "mini-d12-w192-lr3"
    asked = BUILDERS["isolation"](recipe)
    assert not evidence.with_onsets(asked, recipe).onsets  # they diverged: shares of that, else
    placed = evidence.with_archived_onset(asked, recipe, [0, 1])
    assert [(s, o.layer, o.head) for s, o in placed.onsets] == [(0, 2, 0), (1, 2, 1)]
    assert [fork_step(None, 0.25, placed.onset(s)) for s in (0, 1)] == [3_520, 2_320]


def test_the_head_of_the_onset_leads_the_groups():
    norms = np.array([[[1.0, 2.0, 3.0, 9.0], [5.0, 4.0, 3.0, 2.0]]])
    metrics = {"step": np.array([0]), "spectral_norm_q": norms}
    found = head_groups(metrics, 0, seed=0, top=(1, 2))
    assert found["top"] == {1: (2,)} and found["outliers"] == {1: (0, 2)}
    assert found["quiet"] == {1: (3,)}
    assert head_groups(metrics, 0, seed=0)["top"] == {0: (3,)}


@pytest.mark.parametrize("kind", ["wide", "deep", "gpt2s"])
def test_other_sizes_and_muon_are_not_the_recipes_own_runs(kind):
    plain = RECIPES["mini-d2-lr3"].config
    for name in ("optimizer", f"size-{kind}"):
        experiment = BUILDERS[name]("mini-d2-lr3")
        failing, twin = (experiment.arm(a) for a in (experiment.failing, experiment.twin))
        config = failing.config(experiment, 0)
        assert not {"low", "delta_fp32"} & set(experiment.arm_names)
        assert config.max_steps == plain.max_steps and config.head_dim == 64
        assert twin.attention == "paper,delta_output=fp32"
    shape = {"wide": (2, 12, 768), "deep": (4, 6, 384), "gpt2s": (12, 12, 768)}[kind]
    assert (config.n_layer, config.n_head, config.n_embd) == shape


# -- toys -----------------------------------------------------------------------------------------


def test_forks_from_before_an_onset_are_judged_by_onset(toy, capsys):
    code, kept = toy.run("failure-forked", "--arms", "same,delta_dP_P")
    assert code == 0
    assert "onset at 20, so forks run 16 to 100" in capsys.readouterr().out
    assert [row["arm"] for row in kept.rows] == ["same", "delta_fp32", "delta_dP_P"]
    for row in kept.rows:
        assert row["forked_at"] == 16 and row["steps"] == 99 and row["status"] == "finished"
        assert row["curves"]["tie_rate"]["step"][0] == 20  # judged against the twin from here on
    low = [run for run in toy.store.runs() if run.parent is None]
    assert [(run.step, run.status) for run in low] == [(16, "interrupted")]
    assert toy.run("failure-forked", "--arms", "same,delta_dP_P")[0] == 0  # nothing runs again
    assert len(toy.store.runs()) == 4


def test_forks_pause_where_told_and_go_on(toy, capsys):
    chosen = ("failure-forked", "--arms", "delta_dP_P,guarded", "--partial")

    def guarded(*more):
        code, kept = toy.run(*chosen, *more)
        assert code == 0
        (row,) = kept.arm("guarded")
        return row["steps"], row["status"]

    assert guarded("--stop_forks_at", "40") == (39, "interrupted")
    assert guarded() == (99, "finished")
    assert toy.run(*chosen[:2], "flash", "--stop_forks_at", "16")[0] == 1
    assert "it starts at step 16, so stop_forks_at=16 is too early" in capsys.readouterr().err


def test_captures_lie_beside_their_archive(toy):
    code, kept = toy.run("captures")
    assert code == 0 and [row["arm"] for row in kept.rows] == ["captured", "delta_fp32"]
    names = sorted(path.name for path in kept.path.with_suffix("").glob("*"))
    top = [f"captured-seed0-step_{step:08d}-L1H0.npz" for step in (16, 20, 99)]
    quiet = [name.replace("H0", "H1") for name in top]
    twin = [f"delta_fp32-seed0-step_{step:08d}-L1H0.npz" for step in (20, 99)]
    assert names == sorted([*top, *quiet, *twin])
    head = load_head(kept.path.with_suffix("") / top[0])
    assert head.q.shape == (1, 16, 8) and head.X.shape == (1, 16, 16)


def test_a_run_twice_is_the_same_bit_for_bit_and_a_changed_one_is_not(toy):
    code, kept = toy.run("repeat", "--stop_at", "9", "--partial")
    assert code == 0 and kept.complete
    (found,) = json.loads(kept.path.read_text())["repeats"].values()
    assert found["identical"] and found["steps"] >= 9 and found["checkpoint"] == 9
    assert found["tensors"] == found["equal_tensors"] > 10
    first, again = (Run(p.parent) for p in sorted(toy.store.root.glob("*/run.json"))
                    if Run(p.parent).id in found["runs"])  # fmt: skip
    log = again.path / "metrics.jsonl"
    log.write_text(log.read_text().replace('"grad_norm":', '"grad_norm":1', 1))
    other = compare(first, Run(again.path))
    assert not other["identical"] and other["first_difference"]["names"] == ["grad_norm"]


def test_a_fork_before_its_parent_came_there_is_refused():
    parent = SimpleNamespace(
        config=RECIPES["mini-lr3"].config, step=500, parent=None, outcome=Outcome("stable")
    )
    experiment = replace(BUILDERS["isolation"]("mini-lr3"), onsets=((0, SIGN),))
    late = replace(experiment, onsets=((0, Onset(900, "tie_rate", 1, 0, 0.3, 0.1)),))
    assert plan_fork(experiment, experiment.arm("exact"), parent).at == 16
    with pytest.raises(ForkError, match="outside the run"):
        plan_fork(late, late.arm("exact"), parent)
