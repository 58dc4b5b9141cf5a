"""The page "Numerics": errors against float64, bias of crafted rows, compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import FP32, emulated, oracle, parity
from kernels.forensics import SignedMean, bias_law, signed_mean
from kernels.numerics import PRESETS, Numerics, parse_numerics
from kernels.rounding import round_to, ulp

from .backend_support import results
from .chapter4 import plus_minus

QUANTITIES = ("out", "dQ", "dK", "dV")


class ErrorRow(NamedTuple):
    """relative: |x - truth| / |truth|. The means are in units of the error's rms, by head."""

    preset: str
    quantity: str
    relative: float
    signed: SignedMean
    outward: SignedMean


@lru_cache(maxsize=16)
def errors(T: int, D: int, presets: tuple = tuple(PRESETS), *, heads: int = 16, seed: int = 0):
    """Errors against float64 of bf16 inputs, causal; keys from T/2 on equal an earlier one.

    `signed` averages x - truth, `outward` its part away from zero; each head counts as one draw.
    """
    q, k, v, dO = parity.inputs((1, heads, heads, T, T, D, D), kind="gaussian", seed=seed)
    k[:, :, T // 2 :] = k[:, :, 10:11]
    q, k, v, dO = (x.float() for x in (q, k, v, dO))
    truth = [oracle.attention_forward(q, k, v)[0], *oracle.attention_backward(dO, q, k, v)]
    rows = []
    for name in presets:
        for quantity, x, exact in zip(QUANTITIES, results(emulated, name, (q, k, v, dO)), truth):
            e = x - exact
            rms = e.square().mean().sqrt().clamp(min=1e-300)
            means = [signed_mean((y / rms).mean((-2, -1))) for y in (e, e * exact.sign())]
            rows.append(ErrorRow(name, quantity, (e.norm() / exact.norm()).item(), *means))
    return rows


def error_table(T: int, D: int, quantity: str, seed: int = 0) -> str:
    """One quantity of every preset as an HTML table; means over four standard errors are bold."""

    def mean(found: SignedMean) -> str:
        return f"<b>{plus_minus(found)}</b>" if abs(found.z) > 4 else plus_minus(found)

    rows = [r for r in errors(T, D, seed=seed) if r.quantity == quantity]
    header = ("numerics", f"size, {quantity}", "mean (rms)", "away from zero (rms)")
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join(
        f"<tr><td><code>{r.preset}</code></td><td>{r.relative:.1e}</td>"
        f"<td>{mean(r.signed)}</td><td>{mean(r.outward)}</td></tr>"
        for r in rows
    )
    return (
        '<div style="overflow-x:auto"><table class="table" style="white-space:nowrap">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# -- crafted rows ---------------------------------------------------------------------------------


class Bias(NamedTuple):
    """Signed error of O_bar in ulps of the result, positive away from zero."""

    kind: str
    numerics: str
    predicted: float | None
    measured: SignedMean


CRAFTED = {"tied": [5.0, 5.0, -4.0], "absorbing": [5.0, -3.0]}
VARIANTS = (
    "paper",
    "paper,unnormalized=bf16:nearest_away",
    "paper,unnormalized=bf16:toward_zero",
    "paper,unnormalized=bf16:stochastic",
    "paper,matched_bits=4",
    "paper,output_bits=4",
    "paper,unnormalized=fp32",
    "stabilized,beta=2",
    "guarded",
)


def crafted_bias(kind: str, text: str, *, heads: int = 200, seed: int = 0) -> Bias:
    """One query per head, keys with the scores of CRAFTED, V in -(2, 4): measured and predicted.

    The prediction is `bias_law` with the rows' own tails; it speaks of P_bar = 1, so it makes no
    statement where the softmax policy moves the maximum away from 1.
    """
    scores, D, n = torch.tensor(CRAFTED[kind]), 64, parse_numerics(text).at(output="fp32")
    generator = torch.Generator().manual_seed(seed)
    k = torch.zeros(1, heads, len(scores), 8)
    k[..., 0] = scores
    q = torch.zeros(1, heads, 1, 8)
    q[..., 0] = 1.0
    v = -2 - 2 * torch.rand(1, heads, len(scores), D, generator=generator)
    v = round_to(v, n.inputs.format)
    result = emulated.forward(q, k, v, numerics=n, causal=False, scale=1.0, probe=True, seed=seed)
    exact = result.out_fp32.double() * result.l.double().unsqueeze(-1)
    fmt = n.unnormalized.format
    error = (result.out - result.out_fp32).double() * result.l.double().unsqueeze(-1)
    grid = fmt if fmt.fraction_bits < 23 else n.inputs.format
    measured = signed_mean((error * exact.sign() / ulp(exact, grid)).mean((0, 2, 3)))
    return Bias(kind, text, _predicted(n, scores, v), measured)


def _predicted(n: Numerics, scores: Tensor, v: Tensor) -> float | None:
    if n.softmax.kind != "safe":
        return None
    if n.unnormalized.format.fraction_bits >= 23:
        return 0.0
    weight = round_to((scores[-1] - scores[0]).exp(), n.probabilities.format)
    values = n.inputs.format
    values = values if values.fraction_bits <= 14 else values.cut(14)  # bias_law enumerates sums
    tail = (weight * v[..., -1]).abs() / ulp(v[..., 0], values)
    middles = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    law = bias_law(
        len(scores) - 1,
        torch.quantile(tail.double().flatten(), middles).tolist(),
        fmt=n.unnormalized.format,
        value_format=values,
        mode=n.unnormalized.rounding,
    )
    return law.expected_ulp


def bias_table(biases: Sequence[Bias]) -> list[list[str]]:
    """Row, numerics, prediction, measurement with its standard error."""
    return [
        [
            b.kind,
            f"`{b.numerics}`",
            "none" if b.predicted is None else f"{b.predicted:+.4f}",
            f"{b.measured.mean:+.4f}\u00a0±\u00a0{b.measured.stderr:.4f}",
        ]
        for b in biases
    ]


def biases_in_words(biases: Sequence[Bias]) -> str:
    """For readers who do not see the figure."""
    return "Intervals: " + "; ".join(
        f"{b.kind} rows under {b.numerics} {b.measured.mean:+.3f}" for b in biases
    )


# -- a weight next to a tie -----------------------------------------------------------------------


class NearTie(NamedTuple):
    """The P_bar closest to half-way between two numbers of its format.

    place: batch, head, query, key. distance: to the tie, relative to P_bar. moved: by how many
    fp32 ulps O in fp32 changes, at its worst feature, if P_bar is rounded to the other side.
    """

    place: tuple[int, ...]
    distance: float
    moved: float


def nearest_tie(text: str, T: int = 200, D: int = 64) -> NearTie:
    """Of the inputs of the GPU parity case with these numerics (row reference, causal)."""
    n = parse_numerics(text)
    kind = "fine" if n.inputs.format.fraction_bits < 7 else "coarse"
    q, k, v, _ = parity.inputs((2, 3, 3, T, T, D, D), kind=kind)
    choices = dict(numerics=n, causal=True, scale=D**-0.5, probe=True)
    result = emulated.forward(q, k, v, **choices)
    q, k, v = (round_to(x.float(), n.inputs.format).double() for x in (q, k, v))
    S = round_to(q @ k.mT * D**-0.5, n.scores.format)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    P = (S - result.m.unsqueeze(-1)).exp().masked_fill(hidden, 0.0)
    step = ulp(P, n.probabilities.format)
    distance = ((P / step % 1 - 0.5).abs() * step / P).nan_to_num(1.0)
    place = torch.unravel_index(distance.argmin(), P.shape)
    batch, head, row, key = (int(i) for i in place)
    O = result.out_fp32.double()
    turned = O.clone()
    turned[batch, head, row] += step[place] * v[batch, head, key] / result.l[batch, head, row]
    moved = parity.gap("out_fp32", turned, O, FP32).max_ulp
    return NearTie((batch, head, row, key), distance.min().item(), moved)


def failures_told(rows: Sequence[dict]) -> str:
    """Each failed row of a parity run, beside what one turned P_bar would do, computed now."""
    told = []
    for row in (row for row in rows if row["result"] != "ok"):
        case = row["case"].split(" ")[0]
        found = nearest_tie(case)
        told.append(
            f"Failed: `{row['site']}` of `{case}`, by {row['max_ulp']:,.0f} ulps of fp32. "
            f"Computed here: among all $\\bar P$ of that case one lies {found.distance:.1g} of "
            "itself from a tie, nearer than fp32 can tell; rounded to the other side it moves $O$ "
            f"by {found.moved:,.0f} ulps."
        )
    return "\n\n".join(told) or "No comparison failed."


# -- what the compiler makes of it ----------------------------------------------------------------


def offline(numerics: str = "paper", capabilities: Sequence[int] = (90, 80)) -> list[list] | str:
    """One line per kernel and architecture; a sentence where nothing can be compiled.

    Kernel, architecture, matrix instructions, conversions to bf16 in nearest even, registers per
    thread, spilled bytes and shared memory of one program.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set in this process: unset it and start again to compile."
    try:
        from kernels.triton_compile import compile_offline
    except ImportError:
        return "Triton is not installed here (it exists for Linux), so nothing was compiled."
    lines = []
    for capability in capabilities:
        for kernel in ("forward", "grad_keys", "grad_queries"):
            try:
                built = compile_offline(kernel, parse_numerics(numerics), capability=capability)
            except ImportError:
                return (
                    "Triton is not installed here (it exists for Linux), so nothing was compiled."
                )
            matrix = ", ".join(
                f"{built.ptx.count(name)} `{name.removesuffix('.mma_async')}`"
                for name in built.matrix_instructions
            )
            rounds = built.ptx.count("cvt.rn.bf16")
            lines.append(
                [
                    f"`{kernel}`",
                    f"sm_{capability}",
                    matrix or "none",
                    rounds,
                    built.registers,
                    built.spilled,
                    f"{built.shared:,}",
                ]
            )
    return lines
