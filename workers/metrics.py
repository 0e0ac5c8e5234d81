"""A worker's measurements of itself: Prometheus metrics and utilization.

Utilization is used for the `worker_hours` table and the autoscaler. `ProcessTimes` measures
utilization so that idle GPU time is attributed as well. `UtilizationReports` writes a report every
five minutes and at shutdown. A worker that is killed loses only the time since its last report,
which is at most five minutes. The worker's event loop updates `BusyRatio`, and the thread that
serves scrapes reads it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol, Self

from prometheus_client import Counter, Gauge, Histogram

from shared.metric_types import CountingHistogram
from shared.models.catalog import Model
from shared.money.charge import device_share_of
from shared.process.concurrency import BackgroundTask
from shared.tenants.plan import PRIORITIES, Priority
from shared.usage.worker_hour import HOUR_S, WorkerHour
from workers.identity import WorkerInfo
from workers.models.reports import BatchResult, ResidencyReport

ITEMS = Counter(
    "penstock_worker_items_total", "Items ended, by status and cache level", ["status", "cache"]
)
WAITING = Gauge("penstock_worker_items_waiting", "Items waiting for a model process")
WAIT_SECONDS = CountingHistogram(
    "penstock_worker_wait_seconds",
    "Seconds that an item waits for its batch, by model",
    ["model"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
ROUND_TRIP = Gauge(
    "penstock_worker_round_trip_seconds",
    "Smoothed round-trip time to the broker in seconds",
    ["model"],
)
HELD_MAX = Gauge(
    "penstock_worker_jobs_held_max",
    "Jobs that the worker may hold at this distance from the broker",
    ["model", "lane"],
)
RESIDENT = Gauge(
    "penstock_worker_resident_model", "Model processes that have the model in memory", ["model"]
)
LOADS = Counter("penstock_worker_model_loads_total", "Models loaded for a batch")
EVICTIONS = Counter("penstock_worker_model_evictions_total", "Models dropped to make room")
SWITCH_SECONDS = Counter(
    "penstock_worker_switch_seconds_total", "Seconds of model processes spent on switching"
)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCH_ITEMS = Histogram(
    "penstock_worker_batch_items",
    "Items in a batch, by model. If items join and leave between steps, each counts separately.",
    ["model"],
    buckets=_ITEMS,
)
ITEMS_AT_A_TIME = Histogram(
    "penstock_worker_items_at_a_time",
    "Items in a batch. If items join and leave between steps, the average number while an item "
    "was computed.",
    buckets=_ITEMS,
)
INFERENCE_SECONDS = Histogram(
    "penstock_worker_inference_seconds",
    "Seconds that a batch takes in the model, by model. If items join and leave between steps, "
    "the share of one item in the time of its steps.",
    ["model"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
SPARE_SECONDS = Counter(
    "penstock_worker_spare_seconds_total",
    "Part of penstock_worker_inference_seconds in which more items could have been computed for "
    "free. If items join and leave between steps, the share of free room in the fixed time of "
    "the steps.",
    ["model"],
)
BUSY_RATIO = Gauge(
    "penstock_worker_busy_ratio",
    "Fraction of the model processes' capacity that was used in the last minute: the time of "
    "batches, minus the spare part of them. `batch` priority includes only work that may wait "
    "for hours: its predictions count as interactive, because they have a deadline.",
    ["lane"],
)
REAL_WORK = Counter(
    "penstock_worker_real_work_total", "Tokens or pixel-steps of the items in all batches"
)
PADDED_WORK = Counter(
    "penstock_worker_padded_work_total", "The same work as computed, including padding"
)
EAGER_CALLS = Counter(
    "penstock_worker_eager_calls_total",
    "Calls of compiled image models that ran without compiled code, even though the image has the "
    "default size, by model",
    ["model"],
)
LOST_GPUS = Counter(
    "penstock_worker_lost_gpus_total", "Model processes that ended because their GPU failed"
)
HANDED_BACK = Counter(
    "penstock_worker_jobs_handed_back_total", "Unfinished jobs returned to the broker"
)
CANARY_COMPARED = Counter(
    "penstock_worker_canary_compared_total",
    "Outputs of a canary that this worker compared with the other revision, by whether they "
    "were close.",
    ["within"],
)
CANARY_FORWARDED = Counter(
    "penstock_worker_canary_forwarded_total",
    "Jobs of a canary that were handed to the other revision. failed: an item failed. late: half "
    "of its time had passed. taken_back, drained: the canary no longer receives requests, or has "
    "no worker.",
    ["reason"],
)
UNDECODABLE = Counter(
    "penstock_worker_undecodable_messages_total",
    "Messages on the jobs topic that are not valid jobs",
)
REPLIES_REFUSED = Counter(
    "penstock_worker_replies_refused_total", "Replies whose inbox no longer exists"
)
MODEL_PROCESS_DEATHS = Counter(
    "penstock_worker_model_process_deaths_total", "Model processes that died or hung"
)

State = Literal["busy", "idle", "loading"]
REPORT_EVERY_S = 300.0
"""Interval between reports of worker time. It divides an hour evenly, so that every hour ends with
a report.
"""

FADE_S = 30.0
"""After this much time, a second's weight has decayed to about a third, so the ratio covers about a
minute.

With a shorter time, batches that take seconds would make the ratio jump. With a longer one, the
ratio would lag behind the load.
"""
DIGITS = 3
"""Decimal places in a busy share. A decaying average never reaches 0, but an idle worker's share
must.
"""


class BatchMetrics:
    """Records one model's batches. Counters start at 0, so rates include the first batch."""

    def __init__(self, model: str) -> None:
        self._items = BATCH_ITEMS.labels(model)
        self._inference_seconds = INFERENCE_SECONDS.labels(model)
        self._spare_seconds = SPARE_SECONDS.labels(model)
        self._eager_calls = EAGER_CALLS.labels(model)

    def observe(self, done: BatchResult, exemplar: dict[str, str] | None = None) -> None:
        """Records one batch. `exemplar` is the ID of one of the batch's traces."""
        items = len(done.results)
        self._items.observe(items)
        ITEMS_AT_A_TIME.observe(done.batch_items)
        # inference_ms covers all items processed together. Each item reports it when it finishes.
        inference_s = done.inference_ms / 1000 * items / done.batch_items
        self._inference_seconds.observe(inference_s, exemplar)
        self._spare_seconds.inc(done.spare_s)
        self._eager_calls.inc(done.eager_calls)
        REAL_WORK.inc(done.real_work)
        PADDED_WORK.inc(done.padded_work)
        if done.switched is not None:
            LOADS.inc(done.switched.loads)
            EVICTIONS.inc(done.switched.evictions)
            SWITCH_SECONDS.inc(done.switched.switch_s)


def steady_clock() -> Callable[[], float]:
    """Returns a clock of Unix seconds that is unaffected by changes to the system clock."""
    ahead_s = time.time() - time.monotonic()
    return lambda: ahead_s + time.monotonic()


@dataclass(slots=True)
class TimeReport:
    """Activity since `since_s`, all within one hour. Unix seconds."""

    since_s: float
    until_s: float = 0.0
    seconds: dict[State, float] = field(
        default_factory=lambda: {"busy": 0.0, "idle": 0.0, "loading": 0.0}
    )
    """Seconds per state, which add up to the reported time. With several processes, they are
    averages.
    """
    batches: int = 0
    items: int = 0
    loads: int = 0


class ProcessTimes:
    """Adds up the time that model processes spend in each state.

    Starts with one process, which is loading.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or steady_clock()
        self._states: list[State] = ["loading"]
        self.started_at_s = self._at_s = self._clock()
        self._open = TimeReport(self._at_s)
        self._closed: list[TimeReport] = []

    def now_s(self) -> float:
        return self._clock()

    @property
    def processes(self) -> int:
        return len(self._states)

    def start(self, processes: int) -> None:
        self._advance()
        self._states = ["idle"] * processes

    def enter(self, process: int, state: State) -> None:
        """Records that a process, identified by its index, switches to another state."""
        if self._states[process] != state:
            self._advance()
            self._states[process] = state

    def batch_ended(self, done: BatchResult) -> None:
        """Counts a batch.

        Time spent loading models for the batch doesn't count toward the batch time.
        """
        self._advance()
        self._open.batches += 1
        self._open.items += len(done.results)
        if done.switched is not None:
            seconds = self._open.seconds
            # Time counted as busy in an earlier report stays busy.
            moved_s = min(done.switched.switch_s / len(self._states), seconds["busy"])
            seconds["busy"] -= moved_s
            seconds["loading"] += moved_s

    def count_loads(self, residency: ResidencyReport) -> None:
        """Counts the loads reported by a process."""
        self._open.loads += residency.loads

    def take(self) -> list[TimeReport]:
        """Returns everything since the last call, in reports that each stay within one hour."""
        self._advance()
        if self._at_s > self._open.since_s:
            self._close(self._at_s)
        reports, self._closed = self._closed, []
        return reports

    def _advance(self) -> None:
        now_s = self._clock()
        while now_s >= (end_s := hour_of(self._open.since_s) + HOUR_S):
            self._add(end_s)
            self._close(end_s)
        self._add(now_s)

    def _add(self, until_s: float) -> None:
        each_s = (until_s - self._at_s) / len(self._states)
        for state in self._states:
            self._open.seconds[state] += each_s
        self._at_s = until_s

    def _close(self, until_s: float) -> None:
        self._open.until_s = until_s
        self._closed.append(self._open)
        self._open = TimeReport(until_s)


def hour_of(at_s: float) -> float:
    """Returns the start of the hour (UTC) that contains a given time. Unix seconds."""
    return at_s - at_s % HOUR_S


class HourSink(Protocol):
    """Accepts `worker_hours` rows. Never blocks and never raises."""

    def write_report(self, row: WorkerHour) -> None:
        """Queues one row for writing."""


class UtilizationReports:
    """Writes reports of a worker's time. An async context manager.

    Args:
        info: worker facts. `device` and the fields that depend on it are unknown at first.
        every_s: seconds between two reports.
    """

    def __init__(
        self,
        times: ProcessTimes,
        sink: HourSink,
        models: Sequence[Model],
        info: WorkerInfo,
        every_s: float = REPORT_EVERY_S,
    ) -> None:
        self.info = info
        self._times = times
        self._sink = sink
        self._models = models
        self._every_s = every_s
        self._number = 0
        self._reporting = BackgroundTask("reporting the time of models", self._report)

    async def __aenter__(self) -> Self:
        self._reporting.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._reporting.stop()
        self.write()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._every_s - self._times.now_s() % self._every_s)
            self.write()

    def write(self) -> None:
        for report in self._times.take():
            self._sink.write_report(self._row(report))

    def _row(self, report: TimeReport) -> WorkerHour:
        self._number += 1
        info, names = self.info, [model.name for model in self._models]
        return WorkerHour(
            row_id=f"{info.worker}:{self._number}",
            worker=info.worker,
            hour_s=hour_of(report.since_s),
            since_s=report.since_s,
            reported_at_s=report.until_s,
            started_at_s=self._times.started_at_s,
            region=info.region,
            deployment="+".join(names),
            models=",".join(dict.fromkeys(model.public_name for model in self._models)),
            gpu_type=info.gpu_type,
            spot=info.spot,
            device=info.device or None,
            device_share=device_share_of(self._models[0]),
            processes=self._times.processes,
            busy_s=report.seconds["busy"],
            idle_s=report.seconds["idle"],
            loading_s=report.seconds["loading"],
            batches=report.batches,
            items=report.items,
            cold_starts=report.loads,
        )


class _State(NamedTuple):
    """Replaced as a whole, so that other threads never see a partial update."""

    at_s: float
    running: float
    """Fraction of the processes that are running a batch. A batch with both priorities is divided
    between them.
    """
    average: float

    def average_at(self, now_s: float) -> float:
        """Returns the average, including the time since the last change."""
        fade = math.exp(-max(0.0, now_s - self.at_s) / FADE_S)
        return self.running + (self.average - self.running) * fade


class BusyRatio:
    """Fraction of the model processes' capacity in use, by priority.

    A batch counts while it is still running, so minute-long batches show up right away. If more
    items could have joined the batch at no extra cost, its process later reports the spare time.

    Args:
        processes: the number of model processes.
    """

    def __init__(self, processes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._clock = clock
        self._batches = 0
        self._of = {priority: _State(clock(), 0.0, 0.0) for priority in PRIORITIES}

    def publish(self) -> None:
        """Exposes the ratios to scrapes from now on. None are exposed until the first call."""
        for priority in PRIORITIES:
            BUSY_RATIO.labels(priority).set_function(partial(self.read, priority))

    def start(self, priorities: Iterable[Priority]) -> dict[Priority, float]:
        """Records the start of a batch.

        Takes one priority per item and returns the input for `end`.
        """
        item_priorities = list(priorities)
        parts: dict[Priority, float] = {
            priority: item_priorities.count(priority) / len(item_priorities) / self._processes
            for priority in PRIORITIES
        }
        self._batches += 1
        self._add(parts, 1)
        return parts

    def end(self, parts: dict[Priority, float]) -> None:
        """Records the end of the batch for which `start` returned these parts."""
        self._batches -= 1
        self._add(parts, -1)

    def spare(self, parts: dict[Priority, float], seconds: float) -> None:
        """Records how many of a batch's last seconds were spare."""
        now_s = self._clock()
        for priority, part in parts.items():
            state = self._of[priority]
            average = max(0.0, state.average_at(now_s) - seconds * part / FADE_S)
            self._of[priority] = _State(now_s, state.running, average)

    def read(self, priority: Priority) -> float:
        """Returns the ratio over roughly the last minute, from 0 to 1."""
        return round(self._of[priority].average_at(self._clock()), DIGITS)

    def _add(self, parts: dict[Priority, float], sign: int) -> None:
        now_s = self._clock()
        for priority, part in parts.items():
            state = self._of[priority]
            # Clears rounding errors once the last batch ends.
            running = max(0.0, state.running + sign * part) if self._batches else 0.0
            self._of[priority] = _State(now_s, running, state.average_at(now_s))
