"""From the error of delta to the error of the weight gradient.

With q = X W_Q^T the gradient is dW_Q = dQ^T X, and dQ = alpha dS K, dS = P * (dP - delta). If only
delta differs, dS_hp - dS_lp = P * (delta_lp - delta_hp), hence

    dW_hp - dW_lp = alpha sum_T (delta_lp - delta_hp)[T] (PK)[T]^T X[T]       (paper section 3.3.1)

An identity, and visible as one while dS and dQ stay in fp32. In bf16, dS rounds too, and that
error is measured beside it. A step of gradient descent takes -lr dW_lp = -lr dW_hp + lr (dW_hp -
dW_lp): a positive cosine of the difference with W_Q's leading singular pair u1 v1^T makes W_Q grow
there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import FP32
from ..numerics import Numerics
from . import pieces
from .coherence import Coherence, coherence, direction_cosine
from .delta import check_reads_output, twin_outputs
from .inputs import Head, as_head
from .pieces import Setting


@dataclass(frozen=True)
class WeightGradientError:
    """dW_Q of one head, [D, C], float64 sums over all rows of what the numerics give.

    dW_hp, dW_lp: dS and dQ kept in fp32. difference = dW_hp - dW_lp; predicted: the paper's sum;
    residual = |difference - predicted| / |difference| (nan if there is no difference).
    ratio = |difference| / |dW_hp|, Frobenius norms. grad_scores_ratio, gradients_ratio: the same
    for the error that rounding dS, and storing dQ, make by themselves.
    error_leading_cosine, gradient_leading_cosine: of `difference` and of dW_hp with u1 v1^T of
    W_Q; spectral_norm of W_Q. All three None without W_Q.
    terms: PK [n, D], X [n, C] and alpha (delta_lp - delta_hp) [n], for `coherence`.
    """

    dW_hp: Tensor
    dW_lp: Tensor
    difference: Tensor
    predicted: Tensor
    residual: float
    ratio: float
    grad_scores_ratio: float
    gradients_ratio: float
    error_leading_cosine: float | None
    gradient_leading_cosine: float | None
    spectral_norm: float | None
    terms: tuple[Tensor, Tensor, Tensor]

    def coherence(self, *, draws: int = 100, seed: int = 0) -> Coherence:
        """How alike the rank-1 terms are, and how much they add up under this error."""
        return coherence(*self.terms, draws=draws, seed=seed)


def weight_gradient_error(
    q,
    k=None,
    v=None,
    dO=None,
    X=None,
    W_Q=None,
    *,
    numerics: Numerics | str = "paper",
    causal: bool = True,
    scale: float | None = None,
    seed: int = 0,
) -> WeightGradientError:
    """Measure the error that delta's error makes in dW_Q.

    q, k, v, dO, X, W_Q: as in `as_head`; dO and X are needed. With compute=fp64 the identity holds
    to float64; in fp32 its residual is of order 2^-24 |delta| / |delta_lp - delta_hp|.
    Raises ValueError for a missing tensor, delta='dP_P', or rows that are not finite.
    """
    head = as_head(q, k, v, dO, X, W_Q)
    head.need("dO", "X")
    setting = Setting.of(head, numerics, causal, scale, seed)
    check_reads_output(setting.numerics)
    n = setting.numerics.at(delta_error=None, grad_scores=FP32, gradients=FP32)
    result, O_lp, O_hp = twin_outputs(head, setting)
    if not bool(torch.isfinite(O_lp).all()):
        raise ValueError(
            f"O is not finite in {int((~torch.isfinite(O_lp)).any(-1).sum())} rows under "
            f"{str(setting.numerics)!r}; the weight gradient is not finite either"
        )
    X64 = head.X.double().flatten(0, 1)

    def dW(numerics: Numerics, high: bool) -> Tensor:
        """Straight from the emulator's backward pass, with delta from either O."""
        delta_output = result.out_fp32 if high else result.delta_output
        dq = pieces.backward_dq(head, setting, result, delta_output, numerics, head.dO, head.v)
        return dq.double().flatten(0, 1).T @ X64

    high = n.at(delta_output=FP32)
    dW_hp, dW_lp = dW(high, True), dW(n, False)
    rounded = dW(high.at(grad_scores=setting.numerics.grad_scores), True)
    stored = dW(high.at(gradients=setting.numerics.gradients), True)
    difference = dW_hp - dW_lp
    weight = pieces.on_grid(head.dO, n).double()
    error = (weight * (O_lp - O_hp)).sum(-1).flatten()
    PK = attended_keys(head, setting, result, n)
    c = setting.scale * error
    predicted = (c[:, None] * PK).T @ X64
    size = float(dW_hp.norm())
    leading = _leading(head.W_Q)
    return WeightGradientError(
        dW_hp=dW_hp,
        dW_lp=dW_lp,
        difference=difference,
        predicted=predicted,
        residual=_ratio(difference - predicted, float(difference.norm())),
        ratio=_ratio(difference, size),
        grad_scores_ratio=_ratio(rounded - dW_hp, size),
        gradients_ratio=_ratio(stored - dW_hp, size),
        error_leading_cosine=leading and direction_cosine(difference, leading[0]),
        gradient_leading_cosine=leading and direction_cosine(dW_hp, leading[0]),
        spectral_norm=leading and leading[1],
        terms=(PK, X64, c),
    )


def attended_keys(head: Head, setting: Setting, result, numerics: Numerics) -> Tensor:
    """PK [N T, D] float64 with the P of the backward pass, out of the emulator itself.

    With v = 0, dO = (1, 0, ...) and O = (-1, 0, ...): dP = 0, delta = -1, dS = P, dQ = alpha P K.
    """
    one = torch.zeros_like(head.v[:, :1]).expand(-1, head.rows, -1).clone()
    one[..., 0] = 1.0
    plain = numerics.at(delta_output=None, grad_probabilities=FP32)
    minus = type(result)(out=pieces.carrier(-one, numerics).unsqueeze(1), lse=result.lse)
    dq = pieces.backward_dq(head, setting, minus, None, plain, one, torch.zeros_like(head.v))
    return dq.double().flatten(0, 1) / setting.scale


def _leading(W_Q: Tensor | None) -> tuple[Tensor, float] | None:
    """(u1 v1^T, spectral norm) of W_Q, float64."""
    if W_Q is None:
        return None
    U, s, Vh = torch.linalg.svd(W_Q.double(), full_matrices=False)
    return torch.outer(U[:, 0], Vh[0]), float(s[0])


def _ratio(x: Tensor, size: float) -> float:
    return float(x.norm()) / size if size > 0 else float("nan")
