"""What the Triton backend refuses, in one sentence each, on a machine without a GPU."""

import inspect
import os
import subprocess
import sys
from functools import lru_cache

import pytest
import torch

from kernels import backends, parse_numerics, resolve_backend
from kernels import triton_attention as backend

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("authors", "reference_format=bf16"),
        ("exact,compute=fp64", "fp64"),
        ("paper,unnormalized=fp16", "8 exponent bits"),
        ("paper,output=bf16:toward_zero", "nearest even or stochastically"),
        ("flash,row_sum=bf16", "under reference='row'"),
        ("paper,row_sum=bf16:stochastic", "to nearest even"),
        ("paper,row_sum_floor=1e-10", "no floor"),
        ("paper,accumulate=tile", "once"),
        ("paper,softmax=clamped", "clamp"),
        ("stabilized,reference=running", "decided per row"),
    ],
)
def test_numerics_beyond_the_kernels_are_refused_by_name(text, reason):
    why = backend.supports(parse_numerics(text), device="cuda", dtype=torch.bfloat16)
    assert reason in why and "\n" not in why


def test_numerics_in_one_tile_are_served(monkeypatch):
    """The authors' emulation carries bf16 sums from tile to tile of 512 keys."""
    on_gpu = lambda n, **asked: backend._refused_numerics(n)  # noqa: E731
    monkeypatch.setattr(backends, "_triton_supports", on_gpu)

    def resolved(text, keys, **asked):
        backends._resolve.cache_clear()
        return resolve_backend(text, "cuda", keys=keys, **asked)

    assert resolved("authors", 512) == (
        "triton", "a CUDA device, and triton honours these numerics in one tile"
    )  # fmt: skip
    assert resolved("authors", 512, backend="triton")[0] == "triton"
    for keys in (513, None):
        name, reason = resolved("authors", keys)
        assert name == "emulated" and "reference_format=bf16" in reason
        with pytest.raises(ValueError, match="reference_format=bf16"):
            resolved("authors", keys, backend="triton")
    # its floor under l stays where the reference is not the row maximum
    sfa = "authors,softmax=stabilized,decide=tile"
    assert resolved(sfa, 100)[0] == "emulated"
    assert resolved("flash", 100)[1] == "a CUDA device, and triton honours these numerics"
    backends._resolve.cache_clear()


def test_inputs_beyond_the_kernels_are_refused_by_name():
    n = parse_numerics("paper")
    assert "float64" in backend.supports(n, device="cuda", dtype=torch.float64)
    assert "mask" in backend.supports(n, device="cuda", dtype=torch.bfloat16, mask=True)
    with pytest.raises(ValueError, match="no mask"):
        x = torch.zeros(1, 1, 2, 8)
        mask = torch.ones(2, 2, dtype=torch.bool)
        backend.forward(x, x, x, numerics=n, causal=True, scale=1.0, mask=mask)


def test_case_046_old_gpus_fall_back_with_their_capability(fault, monkeypatch):
    """Compute capability 7.5 has no bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(backend, "_shared_limit", lambda device: 65_536)

    def check():
        backends._resolve.cache_clear()
        name, reason = resolve_backend("paper", "cuda", dtype=torch.bfloat16)
        assert name == "emulated" and "8.0" in reason and "7.5" in reason

    check()
    with fault(backend, "_refused_capability", lambda capability: None):
        check()
    backends._resolve.cache_clear()
    assert backend._refused_capability((8, 0)) is None


class Unread:
    """Prepared q, k or v of a call that is refused before anything but its device is read."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "text, capability, reason",
    [
        ("flash", (8, 0), "compute capability 8.0 is not 9.0"),
        ("paper", (0, 0), "compute capability 0.0 is not 9.0"),
        (
            "stabilized,reference=running",
            (9, 0),
            "softmax=stabilized, decide=row with reference=r",
        ),
        ("flash,scores=bf16", (9, 0), "scores=bf16, unnormalized=fp32: not served"),
    ],
)
def test_the_hopper_forward_is_ruled_out_without_a_look_at_the_tensors(
    text, capability, reason, monkeypatch
):
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(backend, "_capability", lambda device: capability)
    refused = backend._refused_by_hopper(parse_numerics(text), [Unread] * 3, True, 0.125, False)
    assert refused.startswith(reason)


def test_the_hopper_forward_looks_at_tensors_where_they_decide(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(backend, "_capability", lambda device: (9, 0))
    choices = (True, 0.125, False)
    for text, T, reason in (("flash", 1024, None), ("paper", 9, "5 keys on average")):
        q = torch.zeros(1, 1, T, 64, dtype=torch.bfloat16)
        n = parse_numerics(text)
        why = backend._refused_by_hopper(n, (q, q, q), *choices)
        assert why is None if reason is None else reason in why
        told = dict(numerics=n, causal=True, scale=0.125, probe=False)
        served = backend.forward_kernel_name(q, q, q, **told)
        assert served == ("hopper" if reason is None else "general")
        wide = [q, q, q.float()]
        assert "inputs are None" in backend._refused_by_hopper(n, wide, *choices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_gpu_is_said():
    n = parse_numerics("paper")
    if os.environ.get("TRITON_INTERPRET") != "1":
        assert "need a CUDA device" in backend.supports(n, device="cpu", dtype=torch.bfloat16)
        assert "no CUDA driver" in backend.supports(n, device="cuda", dtype=torch.bfloat16)


def told_in_a_new_process(before, after="", runs=1):
    """stdout and stderr of a process that asks `supports`; code runs around Triton's import."""
    code = f"""
import os, triton, torch
{before}
from kernels import triton_attention, parse_numerics
{after}
for _ in range({runs}):
    why = triton_attention.supports(parse_numerics("paper"), device="cpu", dtype=torch.bfloat16)
print(why)
"""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "change, warned, why",
    [
        ('triton.__version__ = "9.9.1"', "Triton 9.9.1 was not tested", "need a CUDA device"),
        ("del triton.knobs", "", "this version of Triton does not fit"),
    ],
)
def test_case_049_other_versions_of_triton_get_a_sentence(change, warned, why):
    def check(after=""):
        out, errors = told_in_a_new_process(change, after, runs=2)
        assert why in out, out + errors
        assert errors.count("was not tested") == (1 if warned else 0) and warned in errors

    check()
    if not warned:  # the reported fault: a missing name of the library reaches the user
        with pytest.raises(AssertionError, match="AttributeError"):
            check("triton_attention._refused_machine = lambda device: triton.knobs.runtime")


def test_case_048_nothing_is_tuned_at_run_time(fault):
    """No autotuner wraps a kernel, and a launch plan does not know the lengths."""
    from kernels import triton_backward, triton_forward

    def check():
        names = ("grad_keys_kernel", "grad_queries_kernel", "delta_product_kernel")
        for kernel in (
            triton_forward.forward_kernel,
            *(getattr(triton_backward, n) for n in names),
        ):
            assert type(kernel).__name__ in ("JITFunction", "InterpretedFunction")
        asked = "kernel", "key", "D", "DV", "itemsize", "limit", "scale", "extra"
        assert tuple(inspect.signature(backend._plan.__wrapped__).parameters) == asked
        key = parse_numerics("paper").key
        plans = [backend._plan("forward", key, 64, 64, 2, 232_448, 0.125, False) for _ in "ab"]
        assert plans[0] is plans[1]

    check()

    class Autotuner:
        pass

    with fault(triton_forward, "forward_kernel", Autotuner()):
        check()

    @lru_cache
    def by_length(kernel, key, Tq, D, DV, itemsize, limit, scale, extra):
        return backend._plan.__wrapped__(kernel, key, D, DV, itemsize, limit, scale, extra)

    with fault(backend, "_plan", by_length):
        check()


def test_case_047_an_interpreter_switched_on_too_late_is_detected():
    """TRITON_INTERPRET set after `import triton`."""

    def check(after=""):
        out, errors = told_in_a_new_process('os.environ["TRITON_INTERPRET"] = "1"', after)
        assert "set it before Python starts" in out, out + errors

    check()
    with pytest.raises(AssertionError):
        check("from kernels import triton_common; triton_common.interpreter_misuse = str")
