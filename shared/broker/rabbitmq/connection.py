"""A RabbitMQ connection that reopens on next use, and error translation."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

import aiormq
from aiormq import Channel, Connection
from yarl import URL

from shared.broker.rabbitmq.waits import ANSWER_LIMIT_S, CLOSE_LIMIT_S, only_own_cancellation
from shared.errors import BadInput, ConfigurationError, PenstockError, Unavailable
from shared.process.concurrency import backoff

CONNECT_LIMIT_S = 5.0
MAX_PAUSE_S = 2.0
"""Pause between connection attempts. A restarting broker comes back within seconds."""
HEARTBEAT_S = 10
"""The broker and the client drop a connection after two or three of these intervals without data.

A dying process closes its connection immediately. This is for detecting machines and networks that
go down.
"""

BROKEN = (
    aiormq.AMQPError,
    aiormq.ChannelInvalidStateError,
    OSError,
    EOFError,
    TimeoutError,
    StopAsyncIteration,
)
"""Errors that aiormq raises when a channel or its connection is closed, or when the broker rejects
a call.

The last error is raised if a connection is lost during its handshake.
"""


class BrokerConnection:
    """An AMQP connection. Opens on first use, and reopens after it breaks.

    Args:
        answer_limit_s: initial time limit for a response on an open channel.
    """

    def __init__(self, url: URL, name: str, answer_limit_s: float = ANSWER_LIMIT_S) -> None:
        self.answer_limit_s = answer_limit_s
        self._url = url.update_query(heartbeat=HEARTBEAT_S, name=name)
        self._current: Connection | None = None
        self._lock = asyncio.Lock()
        self._pauses = backoff(longest_s=MAX_PAUSE_S)
        self._is_closed = False

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Opens a channel.

        Args:
            confirms: True if the broker should confirm messages published on the channel.

        Raises:
            Unavailable: the broker is unreachable, or this connection has been closed permanently.
            ConfigurationError: the broker rejects our credentials or the vhost.
        """
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                with only_own_cancellation():
                    return await self._open_channel(confirms)
        except BROKEN as error:
            raise translate(error, f"connect to {self._where}") from error

    async def close(self) -> None:
        self._is_closed = True
        if self._current is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self._current.close()

    @property
    def _where(self) -> str:
        return f"{self._url.host}:{self._url.port}"

    async def _open_channel(self, confirms: bool) -> Channel:
        connection = await self._connect()
        channel = await connection.channel(publisher_confirms=confirms, on_return_raises=False)
        return cast(Channel, channel)

    async def _connect(self) -> Connection:
        async with self._lock:
            if self._is_closed:
                raise Unavailable("the connection to the broker is closed")
            if self._current is None or self._current.is_closed:
                try:
                    self._current = await aiormq.connect(self._url)
                except BROKEN:
                    # A task waiting for the lock must not retry immediately.
                    await asyncio.sleep(next(self._pauses))
                    raise
                self._pauses = backoff(longest_s=MAX_PAUSE_S)
            return self._current


def translate(error: BaseException, action: str) -> PenstockError:
    """Translates an aiormq failure into a PenstockError. The message begins with `action`."""
    message = f"{action}: {type(error).__name__}: {error}".rstrip(": ")
    refused_us = (
        aiormq.AuthenticationError,
        aiormq.ProbableAuthenticationError,
        aiormq.ChannelAccessRefused,
        aiormq.ConnectionNotAllowed,
    )
    if isinstance(error, refused_us):
        return ConfigurationError(message, field="credentials")
    if isinstance(error, aiormq.ChannelPreconditionFailed):
        return ConfigurationError(message, field="broker")
    if isinstance(error, aiormq.ChannelNotFoundEntity):
        return BadInput(message, public="the message was rejected")
    return Unavailable(message)
