"""Words and points of chapter 1, made from records of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from IPython.display import Markdown

from gpt2.runs import Run

from .evidence import Archive
from .experiment_runs import run_experiment, run_experiments
from .experiments import Experiment
from .records import FAILED, failed_step
from .tables import number, step_text


def run_to_failure(
    experiment: Experiment,
    seed: int,
    steps: int | None,
    usual: int | None,
    *,
    beside: tuple[Experiment, Sequence[str]] | None = None,
    **how,
) -> dict[tuple[str, int], Run]:
    """All arms of one seed up to `steps`; if None, up to `usual`, or to where low precision fails.

    That step differs between machines whose libraries sum in another order. beside: another
    experiment and its arms that a later section asks for, as far; in the same pool, since three
    runs keep two workers busy for no more than three quarters of the time. how: for
    `run_experiment`.
    """
    asked = dict(seeds=[seed], **how)
    if beside is not None:
        other, arms = beside
        together = dict(arms=[*experiment.arm_names, *arms], stop_at=steps or usual)
        run_experiments([experiment, other], **together, **asked)
    runs = run_experiment(experiment, stop_at=steps or usual, **asked)
    low = experiment.failing, seed
    if steps is not None or usual is None or runs[low].outcome.failed_step is not None:
        return runs
    runs |= run_experiment(experiment, arms=[experiment.failing], **asked)
    failed = runs[low].outcome.failed_step
    return runs if failed is None else run_experiment(experiment, stop_at=failed + 1, **asked)


def named_runs(experiment: Experiment, runs: Mapping, seed: int) -> dict[str, Run]:
    """Label -> run of one seed, in the experiment's order."""
    return {a.label: runs[a.name, seed] for a in experiment.arms if (a.name, seed) in runs}


def outcome_sentences(rows: Sequence[Mapping]) -> str:
    """'low precision: diverged at 2,038; ...' for descriptions of figures."""
    several = len({row["seed"] for row in rows}) > 1
    told = []
    for row in rows:
        seed = f" (seed {row['seed']})" if several else ""
        told.append(f"{row['label']}{seed}: {step_text(row)}")
    return "; ".join(told) + "."


def dial_points(rows: Sequence[Mapping]) -> list[dict]:
    """Records of the dial runs as `book.figures.dose_response` takes them."""
    return [
        {
            "arm": row["label"].partition(",")[0],
            "bits": int("".join(c for c in row["arm"] if c.isdigit())),
            "step": failed_step(row) or row["steps"],
            "failed": row["kind"] in FAILED,
        }
        for row in rows
    ]


def what_you_saw(
    rows: Sequence[Mapping],
    dial_rows: Sequence[Mapping],
    kept: Sequence[Archive | None],
    kept_dials: Archive | None,
) -> Markdown:
    """The chapter's findings as a list, every number from a record."""
    told = [f"{_sentence(row['label'])}: {step_text(row)}{_loss(row)}." for row in rows]
    low = next((row for row in rows if row["arm"] == "low"), None)
    controls = [row for row in rows if row["arm"] != "low"]
    if low is not None and low["kind"] in FAILED:
        held = [row for row in controls if row["kind"] not in FAILED]
        told.append(
            f"{len(held)} of {len(controls)} controls outlived it. The first differs from it in "
            "nothing but the $O$ that $\\delta$ reads."
            if held
            else "Both controls failed as well, so this run shows no effect of precision."
        )
    elif low is not None:
        told.append("The low-precision run did not fail here, so there is nothing to explain yet.")
    if low is not None and low["onset"]:
        onset = low["onset"]
        told.append(
            f"Its first sign was the {_signal(onset['signal'])} of layer {onset['layer']}, head "
            f"{onset['head']} at step {onset['step']:,} ({number(onset['value'], 2)} against at "
            f"most {number(onset['twin_maximum'], 2)} in the fp32 run)."
        )
    told += _dial_findings(dial_rows, "live")
    told += [_archive_finding(archive) for archive in kept if archive is not None]
    if kept_dials is not None:
        told += _dial_findings(kept_dials.rows, "archive")
    return Markdown("\n".join(f"- {sentence}" for sentence in told))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _loss(row: Mapping) -> str:
    loss = row["held_out_loss"]
    return "" if loss is None else f", last held-out loss {number(loss)} nats"


def _signal(name: str) -> str:
    return {"tie_rate": "tie rate", "spectral_norm_q": "spectral norm of $W_Q$"}[name]


def _dial_findings(rows: Sequence[Mapping], source: str) -> list[str]:
    points = dial_points(rows)
    told = []
    for dial in dict.fromkeys(p["arm"] for p in points):
        parts = []
        for bits in sorted({p["bits"] for p in points if p["arm"] == dial}):
            mine = [p for p in points if p["arm"] == dial and p["bits"] == bits]
            failed = sorted(p["step"] for p in mine if p["failed"])
            steps = f" (steps {failed[0]:,} to {failed[-1]:,})" if len(failed) > 1 else ""
            steps = f" (step {failed[0]:,})" if len(failed) == 1 else steps
            longest = max(p["step"] for p in mine)
            alive = "" if failed else f" within {longest:,} steps"
            word = "bit" if bits == 1 else "bits"
            parts.append(f"{bits} {word}: {len(failed)} of {len(mine)} failed{steps}{alive}")
        told.append(f"{_sentence(dial)} ({source}): " + "; ".join(parts) + ".")
    return told


def _archive_finding(kept: Archive) -> str:
    parts = []
    for name in dict.fromkeys(row["arm"] for row in kept.rows):
        mine = kept.arm(name)
        failed = sum(row["kind"] in FAILED for row in mine)
        parts.append(f"{mine[0]['label']} failed in {failed} of {len(mine)}")
    return f"Archive `{kept.path.parent.name}`: {', '.join(parts)} runs."
