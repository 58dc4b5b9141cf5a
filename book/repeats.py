"""The same run twice: whether it came out the same, bit for bit, and from where on not.

    python -m book.evidence repeat --recipe mini-lr3 --devices cuda:0,cuda:1

Compared are all numbers that both runs recorded of their training (losses, gradient norms, probes;
not the time they took) and weights and optimiser state at the last step of which both have a
checkpoint.
"""

from __future__ import annotations

import torch

from gpt2.checkpoint import load_checkpoint
from gpt2.runs import Run

NOT_TRAINING = ("tokens_per_s", "held_out_loss")  # speed; and `again` averages over other windows


def compare(first: Run, again: Run) -> dict:
    """What of two runs is the same, as plain JSON types.

    "steps" compared; "first_difference": step and names of the first row that differs, or None;
    "checkpoint": the step of the states compared (None without a common one); "tensors" of them
    and "equal_tensors". "identical" if everything is.
    """
    ours, theirs = _rows(first), _rows(again)
    both = sorted(ours.keys() & theirs.keys())
    parted = next((step for step in both if ours[step] != theirs[step]), None)
    told = {"runs": [first.id, again.id], "steps": len(both), "first_difference": None}
    if parted is not None:
        one, other = ours[parted], theirs[parted]
        names = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
        told["first_difference"] = {"step": parted, "names": names}
    told |= _states(first, again)
    same = told["equal_tensors"] == told["tensors"] > 0
    return told | {"identical": bool(both) and parted is None and same}


def _rows(run: Run) -> dict[int, dict]:
    """Step -> everything recorded of it, rows of one step joined."""
    out: dict[int, dict] = {}
    for row in run.rows():
        kept = {name: value for name, value in row.items() if name not in NOT_TRAINING}
        out.setdefault(row["step"], {}).update(kept)
    return out


def _states(first: Run, again: Run) -> dict:
    ours, theirs = dict(first.checkpoints()), dict(again.checkpoints())
    step = max(ours.keys() & theirs.keys(), default=None)
    told = {"checkpoint": step, "tensors": 0, "equal_tensors": 0}
    if step is None:
        return told
    one, other = load_checkpoint(ours[step]), load_checkpoint(theirs[step])
    for a, b in ((one.model, other.model), (one.optimizer, other.optimizer)):
        told["tensors"] += len(a.keys() | b.keys())
        told["equal_tensors"] += sum(torch.equal(a[name], b[name]) for name in a.keys() & b.keys())
    return told
