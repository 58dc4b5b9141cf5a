"""The order in which chapters are executed, with executions that only count."""

import random
from types import SimpleNamespace

import pytest

from book import ROOT, schedule
from book.chapters import BuildError, Chapter, find_chapters
from book.schedule import Order, execute_all

TRAINS, LOOKS, ARCHIVES = ("preset", "workers"), ("preset", "seed"), ("static",)


def book_of(**kinds):
    """Orders of chapters by name, in the order given."""
    chapters = [Chapter(n, ROOT / f"{name}.ipynb") for n, name in enumerate(kinds, start=1)]
    return [Order(c.number, c, kinds[c.name], {}, "key", c.name) for c in chapters]


class Counted:
    """Ends when asked for the `polls`-th time, or raises `error` then."""

    def __init__(self, name, polls, log, error=None):
        self.name, self.polls, self.log, self.error = name, polls, log, error

    def ended(self):
        self.polls -= 1
        if self.polls <= 0 and self.error:
            raise self.error
        return self.polls <= 0

    def end(self):
        self.log.append(("ended early", self.name))


@pytest.fixture
def execute(monkeypatch):
    """execute(orders, polls, ...) -> what happened: (starts | done | ended early, name)."""
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0)

    def run(orders, polls, errors=(), idle=lambda: True):
        log = []

        def start(order):
            log.append(("starts", order.label))
            return Counted(order.label, polls[order.label], log, dict(errors).get(order.label))

        try:
            execute_all(orders, start, lambda order, _: log.append(("done", order.label)), idle)
        except (BuildError, KeyboardInterrupt) as error:
            log.append(("raised", str(error)))
        return log

    return run


def started(log):
    return [name for what, name in log if what == "starts"]


def test_archives_are_read_beside_training_and_runs_are_looked_at_after_it(execute):
    orders = book_of(one=TRAINS, two=LOOKS, three=TRAINS, four=ARCHIVES, five=ARCHIVES)
    log = execute(orders, {"one": 10, "two": 3, "three": 5, "four": 3, "five": 3})
    assert log == [
        ("starts", "one"),
        ("starts", "four"),
        ("done", "four"),
        ("starts", "five"),
        ("done", "five"),
        ("done", "one"),
        ("starts", "three"),
        ("starts", "two"),
        ("done", "two"),
        ("done", "three"),
    ]


def test_a_chapter_that_looks_at_runs_waits_for_none_that_comes_later(execute):
    log = execute(book_of(looks=LOOKS, trains=TRAINS), {"looks": 9, "trains": 9})
    assert started(log) == ["trains", "looks"] and log[2] == ("done", "trains")


def test_beside_a_chapter_that_trains_another_starts_only_where_a_core_is_idle(execute):
    orders = book_of(trains=TRAINS, first=ARCHIVES, second=ARCHIVES)
    polls = {"trains": 9, "first": 3, "second": 3}
    never = execute(orders, polls, idle=lambda: False)
    assert never[:2] == [("starts", "trains"), ("done", "trains")]
    assert started(never)[1:] == ["first", "second"]
    assert never.index(("starts", "second")) < never.index(("done", "first"))
    asked = iter([False] * 4 + [True] + [False] * 99)
    once = execute(orders, polls, idle=lambda: next(asked))
    assert once[1:4] == [("starts", "first"), ("done", "first"), ("done", "trains")]


def test_chapters_without_training_are_executed_two_at_a_time(execute):
    orders = book_of(a=ARCHIVES, b=LOOKS, c=ARCHIVES)
    log = execute(orders, {"a": 3, "b": 3, "c": 3}, idle=lambda: False)
    assert started(log) == ["a", "b", "c"]
    assert log.index(("starts", "b")) < log.index(("done", "a")) < log.index(("starts", "c"))


@pytest.mark.parametrize("seed", range(20))
def test_the_real_chapters_keep_their_order_however_long_each_takes(execute, seed):
    chapters = find_chapters(ROOT / "_toc.yml")
    orders = [
        Order(place, c, c.parameters(), {}, "key", c.name)
        for place, c in enumerate(chapters, start=1)
    ]
    draw = random.Random(seed)
    polls = {o.label: draw.randint(1, 40) for o in orders}
    log = execute(orders, polls, idle=lambda: draw.random() < 0.5)
    by_name, running, done = {o.label: o for o in orders}, set(), set()
    for what, name in log:
        if what == "done":
            running.remove(name)
            done.add(name)
            continue
        running.add(name)
        assert len(running) <= 2
        assert sum(by_name[n].trains for n in running) <= 1
        if by_name[name].looks_at_runs:
            before = orders[: orders.index(by_name[name])]
            assert all(o.label in done for o in before if o.trains)
    assert done == set(by_name) and not running


@pytest.mark.parametrize("error", [BuildError("cell 3"), KeyboardInterrupt("by hand")])
def test_a_failure_ends_what_runs_beside_it_and_starts_nothing(execute, error):
    orders = book_of(trains=TRAINS, first=ARCHIVES, second=ARCHIVES, third=ARCHIVES)
    polls = {"trains": 50, "first": 2, "second": 3, "third": 1}
    log = execute(orders, polls, {"second": error})
    assert log == [
        ("starts", "trains"),
        ("starts", "first"),
        ("done", "first"),
        ("starts", "second"),
        ("ended early", "trains"),
        ("ended early", "second"),
        ("raised", str(error)),
    ]


def test_an_idle_core_is_seen_over_a_while_and_a_busy_machine_has_none(monkeypatch):
    now, idle = 100.0, 5000.0
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now))
    times = SimpleNamespace(cpu_times=lambda: SimpleNamespace(idle=idle))
    monkeypatch.setattr(schedule, "psutil", times)
    core = schedule.IdleCore()
    now, idle = 100.5, 5000.5
    assert not core(), "too short to tell"
    now, idle = 101.5, 5001.4
    assert core()
    now, idle = 102.0, 5001.4
    assert core(), "what the last while said holds until the next is over"
    now, idle = 102.7, 5001.8
    assert not core()
