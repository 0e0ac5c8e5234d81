"""The list of all routers, in the order of the OpenAPI document, and everything derived from it.

A new endpoint is declared in the module it belongs to (api/http/router.py). A new module is added
here.
"""

from __future__ import annotations

from api.anthropic import messages
from api.batches.endpoint import Endpoint
from api.http.auth import AccessRules
from api.http.router import Router
from api.mistral import ocr
from api.openai import (
    audio,
    batches,
    chat,
    conversations,
    embeddings,
    image_edits,
    images,
    rerank,
    responses,
    speech,
    stored_chats,
    token_counts,
    usage,
)
from api.replicate import events as prediction_events
from api.replicate import models as prediction_models
from api.replicate import predictions
from api.routes import (
    admin,
    admin_predictions,
    files,
    health,
    invoices,
    models,
    pages,
    reports,
)

ROUTERS: tuple[Router, ...] = (
    embeddings.router,
    rerank.router,
    images.router,
    image_edits.router,
    audio.router,
    speech.router,
    ocr.router,
    chat.router,
    responses.router,
    files.router,
    batches.router,
    models.router,
    usage.router,
    reports.router,
    invoices.router,
    admin.router,
    admin_predictions.router,
    health.router,
    pages.router,
    chat.stored_router,
    stored_chats.router,
    token_counts.router,
    responses.stored_router,
    conversations.router,
    messages.router,
)
REPLICATE_ROUTERS: tuple[Router, ...] = (
    predictions.creation_router,
    predictions.router,
    prediction_events.router,
    prediction_models.router,
)
"""Routers served with and without /v1, because some clients add the prefix themselves."""

ACCESS_RULES = AccessRules(
    {
        route: scope
        for router in (*ROUTERS, *REPLICATE_ROUTERS)
        for route, scope in router.scopes.items()
    }
)
"""The scopes that keys need for each endpoint."""
LINE_ENDPOINTS: dict[str, Endpoint] = {
    path: lines for router in ROUTERS for path, lines in router.lines.items()
} | {f"/v1{path}": lines for router in REPLICATE_ROUTERS for path, lines in router.lines.items()}
"""The endpoints that batch lines may use, keyed by path."""
