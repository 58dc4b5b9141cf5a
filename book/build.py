"""Build the book: `python -m book.build`.

Chapters are executed by papermill, two beside each other where their order allows it (see
`book.schedule`), into `_build/executed/book/`; then Jupyter Book makes the HTML with every warning
an error. A chapter whose source, code, parameters, versions and archived results are unchanged is
taken from `_build/cache/`, so an interrupted build goes on where it stopped and a second build is
quick. Every page says what code it was run with.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import nbformat

from . import ROOT
from .captions import machine
from .chapters import (
    BuildError,
    Chapter,
    chapter_key,
    code_hash,
    find_chapters,
    pick_preset,
    select,
    versions,
)
from .execution import Cache, Executed, Execution, Limits
from .schedule import Order, execute_all

FRONT_PAGE = "front-page.txt"  # what book/intro.md includes
NOTHING_FOUND = "This build shows no results here; `make book` executes the ledger of claims."


@dataclass(frozen=True)
class Layout:
    """Where things are below a project's root."""

    root: Path = ROOT

    @property
    def toc(self) -> Path:
        return self.root / "_toc.yml"

    @property
    def config(self) -> Path:
        return self.root / "_config.yml"

    @property
    def build(self) -> Path:
        return self.root / "_build"

    @property
    def source(self) -> Path:
        """What Jupyter Book reads: executed chapters beside the other pages."""
        return self.build / "executed"

    @property
    def html(self) -> Path:
        return self.build / "html"


def execute_chapters(
    layout: Layout,
    chapters: list[Chapter],
    chosen: list[Chapter],
    preset: str,
    limits: Limits,
    say=print,
) -> dict[str, Executed]:
    """Run `chosen` (or load them), load what is there of the rest. Keys: chapter names."""
    cache = Cache(layout.build / "cache")
    cache.folder.mkdir(parents=True, exist_ok=True)
    code, here, result = code_hash(layout.root), machine(), {}
    known = {c.name: c.parameters() for c in chosen}  # all are checked before the first one runs
    orders = []
    for place, chapter in enumerate(chosen, start=1):
        wanted = {"preset": preset, "static": True}
        parameters = {k: v for k, v in wanted.items() if k in known[chapter.name]}
        key = chapter_key(chapter, code, parameters, here)
        label = f"[{place}/{len(chosen)}] {chapter.name}"
        if hit := cache.get(chapter, key):
            say(f"{label}: unchanged, executed {hit.record['date']} in {hit.record['seconds']} s")
            result[chapter.name] = hit
        else:
            orders.append(Order(place, chapter, known[chapter.name], parameters, key, label))

    def start(order: Order) -> Execution:
        say(f"{order.label}: executing ...")
        partial = layout.build / "partial" / f"{order.chapter.name}.ipynb"
        return Execution(order.chapter, order.parameters, partial, limits, layout.root, say)

    def keep(order: Order, execution: Execution) -> None:
        record = {
            "preset": order.parameters.get("preset"),
            "code": code[:12],
            "device": here,
            "date": datetime.date.today().isoformat(),
            "seconds": round(execution.seconds, 1),
            "versions": versions(),
        }
        done = cache.put(order.chapter, order.key, execution.partial, record)
        result[order.chapter.name] = done
        say(f"{order.label}: done in {record['seconds']:.0f} s")

    execute_all(orders, start, keep)
    for chapter in chapters:
        if chapter.name not in result and (old := cache.newest(chapter)):
            result[chapter.name] = old
    return result


def run_note(done: Executed | None, code: str) -> str:
    """Markdown that says what a page was run with, or that it was not."""
    if done is None:
        return (
            ":::{admonition} Not executed\n:class: warning\n"
            "This build shows the source of the chapter without results. "
            "`make book` executes it.\n:::"
        )
    r = done.record
    preset = f"the `{r['preset']}` preset, " if r["preset"] else ""
    note = (
        f"Run with {preset}{r['device']}, {r['seconds']:.0f} s, {r['date']}. Code `{r['code']}`, "
        f"Python {r['versions']['python']}, torch {r['versions']['torch']}."
    )
    if r["code"] != code[:12]:
        note += f" **The code is now `{code[:12]}`: these results are older than it.**"
    return ":::{div} run-note\n" + note + "\n:::"


def assemble(layout: Layout, chapters: list[Chapter], executed: dict[str, Executed]) -> None:
    """Write Jupyter Book's source folder; files that did not change keep their time stamps."""
    written: set[Path] = set()

    def write(relative: Path, content: bytes) -> None:
        target = layout.source / relative
        written.add(target)
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    book = layout.root / "book"
    for page in sorted([*book.glob("*.md"), *book.glob("*.bib"), *book.glob("pictures/*")]):
        write(page.relative_to(layout.root), page.read_bytes())
    for style in sorted(book.glob("style/*.css")):
        write(Path("_static") / style.name, style.read_bytes())
    code, told = code_hash(layout.root), []
    for chapter in chapters:
        done = executed.get(chapter.name)
        notebook = nbformat.read(done.path if done else chapter.path, as_version=4)
        _for_publication(notebook)
        cell = nbformat.v4.new_markdown_cell(run_note(done, code), id="run-note")
        notebook.cells.insert(1, cell)
        text = nbformat.writes(notebook)
        write(chapter.path.relative_to(layout.root), text.encode())
        told += front_page(notebook)
    write(Path("book") / FRONT_PAGE, ("\n\n".join(told) or NOTHING_FOUND).encode())
    for path in sorted(layout.source.rglob("*")):
        if path.is_file() and path not in written:
            path.unlink()


def front_page(notebook: nbformat.NotebookNode) -> list[str]:
    """Markdown that cells tagged `front-page` displayed: the intro includes it, typed nowhere."""
    return [
        output.data["text/markdown"]
        for cell in notebook.cells
        if "front-page" in cell.metadata.get("tags", ())
        for output in cell.outputs
        if "text/markdown" in output.get("data", {})
    ]


def _for_publication(notebook: nbformat.NotebookNode) -> None:
    """Drop papermill's times and paths; fold the cell of injected parameters."""
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if "injected-parameters" in cell.metadata.get("tags", ()):
            cell.metadata["tags"] = [*cell.metadata["tags"], "hide-input"]
            cell.metadata["mystnb"] = {"code_prompt_show": "Parameters of this run"}


def build_html(layout: Layout, say=print) -> None:
    """Run Jupyter Book, warnings as errors, unless its input is what it was the last time."""
    manifest = layout.html / ".book.json"
    state = _state(layout)
    try:
        if json.loads(manifest.read_text())["state"] == state:
            say("Pages: unchanged")
            return
    except (OSError, ValueError, KeyError):
        pass
    manifest.unlink(missing_ok=True)
    say("Pages: building ...")
    start = time.monotonic()
    start_it = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", start_it, "build", str(layout.source)]
    command += ["--config", str(layout.config.resolve()), "--toc", str(layout.toc.resolve())]
    command += ["--path-output", str(layout.root), "-W", "-n", "--keep-going"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout.decode(errors="replace"))
    (layout.build / "html.log").write_text(log)
    if done.returncode != 0:
        _forget(layout)
        lines = [line for line in log.splitlines() if re.search(r"WARNING|ERROR|Error", line)]
        told = "\n".join(lines[:20] or log.splitlines()[-20:])
        raise BuildError(f"Jupyter Book did not accept the pages:\n{told}\nLog: _build/html.log")
    if outside := external_references(layout.html):
        _forget(layout)
        raise BuildError(f"pages ask the network for: {', '.join(outside[:5])}; they must not")
    if not (layout.html / "index.html").exists():
        raise BuildError("Jupyter Book wrote no index.html; see _build/html.log")
    manifest.write_text(json.dumps({"state": state}))
    say(f"Pages: done in {time.monotonic() - start:.0f} s")


def _forget(layout: Layout) -> None:
    """Remove the incremental state: a second build would not repeat the warnings of this one."""
    for folder in (layout.html, layout.build / ".doctrees"):
        shutil.rmtree(folder, ignore_errors=True)


def _state(layout: Layout) -> str:
    digest = hashlib.sha256(json.dumps(versions()).encode())
    inputs = [layout.config, layout.toc, Path(__file__), Path(__file__).with_name("vendored.py")]
    inputs += sorted(p for p in layout.source.rglob("*") if p.is_file())
    for path in inputs:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _References(HTMLParser):
    """Addresses that a browser loads by itself, unlike the links that a reader may click."""

    LOADED = {"src", "srcset", "poster", "data"}
    RELATIONS = {"stylesheet", "preload", "prefetch", "preconnect", "icon", "manifest"}

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        loaded = [given[k] for k in self.LOADED & given.keys() if given[k]]
        if tag == "link" and self.RELATIONS & set((given.get("rel") or "").split()):
            loaded.append(given.get("href") or "")
        self.found += [a for a in loaded if re.match(r"(https?:)?//", a.strip())]


def external_references(html: Path) -> list[str]:
    """Addresses outside the built pages that loading one of them would request."""
    found: set[str] = set()
    for page in html.rglob("*.html"):
        parser = _References()
        parser.feed(page.read_text(encoding="utf8", errors="replace"))
        found |= set(parser.found)
    outside = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s;]+)")
    for sheet in html.rglob("*.css"):
        found |= set(outside.findall(sheet.read_text(encoding="utf8", errors="replace")))
    return sorted(found)


def publish(layout: Layout, output: Path) -> None:
    """Copy the HTML to a folder of the reader's choice, never over anything but an older copy."""
    if output.exists() and any(output.iterdir()):
        if not (output / ".book.json").exists():
            raise BuildError(f"{output} is not empty and holds no built book; name another folder")
        shutil.rmtree(output)
    shutil.copytree(layout.html, output, dirs_exist_ok=True)


def build(
    layout: Layout,
    preset: str = "auto",
    chapters: str | None = None,
    execute_notebooks: bool = True,
    output: Path | None = None,
    limits: Limits | None = None,
    say=print,
) -> Path:
    """The whole build; returns the path of index.html. Raises BuildError."""
    start = time.monotonic()
    for needed in (layout.toc, layout.config):
        if not needed.exists():
            raise BuildError(f"{needed} is missing; run this in a complete clone")
    every = find_chapters(layout.toc)
    chosen = select(every, chapters)
    preset, why = pick_preset(preset)
    if execute_notebooks:
        say(f"Preset: {preset} ({why})")
    else:
        chosen = []
    limits = limits or Limits()
    executed = execute_chapters(layout, every, chosen, preset, limits, say)
    assemble(layout, every, executed)
    build_html(layout, say)
    index = layout.html / "index.html"
    if output is not None:
        publish(layout, output)
        index = output / "index.html"
    say(f"The book, after {time.monotonic() - start:.0f} s: {index}")
    return index


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m book.build",
        description="Execute the chapters, then build the HTML of the book into _build/html.",
    )
    parser.add_argument(
        "--preset",
        default="auto",
        help="cpu, mini, ...; auto (default) takes mini on a GPU that can, else cpu",
    )
    parser.add_argument("--chapters", help="only these, by number or name: 1,4 (default: all)")
    parser.add_argument(
        "--no-execute",
        action="store_true",
        help="use the results that are there; chapters without any show their source",
    )
    parser.add_argument("--output", type=Path, help="also copy the HTML to this folder")
    limits = Limits()
    parser.add_argument(
        "--cell-timeout", type=int, default=limits.cell, help="seconds per cell (%(default)s)"
    )
    parser.add_argument(
        "--chapter-timeout",
        type=int,
        default=limits.chapter,
        help="seconds per chapter (%(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, layout: Layout | None = None) -> int:
    """Exit status: 0 built, 1 a sentence on stderr says what is wrong, 130 interrupted."""
    options = parse_arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        build(
            layout or Layout(),
            preset=options.preset,
            chapters=options.chapters,
            execute_notebooks=not options.no_execute,
            output=options.output,
            limits=Limits(options.cell_timeout, options.chapter_timeout),
            say=lambda text: print(text, flush=True),
        )
    except BuildError as error:
        print(f"book.build: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("book.build: interrupted; run it again to go on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
