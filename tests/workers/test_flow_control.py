"""How many jobs a worker holds depends on its distance from the broker and on its rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from shared.broker.transport import ReceivedMessage, SmoothedDuration, Subscription
from shared.messages import Envelope, Job, JobBody
from shared.models.service_rate import MAX_AHEAD_S
from workers.scheduling.flow_control import FlowControl
from workers.scheduling.job import PulledJob, QueuedItem

HELD, BATCH, BATCH_S = 128, 64, 0.05
RATE = BATCH / BATCH_S


@dataclass(eq=False)
class Held:
    """A subscription that only records how many jobs it is supposed to hold."""

    round_trip: SmoothedDuration
    now: list[int] = field(default_factory=list)

    def hold(self, max_messages: int) -> None:
        self.now.append(max_messages)


@dataclass(eq=False)
class Pulled:
    """A job with a given number of items."""

    subscription: Held
    items: list[int]


@dataclass(eq=False)
class Queued:
    """An item that one job is waiting for."""

    pulled: Pulled

    @property
    def waiters(self) -> list[tuple[Pulled, int]]:
        return [(self.pulled, 0)]


def steady(seconds: float) -> SmoothedDuration:
    """A duration that has been stable for a long time."""
    duration = SmoothedDuration()
    for _ in range(50):
        duration.record(seconds)
    return duration


def control(at: Held, completion_s: float = 0.005, processes: int = 1) -> FlowControl:
    subscription = cast(Subscription, at)
    return FlowControl(
        "m", "interactive", subscription, HELD, processes, steady(completion_s), 0.02
    )


def batch_of(at: Held, jobs: int = BATCH, items: int = 1) -> list[QueuedItem]:
    pulled = [Pulled(at, list(range(items))) for _ in range(jobs)]
    return [cast(QueuedItem, Queued(one)) for one in pulled for _ in range(items)]


def test_near_the_broker_two_batches_are_held() -> None:
    near = Held(steady(0.001))
    control(near).batch_ended(batch_of(near), BATCH_S, 0.0)
    assert near.now == [pytest.approx(HELD, abs=2)]


@pytest.mark.parametrize("delay_s", [0.01, 0.025, 0.05, 0.1])
def test_at_a_distance_the_work_of_a_round_trip_is_held_too(delay_s: float) -> None:
    far = Held(steady(2 * delay_s))
    control(far).batch_ended(batch_of(far), BATCH_S, 0.0)
    gap_s = 2 * delay_s + 0.02 + 0.005
    assert far.now[-1] == pytest.approx(HELD + RATE * (gap_s - BATCH_S / 2), abs=2)


def test_jobs_are_counted_and_not_items() -> None:
    far = Held(steady(0.1))
    control(far).batch_ended(batch_of(far, BATCH // 16, 16), BATCH_S, 0.0)
    assert far.now[-1] == pytest.approx(HELD + RATE / 16 * 0.1, abs=2)


def test_a_slow_model_holds_no_more_at_any_distance() -> None:
    far = Held(steady(0.2))
    control(far).batch_ended(batch_of(far), 0.5, 0.0)
    assert far.now == [HELD]


def test_no_more_than_a_second_of_work_is_held_ahead() -> None:
    moon = Held(steady(2.6))
    control(moon).batch_ended(batch_of(moon), BATCH_S, 0.0)
    assert moon.now == [HELD + RATE * MAX_AHEAD_S]


def test_it_grows_at_once_and_shrinks_slowly() -> None:
    far = Held(steady(0.1))
    flow = control(far)
    flow.batch_ended(batch_of(far, 1), BATCH_S, 0.0)
    flow.batch_ended(batch_of(far), BATCH_S, 0.1)
    full = far.now[-1]
    assert full > far.now[0]
    for second in range(1, 240):
        flow.batch_ended(batch_of(far, 1), BATCH_S, float(second))
    assert all(later <= earlier for earlier, later in zip(far.now[1:], far.now[2:], strict=False))
    assert far.now[5] > HELD + 0.9 * (full - HELD)
    assert far.now[-1] < HELD + 0.1 * (full - HELD)


def test_a_moment_of_shorter_round_trips_changes_little() -> None:
    far = Held(steady(0.1))
    flow = control(far)
    flow.batch_ended(batch_of(far), BATCH_S, 0.0)
    far.round_trip = steady(0.001)
    flow.batch_ended(batch_of(far), BATCH_S, 1.0)
    assert far.now[-1] - HELD >= 0.95 * (far.now[0] - HELD)


def test_each_priority_holds_what_it_has() -> None:
    interactive, batch = Held(steady(0.1)), Held(steady(0.1))
    mixed = [*batch_of(interactive, 48), *batch_of(batch, 16)]
    for at in (interactive, batch):
        control(at).batch_ended(mixed, BATCH_S, 0.0)
    ahead = [at.now[-1] - HELD for at in (interactive, batch)]
    assert ahead[0] == pytest.approx(3 * ahead[1], abs=3)


def test_smoothed_duration_follows_rfc_6298() -> None:
    duration = SmoothedDuration()
    assert (duration.mean_s, duration.most_s) == (0.0, 0.0)
    duration.record(0.1)
    assert duration.mean_s == 0.1
    assert duration.most_s == pytest.approx(0.1 + 4 * 0.05)
    duration.record(0.2)
    # RTTVAR = 3/4 RTTVAR + 1/4 |SRTT - R|, then SRTT = 7/8 SRTT + 1/8 R
    assert duration.mean_s == pytest.approx(0.1125)
    assert duration.most_s == pytest.approx(0.1125 + 4 * (0.75 * 0.05 + 0.25 * 0.1))
    duration.record(30.0)  # an outage
    assert duration.mean_s == pytest.approx(0.1125)


@pytest.mark.parametrize(
    ("round_trip_s", "age_s", "is_fresh"),
    [(0.001, 0.04, True), (0.001, 0.11, False), (0.1, 0.11, True), (0.1, 0.2, False)],
)
def test_a_job_from_afar_is_fresh_when_it_comes(
    round_trip_s: float, age_s: float, is_fresh: bool
) -> None:
    """Otherwise the worker would query Redis for each job before queuing it."""
    envelope = Envelope(
        request_id="r",
        part=0,
        model="m",
        tenant="t",
        deadline_s=2000.0,
        received_at_s=1000.0,
        published_at_s=1000.0,
    )
    job = Job(envelope, JobBody([]))
    subscription = cast(Subscription, Held(steady(round_trip_s)))
    pulled = PulledJob(job, cast(ReceivedMessage, None), subscription, 1000.0 + age_s)
    assert pulled.is_fresh is is_fresh
