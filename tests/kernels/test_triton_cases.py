"""Public bug reports about Triton attention, each as a test that names its case.

Each check runs twice: as it is, and with the reported fault put in, where it has to fail. On a GPU
at the reported sizes; in the interpreter, or on the emulator, where the fault shows there too.
"""

import contextlib
import hashlib
import math
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from types import SimpleNamespace

import pytest
import torch

from kernels import oracle, parity, parse_numerics, triton_attention
from kernels.attention import attention
from kernels.triton_blocks import pad

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.interpreted),
]


@contextlib.contextmanager
def poisoned_memory():
    """What torch.empty hands out is NaN, or the largest integer: nothing unwritten looks right."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills, as PyTorch documents
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def few_programs(limit):
    """A launcher whose grid stops at `limit` programs, as an axis y or z would at 65,535."""
    right = triton_attention._programs
    return lambda rows, block, heads: (min(*right(rows, block, heads), limit),)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_case_028_unwritten_memory_is_never_read(device, fault):
    tensors = parity.inputs((1, 3, 3, 92, 92, 40, 40), kind="gaussian", device=device)

    def check():
        seen = set()
        for _ in range(3):
            with poisoned_memory():
                found = parity.run(
                    triton_attention, parse_numerics("paper"), tensors, causal=True, scale=0.158
                )
            assert all(torch.isfinite(x).all() for x in found.values())
            assert (found["ties"] <= 92).all()
            seen.add(_hash(found.values()))
        assert len(seen) == 1

    check()
    with fault(triton_attention, "_programs", few_programs(2)):
        check()


@pytest.mark.parametrize("device", DEVICES)
def test_case_024_huge_logits_give_the_value_back(device):
    """q = k = 133120: O = V, dV = dO, dQ = dK = 0, and no NaN."""
    x = torch.full((1, 1, 1, 16), 133120.0, device=device, dtype=torch.bfloat16)

    def check(text):
        for scale in (1 / 4, 0.1):
            got = parity.run(
                triton_attention, parse_numerics(text), (x, x, x, x), causal=True, scale=scale
            )
            assert torch.equal(got["out"], x) and torch.equal(got["dv"], x)
            assert not got["dq"].any() and not got["dk"].any()

    check("flash,tile=16")
    check("paper")
    with pytest.raises(AssertionError):  # the reported fault: exp without the whole maximum
        check("paper,softmax=shifted,shift=-1e12")


# -- in the interpreter: what tests/kernels/test_cases_attention.py asks of the emulator ----------

EXACT = parse_numerics("exact")


def gradients_and_output(tensors, **choices):
    return parity.run(
        triton_attention, EXACT, tensors, **(dict(causal=True, scale=1 / 4) | choices)
    )


@pytest.mark.interpreted
def test_case_031_views_equal_contiguous_copies(fault):
    fused = parity.inputs((2, 21, 21, 2, 2, 48, 48), dtype=torch.float32)[0]  # [B, T, H, 3 D]
    q, k, v = (x.transpose(1, 2) for x in fused.split(16, dim=-1))
    dO = torch.randn(2, 2, 16, 21).mT
    views = (q, k[:, :, :-1], v[:, :, :-1], dO)
    copies = gradients_and_output([x.contiguous() for x in views])

    def check():
        for name, x in gradients_and_output(views).items():
            assert torch.equal(x, copies[name]), name

    check()

    def ignores_strides(x, *_):
        return torch.as_strided(x, x.shape, torch.empty(x.shape).stride())

    with fault(triton_attention, "_prepare", ignores_strides):
        check()


@pytest.mark.interpreted
@pytest.mark.parametrize("causal", (True, False))
def test_case_033_the_backward_knows_whether_keys_are_hidden(causal, fault):
    tensors = parity.inputs((1, 2, 2, 30, 35, 16, 24), kind="gaussian", dtype=torch.float32)
    q, k, v, dO = tensors
    truth = oracle.attention_backward(dO, q, k, v, causal, 1 / 4)

    def check():
        got = gradients_and_output(tensors, causal=causal)
        for name, x in zip(("dq", "dk", "dv"), truth):
            assert (got[name] - x).abs().max() < 1e-5

    check()
    right = triton_attention.backward
    always = lambda *a, **kw: right(*a, **(kw | dict(causal=not causal)))  # noqa: E731
    with fault(triton_attention, "backward", always):
        check()


@pytest.mark.interpreted
def test_case_034_two_near_equal_sinks(fault):
    """Scores 38 and 38.123 in fp16: dV against float64."""
    q, k = (torch.zeros(1, 1, 24, 16, dtype=torch.float16) for _ in "qk")
    q[..., 0] = 1.0
    k[0, 0, 0, 0], k[0, 0, 4, 0] = 76.0, 76.246
    v, dO = (torch.randn(1, 1, 24, 16).half() for _ in range(2))
    truth = oracle.attention_backward(dO, q, k, v, True, 0.5)[2]

    def check():
        assert (gradients_and_output((q, k, v, dO), scale=0.5)["dv"] - truth).abs().max() < 1e-4

    check()
    coarse = parse_numerics("exact,backward_probabilities=bf16.2")
    with fault(sys.modules[__name__], "EXACT", coarse):
        check()


@pytest.mark.interpreted
@pytest.mark.parametrize("D", (40, 96))
def test_case_037_all_features_of_any_head_dimension_count(D, fault):
    tensors = parity.inputs((1, 1, 1, 19, 19, D, D), kind="gaussian", dtype=torch.float32)
    q, k, v, dO = tensors
    truth = (
        oracle.attention_forward(q, k, v, True, D**-0.5)[0],
        *oracle.attention_backward(dO, q, k, v, True, D**-0.5),
    )

    def check(scale=D**-0.5):
        got = gradients_and_output(tensors, scale=scale)
        for name, x in zip(("out", "dq", "dk", "dv"), truth):
            assert (got[name] - x).abs().max() < 1e-4

    check()
    with pytest.raises(AssertionError):  # the scale of the padded dimension
        check(triton_attention.pad(D) ** -0.5)
    with fault(triton_attention, "pad", lambda dim: min(32, pad(dim))):  # the first 32 only
        check()


def _hash(tensors):
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def in_any_order(dO, q, k, v, out, lse, high, *, numerics, causal, scale, seed):
    """A backward that adds eight blocks of queries in the order in which they happen to end."""
    dq, total_k, total_v = [None] * 8, 0, 0
    blocks = [x.chunk(8, dim=2) for x in (dO, q, out, lse)]
    for i in torch.randperm(8).tolist():
        dO, q, out, lse = (x[i].contiguous() for x in blocks)
        dq[i], dk, dv = triton_attention.backward(
            dO, q, k, v, out, lse, high, numerics=numerics, causal=causal, scale=scale, seed=seed
        )
        total_k, total_v = total_k + dk, total_v + dv
    return torch.cat(dq, 2), total_k, total_v


@pytest.mark.parametrize("device", DEVICES)
def test_case_036_the_backward_repeats_bit_for_bit(device):
    """dQ, dK and dV of ten passes (three in the interpreter)."""
    large = device == "cuda"
    shape, runs = ((2, 4, 4, 1024, 1024, 64, 64), 10) if large else ((1, 1, 1, 64, 64, 16, 16), 3)
    tensors = parity.inputs(shape, kind="gaussian", device=device)

    def check(module, text, causal):
        n = parse_numerics(text)
        seen = {
            _hash(parity.run(module, n, tensors, causal=causal, scale=1 / 8).values())
            for _ in range(runs)
        }
        assert len(seen) == 1

    check(triton_attention, "paper", True)
    check(triton_attention, "paper,gradients=fp32", False)
    atomic = SimpleNamespace(forward=triton_attention.forward, backward=in_any_order)
    with pytest.raises(AssertionError):
        check(atomic, "paper,gradients=fp32", False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_case_038_more_heads_than_an_axis_of_a_launch_holds(device, fault):
    """batch x heads = 65,538, where axes y and z end at 65,535 (8 of 5 in the interpreter)."""
    large = device == "cuda"
    B, H, limit = (10923, 6, 65_535) if large else (4, 2, 5)
    tensors = parity.inputs((B, H, H, 32, 32, 16, 16), device=device)
    n = parse_numerics("flash,tile=32")

    def run(part):
        with poisoned_memory():
            return parity.run(
                triton_attention, n, [x[part] for x in tensors], causal=True, scale=1 / 4
            )

    def check():
        whole = run(slice(None))
        for part in (slice(0, B // 2), slice(B // 2, None)):
            half = run(part)
            for name in ("out", "lse", "dq", "dk", "dv"):
                assert torch.equal(half[name], whole[name][part]), name

    check()
    with fault(triton_attention, "_programs", few_programs(limit)):
        check()


# -- case 44: true fp32 ---------------------------------------------------------------------------


def errors_of_fp32(D, device):
    """Largest error of O and relative one of the gradients, logits about 20, against float64."""
    shape = (1, 2, 2, 96, 96, D, D)
    q, k, v, dO = parity.inputs(shape, kind="gaussian", dtype=torch.float32, device=device)
    tensors = 2 * q, 2.5 * k * math.sqrt(64 / D), v, dO
    choices = dict(causal=True, scale=1 / 8)
    got = parity.run(triton_attention, parse_numerics("exact"), tensors, **choices)
    q, k, v, dO = tensors
    truth, _ = oracle.attention_forward(q, k, v, True, 1 / 8)
    grads = oracle.attention_backward(dO, q, k, v, True, 1 / 8)
    relative = [
        ((got[name].double() - x).abs().max() / x.abs().max()).item()
        for name, x in zip(("dq", "dk", "dv"), grads)
    ]
    return (got["out"].double() - truth).abs().max().item(), max(relative)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (64, 128))
def test_case_044_fp32_is_true_fp32(head_dim, parity_table):
    error, relative = errors_of_fp32(head_dim, "cuda")
    case = f"fp32 D{head_dim} vs float64"
    parity_table("exact", case, "ok", error=error, relative_gradient=relative)
    assert error < 1e-5 and relative < 1e-5


def in_a_copy(folder, file, right, wrong, code):
    """Run code in a process of its own on a copy of `kernels` in which `file` says `wrong`."""
    copytree(ROOT / "kernels", folder / "kernels", ignore=ignore_patterns("__pycache__"))
    copytree(ROOT / "tests/kernels", folder / "checks", ignore=ignore_patterns("__pycache__"))
    text = (folder / "kernels" / file).read_text()
    assert right in text
    (folder / "kernels" / file).write_text(text.replace(right, wrong))
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder / 'checks')!r}]\n{code}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TF32 = "triton_common.py", 'input_precision="ieee"', 'input_precision="tf32"'


@pytest.mark.gpu
def test_case_044_tf32_would_show(tmp_path):
    code = """
from test_triton_cases import errors_of_fp32
print(*errors_of_fp32(64, "cuda"))
"""
    error, relative = map(float, in_a_copy(tmp_path, *TF32, code).split())
    assert error > 1e-4 and relative > 1e-4


def test_case_044_tf32_would_show_in_the_compiled_code(tmp_path, monkeypatch):
    """The check of `test_triton_compile`, on kernels whose dots take TF32."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = """
import torch
from kernels import parse_numerics
from kernels.triton_compile import compile_offline
exact = parse_numerics("exact")
built = compile_offline("forward", exact, head_dim=16, dtype=torch.float32, usage=False)
print("tf32" in built.ptx, built.matrix_instructions)
"""
    assert in_a_copy(tmp_path, *TF32, code).startswith("True ('")


# -- cases 48 and 50: compilers -------------------------------------------------------------------


@contextlib.contextmanager
def compilations():
    """A list that grows by the name of each kernel that Triton compiles meanwhile."""
    from triton import knobs

    names, before = [], knobs.runtime.jit_cache_hook

    def note(*, fn, already_compiled, **_):
        if not already_compiled:
            names.append(fn.name.rpartition(".")[2])

    knobs.runtime.jit_cache_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_cache_hook = before


@pytest.mark.gpu
def test_case_048_other_lengths_compile_nothing_anew():
    """At most one more dK, dV kernel: lengths that its block divides have one without a mask."""

    def step(T, numerics="paper,tile=64"):
        q, k, v = (
            x.requires_grad_() for x in torch.randn(3, 1, 2, T, 48, device="cuda").bfloat16()
        )
        attention(q, k, v, numerics=numerics, backend="triton").float().sum().backward()

    def check(change):
        step(1024)
        step(1023)
        with compilations() as names:
            for T in (512, 511, 100, 2048):
                step(T, **change(T))
        assert not names, names

    check(lambda T: {})
    with pytest.raises(AssertionError):  # a choice that depends on the length
        check(lambda T: dict(numerics=f"paper,output_bits={1 + T % 5}"))


def test_case_048_the_first_call_says_that_it_compiles(capsys, fault):
    def check():
        for _ in range(3):
            triton_attention._announce()
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "compile" in told

    triton_attention._announce.cache_clear()
    check()
    with fault(triton_attention, "_announce", triton_attention._announce.__wrapped__):
        check()


@pytest.mark.gpu
def test_case_048_the_line_comes_before_the_first_launch(capsys):
    triton_attention._announce.cache_clear()
    q, k, v = torch.randn(3, 1, 2, 16, 16, device="cuda").bfloat16()
    for _ in range(2):
        attention(q, k, v, numerics="flash", backend="triton")
    assert capsys.readouterr().err.count("kernels compile at their first call") == 1


def agrees_with_eager(step, compiled, leaves):
    """O and the gradients of a compiled step, bit for bit, for one numerics after the other."""
    for text in ("flash", "paper", "paper,output_bits=2"):
        eager, fast = step(*leaves, text), compiled(*leaves, text)
        assert torch.equal(eager, fast), text
        want = torch.autograd.grad(eager.float().square().sum(), leaves)
        got = torch.autograd.grad(fast.float().square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, want)), text


@pytest.mark.parametrize(
    "device, backend, compiler",
    [
        pytest.param("cuda", "triton", "inductor", marks=pytest.mark.gpu),
        ("cpu", "emulated", "aot_eager"),
    ],
)
def test_case_050_a_compiled_graph_sees_its_numerics(device, backend, compiler):
    """The fault: numerics that the graph does not see, so that all share the first one's code."""
    q, k, v, _ = parity.inputs((1, 2, 2, 100, 100, 64, 64), kind="gaussian", device=device)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]

    def step(q, k, v, numerics):
        return attention(q * 1.0, k, v, numerics=numerics, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    agrees_with_eager(step, compiled, leaves)

    hidden = []

    @torch.compiler.assume_constant_result
    def current():
        return hidden[-1]

    inner = torch.compile(lambda q, k, v: step(q, k, v, current()), backend=compiler)

    def blind(q, k, v, numerics):
        hidden.append(numerics)
        return inner(q, k, v)

    with pytest.raises(AssertionError):
        agrees_with_eager(step, blind, leaves)
