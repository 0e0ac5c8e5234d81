"""Maps topics, subscriptions, and filters to exchanges, queues, and routing keys, and queries them.

One direct exchange carries all of a project's messages, so a deleted topic can't close a channel
that other topics are published on. A message has its topic's routing key, plus a key for each
attribute used in filters. The broker routes by all of them (the BCC header of
https://www.rabbitmq.com/docs/sender-selected), and delivers a message to each queue only once.

Delay queues hold messages before they are redelivered. A failed query closes its channel, so each
query uses a separate channel.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiormq
from aiormq import Channel

from shared.broker.rabbitmq.connection import BROKEN, BrokerConnection, translate
from shared.broker.rabbitmq.waits import ChannelWaits, close_channel
from shared.broker.transport import parse_filter
from shared.errors import BadInput

FILTERED = ("slot", "lane")
"""Attributes used in our filters."""

T = TypeVar("T")


def exchange_name(project: str) -> str:
    """Returns the exchange for all of `project`'s messages."""
    return f"penstock.{project}"


def topic_name(project: str, topic_id: str) -> str:
    """Returns the exchange that marks a topic as existing. Messages do not go through it."""
    return f"{project}.topic.{topic_id}"


def queue_name(project: str, subscription_id: str) -> str:
    return f"{project}.{subscription_id}"


def message_keys(topic_id: str, attributes: Mapping[str, str]) -> list[str]:
    """Returns a message's routing keys. The first is the topic's own key."""
    keys = [topic_id]
    for name in FILTERED:
        value = attributes.get(name)
        if value is not None:
            keys.append(f"{topic_id}?{name}={value}")
    if attributes.get("lane") != "batch":
        keys.append(f"{topic_id}?lane!=batch")
    return keys


def binding_key(topic_id: str, filter_text: str) -> str:
    """Returns the routing key for messages that match a subscription's filter.

    Raises:
        BadInput: the filter is not one used by Penstock.
    """
    wanted = parse_filter(filter_text)
    if wanted is None:
        return topic_id
    return f"{topic_id}?{wanted.name}{'!=' if wanted.negated else '='}{wanted.value}"


def delays_between(first_s: float, longest_s: float) -> tuple[float, ...]:
    """Returns the pauses before a message's redeliveries, doubling up to `longest_s`."""
    delays = [first_s]
    while delays[-1] < longest_s:
        delays.append(min(longest_s, 2 * delays[-1]))
    return tuple(delays)


def delay_queue(queue: str, delay_s: float) -> str:
    """Returns the queue whose messages return to `queue` after `delay_s` seconds."""
    return f"{queue}.delay.{round(delay_s * 1000)}ms"


async def exists(connection: BrokerConnection, *, queue: str = "", exchange: str = "") -> bool:
    """Returns whether the queue or exchange exists.

    Raises:
        BadInput: the name is too long.
        Unavailable: the broker is unreachable.
        ConfigurationError: we do not have permission to query it.
    """
    if queue:
        return await waiting(connection, queue) is not None
    try:
        await _ask(connection, exchange, lambda on: on.exchange_declare(exchange, passive=True))
    except aiormq.ChannelNotFoundEntity:
        return False
    return True


async def waiting(connection: BrokerConnection, queue: str) -> int | None:
    """Returns the number of waiting messages, excluding held ones. None if there is no such queue.

    Raises:
        BadInput: the name is too long.
        Unavailable: the broker is unreachable.
        ConfigurationError: we do not have permission to query it.
    """
    try:
        declared = await _ask(connection, queue, lambda on: on.queue_declare(queue, passive=True))
    except aiormq.ChannelNotFoundEntity:
        return None
    return declared.message_count or 0


async def _ask(
    connection: BrokerConnection, name: str, question: Callable[[Channel], Awaitable[T]]
) -> T:
    channel = await connection.channel()
    try:
        return await ChannelWaits(channel).within(connection.answer_limit_s, question(channel))
    except aiormq.ChannelNotFoundEntity:
        raise
    except ValueError as error:
        raise BadInput(f"look at {name}: {error}") from error
    except BROKEN as error:
        raise translate(error, f"look at {name}") from error
    finally:
        await close_channel(channel)
