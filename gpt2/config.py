"""Presets, and how a configuration is read: from a file, a command line or a notebook.

    make_config("cpu")                                      a preset
    make_config("mini", {"attention": "flash"})             with changes
    make_config(yaml_path="study.yaml")                     from a file (its `preset:` first)
    config.at(learning_rate=3e-3)                           a variant of a config
    difference(a, b)                                        every field in which two configs differ

Precedence: preset, then file, then overrides. Every value passes `gpt2.coerce` and
`gpt2.schema.validate`; names from nanoGPT's configs are understood (`gpt2.nanogpt`).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from . import nanogpt
from .coerce import nearest_hint
from .schema import GROUPS, OPTIONS, ConfigNote, RunConfig, clean_overrides, validate

__all__ = [
    "PRESETS",
    "PRESET_NOTES",
    "ConfigNote",
    "ConfigParser",
    "RunConfig",
    "add_arguments",
    "changes_from_preset",
    "config_from_args",
    "describe",
    "difference",
    "get_preset",
    "make_config",
    "parse_assignments",
    "read_config_file",
    "validate",
]


_GPT2 = dict(
    block_size=1024,
    batch_size=512,
    corpus="openwebtext",
    tokenizer="gpt2",
    corpus_max_bytes=0,
    attention="flash",
    learning_rate=6e-4,
    min_lr=6e-5,
    schedule="cosine",
    warmup_steps=2_000,
    max_steps=20_000,
    eval_interval=500,
    probe_interval=100,
    checkpoint_interval=1_000,
    dtype="bfloat16",
)

PRESETS: dict[str, RunConfig] = {
    "cpu": RunConfig(device="cpu"),
    "mini": RunConfig(
        preset="mini",
        n_layer=6,
        n_head=6,
        n_embd=384,
        block_size=512,
        batch_size=64,
        corpus="installed-text+packages",
        tokenizer="bpe:8192",
        corpus_max_bytes=0,
        attention="paper",
        learning_rate=3e-3,
        warmup_steps=200,
        max_steps=18_000,
        eval_interval=500,
        probe_interval=100,
        checkpoint_interval=1_000,
        dtype="bfloat16",
    ),
    "gpt2s": RunConfig(
        **(_GPT2 | dict(corpus="installed-text+packages", tokenizer="bpe:50257")),
        preset="gpt2s",
        n_layer=12,
        n_head=12,
        n_embd=768,
        micro_batch_size=32,
    ),
    "gpt2m": RunConfig(
        **(_GPT2 | dict(corpus="installed-text+packages", tokenizer="bpe:50257")),
        preset="gpt2m",
        n_layer=24,
        n_head=16,
        n_embd=1024,
        micro_batch_size=16,
    ),
    "paper": RunConfig(
        **(
            _GPT2
            | dict(attention="paper", learning_rate=1e-3, min_lr=1e-5, max_steps=600_000)
            | dict(eval_interval=1_000, checkpoint_interval=5_000, held_out_fraction=0.0005)
        ),
        preset="paper",
        n_layer=12,
        n_head=12,
        n_embd=768,
        micro_batch_size=32,
    ),
}

PRESET_NOTES = {
    "cpu": "no GPU needed: 2 layers, 64 wide, bytes; fails by rounding O to 2 fraction bits",
    "mini": "one GPU: 6 layers, 384 wide, BPE of 8,192; where bf16 itself is tried",
    "gpt2s": "one GPU: GPT-2 small at 524,288 tokens a step; throughput and optimiser studies",
    "gpt2m": "one GPU: GPT-2 medium at 524,288 tokens a step",
    "paper": "4 GPUs or more: the paper's recipe, GPT-2 small on OpenWebText for 600,000 steps",
}


def get_preset(name: str) -> RunConfig:
    """A preset by name. Raises ValueError naming the nearest one."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest_hint(name, PRESETS)}")
    return PRESETS[name]


# -- reading --------------------------------------------------------------------------------------


def make_config(
    preset: str | RunConfig | None = None, overrides: dict | None = None, yaml_path=None
) -> RunConfig:
    """A validated config: preset (default `cpu`, or the file's own `preset:`), file, overrides.

    yaml_path: a YAML mapping, or a nanoGPT-style .py file of plain assignments (read, never run).
    Raises ValueError for an unknown key (naming the nearest), a value of the wrong type or a value
    that cannot work; FileNotFoundError for a missing file. Warns (ConfigNote) on translations.
    """
    from_file = read_config_file(yaml_path) if yaml_path is not None else {}
    named = from_file.pop("preset", None)
    base = preset if preset is not None else (named or "cpu")
    config = base if isinstance(base, RunConfig) else get_preset(base)
    for source in (from_file, overrides or {}):
        config = dataclasses.replace(config, **clean_overrides(source))
    return validate(config)


def read_config_file(path) -> dict:
    """The mapping in a .yaml, .yml, .json or nanoGPT .py file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {str(path)!r}; check the path")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return nanogpt.read_assignments(text, str(path))
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise ValueError(f"{path} must hold lines of the form 'key: value'")
    return data


def parse_assignments(pairs) -> dict:
    """{"compile": "blocks"} of ["compile=blocks"]. Raises ValueError for what is no setting."""
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is no setting; write it as key=value")
        out[key.strip()] = value.strip()
    return out


def difference(a: RunConfig, b: RunConfig) -> dict[str, tuple]:
    """{field: (value in a, value in b)} for every field in which they differ, as declared.

    A paired comparison is fair when this names the one thing that it is about.
    """
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in OPTIONS}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def changes_from_preset(config: RunConfig) -> dict:
    """{field: value} where a config departs from the preset it was made from."""
    return {k: new for k, (_, new) in difference(get_preset(config.preset), config).items()}


def describe(config: RunConfig) -> str:
    """'cpu(attention=flash, max_steps=300)': the preset and what departs from it."""
    told = ", ".join(f"{k}={v}" for k, v in changes_from_preset(config).items())
    return f"{config.preset}({told})" if told else config.preset


# -- the command line -----------------------------------------------------------------------------


class ConfigParser(argparse.ArgumentParser):
    """An ArgumentParser with a short usage line; names the nearest option for an unknown one."""

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", _help_formatter)
        kwargs.setdefault("usage", "%(prog)s [--preset NAME] [--config FILE] [--KEY VALUE ...]")
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            options = [o for a in self._actions for o in a.option_strings if o.startswith("--")]
            hint = nearest_hint(word, options) if word.startswith("-") else ""
            self.error(f"unknown argument {unknown[0]!r}{hint or '; see --help'}")
        return known


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=99)


def add_arguments(parser: argparse.ArgumentParser, groups: tuple[str, ...] = GROUPS) -> None:
    """--preset, --config and one option per field, grouped; read with `config_from_args`.

    Options may be written with - or _. nanoGPT's names work but are not listed. groups: those to
    list; the options of the others are taken too, but not listed either.
    """
    notes = "\n".join(f"  {name:6} {note}" for name, note in PRESET_NOTES.items())
    text = f"presets:\n{notes}\n\nThe values in brackets below are those of the cpu preset."
    source = parser.add_argument_group("where to start from", text)
    source.add_argument("--preset", metavar="NAME", help="one of the above [cpu]")
    source.add_argument("--config", metavar="FILE", help="YAML file (or nanoGPT's .py) of keys")
    for title in GROUPS:
        group = parser.add_argument_group(title) if title in groups else None
        for name, option in OPTIONS.items():
            if option.metadata["group"] == title:
                _add_option(group or parser, name, option, listed=group is not None)
    for name in nanogpt.NAMES + nanogpt.IGNORED:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_option(group, name: str, option, listed: bool) -> None:
    choices = option.metadata["choices"]
    text = option.metadata["help"]
    if choices:
        text += f": {', '.join(choices)}"
    default = option.default
    shown = ",".join(default) if isinstance(default, tuple) else str(default).lower()
    metavar = {"int": "N", "float": "X", "bool": "yes|no"}.get(option.type.split(" ")[0], "TEXT")
    shared = dict(dest=name, default=argparse.SUPPRESS)
    shown = f"{text} [{shown}]".replace("%", "%%") if listed else argparse.SUPPRESS
    group.add_argument(f"--{name}", metavar=metavar, help=shown, **shared)
    if "_" in name:
        group.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS, **shared)


def config_from_args(args: argparse.Namespace) -> RunConfig:
    """The config that parsed arguments describe. Raises ValueError as `make_config` does."""
    given = vars(args)
    names = (*OPTIONS, *nanogpt.NAMES, *nanogpt.IGNORED)
    overrides = {name: given[name] for name in names if name in given}
    return make_config(given.get("preset"), overrides, given.get("config"))
