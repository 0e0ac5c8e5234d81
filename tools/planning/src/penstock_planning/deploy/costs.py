"""The monthly cost table: each row has an amount, and its cost if the price is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import Prices
from penstock_planning.deploy.reply_costs import (
    THROUGHPUT,
    compute_billed_tib,
    replies_tib,
    reply_times,
)
from penstock_planning.deploy.sizing import Pool, Site, once
from penstock_planning.deploy.topology import redis
from penstock_planning.deploy.volumes import DAYS, HOURS, SECONDS, Volume, row_days
from shared.models.entry import Replies
from shared.usage.senders import ObjectSender
from shared.usage.writer import BATCH_ROWS

GIB = 2**30
MIN_ROW_BYTES = 1024
GENERAL_DISK_GIB = 50
"""Boot disk size in GiB, as in infra/terraform/modules/cluster/nodes.tf. Other disks are in
gpus.yaml.
"""
SIDECAR_CPU, SIDECAR_GIB = 0.5, 0.25
"""Resources of the API's metrics sidecar (infra/terraform/modules/region/api.tf)."""
RUNNER_CPU = 1
"""CPUs of a batch runner (infra/terraform/platform/batches.tf)."""
ARCHIVE_CPU = 1
"""CPUs of the row archive (infra/terraform/platform/row_archive.tf)."""
ARCHIVE_TABLES = 3
"""Tables whose objects are listed in each archive pass (infra/row_archive/__main__.py)."""
ARCHIVE_DAYS_MORE, ARCHIVE_DELETED_DAYS = 3, 7
"""How many days longer the archive keeps rows than BigQuery does, and how many days deleted objects
are still billed (infra/terraform/platform/row_archive.tf).
"""
PASS_WRITES, PASS_READS = 3, 2
"""Operations in a pass that finds rows, aside from listing and reading objects: two writes to the
list, and one file write. The list is read once, and so is the file when its day is merged
(infra/row_archive/archive.py).
"""
ARMOR_RULES = 4
"""Number of rules in the policy (infra/terraform/platform/balancer.tf)."""
REPLIES: Mapping[Replies, str] = {"direct": "direct replies", "slots": "replies to slots"}
JOB_DELIVERIES = 2
"""Each job is delivered to the workers' subscription and to the one for `batch` priority.

Messages dropped by a filter are billed too
(docs.cloud.google.com/pubsub/docs/subscription-message-filter).
"""


@dataclass(frozen=True)
class Cost:
    """A table row: the cost at the mean rate, and the cost if the peak lasted all month.

    If there is no amount, `lacks` names the missing input.
    """

    item: str
    place: str
    unit: str
    price_key: str
    mean: float | None
    peak: float | None
    mean_usd: float | None
    peak_usd: float | None
    source: str
    lacks: str = ""


def cost_table(
    sites: Sequence[Site], volumes: Sequence[Volume], platform: Platform, prices: Prices
) -> list[Cost]:
    """Returns all rows: each region's, then those for shared resources."""
    bill = _Bill(prices)
    for site in sites:
        _region(bill, site, platform)
    _runners(bill, platform)
    if platform.domain is not None:
        _balancer(bill, volumes)
    _messages(bill, volumes, platform)
    _rows(bill, sites, volumes, platform)
    _objects(bill, volumes, platform)
    _answers(bill, sites, volumes, platform)
    return bill.rows


class _Bill:
    """Looks up prices as rows are added.

    Rows with the same price share that price's free tier and price steps.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._billed_amounts: dict[tuple[str, str], list[float]] = {}
        self.rows: list[Cost] = []

    def add(
        self,
        item: str,
        place: str,
        unit: str,
        key: str,
        mean: float | None,
        peak: float | None = None,
        lacks: str = "",
    ) -> None:
        price = self._prices.prices.get(key)
        maximum = mean if peak is None else peak
        before = self._billed_amounts.setdefault((key, place), [0.0, 0.0])
        costs: list[float | None] = []
        for column, amount in enumerate((mean, maximum)):
            if not amount:
                costs.append(amount)  # zero units cost nothing at any price
                continue
            if price is None:
                costs.append(None)
                continue
            costs.append(price.cost_usd(place, amount, before[column]))
            before[column] += amount
        source = price.source if price is not None and costs[0] is not None else ""
        self.rows.append(
            Cost(item, place, unit, key, mean, maximum, costs[0], costs[1], source, lacks)
        )


def _region(bill: _Bill, site: Site, platform: Platform) -> None:
    place = site.region
    for pool in site.pools:
        kind = _kind(pool, platform)
        name = f"GPU nodes {pool.name}, {kind.replace('-', ' ')}"
        bill.add(
            name,
            place,
            "hour",
            _machine(pool, kind),
            pool.nodes_mean * pool.gpu.count * HOURS,
            pool.nodes_peak * pool.gpu.count * HOURS,
        )
    bill.add(
        "general nodes",
        place,
        "hour",
        f"machine/{platform.nodes.general.machine_type}/on-demand",
        site.general_mean * HOURS,
        site.general_peak * HOURS,
    )
    for type_, (mean, peak, _) in disks_gib(site).items():
        bill.add(f"boot disks of nodes, {type_}", place, "GiB-month", f"disk/{type_}", mean, peak)
    bill.add("GKE, cluster", place, "hour", "gke/cluster", HOURS)
    cpu, memory = platform.api.cpu + SIDECAR_CPU, platform.api.memory_gib + SIDECAR_GIB
    mean_s, peak_s = site.api_mean * SECONDS, site.api_peak * SECONDS
    bill.add("API on Cloud Run, CPU", place, "vCPU-second", "run/cpu", cpu * mean_s, cpu * peak_s)
    bill.add(
        "API on Cloud Run, memory",
        place,
        "GiB-second",
        "run/memory",
        memory * mean_s,
        memory * peak_s,
    )
    for instance in redis(platform):
        if instance.region == place:
            key = f"memorystore/{instance.node_type}"
            bill.add(
                f"Memorystore of the {instance.use}",
                place,
                "node-hour",
                key,
                instance.nodes * HOURS,
            )
    bill.add("Cloud NAT, gateway", place, "hour", "nat/gateway", HOURS)


def _runners(bill: _Bill, platform: Platform) -> None:
    """Adds the batch runners, a Cloud Run worker pool in the home region."""
    batches, place = platform.batches, platform.home
    if batches.instances:
        seconds = batches.instances * SECONDS
        cpu, memory = RUNNER_CPU * seconds, batches.memory_gib * seconds
        bill.add("batches on Cloud Run, CPU", place, "vCPU-second", "run-pool/cpu", cpu)
        bill.add("batches on Cloud Run, memory", place, "GiB-second", "run-pool/memory", memory)


def _balancer(bill: _Bill, volumes: Sequence[Volume]) -> None:
    """Adds a domain's costs, excluding data."""
    requests = sum(volume.requests for volume in volumes) / 1e6
    bill.add("load balancer, forwarding rule", "", "hour", "balancer/rule", HOURS)
    bill.add("Cloud Armor, policy", "", "month", "armor/policy", 1)
    bill.add("Cloud Armor, rules", "", "month", "armor/rule", ARMOR_RULES)
    bill.add("Cloud Armor, requests", "", "million", "armor/requests", requests)


def disks_gib(site: Site) -> dict[str, tuple[float, float, float]]:
    """Returns a region's node boot disks at the mean, peak, and maximum, keyed by disk type."""
    general = (site.general_mean, site.general_peak, site.general_most)
    disks = [("pd-balanced", GENERAL_DISK_GIB, general)]
    for pool in site.pools:
        nodes = (pool.nodes_mean, pool.nodes_peak, pool.nodes_most)
        disks.append((pool.node.disk_type, pool.machine.disk_gb, nodes))
    totals: dict[str, tuple[float, float, float]] = {}
    for type_, size_gib, (mean, peak, maximum) in disks:
        before = totals.get(type_, (0, 0, 0))
        totals[type_] = (
            before[0] + size_gib * mean,
            before[1] + size_gib * peak,
            before[2] + size_gib * maximum,
        )
    return totals


def _kind(pool: Pool, platform: Platform) -> str:
    if pool.gpu.provisioning == "flex-start":
        return "flex-start"
    return "spot" if platform.nodes.spot else "on-demand"


def _machine(pool: Pool, kind: str) -> str:
    return f"machine/{pool.node.choose_price(pool.gpu.count)}/{kind}"


def on_demand_usd(sites: Sequence[Site], prices: Prices) -> tuple[float, float] | None:
    """Returns the cost of non-spot GPU nodes, at the mean and peak. None if a price is missing."""
    total = [0.0, 0.0]
    for pool in (pool for site in sites for pool in site.pools):
        price = prices.prices.get(_machine(pool, "on-demand"))
        for place, nodes in enumerate((pool.nodes_mean, pool.nodes_peak)):
            hours = nodes * pool.gpu.count * HOURS
            cost = None if price is None else price.cost_usd(pool.region, hours)
            if cost is None:
                return None
            total[place] += cost
    return total[0], total[1]


def _messages(bill: _Bill, volumes: Sequence[Volume], platform: Platform) -> None:
    """Adds the messaging costs. Each publish and each delivery is billed."""
    times = 1 + JOB_DELIVERIES
    jobs = {
        volume.model: None
        if volume.job_bytes is None
        else compute_billed_tib(volume.jobs, volume.job_bytes, times)
        for volume in volumes
    }
    _traffic(bill, "jobs", times, jobs, "input_bytes")
    for replies, name in REPLIES.items():
        billed = {
            volume.model: replies_tib(volume, replies, platform)
            for volume in volumes
            if volume.replies == replies
        }
        _traffic(bill, name, reply_times(replies, platform), billed, "output_bytes")


def _traffic(
    bill: _Bill, name: str, times: int, billed_tib_of: Mapping[str, float | None], field: str
) -> None:
    known = [amount for amount in billed_tib_of.values() if amount is not None]
    unknown = [model for model, amount in billed_tib_of.items() if amount is None]
    deliveries = "1 delivery" if times == 2 else f"{times - 1} deliveries"
    item = f"Pub/Sub, {name}: 1 publish, {deliveries}"
    amount = None if unknown else sum(known, 0.0)
    bill.add(item, "", "TiB", THROUGHPUT, amount, lacks=_give(field, unknown))


def _rows(
    bill: _Bill, sites: Sequence[Site], volumes: Sequence[Volume], platform: Platform
) -> None:
    place = platform.dataset_location
    if platform.rows.archive:
        _archive(bill, sites, volumes, platform)
    else:
        inserted = sum(volume.items * max(MIN_ROW_BYTES, volume.row_bytes) for volume in volumes)
        bill.add("BigQuery, rows inserted", place, "200 MB", "bigquery/insert", inserted / 200e6)
    stored = sum(volume.items * volume.row_bytes for volume in volumes) * row_days() / DAYS
    bill.add(
        f"BigQuery, rows of {row_days():g} days",
        place,
        "GiB-month",
        "bigquery/storage",
        stored / GIB,
    )


def _archive(
    bill: _Bill, sites: Sequence[Site], volumes: Sequence[Volume], platform: Platform
) -> None:
    """Adds costs of rows written through a bucket: process, objects, load jobs (no inserts)."""
    home, place = platform.home, platform.storage_location
    cpu, memory = ARCHIVE_CPU + SIDECAR_CPU, platform.rows.memory_gib + SIDECAR_GIB
    bill.add("row archive on Cloud Run, CPU", home, "vCPU-second", "run/cpu", cpu * SECONDS)
    bill.add("row archive on Cloud Run, memory", home, "GiB-second", "run/memory", memory * SECONDS)
    rows = sum(volume.items for volume in volumes)
    writers = (
        platform.batches.instances
        + sum(
            site.api_mean + sum(workers.pods_mean for workers in once(site.workers))
            for site in sites
        ),
        platform.batches.instances
        + sum(
            site.api_peak + sum(workers.pods_peak for workers in once(site.workers))
            for site in sites
        ),
    )
    passes = ARCHIVE_TABLES * SECONDS / platform.rows.every_s
    # An object contains the rows from one linger period, up to one batch. No object is empty.
    mean, peak = (
        min(rows, count * SECONDS / ObjectSender.linger_s + rows / BATCH_ROWS) for count in writers
    )
    days_kept = row_days() + ARCHIVE_DAYS_MORE
    listings = passes + days_kept * ARCHIVE_TABLES * DAYS  # the days to merge are listed every day
    writes, reads = listings + PASS_WRITES * passes, PASS_READS * passes
    bill.add(
        "row archive, objects written and listed",
        place,
        "1,000",
        "objects/write",
        (mean + writes) / 1000,
        (peak + writes) / 1000,
    )
    bill.add(
        "row archive, objects read",
        place,
        "1,000",
        "objects/read",
        (mean + reads) / 1000,
        (peak + reads) / 1000,
    )
    # The objects that writers create are deleted, and so are a day's small files once they are
    # merged.
    packed = sum(volume.items * volume.packed_row_bytes for volume in volumes) / DAYS / GIB
    item = f"row archive, rows of {days_kept:g} days and what was deleted"
    days = days_kept + 2 * ARCHIVE_DELETED_DAYS
    bill.add(item, place, "GiB-month", "objects/storage", packed * days)
    bill.add("BigQuery, load jobs", platform.dataset_location, "job", "bigquery/load", passes)


def _objects(bill: _Bill, volumes: Sequence[Volume], platform: Platform) -> None:
    place, days = platform.storage_location, platform.objects_days
    unknown = [volume.model for volume in volumes if volume.results_bytes is None]
    inputs = sum(volume.inputs_bytes for volume in volumes) * days.inputs / DAYS / GIB
    bill.add(f"large inputs of {days.inputs} days", place, "GiB-month", "objects/storage", inputs)
    results = (
        None
        if unknown
        else sum(volume.results_bytes or 0.0 for volume in volumes) * days.results / DAYS / GIB
    )
    lacks = _give("output_bytes", unknown)
    bill.add(
        f"large results of {days.results} days",
        place,
        "GiB-month",
        "objects/storage",
        results,
        lacks=lacks,
    )


def _answers(
    bill: _Bill, sites: Sequence[Site], volumes: Sequence[Volume], platform: Platform
) -> None:
    unknown = [volume.model for volume in volumes if volume.answered_bytes is None]
    lacks = _give("output_bytes", unknown)
    total = None if unknown else sum(volume.answered_bytes or 0.0 for volume in volumes) / GIB
    unasked = [volume.model for volume in volumes if volume.asked_bytes is None]
    lacks_asked = _give("input_bytes", unasked)
    requested = None if unasked else sum(volume.asked_bytes or 0.0 for volume in volumes) / GIB
    for site in sites:
        amount = None if total is None else total * site.share
        bill.add(
            "responses to the internet", site.region, "GiB", "egress/internet", amount, lacks=lacks
        )
        if platform.domain is not None:
            data = "load balancer, requests and responses"
            total_gib = (
                None if amount is None or requested is None else amount + requested * site.share
            )
            bill.add(
                data, site.region, "GiB", "balancer/data", total_gib, lacks=lacks or lacks_asked
            )


def _give(field: str, models: Sequence[str]) -> str:
    return f"set {field} of {', '.join(models)}" if models else ""


def totals(rows: Sequence[Cost]) -> tuple[float, float]:
    """Returns the total for rows with a price, at the mean and peak."""
    return sum(row.mean_usd or 0.0 for row in rows), sum(row.peak_usd or 0.0 for row in rows)


def without_price(rows: Sequence[Cost]) -> Iterator[Cost]:
    """Yields the rows without a price, which are missing from the totals."""
    return (row for row in rows if row.mean_usd is None)
