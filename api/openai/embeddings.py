"""POST /v1/embeddings as in OpenAI's API: converts bodies to inputs, and outcomes to replies.

Vectors stay bytes from the worker's reply to the answer, except for floats.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, cast

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
from api.http.request import ApiRequest, open_request
from api.http.request_options import PRIORITY_HEADER
from api.openai.endpoint import Endpoint, LineRequest, ReplyTools
from api.tasks.embedding import (
    MAX_LONG_TEXT_BYTES,
    Window,
    sections_of,
    text_inputs,
    windows_of,
)
from shared.errors import BadInput, InputTooLarge, ModelFailed, PenstockError
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Model
from shared.models.tasks.embedding import (
    EmbeddingResult,
    TextInput,
    TextTokens,
    TextToTokenize,
    TokensInput,
)

FLOAT_BYTES = 22
"""Maximum size of a coordinate in JSON."""
_REPLY_BYTES = 256
_encoder = msgspec.json.Encoder()

LARGE_ITEMS = 256
"""From this number of items, admission is checked before computing the cache keys, which takes
milliseconds.
"""

LARGE_WINDOWS = 256
"""From this number of windows, a request has `batch` priority unless its caller chose one."""


class EmbeddingWindow(msgspec.Struct):
    """A window of a text: its characters from `start` (inclusive) to `end` (exclusive).

    Characters are Unicode code points. `input`: position of the text in the request. `tokens`:
    number of computed tokens, including special tokens.
    """

    input: int
    start: int
    end: int
    tokens: int


class EmbeddingItem(msgspec.Struct):
    """One vector: a list of floats, or base64 of little-endian float32.

    `truncated_tokens` is the number of tokens cut from the text. It is present if the request has
    `truncate`. With `chunk`, a vector has its `window`, or the list of `windows` that it averages.
    """

    index: int
    embedding: list[float] | bytes
    object: Literal["embedding"] = "embedding"
    truncated_tokens: int | msgspec.UnsetType = msgspec.UNSET
    window: EmbeddingWindow | msgspec.UnsetType = msgspec.UNSET
    windows: list[EmbeddingWindow] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsReply(msgspec.Struct):
    """Vectors in input order."""

    data: list[EmbeddingItem]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class Chunk(Body):
    """How to cut long texts into windows, each with a separate vector.

    A window ends after a sentence (`by: sentence`) or a word (`by: tokens`), and repeats up to
    `overlap` tokens of the previous one, in whole sentences or words.
    """

    tokens: int | None = Field(
        None,
        ge=8,
        le=1_000_000,
        description="Maximum tokens per window, without special tokens. Default: the maximum "
        "that the model reads at once.",
    )
    overlap: int = Field(0, ge=0, description="At most half of `tokens`.")
    by: Literal["sentence", "tokens"] = "sentence"
    pool: Literal["none", "mean"] = Field(
        "none",
        description="`mean`: one vector per text, the mean of its windows weighted by tokens.",
    )


def _shape_of(value: Any) -> str:
    return "file:" if isinstance(value, dict | FileOfText) else shape_of(value)


class FileOfText(Body):
    """A text in UTF-8 uploaded to POST /v1/files, as `content` or with purpose `user_data`."""

    file: str = Field(min_length=1, max_length=256)


class EmbeddingsBody(Body):
    """Texts to embed, or token IDs together with `tokenizer`."""

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
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), Tag("token_lists:")]
        | Annotated[FileOfText, Tag("file:")],
        Discriminator(_shape_of),
    ]
    encoding_format: Annotated[Literal["float", "base64"], null_is("float")] = "float"
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Number of leading dimensions to keep. The vector is normalized again.",
    )
    truncate: Literal["end", "start"] | None = Field(
        None,
        description=(
            "Extension: the side of an overlong text to cut. Without it, overlong texts are "
            "rejected (400)."
        ),
    )
    tokenizer: str | None = Field(
        None,
        description=(
            "Extension: the model whose tokenizer produced the token IDs in `input`. Without it, "
            "token IDs are rejected."
        ),
    )
    chunk: Chunk | None = Field(
        None,
        description="Extension: cut texts into windows. Texts may then have 4 MiB in total.",
    )
    user: EndUser | None = None


class EmbeddingsEndpoint(Endpoint):
    """Lines with the body of POST /v1/embeddings."""

    path = "/v1/embeddings"

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item per text."""
        body = EmbeddingsBody.model_validate_json(data, strict=True)
        model = catalog.find(body.model, "embedding")
        if body.chunk is not None:
            raise BadInput(
                "chunk: is not supported in batches; send long texts to POST /v1/embeddings",
                field="chunk",
            )
        dimensions = kept_dimensions(body, model)
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
    """Returns the items of a body.

    Raises:
        BadInput: the model can't compute them.
    """
    if isinstance(body.input, FileOfText):
        raise BadInput("input: a file requires `chunk`", field="input")
    return text_inputs(
        body.input, model, truncate=body.truncate or "none", tokenizer=body.tokenizer
    )


def kept_dimensions(body: EmbeddingsBody, model: Model) -> int:
    """Returns the number of dimensions to return per vector.

    Raises:
        BadInput: the number exceeds the model's dimensions.
    """
    assert model.dimensions is not None, (
        "the catalog rejects embedding models without dimensions; this is a bug"
    )
    if body.dimensions is not None and body.dimensions > model.dimensions:
        raise BadInput(
            f"dimensions: must be at most {model.dimensions} for {model.name}, got "
            f"{body.dimensions}",
            field="dimensions",
        )
    return body.dimensions or model.dimensions


def embeddings_reply(
    body: EmbeddingsBody, model: Model, outcomes: Sequence[ItemOutcome]
) -> EmbeddingsReply:
    """Returns the reply to a body whose items all have results.

    With `truncate`, each vector includes the number of tokens cut from its text.
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

    Shortened vectors are normalized again, as in OpenAI's API.

    Raises:
        ModelFailed: a shortened vector is zero.
    """
    matrix = np.frombuffer(b"".join(vectors), dtype="<f4").reshape(len(vectors), -1)
    if dimensions == model.dimensions:
        return matrix
    return _scale(matrix[:, :dimensions])


def _scale(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """Returns the matrix with every row scaled to length 1.

    Raises:
        ModelFailed: a row is zero.
    """
    doubles = matrix.astype(np.float64)  # the squares of large floats overflow
    lengths = np.linalg.norm(doubles, axis=1, keepdims=True)
    if not lengths.all():
        raise ModelFailed("the model computed a vector that is zero in all requested dimensions")
    scaled: NDArray[np.float32] = (doubles / lengths).astype("<f4")
    return scaled


router = APIRouter(route_class=FastRoute)


@router.post(
    "/v1/embeddings",
    summary="Create embeddings",
    openapi_extra=inference_body(EmbeddingsBody),
    responses=inference_responses(EmbeddingsReply, "X-Penstock-Truncated-Tokens"),
)
async def create_embeddings(request: Request) -> Response:
    """Answers once all vectors are ready.

    Texts that were embedded before come from the cache.
    """
    call = open_request(request)
    body = await call.read_json(EmbeddingsBody)
    model = call.dependencies.catalog.find(body.model, "embedding")
    call.use(model)
    kept_dimensions(body, model)
    if body.chunk is not None:
        return await _embed_windows(call, body, body.chunk, model)
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


class _LongText(NamedTuple):
    """A text in a request, and the windows it was cut into."""

    text: str
    windows: list[Window]

    def inputs(self) -> list[TextInput]:
        """One item per window.

        Each is identical to the item for the same text sent alone, so both share cache and batch.
        """
        return [
            TextInput(self.text[one.start : one.end], "none" if one.is_exact else "end")
            for one in self.windows
        ]


async def _embed_windows(
    call: ApiRequest, body: EmbeddingsBody, chunk: Chunk, model: Model
) -> Response:
    """Answers a request with `chunk`: cuts the texts and embeds their windows as items."""
    texts = await _texts_of(call, body)
    cut = await _cut(call, texts, chunk, model)
    inputs = [one for text in cut for one in text.inputs()]
    if len(inputs) >= LARGE_WINDOWS:
        _take_time(call, model)
        call.check_room(model, 1)
    async with call.inferred(model, inputs) as response:
        reply = embeddings_reply(body, model, response.outcomes)
        _add_windows(reply, cut, response.outcomes)
        if chunk.pool == "mean":
            _pool(reply, body, len(cut))
        answer = Response(_encoder.encode(reply), media_type="application/json")
    call.context.is_compressible = body.encoding_format == "float"
    return answer


async def _texts_of(call: ApiRequest, body: EmbeddingsBody) -> list[str]:
    """Returns the texts of a request with `chunk`.

    Raises:
        BadInput: the request has token IDs, `truncate`, or a file that is not text.
        InputTooLarge: the texts are too long.
        NotFound: the file does not exist.
    """
    if body.truncate is not None or body.tokenizer is not None:
        field = "truncate" if body.truncate is not None else "tokenizer"
        raise BadInput(
            f"{field}: can't be combined with `chunk`, which needs whole texts", field=field
        )
    texts_or_file = body.input
    if isinstance(texts_or_file, FileOfText):
        data = await _uploaded(call, texts_or_file.file)
        try:
            texts = [data.decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            raise BadInput("input.file: must be valid UTF-8", field="input") from error
    else:
        texts = (
            [texts_or_file] if isinstance(texts_or_file, str) else cast(list[str], texts_or_file)
        )
    if not isinstance(texts[0], str):
        raise BadInput("input: must be text, not token IDs, with `chunk`", field="input")
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > MAX_LONG_TEXT_BYTES:
        raise InputTooLarge(f"input: must have at most {MAX_LONG_TEXT_BYTES} bytes", field="input")
    for index, text in enumerate(texts):
        if not text.strip():
            raise BadInput(f"input[{index}]: must contain words", field="input")
    return texts


async def _uploaded(call: ApiRequest, file_id: str) -> bytes:
    """Returns the data of a file uploaded by the caller.

    Raises:
        BadInput: the file belongs to a batch.
        InputTooLarge: the file is too long.
        NotFound: the file does not exist.
    """
    too_long = f"input.file: must have at most {MAX_LONG_TEXT_BYTES} bytes"
    uploads, files = call.dependencies.batch_files, call.dependencies.files
    if uploads.has_id(file_id):
        upload = await uploads.find(call.tenant, file_id)
        if upload.size_bytes > MAX_LONG_TEXT_BYTES:
            raise InputTooLarge(too_long, field="input")
        data, _ = await uploads.load(call.tenant, file_id, MAX_LONG_TEXT_BYTES)
        return data
    file = await files.find(call.tenant, file_id)
    if file.size > MAX_LONG_TEXT_BYTES:
        raise InputTooLarge(too_long, field="input")
    return await files.read(file)


async def _cut(call: ApiRequest, texts: list[str], chunk: Chunk, model: Model) -> list[_LongText]:
    """Cuts texts into windows, based on tokens from a worker.

    Raises:
        BadInput: windows would be too long for the model, or too many.
    """
    parts = [sections_of(text, model.text.max_input_bytes) for text in texts]
    asked = [TextToTokenize(section) for sections in parts for section in sections]
    _check_number(len(asked), model)
    results = iter(await call.asked_before(model, asked))
    cut: list[_LongText] = []
    left = model.text.max_items
    for text, sections in zip(texts, parts, strict=True):
        told = islice(results, len(sections))
        tokens = [result for result in told if isinstance(result, TextTokens)]
        if len(tokens) < len(sections):
            raise PenstockError(f"{model.name} returned a result other than tokens; this is a bug")
        size = _window_tokens(chunk, tokens[0].max_tokens, model)
        least = math.ceil(sum(len(one.begins_word) for one in tokens) / size)
        _check_number(model.text.max_items - left + least, model)
        # In a thread: a text of 300 pages takes 50 ms.
        windows = await asyncio.to_thread(
            windows_of,
            text,
            tokens,
            lengths=[len(section) for section in sections],
            tokens=size,
            overlap=chunk.overlap,
            by=chunk.by,
            most=left,
        )
        left -= len(windows)
        _check_number(model.text.max_items - left, model)
        cut.append(_LongText(text, windows))
    return cut


def _check_number(windows: int, model: Model) -> None:
    if windows > model.text.max_items:
        raise BadInput(
            f"input: exceeds the maximum of {model.text.max_items} windows per request; split it "
            "into several requests, or use more tokens per window",
            field="input",
        )


def _window_tokens(chunk: Chunk, most: int, model: Model) -> int:
    """Returns the number of tokens per window."""
    tokens = chunk.tokens or most
    if tokens > most:
        raise BadInput(
            f"chunk.tokens: must be at most {most} for {model.name}, without special tokens",
            field="chunk.tokens",
        )
    if chunk.overlap > tokens // 2:
        raise BadInput(
            f"chunk.overlap: must be at most half of chunk.tokens ({tokens})", field="chunk.overlap"
        )
    return tokens


def _take_time(call: ApiRequest, model: Model) -> None:
    """Sets `batch` priority and the model's maximum deadline for a large request.

    Values chosen by the caller take precedence.
    """
    if PRIORITY_HEADER not in call.http.headers:
        call.context.facts.priority = "batch"
        call.context.headers[PRIORITY_HEADER] = "batch"
    if call.options.deadline_s is None:
        call.options = replace(call.options, deadline_s=model.deadline.longest_s)


def _add_windows(
    reply: EmbeddingsReply, cut: Sequence[_LongText], outcomes: Sequence[ItemOutcome]
) -> None:
    windows = ((number, one) for number, text in enumerate(cut) for one in text.windows)
    for item, outcome, (number, one) in zip(reply.data, outcomes, windows, strict=True):
        tokens = int(getattr(outcome.result, "tokens", 0))
        item.window = EmbeddingWindow(number, one.start, one.end, tokens)


def _pool(reply: EmbeddingsReply, body: EmbeddingsBody, texts: int) -> None:
    """Replaces the vectors of each text's windows by their mean."""
    groups: list[list[EmbeddingItem]] = [[] for _ in range(texts)]
    for item in reply.data:
        assert isinstance(item.window, EmbeddingWindow)
        groups[item.window.input].append(item)
    reply.data = []
    for number, group in enumerate(groups):
        windows = [cast(EmbeddingWindow, item.window) for item in group]
        vectors = np.array(
            [
                np.frombuffer(one.embedding, "<f4")
                if isinstance(one.embedding, bytes)
                else np.array(one.embedding, np.float32)
                for one in group
            ]
        )
        mean = np.average(vectors, axis=0, weights=[one.tokens for one in windows])
        (unit,) = _scale(mean[np.newaxis])
        vector = unit.tolist() if body.encoding_format == "float" else unit.tobytes()
        reply.data.append(EmbeddingItem(number, vector, windows=windows))
