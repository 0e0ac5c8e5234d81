"""Assembles and runs a scenario, including its failures and operators' actions.

Request arrivals are computed a minute at a time. Metrics reach the time series as they would with
real collectors: at intervals, late, and with gaps. Parts are stored by model and region.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import simpy

from infra.kubernetes.deployment import gpu_class, read_gpu_types
from infra.kubernetes.placement import processes_of
from penstock_planning.autoscaled import gpu_nodes, most_workers
from penstock_planning.deploy.platform_variables import GeneralNodes
from penstock_planning.deploy.prices import Prices, read_prices
from penstock_planning.item_load import batch_items
from penstock_planning.profiles import Profiles, find_profile, find_seconds
from penstock_planning.simulation.api_site import ApiSite, SimulatedJob
from penstock_planning.simulation.fleet import Fleet
from penstock_planning.simulation.hpa import SYNC_S
from penstock_planning.simulation.metrics_table import (
    LOST_GPUS,
    OF_API,
    OF_WORKERS,
    UNDELIVERED,
    XID_ERRORS,
    Labels,
    Values,
)
from penstock_planning.simulation.promql import PromQuery, vector
from penstock_planning.simulation.recorder import (
    GpuSample,
    ModelRecord,
    Recorder,
    RequestEnd,
    Sample,
)
from penstock_planning.simulation.replicas import Autoscaler, SimulatedDeployment
from penstock_planning.simulation.result import FleetCost, SimulationResult
from penstock_planning.simulation.rules import (
    AlertRules,
    Rules,
    WorkerRules,
    read_alert,
    read_deployed_rules,
)
from penstock_planning.simulation.scenario import (
    Event,
    GpuFailure,
    Metrics,
    MetricsOutage,
    RegionLoss,
    RolloutEvent,
    Scenario,
    ScenarioFlow,
    SetReplicas,
    SpotLoss,
    StockOut,
)
from penstock_planning.simulation.service import Service
from penstock_planning.simulation.shared_service import SharedService
from penstock_planning.simulation.streams import Arrivals, arrival_times, peak_per_s
from penstock_planning.simulation.timeseries import TimeSeries
from penstock_planning.simulation.worker import Steps
from shared.broker.transport import batch_subscription_id, workers_subscription_id
from shared.models.catalog import Catalog, Model
from shared.models.entry import Gpu
from shared.settings import ApiSettings

SiteKey = tuple[str, str]
"""Model and region."""

FLOW_SEED = 1
"""Keeps the flows' random numbers separate from the models'."""
BROKER_WAIT_S = float(ApiSettings.model_fields["broker_wait_s"].default)
ROUND_TRIPS = 2
"""Equals ROUND_TRIPS of api/dispatch/model_window.py."""

FORGET_EVERY_S = 300.0
FALLEN_OFF_THE_BUS = 79
"""The XID reported for a failed GPU."""

SAMPLES = 1440
"""Number of samples per run, for plots over time."""
GPU_ALERT = "gpu-failed"
MARGIN_S = 60.0
"""How much longer series are kept than queries look back."""
MIN_SAMPLE_S = 5.0


@dataclass
class Parts:
    """The parts of the simulated world that events change."""

    services: dict[str, Service]
    """Services, keyed by model. Workers in all regions pull from one subscription."""
    sites: dict[SiteKey, ApiSite] = field(default_factory=dict)
    fleets: dict[tuple[str, str], Fleet] = field(default_factory=dict)
    """Fleets by GPU class and region."""
    replicas: dict[SiteKey, SimulatedDeployment] = field(default_factory=dict)
    """Workers by group name and region."""
    autoscalers: dict[SiteKey, Autoscaler] = field(default_factory=dict)
    """Autoscalers by group name and region."""
    groups: dict[str, str] = field(default_factory=dict)
    """Names of worker groups by model."""


@dataclass(frozen=True)
class SimulatedRun:
    """A run of a flow."""

    flow: ScenarioFlow
    record: ModelRecord
    arrived_s: float
    deadline_s: float
    region: str
    sites: Mapping[tuple[str, int], ApiSite]
    """Jobs waiting in each step, by region and step."""


class Scraper:
    """The collectors for the workers and APIs, and Pub/Sub's own gauges.

    Args:
        broker_wait_s: how long published jobs may be in transit or wait at the broker.
        has_gpu_failures: True if GPUs fail, so the metrics that only alerts use are needed.
    """

    def __init__(
        self,
        env: simpy.Environment,
        series: TimeSeries,
        metrics: Metrics,
        parts: Parts,
        broker_wait_s: float = BROKER_WAIT_S,
        *,
        has_gpu_failures: bool = False,
    ) -> None:
        self._env = env
        self._series = series
        self._metrics = metrics
        self._parts = parts
        self._broker_wait_s = broker_wait_s
        self._has_gpu_failures = has_gpu_failures
        self.away: list[tuple[str, ...]] = []
        """Current outages: prefixes of metric names that are not scraped.

        An empty prefix matches everything.
        """
        self._forget_s = 0.0
        self._scraped: dict[tuple[str, Labels], None] = {}
        """Series from the last scrape, by name and labels."""
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
            if self._has_gpu_failures:
                self._scrape_gpus()
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
                # The port responds once the process is running. Until it is ready, all values are
                # zero.
                if worker.node is None:
                    continue
                slug = replicas.rules.slug
                target = (("location", region), ("pod", worker.name), ("worker", slug))
                for name, values_of in OF_WORKERS.items():
                    self._target(name, target, values_of(worker, now_s))

    def _scrape_gpus(self) -> None:
        for (_, region), fleet in self._parts.fleets.items():
            for node in fleet.nodes:
                if node.has_failed:
                    labels = (("Hostname", node.name), ("gpu", "0"), ("location", region))
                    self._target(XID_ERRORS, labels, (((), float(FALLEN_OFF_THE_BUS)),))
        for (_, region), replicas in self._parts.replicas.items():
            for worker in (*replicas.workers, *replicas.leaving):
                slug = replicas.rules.slug
                target = (("location", region), ("pod", worker.name), ("worker", slug))
                self._target(LOST_GPUS, target, (((), float(worker.lost_gpus)),))

    def _target(self, name: str, target: Labels, values: Values) -> None:
        for own, value in values:
            labels = tuple(sorted(own + target))
            self._scraped[name, labels] = None
            self._append(name, labels, value, self._metrics.age_s)

    def _sample_pubsub(self) -> Steps:
        while True:
            for name, service in self._parts.services.items():
                sites = [site for key, site in self._parts.sites.items() if key[0] == name]
                published = sum(site.count_published(self._broker_wait_s) for site in sites)
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


def happen(env: simpy.Environment, event: Event, parts: Parts, scraper: Scraper) -> Steps:
    yield env.timeout(event.at_s)
    if isinstance(event, StockOut):
        yield from _stock_out(env, event, parts)
    elif isinstance(event, MetricsOutage):
        yield from _metrics_outage(env, event, parts, scraper)
    elif isinstance(event, RegionLoss):
        yield from _region_loss(env, event, parts)
    else:
        _begin(event, parts)


def _begin(event: SpotLoss | GpuFailure | RolloutEvent | SetReplicas, parts: Parts) -> None:
    if isinstance(event, SpotLoss):
        for (_, region), fleet in parts.fleets.items():
            if event.region in (None, region):
                fleet.lose(event.share)
    elif isinstance(event, GpuFailure):
        _fail_gpus(event, parts)
    elif isinstance(event, RolloutEvent):
        for (group, _), replicas in parts.replicas.items():
            if group == parts.groups[event.model]:
                replicas.roll_out()
    else:
        _set_replicas(event, parts)


def _set_replicas(event: SetReplicas, parts: Parts) -> None:
    for key, replicas in parts.replicas.items():
        if key[0] == parts.groups[event.model]:
            old = parts.autoscalers[key]
            bounds = {"minReplicaCount": event.count, "maxReplicaCount": event.count}
            rules = old.rules.model_copy(update=bounds)
            parts.autoscalers[key] = old.restart(rules)
            if event.is_kill:
                replicas.kill_down_to(event.count)
            replicas.set(event.count)


def _fail_gpus(event: GpuFailure, parts: Parts) -> None:
    for (_, region), fleet in parts.fleets.items():
        type_ = fleet.gpu.type
        if type_ != "none" and event.region in (None, region) and event.gpu in (None, type_):
            fleet.fail_gpus(event)


def _stock_out(env: simpy.Environment, event: StockOut, parts: Parts) -> Steps:
    out = [
        fleet
        for (_, region), fleet in parts.fleets.items()
        if event.region in (None, region) and event.gpu in (None, fleet.gpu.type)
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
    keys = [key for key in parts.sites if key[1] == event.region]
    of_workers = [key for key in parts.replicas if key[1] == event.region]
    fleets = [fleet for key, fleet in parts.fleets.items() if key[1] == event.region]
    for key in keys:
        parts.sites[key].is_lost = True
        parts.services[key[0]].lose_requests(parts.sites[key])
    for fleet in fleets:
        fleet.lose_all()
    for key in of_workers:
        parts.replicas[key].lose_all()
    yield env.timeout(event.for_s)
    for fleet in fleets:
        fleet.is_lost = False
    for key in keys:
        parts.sites[key].is_lost = False
    for key in of_workers:
        old = parts.autoscalers[key]
        parts.autoscalers[key] = old.restart(old.rules)
        parts.replicas[key].set(old.rules.minReplicaCount)


def simulate(
    scenario: Scenario,
    *,
    models_file: Path | None = None,
    rules: Rules | None = None,
    profiles: Profiles = (),
) -> SimulationResult:
    """Runs a scenario. The same scenario and rules produce the same result.

    Args:
        models_file: catalog to use instead of the scenario's.
        rules: rules to use instead of the deployed ones (`read_deployed_rules`).
        profiles: figures to use instead of the scenario's seconds.

    Raises:
        ConfigurationError: the scenario, catalog, and rules are inconsistent.
    """
    catalog, deployed = read_deployed_rules(scenario, models_file, profiles)
    scenario = _with_profiles(scenario, catalog, profiles)
    world = World(scenario, catalog, rules or deployed, read_prices())
    world.env.run(until=scenario.duration_s)
    return world.result()


def _with_profiles(scenario: Scenario, catalog: Catalog, profiles: Profiles) -> Scenario:
    """Returns the scenario with the profiles' seconds for models that have a profile.

    Raises:
        ConfigurationError: a profile has no figures for its model.
    """
    loads = {}
    for name, load in scenario.models.items():
        loads[name] = load
        if load.steps is None:
            model, fields, where = catalog.find(name), load.model_dump(), f"models.{name}"
            if find_profile(profiles, model) is None:
                continue  # a scenario always has a figure
            if seconds := find_seconds(model, fields, profiles, where):
                loads[name] = load.model_copy(update={**seconds, "fixed_s": 0.0})
    return scenario.model_copy(update={"models": loads})


class World:
    """Everything in a scenario, in one SimPy environment."""

    def __init__(self, scenario: Scenario, catalog: Catalog, rules: Rules, prices: Prices) -> None:
        self.env = simpy.Environment()
        self.scenario = scenario
        self._prices = prices
        self._chance = random.Random(scenario.seed)
        self.models = {name: catalog.find(name) for name in scenario.models}
        self.recorder = Recorder(tuple(self.models), tuple(scenario.flows))
        self.series = TimeSeries()
        self.parts = Parts({name: self._service(model) for name, model in self.models.items()})
        for region in scenario.regions:
            for name, of_group in rules[region].items():
                self._add(region, name, of_group)
        looks_back_s = max(
            autoscaler.looks_back_s for autoscaler in self.parts.autoscalers.values()
        )
        has_gpu_failures = any(isinstance(event, GpuFailure) for event in scenario.events)
        if has_gpu_failures:
            alert = read_alert(GPU_ALERT)
            query = PromQuery(alert.query)
            looks_back_s = max(looks_back_s, query.looks_back_s)
            self.env.process(self._watch(alert, query))
        self.series.kept_s = looks_back_s + scenario.metrics.pubsub_age_s + MARGIN_S
        self._start_workers()
        # Same as in api/dispatch/model_window.py.
        stay_s = BROKER_WAIT_S + ROUND_TRIPS * scenario.broker.round_trip_s
        scraper = Scraper(
            self.env,
            self.series,
            scenario.metrics,
            self.parts,
            stay_s,
            has_gpu_failures=has_gpu_failures,
        )
        for number, (name, stream) in enumerate(
            (name, stream) for name, load in scenario.models.items() for stream in load.arrivals
        ):
            self.env.process(self._arrive(name, stream, number))
        for number, (name, stream) in enumerate(
            (name, stream) for name, flow in scenario.flows.items() for stream in flow.arrivals
        ):
            self.env.process(self._arrive_runs(name, stream, number))
        self.env.process(self._sample())
        for event in scenario.events:
            self.env.process(happen(self.env, event, self.parts, scraper))

    def _service(self, model: Model) -> Service:
        return Service(
            self.env,
            model,
            self.scenario.models[model.name],
            self.scenario.broker,
            self.recorder.models[model.name],
            self.scenario.api.trip_s,
            self._chance,
        )

    def _add(self, region: str, group: str, rules: WorkerRules) -> None:
        scenario, key = self.scenario, (group, region)
        model = self.models[rules.models[0]]
        for name in rules.models:
            self.parts.groups[name] = group
            self.parts.sites[name, region] = self._site_of(name, region)
        pool = (gpu_class(model.gpu), region)
        if pool not in self.parts.fleets:
            cluster = scenario.cluster
            if model.gpu.type == "none":
                # General nodes are never kept warm and are never spot instances.
                cluster = cluster.model_copy(update={"buffer": 0, "spot": False})
            max_gpus = scenario.regions[region].max_gpus if model.gpu.type != "none" else None
            self.parts.fleets[pool] = Fleet(self.env, cluster, model.gpu, max_gpus, self._chance)
        self.parts.replicas[key] = SimulatedDeployment(
            self.env,
            self._service_of(group, rules.models),
            self.parts.fleets[pool],
            rules,
            scenario.cluster,
            region,
            self.recorder,
        )
        self.parts.autoscalers[key] = Autoscaler(rules.autoscaler, self.series)
        self.env.process(self._poll(key))
        self.env.process(self._sync(key))

    def _site_of(self, model: str, region: str) -> ApiSite:
        api = self.scenario.api
        return ApiSite(region, self.models[model], api.max_instances, api.concurrency)

    def _service_of(self, group: str, models: Sequence[str]) -> Service | SharedService:
        services = [self.parts.services[name] for name in models]
        return services[0] if len(services) == 1 else SharedService(self.env, group, services)

    def _start_workers(self) -> None:
        """Adds workers that exist from the start, and nodes for those workers and the buffer."""
        for fleet in self.parts.fleets.values():
            members = [
                key for key in self.parts.replicas if self.parts.replicas[key].fleet is fleet
            ]
            counts = {key: self._first_replicas(key) for key in members}
            workers = sum(counts.values()) + fleet.buffer
            fleet.start_with(-(-workers // fleet.places))
            for key, count in counts.items():
                self.parts.replicas[key].start_with(count)

    def _first_replicas(self, key: SiteKey) -> int:
        names = self.parts.replicas[key].rules.models
        counts = [self.scenario.models[name].start_replicas for name in names]
        configured = [count for count in counts if count is not None]
        return max(configured) if configured else self.models[names[0]].replicas.min

    # Processes

    def _poll(self, key: SiteKey) -> Steps:
        period_s = self.parts.autoscalers[key].rules.pollingInterval
        yield self.env.timeout(self._chance.uniform(0, period_s))
        while True:
            replicas = self.parts.replicas[key]
            if not replicas.fleet.is_lost:
                replicas.set(self.parts.autoscalers[key].poll(self.env.now, replicas.wanted))
            yield self.env.timeout(period_s)

    def _sync(self, key: SiteKey) -> Steps:
        yield self.env.timeout(self._chance.uniform(0, SYNC_S))
        while True:
            replicas = self.parts.replicas[key]
            if not replicas.fleet.is_lost:
                replicas.set(self.parts.autoscalers[key].sync(self.env.now, replicas.wanted))
            yield self.env.timeout(SYNC_S)

    def _arrive(self, name: str, stream: Arrivals, number: int) -> Steps:
        env, load, chance = self.env, self.scenario.models[name], self._chance
        service, record = self.parts.services[name], self.recorder.models[name]
        limit_s = load.deadline_s or self.models[name].deadline.default_s
        # The reply also takes time.
        limit_s -= self.scenario.api.trip_s
        generator = np.random.default_rng([self.scenario.seed, number])
        for times in arrival_times(stream, self.scenario.duration_s, generator):
            for at_s in times.tolist():
                if at_s > env.now:
                    yield env.timeout(at_s - env.now)
                record.arrived += 1
                is_batch = load.batch_lane_share > 0 and chance.random() < load.batch_lane_share
                site = self._site(name)
                if site is None:
                    service.refuse()
                    continue
                job = SimulatedJob(
                    env.now, env.now + limit_s, load.items_per_request, is_batch, site
                )
                if site.admits(job, env.now):
                    service.publish(job)
                else:
                    service.refuse()

    def _arrive_runs(self, name: str, stream: Arrivals, number: int) -> Steps:
        """Starts a flow's runs.

        The API sees the flow as a whole, not as requests to its steps' models.
        """
        flow, record = self.scenario.flows[name], self.recorder.runs[name]
        sites = {
            (region, step): self._site_of(model, region)
            for region in self.scenario.regions
            for step, model in enumerate(flow.steps)
        }
        generator = np.random.default_rng([self.scenario.seed, FLOW_SEED, number])
        for times in arrival_times(stream, self.scenario.duration_s, generator):
            for at_s in times.tolist():
                if at_s > self.env.now:
                    yield self.env.timeout(at_s - self.env.now)
                record.arrived += 1
                site = self._site(flow.steps[0])
                if site is not None:
                    deadline_s = self.env.now + flow.deadline_s - self.scenario.api.trip_s
                    run = SimulatedRun(flow, record, self.env.now, deadline_s, site.region, sites)
                    self._publish_step(run, 0)

    def _publish_step(self, run: SimulatedRun, step: int) -> None:
        name, now_s = run.flow.steps[step], self.env.now
        site, service = run.sites[run.region, step], self.parts.services[name]
        job = SimulatedJob(now_s, run.deadline_s, 1, False, site)
        job.then = partial(self._end_step, run, step)
        self.recorder.models[name].arrived += 1
        if step and now_s < run.deadline_s:
            site.take(job, now_s)
        elif step or not site.admits(job, now_s):
            service.refuse()
            return
        service.publish(job)

    def _end_step(self, run: SimulatedRun, step: int, job: SimulatedJob) -> None:
        if step + 1 < len(run.flow.steps):
            self.env.process(self._next_step(run, step + 1))
            return
        run.record.outcomes[RequestEnd.SERVED] += 1
        run.record.arrived_s.append(run.arrived_s)
        run.record.answer_s.append(self.env.now - run.arrived_s + self.scenario.api.trip_s)

    def _next_step(self, run: SimulatedRun, step: int) -> Steps:
        """Publishes the next job, which takes one trip from worker to worker over Pub/Sub."""
        yield self.env.timeout(self.scenario.api.trip_s / 2)
        self._publish_step(run, step)

    def _site(self, name: str) -> ApiSite | None:
        """Returns the API in a request's region, or None if all regions are lost."""
        regions = self.scenario.regions
        if len(regions) == 1:
            site = self.parts.sites[name, next(iter(regions))]
            return None if site.is_lost else site
        up = [region for region in regions if not self.parts.sites[name, region].is_lost]
        if not up:
            return None
        shares = [regions[region].share for region in up]
        return self.parts.sites[name, self._chance.choices(up, shares)[0]]

    def _watch(self, alert: AlertRules, query: PromQuery) -> Steps:
        """Records when an alert starts firing."""
        since_s: float | None = None
        is_firing = False
        while True:
            now_s = self.env.now
            if not vector(query.value(self.series, now_s)):
                since_s, is_firing = None, False
            else:
                since_s = now_s if since_s is None else since_s
                if not is_firing and now_s - since_s >= alert.duration_s:
                    is_firing = True
                    self.recorder.alerted_s.append(now_s)
            yield self.env.timeout(alert.evaluation_interval_s)

    def _sample(self) -> Steps:
        period_s = max(MIN_SAMPLE_S, self.scenario.duration_s / SAMPLES)
        while True:
            self._take_samples()
            yield self.env.timeout(period_s)

    def _take_samples(self) -> None:
        now_s = self.env.now
        for (_, region), replicas in self.parts.replicas.items():
            busy = sum(worker.is_computing for worker in replicas.workers)
            for model in replicas.rules.models:
                in_flight = self.parts.sites[model, region].in_flight
                self.recorder.samples.append(
                    Sample(now_s, model, region, replicas.wanted, replicas.ready, busy, in_flight)
                )
        for (pool, region), fleet in self.parts.fleets.items():
            nodes, busy = len(fleet.nodes), sum(node.busy > 0 for node in fleet.nodes)
            self.recorder.gpu_samples.append(GpuSample(now_s, pool, region, nodes, busy))

    # Result

    def result(self) -> SimulationResult:
        """Returns the results after the run ends."""
        self._take_samples()
        for replicas in self.parts.replicas.values():
            replicas.count_workers()
        for service in self.parts.services.values():
            service.record.outcomes[RequestEnd.OPEN] += service.open_jobs()
        return SimulationResult(
            scenario=self.scenario,
            deadlines_s={
                name: self.scenario.models[name].deadline_s or model.deadline.default_s
                for name, model in self.models.items()
            },
            recorder=self.recorder,
            fleets=tuple(self._costs()),
            emptied_s=tuple(
                sorted(at_s for fleet in self.parts.fleets.values() for at_s in fleet.emptied_s)
            ),
        )

    def _costs(self) -> Iterator[FleetCost]:
        for (pool, region), fleet in self.parts.fleets.items():
            price = self._prices.prices.get(_machine_price(fleet.gpu, self.scenario.cluster.spot))
            per_h = None if price is None else price.cost_usd(region, fleet.gpu.count)
            max_nodes = self._most_nodes(pool, region, fleet)
            yield FleetCost(pool, region, fleet.node_s, fleet.gpu_busy_s, per_h, max_nodes)

    def _most_nodes(self, pool: str, region: str, fleet: Fleet) -> int:
        """Returns the nodes that quotas and limits must allow for, like `penstock deploy plan`."""
        share = self.scenario.regions[region].share
        workers = []
        for (_, of_region), replicas in self.parts.replicas.items():
            members = [self.models[name] for name in replicas.rules.models]
            if replicas.fleet is not fleet or of_region != region:
                continue
            erlangs = requests = 0.0
            for model in members:
                load = self.scenario.models[model.name]
                item_s = load.full_item_s(batch_items(model, load))
                if fleet.places > 1:
                    item_s *= fleet.places / load.kept_when_sharing
                item_s = max(item_s, (load.host_seconds_per_item or 0.0) * processes_of(members))
                per_s = share * self._peak_per_s(model.name)
                requests += per_s
                erlangs += per_s * load.items_per_request * item_s / processes_of(members)
            workers.append(max(members[0].replicas.min, most_workers(erlangs, requests)))
        return gpu_nodes(workers, fleet.buffer, fleet.places)

    def _peak_per_s(self, model: str) -> float:
        """Returns the maximum requests per second, including requests from flows."""
        duration_s = self.scenario.duration_s
        return peak_per_s(self.scenario.models[model].arrivals, duration_s) + sum(
            flow.steps.count(model) * peak_per_s(flow.arrivals, duration_s)
            for flow in self.scenario.flows.values()
        )


def _machine_price(gpu: Gpu, is_spot: bool) -> str:
    """Returns the price key for a GPU's nodes. Workers without a GPU run on general nodes."""
    if gpu.type == "none":
        return f"machine/{GeneralNodes().machine_type}/on-demand"
    machine_type = read_gpu_types()[gpu.type].choose_price(gpu.count)
    return f"machine/{machine_type}/{'spot' if is_spot else 'on-demand'}"
