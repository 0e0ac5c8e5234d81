"""The flow engine alone: messages in any order or twice, and processes that can die anywhere."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.local.redis_server import RedisServer
from shared.broker.transport import ReceivedMessage, SmoothedDuration
from shared.errors import Canceled, DeadlineExceeded, PenstockError, Unavailable
from shared.flows.engine import ORPHANED_S, FlowEngine, StepRow
from shared.messages import Envelope, Item, ItemOutcome, Job, JobBody, Receipt, decode_job, failure
from shared.models.tasks.custom import CustomInput, CustomResult
from shared.money.charge import cost_usd, price_of, step_prices_of
from shared.predictions import Prediction, encode_document, error_of
from shared.stores.record_state import Record
from shared.usage.row import Row
from tests.api.harness import IMAGE_MODEL
from tests.deleting import delete_ended
from tests.flows.models import CHECK, JOIN, MODELS, SPLIT, Compute, catalog_of
from tests.record_stores import RecordStores
from workers.functions.dead_letter import DeadLetters

FLOW = {
    "name": "spell",
    "input": {"text": "string"},
    "steps": [
        {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}},
        {
            "id": "check",
            "model": CHECK.name,
            "for_each": "$words",
            "input": {"word": "$item"},
            "default": {"word": "?", "flagged": True, "size": 0},
        },
        {"id": "joined", "model": JOIN.name, "input": {"words": "$check.word"}},
        {"id": "again", "model": JOIN.name, "input": {"words": "$words"}},
        {
            "id": "both",
            "model": JOIN.name,
            "when": "$joined != $again",
            "input": {"words": ["$joined", "$again"]},
        },
    ],
    "output": {"text": "$joined", "both": "$both", "sizes": "$check.size"},
}
WIDE = {
    "name": "wide",
    "input": {"text": "string"},
    "steps": [
        {"id": number, "model": JOIN.name, "input": {"words": ["$input.text", number]}}
        for number in ("one", "two", "three")
    ],
    "output": ["$one", "$two", "$three"],
}
UNREADABLE = {
    "name": "unreadable",
    "input": {"text": "string"},
    "steps": [{"id": "drawn", "model": "indivisible", "input": {"prompt": "$input.text"}}],
    "output": "$drawn",
}
INDIVISIBLE = IMAGE_MODEL.model_copy(
    update={
        "name": "indivisible",
        "aliases": (),
        "image": IMAGE_MODEL.image.model_copy(update={"multiple": 0}),
    }
)
"""A model that fails with ZeroDivisionError for every input."""
CATALOG = catalog_of(FLOW, WIDE, UNREADABLE, models=(*MODELS, INDIVISIBLE))
RUN = "pred_0123"


class Died(Exception):
    """Raised at the point where the process dies."""


class Broker:
    """Stores published messages. A publisher may die after any message."""

    def __init__(self) -> None:
        self.jobs: list[tuple[bytes, dict[str, str]]] = []
        self.events: list[str] = []
        self.dies_after: int | None = None

    @property
    def round_trip(self) -> SmoothedDuration:
        """The duration is empty because this broker runs in the same process."""
        return SmoothedDuration()

    async def publish(
        self, topic_id: str, data: bytes, attributes: Mapping[str, str], **_: Any
    ) -> str:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                raise Died
        if topic_id.startswith("jobs."):
            self.jobs.append((data, dict(attributes)))
        else:
            self.events.append(topic_id)
        return "id"


class Workers:
    """Workers that take messages in any order, and die at random moments."""

    def __init__(
        self, stores: RecordStores, rng: random.Random, *, dies: bool = True, flow: str = "spell"
    ) -> None:
        (self.entry,) = (entry for entry in CATALOG.flows if entry.name == flow)
        self.broker = Broker()
        self.engine = FlowEngine(CATALOG, stores.records, stores.flow_runs, self.broker)
        self.stores = stores
        self.rng = rng
        self.dies = dies
        self.compute = Compute()
        self.rows: dict[str, set[tuple[str, float]]] = {}
        self.deaths = 0

    async def start(self, text: str, *, lives: int | None = None, ago_s: float = 0.0) -> None:
        """Begins a run. With `lives`, the API dies for good after that many messages."""
        now_s = time.time() - ago_s
        prediction = Prediction(
            id=RUN,
            record=RUN,
            tenant="acme",
            model=self.entry.name,
            owner="penstock",
            version="v",
            input={"text": text},
            base_url="",
            webhook="http://example.com",
            webhook_events=("completed",),
            created_at_s=now_s,
            deadline_s=now_s + 60,
            price=price_of(self.entry, now_s),
            flow=self.entry.plan.as_json(),
            step_prices=step_prices_of(self.entry, now_s),
        )
        self.prediction = prediction
        assert await self.stores.predictions.create(
            RUN, "acme", encode_document(prediction), deadline_s=now_s + 60, keep_s=60
        )
        envelope = Envelope(
            request_id=RUN,
            tenant="acme",
            received_at_s=now_s,
            part=0,
            model=self.entry.name,
            deadline_s=now_s + 60,
            published_at_s=0.0,
            prediction="1",
            webhook="completed",
        )
        body = JobBody([Item(0, CustomInput({"text": text}))])
        if lives is None:
            await self._until_done(lambda: self.engine.start(envelope, body))
            await self.stores.records.mark_published(RUN)
            return
        self.broker.dies_after = lives
        with pytest.raises(Died):
            await self.engine.start(envelope, body)
        self.broker.dies_after = None

    def _moment(self, moments: Sequence[int | None]) -> int | None:
        return self.rng.choice(moments) if self.dies else None

    def _happens(self) -> bool:
        return self.dies and self.rng.random() < 0.2

    async def do_next(self) -> None:
        await self._do(decode_job(*self.broker.jobs.pop(0)))

    async def _until_done(self, act: Any) -> Any:
        """Calls `act`, and calls it again after each death, which may happen after any message."""
        while True:
            self.broker.dies_after = self._moment([None, None, 0, 1, 2])
            try:
                return await act()
            except Died:
                self.deaths += 1
            finally:
                self.broker.dies_after = None

    async def work(self) -> None:
        """Takes messages until none are left."""
        held: list[tuple[bytes, dict[str, str]]] = []
        while self.broker.jobs or held:
            held += self.broker.jobs
            self.broker.jobs.clear()
            message = held.pop(self.rng.randrange(len(held)))
            if self._happens():
                held.append(message)  # it comes once more
            try:
                await self._do(decode_job(*message))
            except Died:
                self.deaths += 1
                held.append(message)

    async def _do(self, job: Job) -> None:
        """Processes a job as a worker does, up to the ack."""
        [look] = await self.engine.look([job])
        outcomes = [failure(item.index, Canceled()) for item in job.body.items]
        if look.is_open and look.done < len(job.body.items):
            outcomes = [self._computed(job, item) for item in job.body.items]
        self.broker.dies_after = self._moment([None, None, None, 0, 1])
        try:
            end = await self.engine.mark(job, outcomes)
            if self._happens():
                raise Died
            planned = await self.engine.advance(job, end)
            if self._happens():
                raise Died
        finally:
            self.broker.dies_after = None
        own = [StepRow(CATALOG.find(job.envelope.model), job.envelope, one) for one in end.outcomes]
        for model, envelope, outcome in (*own, *planned):
            price = price_of(model, envelope.received_at_s)
            row = (outcome.status, cost_usd(price, outcome))
            self.rows.setdefault(f"{envelope.request_id}:{outcome.index}", set()).add(row)

    def _computed(self, job: Job, item: Item) -> ItemOutcome:
        receipt = Receipt(cache="miss", pulled_at_s=time.time())
        assert isinstance(item.input, CustomInput)
        try:
            output = self.compute.output(job.envelope.model, item.input.values)
        except PenstockError as error:
            return failure(item.index, error, receipt)
        return ItemOutcome(item.index, "succeeded", receipt, CustomResult(output))

    async def ended(self) -> Record:
        record = await self.stores.records.read(RUN)
        assert record is not None
        assert record.reply is not None, record
        return record

    def charged_usd(self, record: Record) -> float:
        assert record.reply is not None
        return sum(
            cost_usd(price, one)
            for one in record.reply.outcomes
            if (price := self.prediction.price_of(one)) is not None
        )


async def spell(redis_url: str, words: Sequence[str], seed: int, fails: Sequence[str]) -> None:
    rng = random.Random(seed)
    async with RecordStores(
        redis_url, prefix=f"flows-{seed}-{len(words)}:{time.time_ns()}:"
    ) as stores:
        workers = Workers(stores, rng)
        workers.compute.fails = dict.fromkeys(fails, 10**6)
        await workers.start(" ".join(words))
        await workers.work()
        record = await workers.ended()
    assert record.state == "succeeded", record
    assert record.reply is not None
    assert isinstance(record.reply.output, CustomResult)
    checked = ["?" if word in fails else word.upper() for word in words]
    joined, again = " ".join(checked), " ".join(words)
    assert record.reply.output.output == {
        "text": joined,
        "both": f"{joined} {again}" if joined != again else None,
        "sizes": [0 if word in fails else len(word) for word in words],
    }
    items = len(words) + 3 + (joined != again)
    assert Counter(map(len, workers.rows.values())) == {1: items}, workers.rows
    rows_usd = sum(usd for [(_, usd)] in workers.rows.values())
    assert rows_usd == pytest.approx(workers.charged_usd(record))
    assert rows_usd == pytest.approx(0.25 * (items - sum(word in fails for word in words)))


WORDS = st.lists(st.sampled_from(["a", "cat", "xylophone", "mat", "A"]), max_size=12)


@settings(max_examples=25)
@given(words=WORDS, seed=st.integers(0, 10**6), fails=st.sets(st.sampled_from(["cat", "mat"])))
def test_any_order_doubles_and_deaths_give_each_item_once(
    redis_server: RedisServer, words: list[str], seed: int, fails: set[str]
) -> None:
    asyncio.run(spell(redis_server.url, words, seed, sorted(fails)))


class Table:
    """Stores the rows written by the dead-letter function."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    async def write(self, rows: list[Row]) -> None:
        self.rows += rows


@pytest.mark.anyio
@pytest.mark.parametrize("step", ["words", "check"])
async def test_dead_letter_ends_its_item_and_a_run_without_default(
    redis_url: str, step: str
) -> None:
    """`words` has no default, but `check` has one."""
    async with RecordStores(redis_url) as stores:
        workers, table = Workers(stores, random.Random(1), dies=False), Table()
        dead_letters = DeadLetters(
            stores.records, stores.flow_runs, workers.broker, table, CATALOG, "here"
        )
        await workers.start("a cat")
        if step == "check":
            await workers.do_next()
        first, *others = workers.broker.jobs
        workers.broker.jobs[:] = others
        letter = message_of(*first)
        await dead_letters.answer(letter)
        await dead_letters.answer(letter)  # it arrives twice
        await workers.work()
        record = await workers.ended()
    assert {(row.flow, row.step, row.status, row.cost_usd) for row in table.rows} == {
        ("spell", step, "failed", 0.0)
    }
    assert len({row.row_id for row in table.rows}) == 1
    assert record.reply is not None
    if step == "words":
        assert record.state == "failed"
        assert error_of(record) == "step 'words': no worker was able to finish it in its attempts"
        return
    assert record.state == "succeeded"
    assert isinstance(record.reply.output, CustomResult)
    assert sorted(record.reply.output.output["text"].split()) == sorted(["?", "CAT"])


def message_of(data: bytes, attributes: dict[str, str]) -> ReceivedMessage:
    return ReceivedMessage(data, attributes, "1", "")


@pytest.mark.anyio
async def test_unreadable_dead_letter_ends_the_run(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        workers = Workers(stores, random.Random(1), dies=False)
        dead_letters = DeadLetters(
            stores.records, stores.flow_runs, workers.broker, Table(), CATALOG, "here"
        )
        await workers.start("a cat")
        _, attributes = workers.broker.jobs.pop()
        await dead_letters.answer(message_of(b"not a job", attributes))
        record = await workers.ended()
    assert record.state == "failed"


@pytest.mark.anyio
async def test_unforeseen_error_about_an_input_fails_its_step(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        workers = Workers(stores, random.Random(1), dies=False, flow="unreadable")
        await workers.start("a cat")
        record = await workers.ended()
    assert record.state == "failed"
    assert error_of(record) == "step 'drawn': the input could not be prepared"
    assert workers.broker.jobs == []


@pytest.mark.anyio
async def test_canceled_run_counts_what_was_noted_before(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        workers = Workers(stores, random.Random(1), dies=False)
        await workers.start("a cat on a mat")
        await workers.do_next()
        await workers.do_next()
        await stores.records.cancel(RUN)
        await workers.engine.settle(workers.prediction)
        charged_usd = workers.charged_usd(await workers.ended())
        await workers.work()
        record = await workers.ended()
    assert record.state == "canceled"
    rows_usd = sum(usd for [(_, usd)] in workers.rows.values())
    assert charged_usd == workers.charged_usd(record) == rows_usd > 0
    assert workers.compute.count(JOIN.name) <= 1


@pytest.mark.anyio
async def test_run_that_was_dropped_computes_nothing(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        workers = Workers(stores, random.Random(1), dies=False)
        await workers.start("a cat")
        await stores.records.cancel(RUN)
        assert await delete_ended(stores, RUN, 0)
        await workers.work()
    assert workers.compute.asked == []
    with redis.Redis.from_url(redis_url) as client:
        assert [key for key in client.keys("*") if key.endswith(b":flow")] == []


@pytest.mark.anyio
@pytest.mark.parametrize("lives", [1, 2])
async def test_run_goes_on_whose_api_instance_died_while_it_published(
    redis_url: str, lives: int
) -> None:
    async with RecordStores(redis_url) as stores:
        workers = Workers(stores, random.Random(1), dies=False, flow="wide")
        await workers.start("a", lives=lives, ago_s=ORPHANED_S + 1)
        assert len(workers.broker.jobs) == lives
        await workers.work()
        record = await workers.ended()
    assert record.state == "succeeded"
    assert record.reply is not None
    assert isinstance(record.reply.output, CustomResult)
    assert record.reply.output.output == ["a one", "a two", "a three"]
    assert Counter(map(len, workers.rows.values())) == {1: 3}


@pytest.mark.anyio
async def test_run_that_a_reader_ends_counts_what_was_noted_before(redis_url: str) -> None:
    """A worker that is too late changes nothing, and its row reflects that."""
    async with RecordStores(redis_url) as stores:
        workers = Workers(stores, random.Random(1), dies=False)
        await workers.start("a cat on a mat")
        await workers.do_next()
        await workers.do_next()
        late = DeadlineExceeded("deadline exceeded: the prediction did not finish within 60 s")
        failed = (workers.engine.fail(workers.prediction, late) for _ in range(2))
        assert sorted(await asyncio.gather(*failed)) == [False, True], "only one of them counts"
        assert not await workers.engine.fail(workers.prediction, Unavailable("something else"))
        charged_usd = workers.charged_usd(await workers.ended())
        await workers.work()
        record = await workers.ended()
    assert record.state == "failed"
    assert error_of(record) == "deadline exceeded: the prediction did not finish within 60 s"
    rows_usd = sum(usd for [(_, usd)] in workers.rows.values())
    assert charged_usd == workers.charged_usd(record) == rows_usd > 0
    assert {status for rows in workers.rows.values() for status, _ in rows} == {
        "succeeded",
        "canceled",
    }
    assert workers.broker.events.count("webhooks") >= 1
