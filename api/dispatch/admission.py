"""How much an instance takes on: bounds what waits for a worker, and refuses what would be answered too late.

The dispatcher asks before it publishes. How long a request would wait is told from what is in flight before it and from
how fast items leave (api/dispatch/service_rate.py). Estimates err, so whoever finds nothing in flight is let in: it
measures anew.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

from api import metrics
from api.dispatch.service_rate import Pace
from shared.catalog import Model
from shared.errors import Overloaded
from shared.tasks.base import FirstGuesses

SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.25, 60.0
"""Bounds of what callers are told; OpenAI's client 1.x and 2.x ignore more than 60 s."""
BATCH_SHARE = 0.5
"""Of every bound, the most that the lane `batch` may take: interactive requests find room beside it."""
INTERACTIVE_TURNS = 0.75
"""Of a worker's batches, those that the interactive lane has for sure while both wait."""


class Admission:
    """Counts items in flight, by model and lane, and measures how fast they leave.

    A request is let in while fewer items than the bounds are in flight, and then with all its items: otherwise a large
    request would never find room beside small ones. So the true bound is the said one plus one request.

    Args:
        max_in_flight: items in flight from which on requests are refused.
        models: the catalog's; each has a bound of its own.
        clock: monotonic seconds, for tests.
    """

    def __init__(
        self, max_in_flight: int, models: Iterable[Model] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_in_flight = max_in_flight
        self._models = {model.name: model for model in models}
        self._clock = clock
        self._in_flight: Counter[tuple[str, str]] = Counter()
        self._paces: dict[str, Pace] = {}

    @property
    def in_flight(self) -> int:
        """Items in flight now."""
        return self._in_flight.total()

    def admit(self, model: str, items: int, *, remaining_s: float = math.inf, lane: str = "") -> None:
        """Takes `items` of `model` in, which are to be answered within `remaining_s`.

        Raises:
            Overloaded: the instance or the model is full, or the answer would come too late; after `retry_after_s` the
                same request would be let in, if no other came in between.
        """
        ahead = self._of_model(model)
        self.check(model, items, remaining_s=remaining_s, lane=lane)
        if not ahead:
            self._pace(model).start(self._clock())
        self._in_flight[model, lane] += items
        metrics.in_flight(model).inc(items)

    def check(self, model: str, items: int, *, remaining_s: float = math.inf, lane: str = "") -> None:
        """Whether `admit` would take them in now, for those who want to know before they do the work of asking.

        Raises:
            Overloaded: as `admit`.
        """
        try:
            self._check_room(model, lane)
            if self._of_model(model):
                self._check_time(self._pace(model), model, items, remaining_s, lane)
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
        """Lets `items` go; `answered` ones tell how fast items leave, given up ones don't.

        Args:
            model: as admitted.
            items: that leave together.
            answered: whether a worker had them, and in time.
            was_late: whether their deadline passed before there was an answer.
            took_s: the time the model took for them.
            lane: as admitted.
        """
        if answered:
            self._pace(model).end(self._clock(), items, self._of_model(model), took_s)
        elif was_late:
            self._pace(model).end_late(self._clock())
        self._in_flight[model, lane] -= items
        metrics.in_flight(model).dec(items)
        if not self._in_flight[model, lane]:
            del self._in_flight[model, lane]

    def _check_room(self, model: str, lane: str) -> None:
        known = self._models.get(model)
        share = BATCH_SHARE if lane else 1.0
        of_lane = [(name, count) for (name, of), count in self._in_flight.items() if not lane or of == lane]
        total, of_model = sum(count for _, count in of_lane), sum(count for name, count in of_lane if name == model)
        if total >= self._max_in_flight * share:
            rate = sum(1 / self._pace(name).item_s for name in {name for name, _ in of_lane})
            over = total - self._max_in_flight * share + 1
            raise _full(f"{total} items are waiting for a worker, the most that are taken on", over / rate)
        if known is not None and of_model >= known.max_in_flight * share:
            over = of_model - known.max_in_flight * share + 1
            raise _full(
                f"{of_model} items of {model} are waiting, the most that are taken on", over * self._pace(model).item_s
            )

    def _check_time(self, pace: Pace, model: str, items: int, remaining_s: float, lane: str) -> None:
        before = self._of_model(model) if lane else self._in_flight[model, ""]
        item_s = pace.item_s * pace.margin
        if not lane and self._of_model(model) > before:
            item_s /= INTERACTIVE_TURNS
        wait_s = (before + items - 1) * item_s + pace.stalled_s(self._clock())
        late_s = wait_s + pace.usual_s - remaining_s
        if late_s > 0:
            # Once nothing is before it, it is let in whatever the estimate.
            retry_after_s = min(late_s + item_s, self._of_model(model) * item_s)
            raise _full(f"the answer would come {late_s:.3g} s after its deadline", retry_after_s)

    def _of_model(self, model: str) -> int:
        return self._in_flight[model, ""] + self._in_flight[model, "batch"]

    def _pace(self, model: str) -> Pace:
        if model not in self._paces:
            known = self._models.get(model)
            self._paces[model] = Pace(known.definition.first_guesses if known else FirstGuesses())
        return self._paces[model]


def _full(reason: str, retry_after_s: float) -> Overloaded:
    bounded_s = min(max(retry_after_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
    return Overloaded(f"{reason}; try again in {bounded_s:.2g} s", retry_after_s=bounded_s)
