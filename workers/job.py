"""A pulled job: its items, their outcomes so far, and its items that wait for the model.

Plain data, no I/O. At its end a job's spans are made from times it has: `queue`, `batch` and
`infer`. The message names their parent, the span that published the job. A batch has items of many
jobs, so each job has an `infer` span of its own with the times of its batch, and links to the other
jobs in it (docs/decisions/0037-traces.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.broker.transport import (
    ReceivedMessage,
    Subscription,
    batch_subscription_id,
    jobs_topic_id,
    workers_subscription_id,
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
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.text import GenerationInput
from shared.money.charge import device_share_of
from shared.stores.cache import Hit, Owed
from shared.stores.stream_chunks import Chunk
from shared.tenants.plan import Priority
from shared.tracing.spans import STAGE, Attributes, SpanBlock, TraceContext, record, span
from shared.usage.row import Row, row_of
from workers.models.base import Prepared, PreparedCustom, PreparedImage, PreparedPrompt
from workers.models.reports import BatchResult, Call

FRESH_S = 0.05
TOKEN_ID_BYTES = 4
TOLERATED_CRASHES, GENERATION_TOLERATED_CRASHES = 1, 4
"""So many workers may die with a job, or with one for a generation, before it is computed
by itself.
"""
NOT_STARTED, NOT_DONE = "the model could start", "the model was done"
NOT_SENT = "the answer was on its way"
"""The event that did not happen before an item's time ran out."""


class JobTimer(Protocol):
    """Fires at a limit of a job."""

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
    """Unpaid results that this job pays for, by cache key, each with the index of its item."""
    undelivered: frozenset[int] = frozenset()
    """Indexes of items whose results were not part of the answer, once it is known."""
    written: dict[int, list[Chunk]] = field(default_factory=dict)
    """What was written of items of custom classes that ended, by their indexes."""
    is_over: bool = False
    """The job is being finished, is finished, or was handed back. Its queued items are dropped."""
    is_canceled: bool = False
    """The caller is gone. Running batches of this job stop after their current step."""
    is_late: bool = False
    """The deadline passed, which ends the job in the same way."""
    timer: JobTimer | None = None
    """Set until the job is over."""
    over_since_s: float = 0.0
    """Monotonic seconds, from the outcome of its last item on."""
    unfinished_claims: int = 0
    """The number of workers that died while they held this job, since it went on."""
    is_claimed: bool = False
    """True if this worker's claim is in its record."""
    is_alone: bool = False
    """True if the record says that the worker computes nothing else."""
    is_released: bool = False
    """True if the claim was released because the worker was told to go."""
    dead_letter_reason: str = ""
    """Why the job is given up. A copy of its message goes to the dead letters."""
    trace: TraceContext | None = None
    """The span that published it."""
    runs: list[ItemRun] | None = None
    """The batches of its items so far. None if its spans are not kept."""

    @property
    def record(self) -> str:
        return record_id(self.envelope.request_id, self.envelope.part)

    @property
    def run(self) -> str:
        """The id of the record that a caller cancels: of a step of a flow, that of the run."""
        return self.envelope.request_id if self.envelope.flow else self.record

    @property
    def shown_in(self) -> str:
        """The id of the record that shows how far its images are. Empty: none does.

        A request for images with steps after each image shows those that are being drawn.
        """
        if self.envelope.has_record:
            return self.record
        return self.run if self.envelope.flow == self.envelope.model else ""

    @property
    def tolerated_crashes(self) -> int:
        """Worker crashes tolerated before the job is treated as a poison pill.

        Of one node that is lost, all jobs come again, up to a second of work and more. One by one
        they would take a batch's time each.

        A generation takes long, goes on from its tokens, and somebody waits for it, while
        generations that run one by one take many times as long. And what it can kill is a model
        process, which is counted by itself.
        """
        is_text = isinstance(self.items[0].input, GenerationInput)
        return GENERATION_TOLERATED_CRASHES if is_text else TOLERATED_CRASHES

    @property
    def start_by_s(self) -> float:
        """Unix time after which the job is not started: the queue limit or the deadline."""
        envelope = self.envelope
        return (
            min(envelope.deadline_s, envelope.start_by_s)
            if envelope.start_by_s
            else envelope.deadline_s
        )

    @property
    def envelope(self) -> Envelope:
        """The caller, and the address of the reply."""
        return self.job.envelope

    @property
    def items(self) -> list[Item]:
        """The items of the job, in its order."""
        return self.job.body.items

    @property
    def reads_cache(self) -> bool:
        """True if the job accepts cached results and results computed for others."""
        return self.job.body.cache_read

    @property
    def is_fresh(self) -> bool:
        """True if the API looked in the cache a moment ago, so another look is useless.

        The way here takes a round trip to the broker: half from the API, and half to the worker.
        """
        age_s = self.pulled_at_s - self.envelope.published_at_s
        return self.envelope.attempt == 1 and age_s < FRESH_S + self.subscription.round_trip.most_s

    @property
    def is_unwanted(self) -> bool:
        """True if the caller no longer waits for it."""
        return self.is_over or self.is_canceled or self.is_late

    def is_undelivered(self, index: int) -> bool:
        """Returns whether it is known that the caller does not get the result of an item."""
        return self.is_canceled or self.is_late or index in self.undelivered

    def end(self) -> None:
        """Marks the job as over, and stops its timer."""
        self.is_over = True
        self.over_since_s = time.monotonic()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def receipt(self, **fields: Any) -> Receipt:
        """A receipt for one item of this job."""
        return Receipt(pulled_at_s=self.pulled_at_s, **fields)

    def expired(
        self, index: int, receipt: Receipt | None = None, before: str = NOT_STARTED
    ) -> ItemOutcome:
        """The outcome of an item whose time ran out `before` something happened."""
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
        """The outcome of an item of a canceled job."""
        return failure(index, Canceled(), receipt or self.receipt())

    def unwanted(self, index: int, receipt: Receipt | None = None, *, started: bool) -> ItemOutcome:
        """The outcome of an item of a job that is canceled or late."""
        if self.is_canceled:
            return self.canceled(index, receipt)
        return self.expired(index, receipt, NOT_DONE if started else NOT_STARTED)

    def hit(self, item: Item, hit: Hit) -> ItemOutcome:
        """The outcome of an item whose result is in the cache."""
        if hit.owed is not None and item.cache_key:
            self.to_pay[item.cache_key] = (item.index, hit.owed)
        receipt = hit.receipt(pulled_at_s=self.pulled_at_s)
        return ItemOutcome(item.index, "succeeded", receipt, hit.result)

    def without_model(self, item: Item, result: Result) -> ItemOutcome:
        """The outcome of an item that no model has to compute."""
        receipt = self.receipt()
        receipt.count(result)
        return ItemOutcome(item.index, "succeeded", receipt, result)


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of the model for an item, and the batch that the item was in."""

    outcome: Result | PenstockError
    batch: BatchResult
    traces: Sequence[TraceContext] = ()
    """The traces of the jobs in the batch whose spans are kept."""
    computed_work: int | None = None
    """Its work with its part of the padding. None: nothing was padded."""
    logs: PrintedLogs | None = None
    """What the model printed while it computed it alone."""
    call: Call | None = None
    """The call that computed it. None: all calls of its batch did."""


@dataclass(frozen=True, slots=True)
class ItemRun:
    """An item in a batch, for its spans."""

    index: int
    queued_at_s: float
    deaths: int
    computed: Computed


@dataclass(slots=True, eq=False)
class QueuedItem:
    """A prepared input that waits for the model, and the items that share its result."""

    prepared: Prepared
    cache_key: str | None
    queued_at_s: float
    waiters: list[tuple[PulledJob, Item]]
    computed: Computed | None = None
    """Set once the model ran."""
    is_cached: bool = False
    """True if the result goes to the cache."""
    payer: tuple[PulledJob, int] | None = None
    """The job that is charged for the result, and the index of its item."""
    deaths: int = 0
    """Model processes that died while they computed it."""
    deaths_alone: int = 0
    """The number of them that computed nothing else."""
    written: list[Chunk] = field(default_factory=list)
    """The output of a generation so far, if somebody reads along, or if it was preempted."""
    has_started: bool = False
    """True if a model process had it, so that a limit of its time in the queue is over."""

    @property
    def tenant(self) -> str:
        """The tenant charged for its work: that of the first waiter."""
        return self.waiters[0][0].envelope.tenant

    @property
    def weight(self) -> float:
        return self.waiters[0][0].envelope.weight

    @property
    def deadline_s(self) -> float:
        """When the first of its waiters gives up unless it has started, in unix seconds."""
        if len(self.waiters) == 1:  # as nearly always
            return self.waiters[0][0].start_by_s
        return min(pulled.start_by_s for pulled, _ in self.waiters)

    @property
    def can_go_on(self) -> bool:
        """True if it can be interrupted, and go on later from where it was."""
        return isinstance(self.prepared, PreparedPrompt)

    @property
    def key(self) -> str:
        """The compatibility key. Only items with equal keys share a batch."""
        return self.prepared.key

    @property
    def length(self) -> int:
        """The part of the batch budget that it takes."""
        return self.prepared.length

    @property
    def work(self) -> int | None:
        """What it weighs, of a custom model, for its receipt. None: its result says it."""
        return self.prepared.length if isinstance(self.prepared, PreparedCustom) else None

    def spent_work(self, steps_saved: int | None = None) -> int:
        """Returns the work done for it if it ends without a result.

        A text that is streamed counts its prompt and what was written. Anything else counts as the
        queue weighed it, less the steps of an image that were not computed.

        Args:
            steps_saved: denoising steps that were left out. None: the model has no steps.
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
        are_batch = all(pulled.envelope.priority == "batch" for pulled, _ in self.waiters)
        return "batch" if are_batch else "interactive"

    @property
    def may_wait_for_hours(self) -> bool:
        """True if it needs no worker of its own: `batch` priority, without its predictions."""
        return all(
            pulled.envelope.priority == "batch" and not pulled.envelope.has_record
            for pulled, _ in self.waiters
        )

    @property
    def is_suspect(self) -> bool:
        """True if a model process or a worker died while it held this item.

        See `PulledJob.tolerated_crashes`: suspects run alone.
        """
        return self.deaths > 0 or any(
            pulled.unfinished_claims > pulled.tolerated_crashes for pulled, _ in self.waiters
        )

    def open_waiters(self) -> list[tuple[PulledJob, Item]]:
        """The waiters whose jobs are not over."""
        return [(pulled, item) for pulled, item in self.waiters if not pulled.is_over]

    def outcomes(self) -> Iterator[tuple[PulledJob, ItemOutcome]]:
        """One outcome per open waiter, once `computed` is set.

        The first waiter that gets the result has a cache miss. The others were coalesced with it.
        """
        has_miss = False
        for number, (pulled, item) in enumerate(self.open_waiters()):
            outcome = self._outcome(pulled, item, "joined" if has_miss else "miss")
            if outcome.result is None:  # waiters beyond the first have caused no work
                saved = outcome.receipt.steps_saved
                outcome.receipt.spent_work = 0 if number else self.spent_work(saved)
            if not has_miss and outcome.result is not None:
                has_miss = True
                self._be_paid_by(pulled, item)
            yield pulled, outcome

    def coalesced(self, pulled: PulledJob, item: Item) -> ItemOutcome:
        """The outcome of a waiter that was coalesced after `computed` was set.

        It pays if the first one turned out to be canceled or late.
        """
        if self.payer is not None and not self.payer[0].is_undelivered(self.payer[1]):
            return self._outcome(pulled, item, "joined")
        outcome = self._outcome(pulled, item, "miss")
        if outcome.result is not None:
            self._be_paid_by(pulled, item)
        return outcome

    def _outcome(self, pulled: PulledJob, item: Item, cache: str) -> ItemOutcome:
        assert self.computed is not None, "asked for before the model had run; this is a bug"
        result, batch, call = self.computed.outcome, self.computed.batch, self.computed.call
        if pulled.runs is not None:
            pulled.runs.append(ItemRun(item.index, self.queued_at_s, self.deaths, self.computed))
        receipt = pulled.receipt(
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
        """Charges a job, which also puts the result into the cache."""
        self.payer = pulled, item.index
        if pulled.job.body.cache_write and item.cache_key:
            pulled.to_cache[item.cache_key] = item.index
            self.is_cached = True


def kept_traces(batch: Iterable[QueuedItem]) -> list[TraceContext]:
    """The traces of the jobs in a batch whose spans are kept, each once."""
    status = (
        pulled.trace for queued in batch for pulled, _ in queued.waiters if pulled.runs is not None
    )
    return list(dict.fromkeys(trace for trace in status if trace is not None))


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The description of this worker in replies and rows."""

    worker: str
    region: str
    device: str
    gpu_type: str | None = None
    """The name in infra/kubernetes/gpus.yaml. None: no GPU."""
    spot: bool | None = None
    """True if its node is a spot node. None: not known."""


def row_for(
    model: Model, info: WorkerInfo, envelope: Envelope, outcome: ItemOutcome, replied_at_s: float
) -> Row:
    """The row that this worker writes for an item."""
    return row_of(
        envelope,
        outcome,
        model,
        replied_at_s=replied_at_s,
        region=info.region,
        worker=info.worker,
        device=info.device,
        device_share=device_share_of(model),
        gpu_type=info.gpu_type,
        spot=info.spot,
    )


def record_spans(pulled: PulledJob, model: Model, device: str) -> None:
    """Makes the spans of a job whose items all have outcomes, if its trace is kept."""
    if pulled.runs is None:
        return
    _record_queue(pulled, model.name)
    batches = dict[int, list[ItemRun]]()
    for run in pulled.runs:
        batches.setdefault(id(run.computed.batch), []).append(run)
    for runs in batches.values():
        _record_batch(pulled, runs[0].queued_at_s, runs[0].computed.batch.started_at_s, len(runs))
        _record_infer(pulled, model, runs, device)
    ran = {run.index for run in pulled.runs}
    given_up = [
        outcome
        for outcome in pulled.outcomes.values()
        if outcome.error is not None and outcome.index not in ran
    ]
    if given_up:
        _record_batch(pulled, pulled.pulled_at_s, time.time(), len(given_up), _error_of(given_up))


def reply_span(topic_id: str) -> SpanBlock:
    """The span of publishing a reply, below the current one."""
    facts: Attributes = {
        STAGE: "reply",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic_id,
    }
    return span(f"publish {topic_id}", "producer", facts)


def _record_queue(pulled: PulledJob, model: str) -> None:
    envelope, topic_id = pulled.envelope, jobs_topic_id(model)
    subscription_of = (
        batch_subscription_id if envelope.priority == "batch" else workers_subscription_id
    )
    facts: Attributes = {
        STAGE: "queue",
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.destination.name": topic_id,
        "messaging.destination.subscription.name": subscription_of(model),
        "messaging.message.id": pulled.message.message_id,
        "penstock.attempt": envelope.attempt,
        "penstock.request_id": envelope.request_id,
        "penstock.tenant": envelope.tenant,
    }
    times_s = envelope.published_at_s, pulled.pulled_at_s
    record(f"receive {topic_id}", "consumer", times_s, facts, parent=pulled.trace)


def _record_batch(
    pulled: PulledJob, queued_at_s: float, started_at_s: float, items: int, error: str = ""
) -> None:
    """The wait for a batch.

    An item that was coalesced with another waits from when its own job came.
    """
    facts: Attributes = {STAGE: "batch", "penstock.items": items}
    times_s = max(pulled.pulled_at_s, queued_at_s), max(pulled.pulled_at_s, started_at_s)
    record("batch", "internal", times_s, facts, parent=pulled.trace, error=error)


def _record_infer(pulled: PulledJob, model: Model, runs: Sequence[ItemRun], device: str) -> None:
    batch = runs[0].computed.batch
    if batch.finished_at_s < pulled.pulled_at_s:
        return  # coalesced with a result that was there
    operation = model.definition.gen_ai_operation or model.task
    outcomes = [pulled.outcomes[run.index] for run in runs]
    facts: Attributes = {
        STAGE: "infer",
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model.name,
        "gen_ai.usage.input_tokens": sum(one.receipt.tokens or 0 for one in outcomes),
        "penstock.items": len(runs),
        "penstock.batch.items": len(batch.results),
        "penstock.cache": outcomes[0].receipt.cache,
        "penstock.device": device,
        "penstock.deaths": runs[0].deaths,
    }
    record(
        f"{operation} {model.name}",
        "internal",
        (max(pulled.pulled_at_s, batch.started_at_s), batch.finished_at_s),
        facts,
        parent=pulled.trace,
        links=[trace for trace in runs[0].computed.traces if trace != pulled.trace],
        error=_error_of(outcomes),
    )


def _error_of(outcomes: Sequence[ItemOutcome]) -> str:
    """The code of the first error, or empty."""
    return next((outcome.error.code for outcome in outcomes if outcome.error is not None), "")
