"""An inference request: its options, its state in the dispatcher, and its response.

Predictions are inference requests too. The state consists of the items, the jobs, and the
completions so far.

Single flight: identical items in concurrent requests are computed once. The first request for an
item becomes its leader. Later requests with the same cache key are coalesced with it and wait for
the same outcome. An item exists as long as a request is waiting for it. If its leader leaves or
runs out of time, the item is abandoned, and requests that still have time restart it.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import TracebackType
from typing import Self

import msgspec

from api.errors import ERROR_MAPPINGS
from api.fair_room import Demand
from shared.errors import (
    DeadlineExceeded,
    Overloaded,
    PenstockError,
    UndecodableMessage,
    error_for_code,
)
from shared.messages import Item, ItemOutcome, Receipt, RequestFacts, failure, reason_of
from shared.models.catalog import Model, Revision
from shared.models.entry import Deadline
from shared.models.tasks import Input
from shared.money.amounts import plain
from shared.money.charge import ItemPrice, as_delivered, cost_usd, device_s, price_of
from shared.money.slo import counts_toward_slo
from shared.predictions import Prediction
from shared.stores.cache import Hit, Owed, cache_keys, compute_owed

CACHE_HEADER = "x-penstock-cache"
COST_HEADER, DEVICE_HEADER = "x-penstock-cost-usd", "x-penstock-device-ms"
REVISION_HEADER = "x-penstock-revision"
"""Header that names the revision that computed the results. It lists several revisions if a canary
computed only some of the results.
"""


OUTCOME_BYTES = 512
"""Size of an outcome in a reply, excluding the result: index, status, and receipt."""

_SOURCES = {"memory": "hit", "redis": "hit", "joined": "joined"}


class RequestOptions(msgspec.Struct, frozen=True):
    """One request's options, parsed once from its headers. None or empty if not set.

    Times are measured from when the request arrived.
    """

    deadline_s: float | None = None
    """Seconds until the response is due."""
    queue_limit_s: float | None = None
    """Seconds after which the model is no longer started."""
    cancel_after_s: float | None = None
    """Seconds after which a prediction is stopped."""
    wait_s: float = 0.0
    """Maximum seconds to wait for the prediction to finish before responding."""
    cache_read: bool = True
    cache_write: bool = True
    idempotency_key: str = ""

    def limit_s(self, bound: Deadline) -> float:
        """Returns the seconds until the response is due, within a model's bounds."""
        return bound.default_s if self.deadline_s is None else min(self.deadline_s, bound.longest_s)

    def done_within_s(self, bound: Deadline) -> float:
        """Returns when to stop a prediction, in seconds: the smaller of two limits."""
        given_s = [
            limit_s for limit_s in (self.deadline_s, self.cancel_after_s) if limit_s is not None
        ]
        return min([bound.longest_s, *given_s])


class NewRecord(msgspec.Struct, frozen=True):
    """The prediction record created for a request before its job is published.

    It outlives the caller's connection and the instance.
    """

    prediction: Prediction
    """The prediction's document."""
    keep_s: int | None
    """How many seconds to store the prediction after it finishes, as set by the tenant's plan. None
    means the default.
    """
    is_keyed: bool
    """True if the caller can repeat the request and get the same prediction."""


class InferenceRequest(msgspec.Struct, frozen=True):
    """One validated request: inputs, model, and caller.

    A request with a record is a prediction. It has a single job with all items, and its result goes
    to the record. The result of any other request goes only to a waiting caller.
    """

    facts: RequestFacts
    model: Model
    """The revision on which to run the request."""
    inputs: Sequence[Input]
    deadline_s: float
    """Unix time, within the model's maximum deadline."""
    options: RequestOptions
    is_repeatable: bool = True
    """True if identical inputs produce identical results.

    If not, items are neither cached nor coalesced.
    """
    record: NewRecord | None = None
    is_run_again: Callable[[], bool] = lambda: False
    """Returns whether the same request, with the same ID, will be sent again if this one is
    canceled.
    """
    purges: int = 0
    """How many times the revision's cached results have been purged."""

    @property
    def new_record(self) -> NewRecord:
        """The record to create. Available only for requests with a record."""
        assert self.record is not None, "only valid for requests with a record; this is a bug"
        return self.record

    def as_first_asked(self, first: Prediction) -> InferenceRequest:
        """Returns the request that created the prediction `first`, which this request repeats."""
        price_share = 1.0 if first.price is None else first.price.price_share
        facts = msgspec.structs.replace(
            self.facts,
            tenant=first.tenant,
            received_at_s=first.created_at_s,
            client_request_id=first.client_request_id,
            key_id=first.key_id,
            price_share=price_share,
        )
        options, limit_s = self.options, self.options.queue_limit_s
        if limit_s is not None:  # measured from this request, not from the first
            later_s = self.facts.received_at_s - first.created_at_s
            options = msgspec.structs.replace(options, queue_limit_s=limit_s + later_s)
        return msgspec.structs.replace(
            self,
            facts=facts,
            deadline_s=first.deadline_s,
            options=options,
            record=msgspec.structs.replace(self.new_record, prediction=first),
        )

    def items(self) -> list[Item]:
        """Returns the request's items. Items that may be cached have a key.

        Raises:
            BadInput: an input has no canonical form.
        """
        is_kept = self.is_repeatable and self.options.cache_write and self.model.cache.ttl_s > 0
        keys: Iterable[str | None] = (
            cache_keys(self.model, self.inputs, self.facts.tenant, self.purges)
            if is_kept
            else repeat(None, len(self.inputs))
        )
        return [
            Item(index, task_input, key)
            for index, (task_input, key) in enumerate(zip(self.inputs, keys, strict=True))
        ]

    def demand(self, items: int) -> Demand:
        """Returns the demand that this many of the request's items put on the workers."""
        return Demand(
            self.model.deployed_name,
            items,
            self.facts.tenant,
            self.facts.weight,
            self.facts.priority,
            # A canary at capacity never rejects a caller, because the other revision takes the
            # items.
            self.counts_toward_slo and not isinstance(self.model, Revision),
        )

    @property
    def counts_toward_slo(self) -> bool:
        """Returns whether the SLO applies.

        It does not apply at `batch` priority or with a shorter deadline.
        """
        options = self.options
        limits_s = (options.deadline_s, options.queue_limit_s, options.cancel_after_s)
        return counts_toward_slo(self.model.deadline, self.facts.priority, limits_s)

    @property
    def start_by_s(self) -> float:
        """Unix time after which the model is no longer started. If 0, only the deadline applies."""
        limit_s = self.options.queue_limit_s
        return 0.0 if limit_s is None else self.facts.received_at_s + limit_s

    @property
    def price(self) -> ItemPrice:
        """The terms for charging for the items."""
        return price_of(self.model, self.facts.received_at_s, self.facts.price_share)

    @property
    def reply_bytes(self) -> int:
        return len(self.inputs) * (self.model.definition.result_bytes(self.model) + OUTCOME_BYTES)

    def too_late(self) -> DeadlineExceeded:
        """Returns the error for a request that was not completed by its deadline."""
        received_at_s = self.facts.received_at_s
        waited_s, limit_s = time.time() - received_at_s, round(self.deadline_s - received_at_s, 3)
        return DeadlineExceeded(
            f"no response within the deadline of {limit_s:.10g} s; waited {waited_s:.2f} s"
        )


@dataclass(slots=True)
class InferenceResponse:
    """One outcome per input, in order. `queue_ms` is the longest time an item waited at the broker.

    A context manager whose block builds the HTTP response. If the block raises, the caller received
    nothing and is not charged. Rows are written when the block exits.
    """

    outcomes: Sequence[ItemOutcome]
    queue_ms: float
    price: ItemPrice
    """The terms under which the items are charged."""
    revision: str
    """The revision that computed the response."""
    error: PenstockError | None = None
    """The reason the request ended before its items did."""
    on_end: Callable[[InferenceResponse], None] = lambda _: None
    """Called when the block exits."""
    is_delivered: bool = True
    """True if, as far as is known, the results were delivered to the caller."""
    is_broken_off: bool = False
    """True if the block was canceled, in which case the work may be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_delivered = kind is None
        self.is_broken_off = isinstance(error, asyncio.CancelledError)
        self.on_end(self)

    @property
    def cost_usd(self) -> float:
        """The request's charge: the sum of its rows."""
        delivered = as_delivered(self.outcomes, is_delivered=self.is_delivered)
        return sum(cost_usd(self.price, outcome) for outcome in delivered)

    def headers(self) -> dict[str, str]:
        """Returns the headers included in every inference response.

        Times come from the slowest item, because items run in parallel. The cache status is `hit`,
        `miss`, or `joined` if it is the same for all items, and `partial` otherwise. Device time
        and cost are summed.
        """
        receipts = [outcome.receipt for outcome in self.outcomes]
        batch_ms = inference_ms = used_s = 0.0
        revisions = set[str]()
        for receipt in receipts:
            batch_ms = max(batch_ms, receipt.batch_wait_ms or 0.0)
            inference_ms = max(inference_ms, receipt.inference_ms or 0.0)
            used_s += device_s(self.price, receipt)
            revisions.add(receipt.revision or self.revision)
        return {
            CACHE_HEADER: _cache_of(receipts),
            "x-penstock-queue-ms": f"{self.queue_ms:.2f}",
            "x-penstock-batch-ms": f"{batch_ms:.2f}",
            "x-penstock-inference-ms": f"{inference_ms:.2f}",
            DEVICE_HEADER: f"{used_s * 1000:.3f}",
            REVISION_HEADER: ", ".join(sorted(revisions)),
            COST_HEADER: plain(self.cost_usd),
        }

    def raise_if_failed(self) -> None:
        """Raises the error of the first item without a result. Partial responses are not returned.

        Raises:
            PenstockError: the error of the item, with its code, or the error of the request.
        """
        if self.error is not None:
            raise self.error
        for outcome in self.outcomes:
            if outcome.result is None:
                raise _error_of(outcome, several=len(self.outcomes) > 1)


def _cache_of(receipts: Sequence[Receipt]) -> str:
    sources = {_SOURCES.get(receipt.cache, "miss") for receipt in receipts}
    return sources.pop() if len(sources) == 1 else "partial"


def headers_of_run(prediction: Prediction, outcomes: Sequence[ItemOutcome]) -> dict[str, str]:
    """Returns a flow's response headers: its cost, and the cache status across all items."""
    priced = [(prediction.price_of(outcome), outcome) for outcome in outcomes]
    usd = sum(cost_usd(price, outcome) for price, outcome in priced if price is not None)
    return {
        CACHE_HEADER: _cache_of([outcome.receipt for outcome in outcomes]),
        COST_HEADER: plain(usd),
    }


def _error_of(outcome: ItemOutcome, *, several: bool) -> PenstockError:
    error = outcome.error
    if error is None:
        return PenstockError(reason_of(outcome))
    known = error_for_code(error.code, reason_of(outcome), error.field)
    names_item = (
        error.field == "input"
        or ERROR_MAPPINGS[known.code].status >= 500
        or isinstance(known, Overloaded)
    )
    if several and not names_item:
        known.message = f"item {outcome.index}: {known.message}"
    return known


@dataclass(slots=True, eq=False)
class InFlightJob:
    """One message's items, and the task that sends the message and waits for its reply."""

    items: list[InFlightItem]
    index: int
    """The job's index within its request. The wire format calls it `part`."""
    deadline_s: float
    demand: Demand
    """The items' demand."""
    queued_at_s: float = 0.0
    """Unix time at which the job was allowed to be published, or 0 before that."""
    is_sent: bool = False
    """True once the broker may have the job: publishing has started, and the broker has not
    rejected the job.
    """
    is_answered: bool = False
    """True if the outcomes come from a reply."""
    task: asyncio.Task[list[ItemOutcome]] | None = None


class ItemCompletion(msgspec.Struct, frozen=True):
    """The completion of an in-flight item.

    `by_worker`: True if the outcome comes from a worker, which writes the leader's row.
    """

    outcome: ItemOutcome
    by_worker: bool
    queued_at_s: float = 0.0
    """Unix time at which the item's job was allowed to be published, or 0 if it was not published.
    """


@dataclass(slots=True, eq=False)
class InFlightItem:
    """One item being computed, as requested by its leader."""

    item: Item
    is_ended: bool = False
    completion: ItemCompletion | None = None
    """Set when the item ends. If it is then None, the item was abandoned."""
    waiters: int = 0
    """Number of request items waiting for this item."""
    job: InFlightJob | None = None
    is_unpaid: bool = False
    """True if the leader does not pay for the item, because it has left or its request failed. The
    first request that receives the result pays for all of it.
    """
    is_taken_over: bool = False
    """True if a request other than the leader's request pays for the item."""
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def end(self, completion: ItemCompletion | None) -> None:
        """Completes or abandons the item, and wakes the requests that wait for it."""
        if self.is_ended:
            return
        self.is_ended, self.completion = True, completion
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)

    async def wait(self, limit_s: float) -> None:
        """Waits for the item to end, at most `limit_s`."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(limit_s, _wake, woken)  # faster than asyncio.timeout
        self._waiting.append(woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._waiting.remove(woken)

    @property
    def owed(self) -> Owed | None:
        """The amount left unpaid if all callers have disconnected.

        None if there is no result or if a caller pays for it.
        """
        if self.waiters or not self.is_unpaid or self.completion is None:
            return None
        outcome = self.completion.outcome
        return None if outcome.result is None else compute_owed(outcome.receipt)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def receipt_without_answer(in_flight: InFlightItem, model: Model) -> Receipt:
    """Returns the receipt for an item whose job finished without a reply.

    If the job was published, a worker may have computed the item, so the receipt is marked as
    estimated.
    """
    is_published = in_flight.job is not None and in_flight.job.is_sent
    return Receipt(spent_work=in_flight.item.input.estimate_work(model) if is_published else None)


class SingleFlight:
    """All items available for coalescing, by cache key."""

    def __init__(self) -> None:
        self._by_key: dict[str, InFlightItem] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def coalesce(self, item: Item, *, shareable: bool) -> tuple[InFlightItem, bool]:
        """Returns the in-flight item for `item`, and whether the caller leads it.

        The caller must call `leave` exactly once. There is no await between lookup and insertion,
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
        """Removes one waiter. Cancels the job once none of its items has a waiter."""
        in_flight.waiters -= 1
        job = in_flight.job
        if in_flight.waiters or in_flight.is_ended or job is None:
            return
        if job.task and not any(other.waiters for other in job.items):
            job.task.cancel()

    def complete(self, in_flight: InFlightItem, completion: ItemCompletion | None) -> None:
        """Completes the item for all of its waiters. Later requests start a new item.

        A second completion is ignored. A completion of None abandons the item.
        """
        key = in_flight.item.cache_key
        if key and self._by_key.get(key) is in_flight:
            del self._by_key[key]
        in_flight.end(completion)


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
        """False for callers who don't want anything stored, or don't want anything older than their
        request.
        """
        self.completions: list[ItemCompletion | None] = [None] * len(self.items)
        self._jobs: list[InFlightJob] = []
        self._led: dict[int, InFlightItem] = {}
        """The items that this request leads, by index."""

    def pending(self) -> list[int]:
        """Returns the indexes of the items without an outcome."""
        return [index for index, completion in enumerate(self.completions) if completion is None]

    def remaining_s(self) -> float:
        """Returns the seconds until the deadline, or 0 if it has passed."""
        return max(0.0, self.request.deadline_s - time.time())

    def new_job(self, items: Sequence[InFlightItem], demand: Demand) -> InFlightJob:
        """Puts items into a job with a new index in this request."""
        index = self.job_index(len(self._jobs), [in_flight.item for in_flight in items])
        job = InFlightJob(list(items), index, self.request.deadline_s, demand)
        for in_flight in items:
            in_flight.job = job
        self._jobs.append(job)
        return job

    def job_index(self, number: int, items: Sequence[Item]) -> int:
        """Returns the index of a job with these items.

        Args:
            number: how many of the request's jobs precede this one.
        """
        if not self.request.facts.batch_id or len(items) == len(self.items):
            return number
        # A batch line may be repeated after more of its items have been cached. The job for the
        # remaining items must not match a record of a job with different items.
        return zlib.crc32(repr([item.index for item in items]).encode())

    def settle(self, index: int, in_flight: InFlightItem, *, is_leader: bool) -> None:
        """Records an item's completion. Leaves the item pending if another attempt may help."""
        completion = in_flight.completion
        if is_leader:
            self._led[index] = in_flight
        is_final = completion is not None and (is_leader or not _is_of_leader(completion.outcome))
        if not is_final and self.remaining_s() > 0:
            return
        if completion is None or not is_final:
            receipt = receipt_without_answer(in_flight, self.request.model) if is_leader else None
            late = failure(index, self.request.too_late(), receipt)
            completion = ItemCompletion(late, by_worker=False)
        elif not is_leader:
            completion = ItemCompletion(
                _of_coalesced(index, in_flight, completion), by_worker=False
            )
        self.completions[index] = completion

    def leave_unpaid(self) -> dict[str, Owed]:
        """Stops paying for the items, because the response was not delivered.

        Other requests waiting for the same items pay for them.

        Returns:
            The amounts that no request pays for, by cache key.
        """
        owed = dict[str, Owed]()
        for index, (item, completion) in enumerate(zip(self.items, self.completions, strict=True)):
            if item.cache_key is None or completion is None or completion.outcome.result is None:
                continue
            in_flight, own = self._led.get(index), compute_owed(completion.outcome.receipt)
            if in_flight is not None and in_flight.waiters:
                in_flight.is_unpaid = True
            elif own is not None and not (in_flight is not None and in_flight.is_taken_over):
                owed[item.cache_key] = own
        return owed

    def give_up_paying(self) -> None:
        """Leaves payment for this request's items to other waiting requests.

        Called when an item has failed, so the request fails as a whole.
        """
        for job in self._jobs:
            for in_flight in job.items:
                in_flight.is_unpaid = True

    def has_result(self, index: int) -> bool:
        """Returns whether an item has finished with a result."""
        completion = self.completions[index]
        return completion is not None and completion.outcome.result is not None

    def cancel(self, error: PenstockError) -> None:
        """Completes every pending item with `error`."""
        for index in self.pending():
            self.completions[index] = ItemCompletion(failure(index, error), by_worker=False)

    def response(
        self,
        on_end: Callable[[InferenceResponse], None],
        error: PenstockError | None = None,
    ) -> InferenceResponse:
        """Returns all outcomes, in the order of the inputs.

        Args:
            on_end: called once it is known whether the caller received them.
            error: the reason the request ended with items still pending.
        """
        outcomes, waited_s = list[ItemOutcome](), 0.0
        for completion in self.completions:
            if completion is None:
                continue
            outcomes.append(completion.outcome)
            pulled_at_s = completion.outcome.receipt.pulled_at_s
            if completion.queued_at_s and pulled_at_s:
                waited_s = max(waited_s, pulled_at_s - completion.queued_at_s)
        return InferenceResponse(
            outcomes,
            waited_s * 1000,
            self.request.price,
            self.request.model.revision,
            error,
            on_end,
        )

    @property
    def has_jobs(self) -> bool:
        """Returns whether any of the request's jobs were started."""
        return bool(self._jobs)


def _is_of_leader(outcome: ItemOutcome) -> bool:
    """Returns whether only the leader failed.

    Other requests may still receive an item that is late or unreadable for the leader.
    """
    unreadable = outcome.error is not None and outcome.error.code == UndecodableMessage.code
    return outcome.status == "expired" or unreadable


def cache_hit(item: Item, hit: Hit) -> ItemOutcome:
    """Returns the outcome for an item whose result is cached."""
    return ItemOutcome(item.index, "succeeded", hit.receipt(), hit.result)


def _of_coalesced(index: int, in_flight: InFlightItem, completion: ItemCompletion) -> ItemOutcome:
    """Returns the leader's outcome, adapted to a coalesced item.

    If the leader does not pay, the first request to receive the result is treated as its source.
    """
    outcome = completion.outcome
    is_owed = outcome.result is not None and compute_owed(outcome.receipt) is not None
    if in_flight.is_unpaid and is_owed:
        in_flight.is_unpaid, in_flight.is_taken_over = False, True
        return msgspec.structs.replace(outcome, index=index)
    receipt = Receipt(cache="joined")
    if outcome.result is not None:
        receipt.count(outcome.result)
    return msgspec.structs.replace(outcome, index=index, receipt=receipt)
