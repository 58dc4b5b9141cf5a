"""Training throughput: `python -m gpt2.bench` prints tokens/s, MFU and peak memory, one table.

Each row trains a preset's model on synthetic tokens with one attention implementation: forward,
backward, clipping and update, as `gpt2.step` does them, compiled and launched as a CUDA graph
where that works (`--set cuda_graph=off` for without). The first few steps (compilation, capture)
are not timed. Times come from the device's own events, so that timing adds no sync.

    python -m gpt2.bench --json throughput.json
    python -m gpt2.bench --presets gpt2s --implementations flash,paper --limit-s 120
    torchrun --standalone --nproc_per_node=2 -m gpt2.bench --presets gpt2s
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from . import hardware
from .batches import BatchIndex, evaluation_starts
from .config import RunConfig, make_config, parse_assignments
from .distributed import Group, join, leave
from .loop import Trainer

IMPLEMENTATIONS = ("flash", "paper", "sdpa")
PRESETS = ("mini", "gpt2s", "gpt2m")
WARMUP = 3
MEASURE_S = 6.0  # per row, at least 3 steps
VOCABULARY = {"cpu": 256, "mini": 8192}


@dataclass
class SyntheticCorpus:
    """Random tokens behind the corpus's interface: throughput does not depend on what they say."""

    vocab_size: int
    n: int = 2**21
    sha256: str = "synthetic"
    info: dict = field(default_factory=lambda: {"source": "synthetic"})

    def __post_init__(self):
        draw = np.random.default_rng(0)
        self.train = draw.integers(0, self.vocab_size, self.n).astype(np.uint16)
        self.held_out = self.train[: 2**16]

    def batch_index(self, config: RunConfig) -> BatchIndex:
        return BatchIndex(self.n, config.block_size, config.batch_size, config.order_seed)

    def evaluation_starts(self, config: RunConfig) -> np.ndarray:
        return evaluation_starts(len(self.held_out), config.block_size, config.batch_size, 1)


class StepTimer:
    """Milliseconds of each step, from CUDA events on a GPU."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def times(self) -> list[float]:
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def alone_ms(device: torch.device, work, repeats: int = 5) -> float:
    """Median milliseconds of `work()` by itself, after one call that is not timed."""
    work()
    timer = StepTimer(device)
    timer.mark()
    for _ in range(repeats):
        work()
        timer.mark()
    return statistics.median(timer.times())


def undivided_ms(trainer: Trainer) -> dict[str, float]:
    """Times of what does not shrink with the number of processes: summing gradients, updating."""
    gradient, config = trainer.optimizers.gradient, trainer.config

    def update():
        gradient.clip(config.grad_clip)
        trainer.optimizers.step()

    def reduce():
        trainer.group.sum_(gradient.buffer, config.grad_reduce_dtype)

    return {
        "reduce_ms": alone_ms(trainer.device, reduce) if trainer.group.world > 1 else 0.0,
        "update_ms": alone_ms(trainer.device, update),
    }


def measure(
    preset: str, implementation: str, group: Group, device: torch.device, overrides: dict
) -> dict:
    """One row: train `preset` with `implementation` for a few seconds."""
    config = make_config(preset, {"attention": implementation, "corpus": "installed-text"})
    config = config.at(**overrides)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    corpus = SyntheticCorpus(VOCABULARY.get(preset, 50304))
    trainer = Trainer(config, corpus, device, group, Path("."))
    began = time.perf_counter()
    trainer.first_update(0)
    for step in range(1, WARMUP):
        trainer.update(step)
    trainer.flush()
    compile_s = time.perf_counter() - began
    began = time.perf_counter()
    trainer.update(WARMUP)
    trainer.flush()
    one = time.perf_counter() - began
    steps = int(group.share(max(3, min(200, MEASURE_S / one))))
    timer = StepTimer(device)
    timer.mark()
    for step in range(WARMUP + 1, WARMUP + 1 + steps):
        trainer.update(step)
        timer.mark()
    times = timer.times()
    trainer.flush()
    p20, _, _, p80 = statistics.quantiles(times, n=5)
    speed = config.tokens_per_step / (1e-3 * statistics.mean(times))
    name = hardware.device_name(device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "preset": preset,
        "implementation": implementation,
        "tokens_per_s": round(speed, 1),
        "mfu": hardware.mfu(speed, trainer.flops_per_token, name, group.world),
        "peak_bytes": peak,
        "n_gpu": group.world if device.type == "cuda" else 0,
        "processes": group.world,
        "step_ms": {"p20": p20, "p50": statistics.median(times), "p80": p80, "steps": steps},
        "tokens_per_step": config.tokens_per_step,
        "micro_batch": trainer.micro,
        "dtype": config.dtype,
        "compiled": trainer.compiled,
        "by_block": trainer.compiled and config.compile == "blocks",
        "cuda_graph": trainer.graph is not None,
        "grad_reduce_dtype": config.grad_reduce_dtype,
        "parameters": trainer.model.count_parameters(positions=True),
        "warmup_s": round(compile_s, 1),
        **undivided_ms(trainer),
    }


def table_line(row: dict) -> str:
    if "error" in row:
        return f"{row['preset']:8} {row['implementation']:16} {row['error']}"
    peak = row["peak_bytes"]
    memory = "n/a" if peak is None else f"{peak / 2**30:.1f} GiB"
    return (
        f"{row['preset']:8} {row['implementation']:16} {row['tokens_per_s']:>12,.0f} "
        f"{hardware.mfu_text(row['mfu']):>8} {memory:>10} {row['step_ms']['p50']:>10.1f} "
        f"{row['processes']:>5} {'yes' if row['cuda_graph'] else 'no':>5}"
    )


HEAD = f"{'preset':8} {'attention':16} {'tokens/s':>12} {'MFU':>8} {'memory':>10} "
HEAD += f"{'step ms':>10} {'procs':>5} {'graph':>5}"


def bench(presets, implementations, *, limit_s: float, overrides: dict, say=None) -> dict:
    """Every combination until `limit_s` is used up; rows not run say so, failures too. {} on
    processes that do not report."""
    say = say or functools.partial(print, flush=True)
    began = time.monotonic()
    device_type = make_config(presets[0], overrides).device_type()
    group = join(device_type)
    device = torch.device(device_type, group.local_rank if device_type == "cuda" else None)
    rows = []
    if group.writer:
        say(HEAD)
    for preset in presets:
        for implementation in implementations:
            row = {"preset": preset, "implementation": implementation}
            if group.share(time.monotonic() - began) > limit_s:
                row["error"] = f"not run: the limit of {limit_s:.0f} s was reached"
            else:
                try:
                    row = measure(preset, implementation, group, device, overrides)
                except (RuntimeError, ValueError) as error:
                    if group.world > 1:
                        raise
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            rows.append(row)
            if group.writer:
                say(table_line(row))
    environment = hardware.environment(device, group.world)
    leave()
    found = {"what": "training throughput", "environment": environment, "rows": rows}
    return found if group.writer else {}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m gpt2.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--presets", default=",".join(PRESETS), help="default: %(default)s")
    p.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help="any numerics")
    p.add_argument("--json", metavar="PATH", help="also write rows and provenance there")
    p.add_argument("--limit-s", type=float, default=480.0, help="start no row after this")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="config change")
    args = p.parse_args(argv)
    try:
        result = bench(
            args.presets.split(","),
            args.implementations.split(","),
            limit_s=args.limit_s,
            overrides=parse_assignments(args.set),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json and result:
        Path(args.json).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
