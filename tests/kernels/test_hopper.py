"""The forward for Hopper GPUs: whom it serves, what it compiles to, and its bits on a GPU."""

import math
import os
import re
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import hopper_attention, hopper_tuning, parse_numerics, triton_attention
from kernels.hopper_plans import LEAST_KEYS, plan_of
from kernels.result import ForwardResult
from kernels.triton_blocks import HOPPER_SHARED

pytest.importorskip("triton.experimental.gluon")


def shapes(T, D):
    return dict(shapes=[(2, 4, T, D)] * 3, strides=[(4 * T * D, T * D, D, 1)] * 3)


TILED = "stabilized,decide=tile,reference=running"
FP32_TILED = "flash,softmax=guarded,decide=tile"

CALL = dict(dtype=torch.bfloat16, capability=(9, 0), causal=True, scale=1 / 8, probe=False)
CALL |= dict(addresses=[512, 1024, 1536]) | shapes(4096, 64)


def general_blocks(numerics, head_dim):
    """Of the kernel that serves every GPU, on this one."""
    return triton_attention._blocks("forward", numerics, head_dim, head_dim, 2, HOPPER_SHARED)


@pytest.mark.parametrize("probe", (False, True))
@pytest.mark.parametrize(
    "text",
    ["flash", "paper", "flash,delta=dP_P", "paper,delta_output=fp32", TILED, FP32_TILED,
     f"{TILED},softmax=guarded,eps=0.5", "stabilized", "guarded,eps=0.5"],
)  # fmt: skip
def test_served(text, probe):
    assert hopper_attention.refusal(parse_numerics(text), **CALL | dict(probe=probe)) is None


@pytest.mark.parametrize(
    "text, other, reason",
    [
        ("flash", dict(capability=(8, 0)), "capability 8.0"),
        ("flash", dict(probe=True, causal=False) | shapes(524_161, 64), "524161 keys"),
        ("flash", dict(scale=-0.5), "scale=-0.5"),
        ("flash", dict(dtype=torch.float16), "float16"),
        ("flash", dict(shapes=[(1, 1, 9, 80)] * 3), "dimensions 80 and 80"),
        ("flash", dict(addresses=[512, 1032, 1536]), "16 bytes"),
        ("flash", shapes(254, 64), "127 keys on average"),
        ("flash", dict(probe=True) | shapes(254, 64), "127 keys on average"),
        ("paper", shapes(254, 64), "127 keys on average"),
        ("paper", shapes(254, 128), "127 keys on average"),
        ("flash", dict(strides=[(76_800, 19_200, 1, 300)] * 3), "strides"),
        ("flash", dict(strides=[(76_800, 0, 64, 1)] * 3), "strides"),
        ("flash", dict(strides=[(76_804, 19_201, 64, 1)] * 3), "strides"),
        ("flash,tile=64", {}, "tile=64"),
        (TILED, shapes(254, 64), "127 keys on average"),
        ("stabilized,scores=fp32", {}, "scores=fp32"),
        ("stabilized,decide=tile", {}, "decide=tile with reference=row"),
        ("flash,softmax=shifted,shift=1", {}, "softmax=shifted"),
        (f"{TILED},tile=64", {}, "tile=64"),
        (f"{TILED},unnormalized=fp32", {}, "unnormalized=fp32"),
        ("paper,output=bf16:stochastic", {}, "stochastic"),
        ("paper,row_sum_source=rounded", {}, "row_sum_source"),
        ("paper,output_bits=2", {}, "bf16.2"),
        ("flash,probabilities=fp32", {}, "probabilities=fp32"),
        ("flash,scores=bf16", {}, "scores=bf16"),
        ("paper,scores=fp32", {}, "scores=fp32"),
        ("flash,delta_output=bf16:stochastic", {}, "stochastic"),
        ("paper,delta_output=fp16", {}, "delta_output=fp16"),
    ],
)
def test_refused_in_one_sentence(text, other, reason):
    why = hopper_attention.refusal(parse_numerics(text), **CALL | other)
    assert reason in why and "\n" not in why


@pytest.mark.parametrize(
    "text, other",
    [
        ("flash", shapes(256, 64)),
        ("flash", dict(causal=False) | shapes(128, 64)),
        ("paper", shapes(1024, 64)),
        ("flash", shapes(1, 128)),
        ("paper", shapes(256, 128)),
        ("paper", dict(causal=False) | shapes(128, 128)),
    ],
)
def test_served_where_it_was_faster(text, other):
    assert hopper_attention.refusal(parse_numerics(text), **CALL | other) is None


@pytest.mark.parametrize(
    "text, probe, kind",
    [
        ("flash", False, "plain"),
        ("flash,delta=dP_P", False, "plain"),
        ("flash", "rows", "probed"),
        ("paper", False, "row"),
        ("paper,reference=running", False, "running"),
        ("flash,delta_output=fp32", False, "running"),
        ("flash,delta_output=fp32,delta=dP_P", False, "plain"),
        (TILED, False, "running"),
        (FP32_TILED, False, "running"),
    ],
)
def test_every_kind_has_a_plan(text, probe, kind):
    assert hopper_attention.kind_of(parse_numerics(text), probe) == kind
    for head_dim in (64, 128):
        assert (kind, head_dim) in LEAST_KEYS
        for causal in (True, False):
            plan = plan_of(kind, head_dim, causal)
            assert 2 * plan.registers + 24 == 3 * plan.launch_registers


@pytest.mark.parametrize("Tq, Tk", [(1, 1), (5, 5), (3, 9), (9, 3), (7, 1)])
def test_mean_keys_counts_the_mask(Tq, Tk):
    mask = torch.ones(Tq, Tk).tril()
    assert hopper_attention.mean_keys(Tq, Tk, causal=True) == int(mask.sum()) // Tq
    assert hopper_attention.mean_keys(Tq, Tk, causal=False) == Tk


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("text, keys", [("flash", 128), ("paper", 64)])
def test_the_general_kernel_sums_the_same_keys_at_a_time(text, keys, head_dim):
    """What l is summed by here and there: with other blocks there the last bit of l may differ."""
    assert general_blocks(parse_numerics(text), head_dim).block_n == keys


def test_strides_of_single_elements_do_not_matter():
    one = dict(shapes=[(1, 1, 4300, 64)] * 3, strides=[(7, 1, 64, 1)] * 3)
    assert hopper_attention.refusal(parse_numerics("flash"), **CALL | one) is None
    from kernels.hopper_attention import describe

    x = torch.zeros(300, 64, dtype=torch.bfloat16).as_strided((1, 1, 300, 64), (7, 1, 64, 1))
    assert [s % 8 for s in describe(x, 64).strides] == [0, 0, 0, 1]


# -- compiled, without a GPU ----------------------------------------------------------------------


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize(
    "text, head_dim, probe",
    [
        ("flash", 64, False),
        ("flash,delta_output=fp32", 64, False),
        ("paper", 64, False),
        ("flash", 128, False),
        ("paper", 128, False),
        ("flash", 64, True),
        ("flash", 128, True),
        ("paper", 128, True),
        ("stabilized", 64, False),
        ("stabilized", 128, True),
        (TILED, 64, False),
        (TILED, 128, True),
        (FP32_TILED, 128, True),
    ],
)
def test_nothing_in_flight_is_touched(text, head_dim, probe, fresh_cache):
    """Machine code, since the assembler sorts instructions."""
    from kernels.triton_compile import beside_products, compile_hopper, machine_code

    for causal in (True, False) if text == "flash" and not probe else (True,):
        numerics = parse_numerics(text)
        built = compile_hopper(numerics, head_dim=head_dim, causal=causal, probe=probe)
        assert built.matrix_instructions == ("wgmma.mma_async",)
        assert built.shared <= HOPPER_SHARED and built.spilled <= 64
        own = re.sub(r"// begin inline asm.*?// end inline asm", "", built.ptx, flags=re.DOTALL)
        assert "fma.rn.f32" not in own  # it would move a rounding; `divide` asks for its own
        assert "cp.async.bulk.tensor.4d.global" in built.ptx  # O of any strides
        maxima, hazards = beside_products(machine_code(built.cubin), "FMNMX")
        assert not hazards
        if text == "paper" and not probe:  # of the first pass, what `hold` is for
            assert maxima >= 2 * 64


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize("text, probe", [("flash", False), ("stabilized", True)])
def test_a_first_tile_of_its_own_is_left_out_of_the_loop(text, probe, fresh_cache):
    """A loop that begins one tile early or late waits for ever on a GPU."""
    from kernels.triton_compile import beside_products, compile_hopper, machine_code

    for apart in (False, True):
        plan = replace(plan_of("plain", 64, True), apart=apart)
        built = compile_hopper(parse_numerics(text), probe=probe, plan=plan)
        found = re.findall(r"scf\.for %\S+ = %c(-?\d+)\w* to %tiles", built.ir)
        assert found.count("1" if apart else "0") >= 2  # both consumers; producers begin at 0
        assert set(found) <= {"0", "1"} and ("1" in found) == apart
        assert not beside_products(machine_code(built.cubin), "FMNMX")[1]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
def test_a_pair_of_scores_costs_one_instruction_each_time(fresh_cache):
    """The largest two by halves of a register; counts by sign bits and integer sums."""
    from kernels.triton_compile import compile_hopper, machine_code

    plan = replace(plan_of("probed", 64, True), apart=False)
    built = compile_hopper(parse_numerics(TILED), probe=True, plan=plan)
    operations = [operation for operation, _ in machine_code(built.cubin)]

    def count(pattern):
        return sum(bool(re.match(pattern, operation)) for operation in operations)

    consumers = 2  # with one copy of the softmax each
    pairs = count(r"V?HMNMX2?\.BF16(?!.*XORSIGN)")  # those with it are the divisions'
    assert pairs <= consumers * 88  # 16 + 16 + 8 + 4 of each of two rows
    assert count("HADD2.*BF16") == consumers * 32
    assert count("HFMA2.*BF16.*RELU") == consumers * (32 + 2 * 32)  # ties; ones, twice in the code


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
def test_ones_are_counted_where_products_read_the_weights(fresh_cache):
    """With a packed copy of P_bar for the count, every two scores would cost one more."""
    from kernels.triton_compile import compile_hopper, machine_code

    def packings(probe):
        plan = plan_of("plain", 64, True)
        built = compile_hopper(parse_numerics("flash"), probe=probe, plan=plan)
        return sum(op.startswith(("F2FP", "PRMT")) for op, _ in machine_code(built.cubin))

    assert packings("rows") <= packings(False) + 16


# -- counts in pairs ------------------------------------------------------------------------------


def assembly(name):
    from kernels import hopper_counts

    return getattr(hopper_counts, name).value


def bf16(pattern):
    """Patterns of bf16 (any integers) as fp64."""
    return torch.as_tensor(pattern).to(torch.int16).view(torch.bfloat16).double()


def constants(code):
    """The bf16 numbers of `mov` instructions, one a pair; both halves are the same."""
    found = [int(x, 16) for x in re.findall(r"mov.b32 \w+, 0x([0-9a-f]{8})", code)]
    assert all(x >> 16 == x & 0xFFFF for x in found)
    return [bf16((x & 0xFFFF) - (x >> 15 & 1) * 0x10000) for x in found]


def multiply_add_relu(a, b, c):
    """bf16 patterns of max(a b + c, 0); fp64 keeps its sign, and what is above 0 here exactly."""
    return (a * b + c).clamp(min=0).bfloat16().view(torch.int16)


def test_one_multiply_add_tells_a_one():
    p = bf16(torch.arange(0x3F80 + 1))  # 0 to 1
    found = multiply_add_relu(p, *constants(assembly("ONES_PAIR")))
    assert p[-1] == 1 and found[-1] == 1 << 7 and not found[:-1].any()


def test_subtraction_and_one_multiply_add_tell_a_tie():
    size = torch.arange(0x7F80)  # all that are finite
    for top in (0x0000, 0x0001, 0x0080, 0x3F80, 0x7F7F):
        for sign, below in ((1, size[: top + 1]), (-1, size[top:])):
            s, maximum = sign * bf16(below), sign * bf16(top)
            offset = (s - maximum).bfloat16().double()
            found = multiply_add_relu(offset, *constants(assembly("TIES_PAIR")))
            assert torch.equal(found, (s == maximum).to(torch.int16) << 7)


def counted(hits):
    """What int32 registers make of hits, bool [keys], as `ones_of_tile` and `row_counts` do it.

    Key 2 (lane + 4 i) + half of a tile is in a half of register i of a lane, 0x0080 for a hit.
    """
    tiles = torch.nn.functional.pad(hits, (0, -len(hits) % 128)).view(-1, 16, 4, 2)
    bits = tiles.to(torch.int32) << 7
    registers = bits[..., 0] | bits[..., 1] << 16
    of_tile = registers.sum(1, dtype=torch.int32) >> 7
    count = of_tile.sum(0, dtype=torch.int32)  # wraps as the GPU's additions do
    return int(((count & 0xFFFF) + (count >> 16 & 0xFFFF)).sum())


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_counts_of_two_weights_in_a_register_do_not_run_into_each_other(data):
    most = hopper_attention.COUNTED_KEYS
    keys = data.draw(st.sampled_from([1, 127, 128, 129, 40_000, most]), "keys")
    share = data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]), "share")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    hits = torch.rand(keys, generator=generator) < share
    hits[data.draw(st.integers(0, keys - 1), "last") :] = True
    assert counted(hits) == int(hits.sum())


def test_one_tile_more_than_the_kernel_takes_would_overflow():
    keys = hopper_attention.COUNTED_KEYS
    probed = dict(probe=True, causal=False)
    assert (
        hopper_attention.refusal(parse_numerics("flash"), **CALL | probed | shapes(keys, 64))
        is None
    )
    assert counted(torch.ones(keys + 128, dtype=torch.bool)) != keys + 128


@given(st.lists(st.floats(width=16, allow_nan=False), min_size=2, max_size=40))
def test_ties_are_scores_equal_to_the_maximum_whatever_their_sign_of_zero(scores):
    """Also where scores are hidden (-inf); rows see one key at least, so the maximum is finite."""
    s = torch.tensor([*scores, 0.0, -0.0]).bfloat16().double()
    s = s[s < math.inf]
    offset = (s - s.max()).bfloat16().double()
    found = multiply_add_relu(offset, *constants(assembly("TIES_PAIR"))) >> 7
    assert torch.equal(found.bool(), s == s.max())


# -- bits, on a GPU -------------------------------------------------------------------------------


def general(q, k, v, numerics, **choices):
    """The kernel that serves every GPU."""
    blocks = general_blocks(numerics, q.shape[3])
    return triton_attention.forward(q, k, v, numerics=numerics, blocks=blocks, **choices)


def draw(B, Tq, Tk, head_dim):
    """q of 6 and k, v of 2 heads, views of rows [B, T, H, D]."""
    generator = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(B, Tq, 6, head_dim, generator=generator, device="cuda").bfloat16()
    k, v = torch.randn(2, B, Tk, 2, head_dim, generator=generator, device="cuda").bfloat16()
    return [x.transpose(1, 2) for x in (2 * q, k, v + 0.5)]


RESULTS = [field.name for field in fields(ForwardResult)]


def same_bits(results, names=RESULTS):
    first = results[0]
    for name in names:
        for other in results[1:]:
            a, b = getattr(first, name), getattr(other, name)
            if a is b is None:
                continue
            parts = (a != b) & ~((a != a) & (b != b))  # NaN where all weights underflow
            assert not parts.any(), (name, first.out.shape, int(parts.sum()), a[parts], b[parts])


@pytest.fixture
def hopper_gpu():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


SIZES = [(1, 1), (64, 64), (128, 128), (129, 129), (1000, 1000), (384, 640), (640, 384)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted({case[0] for case in hopper_tuning.CASES}))
def test_a_first_tile_of_its_own_moves_no_bit(kind, hopper_gpu):
    for case in (c for c in hopper_tuning.CASES if c[0] == kind and c[3] == 64):
        plan = replace(plan_of(kind, 64, case[4]), apart=True)
        for length in (1, 128, 129, 1000):
            hopper_tuning.check_bits(case, [plan], length)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text", ("flash", "paper", "flash,delta_output=fp32", "stabilized", TILED, FP32_TILED)
)
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("causal", (True, False))
def test_the_bits_of_the_general_kernel(text, head_dim, causal, hopper_gpu):
    choices = dict(numerics=parse_numerics(text), causal=causal, scale=1 / math.sqrt(head_dim))
    for Tq, Tk in SIZES:
        q, k, v = draw(3, Tq, Tk, head_dim)
        twice = [hopper_attention.forward(q, k, v, **choices) for _ in range(2)]
        same_bits([*twice, general(q, k, v, **choices)])


def whole_numbers(q, k, v):
    """Few different scores, so that many tie: most entries of q and k are 0, the rest 1 or -1."""
    generator = torch.Generator("cuda").manual_seed(2)

    def few(x):
        kept = torch.rand(x.shape, generator=generator, device="cuda") < 0.06
        return x.sign() * kept

    return few(q), few(k), v


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text",
    [
        "flash",
        "paper",
        "paper,delta_output=fp32",
        "stabilized",
        "guarded,beta=1.5,eps=0.1",
        TILED,
        f"{TILED},beta=1.5,eps=0.1",
        f"{TILED},softmax=guarded,min_offset=0.01,max_offset=2",
        FP32_TILED,
        "flash,softmax=stabilized,decide=tile,beta=1.5,eps=0.1",
    ],
)
@pytest.mark.parametrize(
    "head_dim, scale, causal",
    [
        (64, 1 / 8, True),
        (64, 0.3, False),
        (128, 1 / math.sqrt(128), True),
        (128, 1 / math.sqrt(128), False),
    ],
)
def test_the_probes_of_the_general_kernel(text, head_dim, scale, causal, hopper_gpu):
    """And they move no bit of the rest. A scale that is no power of two makes products tie."""
    choices = dict(numerics=parse_numerics(text), causal=causal, scale=scale)
    most = 0
    for Tq, Tk in SIZES:
        drawn = draw(2, Tq, Tk, head_dim)
        for q, k, v in (drawn, whole_numbers(*drawn)):
            probed = hopper_attention.forward(q, k, v, probe=True, **choices)
            same_bits([probed, general(q, k, v, probe=True, **choices)])
            rows = hopper_attention.forward(q, k, v, probe="rows", **choices)
            assert rows.out_fp32 is None
            same_bits([rows, probed], [name for name in RESULTS if name != "out_fp32"])
            plain = hopper_attention.forward(q, k, v, **choices)
            same_bits([probed, plain], ("out", "lse", "delta_output"))
            most = max(most, int(probed.ties.max()))
    assert most > 32  # more than one thread's scores of a tile


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("kind", ("plain", "ragged", "packed", "broken"))
def test_many_blocks_in_one_pipeline(kind, causal, hopper_gpu):
    """Several blocks a program, so that one's end runs beside the next one's beginning.

    broken: infinities and NaN in three heads of 24, none of which may reach another.
    """
    generator = torch.Generator("cuda").manual_seed(3)
    T = 1100 if kind == "ragged" else 1024
    x = torch.randn(16, T, 3, 24, 64, generator=generator, device="cuda").bfloat16()
    q, k, v = (x[:, :, i].transpose(1, 2) for i in range(3))
    if kind != "packed":
        q, k, v = (y.contiguous() for y in (q, k, v))
    if kind == "broken":
        v[:, 3] = math.nan
        v[:, 7, : T // 2] = math.inf
        k[:, 11, 5] = math.inf
    choices = dict(numerics=parse_numerics("flash"), causal=causal, scale=1 / 8)
    found = [hopper_attention.forward(q, k, v, **choices) for _ in range(3)]
    other = hopper_attention.forward(q, k, v, probe=True, **choices)  # block by block
    same_bits([*found, other], ("out", "lse"))
    healthy = [h for h in range(24) if kind != "broken" or h not in (3, 7, 11)]
    assert other.out[:, healthy].isfinite().all()


@pytest.mark.gpu
def test_streams_have_counters_of_their_own_and_find_them_zero(hopper_gpu):
    """Launches side by side, of many and of few blocks; a graph replayed beside them."""
    choices = dict(numerics=parse_numerics("flash"), causal=True, scale=1 / 8)
    long, short = draw(4, 4096, 4096, 64), draw(1, 200, 200, 64)
    wanted = [hopper_attention.forward(*x, **choices) for x in (long, short)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = hopper_attention.forward(*long, **choices)
    found = []
    for _ in range(10):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                found.append([hopper_attention.forward(*x, **choices) for x in (long, short)])
    torch.cuda.synchronize()
    for own in (streams[1], streams[2]):
        with torch.cuda.stream(own):
            assert int(hopper_attention.counter(torch.device("cuda", 0))) == 0
    same_bits([kept, wanted[0], *(pair[0] for pair in found)], ("out", "lse"))
    same_bits([wanted[1], *(pair[1] for pair in found)], ("out", "lse"))


@pytest.mark.gpu
@pytest.mark.parametrize("text", ("flash", "paper", TILED))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_served_in_a_graph_and_probed_with_the_same_bits(text, head_dim, hopper_gpu, monkeypatch):
    """The copy engine's descriptors are made on the host, at each call; a graph keeps them."""
    q, k, v = draw(1, 4096, 4096, head_dim)
    choices = dict(numerics=parse_numerics(text), causal=True, scale=1 / math.sqrt(head_dim))
    calls, right = [], hopper_attention.forward
    monkeypatch.setattr(
        hopper_attention, "forward", lambda *x, **y: calls.append(y["probe"]) or right(*x, **y)
    )
    plain = triton_attention.forward(q, k, v, **choices)
    probed = triton_attention.forward(q, k, v, probe=True, **choices)
    assert calls == [False, True]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = triton_attention.forward(q, k, v, **choices)
    q.copy_(q.flip(2))  # other numbers in the tensors that the graph reads
    graph.replay()
    assert len(calls) == 3 and not torch.equal(kept.out, plain.out)
    outputs = ("out", "lse", "delta_output")
    same_bits([kept, triton_attention.forward(q, k, v, **choices)], outputs)
    same_bits([plain, probed], outputs)
    same_bits([probed, general(*draw(1, 4096, 4096, head_dim), probe=True, **choices)])
