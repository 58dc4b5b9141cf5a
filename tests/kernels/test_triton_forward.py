"""The forward kernel in the interpreter: parity with the emulator, shapes, layouts, probes."""

import math

import pytest
import torch

from kernels import emulated, parity, parse_numerics, triton_attention
from kernels.attention import attention

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted

QUANTITIES = ("out", "lse", "ties", "ones", "m", "l", "out_fp32", "delta_output")


def forwards(text, tensors, causal, scale, seed=0):
    n = parse_numerics(text)
    choices = dict(numerics=n, causal=causal, scale=scale, probe=True, seed=seed)
    return triton_attention.forward(*tensors[:3], **choices), emulated.forward(
        *tensors[:3], **choices
    )


def assert_agree(text, got, want):
    """Counts and m equal; fp32 numbers within 32 ulps; outputs within 1 ulp, few of them off."""
    n = parse_numerics(text)
    assert torch.equal(got.ties, want.ties) and torch.equal(got.ones, want.ones)
    assert torch.equal(got.m, want.m)
    for name in ("lse", "l", "out_fp32"):
        g = parity.gap(name, getattr(got, name), getattr(want, name), n.compute)
        assert g.max_ulp <= 32, g
    g = parity.gap("out", got.out, want.out, n.output.format)
    coarse = n.output.format.fraction_bits <= 7
    assert g.max_ulp <= (1 if coarse else 32) and abs(g.signed_mean_ulp) < (0.02 if coarse else 2)
    assert not coarse or g.mismatched < 0.02, g
    if want.delta_output is not None:
        site = n.delta_output or n.scores.__class__()
        g = parity.gap("delta_output", got.delta_output, want.delta_output, site.format)
        assert g.max_ulp <= 32, g


@pytest.mark.parametrize(
    "text",
    [
        "flash,tile=16",
        "paper",
        "stabilized,beta=2",
        "stabilized,beta=2,decide=tile,tile=16",
        "stabilized,beta=2,decide=tile,tile=16,reference=running",
        "exact",
    ],
)
def test_sites_agree_with_the_emulator_without_a_causal_mask(text):
    tensors = parity.inputs((1, 2, 2, 37, 41, 16, 16))
    got, want = forwards(text, tensors, False, 1 / 4)
    assert_agree(text, got, want)
    if "stabilized" in text or "guarded" in text:
        assert (want.ties > 1).any()  # the policy had something to do


@pytest.mark.parametrize("D, Dv", ((1, 1), (8, 24), (40, 40), (96, 16)))
def test_head_dimensions_that_are_no_power_of_two(D, Dv):
    """Case 37, with scale = 1/sqrt(true D), which is no power of two either."""
    tensors = parity.inputs((1, 1, 1, 19, 19, D, Dv))
    for text in ("flash,tile=16", "paper"):
        got, want = forwards(text, tensors, True, 1 / math.sqrt(D))
        assert_agree(text, got, want)


@pytest.mark.parametrize(
    "Tq, Tk", ((1, 1), (2, 2), (15, 15), (17, 17), (1, 33), (33, 1), (16, 70))
)
def test_lengths(Tq, Tk):
    tensors = parity.inputs((1, 1, 1, Tq, Tk, 16, 16), seed=Tq + Tk)
    for text in ("flash,tile=16", "paper"):
        got, want = forwards(text, tensors, True, 1 / 4)
        assert_agree(text, got, want)


def test_grouped_queries_read_their_key_head():
    q, k, v, _ = parity.inputs((2, 4, 2, 20, 20, 16, 16))
    n = parse_numerics("paper")
    got = triton_attention.forward(q, k, v, numerics=n, causal=True, scale=1 / 4)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    want = triton_attention.forward(q, k, v, numerics=n, causal=True, scale=1 / 4)
    assert torch.equal(got.out, want.out)


def test_shift_leaves_the_function_alone():
    """Case 19: another reference, the same O and lse up to roundings of P_bar."""
    tensors = parity.inputs((1, 1, 1, 24, 24, 16, 16), kind="gaussian")
    plain, _ = forwards("exact", tensors, True, 1 / 4)
    for shift in (-1.3863, 5.0, 20.0):
        moved, _ = forwards(f"exact,softmax=shifted,shift={shift}", tensors, True, 1 / 4)
        assert (moved.out - plain.out).abs().max() < 1e-5
        assert (moved.lse - plain.lse).abs().max() < 1e-5


def test_the_sign_of_the_error_on_tied_rows_is_the_emulators():
    """Two tied keys with same-sign values and a tail (paper, section 3.3): errors of one sign."""
    generator = torch.Generator().manual_seed(1)
    q = torch.zeros(1, 1, 64, 16)
    q[..., 0] = 20.0
    k = torch.zeros(1, 1, 8, 16)
    k[0, 0, :2, 0], k[0, 0, 2:, 0] = 1.0, 0.2
    v = -(2 + 2 * torch.rand(1, 1, 8, 64, generator=generator)).bfloat16()
    got, want = forwards("paper", (q.bfloat16(), k.bfloat16(), v), False, 1 / 4)
    assert (got.ties == 2).all() and torch.equal(got.out.float(), want.out)


def test_probes_change_no_bit_and_stochastic_sites_repeat():
    q, k, v, _ = parity.inputs((1, 2, 2, 20, 20, 16, 16), kind="gaussian")
    choices = dict(causal=True, scale=1 / 4)
    for text in ("flash,tile=16", "stabilized", "paper,output=bf16:stochastic"):
        n = parse_numerics(text)
        plain = triton_attention.forward(q, k, v, numerics=n, seed=3, **choices)
        probed = triton_attention.forward(q, k, v, numerics=n, seed=3, probe=True, **choices)
        assert torch.equal(plain.out, probed.out) and torch.equal(plain.lse, probed.lse)
        rows = triton_attention.forward(q, k, v, numerics=n, seed=3, probe="rows", **choices)
        assert rows.out_fp32 is None
        for name in ("out", "lse", "ties", "ones", "m", "l"):
            assert torch.equal(getattr(rows, name), getattr(probed, name))
    other = triton_attention.forward(q, k, v, numerics=n, seed=torch.tensor(4), **choices)
    assert not torch.equal(plain.out, other.out)


def test_neighbours_that_the_scale_merges_are_ties():
    """Raw scores x and the number below it, where both times 0.1 round to one S."""
    x = torch.linspace(1, 2, 200)
    below = torch.nextafter(x, torch.zeros(()))
    merged = (x * 0.1 == below * 0.1).nonzero().flatten()[:4]
    k = torch.zeros(1, 8, 2, 16)
    k[0, :4, :, 0] = torch.stack([below[merged], x[merged]], 1)
    k[0, 4:, :, 0] = torch.stack([below[merged - 1], x[merged]], 1)
    q = torch.zeros(1, 8, 1, 16)
    q[..., 0] = 1.0
    for text in ("exact", "exact,reference=running,tile=16"):
        got, want = forwards(text, (q, k, k), False, 0.1)
        assert torch.equal(got.ties, want.ties)
        assert got.ties.flatten().tolist() == [2] * 4 + [1] * 4


def test_without_the_repair_the_interpreters_dot_is_wrong():
    """Case 43: raw bit patterns multiplied."""
    from kernels import triton_common

    tensors = parity.inputs((1, 1, 1, 16, 16, 16, 16))
    triton_common.undo_interpreter_repair()
    try:
        faulty, want = forwards("paper", tensors, True, 1 / 4)
    finally:
        triton_common.repair_interpreter()
    assert not torch.allclose(faulty.out.float(), want.out, atol=0.1)


def test_the_public_call_takes_the_backend():
    q, k, v, _ = parity.inputs((1, 2, 1, 17, 17, 16, 16))
    got = attention(q, k, v, numerics="paper", backend="triton")
    assert torch.equal(got, attention(q, k, v, numerics="paper", backend="emulated"))
