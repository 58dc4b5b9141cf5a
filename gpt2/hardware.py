"""What the machine can do: peak arithmetic by device name, utilisation, warnings.

MFU (model FLOPs utilisation) follows PaLM (Chowdhery et al. 2022), appendix B: the arithmetic that
the model needs, 6 N per token plus attention, over the device's dense bf16 peak. An unknown device
has no peak, so its MFU is None ("n/a"), never a number.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .fingerprint import code_fingerprint

# Dense bf16 tensor-core peaks in FLOP/s, from the vendors' data sheets (not the sparse figures,
# which are twice as large). The first name found in the device's name counts.
PEAK_FLOPS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A10G", 70e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one device by its name, None if it is not in the table."""
    return next((peak for name, peak in PEAK_FLOPS if name.lower() in device_name.lower()), None)


def flops_per_token(n_params: int, n_layer: int, n_head: int, head_dim: int, T: int) -> float:
    """Training FLOPs per token: 6 N + 12 L H D T (PaLM, appendix B; causality not discounted).

    n_params: parameters that multiply (without the position table). GPT-2 small at T = 1,024:
    6 * 123.6e6 + 12 * 12 * 12 * 64 * 1024 = 8.55e8.
    """
    return 6.0 * n_params + 12.0 * n_layer * n_head * head_dim * T


def mfu(tokens_per_s: float, flops: float, device_name: str, devices: int = 1) -> float | None:
    """Share of the devices' peak that the model's arithmetic takes; None for an unknown device."""
    peak = peak_flops(device_name)
    return None if peak is None else tokens_per_s * flops / (peak * devices)


def mfu_text(value: float | None) -> str:
    """'41.2 %', 'n/a', or a flag on the impossible."""
    if value is None:
        return "n/a"
    flag = " (impossible: wrong peak or count)" if value > 1 else ""
    return f"{100 * value:.1f} %{flag}"


def device_name(device: torch.device | str) -> str:
    """The GPU's or the processor's own name."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def warn_about_precision(dtype: str, device: torch.device) -> str | None:
    """Warn where the autocast type is not native to the device; return the sentence or None."""
    sentence = None
    if dtype == "bfloat16" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        sentence = bf16_warning(torch.cuda.get_device_name(device), capability)
    elif dtype != "float32" and device.type == "cpu":
        sentence = (
            f"dtype={dtype} on a CPU is several times slower than float32; attention's low "
            "precision is simulated in float32 anyway, so use dtype=float32 unless you mean it"
        )
    if sentence:
        warnings.warn(sentence, stacklevel=2)
    return sentence


def bf16_warning(name: str, capability: tuple[int, int]) -> str | None:
    """The sentence for a GPU without native bf16 (compute capability below 8.0), else None."""
    if capability >= (8, 0):
        return None
    major, minor = capability
    return (
        f"{name} (compute capability {major}.{minor}) has no native bf16: matrix products in "
        "bfloat16 are emulated by PyTorch in float32 and are slow; use dtype=float16 (with loss "
        "scaling) or float32"
    )


def visible(device: str) -> dict[str, str]:
    """The environment in which a process sees that device alone, and as its first.

    "cuda:1" with CUDA_VISIBLE_DEVICES=4,6 is GPU 6. Raises ValueError if it is not there.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return {}
    if kind != "cuda" or not index.isdigit():
        raise ValueError(f"device {device!r} is unknown; use cpu, or cuda:0, cuda:1, ...")
    count = torch.cuda.device_count()
    if int(index) >= count:
        raise ValueError(f"device {device}: PyTorch sees {count} GPUs here; choose another")
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = names.split(",")[int(index)].strip() if names else index
    return {"CUDA_VISIBLE_DEVICES": chosen}


def environment(device: torch.device, world_size: int = 1) -> dict:
    """Where a run happened, as JSON: for captions and provenance."""
    return {
        "machine": device_name(device),
        "device": device.type,
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "commit": commit(),
        "code": code_fingerprint()[:12],
        "command": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The repository's commit, with '+' if the tree was changed; None outside a repository."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
        return head + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
