"""Prices have sources and dates, price steps and free tiers apply once, and gaps are reported."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.row_archive.archive import RowArchive
from infra.row_archive.parquet import parquet_of_lines
from penstock_planning.deploy import costs, volumes
from penstock_planning.deploy.costs import totals, without_price
from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import ListPrice, Prices, Source, Step, read_prices
from shared.errors import ConfigurationError
from shared.stores.objects import ObjectWriter, StoredObject
from tests.infra.row_archive.stores import FragileStore, TableOfRows, put, row
from tools.planning.tests.deploy.planning import entry, plan_of, rate

EGRESS = ListPrice(
    unit="GiB",
    source="s",
    free=10,
    usd={"here": (Step(up_to=100, usd=0.5), Step(up_to=200, usd=0.2), Step(usd=0.1))},
)
SOURCE = Source(url="https://example.com/prices", seen=datetime.date(2026, 1, 1))


@pytest.mark.parametrize(("tokens", "jobs"), [(None, 4), (20, 1), (64, 2), (200, 4)])
def test_short_texts_of_a_request_share_jobs(tokens: float | None, jobs: int) -> None:
    model = entry(batch={"max_tokens": 2048, "max_items": 64})
    load = rate(1, items_per_request=64, tokens_per_item=tokens)
    assert volumes.volume(model, load).jobs == pytest.approx(jobs * volumes.SECONDS)


def test_every_price_of_the_tree_has_a_dated_source() -> None:
    prices = read_prices()
    today = datetime.date.today()
    for price in prices.prices.values():
        source = prices.sources[price.source]
        assert source.seen <= today
        assert source.dated is None or source.dated <= source.seen
    assert {price.source for price in prices.prices.values()} == set(prices.sources)


def test_steps_and_what_is_free_are_counted() -> None:
    assert EGRESS.cost_usd("here", 10) == 0
    assert EGRESS.cost_usd("here", 310) == pytest.approx(100 * 0.5 + 100 * 0.2 + 100 * 0.1)
    assert EGRESS.cost_usd("there", 1) is None


@settings(deadline=None)
@given(st.floats(0, 1000), st.floats(0, 1000))
def test_two_amounts_cost_what_they_cost_together(one: float, other: float) -> None:
    parts = [EGRESS.cost_usd("here", one), EGRESS.cost_usd("here", other, before=one)]
    assert sum(part for part in parts if part) == pytest.approx(
        EGRESS.cost_usd("here", one + other), abs=1e-6
    )


def test_a_month_adds_up() -> None:
    prices = Prices(
        sources={"s": SOURCE},
        prices={
            "machine/g2-standard-8/spot": ListPrice(
                unit="hour", source="s", usd={"europe-west4": 0.5}
            ),
            "pubsub/throughput": ListPrice(unit="TiB", source="s", usd={"any": 40}),
        },
    )
    demand = rate(10, peak_per_s=1000, input_bytes=100)
    platform = Platform.model_validate({"inboxes": {"per_region": 8, "slots": 4}})
    plan = plan_of(entry(), rates={"texts": demand}, prices=prices, platform=platform)
    priced = {cost.item: cost for cost in plan.costs}
    gpus = priced["GPU nodes l4-x1, spot"]
    assert (gpus.mean_usd, gpus.peak_usd) == (0.5 * 730, 15 * 0.5 * 730)
    # A job is small enough to be billed as 1,000 bytes: it is published once, and delivered to the
    # workers' subscription and to the one for `batch` priority.
    jobs = 10 * 730 * 3600 * 3 * 1000 / 2**40
    assert priced["Pub/Sub, jobs: 1 publish, 2 deliveries"].mean == pytest.approx(jobs)
    replies = priced["Pub/Sub, direct replies: 1 publish, 1 delivery"].mean
    assert replies is not None
    # 384 floats take 2,048 bytes in base64; the receipt and attributes take about 500.
    assert replies / jobs == pytest.approx(2 / 3 * 2.5, rel=0.1)
    assert priced["Pub/Sub, replies to slots: 1 publish, 4 deliveries"].mean_usd == 0
    assert totals(plan.costs)[0] == pytest.approx(sum(cost.mean_usd or 0 for cost in plan.costs))
    assert list(plan.sources) == ["s"]


def test_what_has_no_price_is_in_no_total() -> None:
    plan = plan_of(entry(), rates={"texts": rate()})
    assert totals(plan.costs) == (0, 0)
    assert "memorystore/STANDARD_SMALL" in {cost.price_key for cost in without_price(plan.costs)}
    assert plan.on_demand_usd is None


def test_what_is_not_known_of_an_item_is_asked_for() -> None:
    plan = plan_of(entry(), rates={"texts": rate()}, prices=read_prices())
    lacking = {cost.item: cost.lacks for cost in plan.costs if cost.lacks}
    assert lacking == {
        "Pub/Sub, jobs: 1 publish, 2 deliveries": "set input_bytes of texts",
        "responses to the internet": "set output_bytes of texts",
    }


def test_own_prices_replace_and_add(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "sources: {contract: {url: 'https://example.com', seen: 2026-02-03}}\n"
        "prices:\n"
        "  gke/cluster: {unit: hour, source: contract, usd: {any: 0.05}}\n"
        "  memorystore/STANDARD_SMALL: {unit: node-hour, source: contract,"
        " usd: {europe-west4: 0.2}}\n"
    )
    prices = read_prices(own)
    plan = plan_of(entry(), rates={"texts": rate()}, prices=prices)
    priced = {cost.item: cost for cost in plan.costs}
    assert priced["GKE, cluster"].mean_usd == pytest.approx(0.05 * 730)
    assert priced["Memorystore of the cache"].mean_usd == pytest.approx(2 * 0.2 * 730)
    assert plan.sources[f"{own}: contract"].seen == datetime.date(2026, 2, 3)


@pytest.mark.parametrize(
    "node_type", ["SHARED_CORE_NANO", "STANDARD_SMALL", "HIGHMEM_MEDIUM", "HIGHMEM_XLARGE"]
)
def test_every_redis_that_terraform_takes_has_a_price(node_type: str) -> None:
    platform = Platform.model_validate(
        {"cache": {"node_type": node_type}, "records": {"apart": True, "node_type": node_type}}
    )
    plan = plan_of(entry(), rates={"texts": rate()}, prices=read_prices(), platform=platform)
    rows = [cost for cost in plan.costs if cost.price_key == f"memorystore/{node_type}"]
    assert [row.item for row in rows] == ["Memorystore of the cache", "Memorystore of the records"]
    assert all(row.mean_usd for row in rows)
    assert {row.source for row in rows} == {"memorystore"}


def test_rows_by_way_of_the_archive_are_loaded_and_not_inserted() -> None:
    demand = {"texts": rate(10, peak_per_s=1000, items_per_request=3)}
    by_archive = plan_of(entry(), rates=demand, prices=read_prices())
    priced = {cost.item: cost for cost in by_archive.costs}
    assert "BigQuery, rows inserted" not in priced
    assert priced["BigQuery, load jobs"].mean_usd == 0
    assert priced["row archive on Cloud Run, CPU"].mean_usd == pytest.approx(
        1.5 * 730 * 3600 * 0.000018
    )
    written = priced["row archive, objects written and listed"]
    passes, month_s = 3 * 730 * 3600 / 120, 730 * 3600
    # One API instance and one worker each write an object every ten seconds, or one per 500 rows.
    puts = 2 * month_s / 10 + 30 * month_s / 500
    listed = passes + 403 * 3 * 730 / 24
    assert written.mean == pytest.approx((puts + listed + 3 * passes) / 1000)
    assert written.mean_usd == pytest.approx((written.mean or 0) * 0.01)
    assert (written.peak or 0) > (written.mean or 0)
    direct = Platform.model_validate({"rows": {"archive": False}})
    straight = plan_of(entry(), rates=demand, prices=read_prices(), platform=direct)
    items = {cost.item for cost in straight.costs}
    assert not any(item.startswith("row archive") for item in items)
    assert "BigQuery, rows inserted" in items


class CountingStore(FragileStore):
    """Counts the operations that Google bills: writes and listings, and reads. Deleting is free."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    async def put(self, key: str, data: bytes, media_type: str) -> None:
        self.calls["write"] += 1
        await super().put(key, data, media_type)

    async def create(self, key: str, data: bytes, media_type: str) -> bool:
        self.calls["write"] += 1
        return await super().create(key, data, media_type)

    def writer(self, key: str, media_type: str) -> ObjectWriter:
        self.calls["write"] += 1
        return super().writer(key, media_type)

    async def get(self, key: str, max_bytes: int) -> bytes:
        self.calls["read"] += 1
        return await super().get(key, max_bytes)

    async def listing(self, folder: str, limit: int, after: str = "") -> list[StoredObject]:
        self.calls["list"] += 1
        return await super().listing(folder, limit, after)


async def test_a_pass_of_the_archive_takes_as_many_calls_as_are_priced() -> None:
    store = CountingStore()
    for number in range(5):
        await put(store, [row(number)], f"{number}")
    store.calls.clear()
    await RowArchive(store, "rows", TableOfRows()).run_once()
    assert (store.calls["list"], store.calls["write"]) == (1, costs.PASS_WRITES)
    # The file is read when its day is merged, and the cost of that read is included in its pass.
    assert store.calls["read"] == 5 + costs.PASS_READS - 1


def test_a_row_is_no_larger_in_the_archive_than_is_priced(tmp_path: Path) -> None:
    chance = random.Random(1)
    lines = tmp_path / "rows.jsonl"
    rows = [volumes.sample_row(entry(), chance) for _ in range(20_000)]
    lines.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    size = parquet_of_lines("rows", lines, tmp_path).whole.stat().st_size / len(rows)
    priced = volumes.measure_packed_row_bytes(entry())
    assert 0.3 * priced < size <= priced


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "sources: {}\nprices: {a: {unit: h, source: none, usd: {any: 1}}}",
            "prices.a.source: 'none' is not listed in",
        ),
        (
            "sources: {s: {url: ftp, seen: 2026-01-01}}\nprices: {}",
            "sources.s.url: String should match",
        ),
        ("sources: {s: {url: 'https://a.b'}}\nprices: {}", "sources.s.seen: Field required"),
        (
            "sources: {s: {url: 'https://a.b', seen: 2026-01-01}}\n"
            "prices: {a: {unit: h, source: s, usd: {any: [{up_to: 5, usd: 1}]}}}",
            "prices.a: steps must increase, and only the last one may omit up_to",
        ),
        ("prices: [", "while parsing"),
    ],
)
def test_wrong_prices_are_refused_with_field_and_reason(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read_prices(file)
    assert refused.value.message.startswith(str(file))
    assert said in refused.value.message
