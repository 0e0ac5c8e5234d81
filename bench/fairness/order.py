"""Interference between tenants, by the backlog of a worker.

Measured with a model that only takes time (bench/fairness/timed.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import uvloop

from bench.fairness.timed import BATCH_S, MODEL, TOKENS_PER_S, Callers, timed_workers
from bench.load.generator import percentiles
from bench.report import Figure

PAGE, PAGES = 230, 32
"""Tokens of a long text, and such texts in a request of the noisy tenant."""
QUIET, RATE_PER_S = 5, 1.0
LENGTHS = [12] * 6 + [64] * 3 + [230]
CONNECTIONS = 20
"""Connections of the noisy tenant, which has 40 jobs in flight on them."""
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
OFF_PERCENT, KEPT_PERCENT = {1: 2.0, 3: 5.0}, 95.0
"""Off the shares of weights at most, by the number of workers. Kept by the noisy one at least."""
LEAD_S = 3.0
WEIGHTS_LEAD_S = 15.0
"""The lightest tenant's jobs in flight take so long, once around."""
FULL_BATCH_S = BATCH_S + MODEL.budget / TOKENS_PER_S


@dataclass
class CallersView:
    """The callers' view: waits of a kind of tenant in ms, and tokens of each tenant."""

    waits_ms: dict[str, list[float]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)


def measure_shares(where: tuple[str, str], seconds: float, unanswered: int) -> list[Figure]:
    """Measures the effects of a noisy tenant and of weights. Takes about 7 times `seconds`.

    Args:
        where: endpoint of a Pub/Sub, and URL of a Redis.
        seconds: length of a part.
        unanswered: jobs that each tenant with a weight has in flight, for each worker. At a
            distance more of them are on their way, so it takes more until none runs out of jobs.
    """
    return [*_noise(where, seconds), *_weights(where, seconds, unanswered)]


def _noise(where: tuple[str, str], seconds: float) -> Iterator[Figure]:
    """A noisy tenant and quiet ones, each alone and together."""

    def run(connections: int, quiet: int) -> CallersView:
        return uvloop.run(_run(where, seconds, partial(_callers, connections, quiet)))

    alone, both = _quiet_waits(run(0, QUIET)), run(CONNECTIONS, QUIET)
    noisy = run(CONNECTIONS, 0).tokens["noisy"]
    beside, limit_ms = _quiet_waits(both), 2 * alone["p99"] + 1000 * FULL_BATCH_S
    yield Figure("quiet alone, p50", alone["p50"], "ms")
    yield Figure("quiet alone, p99", alone["p99"], "ms")
    yield Figure("quiet beside a noisy one, p50", beside["p50"], "ms")
    yield Figure("quiet beside a noisy one, p99", beside["p99"], "ms", "<=", limit_ms)
    left = noisy - sum(both.tokens[name] for name in both.tokens if name != "noisy")
    kept = 100 * both.tokens["noisy"] / left
    yield Figure("noisy, of what the quiet ones leave", kept, "%", ">=", KEPT_PERCENT)


def _callers(connections: int, quiet: int, to: Callers, seen: CallersView) -> Sequence[Work]:
    noisy = [_again(to, seen, "noisy", [PAGE] * PAGES) for _ in range(connections)]
    return noisy + [_sometimes(to, seen, f"quiet {n}", RATE_PER_S) for n in range(quiet)]


def _quiet_waits(seen: CallersView) -> dict[str, float]:
    names = [name for name in seen.waits_ms if name.startswith("quiet")]
    return _percentiles([one for name in names for one in seen.waits_ms[name]])


def _weights(where: tuple[str, str], seconds: float, unanswered: int) -> Iterator[Figure]:
    for workers, off_percent in OFF_PERCENT.items():

        def callers(
            to: Callers, seen: CallersView, jobs: int = workers * unanswered
        ) -> Sequence[Work]:
            return [
                _again(to, seen, name, LENGTHS, weight)
                for name, weight in WEIGHTS.items()
                for _ in range(jobs)
            ]

        seen = uvloop.run(_run(where, 2 * seconds, callers, workers=workers, lead_s=WEIGHTS_LEAD_S))
        share = sum(seen.tokens.values()) / sum(WEIGHTS.values())
        off = [seen.tokens[name] / (weight * share) - 1 for name, weight in WEIGHTS.items()]
        for weight, one in zip(WEIGHTS.values(), off, strict=True):
            yield Figure(f"{workers} workers, weight {weight:g}: off its share", 100 * one, "%")
        most = 100 * max(map(abs, off))
        yield Figure(f"{workers} workers, most off", most, "%", "<=", off_percent)


Work = Awaitable[None]


def _percentiles(waits_ms: list[float]) -> dict[str, float]:
    """Returns the percentiles. They are infinite if nothing was answered in time."""
    return percentiles(waits_ms) if waits_ms else {"p50": inf, "p99": inf}


async def _run(
    where: tuple[str, str],
    seconds: float,
    callers: Callable[[Callers, CallersView], Sequence[Work]],
    *,
    workers: int = 1,
    lead_s: float = LEAD_S,
) -> CallersView:
    """Returns the view of `callers` in `seconds` after `lead_s`."""
    async with timed_workers(*where, workers=workers) as to:
        seen = CallersView()
        calling = [asyncio.ensure_future(one) for one in callers(to, seen)]
        await asyncio.sleep(lead_s)
        seen.waits_ms.clear()
        seen.tokens.clear()
        await asyncio.sleep(seconds)
        before = CallersView(dict(seen.waits_ms), Counter(seen.tokens))
        for one in calling:
            one.cancel()
        await asyncio.gather(*calling, return_exceptions=True)
        return before


async def _again(
    to: Callers,
    seen: CallersView,
    tenant: str,
    lengths: list[int],
    weight: float = 1.0,
) -> None:
    """A closed loop of one request."""
    while True:
        tokens = await to.ask(tenant, lengths, weight=weight)
        seen.tokens[tenant] += tokens


async def _sometimes(to: Callers, seen: CallersView, tenant: str, rate_per_s: float) -> None:
    """An open loop of single texts."""
    chance = random.Random(tenant)
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(chance.expovariate(rate_per_s))
            group.create_task(_timed(to, seen, tenant, chance.choice(LENGTHS)))


async def _timed(to: Callers, seen: CallersView, tenant: str, length: int) -> None:
    began_s = time.perf_counter()
    tokens = await to.ask(tenant, [length])
    seen.tokens[tenant] += tokens
    seen.waits_ms.setdefault(tenant, []).append(1000 * (time.perf_counter() - began_s))
