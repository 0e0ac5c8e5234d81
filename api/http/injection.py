"""Passes each endpoint the parameters named in its signature.

    async def create_embeddings(
        call: ModelCall, catalog: Catalog, inference: Inference
    ) -> Response: ...

`Call` and `ModelCall` are authenticated before the endpoint runs. A parameter whose type is a field
of `Dependencies` gets that service. A parameter whose type is marked with `injectable` gets an
object built from these services. FastAPI passes the other parameters, from the path and the query.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import cache, wraps
from typing import Any, TypeVar, get_type_hints

from starlette.requests import Request
from starlette.responses import Response

from api.http.call import Call, ModelCall
from api.http.dependencies import Dependencies, dependencies_of
from api.http.middleware import context_of
from api.http.request_options import PRIORITY_HEADER, read_options

Endpoint = Callable[..., Awaitable[Response]]
Provider = Callable[[Request], Any]
T = TypeVar("T")

_injectable = set[type]()


def authenticate(request: Request) -> Call:
    """Authenticates a request and checks the key's scope, unless both have already been done.

    Raises:
        Unauthorized: the API key is missing or invalid.
        Forbidden: the key does not permit this request.
        Unavailable: the keys are not known yet.
    """
    dependencies, context = dependencies_of(request), context_of(request)
    if context.caller is None:
        caller, facts = dependencies.access.caller_of(request.scope["headers"]), context.facts
        facts.tenant, facts.key_id = caller.tenant, caller.key_id
        facts.plan, facts.weight = caller.plan_name, caller.plan.weight
        context.record_refusal = dependencies.refusals.write_row
        dependencies.access_rules.check(caller, request.method, request.scope["route"].path)
        context.caller = caller
    public_url = dependencies.settings.public_url
    return Call(request, context, context.caller, public_url, dependencies.access)


def open_call(request: Request) -> ModelCall:
    """Authenticates a request and reads its options, for endpoints that run models.

    Raises:
        Unauthorized: the API key is missing or invalid.
        Forbidden: the key does not permit this request.
        BadInput: a header has an invalid value.
    """
    call = authenticate(request)
    context, facts = call.context, call.context.facts
    if context.options is None:
        context.options = read_options(request.scope["headers"], facts)
    if call.caller.max_priority == "batch" and facts.priority == "interactive":
        # The plan allows only this priority. Clients that don't know about priorities still work.
        facts.priority = "batch"
        context.headers[PRIORITY_HEADER] = "batch"
    return ModelCall(call.http, context, call.caller, call.public_url, call.access, context.options)


def inject(endpoint: Endpoint) -> Endpoint:
    """Returns an endpoint that takes the request, along with path and query values.

    It passes the remaining parameters to `endpoint`, by type.
    """
    hints = get_type_hints(endpoint, include_extras=True)
    signature = inspect.signature(endpoint)
    services = {
        name: field
        for name in signature.parameters
        if (field := _service_field(hints[name])) is not None
    }
    providers = {
        name: provider
        for name in signature.parameters
        if name not in services and (provider := _provider_of(hints[name])) is not None
    }
    others = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name not in providers | services and hints[name] is not Request
    ]
    takes_request = [name for name in signature.parameters if hints[name] is Request]

    @wraps(endpoint)
    async def run(request: Request, **values: Any) -> Response:
        for name in takes_request:
            values[name] = request
        for name, provide in providers.items():
            values[name] = provide(request)
        dependencies = dependencies_of(request)
        for name, field in services.items():
            values[name] = getattr(dependencies, field)
        return await endpoint(**values)

    first = inspect.Parameter(
        "request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request
    )
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [first, *others], return_annotation=hints.get("return", inspect.Signature.empty)
    )
    return run


def injectable(kind: type[T]) -> type[T]:
    """Marks a class whose constructor takes only calls, services, and injectable classes."""
    _injectable.add(kind)
    return kind


@cache
def _provider_of(kind: Any) -> Provider | None:
    """Returns a function that provides a parameter's value, based on its type.

    None if FastAPI passes the value.
    """
    if kind is Call:
        return authenticate
    if kind is ModelCall:
        return open_call
    if kind in _injectable:
        return _composer_of(kind)
    field = _service_field(kind)
    return None if field is None else lambda request: getattr(dependencies_of(request), field)


def _service_field(kind: Any) -> str | None:
    """Returns the field of `Dependencies` that has this type."""
    fields = [name for name, type_ in get_type_hints(Dependencies).items() if type_ is kind]
    return fields[0] if fields else None


def _composer_of(kind: type) -> Provider:
    init: Any = vars(kind)["__init__"]
    hints = get_type_hints(init)
    hints.pop("return", None)
    providers = {name: _provider_of(hint) for name, hint in hints.items()}
    missing = [name for name, provider in providers.items() if provider is None]
    assert not missing, f"{kind.__name__} takes {missing}, which are not services; this is a bug"

    def compose(request: Request) -> Any:
        return kind(**{name: provide(request) for name, provide in providers.items() if provide})

    return compose
