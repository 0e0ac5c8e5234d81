"""This instance's reply inbox, either leased from the pool through Redis or created.

`ReplyInbox` receives on both topics and replaces its inbox if it is lost. `OpenInbox` tracks jobs
waiting for replies while this instance holds the inbox. `InboxPool` leases inboxes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

from prometheus_client import Counter, Gauge

from shared.broker.transport import (
    Admin,
    ReceivedMessage,
    Subscriber,
    Subscription,
    direct_id,
    inbox_topic_id,
    make_inbox,
    remove_inbox,
    slot_subscription_id,
)
from shared.errors import (
    ConfigurationError,
    DeadlineExceeded,
    PenstockError,
    Unavailable,
    UndecodableMessage,
)
from shared.messages import (
    BatchedReply,
    Reply,
    decode_reply,
    decode_reply_batch,
    decode_reply_body,
    is_reply_batch,
)
from shared.models.entry import Replies
from shared.process.concurrency import backoff
from shared.settings import ApiSettings
from shared.stores.redis_client import Commands, RedisLink, load_script

log = logging.getLogger(__name__)

REDIS_LIMIT_S = 2.0
REMOVE_LIMIT_S = 4.0
"""A container has 10 s from SIGTERM until it is killed.

https://docs.cloud.google.com/run/docs/container-contract#instance-shutdown
"""
OWN_INBOX_EXPIRES_S = 86_400
"""The minimum that Pub/Sub accepts: one day, according to `ExpirationPolicy.ttl` in pubsub.proto.

Expiration removes crashed instances' inboxes.
"""

ERRORS = Counter(
    "penstock_inbox_errors_total",
    "Failed round trips to Redis about the inbox lease.",
    ["operation"],
)
UP = Gauge("penstock_inbox_redis_up", "1 while Redis is being asked about the inbox's lease.")

_RENEW = load_script("shared/stores/lease_renew.lua")
_RELEASE = load_script("shared/stores/lease_release.lua")

SLOTS_GIVEN = Counter(
    "penstock_inbox_slots_given_total",
    "Requests that got a slot, either alone (exclusive) or together with others (shared).",
    ["kind"],
)
REPLIES = Counter(
    "penstock_inbox_replies_total",
    "Replies received: delivered, duplicate, unknown (late, or for an earlier holder) or "
    "undecodable.",
    ["outcome"],
)
_EXCLUSIVE, _SHARED = SLOTS_GIVEN.labels("exclusive"), SLOTS_GIVEN.labels("shared")
_DELIVERED, _DUPLICATE, _UNKNOWN, _UNDECODABLE = map(
    REPLIES.labels, ("delivered", "duplicate", "unknown", "undecodable")
)

INBOXES_LOST = Counter("penstock_inbox_lost_total", "Inboxes that were lost and replaced.")

START_LIMIT_S = 10.0
MAX_MESSAGES = 1000
"""Maximum unacknowledged messages per subscription.

Once a quarter of this many acks are waiting, they are sent without any further pause.
"""
ACK_DEADLINE_S = 20
ACK_LINGER_S = 8.0
"""How long acks wait to be combined, because an ack call costs as much as a publish.

Without this pause, acks used a fifth of the API's CPU time. Requests never wait for a reply to be
acknowledged. The pause plus 10 s of retries is shorter than the lease.
"""


class InboxLost(Unavailable):
    """The inbox belongs to another instance or no longer exists.

    Replies can no longer arrive here.
    """


@dataclass(frozen=True, slots=True)
class InboxLease:
    """An inbox held by this instance.

    `keep` runs while the inbox is held and raises InboxLost afterward.
    """

    inbox: str
    keep: Callable[[], Coroutine[Any, Any, object]]


class InboxPool:
    """The pool's inboxes, numbered from `first`.

    Each inbox has a Redis key that contains its holder's ID.

    While Redis is unreachable, an instance keeps its inbox, because no other instance can lease it
    either. If only this instance is cut off and another instance leases its inbox, replies may go
    to the wrong instance until Redis responds again. The affected requests then read the record.

    Args:
        redis_url: the Redis server that holds the leases.
        first: the first inbox's number. Regions with separate Redis servers use separate ranges.
        size: number of inboxes in the pool.
        lease_s: a lease expires if it is not renewed for this long.
    """

    def __init__(
        self, redis_url: str, first: int, size: int, lease_s: float, instance: str
    ) -> None:
        self._redis_url = redis_url
        self._first = first
        self._size = size
        self._lease_s = lease_s
        self._instance = instance

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[InboxLease]:
        """Leases an inbox for the duration of the block.

        Raises:
            Unavailable: no inbox is free, or Redis is unreachable.
        """
        link = RedisLink(
            "inbox",
            self._redis_url,
            timeout_s=REDIS_LIMIT_S,
            up=UP,
            errors=ERRORS,
        )
        redis = link.commands("the inbox pool")
        async with link:
            number = await self._acquire(redis)
            try:
                yield InboxLease(str(number), lambda: self._renew(redis, number))
            finally:
                await self._release(redis, number)

    async def _acquire(self, redis: Commands) -> int:
        numbers = range(self._first, self._first + self._size)
        held = await redis.run("MGET", *map(_key, numbers))
        free = [number for number, holder in zip(numbers, held, strict=True) if holder is None]
        # Random order, so that instances starting at the same time try different inboxes.
        for number in random.sample(free, len(free)):
            if await redis.run("SET", _key(number), self._instance, "NX", "PX", self._lease_ms()):
                return number
        raise Unavailable(f"all {self._size} inboxes in the pool are in use")

    async def _renew(self, redis: Commands, number: int) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                is_ours = await redis.run_script(
                    _RENEW, [_key(number)], self._instance, self._lease_ms()
                )
            except Unavailable as error:
                log.warning(
                    "inbox lease not renewed", extra={"inbox": number, "reason": error.message}
                )
                continue
            if not is_ours:
                raise InboxLost(f"inbox {number} now belongs to another instance")

    async def _release(self, redis: Commands, number: int) -> None:
        try:
            await redis.run_script(_RELEASE, [_key(number)], self._instance)
        except Unavailable as error:
            log.warning(
                "inbox lease not released", extra={"inbox": number, "reason": error.message}
            )

    def _lease_ms(self) -> int:
        return max(1, round(self._lease_s * 1000))


@asynccontextmanager
async def open_own_inbox(admin: Admin, slots: int, instance: str) -> AsyncIterator[InboxLease]:
    """Creates an inbox with its slots, and removes it when the block exits.

    Raises:
        ConfigurationError: this process does not have permission to create inboxes.
    """
    inbox = f"{instance}-{uuid4().hex[:12]}"
    try:
        await make_inbox(admin, inbox, slots, expires_after_s=OWN_INBOX_EXPIRES_S)
        yield InboxLease(inbox, asyncio.Event().wait)
    finally:
        try:
            async with asyncio.timeout(REMOVE_LIMIT_S):
                await remove_inbox(admin, inbox, slots)
        except (TimeoutError, PenstockError) as error:
            log.warning(
                "could not remove this instance's inbox",
                extra={"inbox": inbox, "reason": repr(error)},
            )


def _key(number: int) -> str:
    return f"penstock:inbox:{number}"


class PendingReply:
    """Waits for one job's reply, which arrives at `inbox` (a topic ID) and `slot`.

    `slot` is empty if the topic has no slots.
    """

    def __init__(self, inbox: str, slot: str) -> None:
        self.inbox = inbox
        self.slot = slot
        self._outcome: Reply | InboxLost | None = None
        self._woken: asyncio.Future[None] | None = None
        self._has_news = False

    async def reply(self, timeout_s: float) -> Reply:
        """Waits for the reply. May be called again after DeadlineExceeded.

        Raises:
            DeadlineExceeded: no reply arrived within `timeout_s`, or `look` was called.
            InboxLost: the inbox was lost. The record may still receive the result before the
                deadline.
        """
        if self._outcome is None and not self._has_news:
            loop = asyncio.get_running_loop()
            self._woken = loop.create_future()
            # Saves one event loop iteration compared to asyncio.wait.
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._woken
            finally:
                timer.cancel()
        self._has_news = False
        if self._outcome is None:
            raise DeadlineExceeded(f"no reply within {timeout_s:.3f} s")
        if isinstance(self._outcome, InboxLost):
            raise self._outcome
        return self._outcome

    def look(self) -> None:
        """Interrupts this wait, or the next one if none is in progress, with DeadlineExceeded.

        Called when the record may have changed.
        """
        self._has_news = True
        self._wake()

    def deliver(self, reply: Reply) -> bool:
        """Delivers the reply. Returns False for a duplicate."""
        if self._outcome is not None:
            return False
        self._outcome = reply
        self._wake()
        return True

    def fail(self, error: InboxLost) -> None:
        """Fails the wait with `error`."""
        if self._outcome is None:
            self._outcome = error
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class ReplySubscription:
    """An inbox subscription, used by `requests` requests.

    Args:
        slot: the slot in the subscription's filter. Empty if there is no filter.
    """

    def __init__(self, topic_id: str, subscription_id: str, slot: str = "") -> None:
        self.topic_id = topic_id
        self.subscription_id = subscription_id
        self.slot = slot
        self.requests = 0
        self.opened = asyncio.Event()
        self.subscription: Subscription | None = None

    @property
    def is_connected(self) -> bool:
        """Returns whether replies can arrive on this subscription."""
        return self.subscription is not None and self.subscription.is_connected


class OpenInbox:
    """An inbox held by this instance: its subscriptions and pending replies.

    Replies are matched by request and job, no matter which subscription they arrive on.

    Args:
        inbox: the inbox's number in the pool, or an instance ID.
        slots: how many of the inbox's slots this instance uses.
    """

    def __init__(self, inbox: str, slots: int) -> None:
        topic_id = inbox_topic_id(inbox)
        self.direct = ReplySubscription(direct_id(inbox), direct_id(inbox))
        self.slots = [
            ReplySubscription(topic_id, slot_subscription_id(inbox, number), str(number))
            for number in range(slots)
        ]
        self.subscriptions = [self.direct, *self.slots]
        # Last in, first out, so that few slots are used at low load and acks can share calls.
        self._free = self.slots[::-1]
        self._subscription_of: dict[str, ReplySubscription] = {}
        self._pending: dict[str, dict[int, PendingReply]] = {}

    @property
    def is_connected(self) -> bool:
        """Returns whether replies can arrive on every subscription."""
        return all(each.is_connected for each in self.subscriptions)

    def register(self, request_id: str, job_index: int, replies: Replies) -> PendingReply:
        """Registers a job. All of a request's jobs use the same subscription."""
        chosen = self._subscription_of.get(request_id)
        if chosen is None:
            chosen = self.direct if replies == "direct" else self._choose_slot()
            chosen.requests += 1
            self._subscription_of[request_id] = chosen
            self._pending[request_id] = {}
        pending = self._pending[request_id][job_index] = PendingReply(chosen.topic_id, chosen.slot)
        return pending

    def remove(self, request_id: str, job_index: int) -> None:
        """Forgets a job. A request's last job frees its slot, if it has one."""
        jobs = self._pending[request_id]
        jobs.pop(job_index, None)
        if jobs:
            return
        del self._pending[request_id]
        used = self._subscription_of.pop(request_id)
        used.requests -= 1
        if used.requests == 0 and used is not self.direct:
            self._free.append(used)

    def deliver(self, message: ReceivedMessage) -> None:
        """Delivers the replies in a message to their jobs.

        Counts and drops replies to unknown jobs.

        Unreadable replies are dropped individually.
        """
        try:
            if is_reply_batch(message.attributes):
                for reply in decode_reply_batch(message.data, message.attributes):
                    self._deliver_batched(message, reply)
            elif pending := self._find(
                message.attributes.get("request_id", ""), message.attributes.get("part", "")
            ):
                _count(pending.deliver(decode_reply(message.data, message.attributes)))
        except UndecodableMessage as error:
            _count_unreadable(message, error)

    def _deliver_batched(self, message: ReceivedMessage, batched: BatchedReply) -> None:
        pending = self._find(batched.request_id, batched.part)
        if pending is None:
            return
        try:
            body = decode_reply_body(batched.body)
        except UndecodableMessage as error:
            _count_unreadable(message, error)
            return
        slot = message.attributes.get("slot", "")
        _count(pending.deliver(Reply(batched.request_id, batched.part, slot, body)))

    def _find(self, request_id: str, part: str | int) -> PendingReply | None:
        try:
            return self._pending[request_id][int(part)]
        except (KeyError, ValueError):
            _UNKNOWN.inc()
            return None

    def fail(self, error: InboxLost) -> None:
        """Fails every wait with `error`."""
        for jobs in self._pending.values():
            for pending in jobs.values():
                pending.fail(error)

    def _choose_slot(self) -> ReplySubscription:
        if self._free:
            _EXCLUSIVE.inc()
            return self._free.pop()
        _SHARED.inc()
        return min(self.slots, key=lambda slot: slot.requests)


def _count(is_first: bool) -> None:
    (_DELIVERED if is_first else _DUPLICATE).inc()


def _count_unreadable(message: ReceivedMessage, error: UndecodableMessage) -> None:
    _UNDECODABLE.inc()
    facts = {"message_id": message.message_id, "reason": error.message}
    log.warning("reply can't be read", extra=facts)


class ReplyInbox:
    """This instance's inbox, leased from the pool or created, and replaced whenever it is lost.

    Args:
        settings: inbox_pool, inbox_first, inbox_lease_s, reply_slots, redis_url.
        admin: creates an inbox if there is no pool, or if the pool has no free inbox.
        instance: this instance's ID (letters, digits, and dashes).
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

        Continues without an inbox (not ready) if none can be obtained within START_LIMIT_S.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold_forever(ready))
        self._holding.add_done_callback(_report)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await ready
        except (TimeoutError, Unavailable) as error:
            log.warning("no inbox yet", extra={"reason": repr(error)})
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """True if replies can arrive: an inbox is held and its subscriptions are connected."""
        return self._open is not None and self._open.is_connected

    @contextmanager
    def waiter(self, request_id: str, job_index: int, replies: Replies) -> Iterator[PendingReply]:
        """Registers a job for the duration of the block. `replies` selects the topic for its reply.

        Raises:
            Unavailable: this instance has no inbox at the moment.
        """
        inbox = self._open
        if inbox is None:
            raise Unavailable("this instance has no reply inbox right now")
        pending = inbox.register(request_id, job_index, replies)
        try:
            yield pending
        finally:
            inbox.remove(request_id, job_index)

    async def _hold_forever(self, ready: asyncio.Future[None]) -> None:
        pauses = backoff()
        while True:
            try:
                async with AsyncExitStack() as stack:
                    lease = await self._acquire(stack)
                    pauses = backoff()
                    await self._hold(lease, ready)
            except PenstockError as error:
                log.warning("no inbox held", extra={"reason": error.message})
                if not ready.done():
                    ready.set_exception(error)
            await asyncio.sleep(next(pauses))

    async def _acquire(self, stack: AsyncExitStack) -> InboxLease:
        settings = self._settings
        if settings.inbox_pool == 0:
            return await stack.enter_async_context(
                open_own_inbox(self._admin, settings.reply_slots, self._instance)
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
            log.warning(
                "no inbox available in the pool; creating one", extra={"reason": error.message}
            )
        try:
            return await stack.enter_async_context(
                open_own_inbox(self._admin, settings.reply_slots, self._instance)
            )
        except ConfigurationError as error:
            # In the cloud, the API is not allowed to create inboxes, but the pool may soon have a
            # free one.
            raise Unavailable(
                "no inbox is available in the pool, and creating one is not permitted: "
                f"{error.message}"
            ) from error

    async def _hold(self, lease: InboxLease, ready: asyncio.Future[None]) -> None:
        """Receives on both topics until canceled. Raises InboxLost if the inbox is lost."""
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
                    if not ready.done():
                        ready.set_result(None)
                    await asyncio.Event().wait()  # runs until a task in the group fails
        except ExceptionGroup as failures:
            INBOXES_LOST.inc()
            raise failures.exceptions[0] from failures

    @contextmanager
    def _closing(self, inbox: OpenInbox) -> Iterator[None]:
        try:
            yield
        finally:
            # Closing the streams takes a while, so this is done first to keep new jobs from using
            # this inbox.
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
