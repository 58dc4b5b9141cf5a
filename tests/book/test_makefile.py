"""What `make` does before there is an environment."""

import shutil
import subprocess
import sys

import pytest

from book import ROOT


@pytest.fixture
def clone(tmp_path):
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def interpreter(folder, version: str, then: str = "exit 1"):
    """A stand-in for Python: says it has `version`; anything but that question runs `then`."""
    path = folder / "python-standing-in"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} -c '
        f'"import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2"; fi\n'
        f'echo "$@" >> calls\n{then}\n'
    )
    path.chmod(0o755)
    return path


def make(folder, *arguments):
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_old_python_is_refused_with_one_sentence_and_leaves_nothing(clone):
    done = make(clone, "test", f"PYTHON={interpreter(clone, '(3, 10, 2)')}")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer and found 3.10; run it as: make PYTHON=" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_interrupted_installation_starts_anew_and_a_finished_one_is_kept(clone):
    pip = 'mkdir -p .venv/bin; printf "#!/bin/sh\\ntouch .venv/pip-ran" > .venv/bin/python'
    python = interpreter(clone, "(3, 11, 0)", f"{pip}; chmod +x .venv/bin/python")
    (clone / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(python, clone / ".venv" / "bin" / "python")
    (clone / ".venv" / "installing").touch()  # what an interruption leaves
    for _ in range(2):
        assert make(clone, "setup", f"PYTHON={python}").returncode == 0
        assert (clone / "calls").read_text() == "-m venv --clear .venv\n"
        assert (clone / ".venv" / "installed").exists()
        assert not (clone / ".venv" / "installing").exists()
