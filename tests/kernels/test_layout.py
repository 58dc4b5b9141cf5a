"""Where results lie in memory: in the order of q and k, in every backend and in every fake."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import attention, paper
from kernels.layout import empty_rows, heads_beside, in_order_of, split_heads

FORWARD = torch.ops.bit_by_bit.attention_forward
BACKWARD = torch.ops.bit_by_bit.attention_backward
MIXED = "\n".join(["paper", "exact", "paper", "flash"])


def beside(B, H, T, D, dtype=torch.float32):
    """[B, H, T, D] in memory [B, T, H, D], as a projection gives it."""
    return torch.randn(B, T, H, D).to(dtype).transpose(1, 2)


def apart(B, H, T, D, dtype=torch.float32):
    return torch.randn(B, H, T, D).to(dtype)


def packed(B=2, T=9, heads=4, kv_heads=4, D=8, dtype=torch.float32):
    return torch.randn(B, T, (heads + 2 * kv_heads) * D).to(dtype)


def test_heads_are_split_without_a_copy():
    qkv = packed(kv_heads=2)
    q, k, v = split_heads(qkv, 4, 2)
    assert q.shape == (2, 4, 9, 8) and k.shape == v.shape == (2, 2, 9, 8)
    assert torch.equal(torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], 2), qkv)
    assert all(x.untyped_storage().data_ptr() == qkv.data_ptr() for x in (q, k, v))
    assert all(heads_beside(x) for x in (q, k, v)) and not heads_beside(q.contiguous())


@pytest.mark.parametrize("make", [beside, apart])
def test_room_and_order_follow_a_tensor(make):
    like = make(2, 3, 5, 8)
    room = empty_rows(like, 4, torch.bfloat16)
    assert room.shape == (2, 3, 5, 4) and room.dtype == torch.bfloat16
    assert room.stride() == ((60, 4, 12, 1) if make is beside else (60, 20, 4, 1))
    for x in (beside(2, 3, 5, 4), apart(2, 3, 5, 4)):
        placed = in_order_of(x, like)
        assert torch.equal(placed, x) and placed.stride() == room.stride()
        same = x.stride() == room.stride()
        assert (placed.data_ptr() == x.data_ptr()) == same


def test_the_projection_after_attention_copies_nothing():
    q, k, v = split_heads(packed(), 4, 4)
    out = attention(q, k, v, numerics="paper")
    joined = out.transpose(1, 2).reshape(2, 9, 32)
    assert joined.data_ptr() == out.data_ptr() and joined.is_contiguous()
    contiguous = [x.contiguous() for x in (q, k, v)]
    expected = attention(*contiguous, numerics="paper")
    assert torch.equal(out, expected) and expected.is_contiguous()


INPUTS = {
    "packed": lambda: split_heads(packed(), 4, 4),
    "packed, grouped": lambda: split_heads(packed(kv_heads=2), 4, 2),
    "contiguous": lambda: [apart(2, 4, 9, 8), apart(2, 4, 7, 8), apart(2, 4, 7, 6)],
    "q alone beside": lambda: [beside(2, 4, 9, 8), apart(2, 4, 7, 8), apart(2, 4, 7, 6)],
    "k and v beside": lambda: [apart(2, 4, 9, 8), beside(2, 4, 7, 8), apart(2, 4, 7, 6)],
    "columns apart": lambda: [x.mT.contiguous().mT for x in split_heads(packed(), 4, 4)],
    "bf16": lambda: split_heads(packed(dtype=torch.bfloat16), 4, 4),
    "one head": lambda: split_heads(packed(heads=1, kv_heads=1), 1, 1),
    "one token": lambda: split_heads(packed(T=1), 4, 4),
    "no key": lambda: [beside(2, 4, 9, 8), beside(2, 4, 0, 8), beside(2, 4, 0, 8)],
    "expanded": lambda: [beside(2, 1, 9, 8).expand(2, 4, 9, 8), *split_heads(packed(), 4, 4)[1:]],
}


@pytest.mark.parametrize("text", ["flash,tile=4", "paper,delta_output=fp32", MIXED])
@pytest.mark.parametrize("kind", INPUTS)
def test_fakes_lie_as_the_results_do(kind, text):
    """A compiled graph is planned on fakes; where strides differ, it reads the wrong numbers."""
    q, k, v = INPUTS[kind]()
    if q.shape[1] == 1 and "\n" in text:
        text = "paper"
    choices = (torch.tensor(3), text, False, 0.5, "auto")

    def run(q, k, v, seed, *choices):
        results = FORWARD(q, k, v, None, seed, *choices, "all")
        dO = torch.empty_like(results[0])
        return [*results, *BACKWARD(dO, q, k, v, *results[:3], None, seed, *choices)]

    real = run(q, k, v, *choices)
    with FakeTensorMode() as mode:
        fakes = run(*(mode.from_tensor(x) for x in (q, k, v, choices[0])), *choices[1:])
    for a, b in zip(real, fakes):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    out, delta_output, out_fp32 = real[0], real[2], real[7]
    for x, like in zip((out, out_fp32, *real[8:]), (q, q, q, k, k)):
        assert x.stride() == empty_rows(like, x.shape[3], x.dtype).stride()
    assert delta_output.dim() == 1 or delta_output.stride() == out.stride()


@pytest.mark.parametrize("kind", [kind for kind in INPUTS if kind != "no key"])
def test_no_bit_depends_on_the_order(kind):
    q, k, v = (x.detach().requires_grad_() for x in INPUTS[kind]())
    copies = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    results = []
    for tensors in ((q, k, v), copies):
        torch.manual_seed(2)
        out = attention(*tensors, numerics=paper(), causal=False)
        dO = torch.randn(out.shape).to(out.dtype)
        results.append([out, *torch.autograd.grad(out, tensors, dO)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
