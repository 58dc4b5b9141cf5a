"""The kernels compile, without a GPU, to the instructions that they are written for."""

import os

import pytest
import torch

from kernels import parse_numerics
from kernels.triton_blocks import pad, shared_bytes

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

CASES = [
    # kernel, numerics, head dim, compute capability
    ("forward", "flash", 64, 90),
    ("forward", "paper", 64, 90),
    ("grad_keys", "paper", 64, 90),
    ("grad_queries", "paper", 64, 90),
    ("forward", "flash", 64, 80),
    ("grad_keys", "flash", 64, 80),
]


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    """Compile for real: no result of an earlier run is read."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("kernel, text, head_dim, capability", CASES)
def test_matrix_instructions_and_roundings(kernel, text, head_dim, capability):
    from kernels.triton_compile import compile_offline

    built = compile_offline(kernel, parse_numerics(text), head_dim=head_dim, capability=capability)
    expected = {90: "wgmma.mma_async", 80: "mma.sync"}[capability]
    assert built.matrix_instructions == (expected,)
    assert "cvt.rn.bf16" in built.ptx  # the hardware's round to nearest even
    assert "fma.rn.f32" not in built.ptx  # contraction would move a rounding
    assert "st.global.v4.b32" in built.ptx  # results of any strides, yet 16 bytes at a time
    assert built.spilled <= (8 if capability == 90 else 256)  # 8 under a limit of registers
    dim = pad(head_dim)
    assert built.shared <= shared_bytes(kernel, built.blocks, dim, dim, 2)


def test_rounding_of_scores_survives_compilation():
    """`paper` rounds S and P_bar: more conversions than `flash`, back to fp32 in between.

    In pairs, since single conversions run 16 a clock.
    """
    from kernels.triton_compile import compile_offline

    flash, paper = (
        compile_offline("grad_queries", parse_numerics(text), usage=False, head_dim=16)
        for text in ("flash", "paper")
    )
    in_pairs = "cvt.rn.bf16x2.f32"
    assert paper.ptx.count(in_pairs) > flash.ptx.count(in_pairs)
    assert paper.ptx.count("cvt.rn.bf16.f32") == flash.ptx.count("cvt.rn.bf16.f32")


def test_fp32_dots_use_no_tensor_cores():
    """Case 44: true fp32, no TF32."""
    from kernels.triton_compile import compile_offline

    built = compile_offline(
        "forward", parse_numerics("exact"), head_dim=16, dtype=torch.float32, usage=False
    )
    assert built.matrix_instructions == () and "tf32" not in built.ptx


def test_unknown_kernels_are_named():
    from kernels.triton_compile import compile_offline

    with pytest.raises(ValueError, match="unknown kernel 'sideways'; use one of forward"):
        compile_offline("sideways", parse_numerics("paper"))
