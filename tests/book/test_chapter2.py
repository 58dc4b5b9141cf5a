"""Chapter 2: words, comparisons, the search over layers, and figures, from made-up records."""

from types import SimpleNamespace

import numpy as np
import pytest

from book import chapter2, evidence
from book import isolation_figures as pictures
from book import isolation_findings as findings
from book.evidence import Archive
from book.experiments import isolation
from gpt2.config import make_config
from gpt2.ddmin import Trace, minimise
from gpt2.outcomes import Outcome

LIVE = isolation("cpu")


def row(name, seed=0, failed=None, experiment=LIVE):
    """A record of an arm that fails at a step, or lives to 3,000."""
    steps = np.arange(500, (failed or 3_000) + 1, 50)
    loss = np.linspace(2.2, 3.4 if failed else 1.8, len(steps))
    grown = np.full((len(steps), 2, 2), 6.0)
    grown[:, 1, 0] = np.linspace(6, 40 if failed else 8, len(steps))
    curve = {"step": steps.tolist(), "value": loss.tolist()}
    heads = {"spectral_norm_q": {"step": steps.tolist(), "value": grown.tolist()}}
    return {
        "arm": name,
        "label": experiment.arm(name).label,
        "seed": seed,
        "kind": "diverged" if failed else "healthy",
        "diverged_step": failed,
        "diverged_from": failed - 100 if failed else None,
        "nonfinite_step": None,
        "onset_step": None,
        "steps": int(steps[-1]),
        "held_out_loss": float(loss[-1]),
        "best_held_out_loss": float(loss.min()),
        "worst_norm": float(grown.max()),
        "worst_tie_rate": 0.0,
        "curves": {"train_loss": curve},
        "heads": heads if name == "low" else {},
    }


FAILS = {"low": 2_000, "same": 2_000, "tile_16": 2_100, "only_L1": 2_400, "site_output": 1_900}


def table(seeds=(0, 1, 2, 3, 4), arms=None):
    return [row(a, s, FAILS.get(a)) for s in seeds for a in arms or LIVE.arm_names]


def words(figure):
    return [t.get_text() for axis in figure.axes for t in axis.texts]


def test_the_matrix_says_per_seed_what_happened_and_averages_only_what_lived():
    rows = table(seeds=(0, 1), arms=["low", "exact", "only_L1"])
    rows[5] = row("only_L1", 1)  # one of two seeds lives
    told = words(pictures.intervention_matrix(rows))
    assert told[:5] == ["2,000", "2,000", "-", "40.0", "0.00"]
    assert told[5:10] == ["healthy", "healthy", "1.800", "8.0", "0.00"]
    assert told[10:13] == ["2,400", "healthy", "1.800"]


def test_small_multiples_show_every_fork_over_the_failing_run():
    figure = pictures.loss_multiples(table(seeds=(0,), arms=["low", "same", "exact"]))
    shown = [a for a in figure.axes if a.get_visible()]
    assert len(shown) == 2 and [a.get_title(loc="left") for a in shown] == [
        "no change",
        "everything in fp32",
    ]
    markers = [line.get_marker() for line in shown[0].lines]
    assert "x" in markers and "x" not in [line.get_marker() for line in shown[1].lines]


def test_the_worst_layer_is_drawn_with_all_its_heads_and_the_grid_at_the_nearest_probe():
    failing = row("low", failed=2_000)
    assert pictures.worst_layer(failing) == 1
    assert len(pictures.norms_of_layer(failing, 1).axes[0].lines) == 2
    grid = pictures.head_grid(failing, "spectral_norm_q", 1_999)
    assert words(grid)[:4] == ["6", "6", "40", "6"] and "step 1,999" in grid.axes[0].get_title(
        loc="left"
    )
    with pytest.raises(ValueError, match="keeps no 'tie_rate' per head"):
        pictures.head_grid(failing, "tie_rate", 0)


def test_layers_of_runs_of_different_length_are_compared_at_the_same_steps():
    short, long = row("low", failed=1_000), row("low", failed=2_000)
    steps, means = pictures.layer_means([short, long], "spectral_norm_q", before=800)
    assert steps.tolist() == list(range(500, 801, 50)) and means.shape == (2, len(steps), 2)
    assert means[0, -1, 1] == pytest.approx((6 + 6 + 34 * 0.6) / 2)
    assert means[1, -1, 1] == pytest.approx((6 + 6 + 34 * 0.2) / 2)
    with pytest.raises(ValueError, match="no 'spectral_norm_q' was measured up to step 10"):
        pictures.layer_means([short], "spectral_norm_q", before=10)
    told = chapter2.layer_findings([short, long], ["spectral_norm_q"], 800).data
    assert "layer 1 in 2 of 2 | 2 of 2" in told
    assert chapter2.grew_words([short, long]) == "layer 1 in 2 of 2 runs"


def fake_runs(failing_sets):
    """Arms that fail where these sets of layers stay low, as `judge` sees them."""
    config = make_config("cpu")
    low = LIVE.arm("low").attention
    texts = {name: LIVE.arm(name).attention for name in ("exact", "only_L0", "only_L1")}
    kept = {"low": (0, 1), "exact": (), "only_L0": (0,), "only_L1": (1,)}
    runs = {}
    for name, layers in kept.items():
        fails = layers in failing_sets
        outcome = Outcome("diverged" if fails else "stable", 2_000, 2_000 if fails else None)
        attention = texts.get(name, low)
        runs[name, 0] = SimpleNamespace(
            config=config.at(attention=attention), outcome=outcome, step=2_000
        )
    return runs


@pytest.fixture
def told_outcomes(monkeypatch):
    """`judge` without metrics: every run's own outcome."""
    own = lambda experiment, runs: {name: run.outcome for name, run in runs.items()}  # noqa: E731
    monkeypatch.setattr(chapter2, "judge", own)


def test_with_two_layers_the_arms_answer_the_whole_search(told_outcomes):
    trace = chapter2.search_layers(LIVE, fake_runs({(0, 1), (1,)}), 0)
    assert trace.state == "minimal" and trace.result == ("L1",)
    assert "enough in fp32 is L1, and" in chapter2.search_words(trace)
    both = chapter2.search_layers(LIVE, fake_runs({(0, 1), (1,), (0,)}), 0)
    assert both.result == ("L0", "L1")
    lost = chapter2.search_layers(LIVE, fake_runs({(0, 1), (1,), ()}), 0)
    assert lost.state == "unstable"


def test_an_onset_counts_as_a_sign_in_the_search(told_outcomes):
    runs = fake_runs({(0, 1)})
    runs["only_L1", 0].outcome = Outcome("onset", 2_000)
    trace = chapter2.search_layers(LIVE, runs, 0)
    assert trace.result == ("L1",)
    assert "3. L0: onset" in words(pictures.search_tree(trace))


def test_a_question_that_no_arm_answers_ends_a_search_without_budget(told_outcomes):
    runs = fake_runs({(0, 1), (1,)})
    del runs["only_L1", 0], runs["only_L0", 0]
    for limit in ({"budget": 0}, {"until_time": 0.0}):  # 1970
        trace = chapter2.search_layers(LIVE, runs, 0, **limit)
        assert trace.state == "budget" and trace.result == ("L0", "L1")


def test_the_finer_search_trains_forks_of_single_sites_and_remembers_them(
    told_outcomes, monkeypatch
):
    asked = []

    def train(parent, at, changes, *, until, **options):
        asked.append(changes["attention"])
        lives = "unnormalized=fp32" in changes["attention"].partition("L1 ->")[2]
        outcome = Outcome("stable" if lives else "diverged", 9, None if lives else 9)
        return SimpleNamespace(config=parent.config.at(**changes), outcome=outcome, step=9)

    monkeypatch.setattr(chapter2, "fork", train)
    trace = chapter2.search_sites(LIVE, fake_runs({(0, 1)}), 0, by="layer")
    assert trace.state == "minimal" and trace.result == ("unnormalized@L1",)
    assert len(asked) == len(set(asked)) == len(trace.questions) - 1  # "nothing" is the parent
    assert all("outcome" in q.detail for q in trace.questions)


def test_the_tree_draws_each_question_below_the_set_it_was_cut_from():
    trace = minimise(["a@L0", "b@L0", "a@L1", "b@L1"], lambda units: "b@L1" in units)
    figure = pictures.search_tree(trace)
    told = words(figure)
    assert len(told) == len(trace.questions) and told[0] == "1. all 4 units: lives"
    bold = [t.get_text() for t in figure.axes[0].texts if t.get_fontweight() == "bold"]
    assert len(bold) == 1 and "b@L1: lives" in bold[0]


def test_the_paper_is_compared_by_intervention_even_where_arms_coincide():
    found = {
        label: (ours, word) for label, _, ours, word in findings.paper_comparison(LIVE, table())
    }
    assert found["no change"] == ("5 of 5 failed", "agrees")
    assert found["fp32 in layer 1 only"] == ("0 of 5 failed", "agrees")  # low in layer 0 only
    assert found["O_bar and O in fp32"][1] == "agrees"
    ours, word = found["the outlier heads in fp32"]
    assert ours == "0 of 5 failed" and word == "no verdict: too few heads"
    missing = findings.paper_comparison(LIVE, table(arms=["low", "same"]))
    assert ("delta from dP and P", False, "not run", "-") in missing
    other = table()
    other[LIVE.arm_names.index("delta_fp32")] = row("delta_fp32", 0, 2_000)
    other[LIVE.arm_names.index("delta_dP_P")]["kind"] = "onset"
    told = findings.paper_table(LIVE, other).data
    assert "1 of 5 failed | mixed" in told and "0 of 5 failed, 1 more with an onset" in told


def test_what_you_saw_counts_from_the_records():
    rows = table(seeds=(0,), arms=["low", "same", "exact", "only_L0"])
    kept = Archive(None, {}, table())
    trace = Trace(("L0", "L1"), state="minimal", result=("L1",))
    told = findings.what_you_saw(LIVE, rows, kept, trace).data
    assert "Low precision: diverged at 2,000." in told
    assert "Everything in fp32: healthy to 3,000, held-out loss 1.800 nats." in told
    assert "Archived (verdict): every run failed with: no change, key tiles of 16, " in told
    assert "largest norm in layer 1 in 5 of 5 runs" in told
    assert "Archived, about heads, a demonstration only (verdict): none failed or showed" in told
    assert "was reached in layer 1 of layers 0 to 1" in told
    assert "end between 0.000 (" in told
    assert "Every intervention that was run here ended as the paper's did." in told


def test_seeds_whose_failing_run_lived_are_named_and_not_counted():
    rows = table()
    rows[2 * len(LIVE.arms)] = row("low", 2)  # the seed lives, and its unchanged fork with it
    rows[2 * len(LIVE.arms) + 1] = row("same", 2)
    told = findings.archive_findings(LIVE, rows)
    assert told[0].startswith("By the rule, the failing run did not fail with seed 2 (")
    assert "Archived (observed, 4 run(s) an arm): every run failed with: no change" in told[2]
    found = {label: ours for label, _, ours, _ in findings.paper_comparison(LIVE, rows)}
    assert found["no change"] == "4 of 4 failed"
    alive = [row("low"), row("exact")]
    assert "are no test" in findings.archive_findings(LIVE, alive)[0]
    said = findings.what_you_saw(LIVE, alive, None, Trace(("L0",), state="needless")).data
    assert "nothing can be compared with the paper" in said


def test_the_account_says_link_by_link_what_is_left_of_the_chain():
    told = findings.account(LIVE, table()).data
    assert "Standing: verdict." in told
    assert "It is not cleared here: no change 5 of 5 failed; key tiles of 16 5 of 5" in told
    assert "So layer 1 is enough, and needed, as the paper's second layer is." in told
    assert "All of the paper's remedies hold" in told and "too few of them" in told
    assert "Ō alone: 0 of 5 failed; the stored O alone: 5 of 5 failed" in told
    fails = FAILS | {"tile_64": 900, "tile_each": 900, "site_unnormalized": 900, "only_L0": 900}
    fails |= {"delta_fp32": 900} | {"site_output": None}
    rows = [row(a, s, fails.get(a)) for s in (0, 1) for a in LIVE.arm_names]
    told = findings.account(LIVE, rows).data
    assert "observed, 2 run(s)" in told and "It is not to blame, as in the paper" in told
    assert "neither layer alone carries it" in told and "Not all of the paper's remedies" in told
    assert "The paper names Ō" in told and "a finer O saves more of them" in told
    assert "no test" in findings.account(LIVE, [row("low")]).data


def test_the_best_metric_is_held_against_as_many_coins():
    failing = [row("low", s, 2_000) for s in range(5)]
    told = chapter2.lead_words(failing, ["spectral_norm_q"], 800)
    assert "`spectral_norm_q`, right in 5 of 5 runs" in told and "probability of 6%" in told


def test_searches_are_counted_by_unit():
    units = ["a@L0", "b@L0", "a@L1", "b@L1"]
    traces = [
        minimise(units, lambda s: "b@L1" in s),
        minimise(units, lambda s: {"a@L0", "b@L1"} <= set(s)),
        minimise(units, lambda s: True),
    ]
    kept = Archive(None, {}, [{"trace": t.to_dict()} for t in traces])
    (told,) = findings.searched_units(kept)
    assert "2 of 3 ended with a smallest set, of 1, 2 places" in told and "`b@L1` in 2" in told
    assert findings.searched_units(Archive(None, {}, [{"trace": traces[2].to_dict()}])) == []


def test_the_controls_decide_whether_the_forks_mean_anything(monkeypatch):
    runs = fake_runs({(0, 1), (1,)})
    runs["same", 0] = runs["low", 0]
    runs["same", 0].parent = SimpleNamespace(step=500)
    monkeypatch.setattr(chapter2, "identical_losses", lambda a, b: True)
    assert "Both controls hold" in chapter2.control_words(LIVE, runs, 0).data
    monkeypatch.setattr(chapter2, "identical_losses", lambda a, b: False)
    told = chapter2.control_words(LIVE, runs, 0).data
    assert "**not** those of its parent" in told and "decide nothing" in told


def test_the_first_sign_is_an_onset_or_the_lowest_loss_of_any_run():
    falls = row("exact", 0)
    assert chapter2.before_signs([falls]) == 3_000
    assert chapter2.before_signs([falls, row("exact", 1) | {"onset_step": 900}]) == 900
    turned = row("low", 0, 2_000)
    turned["curves"]["train_loss"]["value"][3] = 1.5
    lowest = turned["curves"]["train_loss"]["step"][3]
    assert chapter2.before_signs([falls, turned]) == lowest == 650


def test_a_missing_archive_names_a_command_that_exists(capsys):
    """Of another preset's regime, by --recipe; `book.evidence` knows what is named."""
    for name in ("isolation", "isolation-mini"):
        told = chapter2.no_archive(f"evidence {name}").data
        command = told.partition("`python -m book.evidence ")[2].partition("`")[0]
        assert evidence.main([*command.split(), "--list"]) == 0
        assert f"{name} (chapter" in capsys.readouterr().out
