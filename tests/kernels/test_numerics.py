"""Numerics as a value: presets, variants, dials, text, scope, refusals that name the remedy."""

import json

import pytest

from kernels import (
    BF16,
    FP32,
    FP64,
    PRESETS,
    DeltaError,
    Numerics,
    ScopedNumerics,
    Site,
    Softmax,
    authors,
    exact,
    flash,
    guarded,
    paper,
    parse_numerics,
    stabilized,
)
from kernels.numerics import SITE_NAMES


def _rounded(n):
    return {s for s in SITE_NAMES if getattr(n, s) is not None and getattr(n, s).format != FP32}


def test_presets_round_where_the_design_says():
    operands = {"inputs", "probabilities", "output", "backward_probabilities", "grad_scores"}
    assert _rounded(exact()) == set()
    assert _rounded(flash()) == operands | {"gradients"}
    assert _rounded(paper()) == operands | {"gradients", "scores", "unnormalized"}
    extra = {"scores", "unnormalized", "reference_format", "row_sum", "grad_probabilities"}
    assert _rounded(authors()) == operands | {"gradients"} | extra
    assert (flash().reference, paper().reference, authors().tile) == ("running", "row", 512)
    assert authors().row_sum_floor == 1e-10 and authors().accumulate == "tile"
    assert stabilized(4).softmax == Softmax("stabilized", beta=4)
    assert guarded(4).softmax.kind == "guarded"


def test_the_papers_twins_differ_in_one_field():
    low, high = paper().to_dict(), paper().high_precision_delta().to_dict()
    assert {k for k in low if low[k] != high[k]} == {"name", "delta_output"}


def test_dials_cut_what_they_say():
    matched = paper().matched_bits(4)
    assert _rounded(matched) == _rounded(paper())
    assert all(getattr(matched, s).format == BF16.cut(4) for s in _rounded(matched))
    output = exact().output_bits(2)
    assert _rounded(output) == {"unnormalized", "output"}
    assert output.output.format.fraction_bits == 2


@pytest.mark.parametrize("name", PRESETS)
def test_json_and_keys_round_trip(name):
    n = PRESETS[name]().at(delta_output=FP32, output="bf16.3:stochastic", delta_error="mirror")
    assert Numerics.from_dict(json.loads(n.to_json())) == n == parse_numerics(n.key)
    assert parse_numerics(n.to_json()).name == n.name
    assert n.key == n.at(name="other").key != PRESETS[name]().key


@pytest.mark.parametrize(
    "text, value",
    [
        ("paper,delta_output=fp32", paper().high_precision_delta()),
        ("exact, output_bits=2", exact().output_bits(2)),
        ("stabilized,beta=4,eps=0.001,decide=tile", stabilized(4, 1e-3, decide="tile")),
        ("flash,tile=64", flash(64)),
        ("paper,output=bf16:stochastic", paper().at(output=Site(BF16, "stochastic"))),
        (
            "exact,delta_error=injected,mean=0.5,rms=2",
            exact().at(delta_error=DeltaError("injected", 0.5, 2.0)),
        ),
        ("exact,compute=fp64", exact(FP64)),
        ("paper,delta_output=none", paper()),
    ],
)
def test_text_means_the_value(text, value):
    assert parse_numerics(text) == value
    assert parse_numerics(text).name == text.strip()


@pytest.mark.parametrize(
    "text, told",
    [
        ("papr", "did you mean 'paper'"),
        ("paper,outptu=fp32", "did you mean 'output'"),
        ("paper,output", "not key=value"),
        ("paper,output=bf61", "did you mean 'bf16'"),
        ("paper,output=bf16:up", "unknown rounding mode 'up'"),
        ("paper,mean=1", "after delta_error=injected"),
        ("paper,softmax=sharp", "unknown softmax policy"),
        ("paper,delta=dO", "use 'dO_O' or 'dP_P'"),
        ("paper,tile=0", "at least 1"),
        ("stabilized,beta=1", "beta > 1"),
        ("exact,compute=bf16", "fp32 or fp64"),
        ("paper,delta_error=up", "mirror, random_sign"),
        ("paper,matched_bits=9", "0 to 7"),
    ],
)
def test_mistakes_get_a_sentence(text, told):
    with pytest.raises(ValueError, match=told):
        parse_numerics(text)


def test_in_one_tile_nothing_runs_or_is_carried():
    n = authors().in_one_tile()
    assert (n.reference, n.accumulate, n.row_sum_floor) == ("row", "once", 0.0)
    assert n.reference_format.format == FP32 and n.row_sum.format == BF16
    assert paper().in_one_tile() == paper()
    finer = authors().at(scores="fp32").in_one_tile()
    assert finer.reference_format.format == BF16  # rounds a maximum that is not on its grid
    moved = parse_numerics("authors,softmax=guarded,decide=tile").in_one_tile()
    assert moved.reference_format.format == BF16 and moved.row_sum_floor == 1e-10


def test_stochastic_says_whether_a_seed_matters():
    assert not paper().stochastic
    assert paper().at(scores="bf16:stochastic").stochastic
    assert exact().at(delta_error="random_sign").stochastic
    assert not exact().at(delta_error="mirror").stochastic


def test_scope_by_layer_and_head():
    scope = ScopedNumerics.parse("paper; L1 -> exact; L1H0+2 -> flash; H3 -> guarded")
    assert scope.for_layer(0, 4) == (paper(), paper(), paper(), guarded())
    assert scope.for_layer(1, 4) == (flash(), exact(), flash(), guarded())
    assert ScopedNumerics.parse(str(scope)) == scope
    scope.check(2, 4)
    with pytest.raises(ValueError, match="layer 1 does not exist"):
        scope.check(1, 4)
    with pytest.raises(ValueError, match="head 3 does not exist"):
        scope.check(2, 3)
    with pytest.raises(ValueError, match="L1H0\\+3 -> exact"):
        ScopedNumerics.parse("paper; layer 1 -> exact")
