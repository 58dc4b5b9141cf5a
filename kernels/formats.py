"""Floating-point formats as data: how many exponent bits, how many fraction bits.

A number in such a format is (-1)^s * 1.f * 2^e, with f of `fraction_bits` bits. bf16 keeps the 8
exponent bits of fp32 and 7 of its 23 fraction bits; "bf16 cut to 4 bits" (`BF16.cut(4)`) keeps the
range and drops three more fraction bits. That is the precision dial of the book: a smaller bf16.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals.

    `finite_only` marks formats without infinities (E4M3 of the OCP specification, "e4m3fn"): the
    top exponent holds ordinary numbers and only the all-ones pattern is NaN.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    finite_only: bool = False

    def __post_init__(self):
        if not 2 <= self.exponent_bits <= 11 or not 0 <= self.fraction_bits <= 52:
            raise ValueError(
                f"format {self.name!r}: {self.exponent_bits} exponent and {self.fraction_bits} "
                "fraction bits are out of range; use 2 to 11 and 0 to 52"
            )

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return self.bias + 1 if self.finite_only else self.bias

    @property
    def max_finite(self) -> float:
        top = 2.0 - 2.0**-self.fraction_bits
        if self.finite_only:  # the all-ones fraction at the top exponent is NaN
            top -= 2.0**-self.fraction_bits
        return top * 2.0**self.emax

    @property
    def min_normal(self) -> float:
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (self.emin - self.fraction_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest: half an ulp of 1."""
        return 2.0 ** -(self.fraction_bits + 1)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """PyTorch's dtype with exactly these values, or None."""
        return _TORCH_DTYPES.get((self.exponent_bits, self.fraction_bits, self.finite_only))

    def holds(self, other: FloatFormat) -> bool:
        """Whether every number of `other` is one of this format."""
        return (
            other.fraction_bits <= self.fraction_bits
            and other.max_finite <= self.max_finite
            and other.min_subnormal >= self.min_subnormal
            and other.finite_only >= self.finite_only  # infinities
        )

    def cut(self, bits: int) -> FloatFormat:
        """The same exponent range with the fraction cut to `bits` bits (0 to fraction_bits)."""
        if not 0 <= bits <= self.fraction_bits:
            raise ValueError(
                f"cannot cut {self.name} to {bits} fraction bits; "
                f"it has {self.fraction_bits}, so use 0 to {self.fraction_bits}"
            )
        if bits == self.fraction_bits:
            return self
        return replace(self, name=f"{self.name.split('.')[0]}.{bits}", fraction_bits=bits)

    def __str__(self) -> str:
        return self.name


FP64 = FloatFormat("fp64", 11, 52)
FP32 = FloatFormat("fp32", 8, 23)
BF16 = FloatFormat("bf16", 8, 7)
FP16 = FloatFormat("fp16", 5, 10)
E4M3 = FloatFormat("e4m3", 4, 3, finite_only=True)
E5M2 = FloatFormat("e5m2", 5, 2)

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (FP64, FP32, BF16, FP16, E4M3, E5M2)}

_TORCH_DTYPES = {
    (11, 52, False): torch.float64,
    (8, 23, False): torch.float32,
    (8, 7, False): torch.bfloat16,
    (5, 10, False): torch.float16,
    (4, 3, True): torch.float8_e4m3fn,
    (5, 2, False): torch.float8_e5m2,
}


def parse_format(text: str | FloatFormat) -> FloatFormat:
    """'bf16' -> BF16; 'bf16.4' -> BF16.cut(4). Raises ValueError naming the nearest format."""
    if isinstance(text, FloatFormat):
        return text
    match = re.fullmatch(r"([a-z0-9]+)(?:\.(\d+))?", str(text).strip().lower())
    base = FORMATS.get(match[1]) if match else None
    if base is None:
        near = difflib.get_close_matches(str(text), FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown format {text!r}{hint} Known: {', '.join(FORMATS)}, "
            "or one of them with its fraction cut, such as 'bf16.4'"
        )
    return base.cut(int(match[2])) if match[2] is not None else base
