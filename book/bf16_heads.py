"""Heads captured in a run that explodes in bf16 itself and in its twin, for chapters 3 and 4.

They come from the newest archive of `captures-*` (`book.kept_captures`), so that pages show them
where there is no GPU. All are measured under the failing run's numerics: for the twin, whose delta
reads an fp32 O, that is the error which it would make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from IPython.display import Markdown

from kernels.numerics import parse_numerics

from . import RESULTS
from .captured import Captured, captured_heads
from .chapter3 import coherence_cells
from .chapter4 import plus_minus
from .direction import Moment, measure
from .evidence import Archive, archives
from .head_statistics import over_time
from .tables import head_name, markdown_table

FAILING = "captured"  # the arm of `book.gpu_experiments.captures` that goes on to fail


@dataclass(frozen=True)
class KeptHeads:
    """captures: arm -> its captures, one sequence each, by step."""

    archive: Archive
    captures: Mapping[str, Sequence[Captured]]

    def label(self, arm: str) -> str:
        return next((row["label"] for row in self.archive.arm(arm)), arm)

    @cached_property
    def moments(self) -> list[tuple[str, Moment]]:
        """(arm, what chapter 3 measures), run by run and head by head."""
        return [
            (arm, moment)
            for arm, found in self.captures.items()
            for series in measure(found).values()
            for moment in series
        ]

    @property
    def failing(self) -> list[Moment]:
        """Of all heads of the run that fails."""
        return [m for arm, m in self.moments if arm == FAILING]

    @property
    def healthy(self) -> list[Moment]:
        """Of all heads of its twin."""
        return [m for arm, m in self.moments if arm != FAILING]

    @property
    def onset(self) -> Mapping | None:
        """Of that run, as records keep it."""
        return next((row["onset"] for row in self.archive.arm(FAILING)), None)


def kept_heads(folder: Path = RESULTS, experiment: str = "captures-*") -> KeptHeads | None:
    """Those of the newest archive that has any, None where there is none."""
    named = [path.name for path in sorted(folder.glob(experiment))]
    found = sorted(
        (a for name in named for a in archives(name, folder)), key=lambda a: a.provenance["date"]
    )
    for archive in reversed(found):
        rows = archive.arm(FAILING)
        paths = _by_arm(archive.path.with_suffix(""))
        if rows and FAILING in paths:
            low = parse_numerics(rows[0]["attention"])
            return KeptHeads(
                archive,
                {
                    arm: [replace(c, numerics=low) for c in captured_heads(some)]
                    for arm, some in paths.items()
                },
            )
    return None


def _by_arm(folder: Path) -> dict[str, list[Path]]:
    """'captured-seed0-step_00003520-L2H0.npz' by its arm, that which fails first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        if match := re.match(r"(\w+)-seed\d+-", path.name):
            found.setdefault(match[1], []).append(path)
    return dict(sorted(found.items(), key=lambda item: item[0] != FAILING))


def _name(kept: KeptHeads, arm: str, captured: Captured) -> str:
    return f"{kept.label(arm)}, {captured}"


COLUMNS = ("mean cosine", "5, 50, 95 %", "first of R", "gain", "random signs, 95 %")
COLUMNS += ("cosine of (Σe) R",)


def directions_table(kept: KeptHeads) -> Markdown:
    """How alike the terms of dW_Q are in bf16, and what they add up to, a line per capture."""
    lines = []
    for arm, moment in kept.moments:
        cells = coherence_cells(moment)
        lines.append([_name(kept, arm, moment.captured), *(cells[c] for c in COLUMNS)])
    return markdown_table(["head", *COLUMNS], lines)


def directions_words(kept: KeptHeads) -> Markdown:
    """What the table says of the run that fails."""
    failing = kept.failing
    cosines = [m.coherence.mean_cosine for m in failing]
    beyond = sum(m.sign_p_value <= 0.05 for m in failing)
    words = (
        f"In bf16 the mean cosine of two terms is {min(cosines):+.2f} to {max(cosines):+.2f} in "
        f"the {len(failing)} captures of the failing run, and their first direction holds at "
        f"least {min(m.first_energy for m in failing):.0%} of the energy of $R$. The gain goes "
        f"beyond that of random signs (p ≤ 0.05) in {beyond} of them."
    )
    others = [f"{m.coherence.mean_cosine:+.2f}" for m in kept.healthy]
    if others:
        words += f" In the twin it is {', '.join(others)}: alike terms alone break nothing."
    if kept.onset is not None:
        place = kept.onset["layer"], kept.onset["head"]
        words += f" The onset, at step {kept.onset['step']:,}, is in {head_name(place)}."
    return Markdown(words)


def rounding_table(kept: KeptHeads) -> Markdown:
    """What chapter 4 counts, in bf16: ties, and errors of delta."""
    lines = []
    for arm, found in kept.captures.items():
        by_head = sorted(found, key=lambda c: (c.layer, c.place, c.step))
        for captured, count in zip(by_head, over_time(by_head)):
            lines.append(
                [
                    _name(kept, arm, captured),
                    f"{count.tied:.0%}",
                    f"{count.ones:.2f}",
                    f"{count.absorbing:.0%}",
                    f"{count.tied_energy:.0%}" if count.tied else "-",
                    plus_minus(count.bias),
                    f"{count.relative:.2%}",
                ]
            )
    header = ["head", "tied rows", "P̄ = 1, a row", "absorbing rows", "squares in tied rows"]
    header += ["mean error of δ (rms)", "rms of the error / rms of δ"]
    return markdown_table(header, lines)
