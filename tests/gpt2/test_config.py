"""Presets, coercion, files, the command line, nanoGPT's names, identity."""

import argparse
import dataclasses
import warnings

import pytest

from gpt2.config import (
    PRESET_NOTES,
    PRESETS,
    ConfigNote,
    ConfigParser,
    RunConfig,
    add_arguments,
    changes_from_preset,
    config_from_args,
    describe,
    difference,
    make_config,
    parse_assignments,
)
from gpt2.fingerprint import code_fingerprint, fingerprinted_files
from gpt2.schema import GROUPS, OPTIONS, validate


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_named_and_described(name):
    config = make_config(name)
    assert validate(config) is config
    assert config.preset == name and name in PRESET_NOTES
    assert changes_from_preset(config) == {}


def test_the_paper_preset_is_the_papers_recipe():
    c = PRESETS["paper"]
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size) == (12, 12, 768, 1024)
    assert c.tokens_per_step == 524_288
    assert (c.beta1, c.beta2, c.weight_decay, c.grad_clip) == (0.9, 0.95, 0.0, 1.0)
    assert (c.learning_rate, c.min_lr, c.schedule, c.warmup_steps) == (1e-3, 1e-5, "cosine", 2000)
    assert (c.corpus, c.tokenizer, c.max_steps) == ("openwebtext", "gpt2", 600_000)


def test_gpt2_presets_train_half_a_million_tokens_a_step():
    assert {PRESETS[n].tokens_per_step for n in ("gpt2s", "gpt2m", "paper")} == {524_288}


@pytest.mark.parametrize(
    "key, given, value",
    [
        ("learning_rate", "1e-3", 1e-3),
        ("learning_rate", 1, 1.0),
        ("max_steps", "2e3", 2000),
        ("max_steps", 2000.0, 2000),
        ("max_steps", "10_000", 10_000),
        ("qk_norm", "yes", True),
        ("qk_norm", "off", False),
        ("qk_norm", 1, True),
        ("compile", False, "off"),
        ("compile", True, "on"),
        ("micro_batch_size", None, None),
        ("micro_batch_size", "none", None),
        ("micro_batch_size", "8", 8),
        ("vocab_size", "512", 512),
        ("probes", "spectral_norm_q, entropy", ("spectral_norm_q", "entropy")),
        ("probes", ["tie_rate"], ("tie_rate",)),
        ("probes", "none", ()),
    ],
)
def test_values_are_coerced_to_the_fields_type(key, given, value):
    got = getattr(make_config("cpu", {key: given}), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "key, given, says",
    [
        ("learnig_rate", 1e-3, "did you mean 'learning_rate'"),
        ("max_itres", 5, "did you mean 'max_iters'"),
        ("zzz", 5, "see --help"),
        ("beta1", None, "beta1 cannot be null"),
        ("beta1", 2, "beta1=2.0; use a value from 0 to below 1"),
        ("learning_rate", "fast", "learning_rate='fast' is not a number"),
        ("learning_rate", "nan", "not finite"),
        ("learning_rate", True, "yes or no"),
        ("max_steps", 2.5, "max_steps=2.5 is not a whole number"),
        ("max_steps", True, "max_steps=True is a yes or no"),
        ("qk_norm", "maybe", "qk_norm='maybe' is not a yes or a no"),
        ("qk_norm", 0.5, "not a yes or a no"),
        ("optimizer", "sgd", "use adamw, muon"),
        ("dtype", False, "is not text"),
        ("probes", [1], "not a list of names"),
        ("n_head", 3, "n_head=3 does not divide n_embd=64"),
        ("n_kv_head", 3, "n_kv_head=3 does not divide n_head=2"),
        ("micro_batch_size", 5, "micro_batch_size=5 does not divide batch_size=16"),
        ("n_layer", 0, "n_layer=0; use at least 1"),
        ("min_lr", 1.0, "above learning_rate"),
        ("held_out_fraction", 0, "held_out_fraction=0.0"),
        ("adam_eps", 0, "adam_eps=0.0"),
        ("grad_clip", -1, "negative"),
        ("attention", "papr", "did you mean 'paper'"),
        ("attention", "paper; L2 -> exact", "layer 2 does not exist; the model has 2"),
        ("corpus", "wikipedia", "corpus='wikipedia' is unknown"),
        ("corpus", "files:", "corpus='files:' is unknown"),
        ("tokenizer", "bpe:100", "at least 257"),
        ("tokenizer", "sentencepiece", "use bytes, bpe:8192 or gpt2"),
        ("device", "tpu", "device='tpu' is unknown"),
        ("init_from", "resume", "a run resumes by being asked for again"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(key, given, says):
    with pytest.raises(ValueError) as error:
        make_config("cpu", {key: given})
    assert says in str(error.value)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="unknown preset 'mimi'; did you mean 'mini'"):
        make_config("mimi")


def test_yaml_values_have_their_types(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(
        "preset: mini\nlearning_rate: 1e-3\nbeta2: 0\nqk_norm: no\ncompile: off\nn_kv_head: null\n"
    )
    config = make_config(yaml_path=path, overrides={"max_steps": 7})
    assert config.preset == "mini" and config.max_steps == 7
    assert (config.learning_rate, config.beta2, config.qk_norm) == (1e-3, 0.0, False)
    assert (config.compile, config.n_kv_head) == ("off", None)
    assert make_config("cpu", yaml_path=path).preset == "cpu"


@pytest.mark.parametrize(
    "text, says",
    [
        ("learnig_rate: 1e-3\n", "did you mean 'learning_rate'"),
        ("beta1:\n", "beta1 cannot be null"),
        ("- 1\n- 2\n", "of the form 'key: value'"),
        ("a: [1\n", "is not valid YAML"),
    ],
)
def test_bad_yaml_is_refused_in_a_sentence(tmp_path, text, says):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        make_config(yaml_path=path)
    assert says in str(error.value)


def test_an_empty_file_changes_nothing_and_a_missing_one_is_an_error(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert make_config(yaml_path=tmp_path / "empty.yaml") == make_config("cpu")
    with pytest.raises(FileNotFoundError, match="nosuch.yaml"):
        make_config(yaml_path=tmp_path / "nosuch.yaml")


def test_nanogpt_names_and_its_micro_batch_are_translated_with_a_note():
    given = {
        "batch_size": 12,
        "gradient_accumulation_steps": "5",
        "max_iters": 100,
        "lr_decay_iters": 90,
        "warmup_iters": 10,
        "eval_iters": 3,
        "decay_lr": True,
        "dataset": "shakespeare_char",
        "seed": 1337,
        "compile": False,
        "wandb_log": False,
    }
    with pytest.warns(ConfigNote) as notes:
        config = make_config("cpu", given)
    said = " ".join(str(n.message) for n in notes)
    assert "nanoGPT's micro batch" in said and "wandb_log" in said
    assert (config.batch_size, config.micro_batch_size) == (60, 12)
    assert (config.max_steps, config.decay_steps, config.warmup_steps) == (100, 90, 10)
    assert (config.eval_batches, config.schedule, config.compile) == (3, "cosine", "off")
    assert config.corpus == "bin:data/shakespeare_char"
    assert config.init_seed == config.order_seed == 1337


def test_a_plain_batch_size_stays_global_and_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_config("cpu", {"batch_size": 12}).batch_size == 12


@pytest.mark.parametrize(
    "given, says",
    [
        ({"gradient_accumulation_steps": 4}, "needs batch_size"),
        ({"max_iters": 4, "max_steps": 5}, "are the same setting"),
        (
            {"gradient_accumulation_steps": 4, "batch_size": 2, "micro_batch_size": 2},
            "are the same setting",
        ),
    ],
)
def test_contradicting_names_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        make_config("cpu", given)


def test_a_nanogpt_config_file_is_read_unchanged_and_not_run(tmp_path):
    path = tmp_path / "train_gpt2.py"
    path.write_text(
        '# launch: torchrun ...\nimport time\nwandb_run_name = "run" + str(time.time())\n'
        "batch_size = 24\nblock_size = 1024\ngradient_accumulation_steps = 5 * 4\n"
        "weight_decay = 5e-2\nlr_decay_iters = 300000\nmax_iters = lr_decay_iters\nbias = False\n"
        "dataset = 'openwebtext'\n"
    )
    with pytest.warns(ConfigNote):
        config = make_config("gpt2s", yaml_path=path)
    assert (config.batch_size, config.micro_batch_size, config.block_size) == (480, 24, 1024)
    assert (config.weight_decay, config.decay_steps, config.max_steps) == (0.05, 300_000, 300_000)
    assert (config.corpus, config.tokenizer) == ("openwebtext", "gpt2")
    path.write_text("learning_rate = __import__('os').getpid()\n")
    with pytest.raises(ValueError, match="line 1: learning_rate = .* is not a plain value"):
        make_config("cpu", yaml_path=path)


def parser():
    made = ConfigParser(prog="train", description="Train.")
    add_arguments(made)
    return made


def test_the_command_line_sets_every_field():
    config = make_config("cpu")
    words = []
    for name in OPTIONS:
        value = getattr(config, name)
        words.append(f"--{name}={','.join(value) if isinstance(value, tuple) else value}")
    assert config_from_args(parser().parse_args(words)) == config


def test_the_command_line_takes_dashes_presets_files_and_nanogpts_names(tmp_path):
    (tmp_path / "a.yaml").write_text("learning_rate: 5e-4\nn_layer: 3\n")
    line = f"--preset mini --config {tmp_path / 'a.yaml'} --learning-rate 1e-4 --max_iters=9"
    config = config_from_args(parser().parse_args(line.split()))
    assert (config.preset, config.n_layer, config.learning_rate, config.max_steps) == (
        *("mini", 3),
        *(1e-4, 9),
    )
    assert describe(config) == "mini(n_layer=3, learning_rate=0.0001, max_steps=9)"


def test_an_unknown_option_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(["--learnig_rate", "3"])
    assert stop.value.code == 2
    assert "did you mean '--learning_rate'" in capsys.readouterr().err


def test_help_lists_every_field_once_in_its_group_and_every_preset():
    text = parser().format_help()
    for name in OPTIONS:
        assert text.count(f"  --{name} ") == 1, name
    for title in GROUPS:
        assert f"\n{title}:\n" in text
    for name, note in PRESET_NOTES.items():
        assert f"{name:6} {note}" in text
    assert max(map(len, text.splitlines())) <= 99


def test_arguments_can_be_added_to_a_plain_parser():
    plain = argparse.ArgumentParser()
    add_arguments(plain)
    assert config_from_args(plain.parse_args(["--n_layer", "1"])).n_layer == 1


def test_difference_names_every_differing_field_and_nothing_else():
    a = make_config("cpu")
    b = a.at(attention="exact", micro_batch_size=8)
    assert difference(a, a) == {}
    assert difference(a, b) == {
        "attention": ("exact,output_bits=2", "exact"),
        "micro_batch_size": (None, 8),
    }


def test_a_config_survives_json_and_is_immutable():
    a = make_config("mini", {"probes": "tie_rate"})
    again = RunConfig.from_dict(a.to_dict())
    assert again == a and again.preset == "mini"
    with pytest.raises(ValueError, match="unknown key 'n_layers'; did you mean 'n_layer'"):
        RunConfig.from_dict({"n_layers": 3})
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.n_layer = 3


def test_identity_holds_what_determines_the_result_and_nothing_else():
    a = make_config("cpu", {"device": "cpu"})
    same = a.at(keep_checkpoints=9, checkpoint_interval=7, n_kv_head=2, decay_steps=2500)
    same = same.at(cuda_graph="off")
    assert same.identity() == a.identity()
    respelt = a.at(attention="exact, output_bits=2")
    assert respelt.identity() == a.identity()
    free = {"keep_checkpoints", "checkpoint_interval", "cuda_graph"}
    assert set(OPTIONS) - set(a.identity()) == free
    for change in ({"attention": "exact"}, {"order_seed": 1}, {"adam_eps": 1e-5}, {"bias": True}):
        assert a.at(**change).identity() != a.identity()
    scoped = a.at(attention="exact; L1H0 -> paper").identity()["attention"]
    assert scoped[1]["layers"] == [1] and scoped[1]["heads"] == [0]
    assert make_config("cpu", {"device": "cuda:1"}).identity()["device"] == "cuda"


def test_accumulation_divides_the_global_batch_or_refuses():
    config = make_config("cpu", {"batch_size": 16, "micro_batch_size": 4})
    assert config.accumulation(1) == (4, 4)
    assert config.accumulation(2) == (4, 2)
    assert config.accumulation(8) == (2, 1)
    assert make_config("cpu").accumulation(2) == (8, 1)
    with pytest.raises(ValueError, match="does not divide over 3 processes"):
        config.accumulation(3)


def test_assignments_of_a_command_line():
    assert parse_assignments(["attention=paper,tile=4", "n_layer = 2"]) == {
        "attention": "paper,tile=4",
        "n_layer": "2",
    }
    with pytest.raises(ValueError, match="'oops' is no setting; write it as key=value"):
        parse_assignments(["oops"])


def test_the_code_fingerprint_covers_what_runs_and_is_stable():
    names = {f"{p.parent.name}/{p.name}" for p in fingerprinted_files()}
    assert {"kernels/numerics.py", "gpt2/batches.py", "gpt2/schema.py"} <= names
    assert not {"gpt2/prepare.py", "kernels/bench.py"} & names
    assert not any("forensics" in str(p) for p in fingerprinted_files())
    assert code_fingerprint() == code_fingerprint() and len(code_fingerprint()) == 64
