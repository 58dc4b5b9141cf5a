"""Attention of one projection that holds queries, keys and values: `packed_attention(qkv, heads)`.

The numbers are those of `attention` on its three parts, gradients included; what differs is where
gradients lie. Autograd would gather dQ, dK and dV in the gradient of the projection, by a copy;
here a backend writes them there. In bf16, with 12 heads of 64, the copy moves 9,216 bytes a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import as_text, attention, fake_forward, run_backward, run_forward, working_dtype
from .layout import split_heads
from .numerics import Numerics, flash

_FLASH = flash()


def packed_attention(
    qkv: Tensor,
    heads: int,
    *,
    kv_heads: int | None = None,
    numerics: Numerics | str | Sequence[Numerics | str] = _FLASH,
    causal: bool = True,
    scale: float | None = None,
    backend: str = "auto",
    seed: int | Tensor = 0,
) -> Tensor:
    """`kernels.attention.attention` of the parts of qkv [B, T, (heads + 2 kv_heads) D].

    Along the width come the D columns of each query head, then of each key head and of each value
    head; kv_heads is `heads` unless given. Returns [B, heads, T, D], in memory [B, T, heads, D];
    the gradient of qkv is contiguous. Everything else as there. Raises ValueError for what it
    refuses, and for a qkv of another shape.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    _check(qkv, heads, kv_heads)
    qkv = qkv.to(working_dtype(qkv))
    D = qkv.shape[2] // (heads + 2 * kv_heads)
    scale = 1 / math.sqrt(max(D, 1)) if scale is None else float(scale)
    choices = as_text(numerics, heads), causal, scale, backend
    if backend == "sdpa":
        text, causal, scale, _ = choices
        told = dict(numerics=text, causal=causal, scale=scale, backend=backend)
        return attention(*split_heads(qkv, heads, kv_heads), **told)
    if not isinstance(seed, Tensor):
        seed = torch.tensor(seed, dtype=torch.int64)
    out, *_ = torch.ops.bit_by_bit.packed_forward(qkv, seed, heads, kv_heads, *choices)
    return out.to(qkv.dtype)


def _check(qkv: Tensor, heads: int, kv_heads: int) -> None:
    if qkv.dim() != 3 or not qkv.is_floating_point():
        raise ValueError(
            f"qkv is {qkv.dtype} of shape {tuple(qkv.shape)}; packed attention takes "
            "floating-point tensors [B, T, (heads + 2 kv_heads) D]"
        )
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads={heads} is not a positive multiple of kv_heads={kv_heads}")
    if qkv.shape[2] % (heads + 2 * kv_heads):
        raise ValueError(
            f"the width {qkv.shape[2]} of qkv is not a multiple of heads + 2 kv_heads = "
            f"{heads + 2 * kv_heads}"
        )


# -- the operators --------------------------------------------------------------------------------

_CHOICES = "int heads, int kv_heads, str numerics, bool causal, float scale, str backend"
_FORWARD = f"(Tensor qkv, Tensor seed, {_CHOICES}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor qkv, Tensor out, Tensor lse, Tensor delta_output, Tensor seed, "
    f"{_CHOICES}) -> Tensor"
)


@torch.library.custom_op("bit_by_bit::packed_forward", mutates_args=(), schema=_FORWARD)
def _forward_op(qkv, seed, heads, kv_heads, *choices):
    parts = split_heads(qkv, heads, kv_heads)
    return run_forward(*parts, None, seed, *choices, False)[:3]


@_forward_op.register_fake
def _(qkv, seed, heads, kv_heads, *choices):
    return fake_forward(*split_heads(qkv, heads, kv_heads), None, seed, *choices, False)[:3]


@torch.library.custom_op("bit_by_bit::packed_backward", mutates_args=(), schema=_BACKWARD)
def _backward_op(dout, qkv, out, lse, delta_output, seed, heads, kv_heads, *choices):
    dqkv = qkv.new_empty(qkv.shape)
    if 0 in dqkv.shape:
        return dqkv
    places = split_heads(dqkv, heads, kv_heads)
    saved = dout, *split_heads(qkv, heads, kv_heads), out, lse, delta_output
    for place, grad in zip(places, run_backward(saved, None, seed, *choices, into=places)):
        if grad is not place:
            place.copy_(grad)
    return dqkv


@_backward_op.register_fake
def _(dout, qkv, *_):
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx, inputs, output):
    qkv, seed, *ctx.choices = inputs
    ctx.save_for_backward(qkv, *output, seed)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, *_):
    nothing = (None,) * 7
    if dout is None:
        return (None, *nothing)
    saved = ctx.saved_tensors
    return (torch.ops.bit_by_bit.packed_backward(dout, *saved, *ctx.choices), *nothing)


_forward_op.register_autograd(_gradient, setup_context=_setup_context)
