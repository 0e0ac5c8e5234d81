"""Gets each item's outcome from the cache, from an identical item in flight, or from a worker.

Each item is counted as one row (`row_id` = request_id:index):

- The worker writes the row for each item in a job it received, as soon as it has replied.
- The API writes the row here for a cache hit or an item that was coalesced with another.
The API also writes a row for each item that was not delivered because the caller hung up, the
  response was an error, or no reply arrived in time, unless the worker has written the same row.
  The worker may already have written a row with the item's result, or may do so later. Of two such
  rows, reports count the one without a delivery (decision 79).
- A request rejected as a whole (bad input, 429) has no items yet: api/http/refusals.py writes one
  row for it.

Rows are written when the response's block exits, once it is known which items were delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

from api import metrics
from api.dispatch.admission import Admission
from api.dispatch.canary_comparison import CanaryComparisons, ImageComparer
from api.dispatch.canary_routing import CanaryRouter
from api.dispatch.job_sender import JobSender, envelope_of, split_into_jobs
from api.dispatch.request import (
    InferenceRequest,
    InferenceResponse,
    InFlightItem,
    InFlightJob,
    ItemCompletion,
    RequestState,
    SingleFlight,
    cache_hit,
    receipt_without_answer,
)
from api.errors import ClientGone, log_reason
from shared.errors import Canceled, Overloaded, PenstockError, Unavailable
from shared.messages import ItemOutcome, failure, record_id
from shared.models.catalog import Revision
from shared.models.tasks import Result
from shared.money import slo
from shared.money.charge import as_delivered, device_share_of
from shared.stores.cache import Hit, Owed, ResultCache, compute_owed
from shared.stores.objects import ObjectStore
from shared.stores.record_state import Record
from shared.stores.records import LATE_LOOK_S, Records
from shared.stores.withdrawals import withdrawn_error
from shared.tracing.spans import STAGE, Attributes, current, is_recorded, record
from shared.usage.row import RowSink, rows_of

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 2.0
CLOSING = "this instance is shutting down"


class Dispatcher:
    """Serves inference requests.

    An async context manager that owns the tasks for all jobs in flight.
    """

    def __init__(
        self,
        sender: JobSender,
        cache: ResultCache,
        records: Records,
        admission: Admission,
        rows: RowSink,
        canaries: CanaryRouter,
        objects: ObjectStore,
        images: ImageComparer,
        *,
        api_instance: str,
        region: str,
    ) -> None:
        self._sender = sender
        self._cache = cache
        self._records = records
        self._admission = admission
        self._rows = rows
        self.canaries = canaries
        self._comparisons = CanaryComparisons(canaries.canary_store, self._compute, objects, images)
        self._api_instance = api_instance
        self._region = region
        self._single_flight = SingleFlight()
        self._jobs: dict[asyncio.Task[list[ItemOutcome]], InferenceRequest] = {}
        self._cancellations: set[asyncio.Task[None]] = set()
        self._is_closing = False
        canaries.withdrawals.on_withdrawn(self._end_withdrawn)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_closing = True
        for task in (*self._jobs, *self._comparisons.tasks):
            task.cancel()
        if tasks := self._jobs.keys() | self._cancellations | self._comparisons.tasks:
            await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)

    @property
    def in_flight(self) -> int:
        """The number of jobs and shareable items in flight. 0 when the dispatcher is idle."""
        return len(self._jobs) + len(self._single_flight)

    async def dispatch(self, request: InferenceRequest) -> InferenceResponse:
        """Computes outcomes for all inputs, by the deadline or shortly after it.

        Items fail independently: an outcome without a result has an error. Canceling the call
        immediately cancels all work that no other request is waiting for. The response must be
        entered as a context manager: its block builds the HTTP response and determines the charge.

        Raises:
            BadInput: an input has no canonical form.
            ModelWithdrawn: an operator has withdrawn this revision.
            Overloaded: the instance is full, or the items would wait too long for a worker.
            Unavailable: the instance is shutting down.
        """
        routed = self.canaries.route(request)
        if not isinstance(routed.model, Revision):
            return await self._compute(routed)
        try:
            response = await self._compute(routed)
        except Overloaded:
            # A canary has few workers, so callers are not rejected when those workers are at
            # capacity.
            return await self._compute(self.canaries.to_revision(request, request.model))
        self._comparisons.consider(request, routed.model, response)
        return response

    async def recall(self, request: InferenceRequest) -> InferenceResponse:
        """Returns outcomes that an earlier process obtained for the same request. Sends no jobs.

        Cancels jobs that have not ended, as well as items whose results are in neither the
        request's job records nor the cache. The response must be entered, as with `dispatch`.

        Raises:
            BadInput: an input has no canonical form.
            Unavailable: Redis did not respond. Some jobs may have been canceled.
        """
        state = RequestState(self.canaries.route(request))
        await self._end_jobs_and_recall(state)
        pending_items = [state.items[index] for index in state.pending()]
        hits = await self._look_up([item.cache_key for item in pending_items if item.cache_key])
        for item in pending_items:
            if item.cache_key in hits:
                hit = cache_hit(item, hits[item.cache_key])
                hits[item.cache_key] = hits[item.cache_key].repeated
                state.completions[item.index] = ItemCompletion(hit, by_worker=False)
        state.cancel(Canceled())
        return state.response(partial(self._end, state))

    async def _end_jobs_and_recall(self, state: RequestState) -> None:
        """Cancels all of a request's jobs that have not ended, and loads the others' results.

        An earlier process may have sent any of the jobs. If a worker receives a canceled job later,
        it doesn't run the job.

        Raises:
            Unavailable: Redis did not respond. Some jobs may have been canceled.
        """
        request = state.request
        records = [
            record_id(request.facts.request_id, state.job_index(number, state.items[part]))
            for number, part in enumerate(split_into_jobs(request.model, state.items))
        ]
        ended = await asyncio.gather(
            *(self._end_record(record, request.deadline_s) for record in records)
        )
        for job in ended:
            for outcome in () if job is None or job.reply is None else job.reply.outcomes:
                if outcome.result is not None:
                    state.completions[outcome.index] = ItemCompletion(outcome, by_worker=True)

    async def _end_record(self, record: str, deadline_s: float) -> Record | None:
        """Returns a job's record if the job has ended. Otherwise, cancels it and returns None."""
        job_record = await self._records.read(record)
        if job_record is not None and job_record.is_over:
            return job_record
        # A job without a record is canceled too: a worker may still claim it.
        is_canceled = await self._records.cancel(record, deadline_s) == "canceled"
        return None if is_canceled else await self._records.read(record)

    async def _compute(self, request: InferenceRequest) -> InferenceResponse:
        """Computes the outcomes on the revision named in the request."""
        state, error = RequestState(request), None
        try:
            while pending := state.pending():
                await self._run_round(state, pending)
        except asyncio.CancelledError:
            if not state.request.is_run_again():
                state.cancel(ClientGone())
                _count_items(state)
                self._write_rows(state, is_delivered=False)
                self._mark_unpaid(request, state.leave_unpaid())
            raise
        except PenstockError as refused:
            if not state.has_jobs:
                raise
            state.cancel(refused)
            error = refused
        return state.response(partial(self._end, state), error)

    def _end(self, state: RequestState, response: InferenceResponse) -> None:
        """Closes a request once it is known whether its caller received the response."""
        if not (response.is_broken_off and state.request.is_run_again()):
            _count_items(state)
            self._write_rows(state, is_delivered=response.is_delivered)
            if not response.is_delivered:
                self._mark_unpaid(state.request, state.leave_unpaid())

    async def _run_round(self, state: RequestState, pending: Sequence[int]) -> None:
        """Coalesces or starts each pending item, then waits for completions until the deadline.

        Items abandoned by their leader stay pending for another round.
        """
        if self._is_closing:
            raise Unavailable(public=CLOSING)
        shareable = state.is_shareable
        coalesced = [
            (index, *self._single_flight.coalesce(state.items[index], shareable=shareable))
            for index in pending
        ]
        led = [in_flight for _, in_flight, is_leader in coalesced if is_leader]
        try:
            await self._start(state, led)
            items = [in_flight for _, in_flight, _ in coalesced]
            await _wait_for_items(state, items, LATE_LOOK_S if led else 0.0)
            for index, in_flight, is_leader in coalesced:
                state.settle(index, in_flight, is_leader=is_leader)
        finally:
            for in_flight in led:
                if in_flight.job is None:  # not started, so the coalesced requests have to start it
                    self._single_flight.complete(in_flight, None)
            unpaid = list[InFlightItem]()
            for index, in_flight, is_leader in coalesced:
                if is_leader and not state.has_result(index):
                    in_flight.is_unpaid = True
                self._single_flight.leave(in_flight)
                if in_flight.is_unpaid:
                    unpaid.append(in_flight)
            self._mark_abandoned(state.request, unpaid)

    async def _start(self, state: RequestState, led: Sequence[InFlightItem]) -> None:
        """Completes cache hits and starts jobs for the remaining items."""
        request = state.request
        missing = await self._complete_cache_hits(led) if request.options.cache_read else led
        if not missing:
            return
        remaining_s = state.remaining_s()
        if remaining_s <= 0:
            for in_flight in missing:
                late = failure(in_flight.item.index, request.too_late())
                self._single_flight.complete(in_flight, ItemCompletion(late, by_worker=False))
            return
        demand = request.demand(len(missing))
        self._admission.admit(demand, remaining_s=remaining_s)
        for part in split_into_jobs(request.model, [in_flight.item for in_flight in missing]):
            items = missing[part]
            is_all = len(items) == len(missing)
            job = state.new_job(items, demand if is_all else request.demand(len(items)))
            sending = asyncio.create_task(self._send(request, job))
            job.task = sending
            self._jobs[sending] = request
            # A task callback runs no matter how the task finishes.
            sending.add_done_callback(partial(self._end_job, state, job))

    async def _complete_cache_hits(self, led: Sequence[InFlightItem]) -> list[InFlightItem]:
        """Completes items found in the cache and returns the rest."""
        keys = [in_flight.item.cache_key for in_flight in led if in_flight.item.cache_key]
        hits = await self._look_up(keys) if keys else {}
        missing = []
        for in_flight in led:
            if in_flight.item.cache_key in hits:
                hit = cache_hit(in_flight.item, hits[in_flight.item.cache_key])
                self._single_flight.complete(in_flight, ItemCompletion(hit, by_worker=False))
            else:
                missing.append(in_flight)
        return missing

    async def _look_up(self, keys: Sequence[str]) -> dict[str, Hit]:
        began_s = time.time()
        hits = await self._cache.get_many(keys)
        if is_recorded(current()):
            facts: Attributes = {
                STAGE: "cache",
                "penstock.cache.keys": len(keys),
                "penstock.cache.hits": len(hits),
            }
            record("cache", "internal", (began_s, time.time()), facts)
        return hits

    async def _send(self, request: InferenceRequest, job: InFlightJob) -> list[ItemOutcome]:
        """Sends a job, waits for its reply, and returns one outcome per item."""
        try:
            return await self._sender.send(request, job)
        except PenstockError as error:
            log_reason(error, request.facts.request_id)
            return [
                failure(
                    in_flight.item.index, error, receipt_without_answer(in_flight, request.model)
                )
                for in_flight in job.items
            ]

    def _end_job(
        self, state: RequestState, job: InFlightJob, task: asyncio.Task[list[ItemOutcome]]
    ) -> None:
        request = state.request
        self._jobs.pop(task, None)
        if not job.is_answered and not self._is_withdrawn(request):
            self._cancel_on_workers(request, job, task)
        outcomes = self._outcomes_of(request, job, task)
        self._keep_in_memory(request, job, outcomes)
        self._release(job, outcomes)
        if any(outcome is None or outcome.result is None for outcome in outcomes):
            state.give_up_paying()
        by_worker = job.is_answered
        for in_flight, outcome in zip(job.items, outcomes, strict=True):
            completion = (
                None
                if outcome is None
                else ItemCompletion(outcome, by_worker, job.queued_at_s if by_worker else 0.0)
            )
            self._single_flight.complete(in_flight, completion)
        # Items hold a reference to their job. Otherwise, the whole cycle would stay in memory until
        # the next garbage collection.
        job.items.clear()

    def _outcomes_of(
        self, request: InferenceRequest, job: InFlightJob, task: asyncio.Task[list[ItemOutcome]]
    ) -> Sequence[ItemOutcome | None]:
        """Returns one outcome per item in a finished job.

        None means that the item was abandoned because all callers hung up.
        """
        if not task.cancelled():
            failed = task.exception()
            if failed is None:
                return task.result()
            log.error(
                "job failed unexpectedly",
                extra={"request_id": request.facts.request_id},
                exc_info=failed,
            )
            return [
                failure(in_flight.item.index, PenstockError("internal error"))
                for in_flight in job.items
            ]
        error: PenstockError | None = None
        if self._is_closing:
            error = Unavailable(public=CLOSING)
        elif self._is_withdrawn(request):
            error = withdrawn_error(request.model)
        return [
            None if error is None else failure(in_flight.item.index, error)
            for in_flight in job.items
        ]

    def _end_withdrawn(self) -> None:
        """Stops jobs for revisions that were just withdrawn. Workers do the same."""
        for task, request in list(self._jobs.items()):
            if self._is_withdrawn(request):
                task.cancel()

    def _is_withdrawn(self, request: InferenceRequest) -> bool:
        return self.canaries.withdrawals.is_withdrawn(request.model)

    def _cancel_on_workers(
        self, request: InferenceRequest, job: InFlightJob, task: asyncio.Task[list[ItemOutcome]]
    ) -> None:
        """Notifies workers, in the background, that no caller is waiting for the job anymore.

        Called when all callers have hung up, or when the broker did not confirm a message that it
        may have received. Workers drop late jobs on their own.
        """
        if task.cancelled():
            metrics.JOBS_CANCELED.labels(request.model.name).inc()
        elif time.time() >= job.deadline_s:
            return
        if job.is_sent and not self._is_closing:
            keys = {in_flight.item.index: in_flight.item.cache_key for in_flight in job.items}
            canceling = asyncio.create_task(
                self._cancel_record(request, job.index, job.deadline_s, keys)
            )
            self._cancellations.add(canceling)
            self._cache.await_marks([key for key in keys.values() if key], canceling)
            canceling.add_done_callback(self._cancellations.discard)

    async def _cancel_record(
        self,
        request: InferenceRequest,
        part: int,
        deadline_s: float,
        keys: Mapping[int, str | None],
    ) -> None:
        """Cancels a job. If the job has already finished, marks its results as unpaid.

        Args:
            deadline_s: Unix time after which workers drop the job.
            keys: the items' cache keys, by index.
        """
        record, reply = record_id(request.facts.request_id, part), None
        # Without Redis, workers run the job anyway and the result goes unused.
        with contextlib.suppress(Unavailable):
            if await self._records.cancel(record, deadline_s) != "canceled":
                ended = await self._records.read(record)
                reply = None if ended is None else ended.reply
        owed = dict[str, Owed]()
        for outcome in () if reply is None else reply.outcomes:
            key, mark = keys.get(outcome.index), compute_owed(outcome.receipt)
            if key is not None and mark is not None and outcome.result is not None:
                owed[key] = mark
        self._mark_unpaid(request, owed)

    def _keep_in_memory(
        self, request: InferenceRequest, job: InFlightJob, outcomes: Sequence[ItemOutcome | None]
    ) -> None:
        """Puts results into the in-memory cache. The worker writes to Redis only after replying."""
        if not request.options.cache_write:
            return
        results, finished_at_s = dict[str, Result](), dict[str, float | None]()
        for in_flight, outcome in zip(job.items, outcomes, strict=True):
            key = in_flight.item.cache_key
            if key and outcome is not None and outcome.result:
                results[key], finished_at_s[key] = outcome.result, outcome.receipt.finished_at_s
        self._cache.keep_in_memory(results, request.model.cache.ttl_s, finished_at_s)

    def _mark_abandoned(self, request: InferenceRequest, items: Sequence[InFlightItem]) -> None:
        """Marks results as unpaid once all callers who would have paid for them have left."""
        if not items:
            return
        owed = {
            in_flight.item.cache_key: in_flight.owed
            for in_flight in items
            if in_flight.item.cache_key
        }
        self._mark_unpaid(request, {key: mark for key, mark in owed.items() if mark is not None})

    def _mark_unpaid(self, request: InferenceRequest, owed: Mapping[str, Owed]) -> None:
        self._cache.mark_unpaid(owed, request.model.cache.ttl_s)

    def _release(self, job: InFlightJob, outcomes: Sequence[ItemOutcome | None]) -> None:
        """Releases a finished job's items from admission and updates the service rate."""
        is_answered, was_late, took_ms = False, False, 0.0
        for outcome in outcomes:
            if outcome is None:
                continue
            if outcome.status == "expired":
                # Workers drop these quickly, so their times do not reflect the service rate.
                was_late = True
                continue
            is_answered |= bool(outcome.receipt.pulled_at_s)
            took_ms = max(took_ms, outcome.receipt.inference_ms or 0.0)
        self._admission.release(
            job.demand,
            answered=is_answered,
            was_late=was_late,
            took_s=took_ms / 1000 if took_ms else None,
        )

    def _write_rows(self, state: RequestState, *, is_delivered: bool) -> None:
        """Writes rows for items that no worker computed, or whose results were not delivered."""
        request = state.request
        ours = [
            completion.outcome
            for completion in state.completions
            if completion is not None
            and (
                not completion.by_worker
                or (completion.outcome.result is not None and not is_delivered)
            )
        ]
        if not ours:
            return
        envelope = envelope_of(request, self._api_instance)
        delivered = as_delivered(ours, is_delivered=is_delivered)
        rows = rows_of(envelope, delivered, request.model, region=self._region)
        for row, outcome in zip(rows, delivered, strict=True):
            if outcome.receipt.inference_ms is not None:
                row.device_share = device_share_of(request.model)
            if outcome.result is None:
                row.attempt = None  # if neither has a result, the worker's row takes precedence
        self._rows.write(*rows)


def _count_items(state: RequestState) -> None:
    """Counts a request's items by outcome."""
    request = state.request
    counts = dict[tuple[str, str], int]()
    for completion in state.completions:
        if completion is not None:
            labels = completion.outcome.receipt.cache, completion.outcome.status
            counts[labels] = counts.get(labels, 0) + 1
    counts_toward_slo = request.counts_toward_slo
    for (cache, status), count in counts.items():
        metrics.of_items(request.model.name, cache, status).inc(count)
        if counts_toward_slo:
            slo.count_ended(request.model.entry_name, status, count)


async def _wait_for_items(
    state: RequestState, items: Sequence[InFlightItem], late_s: float
) -> None:
    """Waits for all items to end, until `late_s` after the deadline.

    A job's items end together, so this wakes up once per job.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + state.remaining_s() + late_s
    for in_flight in items:
        if not in_flight.is_ended:
            await in_flight.wait(max(0.0, ends_s - loop.time()))
        if not in_flight.is_ended:
            return
