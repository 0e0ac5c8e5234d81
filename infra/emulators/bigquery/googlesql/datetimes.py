"""Rewrites dates, times and timestamps, where GoogleSQL and DuckDB differ the most.

DuckDB's weeks begin on Monday, its DATE arithmetic gives a TIMESTAMP, its DATE_DIFF always counts
boundaries. A TIMESTAMP of GoogleSQL is DuckDB's TIMESTAMPTZ (the session's zone is UTC), a DATETIME
its TIMESTAMP. Part of `rewrite`, which walks the statement.
"""

import re

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.calls import Rewrite, call, cast, number, text, unsupported

_UNIT_US = {
    "MICROSECOND": 1,
    "MILLISECOND": 1_000,
    "SECOND": 1_000_000,
    "MINUTE": 60_000_000,
    "HOUR": 3_600_000_000,
    "DAY": 86_400_000_000,
}
_TRUNCATED: dict[type[exp.Expr], str] = {
    exp.DateTrunc: "DATE",
    exp.DatetimeTrunc: "TIMESTAMP",
    exp.TimestampTrunc: "TIMESTAMPTZ",
}
_UNITS = frozenset({*_UNIT_US, "MONTH", "QUARTER", "YEAR", "ISOYEAR"})
_WEEKDAYS = ("MONDAY", "SUNDAY", "SATURDAY", "FRIDAY", "THURSDAY", "WEDNESDAY", "TUESDAY")
_PARTS = frozenset(
    {"DAY", "DAYOFYEAR", "HOUR", "ISOYEAR", "MINUTE", "MONTH", "QUARTER", "SECOND", "YEAR"}
)
# The elements that mean the same in GoogleSQL, in sqlglot's mapping of it and in DuckDB's strftime.
_FORMAT_ELEMENTS = frozenset("aAbBdfGHIjmMpSuUVwWyY%")


def _difference(node: exp.Expr) -> exp.Expr:
    # DATE_DIFF and DATETIME_DIFF count the boundaries between two moments.
    unit, shift = _unit(node)
    kind = "DATE" if isinstance(node, exp.DateDiff) else "TIMESTAMP"
    return call(
        "bq.date_diff",
        text(unit),
        _typed(node.this, kind),
        _typed(node.expression, kind),
        number(shift),
    )


def _whole_units(node: exp.Expr) -> exp.Expr:
    # TIMESTAMP_DIFF counts whole units, cut towards zero.
    unit = node.args["unit"].name.upper()
    if unit not in _UNIT_US:
        raise InvalidQueryError(f"TIMESTAMP_DIFF does not support the {unit} date part")
    later, earlier = _typed(node.this, "TIMESTAMPTZ"), _typed(node.expression, "TIMESTAMPTZ")
    return call("bq.timestamp_diff", number(_UNIT_US[unit]), later, earlier)


def _truncation(node: exp.Expr) -> exp.Expr:
    unit, shift = _unit(node)
    value = _typed(node.this, _TRUNCATED[type(node)])
    zone = node.args.get("zone")
    if zone is not None:
        return call("bq.trunc_at", text(unit), value, number(shift), zone)
    name = "bq.trunc_date" if isinstance(node, exp.DateTrunc) else "bq.trunc_moment"
    return call(name, text(unit), value, number(shift))


def _unit(node: exp.Expr) -> tuple[str, int]:
    """Returns DuckDB's unit, and the days that move the week's first day onto DuckDB's Monday."""
    unit = node.args["unit"]
    if isinstance(unit, exp.WeekStart):
        return "week", _WEEKDAYS.index(unit.this.name.upper())
    name = unit.name.upper()
    if match := re.fullmatch(r"WEEK\((\w+)\)", name):
        return "week", _WEEKDAYS.index(match.group(1))
    if name == "WEEK":
        return "week", _WEEKDAYS.index("SUNDAY")
    if name == "ISOWEEK":
        return "week", 0
    if name not in _UNITS:
        raise InvalidQueryError(f"A valid date part name is required but found {name}")
    return name.lower(), 0


def _typed(value: exp.Expr, kind: str) -> exp.Expr:
    # GoogleSQL coerces a literal to the type that the function wants.
    is_text = isinstance(value, exp.Literal) and value.is_string
    return cast(value, kind) if is_text else value


def _date_sum(name: str) -> Rewrite:
    def rewrite_sum(node: exp.Expr) -> exp.Expr:
        return call(name, _typed(node.this, "DATE"), _span(node))

    return rewrite_sum


def _sum(kind: type[exp.Add | exp.Sub], literal_as: str) -> Rewrite:
    def rewrite_sum(node: exp.Expr) -> exp.Expr:
        return exp.Paren(this=kind(this=_typed(node.this, literal_as), expression=_span(node)))

    return rewrite_sum


def _span(node: exp.Expr) -> exp.Expr:
    return _interval(exp.Interval(this=node.expression, unit=node.args["unit"]))


def _interval(node: exp.Expr) -> exp.Expr:
    unit = node.args.get("unit")
    name = "" if unit is None else unit.name.upper()
    if name not in {*_UNITS, "WEEK"} - {"ISOYEAR"}:
        raise unsupported(f"INTERVAL in {name or 'several units'}")
    if name == "QUARTER":
        months = exp.Mul(this=exp.Paren(this=cast(node.this, "BIGINT")), expression=number(3))
        return exp.Interval(this=exp.Paren(this=months), unit=exp.var("MONTH"))
    return node


def _extract(node: exp.Expr) -> exp.Expr:
    part, value = node.this, node.expression
    if isinstance(value, exp.AtTimeZone):
        value = call("timezone", value.args["zone"], value.this)
    name = "WEEK" if isinstance(part, exp.WeekStart) else part.name.upper()
    if name in _PARTS:
        return call(name.lower(), value)
    if name == "DAYOFWEEK":
        return exp.Paren(this=exp.Add(this=call("dayofweek", value), expression=number(1)))
    if name == "ISOWEEK":
        return call("week", value)
    if name in ("MILLISECOND", "MICROSECOND"):
        # DuckDB counts the seconds in: 1.5 s is 1,500 ms there and 500 ms in GoogleSQL.
        scale = 1_000 if name == "MILLISECOND" else 1_000_000
        return exp.Paren(this=exp.Mod(this=call(name.lower(), value), expression=number(scale)))
    if name in ("DATE", "TIME", "DATETIME"):
        return cast(value, "TIMESTAMP" if name == "DATETIME" else name)
    if name == "WEEK" and not isinstance(part, exp.WeekStart):
        # The weeks of %U begin on Sunday, and the days before the first Sunday are week 0.
        return cast(call("strftime", cast(value, "TIMESTAMP"), text("%U")), "BIGINT")
    raise unsupported(f"EXTRACT of {part.sql('bigquery')}")


def _date(node: exp.Expr) -> exp.Expr:
    zone = node.args.get("zone")
    value = node.this
    return cast(
        value if zone is None else call("timezone", zone, cast(value, "TIMESTAMPTZ")), "DATE"
    )


def _datetime(node: exp.Expr) -> exp.Expr:
    zone = node.expression if isinstance(node, exp.Datetime) else None
    if zone is not None:
        return call("timezone", zone, cast(node.this, "TIMESTAMPTZ"))
    return cast(node.this, "TIMESTAMP")


def _timestamp(node: exp.Expr) -> exp.Expr:
    zone = node.args.get("zone")
    if zone is None:
        return cast(node.this, "TIMESTAMPTZ")
    return call("timezone", zone, cast(node.this, "TIMESTAMP"))


def _time(node: exp.Expr) -> exp.Expr:
    return cast(cast(node.this, "TIMESTAMP"), "TIME")


def _now(kind: str) -> Rewrite:
    def rewrite_now(node: exp.Expr) -> exp.Expr:
        now = exp.CurrentTimestamp()
        local = cast(now, "TIMESTAMP") if node.this is None else call("timezone", node.this, now)
        return cast(local, kind)

    return rewrite_now


def _formatted(node: exp.Expr) -> exp.Expr:
    source, zone = node.this, node.args.get("zone")
    pattern = _pattern(node)
    if isinstance(source, exp.TsOrDsToTimestamp):
        moment = cast(source.this, "TIMESTAMPTZ")
        moment = call("timezone", text("UTC") if zone is None else zone, moment)
    elif isinstance(source, exp.TsOrDsToTime):
        raise unsupported("FORMAT_TIME")
    else:
        moment = cast(source.this, "TIMESTAMP")
    return call("strftime", moment, pattern)


def _parsed(kind: str) -> Rewrite:
    def rewrite_parsed(node: exp.Expr) -> exp.Expr:
        pattern = _pattern(node)
        if not re.search("%[yYG]", str(pattern.this)):
            raise unsupported("PARSE_* with a format that has no year")
        moment = call("strptime", node.this, pattern)
        zone = node.args.get("zone")
        if zone is not None:
            return call("timezone", zone, moment)
        return cast(moment, kind)

    return rewrite_parsed


def _pattern(node: exp.Expr) -> exp.Expr:
    pattern = node.args["format"]
    if not (isinstance(pattern, exp.Literal) and pattern.is_string):
        raise unsupported("A date format that isn't a literal")
    wrong = [
        found for found in re.findall(r"%(.?)", str(pattern.this)) if found not in _FORMAT_ELEMENTS
    ]
    if wrong:
        raise unsupported(f"Date format element in {pattern.this!r}")
    return pattern


def _from_unix(node: exp.Expr) -> exp.Expr:
    digits = int(node.args["scale"].name) if node.args.get("scale") else 0
    value = exp.Mul(this=exp.Paren(this=node.this), expression=number(10 ** (6 - digits)))
    return call("bq.from_micros", value)


def _to_unix(unit_us: int) -> Rewrite:
    return lambda node: call("bq.unix", node.this, number(unit_us))


def _typed_ends(kind: str) -> Rewrite:
    def rewrite_ends(node: exp.Expr) -> exp.Expr:
        step = node.args.get("step") or exp.Interval(this=text("1"), unit=exp.var("DAY"))
        series = call(
            "generate_series", cast(node.args["start"], kind), cast(node.args["end"], kind), step
        )
        return cast(series, f"{kind}[]")

    return rewrite_ends


MOMENTS: dict[type[exp.Expr], Rewrite] = {
    exp.DateDiff: _difference,
    exp.DatetimeDiff: _difference,
    exp.TimestampDiff: _whole_units,
    exp.DateTrunc: _truncation,
    exp.DatetimeTrunc: _truncation,
    exp.TimestampTrunc: _truncation,
    exp.DateAdd: _date_sum("bq.date_plus"),
    exp.DateSub: _date_sum("bq.date_minus"),
    exp.DatetimeAdd: _sum(exp.Add, "TIMESTAMP"),
    exp.DatetimeSub: _sum(exp.Sub, "TIMESTAMP"),
    exp.TimestampAdd: _sum(exp.Add, "TIMESTAMPTZ"),
    exp.TimestampSub: _sum(exp.Sub, "TIMESTAMPTZ"),
    exp.Interval: _interval,
    exp.Extract: _extract,
    exp.Date: _date,
    exp.Datetime: _datetime,
    exp.Timestamp: _timestamp,
    exp.TsOrDsToDatetime: _datetime,
    exp.TsOrDsToTime: _time,
    exp.CurrentDate: _now("DATE"),
    exp.CurrentDatetime: _now("TIMESTAMP"),
    exp.CurrentTime: _now("TIME"),
    exp.TimeToStr: _formatted,
    exp.StrToTime: _parsed("TIMESTAMPTZ"),
    exp.StrToDate: _parsed("DATE"),
    exp.ParseDatetime: _parsed("TIMESTAMP"),
    exp.UnixToTime: _from_unix,
    exp.UnixSeconds: _to_unix(1_000_000),
    exp.UnixMillis: _to_unix(1_000),
    exp.UnixMicros: _to_unix(1),
    exp.GenerateDateArray: _typed_ends("DATE"),
    exp.GenerateTimestampArray: _typed_ends("TIMESTAMPTZ"),
}
