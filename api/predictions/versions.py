"""How Replicate's clients name a catalog's models, and see them: each with its only version."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from api.schemas.replicate import openapi_schema_of
from shared.catalog import Catalog, Model
from shared.errors import BadInput, UnknownModel
from shared.predictions import iso

OWNER = "penstock"
"""Shown where the caller named no other."""
COG_VERSION = "0.16.0"
"""Whose schemas ours are like: before 0.3.9 clients take every list for an iterator."""
_CLIENTS = re.compile(r"replicate[-/]", re.IGNORECASE)


def version_of(model: Model) -> str:
    """The id of a model's version: 256 bits of BLAKE2b (RFC 7693) over what decides its results."""
    facts = "\n".join((model.name, model.source, model.revision, model.precision))
    return hashlib.blake2b(facts.encode(), digest_size=32).hexdigest()


def find_version(catalog: Catalog, version: str) -> Model:
    """The model that `version` names: its name or alias, with or without an owner before it, or a version's id.

    Raises:
        BadInput: none is of this name or version.
    """
    named, _, given_id = version.partition(":")
    name = given_id or named.rpartition("/")[2]
    for model in catalog.models:
        if name == version_of(model):
            return model
    try:
        return catalog.find(name)
    except UnknownModel as error:
        raise BadInput(f"version: {error.message}", field="version") from error


def is_replicates_client(user_agent: str) -> bool:
    """Whether one of Replicate's own clients asks: `replicate-python/1.0.7`, `replicate-javascript/1.3.0` and the like.

    Nothing else tells it from OpenAI's where both ask for the same path: keys and hosts are the same here.
    """
    return _CLIENTS.match(user_agent) is not None


def version_body(model: Model, created_at_s: float) -> dict[str, Any]:
    """The only version of a model, ready for JSON."""
    return {
        "id": version_of(model),
        "created_at": iso(created_at_s),
        "cog_version": COG_VERSION,
        "openapi_schema": openapi_schema_of(model),
    }


def model_body(model: Model, owner: str, base_url: str, created_at_s: float) -> dict[str, Any]:
    """A model in Replicate's shape, ready for JSON."""
    return {
        "url": f"{base_url}/v1/models/{owner}/{model.name}",
        "owner": owner,
        "name": model.name,
        "description": f"{model.task}: {model.source}, revision {model.revision}",
        "visibility": "public",
        "github_url": None,
        "paper_url": None,
        "license_url": None,
        "run_count": 0,
        "cover_image_url": None,
        "default_example": None,
        "latest_version": version_body(model, created_at_s),
    }
