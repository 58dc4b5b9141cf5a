"""What the Triton kernels share: rounding by integers, random bits, dots, and a repair.

Triton's interpreter (TRITON_INTERPRET=1 before `import triton`) runs kernels on a CPU with NumPy,
but keeps bf16 as raw 16-bit patterns: it truncates where a GPU rounds to nearest even, and
`tl.dot` multiplies the patterns themselves. Both look like a numerics bug of the kernel, the first
even like the bias that this project studies. `repair_interpreter` replaces those operations by
right ones; a test shows that without it the results are wrong.

Importing this module needs Triton. `kernels.triton_attention` imports it on first use only.
"""

from __future__ import annotations

import warnings

import numpy as np
import triton
import triton.language as tl

TESTED = ("3.6", "3.7")


def untested(version: str) -> str | None:
    """A sentence for a version of Triton that the kernels were not tested with, else None."""
    if ".".join(version.split(".")[:2]) in TESTED:
        return None
    return (
        f"Triton {version} was not tested with these kernels, {' and '.join(TESTED)} were; "
        "if results or errors look odd, use backend='emulated'"
    )


if _sentence := untested(triton.__version__):
    warnings.warn(_sentence, stacklevel=2)

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Numbers that tell the random streams of the sites apart (third word of the Philox counter).
STREAMS = {
    name: number
    for number, name in enumerate(
        (
            "scores",
            "probabilities",
            "unnormalized",
            "output",
            "delta_output",
            "backward_probabilities",
            "grad_probabilities",
            "grad_scores",
            "grad_q",
            "grad_k",
            "grad_v",
            "input_q",
            "input_k",
            "input_v",
            "input_dout",
            "delta_error",
        )
    )
}
SCORES = tl.constexpr(STREAMS["scores"])
PROBABILITIES = tl.constexpr(STREAMS["probabilities"])
UNNORMALIZED = tl.constexpr(STREAMS["unnormalized"])
OUTPUT = tl.constexpr(STREAMS["output"])
DELTA_OUTPUT = tl.constexpr(STREAMS["delta_output"])
BACKWARD_PROBABILITIES = tl.constexpr(STREAMS["backward_probabilities"])
GRAD_PROBABILITIES = tl.constexpr(STREAMS["grad_probabilities"])
GRAD_SCORES = tl.constexpr(STREAMS["grad_scores"])
GRAD_Q = tl.constexpr(STREAMS["grad_q"])
GRAD_K = tl.constexpr(STREAMS["grad_k"])
GRAD_V = tl.constexpr(STREAMS["grad_v"])


# Two fp32 numbers to the grid of bf16, ties to even, in one conversion. PTX.
BF16_PAIR = tl.constexpr("""{ .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000; }""")


@triton.jit
def round_to_bf16(x):
    """fp32 -> fp32 on the grid of bf16, ties to even: two numbers per conversion.

    A cast and back compiles to a conversion of single numbers, which shares the slow unit of the
    exponentials (16 results per clock and multiprocessor); that of pairs does not.
    """
    if INTERPRETED:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            BF16_PAIR, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)  # fmt: skip


@triton.jit
def round_nearest_even(x, BITS: tl.constexpr):
    """fp32 -> fp32 with BITS fraction bits, 8 exponent bits, ties to even. x: any shape.

    The same integers as `kernels.rounding`. Seven bits are bf16: a GPU has an instruction for it.
    """
    if BITS >= 23:
        return x
    elif BITS == 7:
        return round_to_bf16(x)
    else:
        DROP: tl.constexpr = 23 - BITS
        bits = x.to(tl.int32, bitcast=True)
        odd = (bits >> DROP) & 1
        bits = bits + (odd + ((1 << (DROP - 1)) - 1))
        bits = bits & (-(1 << DROP))
        return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def round_stochastic(x, word, BITS: tl.constexpr):
    """Round up with probability equal to the dropped fraction; word: random int32, shape of x."""
    if BITS >= 23:
        return x
    else:
        DROP: tl.constexpr = 23 - BITS
        bits = x.to(tl.int32, bitcast=True) + (word & ((1 << DROP) - 1))
        bits = bits & (-(1 << DROP))
        return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def random_words(seed, index, STREAM: tl.constexpr):
    """One int32 of random bits per int64 element index: Philox with counter (index, STREAM).

    A function of (seed, site, element) alone, so that every pass over the same element draws the
    same bits, whatever the block size.
    """
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    stream = tl.zeros_like(low) + STREAM
    word, _, _, _ = tl.philox(seed, low, high, stream.to(tl.uint32), tl.zeros_like(low))
    return word.to(tl.int32, bitcast=True)


@triton.jit
def random_words_kernel(out, seed_ptr, count, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """`random_words` of the first `count` indices, int32."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, random_words(tl.load(seed_ptr), index, STREAM), mask=index < count)


@triton.jit
def round_site(x, seed, index, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr):
    """Round fp32 x as a site says; `index` (int64, x's shape) is read by stochastic sites only."""
    if BITS >= 23:
        return x
    elif STOCHASTIC:
        return round_stochastic(x, random_words(seed, index, STREAM), BITS)
    else:
        return round_nearest_even(x, BITS)


@triton.jit
def round_operand(
    x, seed, index, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """`round_site`, as an operand of a dot: in DTYPE, which holds the site's grid."""
    if BITS == 7 and not STOCHASTIC and DTYPE == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        return round_site(x, seed, index, BITS, STOCHASTIC, STREAM).to(DTYPE)


@triton.jit
def multiply(a, b):
    """a @ b in fp32: matrix units for two 16-bit operands of one type, else fp32 without TF32."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


@triton.jit
def multiply_add(a, b, acc):
    """acc + a @ b, as `multiply`."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def rounded_scores(
    a, b, index, scale, seed,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """S = a b^T on its grid, in units of alpha if RAW; a [M, D], b [N, D], index int64 [M, N].

    Queries are a in the forward and for dQ, b for dK and dV: the same numbers, transposed.
    """
    s = multiply(a, tl.trans(b))
    if not RAW:
        s = s * scale
    return round_site(s, seed, index, BITS, STOCHASTIC, SCORES)


@triton.jit
def visible_keys(rows, cols, Tk, CAUSAL: tl.constexpr):
    """Which keys the rows see: [len(rows), len(cols)], or [1, len(cols)] if not CAUSAL."""
    if CAUSAL:
        return cols[None, :] < tl.minimum(rows + 1, Tk)[:, None]
    else:
        return cols[None, :] < Tk


@triton.jit
def load_rows(
    base, rows, limit, row_stride, col_stride, DIM: tl.constexpr, PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix [limit, DIM] as a block [len(rows), PADDED]; zeros outside."""
    cols = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * row_stride + cols[None, :] * col_stride
    if MASKED and DIM < PADDED:
        return tl.load(pointers, mask=(rows[:, None] < limit) & (cols[None, :] < DIM), other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    elif DIM < PADDED:
        return tl.load(pointers, mask=cols[None, :] < DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, value, rows, limit, row_stride, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Write a block [len(rows), PADDED] to a matrix [limit, DIM] whose rows are contiguous."""
    cols = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * row_stride + cols[None, :]
    mask = (rows[:, None] < limit) & (cols[None, :] < DIM)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def round_tensor_kernel(
    x, out, seed_ptr, count, heads, length,
    stride_b, stride_h, stride_t, stride_d,
    DIM: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round a [B, H, T, DIM] tensor of any strides into a contiguous one (site `inputs`)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    d = index % DIM
    t = (index // DIM) % length
    h = (index // DIM // length) % heads
    b = index // DIM // length // heads
    source = x + b * stride_b + h * stride_h + t * stride_t + d * stride_d
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    seed = 0
    if STOCHASTIC:
        seed = tl.load(seed_ptr)
    value = round_site(value, seed, index, BITS, STOCHASTIC, STREAM)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


# -- the interpreter ------------------------------------------------------------------------------


def interpreting() -> bool:
    """Whether the kernels of this module run in Triton's interpreter."""
    return type(round_nearest_even).__name__ == "InterpretedFunction"


def interpreter_misuse() -> str | None:
    """A sentence if TRITON_INTERPRET changed between Triton's import and ours, else None."""
    library = type(tl.standard._sum_combine).__name__ == "InterpretedFunction"
    if library == interpreting() == bool(triton.knobs.runtime.interpret):
        return None
    return (
        "TRITON_INTERPRET was changed after Triton was imported, so half of it is interpreted; "
        "set it before Python starts, or unset it"
    )


def _bf16_from_fp32(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 patterns of bf16, nearest even, NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _fp32_from_bf16(x: np.ndarray) -> np.ndarray:
    """uint16 patterns of bf16 -> float32, exact."""
    return (np.ascontiguousarray(x).astype(np.uint32) << 16).view(np.float32)


def repair_interpreter() -> None:
    """Make the interpreter's bf16 casts and dots right (see the module's docstring).

    Patches the builder class, once per process; called when this module is imported interpreted.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "faulty_operations"):
        return
    handle = interpreter.TensorHandle
    builder.faulty_operations = (builder.cast_impl, builder.create_fp_to_fp, builder.create_dot)
    plain_cast, plain_convert, plain_dot = builder.faulty_operations

    def cast(self, source, target):
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return handle(_bf16_from_fp32(source.data), target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return handle(_fp32_from_bf16(source.data), target.scalar)
        return plain_cast(self, source, target)

    def convert(self, source, target, rounding_mode):
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return plain_convert(self, source, target, rounding_mode)

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (
            handle(_fp32_from_bf16(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return plain_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast, convert, dot


def undo_interpreter_repair() -> None:
    """Bring the interpreter's own operations back (a test shows that they are wrong)."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "faulty_operations"):
        builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = builder.faulty_operations
        del builder.faulty_operations


if interpreting():
    repair_interpreter()
