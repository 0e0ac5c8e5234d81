"""Limits of the waits for the broker: none may last longer than the channel it is on.

aiormq itself never ends a call that waits for room to write while its connection breaks, nor
any call behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from aiormq import Channel, ChannelInvalidStateError

ANSWER_LIMIT_S = 5.0
"""The time that the broker may take to answer before it is asked again, the first time."""
MAX_ANSWER_LIMIT_S = 60.0
"""A broker that is slow, and not deaf, must not be asked ever more."""
CLOSE_LIMIT_S = 2.0

T = TypeVar("T")


class ChannelWaits:
    """The waits on one channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._limits: set[asyncio.Timeout] = set()
        channel.closing.add_done_callback(self._end)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits."""
        return not self._limits

    async def within(self, limit_s: float, answer: Awaitable[T]) -> T:
        """Waits for an answer of the broker.

        Raises:
            TimeoutError: it did not come within `limit_s`, though the channel is open.
            aiormq.AMQPError: the broker refuses.
            aiormq.ChannelInvalidStateError: the channel ended.
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
                raise ChannelInvalidStateError("the channel ended") from None
            raise

    def _end(self, _: object) -> None:
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now_s)


async def close_channel(channel: Channel) -> None:
    """Closes a channel, or gives up on one whose broker does not answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await channel.close()


def longer(limit_s: float) -> float:
    """The limit of the next answer, after none came within `limit_s`."""
    return min(2 * limit_s, MAX_ANSWER_LIMIT_S)


@contextmanager
def only_own_cancellation() -> Iterator[None]:
    """Separates our own cancellation from the one that aiormq uses on a silent connection.

    Raises:
        aiormq.ChannelInvalidStateError: in the place of such an error.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ChannelInvalidStateError("the connection ended") from None
