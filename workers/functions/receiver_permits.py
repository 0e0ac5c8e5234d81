"""Limits concurrent webhook deliveries, so that no tenant's receivers delay another's deliveries.

All tenants share one subscription, and the broker limits how many messages it sends us at a time. A
receiver that doesn't respond ties up its message for 20 s. Each tenant may therefore have only a
limited number of posts in flight, and even fewer to receivers not known to respond quickly. Other
messages are handed back immediately, and the broker redelivers them after its backoff. This does
not count as an attempt, so there is no row, no entry in the webhook log, and no progress toward
giving up on the event.

A receiver that didn't respond is left alone for a pause that doubles each time, and then receives
one message at a time until it responds. Once it responds quickly again, it gets all waiting
messages as the broker delivers them.

The state is local to the process. No other process needs it, because it only limits the messages
held by this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from shared.errors import Overloaded, Unavailable

MAX_OF_TENANT = 8
"""Maximum concurrent deliveries per tenant. The embedded Pub/Sub pushes 32 messages at a time."""
MAX_OF_RECEIVER = 6
"""Maximum concurrent deliveries per receiver, so that a tenant's other receivers have room."""
MAX_UNPROVEN = 4
"""Maximum concurrent deliveries per tenant to receivers not known to respond quickly.

Halved for each failure to respond since the receiver's last response, down to one.
"""
MAX_WAITING = 8
"""Maximum number of deliveries per tenant that may wait for a quick receiver."""
WAIT_LIMIT_S = 0.25
"""How long these deliveries wait, so that a burst to a quick receiver isn't handed back."""
QUICK_S = 1.0
"""A receiver that responds within this time counts as quick."""
MIN_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
"""How long a receiver is left alone after failing to respond.

With these pauses, an unresponsive receiver occupies a slot for a quarter of the time.
"""
MAX_RECEIVERS = 10_000
"""Maximum number of remembered receivers. The least recently used receivers are forgotten."""


class ReceiverBusy(Overloaded):
    """The tenant or the receiver already has enough deliveries for now."""


class ReceiverKey(NamedTuple):
    """A receiver as used by one particular tenant.

    For other tenants, the same host is a different receiver.
    """

    tenant: str
    origin: str


@dataclass(slots=True)
class _Receiver:
    running: int = 0
    is_quick: bool = False
    unanswered: int = 0
    """Consecutive deliveries that got no response."""
    alone_until_s: float = 0.0


@dataclass(slots=True)
class _Tenant:
    running: int = 0
    unproven: int = 0
    unanswered: int = 0
    """Consecutive deliveries to the tenant's unproven receivers that got no response."""
    waiting: int = 0
    freed: asyncio.Event = field(default_factory=asyncio.Event)


class Turn:
    """One delivery's turn. Rates the receiver based on how long the post takes."""

    def __init__(
        self,
        owner: _Tenant,
        receiver: _Receiver,
        clock: Callable[[], float],
        *,
        is_unproven: bool,
    ) -> None:
        self._tenant = owner
        self._receiver = receiver
        self._clock = clock
        self._is_unproven = is_unproven

    @contextmanager
    def posting(self) -> Iterator[None]:
        """A context for posting, which raises Unavailable if there is no response."""
        began_s = self._clock()
        try:
            yield
        except Unavailable:
            # A receiver that immediately refuses connections doesn't delay anyone.
            self._judge(self._clock() - began_s, is_answered=self._clock() - began_s < QUICK_S)
            raise
        self._judge(self._clock() - began_s, is_answered=True)

    def _judge(self, took_s: float, *, is_answered: bool) -> None:
        receiver, owner = self._receiver, self._tenant
        receiver.is_quick = took_s < QUICK_S
        if is_answered:
            receiver.unanswered = owner.unanswered = 0
            return
        receiver.unanswered += 1
        owner.unanswered += self._is_unproven
        pause_s = min(MIN_PAUSE_S * 2.0 ** min(receiver.unanswered - 1, 30), MAX_PAUSE_S)
        receiver.alone_until_s = self._clock() + pause_s


class ReceiverPermits:
    """Deliveries in progress, by receiver.

    Args:
        wait_limit_s: how long a delivery to a quick receiver waits for its turn.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wait_limit_s: float = WAIT_LIMIT_S
    ) -> None:
        self._clock = clock
        self._wait_limit_s = wait_limit_s
        self._tenants: dict[str, _Tenant] = {}
        self._receivers: OrderedDict[ReceiverKey, _Receiver] = OrderedDict()

    @asynccontextmanager
    async def hold_turn(self, tenant: str, url: str) -> AsyncIterator[Turn]:
        """A context for delivering to a tenant's receiver.

        Raises:
            ReceiverBusy: there is no room now. The broker should redeliver the message later.
        """
        key = ReceiverKey(tenant, _origin(url))
        owner, receiver = self._tenants.setdefault(tenant, _Tenant()), self._receiver(key)
        try:
            if not self._has_room(owner, receiver):
                await self._wait(owner, receiver)
            is_unproven = not receiver.is_quick
            owner.running += 1
            owner.unproven += is_unproven
            receiver.running += 1
            try:
                yield Turn(owner, receiver, self._clock, is_unproven=is_unproven)
            finally:
                owner.running -= 1
                owner.unproven -= is_unproven
                receiver.running -= 1
                owner.freed.set()
        finally:
            self._tidy(tenant)

    def _receiver(self, key: ReceiverKey) -> _Receiver:
        receiver = self._receivers.setdefault(key, _Receiver())
        self._receivers.move_to_end(key)
        if len(self._receivers) > MAX_RECEIVERS:
            self._receivers.popitem(last=False)
        return receiver

    def _has_room(self, owner: _Tenant, receiver: _Receiver) -> bool:
        if owner.running >= MAX_OF_TENANT or receiver.running >= MAX_OF_RECEIVER:
            return False
        if receiver.unanswered and (receiver.running or self._clock() < receiver.alone_until_s):
            return False
        if receiver.is_quick:
            return True
        return owner.unproven < max(1, MAX_UNPROVEN >> min(owner.unanswered, MAX_UNPROVEN))

    async def _wait(self, owner: _Tenant, receiver: _Receiver) -> None:
        """Waits for room, but gives up if it takes too long."""
        if owner.unanswered or receiver.unanswered or owner.waiting >= MAX_WAITING:
            raise ReceiverBusy
        owner.waiting += 1
        try:
            async with asyncio.timeout(self._wait_limit_s):
                while not self._has_room(owner, receiver):
                    owner.freed.clear()
                    await owner.freed.wait()
        except TimeoutError:
            raise ReceiverBusy from None
        finally:
            owner.waiting -= 1

    def _tidy(self, tenant: str) -> None:
        owner = self._tenants.get(tenant)
        if owner and not (owner.running or owner.waiting or owner.unanswered):
            del self._tenants[tenant]


def _origin(url: str) -> str:
    """Returns scheme, host, and port, because a tenant may use a different path per prediction."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].lower()}"
