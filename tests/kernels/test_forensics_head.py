"""kernels.forensics on whole heads: pieces, delta, weight gradient, counts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import FP32, attention, emulated, parse_numerics, round_to
from kernels.forensics import (
    as_head,
    bias_law,
    clustered_mean,
    counts,
    delta_error,
    offset_values,
    pieces,
    rounding_trace,
    weight_gradient_error,
)
from kernels.forensics.delta import CAUSES
from kernels.formats import BF16
from kernels.oracle import attention_forward
from kernels.rounding import ulp

NUMERICS = [
    "paper",
    "stabilized",
    "guarded",
    "paper,softmax=shifted,shift=2",
    "paper,compute=fp64",
]


def random_head(seed=0, n=2, t=33, d=8, c=12, shift=0.0, sharp=1.0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return round_to(torch.randn(*shape, generator=g), BF16)

    X = draw(n, t, c) + 0.5
    W_Q = draw(d, c) * sharp
    k = draw(n, t, d)
    k[:, 1] = k[:, 0]
    q = round_to(X @ W_Q.T, BF16)
    return dict(q=q, k=k, v=draw(n, t, d) + shift, dO=draw(n, t, d), X=X, W_Q=W_Q)


def sink_head(tied, n=60, t=4, d=64, keys=16, tail=2.0**-14, seed=0):
    """`tied` keys share the maximum 2, the others have P_bar = `tail`; V in -(2..4)."""
    g = torch.Generator().manual_seed(seed)
    q = torch.zeros(n, t, d)
    q[..., 0] = math.sqrt(d)
    k = torch.zeros(n, keys, d)
    k[:, :, 0] = 2 + math.log(tail) if tail else -200.0
    k[:, :tied, 0] = 2.0
    v = round_to(-(2 + 2 * torch.rand(n, keys, d, generator=g)), BF16)
    return as_head(q, k, v, torch.ones(n, t, d))


def setting(head, numerics, causal=True):
    return pieces.Setting.of(head, numerics, causal, None, 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("text", [*NUMERICS, "paper,softmax=clamped", "paper,matched_bits=3"])
def test_pieces_are_the_emulators_own_to_the_bit(text, causal):
    head = as_head(random_head(sharp=3.0))
    how = setting(head, text, causal)
    result = pieces.forward(head, how)
    S = pieces.scores(head, how)
    P_bar = pieces.rounded_probabilities(S, result.m.squeeze(1).unsqueeze(-1), how.numerics)
    v = pieces.on_grid(head.v, how.numerics)
    assert torch.equal((S == S.amax(-1, keepdim=True)).sum(-1), result.ties.squeeze(1).long())
    assert torch.equal((P_bar == 1).sum(-1), result.ones.squeeze(1).long())
    O = torch.bmm(P_bar, v) / result.l.squeeze(1).unsqueeze(-1)
    exact = dict(rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(O, result.out_fp32.squeeze(1), **exact)


def test_trace_of_a_head_sums_its_row():
    parts = random_head(sharp=2.0)
    head = as_head(parts)
    trace = rounding_trace(head, row=20, feature=3, sequence=1)
    assert len(trace) == 21 and trace.format == BF16
    result = pieces.forward(head, setting(head, "paper"))
    l = float(result.l[1, 0, 20])
    assert float(trace.exact[-1]) / l == pytest.approx(
        float(result.out_fp32[1, 0, 20, 3]), rel=1e-5
    )
    stored = round_to(trace.after["prefix_round_once"][-1] / l, BF16)
    assert float(stored) == float(result.out[1, 0, 20, 3])
    assert int(trace.ones.sum()) == int(result.ones[1, 0, 20])
    whole = rounding_trace(head, row=-1, feature=0, causal=False)
    assert len(whole) == 33


@pytest.mark.parametrize(
    "text, words",
    [
        ("flash", "keep O_bar in fp32"),
        ("authors,tile=8", "reference=row"),
        ("paper,scores=bf16:stochastic", "scores site"),
    ],
)
def test_what_cannot_be_traced_is_told(text, words):
    with pytest.raises(ValueError, match=words):
        rounding_trace(as_head(random_head()), row=3, feature=0, numerics=text)


def test_trace_refuses_a_row_that_does_not_exist():
    with pytest.raises(ValueError, match="row 33 does not exist; there are 33"):
        rounding_trace(as_head(random_head()), row=33, feature=0)


# -- delta ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [*NUMERICS, "flash,tile=16", "authors,tile=16", "paper,output=fp32"]
)
def test_delta_error_is_the_emulators_difference_and_its_splits_add_up(text):
    parts = random_head(shift=-2.0, sharp=2.0)
    got = delta_error(**{x: parts[x] for x in ("q", "k", "v", "dO")}, numerics=text)
    q, k, v, dO = (parts[x].unsqueeze(1) for x in ("q", "k", "v", "dO"))
    twin = parse_numerics(text).at(delta_output=FP32)
    r = emulated.forward(q, k, v, numerics=twin, causal=True, scale=8**-0.5)
    e = (dO.double() * (r.out.double() - r.delta_output.double())).sum(-1).squeeze(1)
    torch.testing.assert_close(got.error, e, rtol=0, atol=0, equal_nan=True)
    total = float(e.nansum())
    for split in (got.causes, got.twin_sites):
        assert sum(p.total for p in split.values()) == pytest.approx(total, abs=1e-9)
        assert sum(p.share for p in split.values()) == pytest.approx(1.0)
    assert float(got.feature_total.sum()) == pytest.approx(total, abs=1e-9)
    assert sum(p.rows for p in got.causes.values()) == got.mean.n == 66 - got.nonfinite_rows
    product = dO.squeeze(1).double() * got.output_error
    torch.testing.assert_close(product, got.contribution, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.cause == CAUSES.index("tied"), r_ties(parts, text) > 1)


def r_ties(parts, text):
    head = as_head(parts)
    return pieces.forward(head, setting(head, text)).ties.squeeze(1)


def test_the_high_precision_twin_and_exact_numerics_have_no_error():
    head = as_head(random_head())
    for text in ("paper,delta_output=fp32", "exact"):
        got = delta_error(head, numerics=text)
        assert got.rms == 0.0 and got.sign.zero == 66


def test_each_site_alone_and_all_but_one():
    got = delta_error(as_head(random_head(shift=-2.0)), numerics="paper")
    assert set(got.sites) == {"scores", "probabilities", "unnormalized", "output"}
    for effect in got.sites.values():
        assert effect.alone_rms > 0 and effect.without_rms > 0
    only = delta_error(as_head(random_head(shift=-2.0)), numerics="exact,output=bf16")
    assert set(only.sites) == {"output"}
    output = only.sites["output"]
    assert output.alone == only.all_sites and output.without_rms == 0.0
    assert output.alone.mean == pytest.approx(only.mean.mean, rel=1e-3)


def test_tied_rows_err_by_the_law_and_the_split_says_so():
    """14 tail keys of weight 2^-14: a tail of 14 * 3 * 2^-14 / 2^-6 = 0.164 value ulps."""
    head = sink_head(tied=2)
    got = delta_error(head, numerics="paper,output=fp32", causal=False)
    assert got.causes["tied"].rows == 240 and got.causes["tied"].share == pytest.approx(1.0)
    law = bias_law(2, 14 * 3 * 2.0**-14 / 2.0**-6)
    want = -64 * law.expected_ulp * 2.0**-5 / 2  # 64 features, sum in 4..8, divided by l = 2
    assert abs(got.mean.mean - want) < 4 * got.mean.stderr < abs(want) / 5
    assert got.mean.stderr > 1.5 * got.naive.stderr  # the rows of a sequence repeat its error
    assert got.sign.negative > 0.9 * 240
    plain = delta_error(sink_head(tied=2, tail=0.0), numerics="paper,output=fp32", causal=False)
    assert abs(plain.mean.mean) < 4 * plain.mean.stderr  # exact ties alone have no bias


def test_absorbing_rows_lose_exactly_their_tail():
    head = sink_head(tied=1)
    got = delta_error(head, numerics="paper,output=fp32", causal=False)
    assert got.causes["absorbing"].rows == 240 and got.absorbing_elements == 1.0
    tail = (head.v[:, 1:].double().sum(1) * 2.0**-14).sum(-1)  # [N], 15 keys
    assert torch.allclose(got.error, -tail[:, None].expand(-1, 4), rtol=0.02)
    assert got.sign.positive == 240  # toward zero: V is negative
    assert got.contribution.shape == (60, 4, 64) and float(got.feature_output_error.min()) > 0


def test_nonfinite_rows_are_counted_and_left_out():
    parts = random_head()
    parts["q"] = parts["q"] * 0 + 300.0
    parts["k"] = parts["k"] * 0 + 1.0
    got = delta_error(as_head(parts), numerics="stabilized", sites=False)
    assert got.nonfinite_rows == 2 * 32 and got.mean.n == 2  # row 0 sees one key: no tie


def test_delta_needs_an_output_to_read():
    with pytest.raises(ValueError, match="reads no stored O"):
        delta_error(as_head(random_head()), numerics="paper,delta=dP_P")
    parts = random_head()
    with pytest.raises(ValueError, match="needs dO"):
        delta_error(parts["q"], parts["k"], parts["v"])


def test_balancing_V_removes_the_bias_and_its_sham_does_not():
    """The error of tied rows with a tail, in ulps of O, in three versions of one function."""
    head = sink_head(tied=2, n=100)
    oracle = attention_forward(*(x.unsqueeze(1) for x in (head.q, head.k, head.v)), causal=False)
    seen = {}
    for name, amount in (("plain", 0.0), ("balanced", -1.0), ("sham", 1.0)):
        moved = offset_values(head, amount)
        got = delta_error(moved, numerics="paper,output=fp32", causal=False, sites=False)
        ulps = (got.output_error / ulp(got.output, BF16)).mean(-1)
        seen[name] = clustered_mean(ulps, torch.arange(100)[:, None].expand(100, 4))
        shift = amount * head.v.double().mean((0, 1))
        assert torch.allclose(got.output, oracle[0].squeeze(1) + shift, atol=0.04)
    assert counts(offset_values(head), causal=False).one_sided == 0.0
    for name in ("plain", "sham"):
        assert seen[name].z < -8
    # not exactly 0: one offset gives all values of a feature the same last bits
    assert abs(seen["balanced"].mean) < abs(seen["plain"].mean) / 8


# -- the weight gradient --------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1000),
    causal=st.booleans(),
    text=st.sampled_from([*NUMERICS[:4], "paper,softmax=clamped", "authors,tile=8", "flash"]),
)
@settings(max_examples=12, deadline=None)
def test_identity_holds_to_float64_when_only_delta_differs(seed, causal, text):
    parts = random_head(seed, t=17, shift=-2.0)
    got = weight_gradient_error(as_head(parts), numerics=f"{text},compute=fp64", causal=causal)
    assert got.residual < 1e-10 and got.ratio > 1e-5


def test_identity_holds_to_fp32_and_rounding_dS_breaks_it():
    head = as_head(random_head(shift=-2.0))
    got = weight_gradient_error(head)
    assert got.residual < 1e-3
    assert 0 < got.grad_scores_ratio < 0.02 and 0 < got.gradients_ratio < 0.02
    assert torch.allclose(got.dW_hp - got.dW_lp, got.difference)


def test_low_precision_gradient_is_that_of_the_public_call():
    parts = random_head(shift=-1.0)
    q = parts["q"].unsqueeze(1).requires_grad_()
    text = "paper,grad_scores=fp32,gradients=fp32"
    k, v, dO = (parts[x].unsqueeze(1) for x in ("k", "v", "dO"))
    attention(q, k, v, numerics=text, backend="emulated").backward(dO)
    want = q.grad.double().flatten(0, 2).T @ parts["X"].double().flatten(0, 1)
    got = weight_gradient_error(as_head(parts))
    assert torch.allclose(got.dW_lp, want, rtol=1e-6, atol=1e-9)


def test_leading_pair_cosine_is_one_along_it():
    """X of rank one and a W_Q along the error itself."""
    parts = random_head(shift=-2.0)
    first = weight_gradient_error(as_head(parts))
    parts["W_Q"] = first.difference.float()
    again = weight_gradient_error(as_head(parts))
    U, s, Vh = torch.linalg.svd(first.difference)
    assert again.spectral_norm == pytest.approx(float(s[0]), rel=1e-5)
    want = float(s[0] / first.difference.norm())
    assert again.error_leading_cosine == pytest.approx(want, rel=1e-4)
    assert weight_gradient_error(as_head(parts | {"W_Q": None})).spectral_norm is None


def test_coherence_of_the_error_uses_its_own_weights():
    got = weight_gradient_error(as_head(random_head(shift=-2.0)))
    alike = got.coherence(draws=5)
    size = (got.terms[2][:, None] * got.terms[0]).norm(dim=1) * got.terms[1].norm(dim=1)
    assert alike.gain == pytest.approx(float(got.predicted.norm() / size.norm()))


def test_weight_gradient_needs_its_tensors():
    parts = random_head()
    parts.pop("X"), parts.pop("W_Q")
    with pytest.raises(ValueError, match="needs X"):
        weight_gradient_error(as_head(parts))


# -- counts ---------------------------------------------------------------------------------------


def test_equal_keys_without_a_mask_tie_in_every_row():
    q, k = torch.ones(3, 8), torch.ones(4, 8)
    v = torch.arange(32.0).reshape(4, 8)
    got = counts(q, k, v, causal=False)
    assert got.ties.tolist() == [[4, 4, 4]] and got.tied_rows == 3
    causal = counts(torch.ones(4, 8), k, v)
    assert causal.ties.tolist() == [[1, 2, 3, 4]] and causal.tied_rows == 3


@pytest.mark.parametrize("s", [5.0, 30.0, -5.0, 0.0])
def test_tied_pair_of_either_sign(s):
    """q = [8 s, 0, ...], tied k = [1, 0, ...], scale 1/8: score s; O is -2.3515625."""
    q, k = torch.zeros(2, 64), torch.zeros(2, 64)
    q[:, 0], k[:, 0] = 8 * s, 1.0
    v = torch.tensor([[-2.40625], [-2.296875]])
    got = counts(q, k, v)
    name = "positive" if s > 0 else "negative" if s < 0 else "zero"
    assert got.tied_rows_by_sign()[name] == got.tied_rows == 1
    out = attention(*(x[None, None] for x in (q, k, v)), numerics="paper", backend="emulated")
    assert float(out[0, 0, 1, 0]) in (-2.34375, -2.359375)


def test_near_ties_count_only_within_the_tolerance():
    """Two sink-like keys, 76 and 76.246 in fp16, scale 0.5: 38 against 38.125."""
    q, k = torch.zeros(8, 64), torch.zeros(8, 64)
    q[:, 0], k[0, 0], k[4, 0] = 1.0, 76.0, 76.246
    v = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    text = "flash,inputs=fp16,scores=fp16"
    strict = counts(q, k, v, numerics=text, scale=0.5, tolerance=1e-3)
    assert strict.closest[2:] == (38.125, 38.0)
    assert strict.near[0, 4:].tolist() == [1, 1, 1, 1] and strict.tied_rows == 0
    none = counts(q, k, v, numerics=text, scale=0.5)
    assert torch.equal(none.near, none.ties.long())
    loose = counts(q, k, v, numerics=text, scale=0.5, tolerance=0.2)
    assert loose.near[0, 4:].tolist() == [2, 2, 2, 2] and loose.tied_rows == 0
    with pytest.raises(ValueError, match="tolerance=-1"):
        counts(q, k, v, tolerance=-1)


def test_sink_and_one_sided_features():
    got = counts(sink_head(tied=1, n=1), causal=False)
    assert got.sink == (0, 0, 1.0) and got.one_sided == 1.0 and got.absorbing_rows == 4
    mixed = counts(as_head(random_head(t=64)))
    assert mixed.one_sided == 0.0 and mixed.positive_share.shape == (8,)
