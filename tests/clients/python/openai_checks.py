"""OpenAI's own client: embeddings, images, models, errors, timeouts and retries, including
async.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any
from uuid import uuid4

import openai

import tests.clients.python.openai_batch_checks  # noqa: F401  its checks run first
from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    LIMIT_S,
    PAINTER,
    PROMPT,
    URL,
    WRONG_KEY,
    assert_png,
    assert_same,
    check,
    decoded,
    fresh,
    half_png,
    main,
    needs_keys,
    post,
    raises,
    relay_that_loses_the_first_answer,
    vectors,
)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S)
TOO_LONG = "the turbine turns " * 400
SLOW: dict[str, Any] = {"model": PAINTER, "prompt": PROMPT, "size": "256x256"}
"""Takes seconds on a CPU."""
MANY_STEPS = {"num_inference_steps": 100}


def embedded(answer: openai.types.CreateEmbeddingResponse) -> list[list[float]]:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def images(answer: openai.types.ImagesResponse) -> list[bytes]:
    found = [base64.b64decode(item.b64_json or "") for item in answer.data or []]
    for png in found:
        assert_png(png)
    return found


@check
def one_text() -> None:
    (text,) = fresh(1)
    answer = client.embeddings.create(model=EMBEDDER, input=text)
    assert_same(embedded(answer), vectors([text]))
    assert answer.model == EMBEDDER
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 10


@check
def list_of_texts_in_order() -> None:
    texts = fresh(40)
    answer = client.embeddings.create(model=EMBEDDER, input=texts)
    assert_same(embedded(answer), vectors(texts))


@check
def fewer_dimensions() -> None:
    texts = fresh()
    answer = client.embeddings.create(model=EMBEDDER, input=texts, dimensions=64)
    assert {len(vector) for vector in embedded(answer)} == {64}
    assert_same(embedded(answer), vectors(texts, dimensions=64))


@check
def encoding_format_float() -> None:
    texts = fresh()
    answer = client.embeddings.create(model=EMBEDDER, input=texts, encoding_format="float")
    assert_same(embedded(answer), vectors(texts))


@check
def encoding_format_base64() -> None:
    texts = fresh()
    answer = client.embeddings.create(model=EMBEDDER, input=texts, encoding_format="base64")
    coded: list[Any] = list(embedded(answer))
    assert_same([decoded(one) for one in coded], vectors(texts))


@check
def image_of_a_seed() -> None:
    asked: dict[str, Any] = {"model": PAINTER, "prompt": PROMPT, "size": "64x64"}
    drawn = images(
        client.images.generate(**asked, n=2, response_format="b64_json", extra_body={"seed": 5})
    )
    raw = post("/v1/images/generations", {**asked, "seed": 6})
    assert len(drawn) == 2
    assert drawn[1] == base64.b64decode(raw["data"][0]["b64_json"])


@check
def image_streamed_while_it_is_drawn() -> None:
    stream: Any = client.images.generate(
        model=PAINTER,
        prompt=PROMPT,
        size="256x256",
        stream=True,
        partial_images=2,
        extra_body={"num_inference_steps": 100},
    )
    events = list(stream)
    kinds = [one.type.removeprefix("image_generation.") for one in events]
    assert kinds == ["partial_image", "partial_image", "completed"], kinds
    assert [one.partial_image_index for one in events[:2]] == [0, 1]
    for one in events:
        assert_png(base64.b64decode(one.b64_json))
    assert events[2].size == "256x256"


@check
def image_edited() -> None:
    asked: dict[str, Any] = {"model": PAINTER, "size": "64x64"}
    (circle,) = images(client.images.generate(prompt=PROMPT, **asked))
    answer = client.images.edit(
        model=PAINTER,
        image=("circle.png", circle, "image/png"),
        prompt="a large blue circle on a white background",
        extra_body={"strength": 0.6},
    )
    assert images(answer) != [circle]


@check
def image_redrawn_within_a_mask() -> None:
    asked: dict[str, Any] = {"model": PAINTER, "size": "64x64"}
    (circle,) = images(client.images.generate(prompt=PROMPT, **asked))
    edit: dict[str, Any] = {
        "model": PAINTER,
        "image": ("circle.png", circle, "image/png"),
        "prompt": "a blue square on the right",
        "extra_body": {"mask_blur": 2, "seed": 1},
    }
    redrawn = images(client.images.edit(**edit, mask=("mask.png", half_png(), "image/png"), n=2))
    assert len({circle, *redrawn}) == 3
    with raises(openai.BadRequestError) as caught:
        client.images.edit(**edit, mask=("mask.png", half_png(32), "image/png"))
    assert caught.error.param == "mask", caught.error
    assert "32x32" in caught.error.message, caught.error


@check
def image_varied() -> None:
    asked: dict[str, Any] = {"model": PAINTER, "size": "64x64"}
    (circle,) = images(client.images.generate(prompt=PROMPT, **asked))
    answer = client.images.create_variation(
        image=("circle.png", circle, "image/png"), n=2, response_format="b64_json", **asked
    )
    assert len({circle, *images(answer)}) == 3


@check
def models_listed_and_found() -> None:
    names = [model.id for model in client.models.list()]
    assert {EMBEDDER, PAINTER} <= set(names)
    assert client.models.retrieve(EMBEDDER).id == EMBEDDER


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key=WRONG_KEY)
    with raises(openai.AuthenticationError) as caught:
        stranger.embeddings.create(model=EMBEDDER, input="a")
    assert WRONG_KEY not in str(caught.error)


@check
def unknown_model_is_told() -> None:
    with raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="no-such-model", input="a")
    assert (caught.error.code, caught.error.param) == ("model_not_found", "model")


@check
def too_long_text_is_refused_or_cut() -> None:
    with raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=EMBEDDER, input=TOO_LONG)
    assert caught.error.code == "context_length_exceeded"
    answer = client.embeddings.create(
        model=EMBEDDER, input=TOO_LONG, extra_body={"truncate": "end"}
    )
    assert_same(embedded(answer), vectors([TOO_LONG], truncate="end"))


@check
def wrong_field_is_named() -> None:
    with raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=EMBEDDER, input="a", dimensions=100_000)
    assert caught.error.param == "dimensions"


@check
def timeout_of_the_client() -> None:
    hasty = client.with_options(timeout=0.2, max_retries=0)
    with raises(openai.APITimeoutError):
        hasty.images.generate(**SLOW, extra_body=MANY_STEPS)


@check
def deadline_is_told_at_once_or_when_it_passed() -> None:
    """If the API knows it would be late, the request is rejected; otherwise, it is stopped.

    It is not retried in either case.
    """
    with raises(openai.APIStatusError) as caught:
        client.with_options(max_retries=0).images.generate(
            **SLOW, extra_body=MANY_STEPS, extra_headers={"X-Penstock-Deadline-Ms": "300"}
        )
    headers = caught.error.response.headers
    if caught.error.status_code == 429:
        assert float(headers["retry-after"]) > 0
    else:
        assert (caught.error.status_code, caught.error.code) == (504, "deadline_exceeded")
        assert headers["x-should-retry"] == "false"


@check
def lost_answer_is_asked_for_again_and_replayed() -> None:
    with relay_that_loses_the_first_answer() as url:
        answer = client.with_options(base_url=f"{url}/v1").images.with_raw_response.generate(
            model=PAINTER,
            prompt=PROMPT,
            size="64x64",
            extra_headers={"Idempotency-Key": uuid4().hex},
        )
    assert answer.headers["idempotent-replayed"] == "true"
    assert len(images(answer.parse())) == 1


@check
def headers_of_the_raw_response() -> None:
    (text,) = fresh(1)
    asking = client.embeddings.with_raw_response
    first, second = (asking.create(model=EMBEDDER, input=text) for _ in range(2))
    assert [one.headers["x-penstock-cache"] for one in (first, second)] == ["miss", "hit"]
    assert float(first.headers["x-penstock-total-ms"]) > 0
    assert first.headers["x-request-id"] == first.parse()._request_id
    with client.embeddings.with_streaming_response.create(model=EMBEDDER, input=text) as answer:
        assert_same(embedded(answer.parse()), embedded(first.parse()))


@check
async def async_client_with_many_at_once() -> None:
    texts = fresh(24)
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S) as many:
        answers = await asyncio.gather(
            *(many.embeddings.create(model=EMBEDDER, input=text) for text in texts)
        )
        assert [model.id async for model in many.models.list()]
    assert_same([embedded(answer)[0] for answer in answers], vectors(texts))


main()
