"""Ends jobs: stores large results, ends the record, replies, fills the cache, writes rows, acks.

`_finish` decides the outcome. It hands a job back only if Redis (for a prediction), the object
store or the broker fails. A job is acked last, so a crash at any earlier step makes the broker
deliver it again. The first attempt to end the record decides the answer. Later attempts repeat that
answer and write equal rows.

Most jobs end in the same turn of the loop as others, with their batch, and need nothing but these
steps. All of them with the same inbox take each step together, in one task (`_finish_together`).

Pure functions turn the outcomes of a job's items into the state of its record, and the record into
rows. A generation that ends without a result is charged by what its readers got.

Results that are too large for a message are stored in the object store. Records and the cache carry
the keys of the largest, replies also those of smaller ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

import msgspec

from shared.broker.transport import Publisher
from shared.errors import (
    Canceled,
    PenstockError,
    Unavailable,
    error_for_code,
)
from shared.flows.engine import StepRow
from shared.messages import (
    Envelope,
    Item,
    ItemError,
    ItemOutcome,
    ReplyBody,
    decode_reply_body,
    encode_reply_body,
    failure,
)
from shared.models.blob import INLINE_LIMIT_BYTES, RESULTS, Blob, content_digest
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.custom import CustomInput, CustomResult, PieceChunk
from shared.models.tasks.text import GenerationInput
from shared.money import slo
from shared.money.charge import ENDED_BY_CALLER, is_ended_by_caller
from shared.process.concurrency import backoff
from shared.stores.cache import Owed, ResultCache
from shared.stores.held_bytes import hold
from shared.stores.objects import ObjectStore
from shared.stores.record_state import Finish
from shared.stores.records import Records
from shared.stores.stream_chunks import merge_chunks
from shared.stores.token_streams import Delivered, TokenStreams
from shared.tracing.spans import entered
from shared.usage.row import Row, RowSink
from shared.webhooks.event import EventName
from shared.webhooks.publisher import WebhookPublisher
from workers import metrics
from workers.identity import WorkerInfo, row_for
from workers.jobs.canary_share import CanaryShare, Forwarding
from workers.jobs.registry import EncodedReply, JobRegistry, ReplyPublisher
from workers.jobs.spans import record_spans
from workers.scheduling.job import NOT_SENT, PulledJob

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 4.0
RESULTS_COUNT_S = 3600.0
"""How long after its deadline the files of a custom class count in the storage quota of the tenant:
the default of `PENSTOCK_PREDICTION_KEEP_S`."""
MAX_STREAMED = 4096
"""Keys of streamed files that are remembered, so that they are not stored twice."""

KEEP_LIMIT_S = 60.0
"""The time that a result waits while Redis or the object store is unavailable."""


class LargeResults:
    """Stores the blobs of results that are too large for a record or for a reply.

    Args:
        reply_limit_bytes: the largest blob in a reply. It is at most that of a record.
        keep_limit_s: how long to retry while the store is unavailable.
    """

    def __init__(
        self, objects: ObjectStore, *, reply_limit_bytes: int, keep_limit_s: float
    ) -> None:
        self._objects = objects
        self._reply_limit_bytes = reply_limit_bytes
        self._keep_limit_s = keep_limit_s
        self._streamed: OrderedDict[str, None] = OrderedDict()
        """The last keys that were stored before their results were there."""

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
        if envelope.has_record:
            outcomes = [msgspec.structs.replace(one, result=None) for one in body.outcomes]
            return msgspec.structs.replace(body, outcomes=outcomes)
        limit_bytes = self._reply_limit_bytes
        if limit_bytes == INLINE_LIMIT_BYTES:  # it was kept when the record was made
            return body
        outcomes = await asyncio.gather(
            *(self._with_key(envelope, one, limit_bytes) for one in body.outcomes)
        )
        is_same = all(map(operator.is_, outcomes, body.outcomes))
        return body if is_same else msgspec.structs.replace(body, outcomes=outcomes)

    async def _with_key(
        self, envelope: Envelope, outcome: ItemOutcome, limit_bytes: int
    ) -> ItemOutcome:
        result = outcome.result
        if result is None or not any(_is_large(blob, limit_bytes) for blob in result.blobs):
            return outcome
        kept, stored_bytes = list[Blob](), 0
        key = f"{RESULTS}/{envelope.request_id}/{outcome.index}"
        for number, blob in enumerate(result.blobs):
            if _is_large(blob, limit_bytes):
                own_key, data = key + result.blob_suffix(number), blob.data or b""
                if own_key not in self._streamed:
                    await self._put(own_key, data, blob.media_type, envelope.deadline_s)
                # Another step may ask the cache for what it makes of these bytes.
                digest = content_digest(data) if envelope.flow else ""
                blob = Blob(blob.media_type, object_key=own_key, digest=digest)
                stored_bytes += len(data)
            kept.append(blob)
        is_kept = envelope.has_record or envelope.flow  # otherwise somebody waits for the answer
        if stored_bytes and is_kept and isinstance(result, CustomResult):
            until_s = envelope.deadline_s + RESULTS_COUNT_S
            with contextlib.suppress(Unavailable):  # a result isn't lost because it isn't counted
                await hold(self._objects, envelope.tenant, stored_bytes, until_s)
        return msgspec.structs.replace(outcome, result=result.with_blobs(kept))

    async def store_streamed(self, envelope: Envelope, key: str, blob: Blob) -> None:
        """Stores a file of a result that is not there yet. Small ones are in the stream.

        Raises:
            Unavailable: as `stored` does.
        """
        if _is_large(blob, INLINE_LIMIT_BYTES):
            await self._put(key, blob.data or b"", blob.media_type, envelope.deadline_s)
            self._streamed[key] = None
            if len(self._streamed) > MAX_STREAMED:
                self._streamed.popitem(last=False)

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


def _is_large(blob: Blob, limit_bytes: int) -> bool:
    return blob.data is not None and len(blob.data) > limit_bytes


def is_streamed(item: Item) -> bool:
    """Returns whether the tokens of an item go to a stream."""
    return isinstance(item.input, GenerationInput | CustomInput) and item.input.is_streamed


async def with_delivered(streams: TokenStreams, pulled: PulledJob, body: ReplyBody) -> ReplyBody:
    """Ends the delivery of generations that their callers ended. Receipts count what was read.

    Without a result, the answer has what a custom class had yielded: of an item that its caller
    ended no more than what was read, and otherwise all, which is not charged.

    Raises:
        Unavailable: Redis did not answer.
    """
    streamed = {item.index: item for item in pulled.items if is_streamed(item)}
    ended = [
        outcome.index
        for outcome in body.outcomes
        if outcome.index in streamed and _is_charged_as_read(outcome, streamed[outcome.index])
    ]
    if not ended and not pulled.written:
        return body
    delivered = dict[int, Delivered | None]()
    if ended:
        read = await streams.end_delivery(pulled.record, ended)
        delivered = dict(zip(ended, read, strict=True))
    outcomes = [
        one
        if (read_of_it := delivered.get(one.index)) is None
        else _counted(one, read_of_it, streamed)
        for one in body.outcomes
    ]
    return msgspec.structs.replace(
        body, outcomes=[_with_partial(one, pulled, delivered) for one in outcomes]
    )


def _with_partial(
    outcome: ItemOutcome, pulled: PulledJob, delivered: Mapping[int, Delivered | None]
) -> ItemOutcome:
    whole = merge_chunks(pulled.written.get(outcome.index, ()), 0)
    if outcome.result is not None or not isinstance(whole, PieceChunk):
        return outcome
    count = len(whole.ids)
    if outcome.index in delivered:
        read = delivered[outcome.index]
        count = read.output_tokens if read is not None else 0
    return msgspec.structs.replace(outcome, partial=whole.until(count) if count else None)


def _is_charged_as_read(outcome: ItemOutcome, item: Item) -> bool:
    """Returns whether what was read is charged. A class may find late that an input is wrong."""
    is_text = isinstance(item.input, GenerationInput)
    return outcome.status in ENDED_BY_CALLER or (is_text and is_ended_by_caller(outcome))


def _counted(
    outcome: ItemOutcome, delivered: Delivered, streamed: Mapping[int, Item]
) -> ItemOutcome:
    receipt = msgspec.structs.replace(outcome.receipt, is_delivered_in_part=True)
    if isinstance(streamed[outcome.index].input, GenerationInput):  # other pieces are no tokens
        receipt.tokens = delivered.input_tokens + delivered.output_tokens
        receipt.output_tokens = delivered.output_tokens
        receipt.cached_tokens = delivered.cached_tokens
    return msgspec.structs.replace(outcome, receipt=receipt)


def state_of(body: ReplyBody) -> Literal["succeeded", "failed", "canceled"]:
    """The final state of the record. It succeeded only if all items did."""
    statuses = {outcome.status for outcome in body.outcomes}
    if statuses == {"succeeded"}:
        return "succeeded"
    return "canceled" if "canceled" in statuses else "failed"


def answered_by(ours: ReplyBody, finish: Finish | None) -> ReplyBody:
    """The answer in the record: ours, another attempt's, or a cancellation."""
    if finish is not None and not finish.is_ours and finish.reply is not None:
        return decode_reply_body(finish.reply)
    if finish is None or finish.state != "canceled":
        return ours
    outcomes = [failure(outcome.index, Canceled(), outcome.receipt) for outcome in ours.outcomes]
    return msgspec.structs.replace(ours, outcomes=outcomes)


def delivered_answer(ours: ReplyBody, finish: Finish | None, *, is_sent: bool) -> ReplyBody:
    """The answer in the record, without results if its inbox is gone.

    The API writes rows of its own for what came too late. When the broker confirms that it has the
    reply says nothing of that.
    """
    answered = answered_by(ours, finish)
    if finish is None or finish.is_ours:  # otherwise the caller took another attempt's reply
        return answered if is_sent else undelivered(answered)
    return answered


def in_time(pulled: PulledJob, body: ReplyBody, now_s: float) -> ReplyBody:
    """The answer if its deadline is after `now_s`.

    Otherwise the same without results, so nothing is charged.
    """
    if now_s < pulled.envelope.deadline_s or not any(outcome.result for outcome in body.outcomes):
        return body
    late = [
        outcome
        if outcome.result is None
        else pulled.expired(outcome.index, outcome.receipt, NOT_SENT)
        for outcome in body.outcomes
    ]
    return msgspec.structs.replace(body, outcomes=late)


def undelivered(body: ReplyBody) -> ReplyBody:
    """The answer without results, because the API instance and the caller's connection are gone."""
    gone = Unavailable("the API instance that asked is gone")
    outcomes = [
        one if one.result is None else failure(one.index, gone, one.receipt)
        for one in body.outcomes
    ]
    return msgspec.structs.replace(body, outcomes=outcomes)


def one_for_each(items: Sequence[Item], answered: ReplyBody) -> list[ItemOutcome]:
    """The outcome of each item. If the job failed as a whole, each item has its error."""
    if answered.outcomes:
        return answered.outcomes
    error = answered.error or ItemError(
        PenstockError.code, "it ended without a reason; this is a bug"
    )
    return [
        failure(item.index, error_for_code(error.code, error.message, error.field))
        for item in items
    ]


class Completion:
    """Ends the jobs of one model.

    `registry` holds them until then, and `replies` publishes their replies. `canary` is the part in
    the comparison of two revisions, and `forwarding` hands over what this one can't do. None: the
    model has no canary, or is not one.
    """

    def __init__(
        self,
        model: Model,
        publisher: Publisher,
        cache: ResultCache,
        records: Records,
        objects: ObjectStore,
        rows: RowSink,
        worker: WorkerInfo,
        canary: CanaryShare | None = None,
    ) -> None:
        self.registry = JobRegistry(records)
        self.canary = canary
        self.forwarding = (
            Forwarding(model, publisher, records, self.registry) if model.is_canary else None
        )
        self.replies = ReplyPublisher(model.name, worker.worker, publisher)
        self.finish_step: Callable[[PulledJob], Coroutine[Any, Any, None]] | None = None
        """Ends the job of a flow's step (workers/jobs/steps.py). None: none gets here."""
        self.model = model
        self._cache = cache
        self._records = records
        self.large_results = LargeResults(
            objects, reply_limit_bytes=model.reply_limit_bytes, keep_limit_s=KEEP_LIMIT_S
        )
        self._rows = rows
        self._webhooks = WebhookPublisher(publisher)
        self.worker = worker
        self._ended: dict[tuple[str, bool], list[PulledJob]] = {}
        """Jobs that ended in this turn of the loop, by inbox and whether they have records."""

    def settle(self, pulled: PulledJob, outcome: ItemOutcome) -> None:
        """Sets the outcome of one item. The last item finishes the job."""
        if pulled.is_over:
            return
        pulled.outcomes[outcome.index] = outcome
        if len(pulled.outcomes) == len(pulled.items):
            pulled.end()
            if pulled.envelope.flow and self.finish_step is not None:
                self._spawn(pulled, self.finish_step(pulled))
            elif self._is_plain(pulled):
                if not self._ended:
                    asyncio.get_running_loop().call_soon(self._finish_ended)
                one_end = pulled.envelope.inbox, pulled.envelope.has_record
                self._ended.setdefault(one_end, []).append(pulled)
            else:
                self._spawn(pulled, self._finish(pulled))

    def _is_plain(self, pulled: PulledJob) -> bool:
        """Returns whether a job has no steps of its own, and no spans to be made of them.

        One with a record has some if it did not succeed: its reader may have got a part.
        """
        outcomes = pulled.outcomes.values()
        return (
            self.canary is None
            and self.forwarding is None
            and pulled.runs is None
            and not pulled.envelope.webhook
            and not pulled.dead_letter_reason
            and not any(one.result and one.result.blobs for one in outcomes)
            and not (pulled.envelope.has_record and any(one.result is None for one in outcomes))
        )

    def _finish_ended(self) -> None:
        """Finishes the jobs of this turn. Those of an inbox that is slow hold up no others."""
        ended, self._ended = self._ended, {}
        with entered(None):  # they are of many traces
            for (_, has_record), jobs in ended.items():
                finish = self._finish_recorded if has_record else self._finish_together
                self.registry.spawn(finish(jobs))

    async def _finish_together(self, jobs: Sequence[PulledJob]) -> None:
        """Does for plain jobs of one inbox, without records, what `_finish` does for one job."""
        ours = self._bodies_of(jobs)
        encoded = [encode_reply_body(body) for body in ours]
        ending = asyncio.ensure_future(self._end_records(jobs, ours, encoded))
        try:
            sent = await self.replies.publish_all(
                [(pulled.envelope, data) for pulled, data in zip(jobs, encoded, strict=True)]
            )
        finally:
            finishes = await ending
        answers = [
            (pulled, delivered_answer(body, finish, is_sent=is_sent is True))
            for pulled, body, is_sent, finish in zip(jobs, ours, sent, finishes, strict=True)
        ]
        await self._after_replies(answers, sent)

    async def _finish_recorded(self, jobs: Sequence[PulledJob]) -> None:
        """Does for plain predictions of one inbox what `_finish` does for one job.

        All are finished one by one if one is late, and those whose records Redis did not end.
        """
        ours = self._bodies_of(jobs)
        if any(state_of(body) != "succeeded" for body in ours):  # some are late by now
            for pulled in jobs:
                self._spawn(pulled, self._finish(pulled))
            return
        finishes = await self._end_records(jobs, ours, [encode_reply_body(body) for body in ours])
        answers, replies = list[tuple[PulledJob, ReplyBody]](), list[EncodedReply]()
        for pulled, body, finish in zip(jobs, ours, finishes, strict=True):
            if finish is None or finish.is_lost_to_cancel:
                self._spawn(pulled, self._finish(pulled))
                continue
            if finish.is_ours:
                self._count_toward_slo(pulled.envelope, body)
            answered = answered_by(body, finish)
            reply = await self.large_results.for_reply(pulled.envelope, answered)
            answers.append((pulled, answered))
            replies.append((pulled.envelope, encode_reply_body(reply)))
        await self._after_replies(answers, await self.replies.publish_all(replies))

    async def _after_replies(
        self,
        answers: Sequence[tuple[PulledJob, ReplyBody]],
        sent: Sequence[bool | PenstockError],
    ) -> None:
        """Fills the cache and writes the rows of the answers whose replies the broker has."""
        ended = list[tuple[PulledJob, ReplyBody]]()
        for (pulled, answered), is_sent in zip(answers, sent, strict=True):
            if isinstance(is_sent, PenstockError):
                self.give_up(pulled, is_sent)
            else:
                ended.append((pulled, answered))
        await self.fill_cache(ended)
        self.write_rows(ended)

    def _bodies_of(self, jobs: Sequence[PulledJob]) -> list[ReplyBody]:
        """The answers of jobs that end now, without results for those that are late."""
        now_s, who = time.time(), (self.worker.worker, self.worker.device)
        bodies = (
            ReplyBody([pulled.outcomes[item.index] for item in pulled.items], None, *who, now_s)
            for pulled in jobs
        )
        return [in_time(pulled, body, now_s) for pulled, body in zip(jobs, bodies, strict=True)]

    async def _end_records(
        self, jobs: Sequence[PulledJob], ours: Sequence[ReplyBody], encoded: Sequence[bytes]
    ) -> list[Finish | None]:
        return await self._records.finish_all(
            [
                (pulled.record, state_of(body), data)
                for pulled, body, data in zip(jobs, ours, encoded, strict=True)
            ]
        )

    def body_of(self, outcomes: Sequence[ItemOutcome]) -> ReplyBody:
        worker = self.worker
        return ReplyBody(list(outcomes), None, worker.worker, worker.device, time.time())

    def repeat(self, pulled: PulledJob, reply: bytes) -> None:
        """Ends a job whose record has a reply. Sends it again, in case the first one got lost."""
        if not pulled.is_over:
            pulled.end()
            self._spawn(pulled, self._repeat(pulled, reply))

    def notify_webhook(self, pulled: PulledJob, event: EventName, sequence: int = 0) -> None:
        """Publishes a webhook event in the background, if the job's webhook subscribed to it."""
        subscribed = pulled.envelope.webhook_events
        if event in subscribed:
            work = self._webhooks.try_publish(pulled.run, subscribed, event, sequence)
            self._spawn(pulled, work)

    def _spawn(self, pulled: PulledJob, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as a background task within the trace of its job."""
        with entered(pulled.trace):
            self.registry.spawn(work)

    async def _repeat(self, pulled: PulledJob, reply: bytes) -> None:
        try:
            answered = decode_reply_body(reply)
            await self._reply(pulled, answered, reply)
            await self._webhooks.publish(pulled.record, pulled.envelope.webhook_events, "completed")
        except PenstockError as error:
            self.give_up(pulled, error)
            return
        self.write_rows([(pulled, answered)])

    async def _finish(self, pulled: PulledJob) -> None:
        outcomes = [pulled.outcomes[item.index] for item in pulled.items]
        if self.canary is not None:
            self.canary.count(pulled, outcomes)
            for outcome in outcomes:
                outcome.receipt.revision = self.model.revision
        if self.forwarding is not None and self.forwarding.wants(outcomes):
            await self.forwarding.forward(pulled, "failed")
            return
        record_spans(pulled, self.model, self.worker.device)
        try:
            # Together, because a store may be far away.
            outcomes = await asyncio.gather(
                *(self.large_results.stored(pulled.envelope, outcome) for outcome in outcomes)
            )
            ours = self.body_of(outcomes)
            answered = await self._end(pulled, ours)
            if pulled.dead_letter_reason:
                await self.replies.publish_dead_letter(pulled.message, pulled.dead_letter_reason)
        except PenstockError as error:
            self.give_up(pulled, error)
            return
        self.write_rows([(pulled, answered)])
        if self.canary is not None:
            await self.canary.compare(pulled, answered.outcomes)

    async def _reply(self, pulled: PulledJob, answered: ReplyBody, recorded: bytes) -> None:
        """Publishes the answer in the record, or `recorded` if the reply is the same."""
        reply = await self.large_results.for_reply(pulled.envelope, answered)
        body = recorded if reply is answered else encode_reply_body(reply)
        await self.replies.publish(pulled.envelope, body)

    async def _end(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Ends the record, and publishes reply and webhook events. Fills the cache.

        Returns the answer, ours or another attempt's.

        Raises:
            Unavailable: Redis did not take a record that the API promised.
        """
        has_record = pulled.envelope.has_record
        deliver = self._record_then_reply if has_record else self._record_and_reply
        answered = await deliver(pulled, ours)
        # After the reply, which a caller waits for. Until then an identical item is coalesced with
        # the queued one.
        await self.fill_cache([(pulled, answered)])
        subscribed = pulled.envelope.webhook_events
        if subscribed:
            await self._webhooks.publish(pulled.record, subscribed, "output")
            await self._webhooks.publish(pulled.record, subscribed, "completed")
        return answered

    async def _record_and_reply(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Ends the record and publishes the reply at the same time. Returns the answer.

        The caller takes the first reply, and does not need Redis for it.
        """
        reply, now_s = await self.large_results.for_reply(pulled.envelope, ours), time.time()
        ours, reply = in_time(pulled, ours, now_s), in_time(pulled, reply, now_s)
        body = encode_reply_body(ours)
        reply_body = body if reply is ours else encode_reply_body(reply)
        ending = asyncio.ensure_future(self._records.finish(pulled.record, state_of(ours), body))
        try:
            is_sent = await self.replies.publish(pulled.envelope, reply_body)
        finally:
            finish = await ending
        return delivered_answer(ours, finish, is_sent=is_sent)

    async def _record_then_reply(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Ends the record that the API promised, and then publishes the reply. Returns the answer.

        Raises:
            Unavailable: Redis did not take the record in time.
        """
        until_s = time.monotonic() + KEEP_LIMIT_S
        while True:
            ours, finish = await self._try_end(pulled, in_time(pulled, ours, time.time()))
            if finish is not None:
                break
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not await self._records.wait_up(left_s):
                raise Unavailable("the record could not be ended")
        answered, body = answered_by(ours, finish), encode_reply_body(ours)
        if finish.is_ours:
            self._count_toward_slo(pulled.envelope, ours)
        await self._reply(pulled, answered, body)
        return answered

    async def _try_end(self, pulled: PulledJob, ours: ReplyBody) -> tuple[ReplyBody, Finish | None]:
        """Ends the record of a prediction. Returns our answer, and None if Redis is away."""
        try:
            ours = await with_delivered(self._records.tokens, pulled, ours)
            finish = await self._records.finish(
                pulled.record, state_of(ours), encode_reply_body(ours)
            )
            if finish is not None and finish.is_lost_to_cancel:
                ours = await with_delivered(self._records.tokens, pulled, answered_by(ours, finish))
                finish = await self._records.finish(
                    pulled.record, "canceled", encode_reply_body(ours)
                )
        except Unavailable:
            return ours, None
        return ours, finish

    def _count_toward_slo(self, envelope: Envelope, ours: ReplyBody) -> None:
        """Counts the items of a prediction. The API counts those whose callers wait."""
        limits_s = (
            until_s - envelope.received_at_s
            for until_s in (envelope.deadline_s, envelope.start_by_s)
            if until_s
        )
        if slo.counts_toward_slo(self.model.deadline, envelope.priority, limits_s):
            for outcome in ours.outcomes:
                slo.count_ended(self.model.public_name, outcome.status)

    def write_rows(
        self,
        answers: Sequence[tuple[PulledJob, ReplyBody]],
        planned: Sequence[StepRow] = (),
    ) -> None:
        """Writes one row per item, and acks the jobs when all rows are safe."""
        rows, counts = list[Row](), Counter[tuple[str, str]]()
        for model, envelope, outcome in planned:
            rows.append(row_for(model, self.worker, envelope, outcome, time.time()))
        for pulled, answered in answers:
            replied_at_s = answered.replied_at_s or time.time()
            for outcome in one_for_each(pulled.items, answered):
                counts[outcome.status, outcome.receipt.cache] += 1
                rows.append(
                    row_for(self.model, self.worker, pulled.envelope, outcome, replied_at_s)
                )
        for labels, count in counts.items():
            metrics.ITEMS.labels(*labels).inc(count)

        def on_safe() -> None:
            for pulled, _ in answers:
                self.registry.ack(pulled)

        if rows:
            self._rows.write(*rows, on_safe=on_safe)

    async def fill_cache(self, answers: Sequence[tuple[PulledJob, ReplyBody]]) -> None:
        """Keeps the results that are to be cached, and marks again what was not paid for."""
        ttl_s, kept, owed = self.model.cache.ttl_s, dict[str, Result](), dict[str, Owed]()
        finished_at_s = dict[str, float | None]()
        for pulled, answered in answers:
            if (pulled.to_cache or pulled.to_pay) and ttl_s:
                delivered = {one.index: one for one in answered.outcomes if one.result is not None}
                pulled.undelivered = frozenset(
                    one.index for one in answered.outcomes if one.result is None
                )
                for key, index in pulled.to_cache.items():
                    if (one := delivered.get(index)) is not None and one.result is not None:
                        kept[key], finished_at_s[key] = one.result, one.receipt.finished_at_s
                to_pay = pulled.to_pay.items()
                owed |= {key: mark for key, (index, mark) in to_pay if index not in delivered}
        self._cache.mark_unpaid(owed, ttl_s)
        if kept:
            await self._cache.put_many(kept, ttl_s, finished_at_s)

    def give_up(self, pulled: PulledJob, error: PenstockError) -> None:
        """Hands a job back that could not be ended. It comes again."""
        facts = {"request_id": pulled.envelope.request_id, "reason": error.message}
        log.warning("job not ended", extra=facts)
        self.registry.hand_back(pulled)
