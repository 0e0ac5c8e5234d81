"""Records in a real Redis: every sequence of calls matches a model that is a few lines long,
including during Redis outages.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

import anyio
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from infra.local.redis_server import RedisServer
from shared.errors import Canceled, Unavailable, UndecodableMessage
from shared.messages import (
    PrintedLogs,
    Receipt,
    ReplyBody,
    decode_reply_body,
    encode_reply_body,
    failure,
    record_id,
)
from shared.stores.prediction_store import ListedRecord
from shared.stores.previews import MAX_PREVIEWS, PREVIEWS_KEPT_S, preview_keys
from shared.stores.record_state import OVER, Claim, Finish, ReleasedClaim, State
from shared.stores.records import EndState
from shared.stores.redis_client import COPIED_BYTES, KEY_PREFIX
from shared.stores.waiting_lines import line_keys
from tests.deleting import delete_ended
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.tiers import examples

RECORDS = ["req_a", "req_b:1", "req_c"]
NAMES = st.sampled_from(RECORDS)


def encoded(worker: str) -> bytes:
    return b'{"outcomes":[],"worker":"%s"}' % worker.encode()


@dataclass
class Expected:
    """A record's expected state; `state` is None if there is no record."""

    state: State | None = None
    attempts: int = 0
    open: int = 0
    alone: int = 0
    reply: bytes | None = None

    @property
    def is_over(self) -> bool:
        return self.state in OVER


class Transitions(RuleBasedStateMachine):
    """Calls in any order, by any number of workers and callers, checked against `Expected`."""

    url = ""
    number = itertools.count()

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.stores = RecordStores(self.url, prefix=f"machine{next(self.number)}:")
        self.runner.run(self.stores.__aenter__())
        self.expected = {name: Expected() for name in RECORDS}
        self.answers = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.stores.__aexit__(None, None, None))
            self.runner.close()

    @rule(name=NAMES)
    def create(self, name: str) -> None:
        deadline_s = time.time() + 60
        made = self.runner.run(
            self.stores.predictions.create(name, "t", b"{}", deadline_s=deadline_s, keep_s=60)
        )
        one = self.expected[name]
        assert (made > 0) == (one.state is None)
        one.state = one.state or "starting"

    @rule(names=st.lists(NAMES, min_size=1, unique=True))
    def claim(self, names: list[str]) -> None:
        claims = self.runner.run(self.stores.records.claim(names))
        for name, claim in zip(names, claims, strict=True):
            one = self.expected[name]
            if one.state in OVER:
                assert claim == Claim(one.state, one.attempts, one.open, one.reply)
                continue
            assert claim == Claim("processing", one.attempts + 1, one.open, None, one.alone)
            one.state, one.attempts, one.open = "processing", one.attempts + 1, one.open + 1

    @rule(name=NAMES, state=st.sampled_from(["succeeded", "failed", "canceled"]))
    def finish(self, name: str, state: Literal["succeeded", "failed", "canceled"]) -> None:
        reply = encoded(f"worker-{next(self.answers)}")
        done = self.runner.run(self.stores.records.finish(name, state, reply))
        one = self.expected[name]
        if one.reply is not None and one.state is not None:
            assert done == Finish(False, one.state, one.reply)
            return
        if one.state == "canceled" != state:
            assert done == Finish(False, "canceled", None)
            return
        assert done == Finish(True, state, None)
        one.state, one.reply, one.open = state, reply, 0

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.runner.run(self.stores.records.release([ReleasedClaim(name)]))
        one = self.expected[name]
        if one.state is not None and not one.is_over:
            one.open = max(0, one.open - 1)
            one.state = one.state if one.open else "starting"

    @rule(name=NAMES, alone=st.integers(0, 1))
    def stay_unsuspected(self, name: str, alone: int) -> None:
        released = ReleasedClaim(name, 1, alone, is_back=False)
        self.runner.run(self.stores.records.release([released]))
        one = self.expected[name]
        if one.state is not None and not one.is_over:
            one.open, one.alone = max(0, one.open - 1), max(0, one.alone - alone)

    @rule(name=NAMES, begins=st.booleans())
    def note_alone(self, name: str, begins: bool) -> None:
        one = self.expected[name]
        is_noted = self.runner.run(self.stores.records.note_alone(name, begins=begins))
        assert is_noted == (one.state == "processing")
        if is_noted:
            one.alone = max(0, one.alone + (1 if begins else -1))

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        one = self.expected[name]
        one.state = one.state if one.is_over else "canceled"
        assert self.runner.run(self.stores.records.cancel(name)) == one.state

    @rule(name=NAMES, step=st.integers(0, 50))
    def progress(self, name: str, step: int) -> None:
        self.runner.run(self.stores.records.progress(name, step, 50))

    @invariant()
    def record_is_as_expected(self) -> None:
        for name, one in getattr(self, "expected", {}).items():
            found = self.runner.run(self.stores.records.read(name))
            assert (found.state if found else None) == one.state
            if found is not None:
                assert found.attempts == one.attempts
                assert (found.reply.worker if found.reply else None) == (
                    one.reply.decode().split('"')[-2] if one.reply else None
                )


@pytest.mark.hypothesis
def test_any_sequence_of_calls_does_what_the_model_says(redis_url: str) -> None:
    Transitions.url = redis_url
    quick = settings(
        max_examples=examples(40),
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Transitions, settings=quick)


@pytest.fixture
async def stores(redis_url: str) -> AsyncIterator[RecordStores]:
    async with RecordStores(redis_url, retry_s=0.01) as opened:
        yield opened


pytestmark = pytest.mark.anyio


async def test_a_claim_of_nothing_is_answered_at_once(stores: RecordStores) -> None:
    """For example, if all of a pull's jobs belong to runs that have ended."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        assert await stores.records.claim([]) == []


async def test_record_tells_what_happened_to_a_prediction(stores: RecordStores) -> None:
    began_s = time.time()
    await stores.predictions.create(
        "req_1", "acme", b'{"model":"m"}', deadline_s=began_s + 30, keep_s=60
    )
    await stores.records.mark_published("req_1")
    await stores.records.claim(["req_1"])
    await stores.records.progress("req_1", 3, 20)
    found = await stores.records.read("req_1")
    assert found is not None
    assert (found.state, found.document, found.published, found.step, found.steps) == (
        "processing",
        b'{"model":"m"}',
        True,
        3,
        20,
    )
    await stores.records.finish("req_1", "succeeded", encoded("w"))
    found = await stores.records.read("req_1")
    assert found is not None
    assert found.is_over
    assert found.reply == ReplyBody([], worker="w")
    assert began_s <= found.created_at_s <= found.started_at_s <= found.ended_at_s <= time.time()


async def test_prediction_is_kept_without_a_ttl_and_goes_after_its_time(
    stores: RecordStores, redis_url: str
) -> None:
    await stores.predictions.create("old", "acme", b"{}", deadline_s=time.time() - 20, keep_s=10)
    await stores.predictions.create("young", "acme", b"{}", deadline_s=time.time() + 20, keep_s=10)
    await stores.records.finish("young", "succeeded", encoded("w"))
    with redis.Redis.from_url(redis_url) as client:
        assert client.ttl("penstock:record:young") == -1
    assert await stores.records.read("old") is None
    assert await stores.records.read("young") is not None


async def test_job_that_is_no_prediction_goes_by_itself(
    stores: RecordStores, redis_url: str
) -> None:
    for step in (
        stores.records.claim(["a"]),
        stores.records.finish("b", "succeeded", encoded("w")),
        stores.records.cancel("c"),
    ):
        await step
    with redis.Redis.from_url(redis_url) as client:
        assert all(0 < client.ttl(f"penstock:record:{name}") <= 120 for name in "abc")


@pytest.mark.parametrize("size_bytes", [COPIED_BYTES - 100, COPIED_BYTES, 40 * COPIED_BYTES])
async def test_replies_of_any_size_are_kept(stores: RecordStores, size_bytes: int) -> None:
    long, short = encoded("ä" * (size_bytes // 2)), encoded("w")
    ends: list[tuple[str, EndState, bytes]] = [
        ("a", "succeeded", long),
        ("b", "failed", short),
        ("c", "succeeded", long),
    ]
    await stores.records.finish_all(ends)
    again = await stores.records.finish_all([(name, "failed", b"{}") for name in "abc"])
    assert [finish and finish.reply for finish in again] == [long, short, long]


async def test_canceled_job_is_known_as_such_until_its_deadline(
    stores: RecordStores, redis_url: str
) -> None:
    """Until then, the broker may deliver it to a worker that starts up to an hour from now."""
    await stores.records.cancel("late", time.time() + 3600)
    with redis.Redis.from_url(redis_url) as client:
        assert client.ttl("penstock:record:late") > 3600


async def test_predictions_of_a_tenant_are_listed_newest_first(stores: RecordStores) -> None:
    for number in range(3):
        await stores.predictions.create(
            f"req_{number}", "acme", b"{}", deadline_s=time.time(), keep_s=60
        )
    await stores.predictions.create("req_other", "other", b"{}", deadline_s=time.time(), keep_s=60)
    newest, middle = await stores.predictions.latest("acme", 2)
    assert (newest.record, middle.record) == ("req_2", "req_1")
    stored = await stores.records.read("req_1")
    assert stored is not None
    assert stored.created_at_s == middle.created_at_s
    (oldest,) = await stores.predictions.latest("acme", 5, before_s=middle.created_at_s)
    assert oldest.record == "req_0"
    since = await stores.predictions.latest("acme", 5, since_s=middle.created_at_s)
    assert since == [newest, middle]


async def test_predictions_of_the_same_time_are_listed_once(stores: RecordStores) -> None:
    for name in "badce":
        await stores.predictions.create(
            name, "acme", b"{}", deadline_s=time.time(), keep_s=60, created_at_s=5.25
        )
    listed = await stores.predictions.latest("acme", 2)
    listed += await stores.predictions.latest("acme", 2, after=listed[-1])
    listed += await stores.predictions.latest("acme", 2, after=listed[-1], since_s=5.25)
    assert [entry.record for entry in listed] == ["e", "d", "c", "b", "a"]
    gone = ListedRecord("cc", 5.25)
    assert await stores.predictions.latest("acme", 9, after=gone) == listed[2:]
    assert await stores.predictions.latest("acme", 9, after=gone, before_s=5.25) == []
    await stores.predictions.create(
        "new", "acme", b"{}", deadline_s=time.time(), keep_s=60, created_at_s=6.25
    )
    assert await stores.predictions.latest("acme", 9, after=gone, since_s=5.5) == []


async def test_workers_are_told_of_cancellations(stores: RecordStores) -> None:
    with anyio.fail_after(WAIT_LIMIT_S):
        told = stores.records.watch_cancellations()
        assert await anext(told) is None
        await stores.records.cancel("req_1")
        assert await anext(told) == "req_1"
        await told.aclose()


async def test_noise_on_the_channel_of_cancellations_ends_nothing(
    stores: RecordStores, redis_url: str
) -> None:
    with anyio.fail_after(WAIT_LIMIT_S), redis.Redis.from_url(redis_url) as client:
        told = stores.records.watch_cancellations()
        assert await anext(told) is None
        client.publish(client.pubsub_channels()[0], b"\xff")
        await anext(told)
        await stores.records.cancel("req_1")
        assert await anext(told) == "req_1"
        await told.aclose()


@pytest.mark.parametrize("state", [b"resting", b"\xff"])
async def test_record_in_a_state_that_is_unknown_here(
    stores: RecordStores, redis_url: str, state: bytes
) -> None:
    await stores.predictions.create("req_1", "acme", b"{}", deadline_s=time.time(), keep_s=60)
    with redis.Redis.from_url(redis_url) as client:
        client.hset("penstock:record:req_1", "state", state)
    with pytest.raises(UndecodableMessage):
        await stores.records.read("req_1")


async def test_redis_away_fails_promises_and_never_work(own_redis: RedisServer) -> None:
    async with RecordStores(own_redis.url, retry_s=0.01) as stores:
        await stores.predictions.create(
            "req_1", "acme", b"{}", deadline_s=time.time() + 60, keep_s=60
        )
        own_redis.kill()
        assert await stores.records.claim(["req_1"]) == [None]
        assert await stores.records.finish("req_1", "succeeded", encoded("w")) is None
        await stores.records.release([ReleasedClaim("req_1")])
        with pytest.raises(Unavailable, match="prediction store"):
            await stores.records.read("req_1")
        with pytest.raises(Unavailable, match="prediction store"):
            await stores.predictions.create(
                "req_2", "acme", b"{}", deadline_s=time.time(), keep_s=60
            )
        own_redis.start()
        assert await stores.records.wait_up(8)
        found = await stores.records.read("req_1")
        assert found is not None, "what Redis had answered is there after it was killed"
        assert found.state == "starting"


def test_first_job_of_a_request_has_its_id() -> None:
    assert (record_id("req_1", 0), record_id("req_1", 2)) == ("req_1", "req_1:2")


async def test_previews_are_bounded_and_expire(stores: RecordStores, redis_url: str) -> None:
    await stores.predictions.create("req_1", "acme", b"{}", deadline_s=time.time() + 30, keep_s=60)
    previews = stores.previews
    await previews.add("req_1", 0, 1, 20, b"too early")
    assert await previews.after("req_1", "") == []
    await stores.records.claim(["req_1"])
    assert not await stores.records.progress("req_1", 1, 20)
    await previews.watch("req_1")
    assert await stores.records.progress("req_1", 2, 20)
    for step in range(MAX_PREVIEWS + 5):
        await previews.add("req_1", 0, step, 99, b"image")
    kept = await previews.after("req_1", "")
    assert [one.step for one in kept] == list(range(5, MAX_PREVIEWS + 5))
    assert await previews.after("req_1", kept[-2].cursor) == [kept[-1]]
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        for key in preview_keys(KEY_PREFIX, "req_1"):
            assert 0 < await client.ttl(key) <= PREVIEWS_KEPT_S


async def test_place_in_line_is_by_deadline_among_the_tenants_own(stores: RecordStores) -> None:
    now_s = time.time()

    async def place(name: str, after_s: float) -> tuple[int, float | None] | None:
        return await stores.lines.position(name, "acme", "m", now_s + after_s)

    for name, after_s in (("a", 30), ("b", 20), ("c", 40), ("over", 10)):
        await stores.predictions.create(
            name, "acme", b"{}", deadline_s=now_s + after_s, keep_s=60, model="m"
        )
    await stores.predictions.create("x", "other", b"{}", deadline_s=now_s + 5, keep_s=60, model="m")
    await stores.predictions.create(
        "y", "acme", b"{}", deadline_s=now_s + 5, keep_s=60, model="another"
    )
    await stores.records.finish("over", "failed", encoded("w"))
    assert await place("b", 20) == (1, None)
    assert await place("a", 30) == (2, None)
    assert await place("c", 40) == (3, None), "no pace is known yet"
    await stores.records.claim(["b"])
    assert await place("b", 20) is None
    found = await place("c", 40)
    assert found is not None
    position, estimated_s = found
    assert position == 2
    assert estimated_s is not None
    assert 0 < estimated_s < 30
    await stores.records.release([ReleasedClaim("b")])
    assert (await place("c", 40) or (0,))[0] in (2, 3)
    await stores.records.cancel("a")
    assert (await place("c", 40) or (0,))[0] == 1


async def test_lines_expire_with_their_last_deadline(stores: RecordStores, redis_url: str) -> None:
    now_s = time.time()
    for name, after_s in (("a", 50), ("b", 20)):
        await stores.predictions.create(
            name, "acme", b"{}", deadline_s=now_s + after_s, keep_s=60, model="m"
        )
    await stores.lines.position("b", "acme", "m", now_s + 20)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        line, pace = line_keys(KEY_PREFIX, "acme", "m")
        assert 40 < await client.ttl(line) <= 50
        assert 0 < await client.ttl(pace) <= 60


async def test_what_was_printed_is_of_the_latest_claim_until_the_reply_has_it(
    stores: RecordStores,
) -> None:
    async def printed() -> tuple[str, int]:
        record = await stores.records.read("req_1")
        assert record is not None
        return record.logs, record.logs_left_out

    await stores.predictions.create("req_1", "acme", b"{}", deadline_s=time.time() + 30, keep_s=60)
    await stores.records.put_logs("req_1", 1, PrintedLogs("too early"))
    assert await printed() == ("", 0)
    await stores.records.claim(["req_1"])
    await stores.records.put_logs("req_1", 1, PrintedLogs("first"))
    await stores.records.claim(["req_1"])
    await stores.records.put_logs("req_1", 2, PrintedLogs("second", 7))
    await stores.records.put_logs("req_1", 1, PrintedLogs("late"))
    assert await printed() == ("second", 7)
    followed = await stores.records.read_again("req_1", b"{}")
    assert followed is not None
    assert (followed.logs, followed.logs_left_out) == ("second", 7)
    await stores.records.finish("req_1", "succeeded", encoded("w"))
    await stores.records.put_logs("req_1", 2, PrintedLogs("after the end"))
    assert await printed() == ("", 0)


async def test_a_late_end_changes_nothing_in_what_a_deleted_one_cost(stores: RecordStores) -> None:
    await stores.predictions.create("req_1", "acme", b"{}", deadline_s=time.time() + 30, keep_s=60)
    await stores.records.cancel("req_1")
    receipt = Receipt("miss", tokens=3, is_delivered_in_part=True)
    cost = encode_reply_body(ReplyBody([failure(0, Canceled(), receipt)]))
    await stores.records.finish("req_1", "canceled", cost)
    assert await delete_ended(stores, "req_1")
    late = await stores.records.finish("req_1", "canceled", encode_reply_body(ReplyBody([])))
    deleted = await stores.records.read("req_1")
    assert late is not None
    assert deleted is not None
    assert deleted.reply is not None
    assert [one.receipt for one in deleted.reply.outcomes] == [receipt]
    assert not late.is_ours
    assert late.reply is not None
    assert decode_reply_body(late.reply) == deleted.reply


async def test_what_was_printed_stays_of_a_canceled_one_until_it_is_deleted(
    stores: RecordStores,
) -> None:
    await stores.predictions.create("req_1", "acme", b"{}", deadline_s=time.time() + 30, keep_s=60)
    await stores.records.claim(["req_1"])
    await stores.records.put_logs("req_1", 1, PrintedLogs("so far"))
    await stores.records.cancel("req_1")
    canceled = await stores.records.read("req_1")
    assert canceled is not None
    assert canceled.logs == "so far"
    assert await delete_ended(stores, "req_1")
    deleted = await stores.records.read("req_1")
    assert deleted is not None
    assert deleted.logs == ""
