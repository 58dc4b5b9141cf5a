"""The bit explorer: see how two or three numbers are added and how the sum is rounded.

`render` draws a trace of `book.bit_arithmetic.explore` as HTML. `show` displays the explorer: with
controls of ipywidgets where a kernel listens, and with the inline script `static/bit_explorer.js`,
which computes and draws the same thing in the page, everywhere else. Without any script the page
shows the state it was made with.
"""

from __future__ import annotations

import html
import itertools
import json
from pathlib import Path

from kernels.formats import FORMATS

from .bit_arithmetic import DRAWS, WORKED, explore

MODE_WORDS = {
    "nearest_even": "to nearest, ties to even",
    "nearest_away": "to nearest, ties away from zero",
    "toward_zero": "toward zero",
    "stochastic": "stochastically",
}
SUM_WORDS = {
    "exact": "add all exactly, round once",
    "fp32": "fp32 after each addition, then round",
    "target": "round after each addition",
}
EXAMPLES = {
    "The paper's example": WORKED,
    "Without its tail: an exact tie": WORKED | {"addends": ["-2.40625", "-2.296875"]},
    "The tie, ties away from zero": WORKED
    | {"addends": ["-2.40625", "-2.296875"], "mode": "nearest_away"},
    "The tie and a crumb of -1e-6": WORKED | {"addends": ["-2.40625", "-2.296875", "-1e-6"]},
    "The same, rounded after each addition": WORKED
    | {"addends": ["-2.40625", "-2.296875", "-1e-6"], "accumulator": "target"},
    "Absorption: one value and a small tail": WORKED | {"addends": ["-2.40625", "-0.003"]},
    "The same pair in fp16": WORKED | {"addends": ["-2.40625", "-2.296875"], "target": "fp16"},
    "The paper's example in E4M3": WORKED | {"target": "e4m3"},
}


def sentences(step: dict) -> list[str]:
    """What happened in one step, in order, as plain sentences."""
    said = []
    moved = [f"{r['name']} by {n}" for r, n in zip(step["rows"], step["shifts"]) if n]
    if len(step["rows"]) > 1:
        said.append(
            "Align: shift right " + ", ".join(moved) + "."
            if moved
            else f"Align: the leading bits stand at 2^{step['before']} already; nothing shifts."
        )
        move = step["lead"] - step["before"]
        if step["zero"]:
            said.append("Add: the sum is exactly zero.")
        elif move > 0:
            said.append(
                f"Add: the significand overflows into 2^{step['lead']}; "
                f"shift right by {move}, exponent + {move}."
            )
        elif move < 0:
            said.append(f"Add: leading bits cancel; shift left by {-move}, exponent - {-move}.")
        else:
            said.append(f"Add: the leading bit stays at 2^{step['lead']}; no shift.")
    if step["place"] > step["lead"]:
        said.append(f"Below the smallest normal {step['format']} number: a subnormal result.")
    said.append(
        f"Keep {step['width']} bits, down to 2^{step['unit']} (one ulp = {step['ulp']}). "
        f"Guard bit {step['guard']}, sticky bit {step['sticky']}: {_dropped(step)}."
    )
    said.append(_decision(step))
    return said


def _dropped(step: dict) -> str:
    if step["dropped"] == "0":
        return "nothing is dropped, the sum is representable"
    part = step["dropped"].lstrip("+")
    where = "below" if not step["guard"] else "an exact tie at" if step["tie"] else "above"
    return f"{part} ulp is dropped, {where} the midpoint"


def _decision(step: dict) -> str:
    if step["overflow"]:
        return f"Beyond the largest {step['format']} number: {step['result']}."
    if step["saturated"]:
        return f"Beyond the largest {step['format']} number, which is kept: {step['result']}."
    if step["dropped"] == "0":
        return f"Stored as {step['result']}, error 0."
    why = ""
    if step["tie"] and step["mode"] == "nearest_even":
        why = f", because the last kept bit is {step['odd']} ({'odd' if step['odd'] else 'even'})"
    way = "up in size" if step["up"] else "down in size"
    return f"Rounded {way}{why}: {step['result']}, error {step['error']} ulp."


def summary(trace: dict) -> str:
    """One line: the stored result, its bits, and its signed error against the exact sum."""
    total = trace["total"]
    text = f"Result in {total['target']}: {total['result']} (bits {total['pattern']})"
    if total["error"] is None:
        return f"{text}; the exact sum is {total['exact']}."
    return (
        f"{text}; exact sum {total['exact']}; error {total['difference']} = {total['error']} ulp."
    )


def render(trace: dict) -> str:
    """The picture of a trace as HTML, without the summary line."""
    stored = "".join(
        f"<div>{a['name']} = {a['value']} <code>{a['bits']}</code></div>" for a in trace["addends"]
    )
    steps = len(trace["steps"])
    parts = [f'<div class="bx-stored">Stored in {trace["stored"]}: {stored}</div>']
    for i, step in enumerate(trace["steps"]):
        what = " + ".join(row["name"] for row in step["rows"])
        head = f"Step {i + 1} of {steps}: {what}, rounded to {step['format']}"
        items = "".join(f"<li>{s}</li>" for s in sentences(step))
        parts.append(
            f'<div class="bx-step"><div class="bx-head">{head} {MODE_WORDS[step["mode"]]}</div>'
            f'<div class="bx-scroll">{_grid(step)}</div>'
            f'<ol>{items}</ol><div class="bx-scroll">{_line(step)}</div></div>'
        )
    return "".join(parts)


def _grid(step: dict) -> str:
    top, bottom, unit = step["top"], step["bottom"], step["unit"]
    places = range(top, bottom - 1, -1)
    marks = "".join(f"<i>{p if p % 4 == 0 else ''}</i>" for p in places)
    lines = [_cells("place 2^", "<i></i>" + marks, "<i></i>", "bx-place")]
    for row in step["rows"]:
        lines.append(_bits(row, ["" for _ in places], ""))
    kinds = ["k" if p >= unit else "g" if p == unit - 1 else "s" for p in places]
    kinds = [k if p <= step["place"] else "" for k, p in zip(kinds, places)]
    lines.append(_bits(step["sum"], kinds, "bx-sum"))
    if step["before"] != step["place"]:
        lines.append(_window("window before the shift", places, step["before"], step["width"]))
    lines.append(_window("kept bits", places, step["place"], step["width"]))
    told = "; ".join(f"{r['name']} {'-' if r['sign'] else '+'}{r['bits']}" for r in step["rows"])
    sum_ = step["sum"]
    label = (
        f"Bits from place 2^{top} to 2^{bottom}: {told}; "
        f"sum {'-' if sum_['sign'] else '+'}{sum_['bits']}. "
        f"Kept: 2^{step['place']} to 2^{unit}; guard {step['guard']}, sticky {step['sticky']}."
    )
    key = (
        '<div class="bx-key"><i class="k">1</i> kept <i class="g">1</i> guard bit '
        '<i class="s">1</i> sticky: the OR of these'
        + (f"; … stands for {step['folded']} more places" if step["folded"] else "")
        + "</div>"
    )
    return f'<div class="bx-grid" role="img" aria-label="{label}">{"".join(lines)}</div>{key}'


def _cells(label: str, cells: str, end: str, kind: str) -> str:
    return f'<div class="bx-row {kind}"><b>{label}</b>{cells}{end}</div>'


def _bits(row: dict, kinds: list[str], kind: str) -> str:
    cells, seen = f"<i>{'-' if row['sign'] else '+'}</i>", False
    for bit, zone in zip(row["bits"], kinds):
        seen = seen or bit == "1"
        cells += f'<i class="{zone}{"" if seen else " z"}">{bit}</i>'
    rest = '<i class="s">…</i>' if row["rest"] else "<i></i>"
    return _cells(row["name"], cells, rest, kind)


def _window(label: str, places, first: int, width: int) -> str:
    cells = "<i></i>" + "".join(
        f'<i class="{"w" if first >= p > first - width else ""}"></i>' for p in places
    )
    return _cells(label, cells, "<i></i>", "bx-window")


def _line(step: dict) -> str:
    """The exact sum between its two neighbours, and where it went (SVG)."""
    if step["dropped"] == "0" or step["overflow"] or step["saturated"]:
        return ""
    x = f"{60 + step['tenths'] // 10}.{step['tenths'] % 10}"
    end = 360 if step["up"] else 60
    label = (
        f"Number line from {step['below']} to {step['above']}: the sum lies "
        f"{step['dropped'].lstrip('+')} of the way and goes to {step['result']}."
    )
    return (
        f'<svg class="bx-line" viewBox="0 0 420 74" role="img" aria-label="{label}">'
        '<path d="M60 40H360M60 33V47M360 33V47" class="a"/><path d="M210 35V45" class="m"/>'
        f'<path d="M{x} 40Q{x} 8 {end} 28" class="t"/><circle cx="{x}" cy="40" r="5" class="p"/>'
        f'<circle cx="{end}" cy="40" r="6" class="r"/>'
        f'<text x="60" y="64">{step["below"]}</text><text x="360" y="64">{step["above"]}</text>'
        f'<text x="210" y="64">midpoint</text><text x="{x}" y="24">sum</text></svg>'
    )


_STATIC = Path(__file__).parent / "static"
_counter = itertools.count(1)


def page_html(state: dict = WORKED, *, key: str | None = None) -> str:
    """The explorer as one self-contained piece of HTML: style, form, picture and script.

    The form stays hidden until the script runs. `key` names the elements (unique in a page).
    """
    key = key or f"bit-explorer-{next(_counter)}"
    trace = explore(state)
    setup = {"state": state, "examples": EXAMPLES, "formats": _format_table()}
    data = json.dumps(setup).replace("<", "\\u003c")
    script = (_STATIC / "bit_explorer.js").read_text()
    style = (_STATIC / "bit_explorer.css").read_text()
    return (
        f"<style>{style}</style>"
        f'<div class="bit-explorer" id="{key}">{_form(key, state)}'
        f'<p class="bx-result" role="status">{html.escape(summary(trace))}</p>'
        f'<div class="bx-picture">{render(trace)}</div></div>'
        f'<script>{script}\nBitExplorer.mount("{key}", {data});</script>'
    )


def _format_table() -> dict:
    return {n: [f.exponent_bits, f.fraction_bits, f.finite_only] for n, f in FORMATS.items()}


def _form(key: str, state: dict) -> str:
    base, bits = _split_target(state["target"])
    most = FORMATS[base].fraction_bits
    chosen = next((name for name, example in EXAMPLES.items() if example == state), "")
    examples = _select([("", "(yours)")] + [(name, name) for name in EXAMPLES], chosen)
    controls = [("example", "Example", examples)]
    for name, text in zip("abc", state["addends"] + [""]):
        control = f'<input @ type="text" value="{html.escape(text)}" spellcheck="false">'
        controls.append((name, f"Addend {name}", control))
    formats = [(n, n) for n in FORMATS]
    draw = f'<input @ type="range" min="0" max="{DRAWS - 1}" value="{state["draw"]}">'
    controls += [
        ("stored", "Addends stored in", _select(formats, state["stored"])),
        ("target", "Result in", _select(formats, base)),
        ("bits", "Fraction bits", f'<input @ type="number" min="0" max="{most}" value="{bits}">'),
        ("mode", "Rounding", _select(MODE_WORDS.items(), state["mode"])),
        ("accumulator", "Sum", _select(SUM_WORDS.items(), state["accumulator"])),
        ("draw", f"Random draw (of {DRAWS})", draw),
    ]
    fields = "".join(
        f'<label for="{key}-{name}"><span>{label}</span>'
        + control.replace("@", f'id="{key}-{name}" name="{name}"', 1)
        + "</label>"
        for name, label, control in controls
    )
    return f'<form class="bx-form" hidden>{fields}</form>'


def _split_target(target: str) -> tuple[str, int]:
    base, _, bits = target.partition(".")
    return base, int(bits or FORMATS[base].fraction_bits)


def _select(options, chosen: str = "") -> str:
    inner = "".join(
        f'<option value="{value}"{" selected" if value == chosen else ""}>{label}</option>'
        for value, label in options
    )
    return f"<select @>{inner}</select>"


class Page:
    """The explorer for a page without a kernel."""

    def __init__(self, state: dict = WORKED):
        self.markup = page_html(state)

    def _repr_html_(self) -> str:
        return self.markup


def show(state: dict = WORKED, *, static: bool):
    """The explorer; leave it as the last line of a cell. static: for a page without a kernel."""
    return Page(state) if static else live_widget(state)


def table(cases: dict[str, dict]) -> str:
    """Name, stored result, exact sum and error of several states (changes of `WORKED`)."""
    lines = [f"{'':29} {'exact sum':>19} {'stored':>9} {'ulp':>9}"]
    for name, changes in cases.items():
        total = explore(WORKED | changes)["total"]
        lines.append(f"{name:38} {total['exact']:>20} {total['result']:>10} {total['error']:>12}")
    return "\n".join(lines)


def live_widget(state: dict = WORKED):
    """The explorer as ipywidgets, computed by `explore` in the kernel."""
    import ipywidgets as widgets

    controls, picture = _live_controls(state), widgets.HTML()
    sheet = f"<style>{(_STATIC / 'bit_explorer.css').read_text()}</style>"

    def update(_=None):
        controls["draw"].disabled = controls["mode"].value != "stochastic"
        try:
            trace = explore(_live_state(controls))
            body = f'<p class="bx-result">{html.escape(summary(trace))}</p>{render(trace)}'
        except ValueError as error:
            body = f'<p class="bx-result">{html.escape(str(error))}</p>'
        picture.value = f'{sheet}<div class="bit-explorer">{body}</div>'

    def new_format(change):
        controls["bits"].max = controls["bits"].value = FORMATS[change["new"]].fraction_bits

    _fill(controls, state)
    controls["example"].observe(lambda c: c["new"] and _fill(controls, c["new"]), "value")
    controls["target"].observe(new_format, "value")
    for name, control in controls.items():
        if name != "example":
            control.observe(update, "value")
    update()
    grid = widgets.Layout(grid_template_columns="repeat(auto-fill, minmax(20em, 1fr))")
    return widgets.VBox([widgets.GridBox(list(controls.values()), layout=grid), picture])


def _live_controls(state: dict) -> dict:
    import ipywidgets as widgets

    style = {"style": {"description_width": "9em"}}

    def choice(label: str, options):
        return widgets.Dropdown(options=list(options), description=label, **style)

    def swapped(words: dict):
        return [(label, name) for name, label in words.items()]

    texts = {n: widgets.Text(description=f"Addend {n}", **style) for n in "abc"}
    return {
        "example": choice("Example", [("(yours)", None), *EXAMPLES.items()]),
        **texts,
        "stored": choice("Addends stored in", FORMATS),
        "target": choice("Result in", FORMATS),
        "bits": widgets.BoundedIntText(0, 0, 52, description="Fraction bits", **style),
        "mode": choice("Rounding", swapped(MODE_WORDS)),
        "accumulator": choice("Sum", swapped(SUM_WORDS)),
        "draw": widgets.IntSlider(0, 0, DRAWS - 1, description=f"Draw of {DRAWS}", **style),
    }


def _fill(controls: dict, state: dict) -> None:
    for name, text in zip("abc", state["addends"] + [""]):
        controls[name].value = text
    controls["target"].value, bits = _split_target(state["target"])
    controls["bits"].max = FORMATS[controls["target"].value].fraction_bits
    controls["bits"].value = bits
    for name in ("stored", "mode", "accumulator", "draw"):
        controls[name].value = state[name]


def _live_state(controls: dict) -> dict:
    state = {n: controls[n].value for n in ("stored", "mode", "accumulator", "draw")}
    state["addends"] = [controls[n].value for n in "abc" if controls[n].value.strip()]
    return state | {"target": f"{controls['target'].value}.{controls['bits'].value}"}
