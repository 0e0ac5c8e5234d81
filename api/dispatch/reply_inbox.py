"""Receives replies: the inbox of this instance, its slots, and the jobs that wait on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from prometheus_client import Counter

from api.dispatch.inbox_lease import InboxLease, InboxLost, InboxPool, own_inbox
from shared.backoff import backoff
from shared.errors import (
    ConfigurationError,
    DeadlineExceeded,
    PenstockError,
    Unavailable,
    UndecodableMessage,
)
from shared.message_encoding import decode_reply
from shared.messages import Reply
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
    "Replies that came in: delivered, duplicate, unknown (late, or of an earlier holder) "
    "or undecodable.",
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
"""Acks linger this long, because an ack call costs as much as a publish.

Without this pause acks took a fifth of the API's CPU time. No request waits for the ack of a reply.
With the 10 s of retries it stays below the lease.
"""


class PendingReply:
    """Waits for the reply of one job, which arrives at `inbox` (a topic id), `slot`."""

    def __init__(self, inbox: str, slot: str) -> None:
        self.inbox = inbox
        self.slot = slot
        self._loop = asyncio.get_running_loop()
        self._reply: asyncio.Future[Reply] = self._loop.create_future()
        self._woken: asyncio.Future[None] | None = None

    async def reply(self, timeout_s: float) -> Reply:
        """Waits for the reply. May be called again after DeadlineExceeded.

        Raises:
            DeadlineExceeded: no reply within `timeout_s`.
            InboxLost: the inbox is gone. The record may still get the result in time.
        """
        if not self._reply.done():
            self._woken = self._loop.create_future()
            # Saves one iteration of the event loop compared to asyncio.wait.
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._woken
            finally:
                timer.cancel()
        if not self._reply.done():
            raise DeadlineExceeded(f"no reply within {timeout_s:.3f} s")
        return self._reply.result()

    def deliver(self, reply: Reply) -> bool:
        """Delivers the reply. Returns False for a duplicate."""
        if self._reply.done():
            return False
        self._reply.set_result(reply)
        self._wake()
        return True

    def fail(self, error: InboxLost) -> None:
        """Ends the wait with `error`."""
        if not self._reply.done():
            self._reply.set_exception(error)
            self._reply.exception()  # marks it as retrieved, in case no task waits
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
    """An inbox while this instance holds it: its slots, their requests, and the pending replies."""

    def __init__(self, topic_id: str, slots: int) -> None:
        self.topic_id = topic_id
        self.slots = [_Slot(number) for number in range(slots)]
        # Last in, first out: at low load few slots are in use, so acks share calls.
        self._free = self.slots[::-1]
        self._slot_of: dict[str, _Slot] = {}
        self._pending: dict[str, dict[int, PendingReply]] = {}

    @property
    def is_connected(self) -> bool:
        return all(slot.is_connected for slot in self.slots)

    def register(self, request_id: str, job_index: int) -> PendingReply:
        """Registers a job. All jobs of a request use the same slot."""
        slot = self._slot_of.get(request_id)
        if slot is None:
            slot = self._slot_of[request_id] = self._choose_slot()
            self._pending[request_id] = {}
        pending = self._pending[request_id][job_index] = PendingReply(self.topic_id, slot.name)
        return pending

    def remove(self, request_id: str, job_index: int) -> None:
        jobs = self._pending[request_id]
        jobs.pop(job_index, None)
        if jobs:
            return
        del self._pending[request_id]
        slot = self._slot_of.pop(request_id)
        slot.requests -= 1
        if slot.requests == 0:
            self._free.append(slot)

    def deliver(self, message: Message) -> None:
        """Delivers a reply to its job. Counts and drops replies of unknown jobs."""
        try:
            pending = self._pending[message.attributes["request_id"]][
                int(message.attributes["part"])
            ]
        except (KeyError, ValueError):
            _UNKNOWN.inc()
            return
        try:
            reply = decode_reply(message.data, message.attributes)
        except UndecodableMessage as error:
            _UNDECODABLE.inc()
            log.warning(
                "reply can't be read",
                extra={"message_id": message.message_id, "reason": error.message},
            )
            return
        (_DELIVERED if pending.deliver(reply) else _DUPLICATE).inc()

    def fail(self, error: InboxLost) -> None:
        for jobs in self._pending.values():
            for pending in jobs.values():
                pending.fail(error)

    def _choose_slot(self) -> _Slot:
        if self._free:
            _EXCLUSIVE.inc()
            slot = self._free.pop()
        else:
            _SHARED.inc()
            slot = min(self.slots, key=lambda slot: slot.requests)
        slot.requests += 1
        return slot


class ReplyInbox:
    """This instance's inbox, leased from the pool or created. It is replaced whenever it is lost.

    Args:
        settings: inbox_pool, inbox_first, inbox_lease_s, reply_slots, redis_url.
        subscriber: opens the slots.
        admin: creates an inbox if there is no pool or no free inbox in it.
        instance: id of this instance (letters, digits and dashes).
    """

    def __init__(
        self, settings: ApiSettings, subscriber: Subscriber, admin: Admin, instance: str
    ) -> None:
        self._settings = settings
        self._subscriber = subscriber
        self._admin = admin
        self._instance = instance
        self._open: _OpenInbox | None = None
        self._holding: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Opens the inbox.

        Continues without one (not ready) if none can be had within START_LIMIT_S.

        Raises:
            ConfigurationError: the broker denies access.
        """
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold_forever(opened))
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """Whether replies can arrive: an inbox is held and all of its slots are connected."""
        return self._open is not None and self._open.is_connected

    @contextmanager
    def waiter(self, request_id: str, job_index: int) -> Iterator[PendingReply]:
        """Registers a job while the block runs.

        Raises:
            Unavailable: this instance has no inbox at the moment.
        """
        inbox = self._open
        if inbox is None:
            raise Unavailable("this instance has no reply inbox now")
        pending = inbox.register(request_id, job_index)
        try:
            yield pending
        finally:
            inbox.remove(request_id, job_index)

    async def _hold_forever(self, opened: asyncio.Future[None]) -> None:
        pauses = backoff()
        while True:
            try:
                async with AsyncExitStack() as stack:
                    lease = await self._acquire(stack)
                    pauses = backoff()
                    await self._hold(lease, opened)
            except PenstockError as error:
                log.warning("no inbox held", extra={"reason": error.message})
                if not opened.done():
                    opened.set_exception(error)
            await asyncio.sleep(next(pauses))

    async def _acquire(self, stack: AsyncExitStack) -> InboxLease:
        settings = self._settings
        if settings.inbox_pool == 0:
            return await stack.enter_async_context(
                own_inbox(self._admin, settings.reply_slots, self._instance)
            )
        pool = InboxPool(
            settings.redis_url,
            settings.inbox_first,
            settings.inbox_pool,
            settings.inbox_lease_s,
            self._instance,
        )
        try:
            return await stack.enter_async_context(pool.lease())
        except Unavailable as error:
            log.warning("no inbox from the pool, making one", extra={"reason": error.message})
        try:
            return await stack.enter_async_context(
                own_inbox(self._admin, settings.reply_slots, self._instance)
            )
        except ConfigurationError as error:
            # In the cloud the API may not create inboxes. The pool may have a free one soon.
            raise Unavailable(
                f"no inbox from the pool, and none may be made: {error.message}"
            ) from error

    async def _hold(self, lease: InboxLease, opened: asyncio.Future[None]) -> None:
        """Receives on every slot until canceled, or until the inbox is lost, which raises."""
        inbox = _OpenInbox(inbox_topic_id(lease.inbox), self._settings.reply_slots)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(lease.keep())
                for slot in inbox.slots:
                    group.create_task(
                        self._receive(inbox, slot, slot_subscription_id(lease.inbox, slot.number))
                    )
                with self._closing(inbox):
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
    def _closing(self, inbox: _OpenInbox) -> Iterator[None]:
        try:
            yield
        finally:
            # Before the streams are closed, which takes a while: no new job may use this inbox.
            self._open = None
            inbox.fail(InboxLost("the reply inbox was lost"))

    async def _receive(self, inbox: _OpenInbox, slot: _Slot, subscription_id: str) -> None:
        async with self._subscriber.subscribe(
            subscription_id,
            max_messages=SLOT_MAX_MESSAGES,
            ack_deadline_s=ACK_DEADLINE_S,
            ack_linger_s=ACK_LINGER_S,
        ) as subscription:
            slot.subscription = subscription
            slot.opened.set()
            async for message in subscription:
                inbox.deliver(message)
                subscription.ack(message)


def _report(holding: asyncio.Task[None]) -> None:
    if not holding.cancelled():
        log.error(
            "the task that holds the inbox ended; this is a bug", exc_info=holding.exception()
        )
