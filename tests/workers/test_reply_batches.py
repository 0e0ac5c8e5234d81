"""Replies that end together share messages, if the API instance takes that."""

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from shared.errors import Unavailable
from shared.messages import is_reply_batch
from shared.topics import inbox_topic_id, workers_subscription_id
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker
from workers.jobs import replies

pytestmark = pytest.mark.anyio
NAMES = ("a", "b", "c", "d")
"""As many as a batch of the model takes."""


async def compute_together(harness: WorkerHarness, **of_each: dict[str, str]) -> list[str]:
    """Lets one batch compute a job for each of NAMES. Returns whose replies came, in order.

    Args:
        harness: of the worker.
        of_each: more of the envelope of a job, by its name.
    """
    harness.process.gate.clear()
    await harness.send("first", request_id="first")
    await harness.process.started.wait()
    for name in NAMES:
        await harness.send(name, request_id=name, **of_each.get(name, {}))  # type: ignore[arg-type]
    assert harness.consumer is not None
    queue = harness.consumer.queue
    await harness.until(lambda: queue.waiting == len(NAMES))
    harness.process.gate.set()
    harness.process.gate.clear()  # for the first alone, so that its reply shares no message
    assert (await harness.reply()).request_id == "first"
    harness.process.gate.set()
    came = [(await harness.reply()).request_id for _ in NAMES]
    assert harness.process.batches == [["first"], list(NAMES)]
    return came


def handed_back() -> float:
    return REGISTRY.get_sample_value("penstock_worker_jobs_handed_back_total") or 0.0


def sizes(harness: WorkerHarness) -> list[int]:
    """How many replies each message had, after the one of the first job."""
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
    monkeypatch.setattr(replies, "MAX_REPLY_BATCH_BYTES", 600)
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
