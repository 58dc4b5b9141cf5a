"""Probes on a checkpoint: what the run itself measured there, other numerics, refusals."""

import json

import numpy as np
import pytest
from trainer_helpers import tiny, write_corpus

from gpt2.examine import examine, main
from gpt2.runs import RunStore
from gpt2.train import train

LOW = "paper,matched_bits=2,output=bf16.2:stochastic"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(a run of 20 steps with checkpoints every 5, its corpus cache)."""
    root = tmp_path_factory.mktemp("examined")
    corpus = write_corpus(root / "text")
    config = tiny(corpus, attention=LOW, probes=("delta_answer@5",), keep_checkpoints=9)
    run = train(config, store=RunStore(root / "runs"), cache_dir=root / "data", progress=False)
    return run, root / "data"


def test_a_checkpoint_shows_what_the_run_measured_there(lab):
    run, data = lab
    logged = {row["step"]: row for row in run.rows() if "delta_answer_mean" in row}
    rows = list(examine(run, 10, ["delta_answer", "tie_rate"], batches=6, cache_dir=data))
    assert [row["step"] for row in rows] == list(range(10, 16))
    names = ("delta_error_mean", "delta_error_rms", "delta_clean_mean", "delta_answer_mean")
    for name in (*names, "tie_rate"):
        told = [value for head in rows[0][name] for value in head]
        kept = [value for head in logged[10][name] for value in head]
        assert told == pytest.approx(kept, rel=1e-6, abs=1e-30), name
    assert rows[0]["delta_error_mean"] != rows[1]["delta_error_mean"]
    assert len(run.checkpoints()) == 4  # nothing of the run is changed


def test_other_numerics_see_the_same_batches(lab):
    run, data = lab
    asked = dict(batches=8, cache_dir=data)
    low, high = (
        list(examine(run, 5, ["delta_error"], attention=text, **asked))
        for text in ("paper,matched_bits=2", "paper,matched_bits=6")
    )
    few, more = (np.mean([row["delta_error_rms"] for row in rows]) for rows in (low, high))
    assert 4 < few / more < 64  # four bits more: about a sixteenth of the error
    (exact,) = examine(run, 5, ["delta_error"], attention="exact", batches=1, cache_dir=data)
    assert exact["delta_error_rms"] == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--step", "7"], "no checkpoint at step 7; there are: 5, 10, 15, 20"),
        (["--probes", "update"], "probe 'update' needs a training step; here are: delta_error"),
        (["--probes", "tie_rat"], "did you mean 'tie_rate'"),
        (["--attention", "papr"], "did you mean 'paper'"),
        (["--batches", "0"], "0 batches are too few; give 1 or more"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(lab, words, sentence, capsys):
    run, data = lab
    usual = ["--step", "5", "--probes", "tie_rate", "--data", str(data)]
    assert main([str(run.path), *usual, *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and sentence in told and told.count("\n") == 1


def test_the_command_prints_a_strict_line_per_batch(lab, capsys):
    run, data = lab
    asked = ["--step", "20", "--probes", "scores", "--batches", "2", "--data", str(data)]
    assert main([str(run.path), *asked]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [20, 21] and len(rows[0]["max_logit"]) == 2
