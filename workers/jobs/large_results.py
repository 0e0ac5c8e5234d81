"""Stores results that are too large for a message in the object store.

Replies and the cache carry their keys.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from shared.backoff import backoff
from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.errors import Unavailable
from shared.messages import Envelope, ItemOutcome
from shared.stores.objects import ObjectStore

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0


class LargeResults:
    """Stores the blobs of results that are above the inline limit.

    Args:
        objects: stores them.
        keep_limit_s: how long to retry while the store is unavailable.
    """

    def __init__(self, objects: ObjectStore, keep_limit_s: float) -> None:
        self._objects = objects
        self._keep_limit_s = keep_limit_s

    async def stored(self, envelope: Envelope, outcome: ItemOutcome) -> ItemOutcome:
        """The outcome as replies carry it, with a key in place of a large blob.

        Raises:
            Unavailable: the store was unavailable until the deadline or for `keep_limit_s`.
        """
        result = outcome.result
        blob = None if result is None else result.blob
        if (
            result is None
            or blob is None
            or blob.data is None
            or len(blob.data) <= INLINE_LIMIT_BYTES
        ):
            return outcome
        key = f"results/{envelope.request_id}/{outcome.index}"
        await self._put(key, blob.data, blob.media_type, envelope.deadline_s)
        stored = result.with_blob(Blob(blob.media_type, object_key=key))
        return msgspec.structs.replace(outcome, result=stored)

    async def _put(self, key: str, data: bytes, media_type: str, deadline_s: float) -> None:
        """Stores an object.

        Retries while the store is unavailable, which costs less than a new image.
        """
        until_s = min(deadline_s, time.time() + self._keep_limit_s)
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                return await self._objects.put(key, data, media_type)
            except Unavailable:
                pause_s = next(pauses)
                if time.time() + pause_s > until_s:
                    raise
            await asyncio.sleep(pause_s)
