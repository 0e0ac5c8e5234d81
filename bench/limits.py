"""The cost of limits for a request: the CPU of one process between authentication and dispatch.

Compared are callers without limits, with limits far away, and with a budget and slots in
addition, interleaved.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from api.limits.accounts import LimitStore
from api.limits.limited_request import LimitedRequest
from api.limits.limiter import Limiter
from bench.report import Figure, Outcome
from infra.local.redis_server import RedisServer
from shared.catalog import Model
from shared.catalog_file import read_catalog
from shared.charge import price_of
from shared.messages import ItemOutcome, Receipt
from shared.tasks.embedding import TextInput
from shared.tenants.plan import Caller, Limits, Plan

REQUESTS, ROUNDS, IN_FLIGHT = 2000, 7, 32
NOTHING = "nothing of limits"
PLANS = {
    NOTHING: Caller(tenant="0"),
    "no limits": Caller(tenant="a"),
    "requests a minute": Caller(tenant="b", plan=Plan(requests_per_min=10_000_000)),
    "requests and tokens a minute": Caller(
        tenant="c", plan=Plan(requests_per_min=10_000_000, tokens_per_min=1_000_000_000)
    ),
    "all limits of tenant and key": Caller(
        tenant="d",
        key_id="k",
        plan=Plan(
            requests_per_min=10_000_000,
            tokens_per_min=1_000_000_000,
            max_in_flight=100_000,
            budget_usd_per_month=1e6,
        ),
        key_limits=Limits(requests_per_min=10_000_000, tokens_per_min=1_000_000_000),
    ),
}
TEXT = TextInput("The river carries what the mountains lose, and the sea keeps what it carries.")


async def _one(limiter: Limiter, caller: Caller, model: Model) -> None:
    price, headers = price_of(model, time.time()), dict[str, str]()
    outcome = ItemOutcome(0, "succeeded", Receipt("miss", tokens=17))
    async with LimitedRequest(
        limiter, caller, model, [TEXT], headers, received_at_s=time.time()
    ) as limited:
        await asyncio.sleep(0)
        limited.settle(price, [outcome])


async def _without(limiter: Limiter, caller: Caller, model: Model) -> None:
    price_of(model, time.time())
    ItemOutcome(0, "succeeded", Receipt("miss", tokens=17))
    await asyncio.sleep(0)


async def _round(
    one: Callable[[Limiter, Caller, Model], Coroutine[None, None, None]],
    limiter: Limiter,
    caller: Caller,
    model: Model,
) -> tuple[float, float]:
    """CPU and wall time of a request, in microseconds."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(REQUESTS // IN_FLIGHT):
        await asyncio.gather(*(one(limiter, caller, model) for _ in range(IN_FLIGHT)))
    done = REQUESTS // IN_FLIGHT * IN_FLIGHT
    return (
        (time.process_time() - cpu_s) / done * 1e6,
        (time.perf_counter() - wall_s) / done * 1e6,
    )


async def measure(url: str) -> dict[str, tuple[float, float]]:
    """The medians by plan."""
    model = read_catalog(Path("models.yaml")).default("embedding")
    latencies: dict[str, list[tuple[float, float]]] = {name: [] for name in PLANS}
    async with Limiter(LimitStore(url, "bench")) as limiter:
        for _ in range(ROUNDS):
            for name, caller in PLANS.items():
                one = _without if name == NOTHING else _one
                latencies[name].append(await _round(one, limiter, caller, model))
    return {
        name: (
            statistics.median(cpu for cpu, _ in rounds),
            statistics.median(wall for _, wall in rounds),
        )
        for name, rounds in latencies.items()
    }


def run() -> Outcome:
    """Measures all plans in turns, so that a busy moment meets all of them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder), Path(folder)) as server,
    ):
        latencies = asyncio.run(measure(server.url))
    without_us = latencies.pop(NOTHING)[0]
    return Outcome(
        [
            Figure(f"CPU of a request, {name}", cpu_us - without_us, "µs")
            for name, (cpu_us, _) in latencies.items()
        ]
    )
