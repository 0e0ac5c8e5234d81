"""Maps errors to problems (RFC 9457) with `invalid_fields`, for Replicate's API.

422 {"title": "Input validation failed", "detail": "- input.prompt: Field required", "status": 422,
     "invalid_fields": [{"type": "missing", "field": "input.prompt", "description": "Field
     required"}]}
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.errors import (
    ERROR_MAPPINGS,
    EXPECTED_ERRORS,
    ClientGone,
    describe,
    encode_error,
    headers_for,
    set_error_code,
)
from shared.errors import BadInput, PenstockError

MAX_FIELDS = 100
"""Maximum number of invalid fields in one response."""
UNPROCESSABLE = frozenset(
    {"invalid_input", "input_too_large", "context_length_exceeded", "storage_quota_exceeded"}
)


class InvalidField(msgspec.Struct):
    """An invalid field, and the reason."""

    type: str
    field: str
    description: str


class Problem(msgspec.Struct, omit_defaults=True):
    """The body of every error."""

    title: str
    detail: str
    status: int
    invalid_fields: list[InvalidField] = []


class InvalidFields(BadInput):
    """Some fields of the request are invalid."""

    def __init__(self, fields: list[InvalidField]) -> None:
        super().__init__("\n".join(f"- {field.field}: {field.description}" for field in fields))
        self.fields = fields


class ErrorRoute(APIRoute):
    """A route with a custom error format, implemented by `respond`."""

    def respond(self, request: Request, error: Exception) -> Response:
        """Returns the response for one of the EXPECTED_ERRORS."""
        raise NotImplementedError

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler, wrapped so that errors are mapped to responses."""
        handle = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except EXPECTED_ERRORS as error:
                return self.respond(request, error)

        return handle_errors


class ProblemRoute(ErrorRoute):
    """A route whose errors are problem details."""

    error_reply = Problem

    def respond(self, request: Request, error: Exception) -> Response:
        """Returns the problem details for an error."""
        return problem_response(request, error)


@contextmanager
def errors_in_input() -> Iterator[None]:
    """Maps errors raised in the block to the matching fields of `input`."""
    try:
        yield
    except ValidationError as error:
        raise InvalidFields(_fields(error, "input.")) from error
    except BadInput as error:
        if (
            error.code not in UNPROCESSABLE
            or isinstance(error, InvalidFields)
            or error.field is None
        ):
            raise
        description = error.public_message.removeprefix(f"{error.field}: ")
        raise InvalidFields(
            [InvalidField(error.code, f"input.{error.field}", description)]
        ) from error


def problem_response(request: Request, error: Exception) -> Response:
    """Returns the response for one of the EXPECTED_ERRORS, as problem details."""
    set_error_code(request, error)
    match error:
        case PenstockError():
            return _answer(error)
        case ValidationError() | RequestValidationError():
            return _answer(InvalidFields(_fields(error)))
        case HTTPException():
            problem = Problem(
                HTTPStatus(error.status_code).phrase, str(error.detail), error.status_code
            )
            return _json(problem, dict(error.headers or {}))
        case ClientDisconnect():
            return _answer(ClientGone())
    raise TypeError(f"no response is defined for {error!r}; this is a bug")


def _answer(error: PenstockError) -> Response:
    mapping = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"])
    status = 422 if error.code in UNPROCESSABLE else mapping.status
    title = "Input validation failed" if status == 422 else _title(status)
    fields = error.fields if isinstance(error, InvalidFields) else []
    if not fields and status == 422 and error.field:
        fields = [
            InvalidField(
                error.code, error.field, error.public_message.removeprefix(f"{error.field}: ")
            )
        ]
    return _json(Problem(title, error.public_message, status, fields), headers_for(error))


def _title(status: int) -> str:
    return {401: "Unauthenticated", 499: "Client Closed Request"}.get(status) or HTTPStatus(
        status
    ).phrase


def _json(problem: Problem, headers: dict[str, str]) -> Response:
    return Response(encode_error(problem), problem.status, headers, "application/problem+json")


def _fields(
    error: ValidationError | RequestValidationError, prefix: str = ""
) -> list[InvalidField]:
    fields = []
    for detail in error.errors()[:MAX_FIELDS]:
        where, reason = describe(detail)
        fields.append(
            InvalidField(detail["type"], f"{prefix}{where}".rstrip(".") or "body", reason)
        )
    return fields
