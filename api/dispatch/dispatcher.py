"""Between routes and broker: gets each item an outcome, from the cache, an identical item in flight, or a worker.

Who writes the row of an item (each leaves exactly one, `row_id` = request_id:index):

- a result from the cache, or from joining another's item, or an item that expired or failed before the broker had its
  job: the API writes it, here, when the request is done or its caller has hung up;
- an item whose job the broker took: the worker writes it, also when the answer came too late for the caller or the
  caller hung up. Where it is not known whether the broker took the job (the publish was cut off), both may write; the
  row_id is the same, so the deduplicated view counts one;
- a request refused as a whole (bad input, 429) was never taken on: api/http/refusals.py writes one row for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self

from api import metrics
from api.dispatch.admission import Admission
from api.dispatch.job_sender import JobSender, envelope_of, split
from api.dispatch.request import Answer, InferenceRequest
from api.dispatch.request_state import Asking, hit
from api.dispatch.singleflight import Flight, Flights, JobInFlight, Landing
from api.errors import ClientGone
from shared.errors import PenstockError, Unavailable
from shared.messages import ItemOutcome, failure
from shared.stores.cache import ResultCache
from shared.stores.records import LATE_LOOK_S, Records, record_id
from shared.usage.row import RowSink, row_of

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 2.0
CLOSING = "this instance is shutting down"


class Dispatcher:
    """Answers requests; an async context manager that owns the tasks of all jobs in flight."""

    def __init__(
        self,
        sender: JobSender,
        cache: ResultCache,
        records: Records,
        admission: Admission,
        rows: RowSink,
        *,
        api_instance: str,
        region: str,
    ) -> None:
        self._sender = sender
        self._cache = cache
        self._records = records
        self._admission = admission
        self._rows = rows
        self._api_instance = api_instance
        self._region = region
        self._flights = Flights()
        self._tasks: set[asyncio.Task[list[ItemOutcome]]] = set()
        self._canceling: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        if tasks := self._tasks | self._canceling:
            await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)

    @property
    def in_flight(self) -> int:
        """Jobs and joinable items in flight; 0 when nothing is going on."""
        return len(self._tasks) + len(self._flights)

    async def dispatch(self, request: InferenceRequest) -> Answer:
        """Gets the outcomes of all inputs, by the deadline or soon after it.

        Items fail alone: an outcome without a result has an error. Canceling the call lets go of everything that
        nobody else waits for, at once.

        Raises:
            BadInput: an input has no canonical form.
            Overloaded: items would have to wait for a worker, and the instance is full or they would wait too long.
            Unavailable: the instance is shutting down.
        """
        asking = Asking(request)
        try:
            while waiting := asking.waiting():
                await self._round(asking, waiting)
        except asyncio.CancelledError:
            asking.cancel(ClientGone())
            self._record(asking)
            raise
        self._record(asking)
        return asking.answer()

    async def _round(self, asking: Asking, waiting: Sequence[int]) -> None:
        """Boards a flight for each item, starts those that are ours to start, and takes what lands in time.

        Items whose flight was given up by another request stay open, for another round.
        """
        if self._is_closing:
            raise Unavailable(CLOSING)
        boarded = [(index, *self._flights.board(asking.items[index], joinable=asking.joins)) for index in waiting]
        led = [flight for _, flight, leads in boarded if leads]
        try:
            await self._start(asking, led)
            if pending := {flight.landed for _, flight, _ in boarded if not flight.landed.done()}:
                await asyncio.wait(pending, timeout=asking.remaining_s() + (LATE_LOOK_S if led else 0.0))
            for index, flight, leads in boarded:
                asking.take(index, flight, leads=leads)
        finally:
            for flight in led:
                if flight.job is None:  # not started, so those who joined must start it themselves
                    self._flights.end(flight, None)
            for _, flight, _ in boarded:
                self._flights.leave(flight)

    async def _start(self, asking: Asking, led: Sequence[Flight]) -> None:
        """Lands what the cache has and puts the rest into jobs."""
        missing = await self._land_hits(led) if asking.request.cache_read else led
        if not missing:
            return
        request = asking.request
        if asking.remaining_s() <= 0:
            for flight in missing:
                late = failure(flight.item.index, request.too_late())
                self._flights.end(flight, Landing(late, by_worker=False))
            return
        self._admission.admit(request.model.name, len(missing), remaining_s=asking.remaining_s(), lane=request.lane)
        for flights in split(request.model, missing):
            job = asking.new_job(flights)
            job.task = asyncio.create_task(self._fly(request, job))
            self._tasks.add(job.task)
            job.task.add_done_callback(partial(self._ended, request, job))

    async def _land_hits(self, flights: Sequence[Flight]) -> list[Flight]:
        """Looks in the cache, lands what is there, and returns what is not."""
        keys = [flight.item.cache_key for flight in flights if flight.item.cache_key]
        found = await self._cache.get_many(keys) if keys else {}
        missing = []
        for flight in flights:
            if flight.item.cache_key in found:
                self._flights.end(flight, Landing(hit(flight.item, *found[flight.item.cache_key]), by_worker=False))
            else:
                missing.append(flight)
        return missing

    async def _fly(self, request: InferenceRequest, job: JobInFlight) -> list[ItemOutcome]:
        """Sees a job through, to one outcome for each of its flights."""
        try:
            return await self._sender.send(request, job)
        except PenstockError as error:
            return [failure(flight.item.index, error) for flight in job.flights]

    async def _cancel(self, record: str) -> None:
        """Tells the workers that nobody waits for a job any more; where Redis is out they compute it for nobody."""
        with contextlib.suppress(Unavailable):
            await self._records.cancel(record)

    def _ended(self, request: InferenceRequest, job: JobInFlight, task: asyncio.Task[list[ItemOutcome]]) -> None:
        """Lands what has not landed and lets go; as a callback of the task, so that it happens however that ended."""
        self._tasks.discard(task)
        model, flights = request.model.name, job.flights
        outcomes: Sequence[ItemOutcome | None] = [None] * len(flights)
        if task.cancelled():
            metrics.GAVE_UP.labels(model).inc()
            if job.published_at_s and not self._is_closing:
                canceling = asyncio.create_task(self._cancel(record_id(request.request_id, job.part)))
                self._canceling.add(canceling)
                canceling.add_done_callback(self._canceling.discard)
            if self._is_closing:
                outcomes = [failure(flight.item.index, Unavailable(CLOSING)) for flight in flights]
        elif error := task.exception():
            log.error("job failed unexpectedly", extra={"request_id": request.request_id}, exc_info=error)
            outcomes = [failure(flight.item.index, PenstockError("internal error")) for flight in flights]
        else:
            outcomes = task.result()
        self._remember(request, flights, outcomes)
        # What a worker drops for being late leaves quickly and tells nothing of the pace.
        receipts = [outcome.receipt for outcome in outcomes if outcome is not None and outcome.status != "expired"]
        self._admission.release(
            model,
            len(flights),
            answered=any(receipt.pulled_at_s for receipt in receipts),
            was_late=any(outcome is not None and outcome.status == "expired" for outcome in outcomes),
            took_s=max((receipt.inference_ms / 1000 for receipt in receipts if receipt.inference_ms), default=None),
            lane=request.lane,
        )
        by_worker = job.published_at_s > 0
        for flight, outcome in zip(flights, outcomes, strict=True):
            landing = None if outcome is None else Landing(outcome, by_worker, job.published_at_s)
            self._flights.end(flight, landing)

    def _remember(
        self, request: InferenceRequest, flights: Sequence[Flight], outcomes: Sequence[ItemOutcome | None]
    ) -> None:
        """Keeps what came back in memory: the worker fills Redis only after its reply."""
        if request.cache_write:
            pairs = zip(flights, outcomes, strict=True)
            came = {f.item.cache_key: o.result for f, o in pairs if f.item.cache_key and o is not None and o.result}
            self._cache.keep_in_memory(came, request.model.cache.ttl_s)

    def _record(self, asking: Asking) -> None:
        """Writes the rows that are ours, and counts all items."""
        request = asking.request
        landings = [landing for landing in asking.landings if landing is not None]
        counts = Counter((landing.outcome.receipt.cache, landing.outcome.status) for landing in landings)
        for (cache, status), count in counts.items():
            metrics.of_items(request.model.name, cache, status).inc(count)
        ours = [landing.outcome for landing in landings if not landing.by_worker]
        if not ours:
            return
        envelope = envelope_of(request, self._api_instance)
        for outcome in ours:
            self._rows.write(row_of(envelope, outcome, request.model, region=self._region))
