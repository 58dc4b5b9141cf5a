"""Run folders: strict numbers, foreign and corrupt folders, who owns a run; hardware tables."""

import json
import math
import os

import numpy as np
import pytest
import torch
from trainer_helpers import tiny

from gpt2 import hardware
from gpt2.runs import Run, RunError, RunStore, RunWriter, columns, row_text, this_process


def create(tmp_path, **changes):
    config = tiny("files:unused", **changes)
    path = RunStore(tmp_path).path(config, "abc")
    writer = RunWriter.open(
        path, config, {"sha256": "abc"}, {"date": "2026-01-01", "processes": 1}
    )
    writer.status("interrupted", 3, "for a test")
    return path, config, writer


def test_rows_are_strict_json_and_name_what_was_lost():
    text = row_text({"step": 3, "train_loss": math.nan, "rate": [[0.1, math.inf]], "ok": 1.5})
    row = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert row == {
        "step": 3,
        "train_loss": None,
        "rate": [[0.1, None]],
        "ok": 1.5,
        "nonfinite": ["train_loss", "rate"],
    }


def test_fp32_numbers_survive_the_text():
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    back = json.loads(row_text({"step": 0, "x": values.tolist()}))["x"]
    assert np.array_equal(np.array(back, dtype=np.float32), values)


def test_columns_fill_gaps_and_keep_head_shapes():
    rows = [
        {"step": 0, "train_loss": 2.0},
        {"step": 0, "tie_rate": [[0.1, 0.2], [0.3, 0.4]], "probe_errors": {"x": "y"}},
        {"step": 1, "train_loss": None, "nonfinite": ["train_loss"]},
    ]
    c = columns(rows)
    assert c["step"].tolist() == [0, 0, 1] and c["tie_rate"].shape == (3, 2, 2)
    assert c["train_loss"][0] == 2.0 and np.isnan(c["train_loss"][1:]).all()
    assert c["nonfinite:train_loss"].tolist() == [1] and "probe_errors" not in c


def test_a_run_folder_reads_back(tmp_path):
    path, config, writer = create(tmp_path)
    writer.write([{"step": 0, "train_loss": 2.0}, {"step": 1, "train_loss": 1.0}])
    run = Run(path)
    assert run.config == config and run.status == "interrupted" and run.message == "for a test"
    assert run.metrics()["train_loss"].tolist() == [2.0, 1.0]
    writer.write([{"step": 2, "train_loss": 0.5}])
    assert len(run.metrics()["step"]) == 3
    writer.rewind(1)
    assert run.metrics()["step"].tolist() == [0]


@pytest.mark.parametrize("damage", ["missing", "foreign", "no_run_json", "corrupt", "list"])
def test_folders_that_are_no_runs_are_refused_in_a_sentence(tmp_path, damage):
    path, *_ = create(tmp_path)
    file = path / "run.json"
    if damage == "missing":
        path = tmp_path / "nosuch"
    elif damage == "no_run_json":
        file.unlink()
    else:
        file.write_text({"foreign": '{"a": 1}', "corrupt": '{"format": "b', "list": "[]"}[damage])
    with pytest.raises(RunError) as error:
        Run(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_corrupt_metrics_are_refused_with_their_line(tmp_path):
    path, _, _ = create(tmp_path)
    (path / "metrics.jsonl").write_text('{"step": 0}\nNaN\n{"step": 1}\n')
    with pytest.raises(RunError, match="line 2"):
        Run(path).rows()


def test_a_foreign_folder_in_the_way_is_not_overwritten(tmp_path):
    config = tiny("files:unused")
    path = RunStore(tmp_path).path(config, "abc")
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match="move it away"):
        RunWriter.open(path, config, {}, {})
    assert (path / "thesis.txt").read_text() == "precious"


def test_a_run_that_another_process_trains_is_left_alone(tmp_path):
    path, config, writer = create(tmp_path)
    writer.status("running", 3)
    state = json.loads((path / "status.json").read_text())
    assert Run(path).status == "running"
    import psutil

    parent = psutil.Process(os.getppid())
    state["process"] |= {"pid": parent.pid, "started": parent.create_time()}
    (path / "status.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=f"trained by process {parent.pid}"):
        RunWriter.open(path, config, {}, {})


def test_a_run_whose_process_died_counts_as_interrupted(tmp_path):
    path, _, writer = create(tmp_path)
    writer.status("running", 3)
    state = json.loads((path / "status.json").read_text())
    state["process"]["started"] -= 1000
    (path / "status.json").write_text(json.dumps(state))
    assert Run(path).status == "interrupted"
    assert this_process()["pid"] == os.getpid()


def test_unknown_statuses_and_names_are_refused(tmp_path):
    path, _, writer = create(tmp_path)
    with pytest.raises(ValueError, match="unknown status 'done'"):
        writer.status("done", 1)
    with pytest.raises(RunError, match="no run named 'zzz'"):
        RunStore(tmp_path).find("zzz")
    assert RunStore(tmp_path).find(path.name).path == path


# -- hardware -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2.25e15),
        ("Quadro K620", None),
    ],
)
def test_peaks_are_dense_and_unknown_devices_have_none(name, peak):
    assert hardware.peak_flops(name) == peak


def test_mfu():
    assert hardware.mfu(1e6, 8.55e8, "NVIDIA H200") == pytest.approx(0.8645, abs=1e-3)
    assert hardware.mfu(1e6, 8.55e8, "NVIDIA H200", devices=2) == pytest.approx(0.432, abs=1e-3)
    assert hardware.mfu(1e6, 8.55e8, "toaster") is None
    assert hardware.mfu_text(None) == "n/a"
    assert "impossible" in hardware.mfu_text(2.02)
    assert hardware.mfu_text(0.412) == "41.2 %"


def test_bf16_without_hardware_warns():
    assert "no native bf16" in hardware.bf16_warning("Tesla V100", (7, 0))
    assert hardware.bf16_warning("NVIDIA A100", (8, 0)) is None
    with pytest.warns(UserWarning, match="slower"):
        hardware.warn_about_precision("bfloat16", torch.device("cpu"))
