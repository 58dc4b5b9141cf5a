"""The Triton kernels against the emulator: everything that they say they honour, case by case.

In the interpreter on small shapes, on a GPU on larger ones. The cases come from
`kernels.parity_cases`, so that a choice which `supports` accepts cannot be left out.
"""

from types import SimpleNamespace

import pytest
import torch

from kernels import attention, emulated, parity, triton_attention
from kernels.numerics import SITE_NAMES, Numerics, parse_numerics
from kernels.parity_cases import exact_cases, law_cases

pytest.importorskip("triton")
FEW = ("unnormalized", "random_sign")  # seconds each in the interpreter


def failures(gaps, n, case, parity_table):
    """Gaps beyond `parity.limits`; each gap becomes a row of the table."""
    found = []
    for g in gaps:
        ok = parity.limits(g.quantity, n).hold(g)
        numbers = dict(max_ulp=g.max_ulp, mismatched=g.mismatched, far=g.far)
        result = "ok" if ok else "FAILED"
        parity_table(g.quantity, case, result, **numbers, signed_mean_ulp=g.signed_mean_ulp)
        if not ok:
            found.append(g)
    return found


def check(text, module, shape, device, parity_table, dtype=torch.bfloat16):
    n = parse_numerics(text)
    T, D = shape[3], shape[5]
    n = n if T > n.tile else n.at(tile=16)
    kind = "fine" if n.inputs.format.fraction_bits < 7 else "coarse"
    tensors = parity.inputs(shape, kind=kind, device=device, dtype=dtype)
    gaps = parity.compare(module, n, tensors, causal=True, scale=D**-0.5)
    case = f"{text} T{T} D{D} causal" + ("" if dtype == torch.bfloat16 else f" {dtype}")
    assert not failures(gaps, n, case.replace("torch.", ""), parity_table)


@pytest.mark.gpu
@pytest.mark.parametrize("text", exact_cases())
def test_what_is_honoured_agrees_with_the_emulator(text, parity_table):
    assert triton_attention.supports(parse_numerics(text), device="cuda") is None
    check(text, triton_attention, (2, 3, 3, 200, 200, 64, 64), "cuda", parity_table)


@pytest.mark.interpreted
@pytest.mark.parametrize("text", exact_cases())
def test_what_is_honoured_agrees_in_the_interpreter(text, parity_table):
    check(text, triton_attention, (1, 1, 1, 37, 37, 16, 16), "cpu", parity_table)


@pytest.mark.parametrize(
    "device, shape",
    [
        pytest.param("cuda", (2, 3, 3, 200, 200, 64, 64), marks=pytest.mark.gpu),
        pytest.param("cpu", (1, 1, 1, 37, 37, 16, 16), marks=pytest.mark.interpreted),
    ],
)
@pytest.mark.parametrize("text", ("flash", "paper", "exact"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_wider_inputs_agree_with_the_emulator(dtype, text, device, shape, parity_table):
    check(text, triton_attention, shape, device, parity_table, dtype)


def other_numerics(module, change):
    """A backend that is asked for change(numerics) in place of numerics."""

    def told(function):
        return lambda *args, numerics, **rest: function(*args, numerics=change(numerics), **rest)

    return SimpleNamespace(forward=told(module.forward), backward=told(module.backward))


@pytest.mark.parametrize(
    "device, shape",
    [
        pytest.param("cuda", (2, 3, 3, 200, 200, 64, 64), marks=pytest.mark.gpu),
        pytest.param("cpu", (1, 1, 1, 37, 37, 16, 16), marks=pytest.mark.interpreted),
    ],
)
@pytest.mark.parametrize("text", ("authors", "authors,matched_bits=4", "paper,accumulate=tile"))
def test_all_keys_in_one_tile_agree_with_the_emulator(text, device, shape, parity_table):
    """Which carries from tile to tile; the Triton kernels are asked for a row at once."""
    n = parse_numerics(text).at(tile=512)
    kind = "fine" if n.inputs.format.fraction_bits < 7 else "coarse"
    tensors = parity.inputs(shape, kind=kind, device=device, dtype=torch.bfloat16)
    one_tile = other_numerics(triton_attention, Numerics.in_one_tile)
    gaps = parity.compare(one_tile, n, tensors, causal=True, scale=shape[5] ** -0.5)
    assert not failures(gaps, n, f"{text} in one tile T{shape[3]} D{shape[5]}", parity_table)


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu),
               pytest.param("cpu", marks=pytest.mark.interpreted)],
)  # fmt: skip
@pytest.mark.parametrize("numerics", ("authors", ["authors", "paper"]))
def test_attention_asks_for_one_tile_where_all_keys_are_in_one(numerics, device):
    """Forward and backward as operators, all heads alike or not; and longer rows are refused."""
    shape = (1, 2, 2, 40, 40, 16, 16)
    *parts, dout = parity.inputs(shape, kind="coarse", device=device, dtype=torch.bfloat16)
    found = []
    for backend in ("triton", "emulated"):
        q, k, v = (x.clone().requires_grad_() for x in parts)
        out = attention(q, k, v, numerics=numerics, causal=True, backend=backend)
        out.backward(dout)
        found.append([out, q.grad, k.grad, v.grad])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)
    longer = torch.zeros(1, 2, 513, 16, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="reference_format=bf16"):
        attention(longer, longer, longer, numerics=numerics, causal=True, backend="triton")


def law(text, module, shape, device, seeds):
    tensors = parity.inputs(shape, kind="gaussian", dtype=torch.float32, device=device)
    return parity.compare_law(module, parse_numerics(text), tensors, scale=1 / 4, seeds=seeds)


@pytest.mark.gpu
@pytest.mark.parametrize("text", law_cases())
def test_what_draws_is_equal_in_law(text, parity_table):
    laws = law(text, triton_attention, (2, 2, 2, 64, 64, 16, 16), "cuda", 64)
    for x in laws:
        told = dict(spread=x.spread, rms_z=x.rms_z)
        parity_table(
            "law", f"{text} {x.quantity}, 64 seeds", "ok" if x.equal else "FAILED", **told
        )
    assert all(x.equal for x in laws), laws


@pytest.mark.interpreted
@pytest.mark.parametrize("text", [text for text in law_cases() if any(x in text for x in FEW)])
def test_what_draws_is_equal_in_law_in_the_interpreter(text):
    assert all(x.equal for x in law(text, triton_attention, (1, 1, 1, 48, 48, 16, 16), "cpu", 6))


# -- the checks themselves, without a kernel ------------------------------------------------------


def deaf(site, instead="fp32"):
    """The emulator as a backend that does not hear of one site."""
    return other_numerics(emulated, lambda n: n.at(**{site: instead}))


@pytest.mark.parametrize("text", [text for text in exact_cases() if text.endswith("=bf16.4")])
def test_a_backend_that_ignores_a_site_fails_its_parity_case(text):
    site = text.removeprefix("paper,").partition("=")[0]
    shape, unwritten = (1, 2, 2, 37, 37, 16, 16), (lambda *row, **numbers: None)
    check(text, emulated, shape, "cpu", unwritten)
    with pytest.raises(AssertionError):
        check(text, deaf(site), shape, "cpu", unwritten)


@pytest.mark.parametrize("text", ["paper", "paper,gradients=fp32", "paper,output=fp32", "exact"])
def test_an_fp32_number_that_was_rounded_on_its_way_fails(text):
    """The probe's O, and gradients and O where they are to be stored in fp32."""

    def coarse(function):
        def rounded(*args, numerics, **rest):
            found = function(*args, numerics=numerics, **rest)
            if isinstance(found, tuple):
                return tuple(x.bfloat16().float() for x in found)
            found.out_fp32 = found.out_fp32.bfloat16().float()
            return found

        return rounded

    module = SimpleNamespace(forward=coarse(emulated.forward), backward=coarse(emulated.backward))
    n = parse_numerics(text)
    tensors = parity.inputs((1, 2, 2, 37, 37, 16, 16))
    gaps = parity.compare(module, n, tensors, scale=1 / 4)
    seen = {g.quantity for g in gaps if not parity.limits(g.quantity, n).hold(g)}
    gradients = {"dq", "dk", "dv"} if text in ("exact", "paper,gradients=fp32") else set()
    assert seen == {"out_fp32"} | gradients


@pytest.mark.parametrize("mode", ["nearest_even", "toward_zero"])
@pytest.mark.parametrize("text", [text for text in law_cases() if text.endswith(":stochastic")])
def test_a_backend_that_does_not_draw_or_is_biased_has_another_law(text, mode):
    shape = (1, 2, 2, 32, 32, 16, 16)
    assert all(x.equal for x in law(text, emulated, shape, "cpu", 24))
    site = text.removeprefix("exact,").partition("=")[0]
    settled = deaf(site, f"bf16.4:{mode}")
    assert not all(x.equal for x in law(text, settled, shape, "cpu", 24))


def test_cases_cover_what_the_backend_honours():
    """Ten sites round in Triton; each has its cases in both narrow formats, and one that draws."""
    rounded = [s for s in SITE_NAMES if s not in ("reference_format", "row_sum", "lse")]
    tested = [parse_numerics(text) for text in exact_cases()]
    for site in rounded:
        formats = {str(getattr(n, site)) for n in tested if getattr(n, site) is not None}
        assert {"fp32", "bf16", "bf16.4"} <= formats, site
        assert any(f"{site}=bf16.4:stochastic" in text for text in law_cases())
    assert {"bf16", "bf16.4"} <= {str(n.row_sum) for n in tested}  # to nearest even alone
    assert not any("fp16" in text or "toward_zero" in text for text in exact_cases())
    along = [text.split("=")[-1] for text in (*exact_cases(), *law_cases()) if "direct" in text]
    assert along == ["own_direction", "leading_direction", "random_direction"]
