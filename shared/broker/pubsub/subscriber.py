"""Receives messages through StreamingPull, reopens streams when they end, and extends leases."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from grpc import StatusCode, aio

from shared.broker.pubsub.channel import (
    AckQueue,
    Method,
    ModifyAckDeadlineRequest,
    RawMessage,
    StreamingPullRequest,
    StreamingPullResponse,
    routing,
    take_ids,
)
from shared.broker.transport import ReceivedMessage, SmoothedDuration
from shared.errors import ConfigurationError, PenstockError, Unavailable
from shared.process.concurrency import add_jitter, backoff

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
"""Attempts before giving up. A new subscription or permission may not have propagated to every
region yet: https://docs.cloud.google.com/pubsub/docs/reliability-intro
"""
HEARTBEAT_S = 30.0
"""Interval between empty requests that keep an idle stream open, as in Google's own clients."""
HALF_CLOSE_S = 1.0
"""Time limit for the broker to close a stream that is no longer needed."""
STREAMS_PER_CHANNEL = 80
"""Well below the 100 streams that fit on one connection (see `Channels`)."""
MAX_STREAMS = 8
"""Beyond this number, a single stream replaces all but the first.

Until they are acked, messages held on the old streams are in addition to the new stream's limit.
"""
MIN_GROWTH = 0.25
"""A new stream is opened with room for at least this fraction of the current limit."""
MAX_LEASE_S = 3600.0
"""After this time, a message is considered lost even if its holder is alive, as in Google's own
clients.
"""
EXTENSION_PART = 0.7
"""Duration of an extension as a fraction of the ack deadline.

The remaining two thirds leave room for event loop and network pauses, and for another attempt.
"""
LOOKS_AN_EXTENSION = 12


class Leases:
    """Maintains the leases of all held messages.

    A message is delivered with a lease of `ack_deadline_s`, for which the service requires at least
    10 s. Extensions may be shorter (API comments on ModifyAckDeadline: 0 to 600 s), so messages
    that have been held longer are redelivered sooner if their holder dies.
    """

    def __init__(self, path: str, modify: Method, ack_deadline_s: int) -> None:
        self._path = path
        self._modify = modify
        self._ack_deadline_s = ack_deadline_s
        self._extension_s = max(1, int(ack_deadline_s * EXTENSION_PART))
        self._held: dict[str, _Lease] = {}
        self._any_held = asyncio.Event()
        self.lost = 0
        """Number of messages whose lease expired while held.

        They are marked `lost` and will be redelivered.
        """

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: ReceivedMessage) -> None:
        """Starts maintaining the lease on `message`, which was just received."""
        since_s = message.received_at_s
        if not self._held:
            self._any_held.set()
        self._held[message.ack_id] = _Lease(message, since_s, since_s + self._ack_deadline_s)

    def release(self, message: ReceivedMessage) -> bool:
        """Ends the lease. Returns False if the message was not held."""
        return self._held.pop(message.ack_id, None) is not None

    def release_all(self) -> list[str]:
        """Stops maintaining all leases and returns the ack IDs."""
        ids = list(self._held)
        self._held.clear()
        return ids

    async def keep(self) -> None:
        """Extends leases until canceled: once soon after receipt, then each third of an extension.

        No timer runs while no lease is held, because an API process has one subscription per slot.
        """
        period_s = self._extension_s / LOOKS_AN_EXTENSION
        while True:
            if not self._held:
                self._any_held.clear()
                await self._any_held.wait()
            await asyncio.sleep(add_jitter(period_s))
            self._drop_lost()
            # A batch that can't be sent must not delay other batches until their leases expire.
            await asyncio.gather(*(self._extend(ids, 4 * period_s) for ids in self._due()))

    def _due(self) -> Iterator[list[str]]:
        soon_s = asyncio.get_running_loop().time() + self._extension_s * 2 / 3
        due = deque(
            ack_id
            for ack_id, lease in self._held.items()
            if lease.until_s < soon_s or not lease.is_extended
        )
        while due:
            yield take_ids(due)

    async def _extend(self, ids: list[str], limit_s: float) -> None:
        asked_s = asyncio.get_running_loop().time()
        request = ModifyAckDeadlineRequest(
            subscription=self._path, ack_ids=ids, ack_deadline_seconds=self._extension_s
        )
        try:
            await self._modify.until(request, asked_s + limit_s)
        except aio.AioRpcError as error:
            log.warning(
                "leases not extended", extra={"subscription": self._path, "code": error.code().name}
            )
            return
        for lease in filter(None, map(self._held.get, ids)):
            lease.until_s = asked_s + self._extension_s
            lease.is_extended = True

    def _drop_lost(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for ack_id, lease in list(self._held.items()):
            if lease.until_s < now_s or now_s - lease.since_s > MAX_LEASE_S:
                del self._held[ack_id]
                lease.message.lost = True
                self.lost += 1
                log.warning(
                    "lease lost",
                    extra={"subscription": self._path, "message_id": lease.message.message_id},
                )


class _Lease:
    """A held message, with the start and end of its lease (event loop time in seconds)."""

    __slots__ = ("is_extended", "message", "since_s", "until_s")

    def __init__(self, message: ReceivedMessage, since_s: float, until_s: float) -> None:
        self.message = message
        self.since_s = since_s
        self.until_s = until_s
        self.is_extended = False


class PullChannel:
    """A channel for StreamingPull calls. A connection has room for a limited number of them."""

    def __init__(self, channel: aio.Channel) -> None:
        self.open_call: Any = channel.stream_stream(
            "/google.pubsub.v1.Subscriber/StreamingPull",
            StreamingPullRequest.SerializeToString,
            StreamingPullResponse.FromString,
        )
        """Opens a call with the given metadata."""
        self.streams = 0

    @property
    def has_room(self) -> bool:
        """True if the connection has room for another stream."""
        return self.streams < STREAMS_PER_CHANNEL


class _PullStream:
    """A StreamingPull call that is reopened whenever it ends.

    Args:
        max_messages: maximum number of unacked messages that the broker may send on this stream.
        max_bytes: maximum total size of these messages, in bytes. 0 means no limit.
    """

    def __init__(
        self, owner: StreamSubscription, channel: PullChannel, max_messages: int, max_bytes: int
    ) -> None:
        self.max_messages = max_messages
        self.is_connected = False
        self._channel = channel
        channel.streams += 1
        self._owner = owner
        self._request = StreamingPullRequest()
        self._request.CopyFrom(owner.first_request)
        self._request.max_outstanding_messages = max_messages
        self._request.max_outstanding_bytes = max_bytes
        self._call: Any = None
        self._opened = asyncio.Event()
        self._is_stopped = False
        self.receiving = asyncio.create_task(self._receive())

    async def stop(self) -> None:
        """Ends the stream. Messages in transit still arrive."""
        self._is_stopped = True
        if not self.receiving.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(HALF_CLOSE_S):
                    # The broker may start sending as soon as it has the request. Messages on a
                    # canceled call are redelivered only when their leases expire.
                    await self._opened.wait()
        if self._call is not None:
            await self._half_close(self._call)
        self.receiving.cancel()
        await asyncio.gather(self.receiving, return_exceptions=True)
        self._channel.streams -= 1

    async def beat(self) -> None:
        if self._call is not None:
            # Otherwise, the stream has ended, and the receiver opens a new one.
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(StreamingPullRequest())

    async def _half_close(self, call: Any) -> None:
        try:
            async with asyncio.timeout(HALF_CLOSE_S):
                await call.done_writing()
                await asyncio.wait((self.receiving,))
        except (TimeoutError, aio.AioRpcError, asyncio.InvalidStateError):
            log.debug(
                "stream did not end by itself", extra={"subscription": self._request.subscription}
            )

    async def _receive(self) -> None:
        pauses, refusals = backoff(), 0
        while not self._is_stopped:
            received_any, error = await self._receive_one_call()
            self.is_connected = False
            if self._is_stopped:
                return
            if received_any:
                pauses, refusals = backoff(), 0
            if error is not None and error.code() in FATAL:
                refusals += 1
                if refusals >= FATAL_TRIES:
                    self._owner.fail(error)
                    return
            self._owner.reconnects += 1
            log.info(
                "stream ended",
                extra={
                    "subscription": self._request.subscription,
                    "code": error.code().name if error else "OK",
                },
            )
            await asyncio.sleep(next(pauses))

    async def _receive_one_call(self) -> tuple[bool, aio.AioRpcError | None]:
        """Receives until the call ends.

        Returns whether anything arrived, and the error that ended the call.
        """
        received_any = False
        metadata = routing("subscription", self._request.subscription)
        call = self._channel.open_call(metadata=metadata)
        try:
            await call.write(self._request)
            self._call = call
            self._opened.set()
            self.is_connected = True
            self._owner.opened.set()
            while (response := await call.read()) is not aio.EOF:  # type: ignore[attr-defined]
                received_any = True
                self._owner.take(response)
                await self._owner.wait_for_room()
        except aio.AioRpcError as error:
            return received_any, error
        except asyncio.InvalidStateError:  # written to after the broker closed the stream
            return received_any, None
        finally:
            self._call = None
            call.cancel()
        return received_any, None


class StreamSubscription:
    """An open subscription. See shared.broker.transport.Subscription.

    A stream's limit can't be changed after it is opened
    (https://docs.cloud.google.com/pubsub/docs/reference/rpc/google.pubsub.v1#streamingpullrequest),
    so streams are added when the limit rises and closed when it falls.

    Args:
        max_messages: maximum number of messages on the first stream. Also limits the number of
            messages held here if the broker ignores the limit.
        max_bytes: maximum total size, in bytes, of these messages and those added by `hold`. 0
            means no limit.
    """

    def __init__(
        self,
        channel: Callable[[], PullChannel],
        first_request: RawMessage,
        acks: AckQueue,
        leases: Leases,
        max_messages: int,
        max_bytes: int = 0,
    ) -> None:
        self._channel = channel
        self.first_request = first_request
        self.opened = asyncio.Event()
        """Set when a stream is open or was rejected permanently."""
        self.reconnects = 0
        self._acks = acks
        self._leases = leases
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._room = asyncio.Event()
        self._received: deque[ReceivedMessage] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._end: PenstockError | None = None
        self._is_stopped = False
        self._streams: list[_PullStream] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_connected(self) -> bool:
        """True if a stream was open as of the last report."""
        return any(stream.is_connected for stream in self._streams)

    @property
    def lost(self) -> int:
        """Number of messages whose lease expired while held."""
        return self._leases.lost

    @property
    def round_trip(self) -> SmoothedDuration:
        return self._acks.round_trip

    def hold(self, max_messages: int) -> None:
        if self._is_stopped or not self._streams:
            return
        held = sum(stream.max_messages for stream in self._streams)
        if max_messages - held >= max(1, held * MIN_GROWTH):
            if len(self._streams) == MAX_STREAMS:
                held -= self._end_streams(1)
            part_bytes = max(1, self._max_bytes // (MAX_STREAMS - 1))
            self._open(max_messages - held, part_bytes if self._max_bytes else 0)
        while len(self._streams) > 1 and held - self._streams[-1].max_messages >= max_messages:
            held -= self._end_streams(len(self._streams) - 1)

    def _end_streams(self, count: int) -> int:
        """Closes all but the first `count` streams.

        Returns how many messages the closed streams had room for.
        """
        ended, self._streams = self._streams[count:], self._streams[:count]
        for stream in ended:
            ending = asyncio.create_task(stream.stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        return sum(stream.max_messages for stream in ended)

    def __aiter__(self) -> StreamSubscription:
        return self

    async def __anext__(self) -> ReceivedMessage:
        while True:
            while self._received:
                message = self._received.popleft()
                self._room.set()
                if not message.lost:  # another subscriber has received it by now
                    return message
            if self._end is not None:
                raise self._end
            if self._is_stopped:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def ack(self, message: ReceivedMessage) -> None:
        """A second ack is ignored. An ack for a lost message is best-effort."""
        if self._leases.release(message) or message.lost:
            self._room.set()
            self._acks.ack(message.ack_id)

    def nack(self, message: ReceivedMessage) -> None:
        if self._leases.release(message):
            self._room.set()
            self._acks.nack(message.ack_id)

    def start(self) -> None:
        self._open(self._max_messages, self._max_bytes)
        self._tasks = [
            asyncio.create_task(self._leases.keep()),
            asyncio.create_task(self._beat()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._note_end)

    async def wait_open(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` until a stream is open or was rejected permanently."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.opened.wait()

    async def stop(self) -> None:
        """Stops receiving: returns unprocessed messages to the broker and ends the iteration.

        Leases and acks continue.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        # Half-closed rather than canceled, so that messages in transit still arrive and are
        # returned.
        await asyncio.gather(*(stream.stop() for stream in self._streams), *self._ending)
        while self._received:
            self.nack(self._received.popleft())
        self._wake()

    async def close(self, timeout_s: float) -> None:
        """Returns all held messages and sends the last acks, all within `timeout_s`."""
        await self.stop()
        for ack_id in self._leases.release_all():
            self._acks.nack(ack_id)
        await self._acks.flush(timeout_s)
        await self._acks.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self, response: RawMessage) -> None:
        now_s = asyncio.get_running_loop().time()
        for received in response.received_messages:
            raw = received.message
            message = ReceivedMessage(
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

    async def wait_for_room(self) -> None:
        """Waits while the number of messages held exceeds the streams' limit.

        Redelivery after lost leases may exceed the broker's flow control limits.
        """
        while max(len(self._leases), len(self._received)) > 100 + 2 * sum(
            stream.max_messages for stream in self._streams
        ):
            self._room.clear()
            await self._room.wait()

    def fail(self, error: aio.AioRpcError) -> None:
        """Ends the subscription after the broker permanently rejects a stream."""
        message = f"{self.first_request.subscription}: {error.code().name}: {error.details()}"
        is_gone = error.code() in (StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION)
        self._end = Unavailable(message) if is_gone else ConfigurationError(message)
        self.opened.set()
        self._wake()

    def _open(self, max_messages: int, max_bytes: int) -> None:
        stream = _PullStream(self, self._channel(), max_messages, max_bytes)
        stream.receiving.add_done_callback(self._note_end)
        self._streams.append(stream)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end = PenstockError(
                f"{self.first_request.subscription}: {error!r}; this is a bug"
            )
            self._end.__cause__ = error
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for stream in list(self._streams):
                await stream.beat()
