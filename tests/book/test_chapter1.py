"""The words of chapter 1 follow from the records, whichever way they fall."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from book import chapter1
from book.chapter1 import dial_points, outcome_sentences, run_to_failure, what_you_saw
from book.evidence import Archive
from book.experiments import dials, failure
from gpt2.outcomes import Outcome


def _row(arm, label, kind, step, seed=0):
    failed = kind in ("diverged", "nonfinite")
    return {
        "arm": arm,
        "label": label,
        "seed": seed,
        "kind": kind,
        "diverged_step": step if kind == "diverged" else None,
        "nonfinite_step": step if kind == "nonfinite" else None,
        "onset_step": None,
        "onset": None,
        "steps": step,
        "held_out_loss": 3.0 if failed else 1.6,
        "outcome": Outcome(kind, last_step=step).to_dict(),
    }


LOW = _row("low", "low precision", "diverged", 1_500)
TWIN = _row("delta_fp32", "delta from an fp32 O", "healthy", 3_000)
FP32 = _row("fp32", "attention in fp32", "healthy", 3_000)
DIALS = [
    _row("output2", "output dial, 2 bits", "diverged", 2_000),
    _row("output3", "output dial, 3 bits", "stable", 3_299),
]


def test_points_tell_a_failure_from_a_run_that_lasted():
    points = dial_points(DIALS)
    assert [(p["bits"], p["step"], p["failed"]) for p in points] == [
        (2, 2_000, True),
        (3, 3_299, False),
    ]
    assert {p["arm"] for p in points} == {"output dial"}


def test_findings_say_when_controls_hold_and_when_they_do_not():
    good = what_you_saw([LOW, TWIN, FP32], DIALS, [None], None).data
    assert "Low precision: diverged at 1,500" in good and "2 of 2 controls outlived it" in good
    assert "Delta from an fp32 O: healthy" in good
    failed = [_row(r["arm"], r["label"], "diverged", 900) for r in (TWIN, FP32)]
    bad = what_you_saw([LOW, *failed], DIALS, [None], None).data
    assert "Both controls failed as well" in bad
    alive = what_you_saw([_row("low", "low precision", "stable", 3_000), TWIN], [], [], None).data
    assert "did not fail here" in alive


def test_archives_are_counted_by_arm():
    rows = [LOW, _row("low", "low precision", "stable", 4_499, seed=1), TWIN]
    kept = Archive(Path("results/failure/x.json"), {"preset": "cpu", "date": "2026-01-01"}, rows)
    told = what_you_saw([LOW, TWIN, FP32], [], [kept], None).data
    assert "Archive `failure`: low precision failed in 1 of 2" in told


def test_sentences_name_seeds_only_when_there_are_several():
    assert "seed" not in outcome_sentences([LOW, TWIN])
    assert "(seed 1)" in outcome_sentences([LOW, TWIN | {"seed": 1}])


def test_a_gpu_preset_has_a_regime_of_its_own_or_asks_about_bf16_itself():
    from book.captured import captured_config
    from book.experiments import FAILURE, dials, errors, failure, isolation

    assert failure("cpu") is FAILURE
    mini = failure("mini")
    assert mini.preset == "mini" and mini.arm("low").attention == "paper,output_bits=4"
    config = mini.arm("low").config(mini, 2)
    assert config.n_layer == 6 and config.init_seed == 2 and config.max_steps == 6_000
    assert failure("gpt2s").arm("low").attention == "paper"
    dial = dials("mini")
    assert [a.attention for a in dial.arms][5] == "paper,output_bits=7"
    four = dial.arm("output4").config(dial, 2)
    assert four.at(probes=config.probes).identity() == config.identity()
    parents = [e("mini") for e in (isolation, lambda p: errors(p, forked=True))]
    assert all(e.arm("low").config(e, 2) == config for e in parents)
    assert captured_config("mini", 2) == config  # one run for chapters 1 to 4


@pytest.mark.parametrize(
    "steps, fails_at, asked",
    [
        (None, 2_000, [2_300]),
        (None, 3_591, [2_300, "low to its end", 3_592]),
        (None, None, [2_300, "low to its end"]),
        (1_000, 3_591, [1_000]),
    ],
)
def test_the_reader_sees_the_failure_wherever_it_comes(steps, fails_at, asked, monkeypatch):
    """All arms go on to where low precision fails, unless the reader set a limit."""
    calls = []

    def run(experiment, *, seeds, stop_at=None, arms=None):
        calls.append(stop_at if arms is None else f"{arms[0]} to its end")
        known = fails_at is not None and (stop_at is None or fails_at < stop_at)
        found = SimpleNamespace(outcome=SimpleNamespace(failed_step=fails_at if known else None))
        return {(arm, seeds[0]): found for arm in arms or experiment.arm_names}

    monkeypatch.setattr(chapter1, "run_experiment", run)
    runs = run_to_failure(failure("cpu"), 0, steps, 2_300)
    assert calls == asked and set(runs) == {(arm, 0) for arm in failure("cpu").arm_names}


def test_a_later_sections_runs_train_in_the_same_pool(monkeypatch):
    calls = []

    def together(experiments, *, arms, **asked):
        calls.append(([e.name for e in experiments], arms, asked))

    def run(experiment, *, seeds, stop_at, store):
        calls.append(experiment.name)
        found = SimpleNamespace(outcome=SimpleNamespace(failed_step=900))
        return {(arm, seeds[0]): found for arm in experiment.arm_names}

    monkeypatch.setattr(chapter1, "run_experiments", together)
    monkeypatch.setattr(chapter1, "run_experiment", run)
    beside = dials("cpu"), ["output2", "matched3"]
    run_to_failure(failure("cpu"), 4, None, 2_000, beside=beside, store="there")
    arms = [*failure("cpu").arm_names, "output2", "matched3"]
    told = dict(seeds=[4], stop_at=2_000, store="there")
    assert calls == [([failure("cpu").name, "dials"], arms, told), failure("cpu").name]
