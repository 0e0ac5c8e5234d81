"""POST /v1/rerank and /v2/rerank, compatible with Cohere's and Jina's clients.

A similarity model scores each document against the query, so each pair is an item. An embedding
model computes one vector per text, and the score is the cosine of the two vectors. In that case,
each text is an item, so documents that were embedded or ranked before come from the cache, no
matter what the query is.

For the fields of a request, see https://docs.cohere.com/reference/rerank and
https://api.jina.ai/redoc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.responses import Response

from api.batches.endpoint import Endpoint, LineRequest, ReplyTools
from api.bodies import Body, Option, Text, Usage
from api.http.call import ModelCall
from api.http.fast_route import FastRoute
from api.http.inference import Inference
from api.http.openapi import TRUNCATED_HEADER
from api.http.router import Router
from api.tasks.base import check_results
from shared.errors import BadInput, InputTooLarge
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Model, unknown_model
from shared.models.entry import Rerank
from shared.models.tasks import Input
from shared.models.tasks.embedding import EmbeddingResult, EmbeddingTask, TextInput
from shared.models.tasks.similarity import SimilarityInput, SimilarityResult

MAX_DOCUMENTS = 1000
"""Maximum number of documents per request. Cohere allows 10,000 and recommends 1,000."""

_REPLY_BYTES, _RESULT_BYTES = 512, 96
_encoder = msgspec.json.Encoder()


class RerankText(Body):
    """A document given as an object."""

    text: Text


def _form_of(value: Any) -> str:
    return "object:" if isinstance(value, dict | RerankText) else "text:"


RerankDocument: TypeAlias = Annotated[
    Annotated[Text, Tag("text:")] | Annotated[RerankText, Tag("object:")],
    Discriminator(_form_of),
]


class RerankBody(Body):
    """A query, and the documents to rank."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "all-MiniLM-L6-v2",
                "query": "a young cat",
                "documents": ["a kitten", "a river in the hills"],
                "top_n": 1,
            }
        },
    )

    model: str
    query: Text
    documents: Annotated[
        list[RerankDocument], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)
    ]
    top_n: int | None = Field(
        None, ge=1, description="Number of results to return, best first. Default: all."
    )
    return_documents: bool | None = Field(
        None, description="True to include the document in each result. Default: false."
    )
    max_tokens_per_doc: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Number of tokens to read per document, from its beginning.",
    )
    max_chunks_per_doc: int | None = Field(
        None, ge=1, description="Accepted, without effect: a document is read in one piece."
    )
    rank_fields: Annotated[list[Literal["text"]], Field(max_length=1)] | None = Field(
        None, description="Documents have one field, `text`."
    )
    priority: int | None = Field(
        None, ge=0, le=999, description="Accepted, without effect. See the header x-penstock-lane."
    )
    user: Option | None = None

    def texts(self) -> list[str]:
        return [
            document if isinstance(document, str) else document.text for document in self.documents
        ]


class RerankResult(msgspec.Struct, omit_defaults=True):
    """A document, identified by its position in the request, and its relevance to the query."""

    index: int
    relevance_score: float
    document: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class RerankVersion(msgspec.Struct):
    """The version of Cohere's API used for the response."""

    version: str


class RerankTokens(msgspec.Struct):
    """Number of tokens in the query and the documents."""

    input_tokens: int


class RerankMeta(msgspec.Struct):
    """The metadata that Cohere's clients expect."""

    api_version: RerankVersion
    billed_units: RerankTokens
    tokens: RerankTokens


class RerankReply(msgspec.Struct):
    """Results, best first.

    `rerank` is an extension that describes the scores. `cosine`: cosine of two vectors, from -1 to
    1. `cross-encoder`: from a model that reads both texts together, from 0 to 1. Responses to batch
    lines do not have an `id`.
    """

    model: str
    results: list[RerankResult]
    rerank: Rerank
    meta: RerankMeta
    usage: Usage
    id: str | msgspec.UnsetType = msgspec.UNSET
    object: Literal["list"] = "list"


class RerankEndpoint(Endpoint):
    """Batch lines with the same body as POST /v1/rerank."""

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item per document, plus one for the query if the model computes vectors."""
        body = RerankBody.model_validate_json(data, strict=True)
        model = _model_of(body, catalog)
        inputs = _inputs_of(body, model)
        returned = sum(len(text.encode()) for text in body.texts()) if body.return_documents else 0
        size = _REPLY_BYTES + len(body.documents) * _RESULT_BYTES + returned
        return LineRequest(body, model, inputs, True, size)

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        body = cast(RerankBody, request.body)
        return _encoder.encode(_reply(body, request.model, outcomes, "1"))


def _model_of(body: RerankBody, catalog: Catalog) -> Model:
    """Returns the model to score with.

    Raises:
        UnknownModel: no model with this name computes embeddings or similarity.
    """
    model = catalog.find(body.model)
    if not isinstance(model.definition, EmbeddingTask):
        raise unknown_model(body.model)
    return model


def _inputs_of(body: RerankBody, model: Model) -> list[Input]:
    """Returns one pair per document or, for embedding models, all documents followed by the query.

    Raises:
        InputTooLarge: a text is too long for the model.
        BadInput: there are too many documents.
    """
    texts, limit = body.texts(), model.text.max_input_bytes
    # For vectors, the query is an item too.
    max_documents = model.text.max_items - (0 if model.definition.compares_texts else 1)
    if len(texts) > max_documents:
        reason = f"must have at most {max_documents} documents, got {len(texts)}"
        raise BadInput(f"documents: {reason}", field="documents")
    for index, text in enumerate(texts):
        if len(text.encode()) > limit:
            raise InputTooLarge(
                f"documents[{index}]: must be at most {limit} bytes", field="documents"
            )
    if len(body.query.encode()) > limit:
        raise InputTooLarge(f"query: must be at most {limit} bytes", field="query")
    max_tokens = body.max_tokens_per_doc or 0
    if model.definition.compares_texts:
        return [SimilarityInput(text, body.query, "end", max_tokens) for text in texts]
    return [*(TextInput(text, "end", max_tokens) for text in texts), TextInput(body.query, "end")]


def _reply(
    body: RerankBody, model: Model, outcomes: Sequence[ItemOutcome], version: str
) -> RerankReply:
    results = [outcome.result for outcome in outcomes]
    scores = _scores(results, model)
    tokens = sum(int(getattr(result, "tokens", 0)) for result in results)
    # Documents with equal scores stay in the caller's order.
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: body.top_n]
    best = [RerankResult(index, scores[index]) for index in order]
    if body.return_documents:
        texts = body.texts()
        for ranked in best:
            ranked.document = {"text": texts[ranked.index]}
    billed = RerankTokens(tokens)
    meta = RerankMeta(RerankVersion(version), billed_units=billed, tokens=billed)
    usage = Usage(tokens, tokens)
    return RerankReply(model.name, best, model.rerank, meta, usage)


def _scores(results: Sequence[Any], model: Model) -> list[float]:
    """Returns the score of each document.

    Raises:
        PenstockError: a worker returned a result of a different type.
    """
    if all(isinstance(result, SimilarityResult) for result in results):
        return [result.score for result in results]
    embedded = check_results(results, EmbeddingResult, model)
    vectors = np.frombuffer(b"".join(result.vector for result in embedded), "<f4")
    matrix = vectors.reshape(len(results), -1).astype(np.float64)
    matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
    scores: list[float] = np.clip(matrix[:-1] @ matrix[-1], -1.0, 1.0).tolist()
    return scores


router = Router(scope="embeddings", route_class=FastRoute)


@router.post(
    "/v1/rerank",
    summary="Rank documents",
    body=RerankBody,
    reply=RerankReply,
    headers=("X-Penstock-Truncated-Tokens",),
    lines=RerankEndpoint(),
)
@router.post(
    "/v2/rerank",
    summary="Rank documents (Cohere's second version)",
    body=RerankBody,
    reply=RerankReply,
    headers=("X-Penstock-Truncated-Tokens",),
)
async def rank_documents(call: ModelCall, catalog: Catalog, inference: Inference) -> Response:
    """Ranks documents by their relevance to the query, best first.

    If a document is too long, only its beginning is read.
    """
    body = await call.read_json(RerankBody)
    model = _model_of(body, catalog)
    call.use(model)
    version = call.route.removeprefix("/v")[0]
    async with inference.compute(call, model, _inputs_of(body, model)) as response:
        reply = _reply(body, model, response.outcomes, version)
        reply.id = call.context.facts.request_id
        answer = Response(_encoder.encode(reply), media_type="application/json")
        results = [outcome.result for outcome in response.outcomes]
    truncated = sum(int(getattr(result, "truncated_tokens", 0)) for result in results)
    call.context.headers[TRUNCATED_HEADER] = str(truncated)
    return answer
