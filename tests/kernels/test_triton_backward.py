"""The backward kernels in Triton's interpreter: parity with the emulator and with float64."""

import math

import pytest
import torch

from kernels import emulated, parity, parse_numerics, triton_attention

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted


def gradients(module, text, tensors, causal, scale, given=None, seed=0):
    n = parse_numerics(text)
    found = parity.run(module, n, tensors, causal=causal, scale=scale, given=given, seed=seed)
    return {name: found[name] for name in ("dq", "dk", "dv")}


def assert_agree(text, tensors, causal=True, scale=1 / 4):
    """Within 1 ulp, few off, no signed mean."""
    n = parse_numerics(text)
    coarse = n.gradients.format.fraction_bits <= 7
    gaps = parity.compare(triton_attention, n, tensors, causal=causal, scale=scale)
    for g in gaps:
        if g.quantity not in ("dq", "dk", "dv"):
            continue
        assert g.max_ulp <= (1 if coarse else 512), (text, g)
        assert not coarse or (g.mismatched < 0.03 and abs(g.signed_mean_ulp) < 0.02), (text, g)


@pytest.mark.parametrize(
    "text",
    [
        "flash,tile=16",
        "paper",
        "paper,delta=dP_P",
        "exact",
    ],
)
def test_sites_agree_with_the_emulator_without_a_causal_mask(text):
    assert_agree(text, parity.inputs((1, 2, 2, 37, 41, 16, 16)), causal=False)


@pytest.mark.parametrize("kind", ("mirror", "sham", "dQ_alone", "dK_alone"))
def test_delta_errors_agree_with_the_emulator(kind):
    """The mirror doubles delta's distance from fp32, so a last bit of delta may move dS."""
    tensors = parity.inputs((1, 2, 2, 33, 33, 16, 16))
    want = gradients(emulated, f"paper,delta_error={kind}", tensors, True, 1 / 4)
    got = gradients(triton_attention, f"paper,delta_error={kind}", tensors, True, 1 / 4)
    fmt = parse_numerics("paper").gradients.format
    for name in want:
        g = parity.gap(name, got[name], want[name], fmt)
        assert g.max_ulp <= 2 and g.mismatched < 0.03, g
    plain = gradients(triton_attention, "paper", tensors, True, 1 / 4)
    changed = [not torch.equal(plain[name], got[name]) for name in ("dq", "dk")]
    expected = {"mirror": [True, True], "dQ_alone": [False, True], "dK_alone": [True, False]}
    assert changed == expected.get(kind, [False, False])


@pytest.mark.parametrize("kind", ("own_direction", "leading_direction"))
@pytest.mark.parametrize("text", ("paper", "exact,output_bits=2"))
def test_errors_along_a_direction_agree_with_the_emulator(kind, text):
    tensors = parity.inputs((2, 4, 2, 33, 33, 16, 16))
    want = gradients(emulated, f"{text},delta_error={kind}", tensors, True, 1 / 4)
    got = gradients(triton_attention, f"{text},delta_error={kind}", tensors, True, 1 / 4)
    clean = gradients(triton_attention, f"{text},delta_output=fp32", tensors, True, 1 / 4)
    for name in want:
        g = parity.gap(name, got[name], want[name], parse_numerics(text).gradients.format)
        limit = 2 if "paper" in text else 64  # the emulator's fp32 sums go in another order
        assert g.max_ulp <= limit or torch.allclose(got[name], want[name], atol=1e-5), g
    changed = {name: not torch.equal(clean[name], got[name]) for name in want}
    assert changed == dict(dq=True, dk=False, dv=False)


@pytest.mark.parametrize("kind", ("random_direction", "fixed_direction"))
def test_errors_along_drawn_directions_have_the_length_of_the_own_one(kind):
    tensors = parity.inputs((1, 2, 2, 24, 24, 16, 16), dtype=torch.float32)
    low = "exact,output_bits=2"

    def moved(kind, seed=0):
        text = f"{low},delta_error={kind}"
        found = gradients(triton_attention, text, tensors, True, 1 / 4, seed=seed)["dq"]
        return found - clean["dq"]

    clean = gradients(triton_attention, f"{low},delta_output=fp32", tensors, True, 1 / 4)
    own, found = moved("own_direction"), moved(kind)
    torch.testing.assert_close(found.norm(dim=-1), own.norm(dim=-1), rtol=1e-3, atol=1e-6)
    assert torch.equal(moved(kind), found)
    other = moved(kind, seed=5)
    assert torch.allclose(other, found, atol=1e-6) == (kind == "fixed_direction")
    lines = torch.nn.functional.normalize(found[0, 0], dim=-1)
    alike = (lines[1:] @ lines[1]).abs().mean()
    assert alike > 0.999 if kind == "fixed_direction" else alike < 0.6


def test_random_delta_errors_have_the_asked_moments():
    """`injected` shifts delta by mean: dQ moves by -alpha mean P K, row by row, in fp32."""
    tensors = parity.inputs((1, 1, 1, 24, 24, 16, 16), dtype=torch.float32)
    plain = gradients(triton_attention, "exact", tensors, True, 1 / 4)
    text = "exact,delta_error=injected,mean=0.5,rms=0.0"
    moved = gradients(triton_attention, text, tensors, True, 1 / 4)
    q, k = tensors[0].double(), tensors[1].double()
    S = (q @ k.mT / 4).masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -math.inf)
    expected = -0.5 / 4 * (S.softmax(-1) @ k)
    assert torch.allclose((moved["dq"] - plain["dq"]).double(), expected, atol=1e-5)
    signs = "paper,delta_error=random_sign"
    first = gradients(triton_attention, signs, tensors, True, 1 / 4)
    again = gradients(triton_attention, signs, tensors, True, 1 / 4)
    assert torch.equal(first["dq"], again["dq"])


def test_draws_of_the_kernels_are_uniform_and_normal_and_known_by_their_seed():
    shape, n = (3, 2, 5_000), 30_000
    draws, other = (triton_attention._draws(torch.tensor([seed])) for seed in (7, 8))
    uniform, normal = draws.uniform(shape).double(), draws.normal(shape)
    assert uniform.shape == normal.shape == shape
    assert 0 <= uniform.min() < 1e-3 and 1 - 1e-3 < uniform.max() < 1
    for x, moments in ((uniform - 0.5, (1 / 12, 1 / 80)), (normal, (1.0, 3.0))):
        assert abs(x.mean()) < 4 * (moments[0] / n) ** 0.5
        assert (
            abs(x.square().mean() - moments[0]) < 4 * ((moments[1] - moments[0] ** 2) / n) ** 0.5
        )
    pairs = (uniform[:, :, 1:] - 0.5) * (uniform[:, :, :-1] - 0.5)  # of neighbours
    assert abs(pairs.mean()) < 4 / 12 / n**0.5
    assert torch.equal(draws.uniform(shape).double(), uniform)
    assert not torch.equal(other.uniform(shape).double(), uniform)


@pytest.mark.parametrize("D, Dv", ((1, 1), (8, 24), (40, 40)))
def test_head_dimensions_that_are_no_power_of_two(D, Dv):
    for text in ("flash,tile=16", "paper"):
        assert_agree(text, parity.inputs((1, 1, 1, 19, 19, D, Dv)), scale=1 / math.sqrt(D))


@pytest.mark.parametrize(
    "Tq, Tk", ((1, 1), (2, 2), (15, 15), (65, 65), (1, 33), (33, 1), (16, 70))
)
def test_lengths(Tq, Tk):
    assert_agree("paper", parity.inputs((1, 1, 1, Tq, Tk, 16, 16), seed=Tq + Tk))


def test_grouped_queries_agree_with_the_emulator():
    assert_agree("paper", parity.inputs((2, 4, 2, 20, 20, 16, 16)))


def test_grouped_queries_sum_in_fp32():
    q, k, v, dO = parity.inputs((1, 4, 2, 20, 20, 16, 16), dtype=torch.float32)
    got = gradients(triton_attention, "exact", (q, k, v, dO), True, 1 / 4)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    want = gradients(triton_attention, "exact", (q, k, v, dO), True, 1 / 4)
    assert torch.equal(got["dq"], want["dq"])
    for name in ("dk", "dv"):
        summed = want[name].unflatten(1, (2, 2)).sum(2)
        assert torch.allclose(got[name], summed, atol=1e-4)


def test_gradients_of_any_layout():
    """Cases 28 and 31: dO transposed or broadcast."""
    q, k, v, dO = parity.inputs((1, 2, 2, 18, 18, 16, 16))
    transposed = dO.mT.contiguous().mT
    broadcast = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 2, 18, 16)
    for layout in (transposed, broadcast):
        a = gradients(triton_attention, "paper", (q, k, v, layout), True, 1 / 4)
        b = gradients(triton_attention, "paper", (q, k, v, layout.contiguous()), True, 1 / 4)
        assert all(torch.equal(a[name], b[name]) for name in a)
