"""Where results of attention lie in memory: like the tensors that they belong to.

A projection gives [B, T, H D], and q, k and v are views [B, H, T, D] of it: the heads of a token
lie beside each other. If O and the gradients lie likewise, the next projection reads them where
they are; in the order [B, H, T, D] they would be copied first. PyTorch's attention does the same.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor


def heads_beside(x: Tensor) -> bool:
    """Whether x [B, H, T, D] has the heads of a token beside each other, not a head's tokens."""
    return x.stride(1) < x.stride(2)


def empty_rows(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[B, H, T, width], B, H and T and the order in memory those of `like`, without gaps."""
    B, H, T, _ = like.shape
    empty = partial(torch.empty, dtype=dtype, device=like.device)
    if heads_beside(like):
        return empty(B, T, H, width).transpose(1, 2)
    return empty(B, H, T, width)


def in_order_of(x: Tensor, like: Tensor) -> Tensor:
    """x [B, H, T, D] with the strides of `empty_rows`; its own memory where it lies so already."""
    if heads_beside(like):
        return _contiguous(x.transpose(1, 2)).transpose(1, 2)
    return _contiguous(x)


def _contiguous(x: Tensor) -> Tensor:
    """`x.contiguous()`, with the usual strides of dimensions of one element, too."""
    return x.contiguous().flatten().view(x.shape)


def split_heads(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, heads, T, D], k, v [B, kv_heads, T, D], views of qkv [B, T, (heads + 2 kv_heads) D].

    Along the width come D columns of each head of q, then those of k and of v.
    """
    D = qkv.shape[2] // (heads + 2 * kv_heads)
    counts = (heads, kv_heads, kv_heads)
    parts = qkv.split([count * D for count in counts], dim=2)
    q, k, v = (x.unflatten(2, (count, D)).transpose(1, 2) for x, count in zip(parts, counts))
    return q, k, v
