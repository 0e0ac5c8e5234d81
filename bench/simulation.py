"""The simulator compared with the real stack, with the same arrivals: answer times and goodput.

Workers with one process of one thread each generate images. What a batch takes is measured first,
as docs/explanation/simulation.md has users measure theirs. Then requests come at the times of
a trace, which the simulator gets too, while workers are added and killed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import msgspec
import numpy as np
import yaml

from bench.load.generator import LoadOrder, drive
from bench.pipeline import samples_of
from bench.report import Figure, Outcome
from infra.local.ports import Ports
from infra.local.process import Process, answers, free_port
from infra.local.stack import PREPARE_LIMIT_S, Stack
from infra.local.stack_processes import WORKER_STOP_LIMIT_S
from infra.planning.simulation.scenario import scenario_of
from infra.planning.simulation.world import simulate
from shared.settings import environment_with

MODEL = "stable-diffusion-tiny"
SEND_S = 90.0
CHANGE_S = 30.0
"""Times at which a worker is added or killed."""
CALIBRATION_S = 15.0
IN_FLIGHT = (1, 16)
"""Requests in flight during calibration: batches of one, and full ones."""
LIMIT_S = 60.0
"""Time limit of an answer: the model's own deadline."""
P95_WITHIN, GOODPUT_WITHIN = 0.20, 0.05
SEED = 16


@dataclass(frozen=True)
class Case:
    """One scenario: workers at the start and later, and the load of the first ones."""

    name: str
    workers: int
    then: int
    load: float
    """Load as a share of the initial workers' capacity with batches of one."""


CASES = (
    Case("one worker", 1, 1, 0.6),
    Case("two workers", 2, 2, 0.45),
    Case("one worker, one added", 1, 2, 0.8),
    Case("two workers, one killed", 2, 1, 0.3),
)


class BatchSeconds(NamedTuple):
    """Measurements of one worker: seconds of a batch, and those that a request adds to it."""

    fixed_s: float
    item_s: float
    trip_s: float


class Times(NamedTuple):
    """The callers' view of a run."""

    p50_s: float
    p95_s: float
    goodput_per_s: float


def run() -> Outcome:
    """Measures what batches take, then each case in the real stack and in the simulator."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        for case in CASES:
            folder = Path(name) / case.name.replace(" ", "-")
            folder.mkdir()
            with _stack(folder) as stack:
                batches = _measured(stack)
                per_s = case.load * case.workers / (batches.fixed_s + batches.item_s)
                real, change_s = _real(stack, case, per_s)
            simulated = _simulated(case, batches, per_s, change_s, folder)
            details[case.name] = {
                "batches": batches._asdict(),
                "arrivals_per_s": per_s,
                "real": real._asdict(),
                "simulated": simulated._asdict(),
            }
            figures += _figures(case, real, simulated)
    return Outcome(figures, details)


def _figures(case: Case, real: Times, simulated: Times) -> list[Figure]:
    def off(field: str) -> float:
        simulated_value, real_value = getattr(simulated, field), getattr(real, field)
        return float(100 * abs(simulated_value / real_value - 1))

    return [
        Figure(f"{case.name}: p50 of the stack", 1000 * real.p50_s, "ms"),
        Figure(f"{case.name}: p50 off", off("p50_s"), "%"),
        Figure(f"{case.name}: p95 of the stack", 1000 * real.p95_s, "ms"),
        Figure(f"{case.name}: p95 off", off("p95_s"), "%", "<=", 100 * P95_WITHIN),
        Figure(f"{case.name}: goodput off", off("goodput_per_s"), "%", "<=", 100 * GOODPUT_WITHIN),
    ]


# The real stack


@contextmanager
def _stack(folder: Path) -> Iterator[Stack]:
    models = folder / "models.yaml"
    models.write_text(yaml.safe_dump({"models": [_entry()]}), encoding="utf-8")
    settings = {
        "PENSTOCK_MODELS_FILE": str(models),
        "PENSTOCK_PROCESSES": "1",
        "PENSTOCK_THREADS": "1",
    }
    with Stack(folder, ports=Ports.free(), settings=settings) as stack:
        yield stack


def _entry(**changes: Any) -> dict[str, Any]:
    """The shipped model's entry of the catalog."""
    shipped = yaml.safe_load(Path("models.yaml").read_text(encoding="utf-8"))["models"]
    return next(dict(one) for one in shipped if one["name"] == MODEL) | changes


def _measured(stack: Stack) -> BatchSeconds:
    """Returns the seconds of batches of one item and of many, by the worker's own metrics."""
    health = stack.ports.health[0]
    figures = []
    for in_flight in IN_FLIGHT:
        before = _metrics(health)
        bodies = _bodies("measured", 1000)
        report = drive(_order(stack, bodies, in_flight=in_flight, send_s=CALIBRATION_S))
        if report.failures:
            raise RuntimeError(f"not answered: {report.failures}")
        after = _metrics(health)
        spent_s, batches, items = (
            after[name] - before[name]
            for name in (
                "penstock_worker_inference_seconds_sum",
                "penstock_worker_inference_seconds_count",
                "penstock_worker_batch_items_sum",
            )
        )
        mean_s = sum(report.round_trip_ms) / len(report.round_trip_ms) / 1000
        figures.append((items / batches, spent_s / batches, mean_s))
    (items_1, batch_1_s, trip_1_s), (items_n, batch_n_s, _) = figures
    item_s = (batch_n_s - batch_1_s) / (items_n - items_1)
    fixed_s = max(0.0, batch_1_s - item_s * items_1)
    return BatchSeconds(fixed_s, item_s, max(0.0, trip_1_s - batch_1_s))


def _metrics(port: int) -> dict[str, float]:
    """The sums over the labels of a worker's metrics, by name."""
    seconds = defaultdict[str, float](float)
    for sample in samples_of(port):
        seconds[sample.name] += sample.value
    return dict(seconds)


def _real(stack: Stack, case: Case, per_s: float) -> tuple[Times, float]:
    """Returns the callers' view, and the seconds from the first request to each worker change."""
    with ExitStack() as undo:
        others = [_another_worker(stack, undo) for _ in range(max(case.workers, case.then) - 1)]
        for worker in others[: case.workers - 1]:
            worker.start()
        change = _Change(case, others[-1] if others else None)
        bodies = _bodies(case.name, round(per_s * SEND_S * 1.5) + 50)
        with change:
            order = _order(stack, bodies, rate_per_s=per_s, send_s=SEND_S, seed=SEED)
            report = drive(order)
    seconds = np.asarray(report.round_trip_ms) / 1000
    p50_s, p95_s = np.percentile(seconds, (50, 95))
    return Times(float(p50_s), float(p95_s), len(seconds) / SEND_S), change.at_s


class _Worker:
    """One more worker of a stack."""

    def __init__(self, process: Process, port: int) -> None:
        self._process, self._port = process, port

    def start(self) -> None:
        """Starts it, and returns once it pulls jobs."""
        self._process.start()
        self._process.wait_ready(partial(answers, self._port, "/readyz"), PREPARE_LIMIT_S)

    def kill(self) -> None:
        """Kills it like a crash."""
        self._process.kill()


def _another_worker(stack: Stack, undo: ExitStack) -> _Worker:
    port = free_port()
    own = {"PENSTOCK_MODEL": MODEL, "PENSTOCK_HEALTH_PORT": str(port)}
    process = Process(
        f"worker-{port}",
        [sys.executable, "-m", "workers"],
        stack.log_dir,
        environment=environment_with(stack.environment | own),
        stop_limit_s=WORKER_STOP_LIMIT_S,
    )
    undo.callback(process.stop)
    return _Worker(process, port)


class _Change:
    """Adds or kills a worker while the block runs, and notes when."""

    def __init__(self, case: Case, worker: _Worker | None) -> None:
        self.at_s = 0.0
        act = None
        if worker is not None and case.then != case.workers:
            act = worker.start if case.then > case.workers else worker.kill
        self._act = act
        self._began_s = 0.0
        self._timer = Timer(CHANGE_S, self._change)

    def __enter__(self) -> None:
        self._began_s = time.monotonic()
        if self._act is not None:
            self._timer.start()

    def __exit__(self, *raised: object) -> None:
        if self._act is not None:
            self._timer.join()

    def _change(self) -> None:
        assert self._act is not None, "the timer was started for it"
        self._act()
        self.at_s = time.monotonic() - self._began_s


def _order(stack: Stack, bodies: Sequence[str], **options: Any) -> LoadOrder:
    return LoadOrder(
        stack.ports.api,
        list(bodies),
        path="/v1/images/generations",
        **{"in_flight": 1000, "limit_s": LIMIT_S} | options,
    )


def _bodies(word: str, count: int) -> list[str]:
    """Requests of one image each, none of which was requested before."""
    asked = {"model": MODEL, "size": "64x64", "response_format": "b64_json"}
    prompts = (f"a red circle, {word} {time.time_ns()} {number}" for number in range(count))
    return [msgspec.json.encode(asked | {"prompt": prompt}).decode() for prompt in prompts]


# The simulator


def _simulated(
    case: Case, batches: BatchSeconds, per_s: float, change_s: float, folder: Path
) -> Times:
    events = []
    if case.then != case.workers:
        events.append(
            {
                "kind": "set_replicas",
                "at_s": change_s,
                "model": MODEL,
                "count": case.then,
                "is_kill": case.then < case.workers,
            }
        )
    trace = folder / "trace.csv"
    trace.write_text("at_s\n" + "\n".join(map(str, _arrivals(per_s))) + "\n", encoding="utf-8")
    replicas = {"min": case.workers, "max": case.workers}
    load = {
        "arrivals": [{"kind": "trace", "file": trace}],
        "seconds_per_item": batches.item_s,
        "fixed_s": batches.fixed_s,
        "measured": "the stack of this benchmark, this run",
        "start_replicas": case.workers,
    }
    result = simulate(
        scenario_of(
            {
                "duration_s": SEND_S + LIMIT_S,
                "seed": SEED,
                "catalog": [_entry(replicas=replicas, gpu={"type": "l4", "share": 1})],
                "models": {MODEL: load},
                # Both workers' places are there, and what is added is warm when it comes.
                "cluster": {"buffer": 1, "pod_start_s": 0, "node_start_s": 0, "spot": False},
                "api": {"max_instances": 1, "trip_s": batches.trip_s},
                "events": events,
            }
        )
    )
    (summary,) = result.summary.models
    return Times(summary.p50_s or 0.0, summary.p95_s or 0.0, summary.served / SEND_S)


def _arrivals(per_s: float) -> list[float]:
    """The times at which the load generator sends."""
    gaps, due_s, waits_s = random.Random(SEED), 0.0, list[float]()
    while (due_s := due_s + gaps.expovariate(per_s)) <= SEND_S:
        waits_s.append(due_s)
    return waits_s
