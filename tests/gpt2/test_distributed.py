"""Several processes over gloo: the same losses, other world sizes, a lost process."""

import re
import signal
import time

import numpy as np
import pytest
import torch
from trainer_helpers import arguments, start, tiny, write_corpus

from gpt2.data import load_corpus
from gpt2.distributed import Group
from gpt2.feed import Feed
from gpt2.outcomes import series
from gpt2.processes import end_family, ranks
from gpt2.runs import Run, RunStore
from gpt2.train import train

# Sums over processes add the same numbers in another order: fp32 roundings, grown by training.
TOLERANCE = 2e-5
OPTIONS = dict(max_steps=12, eval_interval=6, checkpoint_interval=6)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    place = write_corpus(folder / "text"), folder
    train(tiny(place[0], **OPTIONS), store=RunStore(folder / "1"), **common(place))
    return place


def common(place):
    return dict(cache_dir=place[1] / "data", progress=False)


def torchrun(place, world: int, name: str, config, *more: str):
    places = ["--store", str(place[1] / name), "--data", str(place[1] / "data")]
    return start(
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={world}",
        "-m",
        "gpt2.train",
        *places,
        *more,
        *arguments(config),
    )


def finish(process, timeout=120) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def losses(store: RunStore) -> np.ndarray:
    (run,) = store.runs()
    assert run.status == "finished"
    metrics = run.metrics()
    return np.concatenate([series(metrics, n)[1] for n in ("train_loss", "held_out_loss")])


def test_processes_share_one_global_batch(place):
    config = tiny(place[0])
    corpus = load_corpus(config, place[1] / "data", progress=False)
    device = torch.device("cpu")
    whole = Feed(corpus, config, device, Group()).batch(5)[0]
    for world in (2, 4):
        parts = [Feed(corpus, config, device, Group(r, world)).batch(5)[0] for r in range(world)]
        assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(ValueError, match="batch_size=8 does not divide over 3"):
        Feed(corpus, config, device, Group(0, 3))


def test_a_memory_mapped_corpus_feeds_the_same_batches(place, monkeypatch):
    config = tiny(place[0])
    corpus = load_corpus(config, place[1] / "data", progress=False)
    resident = Feed(corpus, config, torch.device("cpu"), Group())
    monkeypatch.setattr("gpt2.feed.RESIDENT_BYTES", {"cpu": 0})
    mapped = Feed(corpus, config, torch.device("cpu"), Group())
    for step in (0, 1, 2, 9, 3):
        for a, b in zip(resident.batch(step), mapped.batch(step)):
            assert torch.equal(a, b)
    mapped.close()


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_loss_curve_does_not_depend_on_the_number_of_processes(place, world):
    config = tiny(place[0], **OPTIONS)
    finish(torchrun(place, world, f"{world}", config))
    one = losses(RunStore(place[1] / "1"))
    many = losses(RunStore(place[1] / f"{world}"))
    np.testing.assert_allclose(many, one, atol=TOLERANCE, rtol=0)


def test_a_restart_with_another_world_size_continues(place):
    config = tiny(place[0], **OPTIONS)
    output = torchrun(place, 2, "restart", config, "--stop_at=6")
    finish(output)
    (run,) = RunStore(place[1] / "restart").runs()
    assert run.status == "interrupted" and run.step == 6
    run = train(config, store=RunStore(place[1] / "restart"), **common(place))
    assert [s["processes"] for s in run.info["segments"]] == [2, 1]
    np.testing.assert_allclose(
        losses(RunStore(place[1] / "restart")),
        losses(RunStore(place[1] / "1")),
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.slow
def test_bf16_reduction_rounds_the_gradient(place):
    config = tiny(place[0], **OPTIONS, grad_reduce_dtype="bfloat16")
    finish(torchrun(place, 2, "bf16", config))
    one, low = losses(RunStore(place[1] / "1")), losses(RunStore(place[1] / "bf16"))
    assert np.abs(low - one).max() > TOLERANCE and np.abs(low - one).max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_within_a_minute(place, victim):
    config = tiny(place[0], max_steps=100_000, checkpoint_interval=20, init_seed=victim)
    process = torchrun(place, 2, f"killed{victim}", config)
    store = RunStore(place[1] / f"killed{victim}")
    try:
        run = wait_for_step(process, store, 30)
        ranks(process)[victim].send_signal(signal.SIGKILL)
        began = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < 60 and process.returncode != 0
        assert re.search(rf"rank {victim} of 2 .* is gone", output), output
    finally:
        end_family(process)
    assert run.status == "interrupted"
    saved = run.checkpoints()[-1][0]
    again = train(config, store=store, max_steps=saved + 20, **common(place))
    assert again.step == saved + 20


def wait_for_step(process, store: RunStore, step: int) -> Run:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        runs = store.runs() if store.root.exists() else []
        if runs and (runs[0].path / "status.json").exists() and runs[0].step >= step:
            return runs[0]
        time.sleep(0.05)
    raise AssertionError(process.communicate()[0] if process.poll() is not None else "too slow")
