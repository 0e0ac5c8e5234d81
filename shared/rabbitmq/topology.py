"""Asks about queues and exchanges. A refusal ends the channel, so each question has its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiormq
from aiormq import Channel

from shared.rabbitmq.connection import BROKEN, BrokerConnection, translate


async def exists(connection: BrokerConnection, *, queue: str = "", exchange: str = "") -> bool:
    """Whether the queue, or the exchange, exists.

    Raises:
        Unavailable: the broker is out of reach.
        ConfigurationError: we may not ask.
    """
    if queue:
        return await waiting(connection, queue) is not None
    try:
        async with _asking(connection, exchange) as channel:
            await channel.exchange_declare(exchange, passive=True)
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
        async with _asking(connection, queue) as channel:
            declared = await channel.queue_declare(queue, passive=True)
    except aiormq.ChannelNotFoundEntity:
        return None
    return declared.message_count or 0


@asynccontextmanager
async def _asking(connection: BrokerConnection, name: str) -> AsyncIterator[Channel]:
    channel = await connection.channel()
    try:
        yield channel
    except aiormq.ChannelNotFoundEntity:
        raise
    except BROKEN as error:
        raise translate(error, f"look at {name}") from error
    finally:
        await channel.close()
