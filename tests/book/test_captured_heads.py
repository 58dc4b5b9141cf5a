"""Statistics of captured heads, on heads that are made up so that the right answer is known."""

import math

import numpy as np
import pytest
import torch

from book.captions import live
from book.captured import captured_config, captured_heads, pooled, steepest, worst_head
from book.head_statistics import (
    attribution,
    both_readings,
    both_sums,
    changed_heads,
    output_bias,
    over_time,
    pick,
    shifted,
    standardised,
    stochastic,
)
from book.rounding_words import (
    changes_over_seeds,
    moments_in_words,
    parts_over_seeds,
    seeds_findings,
    seeds_table,
    trace_page,
    what_you_saw,
    with_interval,
)
from book.tables import half_width, over_runs, ratio_interval
from kernels.forensics import as_head, delta_error, rounding_trace
from kernels.numerics import paper


def tied_head(sequences=16, rows=12, seed=0):
    """Every row but the first has two tied maxima, a small tail, V in -(2..4), dO positive."""
    g = torch.Generator().manual_seed(seed)
    k = torch.zeros(sequences, rows, 16)
    k[:, 0:2, 0] = 3
    k[:, 2:, 0] = -5 - 2 * torch.rand(sequences, rows - 2, generator=g)
    q = torch.zeros(sequences, rows, 16)
    q[..., 0] = 4
    v = -2 - 2 * torch.rand(sequences, rows, 16, generator=g)
    dO = 0.5 + torch.rand(sequences, rows, 16, generator=g)
    return as_head(*(x.bfloat16().float() for x in (q, k, v, dO)))


def write_capture(folder, step, place, norm, head):
    weights = torch.eye(16) * norm
    arrays = {n: getattr(head, n).numpy() for n in ("q", "k", "v", "dO")}
    x = np.zeros((*head.q.shape[:2], 16), dtype=np.float32)
    path = folder / f"step_{step:08d}-L0H{place}.npz"
    told = {"step": step, "layer": 0, "head": place, "numerics": paper().to_json()}
    np.savez(path, **arrays, X=x, W_Q=weights.numpy(), **told)
    return path


@pytest.fixture
def series(tmp_path):
    norms = {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 9, 10]}
    for place, values in norms.items():
        for i, norm in enumerate(values):
            write_capture(tmp_path, 100 * i, place, norm, tied_head(seed=i))
    return captured_heads(sorted(tmp_path.glob("*")))


def test_worst_head_and_steepest_step_are_found(series):
    worst = worst_head(series)
    assert [c.place for c in worst] == [1] * 5
    assert worst[-1].spectral_norm == pytest.approx(10)
    assert steepest(worst).step == 200  # from 3 to 9
    assert str(worst[0]) == "layer 0, head 1, step 0"
    assert worst[0].numerics == paper()


def test_no_captures_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="give it a probe"):
        captured_heads(tmp_path.glob("*"))


def test_captured_run_differs_from_chapter_1_in_its_probes_alone():
    from book.experiments import FAILURE
    from gpt2.config import difference

    plain = FAILURE.arm("low").config(FAILURE, 3, "cpu")
    assert set(difference(plain, captured_config("cpu", 3))) <= {"probes"}
    assert any("capture" in p for p in captured_config("cpu", 3).probes)


def test_pooling_keeps_every_sequence(series):
    head = pooled(series[:3])
    assert head.q.shape == (48, 12, 16) and head.dO.shape == (48, 12, 16)


def test_tied_rows_are_counted_and_carry_the_whole_bias(series):
    worst = worst_head(series)
    moments = over_time(worst)
    assert all(m.tied == pytest.approx(11 / 12) for m in moments)
    assert all(float(m.signs.max()) == 0 for m in moments)  # V is negative
    head = pooled(worst)
    delta = delta_error(head, numerics="paper", sites=False)
    assert delta.mean.z < -10  # away from zero, V negative, dO positive
    lines = {line[0]: line for line in attribution(head, "paper", delta)}
    assert lines["tied rows"][3].startswith("100%") or lines["tied rows"][3].startswith("9")
    assert lines["absorbing rows"][2] == "-"
    assert float(lines["tied rows"][5].split()[0]) > 0.15
    assert lines["absorbing rows"][1] == "0"
    assert lines["rounding at `unnormalized`"][5] == "-"


def test_shares_are_withheld_where_the_sum_is_not_off_zero(series):
    head = series[0].head
    delta = delta_error(head, numerics=stochastic("paper"), sites=False, seed=3)
    if abs(delta.mean.z) < 2:
        assert attribution(head, "paper", delta)[1][3] == "-"
    assert standardised(series[:1]).square().mean() == pytest.approx(1.0)


def test_balancing_and_stochastic_rounding_remove_the_bias_of_tied_rows(series):
    found = changed_heads(pooled(worst_head(series)), "paper")
    plain = found["as captured"]
    assert plain.bias.mean > 0.2 and plain.bias.z > 10
    assert plain.shared > 0.5  # two ties: the same error in every row of a sequence
    assert abs(found["stochastic rounding"].bias.mean) < plain.bias.mean / 10
    assert abs(found["V balanced"].delta.mean) < abs(plain.delta.mean) / 2
    assert found["sham offset"].bias.mean > 0.1


def test_offset_moves_v_by_its_mean_and_stays_on_the_grid(series):
    head = series[0].head
    balanced, sham = shifted(head, -1, "paper"), shifted(head, 1, "paper")
    assert float(balanced.v.mean(1).abs().max()) < 0.02
    assert torch.allclose(sham.v.mean(1), 2 * head.v.mean(1), rtol=0.01)
    assert torch.equal(sham.v.bfloat16().float(), sham.v)


def test_both_sums_agree_with_the_trace_of_single_elements(series):
    head = series[0].head
    once, each, _ = both_sums(head, "paper")
    differing = (once != each).nonzero()[:3].tolist()
    for sequence, row, feature in [*differing, (2, 5, 7), (0, 11, 0)]:
        place = dict(row=row, feature=feature, sequence=sequence)
        trace = rounding_trace(head, **place, numerics="paper")
        assert trace.after["prefix_round_once"][-1] == once[sequence, row, feature]
        assert trace.after["running"][-1] == each[sequence, row, feature]


def test_a_late_tail_breaks_ties_only_where_the_sum_is_rounded_once(series):
    found = both_readings(series[0].head, "paper")
    assert found.differ > 0.05
    assert found.once.mean > 0.3 and found.once.z > 5
    assert found.each.mean < found.once.mean / 2


def test_pick_takes_the_largest_errors_first(series):
    delta = delta_error(series[0].head, numerics="paper", sites=False)
    sequence, row, feature = pick(delta, 0, 0)
    assert abs(delta.error[sequence, row]) == delta.error.abs().max()
    part = delta.contribution[sequence, row].abs()
    assert part[feature] == part.max()
    assert part[pick(delta, 0, 1)[2]] == part.sort(descending=True).values[1]


def test_pages_and_summary_carry_their_numbers(series):
    worst = worst_head(series)
    trace = rounding_trace(worst[0].head, row=7, feature=1, numerics="paper")
    page = trace_page(trace, "a title", "paper", live(seeds=[0]))
    assert "2 of 8 keys" in page and "<pre" in page and "alt=" in page
    moments = {"a": over_time(worst)}
    assert "91.7%" in moments_in_words(moments)
    parts = {"a": delta_error(worst[0].head, numerics="paper", sites=False)}
    changed = {"a": changed_heads(worst[0].head, "paper")}
    from book.chapter4 import attention_kinds, crafted_rows, read_back, stored_error, tied_rows

    rows = tied_rows(2, 1e-3, sets=50)
    stored = {
        n: {1e-3: stored_error(rows, unnormalized=a, output=b)}
        for n, a, b in (("Ō rounded", True, False), ("O rounded", False, True))
    }
    crafted = crafted_rows(16)
    read = {n: read_back(crafted, f) for n, f in attention_kinds().items()}
    biases = {"a": output_bias(worst[0].head, "paper")}
    text = what_you_saw(stored, read, parts, moments, changed, biases).data
    assert "ulp in tied rows" in text
    assert "standard errors" in text and "nan" not in text and math.isfinite(len(text))


def test_records_are_plain_json_and_draw(series, tmp_path, monkeypatch):
    from book import rounding_evidence
    from book.evidence import latest
    from book.figures import intervals

    class Run:
        config = captured_config("cpu")
        info = {"environment": {"code": "abc", "cores": 2}, "corpus": {"sha256": "0"}}
        state = {"duration_s": 1.0}

        def captures(self):
            return sorted({c.path for c in series})

    monkeypatch.setattr(rounding_evidence, "captured_run", lambda *a, **k: Run())
    assert rounding_evidence.main(["--seeds", "0,1", "--results", str(tmp_path)]) == 0
    kept = latest("rounding", "cpu", tmp_path)
    assert kept.complete and [r["seed"] for r in kept.rows] == [0] * 4 + [1] * 4
    assert kept.rows[0]["parts"]["tied"]["energy"] > 0.9
    assert kept.rows[0]["mean"][0] < 0 and kept.rows[0]["step"] == 200
    adds = {name: part["adds"][0] for name, part in kept.rows[0]["parts"].items()}
    mean = kept.rows[0]["mean"][0]
    assert adds["tied"] + adds["absorbing"] + adds["other"] == pytest.approx(mean, abs=1e-5)
    assert adds["unnormalized"] + adds["output"] == pytest.approx(mean, abs=1e-5)
    assert kept.rows[0]["changed"]["as captured"]["bias"][0] > 0.2
    assert kept.rows[0]["changed"]["as captured"]["delta"] == kept.rows[0]["mean"]
    assert abs(kept.rows[2]["changed"]["as captured"]["bias"][0]) < 0.02  # stochastic
    rows = rounding_evidence.bias_rows(kept.rows)
    assert len(intervals(rows, label="x").axes[0].get_yticks()) == 8
    table = parts_over_seeds(kept.rows).data
    assert table.count("| all rows |") == 4 and table.count("| rounding Ō |") == 4
    assert "| seed 0, as trained |" in seeds_table(kept.rows).data
    assert "100%" in seeds_table(kept.rows).data and "of 8." in seeds_table(kept.rows).data
    assert "V balanced" in changes_over_seeds(kept.rows).data
    as_trained, *_, unbiased = seeds_findings(kept.rows)
    assert "2 run(s), observed" in as_trained and "-0.0000" not in as_trained
    assert "stochastic" in unbiased
    assert rounding_evidence.main(["--seeds", "a"]) == 2


def test_an_interval_over_runs_is_students():
    found = over_runs([1.0, 2.0, 3.0])
    assert half_width(found) == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert with_interval(found, 1) == "+2.0 [-0.5, +4.5]"
    assert with_interval(over_runs([1.0]), 1) == "+1.0 (one run)"


def test_shares_over_runs_have_fiellers_interval():
    wholes = [1.0, 1.2, 0.9, 1.1, 1.0]
    ratio, low, high = ratio_interval([0.5 * w for w in wholes], wholes)
    assert (ratio, low, high) == pytest.approx((0.5, 0.5, 0.5))  # the same share in every run
    parts = [0.4, 0.7, 0.5, 0.6, 0.4]
    ratio, low, high = ratio_interval(parts, wholes)
    for edge in (low, high):  # at an edge the mean of part - edge * whole is just off zero
        found = over_runs([p - edge * w for p, w in zip(parts, wholes)])
        assert abs(found.mean) == pytest.approx(half_width(found), rel=1e-6)
    assert low < ratio < high
    assert ratio_interval(parts, [1.0, -1.0, 0.5, -0.7, 0.3])[2] == math.inf
    assert ratio_interval([1.0], [2.0]) == (0.5, -math.inf, math.inf)
