"""Requests, and one region's API, which admits or rejects them like api/dispatch/admission.py.

The service rate is estimated by the same class that the API uses. One estimate represents all of a
region's instances: each of n instances has 1/n of the items and the rate, so they expect the same
waits. Tenants are not modeled, so all waiting items count as being ahead in line.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shared.models.catalog import Model
from shared.models.service_rate import ServiceRate

INTERACTIVE_SHARE = 0.75
BATCH_SHARE = 0.5
"""Equals BATCH_SHARE of api/dispatch/admission.py."""


class SimulatedJob:
    """A request, which is one message.

    It finishes only once, even if another reply arrives later.
    """

    __slots__ = (
        "arrived_s",
        "deadline_s",
        "has_ended",
        "is_batch_priority",
        "items",
        "prepared_s",
        "read_s",
        "share_s",
        "site",
        "spare_s",
        "started_s",
        "steps",
        "then",
    )

    def __init__(
        self,
        arrived_s: float,
        deadline_s: float,
        items: int,
        is_batch_priority: bool,
        site: ApiSite,
    ) -> None:
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.items = items
        self.is_batch_priority = is_batch_priority
        self.site = site
        self.started_s = -1.0
        self.prepared_s = 0.0
        """When its worker's I/O process has prepared it."""
        self.has_ended = False
        self.read_s = self.steps = 0.0
        """With continuous batching: the rest of the item's first step, and its other steps."""
        self.share_s = self.spare_s = 0.0
        """The batch's share_s and spare_s when the job was admitted."""
        self.then: Callable[[SimulatedJob], None] | None = None
        """Called when the job has been served, to start a flow's next step."""


class ApiSite:
    """A region's API instances, for one model.

    Args:
        concurrency: number of requests that one instance holds.
    """

    def __init__(self, region: str, model: Model, instances: int, concurrency: int) -> None:
        self.region = region
        self._most_requests = instances * concurrency
        self._most_items = instances * model.max_in_flight
        self.rate = ServiceRate(model.definition.first_guesses)
        self.interactive = self.batch = 0
        """Items in flight, by priority."""
        self.admitted = [0, 0]
        """Admitted items, by priority."""
        self.shed = [0, 0]
        """Rejected items, by priority."""
        self.requests = 0
        self.is_lost = False

    @property
    def in_flight(self) -> int:
        """Items in both priorities that are waiting for a worker."""
        return self.interactive + self.batch

    def admits(self, job: SimulatedJob, now_s: float) -> bool:
        """Admits or rejects a job."""
        if not self._has_room(job) or (self.in_flight and not self._is_in_time(job, now_s)):
            self.shed[job.is_batch_priority] += job.items
            return False
        self.take(job, now_s)
        self.admitted[job.is_batch_priority] += job.items
        return True

    def take(self, job: SimulatedJob, now_s: float) -> None:
        """Admits a job that must not be rejected: any flow step other than the first."""
        if self.in_flight == 0:
            self.rate.start_busy_period(now_s)
        self._count(job, 1)

    def _has_room(self, job: SimulatedJob) -> bool:
        if self.requests >= self._most_requests:
            return False
        if job.is_batch_priority:
            return self.batch + job.items <= self._most_items * BATCH_SHARE
        return self.interactive + job.items <= self._most_items

    def _is_in_time(self, job: SimulatedJob, now_s: float) -> bool:
        rate = self.rate
        item_s = rate.item_s * rate.margin
        if not job.is_batch_priority and self.batch:
            item_s /= INTERACTIVE_SHARE
        before = self.in_flight if job.is_batch_priority else self.interactive
        ahead = before + job.items - 1
        left_s = job.deadline_s - now_s - rate.service_s - rate.stalled_s(now_s)
        wait_s = max(ahead * item_s, min(self.in_flight * item_s, rate.service_s))
        return wait_s <= left_s

    def record_answered(self, job: SimulatedJob, now_s: float, took_s: float) -> None:
        """Records a response that arrived in time and spent `took_s` seconds in the model."""
        self.rate.record_completed(now_s, job.items, self.in_flight, took_s)
        self._count(job, -1)

    def gave_up(self, job: SimulatedJob, now_s: float) -> None:
        self.rate.record_late(now_s)
        self._count(job, -1)

    def record_lost(self, job: SimulatedJob) -> None:
        """Drops a request whose instance is gone."""
        self._count(job, -1)

    def _count(self, job: SimulatedJob, sign: int) -> None:
        self.requests += sign
        if job.is_batch_priority:
            self.batch += sign * job.items
        else:
            self.interactive += sign * job.items

    def count_published(self, broker_wait_s: float) -> float:
        """Returns how many items the publish window admits (api/dispatch/model_window.py)."""
        stay_s = broker_wait_s + 2 * self.rate.service_s
        return min(self.in_flight, math.ceil(stay_s / self.rate.item_s))
