"""Computes one line of a batch, for as long as that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from api.batch_runner.lines import ENDPOINTS, BatchLine, answered, not_run, refused
from api.batches.documents import BatchCreated, LineAnswer
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse, RequestOptions
from api.errors import BudgetReserved, RateLimited
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.limits.limited_request import LimitedRequest
from api.limits.limiter import Limiter
from api.openai.endpoint import LineCaller, ReplyTools
from shared.backoff import backoff
from shared.charge import price_of
from shared.errors import Canceled, DeadlineExceeded, Overloaded, PenstockError, Unavailable
from shared.messages import RequestFacts
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


class SegmentProgress:
    """Progress of one turn of a batch, and whether it is worth waiting for more.

    Args:
        should_yield: returns whether another batch could run in place of this one.
        attempts: ends that the records of lines have, by the numbers of the lines. They outlive the
            turn, as the next one would get these ends again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        should_yield: Callable[[], bool],
        attempts: dict[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attempts = attempts
        self.segment = 0
        """The number of the segment whose lines run."""
        self._should_yield = should_yield
        self._clock = clock
        self._moved_s = clock()
        self.ended_lines = 0
        self.is_stalled = False
        """True if the rest of the lines waits for a later turn."""

    def note_end(self, line: BatchLine) -> None:
        """Records that a line ended."""
        self.attempts.pop(line.number, None)
        self._moved_s = self._clock()
        self.ended_lines += 1

    def note_failure(self, line: BatchLine, error: PenstockError, *, has_ended: bool) -> None:
        """Records that a line failed and may be tried again.

        Args:
            line: that failed.
            error: why.
            has_ended: whether its items had outcomes, which its records and rows have now.
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
        if self._clock() - self._moved_s >= STALLED_S and self._should_yield():
            self.stall()
        return not self.is_stalled


@dataclass(frozen=True, slots=True)
class LineExecutor:
    """Runs lines through the dispatcher, at `batch` priority.

    Temporary failures are retried until the batch expires: a full instance, an unreachable
    broker, a deadline, a worker that gave up. If the rest of a budget is reserved, the line is
    retried when a request ends. If the budget is spent, or if nothing moves while others wait, the
    line waits for a later turn of its batch. An error in the line itself ends it.
    """

    dispatcher: Dispatcher
    objects: ObjectStore
    image_codec: ImageCodec
    limiter: Limiter
    source_images: SourceImages

    async def run(
        self,
        batch: BatchCreated,
        caller: Caller,
        line: BatchLine,
        progress: SegmentProgress,
        is_run_again: Callable[[], bool] = lambda: True,
    ) -> LineAnswer | None:
        """Computes a line. A canceled call leaves it undone.

        Args:
            batch: the batch.
            caller: who pays.
            line: of the batch.
            progress: of this turn of the batch.
            is_run_again: whether a line that a canceled call leaves undone is computed later.

        Returns:
            None if it has to wait for a later turn.
        """
        pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while time.time() < batch.expires_at_s:
            attempt = progress.attempts.get(line.number, 0)
            response = None
            try:
                inputs = await self._inputs(batch, line)
                request = _request(batch, line, inputs, attempt, is_run_again)
                operation = f"{group_of(batch, progress.segment)}/{line.number}"
                async with self._limited(batch, caller, request, operation) as limited:
                    limited.wake_next()
                    response = await self._dispatched(request, limited)
                    body = await self._reply(batch, line, response, limited)
            except _TRANSIENT as error:
                progress.note_failure(line, error, has_ended=response is not None)
                if not progress.is_worth_waiting(error):
                    return None
                left_s = max(0.0, batch.expires_at_s - time.time())
                if await self._pause(error, caller, line, next(pauses), left_s):
                    pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
                continue
            except PenstockError as error:
                progress.note_end(line)
                LINES.labels("failed").inc()
                request_id = _request_id(batch, line, attempt)
                return LineAnswer(refused(batch, line, request_id, error), "failed")
            progress.note_end(line)
            LINES.labels("completed").inc()
            tokens = sum(outcome.receipt.tokens or 0 for outcome in response.outcomes)
            answer = answered(batch, line, request.facts.request_id, body)
            return LineAnswer(answer, "completed", tokens)
        LINES.labels("not_run").inc()
        data = not_run(batch, line.number, line.custom_id, *NOT_RUN["expired"])
        return LineAnswer(data, "not_run")

    async def _inputs(self, batch: BatchCreated, line: BatchLine) -> Sequence[Input]:
        model = line.request.model
        deadline_s = min(batch.expires_at_s, time.time() + model.deadline.longest_s)
        caller = LineCaller(batch.tenant, batch.base_url, deadline_s, self.source_images)
        return await ENDPOINTS[batch.endpoint].inputs(line.request, caller)

    async def _pause(
        self, error: PenstockError, caller: Caller, line: BatchLine, drawn_s: float, left_s: float
    ) -> bool:
        """Waits before the next try. Returns whether something has changed for it."""
        if isinstance(error, BudgetReserved):
            model = line.request.model
            account = self.limiter.account(caller, model.name, model.definition.unit)
            longest_s = min(drawn_s, MAX_RESERVED_PAUSE_S, left_s)
            return await self.limiter.wait_released(account, longest_s)
        await asyncio.sleep(min(_pause_s(error, drawn_s), left_s))
        return False

    def _limited(
        self, batch: BatchCreated, caller: Caller, request: InferenceRequest, operation: str
    ) -> LimitedRequest:
        return LimitedRequest(
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
    return InferenceRequest(
        facts=facts,
        model=model,
        inputs=inputs,
        deadline_s=min(batch.expires_at_s, time.time() + model.deadline.longest_s),
        is_repeatable=line.request.is_repeatable,
        options=RequestOptions(),
        is_run_again=is_run_again,
    )


def _request_id(batch: BatchCreated, line: BatchLine, attempt: int) -> str:
    """Returns an id that is the same each time a line is computed, as are its job and its rows."""
    return f"{batch.id}-{line.number}" + (f"-{attempt}" if attempt else "")


def _pause_s(error: PenstockError, drawn_s: float) -> float:
    return max(drawn_s, error.retry_after_s) if isinstance(error, Overloaded) else drawn_s
