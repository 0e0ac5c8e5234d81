"""Publishes jobs, and waits for replies if the callers are waiting.

For a waiting caller, splits the request's items into jobs, and publishes each job once workers have
capacity for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from api import metrics
from api.dispatch.model_window import BATCHES_HELD, PublishWindow
from api.dispatch.reply_inbox import PendingReply, ReplyInbox
from api.dispatch.request import InferenceRequest, InFlightJob, RequestOptions
from api.fair_room import Demand
from shared.broker.transport import Publisher, jobs_topic_id
from shared.canary.forwarding import JobMessage, build_forwarded_job
from shared.errors import (
    BadInput,
    DeadlineExceeded,
    InputTooLarge,
    Overloaded,
    PenstockError,
    Unavailable,
    error_for_code,
)
from shared.flows.engine import FlowEngine
from shared.messages import (
    Envelope,
    Item,
    ItemError,
    ItemOutcome,
    Job,
    JobBody,
    ReplyBody,
    encode_job,
    encode_reply_body,
    record_id,
)
from shared.models.catalog import Flow, Model, model_of_canary
from shared.stores.objects import ObjectStore, store_if_large
from shared.stores.records import Records
from shared.tracing.spans import STAGE, Attributes, current, span
from shared.usage.row import RowSink, row_of

PUBLISH_LIMIT_S = 10.0
LOOK_EVERY_S = 5.0
"""How often the record is read while the reply is pending."""
TIMER_EARLY_S = 0.002
"""Event loop timers have a resolution of 1 ms, so they may fire just before the deadline."""


def split_into_jobs(model: Model, items: Sequence[Item]) -> Iterator[slice]:
    """Splits items into as few equal-sized jobs as the maximum job size allows. Yields each range.

    Each image is a separate job, so that images are spread across workers.
    """
    if len(items) == 1:
        yield slice(0, 1)
        return
    work = sum(item.input.estimate_work(model) for item in items)
    largest = model.definition.largest_job(model, work / max(1, len(items)))
    jobs = math.ceil(len(items) / largest)
    for job in range(jobs):
        yield slice(job * len(items) // jobs, (job + 1) * len(items) // jobs)


class JobSender:
    """Sends jobs, with or without a record, and starts flow runs. Keeps no state between calls.

    Args:
        rows: receives rows for flow steps that finish immediately.
    """

    def __init__(
        self,
        inbox: ReplyInbox,
        publisher: Publisher,
        objects: ObjectStore,
        records: Records,
        window: PublishWindow,
        flows: FlowEngine,
        rows: RowSink,
        *,
        api_instance: str,
        region: str,
    ) -> None:
        self._inbox = inbox
        self._publisher = publisher
        self._objects = objects
        self._records = records
        self._window = window
        self._flows = flows
        self._rows = rows
        self._api_instance = api_instance
        self._region = region

    async def send(self, request: InferenceRequest, job: InFlightJob) -> list[ItemOutcome]:
        """Publishes the job once its window has room, then waits for its reply.

        Returns one outcome per item. The waiter is registered before the job is published, so a
        reply can't arrive too early. Sets `job.is_sent` before publishing begins, and
        `job.is_answered` with the reply.

        Raises:
            DeadlineExceeded: no reply arrived in time, or no room opened in the window in time.
            Unavailable: the broker or the object store is unreachable.
            PenstockError: the worker could not read the job, or its reply was malformed.
        """
        job.queued_at_s = time.time()
        await self._take_permit(request, job.demand)
        try:
            items = [in_flight.item for in_flight in job.items]
            if any([item.input.sources for item in items]):
                items = [await self._without_large_sources(item) for item in items]
            replies = request.model.replies
            with self._inbox.waiter(request.facts.request_id, job.index, replies) as waiter:
                await self._publish_awaited(request, job, items, waiter)
                outcomes = await self._wait(waiter, request, job, items)
            job.is_answered = True
            return outcomes
        finally:
            self._window.release(job.demand, is_in_topic=job.is_sent and not job.is_answered)

    async def send_recorded(
        self,
        request: InferenceRequest,
        items: Sequence[Item],
        waiter: PendingReply | None,
        *,
        unfinished: int = 0,
    ) -> None:
        """Publishes the job for a request whose record already exists.

        Afterward, if the caller can repeat the request, the record is marked as published. Other
        records are not marked, because marking costs a Redis round trip and nothing would ever read
        the mark.

        Publish windows do not delay this job, because it is durable and must not be lost if this
        instance dies. Instead, once a tenant has many unfinished predictions, its new predictions
        get `batch` priority so that they do not run before other tenants' interactive requests.

        Args:
            waiter: receives the reply. None if the caller reads the record instead.
            unfinished: the number of unfinished predictions that the tenant is known to have.

        Raises:
            Unavailable: the broker is unreachable. A record without a key was marked as failed.
        """
        envelope = envelope_of(request, self._api_instance, waiter)
        if unfinished > BATCHES_HELD * request.model.usual_batch.max_items:
            envelope.priority = "batch"
        try:
            if isinstance(request.model, Flow):
                await self._start_run(envelope, items, request.options)
            else:
                await self._publish(request, envelope, items, PUBLISH_LIMIT_S)
        except PenstockError as error:
            await self._give_up(request, error)
        if request.new_record.is_keyed:
            # Without the mark, a repeated request publishes the job a second time, which is
            # harmless.
            with suppress(Unavailable):
                await self._records.mark_published(request.facts.request_id)

    async def _start_run(
        self, envelope: Envelope, items: Sequence[Item], options: RequestOptions
    ) -> None:
        """Publishes the first steps of a flow."""
        body = JobBody(list(items), options.cache_read, options.cache_write)
        for model, planned, outcome in await self._flows.start(envelope, body):
            self._rows.write(row_of(planned, outcome, model, region=self._region))

    async def _give_up(self, request: InferenceRequest, error: PenstockError) -> NoReturn:
        """Marks an unpublished job's record as failed, unless the caller can repeat the request."""
        metrics.PREDICTIONS.labels(request.model.public_name, "refused").inc()
        if not request.new_record.is_keyed:
            reply = build_failed_reply("unavailable", error.public_message)
            await self._records.finish(request.facts.request_id, "failed", reply)
        if isinstance(error, Overloaded):
            raise error
        raise Unavailable(f"the broker did not accept the prediction: {error.message}") from error

    async def _take_permit(self, request: InferenceRequest, demand: Demand) -> None:
        start_by_s = request.start_by_s
        is_queue_limit = 0 < start_by_s < request.deadline_s
        try:
            await self._window.take(demand, start_by_s if is_queue_limit else request.deadline_s)
        except DeadlineExceeded:
            if not is_queue_limit:
                raise request.too_late() from None
            limit_s = round(start_by_s - request.facts.received_at_s, 3)
            raise DeadlineExceeded(
                f"no worker became available within the queue limit of {limit_s:.10g} s"
            ) from None

    async def _wait(
        self,
        waiter: PendingReply,
        request: InferenceRequest,
        job: InFlightJob,
        items: Sequence[Item],
    ) -> list[ItemOutcome]:
        """Waits for the reply. Also polls the record, because replies can get lost."""
        while True:
            left_s = max(0.0, job.deadline_s - time.time())
            try:
                return _outcomes(items, (await waiter.reply(min(left_s, LOOK_EVERY_S))).body)
            except DeadlineExceeded:
                if (
                    recorded := await self._read_recorded_reply(
                        record_id(request.facts.request_id, job.index)
                    )
                ) is not None:
                    return _outcomes(items, recorded)
                if left_s <= LOOK_EVERY_S:
                    raise request.too_late() from None

    async def _read_recorded_reply(self, record: str) -> ReplyBody | None:
        """Returns the reply from the job's record.

        Returns None if there is no reply or Redis is unreachable.
        """
        try:
            snapshot = await self._records.read(record)
        except Unavailable:
            return None
        return None if snapshot is None else snapshot.reply

    async def _without_large_sources(self, item: Item) -> Item:
        """Returns the item to send, after moving any oversized sources to the object store."""
        sources = item.input.sources
        if not sources:
            return item
        stored = [await store_if_large(source, self._objects) for source in sources]
        return msgspec.structs.replace(item, input=item.input.with_sources(stored))

    async def _publish_awaited(
        self, request: InferenceRequest, job: InFlightJob, items: list[Item], waiter: PendingReply
    ) -> None:
        """Publishes a job whose caller is waiting.

        The broker may have the job as soon as publishing begins, no matter how the call ends,
        because a message in transit can't be recalled. Only a rejection proves that the broker does
        not have it.
        """
        now_s = time.time()
        timeout_s = min(PUBLISH_LIMIT_S, job.deadline_s - now_s)
        if timeout_s <= 0:
            raise request.too_late()
        envelope = envelope_of(request, self._api_instance, waiter)
        envelope.part = job.index
        job.is_sent = True
        try:
            await self._publish(request, envelope, items, timeout_s)
        except InputTooLarge:
            job.is_sent = False
            raise
        except BadInput as error:
            job.is_sent = False
            # The caller's input has already been validated, so a rejection must be about the
            # topics.
            raise Unavailable(f"the broker rejected the job: {error.message}") from error
        except Unavailable as error:
            if time.time() >= job.deadline_s - TIMER_EARLY_S:
                raise request.too_late() from error
            raise

    async def _publish(
        self,
        request: InferenceRequest,
        envelope: Envelope,
        items: Sequence[Item],
        timeout_s: float,
    ) -> None:
        """Completes the envelope and publishes the job in a span: the parent of the worker's span.

        Sets the envelope's publish time, trace, and cache key.
        """
        now_s, options = time.time(), request.options
        topic_id = jobs_topic_id(request.model.deployed_name)
        facts: Attributes = {
            STAGE: "publish",
            "penstock.items": len(items),
            "messaging.operation.name": "publish",
            "messaging.operation.type": "send",
            "messaging.destination.name": topic_id,
        }
        with span(f"publish {topic_id}", "producer", facts, started_s=now_s):
            envelope.published_at_s = now_s
            if (trace := current()) is not None:
                envelope.traceparent, envelope.tracestate = trace.traceparent, trace.tracestate
            envelope.cache_key = items[0].cache_key or ""
            body = JobBody(list(items), options.cache_read, options.cache_write)
            message = JobMessage(request.model.deployed_name, *encode_job(Job(envelope, body)))
            await _publish_job(self._publisher, message, timeout_s=timeout_s)


def envelope_of(
    request: InferenceRequest, api_instance: str, waiter: PendingReply | None = None
) -> Envelope:
    """Returns the envelope for a request's first job, which the API's rows also use.

    The publish time and trace are not set yet.
    """
    record = request.record
    return Envelope(
        **msgspec.structs.asdict(request.facts),
        part=0,
        model=request.model.name,
        inbox="" if waiter is None else waiter.inbox,
        slot="" if waiter is None else waiter.slot,
        deadline_s=request.deadline_s,
        published_at_s=0.0,
        api_instance=api_instance,
        prediction="" if record is None else "1",
        webhook="" if record is None else ",".join(record.prediction.webhook_events),
        start_by_s=request.start_by_s,
        replies="n",
    )


def build_failed_reply(code: str, message: str) -> bytes:
    """Returns the reply for a record that no worker completed. The code is from shared.errors."""
    return encode_reply_body(ReplyBody([], ItemError(code, message), replied_at_s=time.time()))


def _outcomes(items: Sequence[Item], body: ReplyBody) -> list[ItemOutcome]:
    if body.error is not None:
        error = body.error
        raise error_for_code(
            error.code, f"the worker could not read the job: {error.message}", error.field
        )
    outcomes = body.outcomes
    if [outcome.index for outcome in outcomes] != [item.index for item in items]:
        raise PenstockError(
            f"a worker returned {len(outcomes)} outcomes for {len(items)} items; this is a bug"
        )
    return outcomes


async def _publish_job(publisher: Publisher, job: JobMessage, *, timeout_s: float) -> None:
    """Publishes a job.

    A canary's job goes to the other revision if the canary has no topic.

    This covers instances that route to a canary before its topic is created or after its topic is
    deleted.

    Raises:
        PenstockError: the broker did not accept the job.
    """
    try:
        await publisher.publish(
            jobs_topic_id(job.model), job.data, job.attributes, timeout_s=timeout_s
        )
    except BadInput:
        if (model := model_of_canary(job.model)) is None:
            raise
        other = build_forwarded_job(model, job.data, job.attributes)
        await publisher.publish(
            jobs_topic_id(other.model), other.data, other.attributes, timeout_s=timeout_s
        )
