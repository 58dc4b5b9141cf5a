"""Speed of our attention against PyTorch's: `python -m kernels.bench`, on a CUDA device.

Every implementation runs the same shapes at a constant number of tokens in one process. FLOPs are
4 B H T^2 D (halved if causal), times 2.5 for the backward, whatever an implementation really
computes: rates are comparable, and a second pass over QK^T shows as a lower rate. Before timing,
each implementation's output and gradients are compared with fp32 attention at that shape; one that
fails, or that this machine lacks, becomes a row with an error. Times are of the GPU alone, from
events around each of many calls, with the cache flushed and the queue filled before each.

What limits: the matrix units' ceiling is measured by one large matrix product. A row-reference
forward (paper, stabilized) does QK^T twice: 1.5 times the products, so at best 2/3 of the rate.
Backward: two kernels recompute S and dP, seven products in place of five, for bits that repeat.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import triton_attention
from .compile_ahead import compile_ahead
from .machine import driver_version
from .numerics import Numerics, flash, paper, stabilized

TILED = stabilized(decide="tile").at(reference="running")
OURS: dict[str, tuple[Numerics, bool]] = {  # name -> numerics, probes on
    "ours-flash": (flash(), False),
    "ours-paper": (paper(), False),
    "ours-stabilized": (stabilized(), False),
    "ours-stabilized-tiled": (TILED, False),
    "ours-flash-probes": (flash(), True),
}
PINNED = {
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
}
IMPLEMENTATIONS = (*OURS, *PINNED, "flex")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Shape:
    """One row of the bench: head_dim * heads = 768 wide, batch * seq_len = tokens."""

    causal: bool
    head_dim: int
    seq_len: int
    batch: int
    heads: int

    @property
    def flops(self) -> float:
        """Of the forward: two products of 2 B H T^2 D each."""
        total = 4.0 * self.batch * self.heads * self.seq_len**2 * self.head_dim
        return total / 2 if self.causal else total


TOKENS = 32_768  # of a call, at every length
CLOCK_HZ = 2e9  # about that of a GPU at work, to keep it busy for as long as a host needs


def shapes(quick: bool = False, tokens: int = TOKENS) -> list[Shape]:
    """The grid: causal and not, head dim 64 and 128, T = 512 to 16,384, `tokens` of each."""
    lengths = (1024, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    return [
        Shape(causal, head_dim, length, max(tokens // length, 1), 768 // head_dim)
        for causal in ((True,) if quick else (True, False))
        for head_dim in (64, 128)
        for length in lengths
    ]


def operands(shape: Shape) -> list[Tensor]:
    """q, k, v, dO [batch, heads, seq_len, head_dim], bf16, the same at every call."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = (shape.batch, shape.heads, shape.seq_len, shape.head_dim)
    return [torch.randn(size, generator=generator, device="cuda").bfloat16() for _ in range(4)]


# -- implementations ------------------------------------------------------------------------------


@dataclass
class Calls:
    """forward() -> out; backward() -> (dq, dk, dv), from a forward that was run once."""

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, Tensor, Tensor]]


def prepare(name: str, shape: Shape, q: Tensor, k: Tensor, v: Tensor, dO: Tensor) -> Calls:
    """The calls of one implementation on given tensors. Raises what the implementation raises."""
    if name in OURS:
        return _ours(*OURS[name], shape, q, k, v, dO)
    if name in PINNED:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, PINNED[name])

        def attend(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
    elif name == "flex":
        attend = _flex(shape)
    else:
        raise ValueError(f"unknown implementation {name!r}; use {', '.join(IMPLEMENTATIONS)}")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return Calls(
        lambda: attend(q, k, v), lambda: torch.autograd.grad(out, leaves, dO, retain_graph=True)
    )


def _ours(n: Numerics, probe: bool, shape: Shape, q, k, v, dO) -> Calls:
    choices = dict(numerics=n, causal=shape.causal, scale=1 / math.sqrt(shape.head_dim))
    why = triton_attention.supports(n, device=q.device, dtype=q.dtype, head_dim=shape.head_dim)
    if why:
        raise ValueError(why)
    result = triton_attention.forward(q, k, v, probe=probe, **choices)

    def forward():
        return triton_attention.forward(q, k, v, probe=probe, **choices).out

    def backward():
        return triton_attention.backward(
            dO, q, k, v, result.out, result.lse, result.delta_output, **choices
        )

    return Calls(forward, backward)


def _kernel(name: str, shape: Shape, direction: str, q, k, v, dO) -> str:
    """Which of our kernels serves a call: "hopper" or "general"."""
    n, probe = OURS[name]
    if direction == "backward":
        return triton_attention.backward_kernel_name(dO, q, k, v, numerics=n, causal=shape.causal)
    choices = dict(numerics=n, causal=shape.causal, scale=1 / math.sqrt(shape.head_dim))
    return triton_attention.forward_kernel_name(q, k, v, probe=probe, **choices)


def _flex(shape: Shape):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # a shape is a compilation of its own; their number is limited
    mask = None
    if shape.causal:
        T = shape.seq_len
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


# -- compiling ahead ------------------------------------------------------------------------------


SHORT, LONG = 256, 4096  # keys: the forward for Hopper GPUs serves long rows alone


def to_compile(
    of: Sequence[Shape], names: Sequence[str], lengths: Sequence[int] = (SHORT,)
) -> list[tuple[str, Shape]]:
    """(implementation, shape) of every first call that compiles. Slow ones first.

    Ours compile once per mask and head dimension, on a small shape of each of `lengths`;
    FlexAttention at each shape.
    """
    flex = [("flex", shape) for shape in of if "flex" in names]
    small = {replace(s, seq_len=n, batch=1, heads=2): None for s in of for n in lengths}
    return flex + [(name, shape) for shape in small for name in OURS if name in names]


def lengths_to_compile(capability: tuple[int, int]) -> tuple[int, ...]:
    """Lengths at which our forwards on a GPU of that capability are different kernels."""
    return (SHORT, LONG) if tuple(capability) == (9, 0) else (SHORT,)


def compile_one(name: str, shape: Shape) -> None:
    """Call an implementation once in each direction (in a worker)."""
    from torch._inductor import config

    config.compile_threads = 1  # the workers are many already
    calls = prepare(name, shape, *operands(shape))
    calls.forward()
    calls.backward()
    torch.cuda.synchronize()


# -- correctness and time -------------------------------------------------------------------------


def reference(shape: Shape, q, k, v, dO, heads: int = 2):
    """O, dQ, dK, dV of the first heads of the first sequence, in fp32 without TF32."""
    leaves = [x[:1, :heads].float().requires_grad_() for x in (q, k, v)]
    S = leaves[0] @ leaves[1].mT / math.sqrt(shape.head_dim)
    if shape.causal:
        S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), -math.inf)
    out = S.softmax(-1) @ leaves[2]
    grads = torch.autograd.grad(out, leaves, dO[:1, :heads].float())
    return out.detach(), *grads


def check(calls: Calls, truth, tolerance: float = 2.0**-5) -> None:
    """Raise AssertionError if an output is further from fp32 than bf16 roundings explain.

    Relative to the norm of the truth: bf16 operands give about 2^-8; a wrong mask or a lost block
    gives much more.
    """
    for name, got, want in zip(
        ("O", "dQ", "dK", "dV"), (calls.forward(), *calls.backward()), truth
    ):
        part = got[:1, : want.shape[1]].float()
        error = ((part - want).norm() / want.norm()).item()
        if not error < tolerance:
            raise AssertionError(f"{name} is off by {error:.1e} of its norm")


def time_call(
    call: Callable, *, least_ms: float = 60.0, most: int = 60
) -> tuple[tuple[float, float], float]:
    """((p20, p80), p50) of milliseconds per call on the GPU.

    Before each call the cache is flushed and the GPU kept busy for at least half a millisecond,
    and for longer than the host took, so that the launches of the call are already queued when its
    first event is reached.
    """
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    began = time.perf_counter()
    call()
    host_s = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    repeats = min(most, max(8, int(least_ms / max(start.elapsed_time(end), 1e-3))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    busy_cycles = max(1_000_000, int(2 * host_s * CLOCK_HZ))
    for first, last in events:
        flush.zero_()
        torch.cuda._sleep(busy_cycles)
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in events)
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return (fifths[0], fifths[3]), statistics.median(times)


def ceiling(size: int = 8192) -> float:
    """TFLOP/s of one large bf16 matrix product: what the matrix units give at best."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    _, p50 = time_call(lambda: a @ b)
    return 2 * size**3 / p50 * 1e-9


# -- rows -----------------------------------------------------------------------------------------


def measure(shape: Shape, names=IMPLEMENTATIONS, directions=DIRECTIONS, progress=print) -> list:
    """Rows of one shape, one per implementation and direction."""
    q, k, v, dO = operands(shape)
    truth = reference(shape, q, k, v, dO)
    rows = []
    for name in names:
        try:
            calls = prepare(name, shape, q, k, v, dO)
            check(calls, truth)
        except Exception as error:  # an implementation that fails is a row, not a crash
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            rows += [_row(shape, name, d, error=told[:300]) for d in directions]
            progress(f"  {name}: {told[:120]}")
            continue
        for direction in directions:
            row = _timed(shape, name, direction, getattr(calls, direction))
            if name in OURS:
                row["kernel"] = _kernel(name, shape, direction, q, k, v, dO)
            rows.append(row)
        del calls
    return rows


def _row(shape: Shape, name: str, direction: str, **found) -> dict:
    return dict(
        direction=direction,
        causal=shape.causal,
        head_dim=shape.head_dim,
        seq_len=shape.seq_len,
        batch=shape.batch,
        heads=shape.heads,
        implementation=name,
        **found,
    )


def _timed(shape: Shape, name: str, direction: str, call: Callable) -> dict:
    try:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        (p20, p80), p50 = time_call(call)
    except Exception as error:
        return _row(shape, name, direction, error=f"{type(error).__name__}: {error}"[:300])
    flops = shape.flops * (2.5 if direction == "backward" else 1.0)
    return _row(
        shape,
        name,
        direction,
        tflops=flops / p50 * 1e-9,
        ms_p20=p20,
        ms_p50=p50,
        ms_p80=p80,
        peak_bytes=peak,
    )


def provenance(seconds: float) -> dict:
    """Machine, versions, commit and date of a run."""
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return dict(
        gpu=torch.cuda.get_device_name(),
        driver=driver_version(),
        torch=torch.__version__,
        triton=triton.__version__,
        commit=commit or None,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        duration_s=round(seconds, 1),
    )


def table(rows: list[dict], best_possible: float | None = None) -> str:
    """Text: per shape and direction, TFLOP/s and the ratio to the best pinned SDPA backend."""
    lines = []
    if best_possible:
        lines.append(f"ceiling: {best_possible:.0f} TFLOP/s (bf16 matrix product)")
    keys = list(dict.fromkeys(_key(r) for r in rows))
    for key in keys:
        group = {r["implementation"]: r for r in rows if _key(r) == key}
        rates = [group[n]["tflops"] for n in PINNED if "tflops" in group.get(n, {})]
        best = max(rates, default=None)
        direction, causal, head_dim, seq_len = key
        lines.append(f"{direction} {'causal' if causal else 'full'} D={head_dim} T={seq_len}")
        for name, row in group.items():
            if "error" in row:
                lines.append(f"  {name:<22} {row['error'][:90]}")
                continue
            ratio = f"{row['tflops'] / best:6.2f}x" if best else ""
            spread = f"{row['ms_p20']:.3f}-{row['ms_p80']:.3f}"
            lines.append(
                f"  {name:<22} {row['tflops']:7.1f} TFLOP/s {ratio}  {row['ms_p50']:8.3f} ms "
                f"({spread})  {row['peak_bytes'] / 2**20:8.1f} MiB"
            )
    return "\n".join(lines)


def _key(row: dict) -> tuple:
    return row["direction"], row["causal"], row["head_dim"], row["seq_len"]


def run(
    *,
    quick=False,
    limit_s: float | None = None,
    names=IMPLEMENTATIONS,
    tokens: int = TOKENS,
    progress=print,
):
    """All rows within about `limit_s` seconds: {'provenance', 'ceiling_tflops', 'rows'}."""
    began = time.monotonic()
    lengths = lengths_to_compile(torch.cuda.get_device_capability())
    ahead = to_compile(shapes(quick, tokens), names, lengths)
    share = 60.0 if limit_s is None else min(60.0, 0.4 * limit_s)
    for (name, shape), failed in zip(ahead, compile_ahead(compile_one, ahead, limit_s=share)):
        if failed:
            progress(f"  {name} {shape}: {failed}")
    progress(f"[{time.monotonic() - began:5.0f} s] {len(ahead)} first calls compiled")
    best_possible = ceiling()
    rows, skipped = [], []
    for shape in shapes(quick, tokens):
        if limit_s is not None and time.monotonic() - began > limit_s:
            skipped.append(shape)
            continue
        progress(f"[{time.monotonic() - began:5.0f} s] {shape}")
        found = measure(shape, names, progress=progress)
        progress(table(found))
        rows += found
    if skipped:
        progress(f"{len(skipped)} shapes left out by --limit-s {limit_s:.0f}")
    result = dict(
        provenance=provenance(time.monotonic() - began), ceiling_tflops=best_possible, rows=rows
    )
    return result | dict(left_out=len(skipped))


def save(result: dict, path: str) -> None:
    """Write what was measured as JSON, where folders may be missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1))


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="causal, two lengths")
    parser.add_argument("--json", metavar="PATH", help="write provenance and rows to this file")
    parser.add_argument("--limit-s", type=float, default=None, help="start no shape after this")
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help="of a call [32,768]; more of them tell what a call costs from what a block costs",
    )
    parser.add_argument("--tune", action="store_true", help="measure our block choices instead")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens} is no number of tokens; give at least 1")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here; the bench measures GPUs")
    if args.tune:
        from . import tuning

        names = [name for name in args.only if name in OURS]
        result = tuning.run(names, limit_s=args.limit_s or 110.0)
        print(tuning.table(result["rows"]))
    else:
        result = run(quick=args.quick, limit_s=args.limit_s, names=args.only, tokens=args.tokens)
        print(table(result["rows"], result["ceiling_tflops"]))
    print(json.dumps(result["provenance"]))
    if args.json:
        save(result, args.json)


if __name__ == "__main__":
    main()
