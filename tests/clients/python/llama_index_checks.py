"""LlamaIndex: embeddings through its OpenAI classes, searched in an index."""

from __future__ import annotations

from typing import Any

import openai
from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    URL,
    WRONG_KEY,
    assert_same,
    check,
    fresh,
    main,
    needs_keys,
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
    """Takes other models than OpenAI's by `model_name`."""
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


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    with raises(openai.AuthenticationError):
        embedding(api_key=WRONG_KEY).get_text_embedding("a")


main()
