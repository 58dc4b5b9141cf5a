"""Parameters of a chapter as the types that its `parameters` cell declares.

papermill passes `-p seeds "[1,2]"` and `-p static true` as text. One line after the parameters
cell, `typed(globals())`, turns every annotated parameter into its declared type, by the same rules
as configurations (`gpt2.coerce`), or says in one sentence what does not fit.
"""

from __future__ import annotations

import typing
from collections.abc import MutableMapping

from gpt2.coerce import coerce


def typed(names: MutableMapping[str, object]) -> None:
    """Coerce every annotated variable of a notebook's globals, in place.

    Types: int, float, bool, str, X | None, and lists: `list` (of whole numbers) or `list[X]`. A
    list may be given as text, '[1, 2]' or '1,2', or as one value. Raises ValueError naming the
    parameter and its value.
    """
    for name, hint in dict(names.get("__annotations__", {})).items():
        if name in names and not name.startswith("_"):
            names[name] = convert(name, names[name], hint)


def convert(name: str, value: object, hint) -> object:
    """One value as the type `hint`."""
    if hint is list or typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint) or (int,)
        if isinstance(value, str):
            value = [part for part in value.strip("[]() ").split(",") if part.strip()]
        elif not isinstance(value, (list, tuple)):
            value = [value]
        return [convert(name, part.strip(" '\"") if isinstance(part, str) else part, item)
                for part in value]  # fmt: skip
    return coerce(name, value, hint)
