"""Which chapters are executed beside each other, so that no core waits for a single one.

Two at a time, of which at most one trains. Its runs are trained side by side on all cores, but the
last of them, and the figures after it, leave a core idle; only then another chapter starts beside
it, for sharing the cores would cost the runs what the other gains. Chapters that look at runs wait
for the training ones before them, since they load from the run store what those have trained; the
others read archives alone and may be executed at any time.

What a chapter does is read from its parameters: one with `workers` trains, one with `preset` looks
at runs of that preset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from .chapters import Chapter
from .execution import Execution

AT_ONCE = 2
POLL_SECONDS = 0.2
IDLE_SECONDS = 1.0  # over which idle cores are counted
IDLE_CORES = 0.75  # that make one: the kernel of a chapter that trains takes little, not nothing


@dataclass(frozen=True)
class Order:
    """A chapter to be executed with `parameters`, of which its notebook `knows` the names.

    place: in the book. key: of the cache. label: how messages call it.
    """

    place: int
    chapter: Chapter
    knows: Sequence[str]
    parameters: dict
    key: str
    label: str

    @property
    def trains(self) -> bool:
        return "workers" in self.knows

    @property
    def looks_at_runs(self) -> bool:
        return self.trains or "preset" in self.knows


class IdleCore:
    """Asked again and again: whether a core of this machine had nothing to do of late."""

    def __init__(self):
        self.found = False
        self._begin()

    def _begin(self) -> None:
        self.since, self.idle = time.monotonic(), psutil.cpu_times().idle

    def __call__(self) -> bool:
        elapsed = time.monotonic() - self.since
        if elapsed >= IDLE_SECONDS:
            self.found = psutil.cpu_times().idle - self.idle >= IDLE_CORES * elapsed
            self._begin()
        return self.found


def next_order(waiting: Sequence[Order], running: Sequence[Order], idle: bool) -> Order | None:
    """The one of `waiting` that may start now, or None: one that trains before any other.

    idle: whether a core has nothing to do, which counts only beside a chapter that trains.
    """
    unfinished = [order for order in (*running, *waiting) if order.trains]
    training = any(order.trains for order in running)
    if len(running) == AT_ONCE or (training and not idle):
        return None
    for order in sorted(waiting, key=lambda order: (not order.trains, order.place)):
        early = order.looks_at_runs and any(other.place < order.place for other in unfinished)
        if not early and not (order.trains and training):
            return order
    return None


def execute_all(
    orders: Sequence[Order],
    start: Callable[[Order], Execution],
    keep: Callable[[Order, Execution], None],
    idle_core: Callable[[], bool] | None = None,
) -> None:
    """Execute the orders; `keep` takes each that has ended. idle_core: None asks the machine.

    A failure or an interruption ends all that runs; what `keep` has taken by then is not lost.
    Raises what `start`, `keep` and `Execution.ended` raise.
    """
    idle_core = idle_core or IdleCore()
    waiting, running = list(orders), []
    try:
        while waiting or running:
            order = next_order(waiting, [order for order, _ in running], idle_core())
            if order is not None:
                waiting.remove(order)
                running.append((order, start(order)))
            for order, execution in list(running):
                if execution.ended():
                    running.remove((order, execution))
                    keep(order, execution)
            time.sleep(POLL_SECONDS)
    finally:
        for _, execution in running:
            execution.end()
