"""GET /v1/reports: the reports that each key can see, and the rows in them."""

import time
from typing import Any

import pytest
from google.cloud import bigquery

from shared.reports.definitions import ask, find_report, reports
from shared.reports.runner import ReportRunner
from tests.api.usage.world import World

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
FOR_TENANTS = {name for name, one in reports().items() if one.audience == "tenants"}


def lines(reply: dict[str, Any]) -> list[dict[str, Any]]:
    heads = [column["name"] for column in reply["columns"]]
    return [dict(zip(heads, row, strict=True)) for row in reply["rows"]]


async def traffic(world: World) -> None:
    for key, texts in (("a", ("one", "two", "two")), ("o", ("three",))):
        assert (await world.embed(key, *texts)).status_code == 200
    await world.store_rows(4)


async def test_a_key_lists_the_reports_that_it_may_read(world: World) -> None:
    listed = {
        key: {one["name"] for one in (await world.get("/v1/reports", key)).json()["data"]}
        for key in ("a", "boss")
    }
    assert listed == {"a": FOR_TENANTS, "boss": reports().keys()}
    assert (await world.get("/v1/reports", "narrow")).status_code == 403


async def test_a_key_sees_its_own_tenant_and_an_admin_all(world: World) -> None:
    await traffic(world)
    own = (await world.get("/v1/reports/usage_keys")).json()
    assert {line["tenant"] for line in lines(own)} == {"acme"}
    assert sum(line["items"] for line in lines(own)) == 3
    assert [plot["title"] for plot in own["plots"]] == ["Cost by day"]
    everybody = (await world.get("/v1/reports/usage_keys", "boss")).json()
    assert {line["tenant"] for line in lines(everybody)} == {"acme", "other"}
    one = (await world.get("/v1/reports/usage_keys", "boss", tenant="other")).json()
    assert {line["tenant"] for line in lines(one)} == {"other"}
    assert [column["name"] for column in one["columns"]] == list(find_report("usage_keys").columns)


@pytest.mark.parametrize("name", sorted(reports()))
async def test_no_report_shows_a_tenant_another_ones_rows(world: World, name: str) -> None:
    await traffic(world)
    response = await world.get(f"/v1/reports/{name}", "o")
    if name not in FOR_TENANTS:
        assert response.status_code == 404
        return
    assert response.status_code == 200
    assert "acme" not in response.text
    assert (await world.get(f"/v1/reports/{name}", "boss")).status_code == 200


async def test_the_api_says_what_the_command_says(world: World) -> None:
    await traffic(world)
    day_s = time.time() - 86_400
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(day_s))
    reply = (await world.get("/v1/reports/invoice", "boss", **{"from": since})).json()
    client: bigquery.Client = world.client
    runner = ReportRunner(client, world.settings.dataset)
    wanted = runner.run(find_report("invoice"), ask(since, "")).records()
    assert [line["amount_usd"] for line in lines(reply)] == pytest.approx(
        [line["amount_usd"] for line in wanted], rel=1e-12
    )


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"from": "yesterday"}, "from"),
        ({"from": "2026-10-02", "to": "2026-10-01"}, "from"),
        ({"to": "0001-01-01"}, "to"),
        ({"from": "1970-01-01", "to": "9998-12-31"}, "from"),
        ({"from": "2024-01-01", "to": "2025-02-05"}, "from"),
        ({"tz": "../etc"}, "tz"),
        ({"tz": "posix/UTC"}, "tz"),
        ({"tz": "localtime"}, "tz"),
        ({"tz": "Factory"}, "tz"),
        ({"tenant": "other"}, "tenant"),
        ({"model": "x" * 300}, "model"),
    ],
)
async def test_wrong_questions_are_refused_by_name(
    world: World, query: dict[str, str], field: str
) -> None:
    response = await world.get("/v1/reports/usage", **query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_unknown_reports_and_those_of_others_are_not_there(world: World) -> None:
    for name in ("weather", "margin"):
        response = await world.get(f"/v1/reports/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"report {name!r} does not exist"
