"""The Triton backend: which numerics it honours, and its forward and backward on the host side.

Covered: the flash and paper families (row or running reference), the softmax policies safe,
shifted, stabilized and guarded, formats with 8 exponent bits and any fraction (bf16, fp32 and the
dials between), nearest-even and stochastic rounding, both deltas, and all delta errors. The rest
is refused by name and is the emulator's (`kernels.emulated`).

Importing this module needs neither Triton nor a GPU: kernels are imported at the first call.
Stochastic sites draw Philox bits from (seed, site, element): the same law as the emulator's, other
bits. With grouped queries dK and dV are summed over the group in fp32 and rounded once.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from . import hopper_attention
from .formats import FP64
from .interventions import (
    DIRECTIONS,
    GRADIENTS,
    Draws,
    delta_of_each,
    disturbed_delta,
    stray_gradient,
)
from .layout import empty_rows
from .numerics import SITE_NAMES, Numerics, Site, parse_numerics
from .result import ForwardResult, wants_output
from .triton_blocks import HOPPER_SHARED, Blocks, choose_blocks, pad

_HALF_DTYPES = (torch.float16, torch.bfloat16)


# -- what is supported ----------------------------------------------------------------------------


def supports(
    numerics: Numerics, *, device=None, dtype=torch.bfloat16, head_dim=64, mask=None
) -> str | None:
    """None if these kernels honour `numerics` for such inputs, else one sentence why not."""
    return (
        _refused_numerics(numerics)
        or _refused_inputs(dtype, mask)
        or _refused_machine(device)
        or _refused_shape(numerics, device, dtype, head_dim)
    )


@lru_cache(maxsize=256)
def _refused_numerics(n: Numerics) -> str | None:
    if n.compute == FP64:
        return "compute=fp64 needs backend='emulated': the Triton kernels carry fp32"
    for name in SITE_NAMES:
        site = getattr(n, name)
        if site is None:
            continue
        if site.format.exponent_bits != 8 or site.format.finite_only:
            return f"{name}={site}: the Triton kernels round formats with 8 exponent bits only"
        if site.rounding not in ("nearest_even", "stochastic"):
            return (
                f"{name}={site}: the Triton kernels round to nearest even or stochastically only"
            )
    for name in ("reference_format", "lse"):
        if getattr(n, name).format.fraction_bits < 23:
            return f"{name}={getattr(n, name)}: the Triton kernels keep {name} in fp32"
    if _bits(n.row_sum) < 23 and (n.reference != "row" or _stochastic(n.row_sum)):
        return (
            f"row_sum={n.row_sum}: the Triton kernels round l once, to nearest even, under "
            "reference='row'"
        )
    if n.row_sum_floor:
        return f"row_sum_floor={n.row_sum_floor}: the Triton kernels have no floor under l"
    if n.accumulate != "once":
        return f"accumulate={n.accumulate!r}: the Triton kernels round O_bar once, at the end"
    policy = n.softmax
    if policy.kind == "clamped":
        return "softmax=clamped: the Triton kernels do not clamp P_bar"
    moving = policy.kind in ("stabilized", "guarded")
    if n.reference == "running" and moving and policy.decide == "row":
        return f"softmax={policy.kind} decided per row needs reference='row' (or decide='tile')"
    if n.delta_error is not None and n.delta != "dO_O":
        return "delta_error changes the delta of dO*O; use delta='dO_O'"
    return None


def _refused_inputs(dtype: torch.dtype, mask) -> str | None:
    if mask is not None:
        return "the Triton kernels take no mask besides causal=True; use backend='emulated'"
    if dtype not in (torch.float32, *_HALF_DTYPES):
        return f"the Triton kernels take float32, float16 and bfloat16 inputs, not {dtype}"
    return None


def _refused_machine(device) -> str | None:
    try:
        from . import triton_common

        misuse = triton_common.interpreter_misuse()
    except ImportError:
        return "Triton is not installed (it exists for Linux only); use backend='emulated'"
    except AttributeError as error:  # names move between versions
        return f"this version of Triton does not fit ({error}); use backend='emulated'"
    device = torch.device("cpu" if device is None else device)
    if misuse:
        return misuse
    if triton_common.interpreting():
        return None
    if device.type != "cuda":
        return (
            f"the Triton kernels need a CUDA device, not {device.type} (or Triton's interpreter)"
        )
    if not torch.cuda.is_available():
        return "there is no CUDA driver or device here; use backend='emulated'"
    return _refused_capability(torch.cuda.get_device_capability(device))


def _refused_capability(capability: tuple[int, int]) -> str | None:
    """bf16 and its conversions in the matrix units start with compute capability 8.0."""
    if capability >= (8, 0):
        return None
    found = ".".join(map(str, capability))
    return f"the Triton kernels need compute capability 8.0 (bf16), this GPU has {found}"


def _refused_shape(n: Numerics, device, dtype: torch.dtype, head_dim: int) -> str | None:
    limit = _shared_limit(torch.device("cpu" if device is None else device))
    try:
        for kernel in ("forward", "grad_keys", "grad_queries"):
            _blocks(kernel, n, head_dim, head_dim, _itemsize(n, (dtype,)), limit)
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=8)
def _capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) for a device without one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@lru_cache(maxsize=8)
def _shared_limit(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


# -- numerics as compile-time constants -----------------------------------------------------------


def _bits(site: Site) -> int:
    return min(site.format.fraction_bits, 23)


def _stochastic(site: Site) -> bool:
    return site.rounding == "stochastic" and _bits(site) < 23


def _storage(site: Site) -> torch.dtype:
    """The narrowest dtype here that holds the site's grid."""
    return torch.bfloat16 if _bits(site) <= 7 else torch.float32


def _operand(site: Site):
    """The dtype in which a rounded intermediate enters a dot, in Triton's terms."""
    import triton.language as tl

    return tl.bfloat16 if _bits(site) <= 7 else tl.float32


def _site(prefix: str, site: Site) -> dict:
    return {f"{prefix}_BITS": _bits(site), f"{prefix}_STOCHASTIC": _stochastic(site)}


def _tiled(n: Numerics) -> bool:
    return n.softmax.decide == "tile" and n.softmax.kind in ("stabilized", "guarded")


def _itemsize(n: Numerics, dtypes) -> int:
    """Bytes of the widest dot operand: 4 as soon as one dot must run in true fp32."""
    if _bits(n.inputs) <= 7:
        inputs = 2
    else:
        inputs = 2 if len(set(dtypes)) == 1 and dtypes[0] in _HALF_DTYPES else 4
    narrow = all(
        _bits(getattr(n, s)) <= 7
        for s in ("probabilities", "backward_probabilities", "grad_scores")
    )
    return inputs if narrow and (inputs == 4 or dtypes[0] != torch.float16) else 4


def _blocks(
    kernel: str, n: Numerics, D: int, DV: int, itemsize: int, limit: int, probe: bool = False
) -> Blocks:
    shape = dict(head_dim=D, head_dim_v=DV, itemsize=itemsize)
    if kernel == "forward" and (n.reference == "running" or _tiled(n)):
        more = probe or n.softmax.kind != "safe" or _bits(n.scores) < 23
        return choose_blocks(kernel, shared_limit=limit, tile=n.tile, more=more, **shape)
    if _draws_per_score(kernel, n):  # random bits fill the registers
        limit = min(limit, 65_536)
    return choose_blocks(kernel, shared_limit=limit, **shape)


def _draws_per_score(kernel: str, n: Numerics) -> bool:
    sites = {
        "forward": ("scores", "probabilities"),
        "grad_keys": ("scores", "backward_probabilities", "grad_probabilities", "grad_scores"),
        "grad_queries": ("scores", "grad_probabilities", "grad_scores"),
    }[kernel]
    return any(_stochastic(getattr(n, site)) for site in sites)


def _power_of_two(scale: float) -> bool:
    return scale > 0 and math.frexp(scale)[0] == 0.5


def forward_constants(n: Numerics, scale: float, probe: bool | str) -> dict:
    """The constexpr arguments of `forward_kernel` that come from the numerics."""
    from .triton_forward import POLICIES

    policy = n.softmax
    raw = _power_of_two(scale) or (_bits(n.scores) == 23 and policy.kind == "safe" and scale > 0)
    hp_site = n.delta_output if n.delta_output is not None and n.delta_error is None else Site()
    return dict(
        RUNNING=n.reference == "running",
        TILED=_tiled(n),
        POLICY=POLICIES[policy.kind],
        RAW=raw,
        MONOTONE=scale > 0 and not _stochastic(n.scores),
        SUM_ROUNDED=n.row_sum_source == "rounded",
        P_DTYPE=_operand(n.probabilities),
        HP=n.own_delta_output,
        PROBE=bool(probe),
        WIDE=wants_output(probe),
        UNIT_EXACT=not raw or _power_of_two(scale),
        DRAWS=n.stochastic,
        **_site("S", n.scores),
        **_site("P", n.probabilities),
        L_BITS=_bits(n.row_sum),
        **_site("BAR", n.unnormalized),
        **_site("O", n.output),
        **_site("HP", hp_site),
    )


def score_constants(n: Numerics, scale: float) -> dict:
    """How the backward recomputes S; `RAW` needs a power of two, so that lse / alpha is exact."""
    return dict(RAW=_power_of_two(scale), DRAWS=n.stochastic, **_site("S", n.scores))


def grad_keys_constants(n: Numerics, scale: float) -> dict:
    """The constexpr arguments of `grad_keys_kernel` that come from the numerics."""
    return dict(
        P_DTYPE=_operand(n.backward_probabilities),
        DS_DTYPE=_operand(n.grad_scores),
        **score_constants(n, scale),
        **_site("P", n.backward_probabilities),
        **_site("DP", n.grad_probabilities),
        **_site("DS", n.grad_scores),
        **_site("G", n.gradients),
    )


def grad_queries_constants(n: Numerics, scale: float) -> dict:
    """The constexpr arguments of `grad_queries_kernel` that come from the numerics."""
    return dict(
        DS_DTYPE=_operand(n.grad_scores),
        **score_constants(n, scale),
        **_site("DP", n.grad_probabilities),
        **_site("DS", n.grad_scores),
        **_site("G", n.gradients),
    )


@lru_cache(maxsize=512)
def _plan(kernel: str, key: str, D: int, DV: int, itemsize: int, limit: int, scale, extra):
    """(blocks, keyword arguments of a launch) of one kernel; kept, since each step asks again.

    key: `Numerics.key`. extra: for "forward" its `probe`; else None. Read only.
    """
    n = parse_numerics(key)
    table = "grad_queries" if kernel == "delta_product" else kernel
    blocks = _blocks(table, n, D, DV, itemsize, limit, bool(extra))
    return blocks, launch_arguments(kernel, n, blocks, D, DV, scale, extra or False)


def launch_arguments(
    kernel: str, n: Numerics, blocks: Blocks, D: int, DV: int, scale: float, probe: bool | str
) -> dict:
    """Constexpr arguments and options of a launch, all but CAUSAL (EVEN and GROUPED)."""
    if kernel == "forward":
        constants = forward_constants(n, scale, probe)
    elif kernel == "grad_keys":
        constants = grad_keys_constants(n, scale)
    elif kernel == "grad_queries":
        constants = grad_queries_constants(n, scale)
    else:
        constants = score_constants(n, scale) | _site("DP", n.grad_probabilities)
    padded = dict(D=D, DV=DV, BLOCK_D=pad(D), BLOCK_DV=pad(DV))
    sizes = dict(BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n)
    return padded | sizes | constants | _options(blocks)


# -- launches -------------------------------------------------------------------------------------


def _options(blocks: Blocks) -> dict:
    """Launch options. Contraction to fused multiply-adds is off: it would move roundings."""
    options = dict(
        num_warps=blocks.num_warps, num_stages=blocks.num_stages, enable_fp_fusion=False
    )
    if blocks.max_registers:
        options["maxnreg"] = blocks.max_registers
    return options


@lru_cache(maxsize=1)
def _announce() -> None:
    """One line before the first launch of a process: compiling in silence looks like a hang."""
    told = "Triton attention: kernels compile at their first call, seconds each, then stay on disk"
    print(told, file=sys.stderr, flush=True)


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _programs(rows: int, block: int, heads: int) -> tuple[int]:
    count = -(-rows // block) * heads
    if count >= 2**31:
        raise ValueError(f"{count:,} blocks of attention exceed one launch; split the batch")
    return (count,)


def _seed_tensor(seed, n: Numerics, like: Tensor) -> Tensor:
    """The seed in device memory; any tensor will do where nothing draws."""
    if not n.stochastic:
        return like
    if isinstance(seed, Tensor):
        return seed.to(device=like.device, dtype=torch.int64)
    return torch.full((1,), int(seed), dtype=torch.int64, device=like.device)


def _prepare(x: Tensor, site: Site, stream: str, seed: Tensor) -> Tensor:
    """A tensor [B, H, T, D] on the grid of `site`: itself if it is there already, else a copy."""
    bits = _bits(site)
    if bits == 23 or (bits == 7 and x.dtype == torch.bfloat16):
        return x
    from . import triton_common

    out = torch.empty(x.shape, dtype=_storage(site), device=x.device)
    block = 1024
    grid = (-(-x.numel() // block),)
    with _on(x.device):
        triton_common.round_tensor_kernel[grid](
            x, out, seed, x.numel(), x.shape[1], x.shape[2], *x.stride(), DIM=x.shape[3],
            BITS=bits, STOCHASTIC=_stochastic(site), STREAM=triton_common.STREAMS[stream],
            BLOCK=block,
        )  # fmt: skip
    return out


def _inputs(n: Numerics, seed: Tensor, **tensors: Tensor) -> list[Tensor]:
    return [_prepare(x, n.inputs, f"input_{name}", seed) for name, x in tensors.items()]


@lru_cache(maxsize=512)
def _never_by_hopper(key: str, capability: tuple[int, int]) -> str | None:
    """Why `hopper_attention.refusal` lets no tensors of these numerics pass; None if it lets some.

    key: `Numerics.key`. Asked of calls that leave nothing else to refuse: many keys in good order.
    """
    T, why = 2**20, None
    for D in (64, 128):
        why = hopper_attention.refusal(
            parse_numerics(key),
            dtype=torch.bfloat16,
            shapes=[(1, 1, T, D)] * 3,
            strides=[(T * D, T * D, D, 1)] * 3,
            addresses=[0] * 3,
            capability=capability,
            causal=False,
            scale=1.0,
            probe=False,
        )
        if why is None:
            break
    return why


def _refused_by_hopper(
    n: Numerics, tensors, causal: bool, scale: float, probe: bool
) -> str | None:
    """`hopper_attention.refusal` of a call on prepared q, k, v; they are read only if need be."""
    capability = _capability(tensors[0].device)
    if why := _never_by_hopper(n.key, capability):
        return why
    dtypes = {x.dtype for x in tensors}
    return hopper_attention.refusal(
        n,
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        shapes=[x.shape for x in tensors],
        strides=[x.stride() for x in tensors],
        addresses=[x.data_ptr() for x in tensors],
        capability=capability,
        causal=causal,
        scale=scale,
        probe=probe,
    )


def forward_kernel_name(
    q: Tensor, k: Tensor, v: Tensor, *, numerics: Numerics, causal: bool, scale: float, probe: bool
) -> str:
    """Which forward serves a call on tensors on their grid: "hopper" (Gluon) or "general"."""
    refused = _refused_by_hopper(numerics, (q, k, v), causal, scale, probe)
    return "hopper" if refused is None else "general"


def backward_kernel_name(
    dO: Tensor, q: Tensor, k: Tensor, v: Tensor, *, numerics: Numerics, causal: bool
) -> str:
    """Which backward serves a call on tensors on their grid: "hopper" (Gluon) or "general"."""
    capability = _capability(q.device)
    if hopper_attention.never_backward(numerics, capability):
        return "general"  # before any tensor is asked where it lies
    tensors = (q, k, v, dO)
    refused = hopper_attention.backward_refusal(
        numerics,
        dtypes=[x.dtype for x in tensors],
        shapes=[x.shape for x in tensors],
        strides=[x.stride() for x in tensors],
        addresses=[x.data_ptr() for x in tensors],
        capability=capability,
        causal=causal,
    )
    return "hopper" if refused is None else "general"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: Numerics,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    seed: int | Tensor = 0,
    probe: bool | str = False,
    blocks: Blocks | None = None,
) -> ForwardResult:
    """q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv], any strides, all lengths at least 1.

    `out` is bf16 where the grid of `output` fits it, else fp32; lse fp32. `delta_output` is filled
    only when the backward needs it. Each O lies in memory in the order of q (`kernels.layout`).
    `blocks` overrides the table and the choice of `kernels.hopper_forward` (for measurements).
    """
    from .triton_forward import forward_kernel

    if mask is not None:
        raise ValueError(_refused_inputs(q.dtype, mask))
    n, device = numerics, q.device
    if device.type == "cuda":
        _announce()
    B, H, Tq, D = q.shape
    DV = v.shape[3]
    result = empty_result(n, q, DV, probe)
    out, lse, hp = result.out, result.lse, result.delta_output
    seed = _seed_tensor(seed, n, lse)
    q, k, v = _inputs(n, seed, q=q, k=k, v=v)
    if blocks is None and _refused_by_hopper(n, (q, k, v), causal, scale, probe) is None:
        choices = dict(numerics=n, causal=causal, scale=scale, probe=probe)
        return hopper_attention.forward(q, k, v, result=result, **choices)
    if blocks is None:
        itemsize = _itemsize(n, (q.dtype, k.dtype, v.dtype))
        limit = _shared_limit(device)
        blocks, arguments = _plan("forward", n.key, D, DV, itemsize, limit, scale, probe)
    else:
        arguments = launch_arguments("forward", n, blocks, D, DV, scale, probe)
    unused = lse  # stands for outputs that this call does not write
    extras = (hp, result.ties, result.ones, result.m, result.l, result.out_fp32)
    policy, unit = n.softmax, scale if arguments["RAW"] else 1.0
    offsets = (policy.eps, policy.shift, policy.min_offset, policy.max_offset)
    with _on(device):
        forward_kernel[_programs(Tq, blocks.block_m, B * H)](
            q, k, v, out, lse, *(unused if x is None else x for x in extras), seed,
            *q.stride(), *k.stride(), *v.stride(), *out.stride()[:3], scale, policy.beta,
            *(x / unit for x in offsets), H, H // k.shape[1], Tq, k.shape[2],
            CAUSAL=causal, **arguments,
        )  # fmt: skip
    return result


def empty_result(n: Numerics, q: Tensor, width: int, probe: bool | str) -> ForwardResult:
    """What a forward fills, nothing written yet. width: Dv; each O in the order of q."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    result = ForwardResult(out=empty_rows(q, width, _storage(n.output)), lse=lse)
    if n.own_delta_output:
        fp32 = n.delta_output is None or n.delta_error is not None
        dtype = torch.float32 if fp32 else _storage(n.delta_output)
        result.delta_output = empty_rows(q, width, dtype)
    if probe:
        result.ties, result.ones = (torch.empty_like(lse, dtype=torch.int32) for _ in range(2))
        result.m, result.l = torch.empty_like(lse), torch.empty_like(lse)
    if wants_output(probe):
        result.out_fp32 = empty_rows(q, width, torch.float32)
    return result


def empty_gradients(n: Numerics, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Room for dQ in the order of q, and for dK and dV in that of k."""
    dtype = _storage(n.gradients)
    places = ((q, q.shape[3]), (k, k.shape[3]), (k, v.shape[3]))
    return tuple(empty_rows(like, width, dtype) for like, width in places)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta_output: Tensor | None,
    *,
    numerics: Numerics,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
    seed: int | Tensor = 0,
    blocks: dict[str, Blocks] | None = None,
    into: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """dQ [B, H, Tq, D], dK [B, Hkv, Tk, D], dV [B, Hkv, Tk, Dv], bf16 where `gradients` fits it.

    `out`, `lse` and `delta_output` are the forward's. dQ lies in memory in the order of q, dK and
    dV in that of k; `into`: where to write the three instead if of that dtype; rows contiguous, dK
    and dV of the same strides where they have the same shape. `blocks` ({"grad_keys": ...,
    "grad_queries": ...}) overrides the tables and, even if empty, the choice of
    `kernels.hopper_backward`. Repeated calls give the same bits.
    """
    from . import triton_backward as kernels

    if mask is not None:
        raise ValueError(_refused_inputs(q.dtype, mask))
    n, device = numerics, q.device
    B, H, Tq, D = q.shape
    Hkv, Tk, DV = *k.shape[1:3], v.shape[3]
    if into is None or into[0].dtype != _storage(n.gradients):
        into = empty_gradients(n, q, k, v)
    if n.delta_error is not None and n.delta_error.kind in DIRECTIONS:
        choices = dict(numerics=n, causal=causal, scale=scale, seed=seed)
        found = _with_stray_gradient(dout, q, k, v, out, lse, delta_output, **choices)
        return tuple(x.copy_(y) for x, y in zip(into, found))
    dq, dk, dv = into
    seed = _seed_tensor(seed, n, lse)
    q, k, v, dO = _inputs(n, seed, q=q, k=k, v=v, dout=dout)
    choices = dict(numerics=n, causal=causal)
    if blocks is None and backward_kernel_name(dO, q, k, v, **choices) == "hopper":
        with _on(device):
            deltas = _deltas(n, dO, out, delta_output, seed)
        return hopper_attention.backward(
            dO, q, k, v, lse, *deltas, scale=scale, into=into, **choices
        )
    itemsize = _itemsize(n, (q.dtype, k.dtype, v.dtype, dO.dtype))
    limit = _shared_limit(device)

    def plan(kernel):
        if kernel in (blocks or {}):
            arguments = launch_arguments(kernel, n, blocks[kernel], D, DV, scale, False)
            return blocks[kernel], arguments
        return _plan(kernel, n.key, D, DV, itemsize, limit, scale, None)

    per_key, for_keys = plan("grad_keys")
    per_row, for_queries = plan("grad_queries")
    inverse_unit = 1.0 / scale if for_keys["RAW"] else 1.0
    strides = (*q.stride(), *k.stride(), *v.stride(), *dO.stride())
    scalars = (scale, inverse_unit, H, H // Hkv, Tq, Tk)
    with _on(device):
        if n.delta == "dP_P":
            delta = delta_k = torch.empty_like(lse)
            own, arguments = plan("delta_product")
            kernels.delta_product_kernel[_programs(Tq, own.block_m, B * H)](
                q, k, v, dO, lse, delta, seed, *strides, *scalars, CAUSAL=causal, **arguments
            )
        else:
            delta, delta_k = _deltas(n, dO, out, delta_output, seed)
        kernels.grad_keys_kernel[_programs(Tk, per_key.block_n, B * Hkv)](
            q, k, v, dO, lse, delta_k, dk, dv, seed, *strides, *dk.stride()[:3],
            *dv.stride()[:3], *scalars,
            CAUSAL=causal, EVEN=Tq % per_key.block_m == 0, GROUPED=H != Hkv, **for_keys,
        )  # fmt: skip
        kernels.grad_queries_kernel[_programs(Tq, per_row.block_m, B * H)](
            q, k, v, dO, lse, delta, dq, seed, *strides, *dq.stride()[:3], *scalars,
            CAUSAL=causal, **for_queries,
        )  # fmt: skip
    return dq, dk, dv


def _with_stray_gradient(
    dout, q, k, v, out, lse, delta_output, *, numerics: Numerics, causal: bool, scale: float, seed
) -> list[Tensor]:
    """dQ, dK, dV where an error of delta moves dQ itself: from delta_hp, moved in fp32, rounded.

    P K, along which it moves, is the O of a forward whose values are the keys.
    """
    n, fp32 = numerics, Site()
    choices = dict(causal=causal, scale=scale, seed=seed)
    high = replace(n, delta_error=None, delta_output=fp32, gradients=fp32)
    dq, dk, dv = backward(dout, q, k, v, out, lse, delta_output, numerics=high, **choices)
    own = _seed_tensor(seed, n, lse)
    q, k, dO = _inputs(n, own, q=q, k=k, dout=dout)
    weights = replace(Numerics(), scores=n.scores)
    PK = forward(q, k, k, numerics=weights, **choices).out
    with _on(q.device):
        lp, hp = (_row_dot(dO, x) for x in _low_and_high(n, out, delta_output, own))
    e = (lp.double() - hp.double()).float().unsqueeze(-1)
    fixed = _draws(torch.zeros(1, dtype=torch.int64, device=q.device))
    dq -= stray_gradient(n.delta_error, e, PK, scale, _draws(own), fixed)
    found = dict(grad_q=dq, grad_k=dk, grad_v=dv)
    return [_prepare(x, n.gradients, name, own) for name, x in found.items()]


def _low_and_high(n: Numerics, out: Tensor, high: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """The O of delta_lp and that of delta_hp."""
    if n.delta_output is None:
        return out, high
    return _prepare(high, n.delta_output, "delta_output", seed), high


def _row_dot(dO: Tensor, O: Tensor) -> Tensor:
    """rowsum(dO * O) in fp32, [B, H, Tq]."""
    from .triton_backward import delta_kernel

    B, H, Tq, DV = O.shape
    delta = torch.empty(B, H, Tq, dtype=torch.float32, device=O.device)
    block = 64
    delta_kernel[_programs(Tq, block, B * H)](
        O, dO, delta, *O.stride(), *dO.stride(), H, Tq, DV=DV, BLOCK_DV=pad(DV), BLOCK_M=block
    )
    return delta


def _deltas(n: Numerics, dO: Tensor, out: Tensor, high: Tensor | None, seed: Tensor):
    """The deltas of dO*O that dQ and dK see, fp32 [B, H, Tq], as `delta_error` asks."""
    if n.delta_error is None:
        delta = _row_dot(dO, out if high is None else high)
        return delta, delta
    lp, hp = (_row_dot(dO, x) for x in _low_and_high(n, out, high, seed))
    if n.delta_error.kind in GRADIENTS:
        return delta_of_each(n.delta_error.kind, lp, hp)
    e = lp.double() - hp.double()
    delta = disturbed_delta(n.delta_error, hp.double(), e, _draws(seed)).float()
    return delta, delta


def _draws(seed: Tensor) -> Draws:
    """Numbers of the kernels' own stream for `delta_error`, by a seed in device memory.

    Uniform ones in steps of 2^-24, fp32; normal ones of two such each (Box and Muller 1958), fp64.
    """
    from . import triton_common

    def words(shape) -> Tensor:
        out = torch.empty(shape, dtype=torch.int32, device=seed.device)
        block = 1024
        with _on(seed.device):
            triton_common.random_words_kernel[(-(-out.numel() // block),)](
                out, seed, out.numel(), STREAM=triton_common.STREAMS["delta_error"], BLOCK=block
            )
        return (out >> 8) & (2**24 - 1)

    def normal(shape) -> Tensor:
        first, second = (words((2, *shape)).double() + 0.5) * 2.0**-24
        return (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()

    return Draws(lambda shape: words(shape) * 2.0**-24, normal)
