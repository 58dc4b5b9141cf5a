"""The page on running at scale: tables and words from archives.

Archives are `book/results/scaling/*.json`, by `python -m gpt2.scaling`, and
`book/results/throughput/*.json`, by `python -m gpt2.bench`. Where there is none, or a part of it
failed, the page says so; nothing here is typed from a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from IPython.display import Markdown
from matplotlib.figure import Figure

from gpt2.hardware import mfu_text

from .captions import DASHES, PALETTE, Captioned, archived, caption, styled, subplots
from .evidence import RESULTS, Archive, archives
from .scale_estimates import GIB
from .tables import markdown_table

# -- archives -------------------------------------------------------------------------------------


def scaling_archive(folder: Path = RESULTS) -> Archive | None:
    """The newest archive of `gpt2.scaling`; one of GPUs before one of a CPU."""
    found = archives("scaling", folder)
    gpu = [a for a in found if a.provenance.get("device") == "cuda"]
    return (gpu or found or [None])[-1]


def throughput_rows(folder: Path = RESULTS) -> list[dict]:
    """Rows of all archives of `gpt2.bench`, oldest first, each with its machine and date.

    Raises ValueError naming a file that cannot be read.
    """
    out = []
    for path in sorted((folder / "throughput").glob("*.json")):
        try:
            told = json.loads(path.read_text())
            source = told.get("provenance") or told["environment"]
            where = {"machine": source["machine"], "date": source["date"][:10]}
            out += [where | row for row in told["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not an archive ({error!r}); restore or delete it"
            ) from None
    return sorted(out, key=lambda row: row["date"])


def part(archive: Archive | None, name: str) -> list[dict]:
    """The rows of one part that have results."""
    rows = [] if archive is None else archive.rows
    return [r for r in rows if r["part"] == name and not r.get("error")]


def source(archive: Archive | None) -> Markdown:
    """Where the tables below come from, or that they are missing."""
    if archive is None:
        return Markdown(
            "**No archive yet**: nothing was measured with several processes. "
            "`python -m gpt2.scaling --json FILE` measures it; put the file into "
            "`book/results/scaling/`."
        )
    p = archive.provenance
    text = f"*Archived: {p['machine']}, {p['processes']} processes, presets {p['preset']}, "
    text += f"corpus {p['corpus']}, {p['date']}, torch {p['torch']}, code {p['code']}.*"
    if p["device"] != "cuda":
        text += " **These are toys on a CPU over gloo; no archive of GPUs is here yet.**"
    failed = [r for r in archive.rows if r.get("error")]
    for row in failed:
        text += f"\n\nNot measured ({row['part']}): {row['error'][:200]}"
    return Markdown(text)


def missing(what: str) -> Markdown:
    return Markdown(f"*{what} is not in any archive yet.*")


def speed_table(rows: Sequence[Mapping]) -> Markdown:
    """Rows of gpt2.bench."""
    good = [r for r in rows if "tokens_per_s" in r]
    if not good:
        return missing("Training speed")
    lines = [
        [
            f"`{r['preset']}`",
            f"`{r['implementation']}`",
            r["processes"],
            f"{r['tokens_per_s']:,.0f}",
            mfu_text(r["mfu"]),
            "n/a" if r["peak_bytes"] is None else f"{r['peak_bytes'] / GIB:.1f} GiB",
            f"{r['step_ms']['p50']:.1f}",
            f"{r['machine']}, {r['date']}",
        ]
        for r in good
    ]
    head = [
        "preset",
        "attention",
        "GPUs",
        "tokens/s",
        "MFU",
        "memory of one",
        "step (ms)",
        "where",
    ]
    return markdown_table(head, lines)


def bench_rows(archive: Archive | None) -> list[dict]:
    """Speeds of the scaling archive, in the form of `throughput_rows`."""
    if archive is None:
        return []
    where = {"machine": archive.provenance["machine"], "date": archive.provenance["date"]}
    return [where | r for r in part(archive, "speed") if "tokens_per_s" in r]


def scaling_table(archive: Archive | None) -> Markdown:
    rows = [r for r in part(archive, "speed") if "ratio" in r]
    if not rows:
        return missing("The ratio of speeds")
    lines = [
        [
            r["scaling"],
            f"{r['from_processes']} to {r['to_processes']}",
            f"{r['ratio']:.2f}",
            f"{100 * r['efficiency']:.0f} %",
            " to ".join(f"{t:.1f}" for t in r["step_ms"]),
            f"{r['missing_ms']:.2f}",
            f"{r['reduce_ms']:.2f}",
            f"{r['undivided_update_ms']:.2f}",
        ]
        for r in rows
    ]
    head = ["", "GPUs", "speed", "of ideal", "step (ms)", "lost (ms)", "sum (ms)", "update (ms)"]
    return markdown_table(head, lines)


# -- the same batches, other processes ------------------------------------------------------------


def losses_table(archive: Archive | None) -> Markdown:
    rows = part(archive, "losses")
    if not rows:
        return missing("A comparison of losses")
    lines = [
        [
            f"`{r['preset']}`, {r['comparison']}",
            " / ".join(f"{p} x {n}" for p, n in zip(r["processes"], r["passes"])),
            _step(r["first_different"], r["steps"]),
            _step(r["first_different_grad_norm"], r["steps"]),
            "0" if not r["largest_difference"] else f"{r['largest_difference']:.2g}",
        ]
        for r in rows
    ]
    head = ["runs", "processes x passes", "first other loss", "first other gradient norm"]
    head += ["largest difference of losses"]
    return markdown_table(head, lines)


def _step(step: int | None, steps: Sequence[int]) -> str:
    count = steps[1] - steps[0] + 1
    return f"none in {count} steps" if step is None else f"step {step}"


@styled
def loss_differences(archive: Archive) -> Figure:
    """|loss a - loss b| by step, one line per comparison; steps of equal bits are left out."""
    figure, ax = subplots(height=3.2)
    for place, row in enumerate(part(archive, "losses")):
        pairs = zip(row["loss_a"], row["loss_b"])
        points = [(row["steps"][0] + i, abs(a - b)) for i, (a, b) in enumerate(pairs) if a != b]
        if points:
            style = dict(color=PALETTE[place], linestyle=DASHES[place], marker=".", ms=3)
            ax.plot(*zip(*points), label=row["comparison"], **style)
    ax.set(title="Rounding is amplified by training", xlabel="step", yscale="log")
    ax.set_ylabel("difference of losses (nats)")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center")
    return figure


def losses_figure(archive: Archive | None) -> Captioned | Markdown:
    """`loss_differences` with its caption, where there is something to draw."""
    if not part(archive, "losses"):
        return missing("A picture of the differences")
    return caption(
        loss_differences(archive),
        "Difference between the training losses of two runs on the same batches. Steps with equal "
        "bits have no mark.",
        archived(archive.provenance),
        alt="Differences of losses on a logarithmic axis against the step, one line a pair of "
        "runs; pairs that never differ have no line.",
    )


def losses_in_words(archive: Archive | None) -> Markdown:
    """What the comparison that isolates the order of the sum says."""
    row = next((r for r in part(archive, "losses") if "in passes" in r["a"]), None)
    if row is None:
        return missing("The comparison with the same passes")
    n = row["processes"][1]
    if row["first_different"] is None and row["first_different_grad_norm"] is None:
        text = (
            f"**Nothing but the order of sums differs.** Split into the passes that {n} processes "
            f"take, one process gives the same bits as {n} for all {row['steps'][1] + 1} steps, "
            "in every loss and gradient norm. With other passes the same numbers are added in "
            "another order and differ in their last bits."
        )
    else:
        steps = [row["first_different"], row["first_different_grad_norm"]]
        first = min(s for s in steps if s is not None)
        text = (
            f"Even with the same passes, {n} processes differ from one, first at step {first}: "
            "the sum over processes adds in an order of its own, or a kernel sums in an order "
            "that changes from run to run."
        )
    return Markdown(text)


def kill_table(archive: Archive | None) -> Markdown:
    rows = part(archive, "kill")
    if not rows:
        return missing("The loss of a process")
    lines = []
    for r in rows:
        if "others_ended_after_s" in r:
            said = f"“{r['message']}”" if r["message"] else "no message"
            found = f"all ended after {r['others_ended_after_s']} s, run `{r['status']}`; {said}"
        else:
            same = r["first_different"] is None
            found = f"steps {r['from']} to {r['to']}, compared with the run that was not killed: "
            found += (
                "every loss the same bits"
                if same
                else f"other bits from step {r['first_different']}, "
                f"largest difference {r['largest_difference']:.1g}"
            )
        lines.append([r["event"], found])
    return markdown_table(["event", "what happened"], lines)


# -- rounding of the sum --------------------------------------------------------------------------


def probes_table(archive: Archive | None) -> Markdown:
    rows = [r for r in part(archive, "reduction") if "run" in r]
    if not rows:
        return missing("The error of delta under both reductions")
    lines = [
        [
            f"{r['processes']}, sums in {r['grad_reduce_dtype']}" if r["processes"] > 1 else "1",
            r["at_step"],
            f"{r['delta_error_mean']:.2g} ± {2 * r['delta_error_stderr']:.1g}",
            f"{r['delta_error_rms']:.2g}",
            f"{r['heads_beyond_2_stderr']} of {r['heads']}",
            f"{100 * r['dwq_error_ratio_median']:.2g} %",
        ]
        for r in rows
    ]
    head = ["processes", "step", "mean of δlp − δhp (± 2 s.e.)", "rms", "heads off zero"]
    return markdown_table([*head, "error of dW_Q by it (median head)"], lines)


def causes_table(archive: Archive | None) -> Markdown:
    rows = [r for r in part(archive, "reduction") if "cause" in r]
    if not rows:
        return missing("Each cause of error in dW_Q by itself")
    lines = [
        [
            r["cause"],
            f"{r['relative_size_median']:.2g}",
            f"{r['mean_in_rms']:+.4f} ± {2 * r['mean_in_rms_stderr']:.4f}",
            f"{r['between_batches']:+.4f} ± {2 * r['between_batches_stderr']:.4f}",
            f"{r['cosine_with_leading_pair']:+.4f}",
        ]
        for r in rows
    ]
    head = ["cause", "size of error / size of dW_Q", "mean / rms (± 2 s.e.)"]
    head += ["cosine between batches (± 2 s.e.)", "cosine with W_Q's leading pair"]
    return markdown_table(head, lines)


def accumulates(row: Mapping) -> bool:
    """Whether errors of different batches point the same way, beyond four standard errors."""
    return row["between_batches"] > 4 * row["between_batches_stderr"]


def reduction_in_words(archive: Archive | None) -> Markdown:
    rows = [r for r in part(archive, "reduction") if "cause" in r]
    if not rows:
        return missing("What the sum rounds")
    words = []
    for r in rows:
        way = (
            "its direction is shared by batches (mean cosine "
            if accumulates(r)
            else "batches share no direction of it that we can see (mean cosine "
        )
        words.append(
            f"- *{r['cause']}*: an error of {100 * r['relative_size_median']:.2g} % of dW_Q in "
            f"the median head; {way}{r['between_batches']:+.3f})."
        )
    n = rows[0]["processes"]
    text = f"With {n} processes, over {rows[0]['batches']} batches at one set of weights:\n\n"
    return Markdown(text + "\n".join(words))
