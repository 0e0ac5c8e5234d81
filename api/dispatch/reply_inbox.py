"""Where replies come in: an inbox with slots, and the requests that wait on them; between jobs.py and the broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from prometheus_client import Counter

from api.dispatch.inbox_lease import InboxLost, InboxPool, Tenancy, own_inbox
from shared.backoff import backoff
from shared.errors import ConfigurationError, DeadlineExceeded, PenstockError, Unavailable, UndecodableMessage
from shared.messages import Reply, decode_reply
from shared.pubsub.names import inbox_topic_id, slot_subscription_id
from shared.settings import ApiSettings
from shared.transport import Admin, Message, Subscriber, Subscription

log = logging.getLogger(__name__)

SLOTS_GIVEN = Counter(
    "penstock_inbox_slots_given_total",
    "Requests that got a slot, of their own (exclusive) or with others (shared).",
    ["kind"],
)
REPLIES = Counter(
    "penstock_inbox_replies_total",
    "Replies that came in: delivered, duplicate, unknown (late, or of an earlier tenant) or undecodable.",
    ["outcome"],
)
_EXCLUSIVE, _SHARED = SLOTS_GIVEN.labels("exclusive"), SLOTS_GIVEN.labels("shared")
_DELIVERED, _DUPLICATE, _UNKNOWN, _UNDECODABLE = map(
    REPLIES.labels, ("delivered", "duplicate", "unknown", "undecodable")
)
INBOXES_LOST = Counter("penstock_inbox_lost_total", "Inboxes that were lost and replaced.")

START_LIMIT_S = 10.0
SLOT_MAX_MESSAGES = 1000
ACK_DEADLINE_S = 20
ACK_LINGER_S = 8.0
"""Nothing waits for the ack of a reply, and with a slot per request hardly two share a call sooner; as each costs as
much as a publish, the acks of all slots took a fifth of the API. With the 10 s of retries it stays below the lease."""


class Waiter:
    """One part of a request that waits for its reply at `inbox` (a topic id), `slot`."""

    def __init__(self, inbox: str, slot: str) -> None:
        self.inbox = inbox
        self.slot = slot
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Reply] = self._loop.create_future()
        self._woken: asyncio.Future[None] | None = None

    async def reply(self, timeout_s: float) -> Reply:
        """Waits for the reply; may be asked again after DeadlineExceeded.

        Raises:
            DeadlineExceeded: it did not come within `timeout_s`.
            InboxLost: it can't come here any more; the stored result may be there in time.
        """
        if not self._outcome.done():
            self._woken = self._loop.create_future()
            # Cheaper by a turn of the loop than asyncio.wait.
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._woken
            finally:
                timer.cancel()
        if not self._outcome.done():
            raise DeadlineExceeded(f"no reply within {timeout_s:.3f} s")
        return self._outcome.result()

    def settle(self, reply: Reply) -> bool:
        """Hands over the reply; False if there is one already."""
        if self._outcome.done():
            return False
        self._outcome.set_result(reply)
        self._wake()
        return True

    def lose(self, error: InboxLost) -> None:
        """Tells the waiting part that nothing comes any more."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # it may be that nobody is waiting any more
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number
        self.name = str(number)
        self.requests = 0
        self.opened = asyncio.Event()
        self.subscription: Subscription | None = None

    @property
    def is_connected(self) -> bool:
        return self.subscription is not None and self.subscription.is_connected


class _OpenInbox:
    """An inbox as long as it is held: its slots, who uses them, and who waits."""

    def __init__(self, topic_id: str, slots: int) -> None:
        self.topic_id = topic_id
        self.slots = [_Slot(number) for number in range(slots)]
        # Last in, first out: at low load few slots are in use, so the acks of one subscription find company.
        self._free = self.slots[::-1]
        self._slot_of: dict[str, _Slot] = {}
        self._waiters: dict[str, dict[int, Waiter]] = {}

    @property
    def is_connected(self) -> bool:
        return all(slot.is_connected for slot in self.slots)

    def register(self, request_id: str, part: int) -> Waiter:
        """A waiter for a part; all parts of a request stand on one slot."""
        slot = self._slot_of.get(request_id)
        if slot is None:
            slot = self._slot_of[request_id] = self._give_slot()
            self._waiters[request_id] = {}
        waiter = self._waiters[request_id][part] = Waiter(self.topic_id, slot.name)
        return waiter

    def remove(self, request_id: str, part: int) -> None:
        parts = self._waiters[request_id]
        parts.pop(part, None)
        if parts:
            return
        del self._waiters[request_id]
        slot = self._slot_of.pop(request_id)
        slot.requests -= 1
        if slot.requests == 0:
            self._free.append(slot)

    def deliver(self, message: Message) -> None:
        """Hands a reply to who waits for it; any other is of no use to anybody."""
        try:
            waiter = self._waiters[message.attributes["request_id"]][int(message.attributes["part"])]
        except (KeyError, ValueError):
            _UNKNOWN.inc()
            return
        try:
            reply = decode_reply(message.data, message.attributes)
        except UndecodableMessage as error:
            _UNDECODABLE.inc()
            log.warning("reply can't be read", extra={"message_id": message.message_id, "reason": error.message})
            return
        (_DELIVERED if waiter.settle(reply) else _DUPLICATE).inc()

    def lose(self, error: InboxLost) -> None:
        for parts in self._waiters.values():
            for waiter in parts.values():
                waiter.lose(error)

    def _give_slot(self) -> _Slot:
        if self._free:
            _EXCLUSIVE.inc()
            slot = self._free.pop()
        else:
            _SHARED.inc()
            slot = min(self.slots, key=lambda slot: slot.requests)
        slot.requests += 1
        return slot


class ReplyInbox:
    """This instance's inbox: one leased from the pool, or its own; replaced whenever it is lost.

    Args:
        settings: inbox_pool, inbox_first, inbox_lease_s, reply_slots, redis_url.
        subscriber: opens the slots.
        admin: makes an inbox where there is no pool or it is empty.
        instance: id of this instance; letters, digits and dashes.
    """

    def __init__(self, settings: ApiSettings, subscriber: Subscriber, admin: Admin, instance: str) -> None:
        self._settings = settings
        self._subscriber = subscriber
        self._admin = admin
        self._instance = instance
        self._open: _OpenInbox | None = None
        self._holding: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Opens the inbox; goes on without it, not ready, if the broker or the pool can't give one soon.

        Raises:
            ConfigurationError: the broker refuses us.
        """
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold_for_ever(opened))
        self._holding.add_done_callback(_report)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await opened
        except (TimeoutError, Unavailable) as error:
            log.warning("no inbox yet", extra={"reason": repr(error)})
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """Whether replies can come in: an inbox is held and all its slots are connected."""
        return self._open is not None and self._open.is_connected

    @contextmanager
    def waiter(self, request_id: str, part: int) -> Iterator[Waiter]:
        """Registers a waiter for as long as the block runs.

        Raises:
            Unavailable: there is no inbox now.
        """
        inbox = self._open
        if inbox is None:
            raise Unavailable("this instance has no reply inbox now")
        waiter = inbox.register(request_id, part)
        try:
            yield waiter
        finally:
            inbox.remove(request_id, part)

    async def _hold_for_ever(self, opened: asyncio.Future[None]) -> None:
        pauses = backoff()
        while True:
            try:
                async with AsyncExitStack() as stack:
                    tenancy = await self._enter_tenancy(stack)
                    pauses = backoff()
                    await self._hold(tenancy, opened)
            except PenstockError as error:
                log.warning("no inbox held", extra={"reason": error.message})
                if not opened.done():
                    opened.set_exception(error)
            await asyncio.sleep(next(pauses))

    async def _enter_tenancy(self, stack: AsyncExitStack) -> Tenancy:
        settings = self._settings
        if settings.inbox_pool == 0:
            return await stack.enter_async_context(own_inbox(self._admin, settings.reply_slots, self._instance))
        pool = InboxPool(
            settings.redis_url, settings.inbox_first, settings.inbox_pool, settings.inbox_lease_s, self._instance
        )
        try:
            return await stack.enter_async_context(pool.lease())
        except Unavailable as error:
            log.warning("no inbox from the pool, making one", extra={"reason": error.message})
        try:
            return await stack.enter_async_context(own_inbox(self._admin, settings.reply_slots, self._instance))
        except ConfigurationError as error:
            # In the cloud the API has no right to make one; the pool may have room again soon.
            raise Unavailable(f"no inbox from the pool, and none may be made: {error.message}") from error

    async def _hold(self, tenancy: Tenancy, opened: asyncio.Future[None]) -> None:
        """Receives on every slot until the inbox is lost, which raises, or until canceled."""
        inbox = _OpenInbox(inbox_topic_id(tenancy.inbox), self._settings.reply_slots)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(tenancy.keep())
                for slot in inbox.slots:
                    group.create_task(self._receive(inbox, slot, slot_subscription_id(tenancy.inbox, slot.number)))
                with self._opened(inbox):
                    for slot in inbox.slots:
                        await slot.opened.wait()
                    self._open = inbox
                    if not opened.done():
                        opened.set_result(None)
                    await asyncio.Event().wait()  # a failing task of the group ends it
        except ExceptionGroup as failures:
            INBOXES_LOST.inc()
            raise failures.exceptions[0] from failures

    @contextmanager
    def _opened(self, inbox: _OpenInbox) -> Iterator[None]:
        try:
            yield
        finally:
            # Before the streams are closed, which takes a while: nobody may be sent to this inbox any more.
            self._open = None
            inbox.lose(InboxLost("the reply inbox was lost"))

    async def _receive(self, inbox: _OpenInbox, slot: _Slot, subscription_id: str) -> None:
        async with self._subscriber.subscribe(
            subscription_id, max_messages=SLOT_MAX_MESSAGES, ack_deadline_s=ACK_DEADLINE_S, ack_linger_s=ACK_LINGER_S
        ) as subscription:
            slot.subscription = subscription
            slot.opened.set()
            async for message in subscription:
                inbox.deliver(message)
                subscription.ack(message)


def _report(holding: asyncio.Task[None]) -> None:
    if not holding.cancelled():
        log.error("the inbox is no longer kept; this is a bug", exc_info=holding.exception())
