"""Interventions on the error of delta itself: what the backward subtracts in place of delta_lp.

e = delta_lp - delta_hp is one number per row. `DeltaError` says what each kind does; here is the
arithmetic that all backends share. A kind changes one property of the error and keeps the others:
its sign (`mirror`, `random_sign`, `all_positive`), its mean (`centred`), which row it belongs to
(`shuffled`), the gradient that it reaches (GRADIENTS), or the direction in which it moves dQ
(DIRECTIONS). GRADIENTS change no e: the backends give dQ and dK a delta each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .policies import DeltaError

DIRECTIONS = ("own_direction", "random_direction", "leading_direction", "fixed_direction")
GRADIENTS = ("dQ_alone", "dK_alone")
SQUARINGS = 24
TINY = 1e-300  # so that zeros may be divided


@dataclass(frozen=True)
class Draws:
    """Where random numbers come from: shape -> uniform in [0, 1), or normal; on one device."""

    uniform: Callable[[torch.Size], Tensor]
    normal: Callable[[torch.Size], Tensor]


def generated(generator: Callable[[], torch.Generator], device: torch.device) -> Draws:
    """Draws of PyTorch's generators, fp32. generator: makes a seeded one, where one is needed."""

    def drawn(function):
        return lambda shape: function(shape, generator=generator(), device=device)

    return Draws(drawn(torch.rand), drawn(torch.randn))


def disturbed_delta(spec: DeltaError, hp: Tensor, e: Tensor, draws: Draws) -> Tensor:
    """delta under an intervention on rows: hp = delta_hp and e, float64 [B, H, T], and out alike.

    Means and shuffles are taken per head over the rows of all B sequences.
    """
    kind = spec.kind
    if kind == "mirror":
        return hp - e
    if kind == "sham":
        return (hp - e) + 2 * e
    if kind in ("all_positive", "all_negative"):
        return hp + e.abs() if kind == "all_positive" else hp - e.abs()
    if kind == "centred":
        return hp + (e - e.mean((0, 2), keepdim=True))
    if kind == "random_sign":
        return torch.where(draws.uniform(e.shape) < 0.5, hp - e, hp + e)
    if kind == "shuffled":
        rows = e.transpose(0, 1).flatten(1)  # [H, B T]
        order = draws.uniform(rows.shape).argsort(-1)
        mixed = rows.gather(1, order).unflatten(1, (e.shape[0], e.shape[2]))
        return hp + mixed.transpose(0, 1)
    if kind == "injected":
        return hp + spec.mean + spec.rms * draws.normal(e.shape)
    raise ValueError(f"delta_error={kind} is no change of delta: it says which gradient it moves")


def delta_of_each(kind: str, lp: Tensor, hp: Tensor) -> tuple[Tensor, Tensor]:
    """The deltas that dQ and dK see under one of GRADIENTS."""
    return (lp, hp) if kind == "dQ_alone" else (hp, lp)


def stray_gradient(
    spec: DeltaError, e: Tensor, PK: Tensor, scale: float, draws: Draws, fixed: Draws
) -> Tensor:
    """What an intervention on directions subtracts from dQ, [B, H, T, D].

    e [B, H, T, 1], PK [B, H, T, D]: row T moves by scale * e[T] * |(PK)[T]| along the kind's unit
    vector. fixed: draws that no step changes.
    """
    if spec.kind == "own_direction":
        return scale * e * PK
    length = PK.norm(dim=-1, keepdim=True)
    return scale * e * length * _unit_vectors(spec.kind, PK, draws, fixed)


def _unit_vectors(kind: str, PK: Tensor, draws: Draws, fixed: Draws) -> Tensor:
    """[B, H, T, D] fresh per row, or [1, H, 1, D] of a head."""
    _, H, _, D = PK.shape
    if kind == "leading_direction":
        return leading_direction(PK)[None, :, None]
    if kind == "random_direction":
        u = draws.normal(PK.shape)
    else:
        u = fixed.normal(torch.Size((1, H, 1, D)))
    return normalize(u.to(PK.dtype), dim=-1)


def leading_direction(PK: Tensor) -> Tensor:
    """The unit vector of each head that its rows (PK)[T] share most: [B, H, T, D] -> [H, D].

    The first right singular vector of the rows of all sequences, turned to the side of their sum.
    For the terms (PK)[T]^T X[T] of the error of dW_Q it is the left side of their common direction
    R (paper, section 3.3.1), as far as the attention, which does not see X, can know it.

    By squaring rows^T rows, which leaves of all eigenvectors the first: products of small matrices
    alone, for which a GPU waits nowhere. SQUARINGS of them tell apart what differs by a millionth.
    """
    rows = PK.transpose(0, 1).flatten(1, 2).double().nan_to_num(0.0, 0.0, 0.0)  # [H, B T, D]
    power = rows.mT @ rows
    for _ in range(SQUARINGS):
        power = power / power.abs().amax((1, 2), keepdim=True).clamp(min=TINY)
        power = power @ power
    place = power.diagonal(dim1=1, dim2=2).argmax(-1)  # the column that is longest
    u = power.gather(2, place[:, None, None].expand(-1, power.shape[1], 1)).squeeze(2)
    u = normalize(u, dim=-1, eps=TINY)
    side = (rows.sum(1) * u).sum(-1, keepdim=True)
    return torch.where(side < 0, -u, u).to(PK.dtype)
