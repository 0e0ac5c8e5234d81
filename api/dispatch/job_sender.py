"""From flights to messages and back: puts flights into jobs, publishes a job and waits for its reply."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from api.dispatch.request import InferenceRequest
from api.dispatch.singleflight import Flight, JobInFlight
from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.catalog import Model
from shared.errors import BadInput, DeadlineExceeded, PenstockError, Unavailable, error_for_code
from shared.messages import Envelope, Item, ItemOutcome, Job, JobBody, Reply, ReplyBody, encode_job
from shared.pubsub.names import jobs_topic_id
from shared.stores.objects import ObjectStore, object_key
from shared.stores.records import Records, record_id
from shared.transport import Publisher

OUTCOME_BYTES = 512
"""What an outcome takes in a reply beside its result: index, status and receipt."""
PUBLISH_LIMIT_S = 10.0
LOOK_EVERY_S = 5.0
"""A reply that takes longer is looked for in the record as well."""
TIMER_EARLY_S = 0.002
"""The event loop counts whole milliseconds, so what runs out at the deadline may do so a little before it."""


class Waiter(Protocol):
    """One part of a request that waits for its reply."""

    @property
    def inbox(self) -> str:
        """Topic id the reply is to be published to."""

    @property
    def slot(self) -> str:
        """The slot attribute the reply is to carry."""

    async def reply(self, timeout_s: float) -> Reply:
        """The reply; DeadlineExceeded when it does not come in time."""


class Inbox(Protocol):
    """Where replies come in; api/dispatch/reply_inbox.py is the real one."""

    def waiter(self, request_id: str, part: int) -> AbstractContextManager[Waiter]:
        """Registers a waiter for as long as the context is open."""


def split(model: Model, flights: Sequence[Flight]) -> Iterator[list[Flight]]:
    """Jobs of about equal size, as few as stay within the bound of a job.

    The reply of a job stays below INLINE_LIMIT_BYTES. An image takes a worker long enough that each is a job of its
    own, which spreads them.
    """
    largest = model.definition.largest_job(model)
    jobs = math.ceil(len(flights) / largest)
    for job in range(jobs):
        yield list(flights[job * len(flights) // jobs : (job + 1) * len(flights) // jobs])


class JobSender:
    """Sends jobs and waits for replies; holds nothing between two calls."""

    def __init__(
        self, inbox: Inbox, publisher: Publisher, objects: ObjectStore, records: Records, api_instance: str
    ) -> None:
        self._inbox = inbox
        self._publisher = publisher
        self._objects = objects
        self._records = records
        self._api_instance = api_instance

    async def send(self, request: InferenceRequest, job: JobInFlight) -> list[ItemOutcome]:
        """Publishes the job and waits for its reply until the deadline; one outcome per flight, in their order.

        The waiter is registered before the job is published, so no reply can be too early. `job.published_at_s` is
        set as soon as the broker has the job.

        Raises:
            DeadlineExceeded: no reply came in time.
            Unavailable: the broker or the object store is out of reach.
            PenstockError: the worker could not read the job, or answered it wrongly.
        """
        items = [await self._without_large_source(flight.item) for flight in job.flights]
        with self._inbox.waiter(request.request_id, job.part) as waiter:
            published_at_s = await self._publish(request, job, items, waiter)
            job.published_at_s = published_at_s
            return await self._wait(waiter, request, job, items)

    async def _wait(
        self, waiter: Waiter, request: InferenceRequest, job: JobInFlight, items: Sequence[Item]
    ) -> list[ItemOutcome]:
        """Waits for the reply, and looks at the record now and then: it is the truth, and a reply may get lost."""
        while True:
            left_s = max(0.0, job.deadline_s - time.time())
            try:
                return _outcomes(items, (await waiter.reply(min(left_s, LOOK_EVERY_S))).body)
            except DeadlineExceeded:
                if (answered := await self._answered(record_id(request.request_id, job.part))) is not None:
                    return _outcomes(items, answered)
                if left_s <= LOOK_EVERY_S:
                    raise request.too_late() from None

    async def _answered(self, record: str) -> ReplyBody | None:
        """What a worker answered, as far as the record says and Redis can tell."""
        try:
            found = await self._records.read(record)
        except Unavailable:
            return None
        return None if found is None else found.reply

    async def _without_large_source(self, item: Item) -> Item:
        """The item as it travels: a source image too large for a message lies in the object store."""
        source = item.input.source
        if source is None or source.data is None or len(source.data) <= INLINE_LIMIT_BYTES:
            return item
        key = object_key("inputs", source.data, source.media_type)
        await self._objects.put(key, source.data, source.media_type)
        stored = item.input.with_source(Blob(source.media_type, object_key=key))
        return msgspec.structs.replace(item, input=stored)

    async def _publish(self, request: InferenceRequest, job: JobInFlight, items: list[Item], waiter: Waiter) -> float:
        now_s = time.time()
        envelope = envelope_of(request, self._api_instance)
        envelope.part, envelope.inbox, envelope.slot, envelope.published_at_s = (
            job.part,
            waiter.inbox,
            waiter.slot,
            now_s,
        )
        envelope.cache_key = items[0].cache_key or ""
        body = JobBody(items, request.cache_read, request.cache_write)
        data, attributes = encode_job(Job(envelope, body))
        timeout_s = min(PUBLISH_LIMIT_S, job.deadline_s - now_s)
        if timeout_s <= 0:
            raise request.too_late()
        try:
            await self._publisher.publish(jobs_topic_id(request.model.name), data, attributes, timeout_s=timeout_s)
        except BadInput as error:
            # What the caller sent was checked before, so a refusal is about our topics.
            raise Unavailable(f"the broker refused the job: {error.message}") from error
        except Unavailable as error:
            if time.time() >= job.deadline_s - TIMER_EARLY_S:
                raise request.too_late() from error
            raise
        return now_s


def envelope_of(request: InferenceRequest, api_instance: str) -> Envelope:
    """The envelope of a request, as part 0, not published."""
    return Envelope(
        request_id=request.request_id,
        part=0,
        model=request.model.name,
        tenant=request.tenant,
        deadline_s=request.deadline_s,
        received_at_s=request.received_at_s,
        published_at_s=0.0,
        api_instance=api_instance,
        traceparent=request.traceparent,
        lane=request.lane,
        start_by_s=request.start_by_s,
        client_request_id=request.client_request_id,
    )


def _outcomes(items: Sequence[Item], body: ReplyBody) -> list[ItemOutcome]:
    if body.error is not None:
        error = body.error
        raise error_for_code(error.code, f"the worker could not read the job: {error.message}", error.field)
    outcomes = body.outcomes
    if [outcome.index for outcome in outcomes] != [item.index for item in items]:
        raise PenstockError(f"a worker gave {len(outcomes)} outcomes, not those of {len(items)} items; this is a bug")
    return outcomes
