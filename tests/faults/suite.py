"""The fault suite: traffic runs while parts die, hang and are cut off; then everything is counted.

`python -m tests.faults` runs it in full (`make faults`); tests/faults/test_faults.py in a short
form.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.faults.schedule import Fault, faults, inject
from tests.faults.traffic import Tally, Traffic
from tests.faults.world import APIS, BrokerKind, RowsKind, World
from tests.limits import WAIT_LIMIT_S


@dataclass
class Findings:
    """What a run of the suite found."""

    faults: Counter[str]
    tally: Tally
    rows_missing: list[str]
    rows_double: list[str]
    rows_wrong: list[str]
    took_s: float

    def table(self) -> list[tuple[str, int]]:
        """What must be zero, by name, after what was done."""
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
        ]

    def flaws(self) -> list[str]:
        """Everything that must not be, by name."""
        flaws = {
            "lost": self.tally.lost,
            "answered twice": self.tally.answered_twice,
            "wrong payload": self.tally.wrong,
            "not healed": self.tally.not_healed,
            "row missing": self.rows_missing,
            "row double": self.rows_double,
            "row wrong": self.rows_wrong,
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
) -> Findings:
    """Runs traffic and faults side by side and counts what came of it.

    Args:
        folder: gets the state and the logs of all parts.
        requests: at least so many are sent; more while faults go on.
        faults_count: how many faults are injected.
        in_flight: callers at the same time.
        seed: of texts and faults.
        say: gets a line for each fault.
        broker: the one to break.
        rows: where they go first.
    """
    began_s = time.monotonic()
    with World(folder, broker=broker, rows=rows) as world:
        say(f"all parts ready after {time.monotonic() - began_s:.1f} s")
        traffic = Traffic(
            [world.url(api) for api in APIS], in_flight=in_flight, requests=requests, seed=seed
        )
        plan = faults(seed, faults_count, has_archive=world.has_archive)
        done = asyncio.run(_run(world, traffic, plan, say))
        missing, double, wrong = _check_rows(world, traffic.tally)
    return Findings(done, traffic.tally, missing, double, wrong, time.monotonic() - began_s)


async def _run(
    world: World, traffic: Traffic, plan: Iterator[Fault], say: Callable[[str], None]
) -> Counter[str]:
    async with traffic:
        injecting = asyncio.create_task(inject(world, plan, say))
        await traffic.run(lambda: not injecting.done())
        done = await injecting
        await traffic.alone()
        return done


def _check_rows(world: World, tally: Tally) -> tuple[list[str], list[str], list[str]]:
    """Ids of requests without a row, with two, and with one that says something else than their
    answer.
    """
    settings = world.settings
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    since = "WHERE received_at > TIMESTAMP '2020-01-01'"
    sql = f"SELECT request_id, status FROM `{settings.dataset}.rows_deduplicated` {since}"
    until_s = time.monotonic() + WAIT_LIMIT_S
    while True:
        found: dict[str, list[str]] = {}
        for row in client.query_and_wait(sql, wait_timeout=WAIT_LIMIT_S):
            found.setdefault(row["request_id"], []).append(row["status"])
        missing = [one for one in tally.expected_rows if one not in found]
        if not missing or time.monotonic() > until_s:
            break
        time.sleep(0.5)
    client.close()
    double = [one for one, statuses in found.items() if len(statuses) > 1]
    wrong = [
        f"{one}: {found[one][0]}, not {status}"
        for one, status in tally.expected_rows.items()
        if one in found and status not in ("any", found[one][0])
    ]
    return missing, double, wrong
