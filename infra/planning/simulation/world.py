"""Puts a scenario together and runs it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import simpy
import yaml

from infra.kubernetes.deployment import Deployment, gpu_class, read_gpu_types
from infra.planning.deploy.platform_variables import GeneralNodes
from infra.planning.deploy.prices import Prices, read_prices
from infra.planning.simulation.api_site import ApiSite, SimulatedJob
from infra.planning.simulation.events import arrival_times, happen
from infra.planning.simulation.fleet import Fleet
from infra.planning.simulation.hpa import SYNC_S
from infra.planning.simulation.keda import Autoscaler
from infra.planning.simulation.parts import Parts, Place
from infra.planning.simulation.recorder import GpuSample, Recorder, RequestEnd, Sample
from infra.planning.simulation.replicas import SimulatedDeployment
from infra.planning.simulation.result import FleetCost, SimulationResult
from infra.planning.simulation.rules import WorkerRules, read_rules
from infra.planning.simulation.scenario import Scenario
from infra.planning.simulation.scraper import Scraper
from infra.planning.simulation.service import Service
from infra.planning.simulation.streams import Arrivals
from infra.planning.simulation.timeseries import TimeSeries
from infra.planning.simulation.worker import Steps
from shared.catalog import Catalog, Model, read_catalog
from shared.errors import ConfigurationError

SAMPLES = 1440
"""Samples of a run, for plots over time."""
MARGIN_S = 60.0
"""Series are kept for longer than queries look back."""
MIN_SAMPLE_S = 5.0

Rules = Mapping[str, Mapping[str, WorkerRules]]
"""Rules by region and model."""


def simulate(
    scenario: Scenario, *, models_file: Path | None = None, rules: Rules | None = None
) -> SimulationResult:
    """Runs a scenario. The same scenario and rules give the same result.

    Args:
        scenario: the scenario to run.
        models_file: a catalog that replaces the scenario's.
        rules: replace those that are read from what deploys (`deployed_rules`).

    Raises:
        ConfigurationError: scenario, catalog and rules do not fit together.
    """
    catalog, deployed = deployed_rules(scenario, models_file)
    world = World(scenario, catalog, rules or deployed, read_prices())
    world.env.run(until=scenario.duration_s)
    return world.result()


def deployed_rules(scenario: Scenario, models_file: Path | None = None) -> tuple[Catalog, Rules]:
    """The catalog of a scenario, and the rules that would be deployed for it.

    Raises:
        ConfigurationError: the catalog can't be read, or a model of the scenario is missing.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-simulate-") as folder:
        path = models_file or scenario.catalog
        if not isinstance(path, Path):
            entries = {"models": list(path)}
            path = Path(folder) / "models.yaml"
            path.write_text(yaml.safe_dump(entries), encoding="utf-8")
        catalog = read_catalog(path)
        for name in scenario.models:
            if name not in {model.name for model in catalog.models}:
                raise ConfigurationError(f"models: {name!r} is not in the catalog", field="models")
        deployments = {region: _deployment(scenario, region) for region in scenario.regions}
        return catalog, {
            region: read_rules(catalog, path, deployment)
            for region, deployment in deployments.items()
        }


def _deployment(scenario: Scenario, region: str) -> Deployment:
    """The deployment of a region. What does not change the rules is made up."""
    return Deployment(
        project="simulated",
        region=region,
        namespace="penstock",
        dataset="simulated",
        objects_url="gs://simulated",
        redis_url="redis://10.0.0.2",
        records_url="redis://10.0.0.2",
        redis_cidrs=("10.0.0.0/29",),
        models=tuple(scenario.models),
        spot=scenario.cluster.spot,
        overflow=None,
        compute_classes=False,
        image="penstock-worker:simulated",
        buffer=scenario.cluster.buffer,
    )


class World:
    """Everything that a scenario has, in one SimPy environment."""

    def __init__(self, scenario: Scenario, catalog: Catalog, rules: Rules, prices: Prices) -> None:
        self.env = simpy.Environment()
        self.scenario = scenario
        self._prices = prices
        self._chance = random.Random(scenario.seed)
        self.models = {name: catalog.find(name) for name in scenario.models}
        self.recorder = Recorder(tuple(self.models))
        self.series = TimeSeries()
        self.parts = Parts({name: self._service(model) for name, model in self.models.items()})
        for region in scenario.regions:
            for name, model in self.models.items():
                self._add(region, model, rules[region][name])
        looks_back_s = max(one.looks_back_s for one in self.parts.autoscalers.values())
        self.series.kept_s = looks_back_s + scenario.metrics.pubsub_age_s + MARGIN_S
        self._start_workers()
        scraper = Scraper(self.env, self.series, scenario.metrics, self.parts)
        for number, (name, stream) in enumerate(
            (name, stream) for name, load in scenario.models.items() for stream in load.arrivals
        ):
            self.env.process(self._arrive(name, stream, number))
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

    def _add(self, region: str, model: Model, rules: WorkerRules) -> None:
        scenario, place = self.scenario, (model.name, region)
        api = scenario.api
        self.parts.sites[place] = ApiSite(region, model, api.max_instances, api.concurrency)
        pool = (gpu_class(model.gpu), region)
        if pool not in self.parts.fleets:
            cluster = scenario.cluster
            if model.gpu.type == "none":
                # General nodes: nothing is kept warm for them, and they are not spot.
                cluster = cluster.model_copy(update={"buffer": 0, "spot": False})
            most = scenario.regions[region].max_gpus if model.gpu.type != "none" else None
            self.parts.fleets[pool] = Fleet(self.env, cluster, model.gpu.share, most, self._chance)
        self.parts.replicas[place] = SimulatedDeployment(
            self.env,
            self.parts.services[model.name],
            self.parts.fleets[pool],
            rules,
            scenario.cluster,
            region,
            self.recorder,
        )
        self.parts.autoscalers[place] = Autoscaler(rules.autoscaler, self.series)
        self.env.process(self._poll(place))
        self.env.process(self._sync(place))

    def _start_workers(self) -> None:
        """Workers, and nodes for them and for the buffer, that are there at the start."""
        for fleet in self.parts.fleets.values():
            members = [
                place for place in self.parts.replicas if self.parts.replicas[place].fleet is fleet
            ]
            counts = {place: self._first_replicas(place) for place in members}
            places = sum(counts.values()) + fleet.buffer
            fleet.start_with(-(-places // fleet.places))
            for place, count in counts.items():
                self.parts.replicas[place].start_with(count)

    def _first_replicas(self, place: Place) -> int:
        asked = self.scenario.models[place[0]].start_replicas
        return self.models[place[0]].replicas.min if asked is None else asked

    # Processes

    def _poll(self, place: Place) -> Steps:
        autoscaler = self.parts.autoscalers[place]
        period_s = autoscaler.rules.pollingInterval
        yield self.env.timeout(self._chance.uniform(0, period_s))
        while True:
            replicas = self.parts.replicas[place]
            if not replicas.fleet.is_lost:
                replicas.set(autoscaler.poll(self.env.now, replicas.wanted))
            yield self.env.timeout(period_s)

    def _sync(self, place: Place) -> Steps:
        yield self.env.timeout(self._chance.uniform(0, SYNC_S))
        while True:
            replicas = self.parts.replicas[place]
            if not replicas.fleet.is_lost:
                replicas.set(self.parts.autoscalers[place].sync(self.env.now, replicas.wanted))
            yield self.env.timeout(SYNC_S)

    def _arrive(self, name: str, stream: Arrivals, number: int) -> Steps:
        env, load, chance = self.env, self.scenario.models[name], self._chance
        service, record = self.parts.services[name], self.recorder.models[name]
        limit_s = load.deadline_s or self.models[name].deadline.default_s
        # The reply needs its time too.
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

    def _site(self, name: str) -> ApiSite | None:
        """The region of a request. None: all are lost."""
        regions = self.scenario.regions
        if len(regions) == 1:
            site = self.parts.sites[name, next(iter(regions))]
            return None if site.is_lost else site
        up = [region for region in regions if not self.parts.sites[name, region].is_lost]
        if not up:
            return None
        shares = [regions[region].share for region in up]
        return self.parts.sites[name, self._chance.choices(up, shares)[0]]

    def _sample(self) -> Steps:
        period_s = max(MIN_SAMPLE_S, self.scenario.duration_s / SAMPLES)
        while True:
            self._take_samples()
            yield self.env.timeout(period_s)

    def _take_samples(self) -> None:
        now_s = self.env.now
        for (model, region), replicas in self.parts.replicas.items():
            busy = sum(bool(worker.running) for worker in replicas.workers)
            in_flight = self.parts.sites[model, region].in_flight
            self.recorder.samples.append(
                Sample(now_s, model, region, replicas.wanted, replicas.ready, busy, in_flight)
            )
        for (pool, region), fleet in self.parts.fleets.items():
            nodes, busy = len(fleet.nodes), sum(node.busy > 0 for node in fleet.nodes)
            self.recorder.gpu_samples.append(GpuSample(now_s, pool, region, nodes, busy))

    # Result

    def result(self) -> SimulationResult:
        """Returns the results, after the end."""
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
        )

    def _costs(self) -> Iterator[FleetCost]:
        for (pool, region), fleet in self.parts.fleets.items():
            price = self._prices.prices.get(_machine_price(pool, self.scenario.cluster.spot))
            per_h = None if price is None else price.cost_usd(region, 1.0)
            yield FleetCost(pool, region, fleet.node_s, fleet.gpu_busy_s, per_h)


def _machine_price(pool: str, is_spot: bool) -> str:
    """The price of a node of a GPU class. Workers without a GPU run on general nodes."""
    gpu_types, type_ = read_gpu_types(), pool.rpartition("-x")[0]
    if type_ not in gpu_types:
        return f"machine/{GeneralNodes().machine_type}/on-demand"
    return f"machine/{gpu_types[type_].machine_type}/{'spot' if is_spot else 'on-demand'}"
