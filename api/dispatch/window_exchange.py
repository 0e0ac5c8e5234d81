"""Shares the state of publish windows with other instances, through Redis.

Each instance has a field in a hash for each model and lane, with a lease. An instance that dies is
forgotten when its leases end. No request waits for Redis. While Redis is out of reach the last
known state counts until the lease ends. After that each instance keeps to its own service rate,
which is its part of what the workers do.

An instance without work for a model reports nothing about it. It pauses in proportion to the number
of instances, so the load on Redis does not grow with its square.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import Counter, Gauge

from api import metrics
from api.dispatch.model_window import Elsewhere, Key, ModelWindow, PublishWindow
from shared.errors import Unavailable
from shared.stores.redis_client import RedisLink, load_script

PAUSE_S, PAUSE_PER_INSTANCE_S = 0.25, 0.01
"""Between two exchanges: the shortest, and for each other instance."""
LEASE_PAUSES = 8
"""Number of pauses without a report after which an instance counts as dead."""
MAX_TENANTS = 32
"""Maximum number of tenants reported individually, those with the most items. For the others, only
the sum of weights is reported."""
REDIS_LIMIT_S, REDIS_RETRY_S = 1.0, 0.25

ERRORS = Counter(
    "penstock_window_errors_total",
    "Round trips to Redis about publish windows that failed.",
    ["operation"],
)
UP = Gauge("penstock_window_redis_up", "1 while Redis is being asked about publish windows.")

_EXCHANGE = load_script("api/dispatch/window_exchange.lua")


class WindowReport(msgspec.Struct, array_like=True):
    """The state of a window that an instance reports."""

    size: float
    published: int
    tenants: list[tuple[str, float, int]]
    """Digest, weight and items."""
    other_weights: float


_decoder = msgspec.json.Decoder(WindowReport)


class WindowExchange:
    """Keeps the windows of this instance up to date. An async context manager that owns its task.

    Args:
        windows: of this instance.
        redis_url: the Redis that all instances share which publish to the same topics.
        instance: the id of this instance.
    """

    def __init__(self, windows: PublishWindow, redis_url: str, instance: str) -> None:
        self._windows = windows
        self._instance = instance
        self._link = RedisLink(
            "publish windows",
            redis_url,
            timeout_s=REDIS_LIMIT_S,
            retry_s=REDIS_RETRY_S,
            up=UP,
            errors=ERRORS,
            field="records_url",
        )
        self._redis = self._link.commands("the exchange of publish windows")
        self._reported: set[Key] = set()
        self._heard_s: dict[Key, float] = {}
        self._instances = 0
        """Maximum number of other instances with work for the same model, at the last exchange."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._link.__aenter__()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._link.__aexit__(kind, error, trace)

    @property
    def _pause_s(self) -> float:
        return max(PAUSE_S, PAUSE_PER_INSTANCE_S * self._instances)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            await self.exchange()

    async def exchange(self) -> None:
        """Reports and reads the state of each model that has or had work here, once."""
        windows = [
            (key, window)
            for key, window in self._windows.of.items()
            if key in self._reported or not window.is_idle
        ]
        # Calls that come together share a round trip.
        heard = await asyncio.gather(*(self._exchange_one(*one) for one in windows))
        if heard:
            self._instances = max(heard)

    async def _exchange_one(self, key: Key, window: ModelWindow) -> int:
        model, lane = key[0], key[1] or "interactive"
        now = report_of(window)
        metrics.TENANTS.labels(model, lane).set(window.tenants)
        metrics.MAX_TENANT.labels(model, lane).set(now.tenants[0][2] if now.tenants else 0)
        report = b"" if window.is_idle else msgspec.json.encode(now)
        (self._reported.add if report else self._reported.discard)(key)
        lease_s = LEASE_PAUSES * self._pause_s
        now_s = asyncio.get_running_loop().time()
        try:
            answers = await self._redis.run_script(
                _EXCHANGE,
                [f"penstock:window:{lane}:{model}"],
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
        window.update(combined(_decoded(answers)) if report else Elsewhere())
        return len(answers)


def report_of(window: ModelWindow) -> WindowReport:
    """Returns the state that is shared with other instances."""
    tenants = list(window.items_by_tenant())
    largest = heapq.nlargest(MAX_TENANTS, tenants, key=lambda one: one[2])
    others = sum(weight for _, weight, _ in tenants) - sum(weight for _, weight, _ in largest)
    return WindowReport(window.size, window.published, largest, max(0.0, others))


def combined(reports: Iterable[WindowReport]) -> Elsewhere:
    """Returns the combined state of all other instances."""
    tenants: dict[str, tuple[float, int]] = {}
    size, published, other_weights, instances = 0.0, 0, 0.0, 0
    for one in reports:
        size, published = size + one.size, published + one.published
        other_weights, instances = other_weights + one.other_weights, instances + 1
        for digest, weight, items in one.tenants:
            _, before = tenants.get(digest, (0.0, 0))
            tenants[digest] = (weight, before + items)
    return Elsewhere(instances, size, published, tenants, other_weights)


def _decoded(answers: Iterable[bytes]) -> Iterable[WindowReport]:
    for answer in answers:
        try:
            yield _decoder.decode(answer)
        except msgspec.MsgspecError:
            continue  # an instance of another release
