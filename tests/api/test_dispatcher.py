"""The dispatcher without HTTP: sharing computed results, waiting, and the rows it writes."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from api.dispatch.dispatcher import _wait_for_items
from api.dispatch.job_sender import split_into_jobs
from api.dispatch.reply_inbox import REPLIES
from api.dispatch.request import InferenceRequest, InFlightItem, RequestOptions
from shared.errors import Overloaded, Unavailable
from shared.messages import (
    ItemOutcome,
    Receipt,
    Reply,
    ReplyBody,
    RequestFacts,
    encode_reply,
    encode_reply_body,
    record_id,
)
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from tests.api.dispatcher_harness import (
    DispatcherHarness,
    ends,
    origins,
    running_dispatcher,
    texts_right,
)
from tests.api.fake_worker import vector_of
from tests.api.harness import TEXT_MODEL
from tests.limits import WAIT_LIMIT_S
from tests.waiting import until

pytestmark = pytest.mark.anyio
StartHarness = Callable[..., AbstractAsyncContextManager[DispatcherHarness]]


@pytest.fixture
def start_harness(tmp_path: Path) -> StartHarness:
    return partial(running_dispatcher, tmp_path)


@pytest.fixture
async def harness(start_harness: StartHarness) -> AsyncIterator[DispatcherHarness]:
    async with start_harness() as running:
        yield running
        assert running.is_idle()


async def test_identical_items_at_once_are_computed_once(harness: DispatcherHarness) -> None:
    harness.worker.go.clear()
    asks = [harness.ask("a"), harness.ask("b", "a"), harness.ask("a")]
    await harness.worker.until_taken(2)
    harness.worker.go.set()
    first, second, third = await asyncio.gather(*asks)
    assert texts_right(first, "a")
    assert texts_right(second, "b", "a")
    assert texts_right(third, "a")
    assert (origins(first), origins(second), origins(third)) == (
        ["miss"],
        ["miss", "joined"],
        ["joined"],
    )
    assert [item.input for item in harness.worker.items] == [TextInput("a"), TextInput("b")]
    assert sorted((row.item, row.cache, row.status, row.cost_usd) for row in harness.rows) == [
        (0, "joined", "succeeded", 0.0),
        (1, "joined", "succeeded", 0.0),
    ]


async def test_item_that_stands_twice_in_a_request_is_computed_once(
    harness: DispatcherHarness,
) -> None:
    answer = await harness.ask("a", "b", "a")
    assert texts_right(answer, "a", "b", "a")
    assert origins(answer) == ["miss", "miss", "joined"]
    assert [(row.row_id.rpartition(":")[2], row.cache) for row in harness.rows] == [("2", "joined")]


async def test_leader_who_hangs_up_leaves_the_job_to_those_who_joined(
    harness: DispatcherHarness,
) -> None:
    harness.worker.go.clear()
    leader, joined = harness.ask("a"), harness.ask("a")
    await harness.worker.until_taken(1)
    leader.cancel()
    await asyncio.wait([leader])
    harness.worker.go.set()
    assert texts_right(await joined, "a")
    assert len(harness.worker.jobs) == 1


async def test_leader_who_hangs_up_before_its_job_exists_hands_over(
    harness: DispatcherHarness,
) -> None:
    harness.cache.go.clear()
    leader, joined = harness.ask("a"), harness.ask("a")
    await asyncio.sleep(0)
    leader.cancel()
    await asyncio.wait([leader])
    harness.cache.go.set()
    answer = await joined
    assert texts_right(answer, "a")
    assert origins(answer) == ["miss"]
    # The leader's item was never published, so the API writes its row.
    assert [(row.status, row.error_code) for row in harness.rows] == [("canceled", "canceled")]


async def test_who_joined_a_job_that_no_worker_can_read_asks_anew(
    harness: DispatcherHarness,
) -> None:
    harness.worker.go.clear()
    asks = [harness.ask("a"), harness.ask("b", "a"), harness.ask("a")]
    harness.worker.unreadable = {asks[0].get_name()}
    await harness.worker.until_taken(2)
    harness.worker.go.set()
    first, *others = await asyncio.gather(*asks)
    assert ends(first) == ["undecodable_message"]
    assert texts_right(others[0], "b", "a")
    assert texts_right(others[1], "a")
    assert len(harness.worker.jobs) == 3, "one of those that joined led the next round"


async def test_what_is_refused_after_work_began_is_refused_as_a_whole(
    harness: DispatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item is computed.

    The other would have to be requested again, and there is no room for that.
    """

    def refuse(*_: object, **__: object) -> None:
        raise Overloaded("no room")

    harness.worker.go.clear()
    asks = [harness.ask("a"), harness.ask("b", "a")]
    harness.worker.unreadable = {asks[0].get_name()}
    await harness.worker.until_taken(2)
    monkeypatch.setattr(harness.admission, "admit", refuse)
    harness.worker.go.set()
    answer = await asks[1]
    assert ends(answer) == ["succeeded", "overloaded"]
    with pytest.raises(Overloaded, match="no room"):
        answer.raise_if_failed()
    answer.is_delivered = False  # as if the block had raised
    assert answer.cost_usd == 0


async def test_last_who_hangs_up_frees_everything_at_once(harness: DispatcherHarness) -> None:
    unknown = REPLIES.labels("unknown")
    before = unknown._value.get()
    harness.worker.go.clear()
    asks = [harness.ask("a"), harness.ask("a", "b")]
    await harness.worker.until_taken(2)
    for ask in asks:
        ask.cancel()
    await asyncio.wait(asks)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert harness.is_idle()
    # The worker replies anyway. Nothing is waiting for the replies, so they are dropped.
    harness.worker.go.set()
    await until(lambda: unknown._value.get() == before + 2)
    # The worker writes rows for results anyway, but those rows don't count here.
    assert [(row.cache, row.error_code) for row in harness.rows] == [("none", "canceled")] * 3
    assert {(row.attempt, row.charged_share) for row in harness.rows} == {(None, 0.0)}


async def test_joined_requests_keep_their_own_deadlines(
    harness: DispatcherHarness,
) -> None:
    harness.worker.go.clear()
    leader, joined = harness.ask("a", deadline_in_s=0.1), harness.ask("a")
    assert ends(await leader) == ["deadline_exceeded"]
    await harness.worker.until_taken(2)
    harness.worker.go.set()
    answer = await joined
    assert texts_right(answer, "a")
    assert origins(answer) == ["miss"]
    assert [(row.status, row.attempt) for row in harness.rows] == [("expired", None)]


async def test_short_deadline_of_one_who_joined_does_not_end_the_job(
    harness: DispatcherHarness,
) -> None:
    harness.worker.go.clear()
    leader, joined = harness.ask("a"), harness.ask("a", deadline_in_s=0.05)
    assert ends(await joined) == ["deadline_exceeded"]
    harness.worker.go.set()
    assert texts_right(await leader, "a")
    assert [row.status for row in harness.rows] == ["expired"]


async def test_items_that_end_one_by_one_do_not_extend_the_time_after_the_deadline() -> None:
    class Expired:
        def remaining_s(self) -> float:
            return 0.0

    state: Any = Expired()
    nothing: Any = None
    items = [InFlightItem(nothing) for _ in range(100)]
    waiting = asyncio.create_task(_wait_for_items(state, items, 0.1))
    for item in items[:-1]:
        await asyncio.wait([waiting], timeout=0.05)
        if waiting.done():
            break
        item.end(None)
    assert waiting.done()


async def test_failure_is_shared_and_items_fail_alone(harness: DispatcherHarness) -> None:
    harness.worker.go.clear()
    asks = [harness.ask("a", "broken"), harness.ask("broken")]
    await harness.worker.until_taken(1)
    harness.worker.go.set()
    first, second = await asyncio.gather(*asks)
    assert ends(first) == ["succeeded", "model_failed"]
    assert ends(second) == ["model_failed"]
    assert [(row.cache, row.status, row.error_code) for row in harness.rows] == [
        ("joined", "failed", "model_failed")
    ]


async def test_answer_whose_reply_got_lost_is_found_in_the_record(
    start_harness: StartHarness, redis_url: str
) -> None:
    async with start_harness(redis_url=redis_url) as harness:
        harness.worker.is_silent = True
        ask = harness.ask("a", deadline_in_s=0.3)
        await harness.worker.until_taken(1)
        result = EmbeddingResult(vector_of(TextInput("a")).tobytes(), 3)
        reply = ReplyBody([ItemOutcome(0, "succeeded", Receipt(cache="miss"), result)])
        await harness.stores.records.finish(ask.get_name(), "succeeded", encode_reply_body(reply))
        assert texts_right(await ask, "a")
        assert harness.rows == []  # the worker has it, so the worker writes its row


async def test_job_that_every_caller_has_left_is_canceled(
    start_harness: StartHarness, redis_url: str
) -> None:
    async with start_harness(redis_url=redis_url) as harness:
        harness.worker.go.clear()
        leader, joined = harness.ask("a"), harness.ask("a")
        await harness.worker.until_taken(1)
        record = harness.worker.jobs[0].envelope.request_id
        for ask in (leader, joined):
            assert await harness.stores.records.read(record) is None, "somebody waits for it"
            ask.cancel()
            await asyncio.wait([ask])
        with anyio.fail_after(WAIT_LIMIT_S):
            while (found := await harness.stores.records.read(record)) is None:
                pass
        assert found.state == "canceled"


async def test_row_of_an_item_that_got_no_reply_says_so(harness: DispatcherHarness) -> None:
    """The worker may have written a different row, one for a result; that row doesn't count."""
    harness.worker.is_silent = True
    assert ends(await harness.ask("a", deadline_in_s=0.05)) == ["deadline_exceeded"]
    assert [(row.status, row.attempt, row.cost_usd) for row in harness.rows] == [
        ("expired", None, 0.0)
    ]


async def test_nothing_is_published_after_the_deadline(harness: DispatcherHarness) -> None:
    assert ends(await harness.ask("a", deadline_in_s=-1.0)) == ["deadline_exceeded"]
    assert harness.worker.jobs == []
    assert [(row.status, row.error_code, row.published_at_s) for row in harness.rows] == [
        ("expired", "deadline_exceeded", None)
    ]


async def test_broker_out_of_reach_is_recorded_by_the_api(harness: DispatcherHarness) -> None:
    harness.transport.outage = Unavailable("no broker")
    assert ends(await harness.ask("a", "b")) == ["unavailable", "unavailable"]
    assert [(row.status, row.error_code) for row in harness.rows] == [("failed", "unavailable")] * 2


async def test_publish_that_ends_with_the_deadline_has_expired(
    harness: DispatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer may fire up to a millisecond early; the caller must still get an error about its
    deadline, not about an outage.
    """

    async def publish(
        topic: str, data: bytes, attributes: dict[str, str], *, timeout_s: float
    ) -> str:
        while time.time() < float(attributes["deadline_s"]) - 0.001:
            pass
        raise Unavailable("no response within the time left")

    monkeypatch.setattr(harness.transport, "publish", publish)
    assert ends(await harness.ask("a", deadline_in_s=0.02)) == ["deadline_exceeded"]


async def test_topic_that_is_missing_is_no_fault_of_the_caller(harness: DispatcherHarness) -> None:
    await harness.transport.delete_topic(f"jobs.{TEXT_MODEL.name}")
    assert ends(await harness.ask("a")) == ["unavailable"]


async def test_hits_cost_nothing_and_leave_rows(harness: DispatcherHarness) -> None:
    await harness.ask("a", "b")
    answer = await harness.ask("b", "c", "a")
    assert texts_right(answer, "b", "c", "a")
    assert origins(answer) == ["memory", "miss", "memory"]
    assert answer.headers()["x-penstock-cache"] == "partial"
    assert [(row.item, row.cache, row.tokens, row.cost_usd) for row in harness.rows] == [
        (0, "memory", 3, 0.0),
        (2, "memory", 3, 0.0),
    ]
    assert len(harness.worker.items) == 3


async def test_no_cache_computes_anew_and_keeps(harness: DispatcherHarness) -> None:
    await harness.ask("a")
    await harness.ask("a", cache_read=False)
    assert [(job.body.cache_read, job.body.cache_write) for job in harness.worker.jobs] == [
        (True, True),
        (False, True),
    ]
    assert all(item.cache_key for item in harness.worker.items)


async def test_no_store_keeps_nothing_and_shares_with_nobody(harness: DispatcherHarness) -> None:
    harness.worker.go.clear()
    asks = [harness.ask("a", cache_read=False, cache_write=False) for _ in range(2)]
    await harness.worker.until_taken(2)
    harness.worker.go.set()
    await asyncio.gather(*asks)
    assert [item.cache_key for item in harness.worker.items] == [None, None]


async def test_full_instance_refuses_at_once_but_still_serves_hits_and_joins(
    start_harness: StartHarness,
) -> None:
    async with start_harness(max_in_flight=2) as harness:
        await harness.ask("hit")
        harness.worker.go.clear()
        busy = harness.ask("a", "b", "c")
        await harness.worker.until_taken(2)
        with pytest.raises(Overloaded) as caught:
            await harness.ask("d")
        assert caught.value.retry_after_s > 0
        assert origins(await harness.ask("hit")) == ["memory"]
        joined = harness.ask("b")
        await asyncio.sleep(0)
        harness.worker.go.set()
        assert texts_right(await busy, "a", "b", "c")
        assert texts_right(await joined, "b")
        assert texts_right(await harness.ask("d"), "d")
        assert harness.is_idle()
        assert {row.error_code for row in harness.rows} == {None}


async def test_one_who_joined_a_refused_leader_is_told_the_same(
    start_harness: StartHarness,
) -> None:
    async with start_harness(max_in_flight=1) as harness:
        harness.worker.go.clear()
        busy = harness.ask("a")
        await harness.worker.until_taken(1)
        harness.cache.go.clear()
        asks = [harness.ask("b"), harness.ask("b")]
        await asyncio.sleep(0)
        harness.cache.go.set()
        results = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded, Overloaded]
        harness.worker.go.set()
        assert texts_right(await busy, "a")
        assert harness.is_idle()


async def test_reply_of_the_wrong_length_is_an_error_not_a_mix_up(
    harness: DispatcherHarness,
) -> None:
    harness.worker.is_silent = True
    ask = harness.ask("a", "b")
    await harness.worker.until_taken(1)
    envelope = harness.worker.jobs[0].envelope
    reply = Reply(envelope.request_id, envelope.part, envelope.slot, ReplyBody([]))
    await harness.transport.publish(envelope.inbox, *encode_reply(reply))
    assert ends(await ask) == ["internal", "internal"]


async def test_closing_tells_those_who_wait(start_harness: StartHarness) -> None:
    async with start_harness() as harness:
        harness.worker.go.clear()
        ask = harness.ask("a")
        await harness.worker.until_taken(1)
    assert ends(await ask) == ["unavailable"]


async def test_redis_serves_another_instance(start_harness: StartHarness, redis_url: str) -> None:
    async with start_harness(redis_url=redis_url) as first:
        await first.ask("a")
    async with start_harness(redis_url=redis_url) as second:
        answer = await second.ask("a")
        assert texts_right(answer, "a")
        assert origins(answer) == ["redis"]


@pytest.mark.parametrize("seed", range(5))
async def test_any_mix_of_asking_and_hanging_up_answers_right_and_leaves_nothing(
    start_harness: StartHarness, seed: int
) -> None:
    chance = random.Random(seed)
    async with start_harness() as harness:
        harness.worker.jitter = chance
        asks = []
        for _ in range(200):
            texts = [f"text {chance.randrange(12)}" for _ in range(chance.randint(1, 20))]
            flags = chance.choice(
                [{}, {}, {"cache_read": False}, {"cache_read": False, "cache_write": False}]
            )
            asks.append((texts, harness.ask(*texts, **flags)))
            if chance.random() < 0.4:
                chance.choice(asks)[1].cancel()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        await asyncio.wait([ask for _, ask in asks], timeout=WAIT_LIMIT_S)
        for texts, ask in asks:
            assert ask.done()
            assert ask.cancelled() or texts_right(ask.result(), *texts)
        await until(harness.is_idle)
        by_api = [row.row_id for row in harness.rows]
        by_worker = [
            f"{job.envelope.request_id}:{item.index}"
            for job in harness.worker.jobs
            for item in job.body.items
        ]
        assert len(set(by_api)) == len(by_api)
        assert len(set(by_worker)) == len(by_worker)
        for texts, ask in asks:
            items = {f"{ask.get_name()}:{index}" for index in range(len(texts))}
            computed = items & set(by_worker)
            if ask.cancelled():
                assert computed <= set(by_api), "what the worker writes must not count"
            else:
                assert items == computed ^ (items & set(by_api)), "each has one row"


async def test_recall_returns_what_some_jobs_computed_and_cancels_the_others(
    start_harness: StartHarness, redis_url: str
) -> None:
    texts = [TextInput(f"text {number}") for number in range(100)]
    async with start_harness(redis_url=redis_url) as harness:
        now_s, records = time.time(), harness.stores.records
        facts = RequestFacts(request_id="batch_1-2", tenant="t", received_at_s=now_s)
        request = InferenceRequest(facts, TEXT_MODEL, texts, now_s + 30.0, options=RequestOptions())
        *others, last = split_into_jobs(TEXT_MODEL, request.items())
        outcomes = [
            ItemOutcome(index, "succeeded", Receipt(), EmbeddingResult(b"1234", 1))
            for index in range(last.start, last.stop)
        ]
        record = record_id("batch_1-2", len(others))
        await records.finish(record, "succeeded", encode_reply_body(ReplyBody(outcomes)))
        with await harness.dispatcher.recall(request) as response:
            found = [outcome.status for outcome in response.outcomes]
        canceled = [await records.read(record_id("batch_1-2", job)) for job in range(len(others))]
    assert found == ["canceled"] * last.start + ["succeeded"] * len(outcomes)
    assert len(canceled) > 0
    assert {job and job.state for job in canceled} == {"canceled"}


async def test_recall_cancels_a_job_that_no_worker_has_claimed(
    start_harness: StartHarness, redis_url: str
) -> None:
    """A worker that gets the job later must not run it, because no one would pay for it."""
    async with start_harness(redis_url=redis_url) as harness:
        now_s = time.time()
        facts = RequestFacts(request_id="batch_1-1", tenant="t", received_at_s=now_s)
        request = InferenceRequest(
            facts,
            TEXT_MODEL,
            [TextInput("a")],
            now_s + 30.0,
            is_repeatable=True,
            options=RequestOptions(),
        )
        with await harness.dispatcher.recall(request) as response:
            assert [outcome.status for outcome in response.outcomes] == ["canceled"]
        found = await harness.stores.records.read(record_id("batch_1-1", 0))
        assert found is not None
        assert found.state == "canceled"
