"""The pages that are not notebooks say what the code says."""

import re

import pytest
import yaml

from book import ROOT
from gpt2.config import PRESETS

INTRO = (ROOT / "book" / "intro.md").read_text()


@pytest.mark.parametrize("name", PRESETS)
def test_the_preset_table_gives_the_presets_as_they_are(name):
    row = next(line for line in INTRO.splitlines() if line.startswith(f"| `{name}`"))
    config = PRESETS[name]
    assert f"{config.n_layer} layers, {config.n_head} heads" in row
    assert f"{config.n_embd:,} wide, context {config.block_size:,}" in row


def test_the_preset_table_lists_no_other_preset():
    assert re.findall(r"^\| `(\w+)` \|", INTRO, re.MULTILINE) == list(PRESETS)


def test_every_page_of_the_contents_exists_and_no_notebook_is_left_out():
    text = (ROOT / "_toc.yml").read_text()
    pages = re.findall(r"(?:root|file): (\S+)", text)
    for page in pages:
        assert (ROOT / f"{page}.md").exists() or (ROOT / f"{page}.ipynb").exists(), page
    notebooks = {f"book/{p.stem}" for p in (ROOT / "book").glob("*.ipynb")}
    assert notebooks <= set(pages)


def test_title_and_paper_are_the_same_everywhere():
    title = "Bit by Bit: why low-precision transformer training fails"
    assert yaml.safe_load((ROOT / "_config.yml").read_text())["title"] == title
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["title"] == title
    assert INTRO.startswith(f"# {title}\n")
    assert (ROOT / "README.md").read_text().startswith(f"# {title}\n")


def test_terms_used_on_the_pages_are_defined():
    defined = set()
    for line in re.findall(r"^(\w[^\n|#{}]*)\n  \w", glossary(), re.MULTILINE):
        defined |= {line.strip()}
    used = set()
    for page in (ROOT / "book").glob("*.md"):
        used |= set(re.findall(r"\{term\}`([^`<]+)`", page.read_text()))
    assert used and used <= defined


def glossary() -> str:
    text = (ROOT / "book" / "glossary.md").read_text()
    return text[text.index(":::{glossary}") :]


def test_every_cited_key_is_in_the_bibliography():
    keys = set(
        re.findall(r"^@\w+\{([^,]+),", (ROOT / "book" / "references.bib").read_text(), re.M)
    )
    for page in [*(ROOT / "book").glob("*.md"), *(ROOT / "book").glob("*.ipynb")]:
        for cited in re.findall(r"\{cite:\w+\}`([^`]+)`", page.read_text()):
            assert {k.strip() for k in cited.split(",")} <= keys, page.name
