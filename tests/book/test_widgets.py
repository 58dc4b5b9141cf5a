"""explore: live ipywidgets, or frames that work without a kernel."""

import re

import pytest

from book.widgets import MAX_FRAMES, explore


def render(run, bits):
    return f'<img alt="{run} at {bits}">'


def test_static_frames_hold_every_combination_with_its_description_and_show_the_first():
    page = explore(render, static=True, run=["low", "twin"], bits=[2, 3, 7])._repr_html_()
    frames = re.findall(r'<div data-frame="(\d,\d)"( hidden)?>(.*?)</div>', page)
    assert [f[0] for f in frames] == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    assert [bool(f[1]) for f in frames] == [False] + [True] * 5
    assert 'alt="twin at 7"' in frames[-1][2]
    assert "http" not in page and "require" not in page
    assert "<noscript>" in page and '<div class="bit-controls" hidden>' in page


def test_growing_numbers_become_a_slider_and_all_controls_have_labels():
    page = explore(render, static=True, run=["<a>", "b"], bits=[2, 3, 7])._repr_html_()
    assert page.count('type="range"') == 1 and page.count("<select") == 1
    targets = re.findall(r'<label for="([^"]+)"', page)
    assert len(targets) == 2 and all(f'id="{t}"' in page for t in targets)
    assert '<option value="0">&lt;a&gt;</option>' in page


def test_two_identical_figures_on_a_page_have_their_own_names():
    names = {explore(render, static=True, run=["a"], bits=[1]).name for _ in range(2)}
    assert len(names) == 2


def test_only_narrows_the_static_page_and_not_the_live_one():
    full = dict(run=["a", "b"], bits=list(range(10)), only={"bits": [1, 2]})
    assert len(explore(render, static=True, **full).frames) == 4
    controls = explore(render, static=False, **full).children[0].children
    assert len(controls[1].options) == 10


def test_too_much_for_a_page_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=f"65 frames .*{MAX_FRAMES}.*only="):
        explore(render, static=True, run=["a"], bits=range(65))
    with pytest.raises(ValueError, match="MB of at most 6.*only="):
        explore(lambda n: "x" * 4_000_000, static=True, n=[1, 2])
    with pytest.raises(ValueError, match="nothing to choose from"):
        explore(render, static=True, run=[], bits=[1])
    with pytest.raises(ValueError, match="names no choice"):
        explore(render, static=True, run=["a"], bits=[1], only={"bit": [1]})


def test_live_widgets_draw_again_without_an_output_widget():
    import ipywidgets

    box = explore(render, static=False, run={"low precision": "low", "twin": "hp"}, bits=[2, 3, 7])
    (run, bits), view = box.children[0].children, box.children[1]
    assert isinstance(run, ipywidgets.Dropdown) and isinstance(bits, ipywidgets.SelectionSlider)
    assert view.value == '<img alt="low at 2">'
    run.value, bits.value = "hp", 7
    assert view.value == '<img alt="hp at 7">'
    everything = [box, *box.children, *box.children[0].children]
    assert not any(isinstance(w, ipywidgets.Output) for w in everything)
