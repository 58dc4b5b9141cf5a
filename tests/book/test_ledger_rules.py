"""Every rule turns: archives that say otherwise get another verdict."""

import json
from types import SimpleNamespace

import pytest

from book.ledger import Evidence, measures
from book.ledger.findings import (
    NOT_SUPPORTED,
    NOT_TESTED,
    OBSERVED,
    PARTLY,
    RULES,
    SUPPORTED,
    apply,
    combine,
    standing,
)
from book.ledger.shares import difference, mean_interval, wilson
from book.survival import Z95

LOW = "paper,matched_bits=2"
ATTENTION = {"low": LOW, "same": LOW, "sham": LOW, "fp32": "exact"}


def run(arm, seed=0, kind="healthy", step=1000, **more):
    """A record as archives keep it: failed at `step`, or ran to it without a failure."""
    failed = kind in ("diverged", "nonfinite")
    told = {
        "arm": arm,
        "label": f"arm {arm}",
        "attention": ATTENTION.get(arm, LOW),
        "status": "diverged" if failed else "finished",
        "seed": seed,
        "kind": kind,
        "steps": step,
        "diverged_step": step if kind == "diverged" else None,
        "diverged_from": step - 100 if kind == "diverged" else None,
        "nonfinite_step": step if kind == "nonfinite" else None,
        "onset_step": None,
        "onset": None,
        "train_loss": 3.0 if failed else 1.5,
        "held_out_loss": 3.0 if failed else 1.5,
        "worst_tie_rate": 0.5,
        "heads": {},
    }
    return told | more


def arm(name, *kinds, **more):
    """One run a seed."""
    return [run(name, seed, kind, **more) for seed, kind in enumerate(kinds)]


BAD, GOOD, SIGN, NAN = (
    ["diverged"] * 5,
    ["healthy"] * 5,
    ["onset"] * 5,
    ["nonfinite"] * 5,
)


@pytest.fixture
def archived(tmp_path):
    """archived(name=rows, ...) -> Evidence of these archives; `machine` is the name's."""

    def write(**experiments) -> Evidence:
        for name, rows in experiments.items():
            folder = tmp_path / name
            folder.mkdir()
            source = {"machine": f"machine of {name}", "date": "2026-01-02", "preset": "cpu"}
            told = rows if isinstance(rows, dict) else {"provenance": source, "rows": rows}
            (folder / "a.json").write_text(json.dumps(told))
        return Evidence(tmp_path)

    return write


def verdict(evidence, rule, experiments=("x",), **parameters):
    return apply(rule, parameters, evidence, experiments).verdict


def only(n, kind, rest="healthy"):
    return [kind] * n + [rest] * (5 - n)


PREVENTS = [
    (BAD, GOOD, SUPPORTED),
    (only(4, "diverged"), GOOD, SUPPORTED),
    (only(3, "diverged"), GOOD, PARTLY),
    (BAD, only(4, "healthy", "onset"), PARTLY),
    (BAD, only(1, "diverged"), PARTLY),
    (only(4, "diverged"), only(2, "diverged"), PARTLY),
    (BAD, only(3, "diverged"), NOT_SUPPORTED),
    (BAD, NAN, NOT_SUPPORTED),
    (GOOD, GOOD, NOT_TESTED),
    (BAD, GOOD[:4], OBSERVED),
]


@pytest.mark.parametrize("low, other, expected", PREVENTS)
def test_prevents(archived, low, other, expected):
    evidence = archived(x=arm("low", *low) + arm("twin", *other))
    assert verdict(evidence, "prevents", arms="twin") == expected


def test_prevents_asks_for_a_sham_and_for_runs_that_are_long_enough(archived):
    rows = arm("low", *BAD) + arm("twin", *GOOD) + arm("sham", *GOOD)
    short = arm("early", *GOOD, step=900)
    evidence = archived(x=rows, y=arm("low", *BAD) + short)
    assert verdict(evidence, "prevents", arms="twin", sham="sham") == PARTLY
    assert verdict(evidence, "prevents", ("y",), arms="early") == NOT_TESTED


def test_prevents_in_bf16_takes_no_dial_for_bf16(archived):
    rows = arm("low", *BAD) + arm("twin", *GOOD)
    itself = [r | {"attention": "paper"} for r in rows]
    evidence = archived(x=rows, y=itself)
    assert verdict(evidence, "prevents", arms="twin", bits=7) == NOT_TESTED
    assert verdict(evidence, "prevents", ("y",), arms="twin", bits=7) == SUPPORTED
    assert "bf16, cpu" in apply("prevents", {"arms": "twin"}, evidence, ["y"]).effect


def test_a_small_model_has_no_verdict_on_heads(archived):
    evidence = archived(x=arm("low", *BAD) + arm("twin", *GOOD))
    found = apply("prevents", {"arms": "twin", "heads": 6}, evidence, ["x"])
    assert found.verdict == OBSERVED and "with 2 heads a demonstration, " in found.effect
    assert verdict(evidence, "prevents", arms="twin", heads=2) == SUPPORTED
    recipe = [r | {"recipe": "mini-lr5"} for r in arm("low", *BAD) + arm("twin", *GOOD)]
    evidence = archived(y=recipe)  # six layers of six heads
    assert verdict(evidence, "prevents", ("y",), arms="twin", heads=6) == SUPPORTED


def test_forks_count_only_where_their_parent_failed(archived):
    low = arm("low", *only(4, "diverged"))
    evidence = archived(x=low + arm("twin", *GOOD, forked_at=250), y=low + arm("twin", *GOOD))
    assert verdict(evidence, "prevents", arms="twin") == OBSERVED  # four pairs are left
    assert "failed in 4 of 4" in apply("prevents", {"arms": "twin"}, evidence, ["x"]).effect
    assert verdict(evidence, "prevents", ("y",), arms="twin") == SUPPORTED


def test_a_failing_arm_that_was_cut_says_nothing(archived):
    cut = arm("low", *only(4, "diverged"), status="interrupted")
    evidence = archived(x=cut + arm("twin", *GOOD))
    finding = apply("prevents", {"arms": "twin"}, evidence, ["x"])
    assert finding.verdict == OBSERVED and "failed in 4 of 4" in finding.effect


def tries(recipe, *kinds, asked=1001, **more):
    return arm("low", *kinds, recipe=recipe, attention="paper", steps_asked=asked, **more)


def test_recipes_are_experiments_of_their_own(archived):
    rows = tries("a", *GOOD) + tries("b", *BAD) + tries("c", *GOOD, asked=5000)
    rows += [r | {"arm": "twin", "kind": "healthy"} for r in tries("b", *GOOD)]
    evidence = archived(recipes=rows)
    assert evidence.names("recipes") == ["recipes/a", "recipes/b", "recipes/c"]
    found = apply("prevents", {"arms": "twin", "bits": 7}, evidence, ["recipes"])
    assert found.verdict == SUPPORTED and found.effect.startswith("bf16, recipe b: ")


def test_a_recipe_is_joined_over_days(archived):
    """Low precision in one archive of the search, its twin in a later one; each seed once."""
    low = [r | {"run": f"low{r['seed']}"} for r in tries("a", *BAD)]
    again = [r | {"run": f"again{r['seed']}"} for r in low[:2]]
    evidence = archived(recipes=low + again)
    source = {"machine": "another", "date": "2026-01-03", "preset": "cpu"}
    twins = [r | {"arm": "twin", "run": f"twin{r['seed']}"} for r in tries("a", *GOOD)]
    told = {"provenance": source, "rows": twins + tries("b", *GOOD)}
    (evidence.folder / "recipes" / "b.json").write_text(json.dumps(told))
    found = apply("fails_somewhere", {"bits": 7, "twin": "twin"}, evidence, ["recipes"])
    assert found.verdict == SUPPORTED and found.runs == 5
    assert "failed in 5 of 5" in found.effect and "another" in found.sources[0]


def test_fails_somewhere(archived):
    def twins(rows, *kinds):
        return rows + [r | {"arm": "twin", "kind": k} for r, k in zip(rows, kinds)]

    evidence = archived(
        recipes=tries("a", *GOOD)
        + twins(tries("b", *BAD), *GOOD)
        + tries("c", *GOOD, asked=5000)
        + twins(tries("d", *BAD), *BAD),
        y=arm("low", *GOOD, attention="paper"),
        z=twins(arm("low", *only(2, "diverged"), attention="paper"), *GOOD),
        w=twins(arm("low", *BAD, attention="paper"), *BAD),
        dial=twins(arm("low", *BAD), *GOOD),
        open=tries("e", "diverged"),
    )
    names = (("recipes",), ("y",), ("z",), ("w",), ("y", "z", "recipes"), ("dial",))
    asked = dict(bits=7, twin="twin")
    found = [verdict(evidence, "fails_somewhere", n, **asked) for n in names]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY, NOT_SUPPORTED, SUPPORTED, NOT_TESTED]
    effect = apply("fails_somewhere", asked, evidence, ["recipes"]).effect
    found = apply("fails_somewhere", asked, evidence, ["w", "y", "open"])
    assert found.verdict == NOT_TESTED and "open in bf16, recipe e" in found.effect
    # c was cut before it could fail
    assert "low precision failed in 2 of 3 recipes, and its twin in 1 of these" in effect


def test_begins_somewhere(archived):
    """An onset against a twin that went on long enough, whatever became of the run."""

    def pairs(*onsets, twin_steps=3000, twin_kind="healthy"):
        low = arm("low", *("stable" if o is None else "onset" for o in onsets), attention="paper")
        low = [r | {"onset_step": o, "steps": 2000} for r, o in zip(low, onsets)]
        other = {"arm": "twin", "kind": twin_kind, "onset_step": None, "steps": twin_steps}
        return low + [r | other for r in low]

    evidence = archived(
        all=pairs(1000, 1200, 900, 1100, 1400),
        some=pairs(1000, None, None, None, None),
        none=pairs(None, None, None, None, None),
        short=pairs(1000, 1200, 900, 1100, 1400, twin_steps=1400),
        both=pairs(1000, 1200, 900, 1100, 1400, twin_kind="diverged"),
        few=pairs(1000),
    )
    asked = dict(bits=7, twin="twin")
    names = ("all", "some", "none", "short", "both", "few")
    found = [verdict(evidence, "begins_somewhere", (n,), **asked) for n in names]
    # of the five onsets in `short` one lies early enough for its twin
    assert found == [SUPPORTED, PARTLY, NOT_SUPPORTED, OBSERVED, NOT_TESTED, OBSERVED]
    stopped = [r | {"status": "interrupted"} for r in pairs(1000, 1200, None)]
    found = apply("begins_somewhere", asked, archived(stopped=stopped), ["stopped"])
    assert found.runs == 2  # an onset has been shown, its absence has not
    told = apply("begins_somewhere", asked, evidence, ["some", "none"]).effect
    assert "onsets in 1 of 10 pairs of 2 recipes; there 1 of 5, at step 1,000" in told


def test_the_regime_says_what_an_experiment_is_about(archived):
    rows = arm("low", *BAD) + arm("twin", *GOOD)
    evidence = archived(**{name: rows for name in ("sfa", "sfa-muon", "sfa-wide-muon")})
    told = apply("prevents", {"arms": "twin"}, evidence, ["sfa*"]).lines
    starts = [line.partition(": ")[0].partition("preset")[2] for line in told]
    assert starts == ["", ", Muon", ", 3 layers of 96, Muon"]


def test_few_runs_point_the_way_that_they_point(archived):
    for name, kind, words in (
        ("x", "healthy", "; as claimed, "),
        ("y", "onset", "; partly as claimed, "),
        ("z", "diverged", "; against the claim, "),
    ):
        evidence = archived(**{name: arm("low", "diverged") + arm("twin", kind)})
        assert words in apply("prevents", {"arms": "twin"}, evidence, [name]).effect


@pytest.mark.parametrize(
    "kinds, expected",
    [
        (BAD, SUPPORTED),
        (only(4, "diverged"), SUPPORTED),
        (only(2, "diverged"), PARTLY),
        (SIGN, NOT_SUPPORTED),
        (BAD[:2], OBSERVED),
    ],
)
def test_still_fails(archived, kinds, expected):
    evidence = archived(x=arm("low", *BAD) + arm("tile", *kinds))
    assert verdict(evidence, "still_fails", arms=["tile"]) == expected


def test_repeats(archived):
    same = arm("low", *BAD) + arm("same", *BAD)
    late = arm("low", *BAD) + arm("same", *BAD, step=1001)
    once = [r if r["seed"] or r["arm"] == "low" else r | {"train_loss": 2} for r in same]
    evidence = archived(x=same, y=late, z=once)
    found = [verdict(evidence, "repeats", (name,), arms=["same"]) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


def test_same_steps(archived):
    evidence = archived(
        x=arm("low", *BAD),
        y=arm("m", *BAD, step=1005),
        z=arm("m", *only(4, "diverged"), step=1500),
    )
    asked = dict(arm="low", other_arm="m")
    assert verdict(evidence, "same_steps", other="y", **asked) == SUPPORTED
    assert verdict(evidence, "same_steps", other="z", **asked) == NOT_SUPPORTED
    assert verdict(evidence, "same_steps", other="none", **asked) == NOT_TESTED
    told = apply("same_steps", asked | {"other": "z"}, evidence, ["x"]).effect
    assert "1,000 and none on two machines" in told


def onset(step, signal="spectral_norm_q"):
    return {"onset_step": step, "onset": {"step": step, "signal": signal}}


def test_precedes(archived):
    evidence = archived(
        x=arm("low", *BAD, **onset(300)),
        y=arm("low", *BAD, **onset(950)),
        z=arm("low", *BAD[:2], **onset(300)) + arm("low", *BAD[:3]),
    )
    assert verdict(evidence, "precedes") == SUPPORTED
    assert verdict(evidence, "precedes", signal="tie_rate") == NOT_SUPPORTED
    assert verdict(evidence, "precedes", ("y",)) == NOT_SUPPORTED
    assert verdict(evidence, "precedes", ("z",)) == PARTLY
    assert verdict(evidence, "precedes", bits=7) == NOT_TESTED
    evidence = archived(v=arm("low", *BAD, attention="paper", **onset(300)))
    assert verdict(evidence, "precedes", ("v",), bits=7) == SUPPORTED
    untied = arm("low", *BAD, attention="exact,output_bits=2", **onset(300))
    evidence = archived(w=untied)
    assert verdict(evidence, "precedes", ("w",)) == SUPPORTED
    assert verdict(evidence, "precedes", ("w",), signal="tie_rate") == NOT_TESTED


def test_needs_ties(archived):
    none = dict(worst_tie_rate=0.0)
    evidence = archived(
        x=arm("low", *BAD),
        y=arm("low", *BAD, **none),
        z=arm("low", *BAD[:3]) + arm("low", *BAD[:2], **none),
    )
    found = [verdict(evidence, "needs_ties", (name,), floor=0.01) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


def test_costs_nothing(archived):
    def losses(*values):
        return [run("twin", s, held_out_loss=v) for s, v in enumerate(values)] + arm("fp32", *GOOD)

    evidence = archived(
        x=losses(1.5, 1.5, 1.501, 1.5, 1.5),
        y=losses(1.8, 1.9, 1.8, 1.9, 1.8),
        z=losses(1.5, 1.6, 1.4, 1.6, 1.5),
    )
    asked = dict(arm="twin", against="fp32", most=0.02)
    found = [verdict(evidence, "costs_nothing", (name,), **asked) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


def test_delayed_by_bits(archived):
    def dial(*steps):
        return [
            r
            for bits, mean in enumerate(steps, start=1)
            for r in arm(f"matched{bits}", *BAD, step=mean)
        ]

    def moved(rows):
        return [r | {"diverged_step": r["diverged_step"] + 40 * r["seed"]} for r in rows]

    evidence = archived(
        x=moved(dial(500, 1000, 2000)), y=moved(dial(2000, 1000, 500)), z=dial(500)
    )
    found = [verdict(evidence, "delayed_by_bits", (name,), dial="matched") for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, NOT_TESTED]
    effect = apply("delayed_by_bits", {"dial": "matched"}, evidence, ["x"]).effect
    assert "time to failure times 1.9 per bit (1.8 to 2.0), 15 failures" in effect


def test_stays_finite(archived):
    evidence = archived(
        x=arm("sfa2", *BAD), y=arm("sfa2", *NAN), z=arm("sfa2", *only(2, "nonfinite"))
    )
    found = [verdict(evidence, "stays_finite", (name,), arms=["sfa2"]) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


# -- per-head series ------------------------------------------------------------------------------


def heads(seed=0, **series):
    """A failed run of two layers of one head; layer 1 breaks. series: values of layer 1."""
    steps = [0, 400, 800, 950]  # the last lies after the rise of the loss at 900
    kept = {"spectral_norm_q": [1.0, 2.0, 9.0, 99.0]} | series
    told = {
        name.replace("_of_", ":"): {"step": steps, "value": [[[0.5], [v]] for v in values]}
        for name, values in kept.items()
    }
    return run("low", seed, "diverged", heads=told)


def five(**series):
    return [heads(seed, **series) for seed in range(5)]


def test_directions_alike(archived):
    evidence = archived(
        x=five(direction_cosine=[0.0, 0.4, 0.8, 0.0]),
        y=five(direction_cosine=[0.0, 0.1, 0.2, 0.9]),
        z=five(direction_cosine=[0.5, 0.1, 0.1, 0.9]),
    )
    found = [verdict(evidence, "directions_alike", (name,), alike=0.5) for name in "xyz"]
    assert found == [SUPPORTED, PARTLY, NOT_SUPPORTED]


def test_kept_alike(archived, monkeypatch):
    """Captures of the failing run decide, those of its twin are told."""
    evidence = archived(x=arm("captured", "onset", attention="paper"))

    def told(*cosines, bits=7):
        moments = [SimpleNamespace(coherence=SimpleNamespace(mean_cosine=c)) for c in cosines]
        kept = SimpleNamespace(failing=moments, healthy=moments[:1], archive=evidence.archive("x"))
        monkeypatch.setattr(measures, "kept_heads", lambda folder, name: kept if cosines else None)
        return apply("kept_alike", {"alike": 0.5, "bits": bits}, evidence, ["x"])

    assert told().verdict == told(0.9, bits=2).verdict == NOT_TESTED
    points = [told(*c).effect.split(", mean")[0] for c in ((0.9, 0.8), (0.9, 0.2), (0.1, 0.2))]
    assert [p.rpartition(": ")[2] for p in points] == [
        "as claimed", "partly as claimed", "against the claim"
    ]  # fmt: skip
    assert "+0.80 to +0.90 in 2 captures" in told(0.9, 0.8).effect
    assert "+0.90 to +0.90 in 1 of its healthy twin" in told(0.9, 0.8).effect


def test_adds_up(archived):
    evidence = archived(
        x=five(coherent_gain=[3, 3, 3, 3]),
        y=five(coherent_gain=[1.2, 1.2, 1.2, 9]),
        z=five(coherent_gain=[0.9, 0.9, 0.9, 9]),
    )
    asked = dict(metric="coherent_gain", gain=2)
    found = [verdict(evidence, "adds_up", (name,), **asked) for name in "xyz"]
    assert found == [SUPPORTED, PARTLY, NOT_SUPPORTED]


def test_drifts(archived):
    def drift(*sums):
        names = ("delta_error_mean_of_sum", "delta_error_mean_of_band")
        loss = {"train_loss": {"step": [0, 800, 950], "value": [3, 1, 3]}}
        series = [{names[0]: [0, x, x, 0], names[1]: [1] * 4} for x in sums]
        return [
            heads(s, delta_error_rms=[1] * 4, **kept) | {"curves": loss}
            for s, kept in enumerate(series)
        ]

    evidence = archived(x=drift(*[5] * 5), y=drift(5, -5, 5, -5, 5), z=drift(*[0.5] * 5))
    found = [verdict(evidence, "drifts", (name,)) for name in "xyz"]
    assert found == [SUPPORTED, PARTLY, NOT_SUPPORTED]


def test_answers(archived):
    def answering(seed, *steps):
        """steps: (clean, answer) at each of two."""
        clean, answer = ([[[x[i]], [x[i]]] for x in steps] for i in (0, 1))
        error = [[[sum(x)], [sum(x)]] for x in steps]
        rms = [[[2.0], [2.0]]] * 2
        names = ("error_mean", "error_rms", "clean_mean", "answer_mean")
        kept = zip(names, (error, rms, clean, answer))
        told = {f"delta_{n}": {"step": [0, 400], "value": v} for n, v in kept}
        loss = {"train_loss": {"step": [0, 800, 950], "value": [3, 1, 3]}}
        return run("low", seed, "diverged", heads=told) | {"curves": loss}

    def runs(*cases):
        return [answering(seed, case, case) for seed, case in enumerate(cases)]

    answer = [0.10, 0.12, 0.11, 0.09, 0.10]
    none = [0.01, -0.01, 0.005, -0.005, 0.0]
    evidence = archived(
        x=runs(*zip(none, answer)),
        y=runs(*((0.05 + n, a) for n, a in zip(none, answer))),
        z=runs(*zip(answer, none)),
        one=[answering(0, (0.01, 0.100), (-0.01, 0.101))],
        other=[answering(0, (0.01, 0.100), (-0.01, -0.101))],
    )
    found = [verdict(evidence, "answers", (name,)) for name in "xyz"]
    assert found == [SUPPORTED, PARTLY, NOT_SUPPORTED]
    effects = [apply("answers", {}, evidence, (n,)).effect for n in ("x", "one", "other")]
    assert "answer +5.20% of the rms" in effects[0] and "of 10 heads of 5 runs" in effects[0]
    assert "as claimed" in effects[1] and "against the claim" in effects[2]


def test_leads(archived):
    evidence = archived(x=five(), y=five()[:2])
    assert verdict(evidence, "leads", layer=1) == SUPPORTED
    assert verdict(evidence, "leads", layer=0) == NOT_SUPPORTED
    assert verdict(evidence, "leads", ("y",), layer=1) == OBSERVED
    assert apply("leads", {"layer": 1}, evidence, ["x", "y"]).runs == 7, "failures are pooled"


def test_smallest_set(archived):
    def searches(*results):
        traces = [{"state": "minimal" if r else "budget", "result": r} for r in results]
        return [{"seed": s, "trace": t} for s, t in enumerate(traces)]

    one, two = ["delta_output@L1"], ["scores@L0", "output@L1"]
    evidence = archived(
        x=searches(*[one] * 5, None), y=searches(*[two] * 5), z=searches(one, two, two, two, two)
    )
    found = [verdict(evidence, "smallest_set", (name,), places=one) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


# -- other archives -------------------------------------------------------------------------------


def captured(mean, tied=0.8, share=20):
    parts = {"tied": {"rows": share, "energy": tied}}
    row = {"arm": "as trained", "mean": [mean, 0.01], "rows": 100, "parts": parts}
    return [row | {"seed": seed} for seed in range(5)]


def test_captured_heads(archived):
    evidence = archived(x=captured(0.1), y=captured(-0.1, tied=0.1), z=captured(0.001, tied=0.3))
    asked = dict(version="as trained")
    found = [verdict(evidence, "biased_delta", (n,), least=0.02, **asked) for n in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, NOT_SUPPORTED]
    told = apply("biased_delta", asked | {"least": 0.005}, evidence, ["z"])
    assert told.verdict == OBSERVED and "too few rows to tell, " in told.effect
    found = [verdict(evidence, "carries_error", (n,), part="tied", **asked) for n in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


def test_sums_over_processes(archived):
    def sums(cosine):
        row = dict(cause="sum in bf16", processes=2, relative_size_median=0.002)
        return [row | dict(between_batches=cosine, between_batches_stderr=0.01)] * 5

    def passes(step):
        row = dict(a="small, alone in passes", preset="cpu", processes=[1, 2], steps=[0, 99])
        return [row | dict(first_different=step)] * 5

    evidence = archived(x=sums(0.5), y=sums(0.01), p=passes(None), q=passes(3))
    asked = dict(cause="sum in bf16")
    found = [verdict(evidence, "sum_accumulates", (name,), **asked) for name in "xy"]
    found += [verdict(evidence, "only_the_order", (name,), passes="in passes") for name in "pq"]
    assert found == [SUPPORTED, NOT_SUPPORTED, SUPPORTED, NOT_SUPPORTED]


def model(low, fp32, first, texts=5):
    one = {"bf16": {"tie_rate": [[low, 0]]}, "fp32": {"tie_rate": [[fp32]], "first_key": [first]}}
    told = {"model": "m", "machine": "a", "date": "2026-01-02"}
    return told | {"found": {f"text {i}": one for i in range(texts)}}


def test_trained_models(archived):
    evidence = archived(
        x=model(0.1, 0.0, [0.9, 0.1]),
        y=model(0.0, 0.0, [0.1, 0.1]),
        z=model(0.1, 0.1, [0.9] + [0] * 19),
    )
    ties = dict(numerics="bf16", without="fp32", least=0.01)
    found = [verdict(evidence, "model_ties", (name,), **ties) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]
    sinks = dict(numerics="fp32", least=0.1)
    found = [verdict(evidence, "model_sinks", (name,), **sinks) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


def test_time(archived):
    def speeds(*ratios):
        shapes = [dict(direction="forward", head_dim=64, causal=True, seq_len=i) for i in range(5)]
        return [s | dict(implementation="plain", ms_p50=1.0) for s in shapes] + [
            s | dict(implementation="sfa", ms_p50=x) for s, x in zip(shapes, ratios)
        ]

    evidence = archived(x=speeds(*[1.05] * 5), y=speeds(*[1.5] * 5), z=speeds(1, 1, 1, 1, 2))
    asked = dict(implementation="sfa", against="plain", most=1.1)
    found = [verdict(evidence, "costs_time", (name,), **asked) for name in "xyz"]
    assert found == [SUPPORTED, NOT_SUPPORTED, PARTLY]


# -- computed -------------------------------------------------------------------------------------

POLICY = ["softmax=stabilized,beta=2"]
TURNS = {
    "stored_sum": (
        dict(terms=[-2.40625, -2.296875], stored=-4.6875),
        dict(terms=[-2.40625, -2.296875], stored=-4.71875),
    ),
    "fraction_bits": (dict(format="e4m3", bits=3), dict(format="e4m3", bits=4)),
    "law_holds": (dict(formats=["bf16"]), dict(formats=["bf16"], tail=0.5)),
    "biased_row": (
        dict(kind="tied", numerics="paper", biased=True),
        dict(kind="tied", numerics="paper,unnormalized=fp32", biased=True),
    ),
    "one_sided_values": (dict(offset=3.0), dict(offset=-1.0)),
    "output_rounding": (dict(), dict(largest_weight=3.0)),
    "reads_the_bias": (
        dict(kinds=["paper"], reads=True),
        dict(kinds=["paper", "flash"], reads=True),
    ),
    "identity": (dict(heads=1, rows=8), dict(heads=1, rows=8, most=0.0)),
    "same_function": (dict(policies=POLICY), dict(policies=["softmax=clamped"])),
    "changes_sharpness": (dict(policies=["softmax=clamped"]), dict(policies=POLICY)),
    "underflows_by_law": (dict(betas=[8]), None),
    "safe_for_scores": (dict(betas=[2], largest=80), dict(betas=[2, 8], largest=80)),
}


@pytest.mark.parametrize("name", TURNS)
def test_computations_turn(name, monkeypatch):
    holds, not_so = TURNS[name]
    assert verdict(None, name, (), **holds) == SUPPORTED
    if not_so is None:  # a law without parameters: break what it is compared with
        monkeypatch.setattr("book.sfa_rows.CARRIER_UNDERFLOW", 80.0)
        not_so = holds
    assert verdict(None, name, (), **not_so) == NOT_SUPPORTED


def test_holds_off(archived):
    """Forks are judged beside the unchanged fork of their state, once they outlived its onset."""

    def forks(name, seeds, onset=None, steps=3000, kind="stable", at=900):
        kinds = [kind if onset is None else "onset"] * len(seeds)
        made = arm(name, *kinds, attention="paper", forked_at=at)
        more = {"onset_step": onset, "steps": steps}
        return [r | more | {"seed": s, "run": f"{name}{s}{at}"} for r, s in zip(made, seeds)]

    five = range(5)
    control = forks("same", five, onset=1000)
    evidence = archived(**{
        "a": control + forks("good", five) + forks("bad", five, onset=1100)
        + forks("cut", five, steps=1499) + forks("lost", five, kind="nonfinite", steps=901)
        + forks("mixed", five[:2], onset=1100) + forks("mixed", five[2:])
        + forks("elsewhere", five, onset=1100, at=800),
        "b": forks("beside", five) + forks("good", five),
        "alone": forks("good", five),
    })  # fmt: skip
    asked = dict(bits=7)

    def told(arms, *names):
        return apply("holds_off", asked | {"arms": arms}, evidence, names)

    wanted = {"good": SUPPORTED, "bad": NOT_SUPPORTED, "cut": NOT_TESTED, "lost": NOT_SUPPORTED,
              "mixed": PARTLY, "elsewhere": NOT_TESTED}  # fmt: skip
    assert {name: told(name, "a").verdict for name in wanted} == wanted
    assert "5 forks without a sign ended before 1.5 times" in told("cut", "a").effect
    assert told("good", "a", "b").runs == 5  # each run once
    assert told("beside", "a", "b").verdict == SUPPORTED
    assert told("good", "alone").verdict == NOT_TESTED
    assert told(["good", "bad"], "a").verdict == PARTLY
    assert apply("holds_off", {"arms": "good", "bits": 2}, evidence, ["a"]).verdict == NOT_TESTED
    finer = [r | {"attention": "paper,unnormalized=fp32"} for r in forks("finer", five)]
    told_of = apply("holds_off", asked | {"arms": "finer"}, archived(f=control + finer), ["f"])
    assert told_of.effect.startswith("bf16,")  # what the control rounds, not the fork
    sham = archived(s=forks("sham", five, onset=1000) + forks("good", five))
    assert apply("holds_off", asked | {"arms": "good"}, sham, ["s"]).verdict == SUPPORTED


def test_hastens(archived):
    """A fork that fails hastens the failure if it does so before the unchanged one's onset."""

    def forks(name, kind, steps, onset=None):
        made = arm(name, *[kind] * 5, step=steps, attention="paper", forked_at=900)
        return [r | {"onset_step": onset, "run": f"{name}{r['seed']}"} for r in made]

    evidence = archived(
        a=forks("sham", "onset", 3000, onset=1000) + forks("soon", "diverged", 950)
        + forks("late", "diverged", 1500) + forks("well", "stable", 1500)
        + forks("cut", "stable", 990)
    )  # fmt: skip
    found = {n: apply("hastens", {"arms": n, "bits": 7}, evidence, ["a"]) for n in
             ("soon", "late", "well", "cut")}  # fmt: skip
    assert [f.verdict for f in found.values()] == [
        SUPPORTED, NOT_SUPPORTED, NOT_SUPPORTED, NOT_TESTED
    ]  # fmt: skip
    assert "in 5 of 5 forks" in found["soon"].effect and "after 50, 50" in found["soon"].effect


def test_every_rule_is_turned_by_a_test_of_this_file():
    text = open(__file__).read()
    for name in RULES:
        assert f'"{name}"' in text, name


# -- joining and counting -------------------------------------------------------------------------


def part(verdict, runs=5, words="w", **more):
    return standing(verdict, words, runs, **more)


def test_settings_that_disagree_make_partly_and_observations_do_not_decide():
    assert combine([part(SUPPORTED), part(SUPPORTED)]).verdict == SUPPORTED
    assert combine([part(SUPPORTED), part(NOT_SUPPORTED)]).verdict == PARTLY
    assert combine([part(SUPPORTED), part(NOT_SUPPORTED, runs=2)]).verdict == SUPPORTED
    assert combine([part(SUPPORTED, 2), part(NOT_SUPPORTED, runs=2)]).verdict == OBSERVED
    both = combine([part(SUPPORTED, where="a"), part(SUPPORTED, words="v", where="a")])
    assert both.effect == "a: w; v"


@pytest.mark.parametrize("hits, runs", [(0, 5), (4, 5), (5, 5), (1, 2), (7, 20)])
def test_at_the_ends_of_wilsons_interval_the_share_is_just_rejected(hits, runs):
    share, *ends = wilson(hits, runs)
    inner = [end for end in ends if end not in (0.0, 1.0)]
    assert inner and share == hits / runs
    for p in inner:
        assert abs(share - p) / (p * (1 - p) / runs) ** 0.5 == pytest.approx(Z95)


def test_differences_and_means_have_their_intervals():
    # Newcombe 1998, table II, method 10, contrast (a): 56/70 against 48/80
    assert difference((56, 70), (48, 80)) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert difference((9, 10), (3, 10)) == pytest.approx((0.6, 0.1705, 0.8090), abs=5e-5)
    low, high = mean_interval([1.0, 3.0])[1:]
    assert (low, high) == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)  # t with 1 degree
    with pytest.raises(ValueError, match="6 of 5 is not a share"):
        wilson(6, 5)
