"""A bad revision is rolled back while requests continue. None of them fails, and none is lost."""

from collections import Counter
from pathlib import Path

import pytest

from shared.canary.verdict import COMPARISON_TENANT
from tests.canary.world import CANARY, MODEL, CanaryWorld, Fault, running_world

pytestmark = [pytest.mark.slow(about_s=5), pytest.mark.anyio]
AT_ONCE = 20
MAX_ROUNDS = 200


async def ask_until_taken_back(world: CanaryWorld) -> int:
    """Sends requests, all of which must succeed. Returns how many were sent."""
    for sent in range(1, MAX_ROUNDS + 1):
        answers = await world.ask_many(AT_ONCE)
        assert {answer.status_code for answer in answers} == {200}
        if await world.taken_back():
            return sent * AT_ONCE
    raise AssertionError("it was not taken back")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("errors", "items failed"),
        ("dies", "items failed"),
        ("slow", "times the other revision's p95"),
        ("wrong", "outside the tolerance"),
    ],
)
async def test_bad_revision_is_taken_back(
    redis_url: str, tmp_path: Path, fault: Fault, reason: str
) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        world.workers[CANARY.name].process.fault = fault
        sent = await ask_until_taken_back(world)
        assert reason in await world.taken_back()
        await world.until_not_serving()
        after = await world.ask_many(AT_ONCE)
        assert {answer.headers["x-penstock-revision"] for answer in after} == {"1"}
        sent += AT_ONCE
        await world.until_rows(sent)
        rows = [row for row in world.rows() if row.tenant != COMPARISON_TENANT]
        assert len({row.row_id for row in rows}) == len(rows) == sent
        assert {row.status for row in rows} == {"succeeded"}
        assert {row.model for row in rows} == {MODEL.name}


async def test_good_revision_stays(redis_url: str, tmp_path: Path) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        answers = [answer for _ in range(10) for answer in await world.ask_many(AT_ONCE)]
        await world.until_judged()
        assert not await world.taken_back()
        shares = Counter(answer.headers["x-penstock-revision"] for answer in answers)
        assert set(shares) == {"1", "2"}
        assert 60 <= shares["2"] <= 140  # of 200 with a share of one half: 99.9999% of all draws
        await world.until_rows(200)
        rows = [row for row in world.rows() if row.tenant != COMPARISON_TENANT]
        assert Counter(row.revision for row in rows) == shares
        shadows = [row for row in world.rows() if row.tenant == COMPARISON_TENANT]
        assert {(row.revision, row.cost_usd) for row in shadows} <= {("1", 0.0)}


async def test_hanging_revision_leaves_the_other_one_time(redis_url: str, tmp_path: Path) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        world.workers[CANARY.name].process.fault = "hangs"
        answers = await world.ask_many(AT_ONCE, x_penstock_deadline_ms="6000")
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-penstock-revision"] for answer in answers} == {"1"}
        world.workers[CANARY.name].process.released.set()


async def test_callers_in_a_hurry_take_no_revision_back(redis_url: str, tmp_path: Path) -> None:
    """Half of the remaining time may be less than any revision needs."""
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        world.workers[CANARY.name].process.fault = "hangs"
        answers = await world.ask_many(AT_ONCE, x_penstock_deadline_ms="4000")
        assert {answer.status_code for answer in answers} == {200}
        world.workers[CANARY.name].process.released.set()
        await world.until_judged()
        counts = await world.canary_store.counts(CANARY)
        assert counts.canary.items
        assert not counts.canary.failed + counts.stable.failed
        assert not await world.taken_back()


async def test_jobs_of_a_dead_canary_are_done_by_the_other_revision(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        await world.workers[CANARY.name].kill()
        answers = await world.ask_many(AT_ONCE)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-penstock-revision"] for answer in answers} == {"1"}
        await world.until_not_serving()
        assert not await world.taken_back()


async def test_same_request_gets_the_same_revision(redis_url: str, tmp_path: Path) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        texts = [f"same {letter}" for letter in "abcdefghij"]
        first = [await world.ask(text) for text in texts]
        again = [await world.ask(text) for text in texts]
        revisions = [answer.headers["x-penstock-revision"] for answer in first]
        assert set(revisions) == {"1", "2"}
        assert [answer.headers["x-penstock-revision"] for answer in again] == revisions
        assert {answer.headers["x-penstock-cache"] for answer in again} == {"hit"}
        await world.canary_store.take_back(CANARY, "by hand")
        await world.until_not_serving()
        last = [await world.ask(text) for text in texts]
        assert {answer.headers["x-penstock-revision"] for answer in last} == {"1"}
