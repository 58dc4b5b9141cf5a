"""The same error on the other side: what the error of delta does to dW_K.

The paper looks at dW_Q. With dK = alpha dS^T Q and dW_K = dK^T X, an error e[T] of delta changes
dW_K by alpha sum_T e[T] Q[T]^T (PX)[T]: terms of rank 1 again, with Q in the place of PK and PX in
that of X.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.forensics import Coherence, coherence, pieces
from kernels.forensics.pieces import Setting

from .direction import Moment
from .tables import markdown_table


class KeySide(NamedTuple):
    """difference: dW_K with delta_hp minus dW_K with delta_lp, [D, C]. ratio: its size relative to
    dW_K. coherence: of its terms, with the same weights alpha e[T] as those of dW_Q."""

    difference: Tensor
    ratio: float
    coherence: Coherence


def key_side(moment: Moment, *, draws: int = 10) -> KeySide:
    """Measured on a captured head in float64; P comes from the rounded scores."""
    head = moment.captured.head
    setting = Setting.of(head, moment.captured.numerics, True, None, 0)
    sequences, rows = head.q.shape[:2]
    P = pieces.scores(head, setting).double().view(sequences, rows, -1).softmax(-1)
    q, v, dO = (pieces.on_grid(x, setting.numerics).double() for x in (head.q, head.v, head.dO))
    PX, dP = P @ head.X.double(), dO @ v.mT
    dS = P * (dP - (dP * P).sum(-1, keepdim=True))
    whole = setting.scale * torch.einsum("ntd,nts,nsc->dc", q, dS, head.X.double())
    a, b, c = q.flatten(0, 1), PX.flatten(0, 1), moment.weight.terms[2]
    difference = (c[:, None] * a).T @ b
    ratio = float(difference.norm() / whole.norm())
    return KeySide(difference, ratio, coherence(a, b, c, draws=draws))


def sides_table(chosen: Mapping[str, Moment]):
    """Size and coherence of the error of dW_Q beside that of dW_K, at each stage."""
    lines = []
    for name, moment in chosen.items():
        keys = key_side(moment)
        pairs = [
            (moment.weight.ratio, keys.ratio),
            *(
                (getattr(moment.coherence, what), getattr(keys.coherence, what))
                for what in ("mean_cosine", "explained", "gain")
            ),
        ]
        lines.append([f"{name}, step {moment.step:,}", *(f"{q:.2f}, {k:.2f}" for q, k in pairs)])
    header = ["stage (dW_Q, dW_K)", "error / gradient", "mean cosine", "terms along R", "gain"]
    return markdown_table(header, lines)
