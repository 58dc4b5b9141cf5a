"""Batches on the device: which windows (BatchIndex), cut from tokens that lie where they are used.

Small corpora are kept whole on the device and cut there by one gather; larger ones are read from
the memory map a few steps ahead by a thread, pinned where the device is a GPU. Either way a batch
is a function of (corpus, order_seed, step) alone.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from .config import RunConfig
from .distributed import Group

RESIDENT_BYTES = {"cuda": 8 * 2**30, "cpu": 256 * 2**20}  # int32 tokens kept on the device
AHEAD = 4  # batches read ahead from a memory map
STARTS = 64  # steps whose window starts are computed and sent at once


class Feed:
    """x, y int64 [B_local, T] of any step: this process's share of the step's global batch.

    Process r of W takes sequences r*B/W to (r+1)*B/W of the recorded batch, so that the global
    batch is the same for every W. Raises ValueError if the batch does not divide.
    """

    def __init__(self, corpus, config: RunConfig, device: torch.device, group: Group):
        self.corpus, self.device = corpus, device
        self.index = corpus.batch_index(config)
        self.block_size = config.block_size
        micro, passes = config.accumulation(group.world)
        first = group.rank * micro * passes
        self.rows = slice(first, first + micro * passes)
        limit = RESIDENT_BYTES.get(device.type, RESIDENT_BYTES["cpu"])
        self.tokens: Tensor | None = None
        if 4 * len(corpus.train) <= limit:
            self.tokens = torch.from_numpy(np.asarray(corpus.train, dtype=np.int32)).to(device)
        self.window = torch.arange(config.block_size + 1, device=device)
        self._block: tuple[int, Tensor] | None = None
        self._reader = ThreadPoolExecutor(1) if self.tokens is None else None
        self._ahead: OrderedDict[int, Future] = OrderedDict()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        if self.tokens is None:
            return self._read_ahead(step)
        both = self.tokens[self._starts(step)[:, None] + self.window].long()
        return both[:, :-1], both[:, 1:]

    def _starts(self, step: int) -> Tensor:
        """int64 [B_local] on the device; computed for STARTS steps at once."""
        first = step - step % STARTS
        if self._block is None or self._block[0] != first:
            table = self.index.table(range(first, first + STARTS))[:, self.rows]
            self._block = (first, self._send(torch.from_numpy(np.ascontiguousarray(table))))
        return self._block[1][step - first]

    def _read(self, step: int) -> tuple[Tensor, Tensor]:
        starts = self.index.starts(step)[self.rows]
        x, y = self.corpus.batch("train", starts, self.block_size)
        return self._pinned(x), self._pinned(y)

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _send(self, tensor: Tensor) -> Tensor:
        """On the device, without waiting; PyTorch keeps pinned memory until the copy is done."""
        return self._pinned(tensor).to(self.device, non_blocking=True)

    def _read_ahead(self, step: int) -> tuple[Tensor, Tensor]:
        for old in [s for s in self._ahead if not step <= s < step + AHEAD]:
            self._ahead.pop(old).cancel()
        for wanted in range(step, step + AHEAD):
            if wanted not in self._ahead:
                self._ahead[wanted] = self._reader.submit(self._read, wanted)
        x, y = self._ahead.pop(step).result()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
