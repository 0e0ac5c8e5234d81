"""/v1/batches in OpenAI's shape. Batches run in a process of their own (api/batches)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from api.batches.service import PAGE, NewBatch
from api.batches.shown import shown_batch
from api.http.openapi import AUTHENTICATED, json_body, responses
from api.http.request import authenticate
from api.schemas.openai_batches import BatchBody, BatchesPage, BatchObject
from shared.errors import BadInput
from shared.webhooks import WebhookUrlForbidden, parse_webhook_url

router = APIRouter()


@router.post(
    "/v1/batches",
    summary="Create a batch",
    openapi_extra=json_body(BatchBody),
    responses=responses(BatchObject, 400, 401, 404, 408, 413, 429, 503),
)
async def create_batch(request: Request) -> Response:
    """Answers at once, with status `validating`. The lines run within 24 hours, at a lower price.

    `webhook` is called at the end, with an event in the shape of OpenAI's.
    """
    call = authenticate(request)
    body = await call.read_json(BatchBody)
    dependencies = call.dependencies
    if body.webhook:
        try:
            parse_webhook_url(body.webhook, allow_private=dependencies.settings.webhooks_private)
        except WebhookUrlForbidden as error:
            raise BadInput(f"webhook: {error.message}", field="webhook") from error
    keep = body.output_expires_after
    asked = NewBatch(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
        output_keep_s=None if keep is None else keep.seconds,
        webhook=body.webhook or "",
    )
    return _json(shown_batch(await dependencies.batches.create(call.caller, asked)))


@router.get(
    "/v1/batches",
    summary="List batches",
    openapi_extra=AUTHENTICATED,
    responses=responses(BatchesPage, 400, 401, 503),
)
async def list_batches(
    request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=PAGE)] = 20
) -> Response:
    """The batches of the tenant, the newest first."""
    call = authenticate(request)
    page = await call.dependencies.batches.page(call.tenant, after=after, limit=limit)
    data = [shown_batch(state) for state in page.batches]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return _json(BatchesPage(data, page.has_more, first_id, last_id))


@router.get(
    "/v1/batches/{batch_id}",
    summary="Get a batch",
    openapi_extra=AUTHENTICATED,
    responses=responses(BatchObject, 401, 404, 503),
)
async def get_batch(request: Request, batch_id: str) -> Response:
    """A batch, with how many of its lines are over."""
    call = authenticate(request)
    return _json(shown_batch(await call.dependencies.batches.find(call.tenant, batch_id)))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch",
    openapi_extra=AUTHENTICATED,
    responses=responses(BatchObject, 400, 401, 404, 503),
)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Stops a batch. Lines that are not over get `batch_cancelled` in the error file."""
    call = authenticate(request)
    return _json(shown_batch(await call.dependencies.batches.cancel(call.tenant, batch_id)))


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
