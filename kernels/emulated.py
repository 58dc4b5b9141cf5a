"""Attention in plain PyTorch with every rounding site of `Numerics`: any device, any format.

Values live in the carrier (fp32, or fp64 with `compute=FP64`) and are put on a site's grid by
`round_to`; products accumulate in the carrier, as a tensor core accumulates bf16 products in fp32.
[B, H, Tq, D] is flattened to [N, Tq, D] (N = B H), so that each step is one batched operation.

Rules that the other backends follow too:
- S is rounded after an additive mask joins it; then hidden keys become -inf.
- Causal: query i sees keys j <= i (top-left aligned). A row that sees no key gives O = 0,
  lse = -inf, zero gradients and 0 ties. A row whose P_bar all underflow is *not* such a row: 0/0
  is NaN, and it is meant to show.
- Running reference: per tile of `tile` keys, O_bar and l are multiplied by exp(m_old - m_new).
  A softmax policy decided per row offsets the running maximum by what it does to the final one.
- Accumulation per tile: the tile's product is rounded, then its sum with the rescaled O_bar. The
  backward then sums dQ over key tiles, dK and dV over query tiles in the same manner.
- The backward recomputes S, and P = exp(S - lse), unrounded inside dS; dV's operand is rounded.
- Stochastic sites draw from a generator made of (seed, site): the backward meets the forward's S.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from .formats import FP64
from .interventions import (
    DIRECTIONS,
    GRADIENTS,
    Draws,
    delta_of_each,
    disturbed_delta,
    generated,
    stray_gradient,
)
from .numerics import Numerics, Softmax
from .result import ForwardResult, wants_output
from .sites import (
    Rounder,
    exp_in_place,
    plain_arithmetic,
    repeat_heads,
    rounds_at,
    scaled_product,
)


def supports(
    numerics: Numerics, *, device=None, dtype=torch.float32, head_dim=None, mask=None
) -> str | None:
    """None if this backend honours `numerics`, else one sentence that says why not."""
    if numerics.delta_error is not None and numerics.delta != "dO_O":
        return "delta_error changes the delta of dO*O; use delta='dO_O'"
    if dtype == torch.float64 and numerics.compute != FP64:
        return "float64 inputs need compute=fp64, such as exact('fp64') or .at(compute='fp64')"
    return None


def _inputs(r: Rounder, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V on the grid of `inputs`, [N, T, D] each: a key head is rounded, then repeated."""
    group = q.shape[1] // k.shape[1]
    k, v = (repeat_heads(r.input(x, f"inputs.{n}"), group, dim=0) for x, n in ((k, "k"), (v, "v")))
    return r.input(q, "inputs.q"), k, v


# -- scores and masks -----------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _causal_fence(Tq: int, Tk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where key j <= query i, else -inf: [1, Tq, Tk]."""
    return torch.full((1, Tq, Tk), -math.inf, dtype=dtype, device=device).triu_(1)


def _mask_parts(mask: Tensor, shape: tuple, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """A user's mask as (finite bias or None, fence of 0 and -inf), each [B H, Tq, Tk].

    An additive mask hides a key where it is -inf or below half of its dtype's lowest number: that
    is how libraries write "masked", and two such numbers may have been added.
    """
    mask = mask.expand(shape).reshape(-1, *shape[2:])
    if mask.dtype == torch.bool:
        hidden, bias = ~mask, None
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        bias = mask.to(dtype).masked_fill(hidden, 0.0)
    return bias, torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)


def _scores(r: Rounder, q: Tensor, k: Tensor, causal: bool, scale: float, mask) -> Tensor:
    """S on its grid with -inf at hidden keys: [N, Tq, Tk] in the carrier. A fresh tensor."""
    shape, bias, fences = (q.shape[1], k.shape[1]), None, []
    if mask is not None:
        bias, fence = mask
        fences.append(fence)
    if causal:
        fences.append(_causal_fence(*shape, q.dtype, q.device))
    if not rounds_at(r.numerics.scores):
        # nothing to round: bias and fence ride along in the product
        addend = sum(fences[1:], fences[0]) if fences else None
        if bias is not None:
            addend = addend + bias
        return scaled_product(q, k.mT, scale, addend)
    S = r(scaled_product(q, k.mT, scale, bias), "scores")
    for fence in fences:
        S = S.add_(fence)
    return S


# -- the reference of softmax ---------------------------------------------------------------------


def _reference(policy: Softmax, S: Tensor, row_max: Tensor) -> Tensor:
    """What the policy subtracts, given scores and their maximum over the same keys [N, Tq, 1]."""
    if policy.kind in ("safe", "clamped"):
        return row_max
    if policy.kind == "shifted":
        return row_max + policy.shift
    repeated = (row_max - S <= policy.eps).sum(-1, keepdim=True) > 1
    if policy.kind == "stabilized":  # paper, Algorithm 1
        moved = torch.where(row_max > 0, policy.beta * row_max, row_max.clamp(min=0.0))
    else:
        offset = torch.where(row_max > 0, policy.beta * row_max - row_max, -row_max)
        moved = row_max + offset.clamp(policy.min_offset, policy.max_offset)
    return torch.where(repeated, moved, row_max)


def _row_reference(r: Rounder, S: Tensor, row_max: Tensor) -> Tensor:
    """The one reference of each row; a policy decided per tile takes the largest of its tiles'."""
    n, Tk = r.numerics, S.shape[-1]
    policy = n.softmax
    if policy.decide == "tile" and Tk > n.tile and policy.kind in ("stabilized", "guarded"):
        tiles = S.split(n.tile, -1)
        parts = [_reference(policy, t, t.amax(-1, keepdim=True)) for t in tiles]
        m = torch.cat(parts, -1).amax(-1, keepdim=True)
    else:
        m = _reference(policy, S, row_max)
    return r(m, "reference_format")


def _below_one(numerics: Numerics) -> float:
    """The largest number below 1 on the grid of P_bar (or of the carrier)."""
    bits = min(numerics.probabilities.format.fraction_bits, numerics.compute.fraction_bits)
    return 1.0 - 2.0 ** -(bits + 1)


def _probabilities(r: Rounder, S: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """P_bar = exp(S - m), rounded, and its row sum [N, Tq, 1]. Overwrites S."""
    n = r.numerics
    P_bar = exp_in_place(S.sub_(m))
    if n.softmax.kind == "clamped":
        P_bar.clamp_(max=_below_one(n))
    rounded = r(P_bar, "probabilities")
    l = (P_bar if n.row_sum_source == "unrounded" else rounded).sum(-1, keepdim=True)
    if n.row_sum_floor:
        l = torch.where(l.isnan(), l, l.clamp(min=n.row_sum_floor))
    return rounded, l


# -- forward --------------------------------------------------------------------------------------


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: Numerics,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    seed: int | Tensor = 0,
    probe: bool | str = False,
) -> ForwardResult:
    """q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv], all lengths at least 1.

    Returns a ForwardResult in the carrier dtype; see its docstring for shapes. `delta_output` is
    filled only when the backward needs it.
    """
    n = numerics
    with torch.no_grad(), plain_arithmetic(q.device.type):
        r = Rounder(n, seed, q.device)
        rows, shape = q.shape[:3], (*q.shape[:3], k.shape[2])
        q, k, v = _inputs(r, q, k, v)
        parts = None if mask is None else _mask_parts(mask, shape, q.dtype)
        S = _scores(r, q, k, causal, scale, parts)
        row_max = S.amax(-1, keepdim=True)
        unseen = row_max == -math.inf if mask is not None else None
        ties = _count(S == row_max, unseen) if probe else None
        many = k.shape[1] > n.tile
        if many and (n.reference == "running" or n.accumulate == "tile"):
            m, l, O_bar, O_hp, ones = _tiled(r, S, row_max, v, unseen, probe)
        else:
            m, l, O_bar, O_hp, ones = _whole(r, S, row_max, v, unseen, probe)
        if unseen is not None:
            l = l.masked_fill_(unseen, 0.0)
        result = _finish(r, rows, m, l, O_bar, O_hp, unseen, probe)
        if probe:
            result.ties, result.ones = (x.view(rows) for x in (ties, ones))
        return result


def _count(where: Tensor, unseen: Tensor | None) -> Tensor:
    counted = where.sum(-1, dtype=torch.int32)
    return counted if unseen is None else counted.masked_fill_(unseen.squeeze(-1), 0)


def _whole(r: Rounder, S, row_max, v, unseen, probe):
    """All keys at once against one reference per row."""
    m = _row_reference(r, S, row_max)
    used = m if unseen is None else m.masked_fill(unseen, 0.0)
    P_bar, l = _probabilities(r, S, used)
    l = r(l, "row_sum")
    O_hp = torch.bmm(P_bar, v)
    ones = _count(P_bar == 1, None) if probe else None
    return m, l, r(O_hp, "unnormalized"), O_hp, ones


def _tiled(r: Rounder, S, row_max, v, unseen, probe):
    """Key tile by key tile: a running reference, or a running sum against the final one."""
    n = r.numerics
    running = n.reference == "running"
    final = _row_reference(r, S, row_max)
    by_tile = n.softmax.decide == "tile"
    offset = 0.0 if by_tile or n.softmax.kind in ("safe", "clamped") else final - row_max
    m = torch.full_like(row_max, -math.inf)
    l = torch.zeros_like(row_max)
    O_bar = O_hp = torch.zeros((), dtype=S.dtype, device=S.device)
    ones = torch.zeros(S.shape[:2], dtype=torch.int32, device=S.device) if probe else None
    highest = m
    for S_tile, v_tile in zip(S.split(n.tile, -1), v.split(n.tile, 1)):
        tile_max = S_tile.amax(-1, keepdim=True)
        if not running:
            new = final
        elif by_tile:
            new = r(_reference(n.softmax, S_tile, tile_max), "reference_format").maximum(m)
        else:
            highest = highest.maximum(tile_max)
            new = r(highest + offset, "reference_format")
        used = new.masked_fill(new == -math.inf, 0.0)  # no visible key yet
        P_bar, sums = _probabilities(r, S_tile, used)
        product = torch.bmm(P_bar, v_tile)
        kept = (m - used).exp_() if running else 1.0
        l = r(l * kept + sums, "row_sum")
        O_hp = O_hp * kept + product
        if n.accumulate == "tile":
            O_bar = r(O_bar * kept + r(product, "unnormalized"), "unnormalized")
        if probe:
            ones += _count(P_bar == 1, None)
        m = new
    if n.accumulate == "once":
        O_bar = r(O_hp, "unnormalized")
    return m, l, O_bar, O_hp, ones


def _finish(r: Rounder, rows, m, l, O_bar, O_hp, unseen, probe) -> ForwardResult:
    n = r.numerics
    divisor = l if unseen is None else l.masked_fill(unseen, 1.0)
    lse = r(m + l.log(), "lse")
    hp = delta_output = None
    if wants_output(probe) or n.own_delta_output:
        hp = (O_hp / divisor).view(*rows, O_bar.shape[-1])
    if n.own_delta_output:
        delta_output = hp if n.delta_error is not None else r(hp, "delta_output")
    result = ForwardResult(
        out=r(O_bar / divisor, "output").view(*rows, O_bar.shape[-1]),
        lse=lse.view(rows),
        delta_output=delta_output,
    )
    if probe:
        result.m, result.l = m.view(rows), l.view(rows)
    if wants_output(probe):
        result.out_fp32 = hp.clone() if delta_output is hp else hp
    return result


# -- backward -------------------------------------------------------------------------------------


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta_output: Tensor | None,
    *,
    numerics: Numerics,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    seed: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, H, Tq, D], dK [B, Hkv, Tk, D], dV [B, Hkv, Tk, Dv] in the carrier.

    They lie on the grid of `gradients`; dK and dV are summed over a group of query heads first.
    `out`, `lse` and `delta_output` are the forward's. Gradients pass straight through roundings.
    """
    n = numerics
    with torch.no_grad(), plain_arithmetic(q.device.type):
        r = Rounder(n, seed, q.device)
        head, shape, group = q.shape[:2], (*q.shape[:3], k.shape[2]), q.shape[1] // k.shape[1]
        q, k, v = _inputs(r, q, k, v)
        dO = r.input(dout, "inputs.dO")
        parts = None if mask is None else _mask_parts(mask, shape, q.dtype)
        S = _scores(r, q, k, causal, scale, parts)
        P = _recomputed_probabilities(r, S, lse.reshape(-1, shape[2], 1), mask is not None)
        out, delta_output = (
            x if x is None else x.reshape(dO.shape).to(dO.dtype) for x in (out, delta_output)
        )
        delta, delta_k, error = _delta(r, dO, out, delta_output, head)
        dV = _product(r, r(P, "backward_probabilities").mT, dO, 1.0, group)
        stray = _stray(r, error, P, k, scale, head)
        P_k = None if delta_k is None else P.clone()
        dS_k = dS = r(_grad_scores(r, dO, v, P, delta), "grad_scores")
        if delta_k is not None:
            dS_k = r(_grad_scores(r, dO, v, P_k, delta_k), "grad_scores")
        dQ = _product(r, dS, k, scale, error=stray)
        dK = _product(r, dS_k.mT, q, scale, group)
        return tuple(x.unflatten(0, (head[0], -1)) for x in (dQ, dK, dV))


def _recomputed_probabilities(r: Rounder, S: Tensor, lse: Tensor, masked: bool) -> Tensor:
    """P = exp(S - lse), zero in rows that see no key. Overwrites S."""
    if masked:
        lse = lse.masked_fill(S.amax(-1, keepdim=True) == -math.inf, 0.0)
    if r.numerics.softmax.kind != "clamped":
        return exp_in_place(S.sub_(lse))
    top = exp_in_place(S.amax(-1, keepdim=True) - lse) * _below_one(r.numerics)
    return exp_in_place(S.sub_(lse)).minimum(top)


def _delta(r: Rounder, dO: Tensor, out: Tensor, delta_output: Tensor | None, head):
    """delta [N, Tq, 1], None for dP*P, which needs P first; and what an intervention adds to it.

    That is the delta that dK sees, where it is not the one of dQ, and the error left for dQ alone
    ([B, H, Tq, 1], see `_stray`); None for neither.
    """
    n = r.numerics
    if n.delta == "dP_P":
        return None, None, None
    if n.delta_error is None:
        O = out if delta_output is None else delta_output
        return (dO * O).sum(-1, keepdim=True), None, None
    low = out if n.delta_output is None else r(delta_output, "delta_output")
    lp, hp = ((dO * O).sum(-1).double().unflatten(0, head) for O in (low, delta_output))

    def column(x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(-1).to(dO.dtype)

    if n.delta_error.kind in DIRECTIONS:
        return column(hp), None, (lp - hp).unsqueeze(-1).to(dO.dtype)
    if n.delta_error.kind in GRADIENTS:
        of_q, of_k = delta_of_each(n.delta_error.kind, lp, hp)
        return column(of_q), column(of_k), None
    return column(disturbed_delta(n.delta_error, hp, lp - hp, _draws(r))), None, None


def _draws(r: Rounder, **seed) -> Draws:
    """Of the generator named after `delta_error`. seed: another than the call's."""
    return generated(partial(r.generator, r.numerics.delta_error.kind, **seed), r.device)


def _grad_scores(r: Rounder, dO: Tensor, v: Tensor, P: Tensor, delta: Tensor | None) -> Tensor:
    """dS = P * (dP - delta) before its rounding. Overwrites P."""
    n = r.numerics
    if delta is not None and not rounds_at(n.grad_probabilities):
        return torch.baddbmm(-delta, dO, v.mT).mul_(P)
    dP = r(torch.bmm(dO, v.mT), "grad_probabilities")
    if delta is None:
        delta = (dP * P).sum(-1, keepdim=True)
    return (dP - delta).mul_(P)


def _stray(r: Rounder, error: Tensor | None, P: Tensor, k: Tensor, scale: float, head):
    """The delta error sent into dQ alone, along a direction of its own: [N, Tq, D], or None."""
    if error is None:
        return None
    PK = torch.bmm(P, k).unflatten(0, head)
    spec, fixed = r.numerics.delta_error, _draws(r, seed=0)
    return stray_gradient(spec, error, PK, scale, _draws(r), fixed).flatten(0, 1)


def _product(r: Rounder, a: Tensor, b: Tensor, alpha: float, group=1, error=None) -> Tensor:
    """alpha a b (- error), summed over groups of heads, on the grid of `gradients`.

    Tile by tile where O_bar is accumulated so.
    """
    n = r.numerics
    if n.accumulate == "tile" and b.shape[1] > n.tile:
        total = torch.zeros((), dtype=b.dtype, device=b.device)
        for a_tile, b_tile in zip(a.split(n.tile, -1), b.split(n.tile, 1)):
            total = r(total + r(scaled_product(a_tile, b_tile, alpha), "gradients"), "gradients")
    else:
        total = scaled_product(a, b, alpha)
    if group > 1:
        total = total.unflatten(0, (-1, group)).sum(1)
    return r(total if error is None else total - error, "gradients")
