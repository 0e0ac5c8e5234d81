"""Facts about the caller, the input and the price, in rows from the API and from workers."""

from pathlib import Path

import pytest

from shared.models.entry import Cache, Price
from shared.tenants.plan import Plan
from tests.api.harness import TEXT_MODEL, running_api, settings_for
from tests.api.predicting import TEXT, until_over
from tests.api.test_limits import embed, limited_api
from tests.api.test_row_identity import rows_by_worker
from tests.api.test_tenant_cache import ACME, deployed
from tests.keys import bearer
from tests.workers.worker_harness import MODEL

pytestmark = pytest.mark.anyio
PRICED = MODEL.model_copy(
    update={
        "price": Price(version="v1", per_million_tokens_usd=2.0, cached_share=0.25),
        "cache": Cache(ttl_s=60, scope="tenant"),
    }
)


async def test_worker_and_api_say_the_same_of_a_request(redis_url: str, tmp_path: Path) -> None:
    async with deployed(redis_url, tmp_path, PRICED) as one:
        one.here.http.headers["user-agent"] = "OpenAI/Python 1.2"
        assert [await one.embed(ACME) for _ in range(2)] == ["miss", "hit"]
        computed, hit = sorted(await one.rows(2), key=lambda row: row.received_at_s)
    assert (computed.cache, hit.cache) == ("miss", "memory")
    for row in (computed, hit):
        assert row.tokens is not None
        listed_usd = row.tokens * 2.0 / 1e6
        assert row.list_price_usd == pytest.approx(listed_usd)
        assert (row.price_version, row.input_tokens) == ("v1", row.tokens)
        assert (row.priority, row.user_agent_family) == ("interactive", "openai-python")
    assert hit.cost_usd == pytest.approx(0.25 * listed_usd)
    assert computed.cost_usd == pytest.approx(listed_usd)
    assert (computed.batch_capacity, computed.padded_tokens) == (4, computed.tokens)
    assert computed.cold_start is False
    assert (hit.batch_capacity, hit.padded_tokens, hit.cold_start) == (None, None, None)


async def test_rows_name_the_plan_and_the_priority(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, Plan(max_priority="batch")) as api:
        await embed(api, "a text")
        await embed(api, "another text", key="other")
        await api.worker.until_taken(2)
        rows = [row for job in api.worker.jobs for row in rows_by_worker(job)]
        refused = await api.http.post("/v1/embeddings", content=b"{", headers=bearer("a"))
        assert refused.status_code == 400
        (last,) = api.rows
    assert {(row.tenant, row.plan, row.priority) for row in rows} == {
        ("acme", "theirs", "batch"),
        ("other", None, "interactive"),
    }
    assert (last.status, last.plan, last.user_agent_family) == (
        "refused",
        "theirs",
        "python-httpx",
    )


async def test_rows_of_predictions_name_plan_and_client(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        sent = {"user-agent": "replicate-python/1.0"}
        created = await api.http.post("/v1/predictions", json=TEXT, headers=sent)
        await until_over(api, created.json())
        (row,) = rows_by_worker(api.worker.jobs[0])
    assert (row.user_agent_family, row.price_version) == ("replicate", TEXT_MODEL.price.name)
