"""kernels.forensics.coherence: closed forms against materialised rank-1 terms, and the null."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.forensics import coherence, coherent_gain, direction_cosine, pair_cosines


def terms(seed, n=12, d=5, c=7, shared=0.0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=g, dtype=torch.float64) + shared
    b = torch.randn(n, c, generator=g, dtype=torch.float64) + shared
    w = torch.randn(n, generator=g, dtype=torch.float64)
    return a, b, w, torch.einsum("nd,nc->ndc", a, b)


@given(st.integers(0, 10_000), st.floats(0, 2))
@settings(max_examples=20, deadline=None)
def test_closed_forms_equal_the_materialised_terms(seed, shared):
    a, b, w, D = terms(seed, shared=shared)
    got = coherence(a, b, w, draws=2)
    flat = D.flatten(1)
    unit = flat / flat.norm(dim=1, keepdim=True)
    gram = unit @ unit.T
    upper = gram[tuple(torch.triu_indices(12, 12, offset=1))]
    assert torch.allclose(pair_cosines(a, b), gram)
    assert torch.allclose(got.cosines, upper)
    assert got.mean_cosine == pytest.approx(float(upper.mean()), abs=1e-12)
    weighted = w[:, None, None] * D
    total = weighted.sum(0)
    gain = float(total.norm() / weighted.flatten(1).norm())
    assert got.gain == pytest.approx(gain) == pytest.approx(coherent_gain(weighted))
    R = D.mean(0)
    assert torch.allclose(got.R, R) and torch.allclose(got.spectrum, torch.linalg.svdvals(R))
    along = (flat @ (R / R.norm()).flatten()).square().sum() / flat.square().sum()
    assert got.explained == pytest.approx(float(along))
    assert float(got.energy[-1]) == pytest.approx(1.0)
    assert got.approximation_cosine == pytest.approx(direction_cosine(w.sum() * R, total))
    assert got.approximation_error == pytest.approx(
        float((w.sum() * R - total).norm() / total.norm())
    )


def test_column_and_row_cosines_equal_the_materialised_ones():
    a, b, _, D = terms(3, shared=0.5)
    got = coherence(a, b, draws=1)
    pairs = tuple(torch.triu_indices(12, 12, offset=1))
    for c in range(7):
        unit = torch.nn.functional.normalize(D[:, :, c], dim=1)
        assert float(got.column_cosine[c]) == pytest.approx(float((unit @ unit.T)[pairs].mean()))
    for d in range(5):
        unit = torch.nn.functional.normalize(D[:, d, :], dim=1)
        assert float(got.row_cosine[d]) == pytest.approx(float((unit @ unit.T)[pairs].mean()))


def test_gain_is_root_n_for_equal_terms_and_one_for_random_ones():
    a, b = torch.ones(64, 4), torch.ones(64, 6)
    same = coherence(a, b, draws=50)
    assert same.gain == pytest.approx(8.0) and same.mean_cosine == pytest.approx(1.0)
    assert same.explained == pytest.approx(1.0) and same.approximation_error < 1e-12
    assert float(same.energy[0]) == pytest.approx(1.0)
    g = torch.Generator().manual_seed(0)
    loose = coherence(
        torch.randn(400, 16, generator=g), torch.randn(400, 32, generator=g), draws=50
    )
    assert loose.gain == pytest.approx(1.0, abs=0.15)
    for result in (same, loose):
        assert result.null.mean == pytest.approx(1.0, abs=0.1)
    assert same.null.p_value < 0.03 < loose.null.p_value


def test_fresh_directions_are_a_null_where_repaired_tokens_are_not():
    """Terms that share one component: re-pairing a with another token's b keeps the gain."""
    g = torch.Generator().manual_seed(1)
    a = torch.randn(200, 16, generator=g) + 1.0
    b = torch.randn(200, 32, generator=g) + 1.0
    observed = coherence(a, b, draws=30)
    repaired = coherence(a, b[torch.randperm(200, generator=g)], draws=1)
    assert repaired.gain > 0.9 * observed.gain > 5 * observed.null.mean


def test_alternating_signs_cancel():
    w = torch.tensor([1.0, -1.0]).repeat(32)
    result = coherence(torch.ones(64, 4), torch.ones(64, 6), w, draws=5)
    assert result.gain == pytest.approx(0.0, abs=1e-9)


def test_terms_of_two_steps_and_zero_rows():
    a, b, _, D = terms(0)
    a2, b2, _, D2 = terms(1)
    want = torch.nn.functional.cosine_similarity(D[2].flatten(), D2[5].flatten(), dim=0)
    assert float(pair_cosines(a, b, a2, b2)[2, 5]) == pytest.approx(float(want))
    a[0] = 0
    assert coherence(a, b, draws=1).n == 11
    empty = coherence(torch.zeros(3, 2), torch.zeros(3, 2), draws=1)
    assert empty.n == 0 and math.isnan(empty.gain)


def test_shapes_that_do_not_match_are_told():
    with pytest.raises(ValueError, match="3 rows of a and 4 of b"):
        coherence(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="2 weights for 3 terms"):
        coherence(torch.ones(3, 2), torch.ones(3, 2), [1, 2])
