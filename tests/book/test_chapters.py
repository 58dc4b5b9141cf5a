"""What the build refuses, and how it says so; the shape of the real chapters."""

import re

import nbformat
import pytest

from book import ROOT
from book.chapters import BuildError, Chapter, find_chapters, pick_preset, select

REAL = sorted((ROOT / "book").glob("*.ipynb"))


def test_chapters_come_from_the_table_of_contents_in_order(project, add_chapter):
    add_chapter("02-later", "2")
    add_chapter("01-first", "1")
    add_chapter("extra", "3")
    chapters = find_chapters(project.toc)
    assert [c.number for c in chapters] == [2, 1, 3]
    assert [c.name for c in select(chapters, "1, extra")] == ["01-first", "extra"]
    assert [c.name for c in select(chapters, None)] == ["02-later", "01-first", "extra"]


def test_a_page_without_a_number_takes_none_of_the_others(project, add_chapter):
    for name in ("01-first", "numerics", "02-second"):
        add_chapter(name, "1")
    chapters = find_chapters(project.toc)
    assert [c.number for c in chapters] == [1, 3, 2]
    assert [c.name for c in select(chapters, "2")] == ["02-second"]


@pytest.mark.parametrize(
    "asked, hint", [("7", "04-kernels"), ("kernles", "04-kernels"), ("01-falure", "01-failure")]
)
def test_unknown_chapters_are_refused_with_the_nearest(project, add_chapter, asked, hint):
    add_chapter("01-failure", "1")
    add_chapter("04-kernels", "1")
    with pytest.raises(BuildError, match=f"unknown chapter '{asked}'; did you mean '{hint}'"):
        select(find_chapters(project.toc), asked)


def test_unknown_presets_are_refused_with_the_nearest():
    with pytest.raises(BuildError, match="unknown preset 'cup'; did you mean 'cpu'"):
        pick_preset("cup")
    assert pick_preset("mini") == ("mini", "asked for")


def test_auto_takes_cpu_without_a_capable_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_preset("auto")[0] == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    preset, why = pick_preset("auto")
    assert preset == "cpu" and "7.5" in why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert pick_preset("auto")[0] == "mini"


def test_missing_and_corrupt_notebooks_are_named(project, add_chapter):
    add_chapter("01-x", "1")
    chapter = find_chapters(project.toc)[0]
    chapter.path.write_text("{")
    with pytest.raises(BuildError, match="01-x.ipynb is not a readable notebook"):
        chapter.read()
    chapter.path.unlink()
    with pytest.raises(BuildError, match="names the chapter 01-x"):
        chapter.read()


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_real_chapters_have_the_shape_that_papermill_and_git_need(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    assert len(tagged) == 1
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.kernelspec.language == "python"  # papermill asks for it
    assert re.match(r"(\(.+\)=\n)?# ", notebook.cells[0].source), "a title comes first"
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert not any(c.outputs or c.execution_count for c in code)
    assert not any("papermill" in c.metadata for c in notebook.cells)
    lengths = sorted(len(c.source.splitlines()) for c in code)
    assert lengths[len(lengths) // 2] <= 8 and lengths[-1] <= 40
    for line in tagged[0].source.splitlines():
        if line and not line.startswith(("#", "import", "from")):
            assert ": " in line.split("=")[0] and "#" in line, f"type and comment: {line}"
    assert path in [c.path for c in find_chapters(ROOT / "_toc.yml")], "not in _toc.yml"


@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_real_chapters_say_by_their_parameters_whether_they_train_and_look_at_runs(path):
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(c.source for c in cells if c.cell_type == "code")
    known = Chapter(1, path).parameters()
    if re.search(r"\b(run_experiment|train_many|train_together)\(", code):
        assert "workers" in known, "book.schedule would execute it beside another that trains"
    if re.search(r"\b(RUNS|RunStore|captured_run)\b", code):
        assert "preset" in known, "book.schedule would execute it before those that train"
