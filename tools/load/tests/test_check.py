"""A check waits for rows in transit, but no longer than its limit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from penstock_load.comparison import PAUSE_S, check
from penstock_load.ledger import Ledger, LedgerHead
from penstock_load.rows import LoadRows, RowOfLoad, UsageGroup
from tools.load.tests.test_comparison import HOUR, NOON_S, RUN, line, reported, row


class ComingRows(LoadRows):
    """Returns one more row each time it is queried."""

    def __init__(self, rows: Sequence[RowOfLoad]) -> None:
        self._rows = rows
        self.asked: list[tuple[datetime, datetime]] = []

    def of_run(self, run: str, since: datetime, until: datetime) -> list[RowOfLoad]:
        self.asked.append((since, until))
        return list(self._rows[: len(self.asked)])

    def of_others(
        self, run: str, since: datetime, until: datetime, tenants: Sequence[str]
    ) -> list[UsageGroup]:
        return []

    def read_report(
        self, since: datetime, until: datetime, tenants: Sequence[str]
    ) -> list[UsageGroup]:
        assert list(tenants) == ["acme"]
        return reported(self._rows[: len(self.asked)])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


LEDGER = Ledger(LedgerHead(RUN, "", NOON_S), [line(number) for number in range(4)], 0)


def test_check_waits_until_all_rows_are_there() -> None:
    rows, clock = ComingRows([row(number) for number in range(4)]), Clock()
    comparison = check(LEDGER, rows, 60.0, clock.sleep, clock)
    assert comparison.differences == []
    assert (len(rows.asked), clock.now_s, comparison.groups) == (4, 3 * PAUSE_S, 1)
    since, until = rows.asked[0]
    assert since < HOUR < until


def test_row_that_never_comes_is_named_at_the_end_of_the_wait() -> None:
    rows, clock = ComingRows([row(number) for number in range(3)]), Clock()
    comparison = check(LEDGER, rows, 10.0, clock.sleep, clock)
    assert [difference.kind for difference in comparison.differences] == [
        "row missing",
        "report differs",
    ]
    assert clock.now_s == 10.0


def test_ledger_without_rows_asks_for_no_report() -> None:
    never = line(0, ending="unconnected", status=0, tokens=None, cost_usd=None)
    empty = Ledger(LedgerHead(RUN, "", NOON_S), [never], 0)
    assert check(empty, ComingRows([]), 0.0).differences == []
