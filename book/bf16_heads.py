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

from kernels.forensics import delta_error
from kernels.numerics import parse_numerics

from . import RESULTS
from .captured import Captured, captured_heads
from .chapter3 import SIGNS
from .chapter4 import plus_minus
from .direction import Moment, measure
from .evidence import Archive, archives
from .head_statistics import in_rms, over_time
from .tables import head_name, markdown_table

FAILING = "captured"  # the arm of `book.gpu_experiments.captures` that goes on to fail
Place = tuple[int, int]


@dataclass(frozen=True)
class KeptHeads:
    """captures: arm -> its captures, one sequence each, by step."""

    archive: Archive
    captures: Mapping[str, Sequence[Captured]]

    def label(self, arm: str) -> str:
        return next((row["label"] for row in self.archive.arm(arm)), arm)

    @cached_property
    def moments(self) -> dict[str, dict[Place, list[Moment]]]:
        """Arm -> (layer, head) -> what chapter 3 measures, by step."""
        return {arm: measure(found) for arm, found in self.captures.items()}

    @property
    def failing(self) -> list[Moment]:
        """Of all heads of the run that fails."""
        return [m for series in self.moments[FAILING].values() for m in series]

    @property
    def healthy(self) -> list[Moment]:
        """Of all heads of its twin."""
        others = [places for arm, places in self.moments.items() if arm != FAILING]
        return [m for places in others for series in places.values() for m in series]

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


def _lines(kept: KeptHeads):
    for arm, places in kept.moments.items():
        for place, series in places.items():
            for moment in series:
                name = f"{kept.label(arm)}, {head_name(place)}, step {moment.step:,}"
                yield name, moment


def directions_table(kept: KeptHeads) -> Markdown:
    """How alike the terms of dW_Q are in bf16, and what they add up to, a line per capture."""
    lines = []
    for name, moment in _lines(kept):
        c = moment.coherence
        low, middle, high = c.quantiles()
        band = moment.random_signs.quantile(SIGNS).tolist()
        lines.append(
            [
                name,
                f"{c.mean_cosine:+.2f}",
                f"{low:+.2f}, {middle:+.2f}, {high:+.2f}",
                f"{moment.first_energy:.2f}",
                f"{c.gain:.2f}",
                "{:.2f} to {:.2f}".format(*band),
                f"{c.approximation_cosine:+.2f}",
            ]
        )
    header = ["head", "mean cosine", "5, 50, 95 %", "first of R", "gain", "random signs, 95 %"]
    return markdown_table([*header, "cosine of (Σe) R"], lines)


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
    for name, moment in _lines(kept):
        captured, n = moment.captured, moment.captured.numerics
        (count,) = over_time([captured])
        delta = delta_error(captured.head, numerics=n)
        tied = delta.causes["tied"]
        lines.append(
            [
                name,
                f"{count.tied:.0%}",
                f"{count.ones:.2f}",
                f"{count.absorbing:.0%}",
                f"{tied.energy:.0%}" if tied.rows else "-",
                plus_minus(in_rms(delta.mean, delta.rms)),
                f"{delta.relative:.2%}",
            ]
        )
    header = ["head", "tied rows", "P̄ = 1, a row", "absorbing rows", "squares in tied rows"]
    header += ["mean error of δ (rms)", "rms of the error / rms of δ"]
    return markdown_table(header, lines)
