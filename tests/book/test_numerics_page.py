"""The page "Numerics": what it asks of backends is what they say, and its trials can fail."""

import json
from pathlib import Path

import pytest
import torch

from book import RESULTS, backend_support, numerics_page, parity_archive, shape_rules
from book.backend_support import refusal, site_effects, site_support
from book.evidence import Archive, latest
from kernels import emulated, parse_numerics, triton_compile
from kernels.numerics import SITE_NAMES
from kernels.parity_cases import exact_cases, law_cases
from kernels.sites import Rounder


def test_refusals_are_the_backends_own_sentences():
    assert refusal("emulated", "paper,scores=e4m3:stochastic") is None
    assert refusal("triton", "paper") is None, "no GPU here is no refusal of the numerics"
    assert "8 exponent bits" in refusal("triton", "paper,scores=fp16")
    assert "no mask" in refusal("triton", "paper", mask=True)
    assert "no rounding sites" in refusal("sdpa", "paper")
    assert "compute=fp64" in refusal("emulated", "exact", dtype=torch.float64)


def test_site_support_in_words():
    assert str(site_support("scores", "emulated")) == "all formats: all modes"
    assert str(site_support("lse", "triton")) == "fp32 only"
    assert str(site_support("scores", "triton")) == "bf16, bf16.4: nearest even, stochastic"
    assert str(site_support("output", "sdpa")) == "bf16: nearest even"


@pytest.mark.parametrize("site", [s for s in SITE_NAMES if s != "reference_format"])
def test_what_the_emulator_accepts_has_an_effect_of_its_formats_size(site):
    effects = site_effects(site)
    assert effects.tried == 20 and 0.05 < effects.low and effects.high < 12


def test_a_site_that_is_not_rounded_would_show(monkeypatch):
    monkeypatch.setattr(Rounder, "to_site", lambda self, x, site, name: x)
    assert site_effects("scores").high == 0


def test_interpreted_kernels_agree_at_a_site_and_a_failure_is_a_sentence(monkeypatch):
    pytest.importorskip("triton")
    assert backend_support.interpreted_agreement(["output"])["output"] < 0.01
    monkeypatch.setattr(backend_support.sys, "executable", "false")
    assert "does not run here" in backend_support.interpreted_agreement(["output"])


def test_a_kernel_that_does_not_round_is_at_distance_one(monkeypatch):
    monkeypatch.setattr(backend_support, "triton_attention", _Unrounded)
    assert backend_support._agreement("unnormalized") == pytest.approx(1.0, abs=0.01)


class _Unrounded:
    backward = emulated.backward

    @staticmethod
    def forward(q, k, v, *, numerics, **rest):
        return emulated.forward(q, k, v, numerics=numerics.at(unnormalized="fp32"), **rest)


def test_tables_have_a_line_for_everything():
    tested = parity_archive.compared_numerics(latest("parity"))
    table = backend_support.trial_table(tested, {"scores": 1e-4})
    assert [line[0] for line in table] == [f"`{s}`" for s in SITE_NAMES]
    assert [line[0] for line in backend_support.site_table()] == [f"`{s}`" for s in SITE_NAMES]
    assert table[1][2] == "0.0001" and table[0][2] == "not honoured" and "bf16.4" in table[1][3]
    told = dict((label, rest) for label, *rest in backend_support.choice_table(tested))
    assert told["`authors`"] == ["yes", "refused", "refused", "no"]
    assert told["`delta_error=mirror`"] == ["yes", "yes", "refused", "in ulps"]
    assert told["`delta_error=fixed_direction`"] == ["yes", "yes", "refused", "no"]
    drawn = parse_numerics("exact,output=bf16.4,delta_error=shuffled")
    told = dict((x, rest) for x, *rest in backend_support.choice_table([drawn], ["float16"]))
    assert told["float16 inputs"] == ["yes", "yes", "yes", "in ulps"]
    assert told["float64 inputs"] == ["refused", "refused", "yes", "no"]
    assert told["`delta_error=shuffled`"][-1] == "in law"
    assert told["`delta_error=mirror`"][-1] == told["`delta_error=injected`"][-1] == "no"
    sentences = backend_support.refusals()
    assert len({why for _, why in sentences}) == len(sentences) > 10


def test_errors_are_small_and_exact_is_fp32():
    rows = {(r.preset, r.quantity): r for r in numerics_page.errors(65, 40)}
    assert len(rows) == 24
    assert rows["exact", "out"].relative < 1e-6
    assert 1e-4 < rows["flash", "out"].relative < rows["paper", "out"].relative < 1e-2
    table = numerics_page.error_table(65, 40, "dQ")
    assert table.count("<tr>") == 7 and f"{rows['paper', 'dQ'].relative:.1e}" in table


def test_means_far_off_zero_are_bold(monkeypatch):
    row = numerics_page.errors(65, 40)[4]
    loud = row._replace(quantity="dQ", outward=row.outward._replace(mean=1.0))
    monkeypatch.setattr(numerics_page, "errors", lambda T, D, seed: [row, loud])
    assert "<b>" in numerics_page.error_table(65, 40, "dQ")
    assert "<b>" not in numerics_page.error_table(65, 40, row.quantity)


@pytest.mark.parametrize("kind", numerics_page.CRAFTED)
@pytest.mark.parametrize("text", [*numerics_page.VARIANTS, "paper,inputs=fp32"])
def test_crafted_rows_have_the_predicted_bias(kind, text):
    bias = numerics_page.crafted_bias(kind, text)
    if bias.predicted is None:
        assert parse_numerics(text).softmax.kind in ("stabilized", "guarded")
        assert numerics_page.bias_table([bias])[0][2] == "none"
    else:
        slack = 5 * bias.measured.stderr + 0.01
        assert abs(bias.measured.mean - bias.predicted) < slack


def test_no_compilation_is_a_sentence(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in numerics_page.offline()
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    assert "not installed" in numerics_page.offline()


def test_compiled_kernels_are_counted_by_their_instructions(monkeypatch):
    """The compilation itself is tested in tests/kernels/test_triton_compile.py."""

    def compiled(kernel, numerics, *, capability):
        ptx = "mma.sync a;\nmma.sync b;\ncvt.rn.bf16.f32 c;\n"
        return triton_compile.Compiled(kernel, capability, None, ptx, 65_536, 200, 8)

    monkeypatch.setattr(triton_compile, "compile_offline", compiled)
    lines = numerics_page.offline("flash", capabilities=(80,))
    assert [line[0] for line in lines] == ["`forward`", "`grad_keys`", "`grad_queries`"]
    assert lines[0][1:] == ["sm_80", "2 `mma.sync`", 1, 200, 8, "65,536"]


def test_rules_of_shapes_hold():
    told = dict(shape_rules.tried())
    text = " ".join(told.values())
    assert len(told) == 8 and "out[0] equals v[0] True; keys that get a gradient: [0, 1]" in text
    assert "O 0, lse -inf, ties 0, |dQ| 0" in text and "[True, True]" in text
    assert "output bfloat16, gradients float32, float16, bfloat16" in text


def test_other_peoples_models(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert "not installed" in shape_rules.transformers_demonstration("paper")


# -- archives -------------------------------------------------------------------------------------

RAW = {
    "provenance": {"gpu": "NVIDIA X1", "torch": "2", "triton": "3"},
    "rows": [
        dict(site="out", case="paper T9", result="ok", max_ulp=1.0, mismatched=0.1234567,
             signed_mean_ulp=-0.5),
        dict(site="out", case="flash,tile=64 T9 float16", result="FAILED", max_ulp=3.0,
             mismatched=0.0, signed_mean_ulp=0.25),
        dict(site="ties", case="paper T9", result="ok", max_ulp=0.0, mismatched=0.0,
             signed_mean_ulp=0.0),
        dict(site="bias", case="tied", result="ok", triton=0.1, emulated=0.1),
        dict(site="law", case="paper,scores=bf16.4:stochastic out, 8 seeds", result="ok",
             spread=0.9, rms_z=1.01),
        dict(site="law", case="paper,scores=bf16.4:stochastic dq, 8 seeds", result="FAILED",
             spread=2.0, rms_z=0.9),
    ],
}  # fmt: skip
TOLD = dict(driver="5", commit="abc", date="2026-01-02", duration_s=9.0, passed=3, failed=1)


def test_a_parity_archive_keeps_every_row_and_says_where_from(tmp_path):
    path = parity_archive.save(parity_archive.compact(RAW, **TOLD), "parity", tmp_path)
    assert path.name == "nvidia-x1-2026-01-02.json"
    kept = latest("parity", folder=tmp_path)
    assert len(kept.rows) == 6 and kept.rows[0]["mismatched"] == 0.1235
    assert parity_archive.summary(kept)[0] == ["`out`", 2, 1, "3", "12.350%", "-0.5 to +0.25"]
    wide = dict(RAW, rows=[dict(RAW["rows"][0], case="paper,output=fp32 T9"), RAW["rows"][0]])
    path = parity_archive.save(parity_archive.compact(wide, **TOLD), "wide", tmp_path)
    lines = parity_archive.summary(latest("wide", folder=tmp_path))
    assert [line[0] for line in lines] == ["`out`", "`out` in fp32"]
    assert parity_archive.by_case(kept)[0] == ["`flash,tile=64 T9 float16`", "3", "0.000%"]
    assert parity_archive.other_rows(kept) == [["bias", "tied", "ok", "triton 0.1, emulated 0.1"]]
    law = "paper,scores=bf16.4:stochastic"
    assert parity_archive.by_law(kept) == [[f"`{law}`", "FAILED", "0.90 to 2.00", "1.01"]]
    compared = [str(n) for n in parity_archive.compared_numerics(kept)]
    assert parity_archive.compared_dtypes(kept) == ["float16"]
    assert compared == ["paper", "flash,tile=64", law]
    assert "NVIDIA X1, driver 5, torch 2" in parity_archive.told(kept)
    assert "3 tests passed and 1 failed in 9 s." in parity_archive.told(kept)


def test_an_archive_without_provenance_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="driver, duration_s must be told"):
        parity_archive.compact(RAW, **(TOLD | dict(driver=None, duration_s=None)))
    raw = tmp_path / "raw.json"
    raw.write_text("{")
    asked = ["--results", str(tmp_path), "gpu", str(raw), "--duration", "1", "--passed", "1"]
    assert parity_archive.main([*asked, "--failed", "0"]) == 2
    assert "raw.json" in capsys.readouterr().err
    raw.write_text(json.dumps(RAW))
    more = ["--failed", "0", "--driver", "5", "--commit", "c", "--date", "2026-01-02"]
    assert parity_archive.main([*asked, *more]) == 0


def test_times_of_tests_come_from_the_report():
    text = """<testsuites><testsuite><testcase classname="tests.kernels.test_a" time="1.5"/>
    <testcase classname="tests.kernels.test_a" time="0.5"><skipped/></testcase>
    <testcase classname="tests.kernels.test_b" time="9"/></testsuite></testsuites>"""
    rows = parity_archive.junit_rows(text)
    assert rows[0] == {"file": "test_b", "passed": 1, "skipped": 0, "seconds": 9.0}
    source = dict(
        machine="A CPU", date="2026-01-02", duration_s=11, cpu_s=7.5, code="c", load_at_start=3
    )
    kept = Archive(Path("x"), source, rows)
    assert parity_archive.longest(kept, 1) == [
        ["`test_b`", 1, 0, "9.0"],
        ["1 others", 1, 1, "2.0"],
    ]
    told = parity_archive.total_time(kept)
    assert "11 s in all on A CPU, 2026-01-02" in told and "computed for 8 s" in told


def test_archived_parity_is_small_and_its_failures_are_understood():
    for path in (RESULTS / "parity").glob("*.json"):
        assert path.stat().st_size < 150_000
    kept = latest("parity")
    assert set(parity_archive.NEEDED) <= set(kept.provenance)
    failed = [row for row in kept.rows if row["result"] != "ok"]
    assert kept.provenance["failed"] == len(failed)
    for row in failed:  # one P_bar next to a tie, and nothing else
        assert row["site"] == "out_fp32"
        found = numerics_page.nearest_tie(row["case"].split(" ")[0])
        assert row["max_ulp"] == pytest.approx(found.moved, rel=1e-3)
        assert found.distance < 2.0**-23
    assert numerics_page.failures_told(kept.rows).count("Failed: ") == len(failed)


def test_a_failure_is_told_beside_what_one_turned_weight_would_do():
    """The case that failed in the first run of the suite on a GPU, by 20,181 ulps."""
    row = {"result": "FAILED", "site": "out_fp32", "case": "paper,inputs=bf16.4 T130 D64"}
    row["max_ulp"] = 20_181
    found = numerics_page.nearest_tie("paper,inputs=bf16.4")
    assert found.distance < 2.0**-23 and found.moved == pytest.approx(20_181, rel=1e-3)
    assert "moves $O$ by 20,181 ulps" in numerics_page.failures_told([row])
    assert numerics_page.failures_told([]) == "No comparison failed."


def test_the_gpu_run_compared_every_site_and_the_page_says_what_it_did_not():
    """A choice that came after the run stands in the table as not compared, and a site's format
    not among those that the run rounded to."""
    compared = parity_archive.compared_numerics(latest("parity"))
    missing = [t for t in (*exact_cases(), *law_cases()) if parse_numerics(t) not in compared]
    table = {line[0]: line[-1] for line in backend_support.choice_table(compared)}
    labels = [t.removeprefix("paper,").removeprefix("exact,output=bf16.4,") for t in missing]
    sites = [label.split("=") for label in labels if f"`{label}`" not in table]
    assert all(table.get(f"`{label}`", "no") == "no" for label in labels)
    assert all(fmt not in backend_support.formats_of(site, compared) for site, fmt in sites)
