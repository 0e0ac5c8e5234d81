"""/v1/files as in OpenAI's API: request bodies, responses, and routes.

Replicate's clients upload to the same path but use a different field. Source:
https://platform.openai.com/docs/api-reference/files

GET /v1/objects/… serves what a signed link points to. The signature replaces the API key.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.batches.files import (
    FILE_MAX_BYTES,
    JSONL,
    KEEP_S,
    MIN_KEEP_S,
    PAGE,
    BatchFile,
    BatchFiles,
    FilePurpose,
    UploadPurpose,
)
from api.batches.service import Batches
from api.bodies import Body, Option
from api.errors import EXPECTED_ERRORS, DamagedDocument
from api.http.auth import check_model
from api.http.call import Call
from api.http.connection import while_connected
from api.http.encode_json import encode_json
from api.http.fast_route import IS_HEAD
from api.http.openapi import (
    Described,
    binary,
    empty,
    of_both_apis,
    ref_to,
    success,
)
from api.http.router import Router
from api.http.upload_form import UploadForm, first_field
from api.inputs.files import Files
from api.inputs.storage import Storage
from api.predictions.results import ResultFetcher
from api.problem_details import problem_response
from api.replicate import models as replicate_models
from api.replicate.replies import FileReply
from shared.errors import BadInput
from shared.predictions import MEDIA_TYPES
from shared.stores.objects import LINK_VALID_S, UrlSigner

ANY_BYTES = "application/octet-stream"
MAX_LINK_S = 30.0
"""Time limit for encoding an image in another format. Links do not have a deadline."""

FORM_BYTES = 64 * 1024
"""Maximum size of form data, in bytes, not counting the file."""
_OF_REPLICATE = frozenset({"content", "metadata"})
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})?")
_FILE = {"type": "string", "format": "binary"}
_FIELDS: Described = {
    "file": _FILE | {"description": "For a batch: JSONL with one request per line."},
    "purpose": {
        "type": "string",
        "enum": ["batch", "user_data", "ocr"],
        "description": (
            "Required with `file`. `user_data` and `ocr`: an input of any kind, named by its ID."
        ),
    },
    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
    "expires_after[seconds]": {"type": "integer", "minimum": MIN_KEEP_S, "maximum": KEEP_S},
    "expiry": {
        "type": "integer",
        "minimum": 1,
        "maximum": KEEP_S // 3600,
        "description": "Hours until the file expires, as sent by Mistral's clients.",
    },
    "visibility": {"type": "string", "description": "Accepted, without effect."},
    "content": _FILE | {"description": "For a prediction, as sent by Replicate's clients."},
    "metadata": {"type": "object", "description": "Optional with `content`. Stored with the file."},
}
_UPLOAD: Described = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {"type": "object", "properties": _FIELDS},
                "encoding": {"metadata": {"contentType": "application/json"}},
            }
        },
    }
}

_SAMPLE_TYPES: dict[FilePurpose, Literal["batch_request", "batch_result", "ocr_input"]] = {
    "batch": "batch_request",
    "batch_output": "batch_result",
    "ocr": "ocr_input",
    "user_data": "ocr_input",
}


class FileForm(Body):
    """The text fields in an upload, in addition to the file."""

    model_config = ConfigDict(populate_by_name=False)

    purpose: UploadPurpose
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: int | None = Field(None, ge=3600, le=30 * 24 * 3600, alias="expires_after[seconds]")
    expiry: int | None = Field(None, ge=1, le=KEEP_S // 3600)
    """Number of hours, as sent by Mistral's clients."""
    visibility: Option | None = None


class FileObject(msgspec.Struct):
    """A file that was uploaded or written by a batch. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: FilePurpose
    object: Literal["file"] = "file"
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None
    sample_type: Literal["batch_request", "batch_result", "ocr_input"] = "batch_request"
    """Required by Mistral's clients, as is `source`."""
    source: Literal["upload", "repository"] = "upload"
    deleted: bool = False


class FilesPage(msgspec.Struct):
    """One page of files."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
    results: list[dict[str, Any]] = []
    """Files uploaded by Replicate's clients, on the first page."""
    next: None = None
    previous: None = None


class FileDeleted(msgspec.Struct):
    """The response to a deletion."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


router = Router(scope="files")

_EITHER: Described = {
    "content": {"application/json": {"schema": {"anyOf": [ref_to(FileObject), ref_to(FileReply)]}}}
}


@router.post(
    "/v1/files",
    summary="Upload a file",
    openapi_extra=_UPLOAD,
    responses={
        200: success("The file.", FileObject),
        201: success("The file for a prediction, in Replicate's format.", FileReply),
        **of_both_apis(400, 401, 408, 413, 422, 429, 503),
    },
)
async def create_file(
    call: Call,
    files: Files,
    batch_files: BatchFiles,
    storage: Storage,
    url_signer: UrlSigner,
) -> Response:
    """Accepts form data with a `purpose` and either a batch file or an input of any kind.

    Form data with a `content` field is an upload from one of Replicate's clients.
    """
    call.context.streamed_max_bytes = FILE_MAX_BYTES + FORM_BYTES
    name, replayed = await first_field(call.http)
    call = replace(call, http=replayed)
    if name in _OF_REPLICATE:
        call.context.streamed_max_bytes = 0
        return await _as_replicate(
            call, replicate_models.create_file(call, files, storage, url_signer)
        )
    return encode_json(await _receive(call, batch_files, storage))


async def _receive(call: Call, batch_files: BatchFiles, storage: Storage) -> FileObject:
    call.check_charset()
    form = UploadForm(call.http.headers.get("content-type", ""), "file")
    quota = storage.quota_of(call.caller, "file")
    async with batch_files.upload(quota, call.body_bytes) as upload:
        async for data in call.http.stream():
            for piece in form.feed(data):
                await upload.write(piece, is_batch=form.fields.get("purpose") == "batch")
        form.finish()
        # Form data can't represent null, so clients and pages send an empty field instead.
        values = {name: value for name, value in form.fields.items() if value}
        fields = FileForm.model_validate(values)
        upload.purpose = fields.purpose
        if (fields.anchor is None) != (fields.seconds is None):
            raise BadInput(
                "expires_after: anchor and seconds must be sent together", field="expires_after"
            )
        keep_s = fields.seconds or (fields.expiry or 0) * 3600 or KEEP_S
        upload.filename, upload.keep_s = form.filename or "file", keep_s
    return _build_object(upload.to_file(call.tenant))


@router.get("/v1/files", summary="List files", reply=FilesPage, errors=(400,))
async def list_files(
    call: Call,
    files: Files,
    batch_files: BatchFiles,
    url_signer: UrlSigner,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str = "",
) -> Response:
    """Lists uploads and batch files, newest first, with at most 100 per page.

    The first page also includes files uploaded by Replicate's clients, as `results`.
    """
    page = await batch_files.page(
        call.tenant,
        after=after,
        limit=min(limit, PAGE),
        is_ascending=order == "asc",
        purpose=purpose,
        models=call.caller.models,
    )
    data = [_build_object(file) for file in page.files]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    results = [] if after else await replicate_models.list_newest_files(call, files, url_signer)
    return encode_json(FilesPage(data, page.has_more, first_id, last_id, results=results))


@router.get(
    "/v1/files/{file_id}",
    summary="Get a file",
    responses={
        200: success("The file.", FileObject) | _EITHER,
        **of_both_apis(400, 401, 404, 503),
    },
)
async def get_file(
    call: Call, files: Files, batch_files: BatchFiles, url_signer: UrlSigner, file_id: str
) -> Response:
    """Returns a file's metadata. IDs that begin with `file_` belong to Replicate's API."""
    if file_id.startswith("file_"):
        return await _as_replicate(
            call, replicate_models.get_file(call, files, url_signer, file_id)
        )
    return encode_json(_build_object(await _find(call, batch_files, file_id)))


@router.delete(
    "/v1/files/{file_id}",
    summary="Delete a file",
    responses={
        200: success("The file is deleted.", FileDeleted),
        204: empty("The file is deleted, in Replicate's format."),
        **of_both_apis(400, 401, 404, 503),
    },
)
async def delete_file(
    call: Call, files: Files, batch_files: BatchFiles, batches: Batches, file_id: str
) -> Response:
    """Deletes a file immediately, unless a batch is still reading it."""
    if file_id.startswith("file_"):
        return await _as_replicate(call, replicate_models.delete_file(call, files, file_id))
    with suppress(DamagedDocument):
        await _find(call, batch_files, file_id)
    await batches.check_unused(call.tenant, file_id)
    await batch_files.delete(call.tenant, file_id)
    return encode_json(FileDeleted(file_id))


@router.get(
    "/v1/files/{file_id}/content",
    summary="Download a file",
    response_class=Response,
    answers={
        200: binary("The file's data.", JSONL, ANY_BYTES, headers=("Accept-Ranges",)),
        206: binary(
            "The bytes selected by `Range`.",
            JSONL,
            ANY_BYTES,
            headers=("Accept-Ranges", "Content-Range"),
        ),
    },
    errors=(400,),
)
async def get_content(call: Call, batch_files: BatchFiles, file_id: str) -> Response:
    """Streams a file's data, or the part selected by `Range: bytes=first-last`."""
    file = await _find(call, batch_files, file_id)
    start, end = _parse_range(call.http.headers.get("range", ""), file.size_bytes)
    is_part = (start, end) != (0, file.size_bytes)
    headers = {"accept-ranges": "bytes", "x-content-type-options": "nosniff"}
    if is_part:
        headers["content-range"] = f"bytes {start}-{end - 1}/{file.size_bytes}"
    chunks = _nothing() if call.http.scope.get(IS_HEAD) else batch_files.read(file, start, end)
    media_type = JSONL if file.purpose in ("batch", "batch_output") else ANY_BYTES
    return StreamingResponse(chunks, 206 if is_part else 200, headers, media_type)


async def _find(call: Call, batch_files: BatchFiles, file_id: str) -> BatchFile:
    """Returns one of the tenant's files, unless it was written by a model the key may not use."""
    file = await batch_files.find(call.tenant, file_id)
    if file.model:
        check_model(call.caller, file.model)
    return file


def _parse_range(header: str, size_bytes: int) -> tuple[int, int]:
    """Returns the positions of the first byte and of the byte after the last.

    For an unrecognized range format, the range is the whole file.

    RFC 9110, section 14.2, allows a server to ignore `Range`.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return 0, size_bytes
    start = int(match[1])
    end = min(size_bytes, int(match[2]) + 1) if match[2] else size_bytes
    return (start, end) if start < end else (0, size_bytes)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


async def _as_replicate(call: Call, answering: Awaitable[Response]) -> Response:
    try:
        return await answering
    except EXPECTED_ERRORS as error:
        return problem_response(call.http, error)


def _build_object(file: BatchFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.size_bytes,
        created_at=int(file.created_at_s),
        expires_at=int(file.expires_at_s),
        filename=file.filename,
        purpose=file.purpose,
        sample_type=_SAMPLE_TYPES[file.purpose],
        source="repository" if file.purpose == "batch_output" else "upload",
    )


@router.get(
    "/v1/objects/{key:path}",
    summary="Download a result by its signed link",
    scope=None,
    response_class=Response,
    answers={
        200: binary(
            "The data, with the media type in the link.",
            *sorted(set(MEDIA_TYPES.values())),
            ANY_BYTES,
            "*/*",
        ),
    },
    errors=(400, 403, 429, 499, 503, 504),
)
async def get_object(
    request: Request,
    url_signer: UrlSigner,
    result_fetcher: ResultFetcher,
    key: str,
    type: str,
    expires: int,
    signature: str,
) -> Response:
    """Returns a result's data while the link is valid."""
    url_signer.check(key, type, expires, signature)
    fetching = result_fetcher.fetch(key, type, time.time() + MAX_LINK_S)
    data = await while_connected(request, fetching)
    headers = {
        "cache-control": f"private, max-age={LINK_VALID_S}, immutable",
        "x-content-type-options": "nosniff",
        # A custom class may return an HTML page, which must not be treated as one of ours.
        "content-security-policy": "sandbox; default-src 'none'",
    }
    return Response(data, headers=headers, media_type=type)
