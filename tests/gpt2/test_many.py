"""Runs side by side: results in order, failures told, an interruption that loses nothing."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from trainer_helpers import ROOT, tiny, write_corpus

from gpt2 import hardware, many
from gpt2.children import Child
from gpt2.runs import RunStore
from gpt2.train import train, train_many


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    return write_corpus(folder / "text"), folder


def test_runs_come_back_in_order_and_a_failure_is_a_status(place, capsys):
    corpus, folder = place
    good = [tiny(corpus, order_seed=s) for s in (0, 1)]
    bad = tiny(corpus, qk_clip=1.0, qk_norm=True)
    store = RunStore(folder / "runs")
    runs = train_many([*good, bad, good[0]], store=store, workers=2, cache_dir=folder / "data")
    assert [r.status for r in runs] == ["finished", "finished", "failed", "finished"]
    assert runs[0].path == runs[3].path and runs[0].config == good[0]
    assert "use one of them" in runs[2].message
    alone = train(good[1], store=RunStore(folder / "alone"), cache_dir=folder / "data")
    assert [r["train_loss"] for r in alone.rows() if "train_loss" in r] == [
        r["train_loss"] for r in runs[1].rows() if "train_loss" in r
    ]
    assert capsys.readouterr().out.count("\n") < 20
    assert train_many(good, store=store, cache_dir=folder / "data")[0].path == runs[0].path


def test_runs_pause_where_asked_and_go_on_later(place):
    corpus, folder = place
    config, store = tiny(corpus, order_seed=7), RunStore(folder / "paused")
    asked = dict(store=store, cache_dir=folder / "data", progress=False)
    (paused,) = train_many([config], max_steps=2, **asked)
    assert paused.status == "interrupted" and paused.step == 2
    (again,) = train_many([config], max_steps=2, **asked)
    assert again.path == paused.path and again.step == 2
    (whole,) = train_many([config], **asked)
    assert whole.status == "finished" and whole.path == paused.path


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
sys.path.insert(0, {tests!r})
from trainer_helpers import tiny
from gpt2.train import RunStore, train_many
configs = [tiny({corpus!r}, order_seed=s, max_steps=100_000) for s in (0, 1, 2)]
train_many(configs, store=RunStore({store!r}), cache_dir={data!r})
"""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_stops_every_worker_and_leaves_resumable_runs(place, monkeypatch):
    corpus, folder = place
    store = RunStore(folder / "stopped")
    script = SCRIPT.format(
        tests=str(ROOT / "tests" / "gpt2"),
        corpus=corpus,
        store=str(store.root),
        data=str(folder / "data"),
    )
    monkeypatch.chdir(ROOT)
    child = Child([sys.executable, "-c", script], folder / "stopped.log")
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            runs = store.runs() if store.root.exists() else []
            if len(runs) == 2 and all((r.path / "metrics.jsonl").exists() for r in runs):
                break
            time.sleep(0.1)
        child.process.send_signal(signal.SIGINT)
        child.wait(60)
    finally:
        child.end()  # else its workers would train on
    assert "KeyboardInterrupt" in child.text()
    runs = store.runs()
    assert len(runs) == 2
    for run in runs:
        assert run.status == "interrupted" and "SIGINT" in run.message
        assert run.checkpoints()[-1][0] == run.step > 0


def test_bad_numbers_of_workers_are_refused(place):
    with pytest.raises(ValueError, match="workers=0"):
        train_many([tiny(place[0])], store=RunStore(place[1] / "x"), workers=0)


def test_workers_are_spread_over_devices_and_each_sees_its_own(place, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(many, "_start", lambda *asked: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hardware.visible("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-7f")
    assert hardware.visible("cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-7f"}
    with pytest.raises(ValueError, match="sees 2 GPUs here"):
        hardware.visible("cuda:2")
    pool = many.Pool(RunStore(place[1] / "x"), workers=4, devices=("cuda:0", "cuda:1"))
    pool._scratch = SimpleNamespace(name="unused")
    config = tiny(place[0])
    for _ in range(4):
        pool.start(many.Job(config, None, place[1] / "none"))
    assert sorted(job.device for job in pool.running) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert pool.free == 0
    with pytest.raises(ValueError, match="set device=auto in its config"):
        pool.job(config)  # a run on a CPU has no place on a GPU


def test_a_named_device_is_no_part_of_a_runs_identity(place):
    corpus, folder = place
    asked = dict(cache_dir=folder / "data", progress=False)
    (named,) = train_many(
        [tiny(corpus, order_seed=9)], store=RunStore(folder / "named"), devices=["cpu"], **asked
    )
    (plain,) = train_many([tiny(corpus, order_seed=9)], store=RunStore(folder / "plain"), **asked)
    assert named.status == "finished" and named.path.name == plain.path.name


def test_a_worker_trains_on_the_tokens_that_its_launcher_found(tmp_path):
    config = tiny(write_corpus(tmp_path / "text"), max_steps=2)
    with many.Pool(RunStore(tmp_path / "runs"), cache_dir=tmp_path / "data") as pool:
        waiting, ended = [pool.job(config, progress=False)], []
        (tmp_path / "text" / "document00.txt").unlink()  # to look again would give other tokens
        pool.work(lambda: waiting.pop() if waiting else None, ended.append)
    (job,) = ended
    assert job.done and not job.error and not pool.running
