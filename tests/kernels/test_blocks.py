"""Block choice is a pure function of shapes and limits (cases 37, 45)."""

import itertools
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from kernels import triton_blocks
from kernels.triton_blocks import (
    ADA_SHARED,
    HOPPER_SHARED,
    TILES,
    Blocks,
    choose_blocks,
    pad,
    shared_bytes,
)

KERNELS = Path(triton_blocks.__file__).parent
NAMES = ("forward", "grad_keys", "grad_queries")
LIMITS = (65_536, ADA_SHARED, HOPPER_SHARED)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("limit", LIMITS)
def test_every_choice_fits_its_limit(kernel, limit):
    for head_dim, itemsize in itertools.product((1, 8, 40, 64, 80, 96, 128, 192, 256), (2, 4)):
        if limit == 65_536 and itemsize == 4 and head_dim > 128 and kernel != "forward":
            with pytest.raises(ValueError, match=f"D={head_dim}.*65,536 bytes.*emulated"):
                choose_blocks(kernel, head_dim=head_dim, itemsize=4, shared_limit=limit)
            continue
        blocks = choose_blocks(kernel, head_dim=head_dim, itemsize=itemsize, shared_limit=limit)
        dim = pad(head_dim)
        assert shared_bytes(kernel, blocks, dim, dim, itemsize) <= limit
        assert blocks.block_m >= 16 and blocks.block_n >= 16
        assert blocks.block_m & (blocks.block_m - 1) == blocks.block_n & (blocks.block_n - 1) == 0


def test_case_045_a_smaller_limit_gives_smaller_blocks(fault):
    """D = 128 wanted 131,074 bytes where 101,376 are there."""

    def check():
        big = choose_blocks("forward", head_dim=128, shared_limit=HOPPER_SHARED)
        small = choose_blocks("forward", head_dim=128, shared_limit=ADA_SHARED)
        assert shared_bytes("forward", big, 128, 128, 2) > ADA_SHARED
        assert small != big and shared_bytes("forward", small, 128, 128, 2) <= ADA_SHARED

    check()
    with fault(triton_blocks, "shared_bytes", lambda *args: 0):  # nobody looks at the limit
        check()


def test_the_running_tile_is_kept():
    for tile, head_dim in itertools.product(TILES, (64, 128)):
        assert choose_blocks("forward", head_dim=head_dim, tile=tile).block_n == tile


def test_a_register_limit_holds_for_the_sizes_it_was_made_for():
    blocks = Blocks(64, 128, 4, 2, 168)
    assert next(triton_blocks._with_tile(blocks, None)) == blocks
    assert next(triton_blocks._with_tile(blocks, 128)) == blocks
    assert next(triton_blocks._with_tile(blocks, 64)) == Blocks(64, 64, 4, 2)


def test_same_question_same_answer():
    first = choose_blocks("grad_keys", head_dim=64)
    assert first == choose_blocks("grad_keys", head_dim=64) and isinstance(first, Blocks)


def test_errors_name_the_head_dimension_and_a_remedy():
    with pytest.raises(ValueError, match=r"D=256.*101,376.*smaller tile.*emulated"):
        choose_blocks("forward", head_dim=256, tile=128, shared_limit=ADA_SHARED)
    with pytest.raises(ValueError, match=r"D=300.*split the heads or use backend='emulated'"):
        choose_blocks("forward", head_dim=300)
    with pytest.raises(ValueError, match=r"tile of 100 keys.*16, 32, 64.*emulated"):
        choose_blocks("forward", head_dim=64, tile=100)
    with pytest.raises(ValueError, match="unknown kernel 'sideways'"):
        shared_bytes("sideways", Blocks(16, 16, 4, 1), 64, 64, 2)


@pytest.mark.parametrize("file", [None, "attention.py", "parity.py"])
def test_case_047_kernels_import_without_triton(tmp_path, file):
    """No Triton on this machine; auto still works and `supports` says why not.

    With a file named, the fault: an import of Triton at its top.
    """
    copytree(KERNELS, tmp_path / "kernels", ignore=ignore_patterns("__pycache__"))
    if file:
        path = tmp_path / "kernels" / file
        path.write_text(
            path.read_text().replace("\nimport torch\n", "\nimport triton, torch\n", 1)
        )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.modules["triton"] = None  # `import triton` raises ImportError
import torch, kernels, kernels.parity
from kernels.attention import attention, resolve_backend
from kernels import triton_attention, parse_numerics
why = triton_attention.supports(parse_numerics("paper"), device="cuda", dtype=torch.bfloat16)
assert "not installed" in why, why
x = torch.randn(1, 1, 4, 8)
assert attention(x, x, x, numerics="paper").shape == x.shape
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode == 0) == (file is None), done.stderr
    assert file is None or "import of triton halted" in done.stderr
