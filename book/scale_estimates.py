"""What a preset needs before anything is measured: memory, arithmetic, passes, days."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from IPython.display import Markdown

from gpt2.config import RunConfig
from gpt2.hardware import flops_per_token, mfu_text, peak_flops
from gpt2.model import GPT

from .tables import markdown_table

GIB = 2**30
GPT2_ROWS = 50_304  # of the embedding: GPT-2's vocabulary padded to a multiple of 64
ADAMW_BYTES = 16  # per parameter: fp32 weight, gradient and two moments


def count_parameters(config: RunConfig, vocabulary: int = GPT2_ROWS) -> int:
    """Parameters of the model that a config describes; no memory is taken for them."""
    with torch.device("meta"):
        return GPT(config, config.vocab_size or vocabulary).count_parameters(positions=True)


def arithmetic(config: RunConfig, vocabulary: int = GPT2_ROWS) -> float:
    """FLOPs that training takes per token."""
    c = config
    n = count_parameters(c, vocabulary) - c.block_size * c.n_embd
    return flops_per_token(n, c.n_layer, c.n_head, c.head_dim, c.block_size)


def size_table(presets: Mapping[str, RunConfig], vocabularies: Mapping[str, int]) -> Markdown:
    """What presets need whatever the machine: parameters, memory of the state, tokens, FLOPs."""
    lines = []
    for name, config in presets.items():
        n = count_parameters(config, vocabularies.get(name, GPT2_ROWS))
        flops = arithmetic(config, vocabularies.get(name, GPT2_ROWS))
        tokens = config.max_steps * config.tokens_per_step
        lines.append(
            [
                f"`{name}`",
                f"{n / 1e6:.1f} M",
                f"{ADAMW_BYTES * n / GIB:.2f} GiB",
                f"{config.tokens_per_step:,}",
                f"{tokens:.3g}",
                f"{flops * tokens:.2g}",
            ]
        )
    head = ["preset", "parameters", "weights, gradient, AdamW", "tokens a step", "tokens", "FLOPs"]
    return markdown_table(head, lines)


def passes_table(config: RunConfig, processes: Sequence[int]) -> Markdown:
    """How the global batch divides over numbers of processes."""
    lines = []
    for n in processes:
        try:
            micro, passes = config.accumulation(n)
            lines.append([n, f"{config.batch_size // n}", micro, passes])
        except ValueError as error:
            lines.append([n, "refused", str(error).partition(";")[0], ""])
    return markdown_table(
        ["GPUs", "sequences of each per step", "sequences of a pass", "passes a step"], lines
    )


def days(config: RunConfig, tokens_per_s: float) -> float:
    return config.max_steps * config.tokens_per_step / tokens_per_s / 86_400


def measured_speed(config: RunConfig, rows: Sequence[Mapping]) -> Mapping | None:
    """The archived row of one process for a model of this size with this attention, if any."""
    n = count_parameters(config)
    wanted = [
        r
        for r in rows
        if r["parameters"] == n
        and r["implementation"] == config.attention
        and r["processes"] == 1
        and r["n_gpu"] == 1
    ]
    return wanted[-1] if wanted else None


def time_table(
    config: RunConfig, gpus: Sequence[int], rows: Sequence[Mapping], device: str, assumed: float
) -> Markdown:
    """Days for a whole run at perfect scaling, from a measured speed or an assumed utilisation."""
    row = measured_speed(config, rows)
    if row:
        speed = row["tokens_per_s"]
        source = (
            f"measured on one GPU, {row['machine']}, {row['date']} (MFU {mfu_text(row['mfu'])})"
        )
    else:
        peak = peak_flops(device)
        if peak is None:
            raise ValueError(f"no peak arithmetic is known for {device!r}; name another device")
        speed = assumed * peak / arithmetic(config)
        source = (
            f"assumed: {mfu_text(assumed)} of the peak of {device}; no measurement is archived"
        )
    lines = [[n, f"{n * speed:,.0f}", f"{days(config, n * speed):.1f}"] for n in gpus]
    table = markdown_table(["GPUs", "tokens/s, if speed grows with GPUs", "days"], lines)
    return Markdown(f"{table.data}\n\nSpeed of one GPU: {source}.")
