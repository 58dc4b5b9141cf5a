"""A small project of the book's shape in a temporary folder."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.build import Layout

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
