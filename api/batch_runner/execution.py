"""Computes one line of a batch, for as long as that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import Counter

from api.batch_runner.lines import (
    ENDPOINTS,
    BatchLine,
    answered,
    not_run,
    refused,
)
from api.batch_runner.predictions import PredictionsEndpoint
from api.batches.documents import BatchCreated, LineAnswer
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse, NewRecord, RequestOptions
from api.errors import BudgetReserved, LargerThanBudget, RateLimited
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.limits.limited_request import LimitedRequest, RecoveredRequest
from api.limits.limiter import Limiter
from api.openai.endpoint import LineCaller, ReplyTools
from api.predictions.creation import OWNER, PredictionSnapshot, digest_of, ids_of, version_of
from api.predictions.service import GRACE_S, PredictionIdTaken, Predictions
from shared.charge import price_of, step_prices_of
from shared.concurrency import backoff
from shared.errors import Canceled, DeadlineExceeded, Overloaded, PenstockError, Unavailable
from shared.messages import ItemOutcome, Receipt, RequestFacts
from shared.predictions import Prediction, metrics_of
from shared.stores.objects import ObjectStore
from shared.tasks import Input
from shared.tenants.plan import Caller, Priority

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
MAX_RESERVED_PAUSE_S = 5.0
"""Pause before a budget that requests in other processes have reserved is checked again."""
STALLED_S = 30.0
"""A batch in which no line has ended for STALLED_S yields to another batch that waits."""
REPLY_LIMIT_S = 60.0
"""For the encoding of the images of one line."""
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
"""Code and message of a line that its batch left undone, by the end of the batch."""
LINES = Counter(
    "penstock_batch_lines_total",
    "Lines of batches that are over: completed, failed or not_run.",
    ["end"],
)
_TRANSIENT = (Overloaded, Unavailable, DeadlineExceeded, Canceled)
READ_AGAIN_S = 1.0
"""After the time at which a reader ends a run that is late, this runner has read it."""
METRICS_OF_RUN = ("predict_time", "device_time", "cost_usd", "steps")
"""What the answer to a line says of its run. Other times would count from the batch's creation."""


class _RunCanceled(PenstockError):
    """Somebody canceled the run of a line. It is not begun again, as a request would be."""

    code = Canceled.code


@dataclass(slots=True)
class _Try:
    """One try of a line."""

    outcomes: Sequence[ItemOutcome] | None = None
    """How its items ended. None: they have not."""
    answered: Sequence[ItemOutcome] = ()
    """The outcomes that its answer is made of. For a flow, one with the output of the run."""


class TurnProgress:
    """Progress of one turn of a batch, and whether it is worth waiting for more.

    Args:
        should_yield: returns whether another batch could run in place of this one.
        attempts: ends that the records of lines have, by the numbers of the lines. They outlive the
            turn, as the next one would get these ends again.
    """

    def __init__(self, should_yield: Callable[[], bool], attempts: dict[int, int]) -> None:
        self.attempts = attempts
        self._should_yield = should_yield
        self._moved_s = time.monotonic()
        self.ended_lines = 0
        self.is_stalled = False
        """True if the rest of the lines waits for a later turn."""

    def note_end(self, line: BatchLine) -> None:
        self.attempts.pop(line.number, None)
        self._moved_s = time.monotonic()
        self.ended_lines += 1

    def note_failure(self, line: BatchLine, error: PenstockError, *, has_ended: bool) -> None:
        """Records that a line failed and may be tried again.

        Args:
            has_ended: True if its items had outcomes, which its records and rows have now.
        """
        # The record of the job has this end, so the same id would only get it again.
        if has_ended or isinstance(error, DeadlineExceeded | Canceled):
            self.attempts[line.number] = self.attempts.get(line.number, 0) + 1

    def stall(self) -> None:
        """Leaves the lines that have not begun to a later turn."""
        self.is_stalled = True

    def is_worth_waiting(self, error: PenstockError) -> bool:
        """Returns whether a line that failed with `error` is tried again in this turn.

        A budget that is spent holds up this line only: others may be cheaper.
        """
        if isinstance(error, RateLimited) and error.is_final:
            return False
        if time.monotonic() - self._moved_s >= STALLED_S and self._should_yield():
            self.stall()
        return not self.is_stalled


@dataclass(frozen=True, slots=True)
class LineExecutor:
    """Runs lines through the dispatcher, at `batch` priority.

    Temporary failures are retried until the batch expires: a full instance, an unreachable
    broker, a deadline, a worker that gave up. If the rest of a budget is reserved, the line is
    retried when a request ends. If the budget is spent, or if nothing moves while others wait, the
    line waits for a later turn of its batch. An error in the line itself ends it.

    A line of a flow is a run, so a prediction with a record. Its id follows from the line, so a
    runner that takes over finds the run and waits for its end. A canceled batch cancels it.
    """

    dispatcher: Dispatcher
    predictions: Predictions
    objects: ObjectStore
    image_codec: ImageCodec
    limiter: Limiter
    source_images: SourceImages
    storage_max_bytes: int
    """The storage quota of tenants whose plan has none."""

    async def run(
        self,
        batch: BatchCreated,
        caller: Caller,
        line: BatchLine,
        progress: TurnProgress,
        segment: int,
        is_run_again: Callable[[], bool] = lambda: True,
    ) -> LineAnswer | None:
        """Computes a line. A canceled call leaves it undone.

        Args:
            progress: of this turn of the batch.
            segment: index of the segment that the line belongs to.
            is_run_again: True if a line that a canceled call leaves undone is computed later.

        Returns:
            None if it has to wait for a later turn.
        """
        pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while time.time() < batch.expires_at_s:
            attempt, this = progress.attempts.get(line.number, 0), _Try()
            try:
                inputs = await self._inputs(batch, caller, line)
                request = _request(batch, line, inputs, attempt, is_run_again)
                operation = _operation(batch, line, segment, request, attempt)
                limits = self._limits(LimitedRequest, batch, caller, request, operation)
                async with limits as limited:
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
        """Returns the answer to a line. `this` gets its outcomes, also if there is no answer."""
        if request.record is None:
            response = await self._dispatched(request, limited)
            this.outcomes = this.answered = response.outcomes
            return await self._reply(batch, line, response, limited)
        try:
            prediction, record = await self._ran(request, limited)
        except PredictionIdTaken as error:  # nobody else has its id
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
        """Returns the answer to a line from its run, which is over."""
        prediction, record = run
        reply = record.reply
        this.outcomes = reply.outcomes if reply is not None else ()
        if record.state == "canceled":
            raise _RunCanceled("the run of the line was canceled")
        endpoint = ENDPOINTS[batch.endpoint]
        if record.state != "succeeded" or reply is None or reply.output is None:
            with endpoint.words(line.request):
                raise endpoint.failure(line.request, run)
        shown = metrics_of(prediction, record)
        tools = ReplyTools(
            self.objects,
            self.image_codec,
            time.time() + REPLY_LIMIT_S,
            request.price,
            {name: shown[name] for name in METRICS_OF_RUN if name in shown},
        )
        # Its outcomes are those of its steps, and there are none if all were skipped.
        whole = ItemOutcome(0, "succeeded", Receipt(), reply.output)
        this.answered = [whole]
        with endpoint.words(line.request):
            return await endpoint.reply(line.request, [whole], tools)

    async def _ran(self, request: InferenceRequest, limited: LimitedRequest) -> PredictionSnapshot:
        """Begins the run of a line, or finds it, and waits for its end.

        What its steps delivered is charged, however it ends.

        Raises:
            PenstockError: it can't begin. DeadlineExceeded: it did not end.
        """
        async with self.predictions.creating(request, waits=True) as creation:
            # A run that another process began may have less time.
            until_s = creation.snapshot.prediction.deadline_s + GRACE_S + READ_AGAIN_S
            try:
                await creation.wait(until_s - time.time())
                if creation.snapshot.record.awaits_receipts:
                    # Whoever canceled it is about to record what it cost, or has died.
                    creation.snapshot = await self.predictions.end(creation.snapshot)
            except asyncio.CancelledError:
                if not request.is_run_again():
                    with suppress(PenstockError):  # else its deadline ends it
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
        """Returns the answer to a line that was computed already. Computes nothing.

        A run of a flow that has not ended is canceled. What is not delivered is not charged, but
        for the delivered items of a flow.

        Args:
            batch: the batch, which was canceled or has expired.
            segment: index of the segment that the line belongs to.
            attempt: number of its ends that were not final, as in `TurnProgress.attempts`.

        Returns:
            None if there is no answer.

        Raises:
            Unavailable: Redis is unreachable.
        """
        this = _Try()
        try:
            inputs = await self._inputs(batch, caller, line)
            request = _request(batch, line, inputs, attempt, lambda: False)
            operation = _operation(batch, line, segment, request, attempt)
            limits = self._limits(RecoveredRequest, batch, caller, request, operation)
            async with limits as limited:
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
        """Returns the answer to a line, if all of it is there.

        Raises:
            PenstockError: it is not.
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
        return await ENDPOINTS[batch.endpoint].inputs(line.request, owner)

    async def _pause(
        self, error: PenstockError, caller: Caller, line: BatchLine, drawn_s: float, left_s: float
    ) -> bool:
        """Waits before the next try. Returns whether something has changed for it."""
        if isinstance(error, BudgetReserved):
            model = line.request.model
            account = self.limiter.account(caller, model.name, model.limited_unit)
            longest_s = min(drawn_s, MAX_RESERVED_PAUSE_S, left_s)
            return await self.limiter.wait_released(account, longest_s)
        await asyncio.sleep(min(_pause_s(error, drawn_s), left_s))
        return False

    def _limits(
        self,
        kind: type[LimitedRequest],
        batch: BatchCreated,
        caller: Caller,
        request: InferenceRequest,
        operation: str,
    ) -> LimitedRequest:
        return kind(
            self.limiter,
            caller,
            request.model,
            request.inputs,
            {},
            received_at_s=batch.created_at_s,
            longest_s=max(0.0, request.deadline_s - time.time()),
            price_share=batch.price_share,
            operation=operation,
        )

    async def _dispatched(
        self, request: InferenceRequest, limited: LimitedRequest
    ) -> InferenceResponse:
        try:
            return await self.dispatcher.dispatch(request)
        except asyncio.CancelledError:
            if not request.is_run_again():
                # Its rows say so, also if an earlier process was charged.
                facts = request.facts
                price = price_of(request.model, facts.received_at_s, facts.price_share)
                limited.settle(price, [])
            raise

    async def _reply(
        self,
        batch: BatchCreated,
        line: BatchLine,
        response: InferenceResponse,
        limited: LimitedRequest,
    ) -> bytes:
        """Returns the answer to a line. It is charged if there is one."""
        deadline_s = time.time() + REPLY_LIMIT_S
        tools = ReplyTools(self.objects, self.image_codec, deadline_s, response.price)
        try:
            endpoint = ENDPOINTS[batch.endpoint]
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
    """Returns the end of a line that was answered, with the usage that its answer reports."""
    LINES.labels("completed").inc()
    answer = answered(batch, line, request.facts.request_id, body)
    endpoint = ENDPOINTS[batch.endpoint]
    usage = endpoint.usage(line.request, this.outcomes or (), this.answered)
    return LineAnswer(answer, "completed", usage.input_tokens + usage.output_tokens, usage)


def _failed(batch: BatchCreated, line: BatchLine, attempt: int, error: PenstockError) -> LineAnswer:
    """Returns the end of a line that failed for good."""
    LINES.labels("failed").inc()
    return LineAnswer(refused(batch, line, _request_id(batch, line, attempt), error), "failed")


def _operation(
    batch: BatchCreated, line: BatchLine, segment: int, request: InferenceRequest, attempt: int
) -> str:
    """Returns the name under which budgets count a line once."""
    name = f"{group_of(batch, segment)}/{line.number}"
    # What a run has delivered counts even if it ends badly.
    return name if request.record is None else f"{name}-{attempt}"


def group_of(batch: BatchCreated, segment: int) -> str:
    """Returns the group of the operations that are the lines of a segment."""
    return f"{batch.id}:{segment}"


def _request(
    batch: BatchCreated,
    line: BatchLine,
    inputs: Sequence[Input],
    attempt: int,
    is_run_again: Callable[[], bool],
) -> InferenceRequest:
    model = line.request.model
    # A row of a line that is computed twice is the same row, its time included.
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
        record=_record(batch, line, facts, deadline_s) if model.flow is not None else None,
    )


def _record(
    batch: BatchCreated, line: BatchLine, facts: RequestFacts, deadline_s: float
) -> NewRecord:
    """The record of a run. Its input, which may have secrets and files, is in the batch's file."""
    model = line.request.model
    prediction = Prediction(
        id=facts.request_id,
        record=facts.request_id,
        tenant=facts.tenant,
        model=model.name,
        owner=OWNER,
        version=version_of(model),
        input={"batch_id": batch.id, "custom_id": line.custom_id},
        is_list=False,
        endpoint="" if batch.endpoint == PredictionsEndpoint.path else batch.endpoint,
        base_url=batch.base_url,
        created_at_s=facts.received_at_s,
        deadline_s=deadline_s,
        digest=digest_of(facts.request_id),
        key_id=facts.key_id,
        price=price_of(model, facts.received_at_s, facts.price_share),
        flow=model.flow.as_json() if model.flow is not None else None,
        step_prices=step_prices_of(model, facts.received_at_s, facts.price_share),
    )
    return NewRecord(prediction, keep_s=None, is_keyed=True)


def _request_id(batch: BatchCreated, line: BatchLine, attempt: int) -> str:
    """Returns an id that is the same each time a line is computed, as are its job and its rows."""
    name = f"{batch.id}-{line.number}" + (f"-{attempt}" if attempt else "")
    if line.request.model.flow is None:
        return name
    # No Idempotency-Key of a caller has a line feed.
    return ids_of(batch.tenant, "", f"line\n{name}")[0]


def _pause_s(error: PenstockError, drawn_s: float) -> float:
    return max(drawn_s, error.retry_after_s) if isinstance(error, Overloaded) else drawn_s
