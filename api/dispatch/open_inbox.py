"""An inbox while this instance holds it: the jobs that wait for replies, and the slots they use."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import Counter

from api.dispatch.inbox_lease import InboxLost
from shared.errors import DeadlineExceeded, UndecodableMessage
from shared.message_encoding import decode_reply
from shared.messages import Reply
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


class Slot:
    """A filtered subscription of an inbox, which `requests` requests use."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = str(number)
        self.requests = 0
        self.opened = asyncio.Event()
        self.subscription: Subscription | None = None

    @property
    def is_connected(self) -> bool:
        """Whether replies can arrive on it."""
        return self.subscription is not None and self.subscription.is_connected


class OpenInbox:
    """An inbox while this instance holds it: its slots, their requests, and the pending replies."""

    def __init__(self, topic_id: str, slots: int) -> None:
        self.topic_id = topic_id
        self.slots = [Slot(number) for number in range(slots)]
        # Last in, first out: at low load few slots are in use, so acks share calls.
        self._free = self.slots[::-1]
        self._slot_of: dict[str, Slot] = {}
        self._pending: dict[str, dict[int, PendingReply]] = {}

    @property
    def is_connected(self) -> bool:
        """Whether replies can arrive on every slot."""
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
        """Forgets a job. The last one of a request gives its slot back."""
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
        """Ends every wait with `error`."""
        for jobs in self._pending.values():
            for pending in jobs.values():
                pending.fail(error)

    def _choose_slot(self) -> Slot:
        if self._free:
            _EXCLUSIVE.inc()
            slot = self._free.pop()
        else:
            _SHARED.inc()
            slot = min(self.slots, key=lambda slot: slot.requests)
        slot.requests += 1
        return slot
