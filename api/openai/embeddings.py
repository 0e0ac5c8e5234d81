"""POST /v1/embeddings as in OpenAI's API: converts bodies to inputs, and outcomes to responses.

Vectors remain bytes from the worker's reply to the response, unless floats are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from api.batches.endpoint import Endpoint, LineRequest, ReplyTools
from api.batches.files import BatchFiles
from api.bodies import Usage
from api.http.call import ModelCall
from api.http.fast_route import FastRoute
from api.http.inference import Inference
from api.http.openapi import TRUNCATED_HEADER
from api.http.router import Router
from api.inputs.files import Files
from api.openai.embedding_windows import cut_texts, read_texts, run_as_batch
from api.openai.embeddings_schemas import (
    EmbeddingItem,
    EmbeddingsBody,
    EmbeddingsReply,
    FileOfText,
)
from api.tasks.base import check_results
from api.tasks.embedding import (
    normalize_rows,
    text_inputs,
)
from shared.errors import BadInput
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Model
from shared.models.tasks.embedding import (
    EmbeddingResult,
    TextInput,
    TokensInput,
)

FLOAT_BYTES = 22
"""Maximum size of one coordinate in JSON, in bytes."""
_REPLY_BYTES = 256
_encoder = msgspec.json.Encoder()

LARGE_ITEMS = 256
"""For requests with at least this many items, admission is checked before the cache keys are
computed, which takes milliseconds. Requests with at least this many windows get `batch` priority
unless the caller chose a priority.
"""


class EmbeddingsEndpoint(Endpoint):
    """Batch lines with the same body as POST /v1/embeddings."""

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item per text."""
        body = EmbeddingsBody.model_validate_json(data, strict=True)
        model = catalog.find(body.model, "embedding")
        if body.chunk is not None:
            raise BadInput(
                "chunk: is not supported in batches; send long texts to POST /v1/embeddings",
                field="chunk",
            )
        check_dimensions(body, model)
        dimensions = body.dimensions or dimensions_of(model)
        inputs = inputs_of(body, model)
        bytes_each = dimensions * FLOAT_BYTES if body.encoding_format == "float" else dimensions * 6
        return LineRequest(body, model, inputs, True, _REPLY_BYTES + len(inputs) * bytes_each)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the vectors in the format requested in the body."""
        body = cast(EmbeddingsBody, request.body)
        return _encoder.encode(embeddings_reply(body, request.model, outcomes))


def inputs_of(body: EmbeddingsBody, model: Model) -> list[TextInput | TokensInput]:
    """Returns a body's items.

    Raises:
        BadInput: the model can't process the items.
    """
    if isinstance(body.input, FileOfText):
        raise BadInput("input: a file is only allowed with `chunk`", field="input")
    return text_inputs(
        body.input, model, truncate=body.truncate or "none", tokenizer=body.tokenizer
    )


def check_dimensions(body: EmbeddingsBody, model: Model) -> None:
    """Rejects a request for more dimensions than the model has.

    Raises:
        BadInput: the number exceeds the model's dimensions.
    """
    if body.dimensions is not None and body.dimensions > dimensions_of(model):
        raise BadInput(
            f"dimensions: must be at most {model.dimensions} for {model.name}, got "
            f"{body.dimensions}",
            field="dimensions",
        )


def dimensions_of(model: Model) -> int:
    """Returns the number of dimensions in the model's vectors."""
    assert model.dimensions is not None, (
        "the catalog rejects embedding models without dimensions; this is a bug"
    )
    return model.dimensions


def embeddings_reply(
    body: EmbeddingsBody, model: Model, outcomes: Sequence[ItemOutcome]
) -> EmbeddingsReply:
    """Returns the response to a body whose items all have results.

    With `truncate`, each vector includes the number of tokens cut from its text.
    """
    outputs = check_results((outcome.result for outcome in outcomes), EmbeddingResult, model)
    dimensions = body.dimensions or dimensions_of(model)
    as_floats = body.encoding_format == "float"
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

    Shortened vectors are normalized again, as in OpenAI's API.

    Raises:
        ModelFailed: a shortened vector is zero.
    """
    matrix = np.frombuffer(b"".join(vectors), dtype="<f4").reshape(len(vectors), -1)
    if dimensions == model.dimensions:
        return matrix
    return normalize_rows(matrix[:, :dimensions])


router = Router(scope="embeddings", route_class=FastRoute)


@router.post(
    "/v1/embeddings",
    summary="Create embeddings",
    body=EmbeddingsBody,
    reply=EmbeddingsReply,
    headers=("X-Penstock-Truncated-Tokens",),
    lines=EmbeddingsEndpoint(),
)
async def create_embeddings(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    files: Files,
    batch_files: BatchFiles,
) -> Response:
    """Responds once all vectors are ready.

    Vectors for previously embedded texts come from the cache.
    """
    body = await call.read_json(EmbeddingsBody)
    model = catalog.find(body.model, "embedding")
    call.use(model)
    check_dimensions(body, model)
    windows = None
    if body.chunk is None:
        inputs: Sequence[TextInput | TokensInput] = inputs_of(body, model)
    else:
        texts = await read_texts(call, body, files, batch_files)
        windows = await cut_texts(call, texts, body.chunk, model, inference)
        inputs = windows.inputs
        if len(inputs) >= LARGE_ITEMS:
            run_as_batch(call, model)
    if len(inputs) >= LARGE_ITEMS:
        inference.check_room(call, model, 1)
    async with inference.compute(call, model, inputs) as response:
        reply = embeddings_reply(body, model, response.outcomes)
        if windows is not None:
            windows.describe(reply, response.outcomes)
        answer = Response(_encoder.encode(reply), media_type="application/json")
    call.context.is_compressible = body.encoding_format == "float"
    if body.truncate:
        truncated = sum(item.truncated_tokens or 0 for item in reply.data)
        call.context.headers[TRUNCATED_HEADER] = str(truncated)
    return answer
