"""Budgets for data that Redis must not evict, in a real Redis: counts and promises hold for any
sequence of calls.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from api.idempotency.store import DROPPED, IdempotencyStore, KeyClaim
from shared.errors import Overloaded
from tests.record_stores import RecordStores
from tests.tiers import examples

pytestmark = pytest.mark.anyio
BUDGET_BYTES = 64 * 1024
ENTRY_BYTES = 1024
"""Must match retention.lua."""
SHARE_BYTES = BUDGET_BYTES // 16
LARGE, QUIET = ["acme", "globex"], "quiet"
REPLY = b'{"outcomes":[],"worker":"%s"}'
SIZES = st.integers(0, 12 * 1024)


@dataclass
class Entry:
    """An admitted prediction and its expected counts."""

    tenant: str
    bytes: int
    document_bytes: int
    is_over: bool = False


@dataclass
class Counts:
    """A store's counts, read from its keys."""

    client: redis.Redis
    store: str
    entries: dict[str, tuple[str, int]] = field(default_factory=dict)

    def read(self) -> "Counts":
        found: Any = self.client.hgetall(f"{self.store}:counted")
        self.entries = {}
        for key, value in found.items():
            size, _, tenant = value.decode().partition(" ")
            self.entries[key.decode()] = (tenant, int(size))
        return self

    def check(self) -> None:
        """Checks that the sums match the entries and that every index contains each entry."""
        by_tenant: dict[str, int] = {}
        for tenant, size in self.entries.values():
            by_tenant[tenant] = by_tenant.get(tenant, 0) + size
        told: Any = self.client.zrange(f"{self.store}:bytes_of", 0, -1, withscores=True)
        assert {tenant.decode(): int(size) for tenant, size in told} == by_tenant
        total: Any = self.client.get(f"{self.store}:bytes")
        assert int(total or 0) == sum(by_tenant.values())
        for key, (tenant, _) in self.entries.items():
            assert self.client.zscore(f"{self.store}:may_go:{tenant}", key) is not None
            assert self.client.zscore(f"{self.store}:ends", key) is not None
            assert self.client.exists(key)


class Predictions(RuleBasedStateMachine):
    """API keys that use everything they can, and a quiet key that stays below its share."""

    url = ""
    number = itertools.count()

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        prefix = f"budget{next(self.number)}:"
        self.stores = RecordStores(self.url, prefix=prefix, max_bytes=BUDGET_BYTES)
        self.runner.run(self.stores.__aenter__())
        self.redis = redis.Redis.from_url(self.url)
        self.counts = Counts(self.redis, f"{prefix}predictions")
        self.key: Callable[[str], str] = lambda name: f"{prefix}record:{name}"
        self.expected: dict[str, Entry] = {}
        self.names = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.stores.__aexit__(None, None, None))
            self.runner.close()
            self.redis.close()

    def _taken(self, tenant: str) -> int:
        return sum(size for of, size in self.counts.read().entries.values() if of == tenant)

    def _create(self, tenant: str, document_bytes: int, reply_bytes: int) -> bool:
        name, wanted = f"p{next(self.names)}", document_bytes + reply_bytes + ENTRY_BYTES
        taken = self._taken(tenant)
        made = self.stores.predictions.create(
            name,
            tenant,
            b"d" * document_bytes,
            deadline_s=time.time() + 60,
            keep_s=600,
            reply_bytes=reply_bytes,
        )
        try:
            assert self.runner.run(made)
        except Overloaded:
            assert taken + wanted > SHARE_BYTES
            return False
        self.expected[name] = Entry(tenant, wanted, document_bytes)
        return True

    @rule(
        tenant=st.sampled_from(LARGE),
        document_bytes=SIZES,
        reply_bytes=SIZES,
        count=st.integers(1, 5),
    )
    def create(self, tenant: str, document_bytes: int, reply_bytes: int, count: int) -> None:
        for _ in range(count):
            self._create(tenant, document_bytes, reply_bytes)

    @rule(document_bytes=st.integers(0, SHARE_BYTES - ENTRY_BYTES))
    def quiet_one_is_let_in(self, document_bytes: int) -> None:
        if self._taken(QUIET) + document_bytes + ENTRY_BYTES <= SHARE_BYTES:
            assert self._create(QUIET, document_bytes, 0)

    @precondition(lambda self: any(not one.is_over for one in self.expected.values()))
    @rule(data=st.data(), reply_bytes=SIZES)
    def finish(self, data: st.DataObject, reply_bytes: int) -> None:
        name = data.draw(
            st.sampled_from([name for name, one in self.expected.items() if not one.is_over])
        )
        one = self.expected[name]
        reply = REPLY % (b"w" * (0 if one.tenant == QUIET else reply_bytes))
        assert self.runner.run(self.stores.records.finish(name, "succeeded", reply))
        one.is_over, one.bytes = True, one.document_bytes + len(reply) + ENTRY_BYTES

    @precondition(lambda self: any(not one.is_over for one in self.expected.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(
            st.sampled_from([name for name, one in self.expected.items() if not one.is_over])
        )
        one = self.expected[name]
        assert self.runner.run(self.stores.records.cancel(name)) == "canceled"
        one.is_over, one.bytes = True, one.document_bytes + ENTRY_BYTES

    @invariant()
    def counts_are_right_and_promises_kept(self) -> None:
        if not hasattr(self, "expected"):
            return
        self.counts.read().check()
        there = {name for name in self.expected if self.key(name) in self.counts.entries}
        assert len(there) == len(self.counts.entries)
        for name, one in list(self.expected.items()):
            if name in there:
                assert self.counts.entries[self.key(name)] == (one.tenant, one.bytes)
            else:
                assert one.is_over, "dropped before its end"
                assert one.tenant != QUIET, "dropped for others"
                del self.expected[name]
        assert sum(
            size for _, size in self.counts.entries.values()
        ) <= 2 * BUDGET_BYTES + 12 * 1024 * len(there)


@pytest.mark.hypothesis
def test_any_sequence_keeps_within_the_budget_and_drops_nothing_promised(redis_url: str) -> None:
    Predictions.url = redis_url
    quick = settings(
        max_examples=examples(40),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_machine(Predictions, settings=quick)


async def test_oldest_of_the_largest_go_and_a_tenant_that_finds_no_room_replaces_its_own(
    redis_url: str,
) -> None:
    async with RecordStores(redis_url, max_bytes=BUDGET_BYTES) as stores:

        async def create(name: str, tenant: str, reply_bytes: int) -> None:
            assert await stores.predictions.create(
                name, tenant, b"{}", deadline_s=time.time() + 60, keep_s=60, reply_bytes=reply_bytes
            )

        for number in range(3):
            await create(f"m{number}", "middle", 3000)
            await stores.records.finish(f"m{number}", "succeeded", REPLY % (b"w" * 3000))
        for number in range(13):
            await create(f"l{number}", "large", 4000 - ENTRY_BYTES)
        with pytest.raises(Overloaded, match="take up all the storage") as refused:
            await create("l13", "large", 4000)
        assert refused.value.retry_after_s
        await create("m3", "middle", 3000)
        assert [await stores.records.read(f"m{number}") is not None for number in range(4)] == [
            False,
            True,
            True,
            True,
        ]
        for name in ("l5", "l3"):  # the order they end in matters
            await stores.records.finish(name, "succeeded", REPLY % (b"w" * 2976))
        await create("m4", "middle", 1000)
        assert [await stores.records.read(f"l{number}") is not None for number in (3, 5)] == [
            True,
            False,
        ]
        assert await stores.records.read("m1") is not None
        listed = await stores.predictions.latest("middle", 10)
        assert [entry.record for entry in listed] == ["m4", "m3", "m2", "m1"]


async def test_prediction_that_can_never_fit_drops_nothing(redis_url: str) -> None:
    async with RecordStores(redis_url, max_bytes=BUDGET_BYTES) as stores:
        await stores.predictions.create(
            "old", "acme", b"{}", deadline_s=time.time() + 60, keep_s=60
        )
        await stores.records.finish("old", "succeeded", REPLY % b"w")
        with pytest.raises(Overloaded):
            await stores.predictions.create(
                "huge", "acme", b"d" * BUDGET_BYTES, deadline_s=time.time() + 60, keep_s=60
            )
        assert await stores.records.read("old") is not None


async def test_worker_plans_a_step_within_the_budget_of_the_api(redis_url: str) -> None:
    async with (
        RecordStores(redis_url, max_bytes=4 * BUDGET_BYTES) as api,
        RecordStores(redis_url, max_bytes=BUDGET_BYTES) as worker,
    ):
        for name in ("old", "run"):
            assert await api.predictions.create(
                name, "acme", b"{}", deadline_s=time.time() + 60, keep_s=60
            )
        await worker.records.finish("old", "succeeded", REPLY % (b"w" * BUDGET_BYTES))
        assert await api.flow_runs.open("run", b"{}")
        assert await worker.flow_runs.plan("run", 1, [b"{}"], 1, {}) == "stored"
        assert await api.records.read("old") is not None


async def test_what_expires_is_not_counted_any_more(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        async with (
            RecordStores(redis_url) as stores,
            IdempotencyStore(redis_url, keep_s=0.001, lease_s=5) as answers,
        ):
            await stores.predictions.create(
                "old", "acme", b"{}", deadline_s=time.time() - 20, keep_s=10
            )
            await stores.predictions.create(
                "young", "acme", b"{}", deadline_s=time.time() + 20, keep_s=10
            )
            await answers.complete("old", "acme", "f", "c1", b"answer")
            while (await answers.claim("young", "f", "c2")).state != "acquired" or client.exists(  # noqa: ASYNC110
                "penstock:answers:of:old"
            ):
                await asyncio.sleep(0.001)
        for store, left in (
            ("penstock:predictions", ["penstock:record:young"]),
            ("penstock:answers", []),
        ):
            counts = Counts(client, store).read()
            assert list(counts.entries) == left
            counts.check()


async def test_prediction_that_nobody_ended_may_go_after_its_deadline(redis_url: str) -> None:
    async with RecordStores(redis_url, max_bytes=BUDGET_BYTES) as stores:
        await stores.predictions.create(
            "lost", "acme", b"{}", deadline_s=time.time() - 200, keep_s=600, reply_bytes=50_000
        )
        assert await stores.predictions.create(
            "next", "acme", b"{}", deadline_s=time.time() + 60, keep_s=60, reply_bytes=50_000
        )
        assert await stores.records.read("lost") is None


ANSWER_BYTES = 4096
NAMES = [
    f"{tenant}{number}"
    for tenant in (*LARGE, QUIET)
    for number in range(2 if tenant == QUIET else 20)
]


class Answers(RuleBasedStateMachine):
    """Responses for tenants that send many requests and for a quiet tenant; a claim may remain
    without a response.
    """

    url = ""
    number = itertools.count()

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        prefix = f"answers{next(self.number)}:"
        self.answers = IdempotencyStore(
            self.url, keep_s=600, lease_s=60, max_bytes=BUDGET_BYTES, prefix=prefix
        )
        self.runner.run(self.answers.__aenter__())
        self.redis = redis.Redis.from_url(self.url)
        self.counts = Counts(self.redis, f"{prefix}answers")
        self.claimed: set[str] = set()
        self.settled: dict[str, bytes] = {}
        self.dropped_before = DROPPED._value.get()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.answers.__aexit__(None, None, None))
            self.runner.close()
            self.redis.close()

    @rule(name=st.sampled_from(NAMES))
    def claim(self, name: str) -> None:
        found = self.runner.run(self.answers.claim(name, "f", name))
        if name in self.claimed:
            assert found == KeyClaim("in_progress", b"")
        elif found.state == "completed":
            assert found.response == self.settled[name]
        else:
            assert found == KeyClaim("acquired", b"")
            assert not (name in self.settled and name.startswith(QUIET)), "dropped for others"
            self.settled.pop(name, None)
            self.claimed.add(name)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), size=st.integers(1, ANSWER_BYTES))
    def settle(self, data: st.DataObject, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.claimed)))
        answer = name.encode() * (1 + (size if not name.startswith(QUIET) else 10) // len(name))
        assert (
            self.runner.run(
                self.answers.complete(name, name.rstrip("0123456789"), "f", name, answer)
            )
            == answer
        )
        self.claimed.remove(name)
        self.settled[name] = answer

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.claimed)))
        self.runner.run(self.answers.release(name, name))
        self.claimed.remove(name)

    @rule(tenant=st.sampled_from(LARGE))
    def flood(self, tenant: str) -> None:
        """A tenant sends requests with all of its keys."""
        for number in range(20):
            name = f"{tenant}{number}"
            if name not in self.claimed:
                self.claim(name)
            if name in self.claimed:
                answer = name.encode() * 500
                assert (
                    self.runner.run(self.answers.complete(name, tenant, "f", name, answer))
                    == answer
                )
                self.claimed.remove(name)
                self.settled[name] = answer

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "counts"):
            self.counts.read().check()
            assert sum(size for _, size in self.counts.entries.values()) <= BUDGET_BYTES


@pytest.mark.hypothesis
def test_any_sequence_of_answers_keeps_within_the_budget(redis_url: str) -> None:
    Answers.url = redis_url
    quick = settings(
        max_examples=examples(25),
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_machine(Answers, settings=quick)


async def test_entries_of_a_release_without_budgets_live_on_and_expire(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        now_s = time.time()
        for name, ends_s in (("old", now_s + 60), ("gone", now_s - 1)):
            client.hset(
                f"penstock:record:{name}",
                mapping={"state": "starting", "keep_s": 60, "document": b"{}"},
            )
            client.zadd("penstock:predictions:ends", {f"penstock:record:{name}": ends_s})
            client.hset(
                f"penstock:answers:of:{name}",
                mapping={"fingerprint": "f", "claim": "c", "answer": b"kept"},
            )
            client.zadd("penstock:answers:ends", {f"penstock:answers:of:{name}": ends_s})
        async with (
            RecordStores(redis_url) as stores,
            IdempotencyStore(redis_url, keep_s=60, lease_s=5) as answers,
        ):
            await stores.predictions.create("new", "acme", b"{}", deadline_s=now_s + 60, keep_s=60)
            assert (await stores.records.claim(["old"]))[0] is not None
            assert (await stores.records.finish("old", "succeeded", REPLY % b"w")) == (
                True,
                "succeeded",
                None,
            )
            found = await stores.records.read("old")
            assert found is not None
            assert found.reply is not None
            assert await answers.claim("old", "f", "c2") == KeyClaim("completed", b"kept")
            assert await answers.complete("old", "acme", "f", "c2", b"mine") == b"kept"
            assert (await answers.claim("gone", "f", "c3")).state == "acquired"
            assert await stores.records.read("gone") is None
        assert client.ttl("penstock:record:old") == -1
        counts = Counts(client, "penstock:predictions").read()
        assert list(counts.entries) == ["penstock:record:new"]
        counts.check()


async def test_entry_removed_by_another_hand_leaves_no_count(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        async with IdempotencyStore(
            redis_url, keep_s=60, lease_s=5, max_bytes=BUDGET_BYTES
        ) as answers:
            for number in range(12):
                await answers.complete(str(number), "acme", "f", "c", b"a" * ANSWER_BYTES)
            client.delete("penstock:answers:of:0", "penstock:answers:of:1")
            for number in range(12, 18):
                await answers.complete(str(number), "acme", "f", "c", b"a" * ANSWER_BYTES)
        Counts(client, "penstock:answers").read().check()
