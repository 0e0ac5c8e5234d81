"""Admission control: bounds the items that wait for workers, and refuses what would be late.

The dispatcher checks admission before it publishes. The expected wait follows from the items in
flight and the service rate (api/dispatch/service_rate.py). Estimates can be wrong, so a request
that finds no item in flight is always admitted: it measures the rate again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

from api import metrics
from api.dispatch.service_rate import ServiceRate
from shared.catalog import Model
from shared.errors import Overloaded
from shared.tasks.base import FirstGuesses

SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.25, 60.0
"""Bounds of `Retry-After`. OpenAI's clients 1.x and 2.x ignore more than 60 s."""
BATCH_SHARE = 0.5
"""The share of every bound that the lane `batch` may use. The rest is for interactive requests."""
INTERACTIVE_SHARE = 0.75
"""The share of a worker's batches that the interactive lane gets at least, while both lanes
wait."""


class Admission:
    """Counts items in flight by model and lane, and measures the service rate of each model.

    A request is admitted, with all of its items, while fewer items than the bounds are in flight.
    Otherwise large requests would never get in beside small ones. So the real bound is the
    configured one plus one request.

    Args:
        max_in_flight: requests are refused from this number of items in flight.
        models: the models of the catalog. Each has its own bound as well.
        clock: returns monotonic seconds. Tests replace it.
    """

    def __init__(
        self,
        max_in_flight: int,
        models: Iterable[Model] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._models = {model.name: model for model in models}
        self._clock = clock
        self._in_flight: Counter[tuple[str, str]] = Counter()
        self._rates: dict[str, ServiceRate] = {}

    @property
    def in_flight(self) -> int:
        """How many items are in flight."""
        return self._in_flight.total()

    def admit(
        self, model: str, items: int, *, remaining_s: float = math.inf, lane: str = ""
    ) -> None:
        """Admits `items` of `model`, which must be answered within `remaining_s`.

        Raises:
            Overloaded: the instance or the model is full, or the answer would be late. After
                `retry_after_s` the same request would be admitted, if no other came in between.
        """
        ahead = self._of_model(model)
        self.check(model, items, remaining_s=remaining_s, lane=lane)
        if not ahead:
            self._rate(model).start_busy_period(self._clock())
        self._in_flight[model, lane] += items
        metrics.in_flight(model).inc(items)

    def check(
        self, model: str, items: int, *, remaining_s: float = math.inf, lane: str = ""
    ) -> None:
        """Checks whether `admit` would admit them now, without doing it.

        Raises:
            Overloaded: as `admit`.
        """
        try:
            self._check_room(model, lane)
            if self._of_model(model):
                self._check_time(self._rate(model), model, items, remaining_s, lane)
        except Overloaded:
            metrics.SHED.labels(model).inc(items)
            raise

    def release(
        self,
        model: str,
        items: int,
        *,
        answered: bool,
        was_late: bool = False,
        took_s: float | None = None,
        lane: str = "",
    ) -> None:
        """Releases `items` that were admitted. Only answered items count for the service rate.

        Args:
            model: as admitted.
            items: how many end together.
            answered: whether a worker computed them in time.
            was_late: whether their deadline passed without an answer.
            took_s: the time that the model took.
            lane: as admitted.
        """
        if answered:
            self._rate(model).record_completed(self._clock(), items, self._of_model(model), took_s)
        elif was_late:
            self._rate(model).record_late(self._clock())
        self._in_flight[model, lane] -= items
        metrics.in_flight(model).dec(items)
        if not self._in_flight[model, lane]:
            del self._in_flight[model, lane]

    def _check_room(self, model: str, lane: str) -> None:
        known = self._models.get(model)
        share = BATCH_SHARE if lane else 1.0
        of_lane = [
            (name, count) for (name, of), count in self._in_flight.items() if not lane or of == lane
        ]
        total, of_model = (
            sum(count for _, count in of_lane),
            sum(count for name, count in of_lane if name == model),
        )
        if total >= self._max_in_flight * share:
            items_per_s = sum(1 / self._rate(name).item_s for name in {name for name, _ in of_lane})
            over = total - self._max_in_flight * share + 1
            raise _full(
                f"{total} items are waiting for a worker, the most that are taken on",
                over / items_per_s,
            )
        if known is not None and of_model >= known.max_in_flight * share:
            over = of_model - known.max_in_flight * share + 1
            raise _full(
                f"{of_model} items of {model} are waiting, the most that are taken on",
                over * self._rate(model).item_s,
            )

    def _check_time(
        self, rate: ServiceRate, model: str, items: int, remaining_s: float, lane: str
    ) -> None:
        before = self._of_model(model) if lane else self._in_flight[model, ""]
        item_s = rate.item_s * rate.margin
        if not lane and self._of_model(model) > before:
            item_s /= INTERACTIVE_SHARE
        wait_s = (before + items - 1) * item_s + rate.stalled_s(self._clock())
        late_s = wait_s + rate.service_s - remaining_s
        if late_s > 0:
            # With no item in flight it is admitted, whatever the estimate says.
            retry_after_s = min(late_s + item_s, self._of_model(model) * item_s)
            raise _full(f"the answer would come {late_s:.3g} s after its deadline", retry_after_s)

    def _of_model(self, model: str) -> int:
        return self._in_flight[model, ""] + self._in_flight[model, "batch"]

    def _rate(self, model: str) -> ServiceRate:
        if model not in self._rates:
            known = self._models.get(model)
            self._rates[model] = ServiceRate(
                known.definition.first_guesses if known else FirstGuesses()
            )
        return self._rates[model]


def _full(reason: str, retry_after_s: float) -> Overloaded:
    bounded_s = min(max(retry_after_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
    return Overloaded(f"{reason}; try again in {bounded_s:.2g} s", retry_after_s=bounded_s)
