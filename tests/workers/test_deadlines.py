"""Deadlines stop work wherever it is: queued, in preparation, between steps, or in delivery.

Late work is free.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import WEBHOOKS_SUBSCRIPTION_ID, inbox_topic_id
from shared.messages import ItemOutcome, Receipt, ReplyBody, encode_reply_body
from shared.models.tasks.embedding import EmbeddingResult
from shared.money.slo import ENDS
from shared.stores.cache import ResultCache
from shared.stores.records import LATE_LOOK_S
from shared.webhooks.event import decode_webhook_event
from tests.limits import PATIENCE, WAIT_LIMIT_S
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker
from workers.runtime.pool import HostedModel, ModelPool

pytestmark = pytest.mark.anyio

SHORT_S = 0.7 * PATIENCE
"""A deadline that passes during the test.

Everything that must happen before the deadline takes a hundredth of this time.
"""


async def ended(harness: WorkerHarness) -> tuple[str, ItemOutcome]:
    """The next job that gets a reply, and the outcome of its only item."""
    reply = await harness.reply()
    (outcome,) = reply.body.outcomes
    return reply.request_id, outcome


async def held(harness: WorkerHarness, text: str = "held", **given: Any) -> None:
    """A job that runs until it is stopped or the gate opens."""
    harness.process.gate.clear()
    await harness.send(text, request_id=text, **given)
    await harness.process.started.wait()


async def both(harness: WorkerHarness, *texts: str, short: str) -> None:
    """Jobs that arrive together, so they share a batch; `short` has little time left."""
    harness.process.gate.clear()
    sent = [
        harness.send(text, request_id=text, left_s=SHORT_S if text == short else WAIT_LIMIT_S)
        for text in texts
    ]
    await asyncio.gather(*sent)
    await harness.process.started.wait()
    assert harness.process.batches == [list(texts)]


def message_of(outcome: ItemOutcome) -> str:
    assert outcome.error is not None
    assert outcome.error.code == "deadline_exceeded"
    return outcome.error.message


async def test_batch_stops_at_the_deadline_of_the_last_who_wants_it(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await held(harness, left_s=SHORT_S)
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status, outcome.receipt.steps_saved) == ("held", "expired", 47)
        assert (
            message_of(outcome) == f"the deadline of {SHORT_S:g} s passed before the model was done"
        )
        await harness.until(lambda: len(harness.rows) == 1)
        (row,) = harness.rows
        assert (row.status, row.steps_saved, row.cost_usd, row.charged_share) == (
            "expired",
            47,
            0.0,
            0.0,
        )
        assert await harness.ask("next", request_id="next") == [("succeeded", b"next")]


async def test_neighbors_in_the_batch_go_on(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await both(harness, "late", "early", short="late")
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status) == ("late", "expired")
        assert message_of(outcome).endswith("passed before the model was done")
        assert not harness.process.gate.is_set(), "the batch was stopped"
        harness.process.gate.set()
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status) == ("early", "succeeded")
        await harness.until(lambda: len(harness.rows) == 2)
        assert [(row.status, row.charged_share) for row in harness.rows] == [
            ("expired", 0.0),
            ("succeeded", 1.0),
        ]


async def test_who_joined_and_has_time_left_gets_and_pays(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await held(harness, "cat", left_s=SHORT_S)
        await harness.send("cat", request_id="joined")
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status) == ("cat", "expired")
        harness.process.gate.set()
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status, outcome.receipt.cache) == (
            "joined",
            "succeeded",
            "miss",
        )
        await harness.until(lambda: len(harness.rows) == 2)
        assert [(row.status, row.charged_share) for row in harness.rows] == [
            ("expired", 0.0),
            ("succeeded", 1.0),
        ]
        assert len(harness.process.batches) == 1


async def test_who_waits_is_told_at_the_deadline_and_not_computed(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await held(harness)
        await harness.send("waits", request_id="waits", left_s=SHORT_S)
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status) == ("waits", "expired")
        assert (
            message_of(outcome)
            == f"the deadline of {SHORT_S:g} s passed before the model could start"
        )
        assert harness.consumer is not None
        assert harness.consumer.queue.waiting == 0, (
            "acked, it makes room for others: its inputs must not stay"
        )
        harness.process.gate.set()
        assert (await ended(harness))[1].status == "succeeded"
        assert harness.process.batches == [["held"]]


async def test_queue_limit_ends_what_waits_and_leaves_what_runs(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await held(harness, queue_limit_s=SHORT_S)
        await harness.send("waits", request_id="waits", queue_limit_s=SHORT_S)
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status) == ("waits", "expired")
        assert (
            message_of(outcome)
            == f"the queue limit of {SHORT_S:g} s passed before the model could start"
        )
        harness.process.gate.set()
        request_id, outcome = await ended(harness)
        assert (request_id, outcome.status) == ("held", "succeeded")


async def test_result_after_the_deadline_is_dropped_and_not_kept(
    redis_url: str, tmp_path: Path
) -> None:
    """Otherwise, with a model that has no steps, a caller with a short deadline would pay nothing
    for the computation and then get free cache hits.
    """
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.is_deaf = True
        await held(harness, "cat", left_s=SHORT_S)
        await asyncio.sleep(SHORT_S)
        harness.process.gate.set()
        _, outcome = await ended(harness)
        assert (outcome.status, outcome.result) == ("expired", None)
        await harness.until(lambda: len(harness.rows) == 1)
        assert (harness.rows[0].status, harness.rows[0].charged_share) == ("expired", 0.0)
        assert await harness.ask("cat", request_id="again") == [("succeeded", b"cat")]
        assert harness.process.batches == [["cat"], ["cat"]]


async def test_only_predictions_with_the_usual_time_count_for_the_objective(
    redis_url: str, tmp_path: Path
) -> None:
    usual_s = MODEL.deadline.default_s
    async with running_worker(redis_url, tmp_path) as harness:
        before = of_objective()
        for number, given in enumerate(
            [
                {"prediction": "1", "left_s": usual_s},
                {},  # the API counts it
                {"prediction": "1", "left_s": usual_s, "priority": "batch"},
                {"prediction": "1", "left_s": usual_s - 1},
                {"prediction": "1", "left_s": usual_s, "queue_limit_s": usual_s - 1},
            ]
        ):
            assert await harness.ask("cat", request_id=f"r{number}", **given)
        await held(harness, left_s=SHORT_S, received_ago_s=usual_s - SHORT_S, prediction="1")
        assert (await ended(harness))[1].status == "expired"
        await harness.until(lambda: len(harness.rows) == 6)
        after = of_objective()
        assert {end: after[end] - before[end] for end in after} == {
            "in_time": 1,
            "late": 1,
            "refused": 0,
        }


def of_objective() -> dict[str, float]:
    """The counters for the deadline objective."""
    found = {
        end: REGISTRY.get_sample_value(
            "penstock_slo_items_total", {"model": MODEL.name, "end": end}
        )
        for end in ENDS
    }
    return {end: value or 0.0 for end, value in found.items()}


async def test_prediction_ends_as_failed_with_the_reason(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await held(harness, left_s=SHORT_S, prediction="1", webhook="completed")
        assert (await ended(harness))[1].status == "expired"
        found = await harness.stores.records.read("held")
        assert found is not None
        assert found.state == "failed"
        assert found.reply is not None
        assert message_of(found.reply.outcomes[0]).endswith("passed before the model was done")
        await harness.until(lambda: len(harness.rows) == 1)
        assert (harness.rows[0].status, harness.rows[0].steps_saved, harness.rows[0].cost_usd) == (
            "expired",
            47,
            0.0,
        )
        async with harness.broker.subscribe(WEBHOOKS_SUBSCRIPTION_ID, max_messages=1) as told:
            message = await asyncio.wait_for(anext(aiter(told)), WAIT_LIMIT_S)
        assert decode_webhook_event(message.data).event == "completed"


async def test_what_is_late_is_not_tried_again_after_a_death(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.deaths = 1
        await held(harness, left_s=SHORT_S)
        request_id, outcome = await ended(
            harness
        )  # Cancel opens the gate, and then the process dies
        assert (request_id, outcome.status) == ("held", "expired")
        assert await harness.ask("next", request_id="next") == [("succeeded", b"next")]
        assert harness.process.batches == [["held"], ["next"]]


class SlowBroker(InMemoryBroker):
    """Delays replies while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def publish(
        self, topic_id: str, data: bytes, attributes: Mapping[str, str], **given: Any
    ) -> str:
        if topic_id.startswith("inbox"):
            self.asked.set()
            await asyncio.wait_for(self.gate.wait(), WAIT_LIMIT_S)
        return await super().publish(topic_id, data, attributes, **given)


async def test_row_says_what_the_reply_says_however_late_it_is_taken(
    redis_url: str, tmp_path: Path
) -> None:
    """If no one is waiting for the reply any longer, the API's rows take precedence
    (tests/api/test_ledger.py).
    """
    broker = SlowBroker()
    async with running_worker(redis_url, tmp_path, broker=broker) as harness:
        await harness.send("cat", left_s=SHORT_S)
        await broker.asked.wait()
        await asyncio.sleep(SHORT_S + LATE_LOOK_S)
        broker.gate.set()
        assert (await ended(harness))[1].status == "succeeded", "it was, when it was sent"
        await harness.until(lambda: len(harness.rows) == 1)
        (row,) = harness.rows
        assert (row.status, row.charged_share) == ("succeeded", 1.0)


async def test_answer_to_an_instance_that_is_gone_is_neither_charged_nor_kept(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await held(harness, "cat")
        await harness.broker.delete_topic(inbox_topic_id("1"))
        harness.process.gate.set()
        await harness.until(lambda: len(harness.rows) == 1)
        (row,) = harness.rows
        assert (row.status, row.error_code, row.charged_share, row.cost_usd) == (
            "failed",
            "unavailable",
            0.0,
            0.0,
        )
    async with ResultCache(redis_url, 1_000_000) as cache:
        assert await cache.wait_up(WAIT_LIMIT_S)
        assert await cache.get_many(["key-cat"]) == {}


async def test_late_attempt_repeats_what_was_answered_in_time(
    redis_url: str, tmp_path: Path
) -> None:
    """The worker died between sending the reply and writing the rows.

    The reply was delivered, so it is charged.
    """
    async with running_worker(redis_url, tmp_path) as harness:
        result = EmbeddingResult(b"cat", 3)
        first = ReplyBody(
            [ItemOutcome(0, "succeeded", Receipt("miss", tokens=3), result)], worker="first"
        )
        await harness.stores.records.finish("req", "succeeded", encode_reply_body(first))
        await harness.send("cat", left_s=-10.0)
        assert (await ended(harness))[1].status == "expired"
        await harness.until(lambda: len(harness.rows) == 1)
        assert (harness.rows[0].status, harness.rows[0].charged_share, harness.rows[0].tokens) == (
            "succeeded",
            1.0,
            3,
        )


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
        ModelPool(
            [HostedModel(MODEL, tmp_path)], device="cpu", processes=1, command=command
        ) as pool,
        running_worker(redis_url, tmp_path, pool=pool) as harness,
    ):
        await harness.send("cat", left_s=SHORT_S)
        _, outcome = await ended(harness)
        assert (outcome.status, outcome.receipt.steps_saved) == ("expired", 0)
