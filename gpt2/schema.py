"""The configuration of a run as one flat immutable value, with its types and its rules.

`gpt2.config` holds the presets and reads configurations; this module says what one is.
"""

from __future__ import annotations

import dataclasses
import json
import typing
import warnings
from dataclasses import dataclass, field, fields

from kernels.numerics import ScopedNumerics

from . import nanogpt
from .coerce import coerce, nearest_hint

GROUPS = (
    "model",
    "attention",
    "data",
    "batch",
    "optimiser",
    "schedule",
    "seeds",
    "evaluation and probes",
    "runtime",
)


def _option(default, group: str, help: str, choices: tuple[str, ...] = ()):
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run. Defaults: the `cpu` preset's, but for its device."""

    n_layer: int = _option(2, "model", "transformer blocks")
    n_head: int = _option(2, "model", "query heads of a block")
    n_kv_head: int | None = _option(None, "model", "key/value heads; none: as many as n_head")
    n_embd: int = _option(64, "model", "width; a multiple of n_head")
    block_size: int = _option(64, "model", "context length in tokens")
    vocab_size: int | None = _option(None, "model", "rows of the embedding; none: the corpus's")
    bias: bool = _option(False, "model", "biases in linear layers and norms")
    dropout: float = _option(0.0, "model", "dropout probability")
    tie_embeddings: bool = _option(True, "model", "share the embedding with the output head")
    qk_norm: bool = _option(False, "model", "normalise q and k of each head")
    qk_clip: float = _option(0.0, "model", "rescale W_Q, W_K beyond this max logit; 0: off")
    gated_attention: bool = _option(False, "model", "gate the attention output by a sigmoid")
    logit_softcap: float = _option(0.0, "model", "bound the output logits by c*tanh(x/c); 0: off")

    attention: str = _option(
        "exact,output_bits=2",
        "attention",
        "where attention rounds: 'flash', 'paper', 'exact,output_bits=2', "
        "'paper; L1H0 -> exact' or 'sdpa'",
    )
    attention_backend: str = _option(
        "auto", "attention", "what computes it", ("auto", "emulated", "triton", "sdpa")
    )

    corpus: str = _option(
        "installed-text",
        "data",
        "installed-text (Python's own source), installed-text+packages, files:GLOB, "
        "openwebtext, openwebtext:FOLDER, or bin:DIR",
    )
    tokenizer: str = _option("bytes", "data", "bytes, bpe:SIZE (trained on the corpus), or gpt2")
    corpus_max_bytes: int = _option(8_000_000, "data", "take documents up to this size; 0: all")
    held_out_fraction: float = _option(0.05, "data", "share of documents never trained on")

    batch_size: int = _option(16, "batch", "sequences of one optimiser step, over all processes")
    micro_batch_size: int | None = _option(
        None, "batch", "sequences of one forward pass; none: as few passes as possible"
    )

    optimizer: str = _option("adamw", "optimiser", "update rule", ("adamw", "muon"))
    learning_rate: float = _option(1e-2, "optimiser", "peak learning rate")
    beta1: float = _option(0.9, "optimiser", "AdamW's first moment decay")
    beta2: float = _option(0.95, "optimiser", "AdamW's second moment decay")
    adam_eps: float = _option(1e-8, "optimiser", "AdamW's epsilon; 1e-5 is a known workaround")
    weight_decay: float = _option(0.0, "optimiser", "decoupled weight decay of matrices")
    grad_clip: float = _option(1.0, "optimiser", "largest gradient norm; 0: no clipping")
    muon_lr: float = _option(0.02, "optimiser", "Muon's rate for hidden matrices")
    z_loss: float = _option(0.0, "optimiser", "weight of (log Z)^2 in the loss; 0: off")

    schedule: str = _option("constant", "schedule", "after the warm-up", ("cosine", "constant"))
    max_steps: int = _option(2_500, "schedule", "optimiser steps of the run")
    warmup_steps: int = _option(100, "schedule", "steps of linear warm-up")
    decay_steps: int | None = _option(
        None, "schedule", "step at which cosine reaches min_lr; none: max_steps"
    )
    min_lr: float = _option(0.0, "schedule", "last learning rate of the cosine")

    init_seed: int = _option(0, "seeds", "weights, dropout and stochastic rounding")
    order_seed: int = _option(0, "seeds", "which windows of the corpus make up each batch")

    eval_interval: int = _option(250, "evaluation and probes", "steps between held-out losses")
    eval_batches: int = _option(20, "evaluation and probes", "batches of a held-out loss")
    probe_interval: int = _option(25, "evaluation and probes", "steps between probes")
    probes: tuple[str, ...] = _option(
        ("spectral_norm_q", "tie_rate"), "evaluation and probes", "names from gpt2.probes"
    )

    checkpoint_interval: int = _option(500, "runtime", "steps between checkpoints")
    keep_checkpoints: int = _option(2, "runtime", "newest checkpoints kept")
    dtype: str = _option("float32", "runtime", "autocast type", ("float32", "bfloat16", "float16"))
    grad_reduce_dtype: str = _option(
        "float32", "runtime", "gradient sums over processes", ("float32", "bfloat16")
    )
    compile: str = _option(
        "auto",
        "runtime",
        "torch.compile; blocks: one block for all",
        ("auto", "on", "off", "blocks"),
    )
    cuda_graph: str = _option(
        "auto", "runtime", "launch a GPU's training step as one graph", ("auto", "on", "off")
    )
    device: str = _option("auto", "runtime", "auto, cpu, cuda, cuda:1, mps")
    preset: str = field(default="cpu", compare=False, metadata={"group": None})

    def at(self, **changes) -> RunConfig:
        """A variant with some fields changed, coerced and validated like any override."""
        return validate(dataclasses.replace(self, **clean_overrides(changes)))

    def to_dict(self) -> dict:
        """Plain JSON types, `preset` included; `RunConfig.from_dict` gives an equal value back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, data: dict) -> RunConfig:
        """From `to_dict`. A missing field takes its default, an unknown one is an error."""
        data = dict(data)
        return cls(preset=data.pop("preset", "cpu")).at(**data)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def device_type(self) -> str:
        """'cpu', 'cuda' or 'mps'; `auto` is the best one that this machine has."""
        if self.device != "auto":
            return self.device.partition(":")[0]
        import torch

        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"

    def accumulation(self, world_size: int = 1) -> tuple[int, int]:
        """(micro batch, passes per process and step) for `world_size` processes.

        Raises ValueError where the global batch does not divide.
        """
        share, rest = divmod(self.batch_size, world_size)
        if rest:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide over {world_size} processes; "
                "use a multiple or another number of processes"
            )
        micro = min(self.micro_batch_size or share, share)
        if share % micro:
            raise ValueError(
                f"micro_batch_size={micro} does not divide the {share} sequences of a process "
                f"(batch_size {self.batch_size} over {world_size})"
            )
        return micro, share // micro

    def identity(self) -> dict:
        """The fields that determine the result, in canonical form, as plain JSON types.

        Out: how often to checkpoint and how many to keep, the preset's name, where a corpus lies
        (its content is hashed by the corpus), which device of its type, and CUDA graphs, which
        launch the same kernels (`compile` makes others, so it is in). Two spellings of the same
        numerics are one identity.
        """
        out = self.to_dict()
        for name in ("checkpoint_interval", "keep_checkpoints", "preset", "cuda_graph"):
            del out[name]
        out["attention"] = _canonical_attention(self.attention)
        out["corpus"] = self.corpus.partition(":")[0]
        out["device"] = self.device_type()
        out["n_kv_head"] = self.n_kv_head or self.n_head
        out["decay_steps"] = self.decay_steps or self.max_steps
        return out


def _canonical_attention(text: str):
    if text == "sdpa":
        return text
    scoped = ScopedNumerics.parse(text)
    parts = [(None, None, scoped.base)]
    parts += [(o.layers, o.heads, o.numerics) for o in scoped.overrides]
    plain = [{"layers": a, "heads": b, **n.to_dict()} for a, b, n in parts]
    for part in plain:
        del part["name"]
    return json.loads(json.dumps(plain))


def validate(config: RunConfig) -> RunConfig:
    """`config` itself, or ValueError naming the first value that cannot work and the remedy."""
    c = config
    at_least_one = (
        "n_layer n_head n_embd block_size batch_size max_steps eval_interval eval_batches "
        "probe_interval checkpoint_interval keep_checkpoints"
    )
    for name in at_least_one.split():
        _require(getattr(c, name) >= 1, f"{name}={getattr(c, name)}; use at least 1")
    for name in ("n_kv_head", "vocab_size", "micro_batch_size", "decay_steps"):
        value = getattr(c, name)
        _require(value is None or value >= 1, f"{name}={value}; use at least 1, or none")
    not_negative = (
        "qk_clip logit_softcap corpus_max_bytes learning_rate min_lr weight_decay grad_clip "
        "muon_lr z_loss warmup_steps init_seed order_seed"
    )
    for name in not_negative.split():
        _require(getattr(c, name) >= 0, f"{name}={getattr(c, name)} is negative; use 0 or more")
    for name in ("dropout", "beta1", "beta2"):
        value = getattr(c, name)
        _require(0 <= value < 1, f"{name}={value}; use a value from 0 to below 1")
    _require(0 < c.held_out_fraction < 1, f"held_out_fraction={c.held_out_fraction}; use 0.05")
    _require(c.adam_eps > 0, f"adam_eps={c.adam_eps}; use a small positive number such as 1e-8")
    _divides(c, "n_head", "n_embd")
    _divides(c, "n_kv_head", "n_head")
    _divides(c, "micro_batch_size", "batch_size")
    _require(
        c.min_lr <= c.learning_rate,
        f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}; lower it",
    )
    if c.attention != "sdpa":
        ScopedNumerics.parse(c.attention).check(c.n_layer, c.n_head)
    _check_data(c)
    return config


def _check_data(c: RunConfig) -> None:
    kind, _, rest = c.corpus.partition(":")
    whole = c.corpus in ("installed-text", "installed-text+packages", "openwebtext")
    _require(
        whole or (kind in ("files", "bin", "openwebtext") and bool(rest.strip())),
        f"corpus={c.corpus!r} is unknown; use installed-text, installed-text+packages, "
        "files:GLOB, openwebtext, openwebtext:FOLDER or bin:DIR",
    )
    kind, _, size = c.tokenizer.partition(":")
    good = c.tokenizer in ("bytes", "gpt2") or (kind == "bpe" and size.isdigit())
    _require(good, f"tokenizer={c.tokenizer!r} is unknown; use bytes, bpe:8192 or gpt2")
    if kind == "bpe":
        _require(int(size) >= 257, f"tokenizer={c.tokenizer!r}; bpe needs at least 257 entries")
    device = c.device.partition(":")[0]
    known = ("auto", "cpu", "cuda", "mps")
    _require(device in known, f"device={c.device!r} is unknown; use {', '.join(known)}")


def _require(ok: bool, sentence: str) -> None:
    if not ok:
        raise ValueError(sentence)


def _divides(c: RunConfig, small: str, large: str) -> None:
    a, b = getattr(c, small), getattr(c, large)
    _require(a is None or b % a == 0, f"{small}={a} does not divide {large}={b}; change one")


_HINTS = typing.get_type_hints(RunConfig)
OPTIONS = {f.name: f for f in fields(RunConfig) if f.metadata["group"]}


class ConfigNote(UserWarning):
    """Says how a key of another program was translated."""


def clean_overrides(overrides: dict) -> dict:
    """Overrides under our own names and types. Raises ValueError naming the nearest key."""
    translated, notes = nanogpt.translate(overrides)
    for note in notes:
        warnings.warn(note, ConfigNote, stacklevel=3)
    out = {}
    for key, value in translated.items():
        if key not in OPTIONS:
            hint = nearest_hint(key, [*OPTIONS, *nanogpt.NAMES])
            raise ValueError(f"unknown key {key!r}{hint or '; see --help for all keys'}")
        out[key] = coerce(key, value, _HINTS[key], OPTIONS[key].metadata["choices"])
    return out
