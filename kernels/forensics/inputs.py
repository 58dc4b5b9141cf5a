"""One head's tensors from any framework, checked once and held in one shape.

bf16 values travel through NumPy and .npz as float32 holding bf16 values; that loses nothing, so a
file written by JAX, TensorFlow or PyTorch gives the same answer as the tensors themselves.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..formats import BF16, FORMATS, FloatFormat
from ..numerics import Site
from ..rounding import round_to

NAMES = ("q", "k", "v", "dO", "X", "W_Q")
_ALIASES = {
    "do": "dO",
    "dout": "dO",
    "grad_out": "dO",
    "grad_output": "dO",
    "x": "X",
    "w_q": "W_Q",
    "wq": "W_Q",
} | {name: name for name in ("q", "k", "v")}


@dataclass(frozen=True)
class Head:
    """One attention head on N sequences: float32, or float64 if any value needs it.

    q [N, T, D], k [N, Tk, D], v [N, Tk, Dv], dO [N, T, Dv] the gradient of the head's output,
    X [N, T, C] the input of its query projection, W_Q [D, C] with q = X W_Q^T (before any scale).
    dO, X and W_Q may be None; functions that need one say so.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dO: Tensor | None = None
    X: Tensor | None = None
    W_Q: Tensor | None = None

    @property
    def sequences(self) -> int:
        return self.q.shape[0]

    @property
    def rows(self) -> int:
        """Queries per sequence, T."""
        return self.q.shape[1]

    def need(self, *names: str) -> None:
        """Raise ValueError if one of these tensors was not given."""
        for name in names:
            if getattr(self, name) is None:
                raise ValueError(f"this measurement needs {name}; add it to the head's tensors")

    def grid(self, name: str) -> str:
        """The narrowest common format that holds every value of a tensor: 'bf16', 'fp32', ..."""
        x = getattr(self, name)
        for label in ("bf16", "fp16", "fp32"):
            if torch.equal(round_to(x, FORMATS[label]), x):
                return label
        return "fp64"


def as_head(q, k=None, v=None, dO=None, X=None, W_Q=None, *, index=None) -> Head:
    """A checked `Head` from arrays, from a mapping of them, or from a file.

    q: an array (then k and v too), a mapping or a path to .npz or .safetensors with keys q, k, v
    and perhaps dO, X, W_Q, or a Head (returned as it is). Arrays: torch or what `numpy.asarray`
    takes, bfloat16 included; [T, D] for one sequence, [N, T, D] for several.
    index: (batch, head) or (head,) to pick from [B, H, T, D] tensors; (head,) keeps the batch as N
    sequences. X is then [B, T, C]. Raises ValueError with one sentence for a missing key, a wrong
    shape, NaN or infinity.
    """
    if isinstance(q, Head):
        return q
    if isinstance(q, (str, Path)):
        q = _read(Path(q))
    if isinstance(q, Mapping):
        given = {_ALIASES.get(str(name).lower()): value for name, value in q.items()}
        missing = [name for name in ("q", "k", "v") if name not in given]
        if missing:
            found = ", ".join(map(str, q)) or "nothing"
            raise ValueError(f"missing {', '.join(missing)}; found {found}; keys are {NAMES}")
    else:
        given = dict(q=q, k=k, v=v, dO=dO, X=X, W_Q=W_Q)
        for name in ("k", "v"):
            if given[name] is None:
                raise ValueError(f"missing {name}; give q, k and v")
    tensors = {name: _tensor(given[name], name) for name in NAMES if given.get(name) is not None}
    if index is not None:
        tensors = {name: _pick(x, name, tuple(index)) for name, x in tensors.items()}
    wide = any(x.dtype == torch.float64 for x in tensors.values())
    dtype = torch.float64 if wide else torch.float32
    tensors = {name: _shaped(x.to(dtype), name) for name, x in tensors.items()}
    head = Head(**tensors)
    _check_shapes(head)
    return head


def load_head(path, *, index=None) -> Head:
    """`as_head` for a file. Raises FileNotFoundError or ValueError, one sentence each."""
    return as_head(Path(path), index=index)


def _read(path: Path) -> Mapping:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give an .npz or .safetensors file")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(str(path))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable .safetensors file: {error}") from None
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path} is not a readable .npz file: {error}") from None
    raise ValueError(f"{path}: {path.suffix or 'no suffix'} is not read; use .npz or .safetensors")


def _tensor(value, name: str) -> Tensor:
    """A detached CPU tensor, float32 or float64."""
    if isinstance(value, Tensor):
        x = value.detach().cpu()
    else:
        try:
            array = np.asarray(value)
            if array.dtype.name in ("bfloat16", "float16") or array.dtype.kind not in "f":
                array = array.astype(np.float32)
            x = torch.from_numpy(np.ascontiguousarray(array))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} is not an array of numbers: {error}") from None
    # numbers that float32 holds are float32's, however wide the file that they came in
    x = x if x.dtype == torch.float64 and not torch.equal(x.float().double(), x) else x.float()
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise ValueError(
            f"{name} has {bad} of {x.numel()} values that are NaN or infinite; "
            "capture the head at a step before it became nonfinite"
        )
    return x


def _pick(x: Tensor, name: str, index: tuple[int, ...]) -> Tensor:
    if len(index) not in (1, 2):
        raise ValueError(f"index {index} is not understood; use (head,) or (batch, head)")
    if name == "W_Q":
        return x
    try:
        if name == "X":
            return x if len(index) == 1 else x[index[0]]
        return x[:, index[0]] if len(index) == 1 else x[index]
    except IndexError:
        raise ValueError(
            f"index {index} does not fit {name} of shape {tuple(x.shape)}; "
            "tensors are [B, H, T, D], X is [B, T, C]"
        ) from None


def _shaped(x: Tensor, name: str) -> Tensor:
    want, text = (2, "[D, C]") if name == "W_Q" else (3, "[T, D] or [N, T, D]")
    while x.dim() > want and 1 in x.shape[:2]:
        x = x.squeeze(0) if x.shape[0] == 1 else x.squeeze(1)
    if want == 3 and x.dim() == 2:
        x = x.unsqueeze(0)
    if x.dim() != want:
        hint = "; pick one head with index=(batch, head)" if x.dim() == 4 else ""
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {text}{hint}")
    return x.contiguous()


def _check_shapes(head: Head) -> None:
    n, t, d = head.q.shape
    tk, dv = head.k.shape[1], head.v.shape[2]
    if 0 in (n, t, d, tk, dv):
        raise ValueError(
            f"nothing to examine: q is {tuple(head.q.shape)}, v is {tuple(head.v.shape)}"
        )
    want = {"k": (n, tk, d), "v": (n, tk, dv), "dO": (n, t, dv)}
    for name, shape in want.items():
        x = getattr(head, name)
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} where {shape} is needed: q is "
                f"{tuple(head.q.shape)}, k {tuple(head.k.shape)}, v {tuple(head.v.shape)}"
            )
    if head.X is not None and head.X.shape[:2] != (n, t):
        raise ValueError(
            f"X has shape {tuple(head.X.shape)}; it needs the {n} x {t} rows of q, [N, T, C]"
        )
    if head.W_Q is not None:
        width = head.X.shape[2] if head.X is not None else head.W_Q.shape[1]
        if tuple(head.W_Q.shape) != (d, width):
            raise ValueError(
                f"W_Q has shape {tuple(head.W_Q.shape)}, not [D, C] = ({d}, {width}); "
                "give this head's rows, so that q = X W_Q^T"
            )


def offset_values(head: Head, amount: float = -1.0, fmt: FloatFormat = BF16) -> Head:
    """The head with V + amount * c, c the mean of each feature of V over all its keys.

    In exact arithmetic O moves by amount * c, dP and delta by the same dO . c, and dS not at all.
    amount = -1 balances V's signs; +1 is its sham, as large a change that makes V more one-sided.
    V is rounded to `fmt` again, and an ulp of O changes with its size: compare errors in ulps. One
    offset gives the values of a feature common last bits, so a small bias can remain.
    """
    mean = head.v.mean((0, 1), keepdim=True)
    return replace(head, v=round_to(head.v + amount * mean, fmt))


def describe(head: Head, site: Site) -> dict[str, str]:
    """Shape and grid of every tensor given, and whether the `inputs` site rounds it first."""
    told = {}
    for field in fields(head):
        x = getattr(head, field.name)
        if x is None:
            continue
        told[field.name] = f"{tuple(x.shape)} {head.grid(field.name)}"
        if field.name in ("q", "k", "v", "dO") and not torch.equal(round_to(x, site.format), x):
            told[field.name] += f", rounded to {site.format} first"
    return told
