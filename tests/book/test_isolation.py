"""The isolation experiment: which arms there are, where forks start and end, which heads."""

from types import SimpleNamespace

import numpy as np
import pytest

from book.experiment_runs import jobs
from book.experiments import FAILURE, LIVE_ISOLATION, isolation
from book.forks import fork_end, fork_step, head_groups, heads_text, spell_out
from book.records import head_curves, record
from gpt2.config import make_config
from gpt2.outcomes import Outcome
from kernels.numerics import ScopedNumerics


def norms_of(last):
    norms = np.full((3, 2, 4), 2.0)
    norms[1] = last
    norms[2, 0, 0] = 900.0  # after the loss has left, when everything may have grown
    return {"step": np.array([0, 100, 200]), "spectral_norm_q": norms}


def parent_run(failed=None, done=4_500):
    outcome = Outcome("diverged" if failed else "stable", diverged_step=failed)
    return SimpleNamespace(outcome=outcome, step=failed or done, config=make_config("cpu"))


def test_the_failing_run_is_the_one_of_chapter_1():
    (mine, _), (theirs,) = (
        jobs(isolation(), seeds=[3], arms=["same"]),
        jobs(FAILURE, seeds=[3], arms=["low"]),
    )
    assert mine.config.checkpoint_interval == 250  # where forks start
    assert mine.arm.name == "low" and mine.config.identity() == theirs.config.identity()


@pytest.mark.parametrize("preset", ["cpu", "mini"])
def test_arms_differ_in_numbers_and_every_intervention_is_asked_once(preset):
    experiment, config = isolation(preset), make_config(preset)
    assert len(set(experiment.arm_names)) == len(experiment.arms)
    seen = set()
    for arm in experiment.arms[1:]:
        if "{" not in arm.attention:
            scoped = ScopedNumerics.parse(arm.attention)
            scoped.check(config.n_layer, config.n_head)
            seen.add(tuple(scoped.for_layer(i, config.n_head) for i in range(config.n_layer)))
    assert len(seen) == sum("{" not in arm.attention for arm in experiment.arms[1:])
    told = [label for arm in experiment.arms for label in (arm.label, *arm.also)]
    assert len(told) == len(set(told))
    assert {"no tiling", "delta from dP and P", "S in fp32", "l in fp32"} <= set(told)
    assert set(LIVE_ISOLATION[preset]) <= set(experiment.arm_names)
    assert {"same", "exact"} <= set(LIVE_ISOLATION[preset])


def test_two_layers_make_one_arm_of_low_precision_here_and_fp32_there():
    assert "fp32 in layer 1 only" in isolation("cpu").arm("only_L0").also
    assert isolation("mini").arm("fp32_L1").label == "fp32 in layer 1 only"


def test_forks_start_at_a_checkpoint_before_the_failure_and_end_well_after_it():
    run = parent_run(failed=2_038)
    assert fork_step(run, 0.25) == fork_step(parent_run(failed=1_993), 0.25) == 500
    assert fork_step(run, 0.5) == 1_000
    assert fork_step(run, 777) == 777
    assert fork_step(parent_run(failed=800), 0.25) == 200  # no checkpoint so early
    assert fork_end(run, 1.5) == 3_100 and fork_end(run, 1.0) == 2_100
    assert fork_end(parent_run(failed=2_000), 1.0) == 2_100  # far enough to fail as the parent did
    assert fork_end(run, None) == fork_end(parent_run(), 1.5) == run.config.max_steps


def test_heads_are_chosen_by_their_norm_before_the_loss_left():
    metrics = norms_of([[1, 2, 3, 4], [9, 5, 7, 6]])
    groups = head_groups(metrics, 150, seed=0)
    assert groups["top"] == {1: (0,)} and groups["outliers"] == {1: (0, 2)}
    assert groups["rest"] == {0: (0, 1, 2, 3), 1: (1, 3)}
    assert sum(map(len, groups["sham"].values())) == 2
    for layer, heads in groups["sham"].items():
        assert set(heads) <= set(groups["rest"][layer])
    assert groups == head_groups(metrics, 150, seed=0)
    with pytest.raises(ValueError, match="has no spectral norms"):
        head_groups({"step": np.arange(3)}, 2, seed=0)


def test_groups_of_heads_are_spelt_out_a_scope_a_layer():
    groups = {"rest": {0: (0, 1), 1: (1,)}}
    text = spell_out("exact,output_bits=2; {rest} -> exact; L1H0 -> paper", groups)
    assert text == "exact,output_bits=2; L0H0+1 -> exact; L1H1 -> exact; L1H0 -> paper"
    assert heads_text(groups["rest"]) == ["L0H0+1", "L1H1"]
    ScopedNumerics.parse(text).check(2, 2)
    with pytest.raises(ValueError, match="no group of heads is named 'best'"):
        spell_out("exact; {best} -> exact", groups)


def test_archives_keep_every_head_of_named_metrics_thinned_and_strict():
    values = np.random.default_rng(0).normal(size=(500, 2, 3))
    values[499, 0, 0] = np.nan
    kept = head_curves({"step": np.arange(500), "tie_rate": values}, ("tie_rate", "max_logit"))
    assert list(kept) == ["tie_rate"]
    steps, rows = kept["tie_rate"]["step"], kept["tie_rate"]["value"]
    assert steps[0] == 0 and steps[-1] == 499 and len(steps) == len(rows) <= 60
    assert rows[-1][0][0] is None and rows[0][1][2] == pytest.approx(values[0, 1, 2], rel=1e-3)


def test_a_record_says_what_was_run_not_what_the_template_asked():
    arm = isolation("cpu").arm("heads_outliers")
    config = make_config("cpu", {"attention": "exact,output_bits=2; L1H0 -> exact"})
    run = SimpleNamespace(
        config=config,
        parent=SimpleNamespace(step=500),
        id="x",
        status="finished",
        message="finished 200 steps",
        state={},
        metrics=lambda: norms_of(np.ones((2, 4))),
    )
    row = record(run, arm, 0, Outcome("stable", last_step=200), ("spectral_norm_q",))
    assert row["attention"] == config.attention and row["forked_at"] == 500
    assert row["heads"]["spectral_norm_q"]["step"] == [0, 100, 200]
