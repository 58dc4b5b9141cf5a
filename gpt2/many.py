"""Several runs at once, each in a process of its own with its own thread: `train_many`.

Small models are fastest on one thread, so N cores train N runs. Workers are fresh interpreters (no
fork, no import of the caller's script), which works the same from notebooks and on every system.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .config import RunConfig
from .data import load_corpus
from .runs import ENDED, Parent, Run, RunStore

POLL_S = 0.2
STOP_S = 30.0  # for a worker to save after it was asked to stop


@dataclass
class _Job:
    config: RunConfig
    parent: Parent | None
    path: Path
    max_steps: int | None = None
    process: subprocess.Popen | None = None
    log: Path | None = None
    error: str = ""

    def state(self) -> str:
        """'cpu-...: step 400/2500 loss 1.86' for the progress line."""
        try:
            run = Run(self.path)
            state = run.state
        except ValueError:
            return "starting"
        if state["status"] == "running":
            return f"{state['step']}/{self.max_steps or self.config.max_steps}"
        return state["status"]


def train_many(
    configs: Sequence[RunConfig | tuple[RunConfig, Parent]],
    *,
    store: RunStore | None = None,
    workers: int = 2,
    threads: int = 1,
    progress: bool = True,
    cache_dir: str | Path = "data",
    max_steps: int | None = None,
) -> list[Run]:
    """Train runs side by side and return them in the order asked for.

    configs: RunConfigs, or (config, parent) pairs for forks; the same run asked for twice is
    trained once. max_steps: stop each there, resumable, its identity unchanged (see `train`).
    A run that fails is returned with status `failed` and its message. Ctrl-C stops
    all workers after their step, saved and resumable, and raises KeyboardInterrupt.
    Raises ValueError before anything starts if a config is bad.
    """
    store = store or RunStore()
    if workers < 1:
        raise ValueError(f"workers={workers}; use at least 1")
    jobs = [_job(item, store, cache_dir, progress, max_steps) for item in configs]
    todo = list({job.path: job for job in jobs if not _done(job)}.values())
    with tempfile.TemporaryDirectory() as scratch:
        running: list[_Job] = []
        told = _Teller(len(todo), progress)
        try:
            waiting = list(todo)
            while waiting or running:
                while waiting and len(running) < workers:
                    job = waiting.pop(0)
                    _start(job, store, threads, cache_dir, Path(scratch))
                    running.append(job)
                time.sleep(POLL_S)
                for job in [j for j in running if j.process.poll() is not None]:
                    running.remove(job)
                    _settle(job, told)
                told.line(running, len(waiting))
        except BaseException:  # Ctrl-C among them: no worker outlives the call
            _stop(running)
            raise
    return [Run(job.path) for job in jobs]


def _job(item, store: RunStore, cache_dir, progress: bool, max_steps: int | None) -> _Job:
    config, parent = item if isinstance(item, tuple) else (item, None)
    corpus = load_corpus(config, cache_dir, progress)
    return _Job(config, parent, store.path(config, corpus.sha256, parent), max_steps)


def _done(job: _Job) -> bool:
    if not (job.path / "status.json").exists():
        return False
    run = Run(job.path)
    enough = job.max_steps is not None and run.status == "interrupted"
    return run.status in ENDED or (enough and run.step >= job.max_steps)


def _start(job: _Job, store: RunStore, threads: int, cache_dir, scratch: Path) -> None:
    name = f"{len(list(scratch.iterdir()))}-{job.path.name[-12:]}"
    order = scratch / f"{name}.json"
    job.log = scratch / f"{name}.log"
    order.write_text(
        json.dumps(
            {
                "config": job.config.to_dict(),
                "parent": asdict(job.parent) if job.parent else None,
                "store": str(store.root),
                "threads": threads,
                "max_steps": job.max_steps,
                "cache_dir": str(cache_dir),
                "launcher": os.getpid(),
            }
        )
    )
    packages = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(job.log, "w") as log:
        job.process = subprocess.Popen(
            [sys.executable, "-m", "gpt2.many", str(order)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
        )


def _settle(job: _Job, told: _Teller) -> None:
    """A worker has ended: say how, and leave status `failed` even if it died without a word."""
    code = job.process.returncode
    if code == 0:
        told.say(f"{job.path.name}: {job.state()}")
        return
    words = job.log.read_text(errors="replace").strip().splitlines()
    last = words[-1] if words else f"exit code {code}"
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}"
    if not (job.path / "run.json").exists():
        raise RuntimeError(f"{job.path.name} could not start: {last}")
    if Run(job.path).state["status"] in ("running", "failed"):
        from .runs import RunWriter

        state = Run(job.path).state
        message = state["message"] if state["status"] == "failed" else last
        RunWriter(job.path).status("failed", state["step"], message, state["duration_s"])
    told.say(f"{job.path.name}: {Run(job.path).status}: {Run(job.path).message}")


def _stop(running: list[_Job]) -> None:
    """Ask every worker to save and end; kill those that do not within STOP_S."""
    for job in running:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    for job in running:
        try:
            job.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()


class _Teller:
    """At most one line of progress every `every` seconds, and one per run that ends."""

    def __init__(self, total: int, enabled: bool, every: float = 15.0):
        self.total, self.enabled, self.every = total, enabled, every
        self.done = 0
        self._last = time.monotonic()

    def say(self, sentence: str) -> None:
        self.done += 1
        if self.enabled:
            print(f"[{self.done}/{self.total}] {sentence}", flush=True)

    def line(self, running: list[_Job], waiting: int) -> None:
        if self.enabled and running and time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            parts = ", ".join(f"{j.config.attention} {j.state()}" for j in running)
            print(f"[{self.done}/{self.total}] {parts}; {waiting} waiting", flush=True)


def worker(order: dict) -> None:
    """Train one run in this process; stops by itself when its launcher is gone."""
    import torch

    from . import train as trainer

    torch.set_num_threads(order["threads"])
    trainer.train(
        RunConfig.from_dict(order["config"]),
        store=RunStore(order["store"]),
        parent=Parent(**order["parent"]) if order["parent"] else None,
        max_steps=order["max_steps"],
        threads=order["threads"],
        cache_dir=order["cache_dir"],
        progress=False,
        should_stop=lambda: None if os.getppid() == order["launcher"] else "launcher is gone",
    )


if __name__ == "__main__":
    try:
        worker(json.loads(Path(sys.argv[1]).read_text()))
    except KeyboardInterrupt:
        sys.exit(130)
