"""Admission control: limits the number of waiting items and rejects requests that would be late.

The dispatcher checks admission before it publishes. Tenants share each limit by weight
(api/fair_room.py). The expected wait depends on the service rate (shared/models/service_rate.py)
and on how many items workers will run before the request, in fair order. Estimates can be wrong, so
a request is always admitted when nothing is in flight, which lets the rate be measured again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from api import metrics
from api.fair_room import Demand, FairRoom
from shared.errors import Overloaded
from shared.models.catalog import Model
from shared.models.service_rate import ServiceRate
from shared.models.tasks.base import FirstGuesses
from shared.money import slo
from shared.tenants.plan import PRIORITIES, Priority

MIN_RETRY_S, MAX_RETRY_S = 0.25, 60.0
"""Bounds for `Retry-After`. OpenAI's 1.x and 2.x clients ignore values over 60 s."""
BATCH_SHARE = 0.5
"""Capacity for `batch` priority relative to `interactive` priority."""
INTERACTIVE_SHARE = 0.75
"""Minimum share of a worker's time reserved for `interactive` priority while both priorities have
items waiting.

Batches that contain urgent batch jobs get at most the remaining time
(workers/scheduling/priority_queue.py).
"""


class WaitEstimate(NamedTuple):
    """Estimated wait for one additional demand from a tenant."""

    is_busy: bool
    """True if any tenant has items in flight."""
    held: int
    """The tenant's items in flight, across both priorities."""
    wait_s: float | None
    """Expected wait until the demand's last item starts, not including the safety margin used for
    admission.

    None if items are in flight and the model's rate was not measured recently.
    """
    items_per_s: float | None
    """The model's service rate. None if the rate was not measured recently."""


class Admission:
    """Counts items in flight by model, priority, and tenant, and measures service rates.

    Each priority has separate limits for the instance and for each model.

    Args:
        max_in_flight: total capacity for `interactive` priority across all models, in items.
        models: all models in the catalog. Each model also has a separate limit.
        clock: monotonic seconds. Replaced by tests.
    """

    def __init__(
        self,
        max_in_flight: int,
        models: Iterable[Model] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {model.name: model for model in models}
        for name in self._models:
            # The autoscaler would treat a missing sample as lost metrics, not as zero demand.
            for priority in PRIORITIES:
                metrics.of_admission(name, priority)
        slo.show(self._models)
        self._clock = clock
        self._instance = _Rooms(max_in_flight)
        self._of_models: dict[str, _Rooms] = {}
        self._rates: dict[str, ServiceRate] = {}

    @property
    def in_flight(self) -> int:
        """Number of items in flight."""
        return self._instance.total

    def rate_of(self, model: str) -> ServiceRate:
        """Returns a model's measured service rate."""
        if model not in self._rates:
            known = self._models.get(model)
            self._rates[model] = ServiceRate(
                known.definition.first_guesses if known else FirstGuesses()
            )
        return self._rates[model]

    def admit(self, demand: Demand, *, remaining_s: float = math.inf) -> None:
        """Admits items whose results are due within `remaining_s`.

        Raises:
            Overloaded: the tenant's capacity on this instance or for the model is used up, or the
                response would be late. After `retry_after_s`, the same request would be admitted
                unless other requests arrive first.
        """
        rooms = self._rooms_of(demand.model)
        self._check(demand, rooms, remaining_s)
        if not rooms.total:
            self.rate_of(demand.model).start_busy_period(self._clock())
        for room in (self._instance.room(demand.priority), rooms.room(demand.priority)):
            room.take(demand)
        _, admitted, in_flight = metrics.of_admission(demand.model, demand.priority)
        admitted.inc(demand.items)
        in_flight.inc(demand.items)

    def check(self, demand: Demand, *, remaining_s: float = math.inf) -> None:
        """Checks whether `admit` would admit the items now, without admitting them.

        Raises:
            Overloaded: like `admit`.
        """
        self._check(demand, self._rooms_of(demand.model), remaining_s)

    def _check(self, demand: Demand, rooms: _Rooms, remaining_s: float) -> None:
        try:
            self._check_room(demand, rooms)
            if rooms.total:
                self._check_time(demand, rooms, remaining_s)
        except Overloaded:
            shed, _, _ = metrics.of_admission(demand.model, demand.priority)
            shed.inc(demand.items)
            if demand.counts_toward_slo:
                slo.count_refused(demand.model, demand.items)
            raise

    def estimate_wait(self, demand: Demand) -> WaitEstimate:
        """Returns the wait estimate for a demand, even if it would not be admitted."""
        rooms, rate = self._rooms_of(demand.model), self.rate_of(demand.model)
        held = sum(room.count_held(demand.tenant) for room in (rooms.interactive, rooms.batch))
        items_per_s = rate.measured_per_s(self._clock())
        wait_s = None if rooms.total else 0.0
        if rooms.total and items_per_s is not None:
            item_s = _item_s(rooms, demand, rate.item_s)
            wait_s = _wait_s(rooms, rate, _ahead(rooms, demand, enough=0.0), item_s)
        return WaitEstimate(rooms.total > 0, held, wait_s, items_per_s)

    def release(
        self,
        demand: Demand,
        *,
        answered: bool,
        was_late: bool = False,
        took_s: float | None = None,
    ) -> None:
        """Releases admitted items. Only items that finish in time count toward the service rate.

        Args:
            demand: the admitted demand, or part of it. All of its items are released together.
            answered: True if a worker finished them in time.
            was_late: True if their deadline passed without a result.
            took_s: how long the model took, in seconds.
        """
        rooms = self._rooms_of(demand.model)
        rate = self.rate_of(demand.model)
        if answered:
            rate.record_completed(self._clock(), demand.items, rooms.total, took_s)
        elif was_late:
            rate.record_late(self._clock())
        for room in (self._instance.room(demand.priority), rooms.room(demand.priority)):
            room.release(demand)
        _, _, in_flight = metrics.of_admission(demand.model, demand.priority)
        in_flight.dec(demand.items)

    def _check_room(self, demand: Demand, rooms: _Rooms) -> None:
        room = self._instance.room(demand.priority)
        if turns := room.turns_to_wait(demand):
            busy = [
                name for name, other in self._of_models.items() if other.room(demand.priority).total
            ]
            items_per_s = sum(1 / self.rate_of(name).item_s for name in busy)
            raise _full(
                f"{_describe_held(room, demand)}, and there is no room for more",
                turns / items_per_s,
            )
        room = rooms.room(demand.priority)
        if turns := room.turns_to_wait(demand):
            raise _full(
                f"{_describe_held(room, demand)} to run {demand.model}, and there is no room for "
                "more",
                turns * self.rate_of(demand.model).item_s,
            )

    def _check_time(self, demand: Demand, rooms: _Rooms, remaining_s: float) -> None:
        rate = self.rate_of(demand.model)
        item_s = _item_s(rooms, demand, rate.item_s * rate.margin)
        left_s = remaining_s - rate.service_s - rate.stalled_s(self._clock())
        ahead = _ahead(rooms, demand, enough=left_s / item_s)
        wait_s = _wait_s(rooms, rate, ahead, item_s)
        if wait_s > left_s:
            late_s = wait_s - left_s
            turns = _turns_until_earlier(rooms, demand, ahead, late_s / item_s)
            raise _full(
                f"the response would arrive {late_s:.3g} s after the deadline", turns * item_s
            )

    def _rooms_of(self, model: str) -> _Rooms:
        rooms = self._of_models.get(model)
        if rooms is None:
            known = self._models.get(model)
            rooms = self._of_models[model] = _Rooms(known.max_in_flight if known else math.inf)
        return rooms


class _Rooms:
    """The fair room for each priority."""

    def __init__(self, bound: float) -> None:
        self.interactive = FairRoom(bound)
        self.batch = FairRoom(bound * BATCH_SHARE)

    @property
    def total(self) -> int:
        return self.interactive.total + self.batch.total

    def room(self, priority: Priority) -> FairRoom:
        return self.batch if priority == "batch" else self.interactive


def _describe_held(room: FairRoom, demand: Demand) -> str:
    # Other tenants' load is not disclosed to this tenant.
    return f"{room.count_held(demand.tenant)} of your items are waiting for a worker"


def _ahead(rooms: _Rooms, demand: Demand, enough: float) -> float:
    """Returns how many items must leave before the demand's last item.

    The number is exact only if it exceeds `enough`.
    """
    if demand.priority == "batch":
        # This priority gets whatever time interactive work leaves unused.
        return rooms.total + demand.items - 1
    return rooms.interactive.ahead_of(demand, enough)


def _item_s(rooms: _Rooms, demand: Demand, item_s: float) -> float:
    """Returns the seconds per item, including the time that `batch` takes from interactive work."""
    return (
        item_s / INTERACTIVE_SHARE
        if demand.priority == "interactive" and rooms.batch.total
        else item_s
    )


def _wait_s(rooms: _Rooms, rate: ServiceRate, ahead: float, item_s: float) -> float:
    # The batch that is already running is never interrupted.
    return max(ahead * item_s, min(rooms.total * item_s, rate.service_s))


def _turns_until_earlier(rooms: _Rooms, demand: Demand, ahead: float, turns: float) -> float:
    """Returns how many items (at most all of them) must leave before `ahead` drops by `turns`.

    `ahead` shrinks with every item while the tenant has items in flight. After that, it shrinks
    only when other tenants have fewer items left than were counted.
    """
    room = rooms.room(demand.priority)
    own_turns = room.count_held(demand.tenant) / room.part_of(demand)
    if turns > own_turns:
        turns += max(0.0, rooms.total - (ahead - demand.items + 1))
    return min(turns + 1, rooms.total)


def _full(reason: str, retry_after_s: float) -> Overloaded:
    bounded_s = min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
    return Overloaded(f"{reason}; try again in {bounded_s:.2g} s", retry_after_s=bounded_s)
