"""The corpus of a run: token ids of a training and a held-out split, whatever they come from.

    corpus = load_corpus(config)                       built once, then cached by hash
    index = corpus.batch_index(config)                 which windows make up each step
    x, y = corpus.batch("train", index.starts(step), config.block_size)

Sources: installed-text, installed-text+packages, files:GLOB, openwebtext, openwebtext:FOLDER (all
tokenised by `gpt2.build`) and bin:DIR (token files that exist already, `gpt2.tokenfiles`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from . import sources
from .batches import BatchIndex, check_windows, evaluation_starts
from .build import build_corpus, corpus_plan, is_built
from .schema import RunConfig
from .tokenfiles import TokenFolder, check_file, open_folder, read_tokens
from .tokenise import load_tokenizer

__all__ = ["BatchIndex", "Corpus", "corpus_folder", "evaluation_starts", "load_corpus"]


@dataclass(frozen=True)
class Corpus:
    """Token ids, uint16 or uint32: `train` and `held_out` (memory-mapped above 64 MB).

    vocab_size: rows that the model's embedding needs (padded to a multiple of 64 but for bytes and
        nanoGPT's own small vocabularies; or the config's).
    sha256: of the documents in order, their split and the tokenizer; of the files for bin:DIR.
    info: source, tokenizer, vocabulary, documents, bytes and tokens of each split, for captions.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    sha256: str
    info: dict
    folder: TokenFolder = field(repr=False)

    def batch(self, split: str, starts, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y), int64 [len(starts), block_size] on the CPU; y is x moved on by one token.

        Raises IndexError for a start whose window leaves the split, KeyError for an unknown split.
        """
        tokens = self._tokens(split)
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and not 0 <= starts.min() <= starts.max() < len(tokens) - block_size:
            raise IndexError(
                f"starts {starts.min()} to {starts.max()} leave the {split} split: windows of "
                f"{block_size} + 1 tokens start at 0 to {len(tokens) - block_size - 1}"
            )
        windows = tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
        windows = torch.from_numpy(windows)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _tokens(self, split: str) -> np.ndarray:
        tokens = {"train": self.train, "held_out": self.held_out}[split]
        if isinstance(tokens, np.memmap):
            # A map held open counts every page it ever touched as resident; a fresh one does not.
            return np.memmap(self.folder.file(split), dtype=tokens.dtype, mode="r")
        return tokens

    def batch_index(self, config: RunConfig) -> BatchIndex:
        """The training batches that a config asks for."""
        return BatchIndex(len(self.train), config.block_size, config.batch_size, config.order_seed)

    def evaluation_starts(self, config: RunConfig) -> np.ndarray:
        """int64 [eval_batches, rows]: held-out windows, the same under any micro batch.

        rows is the batch size, but at most 64.
        """
        rows = min(config.batch_size, 64)
        return evaluation_starts(len(self.held_out), config.block_size, rows, config.eval_batches)

    def decode(self, ids) -> str:
        """Text of token ids. Raises ValueError where the folder names no tokenizer."""
        if "plan" not in self.folder.meta:
            raise ValueError(f"{self.folder.path} names no tokenizer, so ids cannot be decoded")
        path = self.folder.path / "tokenizer.json"
        text = path.read_text(encoding="utf-8")
        return load_tokenizer(self.folder.meta["plan"]["tokenizer"], text).decode(ids)


def load_corpus(config: RunConfig, cache_dir="data", progress: bool = True) -> Corpus:
    """The corpus of a config: built and cached below `cache_dir` where it is not there yet.

    Several processes may ask at once: one builds, the others wait. Raises ValueError or
    FileNotFoundError naming the file, the offset and the remedy where data cannot be used,
    ImportError or ConnectionError where openwebtext lacks its packages or the network.
    """
    folder = open_folder(corpus_folder(config, cache_dir, progress))
    if config.vocab_size is not None and folder.meta and config.vocab_size < folder.vocabulary:
        raise ValueError(
            f"vocab_size={config.vocab_size} is below the {folder.vocabulary} ids of the "
            f"corpus's tokenizer; use at least {folder.vocabulary}, or none"
        )
    vocabulary = config.vocab_size or folder.vocabulary
    stamps = Path(cache_dir) / "checked"
    hashes = {
        s: check_file(folder, s, vocabulary, stamps, progress) for s in ("train", "held_out")
    }
    tokens = {s: read_tokens(folder.file(s), folder.dtype) for s in hashes}
    for split, ids in tokens.items():
        check_windows(len(ids), config.block_size, f"{folder.file(split)}")
    rows = config.vocab_size or (-(-vocabulary // 64) * 64 if folder.padded else vocabulary)
    sha = folder.meta.get("sha256") or _hash_of(["bin", folder.vocabulary, hashes])
    return Corpus(**tokens, vocab_size=rows, sha256=sha, info=_info(folder, tokens), folder=folder)


def corpus_folder(config: RunConfig, cache_dir="data", progress: bool = True) -> Path:
    """The folder of token files of a config, building it where needed (bin:DIR: DIR itself)."""
    kind, _, rest = config.corpus.partition(":")
    if kind == "bin":
        return Path(rest).expanduser()
    plan, open_source = source_plan(config)
    short = f"{kind}-{config.tokenizer.replace(':', '')}-{_hash_of(plan)[:12]}"
    out = Path(cache_dir) / short
    if not is_built(out, plan):
        build_corpus(open_source, plan, out, progress)
    return out


def source_plan(config: RunConfig):
    """(plan for `build_corpus`, function that opens the source) of a config's documents.

    OpenWebText is opened only when it is needed: once prepared, a corpus is found again without
    the dataset, its packages or a network.
    """
    kind, _, rest = config.corpus.partition(":")
    if kind == "openwebtext":
        name, cap = config.corpus, config.corpus_max_bytes
        fingerprint = f"{sources.openwebtext_fingerprint(rest)} {cap}"
        opener = functools.partial(sources.openwebtext, rest, cap)
    else:
        source = _file_source(config)
        name, fingerprint, opener = source.name, source.fingerprint, lambda: source
    return corpus_plan(name, fingerprint, config.tokenizer, config.held_out_fraction), opener


def _file_source(config: RunConfig) -> sources.FileSource:
    kind, _, rest = config.corpus.partition(":")
    if kind == "files":
        return sources.globbed_files(rest, config.corpus_max_bytes)
    return sources.installed_text(kind.endswith("+packages"), config.corpus_max_bytes)


def _hash_of(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _info(folder: TokenFolder, tokens: dict) -> dict:
    plan = folder.meta.get("plan", {})
    info = {
        "source": plan.get("source", f"bin:{folder.path}"),
        "tokenizer": plan.get("tokenizer", "unknown"),
        "vocabulary": folder.vocabulary,
        "python": folder.meta.get("python"),
    }
    for split, ids in tokens.items():
        known = folder.meta.get(split, {})
        info[split] = {k: known.get(k) for k in ("documents", "bytes")} | {"tokens": len(ids)}
    return info
