"""A group commit: all changes since the last one, with each item once, in its final state."""

import asyncio
from collections.abc import Callable

MESSAGE_OVERHEAD_BYTES = 200
"""Memory a small message uses here, in addition to its own bytes."""
_HELD_ROW_BYTES = 100
_FEW_PAGES_BYTES = 64 * 1024

ResourceRow = tuple[int, float, bytes]
"""Holder number, time in seconds since the epoch, serialized proto."""
HeldRow = tuple[int, int]
"""The delivery's number, and the number of handouts so far or `journal.ACKED`."""


class Changes:
    """A transaction's changes. None in place of a row means the row is deleted."""

    def __init__(self) -> None:
        self.resources: dict[str, ResourceRow | None] = {}
        self.messages: dict[int, bytes] = {}
        self.dropped: set[int] = set()
        self.held: dict[tuple[int, int], HeldRow | None] = {}
        """Keyed by message sequence and holder."""
        self.offered: set[int] = set()
        """Sequence numbers of messages whose publishers are waiting for the result."""
        self.afterwards: list[Callable[[], None]] = []
        """Actions to run once this is written, after waiting callers have resumed."""
        self.size_bytes = 0
        self.error = ""
        self.again_in: Changes | None = None
        """Everything except offered messages, to retry once space is freed after a failed write."""
        self._settled = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self.resources or self.messages or self.dropped or self.held)

    @property
    def log_bytes(self) -> int:
        """Approximate size of this commit's transaction in the log, in whole pages."""
        return self.size_bytes * 5 // 4 + len(self.held) * _HELD_ROW_BYTES + _FEW_PAGES_BYTES

    def keep(self, sequence: int, data: bytes) -> None:
        self.messages[sequence] = data
        self.size_bytes += len(data) + MESSAGE_OVERHEAD_BYTES

    def release(self, sequence: int, holder: int) -> None:
        """Remove a message's holder. If the message was added in this commit, no trace is left."""
        if sequence in self.messages:
            self.held.pop((sequence, holder), None)
        else:
            self.held[sequence, holder] = None

    def drop(self, sequence: int) -> None:
        """Remove a message. If it was added in this commit, no trace is left."""
        data = self.messages.pop(sequence, None)
        if data is None:
            self.dropped.add(sequence)
        else:
            self.size_bytes -= len(data) + MESSAGE_OVERHEAD_BYTES

    def followed_by(self, later: "Changes") -> "Changes":
        """Merge both sets of changes, so that a failed commit is retried with the next one."""
        both = Changes()
        both.resources = self.resources | later.resources
        both.held = self.held | later.held
        both.dropped = set(self.dropped)
        both.offered = self.offered | later.offered
        both.afterwards = self.afterwards + later.afterwards
        for sequence, data in (*self.messages.items(), *later.messages.items()):
            both.keep(sequence, data)
        for sequence in later.dropped:
            both.drop(sequence)
        return both

    def settle(self, error: str = "") -> None:
        """Wake all waiting callers. `error` is the reason the changes were not written, or ""."""
        self.error = error
        self._settled.set()

    async def wait(self) -> None:
        """Wait until `settle`."""
        await self._settled.wait()
