"""LlamaIndex: text, and embeddings through its OpenAI classes that are searched in an index."""

from __future__ import annotations

from typing import Any

import openai
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    LIMIT_S,
    URL,
    WRONG_KEY,
    assert_same,
    check,
    fresh,
    main,
    needs_keys,
    needs_text,
    raises,
    vectors,
)


def embedding(**options: Any) -> OpenAILikeEmbedding:
    given = {"api_base": f"{URL}/v1", "api_key": KEY, **options}
    return OpenAILikeEmbedding(model_name=EMBEDDER, **given)


@check
def query_and_text() -> None:
    texts = fresh(2)
    made = embedding()
    found = [made.get_query_embedding(texts[0]), made.get_text_embedding(texts[1])]
    assert_same(found, vectors(texts))


@check
def batches_in_order() -> None:
    texts = fresh(50)
    found = embedding(embed_batch_size=16).get_text_embedding_batch(texts)
    assert_same(found, vectors(texts))


@check
def fewer_dimensions() -> None:
    texts = fresh()
    found = embedding(dimensions=64).get_text_embedding_batch(texts)
    assert_same(found, vectors(texts, dimensions=64))


@check
async def asynchronously() -> None:
    texts = fresh()
    found = await embedding().aget_text_embedding_batch(texts)
    assert_same(found, vectors(texts))


@check
def class_of_openai_itself() -> None:
    """Accepts models other than OpenAI's through `model_name`."""
    (text,) = fresh(1)
    made = OpenAIEmbedding(model_name=EMBEDDER, api_base=f"{URL}/v1", api_key=KEY)
    assert_same([made.get_text_embedding(text)], vectors([text]))


@check
def index_is_searched() -> None:
    texts = ["The turbine makes power.", "Cats sleep all day.", "Bread is baked in an oven."]
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in texts], embed_model=embedding()
    )
    (found,) = index.as_retriever(similarity_top_k=1).retrieve("a kitten that naps")
    assert found.get_content() == "Cats sleep all day."


@check
def too_long_text_is_cut_on_request() -> None:
    text = "the turbine turns " * 400
    with raises(openai.BadRequestError):
        embedding().get_text_embedding(text)
    made = embedding(additional_kwargs={"extra_body": {"truncate": "end"}})
    assert_same([made.get_text_embedding(text)], vectors([text], truncate="end"))


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=24)
    people: int = Field(ge=0, le=40_000_000)


def writer(**options: Any) -> OpenAILike:
    given = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 16, **options}
    at = {"api_base": f"{URL}/v1", "api_key": KEY, "timeout": LIMIT_S, "context_window": 1024}
    return OpenAILike(model=needs_text(), **at, **given)


def responses(most: int = 16, **options: Any) -> OpenAIResponses:
    at = {"api_base": f"{URL}/v1", "api_key": KEY, "timeout": LIMIT_S, "context_window": 1024}
    return OpenAIResponses(model=needs_text(), max_output_tokens=most, **at, **options)


def paint(color: str) -> str:
    """Paints the wall."""
    return f"It is {color}."


ASKED = [ChatMessage(role="system", content="Be brief."), ChatMessage(content="What is a mill?")]
PAINT = FunctionTool.from_defaults(paint)


@check
def chat_streamed_is_the_chat() -> None:
    made = writer(temperature=0)
    pieces = [one.delta or "" for one in made.stream_chat(ASKED)]
    assert len(pieces) > 1
    assert "".join(pieces) == made.chat(ASKED).message.content


@check
async def chat_asynchronously() -> None:
    made = writer(temperature=0)
    whole = (await made.achat(ASKED)).message.content
    streamed = await made.astream_chat(ASKED)
    assert "".join([one.delta or "" async for one in streamed]) == whole


@check
def completion_streamed_is_the_completion() -> None:
    """By default (`is_chat_model=False`), LlamaIndex requests completions."""
    made = writer(is_chat_model=False, temperature=0)
    pieces = [one.delta or "" for one in made.stream_complete("A mill is")]
    assert len(pieces) > 1
    assert "".join(pieces) == made.complete("A mill is").text


@check
def tool_is_called_and_its_result_read() -> None:
    made = writer(max_tokens=64)
    called = made.chat_with_tools([PAINT], user_msg="Paint it red.", tool_required=True)
    (call,) = made.get_tool_calls_from_response(called)
    assert call.tool_name == "paint"
    result = PAINT(**call.tool_kwargs)
    told = ChatMessage(
        role="tool", content=result.content, additional_kwargs={"tool_call_id": call.tool_id}
    )
    asked = ChatMessage(content="Paint it red.")
    answer = made.chat([asked, called.message, told])
    assert answer.message.content


@check
def tool_is_called_in_a_stream() -> None:
    made = writer(max_tokens=64)
    streamed = made.stream_chat_with_tools([PAINT], user_msg="Paint it.", tool_required=True)
    *_, last = streamed
    (call,) = made.get_tool_calls_from_response(last)
    assert "color" in call.tool_kwargs


@check
def schema_is_filled() -> None:
    asked = PromptTemplate("A city in {country}?")
    for way in ({"should_use_structured_outputs": True}, {}):
        found = writer(max_tokens=64, **way).structured_predict(City, asked, country="Spain")
        assert isinstance(found, City), way


@check
def text_and_tool_through_responses() -> None:
    made = responses(temperature=0)
    whole = made.chat(ASKED).message.content
    assert whole
    assert "".join(one.delta or "" for one in made.stream_chat(ASKED)) == whole
    called = responses(64).chat_with_tools([PAINT], user_msg="Paint it red.", tool_required=True)
    (call,) = made.get_tool_calls_from_response(called)
    assert call.tool_name == "paint"


@check
def responses_follow_one_another() -> None:
    """LlamaIndex's option `track_previous_responses` stores each response and refers to the one
    before.
    """
    made = responses(track_previous_responses=True)
    assert made.chat([ChatMessage(content="What is a mill?")]).message.content
    second = made.chat([ChatMessage(content="And a river?")])
    assert second.message.content
    assert second.raw.previous_response_id


@check
def index_answers_a_question() -> None:
    texts = ["The turbine makes power.", "Cats sleep all day.", "Bread is baked in an oven."]
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in texts], embed_model=embedding()
    )
    answer = index.as_query_engine(llm=writer(), similarity_top_k=1).query("What do cats do?")
    assert answer.response
    assert answer.source_nodes[0].get_content() == "Cats sleep all day."


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    with raises(openai.AuthenticationError):
        embedding(api_key=WRONG_KEY).get_text_embedding("a")


main()
