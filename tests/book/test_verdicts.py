"""Counts of failed runs: which seeds are a test, and what chance alone would do."""

from itertools import combinations

import pytest

from book import verdicts


def runs(kinds, arm="low"):
    losses = {"held_out_loss": 2.5, "best_held_out_loss": 1.7}
    return [{"arm": arm, "seed": s, "kind": kind} | losses for s, kind in enumerate(kinds)]


def test_failures_and_onsets_are_counted_apart():
    rows = runs(["diverged", "nonfinite", "onset", "healthy", "stable"])
    assert verdicts.failures(rows) == 2 and verdicts.onsets(rows) == 1
    assert verdicts.counted(rows) == "2 of 5 failed, 1 more with an onset"
    assert verdicts.standing(5) == "verdict" and "2 run(s)" in verdicts.standing(2)


def test_only_seeds_whose_failing_run_failed_are_a_test():
    rows = runs(["diverged", "healthy"]) + runs(["healthy", "diverged"], "fork")
    assert [(r["arm"], r["seed"]) for r in verdicts.tested(rows)] == [("low", 0), ("fork", 0)]
    told = verdicts.untested_words(rows)
    assert "did not fail with seed 1 (its held-out loss ended 0.8 nats above its best)" in told
    assert verdicts.untested_words(runs(["diverged"])) == ""


def test_runs_that_learnt_nothing_are_named_though_they_did_not_fail():
    def run(arm, loss, kind="onset"):
        return {"arm": arm, "label": arm, "seed": 0, "kind": kind, "held_out_loss": loss}

    twin = run("delta_fp32", 1.8, "healthy")
    rows = [twin, run("worse", 2.2), run("lost", 3.3), run("failed", 3.4, "diverged")]
    told = verdicts.lost_words(rows)
    assert "lost (+1.5)." in told and "worse" not in told and "failed (" not in told
    assert verdicts.lost_words([twin, run("worse", 2.2)]) == verdicts.lost_words(rows[2:]) == ""


@pytest.mark.parametrize("mine, low", [(0, 5), (1, 5), (0, 4), (1, 4), (4, 5), (2, 2), (5, 5)])
def test_chance_is_that_of_dealing_the_same_failures_to_the_arms_at_random(mine, low):
    a, b = (runs(["diverged"] * n + ["healthy"] * (5 - n)) for n in (mine, low))
    ends = [1] * (mine + low) + [0] * (10 - mine - low)
    deals = [sum(ends[i] for i in chosen) for chosen in combinations(range(10), 5)]
    expected = sum(failed <= mine for failed in deals) / len(deals)
    assert verdicts.fewer_by_chance(a, b) == pytest.approx(expected)
    word = "as often" if mine >= low else "fewer" if expected <= 0.05 else "unclear"
    assert verdicts.compared(a, b) == word
