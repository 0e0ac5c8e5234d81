"""Replies that are ready at the same time share messages, if the API instance supports that."""

import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from infra.local.redis_server import RedisServer
from shared.broker.transport import inbox_topic_id, workers_subscription_id
from shared.errors import Unavailable
from shared.messages import decode_reply_batch, decode_reply_body, is_reply_batch
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker
from workers.jobs import registry

pytestmark = pytest.mark.anyio
NAMES = ("a", "b", "c", "d")
"""The same as the model's batch size."""


async def compute_together(harness: WorkerHarness, **of_each: dict[str, str]) -> list[str]:
    """Computes one job for each of NAMES in one batch. Returns the replies' request ids in order.

    Args:
        of_each: additional envelope fields, keyed by job name.
    """
    harness.process.gate.clear()
    await harness.send("first", request_id="first")
    await harness.process.started.wait()
    for name in NAMES:
        await harness.send(name, request_id=name, **of_each.get(name, {}))  # type: ignore[arg-type]
    await until_all_wait(harness)
    harness.process.gate.set()
    harness.process.gate.clear()  # only for the first job, so that its reply shares no message
    assert (await harness.reply()).request_id == "first"
    harness.process.gate.set()
    came = [(await harness.reply()).request_id for _ in NAMES]
    assert harness.process.batches == [["first"], list(NAMES)]
    return came


async def until_all_wait(harness: WorkerHarness) -> None:
    assert harness.consumer is not None
    queue = harness.consumer.queue
    await harness.until(lambda: queue.waiting == len(NAMES))


async def go_on(harness: WorkerHarness, canceled: str = "") -> None:
    """Lets the model continue once all jobs are waiting.

    If `canceled` is given, that record is canceled without notifying the worker.
    """
    await until_all_wait(harness)
    if canceled:
        assert harness.consumer is not None
        harness.consumer.cancellation.cancel = lambda record: None  # type: ignore[method-assign]
        await harness.stores.records.cancel(canceled)
    harness.process.gate.set()


def handed_back() -> float:
    return REGISTRY.get_sample_value("penstock_worker_jobs_handed_back_total") or 0.0


def sizes(harness: WorkerHarness) -> list[int]:
    """The number of replies in each message after the first job's message."""
    return [int(one.attributes.get("replies", "1")) for one in harness.reply_messages[1:]]


async def test_replies_of_a_batch_are_one_message(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        assert await compute_together(harness) == list(NAMES)
        assert sizes(harness) == [4]
        assert harness.reply_messages[1].attributes == {
            "schema": "1",
            "replies": "4",
            "slot": "0",
        }
        await harness.until(lambda: len(harness.rows) == 5)
        assert {one.row_id: one.status for one in harness.rows} == {
            f"{name}:0": "succeeded" for name in ("first", *NAMES)
        }


async def test_an_instance_of_the_release_before_gets_each_reply_by_itself(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await compute_together(harness, **{name: {"replies": ""} for name in NAMES})
        assert sizes(harness) == [1] * 4
        assert not any(is_reply_batch(one.attributes) for one in harness.reply_messages)
        assert [one.attributes["request_id"] for one in harness.reply_messages[1:]] == list(NAMES)


async def test_while_releases_mix_only_those_share_that_can(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        came = await compute_together(harness, c={"replies": ""})
        assert sorted(came) == list(NAMES)
        assert sorted(sizes(harness)) == [1, 1, 2]


async def test_slots_do_not_share(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await compute_together(harness, c={"slot": "1"}, d={"slot": "1"})
        assert sizes(harness) == [2, 2]
        slots = [one.attributes["slot"] for one in harness.reply_messages[1:]]
        assert sorted(slots) == ["0", "1"]


async def test_a_message_has_a_bound(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_REPLY_BATCH_BYTES", 600)
    async with running_worker(redis_url, tmp_path) as harness:
        assert sorted(await compute_together(harness)) == list(NAMES)
        assert sizes(harness) != [4]
        assert sum(sizes(harness)) == 4
        assert all(len(one.data) < 900 for one in harness.reply_messages)


async def test_replies_that_the_broker_did_not_take_come_again_with_their_jobs(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        for name in NAMES:
            await harness.send(name, request_id=name)
        await harness.process.started.wait()
        before = handed_back()
        harness.broker.outage = Unavailable("the broker is away")
        harness.process.gate.set()
        await harness.until(lambda: handed_back() - before >= len(NAMES))
        harness.broker.outage = None
        came = [(await harness.reply()).request_id for _ in NAMES]
        assert sorted(came) == list(NAMES)
        await harness.until(lambda: len(harness.rows) == 4)
        assert {one.status for one in harness.rows} == {"succeeded"}


async def test_replies_whose_inbox_is_gone_are_not_charged(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        for name in NAMES:
            await harness.send(name, request_id=name)
        await harness.process.started.wait()
        await harness.broker.delete_topic(inbox_topic_id("1"))
        harness.process.gate.set()
        await harness.until(lambda: len(harness.rows) == 4)
        assert {(one.status, one.cost_usd) for one in harness.rows} == {("failed", 0.0)}
        jobs = workers_subscription_id(MODEL.name)
        await harness.until(lambda: harness.broker.backlog(jobs) == 0)


async def create_records(harness: WorkerHarness) -> None:
    for name in NAMES:
        await harness.stores.predictions.create(
            name, "acme", b"{}", deadline_s=time.time() + 60, keep_s=60, model=MODEL.name
        )


async def ended(harness: WorkerHarness, name: str) -> tuple[str, str, bool]:
    """The record's state, its item's status, and whether the item has a result."""
    record = await harness.stores.records.read(name)
    assert record is not None
    assert record.reply is not None, "a record has ended before its reply comes"
    (outcome,) = record.reply.outcomes
    return record.state, outcome.status, outcome.result is not None


async def test_replies_of_predictions_are_one_message(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await create_records(harness)
        came = await compute_together(harness, **{name: {"prediction": "1"} for name in NAMES})
        assert came == list(NAMES)
        assert sizes(harness) == [4]
        for name in NAMES:
            assert await ended(harness, name) == ("succeeded", "succeeded", True)
        message = harness.reply_messages[1]
        replies = decode_reply_batch(message.data, message.attributes)
        outcomes = [decode_reply_body(one.body).outcomes for one in replies]
        assert [one.result for (one,) in outcomes] == [None] * 4, "records have the results"
        await harness.until(lambda: len(harness.rows) == 5)
        assert {one.status for one in harness.rows} == {"succeeded"}
        jobs = workers_subscription_id(MODEL.name)
        await harness.until(lambda: harness.broker.backlog(jobs) == 0)


async def test_canceled_prediction_leaves_alone_those_that_end_with_it(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await create_records(harness)
        harness.process.gate.clear()
        await harness.send("first", request_id="first")
        await harness.process.started.wait()
        for name in NAMES:
            await harness.send(name, request_id=name, prediction="1")
        await go_on(harness, canceled="b")
        came = [(await harness.reply()).request_id for _ in ("first", *NAMES)]
        assert sorted(came) == sorted(("first", *NAMES))
        assert await ended(harness, "b") == ("canceled", "canceled", False)
        for name in ("a", "c", "d"):
            assert await ended(harness, name) == ("succeeded", "succeeded", True)
        await harness.until(lambda: len(harness.rows) == 5)
        statuses = {one.row_id: one.status for one in harness.rows}
        assert statuses.pop("b:0") == "canceled"
        assert set(statuses.values()) == {"succeeded"}


async def test_predictions_end_when_redis_is_back(tmp_path: Path) -> None:
    with RedisServer(tmp_path, tmp_path) as server:
        async with running_worker(server.url, tmp_path) as harness:
            await create_records(harness)
            harness.process.gate.clear()
            await harness.send("first", request_id="first")
            await harness.process.started.wait()
            for name in NAMES:
                await harness.send(name, request_id=name, prediction="1")
            server.kill()
            await go_on(harness)
            assert (await harness.reply()).request_id == "first"
            server.start()
            assert sorted([(await harness.reply()).request_id for _ in NAMES]) == list(NAMES)
            for name in NAMES:
                assert await ended(harness, name) == ("succeeded", "succeeded", True)
