"""Sets how many jobs a worker holds, by what it measures (shared/flow_control.py has the rule)."""

from __future__ import annotations

from collections.abc import Sequence

from shared.flow_control import HeldAhead
from shared.transport import SmoothedDuration, Subscription
from workers import metrics
from workers.job import QueuedItem


class FlowControl:
    """The number of jobs that one subscription holds.

    Args:
        model: the name of the model, for metrics.
        lane: of the subscription, for metrics.
        subscription: whose number it sets.
        held: the number near the broker: two batches for each process.
        processes: of the worker.
        completion: from the end of a job's last item to its ack.
        ack_linger_s: how long acks wait to be sent together.
    """

    def __init__(
        self,
        model: str,
        lane: str,
        subscription: Subscription,
        held: int,
        processes: int,
        completion: SmoothedDuration,
        ack_linger_s: float,
    ) -> None:
        self._round_trips = metrics.ROUND_TRIP.labels(model)
        self._held_max = metrics.HELD_MAX.labels(model, lane)
        self._subscription = subscription
        self._held = held
        self._processes = processes
        self._completion = completion
        self._ack_linger_s = ack_linger_s
        self._ahead = HeldAhead()

    def batch_ended(self, batch: Sequence[QueuedItem], took_s: float, now_s: float) -> None:
        """Measures the rate, and sets what is to be held.

        Args:
            batch: its items. Several may be of one job.
            took_s: how long it ran.
            now_s: monotonic seconds.
        """
        jobs = sum(
            1 / len(pulled.items)
            for queued in batch
            for pulled, _ in queued.waiters
            if pulled.subscription is self._subscription
        )
        rate = self._processes * jobs / max(took_s, 1e-3)
        gap_s = self._completion.most_s + self._ack_linger_s + self._subscription.round_trip.most_s
        held = self._held + self._ahead.batch_ended(rate, took_s, gap_s, now_s)
        self._subscription.hold(held)
        self._held_max.set(held)
        self._round_trips.set(self._subscription.round_trip.mean_s)
