"""Failures in a scenario, and the actions of its operators.

Requests arrive at streams of times, computed a minute at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import simpy
from numpy.typing import NDArray

from infra.load.trace import read_times
from infra.planning.simulation.keda import Autoscaler
from infra.planning.simulation.parts import Parts
from infra.planning.simulation.scenario import (
    Event,
    MetricsOutage,
    RegionLoss,
    RolloutEvent,
    SetReplicas,
    SpotLoss,
    StockOut,
)
from infra.planning.simulation.scraper import Scraper
from infra.planning.simulation.streams import Arrivals, Burst, Constant, StepArrivals, Trace, Wave
from infra.planning.simulation.worker import Steps

CHUNK_S = 10.0
"""Seconds in which a wave's rate counts as constant. Steps and bursts are cut exactly."""

Times = NDArray[np.float64]


def arrival_times(
    stream: Arrivals, duration_s: float, generator: np.random.Generator
) -> Iterator[Times]:
    """The times of a stream in order, in chunks.

    Args:
        stream: the arrivals.
        duration_s: duration of the scenario.
        generator: the source of chance.

    Raises:
        ConfigurationError: a trace can't be read.
    """
    until_s = duration_s if stream.until_s is None else min(duration_s, stream.until_s)
    if isinstance(stream, Trace):
        times = np.asarray(read_times(stream.file), dtype=np.float64) + stream.from_s
        yield times[(times >= stream.from_s) & (times < until_s)]
        return
    rate, edges_s = _rate_of(stream)
    left = 0.0
    for start_s, end_s in _chunks(stream.from_s, until_s, edges_s):
        expected = rate((start_s + end_s) / 2) * (end_s - start_s)
        if stream.spacing == "poisson":
            count = generator.poisson(expected)
            yield np.sort(generator.uniform(start_s, end_s, count))
        elif expected > 0:
            # The k-th request comes when the sum of the rate passes k.
            first = math.floor(left) + 1
            due = np.arange(first, math.floor(left + expected) + 1, dtype=np.float64)
            yield start_s + (due - left) / expected * (end_s - start_s)
            left += expected


def _rate_of(
    stream: Constant | Wave | StepArrivals | Burst,
) -> tuple[Callable[[float], float], tuple[float, ...]]:
    """The rate at a time, and the times at which it jumps."""
    if isinstance(stream, Constant):
        per_s = stream.per_s
        return lambda at_s: per_s, ()
    if isinstance(stream, StepArrivals):
        step = stream
        return lambda at_s: step.before_per_s if at_s < step.at_s else step.after_per_s, (
            step.at_s,
        )
    if isinstance(stream, Burst):
        burst, end_s = stream, stream.at_s + stream.for_s
        return lambda at_s: burst.burst_per_s if burst.at_s <= at_s < end_s else burst.base_per_s, (
            burst.at_s,
            end_s,
        )
    middle = (stream.most_per_s + stream.least_per_s) / 2
    swing, period_s = (stream.most_per_s - stream.least_per_s) / 2, stream.period_s
    return lambda at_s: middle - swing * math.cos(2 * math.pi * at_s / period_s), ()


def _chunks(
    from_s: float, until_s: float, edges_s: tuple[float, ...]
) -> Iterator[tuple[float, float]]:
    start_s = from_s
    while start_s < until_s:
        end_s = min(start_s + CHUNK_S, until_s)
        end_s = min([end_s, *(edge_s for edge_s in edges_s if edge_s > start_s)])
        yield start_s, end_s
        start_s = end_s


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
