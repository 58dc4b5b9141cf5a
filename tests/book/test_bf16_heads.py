"""Heads of a run that explodes in bf16, from the archive: which are read, and what is told."""

import json
import shutil

from book import RESULTS
from book.bf16_heads import FAILING, directions_table, directions_words, kept_heads, rounding_table
from kernels.numerics import parse_numerics


def test_an_archive_without_heads_is_passed_by(tmp_path):
    assert kept_heads(tmp_path) is None
    folder = tmp_path / "captures-toy"
    folder.mkdir()
    told = {"provenance": {"date": "2026-01-01"}, "rows": [{"arm": FAILING, "attention": "paper"}]}
    (folder / "a.json").write_text(json.dumps(told))
    assert kept_heads(tmp_path) is None


def test_heads_are_told_by_run_and_measured_as_the_failing_run_rounds(tmp_path):
    kept = kept_heads()
    source = kept.archive.path
    assert list(kept.captures) == [FAILING, "delta_fp32"]  # that which fails first
    paper = parse_numerics("paper")
    assert all(c.numerics == paper for found in kept.captures.values() for c in found)
    assert [m.step for m in kept.healthy] == [4_400, 7_099]  # no error under its own numerics
    assert all(m.weight.ratio > 0 for m in [*kept.failing, *kept.healthy])
    words = directions_words(kept).data
    assert "in the 6 captures" in words and "layer 2, head 0" in words
    for table in (directions_table(kept).data, rounding_table(kept).data):
        lines = table.splitlines()
        assert (
            len(lines) == 10 and "delta from an fp32 O, layer 2, head 0, step 7,099" in lines[-1]
        )
    # the same of one experiment by name, and of the newest that has any heads
    copy = tmp_path / "captures-other"
    shutil.copytree(source.parent, copy)
    assert kept_heads(tmp_path, "captures-other").archive.path == copy / source.name
    assert source.is_relative_to(RESULTS)
