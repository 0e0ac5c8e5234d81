"""A router whose endpoints each declare their requirements, input, and output in one place.

    router = Router(scope="embeddings", route_class=FastRoute)

    @router.post(
        "/v1/rerank",
        summary="Rank documents",
        body=RerankBody,
        reply=RerankReply,
        headers=("X-Penstock-Truncated-Tokens",),
        lines=RerankEndpoint(),
    )
    async def rank_documents(call: ModelCall, catalog: Catalog, inference: Inference) -> Response:

The scopes that keys need, the OpenAPI document, and the batch line endpoints are derived from these
declarations (api/endpoints.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, get_type_hints

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.responses import Response

from api.batches.endpoint import Endpoint as LineEndpoint
from api.errors import ErrorReply
from api.http.auth import KeyScope
from api.http.call import ModelCall
from api.http.injection import Endpoint, inject
from api.http.openapi import (
    AUTHENTICATED,
    INFERRING,
    Described,
    Responses,
    Schema,
    add_event_stream,
    errors_as,
    header_parameters,
    inference_responses,
    request_body,
    success,
)
from api.problem_details import Problem

E = TypeVar("E", bound=Endpoint)
Method: TypeAlias = Literal["GET", "POST", "PUT", "DELETE"]
_PASSED_ON = frozenset(
    {"summary", "description", "status_code", "response_class", "include_in_schema"}
)
"""Fields evaluated by FastAPI."""


class Declared(TypedDict, total=False):
    """An endpoint. Errors implied by the other fields don't need to be listed.

    The implied errors are 401 with a scope; 400, 408, and 413 with a body; 404 with a path
    parameter; and all inference errors if the endpoint takes a ModelCall.
    """

    summary: str
    description: str
    """Defaults to the docstring."""
    scope: KeyScope | None
    """The scope keys need. None makes the endpoint public. Defaults to the router's scope."""
    body: Schema
    form: Schema
    takes: tuple[str, ...]
    """Additional request headers."""
    query: list[Described]
    """Query parameters that the endpoint reads itself."""
    reply: type[msgspec.Struct]
    reply_text: str
    headers: tuple[str, ...]
    """Additional response headers."""
    is_streamed: bool
    """True if the response can also be a stream of events."""
    errors: tuple[int, ...]
    conflict: str
    """The reason the endpoint returns a 409."""
    responses: Responses
    """All responses, if errors are not implied by the other fields."""
    lines: LineEndpoint
    """Runs batch lines that have the same body."""
    answers: Responses
    """Successful responses, which replace the 200 with `reply`."""
    status_code: int
    response_class: type[Response]
    include_in_schema: bool
    openapi_extra: Described


class Router(APIRouter):
    """A router whose endpoints get their parameters by type (api/http/injection.py).

    Args:
        scope: the scope keys need for the router's endpoints. None makes the endpoints public.
        route_class: its `error_reply` sets the error format, which is OpenAI's by default.
        tags: groups on the /docs page. Defaults to the scope.
    """

    def __init__(
        self,
        *,
        scope: KeyScope | None = None,
        route_class: type[APIRoute] = APIRoute,
        prefix: str = "",
        tags: list[str] | None = None,
    ) -> None:
        groups = tags or ([scope] if scope else [])
        super().__init__(prefix=prefix, tags=[*groups], route_class=route_class)
        self._scope = scope
        self._error: type[msgspec.Struct] = getattr(route_class, "error_reply", ErrorReply)
        self.scopes: dict[tuple[str, str], KeyScope] = {}
        """Scopes, keyed by method and path."""
        self.lines: dict[str, LineEndpoint] = {}
        """Batch line endpoints, keyed by path."""

    def get(self, path: str, **declared: Unpack[Declared]) -> Callable[[E], E]:  # type: ignore[override]
        return self._declare("GET", path, declared)

    def post(self, path: str, **declared: Unpack[Declared]) -> Callable[[E], E]:  # type: ignore[override]
        return self._declare("POST", path, declared)

    def put(self, path: str, **declared: Unpack[Declared]) -> Callable[[E], E]:  # type: ignore[override]
        return self._declare("PUT", path, declared)

    def delete(self, path: str, **declared: Unpack[Declared]) -> Callable[[E], E]:  # type: ignore[override]
        return self._declare("DELETE", path, declared)

    def _declare(self, method: Method, path: str, declared: Declared) -> Callable[[E], E]:
        scope = declared.get("scope", self._scope)
        if scope is not None:
            self.scopes[method, self.prefix + path] = scope
        if "lines" in declared:
            self.lines[self.prefix + path] = declared["lines"]

        options: dict[str, Any] = {
            name: value for name, value in declared.items() if name in _PASSED_ON
        }

        def add(endpoint: E) -> E:
            runs_model = ModelCall in get_type_hints(endpoint).values()
            self.add_api_route(
                path,
                inject(endpoint),
                methods=[method],
                openapi_extra=_request(declared, scope, runs_model=runs_model),
                responses=self._responses(path, declared, scope, runs_model=runs_model),
                **options,
            )
            return endpoint

        return add

    def _responses(
        self, path: str, declared: Declared, scope: KeyScope | None, *, runs_model: bool
    ) -> Responses:
        if "responses" in declared:
            return declared["responses"]
        answers = declared.get("answers", {})
        if "reply" in declared:
            usual = "Done." if self._error is Problem else "The result."
            text, headers = declared.get("reply_text", usual), declared.get("headers", ())
            answers = {200: success(text, declared["reply"], *headers)}
        if runs_model:
            responses = inference_responses(answers, self._error)
        else:
            statuses = {*declared.get("errors", ()), *_usual_errors(path, declared, scope)}
            responses = answers | errors_as(self._error, *statuses)
        if "conflict" in declared:
            responses |= errors_as(self._error, 409)
            responses[409]["description"] = declared["conflict"]
        return add_event_stream(responses) if declared.get("is_streamed") else responses


def _request(declared: Declared, scope: KeyScope | None, *, runs_model: bool) -> Described:
    described: Described = {} if scope is None else dict(AUTHENTICATED)
    names = (*(INFERRING if runs_model else ()), *declared.get("takes", ()))
    if parameters := [*header_parameters(names), *declared.get("query", ())]:
        described["parameters"] = parameters
    body, form = declared.get("body"), declared.get("form")
    if body is not None or form is not None:
        described |= request_body(body, form)
    return described | declared.get("openapi_extra", {})


def _usual_errors(path: str, declared: Declared, scope: KeyScope | None) -> set[int]:
    usual = {401} if scope is not None else set[int]()
    if "body" in declared:
        usual |= {400, 408, 413}
    if "{" in path:
        usual.add(404)
    return usual
