"""What the parity runs compare: every choice that the Triton backend says it honours, one by one.

Nothing here is a list of favourites. The questions come from the types (sites x formats x rounding
modes, the policies and interventions that `kernels.policies` names, the alternatives of `Numerics`
itself), the answers from `kernels.triton_attention`. What it accepts is compared with the
emulator: in ulps where nothing is drawn, in law where each backend draws bits of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args, get_type_hints

from .numerics import SITE_NAMES, Numerics, parse_numerics
from .policies import DeltaErrorKind, Softmax, SoftmaxKind
from .rounding import ROUNDINGS
from .triton_attention import _refused_numerics

FORMATS = ("fp32", "bf16", "bf16.4", "fp16", "e4m3", "e5m2")
DIALS = ("matched_bits=4", "matched_bits=2", "output_bits=4", "output_bits=2")
BASE = "paper"


def honoured(texts: Iterable[str]) -> list[str]:
    """Those that the Triton kernels do not refuse, each value once, in order."""
    kept: dict[Numerics, str] = {}
    for text in texts:
        n = parse_numerics(text)
        if _refused_numerics(n) is None:
            kept.setdefault(n, text)
    return list(kept.values())


def site_texts(mode: str, formats: Iterable[str] = FORMATS, base: str = BASE) -> list[str]:
    """One site of `base` at a time, in every format."""
    suffix = "" if mode == "nearest_even" else f":{mode}"
    return [f"{base},{site}={fmt}{suffix}" for site in SITE_NAMES for fmt in formats]


def choice_texts() -> list[str]:
    """Everything else that a Numerics can say: policies, references, sums, deltas, dials."""
    out = ["flash", "paper", "stabilized", "guarded", "authors", "exact"]
    for kind in get_args(SoftmaxKind):
        more = ",beta=2,eps=0.25" if kind in ("stabilized", "guarded") else ",shift=0.5"
        more = "" if kind in ("safe", "clamped") else more
        for decide in get_args(get_type_hints(Softmax)["decide"]):
            for reference in get_args(get_type_hints(Numerics)["reference"]):
                policy = f"softmax={kind}{more}" + (f",decide={decide}" if "beta" in more else "")
                out.append(f"{BASE},reference={reference},{policy}")
    for name in ("row_sum_source", "accumulate", "delta"):
        out += [f"{BASE},{name}={x}" for x in get_args(get_type_hints(Numerics)[name])]
    out.append(f"{BASE},delta=dP_P,grad_probabilities=bf16")
    out += [f"{BASE},delta_error={kind}" for kind in get_args(DeltaErrorKind)]
    return out + [f"{BASE},{dial}" for dial in DIALS]


def exact_cases() -> list[str]:
    """Numerics that draw nothing, to be compared number by number; the presets come first."""
    sites = (text for mode in ROUNDINGS for text in site_texts(mode))
    texts = honoured([*choice_texts(), *sites])
    return [text for text in texts if not parse_numerics(text).stochastic]


def law_cases(formats: Iterable[str] = ("bf16.4",)) -> list[str]:
    """Numerics to be compared in law: one stochastic site, or one intervention that draws.

    All else is unrounded, so that no other site turns a difference of last bits into an ulp. A
    direction that is drawn once for all seeds has no law that seeds could show.
    """
    sites = (text for mode in ROUNDINGS for text in site_texts(mode, formats, base="exact"))
    kinds = (
        f"exact,output=bf16.4,delta_error={kind}" + (",rms=0.1" if kind == "injected" else "")
        for kind in get_args(DeltaErrorKind)
        if kind != "fixed_direction"
    )
    return [text for text in honoured([*sites, *kinds]) if parse_numerics(text).stochastic]
