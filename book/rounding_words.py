"""Chapter 4's figures in words, and its summary, filled in from what was computed."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from IPython.display import Markdown

from kernels.forensics import DeltaMeasurement, RoundingTrace, SignedMean

from .captions import Provenance, caption
from .chapter4 import ReadBack, StoredError, plus_minus
from .head_statistics import Moment, OutputError, told
from .rounding_figures import trace_figure


def trace_page(trace: RoundingTrace, title: str, numerics: str, provenance: Provenance) -> str:
    """A trace as figure, caption and table of its largest jumps, in HTML."""
    ends = [float(trace.error[name][-1]) for name in ("prefix_round_once", "running")]
    ones = int(trace.ones.sum())
    jump = trace.largest(1)[0]
    shown = caption(
        trace_figure(trace, title),
        f"`{numerics}`, Ō in {trace.format}. {ones} of {len(trace)} keys have $\\bar P = 1$.",
        provenance.but(note="captured head"),
        alt=f"Weights and values of {len(trace)} keys; the error of O-bar ends at {ends[0]:+.3g} "
        f"rounded once and at {ends[1]:+.3g} rounded each time, with its largest jump at key "
        f"{jump}, where P-bar is {float(trace.p[jump]):.3g}.",
    )
    table = html.escape(trace.table(trace.largest(6)))
    return f'{shown}<pre style="overflow-x:auto">{table}</pre>'


def moments_in_words(series: Mapping[str, Sequence[Moment]]) -> str:
    """First and last values of every line."""
    parts = []
    for name, moments in series.items():
        first, last = moments[0], moments[-1]
        parts.append(
            f"{name}: tied rows {first.tied:.1%} to {last.tied:.1%}, absorbing rows "
            f"{first.absorbing:.1%} to {last.absorbing:.1%}, entries with P-bar 1 per row "
            f"{first.ones:.2f} to {last.ones:.2f}."
        )
    norms = [m.spectral_norm for m in moments]
    return f"The spectral norm grows from {norms[0]:.2g} to {max(norms):.3g}. " + " ".join(parts)


def what_you_saw(
    stored: Mapping[str, Mapping[float, StoredError]],
    read: Mapping[str, ReadBack],
    parts: Mapping[str, DeltaMeasurement],
    moments: Mapping[str, Sequence[Moment]],
    changed: Mapping[str, Mapping[str, OutputError]],
    biases: Mapping[str, Mapping[str, SignedMean]],
) -> Markdown:
    """The chapter in sentences, each with its numbers."""
    small = min(stored["Ō rounded"])
    lines = [
        f"**Two ties and a small tail** (weight up to {small:g}): rounding Ō errs by "
        f"{plus_minus(stored['Ō rounded'][small].bias)} ulp, away from zero. Rounding O alone: "
        f"{plus_minus(stored['O rounded'][small].bias)} ulp, but "
        f"{stored['O rounded'][small].shared:.0%} of its square is common to all rows of a head.",
        "**What the backward pass reads** (sum of dS over a row, 0 in theory): "
        + "; ".join(
            f"{name} {plus_minus(read[name].row_sum)}"
            for name in ("paper", "paper, δ from an fp32 O", "flash", "standard, softmax in fp32")
        )
        + ".",
    ]
    for name, delta in parts.items():
        last = moments[name][-1]
        lines.append(
            f"**The captured head {name}**: mean error of δ {told(delta.mean, delta.rms)} of its "
            f"rms over {delta.error.numel():,} rows ({_off_zero(delta)}). At the last captured "
            f"step {last.tied:.1%} of its rows were tied and {last.absorbing:.1%} absorbing; "
            + _causes(delta)
        )
        of_output = ", ".join(
            f"{plus_minus(found)} ulp in {kind} rows"
            for kind, found in biases[name].items()
            if found.n > 1
        )
        lines.append(f"The stored O of that head, {name}, errs by {of_output} (away from zero).")
        arms = "; ".join(f"{arm} {plus_minus(e.delta)}" for arm, e in changed[name].items())
        lines.append(f"The same after changes to the head {name}: {arms}.")
    return Markdown("\n".join(f"- {line}" for line in lines))


def _off_zero(delta: DeltaMeasurement) -> str:
    z = delta.mean.z
    words = "no bias seen" if abs(z) < 2 else "a hint of a bias" if abs(z) < 4 else "a bias"
    return f"{z:+.1f} standard errors: {words}"


def _causes(delta: DeltaMeasurement) -> str:
    energy = {name: part.energy for name, part in delta.causes.items() if part.rows}
    told_energy = ", ".join(f"{name} rows {share:.0%}" for name, share in energy.items())
    return f"of the squared error come from {told_energy}."
