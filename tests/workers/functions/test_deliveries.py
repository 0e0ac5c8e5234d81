"""A delivery's outcome does not depend on its row."""

from __future__ import annotations

import asyncio
from typing import get_args, get_type_hints

import msgspec
import pytest

from infra import bigquery
from infra.local.process import free_port
from shared.errors import Unavailable
from shared.usage.bigquery import Fields, RowLine
from shared.usage.webhook_delivery import TABLE, WebhookDelivery
from shared.webhooks.event import WebhookUrlForbidden
from tests.clock import Clock
from workers.functions.deliveries import RETRY_S, Deliveries
from workers.functions.dependencies import RowTable
from workers.functions.settings import FunctionSettings

pytestmark = pytest.mark.anyio
TYPES = {"STRING": str, "INTEGER": int, "FLOAT": float, "TIMESTAMP": float}


class Table:
    def __init__(self) -> None:
        self.rows: list[Fields] = []
        self.calls = 0
        self.is_up = True

    async def insert(self, rows: list[Fields]) -> None:
        self.calls += 1
        if not self.is_up:
            raise Unavailable("BigQuery is away")
        self.rows += rows


def delivery() -> WebhookDelivery:
    return WebhookDelivery(delivery_id="msg_1", tenant="t", event="completed")


def test_schema_and_row_agree() -> None:
    hints = get_type_hints(WebhookDelivery)
    fields = {
        field.encode_name: (hints[field.name], field)
        for field in msgspec.structs.fields(WebhookDelivery)
    }
    described = {field["name"]: field for field in bigquery.schema(TABLE)}
    assert fields.keys() == described.keys()
    for name, (hint, _) in fields.items():
        kinds = set(get_args(hint) or (hint,))
        assert TYPES[described[name]["type"]] in kinds, name
        assert not (described[name]["mode"] == "REQUIRED" and type(None) in kinds), name


async def test_outage_of_bigquery_fails_no_delivery_and_is_not_waited_for_again() -> None:
    table, clock = Table(), Clock()
    deliveries = Deliveries(table, "here", clock)
    table.is_up = False
    for _ in range(3):
        async with deliveries.record(delivery()):
            pass
    assert table.calls == 1
    table.is_up = True
    clock.now_s += RETRY_S
    async with deliveries.record(one := delivery()):
        one.status_code, one.outcome = 200, "delivered"
    (row,) = table.rows
    assert (row["outcome"], row["status_code"], row["region"]) == ("delivered", 200, "here")
    assert "error" not in row


async def test_errors_pass_through_and_are_told_in_closed_words() -> None:
    table = Table()
    deliveries = Deliveries(table, "here", Clock())

    async def fail(error: Exception, status_code: int | None = None) -> None:
        async with deliveries.record(one := delivery()):
            one.status_code = status_code
            raise error

    with pytest.raises(WebhookUrlForbidden):
        await fail(WebhookUrlForbidden("10.0.0.1 is not public", field="webhook"))
    with pytest.raises(Unavailable):
        await fail(Unavailable("the receiver returned 500: its secret"), 500)
    with pytest.raises(Unavailable):
        await fail(Unavailable("receiver.example: connection refused"))
    assert [(row["outcome"], row.get("error")) for row in table.rows] == [
        ("forbidden", "forbidden"),
        ("failed", None),
        ("failed", "unreachable"),
    ]
    assert "secret" not in str(table.rows)


async def test_rows_that_come_together_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    table, sent = RowTable(FunctionSettings(), TABLE), list[list[RowLine]]()

    def send(rows: list[RowLine]) -> list[tuple[RowLine, str]]:
        sent.append(list(rows))
        return []

    monkeypatch.setattr(table._sender, "send", send)
    await asyncio.gather(*(table.insert([{"row_id": str(number)}]) for number in range(50)))
    assert len(sent) <= 2
    row_ids = [msgspec.json.decode(row)["row_id"] for rows in sent for row in rows]
    assert sorted(row_ids) == sorted(map(str, range(50)))


async def test_everybody_learns_that_their_rows_were_not_taken() -> None:
    nowhere = FunctionSettings(bigquery_endpoint=f"http://127.0.0.1:{free_port()}")
    table = RowTable(nowhere, TABLE)
    ends = await asyncio.gather(
        *(table.insert([{"row_id": str(number)}]) for number in range(5)), return_exceptions=True
    )
    assert [type(end) for end in ends] == [Unavailable] * 5
