"""Asks about queues and exchanges. A refusal ends the channel, so each question has its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiormq
from aiormq import Channel

from shared.rabbitmq.connection import BROKEN, BrokerConnection, translate
from shared.rabbitmq.waits import ChannelWaits, close_channel

T = TypeVar("T")


async def exists(connection: BrokerConnection, *, queue: str = "", exchange: str = "") -> bool:
    """Whether the queue, or the exchange, exists.

    Raises:
        Unavailable: the broker is out of reach.
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
    """Returns how many messages wait in a queue, without those in hand. None: there is none.

    Raises:
        Unavailable: the broker is out of reach.
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
