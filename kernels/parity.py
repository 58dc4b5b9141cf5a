"""How far two backends are apart: the emulator, and a kernel given the same numerics.

Inputs come in kinds. `coarse` and `fine` ones lie on grids so wide that QK^T and dO V^T are exact
in any order of summation: both backends then see the same S to the bit, and what is left is the
order in which P_bar V is summed. `gaussian` ones are ordinary: a score next to a rounding boundary
may round either way, so whole outputs are judged by their error against float64 instead.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from types import ModuleType

import torch
from torch import Tensor

from . import emulated
from .formats import FloatFormat
from .numerics import Numerics, Site
from .rounding import ulp

FAR = 512  # sums of the same numbers in another order stay well within


@dataclass(frozen=True)
class Gap:
    """One quantity of two backends. Errors in ulps of the site's format; see `gap`."""

    quantity: str
    max_ulp: float
    mismatched: float  # share of elements that differ at all
    signed_mean_ulp: float
    far: float  # share of elements that differ by more than FAR ulps of fp32

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
        return Gap(quantity, float("inf"), 1.0, float("nan"), 1.0)
    if expected.numel() == 0:
        return Gap(quantity, 0.0, 0.0, 0.0, 0.0)
    got, expected = (torch.where(finite, x, 0.0) for x in (got, expected))
    magnitude = expected.abs()
    row, head = magnitude.amax(-1, keepdim=True), magnitude.amax((-2, -1), keepdim=True)
    magnitude = magnitude.maximum(row / 16).maximum(head / 64).clamp(min=2.0**-100)
    error = (got - expected) / ulp(magnitude, fmt)
    differ = (error != 0).double().mean().item()
    far = (error.abs() * 2.0 ** (23 - fmt.fraction_bits) > FAR).double().mean().item()
    return Gap(quantity, error.abs().max().item(), differ, error.mean().item(), far)


def inputs(
    shape: tuple[int, int, int, int, int, int, int],
    *,
    kind: str = "coarse",
    dtype: torch.dtype = torch.bfloat16,
    device="cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dO for shape (B, H, Hkv, Tq, Tk, D, Dv).

    kind: 'coarse', multiples of 1/4 up to 2, which bf16 cut to 4 bits still holds; 'fine',
    multiples of 1/64 up to 2, which bf16 holds and a cut of it does not; or 'gaussian'.
    """
    B, H, Hkv, Tq, Tk, D, Dv = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        if kind == "gaussian":
            x = torch.randn(size, generator=generator)
        else:
            steps = {"coarse": 4, "fine": 64}[kind]
            x = torch.randint(-2 * steps, 2 * steps + 1, size, generator=generator) / steps
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


def _sites(quantity: str, n: Numerics) -> tuple[Site, ...]:
    """The site that stores a quantity, and the one before it whose rounding may turn."""
    return {
        "out": (n.output, n.unnormalized),
        "delta_output": (n.delta_output or Site(),),
        "dq": (n.gradients, n.grad_scores),
        "dk": (n.gradients, n.grad_scores),
        "dv": (n.gradients, n.backward_probabilities),
    }.get(quantity, (Site(),))


def _format(quantity: str, n: Numerics) -> FloatFormat:
    """The coarsest format on the way to a quantity: its ulp is the smallest step to judge by."""
    formats = (n.compute, *(site.format for site in _sites(quantity, n)))
    return min(formats, key=lambda fmt: fmt.fraction_bits)


@dataclass(frozen=True)
class Limits:
    """The most that a `Gap` may be: ulps, |signed mean| in ulps, and the two shares."""

    max_ulp: float
    signed_mean_ulp: float = math.inf
    mismatched: float = 1.0
    far: float = 1.0

    def hold(self, g: Gap) -> bool:
        return (
            g.max_ulp <= self.max_ulp
            and abs(g.signed_mean_ulp) <= self.signed_mean_ulp
            and g.mismatched <= self.mismatched
            and g.far <= self.far
        )


def limits(quantity: str, n: Numerics) -> Limits:
    """What two right backends stay within, on coarse or fine inputs.

    Counts agree. An intermediate next to a boundary may round the other way: O moves by an ulp,
    by two where it is O_bar that turned, a gradient by two, O in fp32 by two of P_bar's. That is
    rare, or else a site is not rounded at all. fp32 numbers differ by the order of their sums,
    which against float64 costs the emulator itself 150 ulps at 200 keys.
    """
    if quantity in ("ties", "ones"):
        return Limits(0.0)
    if quantity in ("m", "l", "lse"):
        return Limits(4.0 if quantity == "m" else 64.0)
    is_output = quantity in ("out", "delta_output", "out_fp32")
    if _format(quantity, n).fraction_bits >= 23:
        bits = n.probabilities.format.fraction_bits
        if is_output and bits < 23:
            return Limits(2.0 * 2 ** (23 - bits), 64.0, far=0.01)
        return Limits(FAR, 2.0)
    most = 1.0 if is_output and n.unnormalized.format.fraction_bits >= 23 else 2.0
    if _sites(quantity, n)[0].format.fraction_bits < 23:
        return Limits(most, 0.02, mismatched=0.03)
    # one dS that turned moves a row of dQ and one of dK: a seventh of the elements at 200 keys
    return Limits(most, 0.02, far=0.01 if is_output else 0.5)


# -- equal in law ---------------------------------------------------------------------------------

FORWARD_SITES = ("inputs", "scores", "probabilities", "unnormalized", "output", "delta_output")


@dataclass(frozen=True)
class Law:
    """One quantity of two backends that draw different bits, over many seeds.

    rms_z: root mean square of the elements' (mean - mean) / standard error, 1 where the means are
    equal. spread: variance of `module` over that of the emulator, all elements together.
    """

    quantity: str
    rms_z: float
    spread: float

    @property
    def equal(self) -> bool:
        return self.rms_z < 1.5 and 0.6 < self.spread < 1.6


def compare_law(
    module: ModuleType,
    numerics: Numerics,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    scale: float,
    seeds: int = 64,
) -> list[Law]:
    """O and the gradients of `module` and of the emulator, as distributions over seeds; causal.

    Where the forward draws nothing, `module`'s backward reads the emulator's. The standard errors
    have a floor of 2^-18 of the head's largest number: sums of another order are no other law.
    """
    quantities = ("out", "dq", "dk", "dv")
    sites = (getattr(numerics, name) for name in FORWARD_SITES)
    forward_draws = any(site is not None and site.rounding == "stochastic" for site in sites)
    drawn: list[list[list[Tensor]]] = [[], []]
    for seed in range(seeds):
        choices = dict(causal=True, scale=scale)
        want = run(emulated, numerics, tensors, seed=seed, **choices)
        given = None if forward_draws else want
        got = run(module, numerics, tensors, seed=seed + seeds, given=given, **choices)
        for kept, found in zip(drawn, (got, want)):
            kept.append([found[name].double() for name in quantities])
    ours, theirs = ([torch.stack(x) for x in zip(*kept)] for kept in drawn)
    return [_law(name, a, b) for name, a, b in zip(quantities, ours, theirs)]


def _law(quantity: str, a: Tensor, b: Tensor) -> Law:
    """a, b: [seeds, B, H, T, D]."""
    floor = b.abs().amax((0, -2, -1), keepdim=True)[0] * 2.0**-18
    noise = (a.var(0) + b.var(0)) / len(a)
    z = (a.mean(0) - b.mean(0)) / (noise + floor**2).sqrt()
    random = noise > 4 * floor**2
    settled = z[~random].abs().amax().item() if (~random).any() else 0.0
    rms = z[random].square().mean().sqrt().item() if random.any() else 0.0
    variances = [x.var(0)[random].sum().item() for x in (a, b)]
    spread = variances[0] / variances[1] if variances[1] else 1.0 if not variances[0] else math.inf
    return Law(quantity, max(rms, settled / 8), spread)
