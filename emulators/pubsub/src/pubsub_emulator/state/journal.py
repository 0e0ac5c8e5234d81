"""The interface for changes that must survive the process.

This base journal stores nothing; it serves an in-memory broker.

A broker with a data directory uses `durable.DurableJournal`.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pubsub_emulator.protos import Message

if TYPE_CHECKING:
    from pubsub_emulator.state.message import StoredMessage

ACKED = -1
"""Stored in place of the attempts if the message was acked and the subscription retains it."""


class Resource(Protocol):
    """A topic, subscription or snapshot in stored form.

    `holder` is the number under which the resource holds messages.
    """

    path: str
    holder: int
    proto: Message

    @property
    def moment_s(self) -> float:
        """Return a subscription's last use, a snapshot's latest expiration, or 0 for a topic."""


class ChangeJournal:
    """Stores nothing: each method is a point where a durable journal records something."""

    def save(self, resource: Resource) -> None:
        """Record that a resource was created or changed."""

    def erase(self, path: str) -> None:
        """Record that a resource was deleted."""

    def keep(self, message: "StoredMessage") -> None:
        """Record a new message. The message remains until it is dropped."""

    def drop(self, sequence: int) -> None:
        """Record that no subscription or snapshot holds a message anymore."""

    def offered(self, sequence: int) -> None:
        """Record that a message's publisher is waiting for the response.

        Until the response is sent, the message may be rolled back.
        """

    def hold(
        self, message: "StoredMessage", holder: int, number: int = 0, attempts: int = 0
    ) -> None:
        """Record that a resource holds a message: the delivery number and attempts, or `ACKED`."""

    def release(self, message: "StoredMessage", holder: int) -> None:
        """Record that a resource no longer holds a message."""

    def admit(self) -> None:
        """Reject a call whose changes must be durable, before it changes anything.

        Raises:
            ServerUnavailable: nothing can be stored at the moment.
        """

    async def committed(self) -> None:
        """Wait until everything recorded so far will survive this process.

        Raises:
            ServerUnavailable: storing failed. Uncommitted messages were withdrawn.
        """

    async def acks_committed(self) -> None:
        """Wait until all acks recorded so far will survive this process.

        Raises:
            ServerUnavailable: they could not be stored yet.
        """

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call `act` once everything recorded so far will survive this process.

        Callers waiting for this in `committed` resume first.
        """
        asyncio.get_running_loop().call_soon(act)
