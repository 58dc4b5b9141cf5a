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
from .captions import STYLE, Captioned, archived, caption
from .evidence import latest
from .figures import panels
from .records import SMOOTHED, record_metrics
from .tables import step_text

PICTURE = ROOT / "book" / "pictures" / "failure.svg"


def record_panels(rows: Sequence[Mapping], metrics: Sequence[str], **options) -> Figure:
    """Aligned panels of records of one seed; see `book.figures.panels` for the options."""
    outcomes = {row["label"]: Outcome.from_dict(row["outcome"]) for row in rows}
    runs = {row["label"]: record_metrics(row) for row in rows}
    names = [SMOOTHED.get(name, name) for name in metrics]
    return panels(runs, names, outcomes=outcomes, **options)


def captioned_panels(
    rows: Sequence[Mapping], metrics: Sequence[str], words: str, alt: str, **options
) -> Captioned:
    """`record_panels` of archived runs of one seed, with what became of each.

    rows: with "source", the provenance of their archive. words, alt: sentences before that.
    """
    told = "; ".join(f"{row['label']}: {step_text(row)}" for row in rows)
    codes = [row.get("code") or row["source"]["code"] for row in rows]
    dates = sorted({row["source"]["date"][:10] for row in rows})
    mine = {"seeds": [rows[0]["seed"]], "code": ", ".join(dict.fromkeys(codes))}
    mine["date"] = ", ".join(dates)
    source = archived(rows[0]["source"] | mine)
    figure = record_panels(rows, metrics, **options)
    return caption(figure, f"{words} {told}.", source, alt=f"{alt} {told}.")


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
