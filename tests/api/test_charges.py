"""The cost in a response equals the cost in its rows."""

import asyncio
from pathlib import Path

import pytest

from shared.models.entry import Cache, Price
from tests.api.harness import CATALOG, TEXT_MODEL, running_api, settings_for
from tests.api.predicting import TEXT, until_over
from tests.api.test_tenant_cache import ACME, OTHER, Deployment, deployed
from tests.keys import bearer
from tests.workers.worker_harness import MODEL

pytestmark = pytest.mark.anyio
PRICED = MODEL.model_copy(
    update={
        "price": Price(per_million_tokens_usd=2.0, cached_share=0.25),
        "cache": Cache(ttl_s=60, scope="tenant"),
    }
)


async def _ask(one: Deployment, key: str, *texts: str) -> tuple[str, float, float]:
    """A request's ID, cost, and device time, from its response."""
    answer = await one.here.http.post(
        "/v1/embeddings",
        json={"model": MODEL.name, "input": list(texts), "encoding_format": "base64"},
        headers=bearer(key) | {"x-penstock-deadline-ms": "60000"},
    )
    assert answer.status_code == 200, answer.text
    headers = answer.headers
    return (
        headers["x-request-id"],
        float(headers["x-penstock-cost-usd"]),
        float(headers["x-penstock-device-ms"]),
    )


async def test_cost_in_the_header_is_the_cost_of_the_rows(redis_url: str, tmp_path: Path) -> None:
    async with deployed(redis_url, tmp_path, PRICED) as one:
        asked = [await _ask(one, ACME, "a cat", "a dog on a mat")]
        asked += [await _ask(one, ACME, "a cat", "something new")]
        asked += await asyncio.gather(*(_ask(one, OTHER, "the same", "text") for _ in range(3)))
        rows = [*one.here.rows, *one.harness.rows]
        await one.harness.until(lambda: len([*one.here.rows, *one.harness.rows]) >= 10)
        rows = [*one.here.rows, *one.harness.rows]
        for request_id, cost_usd, device_ms in asked:
            own = [row for row in rows if row.request_id == request_id]
            assert len(own) == 2
            assert cost_usd == pytest.approx(sum(row.cost_usd or 0 for row in own), rel=1e-12)
            seconds = [
                (row.inference_ms or 0) / 1000 * (row.device_share or 0) / (row.batch_size or 1)
                for row in own
            ]
            assert device_ms == pytest.approx(sum(seconds) * 1000, abs=0.001)
        assert {row.charged_share for row in rows} == {1.0, 0.25}


async def test_prediction_tells_its_cost(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        created = (await api.http.post("/v1/predictions", json=TEXT)).json()
        assert "cost_usd" not in created["metrics"]
        found = await until_over(api, created)
        per_token_usd = CATALOG.find(TEXT_MODEL.name).price.per_million_tokens_usd / 1e6
        assert found["metrics"]["cost_usd"] == pytest.approx(4 * per_token_usd)
        assert found["metrics"]["device_time"] == pytest.approx(0.0025 / TEXT_MODEL.gpu.share)


async def test_failed_prediction_costs_nothing(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        body = TEXT | {"input": {"text": "broken"}}
        found = await until_over(api, (await api.http.post("/v1/predictions", json=body)).json())
        assert (found["status"], found["metrics"]["cost_usd"]) == ("failed", 0)
