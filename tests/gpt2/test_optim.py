"""Optimisers: Muon's orthogonality, the flat gradient, the schedule, decay, state by name."""

import pytest
import torch
from trainer_helpers import tiny

from gpt2.config import make_config
from gpt2.model import GPT
from gpt2.optim import FlatGradient, Optimizers, is_hidden_matrix, learning_rate, newton_schulz


def model(**changes):
    return GPT(tiny("files:unused", **changes), 65)


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (3, 24, 48)])
def test_newton_schulz_makes_all_singular_values_near_one(shape):
    G = torch.randn(shape)
    X = newton_schulz(G)
    values = torch.linalg.svdvals(X)
    assert values.min() > 0.3 and values.max() < 1.3
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    aligned = (X * (U @ Vh)).sum((-2, -1)) / X.square().sum((-2, -1)).sqrt()
    assert (aligned / (U @ Vh).square().sum((-2, -1)).sqrt() > 0.95).all()


def test_muon_orthogonalises_w_q_w_k_and_w_v_apart():
    m = model(optimizer="muon", n_kv_head=1, muon_lr=1.0, learning_rate=1.0)
    optimizers = Optimizers(m, m.config)
    weight = m.attention_layers[0].c_attn.weight
    before = weight.detach().clone()
    optimizers.gradient.buffer.normal_()
    optimizers.set_rate(1.0)
    optimizers.step()
    change = (before - weight).detach()
    for part in change.split([16, 8, 8]):
        values = torch.linalg.svdvals(part)  # five steps cannot lift a nearly zero one
        assert values[:-1].min() > 0.3 and values.max() < 1.3
    assert torch.linalg.svdvals(change).max() > 1.3  # not orthogonal as a whole


def test_muon_takes_hidden_matrices_only():
    m = model(optimizer="muon", bias=True, tie_embeddings=False)
    optimizers = Optimizers(m, m.config)
    taken = {optimizers.names[p] for g in optimizers.muon.param_groups for p in g["params"]}
    assert taken == {n for n, p in m.named_parameters() if is_hidden_matrix(n, p)}
    assert "lm_head.weight" not in taken and "transformer.wte.weight" not in taken
    assert "transformer.h.1.mlp.c_fc.weight" in taken


def test_clipping_uses_the_norm_over_all_parameters():
    m = model()
    flat = FlatGradient(m.parameters())
    m(torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))[1].backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])
    largest = float(expected) / 3
    assert torch.allclose(flat.clip(largest), expected)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])
    assert abs(float(clipped) - largest) < 1e-5
    before = flat.buffer.clone()
    flat.clip(0)
    assert torch.equal(before, flat.buffer)


def test_decay_acts_on_matrices_only():
    m = model(weight_decay=0.1, bias=True)
    optimizers = Optimizers(m, m.config)
    for group in optimizers.adamw.param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.dim() >= 2 else 0.0)


def test_adam_eps_is_settable():
    m = model(adam_eps=1e-5)
    assert Optimizers(m, m.config).adamw.param_groups[0]["eps"] == 1e-5


def test_schedule():
    c = make_config(
        "cpu",
        dict(learning_rate=1e-3, min_lr=1e-5, warmup_steps=10, max_steps=110, schedule="cosine"),
    )
    rates = [learning_rate(c, s) for s in range(120)]
    assert 0 < rates[0] < 1e-3 / 10 and max(rates) == rates[10] == 1e-3
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[110] == rates[119] == pytest.approx(1e-5)
    assert rates[60] == pytest.approx((1e-3 + 1e-5) / 2)
    assert learning_rate(c.at(schedule="constant"), 100) == 1e-3


def test_states_of_other_optimisers_are_refused():
    a, b = model(), model(optimizer="muon")
    for m in (a, b):
        m.opt = Optimizers(m, m.config)
        m.opt.gradient.buffer.normal_()
        m.opt.step()
    a_state, b_state = a.opt.state_tensors(), b.opt.state_tensors()
    with pytest.raises(ValueError, match="does not belong"):
        a.opt.load_state_tensors(b_state)
    with pytest.raises(ValueError, match="no optimiser state for"):
        a.opt.load_state_tensors(dict(list(a_state.items())[:3]))
    b.opt.load_state_tensors(b_state)
