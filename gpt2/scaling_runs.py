"""The training runs that `gpt2.scaling` compares: which they are, and each trained once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .bench import VOCABULARY
from .children import ChildError, Machine
from .config import RunConfig, changes_from_preset, make_config, parse_assignments
from .runs import Run, RunStore

NEVER = 1_000_000  # an interval that no run here reaches


@dataclass(frozen=True)
class Study:
    """The runs that the parts are made of: a small model for many steps, a large one for few."""

    small: RunConfig
    large: RunConfig
    probe_step: int
    bench: tuple[tuple[str, str, tuple[str, ...]], ...]  # preset, numerics, changes


def study(
    device: str, corpus: str, numerics: Sequence[str] = (), changes: Sequence[str] = ()
) -> Study:
    """numerics: whose speed is measured; by default flash and paper, on a CPU exact and paper.

    changes: settings of the models whose speed is measured, such as "compile=blocks". Raises
    ValueError for numerics or a setting that there is not.
    """
    common = dict(
        corpus=corpus,
        tokenizer="bytes",
        device=device,
        held_out_fraction=0.05,
        eval_interval=NEVER,
        eval_batches=1,
        probe_interval=NEVER,
    )
    if device == "cpu":
        toy = dict(n_embd=32, block_size=32, batch_size=8, warmup_steps=5, max_steps=100)
        toy |= dict(corpus_max_bytes=400_000, checkpoint_interval=10, probes=_probes(50))
        toy |= dict(learning_rate=1e-3)
        small = make_config("cpu", common | toy)
        sizes = tuple(f"{k}={toy[k]}" for k in ("n_embd", "block_size", "batch_size"))
        large = small.at(micro_batch_size=1, max_steps=8, probes=())
        return Study(
            small, large, 50, _bench(small, numerics or ("exact", "paper"), (*sizes, *changes))
        )
    # Compiling takes longer than the steps that these runs have. The large one warms up within
    # them, so that its weights move and differences can grow.
    small = dict(vocab_size=VOCABULARY["mini"], max_steps=200, checkpoint_interval=50)
    small |= dict(compile="off", probes=_probes(100))
    large = dict(vocab_size=50_304, max_steps=20, warmup_steps=10, checkpoint_interval=NEVER)
    large |= dict(compile="off")
    corpus_part = dict(corpus_max_bytes=8_000_000)
    small = make_config("mini", common | small | corpus_part)
    large = make_config("gpt2s", common | large | corpus_part)
    return Study(small, large, 100, _bench(large, numerics or ("flash", "paper"), tuple(changes)))


def _bench(config: RunConfig, numerics: Sequence[str], changes: tuple[str, ...]) -> tuple:
    """`Study.bench`, one entry for each numerics; the config refuses what it does not know."""
    make_config(config.preset, parse_assignments(changes))
    timed = (config.at(attention=name).attention for name in numerics)
    return tuple((config.preset, name, changes) for name in timed)


def _probes(step: int) -> tuple[str, ...]:
    return f"delta_error@{step}", f"weight_gradient_error@{step}"


def options(config: RunConfig) -> list[str]:
    """Command-line options of gpt2.train that make this config."""
    out = [f"--preset={config.preset}"]
    for key, value in changes_from_preset(config).items():
        text = ",".join(value) if isinstance(value, (list, tuple)) else value
        out.append(f"--{key}={'none' if text is None or text == '' else text}")
    return out


class Runs:
    """Training runs by name; each is trained once, and asked for by whichever part needs it."""

    def __init__(self, machine: Machine, study: Study):
        self.machine, self.study = machine, study
        small, large = study.small, study.large
        share = small.batch_size // machine.processes
        n = machine.processes
        self.configs: dict[str, tuple[RunConfig, int]] = {
            "small, alone": (small, 1),
            "small, alone in passes": (small.at(micro_batch_size=share), 1),
            "small, together": (small, n),
            "small, bf16 sums": (small.at(grad_reduce_dtype="bfloat16"), n),
            "large, alone": (large, 1),
            "large, together": (large, n),
        }
        self._done: dict[str, Run | ChildError] = {}

    def arguments(self, name: str, config: RunConfig) -> list[str]:
        out = ["--store", str(self.store(name).root), "--data", str(self.machine.work / "data")]
        return [*out, "--quiet", "--threads=1", *options(config)]

    def store(self, name: str) -> RunStore:
        return RunStore(self.machine.work / slug(name))

    def get(self, name: str, device_index: int | None = None) -> Run:
        """Raises ChildError, each time it is asked for, for a run that failed."""
        if name not in self._done:
            config, processes = self.configs[name]
            if device_index is not None and config.device == "cuda":
                config = config.at(device=f"cuda:{device_index}")
            arguments = self.arguments(name, config)
            try:
                self.machine.run(slug(name), "gpt2.train", arguments, processes)
                (self._done[name],) = self.store(name).runs()
            except ChildError as error:
                self._done[name] = error
        found = self._done[name]
        if isinstance(found, ChildError):
            raise found
        return found

    def prepare_alone(self) -> None:
        """Train the runs of one process side by side, one device each."""
        alone = ["large, alone"], ["small, alone", "small, alone in passes"]

        def several(place: int) -> None:
            for name in alone[place]:
                try:
                    self.get(name, place % self.machine.processes)
                except ChildError:
                    continue  # kept; raised where the run is asked for

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(several, range(2)))


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)
