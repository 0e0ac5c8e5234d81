"""Requests and responses of the BigQuery API: JSON bodies, maybe gzipped, and errors."""

import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infra.emulators.bigquery.engine.service import BigQueryService
from infra.emulators.bigquery.errors import BugError, InvalidError, ServiceError, TooLargeError
from infra.emulators.bigquery.tables.resources import DatasetKey, TableKey
from infra.emulators.bigquery.tables.schema import Json

MOST_BODY_BYTES = 32 * 1024 * 1024
_GZIP_WINDOW_BITS = 31


def service_of(request: Request) -> BigQueryService:
    """Returns the server that the request came to."""
    found: BigQueryService = request.app.state.service
    return found


async def json_body(request: Request, most_bytes: int = MOST_BODY_BYTES) -> Json:
    """Returns the request's JSON object. An empty body is an empty object.

    Raises:
        InvalidError: for a body that isn't a JSON object.
        TooLargeError: over `most_bytes`.
    """
    raw = await whole_body(request, most_bytes)
    try:
        found = json.loads(raw) if raw.strip() else {}
    except ValueError as error:
        raise InvalidError(f"Parse Error: {error}") from error
    if not isinstance(found, dict):
        raise InvalidError("Invalid JSON payload received: the root must be an object.")
    return found


async def whole_body(request: Request, most_bytes: int) -> bytes:
    """Returns the request's body, unpacked.

    Raises:
        InvalidError: for a broken gzip body.
        TooLargeError: over `most_bytes`.
    """
    parts, size_bytes = [], 0
    async for part in body_parts(request):
        size_bytes += len(part)
        if size_bytes > most_bytes:
            raise TooLargeError(f"Request payload size exceeds the limit: {most_bytes} bytes.")
        parts.append(part)
    return b"".join(parts)


async def body_parts(request: Request) -> AsyncIterator[bytes]:
    """Gives the request's body as it comes, unpacked.

    Raises:
        InvalidError: for a broken gzip body.
    """
    if request.headers.get("content-encoding", "").lower() != "gzip":
        async for part in request.stream():
            yield part
        return
    unpacking = zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        async for part in request.stream():
            yield unpacking.decompress(part)
    except zlib.error as error:
        raise InvalidError(f"Invalid gzip body: {error}") from error


def dataset_key(request: Request) -> DatasetKey:
    """Returns the data set that the path names."""
    return DatasetKey(request.path_params["project"], request.path_params["dataset"])


def table_key(request: Request) -> TableKey:
    """Returns the table that the path names."""
    path = request.path_params
    return TableKey(path["project"], path["dataset"], path["table"])


def flag(request: Request, name: str) -> bool:
    """Returns a query parameter that is true or false."""
    return request.query_params.get(name, "false").lower() == "true"


def number(request: Request, name: str) -> int | None:
    """Returns a query parameter that is a whole number not under 0.

    Raises:
        InvalidError: where it isn't.
    """
    text = request.query_params.get(name)
    return None if text is None else natural(text, name)


def natural(value: Any, name: str) -> int:
    """Returns a whole number not under 0, from JSON or text.

    Raises:
        InvalidError: where it isn't.
    """
    try:
        found = int(value)
    except (TypeError, ValueError):
        found = -1
    if found < 0:
        raise InvalidError(f"Invalid value for {name}: {value}")
    return found


def page(request: Request, items: list[Json]) -> tuple[list[Json], Json]:
    """Returns the asked page of a list, and the `nextPageToken` of the rest."""
    start = natural(request.query_params.get("pageToken") or 0, "pageToken")
    count = number(request, "maxResults") or 1_000
    rest = {"nextPageToken": str(start + count)} if len(items) > start + count else {}
    return items[start : start + count], rest


def answer_error(request: Request, error: Exception) -> Response:
    """Answers with the service's JSON for an error.

    Any other exception is a bug, which the server logs.
    """
    known = (
        error
        if isinstance(error, ServiceError)
        else BugError(f"This is a bug in the embedded BigQuery: {error!r}")
    )
    return JSONResponse(known.body(), status_code=known.status)
