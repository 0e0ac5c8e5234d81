"""The interface to the broker, and the IDs of topics and subscriptions on every broker.

It is implemented by shared/broker/pubsub, shared/broker/rabbitmq, and shared/broker/in_memory.py
for tests. Terraform uses the same IDs.

It also creates the subscriptions that a model's workers pull, and creates and deletes inboxes (two
topics each), for a pool or a single instance.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shared.errors import BadInput

GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 4, 4.0
MAX_SAMPLE_S = 5.0
"""Longer measurements indicate outages and do not reflect the usual time."""

JOB_RETENTION_S = 3600
"""Longer than any deadline, so no caller is still waiting for older messages."""
DEAD_LETTER_RETENTION_S = 7 * 24 * 3600
RETRY_MIN_S, RETRY_MAX_S = 0.1, 10.0
"""Set explicitly because, with the service's default, a job waits 10 s after its worker dies."""
MAX_DELIVERY_ATTEMPTS = 5

DEAD_LETTER_RETRY_S, WEBHOOK_RETRY_S = (1.0, 600.0), (5.0, 600.0)
"""The first and the longest pause before a message is redelivered to a function that could not
handle it.

Backoff starts with the first failure, because webhook receivers are operated by third parties.
"""

WEBHOOKS_TOPIC_ID = "webhooks"
"""The topic for webhook events."""
WEBHOOKS_SUBSCRIPTION_ID = "webhooks.push"
"""Pushes the webhooks topic to the function that delivers events."""

INTERACTIVE_FILTER, BATCH_FILTER = 'NOT attributes.lane = "batch"', 'attributes.lane = "batch"'
"""Filters of the two subscriptions that a model's workers pull."""

_FILTER = re.compile(r'(?P<negated>NOT )?attributes\.(?P<name>slot|lane) = "(?P<value>[^"]*)"')


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """A received message.

    `delivery_attempt` is 0 if the subscription has no dead-letter policy.
    """

    data: bytes
    attributes: Mapping[str, str]
    message_id: str
    ack_id: str
    publish_time_s: float = 0.0
    delivery_attempt: int = 0
    ordering_key: str = ""
    received_at_s: float = 0.0
    """Event loop time, in seconds."""
    lost: bool = False
    """True if its lease expired while it was held, so it will be redelivered, here or elsewhere."""


class SmoothedDuration:
    """A repeatedly measured duration, in seconds, or 0 until the first measurement.

    Smoothed like TCP round-trip times (RFC 6298, section 2:
    https://www.rfc-editor.org/rfc/rfc6298). It is based on a mean and a mean deviation, both
    exponentially weighted.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._deviation_s = 0.0

    @property
    def most_s(self) -> float:
        """A duration that only a few measurements exceed."""
        return self.mean_s + DEVIATIONS * self._deviation_s

    def record(self, took_s: float) -> None:
        if took_s > MAX_SAMPLE_S:
            return
        if not self.mean_s:
            self.mean_s, self._deviation_s = took_s, took_s / 2
            return
        off_s = abs(self.mean_s - took_s)
        self._deviation_s += DEVIATION_GAIN * (off_s - self._deviation_s)
        self.mean_s += GAIN * (took_s - self.mean_s)


class Publisher(Protocol):
    """Sends messages."""

    @property
    def round_trip(self) -> SmoothedDuration:
        """The measured time for the broker to confirm a message."""

    async def publish(
        self,
        topic_id: str,
        data: bytes,
        attributes: Mapping[str, str],
        *,
        ordering_key: str = "",
        timeout_s: float = 10.0,
    ) -> str:
        """Publishes one message and returns its message_id once the broker has it.

        Raises:
            Unavailable: the broker could not be reached or did not respond within `timeout_s`.
            BadInput: the broker rejected the message (it is too large, its topic does not exist,
                …).
            Overloaded: too many messages are waiting to be published, or the broker's quota is
                exhausted.
            ConfigurationError: the broker denied us access (permissions, credentials).
        """


class Subscription(Protocol):
    """An open subscription: an endless stream of messages.

    Leases are maintained until ack or nack.
    """

    @property
    def is_connected(self) -> bool:
        """True if the stream was open as of the last report."""

    @property
    def lost(self) -> int:
        """Number of messages whose lease was lost while they were held."""

    @property
    def round_trip(self) -> SmoothedDuration:
        """The measured time for the broker to respond."""

    def hold(self, max_messages: int) -> None:
        """Sets how many unacked messages (at least the initial number) may be held from now on.

        The change takes effect gradually, in the background: increases happen quickly, and
        decreases happen as messages are acked. The total size of additional messages is also
        limited by `max_bytes`.
        """

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yields messages as they arrive. Reconnects automatically, and ends only after `stop`.

        Raises:
            Unavailable: the subscription was deleted.
            ConfigurationError: the broker denies us access or rejects the request.
        """

    def ack(self, message: ReceivedMessage) -> None:
        """Marks `message` as done, so that it is not redelivered.

        The ack is sent in the background, batched with others.
        """

    def nack(self, message: ReceivedMessage) -> None:
        """Returns `message` to the broker to be redelivered, here or elsewhere."""

    async def stop(self) -> None:
        """Stops receiving: the iteration ends, and unprocessed messages are returned.

        Leases and acks continue.
        """


class Subscriber(Protocol):
    """Opens subscriptions."""

    def subscribe(
        self,
        subscription_id: str,
        *,
        max_messages: int,
        max_bytes: int = 0,
        ack_deadline_s: int = 20,
        ack_linger_s: float = 0.0,
    ) -> AbstractAsyncContextManager[Subscription]:
        """Opens a subscription that holds at most `max_messages` unacked messages.

        A positive `max_bytes` also limits their total size. Exiting the block returns messages that
        are still held and sends the last acks. With a positive `ack_linger_s`, acks may wait that
        long so that they can share a request. Use this for subscriptions that gain nothing from
        fast acks.
        """


class Transport(Publisher, Subscriber, Protocol):
    """A connection to the broker that can both publish and subscribe."""


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """Subscription settings. Durations are in seconds."""

    topic_id: str
    filter: str = ""
    """Attribute filter. Can't be changed later."""
    ack_deadline_s: int = 10
    retention_s: int = 600
    """How long an unacked message is kept. The service's minimum is 10 minutes."""
    expires_after_s: int = 0
    """Deleted after this long without use (at least a day). 0 means never."""
    retry_min_s: float | None = None
    """Minimum pause before a redelivery. None means no pause.

    This is always set, because the service's default is 10 s.
    """
    retry_max_s: float = 60.0
    dead_letter_topic_id: str = ""
    """The topic for messages that failed `max_delivery_attempts` times.

    If empty, such messages are redelivered forever.
    """
    max_delivery_attempts: int = 5
    is_ordered: bool = False
    is_reply: bool = False
    """True if it carries replies, which are useful only briefly and only to one instance."""
    push_endpoint: str = ""
    """URL to which the broker posts messages. If empty, messages are pulled."""


class Admin(Protocol):
    """Creates and deletes topics and subscriptions."""

    async def ensure_topic(self, topic_id: str) -> bool:
        """Creates a topic if it doesn't exist. Returns whether it was created."""

    async def ensure_subscription(
        self, subscription_id: str, settings: SubscriptionSettings
    ) -> bool:
        """Creates a subscription if it doesn't exist. Returns whether it was created."""

    async def delete_topic(self, topic_id: str) -> bool:
        """Deletes a topic. Returns whether it existed."""

    async def delete_subscription(self, subscription_id: str) -> bool:
        """Deletes a subscription. Returns whether it existed."""

    async def subscription_exists(self, subscription_id: str) -> bool: ...

    async def missing_subscriptions(self, subscription_ids: list[str]) -> list[str]:
        """Returns the `subscription_ids` that do not exist, in order."""


def jobs_topic_id(model: str) -> str:
    """Returns the topic that carries jobs for `model`."""
    return f"jobs.{model}"


def workers_subscription_id(model: str) -> str:
    """Returns the subscription that all of `model`'s workers pull."""
    return f"jobs.{model}.workers"


def dead_letter_topic_id(model: str) -> str:
    """Returns the topic for jobs of `model` that no worker could complete."""
    return f"jobs.{model}.dead"


def dead_letter_subscription_id(model: str) -> str:
    """Returns the subscription that keeps `model`'s dead letters for inspection."""
    return f"jobs.{model}.dead.keep"


def dead_letter_push_subscription_id(model: str) -> str:
    """Returns the subscription that pushes `model`'s dead letters to the function that replies."""
    return f"jobs.{model}.dead.push"


def batch_subscription_id(model: str) -> str:
    """Returns the second subscription of `model`'s workers, for jobs with `batch` priority."""
    return f"jobs.{model}.batch"


def inbox_topic_id(inbox: str) -> str:
    """Returns the reply topic of an inbox with slots.

    `inbox` is a number in the pool or an instance ID.
    """
    return f"inbox.{inbox}"


def direct_id(inbox: str) -> str:
    """Returns the reply topic of an inbox without slots. Its only subscription has the same ID.

    No replies are filtered out, so each is delivered and billed once.
    """
    return f"inbox.{inbox}.direct"


def slot_subscription_id(inbox: str, slot: int) -> str:
    """Returns the subscription for one slot of an inbox."""
    return f"inbox.{inbox}.slot.{slot}"


def slot_filter(slot: int, slots: int) -> str:
    """Returns a slot's filter. If an inbox has only one slot, the slot needs no filter."""
    return "" if slots == 1 else f'attributes.slot = "{slot}"'


class AttributeFilter(NamedTuple):
    """A subscription filter, which passes messages based on the value of one attribute."""

    name: str
    value: str
    negated: bool

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """Returns whether a message with these attributes passes.

        A message without the attribute passes only a negated filter.
        """
        return (attributes.get(self.name) == self.value) != self.negated


def parse_filter(text: str) -> AttributeFilter | None:
    """Parses a filter created by this module.

    None if the text is empty, in which case every message passes.

    Pub/Sub supports many more filters. Other brokers support only the filters we use ourselves.

    Raises:
        BadInput: the filter does not have a form that this module creates.
    """
    if not text:
        return None
    match = _FILTER.fullmatch(text)
    if match is None or (match["negated"] and text != INTERACTIVE_FILTER):
        raise BadInput(
            f'filter {text!r} is not supported; use attributes.slot = "…", attributes.lane = '
            f'"…" or {INTERACTIVE_FILTER}',
            field="filter",
        )
    return AttributeFilter(match["name"], match["value"], match["negated"] is not None)


async def make_jobs(admin: Admin, model: str) -> None:
    """Creates the topics for a model's jobs and dead letters, with their subscriptions.

    Each priority has one job subscription, and one more subscription keeps the dead letters.
    Existing topics and subscriptions are not changed.

    Raises:
        PenstockError: raised by the admin's calls.
    """
    topics = jobs_topic_id(model), dead_letter_topic_id(model)
    await _run_all(admin.ensure_topic(topic) for topic in topics)
    await _run_all(
        admin.ensure_subscription(subscription_id, settings)
        for subscription_id, settings in jobs_subscriptions(model).items()
    )


def jobs_subscriptions(model: str) -> dict[str, SubscriptionSettings]:
    """Returns the subscriptions for a model's jobs and dead letters, keyed by ID."""
    jobs, dead = jobs_topic_id(model), dead_letter_topic_id(model)
    return {
        workers_subscription_id(model): _for_workers(jobs, dead, INTERACTIVE_FILTER),
        batch_subscription_id(model): _for_workers(jobs, dead, BATCH_FILTER),
        dead_letter_subscription_id(model): SubscriptionSettings(
            dead, retention_s=DEAD_LETTER_RETENTION_S
        ),
    }


def _for_workers(jobs: str, dead: str, priority_filter: str) -> SubscriptionSettings:
    """Returns the settings for each priority's subscription, which are the same for both."""
    return SubscriptionSettings(
        jobs,
        filter=priority_filter,
        retention_s=JOB_RETENTION_S,
        retry_min_s=RETRY_MIN_S,
        retry_max_s=RETRY_MAX_S,
        dead_letter_topic_id=dead,
        max_delivery_attempts=MAX_DELIVERY_ATTEMPTS,
    )


async def make_inbox(admin: Admin, inbox: str, slots: int, *, expires_after_s: int = 0) -> None:
    """Creates an inbox's topics and subscriptions if they don't exist.

    Each slot has one subscription, and one more, without a filter, is for direct replies.

    Args:
        inbox: a number in the pool or an instance ID.
        slots: number of slots. A single slot needs no filter.
        expires_after_s: seconds without use after which the broker deletes the subscriptions. 0
            means never.

    Raises:
        PenstockError: raised by the admin's calls.
    """
    topic_id, direct = inbox_topic_id(inbox), direct_id(inbox)
    await _run_all(admin.ensure_topic(topic) for topic in (topic_id, direct))
    subscriptions = {
        direct: SubscriptionSettings(direct, expires_after_s=expires_after_s, is_reply=True)
    } | {
        slot_subscription_id(inbox, slot): SubscriptionSettings(
            topic_id,
            slot_filter(slot, slots),
            expires_after_s=expires_after_s,
            is_reply=True,
        )
        for slot in range(slots)
    }
    await _run_all(
        admin.ensure_subscription(subscription_id, settings)
        for subscription_id, settings in subscriptions.items()
    )


async def remove_inbox(admin: Admin, inbox: str, slots: int) -> None:
    """Deletes an inbox. Topics and subscriptions that have already been deleted don't cause errors.

    Raises:
        PenstockError: one of the admin calls failed.
    """
    topics = (inbox_topic_id(inbox), direct_id(inbox))
    await _run_all(admin.delete_topic(topic) for topic in topics)
    subscriptions = [direct_id(inbox), *(slot_subscription_id(inbox, n) for n in range(slots))]
    await _run_all(admin.delete_subscription(name) for name in subscriptions)


async def _run_all(calls: Iterable[Coroutine[Any, Any, bool]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
