"""Training as a user meets it: a run folder, its numbers, its ends, bad input."""

import json
import math

import numpy as np
import pytest
import torch
from trainer_helpers import tiny, write_corpus

from gpt2.analysis import Arm, judge
from gpt2.data import load_corpus
from gpt2.loop import Trainer
from gpt2.outcomes import series
from gpt2.progress import Progress
from gpt2.runs import Parent, Run, RunStore
from gpt2.seeds import mix
from gpt2.train import main, train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    return write_corpus(folder / "text"), folder


def go(place, **changes):
    corpus, folder = place
    extra = {k: changes.pop(k) for k in ("max_steps_now",) if k in changes}
    return train(
        tiny(corpus, **changes),
        store=RunStore(folder / "runs"),
        cache_dir=folder / "data",
        progress=False,
        max_steps=extra.get("max_steps_now"),
    )


def trainer(place, tmp_path, **changes):
    from gpt2.distributed import Group

    config = tiny(place[0], **changes)
    corpus = load_corpus(config, place[1] / "data", progress=False)
    return Trainer(config, corpus, torch.device("cpu"), Group(), tmp_path)


def test_a_run_leaves_a_complete_folder(place):
    run = go(place)
    assert run.status == "finished" and run.step == 20
    metrics = run.metrics()
    losses = series(metrics, "train_loss")[1]
    assert len(losses) == 20 and losses[-1] < losses[0]
    held_out = ~np.isnan(metrics["held_out_loss"])
    assert list(metrics["step"][held_out]) == [0, 8, 16, 20]
    assert metrics["spectral_norm_q"].shape[1:] == (2, 2)
    assert run.info["environment"]["torch"] == torch.__version__
    assert run.info["corpus"]["sha256"] and run.state["batches_sha256"]
    assert run.outcome.kind == "stable"
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def test_an_outcome_knows_the_last_step_where_losses_are_logged_with_gaps(place, monkeypatch):
    monkeypatch.setattr("gpt2.loop.LEAST_ROWS", 5)
    run = go(place, max_steps=24)
    assert series(run.metrics(), "train_loss")[0].tolist() == list(range(0, 24, 4))
    assert run.outcome.last_step == 23
    outcomes, _ = judge([Arm("twin", run), Arm("run", go(place, max_steps=24, order_seed=1))])
    assert [outcome.last_step for outcome in outcomes] == [23, 23]


def test_a_finished_run_is_loaded_not_trained_again(place):
    first = go(place)
    stamp = (first.path / "metrics.jsonl").stat().st_mtime_ns
    assert go(place).path == first.path
    assert (first.path / "metrics.jsonl").stat().st_mtime_ns == stamp


def test_identity_changes_with_what_determines_the_result(place):
    corpus, folder = place
    store, base = RunStore(folder / "runs"), tiny(place[0])
    assert store.path(base, "a") != store.path(base, "b")
    assert store.path(base, "a") != store.path(base.at(init_seed=1), "a")
    assert store.path(base, "a") != store.path(base.at(attention="exact"), "a")
    assert store.path(base, "a") == store.path(base.at(keep_checkpoints=5), "a")


def test_twins_with_different_attention_draw_identical_batches(place):
    a, b = go(place), go(place, attention="exact")
    assert a.state["batches_sha256"] == b.state["batches_sha256"]
    first = [series(run.metrics(), "train_loss")[1][0] for run in (a, b)]
    assert abs(first[0] - first[1]) < 1e-3
    c = go(place, order_seed=1)
    assert c.state["batches_sha256"] != a.state["batches_sha256"]


def test_seeds_are_independent(place, tmp_path):
    base = trainer(place, tmp_path)
    order = trainer(place, tmp_path, order_seed=1)
    init = trainer(place, tmp_path, init_seed=1)
    weight = base.model.transformer.wte.weight
    assert torch.equal(weight, order.model.transformer.wte.weight)
    assert not torch.equal(weight, init.model.transformer.wte.weight)
    assert torch.equal(base.feed.batch(3)[0], init.feed.batch(3)[0])
    assert not torch.equal(base.feed.batch(3)[0], order.feed.batch(3)[0])


def test_accumulation_does_not_change_the_gradient(place, tmp_path):
    reference = None
    for micro in (8, 4, 1):
        t = trainer(place, tmp_path, micro_batch_size=micro)
        loss = t.forward_backward(0, *t.feed.batch(0))
        got = torch.cat([loss[None], t.optimizers.gradient.buffer])
        reference = got if reference is None else reference
        torch.testing.assert_close(got, reference, atol=1e-6, rtol=0)


def test_unevenly_masked_targets_give_the_same_gradient_under_any_split(place, tmp_path):
    t = trainer(place, tmp_path)
    x, y = t.feed.batch(0)
    y = y.clone()
    y[0, :15] = y[1, :3] = y[5, ::2] = -1
    count = (y != -1).sum()
    found = []
    for size in (8, 2, 1):
        t.optimizers.gradient.zero()
        for mx, my in zip(x.split(size), y.split(size)):
            t.model(mx, my, denominator=count)[1].backward()
        found.append(t.optimizers.gradient.buffer.clone())
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[0], found[2], atol=1e-6, rtol=0)


def test_a_tiny_batch_is_learnt_by_heart(place, tmp_path):
    t = trainer(place, tmp_path, n_embd=32, max_steps=150, learning_rate=1e-2)
    batch = t.feed.batch(0)
    t.feed.batch = lambda step: batch
    for step in range(150):
        t.update(step)
    assert float(t._pending[-1][1]) < 0.1


def test_evaluation_moves_no_random_state(place, tmp_path):
    t = trainer(place, tmp_path, dropout=0.1)
    before = torch.get_rng_state()
    first = t.held_out()
    assert torch.equal(before, torch.get_rng_state())
    assert t.held_out() == first


def test_divergence_ends_the_run_cleanly_and_keeps_the_state_before(place):
    run = go(
        place,
        max_steps=400,
        learning_rate=3.0,
        grad_clip=0,
        warmup_steps=300,  # learns before it breaks, whatever the last bits
        checkpoint_interval=10,
        eval_interval=400,
        probe_interval=400,
    )
    assert run.status == "diverged" and run.outcome.diverged_step == run.step
    metrics = run.metrics()
    assert metrics["step"].max() == run.step
    tracked = run.outcome
    assert run.checkpoints()[0][0] <= tracked.diverged_from


def test_a_nonfinite_loss_is_its_own_status(place):
    run = go(place, max_steps=60, learning_rate=1e30, grad_clip=0, warmup_steps=0)
    assert run.status == "nonfinite"
    last = run.rows()[-1]
    assert last["step"] == run.step and last["nonfinite"]


def test_a_crash_is_recorded_and_raised(place, monkeypatch):
    monkeypatch.setattr(Trainer, "update", lambda self, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        go(place, init_seed=7)
    runs = [r for r in RunStore(place[1] / "runs").runs() if r.config.init_seed == 7]
    assert runs[0].status == "failed" and "ZeroDivisionError" in runs[0].message
    assert "Traceback" in (runs[0].path / "error.txt").read_text()


def test_it_can_stop_at_a_step_and_go_on(place):
    part = go(place, init_seed=3, max_steps_now=7)
    assert part.status == "interrupted" and part.step == 7
    assert part.checkpoints()[-1][0] == 7
    assert go(place, init_seed=3, max_steps_now=7).path == part.path
    whole = go(place, init_seed=3)
    assert whole.path == part.path and whole.status == "finished"


@pytest.mark.parametrize("option", ["dropout=0.1", "optimizer=muon", "n_kv_head=1", "qk_clip=1.0"])
def test_options_train(place, tmp_path, option):
    key, value = option.split("=")
    t = trainer(place, tmp_path, max_steps=6, **{key: value})
    for step in range(6):
        t.update(step)
    losses = [float(p[1]) for p in t._pending]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] + 0.1


def test_fp16_skips_overflowing_steps_and_counts_them(place, tmp_path):
    t = trainer(place, tmp_path, dtype="float16")
    t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    weight = t.model.transformer.wte.weight.clone()
    t.update(0)
    assert torch.equal(weight, t.model.transformer.wte.weight)
    assert t.flush() is None and t.skipped == 1
    t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    t.update(1)
    assert not torch.equal(weight, t.model.transformer.wte.weight) and t.flush() is None


def test_mixed_seeds_do_not_collide():
    seeds = {mix(a, b, c) for a in range(10) for b in range(30) for c in range(10)}
    assert len(seeds) == 3000 and all(0 <= s < 2**63 for s in seeds)


def test_command_line_trains_and_exits_zero(place, capsys):
    corpus, folder = place
    args = ["--store", str(folder / "cli"), "--data", str(folder / "data"), "--quiet"]
    args += [f"--corpus={corpus}", "--max_steps=3", "--eval_batches=1", "--batch_size=2"]
    assert main(args) == 0
    (run,) = RunStore(folder / "cli").runs()
    assert run.status == "finished"
    assert main([*args, "--resume", str(folder / "nosuch")]) == 2
    assert "nosuch" in capsys.readouterr().err


def test_run_repr_and_find(place):
    run = go(place)
    store = RunStore(place[1] / "runs")
    assert store.find(run.id[:8]).path == run.path
    assert "finished" in repr(Run(run.path))


def test_training_starts_from_given_weights(place, tmp_path):
    first = go(place)
    weights = first.checkpoints()[-1][1] / "model.safetensors"
    config = tiny(place[0], init_seed=9)
    parent = Parent.from_weights(weights)
    store = RunStore(place[1] / "runs")
    run = train(config, store=store, parent=parent, cache_dir=place[1] / "data", progress=False)
    held_out = series(run.metrics(), "held_out_loss")[1]
    assert held_out[0] == series(first.metrics(), "held_out_loss")[1][-1]
    assert run.id != go(place, init_seed=9).id


def test_progress_is_a_few_plain_lines_away_from_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("gpt2.progress.SECONDS", 0.0)
    bar = Progress(5000, 0, enabled=True)
    for step in range(1, 5001):
        bar.update(step, "loss 1.0")
    bar.close()
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 25 and lines[-1].startswith("step 5000/5000")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_missing_gpu_is_an_error_in_a_sentence(place):
    with pytest.raises(ValueError, match="sees 0 cuda devices here; use device=auto"):
        go(place, device="cuda")


def test_where_compiling_fails_training_says_so_and_goes_on(place, tmp_path):
    from torch._dynamo.exc import BackendCompilerFailed

    def broken(*args):
        raise BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)

    t, plain = trainer(place, tmp_path), trainer(place, tmp_path)
    t.compiled, t.model._trunk = True, broken
    with pytest.warns(UserWarning, match="torch.compile is off"):
        t.first_update(0)
    plain.update(0)
    assert not t.compiled and torch.equal(t._pending[0][1], plain._pending[0][1])
    assert torch.equal(t.optimizers.gradient.buffer, plain.optimizers.gradient.buffer)
