"""Coherence: do the rank-1 terms of a gradient error point the same way?

dW_hp - dW_lp = alpha sum_T e[T] D_T with D_T = a_T (x) b_T, a_T = (PK)[T] in R^D and b_T = X[T]
in R^C (paper, section 3.3.1). If the D_T are alike, small errors e[T] of one sign add up; if they
are random directions, they add like a random walk.

Nothing of size n x D x C is formed: <a (x) b, c (x) d> = <a, c><b, d>, and the only D x C matrices
are sums over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_PAIR_ROWS = 1024


@dataclass(frozen=True)
class GainNull:
    """The coherent gain of the same magnitudes in fresh random directions."""

    mean: float
    sd: float
    p_value: float
    draws: int


@dataclass(frozen=True)
class Coherence:
    """How alike n rank-1 terms D_T = a_T (x) b_T are. float64.

    n: terms that are not zero. mean_cosine: over all pairs T != T' (exact, no sampling).
    cosines: float64 [pairs], the distribution, from at most 1,024 evenly spaced terms.
    column_cosine [C], row_cosine [D]: the same mean for column c (a_T b_T[c]) and row d.
    R [D, C]: mean of the terms. spectrum: its singular values. energy: cumulative share of their
    squares. explained: share of sum |D_T|^2 along the one direction R/|R|.
    gain: |sum c_T D_T| / sqrt(sum |c_T D_T|^2), 1 for random directions, up to sqrt(n).
    null: the same for fresh random directions of the same sizes.
    approximation_cosine, approximation_error: of (sum c_T) R against sum c_T D_T.
    """

    n: int
    mean_cosine: float
    cosines: Tensor
    column_cosine: Tensor
    row_cosine: Tensor
    R: Tensor
    spectrum: Tensor
    energy: Tensor
    explained: float
    gain: float
    null: GainNull
    approximation_cosine: float
    approximation_error: float

    def quantiles(self, *at: float) -> list[float]:
        """Quantiles of the pairwise cosines (default: 5, 50 and 95 %)."""
        if self.cosines.numel() == 0:
            return [math.nan] * len(at or (1, 2, 3))
        return self.cosines.quantile(torch.tensor(at or (0.05, 0.5, 0.95)).double()).tolist()


def coherence(a, b, weights=None, *, draws: int = 100, seed: int = 0) -> Coherence:
    """Coherence of the terms c_T a_T (x) b_T.

    a [n, D] and b [n, C]: rows of PK and of X, from one sequence or several, one step or many
    (stack the rows). weights [n]: c_T, such as alpha (delta_lp - delta_hp)[T]; 1 unless given.
    The null keeps every |c_T a_T (x) b_T| and replaces both factors by independent uniform unit
    vectors. Pairing a_T with another token's b is *not* used as a null: it keeps the component
    that all tokens share, which is what is tested. Raises ValueError for shapes that do not match.
    """
    a, b = _matrix(a, "a"), _matrix(b, "b")
    if a.shape[0] != b.shape[0] or a.shape[0] == 0:
        raise ValueError(f"{a.shape[0]} rows of a and {b.shape[0]} of b; give as many, at least 1")
    c = torch.ones(len(a), dtype=torch.float64)
    if weights is not None:
        c = torch.as_tensor(weights).detach().cpu().double().reshape(-1)
        if c.numel() != len(a):
            raise ValueError(f"{c.numel()} weights for {len(a)} terms; give one each")
    unit_a, size_a = _unit(a)
    unit_b, size_b = _unit(b)
    keep = (size_a > 0) & (size_b > 0)
    unit_a, unit_b, size = unit_a[keep], unit_b[keep], (size_a * size_b)[keep]
    a, b, c = a[keep], b[keep], c[keep]
    n = len(a)
    every = torch.linspace(0, n - 1, min(n, _MAX_PAIR_ROWS)).round().long() if n else []
    R = a.T @ b / max(n, 1)
    spectrum = torch.linalg.svdvals(R)
    total = (c[:, None] * a).T @ b
    along = ((a @ R) * b).sum(1)  # <D_T, R>
    squares = float((size**2).sum() * (R**2).sum())
    gain = _ratio(float(total.norm()), float((c * size).norm()))
    guess = c.sum() * R
    return Coherence(
        n=n,
        mean_cosine=_mean_pair(float(((unit_a.T @ unit_b) ** 2).sum()), n),
        cosines=_pairs(unit_a[every], unit_b[every]),
        column_cosine=_signed_columns(unit_a, b),
        row_cosine=_signed_columns(unit_b, a),
        R=R,
        spectrum=spectrum,
        energy=(spectrum**2).cumsum(0) / (spectrum**2).sum(),
        explained=_ratio(float((along**2).sum()), squares),
        gain=gain,
        null=_gain_null(c * size, a.shape[1], b.shape[1], gain, draws, seed),
        approximation_cosine=direction_cosine(guess, total),
        approximation_error=_ratio(float((guess - total).norm()), float(total.norm())),
    )


def pair_cosines(a, b, a2=None, b2=None) -> Tensor:
    """cos(D_T, D'_T') of terms a (x) b against a2 (x) b2 (themselves if None), float64 [n, n2].

    For two tokens, or tokens of two steps (paper Fig. 4): one product of two small Gram matrices.
    """
    unit_a, unit_b = _unit(_matrix(a, "a"))[0], _unit(_matrix(b, "b"))[0]
    other_a = unit_a if a2 is None else _unit(_matrix(a2, "a2"))[0]
    other_b = unit_b if b2 is None else _unit(_matrix(b2, "b2"))[0]
    return (unit_a @ other_a.T) * (unit_b @ other_b.T)


def coherent_gain(terms) -> float:
    """|sum_i U_i| / sqrt(sum_i |U_i|^2) of tensors [n, ...]: the updates of n steps, say."""
    x = torch.as_tensor(terms).detach().cpu().double().flatten(1)
    return _ratio(float(x.sum(0).norm()), float(x.norm()))


def direction_cosine(first, second) -> float:
    """Cosine between two tensors of one shape: R at two steps, an error and its approximation."""
    x, y = (torch.as_tensor(t).detach().cpu().double().reshape(-1) for t in (first, second))
    if x.numel() != y.numel():
        raise ValueError(f"{x.numel()} and {y.numel()} numbers; give two tensors of one shape")
    return _ratio(float(x @ y), float(x.norm() * y.norm()))


def _matrix(x, name: str) -> Tensor:
    x = torch.as_tensor(x).detach().cpu().double()
    if x.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs a row per term, [n, width]")
    return x.reshape(-1, x.shape[-1])


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    size = x.norm(dim=1)
    return x / torch.where(size > 0, size, 1.0)[:, None], size


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else math.nan


def _mean_pair(square_of_sum: float, n: int) -> float:
    """Mean over T != T' from |sum of n unit terms|^2 = n + sum over pairs."""
    return (square_of_sum - n) / (n * (n - 1)) if n > 1 else math.nan


def _pairs(unit_a: Tensor, unit_b: Tensor) -> Tensor:
    cosines = pair_cosines(unit_a, unit_b)
    upper = torch.triu_indices(*cosines.shape, offset=1)
    return cosines[upper[0], upper[1]]


def _signed_columns(unit: Tensor, other: Tensor) -> Tensor:
    """Mean pairwise cosine of column c of the terms: unit_T up to the sign of other_T[c]."""
    sign = other.sign()
    n = (sign != 0).sum(0).double()
    sums = (sign.T @ unit).square().sum(1)
    return torch.where(n > 1, (sums - n) / (n * (n - 1)), math.nan)


def _gain_null(size: Tensor, d: int, c: int, gain: float, draws: int, seed: int) -> GainNull:
    generator = torch.Generator().manual_seed(seed)
    norm = float(size.norm())
    gains = []
    for _ in range(draws if norm > 0 else 0):
        a = _unit(torch.randn(len(size), d, generator=generator, dtype=torch.float64))[0]
        b = _unit(torch.randn(len(size), c, generator=generator, dtype=torch.float64))[0]
        gains.append(float(((size[:, None] * a).T @ b).norm()) / norm)
    if not gains:
        return GainNull(math.nan, math.nan, math.nan, 0)
    values = torch.tensor(gains, dtype=torch.float64)
    p_value = (int((values >= gain).sum()) + 1) / (len(gains) + 1)
    sd = float(values.std()) if len(gains) > 1 else math.nan
    return GainNull(float(values.mean()), sd, p_value, len(gains))
