"""Holds the inbox of this instance: leases it, receives on both topics, and replaces a lost one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from prometheus_client import Counter

from api.dispatch.inbox_lease import InboxLease, InboxLost, InboxPool, own_inbox
from api.dispatch.open_inbox import OpenInbox, PendingReply, ReplySubscription
from shared.backoff import backoff
from shared.catalog_entry import Replies
from shared.errors import ConfigurationError, PenstockError, Unavailable
from shared.settings import ApiSettings
from shared.transport import Admin, Subscriber

log = logging.getLogger(__name__)

INBOXES_LOST = Counter("penstock_inbox_lost_total", "Inboxes that were lost and replaced.")

START_LIMIT_S = 10.0
MAX_MESSAGES = 1000
"""In hand, of each subscription. A quarter of them ends the pause of acks."""
ACK_DEADLINE_S = 20
ACK_LINGER_S = 8.0
"""Acks linger this long, because an ack call costs as much as a publish.

Without this pause acks took a fifth of the API's CPU time. No request waits for the ack of a reply.
With the 10 s of retries it stays below the lease.
"""


class ReplyInbox:
    """This instance's inbox, leased from the pool or created. It is replaced whenever it is lost.

    Args:
        settings: inbox_pool, inbox_first, inbox_lease_s, reply_slots, redis_url.
        subscriber: opens the subscriptions.
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
        self._open: OpenInbox | None = None
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
        """Whether replies can arrive: an inbox is held and all its subscriptions are connected."""
        return self._open is not None and self._open.is_connected

    @contextmanager
    def waiter(self, request_id: str, job_index: int, replies: Replies) -> Iterator[PendingReply]:
        """Registers a job while the block runs. `replies` says which topic its reply comes to.

        Raises:
            Unavailable: this instance has no inbox at the moment.
        """
        inbox = self._open
        if inbox is None:
            raise Unavailable("this instance has no reply inbox now")
        pending = inbox.register(request_id, job_index, replies)
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
        """Receives on both topics until canceled, or until the inbox is lost, which raises."""
        inbox = OpenInbox(lease.inbox, self._settings.reply_slots)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(lease.keep())
                for source in inbox.subscriptions:
                    group.create_task(self._receive(inbox, source))
                with self._closing(inbox):
                    for source in inbox.subscriptions:
                        await source.opened.wait()
                    self._open = inbox
                    if not opened.done():
                        opened.set_result(None)
                    await asyncio.Event().wait()  # a failing task of the group ends it
        except ExceptionGroup as failures:
            INBOXES_LOST.inc()
            raise failures.exceptions[0] from failures

    @contextmanager
    def _closing(self, inbox: OpenInbox) -> Iterator[None]:
        try:
            yield
        finally:
            # Before the streams are closed, which takes a while: no new job may use this inbox.
            self._open = None
            inbox.fail(InboxLost("the reply inbox was lost"))

    async def _receive(self, inbox: OpenInbox, source: ReplySubscription) -> None:
        async with self._subscriber.subscribe(
            source.subscription_id,
            max_messages=MAX_MESSAGES,
            ack_deadline_s=ACK_DEADLINE_S,
            ack_linger_s=ACK_LINGER_S,
        ) as subscription:
            source.subscription = subscription
            source.opened.set()
            async for message in subscription:
                inbox.deliver(message)
                subscription.ack(message)


def _report(holding: asyncio.Task[None]) -> None:
    if not holding.cancelled():
        log.error(
            "the task that holds the inbox ended; this is a bug", exc_info=holding.exception()
        )
