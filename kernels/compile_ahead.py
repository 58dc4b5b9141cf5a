"""Compile many kernels at once, before a measurement: processes that fill the compilers' caches.

A first call compiles for seconds on one core while the GPU waits. Here the same first calls are
made in processes of their own, on small tensors where the shape does not matter. Triton and
PyTorch keep what they compiled on disk, where the measuring process then finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

MOST_WORKERS = 24  # each holds a CUDA context of about half a gigabyte


def compile_ahead(
    function: Callable, arguments: Sequence[tuple], *, limit_s: float = 60.0, workers: int = 0
) -> list[str | None]:
    """function(*a) for every a of `arguments`, in processes: what became of each, in order.

    None where it returned, else a sentence: the error, or that it was not ready within `limit_s`.
    function: importable by name. workers: as many as there are cores, 24 at most, if 0.
    """
    if not arguments:
        return []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = workers or min(len(arguments), max(cores - 1, 1), MOST_WORKERS)
    deadline = time.monotonic() + limit_s
    # CUDA does not survive a fork. Leaving the block ends the workers, ready or not.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pending = [pool.apply_async(function, a) for a in arguments]
        return [_outcome(one, deadline) for one in pending]


def _outcome(pending, deadline: float) -> str | None:
    try:
        pending.get(max(deadline - time.monotonic(), 0))
    except multiprocessing.TimeoutError:
        return "not compiled in time"
    except Exception as error:
        told = str(error).splitlines()
        return f"{type(error).__name__}: {told[0] if told else ''}"[:300]
    return None
