"""The worker's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from workers.runtime.protocol import BatchResult

ITEMS = Counter(
    "penstock_worker_items_total", "Items ended, by status and cache level", ["status", "cache"]
)
WAITING = Gauge("penstock_worker_items_waiting", "Items that wait for a model process")
WAIT_SECONDS = Histogram(
    "penstock_worker_wait_seconds",
    "Seconds an item waits for its batch, by model",
    ["model"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
ROUND_TRIP = Gauge(
    "penstock_worker_round_trip_seconds", "Seconds in which the broker answers, smoothed", ["model"]
)
HELD_MAX = Gauge(
    "penstock_worker_jobs_held_max",
    "Jobs that the worker may hold at this distance from the broker",
    ["model", "lane"],
)
RESIDENT = Gauge(
    "penstock_worker_resident_model", "Model processes that hold the model in memory", ["model"]
)
LOADS = Counter("penstock_worker_model_loads_total", "Models brought in for a batch")
EVICTIONS = Counter("penstock_worker_model_evictions_total", "Models dropped to make room")
SWITCH_SECONDS = Counter(
    "penstock_worker_switch_seconds_total", "Seconds of model processes spent on switching"
)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCH_ITEMS = Histogram(
    "penstock_worker_batch_items",
    "Items in a batch. Where items join and leave between steps, each counts by itself.",
    buckets=_ITEMS,
)
ITEMS_AT_A_TIME = Histogram(
    "penstock_worker_items_at_a_time",
    "Items in a batch. Where items join and leave between steps, how many were in on average while "
    "one was.",
    buckets=_ITEMS,
)
INFERENCE_SECONDS = Histogram(
    "penstock_worker_inference_seconds",
    "Seconds a batch takes in the model. Where items join and leave between steps, the part of one "
    "in the time of its steps.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
SPARE_SECONDS = Counter(
    "penstock_worker_spare_seconds_total",
    "Of penstock_worker_inference_seconds, what more items could have used for nothing: where "
    "items join and leave between steps, the part of the free room in the fixed time of the steps.",
)
BUSY_RATIO = Gauge(
    "penstock_worker_busy_ratio",
    "Part of what the model processes could do in the last minute that they did: the time of "
    "batches, less what was spare in it. `batch` priority has only what may wait for hours: its "
    "predictions count as interactive, because they have a deadline.",
    ["lane"],
)
REAL_WORK = Counter(
    "penstock_worker_real_work_total", "Tokens or pixel-steps of the items in all batches"
)
PADDED_WORK = Counter("penstock_worker_padded_work_total", "The same as computed, padding included")
HANDED_BACK = Counter(
    "penstock_worker_jobs_handed_back_total", "Jobs given back to the broker unfinished"
)
CANARY_FORWARDED = Counter(
    "penstock_worker_canary_forwarded_total",
    "Jobs of a canary that were handed to the other revision. failed: an item failed. late: half "
    "of its time had passed. taken_back, drained: the canary gets no requests any more, or has no "
    "worker.",
    ["reason"],
)
UNDECODABLE = Counter(
    "penstock_worker_undecodable_messages_total", "Messages on the jobs topic that were no job"
)
REPLIES_REFUSED = Counter(
    "penstock_worker_replies_refused_total", "Replies whose inbox does not exist any more"
)
MODEL_PROCESS_DEATHS = Counter(
    "penstock_worker_model_process_deaths_total", "Model processes that died or hung"
)


def observe_batch(done: BatchResult, exemplar: dict[str, str] | None = None) -> None:
    """Records one batch. `exemplar` names a trace of it."""
    items = len(done.results)
    BATCH_ITEMS.observe(items)
    ITEMS_AT_A_TIME.observe(done.batch_items)
    # inference_ms is that of all that share the time. Each of them reports it when it ends.
    INFERENCE_SECONDS.observe(done.inference_ms / 1000 * items / done.batch_items, exemplar)
    SPARE_SECONDS.inc(done.spare_s)
    REAL_WORK.inc(done.real_work)
    PADDED_WORK.inc(done.padded_work)
    if done.switched is not None:
        LOADS.inc(done.switched.loads)
        EVICTIONS.inc(done.switched.evictions)
        SWITCH_SECONDS.inc(done.switched.switch_s)
