"""Public bug reports about attention, each as a test that names its case.

Each check is run twice: as it is, and with the reported fault put in, where it has to fail.
"""

import contextlib
import hashlib
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import BF16, FP16, Probe, attention, backends, emulated, oracle, resolve_backend
from kernels.numerics import (
    SITE_NAMES,
    Site,
    Softmax,
    flash,
    paper,
    parse_numerics,
    stabilized,
)
from kernels.rounding import round_to, ulp
from kernels.sites import Rounder, scaled_product


def _qkv(B=1, H=2, T=12, D=8, Tk=None, dtype=torch.float32):
    shapes = (B, H, T, D), (B, H, Tk or T, D), (B, H, Tk or T, D)
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def _all(q, k, v, dout=None, **kwargs):
    """out, dQ, dK, dV."""
    out = attention(q, k, v, **({"numerics": "exact"} | kwargs))
    dout = torch.ones_like(out) if dout is None else dout
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def _truth(q, k, v, dout=None, causal=True, scale=None, mask=None):
    dout = torch.ones(*q.shape[:3], v.shape[3]) if dout is None else dout
    out, _ = oracle.attention_forward(q, k, v, causal, scale, mask)
    return [out, *oracle.attention_backward(dout, q, k, v, causal, scale, mask)]


def _close(mine, truth, rtol=1e-4, atol=1e-5):
    for a, b in zip(mine, truth):
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)


def _with_scores(scores, rows=1, v=None, D=64):
    """The cases' handy input: q = [8, 0, ...], k = [s, 0, ...], scale 1/8: S = s exactly."""
    q, k = torch.zeros(1, 1, rows, D), torch.zeros(1, 1, len(scores), D)
    q[..., 0], k[..., 0] = 8.0, torch.tensor(scores)
    v = torch.randn(1, 1, len(scores), D) if v is None else v
    return [x.requires_grad_() for x in (q, k, v)]


# -- 1. divergence and mismatch -------------------------------------------------------------------


@pytest.mark.parametrize("text", ["paper", "authors,tile=4", "flash,tile=4"])
def test_case_004_each_step_lies_on_the_grid_that_its_site_says(text, fault, monkeypatch):
    """S, m, P_bar, l, O_bar, O and the backward's, as they come out of the arithmetic."""
    q, k, v = _qkv(T=12, D=8)
    numerics, steps = parse_numerics(text), {}
    rounded = Rounder.__call__

    def seen(self, x, name):
        y = rounded(self, x, name)
        steps.setdefault(name, []).append(y.clone())  # y itself may be overwritten later
        return y

    monkeypatch.setattr(Rounder, "__call__", seen)

    def check():
        steps.clear()
        _all(q, k, v, numerics=text)
        passed = {"inputs": "through Rounder.input", "delta_output": "only where asked for"}
        quiet = {s for s in SITE_NAMES if getattr(numerics, s) == Site()}
        assert set(steps) | set(passed) | quiet == set(SITE_NAMES)
        for name, values in steps.items():
            fmt = getattr(numerics, name).format
            for x in values:
                assert x.dtype == torch.float32 and torch.equal(round_to(x, fmt), x)

    check()
    right = Rounder.to_site
    with fault(Rounder, "to_site", lambda self, x, *site: right(self, x, *site) * (1 + 2**-20)):
        check()  # the reported fault: a product that promotes on its way


def test_case_008_two_tied_values_in_fp16_give_no_error(fault):
    v = torch.tensor([-2.40625, -2.296875]).view(1, 1, 2, 1).expand(1, 1, 2, 64).contiguous()
    fp16 = paper().at(**{s: FP16 for s in ("inputs", "scores", "probabilities", "unnormalized")})

    def check():
        for numerics, expected in ((fp16.at(output=FP16), -2.3515625), (paper(), -2.34375)):
            out = attention(*_with_scores([5.0, 5.0], v=v), numerics=numerics, causal=False)
            assert (out == expected).all()  # bf16: the even neighbour, the tie is lost

    check()
    with fault(Rounder, "to_site", lambda self, x, site, name: x):
        check()  # a site that rounds nothing hides what the formats do


@pytest.mark.parametrize("backend", ["emulated", "sdpa"])
def test_case_011_every_backend_is_measured_against_float64_in_ulps(backend, record_property):
    q, k, v = (x.detach().bfloat16().float().requires_grad_() for x in _qkv(T=64, D=64))
    dout = torch.randn_like(v).bfloat16().float()
    expected = _truth(q, k, v, dout)

    def check(numerics):
        mine = _all(q, k, v, dout, numerics=numerics, backend=backend)
        for name, x, truth in zip("out dQ dK dV".split(), mine, expected):
            error = (x.double() - truth) / ulp(truth.abs().max(), BF16)
            stderr = (error.std() / error.numel() ** 0.5).item()
            outward = (error * truth.sign()).mean().item()
            record_property(name, (error.abs().max().item(), error.mean().item(), outward, stderr))
            assert error.abs().max() < 2
            assert abs(error.mean()) < 6 * stderr and abs(outward) < 6 * stderr

    check(flash())
    if backend == "emulated":
        with pytest.raises(AssertionError):  # within an ulp everywhere, and always too small
            check(flash().at(output="bf16:toward_zero", gradients="bf16:toward_zero"))


@pytest.mark.parametrize("text", ["exact", "stabilized,beta=2", "guarded"])
def test_case_013_without_a_causal_mask_equal_keys_all_tie(text, fault):
    q, k, v = _with_scores([3.0] * 4, rows=4)

    def check():
        probe = Probe()
        out = attention(q, k, v, numerics=text, causal=False, probe=probe)
        assert (probe.ties == 4).all()
        torch.testing.assert_close(
            out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-2, atol=1e-2
        )

    check()
    always_causal = emulated.forward
    with fault(
        emulated,
        "forward",
        lambda *a, **k: always_causal(*a, **(k | dict(causal=True))),
    ):
        check()


def test_case_015_rank_one_inputs_with_large_scores_stay_at_the_truth(record_property):
    x = torch.randn(1, 1, 128, 1) * 4
    q, k, v = ((x * torch.full((64,), 0.1 * s)).requires_grad_() for s in (25.0, 25.0, 1.0))
    truth = _truth(q, k, v)

    def check(numerics):
        error = (_all(q, k, v, numerics=numerics)[0].double() - truth[0]).flatten()
        stderr = error.std() / len(error) ** 0.5
        record_property("signed_mean", (error.mean().item(), stderr.item()))
        assert error.abs().max() < 1e-4 and abs(error.mean()) < 1e-6

    check("exact")
    with pytest.raises(AssertionError):  # hundreds in steps of whole numbers: others win
        check("exact,scores=bf16")


@pytest.mark.parametrize("text", ["exact", "flash,tile=16"])
def test_case_015_constant_inputs_are_the_purest_tied_rows(text, fault):
    q, k = (torch.full((1, 1, 40, 64), x).requires_grad_() for x in (0.5, 0.25))
    v = torch.full((1, 1, 40, 64), 0.8125).requires_grad_()

    def check():
        probe = Probe()
        out = attention(q, k, v, numerics=text, probe=probe)
        assert (out == 0.8125).all()
        assert torch.equal(probe.ties[0, 0], torch.arange(1, 41, dtype=torch.int32))
        dq, dk, _ = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5
        lse = 64 * 0.125 / 8 + torch.arange(1, 41.0).log()
        torch.testing.assert_close(probe.lse[0, 0], lse, rtol=1e-6, atol=1e-6)

    check()
    right = emulated._scores
    noisy = lambda *a: right(*a) + 1e-3 * torch.rand(40, 40)  # noqa: E731
    with fault(emulated, "_scores", noisy):
        check()


def test_case_016_the_yardstick_is_float64_on_the_quantised_inputs():
    """Logits five times larger: bf16 SDPA is several percent off, and that is within its right."""
    q, k, v = (x.detach().mul(5).bfloat16() for x in _qkv(T=64, D=64))
    truth, _ = oracle.attention_forward(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    their_error = (theirs.double() - truth).abs().max()
    budget = 2 * their_error + ulp(truth.abs().max(), BF16)

    def error(text):
        return (attention(q, k, v, numerics=text).double() - truth).abs().max()

    assert error("flash") <= budget
    assert error("flash,matched_bits=2") > budget  # the budget does refuse a coarser format
    mine = attention(q, k, v, numerics="flash")
    assert (mine.double() - theirs.double()).abs().max() > 0  # equality with it is no goal


def test_case_017_each_rounding_site_can_be_switched_alone(fault):
    q, k, v = _qkv(T=64, D=64)
    truth = _truth(q, k, v)[0]

    def relative(text):
        out = attention(q, k, v, numerics=text)
        return ((out.double() - truth).norm() / truth.norm()).item()

    assert relative("exact") < 1e-6

    def check():
        for site in ("scores", "probabilities", "unnormalized", "output"):
            assert relative(f"exact,{site}=bf16") > 1e-4

    check()
    with fault(Rounder, "to_site", lambda self, x, site, name: x):
        check()
    probe = Probe()
    attention(*_with_scores([50.3, 66.7]), numerics="paper,inputs=fp32", causal=False, probe=probe)
    assert probe.m.item() == 66.5  # steps of 0.5 above 64


@pytest.mark.parametrize("shift", [-math.log(4), 0.0, math.log(4), 5.0, 20.0])
def test_case_019_a_shifted_reference_is_the_same_function(shift):
    q, k, v = _qkv(T=20)
    numerics = flash().at(**{s: "fp32" for s in ("inputs", "probabilities", "output")})
    numerics = numerics.at(backward_probabilities="fp32", grad_scores="fp32", gradients="fp32")
    moved = numerics.at(softmax=Softmax("shifted", shift=shift))

    def check(numerics):
        probe = Probe()
        out = attention(q, k, v, numerics=numerics, probe=probe)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        _close([out, *grads], _truth(q, k, v), rtol=1e-5, atol=2e-6)
        lse = oracle.attention_forward(q, k, v)[1]
        torch.testing.assert_close(probe.lse.double(), lse, rtol=1e-6, atol=2e-6)

    check(moved)
    with pytest.raises(AssertionError):
        check(moved.at(row_sum="bf16"))  # the reported fault: l in bf16


def test_lse_kept_in_bf16_ruins_the_backward():
    """True lse 12346.37 becomes 12352, and P = exp(S - lse) 0.0018 in place of 0.5."""
    q, k, v = _with_scores([12345.6768] * 2)
    good = _all(q, k, v, numerics="exact", causal=False)[3]
    bad = _all(q, k, v, numerics="exact,lse=bf16", causal=False)[3]
    torch.testing.assert_close(good, torch.full_like(good, 0.5), rtol=1e-2, atol=0)
    assert bad.max() == pytest.approx(math.exp(12345.6768 - 12352), rel=0.05)


# -- 2. edge cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["exact", "flash", "paper", "authors", "guarded"])
def test_case_024_huge_equal_logits(text, fault):
    q, k, v = (torch.full((1, 1, 1, 64), 133120.0).requires_grad_() for _ in range(3))
    dout = torch.randn(1, 1, 1, 64).bfloat16().float()

    def check():
        out, dq, dk, dv = _all(q, k, v, dout, numerics=text)
        assert (out == 133120).all() and torch.equal(dv, dout)
        assert dq.isfinite().all() and dk.isfinite().all()

    check()
    with fault(emulated, "_reference", lambda policy, S, m: torch.zeros_like(m)):
        check()


def test_case_024_gradients_of_a_single_key_vanish():
    """dP - delta is a difference of equal sums; 133120 would magnify their last bits."""
    q, k, v = (torch.full((1, 1, 1, 64), 133120.0).requires_grad_() for _ in range(3))
    dout = torch.full((1, 1, 1, 64), 0.5)
    _, dq, dk, _ = _all(q, k, v, dout, numerics="exact")
    assert (dq == 0).all() and (dk == 0).all()


@pytest.mark.parametrize(
    "text", ["exact", "flash,tile=3", "authors,tile=3", "stabilized", "guarded"]
)
def test_case_025_a_fully_masked_row_is_zero_and_spoils_nothing(text, fault):
    q, k, v = _qkv(T=7)
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[1] = False

    def check():
        probe = Probe()
        out = attention(q, k, v, numerics=text, causal=False, mask=mask, probe=probe)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert (out[:, :, 1] == 0).all() and (grads[0][:, :, 1] == 0).all()
        assert (probe.lse[:, :, 1] == -math.inf).all()
        assert (probe.ties[:, :, 1] == 0).all() and (probe.ones[:, :, 1] == 0).all()
        assert all(x.isfinite().all() for x in (out, *grads))

    check()
    parts = emulated._mask_parts

    def finite_fill(mask, shape, dtype):
        bias, fence = parts(mask, shape, dtype)
        return bias, fence.clamp(min=-1e30)

    with fault(emulated, "_mask_parts", finite_fill):
        check()


def _merge(parts):
    """Attention over a union of key sets from (out, lse) over each: the usual combination."""
    lse = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(total == -math.inf, 0.0, total))
    return sum(w.unsqueeze(-1) * out for w, (out, _) in zip(weights, parts)), total


def test_case_026_parts_merge_through_lse_and_empty_parts_weigh_nothing(fault):
    q, k, v = (x.detach() for x in _qkv(T=6, Tk=10))

    def part(keys):
        probe = Probe()
        x = attention(q, k[:, :, keys], v[:, :, keys], numerics="exact", causal=False, probe=probe)
        return x, probe.lse

    def check():
        whole, lse = part(slice(None))
        parts = [part(slice(0, 4)), part(slice(4, 10)), part(slice(3, 3))]
        merged, total = _merge(parts)
        torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(total, lse, rtol=1e-6, atol=1e-6)
        nothing, total = _merge([part(slice(0, 0))] * 2)
        assert (nothing == 0).all() and (total == -math.inf).all()

    check()
    with fault(emulated, "_finish", _in_base_two(emulated._finish)):
        check()


def _in_base_two(finish):
    def finished(*args):
        result = finish(*args)
        result.lse = result.lse / math.log(2)
        return result

    return finished


def test_case_027_lse_is_a_natural_logarithm_and_takes_no_gradient(fault):
    q, k, v = _qkv()
    probe = Probe()

    def check():
        attention(q, k, v, numerics="exact", causal=False, probe=probe)
        S = q.detach() @ k.detach().mT / math.sqrt(8)
        torch.testing.assert_close(probe.lse, torch.logsumexp(S, -1), rtol=1e-5, atol=1e-5)

    check()
    with fault(emulated, "_finish", _in_base_two(emulated._finish)):
        check()
    with pytest.raises(RuntimeError, match="does not require grad"):
        probe.lse.sum().backward()


@pytest.mark.parametrize("T", [1, 15, 17, 63, 65, 127, 129, 1000])
def test_case_028_ragged_lengths_and_poisoned_memory(T, fault):
    q, k, v = _qkv(H=1, T=T, D=32)
    truth = _truth(q, k, v)

    def check():
        for text in ("exact", "exact,reference=running,tile=64"):
            first = _all(q, k, v, numerics=text)
            poison = [
                torch.full((n,), math.nan) for n in (1, 32, T, T * 32, T * T) for _ in range(8)
            ]
            del poison
            again = _all(q, k, v, numerics=text)
            _close(first, truth)
            assert all(torch.equal(a, b) for a, b in zip(first, again))

    check()

    def reads_rubbish(a, b, alpha, addend=None):
        rubbish = torch.full((1, 1, 1), math.nan)  # what an uninitialised buffer may hold
        return torch.baddbmm(rubbish if addend is None else addend, a, b, alpha=alpha)

    with fault(emulated, "scaled_product", reads_rubbish):
        check()


@pytest.mark.parametrize("cut", [0, 1, 128])
def test_case_031_views_and_slices_equal_contiguous_copies(cut, fault):
    fused = torch.randn(2, 140, 3, 2, 16)

    def results(contiguous):
        leaf = fused.clone().requires_grad_()
        q, k, v = (x.transpose(1, 2) for x in leaf.unbind(2))
        k, v = k[:, :, : 140 - cut], v[:, :, : 140 - cut]
        if contiguous:
            q, k, v = (x.contiguous() for x in (q, k, v))
        out = attention(q, k, v, numerics="paper", causal=False)
        dout = torch.ones(2, 140, 2, 16).transpose(1, 2)
        return out, torch.autograd.grad(out, leaf, dout)[0]

    def check():
        for mine, copies in zip(results(False), results(True)):
            assert torch.equal(mine, copies)

    check()
    right = Rounder.input

    def ignores_strides(self, x, name):
        packed = torch.empty(x.shape).stride()
        return right(self, torch.as_strided(x, x.shape, packed), name)

    with fault(Rounder, "input", ignores_strides):
        check()


def test_case_033_gradients_without_a_causal_mask(fault):
    q, k, v = _qkv()

    def check():
        _close(_all(q, k, v, causal=False), _truth(q, k, v, causal=False))

    check()
    right = emulated.backward
    with fault(emulated, "backward", lambda *a, **kw: right(*a, **(kw | dict(causal=True)))):
        check()


def test_case_034_two_near_equal_sinks():
    """Keys 0 and 4 with raw scores 76 and 76.246, scale 0.5, in fp16: near, and not tied."""
    T, D = 64, 64
    q, k = torch.zeros(1, 2, T, D), torch.zeros(1, 2, T, D)
    q[..., 0] = 1.0
    k[:, :, 0, 0], k[:, :, 4, 0] = 76.0, 76.246
    q, k, v = (x.half().float().requires_grad_() for x in (q, k, torch.randn(1, 2, T, D)))
    dout = torch.randn(1, 2, T, D).half().float()
    fp16 = {s: FP16 for s in ("inputs", "scores", "probabilities", "backward_probabilities")}
    numerics = flash(16).at(**fp16, output=FP16, grad_scores=FP16, gradients=FP16)
    probe = Probe()
    attention(q, k, v, numerics=numerics, scale=0.5, probe=probe)
    assert (probe.m[:, :, 4:] == 38.125).all() and (probe.ties[:, :, 4:] == 1).all()
    for eps, tied in ((1e-3, False), (0.2, True)):
        moved = numerics.at(reference="row", softmax=Softmax("stabilized", beta=2, eps=eps))
        attention(q, k, v, numerics=moved, scale=0.5, probe=probe)
        assert ((probe.m[:, :, 4:] == 2 * 38.125) == tied).all()
    truth = _truth(q, k, v, dout, scale=0.5)[3]
    size = dout.abs().sum(2, keepdim=True)  # dV sums up to T terms

    def check(numerics):
        dv = _all(q, k, v, dout, numerics=numerics, scale=0.5)[3]
        assert ((dv.double() - truth)[:, :, [0, 4]].abs() / ulp(size, FP16)).max() < 2

    check(numerics)
    with pytest.raises(AssertionError):  # P, the operand of dV, in a coarser format
        check(numerics.at(backward_probabilities="bf16.2"))
    attention(q, k, v, numerics=paper(), scale=0.5, probe=probe)
    assert (probe.ties[:, :, 4:] == 2).all()  # bf16 has steps of 0.25 there


def test_case_036_backward_repeats_bit_for_bit(fault):
    q, k, v = _qkv(B=2, H=4, T=128, D=64)
    dout = torch.randn_like(q)

    def check():
        digests = set()
        for _ in range(5):
            parts = _all(q, k, v, dout, numerics="exact")[1:]
            digests.add(hashlib.sha256(b"".join(x.numpy().tobytes() for x in parts)).hexdigest())
        assert len(digests) == 1

    check()

    def any_order(a, b, alpha, addend=None):
        order = torch.randperm(b.shape[1])  # as atomic additions arrive
        return scaled_product(a[..., order], b[:, order], alpha, addend)

    with fault(emulated, "scaled_product", any_order):
        check()


@pytest.mark.parametrize("D", [1, 8, 16, 40, 63, 64, 80, 96, 128, 192, 256])
def test_case_037_any_head_dimension_with_its_own_scale(D):
    for T in (1, 2, 8, 16):
        q, k, v = _qkv(T=T, D=D)
        truth = _truth(q, k, v)
        _close(_all(q, k, v), truth)
        padded = 2 ** math.ceil(math.log2(D))
        if T > 1 and padded != D:  # the reported fault: the scale of the padded dimension
            with pytest.raises(AssertionError):
                _close(_all(q, k, v, scale=padded**-0.5), truth)


@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 3, 8)])
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_case_040_zero_lengths(shape, which, fault, monkeypatch):
    full = (*shape[:2], 3, shape[3])
    q = torch.randn(full if which == "k" else shape).requires_grad_()
    k, v = (torch.randn(full if which == "q" else shape).requires_grad_() for _ in range(2))

    def launched(*args, **kwargs):
        raise AssertionError("the emulator was launched for nothing")

    monkeypatch.setattr(emulated, "forward", launched)

    def check():
        for x, like in zip(_all(q, k, v, numerics="flash"), (q, q, k, v)):
            assert x.shape == like.shape and (x == 0).all()

    check()
    with fault(sys.modules["kernels.attention"], "_nothing_to_do", lambda q, k: False):
        check()


def test_case_041_lowest_numbers_in_an_additive_mask_are_masked(fault):
    q, k, v = _qkv(T=4)
    lowest = torch.finfo(torch.float32).min
    padded = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()
    once = torch.zeros(4, 4).masked_fill(~padded, lowest)

    def check():
        expected = _all(q, k, v, mask=padded, causal=False)
        for mask in (once, once + once, once.bfloat16()):
            probe = Probe()
            attention(q, k, v, numerics="exact", mask=mask, causal=False, probe=probe)
            assert (probe.ties[:, :, 3] == 0).all()
            for a, b in zip(_all(q, k, v, mask=mask, causal=False), expected):
                assert torch.equal(a, b)

    check()

    def only_infinity(mask, shape, dtype):
        mask = mask.expand(shape).flatten(0, 1)
        if mask.dtype == torch.bool:
            return None, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        return mask.float(), torch.zeros(mask.shape)

    with fault(emulated, "_mask_parts", only_infinity):
        check()


def test_case_042_autocast_follows_one_rule_forward_and_backward(fault):
    q, k, v = (x.detach().requires_grad_() for x in _qkv(T=40, D=16))
    k, v = k.detach().half().requires_grad_(), v.detach().bfloat16().requires_grad_()
    dout = torch.randn(1, 2, 40, 16).bfloat16()
    wide = [x.detach().bfloat16().float().requires_grad_() for x in (q, k, v)]
    expected = _all(*wide, dout.float(), numerics="exact")

    def check():
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k, v, numerics="exact")
            grads = torch.autograd.grad(out, (q, k, v), dout)
        assert [x.dtype for x in grads] == [torch.float32, torch.float16, torch.bfloat16]
        assert torch.equal(out, expected[0].bfloat16())
        for mine, full in zip(grads, expected[1:]):
            assert torch.equal(mine, full.bfloat16().to(mine.dtype))

    check()
    inherits = lambda device: contextlib.nullcontext()  # noqa: E731
    with fault(emulated, "plain_arithmetic", inherits):
        check()


def test_case_042_without_autocast_v_decides():
    q, k, v = _qkv()
    out = attention(q, k.bfloat16(), v.bfloat16(), numerics="paper")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), numerics="paper"))


# -- 3. without Triton or a GPU -------------------------------------------------------------------


def test_case_047_without_triton_auto_falls_back_and_triton_is_refused_by_name(monkeypatch):
    def missing(name, package=None):
        raise ImportError("No module named 'triton'")

    backends._resolve.cache_clear()
    monkeypatch.setattr(backends.importlib, "import_module", missing)
    name, reason = resolve_backend("paper", "cuda")
    assert name == "emulated" and "No module named 'triton'" in reason
    with pytest.raises(ValueError, match="backend 'triton' cannot run numerics 'paper'"):
        resolve_backend("paper", "cuda", backend="triton")
    backends._resolve.cache_clear()


def test_stable_softmax_offers_both_decisions():
    """The published algorithm decides per key tile; ties across tiles are then not seen."""
    q, k, v = _with_scores([3.0, 1.0, 3.0, 1.0])
    probe = Probe()
    for decide, m in (("row", 6.0), ("tile", 3.0)):
        numerics = stabilized(2, decide=decide).at(tile=2)
        attention(q, k, v, numerics=numerics, causal=False, probe=probe)
        assert probe.m.item() == m and probe.ties.item() == 2
