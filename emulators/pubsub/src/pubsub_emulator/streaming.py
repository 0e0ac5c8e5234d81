"""The two calls that wait, StreamingPull and Pull: a layer between gRPC and a subscription.

A stream has a reading task, which applies acks and modacks as they arrive, and a writing loop,
which takes all ready messages whenever the last write has finished. Nothing polls, and nothing is
queued in between.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.errors import InvalidArgument, PubsubError
from pubsub_emulator.names import check_range
from pubsub_emulator.protos import StreamingPullRequest, StreamingPullResponse
from pubsub_emulator.state.ack_calls import (
    acknowledge,
    check_ack_request_size,
    modify_ack_deadline,
)
from pubsub_emulator.state.consumers import Consumer
from pubsub_emulator.state.journal import ChangeJournal
from pubsub_emulator.state.subscription import SubscriptionState

PULL_WAIT_S = 20.0
# A waiting pull returns an empty response this long before its caller would give up.
PULL_MARGIN_S = 0.5


async def pull(broker: Broker, request: Any, time_left_s: float | None) -> bytes:
    """Respond to a Pull with the ready messages, or wait until there is one.

    It waits up to 20 s or until the caller's deadline, and may return no messages.

    Args:
        request: a `PullRequest`.
        time_left_s: seconds until the caller gives up. None: it never does.

    Returns:
        The serialized `PullResponse`.

    Raises:
        PubsubError: the request was rejected, or the subscription was deleted or detached.
    """
    subscription = broker.pullable(request.subscription)
    check_range("max_messages", request.max_messages, 1, float("inf"))
    woken = asyncio.Event()
    consumer = Consumer(
        woken.set, subscription.settings.ack_deadline_s, max_messages=request.max_messages
    )
    wait_s = PULL_WAIT_S if time_left_s is None else min(PULL_WAIT_S, time_left_s - PULL_MARGIN_S)
    try:
        deliveries = subscription.backlog.take(consumer)
        if not deliveries and not request.return_immediately:
            subscription.join(consumer)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s)):
                    while not deliveries and consumer.ended is None:
                        await woken.wait()
                        woken.clear()
                        deliveries = subscription.backlog.take(consumer)
    finally:
        # Also runs if the caller hangs up, because the next waiting consumer must then be woken.
        subscription.leave(consumer)
    if consumer.ended is not None:
        raise consumer.ended
    return subscription.backlog.serialized(deliveries)


async def streaming_pull(
    broker: Broker, requests: AsyncIterator[StreamingPullRequest], context: Any
) -> None:
    """Serve a StreamingPull until the client half-closes or disconnects.

    Args:
        requests: the client's side of the stream.
        context: the call, to which responses are written.

    Raises:
        PubsubError: the request was rejected, the subscription was deleted or detached, or the
            server is stopping.
    """
    first = await anext(requests, None)
    if first is None:
        return
    subscription = broker.pullable(first.subscription)
    check_range("stream_ack_deadline_seconds", first.stream_ack_deadline_seconds, 10, 600)
    stream = _Stream(subscription, broker.journal, first)
    subscription.join(stream.consumer)
    reader = asyncio.create_task(stream.read(requests))
    try:
        await stream.write(context)
    finally:
        subscription.leave(stream.consumer)
        reader.cancel()
        await asyncio.wait([reader])  # unlike `await reader`, only raises if this call is canceled
        if not reader.cancelled():
            reader.result()


class _Stream:
    """An open StreamingPull."""

    def __init__(
        self, subscription: SubscriptionState, journal: ChangeJournal, first: StreamingPullRequest
    ) -> None:
        self._subscription = subscription
        self._journal = journal
        self._woken = asyncio.Event()
        self._failure: PubsubError | None = None
        self._is_half_closed = False
        self._wants_pongs = first.protocol_version >= 1
        self._owes_pong = False
        self._acked: tuple[list[str], list[str]] = ([], [])
        self._modified: tuple[list[str], list[str]] = ([], [])
        self.consumer = Consumer(
            self._woken.set,
            first.stream_ack_deadline_seconds,
            first.max_outstanding_messages,
            first.max_outstanding_bytes,
        )
        self._apply_outcomes(first)

    async def read(self, requests: AsyncIterator[StreamingPullRequest]) -> None:
        """Process the client's requests until it half-closes."""
        try:
            async for request in requests:
                self._apply(request)
        except PubsubError as error:
            self._failure = error
        else:
            self._is_half_closed = True
        self._woken.set()

    async def write(self, context: Any) -> None:
        """Send messages whenever some are ready, until the client disconnects."""
        while True:
            self._woken.clear()
            failure = self._failure or self.consumer.ended
            if failure is not None:
                raise failure
            confirms_acks = any(self._acked)
            response = self._next_response()
            if response is not None:
                if confirms_acks:
                    # A confirmed message must never be redelivered, no matter what happens to this
                    # process.
                    await self._journal.acks_committed()
                await context.write(response)
            elif self._is_half_closed:
                return
            else:
                await self._woken.wait()

    def _apply(self, request: StreamingPullRequest) -> None:
        if request.subscription:
            raise InvalidArgument(
                "The subscription must be set only on the initial request of a stream."
            )
        if (
            request.max_outstanding_messages
            or request.max_outstanding_bytes
            or request.protocol_version
        ):
            raise InvalidArgument(
                "max_outstanding_messages, max_outstanding_bytes and protocol_version can be "
                "set only on the initial request of a stream."
            )
        if request.stream_ack_deadline_seconds:
            check_range("stream_ack_deadline_seconds", request.stream_ack_deadline_seconds, 10, 600)
            self.consumer.ack_deadline_s = request.stream_ack_deadline_seconds
        self._subscription.touch()
        self._apply_outcomes(request)
        # Clients of protocol version 1 consider a stream dead if their empty pings get no response
        # for 15 s.
        if self._wants_pongs and not request.ack_ids and not request.modify_deadline_ack_ids:
            self._owes_pong = True
            self._woken.set()

    def _apply_outcomes(self, request: StreamingPullRequest) -> None:
        check_ack_request_size(request)
        if request.ack_ids:
            self._confirm(
                self._acked,
                request.ack_ids,
                acknowledge(self._subscription.backlog, request.ack_ids),
            )
        ack_ids, deadlines_s = request.modify_deadline_ack_ids, request.modify_deadline_seconds
        if len(ack_ids) != len(deadlines_s):
            raise InvalidArgument(
                "modify_deadline_ack_ids and modify_deadline_seconds must have the same size, "
                f"got {len(ack_ids)} and {len(deadlines_s)}."
            )
        if ack_ids:
            for deadline_s in deadlines_s:
                check_range("modify_deadline_seconds", deadline_s, 0, 600)
            self._confirm(
                self._modified,
                ack_ids,
                modify_ack_deadline(self._subscription.backlog, ack_ids, deadlines_s),
            )

    def _confirm(
        self, confirmed: tuple[list[str], list[str]], ack_ids: Any, refused: dict[str, str]
    ) -> None:
        # Only exactly-once delivery confirms acks; otherwise, acks are best-effort and get no
        # response.
        if self._subscription.settings.exactly_once:
            for ack_id in ack_ids:
                confirmed[ack_id in refused].append(ack_id)
            self._woken.set()

    def _next_response(self) -> bytes | None:
        """Serialize the pending confirmations. None if there are no messages."""
        backlog, settings = self._subscription.backlog, self._subscription.settings
        deliveries = [] if self._is_half_closed else backlog.take(self.consumer)
        is_due = self._owes_pong or any(self._acked) or any(self._modified)
        if not deliveries and not is_due:
            return None
        if not deliveries:
            backlog.busy(self.consumer)
        response = StreamingPullResponse()
        if is_due:
            self._add_confirmations(response)
        if settings.exactly_once or settings.is_ordered:
            response.subscription_properties.exactly_once_delivery_enabled = settings.exactly_once
            response.subscription_properties.message_ordering_enabled = settings.is_ordered
        rest: bytes = response.SerializeToString()
        return backlog.serialized(deliveries) + rest

    def _add_confirmations(self, response: StreamingPullResponse) -> None:
        if any(self._acked):
            response.acknowledge_confirmation.ack_ids.extend(self._acked[0])
            response.acknowledge_confirmation.invalid_ack_ids.extend(self._acked[1])
        if any(self._modified):
            response.modify_ack_deadline_confirmation.ack_ids.extend(self._modified[0])
            response.modify_ack_deadline_confirmation.invalid_ack_ids.extend(self._modified[1])
        self._acked, self._modified, self._owes_pong = ([], []), ([], []), False
