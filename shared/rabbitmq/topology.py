"""Asks whether a queue or an exchange exists."""

from __future__ import annotations

import aiormq

from shared.rabbitmq.connection import BROKEN, BrokerConnection, translate


async def exists(connection: BrokerConnection, *, queue: str = "", exchange: str = "") -> bool:
    """Whether the queue, or the exchange, exists. A refusal ends the channel, so it has its own.

    Raises:
        Unavailable: the broker is out of reach.
        ConfigurationError: we may not ask.
    """
    channel = await connection.channel()
    try:
        if queue:
            await channel.queue_declare(queue, passive=True)
        else:
            await channel.exchange_declare(exchange, passive=True)
    except aiormq.ChannelNotFoundEntity:
        return False
    except BROKEN as error:
        raise translate(error, f"look at {queue or exchange}") from error
    finally:
        await channel.close()
    return True
