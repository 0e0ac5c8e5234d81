"""Only tenants with more slots than the newcomer lose slots, and slots never move back and
forth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduling.priority_queue import to_preempt

SLOTS = 8


@dataclass(eq=False)
class Text:
    tenant: str
    room: float = 1 / SLOTS
    weight: float = 1.0
    can_go_on: bool = True

    def __repr__(self) -> str:
        return f"{self.tenant}{self.room:g}"


def chosen(first: Text, inside: Sequence[Text]) -> list[Text]:
    def fits(kept: list[Text]) -> bool:
        return len(kept) < SLOTS and sum(one.room for one in [*kept, first]) <= 1 + 1e-9

    return to_preempt(first, inside, lambda one: max(1 / SLOTS, one.room), fits)


def texts(tenants: str, room: float = 1 / SLOTS) -> list[Text]:
    return [Text(tenant, room) for tenant in tenants]


@pytest.mark.parametrize(
    ("inside", "first", "slots"),
    [
        ("aaaaaaaa", "b", [7]),
        ("aaaabbbb", "b", []),
        ("aaaaabbb", "b", [4]),
        ("aabbbccc", "d", [7]),
        ("abcdefgh", "i", []),
        ("aaaaaaaa", "a", []),
        ("aaaaaaa", "b", []),
        ("baaaaaaa", "b", [7]),
    ],
)
def test_the_last_text_of_who_has_most_yields(inside: str, first: str, slots: list[int]) -> None:
    held = texts(inside)
    assert chosen(Text(first), held) == [held[slot] for slot in slots]


def test_a_weight_is_a_right_to_more_slots() -> None:
    heavy = [Text("a", weight=7.0) for _ in range(7)]
    assert chosen(Text("b"), [*heavy, Text("b")]) == []
    light = texts("aaaaaaa")
    assert chosen(Text("b", weight=7.0), [*light, Text("c")]) == [light[-1]]


def test_as_many_yield_as_a_long_text_needs() -> None:
    held = texts("aaaaa", room=0.2)
    assert chosen(Text("b", room=0.4), held) == [held[4], held[3]]
    # Even all excess slots combined would not be enough, so no text is interrupted needlessly.
    assert chosen(Text("b", room=0.9), held) == []


def test_what_can_t_go_on_later_stays() -> None:
    held = texts("aaaaaaaa")
    for one in held[3:]:
        one.can_go_on = False
    assert chosen(Text("b"), held) == [held[2]]


ROOMS = st.sampled_from([0.05, 1 / SLOTS, 0.3, 0.6])
TEXTS = st.builds(Text, st.sampled_from("abcd"), ROOMS)


@given(st.lists(TEXTS, max_size=SLOTS), st.lists(TEXTS, max_size=12))
def test_places_never_go_back_and_forth(inside: list[Text], waiting: list[Text]) -> None:
    for one in [*inside, *waiting]:
        one.weight = 1.0 + "abcd".index(one.tenant)
    inside = [one for slot, one in enumerate(inside) if sum(x.room for x in inside[:slot]) <= 1]

    def held(tenant: str, items: Sequence[Text]) -> float:
        return sum(max(1 / SLOTS, one.room) / one.weight for one in items if one.tenant == tenant)

    for exchanges in range(200):
        for first in waiting:
            given_away = chosen(first, inside)
            if given_away:
                break
        else:
            assert exchanges <= 100
            return
        after = [one for one in inside if one not in given_away] + [first]
        for owner in {one.tenant for one in given_away}:
            assert owner != first.tenant
            assert held(owner, after) >= held(first.tenant, after) - 1e-9
        waiting = [one for one in waiting if one is not first] + given_away
        inside = after
    raise AssertionError("texts give their slots to one another for ever")
