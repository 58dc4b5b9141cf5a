"""The emulator against the oracle: size of the error, its signed mean, and every policy."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import BF16, E4M3, E5M2, FP16, FP32, FP64, emulated, exact, oracle, parse_numerics
from kernels.numerics import SITE_NAMES
from kernels.rounding import round_to, ulp
from kernels.sites import scaled_product

PRESET_TEXTS = [
    "exact",
    "flash,tile=16",
    "paper",
    "paper,delta_output=fp32",
    "paper,delta=dP_P",
    "authors,tile=16",
    "stabilized",
    "stabilized,decide=tile,tile=16",
    "guarded,reference=running,tile=16",
]


def _run(q, k, v, dout, numerics, causal=True, mask=None, seed=0, scale=None):
    """ForwardResult (probed) and (dQ, dK, dV)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    n = parse_numerics(numerics)
    choices = dict(numerics=n, causal=causal, scale=scale, mask=mask, seed=seed)
    result = emulated.forward(q, k, v, probe=True, **choices)
    saved = result.out, result.lse, result.delta_output
    return result, emulated.backward(dout, q, k, v, *saved, **choices)


def _bf16(*shape, low=None, high=None):
    x = torch.randn(shape) if low is None else torch.empty(shape).uniform_(low, high)
    return x.bfloat16().float()


def _signed_mean(x):
    x = x.double().flatten()
    return x.mean().item(), (x.std() / x.numel() ** 0.5).item()


# -- size of the error ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(65, 40), (129, 64)], ids="T{0[0]}-D{0[1]}".format)
@pytest.mark.parametrize("text", PRESET_TEXTS)
def test_error_is_at_most_twice_pytorchs_in_the_same_format(text, shape, record_property):
    T, D = shape
    q, k, v, dout = (_bf16(1, 2, T, D) for _ in range(4))
    k[:, :, 50:] = k[:, :, 10:11]  # ties that span tiles
    dtype = torch.float32 if text == "exact" else torch.bfloat16
    theirs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*theirs, is_causal=True)
    out.backward(dout.to(dtype))
    references = [out, *(x.grad for x in theirs)]
    truth = [oracle.attention_forward(q, k, v)[0], *oracle.attention_backward(dout, q, k, v)]
    result, grads = _run(q, k, v, dout, text)
    fmt = FP32 if text == "exact" else BF16
    for name, mine, theirs, exact_value in zip(
        "O dQ dK dV".split(), (result.out, *grads), references, truth
    ):
        record_property(f"signed_mean_{name}", _signed_mean(mine.double() - exact_value))
        error = (mine.double() - exact_value).abs().max()
        budget = 2 * (theirs.double() - exact_value).abs().max() + ulp(
            exact_value.abs().max(), fmt
        )
        assert error <= budget, f"{name}: {error:.3g} > {budget:.3g}"


def test_float64_equals_the_oracle():
    q, k, v, dout = (torch.randn(2, 2, 33, 12, dtype=torch.float64) for _ in range(4))
    result, grads = _run(q, k, v, dout, exact(FP64))
    out, lse = oracle.attention_forward(q, k, v)
    truth = (out, lse, *oracle.attention_backward(dout, q, k, v))
    for mine, expected in zip((result.out, result.lse, *grads), truth):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("text", ["flash,tile=16", "authors,tile=16", "paper"])
@pytest.mark.parametrize("name", ["unnormalized", "output", "gradients"])
def test_results_lie_on_their_grid(text, name):
    n = parse_numerics(text).at(**{name: BF16.cut(3)})
    result, grads = _run(*(torch.randn(1, 2, 40, 8) for _ in range(4)), n)
    for x in {"output": [result.out], "gradients": grads}.get(name, []):
        assert torch.equal(round_to(x, BF16.cut(3)), x)
    if name == "unnormalized":
        fine, _ = _run(*(torch.randn(1, 2, 40, 8) for _ in range(4)), text)
        assert result.out.unique().numel() < fine.out.unique().numel()


@pytest.mark.parametrize("site", [s for s in SITE_NAMES if s != "delta_output"])
@pytest.mark.parametrize("to", ["e4m3", "e5m2", "fp16", "bf16.2", "bf16:nearest_away"])
def test_each_site_acts_alone_and_by_the_size_of_its_format(site, to):
    q, k, v, dout = (torch.randn(1, 2, 24, 8) for _ in range(4))
    plain, plain_grads = _run(q, k, v, dout, "exact,reference=running,tile=8")
    result, grads = _run(q, k, v, dout, f"exact,reference=running,tile=8,{site}={to}")
    unit = {"e4m3": E4M3, "e5m2": E5M2, "fp16": FP16}.get(to, BF16.cut(2 if "2" in to else 7))
    pairs = zip((result.out, *grads), (plain.out, *plain_grads))
    moved = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    forward = site in SITE_NAMES[: SITE_NAMES.index("delta_output")]
    if site != "reference_format":  # m cancels but for the last bits of fp32
        assert max(moved) > 0.05 * unit.unit_roundoff
    assert max(moved) < 12 * unit.unit_roundoff
    assert forward or moved[0] == 0


# -- the sign of the error ------------------------------------------------------------------------


def _crafted(kind, heads=48, D=128):
    """One query; keys with scores 5, 5 and -4 (tied) or 5 and -3 (absorbing); V in -(2, 4)."""
    scores = {"tied": [5.0, 5.0, -4.0], "absorbing": [5.0, -3.0]}[kind]
    k = torch.zeros(1, heads, len(scores), D)
    k[..., 0] = torch.tensor(scores)
    k[..., 1] = 1.0  # sees the sum of dS over keys, and no score
    q = torch.zeros(1, heads, 1, D)
    q[..., 0] = 1.0
    v = _bf16(1, heads, len(scores), D, low=-4.0, high=-2.0)
    dout = _bf16(1, heads, 1, D, low=0.5, high=1.0)
    return dict(q=q, k=k, v=v, dout=dout, causal=False, scale=1.0)


PREDICTED_ULP = {
    # Two values on a grid of half-ulps: every second sum is a tie, which the tail always breaks
    # away from zero (+1/2 ulp in size); the tail itself (e^-9 x 3 = 0.012 ulp) is lost.
    "tied": -(0.25 - 0.012),
    # One value on the grid and a tail of e^-8 x 3 = 0.064 ulp, always lost: toward zero.
    "absorbing": +0.064,
}
# O_bar / l divides v by 1 + e^-8, and rounding O to bf16 takes it back to v: absorption is seen in
# O_bar, and in O only as far as the tail's values differ from the dominant one's.
PAPER = {"tied": "paper", "absorbing": "paper,output=fp32"}


@pytest.mark.parametrize("source", ["unrounded", "rounded"])
@pytest.mark.parametrize("kind", PREDICTED_ULP)
def test_signed_mean_of_O_bar_has_the_predicted_sign_and_size(kind, source, record_property):
    case = _crafted(kind)
    spacing = {"tied": 2.0**-5, "absorbing": 2.0**-6}[kind]

    def mean_in_ulps(changes):
        result, _ = _run(numerics=f"{PAPER[kind]},row_sum_source={source}{changes}", **case)
        return _signed_mean((result.out - result.out_fp32) * result.l.unsqueeze(-1) / spacing)

    mean, stderr = mean_in_ulps("")
    record_property("signed_mean_ulp", (mean, stderr))
    assert abs(mean) > 10 * stderr
    assert mean == pytest.approx(PREDICTED_ULP[kind], rel=0.15)
    cured, _ = mean_in_ulps(",unnormalized=fp32,output=fp32")
    assert abs(cured) < abs(mean) / 20
    if kind == "absorbing":
        both, stderr = mean_in_ulps(",output=bf16")
        assert abs(both) < 5 * stderr


@pytest.mark.parametrize("kind, sign", [("tied", -1), ("absorbing", +1)])
def test_signed_mean_of_delta_is_off_zero_and_the_variants_remove_it(kind, sign, record_property):
    """The backward's own delta, seen through dQ: k's second feature is 1, so dQ = sum of dS."""
    case = _crafted(kind, heads=256)
    exact_dS = ",grad_scores=fp32,gradients=fp32"

    def error(changes):
        dQ = _run(numerics=f"{PAPER[kind]}{exact_dS}{changes}", **case)[1][0]
        return _signed_mean(-dQ[..., 1])  # sum of P (dP - delta) = exact delta - delta

    mean, stderr = error("")
    record_property("signed_mean_delta_error", (mean, stderr))
    assert sign * mean > 8 * stderr
    for changes in (",delta_output=fp32", ",unnormalized=fp32,output=fp32", ",delta=dP_P"):
        assert abs(error(changes)[0]) < abs(mean) / 20, changes
    mirrored = error(",delta_error=mirror")[0]
    assert mirrored == pytest.approx(-mean, rel=0.02)


@pytest.mark.parametrize(
    "text", ["guarded,beta=7", "stabilized,beta=2", "stabilized,beta=2,decide=tile"]
)
def test_stabilised_softmax_removes_most_of_the_tied_bias_of_O_bar(text, record_property):
    case = _crafted("tied", heads=1500)
    plain, stderr = _signed_mean(_bias_in_ulps("paper", case))
    stabilised, _ = _signed_mean(_bias_in_ulps(text, case))
    record_property("signed_mean_ulp", (plain, stabilised, stderr))
    assert abs(stabilised) < abs(plain) / 20


def _bias_in_ulps(text, case):
    n = parse_numerics(text).at(output=FP32)
    result, _ = _run(numerics=n, **case)
    O_bar = result.out_fp32 * result.l.unsqueeze(-1)
    return (result.out - result.out_fp32) * result.l.unsqueeze(-1) / ulp(O_bar, BF16)


# -- softmax policies -----------------------------------------------------------------------------


def _row(scores, D=4, **changes):
    """Scores of one query as a problem whose S are exactly these."""
    k = torch.zeros(1, 1, len(scores), D)
    k[..., 0] = torch.tensor(scores)
    q = torch.zeros(1, 1, 1, D)
    q[..., 0] = 1.0
    v = torch.randn(1, 1, len(scores), D)
    case = dict(q=q, k=k, v=v, dout=torch.randn(1, 1, 1, D), causal=False, scale=1.0)
    return case | changes


@pytest.mark.parametrize(
    "text, scores, m",
    [
        ("exact", [3.0, 3.0, 1.0], 3.0),
        ("exact,softmax=shifted,shift=0.5", [3.0, 1.0], 3.5),
        ("exact,softmax=stabilized,beta=4", [3.0, 3.0, 1.0], 12.0),
        ("exact,softmax=stabilized,beta=4", [3.0, 1.0], 3.0),
        ("exact,softmax=stabilized,beta=4", [-3.0, -3.0, -9.0], 0.0),
        ("exact,softmax=stabilized,beta=4", [0.0, 0.0, -9.0], 0.0),
        ("exact,softmax=stabilized,beta=4,eps=0.25", [3.0, 2.75, 1.0], 12.0),
        ("exact,softmax=guarded,beta=4", [3.0, 3.0], 11.0),
        ("exact,softmax=guarded,beta=4", [0.0, 0.0], 0.5),
        ("exact,softmax=guarded,beta=4", [-3.0, -3.0], 0.0),
        ("exact,softmax=guarded,beta=4", [-0.1, -0.1], 0.4),
        # tiles of 2: tied within the first tile, and only across tiles
        ("exact,softmax=stabilized,beta=4,decide=tile,tile=2", [3.0, 3.0, 1.0], 12.0),
        ("exact,softmax=stabilized,beta=4,decide=tile,tile=2", [3.0, 1.0, 3.0], 3.0),
        ("exact,softmax=stabilized,beta=4,decide=row,tile=2", [3.0, 1.0, 3.0], 12.0),
        # a smaller tied tile can raise the reference above the row's own maximum
        ("exact,softmax=stabilized,beta=4,decide=tile,tile=2", [3.0, 1.0, 2.0, 2.0], 8.0),
    ],
)
@pytest.mark.parametrize("reference", ["row", "running"])
def test_policies_subtract_what_they_say_and_change_no_exact_result(text, scores, m, reference):
    case = _row(scores)
    result, grads = _run(numerics=f"{text},reference={reference}", **case)
    assert result.m.item() == pytest.approx(m, rel=1e-6)
    inputs = [case[x] for x in "qkv"]
    out, lse = oracle.attention_forward(*inputs, False, 1.0)
    torch.testing.assert_close(result.out.double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-6, atol=1e-6)
    for mine, truth in zip(grads, oracle.attention_backward(case["dout"], *inputs, False, 1.0)):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=1e-5)


def test_published_sfa_underflows_where_the_guarded_one_does_not():
    case = _row([40.0, 40.0, 1.0])
    published, _ = _run(numerics="stabilized,beta=7", **case)
    ours, _ = _run(numerics="guarded,beta=7", **case)
    assert published.out.isnan().all() and published.l.item() == 0
    assert ours.out.isfinite().all() and ours.m.item() == 48.0


def test_clamped_keeps_P_bar_below_one_and_its_rows_sum_to_one():
    case = _row([3.0, 3.0, 1.0])
    result, grads = _run(numerics="paper,softmax=clamped,grad_scores=fp32,gradients=fp32", **case)
    assert result.ones.item() == 0 and result.ties.item() == 2
    assert result.l.item() < 2 + math.exp(-2) - 0.007
    plain, _ = _run(numerics="paper", **case)
    assert plain.ones.item() == 2
    assert grads[0][..., 1:].abs().max() == 0


def test_running_reference_matches_row_reference_exactly_where_nothing_is_rounded():
    q, k, v, dout = (torch.randn(2, 2, 50, 8) * 3 for _ in range(4))
    for tile in (1, 7, 16, 50, 64):
        a, ga = _run(q, k, v, dout, f"exact,reference=running,tile={tile}")
        b, gb = _run(q, k, v, dout, "exact")
        for x, y in zip((a.out, a.lse, *ga), (b.out, b.lse, *gb)):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        assert torch.equal(a.ties, b.ties)


def test_one_tile_of_a_running_reference_is_the_row_reference_bit_for_bit():
    q, k, v, dout = (torch.randn(2, 2, 50, 8) for _ in range(4))
    a, ga = _run(q, k, v, dout, "paper,reference=running,tile=64")
    b, gb = _run(q, k, v, dout, "paper")
    assert all(torch.equal(x, y) for x, y in zip((a.out, a.lse, *ga), (b.out, b.lse, *gb)))


def _released_emulation(q, k, v, dout, tile):
    """What `authors` describes, on bf16 tensors, without a mask: O, dQ, dK, dV."""
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    O = torch.zeros_like(q)
    m = torch.full(q.shape[:3], -1e30).bfloat16().unsqueeze(-1)
    l = torch.zeros_like(m)
    for K, V in zip(k.split(tile, 2), v.split(tile, 2)):
        S = (q @ K.mT) * scale
        new = S.amax(-1, keepdim=True).maximum(m)
        P_bar = (S.float() - new.float()).exp()
        kept = (m.float() - new.float()).exp()
        l = (kept * l.float() + P_bar.sum(-1, keepdim=True).clamp(min=1e-10)).bfloat16()
        O = (O.float() * kept + (P_bar.bfloat16() @ V).float()).bfloat16()
        m = new
    O = (O.float() / l.float()).bfloat16()
    lse = l.float().log() + m.float()
    P = (((q @ k.mT) * scale).float() - lse).exp()
    delta = (dout.float() * O.float()).sum(-1, keepdim=True)
    dS = (P * ((dout @ v.mT).float() - delta)).bfloat16()
    dQ = sum_by_tile(dS.split(tile, 3), k.split(tile, 2), scale)
    dK = sum_by_tile(dS.mT.split(tile, 3), q.split(tile, 2), scale)
    return O, dQ, dK, sum_by_tile(P.bfloat16().mT.split(tile, 3), dout.split(tile, 2), 1.0)


def sum_by_tile(parts, others, scale):
    """bf16 products added to a bf16 buffer."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for a, b in zip(parts, others):
        total = total + (a @ b) * scale
    return total


def test_authors_equals_bf16_tensors_pushed_through_the_same_steps(record_property):
    inputs = [_bf16(2, 2, 48, 16) for _ in range(4)]  # alpha = 1/4: exact, as in theirs
    result, grads = _run(*inputs, "authors,tile=16", causal=False)
    theirs = _released_emulation(*inputs, tile=16)
    for name, mine, other in zip("O dQ dK dV".split(), (result.out, *grads), theirs):
        other = other.float()
        same = (mine == other).double().mean().item()
        record_property(f"equal_{name}", same)
        assert same > 0.98, (name, same)
        assert ((mine - other).abs() <= 4 * ulp(other.abs().amax(), BF16)).all()


def test_authors_keeps_m_l_and_O_bar_in_bf16_and_floors_l():
    q, k, v, dout = (torch.randn(1, 2, 40, 16) for _ in range(4))
    result, _ = _run(q, k, v, dout, "authors,tile=8")
    for x in (result.m, result.l, result.out):
        assert torch.equal(round_to(x, BF16), x)
    torch.testing.assert_close(result.lse, result.m + result.l.log(), rtol=0, atol=1e-6)
    assert not torch.equal(result.lse, round_to(result.lse, BF16))
    underflow = _row([40.0, 40.0])
    text = "authors,softmax=stabilized,beta=7,decide=tile"
    floored, _ = _run(numerics=text, **underflow)
    assert floored.l.item() == pytest.approx(1e-10, rel=0.01)
    assert (floored.out == 0).all()  # where the floor hides what would be 0/0
    assert _run(numerics=f"{text},row_sum_floor=0", **underflow)[0].out.isnan().all()


# -- delta and interventions ----------------------------------------------------------------------


def _delta_case():
    q, k, v, dout = (_bf16(2, 2, 24, 16) for _ in range(4))
    base = parse_numerics("exact,output_bits=2")

    def grads(seed=0, **changes):
        return _run(q, k, v, dout, base.at(**changes), seed=seed)[1]

    return grads


def test_high_precision_delta_changes_only_delta():
    grads = _delta_case()
    low, high = grads(), grads(delta_output=FP32)
    assert torch.equal(low[2], high[2]) and not torch.equal(low[0], high[0])
    torch.testing.assert_close(high[0], grads(delta="dP_P")[0], rtol=1e-3, atol=1e-5)


def test_mirror_turns_the_sign_and_sham_changes_no_bit():
    grads = _delta_case()
    low, high = grads(), grads(delta_output=FP32)
    assert all(torch.equal(a, b) for a, b in zip(grads(delta_error="sham"), low))
    for mirrored, lp, hp in zip(grads(delta_error="mirror"), low, high):
        torch.testing.assert_close(mirrored, 2 * hp - lp, rtol=1e-4, atol=1e-5)


def test_random_sign_keeps_the_size_of_the_error():
    grads = _delta_case()
    (low, *_), (high, *_) = grads(), grads(delta_output=FP32)
    a, b = grads(delta_error="random_sign", seed=3)[0], grads(delta_error="random_sign", seed=4)[0]
    assert torch.equal(a, grads(delta_error="random_sign", seed=3)[0]) and not torch.equal(a, b)
    torch.testing.assert_close(
        (a - high).norm(dim=-1), (low - high).norm(dim=-1), rtol=1e-3, atol=1e-5
    )
    same = ((a - high) * (low - high)).sum(-1)[:, :, 2:] > 0
    assert 0.3 < same.double().mean() < 0.7


def test_injected_error_has_the_given_moments():
    case = _crafted("tied", heads=2000, D=4)
    n = parse_numerics("exact,delta_error=injected,mean=0.25,rms=0.5")
    error = -(_run(numerics=n, **case)[1][0][..., 1])
    assert error.mean().item() == pytest.approx(0.25, abs=0.05)
    assert error.std().item() == pytest.approx(0.5, rel=0.06)


@pytest.mark.parametrize("kind", ["random_direction", "leading_direction", "fixed_direction"])
def test_directions_keep_sizes_and_only_touch_dQ(kind):
    grads = _delta_case()
    low, high = grads(), grads(delta_output=FP32)
    turned = grads(delta_error=kind, seed=1)
    assert torch.equal(turned[1], high[1]) and torch.equal(turned[2], high[2])
    stray, real = turned[0] - high[0], low[0] - high[0]
    torch.testing.assert_close(stray.norm(dim=-1), real.norm(dim=-1), rtol=1e-3, atol=1e-5)
    unit = F.normalize(stray[stray.norm(dim=-1) > 1e-3], dim=-1)
    shared = torch.linalg.matrix_norm(unit, 2).item() ** 2 / len(unit)
    assert shared < 0.3 if kind == "random_direction" else shared > 0.4  # two heads
    again = grads(delta_error=kind, seed=2)[0]
    close = (again - turned[0]).abs().max() < 1e-6
    assert not close if kind == "random_direction" else close


def test_delta_error_with_the_other_delta_is_refused():
    n = parse_numerics("exact,delta=dP_P,delta_error=mirror")
    assert "delta='dO_O'" in emulated.supports(n)


# -- stochastic rounding --------------------------------------------------------------------------


@pytest.mark.parametrize("site", SITE_NAMES)
def test_stochastic_sites_follow_the_seed_and_only_it(site):
    q, k, v, dout = (torch.randn(1, 2, 20, 8) for _ in range(4))
    n = parse_numerics(f"exact,reference=running,tile=8,{site}=bf16:stochastic")

    def all_of(seed):
        torch.rand(7)  # the global random state has no say
        result, grads = _run(q, k, v, dout, n, seed=seed)
        return [result.out, result.lse, *grads]

    a, b, c = all_of(5), all_of(5), all_of(6)
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    assert not all(torch.equal(x, y) for x, y in zip(a, c))


def test_backward_meets_the_scores_that_the_forward_drew():
    q, k, v = (torch.randn(1, 1, 30, 8) for _ in range(3))
    result, (_, _, dV) = _run(
        q, k, v, torch.ones_like(v), "exact,scores=bf16.2:stochastic", seed=9
    )
    # with dO = 1, dV sums the columns of P; every row of P sums to 1 only for the same draw
    assert dV[..., 0].sum().item() == pytest.approx(30, rel=1e-5)


def test_stochastic_output_is_unbiased_where_nearest_even_is_not():
    case = _crafted("tied", heads=128)
    text = "exact,inputs=bf16,unnormalized=bf16"
    biased, stderr = _signed_mean(_bias_in_ulps(text, case))
    unbiased, stderr = _signed_mean(_bias_in_ulps(text + ":stochastic", case))
    assert abs(biased) > 20 * stderr and abs(unbiased) < 4 * stderr


# -- properties -----------------------------------------------------------------------------------

SCORES = st.lists(st.integers(-60, 60).map(lambda i: i / 2), min_size=1, max_size=20)


@settings(max_examples=25, deadline=None)
@given(scores=SCORES, shift=st.integers(-32, 32), causal=st.booleans())
def test_shift_invariance_is_exact_when_the_shift_is(scores, shift, causal):
    a, _ = _run(numerics="paper", **(case := _row(scores, causal=causal)))
    case["k"] = case["k"].clone()
    case["k"][..., 0] += shift
    b, _ = _run(numerics="paper", **case)
    assert torch.equal(a.out, b.out) and torch.equal(a.ties, b.ties)
    torch.testing.assert_close(a.lse + shift, b.lse, rtol=1e-6, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(scores=SCORES, seed=st.integers(0, 10**6))
def test_key_permutation_moves_nothing_but_the_last_bit(scores, seed):
    case = _row(scores)
    a, (dq, dk, dv) = _run(numerics="paper,output=fp32,unnormalized=fp32,gradients=fp32", **case)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    moved = case | {x: case[x][:, :, order] for x in "kv"}
    b, (dq2, dk2, dv2) = _run(
        numerics="paper,output=fp32,unnormalized=fp32,gradients=fp32", **moved
    )
    assert torch.equal(a.ties, b.ties) and torch.equal(a.ones, b.ones)
    for x, y in ((a.out, b.out), (dv[:, :, order], dv2)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    for x, y in ((dk[:, :, order], dk2), (dq, dq2)):  # dS in bf16: one step of it at most
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@settings(max_examples=30, deadline=None)
@given(scores=SCORES, causal=st.booleans(), reference=st.sampled_from(["row", "running"]))
def test_ties_and_ones_are_counted_at_either_sign_and_at_zero(scores, causal, reference):
    case = _row(scores, causal=causal)
    result, _ = _run(numerics=f"exact,tile=4,reference={reference}", **case)
    seen = scores[:1] if causal else scores
    assert result.ties.item() == seen.count(max(seen))
    assert result.ones.item() >= result.ties.item()
    if reference == "row":
        assert result.ones.item() == result.ties.item()


@settings(max_examples=20, deadline=None)
@given(
    size=st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e15]),
    T=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_huge_and_tiny_logits_stay_finite_and_repeat_bit_for_bit(size, T, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, 2, T, 8, generator=generator) for _ in range(4))
    for text in ("paper", "flash,tile=4", "authors,tile=4", "guarded"):
        a, ga = _run(q * size, k, v, dout, text)
        b, gb = _run(q * size, k, v, dout, text)
        for x, y in zip((a.out, a.lse, *ga), (b.out, b.lse, *gb)):
            assert x.isfinite().all() and torch.equal(x, y)
        assert (a.out.amax(2) <= v.amax(2) + 0.02 * v.abs().amax()).all()


@pytest.mark.parametrize("alpha", [0.25, 1 / math.sqrt(8), -0.3, 0.0])
def test_a_product_is_rounded_before_it_is_scaled(alpha):
    """On every machine: a library that scales a factor first would make other numbers of it."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (3, 16, 16), generator=generator) / 4 for _ in range(2))
    exact = a @ b  # sums of multiples of 1/16: no rounding
    addend = torch.zeros(1, 16, 16).masked_fill(
        torch.rand(16, 16, generator=generator) < 0.3, -math.inf
    )
    assert torch.equal(scaled_product(a, b, alpha), exact * alpha)
    assert torch.equal(scaled_product(a, b, alpha, addend), exact * alpha + addend)


# -- one tile -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["flash", "authors", "authors,matched_bits=3", "flash,row_sum=bf16,reference_format=bf16.2",
     "flash,softmax=stabilized,decide=tile,eps=0.5", "authors,softmax=guarded,decide=tile",
     "paper,accumulate=tile,unnormalized=bf16.3", "flash,delta_output=fp32"],
)  # fmt: skip
def test_where_all_keys_are_in_one_tile_nothing_is_carried(text):
    """Forward, probes and gradients, by the numerics that carry and by those that do not."""
    n = parse_numerics(text).at(tile=48)
    q, k, v, dout = (_bf16(2, 2, T, 16) for T in (40, 48, 48, 40))
    k[:, :, 20:] = k[:, :, 3:4]  # ties
    results = []
    for same in (n, n.in_one_tile()):
        found, grads = _run(3 * q, k, v + 1, dout, same)
        results.append([found.out, found.lse, found.l, found.ties, found.ones, *grads])
    for a, b in zip(*results):
        assert torch.equal(a, b)
