"""Estimates how fast a model runs, using rules shared with the fleet simulation.

This module uses no clock and does no I/O.

`ServiceRate`, which admission uses, estimates a model's rate from completed items. It is modeled on
BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016): the
service rate can be measured only while there is a queue. At low load, items complete only as fast
as they arrive, which does not reveal the rate. If there is no queue, a measurement therefore counts
only if it is faster than the estimate. Little's law shows whether there is a queue: the time an
item spends in the system is the number of items in flight times the seconds per item.

`StepTime` estimates the fixed part of a step's time. If items join a model between steps, a step
takes a fixed time (reading the weights) plus time for its work (tokens, pixels). The fixed time is
paid once for all items, so if only part of the capacity is taken, other items could use the rest at
no cost. That part of a step is spare, and the autoscaler must not count it as work (decision 73).

`HeldAhead` determines how many jobs a worker must hold so that its model never waits for the
broker. With a nearby broker, two batches per process are enough: one running and one waiting. A
finished job's permit is reused only after its reply and ack have traveled to the broker and the
next job has traveled back. A worker therefore also holds the jobs that its model processes during
that time: its rate times the round-trip time, like the bandwidth-delay product of a network path.
The number is limited, because when a worker dies, its jobs wait for their leases to expire and are
then processed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.models.tasks.base import FirstGuesses

PRIOR_ITEMS = 4.0
"""Weight of the previous estimate relative to new measurements, in items."""
MIN_WINDOW_S, WINDOW_TURNS = 2.0, 8.0
"""Measurements fade within this many seconds, or this many service times."""
QUEUED_FROM = 2.5
"""An item that takes this many service times must have been queued: one batch runs while another
waits.
"""
IDLE_FADE_S = 120.0
"""After this much idle time, a measurement has only a third of its weight, because workers come and
go.
"""
NEWEST_WEIGHT = 0.1
"""Weight of the newest value in the moving average `service_s`."""

MIN_MARGIN, MAX_MARGIN, MARGIN_STEP = 1.25, 2.0, 1.2
"""Estimated waits are multiplied by a margin that grows while responses are late. On shared cores,
the rate changes within one deadline, and a late response is wasted work.
"""
MARGIN_FADE_S = 30.0

LOW = 0.25
"""Fraction of similar steps that take less than the usual time.

Slower steps were delayed by something unrelated to the model, such as other work on the same cores.
"""
MIN_RATE = 0.02
"""Rate at which the usual time adapts to new steps, after the initial ones."""
MIN_STEPS = 3
"""Minimum number of steps with similar work needed for an estimate."""
SLOWED = 2.0
"""If a step takes up to this multiple of the usual time, other work on the device is assumed to
have slowed the entire step, including its spare part.

The time beyond that is unreported work.
"""
MIN_WORK_RATIO = 4
"""A line is drawn through two steps if one step's work is at least this multiple of the other's."""

MAX_AHEAD_S = 1.0
"""Seconds of work that a worker may hold in addition to two batches."""
MAX_AHEAD_MESSAGES = 8192
FADE_S = 60.0
"""After this much time, the earlier number still has a weight of one third, so the number of jobs
held shrinks slowly.
"""
ACK_LINGER_S = 0.02
"""How long job acks wait so that they can be sent together.

Callers do not wait for them, and a single ack costs as much as a publish.
"""


class ServiceRate:
    """One model's service rate. Callers pass the time in monotonic seconds."""

    def __init__(self, guesses: FirstGuesses) -> None:
        self._guess_s = guesses.gap_s
        self.item_s = self._guess_s
        """Seconds per item while there is a queue."""
        self.is_guess = True
        """True if `item_s` was never measured, or was measured too long ago to be useful."""
        self.service_s = guesses.batch_s
        """Service time: how many seconds the model takes for an item and the rest of its batch."""
        self.margin = MIN_MARGIN
        """Factor applied to estimated waits."""
        self._busy_s, self._items = PRIOR_ITEMS * self.item_s, PRIOR_ITEMS
        self._measured_s = self._measured_items = 0.0
        """Like `_busy_s` and `_items`, but without any earlier estimate."""
        self._known_item_s: float | None = None
        self._last_s = self._updated_s = 0.0
        self._late_s = -math.inf

    def start_busy_period(self, now_s: float) -> None:
        """Call this when an item arrives while no other item is in flight."""
        self._update(in_flight=0)
        idle_s = max(0.0, now_s - self._last_s)
        self.item_s = self._guess_s + (self.item_s - self._guess_s) * math.exp(
            -idle_s / IDLE_FADE_S
        )
        self.is_guess |= idle_s > IDLE_FADE_S
        if self.measured_per_s(now_s) is None:
            self._measured_s, self._measured_items, self._known_item_s = 0.0, 0.0, None
        self._busy_s, self._items = PRIOR_ITEMS * self.item_s, PRIOR_ITEMS
        self._last_s = self._updated_s = now_s

    def record_completed(
        self, now_s: float, items: int, in_flight: int, took_s: float | None
    ) -> None:
        """Records that `items` out of `in_flight` items completed together, in `took_s` seconds."""
        if took_s is not None:
            self.service_s += NEWEST_WEIGHT * (took_s - self.service_s)
        # Items complete one batch at a time, and the first item in a batch accounts for the time of
        # the whole batch.
        if now_s - self._updated_s >= self.service_s / 2:
            self._update(in_flight)
            self._updated_s = now_s
        gap_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        fade = math.exp(-gap_s / max(MIN_WINDOW_S, WINDOW_TURNS * self.service_s))
        self._busy_s = self._busy_s * fade + gap_s
        self._items = self._items * fade + items
        self._measure(gap_s, items, fade, in_flight)
        self.margin = MIN_MARGIN + (self.margin - MIN_MARGIN) * math.exp(-gap_s / MARGIN_FADE_S)

    def _measure(self, gap_s: float, items: int, fade: float, in_flight: int) -> None:
        self._measured_s = self._measured_s * fade + gap_s
        self._measured_items = self._measured_items * fade + items
        item_s = self._measured_s / self._measured_items
        is_queue = in_flight * item_s > QUEUED_FROM * self.service_s
        if self._known_item_s is None or item_s < self._known_item_s or is_queue:
            self._known_item_s = item_s

    def measured_per_s(self, now_s: float) -> float | None:
        """Returns the measured service rate in items per second, without any initial estimate.

        None if no item has completed recently, because workers come and go.
        """
        old_s = max(IDLE_FADE_S, WINDOW_TURNS * self.service_s)
        if self._known_item_s is None or now_s - self._last_s > old_s:
            return None
        return 1 / max(self._known_item_s, 1e-9)

    def record_late(self, now_s: float) -> None:
        """Records items that missed their deadline.

        Items that are late at the same time count as one.
        """
        if now_s - self._late_s >= self.service_s:
            self._late_s = now_s
            self.margin = min(self.margin * MARGIN_STEP, MAX_MARGIN)

    def _update(self, in_flight: int) -> None:
        measured_s = self._busy_s / self._items
        if measured_s < self.item_s or in_flight * measured_s > QUEUED_FROM * self.service_s:
            self.item_s, self.is_guess = measured_s, False

    def stalled_s(self, now_s: float) -> float:
        """Returns how many seconds longer than normal the current pause is, or 0 if it isn't."""
        return max(0.0, now_s - self._last_s - QUEUED_FROM * self.service_s)


@dataclass(slots=True)
class _Usual:
    """Steps with similar work, within a factor of 2."""

    work: float
    seconds: float
    steps: int = 1

    def observe(self, work: float, seconds: float) -> None:
        """Moves the estimate by one quantile-estimation step, but never past the observed value."""
        rate = max(MIN_RATE, 1 / (self.steps + 1))
        self.work += rate * (work - self.work)
        if seconds < self.seconds:
            self.seconds = max(seconds, self.seconds * (1 - rate * (1 - LOW)))
        else:
            self.seconds = min(seconds, self.seconds * (1 + rate * LOW))
        self.steps += 1


class StepTime:
    """The fixed time of a model's steps, estimated from lines through steps with different work.

    Args:
        fixed_share: initial estimate of the fixed time, as a fraction of a full step, used while
            all steps are alike.
        full_work: work in a full step. Used only for that estimate.
    """

    def __init__(self, fixed_share: float, full_work: float) -> None:
        self._fixed_share = fixed_share
        self._full_work = full_work
        self._usual: dict[int, _Usual] = {}

    def observe(self, work: int, seconds: float) -> None:
        """Records a step. `work` is at least 1."""
        like = work.bit_length()
        if (usual := self._usual.get(like)) is None:
            self._usual[like] = _Usual(work, seconds)
        else:
            usual.observe(work, seconds)

    def spare_s(self, fill: float, work: int, seconds: float) -> float:
        """Returns how many seconds of a step other items could have used at no cost.

        That is at most the fraction of the capacity that is free, so a full step has no spare time.

        Args:
            fill: fraction of the capacity that is taken, from 0 to 1.
        """
        usual = self._usual.get(work.bit_length())
        usual_s = max(1e-9, seconds if usual is None else usual.seconds)
        fixed_part = min(1.0, self.fixed_s / usual_s)
        return min(seconds, SLOWED * usual_s) * fixed_part * (1 - fill)

    @property
    def fixed_s(self) -> float:
        """The part of a step's time, in seconds, that does not depend on its work.

        0 before the first step.
        """
        known = [usual for usual in self._usual.values() if usual.steps >= MIN_STEPS]
        known = known or list(self._usual.values())
        if not known:
            return 0.0
        least = min(known, key=lambda usual: usual.work)
        slopes = [
            (usual.seconds - least.seconds) / (usual.work - least.work)
            for usual in known
            if usual.work >= MIN_WORK_RATIO * least.work
        ]
        # Uses the steepest line, because a prompt token takes less time than a generated token.
        fixed_s = least.seconds - max(slopes) * least.work if slopes else self._guess_fixed_s(least)
        return min([max(0.0, fixed_s), *(usual.seconds for usual in known)])

    def _guess_fixed_s(self, usual: _Usual) -> float:
        fixed = self._fixed_share
        return usual.seconds * fixed / (fixed + (1 - fixed) * usual.work / self._full_work)


def count_held_messages(
    max_items: int, processes: int, *, in_steps: bool, in_flight: int = 1
) -> int:
    """Returns how many jobs a worker near its broker holds: two batches per process.

    One is running and one is waiting. A worker far from its broker holds more (`HeldAhead`).

    A generation may run for minutes. If one tenant has filled both batches, there must still be
    room for other tenants' jobs, which then get slots (workers/scheduling/priority_queue.py).

    Args:
        in_steps: True if the model uses continuous batching.
        in_flight: number of batches that a process has in flight at once.
    """
    batches = in_flight + 1
    return processes * (batches * max_items + (-(-max_items // 2) if in_steps else 0))


def refill_s(round_trip_s: float) -> float:
    """Returns the time from the end of a job until the next job takes its place.

    First, the reply is confirmed; then the ack travels to the broker, and the next job travels
    back.
    """
    return 2 * round_trip_s + ACK_LINGER_S


def messages_ahead(jobs_per_s: float, gap_s: float, batch_s: float) -> int:
    """Returns the number of jobs that a worker holds in addition to two batches.

    Half of the waiting batch covers half of the batch time.

    Args:
        jobs_per_s: jobs processed per second while there is work.
        gap_s: time from the end of a job until the next job takes its place.
    """
    ahead_s = min(max(0.0, gap_s - batch_s / 2), MAX_AHEAD_S)
    return min(math.ceil(jobs_per_s * ahead_s), MAX_AHEAD_MESSAGES)


class HeldAhead:
    """The number of jobs from one subscription that a worker holds in addition to two batches.

    It grows immediately and shrinks slowly.

    It shrinks slowly because measured times fluctuate and each change to the limit closes streams
    or consumers.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._measured_at_s = 0.0

    def batch_ended(self, jobs_per_s: float, took_s: float, gap_s: float, now_s: float) -> int:
        """Updates the number after a batch.

        Args:
            jobs_per_s: the subscription's jobs per second across all processes, at this batch's
                rate.
            took_s: the batch's duration in seconds.
            gap_s: time from the end of a job until the next job takes its place.
        """
        fade = math.exp((self._measured_at_s - now_s) / FADE_S)
        self._ahead = max(messages_ahead(jobs_per_s, gap_s, took_s), self._ahead * fade)
        self._measured_at_s = now_s
        return math.ceil(self._ahead)
