"""Which blocks a kernel should run with: `python -m kernels.bench --tune`, on a CUDA device.

A multiprocessor holds 65,536 registers and 227 KiB of shared memory. A program that takes more
than half of either is alone on it, and its products wait for its exponentials; two or three
smaller ones overlap. `Blocks.max_registers` buys that with spilled registers at worst. Every
choice of CANDIDATES is compared with the one that the table gives now: its results, bit for bit,
then its time. The likeliest choices of all kernels come first, so that a time limit costs little.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from . import bench, triton_attention
from .compile_ahead import compile_ahead
from .triton_blocks import Blocks

KERNELS = ("forward", "grad_keys", "grad_queries")
LENGTHS = (1024, 4096)
TOKENS = 32_768

# (block_m, block_n, warps, stages, max_registers), likeliest first. "running": the key block is
# numerics.tile (128). 128 registers: two programs of 8 warps, four of 4; 168: three of 4 warps.
# The last ones of most lists compile to products that wait for one another, for want of registers.
CANDIDATES: dict[tuple[str, int], tuple[tuple[int, int, int, int, int], ...]] = {
    ("running", 64): (
        (64, 128, 4, 2, 168), (64, 128, 4, 3, 0), (128, 128, 8, 3, 128), (64, 128, 4, 2, 0),
        (64, 128, 4, 1, 168), (128, 128, 8, 2, 0), (128, 128, 4, 3, 0), (64, 128, 4, 1, 0),
        (64, 128, 4, 3, 168), (256, 128, 16, 2, 128), (128, 128, 4, 2, 0), (128, 128, 8, 2, 128),
        (64, 128, 4, 2, 128), (256, 128, 16, 3, 128), (256, 128, 8, 2, 0),
    ),
    ("running", 128): (
        (64, 128, 4, 1, 0), (128, 128, 8, 3, 0), (64, 128, 4, 2, 0), (128, 128, 4, 2, 0),
        (128, 128, 16, 2, 128), (128, 128, 8, 1, 128),
    ),
    ("row", 64): (
        (128, 64, 8, 3, 128), (64, 64, 4, 3, 168), (64, 64, 4, 3, 128), (256, 64, 16, 3, 128),
        (128, 64, 8, 2, 128), (64, 128, 4, 2, 168), (128, 64, 8, 4, 128), (128, 64, 4, 3, 0),
        (64, 64, 4, 4, 168), (128, 128, 8, 3, 128), (64, 64, 4, 2, 128), (128, 64, 8, 3, 0),
        (128, 32, 8, 4, 128), (64, 128, 4, 2, 0), (256, 128, 16, 2, 128),
    ),
    ("row", 128): (
        (64, 64, 4, 2, 0), (128, 64, 8, 3, 0), (128, 32, 8, 3, 128), (64, 128, 4, 1, 0),
        (64, 64, 4, 2, 168), (64, 32, 4, 3, 168), (64, 64, 4, 3, 0), (128, 64, 8, 2, 128),
        (128, 128, 8, 3, 0), (256, 64, 16, 2, 128),
    ),
    ("grad_keys", 64): (
        (64, 64, 4, 2, 0), (32, 64, 4, 2, 168), (32, 128, 8, 2, 128), (64, 64, 4, 2, 168),
        (64, 64, 4, 3, 0), (64, 128, 8, 3, 0), (32, 64, 4, 3, 168), (32, 128, 8, 3, 128),
        (64, 64, 4, 1, 168), (32, 128, 8, 2, 0), (64, 128, 8, 2, 128), (128, 128, 8, 2, 0),
        (64, 256, 16, 2, 128),
    ),
    ("grad_keys", 128): (
        (32, 64, 4, 2, 0), (64, 128, 8, 2, 0), (32, 128, 8, 3, 0), (64, 64, 4, 2, 0),
        (32, 64, 4, 3, 0), (64, 128, 8, 1, 0), (16, 128, 8, 3, 0), (64, 64, 8, 2, 0),
    ),
    ("grad_queries", 64): (
        (128, 64, 8, 3, 128), (64, 64, 4, 3, 168), (64, 64, 4, 3, 128), (128, 128, 8, 2, 0),
        (128, 64, 8, 2, 128), (256, 64, 16, 3, 128), (128, 64, 4, 2, 0), (128, 64, 8, 4, 128),
        (64, 128, 4, 2, 0), (128, 64, 4, 3, 0), (128, 128, 8, 3, 0), (128, 32, 8, 3, 128),
        (64, 64, 4, 2, 128), (64, 128, 4, 2, 168),
    ),
    ("grad_queries", 128): (
        (64, 64, 4, 2, 0), (128, 64, 8, 3, 0), (128, 32, 8, 3, 128), (128, 128, 8, 2, 0),
        (64, 64, 4, 3, 0), (64, 64, 4, 2, 168), (128, 32, 8, 2, 128), (64, 32, 4, 3, 168),
        (128, 64, 8, 2, 128), (256, 64, 16, 2, 128),
    ),
}  # fmt: skip

BACKWARDS = ("ours-flash", "ours-paper")  # the others run one of these two


@dataclass(frozen=True)
class Case:
    """A kernel of one implementation at one head dimension: something that has blocks."""

    kernel: str
    implementation: str
    head_dim: int

    @property
    def direction(self) -> str:
        return "forward" if self.kernel == "forward" else "backward"

    @property
    def present(self) -> Blocks:
        """What the table gives on a Hopper GPU."""
        n, probe = bench.OURS[self.implementation]
        D = self.head_dim
        limit = triton_attention.HOPPER_SHARED
        return triton_attention._blocks(self.kernel, n, D, D, 2, limit, probe)

    @property
    def candidates(self) -> list[Blocks]:
        """The present choice, then the others, likeliest first."""
        n, _ = bench.OURS[self.implementation]
        kind = n.reference if self.kernel == "forward" else self.kernel
        found = [Blocks(*row) for row in CANDIDATES[kind, self.head_dim]]
        return [self.present, *(b for b in found if b != self.present)]


def cases(names: Sequence[str] = tuple(bench.OURS)) -> list[Case]:
    """All cases of some implementations, head dimension 64 first."""
    return [
        Case(kernel, name, head_dim)
        for head_dim in (64, 128)
        for kernel in KERNELS
        for name in (bench.OURS if kernel == "forward" else BACKWARDS)
        if name in names
    ]


def in_order(of: Sequence[Case]) -> list[tuple[Case, Blocks]]:
    """Every choice of every case: all present ones, then all that come first, and so on."""
    ranked = [(rank, case, b) for case in of for rank, b in enumerate(case.candidates)]
    return [(case, b) for _, case, b in sorted(ranked, key=lambda r: r[0])]


# -- one choice -----------------------------------------------------------------------------------


def results(case: Case, blocks: dict[str, Blocks], inputs: Sequence[Tensor], given=None):
    """What the case computes with these blocks: the forward's fields, or dq, dk, dv.

    given: the forward result that a backward starts from.
    """
    q, k, v, dO = inputs
    n, probe = bench.OURS[case.implementation]
    choices = dict(numerics=n, causal=True, scale=1 / math.sqrt(case.head_dim))
    if case.kernel == "forward":
        found = triton_attention.forward(
            q, k, v, probe=probe, blocks=blocks.get("forward"), **choices
        )
        kept = dict(out=found.out, lse=found.lse)
        return kept | (dict(ties=found.ties, ones=found.ones) if probe else {})
    gradients = triton_attention.backward(
        dO, q, k, v, given.out, given.lse, given.delta_output, blocks=blocks, **choices
    )
    return dict(zip(("dq", "dk", "dv"), gradients))


def start(case: Case, inputs: Sequence[Tensor]):
    """The forward result that the backward of a case needs, else None."""
    if case.kernel == "forward":
        return None
    n, _ = bench.OURS[case.implementation]
    scale = 1 / math.sqrt(case.head_dim)
    return triton_attention.forward(*inputs[:3], numerics=n, causal=True, scale=scale)


def compile_one(case: Case, blocks: Blocks) -> None:
    """Run a choice once on small tensors (in a worker): its kernels are on disk afterwards."""
    inputs = bench.operands(bench.Shape(True, case.head_dim, 256, 1, 2))
    results(case, {case.kernel: blocks}, inputs, start(case, inputs))
    torch.cuda.synchronize()


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """The share of numbers that differ, by tensor: {} for equal bits.

    Raises AssertionError where that is more than another order of fp32 sums explains: a count
    that differs, 2 % of other numbers, or a distance of 2^-8 of the norm.
    """
    shares = {}
    for name, x in got.items():
        y = want[name]
        share = (x != y).double().mean().item()
        off = (x.double() - y.double()).norm().item() / (y.double().norm().item() or 1.0)
        most = dict(lse=1.0, ties=0.0, ones=0.0).get(name, 0.02)
        if share > most or not off < 2.0**-8:
            raise AssertionError(f"{name} differs in {share:.1%}, by {off:.1e} of its norm")
        if share:
            shares[name] = share
    return shares


def measure(case: Case, blocks: dict[str, Blocks], inputs, given, want) -> dict:
    """Time of a choice and how far its results are from `want`."""
    differs = difference(results(case, blocks, inputs, given), want)
    (p20, p80), p50 = bench.time_call(
        lambda: results(case, blocks, inputs, given), least_ms=20.0, most=20
    )
    return dict(ms_p20=p20, ms_p50=p50, ms_p80=p80, differs=differs)


# -- all of them ----------------------------------------------------------------------------------


class Stage:
    """Tensors and present results of the cases, made once per case and length."""

    def __init__(self):
        self.inputs, self.given, self.want = {}, {}, {}

    def of(self, case: Case, seq_len: int):
        """(inputs, forward result that a backward starts from, present results)."""
        batch, heads = TOKENS // seq_len, 768 // case.head_dim
        shape = bench.Shape(True, case.head_dim, seq_len, batch, heads)
        if shape not in self.inputs:
            self.inputs[shape] = bench.operands(shape)
        inputs = self.inputs[shape]
        start_key = case.implementation, shape
        if case.kernel != "forward" and start_key not in self.given:
            self.given[start_key] = start(case, inputs)
        given = self.given.get(start_key)
        if (case, seq_len) not in self.want:
            self.want[case, seq_len] = results(case, {}, inputs, given)
        return inputs, given, self.want[case, seq_len]


def run(
    names: Sequence[str] = tuple(bench.OURS),
    *,
    lengths: Sequence[int] = LENGTHS,
    limit_s: float = 110.0,
    progress: Callable = print,
) -> dict:
    """{'provenance', 'rows', 'left_out'}: a row per case, length and choice.

    About 45 % of the time at most goes to compiling. What would begin after `limit_s` is left
    out, counted, and named.
    """
    began = time.monotonic()
    wanted = in_order(cases(names))
    outcomes = compile_ahead(compile_one, wanted, limit_s=0.45 * limit_s)
    compiled = f"{outcomes.count(None)} of {len(wanted)} choices compiled"
    progress(f"[{time.monotonic() - began:4.0f} s] {compiled}; {_first_error(outcomes)}")
    stage, rows, left_out = Stage(), [], []
    ready = sorted(zip(wanted, outcomes), key=lambda pair: pair[1] is not None)
    for (case, blocks), _ in ready:  # what is not compiled comes last, and is compiled here
        row = asdict(case) | dict(blocks=asdict(blocks), present=blocks == case.present)
        if time.monotonic() - began > limit_s - 4:
            left_out.append(row)
        else:
            rows += [_measured(row, case, blocks, length, stage) for length in lengths]
    add_ratios(rows)
    rows += _combined(rows, stage, lengths) if time.monotonic() - began < limit_s else []
    progress(f"[{time.monotonic() - began:4.0f} s] {len(left_out)} choices left out")
    found = dict(provenance=bench.provenance(time.monotonic() - began), rows=rows)
    return found | dict(left_out=left_out)


def _first_error(outcomes: Sequence[str | None]) -> str:
    return next((told for told in outcomes if told), "no errors")


def _measured(row: dict, case: Case, blocks: Blocks, seq_len: int, stage: Stage) -> dict:
    row = row | dict(seq_len=seq_len)
    try:
        return row | measure(case, {case.kernel: blocks}, *stage.of(case, seq_len))
    except (
        Exception
    ) as error:  # too many registers or bytes, or a wrong result: a row, not a crash
        return row | dict(error=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def add_ratios(rows: Sequence[dict]) -> None:
    """`ratio`: the present choice's time over a row's, of the same case and length."""
    present = {_key(row): row["ms_p50"] for row in rows if row["present"] and "ms_p50" in row}
    for row in rows:
        if "ms_p50" in row and _key(row) in present:
            row["ratio"] = present[_key(row)] / row["ms_p50"]


def _key(row: dict) -> tuple:
    return row["kernel"], row["implementation"], row["head_dim"], row.get("seq_len")


def best(rows: Sequence[dict]) -> dict[Case, tuple[float, Blocks]]:
    """Per case the choice with the largest mean ratio over all lengths, and that ratio."""
    ratios: dict[tuple[Case, Blocks], list[float]] = {}
    for row in rows:
        if "ratio" in row and row["kernel"] in KERNELS:
            case = Case(row["kernel"], row["implementation"], row["head_dim"])
            ratios.setdefault((case, Blocks(**row["blocks"])), []).append(row["ratio"])
    lengths = max(map(len, ratios.values()), default=0)
    found: dict[Case, tuple[float, Blocks]] = {}
    for (case, blocks), of in ratios.items():
        mean = statistics.geometric_mean(of)
        if len(of) == lengths and mean > found.get(case, (0.0, None))[0]:
            found[case] = mean, blocks
    return found


def _combined(rows: Sequence[dict], stage: Stage, lengths: Sequence[int]) -> list[dict]:
    """The best blocks of both backward kernels together."""
    found, out = best(rows), []
    for case in found:
        other = Case("grad_queries", case.implementation, case.head_dim)
        if case.kernel != "grad_keys" or other not in found:
            continue
        blocks = dict(grad_keys=found[case][1], grad_queries=found[other][1])
        told = {name: asdict(b) for name, b in blocks.items()}
        for length in lengths:
            before = measure(case, {}, *stage.of(case, length))["ms_p50"]
            row = asdict(case) | dict(kernel="backward", seq_len=length, present=False)
            row |= dict(blocks=told) | measure(case, blocks, *stage.of(case, length))
            out.append(row | dict(ratio=before / row["ms_p50"]))
    return out


def table(rows: Sequence[dict]) -> str:
    """Text: per case its choices, fastest first; a backward is timed as a whole."""
    lines = []
    for key in dict.fromkeys(_key(row)[:3] for row in rows):
        group = [row for row in rows if _key(row)[:3] == key]
        lines.append(f"{key[0]} {key[1]} D={key[2]}: speed beside the present choice, by length")
        choices: dict[str, list[dict]] = {}
        for row in group:
            choices.setdefault(_named(row), []).append(row)
        score = {name: min(r.get("ratio", 0.0) for r in of) for name, of in choices.items()}
        lines += [
            "  " + _line(name, choices[name]) for name in sorted(choices, key=score.get)[::-1]
        ]
    return "\n".join(lines)


def _named(row: dict) -> str:
    if row["kernel"] == "backward":
        return "best of both kernels"
    b = row["blocks"]
    limit = f" {b['max_registers']}r" if b["max_registers"] else ""
    mark = " (present)" if row["present"] else ""
    return f"{b['block_m']}x{b['block_n']} {b['num_warps']}w {b['num_stages']}s{limit}{mark}"


def _line(name: str, of: Sequence[dict]) -> str:
    cells = []
    for row in of:
        if "error" in row:
            cells.append(row["error"][:60])
            continue
        differs = " and ".join(f"{s:.1e} of {x}" for x, s in row.get("differs", {}).items())
        bits = f", {differs} differ" if differs else ""
        cells.append(
            f"T={row['seq_len']} {row['ms_p50']:.3f} ms {row.get('ratio', 1.0):.3f}x{bits}"
        )
    return f"{name:<32} " + "; ".join(cells)
