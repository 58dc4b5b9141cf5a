"""Forks: the same bits without a change, one difference with one, refusals, tables, resume."""

import json

import numpy as np
import pytest
from trainer_helpers import tiny, write_corpus

from gpt2 import fork as forks
from gpt2.analysis import (
    Arm,
    ancestor,
    format_table,
    full_metrics,
    joined,
    judge,
    outcome_rows,
    summarize_arms,
)
from gpt2.data import load_corpus
from gpt2.fork import ForkError, fork, fork_many, identical_losses, parse_arm, plan
from gpt2.outcomes import Outcome
from gpt2.runs import Run, RunStore
from gpt2.train import train


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(parent run of 60 steps with checkpoints at 40, 50 and 60, options for fork)."""
    root = tmp_path_factory.mktemp("forks")
    config = tiny(
        write_corpus(root / "text"),
        attention="paper,unnormalized=bf16:stochastic",
        max_steps=60,
        dropout=0.1,
        checkpoint_interval=10,
        keep_checkpoints=3,
        schedule="cosine",
    )
    corpus = load_corpus(config, root / "data", progress=False)
    options = dict(progress=False, cache_dir=root / "data")
    run = train(config, store=RunStore(root / "runs"), corpus=corpus, **options)
    return run, options


def losses(run):
    return {row["step"]: row["train_loss"] for row in run.rows() if "train_loss" in row}


def test_a_fork_without_a_change_repeats_its_parent_bit_for_bit(lab):
    run, options = lab
    child = fork(run, 40, **options)
    assert child.path != run.path and child.parent.run_id == run.id and child.parent.step == 40
    mine, theirs = losses(run), losses(child)
    assert min(theirs) == 40 and max(theirs) == 59
    assert all(mine[s] == theirs[s] for s in theirs)
    assert identical_losses(run, child)
    probed = [[r for r in x.rows() if "tie_rate" in r and r["step"] >= 40] for x in (run, child)]
    assert probed[0] and probed[0] == probed[1]


def test_a_state_without_a_checkpoint_is_computed_again_to_the_same_bits(lab):
    run, options = lab
    for at in (45, 7):  # after the last checkpoint before it, and from the start
        child = fork(run, at, **options)
        assert min(losses(child)) == at and identical_losses(run, child)
    again = fork(run, 45, {"learning_rate": 0.02}, **options)
    assert min(losses(again)) == 45
    assert len(list((run.path / "states").iterdir())) == 2  # 45 was used twice


def test_a_fork_at_step_0_is_the_changed_run_from_its_start(lab):
    run, options = lab
    child = fork(run, 0, {"adam_eps": 1e-4}, until=5, **options)
    assert child.parent is None and losses(child)[0] == losses(run)[0]
    assert fork(run, 0, **options).path == run.path


def test_a_change_starts_from_the_same_loss_and_differs_after(lab):
    run, options = lab
    child = fork(run, 40, {"learning_rate": "2e-2"}, **options)
    mine, theirs = losses(run), losses(child)
    assert mine[40] == theirs[40] and mine[42] != theirs[42]
    assert plan(run, 40, {"learning_rate": 0.02}).difference == {"learning_rate": (0.01, 0.02)}


def test_another_backend_or_numerics_gives_nearly_the_same_first_loss(lab):
    run, options = lab
    for text in ("sdpa", "exact", "flash", "stabilized", "paper; L1H0 -> exact"):
        child = fork(run, 50, {"attention": text}, **options)
        assert losses(child)[50] == pytest.approx(losses(run)[50], abs=1e-2), text


def test_runs_that_differ_in_backend_draw_identical_batches(lab):
    run, options = lab
    child = fork(run, 40, {"attention": "sdpa"}, **options)
    assert run.state["batches_sha256"] == child.state["batches_sha256"]


def test_the_schedule_stays_the_parents_whatever_the_end(lab):
    run, options = lab
    short, long = fork(run, 40, until=45, **options), fork(run, 40, until=80, **options)
    assert short.status == "finished" and short.step == 45 and long.step == 80
    assert identical_losses(run, short) and identical_losses(run, long)


@pytest.mark.parametrize(
    "changes, at, until, sentence",
    [
        ({"n_embd": 32}, 40, None, "cannot change n_embd.*parameters"),
        ({"optimizer": "muon"}, 40, None, "cannot change optimizer.*update rule"),
        ({"order_seed": 1}, 40, None, "cannot change order_seed.*batches"),
        ({"max_iters": 70}, 40, None, "cannot change max_steps.*--until"),
        ({}, 61, None, "outside the run: its steps are 0 to 60"),
        ({}, -1, None, "outside the run"),
        ({}, 40, 40, "not after its start"),
        ({"learnig_rate": 1}, 40, None, "learning_rate"),
        ({"attention": "papre"}, 40, None, "did you mean 'paper'"),
        ({"attention": "paper; L9 -> exact"}, 40, None, "layer 9 does not exist"),
    ],
)
def test_bad_forks_are_refused_in_one_sentence(lab, changes, at, until, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(lab[0], at, changes, until=until)


def test_all_arms_are_checked_before_one_is_trained(lab):
    run, options = lab
    before = len(RunStore(run.path.parent).runs())
    with pytest.raises(ForkError):
        fork_many(run, 40, {"a": {"adam_eps": 1e-5}, "b": {"bias": True}}, **options)
    assert len(RunStore(run.path.parent).runs()) == before


def test_every_difference_is_listed_a_micro_batch_too(lab):
    told = plan(lab[0], 40, {"attention": "exact", "micro_batch_size": 2}, name="both").told()
    assert "attention" in told and "micro_batch_size None -> 2" in told
    assert plan(lab[0], 40, name="control").told() == "control: no change"


def test_a_regenerated_state_that_disagrees_with_the_record_is_refused(lab, tmp_path):
    run, options = lab
    copy = tmp_path / run.path.name
    copy.mkdir()
    for name in ("run.json", "status.json"):
        (copy / name).write_text((run.path / name).read_text())
    rows = run.rows()
    next(r for r in rows if r["step"] == 5 and "train_loss" in r)["train_loss"] = 9.0
    (copy / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(ForkError, match="from step 5 on"):
        fork(Run(copy), 8, **options)


def test_another_corpus_under_the_same_name_is_refused(lab, tmp_path):
    run, options = lab
    other = load_corpus(run.config.at(corpus=write_corpus(tmp_path, 12)), tmp_path, progress=False)
    with pytest.raises(ForkError, match="batches cannot be repeated"):
        fork(run, 40, corpus=other, **options)


def test_a_fork_of_a_fork_carries_its_ancestors_metrics(lab):
    run, options = lab
    child = fork(run, 40, {"adam_eps": 1e-5}, **options)
    grandchild = fork(child, 50, {"adam_eps": 1e-6}, **options)
    assert ancestor(grandchild).path == child.path
    metrics = full_metrics(grandchild)
    steps = metrics["step"][~np.isnan(metrics["train_loss"])]
    assert steps.tolist() == list(range(60))
    with pytest.raises(ForkError, match="steps are 40 to 60"):
        plan(child, 39)
    assert identical_losses(child, fork(child, 40, **options))
    rows = outcome_rows([Arm("(parent)", run), Arm("grandchild", grandchild)])
    assert rows[1]["changed"] == {"adam_eps": [1e-5, 1e-6]} and rows[1]["outcome"] == "stable"


def test_joining_keeps_nonfinite_marks_and_fills_metrics_that_one_side_lacks():
    before = {"step": np.arange(6), "train_loss": np.ones(6), "old": np.ones((6, 2, 2))}
    before["nonfinite:train_loss"] = np.array([5])
    after = {"step": np.array([4, 5]), "train_loss": np.zeros(2)}
    out = joined(before, after, 4)
    assert out["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert out["train_loss"].tolist() == [1, 1, 1, 1, 0, 0]
    assert np.isnan(out["old"][4:]).all() and out["old"].shape == (6, 2, 2)
    assert out["nonfinite:train_loss"].size == 0


class Made:
    """A run made of metrics alone."""

    def __init__(self, **metrics):
        self._metrics, self.parent, self.tracker = metrics, None, None

    def metrics(self):
        return self._metrics


def test_arms_are_judged_together_against_a_twin():
    steps = np.arange(1600)
    calm = np.linspace(4, 2, 1600)
    wild = np.where(steps < 700, calm, 6.0)
    norms = np.full((1600, 1, 2), 10.0)
    grown = norms.copy()
    grown[900:, 0, 1] = 40.0
    arms = [
        Arm("(parent)", Made(step=steps, train_loss=wild, spectral_norm_q=norms)),
        Arm("twin", Made(step=steps, train_loss=calm, spectral_norm_q=norms)),
        Arm("late", Made(step=steps, train_loss=calm, spectral_norm_q=grown)),
    ]
    outcomes, twin = judge(arms)
    assert twin.name == "twin"
    assert [o.kind for o in outcomes] == ["diverged", "healthy", "onset"]
    assert outcomes[2].onset_step == 900
    with pytest.raises(ValueError, match="no arm is named 'nobody'"):
        judge(arms, "nobody")


def test_seeds_of_an_arm_are_put_together_and_few_of_them_are_only_observed():
    low = [Outcome("diverged", s, diverged_step=s) for s in (900, 1100, 1000, 1300, 1200)]
    high = [Outcome("healthy", 2000, held_out_loss=1.5) for _ in range(5)]
    rows = summarize_arms({"low": low, "high": high})
    assert [r["label"] for r in rows] == ["verdict", "verdict"]
    assert rows[0]["failed_steps"] == [900, 1000, 1100, 1200, 1300]
    assert rows[0]["median_failed_step"] == 1100 and rows[1]["held_out_mean"] == 1.5
    assert {r["label"] for r in summarize_arms({"low": low, "high": high[:4]})} == {"observed"}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("control", ("control", {})),
        ("twin:attention=paper,tile=16", ("twin", {"attention": "paper,tile=16"})),
        ("a:adam_eps=1e-5&grad_clip=0", ("a", {"adam_eps": "1e-5", "grad_clip": "0"})),
    ],
)
def test_arms_on_the_command_line(text, expected):
    assert parse_arm(text) == expected


def test_the_command_prints_a_table_and_draws_a_picture(lab, capsys):
    run, options = lab
    arguments = [str(run.path), "--at", "40", "--until", "50", "--arm", "control", "--quiet"]
    arguments += ["--arm", "exact:attention=exact", "--data", str(options["cache_dir"])]
    assert forks.main(arguments) == 0
    out = capsys.readouterr().out
    assert "control" in out and "exact" in out and "held out" in out
    assert list((run.path / "forks").glob("*.png"))[0].stat().st_size > 10_000
    rows = json.loads(list((run.path / "forks").glob("*.json"))[0].read_text())
    assert [r["arm"] for r in rows] == ["(parent)", "control", "exact"]
    assert format_table(rows).count("\n") == 5
    assert forks.main([str(run.path), "--at", "40", "--set", "bias=yes", "--quiet"]) == 2
    assert "cannot change bias" in capsys.readouterr().err
    assert forks.main(["nowhere", "--at", "1", "--store", str(run.path.parent)]) == 2
