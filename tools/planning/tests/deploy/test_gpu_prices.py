"""The GPU price view always matches the price lists."""

import datetime as dt

import pytest
from pydantic import ValidationError

from infra import bigquery
from infra.kubernetes.deployment import read_gpu_types
from penstock_planning.deploy.gpu_prices import ALWAYS, VIEW_FILE, GpuPrice, gpu_prices, view_sql
from penstock_planning.deploy.prices import EarlierPrice, ListPrice, Prices, Source, read_prices
from tests.bigquery_client import connected, rows_of

DAY = dt.date(2026, 11, 15)
MONTH = dt.date(2026, 10, 1)
CHANGED = Prices(
    sources={"s": Source(url="https://example.com", seen=DAY)},
    prices={
        "machine/g2-standard-8/spot": ListPrice(
            unit="hour",
            source="s",
            usd={"here": 0.5},
            since=DAY,
            earlier=(EarlierPrice(since=MONTH, usd={"here": 0.4, "there": 0.3}),),
        )
    },
)


def test_the_view_in_the_tree_is_up_to_date() -> None:
    assert VIEW_FILE.read_text() == view_sql(read_prices(), read_gpu_types())


def test_a_price_that_changed_is_known_on_both_sides() -> None:
    assert list(gpu_prices(CHANGED, read_gpu_types())) == [
        GpuPrice("l4", True, "here", 0.4, ALWAYS, False),
        GpuPrice("l4", True, "there", 0.3, ALWAYS, False),
        GpuPrice("l4", True, "here", 0.5, DAY, False),
    ]


@pytest.mark.parametrize("since", [None, MONTH, dt.date(2026, 9, 1)])
def test_prices_without_an_order_are_refused(since: dt.date | None) -> None:
    earlier = (EarlierPrice(since=MONTH, usd={"here": 0.4}),)
    with pytest.raises(ValidationError, match="dates must increase"):
        ListPrice(unit="hour", source="s", usd={"here": 0.5}, since=since, earlier=earlier)


def test_bigquery_reads_the_view(bigquery_endpoint: str) -> None:
    with connected(bigquery_endpoint, "gpu-prices") as client:
        bigquery.create(client, "penstock")
        rows = rows_of(client, "SELECT * FROM penstock.gpu_prices WHERE gpu_type = 'l4'")
    wanted = [
        price for price in gpu_prices(read_prices(), read_gpu_types()) if price.gpu_type == "l4"
    ]
    assert {(*row[:4], row[4].date(), row[5]) for row in rows} == {tuple(price) for price in wanted}
