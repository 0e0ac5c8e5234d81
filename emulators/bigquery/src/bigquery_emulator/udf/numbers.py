"""NUMERIC functions for which DuckDB's DECIMAL has no equivalent or would use a DOUBLE."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Context, Decimal

_WIDE = Context(prec=120)
_LIMIT = Decimal(10) ** 29
_MOST_DIGITS = 100
_FORM = re.compile(r"%([-+ 0#']*)(\d*)(?:\.(\d+))?f")
_MODES = {"ROUND_HALF_AWAY_FROM_ZERO": ROUND_HALF_UP, "ROUND_HALF_EVEN": ROUND_HALF_EVEN}


def round_numeric(value: Decimal, digits: int, mode: str) -> Decimal:
    """Returns a NUMERIC rounded to this many decimal places (negative: left of the point).

    Raises:
        ValueError: there is no such mode, or the result has 30 digits before the decimal point.
    """
    if mode not in _MODES:
        raise ValueError(f"bq: Invalid rounding mode: {mode}")
    step = Decimal(1).scaleb(-max(min(digits, 9), -40))
    rounded = value.quantize(step, _MODES[mode], _WIDE)
    if abs(rounded) >= _LIMIT:
        raise ValueError(f"bq: numeric overflow: ROUND({value.normalize():f}, {digits})")
    return rounded.quantize(Decimal("1e-9"), context=_WIDE)


def format_numeric(form: str, value: Decimal) -> str:
    """Formats a NUMERIC with a FORMAT specifier, such as `%10.2f`.

    Halves are rounded away from zero.

    Raises:
        ValueError: the format requests too many digits.
    """
    match = _FORM.fullmatch(form)
    assert match is not None, form
    flags, width, digits = match.groups()
    places = 6 if digits is None else int(digits)
    if places > _MOST_DIGITS or len(width) > 4:
        raise ValueError(f"bq: FORMAT element {form} requests too many digits")
    rounded = abs(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP, _WIDE)
    number = f"{rounded:,f}" if "'" in flags else f"{rounded:f}"
    if "#" in flags and not places:
        number += "."
    sign = "-" if value < 0 else "+" if "+" in flags else " " if " " in flags else ""
    if "-" in flags:
        return f"{sign}{number}".ljust(int(width or 0))
    if "0" in flags:
        return sign + number.rjust(int(width or 0) - len(sign), "0")
    return f"{sign}{number}".rjust(int(width or 0))
