"""What can be counted in a head before anything is measured: ties, near ties, ones, sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics import Numerics
from . import pieces
from .delta import CAUSES, row_causes
from .inputs import as_head
from .pieces import Setting


@dataclass(frozen=True)
class Counts:
    """Counts over all rows of a head under one Numerics.

    ties int32 [N, T]: visible keys whose rounded score equals the row maximum (1 = no tie).
    row_max [N, T]: that maximum. near int64 [N, T]: visible keys within `tolerance` of it (it
    included). gap [N, T]: row maximum minus the next distinct score; inf where there is none.
    closest: (sequence, row, maximum, next score) of the smallest gap, or None.
    ones int32 [N, T]: entries with P_bar = 1. cause int64 [N, T]: index into `delta.CAUSES`.
    sink: (sequence, key, share of rows whose maximum is this key). positive_share [Dv]: of the
    values of each feature of V (and negative_share). nonfinite: rows whose O is not finite.
    max_score: largest |S|.
    """

    ties: Tensor
    row_max: Tensor
    near: Tensor
    tolerance: float
    gap: Tensor
    closest: tuple[int, int, float, float] | None
    ones: Tensor
    cause: Tensor
    sink: tuple[int, int, float]
    positive_share: Tensor
    negative_share: Tensor
    nonfinite: int
    max_score: float

    @property
    def rows(self) -> int:
        return self.ties.numel()

    @property
    def tied_rows(self) -> int:
        return int((self.ties > 1).sum())

    @property
    def absorbing_rows(self) -> int:
        return int((self.cause == CAUSES.index("absorbing")).sum())

    @property
    def one_sided(self) -> float:
        """Share of features of V in which at least 9 of 10 values have one sign."""
        most = torch.maximum(self.positive_share, self.negative_share)
        return float((most >= 0.9).double().mean())

    def tied_rows_by_sign(self) -> dict[str, int]:
        """Tied rows by the sign of their maximum: SFA treats the three differently."""
        tied = self.ties > 1
        return {
            "positive": int((tied & (self.row_max > 0)).sum()),
            "negative": int((tied & (self.row_max < 0)).sum()),
            "zero": int((tied & (self.row_max == 0)).sum()),
        }


def counts(
    q,
    k=None,
    v=None,
    *,
    numerics: Numerics | str = "paper",
    causal: bool = True,
    scale: float | None = None,
    tolerance: float = 0.0,
    seed: int = 0,
) -> Counts:
    """Count ties, near ties, ones, absorbing rows, sinks and one-sided features of one head.

    tolerance: scores this close to the row maximum count as `near` (in units of S); it changes
    `near` alone, never `ties`. Raises ValueError for a negative one.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} is negative; use 0 or a small positive number")
    head = as_head(q, k, v)
    setting = Setting.of(head, numerics, causal, scale, seed)
    result = pieces.forward(head, setting, setting.numerics.at(delta_error=None))
    cause, _ = row_causes(head, setting, result)
    S = pieces.scores(head, setting)
    row_max, leader = S.max(-1)
    gap, closest = _gaps(S, row_max)
    return Counts(
        ties=result.ties.squeeze(1),
        row_max=row_max,
        near=(row_max.unsqueeze(-1) - S <= tolerance).sum(-1),
        tolerance=tolerance,
        gap=gap,
        closest=closest,
        ones=result.ones.squeeze(1),
        cause=cause,
        sink=_sink(leader, S.shape[-1]),
        positive_share=(head.v > 0).double().mean((0, 1)),
        negative_share=(head.v < 0).double().mean((0, 1)),
        nonfinite=int((~torch.isfinite(result.out.squeeze(1))).any(-1).sum()),
        max_score=float(S.masked_fill(S == -math.inf, 0.0).abs().max()),
    )


def _gaps(S: Tensor, row_max: Tensor):
    second = S.masked_fill(S == row_max.unsqueeze(-1), -math.inf).amax(-1)
    gap = row_max - second
    best = int(gap.argmin())
    sequence, row = divmod(best, gap.shape[1])
    if not math.isfinite(float(gap[sequence, row])):
        return gap, None
    return gap, (sequence, row, float(row_max[sequence, row]), float(second[sequence, row]))


def _sink(leader: Tensor, keys: int) -> tuple[int, int, float]:
    """The key that leads the most rows of its sequence."""
    votes = torch.stack([torch.bincount(row, minlength=keys) for row in leader])
    best = int(votes.argmax())
    sequence, key = divmod(best, keys)
    return sequence, key, float(votes[sequence, key]) / leader.shape[1]
