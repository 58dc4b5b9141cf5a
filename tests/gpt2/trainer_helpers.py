"""A tiny corpus and config for trainer tests, and processes that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpt2.config import make_config

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the sign of an error decides whether it feeds back into the weights that made it "


def write_corpus(folder: Path, files: int = 24) -> str:
    """Text files below `folder`; returns the config's `corpus` value for them."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        words = WORDS.split()
        text = " ".join(words[(i + j * (1 + i % 5)) % len(words)] for j in range(300))
        (folder / f"document{i:02d}.txt").write_text(f"{i} {text}\n")
    return f"files:{folder}/*.txt"


def tiny(corpus: str, **changes):
    """A run of a few steps: 2 layers, 16 wide, 16 tokens of context, 8 sequences a step."""
    base = dict(
        n_embd=16,
        n_head=2,
        block_size=16,
        batch_size=8,
        corpus=corpus,
        held_out_fraction=0.2,
        max_steps=20,
        warmup_steps=4,
        eval_interval=8,
        eval_batches=2,
        probe_interval=10,
        checkpoint_interval=5,
        attention="sdpa",
        device="cpu",
    )
    return make_config("cpu", base | changes)


def arguments(config) -> list[str]:
    """The command-line options that make `config` out of the cpu preset."""
    out = []
    for key, value in config.to_dict().items():
        if key == "preset":
            continue
        text = ",".join(value) if isinstance(value, list) else value
        out.append(f"--{key}={'none' if text is None or text == '' else text}")
    return out


def start(module: str, *args: str, prefix=(), **options) -> subprocess.Popen:
    """`python -m module args` in a process of its own, one thread, from the project's root."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *prefix, "-m", module, *args],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
