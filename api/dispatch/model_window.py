"""Limits unacknowledged jobs per model and priority so that no tenant can fill a topic.

A topic delivers jobs in order of arrival, regardless of tenant, so once workers are full, any
further jobs from one tenant delay all other tenants. Jobs beyond the window wait here, ordered by
deadline within each tenant, and leave as replies arrive.

- The size follows from Little's law: the workers' rate multiplied by the time a job may spend in
  the window. That time covers the round trip to the broker, a short wait there, one running batch,
  and one ready batch.
- While the window has room, any job may leave the queue. Among waiting jobs, those from the tenant
  with the smallest share of the window relative to its weight go first.
- A tenant can always use its fair share, and a tenant with nothing in the window can always
  publish. The window may therefore be exceeded briefly, until replies to other tenants arrive.
- Through Redis, other instances report how many items they hold. A tenant's share is divided among
  instances in proportion to how many of its items each one has.

Ordering jobs by item count is imprecise. Workers order the jobs they hold by amount of work. With
round robin here, a tenant with small items would complete as many items as other tenants but less
work.

Each instance has a leased field in a hash per model and priority. A dead instance is forgotten when
its leases expire. Requests never wait for Redis. While Redis is unreachable, the last known state
applies until the lease expires. After that, each instance limits itself to the service rate that it
has measured, which is its share of the workers' rate.

An instance without work for a model does not report on that model. The pauses of each instance are
proportional to the number of instances, so the load on Redis does not grow with the square of that
number.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import time
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import msgspec
from prometheus_client import Counter, Gauge

from api import metrics
from api.fair_room import Demand
from shared.broker.transport import SmoothedDuration
from shared.errors import MALFORMED, DeadlineExceeded, Unavailable
from shared.models.catalog import Model
from shared.models.service_rate import ServiceRate
from shared.process.concurrency import BackgroundTask, sleep_until_turn
from shared.stores.redis_client import RedisLink, load_script
from shared.tenants.plan import Priority
from shared.tracing.spans import STAGE, span

DIGEST_BYTES = 8
BATCHES_HELD = 2
"""Number of batches per worker: one running and one ready."""
ROUND_TRIPS = 2
"""A job's trip to the worker through the broker, and its reply's trip back."""

Key = tuple[str, Priority]
"""Model and priority."""

PAUSE_S, PAUSE_PER_INSTANCE_S = 0.25, 0.01
"""Pause between two exchanges: the minimum, and the increment per additional instance."""
LEASE_PAUSES = 8
"""Number of pauses without a report after which an instance is considered dead."""
MAX_TENANTS = 32
"""Maximum number of tenants reported individually, starting with the largest.

The others are reported only as the sum of their weights.
"""

ERRORS = Counter(
    "penstock_window_errors_total",
    "Failed round trips to Redis about publish windows.",
    ["operation"],
)
UP = Gauge("penstock_window_redis_up", "1 while Redis is being asked about publish windows.")

_EXCHANGE = load_script("api/dispatch/model_window.lua")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Other instances' state for one model and priority."""

    instances: int = 0
    size: float = 0.0
    """Number of items that other instances add to the window size."""
    published: int = 0
    tenants: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Each tenant's weight and items, keyed by tenant digest."""
    other_weights: float = 0.0
    """Sum of the weights of tenants not in `tenants`."""
    is_guess: bool = False
    """True if only the number of instances is known, from an earlier report."""


@dataclass(order=True, slots=True)
class _Waiting:
    """A waiting job, ordered by the latest time at which it may leave."""

    until_s: float
    number: int
    items: int = field(compare=False)
    left: asyncio.Future[None] = field(compare=False)


class _Tenant:
    """One tenant's jobs, counted in items."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.published = 0
        self.held = 0
        self.waiting: list[_Waiting] = []

    @cached_property
    def digest(self) -> str:
        return digest_of(self.name)


def digest_of(tenant: str) -> str:
    """Returns the name used for a tenant in messages between instances."""
    return hashlib.blake2b(tenant.encode(), digest_size=DIGEST_BYTES).hexdigest()


class ModelWindow:
    """The window for one model and priority, as this instance sees it.

    Args:
        rate: the model's measured service rate.
        floor: minimum size, in items: the maximum that one model process takes at once.
        broker_wait_s: seconds that jobs may wait at the broker.
        round_trip: measured round trip to the broker. A job and its reply each take one round trip,
            assuming that all workers are equally far away.
        is_guess_used: True to derive the size from an assumed rate until the rate is measured.
            Items above the floor may then stay at the broker for as long as an item takes to run,
            with other tenants' items queued after them.
    """

    def __init__(
        self,
        rate: ServiceRate,
        floor: int,
        broker_wait_s: float,
        round_trip: SmoothedDuration | None = None,
        *,
        is_guess_used: bool = True,
    ) -> None:
        self._rate = rate
        self._is_guess_used = is_guess_used
        self._floor = floor
        self._broker_wait_s = broker_wait_s
        self._round_trip = round_trip or SmoothedDuration()
        self._tenants: dict[str, _Tenant] = {}
        self._queues: dict[str, _Tenant] = {}
        """Tenants with waiting jobs."""
        self.weights = 0.0
        """Total weight of all tenants here, plus tenants found only on other instances."""
        self.elsewhere = Elsewhere()
        """Other instances' state, set by `update`."""
        self._numbers = itertools.count()
        self.published = 0
        self.held = 0
        """Number of waiting items."""

    @property
    def is_idle(self) -> bool:
        """Returns whether there are no published or waiting jobs."""
        return not self._tenants

    @property
    def size(self) -> float:
        """Number of items this instance adds to the window size.

        Limited to the number of items the instance has, because an instance with little work has
        not measured the rate under load.
        """
        if self._rate.is_guess and not self._is_guess_used:
            return 0.0
        ways_s = ROUND_TRIPS * self._round_trip.mean_s
        stay_s = self._broker_wait_s + ways_s + BATCHES_HELD * self._rate.service_s
        return min(stay_s / self._rate.item_s, self.published + self.held)

    @property
    def tenants(self) -> int:
        """Number of tenants with items that are published or waiting."""
        return len(self._tenants)

    def items_by_tenant(self) -> Iterator[tuple[str, float, int]]:
        """Each local tenant's digest, weight, and items."""
        return (
            (tenant.digest, tenant.weight, tenant.published + tenant.held)
            for tenant in self._tenants.values()
        )

    def update(self, elsewhere: Elsewhere) -> None:
        """Sets the other instances' state and releases jobs that now fit."""
        self.elsewhere = elsewhere
        digests = {tenant.digest for tenant in self._tenants.values()} if elsewhere.tenants else ()
        self.weights = (
            sum(tenant.weight for tenant in self._tenants.values())
            + sum(
                weight for digest, (weight, _) in elsewhere.tenants.items() if digest not in digests
            )
            + elsewhere.other_weights
        )
        self._let_leave()

    async def take(self, demand: Demand, until_s: float) -> None:
        """Takes a permit to publish one job, waiting no later than `until_s`.

        Raises:
            DeadlineExceeded: `until_s` (Unix seconds) has passed. No permit was taken.
        """
        tenant = self._tenants.get(demand.tenant) or self._add(demand)
        tenant.held += demand.items
        self.held += demand.items
        if not tenant.waiting and self._fits(tenant, demand.items):
            self._leave(tenant, demand.items)
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = _Waiting(until_s, next(self._numbers), demand.items, turn)
        insort(tenant.waiting, waiting)
        self._queues[tenant.name] = tenant
        self._let_leave()
        started_s = time.perf_counter()
        in_progress = metrics.HELD.labels(demand.model).track_inprogress()
        try:
            with (
                in_progress,
                span("hold", "internal", {STAGE: "hold", "penstock.items": demand.items}),
            ):
                await self._wait(demand, tenant, waiting)
        finally:
            metrics.HELD_SECONDS.labels(demand.model).observe(time.perf_counter() - started_s)

    def release(self, demand: Demand) -> None:
        """Returns one job's permit and releases waiting jobs that fit."""
        tenant = self._tenants[demand.tenant]
        tenant.published -= demand.items
        self.published -= demand.items
        self._forget_if_idle(tenant)
        self._let_leave()

    async def _wait(self, demand: Demand, tenant: _Tenant, waiting: _Waiting) -> None:
        try:
            async with asyncio.timeout(max(0.0, waiting.until_s - time.time())):
                await waiting.left
        except TimeoutError:
            if waiting.left.cancelled():
                self._withdraw(tenant, waiting)
                raise DeadlineExceeded("the deadline passed before the job was published") from None
        except asyncio.CancelledError:
            if waiting.left.cancelled():
                self._withdraw(tenant, waiting)
            else:
                self.release(demand)
            raise

    def _let_leave(self) -> None:
        """Releases jobs as long as one fits.

        The tenant with the fewest published items relative to its weight goes first.
        """
        while self._queues and (
            fitting := [
                tenant
                for tenant in self._queues.values()
                if self._fits(tenant, tenant.waiting[0].items)
            ]
        ):
            tenant = min(fitting, key=lambda candidate: candidate.published / candidate.weight)
            first = tenant.waiting.pop(0)
            if not tenant.waiting:
                del self._queues[tenant.name]
            if first.left.cancelled():  # its caller is about to remove it
                continue
            self._leave(tenant, first.items)
            first.left.set_result(None)

    def _fits(self, tenant: _Tenant, items: int) -> bool:
        """Returns whether a job that was counted as held for `tenant` may leave."""
        if not tenant.published:
            return True
        # Without reports from other instances, stay within our share of the smallest window.
        instances = 1 + self.elsewhere.instances if self.elsewhere.is_guess else 1
        size = max(self._floor / instances, self.size + self.elsewhere.size)
        if self.published + self.elsewhere.published + items <= size:
            return True
        part = size * tenant.weight / self.weights
        if elsewhere := self.elsewhere.tenants.get(tenant.digest):
            local = tenant.published + tenant.held
            part *= local / (local + elsewhere[1])
        return tenant.published + items <= part

    def _leave(self, tenant: _Tenant, items: int) -> None:
        tenant.held -= items
        self.held -= items
        tenant.published += items
        self.published += items

    def _withdraw(self, tenant: _Tenant, waiting: _Waiting) -> None:
        if waiting in tenant.waiting:
            tenant.waiting.remove(waiting)
            if not tenant.waiting:
                del self._queues[tenant.name]
        tenant.held -= waiting.items
        self.held -= waiting.items
        self._forget_if_idle(tenant)
        self._let_leave()

    def _add(self, demand: Demand) -> _Tenant:
        tenant = self._tenants[demand.tenant] = _Tenant(demand.tenant, demand.weight)
        self.weights += self._more_weight(tenant)
        return tenant

    def _forget_if_idle(self, tenant: _Tenant) -> None:
        if not tenant.published and not tenant.held:
            del self._tenants[tenant.name]
            self.weights -= self._more_weight(tenant)
        if not self._tenants and not self.elsewhere.tenants:
            self.weights = self.elsewhere.other_weights  # avoids rounding errors

    def _more_weight(self, tenant: _Tenant) -> float:
        """Returns the weight the tenant adds, which is 0 if other instances also have it."""
        others = self.elsewhere.tenants
        return 0.0 if others and tenant.digest in others else tenant.weight


class PublishWindow:
    """The windows for all models and priorities.

    Args:
        models: all models in the catalog.
        rate_of: returns a model's service rate.
        broker_wait_s: seconds that jobs may wait at the broker.
    """

    def __init__(
        self,
        models: Iterable[Model],
        rate_of: Callable[[str], ServiceRate],
        broker_wait_s: float,
        round_trip: SmoothedDuration | None = None,
    ) -> None:
        self._models = {model.name: model for model in models}
        self._rate_of = rate_of
        self._broker_wait_s = broker_wait_s
        self._round_trip = round_trip
        self.of: dict[Key, ModelWindow] = {}
        """Windows, keyed by model and priority, created on first use."""
        self.used = asyncio.Event()
        """Set when a permit is taken."""

    def take(self, demand: Demand, until_s: float) -> Awaitable[None]:
        """Takes a permit to publish one job, waiting until `until_s` at the latest.

        Raises:
            DeadlineExceeded: `until_s` (Unix seconds) has passed. No permit was taken.
        """
        self.used.set()
        return self.of_demand(demand).take(demand, until_s)

    def release(self, demand: Demand, *, is_in_topic: bool) -> None:
        """Returns one job's permit.

        Args:
            is_in_topic: True if the job was published and no caller is waiting for its result
                anymore. The job's permit is held for as long as workers usually take to reach such
                a job. Otherwise, a caller who keeps disconnecting could fill the topic.
        """
        window = self.of_demand(demand)
        if is_in_topic:
            asyncio.get_running_loop().call_later(self._broker_wait_s, window.release, demand)
        else:
            window.release(demand)

    def of_demand(self, demand: Demand) -> ModelWindow:
        """Returns the window from which a job with this demand takes a permit."""
        key = (demand.model, demand.priority)
        window = self.of.get(key)
        if window is None:
            model = self._models[demand.model]
            window = self.of[key] = ModelWindow(
                self._rate_of(demand.model),
                BATCHES_HELD * model.usual_batch.max_items,
                self._broker_wait_s,
                self._round_trip,
                # Generating text may take minutes.
                is_guess_used=not model.definition.shares_weights,
            )
        return window


class WindowReport(msgspec.Struct, array_like=True):
    """The window state that an instance reports."""

    size: float
    published: int
    tenants: list[tuple[str, float, int]]
    """Each tenant's digest, weight, and items."""
    other_weights: float


_decoder = msgspec.json.Decoder(WindowReport)


class WindowExchange:
    """Keeps this instance's windows up to date. An async context manager that owns its task.

    Args:
        redis_url: the Redis server shared by all instances that publish to the same topics.
    """

    def __init__(self, windows: PublishWindow, redis_url: str, instance: str) -> None:
        self._windows = windows
        self._instance = instance
        self._link = RedisLink(
            "publish windows", redis_url, up=UP, errors=ERRORS, field="records_url"
        )
        self._redis = self._link.commands("the publish window exchange")
        self._reported: set[Key] = set()
        self._heard_s: dict[Key, float] = {}
        self._instances = 0
        """Maximum number of other instances with work for the same model, as of the last exchange.
        """
        self._exchanging = BackgroundTask("exchanging publish windows", self._run)

    async def __aenter__(self) -> Self:
        await self._link.__aenter__()
        self._exchanging.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._exchanging.stop()
        await self._link.__aexit__(*exc)

    @property
    def _pause_s(self) -> float:
        return max(PAUSE_S, PAUSE_PER_INSTANCE_S * self._instances)

    async def _run(self) -> None:
        while True:
            await self._windows.used.wait()
            await sleep_until_turn(self._pause_s)
            if not await self.exchange():
                self._windows.used.clear()

    async def exchange(self) -> bool:
        """Reports and reads, once, the state of each model with current or recent work here.

        Returns whether there are any such models.
        """
        windows = [
            (key, window)
            for key, window in self._windows.of.items()
            if key in self._reported or not window.is_idle
        ]
        if not windows:
            return False
        # Concurrent calls share a round trip.
        heard = await asyncio.gather(*(self._exchange_one(*entry) for entry in windows))
        self._instances = max(heard)
        return True

    async def _exchange_one(self, key: Key, window: ModelWindow) -> int:
        model, priority = key
        now = report_of(window)
        metrics.TENANTS.labels(model, priority).set(window.tenants)
        metrics.MAX_TENANT.labels(model, priority).set(now.tenants[0][2] if now.tenants else 0)
        report = b"" if window.is_idle else msgspec.json.encode(now)
        (self._reported.add if report else self._reported.discard)(key)
        lease_s = LEASE_PAUSES * self._pause_s
        now_s = asyncio.get_running_loop().time()
        try:
            answers = await self._redis.run_script(
                _EXCHANGE,
                [f"penstock:window:{priority}:{model}"],
                self._instance,
                round(lease_s * 1000),
                report,
            )
        except Unavailable:
            is_over = now_s - self._heard_s.get(key, now_s) > lease_s
            window.update(
                Elsewhere(self._instances, is_guess=True) if is_over else window.elsewhere
            )
            return self._instances
        self._heard_s[key] = now_s
        window.update(combined(_decode_reports(answers)) if report else Elsewhere())
        return len(answers)


def report_of(window: ModelWindow) -> WindowReport:
    """Returns the state that is shared with other instances."""
    tenants = list(window.items_by_tenant())
    largest = heapq.nlargest(MAX_TENANTS, tenants, key=lambda entry: entry[2])
    others = sum(weight for _, weight, _ in tenants) - sum(weight for _, weight, _ in largest)
    return WindowReport(window.size, window.published, largest, max(0.0, others))


def combined(reports: Iterable[WindowReport]) -> Elsewhere:
    """Returns the combined state of all other instances."""
    tenants: dict[str, tuple[float, int]] = {}
    size, published, other_weights, instances = 0.0, 0, 0.0, 0
    for report in reports:
        size, published = size + report.size, published + report.published
        other_weights, instances = other_weights + report.other_weights, instances + 1
        for digest, weight, items in report.tenants:
            _, before = tenants.get(digest, (0.0, 0))
            tenants[digest] = (weight, before + items)
    return Elsewhere(instances, size, published, tenants, other_weights)


def _decode_reports(answers: Iterable[bytes]) -> Iterable[WindowReport]:
    for answer in answers:
        try:
            yield _decoder.decode(answer)
        except MALFORMED:
            continue  # an instance running a different release
