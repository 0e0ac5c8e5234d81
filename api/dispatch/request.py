"""A request to compute inputs, its options, and its response. Predictions are such requests too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from types import TracebackType
from typing import Self

import msgspec

from api.errors import ERROR_MAPPINGS
from api.fair_room import Demand
from shared.catalog import Model
from shared.catalog_entry import Deadline
from shared.errors import DeadlineExceeded, Overloaded, PenstockError, error_for_code
from shared.messages import Item, ItemOutcome, RequestFacts, reason_of
from shared.predictions import Prediction
from shared.slo import is_promised
from shared.stores.cache import cache_key
from shared.tasks import Input
from shared.usage.charge import ItemPrice, as_delivered, cost_usd, device_s, price_of

COST_HEADER, DEVICE_HEADER = "x-penstock-cost-usd", "x-penstock-device-ms"
REVISION_HEADER = "x-penstock-revision"
"""The revision that computed the results. Several, if a canary answered only for a part of them."""


OUTCOME_BYTES = 512
"""The size of an outcome in a reply without its result: index, status and receipt."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request, parsed from its headers once. None or empty: not set.

    Times count from the arrival of the request.
    """

    deadline_s: float | None = None
    """Seconds until the answer is due."""
    queue_limit_s: float | None = None
    """Seconds after which the model no longer starts."""
    cancel_after_s: float | None = None
    """Seconds after which a prediction is stopped."""
    wait_s: float = 0.0
    """Seconds for which the answer may wait for the end of a prediction."""
    cache_read: bool = True
    cache_write: bool = True
    idempotency_key: str = ""

    def limit_s(self, bound: Deadline) -> float:
        """Seconds until the answer is due, within the bounds of a model."""
        return bound.default_s if self.deadline_s is None else min(self.deadline_s, bound.longest_s)

    def done_within_s(self, bound: Deadline) -> float:
        """Returns the seconds after which a prediction is stopped: the shorter of two limits."""
        given_s = [
            limit_s for limit_s in (self.deadline_s, self.cancel_after_s) if limit_s is not None
        ]
        return min([bound.longest_s, *given_s])


@dataclass(frozen=True, slots=True)
class NewRecord:
    """The record that a request is given before its job is published: that of a prediction.

    It outlives the connection of the caller and the instance.
    """

    prediction: Prediction
    """Its document."""
    keep_s: int | None
    """How long it is stored after its end, by the tenant's plan. None: the default."""
    is_keyed: bool
    """True if the caller can repeat the request and get the same prediction."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One validated request: these inputs, by this model, for this caller.

    A request with a record is a prediction. Its one job has all items, and its end is in the
    record. Any other request is answered to the caller who waits, or not at all.
    """

    facts: RequestFacts
    model: Model
    """The revision that computes it."""
    inputs: Sequence[Input]
    deadline_s: float
    """Unix time, within the longest deadline of the model."""
    options: RequestOptions
    is_repeatable: bool = True
    """True if equal inputs give equal results. If not, no item is cached or joined."""
    record: NewRecord | None = None
    is_run_again: Callable[[], bool] = lambda: False
    """Returns whether the same request is sent again, under the same id, if this is canceled."""

    @property
    def new_record(self) -> NewRecord:
        """The record of a request that has one."""
        assert self.record is not None, "only for requests with a record; this is a bug"
        return self.record

    def as_first_asked(self, found: Prediction) -> InferenceRequest:
        """Returns the request that created the prediction `found`, which this one repeats."""
        price_share = 1.0 if found.price is None else found.price.price_share
        facts = msgspec.structs.replace(
            self.facts,
            tenant=found.tenant,
            received_at_s=found.created_at_s,
            client_request_id=found.client_request_id,
            key_id=found.key_id,
            price_share=price_share,
        )
        options, limit_s = self.options, self.options.queue_limit_s
        if limit_s is not None:  # it counts from this request, and not from the first
            later_s = self.facts.received_at_s - found.created_at_s
            options = replace(options, queue_limit_s=limit_s + later_s)
        return replace(
            self,
            facts=facts,
            deadline_s=found.deadline_s,
            options=options,
            record=replace(self.new_record, prediction=found),
        )

    def items(self) -> list[Item]:
        """Returns its items. Those that the cache may keep have a key.

        Raises:
            BadInput: an input has no canonical form.
        """
        is_kept = self.is_repeatable and self.options.cache_write and self.model.cache.ttl_s > 0
        return [
            Item(index, one, cache_key(self.model, one, self.facts.tenant) if is_kept else None)
            for index, one in enumerate(self.inputs)
        ]

    def demand(self, items: int) -> Demand:
        """Returns the demand of `items` of its items on the workers."""
        return Demand(
            self.model.name,
            items,
            self.facts.tenant,
            self.facts.weight,
            self.facts.lane,
            # A full canary refuses no caller: the other revision takes the items.
            self.is_promised and not self.model.is_canary,
        )

    @property
    def is_promised(self) -> bool:
        """Returns whether the SLO applies: not in the `batch` lane, nor with less time."""
        options = self.options
        limits_s = (options.deadline_s, options.queue_limit_s, options.cancel_after_s)
        return is_promised(self.model.deadline, self.facts.lane, limits_s)

    @property
    def start_by_s(self) -> float:
        """Unix time after which the model no longer starts. 0: only the deadline counts."""
        limit_s = self.options.queue_limit_s
        return 0.0 if limit_s is None else self.facts.received_at_s + limit_s

    @property
    def price(self) -> ItemPrice:
        """The terms on which its items are charged."""
        return price_of(self.model, self.facts.received_at_s, self.facts.price_share)

    @property
    def reply_bytes(self) -> int:
        """The largest size of its reply."""
        return len(self.inputs) * (self.model.definition.result_bytes(self.model) + OUTCOME_BYTES)

    def too_late(self) -> DeadlineExceeded:
        """Returns the error of a request without an answer at its deadline."""
        received_at_s = self.facts.received_at_s
        waited_s, limit_s = time.time() - received_at_s, round(self.deadline_s - received_at_s, 3)
        return DeadlineExceeded(
            f"no answer came within the deadline of {limit_s:.10g} s; waited {waited_s:.2f} s"
        )


@dataclass(slots=True)
class InferenceResponse:
    """One outcome per input, in order. `queue_ms` is the longest wait of an item at the broker.

    A context manager: its block makes the answer. If the block raises, the caller got nothing, so
    nothing is charged. Rows are written at its end.
    """

    outcomes: Sequence[ItemOutcome]
    queue_ms: float
    price: ItemPrice
    """The terms on which its items are charged."""
    revision: str
    """The revision of the model that computed it."""
    error: PenstockError | None = None
    """Why the request ended before its items did."""
    on_end: Callable[[InferenceResponse], None] = lambda _: None
    """Called at the end of the block."""
    is_delivered: bool = True
    """True if the results were delivered to the caller, as far as is known."""
    is_broken_off: bool = False
    """True if the block was canceled, so the work may be repeated."""

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
        """The charge of the request: the sum of its rows."""
        delivered = as_delivered(self.outcomes, is_delivered=self.is_delivered)
        return sum(cost_usd(self.price, outcome) for outcome in delivered)

    def headers(self) -> dict[str, str]:
        """Returns the response headers of every inference answer.

        Times are those of the slowest item, since items run in parallel. The cache is `hit`, `miss`
        or `joined` if all items agree, and `partial` otherwise. Device time and cost are sums.
        """
        receipts = [outcome.receipt for outcome in self.outcomes]
        sources = {_SOURCES.get(receipt.cache, "miss") for receipt in receipts}
        batch_ms = max((receipt.batch_wait_ms or 0.0 for receipt in receipts), default=0.0)
        inference_ms = max((receipt.inference_ms or 0.0 for receipt in receipts), default=0.0)
        device_ms = sum(device_s(self.price, receipt) for receipt in receipts) * 1000
        return {
            "x-penstock-cache": sources.pop() if len(sources) == 1 else "partial",
            "x-penstock-queue-ms": f"{self.queue_ms:.2f}",
            "x-penstock-batch-ms": f"{batch_ms:.2f}",
            "x-penstock-inference-ms": f"{inference_ms:.2f}",
            DEVICE_HEADER: f"{device_ms:.3f}",
            REVISION_HEADER: ", ".join(
                sorted({receipt.revision or self.revision for receipt in receipts})
            ),
            COST_HEADER: shown_usd(self.cost_usd),
        }

    def raise_failed(self) -> None:
        """Raises the error of the first item without a result. There are no partial answers.

        Raises:
            PenstockError: the error of the item, with its code, or that of the request.
        """
        if self.error is not None:
            raise self.error
        for outcome in self.outcomes:
            if outcome.result is None:
                raise _error_of(outcome, several=len(self.outcomes) > 1)


def shown_usd(usd: float) -> str:
    """Returns an amount for a header: the same double as in the rows, without an exponent."""
    return f"{Decimal(repr(usd)).normalize():f}" if usd else "0"


_SOURCES = {"memory": "hit", "redis": "hit", "joined": "joined"}


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
