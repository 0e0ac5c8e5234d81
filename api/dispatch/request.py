"""The input and output of the dispatcher: InferenceRequest, RequestOptions, InferenceResponse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Self

from api.errors import ERROR_MAPPINGS
from api.fair_room import Demand
from shared.catalog import Model
from shared.catalog_entry import Deadline
from shared.errors import DeadlineExceeded, Overloaded, PenstockError, error_for_code
from shared.messages import ItemOutcome, reason_of
from shared.slo import is_promised
from shared.tasks import Input
from shared.usage.charge import ItemPrice, as_delivered, cost_usd, device_s

COST_HEADER, DEVICE_HEADER = "x-penstock-cost-usd", "x-penstock-device-ms"
REVISION_HEADER = "x-penstock-revision"
"""The revision that computed the results. Several, if a canary answered only for a part of them."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request, parsed from its headers once. None or empty: not set."""

    received_at_s: float = 0.0
    """Unix time of arrival. Time limits count from here."""
    deadline_s: float | None = None
    """Seconds until the answer is due."""
    queue_limit_s: float | None = None
    """Seconds after which the model no longer starts."""
    cancel_after_s: float | None = None
    """Seconds after which a prediction is stopped."""
    wait_s: float = 0.0
    """Seconds for which the answer may wait for the end of a prediction."""
    lane: str = ""
    """`batch` for requests that may wait behind interactive ones, else empty."""
    cache_read: bool = True
    cache_write: bool = True
    idempotency_key: str = ""
    user_agent_family: str = ""
    """The kind of client, for rows."""

    def limit_s(self, bound: Deadline) -> float:
        """Seconds until the answer is due, within the bounds of a model."""
        return bound.default_s if self.deadline_s is None else min(self.deadline_s, bound.longest_s)

    def answer_by_s(self, bound: Deadline) -> float:
        """Returns the Unix time at which the answer is due."""
        return self.received_at_s + self.limit_s(bound)

    def done_by_s(self, bound: Deadline) -> float:
        """Returns the Unix time at which a prediction is stopped: the shorter of two limits."""
        given_s = [
            limit_s for limit_s in (self.deadline_s, self.cancel_after_s) if limit_s is not None
        ]
        return self.received_at_s + min([bound.longest_s, *given_s])

    def is_promised(self, bound: Deadline) -> bool:
        """Returns whether the SLO applies: not in the `batch` lane, nor with less time."""
        limits_s = (self.deadline_s, self.queue_limit_s, self.cancel_after_s)
        return is_promised(bound, self.lane, limits_s)

    @property
    def start_by_s(self) -> float:
        """Unix time after which the model no longer starts. 0: only the deadline counts."""
        return 0.0 if self.queue_limit_s is None else self.received_at_s + self.queue_limit_s


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One validated HTTP request, as the pipeline needs it."""

    request_id: str
    model: Model
    tenant: str
    inputs: Sequence[Input]
    deadline_s: float
    """Unix time, within the longest deadline of the model."""
    options: RequestOptions
    is_repeatable: bool = True
    """True if equal inputs give equal results. If not, no item is cached or joined."""
    client_request_id: str = ""
    """The `x-request-id` of the caller, for rows."""
    key_id: str = ""
    """The public part of the caller's API key, for rows."""
    plan: str = ""
    """The name of the tenant's plan, for rows."""
    batch_id: str = ""
    """The batch that it is a line of, for rows."""
    price_share: float = 1.0
    """The part of the list price that it pays."""
    weight: float = 1.0
    """The tenant's share of a busy model, from its plan."""
    is_run_again: Callable[[], bool] = lambda: False
    """Returns whether the same request is sent again, under the same id, if this is canceled."""

    def demand(self, items: int) -> Demand:
        """Returns the demand of `items` of its items on the workers."""
        return Demand(
            self.model.name,
            items,
            self.tenant,
            self.weight,
            self.options.lane,
            # A full canary refuses no caller: the other revision takes the items.
            self.is_promised and not self.model.is_canary,
        )

    @property
    def is_promised(self) -> bool:
        """Returns whether the SLO applies to its items."""
        return self.options.is_promised(self.model.deadline)

    def too_late(self) -> DeadlineExceeded:
        """Returns the error of a request without an answer at its deadline."""
        received_at_s = self.options.received_at_s
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
