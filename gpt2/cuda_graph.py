"""The training step as one CUDA graph: its kernels, recorded once, then launched together.

A step of a small model is hundreds of short kernels, and a GPU then waits for Python. A graph
holds these kernels with their arguments: same kernels, same order, same memory, so that no bit of
a run depends on it (tests/gpt2/test_cuda_graph.py compares them on a GPU), and a run's identity
leaves it out. Source: PyTorch's notes on CUDA semantics, "CUDA Graphs".

What changes from step to step lies in buffers: the batch, the seed of stochastic rounding, the
learning rate (`gpt2.optim`). The gradient, the weights and Adam's moments are updated in place
anyway, and checkpoints, probes and evaluation read them between two replays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.attention import resolve_backend
from kernels.numerics import ScopedNumerics

from .schema import RunConfig

Work = Callable[[Tensor, Tensor, "int | Tensor"], Tensor]


def graph_obstacle(config: RunConfig, device: torch.device, world: int = 1) -> str | None:
    """Why a step of this run cannot be captured, in a few words; None where it can.

    A graph replays what the GPU did, so nothing in a step may be decided on the host.
    """
    if device.type != "cuda":
        return f"it needs a CUDA device and this is {device.type}"
    if world > 1:
        return f"the gradients of {world} processes are summed between backward and update"
    if config.dtype == "float16":
        return "dtype=float16 scales the loss by what the host reads of every step"
    if config.dropout:
        return f"dropout={config.dropout} is seeded by the host in every step"
    return None if config.attention == "sdpa" else _attention_obstacle(config, device)


def _attention_obstacle(config: RunConfig, device: torch.device) -> str | None:
    scoped, dtype = ScopedNumerics.parse(config.attention), getattr(torch, config.dtype)
    for layer in range(config.n_layer):
        for n in dict.fromkeys(scoped.for_layer(layer, config.n_head)):
            backend, why = resolve_backend(
                n,
                device,
                dtype=dtype,
                head_dim=config.head_dim,
                backend=config.attention_backend,
                keys=config.block_size,
            )
            if backend == "emulated":
                return f"the attention of layer {layer} runs in the emulator: {why}"
    return None


def first_cause(error: BaseException) -> BaseException:
    """The exception that began it: ending a broken capture raises one more."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class StepGraph:
    """work(x, y, seed) -> Tensor as a graph. Called with a batch, it copies it in and replays.

    x, y: int64 [B, T] as every later call has them. seed: whole number; given to `work` as a 0-dim
    int64 tensor where `draws`, else as it is. `work` is run once under capture, which computes
    nothing; `warm_up` (same arguments) is run before it and must leave nothing behind but what
    the next step clears. Everything in `work` must have run before on this device, so that it is
    compiled and its kernels are loaded. Raises whatever breaks the capture (RuntimeError, mostly).
    """

    def __init__(self, work: Work, warm_up: Work, x: Tensor, y: Tensor, seed: int, draws: bool):
        self.x, self.y = (t.clone(memory_format=torch.contiguous_format) for t in (x, y))
        self.seed: int | Tensor = seed
        if draws:
            self.seed = torch.full((), seed, dtype=torch.int64, device=x.device)
        self.replays = 0
        with torch.cuda.device(x.device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):  # also brings `current` back if the capture breaks
                warm_up(self.x, self.y, self.seed)
                current.wait_stream(side)
                gc.collect()  # an earlier run's graph must not be found dead during the capture
                self.graph = torch.cuda.CUDAGraph()
                # Other threads may go on meanwhile: one of them pins batches (`gpt2.feed`).
                with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
                    self.result = work(self.x, self.y, self.seed)

    def __call__(self, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """The result for a batch, in a buffer that the next call overwrites. Waits for nothing."""
        self.x.copy_(x, non_blocking=True)
        self.y.copy_(y, non_blocking=True)
        if isinstance(self.seed, Tensor):
            self.seed.fill_(seed)
        self.graph.replay()
        self.replays += 1
        return self.result
