"""Chapters as the build sees them: which there are, and what determines their results.

A chapter is a notebook named in `_toc.yml`. It carries no outputs, and exactly one cell tagged
`parameters` whose assignments are the only things that the build may change.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import itertools
import json
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import nbformat
import yaml

PACKAGES = ("kernels", "gpt2", "book")
NOT_IMPORTED_BY_CHAPTERS = {
    "build.py",
    "chapters.py",
    "execution.py",
    "schedule.py",
    "vendored.py",
}
DEPENDENCIES = ("torch", "triton", "numpy", "matplotlib", "ipywidgets", "papermill", "tokenizers")


class BuildError(Exception):
    """Something that the reader can put right; the message is one clear sentence or two."""


@dataclass(frozen=True)
class Chapter:
    """number: the digits that its file name starts with, else its place or the next free one."""

    number: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    def read(self) -> nbformat.NotebookNode:
        try:
            return nbformat.read(self.path, as_version=4)
        except FileNotFoundError:
            raise BuildError(
                f"_toc.yml names the chapter {self.name}, but {self.path} does not exist; "
                "add it or remove the entry"
            ) from None
        except Exception as error:
            raise BuildError(f"{self.path} is not a readable notebook: {error}") from None

    def parameters(self) -> list[str]:
        """Names assigned in the cell tagged `parameters`; BuildError unless there is one cell."""
        cells = [c for c in self.read().cells if "parameters" in c.metadata.get("tags", ())]
        if len(cells) != 1:
            raise BuildError(
                f"chapter {self.name} has {len(cells)} cells tagged 'parameters'; "
                "it needs exactly one, or the preset cannot be passed to it"
            )
        names = []
        for node in ast.parse(cells[0].source).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names += [t.id for t in targets if isinstance(t, ast.Name)]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.append(node.target.id)
        return names


def find_chapters(toc: Path) -> list[Chapter]:
    """The notebooks of a Jupyter Book table of contents, in its order."""
    files: list[str] = []

    def walk(node):
        if isinstance(node, dict):
            files.extend(node[k] for k in ("root", "file") if k in node)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(yaml.safe_load(toc.read_text(encoding="utf8")))
    notebooks = [p for f in files if (p := toc.parent / f"{f}.ipynb").exists()]
    digits = [re.match(r"\D*(\d+)", path.stem) for path in notebooks]
    taken = {int(d[1]) for d in digits if d}
    chapters = []
    for place, (path, own) in enumerate(zip(notebooks, digits), start=1):
        number = int(own[1]) if own else next(n for n in itertools.count(place) if n not in taken)
        taken.add(number)
        chapters.append(Chapter(number, path))
    return chapters


def select(chapters: list[Chapter], asked: str | None) -> list[Chapter]:
    """'1,4' or names, complete or in part, to chapters. Raises BuildError naming the nearest."""
    if not asked:
        return chapters
    chosen = []
    for word in (w.strip() for w in asked.split(",")):
        hits = [c for c in chapters if word in (str(c.number), c.name)]
        hits = hits or [c for c in chapters if word and word in c.name]
        if not hits:
            known = {str(c.number): c for c in chapters} | {c.name: c for c in chapters}
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
            if not near and word.lstrip("-").isdigit() and chapters:
                near = [str(min(chapters, key=lambda c: abs(c.number - int(word))).number)]
            hint = f"; did you mean {known[near[0]].name!r}?" if near else ""
            listed = ", ".join(f"{c.number} ({c.name})" for c in chapters)
            raise BuildError(f"unknown chapter {word!r}{hint} Chapters: {listed or 'none yet'}")
        chosen += [c for c in hits if c not in chosen]
    return [c for c in chapters if c in chosen]


def pick_preset(asked: str) -> tuple[str, str]:
    """The preset to run and one sentence why. Raises BuildError for an unknown name."""
    from gpt2.config import PRESETS

    if asked != "auto":
        if asked not in PRESETS:
            near = difflib.get_close_matches(asked, [*PRESETS, "auto"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BuildError(f"unknown preset {asked!r}{hint} Presets: auto, {', '.join(PRESETS)}")
        return asked, "asked for"
    import torch

    if not torch.cuda.is_available():
        return "cpu", "no CUDA device here"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < (8, 0):
        told = ".".join(map(str, capability))
        return "cpu", f"{name} has compute capability {told}, and bf16 kernels need 8.0"
    return "mini", f"found {name}"


def code_hash(root: Path) -> str:
    """Hash of everything that a chapter can import or read: package code, archived results."""
    digest = hashlib.sha256()
    for path in sorted(p for name in PACKAGES for p in (root / name).rglob("*") if p.is_file()):
        relative = path.relative_to(root)
        is_code = path.suffix == ".py" and path.name not in NOT_IMPORTED_BY_CHAPTERS
        is_data = path.suffix in (".yml", ".js", ".css") or "results" in relative.parts
        if (is_code or is_data) and not {"__pycache__", "style"} & {*relative.parts}:
            digest.update(relative.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Python and the packages whose version can change a number or a picture."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in DEPENDENCIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def chapter_key(chapter: Chapter, code: str, parameters: dict, device: str) -> str:
    """Everything that determines an executed chapter, as one hash (sha256, hex)."""
    cells = [
        (c.cell_type, c.source, sorted(c.metadata.get("tags", ()))) for c in chapter.read().cells
    ]
    parts = [cells, code, parameters, versions(), device]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
