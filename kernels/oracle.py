"""Attention in float64, as plain as it can be written: the yardstick of every test.

No tiles, no running maximum, no rounding, no kernel: softmax(alpha Q K^T) V and its textbook
gradient. Inputs of any dtype are widened first, so quantise them once and hand over the quantised
values: the error measured is then the arithmetic's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O [B, H, Tq, Dv] and lse [B, H, Tq] (natural log), both float64.

    q [B, H, Tq, D]; k [B, Hkv, Tk, D]; v [B, Hkv, Tk, Dv], H a multiple of Hkv. `causal`: query i
    sees keys j <= i. `mask`: bool (True = visible) or additive. A row that sees no key gives O = 0
    and lse = -inf.
    """
    v = _per_query_head(v, q.shape[1])
    S = _scores(q, k, causal, scale, mask)
    lse = torch.logsumexp(S, -1)
    return _probabilities(S, lse) @ v, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in float64 with the shapes of q, k, v.

    dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(dO * O)), dQ = alpha dS K, dK = alpha dS^T Q.
    """
    H, alpha = q.shape[1], _alpha(q, scale)
    S = _scores(q, k, causal, scale, mask)
    P = _probabilities(S, torch.logsumexp(S, -1))
    dout, kv_heads = dout.double(), k.shape[1]
    wide_k, wide_v = _per_query_head(k, H), _per_query_head(v, H)
    dP = dout @ wide_v.mT
    delta = (dout * (P @ wide_v)).sum(-1, keepdim=True)
    dS = P * (dP - delta)
    dk = _per_key_head(alpha * dS.mT @ q.double(), kv_heads)
    return alpha * dS @ wide_k, dk, _per_key_head(P.mT @ dout, kv_heads)


def _alpha(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(q, k, causal, scale, mask) -> Tensor:
    """alpha Q K^T with -inf where a key is hidden, float64 [B, H, Tq, Tk]."""
    S = _alpha(q, scale) * q.double() @ _per_query_head(k, q.shape[1]).mT
    if mask is not None:
        S = S.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else S + mask.double()
    if causal:
        S = S.masked_fill(S.new_ones(S.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return S


def _probabilities(S: Tensor, lse: Tensor) -> Tensor:
    """exp(S - lse), zero in rows without a visible key."""
    finite = torch.where(lse == -math.inf, 0.0, lse)
    return torch.exp(S - finite.unsqueeze(-1))


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], dim=1)


def _per_key_head(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, -1)).sum(2)
