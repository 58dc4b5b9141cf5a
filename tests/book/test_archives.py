"""Archives: provenance that captions accept, names of files, what reading refuses."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from book import evidence, searches
from book.captions import archived
from book.evidence import (
    Archive,
    archive_path,
    archives,
    counting,
    latest,
    provenance,
    save_archive,
    with_earlier,
)
from book.experiments import EXPERIMENTS
from book.ledger.findings import Evidence
from gpt2.config import make_config


def run(seed=0, **environment):
    told = {"machine": "Some CPU", "device": "cpu", "cpus": 16, "code": "abcdef0123456789"}
    return SimpleNamespace(
        info={"environment": told | environment, "corpus": {"sha256": "ff"}},
        config=make_config("cpu", {"init_seed": seed}),
        state={"duration_s": 2.5},
    )


def save(folder, rows, **environment):
    told = {"experiment": "x", "complete": True}
    source = provenance([run(1), run(0, **environment)], "cpu", "command")
    return save_archive(told, rows, source, folder)


def test_captions_take_the_provenance_of_an_archive():
    source = provenance([run(3), run(1)], "cpu", "python -m book.evidence x")
    words = str(archived(source))
    assert words.startswith("16-core Some CPU, preset cpu, corpus installed-text, seeds 1, 3, ")
    assert "code abcdef012345" in words and source["duration_s"] == 5.0


def test_files_are_named_by_the_machine_that_trained_and_read_back(tmp_path):
    path = save(tmp_path, [{"arm": "a"}])
    assert path.name.startswith("cpu-16-core-cpu-")
    kept = latest("x", "cpu", tmp_path)
    assert kept.rows == kept.arm("a") == [{"arm": "a"}] and "16-core Some CPU" in kept.source
    assert latest("x", "mini", tmp_path) is None and archives("y", tmp_path) == []


def kept_archive(name, rows, **source):
    source = {
        "preset": "cpu",
        "corpus": "c",
        "machine": "A",
        "code": "1",
        "duration_s": 2.0,
    } | source
    return Archive(Path(name), source, rows)


def seeded(*seeds, arm="low"):
    return [{"arm": arm, "seed": seed} for seed in seeds]


def test_a_later_archive_adds_seeds_and_replaces_those_that_it_has():
    old = kept_archive("old", seeded(0, 1) + seeded(0, 1, arm="fp32"), date="1")
    new = kept_archive("new", seeded(1, 2, arm="fp32"), date="2", machine="B", code="2")
    new = replace(new, complete=False)  # its call asked for other seeds than are declared
    found = counting([old, new])
    assert found.path == new.path and found.complete
    assert found.rows == seeded(0) + seeded(0, arm="fp32") + seeded(1, 2, arm="fp32")
    told = found.provenance
    assert told["machine"] == "A (seed 0); B (seeds 1, 2)" and told["code"] == "1, 2"
    assert told["seeds"] == [0, 1, 2] and told["duration_s"] == 4.0 and told["date"] == "2"
    assert str(archived(told)).startswith("A (seed 0); B (seeds 1, 2), preset cpu")
    same = kept_archive("new", seeded(2), date="2")
    assert counting([old, same]).provenance["machine"] == "A"


@pytest.mark.parametrize(
    "other",
    [
        kept_archive("old", seeded(1), date="1"),  # nothing new
        kept_archive("old", seeded(0), date="1", preset="mini"),
        kept_archive("old", seeded(0), date="1", corpus="another"),
        kept_archive("old", [{"arm": "low"}], date="1"),  # of no seed
    ],
)
def test_other_archives_are_left_out(other):
    newest = kept_archive("new", seeded(1), date="2")
    assert counting([other, newest]) is newest
    assert counting([]) is None


def test_archives_of_no_seeds_are_not_pooled():
    newest = kept_archive("new", [{"tflops": 1.0}], date="2")
    assert counting([kept_archive("old", seeded(0), date="1"), newest]) is newest


def test_both_readers_pool(tmp_path):
    for name, seeds in (("a", (0, 1)), ("b", (2,))):
        source = provenance([run(seed) for seed in seeds], "cpu", "") | {"date": name}
        told = {"experiment": "x", "provenance": source, "rows": seeded(*seeds)}
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / f"{name}.json").write_text(json.dumps(told))
    for found in (latest("x", "cpu", tmp_path), Evidence(tmp_path).archive("x")):
        assert [row["seed"] for row in found.rows] == [0, 1, 2]


def test_nothing_is_lost_of_an_archive_of_the_same_day(tmp_path):
    """Another call, other arms: rows of the same code stay, an archive of other code too."""

    def save_rows(rows, code):
        source = provenance([run(code=code)], "cpu", "")
        whole = with_earlier(rows, archive_path("x", source, tmp_path), code[:12])
        return save_archive({"experiment": "x"}, whole, source, tmp_path)

    def row(name, seed, **more):
        return {"run": name, "seed": seed, "seconds": 10.0} | more

    save_rows([row("a", 0), row("b", 1)], "1" * 64)
    save_rows([row("b", 1, steps=7), row("c", 2)], "1" * 64)
    (kept,) = archives("x", tmp_path)
    assert kept.rows == [row("a", 0), row("b", 1, steps=7), row("c", 2)]
    assert kept.provenance["seeds"] == [0, 1, 2] and kept.provenance["duration_s"] == 30.0
    save_rows([row("d", 0)], "2" * 64)
    before, now = archives("x", tmp_path)  # the newest last
    assert before.rows == kept.rows and before.path.stem.endswith("-" + 12 * "1")
    assert now.rows == [row("d", 0)] and now.path == kept.path


def test_a_gpu_names_itself(tmp_path):
    gpu = [run(machine="NVIDIA H200", device="cuda")]
    path = save_archive({"experiment": "x"}, [], provenance(gpu, "mini", "command"), tmp_path)
    assert path.name.startswith("nvidia-h200-mini-")


def test_a_damaged_archive_is_named(tmp_path):
    path = save(tmp_path, [])
    path.write_text("{")
    with pytest.raises(ValueError, match="is not an archive"):
        archives("x", tmp_path)


@pytest.mark.parametrize(
    "given, told",
    [
        (["--seeds", "0,b"], "write it as 0,1,2"),
        (["--set", "device"], "write it as key=value"),
        (["--set", "learnig_rate=1"], "did you mean 'learning_rate'?"),
        (["--workers", "0"], "use at least 1"),
        (["--devices", "cuda:99"], "device cuda:99: PyTorch sees"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(given, told, capsys, tmp_path):
    where = ["--store", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert evidence.main(["isolation", *given, *where]) == 2
    assert told in capsys.readouterr().err
    assert searches.main([*given, *where]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_workers_of_searches_see_their_own_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with searches.pool_of(1, ["cuda:1", "cuda:0"]) as pool:
        assert pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == "1"
    with searches.pool_of(1, []) as pool:
        assert pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() is None


def test_settings_reach_every_run():
    changed = evidence.with_settings(EXPERIMENTS["sfa"], ["max_steps=7", "compile=off"])
    configs = [arm.config(changed, 0) for arm in changed.arms]
    assert {(c.max_steps, c.compile) for c in configs} == {(7, "off")}
