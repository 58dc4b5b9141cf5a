"""Adding two or three numbers and rounding the sum, with every bit of it kept for display.

`explore` works with Python integers (a number is (-1)^sign * magnitude * 2^exponent), independent
of the tensor code in `kernels.rounding`, against which the tests hold it.
`static/bit_explorer.js` is its twin for a page without a kernel; the tests run both on the same
inputs.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

from kernels.formats import FP32, FloatFormat, parse_format

DRAWS = 1024  # a stochastic draw is a whole number below this: up if draw/DRAWS < dropped part
MAX_COLUMNS = 34  # bit columns shown before the rest is folded into one
WORKED = {  # paper, section 3.3.2
    "addends": ["-2.4071154594421387", "-2.296875"],
    "stored": "fp32",
    "target": "bf16",
    "mode": "nearest_even",
    "accumulator": "exact",
    "draw": 512,
}


def read_number(text: str, stored: FloatFormat) -> tuple[int, int, int]:
    """Text to (sign, magnitude, exponent) with value (-1)^sign * magnitude * 2^exponent.

    A decimal number is rounded to `stored` (to nearest, ties to even); 0 and 1 of exactly the
    format's width, or after '0b', are its bits. Raises ValueError for anything else.
    """
    text = text.strip()
    width = 1 + stored.exponent_bits + stored.fraction_bits
    digits = text[2:] if text.startswith("0b") else text
    if re.fullmatch("[01]+", digits) and (len(digits) == width or text.startswith("0b")):
        return _read_bits(digits, stored, width)
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        raise ValueError(f"{text!r} is neither a decimal number nor {width} bits of {stored}")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large; use a number below 1.8e308")
    sign = int(math.copysign(1, value) < 0)
    magnitude, exponent = _dyadic(abs(value))
    done = round_dyadic(magnitude, exponent, stored, "nearest_even", 0)
    if done["overflow"] or done["saturated"]:
        raise ValueError(f"{text!r} is beyond the largest {stored} number")
    return sign, *_strip(*done["rounded"])


def _read_bits(digits: str, fmt: FloatFormat, width: int) -> tuple[int, int, int]:
    if len(digits) != width:
        raise ValueError(f"{len(digits)} bits are not {width}, the width of {fmt}")
    field = int(digits[1 : 1 + fmt.exponent_bits], 2)
    fraction = int("0" + digits[1 + fmt.exponent_bits :], 2)
    top = field == 2**fmt.exponent_bits - 1
    if top and (not fmt.finite_only or fraction == 2**fmt.fraction_bits - 1):
        raise ValueError(f"{digits} is infinity or NaN in {fmt}; use a finite number")
    if field:
        fraction += 1 << fmt.fraction_bits
    return int(digits[0]), *_strip(fraction, max(field, 1) - fmt.bias - fmt.fraction_bits)


def _dyadic(value: float) -> tuple[int, int]:
    numerator, denominator = value.as_integer_ratio()
    return numerator, 1 - denominator.bit_length()


def _strip(magnitude: int, exponent: int) -> tuple[int, int]:
    """The same value with an odd magnitude (or 0)."""
    if not magnitude:
        return 0, 0
    zeros = (magnitude & -magnitude).bit_length() - 1
    return magnitude >> zeros, exponent + zeros


def round_dyadic(magnitude: int, exponent: int, fmt: FloatFormat, mode: str, draw: int) -> dict:
    """Round magnitude * 2^exponent to `fmt`: what is kept, what is dropped, which way it went."""
    lead = magnitude.bit_length() - 1 + exponent if magnitude else fmt.emin
    place = max(lead, fmt.emin)
    unit = place - fmt.fraction_bits  # one ulp is 2^unit
    drop = unit - exponent
    if drop <= 0:
        magnitude, exponent, drop = magnitude << -drop, unit, 0
    kept, rest = magnitude >> drop, magnitude & ((1 << drop) - 1)
    guard = (rest >> (drop - 1)) & 1 if drop else 0
    sticky = int(drop > 1 and rest & ((1 << (drop - 1)) - 1) != 0)
    # without fraction bits the even neighbour is the one with the even exponent field
    odd = kept & 1 if fmt.fraction_bits or not kept else (place + fmt.bias) & 1
    up = {
        "nearest_even": guard and (sticky or odd),
        "nearest_away": guard,
        "toward_zero": 0,
        "stochastic": int(draw << drop < rest * DRAWS),
    }[mode]
    rounded, saturated = (kept + int(up), unit), False
    top = _largest(fmt)
    overflow = rounded[0] << max(unit - top[1], 0) > top[0] << max(top[1] - unit, 0)
    if overflow and (fmt.finite_only or mode == "toward_zero"):
        rounded, saturated, overflow = top, True, False
    return {
        "place": place,
        "unit": unit,
        "kept": kept,
        "rest": rest,
        "drop": drop,
        "guard": guard,
        "sticky": sticky,
        "tie": bool(guard and not sticky),
        "odd": odd,
        "up": bool(up),
        "rounded": rounded,
        "saturated": saturated,
        "overflow": overflow,
    }


def _largest(fmt: FloatFormat) -> tuple[int, int]:
    full = (2 << fmt.fraction_bits) - (2 if fmt.finite_only else 1)
    return full, fmt.emax - fmt.fraction_bits


def pattern(sign: int, magnitude: int, unit: int, fmt: FloatFormat, overflow=False) -> str:
    """Sign, exponent field and fraction field, separated by spaces."""
    if overflow:
        field = 2**fmt.exponent_bits - 1
        fraction = 0
    else:
        lead = magnitude.bit_length() - 1 + unit if magnitude else fmt.emin
        place = max(lead, fmt.emin)
        shift = unit - (place - fmt.fraction_bits)
        significand = magnitude << shift if shift >= 0 else magnitude >> -shift
        hidden = significand >> fmt.fraction_bits
        field = place + fmt.bias if hidden else 0
        fraction = significand & ((1 << fmt.fraction_bits) - 1)
    text = f"{sign} {field:0{fmt.exponent_bits}b}"
    return text + (f" {fraction:0{fmt.fraction_bits}b}" if fmt.fraction_bits else "")


def number(magnitude: int, exponent: int, sign: int = 0) -> str:
    """Shortest decimal text of the nearest double; '≈ ' before it where that is not exact."""
    minus = "-" if sign else ""
    magnitude, exponent = _strip(magnitude, exponent)
    if not magnitude:
        return minus + "0"
    if magnitude.bit_length() + exponent > 1024:
        return f"{minus}more than 1.8e308"
    value = float(Fraction(magnitude) * Fraction(2) ** exponent)
    parts = Decimal(repr(value)).normalize().as_tuple()
    digits, point = "".join(map(str, parts.digits)), len(parts.digits) + parts.exponent
    if -5 < point <= 17:
        whole = digits[:point].ljust(point, "0") if point > 0 else "0"
        fraction = digits[point:] if point > 0 else "0" * -point + digits
    else:
        whole, fraction = digits[0], digits[1:]
    text = whole + ("." + fraction if fraction else "")
    if not -5 < point <= 17:
        text += f"e{point - 1}"
    return ("" if magnitude.bit_length() <= 53 else "≈ ") + minus + text


def ulps(numerator: int, drop: int) -> str:
    """numerator / 2^drop with a sign and six decimals (halves away from zero)."""
    if not numerator:
        return "0"
    scaled = (abs(numerator) * 2_000_000 + (1 << drop)) >> (drop + 1)
    sign = "-" if numerator < 0 else "+"
    if not scaled:
        return f"{sign}less than 0.000001"
    return f"{sign}{scaled // 1_000_000}.{scaled % 1_000_000:06d}"


def explore(state: dict) -> dict:
    """Everything that the explorer shows for one state (keys as in `WORKED`).

    `accumulator`: "exact" adds all addends and rounds once; "fp32" rounds each sum to fp32 (to
    nearest, ties to even) and the last one to the target; "target" rounds each sum to the target.
    Raises ValueError naming what it cannot read.
    """
    stored, target = parse_format(state["stored"]), parse_format(state["target"])
    if not 2 <= len(state["addends"]) <= 3:
        raise ValueError("give two or three addends")
    addends = [read_number(text, stored) for text in state["addends"]]
    mode, draw = state["mode"], state["draw"]
    names = "abc"[: len(addends)]
    terms = list(zip(names, addends))
    if state["accumulator"] == "exact":
        plan = [(terms, target, mode)]
    elif state["accumulator"] == "fp32":
        plan = [([term], FP32, "nearest_even") for term in terms[1:]] + [([], target, mode)]
        plan[0][0].insert(0, terms[0])
    else:
        plan = [([term], target, mode) for term in terms[1:]]
        plan[0][0].insert(0, terms[0])
    steps = []
    for more, fmt, how in plan:
        carried = [("sum so far", steps[-1]["_exact"])] if steps else []
        steps.append(_step(carried + more, fmt, how, draw))
        if steps[-1]["overflow"]:
            break
    total = _total(addends, steps[-1], target)
    for step in steps:
        del step["_exact"]
    return {
        "addends": [
            {"name": n, "value": number(m, e, s), "bits": pattern(s, m, e, stored)}
            for n, (s, m, e) in zip(names, addends)
        ],
        "stored": str(stored),
        "steps": steps,
        "total": total,
    }


def _sum(terms: list[tuple[int, int, int]]) -> tuple[int, int, int, int]:
    """(sign, magnitude, exponent, common exponent of the terms), the exact sum."""
    low = min((e for _, m, e in terms if m), default=0)
    total = sum((-m if s else m) << (e - low) for s, m, e in terms if m)
    sign = int(total < 0 or (total == 0 and all(s for s, _, _ in terms)))
    return sign, abs(total), low, low


def _step(terms, fmt: FloatFormat, mode: str, draw: int) -> dict:
    sign, magnitude, exponent, low = _sum([value for _, value in terms])
    done = round_dyadic(magnitude, exponent, fmt, mode, draw)
    kept, unit, drop = done["kept"], done["unit"], done["drop"]
    leads = [m.bit_length() - 1 + e for _, (_, m, e) in terms if m]
    before = max(leads, default=done["place"])
    lead = magnitude.bit_length() - 1 + exponent if magnitude else before
    top = max(before, lead, done["place"])
    bottom = max(min(low, unit - 1), min(top - MAX_COLUMNS + 1, unit - 2))
    error = (int(done["up"]) << drop) - done["rest"]
    return {
        "format": str(fmt),
        "width": fmt.fraction_bits + 1,
        "mode": mode,
        "top": top,
        "bottom": bottom,
        "folded": max(bottom - low, 0),
        "rows": [_row(name, s, m, e, top, bottom) for name, (s, m, e) in terms],
        "sum": _row("sum", sign, magnitude, exponent, top, bottom),
        "shifts": [before - (m.bit_length() - 1 + e) if m else 0 for _, (_, m, e) in terms],
        "before": before,
        "lead": lead,
        "zero": not magnitude,
        "place": done["place"],
        "unit": unit,
        "ulp": number(1, unit),
        "guard": done["guard"],
        "sticky": done["sticky"],
        "tie": done["tie"],
        "odd": done["odd"],
        "up": done["up"],
        "dropped": ulps(done["rest"], drop),
        "tenths": done["rest"] * 3000 >> drop,  # where the sum lies on the drawn line
        "below": number(kept, unit, sign),
        "above": number(kept + 1, unit, sign),
        "overflow": done["overflow"],
        "saturated": done["saturated"],
        "result": _result(sign, done),
        "pattern": pattern(sign, *done["rounded"], fmt, done["overflow"]),
        "error": ulps(-error if sign else error, drop),
        "_exact": (sign, *_strip(*done["rounded"])),
    }


def _result(sign: int, done: dict) -> str:
    if not done["overflow"]:
        return number(*done["rounded"], sign)
    return "-infinity" if sign else "infinity"


def _row(name, sign, magnitude, exponent, top, bottom) -> dict:
    """One aligned line of bits, 2^top down to 2^bottom; `rest` is the OR of what is below."""
    shift = bottom - exponent
    shown = magnitude >> shift if shift >= 0 else magnitude << -shift
    rest = int(shift > 0 and magnitude & ((1 << shift) - 1) != 0)
    return {
        "name": name,
        "value": number(magnitude, exponent, sign),
        "sign": sign,
        "bits": f"{shown:0{top - bottom + 1}b}",
        "rest": rest,
    }


def _total(addends, last: dict, target: FloatFormat) -> dict:
    """The final result against the exact sum of the stored addends."""
    sign, magnitude, exponent, _ = _sum(addends)
    total = {
        "target": str(target),
        "exact": number(magnitude, exponent, sign),
        "result": last["result"],
        "pattern": last["pattern"],
    }
    if last["overflow"]:
        return total | {"difference": None, "error": None}
    s, m, e = last["_exact"]
    low = min(exponent, e)
    exact = (-magnitude if sign else magnitude) << (exponent - low)
    difference = ((-m if s else m) << (e - low)) - exact
    ulp = round_dyadic(magnitude, exponent, target, "toward_zero", 0)["unit"]
    scaled = difference << max(low - ulp, 0)
    return total | {
        "difference": number(abs(difference), low, int(difference < 0)),
        "error": ulps(scaled, max(ulp - low, 0)),
    }
