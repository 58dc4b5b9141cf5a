"""The backward for Hopper GPUs: whom it serves, what it compiles to, and its bits on a GPU."""

import math
import os

import pytest
import torch

from kernels import hopper_attention, parse_numerics, triton_attention
from kernels.triton_blocks import HOPPER_SHARED

pytest.importorskip("triton.experimental.gluon")


def shapes(T, D, heads=4):
    size, keys = (2, 4, T, D), (2, heads, T, D)
    return dict(shapes=[size, keys, keys, size], strides=[(4 * T * D, T * D, D, 1)] * 4)


CALL = dict(dtypes=[torch.bfloat16] * 4, addresses=[512, 1024, 1536, 2048], capability=(9, 0))
CALL |= shapes(1024, 64) | dict(causal=True)


@pytest.mark.parametrize(
    "text",
    ["flash", "paper", "stabilized", "flash,tile=64", "paper,output_bits=2",
     "paper,delta_output=fp32", "paper,delta_error=mirror"],
)  # fmt: skip
def test_served(text):
    assert hopper_attention.backward_refusal(parse_numerics(text), **CALL) is None
    wide = CALL | shapes(1024, 128)
    assert hopper_attention.backward_refusal(parse_numerics("flash"), **wide) is None
    full = CALL | shapes(512, 64) | dict(causal=False)
    assert hopper_attention.backward_refusal(parse_numerics(text), **full) is None


@pytest.mark.parametrize(
    "text, other, reason",
    [
        ("flash", dict(capability=(8, 0)), "capability 8.0"),
        ("flash", dict(dtypes=[torch.bfloat16] * 3 + [torch.float32]), "float32"),
        ("flash", shapes(1024, 80), "dimensions 80 and 80"),
        ("flash", shapes(1024, 64, heads=2), "grouped queries"),
        ("flash", shapes(512, 64), "sees 256 keys on average"),
        ("flash", shapes(512, 128), "sees 256 keys on average"),
        ("flash", dict(addresses=[512, 1024, 1536, 2056]), "16 bytes"),
        ("flash", dict(strides=[(76_800, 0, 64, 1)] * 4), "strides"),
        ("paper,delta=dP_P", {}, "delta=dP_P"),
        ("paper,scores=bf16:stochastic", {}, "stochastic"),
        ("paper,scores=bf16.4", {}, "scores=bf16.4"),
        ("flash,backward_probabilities=fp32", {}, "backward_probabilities=fp32"),
        ("flash,grad_probabilities=bf16", {}, "grad_probabilities=bf16"),
        ("flash,grad_scores=fp32", {}, "grad_scores=fp32"),
        ("flash,gradients=fp32", {}, "gradients=fp32"),
        ("exact", {}, "not served"),
    ],
)
def test_refused_in_one_sentence(text, other, reason):
    why = hopper_attention.backward_refusal(parse_numerics(text), **CALL | other)
    assert reason in why and "\n" not in why


@pytest.mark.parametrize("head_dim", (64, 128))
def test_the_general_kernel_sums_the_same_rows_at_a_time(head_dim):
    """Blocks that the order of sums in `kernels.hopper_backward` was written for."""
    numerics = parse_numerics("flash")
    keys, queries = (
        triton_attention._blocks(kernel, numerics, head_dim, head_dim, 2, HOPPER_SHARED)
        for kernel in ("grad_keys", "grad_queries")
    )
    assert (keys.block_m, keys.block_n) == (hopper_attention.WALKED, hopper_attention.ROWS)
    assert queries.block_m == hopper_attention.PARTS * hopper_attention.ROWS
    assert queries.block_n == hopper_attention.WALKED


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize("kernel", ("grad_keys", "grad_queries"))
@pytest.mark.parametrize(
    "text, head_dim, causal",
    [("flash", 64, True), ("paper", 64, False), ("flash", 128, True), ("paper", 128, True)],
)
def test_exponentials_run_beside_the_products(
    kernel, text, head_dim, causal, tmp_path, monkeypatch
):
    """Machine code, since the assembler sorts instructions."""
    from kernels.triton_compile import beside_products, compile_hopper, machine_code

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    built = compile_hopper(parse_numerics(text), kernel, head_dim=head_dim, causal=causal)
    assert built.matrix_instructions == ("wgmma.mma_async",)
    assert built.shared <= HOPPER_SHARED
    assert built.spilled <= (0 if head_dim == 64 else 160)  # bytes, outside the loop over tiles
    assert "fma.rn.f32" not in built.ptx  # contraction would move a rounding
    assert "st.global.v4.b32" in built.ptx  # gradients of any strides, yet 16 bytes at a time
    # of each consumer's 32 of the first tile and 32 of a later one
    beside, hazards = beside_products(machine_code(built.cubin), "MUFU.EX2")
    assert beside >= 2 * 60 and not hazards


# -- bits, on a GPU -------------------------------------------------------------------------------


@pytest.fixture
def hopper_gpu():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def draw(B, Tq, Tk, D=64):
    """q, k, v, dO of 3 heads, views of rows [B, T, H, D]."""
    generator = torch.Generator("cuda").manual_seed(1)
    q, dO = torch.randn(2, B, Tq, 3, D, generator=generator, device="cuda").bfloat16()
    k, v = torch.randn(2, B, Tk, 3, D, generator=generator, device="cuda").bfloat16()
    return [x.transpose(1, 2) for x in (2 * q, k, v + 0.5, dO)]


def calls(q, k, v, dO, numerics, causal, scale):
    """The Hopper backward and the general one, of one forward: functions without arguments."""
    choices = dict(numerics=numerics, causal=causal, scale=scale)
    found = triton_attention.forward(q, k, v, **choices)
    given = (dO, q, k, v)
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    deltas = triton_attention._deltas(numerics, dO, found.out, found.delta_output, seed)
    return (
        lambda: hopper_attention.backward(*given, found.lse, *deltas, **choices),
        lambda: triton_attention.backward(
            *given, found.out, found.lse, found.delta_output, blocks={}, **choices
        ),
    )


def assert_same_bits(got, want):
    for name, a, b in zip(("dq", "dk", "dv"), got, want):
        parts = a.view(torch.int16) != b.view(torch.int16)
        assert not parts.any(), (name, a.shape, int(parts.sum()), parts.nonzero()[:5].tolist(),
                                 a[parts][:5].tolist(), b[parts][:5].tolist())  # fmt: skip


SIZES = [(1, 1), (64, 64), (65, 65), (128, 128), (129, 129), (1000, 1000), (384, 640), (640, 384),
         (100, 1000), (1000, 100), (2048, 2048)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text, D, scale",
    [("flash", 64, 1 / 8), ("flash", 64, 0.3), ("paper", 64, 1 / 8), ("paper", 64, 0.3),
     ("flash", 64, -0.25), ("paper,delta_output=fp32", 64, 1 / 8),
     ("paper,delta_error=dQ_alone", 64, 1 / 8), ("flash", 128, 1 / math.sqrt(128)),
     ("paper", 128, 1 / math.sqrt(128)), ("flash", 128, 1 / 8)],
)  # fmt: skip
@pytest.mark.parametrize("causal", (True, False))
def test_the_bits_of_the_general_kernels(text, D, scale, causal, hopper_gpu):
    for Tq, Tk in SIZES:
        hopper, general = calls(*draw(2, Tq, Tk, D), parse_numerics(text), causal, scale)
        want = general()
        for _ in range(2):
            assert_same_bits(hopper(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("D", (64, 128))
@pytest.mark.parametrize("causal", (True, False))
def test_more_blocks_than_programs(D, causal, hopper_gpu):
    """Each program computes several, and goes round its rings many times."""
    hopper, general = calls(*draw(40, 1000, 1000, D), parse_numerics("flash"), causal, 1 / 8)
    assert_same_bits(hopper(), general())


@pytest.mark.gpu
@pytest.mark.parametrize("text", ("flash", "paper"))
def test_served_in_a_graph(text, hopper_gpu, monkeypatch):
    """The copy engine's descriptors are made on the host, at each call; a graph keeps them."""
    q, k, v, dO = draw(1, 1024, 1024)
    choices = dict(numerics=parse_numerics(text), causal=True, scale=1 / math.sqrt(64))
    served, right = [], hopper_attention.backward
    monkeypatch.setattr(
        hopper_attention, "backward", lambda *x, **y: served.append(1) or right(*x, **y)
    )

    def both(**other):
        f = triton_attention.forward(q, k, v, **choices)
        return triton_attention.backward(
            dO, q, k, v, f.out, f.lse, f.delta_output, **other, **choices
        )

    plain = both()
    assert served == [1]
    assert_same_bits(plain, both(blocks={}))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = both()
    assert served == [1, 1]
    q.copy_(q.flip(2))  # other numbers in the tensors that the graph reads
    graph.replay()
    assert not torch.equal(kept[0], plain[0])
    assert_same_bits(kept, both(blocks={}))
