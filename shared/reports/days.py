"""Days of the billing zone: what a scheduled run sums up, and what a backfill asks for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple

from shared.errors import BadInput
from shared.reports.question import find_zone

AGAIN_DAYS = 3
"""Days before the last one that a scheduled run does again, as rows may come late."""
MOST_DAYS = 31
"""What one call may ask for. A month fits."""
SETTLING = timedelta(minutes=5)
"""How long the rows of an hour may take to arrive before it is judged."""


class BillingDay(NamedTuple):
    """A day of the billing zone. It has 23 or 25 hours where clocks change."""

    day: date
    tz: str

    @property
    def since(self) -> datetime:
        """Its first moment."""
        return _midnight(self.day, self.tz)

    @property
    def until(self) -> datetime:
        """The first moment after it."""
        return _midnight(self.day + timedelta(days=1), self.tz)


def days_asked(asked: Mapping[str, object], tz: str, now: datetime) -> list[BillingDay]:
    """The days of a call, the oldest first.

    Args:
        asked: `from` and `to`, both included, such as 2026-10-31. Without them: the last day that
            is over, and AGAIN_DAYS before it.
        tz: the billing zone.
        now: the present moment.

    Raises:
        BadInput: the words are wrong, the range is too long, or its last day is not over yet.
    """
    if unknown := set(asked) - {"from", "to"}:
        name = min(unknown)[:40]
        raise BadInput(f"{name}: there is no such field, only from and to", field=name)
    last_over = now.astimezone(find_zone(tz)).date() - timedelta(days=1)
    last = _day(asked, "to") or last_over
    first = _day(asked, "from") or (last if "to" in asked else last - timedelta(days=AGAIN_DAYS))
    if last > last_over:
        raise BadInput(f"to: {last} is not over yet in {tz}", field="to")
    if first > last:
        raise BadInput(f"from: {first} is after {last}", field="from")
    days = (last - first).days + 1
    if days > MOST_DAYS:
        raise BadInput(f"from: {days} days are more than {MOST_DAYS}; ask in parts", field="from")
    return [BillingDay(first + timedelta(days=number), tz) for number in range(days)]


def hours_over(tz: str, now: datetime) -> tuple[BillingDay, datetime]:
    """The day whose hours are to be judged now, and the end of the last of them that is over."""
    settled = now - SETTLING
    day = BillingDay(settled.astimezone(find_zone(tz)).date(), tz)
    hours = (settled - day.since) // timedelta(hours=1)
    if not hours:
        day = BillingDay(day.day - timedelta(days=1), tz)
        return day, day.until
    return day, day.since + timedelta(hours=hours)


def months_over(days: list[BillingDay], now: datetime) -> list[str]:
    """The months of these days that have ended, such as 2026-10. Only these have invoices."""
    months = {day.day.replace(day=1): day.tz for day in days}
    return [
        f"{first:%Y-%m}"
        for first, tz in sorted(months.items())
        if _midnight((first + timedelta(days=31)).replace(day=1), tz) <= now
    ]


def _day(asked: Mapping[str, object], field: str) -> date | None:
    if field not in asked:
        return None
    text = asked[field]
    try:
        found = date.fromisoformat(text) if isinstance(text, str) and len(text) == 10 else None
    except ValueError:
        found = None
    if found is None or not 1970 <= found.year <= 9998:
        raise BadInput(f"{field}: {str(text)[:40]!r} is not a day such as 2026-10-01", field=field)
    return found


def _midnight(day: date, tz: str) -> datetime:
    return datetime.combine(day, time(), find_zone(tz)).astimezone(UTC)
