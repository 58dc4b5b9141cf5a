"""One optimiser step: forward and backward of each micro-batch, clipping, the update.

Compiled where that works (`torch.compile`), and on a GPU captured into a CUDA graph where it can
be (`gpt2.cuda_graph`); either way nothing in a step waits for the GPU. `gpt2.loop` is what happens
around the steps.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import Tensor

from .config import RunConfig
from .cuda_graph import StepGraph, first_cause, graph_obstacle
from .distributed import Group
from .feed import Feed
from .model import GPT
from .optim import Optimizers, learning_rate
from .seeds import mix

MUST_COMPILE = ("on", "blocks")  # values of `compile` that are honoured or refused
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(config: RunConfig, device: torch.device):
    """The context in which a run computes; of fp32, none."""
    dtype = DTYPES.get(config.dtype)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


class Stepper:
    """Model, optimisers and batches of a run. Losses and norms of steps wait in `_pending`.

    step: the number of updates done, kept by `gpt2.loop`. Raises ValueError for a batch that does
    not divide over the processes, and where `cuda_graph` or `compile` is asked for and cannot be.
    """

    def __init__(self, config: RunConfig, corpus, device: torch.device, group: Group):
        self.config, self.corpus, self.device, self.group = config, corpus, device, group
        self.micro, self.passes = config.accumulation(group.world)
        self.model = GPT(config, config.vocab_size or corpus.vocab_size).to(device)
        self.optimizers = Optimizers(self.model, config)
        self.feed = Feed(corpus, config, device, group)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "float16")
        self.stochastic = self.model.stochastic
        self.step = 0
        self._pending: list[tuple[int, Tensor, Tensor, float]] = []
        self._compile()
        self._decide_on_graph()

    def _compile(self) -> None:
        """torch.compile the trunk on a GPU ("auto") or always ("on", "blocks")."""
        mode = self.config.compile
        self.compiled = mode in MUST_COMPILE or (mode == "auto" and self.device.type == "cuda")
        if self.compiled:
            torch._dynamo.reset()  # its limit on recompilations counts models of earlier runs too
            self.model.compile_trunk(by_block=mode == "blocks")

    def _decide_on_graph(self) -> None:
        """CUDA graphs where they work ("auto"), or ValueError where they do not ("on").

        A graph holds the whole step where that is one micro-batch and AdamW's update; else
        forward and backward of one micro-batch (Muon's rate is a number of the host).
        """
        config = self.config
        self.graph_obstacle = graph_obstacle(config, self.device, self.group.world)
        if config.cuda_graph == "on" and self.graph_obstacle:
            raise ValueError(
                f"cuda_graph=on cannot be honoured: {self.graph_obstacle}; use cuda_graph=auto"
            )
        self.graph_wanted = config.cuda_graph != "off" and self.graph_obstacle is None
        self.graph_holds_update = self.passes == 1 and self.optimizers.muon is None
        self.graph: StepGraph | None = None
        self._warm = False

    def autocast(self):
        return autocast(self.config, self.device)

    def _seed(self, step: int, sequence: int) -> int:
        """Seeds dropout for one micro-batch; returns the seed of stochastic attention."""
        if self.config.dropout:
            torch.manual_seed(mix(self.config.init_seed, step, sequence))
        if not self.stochastic:
            return 0
        return mix(self.config.init_seed, self.config.order_seed, step, sequence)

    def one_pass(self, x: Tensor, y: Tensor, seed: int | Tensor) -> Tensor:
        """Add the gradient of one micro-batch to `.grad`; returns its part of the loss.

        Losses are sums over counted targets divided by the global batch's count of targets, so
        that neither the number of micro-batches nor of processes changes loss or gradient.
        """
        if self.stochastic and not isinstance(seed, Tensor):
            seed = torch.full((), seed, dtype=torch.int64, device=self.device)
        with self.autocast():
            _, loss = self.model(x, y, denominator=self.config.tokens_per_step, seed=seed)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def forward_backward(self, step: int, x: Tensor, y: Tensor, one_pass=None) -> Tensor:
        """Add the gradient of this process's share of a batch to `.grad`; returns its loss part.

        one_pass: `self.one_pass`, or a graph of it.
        """
        one_pass, sequence = one_pass or self.one_pass, self.feed.rows.start
        total = torch.zeros((), device=self.device)
        for mx, my in zip(x.split(self.micro), y.split(self.micro)):
            total += one_pass(mx, my, self._seed(step, sequence))
            sequence += len(mx)
        return total

    def whole_step(self, x: Tensor, y: Tensor, seed: int | Tensor) -> Tensor:
        """What a graph of a whole step holds; returns [loss, gradient norm], fp32."""
        self.optimizers.gradient.zero()
        loss = self.one_pass(x, y, seed)
        norm = self.optimizers.gradient.clip(self.config.grad_clip)
        with self.optimizers.capturable():
            self.optimizers.step()
        return torch.stack([loss, norm])

    def update(self, step: int) -> None:
        """One optimiser step on batch `step`."""
        rate = learning_rate(self.config, step)
        self.optimizers.set_rate(rate)
        x, y = self.feed.batch(step)
        if self._captured(step, x, y) and self.graph_holds_update:
            seed = self._seed(step, self.feed.rows.start)
            loss, norm = self.graph(x, y, seed).clone().unbind()
        else:
            loss, norm = self._update_by_parts(step, x, y)
        if self.config.qk_clip:
            for layer in self.model.attention_layers:
                self.group.max_(layer.max_logit)
            self.model.clip_queries_and_keys()
        self._pending.append((step, loss, norm, rate))

    def _update_by_parts(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient, reduction, clipping and update one after the other; (loss, norm)."""
        optimizers, config = self.optimizers, self.config
        optimizers.gradient.zero()
        self.model.train()
        loss = self.forward_backward(step, x, y, self.graph)
        self.group.sum_(optimizers.gradient.buffer, config.grad_reduce_dtype)
        if self.scaler.is_enabled():
            for optimizer in optimizers.all():
                self.scaler.unscale_(optimizer)
        norm = optimizers.gradient.clip(config.grad_clip)
        if self.scaler.is_enabled():
            for optimizer in optimizers.all():
                self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizers.step()
        self._warm = True
        return loss, norm

    def may_capture(self, step: int) -> bool:
        """Whether the graph may be captured at this step.

        Not while anything keeps a forward pass of its own: autograd would then add gradients on
        that pass's stream, which is not the one that is captured.
        """
        return True

    def _captured(self, step: int, x: Tensor, y: Tensor) -> bool:
        """Whether there is a graph; captured after one step without, which compiled everything."""
        if self.graph is None and self.graph_wanted and self._warm and self.may_capture(step):
            self.model.train()
            work = self.whole_step if self.graph_holds_update else self.one_pass
            batch = x[: self.micro], y[: self.micro], self._seed(step, self.feed.rows.start)
            try:
                self.graph = StepGraph(work, self.one_pass, *batch, self.stochastic)
            except Exception as error:  # whatever is not allowed under capture
                self.graph_wanted = False  # nothing was updated: a capture computes nothing
                if self.config.cuda_graph == "on":
                    raise
                cause = first_cause(error)
                self.graph_obstacle = _told(cause)
                warnings.warn(f"cuda_graph is off: {_told(cause)}", stacklevel=3)
        return self.graph is not None

    def first_update(self, step: int) -> None:
        """The first step compiles; where that fails, say so and go on without ("auto")."""
        if not self.compiled:
            return self.update(step)
        try:
            self.update(step)
        except Exception as error:  # compilers fail with many types
            if self.config.compile in MUST_COMPILE or step != self.step or self._pending:
                raise
            if not type(error).__module__.startswith("torch._"):
                raise
            warnings.warn(f"torch.compile is off: {_told(error)}", stacklevel=2)
            self.compiled = False
            self.model.eager_trunk()
            self.update(step)


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
