"""A lone job in a worker doesn't wait for anything remote until its reply is on its way.

The job arrives, and the reply leaves. In between, nothing waits for a broker confirmation or for
Redis, so a request takes four trips between the broker and its clients, plus the model's time.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import inbox_topic_id, jobs_topic_id
from tests.gated_link import gated_redis
from tests.workers.worker_harness import MODEL, running_worker

pytestmark = pytest.mark.anyio


class FarBroker(InMemoryBroker):
    """Delivers messages, but confirms them only while `confirms` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.confirms = asyncio.Event()
        self.confirms.set()
        self.topics = list[str]()

    async def publish(
        self,
        topic_id: str,
        data: bytes,
        attributes: Mapping[str, str],
        *,
        ordering_key: str = "",
        timeout_s: float = 10.0,
    ) -> str:
        """Publishes like the broker, but delays the confirmation."""
        self.topics.append(topic_id)
        message_id = await super().publish(
            topic_id, data, attributes, ordering_key=ordering_key, timeout_s=timeout_s
        )
        await self.confirms.wait()
        return message_id


@pytest.mark.parametrize("replies", ["n", ""])
async def test_a_reply_is_sent_before_anything_far_away_has_answered(
    redis_url: str, tmp_path: Path, replies: str
) -> None:
    broker = FarBroker()
    async with (
        gated_redis(redis_url) as (link, far),
        running_worker(far, tmp_path, broker=broker) as harness,
    ):
        await harness.send("first", request_id="first", replies=replies)
        await harness.reply()
        await harness.until(lambda: len(harness.rows) == 1)
        link.close()
        broker.topics.clear()
        broker.confirms.clear()
        sending = asyncio.create_task(harness.send("lone", request_id="lone", replies=replies))
        assert (await harness.reply()).body.outcomes[0].status == "succeeded"
        assert broker.topics == [jobs_topic_id(MODEL.name), inbox_topic_id("1")]
        assert len(harness.rows) == 1, "the job is held until its reply is confirmed"
        link.open()
        broker.confirms.set()
        await sending
        await harness.until(lambda: len(harness.rows) == 2)
