"""Invalid numbers in a result (NaN, infinity, an all-zero vector) are never returned, charged or
cached, and fail only their own item.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from api.testing import running_api
from shared.broker.in_memory import InMemoryBroker
from shared.errors import PenstockError
from shared.models.catalog import Model
from shared.models.entry import Batch, Cache, Price
from shared.models.tasks import Input, Result
from shared.models.tasks.custom import CustomResult
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from shared.models.tasks.similarity import SimilarityInput, SimilarityResult
from shared.usage.row import Row
from tests.flows.models import JOIN
from tests.flows.world import ThreadModel
from tests.waiting import until
from workers.models.base import OnStep, PreparedItem, PreparedText
from workers.models.custom.preparation import CustomPreparer
from workers.testing import running_worker

pytestmark = pytest.mark.anyio
SIZE = 4
VECTORS = Model(
    name="vectors",
    task="embedding",
    source="local:nowhere",
    dimensions=SIZE,
    batch=Batch(max_tokens=64, max_items=8),
    cache=Cache(ttl_s=60),
    price=Price(per_million_tokens_usd=1000.0),
)
SCORES = Model.model_validate(VECTORS.model_dump() | {"name": "scores", "task": "similarity"})
CLASS = JOIN.model_copy(update={"cache": Cache(ttl_s=60), "price": Price(per_item_usd=1.0)})
NUMBERS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "zero": 0.0}
"""The number that a model produces for a text with this name."""


class Words:
    """A text is one token, and a pair's second text is not read."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText]:
        texts = [one.text for one in inputs if isinstance(one, TextInput | SimilarityInput)]
        return [PreparedText(key="", length=1, ids=text.encode()) for text in texts]


@dataclass
class Numbers:
    """Produces invalid numbers for the names in NUMBERS, and valid numbers for other texts."""

    make: Callable[[str], Result]
    computed: list[str] = field(default_factory=list)
    device_name: str = "cpu"
    pads: bool = False

    def setup(self) -> None:
        """Does nothing, because there are no weights to load."""

    def warmup(self) -> None:
        """Does nothing, because there is nothing to compile."""

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        return [list(range(len(batch)))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> Sequence[Result | PenstockError]:
        texts = [item.ids.decode() for item in batch if isinstance(item, PreparedText)]
        self.computed += texts
        return [self.make(text) for text in texts]


def vector_of(text: str) -> EmbeddingResult:
    vector = np.ones(SIZE, "<f4")
    if text in NUMBERS:
        vector[:] = 0.0 if text == "zero" else vector
        vector[1] = NUMBERS[text]
    if text == "zero at first":
        vector[:2] = 0.0
    return EmbeddingResult(vector.tobytes(), 1)


def score_of(text: str) -> SimilarityResult:
    return SimilarityResult(NUMBERS.get(text, 0.5), 1)


@dataclass
class World:
    """An API and a worker for one model."""

    http: httpx.AsyncClient
    written: list[list[Row]]

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.written for row in rows]


@asynccontextmanager
async def serving(entry: Model, redis_url: str, preparer: Any, model: Any) -> AsyncIterator[World]:
    broker = InMemoryBroker()
    async with AsyncExitStack() as opened:
        worker = await opened.enter_async_context(
            running_worker(
                broker, entry, preparer=preparer, model=lambda: model, redis_url=redis_url
            )
        )
        api = await opened.enter_async_context(running_api(broker, [entry], redis_url=redis_url))
        http = await opened.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://localhost")
        )
        yield World(http, [worker.rows, api.rows])


@pytest.mark.parametrize("wrong", NUMBERS)
async def test_wrong_vector_is_not_returned_charged_or_cached(redis_url: str, wrong: str) -> None:
    model = Numbers(vector_of)
    async with serving(VECTORS, redis_url, Words(), model) as world:
        for _ in range(2):
            body = {"model": "vectors", "input": ["right", wrong]}
            answer = await world.http.post("/v1/embeddings", json=body)
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "model_failed"
            assert "NaN" in answer.text or "all-zero vector" in answer.text
            assert answer.headers["x-penstock-cost-usd"] == "0"
        await until(lambda: len([row for row in world.rows if row.status == "failed"]) >= 2)
        assert model.computed.count(wrong) == 2, "it is not cached"
        assert model.computed.count("right") == 1
        assert {row.cost_usd for row in world.rows if row.status == "failed"} == {0.0}
        alone = await world.http.post("/v1/embeddings", json={"model": "vectors", "input": "right"})
        assert alone.json()["data"][0]["embedding"] == [1.0] * SIZE


@pytest.mark.parametrize("entry", [VECTORS, SCORES], ids=["vectors", "scores"])
@pytest.mark.parametrize("wrong", ["nan", "inf"])
async def test_rerank_ranks_no_document_without_a_score(
    redis_url: str, wrong: str, entry: Model
) -> None:
    make = vector_of if entry is VECTORS else score_of
    async with serving(entry, redis_url, Words(), Numbers(make)) as world:
        body = {"model": entry.name, "query": "q", "documents": ["a", wrong, "b"]}
        answer = await world.http.post("/v1/rerank", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_failed")
        body["documents"] = ["a", "b"]
        answer = await world.http.post("/v1/rerank", json=body)
        assert [one["index"] for one in answer.json()["results"]] == [0, 1]


async def test_vector_that_is_0_in_the_dimensions_asked_for_is_not_returned(
    redis_url: str,
) -> None:
    async with serving(VECTORS, redis_url, Words(), Numbers(vector_of)) as world:
        body: dict[str, Any] = {
            "model": "vectors",
            "input": "zero at first",
            "dimensions": 2,
        }
        answer = await world.http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_failed")
        assert answer.headers["x-penstock-cost-usd"] == "0"
        answer = await world.http.post("/v1/embeddings", json=body | {"dimensions": 3})
        assert answer.json()["data"][0]["embedding"] == [0.0, 0.0, 1.0]


class WrongClass(ThreadModel):
    """A class whose output contains a number that JSON does not allow, inside a list."""

    def __init__(self) -> None:
        """Skips the parent's constructor, whose state is not needed."""

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> Sequence[Result | PenstockError]:
        return [CustomResult({"scores": [0.5, [np.inf]]}) for _ in batch]


async def test_wrong_number_in_the_output_of_a_class_fails_it(redis_url: str) -> None:
    async with serving(CLASS, redis_url, CustomPreparer(CLASS), WrongClass()) as world:
        body = {"version": CLASS.name, "input": {"words": ["a"]}}
        answer = await world.http.post("/v1/predictions", json=body, headers={"prefer": "wait"})
        made = msgspec.json.decode(answer.content)
        assert (made["status"], made["output"]) == ("failed", None)
        assert "infinite number" in made["error"]
        await until(lambda: bool(world.rows))
        assert [row.cost_usd for row in world.rows] == [0.0]
