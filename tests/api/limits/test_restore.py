"""Budgets after Redis has lost its counts: they match the rows in BigQuery to the last digit."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis.asyncio
from google.cloud import bigquery

from api.limits.spent import SpentRows
from infra import bigquery as tables
from shared.tenants.plan import Plan
from shared.usage.writer import fields_of
from tests.api.ledger import LedgerWorld, ledger_world
from tests.api.row_sums import RowSums
from tests.api.test_ledger import words
from tests.bigquery_client import connected
from tests.keys import keys_url
from tests.limits import WAIT_LIMIT_S
from tests.penstock_command import penstock

pytestmark = [pytest.mark.slow(about_s=12), pytest.mark.anyio]

DATASET = "penstock"
RICH = ("one", "two", "other")


@dataclass
class Books:
    """A deployment with its counters and its rows in BigQuery."""

    world: LedgerWorld
    client: bigquery.Client
    capsys: pytest.CaptureFixture[str]

    async def store_rows(self) -> None:
        """Stores all existing rows, some of them twice."""
        rows = [fields_of(row) for rows in self.world.ledger.row_lists for row in rows]
        place = f"{DATASET}.rows"
        assert not self.client.insert_rows_json(place, rows, row_ids=[None] * len(rows))

    async def restore(self, *words: str) -> str:
        """Runs the command. Returns its output."""
        assert await asyncio.to_thread(penstock, "budgets", "restore", *words) == 0
        return self.capsys.readouterr().out

    async def until_rests(self) -> None:
        """Waits until no request is in flight and each instance has returned its unused amounts."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            for api in self.world.ledger.apis:
                await api.until_idle()
            await self.world.ledger.until_idle()
            for api in self.world.ledger.apis:
                await api.dependencies.limiter.give_back(float("inf"))

    async def flush(self) -> None:
        async with redis.asyncio.Redis.from_url(self.world.ledger.redis_url) as client:
            await client.flushall()

    async def counter(self, name: str, *fields: str) -> Any:
        client: redis.asyncio.Redis
        async with redis.asyncio.Redis.from_url(self.world.ledger.redis_url) as client:
            return await client.hmget(f"penstock:limits:month:{name}:usd", list(fields))

    async def ask(self, key: str, count: int, start: int) -> None:
        """Sends texts under this key, one after another. All of them succeed."""
        for at in range(start, start + count):
            answer = await self.world.ledger.embed(key, [key[0] + words(1, at)[0]])
            assert answer.status_code == 200, answer.text


@pytest.fixture
async def books(
    redis_url: str,
    tmp_path: Path,
    bigquery_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> AsyncIterator[Books]:
    project = f"restore-{uuid4().hex[:8]}"
    # The instances see no rows, so only the command can add amounts to budgets.
    async with ledger_world(redis_url, tmp_path, instances=2, spent=RowSums([])) as world:
        for name, value in {
            "REDIS_URL": redis_url,
            "KEYS_URL": world.settings.keys_url,
            "BIGQUERY_ENDPOINT": bigquery_endpoint,
            "PROJECT": project,
            "DATASET": DATASET,
        }.items():
            monkeypatch.setenv(f"PENSTOCK_{name}", value)
        with connected(bigquery_endpoint, project) as client:
            tables.create(client, DATASET)
            yield Books(world, client, capsys)


async def test_budgets_are_as_their_rows_after_a_loss_under_load(books: Books) -> None:
    await asyncio.gather(*(books.ask(key, 10, 0) for key in RICH))
    later = [asyncio.create_task(books.ask(key, 30, 10)) for key in RICH]
    await books.world.harness.until(lambda: len(books.world.harness.rows) >= 45)
    await books.store_rows()
    await books.flush()
    await books.restore()
    await asyncio.gather(*later)
    await books.until_rests()
    await books.store_rows()
    said = await books.restore()
    assert "restored" in said
    charged = await books.world.ledger.check()
    assert [charged[key] > 0 for key in RICH] == [True] * 3
    assert await books.restore() == "all budgets match their rows\n"


async def test_budget_that_was_spent_refuses_again(books: Books, tmp_path: Path) -> None:
    await books.ask("other", 6, 0)
    await books.until_rests()
    spent = Plan(budget_usd_per_month=books.world.ledger.charged_usd("other"))
    keys_url(tmp_path, plans={"spent": spent}, tenants={"globex": "spent"}, other="globex")
    for api in books.world.ledger.apis:
        await api.dependencies.access.refresh()
    refused = await books.world.ledger.embed("other", ["aa"])
    assert refused.json()["error"]["code"] == "insufficient_quota"
    await books.until_rests()
    await books.flush()
    assert (await books.world.ledger.embed("other", ["bb"], at=1)).status_code == 200
    await books.until_rests()
    await books.store_rows()
    assert "t:globex" in await books.restore()
    refused = await books.world.ledger.embed("other", ["cc"], at=1)
    assert refused.json()["error"]["code"] == "insufficient_quota"


async def test_instances_count_the_rows_of_a_new_budget_by_themselves(
    redis_url: str, tmp_path: Path, bigquery_endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"budget-{uuid4().hex[:8]}", DATASET, bigquery_endpoint
    plans = {"poor": Plan(budget_usd_per_month=0.006)}
    with connected(bigquery_endpoint, place[0]) as client:
        tables.create(client, DATASET)
        spent = SpentRows(*place, 2**30)
        async with ledger_world(redis_url, tmp_path, spent=spent) as world:
            access, books = world.api.dependencies.access, Books(world, client, capsys)
            keys_url(tmp_path, new="initrode")
            await access.refresh()
            await books.ask("new", 2, 0)
            await books.until_rests()
            await books.store_rows()
            keys_url(tmp_path, plans=plans, tenants={"initrode": "poor"}, new="initrode")
            await access.refresh()
            used = b"0"
            async with asyncio.timeout(WAIT_LIMIT_S):
                while float(used or 0) == 0:
                    await asyncio.sleep(0.05)
                    [used] = await books.counter("t:initrode", "used")
            assert float(used) == pytest.approx(2 * 0.005, abs=1e-9), "two texts of five letters"
            refused = await world.ledger.embed("new", ["x"])
            assert refused.json()["error"]["code"] == "insufficient_quota"


async def test_dry_run_changes_nothing(books: Books) -> None:
    await books.ask("one", 2, 0)
    await books.until_rests()
    await books.store_rows()
    await books.flush()
    said = await books.restore("--dry-run")
    assert "t:acme" in said
    assert said.count("to be restored") == 2, "the tenant's and the key's"
    assert await books.counter("t:acme", "used") == [None]


async def test_counter_above_its_rows_is_lowered_only_if_asked(books: Books) -> None:
    await books.ask("other", 1, 0)
    await books.until_rests()
    before = await books.counter("t:globex", "used")
    said = await books.restore()
    assert "exceeds its rows, unchanged" in said, "no row has arrived yet"
    assert await books.counter("t:globex", "used") == before
    await books.restore("--lower")
    assert await books.counter("t:globex", "used") == [b"0"]
    await books.store_rows()
    await books.restore()
    await books.world.ledger.check()


async def test_what_is_reserved_is_not_taken_for_spent(books: Books) -> None:
    """A row may exist before its request has settled its reservation. It counts once."""
    await books.ask("one", 1, 0)
    await books.world.harness.until(lambda: len(books.world.harness.rows) == 1)
    books.world.harness.process.gate.clear()
    waiting = asyncio.create_task(books.world.ledger.embed("one", ["wait"]))
    await books.world.harness.process.started.wait()
    await books.store_rows()
    said = await books.restore("--lower")
    assert "t:acme" not in said or "in use: run again" in said
    books.world.harness.process.gate.set()
    assert (await waiting).status_code == 200
    await books.until_rests()
    await books.store_rows()
    await books.restore()
    await books.world.ledger.check()


async def test_wrong_settings_are_named(
    books: Books, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_KEYS_URL", "")
    assert await asyncio.to_thread(penstock, "budgets", "restore") == 1
    assert "PENSTOCK_KEYS_URL is not set, so tenants have no budgets" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_KEYS_URL", books.world.settings.keys_url)
    monkeypatch.setenv("PENSTOCK_DATASET", "other")
    assert await asyncio.to_thread(penstock, "budgets", "restore") == 1
    assert "the rows can't be read right now" in capsys.readouterr().err
