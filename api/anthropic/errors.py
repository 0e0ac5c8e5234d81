"""Maps errors to Anthropic's shape (https://docs.claude.com/en/api/errors)."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.anthropic.schemas import AnthropicError, AnthropicErrorReply
from api.errors import (
    ERROR_MAPPINGS,
    EXPECTED_ERRORS,
    ClientGone,
    encode_error,
    headers_for,
    set_error_code,
    to_bad_input,
)
from api.http.middleware import context_of
from shared.errors import PenstockError, error_for_code

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
}
"""The fields of a chat that have another name in a request for a message."""


class AnthropicRoute(APIRoute):
    """A route whose errors have Anthropic's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler, with errors mapped to responses."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except EXPECTED_ERRORS as error:
                set_error_code(request, error)
                return _response(request, _known(error))

        return handled


def error_reply(error: PenstockError, request_id: str | None = None) -> AnthropicErrorReply:
    """Returns the body for `error`, which is also the event that ends a stream."""
    status = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"]).status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = as_asked(error).public_message
    return AnthropicErrorReply(AnthropicError(kind, message), request_id)


def as_asked(error: PenstockError) -> PenstockError:
    """Returns an error about a field of the chat as one about the field that was sent."""
    field = _FIELDS.get(error.field or "")
    if field is None:
        return error
    message = re.sub(rf"^{error.field}\b", field, error.public_message)
    return error_for_code(error.code, message, field)


def _known(error: Exception) -> PenstockError:
    match error:
        case PenstockError():
            return error
        case ValidationError() | RequestValidationError():
            return to_bad_input(error)
        case ClientDisconnect():
            return ClientGone()
    return PenstockError(str(error))


def _response(request: Request, error: PenstockError) -> Response:
    status = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"]).status
    body = encode_error(error_reply(error, context_of(request).shown_id))
    return Response(body, status, headers_for(error), "application/json")
