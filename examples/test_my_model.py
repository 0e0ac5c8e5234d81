"""Tests a custom model without servers, weights or a GPU: an in-memory broker is enough.

Run them with `.venv/bin/pytest examples/test_my_model.py`. The model here counts letters. Replace
it with your own: docs/how-to/test-your-model.md explains each part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import numpy as np
import pytest

from api.testing import running_api
from shared.broker.in_memory import InMemoryBroker
from shared.errors import BadInput, ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.tasks import Input, Result
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from workers.models.base import OnStep, PreparedItem, PreparedText
from workers.testing import running_worker

pytestmark = pytest.mark.anyio

ENTRY = Model(
    name="letters",
    task="embedding",
    source="local:nowhere",
    dimensions=2,
    batch=Batch(max_tokens=32, max_items=4),
)


class LetterPreparer:
    """Runs in the I/O process, where each letter is a token."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedItem | BadInput]:
        """Rejects texts that are not ASCII."""
        return [self._prepare(value) for value in inputs]

    def _prepare(self, value: Input) -> PreparedItem | BadInput:
        if not isinstance(value, TextInput) or not value.text.isascii():
            return BadInput("only ASCII texts can be counted", field="input")
        return PreparedText(key="", length=len(value.text), ids=value.text.encode())


class LetterModel:
    """Runs in the model process: counts vowels and all letters. Text containing "!" breaks it."""

    device_name = "cpu"
    pads = False

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def setup(self) -> None:
        """Load weights here."""

    def warmup(self) -> None:
        """Compile kernels here."""

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Computes the whole batch in one call."""
        return [list(range(len(batch)))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        """Returns the work as is, without padding."""
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> Sequence[Result | PenstockError]:
        """Returns one vector per text."""
        texts = [item.ids.decode() for item in batch if isinstance(item, PreparedText)]
        self.batches.append(texts)
        if any("!" in text for text in texts):
            raise RuntimeError("cannot count a shout")
        return [EmbeddingResult(vector_of(text).tobytes(), len(text)) for text in texts]


def vector_of(text: str) -> np.ndarray:
    """Returns the vector that the model computes."""
    return np.array([sum(text.count(vowel) for vowel in "aeiou"), len(text)], "<f4")


async def test_each_text_gets_its_vector() -> None:
    """Vectors are in the same order as the texts."""
    async with running_worker(
        InMemoryBroker(), ENTRY, preparer=LetterPreparer(), model=LetterModel
    ) as worker:
        outcomes = await worker.compute(TextInput("a cat"), TextInput("sky"))
    assert outcomes == [
        EmbeddingResult(vector_of("a cat").tobytes(), 5),
        EmbeddingResult(vector_of("sky").tobytes(), 3),
    ]
    assert [row.status for row in worker.rows] == ["succeeded", "succeeded"]


async def test_bad_text_fails_alone() -> None:
    """A failing batch is split in half repeatedly until the text that breaks it is isolated."""
    model = LetterModel()
    async with running_worker(
        InMemoryBroker(), ENTRY, preparer=LetterPreparer(), model=lambda: model
    ) as worker:
        good, shout, foreign, last = await worker.compute(*map(TextInput, ("a", "b!", "é", "c")))
    assert isinstance(good, EmbeddingResult)
    assert isinstance(last, EmbeddingResult)
    assert isinstance(shout, ModelFailed)
    assert isinstance(foreign, BadInput)
    assert foreign.field == "input"
    assert model.batches[0] == ["a", "b!", "c"]


async def test_batches_keep_to_the_budget() -> None:
    """A batch has at most 32 tokens or 4 items."""
    model = LetterModel()
    async with running_worker(
        InMemoryBroker(), ENTRY, preparer=LetterPreparer(), model=lambda: model
    ) as worker:
        jobs = (worker.compute(TextInput(letter * 10)) for letter in "abcdefgh")
        outcomes = await asyncio.gather(*jobs)
    assert all(isinstance(outcome, EmbeddingResult) for [outcome] in outcomes)
    assert sum(map(len, model.batches)) == 8
    assert max(map(len, model.batches)) <= 3


async def test_text_over_http_gets_its_vector() -> None:
    """Runs the API, the worker and the model, connected by one broker."""
    broker = InMemoryBroker()
    async with (
        running_worker(broker, ENTRY, preparer=LetterPreparer(), model=LetterModel),
        running_api(broker, [ENTRY]) as api,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(api.app), base_url="http://localhost"
        ) as http,
    ):
        body = {"model": "letters", "input": ["a cat", "sky"]}
        answer = await http.post("/v1/embeddings", json=body)
        refused = await http.post("/v1/embeddings", json=body | {"input": "é"})
    assert answer.status_code == 200, answer.text
    assert [item["embedding"] for item in answer.json()["data"]] == [[2.0, 5.0], [0.0, 3.0]]
    assert answer.json()["usage"]["total_tokens"] == 8
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
