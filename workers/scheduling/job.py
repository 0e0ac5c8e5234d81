"""A pulled job: its items, their outcomes so far, and the items waiting for the model.

Contains only plain data, and does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shared.broker.transport import (
    ReceivedMessage,
    Subscription,
)
from shared.errors import Canceled, DeadlineExceeded, PenstockError
from shared.messages import (
    Envelope,
    Item,
    ItemOutcome,
    Job,
    PrintedLogs,
    Receipt,
    failure,
    record_id,
)
from shared.models.tasks import Result
from shared.models.tasks.text import GenerationInput
from shared.stores.cache import Hit, Owed
from shared.stores.stream_chunks import Chunk
from shared.tenants.plan import Priority
from shared.tracing.spans import TraceContext
from workers.models.base import Prepared, PreparedCustom, PreparedImage, PreparedPrompt
from workers.models.reports import BatchResult, Call

FRESH_S = 0.05
TOKEN_ID_BYTES = 4
TOLERATED_CRASHES, GENERATION_TOLERATED_CRASHES = 1, 4
"""Number of workers that may die while holding a job or a text generation before its items are run
one by one.
"""
NOT_STARTED, NOT_DONE = "the model could start", "the model was done"
NOT_SENT = "the response was on its way"
"""The event that did not happen before an item's time ran out."""


class JobTimer(Protocol):
    """Fires when a job reaches one of its limits."""

    def cancel(self) -> object: ...


@dataclass(slots=True, eq=False)
class PulledJob:
    """A pulled job, and the outcomes of its items so far."""

    job: Job
    message: ReceivedMessage
    subscription: Subscription
    pulled_at_s: float
    outcomes: dict[int, ItemOutcome] = field(default_factory=dict)
    to_cache: dict[str, int] = field(default_factory=dict)
    """Cache keys that this job fills, each with the index of its item."""
    to_pay: dict[str, tuple[int, Owed]] = field(default_factory=dict)
    """Unpaid results that this job pays for, keyed by cache key, each with its item's index."""
    undelivered: frozenset[int] = frozenset()
    """Indices of items whose results were not part of the response, once known."""
    written: dict[int, list[Chunk]] = field(default_factory=dict)
    """Output from custom classes for finished items, keyed by item index."""
    is_over: bool = False
    """True if the job is being finished, is finished, or was handed back. Its queued items are then
    dropped.
    """
    is_canceled: bool = False
    """True if the caller is gone. Batches that are running for this job stop after their current
    step.
    """
    is_late: bool = False
    """True if the deadline has passed. The job then ends as if it had been canceled."""
    timer: JobTimer | None = None
    """Set until the job is over."""
    over_since_s: float = 0.0
    """Monotonic time of the last item's outcome."""
    unfinished_claims: int = 0
    """Number of workers that have died while holding this job since its last progress."""
    is_claimed: bool = False
    """True if this worker's claim is recorded in the job's record."""
    is_alone: bool = False
    """True if, according to the record, the worker is running only this job."""
    is_released: bool = False
    """True if the claim was released because the worker is shutting down."""
    dead_letter_reason: str = ""
    """The reason the job was given up on. A copy of the job's message goes to the dead-letter
    topic.
    """
    trace: TraceContext | None = None
    """The span that published the job."""
    runs: list[ItemRun] | None = None
    """The batches that its items have run in so far. None if its spans are not kept."""
    envelope: Envelope = field(init=False)
    items: list[Item] = field(init=False)
    reads_cache: bool = field(init=False)
    """True if the job accepts cached results and results computed for others."""
    start_by_s: float = field(init=False)
    """Unix time after which the job may not start: the queue limit or the deadline."""

    def __post_init__(self) -> None:
        self.envelope, body = self.job.envelope, self.job.body
        self.items, self.reads_cache = body.items, body.cache_read
        deadline_s, limit_s = self.envelope.deadline_s, self.envelope.start_by_s
        self.start_by_s = min(deadline_s, limit_s) if limit_s else deadline_s

    @property
    def record(self) -> str:
        return record_id(self.envelope.request_id, self.envelope.part)

    @property
    def run(self) -> str:
        """ID of the record that a caller cancels. For a flow step, it is the run's record."""
        return self.envelope.request_id if self.envelope.flow else self.record

    @property
    def shown_in(self) -> str:
        """ID of the record that shows the progress of its images. Empty if there is no such record.

        A request with steps after each image shows the drawing progress.
        """
        if self.envelope.has_record:
            return self.record
        return self.run if self.envelope.flow == self.envelope.model else ""

    @property
    def is_suspect(self) -> bool:
        """True if more workers have died while holding the job than is tolerated.

        When a node is lost, all of its jobs are redelivered, which amounts to at least a second of
        work. If run one by one, each of those jobs would take as long as a batch.

        A generation tolerates more crashes, because it takes a long time, a caller is waiting, it
        continues from its last token, and generations that run one by one take many times as long.
        If a generation crashes, it kills only its model process, and those deaths are counted
        separately.
        """
        if self.unfinished_claims <= TOLERATED_CRASHES:  # as is nearly always the case
            return False
        is_text = isinstance(self.items[0].input, GenerationInput)
        return not is_text or self.unfinished_claims > GENERATION_TOLERATED_CRASHES

    @property
    def is_fresh(self) -> bool:
        """True if the API checked the cache so recently that there is no point in checking again.

        By the time a job gets here, one broker round trip has passed: half from the API and half to
        the worker.
        """
        age_s = self.pulled_at_s - self.envelope.published_at_s
        return self.envelope.attempt == 1 and age_s < FRESH_S + self.subscription.round_trip.most_s

    @property
    def is_unwanted(self) -> bool:
        """True if the caller is no longer waiting for the job."""
        return self.is_over or self.is_canceled or self.is_late

    def set_delivered(self, outcomes: Sequence[ItemOutcome]) -> None:
        """Remembers which results the job's reply contains."""
        delivered = {outcome.index for outcome in outcomes if outcome.result is not None}
        self.undelivered = frozenset(
            item.index for item in self.items if item.index not in delivered
        )

    @property
    def owed_again(self) -> dict[str, Owed]:
        """The unpaid results that this job was to pay for but did not deliver, by cache key."""
        return {
            key: mark for key, (index, mark) in self.to_pay.items() if index in self.undelivered
        }

    def is_undelivered(self, index: int) -> bool:
        """Returns whether an item's result is known not to have reached the caller."""
        return self.is_canceled or self.is_late or index in self.undelivered

    def end(self) -> None:
        """Marks the job as over, and stops its timer."""
        self.is_over = True
        self.over_since_s = time.monotonic()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def receipt(self, **fields: Any) -> Receipt:
        return Receipt(pulled_at_s=self.pulled_at_s, **fields)

    def expired(
        self, index: int, receipt: Receipt | None = None, before: str = NOT_STARTED
    ) -> ItemOutcome:
        """Returns the outcome for an item whose time ran out before the event `before`."""
        is_queue_limit = (
            before == NOT_STARTED
            and not self.is_late
            and self.start_by_s < self.envelope.deadline_s
        )
        which, at_s = (
            ("queue limit", self.start_by_s)
            if is_queue_limit
            else ("deadline", self.envelope.deadline_s)
        )
        limit_s = round(at_s - self.envelope.received_at_s, 3)
        error = DeadlineExceeded(f"the {which} of {limit_s:.10g} s passed before {before}")
        return failure(index, error, receipt or self.receipt())

    def canceled(self, index: int, receipt: Receipt | None = None) -> ItemOutcome:
        """Returns the outcome for an item whose job was canceled."""
        return failure(index, Canceled(), receipt or self.receipt())

    def unwanted(self, index: int, receipt: Receipt | None = None, *, started: bool) -> ItemOutcome:
        """Returns the outcome for an item whose job was canceled or is late."""
        if self.is_canceled:
            return self.canceled(index, receipt)
        return self.expired(index, receipt, NOT_DONE if started else NOT_STARTED)

    def hit(self, item: Item, hit: Hit) -> ItemOutcome:
        """Returns the outcome for an item whose result is in the cache."""
        if hit.owed is not None and item.cache_key:
            self.to_pay[item.cache_key] = (item.index, hit.owed)
        receipt = hit.receipt(pulled_at_s=self.pulled_at_s)
        return ItemOutcome(item.index, "succeeded", receipt, hit.result)

    def without_model(self, item: Item, result: Result) -> ItemOutcome:
        """Returns the outcome for an item that doesn't need a model."""
        receipt = self.receipt()
        receipt.count(result)
        return ItemOutcome(item.index, "succeeded", receipt, result)


class Computed(NamedTuple):
    """The model's result for an item, and the batch in which the item ran."""

    outcome: Result | PenstockError
    batch: BatchResult
    traces: Sequence[TraceContext] = ()
    """Traces of the batch's jobs whose spans are kept."""
    computed_work: int | None = None
    """The item's work, including its share of the padding. None if there was no padding."""
    logs: PrintedLogs | None = None
    """The model process's output, if the item was computed by itself."""
    call: Call | None = None
    """The call that computed the item. None if every call in its batch computed the item."""


@dataclass(frozen=True, slots=True)
class ItemRun:
    """An item's run in a batch, for its spans."""

    index: int
    queued_at_s: float
    deaths: int
    computed: Computed


@dataclass(slots=True, eq=False)
class QueuedItem:
    """A prepared input waiting for the model, and the items that share its result."""

    prepared: Prepared
    cache_key: str | None
    queued_at_s: float
    waiters: list[tuple[PulledJob, Item]]
    computed: Computed | None = None
    """Set once the model has run."""
    is_cached: bool = False
    """True if the result goes into the cache."""
    payer: tuple[PulledJob, int] | None = None
    """The job charged for the result, and its item's index."""
    deaths: int = 0
    """Number of model processes that died while computing the item."""
    deaths_alone: int = 0
    """How many of those processes were computing nothing else."""
    written: list[Chunk] = field(default_factory=list)
    """A generation's output so far, if it is being streamed or has been preempted."""
    has_started: bool = False
    """True if a model process has received the item, so that the queue time limit no longer
    applies.
    """
    part: QueuedPart | None = None
    """The part in which the item is waiting."""
    key: str = field(init=False)
    """The compatibility key. Only items with the same key share a batch."""
    length: int = field(init=False)
    """The part of the batch budget that the item takes up."""

    def __post_init__(self) -> None:
        self.key, self.length = self.prepared.key, self.prepared.length

    @property
    def tenant(self) -> str:
        """The tenant charged for the work, which is the first waiter's tenant."""
        return self.waiters[0][0].envelope.tenant

    @property
    def weight(self) -> float:
        return self.waiters[0][0].envelope.weight

    @property
    def deadline_s(self) -> float:
        """When the first waiter gives up if the item has not started by then, in Unix seconds."""
        if len(self.waiters) == 1:  # as is nearly always the case
            return self.waiters[0][0].start_by_s
        return min(pulled.start_by_s for pulled, _ in self.waiters)

    @property
    def is_unwanted(self) -> bool:
        """True if the callers of all its waiters are gone."""
        return all(pulled.is_unwanted for pulled, _ in self.waiters)

    @property
    def can_go_on(self) -> bool:
        """True if the item can be interrupted and resumed later."""
        return isinstance(self.prepared, PreparedPrompt | PreparedImage)

    @property
    def work(self) -> int | None:
        """The work in a custom model's item, for the receipt.

        None if the result already includes it.
        """
        return self.prepared.length if isinstance(self.prepared, PreparedCustom) else None

    def spent_work(self, steps_saved: int | None = None) -> int:
        """Returns the work done for an item that finishes without a result.

        For a streamed text, the prompt and the output so far count. For anything else, the queue's
        estimate counts, minus an image's skipped steps.

        Args:
            steps_saved: denoising steps that were skipped. None if the model has no steps.
        """
        prepared = self.prepared
        if isinstance(prepared, PreparedPrompt) and prepared.is_streamed:
            written = self.written[-1].end if self.written else 0
            return min(prepared.length, len(prepared.ids) // TOKEN_ID_BYTES + written)
        if isinstance(prepared, PreparedImage) and steps_saved:
            return max(0, prepared.length - steps_saved * prepared.width * prepared.height)
        return prepared.length

    @property
    def priority(self) -> Priority:
        """`batch` if all waiters are batch jobs."""
        if len(self.waiters) == 1:
            return self.waiters[0][0].envelope.priority
        are_batch = all(pulled.envelope.priority == "batch" for pulled, _ in self.waiters)
        return "batch" if are_batch else "interactive"

    @property
    def may_wait_for_hours(self) -> bool:
        """True if no worker has to be started for it: `batch` priority, and not a prediction."""
        return all(
            pulled.envelope.priority == "batch" and not pulled.envelope.has_record
            for pulled, _ in self.waiters
        )

    @property
    def is_suspect(self) -> bool:
        """True if a model process or worker died while holding this item.

        See `PulledJob.is_suspect`: suspects run alone.
        """
        if len(self.waiters) == 1:
            return self.deaths > 0 or self.waiters[0][0].is_suspect
        return self.deaths > 0 or any([pulled.is_suspect for pulled, _ in self.waiters])

    def open_waiters(self) -> list[tuple[PulledJob, Item]]:
        return [(pulled, item) for pulled, item in self.waiters if not pulled.is_over]

    def outcomes(self) -> list[tuple[PulledJob, ItemOutcome]]:
        """Returns one outcome per open waiter, once `computed` is set.

        The first waiter to get the result counts as a cache miss. The others count as coalesced.
        """
        has_miss, outcomes = False, list[tuple[PulledJob, ItemOutcome]]()
        for number, (pulled, item) in enumerate(self.open_waiters()):
            outcome = self._outcome(pulled, item, "joined" if has_miss else "miss")
            if outcome.result is None:  # only the first waiter causes any work
                saved = outcome.receipt.steps_saved
                outcome.receipt.spent_work = 0 if number else self.spent_work(saved)
            if not has_miss and outcome.result is not None:
                has_miss = True
                self._be_paid_by(pulled, item)
            outcomes.append((pulled, outcome))
        return outcomes

    def coalesced(self, pulled: PulledJob, item: Item) -> ItemOutcome:
        """Returns the outcome for a waiter that was coalesced after `computed` was set.

        This waiter pays if the first waiter turns out to have been canceled or to be late.
        """
        if self.payer is not None and not self.payer[0].is_undelivered(self.payer[1]):
            return self._outcome(pulled, item, "joined")
        outcome = self._outcome(pulled, item, "miss")
        if outcome.result is not None:
            self._be_paid_by(pulled, item)
        return outcome

    def _outcome(self, pulled: PulledJob, item: Item, cache: str) -> ItemOutcome:
        assert self.computed is not None, "read before the model ran; this is a bug"
        result, batch, call = self.computed.outcome, self.computed.batch, self.computed.call
        if pulled.runs is not None:
            pulled.runs.append(ItemRun(item.index, self.queued_at_s, self.deaths, self.computed))
        receipt = Receipt(
            pulled_at_s=pulled.pulled_at_s,
            cache=cache if pulled.reads_cache and item.cache_key else "none",
            started_at_s=batch.started_at_s,
            finished_at_s=batch.finished_at_s,
            batch_wait_ms=max(0.0, batch.started_at_s - self.queued_at_s) * 1000,
            inference_ms=batch.inference_ms if call is None else call.inference_ms,
            batch_size=batch.batch_items if call is None else call.items,
            work=self.work,
            cold_start=pulled.envelope.published_at_s < batch.loaded_at_s,
        )
        if pulled.is_unwanted:
            receipt.steps_saved = batch.steps_saved
            return pulled.unwanted(item.index, receipt, started=True)
        if isinstance(result, PenstockError):
            failed = failure(item.index, result, receipt)
            failed.logs = self.computed.logs
            return failed
        receipt.count(result)
        if receipt.tokens is not None and cache != "joined":
            receipt.padded_tokens = self.computed.computed_work
        return ItemOutcome(item.index, "succeeded", receipt, result, logs=self.computed.logs)

    def _be_paid_by(self, pulled: PulledJob, item: Item) -> None:
        """Charges a job for the result, and has it put the result into the cache."""
        self.payer = pulled, item.index
        if pulled.job.body.cache_write and item.cache_key:
            pulled.to_cache[item.cache_key] = item.index
            self.is_cached = True


class QueuedPart:
    """Items that wait in the queue together, because they have the same job and key.

    An item with several waiters has a part to itself.
    """

    __slots__ = ("items", "key", "length")

    def __init__(self, items: list[QueuedItem]) -> None:
        self.items = items
        self.key = items[0].key
        self.length = 0
        for queued in items:
            self.length += queued.length
            queued.part = self

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> list[int]:
        """Each item's part of the batch budget."""
        return [queued.length for queued in self.items]

    @property
    def tenant(self) -> str:
        return self.items[0].waiters[0][0].envelope.tenant

    @property
    def weight(self) -> float:
        return self.items[0].waiters[0][0].envelope.weight

    @property
    def deadline_s(self) -> float:
        return self.items[0].deadline_s

    def cut(self, start: int, stop: int) -> QueuedPart:
        """Removes some of the items, but not all, and returns them as another part."""
        some = QueuedPart(self.items[start:stop])
        del self.items[start:stop]
        self.length -= some.length
        return some

    def release(self) -> list[QueuedItem]:
        """Returns the items, which are no longer waiting."""
        for queued in self.items:
            queued.part = None
        return self.items
