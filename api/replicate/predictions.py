"""Replicate's Predictions API (https://replicate.com/docs/reference/http).

A version is a model's name in the catalog, or the ID in its entry. Any owner is accepted, because
names are unique here. Every path is served both with and without /v1, because some clients add the
prefix themselves.

Field names follow Replicate's API, and those in `input` follow Replicate's Stable Diffusion models.
A body is converted to a request with the model, the source image, and the request's digest.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Path, Query
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from api.bodies import MAX_URL_CHARS, Body
from api.http.call import Call, ModelCall
from api.http.connection import while_connected
from api.http.encode_json import encode_json
from api.http.fast_route import FastProblemRoute
from api.http.inference import Inference
from api.http.injection import injectable
from api.http.list_query import (
    CreatedAfter,
    CreatedBefore,
    Include,
    KeyId,
    OfModel,
    model_name,
    unix_s,
)
from api.http.openapi import NOT_OVER, OF_LIMITS, Responses, empty, problems, references, success
from api.http.recording import Recording
from api.http.router import Router
from api.inputs.source_images import SourceImages
from api.inputs.storage import Storage
from api.predictions.creation import OWNER, digest_of, find_version
from api.predictions.filter import PredictionFilter
from api.predictions.progress import PredictionProgress
from api.predictions.results import ResultFetcher
from api.predictions.service import CALLER_ID, Predictions
from api.problem_details import ProblemRoute
from api.replicate.prediction_lines import PredictionsEndpoint
from api.replicate.prediction_replies import PredictionReplies
from api.replicate.replies import PredictionReply, PredictionsPage
from api.tasks import read_inputs
from api.tasks.base import Inputs
from api.tasks.image import plan_images
from shared.errors import BadInput
from shared.models.catalog import Catalog, Model
from shared.models.tasks.custom import CustomInput
from shared.predictions import body_of
from shared.settings import ApiSettings
from shared.stores.objects import UrlSigner
from shared.stores.prediction_store import ListedRecord
from shared.stores.record_state import State
from shared.tenants.api_key import holds_key
from shared.tenants.rules import IS_A_KEY
from shared.webhooks.event import WebhookUrlForbidden, parse_webhook_url

WebhookEvent = Literal["start", "output", "logs", "completed"]
WEBHOOK_EVENTS: tuple[WebhookEvent, ...] = ("start", "output", "logs", "completed")
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]", max_length=MAX_URL_CHARS)]
ContextKey = Annotated[str, Field(max_length=64)]
ContextValue = Annotated[str, Field(max_length=4096)]
Context = Annotated[dict[ContextKey, ContextValue], Field(max_length=64)]

CREATION_ERRORS = (401, 404, 408, 413, 422, 429, 499, 503, 504)
"""Status codes documented in OpenAPI for routes that create predictions."""

EARLY_S = 0.25
"""Clients that ask to wait n seconds disconnect half a second after that. The response is sent this
long before the n seconds are up.
"""
_FILTERS = frozenset(
    ("created_after", "created_before", "model", "status", "api_key_id", "include")
)
_CURSOR = re.compile(r"([0-9]{1,12}(\.[0-9]{1,9})?(-[A-Za-z0-9_.:-]{1,128})?)?")
"""Creation time and record ID of the last prediction checked for the previous page. Release 0.1.0
omitted the ID.
"""

# Used only for the OpenAPI document. The routes do the validation, so that we control the wording
# of errors.
Cursor = Annotated[str, Query(json_schema_extra={"pattern": f"^{_CURSOR.pattern}$"})]
CallerId = Annotated[str, Path(json_schema_extra={"pattern": f"^{CALLER_ID.pattern}$"})]


class PredictionBody(Body):
    """A prediction with the model in the path."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"input": {"prompt": "a large red circle on a white background", "seed": 7}}
        }
    )

    input: dict[str, Any] = Field(
        description="The model's inputs, as described in its `openapi_schema`."
    )
    webhook: Url | None = Field(None, description="URL that receives the events below, signed.")
    webhook_events_filter: Annotated[list[WebhookEvent], Field(fail_fast=True)] | None = Field(
        None, description="Events to send. Default: all."
    )
    webhook_completed: Url | None = Field(
        None, description="Older form: URL that receives only `completed`."
    )
    stream: bool | None = Field(
        None, description="Accepted, without effect: every prediction can be streamed."
    )
    context: Context | None = Field(
        None, description="Available to a custom class as `current_scope().context`."
    )

    @model_validator(mode="after")
    def _check_webhooks(self) -> PredictionBody:
        if self.webhook and self.webhook_completed:
            raise ValueError("webhook and webhook_completed are mutually exclusive")
        return self

    @property
    def webhook_target(self) -> tuple[str, tuple[str, ...]]:
        """The webhook's URL and events. Both are empty if there is no webhook."""
        if self.webhook_completed:
            return self.webhook_completed, ("completed",)
        if not self.webhook:
            return "", ()
        chosen = (
            WEBHOOK_EVENTS if self.webhook_events_filter is None else self.webhook_events_filter
        )
        return self.webhook, tuple(event for event in WEBHOOK_EVENTS if event in chosen)


class VersionedBody(PredictionBody):
    """A prediction with the model named in `version`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"version": "all-MiniLM-L6-v2", "input": {"text": "a cat on a mat"}}
        }
    )

    version: str = Field(
        min_length=1,
        max_length=512,
        description="A model name, `owner/name`, or a version ID.",
    )


@injectable
class PredictionCreator:
    """Creates predictions from bodies."""

    def __init__(
        self,
        settings: ApiSettings,
        catalog: Catalog,
        inference: Inference,
        recording: Recording,
        storage: Storage,
        source_images: SourceImages,
        replies: PredictionReplies,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._inference = inference
        self._recording = recording
        self._storage = storage
        self._source_images = source_images
        self._replies = replies

    async def create(
        self,
        call: ModelCall,
        body: PredictionBody,
        model: Model,
        *,
        owner: str,
        own_id: str = "",
        deployment: str = "",
    ) -> Response:
        """Creates the prediction described by a body, and waits as long as the caller asked it to.

        Args:
            model: the model that computes the prediction.
            owner: the model owner specified by the caller.
            own_id: the ID chosen by the caller, if any.
            deployment: `owner/name` of the deployment in the path, if any.

        Raises:
            PenstockError: raised as by `Recording.create`.
            InvalidFields: the input is not valid for the model.
            BadInput: events can never be delivered to the webhook's URL.
            StorageFull: the tenant's storage quota has no room for the source image.
            Overloaded: too many images are waiting to be decoded.
            DeadlineExceeded: the source image was not decoded in time.
            Unavailable: the object store is unreachable.
        """
        call.use(model)
        _check_names(id=own_id, owner=owner, deployment=deployment)
        model, read = await self._read(call, body, model)
        webhook, events = _webhook_of(body, allow_private=self._settings.webhooks_private)
        is_repeatable = own_id or call.options.idempotency_key
        new = self._recording.request(
            call,
            model,
            read,
            digest=await _digest(body, model) if is_repeatable else "",
            own_id=own_id,
            owner=owner,
            webhook=webhook,
            webhook_events=events,
            deployment=deployment,
        )
        wait_s = max(0.0, call.options.wait_s - EARLY_S)
        async with self._recording.create(call, new, waits=wait_s > 0) as creation:
            if wait_s:
                # If the caller disconnects, the function exits here and the prediction continues.
                waiting = creation.wait(wait_s - call.context.total_ms / 1000)
                await while_connected(call.http, waiting, call.check_key)
        return await self._replies.answer_creation(creation.snapshot, is_new=creation.is_new)

    async def _read(
        self, call: ModelCall, body: PredictionBody, model: Model
    ) -> tuple[Model, Inputs]:
        """Returns a body's inputs, and the model that runs on them."""
        stops_at_s, keep_s = call.prediction_stops_at_s(model), call.caller.plan.prediction_keep_s
        if keep_s is None:
            keep_s = self._settings.prediction_keep_s
        left_s = stops_at_s - time.time()
        quota = self._storage.quota_of(call.caller, "image")
        caller = self._inference.file_owner(call, model, quota, stops_at_s, keep_s=keep_s + left_s)
        reading = read_inputs(body.input, model, caller, self._source_images)
        read = await while_connected(call.http, reading)
        for task_input in read.inputs:
            if isinstance(task_input, CustomInput):
                task_input.context = body.context or {}
        return plan_images(read, model, self._catalog)


def _webhook_of(body: PredictionBody, *, allow_private: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the webhook URL and its events.

    Rejects URLs to which events could never be delivered.
    """
    url, events = body.webhook_target
    if url:
        field = "webhook" if body.webhook else "webhook_completed"
        try:
            parse_webhook_url(url, allow_private=allow_private)
        except WebhookUrlForbidden as error:
            raise BadInput(f"{field}: {error.message}", field=field) from error
    return url, events


async def _digest(body: PredictionBody, model: Model) -> str:
    """Returns a digest of the body and the model, which is the same for identical requests."""
    # Without a context, the digest is the same as in release 0.1.0, which does not have this field.
    left_out = {"version"} if body.context is not None else {"version", "context"}
    fields = body.model_dump(exclude=left_out)
    for name, value in fields["input"].items():
        if isinstance(value, str) and len(value) > MAX_URL_CHARS:
            # Encoding a 20 MB image as JSON would block the event loop for 130 ms, so the image is
            # replaced by its digest.
            fields["input"][name] = await asyncio.to_thread(digest_of, value)
    return digest_of(json.dumps([model.name, fields], sort_keys=True))


def creation_responses() -> Responses:
    """Returns the responses to declare for a route that creates or finds predictions."""
    answers: Responses = {
        200: success(
            "The prediction created earlier by the same request.",
            PredictionReply,
            "Location",
            "Idempotent-Replayed",
            *OF_LIMITS,
        ),
        201: success("The new prediction.", PredictionReply, "Location", *OF_LIMITS),
    }
    refused = problems(*CREATION_ERRORS)
    for response in refused.values():
        response["headers"] |= references(*OF_LIMITS)
    return answers | refused


router = Router(scope="predictions", route_class=ProblemRoute, tags=["predictions"])
creation_router = Router(scope="predictions", route_class=FastProblemRoute, tags=["predictions"])


@creation_router.post(
    "/predictions",
    summary="Create a prediction",
    status_code=201,
    body=VersionedBody,
    takes=("Prefer", "Cancel-After"),
    responses=creation_responses(),
    lines=PredictionsEndpoint(),
)
async def create(
    call: ModelCall,
    catalog: Catalog,
    creator: PredictionCreator,
) -> Response:
    """Creates a prediction with the model named in `version`.

    Responds immediately or, with `Prefer: wait`, when the prediction finishes.
    """
    body = await call.read_json(VersionedBody)
    model = find_version(catalog, body.version)
    return await creator.create(call, body, model, owner=_owner(body.version))


@router.put(
    "/predictions/{prediction_id}",
    summary="Create a prediction with a custom ID",
    status_code=201,
    body=VersionedBody,
    takes=("Prefer", "Cancel-After"),
    responses=creation_responses(),
)
async def put(
    call: ModelCall,
    catalog: Catalog,
    creator: PredictionCreator,
    prediction_id: CallerId,
) -> Response:
    """Repeating a request returns the same prediction.

    A different request with the same ID is rejected (422).
    """
    if not CALLER_ID.fullmatch(prediction_id):
        raise BadInput(
            "id: must be 1 to 64 letters, digits, '.', '_' or '-', start with a letter or digit, "
            "and not start with 'pred_'",
            field="id",
        )
    body = await call.read_json(VersionedBody)
    model = find_version(catalog, body.version)
    owner = _owner(body.version)
    return await creator.create(call, body, model, owner=owner, own_id=prediction_id)


@router.post(
    "/models/{owner}/{name}/predictions",
    summary="Create a prediction of a model",
    status_code=201,
    body=PredictionBody,
    takes=("Prefer", "Cancel-After"),
    responses=creation_responses(),
)
async def create_of_model(
    call: ModelCall,
    catalog: Catalog,
    creator: PredictionCreator,
    owner: str,
    name: str,
) -> Response:
    """Creates a prediction with the model `name`. Any owner is accepted."""
    model = catalog.find(name)
    body = await call.read_json(PredictionBody)
    return await creator.create(call, body, model, owner=owner)


@router.post(
    "/deployments/{owner}/{name}/predictions",
    summary="Create a prediction of a deployment",
    description=(
        "Creates a prediction of the model `name`. Each model in the catalog has one deployment "
        "of the same name."
    ),
    status_code=201,
    body=PredictionBody,
    takes=("Prefer", "Cancel-After"),
    responses=creation_responses(),
)
async def create_of_deployment(
    call: ModelCall,
    catalog: Catalog,
    creator: PredictionCreator,
    owner: str,
    name: str,
) -> Response:
    """Creates a prediction with the model that shares the deployment's name."""
    model = catalog.find(name)
    body = await call.read_json(PredictionBody)
    return await creator.create(call, body, model, owner=owner, deployment=f"{owner}/{name}")


@router.get(
    "/predictions",
    summary="List your predictions",
    reply=PredictionsPage,
    reply_text="A page of predictions.",
    errors=(422,),
)
async def list_all(
    call: Call,
    recording: Recording,
    predictions: Predictions,
    url_signer: UrlSigner,
    cursor: Cursor = "",
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    model: OfModel = "",
    status: Annotated[State | None, Query(description="Only predictions in this state.")] = None,
    api_key_id: KeyId = "",
    include: Include = None,
) -> Response:
    """Lists predictions in pages, newest first. `next` is the URL of the next page.

    Predictions the key may not read are omitted, so some pages may be shorter. If few predictions
    match the filters, a page may be empty even though `next` points to another page.
    """
    if not _CURSOR.fullmatch(cursor):
        raise BadInput(
            "cursor: is invalid; use the cursor from the `next` URL of a page", field="cursor"
        )
    wanted = PredictionFilter(
        model_name(model),
        status,
        api_key_id,
        unix_s(created_after, -math.inf),
        unix_s(created_before, math.inf),
    )
    snapshots, last = await predictions.page(call.tenant, wanted, _position(cursor))
    bodies = [
        body_of(*snapshot, url_signer)
        | ({"api_key_id": snapshot.prediction.key_id or None} if include else {})
        for snapshot in snapshots
        if recording.is_visible(call, snapshot)
    ]
    following = None if last is None else _next_page(call, last)
    return encode_json({"previous": None, "next": following, "results": bodies})


def _position(cursor: str) -> ListedRecord | None:
    """Returns where the previous page ended, or None if there is no previous page."""
    if not cursor:
        return None
    created_at_s, _, record = cursor.partition("-")
    return ListedRecord(record, float(created_at_s))


def _next_page(call: Call, last: ListedRecord) -> str:
    """Returns the URL of the next page, with the same filters."""
    query = {name: text for name, text in call.http.query_params.items() if name in _FILTERS}
    cursor = f"{last.created_at_s!r}-{last.record}"
    return f"{call.base_url}/v1/predictions?{urlencode({'cursor': cursor, **query})}"


@router.get(
    "/predictions/{prediction_id}",
    summary="Get a prediction",
    reply=PredictionReply,
    reply_text="The prediction in its current state.",
)
async def get(
    call: Call,
    recording: Recording,
    progress: PredictionProgress,
    replies: PredictionReplies,
    prediction_id: str,
) -> Response:
    """Returns the prediction in its current state."""
    snapshot = await recording.find(call, prediction_id)
    queue = await progress.position(snapshot)
    return encode_json(await replies.body(snapshot, queue))


@router.post(
    "/predictions/{prediction_id}/cancel",
    summary="Cancel a prediction",
    reply=PredictionReply,
    reply_text="The prediction in its current state.",
)
async def cancel(
    call: Call,
    recording: Recording,
    predictions: Predictions,
    replies: PredictionReplies,
    prediction_id: str,
) -> Response:
    """Cancels the prediction.

    Its worker stops at the next step. A finished prediction is not changed.
    """
    await recording.find(call, prediction_id)
    canceled = await predictions.cancel(call.tenant, prediction_id)
    return encode_json(await replies.body(canceled))


@router.delete(
    "/predictions/{prediction_id}",
    summary="Delete a prediction",
    status_code=204,
    response_class=Response,
    answers={204: empty("The prediction is deleted.")},
    conflict=NOT_OVER,
)
async def delete(
    call: Call,
    recording: Recording,
    predictions: Predictions,
    result_fetcher: ResultFetcher,
    prediction_id: str,
) -> Response:
    """Deletes a finished prediction: record, results, and webhook log.

    If the prediction is still running, cancel it first. A cached result that could serve the same
    request again is kept until the cache drops it.
    """
    await recording.find(call, prediction_id)
    await predictions.delete(call.tenant, prediction_id, result_fetcher.delete)
    return Response(status_code=204)


def _check_names(**names: str) -> None:
    """Rejects path names that may contain a key, without repeating them in the error."""
    for field, name in names.items():
        if holds_key(name):
            raise BadInput(f"{field}: {IS_A_KEY}", field=field)


def _owner(version: str) -> str:
    owner, slash, _ = version.partition("/")
    return owner if slash else OWNER
