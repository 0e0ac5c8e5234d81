"""Google's generated asyncio clients: publish, pull, and a manually driven StreamingPull."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.pubsub_v1 import PublisherAsyncClient, SubscriberAsyncClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcAsyncIOTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcAsyncIOTransport
from google.pubsub_v1.types import StreamingPullRequest

from tests.conformance.target import Target
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


@pytest.fixture
async def clients(
    target: Target,
) -> AsyncIterator[tuple[PublisherAsyncClient, SubscriberAsyncClient]]:
    async with grpc.aio.insecure_channel(target.endpoint) as channel:
        yield (
            PublisherAsyncClient(transport=PublisherGrpcAsyncIOTransport(channel=channel)),
            SubscriberAsyncClient(transport=SubscriberGrpcAsyncIOTransport(channel=channel)),
        )


async def test_message_goes_round(
    clients: tuple[PublisherAsyncClient, SubscriberAsyncClient], project: str
) -> None:
    publisher, subscriber = clients
    topic, path = f"{project}/topics/jobs", f"{project}/subscriptions/workers"
    await publisher.create_topic(name=topic)
    await subscriber.create_subscription(name=path, topic=topic)
    published = await publisher.publish(
        topic=topic, messages=[{"data": b"a", "attributes": {"k": "v"}}]
    )
    pulled = await subscriber.pull(subscription=path, max_messages=5, timeout=WAIT_LIMIT_S)
    (received,) = pulled.received_messages
    assert received.message.message_id == published.message_ids[0]
    assert received.message.attributes == {"k": "v"}
    await subscriber.acknowledge(subscription=path, ack_ids=[received.ack_id])


async def test_stream_delivers_and_ends_after_the_half_close(
    clients: tuple[PublisherAsyncClient, SubscriberAsyncClient], project: str
) -> None:
    publisher, subscriber = clients
    topic, path = f"{project}/topics/jobs", f"{project}/subscriptions/workers"
    await publisher.create_topic(name=topic)
    await subscriber.create_subscription(name=path, topic=topic)
    requests: asyncio.Queue[StreamingPullRequest | None] = asyncio.Queue()

    async def sent() -> AsyncIterator[StreamingPullRequest]:
        while (request := await requests.get()) is not None:
            yield request

    requests.put_nowait(StreamingPullRequest(subscription=path, stream_ack_deadline_seconds=10))
    async with asyncio.timeout(WAIT_LIMIT_S):
        stream = await subscriber.streaming_pull(sent())
        await publisher.publish(topic=topic, messages=[{"data": b"1"}, {"data": b"2"}])
        data = []
        async for response in stream:
            data += [received.message.data for received in response.received_messages]
            requests.put_nowait(
                StreamingPullRequest(
                    ack_ids=[message.ack_id for message in response.received_messages]
                )
            )
            if len(data) == 2:
                break
        requests.put_nowait(None)
        rest = [response async for response in stream]
    assert sorted(data) == [b"1", b"2"]
    assert rest == []
