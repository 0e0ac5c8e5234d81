"""Acks and nacks in batches, and the leases of the messages that are held."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from typing import cast

from grpc import aio

from shared.backoff import jittered
from shared.pubsub.channel import (
    AcknowledgeRequest,
    Method,
    ModifyAckDeadlineRequest,
    RawMessage,
)
from shared.transport import ReceivedMessage, SmoothedDuration

log = logging.getLogger(__name__)

REQUEST_LIMIT_IDS = 1000
REQUEST_LIMIT_BYTES = 500_000
"""Below the 512 KiB that a request with ack ids may have:
https://docs.cloud.google.com/pubsub/quotas#resource_limits
"""
QUEUE_LIMIT_IDS = 50_000
MAX_LEASE_S = 3600.0
"""After this a message counts as lost however alive its holder is, as in Google's own clients."""
EXTENSION_PART = 0.7
"""The share of the ack deadline that an extension lasts. Two thirds of it are for pauses of the
loop and of the network, and for another try.
"""
LOOKS_AN_EXTENSION = 12
REQUESTS_IN_FLIGHT = 4
"""With one, acks at a distance would wait for those before them, for up to a round trip."""
RETRY_S = 10.0
"""The time that a batch of acks is retried. After that its messages come again (at-least-once
delivery).
"""


class AckQueue:
    """Sends the acks and nacks of one subscription in the background.

    The first one is sent at once. Those that come while it is in flight follow together. With
    `linger_s` above zero, an ack that is not urgent waits for that long, or until `linger_messages`
    of them have come, and REQUESTS_IN_FLIGHT may be on their way.
    """

    def __init__(
        self,
        path: str,
        acknowledge: Method,
        modify: Method,
        *,
        linger_s: float = 0.0,
        linger_messages: int = 100,
    ) -> None:
        self._path = path
        self._acknowledge = acknowledge
        self._modify = modify
        self._linger_s = linger_s
        self._linger_messages = linger_messages
        self._acks: deque[str] = deque()
        self._nacks: deque[str] = deque()
        # Acks that wait for company are many, and the messages behind them wait for the broker.
        self._requests_in_flight = REQUESTS_IN_FLIGHT if linger_s else 1
        self._sending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.failed = 0
        """Acks and nacks that could not be sent: their messages come again."""
        self.round_trip = SmoothedDuration()
        """The time that the broker takes to answer."""

    def __len__(self) -> int:
        return len(self._acks) + len(self._nacks)

    def ack(self, ack_id: str) -> None:
        """Queues an ack."""
        if self._is_closed or len(self._acks) >= QUEUE_LIMIT_IDS:
            self.failed += 1
            return
        self._acks.append(ack_id)
        if self._linger_s == 0 or len(self._acks) >= self._linger_messages:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                jittered(self._linger_s), self._start
            )

    def nack(self, ack_id: str) -> None:
        """Queues a nack, which does not linger."""
        self._nacks.append(ack_id)
        self._start()

    async def flush(self, timeout_s: float) -> None:
        """Sends everything queued, and waits for it at most `timeout_s`."""
        self._start()
        if self._sending:
            await asyncio.wait(self._sending, timeout=timeout_s)

    async def close(self) -> None:
        """Ends the requests in flight. Messages whose acks were not sent come again elsewhere."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._sending) < self._requests_in_flight and len(self):
            self._sending.add(asyncio.create_task(self._send()))

    async def _send(self) -> None:
        try:
            # One turn later: acks given in the same turn of the loop share a request.
            await asyncio.sleep(0)
            while self._acks or self._nacks:
                await self._send_some()
        finally:
            # In the same turn as the last check of the queues. An ack in between would never be
            # sent.
            self._sending.discard(cast(asyncio.Task[None], asyncio.current_task()))

    async def _send_some(self) -> None:
        if self._nacks:
            ids = _take(self._nacks)
            request = ModifyAckDeadlineRequest(
                subscription=self._path, ack_ids=ids, ack_deadline_seconds=0
            )
            await self._call(self._modify, request, len(ids))
        if self._acks:
            ids = _take(self._acks)
            await self._call(
                self._acknowledge,
                AcknowledgeRequest(subscription=self._path, ack_ids=ids),
                len(ids),
            )

    async def _call(self, method: Method, request: RawMessage, messages: int) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            await method.until(request, began_s + RETRY_S)
            self.round_trip.record(asyncio.get_running_loop().time() - began_s)
        except aio.AioRpcError as error:
            self.failed += messages
            log.warning(
                "acks lost",
                extra={"subscription": self._path, "acks": messages, "code": error.code().name},
            )


class Leases:
    """Keeps the leases of all held messages.

    A message is delivered with a lease of `ack_deadline_s`, of which the service allows no less
    than 10 s. Extensions may be shorter (API comments of ModifyAckDeadline: 0 to 600 s), so those
    that are held for longer than a moment come back sooner from a holder that died.
    """

    def __init__(self, path: str, modify: Method, ack_deadline_s: int) -> None:
        self._path = path
        self._modify = modify
        self._ack_deadline_s = ack_deadline_s
        self._extension_s = max(1, int(ack_deadline_s * EXTENSION_PART))
        self._held: dict[str, _Lease] = {}
        self.lost = 0
        """Messages whose lease expired while held.

        They are marked `lost` and will be delivered again.
        """

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: ReceivedMessage) -> None:
        """Keeps the lease of `message`, which was received just now."""
        since_s = message.received_at_s
        self._held[message.ack_id] = _Lease(message, since_s, since_s + self._ack_deadline_s)

    def release(self, message: ReceivedMessage) -> bool:
        """Ends the lease. Returns False if it was not held."""
        return self._held.pop(message.ack_id, None) is not None

    def release_all(self) -> list[str]:
        """Stops keeping every lease and returns the ack ids."""
        ids = list(self._held)
        self._held.clear()
        return ids

    async def keep(self) -> None:
        """Extends leases until canceled: the first time soon, then every third of an extension."""
        period_s = self._extension_s / LOOKS_AN_EXTENSION
        while True:
            await asyncio.sleep(jittered(period_s))
            self._drop_lost()
            # A batch that can't get through must not hold up the others past their own lease.
            await asyncio.gather(*(self._extend(ids, 4 * period_s) for ids in self._due()))

    def _due(self) -> Iterator[list[str]]:
        soon_s = asyncio.get_running_loop().time() + self._extension_s * 2 / 3
        due = deque(
            ack_id
            for ack_id, lease in self._held.items()
            if lease.until_s < soon_s or not lease.is_extended
        )
        while due:
            yield _take(due)

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
    """A held message, since and until when (loop time, seconds)."""

    __slots__ = ("is_extended", "message", "since_s", "until_s")

    def __init__(self, message: ReceivedMessage, since_s: float, until_s: float) -> None:
        self.message = message
        self.since_s = since_s
        self.until_s = until_s
        self.is_extended = False


def _take(ids: deque[str]) -> list[str]:
    taken: list[str] = []
    size_bytes = 0
    while ids and len(taken) < REQUEST_LIMIT_IDS:
        size_bytes += len(ids[0]) + 4
        if taken and size_bytes > REQUEST_LIMIT_BYTES:
            break
        taken.append(ids.popleft())
    return taken
