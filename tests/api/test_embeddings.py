"""POST /v1/embeddings, as OpenAI's client sees it."""

import base64

import numpy as np
import openai
import pytest

from shared.models.tasks.base import MAX_JOB_ITEMS
from shared.models.tasks.embedding import USUAL_BATCH_ITEMS, TextInput, TokensInput
from tests.api.fake_worker import vector_of
from tests.api.harness import TEXT_MODEL, ApiUnderTest

pytestmark = pytest.mark.anyio
MODEL = TEXT_MODEL.name


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a cat", [TextInput("a cat", "none")]),
        (["a cat", "a dog"], [TextInput("a cat", "none"), TextInput("a dog", "none")]),
        ([7, 8], [TokensInput([7, 8], "none")]),
        ([[7, 8], [9]], [TokensInput([7, 8], "none"), TokensInput([9], "none")]),
    ],
    ids=["text", "texts", "tokens", "token lists"],
)
async def test_every_shape_of_input(
    api: ApiUnderTest, given: object, inputs: list[TextInput | TokensInput]
) -> None:
    reply = await api.openai().embeddings.create(
        model=MODEL, input=given, extra_body={"tokenizer": MODEL}
    )
    assert [item.index for item in reply.data] == list(range(len(inputs)))
    for item, one in zip(reply.data, inputs, strict=True):
        assert np.array_equal(np.float32(item.embedding), vector_of(one))
    assert [item.input for item in api.worker.items] == inputs
    assert reply.model == MODEL
    assert reply.usage.total_tokens == reply.usage.prompt_tokens > 0


async def test_base64_is_the_vector_byte_for_byte(api: ApiUnderTest) -> None:
    reply = await api.openai().embeddings.create(
        model=MODEL, input="a cat", encoding_format="base64"
    )
    assert base64.b64decode(reply.data[0].embedding) == vector_of(TextInput("a cat")).tobytes()


async def test_floats_are_the_vector(api: ApiUnderTest) -> None:
    response = await api.http.post("/v1/embeddings", json={"model": MODEL, "input": "a cat"})
    assert response.json()["data"][0]["embedding"] == vector_of(TextInput("a cat")).tolist()


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_dimensions_cut_and_normalize_again(api: ApiUnderTest, encoding_format: str) -> None:
    body = {
        "model": MODEL,
        "input": ["a", "b"],
        "dimensions": 5,
        "encoding_format": encoding_format,
    }
    data = (await api.http.post("/v1/embeddings", json=body)).json()["data"]
    for item, text in zip(data, "ab", strict=True):
        got = item["embedding"]
        vector = (
            np.frombuffer(base64.b64decode(got), "<f4")
            if encoding_format == "base64"
            else np.float32(got)
        )
        cut = vector_of(TextInput(text))[:5]
        np.testing.assert_allclose(vector, cut / np.linalg.norm(cut), rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "largest"), [(1, USUAL_BATCH_ITEMS), (200, MAX_JOB_ITEMS)], ids=["short", "long"]
)
async def test_long_list_travels_in_jobs_of_a_batch_and_keeps_its_order(
    api: ApiUnderTest, words: int, largest: int
) -> None:
    texts = [f"{number} {'text ' * words}" for number in range(150)]
    reply = await api.openai().embeddings.create(model=MODEL, input=texts)
    for item, text in zip(reply.data, texts, strict=True):
        assert np.array_equal(np.float32(item.embedding), vector_of(TextInput(text)))
    sizes = [len(job.body.items) for job in api.worker.jobs]
    assert sum(sizes) == 150
    assert len(sizes) == -(-150 // largest)
    assert max(sizes) - min(sizes) <= 1
    assert sorted(job.envelope.part for job in api.worker.jobs) == list(range(len(sizes)))


async def test_model_may_be_named_by_an_alias(api: ApiUnderTest) -> None:
    reply = await api.openai().embeddings.create(model=TEXT_MODEL.aliases[0], input="a")
    assert reply.model == MODEL


async def test_answer_says_how_it_went(api: ApiUnderTest) -> None:
    raw = await api.openai().embeddings.with_raw_response.create(model=MODEL, input=["a", "b"])
    assert raw.headers["x-penstock-cache"] == "miss"
    assert raw.headers["x-penstock-batch-ms"] == "1.50"
    assert raw.headers["x-penstock-inference-ms"] == "2.50"
    assert float(raw.headers["x-penstock-queue-ms"]) >= 0
    assert float(raw.headers["x-penstock-total-ms"]) > 0
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    assert raw.headers["x-request-id"].startswith("req_")


async def test_request_id_of_the_caller_comes_back_and_may_come_twice(api: ApiUnderTest) -> None:
    for text in ("a", "b"):
        response = await api.http.post(
            "/v1/embeddings",
            json={"model": MODEL, "input": text},
            headers={"x-request-id": "order-17"},
        )
        assert response.headers["x-request-id"] == "order-17"
    ids = [job.envelope.request_id for job in api.worker.jobs]
    assert all(request_id.startswith("req_") for request_id in ids)
    assert len(set(ids)) == 2


async def test_request_id_that_is_not_sane_is_replaced(api: ApiUnderTest) -> None:
    response = await api.http.get("/healthz", headers={"x-request-id": "a b"})
    assert response.headers["x-request-id"].startswith("req_")


async def test_trace_travels_with_the_job(api: ApiUnderTest) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await api.http.post(
        "/v1/embeddings", json={"model": MODEL, "input": "a"}, headers={"traceparent": trace}
    )
    await api.http.post(
        "/v1/embeddings", json={"model": MODEL, "input": "b"}, headers={"traceparent": "nonsense"}
    )
    assert [job.envelope.traceparent for job in api.worker.jobs] == [trace, ""]


async def test_answer_is_remembered_unless_told_not_to(api: ApiUnderTest) -> None:
    for text, headers, level in (
        ("kept", {}, "hit"),
        ("not kept", {"cache-control": "no-store"}, "miss"),
    ):
        answers = [
            await api.http.post(
                "/v1/embeddings", json={"model": MODEL, "input": text}, headers=headers
            )
            for _ in range(2)
        ]
        assert [answer.headers["x-penstock-cache"] for answer in answers] == ["miss", level]


async def test_item_that_breaks_the_model_fails_the_request(api: ApiUnderTest) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await api.openai().embeddings.create(model=MODEL, input=["a", "broken"])
    assert caught.value.code == "model_failed"
    assert caught.value.response.headers["x-should-retry"] == "false"
