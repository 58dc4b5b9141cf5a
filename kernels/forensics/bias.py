"""Bias laws: the signed error that rounding a sum makes on average, in ulps.

**Tied maxima.** A row with k tied maxima has P_bar = 1 for k keys, so for one feature
O_bar = v_1 + ... + v_k + t with a tail t of small terms. Let the v_i lie on the value grid in one
binade, with spacing u (one ulp of the values), all of one sign. Their sum is N*u, N an integer.
The sum is larger than its terms, so the result grid is coarser: its spacing is U = 2^s u, with
s >= 1 for k >= 2 on one grid. In units of U the magnitude is r/2^s plus an integer, where
r = N mod 2^s is uniform on 0 .. 2^s - 1 (the last bits of a sum of many possible values).

Nearest rounding, tail tau = t/U with 0 < tau < 2^-s and the sign of the sum: r < 2^(s-1) stays
below the half and goes down, error -(r/2^s + tau); r >= 2^(s-1) goes up, and this *includes* the
exact half r = 2^(s-1), which the tail (a sticky bit) has pushed over: error 1 - r/2^s - tau. So

    E = 1/2 - (2^s - 1)/2^(s+1) - tau = 2^-(s+1) - tau     in ulps of the result,
    E = 1/2 - t/u                                          in ulps of the *values*, for any k.

The error points away from zero while the tail is under half an ulp of the values, and for two
tied values and a vanishing tail it is a quarter ulp of the result. A longer tail shifts r by whole
steps and r stays uniform, so t/u above is t/u mod 1: a tail spread evenly over many ulps has no
bias. Without a tail, nearest-even sends half of the ties each way: E = 0. Nearest-away keeps +1/2,
toward zero gives E = 1/2 - 2^(s-1) - t/u in value ulps, stochastic 0. If the values are finer than
the result (the `output` dial), u shrinks and U does not: E = u/(2U) - tau, which vanishes.

**The tail sets the direction.** With the tail against the sum the halves are pushed the other way,
so E keeps the sign of the *tail*: +1/2 - t/u along it, whatever the sign of the tied values. V's
signs matter because the tail is made of the same feature's values: where they are balanced, tails
of both signs average out, and opposite tied values cancel into a finer binade with no ties.

**Absorption.** One key with P_bar = 1 and a same-sign tail: k = 1, N*u is on the result grid
itself (s = 0) and there is no half to be tied. Below half an ulp the tail is lost, error exactly
-tau (toward zero), for every row that attends to this key. Above it, 1 - tau.

The laws speak of O_bar alone; dividing by l and storing O round again. Source: paper section 3.3.2
describes the mechanism; the laws are derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import BF16, FP32, FloatFormat, parse_format
from ..rounding import ROUNDINGS, Rounding, round_to, ulp
from .stats import SignedMean, signed_mean

_ENUMERATED_BITS = 12


@dataclass(frozen=True)
class BiasLaw:
    """Expected signed error of one rounding; positive is the direction of a positive tail.

    expected_ulp: in ulps of each result, averaged. expected_value_ulp: in ulps of the tied values.
    closed_form_value_ulp: the docstring's formula in ulps of the tied values, or None where it
    makes no statement (mixed signs). rms_ulp: size of the error, in ulps of each result.
    """

    tied: int
    format: FloatFormat
    value_format: FloatFormat
    mode: str
    expected_ulp: float
    expected_value_ulp: float
    closed_form_value_ulp: float | None
    rms_ulp: float

    @property
    def kind(self) -> str:
        return "absorption" if self.tied == 1 else "tied"


def bias_law(
    tied: int = 2,
    tail: float | Sequence[float] = 0.05,
    *,
    fmt: FloatFormat | str = BF16,
    value_format: FloatFormat | str | None = None,
    mode: Rounding = "nearest_even",
    same_sign: float = 1.0,
) -> BiasLaw:
    """Expected signed error of rounding `tied` values of one binade plus a tail to `fmt`.

    tied: number of keys with P_bar = 1; 1 is absorption. tail: in ulps of the tied values,
    negative for one against them; several numbers are averaged (a tail's distribution).
    value_format: grid of V, `fmt` unless given (the `matched` dial); a finer one is the `output`
    dial. same_sign: probability that a tied value is positive (1 all, 0.5 a balanced V).

    The expectation is taken over values uniform on the grid of one binade, by enumerating all sums
    (a k-fold convolution): exact for any format, also where the last bits of a sum of few values
    are not quite uniform (k not a power of two, or 2 and 3 fraction bits). Where both grids are
    finer than 12 bits (fp32), both lose the same number of bits: the law in ulps is the same to
    2^-12. For bf16 out of V in fp32 say value_format="fp32.14"; there are few enough sums then.
    Raises ValueError for tied < 1, an unknown mode, values coarser than the result, or a grid with
    more than a million sums.
    """
    fmt, grid = _formats(fmt, value_format, tied, mode, same_sign)
    whole, whole_grid = fmt, grid
    drop = max(fmt.fraction_bits - _ENUMERATED_BITS, 0)
    fmt, grid = (f.cut(f.fraction_bits - drop) for f in (fmt, grid))
    tails = torch.as_tensor(tail, dtype=torch.float64).reshape(-1)
    n, weight = _sum_distribution(tied, grid.fraction_bits, same_sign)
    total = per_value = square = 0.0
    for t in tails.tolist():
        error, unit = _error((n + t) * 2.0**-grid.fraction_bits, fmt, mode)
        total += float((weight * error / unit).sum())
        square += float((weight * _second_moment(n, t, grid, fmt, mode, error, unit)).sum())
        per_value += float((weight * error).sum()) * 2.0**grid.fraction_bits
    count = tails.numel()
    closed = None
    if same_sign == 1.0:
        closed = sum(_closed_form(tied, t, fmt, grid, mode) for t in tails.tolist()) / count
    return BiasLaw(
        tied=tied,
        format=whole,
        value_format=whole_grid,
        mode=mode,
        expected_ulp=total / count,
        expected_value_ulp=per_value / count,
        closed_form_value_ulp=closed,
        rms_ulp=math.sqrt(square / count),
    )


def simulate_bias(
    tied: int = 2,
    tail: float | Sequence[float] = 0.05,
    *,
    fmt: FloatFormat | str = BF16,
    value_format: FloatFormat | str | None = None,
    mode: Rounding = "nearest_even",
    same_sign: float = 1.0,
    draws: int = 100_000,
    seed: int = 0,
) -> SignedMean:
    """Signed error in ulps of the result, over random draws: the check of `bias_law`.

    Values are drawn on the grid of [1, 2), summed exactly in float64 and rounded once by
    `round_to`. Arguments as in `bias_law`; several tails are drawn from. Reproducible by `seed`.
    """
    fmt, grid = _formats(fmt, value_format, tied, mode, same_sign)
    generator = torch.Generator().manual_seed(seed)
    steps = 2**grid.fraction_bits
    n = torch.randint(steps, 2 * steps, (draws, tied), generator=generator).double()
    flip = torch.rand(draws, tied, generator=generator) >= same_sign
    n = torch.where(flip, -n, n).sum(1)
    tails = torch.as_tensor(tail, dtype=torch.float64).reshape(-1)
    t = tails[torch.randint(tails.numel(), (draws,), generator=generator)]
    x = (n + t) / steps
    return signed_mean((round_to(x, fmt, mode, generator=generator) - x) / ulp(x, fmt))


def _formats(fmt, value_format, tied: int, mode: str, same_sign: float):
    fmt = parse_format(fmt)
    grid = fmt if value_format is None else parse_format(value_format)
    if not isinstance(tied, int) or tied < 1:
        raise ValueError(f"tied={tied!r}; use the number of keys with P_bar = 1, at least 1")
    if mode not in ROUNDINGS:
        raise ValueError(f"unknown rounding mode {mode!r}; use one of {', '.join(ROUNDINGS)}")
    if not 0 <= same_sign <= 1:
        raise ValueError(f"same_sign={same_sign} is not a probability; use 0 to 1")
    if grid.fraction_bits < fmt.fraction_bits:
        raise ValueError(
            f"values in {grid} are coarser than the result in {fmt}; give a value_format with at "
            f"least {fmt.fraction_bits} fraction bits"
        )
    if fmt.fraction_bits > FP32.fraction_bits:
        raise ValueError(f"the yardstick is float64, so {fmt} cannot be judged; use fp32 or less")
    if 2 * tied > fmt.max_finite:
        raise ValueError(f"{tied} values near 2 overflow {fmt}; use fewer")
    return fmt, grid


def _sum_distribution(tied: int, bits: int, same_sign: float) -> tuple[Tensor, Tensor]:
    """All sums of `tied` integers uniform on +-[2^bits, 2^(bits+1)), with their probabilities."""
    if tied * 2**bits > 2**20:
        raise ValueError(
            f"{tied} values of {bits} fraction bits have too many sums to enumerate; use a "
            "value_format of fewer bits ('fp32.14' behaves as fp32 does) or simulate_bias"
        )
    steps = 2**bits
    top = 2 * steps - 1
    one = torch.zeros(2 * top + 1, dtype=torch.float64)  # index i stands for the integer i - top
    one[top + steps :] = same_sign / steps
    one[: top - steps + 1] = (1 - same_sign) / steps
    size = tied * 2 * top + 1
    weight = torch.fft.irfft(torch.fft.rfft(one, 2 * size) ** tied, 2 * size)[:size].clamp(min=0)
    n = torch.arange(size, dtype=torch.float64) - tied * top
    keep = weight > 1e-15  # the rest is rounding noise of the transform
    return n[keep], weight[keep] / weight[keep].sum()


def _error(x: Tensor, fmt: FloatFormat, mode: str) -> tuple[Tensor, Tensor]:
    """Expected rounding error of each x, and its ulp (float64). Stochastic rounding expects 0."""
    unit = ulp(x, fmt)
    if mode == "stochastic":
        return torch.zeros_like(x), unit
    return round_to(x, fmt, mode) - x, unit


def _second_moment(n, t, grid, fmt, mode, error, unit) -> Tensor:
    """Expected squared error in ulps; for stochastic rounding f(1 - f), f the dropped fraction."""
    if mode != "stochastic":
        return (error / unit) ** 2
    scaled = (n + t) * 2.0**-grid.fraction_bits / unit
    dropped = scaled - scaled.floor()
    return dropped * (1 - dropped)


def _closed_form(tied: int, tail: float, fmt: FloatFormat, grid: FloatFormat, mode: str) -> float:
    """The docstring's law in ulps of the values; the binade of the sum taken at its mean."""
    if mode == "stochastic":
        return 0.0
    s = math.floor(math.log2(1.5 * tied)) + grid.fraction_bits - fmt.fraction_bits
    rest = tail % 1.0
    if s == 0:  # absorption on one grid
        if mode == "toward_zero" or rest < 0.5:
            return -rest
        return (0.0 if mode == "nearest_even" else 0.5) if rest == 0.5 else 1 - rest
    if mode == "toward_zero":
        return 0.5 - 2.0 ** (s - 1) - rest
    if rest == 0.0:
        return 0.0 if mode == "nearest_even" else 0.5
    return 0.5 - rest


# -- a meter for anybody's rounding ---------------------------------------------------------------


@dataclass(frozen=True)
class RoundingBias:
    """Mean of (|rounded| - |x|)/|x|: about 0 for nearest-even, clearly negative for truncation."""

    relative: SignedMean
    format: FloatFormat

    @property
    def biased(self) -> bool:
        """More than 6 standard errors off zero *and* over 1 % of the unit roundoff."""
        off = abs(self.relative.mean)
        return off > 6 * self.relative.stderr and off > 0.01 * self.format.unit_roundoff

    def __str__(self) -> str:
        word = "biased" if self.biased else "no bias found"
        return f"{word}: mean relative magnitude error {self.relative} in {self.format}"


def rounding_bias(
    rounder: Callable[[Tensor], Tensor],
    fmt: FloatFormat | str = BF16,
    *,
    draws: int = 2**20,
    seed: int = 0,
    device: str = "cpu",
) -> RoundingBias:
    """Measure the bias of a rounding function, a cast, or a kernel that stores in `fmt`.

    rounder: float32 tensor [draws] (standard normals) to a tensor of the same shape, any float
    dtype. Each single result of truncation is within one ulp, so tolerance tests pass; the mean
    tells: -2.8e-3 for bf16 truncation, about 1e-6 for nearest-even.
    """
    fmt = parse_format(fmt)
    x = torch.randn(draws, generator=torch.Generator().manual_seed(seed)).to(device)
    x = torch.where(x.abs() < fmt.min_normal, fmt.min_normal, x)
    rounded = rounder(x).double()
    if rounded.shape != x.shape:
        raise ValueError(f"the rounder turned shape {tuple(x.shape)} into {tuple(rounded.shape)}")
    wide = x.double().abs()
    return RoundingBias(signed_mean((rounded.abs() - wide) / wide), fmt)
