"""Rounding a tensor to a format, and reading the bits of what was rounded.

Values stay in their carrier (float32 or float64 tensors) but lie on the grid of the target format.
That is exact: every bf16, fp16 or fp8 value is a float32 value. Formats with 8 exponent bits are
rounded by integer arithmetic on float32's bits, which a Triton kernel can repeat; one case of it,
bf16 to nearest even, takes the faster cast with the same bits. Others are scaled in float64.

How rounding to nearest works on bits: drop the last `d` bits of the significand. The first
dropped bit is the *guard* bit; the *sticky* bit is the OR of the rest. Guard 0: down. Guard 1,
sticky 1: up. Guard 1, sticky 0: an exact tie, which nearest-even sends to the even neighbour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .formats import FP32, FP64, FloatFormat

Rounding = Literal["nearest_even", "nearest_away", "toward_zero", "stochastic"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)


def round_to(
    x: Tensor,
    fmt: FloatFormat,
    mode: Rounding = "nearest_even",
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round every element of `x` to `fmt`.

    x: float32 or float64, any shape. Returns a new tensor of the same dtype and shape whose values
    lie on the grid of `fmt` (or `x` itself where the format is at least as fine as the carrier).
    Subnormals, signed zeros and NaN follow IEEE 754. Overflow gives infinity, or the largest
    finite number when rounding toward zero. A finite-only format saturates: anything above its
    largest number becomes that number, infinity too. The OCP FP8 specification allows this or
    NaN; GPUs and torch 2.13 saturate, older torch gave NaN on a CPU. With no fraction bits at all
    the even one of two neighbours is the one whose exponent field is even. `stochastic` rounds up
    with probability equal to the dropped fraction; `generator` makes it reproducible.
    Raises ValueError for another mode, TypeError for another dtype.
    """
    if mode not in ROUNDINGS:
        raise ValueError(f"unknown rounding mode {mode!r}; use one of {', '.join(ROUNDINGS)}")
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"round_to takes float32 or float64, not {x.dtype}; call .float() first")
    carrier = FP32 if x.dtype == torch.float32 else FP64
    if fmt.fraction_bits >= carrier.fraction_bits and fmt.exponent_bits >= carrier.exponent_bits:
        return x
    if carrier is FP32 and fmt.exponent_bits == 8 and not fmt.finite_only:
        return _round_fp32_bits(x, fmt, mode, generator)
    return _round_scaled(x, fmt, mode, generator)


def _round_fp32_bits(x: Tensor, fmt: FloatFormat, mode: Rounding, generator) -> Tensor:
    """Integer arithmetic on the float32 pattern; carries run into the exponent by themselves."""
    if mode == "nearest_even" and fmt.fraction_bits == 7:
        return x.to(torch.bfloat16).to(torch.float32)  # same bits, tested; twice as fast on a CPU
    drop = 23 - fmt.fraction_bits
    bits = x.contiguous().view(torch.int32)
    if mode == "nearest_even":
        odd = (bits >> drop).bitwise_and_(1)
        bits = odd.add_((1 << (drop - 1)) - 1).add_(bits)
    elif mode == "nearest_away":
        bits = bits + (1 << (drop - 1))
    elif mode == "stochastic":
        noise = torch.randint(
            0, 1 << drop, x.shape, dtype=torch.int32, device=x.device, generator=generator
        )
        bits = bits + noise
    rounded = (bits & -(1 << drop)).view(torch.float32)
    if x.device.type == "cpu" and math.isfinite(x.sum().item()):
        return rounded  # no NaN in sight: looking for them one by one would take as long again
    return torch.where(torch.isnan(x), x, rounded)


def _scale(x: Tensor, exponent: Tensor) -> Tensor:
    """x * 2**exponent in float64, exact (torch.ldexp takes the power in float32)."""
    first = exponent.div(2, rounding_mode="floor").long()
    for part in (first, exponent.long() - first):  # two steps: 2**-1074 is not a normal number
        x = x * ((part + 1023) << 52).view(torch.float64)
    return x


def _round_scaled(x: Tensor, fmt: FloatFormat, mode: Rounding, generator) -> Tensor:
    """Any format: scale so that one ulp is 1, round to an integer, scale back (float64, exact)."""
    wide = x.double()
    _, exponent = torch.frexp(wide)  # wide = mantissa * 2**exponent, mantissa in [0.5, 1)
    ulp_exponent = (exponent - 1).clamp(min=fmt.emin) - fmt.fraction_bits
    magnitude = _scale(wide.abs(), -ulp_exponent)
    low = magnitude.floor()
    rest = magnitude - low  # exact: the guard and sticky bits as a number in [0, 1)
    if mode == "nearest_even":
        odd = low.remainder(2) == 1
        if fmt.fraction_bits == 0:  # the significand of a normal number is 1: look at its exponent
            odd &= (exponent - 1 + fmt.bias).remainder(2) == 1
        up = (rest > 0.5) | ((rest == 0.5) & odd)
    elif mode == "nearest_away":
        up = rest >= 0.5
    elif mode == "stochastic":
        draw = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator)
        up = draw < rest
    else:
        up = torch.zeros_like(rest, dtype=torch.bool)
    result = _scale(low + up, ulp_exponent)
    saturates = fmt.finite_only or mode == "toward_zero"
    overflow = fmt.max_finite if saturates else math.inf
    result = torch.where(result > fmt.max_finite, overflow, result)
    infinite = fmt.max_finite if fmt.finite_only else math.inf
    result = torch.where(torch.isinf(wide), infinite, result)
    result = torch.where(torch.isnan(wide), wide, torch.copysign(result, wide))
    return result.to(x.dtype)


@dataclass(frozen=True)
class Bits:
    """One number taken apart with respect to a format.

    value = (-1)^sign * (significand + (guard/2 + below/4...)) * 2^(exponent - fraction_bits),
    where `significand` includes the hidden bit, `guard` is the first dropped bit and `sticky` says
    whether any later bit is set. `rounded` is nearest-even (or the mode asked for).
    """

    value: float
    format: FloatFormat
    sign: int
    exponent: int
    significand: int
    guard: int
    sticky: int
    tie: bool
    round_up: bool
    rounded: float
    error_ulp: float  # (rounded - value) / ulp, signed

    @property
    def pattern(self) -> str:
        """Sign, biased exponent and fraction of `rounded`, as a string of bits."""
        return bit_pattern(self.rounded, self.format)


def decode(value: float, fmt: FloatFormat, mode: Rounding = "nearest_even") -> Bits:
    """Take a finite Python float apart with respect to `fmt`. Raises ValueError if not finite."""
    x = torch.tensor(float(value), dtype=torch.float64)
    if not torch.isfinite(x):
        raise ValueError(f"decode takes a finite number, not {value!r}")
    _, exp = torch.frexp(x)
    exponent = max(int(exp) - 1, fmt.emin) if value else fmt.emin
    ulp_exponent = exponent - fmt.fraction_bits
    scaled = abs(float(value)) * 2.0**-ulp_exponent if ulp_exponent > -1000 else 0.0
    low = int(scaled)
    rest = scaled - low
    rounded = float(round_to(x, fmt, mode))
    return Bits(
        value=float(value),
        format=fmt,
        sign=int(torch.signbit(x)),
        exponent=exponent,
        significand=low,
        guard=int(rest >= 0.5),
        sticky=int(rest not in (0.0, 0.5)),
        tie=rest == 0.5,
        round_up=abs(rounded) > low * 2.0**ulp_exponent,
        rounded=rounded,
        error_ulp=(rounded - float(value)) / 2.0**ulp_exponent,
    )


def bit_pattern(value: float, fmt: FloatFormat) -> str:
    """The bits of a value on the grid of `fmt`: sign, exponent field, fraction field.

    Raises ValueError if `value` is not on the grid. Paper section 3.3.2 prints such strings.
    """
    x = torch.tensor(float(value), dtype=torch.float64)
    if float(round_to(x, fmt)) != float(value):
        raise ValueError(f"{value!r} is not a {fmt} number; round it first")
    sign = int(torch.signbit(x))
    if value == 0:
        field, fraction = 0, 0
    else:
        exponent = max(int(torch.frexp(x)[1]) - 1, fmt.emin)
        significand = int(abs(float(value)) * 2.0 ** (fmt.fraction_bits - exponent))
        hidden = significand >> fmt.fraction_bits
        field = exponent + fmt.bias if hidden else 0
        fraction = significand & ((1 << fmt.fraction_bits) - 1)
    text = f"{sign}{field:0{fmt.exponent_bits}b}"
    return text + (f"{fraction:0{fmt.fraction_bits}b}" if fmt.fraction_bits else "")


def ulp(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Distance between neighbouring `fmt` numbers at |x|, float64, same shape as `x`.

    At 0, and below the smallest normal number, that is the smallest subnormal.
    """
    _, exponent = torch.frexp(x.double())
    exponent = torch.where(x == 0, fmt.emin, exponent - 1)
    spacing = exponent.clamp(min=fmt.emin) - fmt.fraction_bits
    return _scale(torch.ones_like(x, dtype=torch.float64), spacing)
