"""The rounding trace: how the error of one element of O_bar = P_bar V builds up, key by key.

The paper (Fig. 6) plots a cumulative error over keys, and mixes two readings of it:

- `prefix_round_once`: every prefix is summed in fp32 and rounded once. Step t is what O_bar would
  be if the row ended at key t; the last step is what a kernel with an fp32 accumulator stores.
- `running`: the sum is rounded to the format after *each* addition. A kernel that keeps its sum in
  the low format does this; one with an fp32 accumulator does not.

Both are given, with the bits of every step: sign, exponent, significand, guard, sticky, direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..formats import BF16, FP32, FloatFormat, parse_format
from ..numerics import Numerics
from ..rounding import Bits, Rounding, decode, round_to
from . import pieces
from .inputs import Head, as_head

READINGS = ("prefix_round_once", "running")


@dataclass(frozen=True)
class RoundingTrace:
    """One element of O_bar over its keys; all tensors have the n visible keys as their length.

    p, v: the weights P_bar and values (float32). ones: P_bar = 1. exact: float64 prefix sums.
    For each reading a dict entry: `before`, float32, the number that was rounded at each step;
    `after`, float32, the result on the grid; `error`, float64, after - exact, cumulative.
    """

    format: FloatFormat
    mode: str
    p: Tensor
    v: Tensor
    ones: Tensor
    exact: Tensor
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    error: dict[str, Tensor]

    def __len__(self) -> int:
        return self.p.numel()

    def step_error(self, reading: str = "prefix_round_once") -> Tensor:
        """How much each key changed the cumulative error, float64 [n]."""
        error = self.error[_reading(reading)]
        return torch.diff(error, prepend=error.new_zeros(1))

    def bits(self, t: int, reading: str = "prefix_round_once") -> Bits:
        """The number rounded at key t (from 0; negative counts from the end), taken apart."""
        before = float(self.before[_reading(reading)][t])
        after = float(self.after[reading][t])
        bits = decode(before, self.format, "nearest_even")
        # decode draws anew in stochastic mode, so what happened is told by the trace
        unit = 2.0 ** (bits.exponent - self.format.fraction_bits)
        return replace(
            bits,
            rounded=after,
            round_up=abs(after) > bits.significand * unit,
            error_ulp=(after - before) / unit,
        )

    def all_bits(self, reading: str = "prefix_round_once") -> list[Bits]:
        return [self.bits(t, reading) for t in range(len(self))]

    def largest(self, count: int = 10, reading: str = "prefix_round_once") -> list[int]:
        """The keys at which the cumulative error jumped most, in key order."""
        steps = self.step_error(reading).abs()
        return sorted(steps.topk(min(count, len(self))).indices.tolist())

    def table(self, keys=None, reading: str = "prefix_round_once") -> str:
        """A readable table of some keys (default: the ten largest jumps)."""
        lines = [f"{reading}, {self.format}, {self.mode}; * marks P_bar = 1"]
        lines.append(
            f"{'key':>6} {'P_bar':>11} {'v':>11} {'sum':>13} s {'exp':>4} significand g st "
            f"{'way':<4} {'stored':>13} {'error':>11}"
        )
        error = self.error[_reading(reading)]
        for t in self.largest(reading=reading) if keys is None else keys:
            b = self.bits(t, reading)
            way = (
                "tie+"
                if b.tie and b.round_up
                else "tie-"
                if b.tie
                else "away"
                if b.round_up
                else "zero"
            )
            star = "*" if bool(self.ones[t]) else " "
            digits = f"{b.significand:0{self.format.fraction_bits + 1}b}"
            lines.append(
                f"{t:>5}{star} {float(self.p[t]):>11.5g} {float(self.v[t]):>11.5g} "
                f"{b.value:>13.7g} {b.sign} {b.exponent:>4} {digits:>11} {b.guard} {b.sticky:>2} "
                f"{way:<4} {b.rounded:>13.7g} {float(error[t]):>+11.4g}"
            )
        return "\n".join(lines)


def rounding_trace(
    q,
    k=None,
    v=None,
    *,
    row: int,
    feature: int,
    sequence: int = 0,
    numerics: Numerics | str = "paper",
    causal: bool = True,
    scale: float | None = None,
    seed: int = 0,
) -> RoundingTrace:
    """The trace of O_bar[row, feature] of a head, over the keys that the row sees.

    q, k, v: as in `as_head` (a Head, a mapping or a file also does); rows, features and sequences
    count from 0, negative ones from the end. The weights are the emulator's P_bar, the format and
    mode those of the `unnormalized` site. Source: paper Fig. 6.
    Raises ValueError where there is nothing to trace: O_bar kept in fp32, a running reference with
    more keys than a tile (P_bar then has several references), or stochastic S or P_bar.
    """
    head = as_head(q, k, v)
    setting = pieces.Setting.of(head, numerics, causal, scale, seed)
    n = setting.numerics
    _check_traceable(n, head)
    row = _position(row, head.rows, "row")
    feature = _position(feature, head.v.shape[-1], "feature")
    sequence = _position(sequence, head.sequences, "sequence")
    seen = min(row + 1, head.k.shape[1]) if setting.causal else head.k.shape[1]
    m = pieces.forward(head, setting).m[sequence, 0, row]
    S = pieces.scores(head, setting)[sequence, row]
    P_bar = pieces.rounded_probabilities(S, m, n)
    values = pieces.on_grid(head.v, n)[sequence, :seen, feature]
    site = n.unnormalized
    return trace_sum(P_bar[:seen], values, site.format, site.rounding, seed=seed)


def _check_traceable(n: Numerics, head: Head) -> None:
    if n.unnormalized.format.fraction_bits >= FP32.fraction_bits:
        raise ValueError(
            f"numerics {str(n)!r} keep O_bar in {n.unnormalized.format}: there is no rounding to "
            "trace; use 'paper' or unnormalized=bf16"
        )
    if n.reference == "running" and head.k.shape[1] > n.tile:
        raise ValueError(
            f"a running reference over {head.k.shape[1]} keys in tiles of {n.tile} rescales the "
            "sum; trace it with reference=row, or with tile at least the number of keys"
        )
    for name in ("inputs", "scores", "probabilities"):
        if getattr(n, name).rounding == "stochastic":
            raise ValueError(
                f"the trace repeats P_bar to the bit; use a {name} site that is not stochastic"
            )


def _position(index: int, size: int, what: str) -> int:
    if not -size <= index < size:
        raise ValueError(f"{what} {index} does not exist; there are {size}, counted from 0")
    return index % size


def trace_sum(
    p,
    v,
    fmt: FloatFormat | str = BF16,
    mode: Rounding = "nearest_even",
    *,
    seed: int = 0,
) -> RoundingTrace:
    """Trace sum_t p[t] v[t] under both readings.

    p, v: [n] numbers, taken as float32. Products and sums are fp32 operations in key order (a
    product of two bf16 numbers is exact in fp32); a kernel may add in another order.
    The paper's example is trace_sum([1, 1], [-2.4071154594421387, -2.296875]).
    Raises ValueError for unequal lengths or nothing to add.
    """
    fmt = parse_format(fmt)
    p32 = torch.as_tensor(p).detach().cpu().float().reshape(-1)
    v32 = torch.as_tensor(v).detach().cpu().float().reshape(-1)
    if p32.numel() != v32.numel() or p32.numel() == 0:
        raise ValueError(
            f"{p32.numel()} weights and {v32.numel()} values; give as many, at least 1"
        )
    generator = torch.Generator().manual_seed(seed)

    def rounded(x: Tensor) -> Tensor:
        return round_to(x, fmt, mode, generator=generator)

    products = (p32 * v32).numpy()
    exact = (p32.double() * v32.double()).cumsum(0)
    prefix = np.empty_like(products)
    accumulator = np.float32(0)
    for t, term in enumerate(products):
        accumulator = np.float32(accumulator + term)
        prefix[t] = accumulator
    prefix = torch.from_numpy(prefix)
    before, after = [], []
    stored = torch.zeros((), dtype=torch.float32)
    for term in torch.from_numpy(products):
        before.append(stored + term)
        stored = rounded(before[-1])
        after.append(stored)
    numbers = {
        "prefix_round_once": (prefix, rounded(prefix)),
        "running": (torch.stack(before), torch.stack(after)),
    }
    return RoundingTrace(
        format=fmt,
        mode=mode,
        p=p32,
        v=v32,
        ones=p32 == 1,
        exact=exact,
        before={name: pair[0] for name, pair in numbers.items()},
        after={name: pair[1] for name, pair in numbers.items()},
        error={name: pair[1].double() - exact for name, pair in numbers.items()},
    )


def _reading(name: str) -> str:
    if name not in READINGS:
        raise ValueError(f"unknown reading {name!r}; use {' or '.join(READINGS)}")
    return name
