"""GET /v1/reports: the reports that each key can see, and the rows in them."""

import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from google.cloud import bigquery

from shared.reports.definitions import ask, find_report, reports
from shared.reports.parquet import report_parquet
from shared.reports.runner import ReportColumn, ReportResult, ReportRunner
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


def read_parquet(file: bytes, folder: Path) -> tuple[dict[str, str], list[tuple[Any, ...]]]:
    """Returns the column types and the rows."""
    path = folder / "report.parquet"
    path.write_bytes(file)
    relation = duckdb.sql(f"FROM read_parquet('{path}')")
    types = dict(zip(relation.columns, map(str, relation.types), strict=True))
    # As text, because returning a time would require pytz.
    times = [name for name, kind in types.items() if kind == "TIMESTAMP WITH TIME ZONE"]
    chosen = ", ".join(f"epoch_us({name}) AS {name}" for name in times)
    return types, relation.project(f"* REPLACE ({chosen})" if times else "*").fetchall()


async def test_parquet_has_the_rows_and_types_of_each_report(world: World, tmp_path: Path) -> None:
    await traffic(world)
    kinds = {"STRING": "VARCHAR", "INTEGER": "BIGINT", "FLOAT": "DOUBLE", "DATE": "DATE"}
    query = {"from": datetime.now(UTC).date().isoformat()}
    for name in reports():
        reply = (await world.get(f"/v1/reports/{name}", "boss", **query)).json()
        response = await world.get(f"/v1/reports/{name}", "boss", format="parquet", **query)
        assert response.headers["content-type"] == "application/vnd.apache.parquet"
        assert response.headers["content-disposition"] == f'attachment; filename="{name}.parquet"'
        types, rows = read_parquet(response.content, tmp_path)
        assert list(types) == [column["name"] for column in reply["columns"]]
        for column in reply["columns"]:
            assert types[column["name"]] == kinds.get(column["type"], types[column["name"]])
        assert len(rows) == len(reply["rows"])
        if name == "usage_keys":
            assert rows, "the report has rows"
            cost_at = list(types).index("cost_usd")
            assert [row[cost_at] for row in rows] == [row[cost_at] for row in reply["rows"]]


def test_parquet_keeps_each_type_exactly(tmp_path: Path) -> None:
    at = datetime(2026, 11, 1, 12, 30, 0, 123456, UTC)
    values = {
        "STRING": 'say "so"',
        "INTEGER": 2**53 + 1,
        "FLOAT": 0.1 + 0.2,
        "BOOLEAN": True,
        "DATE": at.date(),
        "DATETIME": at.replace(tzinfo=None),
        "TIMESTAMP": at,
        "NUMERIC": Decimal("12345678901.000000001"),
    }
    columns = [ReportColumn(kind.lower(), kind) for kind in values]
    rows = [tuple(values.values()), tuple(None for _ in values)]
    result = ReportResult(find_report("usage"), ask("2026-11-01", ""), columns, rows, 0)
    types, read = read_parquet(report_parquet(result), tmp_path)
    wanted = {**values, "TIMESTAMP": int(at.timestamp()) * 1_000_000 + at.microsecond}
    assert list(types) == [column.name for column in columns]
    assert read == [tuple(wanted.values()), rows[1]]
    empty = report_parquet(result._replace(rows=[]))
    assert read_parquet(empty, tmp_path) == (types, [])


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
        ({"format": "xlsx"}, "format"),
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
