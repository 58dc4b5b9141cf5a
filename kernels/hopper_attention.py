"""Host side of the kernels for Hopper GPUs: when they serve, their settings, and the launches.

`refusal` is a pure function that says why a call of the forward is not served, or better served
by `kernels.triton_forward`: both give the same bits. `triton_attention.forward` asks, and likewise
`backward` asks `backward_refusal`. Importing this module needs neither Triton nor a GPU.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from .hopper_plans import LEAST_KEYS, Plan, plan_of
from .interventions import DIRECTIONS
from .numerics import Numerics
from .result import ForwardResult

# Query rows of a consumer, consumers of a program, and keys of a tile, as `flash` says.
ROWS, PARTS, TILE = 64, 2, 128
WALKED = 64  # rows of a tile that a block of the backward walks over

# (Fraction bits of `scores`, of `unnormalized`) that the kernel serves, by reference and whether
# the policy moves it: those of `flash` and `paper`, with inputs in bf16, with or without an O in
# fp32 for delta: what is compared on a GPU.
SITES = {
    ("running", False): ((23, 23),),
    ("running", True): ((7, 7), (23, 23)),
    ("row", False): ((7, 7),),
    ("row", True): ((7, 7),),
}
MOVING = ("stabilized", "guarded")
BOTH = dict(probabilities=7, output=7, row_sum=23)

# A thread's counts for probes have 16 bits, and 16 scores of each tile go to one of them.
COUNTED_KEYS = (2**16 - 1) // 16 * TILE

BACKWARD_PLAN = Plan(stages=4)


def refusal(
    numerics: Numerics,
    *,
    dtype,
    shapes,
    strides,
    addresses,
    capability,
    causal: bool,
    scale: float,
    probe: bool,
) -> str | None:
    """None if the Hopper forward serves a call on prepared inputs, else one sentence why not.

    dtype: of q, k and v; shapes, strides: of each, in elements; addresses: of each, in bytes;
    capability: of the GPU.
    """
    if why := _refused_gpu(capability) or _refused_numerics(numerics) or _refused_gluon():
        return why
    if probe and shapes[1][2] > COUNTED_KEYS:
        return f"{shapes[1][2]} keys: a thread's counts for probes have 16 bits"
    if not scale > 0:
        return f"scale={scale} is not positive"
    if dtype != torch.bfloat16:
        return f"inputs are {dtype}, not torch.bfloat16"
    if why := _refused_widths(shapes):
        return why
    least = LEAST_KEYS[kind_of(numerics, probe), shapes[0][3]]
    return _refused_few(shapes, causal, least) or _refused_places(shapes, strides, addresses)


def _refused_widths(shapes) -> str | None:
    D, DV = shapes[0][3], shapes[2][3]
    if D != DV or D not in (64, 128):
        return f"head dimensions {D} and {DV} are not both 64 or both 128"
    return None


def _refused_few(shapes, causal: bool, least: int) -> str | None:
    keys = mean_keys(shapes[0][2], shapes[1][2], causal)
    if keys < least:
        return f"a query sees {keys} keys on average, and this was found faster from {least} on"
    return None


def _refused_gpu(capability) -> str | None:
    if tuple(capability) != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0"
    return None


def _refused_places(shapes, strides, addresses) -> str | None:
    if any(address % 16 for address in addresses):
        return "a tensor does not start at a multiple of 16 bytes, as the copy engine needs"
    for shape, stride in zip(shapes, strides):
        apart = [s for n, s in zip(shape[:3], stride[:3]) if n > 1]
        if stride[3] != 1 or any(s <= 0 or s % 8 for s in apart):
            return f"strides {tuple(stride)}: the copy engine needs rows at multiples of 16 bytes"
    return None


def mean_keys(Tq: int, Tk: int, causal: bool) -> int:
    """How many keys a query sees on average, rounded down; query i sees keys 0 to i if causal."""
    if not causal:
        return Tk
    short = min(Tq, Tk)
    return (short * (short + 1) // 2 + (Tq - short) * Tk) // Tq


@lru_cache(maxsize=256)
def _refused_numerics(n: Numerics) -> str | None:
    """Beyond what `triton_attention` refuses."""
    policy, moving = n.softmax, n.softmax.kind in MOVING
    if policy.kind != "safe" and not moving:
        return f"softmax={policy.kind}: only safe, stabilized and guarded are served"
    if moving and (n.reference, policy.decide) not in (("running", "tile"), ("row", "row")):
        return f"softmax={policy.kind}, decide={policy.decide} with reference={n.reference}"
    if n.reference == "running" and n.tile != TILE:
        return f"tile={n.tile}: only {TILE} is served"
    if n.stochastic:
        return "a site rounds stochastically"
    if n.row_sum_source != "unrounded":
        return f"row_sum_source={n.row_sum_source}: only unrounded is served"
    for name, bits in BOTH.items():
        if _bits(n, name) != bits:
            return f"{name}={getattr(n, name)}: not served"
    if (_bits(n, "scores"), _bits(n, "unnormalized")) not in SITES[n.reference, moving]:
        return f"scores={n.scores}, unnormalized={n.unnormalized}: not served with this reference"
    if n.delta_output is not None and n.delta_output.format.fraction_bits < 23:
        return f"delta_output={n.delta_output}: not served"
    return None


def _bits(n: Numerics, site: str) -> int:
    return min(getattr(n, site).format.fraction_bits, 23)


@lru_cache(maxsize=256)
def kind_of(n: Numerics, probe: bool | str) -> str:
    """What a forward does beyond that of `flash`, "plain": "running", "row" or "probed"."""
    if probe:
        return "probed"
    if n.reference == "row":
        return "row"
    rounded = 7 in (_bits(n, "scores"), _bits(n, "unnormalized"))
    moved = n.softmax.kind != "safe"
    return "running" if rounded or moved or n.own_delta_output else "plain"


@lru_cache(maxsize=1)
def _refused_gluon() -> str | None:
    try:
        from . import hopper_backward, hopper_forward  # noqa: F401
    except (ImportError, AttributeError) as error:  # names move between versions
        return f"this version of Triton has another Gluon ({error})"
    return None


@lru_cache(maxsize=256)
def launch_plan(length: int, heads: int, programs: int) -> tuple[tuple[int], tuple[int, ...]]:
    """(grid, `hopper_schedule.PLAN`) for all blocks of PARTS * ROWS rows, over all heads and
    batches, by `programs` at most."""
    from .hopper_schedule import schedule

    blocks = -(-length // (PARTS * ROWS))
    programs = min(programs, heads * blocks)
    return (programs,), schedule(heads, blocks, programs)


def counter(device: torch.device) -> Tensor:
    """int32 [1], zero: for the tickets of launches that follow one another on the current stream.

    Kernels leave it as they found it (`hopper_schedule`), so no call need clear it. A CUDA graph
    has its own, cleared at every replay: graphs of one capture may be replayed beside each other.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _counter_of(device: torch.device, stream: int) -> Tensor:
    """Allocated aside: a pool that the current stream may be told to use is not ours to keep."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
    return found


def describe(x: Tensor, rows: int):
    """For the copy engine: blocks [1, 1, rows, D] of x [B, H, T, D], zeros outside."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    D = x.shape[3]  # a dimension of one element may have any stride: the engine wants a valid one
    strides = [s if n > 1 else D for n, s in zip(x.shape[:3], x.stride()[:3])] + [1]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, D], layout)


@lru_cache(maxsize=256)
def launch_arguments(
    key: str, scale: float, causal: bool, probe: bool | str, head_dim: int, plan: Plan | None
) -> dict:
    """Constexpr arguments and options of a launch. key: `Numerics.key`. Read only.

    plan: if not what `plan_of` says. Contraction to fused multiply-adds is off: it would move
    roundings.
    """
    from .numerics import parse_numerics
    from .triton_attention import forward_constants

    n = parse_numerics(key)
    found = forward_constants(n, scale, probe)
    plan = plan or plan_of(kind_of(n, probe), head_dim, causal)
    same = ("RUNNING", "RAW", "HP", "POLICY", "PROBE", "WIDE", "UNIT_EXACT")
    return {name: found[name] for name in same} | dict(
        ROUND_S=found["S_BITS"] == 7,
        ROUND_BAR=found["BAR_BITS"] == 7,
        STAGES=plan.stages,
        REGISTERS=plan.registers,
        EARLY=plan.early,
        APART=plan.apart,
        CAUSAL=causal,
        num_warps=4,
        maxnreg=plan.launch_registers,
        enable_fp_fusion=False,
    )


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: Numerics,
    causal: bool,
    scale: float,
    probe: bool | str = False,
    plan: Plan | None = None,
    result: ForwardResult | None = None,
) -> ForwardResult:
    """As `triton_attention.forward`, for calls on bf16 tensors that `refusal` lets pass.

    plan: other settings than the usual (for measurements). result: of `empty_result`, to fill.
    """
    from .hopper_forward import hopper_forward_kernel
    from .triton_attention import empty_result

    B, H, Tq, D = q.shape
    device, policy = q.device, numerics.softmax
    result = empty_result(numerics, q, D, probe) if result is None else result
    out, lse = result.out, result.lse
    grid, schedule = launch_plan(Tq, B * H, _multiprocessors(device))
    blocks = [describe(x, rows) for x, rows in ((q, ROWS), (k, TILE), (v, TILE), (out, ROWS))]
    sizes = (*out.stride()[:3], scale, H, H // k.shape[1], Tq, k.shape[2], *schedule)
    arguments = launch_arguments(numerics.key, scale, causal, probe, D, plan)
    high, *probes = (
        lse if x is None else x  # stands for outputs that this call does not write
        for x in (
            result.delta_output, result.ties, result.ones, result.m, result.l, result.out_fp32
        )
    )  # fmt: skip
    unit = scale if arguments["RAW"] else 1.0
    offsets = (policy.eps / unit, policy.min_offset / unit, policy.max_offset / unit)
    with torch.cuda.device(device):
        drawn = counter(device)
        hopper_forward_kernel[grid](
            *blocks, drawn, lse, high, *sizes, policy.beta, *offsets, *probes, **arguments
        )
    return result


# -- the backward ---------------------------------------------------------------------------------

# Fraction bits of the sites that the backward serves, `scores` but for fp32 or bf16: those of
# `flash` and `paper`.
BACKWARD = dict(backward_probabilities=7, grad_probabilities=23, grad_scores=7, gradients=7)

# As LEAST_KEYS, at either head dimension: found faster at every length measured on an H200, T =
# 1,024 to 16,384, causal.
BACKWARD_LEAST_KEYS = 512


def backward_refusal(
    numerics: Numerics, *, dtypes, shapes, strides, addresses, capability, causal: bool
) -> str | None:
    """None if the Hopper backward serves a call on prepared inputs, else one sentence why not.

    dtypes, shapes, strides (in elements), addresses (in bytes): of q, k, v and dO; capability: of
    the GPU. With other blocks of the general kernel, sums may have another order.
    """
    if why := never_backward(numerics, capability):
        return why
    for dtype in dtypes:
        if dtype != torch.bfloat16:
            return f"an input is {dtype}, not torch.bfloat16"
    if why := _refused_widths(shapes):
        return why
    if shapes[0][1] != shapes[1][1]:
        return f"{shapes[0][1]} heads of queries and {shapes[1][1]} of keys: grouped queries"
    if why := _refused_few(shapes, causal, BACKWARD_LEAST_KEYS):
        return why
    return _refused_places(shapes, strides, addresses)


def never_backward(numerics: Numerics, capability) -> str | None:
    """Why `backward_refusal` lets no tensors of these numerics pass; None if it may let some."""
    return _refused_gpu(capability) or _refused_backward_numerics(numerics) or _refused_gluon()


@lru_cache(maxsize=256)
def _refused_backward_numerics(n: Numerics) -> str | None:
    """Beyond what `triton_attention` refuses."""
    if n.stochastic:
        return "a site rounds stochastically"
    if n.delta != "dO_O":
        return f"delta={n.delta}: only dO_O is served"
    if n.delta_error is not None and n.delta_error.kind in DIRECTIONS:
        return f"delta_error={n.delta_error.kind}: dQ is moved before it is rounded"
    if _bits(n, "scores") not in (7, 23):
        return f"scores={n.scores}: not served"
    for name, bits in BACKWARD.items():
        if _bits(n, name) != bits:
            return f"{name}={getattr(n, name)}: not served"
    return None


@lru_cache(maxsize=256)
def backward_arguments(key: str, scale: float, causal: bool, plan: Plan) -> dict:
    """Constexpr arguments and options of both kernels of a backward, as `launch_arguments`."""
    from .numerics import parse_numerics
    from .triton_attention import score_constants

    found = score_constants(parse_numerics(key), scale)
    return dict(
        STAGES=plan.stages,
        REGISTERS=plan.registers,
        CAUSAL=causal,
        RAW=found["RAW"],
        ROUND_S=found["S_BITS"] == 7,
        num_warps=4,
        maxnreg=plan.launch_registers,
        enable_fp_fusion=False,
    )


def _row_values(lse: Tensor, delta: Tensor, inverse_unit: float):
    """Descriptors of lse * inverse_unit and of delta, both in whole tiles; [B, H, Tq] fp32."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .hopper_backward import row_values_kernel

    B, H, Tq = lse.shape
    tiles, block = -(-Tq // WALKED), 1024
    both = torch.empty(2, B * H, tiles, WALKED, dtype=torch.float32, device=lse.device)
    row_values_kernel[(-(-tiles * WALKED // block) * B * H,)](
        lse, delta, *both, inverse_unit, Tq, tiles, TILE=WALKED, BLOCK=block
    )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, WALKED], layout) for x in both
    ]


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    delta_k: Tensor,
    *,
    numerics: Numerics,
    causal: bool,
    scale: float,
    plan: Plan | None = None,
    into: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """dQ, dK, dV as `triton_attention.backward`, for calls that `backward_refusal` lets pass.

    delta, delta_k: contiguous fp32 [B, H, Tq], what dQ and what dK reads.
    """
    from .hopper_backward import hopper_grad_keys_kernel, hopper_grad_queries_kernel
    from .triton_attention import empty_gradients

    B, H, Tq = q.shape[:3]
    Tk, device = k.shape[2], q.device
    arguments = backward_arguments(numerics.key, scale, causal, plan or BACKWARD_PLAN)
    inverse_unit = 1.0 / scale if arguments["RAW"] else 1.0
    dq, dk, dv = into = empty_gradients(numerics, q, k, v) if into is None else into
    blocks = [describe(x, ROWS) for x in (q, k, v, dout)]
    with torch.cuda.device(device):
        programs = _multiprocessors(device)
        (of_keys, schedule_k), (of_queries, schedule_q) = (
            launch_plan(length, B * H, programs) for length in (Tk, Tq)
        )
        drawn = counter(device)
        values = _row_values(lse, delta_k, inverse_unit)
        hopper_grad_keys_kernel[of_keys](
            *blocks, *values, drawn, dk, dv, *dk.stride()[:3], scale, H, Tq, Tk, *schedule_k,
            **arguments,
        )  # fmt: skip
        if delta is not delta_k:
            values = _row_values(lse, delta, inverse_unit)
        hopper_grad_queries_kernel[of_queries](
            *blocks, *values, drawn, dq, *dq.stride()[:3], scale, H, Tq, Tk, *schedule_q,
            **arguments,
        )  # fmt: skip
    return into
