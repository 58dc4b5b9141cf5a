"""Execute a chapter with papermill, within time limits, or take it from the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import yaml

from gpt2.processes import end_family

from .chapters import BuildError, Chapter

REPORT_SECONDS = 30


@dataclass(frozen=True)
class Limits:
    """Seconds that one cell, and one chapter, may take."""

    cell: int = 900
    chapter: int = 2400


@dataclass(frozen=True)
class Executed:
    """An executed notebook and what it was run with (the record is also inside the notebook)."""

    chapter: Chapter
    path: Path
    record: dict
    cached: bool


class Cache:
    """Executed notebooks, one per chapter and preset, named by chapter and key."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, chapter: Chapter, key: str) -> Path:
        return self.folder / f"{chapter.name}@{key[:16]}.ipynb"

    def get(self, chapter: Chapter, key: str) -> Executed | None:
        return self._load(chapter, self.path(chapter, key), key)

    def newest(self, chapter: Chapter) -> Executed | None:
        """The last execution of a chapter, whatever it was run with."""
        found = sorted(
            self.folder.glob(f"{chapter.name}@*.ipynb"), key=lambda p: -p.stat().st_mtime
        )
        loaded = (self._load(chapter, path, None) for path in found)
        return next((e for e in loaded if e), None)

    def put(self, chapter: Chapter, key: str, notebook: Path, record: dict) -> Executed:
        """Move a finished notebook in, with its record; older ones of its preset go."""
        for old in self.folder.glob(f"{chapter.name}@*.ipynb"):
            known = self._load(chapter, old, None)
            if known is None or known.record.get("preset") == record.get("preset"):
                old.unlink(missing_ok=True)
        book = nbformat.read(notebook, as_version=4)
        book.metadata["bit_by_bit"] = record | {"key": key}
        nbformat.write(book, notebook)
        os.replace(notebook, self.path(chapter, key))
        return Executed(chapter, self.path(chapter, key), record | {"key": key}, cached=False)

    def _load(self, chapter: Chapter, path: Path, key: str | None) -> Executed | None:
        try:
            metadata = json.loads(path.read_text(encoding="utf8"))["metadata"]
            record = metadata["bit_by_bit"]
        except (OSError, ValueError, KeyError):
            return None  # absent, or cut short: execute it anew
        if key is not None and record.get("key") != key:
            return None
        return Executed(chapter, path, record, cached=True)


class Execution:
    """A chapter that papermill runs into `partial`, in a process of its own.

    The kernel runs in `root`, the folder that holds the packages. What was executed stays in
    `partial`, whatever happens; papermill's output lies beside it. Whoever starts an execution
    calls `end` at last, which ends papermill, the kernel and the kernel's workers.
    """

    def __init__(
        self,
        chapter: Chapter,
        parameters: dict,
        partial: Path,
        limits: Limits,
        root: Path,
        say=print,
    ):
        self.chapter, self.partial, self.limits, self.say = chapter, partial, limits, say
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        self.log = partial.with_suffix(".log")
        command = [sys.executable, "-m", "papermill", str(chapter.path), str(partial)]
        command += ["--no-progress-bar", "--log-level", "WARNING", "--kernel", "python3"]
        command += ["--language", "python"]
        command += ["--start-timeout", "180"]  # a busy machine starts a kernel slowly
        command += ["--execution-timeout", str(limits.cell), "--cwd", str(root)]
        command += ["--parameters_yaml", yaml.safe_dump(parameters)]
        self.start = self.told = time.monotonic()
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def ended(self) -> bool:
        """Whether the whole chapter is executed; says every REPORT_SECONDS where it is.

        Raises BuildError naming chapter, cell and error for a failure and for one that takes
        longer than its limit.
        """
        code = self.process.poll()
        if code is None:
            self._watch(time.monotonic())
        elif code != 0:
            raise BuildError(_describe_failure(self.chapter, self.partial, self.log, self.limits))
        return code is not None

    def _watch(self, now: float) -> None:
        if now - self.start > self.limits.chapter:
            where, source, _ = _position(self.partial)
            raise BuildError(
                f"chapter {self.chapter.name} took longer than {self.limits.chapter} s; it was at "
                f"cell {where}: {source} (raise the limit with --chapter-timeout)"
            )
        if now - self.told > REPORT_SECONDS:
            self.told = now
            where, source, total = _position(self.partial)
            told = f"{self.chapter.name}: {now - self.start:4.0f} s, cell {where} of {total}"
            self.say(f"      {told}: {source}")

    def end(self) -> None:
        """Kill what still runs of it."""
        end_family(self.process)


def _cells(partial: Path) -> list[dict]:
    try:
        return json.loads(partial.read_text(encoding="utf8"))["cells"]
    except (OSError, ValueError, KeyError):
        return []  # not written yet, or being written


def _position(partial: Path) -> tuple[int, str, int]:
    """Number (from 1), first line and total count of the source's code cells: the one running."""
    code = [c for c in _cells(partial) if c["cell_type"] == "code"]
    cells = [c for c in code if "injected-parameters" not in c["metadata"].get("tags", ())]
    here = 0
    for number, cell in enumerate(cells, start=1):
        if cell["metadata"].get("papermill", {}).get("status") in ("running", "failed"):
            return number, _first_line(cell), len(cells)
        if cell["metadata"].get("papermill", {}).get("status") == "completed":
            here = number
    here = min(here + 1, len(cells))
    return here, _first_line(cells[here - 1]) if cells else "starting", len(cells)


def _first_line(cell: dict) -> str:
    source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    lines = [line for line in source.splitlines() if line.strip()]
    return lines[0][:80] if lines else "(empty)"


def _describe_failure(chapter: Chapter, partial: Path, log: Path, limits: Limits) -> str:
    number, source, _ = _position(partial)
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    error = None
    for cell in _cells(partial):
        for output in cell.get("outputs", ()):
            if output["output_type"] == "error":
                error = f"{output['ename']}: {output['evalue']}"
    if "DeadKernelError" in text:
        error = "the kernel died (out of memory, or the process was ended)"
    elif "CellTimeoutError" in text:
        error = f"longer than {limits.cell} s for one cell (raise it with --cell-timeout)"
    if error is None:
        tail = [line for line in text.splitlines() if line.strip()]
        error = tail[-1] if tail else "papermill ended without a message"
    return (
        f"chapter {chapter.name}, code cell {number} ({source}) failed: {error}\n"
        f"What was executed until then: {partial}; the log: {log}"
    )
