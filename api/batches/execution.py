"""Computes one line of a batch, for as long as that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prometheus_client import Counter

from api.batches.documents import BatchCreated
from api.batches.lines import BatchLine, answered, not_run, refused
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse, RequestOptions
from api.endpoints import ENDPOINTS
from api.endpoints.base import ReplyTools
from api.inputs.image_codec import ImageCodec
from api.limits.limited_request import LimitedRequest
from api.limits.limiter import Limiter
from shared.backoff import backoff
from shared.errors import Canceled, DeadlineExceeded, Overloaded, PenstockError, Unavailable
from shared.stores.objects import ObjectStore
from shared.tenants.plan import Caller

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
REPLY_LIMIT_S = 60.0
"""For the encoding of the images of one line."""
LANE = "batch"

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


class LineAnswer(NamedTuple):
    """The end of a line: a line of the output file, or of the error file."""

    data: bytes
    end: Literal["completed", "failed", "not_run"]
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineExecutor:
    """Runs lines through the dispatcher, in the lane `batch`.

    What keeps a line from being computed now is tried again until its batch expires: a full
    instance, a budget that is spent, a broker out of reach, a deadline, a worker that gave up.
    What is wrong with the line itself ends it.
    """

    dispatcher: Dispatcher
    objects: ObjectStore
    image_codec: ImageCodec
    limiter: Limiter

    async def run(
        self,
        batch: BatchCreated,
        caller: Caller,
        line: BatchLine,
        is_run_again: Callable[[], bool] = lambda: True,
    ) -> LineAnswer:
        """Computes a line. A canceled call leaves it undone.

        Args:
            batch: the batch.
            caller: who pays.
            line: of the batch.
            is_run_again: whether a line that a canceled call leaves undone is computed later.
        """
        pauses, attempt = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while time.time() < batch.expires_at_s:
            request = _request(batch, line, attempt, is_run_again)
            response = None
            try:
                async with self._limited(batch, caller, request) as limited:
                    response = await self.dispatcher.dispatch(request)
                    body = await self._reply(batch, line, response, limited)
            except _TRANSIENT as error:
                # Record and rows of the id have this end, and it would only get it again.
                attempt += response is not None
                left_s = max(0.0, batch.expires_at_s - time.time())
                await asyncio.sleep(min(_pause_s(error, next(pauses)), left_s))
                continue
            except PenstockError as error:
                LINES.labels("failed").inc()
                return LineAnswer(refused(batch, line, request.request_id, error), "failed")
            LINES.labels("completed").inc()
            tokens = sum(outcome.receipt.tokens or 0 for outcome in response.outcomes)
            answer = answered(batch, line, request.request_id, body)
            return LineAnswer(answer, "completed", tokens)
        LINES.labels("not_run").inc()
        data = not_run(batch, line.number, line.custom_id, *NOT_RUN["expired"])
        return LineAnswer(data, "not_run")

    def _limited(
        self, batch: BatchCreated, caller: Caller, request: InferenceRequest
    ) -> LimitedRequest:
        share = batch.price_share
        return LimitedRequest(
            self.limiter, caller, request.model, request.inputs, {}, price_share=share
        )

    async def _reply(
        self,
        batch: BatchCreated,
        line: BatchLine,
        response: InferenceResponse,
        limited: LimitedRequest,
    ) -> bytes:
        """The answer to a line. It is charged if there is one."""
        tools = ReplyTools(self.objects, self.image_codec, time.time() + REPLY_LIMIT_S)
        try:
            with response:
                response.raise_failed()
                return await ENDPOINTS[batch.endpoint].reply(line.request, response.outcomes, tools)
        finally:
            limited.settle(response.price, response.outcomes, is_delivered=response.is_delivered)


def _request(
    batch: BatchCreated, line: BatchLine, attempt: int, is_run_again: Callable[[], bool]
) -> InferenceRequest:
    model = line.request.model
    return InferenceRequest(
        request_id=_request_id(batch, line, attempt),
        model=model,
        tenant=batch.tenant,
        key_id=batch.key_id,
        weight=batch.weight,
        plan=batch.plan_name,
        batch_id=batch.id,
        price_share=batch.price_share,
        inputs=line.request.inputs,
        deadline_s=min(batch.expires_at_s, time.time() + model.deadline.longest_s),
        is_repeatable=line.request.is_repeatable,
        # A row of a line that is computed twice is the same row, its time included.
        options=RequestOptions(received_at_s=batch.created_at_s, lane=LANE),
        is_run_again=is_run_again,
    )


def _request_id(batch: BatchCreated, line: BatchLine, attempt: int) -> str:
    """The same whenever a line is computed again, so that its job and its rows are the same too."""
    return f"{batch.id}-{line.number}" + (f"-{attempt}" if attempt else "")


def _pause_s(error: PenstockError, drawn_s: float) -> float:
    return max(drawn_s, error.retry_after_s) if isinstance(error, Overloaded) else drawn_s
