"""Probes on a small real model: right values, no trace left behind, no crash on broken weights."""

import json

import numpy as np
import pytest
import torch

from gpt2 import measures, probes
from gpt2.config import make_config
from gpt2.model import GPT
from gpt2.probes import REGISTRY, ProbeContext, Probes, parse_spec, register

DEAR = ("delta_error@1", "weight_gradient_error@1", "update@1", "update_error@1")
DEAR += ("shared_direction@1",)
SMALL = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4, probe_interval=10)


class Text:
    """A corpus of random bytes with the interface that probes use."""

    def __init__(self, n=2000):
        self.held_out = np.random.default_rng(0).integers(0, 64, n).astype(np.uint16)

    def batch(self, split, starts, block_size):
        rows = np.stack([self.held_out[s : s + block_size + 1] for s in starts]).astype(np.int64)
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


def make(step=0, optimizer=None, **overrides):
    config = make_config("cpu", {**SMALL, "attention": "paper", **overrides})
    torch.manual_seed(0)
    model = GPT(config, 64)
    with torch.no_grad():  # a fresh model attends uniformly; give it scores to round and to tie
        for layer in model.attention_layers:
            layer.c_attn.weight.mul_(20)
    x, y = Text().batch("held_out", np.arange(4) * 100, config.block_size)
    return ProbeContext(model, config, step, x, y, optimizer=optimizer, corpus=Text())


def test_cheap_probes_give_strict_json_of_layers_and_heads():
    ctx = make()
    row = Probes(ctx.config).before_update(ctx)
    assert "probe_errors" not in row
    names = ("spectral_norm_q", "spectral_norm_k", "tie_rate", "ones_share", "max_logit")
    for name in (*names, "first_key_mass"):
        assert np.asarray(row[name]).shape == (2, 2), name
    json.dumps(row, allow_nan=False)
    expected = torch.linalg.svdvals(ctx.model.attention_layers[1].w_q().detach())[1, 0]
    assert row["spectral_norm_q"][1][1] == pytest.approx(expected.item(), rel=1e-5)
    assert 0 < np.max(row["tie_rate"]) < 1


def test_tie_rate_counts_ties_after_the_numerics_rounded_the_scores():
    rounded = Probes(make().config).before_update(make())["tie_rate"]
    ctx = make(attention="exact")
    exact = Probes(ctx.config).before_update(ctx)["tie_rate"]
    assert np.mean(rounded) > np.mean(exact)
    sdpa = make(attention="sdpa")
    found = Probes(sdpa.config).before_update(sdpa)
    assert found["tie_rate"] == exact and "probe_errors" not in found


def test_probes_see_the_same_held_out_batch_at_every_step_and_leave_no_trace():
    ctx = make(dropout=0.1)
    state, gradient = torch.get_rng_state(), torch.ones(3)
    weight = ctx.model.attention_layers[0].c_attn.weight
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    first = Probes(ctx.config).before_update(ctx)
    ctx.scratch.clear()
    ctx.step = 10
    assert Probes(ctx.config).before_update(ctx) == first
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(weight, before) and torch.equal(weight.grad, torch.ones_like(weight))
    assert ctx.model.training and gradient.sum() == 3


def test_delta_error_equals_the_difference_of_the_two_deltas():
    ctx = make(probes=DEAR)
    row = Probes(ctx.config).before_update(ctx)
    assert np.asarray(row["coherent_gain"]).shape == (2, 2) and "probe_errors" not in row
    taps, douts, _ = ctx.training_taps()
    tap, dout = taps[1], douts[1]
    low = (dout.double() * tap.out.double()).sum(-1)
    high = (dout.double() * tap.probe.out_fp32.double()).sum(-1)
    assert row["delta_error_mean"][1][0] == pytest.approx((low - high)[:, 0].mean().item())
    assert row["delta_error_rms"][1][0] > 0


def gradients_of_outputs(ctx, text):
    """(taps, dO of each layer) with attention `text`, on the context's batch."""
    ctx.model.set_attention(text)
    try:
        ctx.scratch.clear()
        return ctx.training_taps()[:2]
    finally:
        ctx.model.set_attention(ctx.config.attention)
        ctx.scratch.clear()


@pytest.mark.parametrize("draws", ["", ":stochastic"])
def test_the_answer_of_dO_is_what_an_unrounded_O_of_that_layer_takes_away(draws):
    """By the other way: numerics that round no O in one layer, all below it being the same."""
    low = f"paper,matched_bits=2,unnormalized=bf16.2{draws},output=bf16.2{draws}"
    ctx = make(attention=low, probes=("delta_answer@1",))
    row = Probes(ctx.config).before_update(ctx)
    taps, own = gradients_of_outputs(ctx, low)
    assert "probe_errors" not in row and not ctx.model.attention_layers[0].c_proj._forward_hooks
    for index in (0, 1):
        text = f"{low}; L{index} -> {low},unnormalized=fp32,output=fp32"
        others, clean = gradients_of_outputs(ctx, text)
        assert torch.equal(taps[index].q, others[index].q)
        error = taps[index].out.double() - taps[index].probe.out_fp32.double()
        wanted = (error * (own[index] - clean[index]).double()).sum(-1).mean((0, 2))
        found = torch.tensor(row["delta_answer_mean"][index], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-12)
        parts = found + torch.tensor(row["delta_clean_mean"][index], dtype=torch.float64)
        whole = torch.tensor(row["delta_error_mean"][index], dtype=torch.float64)
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-15)
        assert wanted.abs().max() > 0


def test_the_answer_of_dO_is_the_second_derivative_along_the_error():
    """With 7 bits e is small: sum of e (dO - dO_clean) against losses at O_hp and far along e."""
    ctx = make(attention="paper,inputs=fp32", probes=("delta_answer@1",))
    row = Probes(ctx.config).before_update(ctx)
    taps, _, _ = ctx.training_taps()
    layer, tap = ctx.model.attention_layers[1], taps[1]
    ctx.model.double().eval().set_attention("exact,compute=fp64")
    high = tap.probe.out_fp32.double()
    error = tap.out.double() - high

    def loss(t):
        out = (high + t * error).transpose(1, 2).reshape(tap.x.shape)
        handle = layer.c_proj.register_forward_hook(lambda m, x, y: out @ m.weight.T)
        with torch.no_grad():
            _, value = ctx.model(ctx.x, ctx.y)
        handle.remove()
        return value.item()

    size = 50.0  # in units of e: far enough apart to be told from fp64's own rounding
    curvature = (loss(size) - 2 * loss(0.0) + loss(-size)) / size**2
    rows = error.shape[0] * error.shape[2]
    assert curvature > 0
    assert sum(row["delta_answer_mean"][1]) * rows == pytest.approx(curvature, rel=0.05)


def test_weight_gradient_error_is_what_the_twin_numerics_change():
    """dW_Q of `paper` minus dW_Q of its twin, with dS unrounded so that nothing else acts."""
    low = "paper,grad_scores=fp32,gradients=fp32,inputs=fp32"
    ctx = make(attention=low, probes=("weight_gradient_error@1",))
    change = probes.gradient_probes.weight_changes(ctx)
    x, y = ctx.x, ctx.y

    def gradient(text):
        ctx.model.set_attention(text)
        _, loss = ctx.model(x, y)
        last = ctx.model.attention_layers[1]  # the layer above it is the same in both
        (g,) = torch.autograd.grad(loss, last.c_attn.weight)
        return g[:16].view(2, 8, 16)

    wanted = gradient(low) - gradient(low + ",delta_output=fp32")
    torch.testing.assert_close(change[1], wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


def test_exact_attention_has_no_delta_error():
    ctx = make(attention="exact", probes=DEAR)
    row = Probes(ctx.config).before_update(ctx)
    assert np.abs(row["delta_error_rms"]).max() < 1e-7
    assert np.max(row["dwq_error_ratio"]) < 1e-4


def train_step(ctx, runner):
    optimizer = ctx.optimizer
    row = runner.before_update(ctx)
    _, loss = ctx.model(ctx.x, ctx.y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), ctx.config.grad_clip)
    ctx.scratch["grad_norm"] = norm.item()
    optimizer.step()
    optimizer.zero_grad()
    return row


def test_update_probes_measure_the_step_that_was_taken():
    ctx = make(probes=DEAR)
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=1e-3, weight_decay=0)
    runner = Probes(ctx.config)
    before = ctx.query_weights().clone()
    row = runner.before_update(ctx)
    _, loss = ctx.model(ctx.x, ctx.y)
    loss.backward()
    ctx.scratch["grad_norm"] = 0.5
    ctx.optimizer.step()
    row |= runner.after_update(ctx)
    assert "probe_errors" not in row
    change = ctx.query_weights() - before
    ratio = (change.norm(dim=(2, 3)) / before.norm(dim=(2, 3))).tolist()
    assert row["update_ratio"][0] == pytest.approx(ratio[0], rel=1e-5)
    assert np.abs(row["update_cosine"]).max() <= 1 and np.min(row["update_error_ratio"]) > 0
    assert not ctx.scratch


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_weights_do_not_raise_and_only_their_head_is_lost(bad):
    ctx = make(probes=DEAR)
    with torch.no_grad():
        ctx.model.attention_layers[0].w_q()[1, 0, 0] = bad
    row = Probes(ctx.config).before_update(ctx)
    norms = np.asarray(row["spectral_norm_q"])
    assert np.isnan(norms).sum() == 1 and np.isnan(norms[0, 1])


def test_an_exception_in_a_probe_is_recorded_and_the_others_run():
    @register("broken", cost="cheap")
    def broken(ctx):
        raise RuntimeError("linalg.svd: failed to converge\nmore")

    try:
        ctx = make()
        row = Probes(ctx.config).before_update(ctx)
    finally:
        del REGISTRY["broken"]
    assert row["probe_errors"] == {"broken": "RuntimeError: linalg.svd: failed to converge"}
    assert "spectral_norm_q" in row


def test_muon_has_no_adam_moments_and_says_so():
    ctx = make(probes=("update_error@1",))
    ctx.optimizer = torch.optim.SGD(ctx.model.parameters(), lr=1e-3)
    runner = Probes(ctx.config)
    train_step(ctx, runner)
    assert "AdamW" in runner.after_update(ctx)["probe_errors"]["update_error"]


def test_schedule_of_cheap_and_dear_probes():
    config = make_config(
        "cpu", {**SMALL, "probes": ("update", "delta_error@7", "update_error@3-5")}
    )
    runner = Probes(config)
    assert runner._names(50)[-1] == "update" and "spectral_norm_q" in runner._names(10)
    assert runner._names(7) == ["delta_error"] and runner._names(4) == ["update_error"]
    assert not runner.due(6) and runner.due(20)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("delta_eror", "did you mean 'delta_error'"),
        ("update@0", "use at least 1"),
        ("update@@3", "not understood"),
    ],
)
def test_bad_probe_names_and_schedules_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_spec(text)


def test_grouped_queries_and_qk_norm():
    ctx = make(n_kv_head=1, probes=DEAR)
    row = Probes(ctx.config).before_update(ctx)
    assert np.asarray(row["spectral_norm_k"]).shape == (2, 1)
    assert np.asarray(row["dwq_error_ratio"]).shape == (2, 2)
    normed = make(qk_norm=True, probes=("weight_gradient_error@1",))
    errors = Probes(normed.config).before_update(normed)["probe_errors"]
    assert "qk_norm" in errors["weight_gradient_error"]


def test_every_probe_has_a_cost_and_a_summary():
    assert {k.cost for k in REGISTRY.values()} == {"cheap", "dear"}
    assert all(kind.summary for kind in REGISTRY.values())
    assert measures.spectral_norms(torch.eye(2)).item() == pytest.approx(1)
