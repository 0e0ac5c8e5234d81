"""Where every job ends: result stored, reply published and awaited, cache filled, then ack, then the rows.

One function decides (`_finish`), and only this file acks or nacks. A job is nacked only if its reply could not be
handed to the broker, or if it is handed back unfinished; so whatever dies before the ack, the job comes again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from shared.cache import ResultCache
from shared.catalogue import Model
from shared.errors import BadInput, PenstockError, UndecodableMessage
from shared.messages import (
    INLINE_LIMIT_BYTES,
    Blob,
    Envelope,
    ImageResult,
    ItemError,
    ItemOutcome,
    Reply,
    ReplyBody,
    encode_reply,
)
from shared.names import dead_letter_topic_id
from shared.objects import ObjectStore
from shared.transport import Message, Publisher, Subscription
from shared.usage import Row
from workers import metrics
from workers.job import JobInHand, WorkerFacts, row_for

log = logging.getLogger(__name__)


class RowSink(Protocol):
    """Takes rows; never blocks and never raises."""

    def write(self, row: Row) -> None:
        """Queues one row."""


class Finisher:
    """Ends jobs. Its work is bounded by the messages in hand."""

    def __init__(
        self,
        model: Model,
        publisher: Publisher,
        cache: ResultCache,
        objects: ObjectStore,
        rows: RowSink,
        facts: WorkerFacts,
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._cache = cache
        self._objects = objects
        self._rows = rows
        self._facts = facts
        self._in_hand: set[JobInHand] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, hand: JobInHand) -> None:
        """From now on `hand` is in our hands, until it is finished or handed back."""
        self._in_hand.add(hand)
        self._idle.clear()

    def settle(self, hand: JobInHand, outcome: ItemOutcome) -> None:
        """Puts the outcome on an item; the last one finishes the job."""
        if hand.is_over:
            return
        hand.outcomes[outcome.index] = outcome
        if len(hand.outcomes) == len(hand.items):
            hand.is_over = True
            self._spawn(self._finish(hand))

    async def _finish(self, hand: JobInHand) -> None:
        envelope = hand.envelope
        outcomes = [hand.outcomes[item.index] for item in hand.items]
        try:
            outcomes = [await self._store_large(envelope, outcome) for outcome in outcomes]
            replied_at_s = time.time()
            body = ReplyBody(outcomes, None, self._facts.worker, self._facts.device, replied_at_s)
            await self._reply(envelope, body)
            # Only now: a caller waits for the reply, nobody for the cache; until then a repeat joins the entry.
            await self._fill_cache(hand, outcomes)
        except PenstockError as error:
            log.warning("reply not sent", extra={"request_id": envelope.request_id, "reason": error.message})
            self._give_up(hand)
            return
        hand.subscription.ack(hand.message)
        self._let_go(hand)
        for outcome in outcomes:
            metrics.ITEMS.labels(outcome.status, outcome.receipt.cache).inc()
            self._rows.write(row_for(self._model, self._facts, envelope, outcome, replied_at_s))

    async def _store_large(self, envelope: Envelope, outcome: ItemOutcome) -> ItemOutcome:
        """Images above the inline limit go to the object store; the reply and the cache carry their key."""
        result = outcome.result
        if not isinstance(result, ImageResult) or result.image.data is None:
            return outcome
        if len(result.image.data) <= INLINE_LIMIT_BYTES:
            return outcome
        key = f"results/{envelope.request_id}/{outcome.index}"
        await self._objects.put(key, result.image.data, result.image.media_type)
        image = Blob(result.image.media_type, object_key=key)
        return msgspec.structs.replace(outcome, result=msgspec.structs.replace(result, image=image))

    async def _fill_cache(self, hand: JobInHand, outcomes: list[ItemOutcome]) -> None:
        results = {outcome.index: outcome.result for outcome in outcomes}
        found = {key: results[index] for key, index in hand.to_cache.items()}
        kept = {key: result for key, result in found.items() if result is not None}
        if kept and self._model.cache.ttl_s:
            await self._cache.put_many(kept, self._model.cache.ttl_s)

    async def _reply(self, envelope: Envelope, body: ReplyBody) -> None:
        """Publishes the reply and waits until the broker has it; a job without an inbox has nobody to tell."""
        if not envelope.inbox:
            return
        data, attributes = encode_reply(Reply(envelope.request_id, envelope.part, envelope.slot, body))
        try:
            await self._publisher.publish(envelope.inbox, data, attributes)
        except BadInput as error:
            # The inbox went with its instance: nobody waits, and handing the job back would repeat it for ever.
            log.warning("inbox refused a reply", extra={"inbox": envelope.inbox, "reason": error.message})
            metrics.REPLIES_REFUSED.inc()

    def refuse(self, message: Message, error: UndecodableMessage, subscription: Subscription) -> None:
        """Ends a message that is no job of ours: answered if it says whom, dead-lettered with the reason otherwise."""
        log.warning("message is no job", extra={"message_id": message.message_id, "reason": error.message})
        metrics.UNDECODABLE.inc()
        self._spawn(self._refuse(message, error, subscription))

    async def _refuse(self, message: Message, error: UndecodableMessage, subscription: Subscription) -> None:
        try:
            envelope = Envelope.from_attributes(message.attributes)
        except UndecodableMessage:
            envelope = None
        try:
            if envelope is not None and envelope.inbox:
                reason = ItemError(error.code, error.message, error.field)
                await self._reply(envelope, ReplyBody([], reason, self._facts.worker, replied_at_s=time.time()))
            else:
                attributes = {**message.attributes, "penstock_reason": error.message[:1000]}
                await self._publisher.publish(dead_letter_topic_id(self._model.name), message.data, attributes)
        except PenstockError as failed:
            log.warning("refusal not sent", extra={"message_id": message.message_id, "reason": failed.message})
            subscription.nack(message)
            return
        subscription.ack(message)

    def hand_back(self, hand: JobInHand) -> None:
        """Gives an unfinished job back to the broker, for this or another worker to try again."""
        if not hand.is_over:
            hand.is_over = True
            self._give_up(hand)

    async def wait_idle(self) -> None:
        """Returns when nothing is in hand."""
        await self._idle.wait()

    def hand_back_all(self) -> None:
        """Gives back what is still in hand; for the end, when nothing will finish it any more."""
        for hand in list(self._in_hand):
            self.hand_back(hand)
        for task in list(self._tasks):
            task.cancel()

    def _give_up(self, hand: JobInHand) -> None:
        metrics.HANDED_BACK.inc()
        hand.subscription.nack(hand.message)
        self._let_go(hand)

    def _let_go(self, hand: JobInHand) -> None:
        self._in_hand.discard(hand)
        self._check_idle()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._idle.clear()
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._check_idle()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("finishing a job failed; this is a bug", exc_info=error)

    def _check_idle(self) -> None:
        if not self._in_hand and not self._tasks:
            self._idle.set()
