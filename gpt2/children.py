"""Programs of this package started as processes of their own, alone or under torchrun.

Every child has a log file, and whoever waits for it a time limit. `Machine.end` ends those that
still run; only where the program that started them is killed outright do they outlive it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from .hardware import visible
from .processes import end_family

LAST_WORDS = 600  # characters of a failed child's output that its error shows


class ChildError(RuntimeError):
    """A child failed or took too long; the message says which and its last words."""


class Child:
    """A running command whose output goes to `log`; gpu: the only one that it sees."""

    def __init__(self, command: list[str], log: Path, gpu: int | None = None):
        self.log, self.began = log, time.monotonic()
        env = None if gpu is None else os.environ | visible(f"cuda:{gpu}")
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float) -> int:
        """The exit code. Raises ChildError, with the whole family ended, after `limit_s`."""
        try:
            return self.process.wait(max(limit_s, 0.1))
        except subprocess.TimeoutExpired:
            self.end()
            raise ChildError(f"{self.log.stem} took longer than {limit_s:.0f} s") from None

    def finish(self, limit_s: float) -> float:
        """Seconds since the start. Raises ChildError for any exit code but 0."""
        code = self.wait(limit_s)
        if code:
            words = self.text().strip()[-LAST_WORDS:]
            raise ChildError(f"{self.log.stem} ended with exit code {code}: {words}")
        return time.monotonic() - self.began

    def end(self) -> None:
        """Kill the command and all that it started."""
        end_family(self.process)


@dataclass
class Machine:
    """Where children run: how many processes, in which folder, until when.

    device: "cuda" or "cpu". deadline: on time.monotonic()'s clock.
    """

    device: str
    processes: int
    work: Path
    deadline: float
    children: list[Child] = field(default_factory=list)

    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    def start(
        self, name: str, module: str, arguments: list[str], processes: int, gpu: int | None = None
    ) -> Child:
        """`python -m module`, or the same under torchrun for several processes.

        gpu: index of the only GPU that it may see.
        """
        command = [sys.executable, "-m"]
        if processes > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            command += ["-m"]
        child = Child([*command, module, *arguments], self.work / f"{name}.log", gpu)
        self.children.append(child)
        return child

    def run(
        self, name: str, module: str, arguments: list[str], processes: int, gpu: int | None = None
    ) -> Child:
        """Start a child and wait for its end. Raises ChildError for a failure."""
        child = self.start(name, module, arguments, processes, gpu)
        child.finish(self.remaining())
        return child

    def end(self) -> None:
        """End every child that still runs."""
        for child in self.children:
            child.end()
