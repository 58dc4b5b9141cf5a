"""Captures from real runs: complete, readable by forensics, replayable to the same bits."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2 import capture
from gpt2.capture import Capture, Place
from gpt2.config import make_config
from gpt2.data import load_corpus
from gpt2.fork import fork
from gpt2.probes import Probes
from gpt2.runs import RunStore
from gpt2.train import train
from kernels.forensics import load_head
from kernels.numerics import Numerics, parse_numerics

SMALL = dict(
    n_layer=2,
    n_head=2,
    n_embd=16,
    block_size=16,
    batch_size=4,
    warmup_steps=2,
    eval_interval=50,
    eval_batches=1,
    probe_interval=5,
    checkpoint_interval=50,
    attention="paper",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A store, and a corpus of arithmetic written out."""
    root = tmp_path_factory.mktemp("lab")
    for i in range(40):
        lines = [f"{a} + {i} = {a + i}; {a} * {i} = {a * i}\n" for a in range(60)]
        (root / f"{i}.txt").write_text("".join(lines))
    base = dict(SMALL, corpus=f"files:{root}/*.txt", held_out_fraction=0.2)
    corpus = load_corpus(make_config("cpu", base), root / "data", progress=False)

    def run(**overrides):
        config = make_config("cpu", base | overrides)
        return train(config, store=RunStore(root / "runs"), corpus=corpus, progress=False)

    run.corpus = corpus
    return run


def test_scheduled_capture_writes_the_heads_asked_for(lab):
    run = lab(max_steps=9, probes="capture@4:L1x2,capture@7-8:L0H1")
    names = [p.name for p in run.captures()]
    wanted = ["step_00000000-L1H0", "step_00000000-L1H1", "step_00000004-L1H0"]
    wanted += ["step_00000004-L1H1", "step_00000007-L0H1", "step_00000008-L0H1"]
    wanted += ["step_00000008-L1H0", "step_00000008-L1H1"]
    assert names == [f"{w}.npz" for w in sorted(wanted)]
    with np.load(run.path / "captures" / "step_00000004-L1H1.npz") as file:
        assert (int(file["step"]), int(file["layer"]), int(file["head"])) == (4, 1, 1)
        numerics = Numerics.from_dict(json.loads(str(file["numerics"])))
        assert numerics == parse_numerics("paper")
        assert file["q"].shape == (2, 16, 8) and file["X"].shape == (2, 16, 16)
        np.testing.assert_allclose(file["q"], file["X"] @ file["W_Q"].T, rtol=1e-5, atol=1e-6)
    head = load_head(run.path / "captures" / "step_00000004-L1H1.npz")
    assert head.dO is not None and head.dO.abs().sum() > 0


def test_captures_change_no_bit_of_the_run(lab):
    plain, watched = lab(max_steps=30), lab(max_steps=30, probes="capture@3,capture@spike,capture")
    assert np.array_equal(plain.metrics()["train_loss"], watched.metrics()["train_loss"], True)


@pytest.fixture(scope="module")
def poisoned(lab):
    """A healthy run, forked at step 40 with a learning rate 1,000 times too high."""
    parent = lab(max_steps=60, checkpoint_interval=20, dropout=0.1)

    def poison(probes):
        changes = {"learning_rate": 10.0, "grad_clip": 0.0, "probes": probes}
        return fork(parent, 40, changes, until=320, progress=False, corpus=lab.corpus)

    return poison


def bundles_of(run):
    return [p for p in run.captures() if p.is_dir()]


def test_a_spike_is_caught_within_5_steps_and_its_bundle_replays_to_the_same_loss(poisoned):
    run = poisoned("capture@spike")
    recorded = {r["step"]: r["train_loss"] for r in run.rows() if "train_loss" in r}
    found = [capture.replay(p) for p in bundles_of(run)]
    before, after = found
    assert 40 <= before.step < after.step <= 45 and after.step == before.step + 1
    assert after.replayed > before.replayed + 0.5
    assert capture.main([str(p) for p in bundles_of(run)]) == 0
    for r in found:
        assert r.identical and np.float32(recorded[r.step]) == np.float32(r.replayed)
    heads = [p for p in run.captures() if p.suffix == ".npz"]
    assert len(heads) == 2 and f"step_{before.step:08d}" in heads[0].name


def test_a_failed_run_keeps_a_bundle_from_before_the_failure(poisoned):
    run = poisoned("capture")
    assert run.status in ("diverged", "nonfinite")
    (bundle,) = bundles_of(run)
    found = capture.replay(bundle)
    assert found.identical and 40 <= found.step < run.outcome.failed_step
    (head,) = [p for p in run.captures() if p.suffix == ".npz"]
    assert load_head(head).W_Q is not None


def test_a_replay_with_other_weights_is_not_identical(poisoned, tmp_path):
    bundle = bundles_of(poisoned("capture"))[0]
    weights = load_file(bundle / "weights.safetensors")
    weights["transformer.wte.weight"] *= 1.01
    for file in ("bundle.json", "batch.npz"):
        (tmp_path / file).write_bytes((bundle / file).read_bytes())
    save_file(weights, tmp_path / "weights.safetensors")
    assert not capture.replay(tmp_path).identical
    assert capture.main([str(tmp_path)]) == 1 and capture.main([str(tmp_path.parent)]) == 2


def test_a_healthy_run_writes_no_evidence_of_failure(lab):
    run = lab(max_steps=30, probes="capture,capture@spike,capture@onset")
    assert run.status == "finished" and run.captures() == []


def test_growth_that_speeds_up_is_an_onset_and_growth_that_slows_down_is_not():
    config = make_config("cpu", SMALL | {"probe_interval": 100, "probes": "capture@onset"})
    (watch,) = Probes(config).captures

    def onset_at(norms):
        watch.norms.clear()
        for i, norm in enumerate(norms):
            watch.norms.append((100 * i, torch.tensor([[norm, 5.0]])))
            if watch._grown():
                return 100 * i
        return None

    assert onset_at([1, 4, 10, 14, 18, 21, 23]) is None
    assert onset_at([10, 10, 11, 11, 12, 14, 19, 29]) == 600
    assert onset_at([10, 10, 10, 10, 13, 13, 13]) is None
    assert onset_at([10, 10, 10, 10, float("nan"), 10, 10]) is None


def test_an_onset_capture_is_written_once_and_replays(lab, monkeypatch):
    monkeypatch.setattr(Capture, "_grown", lambda self: self.norms[-1][0] >= 10)
    run = lab(max_steps=31, probes="capture@onset:worst")
    (bundle,) = bundles_of(run)
    assert bundle.name == "bundle_step_00000010-onset" and capture.replay(bundle).identical


@pytest.mark.parametrize("text", ["L1H0+3x2", "L0", "worstx1", "", "x3"])
def test_places_are_understood(text):
    place = Place.parse(text, 2, 4)
    assert place.sequences >= 1


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("capture:L7", "layer 7 does not exist"),
        ("capture:L0H2", "head 2 does not exist"),
        ("capture:H1", "not understood"),
        ("capture@later", "no schedule"),
    ],
)
def test_bad_places_are_refused_before_training(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        Probes(make_config("cpu", SMALL | {"probes": text}))


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no bundle"):
        capture.replay(tmp_path)


def test_numerics_of_a_head_follow_the_scope():
    text = "paper; L1H0 -> exact"
    assert Numerics.from_dict(json.loads(capture.head_numerics(text, 1, 0, 2))) == parse_numerics(
        "exact"
    )
    assert capture.head_numerics("sdpa", 0, 0, 2) == "sdpa"
    torch.manual_seed(0)
