"""What `python -m kernels.bench --tune` would measure, and how it reads what it measured."""

import time

import pytest
import torch

from kernels import triton_attention, tuning
from kernels.bench import OURS, lengths_to_compile, shapes, to_compile
from kernels.compile_ahead import compile_ahead
from kernels.hopper_attention import LEAST_KEYS, mean_keys
from kernels.triton_blocks import HOPPER_SHARED, Blocks, shared_bytes
from kernels.tuning import Case, best, cases, in_order


def test_candidates_are_distinct_and_fit():
    for case in cases():
        found = case.candidates
        assert found[0] == case.present and len(set(found)) == len(found) > 5
        for b in found:
            registers = b.max_registers or 32
            assert registers * 32 * b.num_warps <= 65_536
            assert shared_bytes(case.kernel, b, case.head_dim, case.head_dim, 2) <= HOPPER_SHARED


def test_every_kernel_of_ours_has_a_case():
    """A backward once: where another implementation's has the same constants, it is the same."""

    def backward(name):
        n = OURS[name][0]
        of = triton_attention.grad_keys_constants, triton_attention.grad_queries_constants
        return [constants(n, 1 / 8) for constants in of]

    assert {c.implementation for c in cases() if c.kernel == "forward"} == set(OURS)
    distinct = [backward(name) for name in tuning.BACKWARDS]
    assert distinct[0] != distinct[1] and all(backward(name) in distinct for name in OURS)
    assert {c.implementation for c in cases() if c.kernel != "forward"} == set(tuning.BACKWARDS)


def test_under_the_running_reference_the_key_block_is_the_tile():
    running = [c for c in cases() if OURS[c.implementation][0].reference == "running"]
    assert {c.implementation for c in running} >= {"ours-flash", "ours-stabilized-tiled"}
    for case in running:
        if case.kernel == "forward":
            tile = OURS[case.implementation][0].tile
            assert {b.block_n for b in case.candidates} == {tile}


def test_the_likeliest_choices_of_all_cases_come_first():
    of = cases(["ours-flash"])
    order = in_order(of)
    assert [case for case, _ in order[: len(of)]] == of
    assert all(b == case.present for case, b in order[: len(of)])
    assert len(order) == sum(len(case.candidates) for case in of) == len(set(order))


def row(blocks, seq_len, ms, *, present=False):
    told = dict(block_m=blocks[0], block_n=blocks[1], num_warps=4, num_stages=2, max_registers=0)
    return dict(
        kernel="forward", implementation="ours-flash", head_dim=64, blocks=told, present=present,
        seq_len=seq_len, ms_p50=ms,
    )  # fmt: skip


def test_the_best_choice_is_fast_at_every_length():
    rows = [
        row((128, 128), 1024, 1.0, present=True), row((128, 128), 4096, 2.0, present=True),
        row((64, 128), 1024, 0.5), row((64, 128), 4096, 2.5),
        row((32, 128), 1024, 0.8), row((32, 128), 4096, 1.4),
        row((16, 128), 1024, 0.1) | dict(error="too many registers"),
    ]  # fmt: skip
    del rows[-1]["ms_p50"]
    tuning.add_ratios(rows)
    assert [r.get("ratio") for r in rows[:4]] == [1.0, 1.0, 2.0, 0.8]
    case = Case("forward", "ours-flash", 64)
    ratio, blocks = best(rows)[case]
    assert blocks == Blocks(32, 128, 4, 2) and ratio == pytest.approx((1.25 * 2 / 1.4) ** 0.5)
    text = tuning.table(rows).splitlines()
    assert text[1].split()[0] == "32x128" and "too many registers" in text[-1]


def test_a_wrong_result_is_no_choice():
    want = dict(out=torch.randn(64, 64).bfloat16(), ones=torch.arange(5))
    assert tuning.difference(want, want) == {}
    close = dict(want, out=want["out"].clone())
    close["out"][0, 0] += close["out"][0, 0] * 2**-7
    assert tuning.difference(close, want) == dict(out=2.0**-12)
    for wrong in (dict(want, out=want["out"] * 1.01), dict(want, ones=want["ones"] + 1)):
        with pytest.raises(AssertionError, match="differs"):
            tuning.difference(wrong, want)
    with pytest.raises(AssertionError, match="differs"):
        tuning.difference(dict(want, out=want["out"] * float("nan")), want)


def test_each_first_call_is_compiled_once():
    found = to_compile(shapes(), ("ours-paper", "flex", "sdpa-flash"))
    assert len(found) == len(set(found)) == 24 + 4
    assert [name for name, _ in found[:24]] == ["flex"] * 24


def test_on_a_hopper_gpu_long_rows_compile_ahead_as_well():
    assert lengths_to_compile((8, 9)) == (256,)
    lengths = lengths_to_compile((9, 0))
    found = to_compile(shapes(), tuple(OURS), lengths)
    assert len(found) == len(set(found)) == 2 * 4 * len(OURS)
    longest = max(lengths)
    for shape in shapes():  # what serves any shape of the bench serves one that was compiled
        for (head_dim, _), least in LEAST_KEYS.items():
            if head_dim == shape.head_dim:
                assert mean_keys(longest, longest, shape.causal) >= least


def test_compiling_ahead_tells_what_became_of_each():
    told = compile_ahead(int, [("3",), ("three",)], workers=1)
    assert told[0] is None and told[1].startswith("ValueError: invalid literal")
    began = time.monotonic()
    told = compile_ahead(time.sleep, [(0,), (60,)], limit_s=5.0, workers=2)
    assert told == [None, "not compiled in time"] and time.monotonic() - began < 30
    assert compile_ahead(int, []) == []
