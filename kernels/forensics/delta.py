"""The error of delta: how much of it, of what sign, in which rows, from which rounding site.

delta = rowsum(dO * O) is one number per row that the backward pass subtracts from every dP of that
row. The paper's error is e = delta_lp - delta_hp: delta_lp reads the stored O, delta_hp an O
computed from the same rounded P_bar whose O_bar and O were not rounded, so that

    e[T] = sum_d dO[T, d] (O_lp - O_hp)[T, d]                    (paper section 3.3.2, Fig. 5)

and only the sites `unnormalized`, `output` and `delta_output` take part. Their split is exact.
For the other sites delta itself changes, and `sites` measures that against delta without any
rounding; note that S, once rounded, is the same S in the backward, so that its change of delta is
a change of the function, not an inconsistency inside the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import FP32, FP64
from ..numerics import Numerics, Site
from ..result import ForwardResult
from ..rounding import ulp
from . import pieces
from .inputs import Head, as_head
from .pieces import Setting
from .stats import (
    SignedMean,
    SignTest,
    block_labels,
    clustered_mean,
    flat,
    share_intervals,
    sign_test,
    signed_mean,
)

CAUSES = ("other", "absorbing", "tied")
FORWARD_SITES = (
    "scores",
    "reference_format",
    "probabilities",
    "row_sum",
    "unnormalized",
    "output",
    "delta_output",
)


@dataclass(frozen=True)
class Part:
    """Some rows' (or one site's) part in sum_T e[T].

    total: sum of e over these rows. share: of the sum over all rows, with a 95 % interval from
    resampled clusters; can be negative or above 1. energy: share of sum e^2. mean: of e over
    these rows, with its clustered standard error.
    """

    rows: int
    total: float
    share: float
    low: float
    high: float
    energy: float
    mean: SignedMean


@dataclass(frozen=True)
class SiteEffect:
    """What one site does to delta, in a float64 carrier, against delta with no site rounding.

    alone: only this site rounds. without: every site of the numerics but this one.
    """

    alone: SignedMean
    alone_rms: float
    without: SignedMean
    without_rms: float


@dataclass(frozen=True)
class DeltaMeasurement:
    """e = delta_lp - delta_hp of one head, float64.

    error [N, T] (nan in nonfinite rows). mean: signed mean with the clustered standard error, and
    `naive` with rows taken as independent. sign: counts of e > 0, e < 0. relative: rms of e over
    rms of delta_hp. cause int64 [N, T]: index into CAUSES. causes, twin_sites: parts that add up
    to sum e. sites: each site alone and all but one; {} unless asked for, with `all_sites` the
    effect of all together.
    output [N, T, Dv]: O_hp; output_error: O_lp - O_hp; contribution: dO * (O_lp - O_hp), whose sum
    over features is e (paper Fig. 5b, c). feature_total [Dv]: its sum over rows.
    feature_output_error, feature_dO [Dv]: means over rows.
    absorbing_elements: share of (row, feature) pairs of untied rows whose tail is lost.
    """

    error: Tensor
    mean: SignedMean
    naive: SignedMean
    sign: SignTest
    rms: float
    relative: float
    clusters: str
    cause: Tensor
    causes: dict[str, Part]
    twin_sites: dict[str, Part]
    sites: dict[str, SiteEffect]
    all_sites: SignedMean | None
    output: Tensor
    output_error: Tensor
    contribution: Tensor
    feature_total: Tensor
    feature_output_error: Tensor
    feature_dO: Tensor
    absorbing_elements: float
    nonfinite_rows: int


def delta_error(
    q,
    k=None,
    v=None,
    dO=None,
    *,
    numerics: Numerics | str = "paper",
    causal: bool = True,
    scale: float | None = None,
    sites: bool = True,
    block: int | None = None,
    seed: int = 0,
) -> DeltaMeasurement:
    """Measure e = delta_lp - delta_hp for one head.

    q, k, v, dO: as in `as_head`. numerics: what delta_lp is computed with. sites: also run each
    site alone and all but one (two emulator runs a site). block: rows per cluster within a
    sequence, for the standard errors; None takes whole sequences if there are 8 or more, else 16
    blocks a sequence. Raises ValueError without dO, or for delta='dP_P', which reads no O.
    """
    head = as_head(q, k, v, dO)
    head.need("dO")
    setting = Setting.of(head, numerics, causal, scale, seed)
    check_reads_output(setting.numerics)
    result, O_lp, O_hp = twin_outputs(head, setting)
    weight = pieces.on_grid(head.dO, setting.numerics).double()
    contribution = weight * (O_lp - O_hp)
    error = contribution.sum(-1)
    finite = torch.isfinite(error)
    labels, told = _clusters(error.shape, block)
    cause, absorbing = row_causes(head, setting, result)
    good = error[finite]
    delta_hp = (weight * O_hp).sum(-1)[finite]
    masks = {name: finite & (cause == i) for i, name in enumerate(CAUSES)}
    clean = contribution.nan_to_num(0.0, 0.0, 0.0)
    count = max(int(finite.sum()), 1)
    effects, together = ({}, None)
    if sites:
        effects, together = _site_effects(head, setting, weight, labels)
    return DeltaMeasurement(
        error=error,
        mean=clustered_mean(good, labels[finite]),
        naive=signed_mean(good),
        sign=sign_test(good),
        rms=_rms(good),
        relative=_rms(good) / _rms(delta_hp) if good.numel() and _rms(delta_hp) else 0.0,
        clusters=told,
        cause=cause,
        causes=_parts({n: torch.where(x, error, 0.0) for n, x in masks.items()}, masks, labels),
        twin_sites=_twin_sites(head, setting, result, weight, O_lp, O_hp, finite, labels),
        sites=effects,
        all_sites=together,
        output=O_hp,
        output_error=O_lp - O_hp,
        contribution=contribution,
        feature_total=clean.sum((0, 1)),
        feature_output_error=(O_lp - O_hp)[finite].sum(0) / count,
        feature_dO=weight[finite].sum(0) / count,
        absorbing_elements=float(absorbing.double().mean()),
        nonfinite_rows=int((~finite).sum()),
    )


def check_reads_output(numerics: Numerics) -> None:
    if numerics.delta != "dO_O":
        raise ValueError(
            f"numerics {str(numerics)!r} take delta from dP*P, which reads no stored O: there is "
            "no delta_lp - delta_hp to measure; use delta=dO_O"
        )


def twin_outputs(head: Head, setting: Setting) -> tuple[ForwardResult, Tensor, Tensor]:
    """(forward result, O_lp, O_hp): the O that delta reads, and the unrounded one, [N, T, Dv]."""
    numerics = setting.numerics.at(delta_error=None)
    result = pieces.forward(head, setting, numerics)
    low = result.out if result.delta_output is None else result.delta_output
    return result, low.squeeze(1).double(), result.out_fp32.squeeze(1).double()


def row_causes(head: Head, setting: Setting, result: ForwardResult) -> tuple[Tensor, Tensor]:
    """Why a row may err on one side: (index into CAUSES int64 [N, T], absorbed bool [N, T, Dv]).

    tied: two or more visible keys share the maximal rounded score. absorbing: not tied, and in at
    least half of the features the rest of the sum is smaller than half an ulp of the dominant
    key's term, so that rounding returns to it: O_bar against P_bar v at the site `unnormalized`;
    where that site does not round, O against v at the site `output`.
    """
    n = setting.numerics
    S = pieces.scores(head, setting)
    top, where = S.max(-1, keepdim=True)
    v = pieces.on_grid(head.v, n).double()
    dominant = v.gather(1, where.expand(-1, -1, v.shape[-1]))
    O_hp = result.out_fp32.squeeze(1).double()
    if n.unnormalized.format.fraction_bits < FP32.fraction_bits:
        m = result.m.squeeze(1).unsqueeze(-1)
        weight = pieces.rounded_probabilities(top, m, n)
        dominant = weight.double() * dominant
        total, fmt = O_hp * result.l.squeeze(1).unsqueeze(-1).double(), n.unnormalized.format
    else:
        site = n.delta_output or n.output
        total, fmt = O_hp, site.format
    tail = (total - dominant).abs()
    # under 2^-20 of the term itself, what is left is the carrier's own rounding
    absorbed = (tail < ulp(dominant, fmt) / 2) & (tail > dominant.abs() * 2.0**-20)
    if fmt.fraction_bits >= FP32.fraction_bits:
        absorbed = torch.zeros_like(absorbed)
    tied = result.ties.squeeze(1) > 1
    absorbed &= ~tied.unsqueeze(-1)
    cause = torch.where(absorbed.double().mean(-1) >= 0.5, 1, 0)
    return torch.where(tied, 2, cause), absorbed


def _clusters(shape, block: int | None) -> tuple[Tensor, str]:
    sequences, rows = shape
    if block is None and sequences >= 8:
        return torch.arange(sequences)[:, None].expand(shape), f"{sequences} sequences"
    size = block or max(1, -(-rows // 16))
    return block_labels(shape, size), f"blocks of {size} rows"


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _parts(errors: dict[str, Tensor], masks: dict[str, Tensor], labels: Tensor) -> dict[str, Part]:
    """Parts of sum e by name; `errors` [N, T] add up to e, masks say which rows count."""
    _, index = labels.reshape(-1).unique(return_inverse=True)
    clean = {name: e.nan_to_num(0.0, 0.0, 0.0) for name, e in errors.items()}
    stacked = torch.stack([e.reshape(-1) for e in clean.values()], 1)
    sums = torch.zeros(int(index.max()) + 1, len(clean), dtype=torch.float64)
    intervals = share_intervals(sums.index_add_(0, index, stacked))
    squares = stacked.square().sum(0)
    energy = squares / squares.sum() if float(squares.sum()) else squares
    return {
        name: Part(
            rows=int(masks[name].sum()),
            total=float(e.sum()),
            share=float(intervals[i, 0]),
            low=float(intervals[i, 1]),
            high=float(intervals[i, 2]),
            energy=float(energy[i]),
            mean=clustered_mean(e[masks[name]], labels[masks[name]]),
        )
        for i, (name, e) in enumerate(clean.items())
    }


def _twin_sites(head, setting, result, weight, O_lp, O_hp, finite, labels) -> dict[str, Part]:
    """e split into what rounding O_bar, and what rounding O after it, add. An exact split."""
    n = setting.numerics.at(delta_error=None)
    rows = dict.fromkeys(("unnormalized", "output", "delta_output"), finite)
    if n.delta_output is not None:  # it reads the unrounded O_bar, so one site does everything
        return _parts({"delta_output": (weight * (O_lp - O_hp)).sum(-1)}, rows, labels)
    between = pieces.forward(head, setting, n.at(output=FP32)).out.squeeze(1).double()
    split = {
        "unnormalized": (weight * (between - O_hp)).sum(-1),
        "output": (weight * (O_lp - between)).sum(-1),
    }
    return _parts(split, rows, labels)


def _site_effects(head: Head, setting: Setting, weight: Tensor, labels: Tensor):
    """Each rounding site alone, and all but it; then all together."""
    n = setting.numerics.at(delta_error=None, compute=FP64)
    active = [s for s in FORWARD_SITES if _rounds(getattr(n, s))]
    nothing = n.at(**{s: FP32 for s in active if s != "delta_output"}, delta_output=None)

    def delta(numerics: Numerics) -> Tensor:
        result = pieces.forward(head, setting, numerics)
        low = result.out if result.delta_output is None else result.delta_output
        return (weight * low.squeeze(1).double()).sum(-1)

    reference = delta(nothing)

    def effect(numerics: Numerics) -> tuple[SignedMean, float]:
        change = delta(numerics) - reference
        finite = torch.isfinite(change)
        return clustered_mean(change[finite], labels[finite]), _rms(flat(change[finite]))

    effects = {}
    for site in active:
        alone = effect(nothing.at(**{site: getattr(n, site)}))
        without = effect(n.at(**{site: None if site == "delta_output" else FP32}))
        effects[site] = SiteEffect(*alone, *without)
    return effects, effect(n)[0]


def _rounds(site: Site | None) -> bool:
    return site is not None and site.format.fraction_bits < FP32.fraction_bits
