"""Publishes messages in batches, with one queue per topic and ordering key."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc import StatusCode, aio

from shared.errors import InputTooLarge, Overloaded, Unavailable
from shared.pubsub.channel import MESSAGE_LIMIT_BYTES, Method, PublishRequest, RawMessage, translate

REQUEST_LIMIT_MESSAGES = 1000
REQUEST_LIMIT_BYTES = 9_000_000
"""Below the service's 10 MB, which counts the request's own bytes too."""
QUEUE_LIMIT_MESSAGES = 20_000
QUEUE_LIMIT_BYTES = 128 * 1024 * 1024
REQUESTS_IN_FLIGHT = 4
"""Per topic.

More of them coalesce less, fewer add up to one round trip of waiting (bench/broker.py).
"""


@dataclass(slots=True, eq=False)
class _Pending:
    message: RawMessage
    size_bytes: int
    end_s: float
    message_id: asyncio.Future[str]


class PublishQueue:
    """Publishes on one channel. The queue over all topics is bounded."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._queues: dict[tuple[str, str], _TopicQueue] = {}
        self._messages = 0
        self._bytes = 0
        self._is_closed = False

    async def publish(self, topic_path: str, message: RawMessage, timeout_s: float) -> str:
        """Sends `message` and returns its id.

        Raises:
            InputTooLarge: it is larger than the service accepts.
            Overloaded: the queue is full, or the broker was overloaded for `timeout_s`.
            BadInput: the broker refused the message.
            ConfigurationError: the broker refused our credentials.
            Unavailable: the broker did not answer within `timeout_s`. It may have accepted the
                message.
        """
        if self._is_closed:
            raise Unavailable("the connection to the broker is closed")
        size_bytes = message.ByteSize()
        self._check_room(size_bytes)
        loop = asyncio.get_running_loop()
        pending = _Pending(message, size_bytes, loop.time() + timeout_s, loop.create_future())
        late = Unavailable(f"publish to {topic_path}: no answer within {timeout_s} s")
        timer = loop.call_at(pending.end_s, _resolve, pending, late)
        self._messages += 1
        self._bytes += size_bytes
        try:
            self._queue_of(topic_path, message.ordering_key).put(pending)
            return await pending.message_id
        finally:
            timer.cancel()
            self._messages -= 1
            self._bytes -= size_bytes

    async def close(self) -> None:
        """Ends the requests in flight. Their callers get an error."""
        self._is_closed = True
        tasks = [task for queue in self._queues.values() for task in queue.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for queue in list(self._queues.values()):
            queue.fail(Unavailable("the connection to the broker is closed"))
        self._queues.clear()

    def _check_room(self, size_bytes: int) -> None:
        if size_bytes > MESSAGE_LIMIT_BYTES:
            raise InputTooLarge(
                f"a message of {size_bytes} bytes is above the broker's {MESSAGE_LIMIT_BYTES}"
            )
        if self._messages >= QUEUE_LIMIT_MESSAGES or self._bytes + size_bytes > QUEUE_LIMIT_BYTES:
            raise Overloaded(f"{self._messages} messages are already waiting to be published")

    def _queue_of(self, topic_path: str, ordering_key: str) -> _TopicQueue:
        name = (topic_path, ordering_key)
        queue = self._queues.get(name)
        if queue is None:
            # Queues end when they run empty: inboxes and ordering keys come and go without bound.
            queue = self._queues[name] = _TopicQueue(
                self._method, topic_path, ordering_key, self._forget
            )
        return queue

    def _forget(self, queue: _TopicQueue) -> None:
        if self._queues.get(queue.name) is queue:
            del self._queues[queue.name]


class _TopicQueue:
    """The queue of one topic and ordering key, and its requests in flight.

    A message is sent at once while requests may start. Otherwise it waits until a request returns,
    and is sent with all that came meanwhile. There is no timer. Messages with an ordering key have
    one request in flight at a time, so they keep their order.
    """

    def __init__(
        self,
        method: Method,
        topic_path: str,
        ordering_key: str,
        on_empty: Callable[[_TopicQueue], None],
    ) -> None:
        self.name = (topic_path, ordering_key)
        self._method = method
        self._topic_path = topic_path
        self._requests_in_flight = 1 if ordering_key else REQUESTS_IN_FLIGHT
        self._on_empty = on_empty
        self._waiting: deque[_Pending] = deque()
        self._is_flush_due = False
        self.tasks: set[asyncio.Task[None]] = set()

    def put(self, pending: _Pending) -> None:
        self._waiting.append(pending)
        if not self._is_flush_due and len(self.tasks) < self._requests_in_flight:
            # In the next turn of the loop, so that messages of this turn share a request.
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def fail(self, error: Unavailable) -> None:
        while self._waiting:
            _resolve(self._waiting.popleft(), error)

    def _flush(self) -> None:
        self._is_flush_due = False
        while self._waiting and len(self.tasks) < self._requests_in_flight:
            batch = self._next_batch()
            if batch:
                task = asyncio.create_task(self._send(batch))
                self.tasks.add(task)
                task.add_done_callback(self._returned)
        if not self.tasks:
            self._on_empty(self)

    def _returned(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._flush()

    def _next_batch(self) -> list[_Pending]:
        batch: list[_Pending] = []
        size_bytes = 0
        while self._waiting and len(batch) < REQUEST_LIMIT_MESSAGES:
            size_bytes += self._waiting[0].size_bytes
            if batch and size_bytes > REQUEST_LIMIT_BYTES:
                break
            pending = self._waiting.popleft()
            if pending.message_id.done():  # its caller gave up
                size_bytes -= pending.size_bytes
            else:
                batch.append(pending)
        return batch

    async def _send(self, batch: list[_Pending]) -> None:
        request = PublishRequest(
            topic=self._topic_path, messages=[pending.message for pending in batch]
        )
        try:
            response = await self._method.until(request, max(pending.end_s for pending in batch))
        except aio.AioRpcError as error:
            if error.code() is StatusCode.INVALID_ARGUMENT and len(batch) > 1:
                # One bad message fails its whole request: alone, only the bad one does.
                for pending in batch:
                    await self._send([pending])
                return
            for pending in batch:
                _resolve(pending, translate(error, f"publish to {self._topic_path}"))
        except asyncio.CancelledError:
            for pending in batch:
                _resolve(pending, Unavailable("the connection to the broker is closed"))
            raise
        else:
            for pending, message_id in zip(batch, response.message_ids, strict=True):
                _resolve(pending, message_id)


def _resolve(pending: _Pending, outcome: Any) -> None:
    if pending.message_id.done():
        return
    if isinstance(outcome, Exception):
        pending.message_id.set_exception(outcome)
    else:
        pending.message_id.set_result(outcome)
