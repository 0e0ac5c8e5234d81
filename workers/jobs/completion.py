"""Completes jobs: stores large results, finishes the record, replies, caches, writes rows, acks.

`finish` decides the outcome. A job is handed back only if Redis (for a prediction), the object
store, or the broker fails. A job is acked last, so a crash at any earlier step makes the broker
deliver it again. The first attempt to finish the record determines the reply. Later attempts repeat
that reply and write identical rows.

Most jobs finish in the same event loop iteration as the rest of their batch, and need only these
steps. All such jobs with the same inbox go through each step together, in one task
(`_finish_together`).

Pure functions convert the outcomes of a job's items into the record's state, and the record into
rows. A generation that ends without a result is charged only for the tokens that its readers
received.

Results that are too large for a message are stored in the object store. Records and the cache
contain only keys for the largest results; replies also contain keys for smaller ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

from shared.broker.transport import Publisher
from shared.errors import (
    PenstockError,
    Unavailable,
)
from shared.flows.engine import StepRow
from shared.messages import (
    Envelope,
    ItemOutcome,
    ReplyBody,
    decode_reply_body,
    encode_reply_body,
)
from shared.models.catalog import Model, Revision
from shared.models.tasks import Result
from shared.money import slo
from shared.stores.cache import Owed, ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.record_state import Finish
from shared.stores.records import Records
from shared.stores.token_streams import TokenStreams
from shared.tracing.spans import use_context
from shared.usage.row import Row, RowSink
from shared.webhooks.event import EventName
from shared.webhooks.publisher import WebhookPublisher
from workers import metrics
from workers.identity import WorkerInfo, rows_for
from workers.jobs.answers import (
    answer_after_reply,
    answer_of,
    in_time,
    outcomes_by_item,
    state_of,
    with_delivered,
)
from workers.jobs.canary_share import CanaryShare, Forwarding
from workers.jobs.large_results import KEEP_LIMIT_S, LargeResults
from workers.jobs.registry import EncodedReply, JobRegistry, ReplyPublisher
from workers.jobs.spans import record_spans
from workers.scheduling.job import PulledJob

log = logging.getLogger(__name__)


class Completion:
    """Completes one model's jobs.

    `registry` holds the jobs until then, and `replies` publishes their replies. `canary` is this
    worker's part in comparing the two revisions, and `forwarding` hands over jobs that this
    revision can't complete. Both are None if the model has no canary and isn't one.
    """

    has_flows: ClassVar = False
    """True if this class can complete flow step jobs."""

    def __init__(
        self,
        model: Model,
        publisher: Publisher,
        cache: ResultCache,
        records: Records,
        tokens: TokenStreams,
        objects: ObjectStore,
        rows: RowSink,
        worker: WorkerInfo,
        canary: CanaryShare | None = None,
    ) -> None:
        self.registry = JobRegistry(records)
        self.canary = canary
        self.forwarding = (
            Forwarding(model, publisher, records, self.registry)
            if isinstance(model, Revision)
            else None
        )
        self.replies = ReplyPublisher(model.name, worker.worker, publisher)
        self.model = model
        self._cache = cache
        self._records = records
        self._tokens = tokens
        self.large_results = LargeResults(
            objects, reply_limit_bytes=model.reply_limit_bytes, keep_limit_s=KEEP_LIMIT_S
        )
        self._rows = rows
        self._webhooks = WebhookPublisher(publisher)
        self.worker = worker
        self._ended: dict[tuple[str, bool], list[PulledJob]] = {}
        """Jobs that finished in this event loop iteration, by inbox and whether they have records.
        """

    def settle(self, pulled: PulledJob, outcome: ItemOutcome) -> None:
        """Sets one item's outcome. The last item finishes the job."""
        if pulled.is_over:
            return
        pulled.outcomes[outcome.index] = outcome
        if len(pulled.outcomes) == len(pulled.items):
            pulled.end()
            if self._is_plain(pulled):
                if not self._ended:
                    asyncio.get_running_loop().call_soon(self._finish_ended)
                one_end = pulled.envelope.inbox, pulled.envelope.has_record
                self._ended.setdefault(one_end, []).append(pulled)
            else:
                self._spawn(pulled, self.finish(pulled))

    async def without_ended_steps(self, pulled_jobs: Sequence[PulledJob]) -> Sequence[PulledJob]:
        """Returns all jobs. Only a worker with flows completes flow steps (StepCompletion)."""
        return pulled_jobs

    def _is_plain(self, pulled: PulledJob) -> bool:
        """Returns whether a job can be finished together with others.

        A failed job with a record can't, because its reader may have received part of the output.
        """
        outcomes = pulled.outcomes.values()
        return (
            self.canary is None
            and self.forwarding is None
            and pulled.runs is None
            and not pulled.envelope.webhook
            and not pulled.envelope.flow
            and not pulled.dead_letter_reason
            and not any(outcome.result and outcome.result.blobs for outcome in outcomes)
            and not (
                pulled.envelope.has_record and any(outcome.result is None for outcome in outcomes)
            )
        )

    def _finish_ended(self) -> None:
        """Finishes this iteration's jobs. A slow inbox doesn't delay another inbox's jobs."""
        ended, self._ended = self._ended, {}
        with use_context(None):  # the jobs belong to many traces
            for (_, has_record), jobs in ended.items():
                finish = self._finish_recorded if has_record else self._finish_together
                self.registry.spawn(finish(jobs))

    async def _finish_together(self, jobs: Sequence[PulledJob]) -> None:
        """Does what `finish` does, for all plain jobs without records that share an inbox."""
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
            (pulled, answer_after_reply(body, finish, is_sent=is_sent is True))
            for pulled, body, is_sent, finish in zip(jobs, ours, sent, finishes, strict=True)
        ]
        await self._after_replies(answers, sent)

    async def _finish_recorded(self, jobs: Sequence[PulledJob]) -> None:
        """Does what `finish` does, for all plain predictions that share an inbox.

        If any are late, all are finished one by one, as are jobs whose records Redis did not
        finish.
        """
        ours = self._bodies_of(jobs)
        if any(state_of(body) != "succeeded" for body in ours):  # some are late by this point
            for pulled in jobs:
                self._spawn(pulled, self.finish(pulled))
            return
        finishes = await self._end_records(jobs, ours, [encode_reply_body(body) for body in ours])
        answers, replies = list[tuple[PulledJob, ReplyBody]](), list[EncodedReply]()
        for pulled, body, finish in zip(jobs, ours, finishes, strict=True):
            if finish is None or finish.is_lost_to_cancel:
                self._spawn(pulled, self.finish(pulled))
                continue
            if finish.is_ours:
                self._count_toward_slo(pulled.envelope, body)
            answered = answer_of(body, finish)
            reply = await self.large_results.for_reply(pulled.envelope, answered)
            answers.append((pulled, answered))
            replies.append((pulled.envelope, encode_reply_body(reply)))
        await self._after_replies(answers, await self.replies.publish_all(replies))

    async def _after_replies(
        self,
        answers: Sequence[tuple[PulledJob, ReplyBody]],
        sent: Sequence[bool | PenstockError],
    ) -> None:
        """Fills the cache and writes rows for jobs whose replies reached the broker."""
        ended = list[tuple[PulledJob, ReplyBody]]()
        for (pulled, answered), is_sent in zip(answers, sent, strict=True):
            if isinstance(is_sent, PenstockError):
                self.give_up(pulled, is_sent)
            else:
                ended.append((pulled, answered))
        await self.fill_cache(ended)
        self.write_rows(ended)

    def _bodies_of(self, jobs: Sequence[PulledJob]) -> list[ReplyBody]:
        """Returns the replies for jobs that finish now, without results for late jobs."""
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
        """Completes a job whose record has a reply.

        Sends the reply again in case the first one was lost.
        """
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
        """Runs `work` as a background task within its job's trace."""
        with use_context(pulled.trace):
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

    async def finish(self, pulled: PulledJob) -> None:
        outcomes = [pulled.outcomes[item.index] for item in pulled.items]
        # Canaries don't serve adapters, so texts with one are not compared.
        canary = self.canary if pulled.envelope.model == self.model.name else None
        if canary is not None:
            canary.count(pulled, outcomes)
            for outcome in outcomes:
                outcome.receipt.revision = self.model.revision
        if self.forwarding is not None and self.forwarding.wants(outcomes):
            await self.forwarding.forward(pulled, "failed")
            return
        record_spans(pulled, self.model.find_adapted(pulled.envelope.model), self.worker.device)
        try:
            # Done together, because the store may be far away.
            outcomes = await asyncio.gather(
                *(self.large_results.store(pulled.envelope, outcome) for outcome in outcomes)
            )
            ours = self.body_of(outcomes)
            answered = await self._end(pulled, ours)
            if pulled.dead_letter_reason:
                await self.replies.publish_dead_letter(pulled.message, pulled.dead_letter_reason)
        except PenstockError as error:
            self.give_up(pulled, error)
            return
        self.write_rows([(pulled, answered)])
        if canary is not None:
            await canary.compare(pulled, answered.outcomes)

    async def _reply(self, pulled: PulledJob, answered: ReplyBody, recorded: bytes) -> None:
        """Publishes the reply in the record, or `recorded` if it is the same."""
        reply = await self.large_results.for_reply(pulled.envelope, answered)
        body = recorded if reply is answered else encode_reply_body(reply)
        await self.replies.publish(pulled.envelope, body)

    async def _end(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Finishes the record, publishes the reply and webhook events, and fills the cache.

        Returns the reply, whether ours or another attempt's.

        Raises:
            Unavailable: Redis did not accept a record that the API had promised.
        """
        has_record = pulled.envelope.has_record
        deliver = self._record_then_reply if has_record else self._record_and_reply
        answered = await deliver(pulled, ours)
        # Done after the reply, because a caller is waiting for it. Until then, an identical item is
        # coalesced with the queued one.
        await self.fill_cache([(pulled, answered)])
        subscribed = pulled.envelope.webhook_events
        if subscribed:
            await self._webhooks.publish(pulled.record, subscribed, "output")
            await self._webhooks.publish(pulled.record, subscribed, "completed")
        return answered

    async def _record_and_reply(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Finishes the record and publishes the reply concurrently. Returns the reply.

        The caller accepts the first reply, and receiving it doesn't require Redis.
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
        return answer_after_reply(ours, finish, is_sent=is_sent)

    async def _record_then_reply(self, pulled: PulledJob, ours: ReplyBody) -> ReplyBody:
        """Finishes the record the API promised, and then publishes the reply. Returns the reply.

        Raises:
            Unavailable: Redis did not accept the record in time.
        """
        until_s = time.monotonic() + KEEP_LIMIT_S
        while True:
            ours, finish = await self._try_end(pulled, in_time(pulled, ours, time.time()))
            if finish is not None:
                break
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not await self._records.wait_up(left_s):
                raise Unavailable("the record could not be completed")
        answered, body = answer_of(ours, finish), encode_reply_body(ours)
        if finish.is_ours:
            self._count_toward_slo(pulled.envelope, ours)
        await self._reply(pulled, answered, body)
        return answered

    async def _try_end(self, pulled: PulledJob, ours: ReplyBody) -> tuple[ReplyBody, Finish | None]:
        """Finishes a prediction's record.

        Returns our reply and the result, or None if Redis is down.
        """
        try:
            ours = await with_delivered(self._tokens, pulled, ours)
            finish = await self._records.finish(
                pulled.record, state_of(ours), encode_reply_body(ours)
            )
            if finish is not None and finish.is_lost_to_cancel:
                ours = await with_delivered(self._tokens, pulled, answer_of(ours, finish))
                finish = await self._records.finish(
                    pulled.record, "canceled", encode_reply_body(ours)
                )
        except Unavailable:
            return ours, None
        return ours, finish

    def _count_toward_slo(self, envelope: Envelope, ours: ReplyBody) -> None:
        """Counts a prediction's items. The API counts items whose callers wait for them."""
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
            rows += rows_for(model, self.worker, envelope, [outcome], time.time())
        for pulled, answered in answers:
            replied_at_s = answered.replied_at_s or time.time()
            outcomes = outcomes_by_item(pulled.items, answered)
            counts.update((outcome.status, outcome.receipt.cache) for outcome in outcomes)
            model = self.model.find_adapted(pulled.envelope.model)
            rows += rows_for(model, self.worker, pulled.envelope, outcomes, replied_at_s)
        for labels, count in counts.items():
            metrics.ITEMS.labels(*labels).inc(count)

        def on_safe() -> None:
            for pulled, _ in answers:
                self.registry.ack(pulled)

        if rows:
            self._rows.write(*rows, on_safe=on_safe)

    async def fill_cache(self, answers: Sequence[tuple[PulledJob, ReplyBody]]) -> None:
        """Caches results, and marks a result as unpaid again if nobody paid for it."""
        ttl_s = self.model.cache.ttl_s
        results, owed = dict[str, Result](), dict[str, Owed]()
        finished_at_s = dict[str, float | None]()
        for pulled, answered in answers:
            pulled.set_delivered(answered.outcomes)
            owed |= pulled.owed_again
            by_index = {outcome.index: outcome for outcome in answered.outcomes}
            for key, index in pulled.to_cache.items():
                outcome = by_index.get(index)
                if outcome is not None and outcome.result is not None:
                    results[key] = outcome.result
                    finished_at_s[key] = outcome.receipt.finished_at_s
        self._cache.mark_unpaid(owed, ttl_s)
        if results and ttl_s:
            await self._cache.put_many(results, ttl_s, finished_at_s)

    def give_up(self, pulled: PulledJob, error: PenstockError) -> None:
        """Hands back a job that could not be finished, so that it is redelivered."""
        facts = {"request_id": pulled.envelope.request_id, "reason": error.message}
        log.warning("job not completed", extra=facts)
        self.registry.hand_back(pulled)
