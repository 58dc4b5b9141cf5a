"""The one public call: `attention(q, k, v, numerics=...)`, whichever backend does the work.

Forward and backward are custom operators, opaque to `torch.compile`. They have to be: a compiler
that fuses `x.to(bfloat16).to(float32)` may drop the rounding that this project is about. For the
same reason every choice of numerics travels as a string argument of the operator (`Numerics.key`),
where a compiled graph's cache sees it.

One rule for dtypes: under autocast q, k and v are cast to autocast's dtype, otherwise q and k are
cast to v's. The output has that dtype; each gradient comes back in its own input's dtype.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from . import emulated
from .backends import backend_module, resolve_backend, sdpa
from .formats import FP64
from .layout import empty_rows, in_order_of
from .numerics import Numerics, flash, parse_numerics
from .result import ForwardResult, wants_output
from .sites import repeat_heads

__all__ = ["Probe", "attention", "resolve_backend"]

_FLASH = flash()


@dataclass
class Probe:
    """Pass one to `attention` to look inside; it changes no bit of the result.

    After the call: ties, ones (int32), m, l, lse [B, H, Tq] and out_fp32 [B, H, Tq, Dv] as in
    `kernels.result.ForwardResult`, without gradients.
    rows_only: leave out_fp32 None. It takes twice the memory of a bf16 O, and most of the time of
    a probed call on short sequences goes into writing it.
    """

    rows_only: bool = False
    ties: Tensor | None = None
    ones: Tensor | None = None
    m: Tensor | None = None
    l: Tensor | None = None
    lse: Tensor | None = None
    out_fp32: Tensor | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: Numerics | str | Sequence[Numerics | str] = _FLASH,
    causal: bool = True,
    scale: float | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
    probe: Probe | None = None,
    seed: int | Tensor = 0,
) -> Tensor:
    """softmax(scale Q K^T + mask) V, rounded where `numerics` say. Differentiable in q, k and v.

    q [B, H, Tq, D]; k [B, Hkv, Tk, D]; v [B, Hkv, Tk, Dv], any strides, H a multiple of Hkv (query
    head h reads key head h // (H / Hkv)). Returns [B, H, Tq, Dv], in memory in the order of q
    (`kernels.layout`); dQ lies likewise, dK and dV in the order of k.
    numerics: a Numerics, its text ('paper,delta_output=fp32'), or one of these per query head.
    causal: query i sees keys j <= i, aligned top left as in F.scaled_dot_product_attention.
    scale: 1/sqrt(D) unless given. mask: bool (True = visible) or additive, broadcastable to
    [B, H, Tq, Tk]; emulated and sdpa only, no gradient.
    backend: 'auto', 'emulated', 'triton' or 'sdpa' (PyTorch's own arithmetic, for comparison);
    `resolve_backend` says what 'auto' picks and why.
    seed: int or 0-dim int64 tensor, for stochastic rounding and interventions on delta.
    A row that sees no key gives 0 and passes no gradient; zero lengths give empty or zero results.
    Raises ValueError for shapes that do not fit, unknown numerics, or a backend that cannot honour
    them.
    """
    _check_shapes(q, k, v, mask)
    dtype = working_dtype(v)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    text = as_text(numerics, q.shape[1])
    if backend == "sdpa":
        return sdpa(q, k, v, text, causal, scale, mask, probe)
    if not isinstance(seed, Tensor):
        seed = torch.tensor(seed, dtype=torch.int64)
    results = torch.ops.bit_by_bit.attention_forward(
        q, k, v, mask, seed, text, causal, scale, backend, _wanted(probe)
    )
    if probe is not None:
        _fill(probe, results)
    return results[0].to(dtype)


def working_dtype(x: Tensor) -> torch.dtype:
    """Autocast's where it is on, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; attention takes [B, H, T, D]")
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}; attention takes floating-point tensors")
    told = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise ValueError(f"batch sizes differ: {told}")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v need the same heads and length: {told}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k need the same head dimension: {told}")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(f"query heads must be a multiple of key heads: {told}")
    if mask is not None:
        _check_mask(mask, (*q.shape[:3], k.shape[2]))


def _check_mask(mask: Tensor, shape: tuple) -> None:
    if mask.requires_grad:
        raise ValueError("mask wants a gradient, but attention gives it none; pass mask.detach()")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"mask is {mask.dtype}; pass bool (True = visible) or an additive float")
    fits = all(m in (1, s) for m, s in zip(reversed(mask.shape), reversed(shape)))
    if mask.dim() > 4 or not fits:
        raise ValueError(
            f"mask {tuple(mask.shape)} does not broadcast to [B, H, Tq, Tk] = {shape}"
        )


def as_text(numerics, heads: int) -> str:
    """One string that says the numerics of every head: a key, a text, or a list of either."""
    if isinstance(numerics, Numerics):
        return numerics.key
    if isinstance(numerics, str):
        return numerics
    if not isinstance(numerics, (list, tuple)):
        raise ValueError(
            f"numerics is a {type(numerics).__name__}; pass a Numerics, its text, or one per head"
        )
    if len(numerics) != heads:
        raise ValueError(f"{len(numerics)} numerics for {heads} query heads; give one or one each")
    texts = [n.key if isinstance(n, Numerics) else n for n in numerics]
    if all(text == texts[0] for text in texts):
        return texts[0] if texts else _FLASH.key
    return "\n".join(texts)


def _wanted(probe: Probe | None) -> str:
    """What an operator is told of a probe: "", "rows" or "all", as `kernels.result` says."""
    if probe is None:
        return ""
    return "rows" if probe.rows_only else "all"


def _fill(probe: Probe, results) -> None:
    probe.lse = results[1].detach()
    probe.ties, probe.ones = results[3], results[4]
    probe.m, probe.l, wide = (x.detach() for x in results[5:])
    probe.out_fp32 = None if probe.rows_only else wide


# -- the operators --------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[tuple[Numerics, tuple[int, ...] | None], ...]:
    """Groups of heads with equal numerics: ((Numerics, heads or None for all), ...)."""
    lines = text.split("\n")
    if len(lines) == 1:
        return ((parse_numerics(text), None),)
    groups: dict[Numerics, list[int]] = {}
    for head, line in enumerate(lines):
        groups.setdefault(parse_numerics(line), []).append(head)
    if len(groups) == 1:
        return ((next(iter(groups)), None),)
    if len({n.compute for n in groups}) > 1:
        raise ValueError("heads of one layer must share `compute`; some say fp32 and some fp64")
    return tuple((n, tuple(heads)) for n, heads in groups.items())


def _out_dtype(groups, dtype: torch.dtype) -> torch.dtype:
    """`dtype` when it holds every head's output grid exactly, else the carrier."""
    info = torch.finfo(dtype)
    fraction = round(-math.log2(info.eps))
    exponent = {torch.float16: 5, torch.float64: 11}.get(dtype, 8)
    formats = [n.output.format for n, _ in groups]
    if all(f.fraction_bits <= fraction and f.exponent_bits <= exponent for f in formats):
        return dtype
    return _carrier(groups)


def _carrier(groups) -> torch.dtype:
    return torch.float64 if groups[0][0].compute == FP64 else torch.float32


def _wants_delta_output(groups) -> bool:
    return any(n.own_delta_output for n, _ in groups)


@cache  # kept for good: a CUDA graph may hold the address
def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Head numbers on a device, int64; copied there once, since a copy makes the host wait."""
    return torch.tensor(heads, device=device)


def _pick(x: Tensor | None, heads: tuple[int, ...]) -> Tensor | None:
    """Some heads out of [B, H, ...]."""
    return None if x is None else x[:, _index(heads, x.device)]


def _picked(tensors: Sequence[Tensor | None], mask: Tensor | None, heads: tuple[int, ...], shape):
    """Tensors [B, H, ...] and the mask, broadcast to `shape` = [B, H, Tq, Tk], for some heads."""
    mask = None if mask is None else _pick(mask.expand(shape), heads)
    return [_pick(x, heads) for x in tensors], mask


def _group_seed(numerics: Numerics, seed: Tensor, heads: tuple[int, ...], module) -> int | Tensor:
    """Groups of heads draw independently. Kept where it is (modulo 2^64) but for the emulator,
    which names its generators by the number: reading it from a GPU makes the host wait."""
    if not numerics.stochastic:
        return 0
    seed = int(seed) if module is emulated else seed
    return seed * 1_000_003 + heads[0] + 1


_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor seed, str numerics, bool causal, "
    "float scale, str backend, str probe) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor delta_output, "
    "Tensor? mask, Tensor seed, str numerics, bool causal, float scale, str backend) -> "
    "(Tensor, Tensor, Tensor)"
)


def _layout(q: Tensor, v: Tensor, groups, probe: bool | str) -> list[tuple]:
    """(shape, dtype) of out, lse, delta_output, ties, ones, m, l, out_fp32; [0] if not wanted."""
    rows, carrier = tuple(q.shape[:3]), _carrier(groups)
    full, none = (*rows, v.shape[3]), (0,)
    per_row = rows if probe else none
    return [
        (full, _out_dtype(groups, v.dtype)),
        (rows, carrier),
        (full if _wants_delta_output(groups) else none, carrier),
        (per_row, torch.int32),
        (per_row, torch.int32),
        (per_row, carrier),
        (per_row, carrier),
        (full if wants_output(probe) else none, carrier),
    ]


def _empty(q: Tensor, shape: tuple, dtype: torch.dtype) -> Tensor:
    """Room for one of them, in the order of q if it has rows [B, H, Tq, Dv]."""
    if len(shape) == 4:
        return empty_rows(q, shape[3], dtype)
    return q.new_empty(shape, dtype=dtype)


def _nothing_to_do(q: Tensor, k: Tensor) -> bool:
    return 0 in q.shape[:3] or k.shape[2] == 0


def run_forward(q, k, v, mask, seed, numerics, causal, scale, backend, probe):
    """What the operator returns, by the backend that it names."""
    groups = _parse(numerics)
    layout = _layout(q, v, groups, probe)
    if _nothing_to_do(q, k):
        fills = (0, -math.inf, 0, 0, 0, -math.inf, 0, 0)
        return tuple(_empty(q, *x).fill_(fill) for x, fill in zip(layout, fills))
    choices = dict(causal=causal, scale=scale, probe=probe)
    if groups[0][1] is None:
        module, n = backend_module(groups[0][0], q, k, mask, backend)
        parts = _values(module.forward(q, k, v, numerics=n, mask=mask, seed=seed, **choices))
        return tuple(
            _empty(q, shape, dtype) if part is None else _placed(part.to(dtype), q)
            for part, (shape, dtype) in zip(parts, layout)
        )
    results = [_empty(q, shape, dtype) for shape, dtype in layout]
    ratio, shape = q.shape[1] // k.shape[1], (*q.shape[:3], k.shape[2])
    wide = q, repeat_heads(k, ratio), repeat_heads(v, ratio)
    for n, heads in groups:
        inputs, own_mask = _picked(wide, mask, heads, shape)
        module, n = backend_module(n, q, k, mask, backend)
        own_seed = _group_seed(n, seed, heads, module)
        part = module.forward(*inputs, numerics=n, mask=own_mask, seed=own_seed, **choices)
        for x, value in zip(results, _values(part)):
            if value is not None and x.dim() > 1:
                x[:, _index(heads, x.device)] = value.to(x.dtype)
    return tuple(results)


def _values(result: ForwardResult) -> list[Tensor | None]:
    return [getattr(result, f.name) for f in dataclasses.fields(result)]


def _placed(x: Tensor, q: Tensor) -> Tensor:
    """A result laid out as `_empty` does it."""
    return in_order_of(x, q) if x.dim() == 4 else x.contiguous()


def fake_forward(q, k, v, mask, seed, numerics, causal, scale, backend, probe):
    """Tensors like those that `run_forward` returns."""
    return tuple(_empty(q, *x) for x in _layout(q, v, _parse(numerics), probe))


_forward_op = torch.library.custom_op(
    "bit_by_bit::attention_forward", run_forward, mutates_args=(), schema=_FORWARD
)
_forward_op.register_fake(fake_forward)


@torch.library.custom_op("bit_by_bit::attention_backward", mutates_args=(), schema=_BACKWARD)
def _backward_op(
    dout, q, k, v, out, lse, delta_output, mask, seed, numerics, causal, scale, backend
):
    if _nothing_to_do(q, k):
        return tuple(x.zero_() for x in _empty_gradients(q, k, v))
    saved = dout, q, k, v, out, lse, delta_output
    grads = run_backward(saved, mask, seed, numerics, causal, scale, backend)
    return tuple(in_order_of(g.to(x.dtype), y) for g, x, y in zip(grads, (q, k, v), (q, k, k)))


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(empty_rows(y, x.shape[3], x.dtype) for x, y in zip((q, k, v), (q, k, k)))


def run_backward(saved, mask, seed, numerics, causal, scale, backend, into=None):
    """dQ, dK, dV by the backend that it names, of any dtype and strides; lengths at least 1.

    saved: dO, q, k, v and the forward's out, lse, delta_output. into: three tensors that a backend
    may write the gradients to.
    """
    groups = _parse(numerics)
    choices = dict(causal=causal, scale=scale)
    if groups[0][1] is not None:
        return _backward_by_groups(saved, groups, mask, seed, backend, choices)
    module, n = backend_module(groups[0][0], *saved[1:3], mask, backend)
    if not _wants_delta_output(groups):
        saved = (*saved[:6], None)
    if module is not emulated:
        choices |= dict(into=into)
    return module.backward(*saved, numerics=n, mask=mask, seed=seed, **choices)


def _backward_by_groups(saved, groups, mask, seed, backend, choices) -> list[Tensor]:
    """Gradients of heads with different numerics; a key head's are summed after their rounding."""
    dout, q, k, v, out, lse, delta_output = saved
    ratio, shape = q.shape[1] // k.shape[1], (*q.shape[:3], k.shape[2])
    wide = q, repeat_heads(k, ratio), repeat_heads(v, ratio)
    grads = [torch.empty_like(x, dtype=_carrier(groups)) for x in wide]
    for n, heads in groups:
        own = delta_output if _wants_delta_output(((n, heads),)) else None
        inputs, own_mask = _picked((dout, *wide, out, lse, own), mask, heads, shape)
        module, n = backend_module(n, q, k, mask, backend)
        own_seed = _group_seed(n, seed, heads, module)
        parts = module.backward(*inputs, numerics=n, mask=own_mask, seed=own_seed, **choices)
        for x, part in zip(grads, parts):
            x[:, _index(heads, x.device)] = part.to(x.dtype)
    dq, dk, dv = grads
    return [dq, *(x.unflatten(1, (-1, ratio)).sum(2) for x in (dk, dv))]


@_backward_op.register_fake
def _(dout, q, k, v, out, lse, delta_output, mask, seed, numerics, causal, scale, backend):
    return _empty_gradients(q, k, v)


def _setup_context(ctx, inputs, output):
    q, k, v, mask, seed, *ctx.choices, _ = inputs
    out, lse, delta_output = output[:3]
    ctx.save_for_backward(q, k, v, out, lse, delta_output, mask, seed)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, *_):
    nothing = (None,) * 7
    if dout is None:
        return (None, None, None, *nothing)
    q, k, v, out, lse, delta_output, mask, seed = ctx.saved_tensors
    grads = torch.ops.bit_by_bit.attention_backward(
        dout, q, k, v, out, lse, delta_output, mask, seed, *ctx.choices
    )
    return (*grads, *nothing)


_forward_op.register_autograd(_gradients, setup_context=_setup_context)
