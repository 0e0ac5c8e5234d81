"""What a key may do: what each route needs of its scopes and models, in one table."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, TypeAlias

from api.errors import Forbidden
from shared.tenants.directory import Scope
from shared.tenants.plan import Caller

ModelCheck: TypeAlias = Literal["", "named", "stored", "listed"]
"""Where a route meets models that a key may not use. `named`: the request names one. `stored`: what
it reads or changes was computed by one. `listed`: it leaves those of others out.
"""


class Rule(NamedTuple):
    """What a route needs. No scope: any key."""

    scope: Scope | None
    model: ModelCheck = ""


_RULES_OF_PATHS: dict[str, tuple[str, Rule]] = {
    "/embeddings": ("POST", Rule("embeddings", "named")),
    "/images/generations": ("POST", Rule("images", "named")),
    "/images/edits": ("POST", Rule("images", "named")),
    "/chat/completions": ("POST", Rule("text", "named")),
    "/chat/completions/{completion_id}": ("GET", Rule("text", "stored")),
    "/completions": ("POST", Rule("text", "named")),
    "/responses": ("POST", Rule("text", "named")),
    "/responses/{response_id}": ("GET DELETE", Rule("text", "stored")),
    "/responses/{response_id}/cancel": ("POST", Rule("text", "stored")),
    "/models/{owner}/{name}/predictions": ("POST", Rule("predictions", "named")),
    "/deployments/{owner}/{name}/predictions": ("POST", Rule("predictions", "named")),
    "/predictions/{prediction_id}/cancel": ("POST", Rule("predictions", "stored")),
    "/predictions/{prediction_id}/stream": ("GET", Rule("predictions", "stored")),
    "/predictions/{prediction_id}/webhooks": ("GET", Rule("predictions", "stored")),
    "/predictions/{prediction_id}/webhooks/replay": ("POST", Rule("predictions", "stored")),
    "/webhooks/default/secret": ("GET", Rule("predictions")),
    "/files": ("GET POST", Rule("files")),
    "/files/{file_id}": ("GET DELETE", Rule("files")),
    "/files/{file_id}/content": ("GET", Rule("files")),
    "/batches": ("GET POST", Rule("batches")),
    "/batches/{batch_id}": ("GET", Rule("batches")),
    "/batches/{batch_id}/cancel": ("POST", Rule("batches")),
    "/usage": ("GET", Rule("usage")),
    "/organization/costs": ("GET", Rule("usage")),
    "/organization/usage/embeddings": ("GET", Rule("usage")),
    "/organization/usage/images": ("GET", Rule("usage")),
    "/reports": ("GET", Rule("usage")),
    "/reports/{name}": ("GET", Rule("usage")),
    "/admin/keys": ("GET POST", Rule("admin")),
    "/admin/keys/{key_id}": ("GET DELETE", Rule("admin")),
    "/admin/keys/{key_id}/rotate": ("POST", Rule("admin")),
    "/admin/plans": ("GET", Rule("admin")),
    "/admin/plans/{name:path}": ("PUT DELETE", Rule("admin")),
    "/admin/tenants": ("GET", Rule("admin")),
    "/admin/tenants/{name:path}": ("PUT", Rule("admin")),
    "/admin/audit": ("GET", Rule("admin")),
    # What is served here, which every key may see.
    "/models": ("GET", Rule(None, "listed")),
    "/models/{model}": ("GET", Rule(None, "listed")),
    "/models/{owner}/{name}": ("GET", Rule(None, "listed")),
    "/models/{owner}/{name}/versions": ("GET", Rule(None, "listed")),
    "/models/{owner}/{name}/versions/{version}": ("GET", Rule(None, "listed")),
    "/deployments": ("GET", Rule(None, "listed")),
    "/deployments/{owner}/{name}": ("GET", Rule(None, "listed")),
    "/hardware": ("GET", Rule(None, "listed")),
    "/status": ("GET", Rule(None, "listed")),
    "/account": ("GET", Rule(None)),
}
RULES: dict[tuple[str, str], Rule] = {
    (method, path): rule
    for path, (methods, rule) in _RULES_OF_PATHS.items()
    for method in methods.split()
} | {
    ("GET", "/predictions"): Rule("predictions", "listed"),
    ("POST", "/predictions"): Rule("predictions", "named"),
    ("GET", "/predictions/{prediction_id}"): Rule("predictions", "stored"),
    ("DELETE", "/predictions/{prediction_id}"): Rule("predictions", "stored"),
    ("PUT", "/predictions/{prediction_id}"): Rule("predictions", "named"),
}
"""What each route needs, by method and template without /v1. HEAD is GET. A route that is not here
needs an unrestricted key.
"""
_UNKNOWN = Rule("all")


class MissingScope(Forbidden):
    """This API key may not do this."""

    code = "missing_scope"


class ModelForbidden(Forbidden):
    """This API key may not use this model."""

    code = "model_not_allowed"


class StoredWork(Protocol):
    """What was computed and can be read again."""

    @property
    def endpoint(self) -> str:
        """The path that it was created by. Empty: that of predictions."""

    @property
    def model(self) -> str:
        """Its name in the catalog."""


def check_access(caller: Caller, method: str, path: str, stored: StoredWork | None = None) -> None:
    """Refuses what the key of the caller may not do, whichever door it comes by.

    Args:
        caller: whose request it is.
        method: of the request. HEAD counts as GET.
        path: the template of the route, such as `/v1/files/{file_id}`.
        stored: what it reads or changes, if that was computed by a model. The key needs the scope
            of its endpoint too.

    Raises:
        MissingScope: the key lacks a scope.
        ModelForbidden: it may not use the model.
    """
    method = "GET" if method == "HEAD" else method
    _check_scope(caller, method, rule_of(method, path).scope)
    if stored is not None:
        if stored.endpoint:
            _check_scope(caller, method, rule_of("POST", stored.endpoint).scope)
        check_model(caller, stored.model)


def may_see(caller: Caller, path: str, stored: StoredWork) -> bool:
    """Whether a list at `path` has this for the caller."""
    try:
        check_access(caller, "GET", path, stored)
    except Forbidden:
        return False
    return True


def rule_of(method: str, path: str) -> Rule:
    """What a route needs, by its template with or without /v1."""
    return RULES.get((method, path.removeprefix("/v1")), _UNKNOWN)


def _check_scope(caller: Caller, method: str, needed: Scope | None) -> None:
    held = caller.scopes
    if needed is None or (held is not None and needed in held):
        return
    reads = method == "GET"
    if needed != "admin" and (held is None or "all" in held or (reads and "read" in held)):
        return
    raise MissingScope(f"this API key lacks the scope {needed!r}")


def check_model(caller: Caller, model: str) -> None:
    """Refuses a model that the key of the caller may not use.

    Raises:
        ModelForbidden: it is not among the key's models.
    """
    if caller.models is not None and model not in caller.models:
        raise ModelForbidden(f"this API key may not use the model {model!r}", field="model")
