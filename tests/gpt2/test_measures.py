"""Measures on tensors whose answer is known or computed another way."""

import math

import pytest
import torch

from gpt2 import measures

torch.set_num_threads(1)


def test_spectral_norms_equal_torch_svd_and_survive_nan_and_huge_values():
    w = torch.randn(3, 2, 8, 24, generator=torch.Generator().manual_seed(0))
    w[2, 1] *= 1e30
    found = measures.spectral_norms(w)
    expected = torch.linalg.svdvals(w.double())[..., 0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    w[0, 1, 3, 3] = float("nan")
    w[1, 0, 0, 0] = float("inf")
    found = measures.spectral_norms(w)
    assert torch.isnan(found).nonzero().tolist() == [[0, 1], [1, 0]]
    torch.testing.assert_close(found[2, 0], expected[2, 0], rtol=1e-10, atol=0)


def test_leading_pair_is_the_first_singular_triple():
    w = torch.randn(4, 8, 24, generator=torch.Generator().manual_seed(1))
    sigma, u, v = measures.leading_pair(w)
    U, S, V = torch.linalg.svd(w.double(), full_matrices=False)
    torch.testing.assert_close(sigma, S[:, 0])
    torch.testing.assert_close(
        sigma[:, None, None] * u[:, :, None] * v[:, None, :],
        S[:, :1, None] * U[:, :, :1] * V[:, :1, :],
    )
    assert torch.isnan(measures.leading_pair(torch.full((2, 3), float("nan")))[0])


def test_alignment_is_plus_or_minus_one_along_the_pair_and_zero_across_it():
    w = torch.diag(torch.tensor([5.0, 1.0, 1.0]))
    _, u, v = measures.leading_pair(w)
    along, across = torch.zeros(3, 3), torch.zeros(3, 3)
    along[0, 0], across[1, 2] = 3.0, 2.0
    assert measures.alignment(along, u, v).item() == pytest.approx(1)
    assert measures.alignment(-along, u, v).item() == pytest.approx(-1)
    assert measures.alignment(along + across, u, v).item() == pytest.approx(3 / math.sqrt(13))
    assert measures.alignment(across, u, v).item() == pytest.approx(0)


def test_tie_rate_and_ones_share_count_rows_and_visible_entries():
    ties = torch.tensor([[[1, 2, 1, 3], [1, 1, 1, 1]]], dtype=torch.int32)
    assert measures.tie_rate(ties).tolist() == [0.5, 0.0]
    assert measures.ones_share(ties).tolist() == [0.7, 0.4]  # 10 visible entries, causal


def test_score_statistics_on_uniform_attention():
    q, k = torch.zeros(2, 1, 4, 8), torch.randn(2, 1, 4, 8)
    found = measures.score_statistics(q, k)
    expected = sum(math.log(n) for n in (1, 2, 3, 4)) / 4
    assert found["attention_entropy"].item() == pytest.approx(expected, rel=1e-6)
    assert found["max_logit"].item() == 0
    assert found["tie_rate"].item() == 0.75  # the first row sees one key alone
    assert found["first_key_mass"].item() == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_score_statistics_spread_grouped_keys():
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 5, 8, generator=generator)
    k = torch.randn(1, 2, 5, 8, generator=generator)
    found = measures.score_statistics(q, k)["max_logit"]
    s = (q[0, 3] @ k[0, 1].T) / math.sqrt(8)
    assert found[3].item() == pytest.approx(s.tril().masked_fill(s.tril() == 0, -9).max().item())


def test_mean_per_head_clusters_by_sequence():
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(400, 1, 1, generator=generator).double()
    e = shared.expand(400, 1, 50) + 0.01  # every row of a sequence is the same draw
    found = measures.mean_per_head(e)
    assert found["stderr"].item() == pytest.approx(shared.std().item() / 20, rel=1e-6)
    assert found["mean"].item() == pytest.approx(e.mean().item())
    assert math.isnan(measures.mean_per_head(e[:1])["stderr"].item())


def test_weight_gradient_change_is_the_gradient_that_a_delta_error_makes():
    """dW_Q with delta + e minus dW_Q with delta, by the definition of attention's backward."""
    B, H, T, D, C = 2, 2, 6, 4, 8
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, dout, v, x = draw(B, H, T, D), draw(B, H, T, D), draw(B, H, T, D), draw(B, H, T, D), 0
    x, e, scale = draw(B, T, C), draw(B, H, T), D**-0.5
    p = measures.scores_of(q, k).double().softmax(dim=-1)
    delta = (dout * (p @ v)).sum(dim=-1)

    def dwq(delta):
        ds = p * (dout @ v.mT - delta[..., None])
        return measures.head_gradients(scale * ds @ k, x)

    change = measures.weight_gradient_change(e, measures.attended_keys(q, k), x, scale)
    torch.testing.assert_close(change, dwq(delta + e) - dwq(delta), rtol=1e-4, atol=1e-4)


def test_adam_change_equals_running_adam_twice():
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    error = 0.1 * torch.randn(3, 5, generator=generator, dtype=torch.float64)

    def run(last):
        p = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        adam = torch.optim.Adam([p], lr=1.0, betas=(0.9, 0.95), eps=1e-8)
        for g in [*grads[:-1], last]:
            before, p.grad = p.detach().clone(), g.clone()
            adam.step()
        return before - p.detach(), adam.state[p]

    taken, state = run(grads[-1])
    wanted = taken - run(grads[-1] - error)[0]
    change, update = measures.adam_change(
        grads[-1],
        error,
        state["exp_avg"],
        state["exp_avg_sq"],
        4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
    )
    torch.testing.assert_close(update, taken)
    torch.testing.assert_close(change, wanted)


def test_shared_direction_tells_one_direction_from_many():
    B, H, T, D, C = 2, 2, 30, 8, 16
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    one = draw(1, H, 1, D).expand(B, H, T, D), draw(1, 1, C).expand(B, T, C)
    e = torch.ones(B, H, T)
    found = measures.shared_direction(e, *one)
    assert found["direction_cosine"].tolist() == pytest.approx([1, 1])
    assert found["coherent_gain"].tolist() == pytest.approx([math.sqrt(B * T)] * H)
    signs = e.clone()
    signs[:, :, ::2] = -1
    assert measures.shared_direction(signs, *one)["coherent_gain"].max() < 1e-6
    many = measures.shared_direction(e, draw(B, H, T, D), draw(B, T, C))
    assert many["direction_cosine"].abs().max() < 0.05
    assert 0.5 < many["coherent_gain"].min() and many["coherent_gain"].max() < 2
