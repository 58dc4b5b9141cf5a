"""Tables and words of chapter 6, bf16 on a GPU, from archives alone (dials: `book.dose`).

Archives are those of `book.recipes` (folder `recipes`) and of `book.evidence --recipe` (folders
such as `failure-tiny`), made on a GPU. What is not in them is said to be missing; nothing is typed
from a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from IPython.display import Markdown

from gpt2.outcomes import DIVERGED_NATS, HEALTHY_FACTOR, VERDICT_RUNS, is_healthy

from .answer import forks_words
from .bf16_arms import attribution_words, fork_groups, fork_words
from .captions import Captioned
from .evidence import RESULTS, Archive, archives
from .gpu_experiments import BUILDERS
from .onsets import failed_twins, fork_state, judged
from .record_figures import captioned_panels
from .records import FAILED, cut_by_clock, failed_steps, one_a_seed
from .regimes import RECIPES
from .signs import places_words, signs, signs_words
from .survival import share_interval
from .tables import markdown_table, number, step_text

ENOUGH_SEEDS = 4  # of VERDICT_RUNS that must fail, each within MOST_MINUTES, for a recipe to do
MOST_MINUTES = 5.0
ARMS = ("low", "delta_fp32", "sdpa")
SEVERAL = 5  # runs from which on a recipe has a table of its own


# -- archives -------------------------------------------------------------------------------------


def gpu_archives(folder: Path = RESULTS) -> list[Archive]:
    """All archives of training runs on a GPU, by experiment, oldest first."""
    names = ["recipes", *(f"{kind}-{recipe}" for recipe in RECIPES for kind in BUILDERS)]
    found = [archive for name in names for archive in archives(name, folder)]
    return [a for a in found if a.provenance.get("device") == "cuda"]


def gpu_rows(found: Sequence[Archive]) -> list[dict]:
    """Records of all archived runs, each once.

    With `recipe`, `experiment`, `source`, `minutes`, and of a fork with its `state`
    (`onsets.fork_state`).

    A run that several experiments share counts for the first of them. Onsets of runs whose twin
    lies in another archive are judged from both records.
    """
    out: dict[str, dict] = {}
    for archive in found:
        name = archive.path.parent.name
        for row in archive.rows:
            told = {
                "recipe": row.get("recipe") or _recipe_of(name),
                "experiment": name,
                "source": archive.provenance,
                "state": row["forked_at"] and fork_state(archive, row),
                "minutes": (row["seconds"] or 0.0) / 60,
            }
            out.setdefault(row["run"], row | told)
    return judged(list(out.values()))


def _recipe_of(experiment: str) -> str:
    return max((r for r in RECIPES if experiment.endswith(f"-{r}")), key=len)


def of(rows: Sequence[Mapping], recipe: str, arm: str) -> list[Mapping]:
    """The runs from scratch of one arm of a recipe, one a seed (`book.records.one_a_seed`)."""
    mine = one_a_seed([r for r in rows if (r["recipe"], r["arm"]) == (recipe, arm)])
    return sorted(mine, key=lambda r: r["seed"])


def best_recipe(rows: Sequence[Mapping]) -> str | None:
    """The recipe whose low-precision arm diverged in most seeds while no twin failed; among
    equals the soonest. None where none diverged so."""
    score = {}
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        failed = [row for row in of(rows, recipe, "low") if row["kind"] == "diverged"]
        if failed and not failed_twins(rows, recipe):
            score[recipe] = (-len(failed), sum(row["minutes"] for row in failed) / len(failed))
    return min(score, key=score.get) if score else None


def onset_recipe(rows: Sequence[Mapping]) -> str | None:
    """The first recipe whose low precision shows an onset, which takes a twin to see."""
    names = dict.fromkeys(row["recipe"] for row in rows)
    return next((n for n in names if any(r["onset_step"] for r in of(rows, n, "low"))), None)


def shown_recipe(rows: Sequence[Mapping]) -> str | None:
    """The best recipe; where none diverged so, the first whose low precision shows an onset."""
    return best_recipe(rows) or onset_recipe(rows)


# -- what was tried -------------------------------------------------------------------------------


def recipe_table(rows: Sequence[Mapping] = ()) -> Markdown:
    """The declared recipes: what each departs from its preset in; those not tried, by name.

    rows: archived runs; without any, every recipe has its line.
    """
    plain = ("eval_interval", "probe_interval", "checkpoint_interval", "device", "dtype")
    tried = {row["recipe"] for row in rows} or set(RECIPES)
    lines = []
    for name in (name for name in RECIPES if name in tried):
        how = RECIPES[name]
        config = how.config
        told = ", ".join(f"`{k}={v}`" for k, v in how.changes if k not in plain)
        shape = f"{config.n_layer} x {config.n_head} x {config.head_dim}"
        tokens = f"{config.tokens_per_step:,}"
        lines.append([name, how.preset, told or "none", shape, tokens, f"{how.most:,}"])
    header = ["recipe", "preset", "changes", "layers x heads x width", "tokens a step"]
    table = markdown_table([*header, "must fail within"], lines).data
    left = [name for name in RECIPES if name not in tried]
    more = f"\n\nDeclared and not tried yet: {', '.join(left)}." if left else ""
    return Markdown(table + more)


def standing(rows: Sequence[Mapping]) -> Markdown:
    """What has been observed about bf16, in a few sentences; says so if nothing has."""
    if not rows:
        return Markdown(
            "**Nothing has been observed in bf16 yet**: no archive of a GPU holds a run of any "
            "recipe below. What follows from the dials on a CPU is a prediction, not a finding."
        )
    tried = list(dict.fromkeys(row["recipe"] for row in rows))
    lows = decided([row for recipe in tried for row in of(rows, recipe, "low")])
    cut = sum(cut_by_clock(row) for recipe in tried for row in of(rows, recipe, "low"))
    failed = [row for row in lows if row["kind"] == "diverged"]
    hours = sum(row["minutes"] for row in rows) / 60
    told = [
        f"Archived so far: {len(rows)} runs of {len(tried)} recipes, {hours:.1f} hours of "
        f"training. Of {len(lows)} low-precision runs in bf16 that came to an end {len(failed)} "
        f"diverged, in {len({row['recipe'] for row in failed})} recipes; {cut} more were cut by "
        "the clock before anything happened."
    ]
    best = best_recipe(rows)
    if best is None:
        told.append("**No recipe separates low precision from its twin by divergence so far.**")
    elif not of(rows, best, "delta_fp32"):
        told.append(
            f"**{best} diverges, and its twin is not run**: {_recipe_sentence(rows, best)}"
        )
    else:
        told.append(f"The best recipe so far is **{best}**: {_recipe_sentence(rows, best)}")
    begun = onset_recipe(rows)
    if begun not in (None, best):
        told.append(f"**By its onset {begun} separates them**: {_onset_sentence(rows, begun)}")
    return Markdown(" ".join(told))


def _onset_sentence(rows: Sequence[Mapping], recipe: str) -> str:
    """Of the seeds that have a twin: who left its course, and how far the twins went."""
    twins = {row["seed"]: row for row in of(rows, recipe, "delta_fp32")}
    low = [row for row in of(rows, recipe, "low") if row["seed"] in twins]
    begun = [row for row in low if row["onset_step"] is not None]
    gone = [twins[row["seed"]] for row in begun]
    outlived = [t for t, r in zip(gone, begun) if is_healthy(t["steps"], r["onset_step"])]
    kind = "verdict" if len(low) >= VERDICT_RUNS else "observed, not a verdict"
    return (
        f"ties or norms of low precision leave the course of the twin with $\\delta$ from an fp32 "
        f"$O$ in {len(begun)} of {len(low)} seeds, at step "
        f"{span(sorted(row['onset_step'] for row in begun))}. The twins, which went on to step "
        f"{span(sorted(row['steps'] for row in gone))}, failed in "
        f"{sum(row['kind'] in FAILED for row in gone)} of {len(gone)}; "
        f"{len(outlived)} of {len(gone)} went on for {HEALTHY_FACTOR:g} times the steps to the "
        f"onset, as the rule asks ({kind})."
    )


def _recipe_sentence(rows: Sequence[Mapping], recipe: str) -> str:
    low, twin = of(rows, recipe, "low"), of(rows, recipe, "delta_fp32")
    failed = [row for row in low if row["kind"] == "diverged"]
    healthy = sum(row["kind"] == "healthy" for row in twin)
    steps = sorted(row["diverged_step"] for row in failed)
    kind = "verdict" if min(len(low), len(twin)) >= VERDICT_RUNS else "observed, not a verdict"
    quick = len([row for row in failed if row["minutes"] <= MOST_MINUTES])
    goal = "is met" if quick >= ENOUGH_SEEDS and healthy >= quick else "is not met"
    twins = (
        f"healthy for {HEALTHY_FACTOR:g} times as long: {healthy} of {len(twin)} twins"
        if twin
        else "whether that failure is $\\delta$'s is open"
    )
    return (
        f"low precision diverged in {len(failed)} of {len(low)} seeds, at steps "
        f"{span(steps)}; {twins} ({kind}). The goal of {ENOUGH_SEEDS} seeds in "
        f"{VERDICT_RUNS}, each within {MOST_MINUTES:g} minutes, {goal}."
    )


def span(values: Sequence[float]) -> str:
    """'1,200 to 3,400' of ascending values; 'none' of none."""
    if not values:
        return "none"
    ends = f"{values[0]:,.0f}", f"{values[-1]:,.0f}"
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def runs_table(rows: Sequence[Mapping]) -> Markdown:
    """Every archived run: outcome, onset, where it stopped, speed and minutes.

    A table for each recipe of SEVERAL runs or more, that which separates first; one for the rest.
    """
    if not rows:
        return Markdown("*No run on a GPU is archived yet.*")
    header = ["arm", "seed", "outcome", "onset", "steps/s", "rise (nats)", "minutes"]
    groups: dict[str, list[Mapping]] = {name: [] for name in [shown_recipe(rows)] if name}
    for row in rows:
        groups.setdefault(row["recipe"], []).append(row)
    parts, rest = [], []
    for recipe, mine in groups.items():
        if len(mine) < SEVERAL:
            rest += mine
            continue
        table = markdown_table(header, [_run_line(row) for row in mine]).data
        parts.append(f"**{recipe}** ({_places(mine)})\n\n{table}")
    if rest:
        lines = [[row["recipe"], *_run_line(row)] for row in rest]
        table = markdown_table(["recipe", *header], lines).data
        parts.append(f"**Recipes of fewer runs** ({_places(rest)})\n\n{table}")
    return Markdown("\n\n".join(parts))


def _places(rows: Sequence[Mapping]) -> str:
    """'NVIDIA H200, 2026-11-29; NVIDIA H200, 2026-11-30'."""
    places = (f"{row['source']['machine']}, {row['source']['date']}" for row in rows)
    return "; ".join(dict.fromkeys(places))


def _run_line(row: Mapping) -> list:
    outcome = step_text(row) + (" (cut by the clock)" if cut_by_clock(row) else "")
    return [
        row["label"] + ("" if row["forked_at"] is None else f" from {row['forked_at']:,}"),
        row["seed"],
        f"crashed: {row.get('message')}" if row["status"] == "failed" else outcome,
        "none" if row["onset_step"] is None else f"{row['onset_step']:,}",
        number(row.get("steps_per_s") or pace_of(row), 0),
        number(rise(row), 2),
        number(row["minutes"], 1),
    ]


def rise(row: Mapping) -> float | None:
    """The smoothed training loss at the end above its minimum, nats, from the kept curve.

    The rule calls a run diverged at 1; one that ends just below is not called so, but is not well.
    """
    kept = row["curves"].get("train_loss", {"value": []})["value"]
    finite = [value for value in kept if value is not None]
    return finite[-1] - min(finite) if finite else None


def decided(rows: Sequence[Mapping]) -> list[Mapping]:
    """The runs that count in a share: those that failed, or came to their end without."""
    return [row for row in rows if row["status"] != "failed" and not cut_by_clock(row)]


def pace_of(row: Mapping) -> float | None:
    """Steps a second of a run over its whole duration; of a fork, from where it starts."""
    own = row["steps"] - (row["forked_at"] or 0)
    return own / row["seconds"] if row["seconds"] else None


def success_table(rows: Sequence[Mapping]) -> Markdown:
    """Per recipe: the share of seeds in which low precision diverged, with its interval, beside
    the twin and PyTorch's own attention.

    A verdict needs VERDICT_RUNS, and beside each that failed a twin that did too or is healthy.
    """
    if not rows:
        return Markdown("*No success rate: nothing was run.*")
    lines = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        low = decided(of(rows, recipe, "low"))
        if not low:
            continue
        failed = [row for row in low if row["kind"] == "diverged"]
        ends = share_interval(len(failed), len(low))
        spread = f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f} %"
        minutes = sorted(row["minutes"] for row in failed)
        others = [_fates(of(rows, recipe, arm)) for arm in ARMS[1:]]
        told = [span(sorted(row["diverged_step"] for row in failed))]
        told += [", ".join(f"{m:.1f}" for m in minutes) or "none"]
        twins = {r["seed"] for r in of(rows, recipe, ARMS[1]) if r["kind"] in (*FAILED, "healthy")}
        told_of_all = all(row["seed"] in twins for row in failed)
        kind = "verdict" if len(low) >= VERDICT_RUNS and told_of_all else "observed"
        lines.append([recipe, f"{len(failed)} of {len(low)}", spread, *told, *others, kind])
    if not lines:
        return Markdown("*No low-precision run has come to an end yet.*")
    header = ["recipe", "bf16 diverged", "95 % interval", "at steps", "minutes"]
    header += ["delta from an fp32 O", "PyTorch's own", "standing"]
    return markdown_table(header, lines)


def _fates(rows: Sequence[Mapping]) -> str:
    if not rows:
        return "not run"
    kinds = [row["kind"] for row in rows]
    words = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    unwell = [row for row in rows if is_unwell(row)]
    return words + (f" ({len(unwell)} of them unwell)" if unwell else "")


def is_unwell(row: Mapping) -> bool:
    """Not failed by the rule, and yet its loss ended more than half of the rule's nat too high."""
    height = rise(row)
    return row["kind"] not in FAILED and height is not None and height > DIVERGED_NATS / 2


# -- paired curves --------------------------------------------------------------------------------


def paired(rows: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    """'tiny, seed 0' -> the runs on the same batches, low precision first.

    Real pairs, and low precision alone where its scores grew (`book.signs`); the recipe that
    separates them comes first.
    """
    out, first = {}, shown_recipe(rows)
    for recipe in sorted(dict.fromkeys(row["recipe"] for row in rows), key=lambda r: r != first):
        for low in of(rows, recipe, "low"):
            arms = [r for arm in ARMS for r in of(rows, recipe, arm) if r["seed"] == low["seed"]]
            if len(arms) > 1 or signs(low).grew:
                out[f"{recipe}, seed {low['seed']}"] = arms
    return out


def paired_figure(name: str, rows: Sequence[Mapping]) -> Captioned:
    """Loss, worst norm, ties and scores of low precision, its twin and the witness."""
    metrics = ["train_loss", "spectral_norm_q", "tie_rate", "max_logit"]
    words = f"Recipe {name}: same batches, same first weights; worst head at each step."
    limits = {"smoothed_train_loss": _later_losses(rows)}
    return captioned_panels(rows, metrics, words, "Four panels over the steps.", limits=limits)


def _later_losses(rows: Sequence[Mapping]) -> tuple[float, float]:
    """Ends of the losses after the first tenth of each run, whose fall would hide all the rest."""
    later = []
    for row in rows:
        kept = row["curves"]["train_loss"]
        pairs = zip(kept["step"], kept["value"])
        later += [v for step, v in pairs if v is not None and 10 * step >= kept["step"][-1]]
    gap = 0.05 * (max(later) - min(later)) or 0.1
    return min(later) - gap, max(later) + gap


# -- findings -------------------------------------------------------------------------------------


def what_you_saw(rows: Sequence[Mapping], dials: str) -> Markdown:
    """The findings as a list, every number from a record. dials: lines of `book.dose`."""
    found = [standing(rows).data, *recipe_lines(rows), *signs_words(rows), *places_words(rows)]
    found += [*forks_lines(rows), *forks_words(rows)]
    found += attribution_words(rows)
    return Markdown("\n".join([*(f"- {line}" for line in found), *dials.splitlines()]))


def forks_lines(rows: Sequence[Mapping]) -> list[str]:
    """`bf16_arms.fork_words` of each group, beside the run from scratch that it belongs to."""
    told = []
    for forks in fork_groups(rows).values():
        low = {row["seed"]: row for row in of(rows, forks[0]["recipe"], "low")}
        told.append(fork_words(forks, low.get(forks[0]["seed"])))
    return [line for line in told if line]


def recipe_lines(rows: Sequence[Mapping]) -> list[str]:
    """One sentence for each way in which recipes ended short of a confirmation."""
    given_up, alive = [], []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        low, twins = of(rows, recipe, "low"), failed_twins(rows, recipe)
        failed = [row for row in low if row["kind"] in FAILED]
        if failed and twins:
            both = f"{span(failed_steps(failed))} against {span(failed_steps(twins))}"
            given_up.append(f"{recipe} ({both}; {_fates(of(rows, recipe, 'sdpa'))})")
        elif low and not failed:
            longest = max(low, key=lambda row: row["steps"])
            cut = ", cut by the clock" if cut_by_clock(longest) else ""
            sign = longest["onset_step"]
            sign = "" if sign is None else f", onset at step {sign:,}"
            alive.append(f"{recipe} ({longest['steps']:,} steps{sign}{cut})")
    lines = []
    if given_up:
        lines.append(
            "Failures that are not $\\delta$'s, since the twin failed as well (steps of low "
            f"precision against the twin's; PyTorch's own attention): {', '.join(given_up)}."
        )
    if alive:
        lines.append(f"No divergence in bf16 as far as it was run: {', '.join(alive)}.")
    return lines
