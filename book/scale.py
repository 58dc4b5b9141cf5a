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

# What tells one measurement from another.
SAME = ("machine", "date", "preset", "implementation", "processes", "tokens_per_s")

# -- archives -------------------------------------------------------------------------------------


def scaling_archives(folder: Path = RESULTS) -> list[Archive]:
    """The newest archive of `gpt2.scaling` on GPUs, and the newest of its toys on a CPU."""
    found = archives("scaling", folder)
    gpu = [a for a in found if a.provenance.get("device") == "cuda"]
    cpu = [a for a in found if a not in gpu]
    return gpu[-1:] + cpu[-1:]


def short(archive: Archive) -> str:
    """How rows of a table name the machine."""
    on_gpu = archive.provenance["device"] == "cuda"
    return archive.provenance["machine"] if on_gpu else "toys on a CPU"


HOW = {"by_block": "compiled by block", "deterministic": "Inductor's deterministic mode"}


def throughput_rows(folder: Path = RESULTS) -> list[dict]:
    """Results of all archives of `gpt2.bench`, oldest first, each with its machine and date.

    Raises ValueError naming a file that cannot be read.
    """
    out = []
    for path in sorted((folder / "throughput").glob("*.json")):
        try:
            told = json.loads(path.read_text())
            source = told.get("provenance") or told["environment"]
            where = {k: source[k] for k in ("machine", "code")} | {"date": source["date"][:10]}
            out += [where | row for row in told["rows"] if not row.get("error")]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not an archive ({error!r}); restore or delete it"
            ) from None
    return sorted(out, key=lambda row: row["date"])


def part(found: Sequence[Archive], name: str) -> list[dict]:
    """The rows of one part that have results, each with `where` it was measured."""
    return [
        {"where": short(archive)} | row
        for archive in found
        for row in archive.rows
        if row["part"] == name and not row.get("error")
    ]


def source(found: Sequence[Archive]) -> Markdown:
    """Where the tables come from, and what they lack."""
    if not found:
        return Markdown(
            "**No archive yet**: nothing was measured with several processes. "
            "`python -m gpt2.scaling --json FILE` measures it; put the file into "
            "`book/results/scaling/`."
        )
    lines = []
    for archive in found:
        p = archive.provenance
        line = f"- *{short(archive)}*: {p['machine']}, {p['processes']} processes, presets "
        line += f"{p['preset']}, corpus {p['corpus']}, {p['date']}, torch {p['torch']}, code "
        line += p["code"] + (f"; {p['note']}" if p.get("note") else "") + "."
        lost = [_named(row) for row in archive.rows if row.get("error")]
        if lost:
            line += f" **Not measured there** (failed, or the time was up): {'; '.join(lost)}."
        lines.append(line)
    if all(a.provenance["device"] != "cuda" for a in found):
        lines.append("- **No archive of GPUs is here yet.**")
    return Markdown("\n".join(lines))


def _named(row: Mapping) -> str:
    names = [row.get(k) for k in ("comparison", "event", "run", "cause", "preset")]
    told = next((n for n in names if n), "all")
    if row.get("preset"):
        told += f" {row.get('implementation', '')} on {row.get('processes', 1)}"
    return f"{row['part']}: {told}"


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
            f"`{r['implementation']}`" + "".join(f", {HOW[how]}" for how in HOW if r.get(how)),
            r["processes"],
            f"{r['tokens_per_s']:,.0f}",
            mfu_text(r["mfu"]),
            "n/a" if r["peak_bytes"] is None else f"{r['peak_bytes'] / GIB:.1f} GiB",
            f"{r['step_ms']['p50']:.1f}",
            "yes" if r.get("cuda_graph") else "no",
            f"{r['machine']}, {r['date']}, code {r['code']}",
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
        "CUDA graph",
        "where",
    ]
    return markdown_table(head, lines)


def bench_rows(found: Sequence[Archive]) -> list[dict]:
    """Speeds on GPUs in archives of scaling, in the form of `throughput_rows`."""
    return [
        {k: a.provenance[k] for k in ("machine", "date", "code")} | row
        for a in found
        if a.provenance["device"] == "cuda"
        for row in part([a], "speed")
        if "tokens_per_s" in row
    ]


def speeds(found: Sequence[Archive], folder: Path = RESULTS) -> list[dict]:
    """Rows of `throughput_rows`, then those of scaling that are not among them."""
    rows = throughput_rows(folder)
    known = {tuple(row.get(k) for k in SAME) for row in rows}
    return rows + [r for r in bench_rows(found) if tuple(r.get(k) for k in SAME) not in known]


def newest(rows: Sequence[Mapping]) -> list[Mapping]:
    """The last row of each machine, preset, number of processes and attention, sorted by these.

    Compiled by block, or in Inductor's deterministic mode, counts as another attention.
    """
    found = {}
    for row in rows:
        what = [row[k] for k in ("machine", "preset", "processes", "implementation")]
        found[(*what, *(bool(row.get(how)) for how in HOW))] = row
    return [found[key] for key in sorted(found)]


def needed_sum(rows: Sequence[Mapping], gpus: int, share: float) -> Markdown:
    """How fast gradients must be summed for `share` of the ideal speed on `gpus` GPUs.

    From each measured step of one GPU whose update was timed by itself: computed, not measured.
    """
    one = [r for r in rows if r["processes"] == 1 and r.get("update_ms") is not None]
    if not one:
        return missing("A step whose update was timed by itself")
    lines = []
    for r in one:
        step = 1e3 * r["tokens_per_step"] / r["tokens_per_s"]
        update = r["update_ms"] * (1 - 1 / gpus)
        spare = step / (share * gpus) - step / gpus - update
        size = 4 * r["parameters"]
        rate = f"{size / spare / 1e6:,.0f} GB/s" if spare > 0 else "not possible"
        cells = [f"`{r['preset']}`, `{r['implementation']}`", f"{step:.1f}", f"{update:.2f}"]
        lines.append([*cells, f"{size / 1e6:,.0f} MB", f"{spare:.1f}", rate])
    head = ["", "step on one (ms)", "undivided update (ms)", "gradient", "time for its sum (ms)"]
    return markdown_table([*head, "that is"], lines)


def scaling_table(found: Sequence[Archive]) -> Markdown:
    rows = [r for r in part(found, "speed") if "ratio" in r]
    if not rows:
        return missing("The ratio of speeds")
    lines = [
        [
            f"{r['where']}: {r['scaling']}",
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


def compared_speeds(found: Sequence[Archive]) -> Markdown:
    """Speeds of the training runs that are compared below, one process against several.

    Medians over each run; of one process in its usual passes.
    """
    rows = [
        r
        for r in part(found, "losses")
        if r["processes"][0] == 1 < r["processes"][1]
        and "in passes" not in r["a"]
        and None not in r["tokens_per_s"]
    ]
    if not rows:
        return missing("The speed of whole training runs on one and on several GPUs")
    lines = []
    for r in rows:
        alone, together = r["tokens_per_s"]
        count = r["processes"][1]
        cells = [f"{alone:,.0f}", f"{together:,.0f}", f"{together / alone:.2f}"]
        name = f"{r['where']}: {r['preset']}, {r['attention']}"
        lines.append([name, f"1 to {count}", *cells, f"{100 * together / alone / count:.0f} %"])
    head = ["", "GPUs", "tokens/s on one", "on all", "speed", "of ideal"]
    return markdown_table(head, lines)


# -- the same batches, other processes ------------------------------------------------------------


def losses_table(found: Sequence[Archive]) -> Markdown:
    rows = part(found, "losses")
    if not rows:
        return missing("A comparison of losses")
    lines = [
        [
            f"{r['where']}, `{r['preset']}`: {r['comparison']}",
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
    for place, row in enumerate(part([archive], "losses")):
        pairs = zip(row["loss_a"], row["loss_b"])
        points = [(row["steps"][0] + i, abs(a - b)) for i, (a, b) in enumerate(pairs) if a != b]
        if points:
            style = dict(color=PALETTE[place], linestyle=DASHES[place], marker=".", ms=3)
            ax.plot(*zip(*points), label=row["comparison"], **style)
    ax.set(title="Rounding is amplified by training", xlabel="step", yscale="log")
    ax.set_ylabel("difference of losses (nats)")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center")
    return figure


def losses_figure(found: Sequence[Archive]) -> Captioned | Markdown:
    """`loss_differences` of the first archive that has any, with its caption."""
    archive = next((a for a in found if part([a], "losses")), None)
    if archive is None:
        return missing("A picture of the differences")
    return caption(
        loss_differences(archive),
        "Difference between the training losses of two runs on the same batches. Steps with equal "
        "bits have no mark.",
        archived(archive.provenance),
        alt="Differences of losses on a logarithmic axis against the step, one line a pair of "
        "runs; pairs that never differ have no line.",
    )


def losses_in_words(found: Sequence[Archive]) -> Markdown:
    """What the comparison that isolates the order of the sum says, for each archive."""
    rows = [r for r in part(found, "losses") if "in passes" in r["a"]]
    if not rows:
        return missing("The comparison with the same passes")
    return Markdown("\n".join(f"- *{r['where']}*: {_order_in_words(r)}" for r in rows))


def _order_in_words(row: Mapping) -> str:
    n = row["processes"][1]
    steps = [row["first_different"], row["first_different_grad_norm"]]
    differing = [s for s in steps if s is not None]
    if not differing:
        return (
            f"**nothing but the order of sums differs.** Split into the passes that {n} processes "
            f"take, one process gives the same bits as {n} for all {row['steps'][1] + 1} steps, "
            "in every loss and gradient norm. With other passes the same numbers are added in "
            "another order and differ in their last bits."
        )
    return (
        f"even with the same passes, {n} processes differ from one, first at step "
        f"{min(differing)}: the sum over processes adds in an order of its own, or a kernel sums "
        "in an order that changes from run to run."
    )


def kill_table(found: Sequence[Archive]) -> Markdown:
    rows = part(found, "kill")
    if not rows:
        return missing("The loss of a process")
    lines = []
    for r in rows:
        if "others_ended_after_s" in r:
            said = f"“{r['message']}”" if r["message"] else "no message"
            what = f"all ended after {r['others_ended_after_s']} s, run `{r['status']}`; {said}"
        else:
            same = r["first_different"] is None
            what = f"steps {r['from']} to {r['to']}, compared with the run that was not killed: "
            what += (
                "every loss the same bits"
                if same
                else f"other bits from step {r['first_different']}, "
                f"largest difference {r['largest_difference']:.1g}"
            )
        lines.append([r["where"], r["event"], what])
    return markdown_table(["where", "event", "what happened"], lines)


# -- rounding of the sum --------------------------------------------------------------------------


def probes_table(found: Sequence[Archive]) -> Markdown:
    rows = [r for r in part(found, "reduction") if "run" in r]
    if not rows:
        return missing("The error of delta under both reductions")
    lines = [
        [
            f"{r['where']}, {_processes(r)}",
            r["at_step"],
            f"{r['delta_error_mean']:.2g} ± {2 * r['delta_error_stderr']:.1g}",
            f"{r['delta_error_rms']:.2g}",
            f"{r['heads_beyond_2_stderr']} of {r['heads']}",
            f"{100 * r['dwq_error_ratio_median']:.2g} %",
        ]
        for r in rows
    ]
    head = ["", "step", "mean of δlp − δhp (± 2 s.e.)", "rms", "heads off zero"]
    return markdown_table([*head, "error of dW_Q by it (median head)"], lines)


def _processes(row: Mapping) -> str:
    n = row["processes"]
    return "1 process" if n == 1 else f"{n} processes, sums in {row['grad_reduce_dtype']}"


def causes_table(found: Sequence[Archive]) -> Markdown:
    rows = [r for r in part(found, "reduction") if "cause" in r]
    if not rows:
        return missing("Each cause of error in dW_Q by itself")
    lines = [
        [
            f"{r['where']}: {r['cause']}",
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


def reduction_in_words(found: Sequence[Archive]) -> Markdown:
    """Size and direction of each cause's error in a sentence."""
    rows = [r for r in part(found, "reduction") if "cause" in r]
    if not rows:
        return missing("What the sum rounds")
    words = []
    for r in rows:
        way = (
            "its direction is shared by batches"
            if accumulates(r)
            else "batches share no direction of it that we can see"
        )
        words.append(
            f"- *{r['where']}, {r['processes']} processes, {r['cause']}*: an error of "
            f"{100 * r['relative_size_median']:.2g} % of dW_Q in the median head; {way} "
            f"(mean cosine {r['between_batches']:+.3f} over {r['batches']} batches)."
        )
    return Markdown("\n".join(words))
