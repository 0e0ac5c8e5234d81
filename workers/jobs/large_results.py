"""Stores results that are too large for a message in the object store.

Records and the cache contain only keys for the largest results; replies also contain keys for
smaller ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import time
from collections import OrderedDict

import msgspec

from shared.errors import (
    Unavailable,
)
from shared.messages import (
    Envelope,
    ItemOutcome,
    ReplyBody,
)
from shared.models.blob import INLINE_LIMIT_BYTES, RESULTS, Blob, content_digest
from shared.models.tasks.custom import CustomResult
from shared.process.concurrency import backoff
from shared.stores.held_bytes import hold
from shared.stores.objects import ObjectStore

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 4.0
RESULTS_COUNT_S = 3600.0
"""How long after the deadline a custom class's files count toward the tenant's storage quota: the
default for `PENSTOCK_PREDICTION_KEEP_S`.
"""
MAX_STREAMED = 4096
"""Maximum number of keys to remember, so that streamed files are not stored twice."""
KEEP_LIMIT_S = 60.0
"""How long a result waits while Redis or the object store is unavailable."""


class LargeResults:
    """Stores the blobs of results that are too large for a record or a reply.

    Args:
        reply_limit_bytes: maximum size of a blob in a reply, at most the maximum in a record.
        keep_limit_s: how long to retry while the store is unavailable.
    """

    def __init__(
        self, objects: ObjectStore, *, reply_limit_bytes: int, keep_limit_s: float
    ) -> None:
        self._objects = objects
        self._reply_limit_bytes = reply_limit_bytes
        self._keep_limit_s = keep_limit_s
        self._streamed: OrderedDict[str, None] = OrderedDict()
        """Keys of the latest files that were stored before their results."""

    async def store(self, envelope: Envelope, outcome: ItemOutcome) -> ItemOutcome:
        """Returns the outcome for records, with a key in place of a large blob.

        Raises:
            Unavailable: the store was unavailable until the deadline or for `keep_limit_s`.
        """
        return await self._with_key(envelope, outcome, INLINE_LIMIT_BYTES)

    async def for_reply(self, envelope: Envelope, body: ReplyBody) -> ReplyBody:
        """Returns the body for the reply. It is the same object if nothing changed.

        A prediction is read from its record, so its reply has no results.

        Raises:
            Unavailable: same as for `store`.
        """
        if envelope.has_record:
            outcomes = [msgspec.structs.replace(outcome, result=None) for outcome in body.outcomes]
            return msgspec.structs.replace(body, outcomes=outcomes)
        limit_bytes = self._reply_limit_bytes
        if limit_bytes == INLINE_LIMIT_BYTES:  # already stored with the record
            return body
        outcomes = await asyncio.gather(
            *(self._with_key(envelope, outcome, limit_bytes) for outcome in body.outcomes)
        )
        is_same = all(map(operator.is_, outcomes, body.outcomes))
        return body if is_same else msgspec.structs.replace(body, outcomes=outcomes)

    async def _with_key(
        self, envelope: Envelope, outcome: ItemOutcome, limit_bytes: int
    ) -> ItemOutcome:
        result = outcome.result
        if result is None or not any(_is_large(blob, limit_bytes) for blob in result.blobs):
            return outcome
        blobs, stored_bytes = list[Blob](), 0
        key = f"{RESULTS}/{envelope.request_id}/{outcome.index}"
        for number, blob in enumerate(result.blobs):
            if _is_large(blob, limit_bytes):
                own_key, data = key + result.blob_suffix(number), blob.data or b""
                if own_key not in self._streamed:
                    await self._put(own_key, data, blob.media_type, envelope.deadline_s)
                # Another step may use these bytes to look up its cached result.
                digest = content_digest(data) if envelope.flow else ""
                blob = Blob(blob.media_type, object_key=own_key, digest=digest)
                stored_bytes += len(data)
            blobs.append(blob)
        is_kept = envelope.has_record or envelope.flow  # otherwise, a caller is waiting
        if stored_bytes and is_kept and isinstance(result, CustomResult):
            until_s = envelope.deadline_s + RESULTS_COUNT_S
            with contextlib.suppress(Unavailable):  # a result isn't lost if it can't be counted
                await hold(self._objects, envelope.tenant, stored_bytes, until_s)
        return msgspec.structs.replace(outcome, result=result.with_blobs(blobs))

    async def store_streamed(self, envelope: Envelope, key: str, blob: Blob) -> None:
        """Stores a result file that isn't in the store yet. Small files are in the stream.

        Raises:
            Unavailable: same as for `store`.
        """
        if _is_large(blob, INLINE_LIMIT_BYTES):
            await self._put(key, blob.data or b"", blob.media_type, envelope.deadline_s)
            self._streamed[key] = None
            if len(self._streamed) > MAX_STREAMED:
                self._streamed.popitem(last=False)

    async def _put(self, key: str, data: bytes, media_type: str, deadline_s: float) -> None:
        """Stores an object.

        Retries while the store is unavailable, which costs less than computing a new image.
        """
        until_s = min(deadline_s, time.time() + self._keep_limit_s)
        pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            try:
                return await self._objects.put(key, data, media_type)
            except Unavailable:
                pause_s = next(pauses)
                if time.time() + pause_s > until_s:
                    raise
            await asyncio.sleep(pause_s)


def _is_large(blob: Blob, limit_bytes: int) -> bool:
    return blob.data is not None and len(blob.data) > limit_bytes
