"""The state of one request in the dispatcher: its items, its jobs, and the completions so far.

Single flight: identical items of concurrent requests are computed once. The first request for an
item leads it. Later requests with the same cache key join it and wait for the same outcome. An item
lives as long as one request waits for it. If its leader gives up or runs out of time, the item is
abandoned, and requests that still have time start it again.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from api.dispatch.request import InferenceRequest, InferenceResponse
from shared.errors import PenstockError, UndecodableMessage
from shared.messages import Item, ItemOutcome, Receipt, failure
from shared.tasks import Result


@dataclass(slots=True, eq=False)
class InFlightJob:
    """The items of one message, and the task that sends it and waits for its reply."""

    items: list[InFlightItem]
    index: int
    """The number of the job within its request. The wire calls it `part`."""
    deadline_s: float
    queued_at_s: float = 0.0
    """Unix time at which the job could be published. 0 before that."""
    published_at_s: float = 0.0
    """Unix time at which the broker accepted the job. 0 before that."""
    is_answered: bool = False
    """True if its outcomes come from a reply."""
    task: asyncio.Task[list[ItemOutcome]] | None = None


@dataclass(frozen=True, slots=True)
class ItemCompletion:
    """The end of an in-flight item.

    `by_worker`: the outcome is a worker's, which writes the row of its leader.
    """

    outcome: ItemOutcome
    by_worker: bool
    queued_at_s: float = 0.0
    """When its job could be published. 0 if it was not."""


def _new_future() -> asyncio.Future[ItemCompletion | None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class InFlightItem:
    """One item that is being computed, as its leader requested it."""

    item: Item
    completed: asyncio.Future[ItemCompletion | None] = field(default_factory=_new_future)
    """None: the item was abandoned."""
    waiters: int = 0
    """Number of items of requests that wait for it."""
    job: InFlightJob | None = None
    is_unpaid: bool = False
    """The leader left without the result. The first request that gets it pays for all of it."""


class SingleFlight:
    """All items that other requests may join, by cache key."""

    def __init__(self) -> None:
        self._by_key: dict[str, InFlightItem] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def join(self, item: Item, *, shareable: bool) -> tuple[InFlightItem, bool]:
        """Returns the in-flight item for `item`, and whether the caller leads it.

        The caller must call `leave` exactly once. Nothing is awaited between lookup and insertion,
        so two requests can never both lead the same item.
        """
        key = item.cache_key if shareable else None
        in_flight = self._by_key.get(key) if key else None
        is_leader = in_flight is None
        if in_flight is None:
            in_flight = InFlightItem(item)
            if key:
                self._by_key[key] = in_flight
        in_flight.waiters += 1
        return in_flight, is_leader

    def leave(self, in_flight: InFlightItem) -> None:
        """Removes one waiter. Cancels the job if none of its items has a waiter left."""
        in_flight.waiters -= 1
        job = in_flight.job
        if in_flight.waiters or in_flight.completed.done() or job is None:
            return
        if job.task and not any(other.waiters for other in job.items):
            job.task.cancel()

    def complete(self, in_flight: InFlightItem, completion: ItemCompletion | None) -> None:
        """Ends the item for all of its waiters. Later requests start a new one.

        A second completion is ignored. None abandons the item.
        """
        key = in_flight.item.cache_key
        if key and self._by_key.get(key) is in_flight:
            del self._by_key[key]
        if not in_flight.completed.done():
            in_flight.completed.set_result(completion)


class RequestState:
    """A request and its progress. Plain data without I/O.

    Raises:
        BadInput: an input has no canonical form.
    """

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        options = request.options
        self.items = request.items()
        self.is_shareable = options.cache_read and options.cache_write
        """False for callers that want nothing stored, or nothing older than their request."""
        self.completions: list[ItemCompletion | None] = [None] * len(self.items)
        self._jobs: list[InFlightJob] = []

    def pending(self) -> list[int]:
        """Returns the indexes of the items without an outcome."""
        return [index for index, completion in enumerate(self.completions) if completion is None]

    def remaining_s(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self.request.deadline_s - time.time())

    def new_job(self, items: Sequence[InFlightItem]) -> InFlightJob:
        """Puts items into a job with an index of its own in this request."""
        index = len(self._jobs)
        if self.request.facts.batch_id and len(items) < len(self.items):
            # A line may be repeated when more of it is in the cache. The job of the remaining items
            # must not find the record of a job of other items.
            index = zlib.crc32(repr([one.item.index for one in items]).encode())
        job = InFlightJob(list(items), index, self.request.deadline_s)
        for in_flight in items:
            in_flight.job = job
        self._jobs.append(job)
        return job

    def settle(self, index: int, in_flight: InFlightItem, *, is_leader: bool) -> None:
        """Records the completion of an item. Leaves the item pending if another try may help."""
        completion = in_flight.completed.result() if in_flight.completed.done() else None
        is_final = completion is not None and (is_leader or not _is_of_leader(completion.outcome))
        if not is_final and self.remaining_s() > 0:
            return
        if completion is None or not is_final:
            completion = ItemCompletion(failure(index, self.request.too_late()), by_worker=False)
        elif not is_leader:
            completion = ItemCompletion(_of_joined(index, in_flight, completion), by_worker=False)
        self.completions[index] = completion

    def has_result(self, index: int) -> bool:
        """Returns whether an item has ended with a result."""
        completion = self.completions[index]
        return completion is not None and completion.outcome.result is not None

    def cancel(self, error: PenstockError) -> None:
        """Ends every pending item with `error`."""
        for index in self.pending():
            self.completions[index] = ItemCompletion(failure(index, error), by_worker=False)

    def response(
        self,
        on_end: Callable[[InferenceResponse], None],
        error: PenstockError | None = None,
    ) -> InferenceResponse:
        """Returns all outcomes, in the order of the inputs.

        Args:
            on_end: called once it is known whether the caller got them.
            error: why the request ended with items pending.
        """
        completions = [completion for completion in self.completions if completion is not None]
        waits_ms = [
            (completion.outcome.receipt.pulled_at_s - completion.queued_at_s) * 1000
            for completion in completions
            if completion.queued_at_s and completion.outcome.receipt.pulled_at_s
        ]
        return InferenceResponse(
            [completion.outcome for completion in completions],
            max(0.0, *waits_ms, 0.0),
            self.request.price,
            self.request.model.revision,
            error,
            on_end,
        )

    @property
    def has_jobs(self) -> bool:
        """Returns whether any of its jobs was started."""
        return bool(self._jobs)


def _is_of_leader(outcome: ItemOutcome) -> bool:
    """Returns whether only the leader failed: others may still get a late or unreadable item."""
    unreadable = outcome.error is not None and outcome.error.code == UndecodableMessage.code
    return outcome.status == "expired" or unreadable


def cache_hit(item: Item, result: Result, level: str) -> ItemOutcome:
    """Returns the outcome of an item that the cache level `level` has."""
    return ItemOutcome(item.index, "succeeded", _receipt_of_shared(level, result), result)


def _of_joined(index: int, in_flight: InFlightItem, completion: ItemCompletion) -> ItemOutcome:
    """Returns the leader's outcome as that of an item that joined.

    If the leader left without it, the first that gets the result is who it was computed for.
    """
    outcome = completion.outcome
    if in_flight.is_unpaid and completion.by_worker and outcome.result is not None:
        in_flight.is_unpaid = False
        return msgspec.structs.replace(outcome, index=index)
    receipt = _receipt_of_shared("joined", outcome.result)
    return msgspec.structs.replace(outcome, index=index, receipt=receipt)


def _receipt_of_shared(cache: str, result: Result | None) -> Receipt:
    receipt = Receipt(cache=cache)
    if result is not None:
        receipt.count(result)
    return receipt
