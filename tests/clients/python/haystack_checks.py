"""Haystack: texts, responses, tools, agents and embeddings through its OpenAI components."""

from __future__ import annotations

from typing import Any

import openai
from haystack import Document, Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.components.retrievers import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import Tool
from haystack.utils import Secret
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

ASKED = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("What is a mill?")]
COLORS = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}
FORCED = {"tool_choice": "required"}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=24)
    people: int = Field(ge=0, le=40_000_000)


def at(key: str = KEY) -> dict[str, Any]:
    return {"api_base_url": f"{URL}/v1", "api_key": Secret.from_token(key), "timeout": LIMIT_S}


def chats(most: int = 16, **options: Any) -> OpenAIChatGenerator:
    given = {"max_completion_tokens": most, "temperature": 0, **options.pop("given", {})}
    return OpenAIChatGenerator(model=needs_text(), generation_kwargs=given, **at(), **options)


def responses(most: int = 16, **options: Any) -> OpenAIResponsesChatGenerator:
    given = {"max_output_tokens": most, "temperature": 0, **options.pop("given", {})}
    return OpenAIResponsesChatGenerator(
        model=needs_text(), generation_kwargs=given, **at(), **options
    )


def painter(painted: list[str]) -> Tool:
    def paint(color: str) -> str:
        painted.append(color)
        return "It is painted."

    return Tool(name="paint", description="Paints.", parameters=COLORS, function=paint)


def text_of(made: Any) -> str:
    (reply,) = made["replies"]
    return str(reply.text)


@check
def text_streamed_is_the_text() -> None:
    for made in (chats(), responses()):
        pieces: list[StreamingChunk] = []
        whole = text_of(made.run(ASKED))
        streamed = text_of(made.run(ASKED, streaming_callback=pieces.append))
        assert len(pieces) > 1
        assert "".join(piece.content for piece in pieces) == streamed == whole


@check
async def text_asynchronously() -> None:
    for made in (chats(), responses()):
        assert text_of(await made.run_async(ASKED))


@check
def schema_is_filled() -> None:
    asked = [ChatMessage.from_user("A city in Spain?")]
    City.model_validate_json(text_of(chats(64, given={"response_format": City}).run(asked)))
    City.model_validate_json(text_of(responses(64, given={"text_format": City}).run(asked)))


@check
def tool_is_called_and_its_result_read() -> None:
    for make in (chats, responses):
        painted: list[str] = []
        tool = painter(painted)
        asked = [ChatMessage.from_user("Paint it.")]
        (called,) = make(64, given=FORCED).run(asked, tools=[tool])["replies"]
        (call,) = called.tool_calls
        result = ChatMessage.from_tool(tool.invoke(**call.arguments), origin=call)
        assert text_of(make().run([*asked, called, result]))
        assert painted[0] in ("red", "green")


@check
def agent_calls_tools_for_three_steps() -> None:
    for make in (chats, responses):
        painted: list[str] = []
        agent = Agent(
            chat_generator=make(64, given=FORCED), tools=[painter(painted)], max_agent_steps=3
        )
        made = agent.run(messages=[ChatMessage.from_user("Paint it.")])
        assert len(painted) == 3
        assert made["messages"][-1].tool_call_results


@check
def agent_streams() -> None:
    painted: list[str] = []
    pieces: list[StreamingChunk] = []
    agent = Agent(
        chat_generator=chats(64, given=FORCED), tools=[painter(painted)], exit_conditions=["paint"]
    )
    agent.run(messages=[ChatMessage.from_user("Paint it.")], streaming_callback=pieces.append)
    assert len(painted) == 1
    assert any(piece.tool_calls for piece in pieces)


@check
def texts_are_embedded() -> None:
    (text,) = fresh(1)
    made = OpenAITextEmbedder(model=EMBEDDER, **at()).run(text)
    assert_same([made["embedding"]], vectors([text]))


@check
def pipeline_answers_from_documents() -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    texts = ["The turbine makes power.", "Cats sleep all day.", "Bread is baked in an oven."]
    documents = [Document(content=text) for text in texts]
    embedded = OpenAIDocumentEmbedder(model=EMBEDDER, **at()).run(documents)["documents"]
    assert_same([one.embedding for one in embedded], vectors(texts))
    store.write_documents(embedded)
    template = "{% for one in documents %}{{ one.content }}{% endfor %} What do cats do?"
    pipeline = Pipeline()
    pipeline.add_component("embedder", OpenAITextEmbedder(model=EMBEDDER, **at()))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.add_component(
        "prompt", ChatPromptBuilder([ChatMessage.from_user(template)], required_variables="*")
    )
    pipeline.add_component("writer", chats())
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "writer.messages")
    made = pipeline.run({"embedder": {"text": "naps"}}, include_outputs_from={"retriever"})
    assert [one.content for one in made["retriever"]["documents"]] == ["Cats sleep all day."]
    assert text_of(made["writer"])


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    with raises(openai.AuthenticationError):
        OpenAIChatGenerator(model=needs_text(), **at(WRONG_KEY)).run(ASKED)


main()
