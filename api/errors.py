"""Maps errors to HTTP responses: one table from error code to status, one body, one handler.

The body has OpenAI's format: `{"error": {"message", "type", "param", "code"}}`, always with all
four keys (https://platform.openai.com/docs/guides/error-codes). `code` is the stable code of
shared/errors.py. A 405 lists all of its path's methods in the `Allow` header (RFC 9110, 10.2.1).
The router itself would list only one route's methods.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from shared.errors import BadInput, Canceled, InputTooLarge, Overloaded, PenstockError
from shared.tenants.api_key import without_keys

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

SHORT_RETRY_S = 1.0
MAX_BODY_DEPTH = 200
"""Maximum nesting of objects and lists that jiter, the parser for bodies, accepts:
https://github.com/pydantic/jiter
"""

EXPECTED_ERRORS = (
    PenstockError,
    ValidationError,
    RequestValidationError,
    HTTPException,
    ClientDisconnect,
)
"""The errors that routes may raise. The middleware handles all others."""

_REASONS = {
    "extra_forbidden": "unknown parameter",
    "none_required": "is not supported by this API; omit it or send null",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "list_type": "Input should be a list",
    "bool_type": "Input should be true or false, without quotes",
    "bool_parsing": "Input should be true or false",
    "finite_number": "Input should be a finite number",
}
"""Replacements for pydantic messages that refer to Python or to pydantic's own types."""

_TOO_DEEP = f"nested deeper than {MAX_BODY_DEPTH} levels"

log = logging.getLogger(__name__)


class WrongField(ValueError):
    """A field is invalid for a reason that involves more than the field itself.

    Args:
        field: the field's name in the body whose validator raises this.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class ErrorDetail(msgspec.Struct):
    """An error. `code` is stable, and `param` names the invalid field."""

    message: str
    type: str
    param: str | None
    code: str
    created_before: str | msgspec.UnsetType = msgspec.UNSET
    """Extension: the `created_before` with which to search older batches.

    Present only if none of the newest batches matches a list's filters.
    """


class ErrorReply(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


def list_allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """Returns the methods of `routes` for a path, plus OPTIONS, and HEAD if GET is one of them.

    A path that matches a route literally, such as /v1/responses/input_tokens, is not also an ID.
    """
    known = list(routes)
    known = [route for route in known if getattr(route, "path", "") == scope["path"]] or known
    methods = [method for method in _METHODS if _is_taken(known, dict(scope, method=method))]
    return (
        [*methods[:1], "HEAD", *methods[1:], "OPTIONS"]
        if "GET" in methods
        else [*methods, "OPTIONS"]
    )


def _is_taken(routes: Iterable[BaseRoute], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


class BodyTooLarge(InputTooLarge):
    """The request body exceeds the maximum size."""

    code = "request_too_large"


class HeadTooLarge(InputTooLarge):
    """The request's URL and headers exceed the maximum size."""

    code = "request_headers_too_large"


class TooSlow(BadInput):
    """The request arrived too slowly."""

    code = "request_timeout"


class Unauthorized(PenstockError):
    """The request has no valid API key."""

    code = "invalid_api_key"
    public_by_default = None


class Forbidden(PenstockError):
    """The caller is not allowed to do this."""

    code = "forbidden"
    public_by_default = None


class NotFound(PenstockError):
    """This resource does not exist."""

    code = "not_found"
    public_by_default = None


class NotNow(BadInput):
    """This can't be done right now, but the same request may succeed later.

    Errors of this kind are not stored for an Idempotency-Key.
    """


class NoneMatched(BadInput):
    """None of the entries checked for a list matches its filters.

    Args:
        created_before: value of the `created_before` parameter with which to check older entries.
    """

    def __init__(self, message: str, *, created_before: str) -> None:
        super().__init__(message, field="created_before")
        self.created_before = created_before


class DamagedDocument(PenstockError):
    """A stored document can't be decoded."""


class StorageFull(NotNow):
    """This would exceed the tenant's storage quota."""

    code = "storage_quota_exceeded"


class PreviousResponseNotFound(NotNow):
    """The previous response was not found: it was not stored, has expired, or never existed."""

    code = "previous_response_not_found"


class MethodNotAllowed(PenstockError):
    """This path does not support this method."""

    code = "method_not_allowed"
    public_by_default = None


class KeyReused(PenstockError):
    """This Idempotency-Key was used for a different request; a key identifies one request."""

    code = "idempotency_key_reused"
    public_by_default = None

    def __init__(self) -> None:
        super().__init__(field="idempotency-key")


class KeyInUse(PenstockError):
    """The first request with this Idempotency-Key is still being processed; try again."""

    code = "idempotency_key_in_use"
    public_by_default = None

    def __init__(self) -> None:
        super().__init__(field="idempotency-key")


class RateLimited(Overloaded):
    """A plan limit was reached.

    Args:
        message: the limit that was reached, and when to try again.
        unit: the unit counted: requests, tokens, pixel_steps, work, items, or usd.
        retry_after_s: seconds until there is room again.
        is_final: True if waiting a little can't make the same request succeed.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, unit: str, retry_after_s: float, is_final: bool = False
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.unit = unit
        self.is_final = is_final


class BudgetExceeded(RateLimited):
    """The monthly budget is spent."""

    code = "insufficient_quota"


class LargerThanBudget(BudgetExceeded):
    """The request may cost more than the whole monthly budget, so waiting can't help."""


class BudgetReserved(BudgetExceeded):
    """Requests in flight have reserved the rest of the budget; try again once they finish."""

    code = "rate_limit_exceeded"


class ClientGone(Canceled):
    """The caller closed the connection before the response was complete."""


class ErrorMapping(NamedTuple):
    """The response to an error code. `retry` False: the same request would only fail again."""

    status: int
    type: str
    retry: bool | None = None


# Clients should not retry a 504 on their own. The caller's time is up, and OpenAI's client would
# send the same work two more times to a system that is already late. 429 and 503 have Retry-After.
ERROR_MAPPINGS = {
    "invalid_input": ErrorMapping(400, "invalid_request_error"),
    "input_too_large": ErrorMapping(400, "invalid_request_error"),
    "context_length_exceeded": ErrorMapping(400, "invalid_request_error"),
    "moderation_blocked": ErrorMapping(400, "image_generation_user_error", retry=False),
    "storage_quota_exceeded": ErrorMapping(400, "invalid_request_error"),
    "previous_response_not_found": ErrorMapping(400, "invalid_request_error"),
    "conversation_locked": ErrorMapping(400, "invalid_request_error"),
    "invalid_api_key": ErrorMapping(401, "authentication_error"),
    "forbidden": ErrorMapping(403, "permission_error"),
    "link_invalid": ErrorMapping(403, "permission_error"),
    "missing_scope": ErrorMapping(403, "permission_error"),
    "model_not_allowed": ErrorMapping(403, "permission_error"),
    "tenant_frozen": ErrorMapping(403, "permission_error"),
    "model_not_found": ErrorMapping(404, "invalid_request_error"),
    "not_found": ErrorMapping(404, "invalid_request_error"),
    "method_not_allowed": ErrorMapping(405, "invalid_request_error"),
    "request_timeout": ErrorMapping(408, "invalid_request_error", retry=False),
    "idempotency_key_in_use": ErrorMapping(409, "invalid_request_error"),
    "prediction_not_over": ErrorMapping(409, "invalid_request_error", retry=False),
    "in_use": ErrorMapping(409, "invalid_request_error", retry=False),
    "keys_read_only": ErrorMapping(409, "invalid_request_error", retry=False),
    "request_too_large": ErrorMapping(413, "invalid_request_error"),
    "idempotency_key_reused": ErrorMapping(422, "invalid_request_error"),
    "overloaded": ErrorMapping(429, "rate_limit_error"),
    "rate_limit_exceeded": ErrorMapping(429, "rate_limit_error"),
    "insufficient_quota": ErrorMapping(429, "insufficient_quota"),
    "request_headers_too_large": ErrorMapping(431, "invalid_request_error"),
    "canceled": ErrorMapping(499, "invalid_request_error"),
    "model_failed": ErrorMapping(500, "server_error", retry=False),
    "schema_not_matched": ErrorMapping(500, "server_error", retry=False),
    "internal": ErrorMapping(500, "server_error"),
    "model_withdrawn": ErrorMapping(503, "server_error", retry=False),
    "unavailable": ErrorMapping(503, "server_error"),
    "deadline_exceeded": ErrorMapping(504, "timeout_error", retry=False),
}


def add_handlers(app: FastAPI) -> None:
    """Registers the handler for all expected errors."""
    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, handle_error)


async def handle_error(request: Request, error: Exception) -> Response:
    """Returns the response to one of the EXPECTED_ERRORS."""
    set_error_code(request, error)
    match error:
        case PenstockError():
            return error_response(error)
        case ValidationError() | RequestValidationError():
            return error_response(to_bad_input(error))
        case HTTPException():
            return _without_route(request, error)
        case ClientDisconnect():
            return error_response(ClientGone())
    raise TypeError(f"no response is defined for {error!r}; this is a bug")


def log_reason(error: PenstockError, request_id: str) -> None:
    """Logs the details of an error that are not shown to the caller."""
    if error.public_message != error.message:
        facts = {"request_id": request_id, "code": error.code, "reason": error.message}
        log.warning("request failed", extra=facts)


def set_error_code(request: Request, error: Exception) -> None:
    """Puts the error code into the request's context, for metrics and rows.

    The log gets the details that are not shown to callers.
    """
    match error:
        case PenstockError():
            code = error.code
            log_reason(error, request.scope["penstock.context"].facts.request_id)
        case HTTPException():
            code = {404: NotFound.code, 405: MethodNotAllowed.code}.get(
                error.status_code, BadInput.code
            )
        case ClientDisconnect():
            code = ClientGone.code
        case _:
            code = BadInput.code
    request.scope["penstock.context"].error_code = code


def error_response(error: PenstockError) -> Response:
    """Returns the response with `error` in OpenAI's format."""
    status = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"]).status
    body = encode_error(error_body(error))
    return Response(body, status, headers_for(error), "application/json")


def error_body(error: PenstockError) -> ErrorReply:
    """Returns the body for `error`, which is also the event sent when an error ends a stream."""
    mapping = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"])
    # OpenAI names the limit in the type.
    kind = error.unit if type(error) is RateLimited else mapping.type
    detail = ErrorDetail(error.public_message, kind, error.field, error.code)
    if isinstance(error, NoneMatched):
        detail.created_before = error.created_before
    return ErrorReply(detail)


def encode_error(body: msgspec.Struct) -> bytes:
    """Returns an error body as JSON. It may repeat the caller's values, but no key's secret."""
    return without_keys(msgspec.json.encode(body).decode()).encode()


def headers_for(error: PenstockError) -> dict[str, str]:
    """Returns an error's headers: whether and when to retry, and how to authenticate."""
    mapping = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"])
    headers = {}
    if mapping.retry is not None:
        headers["x-should-retry"] = str(mapping.retry).lower()
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
        if isinstance(error, RateLimited) and error.is_final:
            headers["x-should-retry"] = "false"
    elif mapping.status in (409, 503) and mapping.retry is None:
        headers["retry-after"] = str(math.ceil(SHORT_RETRY_S))
    elif mapping.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def to_known_error(error: Exception) -> PenstockError:
    """Returns a route's error as one of ours."""
    match error:
        case PenstockError():
            return error
        case ValidationError() | RequestValidationError():
            return to_bad_input(error)
        case ClientDisconnect():
            return ClientGone()
    return PenstockError(str(error))


def to_bad_input(error: ValidationError | RequestValidationError) -> BadInput:
    """Returns the first error in a body, with its field and reason."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        if _is_too_deep(first):
            return BadInput(f"the body is {_TOO_DEEP}")
        return BadInput(f"the body is not valid JSON: {_json_reason(first['ctx']['error'])}")
    if isinstance(error, RequestValidationError):
        first = first | {"loc": first["loc"][1:]}  # without `query` or `path`
    where, reason = describe(first)
    field = re.split(r"[.\[]", where)[0]
    return BadInput(f"{where or 'the body'}: {reason}", field=field or None)


def describe(wrong: Mapping[str, Any]) -> tuple[str, str]:
    """Returns a pydantic error's path (`images[0].image_url`; empty for the body) and reason."""
    # Union tags, which are internal, appear in the location as 'name:'.
    steps = [step for step in wrong["loc"] if not (isinstance(step, str) and step.endswith(":"))]
    cause = wrong.get("ctx", {}).get("error")
    if isinstance(cause, WrongField):
        steps.append(cause.field)
    if steps[-1:] == ["[key]"]:  # the key itself is invalid, not its value
        key = steps[-2]
        steps, wrong = steps[:-2], dict(wrong) | {"msg": f"key {key!r}: {wrong['msg']}"}
    where = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps
    ).removeprefix(".")
    return where, _reason_of(wrong)


def _reason_of(wrong: Mapping[str, Any]) -> str:
    kind, context = wrong["type"], wrong.get("ctx", {})
    if _is_too_deep(wrong):
        return _TOO_DEEP
    if kind in _REASONS:
        return _REASONS[kind]
    if kind == "literal_error":
        return f"Input should be {_in_json(context['expected'])}"
    if kind == "too_long" and context["field_type"] == "Dictionary":
        return f"Object should have at most {context['max_length']} keys"
    reason: str = wrong["msg"]
    return reason.removeprefix("Value error, ").replace(" after validation,", ",")


def _in_json(expected: str) -> str:
    """Returns expected values with Python's names replaced by JSON's."""
    names = {"True": "true", "False": "false", "None": "null"}
    return re.sub(r"\b(True|False|None)\b", lambda name: names[name[1]], expected)


def _json_reason(reason: str) -> str:
    """Returns the reason a body can't be parsed, in terms of JSON."""
    if "hex escape" in reason:
        at = reason.partition(" at line")[2]
        return f"a \\u escape is half of a surrogate pair; send both halves, at line{at}"
    return reason


def _is_too_deep(wrong: Mapping[str, Any]) -> bool:
    reason = wrong["ctx"]["error"] if wrong["type"] == "json_invalid" else ""
    return str(reason).startswith("recursion limit")


def _without_route(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return error_response(NotFound(f"{request.url.path} does not exist"))
    if error.status_code == 405:
        allowed = {"allow": ", ".join(list_allowed_methods(request.app.routes, request.scope))}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        response = error_response(
            MethodNotAllowed(f"{request.url.path} does not support the method {request.method}")
        )
        response.headers.update(allowed)
        return response
    return error_response(BadInput(str(error.detail)))
