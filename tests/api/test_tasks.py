"""Every task as the API serves it: its example, its schemas, and similarity predictions."""

from typing import Any

import pytest

from api.tasks import MAX_FIELDS
from infra.rollout.examples import EXAMPLES
from shared.models.catalog import Model
from shared.models.tasks.embedding import TextInput
from shared.models.tasks.similarity import SimilarityInput
from tests.api.fake_worker import vector_of
from tests.api.harness import CATALOG, PAIRS_MODEL, TEXT_MODEL, ApiUnderTest, api_with_redis
from tests.api.predicting import WAIT

pytestmark = pytest.mark.anyio


api = api_with_redis(secret="s")


async def ask(api: ApiUnderTest, given: dict[str, Any]) -> dict[str, Any]:
    body = {"version": PAIRS_MODEL.name, "input": given}
    found: dict[str, Any] = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()
    return found


def score_of(text: str, query: str) -> Any:
    return pytest.approx(float(vector_of(TextInput(text)) @ vector_of(TextInput(query))), abs=1e-6)


@pytest.mark.parametrize("model", CATALOG.models, ids=lambda model: model.task)
async def test_the_example_of_a_task_is_answered(api: ApiUnderTest, model: Model) -> None:
    example = EXAMPLES[model.task]
    request = example.request(model, "a smoke test")
    response = await api.http.post(request.path, json=request.body, headers=dict(request.headers))
    assert response.is_success, response.text
    assert example.describe_answer(model, response.json())


@pytest.mark.parametrize("model", CATALOG.models, ids=lambda model: model.task)
async def test_schemas_of_a_task_are_shown(api: ApiUnderTest, model: Model) -> None:
    shown = (await api.http.get(f"/v1/models/anyone/{model.name}")).json()
    schemas = shown["latest_version"]["openapi_schema"]["components"]["schemas"]
    assert schemas["Input"]["properties"]
    assert schemas["Output"]["title"] == "Output"


@pytest.mark.parametrize(
    "given",
    [
        {"query": "a kitten", "texts": ["a cat", "a river"]},
        {"pairs": [["a cat", "a kitten"], ["a river", "a kitten"]]},
    ],
    ids=lambda given: next(iter(given)),
)
async def test_a_score_for_each_pair(api: ApiUnderTest, given: dict[str, Any]) -> None:
    found = await ask(api, given)
    assert found["output"] == [score_of("a cat", "a kitten"), score_of("a river", "a kitten")]
    expected = [SimilarityInput(text, "a kitten", "none") for text in ("a cat", "a river")]
    assert [item.input for item in api.worker.items] == expected


async def test_a_list_even_of_one_score(api: ApiUnderTest) -> None:
    found = await ask(api, {"query": "a cat", "texts": ["a cat"], "truncate": "end"})
    assert found["output"] == [pytest.approx(1.0)]
    assert found["metrics"]["truncated_tokens"] == 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "send either query and texts, or pairs"),
        ({"query": "a"}, "send either query and texts, or pairs"),
        ({"texts": ["a"]}, "send either query and texts, or pairs"),
        (
            {"query": "a", "texts": ["b"], "pairs": [["a", "b"]]},
            "send either query and texts, or pairs",
        ),
        ({"pairs": [["a"]]}, "at least 2 items"),
        ({"pairs": [["a", "b", "c"]]}, "at most 2 items"),
        ({"query": "a", "texts": []}, "at least 1 item"),
        ({"query": "a", "texts": [1]}, "valid string"),
        ({"query": "a", "texts": ["b"] * 129}, "at most 128 texts per prediction, got 129"),
        (
            {"query": "a", "texts": ["b", "c" * 65537]},
            "pair 1 has a text that exceeds the maximum of 65536 bytes",
        ),
        ({"query": "a" * 65536, "texts": ["b"] * 16}, "must be at most"),
        ({"text": "a"}, "input.text: unknown parameter"),
        ({str(number): "a" for number in range(MAX_FIELDS + 1)}, "at most 100 fields, got 101"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
async def test_wrong_pairs_are_refused(
    api: ApiUnderTest, given: dict[str, Any], reason: str
) -> None:
    body = {"version": PAIRS_MODEL.name, "input": given}
    response = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    assert 400 <= response.status_code < 500
    assert reason in response.text
    assert not api.worker.jobs


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (PAIRS_MODEL, {"pairs": [["a", "b"]] * 129}),
        (PAIRS_MODEL, {"pairs": [["a", "b" * 65537]]}),
        (TEXT_MODEL, {"texts": ["a"] * 129}),
        (TEXT_MODEL, {"texts": ["a", "b" * 65537]}),
        (TEXT_MODEL, {"text": "b" * 65537}),
        (TEXT_MODEL, {"input": ["a"] * 129}),
    ],
)
async def test_errors_name_the_field_that_has_the_texts(
    api: ApiUnderTest, model: Model, given: dict[str, Any]
) -> None:
    body = {"version": model.name, "input": given}
    response = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    (wrong,) = response.json()["invalid_fields"]
    assert wrong["field"] == f"input.{next(iter(given))}"


async def test_a_model_of_pairs_gives_no_vectors(api: ApiUnderTest) -> None:
    response = await api.http.post("/v1/embeddings", json={"model": PAIRS_MODEL.name, "input": "a"})
    assert response.status_code == 404
    assert "is for similarity, not embedding" in response.text
