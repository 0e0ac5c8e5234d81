"""`penstock deploy plan`: sizes a deployment based on the catalog, rates, variables, and prices.

A plan also includes quotas and limits: how much to request, and the known defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infra.kubernetes.deployment import GpuType
from infra.kubernetes.placement import check_gpu_memory, memory_mib, processes_of
from penstock_planning.deploy.costs import (
    SIDECAR_CPU,
    SIDECAR_GIB,
    Cost,
    cost_table,
    disks_gib,
    on_demand_usd,
)
from penstock_planning.deploy.platform_variables import (
    INBOX_STRIDE,
    MAX_REPLY_SUBSCRIPTIONS,
    Platform,
    Region,
)
from penstock_planning.deploy.prices import Prices, Source
from penstock_planning.deploy.rates import DemandRates, ModelRate
from penstock_planning.deploy.reply_costs import reply_notes
from penstock_planning.deploy.sizing import (
    Site,
    inboxes_for,
    once,
    size_site,
    size_workers,
)
from penstock_planning.deploy.topology import gpu_pools, redis, subscriptions, topics
from penstock_planning.deploy.volumes import Volume, volume
from penstock_planning.profiles import Profiles
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog, Model, Revision

UNKNOWN = "unknown"
RUN_QUOTAS = "depends on the region; cloud.google.com/run/docs/configuring/max-instances-limits"
SUBSCRIPTIONS_OF_A_TOPIC = 10_000
"""docs.cloud.google.com/bigquery/docs/analytics-hub-introduction, limitations."""
SUBSCRIPTIONS_OF_A_PROJECT = 10_000
"""Quota from infra/terraform/platform/variables.tf, taken from older versions of Pub/Sub's quota
page.
"""
INSERT_MB_PER_S = {"EU": 1000, "US": 1000}
"""Otherwise 300 (docs.cloud.google.com/bigquery/quotas)."""

AUTO_PROVISIONED_GPUS = 64
"""Number of GPUs per type when ComputeClasses create the nodes
(infra/terraform/modules/cluster/nodes.tf).
"""


@dataclass(frozen=True)
class CloudQuota:
    """A quota: where it applies, the amount needed, and the default if a source specifies it."""

    name: str
    place: str
    needed: float
    default: str
    note: str = ""


def quotas(
    sites: Sequence[Site],
    platform: Platform,
    volumes: Sequence[Volume],
    gpus: dict[str, GpuType],
    topic_count: int,
    subscription_count: int,
) -> list[CloudQuota]:
    """Returns the quotas to request before the first apply: per region, then for the project.

    They cover the maximum that the autoscaler requests, not just the average demand at the peak.
    """
    quotas = [quota for site in sites for quota in _region(site, platform, gpus)]
    total = sum(pool.gpus_most for site in sites for pool in site.pools)
    if total:
        quotas.append(CloudQuota("GPUS_ALL_REGIONS", "project", total, UNKNOWN, "spot or not"))
    limit = str(SUBSCRIPTIONS_OF_A_PROJECT)
    quotas.append(
        CloudQuota("Pub/Sub topics", "project", topic_count, limit, "from older copies of the page")
    )
    quotas.append(
        CloudQuota(
            "Pub/Sub subscriptions",
            "project",
            subscription_count,
            limit,
            "from older copies of the page",
        )
    )
    per_topic = platform.inboxes.made_slots
    quotas.append(
        CloudQuota(
            "Pub/Sub subscriptions of a topic", "inbox", per_topic, str(SUBSCRIPTIONS_OF_A_TOPIC)
        )
    )
    rows_mb = sum(_peak_of(volume.model, sites) * volume.row_bytes for volume in volumes) / 1e6
    inserts = str(INSERT_MB_PER_S.get(platform.dataset_location, 300))
    quotas.append(
        CloudQuota("BigQuery inserts, MB/s", platform.dataset_location, round(rows_mb, 3), inserts)
    )
    if platform.domain is not None:
        quotas.append(CloudQuota("static addresses", "global", 1, UNKNOWN, "of the load balancer"))
    return quotas


def _gpu_quotas(site: Site, platform: Platform, gpus: dict[str, GpuType]) -> Iterator[CloudQuota]:
    for type_ in dict.fromkeys(pool.gpu.type for pool in site.pools):
        pools = [pool for pool in site.pools if pool.gpu.type == type_]
        flex = sum(pool.gpus_most for pool in pools if pool.gpu.provisioning == "flex-start")
        others = sum(pool.gpus_most for pool in pools) - flex
        metric = gpus[type_].quota
        if gpus[type_].on_demand and others:
            note = "used when spot is out of stock" if platform.nodes.spot else ""
            yield CloudQuota(metric, site.region, others, UNKNOWN, note)
        # Flex-start nodes count as preemptible nodes.
        if preemptible := flex + (others if platform.nodes.spot else 0):
            yield CloudQuota(f"PREEMPTIBLE_{metric}", site.region, preemptible, UNKNOWN)
    overflow = platform.overflow_in(site.region)
    if overflow is not None:
        nodes = sum(
            pool.nodes_most
            for pool in site.pools
            if pool.gpu.type != overflow and pool.gpu.count == 1
        )
        yield CloudQuota(
            gpus[overflow].quota,
            site.region,
            nodes,
            UNKNOWN,
            "overflow, if all others were out of stock",
        )


def _region(site: Site, platform: Platform, gpus: dict[str, GpuType]) -> Iterator[CloudQuota]:
    yield from _gpu_quotas(site, platform, gpus)
    nodes = sum(pool.nodes_most for pool in site.pools)
    yield CloudQuota(
        "vCPUs of Compute Engine",
        site.region,
        _vcpus(site, platform),
        UNKNOWN,
        "CPUS; A2_CPUS for A100 and A3_CPUS for H100",
    )
    yield CloudQuota("instances", site.region, nodes + site.general_most, UNKNOWN)
    for disk_type, (*_, disks) in disks_gib(site).items():
        name = "SSD_TOTAL_GB" if disk_type == "pd-balanced" else "HDB_TOTAL_GB"
        yield CloudQuota(name, site.region, disks, UNKNOWN, f"boot disks are {disk_type}")
    yield CloudQuota(
        "IN_USE_ADDRESSES",
        site.region,
        1,
        UNKNOWN,
        "for Cloud NAT, which adds more as needed; nodes do not have any",
    )
    # While a new revision starts, the old one is still running.
    instances = 2 * platform.api.max_instances
    cpu = instances * (platform.api.cpu + SIDECAR_CPU)
    yield CloudQuota("Cloud Run vCPUs", site.region, cpu, UNKNOWN, RUN_QUOTAS)
    yield CloudQuota(
        "Cloud Run GiB", site.region, instances * (platform.api.memory_gib + SIDECAR_GIB), UNKNOWN
    )
    nodes = sum(instance.nodes for instance in redis(platform) if instance.region == site.region)
    yield CloudQuota("Memorystore nodes", site.region, nodes, UNKNOWN)


def _vcpus(site: Site, platform: Platform) -> int:
    general = _read_vcpus(platform.nodes.general.machine_type) * site.general_most
    return general + sum(pool.machine.vcpus * pool.nodes_most for pool in site.pools)


def _read_vcpus(machine: str) -> int:
    tail = machine.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0


def _peak_of(model: str, sites: Sequence[Site]) -> float:
    workers = [members for site in sites for members in site.workers if members.model.name == model]
    return sum(members.requests_peak_per_s * members.rate.items_per_request for members in workers)


@dataclass(frozen=True)
class Change:
    """A setting that is lower than the autoscaler's request at the peak."""

    where: str
    setting: str
    now: int
    needed: int


@dataclass(frozen=True)
class DeployPlan:
    """The resources an apply creates, their cost, and the changes required at the peak."""

    sites: tuple[Site, ...]
    platform: Platform
    changes: tuple[Change, ...]
    topics: tuple[str, ...]
    subscriptions: tuple[str, ...]
    pools: dict[str, tuple[str, ...]]
    """Terraform's GPU node pools, by region."""
    quotas: tuple[CloudQuota, ...]
    costs: tuple[Cost, ...]
    on_demand_usd: tuple[float, float] | None
    notes: tuple[str, ...]
    sources: dict[str, Source]


def make_plan(
    catalog: Catalog,
    rates: DemandRates,
    platform: Platform,
    prices: Prices,
    gpus: dict[str, GpuType],
    buffer: int = 1,
    profiles: Profiles = (),
) -> DeployPlan:
    """Creates the plan.

    Args:
        catalog: models and workers. Models without a rate have replicas.min workers.
        buffer: warm places for each class of GPU nodes, as in `python -m infra.kubernetes
            --buffer`.

    Raises:
        ConfigurationError: the rates, variables, and catalog are inconsistent. The message names
            the field.
    """
    for group in catalog.worker_groups:
        check_gpu_memory(group, gpus)
    shares = _shares(rates, platform)
    sites = tuple(
        _site(name, share, catalog, rates, platform, gpus, buffer) for name, share in shares.items()
    )
    wanted, changes = _change_variables(platform, sites)
    changes += _too_few_replicas(sites)
    volumes = [
        volume(model, rates.models.get(model.name, ModelRate(mean_per_s=0)))
        for model in catalog.models
    ]
    made_topics, made_subscriptions = (
        topics(catalog.deployed, wanted),
        subscriptions(catalog.deployed, wanted),
    )
    costs = cost_table(sites, volumes, wanted, prices)
    used = dict.fromkeys(cost.source for cost in costs if cost.source)
    return DeployPlan(
        sites=sites,
        platform=wanted,
        changes=tuple(changes),
        topics=tuple(made_topics),
        subscriptions=tuple(made_subscriptions),
        pools={
            site.region: tuple(gpu_pools(catalog.deployed, wanted, site.region, gpus))
            for site in sites
        },
        quotas=tuple(
            quotas(sites, wanted, volumes, gpus, len(made_topics), len(made_subscriptions))
        ),
        costs=tuple(costs),
        on_demand_usd=on_demand_usd(sites, prices),
        notes=(
            *_notes(catalog, rates, wanted, sites),
            *_memory_notes(catalog, rates, gpus),
            *_host_notes(sites),
            *reply_notes(volumes, wanted, prices),
        ),
        sources={name: prices.sources[name] for name in used},
    )


def _shares(rates: DemandRates, platform: Platform) -> dict[str, float]:
    if not rates.regions:
        return dict.fromkeys(platform.regions, 1 / len(platform.regions))
    if set(rates.regions) != set(platform.regions):
        planned = ", ".join(sorted(platform.regions))
        raise ConfigurationError(
            f"rates: regions {', '.join(sorted(rates.regions))} differ from the plan's "
            f"regions: {planned}",
            field="regions",
        )
    return {name: rates.regions[name] for name in platform.regions}


def _site(
    region: str,
    share: float,
    catalog: Catalog,
    rates: DemandRates,
    platform: Platform,
    gpus: dict[str, GpuType],
    buffer: int,
) -> Site:
    workers = [
        members
        for group in catalog.worker_groups
        for members in size_workers(
            group, lambda model: _rate_of(model, rates), share, region, rates
        )
    ]
    return size_site(region, share, workers, rates, platform, gpus, buffer)


def _rate_of(model: Model, rates: DemandRates) -> ModelRate:
    """Returns the load on a model's workers.

    If its canary is rolled back, the stable workers take over its whole load.
    """
    rate = rates.models.get(model.public_name, ModelRate(mean_per_s=0))
    if not isinstance(model, Revision):
        return rate
    share = model.canary.share
    part = {"mean_per_s": rate.mean_per_s * share, "peak_per_s": rate.peak * share}
    return rate.model_copy(update=part)


def _change_variables(platform: Platform, sites: Sequence[Site]) -> tuple[Platform, list[Change]]:
    """Returns the variables that the autoscaler needs at the peak, and the changes."""
    changes: list[Change] = []

    def at_least(setting: str, now: int, needed: int) -> int:
        if needed > now:
            changes.append(Change("tfvars", setting, now, needed))
        return max(now, needed)

    instances = at_least(
        "api.max_instances", platform.api.max_instances, max(site.api_peak for site in sites)
    )
    inboxes = at_least(
        "inboxes.per_region", platform.inboxes.per_region, _inboxes_of_region(instances, platform)
    )
    most_slots = max(1, MAX_REPLY_SUBSCRIPTIONS // (inboxes * len(sites)) - 1)
    slots = _reduce_slots(platform, most_slots)
    changes += [
        Change("tfvars", f"inboxes.{name}", getattr(platform.inboxes, name), most_slots)
        for name in slots
    ]
    nodes = platform.nodes
    max_nodes = max(site.general_most for site in sites)
    max_nodes = at_least("nodes.general.max", nodes.general.max, max_nodes)
    general = nodes.general.model_copy(update={"max": max_nodes})
    max_gpus, regions = _gpu_limits(platform, sites, at_least)
    update = {
        "api": platform.api.model_copy(update={"max_instances": instances}),
        "inboxes": platform.inboxes.model_copy(update={"per_region": inboxes, **slots}),
        "nodes": nodes.model_copy(update={"general": general, "max_gpus": max_gpus}),
        "regions": regions,
    }
    return platform.model_copy(update=update), changes


def _gpu_limits(
    platform: Platform, sites: Sequence[Site], at_least: Callable[[str, int, int], int]
) -> tuple[int, dict[str, Region]]:
    """Returns the limit for all regions, and the regions, some of which have a separate limit."""
    max_gpus, regions = platform.nodes.max_gpus, dict(platform.regions)
    if platform.nodes.compute_classes:
        return max_gpus, regions
    needed = {
        site.region: max((pool.nodes_most for pool in site.pools), default=0) for site in sites
    }
    common = [count for name, count in needed.items() if regions[name].max_gpus is None]
    max_gpus = at_least("nodes.max_gpus", max_gpus, max(common, default=0))
    for name, region in regions.items():
        if region.max_gpus is not None:
            limit = at_least(f"regions.{name}.max_gpus", region.max_gpus, needed[name])
            regions[name] = region.model_copy(update={"max_gpus": limit})
    return max_gpus, regions


def _reduce_slots(platform: Platform, most_slots: int) -> dict[str, int]:
    """Returns the slot settings that exceed `most_slots`, reduced to that limit."""
    configured = {name: getattr(platform.inboxes, name) for name in ("slots", "kept_slots")}
    return {
        name: most_slots
        for name, value in configured.items()
        if value is not None and value > most_slots
    }


def _inboxes_of_region(instances: int, platform: Platform) -> int:
    needed = inboxes_for(instances, platform.batches.instances)
    if needed > INBOX_STRIDE:
        raise ConfigurationError(
            f"api.max_instances: {instances} instances per region need {needed} inboxes, but "
            f"a region has at most {INBOX_STRIDE}; split the load across more regions",
            field="api.max_instances",
        )
    return needed


def _too_few_replicas(sites: Sequence[Site]) -> list[Change]:
    """Returns the models for which a region's autoscaler needs more than replicas.max workers."""
    replicas: dict[str, tuple[int, int]] = {}
    for members in (members for site in sites for members in once(site.workers)):
        name = f"workers.{members.group.name}" if members.group.is_shared else members.model.name
        replicas[name] = (
            members.group.replicas.max,
            max(members.pods_most, replicas.get(name, (0, 0))[1]),
        )
    return [
        Change("models.yaml", f"{name}: replicas.max", now, needed)
        for name, (now, needed) in replicas.items()
        if needed > now
    ]


def _notes(
    catalog: Catalog, rates: DemandRates, platform: Platform, sites: Sequence[Site]
) -> list[str]:
    notes = []
    without = [model.name for model in catalog.models if model.name not in rates.models]
    if without:
        notes.append(f"no rate is given for {', '.join(without)}: planned without load")
    if len(sites) > 1:
        split = (
            "evenly, because the rates name no regions"
            if not rates.regions
            else "as specified in the rates"
        )
        notes.append(
            f"requests spread over the regions {split}; a region that also takes over another's "
            "needs more"
        )
    if rates.api_requests_per_s is None:
        notes.append(
            "the API is sized by its concurrency alone; set api_requests_per_s, the rate of one "
            "instance"
        )
    notes += _distance_notes(rates, sites)
    gpus: dict[str, int] = {}
    for pool in (pool for site in sites for pool in site.pools):
        key = f"{pool.gpu.type} in {pool.region}"
        gpus[key] = gpus.get(key, 0) + pool.gpus_most
    for place, count in gpus.items():
        if platform.nodes.compute_classes and count > AUTO_PROVISIONED_GPUS:
            notes.append(
                f"{count} GPUs of {place}, but ComputeClasses may make {AUTO_PROVISIONED_GPUS} of "
                "a type"
            )
    return notes


def _memory_notes(catalog: Catalog, rates: DemandRates, gpus: dict[str, GpuType]) -> Iterator[str]:
    """Yields workers whose custom models used more memory than the workers have."""
    for group in catalog.worker_groups:
        if isinstance(group.models[0], Revision):
            continue
        peak = sum(_rate_of(model, rates).peak_memory_bytes or 0 for model in group.models)
        processes = processes_of(group.models)
        needed_mib, has_mib = processes * peak / 2**20, memory_mib(group.gpu, gpus)
        if needed_mib > has_mib:
            yield (
                f"{group.name}: {processes} processes of a worker take up to {needed_mib:,.0f} MiB "
                f"of memory, but it has {has_mib:,} MiB (infra/kubernetes/placement.py)"
            )


def _host_notes(sites: Sequence[Site]) -> Iterator[str]:
    """Yields models whose GPUs compute faster than the I/O processes of their workers."""
    workers = {members.model.name: members for site in sites for members in site.workers}
    for name, members in workers.items():
        host_s, gpu = members.rate.host_seconds_per_item, members.model.gpu
        if host_s is None or not 0 < members.gpu_service_s < members.service_s:
            continue
        note = f"{name}: a worker's I/O process handles {1 / host_s:,.0f} items/s"
        if gpu.type == "none":
            yield f"{note}, which limits the worker; the number of workers allows for that"
            continue
        share = math.ceil(gpu.share * members.service_s / members.gpu_service_s)
        yield (
            f"{note}, but its part of the GPU computes {1 / members.gpu_service_s:,.0f}/s; set "
            f"gpu.share: {share} so that {share} workers share each GPU (now {gpu.share})"
        )


def _distance_notes(rates: DemandRates, sites: Sequence[Site]) -> list[str]:
    """Returns notes on the effects of a distant broker."""
    with_load = [members for site in sites for members in site.workers if members.processes_peak]
    if not with_load:
        return []
    round_trip_s = rates.broker_round_trip_s
    slowest = max(with_load, key=lambda members: members.repeated_s)
    notes = [
        f"held: jobs of a priority held by a worker process, {round_trip_s:g} s from the "
        f"broker and back; {slowest.model.name} holds the most work, which takes "
        f"{slowest.repeated_s:.2g} s again if it dies"
    ]
    too_far = {
        members.model.name: members.most_busy for members in with_load if members.most_busy < 1
    }
    for name, busy in too_far.items():
        notes.append(
            f"{name}: the broker is too far (broker_round_trip_s: {round_trip_s:g}): a worker "
            f"holds at most a second of work beyond two batches, so it is busy for at most "
            f"{busy:.0%} of the time; the number of workers allows for that"
        )
    return notes
