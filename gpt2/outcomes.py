"""What counts as failure: rules declared before any run and the same for every arm.

Diverged   the smoothed training loss stays above its own minimum so far + `DIVERGED_NATS` for
           `DIVERGED_STEPS` steps. Smoothing is an exponential moving average with a half-life of
           `HALF_LIFE` steps, divided by the sum of its weights: it starts at the first loss.
Nonfinite  a loss (or a gradient norm, where the trainer passes it) is NaN or infinite. Its own
           status: an underflow in stabilised attention is not a divergence.
Onset      the first step from which the worst head's tie rate exceeds `ONSET_TIES` times, or its
           spectral norm of W_Q `ONSET_NORM` times, the running maximum of the twin's worst head,
           at every probe of the next `ONSET_STEPS` steps (or up to a failure that comes sooner).
           A tie rate counts only above `TIE_FLOOR`: three times almost nothing is almost nothing.
           Nor can ties be judged where `ONSET_TIES` times the twin's are more than all rows from
           the first probe on, as in forks of a state whose rows tie already (`ties_can_show`).
Healthy    neither of these, and no onset, for `HEALTHY_FACTOR` times the steps that the failing
           arm took to fail. A run that ended sooner without failing is only *stable*.
Verdict    needs `VERDICT_RUNS` runs in each arm; with fewer a result is *observed*.

Two steps describe a divergence: `diverged_from`, where the excursion begins, and `diverged_step`,
`DIVERGED_STEPS` later, where the rule is met and the run stops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

HALF_LIFE = 20.0  # steps
DIVERGED_NATS = 1.0
DIVERGED_STEPS = 100
ONSET_TIES = 3.0
ONSET_NORM = 1.5
ONSET_STEPS = 200
TIE_FLOOR = 0.01  # share of rows
HEALTHY_FACTOR = 1.5
VERDICT_RUNS = 5

KINDS = ("diverged", "nonfinite", "onset", "healthy", "stable")
SIGNALS = {"tie_rate": ONSET_TIES, "spectral_norm_q": ONSET_NORM}


def rules() -> dict[str, float]:
    """The declared constants, for captions and run records."""
    return {
        "half_life": HALF_LIFE,
        "diverged_nats": DIVERGED_NATS,
        "diverged_steps": DIVERGED_STEPS,
        "onset_ties": ONSET_TIES,
        "onset_norm": ONSET_NORM,
        "onset_steps": ONSET_STEPS,
        "tie_floor": TIE_FLOOR,
        "healthy_factor": HEALTHY_FACTOR,
        "verdict_runs": VERDICT_RUNS,
    }


class OutcomeTracker:
    """The divergence rule fed one loss at a time; its state is plain JSON and resumes exactly.

    Steps may have gaps (the metrics of a long run): the average decays by the steps that passed,
    not by the calls.
    """

    def __init__(self):
        self.step: int | None = None
        self.numerator = 0.0  # weighted sum of losses
        self.weight = 0.0  # sum of the weights
        self.minimum: float | None = None
        self.above_since: int | None = None  # first step of the present excursion
        self.verdict: str | None = None
        self.verdict_step: int | None = None

    @property
    def smoothed(self) -> float | None:
        return self.numerator / self.weight if self.weight else None

    def update(self, step: int, loss: float, grad_norm: float | None = None) -> str | None:
        """Take the loss of `step`; return None, "diverged" or "nonfinite".

        A verdict is final: later calls return it again. Raises ValueError for a step that is not
        later than the one before.
        """
        if self.verdict is not None:
            return self.verdict
        if self.step is not None and step <= self.step:
            raise ValueError(f"step {step} does not follow step {self.step}; feed steps in order")
        if not math.isfinite(loss) or (grad_norm is not None and not math.isfinite(grad_norm)):
            return self._decide(step, "nonfinite")
        decay = 0.0 if self.step is None else 0.5 ** ((step - self.step) / HALF_LIFE)
        self.numerator = decay * self.numerator + loss
        self.weight = decay * self.weight + 1.0
        self.step = step
        smoothed = self.numerator / self.weight
        if self.minimum is None or smoothed < self.minimum:
            self.minimum = smoothed
        if smoothed <= self.minimum + DIVERGED_NATS:
            self.above_since = None
        elif self.above_since is None:
            self.above_since = step
        elif step - self.above_since >= DIVERGED_STEPS:
            return self._decide(step, "diverged")
        return None

    def _decide(self, step: int, verdict: str) -> str:
        self.step, self.verdict, self.verdict_step = step, verdict, step
        return verdict

    def to_dict(self) -> dict:
        """Plain JSON types (Python's JSON keeps every bit of a finite float)."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, state: Mapping) -> OutcomeTracker:
        """Inverse of `to_dict`. Raises ValueError unless `state` has exactly its keys."""
        tracker = cls()
        if set(state) != set(vars(tracker)):
            wrong = sorted(set(state) ^ set(vars(tracker)))
            raise ValueError(f"not the state of an outcome tracker: {', '.join(wrong)}")
        vars(tracker).update(state)
        return tracker


def smooth(steps: Sequence[int], losses: Sequence[float]) -> np.ndarray:
    """Smoothed loss as the divergence rule sees it, float64 [n]; NaN from a nonfinite loss on."""
    tracker, out = OutcomeTracker(), np.full(len(losses), np.nan)
    for i, (step, loss) in enumerate(zip(steps, losses)):
        tracker.verdict = None  # a curve to draw goes on after the verdict
        if tracker.update(int(step), float(loss)) == "nonfinite":
            break
        out[i] = tracker.smoothed
    return out


def divergence(steps: Sequence[int], losses: Sequence[float]) -> OutcomeTracker:
    """Run the rule over a whole loss curve; read `verdict`, `verdict_step`, `above_since`."""
    tracker = OutcomeTracker()
    for step, loss in zip(steps, losses):
        if tracker.update(int(step), float(loss)) is not None:
            break
    return tracker


# -- onset ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Onset:
    """Where a run leaves its twin: the first warning, in which head, and how far it stood out.

    layer, head: None where the rule was applied to a curve that does not say which head it is.
    """

    step: int
    signal: str  # "tie_rate" or "spectral_norm_q"
    layer: int | None
    head: int | None
    value: float
    twin_maximum: float


def series(metrics: Mapping, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n] and values [n] or [n, n_layer, n_head] of one metric, rows without it dropped.

    `metrics` maps "step" to all logged steps and every other name to an array as long, NaN in rows
    that do not have it. Empty arrays where the metric was never logged.
    """
    if name not in metrics:
        return np.empty(0, dtype=int), np.empty(0)
    steps, values = np.asarray(metrics["step"]), np.asarray(metrics[name], dtype=float)
    there = ~np.isnan(values.reshape(len(values), -1)).all(axis=1)
    return steps[there].astype(int), values[there]


def worst_head(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest entry per row of [n, n_layer, n_head], NaN ignored, and its flat index, both [n]."""
    flat = values.reshape(len(values), -1)
    filled = np.where(np.isnan(flat), -np.inf, flat)
    index = filled.argmax(axis=1) if flat.size else np.empty(0, dtype=int)
    return filled[np.arange(len(flat)), index], index


def onset(run: Mapping, twin: Mapping, *, failed_step: int | None = None) -> Onset | None:
    """The earliest onset in either signal (rule: module docstring), or None.

    run, twin: metrics as `series` takes them. Only steps that the twin has reached are judged.
    failed_step: where the run diverged or went nonfinite; an excursion that lasts until then
    counts although it is shorter than `ONSET_STEPS`.
    """
    found = [_onset_in(signal, run, twin, failed_step) for signal in SIGNALS]
    found = [f for f in found if f is not None]
    return min(found, key=lambda f: f.step) if found else None


def ties_can_show(run: Mapping, twin: Mapping) -> bool:
    """Whether any tie rate could exceed the twin's as often as an onset asks, at the first probe
    that both have. True where they share none."""
    steps, _ = series(run, "tie_rate")
    twin_steps, values = series(twin, "tie_rate")
    first = np.flatnonzero(np.isin(twin_steps, steps))[:1]
    return not len(first) or bool(ONSET_TIES * worst_head(values)[0][: first[0] + 1].max() < 1)


def _onset_in(signal: str, run: Mapping, twin: Mapping, failed_step: int | None) -> Onset | None:
    steps, values = series(run, signal)
    twin_steps, twin_values = series(twin, signal)
    if not len(steps) or not len(twin_steps):
        return None
    worst, index = worst_head(values)
    running = np.maximum.accumulate(worst_head(twin_values)[0])
    position = np.searchsorted(twin_steps, steps, side="right") - 1
    judged = (position >= 0) & (steps <= twin_steps[-1])
    base = running[np.clip(position, 0, None)]
    beyond = judged & (worst > SIGNALS[signal] * base)
    if signal == "tie_rate":
        beyond &= worst > TIE_FLOOR
    for i in np.flatnonzero(beyond):
        window = (steps >= steps[i]) & (steps <= steps[i] + ONSET_STEPS)
        lasted = steps[-1] >= steps[i] + ONSET_STEPS
        cut_short = failed_step is not None and failed_step <= steps[i] + ONSET_STEPS
        if (lasted or cut_short) and beyond[window].all():
            layer, head = divmod(int(index[i]), values.shape[-1])
            return Onset(int(steps[i]), signal, layer, head, float(worst[i]), float(base[i]))
    return None


# -- outcomes of runs and of arms -----------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How one run ended. `kind` is one of `KINDS`; a step is None where nothing of the sort was.

    last_step: the last training step with a loss. held_out_loss: the last finite one. ties_judged:
    false where no tie rate could have met the rule of an onset; then its absence says nothing.
    """

    kind: str
    last_step: int = 0
    diverged_step: int | None = None
    diverged_from: int | None = None
    nonfinite_step: int | None = None
    onset: Onset | None = None
    train_loss: float | None = None
    held_out_loss: float | None = None
    best_held_out_loss: float | None = None
    worst_norm: float | None = None
    worst_tie_rate: float | None = None
    ties_judged: bool = True
    rules: dict = field(default_factory=rules, compare=False)

    @property
    def failed(self) -> bool:
        return self.kind in ("diverged", "nonfinite")

    @property
    def failed_step(self) -> int | None:
        return self.diverged_step if self.kind == "diverged" else self.nonfinite_step

    @property
    def onset_step(self) -> int | None:
        return None if self.onset is None else self.onset.step

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping) -> Outcome:
        data = dict(data)
        if data.get("onset") is not None:
            data["onset"] = Onset(**data["onset"])
        return cls(**data)

    def __str__(self) -> str:
        unjudged = "" if self.ties_judged else ", ties not judged"
        words = {
            "diverged": f"diverged at step {self.diverged_step}",
            "nonfinite": f"nonfinite at step {self.nonfinite_step}",
            "onset": f"onset at step {self.onset_step}, no divergence by step {self.last_step}",
            "healthy": f"healthy to step {self.last_step}",
            "stable": f"no failure by step {self.last_step}{unjudged}",
        }
        return words[self.kind]


def summarize(
    metrics: Mapping,
    twin: Mapping | None = None,
    *,
    failing_step: int | None = None,
    tracker: OutcomeTracker | None = None,
) -> Outcome:
    """Apply every rule to a run's metrics.

    twin: metrics of the paired run, without which no onset can be judged. failing_step: the step
    at which the failing arm failed, without which no run can be called healthy. tracker: the run's
    own at its end; needed for a fork, whose minimum so far is partly its parent's, and for a long
    run, whose metrics lack the losses of some steps.
    """
    steps, losses = _with_nonfinite(metrics, "train_loss")
    tracker = divergence(steps, losses) if tracker is None else tracker
    failed_step = tracker.verdict_step
    last = failed_step
    if last is None:
        last = max([tracker.step or 0, *steps[-1:].tolist()])
    first_sign = None if twin is None else onset(metrics, twin, failed_step=failed_step)
    ties_judged = twin is None or ties_can_show(metrics, twin)
    kind = tracker.verdict
    if kind is None:
        kind = "onset" if first_sign else "stable"
        judged = twin is not None and ties_judged
        if kind == "stable" and is_healthy(last, failing_step, judged=judged):
            kind = "healthy"
    _, held_out = series(metrics, "held_out_loss")
    held_out = held_out[np.isfinite(held_out)]
    return Outcome(
        kind=kind,
        last_step=last,
        diverged_step=failed_step if kind == "diverged" else None,
        diverged_from=tracker.above_since if kind == "diverged" else None,
        nonfinite_step=failed_step if kind == "nonfinite" else None,
        onset=first_sign,
        train_loss=_last_finite(losses),
        held_out_loss=_last_finite(held_out),
        best_held_out_loss=float(held_out.min()) if len(held_out) else None,
        worst_norm=_maximum(metrics, "spectral_norm_q"),
        worst_tie_rate=_maximum(metrics, "tie_rate"),
        ties_judged=ties_judged,
    )


def is_healthy(last_step: int, failing_step: int | None, *, judged: bool = True) -> bool:
    """Whether a run without failure and without onset ran long enough to be called healthy."""
    return judged and failing_step is not None and last_step >= HEALTHY_FACTOR * failing_step


def _with_nonfinite(metrics: Mapping, name: str) -> tuple[np.ndarray, np.ndarray]:
    """`series`, but a row that names the metric among its nonfinite ones keeps its NaN."""
    steps, values = series(metrics, name)
    lost = metrics.get(f"nonfinite:{name}")
    if lost is None or not len(lost):
        return steps, values
    steps = np.concatenate([steps, np.asarray(lost, dtype=int)])
    values = np.concatenate([values, np.full(len(lost), np.nan)])
    order = np.argsort(steps, kind="stable")
    return steps[order], values[order]


def _last_finite(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _maximum(metrics: Mapping, name: str) -> float | None:
    _, values = series(metrics, name)
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else None


@dataclass(frozen=True)
class Arm:
    """Several runs of one arm (seeds). `label` is "verdict" or "observed"."""

    runs: int
    counts: dict[str, int]
    failed: int
    failed_steps: tuple[int, ...]  # of the runs that failed, ascending
    median_failed_step: float | None
    held_out_mean: float | None
    held_out_stderr: float | None

    @property
    def label(self) -> str:
        return "verdict" if self.runs >= VERDICT_RUNS else "observed"


def summarize_arm(outcomes: Sequence[Outcome]) -> Arm:
    """Counts by kind, steps to failure, mean held-out loss of the runs that did not fail."""
    failed = sorted(o.failed_step for o in outcomes if o.failed)
    losses = [o.held_out_loss for o in outcomes if not o.failed and o.held_out_loss is not None]
    spread = np.std(losses, ddof=1) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return Arm(
        runs=len(outcomes),
        counts={k: sum(o.kind == k for o in outcomes) for k in KINDS},
        failed=len(failed),
        failed_steps=tuple(failed),
        median_failed_step=float(np.median(failed)) if failed else None,
        held_out_mean=float(np.mean(losses)) if losses else None,
        held_out_stderr=None if spread is None else float(spread),
    )


def comparison_label(*arms: Sequence[Outcome]) -> str:
    """ "verdict" if every arm has `VERDICT_RUNS` runs, else "observed"."""
    return "verdict" if all(len(a) >= VERDICT_RUNS for a in arms) else "observed"
