"""The fault suite: traffic runs while parts die, hang and are cut off; then everything is counted.

`python -m tests.faults` runs it in full (`make faults`); tests/faults/test_faults.py runs a short
version.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.faults.schedule import Fault, faults, inject
from tests.faults.traffic import Tally, Traffic
from tests.faults.world import APIS, BUDGET_KEY, TENANTS, BrokerKind, RowsKind, World
from tests.keys import stored
from tests.limits import PATIENCE, WAIT_LIMIT_S

EXACT_USD = 1e-9
SETTLE_LIMIT_S = 60.0 * PATIENCE
"""The last predictions are settled 10 s after they were canceled, if no worker had them."""
Rows = dict[str, list[dict[str, Any]]]


@dataclass
class Findings:
    """The findings of one suite run."""

    faults: Counter[str]
    tally: Tally
    rows_missing: list[str]
    rows_double: list[str]
    rows_wrong: list[str]
    costs_wrong: list[str]
    """Requests whose rows charge a different amount than their responses reported."""
    counters_off: list[str]
    """Budgets of tenants and keys whose counters are below their rows, or above them by more than
    the kills explain.
    """
    took_s: float
    pairs: set[tuple[str, str]]
    """The pairs of an API instance and a worker that handled items together."""

    def table(self) -> list[tuple[str, int]]:
        """First the counts of traffic and faults, then the counts that must be zero, by name."""
        return [
            ("requests", self.tally.sent),
            ("faults", self.faults.total()),
            ("answers", self.tally.ended),
            ("lost", len(self.tally.lost)),
            ("answered twice", len(self.tally.answered_twice)),
            ("wrong payload", len(self.tally.wrong)),
            ("not healed", len(self.tally.not_healed)),
            ("rows missing", len(self.rows_missing)),
            ("rows double", len(self.rows_double)),
            ("rows wrong", len(self.rows_wrong)),
            ("costs wrong", len(self.costs_wrong)),
            ("counters off", len(self.counters_off)),
        ]

    def flaws(self) -> list[str]:
        """Returns every flaw found, by name."""
        flaws = {
            "lost": self.tally.lost,
            "answered twice": self.tally.answered_twice,
            "wrong payload": self.tally.wrong,
            "not healed": self.tally.not_healed,
            "row missing": self.rows_missing,
            "row double": self.rows_double,
            "row wrong": self.rows_wrong,
            "cost wrong": self.costs_wrong,
            "counter off": self.counters_off,
        }
        return [f"{name}: {one}" for name, found in flaws.items() for one in found]


def run(
    folder: Path,
    *,
    requests: int,
    faults_count: int,
    in_flight: int,
    seed: int,
    say: Callable[[str], None],
    broker: BrokerKind = "pubsub",
    rows: RowsKind = "bigquery",
    broker_delay_s: float = 0.0,
    pause_s: float = 0.0,
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Findings:
    """Runs traffic and faults concurrently and counts the outcomes.

    Args:
        folder: receives the state and logs of all parts.
        requests: minimum number of requests; more are sent until all faults are done.
        faults_count: number of faults to inject.
        in_flight: number of callers at any one time.
        say: called with a line for each fault.
        broker_delay_s: delay in each direction between the broker and other parts.
        pause_s: average seconds that each caller waits between two requests.
    """
    began_s = time.monotonic()
    with World(
        folder,
        broker=broker,
        rows=rows,
        has_keys=True,
        broker_delay_s=broker_delay_s,
        environments=environments,
    ) as world:
        say(f"all parts ready after {time.monotonic() - began_s:.1f} s")
        traffic = Traffic(
            [world.url(api) for api in APIS],
            in_flight=in_flight,
            requests=requests,
            seed=seed,
            pause_s=pause_s,
        )
        plan = list(faults(seed, faults_count, has_archive=world.has_archive))
        done = asyncio.run(_run(world, traffic, iter(plan), say))
        found, missing = read_rows(world, traffic.tally.expected_rows)
        double, wrong = _check_rows(found, traffic.tally)
        costs = _check_costs(found, traffic.tally)
        off = check_counters(world, traffic.tally.expected_rows, say)
    took_s = time.monotonic() - began_s
    pairs = {(one["api_instance"], one["worker"]) for rows in found.values() for one in rows}
    pairs = {pair for pair in pairs if all(pair)}
    return Findings(done, traffic.tally, missing, double, wrong, costs, off, took_s, pairs)


async def _run(
    world: World, traffic: Traffic, plan: Iterator[Fault], say: Callable[[str], None]
) -> Counter[str]:
    async with traffic:
        injecting = asyncio.create_task(inject(world, plan, say))
        await traffic.run(lambda: not injecting.done())
        done = await injecting
        await traffic.alone()
        return done


def read_rows(world: World, expected: Collection[str]) -> tuple[Rows, list[str]]:
    """All rows, each counted once, keyed by request, and the ids of requests that have no rows."""
    settings = world.settings
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    since = "WHERE received_at > TIMESTAMP '2020-01-01'"
    fields = "request_id, status, key_id, tenant, cost_usd, api_instance, worker"
    sql = f"SELECT {fields} FROM `{settings.dataset}.rows_deduplicated` {since}"
    until_s = time.monotonic() + WAIT_LIMIT_S
    while True:
        found: Rows = {}
        for row in client.query_and_wait(sql, wait_timeout=WAIT_LIMIT_S):
            found.setdefault(row["request_id"], []).append(dict(row.items()))
        missing = [one for one in expected if one not in found]
        if not missing or time.monotonic() > until_s:
            break
        time.sleep(0.5)
    client.close()
    return found, missing


def _check_rows(found: Rows, tally: Tally) -> tuple[list[str], list[str]]:
    """Returns requests with two rows, and requests whose row contradicts their response."""
    double = [one for one, rows in found.items() if len(rows) > 1]
    wrong = [
        f"{one}: {found[one][0]['status']}, not {status}"
        for one, status in tally.expected_rows.items()
        if one in found and status not in ("any", found[one][0]["status"])
    ]
    return double, wrong


def _check_costs(found: Rows, tally: Tally) -> list[str]:
    """Returns the requests whose rows do not charge exactly the cost in their response."""
    charged = {one: sum(row["cost_usd"] or 0.0 for row in rows) for one, rows in found.items()}
    return [
        f"{one}: {charged[one]}, not {usd}"
        for one, usd in tally.told_usd.items()
        if one in charged and abs(charged[one] - usd) > EXACT_USD
    ]


def check_counters(
    world: World, expected: Collection[str], say: Callable[[str], None]
) -> list[str]:
    """Compares Redis's count for each budget with its rows.

    They are equal except for the amounts that killed API instances could have returned:
    reservations for their open requests, and amounts taken in advance. So a counter is never below
    its rows.

    Args:
        expected: ids of requests that have rows. Other requests may also have rows, which may
            arrive later.
        say: called with each budget's three numbers.
    """
    until_s = time.monotonic() + SETTLE_LIMIT_S
    with redis.Redis.from_url(world.settings.redis_url) as client:
        while True:
            rows = _charged(read_rows(world, expected)[0])
            counted = {
                name: float(client.hget(f"{BUDGET_KEY}{name}:usd", "used") or 0) for name in rows
            }
            apart_usd = {name: counted[name] - usd for name, usd in rows.items()}
            if max(map(abs, apart_usd.values())) <= EXACT_USD or time.monotonic() > until_s:
                break
            time.sleep(0.5)
    for name, usd in rows.items():
        above_usd = f"{apart_usd[name]:+.9f}, at most {world.held_usd[f'{name}:usd']:+.6f}"
        say(f"{name}: counted {counted[name]:.6f}, rows {usd:.6f}: {above_usd}")
    return [
        f"{name}: {counted[name]}, rows {rows[name]}"
        for name, usd in apart_usd.items()
        if not -EXACT_USD <= usd <= world.held_usd[f"{name}:usd"] + EXACT_USD
    ]


def _charged(found: Rows) -> dict[str, float]:
    """The amount that the rows charge to each budget."""
    charged = dict.fromkeys(_budgets(), 0.0)
    for row in itertools.chain.from_iterable(found.values()):
        for name in (f"t:{row['tenant']}", f"k:{row['tenant']}:{row['key_id']}"):
            charged[name] = charged.get(name, 0.0) + (row["cost_usd"] or 0.0)
    return charged


def _budgets() -> list[str]:
    """The tenants' and keys' budgets, as named in Redis."""
    keys = [f"k:{tenant}:{stored(key, tenant).id}" for key, tenant in TENANTS.items()]
    return [*(f"t:{tenant}" for tenant in set(TENANTS.values())), *keys]
