"""Cohere: ranking through both versions of its API, and through LangChain."""

from __future__ import annotations

import cohere
import numpy as np
from cohere.core import ApiError
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from pydantic import SecretStr

from tests.clients.python.checks import (
    EMBEDDER,
    KEY,
    URL,
    WRONG_KEY,
    check,
    fresh,
    main,
    needs_keys,
    raises,
    vectors,
)

QUERY = "a young cat"
NEAR = 1e-4


def client(key: str = KEY) -> cohere.ClientV2:
    return cohere.ClientV2(api_key=key, base_url=URL, log_warning_experimental_features=False)


def scores(texts: list[str]) -> list[float]:
    """The cosine similarities of the vectors returned over plain HTTP."""
    *documents, query = (np.array(one) for one in vectors([*texts, QUERY]))
    return [float(one @ query) for one in documents]


def assert_ranked(results: list[tuple[int, float]], texts: list[str]) -> None:
    """Asserts that `results` contains the texts with the highest cosine similarity."""
    wanted = scores(texts)
    order = sorted(range(len(texts)), key=wanted.__getitem__, reverse=True)[: len(results)]
    assert [index for index, _ in results] == order, (results, wanted)
    for index, score in results:
        assert abs(score - wanted[index]) < NEAR, (index, score, wanted[index])


@check
def second_version() -> None:
    texts = fresh(12)
    found = client().rerank(model=EMBEDDER, query=QUERY, documents=texts)
    assert_ranked([(one.index, one.relevance_score) for one in found.results], texts)
    assert found.id
    assert found.meta is not None
    assert found.meta.tokens is not None
    assert (found.meta.tokens.input_tokens or 0) > 12


@check
def first_version() -> None:
    texts = fresh(12)
    first = cohere.Client(api_key=KEY, base_url=URL)
    found = first.rerank(
        model=EMBEDDER,
        query=QUERY,
        documents=[{"text": text} for text in texts],
        top_n=3,
        return_documents=True,
        max_chunks_per_doc=1,
    )
    assert_ranked([(one.index, one.relevance_score) for one in found.results], texts)
    for one in found.results:
        assert one.document is not None
        assert one.document.text == texts[one.index]


@check
async def asynchronously() -> None:
    texts = fresh(5)
    found = await cohere.AsyncClientV2(api_key=KEY, base_url=URL).rerank(
        model=EMBEDDER, query=QUERY, documents=texts, top_n=2
    )
    assert_ranked([(one.index, one.relevance_score) for one in found.results], texts)


@check
def long_documents_are_cut() -> None:
    (text,) = fresh(1)
    longer = f"{text} " + "and so on " * 1000
    found = client().rerank(
        model=EMBEDDER, query=QUERY, documents=[longer, text], max_tokens_per_doc=20
    )
    assert len(found.results) == 2


@check
def langchain() -> None:
    texts = fresh(6)
    ranker = CohereRerank(client=client(), model=EMBEDDER, top_n=4)
    documents = [Document(text, metadata={"place": place}) for place, text in enumerate(texts)]
    found = ranker.compress_documents(documents, QUERY)
    results = [(one.metadata["place"], one.metadata["relevance_score"]) for one in found]
    assert_ranked(results, texts)


@check
def langchain_by_its_own_settings() -> None:
    texts = fresh(3)
    ranker = CohereRerank(model=EMBEDDER, cohere_api_key=SecretStr(KEY), base_url=URL)
    found = ranker.rerank(texts, QUERY)
    assert_ranked([(one["index"], one["relevance_score"]) for one in found], texts)


@check
def unknown_model() -> None:
    with raises(ApiError) as raised:
        client().rerank(model="no-such-model", query=QUERY, documents=["a"])
    assert raised.error.status_code == 404
    assert "no-such-model" in str(raised.error.body)


@check
def no_documents() -> None:
    with raises(ApiError) as raised:
        client().rerank(model=EMBEDDER, query=QUERY, documents=[])
    assert raised.error.status_code == 400


@check
def wrong_key() -> None:
    needs_keys()
    with raises(ApiError) as raised:
        client(WRONG_KEY).rerank(model=EMBEDDER, query=QUERY, documents=["a"])
    assert raised.error.status_code == 401


main()
