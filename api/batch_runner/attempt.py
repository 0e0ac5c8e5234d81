"""One attempt to run a batch line: the request to send, and the line's answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from api.batch_runner.lines import BatchLine, encode_answer, encode_failure, encode_not_run
from api.batches.documents import BatchCreated, End, LineAnswer
from api.batches.endpoint import Endpoint
from api.dispatch.request import InferenceRequest, NewRecord, RequestOptions
from api.endpoints import LINE_ENDPOINTS
from api.predictions.creation import digest_of, ids_of, new_prediction
from api.replicate.prediction_lines import PREDICTIONS_PATH
from shared.errors import PenstockError
from shared.messages import ItemOutcome, RequestFacts
from shared.models.tasks import Input
from shared.tenants.plan import Caller, Priority

PRIORITY: Priority = "batch"
NOT_RUN: dict[End, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": (
        "batch_cancelled",
        "This request was not executed because the batch was canceled.",
    ),
}
"""Codes and messages for lines that were not run, keyed by the reason the batch ended."""
LINES = Counter(
    "penstock_batch_lines_total",
    "Lines of finished batches, by result: completed, failed or not_run.",
    ["end"],
)


@dataclass(slots=True)
class LineAttempt:
    """One attempt to run a line."""

    batch: BatchCreated
    caller: Caller
    line: BatchLine
    segment: int
    """Index of the line's segment."""
    number: int
    """Number of earlier attempts that were not final."""
    is_run_again: Callable[[], bool] = lambda: False
    """Returns whether the line will be run later if this attempt is canceled."""
    outcomes: Sequence[ItemOutcome] | None = None
    """The items' outcomes. None if not known yet."""
    answered: Sequence[ItemOutcome] = ()
    """The outcomes used in the answer. For a flow, this is a single outcome with the run's output.
    """

    @property
    def endpoint(self) -> Endpoint:
        return LINE_ENDPOINTS[self.batch.endpoint]

    @property
    def deadline_s(self) -> float:
        """Unix time at which to stop work on the line if it starts now."""
        longest_s = self.line.request.model.deadline.longest_s
        return min(self.batch.expires_at_s, time.time() + longest_s)

    @property
    def request_id(self) -> str:
        """An ID that, like the line's job and rows, is the same each time the line is run."""
        suffix = f"-{self.number}" if self.number else ""
        name = f"{self.batch.id}-{self.line.number}{suffix}"
        if not self.line.request.is_run:
            return name
        # An Idempotency-Key sent by a caller never contains a line feed.
        return ids_of(self.batch.tenant, "", f"line\n{name}")[0]

    @property
    def operation(self) -> str:
        """The name that budgets use so that the line is counted only once."""
        name = f"{group_of(self.batch, self.segment)}/{self.line.number}"
        # Items that a run delivered are counted even if the run fails.
        return f"{name}-{self.number}" if self.line.request.is_run else name

    def build_request(self, inputs: Sequence[Input]) -> InferenceRequest:
        batch, line = self.batch, self.line
        # If a line is run twice, both rows must be identical, including their timestamps.
        facts = RequestFacts(
            request_id=self.request_id,
            tenant=batch.tenant,
            received_at_s=batch.created_at_s,
            key_id=batch.key_id,
            plan=batch.plan_name,
            weight=batch.weight,
            priority=PRIORITY,
            price_share=batch.price_share,
            batch_id=batch.id,
        )
        deadline_s = self.deadline_s
        return InferenceRequest(
            facts=facts,
            model=line.request.model,
            inputs=inputs,
            deadline_s=deadline_s,
            is_repeatable=line.request.is_repeatable,
            options=RequestOptions(),
            is_run_again=self.is_run_again,
            record=self._build_record(facts, deadline_s) if line.request.is_run else None,
        )

    def _build_record(self, facts: RequestFacts, deadline_s: float) -> NewRecord:
        """Returns the record for a flow run.

        The run's input, which may contain secrets and files, remains in the batch's file.
        """
        batch, line = self.batch, self.line
        prediction = new_prediction(
            line.request.model,
            facts,
            deadline_s,
            id=facts.request_id,
            input={"batch_id": batch.id, "custom_id": line.custom_id},
            is_list=False,
            endpoint="" if batch.endpoint == PREDICTIONS_PATH else batch.endpoint,
            base_url=batch.base_url,
            digest=digest_of(facts.request_id),
        )
        return NewRecord(prediction, keep_s=None, is_keyed=True)

    def complete(self, body: bytes) -> LineAnswer:
        """Returns the final answer to a line that succeeded, with the usage it reports."""
        LINES.labels("completed").inc()
        answer = encode_answer(self.batch, self.line, self.request_id, body)
        usage = self.endpoint.usage(self.line.request, self.outcomes or (), self.answered)
        return LineAnswer(answer, "completed", usage.input_tokens + usage.output_tokens, usage)

    def fail(self, error: PenstockError) -> LineAnswer:
        """Returns the final answer to a line that failed."""
        LINES.labels("failed").inc()
        data = encode_failure(self.batch, self.line, self.request_id, error)
        return LineAnswer(data, "failed")


def skip_line(batch: BatchCreated, number: int, custom_id: str, end: End) -> LineAnswer:
    """Returns the final response for a line that was not run because its batch was stopped."""
    LINES.labels("not_run").inc()
    return LineAnswer(encode_not_run(batch, number, custom_id, *NOT_RUN[end]), "not_run")


def group_of(batch: BatchCreated, segment: int) -> str:
    """Returns the operation group for a segment's lines."""
    return f"{batch.id}:{segment}"
