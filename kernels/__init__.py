"""Attention numerics: every rounding site of flash attention as a value.

Knows nothing of GPT-2.
"""

from .attention import Probe, attention, resolve_backend
from .formats import BF16, E4M3, E5M2, FP16, FP32, FP64, FloatFormat, parse_format
from .numerics import (
    PRESETS,
    DeltaError,
    Numerics,
    ScopedNumerics,
    Site,
    Softmax,
    authors,
    exact,
    flash,
    guarded,
    paper,
    parse_numerics,
    stabilized,
)
from .packed import packed_attention
from .rounding import decode, round_to, ulp

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "FP32",
    "FP64",
    "PRESETS",
    "DeltaError",
    "FloatFormat",
    "Numerics",
    "Probe",
    "ScopedNumerics",
    "Site",
    "Softmax",
    "attention",
    "authors",
    "decode",
    "exact",
    "flash",
    "guarded",
    "packed_attention",
    "paper",
    "parse_format",
    "parse_numerics",
    "resolve_backend",
    "round_to",
    "stabilized",
    "ulp",
]
