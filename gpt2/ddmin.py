"""Delta debugging: the smallest part of a set that still answers yes to a costly question.

Shrink a set for which the answer is yes: try its parts, then their complements, with ever finer
cuts, until no single unit can be left out (the result is *1-minimal*) or the budget is spent. The
search knows nothing of training: give it units and a question `is_stable(units)`.

The trace is plain JSON: every question asked, in order, and the set that it was cut from, so that
a search resumes where it stopped and can be drawn as a tree.
Source: Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input" (ddmin).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Question:
    """One set whose stability was asked. `parent` is the index of the set it was cut from.

    role: "all", "none", "part" or "complement" (of a cut into `pieces`). answer: stable or not.
    detail: what the oracle told beside its answer (plain JSON).
    """

    index: int
    parent: int | None
    role: str
    pieces: int
    units: tuple[str, ...]
    answer: bool
    detail: dict = field(default_factory=dict)


@dataclass
class Trace:
    """A search: all units, the questions in order, where it stands.

    state: "searching", "minimal" (no single unit can go), "unstable" (not even all units help),
    "needless" (stable without any) or "budget" (spent; `result` is the smallest stable set found).
    """

    units: tuple[str, ...]
    questions: list[Question] = field(default_factory=list)
    state: str = "searching"
    result: tuple[str, ...] | None = None

    def to_dict(self) -> dict:
        return {
            "units": list(self.units),
            "state": self.state,
            "result": None if self.result is None else list(self.result),
            "questions": [{**vars(q), "units": list(q.units)} for q in self.questions],
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> Trace:
        questions = [Question(**{**q, "units": tuple(q["units"])}) for q in data["questions"]]
        result = data["result"]
        return cls(
            tuple(data["units"]),
            questions,
            data["state"],
            None if result is None else tuple(result),
        )

    def tree(self) -> dict:
        """Nested {units, role, answer, index, children}: a set above those cut from it."""
        nodes = [{**vars(q), "units": list(q.units), "children": []} for q in self.questions]
        for node in nodes:
            if node["parent"] is not None:
                nodes[node["parent"]]["children"].append(node)
        return nodes[0] if nodes else {}

    def text(self) -> str:
        """The tree as indented lines: + stable, - not."""

        def lines(node: dict, depth: int) -> list[str]:
            units = short(node["units"])
            mark = "+" if node["answer"] else "-"
            own = f"{'  ' * depth}{mark} {node['index'] + 1}. {node['role']}: {units}"
            return [own] + [x for child in node["children"] for x in lines(child, depth + 1)]

        tree = self.tree()
        return "\n".join(lines(tree, 0)) if tree else "nothing asked yet"


def short(units: Sequence[str], most: int = 6) -> str:
    told = ", ".join(units[:most])
    return f"{told} and {len(units) - most} more" if len(units) > most else told or "nothing"


class _BudgetSpent(Exception):
    pass


class _Search:
    """The questions of one search, answered from the trace where they were asked before."""

    def __init__(self, trace: Trace, oracle: Callable, budget: int | None, told: Callable):
        self.trace, self.oracle, self.budget, self.told = trace, oracle, budget, told
        self.known = {frozenset(q.units): q for q in trace.questions}
        self.asked = 0

    def ask(
        self, units: Sequence[str], parent: int | None, role: str, pieces: int = 1
    ) -> Question:
        chosen = frozenset(units)
        if chosen in self.known:
            return self.known[chosen]
        if self.budget is not None and self.asked >= self.budget:
            raise _BudgetSpent
        self.asked += 1
        answer = self.oracle(tuple(units))
        detail = {}
        if isinstance(answer, tuple):
            answer, detail = answer
        index = len(self.trace.questions)
        question = Question(index, parent, role, pieces, tuple(units), bool(answer), detail)
        self.trace.questions.append(question)
        self.known[chosen] = question
        self.told(self.trace)
        return question


def minimise(
    units: Iterable[Hashable],
    is_stable: Callable[[tuple[str, ...]], bool | tuple[bool, dict]],
    budget: int | None = None,
    *,
    trace: Trace | None = None,
    on_progress: Callable[[Trace], None] = lambda trace: None,
) -> Trace:
    """A 1-minimal subset of `units` for which `is_stable` holds.

    units: in an order in which neighbours belong together; they are named by `str`. is_stable
    takes a tuple of names and returns a bool, or (bool, detail). budget: most *new* questions of
    this call. trace: of an earlier call on the same units, to continue; its answers are not asked
    again. on_progress: called after every answer, and at the end.
    Raises ValueError for no or repeated units, or a trace of other units.
    """
    names = tuple(map(str, units))
    if not names or len(set(names)) < len(names):
        raise ValueError("minimise needs at least one unit, each of them once")
    trace = trace or Trace(names)
    if trace.units != names:
        raise ValueError("this trace is of other units; start a new one")
    trace.state, trace.result = "searching", None
    search = _Search(trace, is_stable, budget, on_progress)
    try:
        _descend(search, trace)
    except _BudgetSpent:
        trace.state = "budget"
        stable = [q.units for q in trace.questions if q.answer]
        trace.result = min(stable, key=len, default=None)
    on_progress(trace)
    return trace


def _descend(search: _Search, trace: Trace) -> None:
    top = search.ask(trace.units, None, "all")
    if not top.answer:
        trace.state = "unstable"
        return
    if search.ask((), top.index, "none").answer:
        trace.state, trace.result = "needless", ()
        return
    here, pieces = top, 2
    while len(here.units) > 1:
        found, pieces_next = _one_cut(search, here, min(pieces, len(here.units)))
        if found is None and pieces >= len(here.units):
            break
        here = found or here
        pieces = pieces_next if found else 2 * pieces
    trace.state, trace.result = "minimal", here.units


def _one_cut(search: _Search, here: Question, pieces: int) -> tuple[Question | None, int]:
    """The first stable part, else the first stable complement, and the next number of pieces."""
    parts = cut(here.units, pieces)
    for part in parts:
        question = search.ask(part, here.index, "part", pieces)
        if question.answer:
            return question, 2
    if pieces > 2:  # with two pieces the complements are the parts
        for part in parts:
            rest = tuple(u for u in here.units if u not in part)
            question = search.ask(rest, here.index, "complement", pieces)
            if question.answer:
                return question, max(pieces - 1, 2)
    return None, pieces


def cut(units: Sequence[str], pieces: int) -> list[tuple[str, ...]]:
    """`pieces` runs of neighbours, as equal as they can be."""
    size, rest = divmod(len(units), pieces)
    out, start = [], 0
    for i in range(pieces):
        stop = start + size + (i < rest)
        out.append(tuple(units[start:stop]))
        start = stop
    return out


def load_trace(path: str | Path) -> Trace:
    """Raises ValueError for a file that is no trace."""
    try:
        return Trace.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no trace of a search ({error}); move it away") from None
