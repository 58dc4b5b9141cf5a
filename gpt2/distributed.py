"""Several processes, one optimiser step: data parallelism under torchrun, NCCL or gloo.

    torchrun --standalone --nproc_per_node=4 -m gpt2.train --preset paper
    srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=8 \\
        --rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500 -m gpt2.train --preset paper

Each process takes its share of the global batch, which the config fixes whatever the number of
processes. Gradients lie in one flat buffer (`gpt2.optim`), so synchronising is one all-reduce, in
fp32 or bf16. Every process then takes the same update; rank 0 alone writes. Without torchrun this
is a group of one, and nothing here costs anything.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from .processes import is_alive

TIMEOUT_S = 600  # of one collective; a lost process is noticed much sooner (Watchdog)
LOST_EXIT_CODE = 75


class Group:
    """The processes that train together. rank 0 writes; world is 1 without torchrun."""

    def __init__(self, rank: int = 0, world: int = 1, local_rank: int = 0):
        self.rank, self.world, self.local_rank = rank, world, local_rank

    @property
    def writer(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor, dtype: str = "float32") -> Tensor:
        """Add up over processes in place; `dtype` "bfloat16" sums in bf16, rounding included."""
        if self.world == 1:
            return tensor
        if dtype == "bfloat16":
            low = tensor.bfloat16()
            dist.all_reduce(low)
            return tensor.copy_(low)
        dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def share(self, value):
        """Rank 0's value (anything that pickles) on every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def share_tensors(self, tensors: dict[str, Tensor] | None, device) -> dict[str, Tensor]:
        """Rank 0's tensors on every process."""
        if self.world == 1:
            return tensors
        shapes = self.share(
            {k: (tuple(v.shape), v.dtype) for k, v in tensors.items()} if self.writer else None
        )
        out = {}
        for name, (shape, dtype) in shapes.items():
            value = tensors[name].to(device) if self.writer else None
            out[name] = torch.empty(shape, dtype=dtype, device=device) if value is None else value
            dist.broadcast(out[name], src=0)
        return out

    def first(self, work: Callable):
        """Call `work` on rank 0 before the others (it may fill a cache); everyone's result."""
        result, error = None, None
        if self.writer:
            try:
                result = work()
            except Exception as failure:  # told to the others, then raised again below
                error = failure
        told = self.share(str(error) if error else None)
        if error is not None:
            raise error
        if told is not None:
            raise RuntimeError(f"rank 0 failed: {told}")
        return result if self.writer else work()


def leave() -> None:
    """Leave the group, if there is one: the last thing that a program under torchrun does."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def is_writer() -> bool:
    """Whether this process speaks for its group; true without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def join(device_type: str) -> Group:
    """The group that torchrun set up, or a group of one.

    torchrun tells each process its place by RANK, WORLD_SIZE and LOCAL_RANK; these are its
    protocol. Raises ValueError if more processes than GPUs were asked for on this machine.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "RANK" not in os.environ:
        return Group()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    device = None
    if device_type == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine has no GPU: there are "
                f"{torch.cuda.device_count()}; lower --nproc_per_node"
            )
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=device,
        )
    return Group(rank, world, local)


class Watchdog:
    """Ends this process within seconds when another one of the group on this machine dies.

    A collective waits for the lost process, NCCL's on the GPU, where no Python signal handler
    runs; so a thread looks at the others' process ids. `on_loss(sentence)` is called first (the
    writer notes the run's status), then the process exits with LOST_EXIT_CODE. Losses on other
    machines are left to torchrun and the collective's timeout.
    """

    def __init__(self, group: Group, on_loss: Callable[[str], None], interval_s: float = 1.0):
        self.group, self.on_loss, self.interval_s = group, on_loss, interval_s
        self._stop = threading.Event()
        me = (group.rank, socket.gethostname(), os.getpid(), psutil.Process().create_time())
        everyone: list = [None] * group.world
        dist.all_gather_object(everyone, me)
        self.others = [p for p in everyone if p[1] == me[1] and p[0] != me[0]]
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def stop(self) -> None:
        self._stop.set()

    def lost(self, patience_s: float = 0.0) -> str | None:
        """A sentence about the first process found dead, or None if none is after `patience_s`.

        A killed process closes its connections a moment before it is dead, so an error of a
        collective comes first and its cause can only be seen after a little patience.
        """
        end = time.monotonic() + patience_s
        while (found := self._first_dead()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _first_dead(self) -> str | None:
        for rank, host, pid, started in self.others:
            if not is_alive(pid, started):
                return (
                    f"rank {rank} of {self.group.world} (process {pid} on {host}) is gone; "
                    f"rank {self.group.rank} stops too. Run the same command again, with any "
                    "number of processes, to continue from the last checkpoint"
                )
        return None

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            sentence = self.lost()
            if sentence is None:
                continue
            time.sleep(0.5)
            if self._stop.is_set():  # an orderly end: the others were only faster
                return
            print(sentence, flush=True)
            self.on_loss(sentence)
            os._exit(LOST_EXIT_CODE)
