"""Chapters are executed within limits, failures name the cell, the cache knows what matters."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from book.build import execute_chapters
from book.chapters import BuildError, find_chapters
from book.execution import Cache, Limits


def run(project, limits=None, chosen=None):
    chapters = find_chapters(project.toc)
    said = []
    done = execute_chapters(
        project, chapters, chosen or chapters, "cpu", limits or Limits(60, 120), said.append
    )
    return done, said


def outputs(executed):
    cells = json.loads(executed.path.read_text())["cells"]
    return ["".join(o.get("text", [])) for c in cells for o in c.get("outputs", [])]


def test_failing_cell_is_named_and_what_ran_before_it_is_kept(project, add_chapter):
    add_chapter("01-bad", "print('before')", "x = 1\n1 / 0")
    with pytest.raises(BuildError, match=r"01-bad, code cell 3 \(x = 1\) failed: ZeroDivision"):
        run(project)
    assert "before" in (project.build / "partial" / "01-bad.ipynb").read_text()
    assert not list((project.build / "cache").glob("*.ipynb"))


def test_a_sleeping_cell_ends_within_its_limit(project, add_chapter):
    add_chapter("01-sleeps", "import time; time.sleep(10**6)")
    start = time.monotonic()
    with pytest.raises(BuildError, match="01-sleeps, code cell 2 .*longer than 2 s for one cell"):
        run(project, Limits(cell=2, chapter=100))
    assert time.monotonic() - start < 45


@pytest.mark.slow
def test_a_slow_chapter_ends_within_its_own_limit_and_leaves_no_process(project, add_chapter):
    cell = "import os, time, pathlib; pathlib.Path('pid').write_text(str(os.getpid()))"
    add_chapter("01-slow", cell + "; time.sleep(10**6)")
    with pytest.raises(BuildError, match="01-slow took longer than 30 s"):
        run(project, Limits(cell=1000, chapter=30))
    time.sleep(0.5)
    pid = int((project.root / "pid").read_text())
    alive = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    assert not alive


def test_a_dead_kernel_is_reported_and_earlier_cells_are_kept(project, add_chapter):
    add_chapter("01-dies", "print('one')", "import os; os._exit(1)")
    with pytest.raises(BuildError, match="01-dies, code cell 3 .*the kernel died"):
        run(project)
    assert "one" in (project.build / "partial" / "01-dies.ipynb").read_text()


@pytest.mark.parametrize("parameters", [None, "preset = 'cpu'"])
def test_only_a_chapter_with_a_parameters_cell_is_accepted(project, add_chapter, parameters):
    add_chapter("01-ok", "print(1)")
    add_chapter("02-odd", "print(2)", parameters=parameters)
    asked = {c.name: c for c in find_chapters(project.toc)}
    if parameters is None:
        with pytest.raises(BuildError, match="02-odd has 0 cells tagged 'parameters'"):
            run(project)
    else:
        assert asked["02-odd"].parameters() == ["preset"]


def test_second_run_is_cached_until_package_code_changes(project, add_chapter):
    cell = "from gpt2.numbers_used import VALUE\nprint('value', VALUE, preset, static)"
    add_chapter("01-value", cell)
    first, _ = run(project)
    assert outputs(first["01-value"]) == ["value 1 cpu True\n"]
    again, said = run(project)
    assert again["01-value"].cached and "unchanged" in said[0]

    (project.root / "gpt2" / "numbers_used.py").write_text("VALUE = 2\n")
    changed, _ = run(project)
    assert outputs(changed["01-value"]) == ["value 2 cpu True\n"]
    assert changed["01-value"].record["code"] != first["01-value"].record["code"]

    path = changed["01-value"].path
    path.write_text(path.read_text()[:200])  # as a full disk or a killed process leaves it
    chapter = find_chapters(project.toc)[0]
    assert Cache(path.parent).newest(chapter) is None
    assert Cache(path.parent).get(chapter, changed["01-value"].record["key"]) is None


def test_keys_depend_on_source_parameters_device_and_archived_results(project, add_chapter):
    from book.chapters import chapter_key, code_hash

    add_chapter("01-key", "print(1)")
    chapter = find_chapters(project.toc)[0]

    def key(preset="cpu", device="a"):
        return chapter_key(chapter, code_hash(project.root), {"preset": preset}, device)

    keys = [key(), key(preset="mini"), key(device="b")]
    (project.root / "book" / "results").mkdir()
    (project.root / "book" / "results" / "arms.json").write_text("{}")
    keys.append(key())
    add_chapter("01-key", "print(2)")
    keys.append(key())
    assert len(set(keys)) == 5
    assert key() == keys[-1]


def test_two_chapters_are_executed_beside_each_other_and_both_are_kept(project, add_chapter):
    for mine, other in (("01-one", "02-two"), ("02-two", "01-one")):
        wait = f"while not os.path.exists({other!r}):\n    time.sleep(0.1)"
        add_chapter(mine, f"import os, time\nopen({mine!r}, 'w').close()\n{wait}")
    done, said = run(project)
    assert [done[name].cached for name in ("01-one", "02-two")] == [False, False]
    assert said[:2] == ["[1/2] 01-one: executing ...", "[2/2] 02-two: executing ..."]
    ends = [text for text in said if re.fullmatch(r"\[[12]/2\] .*: done in \d+ s", text)]
    assert len(ends) == 2
    again, _ = run(project)
    assert all(executed.cached for executed in again.values())


@pytest.mark.slow
def test_an_interrupted_build_leaves_no_kernel_and_goes_on_where_it_stopped(project, add_chapter):
    add_chapter("01-quick", "print('quick')")
    script = (
        "import pathlib, sys; from book.build import Layout, main; "
        f"sys.exit(main(['--preset', 'cpu'], Layout(pathlib.Path({str(project.root)!r}))))"
    )
    wait = "import os, time; open(f'pid{n}', 'w').write(str(os.getpid())); time.sleep(1000)"
    for n in (2, 3):
        add_chapter(f"0{n}-long", f"n = {n}\n{wait}")
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    files = [project.root / f"pid{n}" for n in (2, 3)]
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 130 and "run it again to go on from here" in complaint
    for pid in (int(file.read_text()) for file in files):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    done, _ = run(project, chosen=find_chapters(project.toc)[:1])
    assert done["01-quick"].cached
