"""Time, memory and CPU of one way to run a class."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import psutil

from bench.class_runners.outcome import ClassRunner, Request, RequestFile

WARM_UP, REQUESTS, FILES = 20, 300, 60
FILE_BYTES = 1_000_000
IDLE_S = 10.0
SYNC = """
from typing import Iterator
from cog import BasePredictor

class Predictor(BasePredictor):
    def predict(self) -> str:
        return ""
"""
ASYNC = SYNC.replace("    def predict", "    async def predict")
STREAM = SYNC.replace("-> str", "-> Iterator[str]").replace('return ""', 'yield ""')
FILE = """
from cog import BasePredictor, Path

class Predictor(BasePredictor):
    def predict(self, file: Path) -> Path:
        copy = Path("/tmp/figures-copy.bin")
        copy.write_bytes(file.read_bytes())
        return copy
"""
Starts = Callable[[str], Awaitable[tuple[ClassRunner, float]]]
"""Starts a class by its source. Returns it, and the seconds until it was set up."""


class Measured(NamedTuple):
    """One figure."""

    name: str
    value: float
    unit: str


async def measure(start: Starts) -> list[Measured]:
    """Measures one way to run a class."""
    return [
        *await _small_requests(start, SYNC, "sync"),
        *await _small_requests(start, ASYNC, "async"),
        *await _first_pieces(start),
        *await _files(start),
    ]


async def _small_requests(start: Starts, source: str, kind: str) -> Iterable[Measured]:
    runner, start_s = await start(source)
    try:
        await _repeat(runner, Request({}), WARM_UP)
        before = _cpu_s(runner), time.process_time()
        times_s = await _repeat(runner, Request({}), REQUESTS)
        after = _cpu_s(runner), time.process_time()
        idle_before = _cpu_s(runner), time.process_time()
        await asyncio.sleep(IDLE_S)
        idle_after = _cpu_s(runner), time.process_time()
        own, here = (1000 * (b - a) / REQUESTS for a, b in zip(before, after, strict=True))
        idle_s = sum(b - a for a, b in zip(idle_before, idle_after, strict=True))
        return [
            Measured(f"start until set up, {kind}", start_s, "s"),
            Measured(f"round trip of an empty prediction, {kind}", _median_ms(times_s), "ms"),
            Measured(f"CPU per request in the class's process, {kind}", own, "ms"),
            Measured(f"CPU per request in the parent, {kind}", here, "ms"),
            Measured(f"CPU while idle, both processes, {kind}", 100 * idle_s / IDLE_S, "%"),
            Measured(f"memory of the class's process, {kind}", _memory_mb(runner), "MB"),
        ]
    finally:
        await runner.stop()


async def _first_pieces(start: Starts) -> Iterable[Measured]:
    runner, _ = await start(STREAM)
    try:
        await _repeat(runner, Request({}), WARM_UP)
        times_s = [(await runner.predict(Request({}))).pieces_s[0] for _ in range(REQUESTS)]
        return [Measured("time to the first piece", _median_ms(times_s), "ms")]
    finally:
        await runner.stop()


async def _files(start: Starts) -> Iterable[Measured]:
    runner, _ = await start(FILE)
    request = Request({"file": None}, [RequestFile(["file"], "in.bin", bytes(FILE_BYTES))])
    try:
        await _repeat(runner, request, 3)
        times_s = await _repeat(runner, request, FILES)
        return [Measured("items/s with 1 MB in and 1 MB out", FILES / sum(times_s), "/s")]
    finally:
        await runner.stop()


async def _repeat(runner: ClassRunner, request: Request, count: int) -> list[float]:
    """Computes one after another. Returns the seconds of each.

    Raises:
        RuntimeError: one did not succeed.
    """
    times_s = []
    for _ in range(count):
        outcome = await runner.predict(request)
        if outcome.status != "succeeded":
            raise RuntimeError(str(outcome)[:300])
        times_s.append(outcome.seconds)
    return times_s


def _median_ms(times_s: list[float]) -> float:
    return 1000 * statistics.median(times_s)


def _tree(runner: ClassRunner) -> list[psutil.Process]:
    roots = [psutil.Process(pid) for pid in runner.pids]
    return roots + [child for root in roots for child in root.children(recursive=True)]


def _cpu_s(runner: ClassRunner) -> float:
    times = [process.cpu_times() for process in _tree(runner)]
    return sum(one.user + one.system for one in times)


def _memory_mb(runner: ClassRunner) -> float:
    """Proportional set size, in MB: shared pages count in part."""
    return sum(process.memory_full_info().pss for process in _tree(runner)) / 1e6
