"""Numerics: where attention rounds, to which format, and how, as one immutable value.

Causal attention of one head computes, with alpha = 1/sqrt(d):

    S = alpha Q K^T                 site `scores`
    m = the reference of softmax    `softmax`, `reference`, site `reference_format`
    P_bar = exp(S - m)              site `probabilities`
    l = rowsum(P_bar)               site `row_sum` (of unrounded or rounded P_bar)
    O_bar = P_bar V                 site `unnormalized` (fp32 accumulation; `accumulate`)
    O = O_bar / l                   site `output`
    lse = m + log l                 site `lse`
    delta = rowsum(dO * O)          reads O through site `delta_output`; or rowsum(dP * P)
    P = exp(S - lse)                site `backward_probabilities` (operand of dV = P^T dO)
    dP = dO V^T                     site `grad_probabilities`
    dS = P * (dP - delta)           site `grad_scores` (operand of dQ and dK)
    dQ = alpha dS K, dK = alpha dS^T Q, dV      site `gradients`

Every name in the right column is a field below. An isolation experiment changes one field:
`paper().at(unnormalized=FP32)`. A value says everything: no environment variable, no global.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from .formats import BF16, FP32, FP64, FloatFormat, parse_format
from .policies import DeltaError, Softmax
from .rounding import ROUNDINGS


@dataclass(frozen=True)
class Site:
    """A format and a rounding mode: what happens to one intermediate."""

    format: FloatFormat = FP32
    rounding: str = "nearest_even"

    def __post_init__(self):
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"unknown rounding mode {self.rounding!r}; use one of {', '.join(ROUNDINGS)}"
            )

    @classmethod
    def of(cls, value: Site | FloatFormat | str) -> Site:
        """From a Site, a FloatFormat, or text such as 'bf16', 'bf16.4', 'bf16:stochastic'."""
        if isinstance(value, Site):
            return value
        if isinstance(value, FloatFormat):
            return cls(value)
        name, _, mode = str(value).partition(":")
        return cls(parse_format(name), mode or "nearest_even")

    def __str__(self) -> str:
        suffix = "" if self.rounding == "nearest_even" else f":{self.rounding}"
        return f"{self.format}{suffix}"


SITE_NAMES = (
    "inputs",
    "scores",
    "reference_format",
    "probabilities",
    "row_sum",
    "unnormalized",
    "output",
    "delta_output",
    "lse",
    "backward_probabilities",
    "grad_probabilities",
    "grad_scores",
    "gradients",
)


@dataclass(frozen=True)
class Numerics:
    """All choices of one attention head's arithmetic. Sites: see the module's docstring.

    reference: "row" takes m from the final row maximum, "running" keeps a maximum per key tile of
        `tile` keys and rescales, as FlashAttention does. The tile is part of the specification.
    row_sum_source: l sums P_bar before ("unrounded") or after ("rounded") its rounding.
    row_sum_floor: l is at least this (the authors' emulation clamps at 1e-10); 0 for none.
    accumulate: "once" rounds O_bar at the end; "tile" after every key tile of a running sum.
    delta_output: None reads the stored O; a Site recomputes O = O_bar/l from the *rounded* P_bar
        with O_bar unrounded and rounds only the result: the paper's high-precision twin is
        `delta_output=FP32` and differs from the low-precision case in nothing else.
    delta: "dO_O" or "dP_P" (the same in exact arithmetic).
    compute: carrier of everything that is not rounded, FP32 or FP64. A site of FP32 rounds nothing
        in either.

    `key` (not a field) is the canonical JSON without the name: equal values have equal keys. It is
    what a compiled graph sees of a Numerics.
    """

    name: str = field(default="custom", compare=False)
    inputs: Site = Site()
    scores: Site = Site()
    softmax: Softmax = Softmax()
    reference: Literal["row", "running"] = "row"
    tile: int = 128
    reference_format: Site = Site()
    probabilities: Site = Site()
    row_sum: Site = Site()
    row_sum_source: Literal["unrounded", "rounded"] = "unrounded"
    row_sum_floor: float = 0.0
    unnormalized: Site = Site()
    accumulate: Literal["once", "tile"] = "once"
    output: Site = Site()
    delta_output: Site | None = None
    lse: Site = Site()
    delta: Literal["dO_O", "dP_P"] = "dO_O"
    delta_error: DeltaError | None = None
    backward_probabilities: Site = Site()
    grad_probabilities: Site = Site()
    grad_scores: Site = Site()
    gradients: Site = Site()
    compute: FloatFormat = FP32

    def __post_init__(self):
        _choice("reference", self.reference, ("row", "running"))
        _choice("row_sum_source", self.row_sum_source, ("unrounded", "rounded"))
        _choice("accumulate", self.accumulate, ("once", "tile"))
        _choice("delta", self.delta, ("dO_O", "dP_P"))
        if self.compute not in (FP32, FP64):
            raise ValueError(f"compute={self.compute}; use fp32 or fp64")
        if not isinstance(self.tile, int) or self.tile < 1:
            raise ValueError(f"tile={self.tile!r} keys; use a whole number of at least 1")
        values = {key: value for key, value in self.to_dict().items() if key != "name"}
        object.__setattr__(self, "key", json.dumps(values, sort_keys=True))

    def at(self, **changes) -> Numerics:
        """A variant with some fields changed; formats and text become Sites.

        `numerics.at(unnormalized=FP32)`, `.at(output="bf16:stochastic", delta="dP_P")`.
        Raises ValueError naming the nearest field for an unknown one.
        """
        clean = {}
        for key, value in changes.items():
            _known_field(key)
            if key in SITE_NAMES:
                keep = key == "delta_output" and value in (None, "same")
                clean[key] = None if keep else Site.of(value)
            elif key == "compute":
                clean[key] = parse_format(value)
            elif key in ("softmax", "delta_error") and isinstance(value, str):
                clean[key] = Softmax(value) if key == "softmax" else DeltaError(value)
            else:
                clean[key] = value
        if "name" not in clean and clean:
            told = ",".join(f"{k}={v}" for k, v in changes.items())
            clean["name"] = f"{self.name},{told}"
        return replace(self, **clean)

    def matched_bits(self, bits: int) -> Numerics:
        """The *matched* dial: every bf16-or-narrower site cut to `bits` fraction bits.

        Tied values still share O_bar's grid, so the paper's mechanism is kept, scaled.
        """
        changes = {}
        for site in SITE_NAMES:
            value = getattr(self, site)
            if value is not None and value.format.fraction_bits <= BF16.fraction_bits:
                changes[site] = replace(value, format=value.format.cut(bits))
        return replace(self, **changes, name=f"{self.name},matched_bits={bits}")

    def output_bits(self, bits: int) -> Numerics:
        """The *output* dial: O_bar and O cut to `bits` fraction bits, nothing else.

        Scales the error but not the mechanism: with V finer than O_bar, tied values no longer fall
        on half-ulps.
        """
        cut = {s: getattr(self, s) for s in ("unnormalized", "output")}
        changes = {s: replace(v, format=v.format.cut(bits)) for s, v in cut.items()}
        return replace(self, **changes, name=f"{self.name},output_bits={bits}")

    def high_precision_delta(self) -> Numerics:
        """The paper's high-precision twin: delta reads an fp32 O, all else equal."""
        return replace(self, delta_output=Site(FP32), name=f"{self.name},delta_output=fp32")

    def in_one_tile(self) -> Numerics:
        """What comes to the same where no row has more than `tile` keys, up to orders of sums.

        Nothing is carried from tile to tile then. And with the row maximum for a reference, that
        of scores on the grid of `reference_format` needs no rounding, and a row sum of weights of
        which one is 1 no floor below 1 (but for rows whose scores are all -inf).
        """
        changes = dict(reference="row", accumulate="once")
        if self.softmax.kind == "safe":
            own, other = self.scores.format, self.reference_format.format
            if other.holds(own):
                changes["reference_format"] = Site()
            if self.row_sum_floor <= 1.0:
                changes["row_sum_floor"] = 0.0
        return replace(self, **changes)

    @property
    def stochastic(self) -> bool:
        """Whether a backward or forward pass draws random numbers (a seed matters)."""
        sites = (getattr(self, s) for s in SITE_NAMES)
        drawn = any(s is not None and s.rounding == "stochastic" for s in sites)
        return drawn or (self.delta_error is not None and self.delta_error.draws)

    @property
    def own_delta_output(self) -> bool:
        """Whether delta reads an O of its own, so that a forward keeps one beside the stored O."""
        changed = self.delta_output is not None or self.delta_error is not None
        return self.delta == "dO_O" and changed

    # -- text forms -------------------------------------------------------------------------------

    def to_dict(self) -> dict:
        """Plain JSON types; `Numerics.from_dict` gives an equal value back."""
        out = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (Site, FloatFormat)):
                value = str(value)
            elif dataclasses.is_dataclass(value):
                value = dataclasses.asdict(value)
            out[f.name] = value
        return out

    @classmethod
    def from_dict(cls, data: dict) -> Numerics:
        data = dict(data)
        if isinstance(data.get("softmax"), dict):
            data["softmax"] = Softmax(**data["softmax"])
        if isinstance(data.get("delta_error"), dict):
            data["delta_error"] = DeltaError(**data["delta_error"])
        name = data.pop("name", "custom")
        return replace(cls().at(**data), name=name)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    def __str__(self) -> str:
        return self.name


def _choice(name: str, value, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; use {' or '.join(map(repr, allowed))}")


def _known_field(key: str) -> None:
    known = [f.name for f in fields(Numerics)]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
        raise ValueError(f"Numerics has no field {key!r}{hint}")


# -- presets --------------------------------------------------------------------------------------


def exact(compute: FloatFormat | str = FP32) -> Numerics:
    """Nothing is rounded below `compute` (FP32, the default, or FP64)."""
    return Numerics(name="exact", compute=parse_format(compute))


def _bf16(name: str, **changes) -> Numerics:
    """What every bf16 kernel shares: bf16 operands and stores, fp32 accumulation."""
    base = dict(
        inputs=BF16,
        probabilities=BF16,
        output=BF16,
        backward_probabilities=BF16,
        grad_scores=BF16,
        gradients=BF16,
    )
    return replace(Numerics().at(**(base | changes)), name=name)


def flash(tile: int = 128) -> Numerics:
    """FlashAttention's own arithmetic: fp32 scores, running maximum, fp32 O_bar, bf16 O."""
    return _bf16("flash", reference="running", tile=tile)


def paper() -> Numerics:
    """The paper's low-precision case: bf16 scores, row maximum, O_bar rounded once to bf16."""
    return _bf16("paper", scores=BF16, unnormalized=BF16)


def authors(tile: int = 512) -> Numerics:
    """The authors' released emulation (ucker/why-low-precision-training-fails, attention.py).

    Forward, as it runs under bf16 autocast: S is a bf16 product; the maximum, the row sum and
    O_bar are bf16 buffers carried from tile to tile (512 keys); exp is taken in fp32; l sums P_bar
    before its rounding, each tile's sum at least 1e-10; each tile's P_bar V is rounded to bf16 and
    so is its sum with the rescaled O_bar; lse = m + log l in fp32 from the bf16 m and l.
    Backward, as `torch.compile` (their default) traces it, under the forward's autocast: operands
    bf16, dP a bf16 product, exp, delta's sum and dP - delta in fp32, and dQ, dK, dV summed over
    tiles in bf16 buffers.
    Not reproduced: they round S before multiplying by alpha (the same for a power of two, so for
    head dimensions 16 and 64), the compiler may keep fp32 between fused steps, and they fill
    hidden scores with a finite number, so that in their stable mode a wholly hidden tile counts as
    tied. That mode is `authors,softmax=stabilized,beta=2,eps=0.001,decide=tile`.
    """
    return _bf16(
        "authors",
        scores=BF16,
        reference="running",
        tile=tile,
        reference_format=BF16,
        row_sum=BF16,
        row_sum_floor=1e-10,
        unnormalized=BF16,
        accumulate="tile",
        grad_probabilities=BF16,
    )


def stabilized(beta: float = 7.0, eps: float = 0.0, *, decide: str = "row") -> Numerics:
    """`paper` with stabilised flash attention (SFA) as published: paper section 4, Algorithm 1."""
    policy = Softmax("stabilized", beta=beta, eps=eps, decide=decide)
    return replace(paper().at(softmax=policy), name="stabilized")


def guarded(beta: float = 7.0, eps: float = 0.0) -> Numerics:
    """`paper` with our guarded SFA: the offset is bounded below and above."""
    return replace(paper().at(softmax=Softmax("guarded", beta=beta, eps=eps)), name="guarded")


PRESETS = {
    "exact": exact,
    "flash": flash,
    "paper": paper,
    "authors": authors,
    "stabilized": stabilized,
    "guarded": guarded,
}
_ARGUMENTS = {
    "beta": float,
    "eps": float,
    "shift": float,
    "min_offset": float,
    "max_offset": float,
    "decide": str,
}


def parse_numerics(text: str | Numerics) -> Numerics:
    """Text to Numerics: 'paper', 'paper,output_bits=2,delta_output=fp32', 'stabilized,beta=4'.

    A preset's name, then changes in order: any field of Numerics, the dials `matched_bits` and
    `output_bits`, or the softmax parameters beta, eps, shift, min_offset, max_offset, decide, and
    `delta_error=injected` with `mean` and `rms`. JSON from `to_json` is accepted too. Raises
    ValueError naming what it did not understand and the nearest thing that it would.
    """
    if isinstance(text, Numerics):
        return text
    text = text.strip()
    if text.startswith("{"):
        return Numerics.from_dict(json.loads(text))
    head, *changes = [part.strip() for part in text.split(",")]
    if head not in PRESETS:
        near = difflib.get_close_matches(head, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown numerics {head!r}{hint} Presets: {', '.join(PRESETS)}")
    result = PRESETS[head]()
    for change in changes:
        key, eq, value = (s.strip() for s in change.partition("="))
        if not eq:
            raise ValueError(f"numerics {text!r}: {change!r} is not key=value")
        result = _apply(result, key, value, text)
    return replace(result, name=text)


def _apply(numerics: Numerics, key: str, value: str, text: str) -> Numerics:
    try:
        if key in ("matched_bits", "output_bits"):
            return getattr(numerics, key)(int(value))
        if key in _ARGUMENTS:
            policy = replace(numerics.softmax, **{key: _ARGUMENTS[key](value)})
            return replace(numerics, softmax=policy)
        if key == "softmax":
            return replace(numerics, softmax=replace(numerics.softmax, kind=value))
        if key in ("mean", "rms"):
            if numerics.delta_error is None:
                raise ValueError(f"{key} goes after delta_error=injected")
            return replace(
                numerics, delta_error=replace(numerics.delta_error, **{key: float(value)})
            )
        if key == "tile":
            return replace(numerics, tile=int(value))
        if key == "row_sum_floor":
            return replace(numerics, row_sum_floor=float(value))
        if value == "none" and key in ("delta_output", "delta_error"):
            return replace(numerics, **{key: None})
        return numerics.at(**{key: value})
    except ValueError as error:
        raise ValueError(f"numerics {text!r}, {key}={value}: {error}") from None


from .scope import Override, ScopedNumerics  # noqa: E402, F401 - a scope holds Numerics
