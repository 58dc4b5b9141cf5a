"""Chapter 6 from archives: with none, with a recipe that fails, and with one that does not."""

import json

import pytest

from book import bf16_arms as arms
from book import chapter6 as c6
from book import dose
from book.gpu_experiments import failure, failure_forked
from book.remaining import missing_runs, remaining_table, remaining_words
from book.tables import arm_table, step_text
from gpt2.outcomes import Onset, Outcome

SOURCE = {
    "machine": "Some GPU",
    "device": "cuda",
    "date": "2026-11-30",
    "code": "abc",
    "preset": "cpu",
    "corpus": "installed-text",
    "seeds": [0, 1, 2, 3, 4],
}
ASKED = "stopped after 66003 steps, as asked"
LABELS = {"low": "low precision", "delta_fp32": "delta from an fp32 O", "sdpa": "PyTorch's own"}


def row(recipe, arm, seed, kind, steps, *, minutes=2.0, status="diverged", **more):
    """A record of a run, as `book.recipes` archives it."""
    step = {f"{kind}_step": steps} if kind in ("diverged", "nonfinite") else {}
    sign = Onset(steps // 2, "tie_rate", 1, 0, 0.4, 0.1) if kind == "diverged" else None
    outcome = Outcome(kind, last_step=steps, onset=sign, **step)
    curve = {"step": [0, steps], "value": [3.0, 2.0, 2.0 + more.pop("risen", 0.0)]}
    curve["step"].insert(1, steps // 2)
    told = outcome.to_dict() | {"steps": steps, "onset_step": outcome.onset_step}
    return told | {
        "recipe": recipe,
        "arm": arm,
        "label": LABELS.get(arm, arm),
        "seed": seed,
        "status": status,
        "forked_at": None,
        "attention": arm,
        "changes": {},
        "run": f"{recipe}-{arm}-{seed}",
        "seconds": 60 * minutes,
        "steps_per_s": 500.0,
        "outcome": outcome.to_dict(),
        "curves": {name: curve for name in ("train_loss", "spectral_norm_q", "tie_rate")},
        **more,
    }


def confirmed(recipe="tiny", failures=5):
    """Low precision fails in so many seeds of five; all twins of those are healthy."""
    kinds = ["diverged"] * failures + ["stable"] * (5 - failures)
    rows = [row(recipe, "low", s, kind, 40_000 + 1_000 * s) for s, kind in enumerate(kinds)]
    rows += [
        row(recipe, "delta_fp32", s, "healthy", 66_002, status="interrupted", message=ASKED)
        for s in range(failures)
    ]
    return [*rows, row(recipe, "sdpa", 0, "healthy", 66_002, status="interrupted")]


def save(folder, name, rows, file="gpu.json", **source):
    path = folder / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": SOURCE | source, "rows": rows}))


def read(folder):
    return c6.gpu_rows(c6.gpu_archives(folder))


def test_without_archives_the_page_says_that_nothing_was_observed(tmp_path):
    rows = read(tmp_path)
    assert rows == [] and c6.best_recipe(rows) is None
    assert "Nothing has been observed in bf16 yet" in c6.standing(rows).data
    assert "No run on a GPU" in c6.runs_table(rows).data
    assert "nothing was run" in c6.success_table(rows).data
    assert c6.paired(rows) == {} and dose.dose_sets(rows, tmp_path) == {}
    assert "unknown" in remaining_table(rows).data
    assert "costs are unknown" in remaining_words(rows).data
    assert "not run in bf16" in c6.what_you_saw(rows, "").data


def test_archives_of_a_cpu_are_no_evidence_of_a_gpu(tmp_path):
    save(tmp_path, "recipes", confirmed(), device="cpu")
    assert read(tmp_path) == []


def test_a_run_in_two_archives_counts_once(tmp_path):
    save(tmp_path, "recipes", confirmed())
    save(tmp_path, "recipes", confirmed(), file="gpu-2.json")
    shared = {k: v for k, v in confirmed()[0].items() if k != "recipe"}
    save(tmp_path, "failure-tiny", [shared])
    rows = read(tmp_path)
    assert len(rows) == 11 and {r["recipe"] for r in rows} == {"tiny"}


@pytest.mark.parametrize("failures, goal", [(5, "is met"), (4, "is met"), (3, "is not met")])
def test_a_recipe_does_if_four_of_five_seeds_fail_and_their_twins_stay_healthy(
    tmp_path, failures, goal
):
    save(tmp_path, "recipes", confirmed(failures=failures))
    words = c6.standing(read(tmp_path)).data
    assert f"diverged in {failures} of 5 seeds" in words and goal in words
    assert f"{failures} of {failures} twins" in words


def test_slow_failures_do_not_meet_the_goal(tmp_path):
    save(tmp_path, "recipes", [r | {"seconds": 900.0} for r in confirmed()])
    assert "is not met" in c6.standing(read(tmp_path)).data


def test_a_recipe_whose_twin_fails_is_not_the_best(tmp_path):
    bad = [
        row("tiny-lr20", "low", 0, "diverged", 900),
        row("tiny-lr20", "delta_fp32", 0, "diverged", 950),
    ]
    save(tmp_path, "recipes", bad)
    assert "No recipe separates" in c6.standing(read(tmp_path)).data
    save(tmp_path, "recipes", [*bad, *confirmed("tiny-b64", failures=1)])
    assert c6.best_recipe(read(tmp_path)) == "tiny-b64"


def test_tables_tell_outcome_cost_and_what_was_cut_or_crashed(tmp_path):
    cut = row("tiny", "low", 7, "stable", 900, status="interrupted", message="stopped by SIGINT")
    crash = row("tiny", "low", 8, "stable", 0, status="failed", message="out of memory")
    save(tmp_path, "recipes", [*confirmed(failures=4), cut, crash])
    table = c6.runs_table(read(tmp_path)).data
    assert table.startswith("**tiny** (Some GPU, 2026-11-30)\n\n| arm |")
    assert "diverged at 40,000 | 20,000 | 500 | 0.00 | 2.0 |" in table
    assert "stable to 900 (cut by the clock)" in table and "crashed: out of memory" in table
    assert "healthy to 66,002 (cut" not in table
    table = c6.success_table(read(tmp_path)).data
    assert "| tiny | 4 of 5 | 38 to 96 % | 40,000 to 43,000 | 2.0, 2.0, 2.0, 2.0 |" in table
    assert "| 4 healthy | 1 healthy | verdict |" in table


def test_a_failure_that_the_twin_shares_is_not_deltas_and_an_unwell_witness_is_told(tmp_path):
    rows = [row("mini-b16-lr8", "low", 0, "diverged", 1_046, risen=1.0)]
    rows += [row("mini-b16-lr8", "delta_fp32", 0, "diverged", 912, risen=1.1)]
    rows += [row("mini-b16-lr8", "sdpa", 0, "healthy", 1_569, risen=0.77)]
    rows += [
        row("tiny", "low", 0, "stable", 900, status="interrupted", message="stopped by SIGINT")
    ]
    save(tmp_path, "recipes", rows)
    found = read(tmp_path)
    shared, alive = c6.recipe_lines(found)
    assert "mini-b16-lr8 (1,046 against 912; 1 healthy (1 of them unwell))" in shared
    assert "tiny (900 steps, cut by the clock)" in alive
    late = row("tiny", "low", 0, "onset", 900, status="interrupted", onset_step=700)
    save(tmp_path, "recipes", [late])
    assert "tiny (900 steps, onset at step 700" in c6.recipe_lines(read(tmp_path))[0]
    assert "| tiny |" not in c6.success_table(found).data  # a cut run is no trial
    assert "1 more were cut" in c6.standing(found).data
    assert "| 1 diverged | 1 healthy (1 of them unwell) |" in c6.success_table(found).data
    table = c6.runs_table(found).data
    assert table.startswith("**Recipes of fewer runs** (Some GPU, 2026-11-30)\n\n| recipe |")
    assert "own | 0 | healthy to 1,569 | none | 500 | 0.77 |" in table


def test_pairs_are_runs_on_the_same_batches(tmp_path):
    save(tmp_path, "recipes", confirmed())
    pairs = c6.paired(read(tmp_path))
    assert [r["arm"] for r in pairs["tiny, seed 0"]] == ["low", "delta_fp32", "sdpa"]
    assert len(pairs) == 5 and [r["arm"] for r in pairs["tiny, seed 1"]] == ["low", "delta_fp32"]
    shown = str(c6.paired_figure("tiny, seed 0", pairs["tiny, seed 0"]))
    assert "diverged at 40,000" in shown and "Some GPU" in shown and "seeds 0" in shown


def test_other_arms_are_told_by_experiment(tmp_path):
    save(tmp_path, "recipes", confirmed())
    forks = [
        row("tiny", "only_scores", 0, "stable", 60_000, forked_at=9_000),
        row("tiny", "only_unnormalized", 0, "diverged", 41_000, forked_at=9_000),
    ]
    save(tmp_path, "sites-tiny", forks)
    rows = read(tmp_path)
    assert "only_unnormalized | 1 of 1" in arms.arm_tables(rows).data
    words = c6.what_you_saw(rows, "- dials").data
    assert "failed: only_unnormalized (1 of 1); did not: only_scores (0 of 1)" in words
    assert words.endswith("- dials") and "error of $\\delta$ changed: not run in bf16" in words


def test_forks_whose_ties_cannot_be_judged_decide_nothing(tmp_path):
    save(tmp_path, "recipes", confirmed())
    fork = row("tiny", "only_scores", 0, "stable", 60_000, forked_at=9_000)
    fork["outcome"]["ties_judged"] = False
    save(tmp_path, "sites-tiny", [fork])
    rows = read(tmp_path)
    assert step_text(fork) == "stable to 60,000, ties not judged"
    told = c6.what_you_saw(rows, "").data
    assert "with one rounding alone: not judged, since the forks began with too many" in told
    failed = row("tiny", "only_output", 0, "diverged", 41_000, forked_at=9_000)
    failed["outcome"]["ties_judged"] = False
    save(tmp_path, "sites-tiny", [fork, failed])
    told = c6.what_you_saw(read(tmp_path), "").data
    assert "failed: only_output (1 of 1); did not: none" in told


def test_arms_of_a_recipe_that_shows_an_onset_alone_are_told_too(tmp_path):
    late = row("tiny", "low", 0, "onset", 900, status="interrupted", onset_step=700)
    save(tmp_path, "recipes", [late, row("tiny", "delta_fp32", 0, "stable", 900)])
    forks = [row("tiny", "only_scores", 0, "onset", 900, forked_at=600, onset_step=720)]
    forks.append(row("tiny", "only_output", 0, "stable", 900, forked_at=600))
    save(tmp_path, "sites-tiny", forks)
    rows = read(tmp_path)
    assert c6.best_recipe(rows) is None and c6.shown_recipe(rows) == "tiny"
    told = c6.standing(rows).data
    assert "By its onset tiny separates them" in told and "in 1 of 1 seeds, at step 700" in told
    assert "failed in 0 of 1; 0 of 1 went on for 1.5 times" in told  # 900 < 1.5 x 700
    assert "| `python -m book.evidence sites --recipe tiny` |" in remaining_table(rows).data
    assert "judged by its onset" in remaining_words(rows).data
    assert "only_scores" in arms.arm_tables(rows).data
    words = "failed or showed an onset: only_scores (1 of 1); did not: only_output (0 of 1)"
    assert words in c6.what_you_saw(rows, "").data


def test_one_rounding_less_is_told_beside_the_control(tmp_path):
    """Sooner onsets first; what was cut before 1.5 times the control's onset is not judged."""
    save(tmp_path, "recipes", [row("tiny", "low", 0, "onset", 12_000, onset_step=11_000)])
    save(tmp_path, "failure-forked-tiny", [fork("same", "onset", 12_500, 0.5, onset_step=11_000)])
    save(tmp_path, "sites-tiny", [
        fork("site_scores", "stable", 16_600, 0.1),
        fork("site_output", "stable", 12_000, 0.1),
        fork("backward_fp32", "onset", 12_000, 0.5, onset_step=11_900),
        fork("site_inputs", "onset", 12_000, 0.5, onset_step=11_100),
    ])  # fmt: skip
    (told,) = arms.site_words(read(tmp_path))
    assert (
        "its onset at 11,000 (tiny, seed 0). site_inputs: onset at 11,100; backward_fp32" in told
    )
    assert "onset at 11,900; site_scores: no sign by 16,600; site_output: no sign by 12,000, " in (
        told
    )
    assert told.endswith("no sign by 12,000, not judged.")
    assert told in c6.what_you_saw(read(tmp_path), "").data


def test_a_table_of_arms_names_onsets_only_where_there_are_any():
    runs = [row("tiny", "low", s, "onset", 900, onset_step=700 - s) for s in (0, 1)]
    twins = [row("tiny", "delta_fp32", s, "stable", 900) for s in (0, 1)]
    assert "onset" not in arm_table(twins).data
    told = arm_table([*runs, *twins]).data
    assert (
        "| 0 of 2 | none | 699, 700 | 900 |" in told and "| 0 of 2 | none | none | 900 |" in told
    )


def dial_rows(seeds=(0, 1), limit=40_000):
    out = []
    for bits in (2, 3, 4, 5):
        for seed in seeds:
            step = 1_000 * 2**bits + 100 * seed
            kind = "diverged" if step <= limit else "stable"
            arm = f"matched{bits}"
            made = row(
                "tiny", arm, seed, kind, min(step, limit), label=f"matched dial, {bits} bits"
            )
            out.append(made)
    return out


@pytest.mark.parametrize("step, fate", [(130_000, "within"), (3_000, "outside")])
def test_the_dial_is_held_against_bf16_itself(tmp_path, step, fate):
    save(tmp_path, "dials-tiny", dial_rows())
    save(tmp_path, "recipes", [row("tiny", "low", 0, "diverged", step)])
    rows = read(tmp_path)
    sets = dose.dose_sets(rows, tmp_path)
    (found,) = dose.fits(sets["recipe tiny"]["points"]).values()
    assert found.slope == pytest.approx(1.0, abs=0.1) and found.censored == 0
    words = dose.dose_words(sets).data
    assert "doubling with each bit is among" in words and f"{fate} the predicted interval" in words
    assert f"1 failed at {step:,}" in dose.dose_table(sets).data
    assert "Stars: bf16" in str(dose.dose_captioned("x", sets["recipe tiny"]))


def test_a_repeated_run_counts_once_and_the_failing_arm_is_the_dial_at_two_bits(tmp_path):
    save(tmp_path, "dials", dial_rows(), device="cpu")
    save(tmp_path, "dials", dial_rows(), file="other.json", machine="Other", device="cpu")
    low = [row("", "low", s, "diverged", 4_400 + s) for s in (0, 3)]
    save(tmp_path, "failure", low, device="cpu")
    told = dose.dose_sets([], tmp_path)["the cpu preset"]
    assert len(told["points"]) == 8 + 2
    assert set(told["source"]["machine"].split(", ")) == {"Other", "Some GPU"}
    assert "untested" in dose.dose_words({"x": told}).data


def test_too_few_failures_make_no_prediction(tmp_path):
    save(tmp_path, "dials", dial_rows(limit=5_000), device="cpu")
    sets = dose.dose_sets([], tmp_path)
    assert "too few failures for a line" in dose.dose_table(sets).data
    assert "No line could be fitted" in dose.dose_words(sets).data


def test_what_is_missing_is_counted_and_priced(tmp_path):
    save(tmp_path, "recipes", confirmed())
    rows = read(tmp_path)
    experiment = failure("tiny")
    left = missing_runs(experiment, "tiny", rows)
    assert len(left) == 5 * len(experiment.arms) - 11
    cut = row("tiny", "sdpa", 1, "stable", 900, status="interrupted")
    assert len(missing_runs(experiment, "tiny", [*rows, cut | {"experiment": "recipes"}])) == len(
        left
    )
    line = remaining_table(rows).data.splitlines()[2]
    hours = len(left) * 1.5 * 42_000 / 500 / 3600
    assert (
        f"| 60 | {len(left)} | {hours:.1f} | `python -m book.evidence failure --recipe tiny`"
        in line
    )
    assert "1.5 times 42,000 steps a run at 500 steps a second" in remaining_words(rows).data


def test_a_run_that_was_cut_gives_way_to_a_longer_one():
    common = {"recipe": "r", "arm": "low", "seed": 0, "forked_at": None, "kind": "stable"}
    cut = common | {"status": "interrupted", "message": "stopped by SIGINT", "steps": 700}
    whole = common | {"status": "interrupted", "message": "stopped, as asked", "steps": 1_800}
    assert c6.of([cut, whole], "r", "low") == [whole]
    assert c6.of([cut], "r", "low") == [cut]
    again = whole | {"steps": 1_801}
    assert c6.of([whole, again, cut], "r", "low") == [again]  # a repetition is no further seed
    failed = whole | {"kind": "diverged", "steps": 500}
    assert c6.of([failed, cut], "r", "low") == [failed]


def test_recipes_that_were_not_tried_are_named_below_the_table(tmp_path):
    save(tmp_path, "recipes", confirmed())
    told = c6.recipe_table(read(tmp_path)).data
    table, _, left = told.partition("Declared and not tried yet: ")
    assert "| tiny |" in table and "| mini-lr3 |" not in table
    assert "mini-lr3" in left and "tiny," not in left.split()
    assert "not tried" not in c6.recipe_table().data


def fork(arm, kind, steps, ties, **more):
    """A fork from step 9,000 that keeps a share of tied rows every 100 steps."""
    at = list(range(9_100, steps + 1, 100))
    curves = {
        "tie_rate": {"step": at, "value": [ties if step > 10_000 else 0.1 for step in at]},
        "spectral_norm_q": {"step": at, "value": [20.0] * len(at)},
        "held_out_loss": {"step": at, "value": [1.5] * len(at)},
    }
    made = row("tiny", arm, 0, kind, steps, forked_at=9_000, attention=arm, curves=curves, **more)
    return made | {"held_out_loss": 1.5, "run": f"fork-{arm}"}


def test_forks_are_compared_up_to_the_shortest_one_beside_the_one_without_a_change(tmp_path):
    late = row("tiny", "low", 0, "onset", 12_000, status="interrupted", onset_step=11_000)
    save(
        tmp_path, "recipes", [late | {"code": "old"}, row("tiny", "delta_fp32", 0, "stable", 900)]
    )
    control = fork("same", "onset", 12_500, 0.5, onset_step=11_900)
    lost = fork("sfa7", "nonfinite", 9_000, 0.1, nonfinite_step=9_000)
    twin = fork("delta_fp32", "stable", 12_400, 0.1)
    save(tmp_path, "failure-forked-tiny", [lost, twin, control])
    save(tmp_path, "errors-forked-tiny", [fork("mirror", "stable", 12_000, 0.2)])
    rows = read(tmp_path)
    (name, forks), *others = arms.fork_groups(rows).items()
    assert name == "tiny, seed 0, from step 9,000" and not others
    assert [r["arm"] for r in forks] == ["same", "sfa7", "delta_fp32", "mirror"]
    table = arms.fork_table(forks).data
    assert "up to 12,000, where the shortest" in table  # the one that failed aside
    short = [*forks, fork("cut", "stable", 10_000, 0.9)]
    assert arms.compared_to(short) == 12_000 and "| cut | stable to 10,000 | none" in (
        arms.fork_table(short).data
    )
    assert "| sfa7 | nonfinite at 9,000 | none | none | 1.500 | `sfa7` |" in table
    assert "| mirror | stable to 12,000 | 0.200 | 20.0 | 1.500 | `mirror` |" in table
    assert "stand further down" in arms.arm_tables(rows).data
    assert "| mirror |" not in arms.arm_tables(rows).data
    (told,) = c6.forks_lines(rows)
    assert "sfa7: nonfinite at 9,000" in told
    assert "onset came at step 11,900, with 0.50 of" in told
    assert "\n  - With a sign as well: sfa7: nonfinite at 9,000.\n" in told
    assert "\n  - Without one, but cut before 1.5" in told
    assert "onset: delta from an fp32 O (by 12,400), mirror (by 12,000)." in told
    assert "other code the same seed had its onset at 11,000" in told
    assert told in c6.what_you_saw(rows, "").data
    assert "onset at 11,900" in str(arms.fork_figure(forks))
    sham = [r | {"arm": "sham"} if r["arm"] == "same" else r for r in rows]
    assert arms.control_of(sham)["arm"] == "sham" and arms.control_of([*sham, control]) == control
    assert "with the same error the onset came at step 11,900" in c6.forks_lines(sham)[0]
    without = [r for r in rows if r["arm"] != "same"]
    assert c6.forks_lines(without) == [] and arms.by_onset(without) == set()
    assert arms.fork_groups([control | {"state": "another"}]) == {}  # one alone


def test_forks_of_other_code_from_a_state_of_equal_numbers_stand_together_each_once(tmp_path):
    first = {name: {"step": [9_010], "value": [2.5]} for name in ("train_loss", "grad_norm")}

    def twin(steps, value=2.5):
        made = fork("delta_fp32", "stable", steps, 0.1)
        loss = {"train_loss": {"step": [9_010], "value": [value]}}
        return made | {"curves": made["curves"] | first | loss, "run": f"twin-{steps}"}

    probes = {"probes": ["delta_answer@100"]}
    control = fork("same", "onset", 12_000, 0.5, onset_step=11_900, changes=probes)
    again = fork("same", "stable", 11_000, 0.5) | {"run": "shorter"}
    for name, rows, code in (
        ("failure-forked-tiny", [twin(12_000), control], "old"),
        (
            "errors-forked-tiny",
            [twin(12_500), again, fork("mirror", "stable", 12_000, 0.2)],
            "new",
        ),
        ("isolation-tiny", [twin(12_600, 2.6), fork("exact", "stable", 12_000, 0.0)], "newer"),
    ):
        save(tmp_path, name, rows, code=code)
    (name, forks), (other, rest) = arms.fork_groups(read(tmp_path)).items()
    assert {r["arm"]: r["steps"] for r in forks} == {
        "same": 12_000, "delta_fp32": 12_500, "mirror": 12_000
    }  # fmt: skip
    assert forks[0]["arm"] == "same" and other == f"{name}, code newer"
    assert [r["arm"] for r in rest] == ["delta_fp32", "exact"]


def test_a_crowd_of_forks_is_drawn_by_kind_beside_control_and_twin():
    made = [fork(f"arm_{n}", "stable", 12_000, 0.1) for n in range(arms.CROWD + 1)]
    errors = [row | {"experiment": "errors-forked-tiny"} for row in made]
    control = fork("same", "onset", 12_500, 0.5, onset_step=11_900)
    others = [
        control,
        fork("delta_fp32", "stable", 12_000, 0.1),
        fork("sdpa", "stable", 12_000, 0),
    ]
    others = [row | {"experiment": "failure-forked-tiny"} for row in others]
    views = arms.fork_views({"here": [*others, *errors], "few": others})
    assert {name: len(rows) for name, rows in views.items()} == {
        "here: failure-forked": 3, "here: errors-forked, 1": 2 + arms.CROWD,
        "here: errors-forked, 2": 3, "few": 3,
    }  # fmt: skip
    assert all([r["arm"] for r in rows][:2] == ["same", "delta_fp32"] for rows in views.values())
    assert "`arm_0`" in arms.fork_table(others + errors).data
    long = "paper; " + "; ".join(f"L{n} -> exact" for n in range(12))
    assert "`paper; ...`" in arms.fork_table([control, fork(long, "stable", 12_000, 0)]).data


def test_bf16_that_outlives_the_predicted_interval_refutes_the_line(tmp_path):
    save(tmp_path, "dials-tiny", dial_rows(seeds=(0, 1, 2)))
    alive = [row("tiny", "low", 0, "stable", 3_000_000)]
    save(tmp_path, "recipes", alive)
    words = dose.dose_words(dose.dose_sets(read(tmp_path), tmp_path)).data
    assert "not failed within 3,000,000 steps, longer than the predicted" in words
    assert "does not hold up to 7 bits" in words


def test_a_price_rests_on_the_speed_of_training_and_forks_by_an_onset_are_short(tmp_path):
    late = row("tiny", "low", 0, "onset", 12_000, status="interrupted", onset_step=10_000)
    slow = fork("same", "onset", 12_500, 0.5, onset_step=11_900) | {"steps_per_s": None}
    save(tmp_path, "recipes", [late])
    save(tmp_path, "failure-forked-tiny", [slow])
    rows = read(tmp_path)
    assert c6.pace_of(slow) == pytest.approx(3_500 / 120)
    assert "10,000 steps a run at 500 steps a second" in remaining_words(rows).data
    experiment = failure_forked("tiny")
    left = missing_runs(experiment, "tiny", rows)
    forks = sum(arm.at is not None for arm, _ in left)
    hours = (forks * 0.7 + (len(left) - forks) * 1.5) * 10_000 / 500 / 3600
    assert f"| {len(left)} | {hours:.1f} | `python -m book.evidence failure-forked" in (
        remaining_table(rows).data
    )
    save(tmp_path, "recipes", [late, row("small-lr3", "low", 0, "diverged", 5_000)])
    rows = read(tmp_path)  # another recipe that diverged is shown now, and changes no price
    assert c6.shown_recipe(rows) == "small-lr3"
    assert f"| {len(left)} | {hours:.1f} | `python -m book.evidence failure-forked" in (
        remaining_table(rows, "tiny").data
    )
