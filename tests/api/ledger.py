"""Charges to tenants and keys according to three books: the responses, the rows, and the counters.

A test sends requests through a `Ledger` and lets them end in any way. `check` waits until nothing
is in flight, then compares each key's and each tenant's books.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from api.dispatch.request import COST_HEADER
from api.limits.accounts import budget_name
from api.limits.counters import month_of
from api.limits.limiter import Limiter
from api.limits.spent import SpentReader
from shared.errors import Unavailable
from shared.models.catalog import Catalog, Model
from shared.models.entry import Cache, Price
from shared.settings import ApiSettings
from shared.tenants.directory import BudgetHolder
from shared.tenants.plan import Limits, Plan
from shared.usage.row import Row
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.row_sums import RowSums, once
from tests.keys import bearer, keys_url, stored
from tests.limits import PATIENCE, WAIT_LIMIT_S
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker

BUDGET_USD = 1000.0
EXACT_USD = 1e-9
SETTLE_LIMIT_S = 5.0 * PATIENCE
KEYS = {"one": "acme", "two": "acme", "other": "globex", "poor": "initech"}
"""Each key's tenant, keyed by the key's name in tests."""
POOR_USD = 0.001
PRICED = MODEL.model_copy(
    update={
        "price": Price(per_million_tokens_usd=1000.0, cached_share=0.25),
        "cache": Cache(ttl_s=60, scope="tenant"),
    }
)
"""A letter costs a tenth of a cent."""


@dataclass
class Ledger:
    """A deployment's three books.

    `apis` and `row_lists` may grow. `until_idle` waits until no worker will write any more rows.
    """

    redis_url: str
    apis: list[ApiUnderTest]
    row_lists: list[Sequence[Row]]
    until_idle: Callable[[], Awaitable[object]]
    tenant_of: Mapping[str, str] = field(default_factory=lambda: KEYS)
    limiters: list[Limiter] = field(default_factory=list)
    """Limiters of processes other than the APIs."""
    told_usd: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Costs reported in responses, by key. Responses that were not received don't count."""
    uncounted: set[str] = field(default_factory=set)
    """Counter names for tenants or keys without a budget."""

    def tell(self, key: str, usd: float) -> None:
        self.told_usd[key] += usd

    async def post(
        self, key: str, path: str, body: object, *, at: int = 0, **headers: str
    ) -> httpx.Response:
        """Sends a request to an API and records the cost from the response header."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        http = self.apis[at].http
        answer = await http.post(path, json=body, headers=bearer(key) | named)
        self.tell(key, float(answer.headers.get(COST_HEADER, 0)))
        return answer

    async def embed(
        self, key: str, texts: Sequence[str], *, encoding: str = "base64", **given: Any
    ) -> httpx.Response:
        body = {"model": MODEL.name, "input": list(texts), "encoding_format": encoding}
        return await self.post(key, "/v1/embeddings", body, **given)

    def row_of(self, request: httpx.Response, item: int = 0) -> Row:
        """The row recorded for an item in a request that got a response."""
        wanted = f"{request.headers['x-request-id']}:{item}"
        [row] = [row for row in self.rows() if row.row_id == wanted]
        return row

    def rows(self) -> list[Row]:
        return once(row for rows in self.row_lists for row in rows)

    def charged_usd(self, key: str) -> float:
        """Returns the total amount the rows charge to a key."""
        key_id = stored(key, self.tenant_of[key]).id
        return sum(row.cost_usd or 0.0 for row in self.rows() if row.key_id == key_id)

    async def check(self, spare_usd: Mapping[str, float] | None = None) -> dict[str, float]:
        """Compares each key's and each tenant's three books, and returns the charges, keyed by key.

        Args:
            spare_usd: how much each counter may exceed its rows, keyed by counter name.
        """
        async with asyncio.timeout(WAIT_LIMIT_S):
            for api in self.apis:
                await api.until_idle()
            await self.until_idle()
            charged = {key: self.charged_usd(key) for key in self.tenant_of}
            until_s = time.monotonic() + SETTLE_LIMIT_S
            apart = await self._apart(spare_usd or {})
            while apart and time.monotonic() < until_s:
                await asyncio.sleep(0.02)  # a prediction is settled when its record is read
                apart = await self._apart(spare_usd or {})
        told = {key: self.told_usd[key] for key in self.tenant_of}
        assert told == pytest.approx(charged, abs=EXACT_USD), f"answers {told}, rows {charged}"
        assert not apart, f"counters and rows by month: {apart}"
        return charged

    def charged_by_month(self) -> dict[str, dict[float, float]]:
        """Charges in the rows, keyed by counter name and the month when the request arrived."""
        names = {stored(key, tenant).id: tenant for key, tenant in self.tenant_of.items()}
        sums: dict[str, dict[float, float]] = {}
        for key_id, tenant in names.items():
            for name in budgets_of(tenant, key_id):
                sums.setdefault(name, defaultdict(float))
        for row in self.rows():
            if row.key_id in names:
                tenant, month = names[row.key_id], month_of(row.received_at_s)
                for name in budgets_of(tenant, row.key_id):
                    sums[name][month] += row.cost_usd or 0.0
        return sums

    async def _apart(self, spare_usd: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
        """The counters that are below their rows, or too far above them."""
        charged, counted = self.charged_by_month(), await self._counted()
        return [
            (name, month, counted[name].get(month, 0.0), charged[name].get(month, 0.0))
            for name in charged.keys() - self.uncounted
            for month in {*charged[name], *counted[name]}
            if not -EXACT_USD
            <= counted[name].get(month, 0.0) - charged[name].get(month, 0.0)
            <= spare_usd.get(name, 0.0) + EXACT_USD
        ]

    async def _counted(self) -> dict[str, dict[float, float]]:
        """Returns Redis's counts by month, after every instance has returned its unused leases."""
        limiters = [*(api.dependencies.limiter for api in self.apis), *self.limiters]
        for limiter in limiters:
            with suppress(Unavailable):  # it lost its connection to Redis a moment ago
                await limiter.give_back(math.inf)
        counted = {}
        async with redis.asyncio.Redis.from_url(self.redis_url) as client:
            for name in self.charged_by_month():
                fields = ("month", "used", "used_before")
                found = await client.hmget(f"penstock:limits:month:{name}", fields)
                month, used, before = (float(one or 0) for one in found)
                counted[name] = {month: used, month - 1: before}
        return counted

    async def held_usd(self, instance: str) -> dict[str, float]:
        """Amounts still leased from Redis to an instance, keyed by counter name."""
        held: dict[str, float] = defaultdict(float)
        client: Any
        async with redis.asyncio.Redis.from_url(self.redis_url) as client:
            for name in self.charged_by_month():
                found = await client.hgetall(f"penstock:limits:month:{name}")
                for of, value in found.items():
                    if of.decode().startswith("held:") and of.decode().endswith(f":{instance}"):
                        held[name] += float(value.split()[0])
        return held


def budgets_of(tenant: str, key_id: str) -> tuple[str, str]:
    """Returns the names of the counters for a tenant's and a key's budgets."""
    return budget_name(BudgetHolder(tenant)), budget_name(BudgetHolder(tenant, key_id))


@dataclass
class LedgerWorld:
    """One or more APIs over a real worker with a fake model process, and their ledger."""

    ledger: Ledger
    harness: WorkerHarness
    settings: ApiSettings
    catalog: Catalog

    @property
    def api(self) -> ApiUnderTest:
        return self.ledger.apis[0]

    async def hang_up(
        self, key: str, texts: Sequence[str], when: Callable[[], bool], **headers: str
    ) -> None:
        """Sends a request and hangs up as soon as `when` is true."""
        asked = asyncio.create_task(self.ledger.embed(key, texts, **headers))
        await self.harness.until(lambda: asked.done() or when())
        assert not asked.done(), "it was answered before it could hang up"
        asked.cancel()
        await asyncio.wait([asked])


def ledger_keys(folder: Path, tenant_of: Mapping[str, str] = KEYS, **plan: Any) -> str:
    """Writes keys and tenants with budgets. Returns the URL."""
    own = Limits(budget_usd_per_month=BUDGET_USD)
    rich, poor = (Plan(budget_usd_per_month=usd, **plan) for usd in (BUDGET_USD, POOR_USD))
    return keys_url(
        folder,
        plans={"rich": rich, "poor": poor},
        tenants={tenant: "poor" if key == "poor" else "rich" for key, tenant in tenant_of.items()},
        keys=[stored(key, tenant, limits=own) for key, tenant in tenant_of.items()],
    )


@asynccontextmanager
async def ledger_world(
    redis_url: str,
    folder: Path,
    model: Model = PRICED,
    *,
    instances: int = 1,
    worker: AbstractAsyncContextManager[WorkerHarness] | None = None,
    spent: SpentReader | None = None,
) -> AsyncIterator[LedgerWorld]:
    """A deployment for embeddings where each vector is its text (tests/workers/worker_harness.py).

    Args:
        worker: another worker that serves the model.
        spent: the rows that have arrived. None uses all of the ledger's rows.
    """
    settings = settings_for(folder, redis_url=redis_url, keys_url=ledger_keys(folder))
    catalog = Catalog((model,))
    async with worker or running_worker(redis_url, folder, model=model) as harness:
        assert harness.registry is not None
        ledger = Ledger(redis_url, [], [harness.rows], harness.registry.wait_idle)
        world = LedgerWorld(ledger, harness, settings, catalog)
        broker = harness.broker
        async with AsyncExitStack() as opened:
            for _ in range(instances):
                api = await opened.enter_async_context(
                    running_api(
                        settings,
                        broker,
                        broker,
                        catalog,
                        worker=FakeWorker(broker, ()),
                        spent=spent or RowSums(ledger.row_lists),
                    )
                )
                ledger.apis.append(api)
                ledger.row_lists.append(api.rows)
            yield world
