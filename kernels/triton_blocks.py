"""Which block sizes a Triton kernel runs with: a pure function of shapes, formats and limits.

A block choice is a value, never a search at run time: the same call takes the same blocks on the
same kind of GPU, so a replayed run repeats its bits. `python -m kernels.bench --tune` measures
other rows of the tables. The size of a key block changes no rounding under the row reference;
under the running reference the key block *is* `numerics.tile`, part of the specification.

Shared memory holds the operands of the matrix instructions: one query block and `num_stages`
copies of the key and value blocks in flight (forward), or the like (backward).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 256
HOPPER_SHARED = 232_448  # bytes a block may use: H100, H200
ADA_SHARED = 101_376  # RTX 3090, 4090, A10G

# A running tile may be any of these: key blocks of the matrix instructions are powers of two.
TILES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Blocks:
    """rows x cols of one program, its warps, and how many loop iterations are loaded ahead.

    max_registers: a limit per thread that lets more programs share a multiprocessor, 0 for none.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0


def pad(dim: int) -> int:
    """The power of two, at least 16, that holds `dim` features."""
    return max(16, 1 << (dim - 1).bit_length())


def shared_bytes(kernel: str, blocks: Blocks, dim: int, dim_v: int, itemsize: int) -> int:
    """Estimate of the shared memory of one program, in bytes (an upper bound, tested).

    kernel: "forward", "grad_keys" (dK and dV) or "grad_queries" (dQ). `dim` and `dim_v` are padded
    head dimensions of q, k and of v; `itemsize` is the width of the widest dot operand.
    """
    width, stages = dim + dim_v, max(blocks.num_stages, 1)
    m, n = blocks.block_m, blocks.block_n
    scratch = 2_048
    if kernel == "forward":
        kept = m * dim * itemsize
        staged = stages * n * width * itemsize
        spilled = m * n * itemsize if itemsize == 4 else 0
    elif kernel == "grad_keys":
        kept = n * width * itemsize
        staged = stages * m * (width * itemsize + 8)
        spilled = m * n * itemsize * (2 if itemsize == 4 else 1)
    elif kernel == "grad_queries":
        kept = m * width * itemsize
        staged = stages * n * width * itemsize
        spilled = m * n * itemsize
    else:
        raise ValueError(f"unknown kernel {kernel!r}; use forward, grad_keys or grad_queries")
    return kept + staged + spilled + scratch


# Rows in order of preference, as fields of Blocks; the first that fits wins. Those that come first
# were the fastest of `kernels.bench --tune` on an H200. "tiled": the forward where the key block
# is given; another one than the row's takes fewer query rows instead. "tiled_more": the same where
# each score costs more (probes, a softmax policy, rounded scores), which needs more registers.
_FORWARD = {
    64: ((128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 1), (16, 16, 4, 1)),
    128: ((128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 1), (16, 16, 4, 1)),
    256: ((64, 64, 8, 2), (64, 64, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
}
_TILED = _FORWARD | {
    64: ((128, 128, 8, 3, 128), *_FORWARD[64]),
    128: ((128, 128, 8, 3), *_FORWARD[128]),
}
_HALF = {
    "forward": _FORWARD
    | {
        64: ((128, 64, 8, 3, 128), *_FORWARD[64]),
        128: ((64, 64, 4, 3), *_FORWARD[128]),
    },
    "tiled": _TILED,
    "tiled_more": _TILED | {64: ((64, 128, 4, 2, 168), *_FORWARD[64])},
    "grad_keys": {
        64: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
        128: ((64, 64, 4, 2), (32, 64, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
        256: ((64, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "grad_queries": {
        64: ((128, 64, 8, 3, 128), (64, 64, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        128: ((128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        256: ((32, 64, 8, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    },
}
# True fp32 dots run outside the matrix units and live in registers: small blocks.
_FULL = {
    64: ((32, 32, 8, 1), (16, 16, 4, 1)),
    128: ((32, 32, 8, 1), (16, 16, 8, 1)),
    256: ((16, 16, 8, 1),),
}


def table(kernel: str, dim: int, dim_v: int, itemsize: int) -> tuple[tuple[int, ...], ...]:
    """The rows of the table that serve this case, best first."""
    bucket = next(b for b in (64, 128, 256) if max(dim, dim_v) <= b)
    return _FULL[bucket] if itemsize == 4 else _HALF[kernel][bucket]


def choose_blocks(
    kernel: str,
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    itemsize: int = 2,
    shared_limit: int = HOPPER_SHARED,
    tile: int | None = None,
    more: bool = False,
) -> Blocks:
    """The first row of the table whose shared memory fits.

    head_dim: true feature count of q and k (1 to 256); head_dim_v that of v, the same by default.
    itemsize: bytes of the widest dot operand, 2 (bf16, fp16) or 4 (fp32).
    shared_limit: bytes that one block may use on this GPU. tile: the key block that the
    specification fixes (running reference), or None where any will do. more: whether a score of
    the forward costs more than rounding its weight; with a given tile that changes no bit.
    Raises ValueError naming the head dimension and a remedy when nothing fits.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for dim in (head_dim, head_dim_v):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head dimension D={dim} is outside 1 to {MAX_HEAD_DIM}; "
                "split the heads or use backend='emulated'"
            )
    if tile is not None and tile not in TILES:
        raise ValueError(
            f"running tile of {tile} keys is not one of {', '.join(map(str, TILES))}; "
            "choose one of these or use backend='emulated'"
        )
    dim, dim_v = pad(head_dim), pad(head_dim_v)
    name = kernel
    if tile and kernel == "forward":
        name = "tiled_more" if more else "tiled"
    for row in table(name, dim, dim_v, itemsize):
        for blocks in _with_tile(Blocks(*row), tile):
            if shared_bytes(kernel, blocks, dim, dim_v, itemsize) <= shared_limit:
                return blocks
    wanted = f"a running tile of {tile} keys" if tile else "the smallest block"
    remedy = "use a smaller tile" if tile and tile > 16 else "use a smaller head dimension"
    raise ValueError(
        f"{kernel}: {wanted} at head dimension D={head_dim} does not fit this GPU's "
        f"{shared_limit:,} bytes of shared memory; {remedy} or backend='emulated'"
    )


def _with_tile(blocks: Blocks, tile: int | None):
    """The row itself, or its variants that keep the key block at `tile`, larger first."""
    if tile is None:
        yield blocks
        return
    rows = blocks.block_m
    while rows * tile > max(blocks.block_m * blocks.block_n, 64 * 128) and rows > 16:
        rows //= 2
    warps = blocks.num_warps if rows >= 64 else 4
    kept = (rows, tile) == (blocks.block_m, blocks.block_n)
    limit = blocks.max_registers if kept else 0  # made for these sizes
    for stages in range(blocks.num_stages, 0, -1):
        yield Blocks(rows, tile, warps, stages, limit)
