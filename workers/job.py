"""A pulled job: its items, their outcomes so far, and its items that wait for the model. Plain data, no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shared.catalog import Model
from shared.errors import Canceled, DeadlineExceeded, PenstockError
from shared.messages import Envelope, Item, ItemOutcome, Job, Receipt, failure
from shared.stores.records import record_id
from shared.tasks import Result
from shared.transport import Message, Subscription
from shared.usage.row import Row, row_of
from workers.models.base import Prepared
from workers.runtime.pool import BatchDone

FRESH_S = 0.05
NOT_STARTED, NOT_DONE = "the model could start", "the model was done"
NOT_SENT = "the answer was on its way"
"""What an item's time ran out before."""


@dataclass(slots=True, eq=False)
class PulledJob:
    """A pulled job and what became of its items so far."""

    job: Job
    message: Message
    subscription: Subscription
    pulled_at_s: float
    outcomes: dict[int, ItemOutcome] = field(default_factory=dict)
    to_cache: dict[str, int] = field(default_factory=dict)
    """Cache keys that this job fills, and the index of the item whose result goes there."""
    is_over: bool = False
    """Finishing, finished or handed back: entries of it that still wait are dropped."""
    is_canceled: bool = False
    """Nobody wants it any more; what runs of it ends with the step it is at."""
    is_late: bool = False
    """Its deadline passed, which ends it in the same way."""
    timer: asyncio.TimerHandle | None = None
    """Runs while it is not over."""
    unfinished: int = 0
    """Earlier claims that came to no end: it was in the hands of so many workers that died."""
    dead_reason: str = ""
    """Why it is given up for good; a copy of its message goes to the dead letters."""

    @property
    def record(self) -> str:
        """The id of its record."""
        return record_id(self.envelope.request_id, self.envelope.part)

    @property
    def start_by_s(self) -> float:
        """Unix time after which it is not begun any more."""
        envelope = self.envelope
        return min(envelope.deadline_s, envelope.start_by_s) if envelope.start_by_s else envelope.deadline_s

    @property
    def envelope(self) -> Envelope:
        """Who asks, and where the reply goes."""
        return self.job.envelope

    @property
    def items(self) -> list[Item]:
        """The items of the job, in its order."""
        return self.job.body.items

    @property
    def reads_cache(self) -> bool:
        """Whether results computed earlier, or for others right now, may answer."""
        return self.job.body.cache_read

    @property
    def is_fresh(self) -> bool:
        """Whether so little time passed since the API looked in the cache that another look would find the same."""
        return self.envelope.attempt == 1 and self.pulled_at_s - self.envelope.published_at_s < FRESH_S

    def receipt(self, **facts: Any) -> Receipt:
        """A receipt of one item of this job."""
        return Receipt(pulled_at_s=self.pulled_at_s, **facts)

    @property
    def is_unwanted(self) -> bool:
        """Whether nobody wants anything of it any more."""
        return self.is_over or self.is_canceled or self.is_late

    def end(self) -> None:
        """From now on it is over."""
        self.is_over = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def expired(self, index: int, receipt: Receipt | None = None, before: str = NOT_STARTED) -> ItemOutcome:
        """The outcome of an item whose time ran out `before` something."""
        is_queue_limit = before == NOT_STARTED and not self.is_late and self.start_by_s < self.envelope.deadline_s
        which, at_s = ("queue limit", self.start_by_s) if is_queue_limit else ("deadline", self.envelope.deadline_s)
        limit_s = round(at_s - self.envelope.received_at_s, 3)
        error = DeadlineExceeded(f"the {which} of {limit_s:.10g} s passed before {before}")
        return failure(index, error, receipt or self.receipt())

    def canceled(self, index: int, receipt: Receipt | None = None) -> ItemOutcome:
        """The outcome of an item that nobody wants any more."""
        return failure(index, Canceled(), receipt or self.receipt())

    def unwanted(self, index: int, receipt: Receipt | None = None, *, begun: bool) -> ItemOutcome:
        """The outcome of an item of a job that is canceled or late."""
        if self.is_canceled:
            return self.canceled(index, receipt)
        return self.expired(index, receipt, NOT_DONE if begun else NOT_STARTED)

    def hit(self, item: Item, result: Result, level: str) -> ItemOutcome:
        """The outcome of an item that the cache level `level` answers."""
        tokens, pixel_steps = getattr(result, "tokens", None), getattr(result, "pixel_steps", None)
        receipt = self.receipt(cache=level, tokens=tokens, pixel_steps=pixel_steps)
        return ItemOutcome(item.index, "succeeded", receipt, result)


@dataclass(slots=True, eq=False)
class QueuedItem:
    """One prepared input that waits for the model, and the items (at least one) that its result answers."""

    prepared: Prepared
    cache_key: str | None
    queued_at_s: float
    waiters: list[tuple[PulledJob, Item]]
    computed: tuple[Result | PenstockError, BatchDone, int] | None = None
    """What the model gave, in which batch, of how many items."""
    is_cached: bool = False
    """The result is on its way to the cache."""
    deaths: int = 0
    """Model processes that died over it."""
    deaths_alone: int = 0
    """Those of them that had nothing else in hand."""

    @property
    def key(self) -> str:
        """The compatibility key."""
        return self.prepared.key

    @property
    def length(self) -> int:
        """What padding counts."""
        return self.prepared.length

    @property
    def lane(self) -> str:
        """`batch` where every waiter may wait behind interactive requests."""
        return "batch" if all(pulled.envelope.lane == "batch" for pulled, _ in self.waiters) else ""

    @property
    def is_suspect(self) -> bool:
        """Whether it was in the hands of somebody who died."""
        return self.deaths > 0 or any(pulled.unfinished for pulled, _ in self.waiters)

    def open_waiters(self) -> list[tuple[PulledJob, Item]]:
        """The waiters whose job is still open."""
        return [(pulled, item) for pulled, item in self.waiters if not pulled.is_over]

    def outcomes(self) -> Iterator[tuple[PulledJob, ItemOutcome]]:
        """One outcome for each waiter, once `computed` is set.

        What was computed once is a miss once: of the first who still wants it.
        """
        is_given = False
        for pulled, item in self.open_waiters():
            outcome = self._outcome(pulled, item, "joined" if is_given else "miss")
            if not is_given and outcome.result is not None:
                is_given = True
                self._keep(pulled, item)
            yield pulled, outcome

    def joined(self, pulled: PulledJob, item: Item) -> ItemOutcome:
        """The outcome of an waiter for whom another had it computed."""
        return self._outcome(pulled, item, "joined")

    def _outcome(self, pulled: PulledJob, item: Item, cache: str) -> ItemOutcome:
        assert self.computed is not None, "asked for before the model had run; this is a bug"
        result, done, batch_size = self.computed
        receipt = pulled.receipt(
            cache=cache if pulled.reads_cache and item.cache_key else "none",
            started_at_s=done.started_at_s,
            finished_at_s=done.finished_at_s,
            batch_wait_ms=max(0.0, done.started_at_s - self.queued_at_s) * 1000,
            inference_ms=done.inference_ms,
            batch_size=batch_size,
        )
        if pulled.is_unwanted:
            receipt.steps_saved = done.steps_saved
            return pulled.unwanted(item.index, receipt, begun=True)
        if isinstance(result, PenstockError):
            return failure(item.index, result, receipt)
        receipt.tokens = getattr(result, "tokens", None)
        receipt.pixel_steps = getattr(result, "pixel_steps", None)
        return ItemOutcome(item.index, "succeeded", receipt, result)

    def _keep(self, pulled: PulledJob, item: Item) -> None:
        if pulled.job.body.cache_write and item.cache_key:
            pulled.to_cache[item.cache_key] = item.index
            self.is_cached = True


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What every reply and row of this worker says of it."""

    worker: str
    region: str
    device: str


def row_for(model: Model, facts: WorkerInfo, envelope: Envelope, outcome: ItemOutcome, replied_at_s: float) -> Row:
    """The row that a worker leaves for an item."""
    return row_of(
        envelope,
        outcome,
        model,
        replied_at_s=replied_at_s,
        region=facts.region,
        worker=facts.worker,
        device=facts.device,
        device_share=1 / model.gpu.share,
    )
