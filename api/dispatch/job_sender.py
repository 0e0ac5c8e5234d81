"""Splits items into jobs, publishes each as workers get to it, and waits for its reply.

Builds the envelope and the message of a job, for requests and predictions alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from api.dispatch.model_window import PublishWindow
from api.dispatch.request import InferenceRequest, RequestOptions
from api.dispatch.request_state import InFlightItem, InFlightJob
from api.fair_room import Demand
from shared.canary.forwarding import JobMessage, publish_job
from shared.catalog import Model
from shared.catalog_entry import Replies
from shared.errors import BadInput, DeadlineExceeded, PenstockError, Unavailable, error_for_code
from shared.messages import Envelope, Item, ItemOutcome, Job, JobBody, Reply, ReplyBody, encode_job
from shared.stores.objects import ObjectStore, stored_input
from shared.stores.record_state import record_id
from shared.stores.records import Records
from shared.topics import jobs_topic_id
from shared.tracing.spans import STAGE, Attributes, SpanBlock, current, span
from shared.transport import Publisher


def build_envelope(
    *,
    request_id: str,
    client_request_id: str,
    model: str,
    tenant: str,
    key_id: str,
    plan: str,
    price_share: float,
    weight: float,
    received_at_s: float,
    deadline_s: float,
    options: RequestOptions,
    api_instance: str,
    batch_id: str = "",
) -> Envelope:
    """Returns the envelope of the first job of a request.

    It is complete except for the inbox and the time of publishing. It belongs to the current trace.
    """
    trace = current()
    return Envelope(
        request_id=request_id,
        part=0,
        model=model,
        tenant=tenant,
        key_id=key_id,
        plan=plan,
        batch_id=batch_id,
        user_agent_family=options.user_agent_family,
        price_share=price_share,
        weight=weight,
        deadline_s=deadline_s,
        received_at_s=received_at_s,
        published_at_s=0.0,
        api_instance=api_instance,
        traceparent=trace.traceparent if trace else "",
        tracestate=trace.tracestate if trace else "",
        lane=options.lane,
        start_by_s=options.start_by_s,
        client_request_id=client_request_id,
    )


def publish_span(topic_id: str, *, items: int, started_s: float) -> SpanBlock:
    """Returns the span of publishing a job, which the worker's spans are below. Unix time."""
    facts: Attributes = {
        STAGE: "publish",
        "penstock.items": items,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic_id,
    }
    return span(f"publish {topic_id}", "producer", facts, started_s=started_s)


def encode_message(
    envelope: Envelope, items: Sequence[Item], options: RequestOptions
) -> tuple[bytes, dict[str, str]]:
    """Returns the data and attributes of a job with these items.

    Raises:
        UndecodableMessage: workers could not read it.
    """
    envelope.cache_key = items[0].cache_key or ""
    body = JobBody(list(items), options.cache_read, options.cache_write)
    return encode_job(Job(envelope, body))


OUTCOME_BYTES = 512
"""The size of an outcome in a reply without its result: index, status and receipt."""
PUBLISH_LIMIT_S = 10.0
LOOK_EVERY_S = 5.0
"""Interval at which the record is read while the reply is outstanding."""
TIMER_EARLY_S = 0.002
"""Timers of the event loop have a resolution of 1 ms, so they may fire just before the deadline."""


class ReplyWaiter(Protocol):
    """Waits for the reply of one job."""

    @property
    def inbox(self) -> str:
        """The topic id that the worker publishes the reply to."""

    @property
    def slot(self) -> str:
        """The slot attribute of the reply. Empty: it has none."""

    async def reply(self, timeout_s: float) -> Reply:
        """Returns the reply, or raises DeadlineExceeded after `timeout_s`."""


class Inbox(Protocol):
    """Receives replies. The implementation is api/dispatch/reply_inbox.py."""

    def waiter(
        self, request_id: str, job_index: int, replies: Replies
    ) -> AbstractContextManager[ReplyWaiter]:
        """Registers a waiter while the context is open. `replies` is from the model's entry."""


def split_into_jobs(model: Model, items: Sequence[InFlightItem]) -> Iterator[list[InFlightItem]]:
    """Splits items into as few jobs of about equal size as the bound of a job allows.

    The reply of a job stays below INLINE_LIMIT_BYTES. Each image is its own job, so that images
    spread over workers.
    """
    largest = model.definition.largest_job(model)
    jobs = math.ceil(len(items) / largest)
    for job in range(jobs):
        yield list(items[job * len(items) // jobs : (job + 1) * len(items) // jobs])


class JobSender:
    """Sends jobs and waits for replies. Has no state between calls."""

    def __init__(
        self,
        inbox: Inbox,
        publisher: Publisher,
        objects: ObjectStore,
        records: Records,
        window: PublishWindow,
        api_instance: str,
    ) -> None:
        self._inbox = inbox
        self._publisher = publisher
        self._objects = objects
        self._records = records
        self._window = window
        self._api_instance = api_instance

    async def send(self, request: InferenceRequest, job: InFlightJob) -> list[ItemOutcome]:
        """Publishes the job when its window has room, and waits for its reply.

        Returns one outcome per item. The waiter is registered before the job is published, so no
        reply can be too early. Sets `job.published_at_s` as soon as the broker has accepted it, and
        `job.is_answered` with the reply.

        Raises:
            DeadlineExceeded: no reply came in time, or the window had no room in time.
            Unavailable: the broker or the object store is out of reach.
            PenstockError: the worker could not read the job, or answered it wrongly.
        """
        job.queued_at_s = time.time()
        demand = request.demand(len(job.items))
        await self._take_place(request, demand)
        is_answered = False
        try:
            items = [await self._without_large_source(in_flight.item) for in_flight in job.items]
            replies = request.model.replies
            with self._inbox.waiter(request.request_id, job.index, replies) as waiter:
                published_at_s = await self._publish(request, job, items, waiter)
                job.published_at_s = published_at_s
                outcomes = await self._wait(waiter, request, job, items)
            is_answered = job.is_answered = True
            return outcomes
        finally:
            self._window.release(demand, is_in_topic=not is_answered)

    async def _take_place(self, request: InferenceRequest, demand: Demand) -> None:
        start_by_s = request.options.start_by_s
        is_queue_limit = 0 < start_by_s < request.deadline_s
        try:
            await self._window.take(demand, start_by_s if is_queue_limit else request.deadline_s)
        except DeadlineExceeded:
            if not is_queue_limit:
                raise request.too_late() from None
            limit_s = round(start_by_s - request.options.received_at_s, 3)
            raise DeadlineExceeded(
                f"the queue limit of {limit_s:.10g} s passed before a worker had room"
            ) from None

    async def _wait(
        self,
        waiter: ReplyWaiter,
        request: InferenceRequest,
        job: InFlightJob,
        items: Sequence[Item],
    ) -> list[ItemOutcome]:
        """Waits for the reply. Polls the record as well, because a reply may get lost."""
        while True:
            left_s = max(0.0, job.deadline_s - time.time())
            try:
                return _outcomes(items, (await waiter.reply(min(left_s, LOOK_EVERY_S))).body)
            except DeadlineExceeded:
                if (
                    recorded := await self._recorded_reply(record_id(request.request_id, job.index))
                ) is not None:
                    return _outcomes(items, recorded)
                if left_s <= LOOK_EVERY_S:
                    raise request.too_late() from None

    async def _recorded_reply(self, record: str) -> ReplyBody | None:
        """Returns the reply in the job's record. None without one or if Redis is unreachable."""
        try:
            found = await self._records.read(record)
        except Unavailable:
            return None
        return None if found is None else found.reply

    async def _without_large_source(self, item: Item) -> Item:
        """Returns the item to send. A source image that is too large goes to the object store."""
        source = item.input.source
        if source is None:
            return item
        stored = await stored_input(source, self._objects)
        return msgspec.structs.replace(item, input=item.input.with_source(stored))

    async def _publish(
        self, request: InferenceRequest, job: InFlightJob, items: list[Item], waiter: ReplyWaiter
    ) -> float:
        now_s, topic_id = time.time(), jobs_topic_id(request.model.name)
        timeout_s = min(PUBLISH_LIMIT_S, job.deadline_s - now_s)
        if timeout_s <= 0:
            raise request.too_late()
        try:
            with publish_span(topic_id, items=len(items), started_s=now_s):
                envelope = envelope_of(request, self._api_instance)
                envelope.part, envelope.published_at_s = job.index, now_s
                envelope.inbox, envelope.slot = waiter.inbox, waiter.slot
                message = encode_message(envelope, items, request.options)
                await publish_job(
                    self._publisher, JobMessage(request.model.name, *message), timeout_s=timeout_s
                )
        except BadInput as error:
            # The caller's input is already validated, so a refusal is about the topics.
            raise Unavailable(f"the broker refused the job: {error.message}") from error
        except Unavailable as error:
            if time.time() >= job.deadline_s - TIMER_EARLY_S:
                raise request.too_late() from error
            raise
        return now_s


def envelope_of(request: InferenceRequest, api_instance: str) -> Envelope:
    """Returns the envelope of a request, also for the rows that the API writes."""
    return build_envelope(
        request_id=request.request_id,
        client_request_id=request.client_request_id,
        model=request.model.name,
        tenant=request.tenant,
        key_id=request.key_id,
        plan=request.plan,
        batch_id=request.batch_id,
        price_share=request.price_share,
        weight=request.weight,
        received_at_s=request.options.received_at_s,
        deadline_s=request.deadline_s,
        options=request.options,
        api_instance=api_instance,
    )


def _outcomes(items: Sequence[Item], body: ReplyBody) -> list[ItemOutcome]:
    if body.error is not None:
        error = body.error
        raise error_for_code(
            error.code, f"the worker could not read the job: {error.message}", error.field
        )
    outcomes = body.outcomes
    if [outcome.index for outcome in outcomes] != [item.index for item in items]:
        raise PenstockError(
            f"a worker gave {len(outcomes)} outcomes, not those of {len(items)} items; "
            "this is a bug"
        )
    return outcomes
