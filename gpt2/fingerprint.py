"""A fingerprint of the code that determines a run's result."""

from __future__ import annotations

import hashlib
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent

# Tools that cannot change a run. (Outcomes stay in: they decide when a run stops.)
_WITHOUT = {
    "kernels": ("bench", "compile_ahead", "forensics", "tuning"),
    "gpt2": (
        *("prepare", "fingerprint", "bench", "hardware", "many", "progress"),
        *("scaling", "scaling_runs", "scaling_parts", "children", "processes", "reduction"),
    ),
}


def fingerprinted_files() -> list[Path]:
    """The modules that the fingerprint covers, sorted by their path below the project."""
    found = []
    for package, without in _WITHOUT.items():
        for path in (_ROOT / package).rglob("*.py"):
            first = path.relative_to(_ROOT / package).parts[0].removesuffix(".py")
            if first not in without:
                found.append(path)
    return sorted(found)


def code_fingerprint() -> str:
    """sha256 hex over names and sources of those modules, line endings made equal."""
    sha = hashlib.sha256()
    for path in fingerprinted_files():
        source = path.read_bytes().replace(b"\r\n", b"\n")
        sha.update(f"{path.relative_to(_ROOT).as_posix()} {len(source)}\n".encode())
        sha.update(source)
    return sha.hexdigest()
