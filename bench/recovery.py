"""How long callers wait when a model process or a worker dies.

Callers do not retry. docs/measurements/recovery.md describes what other servers do when their model
process is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.report import Figure, Outcome, expect_none
from tests.faults.world import MODEL, World

IN_FLIGHT = 16
CALM_S, AFTER_S = 2.0, 16.0
ROUNDS = 3
TEXT = "The quick brown fox jumps over the lazy dog, number {0}, " * 4


@dataclass(frozen=True)
class TimedCall:
    """One request, with its start and end (monotonic seconds), and status (0 means no response)."""

    began_s: float
    ended_s: float
    status: int


def run() -> Outcome:
    """Kills each kind of component ROUNDS times, and measures how long callers had to wait."""
    figures, details = [], {}
    for name, backend, workers, processes, kill, limit_s in _CASES:
        waits_s, failed, starts_s = [], 0, []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory(prefix="penstock-recovery-") as folder:
                began_s = time.monotonic()
                with World(
                    Path(folder), workers=workers, processes=processes, backend=backend
                ) as world:
                    starts_s.append(time.monotonic() - began_s)
                    killed_s, calls = asyncio.run(_measure(world, kill))
            hit = [call for call in calls if call.began_s <= killed_s < call.ended_s]
            waits_s.append(max(call.ended_s - killed_s for call in hit))
            failed += sum(call.status != 200 for call in calls)
        figures.append(
            Figure(f"{name}: longest wait", statistics.median(waits_s), "s", "<=", limit_s)
        )
        figures.append(expect_none(f"{name}: requests that failed", failed))
        details[name] = {"longest_wait_s": [round(wait_s, 2) for wait_s in waits_s]}
    return Outcome(figures, details)


async def _measure(world: World, kill: Callable[[World], Any]) -> tuple[float, list[TimedCall]]:
    calls: list[TimedCall] = []
    numbers, over = itertools.count(), asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def call() -> None:
            while not over.is_set():
                began_s = time.monotonic()
                body = {"model": MODEL, "input": TEXT.format(next(numbers))}
                try:
                    async with session.post(
                        f"{world.url('api-0')}/v1/embeddings", json=body
                    ) as response:
                        await response.read()
                        status = response.status
                except (aiohttp.ClientError, TimeoutError):
                    status = 0
                calls.append(TimedCall(began_s, time.monotonic(), status))

        callers = [asyncio.create_task(call()) for _ in range(IN_FLIGHT)]
        await asyncio.sleep(CALM_S)
        killed_s = time.monotonic()
        kill(world)
        await asyncio.sleep(AFTER_S)
        over.set()
        await asyncio.gather(*callers)
    return killed_s, calls


def _kill_model_process(world: World) -> None:
    assert world.kill_model_process("worker-0"), "a worker has a model process; this is a bug"


def _kill_worker(world: World) -> None:
    world.processes["worker-0"].kill()


_CASES: tuple[tuple[str, str, int, int, Callable[[World], None], float], ...] = (
    ("model process killed, another up", "onnx", 1, 2, _kill_model_process, 1.0),
    ("model process killed, the only one", "onnx", 1, 1, _kill_model_process, 2.0),
    ("model process killed, the only one, torch", "torch", 1, 1, _kill_model_process, 2.0),
    ("worker killed, another up", "onnx", 2, 1, _kill_worker, 12.0),
)
