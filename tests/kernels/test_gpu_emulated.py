"""The emulator and the roundings on a GPU: bit for bit where that can be asked, else close."""

from contextlib import nullcontext

import pytest
import torch

from kernels import BF16, E4M3, E5M2, FP16, Probe, attention, emulated, oracle, round_to
from kernels.rounding import ulp

pytestmark = pytest.mark.gpu


def _qkv(dtype=torch.float32, B=2, H=3, T=65, D=40):
    return [torch.randn(B, H, T, D).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("mode", ["nearest_even", "nearest_away", "toward_zero"])
@pytest.mark.parametrize("fmt", [BF16, BF16.cut(3), FP16, E4M3, E5M2], ids=str)
def test_rounding_has_the_same_bits_on_both_devices(fmt, mode):
    bits = torch.randint(-(2**31), 2**31, (500_000,)).to(torch.int32)
    ties = (bits & -(1 << (23 - fmt.fraction_bits))) | (1 << (22 - fmt.fraction_bits))
    x = torch.cat([bits, ties]).view(torch.float32)
    here, there = round_to(x, fmt, mode), round_to(x.cuda(), fmt, mode).cpu()
    same = here.view(torch.int32) == there.view(torch.int32)
    assert (same | (here.isnan() & there.isnan())).all()


@pytest.mark.parametrize("text", ["flash,tile=16", "paper", "authors,tile=16", "guarded"])
def test_emulator_agrees_across_devices(text, record_property):
    results = []
    inputs = _qkv()
    for device in ("cpu", "cuda"):
        q, k, v = (x.to(device).requires_grad_() for x in inputs)
        probe = Probe()
        out = attention(q, k, v, numerics=text, backend="emulated", probe=probe)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        results.append([x.cpu() for x in (out, *grads, probe.lse)])
    for name, a, b in zip("O dQ dK dV lse".split(), *results):
        mismatched = (a != b).double().mean().item()
        record_property(f"mismatch_{name}", mismatched)
        record_property(f"signed_mean_{name}", (a - b).double().mean().item())
        assert ((a - b).abs() <= 4 * ulp(a.abs().amax(), BF16)).all()
        assert name == "lse" or mismatched < 0.05


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_case_044_exact_means_true_fp32_products(precision, monkeypatch):
    q, k, v = (x.cuda().requires_grad_() for x in _qkv(T=128, D=64))
    q.data *= 4  # scores of about 20 and more
    truth, _ = oracle.attention_forward(q, k, v)
    expected = oracle.attention_backward(torch.ones_like(v), q, k, v)

    def check():
        torch.set_float32_matmul_precision(precision)
        try:
            out = attention(q, k, v, numerics="exact", backend="emulated")
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        finally:
            torch.set_float32_matmul_precision("highest")
        for mine, ref in zip((out, *grads), (truth, *expected)):
            assert (mine.double() - ref).norm() / ref.norm() < 1e-5

    check()
    if precision != "highest":  # the fault: the caller's TF32 reaches our products
        monkeypatch.setattr(emulated, "plain_arithmetic", lambda device: nullcontext())
        with pytest.raises(AssertionError):
            check()


def test_cuda_autocast_casts_inputs_and_keeps_the_arithmetic():
    q, k, v = (x.cuda() for x in _qkv())
    wide = attention(*(x.bfloat16().float() for x in (q, k, v)), numerics="exact")
    with torch.autocast("cuda", torch.bfloat16):
        inside = attention(q, k.half(), v, numerics="exact", backend="emulated")
    assert inside.dtype == torch.bfloat16
    assert (inside.float() - wide).abs().max() <= ulp(wide.abs().max(), BF16)


def test_stochastic_sites_repeat_with_the_seed():
    q, k, v = (x.cuda() for x in _qkv())
    text = "paper,probabilities=bf16:stochastic,unnormalized=bf16:stochastic"
    draws = [
        attention(q, k, v, numerics=text, backend="emulated", seed=torch.tensor(s, device="cuda"))
        for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
