"""Other routes for Replicate's clients: models, versions, account, files, and webhook secret."""

from __future__ import annotations

import re
from typing import Any

from starlette.datastructures import UploadFile
from starlette.responses import Response

from api.bodies import object_in
from api.errors import NotFound
from api.http.call import Call
from api.http.dependencies import StartedAt
from api.http.encode_json import encode_json
from api.http.openapi import Described, ref_to, success
from api.http.router import Router
from api.http.upload_form import MAX_EDIT_FIELDS, open_form
from api.inputs.files import File, Files
from api.inputs.storage import Storage
from api.predictions.creation import OWNER, find_version, version_of
from api.problem_details import ProblemRoute
from api.replicate.replies import (
    AccountReply,
    DeploymentReply,
    DeploymentsPage,
    Hardware,
    ReplicateModel,
    SecretReply,
    VersionReply,
    VersionsPage,
)
from api.tasks import openapi_schema_of
from shared.errors import BadInput, ConfigurationError
from shared.models.catalog import Catalog, Model
from shared.predictions import MEDIA_TYPES, iso
from shared.settings import ApiSettings
from shared.stores.objects import UrlSigner
from shared.webhooks.event import tenant_secrets

COG_VERSION = "0.16.0"
"""The Cog version whose schema format we follow. For versions before 0.3.9, clients treat every
list output as an iterator.
"""

PAGE = 25
_HARDWARE_LIST: Described = {
    "content": {"application/json": {"schema": {"type": "array", "items": ref_to(Hardware)}}}
}
_CURSOR = re.compile(r"\d{1,9}")


def version_body(model: Model, created_at_s: float) -> dict[str, Any]:
    """Returns a model's only version, ready to be encoded as JSON."""
    return {
        "id": version_of(model),
        "created_at": iso(created_at_s),
        "cog_version": COG_VERSION,
        "openapi_schema": openapi_schema_of(model),
    }


def model_body(model: Model, owner: str, base_url: str, created_at_s: float) -> dict[str, Any]:
    """Returns a model in Replicate's format, ready to be encoded as JSON."""
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
    """Returns a model's only deployment, ready to be encoded as JSON."""
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
    """Returns a GPU type from the catalog in Replicate's format, ready to be encoded as JSON."""
    return {"sku": kind, "name": "CPU" if kind == "none" else f"NVIDIA {kind.upper()} GPU"}


router = Router(scope="any", route_class=ProblemRoute, tags=["predictions"])


@router.get("/models", include_in_schema=False)
async def list_models(
    call: Call, catalog: Catalog, started_at_s: StartedAt, cursor: str = ""
) -> Response:
    """Lists the models the key may use, in pages.

    Under /v1, this serves only Replicate's clients (api/routes/models.py).
    """
    if cursor and not _CURSOR.fullmatch(cursor):
        raise BadInput(
            "cursor: is invalid; use the cursor from the `next` URL of a page", field="cursor"
        )
    base_url, first = call.base_url, int(cursor or 0)
    models, following = call.visible_models(catalog), first + PAGE
    page = models[first:following]
    pages = {"previous": max(0, first - PAGE) if first else None, "next": None}
    if following < len(models):
        pages["next"] = following
    links = {
        name: None if at is None else f"{base_url}/v1/models?cursor={at}"
        for name, at in pages.items()
    }
    results = [model_body(model, OWNER, base_url, started_at_s) for model in page]
    return encode_json({**links, "results": results})


@router.get(
    "/models/{owner}/{name}",
    summary="Get a model in Replicate's shape",
    reply=ReplicateModel,
)
async def get_model(
    call: Call, catalog: Catalog, started_at_s: StartedAt, owner: str, name: str
) -> Response:
    """Returns a model from the catalog with its only version. Any owner is accepted."""
    model = call.visible_model(catalog, name)
    return encode_json(model_body(model, owner, call.base_url, started_at_s))


@router.get(
    "/models/{owner}/{name}/versions",
    summary="List the versions of a model",
    reply=VersionsPage,
)
async def list_versions(
    call: Call, catalog: Catalog, started_at_s: StartedAt, owner: str, name: str
) -> Response:
    """Lists the model's only version."""
    versions = [version_body(call.visible_model(catalog, name), started_at_s)]
    return encode_json({"previous": None, "next": None, "results": versions})


@router.get(
    "/models/{owner}/{name}/versions/{version}",
    summary="Get a version of a model",
    reply=VersionReply,
)
async def get_version(
    call: Call, catalog: Catalog, started_at_s: StartedAt, owner: str, name: str, version: str
) -> Response:
    """Returns the version, with its input and output schemas."""
    model = call.visible_model(catalog, name)
    try:
        is_this = find_version(catalog, version) is model
    except BadInput:
        is_this = False
    if not is_this:
        raise NotFound(f"{name} has no version {version[:80]!r}")
    return encode_json(version_body(model, started_at_s))


@router.get("/deployments", summary="List deployments", reply=DeploymentsPage)
async def list_deployments(call: Call, catalog: Catalog, started_at_s: StartedAt) -> Response:
    """Lists one deployment for each model the key may use, all on one page."""
    models = call.visible_models(catalog)
    deployments = [deployment_body(model, OWNER, started_at_s) for model in models]
    return encode_json({"previous": None, "next": None, "results": deployments})


@router.get("/deployments/{owner}/{name}", summary="Get a deployment", reply=DeploymentReply)
async def get_deployment(
    call: Call, catalog: Catalog, started_at_s: StartedAt, owner: str, name: str
) -> Response:
    """Each model in the catalog has one deployment with the same name."""
    return encode_json(deployment_body(call.visible_model(catalog, name), owner, started_at_s))


@router.get("/account", summary="Get your account", reply=AccountReply)
async def get_account(call: Call) -> Response:
    """Returns the key's tenant."""
    tenant = call.tenant
    return encode_json(
        {"type": "organization", "username": tenant, "name": tenant, "github_url": None}
    )


@router.get(
    "/hardware",
    summary="List hardware",
    answers={200: success("Done.", Hardware) | _HARDWARE_LIST},
)
async def list_hardware(call: Call, catalog: Catalog) -> Response:
    """Lists each kind of hardware used by the models available to the key."""
    kinds = {model.gpu.type for model in call.visible_models(catalog)}
    return encode_json([hardware_body(kind) for kind in sorted(kinds)])


@router.post("/files", scope="files", include_in_schema=False)
async def create_file(
    call: Call, files: Files, storage: Storage, url_signer: UrlSigner
) -> Response:
    """Accepts form data with the file as `content` and, optionally, a JSON object as `metadata`.

    Files are kept for a day and count toward the tenant's storage quota. Under /v1,
    api/routes/files.py is tried first.
    """
    call.check_charset()
    quota = storage.quota_of(call.caller, "content")
    async with (
        files.receiving(quota, call.body_bytes) as reservation,
        open_form(call.http, max_files=2, max_fields=MAX_EDIT_FIELDS) as form,
    ):
        content, metadata = form.get("content"), form.get("metadata")
        if not isinstance(content, UploadFile):
            raise BadInput("content: a file is required", field="content")
        text = await metadata.read() if isinstance(metadata, UploadFile) else metadata
        file = await files.add(
            quota,
            await content.read(),
            name=content.filename or "file",
            content_type=content.content_type or "",
            metadata=object_in(text, "metadata") if text else {},
            reservation=reservation,
        )
    return encode_json(_format_file(call, file, url_signer), 201)


@router.get("/files/{file_id}", scope="files", include_in_schema=False)
async def get_file(call: Call, files: Files, url_signer: UrlSigner, file_id: str) -> Response:
    """Returns the file's metadata. `urls.download` links to the file's data."""
    file = await files.find(call.tenant, file_id)
    return encode_json(_format_file(call, file, url_signer))


@router.get("/files", scope="files", include_in_schema=False)
async def list_files(call: Call, files: Files, url_signer: UrlSigner) -> Response:
    """Lists the newest files. Under /v1, api/routes/files.py is tried first."""
    results = await list_newest_files(call, files, url_signer)
    return encode_json({"previous": None, "next": None, "results": results})


async def list_newest_files(
    call: Call, files: Files, url_signer: UrlSigner
) -> list[dict[str, Any]]:
    """Returns the caller's newest files in Replicate's format."""
    return [_format_file(call, file, url_signer) for file in await files.newest(call.tenant)]


@router.delete("/files/{file_id}", scope="files", include_in_schema=False)
async def delete_file(call: Call, files: Files, file_id: str) -> Response:
    """Deletes a file immediately. Links to its data expire within an hour."""
    await files.delete(call.tenant, file_id)
    return Response(status_code=204)


@router.get(
    "/webhooks/default/secret",
    summary="Get the secret that signs your webhooks",
    scope="predictions",
    reply=SecretReply,
    errors=(404,),
)
async def get_secret(call: Call, settings: ApiSettings) -> Response:
    """Returns the tenant's secret for verifying webhook signatures."""
    try:
        first, *_ = tenant_secrets(settings.webhook_secrets, call.tenant)
    except ConfigurationError as error:
        raise NotFound("webhooks are not enabled: no secret is configured") from error
    return encode_json({"key": first})


def _format_file(call: Call, file: File, url_signer: UrlSigner) -> dict[str, Any]:
    # An uploaded page or script must not be served as if it came from this origin.
    media_type = (
        file.content_type
        if file.content_type in MEDIA_TYPES.values()
        else "application/octet-stream"
    )
    return {
        "id": file.id,
        "name": file.name,
        "content_type": file.content_type,
        "size": file.size,
        "etag": file.sha256,
        "checksums": {"sha256": file.sha256},
        "metadata": file.metadata,
        "created_at": iso(file.created_at_s),
        "expires_at": iso(file.expires_at_s),
        "urls": {
            "get": f"{call.base_url}/v1/files/{file.id}",
            "download": call.base_url + url_signer.path(file.key, media_type),
        },
    }
