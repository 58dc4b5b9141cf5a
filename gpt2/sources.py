"""Where documents come from: Python's own source, files, or OpenWebText.

A source is an ordered list of documents: `name`, `fingerprint` (changes when the documents do, and
is found without reading them), `shards` (ranges of about 32 MB, the unit of work) and
`documents(indices)`, their bytes.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARD_BYTES = 32_000_000
LARGEST_TEXT = 1_000_000

# Parts of the standard library that some distributions package separately.
_OPTIONAL_STDLIB = {
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "distutils", "ensurepip", "turtledemo"),
    *("site-packages", "dist-packages", "__pycache__"),
}
_TEXT_SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}


@dataclass(frozen=True)
class FileSource:
    """Documents that are files. `files` holds (name, path, bytes); order is kept."""

    name: str
    files: tuple[tuple[str, str, int], ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shards(self) -> list[range]:
        bounds, size = [0], 0
        for i, (_, _, n) in enumerate(self.files):
            size += n
            if size >= SHARD_BYTES:
                bounds.append(i + 1)
                size = 0
        if bounds[-1] < len(self.files):
            bounds.append(len(self.files))
        return [range(a, b) for a, b in zip(bounds, bounds[1:])]

    def documents(self, indices: range) -> Iterator[bytes]:
        for index in indices:
            yield Path(self.files[index][1]).read_bytes()


def file_source(name: str, found: list[tuple[str, Path]], max_bytes: int) -> FileSource:
    """A source of (name, path) pairs: empty files left out, capped at `max_bytes` (0: no cap).

    Documents come in the order of the hash of their name, so that a cap takes a fair sample rather
    than the beginning of the alphabet. A document that would pass the cap is skipped.
    """
    chosen, total, smallest = [], 0, None
    sha = hashlib.sha256()
    for label, path in sorted(found, key=lambda pair: _hash(pair[0])):
        stat = path.stat()
        if stat.st_size == 0:
            continue
        smallest = min(smallest or stat.st_size, stat.st_size)
        if max_bytes and total + stat.st_size > max_bytes:
            continue
        total += stat.st_size
        chosen.append((label, str(path), stat.st_size))
        sha.update(f"{label} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    if not chosen:
        why = f"the smallest has {smallest} bytes and corpus_max_bytes={max_bytes}"
        why = why if smallest else "no file there has text; use corpus=files:GLOB"
        raise ValueError(f"corpus {name} has no documents: {why}")
    return FileSource(name, tuple(chosen), sha.hexdigest())


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()


def installed_text(packages: bool, max_bytes: int) -> FileSource:
    """The standard library's .py files; with `packages` also the text of installed packages.

    Parts that not every installation has (tests, IDLE, tkinter) and files above 1 MB are left out.
    """
    found = []
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in _walk(stdlib, {".py"}, _OPTIONAL_STDLIB):
        found.append((f"stdlib/{path.relative_to(stdlib).as_posix()}", path))
    if packages:
        for folder in dict.fromkeys(os.path.realpath(p) for p in sys.path if p):
            root = Path(folder)
            if root.name in ("site-packages", "dist-packages") and root.is_dir():
                for path in _walk(root, _TEXT_SUFFIXES, {"__pycache__"}):
                    found.append((f"packages/{path.relative_to(root).as_posix()}", path))
    name = "installed-text+packages" if packages else "installed-text"
    return file_source(name, found, max_bytes)


def _walk(root: Path, suffixes: set[str], skip: set[str]) -> list[Path]:
    out = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and not f.startswith("config-")]
        for name in names:
            if os.path.splitext(name)[1] in suffixes:
                path = Path(folder, name)
                if path.is_file() and path.stat().st_size <= LARGEST_TEXT:
                    out.append(path)
    return out


def globbed_files(pattern: str, max_bytes: int) -> FileSource:
    """The files that match a glob (`**` for any depth). Raises ValueError where none do."""
    pattern = os.path.expanduser(pattern)
    paths = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
    if not paths:
        raise ValueError(f"corpus files:{pattern} matches no file; quote the pattern and check it")
    source = file_source(f"files:{pattern}", [(p, Path(p)) for p in paths], max_bytes)
    out = len(paths) - len(source)
    if out:
        warnings.warn(
            f"files:{pattern}: {out} of {len(paths)} files are left out, being empty or beyond "
            f"corpus_max_bytes={max_bytes} (0 takes all)",
            stacklevel=2,
        )
    return source


class DatasetSource:
    """Rows of a `datasets.Dataset`, one document each, from a text column."""

    def __init__(self, name: str, dataset, fingerprint: str, max_bytes: int = 0):
        if "text" not in dataset.column_names:
            raise ValueError(f"{name} has no column 'text'; it has {dataset.column_names}")
        self.name, self.fingerprint, self._dataset = name, fingerprint, dataset
        self._count = len(dataset) if not max_bytes else self._rows_within(max_bytes)
        if not self._count:
            raise ValueError(f"corpus {name} has no documents within {max_bytes} bytes")

    def _rows_within(self, max_bytes: int) -> int:
        total = 0
        for i, text in enumerate(self.documents(range(len(self._dataset)))):
            total += len(text)
            if total > max_bytes:
                return i
        return len(self._dataset)

    def __len__(self) -> int:
        return self._count

    @property
    def shards(self) -> list[range]:
        rows = 8_000  # of about 4-5 kB each in OpenWebText
        return [range(a, min(a + rows, len(self))) for a in range(0, len(self), rows)]

    def documents(self, indices: range) -> Iterator[bytes]:
        for begin in range(indices.start, indices.stop, 1_000):
            rows = self._dataset[begin : min(begin + 1_000, indices.stop)]["text"]
            yield from ((row or "").encode("utf-8", errors="replace") for row in rows)


OPENWEBTEXT = "Skylion007/openwebtext"


def openwebtext(folder: str, max_bytes: int) -> DatasetSource:
    """OpenWebText from the hub, or a copy of it (or anything with a text column) in `folder`.

    The folder holds what `Dataset.save_to_disk` wrote, or parquet or JSON-lines files.
    Raises ImportError without `datasets`, ConnectionError where the hub cannot be reached.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError(
            "corpus=openwebtext needs the packages datasets and tiktoken; install them with "
            "`pip install -e .[openwebtext]`"
        ) from None
    if folder:
        return DatasetSource(f"openwebtext:{folder}", *_local_dataset(folder), max_bytes)
    try:
        dataset = _from_hub(datasets)
    except Exception as error:  # whatever the hub's client raises without a network
        raise ConnectionError(
            f"corpus=openwebtext could not be fetched ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); connect, or give a local copy "
            "as corpus=openwebtext:FOLDER"
        ) from None
    return DatasetSource("openwebtext", dataset, openwebtext_fingerprint(""), max_bytes)


def _from_hub(datasets):
    try:
        return datasets.load_dataset(OPENWEBTEXT, split="train")
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        # The repository's main branch is a loading script, which recent versions refuse.
        return datasets.load_dataset(OPENWEBTEXT, split="train", revision="refs/convert/parquet")


def _local_dataset(folder: str):
    import datasets

    root = Path(folder).expanduser()
    if (root / "dataset_info.json").is_file() or (root / "dataset_dict.json").is_file():
        dataset = datasets.load_from_disk(str(root))
        if isinstance(dataset, datasets.DatasetDict):
            dataset = dataset["train"]
        return dataset, openwebtext_fingerprint(folder)
    for kind, suffixes in {"parquet": (".parquet",), "json": (".jsonl", ".json")}.items():
        files = sorted(str(p) for p in root.rglob("*") if p.suffix in suffixes)
        if files:
            dataset = datasets.load_dataset(kind, data_files=files, split="train")
            return dataset, openwebtext_fingerprint(folder)
    raise ValueError(
        f"{folder} is not a dataset; it needs a saved Dataset, .parquet or .jsonl files"
    )


def openwebtext_fingerprint(folder: str) -> str:
    """What identifies the dataset before loading it: the hub's name, or a folder's listing."""
    sha = hashlib.sha256(OPENWEBTEXT.encode())
    root = Path(folder).expanduser()
    for path in sorted(root.rglob("*")) if folder else ():
        if path.is_file() and not path.name.startswith("cache-"):
            stat = path.stat()
            sha.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return sha.hexdigest()
