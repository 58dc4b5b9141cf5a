"""Interventions on the error of delta: what each keeps and what it takes away."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import emulated, parse_numerics
from kernels.forensics import coherent_gain
from kernels.interventions import (
    DIRECTIONS,
    GRADIENTS,
    disturbed_delta,
    generated,
    leading_direction,
    stray_gradient,
)
from kernels.policies import DeltaError, DeltaErrorKind


def draw(seed=0):
    return lambda name, seed=seed: torch.Generator().manual_seed(seed)


def errors(kind, e, **moments):
    """What the kind makes of e, with delta_hp = 0."""
    draws = generated(lambda: draw()(kind), e.device)
    return disturbed_delta(DeltaError(kind, **moments), torch.zeros_like(e), e, draws)


@pytest.fixture
def e():
    return torch.randn(3, 2, 50, dtype=torch.float64) + torch.tensor([0.5, -2.0])[:, None]


def test_each_kind_changes_one_property(e):
    assert torch.equal(errors("mirror", e), -e) and torch.equal(errors("sham", e), e)
    centred = errors("centred", e)
    assert centred.mean((0, 2)).abs().max() < 1e-12
    torch.testing.assert_close(centred.std((0, 2)), e.std((0, 2)))
    signs = errors("random_sign", e)
    assert torch.equal(signs.abs(), e.abs()) and not torch.equal(signs, e)
    assert torch.equal(errors("all_positive", e), e.abs())
    assert torch.equal(errors("all_negative", e), -e.abs())


def test_shuffled_errors_are_those_of_other_rows_of_the_same_head(e):
    mixed = errors("shuffled", e)
    for head in range(2):
        a, b = e[:, head].flatten(), mixed[:, head].flatten()
        assert torch.equal(a.sort().values, b.sort().values)
        assert (a == b).double().mean() < 0.1


def test_injected_errors_have_the_given_moments(e):
    made = errors("injected", e.expand(300, 3, 2, 50).flatten(0, 1), mean=0.25, rms=0.5)
    assert float(made.mean()) == pytest.approx(0.25, abs=0.02)
    assert float(made.std()) == pytest.approx(0.5, rel=0.02)


def test_which_gradient_errs_is_no_change_of_delta(e):
    for kind in ("random_direction", "dQ_alone", "dK_alone"):
        with pytest.raises(ValueError, match="says which gradient"):
            errors(kind, e)


def test_the_leading_direction_is_the_one_that_rows_share():
    u = torch.nn.functional.normalize(torch.randn(2, 8), dim=-1)
    PK = 3 * u[None, :, None] + 0.3 * torch.randn(4, 2, 30, 8)
    found = leading_direction(PK)
    assert ((found * u).sum(-1) > 0.98).all()
    assert torch.allclose(leading_direction(-PK), -found, atol=1e-5)
    PK[0, 0, 0] = math.nan  # a diverging run must end by its loss, not in a decomposition
    assert torch.isfinite(leading_direction(PK)).all()


@given(st.integers(0, 2**20), st.integers(-12, 3))
def test_the_leading_direction_is_the_first_singular_vector(seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    PK = torch.randn(2, 3, 20, 16, generator=generator, dtype=torch.float64) * 10.0**exponent
    found = leading_direction(PK)
    _, sizes, vectors = torch.linalg.svd(PK.transpose(0, 1).flatten(1, 2))
    clear = sizes[:, 1] < 0.9999 * sizes[:, 0]
    assert ((found * vectors[:, 0]).sum(-1).abs() > 1 - 1e-9)[clear].all()
    assert torch.allclose(found.norm(dim=-1), torch.ones(3, dtype=torch.float64))
    assert not leading_direction(torch.zeros_like(PK)).any()


def test_random_directions_have_a_coherent_gain_near_one_and_shared_ones_do_not():
    e, PK = torch.randn(8, 1, 40, 1).abs(), torch.randn(8, 1, 40, 16) + 2.0

    def gain(kind):
        draws = [generated(partial(draw(seed), kind), e.device) for seed in (1, 0)]
        return coherent_gain(stray_gradient(DeltaError(kind), e, PK, 0.25, *draws).flatten(0, 2))

    gains = {kind: gain(kind) for kind in DIRECTIONS}
    assert gains["random_direction"] == pytest.approx(1.0, abs=0.5)
    for kind in ("own_direction", "leading_direction", "fixed_direction"):
        assert gains[kind] > 10  # of sqrt(320) = 17.9 at most


@pytest.mark.parametrize("kind", DeltaErrorKind.__args__)
def test_the_backward_pass_knows_every_kind(kind):
    n = parse_numerics(f"exact,output_bits=2,delta_error={kind}")
    plain, high = (parse_numerics(f"exact,output_bits=2{x}") for x in ("", ",delta_output=fp32"))
    q, k, v, dout = (torch.randn(2, 2, 24, 16) for _ in range(4))

    def gradients(numerics):
        options = dict(numerics=numerics, causal=True, scale=0.25, seed=5)
        result = emulated.forward(q, k, v, **options)
        saved = result.out, result.lse, result.delta_output
        return emulated.backward(dout, q, k, v, *saved, **options)

    found, low, clean = gradients(n), gradients(plain), gradients(high)
    if kind == "sham":
        assert all(torch.equal(a, b) for a, b in zip(found, low))
    elif kind == "own_direction":
        torch.testing.assert_close(found[0], low[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(found[1], clean[1]) and not torch.equal(found[1], low[1])
    elif kind in GRADIENTS:
        of_q, of_k = (low, clean) if kind == "dQ_alone" else (clean, low)
        assert torch.equal(found[0], of_q[0]) and torch.equal(found[1], of_k[1])
        assert not torch.equal(low[0], clean[0]) and not torch.equal(low[1], clean[1])
    elif kind == "injected":  # moments of 0
        torch.testing.assert_close(found, clean)
    else:
        assert not torch.equal(found[0], low[0]) and not torch.equal(found[0], clean[0])
    assert torch.equal(found[2], low[2])  # dV reads no delta


def test_an_error_in_dK_alone_is_that_of_the_formula_in_float64():
    """dK moves by -alpha (e P)^T Q against delta_hp, e[T] = rowsum(dO (O_lp - O_hp)); dQ stays."""
    q, k, v, dout = (torch.randn(1, 2, 20, 8, dtype=torch.float64) for _ in range(4))
    options = dict(causal=True, scale=0.5, seed=0)

    def gradients(text):
        n = parse_numerics(f"exact,compute=fp64,output=bf16{text}")
        result = emulated.forward(q, k, v, numerics=n, probe=True, **options)
        saved = result.out, result.lse, result.delta_output
        return result, emulated.backward(dout, q, k, v, *saved, numerics=n, **options)

    result, found = gradients(",delta_error=dK_alone")
    _, clean = gradients(",delta_output=fp64")
    S = (0.5 * q @ k.mT).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -math.inf)
    P = S.softmax(-1)
    e = (dout * (result.out - P @ v)).sum(-1, keepdim=True)
    torch.testing.assert_close(found[0], clean[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1] - clean[1], -0.5 * (e * P).mT @ q, rtol=1e-9, atol=1e-12)
