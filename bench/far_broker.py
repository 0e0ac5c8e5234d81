"""The fraction of time that a model is busy, depending on the distance to the broker.

A worker and its callers are behind a proxy (bench/far_worker.py). "As before" means a worker that
holds two batches at any distance.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.distant_link import PUBSUB_SIGMA
from bench.far_worker import (
    FULL,
    Broker,
    FarLoad,
    Killed,
    Link,
    Seen,
    far_site,
    kill_with_full_hand,
    measure,
)
from bench.report import Figure, Outcome
from bench.timed_worker import JOB_ITEMS, BrokerSite, servers
from infra.local.stack_processes import RabbitServer

DELAYS_MS = (0, 5, 10, 25, 50, 100)
QUICK_DELAYS_MS = (0, 25)
LEAD_S, SECONDS = 5.0, 8.0
KEPT = {5: 0.95, 10: 0.95, 25: 0.95, 50: 0.9, 100: 0.85}
"""Minimum rate as a fraction of the zero-delay rate, by delay in ms (50 ms per batch)."""
MIN_SLOW, MIN_FAST = 0.99, 0.9
FAST_DELAY_MS = 25
TWO_BATCHES = 2 * FULL
USUAL = FarLoad("50 ms a batch, 1 item", 0.05, 1, 1000)
FAST = FarLoad("5 ms a batch, 16 items", 0.005, JOB_ITEMS, 1000)
LOADS = (USUAL, FarLoad("500 ms a batch, 1 item", 0.5, 1, 300), FAST)
"""More jobs than a worker holds plus those in transit at the greatest distance."""
QUICK_LOADS = (USUAL, FAST)
ROUGH = {
    "log-normal delays": Link(25, PUBSUB_SIGMA),
    "connections cut every 3 s": Link(25, cut_every_s=3.0),
}
DEATH_DELAY_MS = 25
KILL_LIMIT_S = 120.0
WORK_REPEATED_S = 1.0


def run(*, quick: bool = False) -> Outcome:
    """Measures both brokers in about 20 minutes, or a subset in 6 minutes with `quick`."""
    figures, details = list[Figure](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        endpoint, redis_url = stack.enter_context(servers(folder))
        rabbit = stack.enter_context(RabbitServer(folder / "rabbitmq", folder))
        addresses: dict[Broker, str] = {"pubsub": endpoint, "rabbitmq": rabbit.url}
        for broker, address in addresses.items():
            site = partial(far_site, broker, address, redis_url, folder=folder)
            bench = _Broker(broker, site, details)
            for load in QUICK_LOADS if quick else LOADS:
                figures += bench.at_distances(load, QUICK_DELAYS_MS if quick else DELAYS_MS)
            figures += bench.on_rough_links()
            figures += bench.with_a_death()
    return Outcome(figures, details | {"load_after": round(os.getloadavg()[0], 2)})


OpenSite = Callable[[Link], AbstractContextManager[BrokerSite]]
"""Opens a broker at the other end of a link."""


class _Broker:
    """The measurements for one broker."""

    def __init__(self, name: Broker, site: OpenSite, details: dict[str, Any]) -> None:
        self._name = name
        self._site = site
        self._details = details

    def at_distances(self, load: FarLoad, delays_ms: Sequence[int]) -> Iterator[Figure]:
        near_items_per_s = 0.0
        for delay_ms in delays_ms:
            where = f"{self._name}, {load.name}, {delay_ms} ms"
            with self._site(Link(delay_ms)) as site:
                seen = self._seen(where, site, load)
                if load is USUAL and self._name == "pubsub":
                    before = self._seen(f"{where}, as before", site, load, hand=TWO_BATCHES)
                    yield Figure(f"{where}: rate as before", before.items_per_s, "items/s")
            yield Figure(f"{where}: rate", seen.items_per_s, "items/s")
            yield Figure(f"{where}: model busy", 100 * seen.busy, "%")
            near_items_per_s = near_items_per_s or seen.items_per_s
            if delay_ms:
                ratio = seen.items_per_s / near_items_per_s
                yield _bounded(Figure(f"{where}: of no delay", ratio, ""), _least(load, delay_ms))

    def on_rough_links(self) -> Iterator[Figure]:
        for name, link in ROUGH.items():
            where = f"{self._name}, {USUAL.name}, {link.delay_ms:g} ms, {name}"
            with self._site(link) as site:
                seen = self._seen(where, site, USUAL)
            yield Figure(f"{where}: rate", seen.items_per_s, "items/s")
            yield Figure(f"{where}: model busy", 100 * seen.busy, "%")
            yield Figure(f"{where}: redelivered", seen.redelivered, "messages")

    def with_a_death(self) -> Iterator[Figure]:
        where = f"{self._name}, {USUAL.name}, {DEATH_DELAY_MS} ms, worker killed"
        with self._site(Link(DEATH_DELAY_MS)) as site:
            killed = kill_with_full_hand(site, USUAL, lead_s=LEAD_S, limit_s=KILL_LIMIT_S)
        self._keep(where, killed)
        yield Figure(f"{where}: work repeated", killed.redelivered_s, "s", "<=", WORK_REPEATED_S)
        yield Figure(f"{where}: last answer after", killed.healed_s, "s")

    def _seen(self, where: str, site: BrokerSite, load: FarLoad, *, hand: int = 0) -> Seen:
        seen = measure(site, load, lead_s=LEAD_S, seconds=SECONDS, hand=hand)
        self._keep(where, seen)
        return seen

    def _keep(self, where: str, result: Seen | Killed) -> None:
        self._details[where] = {name: round(value, 3) for name, value in asdict(result).items()}
        print(f"{where}: {self._details[where]}", flush=True)


def _least(load: FarLoad, delay_ms: int) -> float:
    if load.batch_s == USUAL.batch_s:
        return KEPT[delay_ms]
    if load.batch_s > USUAL.batch_s:
        return MIN_SLOW
    return MIN_FAST if load is FAST and delay_ms <= FAST_DELAY_MS else 0.0


def _bounded(figure: Figure, least: float) -> Figure:
    return Figure(figure.name, figure.value, figure.unit, ">=", least) if least else figure
