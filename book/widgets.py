"""One helper for interactive figures: `explore(render, static=static, run=[...], head=[...])`.

In JupyterLab (`static=False`) it shows ipywidgets whose change calls `render` again. In a headless
run (`static=True`, which `book.build` passes to every chapter) it renders every combination once
and shows them as frames behind plain selects and sliders with an inline script: no kernel, no
require.js, no network. Without JavaScript the first frame stays, with its caption.

No Output widget is used in either case: they stall headless runs now and then.
"""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number

MAX_FRAMES = 64
MAX_BYTES = 6_000_000
_COUNT = itertools.count()


@dataclass(frozen=True)
class Choice:
    """One control: its parameter's name, labels shown and values passed."""

    name: str
    labels: tuple[str, ...]
    values: tuple

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @property
    def ordered(self) -> bool:
        """Numbers that grow: a slider says more than a list."""
        v = self.values
        numbers = all(isinstance(x, Number) and not isinstance(x, bool) for x in v)
        return len(v) > 2 and numbers and all(a < b for a, b in zip(v, v[1:]))


def _choice(name: str, options) -> Choice:
    pairs = list(
        options.items() if isinstance(options, Mapping) else ((str(v), v) for v in options)
    )
    if not pairs:
        raise ValueError(
            f"explore({name}=...) has nothing to choose from; give at least one value"
        )
    return Choice(name, tuple(str(label) for label, _ in pairs), tuple(v for _, v in pairs))


def explore(
    render: Callable,
    *,
    static: bool,
    only: Mapping[str, Sequence] | None = None,
    **choices,
):
    """An interactive figure; leave it as the last line of a cell.

    render(**values) returns what `book.figures.caption` returns, or HTML text; each frame brings
    its own description. choices: parameter name -> list of values, or label -> value; growing
    numbers become a slider. only: fewer values of some choices for the static page.
    Raises ValueError for more than 64 frames or 6 MB of them: narrow it with `only`.
    """
    if not choices:
        raise ValueError("explore needs at least one choice, such as run=['low', 'high']")
    unknown = set(only or {}) - set(choices)
    if unknown:
        raise ValueError(f"only={sorted(unknown)} names no choice; there are {sorted(choices)}")
    if static:
        kept = {name: (only or {}).get(name, options) for name, options in choices.items()}
        return Frames(render, [_choice(n, o) for n, o in kept.items()])
    return _live(render, [_choice(n, o) for n, o in choices.items()])


def _live(render: Callable, choices: list[Choice]):
    """ipywidgets controls above an HTML widget."""
    import ipywidgets

    controls = []
    for choice in choices:
        given = {"options": list(zip(choice.labels, choice.values)), "description": choice.title}
        controls.append(
            ipywidgets.SelectionSlider(**given, continuous_update=False)
            if choice.ordered
            else ipywidgets.Dropdown(**given)
        )
    view = ipywidgets.HTML()

    def draw(_=None):
        values = {c.name: w.value for c, w in zip(choices, controls)}
        view.value = str(render(**values))

    for control in controls:
        control.observe(draw, names="value")
    draw()
    return ipywidgets.VBox([ipywidgets.HBox(controls, layout={"flex_flow": "row wrap"}), view])


class Frames:
    """Every combination of the choices, rendered, as self-contained HTML."""

    def __init__(self, render: Callable, choices: list[Choice]):
        count = math.prod(len(c.values) for c in choices)
        if count > MAX_FRAMES:
            raise ValueError(
                f"{count} frames are more than a page should carry ({MAX_FRAMES}); "
                "narrow a choice for the static page with only={...}"
            )
        self.choices = choices
        self.frames = {}
        for places in itertools.product(*(range(len(c.values)) for c in choices)):
            values = {c.name: c.values[i] for c, i in zip(choices, places)}
            self.frames[",".join(map(str, places))] = str(render(**values))
        size = sum(map(len, self.frames.values()))
        if size > MAX_BYTES:
            raise ValueError(
                f"{count} frames take {size / 1e6:.1f} MB of at most {MAX_BYTES / 1e6:.0f}; "
                "narrow a choice with only={...} or draw less in each"
            )

        digest = hashlib.sha256(json.dumps(self.frames).encode()).hexdigest()
        self.name = f"explore-{digest[:12]}-{next(_COUNT)}"  # unique on a page, same in each build

    def _repr_html_(self) -> str:
        name = self.name
        controls = "".join(_control(name, i, c) for i, c in enumerate(self.choices))
        frames = "".join(
            f'<div data-frame="{key}"{" hidden" if number else ""}>{frame}</div>'
            for number, (key, frame) in enumerate(self.frames.items())
        )
        more = len(self.frames) - 1
        noscript = f"<noscript><p>{more} further views need JavaScript.</p></noscript>"
        return (
            f'<div class="bit-explore" id="{name}">'
            f'<div class="bit-controls" hidden>{controls}</div>'
            f'<div aria-live="polite">{frames}</div>{noscript if more else ""}</div>'
            f"<script>({_SCRIPT})({json.dumps(name)})</script>"
        )


def _control(name: str, place: int, choice: Choice) -> str:
    ident = f"{name}-{place}"
    label = f'<label for="{ident}">{html.escape(choice.title)}</label>'
    if choice.ordered:
        labels = html.escape(json.dumps(choice.labels), quote=True)
        control = (
            f'<input type="range" id="{ident}" data-choice min="0" max="{len(choice.values) - 1}" '
            f'value="0" step="1" data-labels="{labels}"> '
            f'<output for="{ident}">{html.escape(choice.labels[0])}</output>'
        )
    else:
        options = "".join(
            f'<option value="{i}">{html.escape(label)}</option>'
            for i, label in enumerate(choice.labels)
        )
        control = f'<select id="{ident}" data-choice>{options}</select>'
    return f'<span class="bit-control">{label} {control}</span>'


_SCRIPT = """function (name) {
  const root = document.getElementById(name);
  const inputs = [...root.querySelectorAll("[data-choice]")];
  function show() {
    const key = inputs.map((input) => input.value).join(",");
    for (const frame of root.querySelectorAll("[data-frame]"))
      frame.hidden = frame.dataset.frame !== key;
    for (const input of inputs.filter((input) => input.dataset.labels)) {
      const text = JSON.parse(input.dataset.labels)[input.value];
      input.parentElement.querySelector("output").textContent = text;
      input.setAttribute("aria-valuetext", text);
    }
  }
  inputs.forEach((input) => input.addEventListener("input", show));
  root.querySelector(".bit-controls").hidden = false;
  show();
}"""
