"""FORMAT_* and PARSE_* functions for dates and times.

Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/format-elements
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.functions.registry import Call, Translate
from bigquery_emulator.googlesql.translation.literals import text

_DATE, _TIME = types.TYPE_DATE, types.TYPE_TIME
_DATETIME, _TIMESTAMP = types.TYPE_DATETIME, types.TYPE_TIMESTAMP
_ELEMENT = re.compile(r"%(E[0-9*]S|E4Y|Ez|.)", re.DOTALL)
_OF_DATES = frozenset("aAbBdejmUuVWwgGyYQ") | {"E4Y"}
_OF_CLOCKS = frozenset("HIklMpPS")
_ANYWHERE = frozenset("%nt")
_NATIVE = frozenset("aAbBdjmUuVWwGyHIMpS%")
"""Elements that DuckDB's strftime formats the same way."""
_SEVERAL = {
    "F": "%E4Y-%m-%d",
    "D": "%m/%d/%y",
    "x": "%m/%d/%y",
    "h": "%b",
    "T": "%H:%M:%S",
    "X": "%H:%M:%S",
    "R": "%H:%M",
    "r": "%I:%M:%S %p",
    "c": "%a %b %e %H:%M:%S %Y",
}
_COMPUTED = {
    "e": "printf('%2d', day({v}))",
    "k": "printf('%2d', hour({v}))",
    "l": "printf('%2d', (hour({v}) + 11) % 12 + 1)",
    "P": "lower(strftime({v}, '%p'))",
    "g": "printf('%02d', isoyear({v}) % 100)",
    "Q": "CAST(quarter({v}) AS VARCHAR)",
    "E4Y": "printf('%04d', year({v}))",
    "Y": "CAST(year({v}) AS VARCHAR)",
    "E*S": "bq.seconds_text({v})",
    "n": "chr(10)",
    "t": "chr(9)",
}
_ZONED = {
    "z": "bq.offset_digits({v}, {moment}, '')",
    "Ez": "bq.offset_digits({v}, {moment}, ':')",
    "s": "CAST(bq.unix({moment}, 1000000) AS VARCHAR)",
}
_FRACTION = re.compile("E([1-6])S")
_PARSED = frozenset("aAbBdDeFhHImMpRSTxXyY%") | {"E*S", "z", "Ez"}
"""Elements that DuckDB's strptime parses as GoogleSQL does, once some of them are expanded."""
_CLOCKS_PARSED = frozenset("HIMpRSTX") | {"E*S"}
_HOURS = "0[0-9]|1[0-3]"
_OFFSETS = {
    "z": f"[-+](?:(?:{_HOURS})(?:[0-5][0-9])?|14(?:00)?)",
    "Ez": f"[-+](?:(?:{_HOURS})(?::?[0-5][0-9])?|14(?::?00)?)|Z",
}
"""Possible endings of a string with a UTC offset."""
_OFFSET_AT_END = re.compile("(?<!%)%(Ez|z)$")
_READ_AS = {
    **{"F": "%Y-%m-%d", "h": "%b", "R": "%H:%M", "T": "%H:%M:%S", "X": "%H:%M:%S"},
    **{"D": "%m/%d/%y", "x": "%m/%d/%y", "e": "%d"},
}


class _Moment(NamedTuple):
    """The value to format: its local time, its instant if it has a zone, and its parts."""

    local: str
    moment: str
    has: frozenset[str]


def formatted(call: Call) -> str:
    """Translates FORMAT_DATE, FORMAT_TIME, FORMAT_DATETIME, and FORMAT_TIMESTAMP."""
    pattern = call.text(0)
    if pattern is None:
        raise unsupported("A date format that is not a literal")
    parts = _parts(_write_out(pattern), _moment(call), pattern)
    return f"({' || '.join(parts)})" if parts else "''"


def _moment(call: Call) -> _Moment:
    value, kind = call.sql[1], call.kind(1)
    if kind == _TIMESTAMP:
        zone = call.zone(2) if len(call.sql) > 2 else "'UTC'"
        has = _OF_DATES | _OF_CLOCKS | _ZONED.keys()
        return _Moment(f"bq.local_minutes({zone}, {value})", value, frozenset(has))
    if kind == _DATE:
        return _Moment(f"CAST({value} AS TIMESTAMP)", "", _OF_DATES)
    if kind == _DATETIME:
        return _Moment(value, "", _OF_DATES | _OF_CLOCKS)
    if kind == _TIME:
        return _Moment(f"(DATE '1970-01-01' + {value})", "", _OF_CLOCKS)
    raise call.refused()


def _write_out(pattern: str) -> str:
    """Expands elements that abbreviate several others."""
    return _ELEMENT.sub(
        lambda found: _write_out(_SEVERAL[found[1]]) if found[1] in _SEVERAL else found[0],
        pattern,
    )


def _parts(pattern: str, moment: _Moment, told: str) -> list[str]:
    """Returns the DuckDB SQL for each part, in order.

    Consecutive elements that strftime supports form one part.
    """
    parts: list[str] = []
    native, at = "", 0

    def flush() -> None:
        nonlocal native
        if native:
            parts.append(f"strftime({moment.local}, {text(native)})")
        native = ""

    for match in _ELEMENT.finditer(pattern):
        native += pattern[at : match.start()].replace("%", "%%")
        at = match.end()
        element = match[1]
        fraction = _FRACTION.fullmatch(element)
        needed = "S" if element[-1] == "S" and element[0] == "E" else element
        if needed not in moment.has | _ANYWHERE:
            raise unsupported(f"Date format element %{element} in {told!r}")
        if element in _NATIVE:
            native += match[0]
            continue
        flush()
        if fraction is not None:
            scale = 10 ** (6 - int(fraction[1]))
            digits = f"printf('%0{fraction[1]}d', microsecond({{v}}) % 1000000 // {scale})"
            form = f"strftime({{v}}, '%S') || '.' || {digits}"
        else:
            form = _COMPUTED.get(element) or _ZONED.get(element, "")
        if not form:
            raise unsupported(f"Date format element %{element} in {told!r}")
        parts.append(form.format(v=moment.local, moment=moment.moment))
    native += pattern[at:].replace("%", "%%")
    flush()
    return parts


def parsed(kind: str) -> Translate:
    """Translates PARSE_DATE, PARSE_TIME, PARSE_DATETIME, or PARSE_TIMESTAMP, by DuckDB type."""

    def write(call: Call) -> str:
        pattern, value = _parse_pattern(call, kind), call.sql[1]
        if kind == "TIME":
            dated = _read(f"'1970-01-01 ' || {value}", f"%Y-%m-%d {pattern}")
            return f"CAST({dated} AS TIME)"
        if not re.search("%[yY]", pattern):
            raise unsupported("PARSE_* with a format that contains no year")
        offset = _OFFSET_AT_END.search(pattern)
        if offset is not None:
            local = pattern[: offset.start()]
            before = r"\s" if local != local.rstrip() else r"\S"
            form = _OFFSETS[offset[1]]
            of_local = _read(f"bq.before_offset({value}, '{form}', '{before}')", local)
            return f"bq.minus_offset({of_local}, {value}, '{form}')"
        moment = _read(value, pattern)
        if len(call.sql) > 2:
            return f"bq.at_zone({call.zone(2)}, {moment})"
        if kind == "DATE":
            return f"bq.checked_date(CAST({moment} AS DATE))"
        checked = f"bq.checked_datetime({moment})"
        return checked if kind == "TIMESTAMP" else f"CAST({checked} AS {kind})"

    return write


def _read(value: str, pattern: str) -> str:
    """Returns the time in a string. Short and full names of days and months are interchangeable."""
    seconds = ("%S", "%S.%f") if "%E*S" in pattern else ("",)
    patterns = dict.fromkeys(
        _replaced(pattern, {"a": day, "A": day, "b": month, "B": month, "E*S": second})
        for day in ("%a", "%A")
        for month in ("%b", "%B")
        for second in seconds
    )
    if len(seconds) > 1:
        value = f"bq.six_digits({value})"
    return f"strptime({value}, [{', '.join(text(form) for form in patterns)}])"


def _parse_pattern(call: Call, kind: str) -> str:
    pattern = call.text(0)
    if pattern is None:
        raise unsupported("A date format that is not a literal")
    elements = {match[1] for match in _ELEMENT.finditer(pattern)}
    refused = elements - _PARSED
    if kind == "DATE":
        refused |= elements & _CLOCKS_PARSED
    if kind == "TIME":
        refused |= elements - _CLOCKS_PARSED - {"%"}
    if elements & _OFFSETS.keys() and (kind != "TIMESTAMPTZ" or not _OFFSET_AT_END.search(pattern)):
        refused |= elements & _OFFSETS.keys()
    # A 12-hour element needs AM or PM, and a 24-hour element must not have it.
    if refused or ("p" in elements) != ("I" in elements):
        raise unsupported(f"Date format elements in {pattern!r}")
    return _replaced(pattern, _READ_AS)


def _replaced(pattern: str, others: Mapping[str, str]) -> str:
    """Replaces some of a format's elements with others."""
    return _ELEMENT.sub(lambda found: others.get(found[1], found[0]), pattern)
