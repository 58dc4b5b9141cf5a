"""Which backend runs which numerics, and PyTorch's own attention as the outside witness."""

import importlib
import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import emulated
from .formats import FP64
from .numerics import Numerics, exact, flash, parse_numerics
from .sites import repeat_heads

BACKENDS = ("auto", "emulated", "triton", "sdpa")


def resolve_backend(
    numerics: Numerics | str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    mask: Tensor | bool | None = None,
    backend: str = "auto",
    keys: int | None = None,
) -> tuple[str, str]:
    """('emulated' | 'triton' | 'sdpa', the reason in one sentence).

    'auto' takes triton on a CUDA device when it supports these numerics, else emulated; it never
    takes sdpa. keys: of a row, where known; what numerics carry from tile to tile does not matter
    where all keys are in one. Raises ValueError when the backend asked for cannot honour them,
    saying why.
    """
    has_mask = mask is not None and mask is not False
    n = parse_numerics(numerics)
    one_tile = keys is not None and keys <= n.tile
    return _resolve(n, torch.device(device), dtype, head_dim, has_mask, backend, one_tile)[:2]


@lru_cache(maxsize=256)
def _resolve(
    n: Numerics, device, dtype, head_dim, has_mask, backend, one_tile: bool
) -> tuple[str, str, Numerics]:
    """(backend, reason, the numerics to ask it for)."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; use one of {', '.join(BACKENDS)}")
    asked = dict(device=device, dtype=dtype, head_dim=head_dim, mask=True if has_mask else None)
    refusals = {"emulated": emulated.supports, "triton": _triton_supports, "sdpa": _sdpa_supports}
    if backend != "auto":
        taken, why = _taken(refusals[backend], n, one_tile and backend == "triton", **asked)
        if why:
            raise ValueError(f"backend {backend!r} cannot run numerics{_named(n)}: {why}")
        return backend, "it was asked for", taken
    if device.type != "cuda":
        reason = f"triton needs a CUDA device and this is {device.type}"
    else:
        taken, reason = _taken(_triton_supports, n, one_tile, **asked)
        if reason is None:
            where = "" if taken is n else " in one tile"
            return "triton", f"a CUDA device, and triton honours these numerics{where}", taken
    why = emulated.supports(n, **asked)
    if why:
        raise ValueError(f"no backend can run numerics{_named(n)}: {why}")
    return "emulated", reason, n


def _named(numerics: Numerics) -> str:
    return "" if numerics.name == "custom" else f" {numerics.name!r}"


def _taken(refusal, n: Numerics, one_tile: bool, **asked) -> tuple[Numerics, str | None]:
    """What to ask a backend for: n, or what it comes to in one tile; and why it refuses both.

    refusal(numerics, **asked): one sentence, or None for numerics that the backend honours.
    """
    why = refusal(n, **asked)
    if why and one_tile:
        same = n.in_one_tile()
        if refusal(same, **asked) is None:
            return same, None
    return n, why


def _triton_supports(numerics: Numerics, **asked) -> str | None:
    try:
        module = importlib.import_module(".triton_attention", __package__)
    except ImportError as error:
        return f"the Triton kernels cannot be imported ({error})"
    return module.supports(numerics, **asked)


def _sdpa_supports(numerics: Numerics, *, dtype, **_) -> str | None:
    """PyTorch's attention has an arithmetic of its own; it stands in for exact and flash only."""
    if numerics == exact() or (numerics == exact(FP64) and dtype == torch.float64):
        return None
    if numerics == flash(numerics.tile) and dtype in (torch.bfloat16, torch.float32):
        return None
    return "PyTorch's own attention takes no rounding sites; it stands for exact() or flash() only"


def sdpa(q, k, v, text, causal, scale, mask, probe) -> Tensor:
    """F.scaled_dot_product_attention as the outside witness; flash casts its inputs to bf16."""
    if probe is not None:
        raise ValueError("backend 'sdpa' fills no probe; use backend='emulated'")
    if "\n" in text:
        raise ValueError("backend 'sdpa' has one arithmetic for all heads; use backend='emulated'")
    n = parse_numerics(text)
    resolve_backend(n, q.device, dtype=v.dtype, head_dim=q.shape[-1], backend="sdpa")
    dtype = v.dtype
    if n.inputs.format.torch_dtype == torch.bfloat16:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    if mask is not None and causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    group = q.shape[1] // max(k.shape[1], 1)
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q,
            repeat_heads(k, group),
            repeat_heads(v, group),
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
        )
    return out.to(dtype)


def backend_module(numerics: Numerics, q: Tensor, k: Tensor, mask: Tensor | None, backend: str):
    """The module whose forward and backward run these numerics on such tensors, and the numerics
    to ask it for, which come to the same."""
    one_tile = k.shape[2] <= numerics.tile
    name, _, numerics = _resolve(
        numerics, q.device, q.dtype, q.shape[-1], mask is not None, backend, one_tile
    )
    if name == "emulated":
        return emulated, numerics
    return importlib.import_module(f".{name}_attention", __package__), numerics
