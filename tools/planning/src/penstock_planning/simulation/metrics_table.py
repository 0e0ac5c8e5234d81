"""The metrics that rules can use. A rule that uses a new metric needs a row here.

A row returns a target's values at a given time, with the labels that distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock_planning.simulation.api_site import ApiSite
from penstock_planning.simulation.worker import SimulatedWorker

Labels = tuple[tuple[str, str], ...]
Values = tuple[tuple[Labels, float], ...]

INTERACTIVE: Labels = (("lane", "interactive"),)
BATCH: Labels = (("lane", "batch"),)
BUSY_DIGITS = 3
"""Equals DIGITS of workers/metrics.py."""

LOST_GPUS = "penstock_worker_lost_gpus_total"
"""A counter per pod. Only alerts query it."""
XID_ERRORS = "DCGM_FI_DEV_XID_ERRORS"
"""DCGM's gauge for each GPU: the last driver error."""

OF_API: dict[str, Callable[[ApiSite], Values]] = {
    "penstock_api_items_in_flight": lambda site: (
        (INTERACTIVE, site.interactive),
        (BATCH, site.batch),
    ),
    "penstock_api_items_shed_total": lambda site: (
        (INTERACTIVE, site.shed[0]),
        (BATCH, site.shed[1]),
    ),
    "penstock_api_items_admitted_total": lambda site: (
        (INTERACTIVE, site.admitted[0]),
        (BATCH, site.admitted[1]),
    ),
}
"""Metrics of each region's API, as in api/metrics.py, plus the labels `model` and `location`."""

UNDELIVERED = "pubsub_googleapis_com:subscription_num_undelivered_messages"
"""Metrics per subscription, labeled `subscription_id` and `monitored_resource`."""


def _of_models(
    value: Callable[[SimulatedWorker], float],
) -> Callable[[SimulatedWorker, float], Values]:
    """Returns a counter with the label `model`, one per model of a shared worker."""
    return lambda worker, now_s: tuple(
        ((("model", part.model),), value(part)) for part in worker.parts or (worker,)
    )


def _busy_ratio(worker: SimulatedWorker, now_s: float) -> Values:
    ratios = [part.busy_ratio(now_s) for part in worker.parts or (worker,)]
    interactive, batch = (sum(parts) for parts in zip(*ratios, strict=True))
    return (
        (INTERACTIVE, round(interactive, BUSY_DIGITS)),
        (BATCH, round(batch, BUSY_DIGITS)),
    )


OF_WORKERS: dict[str, Callable[[SimulatedWorker, float], Values]] = {
    "penstock_worker_inference_seconds_sum": _of_models(lambda worker: worker.inference_s),
    "penstock_worker_spare_seconds_total": _of_models(lambda worker: worker.spare_s),
    "penstock_worker_inference_seconds_count": _of_models(lambda worker: worker.batches),
    "penstock_worker_batch_items_sum": _of_models(lambda worker: worker.items),
    "penstock_worker_batch_items_count": _of_models(lambda worker: worker.batches),
    "penstock_worker_items_waiting": lambda worker, now_s: (
        ((), sum(len(held) for part in worker.parts or (worker,) for held in part.held)),
    ),
    "penstock_worker_busy_ratio": _busy_ratio,
}
"""Metrics of each pod, as in workers/metrics.py, plus the labels `worker`, `pod` and `location`."""


KNOWN = frozenset((*OF_WORKERS, *OF_API, UNDELIVERED))
