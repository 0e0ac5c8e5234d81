"""The whole pipeline when something is late, wrong or gone: errors are clear, everything else keeps
working, and the pipeline recovers.
"""

import asyncio
import os
import signal
import urllib.error
import urllib.request
from uuid import uuid4

import msgspec
import openai
import psutil
import pytest
import redis

from infra.local.stack import Stack
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.transport import (
    ReceivedMessage,
    Subscriber,
    SubscriptionSettings,
    dead_letter_subscription_id,
    jobs_topic_id,
)
from shared.brokers import admin_of, transport_of
from shared.messages import Envelope, ReplyBody, decode_reply
from tests.end_to_end.conftest import EMBEDDER, KEY
from tests.end_to_end.rows import Rows, eventually
from tests.faults.world import model_processes
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow


def readiness(stack: Stack) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{stack.api_url}/readyz", timeout=WAIT_LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_deadline_too_short_is_504_and_an_expired_row(
    client: openai.OpenAI, rows: Rows, text: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(
            model=EMBEDDER, input=text, extra_headers={"X-Penstock-Deadline-Ms": "1"}
        )
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    (row,) = rows.of([caught.value.response.headers["x-request-id"]])
    assert (row["status"], row["error_code"]) == ("expired", "deadline_exceeded")


@pytest.mark.anyio
async def test_message_that_is_no_job_is_dead_lettered(
    stack: Stack, client: openai.OpenAI, text: str
) -> None:
    data = f"no job at all: {text}".encode()
    async with transport_of(stack.settings) as transport:
        await transport.publish(jobs_topic_id(EMBEDDER), data, {"from": "a person"})
        kept = await _first(
            transport, dead_letter_subscription_id(EMBEDDER), lambda message: message.data == data
        )
    assert kept.attributes["from"] == "a person"
    assert "schema" in kept.attributes["penstock_reason"]
    answer = await asyncio.to_thread(client.embeddings.create, model=EMBEDDER, input=text)
    assert len(answer.data) == 1


@pytest.mark.anyio
async def test_job_that_cannot_be_read_is_answered(stack: Stack) -> None:
    inbox, request_id = f"inbox.test-{uuid4().hex}", f"req_{uuid4().hex}"
    envelope = Envelope(
        request_id=request_id,
        part=0,
        model=EMBEDDER,
        tenant="default",
        inbox=inbox,
        deadline_s=4e9,
        received_at_s=1.0,
        published_at_s=1.0,
    )
    settings = stack.settings
    async with (
        admin_of(settings) as admin,
        transport_of(settings) as transport,
    ):
        await admin.ensure_topic(inbox)
        await admin.ensure_subscription(inbox, SubscriptionSettings(inbox))
        await transport.publish(jobs_topic_id(EMBEDDER), b'{"items": [', envelope.to_attributes())
        message = await _first(transport, inbox, lambda message: True)
        await admin.delete_subscription(inbox)
        await admin.delete_topic(inbox)
    reply = decode_reply(message.data, message.attributes)
    assert (reply.request_id, reply.body.outcomes) == (request_id, [])
    assert reply.body.error is not None
    assert reply.body.error.code == "undecodable_message"


@pytest.mark.anyio
async def test_reply_that_nobody_waits_for_harms_nothing(
    stack: Stack, client: openai.OpenAI, text: str
) -> None:
    settings = stack.settings
    if settings.broker:
        pytest.skip("RabbitMQ lists no queues over AMQP")
    async with (
        PubSubAdmin(settings.project, settings.pubsub_endpoint) as admin,
        transport_of(settings) as transport,
    ):
        topics = {found.topic_id for found in (await admin.subscriptions()).values()}
        inboxes = [topic for topic in topics if topic.startswith("inbox.")]
        assert inboxes
        attributes = {"schema": "1", "request_id": "req_unknown", "part": "0", "slot": "0"}
        for inbox in inboxes:
            await transport.publish(inbox, msgspec.json.encode(ReplyBody([])), attributes)
            await transport.publish(inbox, b"no reply", {"slot": "0"})
    answer = await asyncio.to_thread(client.embeddings.create, model=EMBEDDER, input=text)
    assert len(answer.data) == 1


def test_requests_go_on_without_redis_and_hit_again_with_it(
    stack: Stack, client: openai.OpenAI, text: str
) -> None:
    server = stack.processes["redis"]
    server.stop()
    try:
        for number in range(5):
            answer = client.embeddings.with_raw_response.create(
                model=EMBEDDER, input=f"{text} {number}"
            )
            assert answer.headers["x-penstock-cache"] == "miss"
        assert eventually(lambda: readiness(stack)[1].count("degraded"))
        assert readiness(stack)[0] == 200
    finally:
        server.start()

    with redis.Redis.from_url(stack.settings.redis_url) as keys:

        def is_filled_again() -> bool:
            client.embeddings.create(model=EMBEDDER, input=f"{text} {uuid4().hex}")
            return bool(keys.dbsize())

        assert eventually(is_filled_again)
    assert eventually(lambda: "degraded" not in readiness(stack)[1])
    asked = [
        client.embeddings.with_raw_response.create(model=EMBEDDER, input=f"{text} back")
        for _ in range(2)
    ]
    assert [one.headers["x-penstock-cache"] for one in asked] == ["miss", "hit"]


@pytest.mark.anyio
async def test_killed_model_process_costs_no_answer(stack: Stack, rows: Rows, text: str) -> None:
    worker = _pid_on(stack.ports.health[0])
    before = model_processes(worker)
    async with openai.AsyncOpenAI(
        base_url=f"{stack.api_url}/v1", api_key=KEY, max_retries=0
    ) as client:
        asking = client.embeddings.with_raw_response
        pending = [
            asyncio.ensure_future(asking.create(model=EMBEDDER, input=f"{text} {number}"))
            for number in range(120)
        ]
        # Some items are done, so the model is working on the others.
        done, _ = await asyncio.wait(
            pending, timeout=WAIT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        assert done
        os.kill(before[0], signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*pending), WAIT_LIMIT_S)
    assert all(answer.status_code == 200 for answer in answers)
    found = await asyncio.to_thread(rows.of, [answer.headers["x-request-id"] for answer in answers])
    assert len({row["row_id"] for row in found}) == len(answers)
    await asyncio.to_thread(eventually, lambda: len(model_processes(worker)) == len(before) or None)


def test_readiness_fails_without_its_broker_and_heals(
    stack: Stack, client: openai.OpenAI, text: str
) -> None:
    assert eventually(lambda: readiness(stack)[0] == 200)
    stack.processes[stack.broker].pause()
    try:
        assert eventually(lambda: readiness(stack)[0] == 503)
    finally:
        stack.processes[stack.broker].resume()
    assert eventually(lambda: readiness(stack)[0] == 200)
    answer = client.embeddings.create(model=EMBEDDER, input=text)
    assert len(answer.data) == 1


async def _first(transport: Subscriber, subscription_id: str, is_it: object) -> ReceivedMessage:
    """A subscription's first message that `is_it` accepts; the messages before it are acked too."""
    assert callable(is_it)
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        transport.subscribe(subscription_id, max_messages=10) as subscription,
    ):
        async for message in subscription:
            subscription.ack(message)
            if is_it(message):
                return message
    raise AssertionError("the subscription ended; this is a bug")


def _pid_on(port: int) -> int:
    """The process listening on `port`."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and getattr(one.laddr, "port", 0) == port and one.pid:
            return one.pid
    raise AssertionError(f"nothing listens on port {port}")
