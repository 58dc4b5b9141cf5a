"""Signs of a run that did not diverge, read from its record."""

import pytest

from book.signs import first_head, places_words, signs, signs_table, signs_words


def row(scores, **more):
    steps = [0, 2_500, 5_000, 7_500, 10_000]
    curve = lambda values: {"step": steps, "value": list(values)}  # noqa: E731
    told = {
        "recipe": "r", "label": "low precision", "arm": "low", "seed": 0, "steps": 10_000,
        "kind": "stable", "forked_at": None, "onset_step": None,
        "held_out_loss": 1.75, "best_held_out_loss": 1.5,
        "curves": {
            "max_logit": curve(scores),
            "tie_rate": curve([0.1, 0.1, 0.75, 0.3, 0.2]),
            "spectral_norm_q": curve([1, 2, 3, 4, 50]),
        },
    }  # fmt: skip
    return told | more


def test_signs_are_the_worst_values_and_their_steps():
    found = signs(row([1, 100, None, 500, 2_000]))
    assert found.ties == (0.75, 5_000) and found.norm == (50.0, 10_000)
    assert found.score == (2_000.0, 10_000) and found.score_growth == pytest.approx(20.0)
    assert found.loss_above_best == 0.25 and found.grew
    assert not signs(row([1, 100, 200, 300, 400])).grew


def test_what_was_not_kept_is_said_to_be_missing():
    bare = row([None] * 5, held_out_loss=None)
    found = signs(bare | {"curves": bare["curves"] | {"tie_rate": {"step": [], "value": []}}})
    assert found.score is found.ties is found.score_growth is found.loss_above_best is None
    assert not found.grew and signs_words([bare]) == []
    assert "none kept" in signs_table([bare]).data


def test_the_table_leaves_out_forks_and_short_runs():
    grown = row([1, 100, 150, 500, 2_000])
    assert "50 at 10,000" in signs_table([grown]).data
    for left_out in (grown | {"forked_at": 10}, grown | {"steps": 4_000}):
        assert "No run" in signs_table([left_out]).data


def test_a_cycle_without_a_divergence_is_told_with_or_without_its_onset():
    grown = row([1, 100, 150, 500, 2_000])
    (told,) = signs_words([grown])
    assert "20 times its early value" in told and "75 % of its rows tied at step 5,000" in told
    assert "0.250 nats above its best" in told and "no onset was judged" in told
    assert "is at step 5,000" in signs_words([grown | {"onset_step": 5_000}])[0]
    for other in ({"arm": "delta_fp32"}, {"forked_at": 3}):
        assert signs_words([grown | other]) == []


def test_a_cycle_to_its_end_is_told_unless_the_twin_failed_as_well():
    failed = row([1, 100, 150, 500, 2_000], kind="diverged", diverged_step=10_000)
    (told,) = signs_words([failed])
    assert "The cycle to its end" in told and "diverged at 10,000" in told
    twin = failed | {"arm": "delta_fp32", "seed": 1}
    assert signs_words([failed, twin]) == []
    for other in ({"recipe": "another"}, {"forked_at": 3}, {"kind": "stable"}):
        assert len(signs_words([failed, twin | other])) == 1


def test_the_head_in_which_it_begins_is_named():
    failed = row([1, 100, 150, 500, 2_000], kind="diverged", diverged_step=10_000)
    assert first_head(failed) is None and places_words([failed]) == []  # no heads were kept
    ties = failed["curves"]["tie_rate"] | {"head": [[0, 1], [0, 1], [2, 0], [3, 1], [3, 1]]}
    failed["curves"]["tie_rate"] = ties
    assert first_head(failed) == (5_000, 2, 0)
    (told,) = places_words([failed, failed | {"seed": 1}])
    assert "40 % of its rows tied" in told and told.count("layer 2, head 0 at step 5,000") == 2
    for other in ({"arm": "delta_fp32"}, {"forked_at": 3}, {"kind": "stable"}):
        assert places_words([failed | other]) == []
