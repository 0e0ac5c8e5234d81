"""Limits for waiting on the broker: no wait may outlast its channel.

If the connection breaks while an aiormq call is waiting for room to write, that call and all later
calls never return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from aiormq import Channel, ChannelInvalidStateError

ANSWER_LIMIT_S = 5.0
"""Initial time limit for a broker response before retrying."""
MAX_ANSWER_LIMIT_S = 60.0
"""A slow broker must not be queried more and more often."""
CLOSE_LIMIT_S = 2.0

T = TypeVar("T")


class ChannelWaits:
    """Pending waits on one channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._limits: set[asyncio.Timeout] = set()
        channel.closing.add_done_callback(self._end)

    @property
    def is_idle(self) -> bool:
        return not self._limits

    async def within(self, limit_s: float, answer: Awaitable[T]) -> T:
        """Waits for a response from the broker.

        Raises:
            TimeoutError: no response arrived within `limit_s`, even though the channel is open.
            aiormq.AMQPError: the broker rejected the call. aiormq.ChannelInvalidStateError: the
            channel was closed.
        """
        try:
            with only_own_cancellation():
                async with asyncio.timeout(limit_s) as limit:
                    self._limits.add(limit)
                    try:
                        return await answer
                    finally:
                        self._limits.discard(limit)
        except TimeoutError:
            if self.channel.is_closed:
                raise ChannelInvalidStateError("the channel closed") from None
            raise

    def _end(self, _: object) -> None:
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now_s)


async def close_channel(channel: Channel) -> None:
    """Closes a channel, or gives up on it if the broker does not respond."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await channel.close()


def longer(limit_s: float) -> float:
    """Returns the time limit to use next if no response arrived within `limit_s`."""
    return min(2 * limit_s, MAX_ANSWER_LIMIT_S)


@contextmanager
def only_own_cancellation() -> Iterator[None]:
    """Distinguishes our own cancellation from aiormq's cancellation on a silent connection.

    Raises:
        aiormq.ChannelInvalidStateError: raised in place of aiormq's cancellation.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ChannelInvalidStateError("the connection closed") from None
