"""POST /v1/embeddings.

Vectors stay bytes from the worker's reply to the answer, except for floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from api.http.fast_route import FastRoute
from api.http.openapi import inference_body, inference_responses
from api.http.openapi_headers import TRUNCATED_HEADER
from api.http.request import open_request
from api.inputs.texts import text_inputs
from api.schemas.openai import EmbeddingsBody
from api.schemas.openai_replies import EmbeddingItem, EmbeddingsReply, Usage
from shared.catalog import Model
from shared.errors import BadInput, PenstockError
from shared.messages import ItemOutcome
from shared.tasks.embedding import EmbeddingResult

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
    call.context.model = model.name
    dimensions = _dimensions(body, model)
    inputs = text_inputs(
        body.input, model, truncate=body.truncate or "none", tokenizer=body.tokenizer
    )
    if len(inputs) >= LARGE_ITEMS:
        call.check_room(model, 1)
    outcomes = (await call.infer(model, inputs)).outcomes
    reply = _reply(outcomes, model, dimensions, as_floats=body.encoding_format == "float")
    call.context.is_compressible = body.encoding_format == "float"
    if body.truncate:
        call.context.headers[TRUNCATED_HEADER] = str(_add_truncated(reply, outcomes))
    return Response(_encoder.encode(reply), media_type="application/json")


def _add_truncated(reply: EmbeddingsReply, outcomes: Sequence[ItemOutcome]) -> int:
    """Adds to each vector how many tokens of its text were cut. Returns the total."""
    found = [getattr(outcome.result, "truncated_tokens", 0) for outcome in outcomes]
    for item, tokens in zip(reply.data, found, strict=True):
        item.truncated_tokens = tokens
    return sum(found)


def _dimensions(body: EmbeddingsBody, model: Model) -> int:
    assert model.dimensions is not None, (
        "the catalog refuses embedding models without; this is a bug"
    )
    if body.dimensions is not None and body.dimensions > model.dimensions:
        raise BadInput(
            f"dimensions: {model.name} has {model.dimensions}, not {body.dimensions}",
            field="dimensions",
        )
    return body.dimensions or model.dimensions


def _reply(
    outcomes: Sequence[ItemOutcome], model: Model, dimensions: int, *, as_floats: bool
) -> EmbeddingsReply:
    results = [outcome.result for outcome in outcomes]
    found = [result for result in results if isinstance(result, EmbeddingResult)]
    if len(found) < len(results):
        raise PenstockError(f"{model.name} gave a result that is no vector; this is a bug")
    vectors = [result.vector for result in found]
    embeddings: Sequence[bytes | list[float]] = vectors
    if as_floats or dimensions != model.dimensions:
        matrix = _matrix(vectors, model, dimensions)
        embeddings = (
            [row.tolist() for row in matrix] if as_floats else [row.tobytes() for row in matrix]
        )
    tokens = sum(result.tokens for result in found)
    items = [EmbeddingItem(index, embedding) for index, embedding in enumerate(embeddings)]
    return EmbeddingsReply(items, model.name, Usage(tokens, tokens))


def _matrix(vectors: Sequence[bytes], model: Model, dimensions: int) -> NDArray[np.float32]:
    """The vectors as an (n, dimensions) matrix.

    Cut vectors are normalized again, as in OpenAI's API.
    """
    matrix = np.frombuffer(b"".join(vectors), dtype="<f4").reshape(len(vectors), -1)
    if dimensions == model.dimensions:
        return matrix
    cut = matrix[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = np.divide(
        cut, np.where(lengths > 0, lengths, 1), dtype=np.float32
    )
    return scaled
