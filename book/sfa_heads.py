"""Captured heads under stabilised softmax: which rows broke, and what makes delta's error.

A policy is text as `parse_numerics` reads it, such as 'softmax=guarded,beta=7'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from IPython.display import Markdown
from torch import Tensor

from kernels import emulated, oracle
from kernels.forensics import Head, SignedMean, clustered_mean, pieces
from kernels.forensics.pieces import Setting
from kernels.formats import FP32
from kernels.numerics import Numerics, parse_numerics

from .captured import Captured, captured_heads
from .sfa_rows import CARRIER_UNDERFLOW
from .tables import markdown_table

POLICIES = {
    "plain": "softmax=safe",
    "SFA, β = 2": "softmax=stabilized,beta=2",
    "SFA, β = 7": "softmax=stabilized,beta=7",
    "guarded": "softmax=guarded,beta=7",
    "guarded, l of rounded P̄": "softmax=guarded,beta=7,row_sum_source=rounded",
}


def under(numerics: Numerics | str, changes: str) -> Numerics:
    """`numerics` with changes as `parse_numerics` reads them, such as 'softmax=guarded,beta=7'."""
    changed = parse_numerics(f"exact,{changes}")
    return parse_numerics(numerics).at(
        softmax=changed.softmax, row_sum_source=changed.row_sum_source
    )


# -- what broke -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokenHead:
    """One head of the step that broke, over all captured sequences.

    lost: maxima of the rows whose O is not finite while all that their sequence brought is, in
    order. kept: those of tied rows that came out finite. spoilt: rows of sequences that an earlier
    layer had broken. tied: share of tied rows.
    """

    layer: int
    head: int
    rows: int
    spoilt: int
    tied: float
    lost: tuple[float, ...]
    kept: tuple[float, ...]


def broken_heads(paths: Iterable[Path]) -> tuple[int, list[BrokenHead]]:
    """(step, heads) of the last captured step, under the run's own numerics."""
    found = captured_heads(paths)
    step = found[-1].step
    return step, [_broken(c) for c in found if c.step == step]


def _broken(captured: Captured) -> BrokenHead:
    with np.load(captured.path) as file:  # not load_head, which refuses what broke
        head = Head(*(torch.from_numpy(file[name]) for name in ("q", "k", "v")))
    setting = Setting.of(head, captured.numerics, True, None, 0)
    result = pieces.forward(head, setting)
    rm = pieces.scores(head, setting).amax(-1)
    given = torch.cat([head.q, head.k, head.v], -1)
    sound = torch.isfinite(given).all(-1).all(-1, keepdim=True).expand_as(rm)
    lost = sound & ~torch.isfinite(result.out.squeeze(1)).all(-1)
    tied = sound & (result.ties.squeeze(1) > 1)
    return BrokenHead(
        captured.layer,
        captured.place,
        rows=rm.numel(),
        spoilt=int((~sound).sum()),
        tied=float(tied.double().mean()),
        lost=tuple(rm[lost].sort().values.tolist()),
        kept=tuple(rm[tied & ~lost].sort().values.tolist()),
    )


def broken_table(heads: Sequence[BrokenHead]) -> Markdown:
    """Which rows were lost, by head."""
    lines = [
        [
            f"layer {h.layer}, head {h.head}",
            f"{len(h.lost)} of {h.rows}",
            h.spoilt,
            _range(h.lost),
            f"{h.tied:.0%}",
            _range(h.kept),
        ]
        for h in heads
    ]
    header = ["head", "rows lost", "spoilt before", "their maxima", "tied", "tied maxima kept"]
    return markdown_table(header, lines)


def _range(x: Sequence[float]) -> str:
    return f"{x[0]:.3g} to {x[-1]:.3g}" if x else "none"


def broken_sentence(label: str, beta: float, step: int, heads: Sequence[BrokenHead]) -> str:
    """Whether the lost rows are those that underflow, in one sentence."""
    low, high = -CARRIER_UNDERFLOW, CARRIER_UNDERFLOW / (beta - 1)
    lost = [x for h in heads for x in h.lost]
    kept = [x for h in heads for x in h.kept]
    if not lost:
        return f"{label}: no row was lost in the forward pass of step {step:,}."
    above, below = sum(x > high for x in lost), sum(x < low for x in lost)
    outside = sum(not low < x < high for x in kept)
    if above + below == len(lost) and not outside:
        told = "and every tied row that was kept lies between the bounds: an underflow"
    else:
        told = f"and {outside} rows outside were kept: not, or not only, an underflow"
    return (
        f"{label}: of {len(lost)} rows lost at step {step:,}, {above} have maxima above "
        f"{high:.4g} and {below} below {low:.4g}, {told}."
    )


# -- which site is at work ------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaPart:
    """A part of delta's error. bias: signed mean in rms of the whole error of plain softmax;
    size: its rms in that unit; gradient: |error it makes in dW_Q| / |dW_Q|."""

    bias: SignedMean
    size: float
    gradient: float


PARTS = ("P̄ and l", "Ō", "stored O", "all")


def delta_parts(
    head: Head, numerics: Numerics | str, unit: float | None = None
) -> tuple[dict[str, DeltaPart], float]:
    """Split delta_lp - rowsum(dP * P) by what was rounded; also returns the rms of all, the unit.

    P is the softmax of the rounded scores, as the backward recomputes it, so rounding S is no part
    of it. "P̄ and l": O from rounded P̄ and the row sum against P V; "Ō" and "stored O" as in
    `kernels.forensics.delta_error`. The three add up, row by row. head: with X (and any W_Q).
    """
    n = parse_numerics(numerics)
    setting = Setting.of(head, n, True, None, 0)
    result = pieces.forward(head, setting)
    dO, V, K = (pieces.on_grid(x, n).double() for x in (head.dO, head.v, head.k))
    P = torch.softmax(pieces.scores(head, setting).double(), -1)
    dP = dO @ V.mT
    delta = (dP * P).sum(-1)
    between = pieces.forward(head, setting, n.at(output=FP32)).out.squeeze(1).double()
    hp, low = (x.squeeze(1).double() for x in (result.out_fp32, result.out))
    errors = {
        "P̄ and l": (dO * hp).sum(-1) - delta,
        "Ō": (dO * (between - hp)).sum(-1),
        "stored O": (dO * (low - between)).sum(-1),
    }
    errors["all"] = (dO * low).sum(-1) - delta
    PK, X = P @ K, head.X.double()
    dW = ((P * (dP - delta.unsqueeze(-1))) @ K).flatten(0, 1).T @ X.flatten(0, 1)
    unit = unit or _rms(errors["all"])
    labels = torch.arange(len(X))[:, None].expand(X.shape[:2])
    parts = {}
    for name, e in errors.items():
        wrong = (e.unsqueeze(-1) * PK).flatten(0, 1).T @ X.flatten(0, 1)
        finite = torch.isfinite(e)
        bias = clustered_mean(e[finite] / unit, labels[finite])
        parts[name] = DeltaPart(bias, _rms(e) / unit, float(wrong.norm() / dW.norm()))
    return parts, unit


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def parts_by_policy(
    captured: Captured, policies: Mapping[str, str] = POLICIES
) -> dict[str, dict[str, DeltaPart]]:
    """Policy -> part -> its error, on the same tensors; the first policy's whole is the unit."""
    out, unit = {}, None
    for label, changes in policies.items():
        out[label], unit = delta_parts(captured.head, under(captured.numerics, changes), unit)
    return out


def parts_table(captured: Captured, policies: Mapping[str, str] = POLICIES) -> Markdown:
    """One line per policy and part of `parts_by_policy`."""
    lines = []
    for label, parts in parts_by_policy(captured, policies).items():
        for name in PARTS:
            part = parts[name]
            bias = f"{part.bias.mean:+.3f} ± {part.bias.stderr:.3f}"
            told = [name, f"{part.size:.2f}", bias, f"{part.gradient:.1%}"]
            if not math.isfinite(part.size):
                told = [name, "not finite", "-", "-"]
            lines.append([label, *told])
    header = ["softmax", "rounding of", "rms", "signed mean", "error of dW_Q"]
    return markdown_table(header, lines)


def site_sentence(captured: Captured, policies: Mapping[str, str] = POLICIES) -> str:
    """Which rounding makes most of delta's error under each softmax, in one sentence."""
    told = []
    for label, parts in parts_by_policy(captured, policies).items():
        sizes = {name: parts[name].size for name in PARTS if name != "all"}
        if not all(map(math.isfinite, sizes.values())):
            told.append(f"{label}: not finite")
            continue
        most = max(sizes, key=sizes.get)
        bias = parts["all"].bias
        told.append(
            f"{label}: {most} ({sizes[most]:.2f}; the whole error {parts['all'].size:.2f}, its "
            f"signed mean {bias.mean:+.3f} ± {bias.stderr:.3f})"
        )
    return (
        f"In {captured}, under guarded SFA, the rounding that makes most of δ's error, in rms of "
        f"plain softmax's whole error: {'; '.join(told)}."
    )


def chosen_captures(paths: Iterable[Path], before: int | None = None) -> list[Captured]:
    """Of each captured step above 0 (and below `before`) the head whose W_Q has the largest norm.

    A run that diverged is past saving at its last captures; give the step at which that began.
    """
    found = captured_heads(paths)
    steps = sorted({c.step for c in found if 0 < c.step < (before or math.inf)})
    at = [[c for c in found if c.step == step] for step in steps or [found[-1].step]]
    return [max(heads, key=lambda c: c.spectral_norm) for heads in at]


def gradient_errors(head: Head, numerics: Numerics | str) -> dict[str, float]:
    """|x - exact| / |exact| for O, dQ, dK and dV; exact in float64 from the same tensors."""
    setting = Setting.of(head, numerics, True, None, 0)
    wide = [x.double().unsqueeze(1) for x in (head.q, head.k, head.v)]
    dO = head.dO.double().unsqueeze(1)
    exact = [oracle.attention_forward(*wide)[0], *oracle.attention_backward(dO, *wide)]
    low = [x.float() for x in wide]
    how = dict(numerics=setting.numerics, causal=True, scale=setting.scale)
    made = emulated.forward(*low, **how)
    grads = emulated.backward(dO.float(), *low, made.out, made.lse, made.delta_output, **how)
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(("O", "dQ", "dK", "dV"), (made.out, *grads), exact)
    }


def random_head(tied: bool, *, spread: float = 2.0, seed: int = 0) -> Head:
    """A head without training: 16 sequences of 64, width 32, V on one side of zero.

    Scores have a standard deviation of `spread`. tied: every key twice, so that every row from the
    second on has its maximum twice in half of the cases or more.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dO = (torch.randn(16, 64, 32, generator=generator) for _ in range(4))
    if tied:
        k = k[:, ::2].repeat_interleave(2, 1)
    return Head(spread * q, k, -2 - v.abs(), dO)


def gradient_table(head: Head, base: str, policies: Mapping[str, str] = POLICIES) -> Markdown:
    """Relative errors of O and the gradients against float64, one line per policy."""
    lines = []
    for label, changes in policies.items():
        errors = gradient_errors(head, under(base, changes))
        lines.append([label, *(f"{e:.3%}" for e in errors.values())])
    return markdown_table(["softmax", "O", "dQ", "dK", "dV"], lines)
