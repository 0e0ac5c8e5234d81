"""Where every job ends: result stored, record ended, reply published and awaited, cache filled, rows safe, then ack.

One function decides (`_finish`), and only this file acks or nacks. A job is nacked only if its record (of a prediction)
could not be ended, if its reply could not be handed to the broker, or if it is handed back unfinished; so whatever dies
before the ack, the job comes again. Whoever ended its record first has answered it: every later attempt repeats that
answer, and writes the same rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

from shared.catalog import Model
from shared.errors import BadInput, PenstockError, Unavailable, UndecodableMessage
from shared.messages import (
    Envelope,
    ItemError,
    ItemOutcome,
    Reply,
    ReplyBody,
    decode_reply_body,
    encode_reply,
    encode_reply_body,
)
from shared.pubsub.names import WEBHOOKS_TOPIC_ID, dead_letter_topic_id
from shared.salvage import salvaged
from shared.stores.cache import ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.records import LATE_LOOK_S, Claim, Records
from shared.transport import Message, Publisher, Subscription
from shared.usage.row import RowSink
from shared.webhooks import EventName, WebhookEvent, encode_webhook_event
from workers import metrics
from workers.job import PulledJob, WorkerInfo, row_for
from workers.jobs.large_results import LargeResults
from workers.jobs.outcome import answered_by, in_time, one_for_each, state_of, undelivered

log = logging.getLogger(__name__)

KEEP_LIMIT_S = 60.0
"""How long a result is kept in hand while Redis (for a prediction) or the object store (for an image) is away."""
FINISH_LIMIT_S = 1.0
REASON_LIMIT_BYTES = 1000
"""An attribute has at most 1,024."""


class Completion:
    """Ends jobs. Its work is bounded by the messages in hand."""

    def __init__(
        self,
        model: Model,
        publisher: Publisher,
        cache: ResultCache,
        records: Records,
        objects: ObjectStore,
        rows: RowSink,
        facts: WorkerInfo,
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._cache = cache
        self._records = records
        self._large = LargeResults(objects, KEEP_LIMIT_S)
        self._rows = rows
        self._facts = facts
        self._in_hand: set[PulledJob] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, pulled: PulledJob) -> None:
        """From now on `pulled` is in our hands, until it is finished or handed back."""
        self._in_hand.add(pulled)
        self._idle.clear()

    def settle(self, pulled: PulledJob, outcome: ItemOutcome) -> None:
        """Puts the outcome on an item; the last one finishes the job."""
        if pulled.is_over:
            return
        pulled.outcomes[outcome.index] = outcome
        if len(pulled.outcomes) == len(pulled.items):
            pulled.end()
            self.spawn(self._finish(pulled))

    def conclude(self, pulled: PulledJob, claim: Claim) -> None:
        """Ends a job that is over already: what was answered is answered again, in case it got lost."""
        if claim.reply is None:
            for item in pulled.items:
                self.settle(pulled, pulled.canceled(item.index))
        elif not pulled.is_over:
            pulled.end()
            self.spawn(self._conclude(pulled, claim.reply))

    async def _conclude(self, pulled: PulledJob, reply: bytes) -> None:
        try:
            answered = decode_reply_body(reply)
            await self._reply(pulled.envelope, answered)
            await self._publish_event(pulled, "completed")
        except PenstockError as error:
            self._give_up(pulled, error)
            return
        self._record(pulled, answered)

    async def _finish(self, pulled: PulledJob) -> None:
        outcomes = [pulled.outcomes[item.index] for item in pulled.items]
        try:
            outcomes = [await self._large.stored(pulled.envelope, outcome) for outcome in outcomes]
            ours = ReplyBody(outcomes, None, self._facts.worker, self._facts.device, time.time())
            answered = await (self._end_prediction if pulled.envelope.prediction else self._end)(pulled, ours)
            if pulled.dead_reason:
                attributes = {**pulled.message.attributes, "penstock_reason": _shortened(pulled.dead_reason)}
                await self._publisher.publish(dead_letter_topic_id(self._model.name), pulled.message.data, attributes)
        except PenstockError as error:
            self._give_up(pulled, error)
            return
        self._record(pulled, answered)

    async def _end(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Ends the record and replies side by side; returns what was answered, by us or by another attempt.

        A caller takes one reply, whoever sent it, and Redis is not needed for that.
        """
        ours = in_time(pulled, ours, time.time())
        ending = asyncio.ensure_future(self._records.finish(pulled.record, state_of(ours), encode_reply_body(ours)))
        try:
            is_sent, sent_s = await self._reply(pulled.envelope, ours), time.time()
        finally:
            finish = await ending
        answered = answered_by(ours, finish)
        if finish is None or finish.is_ours:  # else another attempt's reply was taken, whatever became of this one
            # Where the broker took too long, whoever waited has given up: what nobody was handed is not charged.
            answered = in_time(pulled, answered, sent_s - LATE_LOOK_S) if is_sent else undelivered(answered)
        # Only now: a caller waits for the reply, nobody for the cache; until then a repeat joins the entry.
        await self._fill_cache(pulled, answered)
        return answered

    async def _end_prediction(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Ends the record, which was promised, and then tells who waits.

        Raises:
            Unavailable: Redis did not take it in time.
        """
        until_s = time.monotonic() + KEEP_LIMIT_S
        while True:
            ours = in_time(pulled, ours, time.time())
            finish = await self._records.finish(pulled.record, state_of(ours), encode_reply_body(ours))
            if finish is not None:
                break
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not await self._records.wait_up(left_s):
                raise Unavailable("the record could not be ended")
        answered = answered_by(ours, finish)
        await self._reply(pulled.envelope, answered)
        await self._fill_cache(pulled, answered)
        await self._publish_event(pulled, "output")
        await self._publish_event(pulled, "completed")
        return answered

    def _record(self, pulled: PulledJob, answered: ReplyBody) -> None:
        """Writes the rows, and acks once all of them are safe."""
        outcomes = one_for_each(pulled.items, answered)
        left = len(outcomes)

        def on_safe() -> None:
            nonlocal left
            left -= 1
            if not left and pulled in self._in_hand:  # else it was handed back meanwhile
                pulled.subscription.ack(pulled.message)
                self._let_go(pulled)

        for outcome in outcomes:
            metrics.ITEMS.labels(outcome.status, outcome.receipt.cache).inc()
            row = row_for(self._model, self._facts, pulled.envelope, outcome, answered.replied_at_s or time.time())
            self._rows.write(row, on_safe)

    def tell_webhook(self, pulled: PulledJob, event: EventName, sequence: int = 0) -> None:
        """Has the prediction's webhook told of `event`, if it wants to know; lost where the broker is out of reach."""
        if event in pulled.envelope.webhook.split(","):
            self.spawn(self._tell_webhook(pulled, event, sequence))

    async def _tell_webhook(self, pulled: PulledJob, event: EventName, sequence: int) -> None:
        with contextlib.suppress(PenstockError):
            await self._publish_event(pulled, event, sequence)

    async def _publish_event(self, pulled: PulledJob, event: EventName, sequence: int = 0) -> None:
        if event in pulled.envelope.webhook.split(","):
            await self._publisher.publish(
                WEBHOOKS_TOPIC_ID, *encode_webhook_event(WebhookEvent(pulled.record, event, sequence))
            )

    async def _fill_cache(self, pulled: PulledJob, ours: ReplyBody) -> None:
        results = {outcome.index: outcome.result for outcome in ours.outcomes}
        found = {key: results.get(index) for key, index in pulled.to_cache.items()}
        kept = {key: result for key, result in found.items() if result is not None}
        if kept and self._model.cache.ttl_s:
            await self._cache.put_many(kept, self._model.cache.ttl_s)

    async def _reply(self, envelope: Envelope, body: ReplyBody) -> bool:
        """Publishes the reply and waits until the broker has it; False where there is no inbox any more.

        A job that names none has nobody to tell.
        """
        if not envelope.inbox:
            return True
        data, attributes = encode_reply(Reply(envelope.request_id, envelope.part, envelope.slot, body))
        try:
            await self._publisher.publish(envelope.inbox, data, attributes)
        except BadInput as error:
            # The inbox went with its instance: nobody waits, and handing the job back would repeat it for ever.
            log.warning("inbox refused a reply", extra={"inbox": envelope.inbox, "reason": error.message})
            metrics.REPLIES_REFUSED.inc()
            return False
        return True

    def refuse(self, message: Message, error: UndecodableMessage, subscription: Subscription) -> None:
        """Ends a message that is no job of ours: answered at once if it says whom, and dead-lettered with the reason.

        The function behind the dead letters ends its record and writes its row.
        """
        log.warning("message is no job", extra={"message_id": message.message_id, "reason": error.message})
        metrics.UNDECODABLE.inc()
        self.spawn(self._refuse(message, error, subscription))

    async def _refuse(self, message: Message, error: UndecodableMessage, subscription: Subscription) -> None:
        envelope = salvaged(message.attributes)
        try:
            if envelope is not None:
                reason = ItemError(error.code, error.message, error.field)
                await self._reply(envelope, ReplyBody([], reason, self._facts.worker, replied_at_s=time.time()))
            attributes = {**message.attributes, "penstock_reason": _shortened(error.message)}
            await self._publisher.publish(dead_letter_topic_id(self._model.name), message.data, attributes)
        except PenstockError as failed:
            log.warning("refusal not sent", extra={"message_id": message.message_id, "reason": failed.message})
            subscription.nack(message)
            return
        subscription.ack(message)

    def in_hand(self, record: str | None = None) -> list[PulledJob]:
        """The jobs in hand; those of one record where it is given, and more than one if a delivery was repeated."""
        return [pulled for pulled in self._in_hand if record in (None, pulled.record)]

    async def wait_idle(self) -> None:
        """Returns when nothing is in hand."""
        await self._idle.wait()

    async def hand_back_all(self) -> None:
        """Gives back what is still in hand; for the end, when nothing will finish it any more."""
        if self._tasks:  # what is being answered
            await asyncio.wait(self._tasks, timeout=FINISH_LIMIT_S)
        for task in list(self._tasks):
            task.cancel()
        for pulled in list(self._in_hand):
            pulled.end()
            self._hand_back(pulled)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_LIMIT_S)

    def _give_up(self, pulled: PulledJob, error: PenstockError) -> None:
        log.warning("job not ended", extra={"request_id": pulled.envelope.request_id, "reason": error.message})
        self._hand_back(pulled)

    def _hand_back(self, pulled: PulledJob) -> None:
        metrics.HANDED_BACK.inc()
        self.spawn(self._records.release(pulled.record))
        pulled.subscription.nack(pulled.message)
        self._let_go(pulled)

    def _let_go(self, pulled: PulledJob) -> None:
        self._in_hand.discard(pulled)
        self._check_idle()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which has to do with a job in hand, as a task of this completion."""
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


def _shortened(reason: str) -> str:
    return reason.encode(errors="replace")[:REASON_LIMIT_BYTES].decode(errors="ignore")
