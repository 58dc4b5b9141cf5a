"""Statistics of a captured head for chapter 4: over time, by cause, by site, and under changes.

Errors of delta are given in units of their own rms, so that steps with gradients of different size
compare; standard errors take a whole sequence as one draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.forensics import (
    DeltaMeasurement,
    Head,
    SignedMean,
    clustered_mean,
    counts,
    delta_error,
    pieces,
)
from kernels.forensics.delta import CAUSES, row_causes, twin_outputs
from kernels.forensics.pieces import Setting
from kernels.numerics import Numerics, parse_numerics
from kernels.rounding import round_to, ulp

from .captured import Captured
from .chapter4 import plus_minus


def in_rms(mean: SignedMean, rms: float) -> SignedMean:
    """A mean and its standard error in units of `rms`."""
    scale = rms or 1.0
    return SignedMean(mean.mean / scale, mean.stderr / scale, mean.n)


@dataclass(frozen=True)
class Moment:
    """One head at one step. Shares are of rows; signs [Dv]: share of positive V per feature.

    tied_energy: share of the squared error of delta that tied rows carry.
    """

    step: int
    spectral_norm: float
    tied: float
    absorbing: float
    ones: float
    signs: Tensor
    bias: SignedMean
    relative: float
    tied_energy: float


def over_time(series: Iterable[Captured], numerics: Numerics | str | None = None) -> list[Moment]:
    """Counts and delta's error at every captured step; numerics: None for the run's own."""
    moments = []
    for captured in series:
        head, n = captured.head, numerics or captured.numerics
        found = counts(head, numerics=n)
        delta = delta_error(head, numerics=n, sites=False)
        moments.append(
            Moment(
                step=captured.step,
                spectral_norm=captured.spectral_norm,
                tied=found.tied_rows / found.rows,
                absorbing=found.absorbing_rows / found.rows,
                ones=float(found.ones.double().mean()),
                signs=(head.v > 0).double().mean((0, 1)),
                bias=in_rms(delta.mean, delta.rms),
                relative=delta.relative,
                tied_energy=delta.causes["tied"].energy,
            )
        )
    return moments


def standardised(series: Iterable[Captured], numerics=None) -> Tensor:
    """delta_lp - delta_hp of every row, each step in units of its rms; flat, finite rows."""
    parts = []
    for captured in series:
        delta = delta_error(captured.head, numerics=numerics or captured.numerics, sites=False)
        error = delta.error[torch.isfinite(delta.error)]
        parts.append(error / (delta.rms or 1.0))
    return torch.cat(parts)


def contributions(delta: DeltaMeasurement) -> dict[str, SignedMean]:
    """What each kind of rows, and each site, adds to the mean error of delta, in its rms.

    Means over all rows, with zero in the rows of other kinds: those of the three kinds add up to
    the mean, and so do those of the sites. Unlike shares of the sum they stay meaningful where the
    sum is not off zero.
    """
    finite = torch.isfinite(delta.error)
    labels = torch.arange(delta.error.shape[0])[:, None].expand_as(delta.error)[finite]
    found = {}
    for index, name in enumerate(CAUSES):
        part = torch.where(delta.cause == index, delta.error, 0.0)[finite]
        found[name] = in_rms(clustered_mean(part, labels), delta.rms)
    return found | {name: in_rms(p.mean, delta.rms) for name, p in delta.twin_sites.items()}


def attribution(head: Head, numerics: Numerics | str, delta: DeltaMeasurement) -> list[list[str]]:
    """Lines of a table: part, rows, what it adds to the mean of all rows (in rms), share of the
    sum with its interval, of squares, and for kinds of rows the bias of O in ulps.

    Where the whole sum is within two standard errors of zero its shares mean nothing: "-".
    """
    bias, adds = output_bias(head, numerics), contributions(delta)
    lines = [["all rows", f"{delta.error.numel():,}", told(delta.mean, delta.rms), "100%", "100%"]]
    off_zero = abs(delta.mean.z) > 2
    for kind, parts in (("rows", delta.causes), ("site", delta.twin_sites)):
        for name, part in parts.items():
            label = f"{name} rows" if kind == "rows" else f"rounding at `{name}`"
            share = f"{part.share:.0%} [{part.low:.0%}, {part.high:.0%}]"
            share = share if part.rows and off_zero else "-"
            added = plus_minus(adds[name]) if part.rows else "-"
            lines.append([label, f"{part.rows:,}", added, share, f"{part.energy:.0%}"])
    for line in lines:
        found = bias.get(line[0].removesuffix(" rows"))
        line.append(plus_minus(found) if found and found.n > 1 else "-")
    return lines


def output_bias(head: Head, numerics: Numerics | str) -> dict[str, SignedMean]:
    """Signed error of the stored O in ulps, away from zero positive: all rows, and by cause."""
    setting = Setting.of(head, numerics, True, None, 0)
    result, low, high = twin_outputs(head, setting)
    cause, _ = row_causes(head, setting, result)
    error = (low - high) / ulp(high, setting.numerics.output.format) * torch.sign(high)
    per_row = error.mean(-1)
    labels = torch.arange(per_row.shape[0])[:, None].expand_as(per_row)
    found = {"all": clustered_mean(per_row, labels)}
    for index, name in enumerate(CAUSES):
        found[name] = clustered_mean(per_row[cause == index], labels[cause == index])
    return found


def told(mean: SignedMean, rms: float) -> str:
    """'+0.047 ± 0.011' in units of `rms`."""
    return plus_minus(in_rms(mean, rms))


def pick(delta: DeltaMeasurement, row_rank: int, feature_rank: int) -> tuple[int, int, int]:
    """(sequence, row, feature) of the row with the nth largest error, and of its nth part."""
    size = delta.error.abs().nan_to_num(0.0, 0.0, 0.0)
    flat = size.flatten().topk(row_rank + 1).indices[-1]
    sequence, row = divmod(int(flat), size.shape[1])
    feature = delta.contribution[sequence, row].abs().topk(feature_rank + 1).indices[-1]
    return sequence, row, int(feature)


class Readings(NamedTuple):
    """differ: share of elements of O_bar that end on different stored numbers. once, each: signed
    error away from zero in units of `rms`, the size of the error when rounding once."""

    differ: float
    once: SignedMean
    each: SignedMean
    rms_once: float
    rms_each: float


def both_sums(head: Head, numerics: Numerics | str) -> tuple[Tensor, Tensor, Tensor]:
    """O_bar [N, T, Dv] rounded once, rounded after each addition (fp32, key by key), and exact."""
    setting = Setting.of(head, numerics, True, None, 0)
    n = setting.numerics
    m = pieces.forward(head, setting).m.squeeze(1).unsqueeze(-1)
    p = pieces.rounded_probabilities(pieces.scores(head, setting), m, n).float()
    v = pieces.on_grid(head.v, n).float()
    fmt, once = n.unnormalized.format, torch.zeros(v.shape[0], p.shape[1], v.shape[-1])
    each = once.clone()
    for key in range(v.shape[1]):
        term = p[:, :, key, None] * v[:, None, key]
        once += term
        each = round_to(each + term, fmt)
    return round_to(once, fmt), each, p.double() @ v.double()


def both_readings(head: Head, numerics: Numerics | str) -> Readings:
    """All of O_bar by both readings of the paper."""
    once, each, exact = both_sums(head, numerics)
    rms = [float((x.double() - exact).square().mean().sqrt()) for x in (once, each)]
    labels = torch.arange(exact.shape[0])[:, None, None].expand_as(exact)
    away = [
        in_rms(clustered_mean(x.double().abs() - exact.abs(), labels), rms[0])
        for x in (once, each)
    ]
    return Readings(float((once != each).double().mean()), *away, *rms)


# -- the same head, changed -----------------------------------------------------------------------


class OutputError(NamedTuple):
    """bias: signed error of O in ulps, away from zero positive. rms: its size. shared: the share
    of its square that a sequence's rows have in common. delta: mean error of delta in its rms."""

    bias: SignedMean
    rms: float
    shared: float
    delta: SignedMean


def output_error(head: Head, numerics: Numerics | str, *, seed: int = 0) -> OutputError:
    """Signed error of the O that delta reads, against the unrounded one."""
    setting = Setting.of(head, numerics, True, None, seed)
    _, low, high = twin_outputs(head, setting)
    fmt = setting.numerics.output.format
    error = (low - high) / ulp(high, fmt)
    away = error * torch.sign(high)
    labels = torch.arange(error.shape[0])[:, None, None].expand_as(error)
    square = float(error.square().mean())
    rows = error.shape[1]
    common = error.mean(1).square() - error.var(1) / rows
    dO = pieces.on_grid(head.dO, setting.numerics).double()
    delta = (dO * (low - high)).sum(-1)
    return OutputError(
        bias=clustered_mean(away, labels),
        rms=square**0.5,
        shared=float(common.mean()) / square if square else 0.0,
        delta=in_rms(clustered_mean(delta, labels[..., 0]), float(delta.square().mean().sqrt())),
    )


def shifted(head: Head, sign: int, numerics: Numerics | str) -> Head:
    """V plus or minus its mean over keys, per sequence and feature, on V's grid.

    sign -1 balances the signs of V, +1 is the sham of the same size. Rows of P sum to 1, so in
    exact arithmetic O moves by the offset and nothing else changes.
    """
    site = parse_numerics(numerics).inputs
    v = head.v.double() + sign * head.v.double().mean(1, keepdim=True)
    return replace(head, v=round_to(v, site.format).to(head.v.dtype))


def stochastic(numerics: Numerics | str) -> Numerics:
    """The same numerics with O_bar and O rounded stochastically where they are rounded."""
    n = parse_numerics(numerics)
    sites = ("unnormalized", "output")
    changes = {s: replace(getattr(n, s), rounding="stochastic") for s in sites}
    return n.at(**changes, name=f"{n.name},stochastic")


def offset_heads(head: Head, numerics: Numerics | str) -> dict[str, OutputError]:
    """The head as it is, with V balanced, and with the opposite offset."""
    return {
        "as captured": output_error(head, numerics),
        "V balanced": output_error(shifted(head, -1, numerics), numerics),
        "sham offset": output_error(shifted(head, +1, numerics), numerics),
    }


def changed_heads(head: Head, numerics: Numerics | str) -> dict[str, OutputError]:
    """`offset_heads`, and the head as it is rounded stochastically."""
    rounded = {"stochastic rounding": output_error(head, stochastic(numerics))}
    return offset_heads(head, numerics) | rounded
