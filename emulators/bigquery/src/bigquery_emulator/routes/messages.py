"""The BigQuery API's requests and responses: JSON bodies, which may be gzipped, and errors."""

import zlib
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import InvalidError, TooLargeError, as_service_error
from bigquery_emulator.routes.options import PageOptions, query_options
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.schema import Json
from bigquery_emulator.tables.values import read_row

MOST_BODY_BYTES = 32 * 1024 * 1024
_GZIP_WINDOW_BITS = 31
_UNPACKED_BYTES = 1024 * 1024


class RowsResponse(Response):
    """A page of rows. The response may have a million values, so the faster encoder is used."""

    media_type = "application/json"

    def render(self, content: Json) -> bytes:
        return msgspec.json.encode(content)


def service_of(request: Request) -> BigQueryService:
    """Returns the service that handles the request."""
    service: BigQueryService = request.app.state.service
    return service


async def json_body(request: Request, most_bytes: int = MOST_BODY_BYTES) -> Json:
    """Returns the request's JSON object. An empty body is an empty object.

    Raises:
        InvalidError: the body is not a JSON object.
        TooLargeError: the body exceeds `most_bytes`.
    """
    raw = await whole_body(request, most_bytes)
    return json_object(raw) if raw.strip() else {}


def json_object(raw: bytes) -> Json:
    """Returns the JSON object in a body or in one of its parts.

    Raises:
        InvalidError: the text is not a JSON object or is nested too deeply.
    """
    try:
        decoded = read_row(raw)
    except ValueError as error:
        raise InvalidError(f"Parse Error: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidError("Invalid JSON payload received: the root must be an object.")
    return decoded


async def whole_body(request: Request, most_bytes: int) -> bytes:
    """Returns the request's body, decompressed.

    Raises:
        InvalidError: the gzip body is damaged.
        TooLargeError: the body exceeds `most_bytes`.
    """
    parts, size_bytes = [], 0
    async for part in body_parts(request):
        size_bytes += len(part)
        if size_bytes > most_bytes:
            raise TooLargeError(f"Request payload size exceeds the limit: {most_bytes} bytes.")
        parts.append(part)
    return b"".join(parts)


async def body_parts(request: Request) -> AsyncIterator[bytes]:
    """Yields the request's body as it arrives, decompressed.

    Raises:
        InvalidError: the gzip body is damaged.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("gzip", "identity", ""):
        raise InvalidError(f"Invalid value for Content-Encoding: {encoding}")
    if encoding != "gzip":
        async for part in request.stream():
            yield part
        return
    unpacking = zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        async for part in request.stream():
            # Decompressed in chunks, because a kilobyte may decompress to a megabyte.
            while part:
                if unpacking.eof:  # a gzip body may consist of several files
                    unpacking = zlib.decompressobj(_GZIP_WINDOW_BITS)
                yield unpacking.decompress(part, _UNPACKED_BYTES)
                part = unpacking.unconsumed_tail or unpacking.unused_data
    except zlib.error as error:
        raise InvalidError(f"Invalid gzip body: {error}") from error
    if not unpacking.eof:
        raise InvalidError("Invalid gzip body: unexpected end of data")


def dataset_key(request: Request) -> DatasetKey:
    """Returns the dataset in the path."""
    return DatasetKey(request.path_params["project"], request.path_params["dataset"])


def table_key(request: Request) -> TableKey:
    """Returns the table in the path."""
    path = request.path_params
    return TableKey(path["project"], path["dataset"], path["table"])


def page(request: Request, items: list[Json]) -> tuple[list[Json], Json]:
    """Returns the requested page of a list, and the `nextPageToken` for the rest."""
    options = query_options(request, PageOptions)
    start = int(options.get("pageToken", 0))
    count = int(options.get("maxResults", 0)) or 1_000
    rest = {"nextPageToken": str(start + count)} if len(items) > start + count else {}
    return items[start : start + count], rest


def answer_error(request: Request, error: Exception) -> Response:
    """Returns an error response in the service's JSON format.

    Any exception other than a ServiceError is a bug, which the server logs.
    """
    known = as_service_error(error)
    return JSONResponse(known.body(), status_code=known.status)
