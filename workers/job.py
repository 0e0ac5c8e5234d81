"""A job in a worker's hands: its items, what became of them so far, what waits for the model. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shared.catalogue import Model
from shared.errors import DeadlineExceeded, PenstockError
from shared.messages import Envelope, Item, ItemOutcome, Job, Receipt, Result, Row, failure, row_of
from shared.transport import Message, Subscription
from workers.model_pool import BatchDone
from workers.models.base import Prepared


@dataclass(slots=True, eq=False)
class JobInHand:
    """A pulled job and what became of its items so far."""

    job: Job
    message: Message
    subscription: Subscription
    pulled_at_s: float
    outcomes: dict[int, ItemOutcome] = field(default_factory=dict)
    to_cache: dict[str, int] = field(default_factory=dict)
    """Cache keys this job pays for, and the index of the item whose result goes there."""
    is_over: bool = False
    """Finishing, finished or handed back: entries of it that still wait are dropped."""

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

    def receipt(self, **facts: Any) -> Receipt:
        """A receipt of one item of this job."""
        return Receipt(pulled_at_s=self.pulled_at_s, **facts)

    def expired(self, item: Item) -> ItemOutcome:
        """The outcome of an item that nobody waits for any more."""
        return failure(item.index, DeadlineExceeded("the deadline passed before the model could start"), self.receipt())

    def hit(self, item: Item, result: Result, level: str) -> ItemOutcome:
        """The outcome of an item that the cache level `level` answers; it costs nothing."""
        receipt = self.receipt(cache=level, tokens=getattr(result, "tokens", None))
        return ItemOutcome(item.index, "succeeded", receipt, result)


@dataclass(slots=True, eq=False)
class Entry:
    """One prepared input that waits for the model, and the items (at least one) that its result answers."""

    prepared: Prepared
    cache_key: str | None
    queued_at_s: float
    askers: list[tuple[JobInHand, Item]]

    @property
    def key(self) -> str:
        """The compatibility key."""
        return self.prepared.key

    @property
    def length(self) -> int:
        """What padding counts."""
        return self.prepared.length

    def waiting(self) -> list[tuple[JobInHand, Item]]:
        """The askers whose job is still open."""
        return [(hand, item) for hand, item in self.askers if not hand.is_over]

    def outcomes(
        self, model: Model, result: Result | PenstockError, done: BatchDone, batch_size: int
    ) -> Iterator[tuple[JobInHand, ItemOutcome]]:
        """One outcome for each asker. What was computed once is paid (and cached) once, by the first of them."""
        for position, (hand, item) in enumerate(self.waiting()):
            is_payer = position == 0
            computed = "miss" if hand.reads_cache and item.cache_key else "none"
            receipt = hand.receipt(
                cache=computed if is_payer else "joined",
                started_at_s=done.started_at_s,
                finished_at_s=done.finished_at_s,
                batch_wait_ms=max(0.0, done.started_at_s - self.queued_at_s) * 1000,
                inference_ms=done.inference_ms,
                batch_size=batch_size,
            )
            if isinstance(result, PenstockError):
                yield hand, failure(item.index, result, receipt)
                continue
            receipt.tokens = getattr(result, "tokens", None)
            receipt.pixel_steps = getattr(result, "pixel_steps", None)
            if is_payer:
                receipt.cost_usd = model.cost_usd(receipt.tokens or 0, receipt.pixel_steps or 0)
                if hand.job.body.cache_write and item.cache_key:
                    hand.to_cache[item.cache_key] = item.index
            yield hand, ItemOutcome(item.index, "succeeded", receipt, result)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What every reply and row of this worker says of it."""

    worker: str
    region: str
    device: str


def row_for(model: Model, facts: WorkerFacts, envelope: Envelope, outcome: ItemOutcome, replied_at_s: float) -> Row:
    """The row that a worker leaves for an item."""
    return row_of(
        envelope,
        outcome,
        replied_at_s=replied_at_s,
        revision=model.revision,
        task=model.task,
        region=facts.region,
        worker=facts.worker,
        device=facts.device,
        device_share=1 / model.gpu.share,
    )
