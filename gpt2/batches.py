"""Which windows of the corpus make up each batch: random access, recorded, replayable.

A window is `block_size + 1` tokens: inputs are its first block_size, targets its last. The starts
of a step depend on (order_seed, step) alone. They do not depend on earlier steps, on evaluation,
on accumulation or on the number of processes: all of these only cut one global batch differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .files import write_atomically, write_json


@dataclass(frozen=True)
class BatchIndex:
    """The starts of every batch, drawn with replacement from all valid windows.

    n_tokens: length of the split. With exactly block_size + 1 tokens there is one window, start 0;
    with fewer there is none and construction raises ValueError.
    recorded: starts loaded by `BatchIndex.load`, [steps, batch_size]; they win over the generator.
    """

    n_tokens: int
    block_size: int
    batch_size: int
    order_seed: int
    recorded: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        check_windows(self.n_tokens, self.block_size)
        for name in ("block_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use at least 1")
        if self.order_seed < 0:
            raise ValueError(f"order_seed={self.order_seed} is negative; use 0 or more")

    @property
    def n_windows(self) -> int:
        return self.n_tokens - self.block_size

    def starts(self, step: int) -> np.ndarray:
        """int64 [batch_size], each in [0, n_windows): the global batch of a step (from 0)."""
        if step < 0:
            raise ValueError(f"step={step} is negative; steps count from 0")
        if self.recorded is None:
            return self._draw([step])[0]
        if step < len(self.recorded):
            return self.recorded[step].astype(np.int64)
        last = len(self.recorded) - 1
        if last >= 0 and not np.array_equal(self._draw([last])[0], self.recorded[last]):
            raise ValueError(
                f"the recorded batches end at step {last} and this generator does not continue "
                f"them; step {step} cannot be replayed"
            )
        return self._draw([step])[0]

    def table(self, steps: range) -> np.ndarray:
        """int64 [len(steps), batch_size]: the starts of many steps, in less time each."""
        if self.recorded is None:
            return self._draw(steps)
        rows = [self.starts(step) for step in steps]
        return np.array(rows, dtype=np.int64).reshape(len(steps), self.batch_size)

    def _draw(self, steps: Sequence[int]) -> np.ndarray:
        # Philox is a block cipher of a counter: word 1 holds the step, word 0 counts within it.
        # Raw 64-bit outputs are used, because numpy promises their stability but not that of
        # Generator.integers. 53 bits times n_windows is one IEEE product: the same everywhere.
        bits = np.random.Philox(key=self.order_seed, counter=[0, 0, 0, 0])
        state = bits.state
        raw = np.empty((len(steps), self.batch_size), dtype=np.uint64)
        for row, step in zip(raw, steps):
            state["state"]["counter"][1] = step
            bits.state = state
            row[:] = bits.random_raw(self.batch_size)
        raw >>= np.uint64(11)
        starts = (raw.astype(np.float64) * 2.0**-53 * self.n_windows).astype(np.int64)
        return np.minimum(starts, self.n_windows - 1)

    def digest(self, steps: int | Iterable[int]) -> str:
        """sha256 hex of the starts of the first `steps` steps (or of the given ones), in order.

        Equal digests mean equal batches of the same shape on a split of the same length.
        """
        order = range(steps) if isinstance(steps, int) else steps
        return self._digest(self.starts(step) for step in order)

    def _digest(self, rows: Iterable[np.ndarray]) -> str:
        sha = hashlib.sha256(f"{self.n_tokens} {self.block_size} {self.batch_size}".encode())
        for row in rows:
            sha.update(row.astype("<i8").tobytes())
        return sha.hexdigest()

    def save(self, folder, steps: int) -> str:
        """Record the first `steps` steps as starts.npy and index.json; returns the digest.

        starts.npy is uint32, or uint64 beyond 2^32 windows: 4 or 8 bytes per sequence.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        dtype = np.uint32 if self.n_windows <= 2**32 else np.uint64
        rows = self.table(range(steps))
        table, digest = rows.astype(dtype), self._digest(rows)
        write_atomically(folder / "starts.npy", lambda f: np.save(f, table))
        spec = {k: v for k, v in asdict(self).items() if k != "recorded"}
        write_json(folder / "index.json", {**spec, "steps": steps, "digest": digest})
        return digest

    @classmethod
    def load(cls, folder) -> BatchIndex:
        """A recorded index, its starts memory-mapped and checked against their digest.

        Raises FileNotFoundError for a missing record and ValueError for a damaged one.
        """
        folder = Path(folder)
        for name in ("index.json", "starts.npy"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"no recorded batches: {folder / name} is missing")
        try:
            spec = json.loads((folder / "index.json").read_text(encoding="utf-8"))
            table = np.load(folder / "starts.npy", mmap_mode="r", allow_pickle=False)
            steps, digest = spec.pop("steps"), spec.pop("digest")
            index = cls(**spec, recorded=table)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"the recorded batches in {folder} are damaged: {error}") from None
        if table.shape != (steps, index.batch_size) or index.digest(steps) != digest:
            raise ValueError(f"the recorded batches in {folder} do not match their digest")
        return index


def check_windows(n_tokens: int, block_size: int, name: str = "the split") -> None:
    """Raise ValueError unless at least one window of block_size + 1 tokens fits."""
    if n_tokens <= block_size:
        raise ValueError(
            f"{name} holds {n_tokens} tokens, and a window of block_size={block_size} needs "
            f"{block_size + 1} (inputs and one more target); use more text or a smaller block_size"
        )


def evaluation_starts(n_tokens: int, block_size: int, batch_size: int, batches: int) -> np.ndarray:
    """int64 [batches, batch_size]: windows spread evenly over a split, drawn from no random state.

    The same for every run on that split, so that held-out losses of paired runs compare.
    """
    check_windows(n_tokens, block_size, "the held-out split")
    last = n_tokens - block_size - 1
    count = batches * batch_size
    return (np.arange(count, dtype=np.int64) * last // max(count - 1, 1)).reshape(batches, -1)
