"""Probes on a run's weights at one of its checkpoints, under its own attention or any other.

    python -m gpt2.examine runs/... --step 250 --probes delta_answer,tie_rate
    python -m gpt2.examine runs/... --step 250 --probes delta_answer --attention paper

The same weights and the same batches, so that what differs between two calls is the attention's
doing alone: how an error depends on the bits, or what a run in bf16 would show under fp32. The
batches are those that the run was trained on next. Nothing of the run is changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from .checkpoint import load_weights, read_weights
from .data import Corpus, load_corpus
from .model import GPT
from .probe_registry import ProbeContext
from .probes import REGISTRY, parse_spec, run_probes
from .runs import Run, row_text
from .step import autocast


def checkpoint_at(run: Run, step: int) -> Path:
    """The folder of a run's checkpoint. Raises ValueError naming the steps that there are."""
    saved = dict(run.checkpoints())
    if step not in saved:
        known = ", ".join(f"{s:,}" for s in sorted(saved)) or "none"
        raise ValueError(f"{run.path} has no checkpoint at step {step:,}; there are: {known}")
    return saved[step]


def examine(
    run: Run,
    step: int,
    probes: Sequence[str],
    *,
    attention: str | None = None,
    batches: int = 20,
    cache_dir: str | Path = "data",
    corpus: Corpus | None = None,
) -> Iterator[dict]:
    """{"step": of the batch, metric: float or [layer][head]} for each of `batches` batches.

    probes: names of `gpt2.probes` that look at a model before its update. attention: as in
    `RunConfig.attention`; None for the run's own. corpus: the run's, where it is loaded already.
    Raises ValueError for a step without a checkpoint, for a probe that does not exist or needs an
    update, and for numerics that cannot be read; what a probe raises otherwise stands under
    "probe_errors".
    """
    where, names = checkpoint_at(run, step), [_before_update(text) for text in probes]
    if batches < 1:
        raise ValueError(f"{batches} batches are too few; give 1 or more")
    config = run.config
    corpus = corpus or load_corpus(config, cache_dir, progress=False)
    model = GPT(config, config.vocab_size or corpus.vocab_size).to(config.device_type())
    load_weights(model, read_weights(where))
    model.set_attention(attention or config.attention)
    return _measured(model, config, corpus, step, names, batches)


def _measured(model, config, corpus, step, names, batches) -> Iterator[dict]:
    index, (micro, _) = corpus.batch_index(config), config.accumulation(1)
    for number in range(step, step + batches):
        x, y = corpus.batch("train", index.starts(number)[:micro], config.block_size)
        x, y = (torch.as_tensor(part).to(model.device) for part in (x, y))
        context = ProbeContext(
            model=model, config=config, step=number, x=x, y=y, corpus=corpus,
            autocast=partial(autocast, config, model.device),
        )  # fmt: skip
        errors: dict[str, str] = {}
        row = {"step": number} | run_probes(context, names, errors)
        yield row | ({"probe_errors": errors} if errors else {})


def _before_update(text: str) -> str:
    """A probe's name. Raises ValueError for one that is unknown or looks at an update."""
    spec = parse_spec(text)
    if spec.name not in REGISTRY or REGISTRY[spec.name].phase != "before":
        fit = ", ".join(n for n, kind in REGISTRY.items() if kind.phase == "before")
        raise ValueError(f"probe {spec.name!r} needs a training step; here are: {fit}")
    return spec.name


def main(argv: list[str] | None = None) -> int:
    """A line of JSON per batch; exit code 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m gpt2.examine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--step", type=int, required=True, help="of a checkpoint")
    parser.add_argument("--probes", required=True, help="such as delta_answer,tie_rate")
    parser.add_argument("--attention", help="numerics (default: the run's own)")
    parser.add_argument("--batches", type=int, default=20, help="how many (20)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="corpus cache (data)")
    args = parser.parse_args(argv)
    try:
        rows = examine(
            Run(args.run), args.step, args.probes.split(","), attention=args.attention,
            batches=args.batches, cache_dir=args.data,
        )  # fmt: skip
        for row in rows:
            print(row_text(row), end="", flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
