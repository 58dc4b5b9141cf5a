"""The public call: shapes, dtypes, heads, autograd, compile, autocast, probes, seeds, backends."""

import math

import pytest
import torch

from kernels import FP32, FP64, Probe, attention, exact, flash, oracle, paper, resolve_backend
from kernels.emulated import forward as emulated_forward

CLOSE = dict(rtol=1e-4, atol=2e-5)


def _qkv(B=2, H=4, Hkv=4, Tq=9, Tk=9, D=8, Dv=8, dtype=torch.float32, grad=True):
    shapes = (B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)
    return [torch.randn(s).to(dtype).requires_grad_(grad) for s in shapes]


def _check_against_oracle(q, k, v, causal=True, mask=None, close=CLOSE, **kwargs):
    out = attention(q, k, v, causal=causal, mask=mask, **({"numerics": "exact"} | kwargs))
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    scale = kwargs.get("scale")
    truth, _ = oracle.attention_forward(q, k, v, causal, scale, mask)
    expected = (truth, *oracle.attention_backward(dout, q, k, v, causal, scale, mask))
    for mine, ref, like in zip((out, *grads), expected, (v, q, k, v)):
        assert mine.dtype == like.dtype and mine.shape == ref.shape
        torch.testing.assert_close(mine.double(), ref, **close)


# -- shapes, layouts, dtypes ----------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        dict(Tq=1, Tk=1),
        dict(Tq=1, Tk=17),
        dict(Tq=17, Tk=5),
        dict(Hkv=2),
        dict(Hkv=1, D=40, Dv=24),
        dict(D=1, Dv=3),
        dict(B=1, H=1, Hkv=1, Tq=65, Tk=33, D=80),
    ],
    ids=str,
)
def test_shapes(shape, causal):
    _check_against_oracle(*_qkv(**shape), causal=causal)
    _check_against_oracle(*_qkv(**shape), causal=causal, numerics="exact,reference=running,tile=4")


def test_scale_is_one_over_the_root_of_D_unless_given():
    q, k, v = _qkv(grad=False)
    a = attention(q, k, v, numerics="exact")
    assert torch.equal(a, attention(q, k, v, numerics="exact", scale=1 / math.sqrt(8)))
    _check_against_oracle(*_qkv(), scale=0.7)


@pytest.mark.parametrize(
    "kind", ["bool", "additive", "half", "per head", "per key", "hidden row", "bool and causal"]
)
def test_masks(kind):
    mask = {
        "additive": lambda: torch.randn(9, 9),
        "half": lambda: torch.randn(9, 9).half(),
        "per head": lambda: torch.rand(1, 4, 9, 9) < 0.5,
        "per key": lambda: torch.rand(2, 1, 1, 9) < 0.7,
    }.get(kind, lambda: torch.rand(9, 9) < 0.6)()
    if kind == "hidden row":
        mask[3] = False
    for tile in (4, 128):
        text = f"exact,reference=running,tile={tile}"
        _check_against_oracle(*_qkv(), causal="causal" in kind, mask=mask, numerics=text)


def test_additive_lowest_numbers_are_masked_and_count_as_no_tie():
    q, k, v = _qkv(B=1, H=1, Hkv=1, Tq=3, Tk=4, grad=False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        lowest = torch.finfo(dtype).min
        mask = torch.zeros(3, 4, dtype=dtype)
        mask[0, 2:] = lowest
        mask[1] = lowest
        mask[2, :2] = torch.tensor(lowest) + torch.tensor(lowest)  # -inf
        probe = Probe()
        out = attention(q, k, v, numerics="paper", causal=False, mask=mask, probe=probe)
        seen = mask == 0
        assert torch.equal(out, attention(q, k, v, numerics="paper", causal=False, mask=seen))
        assert probe.ties[0, 0, 1] == 0 and probe.lse[0, 0, 1] == -math.inf
        assert (out[0, 0, 1] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("text", ["exact", "paper"])
def test_dtypes(dtype, text):
    if dtype == torch.float64:
        text += ",compute=fp64"
    close = {torch.float64: dict(rtol=1e-10, atol=1e-10)} if text == "exact,compute=fp64" else {}
    close = close.get(dtype, dict(rtol=3e-2, atol=3e-2))
    _check_against_oracle(*_qkv(dtype=dtype), numerics=text, close=close)


def test_half_precision_inputs_compute_as_their_values_do_in_fp32():
    q, k, v = _qkv(dtype=torch.bfloat16, grad=False)
    half = attention(q, k, v, numerics="paper")
    full = attention(q.float(), k.float(), v.float(), numerics="paper")
    assert half.dtype == torch.bfloat16 and torch.equal(half.float(), full)


def test_output_that_does_not_fit_the_dtype_is_kept_for_the_backward():
    """exact on bf16 inputs: delta reads the fp32 O, although the caller gets bf16."""
    q, k, v = _qkv(dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    dout = torch.randn(2, 4, 9, 8).bfloat16()
    attention(q, k, v, numerics="exact").backward(dout)
    attention(*wide, numerics="exact").backward(dout.float())
    for half, full in zip((q, k, v), wide):
        assert torch.equal(half.grad, full.grad.bfloat16())


@pytest.mark.parametrize(
    "shape",
    [dict(B=0), dict(H=0, Hkv=1), dict(Tq=0), dict(Tk=0), dict(Tq=0, Tk=0), dict(D=0), dict(Dv=0)],
    ids=str,
)
def test_zero_lengths_give_empty_or_zero_results(shape):
    q, k, v = _qkv(**shape)
    probe = Probe()
    out = attention(q, k, v, numerics="paper", causal=False, probe=probe)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert probe.ties.shape == q.shape[:3]
    out.sum().backward()
    assert all(x.grad.shape == x.shape and x.grad.isfinite().all() for x in (q, k, v))
    if k.shape[2] == 0:
        assert (out == 0).all() and (probe.lse == -math.inf).all() and (probe.ties == 0).all()


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(k=torch.zeros(2, 3, 9, 8)), "same heads"),
        (dict(k=torch.zeros(2, 3, 9, 8), v=torch.zeros(2, 3, 9, 8)), "multiple of key heads"),
        (dict(k=torch.zeros(2, 4, 9, 7)), "same head dimension"),
        (dict(v=torch.zeros(2, 4, 8, 8)), "same heads and length"),
        (dict(q=torch.zeros(1, 4, 9, 8)), "batch sizes differ"),
        (dict(q=torch.zeros(4, 9, 8)), "q has 3 dimensions"),
        (dict(q=torch.zeros(2, 4, 9, 8).long()), "floating-point"),
        (dict(numerics=["exact"] * 3), "3 numerics for 4 query heads"),
        (dict(numerics="papr"), "did you mean 'paper'"),
        (dict(backend="cuda"), "unknown backend 'cuda'"),
        (dict(mask=torch.zeros(9, 9).long()), "additive float"),
        (dict(mask=torch.zeros(3, 9, 9)), "does not broadcast"),
        (dict(numerics=None), "numerics is a NoneType"),
        (dict(mask=torch.zeros(9, 9, requires_grad=True)), "mask.detach"),
        (dict(numerics=["exact", "exact,compute=fp64"] * 2), "share `compute`"),
    ],
)
def test_mistakes_get_a_sentence(change, told):
    q, k, v = _qkv(grad=False)
    with pytest.raises(ValueError, match=told):
        attention(**(dict(q=q, k=k, v=v, numerics="exact") | change))


def test_float64_inputs_ask_for_float64_arithmetic():
    with pytest.raises(ValueError, match="compute=fp64"):
        attention(*_qkv(dtype=torch.float64), numerics="exact")


# -- heads ----------------------------------------------------------------------------------------


def test_each_head_follows_its_own_numerics():
    q, k, v = _qkv(Hkv=2)
    per_head = [exact(), paper(), "exact,output_bits=2,delta_output=fp32", paper()]
    dout = torch.randn_like(q)
    probe = Probe()
    out = attention(q, k, v, numerics=per_head, probe=probe)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    wide = [x.detach().repeat_interleave(2, 1).requires_grad_() for x in (k, v)]
    for head, numerics in enumerate(per_head):
        one = [x[:, head : head + 1].detach().requires_grad_() for x in (q, *wide)]
        single = Probe()
        alone = attention(*one, numerics=numerics, probe=single)
        assert torch.equal(out[:, head], alone[:, 0])
        grad = torch.autograd.grad(alone, one, dout[:, head : head + 1])
        assert torch.equal(dq[:, head], grad[0][:, 0])
        for name in ("ties", "ones", "m", "l", "lse", "out_fp32"):
            assert torch.equal(getattr(probe, name)[:, head], getattr(single, name)[:, 0])


def test_equal_numerics_per_head_are_the_same_as_one():
    q, k, v = _qkv(grad=False)
    a = attention(q, k, v, numerics="paper,output=bf16:stochastic", seed=3)
    b = attention(q, k, v, numerics=["paper,output=bf16:stochastic"] * 4, seed=3)
    mixed = ["paper,output=bf16:stochastic", paper().at(output="bf16:stochastic")] * 2
    c = attention(q, k, v, numerics=mixed, seed=3)
    assert torch.equal(a, b) and torch.equal(a, c)


def test_grouped_heads_equal_repeated_ones():
    q, k, v = _qkv(Hkv=2)
    out = attention(q, k, v, numerics="paper,gradients=fp32")
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    wide = [x.detach().repeat_interleave(2, 1).requires_grad_() for x in (k, v)]
    repeated = attention(q, *wide, numerics="paper,gradients=fp32")
    assert torch.equal(out, repeated)
    gk, gv = torch.autograd.grad(repeated, wide, dout)
    for mine, theirs in zip(grads[1:], (gk, gv)):
        torch.testing.assert_close(mine, theirs.unflatten(1, (2, 2)).sum(2))


def test_stochastic_inputs_round_a_shared_key_head_once():
    q, k, v = _qkv(B=1, H=2, Hkv=1, grad=False)
    q[:, 1] = q[:, 0].bfloat16()
    q[:, 0] = q[:, 1]  # on the grid, so that only k and v draw
    out = attention(q, k, v, numerics="exact,inputs=bf16:stochastic", seed=4)
    assert torch.equal(out[:, 0], out[:, 1])


# -- probes and seeds -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["paper", "flash,tile=4", "authors,tile=4", "exact,delta_error=sham"]
)
def test_probes_change_no_bit(text):
    results = []
    for probe in (None, Probe()):
        torch.manual_seed(1)
        q, k, v = _qkv()
        out = attention(q, k, v, numerics=text, probe=probe)
        results.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_probe_fields():
    q, k, v = _qkv()
    k.data[:, :, 5] = k.data[:, :, 2]
    probe = Probe()
    out = attention(q, k, v, numerics="paper", probe=probe)
    rows = (2, 4, 9)
    assert probe.ties.shape == probe.ones.shape == probe.m.shape == probe.l.shape == rows
    assert probe.ties.dtype == probe.ones.dtype == torch.int32
    assert probe.lse.dtype == FP32.torch_dtype and probe.out_fp32.shape == out.shape
    assert not probe.lse.requires_grad and not probe.out_fp32.requires_grad
    assert (probe.ties >= 1).all() and (probe.ties[:, :, :5] <= 5).all()
    torch.testing.assert_close(probe.lse, probe.m + probe.l.log())
    torch.testing.assert_close(probe.out_fp32, out, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("text", ["paper", "flash,tile=4,delta_output=fp32", "exact"])
def test_a_probe_of_rows_leaves_out_what_is_as_large_as_the_output(text):
    q, k, v = _qkv()
    whole, rows = Probe(), Probe(rows_only=True)
    outs = [attention(q, k, v, numerics=text, probe=probe) for probe in (whole, rows)]
    assert torch.equal(*outs) and rows.out_fp32 is None and whole.out_fp32 is not None
    for name in ("ties", "ones", "m", "l", "lse"):
        assert torch.equal(getattr(whole, name), getattr(rows, name)), name


def test_seed_may_be_a_number_or_a_tensor():
    q, k, v = _qkv(grad=False)
    text = "paper,probabilities=bf16:stochastic"
    a = attention(q, k, v, numerics=text, seed=7)
    assert torch.equal(a, attention(q, k, v, numerics=text, seed=torch.tensor(7)))
    assert not torch.equal(a, attention(q, k, v, numerics=text, seed=8))


# -- autograd, compile, autocast ------------------------------------------------------------------


def test_gradcheck_in_float64():
    q, k, v = _qkv(B=1, H=2, Hkv=1, Tq=4, Tk=5, D=3, Dv=2, dtype=torch.float64)
    mask = torch.rand(4, 5) < 0.8
    mask[1] = False
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, numerics=exact(FP64), causal=False, mask=mask), (q, k, v)
    )


def test_only_the_inputs_that_want_gradients_get_them():
    q, k, v = _qkv()
    k.requires_grad_(False)
    attention(q, k, v, numerics="paper").sum().backward()
    assert k.grad is None and q.grad is not None and v.grad is not None


def test_operators_pass_torchs_own_checks():
    q, k, v = _qkv(B=1, H=2, Hkv=1, Tq=4, Tk=5)
    arguments = (None, torch.tensor(0), paper().key, True, 0.5, "auto")
    torch.library.opcheck(
        torch.ops.bit_by_bit.attention_forward.default,
        (q, k, v, *arguments, "all"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiles_to_one_graph_with_equal_bits():
    numerics, mixed = paper(), [paper(), exact(), flash(4), exact()]

    def step(q, k, v, seed):
        probe = Probe()
        a = attention(q, k, v, numerics=numerics, seed=seed, probe=probe)
        b = attention(q, k, v, numerics=mixed)
        c = attention(q, k, v, numerics="paper,output=bf16:stochastic", seed=seed)
        return a, b, c, probe.ties

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed, T in ((torch.tensor(1), 9), (torch.tensor(2), 9), (torch.tensor(2), 11)):
        q, k, v = _qkv(Tq=T, Tk=T)  # the second length makes the graph's shapes symbolic
        plain, fused = step(q, k, v, seed), compiled(q, k, v, seed)
        assert all(torch.equal(a, b) for a, b in zip(plain, fused))
        grads = [torch.autograd.grad(sum(x[:3]).sum(), (q, k, v)) for x in (plain, fused)]
        assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.slow  # starts the inductor compiler
def test_two_numerics_in_two_compiled_functions_do_not_share_code():
    q, k, v = _qkv(grad=False)
    results = []
    for text in ("exact", "exact,output_bits=2"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v, t=text: attention(q, k, v, numerics=t))
        results.append(compiled(q, k, v))
        assert torch.equal(results[-1], attention(q, k, v, numerics=text))
    assert not torch.equal(*results)


def test_autocast_casts_all_inputs_and_keeps_the_arithmetic():
    q, k, v = _qkv(grad=False)
    expected = attention(*(x.bfloat16() for x in (q, k, v)), numerics="exact")
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention(q, k.half(), v, numerics="exact")
    # without autocast switched off inside, P_bar and S would be bf16 products
    wide = attention(*(x.bfloat16().float() for x in (q, k.half(), v)), numerics="exact")
    assert inside.dtype == torch.bfloat16 == expected.dtype
    assert torch.equal(inside, wide.bfloat16())


def test_a_lowered_matmul_precision_is_not_inherited():
    q, k, v = _qkv(Tq=65, Tk=65, D=64, grad=False)
    expected = attention(q, k, v, numerics="exact")
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(attention(q, k, v, numerics="exact"), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


# -- backends -------------------------------------------------------------------------------------


def test_resolve_says_what_and_why():
    name, reason = resolve_backend("paper", "cpu")
    assert name == "emulated" and "CUDA" in reason
    assert resolve_backend("exact", "cpu", backend="sdpa")[0] == "sdpa"
    with pytest.raises(ValueError, match="'sdpa' cannot run numerics 'paper'"):
        resolve_backend("paper", "cpu", backend="sdpa")


@pytest.mark.parametrize("numerics, tolerance", [(exact(), 1e-5), (flash(16), 2e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_is_an_outside_witness(numerics, tolerance, masked):
    q, k, v = _qkv(Hkv=2, Tq=40, Tk=40)
    mask = torch.rand(40, 40) < 0.9 if masked else None
    if masked:
        mask[:, 0] = True
    both = []
    for backend in ("sdpa", "emulated"):
        out = attention(q, k, v, numerics=numerics, backend=backend, mask=mask)
        both.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    for theirs, mine in zip(*both):
        assert ((theirs - mine).norm() / mine.norm()).item() < tolerance


@pytest.mark.parametrize(
    "kwargs, told",
    [
        (dict(numerics="paper"), "no rounding sites"),
        (dict(numerics="exact", probe=Probe()), "fills no probe"),
        (dict(numerics=["exact", "flash"] * 2), "one arithmetic for all heads"),
    ],
)
def test_sdpa_refuses_by_name_what_it_cannot_honour(kwargs, told):
    with pytest.raises(ValueError, match=told):
        attention(*_qkv(grad=False), backend="sdpa", **kwargs)


def test_the_operator_returns_what_the_emulator_computes():
    q, k, v = _qkv(grad=False)
    direct = emulated_forward(q, k, v, numerics=paper(), causal=True, scale=8**-0.5)
    assert torch.equal(attention(q, k, v, numerics=paper(), backend="emulated"), direct.out)
