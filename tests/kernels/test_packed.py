"""Packed attention: the bits of `attention` on the three parts, gradients where they belong."""

import pytest
import torch

from kernels import attention, exact, flash, paper
from kernels.layout import split_heads
from kernels.packed import packed_attention

STOCHASTIC = "paper,output=bf16:stochastic,scores=bf16:stochastic"


def draw(B=2, T=9, heads=4, kv_heads=4, D=8, dtype=torch.float32):
    return torch.randn(B, T, (heads + 2 * kv_heads) * D).to(dtype).requires_grad_()


def both(qkv, heads=4, kv_heads=4, **choices):
    """[out, gradient of qkv] packed, and by the parts."""
    found = []
    for attend in (
        lambda: packed_attention(qkv, heads, kv_heads=kv_heads, **choices),
        lambda: attention(*split_heads(qkv, heads, kv_heads), **choices),
    ):
        torch.manual_seed(1)
        out = attend()
        dO = torch.randn(out.shape).to(out.dtype)
        found.append([out, *torch.autograd.grad(out, [qkv], dO)])
    return found


@pytest.mark.parametrize(
    "choices",
    [
        dict(numerics="paper"),
        dict(numerics=flash(4), causal=False),
        dict(numerics="exact", scale=0.3),
        dict(numerics="paper,delta_output=fp32,gradients=fp32"),
        dict(numerics=[paper(), exact(), "paper", flash(4)]),
        dict(numerics=STOCHASTIC, seed=5),
        dict(numerics=STOCHASTIC, seed=torch.tensor(6)),
        dict(numerics="exact", backend="sdpa"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_the_parts(choices, kv_heads, dtype):
    if choices.get("backend") == "sdpa":
        choices = choices | dict(numerics="flash") if dtype == torch.bfloat16 else choices
    qkv = draw(kv_heads=kv_heads, dtype=dtype)
    packed, parts = both(qkv, kv_heads=kv_heads, **choices)
    assert torch.equal(packed[0], parts[0]) and torch.equal(packed[1], parts[1])
    assert packed[0].dtype == packed[1].dtype == dtype and packed[1].is_contiguous()
    assert packed[0].transpose(1, 2).is_contiguous()


def test_a_qkv_of_any_strides():
    wide = draw(D=16)
    narrow = wide[..., ::2]
    packed, parts = both(narrow, numerics="paper")
    assert all(torch.equal(a, b) for a, b in zip(packed, parts))


def test_autocast_casts_the_projection():
    qkv = draw()
    with torch.autocast("cpu", torch.bfloat16):
        out = packed_attention(qkv, 4, numerics="exact")
    (gradient,) = torch.autograd.grad(out.float().sum(), qkv)
    assert out.dtype == torch.bfloat16 and gradient.dtype == torch.float32
    assert torch.equal(out, packed_attention(qkv.bfloat16(), 4, numerics="exact"))


@pytest.mark.parametrize("shape", [dict(B=0), dict(T=0), dict(D=0)], ids=str)
def test_zero_lengths_give_empty_results(shape):
    qkv = draw(**shape)
    out = packed_attention(qkv, 4, numerics="paper")
    out.sum().backward()
    assert out.numel() == 0 and qkv.grad.shape == qkv.shape


def test_operators_pass_torchs_own_checks():
    choices = (torch.tensor(0), 4, 2, paper().key, True, 0.5, "auto")
    torch.library.opcheck(
        torch.ops.bit_by_bit.packed_forward.default,
        (draw(kv_heads=2), *choices),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiles_to_one_graph_with_equal_bits():
    numerics = paper()

    def step(qkv, seed):
        a = packed_attention(qkv, 4, numerics=numerics)
        return a, packed_attention(qkv, 4, numerics=STOCHASTIC, seed=seed)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed, T in ((1, 9), (2, 9), (2, 11)):  # the second length makes shapes symbolic
        qkv, seed = draw(T=T), torch.tensor(seed)
        plain, fused = step(qkv, seed), compiled(qkv, seed)
        assert all(torch.equal(a, b) for a, b in zip(plain, fused))
        grads = [torch.autograd.grad(sum(x).sum(), qkv) for x in (plain, fused)]
        assert torch.equal(*(x[0] for x in grads))


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(qkv=torch.zeros(2, 9, 4, 24)), r"packed attention takes .* \[B, T"),
        (dict(qkv=torch.zeros(2, 9, 96).long()), "torch.int64"),
        (dict(qkv=torch.zeros(2, 9, 97)), "the width 97 of qkv is not a multiple of .* 12"),
        (dict(kv_heads=3), "heads=4 is not a positive multiple of kv_heads=3"),
        (dict(heads=0), "heads=0"),
        (dict(numerics=["exact"] * 3), "3 numerics for 4 query heads"),
        (dict(numerics="papr"), "did you mean 'paper'"),
        (dict(backend="cuda"), "unknown backend 'cuda'"),
    ],
)
def test_mistakes_get_a_sentence(change, told):
    with pytest.raises(ValueError, match=told):
        packed_attention(**(dict(qkv=torch.zeros(2, 9, 96), heads=4, numerics="exact") | change))
