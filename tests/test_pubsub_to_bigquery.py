"""The embedded Pub/Sub's BigQuery subscriptions write to the embedded BigQuery."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.cloud import bigquery, pubsub_v1

from infra.local.process import Process, free_port, listens
from shared.broker.pubsub.client import PubSubTransport
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.shared.embedded_bigquery import DATASET, PROJECT, Server

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=20)]

TOPIC, SUBSCRIPTION = "rows", "rows.bigquery"


class Export:
    """A topic whose messages are written to a table in the embedded BigQuery."""

    def __init__(self, server: Server, endpoint: str, publisher: PubSubTransport) -> None:
        self.server = server
        self._endpoint = endpoint
        self._publisher = publisher

    def create(self, table: str, schema: list[bigquery.SchemaField], **config: bool) -> None:
        """Creates the table, the topic and the subscription, with Google's clients."""
        self.server.client().create_table(bigquery.Table(f"{PROJECT}.{DATASET}.{table}", schema))
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PUBSUB_EMULATOR_HOST", self._endpoint)
            topic = f"projects/{PROJECT}/topics/{TOPIC}"
            pubsub_v1.PublisherClient().create_topic(name=topic)
            config_ = {"table": f"{PROJECT}.{DATASET}.{table}", "use_table_schema": True, **config}
            with pubsub_v1.SubscriberClient() as client:
                name = f"projects/{PROJECT}/subscriptions/{SUBSCRIPTION}"
                request = {"name": name, "topic": topic, "bigquery_config": config_}
                client.create_subscription(request=request)

    async def publish(self, *rows: dict[str, Any]) -> None:
        await asyncio.gather(
            *(self._publisher.publish(TOPIC, json.dumps(row).encode(), {}) for row in rows)
        )

    async def rows(
        self, sql: str, is_enough: Callable[[list[tuple[Any, ...]]], bool]
    ) -> list[tuple[Any, ...]]:
        """Returns a query's result once it has enough rows."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                result = await asyncio.to_thread(lambda: self.server.client().query(sql).result())
                rows = [tuple(row.values()) for row in result]
                if is_enough(rows):
                    return rows
                await asyncio.sleep(0.25)


@pytest.fixture
async def export(tmp_path: Path) -> AsyncIterator[Export]:
    server, port = Server(tmp_path), free_port()
    command = [sys.executable, "-m", "pubsub_emulator", "--port", str(port)]
    command += ["--bigquery-endpoint", server.endpoint]
    with Process("pubsub", command, tmp_path) as pubsub:
        await asyncio.to_thread(pubsub.wait_ready, lambda: listens(port), START_LIMIT_S)
        async with PubSubTransport(PROJECT, f"127.0.0.1:{port}") as publisher:
            yield Export(server, f"127.0.0.1:{port}", publisher)


async def test_values_arrive_as_they_were_published(export: Export) -> None:
    field = bigquery.SchemaField
    schema = [
        field("id", "STRING", mode="REQUIRED"),
        field("cost", "FLOAT"),
        field("count", "INTEGER"),
        field("is_spot", "BOOLEAN"),
        field("seen_at", "TIMESTAMP"),
        field("facts", "JSON"),
        field("tags", "STRING", mode="REPEATED"),
        field("part", "RECORD", fields=[field("seen_at", "TIMESTAMP")]),
    ]
    with export.server.running():
        export.create("samples", schema)
        cost, at_us = 0.1 + 0.2, 1_764_403_200_000_001
        row = {"cost": cost, "count": 2**53 + 1, "is_spot": True, "facts": {"a": [1.5]}}
        await export.publish(
            {**row, "id": "a", "seen_at": at_us, "tags": ["x"], "part": {"seen_at": at_us}}
        )
        await export.publish({**row, "id": "b", "seen_at": "2025-11-29T08:00:00.000001Z"})
        sql = (
            "SELECT id, cost, count, is_spot, UNIX_MICROS(seen_at), TO_JSON_STRING(facts), tags,"
            f" UNIX_MICROS(part.seen_at) FROM {DATASET}.samples ORDER BY id"
        )
        rows = await export.rows(sql, lambda rows: len(rows) == 2)
    same = (cost, 2**53 + 1, True, at_us, '{"a":[1.5]}')
    assert rows == [("a", *same, ["x"], at_us), ("b", *same, [], None)]


async def test_messages_wait_while_bigquery_is_away(export: Export) -> None:
    schema = [bigquery.SchemaField("id", "INTEGER")]
    with export.server.running():
        export.create("numbers", schema)
        await export.publish({"id": 0})
        sql = f"SELECT COUNT(*), COUNT(DISTINCT id) FROM {DATASET}.numbers"
        await export.rows(sql, lambda rows: rows == [(1, 1)])
    await export.publish(*({"id": number} for number in range(1, 500)))
    with export.server.running():
        ((count, different),) = await export.rows(sql, lambda rows: rows[0][1] == 500)
    assert count >= different
