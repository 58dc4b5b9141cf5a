"""What a probe measures, as functions of tensors: norms, ties, scores, errors, alignments.

Letters as in the paper: B sequences, H query heads, T tokens, D head width, C model width. W_Q of
a head is stored as [D, C], so q = W_Q x and dW_Q = dQ^T X is [D, C]. No function here raises on
NaN or infinite input: the affected head's result is NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _gram(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W in float64 with nonfinite matrices zeroed, W W^T on the CPU, and which were finite.

    The eigenvalues are taken on the CPU: a [D, D] matrix is small, and LAPACK does not fail on
    hard input as GPU solvers do.
    """
    w = w.detach()
    w = (w.cpu() if w.device.type == "mps" else w).double()
    finite = torch.isfinite(w).all(dim=-1).all(dim=-1)
    w = torch.where(finite[..., None, None], w, 0.0)
    return w, (w @ w.mT).cpu(), finite.cpu()


def spectral_norms(w: Tensor) -> Tensor:
    """Largest singular value of each matrix of `w` [..., D, C]: float64 [...] on the CPU."""
    _, gram, finite = _gram(w)
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt()
    return torch.where(finite, top, float("nan"))


def leading_pair(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sigma [...], u [..., D], v [..., C] of the first singular triple; float64, CPU, NaN if lost.

    The pair's common sign is arbitrary, as always; u v^T is not.
    """
    wide, gram, finite = _gram(w)
    values, vectors = torch.linalg.eigh(gram)
    sigma, u = values[..., -1].clamp(min=0).sqrt(), vectors[..., -1]
    v = torch.einsum("...dc,...d->...c", wide.cpu(), u)
    v = v / v.norm(dim=-1, keepdim=True)
    nan = float("nan")
    return (
        torch.where(finite, sigma, nan),
        torch.where(finite[..., None], u, nan),
        torch.where(finite[..., None], v, nan),
    )


def alignment(change: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Cosine between each [D, C] matrix of `change` and u v^T: signed, in [-1, 1], float64 CPU."""
    change = change.detach().double().cpu()
    along = torch.einsum("...dc,...d,...c->...", change, u, v)
    return along / _norm(change)


def relative_size(change: Tensor, whole: Tensor) -> Tensor:
    """|change| / |whole| in the Frobenius norm over the last two dimensions, float64 CPU."""
    return _norm(change.detach().double().cpu()) / _norm(whole.detach().double().cpu())


def _norm(w: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(w)


def tie_rate(ties: Tensor) -> Tensor:
    """Share of rows whose maximum is reached by more than one key: ties [B, H, T] -> [H]."""
    return (ties > 1).double().mean(dim=(0, 2)).cpu()


def ones_share(ones: Tensor) -> Tensor:
    """Share of visible entries of P_bar equal to 1, causal: ones [B, H, T] -> [H]."""
    b, _, t = ones.shape
    return ones.double().sum(dim=(0, 2)).cpu() / (b * t * (t + 1) // 2)


def scores_of(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Causal scores alpha q k^T in fp32: q [B, H, T, D], k [B, Hkv, T, D] -> [B, H, T, T]."""
    q, k = q.float(), spread_heads(k.float(), q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return ((q @ k.mT) * scale).masked_fill(hidden, float("-inf"))


def spread_heads(x: Tensor, n_head: int) -> Tensor:
    """Key or value heads [B, Hkv, ...] repeated to one per query head [B, H, ...]."""
    return x if x.shape[1] == n_head else x.repeat_interleave(n_head // x.shape[1], dim=1)


def score_statistics(q: Tensor, k: Tensor, scale: float | None = None) -> dict[str, Tensor]:
    """Per head [H], from fp32 scores: largest score, mean entropy of a row (nats), tied rows, and
    the attention that the first key gets from the later half of the rows (an attention sink).

    One sequence at a time, so that the [T, T] scores of a batch are never all in memory.
    """
    largest, entropy, tied, first = [], [], [], []
    for i in range(len(q)):
        s = scores_of(q[i : i + 1], k[i : i + 1], scale)[0]
        p = s.softmax(dim=-1)
        largest.append(s.amax(dim=(1, 2)))
        entropy.append(torch.special.entr(p).sum(dim=-1).mean(dim=-1))
        first.append(p[:, p.shape[1] // 2 :, 0].mean(dim=-1))
        tied.append(((s == s.amax(dim=-1, keepdim=True)).sum(dim=-1) > 1).double().mean(dim=-1))
    return {
        "max_logit": torch.stack(largest).amax(dim=0).double().cpu(),
        "attention_entropy": torch.stack(entropy).mean(dim=0).double().cpu(),
        "first_key_mass": torch.stack(first).mean(dim=0).double().cpu(),
        "tie_rate": torch.stack(tied).mean(dim=0).cpu(),
    }


def delta_difference(dout: Tensor, out: Tensor, reference: Tensor) -> Tensor:
    """e = delta_lp - delta_hp = rowsum(dO * (O_lp - O_hp)): [B, H, T, D] -> float64 [B, H, T]."""
    return (dout.double() * (out.double() - reference.double())).sum(dim=-1)


def mean_per_head(e: Tensor) -> dict[str, Tensor]:
    """Mean, its standard error and the rms over sequences and rows: e [B, H, T] -> [H] each.

    Rows of one sequence share keys and values, so the standard error takes sequences as the
    independent units (clustered); NaN with a single sequence.
    """
    b, _, t = e.shape
    mean = e.mean(dim=(0, 2))
    by_sequence = (e - mean[None, :, None]).sum(dim=2)
    stderr = (by_sequence.square().sum(dim=0) * b / (b - 1)).sqrt() / (b * t) if b > 1 else None
    nan = torch.full_like(mean, float("nan"))
    return {
        "mean": mean.cpu(),
        "stderr": (nan if stderr is None else stderr).cpu(),
        "rms": e.square().mean(dim=(0, 2)).sqrt().cpu(),
    }


def attended_keys(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """P K of each query in fp32, causal: the direction in which an error of delta moves dQ."""
    q, k = q.float(), spread_heads(k.float(), q.shape[1])
    return F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=scale)


def weight_gradient_change(e: Tensor, pk: Tensor, x: Tensor, scale: float) -> Tensor:
    """What an error e of delta adds to dW_Q: -alpha sum_T e[T] (PK)[T]^T X[T] (paper, 3.3.1).

    e [B, H, T], pk [B, H, T, D], x [B, T, C] (the layer's input after its norm) -> [H, D, C], in
    the carrier of pk. dS = P (dP - delta), so an error of delta by e changes dS by -P e.
    """
    weighted = pk * e.to(pk.dtype)[..., None]
    return torch.einsum("bhtd,btc->hdc", weighted, x.to(pk.dtype)) * -scale


def shared_direction(e: Tensor, pk: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Per head [H], of the terms e[T] (PK)[T]^T X[T] of that change: do they point one way?

    direction_cosine  mean cosine between the directions (PK)[T]^T X[T] of two rows, sign included
    coherent_gain     |sum of the terms| / sqrt(sum of their squared sizes): about 1 for unrelated
                      directions, sqrt(rows) for one direction and one sign
    Rows of all sequences together; shapes as in `weight_gradient_change`. float64 on the CPU.
    """
    b, h, t, _ = pk.shape
    pk, x = pk.detach().double(), x.detach().double()
    size = pk.norm(dim=-1) * x.norm(dim=-1)[:, None]
    unit_pk, unit_x = (y / y.norm(dim=-1, keepdim=True).clamp(min=1e-30) for y in (pk, x))
    n = b * t
    summed = torch.einsum("bhtd,btc->hdc", unit_pk, unit_x).square().sum(dim=(1, 2))
    weights = e.detach().double()
    total = torch.einsum("bhtd,btc->hdc", pk * weights[..., None], x)
    apart = (weights * size).square().sum(dim=(0, 2)).sqrt()
    return {
        "direction_cosine": ((summed - n) / (n * (n - 1))).cpu(),
        "coherent_gain": (_norm(total) / apart).cpu(),
    }


def head_gradients(dq: Tensor, x: Tensor) -> Tensor:
    """dW_Q of each head, dQ^T X summed over sequences: [B, H, T, D], [B, T, C] -> [H, D, C]."""
    return torch.einsum("bhtd,btc->hdc", dq.float(), x.float())


def adam_direction(m: Tensor, v: Tensor, step: int, beta1: float, beta2: float, eps: float):
    """Adam's update per unit of learning rate from its moments after `step` updates."""
    return (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)


def adam_change(
    g: Tensor, change: Tensor, m: Tensor, v: Tensor, step: int, *, beta1, beta2, eps
) -> tuple[Tensor, Tensor]:
    """How an error of the present gradient changed Adam's update: (change of update, update).

    g: the gradient that Adam took, error included; change: its error; m, v: the moments *after*
    that step. One step's error only: what earlier errors left in the moments is not undone.
    """
    m0 = m - (1 - beta1) * change
    v0 = (v - (1 - beta2) * (g.square() - (g - change).square())).clamp(min=0)
    taken = adam_direction(m, v, step, beta1, beta2, eps)
    return taken - adam_direction(m0, v0, step, beta1, beta2, eps), taken
