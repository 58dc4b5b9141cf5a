"""What several processes change: the program's parts by themselves, and all of it over gloo."""

import json
import math
import sys
import time

import psutil
import pytest
import torch
from trainer_helpers import write_corpus

from gpt2.children import Child, ChildError, Machine
from gpt2.config import ConfigParser, add_arguments, config_from_args
from gpt2.reduction import main as reduction_main
from gpt2.reduction import statistics
from gpt2.scaling import PARTS, main, measure, strict
from gpt2.scaling_parts import compare_series, scale_row
from gpt2.scaling_runs import options, study


def test_options_make_the_same_config_on_a_command_line():
    for device in ("cpu", "cuda"):
        found = study(device, "files:a*.txt")
        for config in (found.small, found.large):
            parser = ConfigParser()
            add_arguments(parser)
            assert config_from_args(parser.parse_args(options(config))) == config


def test_the_numerics_whose_speed_is_measured_can_be_named():
    assert [name for _, name, _ in study("cuda", "installed-text").bench] == ["flash", "paper"]
    assert [name for _, name, _ in study("cuda", "installed-text", ["sdpa"]).bench] == ["sdpa"]
    with pytest.raises(ValueError, match="flsh"):
        study("cpu", "installed-text", ["flsh"])


def test_the_models_whose_speed_is_measured_take_settings():
    for device in ("cuda", "cpu"):
        for _, _, changes in study(device, "installed-text", (), ["compile=blocks"]).bench:
            assert changes[-1] == "compile=blocks"
    with pytest.raises(ValueError, match="'compile' is no setting; write it as key=value"):
        study("cuda", "installed-text", (), ["compile"])
    with pytest.raises(ValueError, match="comple"):
        study("cuda", "installed-text", (), ["comple=blocks"])


def test_series_are_compared_bit_by_bit_where_they_overlap():
    a = [0, 1, 2, 3], [1.0, 0.5, 0.25, 0.125]
    b = [1, 2, 3, 4], [0.5, 0.250000119, 0.5, 7.0]
    found = compare_series(a, b)
    assert found["steps"] == [1, 3] and found["first_different"] == 2
    assert found["largest_at"] == 3 and found["largest_difference"] == 0.375
    same = compare_series(a, a)
    assert same["first_different"] is None and same["largest_difference"] == 0
    with pytest.raises(ChildError, match="no step in common"):
        compare_series(a, ([9], [1.0]))


def test_the_ratio_is_of_rows_of_the_same_work():
    row = dict(preset="mini", implementation="flash", tokens_per_step=100, update_ms=2.0)
    one = row | dict(processes=1, tokens_per_s=1000.0)
    other = one | dict(implementation="paper", tokens_per_s=10.0)
    two = row | dict(processes=2, tokens_per_s=1600.0, reduce_ms=3.0)
    found = scale_row(two, [other, one, two])
    assert found["ratio"] == 1.6 and found["efficiency"] == 0.8
    assert math.isclose(found["missing_ms"], 62.5 - 50) and found["undivided_update_ms"] == 1.0
    assert scale_row(two, [other, two]) is None and scale_row(one, [one]) is None


def test_errors_that_accumulate_are_told_from_those_that_do_not():
    draw = torch.Generator().manual_seed(0)
    shape = 4, 2, 3, 8, 40  # batches, layers, heads, D, C
    whole = torch.randn(shape, generator=draw, dtype=torch.float64)
    u = torch.nn.functional.normalize(whole[0, ..., 0], dim=-1)
    v = torch.nn.functional.normalize(whole[0, ..., 0, :], dim=-1)
    noise = 1e-3 * torch.randn(shape, generator=draw, dtype=torch.float64)
    free = statistics(noise, whole, u, v)
    assert abs(free["between_batches"]) < 5 * free["between_batches_stderr"]
    assert abs(free["mean_in_rms"]) < 5 * free["mean_in_rms_stderr"]
    assert 0.8e-3 < free["relative_size_median"] < 1.2e-3
    one_way = torch.einsum("lhd,lhc->lhdc", u, v).expand(shape)
    held = statistics(one_way, whole, u, v)
    assert held["between_batches"] > 0.999 and held["cosine_with_leading_pair"] > 0.999
    assert abs(free["cosine_with_leading_pair"]) < 0.05


def test_one_process_has_no_sum_to_measure(tmp_path, capsys):
    assert reduction_main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_child_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
    child = Child([sys.executable, "-c", code], tmp_path / "hangs.log")
    deadline = time.monotonic() + 20
    family = []
    while not family and time.monotonic() < deadline:
        family = psutil.Process(child.process.pid).children()
        time.sleep(0.05)
    with pytest.raises(ChildError, match="hangs took longer than 0 s"):
        child.wait(0.1)
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert gone and not alive and child.process.returncode is not None


def test_a_failed_child_is_quoted(tmp_path):
    child = Child([sys.executable, "-c", "raise SystemExit('no such luck')"], tmp_path / "x.log")
    with pytest.raises(ChildError, match="x ended with exit code 1: no such luck"):
        child.finish(30)


def test_a_part_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def fails(machine, runs):
        raise ValueError("broken")

    monkeypatch.setattr("gpt2.scaling_parts.kill", fails)
    monkeypatch.setattr("gpt2.scaling_parts.speed", lambda m, r: [{"ratio": math.inf}])
    saved = []
    machine = Machine("cpu", 2, tmp_path, time.monotonic() + 60)
    measure(machine, None, ("kill", "speed"), lambda *found: saved.append(found))
    rows, parts = saved[-1]
    assert [p["error"] for p in parts] == ["ValueError: broken", None]
    assert rows == [{"part": "speed", "ratio": None}] and len(saved) == 2
    assert strict({"a": math.nan, "b": 1.0, "c": "x"}) == {"a": None, "b": 1.0, "c": "x"}


def test_bad_input_is_named(tmp_path, capsys):
    out = str(tmp_path / "x.json")
    assert main(["--json", out, "--device", "cpu", "--parts", "loses"]) == 2
    assert "unknown part 'loses'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--json", out]) == 2 and "no GPU" in capsys.readouterr().err


def run_program(tmp_path, *parts: str) -> dict[str, list[dict]]:
    """The program's rows by part, from two processes over gloo."""
    corpus, out = write_corpus(tmp_path / "text"), tmp_path / "scaling.json"
    arguments = ["--json", str(out), "--device", "cpu", "--processes", "2", "--limit-s", "800"]
    assert main([*arguments, "--corpus", corpus, "--parts", ",".join(parts)]) == 0
    told = json.loads(out.read_text())
    assert told["failed"] == [] and [p["part"] for p in told["parts"]] == list(parts)
    return {p: [r for r in told["rows"] if r["part"] == p] for p in PARTS}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_passes_give_the_same_bits_and_a_killed_run_goes_on(tmp_path):
    rows = run_program(tmp_path, "losses", "kill")
    found = {row["comparison"]: row for row in rows["losses"]}
    same = found["small, alone in passes / small, together"]
    assert same["passes"] == [2, 1] and same["first_different"] is None
    assert found["small, alone / small, together"]["first_different"] is not None
    assert found["small, together / small, bf16 sums"]["first_different"] == 1
    killed, *resumed = rows["kill"]
    assert killed["others_ended_after_s"] < 60 and killed["exit_code"] != 0
    assert "rank 1 of 2" in killed["message"] and killed["status"] == "interrupted"
    assert [r["processes"] for r in resumed] == [2, 1]
    assert resumed[0]["first_different"] is None
    assert resumed[1]["largest_difference"] < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reduction_and_speed_over_gloo(tmp_path):
    rows = run_program(tmp_path, "reduction", "speed")
    causes = {r["cause"]: r for r in rows["reduction"] if "cause" in r}
    sizes = [c["relative_size_median"] for c in causes.values()]
    assert len(sizes) == 3 and sizes[0] < 1e-6 < sizes[1] < 0.01 < sizes[2]
    assert sum("delta_error_mean" in r for r in rows["reduction"]) == 3
    assert [r["to_processes"] for r in rows["speed"] if "ratio" in r] == [2, 2]
