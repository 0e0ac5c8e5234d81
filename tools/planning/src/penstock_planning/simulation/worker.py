"""Nodes, and the workers on them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from typing import Any

import simpy

from penstock_planning.simulation.api_site import SimulatedJob
from shared.models.service_rate import HeldAhead, StepTime

BUSY_FADE_S = 30.0
"""Equals FADE_S of workers/metrics.py."""

Steps = Generator[simpy.Event, Any, None]
"""A process in the simulation."""


@dataclass(slots=True)
class Inside:
    """State of a batch that admits items between steps (continuous batching)."""

    time: StepTime
    """The worker's estimate of its step times."""
    share_s: float = 0.0
    """Worker seconds received by an item that has been in the batch since it started."""
    spare_s: float = 0.0
    """The spare part of share_s."""
    spare_part: float = 0.0
    """Fraction of each second that currently counts as spare."""
    work_part: float = 0.0
    """Fraction of each second in which a full worker would do the same work."""
    steps_per_s: float = 0.0
    """0 while a prompt is being read."""


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A whole batch computed by one process of a worker."""

    worker: SimulatedWorker
    jobs: list[SimulatedJob]
    took_s: float
    batch_share: float
    """Share of the batch's items that have `batch` priority."""
    counted_s: float
    """Time up to which the worker has counted the batch's work."""


class Node:
    """A machine with one GPU, time-shared by `places` workers."""

    __slots__ = (
        "busy",
        "busy_s",
        "has_failed",
        "is_cordoned",
        "is_ready",
        "is_spot",
        "name",
        "ordered_s",
        "places",
        "since_s",
        "workers",
    )

    def __init__(self, name: str, places: int, is_spot: bool) -> None:
        self.name = name
        self.places = places
        self.is_spot = is_spot
        self.is_ready = self.has_failed = self.is_cordoned = False
        """Pods can start on the node; its GPU has failed; it was cordoned because of the failure.
        """
        self.workers: list[SimulatedWorker] = []
        self.busy = 0
        """Number of the node's workers that are currently computing."""
        self.busy_s = 0.0
        """Seconds during which at least one of the node's workers was computing."""
        self.ordered_s = 0.0
        self.since_s = 0.0
        """Start of the current state, either idle or computing."""

    @property
    def free(self) -> int:
        return self.places - len(self.workers)


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A pod, which pulls jobs up to its flow control limit and computes them in batches."""

    name: str
    region: str
    model: str
    _: KW_ONLY
    processes: int
    """Number of model processes. If a pod has several processes, each has its own CPU."""
    placed: simpy.Event
    """Event that fires when the worker has a place on a node."""
    is_spread: bool
    on_evict: InitVar[Callable[[SimulatedWorker, str], None]]
    on_lost_gpu: InitVar[Callable[[SimulatedWorker, float], None]]
    evict: Callable[[str], None] = field(init=False)
    """Notifies its Deployment that its node is going away, with the reason."""
    lose_gpu: Callable[[float], None] = field(init=False)
    """Notifies the worker's Deployment that its GPU failed, and when the worker will leave."""
    lost_gpus: int = 0
    node: Node | None = None
    is_ready: bool = False
    is_draining: bool = False
    is_gone: bool = False
    is_new: bool = True
    """True if it runs its Deployment's newest version."""
    ready_s: float = -1.0
    held: tuple[deque[SimulatedJob], deque[SimulatedJob]] = field(
        default_factory=lambda: (deque(), deque())
    )
    """Jobs waiting here, by priority: interactive, batch."""
    held_jobs: list[int] = field(default_factory=lambda: [0, 0])
    """Jobs by priority: those waiting or running here, and those whose acks are in transit."""
    prepared_s: float = 0.0
    """When its I/O process has prepared all jobs that it holds."""
    most_held: list[int] = field(default_factory=lambda: [0, 0])
    """Maximum number of jobs it holds in each priority."""
    ahead: tuple[HeldAhead, HeldAhead] = field(default_factory=lambda: (HeldAhead(), HeldAhead()))
    """Its measurements, by priority."""
    running: list[SimulatedJob] = field(default_factory=list)
    computing: list[RunningBatch] = field(default_factory=list)
    """Running whole batches, at most one per process."""
    started_s: float = 0.0
    batch_done: simpy.Event | None = None
    drained: simpy.Event | None = None
    open_at: int = -1
    """The worker's index among the workers with room."""
    parts: tuple[SimulatedWorker, ...] = ()
    """For a pod with several models, one part per model.

    All data except the counters belongs to the pod.
    """
    others: tuple[SimulatedWorker, ...] = ()
    """For one of these parts: the other parts that it takes turns with."""
    take_turn: Callable[[], None] | None = None
    """For one of these parts: runs it if possible."""
    inside: Inside | None = None
    """Set if the worker admits items between steps."""
    step_time: StepTime | None = None
    """The worker's estimate of its step times, available after its first step."""
    inference_s: float = 0.0
    spare_s: float = 0.0
    items: int = 0
    """A counter in the worker's metrics, like `batches`."""
    batches: int = 0
    busy_s: float = 0.0
    """Seconds during which it was computing."""
    work_s: float = 0.0
    """Seconds that a full worker would have taken to do the same work."""
    busy_parts: tuple[float, float] = (0.0, 0.0)
    """Each priority's share of the current computation."""
    busy_average: tuple[float, float] = (0.0, 0.0)
    busy_since_s: float = 0.0

    def __post_init__(
        self,
        on_evict: Callable[[SimulatedWorker, str], None],
        on_lost_gpu: Callable[[SimulatedWorker, float], None],
    ) -> None:
        self.evict = partial(on_evict, self)
        self.lose_gpu = partial(on_lost_gpu, self)

    def has_room(self, priority: int) -> bool:
        """Returns whether the worker's flow control accepts another job."""
        return self.held_jobs[priority] < self.most_held[priority]

    def occupy(self, now_s: float) -> None:
        node = self.node
        assert node is not None
        if node.busy == 0:
            node.since_s = now_s
        node.busy += 1

    def vacate(self, now_s: float) -> None:
        node = self.node
        assert node is not None
        node.busy -= 1
        if node.busy == 0:
            node.busy_s += now_s - node.since_s
        self.set_busy((0.0, 0.0), now_s)

    @property
    def has_free_process(self) -> bool:
        """Returns whether a process could start a whole batch while others are computing."""
        return 0 < len(self.computing) < self.processes

    @property
    def is_computing(self) -> bool:
        """Returns whether the worker or one of its parts is computing."""
        return bool(self.running) or any(part.running for part in self.parts)

    @property
    def waits_for_turn(self) -> bool:
        """Returns whether the worker's pod is computing for another model."""
        return any(part.running for part in self.others)

    def settle(self, now_s: float) -> None:
        """Counts the work done so far in its current computation."""
        if self.parts:
            for part in self.parts:
                part.settle(now_s)
            self.busy_s = sum(part.busy_s for part in self.parts)
            self.work_s = sum(part.work_s for part in self.parts)
            return
        if self.inside is not None:
            passed_s, self.started_s = now_s - self.started_s, now_s
            self.busy_s += passed_s
            self.work_s += passed_s * self.inside.work_part
        for batch in self.computing:
            self.count(batch, now_s)

    def count(self, batch: RunningBatch, now_s: float) -> None:
        """Counts one process's work on a batch, as a fraction of the worker."""
        part_s = (now_s - batch.counted_s) / self.processes
        batch.counted_s = now_s
        self.busy_s += part_s
        self.work_s += part_s

    def set_busy_of_batches(self, now_s: float) -> None:
        """Sets the worker's load based on the batches that its processes are computing."""
        share = sum(batch.batch_share for batch in self.computing) / self.processes
        self.set_busy((len(self.computing) / self.processes - share, share), now_s)

    def compute_slowdown(self, kept_when_sharing: float) -> float:
        """Returns the current slowdown factor caused by other workers on the same GPU."""
        node = self.node
        assert node is not None
        return 1.0 if node.busy <= 1 else node.busy / kept_when_sharing

    def set_busy(self, parts: tuple[float, float], now_s: float) -> None:
        """Sets the worker's load per priority, in fractions of a full worker; (0, 0) while idle."""
        self.busy_average = self.busy_ratio(now_s)
        self.busy_since_s, self.busy_parts = now_s, parts

    def busy_ratio(self, now_s: float) -> tuple[float, float]:
        """Returns the value of penstock_worker_busy_ratio for each priority."""
        fade = math.exp((self.busy_since_s - now_s) / BUSY_FADE_S)
        (interactive, batch), (old, old_batch) = self.busy_parts, self.busy_average
        return interactive + (old - interactive) * fade, batch + (old_batch - batch) * fade

    @property
    def has_gpu(self) -> bool:
        return self.node is None or not self.node.has_failed

    @property
    def is_serving(self) -> bool:
        return self.is_ready and not self.is_draining and not self.is_gone
