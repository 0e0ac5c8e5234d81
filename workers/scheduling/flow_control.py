"""Limits how many jobs a worker holds.

The model should never wait for the broker. With a nearby broker, two batches per process are
enough: one running and one waiting. A finished job's permit becomes available again only after its
reply and ack have traveled to the broker and the next job has come back. The worker therefore also
holds the jobs that its model can compute in that time, which is its rate times the round trip, like
the bandwidth-delay product of a network path. The number is limited because if a worker dies, its
jobs have to wait until their leases expire and then be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.broker.transport import (
    SmoothedDuration,
    Subscription,
)
from shared.models.service_rate import HeldAhead
from workers import metrics
from workers.scheduling.job import QueuedItem


class FlowControl:
    """The number of jobs that one subscription holds.

    Args:
        held: the number of jobs for a nearby broker, which is two batches per process.
        completion: the time from when a job's last item finishes until the job is acked.
        ack_linger_s: how long acks wait so that they can be sent together.
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
        self._ahead = HeldAhead()

    def batch_ended(self, batch: Sequence[QueuedItem], took_s: float, now_s: float) -> None:
        """Measures the rate, and updates the number of jobs to hold.

        Args:
            now_s: current time in monotonic seconds.
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
