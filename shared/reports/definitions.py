"""The reports: GoogleSQL files, whose heads say what each shows, to whom, and in which columns.

A head is the comment at the top of a file of `queries`:

    -- What each tenant used of each model, per day.      the title
    -- owner: product                                     who answers for it
    -- audience: tenants                                  or operators: who may see it
    -- without: tz                                        standard parameters that it does not have
    -- days: 42                                           how far it looks back if nothing is said
    -- range: months                                      it covers whole calendar months
    -- @target FLOAT64 = 0.99: what it is                 a parameter of its own
    -- plot: bars cost_usd by day, one color per model    how it is drawn
    -- column day: what it is                             each column, in order

Further lines are notes. Every report has the parameters of `ReportQuestion` (a range of time, a
time zone, tenants and models) but those that it names after `without`. Tenants see a report for
`tenants` with their own rows only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple, TypeAlias, cast, get_args
from zoneinfo import ZoneInfo, available_timezones

from shared.errors import BadInput

MAX_NAMES = 1000
MAX_NAME_CHARS = 256
MAX_DAYS = 3660
"""The maximum length of a range. A report with a line for each day, or hour, has lines of days
without rows too."""
ROWS_KEPT_DAYS = 400
"""The time that rows are kept (infra/bigquery/rows.table.json)."""
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}")

Owner: TypeAlias = Literal["finance", "product", "operations"]
Audience: TypeAlias = Literal["tenants", "operators"]
PlotKind: TypeAlias = Literal["bars", "lines", "heat"]
DEFAULT_DAYS = 7
_PARAMETER = re.compile(r"@(\w+) ([A-Z0-9<>]+)(?: = (\S+?))?: (.+)")
_PLOT = re.compile(r"(\w+) ([\w, ]+?) by (\w+)(?: and (\w+)|, one color per (\w+))?")


class ReportQuestion(NamedTuple):
    """One question: the parameters that every report knows."""

    since: datetime
    """The first moment, as @since."""
    until: datetime
    """The first moment that is too late, as @until."""
    tz: str = "UTC"
    """The time zone of days and months, as @tz, by its IANA name."""
    tenants: tuple[str, ...] | None = None
    """Whose rows, as @tenants. None: everybody's."""
    models: tuple[str, ...] | None = None
    """The models, as @models. None: all."""


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
    """Reads a question from words.

    Args:
        since: where the range begins: a day, or a moment in ISO 8601. Empty: `days` before its end.
        until: where it ends: the first day, or moment, that is too late. Empty: now.
        tz: the time zone of days, and of moments that name none.
        tenants: whose rows. None: everybody's.
        models: of which models. None: of all.
        days: how far to look back if `since` is empty.
        max_days: how long the range may be.
        now: the present moment. Tests replace it.

    Raises:
        BadInput: a word is wrong. `field` names it.
    """
    zone = find_zone(tz)
    end = _moment(until, zone, "to") if until else now or datetime.now(UTC)
    start = _moment(since, zone, "from") if since else _back(end, days)
    if start >= end:
        raise BadInput(
            f"from: {since or start} is not before the end, {until or end}", field="from"
        )
    if (end - start).days > max_days:
        raise BadInput(
            f"from: {since or start} is {(end - start).days} days before the end, {until or end};"
            f" a range is at most {max_days} days long, so give a later `from`",
            field="from",
        )
    return ReportQuestion(start, end, tz, _names(tenants, "tenant"), _names(models, "model"))


def ask_month(
    month: str, tz: str = "UTC", *, tenants: tuple[str, ...] | None = None
) -> ReportQuestion:
    """The question about a calendar month, such as 2026-10.

    Raises:
        BadInput: a word is wrong. `field` names it.
    """
    zone = find_zone(tz)
    first = _date(f"{month}-01") if _MONTH.fullmatch(month) else None
    if first is None:
        raise BadInput(f"month: {month[:40]!r} is not a month such as 2026-10", field="month")
    after = (first + timedelta(days=31)).replace(day=1)
    start, end = (_midnight(day, zone) for day in (first, after))
    return ReportQuestion(start, end, tz, _names(tenants, "tenant"))


def widen(report: Report, question: ReportQuestion, now: datetime) -> ReportQuestion:
    """Returns a question about all calendar months that a question touches, up to now.

    Only for reports of whole months. A part of a month says nothing about a budget or an invoice.

    Args:
        report: the report. If it has no time zone, its months are of UTC.
        now: the present moment. A month that is not over ends here.
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
    """Refuses filters that a report does not have. It would show what was not asked for.

    Raises:
        BadInput: it has no such filter. `field` names it.
    """
    for name, field in (("tenants", "tenant"), ("models", "model")):
        if name in report.without and getattr(question, name) is not None:
            raise BadInput(f"{field}: the report {report.name} is not by {field}", field=field)


def find_zone(tz: str) -> ZoneInfo:
    """The time zone of an IANA name.

    Raises:
        BadInput: there is none.
    """
    if tz in _zones():
        return ZoneInfo(tz)
    raise BadInput(f"tz: {tz[:40]!r} is not a time zone such as Europe/Berlin", field="tz")


@cache
def _zones() -> frozenset[str]:
    """The names that BigQuery knows too.

    ZoneInfo also opens what only this machine has, such as `posix/UTC` and `localtime`.
    """
    return frozenset(available_timezones()) - {"Factory", "localtime"}


def _back(end: datetime, days: int) -> datetime:
    if not 1 <= days <= MAX_DAYS:
        raise BadInput(f"days: {days} is not from 1 to {MAX_DAYS}", field="days")
    try:
        return end - timedelta(days=days)
    except OverflowError:
        raise BadInput("to: is too early", field="to") from None


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
            f"{field}: {text[:40]!r} is not a day such as 2026-10-01, or a moment", field=field
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
            f"{field}: 1 to {MAX_NAMES} names of at most {MAX_NAME_CHARS} characters", field=field
        )
    return tuple(sorted(set(names)))


@dataclass(frozen=True)
class Parameter:
    """A parameter that only this report has."""

    name: str
    type: str
    """Its GoogleSQL type."""
    default: float | None
    """None: the caller that runs the report passes it."""
    about: str


@dataclass(frozen=True)
class Plot:
    """A plot of some columns of a report."""

    kind: PlotKind
    values: tuple[str, ...]
    """The columns that are drawn."""
    by: str
    """The column along the horizontal axis."""
    color: str = ""
    """The column with one color per value; of a heat map the one along the vertical axis."""


@dataclass(frozen=True)
class Report:
    """A query about usage. `title` says what it shows."""

    name: str
    title: str
    owner: Owner
    audience: Audience
    sql: str
    columns: Mapping[str, str]
    """The description of each column, in order."""
    parameters: tuple[Parameter, ...]
    """Its own ones."""
    without: frozenset[str]
    """Standard parameters that it does not have: tenants, models or tz."""
    plots: tuple[Plot, ...]
    notes: str
    days: int
    """The number of days that it looks back by default."""
    has_whole_months: bool = False
    """True if it is about calendar months: a range covers all that it touches."""


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
    """The report of that name.

    Raises:
        BadInput: there is no such report.
    """
    report = reports().get(name)
    if report is None:
        raise BadInput(
            f"no report {name[:80]!r}; there are: {', '.join(reports())}", field="report"
        )
    return report


def parse_report(name: str, sql: str) -> Report:
    """Reads the head of a file.

    Raises:
        ValueError: the head is not as the module says. This is a bug of the file.
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
        elif key in ("owner", "audience", "without", "days", "range"):
            facts[key] = text
        else:
            notes.append(line)
    owner, audience = facts.get("owner"), facts.get("audience")
    if owner not in get_args(Owner) or audience not in get_args(Audience) or not columns:
        raise ValueError(f"{name}.sql: its head needs owner, audience and columns; this is a bug")
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
