"""Simulations of chapter 4: tails as they come, what is left in O, what the backward reads.

The laws are `kernels.forensics.bias_law`; here is what they do not cover. Everything is seeded.
Errors are in ulps of what is stored and count as positive away from zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention
from kernels.forensics import SignedMean, signed_mean
from kernels.formats import BF16, FloatFormat
from kernels.numerics import PRESETS, SITE_NAMES, Numerics
from kernels.rounding import round_to, ulp


@dataclass(frozen=True)
class TiedRows:
    """Rows with `tied` keys at P_bar = 1 and one key of smaller weight.

    p: float64 [sets, rows, tied + 1]. v: float64 [sets, 1, tied + 1]: the rows of a set attend to
    the same keys, as the rows of one head do.
    """

    p: Tensor
    v: Tensor
    fmt: FloatFormat

    @property
    def o_bar(self) -> Tensor:
        """Exact, [sets, rows]."""
        return (self.p * self.v).sum(-1)

    @property
    def row_sum(self) -> Tensor:
        return self.p.sum(-1)

    def quantiles(self, count: int) -> list[float]:
        """The distribution of the tail, in ulps of the tied values, as equally likely numbers."""
        tail = (self.p[..., -1] * self.v[..., -1]).abs() / ulp(self.v[..., 0], self.fmt)
        middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return torch.quantile(tail.reshape(-1), middles).tolist()


def tied_rows(
    tied: int,
    largest_weight: float,
    *,
    fmt: FloatFormat = BF16,
    scale: float = 1.0,
    sets: int = 2000,
    rows: int = 32,
    seed: int = 0,
) -> TiedRows:
    """Random rows: values on the grid of `fmt` in -(2..4), the last weight in [0, largest_weight].

    scale multiplies every weight before its rounding to `fmt`; exp(-5) is what subtracting more
    than the row maximum does: no weight is 1 any more.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = 2**fmt.fraction_bits
    n = torch.randint(steps, 2 * steps, (sets, 1, tied + 1), generator=generator)
    last = torch.rand(sets, rows, 1, generator=generator, dtype=torch.float64) * largest_weight
    ones = torch.ones(sets, rows, tied, dtype=torch.float64)
    p = round_to(torch.cat([ones, last], -1) * scale, fmt)
    return TiedRows(p, -n.double() * (2 / steps), fmt)


def offset_values(rows: TiedRows, offset: float) -> TiedRows:
    """The same rows with every value moved by `offset`, onto the format's grid.

    Weights of a row sum to l, so in exact arithmetic O moves by the offset and nothing else does.
    """
    return TiedRows(rows.p, round_to(rows.v + offset, rows.fmt), rows.fmt)


class StoredError(NamedTuple):
    """Signed error of the stored O in ulps, its rms, and the share of its square that all rows
    of a set have in common (0: independent from row to row, 1: the same in each)."""

    bias: SignedMean
    rms: float
    shared: float


def stored_error(rows: TiedRows, *, unnormalized: bool, output: bool) -> StoredError:
    """Error of O = O_bar / l where O_bar, O, or both are rounded (to nearest, ties to even)."""
    o_bar = round_to(rows.o_bar, rows.fmt) if unnormalized else rows.o_bar
    o = o_bar / rows.row_sum
    o = round_to(o, rows.fmt) if output else o
    exact = rows.o_bar / rows.row_sum
    error = (o.abs() - exact.abs()) / ulp(exact, rows.fmt)
    common, square = error.mean(1), float(error.square().mean())
    between = float((common.square() - error.var(1) / error.shape[1]).mean())
    shared = between / square if square else math.nan
    return StoredError(signed_mean(common), square**0.5, shared)


# -- section 5: flash and standard attention ------------------------------------------------------

SITE_LABELS = {
    "inputs": "Q, K, V, dO",
    "scores": "S = αQKᵀ",
    "reference_format": "m, what P̄ is taken against",
    "probabilities": "P̄ = exp(S - m)",
    "row_sum": "l = rowsum(P̄)",
    "unnormalized": "Ō = P̄V",
    "output": "O = Ō / l",
    "delta_output": "the O that δ reads",
    "lse": "m + log l",
    "backward_probabilities": "P in the backward pass",
    "grad_probabilities": "dP = dO Vᵀ",
    "grad_scores": "dS = P ∘ (dP - δ)",
    "gradients": "dQ, dK, dV",
}


def site_table(names=("exact", "flash", "paper", "authors")) -> list[list[str]]:
    """One line per site: label and what each preset does, read from the `Numerics` values."""
    described = [_describe(PRESETS[name]()) for name in names]
    return [[SITE_LABELS[site], *(text[site] for text in described)] for site in SITE_NAMES]


def _describe(numerics: Numerics) -> dict[str, str]:
    text = {site: str(getattr(numerics, site) or "the stored O") for site in SITE_NAMES}
    running = numerics.reference == "running"
    where = f"running, tiles of {numerics.tile} keys" if running else "of the whole row"
    text["reference_format"] += f", {where}"
    floor = f", at least {numerics.row_sum_floor:g}" if numerics.row_sum_floor else ""
    text["row_sum"] += f", of {numerics.row_sum_source} P̄{floor}"
    if numerics.unnormalized.format != numerics.compute:
        once = numerics.accumulate == "once"
        text["unnormalized"] += ", once at the end" if once else ", after each tile"
    return text


class CraftedRows(NamedTuple):
    """bf16 tensors: q [B, 1, 1, D], k [B, 1, K, D], v [B, 1, K, Dv], dO [B, 1, 1, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dO: Tensor
    scale: float


def crafted_rows(batch: int = 4096, *, tied: int = 2, keys: int = 8, seed: int = 0) -> CraftedRows:
    """One query per batch entry: `tied` keys with score 3, the others 8 to 10 below; V in -(2..4).

    The last component of every key is 1, so dQ there is the scale times the sum of dS over keys.
    """
    generator = torch.Generator().manual_seed(seed)
    width = 16
    v = -2 - 2 * torch.rand(batch, 1, keys, width, generator=generator)
    k = torch.zeros(batch, 1, keys, width)
    k[..., 0] = 3
    k[:, 0, tied:, 0] -= 8 + 2 * torch.rand(batch, keys - tied, generator=generator)
    k[..., -1] = 1
    q = torch.zeros(batch, 1, 1, width)
    q[..., 0] = 4
    dO = 0.5 + torch.rand(batch, 1, 1, width, generator=generator)
    return CraftedRows(*(x.bfloat16() for x in (q, k, v, dO)), scale=0.25)


def standard_attention(q, k, v, scale, *, softmax_dtype=None) -> Tensor:
    """The textbook's three lines, P stored whole; softmax in the dtype of S unless given."""
    S = q @ k.transpose(-1, -2) * scale
    return torch.softmax(S, -1, dtype=softmax_dtype).to(v.dtype) @ v


class ReadBack(NamedTuple):
    """output: error of O in ulps. row_sum: sum of dS over the keys of a row, 0 in theory."""

    output: SignedMean
    row_sum: SignedMean


def read_back(rows: CraftedRows, attend) -> ReadBack:
    """Run attend(q, k, v, scale) forward and backward in bf16 against the same in float64."""
    exact = standard_attention(*(x.double() for x in rows[:3]), rows.scale)
    leaves = [x.clone().requires_grad_() for x in rows[:3]]
    out = attend(*leaves, rows.scale)
    out.backward(rows.dO.to(out.dtype))
    error = (out.detach().double().abs() - exact.abs()) / ulp(exact, BF16)
    return ReadBack(
        signed_mean(error.mean((1, 2, 3))), signed_mean(leaves[0].grad[..., -1] / rows.scale)
    )


def attention_kinds() -> dict:
    """Name -> attend(q, k, v, scale), the kinds of attention that section 5 compares."""

    def ours(text):
        return lambda q, k, v, scale: attention(q, k, v, numerics=text, causal=False, scale=scale)

    def fp32_softmax(q, k, v, scale):
        return standard_attention(q, k, v, scale, softmax_dtype=torch.float32)

    return {
        "standard, all bf16": standard_attention,
        "standard, softmax in fp32": fp32_softmax,
        "PyTorch's fused attention": lambda q, k, v, scale: F.scaled_dot_product_attention(
            q, k, v, scale=scale
        ),
        "flash": ours("flash"),
        "paper": ours("paper"),
        "paper, δ from an fp32 O": ours("paper,delta_output=fp32"),
        "paper, δ = rowsum(dP∘P)": ours("paper,delta=dP_P"),
        "authors": ours("authors"),
    }


def plus_minus(found: SignedMean) -> str:
    """'+0.2490 ± 0.0010': the mean to the digits of its standard error."""
    if not found.stderr > 0:
        return f"{found.mean:+.4g}"
    digits = min(max(1 - math.floor(math.log10(found.stderr)), 0), 9)
    return f"{found.mean:+.{digits}f}\u00a0±\u00a0{found.stderr:.{digits}f}"  # no line break
