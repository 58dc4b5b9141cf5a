"""Train one run, or many: `python -m gpt2.train`, `train(config)`, `train_many(configs)`.

A run lives in a folder (`gpt2.runs`) whose name ends in a hash of all that determines it. Asking
for a finished run loads it, asking for an interrupted one continues it bit for bit. Divergence is
a result: the run ends cleanly, keeps its evidence, and the program exits 0; a crash exits
non-zero.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from . import hardware
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_newest,
    load_weights,
    read_weights,
)
from .config import ConfigParser, RunConfig, add_arguments, config_from_args
from .data import load_corpus
from .distributed import LOST_EXIT_CODE, Group, Watchdog, is_writer, join, leave
from .loop import Stopped, Trainer
from .many import train_many
from .progress import Progress, speed_text
from .runs import Parent, Run, RunError, RunStore, RunWriter

__all__ = ["train", "train_many", "Parent", "Run", "RunStore", "main"]

SMALL_WIDTH = 128  # up to this width one CPU thread is fastest
MOST_RECORDED = 16_000_000  # window starts kept in a run folder (64 MB)


def train(
    config: RunConfig,
    *,
    store: RunStore | None = None,
    progress: bool = True,
    parent: Parent | None = None,
    max_steps: int | None = None,
    threads: int | None = None,
    cache_dir: str | Path = "data",
    corpus=None,
    should_stop: Callable[[], str | None] | None = None,
) -> Run:
    """Train the run that `config` describes and return it, read from its folder.

    A run that has ended is loaded; one that was interrupted continues from its newest checkpoint.
    parent: start from that checkpoint of another run (a fork) or from weights.
    max_steps: stop after so many updates with a checkpoint and status `interrupted`; the run's
    identity does not change.
    threads: CPU threads; by default 1 for small models on a CPU. corpus: if loaded already.
    should_stop: asked after every step; a reason (text) stops the run, saved.
    Under torchrun all processes call this together.
    Raises KeyboardInterrupt after saving when asked to stop, ValueError for bad input, and
    whatever training raises, with status `failed`.
    """
    store = store or RunStore()
    device_type = config.device_type()
    group = join(device_type)
    device = _device(config, device_type, group)
    with _threads(config, device, threads):
        if corpus is None:
            corpus = group.first(lambda: load_corpus(config, cache_dir, progress))
        path = group.share(store.path(config, corpus.sha256, parent))
        if group.share(_complete(path, max_steps)):
            return Run(path)
        session = _Session(config, corpus, device, group, path, parent, progress)
        session.should_stop = should_stop or (lambda: None)
        session.run(min(max_steps or config.max_steps, config.max_steps))
    return Run(path)


def resume(path: str | Path, *, progress: bool = True, cache_dir="data", threads=None) -> Run:
    """Continue the run in a folder by its own recorded config. Raises RunError for a wrong path,
    or where this code, corpus or device type would make another run of it."""
    run = Run(path)
    config = run.config
    corpus = load_corpus(config, cache_dir, progress)
    store = RunStore(run.path.parent)
    expected = store.path(config, corpus.sha256, run.parent)
    if expected.name != run.path.name and not run.ended:
        raise RunError(
            f"{run.path} cannot be continued exactly: code, corpus or device type differ from "
            f"those it began with (id {run.id}, now {expected.name.rpartition('-')[2]}); "
            "train the same config anew"
        )
    if run.ended:
        return run
    return train(
        config, store=store, progress=progress, parent=run.parent, threads=threads, corpus=corpus
    )


def _complete(path: Path, max_steps: int | None) -> bool:
    """Whether nothing is left to do for the run at `path`."""
    if not (path / "run.json").exists() or not (path / "status.json").exists():
        return False
    run = Run(path)
    if run.ended:
        return True
    saved = run.checkpoints()
    return max_steps is not None and bool(saved) and saved[-1][0] == max_steps == run.step


def _device(config: RunConfig, device_type: str, group: Group) -> torch.device:
    """This process's device. Raises ValueError where the machine has none such."""
    wanted = torch.device(device_type if config.device == "auto" else config.device)
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (wanted.index or 0) >= there.get(device_type, 1):
        raise ValueError(
            f"device={config.device}: PyTorch sees {there[device_type]} {device_type} devices "
            "here; use device=auto or device=cpu"
        )
    if device_type == "cuda" and group.world > 1:
        return torch.device("cuda", group.local_rank)
    return wanted


@contextlib.contextmanager
def _threads(config: RunConfig, device: torch.device, threads: int | None):
    """Set CPU threads for the run and restore them; keep the caller's random state as well."""
    before = torch.get_num_threads()
    if threads is None and device.type == "cpu" and config.n_embd <= SMALL_WIDTH:
        threads = 1
    try:
        if threads:
            torch.set_num_threads(threads)
        with torch.random.fork_rng(enabled=config.dropout > 0):
            yield
    finally:
        torch.set_num_threads(before)


class _StopRequest:
    """SIGINT and SIGTERM ask for a stop after the step at hand; a second SIGINT stops at once."""

    def __init__(self):
        self.reason: str | None = None
        self._before: dict = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number, frame):
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = f"stopped by {signal.Signals(number).name}"

    def __exit__(self, *exc):
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Session:
    """One stretch of training of one run: from its newest state to an end, a stop or a failure."""

    def __init__(self, config, corpus, device, group, path: Path, parent, progress: bool):
        self.config, self.corpus, self.device, self.group = config, corpus, device, group
        self.path, self.parent = path, parent
        self.show = progress and group.writer
        self.writer: RunWriter | None = None
        self.trainer: Trainer | None = None
        self.began = time.monotonic()
        self.before_s = 0.0
        self.should_stop: Callable[[], str | None] = lambda: None

    def run(self, to_step: int) -> None:
        """Train to `to_step` updates; leaves a status behind whatever happens."""
        if self.group.writer:
            environment = hardware.environment(self.device, self.group.world)
            self.writer = RunWriter.open(
                self.path,
                self.config,
                {"sha256": self.corpus.sha256, **self.corpus.info},
                environment,
                self.parent,
            )
            if (self.path / "status.json").exists():
                self.before_s = Run(self.path).state.get("duration_s", 0.0)
            self.writer.status("running", 0, duration_s=self.before_s)
        watchdog = None
        if self.group.world > 1:
            watchdog = Watchdog(self.group, lambda text: self._status("interrupted", text))
        try:
            with _StopRequest() as request:
                self._train(to_step, request)
        except Stopped as stop:
            self._status("interrupted", stop.reason)
            raise KeyboardInterrupt(f"{stop.reason} at step {stop.step}; saved") from None
        except KeyboardInterrupt:
            self._status(
                "interrupted", "stopped at once; steps after the last checkpoint are lost"
            )
            raise
        except Exception as error:
            lost = watchdog.lost(patience_s=3) if watchdog else None
            if lost:
                print(lost, file=sys.stderr, flush=True)
                self._status("interrupted", lost)
                raise SystemExit(LOST_EXIT_CODE) from None
            self._status("failed", f"{type(error).__name__}: {error}")
            if self.writer:
                (self.path / "error.txt").write_text(traceback.format_exc())
            raise
        finally:
            if watchdog:
                watchdog.stop()
            if self.trainer:
                self.trainer.close()

    def _train(self, to_step: int, request: _StopRequest) -> None:
        config, group = self.config, self.group
        hardware.warn_about_precision(config.dtype, self.device)
        trainer = self.trainer = Trainer(
            config, self.corpus, self.device, group, self.path, self.writer
        )
        trainer.should_stop = lambda: request.reason or self.should_stop()
        trainer.restore(self._starting_point(trainer) if group.writer else None)
        if self.writer:
            self.writer.rewind(trainer.step)
        self._status("running")
        bar = Progress(to_step, trainer.step, self.show)
        bar.say(self._opening(trainer))
        trainer.on_flush = lambda row: self._report(bar, row)
        try:
            verdict = trainer.run(to_step)
        finally:
            bar.close()
        if verdict != "finished":
            trainer.end_probes(verdict)
        self._finish(verdict, bar)

    def _starting_point(self, trainer: Trainer) -> Checkpoint | None:
        """The checkpoint to start from: this run's newest, else the parent's, else none."""
        own = load_newest(self.path, self.device)
        if own is not None or self.parent is None:
            return own
        if self.parent.weights_only:
            load_weights(trainer.model, read_weights(self.parent.checkpoint))
            return trainer.snapshot()
        found = load_checkpoint(self.parent.checkpoint, self.device)
        if found.step != self.parent.step:
            raise CheckpointError(
                f"{self.parent.checkpoint} is of step {found.step}, not {self.parent.step}"
            )
        return found

    def _finish(self, verdict: str, bar: Progress) -> None:
        trainer, config = self.trainer, self.config
        if verdict == "finished" and trainer.step < config.max_steps:
            self._status("interrupted", f"stopped after {trainer.step} steps, as asked")
            return
        if not self.writer:
            return
        step = trainer.step if verdict == "finished" else trainer.tracker.verdict_step
        steps = min(step + 1, config.max_steps)
        more = {}
        if steps * config.batch_size <= MOST_RECORDED:
            more["batches_sha256"] = trainer.feed.index.save(self.path / "batches", steps)
        words = {"finished": f"finished {step} steps", "diverged": f"diverged at step {step}"}
        message = words.get(verdict, f"a number was not finite at step {step}")
        self._status(verdict, message, step=step, **more)
        bar.say(f"{message}: {self.path}")

    def _status(self, status: str, message: str = "", step: int | None = None, **more) -> None:
        if self.writer:
            if step is None:
                step = self.trainer.step if self.trainer else 0
            seconds = self.before_s + time.monotonic() - self.began
            if self.trainer:
                more["tracker"] = self.trainer.tracker.to_dict()
            self.writer.status(status, step, message, seconds, **more)

    def _opening(self, trainer: Trainer) -> str:
        config = self.config
        how = f"continues at step {trainer.step}" if trainer.step else "starts"
        n = trainer.model.count_parameters(positions=True)
        return (
            f"{self.path.name} {how}: {n:,} parameters, attention {config.attention!r}, "
            f"{config.tokens_per_step:,} tokens a step on {self.group.world} x "
            f"{hardware.device_name(self.device)}"
        )

    def _report(self, bar: Progress, row: dict) -> None:
        trainer = self.trainer
        speed = trainer.tokens_per_s or 0.0
        use = hardware.mfu(
            speed,
            trainer.flops_per_token,
            hardware.device_name(self.device),
            self.group.world,
        )
        held_out = trainer.held_out_loss
        parts = [
            f"loss {row['train_loss']:.3f}",
            f"held out {held_out:.3f}" if held_out is not None else "",
            f"|grad| {row['grad_norm']:.2g}",
            speed_text(speed),
            f"MFU {hardware.mfu_text(use)}",
        ]
        bar.update(row["step"] + 1, "  ".join(p for p in parts if p))
        self._status("running")


# -- command line ---------------------------------------------------------------------------------

EPILOG = """\
examples:
  python -m gpt2.train                                         the cpu preset, about a minute
  python -m gpt2.train --attention exact                       its exact twin on the same batches
  python -m gpt2.train --preset mini --attention paper,delta_output=fp32
  python -m gpt2.train --preset cpu --order_seed 1 --max_steps 500
  python -m gpt2.train --resume runs/cpu-...                   continue exactly
  torchrun --standalone --nproc_per_node=4 -m gpt2.train --preset paper
"""


def parser() -> ConfigParser:
    p = ConfigParser(
        prog="python -m gpt2.train",
        usage="%(prog)s [--preset NAME] [--KEY VALUE ...]",
        description="Train one GPT-2 run into a folder of its own. The same command again loads\n"
        "a finished run and continues an interrupted one, bit for bit.",
        epilog=EPILOG,
    )
    group = p.add_argument_group("this program")
    group.add_argument("--store", default="runs", metavar="DIR", help="where runs lie (runs)")
    group.add_argument("--data", default="data", metavar="DIR", help="corpus cache (data)")
    group.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    group.add_argument(
        "--weights", metavar="PATH", help="start from these GPT-2 weights (ours, HF, nanoGPT)"
    )
    group.add_argument("--stop_at", type=int, metavar="STEP", help="save and stop there")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument("--quiet", action="store_true", help="no progress")
    add_arguments(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 for any outcome, 1 for a failure, 2 for bad input, 130 if stopped."""
    args = parser().parse_args(argv)
    common = dict(progress=not args.quiet, cache_dir=args.data, threads=args.threads)
    try:
        if args.resume:
            run = resume(args.resume, **common)
        else:
            config = config_from_args(args)
            common["parent"] = Parent.from_weights(args.weights) if args.weights else None
            run = train(config, store=RunStore(args.store), max_steps=args.stop_at, **common)
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError) as error:
        if is_writer():
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        leave()
    if not args.quiet and is_writer():
        print(f"{run.status}: {run.outcome}\n{run.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
