"""Chapter 4's figures in words, and its summary, filled in from what was computed."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from IPython.display import Markdown

from gpt2.outcomes import VERDICT_RUNS
from kernels.forensics import DeltaMeasurement, RoundingTrace, SignedMean

from .captions import Provenance, caption
from .chapter4 import ReadBack, StoredError, plus_minus
from .head_statistics import Moment, OutputError, told
from .rounding_figures import trace_figure
from .tables import half_width, markdown_table, over_runs, ratio_interval


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


# -- over seeds -----------------------------------------------------------------------------------

PART_LABELS = {
    "tied": "tied rows",
    "absorbing": "absorbing rows",
    "other": "other rows",
    "unnormalized": "rounding Ō",
    "output": "rounding the stored O",
}


def with_interval(found: SignedMean, digits: int = 3) -> str:
    """'+0.012 [-0.003, +0.027]': a mean over runs with its 95 % interval."""
    half = half_width(found)
    if not half >= 0:
        return f"{found.mean:+.{digits}f} (one run)"
    low, high = found.mean - half, found.mean + half
    return f"{found.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def by_version(records: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    found: dict[str, list[Mapping]] = {}
    for record in records:
        found.setdefault(record["arm"], []).append(record)
    return found


def titled(tables: Mapping[str, Markdown]) -> Markdown:
    """Several tables under their names."""
    return Markdown("\n\n".join(f"**{name}**\n\n{table.data}" for name, table in tables.items()))


def seeds_table(records: Sequence[Mapping]) -> Markdown:
    """Shares of the sum (with 95 % intervals) of the runs whose sum is off zero by two standard
    errors, and how many are left out because it is not."""
    lines = []
    for r in records:
        mean, error = r["mean"]
        if abs(mean) > 2 * error:
            parts = [r["parts"][name] for name in PART_LABELS if name in r["parts"]]
            told = plus_minus(SignedMean(mean, error, r["rows"]))
            shares = ["{:.0%} [{:.0%}, {:.0%}]".format(*p["share"]) for p in parts]
            lines.append([f"seed {r['seed']}, {r['arm']}", told, *shares])
    out = f"Not off zero: {len(records) - len(lines)} of {len(records)}."
    if not lines:
        return Markdown(out)
    table = markdown_table(["run", "mean error (rms)", *PART_LABELS.values()], lines)
    return Markdown(f"{out}\n\n{table.data}")


def parts_over_seeds(records: Sequence[Mapping]) -> Markdown:
    """What kinds of rows and sites add to the mean error of delta, over seeds: a table a version.

    Per part: share of the rows, what it adds (in rms, with the 95 % interval over seeds; kinds of
    rows add up to the mean, and so do the sites), its share of the sum where the mean is off zero
    (Fieller's interval), share of the squares.
    """
    header = [
        "part",
        "of the rows",
        "adds to the mean (rms)",
        "share of the sum",
        "of the squares",
    ]
    tables = {}
    for arm, mine in by_version(records).items():
        means = [r["mean"][0] for r in mine]
        lines = [["all rows", "100%", with_interval(over_runs(means)), "", "100%"]]
        for name, label in PART_LABELS.items():
            if all(name in r["parts"] for r in mine):
                parts = [r["parts"][name] for r in mine]
                adds = [p["adds"][0] for p in parts]
                rows = over_runs([p["rows"] / r["rows"] for p, r in zip(parts, mine)]).mean
                energy = over_runs([p["energy"] for p in parts]).mean
                told = [with_interval(over_runs(adds)), _share(adds, means), f"{energy:.0%}"]
                lines.append([label, f"{rows:.0%}", *told])
        tables[f"{arm}, {len(mine)} run(s)"] = markdown_table(header, lines)
    return titled(tables)


def _share(adds: Sequence[float], means: Sequence[float]) -> str:
    share, low, high = ratio_interval(adds, means)
    return "-" if high == math.inf else f"{share:.0%} [{low:.0%}, {high:.0%}]"


def changes_over_seeds(records: Sequence[Mapping]) -> Markdown:
    """Bias of O in ulps and mean error of delta after each change, over seeds: a table a version.

    The change of the mean error is paired: against the same head as captured.
    """
    header = ["head", "bias of O (ulp)", "mean error of δ (rms)", "its change", "off zero"]
    tables = {}
    for arm, mine in by_version(records).items():
        before, lines = [r["changed"]["as captured"]["delta"][0] for r in mine], []
        for name in mine[0]["changed"]:
            found = [r["changed"][name] for r in mine]
            bias = over_runs([f["bias"][0] for f in found])
            after = [f["delta"][0] for f in found]
            change = over_runs([y - x for x, y in zip(before, after)])
            off = sum(abs(f["delta"][0]) > 2 * f["delta"][1] for f in found)
            told = [with_interval(bias, 4), with_interval(over_runs(after))]
            told += ["-" if name == "as captured" else with_interval(change)]
            lines.append([name, *told, f"{off} of {len(found)}"])
        tables[arm] = markdown_table(header, lines)
    return titled(tables)


def seeds_findings(records: Sequence[Mapping]) -> list[str]:
    """Per version: is the error of delta biased over runs, whence, and do offsets of V move it.

    Every interval is one look; of twenty, one is off zero by chance.
    """
    told = []
    for arm, mine in by_version(records).items():
        standing = "verdict" if len(mine) >= VERDICT_RUNS else "observed"
        bias = over_runs([r["mean"][0] for r in mine])
        adds = {
            name: with_interval(over_runs([r["parts"][name]["adds"][0] for r in mine]))
            for name in ("tied", "unnormalized", "output")
            if all(name in r["parts"] for r in mine)
        }
        parts = ", ".join(f"{PART_LABELS[name]} {text}" for name, text in adds.items())
        rows = over_runs([r["parts"]["tied"]["rows"] / r["rows"] for r in mine]).mean
        energy = over_runs([r["parts"]["tied"]["energy"] for r in mine]).mean
        told.append(
            f"**{arm[:1].upper()}{arm[1:]}**, {len(mine)} run(s), {standing}: the mean error of δ "
            f"is {with_interval(bias)} of its rms, {_off(bias)}. What adds to it: {parts}. Tied "
            f"rows are {rows:.0%} of the rows and carry {energy:.0%} of the squares. "
            + " ".join(_moved(mine))
        )
    return told


def _moved(records: Sequence[Mapping]) -> list[str]:
    """How much each offset of V changes the mean error of delta, paired over runs."""
    found = [r["changed"] for r in records]
    told = []
    for name, words in (("V balanced", "Balancing V"), ("sham offset", "The sham offset")):
        change = [f[name]["delta"][0] - f["as captured"]["delta"][0] for f in found]
        change = over_runs(change)
        told.append(f"{words} changes it by {with_interval(change)}, {_off(change)}.")
    return told


def _off(found: SignedMean) -> str:
    """Whether the interval of a mean over runs leaves out zero."""
    half = half_width(found)
    if not half >= 0:
        return "one run, no interval over runs"
    return "off zero" if abs(found.mean) > half else "not off zero"


# -- the summary ----------------------------------------------------------------------------------


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
