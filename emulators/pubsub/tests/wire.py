"""A bare gRPC client for `google.pubsub.v1`, for requests that Google's clients never send."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from pubsub_emulator.protos import message_class
from tests.limits import WAIT_LIMIT_S

TOPIC = "projects/p/topics/jobs"
TURNS_S = 0.02
PAUSE_S = 0.001
_END = vars(grpc.aio)["EOF"]


class Wire:
    """Calls methods by name with raw protobuf messages. Every call has a time limit."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(
        self, service: str, name: str, request: Any, response: str, limit_s: float = WAIT_LIMIT_S
    ) -> Any:
        method = self._channel.unary_unary(
            f"/google.pubsub.v1.{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=_deserializer(response),
        )
        return await method(request, timeout=limit_s)

    async def topic(self, path: str) -> None:
        await self.call("Publisher", "CreateTopic", message_class("Topic")(name=path), "Topic")

    async def subscription(self, path: str, topic: str, **fields: Any) -> None:
        request = message_class("Subscription")(name=path, topic=topic, **fields)
        await self.call("Subscriber", "CreateSubscription", request, "Subscription")

    async def delete_subscription(self, path: str) -> None:
        request = message_class("DeleteSubscriptionRequest")(subscription=path)
        await self.call("Subscriber", "DeleteSubscription", request, "Empty")

    async def publish(self, topic: str, *data: str, **fields: Any) -> list[str]:
        messages = [message_class("PubsubMessage")(data=text.encode(), **fields) for text in data]
        request = message_class("PublishRequest")(topic=topic, messages=messages)
        return list(
            (await self.call("Publisher", "Publish", request, "PublishResponse")).message_ids
        )

    async def pull(
        self,
        subscription: str,
        max_messages: int = 100,
        limit_s: float = WAIT_LIMIT_S,
        **fields: Any,
    ) -> Any:
        request = message_class("PullRequest")(
            subscription=subscription, max_messages=max_messages, **fields
        )
        return await self.call("Subscriber", "Pull", request, "PullResponse", limit_s)

    async def ack(self, subscription: str, received: Iterable[Any]) -> None:
        request = message_class("AcknowledgeRequest")(
            subscription=subscription, ack_ids=[message.ack_id for message in received]
        )
        await self.call("Subscriber", "Acknowledge", request, "Empty")

    def stream(self) -> "WireStream":
        # The type stubs don't cover a stream that is written to rather than created from an
        # iterator.
        method: Any = self._channel.stream_stream(
            "/google.pubsub.v1.Subscriber/StreamingPull",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=_deserializer("StreamingPullResponse"),
        )
        return WireStream(method(timeout=WAIT_LIMIT_S))


class WireStream:
    """A StreamingPull. The call ends once the limit has passed, if not sooner."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **fields: Any) -> None:
        await self.call.write(message_class("StreamingPullRequest")(**fields))

    async def open(self, subscription: str, **fields: Any) -> None:
        await self.send(subscription=subscription, **{"stream_ack_deadline_seconds": 10, **fields})

    async def receive(self) -> Any:
        """Return the next response.

        If the stream has ended, raise its error, or EOFError after a clean end.
        """
        response = await self.call.read()
        if response is _END:
            raise EOFError(await self.call.code())
        return response

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Return how the stream ends, discarding any responses before that."""
        return await self.call.code(), await self.call.details()


@asynccontextmanager
async def connect(endpoint: str) -> AsyncIterator[Wire]:
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_metadata_size", 4 * 1024**2),  # as in Google's clients
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        yield Wire(channel)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds inside a server in this process.

    Usually a few loop iterations are enough. Spinning forever would take a core away from the
    server whose state must change.
    """
    turns_until_s = time.perf_counter() + TURNS_S
    async with asyncio.timeout(WAIT_LIMIT_S):
        # A waiting call sends nothing over the wire, so there is no event to wait for.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0 if time.perf_counter() < turns_until_s else PAUSE_S)


def refused_ids(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Return the ack ids listed in an error's details, with their reasons."""
    trailers: Any = error.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return dict(info.metadata)


def _deserializer(name: str) -> Any:
    if name == "Empty":
        return bytes
    return message_class(name).FromString
