"""Chapter 2: what the outcomes of interventions say, beside the paper's table.

Of forks, only seeds whose failing run failed are counted (`verdicts.tested`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from IPython.display import Markdown

from gpt2.config import make_config
from gpt2.ddmin import Trace

from .chapter2 import grew_words, search_words
from .evidence import Archive
from .experiments import Experiment
from .isolation_figures import by_arm, head_values, worst_layer
from .records import FAILED
from .tables import markdown_table, number, step_text
from .verdicts import counted, failures, lost_words, onsets, standing, tested, untested_words

# What section 3.2 of the paper reports for GPT-2 small with bf16 flash attention; its layers 1 to
# 12 are our 0 to 11, so its second layer is layer 1 here. True: training failed.
PAPER = {
    "no change": True,
    "no tiling": True,
    "low precision in layer 1 only": True,
    "fp32 in layer 1 only": False,
    "delta from dP and P": False,
    "delta from an O in fp32": False,
    "O_bar and O in fp32": False,
    "the outlier heads in fp32": False,
}


# -- against the paper ----------------------------------------------------------------------------


def paper_table(experiment: Experiment, rows: Sequence[Mapping]) -> Markdown:
    """The paper's interventions beside ours: failed or not, and whether the two agree."""
    lines = [
        [label, _word(paper), ours, agreement]
        for label, paper, ours, agreement in paper_comparison(experiment, rows)
    ]
    return markdown_table(["intervention", "in the paper", "here", "agreement"], lines)


def paper_comparison(
    experiment: Experiment, rows: Sequence[Mapping]
) -> list[tuple[str, bool, str, str]]:
    """(label, the paper failed, what happened here, agreement) of every intervention in PAPER."""
    arms = by_arm(tested(rows, experiment.parent))
    found = {label: a for a in experiment.arms for label in (a.label, *a.also)}
    # Small models have one outlier head.
    found.setdefault("the outlier heads in fp32", experiment.arm("heads_outliers"))
    out = []
    for label, paper in PAPER.items():
        arm = found.get(label)
        mine = arms.get(arm.name, []) if arm else []
        if not mine:
            out.append((label, paper, "not run", "-"))
            continue
        word = _agreement(paper, failures(mine), onsets(mine), len(mine))
        if arm.group == "heads" and not has_heads(experiment):
            word = "no verdict: too few heads"
        out.append((label, paper, counted(mine), word))
    return out


def has_heads(experiment: Experiment) -> bool:
    """Whether the model is large enough for statements about single heads (6 layers, 6 heads)."""
    config = make_config(experiment.preset)
    return min(config.n_layer, config.n_head) >= 6


def _agreement(paper_failed: bool, failed: int, signs: int, runs: int) -> str:
    """Between the paper's outcome and ours; an onset without failure is neither."""
    if (failed == runs) if paper_failed else (failed + signs == 0):
        return "agrees"
    if (failed + signs == 0) if paper_failed else (failed == runs):
        return "**differs**"
    return "mixed"


def _word(failed: bool) -> str:
    return "fails" if failed else "stable"


def account(experiment: Experiment, rows: Sequence[Mapping]) -> Markdown:
    """What the forks leave of the paper's chain of evidence, link by link, in words."""
    arms = by_arm(tested(rows, experiment.parent))
    if not arms:
        return Markdown("*No failing run failed here, so its forks are no test.*")
    links = {
        "Tiling": _tiling(arms),
        "The layer": _layer(arms),
        "δ": _remedies(arms),
        "Ō or O": _outputs(arms),
        "Heads": ""
        if has_heads(experiment)
        else "So small a model has too few of them for a verdict; the table above has the arms.",
    }
    told = [f"- **{name}.** {words}" for name, words in links.items() if words]
    runs = standing(min(len(mine) for mine in arms.values()))
    return Markdown("\n".join([f"- Standing: {runs}.", *told]))


def _tiling(arms: Mapping[str, Sequence[Mapping]]) -> str:
    tiles = [arms[n] for n in ("same", "tile_16", "tile_64", "tile_each") if n in arms]
    if not tiles:
        return ""
    ended = "; ".join(f"{mine[0]['label']} {counted(mine)}" for mine in tiles)
    blame = "not to blame, as in the paper" if all(map(failures, tiles)) else "not cleared here"
    return f"It is {blame}: {ended} (*no change* has no tiles)."


def _layer(arms: Mapping[str, Sequence[Mapping]]) -> str:
    """Of the last layer against the first, where there are two."""
    if not {"only_L0", "only_L1"} <= set(arms) or "only_L2" in arms:
        return ""
    first, second = arms["only_L0"], arms["only_L1"]
    told = (
        f"Low precision in layer 1 alone: {counted(second)}; in layer 0 alone: {counted(first)}."
    )
    if failures(second) == len(second) and not failures(first):
        late = ", though layer 0 alone does not stay quiet" if onsets(first) else ""
        return f"{told} So layer 1 is enough, and needed, as the paper's second layer is{late}."
    return f"{told} So neither layer alone carries it as the paper's second layer does."


def _remedies(arms: Mapping[str, Sequence[Mapping]]) -> str:
    names = ("delta_dP_P", "delta_fp32", "forward_fp32")
    mine = [arms[n] for n in names if n in arms]
    if not mine:
        return ""
    ended = "; ".join(f"{rows[0]['label']} {counted(rows)}" for rows in mine)
    sound = not any(failures(rows) + onsets(rows) for rows in mine)
    word = "All of the paper's remedies hold" if sound else "Not all of the paper's remedies hold"
    return f"{word}: {ended}."


def _outputs(arms: Mapping[str, Sequence[Mapping]]) -> str:
    """Which of the two roundings between P V and delta it takes."""
    names = ("site_unnormalized", "site_output", "forward_fp32")
    if any(name not in arms for name in names):
        return ""
    alone, stored, both = (arms[name] for name in names)
    told = f"In fp32, Ō alone: {counted(alone)}; the stored O alone: {counted(stored)}; both: "
    told += f"{counted(both)}."
    if failures(alone) and not failures(both):
        told += (
            " The paper names Ō. Here O's own rounding is enough to spoil δ, so that a finer Ō "
            "does not save the run"
        )
        fewer = failures(stored) < failures(alone)
        told += ", and a finer O saves more of them." if fewer else "."
    return told


# -- what you saw ---------------------------------------------------------------------------------


def what_you_saw(
    experiment: Experiment,
    rows: Sequence[Mapping],
    kept: Archive | None,
    trace: Trace,
    searches: Archive | None = None,
) -> Markdown:
    """The chapter's findings as a list, every number from a record."""
    told = [f"{_sentence(row)}." for row in rows]
    told.append(f"The search over layers. {search_words(trace)}")
    parent = [row for row in rows if row["arm"] == experiment.parent]
    if parent and parent[0]["heads"].get("spectral_norm_q"):
        _, values = head_values(parent[0], "spectral_norm_q")
        told.append(
            f"The largest spectral norm of the failing run, {number(np.nanmax(values), 1)}, "
            f"was reached in layer {worst_layer(parent[0])} of layers 0 to "
            f"{values.shape[1] - 1}."
        )
    told += cost_of_living(tested(rows if kept is None else kept.rows, experiment.parent))
    if kept is not None:
        told += archive_findings(experiment, kept.rows)
    if searches is not None:
        told += searched_units(searches)
    compared = paper_comparison(experiment, rows if kept is None else kept.rows)
    told.append(_differences(compared))
    return Markdown("\n".join(f"- {sentence}" for sentence in told))


def _differences(compared: Sequence[tuple[str, bool, str, str]]) -> str:
    words = {label: word for label, _, _, word in compared if word != "-"}
    if not words:
        return "No failing run failed here, so nothing can be compared with the paper."
    other = [label for label, word in words.items() if word in ("**differs**", "mixed")]
    if other:
        return f"Not as in the paper: {'; '.join(other)}."
    return "Every intervention that was run here ended as the paper's did."


def _sentence(row: Mapping) -> str:
    loss = row["held_out_loss"]
    end = "" if loss is None or row["kind"] in FAILED else f", held-out loss {number(loss)} nats"
    return f"{row['label'][:1].upper()}{row['label'][1:]}: {step_text(row)}{end}"


def cost_of_living(rows: Sequence[Mapping]) -> list[str]:
    """How much worse than fp32 the forks are that live on in low precision, in held-out loss."""
    exact = {r["seed"]: r["held_out_loss"] for r in rows if r["arm"] == "exact"}
    costs = {
        mine[0]["label"]: float(
            np.mean([r["held_out_loss"] - exact[r["seed"]] for r in mine if r["seed"] in exact])
        )
        for name, mine in by_arm(rows).items()
        if name != "exact" and exact and all(r["kind"] in ("healthy", "stable") for r in mine)
    }
    if not costs:
        return []
    least, most = min(costs, key=costs.get), max(costs, key=costs.get)
    return [
        "Not failing is not the same as doing well. Measured from everything in fp32, the forks "
        f"that lived end between {number(costs[least])} ({least}) and {number(costs[most])} nats "
        f"({most}) higher."
    ]


def archive_findings(experiment: Experiment, rows: Sequence[Mapping]) -> list[str]:
    """Which interventions always, never and sometimes prevented the failure, over all seeds.

    Arms about heads come apart, and labelled, where the model has too few of them.
    """
    kept = tested(rows, experiment.parent)
    if not kept:
        return ["Archived: no failing run failed, so its forks are no test."]
    failing = [r for r in kept if r["arm"] == experiment.parent and r["heads"]]
    told = [untested_words(rows, experiment.parent)]
    if failing:
        told.append(f"Archived failing runs reached their largest norm in {grew_words(failing)}.")
    arms = {n: mine for n, mine in by_arm(kept).items() if n != experiment.parent}
    heads = {n for n in arms if experiment.arm(n).group == "heads"} - (
        set(arms) if has_heads(experiment) else set()
    )
    others = [mine for n, mine in arms.items() if n not in heads]
    told += _sorted_out("Archived", others)
    told += _sorted_out("Archived, about heads, a demonstration only", [arms[n] for n in heads])
    told.append(lost_words(rows))
    return [sentence for sentence in told if sentence]


def _sorted_out(start: str, arms: Sequence[Sequence[Mapping]]) -> list[str]:
    """A sentence for each kind of end that some of the arms share."""
    groups: dict[str, list[str]] = {}
    for mine in arms:
        failed, signs, label = failures(mine), onsets(mine), mine[0]["label"]
        if failed == len(mine):
            groups.setdefault("every run failed with", []).append(label)
        elif failed:
            groups.setdefault("some failed with", []).append(f"{label} ({counted(mine)})")
        elif signs:
            told = f"{label} ({signs} of {len(mine)})"
            groups.setdefault("none failed, but some showed an onset, with", []).append(told)
        else:
            groups.setdefault("none failed or showed an onset with", []).append(label)
    if not groups:
        return []
    runs = min(len(mine) for mine in arms)
    return [f"{start} ({standing(runs)}): {w}: {', '.join(g)}." for w, g in groups.items()]


def searched_units(searches: Archive) -> list[str]:
    """How often each unit was in the smallest set that a search ended with."""
    traces = [Trace.from_dict(row["trace"]) for row in searches.rows]
    ended = [set(t.result) for t in traces if t.state == "minimal" and t.result]
    if not ended:
        return []
    counts = Counter(unit for units in ended for unit in sorted(units))
    often = ", ".join(f"`{unit}` in {n}" for unit, n in counts.most_common(4))
    sizes = ", ".join(str(len(units)) for units in ended)
    return [
        f"Archived searches ({standing(len(ended), 'searches')}): {len(ended)} of {len(traces)} "
        f"ended with a smallest set, of {sizes} places. Most often in it: {often}."
    ]


def shorter(rows: Sequence[Mapping]) -> str:
    """'no change: diverged at 2,038; ...' for descriptions of figures with several seeds."""
    told = []
    for mine in by_arm(rows).values():
        ended = step_text(mine[0]) if len(mine) == 1 else counted(mine)
        told.append(f"{mine[0]['label']}: {ended}")
    return "; ".join(told) + "."
