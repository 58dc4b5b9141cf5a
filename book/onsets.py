"""Onsets judged from records: low precision and its twin trained in different calls.

Where both runs lie in one store, `book.records.judge` applies the rule of `gpt2.outcomes` to every
probe. Where only records are left of one of them, `onset_from_records` applies the same rule to
the points that the records keep. Its resolution is the largest distance between two such points:
a sign may be dated so many steps late, and a dip between two of them goes unseen. Records keep two
points in every ONSET_STEPS steps; a coarser one is not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np

from gpt2.outcomes import ONSET_STEPS, SIGNALS, Onset, is_healthy, onset

from .records import FAILED, failed_step, one_a_seed, record_metrics

if TYPE_CHECKING:  # which imports this module
    from .evidence import Archive

LOW, TWIN = "low", "delta_fp32"
SAME_START = 0.01  # nats between the first losses of two runs on the same batches and weights


def resolution(row: Mapping) -> int | None:
    """Largest distance in steps between the kept points of a signal; None without any."""
    steps = [row["curves"][name]["step"] for name in SIGNALS if name in row["curves"]]
    gaps = [int(np.diff(s).max()) for s in steps if len(s) > 1]
    return max(gaps, default=None)


def onset_from_records(row: Mapping, twin: Mapping) -> Onset | None:
    """The earliest onset in the kept points of a record against those of its twin, or None.

    Layer and head are None in records that do not say which head was the worst.
    Raises ValueError for records that are too coarse, or of runs that did not start alike.
    """
    step = resolution(row)
    if step is None or step > ONSET_STEPS:
        raise ValueError(
            f"the record of {row['run']} keeps a point every {step} steps, too few for a rule "
            f"over {ONSET_STEPS}; train both runs in one store"
        )
    if not _alike(row, twin):
        raise ValueError(
            f"{row['run']} and {twin['run']} began with other losses, so they are no pair; "
            "compare runs of one seed and one corpus"
        )
    found = onset(_signals(row), _signals(twin), failed_step=failed_step(row))
    if found is None:
        return None
    curve = row["curves"][found.signal]
    layer, head = None, None
    if "head" in curve:
        layer, head = curve["head"][curve["step"].index(found.step)]
    return replace(found, layer=layer, head=head)


def _alike(row: Mapping, twin: Mapping) -> bool:
    first, other = (r["curves"]["train_loss"]["value"][0] for r in (row, twin))
    return first is not None and other is not None and abs(first - other) <= SAME_START


def _signals(row: Mapping) -> dict[str, np.ndarray]:
    """The worst heads' curves of a record as metrics [n, 1, 1]."""
    metrics = record_metrics(row)
    kept = {name: metrics[name][:, None, None] for name in SIGNALS if name in metrics}
    return kept | {"step": metrics["step"]}


def judged(rows: Sequence[Mapping]) -> list[dict]:
    """The records, judged again beside runs of the same seed that were trained in other calls.

    One without an onset against the twin that came farther since, and one without a sign against
    the failure of low precision, which it may have outlived: then it is *healthy*.
    rows: records with "recipe". One that shows an onset says "judged_from": "records",
    "judged_to": the step up to which both runs are known, and "resolution": steps.
    """
    twins = {(r["recipe"], r["seed"]): r for r in rows if r["arm"] == TWIN and _whole(r)}
    out = []
    for row in rows:
        twin = twins.get((row["recipe"], row["seed"]))
        asked = twin is not None and row["arm"] != TWIN and _whole(row) and row["onset"] is None
        asked = asked and not _is_dial(row)
        known = min(row["steps"], twin["steps"]) if asked else 0
        out.append(_judged(row, twin, known) if known > (row.get("judged_to") or 0) else row)
    failed = {
        (row["recipe"], row["seed"]): failed_step(row)
        for row in one_a_seed([row for row in out if not _is_dial(row)])
        if row["arm"] == LOW and row["kind"] in FAILED
    }
    return [_outliving(row, failed.get((row["recipe"], row["seed"]))) for row in out]


def _outliving(row: Mapping, failing_step: int | None) -> Mapping:
    """The record, called healthy where it lived for so long without a sign."""
    asked = row["kind"] == "stable" and row.get("forked_at") is None and row["arm"] != LOW
    if not asked or _is_dial(row) or not is_healthy(row["steps"], failing_step):
        return row
    return row | {"kind": "healthy", "outcome": row["outcome"] | {"kind": "healthy"}}


def archived_onsets(
    rows: Sequence[Mapping], recipe: str, *, failed: bool = False
) -> dict[int, Onset]:
    """Seed -> onset of the recipe's low-precision run, for seeds of which no run failed.

    rows: as for `judged`. Of several runs of a seed the last one counts. failed: for seeds of
    which a run did, too.
    """
    mine = [row for row in rows if row["recipe"] == recipe]
    low = [row for row in judged(mine) if row["arm"] == LOW and row["forked_at"] is None]
    left_out = set() if failed else {row["seed"] for row in low if row["kind"] in FAILED}
    return {
        row["seed"]: Onset(**row["onset"])
        for row in low
        if row["onset"] is not None and row["seed"] not in left_out
    }


def fork_state(archive: Archive, fork: Mapping) -> object:
    """By what the state is known from which a run of an archive forks.

    First loss and gradient norm of the twin that forks from it: other code on another machine can
    come to the same state, bit for bit. Without such a twin: the code.
    """
    for row in archive.rows:
        same = all(row[name] == fork[name] for name in ("seed", "forked_at"))
        if row["arm"] == TWIN and same:
            first = [row["curves"].get(n, {}).get("value") for n in ("train_loss", "grad_norm")]
            if all(first):
                return first[0][0], first[1][0]
    return archive.provenance.get("code")


def failed_twins(rows: Sequence[Mapping], recipe: str) -> list[Mapping]:
    """The runs from scratch of a recipe's twin that failed, any seed.

    Where there is one, the failure of low precision in that recipe is none of delta's.
    """
    mine = [row for row in rows if (row["recipe"], row["arm"]) == (recipe, TWIN)]
    return [row for row in mine if row["forked_at"] is None and row["kind"] in FAILED]


def _is_dial(row: Mapping) -> bool:
    """Whether a run has fewer bits than its recipe: the twin in bf16 is no measure of its ties."""
    return row.get("experiment", "").startswith("dials")


def _whole(row: Mapping) -> bool:
    return row.get("forked_at") is None and "train_loss" in row.get("curves", {})


def _judged(row: Mapping, twin: Mapping, known: int) -> dict:
    try:
        found = onset_from_records(row, twin)
    except ValueError:
        return dict(row)
    told = {"judged_from": "records", "judged_to": known, "resolution": resolution(row)}
    if found is None:
        return row | told
    kind = row["kind"] if row["kind"] in FAILED else "onset"
    outcome = row["outcome"] | {"kind": kind, "onset": asdict(found)}
    told |= {"kind": kind, "onset": asdict(found), "onset_step": found.step, "outcome": outcome}
    return row | told
