"""The kernels write wherever they are told: the same bits in any order in memory.

In the interpreter, and on a GPU with the kernels for Hopper GPUs beside the general ones.
"""

import math

import pytest
import torch

from kernels import attention, hopper_attention, parity, parse_numerics, triton_attention
from kernels.layout import split_heads
from kernels.packed import packed_attention

triton = pytest.importorskip("triton")
interpreted, gpu = pytest.mark.interpreted, pytest.mark.gpu
WIDE = ("out", "delta_output", "out_fp32", "dq", "dk", "dv")


def draw(B, heads, kv_heads, T, D, device="cpu"):
    """qkv [B, T, (heads + 2 kv_heads) D] bf16, and dO in the order of its heads."""
    generator = torch.Generator().manual_seed(1)
    width = (heads + 2 * kv_heads) * D
    qkv = torch.randn(B, T, width, generator=generator).bfloat16().to(device)
    dO = torch.randn(B, T, heads, D, generator=generator).bfloat16().to(device)
    return qkv, dO.transpose(1, 2)


def lies_like(x, like):
    """Whether x [B, H, T, D] is in the order of a tensor `like`, without gaps."""
    return (x.transpose(1, 2) if like.stride(1) < like.stride(2) else x).is_contiguous()


def check_views_and_copies(n, qkv, dO, heads, kv_heads, causal, scale):
    """Views of a projection give the bits of contiguous copies, and results in their own order."""
    views = (*split_heads(qkv, heads, kv_heads), dO)
    copies = [x.contiguous() for x in views]
    mixed = (views[0], *copies[1:])
    choices = dict(causal=causal, scale=scale, seed=4)
    want = parity.run(triton_attention, n, copies, **choices)
    for tensors in (views, mixed):
        got = parity.run(triton_attention, n, tensors, **choices)
        for name, x in got.items():
            assert torch.equal(x, want[name]), name
            if name in WIDE:
                assert lies_like(x, tensors[1 if name in ("dk", "dv") else 0]), name
    return want


def check_gradients_into_a_projection(n, qkv, dO, heads, kv_heads, causal, scale):
    """`into`: nothing but the three parts is written, with the bits of tensors of their own."""
    q, k, v = split_heads(qkv, heads, kv_heads)
    choices = dict(numerics=n, causal=causal, scale=scale, seed=4)
    found = triton_attention.forward(q, k, v, **choices)
    saved = (dO, q, k, v, found.out, found.lse, found.delta_output)
    want = triton_attention.backward(*saved, **choices)
    room = torch.full((qkv.shape[0], qkv.shape[1] + 1, qkv.shape[2]), 7.0).to(want[0])
    into = split_heads(room[:, :-1], heads, kv_heads)
    got = triton_attention.backward(*saved, into=into, **choices)
    for a, b, c in zip(got, want, into):
        assert a is c and torch.equal(a, b)
    assert (room[:, -1] == 7).all()


@interpreted
@pytest.mark.parametrize(
    "text, kv_heads",
    [
        ("flash,tile=16", 2),
        ("paper,delta_output=fp32", 2),
        ("paper,delta=dP_P", 1),
        ("paper,output=bf16:stochastic,gradients=bf16:stochastic", 2),
        ("paper,matched_bits=4", 2),
    ],
)
def test_order_moves_no_bit_in_the_interpreter(text, kv_heads):
    qkv, dO = draw(2, 2, kv_heads, 21, 16)
    n = parse_numerics(text)
    check_views_and_copies(n, qkv, dO, 2, kv_heads, True, 1 / 4)
    check_gradients_into_a_projection(n, qkv, dO, 2, kv_heads, True, 1 / 4)


@interpreted
def test_a_kernel_that_ignores_the_order_fails(fault):
    qkv, dO = draw(1, 2, 2, 5, 16)
    n = parse_numerics("flash,tile=16")

    def contiguous(like, width, dtype):
        return torch.empty(*like.shape[:3], width, dtype=dtype, device=like.device)

    with fault(triton_attention, "empty_rows", contiguous):
        check_views_and_copies(n, qkv, dO, 2, 2, True, 1 / 4)


@interpreted
@pytest.mark.parametrize("text", ("flash,tile=16", "paper,gradients=fp32"))
def test_packed_attention_in_the_interpreter(text):
    qkv, dO = draw(2, 4, 2, 19, 16)
    check_packed(text, qkv, dO, 4, 2)


def check_packed(text, qkv, dO, heads, kv_heads):
    qkv = qkv.requires_grad_()
    choices = dict(numerics=text, backend="triton")
    packed = packed_attention(qkv, heads, kv_heads=kv_heads, **choices)
    parts = attention(*split_heads(qkv, heads, kv_heads), **choices)
    assert torch.equal(packed, parts)
    a, b = (torch.autograd.grad(out, qkv, dO)[0] for out in (packed, parts))
    assert torch.equal(a, b) and a.is_contiguous()


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """How often the kernels for Hopper GPUs were launched: [forwards, backwards]."""
    counts = [0, 0]
    for place, name in enumerate(("forward", "backward")):

        def counted(*x, place=place, launch=getattr(hopper_attention, name), **y):
            counts[place] += 1
            return launch(*x, **y)

        monkeypatch.setattr(hopper_attention, name, counted)
    return counts


def hopper():
    return torch.cuda.get_device_capability() == (9, 0)


GPU_CASES = [  # numerics, heads, key heads, T, D: the first five served by the Hopper kernels
    ("flash", 3, 3, 1024, 64),
    ("flash", 2, 2, 1337, 64),
    ("flash", 3, 3, 1024, 128),
    ("paper,delta_output=fp32", 2, 2, 2600, 64),
    ("stabilized", 4, 2, 2600, 64),
    ("flash", 3, 3, 300, 64),
    ("paper", 4, 2, 300, 64),
    ("paper,delta=dP_P", 2, 2, 200, 128),
    ("exact", 2, 2, 100, 80),
    ("flash", 2, 2, 130, 40),
]


@gpu
@pytest.mark.parametrize("text, heads, kv_heads, T, D", GPU_CASES)
def test_order_moves_no_bit(text, heads, kv_heads, T, D, served):
    qkv, dO = draw(2, heads, kv_heads, T, D, "cuda")
    n, scale = parse_numerics(text), 1 / math.sqrt(D)
    check_views_and_copies(n, qkv, dO, heads, kv_heads, True, scale)
    assert not hopper() or (served[0] > 0) == (T >= 1024)
    assert not hopper() or (served[1] > 0) == (T >= 1024 and D == 64 and heads == kv_heads)
    check_gradients_into_a_projection(n, qkv, dO, heads, kv_heads, True, scale)
    check_packed(text, qkv, dO, heads, kv_heads)


@gpu
@pytest.mark.parametrize("D", (64, 128))
def test_the_hopper_backward_writes_in_any_order(D):
    """Both head dimensions, also where the general kernels serve."""
    if not hopper():
        pytest.skip("needs a Hopper GPU")
    for T in (1, 65, 1000):
        qkv, dO = draw(2, 3, 3, T, D, "cuda")
        q, k, v = split_heads(qkv, 3, 3)
        n, choices = parse_numerics("flash"), dict(causal=True, scale=1 / math.sqrt(D))
        found = triton_attention.forward(q, k, v, numerics=n, **choices)
        delta = triton_attention._row_dot(dO, found.out)
        room = torch.full((2, T + 1, qkv.shape[2]), 7.0).to(qkv)
        into = split_heads(room[:, :-1], 3, 3)
        given = (dO, q, k, v, found.lse, delta, delta)
        hopper_attention.backward(*given, numerics=n, into=into, **choices)
        copies = [x.contiguous() for x in (dO, q, k, v)]
        want = triton_attention.backward(
            *copies, found.out, found.lse, None, numerics=n, blocks={}, **choices
        )
        for name, a, b in zip(("dq", "dk", "dv"), into, want):
            assert torch.equal(a, b), (name, T)
        assert (room[:, -1] == 7).all()


@gpu
def test_packed_attention_in_a_graph():
    """A CUDA graph keeps where the gradient of the projection lies."""
    qkv, dO = draw(2, 3, 3, 1024, 64, "cuda")
    qkv.requires_grad_()

    def step():
        out = packed_attention(qkv, 3, numerics="flash")
        return out, *torch.autograd.grad(out, [qkv], dO)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = step()
    with torch.no_grad():
        qkv.copy_(qkv.flip(1))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(kept, step()))
