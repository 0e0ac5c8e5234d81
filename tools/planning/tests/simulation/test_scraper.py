"""Tests query results as workers start and stop."""

from __future__ import annotations

import pytest

from penstock_planning.deploy.prices import read_prices
from penstock_planning.simulation.promql import PromQuery
from penstock_planning.simulation.rules import read_deployed_rules
from penstock_planning.simulation.world import World
from tools.planning.tests.simulation.worlds import scenario

SEEN = PromQuery("count(penstock_worker_busy_ratio{lane='interactive'})")


def seen(at_s: float, **fields: object) -> object:
    """Returns how many workers the queries count after the autoscaler removed one of two."""
    one_model = scenario(
        entry={"replicas": {"min": 1, "max": 1}},
        load={"start_replicas": 2, "arrivals": [{"kind": "constant", "per_s": 0}]},
        metrics=fields,
    )
    catalog, rules = read_deployed_rules(one_model)
    world = World(one_model, catalog, rules, read_prices())
    world.env.run(until=at_s)
    return SEEN.value(world.series, at_s)


def test_workers_are_seen_after_a_scrape_and_its_age() -> None:
    assert seen(4.0) == {}
    assert seen(6.0) == {(): 2.0}


@pytest.mark.parametrize(("has_stale_markers", "count"), [(True, 1.0), (False, 2.0)])
def test_without_markers_a_worker_that_is_gone_is_seen_on(
    has_stale_markers: bool, count: float
) -> None:
    # The HPA removes one in its first loop, within 15 s.
    assert seen(120.0, has_stale_markers=has_stale_markers) == {(): count}
    assert seen(400.0, has_stale_markers=has_stale_markers) == {(): 1.0}
