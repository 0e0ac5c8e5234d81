"""The quotas and limits of a plan: amounts to request, and known defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infra.deploy.costs import SIDECAR_CPU, SIDECAR_GIB, disks_gib
from infra.deploy.platform_variables import Platform
from infra.deploy.sizing import Site
from infra.deploy.topology import redis
from infra.deploy.volumes import Volume
from infra.kubernetes.deployment import GpuType

UNKNOWN = "unknown"
RUN_QUOTAS = "depends on the region; cloud.google.com/run/docs/configuring/max-instances-limits"
SUBSCRIPTIONS_OF_A_TOPIC = 10_000
"""docs.cloud.google.com/bigquery/docs/analytics-hub-introduction, limitations."""
SUBSCRIPTIONS_OF_A_PROJECT = 10_000
"""As in infra/terraform/platform/variables.tf, from old copies of Pub/Sub's page of quotas."""
INSERT_MB_PER_S = {"EU": 1000, "US": 1000}
"""Else 300 (docs.cloud.google.com/bigquery/quotas)."""


@dataclass(frozen=True)
class Quota:
    """One quota: where it holds, how much is needed, and the default if a source says one."""

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
) -> list[Quota]:
    """What to ask for before the first apply: of each region, then of the project."""
    found = [quota for site in sites for quota in _region(site, platform, gpus)]
    total = sum(pool.nodes_peak for site in sites for pool in site.pools)
    if total:
        found.append(Quota("GPUS_ALL_REGIONS", "project", total, UNKNOWN, "spot or not"))
    limit = str(SUBSCRIPTIONS_OF_A_PROJECT)
    found.append(
        Quota("Pub/Sub topics", "project", topic_count, limit, "of older copies of the page")
    )
    found.append(
        Quota(
            "Pub/Sub subscriptions",
            "project",
            subscription_count,
            limit,
            "of older copies of the page",
        )
    )
    per_topic = platform.inboxes.made_slots
    found.append(
        Quota("Pub/Sub subscriptions of a topic", "inbox", per_topic, str(SUBSCRIPTIONS_OF_A_TOPIC))
    )
    rows_mb = sum(_peak_of(one.model, sites) * one.row_bytes for one in volumes) / 1e6
    inserts = str(INSERT_MB_PER_S.get(platform.dataset_location, 300))
    found.append(
        Quota("BigQuery inserts, MB/s", platform.dataset_location, round(rows_mb, 3), inserts)
    )
    if platform.domain is not None:
        found.append(Quota("static addresses", "global", 1, UNKNOWN, "of the load balancer"))
    return found


def _region(site: Site, platform: Platform, gpus: dict[str, GpuType]) -> Iterator[Quota]:
    for type_ in dict.fromkeys(pool.gpu.type for pool in site.pools):
        pools = [pool for pool in site.pools if pool.gpu.type == type_]
        flex = sum(pool.nodes_peak for pool in pools if pool.gpu.provisioning == "flex-start")
        nodes = sum(pool.nodes_peak for pool in pools) - flex
        metric = gpus[type_].quota
        if gpus[type_].on_demand and nodes:
            note = "takes over when spot is out" if platform.nodes.spot else ""
            yield Quota(metric, site.region, nodes, UNKNOWN, note)
        # Flex-start nodes count as preemptible ones do.
        if preemptible := flex + (nodes if platform.nodes.spot else 0):
            yield Quota(f"PREEMPTIBLE_{metric}", site.region, preemptible, UNKNOWN)
    overflow = platform.overflow_in(site.region)
    if overflow is not None:
        nodes = sum(pool.nodes_peak for pool in site.pools if pool.gpu.type != overflow)
        yield Quota(
            gpus[overflow].quota,
            site.region,
            nodes,
            UNKNOWN,
            "overflow, were all others out of stock",
        )
    nodes = sum(pool.nodes_peak for pool in site.pools)
    yield Quota(
        "vCPUs of Compute Engine",
        site.region,
        _vcpus(site, platform, gpus),
        UNKNOWN,
        "CPUS; A2_CPUS for A100 and A3_CPUS for H100",
    )
    yield Quota("instances", site.region, nodes + site.general_peak, UNKNOWN)
    for disk_type, (_, disks) in disks_gib(site).items():
        name = "SSD_TOTAL_GB" if disk_type == "pd-balanced" else "HDB_TOTAL_GB"
        yield Quota(name, site.region, disks, UNKNOWN, f"boot disks are {disk_type}")
    yield Quota(
        "IN_USE_ADDRESSES",
        site.region,
        1,
        UNKNOWN,
        "of Cloud NAT, which adds more as it needs; nodes have none",
    )
    # While a new revision starts the old one still runs.
    instances = 2 * platform.api.max_instances
    cpu = instances * (platform.api.cpu + SIDECAR_CPU)
    yield Quota("Cloud Run vCPUs", site.region, cpu, UNKNOWN, RUN_QUOTAS)
    yield Quota(
        "Cloud Run GiB", site.region, instances * (platform.api.memory_gib + SIDECAR_GIB), UNKNOWN
    )
    nodes = sum(one.nodes for one in redis(platform) if one.region == site.region)
    yield Quota("Memorystore nodes", site.region, nodes, UNKNOWN)


def _vcpus(site: Site, platform: Platform, gpus: dict[str, GpuType]) -> int:
    general = _said_by_name(platform.nodes.general.machine_type) * site.general_peak
    return general + sum(gpus[pool.gpu.type].vcpus * pool.nodes_peak for pool in site.pools)


def _said_by_name(machine: str) -> int:
    tail = machine.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0


def _peak_of(model: str, sites: Sequence[Site]) -> float:
    workers = [one for site in sites for one in site.workers if one.model.name == model]
    return sum(one.requests_peak_per_s * one.rate.items_per_request for one in workers)
