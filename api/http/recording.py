"""Predictions, which are calls with a record.

Results are stored and can be read from any instance.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from api.dispatch.request import InferenceRequest, NewRecord, headers_of_run
from api.http.auth import AccessRules
from api.http.call import Call, ModelCall
from api.http.connection import while_connected
from api.http.inference import Inference
from api.inputs.storage import Storage
from api.predictions.creation import Creation, PredictionSnapshot, ids_of, new_prediction
from api.predictions.follower import PredictionFollower
from api.predictions.service import GRACE_S, Predictions
from api.tasks.base import Inputs
from shared.errors import DeadlineExceeded, PenstockError
from shared.messages import ItemOutcome, ReplyBody
from shared.models.catalog import Flow, Model
from shared.models.tasks import Input
from shared.models.tasks.custom import stores_files

Failure = Callable[[PredictionSnapshot], PenstockError]
"""Returns the reason a prediction failed."""


class Delivery(NamedTuple):
    """Everything needed to build the response to a call."""

    outcomes: Sequence[ItemOutcome]
    """The inputs' outcomes. For a flow, a single outcome with the flow's output."""
    deadline_s: float
    """Unix time at which to stop work on the response."""


class Recording:
    """Creates and reads callers' predictions."""

    def __init__(
        self,
        inference: Inference,
        predictions: Predictions,
        follower: PredictionFollower,
        storage: Storage,
        rules: AccessRules,
    ) -> None:
        self._inference = inference
        self._predictions = predictions
        self._follower = follower
        self._storage = storage
        self._rules = rules

    def request(
        self,
        call: ModelCall,
        model: Model,
        read: Inputs,
        *,
        digest: str,
        own_id: str = "",
        **shown: Any,
    ) -> InferenceRequest:
        """Returns the request for a prediction whose inputs are `read`.

        Args:
            model: the model that runs the prediction.
            digest: digest of the whole request.
            own_id: the ID chosen by the caller, if any.
            shown: additional fields for the prediction document.
        """
        key = call.options.idempotency_key
        prediction_id, record_id = ids_of(call.tenant, own_id, key)
        facts = msgspec.structs.replace(call.context.facts, request_id=record_id)
        stops_at_s = call.prediction_stops_at_s(model)
        prediction = new_prediction(
            model,
            facts,
            stops_at_s,
            id=prediction_id,
            input=read.raw_input,
            is_list=read.is_list,
            output_format=read.output_format,
            base_url=call.base_url,
            digest=digest,
            is_cached=read.is_repeatable and call.options.cache_write,
            **shown,
        )
        return InferenceRequest(
            facts,
            model,
            read.inputs,
            stops_at_s,
            call.options,
            read.is_repeatable,
            NewRecord(prediction, call.caller.plan.prediction_keep_s, bool(own_id or key)),
        )

    @asynccontextmanager
    async def create(
        self, call: ModelCall, request: InferenceRequest, *, waits: bool
    ) -> AsyncGenerator[Creation]:
        """Creates a prediction, or finds the one created by an identical request.

        The block may wait for the prediction to finish. Its cost is counted when it finishes,
        whether on this instance or another.

        Args:
            request: returned by the method `request`.
            waits: True if the block waits for the prediction to finish.

        Raises:
            PenstockError: as raised by `Predictions.creating`. RateLimited: the plan rejected the
                request.
            StorageFull: the results may be files, and the tenant's storage quota is used up.
        """
        new = request.new_record
        if stores_files(request.model):
            await self._storage.check(self._storage.quota_of(call.caller, "input"))
        longest_s = call.options.done_within_s(request.model.deadline)
        limits = self._inference.limit(call, request.model, request.inputs, longest_s)
        async with limits as limited:
            hold = limited.hold(new.prediction, self._follower.follow)
            creating = self._predictions.creating(request, waits=waits, hold=hold)
            async with creating as creation:
                if not creation.is_new:
                    limited.settle(request.price, [])
                yield creation
                if creation.is_new and (reply := creation.snapshot.record.reply) is not None:
                    limited.settle(request.price, reply.outcomes)

    async def start(self, call: ModelCall, request: InferenceRequest) -> PredictionSnapshot:
        """Creates or finds a prediction without waiting for it to finish.

        Raises:
            PenstockError: as raised by `create`.
        """
        async with self.create(call, request, waits=False) as creation:
            return creation.snapshot

    @asynccontextmanager
    async def compute(
        self,
        call: ModelCall,
        served: Model,
        inputs: Sequence[Input],
        run_request: Callable[[], Awaitable[InferenceRequest]],
        *,
        is_repeatable: bool,
        failure: Failure = lambda run: run.failure,
    ) -> AsyncGenerator[Delivery]:
        """Runs `inputs` on a model, or runs a flow. The block builds the response.

        Args:
            served: the model or flow that the endpoint serves.
            run_request: returns the request for a flow's prediction.
            is_repeatable: True if identical inputs produce identical results.
            failure: returns the reason a run failed, worded for the endpoint.

        Raises:
            PenstockError: as raised by `Inference.compute`. For a flow: the flow failed, or an
                error raised by `create`. DeadlineExceeded: the run took too long.
        """
        if isinstance(served, Flow):
            request = await run_request()
            reply = await self._run(call, request, failure)
            yield Delivery(reply.delivered, request.deadline_s)
        else:
            async with self._inference.compute(
                call, served, inputs, is_repeatable=is_repeatable
            ) as response:
                yield Delivery(response.outcomes, call.answer_by_s(served))

    async def _run(self, call: ModelCall, request: InferenceRequest, failure: Failure) -> ReplyBody:
        """Returns a flow run's reply. Cancels the run once no caller is waiting."""
        async with self.create(call, request, waits=True) as creation:
            limit_s = request.deadline_s - time.time() + GRACE_S
            prediction = creation.snapshot.prediction
            try:
                await while_connected(call.http, creation.wait(limit_s), call.check_key)
            except BaseException:
                with suppress(PenstockError):  # otherwise the run ends at its deadline
                    await self._predictions.end(creation.snapshot)
                raise
        record = creation.snapshot.record
        if not record.is_over:
            raise DeadlineExceeded
        if record.reply is not None:
            call.context.headers |= headers_of_run(prediction, record.reply.outcomes)
        call.context.headers["location"] = f"/v1/predictions/{prediction.id}"
        if record.state != "succeeded" or record.reply is None:
            raise failure(creation.snapshot)
        return record.reply

    async def find(self, call: Call, prediction_id: str) -> PredictionSnapshot:
        """Returns a prediction's current state, no matter which endpoint created it.

        Raises:
            NotFound: the tenant has no such prediction, or it has expired.
            Forbidden: the key is not allowed to do this with results from that endpoint or model.
        """
        snapshot = await self._predictions.read(call.tenant, prediction_id)
        self._rules.check(call.caller, call.http.method, call.route, snapshot.prediction)
        return snapshot

    def is_visible(self, call: Call, snapshot: PredictionSnapshot) -> bool:
        """Returns whether the caller can see this prediction in a list of predictions."""
        return self._rules.may_see(call.caller, call.route, snapshot.prediction)
