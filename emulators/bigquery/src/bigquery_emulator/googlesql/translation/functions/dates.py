"""Functions for DATE, TIME, DATETIME, and TIMESTAMP.

A TIMESTAMP is a TIMESTAMPTZ in DuckDB, and the session's zone is UTC. A DATETIME is a TIMESTAMP.
DuckDB's weeks begin on Monday; if the first day is a different one, the value is shifted.
"""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.translation.functions.date_formats import (
    formatted,
    parsed,
)
from bigquery_emulator.googlesql.translation.functions.registry import (
    Call,
    Functions,
    Translate,
)

_DATE, _TIME = types.TYPE_DATE, types.TYPE_TIME
_DATETIME, _TIMESTAMP = types.TYPE_DATETIME, types.TYPE_TIMESTAMP
_UNIT_US = {
    "MICROSECOND": 1,
    "MILLISECOND": 1_000,
    "SECOND": 1_000_000,
    "MINUTE": 60_000_000,
    "HOUR": 3_600_000_000,
    "DAY": 86_400_000_000,
}
_DAYS = {"DAY": 1, "WEEK": 7}
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}
_UNITS = frozenset({*_UNIT_US, "MONTH", "QUARTER", "YEAR", "ISOYEAR"})
_WEEKDAYS = ("MONDAY", "SUNDAY", "SATURDAY", "FRIDAY", "THURSDAY", "WEDNESDAY", "TUESDAY")


def _unit(part: str) -> tuple[str, int]:
    """Returns the DuckDB unit, and how many days to shift by so that weeks start on Monday."""
    if part.startswith("WEEK_"):
        return "week", _WEEKDAYS.index(part.removeprefix("WEEK_"))
    if part == "WEEK":
        return "week", _WEEKDAYS.index("SUNDAY")
    if part == "ISOWEEK":
        return "week", 0
    if part not in _UNITS:
        raise InvalidQueryError(f"A valid date part name is required but found {part}")
    return part.lower(), 0


def _truncate(call: Call) -> str:
    unit, shift = _unit(call.part(1))
    if len(call.sql) > 2:
        return f"bq.trunc_at('{unit}', {call.sql[0]}, {shift}, {call.zone(2)})"
    macro = {_DATE: "trunc_date", _TIME: "trunc_time"}.get(call.kind(), "trunc_moment")
    return f"bq.{macro}('{unit}', {call.sql[0]}, {shift})"


def _added(sign: str) -> Translate:
    def write(call: Call) -> str:
        value, amount = call.sql[0], f"{sign}({call.sql[1]})"
        part = call.part(2)
        if call.kind() == _TIME and part in _UNIT_US and part != "DAY":
            return f"bq.time_add_us({value}, {amount} * {_UNIT_US[part]})"
        kind = {_DATE: "date", _DATETIME: "datetime", _TIMESTAMP: "timestamp"}.get(call.kind())
        if kind is None:
            raise call.refused()
        if part in _MONTHS and kind != "timestamp":
            return f"bq.{kind}_add_months({value}, {amount} * {_MONTHS[part]})"
        if part in _DAYS and kind == "date":
            return f"bq.add_days({value}, {amount} * {_DAYS[part]})"
        units_us = {**_UNIT_US, "WEEK": 7 * _UNIT_US["DAY"]}
        if part in units_us and kind != "date":
            return f"bq.{kind}_add_us({value}, {amount} * {units_us[part]})"
        raise call.refused()

    return write


def _difference(call: Call) -> str:
    later, earlier, part = call.sql[0], call.sql[1], call.part(2)
    if call.kind() == _TIMESTAMP:
        # Whole units between the two values, truncated toward zero.
        if part not in _UNIT_US:
            raise InvalidQueryError(f"TIMESTAMP_DIFF does not support the {part} date part")
        return f"bq.timestamp_diff({_UNIT_US[part]}, {later}, {earlier})"
    if call.kind() == _TIME and part in _UNIT_US and part != "DAY":
        return f"bq.clock_diff({_UNIT_US[part]}, {later}, {earlier})"
    if call.kind() not in (_DATE, _DATETIME):
        raise call.refused()
    # Counts the boundaries between the two times.
    unit, shift = _unit(part)
    return f"bq.date_diff('{unit}', {later}, {earlier}, {shift})"


_PARTS = {
    **{name: name.lower() for name in ("YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND")},
    "DAYOFYEAR": "dayofyear",
    "QUARTER": "quarter",
    "ISOYEAR": "isoyear",
    "ISOWEEK": "week",
}


def _extract(call: Call) -> str:
    part, value = call.part(1), call.sql[0]
    if len(call.sql) > 2:
        value = f"bq.checked_local(timezone({call.zone(2)}, {value}))"
    if part in _PARTS:
        return f"{_PARTS[part]}({value})"
    if part == "DAYOFWEEK":
        return f"(dayofweek({value}) + 1)"
    if part in ("MILLISECOND", "MICROSECOND"):
        # DuckDB includes the seconds: 1.5 s is 1,500 ms in DuckDB and 500 ms in GoogleSQL.
        scale = 1_000 if part == "MILLISECOND" else 1_000_000
        return f"({part.lower()}({value}) % {scale})"
    if part == "WEEK" or part.startswith("WEEK_"):
        return f"bq.week_of_year(CAST({value} AS DATE), {_unit(part)[1]})"
    raise call.refused()


def _extract_type(target: str) -> Translate:
    def write(call: Call) -> str:
        value = call.sql[0]
        if len(call.sql) > 1:
            value = f"bq.datetime_at({call.zone(1)}, {value})"
        if target == "TIME":
            value = f"CAST({value} AS TIMESTAMP)"
        return f"CAST({value} AS {target})"

    return write


def _date(call: Call) -> str:
    if len(call.sql) == 3:
        return call.put("bq.make_date({0}, {1}, {2})")
    if len(call.sql) == 2:
        return f"bq.date_at({call.zone(1)}, {call.sql[0]})"
    return f"CAST({call.sql[0]} AS DATE)"


def _datetime(call: Call) -> str:
    kinds = [call.kind(place) for place in range(len(call.sql))]
    if len(kinds) == 6:
        return f"bq.make_datetime({', '.join(call.sql)})"
    if kinds == [_TIMESTAMP, types.TYPE_STRING]:
        return f"bq.datetime_at({call.zone(1)}, {call.sql[0]})"
    if kinds == [_DATE, _TIME]:
        return call.put("({0} + {1})")
    if len(kinds) == 1:
        return f"CAST({call.sql[0]} AS TIMESTAMP)"
    raise call.refused()


def _timestamp(call: Call) -> str:
    kinds = [call.kind(place) for place in range(len(call.sql))]
    if len(kinds) == 1 and kinds[0] != types.TYPE_STRING:
        return f"CAST({call.sql[0]} AS TIMESTAMPTZ)"
    if len(kinds) == 1:
        return f"bq.text_timestamp({call.sql[0]})"
    if kinds[0] not in (types.TYPE_STRING, _DATE, _DATETIME):
        raise call.refused()
    value, zone = call.sql[0], call.zone(1)
    if zone.startswith("bq.zone("):
        # An invalid zone or time is an error, unless the other argument is NULL.
        zone = f"bq.zone(CASE WHEN {value} IS NOT NULL THEN {call.sql[1]} END)"
        value = f"(CASE WHEN {call.sql[1]} IS NOT NULL THEN {value} END)"
    if kinds[0] == types.TYPE_STRING:
        return f"bq.text_timestamp_at({value}, {zone})"
    macro = "bq.constant_at_zone" if call.is_constant else "bq.at_zone"
    return f"{macro}({zone}, CAST({value} AS TIMESTAMP))"


def _time(call: Call) -> str:
    if len(call.sql) == 3 and call.kind() == types.TYPE_INT64:
        return call.put("bq.make_time({0}, {1}, {2})")
    if len(call.sql) == 1:
        return f"CAST(CAST({call.sql[0]} AS TIMESTAMP) AS TIME)"
    if len(call.sql) == 2 and call.kind() == _TIMESTAMP:
        return f"CAST(timezone({call.zone(1)}, {call.sql[0]}) AS TIME)"
    raise call.refused()


def _now(kind: str) -> Translate:
    def write(call: Call) -> str:
        zone = call.zone(0) if call.sql else "'UTC'"
        return f"CAST(timezone({zone}, current_timestamp) AS {kind})"

    return write


def _from_unix(unit_us: int) -> Translate:
    return lambda call: f"bq.checked_micros({call.sql[0]} * {unit_us})"


def _to_unix(unit_us: int) -> Translate:
    return lambda call: f"bq.unix({call.sql[0]}, {unit_us})"


def _last_day(call: Call) -> str:
    part = call.part(1) if len(call.sql) > 1 else "MONTH"
    value = f"CAST({call.sql[0]} AS DATE)"
    if part == "MONTH":
        return f"last_day({value})"
    if part in _MONTHS:
        return f"bq.last_day('{part.lower()}', {value}, {_MONTHS[part]})"
    unit, shift = _unit(part)
    if unit == "week":
        return f"bq.last_day_of_week({value}, {shift})"
    raise call.refused()


def _date_array(call: Call) -> str:
    if call.kind() != _DATE or len(call.sql) not in (2, 4):
        raise call.refused()
    step, part = ("1", "DAY") if len(call.sql) == 2 else (call.sql[2], call.part(3))
    if part in _DAYS:
        step, unit = f"({step}) * {_DAYS[part]}", "to_days"
    elif part in _MONTHS:
        step, unit = f"({step}) * {_MONTHS[part]}", "to_months"
    else:
        raise call.refused()
    return f"bq.date_array({call.sql[0]}, {call.sql[1]}, {unit}(CAST({step} AS INTEGER)))"


def _timestamp_array(call: Call) -> str:
    part = call.part(3)
    if part not in _UNIT_US:
        raise call.refused()
    return (
        f"bq.timestamp_array({call.sql[0]}, {call.sql[1]},"
        f" to_microseconds(({call.sql[2]}) * {_UNIT_US[part]}))"
    )


def _bucket(call: Call) -> str:
    """Returns the start of a value's bucket. The width is a number and a date part."""
    value, count, part = call.sql[0], call.sql[1], call.part(2)
    origin = f"CAST({call.sql[3]} AS TIMESTAMP)" if len(call.sql) > 3 else _FIRST_BUCKET
    moment = f"CAST({value} AS TIMESTAMP)"
    units_us = {**_UNIT_US, "WEEK": 7 * _UNIT_US["DAY"]}
    if part in _MONTHS and call.kind() != _TIMESTAMP:
        bucket = f"bq.months_bucket({moment}, {count} * {_MONTHS[part]}, {origin})"
    elif part in units_us and (call.kind() != _DATE or part in _DAYS):
        bucket = f"make_timestamp(bq.bucket_us({moment}, {count} * {units_us[part]}, {origin}))"
    else:
        name = call.name.upper()
        raise InvalidQueryError(f"Bucket width INTERVAL of {name} can't have a {part} part")
    if call.kind() == _DATE:
        return f"bq.checked_date(CAST({bucket} AS DATE))"
    bucket = f"bq.checked_datetime({bucket})"
    return bucket if call.kind() == _DATETIME else f"CAST({bucket} AS TIMESTAMPTZ)"


_FIRST_BUCKET = "TIMESTAMP '1950-01-01'"
_KINDS = ("date", "datetime", "timestamp", "time")
DATES: Functions = {
    **{f"{kind}_trunc": _truncate for kind in _KINDS},
    **{f"{kind}_add": _added("") for kind in _KINDS},
    **{f"{kind}_sub": _added("-") for kind in _KINDS},
    **{f"{kind}_diff": _difference for kind in _KINDS},
    **{f"{kind}_bucket": _bucket for kind in _KINDS[:3]},
    "$extract": _extract,
    "$extract_date": _extract_type("DATE"),
    "$extract_time": _extract_type("TIME"),
    "$extract_datetime": _extract_type("TIMESTAMP"),
    "date": _date,
    "datetime": _datetime,
    "timestamp": _timestamp,
    "time": _time,
    "current_timestamp": lambda call: "current_timestamp",
    "current_date": _now("DATE"),
    "current_datetime": _now("TIMESTAMP"),
    "current_time": _now("TIME"),
    **{f"format_{kind}": formatted for kind in _KINDS},
    "parse_date": parsed("DATE"),
    "parse_time": parsed("TIME"),
    "parse_datetime": parsed("TIMESTAMP"),
    "parse_timestamp": parsed("TIMESTAMPTZ"),
    "timestamp_seconds": _from_unix(1_000_000),
    "timestamp_millis": _from_unix(1_000),
    "timestamp_micros": _from_unix(1),
    "unix_seconds": _to_unix(1_000_000),
    "unix_millis": _to_unix(1_000),
    "unix_micros": _to_unix(1),
    "unix_date": "CAST(date_diff('day', DATE '1970-01-01', {0}) AS BIGINT)",
    "date_from_unix_date": "bq.add_days(DATE '1970-01-01', {0})",
    "last_day": _last_day,
    "generate_date_array": _date_array,
    "generate_timestamp_array": _timestamp_array,
}
