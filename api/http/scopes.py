"""What a key may do: the scope that each route needs, and the models of a key."""

from __future__ import annotations

from functools import lru_cache

from api.errors import Forbidden
from shared.tenants.directory import Scope
from shared.tenants.plan import Caller

SCOPE_OF_GROUP: dict[str, Scope | None] = {
    "embeddings": "embeddings",
    "images": "images",
    "chat": "text",
    "completions": "text",
    "responses": "text",
    "predictions": "predictions",
    "webhooks": "predictions",
    "files": "files",
    "batches": "batches",
    "usage": "usage",
    "organization": "usage",
    "reports": "usage",
    "admin": "admin",
    # What is served here, which every key may see.
    "models": None,
    "status": None,
    "deployments": None,
    "account": None,
    "hardware": None,
}
"""The scope that a route needs, by the first part of its path after /v1. A route of another group
needs an unrestricted key. None: any key.
"""


class MissingScope(Forbidden):
    """This API key may not do this."""

    code = "missing_scope"


class ModelForbidden(Forbidden):
    """This API key may not use this model."""

    code = "model_not_allowed"


def check_scope(caller: Caller, method: str, path: str) -> None:
    """Refuses what the key of the caller may not do.

    Args:
        caller: whose request it is.
        method: of the request. HEAD counts as GET.
        path: the template of the route, such as `/v1/files/{file_id}`.

    Raises:
        MissingScope: the key lacks the scope of the route.
    """
    held, needed = caller.scopes, scope_of(path)
    if needed is None or (held is not None and needed in held):
        return
    reads = method in ("GET", "HEAD")
    if needed != "admin" and (held is None or "all" in held or (reads and "read" in held)):
        return
    raise MissingScope(f"this API key lacks the scope {needed!r}")


@lru_cache(maxsize=256)
def scope_of(path: str) -> Scope | None:
    """The scope that a route needs. None: any key."""
    parts = path.removeprefix("/v1").strip("/").split("/")
    if parts[-1] == "predictions":  # of a model, or of a deployment
        return "predictions"
    return SCOPE_OF_GROUP.get(parts[0], "all")


def check_model(caller: Caller, model: str) -> None:
    """Refuses a model that the key of the caller may not use.

    Raises:
        ModelForbidden: it is not among the key's models.
    """
    if caller.models is not None and model not in caller.models:
        raise ModelForbidden(f"this API key may not use the model {model!r}", field="model")
