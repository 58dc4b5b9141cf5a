"""The page on running at scale: estimates from presets, words that follow the archive."""

import json

import nbformat
import pytest

from book import ROOT, scale
from book.scale_estimates import arithmetic, count_parameters, passes_table, time_table
from gpt2.config import PRESETS, make_config
from gpt2.model import GPT

SOURCE = dict(machine="2 x NVIDIA H200", device="cuda", processes=2, preset="mini", torch="2")
SOURCE |= dict(corpus="text", date="2026-11-29", code="abc", seeds=[0])
LOSSES = dict(part="losses", comparison="small, alone in passes / small, together", preset="mini")
LOSSES |= dict(a="small, alone in passes", b="small, together", processes=[1, 2], passes=[2, 1])
LOSSES |= dict(steps=[0, 1], first_different=None, first_different_grad_norm=None)
LOSSES |= dict(largest_difference=0.0, loss_a=[1.0, 0.5], loss_b=[1.0, 0.5])
CAUSE = dict(part="reduction", cause="sum in bf16", processes=2, batches=4, mean_in_rms=0.0)
CAUSE |= dict(relative_size_median=0.002, mean_in_rms_stderr=0.1, cosine_with_leading_pair=0.0)
CAUSE |= dict(between_batches=0.01, between_batches_stderr=0.01)
SPEED = dict(part="speed", preset="gpt2s", implementation="paper", processes=1, n_gpu=1, mfu=0.3)
SPEED |= dict(tokens_per_s=1e5, peak_bytes=2**34, step_ms={"p50": 5.0}, parameters=124_373_760)


def written(folder, rows, name="a", **changes):
    path = folder / "scaling" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    told = {"experiment": "scaling", "complete": True, "rows": rows}
    path.write_text(json.dumps(told | {"provenance": SOURCE | changes}))
    return scale.scaling_archives(folder)


def test_parameters_are_those_of_the_model():
    config = make_config("cpu", {"n_embd": 16})
    assert count_parameters(config, 256) == GPT(config, 256).count_parameters(positions=True)
    assert count_parameters(PRESETS["paper"]) == 124_373_760
    assert abs(arithmetic(PRESETS["paper"]) / 8.55e8 - 1) < 0.01  # gpt2.hardware's own example


def test_processes_that_do_not_divide_the_batch_are_refused_in_the_table():
    text = passes_table(PRESETS["paper"], [2, 3]).data
    assert "| 2 | 256 | 32 | 8 |" in text and "does not divide over 3" in text


def test_times_are_measured_where_a_measurement_is_archived():
    config = PRESETS["paper"]
    where = {"machine": "NVIDIA H200", "date": "2026-11-29", "code": "0123abcd"}
    assumed = time_table(config, [1], [], "NVIDIA H200", 0.5).data
    assert "assumed: 50.0 %" in assumed and "no measurement" in assumed
    other = where | SPEED | {"implementation": "flash"}
    assert "assumed" in time_table(config, [1], [other], "NVIDIA H200", 0.5).data
    found = time_table(config, [1, 4], [where | SPEED], "NVIDIA H200", 0.5).data
    assert "| 1 | 100,000 | 36.4 |" in found and "measured on one GPU, NVIDIA H200" in found
    with pytest.raises(ValueError, match="'abacus'; name another"):
        time_table(config, [1], [], "abacus", 0.5)


def test_without_an_archive_the_page_says_so(tmp_path):
    assert scale.scaling_archives(tmp_path) == [] and scale.throughput_rows(tmp_path) == []
    assert "No archive yet" in scale.source([]).data
    tables = "losses_table losses_figure losses_in_words kill_table probes_table causes_table "
    for name in (tables + "reduction_in_words scaling_table").split():
        assert "not in any archive yet" in getattr(scale, name)([]).data
    assert "not in any archive yet" in scale.speed_table([]).data


def test_words_follow_the_archive(tmp_path):
    same = scale.losses_in_words(written(tmp_path, [LOSSES])).data
    assert "nothing but the order" in same
    other = LOSSES | dict(first_different=7, first_different_grad_norm=4)
    assert "first at step 4" in scale.losses_in_words(written(tmp_path, [other])).data
    free = scale.reduction_in_words(written(tmp_path, [CAUSE])).data
    assert "share no direction" in free and "0.2 %" in free
    held = scale.reduction_in_words(written(tmp_path, [CAUSE | dict(between_batches=0.3)])).data
    assert "shared by batches" in held


def test_tables_name_both_machines_and_failures_are_told(tmp_path):
    cpu = written(tmp_path, [LOSSES], "b", device="cpu", date="2027-01-01")
    assert "No archive of GPUs" in scale.source(cpu).data
    failed = [dict(part="kill", event="resumed on 2", error="it hung")]
    failed += [dict(part="speed", preset="mini", processes=2, error="no time")]
    found = written(tmp_path, [LOSSES, *failed])
    assert [a.provenance["device"] for a in found] == ["cuda", "cpu"]
    told = scale.source(found).data
    assert "kill: resumed on 2; speed: mini  on 2" in told and "No archive of GPUs" not in told
    text = scale.losses_table(found).data
    assert "2 x NVIDIA H200, `mini`" in text and "toys on a CPU, `mini`" in text
    assert "not in any archive" in scale.kill_table(found).data


def test_what_the_connection_must_do_is_computed():
    row = SPEED | dict(tokens_per_step=1e5, update_ms=10.0)  # a step of one second
    text = scale.needed_sum([row], gpus=2, share=0.8).data
    assert "| 1000.0 | 5.00 | 497 MB | 120.0 | 4 GB/s |" in text
    assert "not possible" in scale.needed_sum([row], gpus=2, share=0.999).data
    assert "not in any archive" in scale.needed_sum([SPEED], gpus=2, share=0.9).data


def test_speeds_come_from_both_kinds_of_archive(tmp_path):
    folder = tmp_path / "throughput"
    folder.mkdir()
    environment = {"machine": "NVIDIA H100", "date": "2026-11-28T10:00:00", "code": "abcd0123"}
    bench = {"rows": [SPEED, SPEED | {"error": "x"}], "environment": environment}
    (folder / "a.json").write_text(json.dumps(bench))
    rows = scale.speeds(written(tmp_path, [SPEED]), tmp_path)
    text = scale.speed_table(rows).data
    assert "NVIDIA H100, 2026-11-28, code abcd0123" in text
    assert "2 x NVIDIA H200, 2026-11-29" in text
    known = scale.throughput_rows(tmp_path)
    later = [r | {"tokens_per_s": 1.0} for r in known] + [known[0] | {"machine": "another"}]
    assert scale.newest([*known, *later]) == later  # H100 before another
    (folder / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="a.json is not an archive"):
        scale.throughput_rows(tmp_path)


def test_the_page_runs_as_it_is():
    names = {}
    for cell in nbformat.read(ROOT / "book" / "scale.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, cell.id, "exec"), names)
    assert names["config"].preset == "paper"


def test_speeds_of_compared_runs_leave_out_those_in_passes(tmp_path):
    usual = LOSSES | dict(a="large, alone", comparison="large, alone / large, together")
    rows = [
        r | dict(preset="gpt2s", attention="flash", processes=[1, 2], passes=[16, 8])
        for r in (usual | dict(tokens_per_s=[400e3, 780e3]), LOSSES | dict(tokens_per_s=[1, 2]))
    ]
    told = scale.compared_speeds(written(tmp_path, rows)).data
    assert "gpt2s, flash | 1 to 2 | 400,000 | 780,000 | 1.95 | 98 % |" in told
    assert told.count("1 to 2") == 1
    assert "not in any archive" in scale.compared_speeds([]).data
