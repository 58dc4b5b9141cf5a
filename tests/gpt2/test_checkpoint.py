"""Weights from everywhere, nothing from pickles, and errors that say what to do."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from trainer_helpers import tiny

from gpt2.checkpoint import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    load_weights,
    prune,
    read_weights,
    save_checkpoint,
)
from gpt2.model import GPT


def model(seed=0, **changes):
    return GPT(tiny("files:unused", init_seed=seed, **changes), 65)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize(
    "prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_prefixes_are_stripped_however_nested(prefix):
    source, target = model(1), model(2)
    load_weights(target, {prefix + k: v for k, v in source.state_dict().items()})
    assert same(source, target)


def test_a_missing_or_foreign_key_is_an_error():
    tensors = dict(model(1).state_dict())
    with pytest.raises(CheckpointError, match="has no place"):
        load_weights(model(2), tensors | {"transformer.h.9.ln_1.weight": torch.ones(16)})
    del tensors["transformer.h.0.ln_1.weight"]
    target = model(2)
    with pytest.raises(CheckpointError, match="'transformer.h.0.ln_1.weight' is missing"):
        load_weights(target, tensors)
    assert same(target, model(2))


def test_another_shape_is_named():
    with pytest.raises(CheckpointError, match="vocab_size"):
        load_weights(GPT(tiny("files:unused"), 66), model().state_dict())


def hugging_face(source: GPT, head: bool) -> dict:
    """GPT-2 as transformers stores it: Conv1D transposed, stored masks, no `transformer.`."""
    out = {}
    for name, tensor in source.named_parameters():
        conv = name.endswith(
            ("c_attn.weight", "attn.c_proj.weight", "c_fc.weight", "mlp.c_proj.weight")
        )
        key = name if head else name.removeprefix("transformer.")
        out[key] = tensor.detach().T.contiguous() if conv else tensor.detach()
    stem = "transformer." if head else ""
    out[f"{stem}h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    out[f"{stem}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    if head:
        out["lm_head.weight"] = out["transformer.wte.weight"].clone()
    return out


@pytest.mark.parametrize("head", [True, False])
def test_hugging_face_gpt2_loads_transposed(tmp_path, head):
    source, target = model(1, bias=True), model(2, bias=True)
    save_file(hugging_face(source, head), tmp_path / "model.safetensors")
    load_weights(target, read_weights(tmp_path))
    assert same(source, target)


def test_nanogpt_checkpoint_loads(tmp_path):
    source, target = model(1), model(2)
    state = {f"_orig_mod.{k}": v for k, v in source.state_dict().items()}
    torch.save({"model": state, "iter_num": 5, "config": {"n_layer": 2}}, tmp_path / "ckpt.pt")
    load_weights(target, read_weights(tmp_path / "ckpt.pt"))
    assert same(source, target)


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-code-ran",)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_hostile_pickle_is_refused_and_never_run(tmp_path, monkeypatch, writer):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ckpt.pt"
    if writer == "torch":
        torch.save({"model": Hostile()}, path)
    else:
        path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError):
        read_weights(path)
    assert not (tmp_path / "hostile-code-ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a tensor", b"\x80" * 100])
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_garbage_is_an_error_in_one_sentence(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / name)


def test_wrong_paths_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        read_weights(tmp_path / "nosuch.pt")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "nosuch")
    with pytest.raises(CheckpointError, match="holds no"):
        read_weights(tmp_path)


def save(folder, step):
    return save_checkpoint(
        folder, step, {"w": torch.arange(4.0)}, {"m/w": torch.ones(4)}, {"a": 1}
    )


def test_checkpoints_hold_plain_files_only(tmp_path):
    path = save(tmp_path, 7)
    assert {p.name for p in path.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    loaded = load_newest(tmp_path)
    assert loaded.step == 7 and loaded.state == {"a": 1}
    assert torch.equal(loaded.model["w"], torch.arange(4.0))
    assert load_newest(tmp_path / "nothing") is None


def test_unfinished_folders_are_no_checkpoints(tmp_path):
    save(tmp_path, 7)
    (tmp_path / "checkpoints" / ".step_00000009.1").mkdir()
    (tmp_path / "checkpoints" / "step_00000008").mkdir()
    assert [s for s, _ in list_checkpoints(tmp_path)] == [7]


def test_pruning_keeps_the_newest_and_those_before_an_excursion(tmp_path):
    for step in range(10, 70, 10):
        save(tmp_path, step)
    prune(tmp_path, 2, excursion_from=35)
    assert [s for s, _ in list_checkpoints(tmp_path)] == [20, 30, 50, 60]
    prune(tmp_path, 2)
    assert [s for s, _ in list_checkpoints(tmp_path)] == [50, 60]
