"""What a measured number needs beside it: the GPU's driver. Needs neither Triton nor a GPU."""

from __future__ import annotations

import subprocess


def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as '580.159.04'; None where nvidia-smi is silent."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.splitlines()[0].strip() if told.strip() else None
