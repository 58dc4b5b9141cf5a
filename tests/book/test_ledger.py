"""The claims file says what a fresh evaluation finds, and says what is wrong with it in a line."""

import pkgutil
import re
from dataclasses import replace

import pytest
import yaml

from book import ROOT
from book.evidence import parser
from book.experiments import EXPERIMENTS
from book.gpu_experiments import BUILDERS
from book.ledger import CLAIMS, ClaimError, Evidence, evaluate, page, read_claims, stale
from book.ledger.__main__ import main
from book.ledger.claims import GIVEN, WRITTEN, write_claims
from book.ledger.findings import NOT_TESTED, RULES, VERDICTS, Effect, Finding
from book.regimes import REGIMES, get_recipe

REAL = read_claims()


@pytest.fixture(scope="module")
def findings():
    return evaluate(REAL)


def test_every_claim_has_what_the_ledger_promises():
    entries = yaml.safe_load(CLAIMS.read_text())
    assert len(entries) >= 25
    for entry in entries:
        assert set(GIVEN + WRITTEN) <= set(entry), entry["id"]
        assert entry["verdict"] in VERDICTS and entry["effect"]
        page_of = ROOT / "book" / f"{entry['chapter']}.ipynb"
        assert page_of.exists(), f"{entry['id']} links to a page that is not there"


def test_the_file_says_what_a_fresh_evaluation_finds(findings):
    assert not stale(REAL, findings), "run python -m book.ledger --write"


def test_at_most_five_claims_are_untested_and_each_names_its_run(findings):
    untested = [c for c in REAL if findings[c.id].verdict == NOT_TESTED]
    assert len(untested) <= 5
    for claim in untested:
        assert claim.run_command in findings[claim.id].effect
        runs_what_exists(claim.run_command)


@pytest.mark.parametrize("claim", REAL, ids=lambda c: c.id)
def test_every_command_runs_something_that_exists(claim):
    if RULES[claim.rule].reads:
        runs_what_exists(claim.run_command)


def runs_what_exists(command: str) -> None:
    words = command.split()
    if words[0] == "papermill":
        assert (ROOT / words[1]).exists()
        return
    if words[0] == "torchrun":
        words = ["python", *words[words.index("-m") :]]
    assert words[:2] == ["python", "-m"]
    assert pkgutil.resolve_name(words[2])
    if words[2] == "book.evidence":
        asked = parser().parse_args(words[3:])
        known = EXPERIMENTS if asked.recipe is None else BUILDERS
        assert set(asked.names) <= set(known) and asked.names
        assert asked.recipe in (None, *REGIMES) or get_recipe(asked.recipe)


def test_claims_about_bf16_are_judged_by_bf16_alone():
    for claim in REAL:
        if re.search(r"\bbf16 itself\b", claim.claim):
            assert claim.parameters["bits"] == 7, claim.id


def test_effects_of_runs_say_the_regime(findings):
    """2 fraction bits must never be taken for bf16."""
    for claim in REAL:
        found = findings[claim.id]
        if claim.rule in ("prevents", "still_fails", "stays_finite") and found.runs:
            for line in found.lines:
                told = re.match(r"bf16 cut to \d|Ō and O cut to \d|bf16, (recipe|mini)", line)
                assert told, f"{claim.id}: {line}"


# -- what is wrong with a file --------------------------------------------------------------------

GOOD = {
    "id": "a",
    "claim": "It is so.",
    "source": "section 1",
    "chapter": "01-the-failure",
    "experiment": ["failure"],
    "rule": {"prevents": {"arms": "fp32"}},
}


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


WRONG = [
    ([GOOD, GOOD], "two claims have the id 'a'"),
    ([without("source")], "claim 'a' has no source"),
    ([without("id")], "claim 1 of the file has no id"),
    ([GOOD | {"verdikt": "supported"}], "unknown key 'verdikt', did you mean 'verdict'"),
    ([GOOD | {"verdict": "suported"}], "unknown verdict 'suported', did you mean 'supported'"),
    ([GOOD | {"rule": "prevents"}], "rule is one name with its parameters"),
    ([GOOD | {"rule": {"prevent": {"arms": "x"}}}], "unknown rule 'prevent', did you mean"),
    ([GOOD | {"rule": {"prevents": {"arm": "x"}}}], "no parameter 'arm', did you mean 'arms'"),
    ([GOOD | {"rule": {"prevents": None}}], "needs the parameter 'arms'"),
    ([GOOD | {"experiment": "failure"}], "experiment is a list"),
    ([GOOD | {"experiment": ["failur"]}], "no experiment of book.evidence, did you mean"),
    (
        [GOOD | {"experiment": ["kernels.nothing"], "rule": {"identity": {}}}],
        "no function that computes it",
    ),
    ({"a": 1}, "holds no list of claims"),
]


@pytest.mark.parametrize("entries, sentence", WRONG, ids=[s for _, s in WRONG])
def test_a_wrong_file_gets_one_sentence(tmp_path, capsys, entries, sentence):
    path = tmp_path / "claims.yml"
    path.write_text(yaml.safe_dump(entries))
    with pytest.raises(ClaimError, match=re.escape(sentence)):
        read_claims(path)
    assert main(["--claims", str(path)]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: ") and "\n" not in told and sentence in told


def test_what_is_no_yaml_is_named_with_its_line(tmp_path):
    path = tmp_path / "claims.yml"
    path.write_text("- id: a\n  claim: [\n")
    with pytest.raises(ClaimError, match="claims.yml is not YAML at line"):
        read_claims(path)
    with pytest.raises(ClaimError, match="does not exist"):
        read_claims(tmp_path / "none.yml")


def test_a_rule_that_cannot_judge_names_its_claim(tmp_path):
    path = tmp_path / "claims.yml"
    odd = GOOD | {"experiment": ["rounding"], "command": "python -m book.rounding_evidence"}
    odd["rule"] = {"carries_error": {"version": "as trained", "part": "nothing"}}
    path.write_text(yaml.safe_dump([odd]))
    with pytest.raises(ClaimError, match="claim 'a': rule carries_error cannot judge"):
        evaluate(read_claims(path))


# -- writing --------------------------------------------------------------------------------------


def test_writing_and_reading_keep_every_claim(tmp_path, findings):
    path = tmp_path / "claims.yml"
    write_claims(REAL, findings, path)
    assert path.read_text() == CLAIMS.read_text()


def test_check_finds_a_verdict_that_was_typed(tmp_path, capsys):
    path = tmp_path / "claims.yml"
    path.write_text(yaml.safe_dump([GOOD | {"verdict": "partly", "effect": "x", "runs": 1}]))
    asked = ["--claims", str(path)]
    assert main([*asked, "--check"]) == 1
    assert "stale: a;" in capsys.readouterr().err
    assert main([*asked, "--write"]) == 0
    assert main([*asked, "--check"]) == 0


def test_without_archives_nothing_is_claimed(tmp_path):
    found = evaluate([c for c in REAL if RULES[c.rule].reads], Evidence(tmp_path))
    assert {f.verdict for f in found.values()} == {NOT_TESTED}


# -- the page -------------------------------------------------------------------------------------

SHORT = [c for c in REAL if c.id in ("failure", "two-values", "failure-bf16")]
FOUND = {
    "failure": Finding(
        "supported", (Effect("a <b>", "here"), Effect("c", "here")), 5, (0, 1), ("x: m",), 0.5
    ),
    "two-values": Finding("not supported here", (Effect("no"),)),
    "failure-bf16": Finding(NOT_TESTED, (Effect("missing"),)),
}


def test_the_table_shows_what_was_chosen_and_escapes_it():
    every = page.table(SHORT, FOUND)
    assert every.count("<tr>") == 4 and "3 claims." in every
    assert "here: a &lt;b&gt;; c" in every and "5 runs, seeds 0, 1" in every
    assert 'href="01-the-failure.html">chapter 1<' in every
    one = page.table(SHORT, FOUND, "supported", "ipynb")
    assert one.count("<tr>") == 2 and "1 claim." in one and "01-the-failure.ipynb" in one


def test_the_summary_counts_and_ranks():
    text = page.summary(SHORT, FOUND).data
    assert "Of 3 claims" in text and "**1** supported" in text and "{doc}`ledger`" in text
    assert text.index("training fails") < text.index("These do not hold, by arithmetic")
    stronger = FOUND | {"failure-bf16": Finding("supported", (Effect(""),), 5, strength=0.9)}
    ranked = page.ranked(SHORT, stronger, "supported", runs=True)
    assert [c.id for c in ranked] == ["failure-bf16", "failure"]
    seen = Effect("failed in 5 of 5", "bf16, recipe r", points="as claimed")
    observed = FOUND | {"failure-bf16": Finding("observed", (seen,), 2)}
    assert "In bf16 itself, on a GPU" not in text
    assert "does not. *(recipe r: as claimed)*" in page.summary(SHORT, observed).data
    opened = [replace(c, source="open question") for c in SHORT]
    assert page.ranked(opened, stronger, "supported", runs=True) == []


def test_counts_rules_and_missing_come_from_the_claims():
    assert "| not supported here | 1 |" in page.counts(FOUND).data
    assert page.rules(REAL).data.count("\n") == 1 + len({c.rule for c in REAL})
    assert "python -m book.recipes" in page.missing(SHORT, FOUND).data
    assert "Every claim was tested." in page.missing(SHORT[:0], {}).data


def test_every_verdict_can_be_chosen():
    assert list(page.choices().values()) == [None, *VERDICTS]
