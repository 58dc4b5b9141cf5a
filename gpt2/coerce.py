"""Values from YAML, the command line and notebooks, turned into the type that a field declares.

One rule for every source, so that `1e-3` is a number wherever it is written (PyYAML reads it as
text) and `compile: off` is the word off (PyYAML reads it as False):

    int     a whole number, 2000.0 or '2e3'; never a boolean, never 2.5
    float   any finite number or text of one; whole numbers too
    bool    true/false, yes/no, on/off, 1/0, in any case
    str     text; a boolean only where the field's choices are on/off words
    tuple   a list, or text separated by commas; 'none' is empty
    X|None  null, 'none' or '' give None; anything else must be an X

Everything else is refused in one sentence that names the key and the value.
"""

from __future__ import annotations

import difflib
import math
import types
import typing

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "")


def nearest_hint(word: str, known) -> str:
    """'; did you mean X?', or the list of what is known when nothing is near."""
    known = list(known)
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if len(known) <= 12 else ""


def coerce(key: str, value, hint, choices: tuple[str, ...] = ()):
    """`value` as the type `hint`. Raises ValueError naming key, value and what would do."""
    optional, kind = _split_optional(hint)
    is_none_word = isinstance(value, str) and value.strip().lower() in NONE_WORDS
    if value is None or (optional and is_none_word):
        if optional:
            return None
        raise ValueError(f"{key} cannot be null; leave the key out to keep the preset's value")
    if kind is bool:
        return _to_bool(key, value)
    if kind is int:
        return _to_int(key, value)
    if kind is float:
        return _to_float(key, value)
    if typing.get_origin(kind) is tuple:
        return _to_names(key, value)
    return _to_text(key, value, choices)


def _split_optional(hint) -> tuple[bool, type]:
    if isinstance(hint, types.UnionType):
        (kind,) = (a for a in hint.__args__ if a is not type(None))
        return True, kind
    return False, hint


def _to_bool(key: str, value) -> bool:
    word = str(value).strip().lower()
    if isinstance(value, (bool, int, str)) and word in TRUE_WORDS + FALSE_WORDS:
        return word in TRUE_WORDS
    raise ValueError(f"{key}={value!r} is not a yes or a no; use true or false")


def _to_float(key: str, value) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{key}={value!r} is a yes or no; it needs a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}={value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{key}={value!r} is not finite")
    return number


def _to_int(key: str, value) -> int:
    if isinstance(value, str):
        try:
            return int(value.replace(",", "_"))
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _to_float(key, value)
    if not number.is_integer():
        raise ValueError(f"{key}={value!r} is not a whole number")
    return int(number)


def _to_names(key: str, value) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [] if value.strip().lower() in NONE_WORDS else value.strip("()[] ").split(",")
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{key}={value!r} is not a list of names; write it as 'one,two'")
    return tuple(name.strip() for name in value if name.strip())


def _to_text(key: str, value, choices: tuple[str, ...]) -> str:
    if isinstance(value, bool) and {"on", "off"} & set(choices):
        value = "on" if value else "off"
    if not isinstance(value, str):
        raise ValueError(f"{key}={value!r} is not text; put it in quotes")
    value = value.strip()
    if choices and value not in choices:
        raise ValueError(f"{key}={value!r} is unknown; use {', '.join(choices)}")
    return value
