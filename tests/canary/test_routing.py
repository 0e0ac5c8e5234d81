"""Requests that go to a canary. No requests do if nothing can judge the canary or do the work."""

from collections import Counter
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from msgspec.structs import replace

from api.dispatch.canary_routing import STALE_LIMIT_S, CanaryRouter
from api.dispatch.request import InferenceRequest, RequestOptions
from api.fair_room import Demand
from shared.broker.transport import jobs_topic_id
from shared.canary.store import CanaryState
from shared.canary.verdict import CanaryCounts
from shared.errors import ModelWithdrawn, Unavailable
from shared.messages import RequestFacts
from shared.models.catalog import Catalog, Model, Revision
from shared.models.entry import Canary
from shared.models.tasks.embedding import TextInput
from shared.stores.withdrawals import LiveWithdrawals, Withdrawal, WithdrawalStore
from tests.canary.world import CANARY, MODEL, running_world

pytestmark = pytest.mark.anyio
ASKED = 4000


class FakeCanaryStore:
    """State set by a test. Unreachable while `is_away`."""

    def __init__(self) -> None:
        self.is_away = False
        self.known = CanaryState(is_alive=True)
        self.seen = CanaryCounts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def state(self, canary: Model) -> CanaryState:
        if self.is_away:
            raise Unavailable("away")
        return self.known

    async def may_judge(self, canary: Model) -> bool:
        return True

    async def counts(self, canary: Model) -> CanaryCounts:
        return self.seen

    async def count(self, canary: Model, counts: CanaryCounts) -> None:
        return None

    async def take_back(self, canary: Model, reason: str) -> bool:
        self.known = CanaryState(True, reason)
        return True


async def router_of(withdrawals: LiveWithdrawals | None = None, **rules: object) -> CanaryRouter:
    canary = Canary.model_validate({"revision": "2", **rules})
    catalog = Catalog((MODEL.model_copy(update={"canary": canary}),))
    router = CanaryRouter(catalog, FakeCanaryStore(), withdrawals=withdrawals)
    await router.refresh()
    return router


def chosen(router: CanaryRouter, number: int, tenant: str = "t") -> bool:
    return routed(router, [TextInput(f"text {number}")], tenant=tenant)


def routed(router: CanaryRouter, inputs: list[TextInput], **given: str) -> bool:
    """True if a request goes to the canary. Without inputs, its results differ each time."""
    facts = RequestFacts(request_id="req", tenant="t", received_at_s=0.0)
    request = InferenceRequest(
        replace(facts, **given),
        MODEL,
        inputs or [TextInput("a")],
        0.0,
        RequestOptions(),
        is_repeatable=bool(inputs),
    )
    return isinstance(router.route(request).model, Revision)


@pytest.mark.parametrize("share", [0.05, 0.3])
async def test_canary_gets_its_share_of_inputs(share: float) -> None:
    router = await router_of(share=share)
    got = sum(chosen(router, number) for number in range(ASKED))
    assert got == pytest.approx(share * ASKED, abs=5 * (ASKED * share * (1 - share)) ** 0.5)


async def test_larger_share_keeps_those_that_have_the_canary() -> None:
    small, large = await router_of(share=0.1), await router_of(share=0.4)
    first, later = (
        {number for number in range(ASKED) if chosen(router, number)} for router in (small, large)
    )
    assert set() < first < later


async def test_next_canary_goes_to_others() -> None:
    one, other = await router_of(share=0.5), await router_of(share=0.5, revision="3")
    both = Counter((chosen(one, number), chosen(other, number)) for number in range(ASKED))
    assert len(both) == 4, "both, one of them, the other, and none"
    assert min(both.values()) > ASKED / 5


async def test_tenant_stays_on_one_revision() -> None:
    router = await router_of(share=0.5, by="tenant")
    tenants = {
        tenant: {chosen(router, number, tenant) for number in range(50)}
        for tenant in map(str, range(50))
    }
    assert all(len(revisions) == 1 for revisions in tenants.values())
    assert len({revision for revisions in tenants.values() for revision in revisions}) == 2


async def test_request_without_equals_goes_by_its_id() -> None:
    router = await router_of(share=0.5)
    ids = Counter(routed(router, [], request_id=f"req_{number}") for number in range(200))
    assert ids.keys() == {True, False}
    assert min(ids.values()) > 40


async def test_nothing_is_sent_while_nothing_is_known() -> None:
    now_s, canary_store = 0.0, FakeCanaryStore()
    router = CanaryRouter(Catalog((MODEL,)), canary_store, clock=lambda: now_s)
    assert not router.is_serving(CANARY)
    await router.refresh()
    assert router.is_serving(CANARY)
    canary_store.is_away = True
    await router.refresh()
    assert router.is_serving(CANARY)
    now_s += STALE_LIMIT_S
    await router.refresh()
    assert not router.is_serving(CANARY)
    canary_store.is_away = False
    await router.refresh()
    assert router.is_serving(CANARY)


async def test_canary_without_workers_or_taken_back_gets_nothing() -> None:
    canary_store = FakeCanaryStore()
    router = CanaryRouter(Catalog((MODEL,)), canary_store)
    for state in (CanaryState(is_alive=False), CanaryState(True, "by hand")):
        canary_store.known = state
        await router.refresh()
        assert not router.is_serving(CANARY)


async def test_bad_canary_is_taken_back_at_the_next_look() -> None:
    canary_store = FakeCanaryStore()
    router = CanaryRouter(Catalog((MODEL,)), canary_store)
    await router.refresh()
    assert router.is_serving(CANARY)
    canary_store.seen.canary.add_failed(3)
    await router.refresh()
    assert not router.is_serving(CANARY)
    assert canary_store.known.taken_back == "3 of 3 items failed, compared with 0 of 0"


async def test_canary_without_a_topic_costs_no_request(redis_url: str, tmp_path: Path) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        await world.broker.delete_topic(jobs_topic_id(CANARY.name))
        answers = await world.ask_many(20)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-penstock-revision"] for answer in answers} == {"1"}


async def test_full_canary_refuses_nobody(redis_url: str, tmp_path: Path) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        full = Demand(CANARY.name, CANARY.max_in_flight, "default", 1.0, "interactive")
        world.api.dependencies.admission.admit(full)
        answers = await world.ask_many(20)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-penstock-revision"] for answer in answers} == {"1"}


async def test_predictions_of_a_bad_canary_succeed(redis_url: str, tmp_path: Path) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        world.workers[CANARY.name].process.fault = "errors"
        for letter in "abcdefghijklmnop":
            answer = await world.api.http.post(
                "/v1/predictions",
                json={"version": MODEL.name, "input": {"text": f"text {letter}"}},
                headers={"prefer": "wait=60"},
            )
            assert answer.status_code == 201, answer.text
            assert answer.json()["status"] == "succeeded", answer.text
        await world.until_rows(16)
        assert world.workers[CANARY.name].process.texts
        assert {row.revision for row in world.rows() if row.tenant == "default"} == {"1"}


async def test_batch_priority_gets_its_share_too(redis_url: str, tmp_path: Path) -> None:
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        world.workers[CANARY.name].process.fault = "errors"
        answers = await world.ask_many(20, x_penstock_lane="batch")
        assert {answer.status_code for answer in answers} == {200}
        assert world.workers[CANARY.name].process.texts


async def test_repeated_prediction_goes_to_the_revision_that_is_chosen_now(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items have that revision's cache keys."""
    topics: list[str] = []
    async with running_world(redis_url, tmp_path) as world:
        await world.until_serving()
        world.broker.outage = Unavailable("no broker")

        async def put(letter: str) -> httpx.Response:
            body = {"version": MODEL.name, "input": {"text": f"text {letter}"}}
            path, headers = f"/v1/predictions/{letter}", {"prefer": "wait=60"}
            return await world.api.http.put(path, json=body, headers=headers)

        assert {(await put(letter)).status_code for letter in "abcdefgh"} == {503}
        await world.canary_store.take_back(CANARY, "a test")
        await world.until_not_serving()
        world.broker.outage = None
        publish = world.broker.publish

        async def noted(topic_id: str, *given: Any, **named: Any) -> str:
            topics.append(topic_id)
            return await publish(topic_id, *given, **named)

        monkeypatch.setattr(world.broker, "publish", noted)
        repeated = [(await put(letter)).json() for letter in "abcdefgh"]
        assert {one["status"] for one in repeated} == {"succeeded"}
        assert topics.count(jobs_topic_id(MODEL.name)) == len(repeated)
        assert jobs_topic_id(CANARY.name) not in topics


async def test_withdrawn_canary_gets_nothing_and_nobody_notices(redis_url: str) -> None:
    store = WithdrawalStore(redis_url)
    async with LiveWithdrawals(store) as live:
        router = await router_of(live, share=0.5)
        assert any(chosen(router, number) for number in range(50))
        await store.withdraw(Withdrawal(MODEL.name, "2", 1.0, "user x"))
        await live.refresh()
        assert not any(chosen(router, number) for number in range(50))
        assert router.find_given_up(MODEL.name) is None


async def test_canary_goes_on_while_the_other_revision_is_withdrawn(redis_url: str) -> None:
    store = WithdrawalStore(redis_url)
    async with LiveWithdrawals(store) as live:
        router = await router_of(live, share=0.5)
        await store.withdraw(Withdrawal(MODEL.name, MODEL.revision, 1.0, "user x"))
        await live.refresh()
        outcomes = Counter[str]()
        for number in range(50):
            try:
                outcomes["canary" if chosen(router, number) else "other"] += 1
            except ModelWithdrawn:
                outcomes["refused"] += 1
        assert outcomes.keys() == {"canary", "refused"}
        assert router.find_given_up(MODEL.name) is None, "the canary may have its job"
