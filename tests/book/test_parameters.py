"""What papermill passes as text becomes what the parameters cell declares, or one sentence."""

import json
import subprocess
import sys

import pytest

from book.parameters import convert, typed


@pytest.mark.parametrize(
    "value, hint, expected",
    [
        ("[1,2]", list, [1, 2]),
        ("1, 2", list[float], [1.0, 2.0]),
        ("['a', \"b\"]", list[str], ["a", "b"]),
        (3, list[int], [3]),
        ([], list, []),
        (2, float, 2.0),
        ("1e-3", float, 1e-3),
        (2.0, int, 2),
        ("true", bool, True),
        (0, bool, False),
        ("none", int | None, None),
        ("cpu", str, "cpu"),
    ],
)
def test_text_becomes_the_declared_type(value, hint, expected):
    result = convert("x", value, hint)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    "value, hint", [("[1, two]", list), (2.5, int), ("maybe", bool), ("nan", float), (7, str)]
)
def test_what_does_not_fit_is_refused_in_one_sentence(value, hint):
    with pytest.raises(ValueError, match="^seeds=") as error:
        convert("seeds", value, hint)
    assert "\n" not in str(error.value)


def test_typed_changes_annotated_names_only():
    names = {"__annotations__": {"beta": float, "gone": int}, "beta": "2", "other": "2"}
    typed(names)
    assert names["beta"] == 2.0 and type(names["beta"]) is float and names["other"] == "2"


def test_papermill_parameters_reach_the_cells_with_their_types(project, add_chapter):
    declared = "beta: float = 1.0  # a\nuse_sfa: bool = False  # b\nseeds: list = [0]  # c"
    shown = (
        "from book.parameters import typed\ntyped(globals())\nprint(repr([beta, use_sfa, seeds]))"
    )
    add_chapter("01-types", shown, parameters=declared)
    out = project.root / "out.ipynb"
    command = [sys.executable, "-m", "papermill", str(project.root / "book" / "01-types.ipynb")]
    command += [str(out), "-p", "beta", "2", "-p", "use_sfa", "true", "-p", "seeds", "[1,2]"]
    subprocess.run(command, check=True, capture_output=True)
    cells = json.loads(out.read_text())["cells"]
    assert "".join(cells[-1]["outputs"][0]["text"]) == "[2.0, True, [1, 2]]\n"
