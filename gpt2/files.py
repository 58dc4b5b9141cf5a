"""Writing files so that a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path


def write_atomically(path, write) -> None:
    """Call `write(file)` on a temporary binary file beside `path`, then move it into place."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path, data) -> None:
    """Strict JSON (no NaN), written atomically."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda f: f.write(text.encode("utf-8")))


@contextlib.contextmanager
def locked(path):
    """Hold an advisory lock on `path` while inside; another process waits.

    The system releases it when the holder dies. Where there is no such lock (Windows), nothing is
    held: work may then be done twice, and the atomic moves keep the result right.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
