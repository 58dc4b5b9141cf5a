"""The float64 oracle against autograd and against PyTorch's math path."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import oracle


def _inputs(B=2, H=4, Hkv=2, Tq=5, Tk=7, D=3, Dv=2):
    return (
        torch.randn(B, H, Tq, D, dtype=torch.float64, requires_grad=True),
        torch.randn(B, Hkv, Tk, D, dtype=torch.float64, requires_grad=True),
        torch.randn(B, Hkv, Tk, Dv, dtype=torch.float64, requires_grad=True),
    )


class _Oracle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, mask):
        ctx.save_for_backward(q, k, v)
        ctx.choices = causal, None, mask
        return oracle.attention_forward(q, k, v, causal, None, mask)[0]

    @staticmethod
    def backward(ctx, dout):
        return (*oracle.attention_backward(dout, *ctx.saved_tensors, *ctx.choices), None, None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [None, "bool", "additive"])
def test_gradcheck(causal, masked):
    mask = None
    if masked == "bool":
        mask = torch.rand(5, 7) < 0.6
        mask[2] = False  # a row that sees nothing
    elif masked == "additive":
        mask = torch.randn(5, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda q, k, v: _Oracle.apply(q, k, v, causal, mask), _inputs()
    )


@pytest.mark.parametrize("causal", [True, False])
def test_equals_pytorch_math_path_in_float64(causal):
    q, k, v = _inputs(Tq=65, Tk=33, D=40, Dv=24)
    dout = torch.randn(2, 4, 65, 24, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out.backward(dout)
    mine, _ = oracle.attention_forward(q, k, v, causal)
    torch.testing.assert_close(mine, out, rtol=0, atol=1e-13)
    for grad, x in zip(oracle.attention_backward(dout, q, k, v, causal), (q, k, v)):
        torch.testing.assert_close(grad, x.grad, rtol=0, atol=1e-12)


def test_lse_is_the_natural_logsumexp_and_minus_infinity_without_keys():
    q, k, v = (x.detach() for x in _inputs())
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1] = False
    out, lse = oracle.attention_forward(q, k, v, False, None, mask)
    S = q @ k.repeat_interleave(2, 1).mT / math.sqrt(3)
    torch.testing.assert_close(lse[:, :, [0, 2]], torch.logsumexp(S, -1)[:, :, [0, 2]])
    assert (lse[:, :, 1] == -math.inf).all() and (out[:, :, 1] == 0).all()
