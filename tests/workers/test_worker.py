"""A job's life in a worker, with an in-memory broker, a real Redis and a pausable model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from shared.broker.transport import (
    ReceivedMessage,
    dead_letter_subscription_id,
    inbox_topic_id,
    jobs_topic_id,
    workers_subscription_id,
)
from shared.errors import BadInput, Unavailable
from shared.models.tasks import Input
from shared.models.tasks.embedding import TextInput
from shared.tenants.plan import Priority
from tests.limits import WAIT_LIMIT_S
from tests.workers.worker_harness import (
    MODEL,
    HeldCache,
    LetterPool,
    LetterPreparer,
    LetterProcess,
    running_worker,
)
from workers.models.base import PreparedText

pytestmark = pytest.mark.anyio


async def test_job_is_answered_in_order_with_one_row_an_item(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.send("bb", "a", "ccc")
        reply = await harness.reply()
        assert (reply.request_id, reply.part, reply.slot) == ("req", 0, "0")
        vectors = [(o.index, o.result.vector) for o in reply.body.outcomes]  # type: ignore[union-attr]
        assert vectors == [(0, b"bb"), (1, b"a"), (2, b"ccc")]
        await harness.until(lambda: len(harness.rows) == 3)
        row = harness.rows[2]
        assert (row.row_id, row.tokens, row.cache, row.status, row.worker) == (
            "req:2",
            3,
            "miss",
            "succeeded",
            "w",
        )
        assert row.cost_usd == pytest.approx(3 * 2.0 / 1e6)


async def test_repeat_is_answered_from_the_cache(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.ask("cat")
        await harness.until(lambda: len(harness.rows) == 1)
        assert await harness.ask("cat", request_id="again") == [("succeeded", b"cat")]
        assert harness.process.batches == [["cat"]]
        await harness.until(lambda: len(harness.rows) == 2)
        again = next(row for row in harness.rows if row.request_id == "again")
        assert (again.cache, again.tokens, again.cost_usd, again.charged_share) == (
            "redis",
            3,
            0.0,
            0.0,
        )


async def test_reply_does_not_wait_for_the_cache(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path, cache_kind=HeldCache) as harness:
        HeldCache.gate = asyncio.Event()
        assert await harness.ask("cat") == [("succeeded", b"cat")]
        assert not harness.rows
        HeldCache.gate.set()
        await harness.until(lambda: len(harness.rows) == 1)


async def test_no_cache_computes_anew(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.ask("cat")
        await harness.ask("cat", cache_read=False)
        assert harness.process.batches == [["cat"], ["cat"]]


async def test_no_store_keeps_nothing(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.ask("cat", cache_write=False)
        await harness.ask("cat")
        assert harness.process.batches == [["cat"], ["cat"]]


async def test_identical_items_in_flight_run_once(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("dog", "dog", request_id="one")
        await harness.process.started.wait()
        await harness.send("dog", request_id="two")
        await harness.joined(3)
        harness.process.gate.set()
        await harness.reply(), await harness.reply()
        assert harness.process.batches == [["dog"]]
        await harness.until(lambda: len(harness.rows) == 3)
        assert sorted(str(row.cache) for row in harness.rows) == ["joined", "joined", "miss"]
        assert [row.cost_usd for row in harness.rows if row.cache == "joined"] == [0.0, 0.0]


async def test_what_waits_together_runs_together_whatever_its_length(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("first")
        await harness.process.started.wait()
        for number, text in enumerate(["aaaaa", "bbbbb", "c" * 50, "ddddd"]):
            await harness.send(text, request_id=f"r{number}")
        await harness.queued(4)
        harness.process.gate.set()
        for _ in range(5):
            await harness.reply()
        assert harness.process.batches == [["first"], ["aaaaa", "bbbbb", "c" * 50, "ddddd"]]


@pytest.mark.parametrize("text", ["4", "!"])
async def test_bad_item_fails_alone(redis_url: str, tmp_path: Path, text: str) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        assert await harness.ask("good", text) == [("succeeded", b"good"), ("failed", None)]
        await harness.until(lambda: len(harness.rows) == 2)
        assert [row.error_code for row in harness.rows] == [
            None,
            "invalid_input" if text == "4" else "model_failed",
        ]


class FragilePreparer(LetterPreparer):
    """Fails the way a faulty tokenizer or template would."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
        if any(isinstance(given, TextInput) and given.text == "?" for given in inputs):
            raise RecursionError("maximum recursion depth exceeded")
        return super().prepare(inputs)


async def test_item_that_its_preparer_can_not_bear_fails_alone(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path, preparer=FragilePreparer()) as harness:
        assert await harness.ask("a", "?", "4") == [
            ("succeeded", b"a"),
            ("failed", None),
            ("failed", None),
        ]
        await harness.until(lambda: len(harness.rows) == 3)
        codes = [row.error_code for row in harness.rows]
        assert sorted(codes, key=str) == [None, "invalid_input", "model_failed"]
        assert await harness.ask("after", request_id="after") == [("succeeded", b"after")]


async def test_expired_job_never_reaches_the_model(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        assert await harness.ask("late", left_s=-1) == [("expired", None)]
        assert harness.process.batches == []
        await harness.until(lambda: len(harness.rows) == 1)
        assert (harness.rows[0].status, harness.rows[0].error_code) == (
            "expired",
            "deadline_exceeded",
        )


async def test_item_that_expires_while_it_waits_is_dropped(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("first")
        await harness.process.started.wait()
        await harness.send("short", request_id="late", left_s=0.05)
        deadline_s = time.time() + 0.05
        await harness.until(lambda: time.time() > deadline_s)
        harness.process.gate.set()
        statuses = {
            reply.request_id: reply.body.outcomes[0].status
            for reply in [await harness.reply(), await harness.reply()]
        }
        assert statuses == {"req": "succeeded", "late": "expired"}
        assert harness.process.batches == [["first"]]


async def test_job_is_not_begun_after_its_queue_limit(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("first")
        await harness.process.started.wait()
        await harness.send("short", request_id="impatient", queue_limit_s=0.05)
        await harness.send("long", request_id="patient", queue_limit_s=30)
        limit_s = time.time() + 0.05
        await harness.until(lambda: time.time() > limit_s)
        harness.process.gate.set()
        outcomes = {
            (reply := await harness.reply()).request_id: reply.body.outcomes[0] for _ in range(3)
        }
        assert {name: one.status for name, one in outcomes.items()} == {
            "req": "succeeded",
            "impatient": "expired",
            "patient": "succeeded",
        }
        assert outcomes["impatient"].error is not None
        assert "queue limit" in outcomes["impatient"].error.message


async def test_job_of_a_model_process_that_died_is_tried_again(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.deaths = 2
        assert await harness.ask("cat") == [("succeeded", b"cat")]
        assert harness.process.batches == [["cat"]] * 3
        await harness.until(lambda: len(harness.rows) == 1)


async def test_reply_that_cannot_be_sent_keeps_the_job(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("cat")
        await harness.process.started.wait()
        harness.broker.outage = Unavailable("gone")
        harness.process.gate.set()
        await harness.until(
            lambda: harness.broker.outage is not None and len(harness.process.batches) == 1
        )
        assert harness.rows == []
        harness.broker.outage = None
        assert (await harness.reply()).body.outcomes[0].status == "succeeded"
        await harness.until(lambda: len(harness.rows) == 1)


@pytest.mark.parametrize(
    ("change", "data"),
    [
        ({}, b"{"),
        ({"deadline_s": "99999999999999"}, b"{}"),
        ({"published_at_s": "nan", "attempt": "many", "tenant": None}, b"{}"),
        ({"schema": "2"}, b"{}"),
        (
            {"model": "another"},
            b'{"items": [{"index": 0, "input": {"type": "text", "text": "a"}}]}',
        ),
    ],
    ids=str,
)
async def test_unreadable_job_is_answered_at_once(
    redis_url: str, tmp_path: Path, change: dict[str, str | None], data: bytes
) -> None:
    """No matter which part is unreadable, the caller gets an error, and the message is
    dead-lettered.
    """
    async with running_worker(redis_url, tmp_path) as harness:
        now = repr(time.time() + 30)
        attributes = {
            **{
                "schema": "1",
                "request_id": "odd",
                "part": "3",
                "model": MODEL.name,
                "tenant": "t",
                "slot": "0",
            },
            **{
                "inbox": inbox_topic_id("1"),
                "deadline_s": now,
                "received_at_s": now,
                "published_at_s": now,
            },
        }
        sent = {name: value for name, value in (attributes | change).items() if value is not None}
        await harness.broker.publish(jobs_topic_id(MODEL.name), data, sent)
        reply = await harness.reply()
        assert (reply.request_id, reply.part, reply.body.outcomes) == ("odd", 3, [])
        assert reply.body.error is not None
        assert reply.body.error.code == "undecodable_message"
        async with harness.broker.subscribe(
            dead_letter_subscription_id(MODEL.name), max_messages=1
        ) as dead:
            message: ReceivedMessage = await asyncio.wait_for(anext(aiter(dead)), WAIT_LIMIT_S)
        assert message.data == data
        # Details about our malformed message are for operators, not for callers.
        reason = message.attributes["penstock_reason"]
        assert reason
        assert reason not in reply.body.error.message


async def test_message_that_is_no_job_becomes_a_dead_letter(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.broker.publish(jobs_topic_id(MODEL.name), b"hello", {"from": "a stranger"})
        async with harness.broker.subscribe(
            dead_letter_subscription_id(MODEL.name), max_messages=1
        ) as dead:
            message: ReceivedMessage = await asyncio.wait_for(anext(aiter(dead)), WAIT_LIMIT_S)
            assert message.data == b"hello"
            assert message.attributes["from"] == "a stranger"
            assert "schema" in message.attributes["penstock_reason"]
        assert await harness.ask("next") == [("succeeded", b"next")]


async def test_stop_finishes_what_is_in_hand(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("cat")
        await harness.process.started.wait()
        harness.stop.set()
        harness.process.gate.set()
        assert (await harness.reply()).body.outcomes[0].status == "succeeded"


async def test_stop_hands_back_what_the_limit_leaves(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path, drain_s=0) as harness:
        harness.process.gate.clear()
        await harness.send("cat")
        await harness.process.started.wait()
        harness.stop.set()
        await harness.until(
            lambda: harness.broker.backlog(workers_subscription_id(MODEL.name)) == 1
        )
        assert harness.rows == []


class SlowToStop(LetterProcess):
    """Is never ready, and then takes forever to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stopping = asyncio.Event()

    async def ready(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_stopping.set()
            await asyncio.Event().wait()


async def test_a_worker_that_is_canceled_while_it_stops_ends_as_canceled(
    redis_url: str, tmp_path: Path
) -> None:
    process = SlowToStop()
    async with running_worker(redis_url, tmp_path, drain_s=0, pool=LetterPool(process)) as harness:
        await harness.send("cat")
        await harness.queued(1)
        assert harness.running is not None
        harness.stop.set()
        await process.is_stopping.wait()
        harness.running.cancel()
        await asyncio.wait([harness.running])
        assert harness.running.cancelled()
        assert harness.broker.backlog(workers_subscription_id(MODEL.name)) == 1
        harness.running = asyncio.create_task(asyncio.sleep(0))


@pytest.mark.parametrize(
    ("priority", "prediction", "counted"),
    [("interactive", "", "interactive"), ("batch", "", "batch"), ("batch", "1", "interactive")],
)
async def test_busy_worker_is_seen_while_its_batch_runs(
    redis_url: str, tmp_path: Path, priority: Priority, prediction: str, counted: str
) -> None:
    def busy(name: str) -> float | None:
        return REGISTRY.get_sample_value("penstock_worker_busy_ratio", {"lane": name})

    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("cat", priority=priority, prediction=prediction)
        try:
            await harness.until(lambda: (busy(counted) or 0.0) > 0)
            # The ratio grows while the batch runs, so only the priority that stays idle is
            # compared.
            assert not busy("batch" if counted == "interactive" else "interactive")
        finally:
            harness.process.gate.set()
