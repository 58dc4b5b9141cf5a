"""A small project of the book's shape in a temporary folder; a recipe of toys."""

import json
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book import evidence
from book.build import Layout
from book.regimes import RECIPES, Regime
from gpt2.outcomes import Onset, Outcome
from gpt2.runs import RunStore

PARAMETERS = 'preset: str = "cpu"  # name of a preset\nstatic: bool = False  # frames, not widgets'


def write_chapter(root: Path, name: str, *sources: str, parameters: str | None = PARAMETERS):
    """A chapter with a title, a parameters cell (unless None) and one code cell per source."""
    cells = [new_markdown_cell(f"# Chapter {name}")]
    if parameters is not None:
        cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [new_code_cell(source) for source in sources]
    notebook = new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    nbformat.write(notebook, root / "book" / f"{name}.ipynb")


@pytest.fixture
def project(tmp_path) -> Layout:
    """Layout of a project with an intro page, one package and no chapter yet."""
    for package in ("book", "gpt2", "samplepackage"):
        (tmp_path / package).mkdir()
    (tmp_path / "gpt2" / "numbers_used.py").write_text("VALUE = 1\n")
    (tmp_path / "book" / "intro.md").write_text("# Intro\n\nFormula: $a^2 = b$.\n")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/intro\n")
    (tmp_path / "_config.yml").write_text(
        "title: Sample\nonly_build_toc_files: true\nexecute: {execute_notebooks: 'off'}\n"
        "sphinx:\n  config:\n    nb_ipywidgets_js: {}\n"
    )
    return Layout(tmp_path)


@pytest.fixture
def add_chapter(project):
    """Write a chapter and enter it in the table of contents."""

    def add(name: str, *sources: str, parameters: str | None = PARAMETERS):
        write_chapter(project.root, name, *sources, parameters=parameters)
        toc = project.toc.read_text()
        entry = f"- file: book/{name}\n"
        if entry not in toc:
            toc += "" if "chapters:" in toc else "chapters:\n"
            project.toc.write_text(toc + entry)

    return add


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A recipe with an archived onset at step 20; a function that runs one of its experiments."""
    folder = tmp_path_factory.mktemp("onset")
    (folder / "text").mkdir()
    for i in range(24):
        words = " ".join(str((i + j * (1 + i % 5)) % 97) for j in range(300))
        (folder / "text" / f"document{i:02d}.txt").write_text(words + "\n")
    shape = dict(n_embd=16, block_size=16, batch_size=8, held_out_fraction=0.2, warmup_steps=5)
    shape |= dict(corpus=f"files:{folder}/text/*.txt", eval_interval=200, eval_batches=2)
    how = Regime("exact,output_bits=2", 60, changes=tuple((shape | {"probe_interval": 5}).items()))
    outcome = Outcome("onset", last_step=39, onset=Onset(20, "tie_rate", 1, 0, 0.4, 0.1)).to_dict()
    row = outcome | {"recipe": "toy", "arm": "low", "seed": 0, "run": "x", "forked_at": None}
    row |= {"outcome": outcome, "onset_step": 20, "steps": 39, "curves": {}}
    source = {"date": "2026-11-30", "preset": "cpu", "machine": "m", "code": "c"}
    path = folder / "results" / "recipes" / "m.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"provenance": source, "rows": [row]}))

    def run(name, *more):
        where = ["--store", folder / "runs", "--data", folder / "data"]
        where += ["--results", folder / "results"]
        asked = [name, "--recipe", "toy", "--seeds", "0", *map(str, where), *more]
        code = evidence.main(asked)
        kept = evidence.archives(f"{name}-toy", folder / "results")
        return code, kept[-1] if kept else None

    patch = pytest.MonkeyPatch()
    patch.setitem(RECIPES, "toy", how)
    yield SimpleNamespace(run=run, folder=folder, store=RunStore(folder / "runs"))
    patch.undo()
