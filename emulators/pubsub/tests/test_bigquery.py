"""BigQuery subscriptions: messages as rows, rejected rows, missing tables, outages."""

import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pubsub_emulator.protos import message_class
from pubsub_emulator.server import PubsubServer, serve
from tests.table_endpoint import TableEndpoint, listening_table
from tests.wire import TOPIC, Wire, connect, until

pytestmark = pytest.mark.anyio

SUBSCRIPTION = "projects/p/subscriptions/exported"
DEAD = "projects/p/topics/dead"
MORGUE = "projects/p/subscriptions/morgue"
AT_ONCE = {"minimum_backoff": {"nanos": 1_000_000}, "maximum_backoff": {"nanos": 1_000_000}}


@pytest.fixture
def table() -> Iterator[TableEndpoint]:
    with listening_table() as table:
        yield table


@pytest.fixture
async def server(table: TableEndpoint) -> AsyncIterator[PubsubServer]:
    async with serve(bigquery_endpoint=table.url) as server:
        yield server


async def export(wire: Wire, *, fields: dict[str, Any] | None = None, **config: bool) -> None:
    config_ = {"table": "p.d.t", **config}
    await wire.subscription(SUBSCRIPTION, TOPIC, bigquery_config=config_, **(fields or {}))


async def with_dead_letters(wire: Wire, **config: bool) -> None:
    await wire.topic(DEAD)
    await wire.subscription(MORGUE, DEAD)
    policy = {"dead_letter_topic": DEAD, "max_delivery_attempts": 5}
    await export(wire, fields={"dead_letter_policy": policy, "retry_policy": AT_ONCE}, **config)


def is_settled(server: PubsubServer) -> bool:
    return server.broker.registry.storage.held_bytes == 0


def attempts(server: PubsubServer) -> int:
    return server.broker.registry.subscriptions[SUBSCRIPTION].backlog.attempts_of_oldest


async def state(wire: Wire) -> tuple[str, str]:
    request = message_class("GetSubscriptionRequest")(subscription=SUBSCRIPTION)
    subscription = await wire.call("Subscriber", "GetSubscription", request, "Subscription")
    config = subscription.bigquery_config
    return config.State.Name(config.state), subscription.State.Name(subscription.state)


async def until_state(wire: Wire, server: PubsubServer, name: str) -> None:
    subscription = server.broker.registry.subscriptions[SUBSCRIPTION]
    value = subscription.proto.bigquery_config.State.Value(name)
    await until(lambda: subscription.proto.bigquery_config.state == value)
    assert await state(wire) == (name, "ACTIVE" if name == "ACTIVE" else "RESOURCE_ERROR")


async def test_data_goes_into_its_column_and_is_acked(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    await export(wire)
    await wire.publish(TOPIC, "hello", "ä")
    await until(lambda: is_settled(server))
    assert table.rows == [{"data": "hello"}, {"data": "ä"}]
    assert await state(wire) == ("ACTIVE", "ACTIVE")


async def test_bytes_are_written_as_base64(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.columns = {"data": "BYTES"}
    await export(wire)
    await wire.publish(TOPIC, "hello")
    await until(lambda: is_settled(server))
    assert table.rows == [{"data": base64.b64encode(b"hello").decode()}]


async def test_fields_of_the_message_go_into_the_tables_columns(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.columns = {"id": "STRING", "cost": "FLOAT", "at": "TIMESTAMP", "tries": "INTEGER"}
    await export(wire, use_table_schema=True)
    await wire.publish(TOPIC, '{"id": "a", "cost": 1e-7, "at": 1764403200000001, "tries": 3}')
    await wire.publish(TOPIC, '{"id": "b", "cost": null, "at": "2025-11-29T08:00:00Z"}')
    await until(lambda: is_settled(server))
    first, second = sorted(table.rows, key=lambda row: str(row["id"]))
    at = "2025-11-29T08:00:00.000001+00:00"
    assert first == {"id": "a", "cost": 1e-7, "at": at, "tries": 3}
    assert second == {"id": "b", "cost": None, "at": "2025-11-29T08:00:00Z"}


async def test_metadata_is_written_if_asked(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.columns = {
        "data": "STRING",
        "subscription_name": "STRING",
        "message_id": "STRING",
        "publish_time": "TIMESTAMP",
        "attributes": "JSON",
    }
    await export(wire, write_metadata=True)
    (message_id,) = await wire.publish(TOPIC, "hello", attributes={"model": "m"}, ordering_key="k")
    await until(lambda: is_settled(server))
    (row,) = table.rows
    assert row["data"] == "hello"
    assert row["subscription_name"] == SUBSCRIPTION
    assert row["message_id"] == message_id
    assert row["publish_time"].endswith("Z")
    assert json.loads(row["attributes"]) == {"model": "m", "ordering_key": "k"}


async def test_unknown_fields_are_dropped_if_asked(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.columns = {"id": "STRING"}
    await export(wire, use_table_schema=True, drop_unknown_fields=True)
    await wire.publish(TOPIC, '{"id": "a", "new": 1}')
    await until(lambda: is_settled(server))
    assert table.rows == [{"id": "a"}]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ('{"id": "a", "new": 1}', "new: no such field"),
        ("no JSON", "the message is not valid JSON"),
        ("[1]", "the message is not a JSON object"),
        ('{"at": 1.5}', "at: a number for a TIMESTAMP must be a whole number of microseconds"),
        ('{"at": 1e300}', "at: a number for a TIMESTAMP must be a whole number of microseconds"),
        (f'{{"at": {10**20}}}', "microseconds is out of range"),
        ('{"id": ' + "[" * 900 + "]" * 900 + "}", "nested more than 500 levels deep"),
        ('{"id": ' + "[" * 9999 + "]" * 9999 + "}", "the message is not valid JSON"),
        ('{"\\ud800": 1}', "?: no such field"),
    ],
)
async def test_message_that_does_not_fit_is_dead_lettered_with_the_reason(
    wire: Wire, table: TableEndpoint, data: str, why: str
) -> None:
    table.columns = {"id": "STRING", "at": "TIMESTAMP"}
    await with_dead_letters(wire, use_table_schema=True)
    await wire.publish(TOPIC, '{"id": "before"}', data, '{"id": "after"}')
    (letter,) = (await wire.pull(MORGUE)).received_messages
    assert letter.message.data == data.encode()
    attributes = letter.message.attributes
    assert why in attributes["CloudPubSubDeadLetterSourceDeliveryErrorMessage"]
    assert attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5"
    assert [row["id"] for row in table.rows] == ["before", "after"]


async def test_message_that_does_not_fit_stays_without_dead_letters(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.columns = {"id": "STRING"}
    await export(wire, use_table_schema=True)
    await wire.publish(TOPIC, '{"id": "a", "new": 1}', '{"id": "b"}')
    await until(lambda: attempts(server) >= 2)
    assert table.rows == [{"id": "b"}]
    table.columns = {"id": "STRING", "new": "INTEGER"}
    await until(lambda: is_settled(server))
    assert table.rows == [{"id": "b"}, {"id": "a", "new": 1}]


@pytest.mark.parametrize(
    "refusal", [(500, "backendError"), (503, "backendError"), (403, "quotaExceeded")]
)
async def test_rows_are_sent_again_after_a_passing_failure(
    wire: Wire, server: PubsubServer, table: TableEndpoint, refusal: tuple[int, str]
) -> None:
    table.refusals = [refusal] * 3
    await export(wire)
    await wire.publish(TOPIC, "a")
    await until(lambda: is_settled(server))
    assert table.rows == [{"data": "a"}]
    assert table.inserts == 4
    assert await state(wire) == ("ACTIVE", "ACTIVE")


async def test_failures_count_as_attempts_and_end_as_dead_letters(
    wire: Wire, table: TableEndpoint
) -> None:
    table.refusals = [(503, "backendError")] * 5
    await with_dead_letters(wire)
    await wire.publish(TOPIC, "a")
    (letter,) = (await wire.pull(MORGUE)).received_messages
    assert letter.message.data == b"a"
    why = letter.message.attributes["CloudPubSubDeadLetterSourceDeliveryErrorMessage"]
    assert why == "status 503: not now: backendError"
    assert table.rows == []


async def test_messages_wait_for_a_missing_table_and_are_no_dead_letters(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    await with_dead_letters(wire)
    await until_state(wire, server, "ACTIVE")
    table.columns = None
    await wire.publish(TOPIC, *(str(number) for number in range(3)))
    await until_state(wire, server, "NOT_FOUND")
    assert attempts(server) == 0
    table.columns = {"data": "STRING"}
    await until(lambda: is_settled(server))
    assert sorted(row["data"] for row in table.rows) == ["0", "1", "2"]
    assert await state(wire) == ("ACTIVE", "ACTIVE")


async def test_refused_permission_is_shown_and_no_attempt(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.refusals = [(403, "accessDenied")] * 5
    await with_dead_letters(wire)
    await wire.publish(TOPIC, "a")
    await until_state(wire, server, "PERMISSION_DENIED")
    await until(lambda: is_settled(server))
    assert table.rows == [{"data": "a"}], "not a dead letter"


async def test_table_without_the_needed_columns_is_shown_until_it_has_them(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.columns = {"id": "STRING"}
    await export(wire)
    await wire.publish(TOPIC, "a")
    await until_state(wire, server, "SCHEMA_MISMATCH")
    table.columns = {"data": "STRING"}
    await until(lambda: is_settled(server))
    assert table.rows == [{"data": "a"}]


async def test_batch_that_is_too_large_is_halved(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.most_rows = 3
    await export(wire)
    await wire.publish(TOPIC, *(str(number) for number in range(10)))
    await until(lambda: is_settled(server))
    assert [row["data"] for row in table.rows] == [str(number) for number in range(10)]


async def test_update_to_another_table_is_followed_and_deletion_ends_it(
    wire: Wire, server: PubsubServer, table: TableEndpoint
) -> None:
    table.columns = None
    await export(wire)
    await wire.publish(TOPIC, "a")
    await until_state(wire, server, "NOT_FOUND")
    request = message_class("UpdateSubscriptionRequest")(
        subscription={"name": SUBSCRIPTION, "push_config": {}},
        update_mask={"paths": ["bigquery_config"]},
    )
    subscription = await wire.call("Subscriber", "UpdateSubscription", request, "Subscription")
    assert subscription.State.Name(subscription.state) == "ACTIVE"
    (received,) = (await wire.pull(SUBSCRIPTION)).received_messages
    assert received.message.data == b"a"
    await wire.delete_subscription(SUBSCRIPTION)
    assert is_settled(server)


async def test_messages_are_written_after_a_restart(table: TableEndpoint, tmp_path: Path) -> None:
    table.columns = None
    async with (
        serve(data_dir=tmp_path, bigquery_endpoint=table.url) as server,
        connect(server.endpoint) as wire,
    ):
        await wire.topic(TOPIC)
        await export(wire)
        await wire.publish(TOPIC, "a")
        await until_state(wire, server, "NOT_FOUND")
    table.columns = {"data": "STRING"}
    async with serve(data_dir=tmp_path, bigquery_endpoint=table.url) as server:
        await until(lambda: is_settled(server))
    assert table.rows == [{"data": "a"}]
