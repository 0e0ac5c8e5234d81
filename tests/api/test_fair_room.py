"""The room that tenants share: no tenant can fill it alone, and no part of it sits idle."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from api.fair_room import MAX_OVER, RESERVE, Demand, FairRoom
from tests.tiers import examples

BOUND = 64
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0, "e": 0.01, "f": 1000.0}
MAX_REQUEST = 48


def demand(tenant: str, items: int, weight: float | None = None) -> Demand:
    return Demand("m", items, tenant, WEIGHTS.get(tenant, 1.0) if weight is None else weight)


def fill(room: FairRoom, tenant: str, items: int = 1) -> int:
    """Sends requests of `items` items each until one is rejected.

    Returns the number of items admitted.
    """
    while not room.turns_to_wait(demand(tenant, items)):
        room.take(demand(tenant, items))
    return room.count_held(tenant)


def test_tenant_alone_may_use_all_of_it() -> None:
    assert fill(FairRoom(BOUND), "a") == BOUND


def test_newcomer_finds_its_guaranteed_part_while_another_fills_the_room() -> None:
    room = FairRoom(BOUND)
    fill(room, "a", 32)
    assert fill(room, "b") == BOUND * RESERVE / 2


def test_request_larger_than_all_the_room_shuts_nobody_out() -> None:
    room = FairRoom(BOUND)
    room.take(demand("a", 2048))
    room.release(demand("a", 2048))
    room.take(demand("a", BOUND - 1))
    room.take(demand("a", BOUND // 2))
    assert not room.turns_to_wait(demand("b", 1))


def test_many_that_fill_it_leave_room_for_one_more() -> None:
    room = FairRoom(512)
    for number in range(100):
        fill(room, f"busy {number}", 8)
    assert not room.turns_to_wait(demand("quiet", 1))
    assert room.total < 2 * 512


def test_freed_room_goes_to_whoever_is_below_its_share() -> None:
    """Two tenants that both keep sending end up with equal shares, even if one filled the room
    first.
    """
    room = FairRoom(BOUND)
    fill(room, "a")
    for _ in range(20 * BOUND):
        room.release(demand("a" if room.count_held("a") >= room.count_held("b") else "b", 1))
        for tenant in ("a", "b"):
            if not room.turns_to_wait(demand(tenant, 1)):
                room.take(demand(tenant, 1))
    assert abs(room.count_held("a") - room.count_held("b")) <= 2
    assert room.total >= BOUND * (1 - RESERVE)


def test_shares_follow_weights() -> None:
    room = FairRoom(700)
    tenants = {"a": 1.0, "c": 2.0, "d": 4.0}
    for tenant in tenants:
        fill(room, tenant)
    for _ in range(20_000):
        tenant = max(tenants, key=lambda one: room.count_held(one) / tenants[one])
        room.release(demand(tenant, 1))
        for other in tenants:
            if not room.turns_to_wait(demand(other, 1)):
                room.take(demand(other, 1))
    parts = {tenant: room.count_held(tenant) / room.total for tenant in tenants}
    assert parts == pytest.approx({"a": 1 / 7, "c": 2 / 7, "d": 4 / 7}, abs=0.02)


def test_a_million_tenants_leave_nothing_behind() -> None:
    room = FairRoom(BOUND)
    for number in range(1_000_000):
        one = demand(f"tenant {number}", 1)
        room.take(one)
        room.release(one)
    assert (len(room), room.total, room.weights) == (0, 0, 0.0)


def test_there_is_an_end_however_many_tenants_come() -> None:
    room = FairRoom(BOUND)
    for number in range(1_000):
        one = demand(f"tenant {number}", 1)
        if not room.turns_to_wait(one):
            room.take(one)
    assert len(room) == MAX_OVER * BOUND


@settings(deadline=None)
@given(
    held=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 200), min_size=1),
    tenant=st.sampled_from("abcdef"),
    items=st.integers(1, MAX_REQUEST),
    enough=st.floats(0, 400),
)
def test_ahead_is_what_leaves_in_fair_order(
    held: dict[str, int], tenant: str, items: int, enough: float
) -> None:
    """Compared with a fluid model that drains every tenant at a rate proportional to its weight."""
    room = FairRoom(BOUND)
    for other, count in held.items():
        room.take(demand(other, count))
    left = Counter(held)
    left[tenant] += items
    rounds = left[tenant] / WEIGHTS[tenant]
    drained = sum(min(count, rounds * WEIGHTS[other]) for other, count in left.items())
    asked = demand(tenant, items)
    assert room.ahead_of(asked, enough=-1.0) == pytest.approx(drained - 1)
    quick = room.ahead_of(asked, enough)
    assert quick == pytest.approx(drained - 1) or drained - 1 <= quick <= enough


class SharedRoom(RuleBasedStateMachine):
    """Requests from several tenants come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.room = FairRoom(BOUND)
        self.held: Counter[str] = Counter()

    def weight_here(self, *tenants: str) -> float:
        return sum(WEIGHTS[tenant] for tenant in {*tenants, *(+self.held)})

    @rule(tenant=st.sampled_from("abcdef"), items=st.integers(1, MAX_REQUEST))
    def ask(self, tenant: str, items: int) -> None:
        own, total = self.held[tenant], self.held.total()
        part = WEIGHTS[tenant] / self.weight_here(tenant)
        turns = self.room.turns_to_wait(demand(tenant, items))
        is_idle = total < BOUND * (1 - RESERVE)
        is_below_share = total < BOUND and own < BOUND * part * (1 - 1e-9)
        is_guaranteed = total < MAX_OVER * BOUND and own + items <= max(1, BOUND * RESERVE * part)
        if is_idle or is_below_share or is_guaranteed:
            assert turns == 0
        if turns:
            assert 1 <= turns <= total
        else:
            self.room.take(demand(tenant, items))
            self.held[tenant] += items

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(sorted(+self.held)))
        items = data.draw(st.integers(1, self.held[tenant]))
        self.room.release(demand(tenant, items))
        self.held[tenant] -= items

    @invariant()
    def counts_are_right(self) -> None:
        assert self.room.total == self.held.total()
        assert len(self.room) == len(+self.held)
        assert self.room.weights == pytest.approx(
            sum(WEIGHTS[tenant] for tenant in +self.held), abs=1e-6
        )

    @invariant()
    def nobody_passes_the_bound(self) -> None:
        assert self.room.total < MAX_OVER * BOUND + MAX_REQUEST
        for tenant in +self.held:
            others = self.held.total() - self.held[tenant]
            assert self.held[tenant] < BOUND + MAX_REQUEST or others == 0

    def teardown(self) -> None:
        for tenant, items in (+self.held).items():
            self.room.release(demand(tenant, items))
        assert (len(self.room), self.room.total, self.room.weights) == (0, 0, 0.0)


TestSharedRoom = SharedRoom.TestCase
TestSharedRoom.settings = settings(deadline=None, stateful_step_count=60, max_examples=examples(60))
