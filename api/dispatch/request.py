"""What the dispatcher takes and returns: an InferenceRequest and an InferenceResponse."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from api.errors import ANSWERS
from shared.catalog import Model
from shared.errors import DeadlineExceeded, Overloaded, PenstockError, error_for_code
from shared.messages import ItemOutcome, reason_of
from shared.tasks import Input


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One validated HTTP request, as the pipeline needs it."""

    request_id: str
    model: Model
    tenant: str
    inputs: Sequence[Input]
    received_at_s: float
    deadline_s: float
    """Unix time, within the longest deadline of the model."""
    is_repeatable: bool = True
    """Whether equal inputs give equal results. If not, no item is cached or joined."""
    cache_read: bool = True
    cache_write: bool = True
    traceparent: str = ""
    start_by_s: float = 0.0
    """Unix time after which no worker starts on it; 0: only the deadline counts."""
    lane: str = ""
    """`batch` for requests that may wait behind interactive ones, else empty."""
    client_request_id: str = ""
    """The `x-request-id` of the caller, for rows."""

    def too_late(self) -> DeadlineExceeded:
        """The error of a request without an answer at its deadline."""
        waited_s, limit_s = time.time() - self.received_at_s, round(self.deadline_s - self.received_at_s, 3)
        return DeadlineExceeded(f"no answer came within the deadline of {limit_s:.10g} s; waited {waited_s:.2f} s")


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """One outcome per input, in order. `queue_ms` is the longest wait of an item at the broker."""

    outcomes: Sequence[ItemOutcome]
    queue_ms: float

    def headers(self) -> dict[str, str]:
        """The response headers of every inference answer.

        Times are those of the slowest item, since items run in parallel. The cache is `hit`, `miss`
        or `joined` if all items agree, and `partial` otherwise.
        """
        receipts = [outcome.receipt for outcome in self.outcomes]
        sources = {_SOURCES.get(receipt.cache, "miss") for receipt in receipts}
        return {
            "x-penstock-cache": sources.pop() if len(sources) == 1 else "partial",
            "x-penstock-queue-ms": f"{self.queue_ms:.2f}",
            "x-penstock-batch-ms": f"{max((receipt.batch_wait_ms or 0.0 for receipt in receipts), default=0.0):.2f}",
            "x-penstock-inference-ms": f"{max((receipt.inference_ms or 0.0 for receipt in receipts), default=0.0):.2f}",
        }

    def raise_failed(self) -> None:
        """Raises the error of the first item without a result. There are no partial answers.

        Raises:
            PenstockError: the error of the item, with its code.
        """
        for outcome in self.outcomes:
            if outcome.result is None:
                raise _error_of(outcome, several=len(self.outcomes) > 1)


_SOURCES = {"memory": "hit", "redis": "hit", "joined": "joined"}


def _error_of(outcome: ItemOutcome, *, several: bool) -> PenstockError:
    error = outcome.error
    if error is None:
        return PenstockError(reason_of(outcome))
    known = error_for_code(error.code, reason_of(outcome), error.field)
    names_item = error.field == "input" or ANSWERS[known.code].status >= 500 or isinstance(known, Overloaded)
    if several and not names_item:
        known.message = f"item {outcome.index}: {known.message}"
    return known
