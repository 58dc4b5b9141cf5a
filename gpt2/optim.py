"""Optimisers: AdamW (fused), Muon for hidden matrices, one flat gradient, the learning rate.

All gradients are views of one flat fp32 buffer, so that clearing, measuring and clipping them, and
summing them over processes, are one operation each, without a host sync.
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .config import RunConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest quintic at 0
MUON_MOMENTUM = 0.95


def learning_rate(config: RunConfig, step: int) -> float:
    """Rate of update `step` (from 0): linear warm-up, then constant or cosine to min_lr."""
    c = config
    if step < c.warmup_steps:
        return c.learning_rate * (step + 1) / (c.warmup_steps + 1)
    if c.schedule == "constant":
        return c.learning_rate
    span = max(1, (c.decay_steps or c.max_steps) - c.warmup_steps)
    done = min(1.0, (step - c.warmup_steps) / span)
    return c.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (c.learning_rate - c.min_lr)


class FlatGradient:
    """One fp32 buffer of which every parameter's `.grad` is a view."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        sizes = [p.numel() for p in self.parameters]
        self.buffer = torch.zeros(sum(sizes), device=self.parameters[0].device)
        for p, part in zip(self.parameters, self.buffer.split(sizes)):
            p.grad = part.view_as(p)

    def zero(self) -> None:
        self.buffer.zero_()

    def clip(self, largest: float) -> Tensor:
        """Scale to norm at most `largest` (0: leave alone); the norm before, a 0-dim tensor."""
        norm = torch.linalg.vector_norm(self.buffer)
        if largest:
            self.buffer.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
        return norm


def newton_schulz(G: Tensor, steps: int = 5) -> Tensor:
    """Approximately U V^T for G = U S V^T, batched: [..., n, m] -> [..., n, m].

    Singular values come out between about 0.7 and 1.2, but smaller where they are below 0.0015 of
    G's norm. bf16 on a GPU (as published), fp32 on a CPU.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers".
    """
    a, b, c = NEWTON_SCHULZ
    X = G.float()
    X = X / (torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) + 1e-7)
    X = X.bfloat16() if G.is_cuda else X
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.mT
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return (X.mT if tall else X).to(G.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum made orthogonal, for hidden matrices.

    parts: {parameter: row counts} where one parameter stacks several matrices (c_attn holds W_Q,
    W_K and W_V), each of which is orthogonalised by itself. Equal shapes share one batched
    product. The update of an [n, m] matrix is scaled by sqrt(max(1, n/m)).
    """

    def __init__(self, params, lr: float, momentum=MUON_MOMENTUM, weight_decay=0.0, parts=None):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.parts = parts or {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                direction = p.grad.lerp(state["momentum"], group["momentum"])
                rows = self.parts.get(p, [p.shape[0]])
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                for weight, update in zip(p.split(rows), direction.split(rows)):
                    by_shape.setdefault(tuple(weight.shape), []).append((weight, update))
            for (n, m), pairs in by_shape.items():
                updates = newton_schulz(torch.stack([u for _, u in pairs]))
                rate = -group["lr"] * math.sqrt(max(1.0, n / m))
                torch._foreach_add_([w for w, _ in pairs], list(updates.unbind()), alpha=rate)


class Optimizers:
    """What trains a model: AdamW for everything, or Muon for hidden matrices with AdamW beside.

    Decay acts on matrices and embeddings only. State goes in and out by parameter name, as plain
    tensors, so that checkpoints need no pickle.
    """

    def __init__(self, model: nn.Module, config: RunConfig):
        self.config = config
        self.names = {p: n for n, p in model.named_parameters()}
        self.gradient = FlatGradient(self.names)
        hidden = [p for p, n in self.names.items() if is_hidden_matrix(n, p)]
        muon = hidden if config.optimizer == "muon" else []
        rest = [p for p in self.names if all(p is not m for m in muon)]
        groups = [
            dict(params=[p for p in rest if p.dim() >= 2], weight_decay=config.weight_decay),
            dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0),
        ]
        device = rest[0].device
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=_rate(config.learning_rate, device),
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            fused=fused_adamw(device),
        )
        self.muon = None
        if muon:
            self.muon = Muon(
                muon, config.muon_lr, weight_decay=config.weight_decay, parts=_parts(model)
            )

    def all(self) -> list[torch.optim.Optimizer]:
        return [self.adamw] + ([self.muon] if self.muon else [])

    def set_rate(self, rate: float) -> None:
        """The schedule's rate for AdamW; Muon's follows it in proportion."""
        for group in self.adamw.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.muon:
            share = rate / self.config.learning_rate if self.config.learning_rate else 0.0
            for group in self.muon.param_groups:
                group["lr"] = self.config.muon_lr * share

    def step(self) -> None:
        for optimizer in self.all():
            optimizer.step()

    @contextmanager
    def capturable(self):
        """Within it AdamW's step may be captured into a CUDA graph (outside, PyTorch warns)."""
        for group in self.adamw.param_groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group in self.adamw.param_groups:
                group["capturable"] = False

    def state_tensors(self) -> dict[str, Tensor]:
        """'exp_avg/transformer.wte.weight' -> tensor, and so on."""
        return {
            f"{key}/{self.names[p]}": value
            for optimizer in self.all()
            for p, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state_tensors`. Raises ValueError for a state of another optimiser."""
        by_name = {n: p for p, n in self.names.items()}
        owner = {p: o for o in self.all() for g in o.param_groups for p in g["params"]}
        found: dict[Tensor, dict] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            expected = ("momentum",) if owner.get(by_name.get(name)) is self.muon else _ADAM_STATE
            if name not in by_name or kind not in expected:
                raise ValueError(
                    f"optimiser state {key!r} does not belong to this {self.config.optimizer} "
                    "optimiser; the checkpoint is of another model or optimiser"
                )
            p = by_name[name]
            where = p.device if kind != "step" or _step_on_device(p) else "cpu"
            found.setdefault(p, {})[kind] = value.to(where, copy=True)
        missing = [n for n, p in by_name.items() if p not in found]
        if tensors and missing:
            raise ValueError(f"the checkpoint has no optimiser state for {missing[0]}")
        for p, state in found.items():
            owner[p].state[p] = state


_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def _rate(rate: float, device: torch.device) -> float | Tensor:
    """AdamW's learning rate: on a GPU in its memory, fp32, where a CUDA graph reads it."""
    return torch.tensor(rate, device=device) if device.type == "cuda" else rate


def fused_adamw(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


def _step_on_device(parameter: Tensor) -> bool:
    return fused_adamw(parameter.device)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Matrices inside blocks; embeddings, the output head, norms and biases are AdamW's."""
    return parameter.dim() == 2 and ".h." in f".{name}"


def _parts(model: nn.Module) -> dict[Tensor, list[int]]:
    return {
        a.c_attn.weight: [a.n_head * a.head_dim] + [a.n_kv_head * a.head_dim] * 2
        for a in model.attention_layers
    }
