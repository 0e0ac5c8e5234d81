"""Comparing a ledger with rows and the report finds every kind of error and names it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_load.comparison import ABSOLUTE_USD, Comparison, compare_report, compare_rows
from penstock_load.ledger import Ledger, LedgerHead, LedgerLine
from penstock_load.rows import RowOfLoad, UsageGroup

NOON_S = 1_795_435_200.0
HOUR = datetime.fromtimestamp(NOON_S, UTC)
RUN = "load-1"


def line(number: int, **changed: object) -> LedgerLine:
    fields: dict[str, object] = {
        "id": f"{RUN}-{number:07}",
        "tenant": "acme",
        "model": "mini",
        "sent_at_s": NOON_S + number,
        "ended_at_s": NOON_S + number + 0.5,
        "items": 1,
        "status": 200,
        "tokens": 10,
        "cost_usd": 0.1,
        "key_id": "k1",
    }
    return LedgerLine(**(fields | changed))  # type: ignore[arg-type]


def row(number: int, item: int = 0, **changed: object) -> RowOfLoad:
    fields: dict[str, object] = {
        "client_request_id": f"{RUN}-{number:07}",
        "request_id": f"req_{number}",
        "row_id": f"req_{number}:{item}",
        "item": item,
        "tenant": "acme",
        "model": "mini",
        "key_id": "k1",
        "status": "succeeded",
        "error_code": None,
        "tokens": 10,
        "pixel_steps": None,
        "cost_usd": 0.1,
        "received_at": datetime.fromtimestamp(NOON_S + number + 0.1, UTC),
        "cache": "miss",
        "copies": 1,
    }
    return RowOfLoad(**(fields | changed))  # type: ignore[arg-type]


def refused(number: int, **changed: object) -> RowOfLoad:
    facts: dict[str, Any] = {"status": "refused", "tokens": None, "cost_usd": 0.0} | changed
    return row(number, row_id=f"req_{number}:refused", **facts)


def compared(lines: Sequence[LedgerLine], rows: Sequence[RowOfLoad]) -> Comparison:
    """Compares the lines with the rows, and with a report made from the same rows."""
    ledger = Ledger(LedgerHead(RUN, "http://here", NOON_S), list(lines), 0)
    comparison, expected = compare_rows(ledger, rows)
    comparison.differences += compare_report(expected, [], reported(rows))
    return comparison


def reported(rows: Sequence[RowOfLoad]) -> list[UsageGroup]:
    own: defaultdict[tuple[datetime, str | None, str], list[RowOfLoad]] = defaultdict(list)
    for own_row in rows:
        hour = own_row.received_at.replace(minute=0, second=0, microsecond=0)
        own[hour, own_row.tenant, own_row.model].append(own_row)
    return [
        UsageGroup(
            *place,
            sum(member.item == 0 for member in group),
            sum(member.status == "refused" for member in group),
            sum(member.status != "refused" for member in group),
            sum(member.status == "succeeded" for member in group),
            sum(member.tokens or 0 for member in group),
            sum(member.pixel_steps or 0 for member in group),
            sum(member.cost_usd or 0.0 for member in group),
        )
        for place, group in own.items()
    ]


def kinds(found: Comparison) -> list[str]:
    return [difference.kind for difference in found.differences]


def test_equal_ledger_and_rows_have_no_difference() -> None:
    lines = [
        line(0),
        line(1, items=2, tokens=20, cost_usd=0.1 + 0.2),
        line(2, status=429, code="overloaded", tokens=None, cost_usd=None),
        line(3, status=503, code="unavailable", tokens=None, cost_usd=None),
        line(4, ending="unconnected", status=0, tokens=None, cost_usd=None),
        line(5, status=401, code="invalid_api_key", tokens=None, cost_usd=None),
        line(6, status=504, code="deadline_exceeded", tokens=None, cost_usd=0.0),
    ]
    rows = [
        row(0),
        row(1, 0),
        row(1, 1, cost_usd=0.2, copies=3),
        refused(2),
        row(6, status="expired", tokens=None, cost_usd=0.0),
    ]
    comparison = compared(lines, rows)
    assert comparison.differences == []
    assert (comparison.lines, comparison.rows, comparison.copies, comparison.tokens) == (
        7,
        5,
        2,
        30,
    )
    assert comparison.cost_usd == pytest.approx(0.4)


def run_of_flow(**changed: object) -> LedgerLine:
    steps = {"words": (1, 0), "check": (2, 1)}
    facts: dict[str, object] = {"model": "spell", "items": 3, "tokens": None, "steps": steps}
    return line(0, **(facts | {"cost_usd": 0.1 + 0.2} | changed))


def rows_of_run() -> list[RowOfLoad]:
    step: dict[str, object] = {"flow": "spell", "tokens": None}
    return [
        row(0, 0, model="split", step="words", **step),
        row(0, 1000, model="check", step="check", **step | {"cost_usd": 0.2}),
        row(0, 1001, model="check", step="check", status="failed", **step | {"cost_usd": 0.0}),
    ]


def test_a_run_of_a_flow_has_the_rows_of_its_steps() -> None:
    comparison = compared([run_of_flow()], rows_of_run())
    assert comparison.differences == []
    assert comparison.cost_usd == pytest.approx(0.3)
    # Each model used in a step is a separate group in the report.
    assert len({(group.hour, group.model) for group in reported(rows_of_run())}) == 2


@pytest.mark.parametrize(
    ("ended", "spoil", "kind", "facts"),
    [
        (200, lambda rows: rows[:2], "row missing", "of step 'check': 1 rows, but the response"),
        (200, lambda rows: [*rows, rows[2]._replace(item=1002, row_id="req_0:1002")],
         "row too many", "of step 'check': 3 rows, but the response has 2 items"),
        (200, lambda rows: [*rows[:2], rows[2]._replace(status="succeeded")],
         "wrong status", "0 rows of step 'check' failed, but the response has 1"),
        (200, lambda rows: [rows[0]._replace(cost_usd=0.2), *rows[1:]],
         "wrong cost", "rows have 0.4 dollars, but the response has 0.30000000000000004"),
        (500, lambda rows: rows[1:], "row missing", "of step 'words': 0 rows"),
        (200, lambda rows: [rows[0]._replace(flow="other"), *rows[1:]],
         "wrong model", "req_0:0 has other, not spell"),
    ],
)  # fmt: skip
def test_what_a_run_of_a_flow_must_not_have(
    ended: int, spoil: Callable[[list[RowOfLoad]], list[RowOfLoad]], kind: str, facts: str
) -> None:
    comparison = compared([run_of_flow(status=ended)], spoil(rows_of_run()))
    assert kind in kinds(comparison)
    assert any(facts in difference.facts for difference in comparison.differences)


def test_a_run_that_ended_badly_may_have_rows_of_what_it_left() -> None:
    canceled = rows_of_run()[2]._replace(item=1002, row_id="req_0:1002", status="canceled")
    comparison = compared([run_of_flow(status=500, code="failed")], [*rows_of_run(), canceled])
    assert comparison.differences == []


@pytest.mark.parametrize(
    ("spoil", "kind", "facts"),
    [
        (lambda rows: rows[1:], "row missing", "of item 0; the response was 200"),
        (lambda rows: [*rows, row(0, received_at=HOUR)], "row double", "req_0:0 exists 2 times"),
        (
            lambda rows: [*rows, row(0, request_id="req_9", row_id="req_9:0")],
            "row double",
            "rows of 2 requests: req_0, req_9",
        ),
        (
            lambda rows: [*rows, row(0, 1)],
            "row too many",
            "2 rows for 1 items; the response was 200",
        ),
        (
            lambda rows: [row(0, cost_usd=0.11), *rows[1:]],
            "wrong cost",
            "rows have 0.11 dollars, but the response has 0.1; the response was 200 ",
        ),
        (
            lambda rows: [row(0, tokens=11), *rows[1:]],
            "wrong tokens",
            "rows have 11, but the response has 10",
        ),
        (lambda rows: [row(0, tenant="b"), *rows[1:]], "wrong tenant", "req_0:0 has b, not acme"),
        (lambda rows: [row(0, model="b"), *rows[1:]], "wrong model", "req_0:0 has b, not mini"),
        (lambda rows: [row(0, key_id="b"), *rows[1:]], "wrong key", "req_0:0 has b, not k1"),
        (
            lambda rows: [row(0, status="failed"), *rows[1:]],
            "wrong status",
            "rows have failed; the response was 200",
        ),
        (
            lambda rows: [row(0, received_at=datetime(2026, 1, 1, tzinfo=UTC)), *rows[1:]],
            "wrong time",
            "req_0:0 was received at 2026-01-01T00:00:00+00:00",
        ),
        (lambda rows: [*rows, row(9)], "line missing", "1 rows of a request that is not in the"),
    ],
)
def test_each_flaw_is_named(
    spoil: Callable[[list[RowOfLoad]], list[RowOfLoad]], kind: str, facts: str
) -> None:
    comparison = compared([line(0), line(1)], spoil([row(0), row(1)]))
    named = [difference for difference in comparison.differences if difference.kind == kind]
    assert named, comparison.differences
    assert named[0].facts.startswith(facts)


def test_refused_request_has_one_row_that_costs_nothing() -> None:
    entry = line(0, status=429, code="overloaded", tokens=None, cost_usd=None)
    assert kinds(compared([entry], [])) == ["row missing"]
    assert "wrong status" in kinds(compared([entry], [row(0, cost_usd=0.0, tokens=None)]))
    assert "wrong cost" in kinds(compared([entry], [refused(0, cost_usd=0.1)]))


def test_failed_answer_is_not_charged_in_secret() -> None:
    entry = line(0, status=504, code="deadline_exceeded", tokens=None, cost_usd=0.0)
    assert kinds(compared([entry], [row(0)])) == ["wrong cost"]


@pytest.mark.parametrize("ending", ["lost", "unanswered", "canceled", "foreign"])
def test_rows_decide_where_no_answer_came(ending: str) -> None:
    entry = line(0, ending=ending, status=0, tokens=None, cost_usd=None)
    for rows in ([], [row(0)], [row(0, status="canceled", cost_usd=0.0)]):
        comparison = compared([entry], rows)
        assert comparison.differences == []
        status = rows[0].status if rows else "no row"
        assert comparison.told_by_rows == {f"{ending}: {status}": 1}
    assert comparison.tokens == 10
    assert "wrong tenant" in kinds(compared([entry], [row(0, tenant="b")]))


def test_caller_without_a_known_tenant_has_that_of_its_rows() -> None:
    comparison = compared([line(0, tenant="", key_id="")], [row(0)])
    assert comparison.differences == []


def test_request_that_was_never_sent_has_no_row() -> None:
    entry = line(0, ending="unconnected", status=0, tokens=None, cost_usd=None)
    assert "row too many" in kinds(compared([entry], [row(0)]))


@pytest.mark.parametrize(
    "field", ["requests", "refused", "items", "succeeded", "tokens", "pixel_steps", "cost_usd"]
)
def test_wrong_report_is_named_by_group_and_column(field: str) -> None:
    rows = [row(0), row(1, pixel_steps=5)]
    ledger = Ledger(LedgerHead(RUN, "", NOON_S), [line(0), line(1)], 0)
    _, expected = compare_rows(ledger, rows)
    (good,) = reported(rows)
    assert compare_report(expected, [], [good]) == []
    more = 1e-6 if field == "cost_usd" else 1
    wrong = good._replace(**{field: getattr(good, field) + more})
    (difference,) = compare_report(expected, [], [wrong])
    assert (difference.what, difference.tenant, difference.model) == (
        "2026-11-23 12:00 acme mini",
        "acme",
        "mini",
    )
    assert difference.facts.startswith(f"{field} ")
    assert ";" not in difference.facts


def test_group_that_only_the_report_has_is_named() -> None:
    strange = UsageGroup(HOUR, "other", "mini", 1, 0, 1, 1, 10, 0, 0.1)
    (difference,) = compare_report({}, [], [strange])
    assert difference.facts.startswith("requests 1, not 0")
    assert compare_report({}, [strange], [strange]) == []


def test_what_others_use_counts_beside() -> None:
    ledger = Ledger(LedgerHead(RUN, "", NOON_S), [line(0)], 0)
    _, expected = compare_rows(ledger, [row(0)])
    other = UsageGroup(HOUR, "acme", "mini", 2, 0, 2, 2, 7, 0, 0.5)
    report = UsageGroup(HOUR, "acme", "mini", 3, 0, 3, 3, 17, 0, 0.6)
    assert compare_report(expected, [other], [report]) == []


def test_hours_are_those_of_the_rows() -> None:
    late = row(0, received_at=datetime.fromtimestamp(NOON_S + 3599, UTC))
    next_hour = row(1, received_at=datetime.fromtimestamp(NOON_S + 3600, UTC))
    lines = [
        line(0, sent_at_s=NOON_S + 3598, ended_at_s=NOON_S + 3601),
        line(1, sent_at_s=NOON_S + 3599, ended_at_s=NOON_S + 3602),
    ]
    comparison = compared(lines, [late, next_hour])
    assert comparison.differences == []


costs = st.floats(1e-9, 10.0)


@given(st.lists(st.lists(costs, min_size=1, max_size=4), min_size=1, max_size=20), st.data())
def test_any_lost_doubled_or_changed_row_is_found(
    requests: list[list[float]], data: st.DataObject
) -> None:
    lines, rows = [], []
    for number, items_usd in enumerate(requests):
        lines.append(
            line(number, items=len(items_usd), tokens=10 * len(items_usd), cost_usd=sum(items_usd))
        )
        rows += [row(number, item, cost_usd=usd) for item, usd in enumerate(items_usd)]
    assert compared(lines, rows).differences == []
    place = data.draw(st.integers(0, len(rows) - 1))
    chosen = rows[place]
    flaw = data.draw(st.sampled_from(["lost", "double", "cost"]))
    if flaw == "lost":
        spoiled = rows[:place] + rows[place + 1 :]
    elif flaw == "double":
        spoiled = [*rows, chosen._replace(received_at=HOUR)]
    else:
        # Differences up to ABSOLUTE_USD are rounding errors.
        dearer = chosen._replace(cost_usd=(chosen.cost_usd or 0.0) * 1.01 + 2 * ABSOLUTE_USD)
        spoiled = [*rows[:place], dearer, *rows[place + 1 :]]
    differences = {
        (difference.what, difference.kind) for difference in compared(lines, spoiled).differences
    }
    wanted = {"lost": "row missing", "double": "row double", "cost": "wrong cost"}[flaw]
    assert (chosen.client_request_id, wanted) in differences
