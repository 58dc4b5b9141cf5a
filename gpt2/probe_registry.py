"""What a probe is given (`ProbeContext`) and the table of all probes (`register`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import measures
from .batches import evaluation_starts

PROBE_ROWS = 1024  # rows per head that the fixed held-out batch has at least
TRAINING_TOKENS = 8192  # at most so many tokens of the training batch are looked at


@dataclass
class ProbeContext:
    """What a probe may look at. Made by the training loop; the same object before and after.

    model: the raw module, never compiled. x, y: int64 [B, T], the first micro-batch of `step`.
    metrics: the row so far. autocast: gives the context in which the run computes (none: fp32).
    full_batch: gives (x, y) of the whole step. scratch: what probes keep from before the update
    until after it; by then the loop has put `train_loss` and `grad_norm` (before clipping) there.
    """

    model: Any
    config: Any
    step: int
    x: Tensor
    y: Tensor
    optimizer: Any = None
    run_dir: Path | None = None
    corpus: Any = None
    metrics: dict = field(default_factory=dict)
    autocast: Callable | None = None
    full_batch: Callable[[], tuple[Tensor, Tensor]] | None = None
    scratch: dict = field(default_factory=dict)

    def held_out_taps(self) -> list:
        """One forward pass without gradients over the fixed held-out batch; computed once."""
        if "held_out_taps" not in self.scratch:
            self.scratch["held_out_taps"] = held_out_taps(self)
        return self.scratch["held_out_taps"]

    def training_taps(self) -> tuple[list, list[Tensor], list[Tensor]]:
        """Taps, dO and dQ per layer on (at most `TRAINING_TOKENS` of) the training batch."""
        if "training_taps" not in self.scratch:
            self.scratch["training_taps"] = training_taps(self)
        return self.scratch["training_taps"]

    def query_weights(self) -> Tensor:
        """W_Q of every head, [L, H, D, C]."""
        return torch.stack([layer.w_q().detach() for layer in self.model.attention_layers])

    def leading_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        if "leading_pairs" not in self.scratch:
            self.scratch["leading_pairs"] = measures.leading_pair(self.query_weights())
        return self.scratch["leading_pairs"]


def held_out_batch(ctx: ProbeContext) -> Tensor:
    """Token ids [n, T] of the fixed held-out batch: n windows, evenly spaced."""
    block = ctx.config.block_size
    n = max(2, math.ceil(PROBE_ROWS / block))
    starts = evaluation_starts(len(ctx.corpus.held_out), block, n, 1)[0]
    x, _ = ctx.corpus.batch("held_out", starts, block)
    return torch.as_tensor(x).to(ctx.x.device)


@contextmanager
def measuring(ctx: ProbeContext):
    """Evaluation mode and the run's autocast; the training mode comes back afterwards."""
    was_training = ctx.model.training
    ctx.model.eval()
    try:
        with ctx.autocast() if ctx.autocast else nullcontext():
            yield
    finally:
        ctx.model.train(was_training)


def _new_taps(ctx: ProbeContext, rows_only: bool = False) -> list:
    """Taps of all layers. rows_only: without the O in fp32 that the error of delta needs."""
    from kernels.attention import Probe

    from .model import Tap

    def reports(layer) -> bool:  # PyTorch's own attention fills no probe
        return layer.numerics is not None and layer.backend != "sdpa"

    return [
        Tap(probe=Probe(rows_only) if reports(a) else None) for a in ctx.model.attention_layers
    ]


def held_out_taps(ctx: ProbeContext) -> list:
    taps = _new_taps(ctx, rows_only=True)
    with torch.no_grad(), measuring(ctx):
        ctx.model(held_out_batch(ctx), seed=ctx.step, taps=taps)
    return taps


def training_taps(ctx: ProbeContext) -> tuple[list, list[Tensor], list[Tensor]]:
    n = max(1, TRAINING_TOKENS // ctx.x.shape[1])
    taps = _new_taps(ctx)
    with torch.enable_grad(), measuring(ctx):
        _, loss = ctx.model(ctx.x[:n], ctx.y[:n], seed=ctx.step, taps=taps)
        wanted = [t.out for t in taps] + [t.q for t in taps]
        grads = torch.autograd.grad(loss, wanted)
    return taps, list(grads[: len(taps)]), list(grads[len(taps) :])


# -- registry -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeKind:
    """`phase`: "before" or "after" the optimiser's update of a step."""

    name: str
    cost: str
    phase: str
    function: Callable[[ProbeContext], dict]
    summary: str


REGISTRY: dict[str, ProbeKind] = {}


def register(name: str, *, cost: str, phase: str = "before"):
    """Add a probe: `@register("name", cost="cheap"|"dear")` above a function of a ProbeContext."""
    if cost not in ("cheap", "dear") or phase not in ("before", "after"):
        raise ValueError(
            f"probe {name!r}: cost={cost!r}, phase={phase!r}; "
            "use cheap or dear, and before or after"
        )

    def add(function):
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        REGISTRY[name] = ProbeKind(name, cost, phase, function, summary)
        return function

    return add


def nested(per_layer: list[Tensor]) -> list:
    """[layer][head] floats from one tensor [H] per layer."""
    return [layer.double().tolist() for layer in per_layer]
