"""A settled heap is excluded from collections, but later objects are still collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shared.process.gc_tuning import YOUNG_OBJECTS, settle_heap


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_what_stood_at_the_start_is_frozen() -> None:
    settle_heap()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] == YOUNG_OBJECTS


@pytest.mark.slow
@pytest.mark.parametrize("grows_by_millions", [False, True])
def test_cycles_that_come_later_still_go(grows_by_millions: bool) -> None:
    settle_heap(grows_by_millions=grows_by_millions)
    knots = [weakref.ref(Knot()) for _ in range(3 * YOUNG_OBJECTS)]
    assert sum(knot() is None for knot in knots) > YOUNG_OBJECTS
