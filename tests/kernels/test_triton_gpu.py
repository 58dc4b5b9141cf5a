"""The kernels on a real GPU: shapes, layouts, repeatability, accuracy.

Every choice of numerics: `test_triton_parity.py`. Public cases: `test_triton_cases.py`.
`python -m pytest -m gpu tests --parity-json parity.json` (with `-n 4`: on four processes)
"""

import math

import pytest
import torch

from kernels import emulated, parity
from kernels import triton_attention as kernels_under_test
from kernels.attention import Probe, attention
from kernels.formats import BF16
from kernels.numerics import parse_numerics
from kernels.rounding import round_to, ulp

pytestmark = pytest.mark.gpu


def check(gaps, parity_table, case):
    """Every gap within `parity.limits`; each becomes a row of the table."""
    failures, n = [], parse_numerics(case.split(" ")[0])
    for g in gaps:
        ok = parity.limits(g.quantity, n).hold(g)
        parity_table(
            g.quantity,
            case,
            "ok" if ok else "FAILED",
            max_ulp=g.max_ulp,
            mismatched=g.mismatched,
            far=g.far,
            signed_mean_ulp=g.signed_mean_ulp,
        )
        if not ok:
            failures.append(g)
    assert not failures, failures


@pytest.mark.parametrize("head_dim", (8, 40, 80, 96, 128, 192, 256))
def test_head_dimensions(head_dim, parity_table):
    n = parse_numerics("flash,tile=64")
    shape = (1, 2, 2, 130, 130, head_dim, head_dim)
    tensors = parity.inputs(shape, device="cuda")
    scale = 1 / math.sqrt(head_dim)
    gaps = parity.compare(kernels_under_test, n, tensors, causal=True, scale=scale)
    check(gaps, parity_table, f"flash T130 D{head_dim} causal")


@pytest.mark.parametrize("text", ("flash", "paper"))
@pytest.mark.parametrize("causal", (True, False))
def test_lengths(text, causal, parity_table):
    n = parse_numerics(text)
    worst = {}
    for T in (1, 2, 15, 17, 63, 65, 127, 129, 1000):
        tensors = parity.inputs((1, 2, 2, T, T, 64, 64), device="cuda", seed=T)
        for g in parity.compare(kernels_under_test, n, tensors, causal=causal, scale=1 / 8):
            if g.max_ulp >= worst.get(g.quantity, g).max_ulp:
                worst[g.quantity] = g
    check(worst.values(), parity_table, f"{text} T1..1000 causal={causal}")


def test_lengths_that_differ(parity_table):
    for Tq, Tk in ((33, 200), (200, 33), (1, 150)):
        for causal in (True, False):
            tensors = parity.inputs((1, 2, 2, Tq, Tk, 64, 64), device="cuda")
            gaps = parity.compare(
                kernels_under_test, parse_numerics("paper"), tensors, causal=causal, scale=1 / 8
            )
            check(gaps, parity_table, f"paper Tq{Tq} Tk{Tk} causal={causal}")


def test_views_give_the_bits_of_contiguous_copies():
    fused = parity.inputs((2, 3, 3, 150, 150, 192, 192), device="cuda")[0]
    fused = fused.transpose(1, 2).contiguous()  # [B, T, H, 3 D]
    q, k, v = (x.transpose(1, 2) for x in fused.split(64, dim=-1))
    k, v = k[:, :, :-1], v[:, :, :-1]
    dO = torch.randn(2, 3, 64, 150, device="cuda").bfloat16().transpose(2, 3)
    n = parse_numerics("paper")
    views = parity.run(kernels_under_test, n, (q, k, v, dO), causal=True, scale=1 / 8)
    copies = tuple(x.contiguous() for x in (q, k, v, dO))
    copied = parity.run(kernels_under_test, n, copies, causal=True, scale=1 / 8)
    for name, x in views.items():
        assert torch.equal(x, copied[name]), name


def test_grouped_queries_agree_with_the_emulator(parity_table):
    tensors = parity.inputs((2, 6, 2, 140, 140, 64, 64), device="cuda")
    gaps = parity.compare(
        kernels_under_test, parse_numerics("paper"), tensors, causal=True, scale=1 / 8
    )
    check(gaps, parity_table, "paper H6 Hkv2 T140 causal")


def test_grouped_queries_equal_repeated_keys():
    q, k, v, dO = parity.inputs((2, 6, 2, 140, 140, 64, 64), device="cuda")
    n = parse_numerics("flash")
    got = parity.run(kernels_under_test, n, (q, k, v, dO), causal=True, scale=1 / 8)
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    want = parity.run(kernels_under_test, n, (q, k, v, dO), causal=True, scale=1 / 8)
    assert torch.equal(got["out"], want["out"]) and torch.equal(got["dq"], want["dq"])
    summed = want["dk"].float().unflatten(1, (2, 3)).sum(2)
    assert ((got["dk"].float() - summed).abs() <= 3 * ulp(summed.abs().amax(), BF16)).all()


def test_offsets_beyond_two_to_the_31():
    """A view whose last head starts more than 2^31 elements into its storage."""
    storage = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    far = storage.as_strided((1, 2, 64, 64), (0, 2**31, 64, 1))
    near = torch.randn(1, 2, 64, 64, device="cuda").bfloat16()
    far.copy_(near)
    n = parse_numerics("flash,tile=64")
    dO = torch.randn_like(near)
    a = parity.run(kernels_under_test, n, (far, far, far, dO), causal=True, scale=1 / 8)
    b = parity.run(kernels_under_test, n, (near, near, near, dO), causal=True, scale=1 / 8)
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


@pytest.mark.parametrize("text", ("flash", "paper"))
def test_gaussian_inputs_within_the_error_budget(text, parity_table):
    """Against float64: at most twice the emulator's own error, plus one ulp."""
    q, k, v, dO = parity.inputs((2, 4, 4, 512, 512, 64, 64), kind="gaussian", device="cuda")
    n = parse_numerics(text)
    exact_out, _ = _oracle_forward(q, k, v)
    exact_grads = _oracle_backward(q, k, v, dO)
    want = parity.run(emulated, n, (q, k, v, dO), causal=True, scale=1 / 8)
    got = parity.run(kernels_under_test, n, (q, k, v, dO), causal=True, scale=1 / 8)
    for name, truth in zip(("out", "dq", "dk", "dv"), (exact_out, *exact_grads)):
        budget = 2 * (want[name].double() - truth).abs().max()
        budget += ulp(truth.abs().max(), BF16)
        error = (got[name].double() - truth).abs().max()
        parity_table(
            name,
            f"{text} gaussian T512 vs float64",
            "ok",
            error=float(error),
            budget=float(budget),
        )
        assert error <= budget, name


def _oracle_forward(q, k, v):
    S = q.double() @ k.double().mT / 8
    S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), -math.inf)
    return S.softmax(-1) @ v.double(), S


def _oracle_backward(q, k, v, dO):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = _oracle_forward(*leaves)
    return torch.autograd.grad(out, leaves, dO.double())


def test_probes_change_no_bit():
    q, k, v, dO = parity.inputs((1, 2, 2, 200, 200, 64, 64), device="cuda")
    for text in ("flash", "paper", "stabilized"):
        plain = attention(q, k, v, numerics=text, backend="triton")
        probe = Probe()
        probed = attention(q, k, v, numerics=text, backend="triton", probe=probe)
        assert torch.equal(plain, probed) and int(probe.ties.min()) >= 1


@pytest.mark.parametrize("bits", (0, 2, 4, 7, 10))
def test_rounding_is_the_emulators_bit_by_bit(bits, parity_table):
    x = _patterns(bits).to("cuda")
    fmt = parse_numerics("paper").output.format
    fmt = fmt.cut(bits) if bits <= 7 else parse_numerics("exact").output.format.cut(bits)
    got = _round(x, bits, stochastic=False)
    want = round_to(x, fmt)
    same = (got == want) | (got.isnan() & want.isnan())
    assert bool(same.all())
    known = ~want.isnan()  # a NaN has no sign worth keeping
    assert torch.equal(torch.signbit(got[known]), torch.signbit(want[known]))
    parity_table("rounding", f"nearest even, {bits} bits", "ok", patterns=x.numel(), mismatched=0)


def _patterns(bits):
    """Every sign, exponent and leading fraction, with tails at, below and above a tie."""
    drop = 23 - bits
    heads = torch.arange(0, 2**16, dtype=torch.int64) << 16
    tie = 1 << (drop - 1)
    tails = torch.tensor([0, 1, tie - 1, tie, tie + 1, (1 << drop) - 1], dtype=torch.int64)
    kept = heads & ~((1 << drop) - 1) & 0xFFFFFFFF
    patterns = torch.unique((kept[:, None] | tails[None, :]).flatten())
    signed = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32)
    return signed.view(torch.float32)


def _round(x, bits, *, stochastic, seed=0):
    from kernels import triton_common

    out = torch.empty_like(x)
    seed = torch.full((1,), seed, dtype=torch.int64, device=x.device)
    n = x.numel()
    triton_common.round_tensor_kernel[(-(-n // 1024),)](
        x, out, seed, n, 1, 1, n, n, 1, 1, DIM=n, BITS=bits, STOCHASTIC=stochastic,
        STREAM=0, BLOCK=1024,
    )  # fmt: skip
    return out


def test_stochastic_rounding_follows_its_law(parity_table):
    """A value a quarter of the way up goes up a quarter of the time; seeds repeat and differ."""
    count = 2**20
    for share in (0.25, 0.5, 0.9):
        x = torch.full((count,), 1.0 + share * 2.0**-7, device="cuda")
        up = (_round(x, 7, stochastic=True, seed=1) > 1).double().mean().item()
        sigma = math.sqrt(share * (1 - share) / count)
        parity_table("rounding", f"stochastic, share {share}", "ok", measured=up)
        assert abs(up - share) < 5 * sigma + 2.0**-16
    first, again, other = (_round(x, 7, stochastic=True, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_stochastic_attention_repeats_with_its_seed():
    q, k, v, dO = parity.inputs((1, 2, 2, 150, 150, 64, 64), kind="gaussian", device="cuda")
    n = parse_numerics("paper,scores=bf16:stochastic,output=bf16:stochastic")
    runs = [
        parity.run(kernels_under_test, n, (q, k, v, dO), causal=True, scale=1 / 8, seed=s)
        for s in (3, 3, 4)
    ]
    assert torch.equal(runs[0]["out"], runs[1]["out"])
    assert torch.equal(runs[0]["dk"], runs[1]["dk"])
    assert not torch.equal(runs[0]["out"], runs[2]["out"])
    plain = parity.run(emulated, parse_numerics("paper"), (q, k, v, dO), causal=True, scale=1 / 8)
    difference = (runs[0]["out"].float() - plain["out"]) / ulp(plain["out"].abs().amax(), BF16)
    assert abs(float(difference.mean())) < 0.01


@pytest.mark.parametrize("text", ("paper", "stabilized,beta=2", "paper,unnormalized=fp32"))
def test_signed_bias_of_tied_rows_is_the_emulators(text, parity_table):
    """Two tied keys with same-sign values and a tail: nearest even errs one way (paper, 3.3)."""
    torch.manual_seed(0)
    T, rows = 8, 4096
    q = torch.zeros(1, 1, rows, 64, device="cuda", dtype=torch.bfloat16)
    q[..., 0] = 40.0
    k = torch.zeros(1, 1, T, 64, device="cuda", dtype=torch.bfloat16)
    k[0, 0, :2, 0], k[0, 0, 2:, 0] = 1.0, 0.2
    v = -(2 + 2 * torch.rand(1, 1, T, 64, device="cuda")).bfloat16()
    n = parse_numerics(text)
    choices = dict(numerics=n, causal=False, scale=1 / 8, probe=True)
    got = kernels_under_test.forward(q, k, v, **choices)
    want = emulated.forward(q, k, v, **choices)
    unit = ulp(want.out_fp32, BF16)
    biases = [((r.out.double() - r.out_fp32.double()) / unit).mean().item() for r in (got, want)]
    parity_table("bias", f"{text}: tied pair", "ok", triton=biases[0], emulated=biases[1])
    assert (got.ties == 2).all() and (want.ties == 2).all()
    assert abs(biases[0] - biases[1]) < 0.01
