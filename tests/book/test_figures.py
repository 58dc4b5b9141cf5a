"""Figures: contrast in light and dark, colour-blind safety, captions, and what the plots draw."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from book.captions import (
    INK,
    PALETTE,
    Provenance,
    _inline,
    archived,
    badge,
    caption,
    live,
    picture,
)
from book.figures import (
    KIND_COLOURS,
    curve,
    dose_response,
    head_heatmap,
    intervals,
    outcome_matrix,
    panels,
    subplots,
    thinned,
)
from gpt2.outcomes import Outcome

LIGHT, DARK = "#ffffff", "#121212"  # the pages of the theme
HUE_ROTATE_180 = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
DEUTERANOPIA = np.array(  # Machado, Oliveira and Fernandes 2009, severity 1
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ]
)
PROTANOPIA = np.array(
    [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]
)


def linear(colour):
    c = np.asarray(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    a, b = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (b + 0.05) / (a + 0.05)


def in_dark(colour):
    """filter: invert(1) hue-rotate(180deg), as book.css applies it on a dark page."""
    return tuple(np.clip(HUE_ROTATE_180 @ (1 - np.asarray(to_rgb(colour))), 0, 1))


def test_every_line_of_a_panel_has_its_own_colour_and_dash():
    runs = {str(i): {"step": [0, 1], "train_loss": [1.0, 2.0]} for i in range(3 * len(PALETTE))}
    (axis,) = panels(runs, ["train_loss"]).axes
    styles = {(line.get_color(), str(line._dash_pattern)) for line in axis.lines}
    assert len(styles) == len(runs)


@pytest.mark.parametrize("colour", PALETTE)
def test_lines_stand_out_on_light_and_dark_pages(colour):
    assert contrast(colour, LIGHT) >= 3
    assert contrast(in_dark(colour), DARK) >= 3


def test_text_stands_out_on_light_and_dark_pages_and_on_the_cells_of_a_matrix():
    for ground in (LIGHT, *KIND_COLOURS.values()):
        assert contrast(INK, ground) >= 4.5
    for ground in (DARK, *map(in_dark, KIND_COLOURS.values())):
        assert contrast(in_dark(INK), ground) >= 4.5


def test_the_style_sheet_applies_the_filter_that_these_tests_compute():
    from book import ROOT

    sheet = (ROOT / "book" / "style" / "book.css").read_text()
    rule = re.search(r'html\[data-theme="dark"\][^{]*bit-image[^{]*\{ filter: ([^;]+);', sheet)
    assert rule[1] == "invert(1) hue-rotate(180deg)"


@pytest.mark.parametrize("matrix", [np.eye(3), DEUTERANOPIA, PROTANOPIA])
def test_first_colours_differ_for_every_reader(matrix):
    seen = [np.clip(matrix @ linear(c), 0, 1) ** (1 / 2.2) for c in PALETTE[:3]]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.15


def run_metrics(failing: bool):
    steps = np.arange(400)
    norm = np.full((400, 2, 2), np.nan)
    norm[::20] = 5.0
    if failing:
        norm[::20, 1, 0] = np.linspace(5, 60, 20)
    loss = np.full(400, 2.0)
    loss[3] = np.nan
    return {"step": steps, "train_loss": loss, "spectral_norm_q": norm}


def test_panels_draw_every_run_and_mark_onset_and_divergence():
    outcome = Outcome("diverged", last_step=300, diverged_step=300)
    runs = {"low": run_metrics(True), "twin": run_metrics(False)}
    figure = panels(runs, ["train_loss", "spectral_norm_q"], outcomes={"low": outcome})
    loss, norm = figure.axes
    assert [line.get_label() for line in norm.lines[:2]] == ["low", "twin"]
    assert norm.lines[0].get_ydata()[-1] == 60 and norm.get_yscale() == "log"
    marks = [line for line in loss.lines if list(line.get_xdata()) == [300, 300]]
    assert len(marks) == 1
    assert len(loss.lines[0].get_xdata()) == 399  # the missing row is dropped, not drawn as zero


def test_panels_of_one_head_draw_that_head():
    steps, values = curve(run_metrics(True), "spectral_norm_q", head=(0, 1))
    assert list(steps[:2]) == [0, 20] and set(values) == {5.0}


def test_a_run_keeps_its_colour_where_others_are_left_out():
    names = ["low", "twin"]
    both = panels({n: run_metrics(True) for n in names}, ["train_loss"]).axes[0].lines[1]
    alone = panels({"twin": run_metrics(True)}, ["train_loss"], order=names).axes[0].lines[0]
    assert alone.get_color() == both.get_color() and alone.get_linestyle() == both.get_linestyle()


def test_thinning_keeps_peaks():
    values = np.zeros(10_000)
    values[7_777] = 9.0
    steps, kept = thinned(np.arange(10_000), values)
    assert len(steps) <= 600 and kept.max() == 9.0 and steps[kept.argmax()] == 7_777


def test_matrix_says_in_words_what_happened_and_what_was_not_run():
    cells = {
        ("plain", "2"): Outcome("diverged", diverged_step=1234),
        ("plain", "7"): Outcome("healthy", last_step=9000),
        ("twin", "2"): Outcome("stable", last_step=50),
    }
    words = [t.get_text() for t in outcome_matrix(cells).axes[0].texts]
    assert words == ["diverged\nat 1,234", "healthy\nto 9,000", "stable\nto 50", "not run"]


def test_dose_response_keeps_unfailed_runs_apart():
    points = [dict(arm="a", bits=b, step=100 * 2**b, failed=b < 4) for b in (2, 3, 4)]
    axis = dose_response(points).axes[0]
    failed, unfailed, joined = axis.lines
    assert list(failed.get_ydata()) == [400, 800] and list(unfailed.get_ydata()) == [1600]
    assert unfailed.get_marker() == "^" and list(joined.get_ydata()) == pytest.approx([400, 800])


def test_heatmap_has_a_row_per_head_and_refuses_scalars():
    figure = head_heatmap(run_metrics(True), "spectral_norm_q")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()][2] == "L1 H0"
    with pytest.raises(ValueError, match="'train_loss' is not a per-head metric"):
        head_heatmap(run_metrics(True), "train_loss")


def test_a_caption_carries_description_badge_and_provenance():
    figure, axis = subplots()
    axis.plot([1, 2])
    shown = caption(
        figure, "Loss & `code`, $x<1$.", live(preset="cpu", seeds=[0, 1]), alt='A "rise"'
    )
    markup = shown._repr_html_()
    assert 'alt="A &quot;rise&quot;"' in markup and "● live" in markup
    assert "<code>code</code>" in markup and r"\(x&lt;1\)" in markup and "Loss &amp;" in markup
    assert "preset cpu, seeds 0, 1" in markup
    with pytest.raises(ValueError, match="needs a caption and a description"):
        caption(figure, "x", live(), alt=" ")


def test_archived_figures_name_their_machine_and_differ_from_live_ones():
    source = archived({"machine": "NVIDIA H200", "date": "2026-01-02", "code": "abc", "seeds": 5})
    assert str(source) == "NVIDIA H200, seeds 5, 2026-01-02, code abc"
    assert badge("archived") != badge("live") and "◆ archived" in badge("archived")
    with pytest.raises(ValueError, match="without date"):
        archived({"machine": "x"})
    with pytest.raises(ValueError, match="'old'; use 'live' or 'archived'"):
        Provenance("old", "x", "y")


def test_pictures_are_small_repeatable_and_turn_to_pixels_when_they_grow():
    def draw(points):
        figure, axis = subplots()
        axis.plot(np.random.default_rng(0).normal(size=points), np.arange(points), ".")
        return picture(figure)

    assert draw(50).startswith("data:image/svg+xml") and draw(50) == draw(50)
    assert draw(4000).startswith("data:image/png")


def test_intervals_span_the_stated_number_of_standard_errors():
    axis = intervals({"flash": (-0.2, 0.05)}, label="ulp").axes[0]
    left, right = axis.collections[0].get_segments()[0][:, 0]
    assert (left, right) == pytest.approx((-0.3, -0.1))


def test_inline_markup_escapes_the_rest():
    assert _inline("<b> `a_b`") == "&lt;b&gt; <code>a_b</code>"


def test_a_legend_of_many_long_names_leaves_room_and_is_whole():
    run = {"step": np.arange(3), "train_loss": np.ones(3)}
    names = [f"the same error by way of the mirror, sham number {i}" for i in range(12)]
    few, many = (panels(dict.fromkeys(chosen, run)) for chosen in (names[:2], names))
    for figure in (few, many):
        figure.canvas.draw()
        legend = figure.legends[0].get_window_extent()
        assert 0 <= legend.x0 and legend.x1 <= figure.bbox.width
    heights = [figure.axes[0].get_window_extent().height for figure in (few, many)]
    assert heights[1] > 0.8 * heights[0]
