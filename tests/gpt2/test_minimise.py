"""The search on oracles whose answer is known; units and texts of attention; one real search."""

import itertools
import json
import random

import pytest
from trainer_helpers import tiny, write_corpus

from gpt2 import minimise as program
from gpt2.data import load_corpus
from gpt2.ddmin import Trace, cut, load_trace, minimise
from gpt2.minimise import Unit, describe, minimise_run, units_of, upcast
from gpt2.runs import RunStore
from gpt2.train import train
from kernels.numerics import ScopedNumerics, parse_numerics


class Oracle:
    """Stable when the chosen units hold all of any one of the `causes`; notes what it is asked."""

    def __init__(self, *causes):
        self.causes, self.calls = [set(c) for c in causes], []

    def __call__(self, units):
        self.calls.append(units)
        return any(cause <= set(units) for cause in self.causes)


NAMES = [f"u{i}" for i in range(24)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 24])
@pytest.mark.parametrize("seed", range(4))
def test_the_only_cause_is_found_exactly(size, seed):
    cause = random.Random(seed).sample(NAMES, size)
    oracle = Oracle(cause)
    trace = minimise(NAMES, oracle)
    assert trace.state == "minimal" and set(trace.result) == set(cause)
    assert len(set(oracle.calls)) == len(oracle.calls)  # nothing is asked twice


@pytest.mark.parametrize("seed", range(5))
def test_with_several_causes_the_result_is_1_minimal(seed):
    rng = random.Random(seed)
    oracle = Oracle(*(rng.sample(NAMES, rng.randint(1, 6)) for _ in range(3)))
    result = set(minimise(NAMES, oracle).result)
    assert any(cause <= result for cause in oracle.causes)
    for unit in result:
        assert not any(cause <= result - {unit} for cause in oracle.causes)


def test_an_oracle_that_is_not_monotone_still_ends_1_minimal():
    def odd(units):
        return len(units) in (24, 12, 7, 5)

    trace = minimise(NAMES, odd)
    answers = {frozenset(q.units): q.answer for q in trace.questions}
    left_out = itertools.combinations(trace.result, len(trace.result) - 1)
    assert trace.state == "minimal" and all(answers[frozenset(s)] is False for s in left_out)


def test_one_cause_among_many_takes_few_questions():
    oracle = Oracle(["u17"])
    minimise(NAMES, oracle)
    assert len(oracle.calls) <= 2 + 2 * 5  # all, none, then halving


def test_unhelpful_and_needless_sets_are_told_apart():
    assert minimise(NAMES, Oracle({"else"})).state == "unstable"
    trace = minimise(NAMES, Oracle(set()))
    assert trace.state == "needless" and trace.result == () and len(trace.questions) == 2


def test_a_spent_budget_gives_the_smallest_stable_set_so_far_and_resumes_to_the_same_end():
    cause = ["u3", "u11", "u20"]
    whole = minimise(NAMES, Oracle(cause))
    oracle, trace = Oracle(cause), None
    for _ in range(100):
        trace = minimise(NAMES, oracle, budget=2, trace=trace)
        trace = Trace.from_dict(json.loads(json.dumps(trace.to_dict(), allow_nan=False)))
        if trace.state != "budget":
            break
        assert trace.result is None or set(cause) <= set(trace.result)
    assert trace.to_dict() == whole.to_dict()
    assert len(oracle.calls) == len(whole.questions)


def test_an_interrupted_search_keeps_the_answers_it_had():
    saved = []

    class Stop(Exception):
        pass

    def interrupted(units):
        if len(saved) == 4:
            raise Stop
        return Oracle(["u5"])(units)

    with pytest.raises(Stop):
        minimise(NAMES, interrupted, on_progress=lambda t: saved.append(t.to_dict()))
    oracle = Oracle(["u5"])
    trace = minimise(NAMES, oracle, trace=Trace.from_dict(saved[-1]))
    assert trace.result == ("u5",) and len(oracle.calls) == len(trace.questions) - 4


def test_the_tree_holds_every_question_once_below_the_set_it_was_cut_from():
    trace = minimise(NAMES, lambda units: ("u5" in units and "u18" in units, {"loss": 1.5}))

    def walk(node):
        yield node
        for child in node["children"]:
            assert set(child["units"]) <= set(node["units"])
            yield from walk(child)

    nodes = list(walk(trace.tree()))
    assert sorted(n["index"] for n in nodes) == list(range(len(trace.questions)))
    assert nodes[0]["role"] == "all" and nodes[1]["role"] == "none"
    assert all(n["detail"] == {"loss": 1.5} for n in nodes)
    assert trace.text().count("\n") == len(nodes) - 1
    assert "1-minimal" in describe(trace) and "u5, u18" in describe(trace)


def test_bad_units_and_foreign_traces_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one unit"):
        minimise([], Oracle())
    with pytest.raises(ValueError, match="each of them once"):
        minimise(["a", "a"], Oracle())
    with pytest.raises(ValueError, match="other units"):
        minimise(["a"], Oracle(), trace=Trace(("b",)))
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(ValueError, match="no trace"):
        load_trace(tmp_path / "trace.json")


def test_cuts_keep_neighbours_together_and_differ_in_size_by_at_most_one():
    assert cut(tuple("abcdefg"), 3) == [("a", "b", "c"), ("d", "e"), ("f", "g")]


# -- attention ------------------------------------------------------------------------------------


def test_units_are_those_that_round_ordered_by_layer_head_site():
    units = [str(u) for u in units_of("paper; L1H0 -> exact", 2, 2, sites=("unnormalized",))]
    assert units == ["unnormalized@L0H0", "unnormalized@L0H1", "unnormalized@L1H1"]
    coarse = [str(u) for u in units_of("exact,output_bits=2", 2, 2, by="site")]
    assert coarse == ["unnormalized@all", "output@all", "delta_output@all"]
    assert [str(u) for u in units_of("flash", 2, 2, sites=("output",), by="layer")] == [
        "output@L0",
        "output@L1",
    ]
    assert [Unit.parse(u) for u in units] == units_of(
        "paper; L1H0 -> exact", 2, 2, sites=("unnormalized",)
    )


@pytest.mark.parametrize(
    "attention, sites, sentence",
    [
        ("sdpa", (), "no rounding sites"),
        ("flash", ("scores",), "no head of 'flash' rounds scores"),
        ("flash", ("score",), "did you mean 'scores'"),
    ],
)
def test_units_that_cannot_be_are_refused(attention, sites, sentence):
    with pytest.raises(ValueError, match=sentence):
        units_of(attention, 2, 2, sites=sites)


def test_upcast_changes_those_sites_of_those_heads_and_nothing_else():
    base = "paper; L1H0 -> flash"
    units = [Unit.parse(u) for u in ("unnormalized@L0H1", "output@L1", "scores@L0H1")]
    scoped = ScopedNumerics.parse(upcast(base, units, 3, 2))
    paper, flash = parse_numerics("paper"), parse_numerics("flash")
    assert scoped.for_layer(0, 2) == (paper, paper.at(unnormalized="fp32", scores="fp32"))
    assert scoped.for_layer(1, 2) == (flash.at(output="fp32"), paper.at(output="fp32"))
    assert scoped.for_layer(2, 2) == (paper, paper)
    assert upcast(base, [], 3, 2) == base


def test_a_search_over_forks_finds_the_one_head_that_makes_the_run_nonfinite(tmp_path, capsys):
    """P_bar times e^12 overflows in e5m2 (largest 57,344), in one head of four; all else runs."""
    sick = "exact,probabilities=e5m2,softmax=shifted,shift=-12"
    config = tiny(
        write_corpus(tmp_path / "text"),
        attention=f"exact,probabilities=e5m2; L1H0 -> {sick}",
        max_steps=6,
        probe_interval=10,
    )
    options = dict(progress=False, cache_dir=tmp_path / "data")
    options["corpus"] = load_corpus(config, tmp_path / "data", progress=False)
    run = train(config, store=RunStore(tmp_path / "runs"), **options)
    assert run.status == "nonfinite"
    first = minimise_run(run, 0, 4, sites=("probabilities",), budget=3, **options)
    assert first.state == "budget" and len(first.questions) == 3
    trace = minimise_run(run, 0, 4, sites=("probabilities",), **options)
    assert trace.state == "minimal" and trace.result == ("probabilities@L1H0",)
    kinds = {q.answer: q.detail["outcome"]["kind"] for q in trace.questions}
    assert kinds[False] == "nonfinite" and kinds[True] != "nonfinite"
    saved = load_trace(next((run.path / "minimise").glob("*.json")))
    assert saved.to_dict() == trace.to_dict()
    arguments = [str(run.path), "--at", "0", "--until", "4", "--sites", "probabilities"]
    arguments += ["--data", str(options["cache_dir"])]
    assert program.main([*arguments, "--by", "layer"]) == 0
    out = capsys.readouterr().out
    assert "1-minimal after 4 questions, one run each: probabilities@L1" in out
    assert "- 2. none: nothing" in out and "nonfinite at step 0" in out
    assert program.main([*arguments, "--at", "99"]) == 2
    assert "outside the run" in capsys.readouterr().err
