"""Stabilised flash attention on crafted rows: its rule, its holes and its side effects, measured.

Nothing is trained here. A row is one query whose scores are given; it goes through
`kernels.emulated`, so what is measured is what training uses. Errors of O are relative or in ulps;
signed ones count away from zero. rm is the maximum of a row, c = m - rm the policy's offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from IPython.display import Markdown
from torch import Tensor

from kernels import emulated
from kernels.forensics import SignedMean, signed_mean
from kernels.formats import BF16, FloatFormat, parse_format
from kernels.numerics import Numerics, parse_numerics
from kernels.result import ForwardResult
from kernels.rounding import ulp

from .tables import markdown_table

# The carrier's exp gives 0 below this exponent (kernels.sites.exp_in_place).
CARRIER_UNDERFLOW = 87.25

ALGORITHM = """\
r_m = rowmax(S)
r_s = rowsum(S == r_m)             # how often the maximum occurs
m   = where(r_m > 0 and r_s > 1, beta * r_m, r_m)
m   = where(r_m < 0 and r_s > 1, 0, m)
P   = exp(S - m)                   # the rest is flash attention
"""


def attend(scores: Tensor, v: Tensor, numerics: Numerics | str) -> ForwardResult:
    """Rows with given scores [n, K] and values v [n, K, Dv], probed; results [n, 1, 1, ...].

    The scores still pass the site `scores`.
    """
    n = parse_numerics(numerics)
    q = scores.new_ones(len(scores), 1, 1, 1)
    return emulated.forward(
        q, scores[:, None, :, None], v[:, None], numerics=n, causal=False, scale=1.0, probe=True
    )


def kernel_source() -> str:
    """The rule as the Triton kernel has it, as text (Triton need not be installed)."""
    from . import ROOT

    text = (ROOT / "kernels" / "triton_forward.py").read_text(encoding="utf-8")
    start = text.index("def shifted_reference")
    return text[start : text.index("@triton.jit", start)].rstrip() + "\n"


# -- equality in exact arithmetic -----------------------------------------------------------------


def crafted_scores(keys: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Name -> scores [n, keys]: random rows and those that were made to hurt."""
    generator = torch.Generator().manual_seed(seed)
    S = 3 * torch.randn(200, keys, generator=generator, dtype=torch.float64)
    top = S.amax(-1, keepdim=True)
    tied = S.clone()
    tied[:, :3] = top
    sink = torch.full((50, keys), -30.0, dtype=torch.float64)
    sink[:, 0] = 4.0
    return {
        "random, no tie": S,
        "random, three tied maxima": tied,
        "all scores equal and positive": torch.full((1, keys), 5.0, dtype=torch.float64),
        "all scores equal and negative": torch.full((1, keys), -5.0, dtype=torch.float64),
        "all scores zero": torch.zeros(1, keys, dtype=torch.float64),
        "maximum zero, tied": tied - top,
        "maximum 1e-6, tied": tied - top + 1e-6,
        "maximum -40, tied": tied - top - 40.0,
        "maximum 30, tied": tied - top + 30.0,
        "one sink": sink,
        "two sinks": torch.cat([sink, sink], -1),
    }


def exact_differences(policies: Mapping[str, str], seed: int = 0) -> list[list]:
    """A line per kind of row: largest |O - O_safe| / largest |O_safe| per policy, float64."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for name, S in crafted_scores(seed=seed).items():
        v = torch.randn(*S.shape, 8, generator=generator, dtype=torch.float64)
        safe = attend(S, v, "exact,compute=fp64").out
        line = [name]
        for text in policies.values():
            out = attend(S, v, f"exact,compute=fp64,{text}").out
            line.append(float((out - safe).abs().max() / safe.abs().max()))
        lines.append(line)
    return lines


# -- holes: what P_bar becomes --------------------------------------------------------------------


def _tied_pair(maxima: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
    """Two keys at rm and one 4 below, values 1, 1 and 2: scores [n, 3], v [n, 3, 1]."""
    rm = torch.as_tensor(maxima, dtype=torch.float32).reshape(-1, 1)
    v = torch.tensor([1.0, 1.0, 2.0]).reshape(1, 3, 1).expand(len(rm), 3, 1)
    return torch.cat([rm, rm, rm - 4], -1), v


def largest_weight(maxima: Sequence[float], policy: str) -> Tensor:
    """P_bar of the tied maxima, before its rounding, at each rm: float64 [n]."""
    S, v = _tied_pair(maxima)
    m = attend(S, v, f"exact,{policy}").m.reshape(-1)
    return (S[:, 0].double() - m.double()).exp()


def reaches_one(maxima: Sequence[float], policy: str, fmt: FloatFormat | str = BF16) -> Tensor:
    """Whether the tied maxima still have P_bar = 1 after rounding: bool [n]."""
    S, v = _tied_pair(maxima)
    result = attend(S, v, f"exact,probabilities={parse_format(fmt)},{policy}")
    return (result.ones > 1).reshape(-1)


@dataclass(frozen=True)
class Boundary:
    """Sizes |rm| between which published SFA does what it promises, for one format of P_bar.

    sign: of the row maximum. A tied row has the weight exp(-(beta - 1) rm) where rm > 0 and
    exp(-|rm|) where rm < 0, whatever beta: `rate` is the factor of |rm|.
    one: below it P_bar still rounds to 1. zero: from it on every P_bar rounds to 0 while the row
    sum, taken before the rounding, does not: O = 0. nan: from it on the row sum is 0: O = 0/0.
    Each measured by bisection. law_one, law_zero, law_nan: what the format says.
    """

    format: FloatFormat
    beta: float
    sign: int
    one: float
    zero: float
    nan: float

    @property
    def rate(self) -> float:
        return self.beta - 1 if self.sign > 0 else 1.0

    @property
    def law_one(self) -> float:
        """P_bar > 1 - 2^-(b+2), half a step of the binade below 1, rounds to 1."""
        return -math.log1p(-(2.0 ** -(self.format.fraction_bits + 2))) / self.rate

    @property
    def law_zero(self) -> float:
        """P_bar at most half of the smallest subnormal rounds to 0, ties to even."""
        c = math.log(2) - math.log(self.format.min_subnormal)
        return min(c, CARRIER_UNDERFLOW) / self.rate

    @property
    def law_nan(self) -> float:
        return CARRIER_UNDERFLOW / self.rate


def boundary(fmt: FloatFormat | str = BF16, beta: float = 7.0, sign: int = 1) -> Boundary:
    """Measure the three sizes of a row maximum at which a tied row changes its nature."""
    fmt = parse_format(fmt)
    text = f"exact,probabilities={fmt},softmax=stabilized,beta={beta}"

    def result(size: float) -> ForwardResult:
        return attend(*_tied_pair([sign * size]), text)

    def one(size):
        return int(result(size).ones.item()) < 2

    def zero(size):
        return not float(result(size).out.item()) > 0  # NaN counts

    def nan(size):
        return math.isnan(float(result(size).out.item()))

    top = 1.5 * CARRIER_UNDERFLOW / (beta - 1 if sign > 0 else 1)
    return Boundary(fmt, beta, sign, *(_first(test, top) for test in (one, zero, nan)))


def boundary_table(found: Sequence[Boundary]) -> Markdown:
    """Measured boundaries beside what the formats say."""
    lines = []
    for b in found:
        pairs = ((b.one, b.law_one), (b.zero, b.law_zero), (b.nan, b.law_nan))
        told = f"positive, β = {b.beta:g}" if b.sign > 0 else "negative, any β"
        lines.append([b.format, told, *(f"{x:.4g} ({law:.4g})" for x, law in pairs)])
    header = ["P̄ in", "maximum", "rounds to 1 below", "all zero from", "0/0 from"]
    return markdown_table([*header[:2], *(f"{h} (computed)" for h in header[2:])], lines)


def _first(test: Callable[[float], bool], top: float) -> float:
    """The smallest number in (0, top] at which a monotone test holds, to 1e-6 of it."""
    low, high = 0.0, top
    for _ in range(60):
        middle = (low + high) / 2
        if test(middle):
            high = middle
        else:
            low = middle
        if high - low < 1e-6 * high:
            break
    return high


# -- bias, and what replaces it -------------------------------------------------------------------


class TiedError(NamedTuple):
    """o_bar, output: signed errors of O_bar (rounded alone) and of the stored O, in ulps.

    scale_mean, scale_rms: relative change of O before any rounding of O_bar and O, against exact
    arithmetic on the same scores: the same for every feature of a row. ones: share of rows in
    which two or more P_bar are 1.
    """

    o_bar: SignedMean
    output: SignedMean
    scale_mean: float
    scale_rms: float
    ones: float


def tied_error(
    policy: str,
    fmt: FloatFormat | str = BF16,
    *,
    tied: int = 2,
    maxima: tuple[float, float] = (0.5, 8.0),
    gap: float = 0.0,
    rows: int = 4000,
    features: int = 16,
    seed: int = 0,
) -> TiedError:
    """Errors on random rows: `tied` maxima and two tiny weights, values on the grid in -(2..4).

    maxima: range of rm, on the grid of `fmt`. gap: the second maximum lies this far below the
    first, for `tied` = 2. policy: text such as 'softmax=guarded,beta=7'.
    """
    fmt = parse_format(fmt)
    S, v = _random_rows(fmt, tied, maxima, gap, rows, features, seed)
    base = parse_numerics(f"exact,probabilities={fmt},unnormalized={fmt},{policy}")
    bar = attend(S, v, base)
    total = bar.out_fp32 * bar.l.unsqueeze(-1)
    o_bar = ((bar.out.abs() - bar.out_fp32.abs()) * bar.l.unsqueeze(-1)) / ulp(total, fmt)
    low = attend(S, v, base.at(output=fmt))
    exact = attend(S.double(), v.double(), "exact,compute=fp64").out
    error = (low.out.double().abs() - exact.abs()) / ulp(exact, fmt)
    scale = (bar.out_fp32.double() * exact).sum(-1) / exact.square().sum(-1) - 1
    return TiedError(
        signed_mean(o_bar.double().mean(-1)),
        signed_mean(error.mean(-1)),
        float(scale.mean()),
        float(scale.square().mean().sqrt()),
        float((bar.ones > 1).double().mean()),
    )


def _random_rows(fmt, tied, maxima, gap, rows, features, seed) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low, high = maxima
    rm = low + (high - low) * torch.rand(rows, 1, generator=generator)
    if not gap:
        rm = rm - rm % 2.0 ** -min(fmt.fraction_bits, 6)
    tail = rm - 9 - 2 * torch.rand(rows, 2, generator=generator)
    S = torch.cat([rm, *([rm - gap] * (tied - 1)), tail], -1)
    steps = 2**fmt.fraction_bits
    n = torch.randint(steps, 2 * steps, (rows, S.shape[1], features), generator=generator)
    return S, -n.float() * (2 / steps)


@dataclass(frozen=True)
class Tolerance:
    """Shares of rows for one eps: two P_bar of 1 under plain softmax; those that SFA finds;
    those that it misses; and false ties, moved although plain softmax has one P_bar of 1."""

    eps: float
    repeated: float
    found: float
    missed: float
    false: float


def tolerance(
    eps: float, *, scores: FloatFormat | str = BF16, fmt: FloatFormat | str = BF16, spread=2.0,
    keys: int = 64, rows: int = 20_000, seed: int = 0,
) -> Tolerance:  # fmt: skip
    """What eps finds, misses and mistakes among random rows: scores normal with this spread.

    scores: format of S; fp32 leaves near ties that are no ties, and P_bar rounds both to 1.
    """
    generator = torch.Generator().manual_seed(seed)
    S = spread * torch.randn(rows, keys, generator=generator)
    v = torch.ones(rows, keys, 1)
    sites = f"exact,scores={parse_format(scores)},probabilities={parse_format(fmt)}"
    plain = attend(S, v, sites)
    sfa = attend(S, v, f"{sites},softmax=guarded,eps={eps}")
    repeated, moved = plain.ones.reshape(-1) > 1, (sfa.m != plain.m).reshape(-1)

    def share(x: Tensor) -> float:
        return float(x.double().mean())

    return Tolerance(
        eps,
        share(repeated),
        share(repeated & moved),
        share(repeated & ~moved),
        share(moved & ~repeated),
    )


def raised_by_a_tile(beta: float = 7.0, tile: int = 4) -> list[list]:
    """Scores whose largest is single, while a smaller maximum is tied within another tile.

    One line per way to decide: reference m, largest P_bar, entries of 1.
    """
    S = torch.tensor([[6.0, 6.0, 1.0, 0.0, 8.0, 2.0, 1.0, 0.0]])
    v = torch.ones(1, 8, 1)
    lines = []
    for decide in ("row", "tile"):
        policy = f"softmax=stabilized,beta={beta:g},decide={decide},tile={tile}"
        result = attend(S, v, f"exact,probabilities=bf16,{policy}")
        m = float(result.m.item())
        lines.append([decide, m, math.exp(8.0 - m), int(result.ones.item())])
    return lines


def scale_by_maximum(maxima: Sequence[float], policy: str, fmt: FloatFormat | str) -> Tensor:
    """Relative change of O (O_bar and O unrounded) of a tied pair at each rm: float64 [n].

    Rounding one P_bar that all tied keys share multiplies O_bar; the row sum of unrounded P_bar
    does not follow.
    """
    S, v = _tied_pair(maxima)
    n = parse_numerics(f"exact,probabilities={parse_format(fmt)},{policy}")
    result = attend(S, v, n)
    exact = attend(S.double(), v.double(), "exact,compute=fp64").out
    return (result.out.double() / exact - 1).reshape(-1)


def with_row_sum(policy: str, source: str) -> str:
    """The policy's text with the row sum of 'rounded' or 'unrounded' P_bar."""
    return f"{policy},row_sum_source={source}"
