"""The interface for changes that must outlive the process.

The journal here keeps nothing, for a broker in memory.

`durable.DurableJournal` is the one of a broker with a data directory.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pubsub_emulator.protos import Message

if TYPE_CHECKING:
    from pubsub_emulator.state.message import StoredMessage

ACKED = -1
"""In the place of the attempts: the subscription retains the message, acked."""


class Resource(Protocol):
    """A topic, subscription or snapshot, as it is saved.

    `holder` is its number among those that hold messages.
    """

    path: str
    holder: int
    proto: Message

    @property
    def moment_s(self) -> float:
        """A subscription's last use, or a snapshot's latest end. 0 for a topic."""


class ChangeJournal:
    """Keeps nothing: every method is a place where a durable journal takes note."""

    def save(self, resource: Resource) -> None:
        """Note that a resource was made or changed."""

    def erase(self, path: str) -> None:
        """Note that a resource is gone."""

    def keep(self, message: "StoredMessage") -> None:
        """Note a new message. It stays until it is dropped."""

    def drop(self, sequence: int) -> None:
        """Note that no subscription or snapshot holds a message any more."""

    def offered(self, sequence: int) -> None:
        """Note that a publisher waits for the answer to a message.

        Until then it may be withdrawn.
        """

    def hold(
        self, message: "StoredMessage", holder: int, number: int = 0, attempts: int = 0
    ) -> None:
        """Note that a resource holds a message: delivery number and attempts, or `ACKED`."""

    def release(self, message: "StoredMessage", holder: int) -> None:
        """Note that a resource no longer holds a message."""

    def admit(self) -> None:
        """Refuse a call that is to last, before it changes anything.

        Raises:
            Unavailable: nothing can be kept at the moment.
        """

    async def committed(self) -> None:
        """Wait until all that was noted so far will outlive this process.

        Raises:
            Unavailable: it could not be kept. Uncommitted messages were withdrawn.
        """

    async def acks_committed(self) -> None:
        """Wait until all acks that were noted so far will outlive this process.

        Raises:
            Unavailable: they could not be kept yet.
        """

    def after_commit(self, act: Callable[[], None]) -> None:
        """Act once all that was noted so far will outlive this process.

        Whoever waits for that in `committed` goes on first.
        """
        asyncio.get_running_loop().call_soon(act)
