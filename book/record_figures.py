"""Figures of archived records, and the picture of the README: `python -m book.record_figures`.

A record's curves become the metrics that `book.figures.panels` draws, so that archived runs look
exactly as live ones do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from gpt2.outcomes import Outcome

from . import ROOT
from .captions import STYLE
from .evidence import latest
from .figures import panels
from .records import SMOOTHED, record_metrics

PICTURE = ROOT / "book" / "pictures" / "failure.svg"


def record_panels(rows: Sequence[Mapping], metrics: Sequence[str], **options) -> Figure:
    """Aligned panels of records of one seed; see `book.figures.panels` for the options."""
    outcomes = {row["label"]: Outcome.from_dict(row["outcome"]) for row in rows}
    runs = {row["label"]: record_metrics(row) for row in rows}
    names = [SMOOTHED.get(name, name) for name in metrics]
    return panels(runs, names, outcomes=outcomes, **options)


def main() -> int:
    """Draw the README's picture from the archive of the failing regime, seed 0."""
    kept = latest("failure", "cpu")
    if kept is None:
        print("no archive of `failure`: python -m book.evidence failure", file=sys.stderr)
        return 1
    rows = [row for row in kept.rows if row["seed"] == 0]
    figure = record_panels(rows, ["train_loss", "spectral_norm_q"], height=2.0)
    with mpl.rc_context(STYLE | {"savefig.facecolor": "white", "figure.facecolor": "white"}):
        figure.savefig(PICTURE, format="svg", metadata={"Date": None}, facecolor="white")
    print(Path(PICTURE).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
