"""A worker whose model is withdrawn: waiting and running work fails with that error and is not
charged.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from shared.broker.transport import inbox_topic_id
from shared.messages import Envelope, Item, ItemOutcome, Job, JobBody
from shared.models.catalog import Model
from shared.models.entry import Generation, TextAdapter
from shared.models.tasks.embedding import TextInput
from shared.money.charge import cost_usd, price_of
from shared.stores.cache import ResultCache
from shared.stores.withdrawals import LiveWithdrawals, Withdrawal, WithdrawalStore
from tests.limits import WAIT_LIMIT_S
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker

pytestmark = pytest.mark.anyio

NEVER_S = 3600.0
WITHDRAWN = "model_withdrawn"


class Operator:
    """Withdraws the model and notifies the worker immediately."""

    def __init__(self, redis_url: str) -> None:
        self.store = WithdrawalStore(redis_url)
        self.live = LiveWithdrawals(self.store, refresh_s=NEVER_S)

    async def withdraws(self) -> None:
        await self.store.withdraw(Withdrawal(MODEL.name, MODEL.revision, 1.0, "user x"))
        await self.live.refresh()

    async def undoes(self) -> None:
        await self.store.undo(MODEL.name, MODEL.revision)
        await self.live.refresh()


@pytest.fixture
async def operator(redis_url: str) -> AsyncIterator[Operator]:
    made = Operator(redis_url)
    async with made.live:
        yield made


@pytest.fixture
async def worker(
    redis_url: str, tmp_path: Path, operator: Operator
) -> AsyncIterator[WorkerHarness]:
    async with AsyncExitStack() as opened:
        running = running_worker(redis_url, tmp_path, withdrawals=operator.live)
        yield await opened.enter_async_context(running)


def code_of(outcome: ItemOutcome) -> str:
    assert (outcome.status, outcome.result) == ("failed", None)
    assert outcome.error is not None
    assert cost_usd(price_of(MODEL, 0.0, 1.0), outcome) == 0
    return outcome.error.code


async def test_jobs_that_come_are_refused_until_it_is_undone(
    worker: WorkerHarness, operator: Operator
) -> None:
    assert await worker.ask("before") == [("succeeded", b"before")]
    await operator.withdraws()
    await worker.send("one", "two", request_id="late")
    body = (await worker.reply()).body
    assert [code_of(one) for one in body.outcomes] == [WITHDRAWN] * 2
    assert worker.process.batches == [["before"]]
    await operator.undoes()
    assert await worker.ask("after", request_id="after") == [("succeeded", b"after")]


async def test_what_runs_and_what_waits_ends_at_once(
    worker: WorkerHarness, operator: Operator, redis_url: str
) -> None:
    worker.process.is_deaf = True
    worker.process.gate.clear()
    await worker.send("running", request_id="running")
    await worker.process.started.wait()
    await worker.send("waiting", request_id="waiting")
    registry = worker.registry
    assert registry is not None
    await worker.until(lambda: len(registry.find()) == 2)
    await operator.withdraws()
    replies = [await worker.reply(), await worker.reply()]
    assert {reply.request_id for reply in replies} == {"running", "waiting"}
    assert [code_of(reply.body.outcomes[0]) for reply in replies] == [WITHDRAWN] * 2
    worker.process.gate.set()
    await worker.until(lambda: not registry.find())
    assert worker.process.batches == [["running"]], "what waited was computed all the same"
    async with ResultCache(redis_url, 0) as cache:
        assert await cache.get_many(["key-running", "key-waiting"]) == {}
    assert {row.error_code for row in worker.rows} == {WITHDRAWN}
    assert sum(row.cost_usd or 0 for row in worker.rows) == 0


async def test_a_running_text_with_an_adapter_fails_with_the_name_that_its_caller_knows(
    redis_url: str, tmp_path: Path, operator: Operator
) -> None:
    generation = Generation(adapters={"letters-law": TextAdapter(source="local:law")})
    model = Model.model_validate(MODEL.model_dump(exclude_unset=True) | {"generation": generation})
    async with running_worker(
        redis_url, tmp_path, model=model, withdrawals=operator.live
    ) as worker:
        worker.process.is_deaf = True
        worker.process.gate.clear()
        now_s = time.time()
        envelope = Envelope(
            request_id="running",
            part=0,
            model="letters-law",
            tenant="t",
            inbox=inbox_topic_id("1"),
            slot="0",
            deadline_s=now_s + WAIT_LIMIT_S,
            received_at_s=now_s,
            published_at_s=now_s,
        )
        await worker.publish(Job(envelope, JobBody([Item(0, TextInput("a text"))])))
        await worker.process.started.wait()
        await operator.withdraws()
        (outcome,) = (await worker.reply()).body.outcomes
        worker.process.gate.set()
    assert outcome.error is not None
    assert "model 'letters-law' was withdrawn" in outcome.error.message


async def test_prediction_ends_in_its_record(worker: WorkerHarness, operator: Operator) -> None:
    await operator.withdraws()
    await worker.stores.predictions.create("pred_a", "t", b"{}", deadline_s=2e9, keep_s=60)
    await worker.send("a text", request_id="pred_a", prediction="1")
    await worker.reply()
    record = await worker.stores.records.read("pred_a")
    assert record is not None
    assert record.reply is not None
    assert (record.state, code_of(record.reply.outcomes[0])) == ("failed", WITHDRAWN)
