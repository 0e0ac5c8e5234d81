"""A worker when parts die, callers leave, jobs come twice, memory is short: nothing is lost, and nobody else pays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.redis_server import RedisServer
from shared.errors import ModelFailed
from shared.messages import ReplyBody, encode_reply_body, failure
from shared.pubsub.names import WEBHOOKS_SUBSCRIPTION_ID, dead_letter_subscription_id, workers_subscription_id
from shared.tasks.image import ImageResult
from shared.transport import Message
from tests.limits import WAIT_LIMIT_S
from tests.workers.desk import LARGE_IMAGE, MODEL, Desk, FailingStore, working
from workers.worker import FAILED_BATCHES_MAX

pytestmark = pytest.mark.anyio


async def first_message(desk: Desk, subscription_id: str) -> Message:
    async with desk.broker.subscribe(subscription_id, max_messages=1) as subscription:
        message: Message = await asyncio.wait_for(anext(aiter(subscription)), WAIT_LIMIT_S)
        subscription.ack(message)
        return message


async def hold_first(desk: Desk) -> None:
    """Occupies the model process with a job of its own, `first`."""
    desk.process.gate.clear()
    await desk.send("first", request_id="first")
    await desk.process.started.wait()


async def claimed(desk: Desk, record: str) -> None:
    """Returns when the worker has claimed a record."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (found := await desk.records.read(record)) is None or found.state != "processing":
            pass


async def queued(desk: Desk) -> None:
    """Returns when everything that was published is in the worker's hands, and admitted."""
    await desk.until(lambda: desk.broker.backlog(workers_subscription_id(MODEL.name)) == 0)
    for _ in range(10):
        await asyncio.sleep(0)


async def test_poison_is_given_up_with_its_reason_and_its_neighbors_finish(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        for text in ("aa", "b†", "cc"):
            await desk.send(text, request_id=text)
        await queued(desk)
        desk.process.gate.set()
        outcomes = {(reply := await desk.reply()).request_id: reply.body.outcomes[0] for _ in range(4)}
        assert {name: one.status for name, one in outcomes.items()} == {
            "first": "succeeded",
            "aa": "succeeded",
            "b†": "failed",
            "cc": "succeeded",
        }
        assert outcomes["b†"].error is not None
        assert "4 model processes died over this item, 2 of them with it alone" in outcomes["b†"].error.message
        assert desk.process.batches[1:] == [["aa", "b†", "cc"], ["aa"], ["b†", "cc"], ["b†"], ["cc"], ["b†"]]
        dead = await first_message(desk, dead_letter_subscription_id(MODEL.name))
        assert dead.attributes["request_id"] == "b†"
        assert "died over this item" in dead.attributes["penstock_reason"]
        await desk.until(lambda: len(desk.rows) == 4)


async def test_last_words_too_long_for_an_attribute_are_cut(redis_url: str, tmp_path: Path) -> None:
    """Each character of a progress bar has three bytes."""
    async with working(redis_url, tmp_path) as desk:
        desk.process.died_of = "█" * 2000
        assert [status for status, _ in await desk.ask("b†")] == ["failed"]
        dead = await first_message(desk, dead_letter_subscription_id(MODEL.name))
        assert dead.attributes["penstock_reason"].endswith("██")
        await desk.until(lambda: len(desk.rows) == 1)


async def test_job_that_is_answered_is_answered_again_and_not_computed(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.send("cat", request_id="one")
        first = await desk.reply()
        await desk.until(lambda: len(desk.rows) == 1)
        desk.process.gate.clear()
        await desk.send("cat", request_id="one", cache_read=False)
        assert (await desk.reply()).body == first.body
        await desk.until(lambda: len(desk.rows) == 2)
        assert desk.rows[0].row_id == desk.rows[1].row_id
        desk.process.gate.set()


async def test_late_attempt_repeats_the_first_answer_in_its_rows(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        other = ReplyBody([failure(0, ModelFailed("by another"))], worker="other", replied_at_s=1.0)
        await desk.records.finish("first", "failed", encode_reply_body(other))
        desk.process.gate.set()
        await desk.until(lambda: len(desk.rows) == 1)
        assert (desk.rows[0].status, desk.rows[0].error_code) == ("failed", "model_failed")


async def test_job_that_three_workers_died_with_is_given_up(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        for _ in range(3):
            await desk.records.claim(["req"])
        desk.process.gate.clear()
        await desk.send("cat")
        error = (await desk.reply()).body.outcomes[0].error
        assert error is not None
        assert error.message == "3 workers died with this job in hand"
        dead = await first_message(desk, dead_letter_subscription_id(MODEL.name))
        assert dead.attributes["penstock_reason"] == error.message


async def test_job_that_a_worker_died_with_runs_alone(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.records.claim(["suspect"])
        await hold_first(desk)
        # Published long ago, as what comes again is: its claim is waited for.
        await desk.send("suspect", request_id="suspect", age_s=10)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (found := await desk.records.read("suspect")) is None or found.attempts < 2:
                pass
        for text in ("aaaaaaa", "bbbbbbb"):
            await desk.send(text, request_id=text)
        await queued(desk)
        desk.process.gate.set()
        for _ in range(4):
            await desk.reply()
        assert sorted(desk.process.batches[1:]) == [["aaaaaaa", "bbbbbbb"], ["suspect"]], "all would fit one batch"


async def test_canceled_job_never_reaches_the_model(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        await desk.send("cat", request_id="unwanted")
        await queued(desk)
        await desk.records.cancel("unwanted")
        reply = await desk.reply()
        assert (reply.request_id, reply.body.outcomes[0].status) == ("unwanted", "canceled")
        desk.process.gate.set()
        await desk.until(lambda: len(desk.rows) == 2)
        assert desk.process.batches == [["first"]]


async def test_job_canceled_before_it_came_is_not_begun(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        await desk.records.cancel("early")
        await desk.send("cat", request_id="early")
        assert (await desk.reply()).body.outcomes[0].status == "canceled"
        desk.process.gate.set()
        assert (await desk.reply()).request_id == "first"
        assert desk.process.batches == [["first"]]


async def test_running_job_stops_and_its_row_says_what_was_saved(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        await claimed(desk, "first")
        await desk.records.cancel("first")
        assert (await desk.reply()).body.outcomes[0].status == "canceled"
        await desk.until(lambda: len(desk.rows) == 1)
        assert (desk.rows[0].status, desk.rows[0].steps_saved) == ("canceled", 47)


async def test_running_batch_goes_on_for_those_who_want_it(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        for name in ("wanted", "unwanted"):
            await desk.send(name, request_id=name)
        await queued(desk)
        desk.process.gate.set()
        assert (await desk.reply()).request_id == "first"
        desk.process.gate.clear()
        await desk.records.cancel("unwanted")
        replies = {}
        for _ in range(2):
            reply = await desk.reply()
            replies[reply.request_id] = reply.body.outcomes[0].status
            desk.process.gate.set()
        assert replies["wanted"] == "succeeded"
        assert replies["unwanted"] in ("canceled", "succeeded"), "it may have been done when it was canceled"


async def test_who_joins_a_canceled_job_gets_a_result(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        desk.process.canceled = True  # its Cancel is on the way when the other comes
        await desk.send("first", request_id="joiner")
        await queued(desk)
        desk.process.gate.set()
        statuses = {(reply := await desk.reply()).request_id: reply.body.outcomes[0].status for _ in range(2)}
        assert statuses == {"first": "succeeded", "joiner": "succeeded"}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", tmp_path, persist=True) as server:
        yield server


async def test_prediction_is_kept_in_hand_until_its_record_is_ended(own_redis: RedisServer, tmp_path: Path) -> None:
    async with working(own_redis.url, tmp_path) as desk:
        desk.process.gate.clear()
        await desk.send("cat", prediction="1")
        await desk.process.started.wait()
        own_redis.kill()
        desk.process.gate.set()
        await desk.until(lambda: not desk.records.is_up)
        assert desk.rows == []
        own_redis.start()
        assert (await desk.reply()).body.outcomes[0].status == "succeeded"
        record = await desk.records.read("req")
        assert record is not None
        assert record.state == "succeeded"


async def test_job_is_acked_when_its_rows_are_safe(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path, drain_s=0) as desk:
        desk.rows.held = []
        await desk.send("cat", "dog")
        await desk.reply()
        await desk.until(lambda: len(desk.rows) == 2)
        desk.rows.held[0]()
        desk.stop.set()
        await desk.until(lambda: desk.broker.backlog(workers_subscription_id(MODEL.name)) == 1)


async def test_what_is_handed_back_is_not_suspected(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path, drain_s=0) as desk:
        await hold_first(desk)
        assert desk.running is not None
        await claimed(desk, "first")
        desk.stop.set()
        await asyncio.wait_for(desk.running, WAIT_LIMIT_S)
        claims = await desk.records.claim(["first"])
        assert claims[0] is not None
        assert (claims[0].attempt, claims[0].unfinished) == (2, 0)


async def test_worker_whose_batches_all_fail_leaves(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        assert desk.running is not None
        for number in range(FAILED_BATCHES_MAX):
            await desk.ask("!" * (number + 1), request_id=f"r{number}")
        with pytest.raises(ModelFailed, match="in a row"):
            await asyncio.wait_for(asyncio.shield(desk.running), WAIT_LIMIT_S)


async def test_lane_batch_gets_its_turn_and_no_more(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        for number in range(6):  # of such lengths that none shares a batch
            await desk.send("a" * (60 + number), request_id=f"i{number}")
            await desk.send("b" * (60 + number), request_id=f"b{number}", lane="batch")
        await queued(desk)
        desk.process.gate.set()
        for _ in range(13):
            await desk.reply()
        lanes = "".join(batch[0][0] for batch in desk.process.batches[1:])
        assert lanes[:8].count("b") == 2
        assert sorted(lanes) == ["a"] * 6 + ["b"] * 6


async def test_short_memory_makes_batches_smaller_until_it_heals(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await hold_first(desk)
        for number in range(2):
            await desk.send("short", request_id=f"s{number}", cache_read=False)
        await queued(desk)
        desk.process.gate.set()
        for _ in range(3):
            await desk.reply()
        before = len(desk.process.batches)
        await hold_first_again(desk)
        for number, letter in enumerate("uvwxyz"):
            await desk.send(letter * 20, request_id=f"l{number}")
        await queued(desk)
        desk.process.gate.set()
        for _ in range(7):
            await desk.reply()
        sizes = [len(batch) for batch in desk.process.batches[before + 1 :]]
        assert max(sizes) <= 3, "100 letters were the budget, which is less now"
        assert sum(sizes) == 6


async def hold_first_again(desk: Desk) -> None:
    desk.process.started.clear()
    desk.process.gate.clear()
    await desk.send("again", request_id="again")
    await desk.process.started.wait()


async def test_webhook_is_told_of_what_it_wants_to_know(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        await desk.send("cat", request_id="p", prediction="1", webhook="start,completed")
        assert (await desk.reply()).request_id == "p"
        told = [(await first_message(desk, WEBHOOKS_SUBSCRIPTION_ID)).attributes for _ in range(2)]
        assert sorted((one["record"], one["event"]) for one in told) == [("p", "completed"), ("p", "start")]


async def test_progress_of_a_prediction_stands_in_its_record(redis_url: str, tmp_path: Path) -> None:
    async with working(redis_url, tmp_path) as desk:
        desk.process.step_told = (3, 50)
        desk.process.gate.clear()
        await desk.send("cat", request_id="p", prediction="1", left_s=60)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (record := await desk.records.read("p")) is None or record.step != 3:
                desk.process.step_told = (3, 50)
        assert record.steps == 50
        desk.process.gate.set()
        await desk.reply()


async def test_large_image_is_kept_in_hand_until_the_store_takes_it(redis_url: str, tmp_path: Path) -> None:
    store = FailingStore(f"file://{tmp_path}", failures=2)
    async with working(redis_url, tmp_path, objects=store) as desk:
        await desk.send("LARGE")
        outcome = (await desk.reply()).body.outcomes[0]
        assert isinstance(outcome.result, ImageResult)
        assert outcome.result.image.object_key is not None
        assert await store.get(outcome.result.image.object_key, 1_000_000) == LARGE_IMAGE
        assert desk.process.batches == [["LARGE"]]
