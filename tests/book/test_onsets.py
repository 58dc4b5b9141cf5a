"""Onsets judged from records alone: the rule, its resolution, and what is no pair."""

import numpy as np
import pytest

from book.onsets import judged, onset_from_records, resolution
from book.records import curves, worst_heads
from gpt2.outcomes import ONSET_STEPS, Onset, Outcome, onset


def metrics(last=24_000, every=100, start=None, factor=4.0, loss=5.0):
    """Two layers of two heads; from step `start` the ties of layer 1, head 0 are `factor` high."""
    steps = np.arange(0, last + 1, every)
    ties = np.full((len(steps), 2, 2), 0.02)
    ties[:, 0, 1] = 0.05
    if start is not None:
        ties[steps >= start, 1, 0] = 0.05 * factor
    norms = np.broadcast_to(1 + steps[:, None, None] / last, ties.shape).copy()
    norms[:, 1, 1] += 0.1
    losses = np.full(len(steps), loss)
    return {"step": steps, "tie_rate": ties, "spectral_norm_q": norms, "train_loss": losses}


def record(of, arm="low", seed=0, **more):
    last = int(of["step"][-1])
    outcome = Outcome("stable", last_step=last).to_dict()
    told = outcome | {"steps": last, "outcome": outcome, "curves": curves(of), "run": arm}
    told |= {"diverged_step": None, "nonfinite_step": None, "onset": None, "onset_step": None}
    return told | {"recipe": "a", "arm": arm, "seed": seed, "forked_at": None} | more


def test_a_record_gives_the_onset_that_the_run_gives():
    low, twin = metrics(start=12_100), metrics()
    found = onset_from_records(record(low), record(twin, "delta_fp32"))
    assert found == onset(low, twin)
    assert (found.step, found.signal, found.layer, found.head) == (12_100, "tie_rate", 1, 0)
    assert resolution(record(low)) == 100
    assert onset_from_records(record(metrics(start=12_100, factor=2.9)), record(twin)) is None


def test_thinned_records_are_judged_within_their_resolution_and_without_a_head():
    low, twin = record(metrics(start=12_100)), record(metrics())
    for curve in low["curves"].values():
        keep = np.linspace(0, len(curve["step"]) - 1, 160).round().astype(int)
        for name in curve:
            curve[name] = [curve[name][i] for i in keep]
        curve.pop("head", None)
    assert resolution(low) == 200 == ONSET_STEPS
    found = onset_from_records(low, twin)
    assert 12_100 <= found.step <= 12_300 and found.layer is None and found.head is None


def test_records_too_coarse_or_of_another_start_are_refused():
    twin = record(metrics())
    with pytest.raises(ValueError, match="every 500 steps"):
        onset_from_records(record(metrics(every=500, start=9_000)), twin)
    with pytest.raises(ValueError, match="no pair"):
        onset_from_records(record(metrics(start=9_000, loss=5.1)), twin)


def test_a_run_is_judged_again_when_its_twin_came_farther():
    low = record(metrics(start=12_100), judged_to=None)
    other = record(metrics(start=12_100), seed=1)
    (alone,) = judged([low])
    assert alone is low and alone["onset"] is None
    short = record(metrics(last=9_000), "delta_fp32")
    early, _ = judged([low, short])
    assert early["kind"] == "stable" and early["judged_to"] == 9_000
    late, twin, unpaired = judged([early, record(metrics(), "delta_fp32"), other])
    assert late["kind"] == "onset" == late["outcome"]["kind"]
    assert late["onset_step"] == 12_100 == Outcome.from_dict(late["outcome"]).onset_step
    assert late["judged_from"] == "records" and late["resolution"] == 100
    assert twin["onset"] is None and unpaired is other


def test_a_failed_run_keeps_its_kind_and_one_judged_by_all_probes_its_verdict():
    low = record(metrics(start=12_100))
    failed = low | {"kind": "diverged", "diverged_step": 20_000}
    twin = record(metrics(), "delta_fp32")
    assert judged([failed, twin])[0]["kind"] == "diverged"
    assert judged([failed, twin])[0]["onset_step"] == 12_100
    whole = low | {"judged_from": "metrics", "judged_to": 24_000}
    assert judged([whole, twin])[0] is whole


def test_the_worst_head_is_told_at_the_end_and_at_the_onset():
    sign = Onset(12_100, "tie_rate", 1, 0, 0.2, 0.05)
    found = worst_heads(metrics(start=12_100), sign)
    assert found["onset"]["tie_rate"] == {"step": 12_100, "layer": 1, "head": 0, "value": 0.2}
    assert found["end"]["spectral_norm_q"]["layer"] == found["end"]["spectral_norm_q"]["head"] == 1
    assert worst_heads(metrics(start=12_150), sign)["onset"]["tie_rate"]["head"] == 1
    assert worst_heads(metrics())["onset"] is None and worst_heads({"step": []})["end"] == {}


def test_a_run_at_fewer_bits_is_not_judged_against_the_twin_in_bf16():
    rows = [record(metrics(start=9_000)), record(metrics(), "delta_fp32")]
    assert judged(rows)[0]["onset_step"] == 9_000
    dial = rows[0] | {"experiment": "dials-a", "arm": "matched3"}
    assert judged([dial, rows[1]])[0]["onset_step"] is None


def test_a_twin_that_outlived_a_failure_of_another_call_is_healthy():
    """1.5 times the steps of low precision, which is archived elsewhere; no less, and no sign."""
    failed = {"kind": "diverged", "diverged_step": 8_000, "nonfinite_step": None, "steps": 8_000}
    low = record(metrics(last=8_000)) | failed
    for last, kind in ((11_900, "stable"), (12_000, "healthy")):
        twin = record(metrics(last=last), "delta_fp32")
        witness = record(metrics(last=last), "sdpa")
        other = record(metrics(last=last), "delta_fp32", seed=1)
        found = judged([low, twin, witness, other])
        assert [row["kind"] for row in found] == ["diverged", kind, kind, "stable"]
        assert Outcome.from_dict(found[1]["outcome"]).kind == kind
    dial = record(metrics(), "output4") | {"experiment": "dials-x"}
    assert judged([low, dial])[1]["kind"] == "stable"
    fork = record(metrics(), "flash") | {"forked_at": 100}
    assert judged([low, fork])[1]["kind"] == "stable"
