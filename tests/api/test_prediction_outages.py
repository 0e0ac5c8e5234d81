"""Predictions when something is late, missing or full: accepted predictions are kept, and no others
are accepted.
"""

import asyncio
from pathlib import Path

import pytest

from infra.local.redis_server import RedisServer
from shared.broker.in_memory import InMemoryBroker
from shared.errors import Unavailable
from shared.stores.records_redis import RecordsRedis
from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.api.predicting import TEXT, WAIT, admitted, until_over
from tests.gated_link import gated_redis
from tests.limits import TEST_LIMIT_S, WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.waiting import until

pytestmark = pytest.mark.anyio


api = api_with_redis(secret="s")


async def test_who_hangs_up_does_not_cancel(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    asked = asyncio.create_task(api.http.post("/v1/predictions", json=TEXT, headers=WAIT))
    await api.worker.claimed.wait()
    asked.cancel()
    await until(lambda: not admitted())
    api.worker.go.set()
    assert (await until_over(api, {"id": api.worker.jobs[0].envelope.request_id}))[
        "status"
    ] == "succeeded"


async def test_another_instance_answers_for_one_that_is_gone(
    tmp_path: Path, redis_url: str
) -> None:
    broker, settings = InMemoryBroker(), settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, broker, broker) as second:
        second.worker.go.clear()
        async with running_api(settings, broker, broker, worker=second.worker) as first:
            waiting = asyncio.create_task(
                first.http.post("/v1/predictions", json=TEXT, headers={"prefer": "wait=2"})
            )
            await second.worker.until_taken(1)
            # Found, awaited, and canceled through a different instance from the one that created
            # it.
            (listed,) = (await second.http.get("/v1/predictions")).json()["results"]
            canceled = (await second.http.post(f"/v1/predictions/{listed['id']}/cancel")).json()
            assert canceled["status"] == "canceled"
            assert (await waiting).json()["status"] == "canceled"
            created = (await first.http.post("/v1/predictions", json=TEXT)).json()
        second.worker.go.set()
        assert (await until_over(second, created))["status"] == "succeeded"


async def test_cancel_that_nobody_heard_of_is_found_when_redis_is_back(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.creation.LOOK_EVERY_S", WAIT_LIMIT_S)
    async with (
        gated_redis(redis_url) as (link, far),
        running_api(settings_for(tmp_path, redis_url=far, secret="s")) as api,
        RecordStores(redis_url) as stores,
    ):
        api.worker.go.clear()
        waiting = asyncio.create_task(api.http.post("/v1/predictions", json=TEXT, headers=WAIT))
        await api.worker.claimed.wait()
        link.cut()  # so any message on the channel is lost now
        await stores.records.cancel(api.worker.jobs[0].envelope.request_id)
        assert (await waiting).json()["status"] == "canceled"
        api.worker.go.set()


async def test_lost_reply_is_found_in_the_record(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.creation.LOOK_EVERY_S", 0.2)
    api.worker.go.clear()
    waiting = asyncio.create_task(api.http.post("/v1/predictions", json=TEXT, headers=WAIT))
    await api.worker.claimed.wait()
    await api.broker.delete_topic(api.worker.jobs[0].envelope.inbox)
    api.worker.go.set()
    assert (await waiting).json()["status"] == "succeeded"


async def test_broker_out_of_reach_promises_nothing_and_a_retry_succeeds(api: ApiUnderTest) -> None:
    api.broker.outage = Unavailable("no broker")
    response = await api.http.post("/v1/predictions", json=TEXT)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    (failed,) = (await api.http.get("/v1/predictions")).json()["results"]
    assert failed["status"] == "failed"
    assert "unreachable" in failed["error"]
    assert "no broker" not in failed["error"]
    assert (await api.http.put("/v1/predictions/mine", json=TEXT)).status_code == 503
    api.broker.outage = None
    retried = await api.http.put("/v1/predictions/mine", json=TEXT, headers=WAIT)
    assert retried.json()["status"] == "succeeded"


async def test_redis_out_of_reach_is_503_at_once(tmp_path: Path) -> None:
    with RedisServer(tmp_path, tmp_path) as server:
        settings = settings_for(tmp_path, redis_url=server.url)
        async with running_api(settings) as api:
            created = (await api.http.post("/v1/predictions", json=TEXT, headers=WAIT)).json()
            server.stop()
            for method, path in (
                ("POST", "/v1/predictions"),
                ("GET", f"/v1/predictions/{created['id']}"),
                ("GET", "/v1/predictions"),
                ("POST", f"/v1/predictions/{created['id']}/cancel"),
            ):
                response = await api.http.request(
                    method, path, json=TEXT if path.endswith("s") else None
                )
                assert response.status_code == 503, path
                assert response.headers["retry-after"]
                assert response.json()["status"] == 503
            assert len(api.worker.jobs) == 1


async def test_hanging_redis_does_not_hold_an_answer_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is due when the request's own wait time is over, whatever Redis's limit is."""
    defaults = RecordsRedis.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "timeout_s", 2 * TEST_LIMIT_S)
    with RedisServer(tmp_path, tmp_path) as server:
        async with running_api(settings_for(tmp_path, redis_url=server.url)) as api:
            api.worker.go.clear()
            waiting = asyncio.create_task(
                api.http.post("/v1/predictions", json=TEXT, headers={"prefer": "wait=2"})
            )
            await api.worker.claimed.wait()
            server.pause()
            try:
                created = (await waiting).json()
            finally:
                server.resume()
            assert created["status"] == "starting"
            api.worker.go.set()
            assert (await until_over(api, created))["status"] == "succeeded"


async def test_prediction_that_nobody_ends_is_ended_by_who_reads_it(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.service.GRACE_S", 0.0)
    await api.broker.ensure_topic("webhooks")
    api.worker.is_silent = True
    body = TEXT | {"webhook": "https://a.example/hook"}
    before = api.broker.published
    created = (
        await api.http.post("/v1/predictions", json=body, headers={"x-penstock-deadline-ms": "600"})
    ).json()
    found = await until_over(api, created)
    assert (found["status"], found["error"]) == (
        "failed",
        "deadline exceeded: the prediction did not finish within 0.6 s",
    )
    assert api.broker.published == before + 2  # the job and the webhook's event
    assert api.worker.jobs[0].envelope.webhook == "start,output,logs,completed"


async def test_full_instance_says_when_to_come_back(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url, max_in_flight=1)) as api:
        api.worker.go.clear()
        waiting = asyncio.create_task(api.http.post("/v1/predictions", json=TEXT, headers=WAIT))
        await api.worker.until_taken(1)
        refused = await api.http.post("/v1/predictions", json=TEXT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["detail"]
        api.worker.go.set()
        assert (await waiting).json()["status"] == "succeeded"
        assert len((await api.http.get("/v1/predictions")).json()["results"]) == 1
