"""How many jobs a worker holds, so that its model never waits for the broker.

Two batches for each process, one that runs and one that waits, are enough for a broker that is
near. The permit of a job that ends is filled again only after its reply and its ack have traveled
to the broker, and the next job from there. So the worker also holds what its model computes in that
time: its rate times the round trip, the bandwidth-delay product of a network path.

It is bounded: when a worker dies, what it held waits for its leases to end, and is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shared.transport import SmoothedDuration, Subscription
from workers import metrics
from workers.job import QueuedItem

MAX_AHEAD_S = 1.0
"""At most the work of this time is held beyond two batches."""
MAX_AHEAD_MESSAGES = 8192
FADE_S = 60.0
"""An earlier rate counts for a third after this time, so that less is held only slowly."""


class FlowControl:
    """The number of jobs that one subscription holds.

    Args:
        model: the name of the model, for metrics.
        priority: of the subscription, for metrics.
        subscription: whose number it sets.
        held: the number near the broker: two batches for each process.
        processes: of the worker.
        completion: from the end of a job's last item to its ack.
        ack_linger_s: how long acks wait to be sent together.
    """

    def __init__(
        self,
        model: str,
        priority: str,
        subscription: Subscription,
        held: int,
        processes: int,
        completion: SmoothedDuration,
        ack_linger_s: float,
    ) -> None:
        self._round_trips = metrics.ROUND_TRIP.labels(model)
        self._held_max = metrics.HELD_MAX.labels(model, priority)
        self._subscription = subscription
        self._held = held
        self._processes = processes
        self._completion = completion
        self._ack_linger_s = ack_linger_s
        self._jobs_per_s = 0.0
        self._measured_at_s = 0.0

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
        fade = math.exp((self._measured_at_s - now_s) / FADE_S)
        rate = self._processes * jobs / max(took_s, 1e-3)
        self._jobs_per_s = max(rate, self._jobs_per_s * fade)
        self._measured_at_s = now_s
        held = self._held + self._ahead(took_s)
        self._subscription.hold(held)
        self._held_max.set(held)
        self._round_trips.set(self._subscription.round_trip.mean_s)

    def _ahead(self, batch_s: float) -> int:
        """The jobs beyond two batches. Half of the batch that waits covers half of its time."""
        gap_s = self._completion.most_s + self._ack_linger_s + self._subscription.round_trip.most_s
        ahead_s = min(max(0.0, gap_s - batch_s / 2), MAX_AHEAD_S)
        return min(math.ceil(self._jobs_per_s * ahead_s), MAX_AHEAD_MESSAGES)
