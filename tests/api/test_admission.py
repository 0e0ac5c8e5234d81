"""Admission by itself, with the test's own clock and, where useful, a worker that is a few lines
long.
"""

import heapq
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from api.dispatch.admission import MAX_RETRY_S, MIN_RETRY_S, Admission
from api.fair_room import Demand
from shared.errors import Overloaded
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.service_rate import ServiceRate
from shared.models.tasks.base import FirstGuesses
from shared.tenants.plan import PRIORITIES, Priority
from tests.clock import Clock

# Unique names: this process's gauges include items that other tests left in flight.
TEXT, IMAGE = (
    model.model_copy(update={"name": f"admitted {model.name}"})
    for model in read_catalog(Path("models.yaml")).models
)

GUESS_S = FirstGuesses().gap_s


def bounded(model: Model, items: int) -> Model:
    return model.model_copy(update={"max_in_flight": items})


def refused(
    admission: Admission, model: str, items: int, remaining_s: float = math.inf, **more: Any
) -> float:
    """Returns the wait, in seconds, from the rejection. A rejection must occur."""
    with pytest.raises(Overloaded) as caught:
        admission.admit(Demand(model, items, **more), remaining_s=remaining_s)
    return caught.value.retry_after_s


def test_room_for_one_is_room_for_a_whole_request() -> None:
    admission = Admission(max_in_flight=10)
    admission.admit(Demand("m", 9))
    admission.admit(Demand("m", 2048))
    refused(admission, "m", 1)
    admission.release(Demand("m", 2048), answered=True)
    admission.admit(Demand("m", 1))
    assert admission.in_flight == 10


def test_counts_of_each_priority_are_there_before_the_first_request() -> None:
    # Otherwise, a model without requests would look the same as lost metrics.
    model = TEXT.model_copy(update={"name": "counted"})
    admission = Admission(10, [model])

    def counts(priority: Priority) -> tuple[float | None, ...]:
        labels = {"model": "counted", "lane": priority}
        names = ("items_admitted_total", "items_in_flight", "items_shed_total")
        return tuple(REGISTRY.get_sample_value(f"penstock_api_{name}", labels) for name in names)

    assert (counts("interactive"), counts("batch")) == ((0, 0, 0), (0, 0, 0))
    admission.admit(Demand("counted", 3))
    admission.admit(Demand("counted", 2, priority="batch"))
    admission.release(Demand("counted", 1), answered=True)
    with pytest.raises(Overloaded):
        admission.admit(Demand("counted", 4, priority="batch"), remaining_s=1e-9)
    assert (counts("interactive"), counts("batch")) == ((3, 2, 0), (2, 2, 4))


def test_full_model_leaves_room_for_the_others() -> None:
    admission = Admission(100, [bounded(TEXT, 10), IMAGE])
    admission.admit(Demand(TEXT.name, 10))
    refused(admission, TEXT.name, 1)
    admission.admit(Demand(IMAGE.name, 1))


def test_batch_priority_leaves_room_for_interactive_requests() -> None:
    admission = Admission(1000, [bounded(TEXT, 10)])
    admission.admit(Demand(TEXT.name, 5, priority="batch"))
    refused(admission, TEXT.name, 1, priority="batch")
    admission.admit(Demand(TEXT.name, 4))
    admission.release(Demand(TEXT.name, 5, priority="batch"), answered=True)
    admission.admit(Demand(TEXT.name, 1, priority="batch"))


def measured(
    item_s: float, *, max_in_flight: int = 10_000, service_s: float = 0.05
) -> tuple[Admission, Clock]:
    """An admission that has seen an item leave every `item_s` while others waited; 100 are in
    flight.
    """
    clock = Clock(100.0)
    admission = Admission(max_in_flight, [bounded(TEXT, max_in_flight)], clock)
    admission.admit(Demand(TEXT.name, 1100))
    for _ in range(1000):
        clock.now_s += item_s
        admission.release(Demand(TEXT.name, 1), answered=True, took_s=service_s)
    return admission, clock


def test_refused_when_the_backlog_takes_longer_than_the_deadline() -> None:
    admission, _ = measured(0.01)
    admission.admit(Demand(TEXT.name, 1), remaining_s=1.5)
    retry_s = refused(admission, TEXT.name, 1, remaining_s=0.5)
    assert retry_s == pytest.approx(0.82, abs=0.1)


def test_items_of_the_request_itself_count() -> None:
    admission, _ = measured(0.01)
    refused(admission, TEXT.name, 100, remaining_s=1.5)
    admission.admit(Demand(TEXT.name, 10), remaining_s=1.5)


def test_interactive_requests_do_not_wait_for_batch_priority() -> None:
    admission, clock = measured(0.01)
    for _ in range(100):
        clock.now_s += 0.01
        admission.release(Demand(TEXT.name, 1), answered=True, took_s=0.05)
    admission.admit(Demand(TEXT.name, 1000, priority="batch"))
    admission.admit(Demand(TEXT.name, 1), remaining_s=0.5)
    assert refused(admission, TEXT.name, 1, remaining_s=0.5, priority="batch") > 5


def test_time_is_counted_in_fair_order() -> None:
    """A busy tenant's 100 items take a second. Other tenants don't have to wait for all of them."""
    admission, _ = measured(0.01, service_s=0.05)
    admission.admit(Demand(TEXT.name, 1, "quiet"), remaining_s=0.2)
    admission.admit(Demand(TEXT.name, 9, "quiet"), remaining_s=0.4)
    refused(admission, TEXT.name, 1, remaining_s=0.2, tenant="quiet")
    refused(admission, TEXT.name, 30, remaining_s=0.4, tenant="other")
    admission.admit(Demand(TEXT.name, 30, "heavy", weight=100.0), remaining_s=0.6)


def test_batch_that_runs_is_waited_for_in_any_order() -> None:
    admission, _ = measured(0.01, service_s=0.5)
    refused(admission, TEXT.name, 1, remaining_s=0.9, tenant="quiet")
    admission.admit(Demand(TEXT.name, 1, "quiet"), remaining_s=1.1)


def test_time_until_a_large_request_of_a_newcomer_fits() -> None:
    """30 of a newcomer's items and 30 of the other tenants' 100 items would finish in 0.8 s.

    The estimate shrinks only once fewer than 30 of the other tenants' items are left.
    """
    admission, clock = measured(0.01)
    retry_s = refused(admission, TEXT.name, 30, remaining_s=0.75, tenant="new")
    assert retry_s > 0.8
    left = 100
    while left and clock.now_s < 100 + 11 + retry_s:
        clock.now_s += 0.01
        admission.release(Demand(TEXT.name, 1), answered=True, took_s=0.05)
        left -= 1
    admission.admit(Demand(TEXT.name, 30, "new"), remaining_s=0.75)


def test_refusal_does_not_tell_how_much_others_send() -> None:
    admission = Admission(10_000, [bounded(TEXT, 100)])
    admission.admit(Demand(TEXT.name, 777, "busy"))
    with pytest.raises(Overloaded) as caught:
        admission.admit(Demand(TEXT.name, 50, "quiet"))
    assert "777" not in caught.value.message
    assert "0 of your items" in caught.value.message


def test_who_finds_nothing_before_it_is_let_in() -> None:
    admission, _ = measured(1.0)
    admission.release(Demand(TEXT.name, 100), answered=False)
    admission.admit(Demand(TEXT.name, 5), remaining_s=0.01)


def test_bursts_of_replies_are_no_measure_of_a_single_one() -> None:
    clock = Clock(100.0)
    admission = Admission(10_000, [bounded(TEXT, 10_000)], clock)
    admission.admit(Demand(TEXT.name, 64))
    for _ in range(100):
        admission.admit(Demand(TEXT.name, 32))
        clock.now_s += 0.32
        for _ in range(32):
            admission.release(Demand(TEXT.name, 1), answered=True, took_s=0.32)
            admission.admit(Demand(TEXT.name, 1), remaining_s=1.6)
            admission.release(Demand(TEXT.name, 1), answered=False)


def test_slow_arrivals_do_not_look_like_a_slow_worker() -> None:
    """Ten workers get one request a second at first, then ten at once, which they process in
    parallel.
    """
    clock = Clock(100.0)
    admission = Admission(1000, [IMAGE], clock)
    for burst in (10, 10):
        for _ in range(burst):
            admission.admit(Demand(IMAGE.name, 1), remaining_s=60)
        clock.now_s += 1.0
        for _ in range(burst):
            admission.release(Demand(IMAGE.name, 1), answered=True, took_s=1.0)
    for _ in range(30):
        admission.admit(Demand(IMAGE.name, 1), remaining_s=60)
        clock.now_s += 1.0
        admission.release(Demand(IMAGE.name, 1), answered=True, took_s=1.0)
    for _ in range(10):
        admission.admit(Demand(IMAGE.name, 1), remaining_s=4)


def test_given_up_items_say_nothing_about_speed() -> None:
    rate = ServiceRate(FirstGuesses())
    admission, clock = measured(0.01)
    clock.now_s += 50
    admission.release(Demand(TEXT.name, 50), answered=False)
    admission.admit(Demand(TEXT.name, 1), remaining_s=60)
    assert rate.item_s == GUESS_S


def test_late_answers_make_it_careful_for_a_while() -> None:
    admission, clock = measured(0.01)
    admission.admit(Demand(TEXT.name, 1), remaining_s=1.6)
    for _ in range(3):
        clock.now_s += 0.06
        admission.release(Demand(TEXT.name, 1), answered=False, was_late=True)
    refused(admission, TEXT.name, 1, remaining_s=1.6)
    for _ in range(9000):
        admission.admit(Demand(TEXT.name, 1))
        clock.now_s += 0.01
        admission.release(Demand(TEXT.name, 1), answered=True, took_s=0.05)
    admission.admit(Demand(TEXT.name, 1), remaining_s=1.6)


def test_standstill_counts_as_waiting() -> None:
    admission, clock = measured(0.01)
    admission.admit(Demand(TEXT.name, 1), remaining_s=3)
    clock.now_s += 10
    refused(admission, TEXT.name, 1, remaining_s=3)


def test_measurements_fade_while_idle() -> None:
    admission, clock = measured(1.0)
    admission.release(Demand(TEXT.name, 100), answered=False)
    admission.admit(Demand(TEXT.name, 10))
    refused(admission, TEXT.name, 1, remaining_s=5)
    admission.release(Demand(TEXT.name, 10), answered=False)
    clock.now_s += 3600
    admission.admit(Demand(TEXT.name, 10))
    admission.admit(Demand(TEXT.name, 1), remaining_s=5)


def test_retry_is_bounded() -> None:
    admission, _ = measured(10.0)
    assert refused(admission, TEXT.name, 1, remaining_s=5) == MAX_RETRY_S
    admission = Admission(max_in_flight=1)
    admission.admit(Demand("m", 1))
    assert refused(admission, "m", 1) == MIN_RETRY_S


@settings(deadline=None)
@given(
    item_s=st.floats(0.002, 0.5),
    remaining_s=st.floats(0.1, 20),
    items=st.integers(1, 64),
    priority=st.sampled_from(PRIORITIES),
)
def test_after_its_wait_a_refused_request_is_let_in(
    item_s: float, remaining_s: float, items: int, priority: Priority
) -> None:
    admission, clock = measured(item_s, service_s=item_s)
    try:
        admission.admit(Demand(TEXT.name, items, priority=priority), remaining_s=remaining_s)
    except Overloaded as error:
        if error.retry_after_s == MAX_RETRY_S:
            return
        ends_s, left = clock.now_s + error.retry_after_s, 100
        while left and clock.now_s + item_s <= ends_s:
            clock.now_s += item_s
            admission.release(Demand(TEXT.name, 1), answered=True, took_s=item_s)
            left -= 1
        clock.now_s = ends_s
        admission.admit(Demand(TEXT.name, items, priority=priority), remaining_s=remaining_s)


@settings(deadline=None, max_examples=10)
@given(
    servers=st.integers(1, 6),
    batch=st.integers(1, 6),
    batch_s=st.floats(0.02, 2.0),
    load=st.floats(2.0, 5.0),
    deadline_turns=st.floats(6.0, 16.0),
)
def test_overload_leaves_the_workers_busy_and_answers_in_time(
    servers: int, batch: int, batch_s: float, load: float, deadline_turns: float
) -> None:
    """Workers take up to `batch` items every `batch_s`, and are offered `load` times their
    capacity.
    """
    clock = Clock(100.0)
    admission = Admission(1_000_000, [bounded(TEXT, 1_000_000)], clock)
    deadline_s, capacity = deadline_turns * batch_s, servers * batch / batch_s
    gap_s, until_s = 1 / (load * capacity), clock.now_s + 16 * deadline_s
    waiting: list[float] = []  # when each waiting item is due
    ends: list[tuple[float, list[float]]] = []  # the batches in progress
    next_s, in_time, late = clock.now_s, 0, 0
    warm_s = clock.now_s + 8 * deadline_s
    while clock.now_s < until_s:
        if ends and ends[0][0] <= next_s:
            clock.now_s, done = heapq.heappop(ends)
            for due_s in done:
                admission.release(Demand(TEXT.name, 1), answered=True, took_s=batch_s)
                if clock.now_s > warm_s:
                    in_time, late = in_time + (due_s >= clock.now_s), late + (due_s < clock.now_s)
        else:
            clock.now_s, next_s = next_s, next_s + gap_s
            try:
                admission.admit(Demand(TEXT.name, 1), remaining_s=deadline_s)
                waiting.append(clock.now_s + deadline_s)
            except Overloaded:
                pass
        while waiting and len(ends) < servers:
            ends_s = clock.now_s + batch_s
            heapq.heappush(ends, (ends_s, waiting[:batch]))
            del waiting[:batch]
    goodput = in_time / ((until_s - warm_s) * capacity)
    assert goodput > 0.9, (goodput, late)
    assert late <= 0.01 * in_time


def test_rate_of_a_slow_model_is_told_as_measured_or_not_at_all() -> None:
    clock = Clock()
    admission, demand = Admission(100, [IMAGE], clock=clock), Demand(IMAGE.name, 1)
    told = [admission.estimate_wait(demand).items_per_s]
    for _ in range(2):
        admission.admit(demand)
        clock.now_s += 43.0
        admission.release(demand, answered=True, took_s=43.0)
        told.append(admission.estimate_wait(demand).items_per_s)
        clock.now_s += 60.0
    assert told == [None, pytest.approx(1 / 43), pytest.approx(1 / 43)]
    clock.now_s += 3600.0
    assert admission.estimate_wait(demand).items_per_s is None
    admission.admit(demand)
    assert admission.estimate_wait(demand).wait_s is None
