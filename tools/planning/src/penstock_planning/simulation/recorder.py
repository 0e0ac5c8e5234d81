"""Records a run: each request's outcome, and series over time."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class RequestEnd(Enum):
    """A request's outcome. Every request has exactly one outcome."""

    SERVED = "served"
    REFUSED = "refused"
    """429: there is no capacity, or the response would be late."""
    EXPIRED = "expired"
    """504: its deadline passed."""
    LOST = "lost"
    """The request's region was lost while it was waiting."""
    OPEN = "open"
    """The request was still in flight when the scenario ended."""


@dataclass
class ModelRecord:
    """The requests for one model."""

    arrived: int = 0
    outcomes: Counter[RequestEnd] = field(default_factory=Counter)
    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    """Arrival times of served requests."""
    answer_s: array[float] = field(default_factory=lambda: array("d"))
    """Seconds until the response."""
    queue_s: array[float] = field(default_factory=lambda: array("d"))
    """Seconds until the request's batch started."""
    ended_s: array[float] = field(default_factory=lambda: array("d"))
    """End times of requests that were not served."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A model's state in one region at one time."""

    at_s: float
    model: str
    region: str
    replicas: int
    """Replicas set by the autoscaler."""
    ready: int
    busy: int
    in_flight: int
    """Items waiting for a response in this region's API."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A class's nodes in one region at one time."""

    at_s: float
    gpu_class: str
    region: str
    nodes: int
    busy: int


class Recorder:
    """Collects events. Only the simulation writes to it."""

    def __init__(self, models: tuple[str, ...], flows: tuple[str, ...] = ()) -> None:
        self.models = {model: ModelRecord() for model in models}
        self.runs = {flow: ModelRecord() for flow in flows}
        """Runs of flows. A run has no outcome if one of its steps is not served."""
        self.samples: list[Sample] = []
        self.gpu_samples: list[GpuSample] = []
        self.worker_busy_s = 0.0
        self.worker_work_s = 0.0
        self.worker_ready_s = 0.0
        self.alerted_s: list[float] = []
        """Times at which the failed GPU alert started firing."""
        self.lost_workers: Counter[str] = Counter()
        """Workers that terminated, by reason."""
