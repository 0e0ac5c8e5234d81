"""`penstock load --check`: asks BigQuery until all of a ledger is there, or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from infra.load.comparison import (
    CLOCK_SKEW_S,
    Comparison,
    GroupKey,
    Sums,
    compare_report,
    compare_rows,
)
from infra.load.ledger import Ledger
from infra.load.rows import LoadRows

PAUSE_S = 2.0
HOUR = timedelta(hours=1)


def check(
    ledger: Ledger,
    rows: LoadRows,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Compares a ledger with rows and report, again and again while they differ.

    Rows come in the background, and later after an outage. So a difference counts only after
    `wait_s`.

    Args:
        ledger: the ledger of one replay.
        rows: access to the rows.
        wait_s: seconds in which differences may disappear.
        sleep: waits. Tests replace it.
        clock: seconds. Tests replace it.

    Raises:
        Unavailable: BigQuery is out of reach, or refused.
    """
    until_s = clock() + wait_s
    while True:
        comparison = _compared(ledger, rows)
        if not comparison.differences or clock() >= until_s:
            return comparison
        sleep(PAUSE_S)


def _compared(ledger: Ledger, rows: LoadRows) -> Comparison:
    since, until = _span(ledger)
    comparison, expected = compare_rows(ledger, rows.of_run(ledger.head.run, since, until))
    if not expected:
        return comparison
    first = min(hour for hour, _, _ in expected)
    after = max(hour for hour, _, _ in expected) + HOUR
    tenants = sorted({tenant for _, tenant, _ in expected})
    others = rows.of_others(ledger.head.run, first, after, tenants)
    comparison.others = sum(group.requests for group in others)
    comparison.groups = len(_without_empty(expected))
    comparison.differences += compare_report(expected, others, rows.reported(first, after, tenants))
    return comparison


def _without_empty(expected: dict[GroupKey, Sums]) -> list[GroupKey]:
    return [key for key, sums in expected.items() if sums.requests or sums.items]


def _span(ledger: Ledger) -> tuple[datetime, datetime]:
    """Returns the range in which rows can have been received, with a margin for clock skew."""
    ends_s = max((line.ended_at_s for line in ledger.lines), default=ledger.head.began_at_s)
    skew = timedelta(seconds=CLOCK_SKEW_S)
    return (
        datetime.fromtimestamp(ledger.head.began_at_s, UTC) - skew - HOUR,
        datetime.fromtimestamp(ends_s, UTC) + skew + HOUR,
    )
