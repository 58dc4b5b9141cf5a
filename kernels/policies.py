"""Choices of a Numerics that round nothing: softmax's reference, and the error of delta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SoftmaxKind = Literal["safe", "stabilized", "guarded", "shifted", "clamped"]


@dataclass(frozen=True)
class Softmax:
    """What is subtracted from the scores of a row, given its maximum rm and rs = #{rm - S <= eps}.

    safe        m = rm
    stabilized  if rs > 1: m = beta*rm where rm > 0, 0 where rm < 0, rm where rm = 0 (Algorithm 1)
    guarded     if rs > 1: m = rm + clamp(beta*rm - rm where rm > 0 else -rm,
                min_offset, max_offset): no P_bar near 1, no underflow (ours, not the paper's)
    shifted     m = rm + shift, every row
    clamped     m = rm, then P_bar at most the largest value below 1 of its format; a control that
                is *not* the same function in exact arithmetic
    `decide`: once per row over all visible keys ("row"), or per key tile as published ("tile").
    """

    kind: SoftmaxKind = "safe"
    beta: float = 7.0
    eps: float = 0.0
    shift: float = 0.0
    min_offset: float = 0.5
    max_offset: float = 8.0
    decide: Literal["row", "tile"] = "row"

    def __post_init__(self):
        if self.kind not in ("safe", "stabilized", "guarded", "shifted", "clamped"):
            raise ValueError(
                f"unknown softmax policy {self.kind!r}; "
                "use safe, stabilized, guarded, shifted or clamped"
            )
        if self.decide not in ("row", "tile"):
            raise ValueError(f"softmax decide={self.decide!r}; use 'row' or 'tile'")
        if self.kind in ("stabilized", "guarded") and not self.beta > 1:
            raise ValueError(
                f"beta={self.beta} does not move the maximum; use beta > 1 (paper: 2-8)"
            )
        if self.eps < 0:
            raise ValueError(f"eps={self.eps} is negative; use 0 or a small positive tolerance")
        if not 0 < self.min_offset <= self.max_offset:
            raise ValueError(
                f"offsets [{self.min_offset}, {self.max_offset}] are not an interval above 0"
            )


DeltaErrorKind = Literal[
    "mirror",
    "random_sign",
    "all_positive",
    "all_negative",
    "centred",
    "shuffled",
    "injected",
    "dQ_alone",
    "dK_alone",
    "own_direction",
    "random_direction",
    "leading_direction",
    "fixed_direction",
    "sham",
]

DRAWN = ("random_sign", "shuffled", "injected", "random_direction", "fixed_direction")


@dataclass(frozen=True)
class DeltaError:
    """An intervention on the error e = delta_lp - delta_hp itself (forward untouched).

    delta_hp reads O as `delta_output=FP32` does, delta_lp as the Numerics say. In the backward:
    mirror            delta = delta_hp - e: the same error with its sign turned
    random_sign       delta = delta_hp + s*e, s = +-1 per row, seeded
    all_positive      delta = delta_hp + |e|: the same sizes, one sign in every row
    all_negative      delta = delta_hp - |e|: the other one
    centred           delta = delta_hp + e - mean(e), the mean of each head over the batch: no bias
    shuffled          delta = delta_hp + e of another row of the head: the same mean and sizes,
                      which no longer belong to their rows; seeded
    injected          delta = delta_hp + mean + rms*normal: given moments on an exact run
    dQ_alone          dQ from the dS of delta_lp, dK from that of delta_hp: both bit for bit
    dK_alone          the other way round
    own_direction     dS from delta_hp, and dQ[T] -= scale * e[T] * (PK)[T]: the error as it is,
                      in dQ alone, past the rounding of dS; the control of the next three, which
                      leave dK alone too
    random_direction  dS from delta_hp, and dQ[T] -= scale * e[T] * |(PK)[T]| * u[T] with u[T] a
                      fresh random unit vector: same sizes, no shared direction
    leading_direction the same with the unit vector that the batch's rows (PK)[T] share most, one
                      per head: a shared direction, and that of R
    fixed_direction   the same with one random unit vector for all rows of the head, whatever the
                      seed, hence for all steps: a shared direction, unrelated to R
    sham              does the arithmetic of mirror and adds e back: changes nothing
    """

    kind: DeltaErrorKind
    mean: float = 0.0
    rms: float = 0.0

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers (a seed matters)."""
        return self.kind in DRAWN

    def __post_init__(self):
        kinds = DeltaErrorKind.__args__
        if self.kind not in kinds:
            raise ValueError(f"unknown delta error {self.kind!r}; use one of {', '.join(kinds)}")
