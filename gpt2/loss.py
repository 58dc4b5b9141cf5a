"""The loss head: hidden states to cross-entropy without ever holding all logits.

Logits of GPT-2 small are 50,304 wide: for 32,768 tokens 6.6 GB in fp32, several times over in an
ordinary backward pass. Here tokens are taken in chunks; each chunk's logits give its loss *and*
its gradient at once and are dropped (the method of Liger-Kernel's fused linear cross-entropy), so
that memory is bounded by `BUDGET` whatever the batch.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

BUDGET = 2**28  # logits held at once; fp32 1 GiB
DENSE = 2**20  # below this many logits plain autograd is faster


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap); 0 leaves them alone (Gemma 2 report, section 2)."""
    return torch.tanh(logits / cap) * cap if cap else logits


def token_loss(
    x: Tensor, weight: Tensor, targets: Tensor, *, cap: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Sum over tokens of cross-entropy + z_loss * logsumexp^2, fp32 scalar.

    x [N, C] of any float dtype; weight [V, C] fp32; targets int64 [N], -1 = not counted.
    z-loss: PaLM (Chowdhery et al. 2022), section 5.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.shape[0] * weight.shape[0] <= DENSE:
        logits = softcap(F.linear(x, weight).float(), cap)
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        if z_loss:
            loss = loss + z_loss * (logits.logsumexp(1).square() * (targets != -1)).sum()
        return loss
    return _ChunkedLoss.apply(x, weight, targets, cap, z_loss)


def _loss_and_grad(logits: Tensor, targets: Tensor, cap: float, z_loss: float):
    """Sum of the losses (fp32) and d(sum)/d(logits) in the dtype of `logits` [n, V]."""
    z = logits.float()
    if cap:
        bounded = torch.tanh(z / cap)
        z = bounded * cap
    counted = targets != -1
    index = targets.clamp(min=0)
    lse = torch.logsumexp(z, dim=1)
    picked = z.gather(1, index[:, None])[:, 0]
    loss = (lse - picked + z_loss * lse.square()).masked_fill(~counted, 0.0).sum()
    grad = torch.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None]
    column = torch.arange(z.shape[1], device=z.device)
    grad = grad - (column[None, :] == index[:, None]).float()
    if cap:
        grad = grad * (1 - bounded.square())
    return loss, (grad * counted[:, None]).to(logits.dtype)


class _Fused:
    """`_loss_and_grad` compiled on a GPU (one pass over the logits), plain elsewhere."""

    def __init__(self):
        self.compiled = None

    def __call__(self, logits, targets, cap, z_loss):
        if logits.device.type != "cuda" or self.compiled is False:
            return _loss_and_grad(logits, targets, cap, z_loss)
        try:
            if self.compiled is None:
                self.compiled = torch.compile(_loss_and_grad, dynamic=False)
            return self.compiled(logits, targets, cap, z_loss)
        except Exception as error:  # a compiler's failure has no type of its own
            if torch.cuda.is_current_stream_capturing():
                raise  # a CUDA graph's affair (`gpt2.step`): the head is compiled by then
            self.compiled = False
            warnings.warn(
                f"the loss head runs uncompiled: {type(error).__name__}: {str(error)[:200]}",
                stacklevel=2,
            )
            return _loss_and_grad(logits, targets, cap, z_loss)


_fused = _Fused()


def chunk_rows(rows: int, vocab: int, budget: int = BUDGET) -> int:
    """Rows per chunk: equal chunks, a multiple of 128 where possible, within the budget."""
    most = max(1, budget // vocab)
    chunks = -(-rows // most)
    size = -(-rows // chunks)
    rounded = -(-size // 128) * 128
    return rounded if rounded <= most else size


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are computed in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, targets, cap, z_loss):
        w = weight.detach().to(x.dtype)
        wants = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx = torch.empty_like(x) if wants else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if wants else None
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        size = chunk_rows(x.shape[0], weight.shape[0])
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, x.shape[0], size):
                rows = slice(start, start + size)
                loss, grad = _fused(x[rows] @ w.T, targets[rows], cap, z_loss)
                total += loss
                if wants:
                    torch.mm(grad, w, out=dx[rows])
                    dw += grad.T @ x[rows]
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    def backward(ctx, scale):
        dx, dw = ctx.saved_tensors
        return (dx.float() * scale).to(dx.dtype), dw * scale, None, None, None
