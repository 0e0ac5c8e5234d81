"""/v1/batches as in OpenAI's API: request bodies, responses, and routes.

Batches run in a separate process (api/batch_runner).
Source: https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from fastapi import Query
from pydantic import ConfigDict, Field
from starlette.responses import Response

from api.batches.documents import BatchEnded, BatchState, Counts, Status
from api.batches.service import PAGE, Batches, BatchFilter, NewBatch
from api.bodies import MAX_URL_CHARS, Body, Metadata
from api.http.auth import check_model
from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.list_query import (
    CreatedAfter,
    CreatedBefore,
    Include,
    KeyId,
    OfModel,
    model_name,
    unix_s,
)
from api.http.router import Router
from shared.errors import BadInput
from shared.settings import ApiSettings
from shared.webhooks.event import WebhookUrlForbidden, parse_webhook_url


class OutputExpiresAfter(Body):
    """How long the output file and the error file are retained."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 24 * 3600)


class BatchBody(Body):
    """A batch to run."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "input_file_id": "file-fe5f4d8f6a1b00000000000000000000",
                "endpoint": "/v1/embeddings",
                "completion_window": "24h",
            }
        },
    )

    input_file_id: str = Field(description="A file with purpose `batch`.")
    endpoint: str = Field(description="The `url` in all lines.")
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None
    webhook: str | None = Field(
        None,
        max_length=MAX_URL_CHARS,
        description="Extension: URL that receives a signed event when the batch ends.",
    )


class BatchRequestCounts(msgspec.Struct):
    """Counts of finished lines. Lines that were not run count as failed."""

    total: int
    completed: int
    failed: int


class BatchErrorItem(msgspec.Struct):
    """One reason a file was rejected."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(msgspec.Struct):
    """Reported errors, at most 100."""

    data: list[BatchErrorItem]
    object: Literal["list"] = "list"


class InputTokensDetails(msgspec.Struct):
    """Input tokens that did not need to be recomputed."""

    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Always 0."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    """Total usage reported in the responses of completed lines."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    audio_seconds: int
    """Extension: seconds of audio transcribed or translated."""
    pages: int
    """Extension: pages of documents read."""


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    status: Status
    created_at: int
    expires_at: int
    request_counts: BatchRequestCounts
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None
    completion_window: Literal["24h"] = "24h"
    object: Literal["batch"] = "batch"
    api_key_id: str | msgspec.UnsetType | None = msgspec.UNSET
    """Extension: the public ID of the API key that created the batch.

    Present only in lists with `include=api_key_id`.
    """


class BatchesPage(msgspec.Struct):
    """One page of batches."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


def build_batch_object(state: BatchState) -> BatchObject:
    """Returns the response body for a batch."""
    created, plan, counts = state.created, state.plan, state.counts or Counts()
    batch = BatchObject(
        id=created.id,
        endpoint=created.endpoint,
        input_file_id=created.input_file_id,
        status=state.status,
        created_at=int(created.created_at_s),
        expires_at=int(created.expires_at_s),
        metadata=created.metadata,
        request_counts=BatchRequestCounts(0, counts.completed, counts.failed),
        usage=_usage(counts),
        cancelling_at=_second(state.cancelling_at_s),
    )
    if state.ended is not None:
        return _with_end(batch, state.ended)
    if plan is not None:
        batch.request_counts.total = plan.total
        batch.model, batch.in_progress_at = plan.model, _second(plan.in_progress_at_s)
    if state.finalizing is not None:
        batch.finalizing_at = _second(state.finalizing.at_s)
    return batch


def _usage(counts: Counts) -> BatchUsage | None:
    if not (counts.tokens or counts.audio_seconds or counts.pages):
        return None
    return BatchUsage(
        input_tokens=counts.tokens - counts.output_tokens,
        output_tokens=counts.output_tokens,
        total_tokens=counts.tokens,
        input_tokens_details=InputTokensDetails(counts.cached_tokens),
        audio_seconds=counts.audio_seconds,
        pages=counts.pages,
    )


def _with_end(batch: BatchObject, ended: BatchEnded) -> BatchObject:
    batch.request_counts.total = ended.total
    errors = [
        BatchErrorItem(error.code, error.message, error.line, error.param) for error in ended.errors
    ]
    return msgspec.structs.replace(
        batch,
        model=ended.plan_model or None,
        errors=BatchErrors(errors) if errors else None,
        output_file_id=ended.output_file_id or None,
        error_file_id=ended.error_file_id or None,
        in_progress_at=_second(ended.in_progress_at_s),
        finalizing_at=_second(ended.finalizing_at_s),
        cancelling_at=_second(ended.cancelling_at_s),
        **{f"{ended.end}_at": _second(ended.at_s)},
    )


def _second(at_s: float) -> int | None:
    return int(at_s) if at_s else None


router = Router(scope="batches")


@router.post(
    "/v1/batches",
    summary="Create a batch",
    body=BatchBody,
    reply=BatchObject,
    errors=(404, 429),
)
async def create_batch(call: Call, settings: ApiSettings, batches: Batches) -> Response:
    """Returns immediately, with status `validating`.

    The lines run within 24 hours, at a lower price.

    When the batch finishes, `webhook` receives an event in OpenAI's format.
    """
    body = await call.read_json(BatchBody)
    if body.webhook:
        try:
            parse_webhook_url(body.webhook, allow_private=settings.webhooks_private)
        except WebhookUrlForbidden as error:
            raise BadInput(f"webhook: {error.message}", field="webhook") from error
    keep = body.output_expires_after
    new_batch = NewBatch(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
        output_keep_s=None if keep is None else keep.seconds,
        webhook=body.webhook or "",
        base_url=call.base_url,
    )
    return encode_json(build_batch_object(await batches.create(call.caller, new_batch)))


@router.get("/v1/batches", summary="List batches", reply=BatchesPage, errors=(400,))
async def list_batches(
    call: Call,
    batches: Batches,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 20,
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    model: OfModel = "",
    status: Annotated[Status | None, Query(description="Only batches with this status.")] = None,
    api_key_id: KeyId = "",
    include: Include = None,
) -> Response:
    """Lists the tenant's batches, newest first. Pass `last_id` as `after` to get the next page.

    If few batches match the filters, a page may be short even if more pages follow. Only the last
    page can be empty.
    """
    wanted = BatchFilter(
        model_name(model),
        status,
        api_key_id,
        unix_s(created_after, -math.inf),
        unix_s(created_before, math.inf),
        call.caller.models,
    )
    page = await batches.page(call.tenant, after=after, limit=limit, wanted=wanted)
    data = [build_batch_object(state) for state in page.batches]
    if include:
        for batch, state in zip(data, page.batches, strict=True):
            batch.api_key_id = state.created.key_id or None
    first_id = data[0].id if data else None
    return encode_json(BatchesPage(data, page.has_more, first_id, page.last_id))


@router.get("/v1/batches/{batch_id}", summary="Get a batch", reply=BatchObject)
async def get_batch(call: Call, batches: Batches, batch_id: str) -> Response:
    """Returns a batch, including how many of its lines have finished."""
    return encode_json(build_batch_object(await _find(call, batch_id, batches)))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch",
    reply=BatchObject,
    errors=(400,),
)
async def cancel_batch(call: Call, batches: Batches, batch_id: str) -> Response:
    """Stops a batch. Unfinished lines get `batch_cancelled` in the error file."""
    await _find(call, batch_id, batches)
    return encode_json(build_batch_object(await batches.cancel(call.tenant, batch_id)))


async def _find(call: Call, batch_id: str, batches: Batches) -> BatchState:
    """Returns one of the tenant's batches, provided the key may use its model."""
    state = await batches.find(call.tenant, batch_id)
    if state.model:
        check_model(call.caller, state.model)
    return state
