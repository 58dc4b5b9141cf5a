"""The page on speed: tables from records of the bench, budgets from compiled code."""

import json
from types import SimpleNamespace

import pytest

from book import speed
from book.evidence import Archive
from kernels.triton_blocks import Blocks

SHAPE = dict(causal=True, head_dim=64, seq_len=4_096)
LOOP = """
$L__BB0_1:
  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;
  ex2.approx.ftz.f32 %f2, %f1;
  selp.f32 %f2, %f2, %f3, %p1;
$L__BB0_2:
  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;
  @%p2 ex2.approx.ftz.f32 %f2, %f1;
$L__BB0_3:
  add.s32 %r1, %r1, 1;
"""


def row(implementation, tflops, direction="forward"):
    return SHAPE | dict(implementation=implementation, direction=direction, tflops=tflops)


def compiled(text=LOOP):
    return SimpleNamespace(ptx=text, blocks=Blocks(128, 128, 8, 2))


def test_ratios_are_to_the_fastest_pinned_backend():
    rows = [row("ours-flash", 300.0), row("sdpa-flash", 250.0), row("sdpa-cudnn", 400.0)]
    text = speed.rate_table([*rows, row("flex", 350.0)], 64).data
    assert "300 (0.75)" in text and "400 |" in text and "350 |" in text
    assert "(" not in speed.rate_table(rows[:1], 64).data.splitlines()[-1]
    assert "| TFLOP/s | ours flash |" in text and text.splitlines()[-1].startswith("| forward")


def test_a_failed_implementation_is_none():
    rows = [row("ours-flash", None), row("sdpa-flash", 100.0), row("ours-flash", 50.0, "backward")]
    text = speed.rate_table(rows, 64).data
    lines = text.splitlines()
    assert lines[-2].endswith("| none | 100 |") and lines[-1].endswith("| 50 | none |")


def test_rates_and_times_are_grouped_by_shape_forward_first():
    rows = [row("ours-flash", 50.0, "backward"), row("ours-flash", 300.0), row("flex", 0.0)]
    rows[0]["ms_p50"] = 2.0
    rows.append(row("sdpa-flash", 9.0) | dict(error="not here"))
    forward, backward = ("forward", True, 64, 4_096), ("backward", True, 64, 4_096)
    rates = speed.by_shape(rows)
    assert rates == {forward: {"ours-flash": 300.0}, backward: {"ours-flash": 50.0}}
    assert list(rates) == [forward, backward]
    assert speed.by_shape(rows, "ms_p50") == {backward: {"ours-flash": 2.0}}


def test_predictions_are_held_against_what_was_measured():
    rows = [row("ours-flash", 300.0), row("ours-paper", 190.0)]
    assert "| 0.67 | 0.63 to 0.63 | 0.95 to 0.95 |" in speed.predictions(rows).data


def test_work_is_read_from_the_loop_without_a_mask():
    (work,) = speed.loop_work(compiled())
    assert work.matrix == 2 * 64 * 128 * 16 * 2 / 4_096  # two warp groups
    assert work.special == 1 * 256 / 16 and work.issue == 2 * 256 / 128
    assert work.clocks() == (128.0, 128.0 + 16.0, 128.0 + 16.0 + 4.0)


def test_a_block_of_half_the_size_needs_twice_the_loops():
    half = SimpleNamespace(ptx=LOOP, blocks=Blocks(64, 128, 8, 2))
    assert speed.loop_work(half)[0].matrix == 2 * speed.loop_work(compiled())[0].matrix


def test_bounds_count_as_the_bench_does():
    one = speed.Pass("forward", "ours-flash", [compiled()])
    counted = 2 * 2 * 128 * 128 * 64 / 4_096
    assert one.bounds(800.0, 64)[0] == 800.0 * counted / 128.0
    text = speed.budget_table([one], [row("ours-flash", 300.0)], 800.0, 64).data
    assert text.endswith("| 300 |")


def test_the_ceiling_is_of_the_same_run(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"ceiling_tflops": 795.0}))
    assert speed.ceiling(Archive(path, {}, [])) == 795.0
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no ceiling_tflops"):
        speed.ceiling(Archive(path, {}, []))


def test_the_figure_has_a_line_per_implementation_and_words():
    rows = [row("ours-flash", 300.0), row("flex", 350.0), row("flex", 200.0, "backward")]
    top, bottom = speed.rate_figure(rows, 64, 800.0).axes
    assert len(top.lines) == 3 and len(bottom.lines) == 2  # and the ceiling
    told = speed.rates_in_words(rows, 64)
    assert "forward at 4,096 keys: flex 350, ours-flash 300" in told and "backward" in told
