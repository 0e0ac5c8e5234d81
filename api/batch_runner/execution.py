"""Runs one batch line, no matter how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from api.batch_runner.attempt import LineAttempt, skip_line
from api.batch_runner.lines import BatchLine
from api.batch_runner.turn_progress import TurnProgress
from api.batches.documents import BatchCreated, LineAnswer
from api.batches.endpoint import LineCaller, ReplyTools
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse
from api.errors import BudgetReserved, LargerThanBudget
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.limits.limited_request import LimitedRequest, RecoveredRequest
from api.limits.limiter import Limiter
from api.predictions.creation import PredictionSnapshot
from api.predictions.service import GRACE_S, PredictionIdTaken, Predictions
from shared.errors import Canceled, DeadlineExceeded, Overloaded, PenstockError, Unavailable
from shared.models.tasks import Input
from shared.money.charge import ItemPrice
from shared.predictions import metrics_of
from shared.process.concurrency import backoff
from shared.stores.objects import ObjectStore
from shared.tenants.plan import Caller

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
MAX_RESERVED_PAUSE_S = 5.0
"""Pause before rechecking a budget that requests in other processes have reserved."""
REPLY_LIMIT_S = 60.0
"""Time limit for encoding one line's images."""
_TRANSIENT = (Overloaded, Unavailable, DeadlineExceeded, Canceled)
READ_AGAIN_S = 1.0
"""Extra time for this runner to read a run's outcome after the run's deadline."""
METRICS_OF_RUN = ("predict_time", "device_time", "cost_usd", "steps")
"""The run timings included in an answer. Other timings would be measured from the batch's creation.
"""


@dataclass(frozen=True, slots=True)
class LineExecutor:
    """Runs lines through the dispatcher, at `batch` priority.

    Temporary failures (a full instance, an unreachable broker, a missed deadline, a worker that
    gave up) are retried until the batch expires. If requests in progress have reserved the rest of
    a budget, the line is retried when one finishes. If the budget is spent, or if nothing makes
    progress while other batches wait, the line waits for its batch's next turn. An error in the
    line itself is final.

    A flow line is a run: a prediction with a record. The run's ID is derived from the line, so a
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
    """Storage quota for tenants whose plan does not set one."""

    async def run(
        self,
        batch: BatchCreated,
        caller: Caller,
        line: BatchLine,
        progress: TurnProgress,
        segment: int,
        is_run_again: Callable[[], bool] = lambda: True,
    ) -> LineAnswer | None:
        """Runs a line. If the call is canceled, the line is left unfinished.

        Args:
            progress: the batch's progress in this turn.
            segment: index of the segment that the line belongs to.
            is_run_again: True if a line left unfinished by a canceled call will be run again later.

        Returns:
            None if the line must wait for a later turn.
        """
        pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while time.time() < batch.expires_at_s:
            number = progress.attempts.get(line.number, 0)
            attempt = LineAttempt(batch, caller, line, segment, number, is_run_again)
            try:
                async with self._open(attempt, LimitedRequest) as (request, limited):
                    limited.wake_next()
                    body = await self._compute(attempt, request, limited)
            except PenstockError as error:
                if not _may_pass(error):
                    progress.note_end(line)
                    return attempt.fail(error)
                progress.note_failure(line, error, has_ended=attempt.outcomes is not None)
                if not progress.is_worth_waiting(error):
                    return None
                left_s = max(0.0, batch.expires_at_s - time.time())
                if await self._pause(attempt, error, next(pauses), left_s):
                    pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
            else:
                progress.note_end(line)
                return attempt.complete(body)
        return skip_line(batch, line.number, line.custom_id, "expired")

    async def recover(
        self, batch: BatchCreated, caller: Caller, line: BatchLine, segment: int, number: int
    ) -> LineAnswer | None:
        """Returns the answer to a line that has already been run, without running anything.

        An unfinished flow run is canceled. Items, including flow items, are charged only if
        delivered.

        Args:
            batch: the batch, which is canceled or expired.
            segment: index of the segment that the line belongs to.
            number: number of earlier attempts that were not final, as in `TurnProgress.attempts`.

        Returns:
            None if there is no answer.
        """
        attempt = LineAttempt(batch, caller, line, segment, number)
        try:
            async with self._open(attempt, RecoveredRequest) as (request, limited):
                body = await self._recall(attempt, request, limited)
        except Unavailable:
            raise
        except PenstockError:
            return None
        return attempt.complete(body)

    @asynccontextmanager
    async def _open(
        self, attempt: LineAttempt, kind: type[LimitedRequest]
    ) -> AsyncGenerator[tuple[InferenceRequest, LimitedRequest]]:
        """Yields an attempt's request, subject to the caller's limits."""
        batch = attempt.batch
        request = attempt.build_request(await self._load_inputs(attempt))
        async with kind(
            self.limiter,
            attempt.caller,
            request.model,
            request.inputs,
            {},
            received_at_s=batch.created_at_s,
            longest_s=max(0.0, request.deadline_s - time.time()),
            price_share=batch.price_share,
            operation=attempt.operation,
        ) as limited:
            yield request, limited

    async def _load_inputs(self, attempt: LineAttempt) -> Sequence[Input]:
        batch, own_bytes = attempt.batch, attempt.caller.plan.storage_max_bytes
        owner = LineCaller(
            batch.tenant,
            self.storage_max_bytes if own_bytes is None else own_bytes,
            batch.base_url,
            attempt.deadline_s,
            self.source_images,
        )
        return await attempt.endpoint.inputs(attempt.line.request, owner)

    async def _compute(
        self, attempt: LineAttempt, request: InferenceRequest, limited: LimitedRequest
    ) -> bytes:
        """Returns the answer's body. Sets the attempt's outcomes even if the request fails."""
        if request.record is None:
            return await self._reply(attempt, await self._dispatch(request, limited), limited)
        try:
            run = await self._run_flow(request, limited)
        except PredictionIdTaken as error:  # the line's ID is not used by any other request
            deleted = await self.predictions.receipts_of_deleted(request.facts.request_id)
            limited.settle(request.price, deleted)
            raise _RunCanceled("the line's run was deleted") from error
        return await self._reply_of_run(attempt, run, request.price)

    async def _recall(
        self, attempt: LineAttempt, request: InferenceRequest, limited: LimitedRequest
    ) -> bytes:
        """Returns the answer's body if all of it is available.

        Raises:
            PenstockError: the answer is not available.
        """
        if request.record is None:
            return await self._reply(attempt, await self.dispatcher.recall(request), limited)
        run = await self.predictions.cancel(request.facts.tenant, request.facts.request_id)
        if run.record.reply is not None:
            limited.settle(request.price, run.record.reply.outcomes)
        return await self._reply_of_run(attempt, run, request.price)

    async def _dispatch(
        self, request: InferenceRequest, limited: LimitedRequest
    ) -> InferenceResponse:
        try:
            return await self.dispatcher.dispatch(request)
        except asyncio.CancelledError:
            if not request.is_run_again():
                # The line's rows are marked as charged here, even if an earlier process already
                # charged them.
                limited.settle(request.price, [])
            raise

    async def _reply(
        self, attempt: LineAttempt, response: InferenceResponse, limited: LimitedRequest
    ) -> bytes:
        """Returns the answer's body and charges for it."""
        attempt.outcomes = attempt.answered = response.outcomes
        deadline_s = time.time() + REPLY_LIMIT_S
        tools = ReplyTools(self.objects, self.image_codec, deadline_s, response.price)
        try:
            with response, attempt.endpoint.words(attempt.line.request):
                response.raise_if_failed()
                return await attempt.endpoint.reply(attempt.line.request, response.outcomes, tools)
        finally:
            limited.settle(response.price, response.outcomes, is_delivered=response.is_delivered)

    async def _reply_of_run(
        self, attempt: LineAttempt, run: PredictionSnapshot, price: ItemPrice
    ) -> bytes:
        """Returns the answer's body from a finished flow run."""
        prediction, record = run
        reply, line, endpoint = record.reply, attempt.line, attempt.endpoint
        attempt.outcomes = reply.outcomes if reply is not None else ()
        if record.state == "canceled":
            raise _RunCanceled("the line's run was canceled")
        if record.state != "succeeded" or reply is None or reply.output is None:
            with endpoint.words(line.request):
                raise endpoint.failure(line.request, run)
        run_metrics = metrics_of(prediction, record)
        tools = ReplyTools(
            self.objects,
            self.image_codec,
            time.time() + REPLY_LIMIT_S,
            price,
            {name: run_metrics[name] for name in METRICS_OF_RUN if name in run_metrics},
        )
        attempt.answered = reply.delivered
        with endpoint.words(line.request):
            return await endpoint.reply(line.request, attempt.answered, tools)

    async def _run_flow(
        self, request: InferenceRequest, limited: LimitedRequest
    ) -> PredictionSnapshot:
        """Starts or finds a line's run, and waits for it to finish.

        Outputs delivered by the run's steps are charged no matter how the run ends.

        Raises:
            PenstockError: the run can't start. DeadlineExceeded: the run did not finish.
        """
        async with self.predictions.creating(request, waits=True) as creation:
            # A run started by another process may have less time left.
            until_s = creation.snapshot.prediction.deadline_s + GRACE_S + READ_AGAIN_S
            try:
                await creation.wait(until_s - time.time())
                if creation.snapshot.record.awaits_receipts:
                    # The process that canceled the run is about to record the run's cost, or has
                    # died.
                    creation.snapshot = await self.predictions.end(creation.snapshot)
            except asyncio.CancelledError:
                if not request.is_run_again():
                    with suppress(PenstockError):  # otherwise the run ends at its deadline
                        creation.snapshot = await self.predictions.end(creation.snapshot)
                raise
            finally:
                reply = creation.snapshot.record.reply
                if reply is not None:
                    limited.settle(request.price, reply.outcomes)
        if not creation.snapshot.record.is_over:
            raise request.too_late()
        return creation.snapshot

    async def _pause(
        self, attempt: LineAttempt, error: PenstockError, drawn_s: float, left_s: float
    ) -> bool:
        """Waits before the next attempt. Returns whether another attempt may now succeed."""
        if isinstance(error, BudgetReserved):
            model = attempt.line.request.model
            account = self.limiter.account(attempt.caller, model.name, model.limited_unit)
            longest_s = min(drawn_s, MAX_RESERVED_PAUSE_S, left_s)
            return await self.limiter.wait_released(account, longest_s)
        await asyncio.sleep(min(_pause_s(error, drawn_s), left_s))
        return False


class _RunCanceled(PenstockError):
    """A line's run was canceled. Unlike a request, the run is not restarted."""

    code = Canceled.code


def _may_pass(error: PenstockError) -> bool:
    """Returns whether a line that failed with `error` may succeed later."""
    return isinstance(error, _TRANSIENT) and not isinstance(error, LargerThanBudget)


def _pause_s(error: PenstockError, drawn_s: float) -> float:
    return max(drawn_s, error.retry_after_s) if isinstance(error, Overloaded) else drawn_s
