"""Runs a call's inputs on a model while the caller waits, within the caller's limits."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import msgspec

from api.dispatch.admission import Admission
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.request import InferenceRequest, InferenceResponse
from api.http.call import ModelCall
from api.http.connection import while_connected
from api.inputs.source_images import ImageCaller
from api.inputs.storage import StorageQuota
from api.limits.limited_request import LimitedRequest
from api.limits.limiter import Limiter
from api.limits.preparation import Preparation
from shared.models.catalog import Model
from shared.models.tasks import Input, Result


class Inference:
    """Runs inputs on models, and charges the caller for results that were delivered."""

    def __init__(self, dispatcher: Dispatcher, limiter: Limiter, admission: Admission) -> None:
        self._dispatcher = dispatcher
        self._limiter = limiter
        self._admission = admission

    @asynccontextmanager
    async def compute(
        self, call: ModelCall, model: Model, inputs: Sequence[Input], *, is_repeatable: bool = True
    ) -> AsyncGenerator[InferenceResponse]:
        """Computes `inputs`. The block builds the response from the results.

        The request is charged if the block exits without an error. Rows, response headers, and
        budgets all agree.

        Args:
            is_repeatable: True if identical inputs produce identical results, so the cache may
                serve them.

        Raises:
            PenstockError: an item failed, or the request was rejected. RateLimited: the plan
                rejected the request.
        """
        context = call.context
        due_s = call.answer_by_s(model)
        request = InferenceRequest(context.facts, model, inputs, due_s, call.options, is_repeatable)
        async with self.limit(call, model, inputs, call.options.limit_s(model.deadline)) as limited:
            response = await while_connected(
                call.http, self._dispatcher.dispatch(request), call.check_key
            )
            context.has_rows = True
            try:
                with response:
                    response.raise_if_failed()
                    yield response
            finally:
                context.headers |= response.headers()
                limited.settle(
                    response.price, response.outcomes, is_delivered=response.is_delivered
                )

    async def ask(
        self, call: ModelCall, model: Model, inputs: Sequence[Input]
    ) -> list[Result | None]:
        """Returns a worker's results for `inputs`, which are used to build the call's items.

        This step is free. Its work counts toward the per-minute limits as part of the request, even
        if the request is rejected afterward. The rows for this step have a separate ID.

        Raises:
            PenstockError: an item failed, or there is no capacity. ClientGone: the caller hung up.
            RateLimited: a per-minute limit is reached.
        """
        facts = call.context.facts
        work = sum(value.estimate_work(model) for value in inputs)
        await self.preparation(call, model).begin(work)
        facts = msgspec.structs.replace(
            facts, request_id=f"{facts.request_id}-before", price_share=0.0
        )
        request = InferenceRequest(facts, model, inputs, call.answer_by_s(model), call.options)
        response = await while_connected(
            call.http, self._dispatcher.dispatch(request), call.check_key
        )
        with response:
            response.raise_if_failed()
            return [outcome.result for outcome in response.outcomes]

    def check_room(self, call: ModelCall, model: Model, items: int) -> None:
        """Rejects requests that `compute` would reject, before the endpoint prepares their inputs.

        Use it only for requests that rarely hit the cache.

        Raises:
            Overloaded: there is no room for the items, or not enough time until the deadline.
        """
        due_s = call.answer_by_s(model)
        request = InferenceRequest(call.context.facts, model, (), due_s, call.options)
        self._admission.check(request.demand(items), remaining_s=due_s - time.time())

    def limit(
        self, call: ModelCall, model: Model, inputs: Sequence[Input], longest_s: float
    ) -> LimitedRequest:
        """Returns a context that enforces the caller's limits. See LimitedRequest."""
        facts = call.context.facts
        return LimitedRequest(
            self._limiter,
            call.caller,
            model,
            inputs,
            call.context.headers,
            received_at_s=facts.received_at_s,
            longest_s=longest_s,
            price_share=facts.price_share,
            preparation=call.preparation,
        )

    def file_owner(
        self,
        call: ModelCall,
        model: Model,
        quota: StorageQuota,
        deadline_s: float,
        keep_s: float = 0.0,
    ) -> ImageCaller:
        """Returns the owner of the files in a body field.

        Args:
            quota: the tenant's storage quota, including the field name to use in errors.
            deadline_s: Unix time at which to stop work on the files.
            keep_s: how long to keep a file that belongs to the request, in seconds.
        """
        begin = self.preparation(call, model).begin
        return ImageCaller(call.tenant, quota, call.base_url, deadline_s, keep_s, begin)

    def preparation(self, call: ModelCall, model: Model) -> Preparation:
        """Returns a counter for work done for the call before it runs `model`."""
        if call.preparation is None:
            call.preparation = Preparation(
                self._limiter,
                call.caller,
                model,
                call.context.headers,
                received_at_s=call.context.facts.received_at_s,
            )
        return call.preparation
