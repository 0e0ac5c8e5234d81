"""LiteLLM: embeddings, images and chats from an OpenAI-compatible service, and its router."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any

# Prices come with the package instead of being fetched over the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    PAINTER,
    PROMPT,
    URL,
    WRONG_KEY,
    assert_png,
    assert_same,
    check,
    fresh,
    main,
    needs_keys,
    needs_text,
    raises,
    vectors,
)

AT: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY}
TEXT_MODEL, IMAGE_MODEL = f"openai/{EMBEDDER}", f"openai/{PAINTER}"
litellm.suppress_debug_info = True


def embedded(answer: Any) -> list[list[float]]:
    return [item["embedding"] for item in answer.data]


@check
def embedding_of_a_list_in_order() -> None:
    texts = fresh(20)
    answer = litellm.embedding(model=TEXT_MODEL, input=texts, **AT)
    assert_same(embedded(answer), vectors(texts))
    assert answer.usage.prompt_tokens > 0


@check
def fewer_dimensions() -> None:
    texts = fresh()
    answer = litellm.embedding(
        model=TEXT_MODEL, input=texts, dimensions=64, allowed_openai_params=["dimensions"], **AT
    )
    assert_same(embedded(answer), vectors(texts, dimensions=64))


@check
def encoding_format_float() -> None:
    texts = fresh()
    answer = litellm.embedding(model=TEXT_MODEL, input=texts, encoding_format="float", **AT)
    assert_same(embedded(answer), vectors(texts))


@check
async def asynchronously() -> None:
    texts = fresh()
    asking = (litellm.aembedding(model=TEXT_MODEL, input=[text], **AT) for text in texts)
    answers = await asyncio.gather(*asking)
    assert_same([embedded(answer)[0] for answer in answers], vectors(texts))


@check
def image_generation() -> None:
    answer = litellm.image_generation(
        model=IMAGE_MODEL, prompt=PROMPT, n=2, size="64x64", extra_body={"seed": 5}, **AT
    )
    drawn = [base64.b64decode(item["b64_json"]) for item in answer.data]
    assert len(set(drawn)) == 2
    for png in drawn:
        assert_png(png)


@check
def router_with_a_name_of_its_own() -> None:
    texts = fresh()
    router = litellm.Router(
        model_list=[{"model_name": "embedder", "litellm_params": {"model": TEXT_MODEL, **AT}}]
    )
    answer = router.embedding(model="embedder", input=texts)
    assert_same(embedded(answer), vectors(texts))


@check
def unknown_model_is_told() -> None:
    with raises(litellm.NotFoundError):
        litellm.embedding(model="openai/no-such-model", input=["a"], **AT)


@check
def too_long_text_is_refused_or_cut() -> None:
    text = "the turbine turns " * 400
    with raises(litellm.BadRequestError):
        litellm.embedding(model=TEXT_MODEL, input=[text], **AT)
    answer = litellm.embedding(model=TEXT_MODEL, input=[text], extra_body={"truncate": "end"}, **AT)
    assert_same(embedded(answer), vectors([text], truncate="end"))


def asked(**options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is a mill?"}]
    given = {"model": f"openai/{needs_text()}", "messages": messages, "max_tokens": 16}
    return given | {"temperature": 0} | AT | options


@check
def chat_streamed_is_the_chat() -> None:
    streamed = litellm.completion(**asked(stream=True))
    pieces = [one.choices[0].delta.content or "" for one in streamed]
    assert len(pieces) > 1
    whole = litellm.completion(**asked()).choices[0].message.content
    assert "".join(pieces) == whole


@check
async def chat_streamed_asynchronously() -> None:
    answer = await litellm.acompletion(**asked(stream=True))
    assert "".join([one.choices[0].delta.content or "" async for one in answer])


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    with raises(litellm.AuthenticationError):
        litellm.embedding(model=TEXT_MODEL, input=["a"], **(AT | {"api_key": WRONG_KEY}))


main()
