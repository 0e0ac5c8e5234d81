"""Maps topics, subscriptions and filters to exchanges, queues and routing keys, and queries them.

One direct exchange carries all messages of a project, so a topic that is gone can't close a channel
that others publish on. A message has the routing key of its topic, and one more per attribute that
filters use. The broker routes by all of them (the BCC header of
https://www.rabbitmq.com/docs/sender-selected), and gives a queue a message once.

Delay queues hold messages before they are delivered again. A refused query ends its channel, so
each query has a channel of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiormq
from aiormq import Channel

from shared.rabbitmq.connection import BROKEN, BrokerConnection, translate
from shared.rabbitmq.waits import ChannelWaits, close_channel
from shared.transport import parse_filter

FILTERED = ("slot", "lane")
"""The attributes that filters of ours use."""

T = TypeVar("T")


def exchange_name(project: str) -> str:
    """The exchange of all messages of `project`."""
    return f"penstock.{project}"


def topic_name(project: str, topic_id: str) -> str:
    """The exchange that says that a topic exists. No message goes through it."""
    return f"{project}.topic.{topic_id}"


def queue_name(project: str, subscription_id: str) -> str:
    return f"{project}.{subscription_id}"


def message_keys(topic_id: str, attributes: Mapping[str, str]) -> list[str]:
    """The routing keys of a message of a topic. The first is the topic's own."""
    keys = [topic_id]
    for name in FILTERED:
        value = attributes.get(name)
        if value is not None:
            keys.append(f"{topic_id}?{name}={value}")
    if attributes.get("lane") != "batch":
        keys.append(f"{topic_id}?lane!=batch")
    return keys


def binding_key(topic_id: str, filter_text: str) -> str:
    """The routing key of the messages that pass a subscription's filter.

    Raises:
        BadInput: the filter is not one of those that Penstock uses.
    """
    wanted = parse_filter(filter_text)
    if wanted is None:
        return topic_id
    return f"{topic_id}?{wanted.name}{'!=' if wanted.negated else '='}{wanted.value}"


def delays_between(first_s: float, longest_s: float) -> tuple[float, ...]:
    """The pauses before a message's second, third … delivery: doubling, at most `longest_s`."""
    delays = [first_s]
    while delays[-1] < longest_s:
        delays.append(min(longest_s, 2 * delays[-1]))
    return tuple(delays)


def delay_queue(queue: str, delay_s: float) -> str:
    """The queue whose messages return to `queue` after `delay_s` seconds."""
    return f"{queue}.delay.{round(delay_s * 1000)}ms"


async def exists(connection: BrokerConnection, *, queue: str = "", exchange: str = "") -> bool:
    """Returns whether the queue, or the exchange, exists.

    Raises:
        Unavailable: the broker is unreachable.
        ConfigurationError: we may not ask.
    """
    if queue:
        return await waiting(connection, queue) is not None
    try:
        await _ask(connection, exchange, lambda on: on.exchange_declare(exchange, passive=True))
    except aiormq.ChannelNotFoundEntity:
        return False
    return True


async def waiting(connection: BrokerConnection, queue: str) -> int | None:
    """Returns how many messages wait in a queue, without held ones. None if there is no such queue.

    Raises:
        Unavailable: the broker is unreachable.
        ConfigurationError: we may not ask.
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
    except BROKEN as error:
        raise translate(error, f"look at {name}") from error
    finally:
        await close_channel(channel)
