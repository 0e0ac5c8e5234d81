"""The API's behavior around its endpoints: limits, deadlines, callers that hang up, keys, and its
own errors.
"""

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from shared.errors import Unavailable
from shared.stores.cache import ResultCache
from tests.api.harness import CATALOG, TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
MODEL = TEXT_MODEL.name
BODY = {"model": MODEL, "input": "a"}


async def test_hits_and_misses_are_told_apart(tmp_path: Path, redis_url: str) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with ResultCache(redis_url, 0) as cache, running_api(settings, cache=cache) as api:
        texts = [f"text {number}" for number in range(100)]
        post = api.http.post
        first = await post("/v1/embeddings", json={"model": MODEL, "input": texts[:60]})
        second = await post("/v1/embeddings", json={"model": MODEL, "input": texts})
        third = await post("/v1/embeddings", json={"model": MODEL, "input": texts})
        assert [answer.headers["x-penstock-cache"] for answer in (first, second, third)] == [
            "miss",
            "partial",
            "hit",
        ]
        assert len(api.worker.items) == 100
        assert third.json()["data"] == second.json()["data"]
        assert third.json()["usage"] == second.json()["usage"]
        assert len([row for row in api.rows if row.cache in ("memory", "redis")]) == 160
        fourth = await post(
            "/v1/embeddings", json=BODY | {"input": texts[0]}, headers={"cache-control": "no-cache"}
        )
        assert fourth.headers["x-penstock-cache"] == "miss"
        assert len(api.worker.items) == 101


async def test_no_store_keeps_nothing(api: ApiUnderTest) -> None:
    await api.http.post("/v1/embeddings", json=BODY, headers={"cache-control": "no-store"})
    (job,) = api.worker.jobs
    assert (job.body.cache_read, job.body.cache_write, job.body.items[0].cache_key) == (
        False,
        False,
        None,
    )


async def test_late_answer_is_504_that_clients_do_not_repeat(api: ApiUnderTest) -> None:
    api.worker.is_silent = True
    headers = {"x-penstock-deadline-ms": "800"}
    client = api.openai(max_retries=2)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.embeddings.create(model=MODEL, input="a", extra_headers=headers)
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    said = re.search(
        r"no response within the deadline of 0\.8 s; waited ([\d.]+) s", caught.value.message
    )
    assert said is not None
    assert float(said[1]) >= 0.79
    assert len(api.worker.jobs) == 1
    envelope = api.worker.jobs[0].envelope
    assert envelope.deadline_s - envelope.received_at_s == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize(("given_ms", "seconds"), [(None, 30.0), ("5000", 5.0), ("900000", 300.0)])
async def test_deadline_is_bounded_by_the_model(
    api: ApiUnderTest, given_ms: str | None, seconds: float
) -> None:
    headers = {"x-penstock-deadline-ms": given_ms} if given_ms else {}
    await api.http.post("/v1/embeddings", json=BODY, headers=headers)
    envelope = api.worker.jobs[0].envelope
    assert envelope.deadline_s - envelope.received_at_s == pytest.approx(seconds, abs=1e-3)


async def test_full_instance_says_when_to_come_back(tmp_path: Path) -> None:
    async with running_api(settings_for(tmp_path, max_in_flight=1)) as api:
        api.worker.go.clear()
        client = api.openai()
        busy = asyncio.create_task(client.embeddings.create(model=MODEL, input="busy"))
        await api.worker.until_taken(1)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.embeddings.create(model=MODEL, input="a")
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        # The client itself returns in time because it follows the header.
        patient = asyncio.create_task(
            api.openai(max_retries=2).embeddings.create(model=MODEL, input="a")
        )
        api.worker.go.set()
        assert (await busy).data
        assert (await patient).data


async def test_broker_out_of_reach_is_503_to_be_repeated(api: ApiUnderTest) -> None:
    api.broker.outage = Unavailable("no broker")
    response = await api.http.post("/v1/embeddings", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "x-should-retry" not in response.headers


async def test_caller_who_hangs_up_frees_its_place_at_once(tmp_path: Path) -> None:
    async with running_api(settings_for(tmp_path, max_in_flight=1)) as api:
        api.worker.go.clear()
        asked = asyncio.create_task(api.http.post("/v1/embeddings", json=BODY))
        await api.worker.until_taken(1)
        asked.cancel()
        await api.until_idle()
        api.worker.go.set()
        assert (
            await api.http.post("/v1/embeddings", json=BODY | {"input": "b"})
        ).status_code == 200


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "counted"])
async def test_body_above_the_limit_is_refused_while_it_comes(
    tmp_path: Path, is_declared: bool
) -> None:
    async with running_api(settings_for(tmp_path, request_max_bytes=1000)) as api:
        body = json.dumps(BODY | {"input": "x" * 200_000}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 10_000):
                yield body[start : start + 10_000]

        response = await api.http.post("/v1/embeddings", content=body if is_declared else pieces())
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert (await api.http.post("/v1/embeddings", json=BODY)).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
async def test_compressed_body_is_refused_by_its_header(api: ApiUnderTest, encoding: str) -> None:
    body = gzip.compress(json.dumps(BODY).encode())
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = await api.http.post("/v1/embeddings", content=body, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_input", "content-encoding")
    plain = headers | {"content-encoding": "identity"}
    content = json.dumps(BODY).encode()
    response = await api.http.post("/v1/embeddings", content=content, headers=plain)
    assert response.status_code == 200


async def test_body_that_stops_coming_is_given_up(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.middleware.BODY_IDLE_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    status = await asyncio.wait_for(reader.readline(), WAIT_LIMIT_S)
    assert status.split()[1] == b"408"
    writer.close()
    await writer.wait_closed()


async def test_caller_who_hangs_up_in_the_middle_of_its_body_does_no_harm(
    api: ApiUnderTest,
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await api.http.post("/v1/embeddings", json=BODY)).status_code == 200


async def test_models_are_listed_and_found(api: ApiUnderTest) -> None:
    client = api.openai()
    assert [model.id async for model in client.models.list()] == [
        model.name for model in CATALOG.models
    ]
    found = await client.models.retrieve(TEXT_MODEL.aliases[0])
    assert (found.id, found.object, found.owned_by) == (MODEL, "model", "penstock")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nowhere", 404, "not_found"), ("GET", "/v1/embeddings", 405, "method_not_allowed")],
)
async def test_unknown_paths_and_methods_answer_in_the_same_shape(
    api: ApiUnderTest, method: str, path: str, status: int, code: str
) -> None:
    response = await api.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"].startswith("req_")


async def test_unexpected_error_is_a_500_in_the_same_shape(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("api.openai.embeddings.embeddings_reply", lambda *args, **options: 1 / 0)
    with pytest.raises(openai.InternalServerError) as caught:
        await api.openai().embeddings.create(model=MODEL, input="a")
    assert caught.value.code == "internal"
    assert "ZeroDivisionError" in caplog.text
    assert caught.value.request_id
    assert caught.value.request_id in str([vars(record) for record in caplog.records])


async def test_keys_are_asked_for_and_name_the_tenant(tmp_path: Path) -> None:
    async with running_api(
        settings_for(tmp_path, keys_url=keys_url(tmp_path, a="acme", u="umbrella"))
    ) as api:
        for key, tenant in (("a", "acme"), ("u", "umbrella")):
            await api.openai(api_key=key_for(key)).embeddings.create(model=MODEL, input=tenant)
            assert api.worker.jobs[-1].envelope.tenant == tenant
        for path in ("/v1/embeddings", "/v1/images/generations", "/v1/images/edits"):
            assert (await api.http.post(path, content=b"{")).status_code == 401
        with pytest.raises(openai.AuthenticationError) as caught:
            await api.openai(api_key=key_for("k")).models.list()
        assert caught.value.code == "invalid_api_key"
        for headers in (
            {},
            {"authorization": f"Basic {key_for('a')}"},
            {"authorization": "Bearer"},
            {b"authorization": b"Bearer \xff"},
        ):
            assert (await api.http.get("/v1/models", headers=headers)).status_code == 401
        assert (await api.http.get("/healthz")).status_code == 200
