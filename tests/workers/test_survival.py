"""A worker whose parts die, whose callers leave, whose jobs arrive twice, or whose memory runs
short loses nothing, and no other request is affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis.asyncio as redis

from infra.local.redis_server import RedisServer
from shared.broker.transport import (
    WEBHOOKS_SUBSCRIPTION_ID,
    ReceivedMessage,
    dead_letter_subscription_id,
    workers_subscription_id,
)
from shared.errors import BadInput, ModelFailed
from shared.messages import ReplyBody, encode_reply_body, failure
from shared.models.tasks import Input
from shared.models.tasks.image import ImageResult
from tests.gated_link import gated_redis
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.workers.worker_harness import (
    LARGE_IMAGE,
    MODEL,
    FailingStore,
    LetterPreparer,
    WorkerHarness,
    running_worker,
)
from workers.models.base import PreparedText
from workers.worker import FAILED_BATCHES_MAX

pytestmark = pytest.mark.anyio


async def first_message(harness: WorkerHarness, subscription_id: str) -> ReceivedMessage:
    async with harness.broker.subscribe(subscription_id, max_messages=1) as subscription:
        message: ReceivedMessage = await asyncio.wait_for(anext(aiter(subscription)), WAIT_LIMIT_S)
        subscription.ack(message)
        return message


async def hold_first(harness: WorkerHarness) -> None:
    """Occupies the model process with a separate job, `first`."""
    harness.process.gate.clear()
    await harness.send("first", request_id="first")
    await harness.process.started.wait()


async def claimed(harness: WorkerHarness, record: str) -> None:
    """Returns once the worker has claimed a record."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (
            found := await harness.stores.records.read(record)
        ) is None or found.state != "processing":
            pass


async def test_poison_is_given_up_with_its_reason_and_its_neighbors_finish(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        for text in ("aa", "b†", "cc"):
            await harness.send(text, request_id=text)
        await harness.queued(3)
        harness.process.gate.set()
        outcomes = {
            (reply := await harness.reply()).request_id: reply.body.outcomes[0] for _ in range(4)
        }
        assert {name: one.status for name, one in outcomes.items()} == {
            "first": "succeeded",
            "aa": "succeeded",
            "b†": "failed",
            "cc": "succeeded",
        }
        assert outcomes["b†"].error is not None
        assert (
            "4 model processes died while processing this item, 2 of them while it was their "
            "only item" in outcomes["b†"].error.message
        )
        assert harness.process.batches[1:] == [
            ["aa", "b†", "cc"],
            ["aa"],
            ["b†", "cc"],
            ["b†"],
            ["cc"],
            ["b†"],
        ]
        dead = await first_message(harness, dead_letter_subscription_id(MODEL.name))
        assert dead.attributes["request_id"] == "b†"
        assert "died while processing this item" in dead.attributes["penstock_reason"]
        await harness.until(lambda: len(harness.rows) == 4)


async def test_last_words_too_long_for_an_attribute_are_cut(redis_url: str, tmp_path: Path) -> None:
    """Each character in a progress bar takes three bytes."""
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.died_of = "█" * 2000
        assert [status for status, _ in await harness.ask("b†")] == ["failed"]
        dead = await first_message(harness, dead_letter_subscription_id(MODEL.name))
        assert dead.attributes["penstock_reason"].endswith("██")
        await harness.until(lambda: len(harness.rows) == 1)


async def test_job_that_is_answered_is_answered_again_and_not_computed(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.send("cat", request_id="one")
        first = await harness.reply()
        await harness.until(lambda: len(harness.rows) == 1)
        harness.process.gate.clear()
        await harness.send("cat", request_id="one", cache_read=False)
        assert (await harness.reply()).body == first.body
        await harness.until(lambda: len(harness.rows) == 2)
        assert harness.rows[0].row_id == harness.rows[1].row_id
        harness.process.gate.set()


async def test_late_attempt_repeats_the_first_answer_in_its_rows(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        other = ReplyBody([failure(0, ModelFailed("by another"))], worker="other", replied_at_s=1.0)
        await harness.stores.records.finish("first", "failed", encode_reply_body(other))
        harness.process.gate.set()
        await harness.until(lambda: len(harness.rows) == 1)
        assert (harness.rows[0].status, harness.rows[0].error_code) == ("failed", "model_failed")


async def test_job_that_three_workers_died_with_is_given_up(redis_url: str, tmp_path: Path) -> None:
    """Like an item whose model processes died, it gets three deaths, two of them while alone."""
    async with running_worker(redis_url, tmp_path) as harness:
        for number in range(3):
            await harness.stores.records.claim(["req"])
            if number:
                await harness.stores.records.note_alone("req", begins=True)
        harness.process.gate.clear()
        await harness.send("cat", age_s=10)
        error = (await harness.reply()).body.outcomes[0].error
        assert error is not None
        assert (
            error.message
            == "3 workers died while holding this job, 2 of them while it was their only job"
        )
        dead = await first_message(harness, dead_letter_subscription_id(MODEL.name))
        assert dead.attributes["penstock_reason"] == error.message


async def test_jobs_whose_workers_died_with_all_of_them_succeed(
    redis_url: str, tmp_path: Path
) -> None:
    """Each of the five dead workers held twenty jobs, so no single job gets blamed."""
    names = [f"req{number}" for number in range(20)]
    async with running_worker(redis_url, tmp_path) as harness:
        for _ in range(5):
            await harness.stores.records.claim(names)
        for number, name in enumerate(names):
            await harness.send("a" * (number + 1), request_id=name, age_s=10)
        statuses = [(await harness.reply()).body.outcomes[0].status for _ in names]
        assert statuses == ["succeeded"] * 20
        assert all(len(batch) == 1 for batch in harness.process.batches)


async def test_jobs_of_one_dead_worker_share_batches(redis_url: str, tmp_path: Path) -> None:
    """If run one by one, each of a full worker's jobs would take as long as a whole batch."""
    names = [f"req-{letter}" for letter in "abcdef"]
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.stores.records.claim(names)
        await hold_first(harness)
        for name in names:
            await harness.send(name[-1], request_id=name, age_s=10)
        await harness.queued(6)
        async with asyncio.timeout(WAIT_LIMIT_S):
            for name in names:
                while await attempts_of(harness, name) < 2:
                    pass
        harness.process.gate.set()
        for _ in range(1 + len(names)):
            assert (await harness.reply()).body.outcomes[0].status == "succeeded"
        largest = max(len(batch) for batch in harness.process.batches)
        assert largest == MODEL.batch.max_items, harness.process.batches


async def attempts_of(harness: WorkerHarness, record_id: str) -> int:
    record = await harness.stores.records.read(record_id)
    return record.attempts if record is not None else 0


async def died_twice_with(harness: WorkerHarness, *records: str) -> None:
    """Recreates the state that two workers leave when they die while holding these jobs."""
    for _ in range(2):
        await harness.stores.records.claim(list(records))


async def deaths_if_killed_now(harness: WorkerHarness, record: str) -> tuple[int, int]:
    """The counts the next worker would see: deaths while the job was held, and while it was held by
    itself.
    """
    (claim,) = await harness.stores.records.claim([record])
    assert claim is not None
    return claim.unfinished, claim.alone


async def test_death_counts_against_the_job_that_runs_alone(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await died_twice_with(harness, "runs", "waits")
        harness.process.gate.clear()
        await harness.send("runs", request_id="runs", age_s=10)
        await harness.process.started.wait()
        prepared = asyncio.Event()
        note_alone = harness.stores.records.note_alone

        async def noting(record: str, *, begins: bool) -> bool:
            noted = await note_alone(record, begins=begins)
            if record == "waits" and not begins:
                prepared.set()
            return noted

        harness.stores.records.note_alone = noting  # type: ignore[method-assign]
        await harness.send("waits", request_id="waits", age_s=10)
        # It has the worker to itself only while it is being prepared.
        await asyncio.wait_for(prepared.wait(), WAIT_LIMIT_S)
        assert await deaths_if_killed_now(harness, "runs") == (3, 1)
        assert (await deaths_if_killed_now(harness, "waits"))[1] == 0
        harness.process.gate.set()
        for _ in range(2):
            assert (await harness.reply()).body.outcomes[0].status == "succeeded"


async def test_job_that_kills_its_worker_while_it_is_prepared_counts(
    redis_url: str, tmp_path: Path
) -> None:
    """For example, a job whose tokens use up all memory never reaches a model process."""
    found = []
    noted = asyncio.Event()

    class Preparing(LetterPreparer):
        def prepare(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
            if any(getattr(one, "text", "") == "poison" for one in inputs):
                found.append([getattr(one, "text", "") for one in inputs])
                noted.set()
            return super().prepare(inputs)

    async with running_worker(redis_url, tmp_path, preparer=Preparing()) as harness:
        await died_twice_with(harness, "poison")
        notes = []
        note_alone = harness.stores.records.note_alone

        async def noting(record: str, *, begins: bool) -> bool:
            notes.append((record, begins, noted.is_set()))
            return await note_alone(record, begins=begins)

        harness.stores.records.note_alone = noting  # type: ignore[method-assign]
        await harness.send("other", request_id="other")
        await harness.send("poison", request_id="poison", age_s=10)
        for _ in range(2):
            assert (await harness.reply()).body.outcomes[0].status == "succeeded"
        assert found == [["poison"]], "by itself"
        assert notes[:2] == [("poison", True, False), ("poison", False, True)]


async def test_worker_that_was_told_to_go_accuses_no_job(redis_url: str, tmp_path: Path) -> None:
    """A node is killed soon after its workers are asked to stop, whether or not their jobs are
    done.
    """
    async with running_worker(redis_url, tmp_path, drain_s=WAIT_LIMIT_S) as harness:
        await died_twice_with(harness, "alone")
        harness.process.gate.clear()
        await harness.send("alone", request_id="alone", age_s=10)
        await harness.process.started.wait()
        await harness.send("waits", request_id="waits")
        await harness.queued(1)
        await claimed(harness, "waits")
        harness.stop.set()
        async with redis.Redis.from_url(redis_url) as client, asyncio.timeout(WAIT_LIMIT_S):
            for name, others in (("alone", b"2"), ("waits", b"0")):
                while await client.hget(f"penstock:record:{name}", "open") != others:
                    pass
        record = await harness.stores.records.read("alone")
        assert record is not None
        assert record.state == "processing", "it goes on while there is time"
        assert await deaths_if_killed_now(harness, "alone") == (2, 0)
        assert await deaths_if_killed_now(harness, "waits") == (0, 0)
        harness.process.gate.set()
        for _ in range(2):
            assert (await harness.reply()).body.outcomes[0].status == "succeeded"


async def test_job_that_two_workers_died_with_runs_alone(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await died_twice_with(harness, "suspect")
        await hold_first(harness)
        # Published long ago, like any redelivered job, so the worker waits for its claim.
        await harness.send("suspect", request_id="suspect", age_s=10)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while await attempts_of(harness, "suspect") < 3:
                pass
        for text in ("aaaaaaa", "bbbbbbb"):
            await harness.send(text, request_id=text)
        await harness.queued(3)
        harness.process.gate.set()
        for _ in range(4):
            await harness.reply()
        assert sorted(harness.process.batches[1:]) == [["aaaaaaa", "bbbbbbb"], ["suspect"]], (
            "all would fit one batch"
        )


async def test_canceled_job_never_reaches_the_model(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        await harness.send("cat", request_id="unwanted")
        await harness.queued(1)
        await harness.stores.records.cancel("unwanted")
        reply = await harness.reply()
        assert (reply.request_id, reply.body.outcomes[0].status) == ("unwanted", "canceled")
        harness.process.gate.set()
        await harness.until(lambda: len(harness.rows) == 2)
        assert harness.process.batches == [["first"]]


async def test_job_canceled_before_it_came_is_not_begun(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        await harness.stores.records.cancel("early")
        await harness.send("cat", request_id="early")
        assert (await harness.reply()).body.outcomes[0].status == "canceled"
        harness.process.gate.set()
        assert (await harness.reply()).request_id == "first"
        assert harness.process.batches == [["first"]]


async def test_job_canceled_before_it_came_stops_if_the_model_was_faster(
    redis_url: str, tmp_path: Path
) -> None:
    """The model starts a new job before Redis reports that its caller is gone."""
    async with (
        gated_redis(redis_url) as (link, url),
        RecordStores(redis_url) as callers,
        running_worker(url, tmp_path) as harness,
    ):
        await callers.records.cancel("early")
        link.close()
        harness.process.gate.clear()
        await harness.send("cat", request_id="early")
        await harness.process.started.wait()
        link.open()
        assert (await harness.reply()).body.outcomes[0].status == "canceled"
        # It is canceled twice if the batch was still running when the listener came back.
        assert harness.process.cancels


async def test_running_job_stops_and_its_row_says_what_was_saved(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        await claimed(harness, "first")
        await harness.stores.records.cancel("first")
        assert (await harness.reply()).body.outcomes[0].status == "canceled"
        await harness.until(lambda: len(harness.rows) == 1)
        assert (harness.rows[0].status, harness.rows[0].steps_saved) == ("canceled", 47)


async def test_running_batch_goes_on_for_those_who_want_it(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        for name in ("wanted", "unwanted"):
            await harness.send(name, request_id=name)
        await harness.queued(2)
        harness.process.holds = "wanted"
        harness.process.gate.set()
        assert (await harness.reply()).request_id == "first"
        await harness.until(lambda: len(harness.process.batches) == 2)
        await harness.stores.records.cancel("unwanted")
        reply = await harness.reply()
        assert (reply.request_id, reply.body.outcomes[0].status) == ("unwanted", "canceled")
        harness.process.gate.set()
        reply = await harness.reply()
        assert (reply.request_id, reply.body.outcomes[0].status) == ("wanted", "succeeded")
        assert harness.process.cancels == 0


async def test_who_joins_a_canceled_job_gets_a_result(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        harness.process.canceled = True  # its Cancel is on the way when the other job arrives
        await harness.send("first", request_id="joiner")
        await harness.joined(2)
        harness.process.gate.set()
        statuses = {
            (reply := await harness.reply()).request_id: reply.body.outcomes[0].status
            for _ in range(2)
        }
        assert statuses == {"first": "succeeded", "joiner": "succeeded"}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", tmp_path, persist=True) as server:
        yield server


async def test_prediction_is_kept_in_hand_until_its_record_is_ended(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    async with running_worker(own_redis.url, tmp_path) as harness:
        harness.process.gate.clear()
        await harness.send("cat", prediction="1")
        await harness.process.started.wait()
        own_redis.kill()
        harness.process.gate.set()
        await harness.until(lambda: not harness.stores.redis.is_up)
        assert harness.rows == []
        own_redis.start()
        assert (await harness.reply()).body.outcomes[0].status == "succeeded"
        record = await harness.stores.records.read("req")
        assert record is not None
        assert record.state == "succeeded"


@pytest.mark.parametrize(("is_safe", "handed_back"), [(False, 1), (True, 0)])
async def test_job_is_acked_when_its_rows_are_safe(
    redis_url: str, tmp_path: Path, is_safe: bool, handed_back: int
) -> None:
    async with running_worker(redis_url, tmp_path, drain_s=0) as harness:
        harness.rows.held = []
        await harness.send("cat", "dog")
        await harness.reply()
        await harness.until(lambda: len(harness.rows) == 2)
        for tell in harness.rows.held:
            if is_safe:
                tell()
        harness.stop.set()
        assert harness.running is not None
        await asyncio.wait_for(harness.running, WAIT_LIMIT_S)
        assert harness.broker.backlog(workers_subscription_id(MODEL.name)) == handed_back


async def test_what_is_handed_back_is_not_suspected(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path, drain_s=0) as harness:
        await hold_first(harness)
        assert harness.running is not None
        await claimed(harness, "first")
        harness.stop.set()
        await asyncio.wait_for(harness.running, WAIT_LIMIT_S)
        claims = await harness.stores.records.claim(["first"])
        assert claims[0] is not None
        assert (claims[0].attempt, claims[0].unfinished) == (2, 0)


async def test_worker_whose_batches_all_fail_leaves(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        assert harness.running is not None
        for number in range(FAILED_BATCHES_MAX):
            await harness.ask("!" * (number + 1), request_id=f"r{number}")
        with pytest.raises(ModelFailed, match="in a row"):
            await asyncio.wait_for(asyncio.shield(harness.running), WAIT_LIMIT_S)


async def test_batch_priority_waits_for_interactive_jobs(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        for number in range(6):  # their lengths differ too much to share a batch
            await harness.send("b" * (60 + number), request_id=f"b{number}", priority="batch")
            await harness.send("a" * (60 + number), request_id=f"i{number}")
        await harness.queued(12)
        harness.process.gate.set()
        for _ in range(13):
            await harness.reply()
        priorities = "".join(batch[0][0] for batch in harness.process.batches[1:])
        assert priorities == "a" * 6 + "b" * 6


async def test_tenant_with_many_jobs_does_not_delay_another(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        for number in range(6):
            await harness.send("a" * (60 + number), request_id=f"a{number}", tenant="busy")
        await harness.send("b" * 60, request_id="b", tenant="quiet")
        await harness.queued(7)
        harness.process.gate.set()
        for _ in range(8):
            await harness.reply()
        taken = "".join(batch[0][0] for batch in harness.process.batches[1:])
        assert taken.index("b") <= 1


async def test_short_memory_makes_batches_smaller_until_it_heals(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await hold_first(harness)
        for number in range(2):
            await harness.send("short", request_id=f"s{number}", cache_read=False)
        await harness.queued(2)
        harness.process.gate.set()
        for _ in range(3):
            await harness.reply()
        before = len(harness.process.batches)
        await hold_first_again(harness)
        for number, letter in enumerate("uvwxyz"):
            await harness.send(letter * 20, request_id=f"l{number}")
        await harness.queued(6)
        harness.process.gate.set()
        for _ in range(7):
            await harness.reply()
        sizes = [len(batch) for batch in harness.process.batches[before + 1 :]]
        assert max(sizes) <= 3, "100 letters were the budget, which is less now"
        assert sum(sizes) == 6


async def hold_first_again(harness: WorkerHarness) -> None:
    harness.process.started.clear()
    harness.process.gate.clear()
    await harness.send("again", request_id="again")
    await harness.process.started.wait()


async def test_webhook_is_told_of_what_it_wants_to_know(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.send("cat", request_id="p", prediction="1", webhook="start,completed")
        assert (await harness.reply()).request_id == "p"
        told = [
            (await first_message(harness, WEBHOOKS_SUBSCRIPTION_ID)).attributes for _ in range(2)
        ]
        assert sorted((one["record"], one["event"]) for one in told) == [
            ("p", "completed"),
            ("p", "start"),
        ]


async def test_progress_of_a_prediction_stands_in_its_record(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        harness.process.step_told = (3, 50)
        harness.process.gate.clear()
        await harness.send("cat", request_id="p", prediction="1", left_s=60)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (record := await harness.stores.records.read("p")) is None or record.step != 3:
                pass
        assert record.steps == 50
        harness.process.gate.set()
        await harness.reply()


async def test_large_image_is_kept_in_hand_until_the_store_takes_it(
    redis_url: str, tmp_path: Path
) -> None:
    store = FailingStore(f"file://{tmp_path}", failures=2)
    async with running_worker(redis_url, tmp_path, objects=store) as harness:
        await harness.send("IMAGE")
        outcome = (await harness.reply()).body.outcomes[0]
        assert isinstance(outcome.result, ImageResult)
        assert outcome.result.image.object_key is not None
        assert await store.get(outcome.result.image.object_key, 1_000_000) == LARGE_IMAGE
        assert harness.process.batches == [["IMAGE"]]
