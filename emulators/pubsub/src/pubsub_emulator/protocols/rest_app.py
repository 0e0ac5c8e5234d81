"""The REST server: maps JSON requests over HTTP to the same methods that gRPC calls."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.errors import InvalidArgument, PubsubError, ResourceNotFound
from pubsub_emulator.protocols.error_details import FAILED, error_info
from pubsub_emulator.protocols.methods import Method, unary_methods
from pubsub_emulator.protocols.rest_rules import find_rule
from pubsub_emulator.protocols.transcoding import to_json, to_request

_MAX_BODY_BYTES = 16 * 1024**2
"""The same limit as for a gRPC call. Base64 makes a publish request of the maximum size a third
larger.
"""
_LARGE_BODY_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread, so that other calls can run in the meantime."""
# Source: https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
_HTTP_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
_log = logging.getLogger(__name__)


def rest_app(broker: Broker) -> ASGIApp:
    """Create the REST application for a broker."""
    methods = {method.name: method for method in unary_methods(broker)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            response = await _answer(methods, Request(scope, receive))
        except ClientDisconnect:
            return
        except PubsubError as error:
            response = _refusal(error)
        except Exception:
            _log.exception("a call failed, this is a bug")
            response = _error("INTERNAL", FAILED)
        await response(scope, receive, send)

    return app


class _Call:
    """Stands in for gRPC's context, since an HTTP caller does not specify how long it will wait."""

    def __init__(self, http: Request) -> None:
        self._http = http

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._http.headers.items()


async def _answer(methods: Mapping[str, Method], http: Request) -> Response:
    path = http.scope.get("raw_path", http.url.path.encode()).decode("ascii", "replace")
    if path == "/":
        return Response("Ok\n", media_type="text/plain")
    match = find_rule(http.method, path)
    if match is None:
        raise ResourceNotFound(f"The requested URL was not found (path={http.method} {path}).")
    rule, path_fields = match
    body = await _body(http)
    method = methods[rule.call]
    arguments = (method.request, rule, path_fields, http.query_params.multi_items(), body)
    if len(body) > _LARGE_BODY_BYTES:
        request = await asyncio.to_thread(to_request, *arguments)
    else:
        request = to_request(*arguments)
    serialized = await _until_hung_up(method, request, http)
    return Response(to_json(method.response, serialized), media_type="application/json")


async def _body(http: Request) -> bytes:
    parts, size_bytes = [], 0
    async for part in http.stream():
        size_bytes += len(part)
        if size_bytes > _MAX_BODY_BYTES:
            raise InvalidArgument(
                f"Request payload size exceeds the limit: {_MAX_BODY_BYTES} bytes."
            )
        parts.append(part)
    return b"".join(parts)


async def _until_hung_up(method: Method, request: Any, http: Request) -> bytes:
    """Respond to a call. A pull must not take messages once its caller has hung up."""
    if method.name != "Pull":
        return await method.answer(request, _Call(http))
    answer = asyncio.ensure_future(method.answer(request, _Call(http)))
    hung_up = asyncio.ensure_future(_hung_up(http))
    try:
        await asyncio.wait((answer, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for task in (answer, hung_up):
            task.cancel()
        await asyncio.gather(answer, hung_up, return_exceptions=True)


async def _hung_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: PubsubError) -> Response:
    details = []
    if error.reason:
        info = json_format.MessageToDict(error_info(error))
        details.append({"@type": "type.googleapis.com/google.rpc.ErrorInfo", **info})
    return _error(error.status, str(error), details)


def _error(status: str, message: str, details: list[dict[str, Any]] | None = None) -> Response:
    code = _HTTP_STATUSES[status]
    error: dict[str, Any] = {"code": code, "message": message, "status": status}
    if details:
        error["details"] = details
    return Response(json.dumps({"error": error}), status_code=code, media_type="application/json")
