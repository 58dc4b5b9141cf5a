"""Stop anywhere, kill -9 included, and continue bit for bit."""

import random
import signal
import time
import warnings

import pytest
import torch
from trainer_helpers import arguments, start, tiny, write_corpus

from gpt2.checkpoint import list_checkpoints, load_checkpoint
from gpt2.runs import Run, RunStore
from gpt2.train import train

# Dropout, accumulation, evaluation and stochastic rounding in between: whatever could hold state.
ALL = dict(dropout=0.1, micro_batch_size=4, eval_interval=7, max_steps=24)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    return write_corpus(folder / "text"), folder


def go(place, name, stop_at=None, **changes):
    corpus, folder = place
    return train(
        tiny(corpus, **changes),
        store=RunStore(folder / name),
        cache_dir=folder / "data",
        progress=False,
        max_steps=stop_at,
    )


def assert_same(a: Run, b: Run):
    """Equal weights, optimiser state and metrics, but for the speed."""
    left, right = (load_checkpoint(r.checkpoints()[-1][1]) for r in (a, b))
    assert left.step == right.step
    for kind in ("model", "optimizer"):
        x, y = getattr(left, kind), getattr(right, kind)
        assert x.keys() == y.keys()
        for name in x:
            assert torch.equal(x[name], y[name]), name
    assert left.state == right.state
    rows = [
        [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in x.rows()] for x in (a, b)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("attention", ["sdpa", "exact,output=bf16:stochastic"])
def test_stopped_twice_equals_uninterrupted(place, optimizer, attention):
    options = ALL | dict(optimizer=optimizer, attention=attention)
    name = f"{optimizer}-{attention[:4]}"
    whole = go(place, f"whole-{name}", **options)
    for stop in (9, 17):
        part = go(place, f"parts-{name}", stop_at=stop, **options)
        assert part.status == "interrupted" and part.step == stop
    assert_same(whole, go(place, f"parts-{name}", **options))


def test_ctrl_c_saves_and_says_so(place):
    asked = []
    config = tiny(place[0], init_seed=5, **ALL)
    store = RunStore(place[1] / "asked")
    with pytest.raises(KeyboardInterrupt, match="step 13"):
        train(
            config,
            store=store,
            cache_dir=place[1] / "data",
            progress=False,
            should_stop=lambda: asked.append(1) or ("enough" if len(asked) == 13 else None),
        )
    (run,) = store.runs()
    assert run.status == "interrupted" and run.step == 13 and run.checkpoints()[-1][0] == 13
    assert_same(go(place, "asked", init_seed=5, **ALL), go(place, "calm", init_seed=5, **ALL))


def test_damaged_newest_checkpoint_falls_back_with_a_warning(place):
    part = go(place, "damaged", stop_at=12, **ALL)
    newest = part.checkpoints()[-1][1] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with pytest.warns(UserWarning, match="damaged.*falling back"):
        run = go(place, "damaged", **ALL)
    assert_same(go(place, "undamaged", **ALL), run)


def test_all_checkpoints_damaged_is_an_error_never_a_fresh_start(place):
    part = go(place, "ruined", stop_at=12, **ALL)
    for _, path in part.checkpoints():
        (path / "optimizer.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="none of the 2 checkpoints"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            go(place, "ruined", **ALL)
    assert Run(part.path).status == "failed"


def test_a_checkpoint_whose_bits_flipped_is_found_out(place):
    part = go(place, "flipped", stop_at=12, **ALL)
    file = part.checkpoints()[-1][1] / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    with pytest.warns(UserWarning, match="falling back"):
        go(place, "flipped", **ALL)


def test_torn_last_line_of_metrics_is_written_again(place):
    part = go(place, "torn", stop_at=12, **ALL)
    with open(part.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "train_l')
    assert_same(go(place, "untorn", **ALL), go(place, "torn", **ALL))


# -- kill -9 --------------------------------------------------------------------------------------

KILL = ALL | dict(max_steps=400, checkpoint_interval=20, probe_interval=50, eval_interval=30)


def killed(config, folder, moment) -> bool:
    """Start the run in a process and kill it when `moment(run folder)` says; False if it ended."""
    data, store = str(folder / "data"), str(folder / "killed")
    process = start("gpt2.train", "--store", store, "--data", data, *arguments(config))
    try:
        while process.poll() is None:
            if moment(RunStore(store)):
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.005)
        output = process.stdout.read()
        assert process.returncode == 0, output
        return False
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def rows_written(store: RunStore) -> int:
    files = list(store.root.glob("*/metrics.jsonl"))
    return files[0].read_bytes().count(b"train_loss") if files else 0


def resume_after_kills(place, moments):
    corpus, folder = place
    config = tiny(corpus, **KILL)
    whole = go(place, "unkilled", **KILL)
    hit = [killed(config, folder, moment) for moment in moments]
    (run,) = RunStore(folder / "killed").runs()
    if hit[-1]:
        assert run.status == "interrupted"
        killed(config, folder, lambda store: False)
    (run,) = RunStore(folder / "killed").runs()
    assert run.status == "finished"
    assert_same(whole, run)
    return hit


def test_two_kills_minus_nine_change_no_bit(place):
    hit = resume_after_kills(
        place, [lambda s: rows_written(s) >= 90, lambda s: rows_written(s) >= 230]
    )
    assert hit == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_points_change_no_bit(tmp_path):
    place = (write_corpus(tmp_path / "text"), tmp_path)
    draw = random.Random(0)

    def at(after_s: float):
        began = []

        def moment(store):
            if not list(store.root.glob("*/status.json")):
                return False
            began.append(time.monotonic())
            return began[-1] - began[0] > after_s

        return moment

    resume_after_kills(place, [at(draw.uniform(0.0, 1.2)) for _ in range(20)])


def test_a_kill_while_saving_leaves_the_old_checkpoint(place, monkeypatch):
    part = go(place, "saving", stop_at=10, **ALL)
    before = list_checkpoints(part.path)

    def dies(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpt2.checkpoint.os.replace", dies)
    with pytest.raises(KeyboardInterrupt):
        go(place, "saving", **ALL)
    monkeypatch.undo()
    assert list_checkpoints(part.path) == before
    assert_same(go(place, "saved", **ALL), go(place, "saving", **ALL))
