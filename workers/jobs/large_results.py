"""Stores results that are too large for a message in the object store.

Records and the cache carry the keys of the largest, replies also those of smaller ones.
"""

from __future__ import annotations

import asyncio
import operator
import time

import msgspec

from shared.backoff import backoff
from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.errors import Unavailable
from shared.messages import Envelope, ItemOutcome, ReplyBody
from shared.stores.objects import ObjectStore

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0


class LargeResults:
    """Stores the blobs of results that are too large for a record or for a reply.

    Args:
        objects: stores them.
        reply_limit_bytes: the largest blob in a reply. It is at most that of a record.
        keep_limit_s: how long to retry while the store is unavailable.
    """

    def __init__(
        self, objects: ObjectStore, *, reply_limit_bytes: int, keep_limit_s: float
    ) -> None:
        self._objects = objects
        self._reply_limit_bytes = reply_limit_bytes
        self._keep_limit_s = keep_limit_s

    async def stored(self, envelope: Envelope, outcome: ItemOutcome) -> ItemOutcome:
        """The outcome as records carry it, with a key in place of a large blob.

        Raises:
            Unavailable: the store was unavailable until the deadline or for `keep_limit_s`.
        """
        return await self._with_key(envelope, outcome, INLINE_LIMIT_BYTES)

    async def for_reply(self, envelope: Envelope, body: ReplyBody) -> ReplyBody:
        """The body as its reply carries it. It is the same object if nothing changes.

        A prediction is read from its record, so its reply has no results.

        Raises:
            Unavailable: as `stored` does.
        """
        if envelope.prediction:
            outcomes = [msgspec.structs.replace(one, result=None) for one in body.outcomes]
            return msgspec.structs.replace(body, outcomes=outcomes)
        limit_bytes = self._reply_limit_bytes
        if limit_bytes == INLINE_LIMIT_BYTES:  # it was kept when the record was made
            return body
        outcomes = [await self._with_key(envelope, one, limit_bytes) for one in body.outcomes]
        is_same = all(map(operator.is_, outcomes, body.outcomes))
        return body if is_same else msgspec.structs.replace(body, outcomes=outcomes)

    async def _with_key(
        self, envelope: Envelope, outcome: ItemOutcome, limit_bytes: int
    ) -> ItemOutcome:
        result = outcome.result
        blob = None if result is None else result.blob
        if result is None or blob is None or blob.data is None or len(blob.data) <= limit_bytes:
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
