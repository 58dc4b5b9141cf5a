"""Signed statistics: is a mean off zero, and by how much, given that rows are not independent.

A rounding error has a size (rms) and a bias (signed mean). Training averages over millions of
rows, so a bias of a hundredth of the rms can matter while the rms itself averages away. Every
function here keeps the sign and gives the mean together with its standard error.

Rows of one sequence share keys and values (one sink serves them all), so their errors are
correlated and a standard error that takes rows as independent is too small. `clustered_mean` takes
whole sequences (or blocks of rows) as the unit, which needs at least a handful of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class SignedMean(NamedTuple):
    """A mean with its standard error; `n` is the number of values, not of clusters."""

    mean: float
    stderr: float
    n: int

    @property
    def z(self) -> float:
        """Mean in standard errors; nan where there is no standard error."""
        return self.mean / self.stderr if self.stderr else math.nan

    def __str__(self) -> str:
        return f"{self.mean:+.3g} +- {self.stderr:.2g} (n={self.n})"


class SignTest(NamedTuple):
    """Counts of each sign and the two-sided exact binomial p value (zeros are left out)."""

    positive: int
    negative: int
    zero: int
    p_value: float


class SignFlipNull(NamedTuple):
    """What a sum of these magnitudes does when its signs are coin flips.

    total: the observed sum. p_value: share of sign patterns with a sum at least as large in
    magnitude (Monte Carlo, never 0). sigma: float64 [n], standard deviation of the cumulative sum
    under the null, sqrt(cumsum(x^2)), exact; a 95 % band is +-1.96 sigma.
    """

    total: float
    p_value: float
    sigma: Tensor


def flat(x, what: str = "x") -> Tensor:
    """Any numbers as a flat float64 tensor. Raises ValueError where one is not finite."""
    x = x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64)
    values = x.detach().reshape(-1).double().cpu()
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise ValueError(
            f"{what} has {bad} values that are NaN or infinite; drop those rows first"
        )
    return values


def signed_mean(x) -> SignedMean:
    """(mean, standard error, n) of `x`, any shape, its values taken as independent.

    float64 throughout. The standard error is nan for n < 2, the mean nan for n = 0. For rows of
    one sequence use `clustered_mean`. Raises ValueError for NaN or infinity.
    """
    values = flat(x)
    n = values.numel()
    mean = float(values.mean()) if n else math.nan
    stderr = float(values.std()) / math.sqrt(n) if n > 1 else math.nan
    return SignedMean(mean, stderr, n)


def clustered_mean(x, groups) -> SignedMean:
    """The mean of `x` with a standard error that lets values of one group be correlated.

    groups: integers in the shape of `x` (the sequence, or the block of rows, of each value). With
    r_i = x_i - mean and G groups: stderr = sqrt(G/(G-1) * sum_g (sum_{i in g} r_i)^2) / n, the
    usual cluster-robust estimate; nan for fewer than two groups. With one value per group it is
    `signed_mean`'s.
    """
    values = flat(x)
    labels = torch.as_tensor(groups).reshape(-1).cpu()
    if labels.numel() != values.numel():
        raise ValueError(
            f"{values.numel()} values but {labels.numel()} group labels; give one each"
        )
    n = values.numel()
    if n == 0:
        return SignedMean(math.nan, math.nan, 0)
    mean = float(values.mean())
    _, index = labels.unique(return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        return SignedMean(mean, math.nan, n)
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, index, values - mean)
    stderr = math.sqrt(count / (count - 1) * float((sums**2).sum())) / n
    return SignedMean(mean, stderr, n)


def block_mean(x, block: int) -> SignedMean:
    """`clustered_mean` over blocks of `block` consecutive rows; x is [..., T], blocks along T.

    For a single sequence this is the honest choice: take blocks longer than the range over which
    errors resemble each other, and compare two block lengths. A sequence never shares a block with
    the next one.
    """
    if block < 1:
        raise ValueError(f"block={block}; use a whole number of rows, at least 1")
    values = torch.as_tensor(x)
    return clustered_mean(values, block_labels(values.shape, block))


def block_labels(shape, block: int) -> Tensor:
    """Group labels int64 of `shape` [..., T] for blocks of `block` rows within each sequence."""
    rows = torch.arange(shape[-1]) // block
    sequences = torch.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)
    return sequences * (int(rows.max()) + 1 if rows.numel() else 1) + rows


def sign_test(x) -> SignTest:
    """Are positive and negative values equally frequent? Exact two-sided binomial test.

    It asks about counts only, so it neither needs nor notices the sizes. p = 1 without any signs.
    """
    values = flat(x)
    positive, negative = int((values > 0).sum()), int((values < 0).sum())
    n, least = positive + negative, min(positive, negative)
    if n == 0:
        return SignTest(0, 0, values.numel(), 1.0)
    k = torch.arange(least + 1, dtype=torch.float64)
    top = torch.tensor(float(n), dtype=torch.float64)
    log_pmf = torch.lgamma(top + 1) - torch.lgamma(k + 1) - torch.lgamma(top - k + 1)
    tail = float(torch.logsumexp(log_pmf, 0)) - n * math.log(2.0)
    return SignTest(positive, negative, values.numel() - n, min(1.0, 2 * math.exp(tail)))


def sign_flip_null(x, *, draws: int = 2000, seed: int = 0, groups=None) -> SignFlipNull:
    """Compare sum(x) with sums of the same magnitudes under random signs.

    x: [n] in order (for example sum_T (delta_lp - delta_hp) of each step: paper Fig. 5a); `sigma`
    then gives the band of the cumulative sum. groups: labels [n] whose members flip together (rows
    of one sequence); `sigma` is then that of the order given with whole groups flipped.
    Reproducible by `seed`.
    """
    values = flat(x)
    if values.numel() == 0:
        return SignFlipNull(0.0, 1.0, values)
    if groups is None:
        index = torch.arange(values.numel())
        sigma = (values**2).cumsum(0).sqrt()
        sums = values
    else:
        _, index = torch.as_tensor(groups).reshape(-1).unique(return_inverse=True)
        sigma = _grouped_sigma(values, index)
        sums = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add_(0, index, values)
    generator = torch.Generator().manual_seed(seed)
    total, least, done = float(values.sum()), 0, 0
    slack = 1e-12 * float(values.abs().sum())  # sums that are equal but for float64 rounding
    chunk = max(1, 2**22 // sums.numel())
    while done < draws:
        take = min(chunk, draws - done)
        signs = torch.randint(0, 2, (take, sums.numel()), generator=generator).double() * 2 - 1
        least += int(((signs @ sums).abs() >= abs(total) - slack).sum())
        done += take
    return SignFlipNull(total, (least + 1) / (draws + 1), sigma)


def _grouped_sigma(values: Tensor, index: Tensor) -> Tensor:
    """sqrt of sum_g (partial sum of group g so far)^2, updated one value at a time."""
    partial = [0.0] * (int(index.max()) + 1)
    variance, out = 0.0, []
    for value, g in zip(values.tolist(), index.tolist()):
        variance += value * (value + 2 * partial[g])
        partial[g] += value
        out.append(max(variance, 0.0))
    return torch.tensor(out, dtype=torch.float64).sqrt()


def share_intervals(parts, *, draws: int = 1000, level: float = 0.95, seed: int = 0) -> Tensor:
    """Shares of a total with bootstrap intervals: float64 [K, 3] = (share, low, high).

    parts: [G, K], what each of G clusters (sequences, blocks of rows) adds to each of K parts.
    share_k = sum_g parts[g, k] / sum parts; whole clusters are resampled. Where the total is not
    clearly off zero, the intervals are huge, and rightly so; shares of signed parts can be
    negative or above 1.
    """
    parts = torch.as_tensor(parts).detach().cpu().double()
    total = parts.sum(0)
    share = total / total.sum()
    count = len(parts)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, count, (draws, count), generator=generator)
    weight = torch.zeros(draws, count, dtype=torch.float64)
    weight.scatter_add_(1, pick, torch.ones_like(pick, dtype=torch.float64))
    drawn = weight @ parts
    drawn = drawn / drawn.sum(1, keepdim=True)
    drawn = drawn[torch.isfinite(drawn).all(1)]
    if count < 2 or not len(drawn):
        edge = torch.full_like(share, math.nan)
        return torch.stack([share, edge, edge], 1)
    at = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    return torch.stack([share, *drawn.quantile(at, dim=0)], 1)
