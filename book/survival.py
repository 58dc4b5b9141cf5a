"""Time to failure against a dial, with runs that had not failed: a line and honest intervals.

The model is log2(steps) = a + b * bits + noise, the noise normal with one standard deviation: the
accelerated-failure-time model of survival analysis with a log-normal time. A run that ended
without failing is *censored*: it adds the probability of lasting longer than it did, so it can
only raise the line. b = 1 means that each bit doubles the time. Intervals are 95 % by profile
likelihood: all values whose best fit is at most 1.92 nats less likely than the best of all. With
the few runs there are here they are somewhat too narrow, as every such interval is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

NATS = 1.9207  # half of the 95 % point of chi-squared with one degree of freedom
Z95 = 1.959963984540054  # two-sided 95 % point of the normal distribution
LEAST_FAILURES = 4  # fewer do not tell the noise from the slope
LEAST_NOISE = 0.05  # of log2 steps (3.5 %), added in squares: few runs may lie on a line by luck
FARTHEST = 40.0  # in log2 steps (or per bit): an interval that reaches so far is open

Interval = tuple[float, float | None]


@dataclass(frozen=True)
class Fit:
    """A line through log2 steps to failure. The intervals' upper ends are None where open.

    slope: log2 steps per bit. predicted: log2 steps at `at` bits. noise: the standard deviation of
    log2 steps about the line.
    """

    at: float
    slope: float
    slope_interval: Interval
    predicted: float
    predicted_interval: Interval
    noise: float
    failures: int
    censored: int

    def log2_steps(self, bits: float) -> float:
        """The line at `bits`."""
        return self.predicted + self.slope * (bits - self.at)


def fit(points: Sequence[Mapping], *, at: float = 7, dose: str = "bits") -> Fit | None:
    """Fit the line by maximum likelihood. points: mappings with the dose, "step" and "failed".

    None where the runs do not fix a line: fewer than LEAST_FAILURES failures, or all of them at
    one dose.
    """
    failed = [p for p in points if p["failed"]]
    if len(failed) < LEAST_FAILURES or len({p[dose] for p in failed}) < 2:
        return None
    data = _Data(points, at, dose)
    (value, slope, noise), best = data.best()
    return Fit(
        at=at,
        slope=slope,
        slope_interval=_profile(data.with_slope, slope, best),
        predicted=value,
        predicted_interval=_profile(data.with_value, value, best),
        noise=noise,
        failures=len(failed),
        censored=len(points) - len(failed),
    )


class _Data:
    """The likelihood in Olsen's parameters, in which it is concave: theta = 1 / sigma, and the
    line over sigma (R. J. Olsen, Econometrica 46, 1978).

    z = theta y - theta (value + slope x) is linear in them, also where value or slope is held, so
    every fit is a few Newton steps on z = M p with p[0] = theta.
    """

    def __init__(self, points: Sequence[Mapping], at: float, dose: str):
        self.x = np.array([p[dose] - at for p in points], dtype=float)
        self.y = np.log2([max(p["step"], 1) for p in points])
        self.failed = np.array([bool(p["failed"]) for p in points])

    def best(self) -> tuple[tuple[float, float, float], float]:
        """((value, slope, sigma), log-likelihood) of the best line."""
        ones = np.ones_like(self.x)
        p, loglik = self._maximum(np.stack([self.y, -ones, -self.x], 1))
        return (p[1] / p[0], p[2] / p[0], 1 / p[0]), loglik

    def with_value(self, value: float) -> float:
        """Log-likelihood of the best line through `value` at x = 0."""
        return self._maximum(np.stack([self.y - value, -self.x], 1))[1]

    def with_slope(self, slope: float) -> float:
        """Log-likelihood of the best line of that slope."""
        return self._maximum(np.stack([self.y - slope * self.x, -np.ones_like(self.x)], 1))[1]

    def _loglik(self, M: np.ndarray, p: np.ndarray) -> float:
        if p[0] <= 0:
            return -math.inf
        z, f = M @ p, self.failed
        density = np.log(p[0]) - (z[f] ** 2 + (LEAST_NOISE * p[0]) ** 2) / 2
        return float(density.sum() + _log_beyond(z[~f]).sum())

    def _maximum(self, M: np.ndarray) -> tuple[np.ndarray, float]:
        """Newton's method with halved steps; M [n, k], p[0] = theta."""
        f = self.failed
        p = np.zeros(M.shape[1])
        p[0] = 1.0
        p[1:] = np.linalg.lstsq(M[f, 1:], -M[f, 0], rcond=None)[0]
        value = self._loglik(M, p)
        for _ in range(100):
            gradient, hessian = self._derivatives(M, p)
            step = np.linalg.lstsq(-hessian, gradient, rcond=None)[0]
            if gradient @ step < 1e-12:
                break
            size = 1.0
            while self._loglik(M, p + size * step) < value and size > 1e-9:
                size /= 2
            p = p + size * step
            value = self._loglik(M, p)
        return p, value

    def _derivatives(self, M: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z, f = M @ p, self.failed
        hazard = np.exp(-(z[~f] ** 2) / 2 - math.log(2 * math.pi) / 2 - _log_beyond(z[~f]))
        gradient = -M[f].T @ z[f] - M[~f].T @ hazard
        gradient[0] += f.sum() * (1 / p[0] - LEAST_NOISE**2 * p[0])
        curved = hazard * (hazard - z[~f])
        hessian = -M[f].T @ M[f] - (M[~f].T * curved) @ M[~f]
        hessian[0, 0] -= f.sum() * (1 / p[0] ** 2 + LEAST_NOISE**2)
        return gradient, hessian


def _log_beyond(z: np.ndarray) -> np.ndarray:
    """log P(Z > z) of a standard normal Z, accurate far out."""
    return torch.special.log_ndtr(torch.from_numpy(-z)).numpy()


def _profile(loglik: Callable[[float], float], centre: float, best: float) -> Interval:
    """All values at which `loglik` is at most NATS below `best`; it is concave around `centre`."""
    low, high = (_bound(loglik, centre, best - NATS, sign) for sign in (-1, 1))
    return (-math.inf if low is None else low), high


def _bound(loglik, centre: float, least: float, sign: int) -> float | None:
    """Where `loglik` falls to `least` on one side; None if not within FARTHEST."""
    near, far = 0.0, 0.125
    while loglik(centre + sign * far) > least:
        near, far = far, 2 * far
        if near > FARTHEST:
            return None
    while far - near > 1e-4:
        middle = (near + far) / 2
        if loglik(centre + sign * middle) > least:
            near = middle
        else:
            far = middle
    return centre + sign * (near + far) / 2


def share_interval(successes: int, runs: int) -> tuple[float, float]:
    """95 % interval of a share by Wilson's score: it stays within 0 and 1 and is sound for few.

    Raises ValueError for no runs.
    """
    if runs < 1:
        raise ValueError("a share of no runs has no interval; run some first")
    p, n = successes / runs, runs
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    low = 0.0 if successes == 0 else centre - half  # exactly: not the last bit of a difference
    return low, 1.0 if successes == runs else centre + half
