"""POST /v1/rerank and /v2/rerank: documents ordered by score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.models.catalog import Catalog, Model
from shared.models.tasks.embedding import TextInput
from shared.models.tasks.similarity import SimilarityInput
from tests.api.fake_worker import vector_of
from tests.api.harness import (
    IMAGE_MODEL,
    PAIRS_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    running_api,
    settings_for,
)

pytestmark = pytest.mark.anyio
DOCUMENTS = [f"document {number}" for number in range(6)]
QUERY = "which of them?"


async def ranked(api: ApiUnderTest, path: str = "/v1/rerank", **fields: Any) -> Any:
    body = {"model": TEXT_MODEL.name, "query": QUERY, "documents": DOCUMENTS, **fields}
    response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cosines() -> list[float]:
    query = vector_of(TextInput(QUERY, "end")).astype(np.float64)
    return [float(vector_of(TextInput(one, "end")) @ query) for one in DOCUMENTS]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_the_nearest_document_comes_first(api: ApiUnderTest, path: str) -> None:
    reply = await ranked(api, path)
    wanted = cosines()
    assert [one["index"] for one in reply["results"]] == sorted(
        range(6), key=wanted.__getitem__, reverse=True
    )
    for one in reply["results"]:
        assert one["relevance_score"] == pytest.approx(wanted[one["index"]], abs=1e-6)
        assert "document" not in one
    assert reply["rerank"] == "cosine"
    assert reply["meta"]["api_version"]["version"] == path[2]


async def test_the_best_are_returned_with_their_documents(api: ApiUnderTest) -> None:
    documents = [{"text": one} for one in DOCUMENTS]
    reply = await ranked(api, documents=documents, top_n=2, return_documents=True)
    best = sorted(range(6), key=cosines().__getitem__, reverse=True)[:2]
    assert [one["index"] for one in reply["results"]] == best
    assert [one["document"] for one in reply["results"]] == [documents[place] for place in best]


async def test_equal_documents_stay_in_their_order(api: ApiUnderTest) -> None:
    reply = await ranked(api, documents=["same"] * 4)
    assert [one["index"] for one in reply["results"]] == [0, 1, 2, 3]


async def test_tokens_are_those_of_the_rows(api: ApiUnderTest) -> None:
    first = await ranked(api)
    reply = await ranked(api)  # the API writes the rows for hits
    await api.until_idle()
    tokens = sum(row.tokens or 0 for row in api.rows)
    assert len(api.rows) == len(DOCUMENTS) + 1
    assert reply["results"] == first["results"]
    assert tokens == reply["usage"]["total_tokens"] > 0
    assert reply["meta"]["tokens"] == reply["meta"]["billed_units"] == {"input_tokens": tokens}


async def test_a_similarity_model_gets_pairs(api: ApiUnderTest) -> None:
    reply = await ranked(api, model=PAIRS_MODEL.name, max_tokens_per_doc=7)
    assert [item.input for item in api.worker.items] == [
        SimilarityInput(one, QUERY, "end", 7) for one in DOCUMENTS
    ]
    scores = [one["relevance_score"] for one in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 6


async def test_documents_are_cut_where_asked(api: ApiUnderTest) -> None:
    await ranked(api, max_tokens_per_doc=3)
    assert [item.input for item in api.worker.items] == [
        *(TextInput(one, "end", 3) for one in DOCUMENTS),
        TextInput(QUERY, "end"),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [3]}, "documents.0"),
        ({"documents": [{"title": "a"}]}, "documents.0"),
        ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"rank_fields": ["title"]}, "rank_fields.0"),
        ({"documents": ["x" * 70_000]}, "documents"),
        ({"query": "x" * 70_000}, "query"),
        ({"documents": ["x"] * 1001}, "documents"),
    ],
)
async def test_wrong_fields_are_named(
    api: ApiUnderTest, fields: dict[str, Any], field: str
) -> None:
    body = {"model": TEXT_MODEL.name, "query": QUERY, "documents": DOCUMENTS, **fields}
    response = await api.http.post("/v1/rerank", json=body)
    assert response.status_code in (400, 413)
    error = response.json()["error"]
    assert str(error["param"]).startswith(field.split(".")[0]), error
    assert not api.worker.jobs


@pytest.mark.parametrize("model", [IMAGE_MODEL.name, "writer", "no-such-model"])
async def test_other_models_do_not_rank(api: ApiUnderTest, model: str) -> None:
    body = {"model": model, "query": QUERY, "documents": DOCUMENTS}
    response = await api.http.post("/v1/rerank", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize(("model", "most"), [(TEXT_MODEL, 5), (PAIRS_MODEL, 6)])
async def test_as_many_documents_rank_as_the_model_takes_items(
    tmp_path: Path, model: Model, most: int
) -> None:
    """With vectors, the query is one of the items."""
    few = model.model_copy(update={"text": model.text.model_copy(update={"max_items": 6})})
    async with running_api(settings_for(tmp_path), catalog=Catalog((few,))) as api:
        reply = await ranked(api, model=few.name, documents=["x"] * most)
        assert len(reply["results"]) == most
        body = {"model": few.name, "query": QUERY, "documents": ["x"] * (most + 1)}
        response = await api.http.post("/v1/rerank", json=body)
        assert response.status_code == 400
        assert f"at most {most} documents" in response.json()["error"]["message"]
