"""Brings metrics into the time series, as collectors do: at intervals, late, and not always."""

from __future__ import annotations

import simpy

from infra.simulation.metrics_table import OF_API, OF_WORKERS, UNDELIVERED
from infra.simulation.parts import Parts
from infra.simulation.scenario import Metrics
from infra.simulation.timeseries import KEPT_S, TimeSeries
from infra.simulation.worker import Steps
from shared.pubsub.names import batch_subscription_id, workers_subscription_id
from shared.settings import ApiSettings

BROKER_WAIT_S = float(ApiSettings.model_fields["broker_wait_s"].default)


class Scraper:
    """The collectors of workers and APIs, and Pub/Sub's own gauges.

    Args:
        env: the clock.
        series: gets the samples.
        metrics: intervals and ages.
        parts: what is scraped.
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
        self._scraped: dict[str, dict[str, str]] = {}
        env.process(self._scrape())
        env.process(self._sample_pubsub())

    def _is_away(self, name: str) -> bool:
        return any(not names or name.startswith(names) for names in self.away)

    def _append(self, name: str, labels: dict[str, str], value: float, age_s: float) -> None:
        if not self._is_away(name):
            self._series.append(name, labels, self._env.now, value, age_s)

    def _scrape(self) -> Steps:
        while True:
            self._scrape_workers()
            for (model, region), site in self._parts.sites.items():
                labels = {"model": model, "location": region}
                for name, value_of in OF_API.items():
                    if site.is_lost:
                        self._series.end(name, labels, self._env.now)
                    else:
                        self._append(name, labels, value_of(site), self._metrics.age_s)
            self._series.forget(self._env.now - KEPT_S)
            yield self._env.timeout(self._metrics.scrape_s)

    def _scrape_workers(self) -> None:
        before, self._scraped = self._scraped, {}
        for (_, region), replicas in self._parts.replicas.items():
            for worker in (*replicas.workers, *replicas.leaving):
                # The port answers as soon as the process is up. Until it is ready all is zero.
                if worker.node is None:
                    continue
                labels = before.get(worker.name) or {
                    "worker": replicas.rules.slug,
                    "pod": worker.name,
                    "location": region,
                }
                self._scraped[worker.name] = labels
                for name, value_of in OF_WORKERS.items():
                    self._append(name, labels, value_of(worker), self._metrics.age_s)
        for gone in before.keys() - self._scraped.keys():
            for name in OF_WORKERS:
                self._series.end(name, before[gone], self._env.now)

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
                    labels = {
                        "monitored_resource": "pubsub_subscription",
                        "subscription_id": subscription,
                    }
                    messages = count * share / items
                    self._append(UNDELIVERED, labels, messages, self._metrics.pubsub_age_s)
            yield self._env.timeout(self._metrics.pubsub_sample_s)
