"""The life of a job in a worker, over the broker in memory, a real Redis, and a model that can be held and killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.cache import ResultCache
from shared.catalogue import Batch, Cache, Model, Price
from shared.errors import BadInput, ModelFailed, PenstockError, Unavailable
from shared.messages import (
    EmbeddingResult,
    Envelope,
    Input,
    Item,
    Job,
    JobBody,
    Reply,
    Result,
    TextInput,
    decode_reply,
    encode_job,
)
from shared.names import (
    dead_letter_subscription_id,
    dead_letter_topic_id,
    inbox_topic_id,
    jobs_topic_id,
    slot_subscription_id,
    workers_subscription_id,
)
from shared.objects import ObjectStore
from shared.transport import Message, SubscriptionSettings
from shared.usage import Row
from tests.fakes import InMemoryTransport
from workers.finisher import Finisher
from workers.frames import Residence
from workers.intake import Intake
from workers.job import WorkerFacts
from workers.model_pool import BatchDone, ModelProcessDied
from workers.models.base import PreparedText
from workers.worker import Worker

pytestmark = pytest.mark.anyio

MODEL = Model(
    name="letters",
    task="embedding",
    source="local:nowhere",
    dimensions=1,
    batch=Batch(max_tokens=100, max_items=4),
    cache=Cache(ttl_s=60),
    price=Price(per_million_tokens_usd=2.0),
)
LIMIT_S = 5.0


class LetterPreparer:
    """A token is a letter; a text with a digit is refused."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
        return [self._prepare(given) for given in inputs]

    def _prepare(self, given: Input) -> PreparedText | BadInput:
        assert isinstance(given, TextInput)
        if any(letter.isdigit() for letter in given.text):
            return BadInput("no digits", field="input")
        return PreparedText(key="", length=len(given.text), work=len(given.text), ids=given.text.encode())


class LetterProcess:
    """Answers with the text itself; `gate` holds it, `deaths` counts how often it dies first, "!" fails alone."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.deaths = 0
        self.started = asyncio.Event()
        self.residence = Residence([0])

    async def ready(self) -> None:
        return None

    async def run(self, batch: Sequence[PreparedText], *, timeout_s: float, model: int) -> BatchDone:
        texts = [prepared.ids.decode() for prepared in batch]
        self.batches.append(texts)
        self.started.set()
        await asyncio.wait_for(self.gate.wait(), timeout_s)
        if self.deaths:
            self.deaths -= 1
            raise ModelProcessDied("killed")
        now_s = time.time()
        results: list[EmbeddingResult | PenstockError] = [
            ModelFailed("a bang") if "!" in text else EmbeddingResult(text.encode(), len(text)) for text in texts
        ]
        return BatchDone(results, now_s, now_s, 1.5, sum(map(len, texts)), sum(map(len, texts)))  # type: ignore[arg-type]


class LetterPool:
    def __init__(self) -> None:
        self.processes = [LetterProcess()]
        self.device_name = "letters"


class Desk:
    """The caller's side: sends jobs, gets replies, sees rows."""

    def __init__(self, broker: InMemoryTransport, process: LetterProcess, rows: list[Row], stop: asyncio.Event) -> None:
        self.broker, self.process, self.rows, self.stop = broker, process, rows, stop
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()

    async def send(self, *texts: str, request_id: str = "req", left_s: float = 30.0, **body: bool) -> None:
        now_s = time.time()
        envelope = Envelope(
            request_id=request_id,
            part=0,
            model=MODEL.name,
            tenant="t",
            inbox=inbox_topic_id("1"),
            slot="0",
            deadline_s=now_s + left_s,
            received_at_s=now_s,
            published_at_s=now_s,
        )
        items = [Item(index, TextInput(text), cache_key=f"key-{text}") for index, text in enumerate(texts)]
        data, attributes = encode_job(Job(envelope, JobBody(items, **body)))
        await self.broker.publish(jobs_topic_id(MODEL.name), data, attributes)

    async def reply(self) -> Reply:
        return await asyncio.wait_for(self.replies.get(), LIMIT_S)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110  (conditions of the fakes have no event)
                await asyncio.sleep(0)

    async def ask(self, *texts: str, **given: object) -> list[tuple[str, bytes | None]]:
        await self.send(*texts, **given)  # type: ignore[arg-type]
        outcomes = (await self.reply()).body.outcomes
        return [(o.status, o.result.vector if isinstance(o.result, EmbeddingResult) else None) for o in outcomes]


class RowList(list[Row]):
    def write(self, row: Row) -> None:
        self.append(row)


class HeldCache(ResultCache):
    """Does not get to Redis until `gate` opens."""

    gate = asyncio.Event()

    async def put_many(self, results: Mapping[str, Result], ttl_s: int) -> None:
        await asyncio.wait_for(self.gate.wait(), LIMIT_S)
        await super().put_many(results, ttl_s)


@asynccontextmanager
async def working(
    redis_url: str, folder: Path, *, drain_s: float = LIMIT_S, cache_kind: type[ResultCache] = ResultCache
) -> AsyncIterator[Desk]:
    broker = InMemoryTransport()
    await broker.ensure_topic(jobs_topic_id(MODEL.name))
    await broker.ensure_topic(dead_letter_topic_id(MODEL.name))
    await broker.ensure_topic(inbox_topic_id("1"))
    for subscription_id, topic_id in (
        (workers_subscription_id(MODEL.name), jobs_topic_id(MODEL.name)),
        (dead_letter_subscription_id(MODEL.name), dead_letter_topic_id(MODEL.name)),
        (slot_subscription_id("1", 0), inbox_topic_id("1")),
    ):
        await broker.ensure_subscription(subscription_id, SubscriptionSettings(topic_id))
    rows, pool, stop = RowList(), LetterPool(), asyncio.Event()
    desk = Desk(broker, pool.processes[0], rows, stop)
    async with cache_kind(redis_url, 1_000_000) as cache:
        assert await cache.wait_redis(LIMIT_S)
        objects = ObjectStore(f"file://{folder}")
        finisher = Finisher(MODEL, broker, cache, objects, rows, WorkerFacts("w", "here", "letters"))
        intake = Intake(MODEL, LetterPreparer(), cache, objects, finisher)
        worker = Worker([intake], broker, pool, drain_s=drain_s)  # type: ignore[arg-type]
        running = asyncio.create_task(worker.run(stop))
        receiving = asyncio.create_task(_receive(desk))
        try:
            yield desk
        finally:
            stop.set()
            await asyncio.wait_for(running, LIMIT_S + drain_s)
            receiving.cancel()
    assert broker.backlog(workers_subscription_id(MODEL.name)) == 0 or drain_s == 0


async def _receive(desk: Desk) -> None:
    async with desk.broker.subscribe(slot_subscription_id("1", 0), max_messages=100) as replies:
        async for message in replies:
            replies.ack(message)
            desk.replies.put_nowait(decode_reply(message.data, message.attributes))


async def test_job_is_answered_in_order_with_one_row_an_item(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.send("bb", "a", "ccc")
        reply = await desk.reply()
        assert (reply.request_id, reply.part, reply.slot) == ("req", 0, "0")
        assert [(o.index, o.result.vector) for o in reply.body.outcomes] == [(0, b"bb"), (1, b"a"), (2, b"ccc")]  # type: ignore[union-attr]
        await desk.until(lambda: len(desk.rows) == 3)
        row = desk.rows[2]
        assert (row.row_id, row.tokens, row.cache, row.status, row.worker) == ("req:2", 3, "miss", "succeeded", "w")
        assert row.cost_usd == pytest.approx(3 * 2.0 / 1e6)


async def test_repeat_is_answered_from_the_cache(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.ask("cat")
        assert await desk.ask("cat", request_id="again") == [("succeeded", b"cat")]
        assert desk.process.batches == [["cat"]]
        await desk.until(lambda: len(desk.rows) == 2)
        again = next(row for row in desk.rows if row.request_id == "again")
        assert (again.cache, again.cost_usd) == ("memory", None)


async def test_reply_does_not_wait_for_the_cache(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path, cache_kind=HeldCache) as desk:
        HeldCache.gate = asyncio.Event()
        assert await desk.ask("cat") == [("succeeded", b"cat")]
        assert not desk.rows
        HeldCache.gate.set()
        await desk.until(lambda: len(desk.rows) == 1)


async def test_no_cache_computes_anew(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.ask("cat")
        await desk.ask("cat", cache_read=False)
        assert desk.process.batches == [["cat"], ["cat"]]


async def test_no_store_keeps_nothing(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.ask("cat", cache_write=False)
        await desk.ask("cat")
        assert desk.process.batches == [["cat"], ["cat"]]


async def test_identical_items_in_flight_run_once(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.gate.clear()
        await desk.send("dog", "dog", request_id="one")
        await desk.process.started.wait()
        await desk.send("dog", request_id="two")
        await desk.until(lambda: desk.broker.backlog(workers_subscription_id(MODEL.name)) == 0)
        desk.process.gate.set()
        await desk.reply(), await desk.reply()
        assert desk.process.batches == [["dog"]]
        await desk.until(lambda: len(desk.rows) == 3)
        assert sorted(str(row.cache) for row in desk.rows) == ["joined", "joined", "miss"]
        assert [row.cost_usd for row in desk.rows if row.cache == "joined"] == [None, None]


async def test_what_waits_together_runs_together(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.gate.clear()
        await desk.send("first")
        await desk.process.started.wait()
        for number, text in enumerate(["aaaaa", "bbbbb", "c" * 50, "ddddd"]):
            await desk.send(text, request_id=f"r{number}")
        await desk.until(lambda: desk.broker.backlog(workers_subscription_id(MODEL.name)) == 0)
        await asyncio.sleep(0)
        desk.process.gate.set()
        for _ in range(5):
            await desk.reply()
        assert sorted(text for batch in desk.process.batches for text in batch) == sorted(
            ["first", "aaaaa", "bbbbb", "c" * 50, "ddddd"]
        )
        assert ["c" * 50] in desk.process.batches, "a long text shares no batch with short ones"


@pytest.mark.parametrize("text", ["4", "!"])
async def test_bad_item_fails_alone(redis_url: str, tmp_path: Path, text: str) -> None:
    async with working(redis_url, tmp_path) as desk:
        assert await desk.ask("good", text) == [("succeeded", b"good"), ("failed", None)]
        await desk.until(lambda: len(desk.rows) == 2)
        assert [row.error_code for row in desk.rows] == [None, "invalid_input" if text == "4" else "model_failed"]


async def test_expired_job_never_reaches_the_model(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        assert await desk.ask("late", left_s=-1) == [("expired", None)]
        assert desk.process.batches == []
        await desk.until(lambda: len(desk.rows) == 1)
        assert (desk.rows[0].status, desk.rows[0].error_code) == ("expired", "deadline_exceeded")


async def test_item_that_expires_while_it_waits_is_dropped(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.gate.clear()
        await desk.send("first")
        await desk.process.started.wait()
        await desk.send("short", request_id="late", left_s=0.05)
        deadline_s = time.time() + 0.05
        await desk.until(lambda: time.time() > deadline_s)
        desk.process.gate.set()
        statuses = {
            reply.request_id: reply.body.outcomes[0].status for reply in [await desk.reply(), await desk.reply()]
        }
        assert statuses == {"req": "succeeded", "late": "expired"}
        assert desk.process.batches == [["first"]]


async def test_job_of_a_model_process_that_died_is_tried_again(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.deaths = 2
        assert await desk.ask("cat") == [("succeeded", b"cat")]
        assert desk.process.batches == [["cat"]] * 3
        await desk.until(lambda: len(desk.rows) == 1)


async def test_reply_that_cannot_be_sent_keeps_the_job(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.gate.clear()
        await desk.send("cat")
        await desk.process.started.wait()
        desk.broker.outage = Unavailable("gone")
        desk.process.gate.set()
        await desk.until(lambda: desk.broker.outage is not None and len(desk.process.batches) == 1)
        assert desk.rows == []
        desk.broker.outage = None
        assert (await desk.reply()).body.outcomes[0].status == "succeeded"
        await desk.until(lambda: len(desk.rows) == 1)


async def test_unreadable_body_is_answered(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        now = repr(time.time() + 30)
        attributes = {
            **{"schema": "1", "request_id": "odd", "part": "0", "model": MODEL.name, "tenant": "t", "slot": "0"},
            **{"inbox": inbox_topic_id("1"), "deadline_s": now, "received_at_s": now, "published_at_s": now},
        }
        await desk.broker.publish(jobs_topic_id(MODEL.name), b"{", attributes)
        reply = await desk.reply()
        assert (reply.request_id, reply.body.outcomes) == ("odd", [])
        assert reply.body.error is not None
        assert reply.body.error.code == "undecodable_message"


async def test_message_that_is_no_job_becomes_a_dead_letter(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.broker.publish(jobs_topic_id(MODEL.name), b"hello", {"from": "a stranger"})
        async with desk.broker.subscribe(dead_letter_subscription_id(MODEL.name), max_messages=1) as dead:
            message: Message = await asyncio.wait_for(anext(aiter(dead)), LIMIT_S)
            assert message.data == b"hello"
            assert message.attributes["from"] == "a stranger"
            assert "schema" in message.attributes["penstock_reason"]
        assert await desk.ask("next") == [("succeeded", b"next")]


async def test_stop_finishes_what_is_in_hand(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.gate.clear()
        await desk.send("cat")
        await desk.process.started.wait()
        desk.stop.set()
        desk.process.gate.set()
        assert (await desk.reply()).body.outcomes[0].status == "succeeded"


async def test_stop_hands_back_what_the_limit_leaves(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path, drain_s=0) as desk:
        desk.process.gate.clear()
        await desk.send("cat")
        await desk.process.started.wait()
        desk.stop.set()
        await desk.until(lambda: desk.broker.backlog(workers_subscription_id(MODEL.name)) == 1)
        assert desk.rows == []
