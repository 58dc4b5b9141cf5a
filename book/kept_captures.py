"""Captured heads beside an archive: small copies of what the `capture` probe wrote.

    book/results/captures-mini-lr3/nvidia-h200-mini-2026-11-30/
        captured-seed0-step_00011000-L1H0.npz

Keys as in `gpt2.capture`; `kernels.forensics.load_head` reads them. X is rounded to bf16 where the
run computes in bf16: that is what its product with W_Q sees, and it halves the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from gpt2.files import write_atomically
from gpt2.runs import Run


def keep_captures(runs: Mapping[tuple[str, int], Run], folder: Path) -> list[Path]:
    """Copy the captured heads of runs, {(arm, seed): run}, into a folder; returns the paths.

    Copies that are there already and not older than what they are of are left as they are.
    """
    paths = []
    for (arm, seed), run in runs.items():
        for source in run.captures():
            if source.suffix == ".npz":
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{arm}-seed{seed}-{source.name}"
                if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
                    _copy(source, path, half=run.config.dtype == "bfloat16")
                paths.append(path)
    return paths


def _copy(source: Path, path: Path, half: bool) -> None:
    with np.load(source) as file:
        arrays = dict(file)
    if half:
        arrays["X"] = torch.from_numpy(arrays["X"]).bfloat16().float().numpy()
    write_atomically(path, lambda f: np.savez_compressed(f, **arrays))
