"""The error of dW_Q in captured heads: how large, how one-sided, how coherent (chapter 3).

A `Moment` is one head at one captured step with everything measured on it; the tables and figures
of the chapter read lists of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kernels.forensics import (
    Coherence,
    DeltaMeasurement,
    Head,
    SignedMean,
    WeightGradientError,
    clustered_mean,
    coherent_gain,
    delta_error,
    direction_cosine,
    pair_cosines,
    pieces,
    sign_flip_null,
    weight_gradient_error,
)
from kernels.forensics.delta import twin_outputs
from kernels.forensics.pieces import Setting
from kernels.formats import FP32
from kernels.interventions import GRADIENTS
from kernels.numerics import Numerics
from kernels.policies import DeltaError, DeltaErrorKind

from .captured import Captured

Place = tuple[int, int]  # layer, head
PAIRS = 256  # terms whose pairwise cosines are drawn
SIGN_DRAWS = 99


@dataclass(frozen=True)
class Moment:
    """One head at one step. Sums are over all rows of the captured sequences."""

    captured: Captured
    weight: WeightGradientError
    coherence: Coherence
    delta: DeltaMeasurement

    @property
    def step(self) -> int:
        return self.captured.step

    @property
    def spectral_norm(self) -> float:
        return self.captured.spectral_norm

    @cached_property
    def R(self) -> Tensor:
        """The mean term, [D, C]: what the paper calls the common low-rank direction."""
        return self.coherence.R

    @cached_property
    def random_signs(self) -> Tensor:
        """Coherent gains of these terms and sizes with a coin's sign for every row, [SIGN_DRAWS].

        The null for bias: directions as they are, however alike. Terms along one line give gains
        distributed as |N(0, 1)|, terms in random directions values close to 1.
        """
        a, b, c = self.weight.terms
        apart = (c * a.norm(dim=1) * b.norm(dim=1)).norm()
        generator = torch.Generator().manual_seed(self.step)
        signs = torch.randint(0, 2, (SIGN_DRAWS, 1, len(c)), generator=generator) * 2.0 - 1
        terms = signs * (c[:, None] * a / apart).T.float()  # [draws, D, n]
        return (terms @ b.float()).norm(dim=(1, 2)).double()

    @property
    def sign_p_value(self) -> float:
        """Share of sign patterns with a gain at least as large as the one found."""
        reached = int((self.random_signs >= self.coherence.gain).sum())
        return (reached + 1) / (SIGN_DRAWS + 1)

    @property
    def first_energy(self) -> float:
        """Share of R's squared singular values that the first one has."""
        return float(self.coherence.energy[0])

    @cached_property
    def projection(self) -> float:
        """|u^T W_Q v| for R's leading pair (u, v): how strongly W_Q stretches along R."""
        u, v = leading_pair(self.R)
        return abs(float(u @ self.captured.head.W_Q.double() @ v))


def measure(captures: Iterable[Captured], *, draws: int = 10) -> dict[Place, list[Moment]]:
    """(layer, head) -> its moments by step, under the run's own numerics.

    Heads without a finite output (after a failure) are left out.
    """
    found: dict[Place, list[Moment]] = {}
    for captured in captures:
        n = captured.numerics
        try:
            head = captured.head
            weight = weight_gradient_error(head, numerics=n)
        except ValueError as error:
            if "finite" not in str(error):  # nothing to measure any more, or something wrong
                raise
            continue
        moment = Moment(
            captured,
            weight,
            weight.coherence(draws=draws),
            delta_error(head, numerics=n, sites=False),
        )
        found.setdefault((captured.layer, captured.place), []).append(moment)
    return found


def fastest(moments: Mapping[Place, Sequence[Moment]]) -> Place:
    """The head whose spectral norm is the largest at the last captured step."""
    return max(moments, key=lambda place: moments[place][-1].spectral_norm)


def stages(
    series: Sequence[Moment], failed_from: int | None, onset: int | None = None
) -> dict[str, Moment]:
    """Untrained, half-way to the failure, at the onset, the last before it, and one inside.

    By step. The onset and the inside of the failure only where there are captures of their own.
    """
    end = series[-1].step if failed_from is None else failed_from
    before = [m for m in series if m.step <= end]
    half = min(before, key=lambda m: abs(m.step - end / 2))
    found = {"untrained": before[0], "half-way": half, "at the end": before[-1]}
    if onset is not None and onset <= end:
        near = min(before, key=lambda m: abs(m.step - onset))
        if near.step not in [m.step for m in found.values()]:
            found["at the onset"] = near
    if series[-1].step > end:
        found["failing"] = series[-1]
    return dict(sorted(found.items(), key=lambda item: item[1].step))


def leading_pair(M: Tensor) -> tuple[Tensor, Tensor]:
    """First left and right singular vector of a [D, C] matrix, float64."""
    U, _, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    return U[:, 0], Vh[0]


def pairwise(moment: Moment) -> Tensor:
    """Cosines between the terms of up to PAIRS evenly spaced rows, each pair once."""
    a, b, _ = moment.weight.terms
    every = torch.linspace(0, len(a) - 1, min(PAIRS, len(a))).round().long()
    cosines = pair_cosines(a[every], b[every])
    upper = torch.triu_indices(*cosines.shape, offset=1)
    return cosines[upper[0], upper[1]]


def random_pairs(moment: Moment, seed: int = 0) -> Tensor:
    """The same for as many terms in random directions: the control of `pairwise`."""
    a, b, _ = moment.weight.terms
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(PAIRS, x.shape[1], generator=generator).double() for x in (a, b))
    cosines = pair_cosines(a, b)
    upper = torch.triu_indices(*cosines.shape, offset=1)
    return cosines[upper[0], upper[1]]


def energies(moment: Moment) -> Tensor:
    """Share of each singular value of R in the sum of their squares, descending."""
    square = moment.coherence.spectrum.square()
    return square / square.sum().clamp(min=1e-300)


def random_energies(moment: Moment, seed: int = 0) -> Tensor:
    """The same for the mean of as many terms in random directions."""
    a, b, _ = moment.weight.terms
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (a, b))
    square = torch.linalg.svdvals(a.T @ b).square()
    return square / square.sum()


def angles(series: Sequence[Moment]) -> Tensor:
    """|cosine| between R at every two steps, [n, n]."""
    return torch.tensor([[abs(direction_cosine(x.R, y.R)) for y in series] for x in series])


def gain_over_steps(series: Sequence[Moment]) -> dict[str, float]:
    """Coherent gain over the captured steps: of the errors of dW_Q, and of what W_Q did.

    1 is a random walk, sqrt(n) a straight line. W_Q's part is the change between two captures.
    """
    weights = torch.stack([m.captured.head.W_Q.double() for m in series])
    return {
        "error of dW_Q": coherent_gain(torch.stack([m.weight.difference for m in series])),
        "change of W_Q": coherent_gain(weights.diff(dim=0)),
        "straight line": math.sqrt(len(series)),
    }


# -- bias -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bias:
    """Of one head over its captured steps: e in units of each step's rms.

    mean: with sequences of a step as clusters. positive: share of rows with e > 0. total, sigma:
    sum over the steps of sum_T e[T], and the standard deviation it would have if each step's sign
    were a coin's. p_value: of that.
    """

    mean: SignedMean
    positive: float
    total: float
    sigma: float
    p_value: float


def bias(series: Sequence[Moment]) -> Bias:
    """Is the error of delta one-sided in this head?"""
    values, labels, sums = [], [], []
    for place, moment in enumerate(series):
        error = moment.delta.error
        finite = torch.isfinite(error)
        sequences = torch.arange(len(error))[:, None].expand_as(error)
        values.append(error[finite] / (moment.delta.rms or 1.0))
        labels.append(sequences[finite] + place * len(error))
        sums.append(float(error[finite].sum()))
    flat = torch.cat(values)
    signs = flat.sign()
    null = sign_flip_null(sums)
    return Bias(
        mean=clustered_mean(flat, torch.cat(labels)),
        positive=float((signs > 0).sum() / (signs != 0).sum().clamp(min=1)),
        total=null.total,
        sigma=float(null.sigma[-1]),
        p_value=null.p_value,
    )


@dataclass(frozen=True)
class FeatureSigns:
    """Per feature of O: mean of dO and of O_lp - O_hp over rows, each in units of its rms.

    of_means: n sum_d mean(dO_d) mean(error_d), what signs that hold over all rows would give;
    total: sum_T e[T] as it is.
    """

    dO: Tensor
    error: Tensor
    of_means: float
    total: float


def feature_signs(moment: Moment) -> FeatureSigns:
    """The paper's Fig. 5b, c over all rows in place of one."""
    d = moment.delta
    dO = pieces.on_grid(moment.captured.head.dO, moment.captured.numerics).double()
    rows = d.error.numel()

    def scaled(mean: Tensor, x: Tensor) -> Tensor:
        return mean / x.square().mean((0, 1)).sqrt().clamp(min=1e-30)

    return FeatureSigns(
        dO=scaled(d.feature_dO, dO),
        error=scaled(d.feature_output_error, d.output_error),
        of_means=float(rows * (d.feature_dO * d.feature_output_error).sum()),
        total=float(d.error.nan_to_num(0.0).sum()),
    )


# -- what an intervention does before training ----------------------------------------------------


def injected_gains(
    head: Head, numerics: Numerics, kinds: Sequence[str] = DeltaErrorKind.__args__
) -> dict[str, float]:
    """Kind of `DeltaError` -> coherent gain of what it adds to dW_Q, the sites of dQ in fp32.

    The terms are s[T] (x) X[T], s the row's change of dQ against delta_hp. Kinds that need given
    moments are left out, and those that send the error as it is into one gradient alone.
    """
    setting = Setting.of(head, numerics, True, None, 0)
    n = setting.numerics.at(delta_error=None, grad_scores=FP32, gradients=FP32)
    result, _, _ = twin_outputs(head, replace(setting, numerics=n.at(delta_output=FP32)))
    X = head.X.double().flatten(0, 1)

    def dQ(numerics: Numerics, delta_output) -> Tensor:
        dq = pieces.backward_dq(head, setting, result, delta_output, numerics, head.dO, head.v)
        return dq.double().flatten(0, 1)

    clean = dQ(n.at(delta_output=FP32), result.out_fp32)
    gains = {}
    for kind in kinds:
        if kind == "injected" or kind in GRADIENTS:
            continue
        changed = n.at(delta_output=None, delta_error=DeltaError(kind))
        terms = dQ(changed, result.out_fp32) - clean
        apart = (terms.norm(dim=1) * X.norm(dim=1)).norm()
        gains[kind] = float((terms.T @ X).norm() / apart) if float(apart) else math.nan
    return gains
