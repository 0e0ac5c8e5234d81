"""What routes ask of the dispatcher and what they get: an InferenceRequest in, an Answer out."""

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
    """One HTTP request, checked, in the words of the pipeline."""

    request_id: str
    model: Model
    tenant: str
    inputs: Sequence[Input]
    received_at_s: float
    deadline_s: float
    """Unix time; the route has bounded it by what the model allows."""
    is_repeatable: bool = True
    """Whether the same inputs give the same results; if not, nothing is cached or joined."""
    cache_read: bool = True
    cache_write: bool = True
    traceparent: str = ""
    start_by_s: float = 0.0
    """Unix time after which no worker begins it any more; 0: none but the deadline."""
    lane: str = ""
    """`batch`: may wait behind requests without one."""
    client_request_id: str = ""
    """The caller's own id of the request, for its rows."""

    def too_late(self) -> DeadlineExceeded:
        """What its caller is told who has waited until now."""
        waited_s, limit_s = time.time() - self.received_at_s, round(self.deadline_s - self.received_at_s, 3)
        return DeadlineExceeded(f"no answer came within the deadline of {limit_s:.10g} s; waited {waited_s:.2f} s")


@dataclass(frozen=True, slots=True)
class Answer:
    """One outcome per input, in order. `queue_ms` is the longest that one of them lay with the broker."""

    outcomes: Sequence[ItemOutcome]
    queue_ms: float

    def headers(self) -> dict[str, str]:
        """How it went, as the response headers that every inference answer has.

        Times are those of the slowest item, since items are computed side by side. The cache is `hit`, `miss` or
        `joined` where that is true of all items, `partial` otherwise.
        """
        receipts = [outcome.receipt for outcome in self.outcomes]
        ways = {_WAYS.get(receipt.cache, "miss") for receipt in receipts}
        return {
            "x-penstock-cache": ways.pop() if len(ways) == 1 else "partial",
            "x-penstock-queue-ms": f"{self.queue_ms:.2f}",
            "x-penstock-batch-ms": f"{max((receipt.batch_wait_ms or 0.0 for receipt in receipts), default=0.0):.2f}",
            "x-penstock-inference-ms": f"{max((receipt.inference_ms or 0.0 for receipt in receipts), default=0.0):.2f}",
        }

    def raise_failed(self) -> None:
        """Raises what the first item without a result failed with: an answer is whole or it is none.

        Raises:
            PenstockError: as the item's error says.
        """
        for outcome in self.outcomes:
            if outcome.result is None:
                raise _error_of(outcome, several=len(self.outcomes) > 1)


_WAYS = {"memory": "hit", "redis": "hit", "joined": "joined"}


def _error_of(outcome: ItemOutcome, *, several: bool) -> PenstockError:
    error = outcome.error
    if error is None:
        return PenstockError(reason_of(outcome))
    known = error_for_code(error.code, reason_of(outcome), error.field)
    is_told_apart = error.field == "input" or ANSWERS[known.code].status >= 500 or isinstance(known, Overloaded)
    if several and not is_told_apart:
        known.message = f"item {outcome.index}: {known.message}"
    return known
