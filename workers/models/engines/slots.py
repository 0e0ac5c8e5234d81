"""An engine's slots, and the turns that owners and adapters take.

An engine keeps the keys and values of the most recent text in each slot. A generation gets its
owner's free slot whose text shares the longest prefix with it. A slot last used by a different
owner starts empty, because otherwise the time that a prompt takes would reveal other owners'
prompts. The same tenant's texts with different adapters count as different owners' texts here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.models.generation.prefixes import count_common

TURN_TOKENS = 16
"""Number of tokens that a text may process before texts with other adapters get their turn."""


@dataclass
class EngineSlot:
    """A slot. `ids`: tokens whose keys and values the slot may contain.

    `owner`: None if the slot has not been used yet.
    """

    number: int
    owner: str | None = None
    ids: Sequence[int] = ()
    is_busy: bool = False
    freed: int = 0


class EngineSlots:
    """An engine's slots."""

    def __init__(self, count: int) -> None:
        self._slots = [EngineSlot(number) for number in range(count)]
        self._frees = itertools.count(1)

    def take(self, owner: str, ids: Sequence[int]) -> tuple[EngineSlot, int]:
        """Takes a slot for a generation.

        Returns the slot, and how many of `ids` it has already read.

        Args:
            owner: the generation's owner. If empty, nothing is shared.
            ids: the generation's first tokens.
        """
        free = [slot for slot in self._slots if not slot.is_busy]
        own = [
            (count_common(slot.ids, ids), slot) for slot in free if owner and slot.owner == owner
        ]
        oldest = min(free, key=lambda slot: (slot.owner is not None, slot.freed))
        known, best = max(own, key=lambda pair: pair[0], default=(0, oldest))
        if not known and len(own) < len(free):
            best = oldest
        best.owner, best.is_busy = owner, True
        return best, known

    def free(self, slot: EngineSlot, ids: Sequence[int]) -> None:
        """Returns a slot that has computed these tokens."""
        slot.is_busy, slot.ids, slot.freed = False, ids, next(self._frees)


@dataclass(eq=False)
class ReadingPermit:
    """A part of a prompt that is waiting or being read."""

    permits: ReadingPermits
    owner: str
    tokens: int
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    def end(self) -> None:
        """Lets the next part start. Calling it again does nothing."""
        if not self.is_over:
            self.is_over = True
            self.permits.end(self)


class ReadingPermits:
    """Limits how many prompt tokens an engine reads at a time. Owners take turns.

    If prompts were read strictly in order of arrival, a short prompt would wait for all of another
    owner's long prompts. Left to itself, an engine would read its prompts in a different order.

    Args:
        max_tokens: maximum number of tokens to process at a time.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._reading = 0
        self._waiting: list[ReadingPermit] = []
        self._last: dict[str, int] = {}
        """When each owner's prompt was last read, as a count of parts."""

    async def begin(self, owner: str, tokens: int) -> ReadingPermit:
        """Waits until this many of an owner's tokens, capped at `max_tokens`, may be read."""
        permit = ReadingPermit(self, owner, min(tokens, self._max_tokens))
        self._waiting.append(permit)
        self._admit()
        try:
            await permit.ready.wait()
        except asyncio.CancelledError:
            permit.end()
            raise
        return permit

    def end(self, permit: ReadingPermit) -> None:
        """Records that a part has been read or won't be read."""
        if permit in self._waiting:
            self._waiting.remove(permit)
        else:
            self._reading -= permit.tokens
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            first = min(self._waiting, key=lambda permit: self._last.get(permit.owner, 0))
            if self._reading + first.tokens > self._max_tokens:
                return
            self._waiting.remove(first)
            self._reading += first.tokens
            self._last[first.owner] = max(self._last.values(), default=0) + 1
            first.ready.set()
        if not self._reading:
            self._last.clear()


@dataclass(eq=False)
class AdapterPermit:
    """A text that is waiting for its adapter's turn, or may run.

    `tokens`: number of tokens read and written with this permit.
    """

    permits: AdapterPermits
    owner: str
    adapter: str
    tokens: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    @property
    def is_used_up(self) -> bool:
        """True if the text must let others run. If there are no others, it never is."""
        return self.is_over or (self.tokens >= TURN_TOKENS and self.permits.are_others_waiting)

    def end(self) -> None:
        """Lets others run. Calling it again does nothing."""
        if not self.is_over:
            self.is_over = True
            self.permits.end(self)


class AdapterPermits:
    """Lets texts with the same adapter run together, while those with others wait for their turn.

    llama.cpp computes only texts with the same adapter together, and doesn't guarantee that the
    others continue before a text ends.
    """

    def __init__(self) -> None:
        self._adapter = ""
        self._running = 0
        self._waiting: list[AdapterPermit] = []
        self._turn = 0
        self._last: dict[str, int] = {}
        """The last turn in which each owner's texts ran."""

    @property
    def are_others_waiting(self) -> bool:
        return bool(self._waiting)

    async def begin(self, owner: str, adapter: str) -> AdapterPermit:
        """Waits until a text with this adapter may run."""
        permit = AdapterPermit(self, owner, adapter)
        self._waiting.append(permit)
        self._admit()
        try:
            await permit.ready.wait()
        except asyncio.CancelledError:
            permit.end()
            raise
        return permit

    def end(self, permit: AdapterPermit) -> None:
        """Records that a text has had its turn or no longer needs it."""
        if permit in self._waiting:
            self._waiting.remove(permit)
        else:
            self._running -= 1
        self._admit()

    def _admit(self) -> None:
        """Starts all waiting texts with the adapter whose turn it is."""
        if not self._waiting:
            if not self._running:
                self._last.clear()
            return
        if not self._running:
            first = min(self._waiting, key=lambda permit: self._last.get(permit.owner, 0))
            self._adapter = first.adapter
            self._turn += 1
        elif any(permit.adapter != self._adapter for permit in self._waiting):
            return
        ready = [permit for permit in self._waiting if permit.adapter == self._adapter]
        for permit in ready:
            self._waiting.remove(permit)
            self._last[permit.owner] = self._turn
            self._running += 1
            permit.ready.set()
