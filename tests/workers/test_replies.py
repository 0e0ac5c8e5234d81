"""The destination and size of a worker's replies. API instances from any release rely on both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.broker.transport import SubscriptionSettings, direct_id, inbox_topic_id, jobs_topic_id
from shared.models.blob import INLINE_LIMIT_BYTES
from shared.models.entry import Replies
from shared.models.tasks.image import ImageResult
from shared.stores.objects import ObjectStore
from tests.limits import WAIT_LIMIT_S
from tests.workers.worker_harness import MODEL, running_worker

pytestmark = pytest.mark.anyio

DATA = b'{"items":[{"index":0,"input":{"type":"text","text":"cat"}}]}'
ATTRIBUTES = {
    "schema": "1",
    "request_id": "req_1",
    "part": "2",
    "model": MODEL.name,
    "tenant": "t",
    "deadline_s": "99999999999.0",
    "received_at_s": "1790000000.25",
    "published_at_s": "1790000000.5",
    "attempt": "1",
    "api_instance": "api-1",
}
"""A job's attributes in releases without direct replies, excluding the inbox and the slot."""


@pytest.mark.parametrize(
    ("address", "carried"),
    [
        ({"inbox": inbox_topic_id("7"), "slot": "79"}, {"slot": "79"}),
        ({"inbox": direct_id("7")}, {}),
    ],
    ids=["slot", "direct"],
)
async def test_reply_goes_where_the_job_says(
    redis_url: str, tmp_path: Path, address: dict[str, str], carried: dict[str, str]
) -> None:
    async with running_worker(redis_url, tmp_path) as harness:
        await harness.broker.ensure_topic(address["inbox"])
        await harness.broker.ensure_subscription("replies", SubscriptionSettings(address["inbox"]))
        await harness.broker.publish(jobs_topic_id(MODEL.name), DATA, ATTRIBUTES | address)
        async with harness.broker.subscribe("replies", max_messages=1) as replies:
            message = await asyncio.wait_for(anext(aiter(replies)), WAIT_LIMIT_S)
            replies.ack(message)
        expected = {"schema": "1", "request_id": "req_1", "part": "2"}
        assert dict(message.attributes) == expected | carried


@pytest.mark.parametrize(
    ("replies", "size_bytes", "is_apart"),
    [
        ("slots", 1024, False),
        ("slots", 1025, True),
        ("direct", INLINE_LIMIT_BYTES, False),
        ("direct", INLINE_LIMIT_BYTES + 1, True),
    ],
)
async def test_replies_to_slots_stay_small(
    redis_url: str, tmp_path: Path, replies: Replies, size_bytes: int, *, is_apart: bool
) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    model = MODEL.model_copy(update={"replies": replies})
    async with running_worker(redis_url, tmp_path, objects=store, model=model) as harness:
        harness.process.image = b"p" * size_bytes
        await harness.send("IMAGE")
        outcome = (await harness.reply()).body.outcomes[0]
        assert isinstance(outcome.result, ImageResult)
        image = outcome.result.image
        assert (image.data is None, image.object_key is not None) == (is_apart, is_apart)
        key = image.object_key
        got = image.data if key is None else await store.get(key, 1_000_000)
        assert got == harness.process.image


@pytest.mark.parametrize("replies", ["slots", "direct"])
async def test_record_keeps_a_small_image_and_repeats_it_small(
    redis_url: str, tmp_path: Path, replies: Replies
) -> None:
    model = MODEL.model_copy(update={"replies": replies})
    async with running_worker(redis_url, tmp_path, model=model) as harness:
        harness.process.image = b"p" * 2000
        await harness.send("IMAGE", request_id="r")
        first = (await harness.reply()).body
        await harness.until(lambda: len(harness.rows) == 1)
        record = await harness.stores.records.read("r")
        assert record is not None
        assert record.reply is not None
        (kept,) = record.reply.outcomes
        assert isinstance(kept.result, ImageResult)
        assert kept.result.image.data == harness.process.image
        harness.process.gate.clear()  # a broker that lost the ack redelivers it
        await harness.send("IMAGE", request_id="r", cache_read=False)
        assert (await harness.reply()).body == first
        harness.process.gate.set()


@pytest.mark.parametrize("replies", ["slots", "direct"])
async def test_reply_of_a_prediction_only_says_that_its_record_is_there(
    redis_url: str, tmp_path: Path, replies: Replies
) -> None:
    model = MODEL.model_copy(update={"replies": replies})
    async with running_worker(redis_url, tmp_path, model=model) as harness:
        harness.process.image = b"p" * INLINE_LIMIT_BYTES
        await harness.send("IMAGE", request_id="p", prediction="1")
        (outcome,) = (await harness.reply()).body.outcomes
        assert (outcome.status, outcome.result) == ("succeeded", None)
        record = await harness.stores.records.read("p")
        assert record is not None
        assert record.reply is not None
        (kept,) = record.reply.outcomes
        assert isinstance(kept.result, ImageResult)
        assert kept.result.image.data == harness.process.image
