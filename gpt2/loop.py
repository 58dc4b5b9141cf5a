"""The training loop: what happens around optimiser steps (`gpt2.step`), and exact resume.

Step s is the update number s, from 0. At the top of step s the weights have seen s updates; there,
in this order: checkpoint, held-out loss, probes, then forward, backward, clipping, update. A row
of metrics with "train_loss" is the loss of batch s before its update.

Losses stay on the device and are read every few steps (`flush`), so the divergence rule sees every
loss but up to `flush_every` steps late; rows after a verdict are dropped. All randomness is a
function of (seeds, step): batches, dropout and stochastic rounding need no saved random state, and
evaluation cannot disturb it.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from . import hardware
from .checkpoint import Checkpoint, load_weights, prune, save_checkpoint
from .config import RunConfig
from .distributed import Group
from .outcomes import OutcomeTracker
from .probes import ProbeContext, Probes
from .runs import RunWriter
from .seeds import mix
from .step import Stepper

LEAST_ROWS = 50_000  # from twice as many steps on, a run logs every second, third... loss


class Stopped(Exception):
    """Training was asked to stop; the state is saved. `step` updates are done."""

    def __init__(self, step: int, reason: str):
        super().__init__(reason)
        self.step, self.reason = step, reason


def flush_interval(config: RunConfig, device: torch.device) -> int:
    """Steps between host reads of the losses: alike on every process, about a second on a GPU."""
    if device.type != "cuda":
        return 10
    return max(1, min(200, 4_000_000 // config.tokens_per_step))


class Trainer(Stepper):
    """Everything that one run holds in memory. `run(to_step)` trains; see `gpt2.train.train`.

    writer is None on processes that do not write. Raises ValueError for a batch that does not
    divide over the processes.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus,
        device: torch.device,
        group: Group,
        run_dir: Path,
        writer: RunWriter | None = None,
    ):
        super().__init__(config, corpus, device, group)
        self.run_dir, self.writer = run_dir, writer
        self.probes = Probes(config, run_dir)  # every process knows when, the writer measures
        self.tracker = OutcomeTracker()
        self.skipped = 0
        self.flush_every = flush_interval(config, device)
        self.log_every = max(1, config.max_steps // LEAST_ROWS)
        self.should_stop = lambda: None
        self.on_flush = lambda row: None
        self._clock = time.perf_counter()
        self.tokens_per_s: float | None = None
        self.held_out_loss: float | None = None

    # -- around the steps -------------------------------------------------------------------------

    def run(self, to_step: int) -> str:
        """Train until `to_step` updates are done; "finished", "diverged" or "nonfinite".

        Raises Stopped after saving a checkpoint if `should_stop()` gives a reason.
        """
        config, start = self.config, self.step
        self._clock = time.perf_counter()
        update = self.first_update
        while self.step < to_step:
            step = self.step
            verdict = self._before(step, save=step > start)
            if verdict:
                return verdict
            context = self._probe_before(step)
            update(step)
            update = self.update
            self.step = step + 1
            if context is not None:
                self._probe_after(context)
            if len(self._pending) >= self.flush_every:
                verdict = self.flush()
                if verdict:
                    return verdict
            verdict = self._stop_if_asked()
            if verdict:
                return verdict
        verdict = self.flush()
        if verdict:
            return verdict
        if self.step > start:
            self.save()
        if self.step >= config.max_steps:
            self._evaluate(self.step)
        return "finished"

    def _before(self, step: int, save: bool) -> str | None:
        config = self.config
        due_save = save and step % config.checkpoint_interval == 0
        due_eval = step % config.eval_interval == 0
        if due_save or due_eval or self.probes.due(step):
            verdict = self.flush()
            if verdict:
                return verdict
        if due_save:
            self.save()
        if due_eval:
            self._evaluate(step)
        return None

    def _stop_if_asked(self) -> str | None:
        """Alone: at any step. In a group: together, at a flush. A verdict comes before a stop."""
        if self.group.world > 1 and self._pending:
            return None
        reason = self.should_stop()
        if self.group.world > 1:
            asked = torch.tensor(float(reason is not None), device=self.device)
            if self.group.max_(asked).item():
                reason = reason or "another process was asked to stop"
        if reason is None:
            return None
        verdict = self.flush()
        if verdict is None:
            self.save()
            raise Stopped(self.step, reason)
        return verdict

    def flush(self) -> str | None:
        """Read the pending losses, apply the divergence rule, write rows. The verdict, if any."""
        if not self._pending:
            return self.tracker.verdict
        steps, losses, norms, rates = zip(*self._pending)
        self._pending = []
        summed = self.group.sum_(torch.stack(losses))
        losses, norms = torch.stack([summed, torch.stack(norms)]).tolist()
        now = time.perf_counter()
        self.tokens_per_s = len(steps) * self.config.tokens_per_step / (now - self._clock)
        self._clock = now
        scaled = self.scaler.is_enabled()
        rows, verdict = [], None
        for step, loss, norm, rate in zip(steps, losses, norms, rates):
            row = {"step": step, "train_loss": loss, "grad_norm": norm, "lr": rate}
            if scaled:
                self.skipped += not _finite(norm)
                row["skipped_steps"] = self.skipped
            verdict = self.tracker.update(step, loss, None if scaled else norm)
            if step % self.log_every == 0 or verdict:
                rows.append(row)
            if verdict:
                break
        if rows:
            rows[-1]["tokens_per_s"] = round(self.tokens_per_s, 1)
            self._write(rows)
        self.on_flush(row)
        return verdict

    def _write(self, rows: list[dict]) -> None:
        if self.writer:
            self.writer.write(rows)

    def _pause_clock(self, work):
        """Run `work` without its time counting against tokens per second."""
        began = time.perf_counter()
        try:
            return work()
        finally:
            self._clock += time.perf_counter() - began

    def _evaluate(self, step: int) -> None:
        self.held_out_loss = self._pause_clock(self.held_out)
        self._write([{"step": step, "held_out_loss": self.held_out_loss}])

    @torch.no_grad()
    def held_out(self) -> float:
        """Mean loss over evenly spaced held-out windows; draws from no random state."""
        self.model.eval()
        starts = self.corpus.evaluation_starts(self.config).reshape(-1)
        starts = starts[self.group.rank :: self.group.world]
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for i in range(0, len(starts), self.micro):
            x, y = self.corpus.batch(
                "held_out", starts[i : i + self.micro], self.config.block_size
            )
            x, y = x.to(self.device), y.to(self.device)
            seed = mix(self.config.init_seed, i) if self.stochastic else 0
            with self.autocast():
                _, loss = self.model(x, y, denominator=1, seed=seed)
            total += torch.stack([loss.double(), torch.tensor(float(y.numel())).to(total)])
        self.model.train()
        loss, count = self.group.sum_(total).tolist()
        return loss / count

    # -- probes -----------------------------------------------------------------------------------

    def _context(self, step: int) -> ProbeContext:
        x, y = self.feed.batch(step)
        return ProbeContext(
            model=self.model,
            config=self.config,
            step=step,
            x=x[: self.micro],
            y=y[: self.micro],
            optimizer=self.optimizers,
            run_dir=self.run_dir,
            corpus=self.corpus,
            autocast=self.autocast,
            full_batch=lambda: self.feed.batch(step),
        )

    def may_capture(self, step: int) -> bool:
        """Not while a probe keeps a forward pass of its own (see `Stepper.may_capture`)."""
        return not self.probes.due(step)

    def _probe_before(self, step: int) -> ProbeContext | None:
        if self.writer is None or not self.probes.due(step):
            return None
        context = self._context(step)
        context.metrics.update(self._pause_clock(lambda: self.probes.before_update(context)))
        return context

    def _probe_after(self, context: ProbeContext) -> None:
        _, loss, norm, _ = self._pending[-1]
        context.scratch.update(train_loss=loss, grad_norm=norm)
        context.metrics.update(self._pause_clock(lambda: self.probes.after_update(context)))
        if context.metrics:
            self._write([{"step": context.step, **context.metrics}])

    def end_probes(self, status: str) -> None:
        """Let probes keep evidence of a run that ended by divergence or a nonfinite number."""
        if self.writer is not None:
            step = self.tracker.verdict_step
            row = self.probes.on_end(self._context(self.step), status, step)
            if row:
                self._write([{"step": step, **row}])

    # -- state ------------------------------------------------------------------------------------

    def save(self) -> Path | None:
        """Write a checkpoint of the state after `self.step` updates and prune old ones."""
        if self.writer is None:
            return None
        return self._pause_clock(self._save)

    def snapshot(self) -> Checkpoint:
        """The state after `self.step` updates; tensors are the live ones, not copies."""
        state = {
            "tracker": self.tracker.to_dict(),
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped,
            "world_size": self.group.world,
        }
        weights = {k: v.detach() for k, v in self.model.named_parameters()}
        return Checkpoint(self.step, self.run_dir, weights, self.optimizers.state_tensors(), state)

    def _save(self) -> Path:
        now = self.snapshot()
        path = save_checkpoint(self.run_dir, now.step, now.model, now.optimizer, now.state)
        prune(self.run_dir, self.config.keep_checkpoints, self.tracker.above_since)
        return path

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Take up a checkpoint (rank 0's, given to all processes). Raises CheckpointError."""
        found = checkpoint is not None
        head = self.group.share((checkpoint.step, checkpoint.state) if found else None)
        if head is None:
            return
        self.step, state = head
        weights = self.group.share_tensors(checkpoint.model if found else None, self.device)
        moments = self.group.share_tensors(checkpoint.optimizer if found else None, self.device)
        self.graph = None  # the optimiser's state gets other memory
        load_weights(self.model, weights)
        self.optimizers.load_state_tensors(moments)
        self.tracker = OutcomeTracker.from_dict(state["tracker"])
        self.skipped = state["skipped"]
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    @property
    def flops_per_token(self) -> float:
        c = self.config
        n = self.model.count_parameters()
        return hardware.flops_per_token(n, c.n_layer, c.n_head, c.head_dim, c.block_size)

    def close(self) -> None:
        self.graph = None  # and the memory that it holds
        self.feed.close()
        if self.writer:
            self.writer.close()


def _finite(value: float) -> bool:
    return value - value == 0.0
