"""Prices: each has a source and a date, steps and free amounts count once, what is missing is said
and not made up.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.planning.deploy.costs import totals, without_price
from infra.planning.deploy.platform_variables import Platform
from infra.planning.deploy.prices import ListPrice, Prices, Source, Step, read_prices
from shared.errors import ConfigurationError
from tests.infra.deploy.planning import entry, plan_of, rate

EGRESS = ListPrice(
    unit="GiB",
    source="s",
    free=10,
    usd={"here": (Step(up_to=100, usd=0.5), Step(up_to=200, usd=0.2), Step(usd=0.1))},
)
SOURCE = Source(url="https://example.com/prices", seen=datetime.date(2026, 1, 1))


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
    asked = rate(10, peak_per_s=1000, input_bytes=100)
    platform = Platform.model_validate({"inboxes": {"per_region": 8, "slots": 4}})
    plan = plan_of(entry(), rates={"texts": asked}, prices=prices, platform=platform)
    costs = {cost.item: cost for cost in plan.costs}
    gpus = costs["GPU nodes l4-x1, spot"]
    assert (gpus.mean_usd, gpus.peak_usd) == (0.5 * 730, 15 * 0.5 * 730)
    # A job is small, and billed as 1,000 bytes: published, delivered to workers and to the priority
    # `batch`.
    jobs = 10 * 730 * 3600 * 3 * 1000 / 2**40
    assert costs["Pub/Sub, jobs: 1 publish, 2 deliveries"].mean == pytest.approx(jobs)
    replies = costs["Pub/Sub, direct replies: 1 publish, 1 delivery"].mean
    assert replies is not None
    # 384 floats in base64 are 2,048 bytes; receipt and attributes some 500.
    assert replies / jobs == pytest.approx(2 / 3 * 2.5, rel=0.1)
    assert costs["Pub/Sub, replies to slots: 1 publish, 4 deliveries"].mean_usd == 0
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
        "Pub/Sub, jobs: 1 publish, 2 deliveries": "give input_bytes of texts",
        "answers to the internet": "give output_bytes of texts",
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
    costs = {cost.item: cost for cost in plan.costs}
    assert costs["GKE, cluster"].mean_usd == pytest.approx(0.05 * 730)
    assert costs["Memorystore of the cache"].mean_usd == pytest.approx(2 * 0.2 * 730)
    assert plan.sources[f"{own}: contract"].seen == datetime.date(2026, 2, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "sources: {}\nprices: {a: {unit: h, source: none, usd: {any: 1}}}",
            "prices.a.source: 'none' is not among",
        ),
        (
            "sources: {s: {url: ftp, seen: 2026-01-01}}\nprices: {}",
            "sources.s.url: String should match",
        ),
        ("sources: {s: {url: 'https://a.b'}}\nprices: {}", "sources.s.seen: Field required"),
        (
            "sources: {s: {url: 'https://a.b', seen: 2026-01-01}}\n"
            "prices: {a: {unit: h, source: s, usd: {any: [{up_to: 5, usd: 1}]}}}",
            "prices.a: steps go up, and only the last has no up_to",
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
