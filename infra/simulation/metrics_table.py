"""The metrics that rules may ask for: one row each. A new metric of a rule needs a row here."""

from __future__ import annotations

from collections.abc import Callable

from infra.simulation.api_site import ApiSite
from infra.simulation.worker import Worker

OF_WORKERS: dict[str, Callable[[Worker], float]] = {
    "penstock_worker_inference_seconds_sum": lambda worker: worker.inference_s,
    "penstock_worker_inference_seconds_count": lambda worker: worker.batches,
    "penstock_worker_batch_items_sum": lambda worker: worker.items,
    "penstock_worker_batch_items_count": lambda worker: worker.batches,
    "penstock_worker_items_waiting": lambda worker: sum(map(len, worker.held)),
}
"""Of each pod, labeled `worker` and `pod`: what workers/metrics.py has, as a pod shows it."""

OF_API: dict[str, Callable[[ApiSite], float]] = {
    "penstock_api_items_in_flight": lambda site: site.in_flight,
}
"""Of each region's API, labeled `model` and `location`: what api/metrics.py has."""

UNDELIVERED = "pubsub_googleapis_com:subscription_num_undelivered_messages"
"""Of each subscription, labeled `subscription_id` and `monitored_resource`."""

KNOWN = frozenset((*OF_WORKERS, *OF_API, UNDELIVERED))
