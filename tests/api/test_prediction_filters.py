"""Filters and pages in the prediction list."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from shared.predictions import decode_document, encode_document
from shared.stores.redis_client import KEY_PREFIX
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import TEXT, WAIT
from tests.keys import bearer, key_for, keys_url, stored

pytestmark = pytest.mark.anyio
FAILS = TEXT | {"input": {"text": "broken"}}
IMAGE = {"version": IMAGE_MODEL.name, "input": {"prompt": "a circle"}}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    narrow = stored("narrow", "acme", models=(TEXT_MODEL.name,))
    keys = keys_url(tmp_path, a="acme", b="acme", u="umbrella", keys=[narrow])
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        yield api


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two predictions each; filling a page reads up to eight."""
    monkeypatch.setattr("api.predictions.service.PAGE", 2)
    monkeypatch.setattr("api.predictions.service.SCAN_WINDOW", 3)
    monkeypatch.setattr("api.predictions.service.PAGE_READS", 3)


async def create(api: ApiUnderTest, body: dict[str, Any], key: str = "a") -> dict[str, Any]:
    answer = await api.http.post("/v1/predictions", json=body, headers=WAIT | bearer(key))
    made: dict[str, Any] = answer.json()
    return made


async def page(api: ApiUnderTest, url: str, key: str = "a", **query: str) -> dict[str, Any]:
    answer = await api.http.get(url, params=query or None, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def listed(api: ApiUnderTest, key: str = "a", **query: str) -> list[str]:
    """The IDs on all pages. Asserts that none appears on two pages."""
    ids, found = list[str](), await page(api, "/v1/predictions", key, **query)
    while True:
        ids += [entry["id"] for entry in found["results"]]
        assert len(ids) == len(set(ids))
        if found["next"] is None:
            return ids
        found = await page(api, found["next"], key)


@pytest.mark.usefixtures("short_pages")
async def test_pages_of_every_filter_neither_skip_nor_repeat(api: ApiUnderTest) -> None:
    made = list[tuple[dict[str, Any], str]]()
    for number in range(15):
        body = (TEXT, FAILS, TEXT, IMAGE, TEXT)[number % 5]
        key = "b" if number in (0, 1, 12) else "a"
        made.append((await create(api, body, key), key))
    await create(api, TEXT, "u")
    middle = made[7][0]["created_at"]
    keys = {key: await key_id(api, made, key) for key in "ab"}
    assert keys["a"] != keys["b"]
    cases: list[tuple[dict[str, str], Any]] = [
        ({}, lambda _entry, _key: True),
        ({"model": IMAGE_MODEL.name}, lambda entry, _key: model_of(entry) == IMAGE_MODEL.name),
        ({"model": made[0][0]["model"]}, lambda entry, _key: model_of(entry) == TEXT_MODEL.name),
        ({"status": "failed"}, lambda entry, _key: entry["status"] == "failed"),
        ({"status": "canceled"}, lambda _entry, _key: False),
        ({"api_key_id": keys["b"]}, lambda _entry, key: key == "b"),
        ({"created_after": middle}, lambda entry, _key: entry["created_at"] >= middle),
        ({"created_before": middle}, lambda entry, _key: entry["created_at"] < middle),
        (
            {"status": "succeeded", "api_key_id": keys["b"], "created_before": middle},
            lambda entry, key: (
                entry["status"] == "succeeded" and key == "b" and entry["created_at"] < middle
            ),
        ),
    ]
    for query, is_wanted in cases:
        expected = [entry["id"] for entry, key in reversed(made) if is_wanted(entry, key)]
        assert await listed(api, **query) == expected, query


def model_of(entry: dict[str, Any]) -> str:
    return str(entry["model"]).rpartition("/")[2]


async def key_id(api: ApiUnderTest, made: list[tuple[dict[str, Any], str]], key: str) -> str:
    """A key's public ID, as shown by its predictions."""
    ids = {entry["id"] for entry, by in made if by == key}
    found = await page(api, "/v1/predictions", include="api_key_id")
    while True:
        for entry in found["results"]:
            if entry["id"] in ids:
                return str(entry["api_key_id"])
        found = await page(api, found["next"])


@pytest.mark.usefixtures("short_pages")
async def test_a_page_without_matches_has_a_next_page(api: ApiUnderTest) -> None:
    oldest = await create(api, FAILS)
    for _ in range(9):
        await create(api, TEXT)
    first = await page(api, "/v1/predictions", status="failed")
    assert first["results"] == []
    assert "status=failed" in first["next"]
    second = await page(api, first["next"])
    assert [entry["id"] for entry in second["results"]] == [oldest["id"]]
    assert second["next"] is None


@pytest.mark.usefixtures("short_pages")
async def test_a_list_goes_on_after_records_that_are_gone(
    api: ApiUnderTest, redis_url: str
) -> None:
    made = [(await create(api, TEXT))["id"] for _ in range(5)]
    lose_records(redis_url, made[3:])
    assert await listed(api) == made[2::-1]


@pytest.mark.usefixtures("short_pages")
async def test_a_page_of_records_that_are_gone_has_a_next_page(
    api: ApiUnderTest, redis_url: str
) -> None:
    made = [(await create(api, TEXT))["id"] for _ in range(9)]
    lose_records(redis_url, made[1:])
    first = await page(api, "/v1/predictions")
    assert first["results"] == []
    second = await page(api, first["next"])
    assert ([entry["id"] for entry in second["results"]], second["next"]) == (made[:1], None)


@pytest.mark.usefixtures("short_pages")
async def test_predictions_of_the_same_time_are_in_pages(api: ApiUnderTest, redis_url: str) -> None:
    """For example, a batch's runs all show the batch's time."""
    made = [(await create(api, TEXT))["id"] for _ in range(7)]
    with redis.Redis.from_url(redis_url) as client:
        client.zadd(f"{KEY_PREFIX}predictions:of:acme", dict.fromkeys(made[1:6], 1_790_000_000.25))
    assert await listed(api) == [made[6], made[0], *sorted(made[1:6], reverse=True)]


def lose_records(redis_url: str, ids: list[str]) -> None:
    """Deletes records, but not their entries in the tenant's list."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.delete(*(f"{KEY_PREFIX}record:{name}" for name in ids)) == len(ids)


@pytest.mark.usefixtures("short_pages")
async def test_a_new_prediction_changes_no_later_page(api: ApiUnderTest) -> None:
    made = [(await create(api, TEXT))["id"] for _ in range(5)]
    first = await page(api, "/v1/predictions", status="succeeded")
    await create(api, TEXT)
    second = await page(api, first["next"])
    third = await page(api, second["next"])
    pages = (first, second, third)
    assert [entry["id"] for each in pages for entry in each["results"]] == made[::-1]


@pytest.mark.usefixtures("short_pages")
async def test_a_key_of_one_model_pages_past_others(api: ApiUnderTest) -> None:
    mine = await create(api, TEXT, "narrow")
    for _ in range(5):
        await create(api, IMAGE)
    assert await listed(api, "narrow") == [mine["id"]]
    assert await listed(api, "narrow", model=IMAGE_MODEL.name) == []


async def test_large_predictions_shorten_filtered_pages(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.service.READ_BYTES", 4096)
    long = TEXT | {"input": {"text": "a cat " * 300}}
    made = [(await create(api, body))["id"] for body in (TEXT, long, long, FAILS, long)]
    first = await page(api, "/v1/predictions", status="succeeded")
    assert len(first["results"]) < 4
    assert await listed(api, status="succeeded") == [made[at] for at in (4, 2, 1, 0)]


async def test_a_late_prediction_is_found_as_failed(api: ApiUnderTest, redis_url: str) -> None:
    """The reader ends it, so the list doesn't yet show its state in Redis."""
    api.worker.is_silent = True
    body = TEXT | {"input": {"text": "a dog"}}
    late = (await api.http.post("/v1/predictions", json=body, headers=bearer("a"))).json()
    pass_deadline(redis_url, late["id"])
    assert await listed(api, status="failed", model=TEXT_MODEL.name) == [late["id"]]


def pass_deadline(redis_url: str, record: str) -> None:
    """Moves a prediction's deadline into the past."""
    key = f"{KEY_PREFIX}record:{record}"
    with redis.Redis.from_url(redis_url) as client:
        stored = client.hget(key, "document")
        assert isinstance(stored, bytes)
        late = msgspec.structs.replace(decode_document(stored), deadline_s=1.0)
        client.hset(key, "document", encode_document(late).decode())


async def test_the_key_is_shown_only_on_request(api: ApiUnderTest) -> None:
    await create(api, TEXT)
    (usual,) = (await page(api, "/v1/predictions"))["results"]
    assert "api_key_id" not in usual
    (entry,) = (await page(api, "/v1/predictions", include="api_key_id"))["results"]
    assert entry["api_key_id"]
    assert usual == {name: value for name, value in entry.items() if name != "api_key_id"}


@pytest.mark.parametrize(
    "query",
    [
        {"status": "lost"},
        {"created_after": "yesterday"},
        {"created_before": "2026-13-01"},
        {"include": "secret"},
        {"model": "acme/"},
        {"cursor": "1.5-"},
    ],
)
async def test_wrong_filters_are_refused_by_name(api: ApiUnderTest, query: dict[str, str]) -> None:
    answer = await api.http.get("/v1/predictions", params=query, headers=bearer("a"))
    assert answer.status_code == 422
    assert next(iter(query)) in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/predictions", "/v1/batches"])
async def test_a_whole_key_is_refused_and_not_repeated(api: ApiUnderTest, path: str) -> None:
    key = key_for("a")
    answer = await api.http.get(path, params={"api_key_id": key}, headers=bearer("a"))
    assert answer.status_code in (400, 422)
    assert "api_key_id: must be only the key's ID" in answer.text
    assert key[-20:] not in answer.text


@pytest.mark.parametrize("path", ["/v1/predictions", "/v1/batches"])
async def test_times_are_iso_8601(api: ApiUnderTest, path: str) -> None:
    for moment in ("2026-10-01", "2026-10-01T12:00:00Z", "2026-10-01T12:00:00+02:00"):
        query = {"created_after": moment, "created_before": moment}
        assert (await api.http.get(path, params=query, headers=bearer("a"))).status_code == 200
    for wrong in ("1790000000", "0.5", ""):
        answer = await api.http.get(path, params={"created_after": wrong}, headers=bearer("a"))
        assert answer.status_code in (400, 422)
        assert "ISO 8601" in answer.text
