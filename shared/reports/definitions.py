"""The reports: GoogleSQL files whose headers define the description, audience, and columns.

The header is the comment at the top of a file in `queries`:

    -- What each tenant used of each model, per day.      the title
    -- owner: product                                     the team that owns it
    -- audience: tenants                                  readers: tenants or operators
    -- without: tz                                        standard parameters that it does not have
    -- days: 42                                           how far it looks back by default
    -- range: months                                      it covers whole calendar months
    -- @target FLOAT64 = 0.99: what it is                 an additional parameter
    -- plot: bars cost_usd by day, one color per model    how it is drawn
    -- totals: items, cost_usd                            columns that have a total
    -- column day: what it is                             each column, in order

Any further lines are notes. Every report accepts the parameters in `ReportQuestion` (time range,
time zone, tenants, and models) except those listed after `without`. In a report for `tenants`, each
tenant sees only its own rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple, TypeAlias, cast, get_args
from zoneinfo import ZoneInfo

from shared.errors import BadInput
from shared.settings import time_zones

MAX_NAMES = 1000
MAX_NAME_CHARS = 256
MAX_DAYS = 3660
"""Maximum length of a range.

A report with one line per day or hour also has lines for days without rows.
"""
ROWS_KEPT_DAYS = 400
"""How long rows are kept (infra/bigquery/rows.table.json)."""
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}")

Owner: TypeAlias = Literal["finance", "product", "operations"]
Audience: TypeAlias = Literal["tenants", "operators"]
PlotKind: TypeAlias = Literal["bars", "lines", "heat"]
DEFAULT_DAYS = 7
_PARAMETER = re.compile(r"@(\w+) ([A-Z0-9<>]+)(?: = (\S+?))?: (.+)")
_PLOT = re.compile(r"(\w+) ([\w, ]+?) by (\w+)(?: and (\w+)|, one color per (\w+))?")


class ReportQuestion(NamedTuple):
    """A query for a report, with the parameters that every report accepts."""

    since: datetime
    """Start (inclusive), as @since."""
    until: datetime
    """End (exclusive), as @until."""
    tz: str = "UTC"
    """IANA name of the time zone for days and months, passed as @tz."""
    tenants: tuple[str, ...] | None = None
    """Tenants whose rows are included, passed as @tenants. None means all."""
    models: tuple[str, ...] | None = None
    """Models to include, passed as @models. None means all."""


def ask(
    since: str,
    until: str,
    tz: str = "UTC",
    *,
    tenants: tuple[str, ...] | None = None,
    models: tuple[str, ...] | None = None,
    days: int = 7,
    max_days: int = MAX_DAYS,
    now: datetime | None = None,
) -> ReportQuestion:
    """Parses a question.

    Args:
        since: start of the range, as a date or an ISO 8601 time. Empty means `days` days before the
            end of the range.
        until: end of the range (exclusive), as a date or a time. Empty means now.
        tz: time zone for dates, and for times without one.
        tenants: tenants whose rows are included. None means all.
        models: models to include. None means all.
        days: number of days to look back if `since` is empty.
        max_days: maximum length of the range.

    Raises:
        BadInput: a value is invalid. `field` is its name.
    """
    zone = find_zone(tz)
    end = _moment(until, zone, "to") if until else now or datetime.now(UTC)
    start = _moment(since, zone, "from") if since else _back(end, days)
    if start >= end:
        raise BadInput(
            f"from: must be before the end, {until or end}, got {since or start}", field="from"
        )
    if (end - start).days > max_days:
        raise BadInput(
            f"from: {since or start} is {(end - start).days} days before the end, "
            f"{until or end}; the range must be at most {max_days} days, so set a later "
            "`from`",
            field="from",
        )
    return ReportQuestion(start, end, tz, _names(tenants, "tenant"), _names(models, "model"))


def ask_month(
    month: str, tz: str = "UTC", *, tenants: tuple[str, ...] | None = None
) -> ReportQuestion:
    """Returns the question for a calendar month, such as 2026-10.

    Raises:
        BadInput: a value is invalid. `field` is its name.
    """
    zone = find_zone(tz)
    first = _date(f"{month}-01") if _MONTH.fullmatch(month) else None
    if first is None:
        raise BadInput(f"month: must be a month such as 2026-10, got {month[:40]!r}", field="month")
    after = (first + timedelta(days=31)).replace(day=1)
    start, end = (_midnight(day, zone) for day in (first, after))
    return ReportQuestion(start, end, tz, _names(tenants, "tenant"))


def widen(report: Report, question: ReportQuestion, now: datetime) -> ReportQuestion:
    """Extends a question to all calendar months it overlaps, up to now.

    This is only for reports on whole months, because part of a month is meaningless for a budget or
    an invoice.

    Args:
        report: the report. If the question has no time zone, its months are in UTC.
        now: current time, at which an incomplete month is cut off.
    """
    if not report.has_whole_months:
        return question
    zone = find_zone("UTC" if "tz" in report.without else question.tz)
    first = question.since.astimezone(zone).date().replace(day=1)
    last = (question.until - timedelta(microseconds=1)).astimezone(zone).date().replace(day=1)
    since = _midnight(first, zone)
    until = _midnight((last + timedelta(days=31)).replace(day=1), zone)
    return question._replace(since=since, until=min(until, now) if now > since else until)


def check_fits(report: Report, question: ReportQuestion) -> None:
    """Rejects unsupported filters, because the report's result would include other rows too.

    Raises:
        BadInput: the report does not support a filter. `field` is the filter's name.
    """
    for name, field in (("tenants", "tenant"), ("models", "model")):
        if name in report.without and getattr(question, name) is not None:
            raise BadInput(
                f"{field}: the report {report.name} does not support this filter", field=field
            )


def find_zone(tz: str) -> ZoneInfo:
    """Returns the time zone with an IANA name.

    Raises:
        BadInput: the name is unknown.
    """
    if tz in time_zones():
        return ZoneInfo(tz)
    raise BadInput(f"tz: must be a time zone such as Europe/Berlin, got {tz[:40]!r}", field="tz")


def _back(end: datetime, days: int) -> datetime:
    if not 1 <= days <= MAX_DAYS:
        raise BadInput(f"days: must be from 1 to {MAX_DAYS}, got {days}", field="days")
    return end - timedelta(days=days)


def _moment(text: str, zone: ZoneInfo, field: str) -> datetime:
    if _DAY.fullmatch(text) and (day := _date(text)):
        return _midnight(day, zone)
    try:
        moment = datetime.fromisoformat(text)
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=zone)).astimezone(UTC)
    except (ValueError, OverflowError):
        moment = None
    if moment is None or not 1970 <= moment.year <= 9998:
        raise BadInput(
            f"{field}: must be a date such as 2026-10-01 or a time, got {text[:40]!r}", field=field
        )
    return moment


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(), zone).astimezone(UTC)


def _date(text: str) -> date | None:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return None
    return day if 1970 <= day.year <= 9998 else None


def _names(names: tuple[str, ...] | None, field: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    if not 1 <= len(names) <= MAX_NAMES or any(len(name) > MAX_NAME_CHARS for name in names):
        raise BadInput(
            f"{field}: must have 1 to {MAX_NAMES} names of at most {MAX_NAME_CHARS} "
            "characters each",
            field=field,
        )
    return tuple(sorted(set(names)))


@dataclass(frozen=True)
class Parameter:
    """A parameter specific to a report."""

    name: str
    type: str
    """The parameter's GoogleSQL type."""
    default: float | None
    """None if the code that runs the report passes a value."""
    about: str


@dataclass(frozen=True)
class Plot:
    """A plot of a report's columns."""

    kind: PlotKind
    values: tuple[str, ...]
    """Columns to draw."""
    by: str
    """Column for the horizontal axis."""
    color: str = ""
    """Column whose values each get a different color. For a heat map, the column for the vertical
    axis.
    """


@dataclass(frozen=True)
class Report:
    """A usage query. `title` describes it."""

    name: str
    title: str
    owner: Owner
    audience: Audience
    sql: str
    columns: Mapping[str, str]
    """Each column's description, in order."""
    parameters: tuple[Parameter, ...]
    """Parameters specific to this report."""
    without: frozenset[str]
    """Standard parameters the report does not support: tenants, models, or tz."""
    plots: tuple[Plot, ...]
    totals: frozenset[str]
    """Columns for which a sum over all lines is meaningful."""
    notes: str
    days: int
    """Default number of days to look back."""
    has_whole_months: bool = False
    """True if the report covers whole calendar months, so a range includes every month it overlaps.
    """


@cache
def reports() -> Mapping[str, Report]:
    folder = resources.files("shared.reports").joinpath("queries")
    files = sorted((file for file in folder.iterdir()), key=lambda file: file.name)
    return {
        name: parse_report(name, file.read_text(encoding="utf-8"))
        for file in files
        if (name := file.name.removesuffix(".sql")) != file.name
    }


def find_report(name: str) -> Report:
    """Returns the report with that name.

    Raises:
        BadInput: the report does not exist.
    """
    report = reports().get(name)
    if report is None:
        raise BadInput(
            f"report {name[:80]!r} does not exist; use one of {', '.join(reports())}",
            field="report",
        )
    return report


def parse_report(name: str, sql: str) -> Report:
    """Parses a file's header.

    Raises:
        ValueError: the header does not have the format described above. This is a bug in the file.
    """
    head = _head(sql)
    facts: dict[str, str] = {}
    columns: dict[str, str] = {}
    parameters, plots, notes = [], [], []
    for line in head[1:]:
        key, _, text = line.partition(": ")
        if key.startswith("column "):
            columns[key.removeprefix("column ")] = text
        elif key.startswith("@"):
            parameters.append(_parameter(name, line))
        elif key == "plot":
            plots.append(_plot(name, text))
        elif key in ("owner", "audience", "without", "days", "range", "totals"):
            facts[key] = text
        else:
            notes.append(line)
    owner, audience = facts.get("owner"), facts.get("audience")
    if owner not in get_args(Owner) or audience not in get_args(Audience) or not columns:
        raise ValueError(
            f"{name}.sql: its header must have owner, audience and columns; this is a bug"
        )
    totals = frozenset(facts["totals"].split(", ")) if "totals" in facts else frozenset()
    if unknown := totals - columns.keys():
        raise ValueError(f"{name}.sql: totals: {min(unknown)!r} is not a column; this is a bug")
    return Report(
        name=name,
        title=head[0],
        owner=cast(Owner, owner),
        audience=cast(Audience, audience),
        sql=sql,
        columns=columns,
        parameters=tuple(parameters),
        without=frozenset(facts["without"].split(", ")) if "without" in facts else frozenset(),
        plots=tuple(plots),
        totals=totals,
        notes=" ".join(notes),
        days=int(facts.get("days", DEFAULT_DAYS)),
        has_whole_months=facts.get("range") == "months",
    )


def _head(sql: str) -> list[str]:
    lines = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return lines


def _parameter(name: str, line: str) -> Parameter:
    match = _PARAMETER.fullmatch(line)
    if match is None:
        raise ValueError(f"{name}.sql: {line!r} is not a parameter; this is a bug")
    parameter, kind, default, about = match.groups()
    return Parameter(parameter, kind, None if default is None else float(default), about)


def _plot(name: str, text: str) -> Plot:
    match = _PLOT.fullmatch(text)
    if match is None or match[1] not in get_args(PlotKind):
        raise ValueError(f"{name}.sql: {text!r} is not a plot; this is a bug")
    kind, values, by, rows, color = match.groups()
    return Plot(cast(PlotKind, kind), tuple(values.split(", ")), by, rows or color or "")
