"""How often a worker's job waits for Redis before its reply is published.

Together with the API's round trips (tests/api/test_redis_round_trips.py), this is everything a
distant Redis adds to a request: at most two trips for an embedding whose job arrives immediately.
"""

from pathlib import Path
from string import ascii_lowercase

import pytest

from shared.messages import Reply
from shared.stores.cache import ResultCache
from tests.gated_link import gated_redis
from tests.limits import WAIT_LIMIT_S
from tests.workers.worker_harness import WorkerHarness, running_worker

pytestmark = pytest.mark.anyio
ENDLESS_S = 10 * WAIT_LIMIT_S
AGE_S = 20.0
"""Age of a job that has waited in the topic so long that the API's cache lookup is out of date.
"""


async def asked(harness: WorkerHarness, text: str, age_s: float) -> Reply:
    await harness.send(text, request_id=text, age_s=age_s)
    return await harness.reply()


class PatientCache(ResultCache):
    """Waits longer for Redis than the test does."""

    def __init__(self, redis_url: str, memory_bytes: int) -> None:
        super().__init__(redis_url, memory_bytes, timeout_s=ENDLESS_S)


async def test_a_job_that_comes_at_once_does_not_wait_for_redis(
    redis_url: str, tmp_path: Path
) -> None:
    async with (
        gated_redis(redis_url) as (link, far),
        running_worker(far, tmp_path, cache_kind=PatientCache, redis_limit_s=ENDLESS_S) as harness,
    ):
        link.close()
        assert (await asked(harness, "a", 0.0)).body.outcomes[0].status == "succeeded"
        assert not link.is_open
        link.open()
        await harness.until(lambda: len(harness.rows) == 1)


async def test_a_job_that_waited_in_the_topic_waits_for_redis_once(
    redis_url: str, tmp_path: Path
) -> None:
    async with gated_redis(redis_url) as (link, far), running_worker(far, tmp_path) as harness:
        await asked(harness, "first", AGE_S)  # connects and sends the scripts
        await harness.until(lambda: len(harness.rows) == 1)
        counted = list[int]()
        for text in ascii_lowercase:
            trips, reply = await link.trips(asked(harness, text, AGE_S))
            assert reply.body.outcomes[0].status == "succeeded"
            counted.append(trips)
            await harness.until(lambda: len(harness.rows) == 1 + len(counted))
            if trips == 1:  # more if the link is also used by an earlier job's late writes
                break
        assert min(counted) == 1
