"""The declared outcome rules on made curves whose answer is known."""

import json

import numpy as np
import pytest

from gpt2 import outcomes
from gpt2.outcomes import (
    Outcome,
    OutcomeTracker,
    divergence,
    onset,
    summarize,
    summarize_arm,
    ties_can_show,
)


def falling(n=400, end=2.0):
    return np.linspace(4.0, end, n)


def metrics(steps, **values):
    return {"step": np.asarray(steps), **{k: np.asarray(v, float) for k, v in values.items()}}


def per_head(series, layer=1, head=0, layers=2, heads=2, rest=0.0):
    out = np.full((len(series), layers, heads), rest)
    out[:, layer, head] = series
    return out


def test_a_falling_loss_does_not_diverge():
    assert divergence(range(400), falling()).verdict is None


def test_a_jump_that_stays_is_called_100_steps_after_the_smoothed_loss_crosses():
    losses = np.concatenate([falling(400), np.full(300, 5.0)])
    tracker = divergence(range(700), losses)
    assert tracker.verdict == "diverged"
    # smoothed = 5 - 3 * 0.5**(k/20): above 2 + 1 once k > 20 * log2(1.5) = 11.7; minimum near 2.05
    assert 410 <= tracker.above_since <= 414
    assert tracker.verdict_step == tracker.above_since + outcomes.DIVERGED_STEPS


def test_a_spike_that_recovers_within_100_steps_is_no_divergence():
    losses = np.concatenate([falling(400), np.full(60, 6.0), np.full(300, 2.0)])
    assert divergence(range(len(losses)), losses).verdict is None


def test_a_rise_of_less_than_one_nat_is_no_divergence():
    losses = np.concatenate([falling(400), np.full(400, 2.9)])
    assert divergence(range(800), losses).verdict is None


def test_a_slow_rise_counts_from_the_minimum_so_far_not_from_a_recent_value():
    losses = np.concatenate([falling(400), np.linspace(2.0, 4.0, 1500)])
    tracker = divergence(range(1900), losses)
    assert tracker.verdict == "diverged"
    assert 1150 <= tracker.above_since <= 1230


def test_logging_every_tenth_step_calls_the_same_divergence_within_ten_steps():
    losses = np.concatenate([falling(400), np.full(300, 5.0)])
    dense, sparse = divergence(range(700), losses), divergence(range(0, 700, 10), losses[::10])
    assert abs(dense.verdict_step - sparse.verdict_step) <= 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_is_its_own_status_and_immediate(bad):
    tracker = OutcomeTracker()
    assert tracker.update(1, 3.0) is None
    assert tracker.update(2, bad) == "nonfinite"
    assert tracker.verdict_step == 2
    assert tracker.update(3, 1.0) == "nonfinite"


def test_a_nonfinite_gradient_norm_counts_when_passed():
    assert OutcomeTracker().update(1, 3.0, grad_norm=float("inf")) == "nonfinite"


def test_state_through_json_resumes_exactly():
    rng = np.random.default_rng(0)
    losses = np.concatenate([falling(150), np.full(200, 4.0)]) + rng.normal(0, 0.1, 350)
    straight, resumed = OutcomeTracker(), OutcomeTracker()
    for step, loss in enumerate(losses):
        straight.update(step, loss)
        resumed = OutcomeTracker.from_dict(
            json.loads(json.dumps(resumed.to_dict(), allow_nan=False))
        )
        resumed.update(step, loss)
        assert resumed.to_dict() == straight.to_dict()
    assert straight.verdict == "diverged"


def test_steps_out_of_order_and_foreign_state_are_refused():
    tracker = OutcomeTracker()
    tracker.update(5, 1.0)
    with pytest.raises(ValueError, match="step 5 does not follow step 5"):
        tracker.update(5, 1.0)
    with pytest.raises(ValueError, match="bogus"):
        OutcomeTracker.from_dict({"bogus": 1})


def test_smoothed_curve_starts_at_the_first_loss_and_ends_at_a_nan():
    curve = outcomes.smooth([0, 1, 2], [3.0, 3.0, float("nan")])
    assert curve[0] == curve[1] == 3.0 and np.isnan(curve[2])


STEPS = np.arange(0, 2000, 50)


def test_onset_is_the_first_step_of_a_lasting_excursion_and_names_the_head():
    ties = np.where(STEPS >= 1000, 0.4, 0.05)
    run = metrics(STEPS, tie_rate=per_head(ties, layer=1, head=1))
    twin = metrics(STEPS, tie_rate=per_head(np.full(len(STEPS), 0.07)))
    found = onset(run, twin)
    assert (found.step, found.signal, found.layer, found.head) == (1000, "tie_rate", 1, 1)
    assert (found.value, found.twin_maximum) == (0.4, 0.07)


def test_an_excursion_shorter_than_200_steps_is_no_onset():
    ties = np.where((STEPS >= 1000) & (STEPS < 1150), 0.4, 0.05)
    twin = metrics(STEPS, tie_rate=per_head(np.full(len(STEPS), 0.07)))
    assert onset(metrics(STEPS, tie_rate=per_head(ties)), twin) is None


def test_an_excursion_cut_short_by_divergence_counts():
    norms = np.where(STEPS >= 1900, 40.0, 10.0)
    run = metrics(STEPS, spectral_norm_q=per_head(norms))
    twin = metrics(STEPS, spectral_norm_q=per_head(np.full(len(STEPS), 12.0)))
    assert onset(run, twin) is None
    assert onset(run, twin, failed_step=1960).step == 1900


def test_onset_takes_the_twins_running_maximum_and_only_steps_that_it_reached():
    norms = np.linspace(10, 30, len(STEPS))
    run = metrics(STEPS, spectral_norm_q=per_head(norms))
    spiked = np.full(len(STEPS), 10.0)
    spiked[0] = 40.0  # an early maximum of the twin covers all that follows
    assert onset(run, metrics(STEPS, spectral_norm_q=per_head(spiked))) is None
    short = metrics(STEPS[:5], spectral_norm_q=per_head(np.full(5, 10.0)))
    assert onset(run, short) is None
    assert onset(run, metrics(STEPS, spectral_norm_q=per_head(np.full(40, 10.0)))) is not None


def test_three_times_almost_no_ties_is_no_onset():
    run = metrics(STEPS, tie_rate=per_head(np.full(len(STEPS), 0.004)))
    twin = metrics(STEPS, tie_rate=per_head(np.zeros(len(STEPS))))
    assert onset(run, twin) is None


def test_the_earlier_of_the_two_signals_is_reported_and_nan_heads_are_ignored():
    norms = per_head(np.where(STEPS >= 800, 40.0, 10.0))
    norms[:, 0, 0] = np.nan
    run = metrics(STEPS, spectral_norm_q=norms, tie_rate=per_head(np.where(STEPS >= 1200, 0.5, 0)))
    twin = metrics(
        STEPS,
        spectral_norm_q=per_head(np.full(40, 10.0)),
        tie_rate=per_head(np.full(40, 0.05)),
    )
    found = onset(run, twin)
    assert (found.step, found.signal) == (800, "spectral_norm_q")


def test_summary_tells_healthy_from_merely_stable_and_from_onset():
    steps = np.arange(0, 1600)
    calm = metrics(steps, train_loss=falling(1600), held_out_loss=falling(1600, 2.1))
    assert summarize(calm).kind == "stable"
    assert summarize(calm, calm, failing_step=1000).kind == "healthy"
    assert summarize(calm, calm, failing_step=1100).kind == "stable"
    assert summarize(calm, failing_step=1000).kind == "stable"  # no twin: no onset was judged
    wild = dict(calm, spectral_norm_q=per_head(np.where(steps > 900, 40.0, 10.0)))
    twin = dict(calm, spectral_norm_q=per_head(np.full(1600, 10.0)))
    out = summarize(wild, twin, failing_step=1000)
    assert out.kind == "onset" and out.onset_step == 901 and not out.failed
    assert out.worst_norm == 40.0 and out.held_out_loss == pytest.approx(2.1)


@pytest.mark.parametrize("at_the_fork, judged", [(0.35, False), (0.2, True)])
def test_ties_say_nothing_where_three_times_the_twins_are_more_than_all_rows(at_the_fork, judged):
    steps = np.arange(0, 1600)
    twin = np.full(1600, 0.1)
    twin[0] = at_the_fork  # a fork's first probe is its parent's state
    calm = metrics(steps, train_loss=falling(1600), tie_rate=per_head(twin))
    wild = dict(calm, tie_rate=per_head(np.full(1600, 0.84)))
    assert ties_can_show(wild, calm) is judged
    out = summarize(wild, calm, failing_step=1000)
    assert out.kind == ("onset" if judged else "stable") and out.ties_judged is judged
    assert ("ties not judged" in str(out)) is not judged
    assert Outcome.from_dict(json.loads(json.dumps(out.to_dict()))) == out
    assert summarize(calm, calm, failing_step=1000).kind == ("healthy" if judged else "stable")
    assert summarize(wild).ties_judged  # no twin: no onset was asked for


def test_summary_of_a_diverged_and_of_a_nonfinite_run():
    curve = np.concatenate([falling(400), np.full(300, 5.0)])
    out = summarize(metrics(range(700), train_loss=curve))
    assert out.kind == "diverged" and out.failed_step == out.diverged_step == out.last_step
    assert out.diverged_from == out.diverged_step - outcomes.DIVERGED_STEPS
    lost = metrics(range(10), train_loss=falling(10))
    lost["nonfinite:train_loss"] = np.array([10])
    out = summarize(lost)
    assert out.kind == "nonfinite" and out.failed_step == 10 and out.train_loss == 2.0


def test_the_last_step_is_the_trackers_where_metrics_have_gaps():
    tracker = divergence(range(100), falling(100))
    steps = np.arange(0, 100, 30)
    assert summarize(metrics(steps, train_loss=falling(4)), tracker=tracker).last_step == 99
    assert summarize(metrics(steps, train_loss=falling(4))).last_step == 90
    assert summarize(metrics(()), tracker=tracker).last_step == 99
    assert summarize(metrics(())).last_step == 0


def test_outcome_through_json():
    wild = metrics(STEPS, train_loss=falling(40), spectral_norm_q=per_head(np.full(40, 40.0)))
    twin = metrics(STEPS, spectral_norm_q=per_head(np.full(40, 10.0)))
    out = summarize(wild, twin)
    assert out.onset is not None
    assert Outcome.from_dict(json.loads(json.dumps(out.to_dict(), allow_nan=False))) == out


def test_a_verdict_needs_five_runs_in_each_arm():
    failed = [Outcome("diverged", s, diverged_step=s) for s in (900, 1000, 1200, 1100)]
    arm = summarize_arm(failed)
    assert (arm.label, arm.failed, arm.median_failed_step) == ("observed", 4, 1050.0)
    healthy = [Outcome("healthy", 2000, held_out_loss=1.5 + 0.1 * i) for i in range(5)]
    arm = summarize_arm(healthy)
    assert arm.label == "verdict" and arm.failed == 0 and arm.counts["healthy"] == 5
    assert arm.held_out_mean == pytest.approx(1.7)
    assert arm.held_out_stderr == pytest.approx(0.1 * np.sqrt(2.5 / 5))
    assert outcomes.comparison_label(failed, healthy) == "observed"
    assert outcomes.comparison_label(healthy, healthy) == "verdict"
