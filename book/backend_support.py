"""Who honours which site of attention: asked of the backends, and tried.

A backend's own `supports` says what it refuses; what it accepts is run, and has to show an effect
of the size of its format's roundoff. Run as a program under TRITON_INTERPRET=1 it compares the
Triton kernels with the emulator, one site at a time.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import backends, emulated, parity, triton_attention
from kernels.formats import parse_format
from kernels.numerics import PRESETS, SITE_NAMES, Numerics, Site, parse_numerics
from kernels.parity_cases import FORMATS, choice_texts
from kernels.rounding import ROUNDINGS

from . import ROOT

NARROW = FORMATS[1:]
BACKENDS = ("emulated", "triton", "sdpa")


def refusal(backend: str, numerics: str | Numerics, **asked) -> str | None:
    """Why a backend refuses, in its own words; None if it runs these numerics.

    Triton is asked for a CUDA device, and where this machine has none that is no refusal of the
    numerics. asked: dtype, head_dim, mask as for `kernels.resolve_backend`.
    """
    n = parse_numerics(numerics)
    if backend == "triton":
        asked = dict(device="cuda", dtype=torch.bfloat16) | asked
        why = triton_attention.supports(n, **asked)
        return None if why == triton_attention.supports(Numerics(), device="cuda") else why
    try:
        backends.resolve_backend(n, "cpu", backend=backend, **asked)
    except ValueError as error:
        return str(error).partition(": ")[2]
    return None


@dataclass(frozen=True)
class SiteSupport:
    """One site on one backend: which 'format:mode' it honours, and why it refuses the others."""

    site: str
    backend: str
    honoured: tuple[tuple[str, str], ...]
    refused: tuple[str, ...]

    def __str__(self) -> str:
        """'all formats, all modes', 'bf16, bf16.4: nearest even, stochastic', 'fp32 only'."""
        formats = [f for f in NARROW if any(f == g for g, _ in self.honoured)]
        modes = [m for m in ROUNDINGS if any(m == x and f in NARROW for f, x in self.honoured)]
        if not formats:
            return "fp32 only"
        told = "all formats" if len(formats) == len(NARROW) else ", ".join(formats)
        how = "all modes" if len(modes) == len(ROUNDINGS) else ", ".join(modes)
        return f"{told}: {how}".replace("_", " ")


def site_support(site: str, backend: str) -> SiteSupport:
    """Ask a backend about one site in every format and mode, around `exact` and around `flash`.

    PyTorch's own attention honours a value only where it leaves one of these two unchanged.
    """
    honoured, refused = [], []
    for fmt in FORMATS:
        for mode in ROUNDINGS:
            value = Site.of(f"{fmt}:{mode}")
            whys = [refusal(backend, parse_numerics(base).at(**{site: value})) for base in
                    (("exact", "flash") if backend == "sdpa" else ("exact",))]  # fmt: skip
            if None in whys:
                honoured.append((fmt, mode))
            else:
                refused.append(whys[0])
    return SiteSupport(site, backend, tuple(honoured), tuple(dict.fromkeys(refused)))


class Effects(NamedTuple):
    """Smallest and largest change that a site makes, in units of its format's roundoff."""

    tried: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.tried} run: {self.low:.2g} to {self.high:.2g} u"


def site_effects(site: str, *, seed: int = 0) -> Effects:
    """Run the emulator with one site in each narrow format and mode.

    The change is the largest |x - x_exact| / |x_exact| among out, dQ, dK and dV, over the format's
    unit roundoff.
    """
    tensors = _gaussian((1, 2, 2, 24, 24, 8, 8), seed)
    plain = results(emulated, "exact,reference=running,tile=8", tensors)
    found = []
    for fmt in NARROW:
        for mode in ROUNDINGS:
            text = f"exact,reference=running,tile=8,{site}={fmt}:{mode}"
            moved = distances(results(emulated, text, tensors), plain)
            found.append(max(moved) / parse_format(fmt).unit_roundoff)
    return Effects(len(found), min(found), max(found))


def _gaussian(shape, seed: int = 0):
    return parity.inputs(shape, kind="gaussian", dtype=torch.float32, seed=seed)


def results(module, text: str, tensors) -> list[Tensor]:
    scale = 1 / math.sqrt(tensors[0].shape[-1])
    found = parity.run(module, parse_numerics(text), tensors, causal=True, scale=scale)
    return [found[name].double() for name in ("out", "dq", "dk", "dv")]


def distances(mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(mine, theirs)]


def interpreted_agreement(sites: Sequence[str]) -> dict[str, float] | str:
    """Triton's kernels, interpreted, against the emulator: one site at a time in bf16.

    Returns site -> |triton - emulated| / |emulated - exact| for the quantity that the site changes
    most: about 0 where the kernels round there as the emulator does, 1 where they do not round.
    Runs in a process of its own with TRITON_INTERPRET=1; a sentence where it cannot.
    """
    command = [sys.executable, "-m", "book.backend_support", *sites]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"Triton's interpreter does not run here ({last})"
    return json.loads(done.stdout)


def _agreement(site: str) -> float:
    tensors = _gaussian((1, 1, 1, 24, 24, 16, 16))
    text = f"exact,{site}=bf16"
    mine, plain = (results(emulated, t, tensors) for t in (text, "exact"))
    theirs = results(triton_attention, text, tensors)
    moved = distances(mine, plain)
    place = moved.index(max(moved))
    return distances(theirs, mine)[place] / moved[place]


def site_table() -> list[list[object]]:
    """Site, and what each backend honours there."""
    return [[f"`{s}`", *(site_support(s, backend) for backend in BACKENDS)] for s in SITE_NAMES]


def trial_table(
    tested: Sequence[Numerics], agreement: dict[str, float] | str
) -> list[list[object]]:
    """Site, the emulator's effects, the interpreted kernels' distance, formats of the GPU run.

    tested: numerics of the archived GPU parity cases; agreement: of `interpreted_agreement`.
    """
    lines = []
    for site in SITE_NAMES:
        found = agreement.get(site) if isinstance(agreement, dict) else None
        distance = "not honoured" if found is None else f"{found:.1g}"
        on_gpu = ", ".join(formats_of(site, tested))
        lines.append([f"`{site}`", site_effects(site), distance, on_gpu])
    return lines


def formats_of(site: str, tested: Sequence[Numerics]) -> list[str]:
    """What a site was rounded to in any of the numerics tested."""
    values = (getattr(n, site) for n in tested)
    return list(dict.fromkeys(str(v) for v in values if v is not None))


def choices() -> dict[str, tuple[str, dict]]:
    """Choices that are no format: label -> (numerics, what else is asked)."""
    out = {f"`{name}`": (name, {}) for name in PRESETS}
    out |= {f"`{text.removeprefix('paper,')}`": (text, {}) for text in choice_texts()
            if text.startswith("paper,") and "bits" not in text}  # fmt: skip
    out["`row_sum_floor=1e-10`"] = ("paper,row_sum_floor=1e-10", {})
    out["`compute=fp64`"] = ("exact,compute=fp64", {})
    for dtype in (torch.float16, torch.float32, torch.float64):
        out[f"{str(dtype).removeprefix('torch.')} inputs"] = ("exact", {"dtype": dtype})
    out["a mask"] = ("flash", {"mask": True})
    return out


def choice_table(tested: Sequence[Numerics], dtypes: Sequence[str] = ()) -> list[list[str]]:
    """Label; for each backend 'yes' or 'refused'; how the GPU run compared Triton, if it did.

    tested, dtypes: numerics, and inputs besides bf16, of the archived GPU run. Interventions that
    draw are looked for by their kind.
    """
    lines = []
    for label, (text, asked) in choices().items():
        answers = ["refused" if refusal(b, text, **asked) else "yes" for b in BACKENDS]
        n = parse_numerics(text)
        same = label.removesuffix(" inputs") in dtypes if asked else n in tested
        drawn = [x for x in tested if x.stochastic and n.stochastic and _kind(x) == _kind(n)]
        lines.append([label, *answers, "in ulps" if same else "in law" if drawn else "no"])
    return lines


def _kind(n: Numerics) -> str | None:
    return n.delta_error.kind if n.delta_error else None


def refusals() -> list[list[str]]:
    """Every kind of refusal once: backend and its sentence about the first case that meets it."""
    found: dict[tuple[str, str], str] = {}

    def add(backend, why):
        found.setdefault((backend, why.rpartition(": ")[2]), why)

    for backend in BACKENDS:
        for n, asked in choices().values():
            if why := refusal(backend, n, **asked):
                add(backend, why)
        for site in SITE_NAMES:
            for why in site_support(site, backend).refused:
                add(backend, why)
    return [[backend, why] for (backend, _), why in found.items()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({site: _agreement(site) for site in sys.argv[1:]}))
