"""Brings metrics into the time series, as collectors do: at intervals, late, and not always."""

from __future__ import annotations

import simpy

from infra.planning.simulation.metrics_table import OF_API, OF_WORKERS, UNDELIVERED, Labels, Values
from infra.planning.simulation.parts import Parts
from infra.planning.simulation.scenario import Metrics
from infra.planning.simulation.timeseries import TimeSeries
from infra.planning.simulation.worker import Steps
from shared.settings import ApiSettings
from shared.topics import batch_subscription_id, workers_subscription_id

BROKER_WAIT_S = float(ApiSettings.model_fields["broker_wait_s"].default)

FORGET_EVERY_S = 300.0


class Scraper:
    """The collectors of workers and APIs, and Pub/Sub's own gauges.

    Args:
        env: the clock.
        series: gets the samples.
        metrics: intervals and ages.
        parts: the scraped parts.
    """

    def __init__(
        self, env: simpy.Environment, series: TimeSeries, metrics: Metrics, parts: Parts
    ) -> None:
        self._env = env
        self._series = series
        self._metrics = metrics
        self._parts = parts
        self.away: list[tuple[str, ...]] = []
        """Outages: beginnings of the names that are not scraped. An empty one is any name."""
        self._forget_s = 0.0
        self._scraped: dict[tuple[str, Labels], None] = {}
        """The series of the last scrape, by name and labels."""
        env.process(self._scrape())
        env.process(self._sample_pubsub())

    def _is_away(self, name: str) -> bool:
        return any(not names or name.startswith(names) for names in self.away)

    def _append(self, name: str, labels: Labels, value: float, age_s: float) -> None:
        if not self._is_away(name):
            self._series.append(name, labels, self._env.now, value, age_s)

    def _scrape(self) -> Steps:
        while True:
            before, self._scraped = self._scraped, {}
            for (model, region), site in self._parts.sites.items():
                if not site.is_lost:
                    target = (("location", region), ("model", model))
                    for name, values_of in OF_API.items():
                        self._target(name, target, values_of(site))
            self._scrape_workers()
            if self._metrics.has_stale_markers:
                for name, labels in before.keys() - self._scraped.keys():
                    self._series.end(name, labels, self._env.now)
            if self._env.now >= self._forget_s:
                self._series.forget(self._env.now)
                self._forget_s = self._env.now + FORGET_EVERY_S
            yield self._env.timeout(self._metrics.scrape_s)

    def _scrape_workers(self) -> None:
        now_s = self._env.now
        for (_, region), replicas in self._parts.replicas.items():
            for worker in (*replicas.workers, *replicas.leaving):
                # The port answers as soon as the process is up. Until it is ready all is zero.
                if worker.node is None:
                    continue
                slug = replicas.rules.slug
                target = (("location", region), ("pod", worker.name), ("worker", slug))
                for name, values_of in OF_WORKERS.items():
                    self._target(name, target, values_of(worker, now_s))

    def _target(self, name: str, target: Labels, values: Values) -> None:
        for own, value in values:
            # Sorted, because `lane` is the only label of our own.
            labels = own + target
            self._scraped[name, labels] = None
            self._append(name, labels, value, self._metrics.age_s)

    def _sample_pubsub(self) -> Steps:
        while True:
            for name, service in self._parts.services.items():
                sites = [site for place, site in self._parts.sites.items() if place[0] == name]
                published = sum(site.published(BROKER_WAIT_S) for site in sites)
                in_flight = sum(site.in_flight for site in sites)
                batch = sum(site.batch for site in sites)
                share = published / in_flight if in_flight else 0.0
                items = service.load.items_per_request
                for subscription, count in (
                    (workers_subscription_id(name), in_flight - batch),
                    (batch_subscription_id(name), batch),
                ):
                    labels = (
                        ("monitored_resource", "pubsub_subscription"),
                        ("subscription_id", subscription),
                    )
                    messages = count * share / items
                    self._append(UNDELIVERED, labels, messages, self._metrics.pubsub_age_s)
            yield self._env.timeout(self._metrics.pubsub_sample_s)
