"""Calculates workers, GPUs, nodes, and API instances per model, region, and node class.

The number of workers follows from the load, the autoscaler's target utilization (decision 43), and
the wait that the deadline allows. Quotas and limits also allow for what the autoscaler requests
when arrival rates vary. A model's workers are servers of a single queue, because all of them pull
from one subscription. Arrivals are assumed to be Poisson and service times exponential (M/M/c). One
model's batches vary less than that, and waits in M/D/c are shorter than in M/M/c at the same load,
so the result is conservative. With continuous batching, the servers are the slots across all
workers, each running at the speed of a slot in a full worker. Workers that serve several models
also act as servers of one queue. The models' loads are added up, each wait is as long as the
longest full batch of any model, and the shortest slack applies. Not modeled: a request whose items
all arrive at once and don't fit in a single batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from infra.kubernetes.deployment import GpuType, Machine, gpu_class, zones_with
from infra.kubernetes.placement import CPU_ONLY, is_standard, processes_of
from penstock_planning.autoscaled import gpu_nodes, most_workers, usual_workers
from penstock_planning.deploy.platform_variables import INSTANCES_TO_INBOXES, Platform
from penstock_planning.deploy.rates import DemandRates, ModelRate
from penstock_planning.item_load import batch_items, job_items
from shared.errors import ConfigurationError
from shared.models.catalog import Model, WorkerGroup
from shared.models.entry import Gpu
from shared.models.service_rate import count_held_messages, messages_ahead, refill_s

CPUS_OF_A_WORKER = int(CPU_ONLY["cpu"])
"""CPUs of a worker without a GPU."""


def servers_needed(
    load: float,
    service_s: float,
    wait_s: float,
    *,
    late_share: float,
    places: int = 1,
) -> int:
    """Returns the minimum number of servers that satisfies both limits.

    Args:
        load: offered load in Erlangs: arrivals per second x server seconds per arrival.
        service_s: seconds for which an arrival occupies a server, or one of its places.
        wait_s: seconds that an arrival may wait for a server. Above 0.
        late_share: share of arrivals that may wait longer.
        places: places per server, if items join and leave one at a time. An arrival waits for any
            place on any server, and each place does an equal share of the server's work.

    Returns:
        0 if there is no load, otherwise at least 1. More load never results in fewer servers.
    """
    if load <= 0:
        return 0
    servers = max(1, usual_workers(load))
    while late(servers * places, load * places, service_s, wait_s) > late_share:
        servers += 1
    return servers


def late(servers: int, load: float, service_s: float, wait_s: float) -> float:
    """Returns the share of arrivals that wait longer than `wait_s`.

    P(W > t) = C(c, a) exp(-(c - a) t / s). Source: Gross, Shortle, Thompson, Harris: Fundamentals
    of Queueing Theory, section "Multiserver queues (M/M/c)".
    """
    if load >= servers:
        return 1.0
    return erlang_c(servers, load) * math.exp(-(servers - load) * wait_s / service_s)


def erlang_c(servers: int, load: float) -> float:
    """Returns the share of arrivals that find all servers busy, by way of the loss formula B.

    Source: A. K. Erlang, 1917.

    B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)), and C = B / (1 - (a / c) (1 - B)), for a < c.
    """
    lost = 1.0
    for count in range(1, servers + 1):
        lost = load * lost / (count + load * lost)
    return lost / (1 - load / servers * (1 - lost))


def mean_wait_s(servers: int, load: float, service_s: float) -> float:
    """Returns the mean wait in seconds: C(c, a) s / (c - a), for a < c."""
    return erlang_c(servers, load) * service_s / (servers - load) if load else 0.0


@dataclass(frozen=True)
class Workers:
    """A model's workers in a region. Processes and pods may also serve other models."""

    model: Model
    group: WorkerGroup
    region: str
    rate: ModelRate
    requests_mean_per_s: float
    requests_peak_per_s: float
    computed_peak_per_s: float
    """Items per second at the peak that are not served from the cache."""
    service_s: float
    """Seconds per item for a full worker whose GPU has no free share."""
    gpu_service_s: float
    """The same if the worker's I/O process took no time."""
    batch: int
    processes_mean: int
    processes_peak: int
    pods_mean: int
    pods_peak: int
    pods_most: int
    """Workers that the autoscaler requests at the peak, when the load varies or workers are
    catching up.
    """
    answer_s: float
    """Seconds from request to response at the peak, without hits: network, mean wait, one batch."""
    held_jobs: int
    """Maximum number of jobs per priority that one process holds
    (shared/models/service_rate.py).
    """
    most_busy: float
    """Share of time during which a process can run, no matter how much work is waiting.

    Below 1 if the broker is so far away that the process would have to hold more jobs than allowed.
    """
    repeated_s: float
    """Process seconds needed for the jobs that a process holds. This work is lost if the process
    dies.
    """

    @property
    def batch_s(self) -> float:
        """Worker seconds for a full batch."""
        return self.batch * self.service_s


def once(workers: Iterable[Workers]) -> list[Workers]:
    """Returns one member from each group of workers, so that its pods are counted once."""
    return list({(members.region, members.group.name): members for members in workers}.values())


@dataclass(frozen=True)
class Pool:
    """A region's GPU node class: its machines, and their number at the mean, peak, and maximum."""

    region: str
    gpu: Gpu
    node: GpuType
    nodes_mean: int
    nodes_peak: int
    nodes_most: int

    @property
    def machine(self) -> Machine:
        return self.node.machine(self.gpu.count)

    @property
    def gpus_most(self) -> int:
        return self.nodes_most * self.gpu.count

    @property
    def name(self) -> str:
        """Terraform's name for the on-demand pool.

        The other pools' names end in `-spot` and `-on-<overflow>`.
        """
        return gpu_class(self.gpu)


@dataclass(frozen=True)
class Site:
    """A region's size."""

    region: str
    share: float
    """Share of all requests."""
    workers: tuple[Workers, ...]
    pools: tuple[Pool, ...]
    general_mean: int
    general_peak: int
    general_most: int
    api_mean: int
    api_peak: int


@dataclass(frozen=True)
class _Hand:
    """The jobs held by a worker process."""

    jobs: int
    most_busy: float
    work_s: float


@dataclass(frozen=True)
class _Demand:
    """A model's demand on its workers in one region."""

    model: Model
    rate: ModelRate
    mean_per_s: float
    peak_per_s: float
    service_s: float
    gpu_service_s: float
    batch: int
    spare_s: float
    hand: _Hand

    def load(self, requests_per_s: float) -> float:
        """Returns the load in Erlangs, which is the number of workers it keeps busy."""
        computed_per_s = requests_per_s * self.rate.items_per_request * (1 - self.rate.hit_share)
        return computed_per_s * self.service_s / self.hand.most_busy


def _demand(model: Model, rate: ModelRate, share: float, rates: DemandRates) -> _Demand:
    gpu_service_s, batch = _gpu_service_s(model, rate), batch_items(model, rate)
    service_s = max(gpu_service_s, (rate.host_seconds_per_item or 0.0) * processes_of([model]))
    trips_s = 2 * rates.broker_round_trip_s
    return _Demand(
        model=model,
        rate=rate,
        mean_per_s=rate.mean_per_s * share,
        peak_per_s=rate.peak * share,
        service_s=service_s,
        gpu_service_s=gpu_service_s,
        batch=batch,
        spare_s=_spare_s(model, batch, batch * service_s, trips_s),
        hand=_hand(model, rate, service_s, batch, rates.broker_round_trip_s),
    )


def size_workers(
    group: WorkerGroup,
    rate_of: Callable[[Model], ModelRate],
    share: float,
    region: str,
    rates: DemandRates,
) -> list[Workers]:
    """Returns the workers for the fraction `share` of their models' rates, by model.

    Offered load = items per second x (1 - hit share) x seconds per item. There are enough workers
    to keep utilization at the target and the share of requests that wait past the deadline at or
    below `late_share` (Erlang C). With time-sharing, each of n workers gets an n-th of a GPU: with
    n busy places, an item takes n times as long as with one, plus the sharing overhead. Texts join
    and leave between steps, so they wait for a place on a worker rather than for a batch. If their
    worker also serves other models, they wait for the worker itself.

    Raises:
        ConfigurationError: a full batch takes longer than the deadline.
    """
    demands = [_demand(model, rate_of(model), share, rates) for model in group.models]
    loaded = [demand for demand in demands if demand.peak_per_s] or demands
    service_s = max(demand.batch * demand.service_s for demand in loaded)
    in_steps = not group.is_shared and group.models[0].definition.shares_weights
    places = demands[0].batch if in_steps else 1

    def processes(load: float) -> int:
        spare_s = min(demand.spare_s for demand in loaded)
        return servers_needed(load, service_s, spare_s, late_share=rates.late_share, places=places)

    def pods(processes: int) -> int:
        return max(group.replicas.min, math.ceil(processes / processes_of(group.models)))

    load = sum(demand.load(demand.peak_per_s) for demand in demands)
    at_peak = processes(load)
    at_mean = processes(sum(demand.load(demand.mean_per_s) for demand in demands))
    computed_per_s = sum(demand.peak_per_s * (1 - demand.rate.hit_share) for demand in demands)
    max_pods = most_workers(load / processes_of(group.models), computed_per_s)
    wait_s = mean_wait_s(at_peak * places, load * places, service_s)
    return [
        Workers(
            model=demand.model,
            group=group,
            region=region,
            rate=demand.rate,
            requests_mean_per_s=demand.mean_per_s,
            requests_peak_per_s=demand.peak_per_s,
            computed_peak_per_s=(
                demand.peak_per_s * demand.rate.items_per_request * (1 - demand.rate.hit_share)
            ),
            service_s=demand.service_s,
            gpu_service_s=demand.gpu_service_s,
            batch=demand.batch,
            processes_mean=at_mean,
            processes_peak=at_peak,
            pods_mean=pods(at_mean),
            pods_peak=pods(at_peak),
            pods_most=max(pods(at_peak), max_pods),
            answer_s=2 * rates.broker_round_trip_s + wait_s + demand.batch * demand.service_s,
            held_jobs=demand.hand.jobs,
            most_busy=demand.hand.most_busy,
            repeated_s=demand.hand.work_s,
        )
        for demand in demands
    ]


def _hand(
    model: Model, rate: ModelRate, service_s: float, batch: int, round_trip_s: float
) -> _Hand:
    """Follows the workers' own rule: two batches, plus the work done until a permit is reused.

    By Little's law, a process that is always busy holds its rate times (batch time + permit reuse
    time). A model that computes in steps holds a fixed number.
    """
    in_steps = model.definition.shares_weights
    held = count_held_messages(model.batch.max_items, 1, in_steps=in_steps)
    if not service_s:
        return _Hand(held, 1.0, 0.0)
    in_job = min(rate.items_per_request, job_items(model, rate))
    jobs_per_s, batch_s = 1 / service_s / in_job, batch * service_s
    gap_s = refill_s(round_trip_s) if round_trip_s else 0.0
    if not in_steps:
        held += messages_ahead(jobs_per_s, gap_s, batch_s)
    most_busy = min(1.0, held / (jobs_per_s * (gap_s + batch_s)))
    return _Hand(held, most_busy, held / jobs_per_s)


def _gpu_service_s(model: Model, rate: ModelRate) -> float:
    """Returns the seconds per item on the model's GPU share, which may not be the measured one."""
    share = model.gpu.share if model.gpu.type != "none" else 1
    service_s = rate.item_s or 0.0
    if share == rate.measured_share:
        return service_s
    return service_s * share / rate.measured_share / rate.kept_when_sharing


def _spare_s(model: Model, batch: int, batch_s: float, trips_s: float) -> float:
    """Returns how long a request may wait for its batch and still meet its deadline."""
    spare_s = model.deadline.default_s - trips_s - batch_s
    if spare_s <= 0:
        raise ConfigurationError(
            f"models.{model.name}: seconds_per_item: a full batch of {batch} takes "
            f"{batch_s:.3g} s on its share of the GPU, but the deadline (deadline.default_s) "
            f"is {model.deadline.default_s:g} s, so no number of workers is enough; reduce "
            "batch.max_items or gpu.share",
            field=f"models.{model.name}.seconds_per_item",
        )
    return spare_s


def size_site(
    region: str,
    share: float,
    workers: Sequence[Workers],
    rates: DemandRates,
    platform: Platform,
    gpus: dict[str, GpuType],
    buffer: int,
) -> Site:
    """Returns nodes and API instances for a region that gets the fraction `share` of all requests.

    Models are assumed to peak at the same time. An additional `buffer` places per class are kept
    warm.

    Raises:
        ConfigurationError: a model's GPU type, or the overflow type, is not available in any
        allowed zone of the region, or is not sold under the terms that the platform's variables
        require.
    """
    classes: dict[Gpu, list[Workers]] = {}
    deployed = once(workers)
    for members in deployed:
        if members.model.gpu.type != "none":
            classes.setdefault(members.model.gpu, []).append(members)
    _check_gpus(region, list(classes), platform, gpus)
    pools = tuple(_pool(region, members, gpus, buffer) for members in classes.values())
    without = [members for members in deployed if members.model.gpu.type == "none"]
    fits = _cpu_workers_per_node(platform.nodes.general.machine_type)
    least = platform.nodes.general.min
    return Site(
        region=region,
        share=share,
        workers=tuple(workers),
        pools=pools,
        general_mean=least + math.ceil(sum(members.pods_mean for members in without) / fits),
        general_peak=least + math.ceil(sum(members.pods_peak for members in without) / fits),
        general_most=least + math.ceil(sum(members.pods_most for members in without) / fits),
        api_mean=_api_instances(workers, rates, platform, at_peak=False),
        api_peak=_api_instances(workers, rates, platform, at_peak=True),
    )


def _check_gpus(
    region: str, requested: Sequence[Gpu], platform: Platform, gpus: dict[str, GpuType]
) -> None:
    variables = platform.regions[region]
    among = variables.zones
    for gpu in requested:
        zones_with(gpu.type, region, gpus, among)
        is_sold = platform.nodes.spot or gpus[gpu.type].on_demand
        if not is_sold and is_standard(gpu) and gpu.type not in variables.reservations:
            raise ConfigurationError(
                f"nodes.spot: {gpu.type} is not sold on demand, but nodes.spot is false",
                field="nodes.spot",
            )
    for type_, reservation in variables.reservations.items():
        if reservation.zone not in gpus[type_].zones_in(region):
            raise ConfigurationError(
                f"regions.{region}.reservations.{type_}: {reservation.zone} is not a zone in "
                f"{region} with this GPU (infra/kubernetes/gpus.yaml)",
                field=f"regions.{region}.reservations",
            )
    overflow = platform.overflow_in(region)
    if requested and overflow is not None:
        if not gpus[overflow].on_demand:
            raise ConfigurationError(
                f"nodes.overflow: {overflow} is not sold on demand", field="nodes.overflow"
            )
        if not gpus[overflow].zones_in(region, among):
            raise ConfigurationError(
                f"regions.{region}: no zone has the overflow type {overflow} (nodes.overflow); "
                f"set regions.{region}.overflow to a different type or to none",
                field=f"regions.{region}.overflow",
            )


def _pool(region: str, members: Sequence[Workers], gpus: dict[str, GpuType], buffer: int) -> Pool:
    gpu = members[0].model.gpu
    mean, peak, maximum = (
        gpu_nodes(pods, buffer, gpu.share)
        for pods in zip(
            *((member.pods_mean, member.pods_peak, member.pods_most) for member in members),
            strict=True,
        )
    )
    return Pool(region, gpu, gpus[gpu.type], mean, peak, maximum)


def _cpu_workers_per_node(machine_type: str) -> int:
    """Returns the number of workers without a GPU that fit on one general node.

    One of the node's vCPUs is for system pods.
    """
    tail = machine_type.rpartition("-")[2]
    if not tail.isdigit():
        raise ConfigurationError(
            "nodes.general.machine_type: must end in its number of vCPUs, such as "
            f"e2-standard-4, got {machine_type!r}",
            field="nodes.general.machine_type",
        )
    return max(1, (int(tail) - 1) // CPUS_OF_A_WORKER)


def _api_instances(
    workers: Sequence[Workers], rates: DemandRates, platform: Platform, *, at_peak: bool
) -> int:
    """Returns the number of API instances, by Little's law.

    Requests in flight = rate x seconds until the response. Cache hits take almost no time.
    """
    in_flight = asked_per_s = 0.0
    for group in workers:
        per_s = group.requests_peak_per_s if at_peak else group.requests_mean_per_s
        asked_per_s += per_s
        # A request waits if even one of its items must be computed.
        in_flight += (
            per_s
            * min(1.0, group.rate.items_per_request * (1 - group.rate.hit_share))
            * group.answer_s
        )
    by_concurrency = math.ceil(in_flight / platform.api.concurrency)
    by_rate = math.ceil(asked_per_s / rates.api_requests_per_s) if rates.api_requests_per_s else 0
    return max(platform.api.min_instances, by_concurrency, by_rate)


def inboxes_for(instances: int, runners: int) -> int:
    """Returns the number of inboxes for at most this many API instances and batch runners."""
    return (instances + runners) * INSTANCES_TO_INBOXES
