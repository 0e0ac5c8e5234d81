"""LangChain: chats, and embeddings from langchain-openai that are searched in a vector store."""

from __future__ import annotations

from typing import Any, Literal

import openai
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    URL,
    WRONG_KEY,
    Skip,
    assert_same,
    check,
    fresh,
    main,
    needs_keys,
    needs_text,
    raises,
    vectors,
)


def embeddings(**options: Any) -> OpenAIEmbeddings:
    """Set up as in docs/how-to/clients.md: with this option, LangChain sends texts rather than
    token ids.
    """
    given = {"check_embedding_ctx_length": False, "api_key": SecretStr(KEY), **options}
    return OpenAIEmbeddings(model=EMBEDDER, base_url=f"{URL}/v1", **given)


@check
def query() -> None:
    (text,) = fresh(1)
    assert_same([embeddings().embed_query(text)], vectors([text]))


@check
def documents_in_order() -> None:
    texts = fresh(50)
    assert_same(embeddings(chunk_size=16).embed_documents(texts), vectors(texts))


@check
def fewer_dimensions() -> None:
    texts = fresh()
    found = embeddings(dimensions=64).embed_documents(texts)
    assert_same(found, vectors(texts, dimensions=64))


@check
async def asynchronously() -> None:
    texts = fresh()
    made = embeddings()
    assert_same(await made.aembed_documents(texts), vectors(texts))
    assert_same([await made.aembed_query(texts[0])], vectors(texts[:1]))


@check
def similarity_search() -> None:
    store = InMemoryVectorStore.from_texts(
        ["The turbine makes power.", "Cats sleep all day.", "Bread is baked in an oven."],
        embeddings(),
    )
    (found,) = store.similarity_search("a kitten that naps", k=1)
    assert found.page_content == "Cats sleep all day."


@check
def too_long_text_is_cut_on_request() -> None:
    text = "the turbine turns " * 400
    with raises(openai.BadRequestError):
        embeddings().embed_query(text)
    found = embeddings(model_kwargs={"extra_body": {"truncate": "end"}}).embed_query(text)
    assert_same([found], vectors([text], truncate="end"))


@check
def token_ids_are_refused_with_a_reason() -> None:
    """By default (`check_embedding_ctx_length=True`), LangChain sends ids from OpenAI's
    tokenizer.
    """
    try:
        import tiktoken

        tiktoken.get_encoding("cl100k_base")
    except Exception as error:
        raise Skip(f"tiktoken could not load cl100k_base: {type(error).__name__}") from error
    with raises(openai.BadRequestError) as caught:
        embeddings(check_embedding_ctx_length=True).embed_query("a cat")
    assert "tokenizer" in str(caught.error)


class Paint(BaseModel):
    """Paints a wall."""

    color: Literal["red", "green"]


class City(BaseModel):
    """A city. A small model does not stop on its own if more fields are allowed."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=24)
    people: int = Field(ge=0, le=40_000_000)


def chat(**options: Any) -> ChatOpenAI:
    given = {"temperature": 0, "max_tokens": 24, "api_key": SecretStr(KEY), **options}
    return ChatOpenAI(model=needs_text(), base_url=f"{URL}/v1", **given)


@check
def chat_streamed_is_the_chat() -> None:
    pieces = list(chat(stream_usage=True).stream("What is a mill?"))
    assert len(pieces) > 1
    whole = chat().invoke("What is a mill?")
    assert "".join(str(one.content) for one in pieces) == whole.content
    assert pieces[-1].usage_metadata or any(one.usage_metadata for one in pieces)


@check
async def chat_streamed_asynchronously() -> None:
    pieces = [str(one.content) async for one in chat().astream("Name a river.")]
    assert "".join(pieces)


@check
def tool_is_called_and_its_result_read() -> None:
    bound = chat(max_tokens=64).bind_tools([City], tool_choice="required")
    called = bound.invoke("Tell me about Bern.")
    (call,) = called.tool_calls
    assert call["name"] == "City"
    City.model_validate(call["args"])
    messages = [("user", "Tell me about Bern."), called]
    answer = (
        chat()
        .bind_tools([City])
        .invoke(
            [*messages, {"role": "tool", "tool_call_id": call["id"], "content": "134,000 people"}]
        )
    )
    assert answer.content or answer.tool_calls


@check
def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        asked = chat(max_tokens=64).with_structured_output(City, method=method)
        found = asked.invoke("A city in Spain?")
        assert isinstance(found, City), f"{method}: {found!r}"


@check
def chat_through_responses() -> None:
    found = chat(use_responses_api=True).invoke("What is a mill?")
    assert found.text
    pieces = list(chat(use_responses_api=True).stream("What is a mill?"))
    assert "".join(one.text for one in pieces) == found.text


@check
def responses_follow_one_another() -> None:
    """With `previous_response_id`, only the new part is sent."""
    model = chat(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("What is a mill?")
    second = model.invoke([("user", "What is a mill?"), first, ("user", "And a river?")])
    assert second.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    bound = model.bind_tools([Paint], tool_choice="required").bind(max_tokens=64)
    called = bound.invoke("Tell me about Bern.")
    result = {"role": "tool", "tool_call_id": called.tool_calls[0]["id"], "content": "134,000"}
    assert model.invoke([("user", "Tell me about Bern."), called, result]).text


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    with raises(openai.AuthenticationError):
        embeddings(api_key=SecretStr(WRONG_KEY)).embed_query("a")


main()
