"""The bit explorer against `kernels.rounding`, and its script in the page against both."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from book.bit_arithmetic import DRAWS, WORKED, explore
from book.bit_explorer import (
    EXAMPLES,
    _format_table,
    live_widget,
    page_html,
    render,
    summary,
)
from kernels.formats import FORMATS, parse_format
from kernels.rounding import ROUNDINGS, bit_pattern, decode, round_to
from tests.book.browser import CHROMIUM, Browser

SCRIPT = Path(__file__).parents[2] / "book" / "static" / "bit_explorer.js"
TARGETS = [*FORMATS, "bf16.4", "bf16.0", "fp32.12", "e4m3.1", "fp16.2"]


def random_states(n, seed=0):
    """Addends of like and unlike size, ties, cancellation, subnormals, overflow; every option."""
    rng = random.Random(seed)
    states = []
    for i in range(n):
        target = rng.choice(TARGETS)
        fmt = parse_format(target)
        size = rng.choice([0, 1, fmt.emax, fmt.emin, rng.randint(fmt.emin - 3, fmt.emax)])
        size = max(min(size, 120), -140)
        addends = [rng.choice([-1, 1]) * rng.uniform(1, 2) * 2.0**size for _ in range(2)]
        if i % 3 == 0:  # numbers of few bits make ties and cancellation
            addends = [rng.randint(-64, 64) / 16 * 2.0**size for _ in range(2)]
        if i % 2:
            addends.append(rng.choice([-1, 1]) * 2.0 ** (size - rng.randint(0, 40)))
        states.append(
            {
                "addends": [repr(a) for a in addends],
                "stored": rng.choice(["fp32", "fp32", "fp64"]),
                "target": target,
                "mode": rng.choice(ROUNDINGS),
                "accumulator": rng.choice(["exact", "fp32", "target"]),
                "draw": rng.randrange(DRAWS),
            }
        )
    return states


def traced(state):
    """(trace, sentence): one of the two is None."""
    try:
        return explore(state), None
    except ValueError as error:
        return None, str(error)


def as_float(text):
    return float(text.replace("infinity", "inf"))


def test_worked_example_of_the_paper_bit_for_bit():
    bits = ["11000000000110100000111000101110", "11000000000100110000000000000000"]
    trace = explore(WORKED | {"addends": bits})
    assert [a["value"] for a in trace["addends"]] == WORKED["addends"]
    assert trace["total"]["exact"] == "-4.703990459442139"
    assert trace["total"]["pattern"].replace(" ", "") == "1100000010010111"
    assert trace["total"]["difference"] == "-0.014759540557861328"
    (step,) = trace["steps"]
    assert (step["before"], step["lead"]) == (1, 2)  # the significand overflows
    assert (step["guard"], step["sticky"], step["tie"], step["up"]) == (1, 1, False, True)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("Without its tail: an exact tie", "-4.6875"),
        ("The tie, ties away from zero", "-4.71875"),
        ("The tie and a crumb of -1e-6", "-4.71875"),
        ("The same, rounded after each addition", "-4.6875"),
        ("The same pair in fp16", "-4.703125"),
        ("Absorption: one value and a small tail", "-2.40625"),
    ],
)
def test_examples_give_the_checked_values(name, result):
    assert explore(EXAMPLES[name])["total"]["result"] == result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ["nearest_even", "nearest_away", "toward_zero"])
def test_one_rounding_of_an_exact_sum_agrees_with_kernels_rounding(target, mode):
    fmt = parse_format(target)
    for state in random_states(60, seed=1):
        state |= {"target": target, "mode": mode, "accumulator": "exact", "stored": "fp32"}
        trace, sentence = traced(state)
        if sentence:
            assert "beyond the largest fp32" in sentence
            continue
        parts = [as_float(a["value"]) for a in trace["addends"]]
        exact = sum(parts)
        if trace["total"]["exact"].startswith("≈"):  # no float64 carries this sum
            continue
        want = float(round_to(torch.tensor(exact, dtype=torch.float64), fmt, mode))
        got = as_float(trace["total"]["result"])
        assert got == want or (got != got and want != want), state
        if torch.isfinite(torch.tensor(want)):
            assert trace["total"]["pattern"].replace(" ", "") == bit_pattern(want, fmt)
        step = trace["steps"][-1]
        told = decode(exact, fmt, mode)
        assert (step["guard"], step["sticky"], step["tie"]) == (told.guard, told.sticky, told.tie)
        if not (step["overflow"] or step["saturated"]):
            error = step["error"].replace("less than 0.000001", "0")
            assert float(error) == pytest.approx(told.error_ulp, abs=1e-6)


def test_rounding_after_each_addition_agrees_with_a_chain_of_round_to():
    for state in random_states(200, seed=2):
        state |= {"accumulator": "target", "mode": "nearest_even", "stored": "fp32"}
        trace, sentence = traced(state)
        if sentence or trace["steps"][-1]["overflow"]:
            continue
        fmt = parse_format(state["target"])
        if fmt.fraction_bits > 23:
            continue
        first, *rest = [as_float(a["value"]) for a in trace["addends"]]
        running = torch.tensor(first, dtype=torch.float64)
        for value in rest:
            running = round_to(running + value, fmt)
        assert as_float(trace["total"]["result"]) == float(running), state


@pytest.mark.parametrize("addend", ["0.75", "1.5", "3", "-6", "12"])
def test_ties_without_fraction_bits_go_to_the_even_exponent_field(addend):
    trace = explore(WORKED | {"addends": [addend, "0"], "target": "bf16.0"})
    want = round_to(torch.tensor(float(addend)), parse_format("bf16.0"))
    assert trace["steps"][0]["tie"] and as_float(trace["total"]["result"]) == float(want)


def test_e4m3_has_no_infinity_and_keeps_its_largest_number():
    total = explore(WORKED | {"addends": ["400", "400"], "target": "e4m3"})["total"]
    assert total["result"] == "448" and total["pattern"] == "0 1111 110"


def test_stochastic_draws_round_up_in_proportion_to_the_dropped_part():
    state = WORKED | {"mode": "stochastic"}
    ups = sum(explore(state | {"draw": d})["steps"][0]["up"] for d in range(DRAWS))
    assert ups / DRAWS == pytest.approx(0.527695, abs=1 / DRAWS)


@pytest.mark.parametrize("text", ["", "0x10", "1_0", "nan", "1e999", "0b101", "1e300", "--1"])
def test_unreadable_addends_are_refused_in_a_sentence(text):
    with pytest.raises(ValueError, match="'|bits"):
        explore(WORKED | {"addends": [text, "1"]})


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
def test_script_in_the_page_equals_python_in_every_bit_and_every_word():
    states = [*EXAMPLES.values(), *random_states(900)]
    states += [WORKED | {"addends": a} for a in ([], ["1"], ["1"] * 4)]
    states += [WORKED | {"addends": [text, "0"]} for text in ("-0", "1e39", "x", "0b11", "5e-324")]
    program = (
        SCRIPT.read_text()
        + """
        const { states, table } = JSON.parse(require("fs").readFileSync(0));
        console.log(JSON.stringify(states.map((state) => {
          try {
            const t = BitExplorer.explore(state, table);
            return [t, BitExplorer.summary(t) + BitExplorer.render(t), null];
          } catch (error) { return [null, null, error.message]; }
        })));"""
    )
    done = subprocess.run(
        ["node", "-e", program],
        input=json.dumps({"states": states, "table": _format_table()}),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    refused = 0
    for state, (trace, drawn, sentence) in zip(states, json.loads(done.stdout), strict=True):
        want, refusal = traced(state)
        assert sentence == refusal, state
        refused += sentence is not None
        if want is not None:
            assert trace == want, state
            assert drawn == summary(want) + render(want), state
    assert 6 <= refused < len(states) / 4


def test_page_is_self_contained_and_readable_without_a_script():
    page = page_html(key="bx")
    before = page.split("<script>")[0]
    assert "-4.71875" in before and "1 10000001 0010111" in before
    assert '<form class="bx-form" hidden>' in before
    assert "http" not in page.replace("http://www.w3.org", "") and "src=" not in page
    for name in ("example", "a", "b", "c", "stored", "target", "bits", "mode", "accumulator"):
        assert f'<label for="bx-{name}">' in page and f'id="bx-{name}"' in page


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium to show the page in")
    with Browser() as page:
        yield page


def press(page, key, code, text=None):
    keys = {"key": key, "code": key, "windowsVirtualKeyCode": code}
    page.command(
        "Input.dispatchKeyEvent", type="keyDown", **keys, **({"text": text} if text else {})
    )
    page.command("Input.dispatchKeyEvent", type="keyUp", **keys)


RESULT = "document.querySelector('.bx-result').textContent"


def test_in_a_browser_the_keyboard_alone_changes_examples_and_numbers(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{page_html(key='bx')}")
    browser.open(file.as_uri())
    assert browser.run("document.querySelector('form').hidden") is False
    assert "-4.71875" in browser.run(RESULT)
    press(browser, "Tab", 9)
    assert browser.run("document.activeElement.name") == "example"
    press(browser, "ArrowDown", 40)
    want = EXAMPLES["Without its tail: an exact tie"]
    assert browser.run(RESULT) == summary(explore(want))
    press(browser, "Tab", 9)
    press(browser, "Delete", 46)  # the field's text is selected when it gets the focus
    press(browser, "1", 49, "1")
    assert browser.run(RESULT) == summary(explore(want | {"addends": ["1", "-2.296875"]}))
    press(browser, "x", 88, "x")
    assert "neither a decimal number" in browser.run(RESULT)
    assert not browser.problems() and browser.requests() == [file.as_uri()]


def test_without_scripts_the_page_shows_the_worked_example_and_no_form(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{page_html(key='bx')}")
    browser.open(file.as_uri(), scripts=False)
    shown = browser.command("DOM.getDocument", depth=-1)
    markup = browser.command("DOM.getOuterHTML", nodeId=shown["root"]["nodeId"])["outerHTML"]
    assert 'class="bx-form" hidden' in markup
    assert "error -0.014759540557861328 = -0.472305 ulp" in markup


def test_live_widget_computes_in_the_kernel_and_refuses_in_a_sentence():
    controls, picture = live_widget().children
    example, a, *_ = controls.children
    example.value = EXAMPLES["The same, rounded after each addition"]
    assert "Step 2 of 2" in picture.value and "-4.6875" in picture.value
    a.value = "x"
    assert "neither a decimal number" in picture.value
    target = next(c for c in controls.children if c.description == "Result in")
    bits = next(c for c in controls.children if c.description == "Fraction bits")
    example.value = EXAMPLES["The paper's example"]
    target.value = "e4m3"
    assert bits.value == 3 and "Result in e4m3: -4.5" in picture.value
