"""Other processes: whether one lives, the ranks that torchrun started, the end of a family.

Imports no PyTorch, so that programs that only start others begin quickly.
"""

from __future__ import annotations

import subprocess

import psutil


def is_alive(pid: int, started: float) -> bool:
    """Whether the process that began at `started` (`psutil.Process.create_time`) still runs.

    A number can have gone to another process since; a zombie has ended.
    """
    try:
        found = psutil.Process(pid)
        return abs(found.create_time() - started) < 2 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def ranks(torchrun: subprocess.Popen) -> list[psutil.Process]:
    """The processes that torchrun started, in the order of their ranks."""
    workers = {}
    for process in psutil.Process(torchrun.pid).children():
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            workers[int(rank)] = process
    return [workers[rank] for rank in sorted(workers)]


def end_family(process: subprocess.Popen) -> None:
    """Kill a process and all that it started, if it still runs, and wait for its end."""
    if process.poll() is not None:
        return
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    for member in [process, *family]:
        try:
            member.kill()
        except (psutil.Error, OSError):
            pass
    process.wait()
