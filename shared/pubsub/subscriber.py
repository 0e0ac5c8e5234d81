"""Receives messages by StreamingPull, and opens a new stream when one ends."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Any

from grpc import StatusCode, aio

from shared.backoff import backoff
from shared.errors import ConfigurationError, PenstockError, Unavailable
from shared.pubsub.channel import RawMessage, StreamingPullRequest, routing
from shared.pubsub.leaser import AckQueue, Leases
from shared.transport import Message

log = logging.getLogger(__name__)

FATAL = frozenset(
    {
        StatusCode.NOT_FOUND,
        StatusCode.PERMISSION_DENIED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.UNIMPLEMENTED,
    }
)
FATAL_TRIES = 4
"""A subscription just made, or a right just given, may not be known in every region yet:
https://docs.cloud.google.com/pubsub/docs/reliability-intro
"""
HEARTBEAT_S = 30.0
"""An empty request this often keeps an idle stream open, as Google's own clients do."""
HALF_CLOSE_S = 1.0
"""How long the broker has to end a stream that we are done with."""


class StreamSubscription:
    """An open subscription. See shared.transport.Subscription.

    Args:
        open_stream: opens the StreamingPull call with the given metadata.
        first_request: the first request of each stream.
        acks: sends acks and nacks.
        leases: keeps the leases of messages that were received and not yet acked.
        max_messages: as in `first_request`. Bounds the messages held here even if the broker
            ignores it.
    """

    def __init__(
        self,
        open_stream: Any,
        first_request: RawMessage,
        acks: AckQueue,
        leases: Leases,
        max_messages: int,
    ) -> None:
        self._open_stream = open_stream
        self._first_request = first_request
        self._acks = acks
        self._leases = leases
        # Redelivery after lost leases may bring more than the broker's flow control says.
        self._hold_limit = 2 * max_messages + 100
        self._room = asyncio.Event()
        self._received: deque[Message] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._call: Any = None
        self._end: PenstockError | None = None
        self._is_stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self._opened = asyncio.Event()
        self.is_connected = False
        self.reconnects = 0

    @property
    def lost(self) -> int:
        """Messages whose lease expired while held."""
        return self._leases.lost

    def __aiter__(self) -> StreamSubscription:
        return self

    async def __anext__(self) -> Message:
        while True:
            while self._received:
                message = self._received.popleft()
                self._room.set()
                if not message.lost:  # another subscriber has it by now
                    return message
            if self._end is not None:
                raise self._end
            if self._is_stopped:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def ack(self, message: Message) -> None:
        """See shared.transport.Subscription.

        A second ack is ignored. The ack of a lost message is best effort.
        """
        if self._leases.release(message) or message.lost:
            self._room.set()
            self._acks.ack(message.ack_id)

    def nack(self, message: Message) -> None:
        """See shared.transport.Subscription."""
        if self._leases.release(message):
            self._room.set()
            self._acks.nack(message.ack_id)

    def start(self) -> None:
        """Begins to receive."""
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._leases.keep()),
            asyncio.create_task(self._beat()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def wait_open(self, timeout_s: float) -> None:
        """Waits until a stream is open or was refused for good, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()

    async def stop(self) -> None:
        """Stops receiving: returns unprocessed messages and ends the iteration.

        Leases and acks continue.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._call is not None:
            # Half-closed, not canceled: messages on their way still arrive and are returned.
            await self._half_close(self._call)
        self._tasks[0].cancel()
        await asyncio.gather(self._tasks[0], return_exceptions=True)
        while self._received:
            self.nack(self._received.popleft())
        self._wake()

    async def close(self, timeout_s: float) -> None:
        """Hands back everything still in hand and sends the last acks, within `timeout_s`."""
        await self.stop()
        for ack_id in self._leases.release_all():
            self._acks.nack(ack_id)
        await self._acks.flush(timeout_s)
        await self._acks.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _half_close(self, call: Any) -> None:
        try:
            async with asyncio.timeout(HALF_CLOSE_S):
                await call.done_writing()
                await asyncio.wait((self._tasks[0],))
        except (TimeoutError, aio.AioRpcError, asyncio.InvalidStateError):
            log.debug(
                "stream did not end by itself",
                extra={"subscription": self._first_request.subscription},
            )

    async def _receive(self) -> None:
        pauses, refusals = backoff(), 0
        while not self._is_stopped:
            received_any, error = await self._receive_one_stream()
            self.is_connected = False
            if self._is_stopped:
                return
            if received_any:
                pauses, refusals = backoff(), 0
            if error is not None and error.code() in FATAL:
                refusals += 1
                if refusals >= FATAL_TRIES:
                    self._fail(error)
                    return
            self.reconnects += 1
            log.info(
                "stream ended",
                extra={
                    "subscription": self._first_request.subscription,
                    "code": error.code().name if error else "OK",
                },
            )
            await asyncio.sleep(next(pauses))

    async def _receive_one_stream(self) -> tuple[bool, aio.AioRpcError | None]:
        """Receives until the stream ends.

        Returns whether anything came, and the error that ended the stream.
        """
        received_any = False
        call = self._open_stream(metadata=routing("subscription", self._first_request.subscription))
        try:
            await call.write(self._first_request)
            self._call = call
            self.is_connected = True
            self._opened.set()
            while (response := await call.read()) is not aio.EOF:  # type: ignore[attr-defined]
                received_any = True
                self._take(response)
                while max(len(self._leases), len(self._received)) > self._hold_limit:
                    self._room.clear()
                    await self._room.wait()
        except aio.AioRpcError as error:
            return received_any, error
        except asyncio.InvalidStateError:  # written to after the broker had ended the stream
            return received_any, None
        finally:
            self._call = None
            call.cancel()
        return received_any, None

    def _take(self, response: RawMessage) -> None:
        now_s = asyncio.get_running_loop().time()
        for received in response.received_messages:
            raw = received.message
            message = Message(
                data=raw.data,
                attributes=dict(raw.attributes),
                message_id=raw.message_id,
                ack_id=received.ack_id,
                publish_time_s=raw.publish_time.seconds + raw.publish_time.nanos * 1e-9,
                delivery_attempt=received.delivery_attempt,
                ordering_key=raw.ordering_key,
                received_at_s=now_s,
            )
            self._leases.hold(message)
            self._received.append(message)
        self._wake()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end = PenstockError(
                f"{self._first_request.subscription}: {error!r}; this is a bug"
            )
            self._end.__cause__ = error
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _fail(self, error: aio.AioRpcError) -> None:
        message = f"{self._first_request.subscription}: {error.code().name}: {error.details()}"
        is_gone = error.code() in (StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION)
        self._end = Unavailable(message) if is_gone else ConfigurationError(message)
        self._opened.set()
        self._wake()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._call is not None:
                try:
                    await self._call.write(StreamingPullRequest())
                except (aio.AioRpcError, asyncio.InvalidStateError):
                    continue  # the stream ended, and the receiver opens another
