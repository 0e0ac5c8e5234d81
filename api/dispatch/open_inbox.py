"""An inbox while this instance holds it: the jobs that wait for replies, and where they arrive."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import Counter

from api.dispatch.inbox_lease import InboxLost
from shared.catalog_entry import Replies
from shared.errors import DeadlineExceeded, UndecodableMessage
from shared.message_encoding import decode_reply
from shared.messages import Reply
from shared.topics import direct_id, inbox_topic_id, slot_subscription_id
from shared.transport import Message, Subscription

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


class PendingReply:
    """Waits for the reply of one job, which arrives at `inbox` (a topic id), `slot`.

    `slot` is empty where the topic has no slots.
    """

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


class ReplySubscription:
    """A subscription of an inbox, which `requests` requests use.

    Args:
        topic_id: its topic.
        subscription_id: its own id.
        slot: the slot that its filter asks for. Empty: it has no filter.
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
        """Whether replies can arrive on it."""
        return self.subscription is not None and self.subscription.is_connected


class OpenInbox:
    """An inbox while this instance holds it: its subscriptions, and the pending replies.

    Replies are matched by request and job, whichever subscription they come from.

    Args:
        inbox: a number in the pool or the id of an instance.
        slots: how many of its slots this instance uses.
    """

    def __init__(self, inbox: str, slots: int) -> None:
        topic_id = inbox_topic_id(inbox)
        self.direct = ReplySubscription(direct_id(inbox), direct_id(inbox))
        self.slots = [
            ReplySubscription(topic_id, slot_subscription_id(inbox, number), str(number))
            for number in range(slots)
        ]
        self.subscriptions = [self.direct, *self.slots]
        # Last in, first out: at low load few slots are in use, so acks share calls.
        self._free = self.slots[::-1]
        self._subscription_of: dict[str, ReplySubscription] = {}
        self._pending: dict[str, dict[int, PendingReply]] = {}

    @property
    def is_connected(self) -> bool:
        """Whether replies can arrive on every subscription."""
        return all(each.is_connected for each in self.subscriptions)

    def register(self, request_id: str, job_index: int, replies: Replies) -> PendingReply:
        """Registers a job. All jobs of a request use the same subscription."""
        chosen = self._subscription_of.get(request_id)
        if chosen is None:
            chosen = self.direct if replies == "direct" else self._choose_slot()
            chosen.requests += 1
            self._subscription_of[request_id] = chosen
            self._pending[request_id] = {}
        pending = self._pending[request_id][job_index] = PendingReply(chosen.topic_id, chosen.slot)
        return pending

    def remove(self, request_id: str, job_index: int) -> None:
        """Forgets a job. The last one of a request gives its slot back, if it has one."""
        jobs = self._pending[request_id]
        jobs.pop(job_index, None)
        if jobs:
            return
        del self._pending[request_id]
        used = self._subscription_of.pop(request_id)
        used.requests -= 1
        if used.requests == 0 and used is not self.direct:
            self._free.append(used)

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
        """Ends every wait with `error`."""
        for jobs in self._pending.values():
            for pending in jobs.values():
                pending.fail(error)

    def _choose_slot(self) -> ReplySubscription:
        if self._free:
            _EXCLUSIVE.inc()
            return self._free.pop()
        _SHARED.inc()
        return min(self.slots, key=lambda slot: slot.requests)
