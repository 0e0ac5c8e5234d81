"""The query to a report: a range of time, a time zone, tenants and models."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from shared.errors import BadInput
from shared.reports.definitions import Report

MAX_NAMES = 1000
MAX_NAME_CHARS = 256
MAX_DAYS = 3660
"""The maximum length of a range. A report with a line for each day, or hour, has lines of days
without rows too."""
ROWS_KEPT_DAYS = 400
"""The time that rows are kept (infra/bigquery/rows.table.json)."""
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}")


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
