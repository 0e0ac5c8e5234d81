"""POST /v1/embeddings.

Vectors stay bytes from the worker's reply to the answer, except for floats.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.endpoints.embeddings import embeddings_reply, inputs_of, kept_dimensions
from api.http.fast_route import FastRoute
from api.http.openapi import inference_body, inference_responses
from api.http.openapi_headers import TRUNCATED_HEADER
from api.http.request import open_request
from api.schemas.openai import EmbeddingsBody
from api.schemas.openai_replies import EmbeddingsReply

router = APIRouter(route_class=FastRoute)
LARGE_ITEMS = 256
"""From this many items on, room is checked before the cache keys are made, which takes
milliseconds."""
_encoder = msgspec.json.Encoder()


@router.post(
    "/v1/embeddings",
    summary="Create embeddings",
    openapi_extra=inference_body(EmbeddingsBody),
    responses=inference_responses(EmbeddingsReply, "X-Penstock-Truncated-Tokens"),
)
async def create_embeddings(request: Request) -> Response:
    """Answers when all vectors are ready.

    Each text that was embedded before comes from the cache.
    """
    call = open_request(request)
    body = await call.read_json(EmbeddingsBody)
    model = call.dependencies.catalog.find(body.model, "embedding")
    call.use(model)
    kept_dimensions(body, model)
    inputs = inputs_of(body, model)
    if len(inputs) >= LARGE_ITEMS:
        call.check_room(model, 1)
    async with call.inferred(model, inputs) as response:
        reply = embeddings_reply(body, model, response.outcomes)
        answer = Response(_encoder.encode(reply), media_type="application/json")
    call.context.is_compressible = body.encoding_format == "float"
    if body.truncate:
        truncated = sum(item.truncated_tokens or 0 for item in reply.data)
        call.context.headers[TRUNCATED_HEADER] = str(truncated)
    return answer
