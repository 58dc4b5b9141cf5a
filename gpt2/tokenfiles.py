"""Folders of token files: found, checked and refused by name and offset before training starts.

Two kinds are read: those of `gpt2.build` (meta.json beside the .bin files) and nanoGPT's
(train.bin and val.bin as uint16, meta.pkl or nothing beside them).
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from .build import SPLITS
from .files import write_json

GPT2_VOCABULARY = 50_257
IN_MEMORY = 64 * 2**20
_CHUNK = 2**23


@dataclass(frozen=True)
class TokenFolder:
    """What a folder says of itself. `meta` is {} for nanoGPT's folders."""

    path: Path
    dtype: np.dtype
    vocabulary: int
    padded: bool
    meta: dict

    def file(self, split: str) -> Path:
        return self.path / SPLITS[split]


def open_folder(path) -> TokenFolder:
    """Read the sidecar. Raises FileNotFoundError for no folder, ValueError for a bad sidecar."""
    path = Path(path).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {str(path)!r} of token files; {_remedy(path)}")
    if (path / "meta.json").is_file():
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            dtype = {"uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]]
            _ = meta["sha256"], [meta[split]["tokens"] for split in SPLITS]
            return TokenFolder(path, np.dtype(dtype), int(meta["vocabulary"]), True, meta)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path / 'meta.json'} is damaged ({error}); {_remedy(path)}"
            ) from None
    if (path / "meta.pkl").is_file():
        vocabulary = _nanogpt_vocabulary(path / "meta.pkl")
        return TokenFolder(path, np.dtype(np.uint16), vocabulary, False, {})
    return TokenFolder(path, np.dtype(np.uint16), GPT2_VOCABULARY, True, {})


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, text and numbers; refuses to look up any class or function."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _nanogpt_vocabulary(path: Path) -> int:
    try:
        return int(_PlainUnpickler(io.BytesIO(path.read_bytes())).load()["vocab_size"])
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(
            f"{path} is not nanoGPT's plain dictionary with a vocab_size ({error}); it was not "
            "executed; remove it and give vocab_size"
        ) from None


def check_file(folder: TokenFolder, split: str, vocabulary: int, stamps, progress: bool) -> str:
    """sha256 of a split's file, after reading all of it once.

    Files above 64 MB are not read again while their size and time stay the same (noted in the
    folder `stamps`). Raises FileNotFoundError or ValueError naming the file, the offset of the
    first bad byte and the remedy.
    """
    path = folder.file(split)
    count = _check_size(folder, split)
    stat = path.stat()
    told = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "path": str(path.resolve())}
    stamp = Path(stamps) / f"{hashlib.sha256(told['path'].encode()).hexdigest()[:16]}.json"
    if stat.st_size > IN_MEMORY and stamp.is_file():
        known = json.loads(stamp.read_text(encoding="utf-8"))
        if {k: known[k] for k in told} == told and known["largest"] < vocabulary:
            return known["sha256"]
    sha, largest = _scan(path, folder.dtype, count, vocabulary, progress)
    expected = folder.meta.get(split, {}).get("sha256", sha)
    if sha != expected:
        raise ValueError(f"{path} is not what meta.json describes (hash differs); {_remedy(path)}")
    if stat.st_size > IN_MEMORY:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_json(stamp, {**told, "sha256": sha, "largest": largest})
    return sha


def _check_size(folder: TokenFolder, split: str) -> int:
    """The number of tokens in a split's file, judged without reading all of it."""
    path, width = folder.file(split), folder.dtype.itemsize
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {_remedy(path.parent)}")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes); {_remedy(path.parent)}")
    if _looks_like_text(path):
        raise ValueError(
            f"{path} is text, not {folder.dtype} tokens (from byte 0); use corpus=files:{path}, "
            f"or {_remedy(path.parent)}"
        )
    if size % width:
        raise ValueError(
            f"{path} ends inside a token at byte offset {size - size % width}: {size} bytes are "
            f"no multiple of {width} ({folder.dtype}); {_remedy(path.parent)}"
        )
    expected = folder.meta.get(split, {}).get("tokens", size // width)
    if size // width != expected:
        raise ValueError(
            f"{path} holds {size // width} tokens and meta.json says {expected}: it is cut or "
            f"overwritten from byte offset {min(size, expected * width)}; {_remedy(path.parent)}"
        )
    return size // width


def _looks_like_text(path: Path) -> bool:
    """Whether the first 64 kB are text: UTF-8 without control characters."""
    with open(path, "rb") as file:
        sample = file.read(65_536)
    control = set(range(32)) - set(b"\t\n\r\f") | {127}
    if len(sample) < 16 or control & set(sample):
        return False
    try:
        sample[: max(16, len(sample) - 4)].decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        return error.start >= len(sample) - 8  # a character cut by the end of the sample
    return True


def _scan(path: Path, dtype, count: int, vocabulary: int, progress: bool) -> tuple[str, int]:
    """(sha256, largest id). Raises ValueError at the first id that the vocabulary lacks."""
    sha, largest, done = hashlib.sha256(), 0, 0
    with open(path, "rb") as file, tqdm(
        total=count, unit="tok", unit_scale=True, desc=f"checking {path.name}", delay=1,
        disable=not progress, leave=False,
    ) as bar:  # fmt: skip
        while chunk := file.read(_CHUNK * dtype.itemsize):
            sha.update(chunk)
            ids = np.frombuffer(chunk, dtype=dtype)
            top = int(ids.max())
            if top >= vocabulary:
                at = done + int(np.argmax(ids >= vocabulary))
                raise ValueError(
                    f"{path} holds id {int(ids[at - done])} at token {at} (byte offset "
                    f"{at * dtype.itemsize}), but the vocabulary ends at {vocabulary - 1}; "
                    "set vocab_size to the tokenizer's, or prepare the data again"
                )
            largest, done = max(largest, top), done + len(ids)
            bar.update(len(ids))
    return sha.hexdigest(), largest


def read_tokens(path: Path, dtype) -> np.ndarray:
    """The ids of a file: in memory up to 64 MB, memory-mapped read-only beyond."""
    if path.stat().st_size <= IN_MEMORY:
        return np.fromfile(path, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _remedy(path: Path) -> str:
    return (
        "prepare it with `python -m gpt2.prepare --corpus openwebtext --tokenizer gpt2 "
        f"--out {path if path.suffix != '.bin' else path.parent}`"
    )
