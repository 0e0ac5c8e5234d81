"""POST /v1/embeddings in OpenAI's shape: from a body to inputs, and from outcomes to a reply.

Vectors stay bytes from the worker's reply to the answer, except for floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

import msgspec
import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)
from starlette.requests import Request
from starlette.responses import Response

from api.bodies import Body, EndUser, Text, Tokens, Usage, null_is, shape_of
from api.http.fast_route import FastRoute
from api.http.openapi import TRUNCATED_HEADER, inference_body, inference_responses
from api.http.request import open_request
from api.openai.endpoint import Endpoint, LineRequest, ReplyTools
from api.tasks.embedding import text_inputs
from shared.catalog import Catalog, Model
from shared.errors import BadInput, PenstockError
from shared.messages import ItemOutcome
from shared.tasks.embedding import EmbeddingResult, TextInput, TokensInput


class EmbeddingItem(msgspec.Struct):
    """One vector: a list of floats, or base64 of little-endian float32.

    `truncated_tokens` says how many tokens of the text were cut. It is present if the request has
    `truncate`.
    """

    index: int
    embedding: list[float] | bytes
    object: Literal["embedding"] = "embedding"
    truncated_tokens: int | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsReply(msgspec.Struct):
    """Vectors in the order of the inputs."""

    data: list[EmbeddingItem]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class EmbeddingsBody(Body):
    """Texts to embed, or token ids together with `tokenizer`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "all-MiniLM-L6-v2", "input": ["a cat", "a kitten"]}
        },
    )

    model: str
    input: Annotated[
        Annotated[Text, Tag("text:")]
        | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("texts:")]
        | Annotated[Tokens, Tag("tokens:")]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), Tag("token_lists:")],
        Discriminator(shape_of),
    ]
    encoding_format: Annotated[Literal["float", "base64"], null_is("float")] = "float"
    dimensions: int | None = Field(
        None,
        ge=1,
        description="How many dimensions to keep, from the first. The vector is normalized again.",
    )
    truncate: Literal["end", "start"] | None = Field(
        None,
        description=(
            "Extension: which side of a too long text is cut. "
            "Without it such texts are refused (400)."
        ),
    )
    tokenizer: str | None = Field(
        None,
        description=(
            "Extension: the model whose tokenizer made the token ids in `input`; "
            "without it they are refused."
        ),
    )
    user: EndUser | None = None


FLOAT_BYTES = 22
"""Maximum size of a coordinate in JSON."""
_REPLY_BYTES = 256
_encoder = msgspec.json.Encoder()


class EmbeddingsEndpoint(Endpoint):
    """Lines whose body is that of POST /v1/embeddings."""

    path = "/v1/embeddings"

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item for each text."""
        body = EmbeddingsBody.model_validate_json(data, strict=True)
        model = catalog.find(body.model, "embedding")
        dimensions = kept_dimensions(body, model)
        inputs = inputs_of(body, model)
        bytes_each = dimensions * FLOAT_BYTES if body.encoding_format == "float" else dimensions * 6
        return LineRequest(body, model, inputs, True, _REPLY_BYTES + len(inputs) * bytes_each)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the vectors as the body asks for them."""
        body = cast(EmbeddingsBody, request.body)
        return _encoder.encode(embeddings_reply(body, request.model, outcomes))


def inputs_of(body: EmbeddingsBody, model: Model) -> list[TextInput | TokensInput]:
    """Returns the items of a body.

    Raises:
        BadInput: the model can't compute them.
    """
    return text_inputs(
        body.input, model, truncate=body.truncate or "none", tokenizer=body.tokenizer
    )


def kept_dimensions(body: EmbeddingsBody, model: Model) -> int:
    """Returns the number of dimensions of each vector that the caller wants.

    Raises:
        BadInput: it exceeds those of the model.
    """
    assert model.dimensions is not None, (
        "the catalog refuses embedding models without; this is a bug"
    )
    if body.dimensions is not None and body.dimensions > model.dimensions:
        raise BadInput(
            f"dimensions: {model.name} has {model.dimensions}, not {body.dimensions}",
            field="dimensions",
        )
    return body.dimensions or model.dimensions


def embeddings_reply(
    body: EmbeddingsBody, model: Model, outcomes: Sequence[ItemOutcome]
) -> EmbeddingsReply:
    """Returns the reply to a body, all of whose items have a result.

    With `truncate` each vector says how many tokens of its text were cut.
    """
    results = [outcome.result for outcome in outcomes]
    outputs = [result for result in results if isinstance(result, EmbeddingResult)]
    if len(outputs) < len(results):
        raise PenstockError(f"{model.name} returned a result that is not a vector; this is a bug")
    dimensions, as_floats = kept_dimensions(body, model), body.encoding_format == "float"
    vectors = [result.vector for result in outputs]
    embeddings: Sequence[bytes | list[float]] = vectors
    if as_floats or dimensions != model.dimensions:
        matrix = _matrix(vectors, model, dimensions)
        embeddings = (
            [row.tolist() for row in matrix] if as_floats else [row.tobytes() for row in matrix]
        )
    tokens = sum(result.tokens for result in outputs)
    items = [EmbeddingItem(index, embedding) for index, embedding in enumerate(embeddings)]
    if body.truncate:
        for item, result in zip(items, outputs, strict=True):
            item.truncated_tokens = result.truncated_tokens
    return EmbeddingsReply(items, model.name, Usage(tokens, tokens))


def _matrix(vectors: Sequence[bytes], model: Model, dimensions: int) -> NDArray[np.float32]:
    """Returns the vectors as an (n, dimensions) matrix.

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


router = APIRouter(route_class=FastRoute)
LARGE_ITEMS = 256
"""From this many items on, admission is checked before the cache keys are computed, which takes
milliseconds."""


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
