"""How a figure leaves the project: style, caption, provenance, description.

Every figure is shown by `caption`, as HTML with a description for readers who do not see it and a
badge that tells *live* (run now, on this machine) from *archived* (measured by a longer run).

Pictures are drawn dark on transparent. A light page shows them as they are; a dark page turns the
lightness round with `filter: invert(1) hue-rotate(180deg)` (book/style/book.css), which keeps the
hues. Tests compute the contrast of every colour on both.
"""

from __future__ import annotations

import base64
import datetime
import functools
import html
import io
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

INK = "#222222"
GRID = "#b9b9b9"
# Okabe and Ito's palette, the light ones darkened until they stand out on white.
PALETTE = ("#d55e00", "#0072b2", "#008a65", "#a9527f", "#a67300", "#555555")
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1.5)), (0, (1, 1)))
WIDTH = 5.6  # inches; 10-point text keeps 9 pixels on a phone 390 pixels wide

STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.prop_cycle": mpl.cycler(color=PALETTE) + mpl.cycler(linestyle=DASHES),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "bit-by-bit",
}


def styled(draw):
    """Run a drawing function under the book's style, leaving matplotlib's own settings alone."""

    @functools.wraps(draw)
    def wrapper(*args, **kwargs):
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapper


@styled
def subplots(rows: int = 1, columns: int = 1, *, height: float = 2.4, **options):
    """(figure, axes) in the book's style, `height` inches per row; shown by `caption` alone."""
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of a figure come from. Make one with `live` or `archived`."""

    kind: str  # "live" or "archived"
    machine: str
    date: str
    preset: str | None = None
    corpus: str | None = None
    seeds: str | None = None
    code: str | None = None
    note: str | None = None

    def __post_init__(self):
        if self.kind not in ("live", "archived"):
            raise ValueError(f"provenance kind {self.kind!r}; use 'live' or 'archived'")

    def __str__(self) -> str:
        named = [("preset", self.preset), ("corpus", self.corpus), ("seeds", self.seeds)]
        told = [self.machine, *(f"{k} {v}" for k, v in named if v), self.date]
        told += [f"code {self.code}"] if self.code else []
        told += [self.note] if self.note else []
        return ", ".join(told)

    def but(self, **changes) -> Provenance:
        return replace(self, **changes)


def machine() -> str:
    """This machine as captions name it."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()}-core {platform.machine()} CPU"


def live(*, preset=None, corpus=None, seeds=None, note=None) -> Provenance:
    """Numbers computed by this execution of the chapter."""
    today = datetime.date.today().isoformat()
    seeds = None if seeds is None else _listed(seeds)
    return Provenance("live", machine(), today, preset, corpus, seeds, note=note)


def archived(record: Mapping, *, note=None) -> Provenance:
    """Numbers of book/results/: `record` names machine and date, and preset, corpus, seeds, code.

    Raises ValueError where machine or date is missing: a figure without a source is not shown.
    """
    missing = [k for k in ("machine", "date") if not record.get(k)]
    if missing:
        raise ValueError(f"archived results without {' and '.join(missing)}; measure them again")
    seeds = None if record.get("seeds") is None else _listed(record["seeds"])
    rest = {k: record.get(k) for k in ("preset", "corpus", "code")}
    return Provenance(
        "archived", record["machine"], record["date"], seeds=seeds, note=note, **rest
    )


def _listed(seeds) -> str:
    return seeds if isinstance(seeds, str) else ", ".join(map(str, np.atleast_1d(seeds)))


class Captioned:
    """A figure ready to be displayed: HTML with picture, description, caption, provenance."""

    def __init__(self, markup: str):
        self.markup = markup

    def _repr_html_(self) -> str:
        return self.markup

    def __str__(self) -> str:
        return self.markup


BADGES = {"live": "● live", "archived": "◆ archived"}
_BADGE_STYLES = {
    "live": "background:#005a8c;color:#fff;border:1px solid #005a8c",
    "archived": "background:#fff;color:#6b3d00;border:1px dashed #6b3d00",
}


def badge(kind: str) -> str:
    """A mark that differs in shape, word, border and colour."""
    style = f"{_BADGE_STYLES[kind]};border-radius:3px;padding:0 .4em;font-size:.85em"
    return f'<span class="bit-badge bit-{kind}" style="{style}">{BADGES[kind]}</span>'


def caption(fig: Figure, text: str, provenance: Provenance, *, alt: str) -> Captioned:
    """Show `fig` with a caption; leave it as the last line of a cell.

    text: one or two sentences; `code` and $formulas$ are set as such. alt: what the picture shows,
    for a reader who does not see it (trend and outcome, not "a plot of"). Raises ValueError where
    one of them is empty.
    """
    if not alt.strip() or not text.strip():
        raise ValueError("a figure needs a caption and a description (alt) of what it shows")
    source = picture(fig)
    width = round(fig.get_figwidth() * 110)
    return Captioned(
        '<figure class="bit-figure" style="margin:1em 0">'
        f'<div class="bit-scroll" style="overflow-x:auto"><img class="bit-image" '
        f'alt="{html.escape(alt, quote=True)}" src="{source}" '
        f'style="background:#fff;width:100%;max-width:{width}px"></div>'
        f'<figcaption class="mathjax_process">{badge(provenance.kind)} {_inline(text)} '
        f'<small class="bit-provenance">{html.escape(str(provenance))}.</small>'
        "</figcaption></figure>"
    )


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\$([^$]+)\$", r"\\(\1\\)", text)


SVG_LIMIT = 90_000  # bytes; a bigger drawing is sent as pixels


def picture(fig: Figure) -> str:
    """The figure as a data address: SVG, or PNG where that is the smaller thing."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        fig.savefig(buffer, format="svg", metadata={"Date": None})
        if buffer.tell() <= SVG_LIMIT:
            data = base64.b64encode(buffer.getvalue()).decode()
            return f"data:image/svg+xml;base64,{data}"
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=150)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
