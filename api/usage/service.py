"""Reads usage and runs reports with a few concurrent queries, shared fairly among tenants.

Usage is cached for KEEP_S, so frequent requests cost nothing, and the numbers lag behind BigQuery's
by at most KEEP_S.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from api.usage.rows import UsageLine, UsageQuery, UsageRows
from shared.errors import Overloaded
from shared.process.concurrency import FairPermits
from shared.reports.definitions import Report, ReportQuestion
from shared.reports.runner import ReportResult, ReportRunner, translate_errors
from shared.usage.bigquery import open_client

MAX_RUNNING = 4
"""Maximum number of concurrent queries. Each query occupies a thread for about a second."""
MAX_OF_ONE_TENANT = 4
"""Maximum number of running or waiting queries per tenant."""
MAX_CLAIMED = 64
"""Maximum number of running or waiting queries.

Even with sixteen tenants at their maximum, there is room for queries from others.
"""

Answer = TypeVar("Answer")

KEEP_S = 10.0
MAX_KEPT = 256

QUERY_LIMIT_S = 20.0
MAX_ROWS = 5_000
"""Maximum number of rows in a response."""


class QueryPermits:
    """Limits and orders the queries that tenants run in BigQuery.

    A tenant that has the queue to itself runs two queries at a time, which leaves two threads free
    (shared/process/concurrency.py).
    """

    def __init__(self) -> None:
        self._claimed: Counter[str] = Counter()
        self._turns = FairPermits(MAX_RUNNING)
        # A separate thread pool, so that slow queries don't block the rest of the process.
        self._threads = ThreadPoolExecutor(MAX_RUNNING, "usage")

    def claim(self, tenant: str) -> None:
        """Takes a position in the queue. Call `hold_turn` or `run` afterward.

        Raises:
            Overloaded: the queue is full, or the tenant has used up its share of it.
        """
        if self._claimed[tenant] >= MAX_OF_ONE_TENANT or self._claimed.total() >= MAX_CLAIMED:
            raise Overloaded("too many usage queries are running; try again", retry_after_s=1.0)
        self._claimed[tenant] += 1

    async def run(self, tenant: str, function: Callable[..., Answer], *args: object) -> Answer:
        """Calls a blocking function during a turn that a tenant has claimed."""
        async with self.hold_turn(tenant):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, function, *args)

    @asynccontextmanager
    async def hold_turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a turn that a tenant claimed, and holds it for the duration of the block."""
        try:
            await self._turns.take(tenant)
            try:
                yield
            finally:
                self._turns.give(tenant)
        finally:
            self._claimed[tenant] -= 1
            if not self._claimed[tenant]:
                del self._claimed[tenant]


class UsageRead(NamedTuple):
    """Usage in BigQuery as of `read_at_s` (Unix time)."""

    lines: Sequence[UsageLine]
    read_at_s: float


class UsageService:
    """Answers usage queries.

    Args:
        turns: limits shared by all usage queries.
        clock: Unix time. Replaced by tests.
    """

    def __init__(
        self, rows: UsageRows, turns: QueryPermits, clock: Callable[[], float] = time.time
    ) -> None:
        self._rows = rows
        self._turns = turns
        self._clock = clock
        self._reads: dict[UsageQuery, asyncio.Task[UsageRead]] = {}

    async def read(self, query: UsageQuery, tenant: str) -> UsageRead:
        """Returns usage data that is at most KEEP_S old, for a request from `tenant`.

        Raises:
            BadInput: the result would have too many groups.
            Overloaded: too many queries are running.
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        task = self._reads.get(query)
        if task is None or not self._is_fresh(task):
            self._turns.claim(tenant)
            task = asyncio.create_task(self._read(query, tenant))
            self._reads.pop(query, None)
            self._reads[query] = task
            if len(self._reads) > MAX_KEPT:
                del self._reads[next(iter(self._reads))]
        # The result is shared with other callers, so the query continues even if one caller
        # disconnects.
        return await asyncio.shield(task)

    def _is_fresh(self, reading: asyncio.Task[UsageRead]) -> bool:
        if not reading.done():
            return True
        if reading.cancelled() or reading.exception() is not None:
            return False
        return self._clock() < reading.result().read_at_s + KEEP_S

    async def _read(self, query: UsageQuery, tenant: str) -> UsageRead:
        def read() -> UsageRead:
            read_at_s = self._clock()
            return UsageRead(self._rows.read(query), read_at_s)

        return await self._turns.run(tenant, read)


class ReportDataset(NamedTuple):
    """The dataset that contains the rows, and the maximum number of bytes that a query may read."""

    project: str
    dataset: str
    endpoint: str
    """URL of an embedded BigQuery, or empty to use Google's."""
    most_bytes: int


class ReportService:
    """Runs reports.

    Args:
        turns: the limits shared by all usage queries.
    """

    def __init__(self, dataset: ReportDataset, turns: QueryPermits) -> None:
        self._dataset = dataset
        self._turns = turns
        self._client: Any = None
        self._running: set[asyncio.Task[ReportResult]] = set()

    async def run(
        self,
        report: Report,
        question: ReportQuestion,
        tenant: str,
        budgets_usd: Mapping[str, float],
    ) -> ReportResult:
        """Runs one report for `tenant`.

        Raises:
            BadInput: the report does not support the filter, or the result would have too many
                rows.
            Overloaded: too many queries are running.
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        self._turns.claim(tenant)
        reading = self._turns.run(tenant, self._read, report, question, budgets_usd)
        task = asyncio.create_task(reading)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A thread can't be stopped, so the permit is held until its query ends, even after the
        # caller disconnects. BigQuery ends the query after QUERY_LIMIT_S.
        return await asyncio.shield(task)

    def _read(
        self, report: Report, question: ReportQuestion, budgets_usd: Mapping[str, float]
    ) -> ReportResult:
        if self._client is None:
            with translate_errors():
                self._client = open_client(self._dataset.project, self._dataset.endpoint)
        runner = ReportRunner(
            self._client,
            self._dataset.dataset,
            self._dataset.most_bytes,
            budgets_usd,
            most_rows=MAX_ROWS,
        )
        return runner.run(report, question, limit_s=QUERY_LIMIT_S)
