"""Corpora and batches: sources, splits, refusals by name and offset, replay."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from gpt2.batches import BatchIndex, check_windows, evaluation_starts
from gpt2.build import build_corpus, corpus_plan
from gpt2.config import make_config
from gpt2.data import load_corpus, source_plan
from gpt2.sources import FileSource, installed_text
from gpt2.tokenise import BpeTokenizer, ByteTokenizer

TEXTS = [f"document {i}: " + "some words to read. " * (3 + i % 5) for i in range(60)]


@pytest.fixture
def texts(tmp_path):
    """60 small files; a config that reads them."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02}.txt").write_text(text)
    return make_config("cpu", {"corpus": f"files:{folder}/*.txt", "block_size": 8})


def bin_folder(tmp_path, train, val=None, dtype=np.uint16):
    """A nanoGPT folder and a config for it."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, ids in (("train.bin", train), ("val.bin", train if val is None else val)):
        data = ids if isinstance(ids, bytes) else np.asarray(ids, dtype=dtype).tobytes()
        (folder / name).write_bytes(data)
    return folder, make_config("cpu", {"corpus": f"bin:{folder}", "block_size": 8})


# -- batches --------------------------------------------------------------------------------------


def test_starts_are_a_function_of_seed_and_step_alone():
    index = BatchIndex(10_000, 64, 16, order_seed=3)
    later_first = index.starts(500), index.starts(2)
    again = BatchIndex(10_000, 64, 16, order_seed=3)
    assert np.array_equal(again.starts(2), later_first[1])
    assert np.array_equal(again.table(range(2, 5)), [again.starts(s) for s in (2, 3, 4)])
    assert np.array_equal(again.starts(500), later_first[0])
    assert not np.array_equal(index.starts(0), index.starts(1))
    assert not np.array_equal(index.starts(0), BatchIndex(10_000, 64, 16, 4).starts(0))


def test_starts_stay_the_same_across_versions():
    assert BatchIndex(1_000, 10, 4, order_seed=1).starts(7).tolist() == [803, 822, 559, 81]
    assert BatchIndex(9 * 10**9, 1024, 64, 0).starts(0).max() > 2**32


def test_starts_are_uniform_and_reach_both_ends():
    index = BatchIndex(40, 30, 64, 0)
    drawn = np.concatenate([index.starts(s) for s in range(500)])
    counts = np.bincount(drawn, minlength=10)
    assert len(counts) == 10 and counts.min() > 2_900 and counts.max() < 3_500


def test_accumulation_and_world_size_only_cut_the_same_global_batch(texts, tmp_path):
    corpus = load_corpus(texts, tmp_path / "cache", progress=False)
    starts = corpus.batch_index(texts).starts(5)
    x, y = corpus.batch("train", starts, 8)
    for parts in (2, 4, 16):
        pieces = [corpus.batch("train", s, 8) for s in np.split(starts, parts)]
        assert torch.equal(torch.cat([p[0] for p in pieces]), x)
        assert torch.equal(torch.cat([p[1] for p in pieces]), y)


def test_paired_runs_with_different_attention_draw_identical_batches(texts, tmp_path):
    corpus = load_corpus(texts, tmp_path / "cache", progress=False)
    twin = texts.at(attention="sdpa", init_seed=5, micro_batch_size=4)
    digest = corpus.batch_index(texts).digest(100)
    assert corpus.batch_index(twin).digest(100) == digest
    assert corpus.batch_index(texts.at(order_seed=1)).digest(100) != digest


def test_block_plus_one_tokens_give_one_window_whose_last_token_is_a_target(tmp_path):
    _, config = bin_folder(tmp_path, range(9))
    corpus = load_corpus(config, tmp_path / "cache", progress=False)
    starts = corpus.batch_index(config).starts(0)
    assert starts.tolist() == [0] * 16
    x, y = corpus.batch("train", starts, 8)
    assert x[0].tolist() == list(range(8)) and y[0].tolist() == list(range(1, 9))
    assert evaluation_starts(9, 8, 2, 3).tolist() == [[0, 0]] * 3


def test_block_tokens_are_too_few_and_say_so(tmp_path):
    with pytest.raises(ValueError, match="8 tokens, and a window of block_size=8 needs 9"):
        BatchIndex(8, 8, 1, 0)
    check_windows(9, 8)
    _, config = bin_folder(tmp_path, range(9), range(8))
    with pytest.raises(ValueError, match="val.bin holds 8 tokens"):
        load_corpus(config, tmp_path / "cache", progress=False)


def test_windows_outside_the_split_are_refused(tmp_path):
    _, config = bin_folder(tmp_path, range(12))
    corpus = load_corpus(config, tmp_path / "cache", progress=False)
    for bad in ([4], [-1]):
        with pytest.raises(IndexError, match="start at 0 to 3"):
            corpus.batch("train", bad, 8)
    assert corpus.batch("train", [3], 8)[1][0, -1] == 11


def test_a_recorded_index_replays_even_if_the_generator_changes(tmp_path, monkeypatch):
    index = BatchIndex(1_000, 10, 4, 1)
    original = [index.starts(s) for s in range(6)]
    digest = index.save(tmp_path, steps=5)
    loaded = BatchIndex.load(tmp_path)
    assert loaded == index and loaded.digest(5) == digest == index.digest(5)
    assert isinstance(loaded.recorded, np.memmap) and loaded.recorded.dtype == np.uint32
    assert np.array_equal(loaded.starts(5), original[5])
    monkeypatch.setattr(BatchIndex, "_draw", lambda self, step: np.zeros(4, np.int64))
    for step in range(5):
        assert np.array_equal(loaded.starts(step), original[step])
    with pytest.raises(ValueError, match="step 5 cannot be replayed"):
        loaded.starts(5)


def test_a_damaged_record_is_refused(tmp_path):
    index = BatchIndex(1_000, 10, 4, 1)
    with pytest.raises(FileNotFoundError, match="index.json is missing"):
        BatchIndex.load(tmp_path)
    index.save(tmp_path, steps=5)
    table = np.load(tmp_path / "starts.npy")
    table[2, 1] += 1
    np.save(tmp_path / "starts.npy", table)
    with pytest.raises(ValueError, match="do not match their digest"):
        BatchIndex.load(tmp_path)
    (tmp_path / "starts.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="are damaged"):
        BatchIndex.load(tmp_path)


def test_evaluation_windows_are_spread_evenly_and_draw_nothing():
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    starts = evaluation_starts(1_000, 9, 4, 5)
    assert starts.shape == (5, 4) and starts.min() == 0 and starts.max() == 990
    assert np.ptp(np.diff(starts.ravel())) <= 1
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


# -- corpora --------------------------------------------------------------------------------------


def test_installed_text_is_the_standard_library_capped_and_cached(tmp_path):
    config = make_config("cpu", {"corpus_max_bytes": 500_000})
    corpus = load_corpus(config, tmp_path, progress=False)
    info = corpus.info
    assert info["train"]["bytes"] + info["held_out"]["bytes"] <= 500_000
    assert info["held_out"]["documents"] >= 1 and corpus.vocab_size == 256
    assert all(name.startswith("stdlib/") for name, _, _ in installed_text(False, 0).files)
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    again = load_corpus(config, tmp_path, progress=False)
    assert again.sha256 == corpus.sha256 and np.array_equal(again.train, corpus.train)
    assert files == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}


def test_installed_packages_are_added_on_request(tmp_path, monkeypatch):
    for name in ("module.py", "notes.md", "data.bin", "empty.py"):
        path = tmp_path / "site-packages" / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else "text")
    monkeypatch.setattr("sys.path", [str(tmp_path), str(tmp_path / "site-packages")])
    names = [name for name, _, _ in installed_text(True, 0).files]
    packages = {n for n in names if n.startswith("packages/")}
    assert packages == {"packages/package/module.py", "packages/package/notes.md"}
    assert any(n.startswith("stdlib/") for n in names)


def test_held_out_documents_are_whole_and_never_trained_on(texts, tmp_path):
    config = texts.at(held_out_fraction=0.3)
    corpus = load_corpus(config, tmp_path / "cache", progress=False)
    splits = [bytes(t.astype(np.uint8)).split(b"\0")[:-1] for t in (corpus.train, corpus.held_out)]
    train, held_out = ({t.decode() for t in s} for s in splits)
    assert train | held_out == set(TEXTS) and not train & held_out
    assert 8 <= len(held_out) <= 28
    assert corpus.info["held_out"]["documents"] == len(held_out)


def test_the_bpe_learns_from_training_documents_only(texts, tmp_path, monkeypatch):
    seen = set()
    real = BpeTokenizer.train
    monkeypatch.setattr(
        BpeTokenizer,
        "train",
        lambda documents, *rest: real([d for d in documents if not seen.add(d.decode())], *rest),
    )
    config = texts.at(tokenizer="bpe:300", held_out_fraction=0.3)
    corpus = load_corpus(config, tmp_path / "cache", progress=False)
    assert seen == set(corpus.decode(corpus.train).split("<|endoftext|>")[:-1])
    assert len(seen) < len(TEXTS)


def test_copies_of_a_document_stay_on_one_side(texts, tmp_path):
    folder = Path(texts.corpus.removeprefix("files:")).parent
    for path in list(folder.iterdir()):
        (folder / f"copy-{path.name}").write_bytes(path.read_bytes())
    corpus = load_corpus(texts.at(held_out_fraction=0.3), tmp_path / "cache", progress=False)
    splits = [
        set(bytes(t.astype(np.uint8)).split(b"\0")[:-1]) for t in (corpus.train, corpus.held_out)
    ]
    assert not splits[0] & splits[1] and sum(map(len, splits)) == len(TEXTS)


@pytest.mark.parametrize("fraction", [1e-6, 0.999999])
def test_at_least_one_document_lies_on_each_side(texts, tmp_path, fraction):
    config = texts.at(held_out_fraction=fraction)
    info = load_corpus(config, tmp_path / "cache", progress=False).info
    assert min(info[s]["documents"] for s in ("train", "held_out")) == 1


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    lines = [f"line {i} of the only file\n" for i in range(100)]
    (tmp_path / "one.txt").write_text("".join(lines))
    config = make_config("cpu", {"corpus": f"files:{tmp_path}/one.txt", "held_out_fraction": 0.1})
    corpus = load_corpus(config.at(block_size=8), tmp_path / "cache", progress=False)
    kept, held = corpus.decode(corpus.train[:-1]), corpus.decode(corpus.held_out[:-1])
    assert kept + held == "".join(lines) and held.startswith("line ") and 5 < held.count("\n") < 15


def test_documents_without_difference_cannot_be_split(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("the same")
    config = make_config("cpu", {"corpus": f"files:{tmp_path}/*.txt"})
    with pytest.raises(ValueError, match="fewer than 2 different documents"):
        load_corpus(config, tmp_path / "cache", progress=False)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"corpus": "files:/nonexistent/*.txt"}, "matches no file"),
        ({"corpus_max_bytes": 3}, "the smallest has .* bytes and corpus_max_bytes=3"),
        ({"vocab_size": 100}, "vocab_size=100 is below the 256 ids"),
    ],
)
def test_unusable_sources_say_why(texts, tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        load_corpus(texts.at(**changes), tmp_path / "cache", progress=False)


def test_files_beyond_the_cap_are_left_out_with_a_warning(texts, tmp_path):
    config = texts.at(corpus_max_bytes=1_000)
    with pytest.warns(UserWarning, match="of 60 files are left out.*corpus_max_bytes=1000"):
        info = load_corpus(config, tmp_path / "cache", progress=False).info
    assert 900 < info["train"]["bytes"] + info["held_out"]["bytes"] <= 1_000


def test_the_hash_follows_documents_tokenizer_and_split(texts, tmp_path):
    def sha(config):
        return load_corpus(config, tmp_path / "cache", progress=False).sha256

    first = sha(texts)
    assert sha(texts.at(order_seed=4, learning_rate=1e-4)) == first
    assert sha(texts.at(held_out_fraction=0.4)) != first
    assert sha(texts.at(tokenizer="bpe:300")) != first
    (Path(texts.corpus.removeprefix("files:")).parent / "00.txt").write_text("changed text")
    assert sha(texts) != first


def test_bpe_round_trips_pads_its_vocabulary_and_does_not_depend_on_threads(texts, tmp_path):
    config = texts.at(tokenizer="bpe:300", held_out_fraction=0.3)
    corpus = load_corpus(config, tmp_path / "a", progress=False)
    assert corpus.info["vocabulary"] == 300 and corpus.vocab_size == 320
    assert set(corpus.decode(corpus.train).split("<|endoftext|>")[:-1]) < set(TEXTS)
    (other,) = built_elsewhere(config, tmp_path / "b", RAYON_NUM_THREADS="1")
    assert other == corpus.sha256


BUILD = """
import json, sys
from pathlib import Path
from gpt2.build import build_corpus
from gpt2.sources import globbed_files
pattern, plan, out = sys.argv[1:]
build_corpus(lambda: globbed_files(pattern, 0), json.loads(plan), out, progress=False)
print(json.loads((Path(out) / "meta.json").read_text())["sha256"])
"""


def built_elsewhere(config, cache, processes=1, **environment):
    """The hashes that so many processes at once get for a corpus, each building it if it must."""
    plan, open_source = source_plan(config)
    pattern = open_source().name.removeprefix("files:")
    command = [sys.executable, "-c", BUILD, pattern, json.dumps(plan), str(cache / "corpus")]
    told = dict(stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    running = [subprocess.Popen(command, **told) for _ in range(processes)]
    found = [p.communicate(timeout=60)[0].strip() for p in running]
    assert all(p.returncode == 0 for p in running)
    return found


def test_several_processes_may_ask_at_once(texts, tmp_path):
    found = built_elsewhere(texts, tmp_path / "cache", processes=3)
    assert set(found) == {load_corpus(texts, tmp_path / "here", progress=False).sha256}
    assert not list((tmp_path / "cache").glob(".*partial"))


def test_a_folder_that_is_something_else_is_never_overwritten(tmp_path):
    plan = corpus_plan("x", "y", "bytes", 0.1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no finished corpus"):
        build_corpus(lambda: FileSource("x", (), "y"), plan, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


# -- token files that exist already ---------------------------------------------------------------


def refused(config, tmp_path, kind=ValueError):
    with pytest.raises(kind) as error:
        load_corpus(config, tmp_path / "cache", progress=False)
    return str(error.value)


def test_a_missing_folder_or_file_names_the_command(tmp_path):
    folder, config = bin_folder(tmp_path, range(20))
    said = refused(config.at(corpus="bin:nosuch"), tmp_path, FileNotFoundError)
    assert "nosuch" in said and "python -m gpt2.prepare" in said
    (folder / "val.bin").unlink()
    said = refused(config, tmp_path, FileNotFoundError)
    assert "val.bin is missing" in said and f"--out {folder}" in said


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "train.bin is empty (0 bytes)"),
        (b"\1\0" * 20 + b"\1", "ends inside a token at byte offset 40: 41 bytes"),
        (b"It was a dark and stormy night; " * 9, "is text, not uint16 tokens (from byte 0)"),
        ("Über die Brücke gehen, früh. ".encode() * 9_001, "is text, not uint16 tokens"),
    ],
)
def test_files_that_are_no_tokens_are_refused(tmp_path, data, says):
    _, config = bin_folder(tmp_path, data, range(20))
    said = refused(config, tmp_path)
    assert says in said and "\n" not in said and "python -m gpt2.prepare" in said


def test_an_id_beyond_the_vocabulary_is_named_with_its_offset(tmp_path):
    ids = np.arange(20)
    ids[13] = 50_300
    _, config = bin_folder(tmp_path, ids)
    said = refused(config, tmp_path)
    assert "id 50300 at token 13 (byte offset 26)" in said and "ends at 50256" in said
    assert "id 50300" in refused(config.at(vocab_size=50_300), tmp_path)
    padded = load_corpus(config.at(vocab_size=50_304), tmp_path / "cache", progress=False)
    assert padded.vocab_size == 50_304
    _, config = bin_folder(tmp_path, range(20))
    assert load_corpus(config, tmp_path / "cache", progress=False).vocab_size == 50_304
    assert "id 10 at token 10" in refused(config.at(vocab_size=10), tmp_path)


def test_nanogpts_meta_gives_the_vocabulary_and_is_never_executed(tmp_path):
    folder, config = bin_folder(tmp_path, range(20))
    meta = {"vocab_size": 65, "itos": {0: "\n"}, "stoi": {"\n": 0}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert load_corpus(config, tmp_path / "cache", progress=False).vocab_size == 65

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Hostile()}))
    assert "was not executed" in refused(config, tmp_path)
    assert not (tmp_path / "owned").exists()


def test_prepared_files_that_were_cut_or_changed_are_refused(texts, tmp_path):
    corpus = load_corpus(texts, tmp_path / "cache", progress=False)
    path = corpus.folder.file("train")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    said = refused(texts, tmp_path)
    assert f"cut or overwritten from byte offset {len(whole) - 10}" in said
    path.write_bytes(whole[:-2] + b"\7\0")
    assert "hash differs" in refused(texts, tmp_path)
    path.write_bytes(whole)
    assert load_corpus(texts, tmp_path / "cache", progress=False).sha256 == corpus.sha256
    sidecar = corpus.folder.path / "meta.json"
    sidecar.write_text(json.dumps({"plan": corpus.folder.meta["plan"]}))
    assert "meta.json is damaged" in refused(texts, tmp_path)


def test_reading_a_large_file_does_not_grow_memory(tmp_path):
    folder, config = bin_folder(tmp_path, range(20))
    size = 160 * 2**20
    with open(folder / "train.bin", "wb") as file:
        file.truncate(size)
    config = config.at(block_size=1024, batch_size=64, vocab_size=256)
    (folder / "val.bin").write_bytes(bytes(4096))
    corpus = load_corpus(config, tmp_path / "cache", progress=False)
    assert isinstance(corpus.train, np.memmap)
    index = corpus.batch_index(config)
    process = psutil.Process()

    def growth(read):
        before = process.memory_info().rss
        for step in range(300):
            read(index.starts(step))
        return (process.memory_info().rss - before) / 2**20

    assert growth(lambda starts: corpus.batch("train", starts, 1024)) < 30
    held_open = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    assert growth(lambda starts: held_open[starts].sum()) > 60  # what a map held open would do


def test_a_large_file_is_checked_once(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2.tokenfiles.IN_MEMORY", 16)
    folder, config = bin_folder(tmp_path, range(20))
    first = load_corpus(config, tmp_path / "cache", progress=False)

    def scan(*_):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr("gpt2.tokenfiles._scan", scan)
        assert load_corpus(config, tmp_path / "cache", progress=False).sha256 == first.sha256
    changed = np.arange(20, dtype=np.uint16)
    changed[3] = 60_000
    (folder / "train.bin").write_bytes(changed.tobytes())
    assert "id 60000 at token 3" in refused(config, tmp_path)


def test_bytes_tokenizer_round_trips_any_text():
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode(["naïve ∑".encode()])
    assert tokenizer.decode(ids) == "naïve ∑"
