"""Tables and pictures over runs: who diverged when, beside which twin, after which change.

    arms = [Arm("no change", run), Arm("delta fp32", other)]
    rows = outcome_rows(arms, twin="delta fp32"); print(format_table(rows))
    plot_arms(arms, "forks.png")

An *arm* here is one run with a name; `summarize_arms` puts several seeds of an arm together.
Onset is judged against a twin: by default the first arm that did not fail. Ties compare only
between arms that round the scores alike, so name the twin where arms differ in that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .config import difference
from .outcomes import (
    Outcome,
    comparison_label,
    series,
    smooth,
    summarize,
    summarize_arm,
    worst_head,
)


@dataclass(frozen=True)
class Arm:
    """A run with a name."""

    name: str
    run: object

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Metrics from the first step on: a fork's begin with its ancestors'."""
        return full_metrics(self.run)


def ancestor(run):
    """The run that a fork was made from, if it lies in the same store, else None."""
    if run.parent is None:
        return None
    found = list(run.path.parent.glob(f"*-{run.parent.run_id}/run.json"))
    return type(run)(found[0].parent) if found else None


def full_metrics(run) -> dict[str, np.ndarray]:
    """A run's metrics, preceded by its ancestors' before each fork as far as they are found."""
    before, own = ancestor(run), run.metrics()
    return own if before is None else joined(full_metrics(before), own, run.parent.step)


def joined(before: Mapping, after: Mapping, at: int) -> dict[str, np.ndarray]:
    """Rows of `before` with step < at, then all of `after`; NaN where one lacks a metric."""
    out: dict[str, np.ndarray] = {}
    early = np.asarray(before["step"]) < at
    n, m = int(early.sum()), len(after["step"])
    for name in {**before, **after}:
        if name.startswith("nonfinite:"):
            parts = [np.asarray(x.get(name, np.empty(0, dtype=int))) for x in (before, after)]
            out[name] = np.concatenate([parts[0][parts[0] < at], parts[1]])
            continue
        shape = np.asarray(after.get(name, before.get(name))).shape[1:]
        first = np.asarray(before[name])[early] if name in before else np.full((n, *shape), np.nan)
        last = np.asarray(after[name]) if name in after else np.full((m, *shape), np.nan)
        out[name] = np.concatenate([first, last])
    return out


def judge(arms: Sequence[Arm], twin: str | None = None) -> tuple[list[Outcome], Arm | None]:
    """Outcomes of arms on the same batches, judged together; and the twin that was used.

    The failing arm of the healthy rule is the first one that failed. Raises ValueError for a twin
    that is none of the arms.
    """
    alone = [summarize(a.metrics, tracker=a.run.tracker) for a in arms]
    failing = next((o.failed_step for o in alone if o.failed), None)
    chosen = _twin(arms, alone, twin)
    if chosen is None:
        return alone, None
    judged = dict(twin=chosen.metrics, failing_step=failing)
    return [summarize(a.metrics, tracker=a.run.tracker, **judged) for a in arms], chosen


def _twin(arms: Sequence[Arm], outcomes: Sequence[Outcome], name: str | None) -> Arm | None:
    if name is None:
        return next((a for a, o in zip(arms, outcomes) if not o.failed), None)
    for arm in arms:
        if arm.name == name:
            return arm
    raise ValueError(f"no arm is named {name!r}; there are {', '.join(a.name for a in arms)}")


def outcome_rows(arms: Sequence[Arm], twin: str | None = None) -> list[dict]:
    """One plain dict per arm: outcome, losses, worst norm and ties, what its config changed."""
    outcomes, chosen = judge(arms, twin)
    rows = []
    for arm, o in zip(arms, outcomes):
        origin = ancestor(arm.run)
        changed = difference(origin.config, arm.run.config) if origin else {}
        rows.append(
            {
                "arm": arm.name,
                "outcome": o.kind,
                "failed_step": o.failed_step,
                "onset_step": o.onset_step,
                "onset_signal": o.onset.signal if o.onset else None,
                "last_step": o.last_step,
                "train_loss": o.train_loss,
                "held_out_loss": o.held_out_loss,
                "worst_norm": o.worst_norm,
                "worst_tie_rate": o.worst_tie_rate,
                "changed": {k: list(v) for k, v in changed.items()},
                "twin": chosen.name if chosen else None,
                "status": arm.run.status,
                "run": str(arm.run.path),
            }
        )
    return rows


_COLUMNS = {
    "arm": "arm",
    "outcome": "outcome",
    "failed_step": "failed at",
    "onset_step": "onset at",
    "last_step": "last step",
    "train_loss": "train loss",
    "held_out_loss": "held out",
    "worst_norm": "worst |W_Q|",
    "worst_tie_rate": "worst ties",
}


def format_table(rows: Sequence[Mapping]) -> str:
    """Rows as aligned text, with the twin said below."""
    if not rows:
        return "no runs"
    cells = [list(_COLUMNS.values())] + [[_text(row[key]) for key in _COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    twin = rows[0].get("twin")
    lines.append(f"onset is judged against {twin!r}" if twin else "no twin: onset is not judged")
    return "\n".join(lines)


def _text(value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summarize_arms(groups: Mapping[str, Sequence[Outcome]]) -> list[dict]:
    """Several seeds per arm: counts, steps to failure, held-out loss, verdict or observed."""
    label = comparison_label(*groups.values()) if groups else "observed"
    rows = []
    for name, outcomes in groups.items():
        arm = summarize_arm(outcomes)
        rows.append(
            {
                "arm": name,
                "runs": arm.runs,
                "failed": arm.failed,
                **{kind: n for kind, n in arm.counts.items() if n},
                "failed_steps": list(arm.failed_steps),
                "median_failed_step": arm.median_failed_step,
                "held_out_mean": arm.held_out_mean,
                "held_out_stderr": arm.held_out_stderr,
                "label": label,
            }
        )
    return rows


def save_rows(rows: Sequence[Mapping], path: str | Path) -> None:
    """Strict JSON, one array."""
    Path(path).write_text(json.dumps(list(rows), indent=1, allow_nan=False) + "\n")


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")


def plot_arms(arms: Sequence[Arm], path: str | Path, *, at: int | None = None, twin=None) -> None:
    """A PNG: smoothed training loss above, the worst head's spectral norm below, all arms.

    A fork is drawn from its own first step. A cross marks where the rule called a failure, a
    circle an onset, a grey line the fork.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    outcomes, _ = judge(arms, twin)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for i, (arm, outcome) in enumerate(zip(arms, outcomes)):
        look = dict(
            color=_COLOURS[i % len(_COLOURS)],
            linestyle=_STYLES[i // len(_COLOURS) % len(_STYLES)],
            linewidth=1.4,
        )
        metrics = arm.metrics
        first = arm.run.parent.step if arm.run.parent else 0
        steps, losses = series(metrics, "train_loss")
        curve = smooth(steps, losses)
        own = steps >= first
        above.plot(steps[own], curve[own], label=f"{arm.name}: {outcome}", **look)
        probed, norms = series(metrics, "spectral_norm_q")
        if len(probed):
            own = probed >= first
            below.plot(probed[own], worst_head(norms)[0][own], **look)
        _mark(above, steps, curve, outcome.failed_step, "x", look["color"])
        _mark(above, steps, curve, outcome.onset_step, "o", look["color"])
    if at is not None:
        for axis in (above, below):
            axis.axvline(at, color="0.6", linewidth=0.8)
    above.set_ylabel("training loss, smoothed (nats)")
    below.set_ylabel("largest spectral norm of W_Q")
    below.set_xlabel("step")
    above.set_title("Same batches, one change" if at is not None else "Runs")
    above.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _mark(axis, steps, curve, step: int | None, marker: str, colour: str) -> None:
    if step is None or not len(steps):
        return
    i = min(int(np.searchsorted(steps, step)), len(steps) - 1)
    if np.isfinite(curve[i]):
        axis.plot(step, curve[i], marker=marker, color=colour, markersize=8, fillstyle="none")
