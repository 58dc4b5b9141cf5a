"""How far two backends are apart: the emulator, and a kernel given the same numerics.

Inputs come in two kinds. `coarse` ones lie on a grid so wide that QK^T and dO V^T are exact in any
order of summation: both backends then see the same S to the bit, and what is left is the order in
which P_bar V is summed. `gaussian` ones are ordinary: a score next to a rounding boundary may
round either way, so whole outputs are judged by their error against float64 instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import ModuleType

import torch
from torch import Tensor

from . import emulated
from .formats import FloatFormat
from .numerics import Numerics
from .rounding import ulp


@dataclass(frozen=True)
class Gap:
    """One quantity of two backends. Errors in ulps of the site's format; see `gap`."""

    quantity: str
    max_ulp: float
    mismatched: float  # share of elements that differ at all
    signed_mean_ulp: float

    def to_dict(self) -> dict:
        return asdict(self)


def gap(quantity: str, got: Tensor, expected: Tensor, fmt: FloatFormat) -> Gap:
    """Difference in ulps of `fmt`, at the magnitude of the element or a floor under it.

    The floor, 1/16 of its row's largest or 1/64 of its head's, keeps elements that cancel to
    nearly nothing (as dQ of a row that sees one key) from being judged by their own tiny ulp.
    NaN and infinities must agree; where they do not, the gap is infinite.
    """
    got, expected = got.double(), expected.double()
    if got.dim() == 3:  # per-row numbers stand for themselves
        got, expected = got[..., None], expected[..., None]
    finite = torch.isfinite(expected)
    same = torch.where(finite, torch.isfinite(got), got.isnan() == expected.isnan())
    if not bool(same.all()):
        return Gap(quantity, float("inf"), 1.0, float("nan"))
    if expected.numel() == 0:
        return Gap(quantity, 0.0, 0.0, 0.0)
    got, expected = (torch.where(finite, x, 0.0) for x in (got, expected))
    magnitude = expected.abs()
    row, head = magnitude.amax(-1, keepdim=True), magnitude.amax((-2, -1), keepdim=True)
    magnitude = magnitude.maximum(row / 16).maximum(head / 64).clamp(min=2.0**-100)
    error = (got - expected) / ulp(magnitude, fmt)
    differ = (error != 0).double().mean().item()
    return Gap(quantity, error.abs().max().item(), differ, error.mean().item())


def inputs(
    shape: tuple[int, int, int, int, int, int, int],
    *,
    kind: str = "coarse",
    dtype: torch.dtype = torch.bfloat16,
    device="cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dO for shape (B, H, Hkv, Tq, Tk, D, Dv). kind: 'coarse' or 'gaussian'."""
    B, H, Hkv, Tq, Tk, D, Dv = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        if kind == "gaussian":
            x = torch.randn(size, generator=generator)
        else:  # multiples of 1/4 up to 2: bf16 after any cut to 4 bits, products exact in fp32
            x = torch.randint(-8, 9, size, generator=generator) / 4
        return x.to(device=device, dtype=dtype)

    return draw(B, H, Tq, D), draw(B, Hkv, Tk, D), draw(B, Hkv, Tk, Dv), draw(B, H, Tq, Dv)


def run(
    module: ModuleType,
    numerics: Numerics,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    causal: bool,
    scale: float,
    seed: int = 0,
    given: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Forward with probes, and backward, of one backend.

    `given`: another run's results, whose out, lse and delta_output the backward then reads.
    """
    q, k, v, dO = tensors
    choices = dict(numerics=numerics, causal=causal, scale=scale, seed=seed)
    result = module.forward(q, k, v, probe=True, **choices)
    names = ("out", "lse", "delta_output", "ties", "ones", "m", "l", "out_fp32")
    found = {name: getattr(result, name) for name in names}
    read = found if given is None else given
    saved = (read[name] if name in read else None for name in ("out", "lse", "delta_output"))
    dq, dk, dv = module.backward(dO, q, k, v, *saved, **choices)
    return {name: x for name, x in found.items() if x is not None} | dict(dq=dq, dk=dk, dv=dv)


def compare(
    module: ModuleType,
    numerics: Numerics,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    causal: bool = True,
    scale: float,
) -> list[Gap]:
    """The emulator against `module` (such as kernels.triton_attention), quantity by quantity.

    Both backward passes read the emulator's O and lse: one O that was rounded the other way moves
    delta, and so every gradient of its row, by more than an ulp.
    """
    expected = run(emulated, numerics, tensors, causal=causal, scale=scale)
    got = run(module, numerics, tensors, causal=causal, scale=scale, given=expected)
    return [gap(name, got[name], want, _format(name, numerics)) for name, want in expected.items()]


def _format(name: str, n: Numerics) -> FloatFormat:
    sites = {"out": n.output, "delta_output": n.delta_output or n.scores.__class__()}
    sites |= {g: n.gradients for g in ("dq", "dk", "dv")}
    return sites[name].format if name in sites else n.compute
