"""GET /v1/models: the catalog in OpenAI's format, or in Replicate's for Replicate's clients."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from api.errors import EXPECTED_ERRORS
from api.http.call import Call
from api.http.dependencies import StartedAt
from api.http.encode_json import encode_json
from api.http.injection import authenticate
from api.http.openapi import (
    Responses,
    of_both_apis,
    ref_to,
    success,
)
from api.http.router import Router
from api.predictions.creation import is_replicates_client
from api.problem_details import problem_response
from api.replicate import models as prediction_models
from api.replicate.replies import ModelsPage
from shared.models.catalog import AdaptedModel, Catalog, Model
from shared.models.entry import PriceTerms, Rerank, ServedApi
from shared.models.tasks.embedding import EmbeddingTask

VARIES = {"vary": "user-agent"}
"""Signals to caches that the path has two responses."""


class ModelItem(msgspec.Struct):
    """A served model."""

    id: str
    created: int
    task: str
    aliases: tuple[str, ...] = ()
    owned_by: str = "penstock"
    object: Literal["model"] = "model"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    """A text model's context size in tokens, including generated tokens, under vLLM's name for it.
    """
    context_length: int | msgspec.UnsetType = msgspec.UNSET
    """Same as above, under OpenRouter's name for it."""
    rerank: Rerank | msgspec.UnsetType = msgspec.UNSET
    """The kind of score that the model returns in /v1/rerank, if it can rank."""
    api: ServedApi | msgspec.UnsetType = msgspec.UNSET
    """The endpoint that serves a custom model, if it is one of OpenAI's or Mistral's."""
    root: str | msgspec.UnsetType = msgspec.UNSET
    """The same as `parent`."""
    parent: str | msgspec.UnsetType = msgspec.UNSET
    """The model that is served with a LoRA adapter under this name. Omitted if the key may not use
    it.
    """
    price: dict[str, float] = {}
    """Current prices in US dollars, keyed by their names in the catalog. Prices of 0 are omitted.
    """


class ModelsReply(msgspec.Struct):
    """All served models."""

    data: list[ModelItem]
    object: Literal["list"] = "list"


router = Router(scope="any", tags=["models"])

_LISTED: Responses = {
    200: {
        **success("The models. Replicate's clients get a page in Replicate's format.", ModelsReply),
        "content": {
            "application/json": {"schema": {"anyOf": [ref_to(ModelsReply), ref_to(ModelsPage)]}}
        },
    }
}


@router.get("/v1/models", summary="List models", responses=of_both_apis(401, 422) | _LISTED)
async def list_models(
    request: Request,
    catalog: Catalog,
    started_at_s: StartedAt,
    cursor: Annotated[str, Query(include_in_schema=False)] = "",
) -> Response:
    """Lists the models the key may use, in OpenAI's format.

    Replicate's clients get pages in Replicate's format.
    """
    if is_replicates_client(request.headers.get("user-agent", "")):
        return await _for_replicate(request, catalog, started_at_s, cursor)
    call = authenticate(request)
    models = call.visible_models(catalog)
    reply = ModelsReply([_item(call, model, started_at_s) for model in models])
    return encode_json(reply, headers=VARIES)


async def _for_replicate(
    request: Request, catalog: Catalog, started_at_s: StartedAt, cursor: str
) -> Response:
    try:
        # Authenticated here because these clients expect a problem response even for a wrong key.
        call = authenticate(request)
        response = await prediction_models.list_models(call, catalog, started_at_s, cursor)
    except EXPECTED_ERRORS as error:
        response = problem_response(request, error)
    response.headers.update(VARIES)
    return response


@router.get("/v1/models/{model}", summary="Get a model", reply=ModelItem)
async def get_model(call: Call, catalog: Catalog, started_at_s: StartedAt, model: str) -> Response:
    """Returns a model by its name or an alias."""
    item = _item(call, call.visible_model(catalog, model), started_at_s)
    return Response(msgspec.json.encode(item), media_type="application/json")


def _item(call: Call, model: Model, started_at_s: float) -> ModelItem:
    item = ModelItem(model.name, int(started_at_s), model.task, model.aliases)
    if model.definition.has_context:
        item.max_model_len = item.context_length = model.generation.context_tokens
    if isinstance(model.definition, EmbeddingTask):
        item.rerank = model.rerank
    if model.api is not None:
        item.api = model.api
    if isinstance(model, AdaptedModel) and call.may_see(model.base):
        item.root = item.parent = model.base
    item.price = _prices(model.price.terms_at(time.time()))
    return item


def _prices(terms: PriceTerms) -> dict[str, float]:
    figures: dict[str, Any] = terms.model_dump()
    return {name: usd for name, usd in figures.items() if name.endswith("_usd") and usd}
