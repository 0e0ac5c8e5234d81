"""The Predictions API, as Replicate's clients call it (https://replicate.com/docs/reference/http).

A version is the name of a model in the catalog, or the id that its entry gives; an owner is
anything, since names are unique here. Every path is served with and without /v1, because clients
differ in who adds it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.dispatch.job_sender import OUTCOME_BYTES
from api.http import openapi
from api.http.dependencies import Dependencies
from api.http.disconnect import while_connected
from api.http.fast_route import IS_HEAD
from api.http.idempotency import REPLAYED
from api.http.openapi_headers import LAST_EVENT_ID
from api.http.request import ApiRequest, authenticate, open_request
from api.inputs.source_pictures import Caller
from api.predictions.event_stream import KINDS
from api.predictions.sender import NewPrediction
from api.predictions.service import CALLER_ID, PredictionSnapshot
from api.predictions.versions import OWNER, find_version, version_of
from api.problem_details import ProblemRoute
from api.schemas.replicate import LONGEST_URL, PredictionBody, VersionedBody
from api.schemas.replicate_replies import PredictionReply, PredictionsPage
from api.tasks import read_inputs
from shared.catalog import Model
from shared.errors import BadInput
from shared.messages import Item
from shared.predictions import Prediction, body_of, record_of
from shared.stores.cache import cache_key
from shared.tasks import Input
from shared.usage.charge import price_of
from shared.webhook_urls import WebhookUrlForbidden, parse_webhook_url

router = APIRouter(route_class=ProblemRoute, tags=["predictions"])

EARLY_S = 0.25
"""Clients that wait n seconds hang up half a second later. The answer is sent this long before
n."""
_CURSOR = re.compile(r"([0-9]{1,12}(\.[0-9]{1,9})?)?")

# For the OpenAPI document only. The routes validate, so that errors have our wording.
Cursor = Annotated[str, Query(json_schema_extra={"pattern": f"^{_CURSOR.pattern}$"})]
CallerId = Annotated[str, Path(json_schema_extra={"pattern": f"^{CALLER_ID.pattern}$"})]
_ONE: openapi.Responses = {
    200: openapi.success("The prediction in its current state.", PredictionReply),
    **openapi.problems(401, 404, 503),
}


@router.post(
    "/predictions",
    summary="Create a prediction",
    status_code=201,
    openapi_extra=openapi.prediction_body(VersionedBody),
    responses=openapi.creation_responses(),
)
async def create(request: Request) -> Response:
    """Creates a prediction of the model that `version` names.

    Answers at once, or with `Prefer: wait` when it ends.
    """
    call = open_request(request)
    body = await call.read_json(VersionedBody)
    model = find_version(call.dependencies.catalog, body.version)
    return await _create(call, body, model, owner=_owner(body.version))


@router.put(
    "/predictions/{prediction_id}",
    summary="Create a prediction with an id of your own",
    status_code=201,
    openapi_extra=openapi.prediction_body(VersionedBody),
    responses=openapi.creation_responses(),
)
async def put(request: Request, prediction_id: CallerId) -> Response:
    """The same request finds the same prediction again.

    Another request with the same id is refused (422).
    """
    call = open_request(request)
    if not CALLER_ID.fullmatch(prediction_id):
        raise BadInput(
            "id: must be 1 to 64 letters, digits, '.', '_' or '-', "
            "begin with a letter or digit, and not with 'pred_'",
            field="id",
        )
    body = await call.read_json(VersionedBody)
    model = find_version(call.dependencies.catalog, body.version)
    return await _create(call, body, model, owner=_owner(body.version), own_id=prediction_id)


@router.post(
    "/models/{owner}/{name}/predictions",
    summary="Create a prediction of a model",
    status_code=201,
    openapi_extra=openapi.prediction_body(PredictionBody),
    responses=openapi.creation_responses(),
)
async def create_of_model(request: Request, owner: str, name: str) -> Response:
    """Creates a prediction of the model `name`. Any owner is accepted."""
    call = open_request(request)
    model = call.dependencies.catalog.find(name)
    return await _create(call, await call.read_json(PredictionBody), model, owner=owner)


@router.post(
    "/deployments/{owner}/{name}/predictions",
    summary="Create a prediction of a deployment",
    description=(
        "Creates a prediction of the model `name`: "
        "each model of the catalog has one deployment, of the same name."
    ),
    status_code=201,
    openapi_extra=openapi.prediction_body(PredictionBody),
    responses=openapi.creation_responses(),
)
async def create_of_deployment(request: Request, owner: str, name: str) -> Response:
    """Creates a prediction of the model that has the deployment's name."""
    call = open_request(request)
    model = call.dependencies.catalog.find(name)
    body = await call.read_json(PredictionBody)
    return await _create(call, body, model, owner=owner, deployment=f"{owner}/{name}")


@router.get(
    "/predictions",
    summary="List your predictions",
    openapi_extra=openapi.AUTHENTICATED,
    responses={
        200: openapi.success("A page of predictions.", PredictionsPage),
        **openapi.problems(401, 422, 503),
    },
)
async def list_all(request: Request, cursor: Cursor = "") -> Response:
    """Predictions in pages, newest first. `next` is the URL of the next page."""
    call = authenticate(request)
    if not _CURSOR.fullmatch(cursor):
        raise BadInput("cursor: not a cursor of this API", field="cursor")
    found, next_s = await call.dependencies.predictions.page(
        call.tenant, float(cursor) if cursor else None
    )
    following = None if next_s is None else f"{call.base_url}/v1/predictions?cursor={next_s!r}"
    bodies = [body_of(*snapshot, call.dependencies.url_signer) for snapshot in found]
    return _json({"previous": None, "next": following, "results": bodies})


@router.get(
    "/predictions/{prediction_id}",
    summary="Get a prediction",
    openapi_extra=openapi.AUTHENTICATED,
    responses=_ONE,
)
async def get(request: Request, prediction_id: str) -> Response:
    """The prediction in its current state."""
    call = authenticate(request)
    return _answer(
        call.dependencies, await call.dependencies.predictions.read(call.tenant, prediction_id)
    )


@router.post(
    "/predictions/{prediction_id}/cancel",
    summary="Cancel a prediction",
    openapi_extra=openapi.AUTHENTICATED,
    responses=_ONE,
)
async def cancel(request: Request, prediction_id: str) -> Response:
    """Ends the prediction now.

    Its worker stops at the next step. A prediction that has ended stays as it is.
    """
    call = authenticate(request)
    return _answer(
        call.dependencies, await call.dependencies.predictions.cancel(call.tenant, prediction_id)
    )


@router.get(
    "/predictions/{prediction_id}/stream",
    summary="Stream a prediction",
    response_class=Response,
    openapi_extra={"parameters": [LAST_EVENT_ID]} | openapi.AUTHENTICATED,
    responses={
        200: openapi.event_stream(*KINDS),
        **openapi.problems(401, 404, 429, 503),
    },
)
async def stream(request: Request, prediction_id: str) -> Response:
    """Server-sent events: logs, output, error, done. `Last-Event-ID` resumes a stream."""
    call = authenticate(request)
    dependencies = call.dependencies
    dependencies.event_streams.check(call.tenant)
    snapshot = await dependencies.predictions.read(call.tenant, prediction_id)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    if IS_HEAD in request.scope:
        return Response(headers=headers, media_type="text/event-stream")
    events = dependencies.event_streams.follow(snapshot, request.headers.get("last-event-id", ""))
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def _create(
    call: ApiRequest,
    body: PredictionBody,
    model: Model,
    *,
    owner: str,
    own_id: str = "",
    deployment: str = "",
) -> Response:
    dependencies, context, options, tenant = (
        call.dependencies,
        call.context,
        call.options,
        call.tenant,
    )
    context.model = model.name
    base_url = call.base_url
    key, wait_s = options.idempotency_key, max(0.0, options.wait_s - EARLY_S)
    deadline_s = options.done_by_s(model.deadline)
    caller = Caller(tenant, base_url, deadline_s)
    reading = read_inputs(body.input, model, caller, dependencies.source_pictures)
    read = await while_connected(call.http.receive, reading)
    prediction_id, record = _ids(tenant, own_id, key)
    webhook, webhook_events = _webhook_of(
        body, allow_private=dependencies.settings.webhooks_private
    )
    new = NewPrediction(
        Prediction(
            id=prediction_id,
            record=record,
            tenant=tenant,
            model=model.name,
            owner=owner,
            version=version_of(model),
            input=read.shown,
            is_list=read.is_list,
            output_format=read.output_format,
            webhook=webhook,
            webhook_events=webhook_events,
            deployment=deployment,
            base_url=base_url,
            created_at_s=context.received_at_s,
            deadline_s=deadline_s,
            digest=await _digest(body, model),
            client_request_id=context.client_request_id,
            key_id=call.caller.key_id,
            price=price_of(model),
        ),
        _items(model, read.inputs, tenant, is_kept=read.is_repeatable and options.cache_write),
        weight=call.caller.plan.weight,
        reply_bytes=len(read.inputs) * (model.definition.result_bytes(model) + OUTCOME_BYTES),
        is_keyed=bool(own_id or key),
        options=options,
    )
    async with dependencies.predictions.creating(new, waits=wait_s > 0) as creation:
        if wait_s:
            # A caller that hangs up leaves here, and the prediction continues.
            waiting = creation.wait(wait_s - context.total_ms / 1000)
            await while_connected(call.http.receive, waiting)
    return _created(dependencies, creation.snapshot, is_new=creation.is_new)


def _webhook_of(body: PredictionBody, *, allow_private: bool) -> tuple[str, tuple[str, ...]]:
    """The webhook URL and its events. Refuses URLs that could never be delivered to."""
    url, events = body.webhook_target
    if url:
        field = "webhook" if body.webhook else "webhook_completed"
        try:
            parse_webhook_url(url, allow_private=allow_private)
        except WebhookUrlForbidden as error:
            raise BadInput(f"{field}: {error.message}", field=field) from error
    return url, events


def _created(dependencies: Dependencies, snapshot: PredictionSnapshot, *, is_new: bool) -> Response:
    """The answer to a creation.

    Replicate's clients take `processing` for an end here: it becomes `starting`.
    """
    body = body_of(*snapshot, dependencies.url_signer)
    if body["status"] == "processing":
        body["status"] = "starting"
    headers = {"location": body["urls"]["get"]}
    return _json(body, 201, headers) if is_new else _json(body, 200, headers | {REPLAYED: "true"})


def _answer(dependencies: Dependencies, snapshot: PredictionSnapshot) -> Response:
    return _json(body_of(*snapshot, dependencies.url_signer))


def _json(
    body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _ids(tenant: str, own_id: str, key: str) -> tuple[str, str]:
    """The prediction id and the record id: from the caller, from an Idempotency-Key, or new."""
    if own_id:
        return own_id, record_of(tenant, own_id)
    if key:
        digest = hashlib.blake2b(f"{tenant}\n{key}".encode(), digest_size=12)
        return f"pred_{digest.hexdigest()}", f"pred_{digest.hexdigest()}"
    made = f"pred_{secrets.token_hex(12)}"
    return made, made


async def _digest(body: PredictionBody, model: Model) -> str:
    """A digest of the body and the model. Equal requests have the same."""
    given = body.model_dump(exclude={"version"})
    image = given["input"].get("image")
    if isinstance(image, str) and len(image) > LONGEST_URL:
        # Encoding 20 MB of image as JSON would block the event loop for 130 ms, so its digest
        # replaces it.
        given["input"]["image"] = await asyncio.to_thread(_digest_of, image)
    return _digest_of(json.dumps([model.name, given], sort_keys=True))


def _digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _items(model: Model, inputs: Sequence[Input], tenant: str, *, is_kept: bool) -> list[Item]:
    keeps = is_kept and model.cache.ttl_s > 0
    return [
        Item(index, given, cache_key(model, given, tenant) if keeps else None)
        for index, given in enumerate(inputs)
    ]


def _owner(version: str) -> str:
    owner, slash, _ = version.partition("/")
    return owner if slash else OWNER
