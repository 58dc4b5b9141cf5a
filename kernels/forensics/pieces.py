"""One head through the emulator, and the intermediates that forensics looks at.

`kernels.emulated` does the arithmetic. What it does not hand out (S, and P_bar of a row) is formed
here by the same operations on its m, so that it is the same to the bit where no site draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import emulated
from ..formats import FP32, FP64
from ..numerics import Numerics, parse_numerics
from ..result import ForwardResult
from ..rounding import round_to
from ..sites import exp_in_place
from .inputs import Head


@dataclass(frozen=True)
class Setting:
    """How a head is run: numerics, mask rule, scale and seed, resolved once."""

    numerics: Numerics
    causal: bool
    scale: float
    seed: int

    @classmethod
    def of(cls, head: Head, numerics, causal: bool, scale: float | None, seed: int) -> Setting:
        """Accepts text for numerics; float64 inputs are computed in float64."""
        numerics = parse_numerics(numerics)
        if head.q.dtype == torch.float64 and numerics.compute != FP64:
            numerics = numerics.at(compute=FP64)
        scale = 1 / math.sqrt(head.q.shape[-1]) if scale is None else float(scale)
        return cls(numerics, bool(causal), scale, int(seed))


def forward(head: Head, setting: Setting, numerics: Numerics | None = None) -> ForwardResult:
    """The emulator's probed forward pass; shapes [N, 1, T, ...] for N sequences."""
    return emulated.forward(
        *(x.unsqueeze(1) for x in (head.q, head.k, head.v)),
        numerics=numerics or setting.numerics,
        causal=setting.causal,
        scale=setting.scale,
        seed=setting.seed,
        probe=True,
    )


def backward_dq(head: Head, setting: Setting, result, delta_output, numerics, dO, v) -> Tensor:
    """The emulator's dQ [N, T, D] for one forward result; dO and v may be replaced."""
    dq, _, _ = emulated.backward(
        dO.unsqueeze(1),
        *(x.unsqueeze(1) for x in (head.q, head.k, v)),
        result.out,
        result.lse,
        delta_output,
        numerics=numerics,
        causal=setting.causal,
        scale=setting.scale,
        seed=setting.seed,
    )
    return dq.squeeze(1)


def carrier(x: Tensor, numerics: Numerics) -> Tensor:
    """x in the dtype that the numerics compute in."""
    return x.to(torch.float64 if numerics.compute == FP64 else torch.float32)


def on_grid(x: Tensor, numerics: Numerics) -> Tensor:
    """x on the grid of the `inputs` site. Stochastic inputs are taken to the nearest here."""
    x, site = carrier(x, numerics), numerics.inputs
    if site.format.fraction_bits >= FP32.fraction_bits:
        return x
    mode = "nearest_even" if site.rounding == "stochastic" else site.rounding
    return round_to(x, site.format, mode)


def scores(head: Head, setting: Setting) -> Tensor:
    """S on its grid, -inf at hidden keys, [N, T, Tk]. A stochastic site rounds to nearest here."""
    numerics = setting.numerics
    q, k = on_grid(head.q, numerics), on_grid(head.k, numerics)
    S = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=setting.scale)
    site = numerics.scores
    if site.format.fraction_bits < FP32.fraction_bits:
        mode = "nearest_even" if site.rounding == "stochastic" else site.rounding
        S = round_to(S, site.format, mode)
    if setting.causal:
        S = S.masked_fill(~visible(head), -math.inf)
    return S


def visible(head: Head) -> Tensor:
    """bool [T, Tk]: query i sees keys j <= i."""
    return torch.ones(head.rows, head.k.shape[1], dtype=torch.bool).tril()


def rounded_probabilities(S: Tensor, m: Tensor, numerics: Numerics) -> Tensor:
    """P_bar = exp(S - m) on its grid for one reference per row: S [..., Tk], m [..., 1].

    A stochastic site rounds to nearest here.
    """
    P_bar = exp_in_place(S - m)  # the emulator's exp flushes what underflows
    site = numerics.probabilities
    if numerics.softmax.kind == "clamped":
        bits = min(site.format.fraction_bits, numerics.compute.fraction_bits)
        P_bar = P_bar.clamp(max=1.0 - 2.0 ** -(bits + 1))
    if site.format.fraction_bits >= FP32.fraction_bits:
        return P_bar
    mode = "nearest_even" if site.rounding == "stochastic" else site.rounding
    return round_to(P_bar, site.format, mode)
