"""A gRPC server that responds to the client's calls as scripted by a test and records the requests,
for failures on demand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.pubsub_v1.types import pubsub

from shared.broker.pubsub.client import PubSubTransport
from tests.limits import WAIT_LIMIT_S

UNARY = {"Publish": "Publisher", "Acknowledge": "Subscriber", "ModifyAckDeadline": "Subscriber"}


@dataclass
class ScriptedPubSub:
    """The server's next actions and the requests it has seen.

    `failures[method]` contains the statuses for the next calls to that method; `gate`, while
    cleared, blocks every unary call. `refuses` returns True for messages that make a publish
    request invalid. Streams send the items in `deliveries`, each of which is either a list of
    message bodies or a status that ends the stream.
    """

    endpoint: str = ""
    failures: dict[str, deque[grpc.StatusCode]] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: Callable[[bytes], bool] = field(default=lambda data: False)
    deliveries: asyncio.Queue[list[bytes] | grpc.StatusCode] = field(default_factory=asyncio.Queue)
    requests: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in (*UNARY, "StreamingPull")}
    )
    ignores_half_close: bool = False
    metadata: list[dict[str, str]] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    async def seen(self, method: str, count: int) -> list[Any]:
        """Returns the requests for `method` once there are `count` of them."""
        async with asyncio.timeout(WAIT_LIMIT_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests[method]) >= count)
        return self.requests[method]

    async def unary(self, method: str, request: Any, context: Any) -> Any:
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        await self._note(method, request)
        await self.gate.wait()
        if self.failures.get(method):
            await context.abort(self.failures[method].popleft(), "as scripted")
        if method != "Publish":
            return Empty()
        if any(self.refuses(message.data) for message in request.messages):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "as scripted")
        return pubsub.PublishResponse.pb()(
            message_ids=[str(next(self._ids)) for _ in request.messages]
        )

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.peers.add(context.peer())
        reading = asyncio.create_task(self._read(requests))
        try:
            # The error must be raised here: gRPC returns INTERNAL if this task ends before another
            # task sends the error.
            while (what := await self._next_delivery(reading)) is not None:
                await self._deliver(what, context)
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            await self._note("StreamingPull", request)

    async def _next_delivery(self, reading: asyncio.Task[None]) -> Any:
        """The next delivery, or None once the client has closed its side."""
        delivery = asyncio.create_task(self.deliveries.get())
        try:
            ends = () if self.ignores_half_close else (reading,)
            await asyncio.wait((delivery, *ends), return_when=asyncio.FIRST_COMPLETED)
            return delivery.result() if delivery.done() else None
        finally:
            delivery.cancel()

    async def _deliver(self, what: Any, context: Any) -> None:
        if isinstance(what, grpc.StatusCode):
            await context.abort(what, "as scripted")
        response = pubsub.StreamingPullResponse.pb()()
        for data in what:
            response.received_messages.add(ack_id=f"ack-{next(self._ids)}", message={"data": data})
        await context.write(response)

    async def _note(self, method: str, request: Any) -> None:
        async with self._arrived:
            self.requests[method].append(request)
            self._arrived.notify_all()


Opened = tuple[ScriptedPubSub, PubSubTransport]
"""A server and a transport that is connected to it."""


@asynccontextmanager
async def scripted_pubsub(
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[ScriptedPubSub]:
    """Serves on a free port, unencrypted unless `credentials` are set."""
    script = ScriptedPubSub()
    script.gate.set()
    server = grpc.aio.server()
    for service in ("Publisher", "Subscriber"):
        server.add_generic_rpc_handlers((_handlers(service, script),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("localhost:0", credentials)
    script.endpoint = f"127.0.0.1:{port}" if credentials is None else f"https://localhost:{port}"
    await server.start()
    try:
        yield script
    finally:
        await server.stop(0)


def _handlers(service: str, script: ScriptedPubSub) -> Any:
    handlers: dict[str, Any] = {}
    for method in (name for name, owner in UNARY.items() if owner == service):

        async def answer(request: Any, context: Any, method: str = method) -> Any:
            return await script.unary(method, request, context)

        decode = getattr(pubsub, f"{method}Request").pb().FromString
        handlers[method] = grpc.unary_unary_rpc_method_handler(
            answer, decode, lambda message: message.SerializeToString()
        )
    if service == "Subscriber":
        handlers["StreamingPull"] = grpc.stream_stream_rpc_method_handler(
            script.stream,
            pubsub.StreamingPullRequest.pb().FromString,
            lambda message: message.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(f"google.pubsub.v1.{service}", handlers)
