"""What the programs that train and archive share: options, a time limit, saving on the way.

`book.evidence`, `book.recipes` and `book.searches` run on machines with a time limit. Whoever
takes such a machine away does not ask first, so archives are written while others still train.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable

from . import RESULTS, ROOT

SAVE_S = 60.0  # between archives written on the way


def add_machine_arguments(p: argparse.ArgumentParser) -> None:
    """Options of every program that trains and archives: how much at once, how long, where."""
    p.add_argument("--workers", type=int, default=2, help="runs side by side (2)")
    p.add_argument(
        "--devices", type=split_names, default=(), help="spread them over these: cuda:0,cuda:1"
    )
    p.add_argument("--minutes", type=float, help="stop after so long, and archive what has ended")
    p.add_argument("--store", default=str(ROOT / "runs"), help="where runs lie (runs)")
    p.add_argument("--data", default=str(ROOT / "data"), help="corpus cache (data)")
    p.add_argument("--results", default=str(RESULTS), help="where archives go (book/results)")
    p.add_argument("--commit", help="of this code, to note where there is no repository")


def seed_list(text: str) -> list[int]:
    """'0,1,2' as [0, 1, 2]. Raises ValueError for anything else."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text!r} is no list of numbers; write it as 0,1,2") from None


def split_names(text: str) -> list[str]:
    """'a, b' as ['a', 'b']."""
    return [name.strip() for name in text.split(",") if name.strip()]


@contextlib.contextmanager
def time_limit(minutes: float | None):
    """Raise KeyboardInterrupt after so many minutes, as Ctrl-C would.

    Archives are written outside of it: the clock must not cut what it left time for.
    """
    if minutes is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, minutes * 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Saver:
    """Calls `save` where there is something new, at most once in `every` seconds.

    always: there is something new at any time, such as another step of a run that trains.
    """

    def __init__(self, save: Callable[[], object], always: bool = False, every: float = SAVE_S):
        self.save, self.always, self.every = save, always, every
        self.unsaved, self.saved = False, time.monotonic()

    def note(self) -> None:
        """There is something new."""
        self.unsaved = True

    def pass_by(self) -> None:
        """Save if it is time; for a loop to call at every turn."""
        if (self.unsaved or self.always) and time.monotonic() - self.saved >= self.every:
            self.save()
            self.unsaved, self.saved = False, time.monotonic()
