"""Costs of custom class predictions: by item, by work, by second. The three books agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from api.limits.limited_request import STOPS_WITHIN_S
from shared.models.tasks.custom import interface_of
from shared.stores.objects import ObjectStore
from shared.tenants.plan import Plan
from tests.api.batches.batching import answers, created, jsonl, until
from tests.api.fake_worker import FakeWorker
from tests.api.harness import running_api, settings_for
from tests.api.ledger import LedgerWorld, ledger_world
from tests.api.predicting import WAIT, until_processing
from tests.api.test_ledger import running_batches
from tests.keys import bearer, key_for, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import entry_of, write_class
from tests.workers.worker_harness import running_worker
from workers.models.custom.aside import AsideClass
from workers.models.custom.preparation import CustomPreparer
from workers.runtime.pool import HostedModel, ModelPool

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=30)]

BATCHED = """
class Given(BaseModel):
    text: str
    mode: str = Input(default="say", choices=["say", "fail", "lie"])

class Predictor(BasePredictor):
    def predict_batch(self, inputs: list[Given]) -> list[str]:
        time.sleep(0.01)
        return [ValueError("no") if one.mode == "fail" else one.text for one in inputs]

    def work(self, input: Given) -> int:
        return -5 if input.mode == "lie" else len(input.text)
"""
TALKS_ON = """
class Predictor(BasePredictor):
    def predict(self, text: str) -> ConcatenateIterator[str]:
        yield "piece"
        while True:
            time.sleep(0.01)

    def work(self, input) -> int:
        return len(input.text)
"""
MOST = 100
PRICE = {"per_item_usd": 0.25, "per_work_usd": 0.01, "per_second_usd": 0.5, "cached_share": 0.5}


@asynccontextmanager
async def charged(
    redis_url: str, tmp_path: Path, body: str, **fields: Any
) -> AsyncIterator[LedgerWorld]:
    """Deploys a class with its books, and tenants with budgets."""
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", body)
    entry = entry_of(folder, **{"price": PRICE, "work": {"max": MOST}, **fields})
    async with AsyncExitStack() as opened:
        pool = await opened.enter_async_context(
            ModelPool([HostedModel(entry, folder)], device="cpu", processes=1)
        )
        weigher = AsideClass(entry, folder) if interface_of(entry).weighs else None
        if weigher is not None:
            opened.callback(weigher.close)
        worker = running_worker(
            redis_url,
            tmp_path,
            pool=pool,
            objects=ObjectStore(f"file://{tmp_path}/objects"),
            model=entry,
            preparer=CustomPreparer(entry, weigher),
        )
        yield await opened.enter_async_context(
            ledger_world(redis_url, tmp_path, entry, worker=worker)
        )


async def predict(world: LedgerWorld, key: str = "one", **given: Any) -> dict[str, Any]:
    """A finished prediction. Records the cost reported in its response."""
    http = world.api.http
    body = {"version": "mine", "input": given}
    response = await http.post("/v1/predictions", json=body, headers=bearer(key) | WAIT)
    assert response.status_code == 201, response.text
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            url = f"/v1/predictions/{response.json()['id']}"
            found: dict[str, Any] = (await http.get(url, headers=bearer(key))).json()
            if found["status"] in ("succeeded", "failed", "canceled"):
                break
            await asyncio.sleep(0.02)
    world.ledger.tell(key, (found["metrics"] or {}).get("cost_usd", 0.0))
    return found


async def test_work_and_seconds_are_charged_alike_in_answer_counter_and_row(
    redis_url: str, tmp_path: Path
) -> None:
    async with charged(redis_url, tmp_path, BATCHED) as world:
        texts = ("a", "b" * 10, "c" * MOST)
        await asyncio.gather(*(predict(world, text=text) for text in texts))
        costs = await world.ledger.check()
        rows = {row.work: row for row in world.ledger.rows()}
        assert sorted(rows) == [1, 10, MOST]  # type: ignore[type-var]
        for work, row in rows.items():
            assert work is not None
            assert row.inference_ms is not None
            assert row.batch_size is not None
            seconds = row.inference_ms / 1000 / row.batch_size
            assert row.cost_usd == pytest.approx(0.25 + work * 0.01 + seconds * 0.5)
        assert costs["one"] > 3 * 0.25 + 111 * 0.01


async def test_what_fails_costs_nothing(redis_url: str, tmp_path: Path) -> None:
    async with charged(redis_url, tmp_path, BATCHED) as world:
        failed = await predict(world, text="abc", mode="fail")
        assert (failed["status"], failed["error"]) == ("failed", "ValueError: no")
        lied = await predict(world, text="abc", mode="lie")
        assert lied["error"] == "work: must return a whole number of at least 1, got -5"
        heavy = await predict(world, text="x" * (MOST + 1))
        assert heavy["error"] == (
            "input[0]: the work of this input is 101, which exceeds the maximum of 100"
        )
        assert (await world.ledger.check())["one"] == 0.0


async def test_an_equal_result_costs_its_share_of_its_work(redis_url: str, tmp_path: Path) -> None:
    async with charged(redis_url, tmp_path, BATCHED, deterministic=True) as world:
        await predict(world, text="abcd")
        await world.ledger.check()
        await predict(world, text="abcd")
        await world.ledger.check()
        first, again = sorted(world.ledger.rows(), key=lambda row: row.received_at_s)
        # The first hit on a worker's own result checks in Redis whether it has been paid for
        # (decision 131).
        assert (first.cache, again.cache) == ("miss", "redis")
        assert again.work == 4
        assert again.cost_usd == pytest.approx(0.5 * (0.25 + 4 * 0.01))


async def test_a_stream_that_was_read_in_part_costs_its_whole_work(
    redis_url: str, tmp_path: Path
) -> None:
    async with charged(redis_url, tmp_path, TALKS_ON) as world:
        http, key = world.api.http, bearer("one")
        body = {"version": "mine", "input": {"text": "abcdefg"}}
        made = (await http.post("/v1/predictions", json=body, headers=key)).json()
        async with http.stream("GET", made["urls"]["stream"], headers=key) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: piece"):
                    break
        await http.post(f"/v1/predictions/{made['id']}/cancel", headers=key)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not world.ledger.rows():  # noqa: ASYNC110  written once the class has stopped
                await asyncio.sleep(0.01)
        found = (await http.get(f"/v1/predictions/{made['id']}", headers=key)).json()
        world.ledger.tell("one", found["metrics"]["cost_usd"])
        await world.ledger.check()
        (row,) = world.ledger.rows()
        assert (row.status, row.work) == ("canceled", 7)
        assert row.cost_usd is not None
        assert row.inference_ms is not None
        seconds = row.inference_ms / 1000
        assert row.cost_usd == pytest.approx(0.25 + 7 * 0.01 + seconds * 0.5)


async def test_a_budget_reserves_the_most_work_and_the_longest_time(
    redis_url: str, tmp_path: Path
) -> None:
    """A key with less left than the maximum cost is rejected, whatever the actual cost."""
    async with charged(redis_url, tmp_path, BATCHED, deadline={"longest_s": 60}) as world:
        http = world.api.http
        body = {"version": "mine", "input": {"text": "a"}}
        refused = await http.post("/v1/predictions", json=body, headers=bearer("poor"))
        assert refused.status_code == 429
        assert await predict(world, text="a")
        await world.ledger.check()
        model = world.catalog.find("mine")
        most = 0.25 + MOST * 0.01 + (model.deadline.longest_s + STOPS_WITHIN_S) * 0.5
        assert most < 1000


async def test_work_counts_toward_its_limit_by_the_minute(redis_url: str, tmp_path: Path) -> None:
    """The maximum is reserved for each prediction, but only the actual work is charged."""
    async with charged(redis_url, tmp_path, BATCHED) as world:
        plan = Plan(work_per_min=MOST + 20)
        keys = keys_url(tmp_path, plans={"p": plan}, tenants={"acme": "p"}, a="acme")
        settings = settings_for(tmp_path, redis_url=redis_url, keys_url=keys)
        broker = world.harness.broker
        nobody, body = FakeWorker(broker, ()), {"version": "mine", "input": {"text": "x" * 15}}
        async with running_api(settings, broker, broker, world.catalog, worker=nobody) as api:
            answers = [
                await api.http.post("/v1/predictions", json=body, headers=bearer("a") | WAIT)
                for _ in range(3)
            ]
    assert [answer.status_code for answer in answers] == [201, 201, 429]
    assert answers[0].headers["x-ratelimit-limit-work"] == str(MOST + 20)
    assert "work per minute" in answers[2].json()["detail"]


SLOW = """
class Given(BaseModel):
    text: str

class Predictor(BasePredictor):
    def setup(self) -> None:
        time.sleep(1.5)
        self.free_s = time.monotonic()

    def predict_batch(self, inputs: list[Given]) -> list[str]:
        free_s = self.free_s
        time.sleep(0.3)
        texts = [one.text for one in inputs]
        self.free_s = time.monotonic()
        if "exit" in texts:
            os._exit(3)
        if "raise" in texts:
            raise ValueError("no")
        return [str(free_s) for _ in texts]
"""
ONE_BY_ONE = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        time.sleep(1.5)
        self.free_s = time.monotonic()

    def predict(self, text: str) -> str:
        if text == "exit":
            os._exit(3)
        return str(self.free_s)
"""
# Both return the time from which the class was free for the call. On any machine, a call takes at
# most the time since then.


@pytest.mark.parametrize("body", [SLOW, ONE_BY_ONE])
async def test_nobody_pays_for_the_set_up_after_anothers_crash(
    redis_url: str, tmp_path: Path, body: str
) -> None:
    async with charged(redis_url, tmp_path, body, work={}) as world:
        assert (await predict(world, text="exit"))["status"] == "failed"
        found = await predict(world, text="a")
        taken_s = time.monotonic() - float(found["output"])
        await world.ledger.check()
        (row,) = [one for one in world.ledger.rows() if one.status == "succeeded"]
        assert row.inference_ms is not None
        assert row.inference_ms <= taken_s * 1000


async def test_nobody_pays_for_the_calls_that_another_made_fail(
    redis_url: str, tmp_path: Path
) -> None:
    price = {"per_second_usd": 0.1}
    async with charged(redis_url, tmp_path, SLOW, work={}, price=price) as world:
        holds = asyncio.create_task(predict(world, text="first"))
        await until_processing(world.api, bearer("one"))
        texts = ("a", "b", "c", "d", "raise", "e", "f", "g")
        found = await asyncio.gather(holds, *(predict(world, text=text) for text in texts))
        ended_s = time.monotonic()
        await world.ledger.check()
        free_s = {item["id"]: float(item["output"]) for item in found if item["output"]}
        assert len(free_s) == 8
        rows = [row for row in world.ledger.rows() if row.status == "succeeded"]
        assert {row.request_id for row in rows} == set(free_s)
        for row in rows:
            assert row.inference_ms is not None
            assert row.inference_ms <= (ended_s - free_s[row.request_id]) * 1000


GIVES_A_FILE = """
class Predictor(BasePredictor):
    def predict(self, size: int) -> Path:
        if not size:
            raise ValueError("nothing to give")
        path = Path("out.bin")
        path.write_bytes(b"x" * size)
        return path
"""


async def test_lines_of_batches_are_charged_alike_in_answer_counter_and_row(
    redis_url: str, tmp_path: Path
) -> None:
    """A prediction that was computed but whose file is too large for a line costs nothing."""
    price = {"per_item_usd": 0.25}
    async with charged(redis_url, tmp_path, GIVES_A_FILE, price=price, work={}) as world:
        client = world.api.openai(api_key=key_for("one"))
        sizes = {"small": 3, "above what records keep": 100_000, "too large": 5_000_000, "none": 0}
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/predictions"}
            | {"body": {"version": "mine", "input": {"size": size}}}
            for name, size in sizes.items()
        ]
        async with running_batches(world):
            batch = await created(client, jsonl(lines), endpoint="/v1/predictions")
            batch = await until(client, batch)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
        told = [
            one["response"]["body"]["metrics"]["cost_usd"]
            for one in await answers(client, batch.output_file_id)
        ]
        assert told == [0.125, 0.125], "the price of a batch is half of it"
        for usd in told:
            world.ledger.tell("one", usd)
        costs = await world.ledger.check()
        assert costs["one"] == pytest.approx(0.25)
        assert {row.batch_id for row in world.ledger.rows()} == {batch.id}
        assert len(world.ledger.rows()) == 4
