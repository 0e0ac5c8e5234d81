"""Compares a replay's ledger to the rows and the report, down to single rows, tokens, and cents.

- A request that got a response has the rows, tokens, and cost reported in that response.
- A flow run has the rows reported in its response, one per item and step, and their cost.
- A request that was rejected as a whole has one row, `refused`, and costs nothing.
- If a response was lost or came from a proxy, or the caller hung up, the rows are the only record
  of the request, and are accepted as they are.
- A request has no row if no connection could be opened for it.
- For each hour, tenant, and model, the report's totals match the ledger's.

`check` queries BigQuery until the whole ledger has arrived or time runs out.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from penstock_load.ledger import Ledger, LedgerLine
from penstock_load.rows import LoadRows, RowOfLoad, UsageGroup
from shared.money.amounts import plain

CLOCK_SKEW_S = 60.0
"""Maximum difference between this machine's clock and the API's."""
RELATIVE, ABSOLUTE_USD = 1e-9, 1e-9
"""Sums of doubles differ in the last digits with the order of addition.

Individual rows must be equal.
"""
REFUSED = "refused"
NO_TENANT = frozenset({401, 431})
"""Statuses of requests without a known tenant, which have no row (decision 17)."""

GroupKey = tuple[datetime, str, str]
"""Hour, tenant, and model."""

PAUSE_S = 2.0
HOUR = timedelta(hours=1)


class Difference(NamedTuple):
    """A deviation from the ledger."""

    kind: str
    """For example `row missing`."""
    what: str
    """The request ID, or a group's hour, tenant, and model."""
    tenant: str
    model: str
    facts: str


@dataclass
class Comparison:
    """The result of a comparison: totals and differences."""

    differences: list[Difference] = field(default_factory=list)
    lines: int = 0
    rows: int = 0
    copies: int = 0
    """Rows that were written more than once. They count once."""
    told_by_rows: Counter[str] = field(default_factory=Counter)
    """Requests without a response, by how they ended and by their rows' status."""
    others: int = 0
    """Requests from other callers of the same tenants in the same hours."""
    groups: int = 0
    tokens: int = 0
    cost_usd: float = 0.0


@dataclass
class Sums:
    """Totals of a group. Fields have the same names as in UsageGroup."""

    requests: int = 0
    refused: int = 0
    items: int = 0
    succeeded: int = 0
    tokens: int = 0
    pixel_steps: int = 0
    costs_usd: list[float] = field(default_factory=list)

    @property
    def cost_usd(self) -> float:
        return math.fsum(self.costs_usd)


def compare_rows(
    ledger: Ledger, rows: Sequence[RowOfLoad]
) -> tuple[Comparison, dict[GroupKey, Sums]]:
    """Compares each line to its rows. Also returns the groups' expected totals."""
    comparison = Comparison(lines=len(ledger.lines), rows=len(rows))
    comparison.copies = sum(row.copies - 1 for row in rows)
    of_request: defaultdict[str, list[RowOfLoad]] = defaultdict(list)
    for row in rows:
        of_request[row.client_request_id].append(row)
    expected: defaultdict[GroupKey, Sums] = defaultdict(Sums)
    for line in ledger.lines:
        own = sorted(of_request.pop(line.id, ()), key=lambda row: row.item)
        comparison.differences += [
            Difference(kind, line.id, line.tenant, line.model, facts)
            for kind, facts in _line_differences(line, own)
        ]
        if line.ending not in ("answered", "unconnected"):
            statuses = ", ".join(sorted({row.status for row in own})) or "no row"
            comparison.told_by_rows[f"{line.ending}: {statuses}"] += 1
        _add(expected, line, own)
    for strange, own in of_request.items():
        facts = f"{len(own)} rows of a request that is not in the ledger"
        comparison.differences.append(
            Difference("line missing", strange, own[0].tenant or "", own[0].model, facts)
        )
    comparison.tokens = sum(sums.tokens for sums in expected.values())
    comparison.cost_usd = math.fsum(cost for sums in expected.values() for cost in sums.costs_usd)
    return comparison, dict(expected)


def compare_report(
    expected: Mapping[GroupKey, Sums], others: Iterable[UsageGroup], report: Iterable[UsageGroup]
) -> list[Difference]:
    """Compares the report to the totals from the ledger and from the tenants' other usage."""
    due = {key: _group(key, sums) for key, sums in expected.items()}
    for other in others:
        key = _place(other)
        due[key] = _plus(due[key], other) if key in due else other
    differences = []
    reported = {_place(group): group for group in report}
    for key in sorted(due.keys() | reported.keys()):
        hour, tenant, model = key
        empty = _group(key, Sums())
        want, have = due.get(key, empty), reported.get(key, empty)
        facts = [
            f"{name} {getattr(have, name)}, not {getattr(want, name)}"
            for name in UsageGroup._fields[3:]
            if not _same(getattr(want, name), getattr(have, name))
        ]
        if facts:
            label = f"{hour:%Y-%m-%d %H:00} {tenant} {model}"
            differences.append(Difference("report differs", label, tenant, model, "; ".join(facts)))
    return differences


def _line_differences(line: LedgerLine, rows: Sequence[RowOfLoad]) -> Iterator[tuple[str, str]]:
    """Yields the differences between a request and its rows, each as a kind and its facts."""
    row_ids = Counter(row.row_id for row in rows)
    for row_id, count in row_ids.items():
        if count > 1:
            yield "row double", f"{row_id} exists {count} times"
    request_ids = sorted({row.request_id for row in rows})
    if len(request_ids) > 1:
        yield "row double", f"rows of {len(request_ids)} requests: {', '.join(request_ids)}"
    yield from _caller_differences(line, rows)
    if line.ending == "unconnected" and rows:
        yield "row too many", f"{len(rows)} rows of a request that was never sent"
    if line.ending == "answered":
        differences = _step_differences if line.steps else _answer_differences
        yield from differences(line, rows)


def _caller_differences(line: LedgerLine, rows: Sequence[RowOfLoad]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if line.tenant and row.tenant != line.tenant:
            yield "wrong tenant", f"{row.row_id} has {row.tenant}, not {line.tenant}"
        if line.key_id and row.key_id is not None and row.key_id != line.key_id:
            yield "wrong key", f"{row.row_id} has {row.key_id}, not {line.key_id}"
        # A request may be rejected before it names a model.
        model = row.flow or row.model
        if model != line.model and (model or row.status != REFUSED):
            yield "wrong model", f"{row.row_id} has {model}, not {line.model}"
        received_s = row.received_at.timestamp()
        first_s, last_s = line.sent_at_s - CLOCK_SKEW_S, line.ended_at_s + CLOCK_SKEW_S
        if not first_s <= received_s <= last_s:
            yield "wrong time", f"{row.row_id} was received at {row.received_at.isoformat()}"


def _answer_differences(line: LedgerLine, rows: Sequence[RowOfLoad]) -> Iterator[tuple[str, str]]:
    """Yields the differences between a response and its request's rows."""
    statuses, answer = [row.status for row in rows], (f"the response was {line.status} {line.code}")
    if line.status == 200 or line.cost_usd is not None:
        items = {row.item for row in rows if row.status != REFUSED}
        if missing := sorted(set(range(line.items)) - items):
            # Tokens and cost differ because of the same items, so the difference is not reported
            # again.
            yield from (("row missing", f"of item {item}; {answer.rstrip()}") for item in missing)
            return
        if set(statuses) - {"succeeded"} and line.status == 200:
            yield "wrong status", f"rows have {', '.join(statuses)}; {answer.rstrip()}"
    elif 400 <= line.status < 500 and line.status not in NO_TENANT:
        if not rows:
            yield "row missing", f"of a rejected request; {answer}"
        elif statuses != [REFUSED]:
            yield "wrong status", f"rows have {', '.join(statuses)}; {answer}"
    if len({row.row_id for row in rows}) > line.items:
        yield "row too many", f"{len(rows)} rows for {line.items} items; {answer.rstrip()}"
    tokens = sum(row.tokens or 0 for row in rows)
    if line.tokens is not None and tokens != line.tokens:
        yield "wrong tokens", f"rows have {tokens}, but the response has {line.tokens}"
    yield from _cost_differences(line, rows)


def _cost_differences(line: LedgerLine, rows: Sequence[RowOfLoad]) -> Iterator[tuple[str, str]]:
    cost_usd = sum(row.cost_usd or 0.0 for row in rows)
    if abs(cost_usd - (line.cost_usd or 0.0)) > ABSOLUTE_USD:
        answer = f"the response was {line.status} {line.code}"
        facts = (
            f"rows have {plain(cost_usd)} dollars, but the response has {line.cost_usd!r}; {answer}"
        )
        yield "wrong cost", facts


def _step_differences(line: LedgerLine, rows: Sequence[RowOfLoad]) -> Iterator[tuple[str, str]]:
    """Yields the differences between a run's steps and the run's rows.

    A run that failed also has rows for the steps that it did not finish.
    """
    items, failed = Counter[str](), Counter[str]()
    for row in rows:
        items[row.step or ""] += 1
        failed[row.step or ""] += row.status != "succeeded"
    for step in sorted(items.keys() | line.steps.keys()):
        answered, answered_failed = line.steps.get(step, (0, 0))
        facts = f"of step {step!r}: {items[step]} rows, but the response has {answered} items"
        if items[step] < answered:
            yield "row missing", facts
        elif line.status == 200 and items[step] > answered:
            yield "row too many", facts
        elif line.status == 200 and failed[step] != answered_failed:
            facts = (
                f"{failed[step]} rows of step {step!r} failed, but the response has "
                f"{answered_failed}"
            )
            yield "wrong status", facts
    yield from _cost_differences(line, rows)


def _add(
    expected: defaultdict[GroupKey, Sums], line: LedgerLine, rows: Sequence[RowOfLoad]
) -> None:
    """Adds a request to its group, based on its response or, if there is none, on its rows.

    A flow run has rows for several models, but its response doesn't split them by hour.
    """
    if line.ending != "answered" or line.status != 200 or line.steps:
        for row in rows:
            sums = expected[(_hour(row.received_at), row.tenant or "", row.model)]
            sums.requests += row.item == 0
            sums.refused += row.status == REFUSED
            sums.items += row.status != REFUSED
            sums.succeeded += row.status == "succeeded"
            sums.tokens += row.tokens or 0
            sums.pixel_steps += row.pixel_steps or 0
            sums.costs_usd.append(row.cost_usd or 0.0)
        return
    moment = rows[0].received_at if rows else datetime.fromtimestamp(line.sent_at_s, UTC)
    tenant = line.tenant or (rows[0].tenant if rows else None) or ""
    sums = expected[(_hour(moment), tenant, line.model)]
    sums.requests += 1
    sums.items += line.items
    sums.succeeded += line.items
    sums.tokens += line.tokens if line.tokens is not None else sum(row.tokens or 0 for row in rows)
    # Responses report an image's cost, but not its pixel-steps.
    sums.pixel_steps += sum(row.pixel_steps or 0 for row in rows)
    # Rows have all digits. They have already been checked against the response.
    costs_usd = [row.cost_usd or 0.0 for row in rows] or [line.cost_usd or 0.0]
    sums.costs_usd.append(sum(costs_usd))


def _hour(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _place(group: UsageGroup) -> GroupKey:
    return _hour(group.hour), group.tenant or "", group.model


def _group(key: GroupKey, sums: Sums) -> UsageGroup:
    return UsageGroup(*key, *(getattr(sums, name) for name in UsageGroup._fields[3:]))


def _plus(group: UsageGroup, other: UsageGroup) -> UsageGroup:
    added: Iterator[Any] = (a + b for a, b in zip(group[3:], other[3:], strict=True))
    return UsageGroup(*group[:3], *added)


def _same(want: float, have: float) -> bool:
    if isinstance(want, float) or isinstance(have, float):
        return math.isclose(want, have, rel_tol=RELATIVE, abs_tol=ABSOLUTE_USD)
    return want == have


def check(
    ledger: Ledger,
    rows: LoadRows,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Compares a ledger to the rows and the report, repeatedly while they differ.

    Rows arrive in the background, and even later after an outage. A difference therefore counts
    only if it persists for `wait_s`.

    Args:
        wait_s: how many seconds to wait for differences to disappear.
        clock: returns seconds. Tests replace it.

    Raises:
        Unavailable: BigQuery is unreachable or rejected the query.
    """
    until_s = clock() + wait_s
    while True:
        comparison = _compare(ledger, rows)
        if not comparison.differences or clock() >= until_s:
            return comparison
        sleep(PAUSE_S)


def _compare(ledger: Ledger, rows: LoadRows) -> Comparison:
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
    comparison.differences += compare_report(
        expected, others, rows.read_report(first, after, tenants)
    )
    return comparison


def _without_empty(expected: dict[GroupKey, Sums]) -> list[GroupKey]:
    return [key for key, sums in expected.items() if sums.requests or sums.items]


def _span(ledger: Ledger) -> tuple[datetime, datetime]:
    """Returns the time range in which rows may have been received, with a margin for clock skew."""
    ends_s = max((line.ended_at_s for line in ledger.lines), default=ledger.head.began_at_s)
    skew = timedelta(seconds=CLOCK_SKEW_S)
    return (
        datetime.fromtimestamp(ledger.head.began_at_s, UTC) - skew - HOUR,
        datetime.fromtimestamp(ends_s, UTC) + skew + HOUR,
    )
