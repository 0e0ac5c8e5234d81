"""Endpoints for operators: liveness, readiness, metrics, model descriptions."""

from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from prometheus_client.parser import text_string_to_metric_families

from api import metrics
from infra.local.redis_server import RedisServer
from shared.broker.in_memory import InMemoryBroker
from shared.errors import BadInput, ConfigurationError, Unavailable
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio


async def test_ready_when_broker_and_redis_answer(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        response = await api.http.get("/readyz")
        assert response.status_code == 200
        assert response.json() == {
            "status": "ready",
            "pubsub": "ok",
            "redis": "ok",
            "keys": "not required",
        }


async def test_degraded_if_redis_may_evict_running_predictions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "redis", tmp_path) as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.config_set("maxmemory-policy", "allkeys-lru")
            async with running_api(settings_for(tmp_path, redis_url=server.url)) as api:
                response = await api.http.get("/readyz")
                assert (response.status_code, response.json()["status"]) == (200, "degraded")
                assert response.json()["redis"].startswith(
                    "maxmemory-policy allkeys-lru loses running predictions when Redis is full; "
                )
                logged = [record for record in caplog.records if "may lose data" in record.message]
                assert {vars(record)["use"] for record in logged} == {"records"}
            await client.config_set("maxmemory-policy", "noeviction")
            async with running_api(settings_for(tmp_path, redis_url=server.url)) as api:
                assert (await api.http.get("/readyz")).json()["redis"] == "ok"


async def test_degraded_without_redis_but_ready(api: ApiUnderTest) -> None:
    response = await api.http.get("/readyz")
    assert response.status_code == 200
    assert response.json()["status"] == "degraded"


async def test_not_ready_without_the_broker(api: ApiUnderTest) -> None:
    api.broker.outage = Unavailable("no broker")
    response = await api.http.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "status": "unavailable",
        "pubsub": "round trip failed: unreachable or rejecting messages",
        "redis": "unreachable; requests proceed without it",
        "keys": "not required",
    }
    for path in ("/livez", "/healthz", "/health"):
        assert (await api.http.get(path)).status_code == 200


@pytest.mark.parametrize("is_direct", [True, False])
async def test_not_ready_without_one_of_the_reply_topics(
    tmp_path: Path, *, is_direct: bool
) -> None:
    class OneIsGone(InMemoryBroker):
        """One of each inbox's two topics has been deleted."""

        async def publish(self, topic_id: str, *args: Any, **kwargs: Any) -> str:
            if topic_id.startswith("inbox.") and topic_id.endswith(".direct") is is_direct:
                raise BadInput(f"publish to {topic_id}: NOT_FOUND")
            return await super().publish(topic_id, *args, **kwargs)

    broker = OneIsGone()
    async with running_api(settings_for(tmp_path), transport=broker, admin=broker) as api:
        response = await api.http.get("/readyz")
        assert (response.status_code, response.json()["status"]) == (503, "unavailable")
        assert response.json()["pubsub"].startswith("round trip failed")
        assert "NOT_FOUND" not in response.text


async def test_metrics_count_requests_and_items(api: ApiUnderTest) -> None:
    before = await _metrics(api)
    await api.http.post("/v1/embeddings", json={"model": TEXT_MODEL.name, "input": ["a", "b"]})
    await api.http.post("/v1/embeddings", json={})
    after = await _metrics(api)

    def counted(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after.get(key, 0.0) - before.get(key, 0.0)

    route, model = "/v1/embeddings", TEXT_MODEL.name
    assert counted("penstock_api_requests_total", route=route, model=model, status="200") == 1
    assert counted("penstock_api_requests_total", route=route, model="", status="400") == 1
    assert counted("penstock_api_request_seconds_count", route=route, model=model) == 1
    assert counted("penstock_api_items_total", model=model, cache="miss", status="succeeded") == 2
    assert counted("penstock_api_items_in_flight", model=model, lane="interactive") == 0
    assert counted("penstock_api_items_admitted_total", model=model, lane="interactive") == 2


async def _metrics(api: ApiUnderTest) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with metrics.serve_metrics("127.0.0.1", 0) as port:
        text = (await api.http.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


@pytest.mark.parametrize(
    "path", ["/metrics", "/%6detrics", "/v1/../metrics", "//metrics", "/metrics/"]
)
async def test_metrics_are_not_where_callers_are(api: ApiUnderTest, path: str) -> None:
    # As an absolute URL, because //metrics by itself would refer to the host `metrics`.
    url = str(api.http.base_url).rstrip("/") + path
    assert (await api.http.get(url)).status_code == 404


async def test_taken_port_for_metrics_is_told() -> None:
    with (
        metrics.serve_metrics("127.0.0.1", 0) as port,
        pytest.raises(ConfigurationError, match="METRICS_PORT"),
        metrics.serve_metrics("127.0.0.1", port),
    ):
        pass
