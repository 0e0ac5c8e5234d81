"""Interference between tenants and from `batch` priority, by the backlog of a worker.

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
from shared.tenants.plan import Priority

PAGE, PAGES = 230, 32
"""Tokens of a long text, and such texts in a request of the noisy tenant."""
QUIET, RATE_PER_S = 5, 1.0
LENGTHS = [12] * 6 + [64] * 3 + [230]
CONNECTIONS = {"40 jobs": 20, "300 jobs": 150}
"""Connections of the noisy tenant, by the jobs that it has in flight."""
HANDS = (16, 64, 256, 1024)
"""Messages that a worker holds. Two batches for each of two processes are 256."""
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
OFF_PERCENT, KEPT_PERCENT = {1: 2.0, 3: 5.0}, 95.0
"""Off the shares of weights at most, by the number of workers. Kept by the noisy one at least."""
UNANSWERED = 60
"""Jobs that each of them has in flight, for each worker: in all less than the workers hold."""
INTERACTIVE_PER_S, BATCH_JOBS = 20.0, 60
LEAD_S = 3.0
WEIGHTS_LEAD_S = 15.0
"""The lightest tenant's jobs in flight take so long, once around."""
FULL_BATCH_S = BATCH_S + MODEL.budget / TOKENS_PER_S


@dataclass
class CallersView:
    """The callers' view: waits of a kind of tenant in ms, and tokens of each tenant."""

    waits_ms: dict[str, list[float]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)


def measure(where: tuple[str, str], seconds: float) -> list[Figure]:
    """About 17 times `seconds`. `where`: the endpoint of a Pub/Sub and the URL of a Redis."""
    parts = (_noise, _hands, _weights, _priorities)
    return [figure for part in parts for figure in part(where, seconds)]


def measure_shares(
    where: tuple[str, str], seconds: float, unanswered: int = UNANSWERED
) -> list[Figure]:
    """What a noisy tenant and weights do, about 7 times `seconds`.

    Args:
        where: as of `measure`.
        unanswered: jobs that each tenant with a weight has in flight, for each worker. At a
            distance more of them are on their way, so it takes more until none runs out of jobs.
    """
    return [*_noise(where, seconds), *_weights(where, seconds, unanswered)]


def _noise(where: tuple[str, str], seconds: float) -> Iterator[Figure]:
    """A noisy tenant and quiet ones, each alone and together."""

    def run(connections: int, quiet: int) -> CallersView:
        return uvloop.run(_run(where, seconds, partial(_callers, connections, quiet)))

    connections = min(CONNECTIONS.values())
    alone, both = _quiet_waits(run(0, QUIET)), run(connections, QUIET)
    noisy = run(connections, 0).tokens["noisy"]
    beside, limit_ms = _quiet_waits(both), 2 * alone["p99"] + 1000 * FULL_BATCH_S
    yield Figure("quiet alone, p50", alone["p50"], "ms")
    yield Figure("quiet alone, p99", alone["p99"], "ms")
    yield Figure("quiet beside a noisy one, p50", beside["p50"], "ms")
    yield Figure("quiet beside a noisy one, p99", beside["p99"], "ms", "<=", limit_ms)
    left = noisy - sum(both.tokens[name] for name in both.tokens if name != "noisy")
    kept = 100 * both.tokens["noisy"] / left
    yield Figure("noisy, of what the quiet ones leave", kept, "%", ">=", KEPT_PERCENT)


def _hands(where: tuple[str, str], seconds: float) -> Iterator[Figure]:
    for jobs, connections in CONNECTIONS.items():
        for hand in HANDS:
            callers = partial(_callers, connections, QUIET)
            seen = uvloop.run(_run(where, seconds, callers, hand=hand))
            waits, name = _quiet_waits(seen), f"hand of {hand}, noisy with {jobs}"
            yield Figure(f"{name}: quiet, p50", waits["p50"], "ms")
            yield Figure(f"{name}: quiet, p99", waits["p99"], "ms")
            yield Figure(f"{name}: noisy", seen.tokens["noisy"] / seconds, "tokens/s")


def _callers(connections: int, quiet: int, to: Callers, seen: CallersView) -> Sequence[Work]:
    noisy = [_again(to, seen, "noisy", [PAGE] * PAGES) for _ in range(connections)]
    return noisy + [_sometimes(to, seen, f"quiet {n}", RATE_PER_S) for n in range(quiet)]


def _quiet_waits(seen: CallersView) -> dict[str, float]:
    names = [name for name in seen.waits_ms if name.startswith("quiet")]
    return _percentiles([one for name in names for one in seen.waits_ms[name]])


def _weights(
    where: tuple[str, str], seconds: float, unanswered: int = UNANSWERED
) -> Iterator[Figure]:
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


def _priorities(where: tuple[str, str], seconds: float) -> Iterator[Figure]:
    def interactive(to: Callers, seen: CallersView) -> Sequence[Work]:
        return [_sometimes(to, seen, "interactive", INTERACTIVE_PER_S)]

    def both(to: Callers, seen: CallersView) -> Sequence[Work]:
        batch = [_again(to, seen, "batch", LENGTHS, priority="batch") for _ in range(BATCH_JOBS)]
        return [*interactive(to, seen), *batch]

    alone = uvloop.run(_run(where, seconds, interactive)).waits_ms["interactive"]
    seen = uvloop.run(_run(where, seconds, both))
    beside = seen.waits_ms["interactive"]
    for name, waits in (("alone", alone), ("beside a batch", beside)):
        yield Figure(f"interactive {name}, p50", _percentiles(waits)["p50"], "ms")
    p99, most_ms = _percentiles(beside)["p99"], 1.5 * _percentiles(alone)["p99"]
    yield Figure("interactive alone, p99", _percentiles(alone)["p99"], "ms")
    yield Figure("interactive beside a batch, p99", p99, "ms", "<=", most_ms)
    yield Figure("the batch beside it", seen.tokens["batch"] / seconds, "tokens/s")


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
    hand: int = 0,
    lead_s: float = LEAD_S,
) -> CallersView:
    """Returns the view of `callers` in `seconds` after `lead_s`."""
    async with timed_workers(*where, workers=workers, hand=hand) as to:
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
    priority: Priority = "interactive",
) -> None:
    """A closed loop of one request."""
    while True:
        tokens = await to.ask(tenant, lengths, weight=weight, priority=priority)
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
