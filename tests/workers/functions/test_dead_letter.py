"""The caller, record, and row of a dead letter when Pub/Sub calls the function."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import ReceivedMessage, dead_letter_topic_id
from shared.messages import ReplyBody, encode_reply_body
from shared.models.catalog import Catalog, Model
from shared.usage.row import Row
from tests.kept_spans import KeptSpans, new_trace
from tests.limits import WAIT_LIMIT_S
from tests.workers.functions.receiver import Receiver
from tests.workers.functions.world import World
from workers.functions.dead_letter import DeadLetters

pytestmark = pytest.mark.anyio
SECRET = b"what nobody but the model may read"


async def test_job_that_pubsub_gave_up_is_answered(world: World) -> None:
    data, attributes = world.job()
    await world.broker.publish(world.jobs, data, attributes)
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        world.broker.subscribe(world.workers, max_messages=1) as worker,
    ):
        attempts = 0
        async for message in worker:
            worker.nack(message)
            attempts += 1
            if attempts == 5:
                break
    reply = await world.reply()
    assert (reply.request_id, reply.part, reply.slot) == (world.request_id, 0, "1")
    assert [outcome.index for outcome in reply.body.outcomes] == [0, 1]
    error = reply.body.outcomes[0].error
    assert error is not None
    assert (error.code, error.message) == (
        "model_failed",
        "no worker was able to finish it in 5 attempts",
    )
    record = await world.record()
    assert (record.state, record.reply) == ("failed", reply.body)
    rows = await world.rows(2)
    facts = [
        (row["item"], row["status"], row["error_code"], row["worker"], row["region"])
        for row in rows
    ]
    assert facts == [(item, "failed", "model_failed", "dead-letter", "here") for item in (0, 1)]


async def test_reason_reaches_the_caller_and_the_webhook(world: World, receiver: Receiver) -> None:
    await world.create(receiver.url)
    data, attributes = world.job(1, prediction="1", webhook="start,completed")
    await world.broker.publish(
        world.dead, data, attributes | {"penstock_reason": "it killed three workers"}
    )
    (outcome,) = (await world.reply()).body.outcomes
    assert outcome.error is not None
    assert outcome.error.message == "it killed three workers"
    (delivery,) = await receiver.wait(1)
    assert b'"status":"failed"' in delivery.body
    assert b'"error":"it killed three workers"' in delivery.body


async def test_body_that_cannot_be_read_has_one_row(world: World) -> None:
    _, attributes = world.job()
    await world.broker.publish(world.dead, b"no json", attributes)
    (outcome,) = (await world.reply()).body.outcomes
    assert outcome.error is not None
    assert outcome.error.code == "undecodable_message"
    assert [row["item"] for row in await world.rows(1)] == [0]


async def test_attributes_that_cannot_be_read_are_answered_recorded_and_not_logged(
    world: World, functions_log: Path
) -> None:
    await world.create()
    data, attributes = world.job(1, prediction="1")
    attributes |= {"deadline_s": "99999999999999", "received_at_s": "soon"}
    await world.broker.publish(world.dead, data.replace(b"text 0", SECRET), attributes)
    reply = await world.reply()
    assert reply.body.error is not None
    assert reply.body.error.code == "undecodable_message"
    assert (await world.record()).state == "failed"
    (row,) = await world.rows(1)
    assert (row["model"], row["tenant"], row["error_code"]) == (
        world.model,
        "t",
        "undecodable_message",
    )
    unreadable = await world.count("penstock_functions_unreadable_total", "dead_letter", 0)
    for nobodys in ({"request_id": "nobody"}, {"part": "0", "prompt": SECRET.decode()}):
        await world.broker.publish(world.dead, SECRET, nobodys)
    await world.count("penstock_functions_unreadable_total", "dead_letter", unreadable + 2)
    logged = await asyncio.to_thread(functions_log.read_text)
    assert "message unreadable" in logged
    assert "nobody" in logged
    assert SECRET.decode() not in logged
    assert base64.b64encode(SECRET).decode() not in logged


async def test_second_push_repeats_the_same(world: World) -> None:
    data, attributes = world.job(1)
    await world.broker.publish(world.dead, data, attributes)
    first = await world.reply()
    await world.count("penstock_functions_dead_letters_total", "answered")
    repeated = await world.count("penstock_functions_dead_letters_total", "repeated", 0)
    await world.broker.publish(world.dead, data, attributes)
    assert await world.reply() == first
    await world.count("penstock_functions_dead_letters_total", "repeated", repeated + 1)
    assert len(await world.rows(1)) == 1


async def test_stranger_is_put_aside(world: World) -> None:
    unreadable = await world.count("penstock_functions_unreadable_total", "dead_letter", 0)
    await world.broker.publish(world.dead, b"", {"of": "course"})
    await world.count("penstock_functions_unreadable_total", "dead_letter", unreadable + 1)
    # After any response other than 2xx, the broker would redeliver it within 0.2 s.
    data, attributes = world.job(1)
    await world.broker.publish(world.dead, data, attributes)
    await world.rows(1)
    assert (
        await world.count("penstock_functions_unreadable_total", "dead_letter", 0) == unreadable + 1
    )


async def test_what_a_worker_answered_stays(world: World) -> None:
    answered = encode_reply_body(ReplyBody([], worker="w"))
    await world.stores.records.finish(world.request_id, "failed", answered)
    data, attributes = world.job(1)
    await world.broker.publish(world.dead, data, attributes)
    data, attributes = world.job(1, request_id=f"{world.request_id}-2")
    await world.broker.publish(world.dead, data, attributes)
    assert (await world.reply()).request_id == f"{world.request_id}-2"
    assert (await world.record()).reply == ReplyBody([], worker="w")
    assert await world.rows(0) == []


async def test_canceled_prediction_stays_canceled(world: World) -> None:
    await world.create()
    await world.stores.records.cancel(world.request_id)
    data, attributes = world.job(1, prediction="1")
    await world.broker.publish(world.dead, data, attributes)
    (outcome,) = (await world.reply()).body.outcomes
    assert outcome.status == "canceled"
    assert [row["status"] for row in await world.rows(1)] == ["canceled"]
    assert (await world.record()).state == "canceled"


class KeptRows:
    """Keeps rows in a list."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    async def write(self, rows: list[Row]) -> None:
        self.rows += rows


async def test_span_of_an_adapters_job_names_the_topic_of_its_model(
    world: World, kept: KeptSpans
) -> None:
    writer = Model.model_validate(
        {
            "name": "writer",
            "task": "text",
            "source": "local:nowhere",
            "engine": "vllm",
            "batch": {"max_tokens": 4096, "max_items": 8},
            "generation": {
                "context_tokens": 512,
                "default_tokens": 16,
                "longest_tokens": 64,
                "adapters": {"writer-law": {"source": "local:law"}},
            },
        }
    )
    stores, table = world.stores, KeptRows()
    letters = DeadLetters(
        stores.records, stores.flow_runs, InMemoryBroker(), table, Catalog((writer,)), "here"
    )
    data, attributes = world.job(
        1, model="writer-law", inbox="", traceparent=new_trace().traceparent
    )
    await letters.answer(ReceivedMessage(data, attributes, "1", ""))
    assert kept.the("dead_letter").name == f"process {dead_letter_topic_id('writer')}"
    assert [row.model for row in table.rows] == ["writer-law"]
