"""How often a worker's job waits for Redis before its reply is published.

Together with the API's round trips (tests/api/test_redis_round_trips.py), this is the full cost of
a distant Redis for a request: at most two trips for an embedding whose job arrives immediately.
"""

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from shared.messages import Reply
from tests.gated_link import gated_redis
from tests.workers.worker_harness import WorkerHarness, running_worker

pytestmark = pytest.mark.anyio
AGE_S = 20.0
"""Age of a job that has waited in the topic long enough for the API's cache lookup to be
outdated.
"""


async def asked(harness: WorkerHarness, text: str, age_s: float) -> Reply:
    await harness.send(text, request_id=text, age_s=age_s)
    return await harness.reply()


def gave_up() -> float:
    """How often a caller went ahead without Redis because it did not respond."""
    known = [("penstock_cache_errors_total", "get"), ("penstock_records_errors_total", "claim")]
    return sum(REGISTRY.get_sample_value(name, {"operation": one}) or 0.0 for name, one in known)


async def test_a_job_that_comes_at_once_does_not_wait_for_redis(
    redis_url: str, tmp_path: Path
) -> None:
    async with gated_redis(redis_url) as (link, far), running_worker(far, tmp_path) as harness:
        await asked(harness, "first", 0.0)
        await harness.until(lambda: len(harness.rows) == 1)
        waited = []
        for number, text in enumerate(("a", "b", "c", "d"), 2):
            before = gave_up()
            link.close()
            assert (await asked(harness, text, 0.0)).body.outcomes[0].status == "succeeded"
            waited.append(gave_up() - before)
            link.open()
            await harness.until(lambda number=number: len(harness.rows) == number)  # type: ignore[misc]
        # Under heavy load, background writes to Redis are sometimes also abandoned.
        assert min(waited) == 0


async def test_a_job_that_waited_in_the_topic_waits_for_redis_once(
    redis_url: str, tmp_path: Path
) -> None:
    async with gated_redis(redis_url) as (link, far), running_worker(far, tmp_path) as harness:
        await asked(harness, "first", AGE_S)  # connects and sends the scripts
        await harness.until(lambda: len(harness.rows) == 1)
        counted = [await link.trips(asked(harness, text, AGE_S)) for text in ("a", "b", "c", "d")]
        assert {reply.body.outcomes[0].status for _, reply in counted} == {"succeeded"}
        # An earlier job's late writes use the same link, so take the minimum.
        assert min(trips for trips, _ in counted) == 1
        await harness.until(lambda: len(harness.rows) == 5)
