"""What goes wrong in a scenario, and what operators do in it."""

from __future__ import annotations

import simpy

from infra.simulation.keda import Autoscaler
from infra.simulation.parts import Parts
from infra.simulation.scenario import (
    Event,
    MetricsOutage,
    RegionLoss,
    RolloutEvent,
    SetReplicas,
    SpotLoss,
    StockOut,
)
from infra.simulation.scraper import Scraper
from infra.simulation.worker import Steps


def happen(env: simpy.Environment, event: Event, parts: Parts, scraper: Scraper) -> Steps:
    """The process of one event."""
    yield env.timeout(event.at_s)
    if isinstance(event, SpotLoss):
        for (_, region), fleet in parts.fleets.items():
            if event.region in (None, region):
                fleet.lose(event.share)
    elif isinstance(event, RolloutEvent):
        for (model, _), replicas in parts.replicas.items():
            if model == event.model:
                replicas.roll_out()
    elif isinstance(event, SetReplicas):
        _set_replicas(event, parts)
    elif isinstance(event, StockOut):
        yield from _stock_out(env, event, parts)
    elif isinstance(event, MetricsOutage):
        yield from _metrics_outage(env, event, parts, scraper)
    else:
        yield from _region_loss(env, event, parts)


def _set_replicas(event: SetReplicas, parts: Parts) -> None:
    for place, replicas in parts.replicas.items():
        if place[0] == event.model:
            old = parts.autoscalers[place]
            bounds = {"minReplicaCount": event.count, "maxReplicaCount": event.count}
            rules = old.rules.model_copy(update=bounds)
            parts.autoscalers[place] = Autoscaler(rules, old.series)
            if event.is_kill:
                replicas.kill_down_to(event.count)
            replicas.set(event.count)


def _stock_out(env: simpy.Environment, event: StockOut, parts: Parts) -> Steps:
    out = [
        fleet
        for (pool, region), fleet in parts.fleets.items()
        if event.region in (None, region) and event.gpu in (None, pool.rpartition("-x")[0])
    ]
    for fleet in out:
        fleet.is_out_of_stock = True
    yield env.timeout(event.for_s)
    for fleet in out:
        fleet.is_out_of_stock = False


def _metrics_outage(
    env: simpy.Environment, event: MetricsOutage, parts: Parts, scraper: Scraper
) -> Steps:
    if event.what == "endpoint":
        _set_endpoint(parts, is_up=False)
        yield env.timeout(event.for_s)
        _set_endpoint(parts, is_up=True)
        return
    scraper.away.append(event.metrics)
    yield env.timeout(event.for_s)
    scraper.away.remove(event.metrics)


def _set_endpoint(parts: Parts, *, is_up: bool) -> None:
    for autoscaler in parts.autoscalers.values():
        autoscaler.is_endpoint_up = is_up


def _region_loss(env: simpy.Environment, event: RegionLoss, parts: Parts) -> Steps:
    places = [place for place in parts.sites if place[1] == event.region]
    fleets = [fleet for place, fleet in parts.fleets.items() if place[1] == event.region]
    for place in places:
        parts.sites[place].is_lost = True
        parts.services[place[0]].lose_requests(parts.sites[place])
    for fleet in fleets:
        fleet.lose_all()
    for place in places:
        parts.replicas[place].lose_all()
    yield env.timeout(event.for_s)
    for fleet in fleets:
        fleet.is_lost = False
    for place in places:
        parts.sites[place].is_lost = False
        old = parts.autoscalers[place]
        parts.autoscalers[place] = Autoscaler(old.rules, old.series)
        parts.replicas[place].set(old.rules.minReplicaCount)
