"""From runs to records: what the book keeps of a run, live or archived, as plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpt2.outcomes import Outcome, OutcomeTracker, series, smooth, summarize, worst_head
from gpt2.runs import Run

from .experiments import Arm, Experiment

CURVE_POINTS = 160
HEAD_POINTS = 60
FAILED = ("diverged", "nonfinite")  # kinds of outcome


def record(run: Run, arm: Arm, seed: int, outcome: Outcome, heads: Sequence[str] = ()) -> dict:
    """What the book keeps of a run: plain JSON types; curves of at most CURVE_POINTS points.

    heads: metrics that are kept for every head, [points][layer][head].
    """
    return {
        "arm": arm.name,
        "label": arm.label,
        "attention": run.config.attention,
        "changes": dict(arm.changes),
        "forked_at": run.parent.step if run.parent else None,
        "seed": seed,
        "run": run.id,
        "status": run.status,
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
        "seconds": run.state.get("duration_s"),
        "curves": curves(run.metrics()),
        "heads": head_curves(run.metrics(), heads),
    }


def failed_step(row: Mapping) -> int | None:
    """The step at which the run of a record diverged or became nonfinite; None for neither."""
    return row["diverged_step"] or row["nonfinite_step"]


def failed_steps(rows: Sequence[Mapping]) -> list[int]:
    """Steps at which the runs of these records failed, ascending; of those that did."""
    return sorted(failed_step(r) for r in rows if r["kind"] in FAILED)


def curves(metrics: dict) -> dict[str, dict[str, list]]:
    """Name -> {"step": [...], "value": [...]}; training loss smoothed, worst heads."""
    out = {}
    steps, losses = series(metrics, "train_loss")
    out["train_loss"] = _thin(steps, smooth(steps, losses))
    out["held_out_loss"] = _thin(*series(metrics, "held_out_loss"))
    for name in ("spectral_norm_q", "tie_rate", "ones_share", "max_logit", "delta_bias"):
        steps, values = series(metrics, name)
        if len(steps) and values.ndim == 3:
            out[name] = _thin(steps, worst_head(values)[0])
    out["grad_norm"] = _thin(*series(metrics, "grad_norm"))
    return {name: curve for name, curve in out.items() if curve["step"]}


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


def _thin(steps: np.ndarray, values: np.ndarray) -> dict[str, list]:
    keep = _kept(len(steps), CURVE_POINTS)
    finite = [None if not np.isfinite(v) else float(f"{v:.6g}") for v in np.asarray(values)[keep]]
    return {"step": np.asarray(steps)[keep].tolist(), "value": finite}


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
    state = run.state.get("tracker")  # a fork's minimum so far is partly its parent's
    tracker = OutcomeTracker.from_dict(state) if state else None
    return summarize(run.metrics(), twin, failing_step=failing_step, tracker=tracker)


def collect(experiment: Experiment, runs: dict[tuple[str, int], Run]) -> list[dict]:
    """Records of all runs (keys: arm name and seed), in the experiment's order."""
    rows = []
    for seed in sorted({seed for _, seed in runs}):
        of_seed = {arm: run for (arm, s), run in runs.items() if s == seed}
        outcomes = judge(experiment, of_seed)
        rows += [
            record(of_seed[a.name], a, seed, outcomes[a.name], () if a.at else experiment.heads)
            for a in experiment.arms
            if a.name in of_seed
        ]
    return rows
