"""Enforces an exact limit on open batches per owner, even if many instances create batches at once.

Admissions are objects with consecutive numbers. Each contains the IDs of all batches open after
that admission, so the last one is the current state. An instance reads the last admission, drops
finished batches, and writes the next number, which the store allows only one writer to do
(`ObjectStore.create`). A slower writer starts over. A batch gets its marker before its admission,
so a batch without a marker is finished.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

import msgspec

from api.batches.names import ADMISSIONS
from shared.errors import BadInput, Overloaded, Unavailable
from shared.process.concurrency import backoff
from shared.stores.objects import ObjectStore

KEPT = 1000
"""Number of admissions to keep.

A number is not reused while an instance may still try to write it, because no owner can have KEPT
batches admitted within MAX_S.
"""
MAX_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.01, 0.2
_LAST = 10**12 - 1
_MAX_BYTES = 1024 * 1024
_ids = msgspec.json.Decoder(list[str])


class Admissions:
    """All owners' admissions.

    Args:
        open_ids: returns the IDs of an owner's batches that have markers.
    """

    def __init__(
        self, objects: ObjectStore, open_ids: Callable[[str], Awaitable[set[str]]]
    ) -> None:
        self._objects = objects
        self._open_ids = open_ids
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def admit(
        self, owner: str, batch_id: str, max_open: int, mark: Callable[[], Awaitable[None]]
    ) -> bool:
        """Admits a batch unless its owner already has `max_open` open batches.

        Args:
            max_open: the maximum number of open batches.
            mark: writes the batch's marker. Called before the batch is admitted, unless there was
                no room to begin with.

        Returns:
            True if the batch was admitted. If not, the batch may still have a marker.

        Raises:
            Overloaded: other instances kept winning the race for MAX_S.
            Unavailable: the object store is unreachable.
        """
        # Concurrent calls in one process would only compete for the numbers.
        turn = self._turns.setdefault(owner, asyncio.Lock())
        try:
            async with asyncio.timeout(MAX_S), turn:
                return await self._admit(owner, batch_id, max_open, mark)
        except TimeoutError as error:
            raise Overloaded("too many of your batches are being created at once") from error

    async def _admit(
        self, owner: str, batch_id: str, max_open: int, mark: Callable[[], Awaitable[None]]
    ) -> bool:
        is_marked = False
        for pause_s in backoff(FIRST_PAUSE_S, MAX_PAUSE_S):
            last, open_ids = await self._state(owner)
            # Either the store reported a conflict although the object was written, or another
            # instance counted the batch when it read the markers.
            if batch_id in open_ids:
                return True
            if len(open_ids) >= max_open:
                return False
            if not is_marked:
                await mark()
                is_marked = True
            data = msgspec.json.encode([*open_ids, batch_id])
            if await self._objects.create(_key(owner, last + 1), data, "application/json"):
                with contextlib.suppress(Unavailable):
                    await self._objects.delete(_key(owner, last + 1 - KEPT))
                return True
            await asyncio.sleep(pause_s)
        raise AssertionError("backoff ended; this is a bug")

    async def _state(self, owner: str) -> tuple[int, list[str]]:
        """Returns the number of the last admission, and the owner's open batches.

        A batch is open if it is in that admission and still has a marker. Without an admission, a
        marker is enough.
        """
        listed = await self._objects.listing(f"{ADMISSIONS}/{owner}", 1)
        marked = await self._open_ids(owner)
        if not listed:  # batches from an earlier release, if any
            return 0, sorted(marked)
        number = _LAST - int(listed[0].key.rpartition("/")[2])
        try:
            admitted = _ids.decode(await self._objects.get(listed[0].key, _MAX_BYTES))
        except BadInput:  # so old that the store deleted it
            return number, sorted(marked)
        return number, [batch_id for batch_id in admitted if batch_id in marked]


def _key(owner: str, number: int) -> str:
    """Returns an admission's key. Numbers count down so that the last one is listed first."""
    return f"{ADMISSIONS}/{owner}/{_LAST - number:012d}"
