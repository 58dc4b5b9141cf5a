"""From runs to records: what the book keeps of a run, live or archived, as plain JSON types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gpt2.outcomes import (
    ONSET_STEPS,
    SIGNALS,
    Onset,
    Outcome,
    series,
    smooth,
    summarize,
    worst_head,
)
from gpt2.runs import Run

from .experiments import Arm, Experiment

CURVE_POINTS = 160
HEAD_POINTS = 60
FAILED = ("diverged", "nonfinite")  # kinds of outcome
SMOOTHED = {"train_loss": "smoothed_train_loss"}  # curves by their names as metrics


def record(run: Run, arm: Arm, seed: int, outcome: Outcome, heads: Sequence[str] = ()) -> dict:
    """What the book keeps of a run: plain JSON types; thinned curves (`curves`).

    heads: metrics that are kept for every head, [points][layer][head]. A run that still trains is
    `interrupted` as far as its record goes.
    """
    training = run.status == "running"
    return {
        "arm": arm.name,
        "label": arm.label,
        "attention": run.config.attention,
        "changes": dict(arm.changes),
        "forked_at": run.parent.step if run.parent else None,
        "seed": seed,
        "run": run.id,
        "status": "interrupted" if training else run.status,
        "message": "recorded while it trained" if training else run.message,
        "steps": outcome.last_step,
        "kind": outcome.kind,
        "diverged_step": outcome.diverged_step,
        "diverged_from": outcome.diverged_from,
        "nonfinite_step": outcome.nonfinite_step,
        "onset_step": outcome.onset_step,
        "onset": outcome.to_dict()["onset"],
        "outcome": outcome.to_dict(),
        "train_loss": outcome.train_loss,
        "held_out_loss": outcome.held_out_loss,
        "best_held_out_loss": outcome.best_held_out_loss,
        "worst_norm": outcome.worst_norm,
        "worst_tie_rate": outcome.worst_tie_rate,
        "worst_heads": worst_heads(run.metrics(), outcome.onset),
        "seconds": run.state.get("duration_s"),
        "curves": curves(run.metrics()),
        "heads": head_curves(run.metrics(), heads),
    }


def ties_judged(row: Mapping) -> bool:
    """Whether ties could meet the rule of an onset; older records, which do not say, count."""
    return (row.get("outcome") or {}).get("ties_judged", True)


def failed_step(row: Mapping) -> int | None:
    """The step at which the run of a record diverged or became nonfinite; None for neither."""
    return row["diverged_step"] or row["nonfinite_step"]


def failed_steps(rows: Sequence[Mapping]) -> list[int]:
    """Steps at which the runs of these records failed, ascending; of those that did."""
    return sorted(failed_step(r) for r in rows if r["kind"] in FAILED)


def one_a_seed(rows: Sequence[Mapping]) -> list[Mapping]:
    """Runs from scratch, by recipe, arm and seed one: a repetition is no further seed.

    Of several the newest that came to its end counts, else the longest. rows: with "recipe",
    oldest first.
    """
    counts: dict[tuple, Mapping] = {}
    for row in rows:
        if row.get("forked_at") is not None:
            continue
        key = row["recipe"], row["arm"], row["seed"]
        if key not in counts or _rank(row) >= _rank(counts[key]):
            counts[key] = row
    return list(counts.values())


def _rank(row: Mapping) -> tuple[bool, int]:
    """Of runs that ended all the same, of cut ones by their length."""
    ended = not cut_by_clock(row) or row["kind"] in (*FAILED, "healthy")
    return ended, 0 if ended else row["steps"]


def showed_sign(row: Mapping) -> bool:
    """Whether a run failed or showed an onset."""
    return row["onset_step"] is not None or row["kind"] in FAILED


def cut_by_clock(row: Mapping) -> bool:
    """Whether the clock stopped a run before it failed or came to the step asked of it."""
    if row["status"] != "interrupted":
        return False
    told = row.get("message")
    return row["kind"] != "healthy" if told is None else "as asked" not in told


def worst_heads(metrics: Mapping, onset: Onset | None = None) -> dict[str, dict | None]:
    """The worst head by each signal of the onset rule, "end" at the last probe and at the "onset".

    Signal -> {"step", "layer", "head", "value"}, counted from 0; None where there is no onset.
    """
    last = None if onset is None else onset.step
    at_onset = None if onset is None else _worst_heads_at(metrics, last)
    return {"end": _worst_heads_at(metrics), "onset": at_onset}


def _worst_heads_at(metrics: Mapping, last: int | None = None) -> dict[str, dict]:
    """At the last probe up to step `last`; a signal that was never measured is left out."""
    out = {}
    for name in SIGNALS:
        steps, values = series(metrics, name)
        position = len(steps) if last is None else np.searchsorted(steps, last, side="right")
        if position:
            (value,), (index,) = worst_head(values[position - 1 : position])
            layer, head = divmod(int(index), values.shape[-1])
            step = int(steps[position - 1])
            out[name] = {"step": step, "layer": layer, "head": head, "value": _digits(value)}
    return out


def curves(metrics: dict) -> dict[str, dict[str, list]]:
    """Name -> {"step": [...], "value": [...]}; training loss smoothed, worst heads.

    At most CURVE_POINTS points. The signals of the onset rule keep two points in every ONSET_STEPS
    steps, where there were as many probes, and "head": [layer, head] of each, so that the rule can
    be applied to a record (`book.onsets`).
    """
    out = {}
    steps, losses = series(metrics, "train_loss")
    out["train_loss"] = _thin(steps, smooth(steps, losses))
    out["held_out_loss"] = _thin(*series(metrics, "held_out_loss"))
    for name in ("spectral_norm_q", "tie_rate", "ones_share", "max_logit", "delta_bias"):
        steps, values = series(metrics, name)
        if len(steps) and values.ndim == 3:
            worst, index = worst_head(values)
            most = _signal_points(steps) if name in SIGNALS else CURVE_POINTS
            out[name] = _thin(steps, worst, most)
            if name in SIGNALS:
                heads = [list(divmod(int(i), values.shape[-1])) for i in index]
                out[name]["head"] = [heads[i] for i in _kept(len(steps), most)]
    out["grad_norm"] = _thin(*series(metrics, "grad_norm"))
    return {name: curve for name, curve in out.items() if curve["step"]}


def _signal_points(steps: np.ndarray) -> int:
    return max(CURVE_POINTS, 1 + math.ceil(2 * (steps[-1] - steps[0]) / ONSET_STEPS))


def record_metrics(row: Mapping) -> dict[str, np.ndarray]:
    """A record's curves as `Run.metrics()` has them: 'step' [n], values [n], NaN elsewhere.

    The training loss of a record is smoothed already and goes by the name "smoothed_train_loss".
    """
    curves = row["curves"]
    steps = np.unique(np.concatenate([curve["step"] for curve in curves.values()]))
    out = {"step": steps}
    for name, curve in curves.items():
        values = np.full(len(steps), np.nan)
        given = np.array([np.nan if v is None else v for v in curve["value"]], dtype=float)
        values[np.searchsorted(steps, curve["step"])] = given
        out[SMOOTHED.get(name, name)] = values
    return out


def head_curves(metrics: dict, names: Sequence[str]) -> dict[str, dict[str, list]]:
    """Name -> {"step": [n], "value": [n][layer][head]}, at most HEAD_POINTS points each.

    "name:sum" is the running sum of a metric over the steps at which it was measured, and
    "name:band" the standard deviation that this sum would have if every sign were a coin's.
    """
    out = {}
    for name in names:
        metric, _, total = name.partition(":")
        steps, values = series(metrics, metric)
        if total == "sum":
            values = np.nan_to_num(values).cumsum(0)
        elif total == "band":
            values = np.sqrt((np.nan_to_num(values) ** 2).cumsum(0))
        keep = _kept(len(steps), HEAD_POINTS)
        rows = [
            [[float(f"{v:.4g}") if np.isfinite(v) else None for v in layer] for layer in row]
            for row in values[keep]
        ]
        if rows:
            out[name] = {"step": steps[keep].tolist(), "value": rows}
    return out


def _kept(count: int, most: int) -> np.ndarray:
    """Indices of at most `most` evenly spaced points, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round()).astype(int)


def _thin(steps: np.ndarray, values: np.ndarray, most: int = CURVE_POINTS) -> dict[str, list]:
    keep = _kept(len(steps), most)
    finite = [_digits(v) for v in np.asarray(values)[keep]]
    return {"step": np.asarray(steps)[keep].tolist(), "value": finite}


def _digits(value: float) -> float | None:
    """Six significant digits; None for what JSON cannot say."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def judge(experiment: Experiment, runs: dict[str, Run]) -> dict[str, Outcome]:
    """Apply the declared rules to the arms of one seed; onset is judged against the twin."""
    twin = runs.get(experiment.twin)
    failing = runs.get(experiment.failing)
    failing_step = None if failing is None else _outcome(failing).failed_step
    out = {}
    for name, run in runs.items():
        other = None if twin is None or run.id == twin.id else twin.metrics()
        out[name] = _outcome(run, other, failing_step)
    if experiment.twin in out and twin is not None:
        out[experiment.twin] = _outcome(twin, twin.metrics(), failing_step)
    return out


def _outcome(run: Run, twin: dict | None = None, failing_step: int | None = None) -> Outcome:
    return summarize(run.metrics(), twin, failing_step=failing_step, tracker=run.tracker)


def collect(experiment: Experiment, runs: dict[tuple[str, int], Run]) -> list[dict]:
    """Records of all runs (keys: arm name and seed), in the experiment's order."""
    rows = []
    for seed in sorted({seed for _, seed in runs}):
        of_seed = {arm: run for (arm, s), run in runs.items() if s == seed}
        outcomes = judge(experiment, of_seed)
        for a in experiment.arms:
            if a.name in of_seed:
                heads = experiment.fork_heads if a.at else experiment.heads
                rows.append(record(of_seed[a.name], a, seed, outcomes[a.name], heads))
    return rows
