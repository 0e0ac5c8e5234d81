"""Publishes the reply of a job, or a refusal and a dead letter.

Results that are too large for a message are stored in the object store. Records and the cache carry
the keys of the largest, replies also those of smaller ones.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import time

import msgspec

from shared.backoff import backoff
from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.errors import BadInput, PenstockError, Unavailable, UndecodableMessage
from shared.messages import (
    Envelope,
    ItemOutcome,
    ReplyBody,
    encode_reply_body,
    error_item,
    reply_attributes,
    salvage_envelope,
)
from shared.stores.objects import ObjectStore
from shared.topics import dead_letter_topic_id
from shared.tracing.spans import read_attributes, set_current
from shared.transport import Message, Publisher, Subscription
from workers import metrics
from workers.jobs.spans import reply_span

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 4.0


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
        pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            try:
                return await self._objects.put(key, data, media_type)
            except Unavailable:
                pause_s = next(pauses)
                if time.time() + pause_s > until_s:
                    raise
            await asyncio.sleep(pause_s)


REASON_LIMIT_BYTES = 1000
"""An attribute has at most 1,024."""


class ReplyPublisher:
    """Publishes replies, refusals and dead letters of one model.

    Args:
        model: the name of the model.
        worker: the name of this worker.
        publisher: sends the messages.
    """

    def __init__(self, model: str, worker: str, publisher: Publisher) -> None:
        self._model = model
        self._worker = worker
        self._publisher = publisher

    async def publish(self, envelope: Envelope, body: bytes) -> bool:
        """Publishes a reply, as `encode_reply_body` wrote it, and waits until the broker has it.

        Returns False if the inbox no longer exists. A job without an inbox needs no reply.

        Raises:
            PenstockError: the broker did not take it.
        """
        if not envelope.inbox:
            return True
        try:
            with reply_span(envelope.inbox):
                attributes = reply_attributes(envelope.request_id, envelope.part, envelope.slot)
                await self._publisher.publish(envelope.inbox, body, attributes)
        except BadInput as error:
            # The API instance and its inbox are gone. Handing the job back would repeat it forever.
            facts = {"inbox": envelope.inbox, "reason": error.message}
            log.warning("inbox refused a reply", extra=facts)
            metrics.REPLIES_REFUSED.inc()
            return False
        return True

    async def publish_dead_letter(self, message: Message, reason: str) -> None:
        """Copies `message` to the dead letters, with the reason it failed.

        Raises:
            PenstockError: the broker did not take it.
        """
        attributes = {**message.attributes, "penstock_reason": _shortened(reason)}
        await self._publisher.publish(dead_letter_topic_id(self._model), message.data, attributes)

    async def refuse(
        self, message: Message, error: UndecodableMessage, subscription: Subscription
    ) -> None:
        """Ends a message that is not a job of this model. Replies if the attributes name an inbox.

        The dead-letter function ends its record and writes its row. Runs as a task of its own.
        """
        set_current(read_attributes(message.attributes))
        facts = {"message_id": message.message_id, "reason": error.message}
        log.warning("message is not a job", extra=facts)
        metrics.UNDECODABLE.inc()
        envelope = salvage_envelope(message.attributes)
        try:
            if envelope is not None:
                reason = error_item(error)
                body = ReplyBody([], reason, self._worker, replied_at_s=time.time())
                await self.publish(envelope, encode_reply_body(body))
            await self.publish_dead_letter(message, error.message)
        except PenstockError as failed:
            facts = {"message_id": message.message_id, "reason": failed.message}
            log.warning("refusal not sent", extra=facts)
            subscription.nack(message)
            return
        subscription.ack(message)


def _shortened(reason: str) -> str:
    return reason.encode(errors="replace")[:REASON_LIMIT_BYTES].decode(errors="ignore")
