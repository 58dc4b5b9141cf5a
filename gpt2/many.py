"""Several runs at once, each in a process of its own with its own thread: `train_many`, `Pool`.

Small models are fastest on one thread, so N cores train N runs; on a GPU they wait for launches
from the host, so several of them can share it. Workers are fresh interpreters (no fork, no import
of the caller's script), which works the same from notebooks and on every system.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .config import RunConfig
from .data import load_corpus
from .hardware import visible
from .runs import ENDED, Parent, Run, RunStore, RunWriter

POLL_S = 0.2
STOP_S = 30.0  # for a worker to save after it was asked to stop
# Settings that say which corpus a run has, and those that are checked against it.
CORPUS_SETTINGS = (
    *("corpus", "corpus_max_bytes", "tokenizer", "held_out_fraction"),
    *("vocab_size", "block_size"),
)


@dataclass(eq=False)
class Job:
    """A run asked of a `Pool`.

    tokens: folder of its corpus, None for the worker to look it up. error: why its worker could
    not even begin the run's folder.
    """

    config: RunConfig
    parent: Parent | None
    path: Path
    max_steps: int | None = None
    device: str | None = None
    process: subprocess.Popen | None = None
    log: Path | None = None
    tokens: Path | None = None
    error: str = ""

    def state(self) -> str:
        """'400/2500', or the status of a run that does not run, for the progress line."""
        try:
            run = Run(self.path)
            state = run.state
        except ValueError:
            return "starting"
        if state["status"] == "running":
            return f"{state['step']}/{self.max_steps or self.config.max_steps}"
        return state["status"]

    @property
    def done(self) -> bool:
        """Whether the run has ended, or has been paused at `max_steps` or later."""
        if not (self.path / "status.json").exists():
            return False
        run = Run(self.path)
        enough = self.max_steps is not None and run.status == "interrupted"
        return run.status in ENDED or (enough and run.step >= self.max_steps)


def train_many(
    configs: Sequence[RunConfig | tuple[RunConfig, Parent]],
    *,
    store: RunStore | None = None,
    workers: int = 2,
    threads: int = 1,
    devices: Sequence[str] = (),
    progress: bool = True,
    cache_dir: str | Path = "data",
    max_steps: int | None | Sequence[int | None] = None,
) -> list[Run]:
    """Train runs side by side and return them in the order asked for.

    configs: RunConfigs, or (config, parent) pairs for forks; the same run asked for twice is
    trained once. devices: as for `Pool`. max_steps: stop each there, resumable, its identity
    unchanged (see `train`); one for all, or one for each. A run that fails is returned with status
    `failed` and its message. Ctrl-C stops all workers after their step, saved and resumable, and
    raises KeyboardInterrupt. Raises ValueError before anything starts if a config or a device is
    bad.
    """
    common = dict(workers=workers, threads=threads, devices=devices, cache_dir=cache_dir)
    with Pool(store or RunStore(), **common) as pool:
        asked = [item if isinstance(item, tuple) else (item, None) for item in configs]
        single = max_steps is None or isinstance(max_steps, int)
        stops = [max_steps] * len(asked) if single else max_steps
        jobs = [
            pool.job(*item, max_steps=stop, progress=progress)
            for item, stop in zip(asked, stops, strict=True)
        ]
        waiting = list({job.path: job for job in jobs if not job.done}.values())
        told = Teller(len(waiting), progress)
        pool.work(
            lambda: waiting.pop(0) if waiting else None,
            lambda job: told.say(_told(job)),
            lambda: told.line(pool.running, len(waiting)),
        )
    return [Run(job.path) for job in jobs]


def _told(job: Job) -> str:
    """How a run ended. Raises RuntimeError if it could not even begin."""
    if job.error:
        raise RuntimeError(f"{job.path.name} could not start: {job.error}")
    run = Run(job.path)
    return f"{job.path.name}: {run.status}" + (
        f": {run.message}" if run.status == "failed" else ""
    )


class Pool:
    """Worker processes that train runs, at most `workers` at a time.

    devices: such as ("cuda:0", "cuda:1"): workers are spread evenly, each sees its own GPU alone;
    empty leaves the choice to each config. Which of several GPUs it is does not enter a run's
    identity. Leaving the context stops what still runs, saved and resumable.
    Raises ValueError for fewer than one worker and for a device that this machine lacks.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        workers: int = 2,
        threads: int = 1,
        devices: Sequence[str] = (),
        cache_dir: str | Path = "data",
    ):
        if workers < 1:
            raise ValueError(f"workers={workers}; use at least 1")
        self.store, self.workers, self.threads = store, workers, threads
        self.devices, self.cache_dir = tuple(devices), cache_dir
        for device in self.devices:
            visible(device)
        self.running: list[Job] = []
        self._corpora: dict[tuple, tuple[str, Path]] = {}

    def __enter__(self) -> Pool:
        self._scratch = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *exc) -> None:
        _stop(self.running)
        self._scratch.cleanup()

    @property
    def free(self) -> int:
        """How many workers could start now."""
        return self.workers - len(self.running)

    def job(
        self,
        config: RunConfig,
        parent: Parent | None = None,
        *,
        max_steps: int | None = None,
        progress: bool = True,
    ) -> Job:
        """The job of a run, not started. Prepares its corpus; raises ValueError for a bad one."""
        for device in self.devices:
            if device.partition(":")[0] != config.device_type():
                raise ValueError(
                    f"device={config.device} of the run cannot be {device}; "
                    "set device=auto in its config or choose other devices"
                )
        sha256, tokens = self._corpus(config, progress)
        path = self.store.path(config, sha256, parent)
        return Job(config, parent, path, max_steps, tokens=tokens)

    def _corpus(self, config: RunConfig, progress: bool) -> tuple[str, Path]:
        """(sha256, folder of its tokens), looked up once for equal settings.

        To walk over all installed text takes seconds.
        """
        settings = tuple(getattr(config, name) for name in CORPUS_SETTINGS)
        if settings not in self._corpora:
            found = load_corpus(config, self.cache_dir, progress)
            self._corpora[settings] = found.sha256, found.folder.path
        return self._corpora[settings]

    def work(
        self,
        following: Callable[[], Job | None],
        ended: Callable[[Job], None],
        waited: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the workers busy until nothing runs and there is nothing to start.

        following: the job to start next, None where none may start now; asked while a worker is
        free. ended: called with each job whose worker has ended. waited: called every POLL_S,
        when all that may start has started.
        """
        while True:
            while self.free and (job := following()) is not None:
                self.start(job)
            if not self.running:
                return
            waited()
            for job in self.ended():
                ended(job)

    def start(self, job: Job) -> None:
        """Start a job's worker, on the device with the fewest runs."""
        if self.devices:
            used = [running.device for running in self.running]
            job.device = min(self.devices, key=used.count)
        _start(job, self.store, self.threads, self.cache_dir, Path(self._scratch.name))
        self.running.append(job)

    def ended(self) -> list[Job]:
        """Wait a moment; the jobs whose workers have ended since, taken off `running`."""
        time.sleep(POLL_S)
        found = [job for job in self.running if job.process.poll() is not None]
        for job in found:
            self.running.remove(job)
            _settle(job)
        return found


def _start(job: Job, store: RunStore, threads: int, cache_dir, scratch: Path) -> None:
    name = f"{len(list(scratch.iterdir()))}-{job.path.name[-12:]}"
    order = scratch / f"{name}.json"
    job.log = scratch / f"{name}.log"
    config = job.config.to_dict()
    if job.device:
        config["device"] = job.config.device_type()  # the only one that the worker sees
    order.write_text(
        json.dumps(
            {
                "config": config,
                "parent": asdict(job.parent) if job.parent else None,
                "store": str(store.root),
                "threads": threads,
                "max_steps": job.max_steps,
                "cache_dir": str(cache_dir),
                "tokens": str(job.tokens) if job.tokens else None,
                "launcher": os.getpid(),
            }
        )
    )
    packages = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    environment |= visible(job.device) if job.device else {}
    with open(job.log, "w") as log:
        job.process = subprocess.Popen(
            [sys.executable, "-m", "gpt2.many", str(order)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
        )


def _settle(job: Job) -> None:
    """A worker has ended: leave status `failed` even if it died without a word."""
    code = job.process.returncode
    if code == 0:
        return
    words = job.log.read_text(errors="replace").strip().splitlines()
    last = words[-1] if words else f"exit code {code}"
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}"
    if not (job.path / "run.json").exists():
        job.error = last
        return
    state = Run(job.path).state
    if state["status"] in ("running", "failed"):
        message = state["message"] if state["status"] == "failed" else last
        RunWriter(job.path).status("failed", state["step"], message, state["duration_s"])


def _stop(running: list[Job]) -> None:
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


def shortened(attention: str, most: int = 60) -> str:
    """Numerics in a line of progress or a table: of long ones what the first layers have."""
    return attention if len(attention) <= most else f"{attention.split('; ')[0]}; ..."


class Teller:
    """At most one line of progress every `every` seconds, and one per run that ends."""

    def __init__(self, total: int, enabled: bool, every: float = 15.0):
        self.total, self.enabled, self.every = total, enabled, every
        self.done = 0
        self._last = time.monotonic()

    def say(self, sentence: str) -> None:
        self.done += 1
        if self.enabled:
            print(f"[{self.done}/{self.total}] {sentence}", flush=True)

    def line(self, running: list[Job], waiting: int) -> None:
        if self.enabled and running and time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            parts = ", ".join(f"{shortened(j.config.attention)} {j.state()}" for j in running)
            print(f"[{self.done}/{self.total}] {parts}; {waiting} waiting", flush=True)


def worker(order: dict) -> None:
    """Train one run in this process; stops by itself when its launcher is gone."""
    import torch

    from . import train as trainer

    torch.set_num_threads(order["threads"])
    config, corpus = RunConfig.from_dict(order["config"]), None
    if order["tokens"]:  # the launcher has found them, by a walk over all text that takes seconds
        of_tokens = replace(config, corpus=f"bin:{order['tokens']}")
        corpus = load_corpus(of_tokens, order["cache_dir"], progress=False)
    trainer.train(
        config,
        corpus=corpus,
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
