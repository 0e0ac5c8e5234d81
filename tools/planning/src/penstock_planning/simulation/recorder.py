"""Records a run: the ending of each request, and series over time."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class RequestEnd(Enum):
    """The ending of a request. Every request ends once."""

    SERVED = "served"
    REFUSED = "refused"
    """429: no room, or the answer would be late."""
    EXPIRED = "expired"
    """504: its deadline passed."""
    LOST = "lost"
    """Its region was lost while it waited."""
    OPEN = "open"
    """It was in flight when the scenario ended."""


@dataclass
class ModelRecord:
    """The requests of one model."""

    arrived: int = 0
    outcomes: Counter[RequestEnd] = field(default_factory=Counter)
    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    """Arrival times of served requests."""
    answer_s: array[float] = field(default_factory=lambda: array("d"))
    """Seconds until the answer."""
    queue_s: array[float] = field(default_factory=lambda: array("d"))
    """Seconds until the batch began."""
    ended_s: array[float] = field(default_factory=lambda: array("d"))
    """End times of requests that were not served."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one model in one region at a time."""

    at_s: float
    model: str
    region: str
    replicas: int
    """Replicas, as the autoscaler set them."""
    ready: int
    busy: int
    in_flight: int
    """Items in the API of this region that wait for an answer."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The nodes of one class in one region at a time."""

    at_s: float
    gpu_class: str
    region: str
    nodes: int
    busy: int


class Recorder:
    """Collects what happens. Only the simulation writes to it."""

    def __init__(self, models: tuple[str, ...], flows: tuple[str, ...] = ()) -> None:
        self.models = {model: ModelRecord() for model in models}
        self.runs = {flow: ModelRecord() for flow in flows}
        """Runs of flows. One of which a step is not served has no outcome."""
        self.samples: list[Sample] = []
        self.gpu_samples: list[GpuSample] = []
        self.worker_busy_s = 0.0
        self.worker_work_s = 0.0
        self.worker_ready_s = 0.0
        self.alerted_s: list[float] = []
        """Times at which the alert on failed GPUs began to fire."""
        self.lost_workers: Counter[str] = Counter()
        """Workers that ended, by reason."""
