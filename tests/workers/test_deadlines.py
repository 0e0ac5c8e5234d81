"""Deadlines end work wherever it is: waiting, prepared, between two steps, in delivery. What is late costs nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shared.messages import ItemOutcome, Receipt, ReplyBody, encode_reply_body
from shared.pubsub.names import WEBHOOKS_SUBSCRIPTION_ID, inbox_topic_id
from shared.stores.cache import ResultCache
from shared.stores.records import LATE_LOOK_S
from shared.tasks.embedding import EmbeddingResult
from shared.webhooks import decode_webhook_event
from tests.fakes import InMemoryTransport
from tests.limits import PATIENCE, WAIT_LIMIT_S
from tests.workers.desk import MODEL, Desk, working
from workers.runtime.pool import HostedModel, ModelPool

pytestmark = pytest.mark.anyio

SHORT_S = 0.7 * PATIENCE
"""A deadline that passes in the test; all that is to happen before it takes a hundredth of it."""


async def ended(desk: Desk) -> tuple[str, ItemOutcome]:
    """The next job that is answered, and what became of its only item."""
    reply = await desk.reply()
    (outcome,) = reply.body.outcomes
    return reply.request_id, outcome


async def held(desk: Desk, text: str = "held", **given: Any) -> None:
    """A job that runs until it is stopped, or the gate opens."""
    desk.process.gate.clear()
    await desk.send(text, request_id=text, **given)
    await desk.process.started.wait()


async def both(desk: Desk, *texts: str, short: str) -> None:
    """Jobs that arrive together, so that one batch has them; `short` has little time."""
    desk.process.gate.clear()
    sent = [desk.send(text, request_id=text, left_s=SHORT_S if text == short else WAIT_LIMIT_S) for text in texts]
    await asyncio.gather(*sent)
    await desk.process.started.wait()
    assert desk.process.batches == [list(texts)]


def message_of(outcome: ItemOutcome) -> str:
    assert outcome.error is not None
    assert outcome.error.code == "deadline_exceeded"
    return outcome.error.message


async def test_batch_stops_at_the_deadline_of_the_last_who_wants_it(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await held(desk, left_s=SHORT_S)
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status, outcome.receipt.steps_saved) == ("held", "expired", 47)
        assert message_of(outcome) == f"the deadline of {SHORT_S:g} s passed before the model was done"
        await desk.until(lambda: len(desk.rows) == 1)
        (row,) = desk.rows
        assert (row.status, row.steps_saved, row.cost_usd, row.charged_share) == ("expired", 47, 0.0, 0.0)
        assert await desk.ask("next", request_id="next") == [("succeeded", b"next")]


async def test_neighbors_in_the_batch_go_on(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await both(desk, "late", "early", short="late")
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status) == ("late", "expired")
        assert message_of(outcome).endswith("passed before the model was done")
        assert not desk.process.gate.is_set(), "the batch was stopped"
        desk.process.gate.set()
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status) == ("early", "succeeded")
        await desk.until(lambda: len(desk.rows) == 2)
        assert [(row.status, row.charged_share) for row in desk.rows] == [("expired", 0.0), ("succeeded", 1.0)]


async def test_who_joined_and_has_time_left_gets_and_pays(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await held(desk, "cat", left_s=SHORT_S)
        await desk.send("cat", request_id="joined")
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status) == ("cat", "expired")
        desk.process.gate.set()
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status, outcome.receipt.cache) == ("joined", "succeeded", "miss")
        await desk.until(lambda: len(desk.rows) == 2)
        assert [(row.status, row.charged_share) for row in desk.rows] == [("expired", 0.0), ("succeeded", 1.0)]
        assert len(desk.process.batches) == 1


async def test_who_waits_is_told_at_the_deadline_and_not_computed(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await held(desk)
        await desk.send("waits", request_id="waits", left_s=SHORT_S)
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status) == ("waits", "expired")
        assert message_of(outcome) == f"the deadline of {SHORT_S:g} s passed before the model could start"
        assert desk.consumer is not None
        assert desk.consumer.queue.waiting == 0, "acked, it makes room for others: its inputs must not stay"
        desk.process.gate.set()
        assert (await ended(desk))[1].status == "succeeded"
        assert desk.process.batches == [["held"]]


async def test_queue_limit_ends_what_waits_and_leaves_what_runs(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await held(desk, queue_limit_s=SHORT_S)
        await desk.send("waits", request_id="waits", queue_limit_s=SHORT_S)
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status) == ("waits", "expired")
        assert message_of(outcome) == f"the queue limit of {SHORT_S:g} s passed before the model could start"
        desk.process.gate.set()
        request_id, outcome = await ended(desk)
        assert (request_id, outcome.status) == ("held", "succeeded")


async def test_result_after_the_deadline_is_dropped_and_not_kept(redis_url: str, tmp_path: Path) -> None:
    """Of a model without steps: else a caller with a short deadline would compute for nothing, and hit for free."""
    async with working(redis_url, tmp_path) as desk:
        desk.process.is_deaf = True
        await held(desk, "cat", left_s=SHORT_S)
        await asyncio.sleep(SHORT_S)
        desk.process.gate.set()
        _, outcome = await ended(desk)
        assert (outcome.status, outcome.result) == ("expired", None)
        await desk.until(lambda: len(desk.rows) == 1)
        assert (desk.rows[0].status, desk.rows[0].charged_share) == ("expired", 0.0)
        assert await desk.ask("cat", request_id="again") == [("succeeded", b"cat")]
        assert desk.process.batches == [["cat"], ["cat"]]


async def test_prediction_ends_as_failed_with_the_reason(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await held(desk, left_s=SHORT_S, prediction="1", webhook="completed")
        assert (await ended(desk))[1].status == "expired"
        found = await desk.records.read("held")
        assert found is not None
        assert found.state == "failed"
        assert found.reply is not None
        assert message_of(found.reply.outcomes[0]).endswith("passed before the model was done")
        await desk.until(lambda: len(desk.rows) == 1)
        assert (desk.rows[0].status, desk.rows[0].steps_saved, desk.rows[0].cost_usd) == ("expired", 47, 0.0)
        async with desk.broker.subscribe(WEBHOOKS_SUBSCRIPTION_ID, max_messages=1) as told:
            message = await asyncio.wait_for(anext(aiter(told)), WAIT_LIMIT_S)
        assert decode_webhook_event(message.data).event == "completed"


async def test_what_is_late_is_not_tried_again_after_a_death(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.deaths = 1
        await held(desk, left_s=SHORT_S)
        request_id, outcome = await ended(desk)  # the Cancel opens the gate, and then the process dies
        assert (request_id, outcome.status) == ("held", "expired")
        assert await desk.ask("next", request_id="next") == [("succeeded", b"next")]
        assert desk.process.batches == [["held"], ["next"]]


class SlowBroker(InMemoryTransport):
    """Takes its time over replies while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def publish(self, topic_id: str, data: bytes, attributes: Mapping[str, str], **given: Any) -> str:
        if topic_id.startswith("inbox"):
            self.asked.set()
            await asyncio.wait_for(self.gate.wait(), WAIT_LIMIT_S)
        return await super().publish(topic_id, data, attributes, **given)


async def test_reply_that_nobody_waited_for_any_more_is_not_charged(redis_url: str, tmp_path: Path) -> None:
    broker = SlowBroker()
    async with working(redis_url, tmp_path, broker=broker) as desk:
        await desk.send("cat", left_s=SHORT_S)
        await broker.asked.wait()
        await asyncio.sleep(SHORT_S + LATE_LOOK_S)
        broker.gate.set()
        assert (await ended(desk))[1].status == "succeeded", "it was, when it was sent"
        await desk.until(lambda: len(desk.rows) == 1)
        (row,) = desk.rows
        assert (row.status, row.charged_share, row.cost_usd) == ("expired", 0.0, 0.0)


async def test_answer_to_an_instance_that_is_gone_is_neither_charged_nor_kept(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await held(desk, "cat")
        await desk.broker.delete_topic(inbox_topic_id("1"))
        desk.process.gate.set()
        await desk.until(lambda: len(desk.rows) == 1)
        (row,) = desk.rows
        assert (row.status, row.error_code, row.charged_share, row.cost_usd) == ("failed", "unavailable", 0.0, 0.0)
    async with ResultCache(redis_url, 1_000_000) as cache:
        assert await cache.wait_up(WAIT_LIMIT_S)
        assert await cache.get_many(["key-cat"]) == {}


async def test_late_attempt_repeats_what_was_answered_in_time(redis_url: str, tmp_path: Path) -> None:
    """Its worker died between its reply and its rows: the answer was delivered, so it is charged."""
    async with working(redis_url, tmp_path) as desk:
        result = EmbeddingResult(b"cat", 3)
        first = ReplyBody([ItemOutcome(0, "succeeded", Receipt("miss", tokens=3), result)], worker="first")
        await desk.records.finish("req", "succeeded", encode_reply_body(first))
        await desk.send("cat", left_s=-10.0)
        assert (await ended(desk))[1].status == "expired"
        await desk.until(lambda: len(desk.rows) == 1)
        assert (desk.rows[0].status, desk.rows[0].charged_share, desk.rows[0].tokens) == ("succeeded", 1.0, 3)


LAST_STEP = """
import sys, time
from workers.runtime import server as model_process

class Letters:
    device_name, pads = "letters", False
    def setup(self): pass
    def warmup(self): pass
    def groups(self, batch): return [list(range(len(batch)))]
    def computed_work(self, lengths): return sum(lengths)
    def predict(self, batch, on_step):
        while True:
            time.sleep(0.01)
            on_step(3, 3)

model_process.model_for = lambda *given, **named: Letters()
sys.exit(model_process.main())
"""


async def test_after_the_last_step_it_stops_too(redis_url: str, tmp_path: Path) -> None:
    """Decoding and encoding an image take as long as several steps."""
    command = (sys.executable, "-c", LAST_STEP)
    async with (
        ModelPool([HostedModel(MODEL, tmp_path)], device="cpu", processes=1, command=command) as pool,
        working(redis_url, tmp_path, pool=pool) as desk,
    ):
        await desk.send("cat", left_s=SHORT_S)
        _, outcome = await ended(desk)
        assert (outcome.status, outcome.receipt.steps_saved) == ("expired", 0)
