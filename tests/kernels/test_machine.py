"""The driver's version: as nvidia-smi tells it, and None where it does not answer."""

import subprocess
from types import SimpleNamespace

import pytest

from kernels.machine import driver_version


def test_the_first_gpu_speaks_for_all(monkeypatch):
    told = SimpleNamespace(stdout="580.159.04\n580.159.04\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **rest: told)
    assert driver_version() == "580.159.04"


@pytest.mark.parametrize(
    "trouble",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 10),
    ],
)
def test_no_answer_is_none(monkeypatch, trouble):
    def run(*args, **rest):
        raise trouble

    monkeypatch.setattr(subprocess, "run", run)
    assert driver_version() is None


def test_silence_is_none(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **rest: SimpleNamespace(stdout="\n"))
    assert driver_version() is None
