"""The command: what it refuses, and pages that load with no network in a real browser."""

import json

import pytest

from book import ROOT
from book.build import BuildError, build, external_references, main, publish
from book.execution import Limits
from tests.book.browser import CHROMIUM, Browser

FIGURES = """
from book.figures import caption, live, subplots
from book.widgets import explore

def view(run, power):
    figure, axis = subplots()
    axis.plot([1, 2, 3], [x**power for x in (1, 2, 3)])
    return caption(figure, f"{run}: $x^{power}$", live(), alt=f"{run} rises with power {power}")

explore(view, static=static, run=["low", "twin"], power=[1, 2, 3])
"""


@pytest.fixture
def with_book(project):
    """The project with the real book, kernels and gpt2 packages and the real style sheet."""
    (project.root / "gpt2" / "numbers_used.py").unlink()
    (project.root / "gpt2").rmdir()
    for name in ("gpt2", "kernels"):
        (project.root / name).symlink_to(ROOT / name)
    for path in (ROOT / "book").iterdir():
        if path.suffix in (".py", ".bib") or path.name in ("style", "static"):
            (project.root / "book" / path.name).symlink_to(path)
    project.config.write_text((ROOT / "_config.yml").read_text())
    return project


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_pages_work_in_a_browser_with_no_network(with_book, add_chapter):
    add_chapter("01-figures", FIGURES, "6 * 7")
    said = []
    index = build(with_book, preset="cpu", limits=Limits(120, 240), say=said.append)
    page = index.parent / "book" / "01-figures.html"
    assert "42" in page.read_text() and "code <code" not in page.read_text()
    with Browser() as browser:
        browser.command("Network.emulateNetworkConditions", offline=True, latency=0,
                        downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
        for url, formulas in ((page, 6), (index.parent / "book" / "intro.html", 1)):
            browser.open(url.as_uri())
            browser.wait_for(
                f"document.querySelectorAll('mjx-container svg').length >= {formulas}"
            )
            assert all(u.startswith("file:") for u in browser.requests())
            assert browser.problems() == []
        check_frames(browser, page.as_uri())
    again = build(with_book, preset="cpu", say=said.append)
    assert again == index and "Pages: unchanged" in said


def check_frames(browser: Browser, url: str) -> None:
    frames = "[...document.querySelectorAll('[data-frame]')]"
    shown = frames + ".filter(f => f.offsetHeight).map(f => f.dataset.frame).join()"
    browser.open(url, theme="dark", width=390, height=844)
    browser.wait_for("!document.querySelector('.bit-controls').hidden")
    assert browser.run(shown) == "0,0"
    browser.run("document.querySelector('input[type=range]').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.command("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight",
                        windowsVirtualKeyCode=39)  # fmt: skip
    assert browser.run(shown) == "0,1"
    assert browser.run("document.querySelector('output').textContent") == "2"
    look = "getComputedStyle(document.querySelector('.bit-image'))"
    assert browser.run(f"{look}.filter") == "invert(1) hue-rotate(180deg)"
    assert browser.run(f"{look}.backgroundColor") == "rgba(0, 0, 0, 0)"
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.open(url, scripts=False)
    assert browser.run(shown) == "0,0"
    assert browser.run("document.querySelector('.bit-controls').offsetHeight") == 0


@pytest.mark.slow
def test_a_warning_fails_the_build_and_fails_it_again(project):
    (project.root / "book" / "intro.md").write_text("# Intro\n\n[nowhere](missing.md)\n")
    for _ in range(2):
        with pytest.raises(BuildError, match="did not accept the pages:\n.*WARNING"):
            build(project, preset="cpu", say=lambda _: None)
    assert not (project.html / "index.html").exists()


def test_references_outside_are_found_and_links_are_not(tmp_path):
    (tmp_path / "page.html").write_text(
        '<a href="https://a.example/">link</a><link rel="canonical" href="https://b.example/">'
        '<script src="https://c.example/x.js"></script><img src="//d.example/y.png">'
        '<link rel="stylesheet" href="https://e.example/z.css"><img src="data:image/png;base64,">'
    )
    (tmp_path / "s.css").write_text(
        "@font-face {src: url('https://f.example/q.woff')} a {background: url(local.png)}"
    )
    found = [a.split("//")[1][0] for a in external_references(tmp_path)]
    assert sorted(found) == ["c", "d", "e", "f"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--preset", "minni"], "unknown preset 'minni'; did you mean 'mini'"),
        (["--chapters", "9"], "unknown chapter '9'; did you mean '01-one'"),
        (["--no-execute", "--chapters", "one-more"], "unknown chapter 'one-more'"),
    ],
)
def test_bad_arguments_end_with_one_sentence(project, add_chapter, capsys, arguments, sentence):
    add_chapter("01-one", "1")
    assert main(arguments, project) == 1
    complaint = capsys.readouterr().err
    assert sentence in complaint and "Traceback" not in complaint


def test_an_incomplete_clone_is_named(project, capsys):
    project.config.unlink()
    assert main([], project) == 1
    assert "_config.yml is missing" in capsys.readouterr().err


def test_output_never_overwrites_other_files(project, tmp_path):
    project.html.mkdir(parents=True)
    (project.html / ".book.json").write_text("{}")
    (project.html / "index.html").write_text("new")
    target = tmp_path / "site"
    publish(project, target)
    (project.html / "index.html").write_text("newer")
    publish(project, target)
    assert (target / "index.html").read_text() == "newer"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(BuildError, match="is not empty and holds no built book"):
        publish(project, tmp_path / "other")


def test_run_note_says_what_a_page_was_run_with_and_when_it_is_old(project, add_chapter):
    from book.build import assemble, run_note
    from book.chapters import code_hash, find_chapters
    from book.execution import Executed

    add_chapter("01-one", "1")
    chapter = find_chapters(project.toc)[0]
    code = code_hash(project.root)
    record = {"preset": "cpu", "code": code[:12], "device": "2-core CPU", "date": "2026-01-02"}
    record |= {"seconds": 3.2, "versions": {"python": "3.11", "torch": "2"}}
    done = Executed(chapter, chapter.path, record, cached=True)
    assert f"Code `{code[:12]}`" in run_note(done, code)
    assert "older than it" in run_note(done, "f" * 64)
    assemble(project, [chapter], {})
    cells = json.loads((project.source / "book" / "01-one.ipynb").read_text())["cells"]
    assert "Not executed" in "".join(cells[1]["source"])


def test_the_front_page_shows_what_tagged_cells_displayed(project, add_chapter):
    from nbformat import read, write
    from nbformat.v4 import new_output

    from book.build import FRONT_PAGE, NOTHING_FOUND, assemble
    from book.chapters import find_chapters

    add_chapter("01-x", "1", "2")
    (chapter,) = find_chapters(project.toc)
    included = project.source / "book" / FRONT_PAGE
    assemble(project, [chapter], {})
    assert included.read_text() == NOTHING_FOUND
    notebook = read(chapter.path, as_version=4)
    for cell, words in zip(notebook.cells[-2:], ("**found**", "not this")):
        cell.outputs = [new_output("display_data", {"text/markdown": words})]
    notebook.cells[-2].metadata["tags"] = ["front-page"]
    write(notebook, chapter.path)
    assemble(project, [chapter], {})
    assert included.read_text() == "**found**"
