"""Receives messages from one queue, and resumes consuming after the channel or connection breaks.

Combines a channel's acks, because the broker loses some acks when many are sent individually. A
channel passes 32 settlements at a time to a quorum queue's leader. It holds the rest and drops them
when it is closed, even though it has already read them, so those messages are redelivered. This
happens in RabbitMQ 3.10.8, 4.0.5, and 4.3.6. Acking all messages up to a given number is a single
settlement.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from aiormq import Channel
from aiormq.abc import DeliveredMessage

from shared.broker.rabbitmq.connection import BROKEN, MAX_PAUSE_S, translate
from shared.broker.rabbitmq.properties import message_of
from shared.broker.rabbitmq.waits import (
    ANSWER_LIMIT_S,
    ChannelWaits,
    close_channel,
    longer,
    only_own_cancellation,
)
from shared.broker.transport import ReceivedMessage, SmoothedDuration
from shared.errors import BadInput, ConfigurationError, PenstockError, Unavailable
from shared.process.concurrency import backoff

log = logging.getLogger(__name__)

REFUSALS = 4
"""Attempts before giving up. Some nodes in a cluster may not know about a new queue yet."""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 10.0
"""Pause before a returned message is redelivered. Same as on Pub/Sub.

RabbitMQ itself redelivers immediately, so the subscriber holds the message for this long.
"""

MAX_CONSUMERS = 16
MIN_GROWTH = 0.25
"""A new consumer's prefetch count is at least this fraction of the current total."""
MEASURE_EVERY_S = 10.0
"""The broker does not respond to acks, so the round trip is measured separately."""

CANCEL_S = 1.0
"""Time limit for the broker to stop sending."""

OpenChannel = Callable[[], Awaitable[Channel]]
DelayedReturn = Callable[[DeliveredMessage, int], Awaitable[None]]
"""Moves a message to a queue for redelivery after this number of attempts."""


class AckRuns:
    """One channel's settlements. Its deliveries are numbered consecutively from 1."""

    def __init__(self) -> None:
        self._all_up_to = 0
        self._apart: set[int] = set()
        """Settled deliveries with tags above that number."""

    def settle(self, tag: int) -> None:
        """Records that a delivery was settled.

        A delivery that must be redelivered is not settled, so it ends a run.
        """
        self._apart.add(tag)
        while self._all_up_to + 1 in self._apart:
            self._all_up_to += 1
            self._apart.discard(self._all_up_to)

    def join(self, tags: Iterable[int]) -> list[tuple[int, bool]]:
        """Returns the acks to send: each tag, and whether it includes all earlier deliveries.

        Unsettled deliveries are never acked.
        """
        ordered = sorted(tags)
        for tag in ordered:
            self.settle(tag)
        in_run = [tag for tag in ordered if tag <= self._all_up_to]
        joined = [(in_run[-1], len(in_run) > 1)] if in_run else []
        return joined + [(tag, False) for tag in ordered[len(in_run) :]]


@dataclass(slots=True, eq=False)
class _Held:
    message: ReceivedMessage
    delivered: DeliveredMessage
    timer: asyncio.TimerHandle | None = None


class QueueSubscription:
    """An open subscription. See shared.broker.transport.Subscription.

    Held messages are redelivered when their channel closes, so leases are not needed. The broker
    notices a dead process immediately.

    Args:
        max_messages: maximum number of unacked messages that the broker sends.
        delayed_return: destination of returned messages. None: they are held for a while and then
            returned to their queue.
        answer_limit_s: initial time limit for a broker response.
    """

    def __init__(
        self,
        open_channel: OpenChannel,
        queue: str,
        max_messages: int,
        delayed_return: DelayedReturn | None = None,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self._open_channel = open_channel
        self._queue = queue
        self._max_messages = max_messages
        self._delayed_return = delayed_return
        self._answer_limit_s = self._limit_s = answer_limit_s
        self._received: deque[ReceivedMessage] = deque()
        self._held: dict[str, _Held] = {}
        self._settled: deque[tuple[_Held, bool]] = deque()
        self._settling = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._arrival = asyncio.Event()
        self._opened = asyncio.Event()
        self._waits: ChannelWaits | None = None
        self._runs = AckRuns()
        self._consumers: list[tuple[str, int]] = []
        """Tags of the channel's consumers, each with its prefetch count."""
        self._wanted = max_messages
        self._resizing = asyncio.Event()
        self._end: PenstockError | None = None
        self._is_stopped = False
        self._taken = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False
        self.lost = 0
        """Number of messages whose channel closed while they were held."""
        self.round_trip = SmoothedDuration()
        """See shared.broker.transport.Subscription."""

    def hold(self, max_messages: int) -> None:
        """See shared.broker.transport.Subscription. The broker does not limit bytes."""
        self._wanted = max(self._max_messages, max_messages)
        if self._lacking() or self._spare():
            self._resizing.set()

    def _lacking(self) -> int:
        """Returns the prefetch count for an additional consumer, or 0 if none is needed."""
        held = sum(messages for _, messages in self._consumers)
        more = self._wanted - held
        return more if more >= held * MIN_GROWTH and len(self._consumers) < MAX_CONSUMERS else 0

    def _spare(self) -> bool:
        """Returns whether the last consumer is no longer needed."""
        before = sum(messages for _, messages in self._consumers[:-1])
        return len(self._consumers) > 1 and before >= self._wanted

    @property
    def is_connected(self) -> bool:
        """True if the broker is delivering new messages."""
        return self._is_open and not self._is_stopped

    def __aiter__(self) -> QueueSubscription:
        return self

    async def __anext__(self) -> ReceivedMessage:
        while True:
            while self._received:
                message = self._received.popleft()
                if not message.lost:  # another subscriber has received it by now
                    return message
            if self._end is not None:
                raise self._end
            if self._is_stopped:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()

    def ack(self, message: ReceivedMessage) -> None:
        """See shared.broker.transport.Subscription.

        A second ack, or an ack for a lost message, is ignored.
        """
        held = self._held.pop(message.ack_id, None)
        if held is not None:
            self._settle(held, is_done=True)

    def nack(self, message: ReceivedMessage) -> None:
        held = self._held.get(message.ack_id)
        if held is None or held.timer is not None:
            return
        if self._delayed_return is not None or self._is_stopped:
            self._give_back(message.ack_id)
            return
        self._give_back_later(held)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._consume(), name=f"consume {self._queue}"),
            asyncio.create_task(self._send_settled(), name=f"settle {self._queue}"),
            asyncio.create_task(self._resize(), name=f"resize {self._queue}"),
        ]
        self._tasks[0].add_done_callback(self._note_end)

    async def wait_open(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` until the queue is being consumed or was rejected permanently."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()

    async def stop(self) -> None:
        """Stops receiving: returns unprocessed messages to the broker and ends the iteration.

        Acks continue.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._waits is not None and self._is_open:
            with suppress(*BROKEN), only_own_cancellation():
                # The response arrives after the last delivery, so all messages sent have arrived by
                # then. With aiormq's own limit, acks would go first.
                for tag, _ in list(self._consumers):
                    await self._waits.channel.basic_cancel(tag, timeout=CANCEL_S)
        while self._received:
            self.nack(self._received.popleft())
        for ack_id, held in list(self._held.items()):
            if held.timer is not None:
                self._give_back(ack_id)
        self._arrival.set()

    async def close(self, timeout_s: float) -> None:
        """Returns all held messages and sends the last acks, within `timeout_s`."""
        await self.stop()
        for ack_id in list(self._held):
            self._give_back(ack_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._settled and self._is_open:
                    self._all_settled.clear()
                    await self._all_settled.wait()
                if self._waits is not None:
                    await self._waits.channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _give_back_later(self, held: _Held) -> None:
        message = held.message
        pause_s = min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(30, message.delivery_attempt - 1))
        loop = asyncio.get_running_loop()
        held.timer = loop.call_later(pause_s, self._give_back, message.ack_id)

    def _give_back(self, ack_id: str) -> None:
        held = self._held.pop(ack_id, None)
        if held is not None:
            if held.timer is not None:
                held.timer.cancel()
            self._settle(held, is_done=False)

    def _settle(self, held: _Held, *, is_done: bool) -> None:
        self._settled.append((held, is_done))
        self._settling.set()

    async def _send_settled(self) -> None:
        while True:
            await self._settling.wait()
            self._settling.clear()
            while self._settled:
                settled = list(self._settled)
                await self._send_acks([held for held, is_done in settled if is_done])
                for held, is_done in settled:
                    # Closing the channel already returned its messages.
                    with suppress(*BROKEN):
                        if not is_done:
                            await self._send_back(held)
                for _ in settled:
                    self._settled.popleft()
            self._all_settled.set()

    def _on_channel(self, held: _Held) -> bool:
        return self._waits is not None and self._waits.channel is held.delivered.channel

    async def _send_acks(self, done: list[_Held]) -> None:
        waits, tags = self._waits, [_tag(held) for held in done if self._on_channel(held)]
        if waits is None:
            return
        for tag, multiple in self._runs.join(tags):
            with suppress(*BROKEN):
                acked = waits.channel.basic_ack(tag, multiple=multiple, wait=False)
                await waits.within(self._answer_limit_s, acked)

    async def _send_back(self, held: _Held) -> None:
        waits = self._waits
        if waits is None or not self._on_channel(held):
            return
        if self._delayed_return is not None and not self._is_stopped:
            try:
                await self._delayed_return(held.delivered, held.message.delivery_attempt)
                await self._send_acks([held])
                return
            except PenstockError as error:
                log.warning(
                    "message not returned to the queue yet",
                    extra={"queue": self._queue, "reason": error.message},
                )
                if not self._is_stopped and not waits.channel.is_closed:
                    self._held[held.message.ack_id] = held
                    self._give_back_later(held)
                    return
        # Since RabbitMQ 4.3, a nack does not count as a failed attempt, so a poison message would
        # be redelivered forever.
        rejected = waits.channel.basic_reject(_tag(held), requeue=True, wait=False)
        await waits.within(self._answer_limit_s, rejected)
        # This must happen last, because an ack for a run must not include a message whose rejection
        # has not been written.
        if self._on_channel(held):
            self._runs.settle(_tag(held))

    async def _consume(self) -> None:
        pauses, refusals = backoff(longest_s=MAX_PAUSE_S), 0
        while not self._is_stopped:
            error = await self._consume_on_one_channel()
            self._lose_all()
            if self._is_stopped:
                return
            if error is None:
                pauses, refusals = backoff(longest_s=MAX_PAUSE_S), 0
            elif isinstance(error, BadInput | ConfigurationError):
                refusals += 1
                if refusals >= REFUSALS:
                    self._fail(error)
                    return
            log.info("consumer ended", extra={"queue": self._queue, "reason": str(error or "")})
            await asyncio.sleep(next(pauses))

    async def _consume_on_one_channel(self) -> PenstockError | None:
        """Consumes until the channel closes. Returns the error that kept it from starting."""
        try:
            channel = await self._open_channel()
        except PenstockError as error:
            return error
        canceled = asyncio.Event()
        channel.on_consumer_cancel_callbacks.add(lambda _: canceled.set())
        self._waits, self._runs = ChannelWaits(channel), AckRuns()
        waits = self._waits
        try:
            self._consumers = []
            await self._consume_more(waits, self._max_messages)
        except BROKEN as error:
            if isinstance(error, TimeoutError):
                self._limit_s = longer(self._limit_s)
            await close_channel(channel)
            return translate(error, self._queue)
        self._limit_s = self._answer_limit_s
        self._is_open = True
        self._opened.set()
        self._resizing.set()
        waiting = asyncio.create_task(canceled.wait())
        try:
            await asyncio.wait((waiting, channel.closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            self._is_open = False
        # Closing returns any messages that this consumer still holds.
        await close_channel(channel)
        return None

    async def _consume_more(self, waits: ChannelWaits, messages: int) -> None:
        """Adds a consumer. A prefetch count applies only to consumers started after it is set."""
        await self._measure(waits, messages)
        consuming = waits.channel.basic_consume(self._queue, self._take)
        tag = (await waits.within(self._limit_s, consuming)).consumer_tag or ""
        self._consumers.append((tag, messages))

    async def _resize(self) -> None:
        """Adds or cancels consumers when the limit changes. Measures the round trip."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(MEASURE_EVERY_S):
                    await self._resizing.wait()
            is_asked = self._resizing.is_set()
            self._resizing.clear()
            if self._waits is None or not self.is_connected:
                continue
            # A closed channel is reopened and then resized.
            with suppress(*BROKEN):
                await (self._resize_now if is_asked else self._measure)(self._waits)

    async def _resize_now(self, waits: ChannelWaits) -> None:
        if more := self._lacking():
            await self._consume_more(waits, more)
        while self._spare():
            tag, _ = self._consumers.pop()
            await waits.within(self._limit_s, waits.channel.basic_cancel(tag))

    async def _measure(self, waits: ChannelWaits, messages: int = 1) -> None:
        """Times a round trip: sets later consumers' prefetch count, which the broker confirms."""
        began_s = asyncio.get_running_loop().time()
        await waits.within(self._limit_s, waits.channel.basic_qos(prefetch_count=messages))
        self.round_trip.record(asyncio.get_running_loop().time() - began_s)

    async def _take(self, delivered: DeliveredMessage) -> None:
        self._taken += 1
        now_s = asyncio.get_running_loop().time()
        message = message_of(delivered, str(self._taken), now_s)
        self._held[message.ack_id] = _Held(message, delivered)
        if self._is_stopped:
            self._give_back(message.ack_id)
            return
        self._received.append(message)
        self._arrival.set()

    def _lose_all(self) -> None:
        for held in self._held.values():
            held.message.lost = True
            if held.timer is not None:
                held.timer.cancel()
        self.lost += len(self._held)
        self._held.clear()
        self._received.clear()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end = PenstockError(f"{self._queue}: {error!r}; this is a bug")
            self._end.__cause__ = error
            self._arrival.set()

    def _fail(self, error: PenstockError) -> None:
        is_gone = isinstance(error, BadInput)
        self._end = Unavailable(error.message) if is_gone else error
        self._opened.set()
        self._arrival.set()


def _tag(held: _Held) -> int:
    tag = held.delivered.delivery_tag
    assert tag is not None
    return tag
