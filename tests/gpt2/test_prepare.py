"""`python -m gpt2.prepare`: OpenWebText's pipeline, resumption after a kill, clear errors."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from gpt2 import build, prepare, sources
from gpt2.config import make_config
from gpt2.data import load_corpus, source_plan
from gpt2.tokenise import Gpt2Tokenizer

ROWS = [f"Row {i}: a web page about tokens, «naïve» or not. " * (1 + i % 3) for i in range(40)]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, row in enumerate(ROWS):
        (folder / f"{i:02}.txt").write_text(row, encoding="utf-8")
    return folder


@pytest.fixture
def tiny_gpt2(monkeypatch):
    """tiktoken itself, with 256 single bytes and GPT-2's end of text as its vocabulary."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "tiny",
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={"<|endoftext|>": 50_256},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


def saved_dataset(folder: Path, kind: str) -> Path:
    """ROWS as a dataset in OpenWebText's format (one column, text)."""
    datasets = pytest.importorskip("datasets")
    folder.mkdir()
    dataset = datasets.Dataset.from_dict({"text": ROWS})
    if kind == "saved":
        dataset.save_to_disk(str(folder))
    elif kind == "parquet":
        dataset.to_parquet(str(folder / "train-00000-of-00001.parquet"))
    else:
        lines = (json.dumps({"text": row}) for row in ROWS)
        (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _datasets_cache_of_its_own(tmp_path, monkeypatch):
    if importlib.util.find_spec("datasets"):
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


# -- OpenWebText ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["saved", "parquet", "jsonl"])
def test_openwebtext_goes_through_datasets_and_tiktoken(tmp_path, tiny_gpt2, kind):
    folder = saved_dataset(tmp_path / "owt", kind)
    config = make_config("paper", {"corpus": f"openwebtext:{folder}", "held_out_fraction": 0.2})
    corpus = prepare.prepare(config.at(block_size=8), cache_dir=tmp_path, progress=False)
    assert corpus.train.dtype == np.uint16 and corpus.vocab_size == 50_304
    documents = corpus.decode(corpus.train).split("<|endoftext|>")[:-1]
    assert documents == [row for row in ROWS if row in documents]
    held_out = corpus.decode(corpus.held_out).split("<|endoftext|>")[:-1]
    assert sorted(documents + held_out) == sorted(ROWS)


def test_a_prepared_dataset_is_found_again_without_its_packages(tmp_path, tiny_gpt2, monkeypatch):
    folder = saved_dataset(tmp_path / "owt", "jsonl")
    config = make_config("cpu", {"corpus": f"openwebtext:{folder}", "tokenizer": "gpt2"})
    first = load_corpus(config.at(block_size=8), tmp_path, progress=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert load_corpus(config.at(block_size=8), tmp_path, progress=False).sha256 == first.sha256


def test_the_hubs_script_is_avoided_where_datasets_refuses_it(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, split, revision="main"):
        asked.append(revision)
        if revision == "main":
            raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        return datasets.Dataset.from_dict({"text": ROWS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = sources.openwebtext("", max_bytes=0)
    assert asked == ["main", "refs/convert/parquet"] and len(source) == len(ROWS)
    capped = sources.openwebtext("", max_bytes=200)
    assert sum(map(len, capped.documents(range(len(capped))))) <= 200


@pytest.mark.parametrize("package", ["datasets", "tiktoken"])
def test_a_missing_package_is_named_with_its_install_command(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"needs the package.*pip install -e \.\[openwebtext\]"):
        sources.openwebtext("", 0) if package == "datasets" else Gpt2Tokenizer()


def test_no_network_is_said_in_a_sentence(monkeypatch):
    datasets, tiktoken = pytest.importorskip("datasets"), pytest.importorskip("tiktoken")

    def unreachable(*_, **__):
        raise OSError("name resolution failed\nlong traceback")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ConnectionError, match="corpus=openwebtext:FOLDER") as error:
        sources.openwebtext("", 0)
    assert "\n" not in str(error.value)
    with pytest.raises(ConnectionError, match="use tokenizer=bpe:8192"):
        Gpt2Tokenizer()


def test_a_folder_without_a_dataset_is_refused(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="is not a dataset"):
        sources.openwebtext(str(tmp_path), 0)


def test_gpt2s_real_vocabulary_gives_its_known_ids():
    pytest.importorskip("tiktoken")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", Path(tempfile.gettempdir(), "data-gym-cache"))
    if not Path(folder).is_dir() or not any(Path(folder).iterdir()):
        pytest.skip("no vocabulary on this machine; set TIKTOKEN_CACHE_DIR to one")
    tokenizer = Gpt2Tokenizer()
    (ids,) = tokenizer.encode([b"Hello world"])
    assert ids.tolist() == [15_496, 995] and tokenizer.decode(ids) == "Hello world"
    assert tokenizer.decode([tokenizer.end]) == "<|endoftext|>"


# -- resumption -----------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
from gpt2 import build, sources
pattern, plan, out, place = sys.argv[1:]
sources.SHARD_BYTES = 500
calls = 0

def kill_at(name, call):
    real = getattr(build, name)
    def wrapped(*args, **kwargs):
        global calls
        calls += name == place
        if name == place and calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(build, name, wrapped)

kill_at("write_json", 4)      # plan.json and two shards are done, the third lacks its note
kill_at("_concatenate", 2)    # train.bin is there, val.bin is not
build.build_corpus(lambda: sources.globbed_files(pattern, 0), json.loads(plan), out, False)
"""


@pytest.mark.parametrize(
    "place, cut, kept",
    [("write_json", False, 2), ("write_json", True, 1), ("_concatenate", False, 0)],
)
def test_preparation_continues_after_a_kill_and_gives_the_same_bytes(
    texts, tmp_path, monkeypatch, place, cut, kept
):
    config = make_config("cpu", {"corpus": f"files:{texts}/*.txt", "tokenizer": "bpe:300"})
    plan, open_source = source_plan(config)
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, f"{texts}/*.txt", json.dumps(plan), str(out), place]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert not out.exists() and (tmp_path / ".out.partial").is_dir()

    shard = tmp_path / ".out.partial" / "shard-00000.train"
    if cut:
        shard.write_bytes(shard.read_bytes()[:-2])
    monkeypatch.setattr(sources, "SHARD_BYTES", 500)
    written = []
    real = build._write_shard
    monkeypatch.setattr(build, "_write_shard", lambda *a: written.append(a[0]) or real(*a))
    build.build_corpus(open_source, plan, out, progress=False)
    shards = len(open_source().shards)
    assert len(written) == (shards - kept if kept else 0) and shards > 3

    build.build_corpus(open_source, plan, tmp_path / "whole", progress=False)
    names = {p.name for p in out.iterdir()}
    assert names == {"train.bin", "val.bin", "tokenizer.json", "meta.json"}
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_work_begun_for_another_plan_is_not_continued(texts, tmp_path):
    config = make_config("cpu", {"corpus": f"files:{texts}/*.txt"})
    plan, open_source = source_plan(config)
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "plan.json").write_text(json.dumps({**plan, "tokenizer": "bpe:300"}))
    (partial / "tokenizer.json").write_text("of another corpus")
    build.build_corpus(open_source, plan, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '"bytes"'


# -- the command ----------------------------------------------------------------------------------


def test_the_command_writes_a_folder_that_bin_reads(texts, tmp_path, capsys):
    out, cache = tmp_path / "owt", str(tmp_path / "cache")
    line = ["--corpus", f"files:{texts}/*.txt", "--block_size=8", "--cache", cache, "--quiet"]
    assert prepare.main([*line, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    sidecar = json.loads((out / "meta.json").read_text())
    assert f"{sidecar['train']['tokens']:,} tokens" in said and sidecar["sha256"] in said
    assert sidecar["plan"]["source"] == f"files:{texts}/*.txt"
    assert sidecar["train"]["documents"] + sidecar["held_out"]["documents"] == len(ROWS)
    assert (out / "train.bin").stat().st_size == 2 * sidecar["train"]["tokens"]
    config = make_config("cpu", {"corpus": f"bin:{out}", "block_size": 8})
    assert load_corpus(config, cache, progress=False).sha256 == sidecar["sha256"]
    assert prepare.main(line) == 0
    assert sidecar["sha256"] in capsys.readouterr().out

    assert prepare.main([*line, "--tokenizer=bpe:300", "--out", str(out)]) == 2
    assert "holds another corpus" in capsys.readouterr().err
    assert prepare.main(["--corpus", f"bin:{out}", "--out", str(out)]) == 2
    assert "is prepared already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, says",
    [
        ("--corpus files:/nonexistent/*", "matches no file"),
        ("--corpus bin:/nonexistent", "no folder '/nonexistent' of token files"),
        ("--tokenizer words", "tokenizer='words' is unknown"),
        ("--preset minni", "did you mean 'mini'"),
    ],
)
def test_errors_are_one_sentence_and_exit_2(tmp_path, capsys, line, says):
    assert prepare.main([*line.split(), "--cache", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("gpt2.prepare: ") and said.count("\n") == 1


def test_help_shows_the_data_options_and_examples_only(capsys):
    with pytest.raises(SystemExit) as stop:
        prepare.main(["--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and "--held_out_fraction" in said and "examples:" in said
    assert "--learning_rate" not in said
