"""Models and their versions in Replicate's shape."""

from __future__ import annotations

from typing import Any

from api.predictions.creation import version_of
from api.tasks import openapi_schema_of
from shared.catalog import Model
from shared.predictions import iso

COG_VERSION = "0.16.0"
"""Whose schemas ours are like: before 0.3.9 clients take every list for an iterator."""


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


def deployment_body(model: Model, owner: str, created_at_s: float) -> dict[str, Any]:
    """The only deployment of a model, ready for JSON."""
    release = {
        "number": 1,
        "model": f"{owner}/{model.name}",
        "version": version_of(model),
        "created_at": iso(created_at_s),
        "created_by": None,
        "configuration": {
            "hardware": model.gpu.type,
            "min_instances": model.replicas.min,
            "max_instances": model.replicas.max,
        },
    }
    return {"owner": owner, "name": model.name, "current_release": release}


def hardware_body(kind: str) -> dict[str, Any]:
    """A GPU type of the catalog in Replicate's shape, ready for JSON."""
    return {"sku": kind, "name": "CPU" if kind == "none" else f"NVIDIA {kind.upper()} GPU"}
