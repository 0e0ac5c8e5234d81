"""Times the phases of this worker's start, and writes them as a row.

The node and image phases end before the worker process starts. Workers may not call the Kubernetes
API, because custom classes run in the same pod. Workers read the time at which the kubelet created
a downward API volume instead, which it does just before it pulls images.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

from shared.models.catalog import Model
from shared.usage.worker_start import WorkerStart
from workers.identity import WorkerInfo
from workers.models.reports import BatchResult

Phase = Literal["weights", "backend", "load", "compile", "ready", "first_batch"]

POD_INFO = Path("/etc/pod-info")
"""Mount path of a downward API volume (infra/kubernetes/worker/deployment.yaml)."""
NODE_IS_NEW_S = 600.0
"""A node that had been running for longer when the pod came wasn't started for the pod."""


class StartSink(Protocol):
    """Accepts `worker_starts` rows. Never blocks and never raises."""

    def write_report(self, row: WorkerStart) -> None:
        """Writes one row in the background."""


class PodTimes(NamedTuple):
    """The phases before the worker process started, in seconds. None if not measured."""

    node_s: float | None = None
    image_s: float | None = None


def process_started_at_s(proc: Path = Path("/proc")) -> float:
    """Returns when this process started, in Unix seconds, or the current time if unknown."""
    try:
        ticks = (proc / "self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        up_s = float((proc / "uptime").read_text(encoding="ascii").split()[0])
    except (OSError, IndexError, ValueError):
        return time.time()
    return time.time() - up_s + int(ticks) / os.sysconf("SC_CLK_TCK")


def read_pod_times(
    started_at_s: float, seen: Path, pod_info: Path = POD_INFO, proc: Path = Path("/proc")
) -> PodTimes:
    """Returns how long the node and the image took, for the pod's first worker process.

    Args:
        seen: a file that outlives this container but not the pod. The pod's first worker process
            creates it.
    """
    try:
        mounted_at_s = (pod_info / "..data").stat().st_mtime
        lines = (proc / "stat").read_text(encoding="ascii").splitlines()
        booted_at_s = float(next(line.split()[1] for line in lines if line.startswith("btime ")))
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.open("x").close()
    except (OSError, StopIteration, ValueError):
        return PodTimes()
    node_s = mounted_at_s - booted_at_s
    return PodTimes(
        node_s if 0 <= node_s <= NODE_IS_NEW_S else None, max(0.0, started_at_s - mounted_at_s)
    )


@dataclass
class StartReport:
    """One start. A context manager, which writes the row on exit if no batch was computed.

    Args:
        info: worker facts. `device` and the fields that depend on it are unknown at first.
        clock: returns Unix seconds.
    """

    info: WorkerInfo
    models: Sequence[Model]
    sink: StartSink
    started_at_s: float
    pod: PodTimes
    clock: Callable[[], float]
    _took_s: dict[Phase, float] = field(default_factory=dict)
    _is_written: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write()

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Adds the time spent in the block to a phase, unless the block fails."""
        began_s = self.clock()
        yield
        self.add(phase, self.clock() - began_s)

    def add(self, phase: Phase, seconds: float) -> None:
        self._took_s[phase] = self._took_s.get(phase, 0.0) + seconds

    def note_compiled(self, seconds: float) -> None:
        """Records how much of the load phase was spent on compiling."""
        self.add("compile", seconds)
        self.add("load", -seconds)

    def note_ready(self) -> dict[str, float]:
        """Records that the worker asks for jobs now. Returns the phases so far, for the log."""
        self.add("ready", self.clock() - self.started_at_s)
        return {f"{phase}_s": round(seconds, 3) for phase, seconds in self._took_s.items()}

    def batch_ended(self, done: BatchResult) -> None:
        """Records the first batch, and writes the row. Does nothing after any other batch."""
        if not self._is_written:
            self.add("first_batch", done.finished_at_s - done.started_at_s)
            self._write()

    def _write(self) -> None:
        if self._is_written:
            return
        self._is_written = True
        info, took_s = self.info, self._took_s
        self.sink.write_report(
            WorkerStart(
                row_id=info.worker,
                worker=info.worker,
                started_at_s=self.started_at_s,
                reported_at_s=self.clock(),
                region=info.region,
                deployment="+".join(model.name for model in self.models),
                models=",".join(dict.fromkeys(model.public_name for model in self.models)),
                gpu_type=info.gpu_type,
                spot=info.spot,
                device=info.device or None,
                node_s=self.pod.node_s,
                image_s=self.pod.image_s,
                weights_s=took_s.get("weights"),
                backend_s=took_s.get("backend"),
                load_s=took_s.get("load"),
                compile_s=took_s.get("compile"),
                ready_s=took_s.get("ready"),
                first_batch_s=took_s.get("first_batch"),
            )
        )
