"""The usage that callers read matches the report and their actual requests.

Traffic goes through two API instances and a real worker's internals. Their rows go into the
embedded BigQuery, some of them twice, as redeliveries would write them.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.reports.runs import run_report
from tests.api.harness import running_api, settings_for
from tests.api.usage.world import DAY_S, World, opened_world
from tests.keys import key_for
from tests.workers.worker_harness import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


async def _traffic(world: World) -> int:
    """Misses, hits, joined items, failures, and invalid and rejected requests.

    Returns the number of rows.
    """
    acme, other, limited = (world.sent[name] for name in ("acme", "other", "limited"))
    rows = 0
    for key, sent, text in (("a", acme, "cat"), ("a2", acme, "horse"), ("o", other, "cat")):
        answers = [await world.embed(key, text, f"{text}fish"), await world.embed(key, text)]
        tokens = 2 * len(text) + 4
        sent.requests += 2
        sent.items += 3
        sent.succeeded += 3
        sent.tokens += tokens + len(text)
        sent.charged_tokens += tokens + 0.25 * len(text)
        sent.by_header_usd += sum(float(one.headers["x-penstock-cost-usd"]) for one in answers)
        rows += 3
    # The same text three times at once: one is computed, and the others join it, either here or in
    # the worker.
    world.harness.process.gate.clear()
    waiting = [asyncio.create_task(world.embed("a", "together", api=api)) for api in (0, 0, 1)]
    await world.harness.until(lambda: bool(world.harness.process.batches[-1:] == [["together"]]))
    world.harness.process.gate.set()
    answers = await asyncio.gather(*waiting)
    acme.requests += 3
    acme.items += 3
    acme.succeeded += 3
    acme.tokens += 3 * 8
    acme.charged_tokens += 8 + 2 * 0.25 * 8
    acme.by_header_usd += sum(float(one.headers["x-penstock-cost-usd"]) for one in answers)
    rows += 3
    failed = await world.embed("o", "fine", "!")
    assert failed.status_code == 500
    other.requests += 1
    other.items += 2  # none of it was delivered
    other.by_header_usd += float(failed.headers["x-penstock-cost-usd"])
    rows += 2
    world.harness.process.gate.clear()
    gone = asyncio.create_task(world.embed("o", "vanished"))
    await world.harness.until(lambda: world.harness.process.batches[-1] == ["vanished"])
    gone.cancel()
    await asyncio.wait([gone])
    await world.harness.until(lambda: world.harness.process.cancels > 0)
    world.harness.process.gate.set()
    other.requests += 1
    other.items += 1
    rows += 1
    for answer in (await world.embed("l", "one"), await world.embed("l", "two")):
        limited.requests += answer.status_code == 200
        limited.refused += answer.status_code == 429
    limited.items = limited.succeeded = 1
    limited.tokens = 3
    limited.charged_tokens = 3.0
    limited.by_header_usd = 3 * 2.0 / 1e6
    assert (await world.embed("o")).status_code == 400
    other.refused += 1
    return rows + 3


async def test_usage_is_what_was_sent_and_what_the_report_says(world: World) -> None:
    await world.store_rows(await _traffic(world))
    heads, lines = await asyncio.to_thread(run_report, world.settings, "usage", 1)
    report = [dict(zip(heads, line, strict=True)) for line in lines]
    for key, tenant in (("a", "acme"), ("o", "other"), ("l", "limited")):
        sent, own = world.sent[tenant], [line for line in report if line["tenant"] == tenant]
        reply = (await world.get("/v1/usage", key)).json()
        assert reply["tenant"] == tenant
        for span in (reply["today"], reply["month"]):
            total = span["total"]
            for name in ("refused", "items", "succeeded", "tokens"):
                assert total[name] == getattr(sent, name), (tenant, name)
            assert total["requests"] == sent.requests + sent.refused
            assert total["charged_tokens"] == pytest.approx(sent.charged_tokens, rel=1e-12)
            assert total["cost_usd"] == pytest.approx(sent.charged_tokens * 2e-6, rel=1e-12)
            assert total["cost_usd"] == pytest.approx(sent.by_header_usd, rel=1e-12)
        for name in ("requests", "items", "refused", "succeeded"):
            assert total[name] == sum(line[name] for line in own)
        for name in ("charged_tokens", "cost_usd"):
            assert total[name] == pytest.approx(sum(line[name] or 0 for line in own), rel=1e-12), (
                name
            )
        device_s = sum(line["device_s"] or 0 for line in own)
        assert total["device_s"] == pytest.approx(device_s, abs=2e-3)
        assert [model["model"] for model in span["models"]] == [MODEL.name]


async def test_rows_of_the_usage_page_agree_with_the_report_for_an_administrator(
    world: World,
) -> None:
    """The console's Usage page sums and plots the rows of `usage_keys`."""
    await world.store_rows(await _traffic(world))
    heads, lines = await asyncio.to_thread(run_report, world.settings, "usage", 1)
    report = [dict(zip(heads, line, strict=True)) for line in lines]
    for tenant in ("", "acme", "other", "limited"):
        query = {"tenant": tenant} if tenant else {}
        page = (await world.get("/v1/reports/usage_keys", "boss", **query)).json()
        names = [column["name"] for column in page["columns"]]
        rows = [dict(zip(names, row, strict=True)) for row in page["rows"]]
        own = [line for line in report if tenant in ("", line["tenant"])]
        assert {row["tenant"] for row in rows} == {line["tenant"] for line in own}
        for name in ("requests", "refused", "items", "succeeded", "tokens"):
            total = sum(row[name] or 0 for row in rows)
            assert total == sum(line[name] or 0 for line in own), (tenant, name)
        cost_usd = sum(float(row["cost_usd"] or 0) for row in rows)
        assert cost_usd == pytest.approx(sum(line["cost_usd"] or 0 for line in own), rel=1e-12)
    assert sum(line["refused"] for line in report) == 2


async def test_openais_client_reads_its_pages(world: World) -> None:
    await world.store_rows(await _traffic(world))
    start_s = int(time.time()) // DAY_S * DAY_S - 2 * DAY_S
    async with openai.AsyncOpenAI(
        base_url=f"{world.apis[0].url}/v1", api_key=key_for("a"), admin_api_key=key_for("a")
    ) as client:
        organization: Any = client.admin.organization.usage
        used = await organization.embeddings(
            start_time=start_s, group_by=["model", "api_key_id", "project_id"], limit=10
        )
        buckets = used.data
        assert [bucket.start_time for bucket in buckets] == [
            start_s + number * DAY_S for number in range(3)
        ]
        results = buckets[-1].results
        assert {result.project_id for result in results} == {"acme"}
        assert {result.model for result in results} == {MODEL.name}
        assert len({result.api_key_id for result in results}) == 2
        assert sum(result.input_tokens for result in results) == world.sent["acme"].tokens
        assert sum(result.num_model_requests for result in results) == world.sent["acme"].requests
        costs = await organization.costs(start_time=start_s, group_by=["line_item"])
        (line,) = costs.data[-1].results
        assert line.line_item == MODEL.name
        assert line.amount.value == pytest.approx(world.sent["acme"].by_header_usd, rel=1e-12)
        images = await organization.images(start_time=start_s)
        assert [bucket.results for bucket in images.data] == [[], [], []]


async def test_pages_follow_each_other(world: World) -> None:
    await world.store_rows(await _traffic(world))
    start_s = int(time.time()) // DAY_S * DAY_S - 4 * DAY_S
    query = {"start_time": start_s, "limit": 2}
    pages, page = [], None
    while True:
        given: dict[str, Any] = query | ({"page": page} if page else {})
        reply = (await world.get("/v1/organization/costs", **given)).json()
        pages.append(reply)
        page = reply["next_page"]
        if not reply["has_more"]:
            break
    assert [len(reply["data"]) for reply in pages] == [2, 2, 1]
    starts = [bucket["start_time"] for reply in pages for bucket in reply["data"]]
    assert starts == [start_s + number * DAY_S for number in range(5)]
    found = [result for reply in pages for bucket in reply["data"] for result in bucket["results"]]
    assert len(found) == 1
    whole = (await world.get("/v1/organization/costs", start_time=start_s)).json()
    (result,) = whole["data"][-1]["results"]
    assert result["amount"]["value"] == pytest.approx(found[0]["amount"]["value"])


async def test_tenants_see_only_their_own(world: World) -> None:
    await world.store_rows(await _traffic(world))
    start_s = int(time.time()) // DAY_S * DAY_S
    query = {"start_time": start_s, "group_by": "project_id"}
    for given in (
        query,
        query | {"project_ids": "acme"},
        query | {"project_ids[]": ["acme", "other"]},
    ):
        data = (await world.get("/v1/organization/costs", "o", **given)).json()["data"]
        seen = {result["project_id"] for bucket in data for result in bucket["results"]}
        assert seen <= {"other"}
    data = (await world.get("/v1/organization/costs", "boss", **query)).json()["data"]
    seen = {result["project_id"] for bucket in data for result in bucket["results"]}
    assert seen == {"acme", "other", "limited"}
    assert (await world.get("/v1/usage", "narrow")).status_code == 403


async def test_injected_sql_is_only_text(world: World) -> None:
    await world.store_rows(await _traffic(world))
    start_s = int(time.time()) // DAY_S * DAY_S
    for name in ("' OR 1=1 --", "x'); DROP TABLE rows; --", "`", "\\"):
        reply = await world.get(
            "/v1/organization/costs", "a", start_time=start_s, line_items=name, api_key_ids=name
        )
        assert reply.status_code == 200
        assert [bucket["results"] for bucket in reply.json()["data"]] == [[]]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({}, "start_time"),
        ({"start_time": "soon"}, "start_time"),
        ({"start_time": "1"}, "start_time"),
        ({"bucket_width": "2d"}, "bucket_width"),
        ({"group_by": "user_id"}, "group_by"),
        ({"limit": "0"}, "limit"),
        ({"limit": "32"}, "limit"),
        ({"page": "page_1"}, "page"),
        ({"page": "elsewhere"}, "page"),
        ({"end_time": "2026-01-01"}, "end_time"),
        ({"models": ["m"] * 101}, "models"),
    ],
)
async def test_wrong_questions_are_named(world: World, query: dict[str, Any], field: str) -> None:
    if query and "start_time" not in query:
        query = {"start_time": int(time.time()) - DAY_S} | query
    answer = await world.get("/v1/organization/usage/embeddings", **query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_range_of_days_is_summed(world: World) -> None:
    await world.store_rows(await _traffic(world))
    start_s = int(time.time()) - 3600
    reply = (await world.get("/v1/usage", **{"from": str(start_s)})).json()
    assert reply["range"]["total"] == pytest.approx(reply["today"]["total"])
    before = (await world.get("/v1/usage", **{"from": "2026-01-01", "to": "2026-01-02"})).json()
    assert before["range"]["total"]["items"] == 0
    assert (await world.get("/v1/usage", to="2026-01-02")).json()["error"]["param"] == "from"


async def test_bigquery_away_is_told(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, bigquery_endpoint="http://127.0.0.1:1")
    async with running_api(settings) as api:
        answer = await api.http.get("/v1/usage")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_question_that_reads_too_much_is_refused(
    redis_url: str, tmp_path: Path, bigquery_endpoint: str
) -> None:
    async with opened_world(redis_url, tmp_path, bigquery_endpoint) as world:
        await world.store_rows(await _traffic(world))
        usage = world.apis[0].dependencies.usage
        usage._rows._most_bytes = 1
        answer = await world.get("/v1/usage")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == (
            "the query reads too many bytes; use a shorter range"
        )
