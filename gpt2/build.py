"""From documents to token files: split, tokenise, merge; resumable after a kill, atomic.

A finished folder holds train.bin and val.bin (ids back to back, each document closed by the
tokenizer's end id), tokenizer.json and the sidecar meta.json. Until then the work lies in a hidden
`.NAME.partial` folder beside it, one finished shard after the other.

A document is held out when the hash of its bytes, as a fraction of its range, is below
`held_out_fraction`: before tokenisation, the same on every machine, and copies stay together. At
least one document lies on each side; of a single document the end is held out.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from .files import locked, write_atomically, write_json
from .tokenise import BpeTokenizer, load_tokenizer

FORMAT = 1  # to be raised when the same plan comes to give other tokens
SPLITS = {"train": "train.bin", "held_out": "val.bin"}


def build_corpus(open_source, plan: dict, out, progress: bool = True) -> None:
    """Write the folder `out`, or return at once where another process has. See the module.

    open_source: called only where something is to be done, gives a source (see `gpt2.sources`).
    plan: from `corpus_plan`, recorded in the sidecar.
    Raises ValueError where `out` holds something else.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.parent / f".{out.name}.lock"):
        if is_built(out, plan):
            return
        source = open_source()
        work = out.parent / f".{out.name}.partial"
        _start(work, plan)
        source, rule = _split(source, plan["held_out_fraction"])
        tokenizer = _tokenizer(source, plan["tokenizer"], rule, work, progress)
        shards = _tokenise(source, tokenizer, rule, work, progress)
        _merge(shards, tokenizer, plan, work)
        os.replace(work, out)


def corpus_plan(name: str, fingerprint: str, tokenizer: str, held_out_fraction: float) -> dict:
    """What a folder of tokens was, or will be, made from."""
    return {
        "format": FORMAT,
        "source": name,
        "fingerprint": fingerprint,
        "tokenizer": tokenizer,
        "held_out_fraction": held_out_fraction,
    }


def is_built(out: Path, plan: dict) -> bool:
    """Whether `out` is the finished corpus of `plan`. Raises ValueError if it is another thing."""
    if not out.exists():
        return False
    try:
        found = json.loads((out / "meta.json").read_text(encoding="utf-8")).get("plan")
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{out} exists and is no finished corpus; remove it or move it") from None
    if found != plan:
        raise ValueError(
            f"{out} holds another corpus ({found}); remove it or choose another folder"
        )
    return True


def _start(work: Path, plan: dict) -> None:
    """Keep a partial folder of the same plan, replace any other."""
    for torn in work.glob(".*.tmp"):
        torn.unlink()
    note = work / "plan.json"
    if not note.is_file() or json.loads(note.read_text(encoding="utf-8")) != plan:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        write_json(note, plan)


class _TwoParts:
    """A single document as two: its end, cut at a line, is to be held out."""

    def __init__(self, source, held_out_fraction: float):
        (text,) = source.documents(range(1))
        cut = max(1, int(len(text) * (1 - held_out_fraction)))
        line = text.rfind(b"\n", 0, cut) + 1
        self._parts = [text[: line or cut], text[line or cut :]]
        self.shards = [range(2)]

    def __len__(self) -> int:
        return 2

    def documents(self, indices: range) -> list[bytes]:
        return self._parts


def _split(source, held_out_fraction: float):
    """(source, rule): rule(index, sha256 digest) says whether a document is held out.

    Where few documents are to be expected on one side, all are hashed first and the border moves
    next to a document if that side would be empty.
    """
    if len(source) == 1:
        return _TwoParts(source, held_out_fraction), lambda index, digest: index == 1
    border = held_out_fraction
    if len(source) * min(border, 1 - border) < 30:
        texts = source.documents(range(len(source)))
        places = sorted({_place(hashlib.sha256(text).digest()) for text in texts if text})
        if len(places) < 2:
            raise ValueError(
                f"corpus {source.name} has fewer than 2 different documents with text, so none "
                "can be held out; add documents"
            )
        low, high = sum(places[:2]) / 2, sum(places[-2:]) / 2
        border = min(max(border, low), high)
    return source, lambda index, digest: _place(digest) < border


def _place(digest: bytes) -> float:
    """A document's place in [0, 1) by its hash."""
    return int.from_bytes(digest[:6], "big") / 2**48


def _documents(source, indices: range, rule) -> Iterator[tuple[bytes, bytes, bool]]:
    """(bytes, sha256, held out) of each document that is not empty."""
    for index, text in zip(indices, source.documents(indices)):
        if text:
            digest = hashlib.sha256(text).digest()
            yield text, digest, rule(index, digest)


def _tokenizer(source, spec: str, rule, work: Path, progress: bool):
    """The tokenizer of `spec`; a BPE learns from training documents only, once."""
    path = work / "tokenizer.json"
    if not path.is_file():
        if spec.startswith("bpe:"):
            documents = _documents(source, range(len(source)), rule)
            texts = (text for text, _, held_out in documents if not held_out)
            made = BpeTokenizer.train(texts, int(spec[4:]), progress)
        else:
            made = load_tokenizer(spec)
        write_atomically(path, lambda f: f.write(made.to_json().encode("utf-8")))
    return load_tokenizer(spec, path.read_text(encoding="utf-8"))


def _tokenise(source, tokenizer, rule, work: Path, progress: bool) -> list[tuple[Path, dict]]:
    """(base path, note) of every shard, tokenising those that are not finished."""
    shards = []
    told = dict(unit="doc", desc="tokenising", delay=1, leave=False, disable=not progress)
    with tqdm(total=len(source), **told) as bar:
        for number, indices in enumerate(source.shards):
            base = work / f"shard-{number:05d}"
            note = _finished(base)
            if note is None:
                note = _write_shard(base, list(_documents(source, indices, rule)), tokenizer)
            shards.append((base, note))
            bar.update(len(indices))
    return shards


def _write_shard(base: Path, documents: list, tokenizer) -> dict:
    """Write the tokens of a shard's two splits and, last, the note that says it is finished."""
    dtype = token_dtype(tokenizer.vocab_size)
    ids = tokenizer.encode([text for text, _, _ in documents])
    end = np.array([tokenizer.end], dtype=dtype)
    sha = hashlib.sha256()
    for _, digest, held_out in documents:
        sha.update(bytes([held_out]) + digest)
    note = {"documents": sha.hexdigest()}
    for split in SPLITS:
        chosen = [i for i, d in enumerate(documents) if d[2] == (split == "held_out")]
        parts = [part for i in chosen for part in (ids[i].astype(dtype), end)]
        tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
        write_atomically(base.with_suffix(f".{split}"), tokens.tofile)
        size = sum(len(documents[i][0]) for i in chosen)
        note[split] = {"documents": len(chosen), "bytes": size, "tokens": len(tokens)}
    write_json(base.with_suffix(".json"), {**note, "width": tokens.itemsize})
    return note


def _finished(base: Path) -> dict | None:
    """The note of a shard, which is written last, if its files are whole."""
    try:
        note = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
        for split in SPLITS:
            size = base.with_suffix(f".{split}").stat().st_size
            if size != note[split]["tokens"] * note["width"]:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return note


def _merge(shards: list, tokenizer, plan: dict, work: Path) -> None:
    """Concatenate the shards, write meta.json, delete the shards."""
    meta = {"plan": plan, "vocabulary": tokenizer.vocab_size, "end": tokenizer.end}
    meta |= {
        "dtype": token_dtype(tokenizer.vocab_size).__name__,
        "python": platform.python_version(),
    }
    sha = hashlib.sha256(f"corpus {FORMAT} {plan['tokenizer']} ".encode())
    sha.update((work / "tokenizer.json").read_bytes())
    for _, note in shards:
        sha.update(bytes.fromhex(note["documents"]))
    meta["sha256"] = sha.hexdigest()
    for split, name in SPLITS.items():
        counts = {k: sum(n[split][k] for _, n in shards) for k in ("documents", "bytes", "tokens")}
        meta[split] = {**counts, "sha256": _concatenate(shards, split, work / name)}
    write_json(work / "meta.json", meta)
    for path in [*work.glob("shard-*"), work / "plan.json"]:
        path.unlink()


def _concatenate(shards: list, split: str, path: Path) -> str:
    sha = hashlib.sha256()

    def write(file):
        for base, _ in shards:
            data = base.with_suffix(f".{split}").read_bytes()
            sha.update(data)
            file.write(data)

    write_atomically(path, write)
    return sha.hexdigest()


def token_dtype(vocabulary: int):
    """uint16 where every id fits, else uint32."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32
