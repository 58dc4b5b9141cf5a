"""Chapter 3 on crafted heads: what each measure says where the answer is known."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import torch

from book import (
    answer,
    appendix_d,
    chapter3,
    direction,
    direction_figures,
    drift,
    error_findings,
    key_side,
)
from book.captured import captured_heads
from book.evidence import Archive
from book.experiment_runs import jobs
from book.experiments import (
    ANSWER,
    FAILURE,
    LIVE_ERRORS,
    LOW,
    LOW_RANK,
    errors,
    isolation,
    unbiased,
)
from book.records import head_curves
from gpt2.config import make_config
from kernels import emulated
from kernels.numerics import ScopedNumerics, parse_numerics


def write_head(folder, step, place=0, seed=0):
    """A captured head of 4 sequences of 24 rows, D = 8, C = 12, with W_Q growing by the step."""
    g = torch.Generator().manual_seed(seed + step)
    X = torch.randn(4, 24, 12, generator=g) + 1.0
    W_Q = torch.randn(8, 12, generator=g) * (1 + step / 100)
    arrays = dict(q=X @ W_Q.T, X=X, W_Q=W_Q)
    arrays |= {n: torch.randn(4, 24, 8, generator=g) for n in ("k", "v", "dO")}
    arrays["k"] += 2.0
    arrays = {n: x.numpy() for n, x in arrays.items()} | dict(step=step, layer=1, head=place)
    numerics = parse_numerics("exact,output_bits=2").to_json()
    np.savez(folder / f"step_{step:08d}-L1H{place}.npz", **arrays, numerics=numerics)


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captures")
    for step in (0, 100, 200, 300):
        for place in (0, 1):
            write_head(folder, step, place, seed=7 * place)
    return direction.measure(captured_heads(folder.glob("*.npz")), draws=5)


def with_errors(moment, c):
    a, b, _ = moment.weight.terms
    weight = dataclasses.replace(moment.weight, terms=(a, b, c))
    return dataclasses.replace(moment, weight=weight, coherence=weight.coherence(draws=5))


def test_moments_are_by_head_and_step_and_the_identity_holds(moments):
    assert list(moments) == [(1, 0), (1, 1)]
    assert [m.step for m in moments[1, 0]] == [0, 100, 200, 300]
    assert all(m.weight.residual < 1e-4 for m in moments[1, 0])
    assert direction.fastest(moments) in moments
    assert all(m.projection <= m.spectral_norm * (1 + 1e-9) for m in moments[1, 1])


def test_heads_that_are_not_finite_any_more_are_left_out(tmp_path):
    write_head(tmp_path, 0)
    write_head(tmp_path, 100)
    broken = dict(np.load(tmp_path / "step_00000100-L1H0.npz"))
    broken["v"][0, 0, 0] = np.inf
    np.savez(tmp_path / "step_00000100-L1H0.npz", **broken)
    found = direction.measure(captured_heads(tmp_path.glob("*.npz")), draws=2)
    assert [m.step for m in found[1, 0]] == [0]


def test_stages_say_whether_a_capture_lies_inside_the_failure(moments):
    series = moments[1, 0]
    steps = {n: m.step for n, m in direction.stages(series, 220).items()}
    assert steps == {"untrained": 0, "half-way": 100, "at the end": 200, "failing": 300}
    assert "failing" not in direction.stages(series, None)
    found = direction.stages(series, 390, 110)
    assert list(found) == ["untrained", "at the onset", "half-way", "at the end"]
    assert [m.step for m in found.values()] == [0, 100, 200, 300]
    assert "at the onset" not in direction.stages(series, 220, 190)  # that is the last one


def test_one_sign_is_told_from_random_signs(moments):
    moment = moments[1, 0][0]
    size = moment.weight.terms[2].abs()
    coin = torch.randint(0, 2, size.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    one_sign, mixed = with_errors(moment, size), with_errors(moment, size * coin)
    assert one_sign.sign_p_value == pytest.approx(1 / 100) and one_sign.coherence.gain > 3
    assert mixed.sign_p_value > 0.05
    assert one_sign.coherence.approximation_cosine > 0.9


def test_pairwise_cosines_of_random_directions_are_near_zero(moments):
    moment = moments[1, 0][0]
    assert direction.random_pairs(moment).std() < 0.15
    assert direction.pairwise(moment).mean() > 0.2  # keys share a mean, and so do inputs
    found = direction.angles(moments[1, 0])
    assert torch.allclose(found.diagonal(), torch.ones(4)) and torch.allclose(found, found.T)


def test_random_directions_have_a_gain_near_one_and_one_sign_has_more(moments):
    captured = moments[1, 0][0].captured
    gains = direction.injected_gains(captured.head, captured.numerics)
    assert gains["random_direction"] == pytest.approx(1.0, abs=0.5)
    assert gains["all_positive"] > 3
    for kind in ("mirror", "own_direction"):
        assert gains[kind] == pytest.approx(gains["sham"], rel=1e-3)
    assert gains["sham"] == pytest.approx(moments[1, 0][0].coherence.gain, rel=1e-3)


def test_bias_is_found_where_every_error_has_one_sign(moments):
    series = moments[1, 0]
    fair = direction.bias(series)
    assert abs(fair.mean.z) < 4 and 0.3 < fair.positive < 0.7
    pushed = []
    for moment in series:
        delta = dataclasses.replace(moment.delta, error=moment.delta.error.abs())
        pushed.append(dataclasses.replace(moment, delta=delta))
    found = direction.bias(pushed)
    assert found.positive == 1 and found.mean.z > 10 and found.total > found.sigma


def test_features_add_up_to_the_sum_of_errors(moments):
    moment = moments[1, 0][0]
    signs = direction.feature_signs(moment)
    assert signs.total == pytest.approx(float(moment.delta.error.sum()))
    assert signs.dO.shape == signs.error.shape == (8,)


def test_columns_are_similar_where_the_left_factors_are():
    a, b = np.array([1.0, 2.0]), np.array([3.0, -1.0, 0.0])
    first, second = np.outer(a, b), np.outer(2 * a, np.abs(b))
    cosines = direction_figures.column_cosines(first, second)
    assert cosines == pytest.approx([1.0, -1.0, 0.0])


def test_figures_and_tables_are_drawn(moments):
    series = moments[1, 0]
    chosen = direction.stages(series, 220)
    figures = direction_figures
    for figure in (
        figures.four_terms(series[0], series[1], (3, 40)),
        figures.cosine_histograms(chosen),
        figures.spectra(chosen),
        figures.cosine_bands(moments),
        figures.direction_map(series),
        figures.coherence_panels(series),
        figures.error_sizes(moments),
        figures.features(series[0]),
        figures.growth(moments),
    ):
        assert figure.axes
    stage = chapter3.stage_table(chosen).data
    assert "failing, step 300" in stage
    assert chapter3.gains_table(chosen).data.count("random_direction") == 1
    assert chapter3.identity_table(moments, 100).data.count("layer 1, head") == 2
    told = chapter3.what_you_saw(moments, chosen, [], {"forked": None}, None).data
    assert "step 200" in told and "step 300" in told
    assert "biased beyond 3 σ" in chapter3.against_the_paper(moments, {}, None).data


# -- experiments ----------------------------------------------------------------------------------


def test_interventions_share_the_failing_forward_pass():
    low = parse_numerics(LOW)
    for arm in errors().arms:
        scoped = ScopedNumerics.parse(arm.attention)
        for layer in range(2):
            n = scoped.for_layer(layer, 2)[0]
            assert n.at(delta_error=None, delta_output=None) == low, arm.name
    assert set(LIVE_ERRORS["mini"]) <= set(LIVE_ERRORS["cpu"])
    assert set(LIVE_ERRORS["cpu"]) <= set(errors().arm_names) == set(error_findings.KEEPS)
    assert "injected" not in errors("mini").arm_names  # no moments were measured for it


def test_forks_start_from_chapter_1s_failing_run_as_chapter_2s_do():
    forked = errors(forked=True)
    mine = jobs(forked, seeds=[2], arms=["mirror"])[0]
    theirs = jobs(FAILURE, seeds=[2], arms=["low"])[0]
    assert mine.arm.name == "low" and mine.config.identity() == theirs.config.identity()
    assert forked.arm("mirror").at == isolation().arm("delta_fp32").at
    assert forked.until == isolation().until


def test_running_sums_are_kept_with_their_band():
    values = np.ones((50, 1, 2)) * [1.0, -2.0]
    kept = head_curves(
        {"step": np.arange(50), "delta_error_mean": values},
        ("delta_error_mean:sum", "delta_error_mean:band"),
    )
    assert kept["delta_error_mean:sum"]["value"][-1] == [[50.0, -100.0]]
    assert kept["delta_error_mean:band"]["value"][-1][0] == pytest.approx(
        [50**0.5, 200**0.5], rel=1e-3
    )
    names = set(LOW_RANK.heads)
    assert {"delta_error_mean:sum", "update_error_cosine"} <= names
    make_config("cpu", dict(LOW_RANK.base))


def drifting_row(mean, rms=2.0, onset=None):
    """A record whose e has these means [layers][heads] at every fifth step, and one rms."""
    steps = np.arange(0, 250, 5)
    metrics = {"step": steps, "delta_error_mean": np.ones((50, 1, 1)) * mean}
    metrics["delta_error_rms"] = np.full((50, *np.shape(mean)), rms)
    names = ("delta_error_mean:sum", "delta_error_mean:band", "delta_error_rms")
    told = {"arm": "low", "label": "low", "seed": 0, "kind": "onset" if onset else "healthy"}
    told |= {"steps": 245, "onset_step": onset, "heads": head_curves(metrics, names)}
    return told | {"curves": {"train_loss": {"step": [0, 245], "value": [2.0, 1.0]}}}


def test_drift_is_the_mean_in_its_rms_and_the_sum_in_its_coins_sigma():
    found = drift.drift(drifting_row([[0.1, -0.2]]))
    assert found.relative == pytest.approx(np.array([[0.05, -0.1]]), rel=1e-3)
    assert found.sigmas == pytest.approx(np.array([[50**0.5, -(50**0.5)]]), rel=1e-3)
    early = drift.drift(drifting_row([[0.1, -0.2]], onset=100))
    assert early.end == 100 and early.sigmas[0, 0] == pytest.approx(21**0.5, rel=1e-2)
    rows = [drifting_row([[0.1, -0.2]]), drifting_row([[0.2, -0.2]])]
    assert "positive in 2 of 4 heads, -10.0% to +10.0% of its rms" in drift.drift_words(rows)
    assert "and 4 sums leave" in drift.drift_words(rows)
    table = drift.drift_table(rows).data
    assert "+7.50%" in table and "2 of 2 runs" in table and "0 of 2 runs" in table
    assert len(direction_figures.cumulative(rows, (0, 1)).axes) == 1


def answered_metrics(clean, at=50, late=9.0):
    """Metrics of one layer, two heads, from step 0 to 450; e's rms is 2, and from 400 on it is as
    `late` says. The answer is 0.1 of the rms in the first head and 0.2 in the second."""
    steps = np.arange(0, 500, at)
    one = np.where(steps < 400, 1.0, late)[:, None, None]
    answer = one * 2.0 * np.array([[0.1, 0.2]])
    clean = one * 2.0 * np.array([[clean, -clean]])
    rms = np.full_like(answer, 2.0)
    means = dict(error_mean=clean + answer, error_rms=rms, clean_mean=clean, answer_mean=answer)
    return {"step": steps} | {f"delta_{name}": values for name, values in means.items()}


def test_the_mean_of_e_is_told_by_its_parts_up_to_the_first_sign():
    told = {"arm": "low", "label": "low", "kind": "onset", "steps": 450, "onset_step": 350}
    told["curves"] = {"train_loss": {"step": [0, 450], "value": [2.0, 1.0]}}
    rows = [
        told | {"seed": seed, "heads": head_curves(answered_metrics(clean), ANSWER)}
        for seed, clean in enumerate([0.01, 0.03])
    ]
    found = answer.parts(rows[1])
    assert found.answer == pytest.approx(np.array([[0.1, 0.2]]), rel=1e-4)
    assert found.clean == pytest.approx(np.array([[0.03, -0.03]]), rel=1e-4)
    assert found.error == pytest.approx(found.answer + found.clean, rel=1e-4)
    other = told | {"seed": 2, "heads": {}}  # keeps no parts
    table = answer.answer_table([*rows, other]).data
    assert "| +15.00% ± 0.00% | +0.00% ± 0.00% | +15.00% ± 0.00% | 4 of 4 heads |" in table
    words = answer.answer_words([*rows, other])
    assert "+15.00% by dO's answer" in words and "+0.00% with a clean dO" in words
    assert "positive in 4 of them" in words


def test_what_was_foretold_of_roundings_without_a_bias_is_held_against_the_outcomes():
    rows = outcomes(low=5, redrawn=0, stochastic=4, stochastic_redrawn=3)
    told = answer.verdict_words(rows)
    assert "Failing run: 5 of 5 failed (verdict)." in told
    assert "Redrawn: 0 of 5 failed, as foretold (verdict)" in told
    assert "Stochastic: 4 of 5 failed, mostly so (verdict)" in told
    assert "Stochastic_redrawn: 3 of 5 failed, not as foretold" in told
    assert "decide nothing" in answer.verdict_words(outcomes(low=0, redrawn=0))


def test_a_live_run_takes_each_step_as_a_draw():
    class Run:
        metrics = staticmethod(lambda: answered_metrics(0.01))

    table = answer.live_table(Run, 350).data
    assert "layer 0, head 1" in table and "+20.00% ± 0.00%" in table and "-1.00%" in table
    assert "+20.00% ± 0.00%" not in answer.live_table(Run, None).data
    Run.metrics = staticmethod(lambda: {"step": np.arange(3)})
    assert "does not keep" in answer.live_table(Run, None).data


def test_a_square_of_the_error_halves_in_its_rms_with_every_bit():
    scatter = np.random.default_rng(0).normal(0, 1e-3, (12, 2, 2))
    heads = np.array([[0.1, 0.2], [0.05, 0.4]])
    found = {
        bits: answer.Parts(scatter, scatter, heads * 2.0 ** (2 - bits) * (1 + scatter))
        for bits in (2, 4, 7)
    }
    assert answer.slopes(found) == pytest.approx(np.full((2, 2), -1), abs=1e-3)
    words = answer.bits_words(found)
    assert "-1.00 ± 0.00 log2 per fraction bit" in words and "in 12 of 12 heads" in words
    left, right = answer.bits_figure(found).axes
    assert left.get_yscale() == "log" and len(right.containers) == 4
    many = {b: answer.Parts(*(np.tile(x, (1, 2, 3)) for x in parts)) for b, parts in found.items()}
    with warnings.catch_warnings():  # of a legend that leaves no room
        warnings.simplefilter("error")
        figure = answer.bits_figure(many)
        figure.canvas.draw()
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["half with every bit", *(f"layer {i}" for i in range(4))]
    assert answer.with_bits("paper", 5) == "paper,matched_bits=5"
    assert answer.with_bits("paper,output_bits=4", 5) == "paper,output_bits=5"


def test_forks_name_the_head_of_the_largest_answer_and_when_it_outgrows_the_rest():
    onset = {"layer": 0, "head": 1, "step": 350}
    kept = {"heads": head_curves(answered_metrics(0.01), ANSWER)}
    told = {"kind": "onset", "steps": 450, "onset_step": 350, "label": "no change"}
    told |= {"recipe": "mini-d12-w192-lr3", "onset": onset}
    told["curves"] = {"train_loss": {"step": [0, 450], "value": [2.0, 1.0]}}
    rows = [told | kept, told | kept | {"onset": None, "label": "other"}, told | {"heads": {}}]
    table = answer.places_table(rows).data
    assert table.count("L0 H1: +20.00%") == 2 and "| L0 H1 |" in table and "| none |" in table
    assert answer.steps_to_outgrow(0.01, 10_000) == pytest.approx(1)
    assert "It is largest in L0 H1; 1 of 1 onsets are in the head" in answer.forks_words(rows)[0]
    assert answer.forks_words(rows[2:]) == [] and "*No run" in answer.places_table(rows[2:]).data


def test_unbiased_roundings_differ_in_what_the_names_say():
    whole = unbiased()
    texts = {arm.name: parse_numerics(arm.attention) for arm in whole.arms}
    plain, noisy = texts["low"], texts["stochastic"]
    assert plain == parse_numerics(LOW) and noisy.output.rounding == "stochastic"
    assert noisy == plain.at(output=noisy.output, unnormalized=noisy.output)
    assert texts["stochastic_redrawn"] == noisy.at(delta_output=noisy.output)
    assert texts["redrawn"] == plain.at(delta_output=noisy.output)
    forked = unbiased("mini-d12-w192-lr3")
    drawn = parse_numerics(forked.arm("redrawn").attention).delta_output
    assert str(drawn) == "bf16:stochastic"
    assert forked.arm("low").config(forked, 0) == errors("mini-d12-w192-lr3", forked=True).arm(
        "low"
    ).config(forked, 0)
    assert all(a.at and "delta_answer@100" in dict(a.changes)["probes"] for a in forked.arms[1:])


def test_the_error_of_dW_K_is_the_difference_of_two_backward_passes(moments):
    moment = moments[1, 0][1]
    head, low = moment.captured.head, moment.captured.numerics
    q, k, v, dO = (x.unsqueeze(1) for x in (head.q, head.k, head.v, head.dO))
    options = dict(causal=True, scale=8**-0.5, seed=0)

    def dW_K(numerics):
        result = emulated.forward(q, k, v, numerics=numerics, probe=True, **options)
        saved = result.out, result.lse, result.delta_output
        dk = emulated.backward(dO, q, k, v, *saved, numerics=numerics, **options)[1]
        return torch.einsum("ntd,ntc->dc", dk[:, 0].double(), head.X.double())

    whole = dW_K(low.at(delta_output="fp32"))
    found = key_side.key_side(moment)
    torch.testing.assert_close(found.difference, whole - dW_K(low), rtol=1e-3, atol=1e-4)
    assert found.ratio == pytest.approx(float(found.difference.norm() / whole.norm()), rel=1e-3)
    assert "half-way" in key_side.sides_table({"half-way": moment}).data


def record(arm, seed, step=None):
    kind = "diverged" if step else "healthy"
    told = dict(arm=arm, label=arm, seed=seed, kind=kind, steps=step or 4_000, held_out_loss=1.8)
    told["best_held_out_loss"] = 1.7
    return told | dict(diverged_step=step, nonfinite_step=None)


def outcomes(**failing):
    """Five seeds an arm; arm=n: in so many of them it fails."""
    return [
        record(arm, s, 2_000 + s if s < count else None)
        for arm, count in failing.items()
        for s in range(5)
    ]


def test_answers_say_what_outcomes_show_and_no_more():
    rows = outcomes(low=5, mirror=0, random_sign=1, centred=5)
    told = " ".join(error_findings.answers(rows))
    assert "Failing run: 5 of 5 failed (verdict)." in told and "dQ" not in told
    assert "Random signs: 1 of 5 failed, at 2,000." in told
    assert "Every sign turned: fewer failures (p = 0.004), so the sign" in told
    assert "size alone, in the same rows, is not what it takes" in told
    assert "Without its mean: no fewer failures, so the failure needs no bias" in told
    two = [
        record(arm, s, 900 if arm == "low" else None) for arm in ("low", "mirror") for s in (0, 1)
    ]
    told = error_findings.verdicts(two)
    assert "(observed, 2 run(s) an arm)" in told[0]
    assert "chance can do that (p = 0.17)" in told[1]
    assert "decide nothing" in error_findings.verdicts([record("low", 0)])[0]
    few = outcomes(low=5) + [record("mirror", s) for s in (0, 1)]
    assert "(p = 0.048; observed, 2 run(s) an arm)" in error_findings.verdicts(few)[1]
    table = error_findings.intervention_table(errors(), rows).data
    assert "2,000 to 2,004" in table and "0 of 5" in table


@pytest.mark.parametrize(
    "own, keys, words",
    [
        (0, 0, "It takes both"),
        (3, 0, "by way of $dQ$ (one against the other: p = 0.083)"),
        (0, 5, "by way of $dK$ (one against the other: p = 0.004)"),
        (5, 5, "Either can"),
    ],
)
def test_one_gradient_or_both(own, keys, words):
    told = error_findings.verdicts(outcomes(low=5, own_direction=own, dK_alone=keys))
    assert any(words in sentence for sentence in told)


def test_the_shared_direction_is_held_against_its_control():
    rows = outcomes(low=5, own_direction=2, random_direction=2, leading_direction=5)
    told = error_findings.verdicts(rows)[2:]
    assert "spreading its directions prevented no failure" in told[0] and "it did." in told[1]
    rows = outcomes(low=5, own_direction=0, random_direction=0, leading_direction=0)
    told = error_findings.verdicts(rows)[2:]
    assert "cannot say what direction does" in told[0] and told[1].endswith("it did not.")


def test_the_account_says_link_by_link_what_is_left_of_it():
    kinds = dict(low=4, mirror=0, random_sign=0, centred=0, shuffled=5)
    told = error_findings.account(outcomes(**kinds, own_direction=0, dK_alone=3)).data
    assert "its size is not enough" in told and "only the sum counts" in told
    assert "as it is 4 of 5 failed, in $dQ$ alone 0 of 5 failed; p = 0.024" in told
    assert "3 of 5 failed, as it is 4 of 5 failed (p = 0.5): so few runs cannot tell" in told
    exact = outcomes(low=5, dQ_alone=5)  # the arm that is exact decides
    told = error_findings.account(outcomes(**kinds, own_direction=0), exact).data
    assert "By $W_Q$, as the paper has it" in told
    exact = outcomes(low=5, dQ_alone=0, dK_alone=0)
    told = error_findings.account(outcomes(**kinds, dK_alone=3), exact).data
    assert "3 of 10 failed, as it is 9 of 10 failed (p = 0.0099): it takes both" in told
    exact = outcomes(low=5, dQ_alone=0, dK_alone=0, delta_fp32=0)
    exact[-6]["held_out_loss"] = 2.4  # of dK alone, seed 4; its twin ends at 1.8
    told = error_findings.account(outcomes(**kinds, dK_alone=3), exact).data
    assert "1 more ended at least 0.5 nats above their twins" in told
    told = error_findings.account(outcomes(**kinds), outcomes(low=5, dQ_alone=0)).data
    assert "It takes the keys." in told
    told = error_findings.account(outcomes(**(kinds | {"mirror": 5, "shuffled": 2}))).data
    assert "the arms disagree" in told and told.count("Open") == 3
    assert "not all archived" in error_findings.account(outcomes(low=4)).data


def test_forks_of_runs_that_lived_are_left_out():
    rows = outcomes(low=4, mirror=0)
    kept = Archive(None, {}, rows)
    assert "with seed 4" in chapter3.archived_verdicts("forked", kept)[0]
    assert "4 of 4 failed" in chapter3.archived_verdicts("forked", kept)[1]
    assert "4 of 5 failed" in chapter3.archived_verdicts("from the start", kept)[0]


# -- a real model's parts -------------------------------------------------------------------------


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_llama_is_measured_per_layer_and_head_and_left_as_it_was():
    model, tokens = (
        llama(),
        torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(1)),
    )
    before, attention = model(tokens[None]).logits, model.config._attn_implementation
    found = appendix_d.measure(model, tokens)
    assert model.config._attn_implementation == attention
    assert torch.equal(model(tokens[None]).logits, before)
    for stats in found.values():
        assert np.shape(stats["tie_rate"]) == np.shape(stats["first_key"]) == (2, 4)
    assert "column_cosine" in found["fp32"] and "column_cosine" not in found["paper"]
    same = appendix_d.measure(model, torch.full((40,), 7), {"bf16": "exact,scores=bf16.0"})
    assert np.mean(same["bf16"]["tie_rate"]) > 0.5  # one token over and over, 0 fraction bits
    assert len(appendix_d.summary_rows(found, "text")) == 3
    assert "of 8 heads" in appendix_d.cosine_words(found)


def test_models_that_cannot_be_measured_are_refused(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="cannot load"):
        appendix_d.load_model(tmp_path)
    with pytest.raises(ValueError, match="Llama-like"):
        appendix_d.measure(torch.nn.Linear(2, 2), torch.arange(3))


def test_the_archive_of_the_real_model_is_whole():
    kept = appendix_d.latest()
    assert kept and kept["machine"] and kept["date"] and "/" not in kept["model"]
    for stats in kept["found"].values():
        assert set(stats) == set(kept["numerics"])
        assert np.shape(stats["fp32"]["column_cosine"]) == np.shape(stats["paper"]["tie_rate"])
    assert len(json.dumps(kept)) < 100_000
