"""Tokenizers behind one interface: bytes, a BPE trained on the corpus, or GPT-2's own.

Each has `spec` (the configuration's text), `vocab_size`, `end` (the id that closes a document),
`encode(documents) -> list of arrays` and `decode(ids) -> text`. Encoding runs on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

# Twice as much text gave 0.7 % fewer tokens on installed-text+packages.
BPE_TRAINING_BYTES = 24_000_000
END_OF_TEXT = "<|endoftext|>"


class ByteTokenizer:
    """One token per byte. Byte 0, which text does not use, closes a document."""

    spec, vocab_size, end = "bytes", 256, 0

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(d, dtype=np.uint8) for d in documents]

    def decode(self, ids) -> str:
        return bytes(np.asarray(ids, dtype=np.uint8)).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return '"bytes"'


class BpeTokenizer:
    """Byte-level BPE of the `tokenizers` package, splitting text as GPT-2 does."""

    def __init__(self, json_text: str, spec: str):
        from tokenizers import Tokenizer

        self.spec, self._json = spec, json_text
        self._tokenizer = Tokenizer.from_str(json_text)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.end = self._tokenizer.token_to_id(END_OF_TEXT)

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int, progress: bool = False) -> BpeTokenizer:
        """Learn `size` entries (fewer where the text is too short to give so many)."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=progress,
        )
        tokenizer.train_from_iterator(_as_text(_up_to(texts, BPE_TRAINING_BYTES)), trainer)
        return cls(tokenizer.to_str(), f"bpe:{size}")

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(
            list(_as_text(documents)), add_special_tokens=False
        )
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    def decode(self, ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        return self._json


class Gpt2Tokenizer:
    """GPT-2's vocabulary of 50,257 through `tiktoken`, which fetches it at first use."""

    spec, vocab_size, end = "gpt2", 50_257, 50_256

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise ImportError(
                "tokenizer=gpt2 needs the package tiktoken; install it with "
                "`pip install -e .[openwebtext]`, or use tokenizer=bpe:8192"
            ) from None
        try:
            self._tokenizer = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever its HTTP library raises when there is no network
            raise ConnectionError(
                "tokenizer=gpt2 fetches its vocabulary at first use and could not "
                f"({type(error).__name__}); connect once, or use tokenizer=bpe:8192"
            ) from None

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts, threads = list(_as_text(documents)), os.cpu_count() or 1
        encoded = self._tokenizer.encode_ordinary_batch(texts, num_threads=threads)
        return [np.array(ids, dtype=np.uint16) for ids in encoded]

    def decode(self, ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def to_json(self) -> str:
        return '"gpt2"'


def load_tokenizer(spec: str, json_text: str | None = None):
    """The tokenizer of a `spec`. A BPE needs the `json_text` that training gave."""
    if spec == "bytes":
        return ByteTokenizer()
    return Gpt2Tokenizer() if spec == "gpt2" else BpeTokenizer(json_text, spec)


def _as_text(documents: Iterable[bytes]) -> Iterator[str]:
    return (d.decode("utf-8", errors="replace") for d in documents)


def _up_to(texts: Iterable[bytes], limit: int) -> Iterator[bytes]:
    taken = 0
    for text in texts:
        if taken >= limit:
            return
        taken += len(text)
        yield text
