"""GET /v1/models: the catalogue, as OpenAI's clients list it."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.inbound import tenant_of
from api.openapi import replies_with
from api.parts import Parts, parts_of
from api.schemas import ModelItem, ModelsReply
from shared.catalogue import Model

router = APIRouter()


@router.get("/v1/models", summary="List the served models", responses=replies_with(ModelsReply))
async def list_models(request: Request) -> Response:
    """All models of the catalogue."""
    tenant_of(request)
    parts = parts_of(request)
    reply = ModelsReply([_item(model, parts) for model in parts.catalogue.models])
    return Response(msgspec.json.encode(reply), media_type="application/json")


@router.get("/v1/models/{model}", summary="Look at one model", responses=replies_with(ModelItem))
async def get_model(request: Request, model: str) -> Response:
    """One model, by its name or an alias."""
    tenant_of(request)
    parts = parts_of(request)
    return Response(msgspec.json.encode(_item(parts.catalogue.find(model), parts)), media_type="application/json")


def _item(model: Model, parts: Parts) -> ModelItem:
    return ModelItem(model.name, int(parts.started_at_s), model.task, model.aliases)
