"""Stabilised softmax on crafted rows, on a made head, and the words made of records."""

import json
import math

import numpy as np
import pytest
import torch

from book.chapter5 import (
    accepted,
    fp32_runs,
    loss_differences,
    loss_table,
    price_table,
    regime_table,
    settings_table,
    sfa_cost,
    sweep_table,
    ties_before_failure,
    what_you_saw,
)
from book.evidence import Archive
from book.experiments import FAILURE, LIVE_SFA, SFA, SFA_SETTINGS, SFA_SWEEP
from book.sfa_figures import (
    fates_figure,
    map_figure,
    parts_figure,
    scale_figure,
    scores_figure,
    weights_figure,
)
from book.sfa_findings import (
    BETA_MAP,
    EPS_MAP,
    ONE_CHANGE,
    SWITCHES,
    against_paper,
    map_points,
    mean_ties,
    site_findings,
    site_table,
    switch_table,
    verdicts,
)
from book.sfa_heads import (
    PARTS,
    POLICIES,
    broken_heads,
    broken_sentence,
    chosen_captures,
    delta_parts,
    gradient_errors,
    parts_table,
    random_head,
    site_sentence,
    under,
)
from book.sfa_rows import (
    boundary,
    exact_differences,
    kernel_source,
    largest_weight,
    raised_by_a_tile,
    reaches_one,
    scale_by_maximum,
    tied_error,
    tolerance,
    with_row_sum,
)
from kernels.numerics import parse_numerics

PUBLISHED, GUARDED = "softmax=stabilized,beta=7", "softmax=guarded,beta=7"


def test_every_policy_but_the_clamped_is_the_same_function_in_float64():
    policies = {"published": PUBLISHED, "guarded": GUARDED, "clamped": "softmax=clamped"}
    lines = exact_differences(policies)
    assert max(max(line[1:3]) for line in lines) < 1e-13
    assert max(line[3] for line in lines) > 1e-9


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fmt", ["bf16", "bf16.2", "fp16", "e4m3"])
def test_measured_boundaries_are_those_of_the_format(fmt, sign):
    b = boundary(fmt, 7.0, sign)
    assert b.one == pytest.approx(b.law_one, rel=1e-3)
    assert b.zero == pytest.approx(b.law_zero, rel=1e-4)
    assert b.nan == pytest.approx(b.law_nan, rel=1e-4)


def test_the_published_rule_has_two_holes_and_the_guarded_one_none():
    maxima = [0.0, 1e-6, 1e-3, 1.0, 100.0]
    assert reaches_one(maxima, PUBLISHED).tolist() == [True, True, False, False, False]
    assert not reaches_one(maxima, GUARDED).any()
    assert largest_weight(maxima, PUBLISHED)[-1] < 1e-200
    assert largest_weight(maxima, GUARDED).min() == pytest.approx(math.exp(-8), rel=1e-5)
    negative = largest_weight([-3.0], PUBLISHED)
    assert float(negative) == pytest.approx(math.exp(-3), rel=1e-5)


def test_sfa_cures_the_bias_of_o_bar_in_bf16_but_scales_the_row():
    plain, sfa = tied_error("softmax=safe"), tied_error("softmax=stabilized,beta=2")
    assert plain.o_bar.mean == pytest.approx(0.24, abs=0.02)
    assert abs(sfa.o_bar.mean) < 6 * sfa.o_bar.stderr and sfa.ones == 0 and plain.ones == 1
    assert plain.scale_rms < 1e-6 < 1e-3 < sfa.scale_rms
    summed = tied_error(with_row_sum("softmax=stabilized,beta=2", "rounded"))
    assert summed.scale_rms < 1e-6


def test_a_constant_offset_biases_the_stored_output():
    shifted = tied_error("softmax=shifted,shift=1")
    exact = tied_error("softmax=shifted,shift=0.28768")
    assert abs(shifted.output.mean) > 30 * shifted.output.stderr
    assert abs(exact.output.mean) < abs(shifted.output.mean) / 2


def test_the_scale_of_a_tied_row_is_its_weights_relative_rounding_error():
    weight = math.exp(-3.0)
    rounded = torch.tensor(weight).bfloat16().item()
    found = scale_by_maximum([3.0], "softmax=stabilized,beta=2", "bf16")
    assert float(found) == pytest.approx(rounded / weight - 1, rel=0.05)
    none = scale_by_maximum([3.0], "softmax=stabilized,beta=2,row_sum_source=rounded", "bf16")
    assert abs(float(none)) < 2e-4


def test_a_tolerance_finds_near_ties_of_fp32_scores_and_then_false_ones():
    exact, small, large = (tolerance(e, scores="fp32", rows=4000) for e in (0.0, 0.002, 1.0))
    assert exact.found == 0 and exact.missed == exact.repeated > 0
    assert small.missed == 0 and small.found == small.repeated
    assert small.false < 0.01 < 0.5 < large.false


def test_a_tied_tile_raises_the_reference_of_the_whole_row():
    (_, by_row, top, _), (_, by_tile, low, _) = raised_by_a_tile(beta=7.0)
    assert by_row == 8.0 and top == 1.0
    assert by_tile == 42.0 and low < 1e-14


def test_the_shown_kernel_is_the_kernels_rule():
    source = kernel_source()
    assert source.startswith("def shifted_reference") and "beta * rm" in source
    assert "jit" not in source


# -- heads ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """Captures as gpt2 writes them: steps 5 and 6, one head each; at 6 a tied maximum of 40."""
    folder = tmp_path_factory.mktemp("captures")
    torch.manual_seed(0)
    made = random_head(True, spread=0.3)
    W = torch.randn(32, 8)
    numerics = under("paper,matched_bits=2", PUBLISHED)
    for step in (5, 6):
        q, k = made.q.clone(), made.k.clone()
        if step == 6:
            q[0], k[0] = 0.0, 0.0
            q[0, 10, 0], k[0, :2, 0] = 16.0, 16.0
        arrays = {n: t.numpy() for n, t in dict(q=q, k=k, v=made.v, dO=made.dO, W_Q=W).items()}
        np.savez(
            folder / f"step_{step:08d}-L0H0.npz", **arrays, X=torch.randn(16, 64, 8).numpy(),
            step=step, layer=0, head=0, numerics=json.dumps(numerics.to_dict()),
        )  # fmt: skip
    return sorted(folder.iterdir())


def test_lost_rows_are_told_from_those_that_were_kept(captures):
    step, (head,) = broken_heads(captures)
    assert step == 6 and head.spoilt == 0
    assert head.lost == (48.0,)  # 16 * 16 / sqrt(32) on a grid of 2 bits
    told = broken_sentence("SFA", 7.0, step, [head])
    assert "of 1 rows lost" in told and "1 have maxima above 14.54" in told
    assert "an underflow" in told and "not only" not in told
    assert "not only" in broken_sentence("SFA", 1.5, step, [head])


def test_parts_of_deltas_error_add_up_and_rounded_sums_remove_one(captures):
    chosen = chosen_captures(captures, before=6)
    assert [c.step for c in chosen] == [5]
    plain, unit = delta_parts(chosen[0].head, "paper,matched_bits=2")
    assert list(plain) == list(PARTS) and plain["all"].size == pytest.approx(1.0)
    total = sum(plain[p].bias.mean for p in PARTS[:3])
    assert plain["all"].bias.mean == pytest.approx(total, abs=1e-9)
    guarded, _ = delta_parts(chosen[0].head, under("paper,matched_bits=2", GUARDED), unit)
    text = with_row_sum(GUARDED, "rounded")
    summed, _ = delta_parts(chosen[0].head, under("paper,matched_bits=2", text), unit)
    assert guarded["P̄ and l"].size > 2 * summed["P̄ and l"].size
    assert "guarded" in parts_table(chosen[0]).data
    sentence = site_sentence(chosen[0])
    most = max(PARTS[:3], key=lambda name: plain[name].size)
    assert f"plain: {most} ({plain[most].size:.2f}; the whole error 1.00" in sentence
    parts = {"plain": plain, "guarded": guarded}
    assert len(parts_figure(parts).axes[0].patches) == 8


def test_gradient_errors_vanish_without_rounding():
    head = random_head(True)
    assert max(gradient_errors(head, "exact").values()) < 1e-4
    assert gradient_errors(head, under("paper", POLICIES["plain"]))["dQ"] > 1e-3


# -- experiments and words ------------------------------------------------------------------------


def test_arms_of_chapter_one_are_shared_and_all_others_differ():
    for name in ("low", "delta_fp32"):
        identities = [e.arm(name).config(e, 3).identity() for e in (FAILURE, SFA, SFA_SWEEP)]
        assert identities[0] == identities[1] == identities[2]
    fp32 = [e.arm("fp32").config(e, 3).identity() for e in (FAILURE, SFA)]
    assert fp32[0] == fp32[1] and "fp32" not in LIVE_SFA
    for e in (*SFA_SETTINGS, SFA_SWEEP):
        keys = [json.dumps(a.config(e, 0).identity(), sort_keys=True) for a in e.arms]
        assert len(set(keys)) == len(keys)
    fixed = parse_numerics(SFA_SWEEP.arm("fixed_4").attention).softmax
    assert fixed.min_offset == fixed.max_offset == 4.0


def a_row(arm, kind="stable", step=None, seed=0, losses=(3.0, 2.0), label=None):
    steps = [0, 100]
    return {
        "arm": arm,
        "label": label or arm,
        "seed": seed,
        "kind": kind,
        "steps": step or 200,
        "diverged_step": step if kind == "diverged" else None,
        "diverged_from": step - 100 if kind == "diverged" else None,
        "nonfinite_step": step if kind == "nonfinite" else None,
        "curves": {
            "held_out_loss": {"step": steps, "value": list(losses)},
            "tie_rate": {"step": [0, 50, 150], "value": [0.1, 0.3, 0.9]},
            "max_logit": {"step": steps, "value": [1.0, 12.0]},
        },
    }


def test_ties_count_only_before_the_trouble():
    assert ties_before_failure(a_row("low", "diverged", 200)) == pytest.approx((0.2, 0.3))
    table = regime_table([a_row("low", "diverged", 200), a_row("low", seed=1)]).data
    assert "not accepted" in table and table.count("accepted") == 2
    assert accepted([a_row("low", "diverged", 200), a_row("sfa7", "nonfinite", 90)])
    assert not accepted([a_row("low", "diverged", 200), a_row("low", seed=1)])
    assert not accepted([a_row("sfa7", "nonfinite", 90)])


def test_losses_are_compared_at_a_step_where_all_are_sound():
    rows = [a_row("a", seed=s, losses=(3.0, 2.0 + 0.1 * s)) for s in (0, 1)]
    rows += [a_row("b", "nonfinite", 50, seed=s) for s in (0, 1)]
    reference = [a_row("fp32", seed=s, losses=(3.0, 1.9)) for s in (0, 1)]
    (a, step, d), (_, early, _) = loss_differences(rows, reference)
    assert a == "a" and step == 100 and early == 0
    assert d.mean == pytest.approx(0.15) and d.n == 2
    table = loss_table(loss_differences(rows, reference)).data
    assert "| a | 100 | +0.150 |" in table and "| b | none | broke before" in table


def test_words_tell_nonfinite_from_diverged():
    rows = [a_row("low", "diverged", 190, label="plain softmax"), a_row("sfa7", "nonfinite", 90)]
    told = what_you_saw(rows, ["Lost."], verdicts({"sfa": None})).data
    assert "Plain softmax: diverged at 190" in told and "Sfa7: nonfinite at 90" in told
    assert "No stabilised run outlived" in told
    assert "| beta | sfa7 | nonfinite at 90 |" in sweep_table(rows, {"sfa7": "beta"}).data


def an_archive(rows, tmp_path, name="sfa-sweep", corpus="a"):
    return Archive(tmp_path / name / "x.json", {"corpus_sha256": [corpus]}, rows)


def test_single_changes_are_told_with_their_standing(tmp_path):
    rows = [a_row("low", "diverged", 190, seed=s, label="plain softmax") for s in (0, 1)]
    rows += [a_row("low", seed=2), a_row("low_output_fp32", seed=2, label="O")]  # no test
    rows += [a_row("delta_fp32", seed=s, label="delta") for s in (0, 1)]
    rows += [a_row("low_output_fp32", "diverged", 90, seed=s, label="O") for s in (0, 1)]
    rows += [a_row("stochastic_both", "onset", seed=s, label="both") for s in (0, 1)]
    rows = [row | {"onset_step": 50} for row in rows]
    sweep = an_archive(rows, tmp_path)
    (told,) = site_findings(sweep)
    assert "Plain softmax failed in 2 of 3" in told and "observed, 2 run(s) an arm" in told
    assert "saved by “delta”; not saved by “O”; some" in told and "under “both” (" in told
    assert "| ... O | 2 of 3 |" in site_table(sweep).data
    arms = {name for names in ONE_CHANGE.values() for name in names}
    assert (arms | set(ONE_CHANGE)) <= set(SFA_SWEEP.arm_names)


def test_the_row_sum_is_named_only_where_no_rounding_of_o_is_needed(tmp_path):
    names = ("guarded", *ONE_CHANGE["guarded"])
    rows = [a_row(name, "diverged", 190) for name in names if name != "guarded_rounded"]
    rows.append(a_row("guarded_rounded", "onset") | {"onset_step": 50})
    told = site_findings(an_archive(rows, tmp_path))
    assert len(told) == 2 and "1 of 1 showed an onset" in told[1]
    rows[-2] = a_row(rows[-2]["arm"])
    assert len(site_findings(an_archive(rows, tmp_path))) == 1


def test_statements_are_contradicted_only_by_runs_that_failed(tmp_path):
    plain = [a_row("low", "diverged", 1400), a_row("delta_fp32")]
    sound = an_archive([*plain, a_row("sfa7"), a_row("guarded")], tmp_path)
    assert against_paper({"sfa": sound}, an_archive([a_row("sfa7")], tmp_path)) == []
    broken = an_archive([*plain, a_row("sfa7", "nonfinite", 90)], tmp_path)
    sweep = [a_row("beta_4", "nonfinite", 90), a_row("stochastic_both", "diverged", 90)]
    first, second, third = against_paper({"sfa": broken}, an_archive(sweep, tmp_path))
    assert "1 of 1 seeds are a test: sfa7 1 of 1, delta_fp32 0 of 1" in first
    assert "1 of 1 ended nonfinite" in second and "stochastic_both 1 of 1" in third


def test_ties_are_compared_over_the_same_steps():
    rows = [a_row("low", losses=(3, 2)), a_row("guarded", seed=1)]
    assert mean_ties(rows, "low", until=150) == pytest.approx(0.6)
    assert mean_ties(rows, "low", until=1000) is None


def test_maps_have_every_value_of_their_parameter(tmp_path):
    sweep = an_archive([a_row(name, "nonfinite", 90) for name in SFA_SWEEP.arm_names], tmp_path)
    (points,) = map_points(sweep, BETA_MAP).values()
    assert len(points) == 10 and min(x for x, _ in points) == pytest.approx(0.001)
    for axis, log in ((BETA_MAP, True), (EPS_MAP, False)):
        figure = map_figure(map_points(sweep, axis), sweep.arm("low"), label="x", logarithmic=log)
        (axes,) = figure.axes
        values = {v for arms in axis.values() for v in arms.values()}
        assert len(axes.get_xticks()) == len(values)


def test_fp32_runs_are_those_of_the_same_batches(tmp_path):
    own = an_archive([a_row("fp32")], tmp_path, "sfa-muon")
    none = an_archive([], tmp_path, "sfa-muon")
    chapter1 = an_archive([a_row("fp32", seed=7)], tmp_path, "failure")
    other = an_archive([a_row("fp32")], tmp_path, "failure", corpus="b")
    assert fp32_runs(own, chapter1) == own.rows and fp32_runs(none, chapter1) == []
    first = an_archive([], tmp_path, "sfa")
    assert fp32_runs(first, chapter1) == chapter1.rows and fp32_runs(first, other) == []


def test_settings_differ_where_the_table_says():
    header, _, *lines = settings_table(SFA_SETTINGS).data.split("\n")
    assert "`optimizer`" in header and "probes" not in header
    assert len(lines) == len(SFA_SETTINGS) and lines[0].startswith("| sfa |")


def test_price_compares_ours_with_ours_and_names_what_is_missing():
    def bench(name, ms):
        return dict(direction="forward", causal=True, head_dim=64, seq_len=1024,
                    implementation=name, ms_p50=ms)  # fmt: skip

    rows = [bench("ours-paper", 2.0), bench("ours-stabilized", 2.2), bench("sdpa-flash", 1.0)]
    rows.append(bench("flex", 0.5))
    rows.append(bench("flex", 0.1) | {"error": "none here"})
    table = price_table(rows).data
    assert "1.100" in table and "| 1.000 |" in table and "| 2.200 |" in table and "none" in table
    assert sfa_cost(rows) == "+10 to +10 % forward" and sfa_cost([]) == "not measured"


def test_switches_are_arms_of_the_sweep_and_bear_their_price(tmp_path):
    assert {arm for arm, *_ in SWITCHES} <= set(SFA_SWEEP.arm_names)
    table = switch_table(an_archive([a_row("sfa2", "nonfinite", 90)], tmp_path), "+10 %").data
    published = table.split("\n")[-1]
    assert "+10 %, and a bound on scores" in published and "nonfinite at 90" in published
    assert table.count("not run") == len(SWITCHES) - 1


def test_figures_draw_one_mark_per_run_and_one_bound_per_beta():
    rows = [a_row("low", "diverged", 190), a_row("sfa7", "nonfinite", 90), a_row("guarded")]
    (axis,) = fates_figure(rows).axes
    assert len(axis.lines) == 3 and len(axis.get_yticks()) == 3
    (axis,) = scores_figure(rows, {"sfa7": 7.0}).axes
    assert any(abs(line.get_ydata()[0] - 87.25 / 6) < 1e-6 for line in axis.lines)
    assert len(weights_figure({"a": PUBLISHED}, "e4m3").axes) == 2
    assert len(scale_figure({"a": PUBLISHED}, ["bf16", "fp16"]).axes) == 2
