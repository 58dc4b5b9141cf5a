"""The search for a recipe: what is tried next, what is archived, and that it goes on."""

import json
from pathlib import Path

import pytest

from book import evidence, recipes
from book.evidence import archives, write_archive
from book.experiment_runs import ended_runs, run_experiment
from book.experiments import in_regime
from book.gpu_experiments import BUILDERS
from book.recipes import FIRST, Search, save, wanted
from book.regimes import RECIPES, Regime, get_recipe
from gpt2.config import PRESETS
from gpt2.many import Pool
from gpt2.outcomes import Outcome
from gpt2.runs import RunStore

TWO = {"a": Regime("paper", 300), "b": Regime("paper", 600)}


def diverged(step):
    return Outcome("diverged", last_step=step, diverged_step=step)


def keys(known):
    return [t.key for t in wanted(TWO, known, seeds=(0, 1))]


def test_every_recipe_is_tried_with_its_first_seed_in_the_declared_order():
    tries = wanted(TWO, {}, seeds=(3, 4))
    assert [(t.key, t.steps, t.stage) for t in tries] == [
        (("a", "low", 3), 200, FIRST),
        (("b", "low", 3), 400, FIRST),
    ]


def test_a_divergence_asks_for_twin_witness_and_seeds_before_other_recipes():
    known = {("b", "low", 0): diverged(100)}
    assert keys(known) == [
        ("b", "delta_fp32", 0),
        ("b", "sdpa", 0),
        ("b", "low", 1),
        ("a", "low", 0),
        ("b", "low", 0),
    ]
    assert wanted(TWO, known)[0].steps == 151  # step 150 is the first that makes it healthy
    known["b", "low", 1] = diverged(40)
    asked = wanted(TWO, known, seeds=(0, 1))
    assert ("b", "delta_fp32", 1) in keys(known)
    assert next(t.steps for t in asked if t.key == ("b", "delta_fp32", 1)) == 61


def test_the_recipe_that_failed_soonest_is_confirmed_first():
    known = {("a", "low", 0): diverged(150), ("b", "low", 0): diverged(100)}
    assert keys(known)[:4] == [
        ("b", "delta_fp32", 0),
        ("a", "delta_fp32", 0),
        ("b", "sdpa", 0),
        ("a", "sdpa", 0),
    ]


@pytest.mark.parametrize("kind", ["stable", "nonfinite"])
def test_only_a_divergence_asks_for_more(kind):
    assert keys({("a", "low", 0): Outcome(kind, last_step=9, nonfinite_step=9)}) == keys({})


def test_a_twin_that_fails_too_ends_the_confirmation():
    known = {("b", "low", 0): diverged(100), ("b", "delta_fp32", 0): diverged(90)}
    assert ("b", "sdpa", 0) not in keys(known)


def test_named_arms_are_run_whatever_comes_of_them():
    def tries(known, arms):
        asked = wanted({"a": TWO["a"]}, known, seeds=(1, 2), arms=arms)
        return [(t.arm, t.seed, t.steps) for t in asked]

    assert tries({}, ["low"]) == [("low", 1, 200), ("low", 2, 200)]
    both = ["low", "delta_fp32"]
    pairs = [("low", 1, 200), ("delta_fp32", 1, 200), ("low", 2, 200), ("delta_fp32", 2, 200)]
    assert tries({}, both) == pairs
    known = {("a", "low", 1): Outcome("stable", last_step=199), ("a", "low", 2): diverged(180)}
    assert tries(known, both) == [*pairs[:3], ("delta_fp32", 2, 271)]


def test_a_twin_outlives_what_an_archive_says_of_low_precision(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    row = {"recipe": "a", "arm": "low", "forked_at": None, "status": "diverged"}
    rows = [
        row | {"seed": s, "kind": "diverged", "outcome": diverged(100 + s).to_dict()}
        for s in (1, 2)
    ]
    rows += [row | {"seed": 3, "kind": "stable", "outcome": Outcome("stable", 500).to_dict()}]
    told = {"provenance": {"date": "2026-01-01"}, "rows": rows}
    (folder / "x.json").write_text(json.dumps(told))
    found = recipes.archived_failures(["a"], tmp_path)
    assert {key[2]: o.failed_step for key, o in found.items()} == {1: 101, 2: 102}
    asked = wanted({"a": TWO["a"]}, found, seeds=(1, 3), arms=["delta_fp32"])
    assert [(t.seed, t.steps) for t in asked] == [(1, 153), (3, 200)]


def test_recipes_are_what_they_say_and_no_names_of_presets():
    allowed = set(
        "n_layer n_head n_embd block_size batch_size learning_rate beta2 tokenizer".split()
    )
    runtime = {"device", "dtype", "probe_interval", "eval_interval", "checkpoint_interval"}
    assert not set(RECIPES) & set(PRESETS)
    for how in RECIPES.values():
        config = how.config
        assert how.low == "paper" and config.dtype == "bfloat16" and config.device == "auto"
        assert set(dict(how.changes)) <= allowed | runtime
        assert config.probe_interval <= 200  # a probe within the 200 steps of the onset rule
        assert how.most * 1.5 <= config.max_steps == how.steps
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        get_recipe("tinny")


@pytest.mark.parametrize("name", ["tiny", "small-lr6", "mini-lr5"])
def test_every_experiment_can_be_had_in_a_recipe(name):
    for build in BUILDERS.values():
        experiment = build(name)
        assert experiment.name.endswith(f"-{name}")
        assert len(set(experiment.arm_names)) == len(experiment.arms)
        for arm in experiment.arms:
            if "{" not in arm.attention and arm.at is None:
                config = arm.config(experiment, 1)
                assert config.dtype == "bfloat16" and config.init_seed == 1
    low = [
        b(name).arm("low").config(b(name), 0).identity()
        for b in BUILDERS.values()
        if "low" in b(name).arm_names
    ]
    assert all(identity == low[0] for identity in low)  # trained once for all of them
    paper = BUILDERS["dials"](name).arm("matched7").config(BUILDERS["dials"](name), 0)
    assert paper.identity() == low[0]  # seven bits are bf16 itself


# -- a real search, of toys that fail within seconds ----------------------------------------------


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Recipes at a learning rate that no arm survives, so that the twin fails as well."""
    folder = tmp_path_factory.mktemp("recipes")
    text = folder / "text"
    text.mkdir()
    words = "the sign of an error decides whether it feeds back into the weights".split()
    for i in range(24):
        line = " ".join(words[(i + j * (1 + i % 5)) % len(words)] for j in range(300))
        (text / f"document{i:02d}.txt").write_text(line + "\n")
    shape = dict(n_embd=16, block_size=16, batch_size=8, held_out_fraction=0.2)
    shape |= dict(corpus=f"files:{text}/*.txt", eval_interval=200, eval_batches=2)
    shape |= dict(grad_clip=0.0, warmup_steps=200)
    wild = shape | dict(learning_rate=3.0, grad_clip=0.0)
    made = {
        "calm": Regime("exact", 30, changes=tuple((shape | dict(warmup_steps=5)).items())),
        "wild": Regime("exact", 900, changes=tuple(wild.items())),
        "bad": Regime("exact", 30, changes=(("corpus", f"files:{folder}/none/*.txt"),)),
    }
    return folder, made


def search(folder: Path, made: dict) -> tuple[Search, Pool]:
    pool = Pool(RunStore(folder / "runs"), workers=1, cache_dir=folder / "data")
    return Search(made, pool, seeds=(0, 1)), pool


def test_a_search_confirms_archives_and_goes_on_where_it_stopped(toys, capsys):
    folder, made = toys
    mine, pool = search(folder, made)
    with pool:
        mine.run()
    assert mine.known["calm", "low", 0].kind == "stable"
    assert mine.known["wild", "low", 0].kind == "diverged"
    assert mine.known["wild", "delta_fp32", 0].failed  # so the recipe is given up
    assert set(mine.lost) == {("bad", "low", 0)}
    assert set(mine.known) == {("calm", "low", 0), ("wild", "low", 0), ("wild", "delta_fp32", 0)}
    told = capsys.readouterr().out
    assert "wild low seed 0: diverged at step" in told and "steps/s" in told

    (path,) = save(mine, folder / "results", commit="abc")
    kept = json.loads(path.read_text())
    rows = {(row["recipe"], row["arm"]): row for row in kept["rows"]}
    assert rows["calm", "low"]["status"] == "interrupted" and rows["calm", "low"]["steps"] == 19
    assert rows["calm", "low"]["steps_asked"] == 20 and rows["calm", "low"]["minutes"] > 0
    assert rows["wild", "low"]["kind"] == "diverged" and rows["wild", "low"]["steps_per_s"] > 0
    assert kept["recipes"]["wild"]["changes"]["learning_rate"] == 3.0 and kept["complete"]

    again, pool = search(folder, made)
    with pool:
        again.run()
    assert again.known == mine.known and "wild low" not in capsys.readouterr().out
    (other,) = save(search_of_nothing(again, folder), folder / "results")
    assert other == path and len(archives("recipes", folder / "results")[0].rows) == len(rows)


def test_a_twin_of_a_run_that_lives_is_run_as_far_and_onset_is_judged(toys, capsys, monkeypatch):
    folder, made = toys
    probed = Regime("exact", 30, changes=(*made["calm"].changes, ("probe_interval", 5)))
    monkeypatch.setattr(recipes, "get_recipe", lambda name: probed)
    asked = ["--recipes", "calm", "--seeds", "5", "--data", str(folder / "data")]
    results = folder / "named-results"
    asked += ["--results", str(results), "--workers", "1"]

    def archived(arms, store):
        assert recipes.main([*asked, "--arms", arms, "--store", str(folder / store)]) == 0
        (kept,) = archives("recipes", results)
        return {row["arm"]: row for row in kept.rows}

    rows = archived("low", "first")
    assert set(rows) == {"low"} and rows["low"]["judged_to"] is None
    rows = archived("delta_fp32", "second")  # only the record of `low` is left here
    assert rows["low"]["judged_from"] == "records" and rows["low"]["judged_to"] == 19
    assert rows["delta_fp32"]["steps"] == 19 and rows["delta_fp32"]["judged_from"] == "metrics"
    assert set(rows["low"]["heads"]) == {"spectral_norm_q", "tie_rate"}
    told = capsys.readouterr().out
    assert "calm low seed 5: no failure by step 19" in told
    rows = archived("low,delta_fp32", "first")
    assert rows["low"]["judged_from"] == "metrics" and rows["low"]["judged_to"] == 20
    assert rows["low"]["worst_heads"]["end"]["tie_rate"]["layer"] in (0, 1)


def search_of_nothing(done: Search, folder: Path) -> Search:
    """One that has seen a single one of the runs, as on another machine's store."""
    key = ("calm", "low", 0)
    return Search(done.recipes, done.pool, jobs={key: done.jobs[key]}, known=dict(done.known))


def test_an_end_of_time_archives_what_was_cut(toys, monkeypatch):
    folder, made = toys
    endless = Regime("exact", 50_000, changes=made["calm"].changes)

    def time_is_up(self):
        states = [job.state() for job in self.pool.running]
        if any(int(state.partition("/")[0]) > 1 for state in states if "/" in state):
            raise KeyboardInterrupt  # as `time_limit` does
        return str(states)

    monkeypatch.setattr(recipes, "get_recipe", lambda name: endless)
    monkeypatch.setattr(recipes, "TELL_S", 0.0)
    monkeypatch.setattr(Search, "progress", time_is_up)
    where = ["--store", str(folder / "cut"), "--data", str(folder / "data")]
    asked = ["--recipes", "calm", "--results", str(folder / "cut-results")]
    assert recipes.main([*asked, *where]) == 130
    (kept,) = archives("recipes", folder / "cut-results")
    (row,) = kept.rows
    assert row["status"] == "interrupted" and row["kind"] == "stable" and not kept.complete
    assert row["steps"] > 0 and "SIGINT" in row["message"] and row["train_loss"] > 0


def test_evidence_keeps_paused_runs_only_when_asked(toys):
    folder, made = toys
    experiment = in_regime("toy", "exact", "?", made["calm"])
    common = dict(store=RunStore(folder / "paused"), cache_dir=folder / "data", seeds=[0])
    common["arms"] = ["low"]
    (run,) = run_experiment(experiment, stop_at=3, progress=False, **common).values()
    assert run.step == 3 and ended_runs(experiment, **common) == {}
    kept = ended_runs(experiment, partial=True, **common)
    assert [key for key in kept] == [("low", 0)]
    path = write_archive(experiment, kept, "cpu", folder / "paused-results", commit="abc")
    told = json.loads(path.read_text())
    assert told["rows"][0]["status"] == "interrupted" and not told["complete"]
    assert told["provenance"]["commit"]  # its own where there is a repository


def test_evidence_takes_recipes_and_refuses_what_it_does_not_know(capsys):
    assert evidence.main(["--list", "--recipe", "tiny"]) == 0
    told = capsys.readouterr().out
    assert "failure-tiny (chapter 6, 12 arms x 5 seeds)" in told and "sites-tiny" in told
    assert evidence.main(["failures", "--recipe", "tiny"]) == 2
    assert "did you mean 'failure'" in capsys.readouterr().err
    assert evidence.main(["failure", "--recipe", "tinny"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err
    where = ["--devices", "cuda:7", "--workers", "1", "--store", "none", "--data", "none"]
    assert evidence.main(["failure", "--seeds", "0", *where]) == 2
    assert "choose another" in capsys.readouterr().err


def test_bad_input_is_refused_in_one_sentence(capsys):
    assert recipes.main(["--recipes", "tinny"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err
    assert recipes.main(["--recipes", "tiny", "--arms", "twin"]) == 2
    assert "no arm 'twin'" in capsys.readouterr().err
    assert recipes.main(["--recipes", "tiny", "--list"]) == 0
    assert "learning_rate" not in capsys.readouterr().out
