"""kernels.forensics.report, inputs and the command line: any framework in, a verdict out."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kernels import BF16, round_to
from kernels.forensics import as_head, inputs, load_head, report
from kernels.forensics.__main__ import main


def tensors(seed=0, t=24, d=8, c=12, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(t, d, generator=g) * spread for name in ("q", "k")}
    x |= {name: torch.randn(t, d, generator=g) for name in ("v", "dO")}
    x["X"], x["W_Q"] = torch.randn(t, c, generator=g), torch.randn(d, c, generator=g)
    return {name: round_to(value, BF16) for name, value in x.items()}


def sink(t=24):
    """Every query attends to keys 0 and 1 alike, V of one sign."""
    x = tensors(t=t)
    x["k"][1] = x["k"][0] = torch.tensor([4.0] + [0.0] * 7)
    x["q"] = x["q"] * 0 + torch.tensor([8.0] + [0.0] * 7)
    x["v"] = -(2 + x["v"].abs())
    return {name: round_to(value, BF16) for name, value in x.items()}


def test_case_012_tensors_of_any_framework_give_one_answer(tmp_path, fault):
    """bf16 values as torch, numpy, lists, float32 in an .npz, .safetensors."""
    x = tensors()
    want = report(x).to_dict()
    np.savez(tmp_path / "head.npz", **{n: v.numpy() for n, v in x.items()})
    save_file({n: v.bfloat16() for n, v in x.items()}, tmp_path / "head.safetensors")

    def check():
        assert report({n: v.bfloat16() for n, v in x.items()}).to_dict() == want
        assert report(*(v.numpy() for v in x.values())).to_dict() == want
        assert report({n: v.tolist() for n, v in x.items()}).to_dict() == want
        assert report({n: v.double() for n, v in x.items()}).to_dict() == want
        for name in ("head.npz", "head.safetensors"):
            assert report(tmp_path / name).to_dict() == want

    check()
    right = inputs._tensor
    with fault(inputs, "_tensor", lambda x, name: round_to(right(x, name), BF16.cut(3))):
        check()


def test_one_head_of_a_batch_is_picked_by_index():
    x = tensors()
    batch = {n: torch.stack([v, v + 1]).unsqueeze(0) for n, v in x.items() if n not in "XW_Q"}
    batch |= {"X": x["X"].unsqueeze(0), "W_Q": x["W_Q"]}
    assert report(batch, index=(0, 0)).to_dict() == report(x).to_dict()
    assert as_head(batch, index=(1,)).q.shape == (1, 24, 8)
    with pytest.raises(ValueError, match=r"pick one head with index=\(batch, head\)"):
        as_head({n: v.expand(2, 2, 24, 8) for n, v in batch.items() if n in ("q", "k", "v")})
    with pytest.raises(ValueError, match=r"index \(0, 2\) does not fit q"):
        as_head(batch, index=(0, 2))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(k=None), "missing k"),
        (dict(v=torch.ones(23, 8)), r"v has shape \(1, 23, 8\)"),
        (dict(dO=torch.ones(24, 9)), r"dO has shape \(1, 24, 9\)"),
        (dict(X=torch.ones(23, 12)), "24 rows of q"),
        (dict(W_Q=torch.ones(12, 8)), "q = X W_Q"),
        (dict(q=torch.full((24, 8), float("nan"))), "q has 192 of 192 values that are NaN"),
        (dict(q=torch.ones(24)), r"not \[T, D\]"),
        (dict(q=torch.ones(0, 8), dO=None, X=None), "nothing to examine"),
        (dict(q="text"), "not an array of numbers"),
    ],
)
def test_bad_input_is_one_clear_sentence(change, words):
    x = {n: v for n, v in (tensors() | change).items() if v is not None}
    with pytest.raises(ValueError, match=words) as caught:
        report(x)
    assert "\n" not in str(caught.value)


def test_bad_files_are_one_clear_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_head(tmp_path / "none.npz")
    for name in ("bad.npz", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"not a file of tensors")
        with pytest.raises(ValueError, match="not a readable"):
            load_head(tmp_path / name)
    (tmp_path / "bad.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match=".pkl is not read; use .npz or .safetensors"):
        load_head(tmp_path / "bad.pkl")


def test_keys_of_other_codebases_are_understood():
    x = tensors()
    renamed = {"Q": x["q"], "K": x["k"], "V": x["v"], "dout": x["dO"], "x": x["X"]}
    head = as_head(renamed)
    assert torch.equal(head.dO[0], x["dO"]) and torch.equal(head.X[0], x["X"])


def test_case_003_a_sink_head_and_an_untrained_head_are_described_not_foretold(fault):
    """Ties are counted, and nothing is prophesied."""

    def check():
        tied, plain = report(sink()), report(tensors(spread=0.3), numerics="exact")
        assert "ties seen in 23 of 24 rows" in tied.text
        assert any(line.startswith("tied maxima: none in 24 rows") for line in plain.ruled_out)
        for told in (tied, plain):
            words = told.text.partition("Other known causes")[0].lower()
            assert not any(word in words for word in ("will ", "explode", "diverge", "predict"))
            assert "does not say what training does next" in told.text

    check()
    right = sys.modules[report.__module__]._delta_lines
    with fault(
        sys.modules[report.__module__],
        "_delta_lines",
        lambda delta: [*right(delta), "Training will explode."],
    ):
        check()


def test_case_006_other_causes_are_always_listed_and_ties_only_when_counted(fault):
    """A diverged run without low-precision attention: the report names what it did not test."""

    def check():
        told = report(tensors(spread=0.3), numerics="exact")
        assert not any("ties" in line for line in told.found)
        for word in ("learning rate", "accumulation", "eps", "seed", "races"):
            assert word in told.text
        assert "an error of delta: delta_lp equals delta_hp in every row" in told.ruled_out

    check()
    with fault(sys.modules[report.__module__], "NOT_TESTED", ()):
        check()


def test_what_was_not_given_is_named():
    x = tensors()
    only = report({n: x[n] for n in ("q", "k", "v")})
    assert only.delta is None and "dO was not given" in only.text
    no_x = report({n: x[n] for n in ("q", "k", "v", "dO")})
    assert no_x.weights is None and "X was not given" in no_x.text
    no_w = report({n: v for n, v in x.items() if n != "W_Q"})
    assert no_w.weights is not None and "W_Q was not given" in no_w.text
    other = report(x, numerics="paper,delta=dP_P")
    assert other.delta is None and "read no O" in other.text


def test_biased_and_unbiased_heads_are_told_apart():
    """Absorption errs on one side in every row; random values of both signs do not."""
    x = sink(t=64)
    x["k"][0, 0], x["k"][1] = 8.0, 0.0
    x["q"] = x["q"] * 0.5
    x["dO"] = torch.ones_like(x["dO"])
    biased = report(x, numerics="paper,output=fp32")
    assert any("one-sided" in line for line in biased.found)
    assert any("absorbing rows" in line for line in biased.found)
    plain = report(tensors(t=64))
    assert any(line.startswith("a mean error of delta beyond") for line in plain.ruled_out)


def test_inputs_that_the_numerics_round_first_are_named():
    x = tensors()
    x["q"] = x["q"] + 2.0**-12
    told = report(x).head
    assert told["q"].endswith("fp32, rounded to bf16 first") and told["k"].endswith("bf16")
    assert report(x, numerics="exact").head["q"].endswith("fp32")


@given(
    t=st.integers(1, 9),
    tk=st.integers(1, 9),
    d=st.integers(1, 5),
    size=st.sampled_from([0.0, 1e-30, 1.0, 30.0, 1e20]),
    text=st.sampled_from(
        ["paper", "flash,tile=3", "authors,tile=4", "stabilized", "guarded", "exact"]
        + ["paper,output=bf16:stochastic", "paper,scores=e5m2:stochastic", "paper,matched_bits=2"]
        + ["paper,delta_error=mirror", "paper,delta_output=fp32", "paper,compute=fp64"]
    ),
    causal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_finite_head_gets_a_report(t, tk, d, size, text, causal):
    g = torch.Generator().manual_seed(t + 10 * tk + 100 * d)

    def draw(*shape):
        return round_to(torch.randn(*shape, generator=g) * size, BF16)

    head = as_head(draw(t, d), draw(tk, d), draw(tk, 3), draw(t, 3), draw(t, 4), draw(d, 4))
    told = report(head, numerics=text, causal=causal)
    assert json.loads(told.to_json())["counted"]["rows"] == t
    assert told.text.startswith("Head")


def test_nonfinite_output_is_found_and_the_rest_still_reported():
    x = sink()
    x["q"] = x["q"] * 40
    told = report(x, numerics="stabilized")
    assert any("NaN or infinite in 23 of 24 rows" in line for line in told.found)
    json.loads(told.to_json())


def test_command_line_prints_text_and_strict_json(tmp_path, capsys):
    path = tmp_path / "head.npz"
    np.savez(path, **{n: v.numpy() for n, v in sink().items()})
    assert main([str(path)]) == 0
    assert "ties seen in 23 of 24 rows" in capsys.readouterr().out
    assert main([str(path), "--json", "--numerics", "flash", "--no-causal"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda x: pytest.fail(x))
    assert told["counted"]["tied_rows"] == 24 and told["numerics"] == "flash"


def test_command_line_errors_are_one_sentence(tmp_path, capsys):
    path = tmp_path / "head.npz"
    np.savez(path, q=np.ones((4, 2)), k=np.ones((4, 2)))
    for arguments in ([str(path)], ["none.npz"], [str(path), "--numerics", "papr"]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_module_runs_as_a_command(tmp_path):
    path = tmp_path / "head.npz"
    np.savez(path, **{n: v.numpy() for n, v in tensors(t=8).items()})
    done = subprocess.run(
        [sys.executable, "-m", "kernels.forensics", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Counted under paper" in done.stdout, done.stderr
