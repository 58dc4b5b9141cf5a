"""The page on speed: our kernels beside PyTorch's, what was predicted, and what limits them.

Numbers of time come from archives of `python -m kernels.bench` (`book/results/bench`). What a
kernel has to do per block is read from its compiled code (`kernels.triton_compile`), and set
against the throughput of a multiprocessor that NVIDIA's programming guide gives for compute
capability 9.0.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from IPython.display import Markdown
from matplotlib.figure import Figure

from kernels.bench import IMPLEMENTATIONS, OURS, PINNED
from kernels.triton_compile import Compiled

from .captions import DASHES, INK, PALETTE, styled, subplots
from .evidence import Archive
from .tables import markdown_table

# Per clock and multiprocessor of compute capability 9.0: FLOPs of dense bf16 products, results of
# the special function units, and instructions of single lanes that four schedulers can issue.
MATRIX_FLOPS, SPECIAL, LANES = 4_096, 16, 128
TILE = 128

Key = tuple[str, bool, int, int]  # direction, causal, head dimension, keys


def ceiling(archive: Archive) -> float:
    """TFLOP/s of a large matrix product, measured in the same run. Raises ValueError without."""
    found = json.loads(archive.path.read_text()).get("ceiling_tflops")
    if not found:
        raise ValueError(f"{archive.path} has no ceiling_tflops; measure it with kernels.bench")
    return found


def by_shape(rows: Sequence[Mapping], field: str = "tflops") -> dict[Key, dict[str, float]]:
    """Shape -> implementation -> what was measured, of bench records without an error.

    Forward first. field: "tflops" (TFLOP/s) or "ms_p50" (median milliseconds).
    """
    found: dict[Key, dict[str, float]] = {}
    for row in rows:
        if row.get(field) and "error" not in row:
            key = row["direction"], row["causal"], row["head_dim"], row["seq_len"]
            found.setdefault(key, {})[row["implementation"]] = row[field]
    return dict(sorted(found.items(), key=lambda item: (item[0][0] != "forward", *item[0][1:])))


def best_sdpa(of_shape: Mapping[str, float]) -> tuple[str, float] | None:
    """The fastest pinned backend of SDPA at a shape, and its TFLOP/s."""
    found = {name: of_shape[name] for name in PINNED if name in of_shape}
    return max(found.items(), key=lambda item: item[1]) if found else None


def rate_table(rows: Sequence[Mapping], head_dim: int) -> Markdown:
    """TFLOP/s, a line per direction, mask and length, and a column per implementation."""
    shapes = {key: of for key, of in by_shape(rows).items() if key[2] == head_dim}
    names = [n for n in IMPLEMENTATIONS if any(n in of for of in shapes.values())]
    lines = []
    for (direction, causal, _, length), of in shapes.items():
        best, cells = best_sdpa(of), []
        for name in names:
            rate = of.get(name)
            share = f" ({rate / best[1]:.2f})" if rate and best and name in OURS else ""
            cells.append("none" if rate is None else f"{rate:.0f}{share}")
        lines.append([f"{direction}, {'causal' if causal else 'full'}, {length:,}", *cells])
    return markdown_table(["TFLOP/s", *(name.replace("-", " ") for name in names)], lines)


@styled
def rate_figure(rows: Sequence[Mapping], head_dim: int, most: float) -> Figure:
    """TFLOP/s against the number of keys, forward and backward, causal; most: the line on top."""
    figure, axes = subplots(2, sharex=True)
    drawn = ("ours-flash", "ours-paper", "ours-stabilized", "sdpa-flash", "sdpa-cudnn", "flex")
    for axis, direction in zip(axes, ("forward", "backward")):
        shapes = {
            key[3]: of
            for key, of in by_shape(rows).items()
            if key[:3] == (direction, True, head_dim)
        }
        for name, color, dash in zip(drawn, PALETTE, DASHES):
            points = [(length, of[name]) for length, of in shapes.items() if name in of]
            if points:
                axis.plot(*zip(*points), marker="o", color=color, linestyle=dash, label=name)
        axis.axhline(most, color=INK, linestyle="-", linewidth=0.8)
        axis.set(title=direction, ylabel="TFLOP/s", ylim=(0, None), xscale="log")
        axis.set_xticks(list(shapes), [f"{length:,}" for length in shapes])
        axis.minorticks_off()
    axes[0].legend(ncols=2)
    axes[-1].set_xlabel("keys (the line on top: a large matrix product)")
    return figure


def rates_in_words(rows: Sequence[Mapping], head_dim: int) -> str:
    """The figure for a reader who does not see it: rates at most keys, fastest first."""
    last = {
        key[0]: (key[3], of) for key, of in by_shape(rows).items() if key[1:3] == (True, head_dim)
    }
    told = []
    for direction, (length, of) in last.items():
        order = sorted(of, key=of.get, reverse=True)
        named = ", ".join(f"{name} {of[name]:.0f}" for name in order)
        told.append(f"{direction} at {length:,} keys: {named} TFLOP/s")
    return "; ".join(told) or "no causal shapes of this head dimension"


def predictions(rows: Sequence[Mapping]) -> Markdown:
    """What counting products says of each kernel beside ours in `flash` numerics, and what is.

    The last column is measured over predicted, least and most over shapes.
    """
    claims = (
        ("forward", "ours-paper", 2 / 3, "QKᵀ twice: three products in place of two"),
        ("forward", "ours-stabilized", 2 / 3, "the same, and the second largest score"),
        ("forward", "ours-stabilized-tiled", 1.0, "the same products"),
        ("forward", "ours-flash-probes", 1.0, "the same products"),
        ("backward", "ours-paper", 1.0, "the same products"),
        ("backward", "ours-stabilized", 1.0, "the same products"),
    )
    lines = []
    for direction, name, ratio, reason in claims:
        found = [
            of[name] / of["ours-flash"]
            for key, of in by_shape(rows).items()
            if key[0] == direction and name in of and "ours-flash" in of
        ]
        if found:
            measured = f"{min(found):.2f} to {max(found):.2f}"
            share = f"{min(found) / ratio:.2f} to {max(found) / ratio:.2f}"
            lines.append([direction, f"`{name}`", reason, f"{ratio:.2f}", measured, share])
    header = ["", "kernel", "counted", "predicted", "measured", "of the prediction"]
    return markdown_table(header, lines)


# -- what a block has to do -----------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Clocks of a multiprocessor that a tile of 128 x 128 scores needs of each kind of unit.

    matrix: the tensor cores. special: exponentials. issue: all instructions of all threads. Each
    is a lower bound on the time of the tile.
    """

    matrix: float
    special: float
    issue: float

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matrix + other.matrix, self.special + other.special, self.issue + other.issue
        )

    def clocks(self) -> tuple[float, float, float]:
        """If all units work at once; products first, then the rest; one after the other."""
        rest = max(self.special, self.issue)
        alone = self.matrix + self.special + self.issue
        return max(self.matrix, rest), self.matrix + rest, alone


def loop_work(compiled: Compiled) -> list[Work]:
    """The loops over blocks that need no mask, in the order of the code.

    They are the basic blocks of the PTX with matrix instructions. A loop comes in two versions,
    with a mask and without: the one with fewer instructions is that without.
    """
    threads = 32 * compiled.blocks.num_warps
    tiles = compiled.blocks.block_m * compiled.blocks.block_n / TILE**2
    found: dict[tuple, tuple[int, Work]] = {}
    for place, block in enumerate(re.split(r"\n(?=\$L__BB)", compiled.ptx)):
        names = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)*)", block, re.MULTILINE)
        shapes = Counter(re.findall(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k(\d+)", block))
        if not shapes:
            continue
        products = sum(2 * int(m) * int(n) * int(k) * c for (m, n, k), c in shapes.items())
        exponentials = sum(name.startswith("ex2") for name in names)
        work = Work(
            matrix=products * (threads // 128) / MATRIX_FLOPS / tiles,
            special=exponentials * threads / SPECIAL / tiles,
            issue=len(names) * threads / LANES / tiles,
        )
        key = tuple(sorted(shapes.items())), exponentials
        if key not in found or found[key][1].issue > work.issue:
            found[key] = place, work
    return [work for _, work in sorted(found.values(), key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Pass:
    """One direction of one implementation of the bench, and the kernels that it consists of."""

    direction: str
    implementation: str
    kernels: Sequence[Compiled]

    @property
    def work(self) -> Work:
        works = [work for compiled in self.kernels for work in loop_work(compiled)]
        return sum(works[1:], works[0])

    def bounds(self, most: float, head_dim: int) -> list[float]:
        """TFLOP/s by the bench's count, for the three degrees of overlap of `Work.clocks`."""
        products = 2 if self.direction == "forward" else 5
        counted = products * 2 * TILE**2 * head_dim / MATRIX_FLOPS
        return [most * counted / clocks for clocks in self.work.clocks()]


def budget_table(
    passes: Sequence[Pass], rows: Sequence[Mapping], most: float, head_dim: int
) -> Markdown:
    """Clocks by kind of unit, the rates that follow, and the measured one at most keys, causal."""
    lines = []
    for one in passes:
        measured = [
            of[one.implementation]
            for key, of in by_shape(rows).items()
            if key[:3] == (one.direction, True, head_dim) and one.implementation in of
        ]
        work = one.work
        lines.append(
            [
                f"`{one.implementation}`, {one.direction}",
                *(f"{clocks:,.0f}" for clocks in (work.matrix, work.special, work.issue)),
                *(f"{rate:,.0f}" for rate in one.bounds(most, head_dim)),
                f"{measured[-1]:,.0f}" if measured else "none",
            ]
        )
    header = ["kernel", "products", "exponentials", "issue", "all at once", "products, then rest"]
    return markdown_table([*header, "one after the other", "measured"], lines)
