"""The endpoints of OpenAI's API that run models, apart from HTTP. Routes and batches share them."""

from __future__ import annotations

from api.endpoints.base import Endpoint
from api.endpoints.embeddings import EmbeddingsEndpoint
from api.endpoints.images import GenerationsEndpoint
from api.endpoints.text import ChatEndpoint, CompletionEndpoint

ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        EmbeddingsEndpoint(),
        GenerationsEndpoint(),
        ChatEndpoint(),
        CompletionEndpoint(),
    )
}
"""By path: those that lines of a batch may name."""
