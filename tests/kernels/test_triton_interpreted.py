"""One process with TRITON_INTERPRET=1 runs every test marked `interpreted`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    f"test_triton_{name}.py"
    for name in ("rounding", "forward", "backward", "layout", "parity", "cases")
]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreting already")
def test_kernels_in_the_interpreter():
    """The variable must be set before Triton is imported, hence the process of its own."""
    pytest.importorskip("triton")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "interpreted"]
    command += ["-p", "no:cacheprovider", *(str(here / name) for name in FILES)]
    environment = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=here.parents[1], timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 80, done.stdout[-500:]
