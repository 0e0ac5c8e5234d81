"""A rejected request leaves a count, and one row if its sender is known, but not its content."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import REGISTRY

from api.errors import ERROR_MAPPINGS
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
ACME = bearer("a")
SECRET = "the merger is off"
TEXT: dict[str, Any] = {"model": TEXT_MODEL.name, "input": SECRET}
DRAWING: dict[str, Any] = {"model": IMAGE_MODEL.name, "prompt": SECRET}
EMBEDDINGS, GENERATIONS, EDITS, PREDICTIONS = (
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/predictions",
)
MODEL_PREDICTIONS = "/models/{owner}/{name}/predictions"
BODY_LIMIT = 20_000


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(
        tmp_path,
        redis_url=redis_url,
        secret="s",
        keys_url=keys_url(tmp_path, a="acme", o="other"),
        request_max_bytes=BODY_LIMIT,
    )
    async with running_api(settings) as running:
        yield running


def count(route: str, status: int, code: str) -> float:
    labels = {"route": route, "status": str(status), "code": code}
    return REGISTRY.get_sample_value("penstock_api_errors_total", labels) or 0.0


def named(name: str) -> str:
    return f"/v1/models/any/{name}/predictions"


REFUSED: list[tuple[str, str, dict[str, Any], int, str, str]] = [
    (EMBEDDINGS, EMBEDDINGS, {"content": b"{" + SECRET.encode()}, 400, "invalid_input", ""),
    (EMBEDDINGS, EMBEDDINGS, {"json": TEXT | {"dimension": 5}}, 400, "invalid_input", ""),
    (
        EMBEDDINGS,
        EMBEDDINGS,
        {"json": TEXT | {"dimensions": 999}},
        400,
        "invalid_input",
        TEXT_MODEL.name,
    ),
    (
        EMBEDDINGS,
        EMBEDDINGS,
        {"json": TEXT | {"input": [7]}},
        400,
        "invalid_input",
        TEXT_MODEL.name,
    ),
    (EMBEDDINGS, EMBEDDINGS, {"json": TEXT | {"model": SECRET}}, 404, "model_not_found", ""),
    (
        EMBEDDINGS,
        EMBEDDINGS,
        {"json": TEXT | {"input": "x" * BODY_LIMIT}},
        413,
        "request_too_large",
        "",
    ),
    (
        EMBEDDINGS,
        EMBEDDINGS,
        {"json": TEXT, "headers": {"x-penstock-lane": SECRET}},
        400,
        "invalid_input",
        "*",
    ),
    (GENERATIONS, GENERATIONS, {"json": DRAWING | {"n": 99}}, 400, "invalid_input", ""),
    (
        GENERATIONS,
        GENERATIONS,
        {"json": DRAWING | {"size": "7x7"}},
        400,
        "invalid_input",
        IMAGE_MODEL.name,
    ),
    (
        EDITS,
        EDITS,
        {"data": DRAWING, "files": {"image": b"no image"}},
        400,
        "invalid_input",
        IMAGE_MODEL.name,
    ),
    (
        PREDICTIONS,
        "/predictions",
        {"json": {"version": SECRET, "input": {}}},
        422,
        "invalid_input",
        "",
    ),
    (named(SECRET), MODEL_PREDICTIONS, {"json": {"input": {}}}, 404, "model_not_found", ""),
    (
        named(TEXT_MODEL.name),
        MODEL_PREDICTIONS,
        {"json": {"input": {"t": SECRET}}},
        422,
        "invalid_input",
        "*",
    ),
    ("/v1/predictions/x/cancel", "/predictions/{prediction_id}/cancel", {}, 404, "not_found", ""),
]


@pytest.mark.parametrize(("path", "route", "given", "status", "code", "model"), REFUSED)
async def test_refused_request_leaves_one_row_and_a_count(
    api: ApiUnderTest,
    path: str,
    route: str,
    given: dict[str, Any],
    status: int,
    code: str,
    model: str,
) -> None:
    before = count(route, status, code)
    headers = ACME | {"x-request-id": "order-17"} | given.get("headers", {})
    answer = await api.http.post(path, **given | {"headers": headers})
    assert answer.status_code == status, answer.text
    (row,) = api.rows
    assert (row.status, row.error_code, row.tenant, row.client_request_id) == (
        "refused",
        code,
        "acme",
        "order-17",
    )
    assert row.row_id == f"{row.request_id}:refused"
    assert row.model in ("", TEXT_MODEL.name, IMAGE_MODEL.name)
    assert model in (row.model, "*")
    assert (row.tokens, row.cost_usd, row.charged_share) == (None, 0.0, 0.0)
    assert SECRET.encode() not in msgspec.json.encode(row)
    assert count(route, status, code) == before + 1


async def test_refusals_for_want_of_room_or_of_another_body_leave_rows(
    tmp_path: Path, redis_url: str
) -> None:
    settings = settings_for(
        tmp_path, redis_url=redis_url, keys_url=keys_url(tmp_path, a="acme"), max_in_flight=1
    )
    async with running_api(settings) as api:
        api.worker.go.clear()
        asked = asyncio.create_task(api.http.post(EMBEDDINGS, json=TEXT, headers=ACME))
        await api.worker.until_taken(1)
        shed = count(EMBEDDINGS, 429, "overloaded")
        assert (
            await api.http.post(EMBEDDINGS, json=TEXT | {"input": "b"}, headers=ACME)
        ).status_code == 429
        assert count(EMBEDDINGS, 429, "overloaded") == shed + 1
        api.worker.go.set()
        assert (await asked).status_code == 200
        keyed = ACME | {"idempotency-key": "k"}
        answers = [
            await api.http.post(EMBEDDINGS, json=TEXT | {"input": given}, headers=keyed)
            for given in ("a", "b", [7])
        ]
        assert [answer.status_code for answer in answers] == [200, 422, 422]
        other = ACME | {"idempotency-key": "l"}
        answers = [
            await api.http.post(EMBEDDINGS, json=TEXT | {"input": [7]}, headers=other)
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [400, 400]
        assert [(row.status, row.error_code) for row in api.rows] == [
            ("refused", "overloaded"),
            *[("refused", "idempotency_key_reused")] * 2,
            *[("refused", "invalid_input")] * 2,  # computed, then replayed for the key
        ]


async def test_wrong_keys_are_counted_and_leave_no_row(api: ApiUnderTest) -> None:
    before = count(EMBEDDINGS, 401, "invalid_api_key"), count("unmatched", 404, "not_found")
    for number in range(30):
        for headers in ({}, {"authorization": f"Bearer {number}"}):
            assert (await api.http.post(EMBEDDINGS, json=TEXT, headers=headers)).status_code == 401
        assert (await api.http.post(f"/v1/{number}", json=TEXT, headers=ACME)).status_code == 404
    after = count(EMBEDDINGS, 401, "invalid_api_key"), count("unmatched", 404, "not_found")
    assert (after[0] - before[0], after[1] - before[1]) == (60, 30)
    assert not api.rows
    assert not api.worker.jobs


async def test_who_only_looks_leaves_no_row(api: ApiUnderTest) -> None:
    for path, status in (
        (f"{PREDICTIONS}/none", 404),
        ("/v1/models/none", 404),
        ("/v1/objects/results/x", 400),
    ):
        answer: httpx.Response = await api.http.get(path, headers=ACME)
        assert answer.status_code in (status, 403, 422)
    assert not api.rows


async def test_what_a_worker_refuses_has_its_own_row(api: ApiUnderTest) -> None:
    """An accepted request's items leave their rows where they finish, so there is no second row
    here.
    """
    before = count(EMBEDDINGS, 500, "model_failed")
    assert (
        await api.http.post(EMBEDDINGS, json=TEXT | {"input": "broken"}, headers=ACME)
    ).status_code == 500
    assert count(EMBEDDINGS, 500, "model_failed") == before + 1
    assert len(api.worker.jobs) == 1
    assert not api.rows


def labels() -> set[tuple[str, str]]:
    """The routes and codes of all errors counted so far, in any test."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return {
        (sample.labels["route"], sample.labels["code"])
        for sample in samples
        if sample.name == "penstock_api_errors_total"
    }


async def test_labels_are_bounded(api: ApiUnderTest) -> None:
    before = labels()
    for number in range(20):
        await api.http.request(f"M{number}", EMBEDDINGS, headers=ACME)
        await api.http.get(f"/v1/{number}/{number}", headers=ACME)
        await api.http.post(named(f"m{number}"), json={"input": {}}, headers=ACME)
    expected = {
        (EMBEDDINGS, "method_not_allowed"),
        ("unmatched", "method_not_allowed"),
        ("unmatched", "not_found"),
        (MODEL_PREDICTIONS, "model_not_found"),
    }
    assert labels() - before <= expected
    assert {code for _, code in expected} <= {*ERROR_MAPPINGS}
