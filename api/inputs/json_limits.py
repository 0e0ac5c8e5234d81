"""Limits on JSON from callers, checked before it is parsed: the number of values and their depth.

Parsing blocks the event loop, and pydantic reports every single error: 15 MB of wrong numbers took
5 s, 18 MB of unknown fields 1.7 s.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from shared.errors import BadInput, InputTooLarge

MAX_VALUES = 300_000
"""Numbers and strings in one body. OpenAI's API accepts as many token ids."""
MAX_STRINGS = 20_000
"""Strings and field names in one body. Each of them may be an unknown field."""
SURELY_FEW = 1000
"""Bodies with at most this many commas are not checked further."""
MAX_NESTED = 100
"""Levels of nesting. Pydantic has a limit of 200."""
# Possessive, and with an optional end: the expression reads each byte only once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def check_amount(body: bytes) -> None:
    """Refuses a body with too many values to parse quickly.

    In a usual body, only the commas are counted.

    Raises:
        InputTooLarge: it has more values or strings than any request needs.
    """
    if body.count(b",") <= SURELY_FEW:
        return
    strings = commas = end = 0
    for found in _STRING.finditer(body):
        strings += 1
        commas += body.count(b",", end, found.start())
        end = found.end()
        if strings > MAX_STRINGS or commas >= MAX_VALUES:
            break
    if strings > MAX_STRINGS:
        raise InputTooLarge(f"the body has more than {MAX_STRINGS} strings and field names")
    if commas + body.count(b",", end) >= MAX_VALUES:
        raise InputTooLarge(f"the body has more than {MAX_VALUES} values")


def object_in(text: str | bytes, field: str) -> dict[str, Any]:
    """Parses a JSON object that can be encoded as JSON again. Errors name it by `field`.

    Raises:
        BadInput: it is not a JSON object, or nests deeper than MAX_NESTED.
    """
    try:
        found = msgspec.json.decode(text)
        _check_depth(found)
    # A surrogate without its other half is neither text nor JSON (RFC 8259, section 8.2).
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadInput(f"{field}: not valid JSON: {error}", field=field) from error
    except RecursionError as error:
        raise BadInput(f"{field}: nested deeper than {MAX_NESTED} levels", field=field) from error
    if not isinstance(found, dict):
        raise BadInput(f"{field}: must be a JSON object", field=field)
    return found


def _check_depth(found: object) -> None:
    level = [found]
    for _ in range(MAX_NESTED):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise RecursionError
