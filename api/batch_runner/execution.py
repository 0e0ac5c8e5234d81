"""Computes one line of a batch, however long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from prometheus_client import Counter

from api.batch_runner.lines import (
    BatchLine,
    answered,
    not_run,
    refused,
)
from api.batches.documents import BatchCreated, LineAnswer
from api.batches.endpoint import LineCaller, ReplyTools
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse, NewRecord, RequestOptions
from api.endpoints import LINE_ENDPOINTS
from api.errors import BudgetReserved, LargerThanBudget, RateLimited
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.limits.limited_request import LimitedRequest, RecoveredRequest
from api.limits.limiter import Limiter
from api.predictions.creation import PredictionSnapshot, digest_of, ids_of, new_prediction
from api.predictions.service import GRACE_S, PredictionIdTaken, Predictions
from api.replicate.prediction_lines import PREDICTIONS_PATH
from shared.errors import Canceled, DeadlineExceeded, Overloaded, PenstockError, Unavailable
from shared.messages import ItemOutcome, RequestFacts
from shared.models.tasks import Input
from shared.predictions import metrics_of
from shared.process.concurrency import backoff
from shared.stores.objects import ObjectStore
from shared.tenants.plan import Caller, Priority

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
MAX_RESERVED_PAUSE_S = 5.0
"""Pause before checking again a budget that requests in other processes have reserved."""
STALLED_S = 30.0
"""A batch in which no line has finished for STALLED_S yields to another waiting batch."""
REPLY_LIMIT_S = 60.0
"""Time limit for encoding the images of one line."""
PRIORITY: Priority = "batch"

NOT_RUN = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": (
        "batch_cancelled",
        "This request was not executed, because the batch was canceled.",
    ),
}
"""Code and message for a line that was not run, by the reason why its batch ended."""
LINES = Counter(
    "penstock_batch_lines_total",
    "Lines of finished batches, by result: completed, failed or not_run.",
    ["end"],
)
_TRANSIENT = (Overloaded, Unavailable, DeadlineExceeded, Canceled)
READ_AGAIN_S = 1.0
"""Extra time for this runner to read a run's outcome after its deadline has passed."""
METRICS_OF_RUN = ("predict_time", "device_time", "cost_usd", "steps")
"""Timings of the run that an answer includes.

Other timings would count from the batch's creation.
"""


class _RunCanceled(PenstockError):
    """The run of a line was canceled. Unlike a request, it is not started again."""

    code = Canceled.code


@dataclass(slots=True)
class _Try:
    """One attempt to compute a line."""

    outcomes: Sequence[ItemOutcome] | None = None
    """Outcomes of its items. None: not known yet."""
    answered: Sequence[ItemOutcome] = ()
    """The outcomes used in the answer. For a flow, a single one with the output of the run."""


class TurnProgress:
    """Progress of a batch in one turn; decides whether waiting for more is worthwhile.

    Args:
        should_yield: returns whether another batch could run in place of this one.
        attempts: number of failed attempts in the records of lines, by line number. They outlive
            the turn, because the next turn would find the same failures again.
    """

    def __init__(self, should_yield: Callable[[], bool], attempts: dict[int, int]) -> None:
        self.attempts = attempts
        self._should_yield = should_yield
        self._moved_s = time.monotonic()
        self.ended_lines = 0
        self.is_stalled = False
        """True if the remaining lines wait for a later turn."""

    def note_end(self, line: BatchLine) -> None:
        self.attempts.pop(line.number, None)
        self._moved_s = time.monotonic()
        self.ended_lines += 1

    def note_failure(self, line: BatchLine, error: PenstockError, *, has_ended: bool) -> None:
        """Records that a line failed and may be retried.

        Args:
            has_ended: True if its items had outcomes, which are now in its records and rows.
        """
        # The record of the job has this outcome, so the same ID would only return it again.
        if has_ended or isinstance(error, DeadlineExceeded | Canceled):
            self.attempts[line.number] = self.attempts.get(line.number, 0) + 1

    def stall(self) -> None:
        """Leaves lines that have not started to a later turn."""
        self.is_stalled = True

    def is_worth_waiting(self, error: PenstockError) -> bool:
        """Returns whether to retry a line that failed with `error` in this turn.

        A spent budget holds up only this line, because others may be cheaper.
        """
        if isinstance(error, RateLimited) and error.is_final:
            return False
        if time.monotonic() - self._moved_s >= STALLED_S and self._should_yield():
            self.stall()
        return not self.is_stalled


@dataclass(frozen=True, slots=True)
class LineExecutor:
    """Runs lines through the dispatcher, at `batch` priority.

    Temporary failures are retried until the batch expires: a full instance, an unreachable broker,
    a missed deadline, a worker that gave up. If the rest of a budget is reserved, the line is
    retried when a request finishes. If the budget is spent, or if nothing moves while others wait,
    the line waits for a later turn of its batch. An error in the line itself is final.

    A line of a flow is a run: a prediction with a record. Its ID is derived from the line, so a
    runner that takes over finds the run and waits for it to finish. Canceling the batch cancels the
    run.
    """

    dispatcher: Dispatcher
    predictions: Predictions
    objects: ObjectStore
    image_codec: ImageCodec
    limiter: Limiter
    source_images: SourceImages
    storage_max_bytes: int
    """Storage quota of tenants whose plan does not set one."""

    async def run(
        self,
        batch: BatchCreated,
        caller: Caller,
        line: BatchLine,
        progress: TurnProgress,
        segment: int,
        is_run_again: Callable[[], bool] = lambda: True,
    ) -> LineAnswer | None:
        """Computes a line. If the call is canceled, the line remains undone.

        Args:
            progress: progress of the batch in this turn.
            segment: index of the segment that the line belongs to.
            is_run_again: True if a line left undone by a canceled call will be computed later.

        Returns:
            None if the line has to wait for a later turn.
        """
        pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while time.time() < batch.expires_at_s:
            attempt, this = progress.attempts.get(line.number, 0), _Try()
            try:
                async with self._open_attempt(
                    LimitedRequest, batch, caller, line, segment, attempt, is_run_again
                ) as (request, limited):
                    limited.wake_next()
                    body = await self._computed(batch, line, request, limited, this)
            except PenstockError as error:
                if not _may_pass(error):
                    progress.note_end(line)
                    return _failed(batch, line, attempt, error)
                progress.note_failure(line, error, has_ended=this.outcomes is not None)
                if not progress.is_worth_waiting(error):
                    return None
                left_s = max(0.0, batch.expires_at_s - time.time())
                if await self._pause(error, caller, line, next(pauses), left_s):
                    pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
            else:
                progress.note_end(line)
                return _completed(batch, line, request, body, this)
        LINES.labels("not_run").inc()
        data = not_run(batch, line.number, line.custom_id, *NOT_RUN["expired"])
        return LineAnswer(data, "not_run")

    async def _computed(
        self,
        batch: BatchCreated,
        line: BatchLine,
        request: InferenceRequest,
        limited: LimitedRequest,
        this: _Try,
    ) -> bytes:
        """Returns the answer to a line. Sets the outcomes of `this`, even without an answer."""
        if request.record is None:
            response = await self._dispatch(request, limited)
            this.outcomes = this.answered = response.outcomes
            return await self._reply(batch, line, response, limited)
        try:
            prediction, record = await self._ran(request, limited)
        except PredictionIdTaken as error:  # no other request uses its ID
            deleted = await self.predictions.receipts_of_deleted(request.facts.request_id)
            limited.settle(request.price, deleted)
            raise _RunCanceled("the run of the line was deleted") from error
        snapshot = PredictionSnapshot(prediction, record)
        return await self._answer_of_run(batch, line, request, snapshot, this)

    async def _answer_of_run(
        self,
        batch: BatchCreated,
        line: BatchLine,
        request: InferenceRequest,
        run: PredictionSnapshot,
        this: _Try,
    ) -> bytes:
        """Returns the answer to a line from its finished run."""
        prediction, record = run
        reply = record.reply
        this.outcomes = reply.outcomes if reply is not None else ()
        if record.state == "canceled":
            raise _RunCanceled("the run of the line was canceled")
        endpoint = LINE_ENDPOINTS[batch.endpoint]
        if record.state != "succeeded" or reply is None or reply.output is None:
            with endpoint.words(line.request):
                raise endpoint.failure(line.request, run)
        run_metrics = metrics_of(prediction, record)
        tools = ReplyTools(
            self.objects,
            self.image_codec,
            time.time() + REPLY_LIMIT_S,
            request.price,
            {name: run_metrics[name] for name in METRICS_OF_RUN if name in run_metrics},
        )
        this.answered = reply.delivered
        with endpoint.words(line.request):
            return await endpoint.reply(line.request, this.answered, tools)

    async def _ran(self, request: InferenceRequest, limited: LimitedRequest) -> PredictionSnapshot:
        """Starts the run of a line, or finds it, and waits for it to finish.

        Outputs that its steps delivered are charged, however the run ends.

        Raises:
            PenstockError: the run can't start. DeadlineExceeded: it did not finish.
        """
        async with self.predictions.creating(request, waits=True) as creation:
            # A run started by another process may have less time.
            until_s = creation.snapshot.prediction.deadline_s + GRACE_S + READ_AGAIN_S
            try:
                await creation.wait(until_s - time.time())
                if creation.snapshot.record.awaits_receipts:
                    # The process that canceled it is about to record its cost, or has died.
                    creation.snapshot = await self.predictions.end(creation.snapshot)
            except asyncio.CancelledError:
                if not request.is_run_again():
                    with suppress(PenstockError):  # otherwise its deadline ends it
                        creation.snapshot = await self.predictions.end(creation.snapshot)
                raise
            finally:
                reply = creation.snapshot.record.reply
                if reply is not None:
                    limited.settle(request.price, reply.outcomes)
        if not creation.snapshot.record.is_over:
            raise request.too_late()
        return creation.snapshot

    async def recover(
        self, batch: BatchCreated, caller: Caller, line: BatchLine, segment: int, attempt: int
    ) -> LineAnswer | None:
        """Returns the answer to a line that is already computed. Computes nothing.

        An unfinished flow run is canceled. Items are charged only if delivered, including flow
        items.

        Args:
            batch: the batch, which is canceled or expired.
            segment: index of the segment that the line belongs to.
            attempt: number of attempts that were not final, as in `TurnProgress.attempts`.

        Returns:
            None if there is no answer.
        """
        this = _Try()
        try:
            async with self._open_attempt(
                RecoveredRequest, batch, caller, line, segment, attempt, lambda: False
            ) as (request, limited):
                body = await self._found(batch, line, request, limited, this)
        except Unavailable:
            raise
        except PenstockError:
            return None
        return _completed(batch, line, request, body, this)

    async def _found(
        self,
        batch: BatchCreated,
        line: BatchLine,
        request: InferenceRequest,
        limited: LimitedRequest,
        this: _Try,
    ) -> bytes:
        """Returns the answer to a line if all of it is available.

        Raises:
            PenstockError: it is not available.
        """
        if request.record is None:
            response = await self.dispatcher.recall(request)
            this.outcomes = this.answered = response.outcomes
            return await self._reply(batch, line, response, limited)
        run = await self.predictions.cancel(batch.tenant, request.facts.request_id)
        if run.record.reply is not None:
            limited.settle(request.price, run.record.reply.outcomes)
        return await self._answer_of_run(batch, line, request, run, this)

    async def _inputs(
        self, batch: BatchCreated, caller: Caller, line: BatchLine
    ) -> Sequence[Input]:
        model = line.request.model
        deadline_s = min(batch.expires_at_s, time.time() + model.deadline.longest_s)
        own_bytes = caller.plan.storage_max_bytes
        owner = LineCaller(
            batch.tenant,
            self.storage_max_bytes if own_bytes is None else own_bytes,
            batch.base_url,
            deadline_s,
            self.source_images,
        )
        return await LINE_ENDPOINTS[batch.endpoint].inputs(line.request, owner)

    async def _pause(
        self, error: PenstockError, caller: Caller, line: BatchLine, drawn_s: float, left_s: float
    ) -> bool:
        """Waits before the next attempt. Returns whether another attempt may now succeed."""
        if isinstance(error, BudgetReserved):
            model = line.request.model
            account = self.limiter.account(caller, model.name, model.limited_unit)
            longest_s = min(drawn_s, MAX_RESERVED_PAUSE_S, left_s)
            return await self.limiter.wait_released(account, longest_s)
        await asyncio.sleep(min(_pause_s(error, drawn_s), left_s))
        return False

    @asynccontextmanager
    async def _open_attempt(
        self,
        kind: type[LimitedRequest],
        batch: BatchCreated,
        caller: Caller,
        line: BatchLine,
        segment: int,
        attempt: int,
        is_run_again: Callable[[], bool],
    ) -> AsyncGenerator[tuple[InferenceRequest, LimitedRequest]]:
        """Yields the request of one attempt at a line, within the caller's limits."""
        inputs = await self._inputs(batch, caller, line)
        request = _request(batch, line, inputs, attempt, is_run_again)
        async with kind(
            self.limiter,
            caller,
            request.model,
            request.inputs,
            {},
            received_at_s=batch.created_at_s,
            longest_s=max(0.0, request.deadline_s - time.time()),
            price_share=batch.price_share,
            operation=_operation(batch, line, segment, request, attempt),
        ) as limited:
            yield request, limited

    async def _dispatch(
        self, request: InferenceRequest, limited: LimitedRequest
    ) -> InferenceResponse:
        try:
            return await self.dispatcher.dispatch(request)
        except asyncio.CancelledError:
            if not request.is_run_again():
                # Its rows are marked as charged here, even if an earlier process charged them.
                limited.settle(request.price, [])
            raise

    async def _reply(
        self,
        batch: BatchCreated,
        line: BatchLine,
        response: InferenceResponse,
        limited: LimitedRequest,
    ) -> bytes:
        """Returns the answer to a line, and charges for it."""
        deadline_s = time.time() + REPLY_LIMIT_S
        tools = ReplyTools(self.objects, self.image_codec, deadline_s, response.price)
        try:
            endpoint = LINE_ENDPOINTS[batch.endpoint]
            with response, endpoint.words(line.request):
                response.raise_failed()
                return await endpoint.reply(line.request, response.outcomes, tools)
        finally:
            limited.settle(response.price, response.outcomes, is_delivered=response.is_delivered)


def _may_pass(error: PenstockError) -> bool:
    """Returns whether a line that failed with `error` may succeed later."""
    return isinstance(error, _TRANSIENT) and not isinstance(error, LargerThanBudget)


def _completed(
    batch: BatchCreated, line: BatchLine, request: InferenceRequest, body: bytes, this: _Try
) -> LineAnswer:
    """Returns the final answer to a line that succeeded, with the usage it reports."""
    LINES.labels("completed").inc()
    answer = answered(batch, line, request.facts.request_id, body)
    endpoint = LINE_ENDPOINTS[batch.endpoint]
    usage = endpoint.usage(line.request, this.outcomes or (), this.answered)
    return LineAnswer(answer, "completed", usage.input_tokens + usage.output_tokens, usage)


def _failed(batch: BatchCreated, line: BatchLine, attempt: int, error: PenstockError) -> LineAnswer:
    """Returns the final answer to a line that failed."""
    LINES.labels("failed").inc()
    return LineAnswer(refused(batch, line, _request_id(batch, line, attempt), error), "failed")


def _operation(
    batch: BatchCreated, line: BatchLine, segment: int, request: InferenceRequest, attempt: int
) -> str:
    """Returns the name under which budgets count a line only once."""
    name = f"{group_of(batch, segment)}/{line.number}"
    # Items delivered by a run count even if the run fails.
    return name if request.record is None else f"{name}-{attempt}"


def group_of(batch: BatchCreated, segment: int) -> str:
    """Returns the operation group for the lines of a segment."""
    return f"{batch.id}:{segment}"


def _request(
    batch: BatchCreated,
    line: BatchLine,
    inputs: Sequence[Input],
    attempt: int,
    is_run_again: Callable[[], bool],
) -> InferenceRequest:
    model = line.request.model
    # If a line is computed twice, its row must be identical, including its timestamp.
    facts = RequestFacts(
        request_id=_request_id(batch, line, attempt),
        tenant=batch.tenant,
        received_at_s=batch.created_at_s,
        key_id=batch.key_id,
        plan=batch.plan_name,
        weight=batch.weight,
        priority=PRIORITY,
        price_share=batch.price_share,
        batch_id=batch.id,
    )
    deadline_s = min(batch.expires_at_s, time.time() + model.deadline.longest_s)
    return InferenceRequest(
        facts=facts,
        model=model,
        inputs=inputs,
        deadline_s=deadline_s,
        is_repeatable=line.request.is_repeatable,
        options=RequestOptions(),
        is_run_again=is_run_again,
        record=_record(batch, line, facts, deadline_s) if line.request.is_run else None,
    )


def _record(
    batch: BatchCreated, line: BatchLine, facts: RequestFacts, deadline_s: float
) -> NewRecord:
    """The record of a run.

    Its input, which may contain secrets and files, stays in the batch's file.
    """
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


def _request_id(batch: BatchCreated, line: BatchLine, attempt: int) -> str:
    """Returns an ID that is the same each time a line is computed, as are its job and rows."""
    name = f"{batch.id}-{line.number}" + (f"-{attempt}" if attempt else "")
    if not line.request.is_run:
        return name
    # An Idempotency-Key sent by a caller never contains a line feed.
    return ids_of(batch.tenant, "", f"line\n{name}")[0]


def _pause_s(error: PenstockError, drawn_s: float) -> float:
    return max(drawn_s, error.retry_after_s) if isinstance(error, Overloaded) else drawn_s
