"""Checkpoints: safetensors and JSON, written whole or not at all, read without running any code.

    checkpoints/step_00001000/
        model.safetensors       weights by nanoGPT's names, fp32
        optimizer.safetensors   optimiser state, 'exp_avg/transformer.wte.weight' and so on
        state.json              step, outcome tracker, loss scaler, sha256 of the two files

A folder is filled under another name, synced, then renamed: a kill while saving leaves the older
ones untouched. A damaged newest checkpoint is passed over with a warning; a wrong path is an
error. Nothing else is state: batches, dropout and stochastic rounding are functions of the step.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PREFIXES = ("_orig_mod.", "module.")
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model."""


@dataclass
class Checkpoint:
    step: int
    path: Path
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint of a run, oldest first."""
    found = []
    for path in (Path(run_dir) / "checkpoints").glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / "state.json").exists():
            found.append((int(match[1]), path))
    return sorted(found)


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    state: dict,
) -> Path:
    """Write a checkpoint of a run atomically and return its folder. `state` is plain JSON."""
    parent = Path(run_dir) / "checkpoints"
    final = parent / f"step_{step:08d}"
    temporary = parent / f".step_{step:08d}.{os.getpid()}"
    for leftover in parent.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    sums = {}
    for name, tensors in (("model", model), ("optimizer", optimizer)):
        file = temporary / f"{name}.safetensors"
        plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        save_file(plain, file, metadata={"format": "pt"})
        sums[file.name] = _sha256(file)
        _sync(file)
    text = json.dumps({"step": step, "sha256": sums, "state": state}, indent=1, allow_nan=False)
    (temporary / "state.json").write_text(text + "\n")
    _sync(temporary / "state.json")
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    _sync(parent)
    return final


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read one checkpoint folder. Raises CheckpointError naming what is missing or damaged."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give the folder of a checkpoint")
    try:
        head = json.loads((path / "state.json").read_text())
        for name, expected in head["sha256"].items():
            if _sha256(path / name) != expected:
                raise CheckpointError(f"{path / name} is damaged: its contents changed")
        model = load_file(path / "model.safetensors", device=str(device))
        optimizer = load_file(path / "optimizer.safetensors", device="cpu")
        return Checkpoint(head["step"], path, model, optimizer, head["state"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from None


def load_newest(run_dir: Path, device: torch.device | str = "cpu") -> Checkpoint | None:
    """The newest checkpoint that can be read; None if the run never saved one.

    A damaged one is passed over with a warning. If all are damaged, CheckpointError: a run that
    once had state never starts afresh by itself.
    """
    found = list_checkpoints(run_dir)
    for _, path in reversed(found):
        try:
            return load_checkpoint(path, device)
        except CheckpointError as error:
            warnings.warn(f"{error}; falling back to the checkpoint before it", stacklevel=2)
    if found:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {run_dir} can be read; "
            "delete that run folder to start it anew"
        )
    return None


def prune(run_dir: Path, keep: int, excursion_from: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints.

    While the loss stands above the divergence threshold (since step `excursion_from`), the last
    `keep` of before it stay as well: they are the pre-divergence state that forks need.
    """
    found = list_checkpoints(run_dir)
    kept = {step for step, _ in found[-keep:]}
    if excursion_from is not None:
        kept |= {step for step, _ in [c for c in found if c[0] <= excursion_from][-keep:]}
    for step, path in found:
        if step not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file or folder to disk; systems that cannot open a folder skip it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# -- weights from elsewhere -----------------------------------------------------------------------


def strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes of torch.compile and DistributedDataParallel, in any order."""

    def strip(name: str) -> str:
        while name.startswith(PREFIXES):
            name = name.partition(".")[2]
        return name

    return {strip(name): tensor for name, tensor in tensors.items()}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Tensors by name from our checkpoint folder, a Hugging Face folder, *.safetensors, or *.pt.

    A .pt or .bin file is read with weights_only=True: tensors and plain types, never code. Raises
    CheckpointError for anything else.
    """
    path = Path(path)
    if path.is_dir():
        for name in ("model.safetensors", "pytorch_model.bin", "ckpt.pt"):
            if (path / name).exists():
                return read_weights(path / name)
        raise CheckpointError(f"{path} holds no model.safetensors, pytorch_model.bin or ckpt.pt")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a weights file or its folder")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; what matters raises
            data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values ({first})"
        ) from None
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or no weights file ({error})") from None
    if isinstance(data, dict) and isinstance(data.get("model"), dict):
        data = data["model"]  # nanoGPT's ckpt.pt
    if not isinstance(data, dict) or not all(isinstance(v, Tensor) for v in data.values()):
        raise CheckpointError(f"{path} holds no dictionary of tensors")
    return data


def weights_sha256(path: str | Path) -> str:
    """A hash of the tensors that `read_weights` finds, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(strip_prefixes(read_weights(path)).items()):
        plain = tensor.detach().float().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()


def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into a GPT by name, strictly. Accepts our names (nanoGPT's), prefixes of
    torch.compile and DDP, and Hugging Face's GPT-2 (its Conv1D matrices are transposed).

    Raises CheckpointError for a missing, superfluous or misshapen tensor.
    """
    given = strip_prefixes(tensors)
    if "wte.weight" in given:  # Hugging Face's GPT2Model, without the head
        given = {f"transformer.{k}": v for k, v in given.items()}
    given = {
        k: v
        for k, v in given.items()
        if not k.endswith((".attn.bias", ".attn.masked_bias"))  # stored masks, not weights
    }
    wanted = dict(model.named_parameters())
    embedding, head = given.get("transformer.wte.weight"), given.get("lm_head.weight")
    if "lm_head.weight" not in wanted and head is not None:
        if embedding is not None and not torch.equal(embedding, head):
            raise CheckpointError(
                "the output head differs from the embedding; use tie_embeddings=false"
            )
        given.pop("lm_head.weight")
    if _is_transposed(given, wanted):
        given = {k: v.T if k.endswith(CONV1D) else v for k, v in given.items()}
    missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or extra:
        what = f"{missing[0]!r} is missing" if missing else f"{extra[0]!r} has no place"
        raise CheckpointError(
            f"these weights are of another model: {what} "
            f"({len(missing)} missing, {len(extra)} too many); check bias, n_layer, tie_embeddings"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            if parameter.shape != given[name].shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(given[name].shape)}, the model needs "
                    f"{tuple(parameter.shape)}; set vocab_size, block_size and n_embd to match"
                )
            parameter.copy_(given[name])


def _is_transposed(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether matrices lie as in Hugging Face's Conv1D, judged by c_attn, which is not square."""
    name = "transformer.h.0.attn.c_attn.weight"
    if name not in given or name not in wanted:
        return False
    shape, target = given[name].shape, wanted[name].shape
    return shape != target and shape == target[::-1]
